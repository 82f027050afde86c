"""`python -m wooly_router` as a process: requests, REST, restart, signals, failing starts."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import time

import httpx
import pytest
from wooly_bus import contracts
from wooly_bus.app import ServiceApp
from wooly_bus.channel import client_context
from wooly_bus.errors import BusError, RefusedError
from wooly_bus.web import OPEN
from wooly_testkit import forks
from wooly_testkit.certificates import make_certificates
from wooly_testkit.forks import Forked
from wooly_testkit.postgres import PostgresMissingError, postgres_server
from wooly_wis.messages import (
    ClientFacts,
    CloseSessionRequest,
    NodesRequest,
    OpenSessionRequest,
    RenewSessionRequest,
)

pytestmark = pytest.mark.connected
REQUEST = OpenSessionRequest(client=ClientFacts(host="h", pid=1, program="train.py"))


@pytest.fixture
def start_router(nats_server, tmp_path):
    """Starts routers on one state directory, and ends them after the test."""
    running = []

    def start(**env):
        process = Forked(
            "wooly_router",
            env=os.environ
            | {
                "WOOLY_ROUTER_NATS_URL": nats_server,
                "WOOLY_ROUTER_STATE_DIR": str(tmp_path / "router"),
                "WOOLY_ROUTER_HTTP_PORT": "0",
                "WOOLY_ROUTER_LEASE_S": "2",
            }
            | env,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


async def rest_of(tmp_path, name="router"):
    """Wait until the router serves REST, and return its address."""
    port_file = tmp_path / name / "router.port"
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, httpx.HTTPError):
            url = f"http://127.0.0.1:{port_file.read_text()}"
            async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
                if (await http.get("/healthz")).json()["executors"]:
                    return url
        await asyncio.sleep(0.02)
    raise AssertionError("the router did not come up")


async def ended(process, timeout=10):
    return await asyncio.to_thread(process.communicate, timeout=timeout)


@contextlib.asynccontextmanager
async def client_of(url):
    async with ServiceApp("client", url).running() as app:

        def ask(rpc, request):
            return app.request(rpc, request, timeout=5)

        yield ask


async def test_router_after_restart_keeps_sessions(nats_server, tmp_path, start_router, beating_executor):
    process = start_router()
    async with beating_executor("a") as executor, client_of(nats_server) as ask:
        url = await rest_of(tmp_path)
        opened = await ask(contracts.ROUTER_SESSION_OPEN, REQUEST)
        renewal = RenewSessionRequest(session_id=opened.session_id, token=opened.token)
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            node = (await http.get("/api/v1/nodes")).json()["nodes"][0]
            assert (node["node_id"], node["state"], node["tasks"]) == ("host", "active", 1)
            assert [(g["executor_id"], g["device"]["name"]) for g in node["gpus"]] == [("a", "device")]
            listed = await http.get("/api/v1/sessions")
            assert [s["session_id"] for s in listed.json()["sessions"]] == [opened.session_id]
            assert listed.json()["sessions"][0]["program"] == "train.py" and opened.token not in listed.text
            missing = await http.get("/api/v1/nothing")
            assert missing.status_code == 404
            assert missing.json() == {"code": "http.404", "message": "Not Found", "retryable": False}
        process.kill()
        await ended(process)
        (tmp_path / "router" / "router.port").unlink()
        start_router()
        await rest_of(tmp_path)
        assert (await ask(contracts.ROUTER_SESSION_RENEW, renewal)).lease_s == 2
        assert (await ask(contracts.ROUTER_NODE_LIST, NodesRequest())).nodes[0].sessions == 1
        close = CloseSessionRequest(session_id=opened.session_id, token=opened.token)
        assert (await ask(contracts.ROUTER_SESSION_CLOSE, close)).closed
        assert executor.sessions == {}


@pytest.fixture
def own_postgres():
    """A server that a test may crash."""
    try:
        with postgres_server(durable=True) as server:
            yield server
    except PostgresMissingError as e:
        pytest.skip(str(e))


async def test_request_while_the_database_is_away_may_be_sent_again(
    nats_server, tmp_path, start_router, beating_executor, own_postgres
):
    """A session that opens at another executor asks again. It used to end, although the database was back after seconds."""
    start_router(WOOLY_ROUTER_DATABASE_URL=own_postgres.database(), WOOLY_ROUTER_LEASE_S="60")
    async with beating_executor("a"), client_of(nats_server) as ask:
        await rest_of(tmp_path)
        opened = await ask(contracts.ROUTER_SESSION_OPEN, REQUEST)
        renewal = RenewSessionRequest(session_id=opened.session_id, token=opened.token)
        own_postgres.crash()
        for rpc, request in ((contracts.ROUTER_SESSION_OPEN, REQUEST), (contracts.ROUTER_SESSION_RENEW, renewal)):
            with pytest.raises(RefusedError, match="database does not answer") as caught:
                await ask(rpc, request)
            assert caught.value.code == "router.database" and caught.value.retryable
        own_postgres.start()
        assert (await ask(contracts.ROUTER_SESSION_RENEW, renewal)).lease_s == 60


@pytest.mark.slow  # the test of a second router has the same law
async def test_lease_without_renewal_lapses(nats_server, tmp_path, start_router, beating_executor):
    start_router(WOOLY_ROUTER_LEASE_S="0.5")
    async with beating_executor("a") as executor, client_of(nats_server) as ask:
        await rest_of(tmp_path)
        opened = await ask(contracts.ROUTER_SESSION_OPEN, REQUEST)
        deadline = time.monotonic() + 10
        while not executor.closed:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        assert executor.closed == [(opened.session_id, "the session's lease lapsed")]
        renewal = RenewSessionRequest(session_id=opened.session_id, token=opened.token)
        with pytest.raises(RefusedError, match="is not open"):
            await ask(contracts.ROUTER_SESSION_RENEW, renewal)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_router_on_signal_ends_cleanly(tmp_path, start_router, beating_executor, number):
    process = start_router()
    async with beating_executor("a"):
        await rest_of(tmp_path)
        process.send_signal(number)
        _, log = await ended(process)
    assert process.returncode == 0 and "Traceback" not in log
    assert not (tmp_path / "router" / "router.port").exists()


async def test_state_folder_of_router_is_private(tmp_path, start_router, beating_executor):
    start_router()
    async with beating_executor("a"):
        await rest_of(tmp_path)
    for path in (tmp_path / "router", tmp_path / "router" / "router.sqlite"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


async def test_router_with_port_in_use_reports_error(start_router):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = start_router(WOOLY_ROUTER_HTTP_PORT=str(taken.getsockname()[1]))
        _, log = await ended(process, 30)
    assert process.returncode == 1 and "Address already in use" in log and "Traceback" not in log


async def test_router_with_bad_database_or_setting_reports_error(start_router):
    for env in ({"WOOLY_ROUTER_DATABASE_URL": "sqlite+aiosqlite:////no/such/dir/x"}, {"WOOLY_ROUTER_LEASE_S": "-1"}):
        process = start_router(**env)
        _, log = await ended(process, 30)
        assert process.returncode == 1 and "the router ends" in log and "Traceback" not in log


async def test_request_after_router_ended_has_no_responder(nats_server, tmp_path, start_router, beating_executor):
    process = start_router()
    async with beating_executor("a"), client_of(nats_server) as ask:
        await rest_of(tmp_path)
        process.terminate()
        await ended(process)
        with pytest.raises(BusError, match="no service answers"):
            await ask(contracts.ROUTER_NODE_LIST, NodesRequest())


@pytest.mark.slow  # three routers, one after the other, and a lease
async def test_second_router_on_one_database_serves_and_takes_over(
    nats_server, tmp_path, start_router, beating_executor
):
    """Sessions that opened while both routers ran survive the leader's death. The remaining router watches their leases."""
    first = start_router(WOOLY_ROUTER_LEASE_S="3")
    async with beating_executor("a") as executor, client_of(nats_server) as ask:
        await rest_of(tmp_path)
        database = f"sqlite+aiosqlite:///{tmp_path}/router/router.sqlite"
        start_router(
            WOOLY_ROUTER_STATE_DIR=str(tmp_path / "second"),
            WOOLY_ROUTER_DATABASE_URL=database,
            WOOLY_ROUTER_LEASE_S="3",
        )
        await rest_of(tmp_path, "second")
        opened = [await ask(contracts.ROUTER_SESSION_OPEN, REQUEST) for _ in range(4)]
        first.kill()
        await ended(first)
        kept = opened[0]
        deadline = time.monotonic() + 15
        while len(executor.sessions) > 1:
            assert time.monotonic() < deadline
            renewal = RenewSessionRequest(session_id=kept.session_id, token=kept.token)
            assert (await ask(contracts.ROUTER_SESSION_RENEW, renewal)).lease_s == 3
            await asyncio.sleep(0.2)
        assert set(executor.sessions) == {kept.session_id}
        assert {why for _, why in executor.closed} == {"the session's lease lapsed"}


async def test_router_requiring_tokens_creates_first_token(tmp_path, start_router, beating_executor):
    for _ in range(2):  # no second token at its second start
        process = start_router(WOOLY_ROUTER_AUTH="tokens")
        async with beating_executor("a"):
            url = await rest_of(tmp_path)
            path = tmp_path / "router" / "admin.token"
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            async with httpx.AsyncClient(base_url=f"{url}/api/v1", trust_env=False) as http:
                assert (await http.get("/nodes")).status_code == 401
                headers = {"Authorization": f"Bearer {path.read_text()}"}
                assert (await http.get("/nodes", headers=headers)).json()["nodes"][0]["node_id"] == "host"
                listed = (await http.get("/tenants/admin/tokens", headers=headers)).json()["tokens"]
                assert [(t["name"], t["role"]) for t in listed] == [("first", "admin")]
        process.terminate()
        await ended(process)


async def test_router_with_configured_first_tokens_uses_them(tmp_path, start_router, beating_executor):
    given = {"ADMIN_TOKEN": "wooly_" + "1" * 40, "OPERATOR_TOKEN": "wooly_" + "2" * 40}
    start_router(WOOLY_ROUTER_AUTH="tokens", **{f"WOOLY_ROUTER_{name}": token for name, token in given.items()})
    async with beating_executor("a"):
        url = await rest_of(tmp_path)
        assert not (tmp_path / "router" / "admin.token").exists()
        async with httpx.AsyncClient(base_url=f"{url}/api/v1", trust_env=False) as http:
            admin, operator = ({"Authorization": f"Bearer {token}"} for token in given.values())
            listed = (await http.get("/tenants/admin/tokens", headers=admin)).json()["tokens"]
            assert sorted((t["name"], t["role"]) for t in listed) == [("first", "admin"), ("operator", "operator")]
            assert (await http.get("/nodes", headers=operator)).status_code == 200
            assert (await http.get("/tenants", headers=operator)).status_code == 403


async def test_open_router_on_network_starts_only_with_confirmation(tmp_path, start_router):
    for host, said in (("0.0.0.0", ""), ("", "yes"), ("::", "true"), ("192.0.2.1", "1")):
        process = start_router(WOOLY_ROUTER_HTTP_HOST=host or "myself", WOOLY_ROUTER_OPEN_TO_NETWORK=said)
        _, log = await asyncio.to_thread(process.communicate, timeout=60)
        assert process.returncode == 2
        assert "WOOLY_ROUTER_AUTH=tokens" in log and 'WOOLY_ROUTER_OPEN_TO_NETWORK="everyone who reaches' in log
    start_router(WOOLY_ROUTER_HTTP_HOST="0.0.0.0", WOOLY_ROUTER_OPEN_TO_NETWORK=OPEN)
    start_router(
        WOOLY_ROUTER_HTTP_HOST="0.0.0.0", WOOLY_ROUTER_AUTH="tokens", WOOLY_ROUTER_STATE_DIR=str(tmp_path / "r2")
    )
    await listening(tmp_path / "router")
    await listening(tmp_path / "r2")


async def listening(folder):
    deadline = time.monotonic() + 60
    while not (folder / "router.port").exists():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_router_without_rest_tells_by_a_file_that_it_knows_an_executor(
    nats_server, tmp_path, start_router, beating_executor
):
    process, folder = start_router(WOOLY_ROUTER_REST="0"), tmp_path / "router"
    await listening(folder)
    assert (folder / "router.port").read_text() == "" and not (folder / "router.ready").exists()
    async with beating_executor("a"), client_of(nats_server) as ask:
        deadline = time.monotonic() + 30
        while not (folder / "router.ready").exists():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        opened = await ask(contracts.ROUTER_SESSION_OPEN, REQUEST)
        assert opened.parts[0].executor_id == "a"
        process.send_signal(signal.SIGTERM)
        await ended(process)
    assert process.returncode == 0 and not (folder / "router.port").exists()


async def test_existing_state_files_become_private(tmp_path, start_router):
    folder = tmp_path / "router"
    folder.mkdir(mode=0o755)
    (folder / "router.sqlite").touch(mode=0o644)  # as an earlier version created it
    start_router(WOOLY_ROUTER_AUTH="tokens")
    await listening(folder)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert {"router.sqlite", "router.sqlite-wal", "admin.token", "router.port"} <= set(modes)
    assert all(not mode & 0o077 for mode in modes.values()), modes


async def test_tenants_command_lists_shows_and_sets_for_administrators(
    tmp_path, start_router, beating_executor, nats_server
):
    admin = "wooly_" + "1" * 40
    start_router(WOOLY_ROUTER_AUTH="tokens", WOOLY_ROUTER_ADMIN_TOKEN=admin)

    async def wooly(*argv, token=admin):
        env = os.environ | {"WOOLYAI_CONTROLLER_URL": nats_server, "WOOLYAI_CREDENTIAL": token, "COLUMNS": "200"}
        env |= {"XDG_CONFIG_HOME": str(tmp_path)}
        done = await asyncio.to_thread(forks.run, "wooly", "tenants", *argv, env=env, timeout=60)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout + done.stderr

    async with beating_executor("a"):
        await rest_of(tmp_path)
        code, said = await wooly("set", "bob", "--description", "a lab", "--json")
        assert code == 0 and json.loads(said)["class_ceiling"] == 2 and not json.loads(said)["exclusive"]
        code, said = await wooly("set", "bob", "--class-ceiling", "0", "--weight-ceiling", "1000", "--exclusive")
        assert code == 0 and [w in said for w in ("bob", "up to P0", "up to 1000", "yes", "a lab")] == [True] * 5
        assert json.loads((await wooly("show", "bob", "--json"))[1])["weight_ceiling"] == 1000
        listed = json.loads((await wooly("list", "--json"))[1])["tenants"]
        assert [(t["name"], t["class_ceiling"], t["exclusive"]) for t in listed] == [
            ("admin", 0, True),
            ("bob", 0, True),
        ]
        code, said = await wooly("set", "bob", "--no-exclusive")
        assert code == 0 and "up to P0" in said and "yes" not in said
        code, said = await wooly("show", "eve")
        assert code == 1 and "the tenant eve does not exist" in said
        code, said = await wooly("set", "bob", "--class-ceiling", "0", token="wooly_" + "3" * 40)
        assert code == 1 and "a valid token is needed" in said


async def test_rest_with_certificate_serves_tls(start_router, tmp_path):
    files = make_certificates(tmp_path, "localhost")
    start_router(WOOLY_ROUTER_TLS_CERT=str(files.certificate), WOOLY_ROUTER_TLS_KEY=str(files.key))
    port_file = tmp_path / "router" / "router.port"
    until = time.monotonic() + 60
    while not port_file.exists() or not port_file.read_text():
        assert time.monotonic() < until
        await asyncio.sleep(0.02)
    url = f"https://localhost:{port_file.read_text()}/healthz"
    trusting = client_context(files.authority)
    async with httpx.AsyncClient(verify=trusting, trust_env=False) as http:
        while True:
            try:
                assert (await http.get(url)).json()["status"] == "ok"
                break
            except httpx.ConnectError:
                assert time.monotonic() < until
                await asyncio.sleep(0.02)
        with pytest.raises(httpx.HTTPError):
            await http.get(url.replace("https:", "http:"))
    async with httpx.AsyncClient(trust_env=False) as http:
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            await http.get(url)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"WOOLY_ROUTER_TLS_CERT": "/missing.pem"}, "cannot read /missing.pem"),
        ({"WOOLY_ROUTER_SIGNING_KEY": "/missing.seed"}, "WOOLY_NATS_CREDS"),
        ({"WOOLY_ROUTER_CHANNEL_KEY": "/missing.seed"}, "/missing.seed"),
        ({"WOOLY_NATS_CREDS": "/missing.creds"}, "cannot read /missing.creds"),
    ],
)
def test_router_with_bad_key_or_certificate_reports_error(start_router, settings, why):
    process = start_router(**settings)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1 and why in said and "Traceback" not in said
