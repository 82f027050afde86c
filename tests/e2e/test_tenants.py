"""Two tenants on one cluster that asks for tokens: none can hear, speak for, read, cancel or list what is the other's.

Real nats-server, router, scheduler, metering and executor; credentials as REST gives them. What the server forbids it is asked to
do, and what services would have to refuse reaches them.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import nats
import pytest
from nats.aio.client import Client
from wooly_bus import subjects
from wooly_bus.access import Access, options
from wooly_bus.authority import make_authority
from wooly_bus.channel import ChannelClient, Endpoint
from wooly_bus.credentials import Credentials
from wooly_bus.errors import RefusedError
from wooly_bus.rpc import ControlClient
from wooly_testkit.nats import nats_server
from wooly_wis import credits
from wooly_wis.frames import PROTOCOL, READ_HEAD, Kind, pack_json
from wooly_wis.messages import (
    ClientFacts,
    CloseSessionReply,
    CloseSessionRequest,
    GpusReply,
    GpusRequest,
    NodesReply,
    NodesRequest,
    OpenSessionReply,
    OpenSessionRequest,
    PrioritizeTaskRequest,
    RenewSessionReply,
    RenewSessionRequest,
    SteerSessionReply,
    SteerSessionRequest,
    TaskReply,
    TaskRequest,
    TasksReply,
    TasksRequest,
)

pytestmark = pytest.mark.connected
#: Seconds for which credentials of REST hold here, so that a session outlives them.
CREDENTIALS_S = 6


class Cluster:
    """Where everything is, and its administrator's token."""

    def __init__(self, folder, stack):
        self.folder = folder
        keys = make_authority(folder / "keys")
        self.nats_url = stack.enter_context(nats_server("-c", str(keys.server_conf)))
        shared = {**os.environ, "WOOLY_NATS_CREDS": str(keys.service_creds)}
        for service, settings in {
            "router": {
                "HTTP_PORT": "0",
                "AUTH": "tokens",
                "SIGNING_KEY": str(keys.signing_seed),
                "CHANNEL_KEY": str(keys.channel_seed),
                "CREDENTIALS_S": str(CREDENTIALS_S),
                "RATE_LIMIT": "1000",
            },
            "scheduler": {"METRICS_PORT": "0"},
            "metering": {"HTTP_PORT": "0"},
            "executor": {
                "ID": "x",
                "LISTEN": f"unix://{folder}/x.sock",
                "CHANNEL_KEY": keys.channel_public,
                "MEMORY": str(1 << 30),
                "RUNTIME": "torch_cpu",
            },
        }.items():
            prefix = f"WOOLY_{service.upper()}_"
            settings |= {"NATS_URL": self.nats_url, "STATE_DIR": str(folder / service)}
            env = shared | {prefix + k: v for k, v in settings.items()}
            log = stack.enter_context((folder / f"{service}.log").open("w"))
            process = subprocess.Popen([sys.executable, "-m", f"wooly_{service}"], env=env, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)
        port = folder / "router" / "router.port"
        self.wait(lambda: port.exists() and port.read_text())
        self.url = f"http://127.0.0.1:{port.read_text()}"
        self.token = (folder / "router" / "admin.token").read_text()
        self.wait(lambda: self.rest("GET", "nodes")["nodes"])

    def wait(self, condition):
        until = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < until, [p.read_text()[-500:] for p in self.folder.glob("*.log")]
            time.sleep(0.05)

    def rest(self, method, path, body=None, token=None):
        """The answer, or the code with which it was refused."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {token or self.token}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/api/v1/{path}", data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as e:
            with e:
                return json.loads(e.read())["code"]


class Tenant:
    """One tenant: its token, and what a client of its has."""

    def __init__(self, cluster, name):
        self.cluster, self.name = cluster, name
        cluster.rest("PUT", f"tenants/{name}", {})
        self.token = cluster.rest("POST", f"tenants/{name}/tokens", {})["secret"]
        self.held = self.credentials()
        self.control = ControlClient(Access(cluster.nats_url, self.credentials))

    def credentials(self):
        return Credentials.parse(self.cluster.rest("POST", "credentials", {}, self.token)["credentials"])

    def ask(self, subject, message, reply):
        return self.control.request(subject, message, reply)

    def open(self, **wanted):
        client = ClientFacts(host="h", pid=1, program=f"{self.name}.py")
        request = OpenSessionRequest(client=client, **wanted)
        return self.ask(subjects.ROUTER_SESSION_OPEN, request, OpenSessionReply)

    def close(self, opened):
        request = CloseSessionRequest(session_id=opened.session_id, token=opened.token)
        return self.ask(subjects.ROUTER_SESSION_CLOSE, request, CloseSessionReply)

    def env(self, **more):
        settings = {"CONTROLLER_URL": self.cluster.url, "CREDENTIAL": self.token, **more}
        home = self.cluster.folder / self.name
        home.mkdir(exist_ok=True)
        return os.environ | {"HOME": str(home)} | {f"WOOLYAI_{k}": v for k, v in settings.items()}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with contextlib.ExitStack() as stack:
        yield Cluster(tmp_path_factory.mktemp("cluster"), stack)


@pytest.fixture(scope="module")
def tenants(cluster):
    both = [Tenant(cluster, "alice"), Tenant(cluster, "bob")]
    yield both
    for tenant in both:
        tenant.control.close()


@pytest.fixture
def alice(tenants):
    return tenants[0]


@pytest.fixture
def bob(tenants):
    return tenants[1]


@pytest.fixture
def opened(alice):
    """A session of Alice's."""
    session = alice.open()
    yield session
    alice.close(session)


def refused(code, tenant, *ask):
    with pytest.raises(RefusedError) as caught:
        tenant.ask(*ask)
    assert caught.value.code == code


@contextlib.asynccontextmanager
async def connected(tenant):
    """Yields a connection of a tenant's and the errors that the server told it."""
    errors, client = [], Client()

    async def error(e):
        errors.append(str(e))

    try:
        held = await asyncio.to_thread(tenant.credentials)
        await client.connect(tenant.cluster.nats_url, error_cb=error, allow_reconnect=False, **options(held, None))
        yield client, errors
    finally:
        await client.close()


def enter(opened, *, session_id=None, token=None):
    """A data channel, and what the executor answered to the hello."""
    (part,) = opened.parts
    channel = ChannelClient.connect(Endpoint.parse(part.endpoints[0]))
    hello = {"protocol": PROTOCOL, "session_id": session_id or opened.session_id, "token": token or part.token}
    channel.send(Kind.HELLO, pack_json(hello))
    return channel, channel.recv(20)


# -- what a tenant can --------------------------------------------------------------------------------------------------


#: Holds a tensor and asks for it now and then, until it is told to end.
SCRIPT = """
import sys, time, torch
secret = torch.full((1024,), 42.0, device="cuda")
print("ready", secret.sum().item(), flush=True)
until = time.monotonic() + float(sys.argv[1])
while time.monotonic() < until:
    assert (secret * 1.0).sum().item() == 43008.0
    time.sleep(0.2)
print("done", flush=True)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize("channel", ["direct", pytest.param("tunnel", marks=pytest.mark.slow)])
def test_script_runs_with_a_token_alone_and_longer_than_its_credentials(alice, script, channel):
    argv = [sys.executable, "-m", "wooly", "run", str(script), str(CREDENTIALS_S * 2)]
    ran = subprocess.run(argv, env=alice.env(CHANNEL=channel), capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0 and "done" in ran.stdout, ran.stderr
    assert "lease" not in ran.stderr and "renewed" not in ran.stderr, ran.stderr
    (task,) = alice.ask(subjects.ROUTER_TASK_LIST, TasksRequest(limit=1), TasksReply).tasks
    assert (task.tenant, task.state) == ("alice", "completed")


@pytest.mark.parametrize("token", ["", "wooly_wrong"])
def test_script_without_a_valid_token_is_told_so(alice, script, token):
    argv = [sys.executable, "-m", "wooly", "run", str(script), "1"]
    ran = subprocess.run(argv, env=alice.env(CREDENTIAL=token), capture_output=True, text=True, timeout=100)
    assert ran.returncode != 0 and "gives no credentials: a valid token is needed" in ran.stderr


# -- listing and cancelling ---------------------------------------------------------------------------------------------


def test_tasks_of_another_are_not_listed(alice, bob, opened):
    mine = alice.ask(subjects.ROUTER_TASK_LIST, TasksRequest(), TasksReply).tasks
    assert opened.session_id in [t.task_id for t in mine] and {t.tenant for t in mine} == {"alice"}
    theirs = bob.ask(subjects.ROUTER_TASK_LIST, TasksRequest(), TasksReply).tasks
    assert all(t.tenant == "bob" for t in theirs)
    refused("router.forbidden", bob, subjects.ROUTER_TASK_LIST, TasksRequest(tenant="alice"), TasksReply)
    found = bob.cluster.rest("GET", "tasks", token=bob.token)
    assert all(t["tenant"] == "bob" for t in found["tasks"])
    assert bob.cluster.rest("GET", "tasks?tenant=alice", token=bob.token) == "router.forbidden"


def test_task_of_another_is_not_shown_nor_cancelled_nor_moved(alice, bob, opened):
    task = TaskRequest(task_id=opened.session_id)
    refused("router.no_task", bob, subjects.ROUTER_TASK_GET, task, TaskReply)
    refused("router.no_task", bob, subjects.ROUTER_TASK_CANCEL, task, TaskReply)
    move = PrioritizeTaskRequest(task_id=opened.session_id, priority=4)
    refused("router.no_task", bob, subjects.ROUTER_TASK_PRIORITIZE, move, TaskReply)
    named = TaskRequest(task_id=opened.session_id, tenant="alice")
    refused("router.forbidden", bob, subjects.ROUTER_TASK_CANCEL, named, TaskReply)
    for verb, path in (("GET", ""), ("POST", "/cancel")):
        body = {} if verb == "POST" else None
        answer = bob.cluster.rest(verb, f"tasks/{opened.session_id}{path}", body, bob.token)
        assert answer == "router.no_task"
    assert alice.ask(subjects.ROUTER_TASK_GET, task, TaskReply).task.state == "started"


def test_session_is_not_renewed_nor_ended_by_another_who_knows_its_token(alice, bob, opened):
    known = {"session_id": opened.session_id, "token": opened.token}
    refused("router.no_session", bob, subjects.ROUTER_SESSION_RENEW, RenewSessionRequest(**known), RenewSessionReply)
    refused("router.no_session", bob, subjects.ROUTER_SESSION_CLOSE, CloseSessionRequest(**known), CloseSessionReply)
    assert alice.ask(subjects.ROUTER_SESSION_RENEW, RenewSessionRequest(**known), RenewSessionReply).lease_s > 0


def test_session_of_another_is_not_steered_and_a_hold_is_not_lifted(alice, bob, opened):
    steer = SteerSessionRequest(session_id=opened.session_id, suspended=True)
    refused("scheduler.no_session", bob, subjects.SCHEDULER_SESSION_STEER, steer, SteerSessionReply)
    assert alice.ask(subjects.SCHEDULER_SESSION_STEER, steer, SteerSessionReply).suspended
    for field in ({"hold": ""}, {"exclusive": True}):
        own = SteerSessionRequest(session_id=opened.session_id, **field)
        refused("scheduler.forbidden", alice, subjects.SCHEDULER_SESSION_STEER, own, SteerSessionReply)


def test_devices_are_listed_without_sessions_of_another(alice, bob, opened):
    def listed(tenant):
        gpus = tenant.ask(subjects.SCHEDULER_GPU_LIST, GpusRequest(), GpusReply).gpus
        nodes = tenant.ask(subjects.ROUTER_NODE_LIST, NodesRequest(), NodesReply).nodes
        assert [g.executor_id for g in gpus] == [n.executor_id for n in nodes] == ["x"]
        return [[s.session_id for s in part.sessions] for part in (gpus[0], nodes[0].memory)]

    alice.cluster.wait(lambda: all(opened.session_id in found for found in listed(alice)))
    assert not any(opened.session_id in found for found in listed(bob))


def test_credits_of_another_are_not_shown(alice, bob):
    show = subjects.METERING_CREDITS_SHOW
    alice.cluster.wait(lambda: alice.ask(show, credits.CreditsRequest(), credits.CreditsReply).rows)
    reply = bob.ask(show, credits.CreditsRequest(), credits.CreditsReply)
    assert all(row.tenant == "bob" for row in reply.rows)
    refused("metering.forbidden", bob, show, credits.CreditsRequest(tenant="alice"), credits.CreditsReply)


# -- speaking and hearing -----------------------------------------------------------------------------------------------


def test_client_names_no_tenant_but_its_own(alice, bob):
    client = ClientFacts(host="h", pid=1, program="forged.py")
    request = OpenSessionRequest(tenant="alice", client=client)
    refused("router.forbidden", bob, subjects.ROUTER_SESSION_OPEN, request, OpenSessionReply)
    opened = bob.open(tenant="bob")
    task = bob.ask(subjects.ROUTER_TASK_GET, TaskRequest(task_id=opened.session_id), TaskReply).task
    assert task.tenant == "bob"
    bob.close(opened)


async def test_server_lets_nobody_speak_for_another(alice, bob):
    opening = OpenSessionRequest(client=ClientFacts(host="h", pid=1, program="forged.py"))
    forbidden = [
        *[subjects.for_tenant(subject, "alice") for _, subject in subjects.CLIENT_SUBJECTS],
        *[subject for _, subject in subjects.CLIENT_SUBJECTS],
        subjects.router_task_changed("alice"),
        subjects.ROUTER_JOB_SUBMIT,
        subjects.EXECUTOR_HEARTBEAT,
        subjects.executor_session_open("x"),
        subjects.executor_session_steer("x"),
        subjects.for_tenant(subjects.executor_tunnel("x"), "alice"),
        subjects.METERING_BUDGET_SET,
        alice.held.inbox + ".x",
        subjects.tunnel_inbox(alice.held.inbox) + ".x",
        "$JS.API.STREAM.LIST",
        "$JS.API.CONSUMER.CREATE.WOOLY_EVT_ROUTER",
        "$O.WOOLY_BLOBS_alice.C.x",
    ]
    async with connected(bob) as (client, errors):
        for subject in forbidden:
            with pytest.raises(nats.errors.TimeoutError):
                await client.request(subject, opening.model_dump_json().encode(), timeout=0.05)
        await client.flush()
    for subject in forbidden:
        assert any("permissions violation" in e.lower() and f'"{subject}"'.lower() in e.lower() for e in errors), (
            subject
        )
    names = [t.name for t in alice.ask(subjects.ROUTER_TASK_LIST, TasksRequest(), TasksReply).tasks]
    assert "forged.py" not in names


async def test_nobody_hears_replies_or_tasks_of_another(alice, bob):
    heard = []

    async def hear(message):
        heard.append(message.subject)

    patterns = [">", "wooly.>", "_INBOX.>", alice.held.inbox + ".>", subjects.router_task_changed("alice"), "$JS.>"]
    patterns += [subjects.for_tenant(subjects.ROUTER_SESSION_OPEN, "alice"), subjects.ROUTER_TASKS_CHANGED]
    changed = asyncio.Event()

    async def own(message):
        changed.set()

    async with connected(bob) as (client, errors), connected(alice) as (hers, _):
        for pattern in patterns:
            await client.subscribe(pattern, cb=hear)
        await hers.subscribe(subjects.router_task_changed("alice"), cb=own)
        await client.flush()
        await hers.flush()
        opened = await asyncio.to_thread(alice.open)
        await asyncio.to_thread(alice.close, opened)
        await asyncio.wait_for(changed.wait(), 20)  # she hears of it, so there was something to hear
        await client.flush()
    assert len(errors) == len(patterns) and all("permissions violation" in e.lower() for e in errors)
    assert heard == []


# -- data channels ------------------------------------------------------------------------------------------------------


def test_channel_of_another_is_not_opened(alice, bob, opened):
    theirs = bob.open()
    try:
        for shown in (theirs.parts[0].token, theirs.token, opened.token, ""):
            channel, answer = enter(opened, token=shown or "nothing")
            assert answer.kind == Kind.ERROR and b"executor.turned_away" in answer.payload
            channel.close()
        channel, answer = enter(opened)
        assert answer.kind == Kind.WELCOME  # it is there, for who may
        again, answer = enter(opened)
        assert answer.kind == Kind.ERROR and b"has its client already" in answer.payload
        again.close()
        channel.close()
    finally:
        bob.close(theirs)


def test_buffers_of_another_are_not_read(alice, bob, script):
    argv = [sys.executable, "-m", "wooly", "run", str(script), "60"]
    with subprocess.Popen(argv, env=alice.env(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as hers:
        killing = threading.Timer(100, hers.kill)
        killing.start()
        try:
            assert hers.stdout.readline() == "ready 43008.0\n"  # her buffers are there while he looks for them
            theirs = bob.open()
            channel, answer = enter(theirs)
            assert answer.kind == Kind.WELCOME
            for number in range(64):  # ids are small numbers of each session's own, eight apart per device
                channel.send(Kind.READ, READ_HEAD.pack(number, 0, 4096))
                answer = channel.recv(20)
                assert answer.kind == Kind.ERROR and bytes(42) not in bytes(answer.payload), number
            channel.close()
            assert hers.poll() is None
        finally:
            killing.cancel()
            hers.kill()


async def test_tunnel_is_opened_for_ones_own_session_alone(alice, bob):
    opened, theirs = await asyncio.to_thread(alice.open), await asyncio.to_thread(bob.open)
    try:
        held = Credentials.parse(theirs.credentials)
        assert (held.tenant, held.user_id) == ("bob", theirs.session_id)
        client, errors = Client(), []

        async def error(e):
            errors.append(str(e))

        await client.connect(bob.cluster.nats_url, error_cb=error, allow_reconnect=False, **options(held, None))
        hers = Credentials.parse(opened.credentials)
        for subject in (
            subjects.for_tenant(subjects.executor_tunnel("x"), "alice"),
            subjects.tunnel_inbox(hers.inbox) + ".x",
            subjects.for_tenant(subjects.ROUTER_TASK_LIST, "bob"),
        ):
            await client.publish(subject, b"x")
        await client.subscribe(hers.inbox + ".>")
        await client.flush()
        await client.flush()
        assert len(errors) == 4 and all("permissions violation" in e.lower() for e in errors)
        await client.close()
    finally:
        await asyncio.to_thread(alice.close, opened)
        await asyncio.to_thread(bob.close, theirs)


# -- credentials --------------------------------------------------------------------------------------------------------


def test_token_gives_credentials_of_its_own_tenant_and_role_alone(cluster, alice, bob):
    assert alice.held.tenant == "alice" and alice.held.role == "user"
    for body in ({"tenant": "alice"}, {"role": "admin"}):
        assert cluster.rest("POST", "credentials", body, bob.token) == "router.forbidden"
    assert cluster.rest("POST", "credentials", {"tenant": "bob"}, bob.token)["tenant"] == "bob"
    made = cluster.rest("POST", "credentials", {"tenant": "bob"})  # the administrator
    assert (made["tenant"], made["role"]) == ("bob", "user")
    assert cluster.rest("POST", "credentials", {})["role"] == "admin"
    assert cluster.rest("POST", "credentials", {}, "wooly_nobody") == "router.unauthorized"
    actions = [e["action"] for e in cluster.rest("GET", "audit?limit=20")["entries"]]
    assert "credentials.create" in actions


def test_credentials_end_with_their_token_and_no_later_than_they_may(cluster):
    token = cluster.rest("POST", "tenants/bob/tokens", {"expires_in_s": 3})
    made = cluster.rest("POST", "credentials", {}, token["secret"])
    assert made["expires_at"] <= token["expires_at"]
    long = cluster.rest("POST", "credentials", {"expires_in_s": 1e6})
    assert long["expires_at"] <= time.time() + CREDENTIALS_S


def test_scopes_of_a_token_are_those_of_its_credentials(cluster):
    token = cluster.rest("POST", "tenants/bob/tokens", {"scopes": ["tasks:read"]})["secret"]
    text = cluster.rest("POST", "credentials", {}, token)["credentials"]
    control = ControlClient(Access(cluster.nats_url, lambda: Credentials.parse(text)))
    try:
        control.request(subjects.ROUTER_TASK_LIST, TasksRequest(), TasksReply)
        request = OpenSessionRequest(client=ClientFacts(host="h", pid=1, program="p"))
        with pytest.raises(RefusedError, match="these credentials may not"):
            control.request(subjects.ROUTER_SESSION_OPEN, request, OpenSessionReply)
    finally:
        control.close()


def test_revoked_token_gives_no_credentials_and_a_disabled_tenants_are_refused(cluster):
    carol = Tenant(cluster, "carol")
    try:
        assert carol.ask(subjects.ROUTER_TASK_LIST, TasksRequest(), TasksReply).tasks == ()
        (token,) = cluster.rest("GET", "tenants/carol/tokens")["tokens"]
        cluster.rest("DELETE", f"tenants/carol/tokens/{token['id']}")
        assert cluster.rest("POST", "credentials", {}, carol.token) == "router.unauthorized"
        cluster.rest("PUT", "tenants/carol", {"disabled": True})
        refused("router.unauthorized", carol, subjects.ROUTER_TASK_LIST, TasksRequest(), TasksReply)
        with pytest.raises(RefusedError):
            carol.open()
    finally:
        carol.control.close()
