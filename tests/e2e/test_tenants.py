"""Two tenants on a cluster that requires tokens: neither can receive, impersonate, read, cancel or list anything of the other.

Real nats-server, router, scheduler, metering and executor; credentials from REST. The tests try what the NATS server must
forbid, and send to services what the services must refuse.
"""

import asyncio
import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import nats
import numpy as np
import pytest
from nats.aio.client import Client
from wooly_bus import contracts, subjects
from wooly_bus.access import Access, options
from wooly_bus.blobs import AskedBlobs, name_of
from wooly_bus.contract_types import Rpc
from wooly_bus.credentials import Credentials
from wooly_bus.errors import RefusedError
from wooly_bus.rpc import ControlClient
from wooly_testkit import forks
from wooly_testkit.cluster import Cluster, Tenant, enter
from wooly_testkit.forks import Forked
from wooly_wis import credits
from wooly_wis.frames import READ_HEAD, Kind
from wooly_wis.messages import (
    Blob,
    ClientFacts,
    CloseSessionRequest,
    GetBlobRequest,
    GpusRequest,
    NodesRequest,
    OpenSessionRequest,
    PrioritizeTaskRequest,
    PutBlobRequest,
    RenewSessionRequest,
    SteerSessionRequest,
    SubmitJob,
    TaskRequest,
    TasksRequest,
)

pytestmark = pytest.mark.connected
#: Lifetime, in seconds, of credentials from REST in this cluster.
CREDENTIALS_S = 600
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with contextlib.ExitStack() as stack:
        yield Cluster(tmp_path_factory.mktemp("cluster"), stack, router={"CREDENTIALS_S": str(CREDENTIALS_S)})


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
    """A session of Alice."""
    session = alice.open()
    yield session
    alice.close(session)


def refused(code, tenant, *ask):
    with pytest.raises(RefusedError) as caught:
        tenant.ask(*ask)
    assert caught.value.code == code


@contextlib.asynccontextmanager
async def connected(tenant):
    """Yields a tenant's connection, and the errors that the server reported to it."""
    errors, client = [], Client()

    async def error(e):
        errors.append(str(e))

    try:
        held = await asyncio.to_thread(tenant.credentials)
        await client.connect(tenant.cluster.nats_url, error_cb=error, allow_reconnect=False, **options(held, None))
        yield client, errors
    finally:
        await client.close()


# -- what a tenant can --------------------------------------------------------------------------------------------------


#: A script that holds a tensor and reads it now and then, until it is told to end.
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


def ran_to_its_end(tenant, script, seconds, **env):
    ran = forks.run("wooly", "run", str(script), str(seconds), env=tenant.env(**env), timeout=100)
    assert ran.returncode == 0 and "done" in ran.stdout, ran.stderr
    assert "lease" not in ran.stderr and "renewed" not in ran.stderr, ran.stderr
    (task,) = tenant.ask(contracts.ROUTER_TASK_LIST, TasksRequest(limit=1)).tasks
    assert (task.tenant, task.state) == (tenant.name, "completed")


def test_script_with_token_runs(alice, script):
    ran_to_its_end(alice, script, 0)


@pytest.mark.slow
@pytest.mark.parametrize("channel", ["direct", "tunnel"])
def test_script_with_token_outlives_its_credentials(tmp_path, script, channel):
    with contextlib.ExitStack() as stack:
        cluster = Cluster(tmp_path / "cluster", stack, router={"CREDENTIALS_S": "6"})
        ran_to_its_end(Tenant(cluster, "alice"), script, 12, CHANNEL=channel)


@pytest.mark.parametrize("token", ["wooly_wrong", pytest.param("", marks=pytest.mark.slow)])
def test_script_without_valid_token_reports_error(alice, script, token):
    ran = forks.run("wooly", "run", str(script), "1", env=alice.env(CREDENTIAL=token), timeout=100)
    assert ran.returncode != 0 and "does not issue credentials: a valid token is needed" in ran.stderr


# -- listing and cancelling ---------------------------------------------------------------------------------------------


def test_tasks_of_other_tenant_are_not_listed(alice, bob, opened):
    mine = alice.ask(contracts.ROUTER_TASK_LIST, TasksRequest()).tasks
    assert opened.session_id in [t.task_id for t in mine] and {t.tenant for t in mine} == {"alice"}
    theirs = bob.ask(contracts.ROUTER_TASK_LIST, TasksRequest()).tasks
    assert all(t.tenant == "bob" for t in theirs)
    refused("router.forbidden", bob, contracts.ROUTER_TASK_LIST, TasksRequest(tenant="alice"))
    found = bob.cluster.rest("GET", "tasks", token=bob.token)
    assert all(t["tenant"] == "bob" for t in found["tasks"])
    assert bob.cluster.rest("GET", "tasks?tenant=alice", token=bob.token) == "router.forbidden"


def test_task_of_other_tenant_cannot_be_read_or_changed(alice, bob, opened):
    task = TaskRequest(task_id=opened.session_id)
    refused("router.no_task", bob, contracts.ROUTER_TASK_GET, task)
    refused("router.no_task", bob, contracts.ROUTER_TASK_CANCEL, task)
    move = PrioritizeTaskRequest(task_id=opened.session_id, priority=4)
    refused("router.no_task", bob, contracts.ROUTER_TASK_PRIORITIZE, move)
    named = TaskRequest(task_id=opened.session_id, tenant="alice")
    refused("router.forbidden", bob, contracts.ROUTER_TASK_CANCEL, named)
    for verb, path in (("GET", ""), ("POST", "/cancel")):
        body = {} if verb == "POST" else None
        answer = bob.cluster.rest(verb, f"tasks/{opened.session_id}{path}", body, bob.token)
        assert answer == "router.no_task"
    assert alice.ask(contracts.ROUTER_TASK_GET, task).task.state == "started"


def test_session_token_is_useless_to_other_tenant(alice, bob, opened):
    known = {"session_id": opened.session_id, "token": opened.token}
    refused("router.no_session", bob, contracts.ROUTER_SESSION_RENEW, RenewSessionRequest(**known))
    refused("router.no_session", bob, contracts.ROUTER_SESSION_CLOSE, CloseSessionRequest(**known))
    assert alice.ask(contracts.ROUTER_SESSION_RENEW, RenewSessionRequest(**known)).lease_s > 0


def test_session_of_other_tenant_cannot_be_steered(alice, bob, opened):
    steer = SteerSessionRequest(session_id=opened.session_id, suspended=True)
    refused("scheduler.no_session", bob, contracts.SCHEDULER_SESSION_STEER, steer)
    assert alice.ask(contracts.SCHEDULER_SESSION_STEER, steer).suspended
    for field in ({"hold": ""}, {"exclusive": True}):
        own = SteerSessionRequest(session_id=opened.session_id, **field)
        refused("scheduler.forbidden", alice, contracts.SCHEDULER_SESSION_STEER, own)


def test_devices_are_listed_without_other_sessions(alice, bob, opened):
    def listed(tenant):
        gpus = tenant.ask(contracts.SCHEDULER_GPU_LIST, GpusRequest()).gpus
        nodes = tenant.ask(contracts.ROUTER_NODE_LIST, NodesRequest()).nodes
        assert [g.executor_id for g in gpus] == [n.executor_id for n in nodes] == ["x"]
        return [[s.session_id for s in part.sessions] for part in (gpus[0], nodes[0].memory)]

    alice.cluster.wait(lambda: all(opened.session_id in found for found in listed(alice)))
    assert not any(opened.session_id in found for found in listed(bob))


def test_metering_rest_requires_same_tokens(cluster, alice, bob):
    port = cluster.folder / "metering" / "metering.port"
    cluster.wait(lambda: port.exists() and port.read_text())

    def get(path, token):
        """The response, or the code of its refusal."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        request = urllib.request.Request(f"http://127.0.0.1:{port.read_text()}/api/v1/credits{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as e:
            with e:
                return json.loads(e.read())["code"]

    alice.close(alice.open())
    cluster.wait(lambda: get("", alice.token)["rows"])
    assert {r["tenant"] for r in get("", alice.token)["rows"]} == {"alice"}
    assert "alice" not in {r["tenant"] for r in get("", bob.token)["rows"]}
    assert get("?tenant=alice", bob.token) == "router.forbidden"
    assert "alice" in {r["tenant"] for r in get("", cluster.token)["rows"]}
    assert get("", "") == get("", "guess") == "router.unauthorized"
    made = cluster.rest("POST", "tenants/alice/tokens", {})
    assert get("", made["secret"])["rows"]
    cluster.rest("DELETE", f"tenants/alice/tokens/{made['id']}")
    cluster.wait(lambda: get("", made["secret"]) == "router.unauthorized")


def test_credits_of_other_tenant_are_refused(alice, bob):
    show = contracts.METERING_CREDITS_SHOW
    alice.cluster.wait(lambda: alice.ask(show, credits.CreditsRequest()).rows)
    reply = bob.ask(show, credits.CreditsRequest())
    assert all(row.tenant == "bob" for row in reply.rows)
    refused("metering.forbidden", bob, show, credits.CreditsRequest(tenant="alice"))


# -- speaking and hearing -----------------------------------------------------------------------------------------------


def test_client_naming_other_tenant_is_refused(alice, bob):
    client = ClientFacts(host="h", pid=1, program="forged.py")
    request = OpenSessionRequest(tenant="alice", client=client)
    refused("router.forbidden", bob, contracts.ROUTER_SESSION_OPEN, request)
    opened = bob.open(tenant="bob")
    task = bob.ask(contracts.ROUTER_TASK_GET, TaskRequest(task_id=opened.session_id)).task
    assert task.tenant == "bob"
    bob.close(opened)


async def test_nats_refuses_publishing_for_other_tenant(alice, bob):
    opening = OpenSessionRequest(client=ClientFacts(host="h", pid=1, program="forged.py"))
    asked = [rpc for rpc in contracts.RPCS.values() if isinstance(rpc, Rpc) and rpc.scope is not None]
    assert len(asked) > 10
    forbidden = [
        *[rpc.for_tenant("alice") for rpc in asked],
        *[rpc.subject for rpc in asked],
        contracts.ROUTER_TASK_CHANGED.at("alice").subject,
        contracts.ROUTER_JOB_SUBMIT.subject,
        contracts.EXECUTOR_NODE_HEARTBEAT.subject,
        contracts.EXECUTOR_SESSION_OPEN.at("x").subject,
        contracts.EXECUTOR_SESSION_STEER.at("x").subject,
        contracts.EXECUTOR_TUNNEL_OPEN.at("x").for_tenant("alice"),
        contracts.METERING_BUDGET_SET.subject,
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
    names = [t.name for t in alice.ask(contracts.ROUTER_TASK_LIST, TasksRequest()).tasks]
    assert "forged.py" not in names


async def test_nats_refuses_subscribing_to_other_tenant(alice, bob):
    heard = []

    async def hear(message):
        heard.append(message.subject)

    patterns = [
        ">",
        "wooly.>",
        "_INBOX.>",
        alice.held.inbox + ".>",
        contracts.ROUTER_TASK_CHANGED.at("alice").subject,
        "$JS.>",
    ]
    patterns += [contracts.ROUTER_SESSION_OPEN.for_tenant("alice"), contracts.ROUTER_TASK_CHANGED.pattern]
    changed = asyncio.Event()

    async def own(message):
        changed.set()

    async with connected(bob) as (client, errors), connected(alice) as (hers, _):
        for pattern in patterns:
            await client.subscribe(pattern, cb=hear)
        await hers.subscribe(contracts.ROUTER_TASK_CHANGED.at("alice").subject, cb=own)
        await client.flush()
        await hers.flush()
        opened = await asyncio.to_thread(alice.open)
        await asyncio.to_thread(alice.close, opened)
        await asyncio.wait_for(changed.wait(), 20)  # Alice receives the event, so the event exists
        await client.flush()
    assert len(errors) == len(patterns) and all("permissions violation" in e.lower() for e in errors)
    assert heard == []


# -- data channels ------------------------------------------------------------------------------------------------------


def test_channel_of_other_tenant_is_refused(alice, bob, opened):
    theirs = bob.open()
    try:
        for shown in (theirs.parts[0].token, theirs.token, opened.token, ""):
            channel, answer = enter(opened, token=shown or "nothing")
            assert answer.kind == Kind.ERROR and b"executor.turned_away" in answer.payload
            channel.close()
        channel, answer = enter(opened)
        assert answer.kind == Kind.WELCOME  # the session exists, for its owner
        again, answer = enter(opened)
        assert answer.kind == Kind.ERROR and b"already has a client" in answer.payload
        again.close()
        channel.close()
    finally:
        bob.close(theirs)


def test_buffers_of_other_tenant_are_not_readable(alice, bob, script):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with Forked("wooly", "run", str(script), "60", env=alice.env(), **pipes) as hers:
        killing = threading.Timer(100, hers.kill)
        killing.start()
        try:
            assert hers.stdout.readline() == "ready 43008.0\n"  # Alice's buffers exist during Bob's search
            theirs = bob.open()
            channel, answer = enter(theirs)
            assert answer.kind == Kind.WELCOME
            for number in range(64):  # ids are small numbers of each session, eight apart per device
                channel.send(Kind.READ, READ_HEAD.pack(number, 0, 4096))
                answer = channel.recv(20)
                assert answer.kind == Kind.ERROR and bytes(42) not in bytes(answer.payload), number
            channel.close()
            assert hers.poll() is None
        finally:
            killing.cancel()
            hers.kill()


async def test_tunnel_for_session_of_other_tenant_is_refused(alice, bob):
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
            contracts.EXECUTOR_TUNNEL_OPEN.at("x").for_tenant("alice"),
            subjects.tunnel_inbox(hers.inbox) + ".x",
            contracts.ROUTER_TASK_LIST.for_tenant("bob"),
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


# -- jobs ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def classifier(cluster, tmp_path_factory):
    """A folder with the example's module and two inputs, the module's digest, and the CPU's result for each input."""
    import torch

    folder = tmp_path_factory.mktemp("job")
    for where in (["-o", folder / "job.wism"], ["--blobs", folder / "job"]):
        exported = forks.run("wooly", "export", f"{ROOT / 'examples/job.py'}:build", *map(str, where), timeout=100)
        assert exported.returncode == 0, exported.stderr
    x = np.random.default_rng(0).standard_normal((32, 64), dtype=np.float32)
    np.save(folder / "hers.npy", 2 * x)
    x.tofile(folder / "x.bin")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 10)).eval()
    with torch.no_grad():
        results = {
            name: model(torch.from_numpy(of)).softmax(-1).numpy() for name, of in {"hers": 2 * x, "x": x}.items()
        }
    return folder, exported.stdout.strip(), results


@pytest.fixture(scope="module")
def her_job(tenants, classifier, tmp_path_factory):
    """A job of Alice through the command line: its report, and the place of its results."""
    folder, _, _ = classifier
    out = tmp_path_factory.mktemp("out")
    argv = ("submit", folder / "job.wism", "-i", f"x={folder / 'hers.npy'}", "-o", out, "--json")
    return json.loads(tenants[0].wooly(*argv)), out


def test_job_with_token_only_is_submitted_followed_and_read(alice, her_job, classifier):
    report, out = her_job
    assert report["state"] == "completed", report
    assert np.load(out / "scores.npy").tobytes() == classifier[2]["hers"].tobytes()
    assert [line.split()[1] for line in alice.wooly("logs", report["task_id"]).splitlines()] == [
        "pending",
        "started",
        "completed",
    ]
    listed = json.loads(alice.wooly("tasks", "--kind", "job", "--json"))["tasks"]
    assert (report["task_id"], "alice") in [(t["task_id"], t["tenant"]) for t in listed]
    assert "completed" in alice.wooly("tasks", "cancel", report["task_id"])


def test_nats_py_example_needs_only_a_token(bob, classifier):
    pytest.importorskip("nkeys", reason="nats-py signs in with it")
    folder, module, results = classifier
    me = folder / "bob.json"
    me.write_text(json.dumps(bob.cluster.rest("POST", "credentials", {}, bob.token)))
    argv = [ROOT / "examples/job_over_nats.py", me, folder / "job", module, folder / "x.bin"]
    ran = subprocess.run([sys.executable, *map(str, argv)], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    assert f"scores f32 [32, 10] {results['x'].tobytes()[:16].hex()}" in ran.stdout and "completed" in ran.stdout


def test_job_of_other_tenant_cannot_be_read_or_changed(alice, bob, her_job, classifier):
    name = her_job[0]["task_id"]
    ask = TaskRequest(task_id=name)
    for rpc in (contracts.ROUTER_TASK_GET, contracts.ROUTER_TASK_CANCEL):
        refused("router.no_task", bob, rpc, ask)
    assert name not in [t.task_id for t in bob.ask(contracts.ROUTER_TASK_LIST, TasksRequest()).tasks]
    mine = SubmitJob(job_id=name, module=classifier[1])
    refused("router.id_taken", bob, contracts.ROUTER_JOB_SUBMIT, mine)
    hers = SubmitJob(job_id="job-of-alice", tenant="alice", module=classifier[1])
    refused("router.forbidden", bob, contracts.ROUTER_JOB_SUBMIT, hers)
    assert alice.story(name) == ["pending", "started", "completed"]


def test_blobs_of_other_tenant_cannot_be_used(alice, bob, her_job, classifier):
    for output in her_job[0]["outputs"]:
        assert AskedBlobs(alice.control).get(output["digest"], output["nbytes"])
        ask = GetBlobRequest(digest=output["digest"])
        refused("bus.blob_missing", bob, contracts.ROUTER_BLOB_GET, ask)
        refused("router.forbidden", bob, contracts.ROUTER_BLOB_GET, ask.model_copy(update={"tenant": "alice"}))
    secret = AskedBlobs(alice.control).put(b"known to alice alone")
    about = {"digest": secret, "nbytes": 20, "upload": "u" * 32}
    # The answer does not reveal that the blob exists: the client must send it.
    assert not bob.ask(contracts.ROUTER_BLOB_PUT, PutBlobRequest(**about)).kept
    refused("router.forbidden", bob, contracts.ROUTER_BLOB_PUT, PutBlobRequest(**about, tenant="alice"))
    # As a job's module or input, the blob is not found.
    job = SubmitJob(job_id=f"job-{time.time_ns()}", module=secret)
    bob.ask(contracts.ROUTER_JOB_SUBMIT, job)
    found = bob.ask(contracts.ROUTER_TASK_GET, TaskRequest(task_id=job.job_id)).task
    assert found.state == "failed" and "has no blob" in found.reason


def test_blob_with_wrong_digest_or_size_is_refused(cluster):
    dave = Tenant(cluster, "dave")
    about = {"digest": name_of(b"abc"), "nbytes": 3, "upload": "v" * 32, "data": base64.b64encode(b"abc").decode()}
    for code, changes in (
        ("bus.blob_corrupt", {"digest": "0" * 64}),
        ("router.too_large", {"nbytes": (4 << 20) + 1}),
        ("router.bad_blob", {"nbytes": 2}),
        ("router.bad_blob", {"data": "not base64"}),
        ("bus.upload", {"nbytes": 4, "offset": 1, "after": 7}),
    ):
        with pytest.raises(RefusedError) as refusal:
            dave.ask(contracts.ROUTER_BLOB_PUT, PutBlobRequest(**about | changes))
        assert refusal.value.code == code, changes
    blobs = AskedBlobs(dave.control)
    for size in (0, 1, 512 << 10, (512 << 10) + 1, 3 << 20):
        data = os.urandom(size)
        assert blobs.get(blobs.put(memoryview(data)), size) == data
    with pytest.raises(RefusedError, match="keeps") as full:
        for _ in range(6):
            blobs.put(os.urandom(3 << 20))
    assert full.value.code == "router.limit"
    dave.control.close()


async def test_job_events_go_to_own_tenant_only(alice, bob, classifier):
    module = AskedBlobs(bob.control).put((classifier[0] / "job" / classifier[1]).read_bytes())
    heard = {"alice": [], "bob": []}
    told = asyncio.Event()

    def hear(name):
        async def each(message):
            heard[name].append(json.loads(message.data))
            if heard[name][-1]["state"] in ("failed", "completed"):
                told.set()

        return each

    async with connected(alice) as (hers, _), connected(bob) as (his, _):
        await hers.subscribe(contracts.ROUTER_TASK_CHANGED.at("alice").subject, cb=hear("alice"))
        await his.subscribe(contracts.ROUTER_TASK_CHANGED.at("bob").subject, cb=hear("bob"))
        await hers.flush()
        await his.flush()
        job = SubmitJob(job_id=f"job-{time.time_ns()}", module=module)  # without its input the job ends at once
        await asyncio.to_thread(bob.ask, contracts.ROUTER_JOB_SUBMIT, job)
        await asyncio.wait_for(told.wait(), 30)
        await hers.flush()
    assert {e["task_id"] for e in heard["bob"]} == {job.job_id} and heard["alice"] == []


@pytest.mark.slow  # the tests of the router restart it with jobs, too
def test_acknowledged_job_survives_router(alice, cluster, classifier):
    """The router is killed after the acknowledgement, before an executor has the job.

    Sent again to the next router, it is one task.
    """
    folder, module, _ = classifier
    blobs = AskedBlobs(alice.control)
    for path in (folder / "job").iterdir():
        blobs.put(path.read_bytes())
    x = blobs.put((folder / "x.bin").read_bytes())
    names = [f"job-{time.time_ns()}-{i}" for i in range(3)]
    jobs = [SubmitJob(job_id=n, module=module, inputs=(Blob(name="x", digest=x),)) for n in names]
    cluster.processes["x"].send_signal(signal.SIGSTOP)  # so that nothing runs before the kill
    try:
        for job in jobs:
            alice.ask(contracts.ROUTER_JOB_SUBMIT, job)
        cluster.kill("router")
    finally:
        cluster.processes["x"].send_signal(signal.SIGCONT)
        cluster.start("router")
        cluster.find_router()
    for job in jobs:
        alice.control.request_until_answered(contracts.ROUTER_JOB_SUBMIT, job)
    cluster.wait(lambda: all(alice.story(n)[-1] == "completed" for n in names))
    for name in names:
        story = alice.story(name)
        assert story.count("completed") == 1 and story[0] == "pending", story


# -- credentials --------------------------------------------------------------------------------------------------------


def test_credentials_have_tenant_and_role_of_token(cluster, alice, bob):
    assert alice.held.tenant == "alice" and alice.held.role == "user"
    for body in ({"tenant": "alice"}, {"role": "admin"}):
        assert cluster.rest("POST", "credentials", body, bob.token) == "router.forbidden"
    assert cluster.rest("POST", "credentials", {"tenant": "bob"}, bob.token)["tenant"] == "bob"
    made = cluster.rest("POST", "credentials", {"tenant": "bob"})  # the administrator's request
    assert (made["tenant"], made["role"]) == ("bob", "user")
    assert cluster.rest("POST", "credentials", {})["role"] == "admin"
    assert cluster.rest("POST", "credentials", {}, "wooly_nobody") == "router.unauthorized"
    actions = [e["action"] for e in cluster.rest("GET", "audit?limit=20")["entries"]]
    assert "credentials.create" in actions


def test_credentials_expire_with_their_token(cluster):
    token = cluster.rest("POST", "tenants/bob/tokens", {"expires_in_s": 3})
    made = cluster.rest("POST", "credentials", {}, token["secret"])
    assert made["expires_at"] <= token["expires_at"]
    long = cluster.rest("POST", "credentials", {"expires_in_s": 1e6})
    assert long["expires_at"] <= time.time() + CREDENTIALS_S


def test_credentials_have_scopes_of_token(cluster):
    token = cluster.rest("POST", "tenants/bob/tokens", {"scopes": ["tasks:read"]})["secret"]
    text = cluster.rest("POST", "credentials", {}, token)["credentials"]
    control = ControlClient(Access(cluster.nats_url, lambda: Credentials.parse(text)))
    try:
        control.request(contracts.ROUTER_TASK_LIST, TasksRequest())
        request = OpenSessionRequest(client=ClientFacts(host="h", pid=1, program="p"))
        with pytest.raises(RefusedError, match="these credentials do not permit the request"):
            control.request(contracts.ROUTER_SESSION_OPEN, request)
    finally:
        control.close()


def test_revoked_token_and_disabled_tenant_are_refused(cluster):
    carol = Tenant(cluster, "carol")
    try:
        assert carol.ask(contracts.ROUTER_TASK_LIST, TasksRequest()).tasks == ()
        (token,) = cluster.rest("GET", "tenants/carol/tokens")["tokens"]
        cluster.rest("DELETE", f"tenants/carol/tokens/{token['id']}")
        assert cluster.rest("POST", "credentials", {}, carol.token) == "router.unauthorized"
        cluster.rest("PUT", "tenants/carol", {"disabled": True})
        refused("router.unauthorized", carol, contracts.ROUTER_TASK_LIST, TasksRequest())
        with pytest.raises(RefusedError):
            carol.open()
    finally:
        carol.control.close()
