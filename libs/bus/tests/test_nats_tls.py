"""NATS behind TLS: services, clients and tunnels trust only the configured authority."""

import asyncio
import contextlib
import json

import pytest
from wooly_bus import contracts
from wooly_bus.access import Access
from wooly_bus.app import ServiceApp
from wooly_bus.authority import make_authority
from wooly_bus.channel import ChannelTlsError
from wooly_bus.channel.tunnel import TunnelListener, open_tunnel
from wooly_bus.errors import BusConnectError
from wooly_bus.rpc import ControlClient
from wooly_testkit.certificates import make_certificates
from wooly_testkit.nats import nats_server
from wooly_wis.messages import NodesReply, NodesRequest


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("tls"), "localhost")


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return make_authority(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def url(files, authority, tmp_path_factory):
    """A server with TLS that asks for credentials."""
    config = tmp_path_factory.mktemp("nats") / "nats.conf"
    tls = f"tls {{ cert_file: '{files.certificate}', key_file: '{files.key}' }}"
    config.write_text(f"{authority.server_conf.read_text()}\n{tls}\n")
    with nats_server("-c", str(config)) as running:
        yield running.replace("nats://127.0.0.1", "tls://localhost").replace("tls://127.0.0.1", "tls://localhost")


@pytest.fixture
def trusted(files, authority, monkeypatch):
    """The environment of a service that trusts the server."""
    monkeypatch.setenv("WOOLY_NATS_TLS_CA", str(files.authority))
    monkeypatch.setenv("WOOLY_NATS_CREDS", str(authority.service_creds))


async def test_tls_service_client_and_tunnel_connect(url, files, authority, trusted):
    app, issuer = ServiceApp("router", url), authority.issuer()

    async def nodes(request, tenant):
        return NodesReply(nodes=())

    got = asyncio.Queue()
    listener = TunnelListener(Access.of_service(url), lambda sock, peer, group: got.put_nowait(sock))
    app.serve_tenants(contracts.ROUTER_NODE_LIST, nodes)
    app.serve_tenants(contracts.EXECUTOR_TUNNEL_OPEN.at("x"), listener.on_open_tenants_tunnel)
    async with app.running(), contextlib.aclosing(listener):
        mine = Access(url, lambda: issuer.client("acme", {"nodes:read"}), files.authority)
        client = await asyncio.to_thread(ControlClient, mine)
        try:
            reply = await asyncio.to_thread(client.request, contracts.ROUTER_NODE_LIST, NodesRequest())
            assert reply.nodes == ()
        finally:
            await asyncio.to_thread(client.close)
        held = issuer.session("acme", "s", ["x"], ttl_s=60)
        way = Access(url, lambda: held, files.authority)
        near = await asyncio.to_thread(open_tunnel, way, contracts.EXECUTOR_TUNNEL_OPEN.at("x"))
        far = await got.get()
        near.sendall(b"through")
        far.setblocking(True)
        assert await asyncio.to_thread(far.recv, 100) == b"through"
        near.close()
        far.close()


def test_tls_untrusted_authority_is_refused(url, tmp_path):
    other = make_certificates(tmp_path, "localhost")
    with pytest.raises(BusConnectError, match="certificate verify failed"):
        ControlClient(Access(url, None, other.authority), timeout=1)
    with pytest.raises(ChannelTlsError, match=r"the certificate of NATS at .* is not trusted"):
        open_tunnel(Access(url, None, other.authority), contracts.EXECUTOR_TUNNEL_OPEN.at("x"), timeout=5)


async def test_tls_server_without_tls_gets_no_credentials():
    """An attacker answers that TLS is not required. The service must not send user and password."""
    heard = []

    async def answer(reader, writer):
        info = {"server_id": "x", "version": "2.10.0", "max_payload": 1 << 20, "tls_required": False}
        writer.write(b"INFO " + json.dumps(info).encode() + b"\r\n")
        heard.append(await reader.read(4096))
        writer.close()

    server = await asyncio.start_server(answer, "localhost", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        app = ServiceApp("router", f"tls://user:password@localhost:{port}", patience_s=0.5)
        with pytest.raises(BusConnectError, match="does not offer TLS, so nothing was sent to it"):
            async with app.running():
                pass
        while not heard:
            await asyncio.sleep(0.01)
    assert set(heard) == {b""}


def test_tls_unreadable_authorities_are_named(url, tmp_path, monkeypatch):
    with pytest.raises(BusConnectError, match=r"cannot read .*missing\.pem"):
        ControlClient(Access(url, None, tmp_path / "missing.pem"))
    monkeypatch.setenv("WOOLY_NATS_TLS_CA", str(tmp_path / "missing.pem"))
    with pytest.raises(BusConnectError, match=r"cannot read .*missing\.pem"):
        ServiceApp("router", url)
