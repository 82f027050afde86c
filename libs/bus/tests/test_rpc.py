"""ControlClient and failures: closed clients, lost and restarted servers, invalid addresses, silence."""

import contextlib
import socket
import subprocess
import sys
import threading
import time

import nats.aio.client
import pytest
from wooly_bus import nats_client
from wooly_bus.contract_types import Event, Rpc
from wooly_bus.errors import BusConnectError, BusError, BusTimeoutError, NoResponderError
from wooly_bus.rpc import ControlClient
from wooly_testkit.nats import NatsCluster
from wooly_testkit.nats import nats_server as start_nats_server
from wooly_wis.messages import CloseSessionReply, NodesRequest

pytestmark = pytest.mark.connected
NOBODY = Rpc("wooly.v1.rpc.test.no.body", NodesRequest, CloseSessionReply)


def test_closed_client_raises_and_leaves_no_thread(nats_server):
    before = threading.active_count()
    client = ControlClient(nats_server)
    client.close()
    client.close()
    assert threading.active_count() == before
    with pytest.raises(BusConnectError, match="is closed"):
        client.request(NOBODY, NodesRequest())


def test_close_of_a_connection_that_the_server_has_reset_raises_nothing(nats_server, monkeypatch):
    client = ControlClient(nats_server)
    transport = client._nc._transport

    async def drain():
        raise ConnectionResetError("Connection lost")

    monkeypatch.setattr(transport, "drain", drain)
    client._nc._pending_data_size = 1  # something is left to send
    before = threading.active_count()
    client.close()
    assert threading.active_count() == before - 1


def test_close_ends_waiting_request_of_other_thread(nats_server):
    rpc, found = Rpc("wooly.v1.rpc.test.silent.body", NodesRequest, CloseSessionReply), []

    def ask():
        try:
            client.request(rpc, NodesRequest(), timeout=60)
        except BusError as e:
            found.append(e)

    silent, client = ControlClient(nats_server), ControlClient(nats_server)
    with silent.subscription(Event(rpc.subject, NodesRequest)) as heard:
        asking = threading.Thread(target=ask)
        asking.start()
        heard.get(timeout=20)
        client.close()
        asking.join(20)
    silent.close()
    assert [type(e) for e in found] == [BusConnectError] and "is closed" in str(found[0])


@pytest.mark.parametrize(
    "url", ["nats://no-such-host.invalid:4222", "nats://127.0.0.1:9", "nonsense://x", "nats://[::"]
)
def test_connect_without_server_fails_in_time_and_names_address(url):
    before, started = threading.active_count(), time.monotonic()
    with pytest.raises(BusConnectError) as caught:
        ControlClient(url, timeout=0.3)
    assert url in str(caught.value) and not str(caught.value).endswith(": ")
    assert time.monotonic() - started < 4 and threading.active_count() == before


def test_connect_silent_server_fails_in_time():
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(BusConnectError, match="no NATS server answers"):
        ControlClient(f"nats://127.0.0.1:{mute.getsockname()[1]}", timeout=0.3)


@pytest.fixture
def in_order(monkeypatch):
    """Clients try servers in the order of their URLs."""
    monkeypatch.setattr(nats.aio.client, "shuffle", lambda servers: None)


@pytest.mark.usefixtures("in_order")
def test_client_tries_the_next_server_if_the_first_is_silent(nats_server):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        client = ControlClient(f"nats://127.0.0.1:{mute.getsockname()[1]},{nats_server}", timeout=0.6)
        with pytest.raises(NoResponderError):
            client.request(NOBODY, NodesRequest())
        client.close()


@pytest.mark.usefixtures("in_order")
def test_client_leaves_a_server_that_falls_silent(tmp_path, monkeypatch):
    """Its machine may have vanished, or its network is cut: no connection is closed."""
    monkeypatch.setitem(nats_client.NOTICING, "ping_interval", 0.05)
    with contextlib.ExitStack() as stack:
        cluster = NatsCluster(tmp_path, stack, size=2)
        client = stack.enter_context(contextlib.closing(connected(cluster.url)))
        cluster.freeze(0)
        until = time.monotonic() + 10
        while time.monotonic() < until:
            try:
                client.request(NOBODY, NodesRequest(), timeout=0.3)
            except NoResponderError:
                return
            except (BusTimeoutError, BusConnectError):
                continue
        pytest.fail("the client still waits for the silent server")


def connected(url):
    """Connect as soon as the servers have started."""
    until = time.monotonic() + 10
    while True:
        try:
            return ControlClient(url, timeout=0.6)
        except BusConnectError:
            assert time.monotonic() < until


def test_client_reconnects_when_server_returns():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    with start_nats_server("-p", port) as url:
        client = ControlClient(url)
        with pytest.raises(NoResponderError):
            client.request(NOBODY, NodesRequest())
    with pytest.raises(BusError):
        client.request(NOBODY, NodesRequest(), timeout=0.3)
    with start_nats_server("-p", port):
        deadline = time.monotonic() + 10
        while True:
            try:
                client.request(NOBODY, NodesRequest(), timeout=1)
            except NoResponderError:
                break
            except (BusTimeoutError, BusConnectError):
                assert time.monotonic() < deadline
    client.close()


def test_program_without_close_ends_silently_and_does_not_import_faststream(nats_server):
    code = (
        f"import sys; from wooly_bus.rpc import ControlClient; c = ControlClient({nats_server!r}); "
        "sys.exit('faststream' in sys.modules or 'opentelemetry.sdk' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")


def test_connect_error_has_no_password(nats_server):
    with pytest.raises(BusConnectError) as caught:
        ControlClient("nats://user:secret@127.0.0.1:1,nats://user:secret@127.0.0.1:2", timeout=0.3)
    assert "secret" not in str(caught.value) and "127.0.0.1:1" in str(caught.value)
