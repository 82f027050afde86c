"""Credentials against a real nats-server: the server enforces their permissions."""

import asyncio
import contextlib
import gc
import stat
import time

import nats
import nats.errors
import pytest
from nats.aio.client import Client
from wooly_bus import contracts, subjects
from wooly_bus.access import Access, options
from wooly_bus.app import ServiceApp
from wooly_bus.authority import Authority, make_authority
from wooly_bus.channel.tunnel import OpenTunnelReply, OpenTunnelRequest
from wooly_bus.credentials import Credentials, CredentialsError, Permissions
from wooly_bus.errors import BusConnectError, RefusedError
from wooly_bus.keys import Key
from wooly_bus.rpc import ControlClient
from wooly_testkit import forks
from wooly_testkit.nats import nats_server as start
from wooly_wis.credits import SetBudgetRequest
from wooly_wis.messages import NodesRequest, TaskChanged, TasksReply, TasksRequest

USER = frozenset({"tasks:read", "tasks:write", "nodes:read", "blobs:read", "blobs:write"})


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return make_authority(tmp_path_factory.mktemp("authority") / "keys")


@pytest.fixture(scope="module")
def issuer(authority):
    return authority.issuer()


@pytest.fixture(scope="module")
def url(authority):
    with start("-c", str(authority.server_conf)) as running:
        yield running


@contextlib.asynccontextmanager
async def connected(url, credentials):
    """Yields a connection and the errors that it received from the server."""
    errors = []

    async def error(e):
        errors.append(str(e))

    client = Client()
    shows = options(credentials, None)
    try:
        await client.connect(url, error_cb=error, allow_reconnect=False, connect_timeout=5, **shows)
        yield client, errors
    finally:
        await client.close()


async def allowed(url, credentials, *, publish=None, subscribe=None):
    async with connected(url, credentials) as (client, errors):
        if publish:
            await client.publish(publish, b"{}")
        if subscribe:
            await client.subscribe(subscribe)
        await client.flush()
        await client.flush()
        return not errors


def test_make_authority_twice_keeps_private_keys(authority):
    files = sorted(authority.folder.iterdir())
    assert len(files) == 9 and all(stat.S_IMODE(f.stat().st_mode) == 0o600 for f in files)
    assert stat.S_IMODE(authority.folder.stat().st_mode) == 0o700
    before = {f: f.read_text() for f in files}
    assert make_authority(authority.folder) == authority
    assert {f: f.read_text() for f in files} == before


def test_make_authority_adds_a_checkpoint_key_to_an_older_installation(tmp_path):
    authority = make_authority(tmp_path / "keys")
    seed = authority.signing_seed.read_text()
    authority.checkpoint_key.unlink()
    key = make_authority(tmp_path / "keys").checkpoint_key.read_text()
    assert len(bytes.fromhex(key)) == 32 and authority.signing_seed.read_text() == seed
    assert make_authority(tmp_path / "keys").checkpoint_key.read_text() == key


def test_authority_command_makes_keys_and_prints_settings(tmp_path):
    said = forks.run("wooly_bus.authority", str(tmp_path / "keys"), timeout=60).stdout
    made = Authority(tmp_path / "keys")
    assert f"WOOLY_EXECUTOR_CHANNEL_KEY={made.channel_public}" in said and str(made.signing_seed) in said
    secret = [path for path in made.folder.iterdir() if path != made.channel_public_file]
    assert len(secret) == 8 and not any(path.read_text() in said for path in secret)


async def test_connect_without_or_with_foreign_credentials_is_refused(url, issuer):
    foreign = make_foreign(issuer)
    for credentials in (None, foreign):
        with pytest.raises(nats.errors.Error):
            async with connected(url, credentials):
                pass


def make_foreign(issuer):
    """Credentials of a user of our account, signed by a key that the account does not trust."""
    return type(issuer)(Key.new("account"), issuer.account).client("acme", USER)


async def test_connect_with_expired_credentials_is_refused(url, issuer):
    with pytest.raises(nats.errors.Error):
        async with connected(url, issuer.client("acme", USER, ttl_s=60, now=time.time() - 61)):
            pass


async def test_service_credentials_permit_all(url, authority):
    service = Credentials.load(authority.service_creds)
    assert (service.role, service.tenant, service.expires_at) == ("service", None, None)
    assert await allowed(url, service, publish=contracts.EXECUTOR_NODE_HEARTBEAT.subject, subscribe=">")
    async with connected(url, service) as (client, _):
        assert (await client.jetstream().account_info()).limits.max_storage == -1


async def test_client_credentials_permit_own_tenant_only(url, issuer):
    mine = issuer.client("acme", USER)
    assert (mine.tenant, mine.role) == ("acme", "user")
    asked = [rpc for rpc in contracts.RPCS.values() if rpc.scope in USER]
    assert len(asked) > 10
    for rpc in asked:
        assert await allowed(url, mine, publish=rpc.for_tenant("acme"))
        assert not await allowed(url, mine, publish=rpc.for_tenant("other"))
        assert not await allowed(url, mine, publish=rpc.subject)
    for forbidden in (
        contracts.EXECUTOR_NODE_HEARTBEAT.subject,
        contracts.EXECUTOR_SESSION_OPEN.at("x").subject,
        contracts.ROUTER_JOB_SUBMIT.subject,
        contracts.METERING_BUDGET_SET.subject,
        contracts.METERING_BUDGET_SET.for_tenant("acme"),
        contracts.EXECUTOR_TUNNEL_OPEN.at("x").for_tenant("acme"),
        "_INBOX.x.y",
        "$JS.API.INFO",
        "$SYS.REQ.SERVER.PING",
    ):
        assert not await allowed(url, mine, publish=forbidden), forbidden


async def test_client_credentials_subscribe_own_tenant_only(url, issuer):
    mine, other = issuer.client("acme", USER), issuer.client("acme", USER)
    assert await allowed(url, mine, subscribe=mine.inbox + ".>")
    assert await allowed(url, mine, subscribe=contracts.ROUTER_TASK_CHANGED.at("acme").subject)
    for forbidden in (
        ">",
        "_INBOX.>",
        other.inbox + ".>",
        contracts.ROUTER_TASK_CHANGED.at("other").subject,
        contracts.ROUTER_TASK_CHANGED.pattern,
        contracts.ROUTER_SESSION_OPEN.for_tenant("acme"),
        "$SYS.>",
    ):
        assert not await allowed(url, mine, subscribe=forbidden), forbidden


async def test_client_credentials_without_scope_forbid_request(url, issuer):
    reader = issuer.client("acme", {"tasks:read"})
    assert await allowed(url, reader, publish=contracts.ROUTER_TASK_LIST.for_tenant("acme"))
    assert not await allowed(url, reader, publish=contracts.ROUTER_SESSION_OPEN.for_tenant("acme"))
    blind = issuer.client("acme", {"nodes:read"})
    assert not await allowed(url, blind, subscribe=contracts.ROUTER_TASK_CHANGED.at("acme").subject)


async def test_session_credentials_permit_own_tunnels_only(url, issuer):
    mine = issuer.session("acme", "s1", ["x", "y"], ttl_s=60)
    for executor in ("x", "y"):
        assert await allowed(url, mine, publish=contracts.EXECUTOR_TUNNEL_OPEN.at(executor).for_tenant("acme"))
    assert await allowed(url, mine, publish=subjects.tunnel_inbox(mine.inbox) + ".z")
    another = issuer.session("acme", "s2", ["x"], ttl_s=60)
    for forbidden in (
        contracts.EXECUTOR_TUNNEL_OPEN.at("z").for_tenant("acme"),
        contracts.EXECUTOR_TUNNEL_OPEN.at("x").for_tenant("other"),
        contracts.EXECUTOR_TUNNEL_OPEN.at("x").subject,
        subjects.tunnel_inbox(another.inbox) + ".z",
        contracts.ROUTER_SESSION_OPEN.for_tenant("acme"),
    ):
        assert not await allowed(url, mine, publish=forbidden), forbidden
    assert not await allowed(url, mine, subscribe=subjects.tunnel_inbox(mine.inbox) + ".>")
    assert not await allowed(url, mine, subscribe=another.inbox + ".>")


async def test_administrator_credentials_permit_requests_and_jetstream(url, authority):
    admin = Credentials.load(authority.admin_creds)
    assert await allowed(
        url, admin, publish=contracts.METERING_BUDGET_SET.subject, subscribe=contracts.ROUTER_TASK_CHANGED.pattern
    )
    assert not await allowed(url, admin, publish=contracts.EXECUTOR_NODE_HEARTBEAT.subject)
    async with connected(url, admin) as (client, _):
        assert (await client.jetstream().account_info()).limits.max_storage == -1


def test_credentials_text_round_trips(issuer, tmp_path):
    made = issuer.client("a.b *ü", USER, ttl_s=100)
    read = Credentials.parse(made.text())
    for name in ("jwt", "user_id", "tenant", "role", "account", "expires_at", "permissions", "inbox"):
        assert getattr(read, name) == getattr(made, name)
    assert read.tenant == "a.b *ü" and read.key.seed == made.key.seed
    other = issuer.client("other", USER)
    for wrong in ("", made.jwt, made.text().replace(made.key.seed, other.key.seed), made.text().replace("SU", "SA")):
        with pytest.raises(CredentialsError):
            Credentials.parse(wrong)
    with pytest.raises(CredentialsError, match="cannot read"):
        Credentials.load(tmp_path / "missing.creds")


def test_permissions_match_like_server():
    some = Permissions(("a.*.c", "d.>"), ())
    for subject, may in (("a.b.c", True), ("a.b", False), ("a.b.c.d", False), ("d.e.f", True), ("d", False)):
        assert some.may_publish(subject) == may
    assert Permissions().may_publish("anything")


# -- services and clients --------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def service(url, authority, monkeypatch):
    """A service that answers all requests; the answer to a tenant contains its name."""
    monkeypatch.setenv("WOOLY_NATS_CREDS", str(authority.service_creds))
    app = ServiceApp("router", url)

    async def answer(request):
        return TasksReply(tasks=(), next="everybody")

    async def answer_tenant(request, tenant):
        return TasksReply(tasks=(), next=tenant)

    app.serve(contracts.ROUTER_TASK_LIST, answer)
    app.serve_tenants(contracts.ROUTER_TASK_LIST, answer_tenant)
    async with app.running():
        yield app


async def test_service_gets_tenant_from_subject(url, authority, issuer, monkeypatch):
    async with service(url, authority, monkeypatch):
        for credentials, known in (
            (issuer.client("a.b", USER), "a.b"),
            (issuer.client("ü *", USER), "ü *"),
            (Credentials.load(authority.admin_creds), "everybody"),
        ):
            client = await asyncio.to_thread(ControlClient, Access(url, lambda held=credentials: held))
            try:
                request = TasksRequest(tenant="somebody else's")
                reply = await asyncio.to_thread(client.request, contracts.ROUTER_TASK_LIST, request)
                assert reply.next == known
            finally:
                await asyncio.to_thread(client.close)


async def test_tenant_at_request_limit_does_not_block_others(url, authority, issuer, monkeypatch):
    monkeypatch.setenv("WOOLY_NATS_CREDS", str(authority.service_creds))
    app, release, waiting = ServiceApp("router", url), asyncio.Event(), [0]

    async def answer(request, tenant):
        if tenant == "bob":
            waiting[0] += 1
            await release.wait()
        return TasksReply(tasks=(), next=tenant)

    app.serve_tenants(contracts.ROUTER_TASK_LIST, answer)
    app.tenant_requests = 3
    async with app.running(), contextlib.AsyncExitStack() as stack:
        clients = {}
        for name in ("alice", "bob"):
            client = await asyncio.to_thread(ControlClient, Access(url, lambda name=name: issuer.client(name, USER)))
            stack.push_async_callback(asyncio.to_thread, client.close)
            clients[name] = client

        def ask(name):
            return asyncio.to_thread(clients[name].request, contracts.ROUTER_TASK_LIST, TasksRequest(), timeout=30)

        bobs = [asyncio.create_task(ask("bob")) for _ in range(3)]
        async with asyncio.timeout(30):
            while waiting[0] < 3:
                await asyncio.sleep(0.01)
        with pytest.raises(
            RefusedError, match=r"tenant bob has 3 running requests of .* which is the limit"
        ) as refused:
            await ask("bob")
        assert refused.value.code == "router.limit" and refused.value.retryable
        assert (await ask("alice")).next == "alice" and not release.is_set()
        release.set()
        assert [reply.next for reply in await asyncio.gather(*bobs)] == ["bob"] * 3


async def test_request_without_permission_is_refused_at_once(url, authority, issuer, monkeypatch):
    client = await asyncio.to_thread(ControlClient, Access(url, lambda: issuer.client("acme", {"tasks:read"})))
    try:
        for rpc, message in (
            (contracts.ROUTER_NODE_LIST, NodesRequest()),
            (contracts.METERING_BUDGET_SET, SetBudgetRequest(tenant="acme")),
        ):
            with pytest.raises(RefusedError, match="these credentials do not permit") as refused:
                await asyncio.to_thread(client.request, rpc, message)
            assert refused.value.code == "bus.forbidden"
    finally:
        await asyncio.to_thread(client.close)


async def test_reply_to_service_or_other_tenant_is_dropped(url, authority, issuer, monkeypatch):
    mine = issuer.client("acme", USER)
    body = TasksRequest().model_dump_json().encode()
    subject = contracts.ROUTER_TASK_LIST.for_tenant("acme")
    others = issuer.client("other", USER)
    everybody = Credentials.load(authority.service_creds)
    async with (
        service(url, authority, monkeypatch),
        connected(url, mine) as (client, errors),
        connected(url, everybody) as (ears, _),
    ):
        heard = []

        async def hear(message):
            heard.append(message.subject)

        await ears.subscribe(">", cb=hear)
        await ears.flush()
        for target in (contracts.EXECUTOR_NODE_HEARTBEAT.subject, others.inbox + ".x", "_INBOX.x", "$JS.API.INFO"):
            await client.publish(subject, body, reply=target)
        await client.flush()
        right = await client.request(subject, body, timeout=5)  # answered after the earlier requests
        assert TasksReply.model_validate_json(right.data).next == "acme"
        await ears.flush()
        replies = [s for s in heard if s != subject]
        assert replies and all(s.startswith(mine.inbox) for s in replies) and not errors


def test_serve_tenants_without_credentials_does_nothing(nats_server):
    async def ask():
        app = ServiceApp("router", nats_server)
        app.serve_tenants(contracts.ROUTER_TASK_LIST, lambda r, t: None)
        async with app.running():
            client = await nats.connect(nats_server)
            with pytest.raises(nats.errors.NoRespondersError):
                await client.request(contracts.ROUTER_TASK_LIST.for_tenant("acme"), b"{}")
            await client.close()

    asyncio.run(ask())


class Source:
    """Makes credentials that are valid for `ttl_s` seconds, while it is open."""

    def __init__(self, issuer, ttl_s):
        self.issuer, self.ttl_s, self.closed, self.made = issuer, ttl_s, False, []

    def __call__(self):
        if self.closed:
            raise CredentialsError("REST is away")
        self.made.append(self.issuer.client("acme", USER, ttl_s=self.ttl_s))
        return self.made[-1]


#: Validity in seconds of credentials whose expiry a test waits for. The expiry is a whole second, so it may be up to 1 s earlier.
SHORT_S = 3


class Slept:
    """Clients whose credentials expired while they slept. All sleep at the same time, because the wait takes seconds.

    Attributes:
        client: a client that gets its next credentials from `source`.
        filed: a client whose credentials are in the file `path`.
        away: a client of a server that ended; it gets its next credentials from `away_source`. `away_port` was the server's port.
    """

    def __init__(self, url, authority, folder):
        issuer = authority.issuer()
        self.source, self.away_source = Source(issuer, SHORT_S), Source(issuer, SHORT_S)
        self.path = folder / "me.creds"
        self.path.write_text(issuer.client("acme", USER, ttl_s=SHORT_S).text())
        self.client = ControlClient(Access(url, self.source))
        self.filed = ControlClient(Access(url, lambda: Credentials.load(self.path)))
        with start("-c", str(authority.server_conf)) as away_url:
            self.away = ControlClient(Access(away_url, self.away_source))
        self.away_port = away_url.rpartition(":")[2]
        for source in (self.source, self.away_source):
            source.closed, source.ttl_s = True, 60

    def wait(self):
        """Wait until the server has closed the connections because of expired credentials, and would accept no new ones."""
        until = time.monotonic() + 20
        for client in (self.client, self.filed):
            while not client._nc.is_closed or time.time() < client._held.expires_at + 1:
                assert time.monotonic() < until
                time.sleep(0.02)
        while time.time() < self.away_source.made[0].expires_at + 1:
            time.sleep(0.02)

    def close(self):
        for client in (self.client, self.filed, self.away):
            client.close()


@pytest.fixture(scope="module")
def slept(url, authority, tmp_path_factory):
    """A machine that slept, so that no credentials were renewed in time."""

    async def never(self):
        self.asleep = (
            asyncio.Event()
        )  # hold a reference: a task and the event that it waits for are garbage without one
        await self.asleep.wait()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ControlClient, "_keep_valid", never)
        made = Slept(url, authority, tmp_path_factory.mktemp("slept"))
        made.wait()
    yield made
    made.close()


async def test_client_after_sleep_reports_failed_renewal_and_recovers(url, authority, monkeypatch, slept):
    def ask():
        return slept.client.request(contracts.ROUTER_TASK_LIST, TasksRequest())

    async with service(url, authority, monkeypatch):
        with pytest.raises(CredentialsError, match="REST is away"):
            await asyncio.to_thread(ask)
        slept.source.closed = False
        replies = await asyncio.gather(*[asyncio.to_thread(ask) for _ in range(4)])
        assert [reply.next for reply in replies] == ["acme"] * 4
        assert len(slept.source.made) == 2  # one connection for all requests


async def test_client_with_expired_file_gets_remedy(url, authority, issuer, monkeypatch, slept):
    def ask():
        return slept.filed.request(contracts.ROUTER_TASK_LIST, TasksRequest())

    async with service(url, authority, monkeypatch):
        with pytest.raises(BusConnectError, match=r"expired at 20.*renew the .creds file \(POST /api/v1/credentials"):
            await asyncio.to_thread(ask)
        with pytest.raises(BusConnectError, match=r"expired at 20.*renew"):
            await asyncio.to_thread(ControlClient, Access(url, lambda: Credentials.load(slept.path)))
        slept.path.write_text(issuer.client("acme", USER, ttl_s=60).text())
        assert (await asyncio.to_thread(ask)).next == "acme"


async def test_client_credentials_expired_during_nats_outage_recovers(authority, monkeypatch, slept, caplog):
    """nats-py reconnects with the old credentials, which the server then refuses."""
    with start("-c", str(authority.server_conf), "-p", slept.away_port) as url:
        until = time.monotonic() + 20
        while not slept.away._nc.is_closed:  # one refusal is enough, and no task ends with an error that nobody reads
            assert time.monotonic() < until
            await asyncio.sleep(0.02)
        gc.collect()
        assert "never retrieved" not in caplog.text
        slept.away_source.closed = False
        async with service(url, authority, monkeypatch):
            ask = (slept.away.request_until_answered, contracts.ROUTER_TASK_LIST, TasksRequest())
            assert (await asyncio.to_thread(*ask)).next == "acme"


def changed(number):
    return TaskChanged(task_id="a", tenant="acme", kind="job", name="", number=number + 1, at=0.0, state="pending")


async def test_client_renews_credentials_before_expiry(url, authority, issuer, monkeypatch):
    source = Source(issuer, ttl_s=2)
    event = contracts.ROUTER_TASK_CHANGED.at("acme")

    def use(client, publish):
        with client.subscription(event) as heard:
            for number in range(3):  # the first credentials expire before the last round
                until = time.monotonic() + 20
                while len(source.made) <= number or client._held is not source.made[-1]:
                    assert client.request(contracts.ROUTER_TASK_LIST, TasksRequest()).next == "acme"
                    assert time.monotonic() < until
                    time.sleep(0.02)
                publish(changed(number))
                assert heard.get(timeout=20) == changed(number)
            assert client.request(contracts.ROUTER_TASK_LIST, TasksRequest()).next == "acme"
        with (
            pytest.raises(RefusedError, match="do not permit to subscribe"),
            client.subscription(contracts.ROUTER_TASK_CHANGED.at("other")),
        ):
            pass
        assert time.time() > source.made[0].expires_at

    loop = asyncio.get_running_loop()
    async with (
        service(url, authority, monkeypatch),
        connected(url, authority.issuer().service()) as (speaker, _),
    ):

        def publish(payload):
            asyncio.run_coroutine_threadsafe(speaker.publish(event.subject, event.encoded(payload)), loop).result(5)

        client = await asyncio.to_thread(ControlClient, Access(url, source))
        try:
            await asyncio.to_thread(use, client, publish)
        finally:
            await asyncio.to_thread(client.close)


def test_control_client_without_credentials_is_refused(url):
    with pytest.raises(BusConnectError, match="authorization failed; set credentials"):
        ControlClient(url, timeout=1)


async def test_service_with_expired_credentials_is_not_live(url, issuer, monkeypatch, tmp_path, caplog):
    path = tmp_path / "service.creds"
    path.write_text(issuer.issue("service", Permissions(), ttl_s=2).text())
    monkeypatch.setenv("WOOLY_NATS_CREDS", str(path))
    app, until = ServiceApp("router", url), time.monotonic() + 30
    async with app.running():
        assert app.live["connection"]()
        while app.live["connection"]() or "for good" not in caplog.text:
            assert time.monotonic() < until
            await asyncio.sleep(0.05)
    assert (
        "the credentials of this service have expired" in caplog.text
        and "renew the file that WOOLY_NATS_CREDS names" in caplog.text
    )


async def test_tunnel_with_expired_credentials_reports_cause(url, authority, issuer, monkeypatch):
    from wooly_bus.channel.tunnel import TunnelListener, open_tunnel

    monkeypatch.setenv("WOOLY_NATS_CREDS", str(authority.service_creds))
    app = ServiceApp("executor", url)
    got = asyncio.Queue()
    listener = TunnelListener(Access.of_service(url), lambda sock, peer, group: got.put_nowait((sock, peer)))
    app.serve_tenants(contracts.EXECUTOR_TUNNEL_OPEN.at("x"), listener.on_open_tenants_tunnel)
    async with app.running(), contextlib.aclosing(listener):
        held = issuer.session("acme", "s1", ["x"], ttl_s=2)
        near = await asyncio.to_thread(open_tunnel, Access(url, lambda: held), contracts.EXECUTOR_TUNNEL_OPEN.at("x"))
        far, _ = await got.get()
        with pytest.raises(
            ConnectionAbortedError, match=r"credentials have expired.*WOOLY_ROUTER_SESSION_CREDENTIALS_S"
        ):
            await asyncio.to_thread(near.recv_into, bytearray(1))
        near.close()
        far.close()


async def test_tunnel_of_session_is_private_to_its_user(url, authority, issuer, monkeypatch):
    from wooly_bus.channel.tunnel import TunnelListener, open_tunnel

    monkeypatch.setenv("WOOLY_NATS_CREDS", str(authority.service_creds))
    app = ServiceApp("executor", url)
    got = asyncio.Queue()
    listener = TunnelListener(Access.of_service(url), lambda sock, peer, group: got.put_nowait((sock, peer)))
    app.serve_tenants(contracts.EXECUTOR_TUNNEL_OPEN.at("x"), listener.on_open_tenants_tunnel)
    held = issuer.session("acme", "s1", ["x"], ttl_s=60)
    other = issuer.session("other", "s2", ["x"], ttl_s=60)
    async with app.running(), contextlib.aclosing(listener):
        near = await asyncio.to_thread(open_tunnel, Access(url, lambda: held), contracts.EXECUTOR_TUNNEL_OPEN.at("x"))
        far, peer = await got.get()
        assert held.inbox in peer
        near.sendall(b"to the executor")
        far.setblocking(True)
        assert await asyncio.to_thread(far.recv, 100) == b"to the executor"
        await asyncio.to_thread(far.sendall, b"back")
        assert await asyncio.to_thread(near.recv, 100) == b"back"
        async with connected(url, held) as (client, _):
            request = OpenTunnelRequest(inbox=other.inbox + ".x", key="0" * 16, window=1 << 20)
            subject = contracts.EXECUTOR_TUNNEL_OPEN.at("x").for_tenant("acme")
            answer = await client.request(subject, request.model_dump_json().encode(), timeout=5)
            assert b"channel.inbox" in answer.data
            with pytest.raises(ValueError):
                OpenTunnelReply.model_validate_json(answer.data)
        near.close()
        far.close()
