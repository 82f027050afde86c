"""The attacker is a tenant with its own NATS credentials."""

import contextlib
import json
import threading

import pytest
from wooly_bus import contracts
from wooly_bus.access import Access
from wooly_bus.app import TENANT_REQUESTS
from wooly_bus.channel import ChannelClient, ChannelError
from wooly_bus.channel.tunnel import open_tunnel
from wooly_bus.contract_types import Rpc
from wooly_bus.credentials import Credentials
from wooly_bus.errors import RefusedError
from wooly_wis.frames import PROTOCOL, Kind, pack_json
from wooly_wis.messages import (
    CheckCeilingRequest,
    ErrorReply,
    GpusRequest,
    Message,
    PrioritizeTaskRequest,
    SetTenantRequest,
    SteerSessionRequest,
    SubmitJob,
    TaskRequest,
    TasksRequest,
)

pytestmark = pytest.mark.connected


# -- class and weight ------------------------------------------------------------------------------------------------


def _refused(code, act, *ask, **wanted):
    with pytest.raises(RefusedError) as error:
        act(*ask, **wanted)
    assert error.value.code == code, error.value
    return str(error.value)


def test_request_above_ceilings_is_refused_on_every_subject(cluster, bob):
    """Default ceilings with required tokens: P2, weight 100, no exclusive device."""
    above = ({"priority": 0}, {"priority": 1}, {"weight": 101}, {"weight": 1 << 20}, {"gpu_mode": "exclusive"})
    for wanted in above:
        assert "wooly tenants set bob" in _refused("router.above_ceiling", bob.open, **wanted)
        job = SubmitJob(job_id="bobs-job-above", module="0" * 64, **wanted)
        _refused("router.above_ceiling", bob.ask, contracts.ROUTER_JOB_SUBMIT, job)
    opened = bob.open(weight=100)
    name = opened.session_id
    for wanted in ({"priority": 0}, {"weight": 101}, {"priority": 2, "weight": 1 << 20}):
        steer = SteerSessionRequest(session_id=name, **wanted)
        _refused("scheduler.above_ceiling", bob.ask, contracts.SCHEDULER_SESSION_STEER, steer)
    for wanted in ({"exclusive": True}, {"policy": {"priority": 0}}):
        steer = SteerSessionRequest.model_validate({"session_id": name, **wanted})
        _refused("scheduler.forbidden", bob.ask, contracts.SCHEDULER_SESSION_STEER, steer)
    prioritize = PrioritizeTaskRequest(task_id=name, priority=1)
    _refused("router.above_ceiling", bob.ask, contracts.ROUTER_TASK_PRIORITIZE, prioritize)
    assert bob.ask(contracts.ROUTER_TASK_GET, TaskRequest(task_id=name)).task.priority == 2
    steer = SteerSessionRequest(session_id=name, priority=3, weight=99)
    policy = bob.ask(contracts.SCHEDULER_SESSION_STEER, steer).policy
    assert (policy.priority, policy.weight) == (3, 99)
    bob.close(opened)


def test_ceilings_cannot_be_read_or_changed_by_tenant(bob):
    asks = [
        (contracts.ROUTER_TENANT_SET, SetTenantRequest(tenant="bob", class_ceiling=0, credential=bob.token)),
        (contracts.ROUTER_CEILING_CHECK, CheckCeilingRequest(tenant="alice")),
    ]
    for rpc, message in asks:
        for published in (rpc.subject, rpc.for_tenant("bob")):
            assert not bob.held.permissions.may_publish(published), message


def test_lowered_ceiling_lowers_running_session(cluster, bob):
    cluster.rest("PUT", "tenants/bob", {"class_ceiling": 0, "weight_ceiling": 5000})
    opened = bob.open(priority=0, weight=5000)
    changed = cluster.rest("PUT", "tenants/bob", {"class_ceiling": 2, "weight_ceiling": 100})
    assert (changed["class_ceiling"], changed["weight_ceiling"], changed["exclusive"]) == (2, 100, False)
    steer = SteerSessionRequest(session_id=opened.session_id, suspended=False)
    cluster.wait(lambda: opened.session_id in _seen(bob))
    policy = bob.ask(contracts.SCHEDULER_SESSION_STEER, steer).policy
    assert (policy.priority, policy.weight) == (2, 100)
    bob.close(opened)


def _seen(tenant):
    """The tenant's sessions that the scheduler follows."""
    gpus = tenant.ask(contracts.SCHEDULER_GPU_LIST, GpusRequest()).gpus
    return [s.session_id for gpu in gpus for s in gpu.sessions]


# -- tunnels -----------------------------------------------------------------------------------------------------------


def tunnel(tenant, opened):
    """A tunnel to the executor of a session, with that session's credentials."""
    held = Credentials.parse(opened.credentials)
    return open_tunnel(
        Access(tenant.cluster.nats_url, lambda: held), contracts.EXECUTOR_TUNNEL_OPEN.at("x"), timeout=30
    )


def enter(tenant, opened):
    """A client of a session that was admitted through a tunnel."""
    channel = ChannelClient(tunnel(tenant, opened))
    hello = {"protocol": PROTOCOL, "session_id": opened.session_id, "token": opened.parts[0].token}
    channel.send(Kind.HELLO, pack_json(hello))
    assert channel.recv(60).kind == Kind.WELCOME
    return channel


def test_tunnels_of_tenant_are_limited(alice, bob):
    with contextlib.ExitStack() as ends:

        def opened_by(tenant):
            made = tenant.open()
            ends.callback(tenant.close, made)
            return made

        for _ in range(4):
            ends.callback(enter(bob, opened_by(bob)).close)
        with pytest.raises(ChannelError) as refused:
            tunnel(bob, opened_by(bob))
        said = str(refused.value)
        assert "tenant bob has 4 open tunnels on this executor; the limit for one tenant is 4" in said
        assert "WOOLY_EXECUTOR_TUNNELS_PER_TENANT" in said and "end sessions that use a tunnel" in said
        innocent = enter(alice, opened_by(alice))
        ends.callback(innocent.close)
        innocent.send(Kind.SYNC)
        assert innocent.recv(60).kind == Kind.RESULT


def test_third_tunnel_of_session_is_refused(bob):
    opened = bob.open()
    with contextlib.ExitStack() as ends:
        ends.callback(bob.close, opened)
        ends.callback(enter(bob, opened).close)
        ends.callback(tunnel(bob, opened).close)
        with pytest.raises(ChannelError, match="has 2 open tunnels on this executor; the limit for one session is 2"):
            tunnel(bob, opened)


def sent_raw(tenant, rpc, data):
    """Send a malformed request. Returns the code of the refusal."""

    class Raw(Message):
        def model_dump_json(self, **_):
            return data

    with pytest.raises(RefusedError) as refused:
        tenant.ask(Rpc(rpc.subject, Raw, ErrorReply), Raw())
    return refused.value.code


@pytest.mark.parametrize(
    ("rpc", "fields"),
    [
        (contracts.ROUTER_JOB_SUBMIT, {"job_id": "a" * 8, "module": "0" * 64, "inputs": [{}] * 150_000}),
        (contracts.ROUTER_SESSION_OPEN, {"node_groups": [1] * 40_000}),
        (contracts.ROUTER_SESSION_OPEN, {"model": "x" * 900_000}),
        (contracts.ROUTER_TASK_LIST, {str(i): 1 for i in range(10_000)}),
        (contracts.ROUTER_TRACE_ADD, {"task_id": "a", "spans": [{}] * 200_000}),
    ],
)
def test_message_with_many_errors_reports_the_first(alice, bob, rpc, fields):
    assert sent_raw(bob, rpc, json.dumps(fields)) == "bus.envelope"
    assert alice.ask(contracts.ROUTER_TASK_LIST, TasksRequest(limit=1)).tasks is not None


def test_request_flood_of_tenant_leaves_room_for_others(alice, bob):
    stop, asked, codes = threading.Event(), [0] * (TENANT_REQUESTS + 4), set()

    def flood(number):
        while not stop.is_set():
            try:
                bob.ask(contracts.ROUTER_TASK_LIST, TasksRequest(limit=200))
            except RefusedError as e:
                codes.add(e.code)
            asked[number] += 1

    threads = [threading.Thread(target=flood, args=(i,)) for i in range(len(asked))]
    for thread in threads:
        thread.start()
    try:
        while sum(asked) < 50:
            stop.wait(0.01)
        before = sum(asked)
        opened = alice.open()
        assert alice.ask(contracts.ROUTER_TASK_LIST, TasksRequest(limit=1)).tasks
        assert alice.close(opened).closed
        while sum(asked) == before:  # the flood continues during this
            stop.wait(0.01)
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert codes <= {"router.limit"}
