"""The router's actor over a real nats-server: opening, renewing, closing, lapsing, restarts, silent executors."""

import asyncio
import contextlib
import dataclasses

import pytest
from wooly_bus import subjects
from wooly_bus.app import ServiceApp
from wooly_bus.errors import RefusedError
from wooly_router import actor as actor_module
from wooly_router.core.registry import Registry
from wooly_router.store import PartRecord
from wooly_testkit.nats import nats_server as start_nats_server
from wooly_wis.messages import (
    AdmitSessionReply,
    AdmitSessionRequest,
    CloseSessionRequest,
    NodesRequest,
    RenewSessionReply,
    RenewSessionRequest,
    SessionClosed,
    SessionPolicy,
)

pytestmark = pytest.mark.connected


async def refusal(work):
    with pytest.raises(RefusedError) as caught:
        await work
    return caught.value


async def test_open_asks_the_executor_and_remembers(rig):
    async with rig("a") as r:
        opened = await r.open(tenant="t", priority=1, required_vram=10)
        hosted = r.executors[0].sessions[opened.session_id]
        (part,) = opened.parts
        assert (part.executor_id, part.node, part.endpoints) == ("a", "host", ("unix:///tmp/a.sock",))
        assert (hosted.token, hosted.tenant, hosted.priority, hosted.quota) == (opened.token, "t", 1, 10)
        assert opened.lease_s == hosted.lease_s == 9.0 and len(opened.token) >= 32
        record = await r.actor.store.get(opened.session_id)
        assert record.program == "train.py" and record.lease_until == r.clock.now + 9.0


async def test_open_without_an_executor_names_the_cure(rig):
    async with rig() as r:
        r.clock.now += actor_module.HEARTBEAT_GRACE_S
        error = await refusal(r.open())
        assert error.code == "router.no_executor" and error.retryable
        assert "wooly up" in str(error) and "python -m wooly_executor" in str(error)


async def test_open_right_after_the_start_waits_for_the_first_heartbeat(rig):
    async with rig() as r:
        opening = asyncio.create_task(r.open())
        await asyncio.sleep(0.1)
        assert not opening.done()
        r.clock.now += actor_module.HEARTBEAT_GRACE_S
        assert (await refusal(opening)).code == "router.no_executor"
    async with rig("a") as r:
        r.actor.registry = Registry()
        opening = asyncio.create_task(r.open())
        await asyncio.sleep(0.1)
        await r.beat()
        assert (await opening).parts[0].executor_id == "a"


async def test_open_after_five_silent_seconds_is_refused(rig):
    async with rig("a") as r:
        r.clock.now += 5.1
        assert (await refusal(r.open())).code == "router.no_executor"
        await r.beat()
        assert (await r.open()).parts[0].executor_id == "a"


async def test_open_spreads_sessions_also_when_asked_at_once(rig):
    async with rig("a", "b") as r:
        opened = await asyncio.gather(*[r.open() for _ in range(6)])
        assert sorted(o.parts[0].executor_id for o in opened) == ["a", "a", "a", "b", "b", "b"]
        assert r.actor._opening == {}


async def test_exclusive_device_is_given_once_also_when_asked_at_once(rig):
    async with rig("a") as r:
        answers = await asyncio.gather(*[r.open(gpu_mode="exclusive") for _ in range(4)], return_exceptions=True)
        assert sum(not isinstance(a, Exception) for a in answers) == 1
        error = await refusal(r.open())
        assert error.code == "router.no_fit" and "exclusively" in str(error)


async def test_reserved_memory_is_not_promised_twice(rig):
    async with rig("a") as r:
        opened = await r.open(required_vram=600)
        assert "400 bytes unreserved" in str(await refusal(r.open(required_vram=600)))
        await r.actor.on_close_session(CloseSessionRequest(session_id=opened.session_id, token=opened.token))
        await r.open(required_vram=600)


async def test_open_passes_over_executors_that_are_dead_or_refuse(rig):
    async with rig("a", "b", "c") as r:
        await r.actor.on_heartbeat(r.executors[0].heartbeat(executor_id="0-dead"))
        r.executors[0].refuse = RefusedError("executor.admission", "full")
        assert (await r.open()).parts[0].executor_id == "b"
        for executor in r.executors:
            executor.refuse = RefusedError("executor.admission", "full", retryable=True)
        error = await refusal(r.open())
        assert (error.code, str(error), error.retryable) == ("executor.admission", "full", True)
        assert r.actor._opening == {}


async def test_open_on_nothing_but_dead_executors_says_so(rig):
    async with rig("a") as r:
        ghost = r.executors[0].heartbeat(executor_id="ghost")
        r.clock.now += 5.1
        await r.actor.on_heartbeat(ghost)
        error = await refusal(r.open())
        assert error.code == "router.executor_silent" and "ghost" in str(error)


async def test_frozen_executor_holds_up_nobody_else(rig, monkeypatch):
    monkeypatch.setattr(actor_module, "EXECUTOR_TIMEOUT_S", 1.0)
    async with rig("b") as r:
        mine = await r.open()
        await r.actor.on_heartbeat(r.executors[0].heartbeat(executor_id="a"))
        client = await r.app.broker.connect()
        subscription = await client.subscribe(subjects.executor_session_open("a"))
        opening = asyncio.create_task(r.open())
        renewed = await r.app.request(
            subjects.ROUTER_SESSION_RENEW,
            RenewSessionRequest(session_id=mine.session_id, token=mine.token),
            RenewSessionReply,
            timeout=0.8,
        )
        assert renewed.lease_s == 9.0 and not opening.done()
        assert (await opening).parts[0].executor_id == "b"
        await subscription.unsubscribe()


async def test_renewal_moves_the_lease_and_wants_the_token(rig):
    async with rig("a") as r:
        opened = await r.open()
        r.clock.now += 5
        await r.actor.on_renew_session(RenewSessionRequest(session_id=opened.session_id, token=opened.token))
        assert (await r.actor.store.get(opened.session_id)).lease_until == r.clock.now + 9.0
        for wrong in ({"token": "x"}, {"token": "schlüssel"}, {"session_id": "other"}):
            request = RenewSessionRequest(**{"session_id": opened.session_id, "token": opened.token} | wrong)
            assert (await refusal(r.actor.on_renew_session(request))).code == "router.no_session"


async def test_renewal_of_what_the_executor_lost_ends_the_session(rig):
    async with rig("a") as r:
        opened = await r.open()
        r.executors[0].sessions.clear()
        request = RenewSessionRequest(session_id=opened.session_id, token=opened.token)
        assert (await refusal(r.actor.on_renew_session(request))).code == "router.no_session"
        assert await r.actor.store.all() == []


async def test_renewal_on_a_dead_executor_is_retryable(rig):
    async with rig("a") as r:
        opened = await r.open()
        await r.actor.store.remove(opened.session_id)
        record = actor_module.SessionRecord(
            "s", (PartRecord("ghost", "n"),), "t", "x", 2, "shared", None, "", "h", 0.0, r.clock.now
        )
        await r.actor.store.add(record)
        error = await refusal(r.actor.on_renew_session(RenewSessionRequest(session_id="s", token="t")))
        assert error.code == "router.executor_lost" and error.retryable


async def test_close_tells_the_executor_and_twice_is_no_error(rig):
    async with rig("a") as r:
        opened = await r.open()
        request = CloseSessionRequest(session_id=opened.session_id, token=opened.token)
        stranger = CloseSessionRequest(session_id=opened.session_id, token="x")
        assert (await refusal(r.actor.on_close_session(stranger))).code == "router.no_session"
        assert (await r.actor.on_close_session(request)).closed
        assert r.executors[0].closed == [(opened.session_id, "closed by its client")]
        assert not (await r.actor.on_close_session(request)).closed


async def test_lapsed_lease_ends_the_session_and_tells_the_executor(rig):
    async with rig("a") as r:
        first, second = await r.open(), await r.open()
        r.clock.now += 8
        await r.actor.on_renew_session(RenewSessionRequest(session_id=second.session_id, token=second.token))
        assert await r.actor.lapse() == 0
        r.clock.now += 1.5
        assert await r.actor.lapse() == 1
        assert r.executors[0].closed == [(first.session_id, "the session's lease lapsed")]
        assert [s.id for s in await r.actor.store.all()] == [second.session_id]


async def test_sweep_outlives_a_failing_database(rig, monkeypatch, caplog):
    async with rig("a") as r:
        calls = []

        async def failing(now):
            calls.append(now)
            raise OSError("disk away")

        monkeypatch.setattr(r.actor.store, "lapsed", failing)
        task = asyncio.create_task(r.actor.sweep(0.01))
        while len(calls) < 3:
            await asyncio.sleep(0.01)
        assert not task.done() and "leases could not be checked" in caplog.text
        task.cancel()


async def test_heartbeat_without_an_old_session_ends_it_but_spares_a_fresh_one(rig):
    async with rig("a") as r:
        old = await r.open()
        r.clock.now += actor_module.FRESH_S + 0.1
        await r.beat()
        fresh = await r.open()
        await r.actor.on_heartbeat(r.executors[0].heartbeat(sessions=()))
        assert [s.id for s in await r.actor.store.all()] == [fresh.session_id]
        assert old.session_id != fresh.session_id


async def test_executor_s_news_of_an_end_is_taken(rig):
    async with rig("a") as r:
        opened = await r.open()
        event = SessionClosed(session_id=opened.session_id, executor_id="a")
        await r.app.publish(subjects.EXECUTOR_SESSION_CLOSED, event)
        await r.app.publish(subjects.EXECUTOR_SESSION_CLOSED, event)
        deadline = asyncio.get_running_loop().time() + 5
        while await r.actor.store.all():
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.01)


async def test_restarted_router_gives_sessions_a_whole_lease(rig):
    async with rig("a") as r:
        opened = await r.open()
        r.clock.now += 100
        await r.actor.resume()
        assert await r.actor.lapse() == 0
        await r.actor.on_renew_session(RenewSessionRequest(session_id=opened.session_id, token=opened.token))


async def test_nodes_tell_who_is_lost(rig):
    async with rig("a", "b") as r:
        r.clock.now += 6
        await r.actor.on_heartbeat(r.executors[1].heartbeat(utilization=0.5, memory_used=7))
        nodes = (await r.actor.on_nodes(NodesRequest())).nodes
        assert [(n.executor_id, n.state, n.age_s) for n in nodes] == [("a", "lost", 6.0), ("b", "alive", 0.0)]
        assert (nodes[1].utilization, nodes[1].memory_used) == (0.5, 7)


# -- several devices ---------------------------------------------------------------------------------------------------


def names(opened):
    return [p.executor_id for p in opened.parts]


def has(r):
    """Per executor, the sessions that it has."""
    return [sorted(e.sessions) for e in r.executors]


async def eventually(condition):
    deadline = asyncio.get_running_loop().time() + 5
    while not condition():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)


async def test_open_of_two_devices_takes_an_executor_for_each_and_one_token(rig):
    async with rig("a", "b", "c") as r:
        first = await r.open(gpu_count=2, required_vram=600)
        assert names(first) == ["a", "b"] and [p.endpoints[0] for p in first.parts] == [
            "unix:///tmp/a.sock",
            "unix:///tmp/b.sock",
        ]
        assert has(r) == [[first.session_id], [first.session_id], []]
        hosted = [e.sessions[first.session_id] for e in r.executors[:2]]
        assert {h.token for h in hosted} == {first.token} and {h.quota for h in hosted} == {600}
        assert [p.executor_id for p in (await r.actor.store.get(first.session_id)).parts] == ["a", "b"]
        assert names(await r.open(gpu_count=2)) == ["c", "a"]
        error = await refusal(r.open(gpu_count=2, required_vram=600))
        assert error.code == "router.no_fit" and "2 devices were asked for, and 1 of 3 executors fit" in str(error)
        assert "a has 400 bytes unreserved" in str(error) and "b has 400 bytes unreserved" in str(error)
        assert r.actor._opening == {}


async def test_open_of_more_devices_than_executors_says_both_numbers(rig):
    async with rig("a", "b") as r:
        error = await refusal(r.open(gpu_count=3))
        assert error.code == "router.too_few" and error.retryable
        assert "3 devices were asked for, and 2 executors are alive" in str(error) and "wooly up --gpus 3" in str(error)
        assert has(r) == [[], []] and await r.actor.store.all() == []


async def test_open_of_two_devices_is_all_or_nothing(rig):
    async with rig("a", "b") as r:
        r.executors[1].refuse = RefusedError("executor.admission", "full")
        error = await refusal(r.open(gpu_count=2))
        assert error.code == "router.no_fit" and "1 of 2 executors fit" in str(error) and "b: full" in str(error)
        ((session_id, reason),) = r.executors[0].closed
        assert has(r) == [[], []] and "another executor" in reason
        assert await r.actor.store.all() == [] and r.actor._opening == {}
        assert await r.actor.store.get(session_id) is None
        r.executors[1].refuse = None
        assert names(await r.open(gpu_count=2)) == ["a", "b"]


async def test_open_of_two_devices_passes_over_the_dead_and_leaves_nothing_behind(rig):
    async with rig("a", "b") as r:
        await r.actor.on_heartbeat(r.executors[0].heartbeat(executor_id="0-dead"))
        opened = await r.open(gpu_count=2)
        assert names(opened) == ["a", "b"] and has(r) == [[opened.session_id]] * 2
        assert len(r.executors[0].closed) == 1


async def test_exclusive_pairs_asked_at_once_never_share(rig):
    async with rig("a", "b", "c") as r:
        answers = await asyncio.gather(
            *[r.open(gpu_count=2, gpu_mode="exclusive") for _ in range(3)], return_exceptions=True
        )
        assert sum(not isinstance(a, Exception) for a in answers) == 1
        assert sorted(len(s) for s in has(r)) == [0, 1, 1]


async def test_renewal_reaches_every_part(rig):
    async with rig("a", "b") as r:
        opened = await r.open(gpu_count=2)
        request = RenewSessionRequest(session_id=opened.session_id, token=opened.token)
        r.clock.now += 5
        assert (await r.actor.on_renew_session(request)).lease_s == 9.0
        assert (await r.actor.store.get(opened.session_id)).lease_until == r.clock.now + 9.0
        r.executors[1].sessions.clear()
        error = await refusal(r.actor.on_renew_session(request))
        assert error.code == "router.no_session" and "executor b" in str(error)
        await eventually(lambda: has(r) == [[], []])
        assert r.executors[0].closed == [(opened.session_id, "it ended on executor b")]
        assert await r.actor.store.all() == []


async def test_renewal_with_one_silent_executor_names_it_and_moves_no_lease(rig):
    async with rig("a") as r:
        opened = await r.open()
        record = await r.actor.store.get(opened.session_id)
        await r.actor.store.remove(record.id)
        await r.actor.store.add(dataclasses.replace(record, parts=(*record.parts, PartRecord("ghost", "n"))))
        r.clock.now += 5
        request = RenewSessionRequest(session_id=opened.session_id, token=opened.token)
        error = await refusal(r.actor.on_renew_session(request))
        assert error.code == "router.executor_lost" and "ghost" in str(error) and error.retryable
        assert (await r.actor.store.get(opened.session_id)).lease_until == record.lease_until


async def test_close_and_lapse_reach_every_part(rig):
    async with rig("a", "b") as r:
        first = await r.open(gpu_count=2)
        await r.actor.on_close_session(CloseSessionRequest(session_id=first.session_id, token=first.token))
        second = await r.open(gpu_count=2)
        r.clock.now += 9.5
        assert await r.actor.lapse() == 1
        for executor in r.executors:
            assert [s for s, _ in executor.closed] == [first.session_id, second.session_id]
        assert has(r) == [[], []]


@pytest.mark.parametrize("how", ["restarted", "closed"])
async def test_lost_part_ends_the_session_on_the_others(rig, how):
    async with rig("a", "b", "c") as r:
        opened, other = await r.open(gpu_count=3), await r.open()
        r.clock.now += actor_module.FRESH_S + 0.1
        del r.executors[1].sessions[opened.session_id]
        if how == "restarted":
            await r.actor.on_heartbeat(r.executors[1].heartbeat())
        else:
            await r.actor.on_session_closed(SessionClosed(session_id=opened.session_id, executor_id="b"))
        await eventually(lambda: has(r) == [[other.session_id], [], []])
        assert r.executors[2].closed == [(opened.session_id, "it ended on executor b")] and r.executors[1].closed == []
        assert [s.id for s in await r.actor.store.all()] == [other.session_id]


# -- admission -------------------------------------------------------------------------------------------------------


class FakeScheduler:
    """Answers admissions as told, by executor."""

    def __init__(self, app, answers):
        self.answers, self.asked = answers, []
        app.serve(subjects.SCHEDULER_SESSION_ADMIT, AdmitSessionRequest, self.on_admit)

    async def on_admit(self, request):
        self.asked.append(request)
        answer = self.answers[request.executor_id]
        if isinstance(answer, Exception):
            raise answer
        return answer


@contextlib.asynccontextmanager
async def scheduler_on(url, **answers):
    """A scheduler on a server of its own with the router, because admission has one subject for all."""
    app = ServiceApp("scheduler", url)
    scheduler = FakeScheduler(app, answers)
    async with app.running():
        yield scheduler


@pytest.fixture
def own_rig(rig):
    with start_nats_server() as url:

        @contextlib.asynccontextmanager
        async def make(*names, **answers):
            async with rig(*names, url=url) as r, scheduler_on(url, **answers) as scheduler:
                yield r, scheduler

        yield make


ADMITTED = AdmitSessionReply(admitted=True, policy=SessionPolicy(priority=1, weight=3, rate_permille=110))
REFUSED = AdmitSessionReply(admitted=False, reason="GPU a: P0 session x (t) would answer in 3 ms", missed_by_ns=1)


async def test_session_is_hosted_with_the_policy_that_the_scheduler_gave(own_rig):
    async with own_rig("a", a=ADMITTED) as (r, scheduler):
        opened = await r.open(tenant="t", priority=1, weight=2, service_ns=5, objective_ns=9, interval_ns=70)
        assert r.executors[0].sessions[opened.session_id].policy == ADMITTED.policy
        (asked,) = scheduler.asked
        assert asked == AdmitSessionRequest(
            session_id=opened.session_id,
            executor_id="a",
            tenant="t",
            priority=1,
            weight=2,
            service_ns=5,
            objective_ns=9,
            interval_ns=70,
        )


async def test_refused_session_goes_elsewhere_or_is_told_why(own_rig):
    async with own_rig("a", "b", a=REFUSED, b=ADMITTED) as (r, _):
        assert (await r.open()).parts[0].executor_id == "b"
        assert r.executors[0].sessions == {}
    async with own_rig("a", a=REFUSED) as (r, _):
        error = await refusal(r.open())
        assert (error.code, error.retryable) == ("scheduler.refused", True)
        assert str(error) == "not admitted: GPU a: P0 session x (t) would answer in 3 ms"
        assert r.executors[0].sessions == {} and r.actor._opening == {}


async def test_scheduler_that_cannot_say_holds_nobody_up(own_rig):
    async with own_rig("a", a=RefusedError("scheduler.behind", "replaying", retryable=True)) as (r, _):
        opened = await r.open(priority=0, objective_ns=7)
        policy = r.executors[0].sessions[opened.session_id].policy
        assert policy == SessionPolicy(priority=0, objective_ns=7)
