"""The router's actor on a real nats-server: opening, renewing, closing and lapsing sessions, restarts, silent executors."""

import asyncio
import contextlib
import dataclasses

import pytest
from sqlalchemy.exc import OperationalError
from wooly_bus import contracts
from wooly_bus.app import CONCURRENT_REQUESTS, ServiceApp
from wooly_bus.channel.token import SignedPass
from wooly_bus.errors import RefusedError
from wooly_router import actor, advice, executors, opening
from wooly_router.actor import ABANDONED_S, CLOSE_GRACE_S, HEARD, NEW_SESSION_S, SILENT
from wooly_router.core.registry import LOST_AFTER_S
from wooly_router.duties import Duties
from wooly_router.opening import HEARTBEAT_GRACE_S, OPEN_BUDGET_S
from wooly_router.state import tasks
from wooly_router.state.nodes import GroupRecord
from wooly_router.state.tasks import PartRecord
from wooly_testkit.nats import nats_server as start_nats_server
from wooly_wis.credits import CheckBudgetReply
from wooly_wis.messages import (
    AdmitSessionReply,
    AdmitSessionRequest,
    CloseSessionRequest,
    GangPlace,
    MemoryState,
    NodesRequest,
    RenewSessionReply,
    RenewSessionRequest,
    SessionClosed,
    SessionMemory,
    SessionPolicy,
)

pytestmark = pytest.mark.connected


async def refusal(work):
    with pytest.raises(RefusedError) as caught:
        await work
    return caught.value


@pytest.mark.on_both
async def test_open_hosts_session_on_executor_and_stores_it(rig):
    async with rig("a") as r:
        opened = await r.open(tenant="t", priority=1, required_vram=10)
        hosted = r.executors[0].sessions[opened.session_id]
        (part,) = opened.parts
        assert (part.executor_id, part.node, part.endpoints) == ("a", "host", ("unix:///tmp/a.sock",))
        assert (hosted.token, hosted.tenant, hosted.priority, hosted.quota) == (opened.token, "t", 1, 10)
        entry = SignedPass(hosted.channel_key, opened.session_id, "t", "a", lambda: hosted.at)
        entry.check(part.token)
        assert opened.lease_s == hosted.lease_s == 9.0 and len(opened.token) >= 32
        record = await r.tasks.get(opened.session_id)
        assert (record.name, record.state, record.kind) == ("train.py", "started", "session")
        assert (await r.tasks.lease(opened.session_id)).lease_until == r.clock.now + 9.0
        assert record.placement["why"] == "here" and "cost" in record.placement["here"]["a"]


async def test_open_without_executor_is_refused_with_remedy(rig):
    async with rig() as r:
        r.clock.now += HEARTBEAT_GRACE_S
        error = await refusal(r.open())
        assert error.code == "router.no_executor" and error.retryable
        assert "wooly up" in str(error) and "python -m wooly_executor" in str(error)


async def test_open_after_router_start_waits_for_first_heartbeat(rig):
    async with rig() as r:
        opening = asyncio.create_task(r.open())
        await asyncio.sleep(0.1)
        assert not opening.done()
        r.clock.now += HEARTBEAT_GRACE_S
        assert (await refusal(opening)).code == "router.no_executor"
    async with rig("a") as r:
        r.actor.registry.forget("a")
        opening = asyncio.create_task(r.open())
        await asyncio.sleep(0.1)
        await r.beat()
        assert (await opening).parts[0].executor_id == "a"


async def test_open_with_executor_silent_for_five_seconds_is_refused(rig):
    async with rig("a") as r:
        r.clock.now += 5.1
        assert (await refusal(r.open())).code == "router.no_executor"
        await r.beat()
        assert (await r.open()).parts[0].executor_id == "a"


async def test_open_concurrent_requests_spread_over_executors(rig):
    async with rig("a", "b") as r:
        opened = await asyncio.gather(*[r.open() for _ in range(6)])
        assert sorted(o.parts[0].executor_id for o in opened) == ["a", "a", "a", "b", "b", "b"]


@pytest.mark.on_both
async def test_open_concurrent_exclusive_requests_get_device_once(rig):
    async with rig("a") as r:
        answers = await asyncio.gather(*[r.open(gpu_mode="exclusive") for _ in range(4)], return_exceptions=True)
        assert sum(not isinstance(a, Exception) for a in answers) == 1
        error = await refusal(r.open())
        assert error.code == "router.no_fit" and "exclusively" in str(error)


async def test_open_with_memory_reserved_by_another_session_is_refused(rig):
    async with rig("a") as r:
        opened = await r.open(required_vram=600)
        assert "400 bytes unreserved" in str(await refusal(r.open(required_vram=600)))
        await r.actor.on_close_session(CloseSessionRequest(session_id=opened.session_id, token=opened.token))
        await r.open(required_vram=600)


async def test_open_on_full_device_waits_for_ending_session(rig, monkeypatch):
    async with rig("a") as r:
        monkeypatch.setattr(opening, "LEAVING_S", 60.0)
        before = await r.open(gpu_mode="exclusive")
        after = asyncio.create_task(r.open(gpu_mode="exclusive"))
        await asyncio.sleep(0.1)
        assert not after.done()
        await r.actor.on_session_closed(SessionClosed(executor_id="a", session_id=before.session_id, reason=""))
        assert names(await after) == ["a"]


def using(executor, **used):
    """A heartbeat that says how much each session counts."""
    sessions = tuple(SessionMemory(session_id=i, promised=n) for i, n in used.items())
    return executor.heartbeat(memory=MemoryState(capacity=1000, sessions=sessions))


@pytest.mark.on_both
async def test_session_without_size_counts_with_its_use_or_default_claim(rig):
    async with rig("a") as r:
        greedy = await r.open()
        (executor,) = r.executors
        await r.actor.on_heartbeat(using(executor, **{greedy.session_id: 700}))
        assert "has 300 bytes unreserved" in str(await refusal(r.open(required_vram=400)))
        await r.open()  # without a size, there is always room
        await r.actor.world.config.write({"default_vram_claim": 200}, r.clock.now, "admin")
        opened = await r.open()
        assert (executor.sessions[opened.session_id].claim, executor.sessions[opened.session_id].quota) == (200, None)
        assert "has 100 bytes unreserved, but the task requests 200" in str(await refusal(r.open()))
        await r.actor.on_heartbeat(using(executor, **{greedy.session_id: 500, opened.session_id: 50}))
        assert "has 300 bytes unreserved" in str(await refusal(r.open(required_vram=301)))
        await r.open(required_vram=300)


async def test_open_larger_than_empty_device_is_refused_at_once(rig, monkeypatch):
    async with rig("a") as r:
        monkeypatch.setattr(opening, "LEAVING_S", 60.0)
        await r.open(required_vram=600)
        async with asyncio.timeout(30):
            assert "400 bytes unreserved" in str(await refusal(r.open(required_vram=1200)))


async def test_open_uses_executor_that_comes_while_the_database_is_busy(rig, monkeypatch):
    async with rig("a", "b") as r:
        await r.open(node="a", gpu_mode="exclusive")
        r.actor.registry.forget("b")
        pool = r.actor.world.pool

        async def slow_pool(*args):
            await r.actor.on_heartbeat(r.executors[1].heartbeat())
            return await pool(*args)

        monkeypatch.setattr(r.actor.world, "pool", slow_pool)
        assert (await r.open()).parts[0].executor_id == "b"


async def test_open_with_dead_or_refusing_executors_uses_another(rig):
    async with rig("a", "b", "c") as r:
        await r.actor.on_heartbeat(r.executors[0].heartbeat(executor_id="0-dead"))
        r.executors[0].refuse = RefusedError("executor.admission", "full")
        assert (await r.open()).parts[0].executor_id == "b"
        for executor in r.executors:
            executor.refuse = RefusedError("executor.admission", "full", retryable=True)
        error = await refusal(r.open())
        assert (error.code, str(error), error.retryable) == ("executor.admission", "full", True)


async def test_open_with_only_dead_executors_is_refused_by_name(rig):
    async with rig("a") as r:
        ghost = r.executors[0].heartbeat(executor_id="ghost")
        r.clock.now += 5.1
        await r.actor.on_heartbeat(ghost)
        error = await refusal(r.open())
        assert error.code == "router.executor_silent" and "ghost" in str(error)


async def test_open_with_frozen_executor_does_not_delay_other_opens(rig, monkeypatch):
    monkeypatch.setattr(executors, "EXECUTOR_TIMEOUT_S", 1.0)
    async with rig("b") as r:
        mine = await r.open()
        await r.actor.on_heartbeat(r.executors[0].heartbeat(executor_id="a"))
        client = await r.app.broker.connect()
        subscription = await client.subscribe(contracts.EXECUTOR_SESSION_OPEN.at("a").subject)
        opening = asyncio.create_task(r.open())
        renewed = await r.app.request(
            contracts.ROUTER_SESSION_RENEW,
            RenewSessionRequest(session_id=mine.session_id, token=mine.token),
            timeout=0.8,
        )
        assert renewed.lease_s == 9.0 and not opening.done()
        assert (await opening).parts[0].executor_id == "b"
        await subscription.unsubscribe()


async def test_open_with_delayed_executor_asks_it_again(rig, monkeypatch):
    monkeypatch.setattr(executors, "EXECUTOR_TIMEOUT_S", 0.2)
    async with rig("a") as r:
        r.executors[0].held_up = 2
        opened = await r.open()
        assert opened.parts[0].executor_id == "a"
        asked = r.executors[0].asked
        assert len(asked) == 3 and len({(ask.session_id, ask.token) for ask in asked}) == 1


async def test_open_with_silent_executor_is_refused_before_client_timeout(rig, monkeypatch):
    monkeypatch.setattr(executors, "EXECUTOR_TIMEOUT_S", 0.2)
    async with rig("a") as r:
        r.executors[0].held_up = 1000
        opening = asyncio.create_task(r.open())
        while len(r.executors[0].asked) < 2:
            await asyncio.sleep(0.01)
        r.clock.now += OPEN_BUDGET_S + 0.1
        await r.beat()
        error = await refusal(opening)
        assert error.code == "router.executor_silent" and "executor a" in str(error)


async def test_renewal_with_token_extends_lease_and_without_is_refused(rig):
    async with rig("a") as r:
        opened = await r.open()
        r.clock.now += 5
        await r.actor.on_renew_session(RenewSessionRequest(session_id=opened.session_id, token=opened.token))
        await r.actor.write_leases()
        assert (await r.tasks.lease(opened.session_id)).lease_until == r.clock.now + 9.0
        for wrong in ({"token": "x"}, {"token": "schlüssel"}, {"session_id": "other"}):
            request = RenewSessionRequest(**{"session_id": opened.session_id, "token": opened.token} | wrong)
            assert (await refusal(r.actor.on_renew_session(request))).code == "router.no_session"


@pytest.mark.on_both
async def test_renewal_with_a_note_adds_it_to_the_story_once(rig, monkeypatch):
    async with rig("a") as r:
        opened = await r.open()

        async def renew(note):
            request = RenewSessionRequest(session_id=opened.session_id, token=opened.token, note=note)
            await r.actor.on_renew_session(request)
            return [(e.state, e.reason) for e in await r.tasks.story(opened.session_id)]

        before = await renew("")
        assert await renew("results differ") == [*before, ("started", "its client says: results differ")]
        assert len(await renew("results differ")) == len(before) + 1
        monkeypatch.setattr(tasks, "STEPS", len(before) + 2)
        assert len(await renew("another")) == len(before) + 2
        assert len(await renew("one too many")) == len(before) + 2
        await r.actor.on_close_session(CloseSessionRequest(session_id=opened.session_id, token=opened.token))
        assert not await r.tasks.note(opened.session_id, "too late", r.clock.now)


@pytest.mark.on_both
async def test_renewal_while_the_database_is_away_reaches_the_executors_of_a_known_session(rig, monkeypatch):
    """Ranks of programs used to end with their leases, because nobody renewed them at their executors."""
    async with rig("a") as r:
        known, other = await r.open(), await r.open()
        renewals = [RenewSessionRequest(session_id=o.session_id, token=o.token) for o in (known, other)]
        await r.actor.on_renew_session(renewals[0])
        told, renew = [], r.actor.executors.renew

        async def renewed(names, renewal):
            told.append((names, renewal.session_id))
            return await renew(names, renewal)

        def away():
            raise r.database_away()

        monkeypatch.setattr(r.actor.executors, "renew", renewed)
        with monkeypatch.context() as patch:
            patch.setattr(r.actor.world.database, "reading", away)
            patch.setattr(r.actor.world.database, "writing", away)
            for _ in range(3):
                r.clock.now += 8
                assert (await r.actor.on_renew_session(renewals[0])).lease_s == 9
                assert (await r.actor.on_renew_tenants(renewals[0], "default")).lease_s == 9
            assert told == [(["a"], known.session_id)] * 6
            for refused in (
                r.actor.on_renew_session(renewals[1]),  # this router has not renewed it before
                r.actor.on_renew_session(renewals[0].model_copy(update={"token": "wrong"})),
                r.actor.on_renew_tenants(renewals[0], "another"),
                r.actor.on_renew_session(renewals[0].model_copy(update={"note": "its client keeps this"})),
            ):
                with pytest.raises(OperationalError):
                    await refused
            r.clock.now += 20
            with pytest.raises(OperationalError):
                await r.actor.on_renew_session(renewals[0])
        await r.actor.resume()
        assert (await r.actor.on_renew_session(renewals[0])).lease_s == 9


async def test_renewal_during_database_writes_counts_at_once(rig):
    """With thousands of jobs in the queue, a round of placement holds the database for seconds."""
    async with rig("a") as r:
        opened = await r.open()
        request = RenewSessionRequest(session_id=opened.session_id, token=opened.token)
        async with r.tasks.database.deciding():
            # More tasks than the pool has connections.
            others = [asyncio.create_task(r.tasks.prolong({str(n): 1.0})) for n in range(50)]
            await asyncio.sleep(0.05)
            r.clock.now += 8
            async with asyncio.timeout(10):
                await r.actor.on_renew_session(request)
        r.clock.now += 8  # beyond the stored end of the lease
        await r.beat()
        assert await r.actor.lapse() == 0 and await r.sessions() == [opened.session_id]
        await asyncio.gather(*others)


async def test_renewal_concurrent_for_same_session_is_refused(rig, monkeypatch):
    async with rig("a") as r:
        opened, answered = await r.open(), asyncio.Event()
        renew = r.executors[0].on_renew

        async def renew_late(names, request):
            await answered.wait()
            return [await renew(request)]

        monkeypatch.setattr(r.actor.executors, "renew", renew_late)
        request = RenewSessionRequest(session_id=opened.session_id, token=opened.token)
        first = asyncio.create_task(r.actor.on_renew_session(request))
        await asyncio.sleep(0.1)
        error = await refusal(r.actor.on_renew_session(request))
        assert error.code == "router.renewing" and error.retryable
        answered.set()
        assert (await first).lease_s == 9.0 and (await r.actor.on_renew_session(request)).lease_s == 9.0


async def test_renewals_waiting_for_silent_executor_do_not_delay_other_tenants(rig, monkeypatch):
    monkeypatch.setattr(executors, "EXECUTOR_TIMEOUT_S", 20.0)
    async with rig("a") as r:
        held = asyncio.Event()
        victim = await r.open()

        async def renew(names, request):
            if request.session_id != victim.session_id:
                await held.wait()
            return [RenewSessionReply(lease_s=9.0)]

        monkeypatch.setattr(r.actor.executors, "renew", renew)
        record = await r.tasks.get(victim.session_id)

        async def found(session_id, token):
            return dataclasses.replace(record, id=session_id)

        monkeypatch.setattr(r.actor, "_open", found)  # so that all these sessions are open
        waiting = []
        for n in range(CONCURRENT_REQUESTS + 6):
            request = RenewSessionRequest(session_id=f"s{n}", token="t")
            ask = r.app.request(contracts.ROUTER_SESSION_RENEW, request, timeout=20.0)
            waiting.append(asyncio.create_task(ask))
        await asyncio.sleep(0.2)
        request = RenewSessionRequest(session_id=victim.session_id, token=victim.token)
        renewed = await r.app.request(contracts.ROUTER_SESSION_RENEW, request, timeout=5.0)
        assert renewed.lease_s == 9.0 and not any(w.done() for w in waiting)
        held.set()
        await asyncio.gather(*waiting)


async def test_executor_that_reports_its_end_loses_sessions_at_once(rig):
    async with rig("a", "b") as r:
        opened = await r.open()
        name = opened.parts[0].executor_id
        executor = next(e for e in r.executors if e.name == name)
        await r.actor.on_heartbeat(executor.heartbeat(pid=2, ending="of another process with that name"))
        assert await r.actor.reconcile() == 0
        await r.actor.on_heartbeat(executor.heartbeat(ending="the device's thread ended unexpectedly", sessions=()))
        assert await r.actor.reconcile() == 1
        record = await r.tasks.get(opened.session_id)
        assert (record.state, record.reason) == (
            "failed",
            f"executor {name} is lost: the device's thread ended unexpectedly",
        )
        again = await r.open()
        assert again.parts[0].executor_id != name
        await r.actor.on_heartbeat(executor.heartbeat(pid=3, sessions=()))  # a supervisor started a new process
        states = {n.executor_id: n.state for n in (await r.actor.on_nodes(NodesRequest())).nodes}
        assert states == {"a": "alive", "b": "alive"}


async def test_executor_that_hosted_too_late_is_told_to_close(rig, monkeypatch):
    monkeypatch.setattr(executors, "EXECUTOR_TIMEOUT_S", 0.2)
    async with rig("a", "b") as r:
        for executor in r.executors:
            executor.held_up = 1  # each executor is silent once; the first one that is asked again answers
        (taken,) = (await r.open()).parts
        (other,) = [e for e in r.executors if e.name != taken.executor_id]
        async with asyncio.timeout(10):
            while not other.closed:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert [e.name for e in r.executors if e.closed] == [other.name]
        assert len(await r.sessions()) == 1


async def test_renewal_of_session_lost_by_executor_ends_session(rig):
    """After a moment: its client may be closing it."""
    async with rig("a") as r:
        opened = await r.open()
        r.executors[0].sessions.clear()
        request = RenewSessionRequest(session_id=opened.session_id, token=opened.token)
        assert (await refusal(r.actor.on_renew_session(request))).code == "router.no_session"
        while await r.sessions():
            await asyncio.sleep(0.05)
        task = await r.tasks.get(opened.session_id)
        assert (task.state, task.reason) == ("failed", "executor a no longer has it")


@pytest.mark.parametrize("recovers", [True, False])
async def test_session_that_is_renewed_while_its_client_closes_it_completes(rig, recovers):
    async with rig("a") as r:
        opened = await r.open(recovers=recovers)
        r.executors[0].sessions.clear()
        request = RenewSessionRequest(session_id=opened.session_id, token=opened.token)
        assert (await refusal(r.actor.on_renew_session(request))).code == "router.no_session"
        assert (await r.close(opened)).closed
        await asyncio.sleep(CLOSE_GRACE_S + 0.2)
        assert (await r.tasks.get(opened.session_id)).state == "completed"


async def add_silent_part(r, session_id, keep=True):
    """Give a session a part on an executor that does not answer, in addition to its own part or instead of it."""
    async with r.tasks.database.writing() as s:
        parts = (await r.tasks.get(session_id, s)).parts if keep else ()
        await r.tasks.take_devices(s, session_id, (*parts, PartRecord("ghost", "n")))


async def test_renewal_with_dead_executor_is_retryable(rig):
    async with rig("a") as r:
        opened = await r.open()
        await add_silent_part(r, opened.session_id, keep=False)
        error = await refusal(
            r.actor.on_renew_session(RenewSessionRequest(session_id=opened.session_id, token=opened.token))
        )
        assert error.code == "router.executor_lost" and error.retryable


async def test_close_twice_closes_on_executor_without_error(rig):
    async with rig("a") as r:
        opened = await r.open()
        request = CloseSessionRequest(session_id=opened.session_id, token=opened.token)
        stranger = CloseSessionRequest(session_id=opened.session_id, token="x")
        assert (await refusal(r.actor.on_close_session(stranger))).code == "router.no_session"
        assert (await r.actor.on_close_session(request)).closed
        assert r.executors[0].closed == [(opened.session_id, "closed by its client")]
        assert not (await r.actor.on_close_session(request)).closed


@pytest.mark.on_both
async def test_lapse_of_lease_ends_session_on_executor(rig):
    async with rig("a") as r:
        first, second = await r.open(), await r.open()
        r.clock.now += 8
        await r.actor.on_renew_session(RenewSessionRequest(session_id=second.session_id, token=second.token))
        assert await r.actor.lapse() == 0
        r.clock.now += 1.5
        assert await r.actor.lapse() == 1
        assert r.executors[0].closed == [(first.session_id, "the session's lease lapsed")]
        assert await r.sessions() == [second.session_id]


@pytest.mark.on_both
async def test_lapse_keeps_session_whose_silent_client_is_connected(rig):
    async with rig("a") as r:
        opened = await r.open()
        name, executor = opened.session_id, r.executors[0]
        for _ in range(3):  # a client that is stopped does not renew
            r.clock.now += 9.5
            await r.actor.on_heartbeat(executor.heartbeat(sessions=(name,), late=(name,)))
            assert await r.actor.lapse() == 0
        await r.actor.on_renew_session(RenewSessionRequest(session_id=name, token=opened.token))
        story = [told.reason for told in await r.tasks.story(name)]
        assert story[-2:] == [SILENT, f"{HEARD} after 19 s"]
        r.clock.now += 9.5
        await r.actor.on_heartbeat(
            executor.heartbeat(sessions=(name,))
        )  # its connection is closed, its executor may end it
        assert await r.actor.lapse() == 0
        r.clock.now += 9.5
        await r.actor.on_heartbeat(executor.heartbeat(sessions=(name,)))
        assert await r.actor.lapse() == 1
        assert executor.closed == [(name, "the session's lease lapsed")]


@pytest.mark.on_both
@pytest.mark.parametrize("when", ["its executor is renewing it", "it is renewed here"])
async def test_lapse_keeps_session_that_is_renewed_while_the_database_is_read(rig, monkeypatch, when):
    """The executor has its renewal first, and does not call the client silent any more."""
    async with rig("a") as r:
        opened = await r.open()
        name, executor = opened.session_id, r.executors[0]
        renewal = RenewSessionRequest(session_id=name, token=opened.token)
        get, renew = r.tasks.get, r.actor.executors.renew
        arrived, goes_on = asyncio.Event(), asyncio.Event()

        async def slow(*wanted):
            answers = await renew(*wanted)
            arrived.set()
            await goes_on.wait()
            return answers

        async def renewed_then_get(*wanted):
            monkeypatch.setattr(r.tasks, "get", get)
            record = await get(*wanted)
            renewing.append(asyncio.create_task(r.actor.on_renew_session(renewal)))
            await arrived.wait()
            if when == "it is renewed here":
                goes_on.set()
                await renewing[0]
            return record

        renewing = []
        r.clock.now += 9.5
        monkeypatch.setattr(r.actor.executors, "renew", slow)
        monkeypatch.setattr(r.tasks, "get", renewed_then_get)
        await r.actor.on_heartbeat(executor.heartbeat(sessions=()))
        assert await r.actor.lapse() == 0
        goes_on.set()
        assert (await renewing[0]).lease_s
        assert await r.actor.lapse() == 0 and await r.sessions() == [name]


@pytest.mark.on_both
@pytest.mark.parametrize("when", ["wait", "lapsed", "in_states", "lease"])
async def test_router_that_was_stopped_ends_no_session(rig, monkeypatch, when):
    """It has not read the heartbeats and renewals of that time. The stop may come while it waits for the database."""
    async with rig("a") as r:
        name = (await r.open()).session_id
        r.clock.now += 6
        await r.actor.on_heartbeat(r.executors[0].heartbeat(sessions=(name,)))
        if when == "lease":  # the lease was over before, and the router is looking for the cause
            r.clock.now += 3.5
        rounds, stops = [], []

        async def round_of(duties, done=Duties.round):
            await done(duties)
            rounds.append(await r.sessions())

        async def wait(timeout_s):
            if when == "wait":
                stop()
            await asyncio.sleep(0.01)

        def stop():
            if not stops:
                stops.append(when)
                r.stop(60)

        def then_stop(do):
            async def done(*given, **wanted):
                answer = await do(*given, **wanted)
                stop()
                return answer

            return done

        if when != "wait":
            monkeypatch.setattr(r.tasks, when, then_stop(getattr(r.tasks, when)))
        monkeypatch.setattr(r.jobs, "wait", wait)
        monkeypatch.setattr(Duties, "round", round_of)
        task = asyncio.create_task(r.duties().run(0.01))
        while len(rounds) < 3:
            await asyncio.sleep(0.01)
        task.cancel()
        assert stops and rounds[2] == [name]


@pytest.mark.on_both
@pytest.mark.parametrize(
    "wanted", [{}, {"recovers": True}, {"gang": GangPlace(gang_id="g", rank=0, size=2, devices=1)}]
)
async def test_router_that_lost_nats_ends_no_session_when_it_is_connected_again(rig, wanted):
    """Executors and clients may connect later than the router, which has heard nothing of them meanwhile."""
    async with rig("a") as r:
        opened = await r.open(**wanted)
        duties = r.duties()
        await duties.round()
        r.clock.now += 60
        r.app.reconnects += 1
        await duties.step()
        r.clock.now += LOST_AFTER_S - 0.1
        await duties.step()
        assert await r.sessions() == [opened.session_id]
        await r.beat()
        renewal = RenewSessionRequest(session_id=opened.session_id, token=opened.token)
        assert (await r.actor.on_renew_session(renewal)).lease_s == 9.0
        r.clock.now += LOST_AFTER_S + 0.1
        for _ in range(2):  # a rank is looked for twice
            await duties.step()
        task = await r.tasks.get(opened.session_id)
        assert task.state == ("pending" if "recovers" in wanted else "failed") and "no heartbeat for 5 s" in task.reason


@pytest.mark.on_both
async def test_router_without_nats_ends_no_session(rig, monkeypatch):
    """It hears nothing, so silence means nothing."""
    async with rig("a") as r:
        opened = await r.open()
        monkeypatch.setattr(ServiceApp, "connected", property(lambda app: False))
        for _ in range(3):
            r.clock.now += 20
            await r.duties().round()
        assert await r.sessions() == [opened.session_id]


async def test_slow_executor_keeps_its_sessions_for_as_long_as_the_setting_says(rig):
    async with rig("a") as r:
        opened = await r.open()
        r.actor.settings = r.actor.settings.model_copy(update={"lost_after_s": 15.0})
        r.clock.now += 14.9
        assert await r.actor.reconcile() == 0 and await r.sessions() == [opened.session_id]
        r.clock.now += 0.2
        assert await r.actor.reconcile() == 1 and await r.sessions() == []


@pytest.mark.on_both
@pytest.mark.parametrize("recovers", [True, False])
async def test_session_that_can_go_on_does_not_lapse_because_its_executor_was_silent(rig, recovers):
    """No renewal succeeds while the executor is silent, so the lease may be over as soon as the executor is lost."""
    async with rig("a") as r:
        name = (await r.open(recovers=recovers)).session_id
        r.clock.now += 6
        await r.beat()
        r.clock.now += LOST_AFTER_S + 0.1  # the lease is over, too
        await r.duties().round()
        task = await r.tasks.get(name)
        assert task.state == ("pending" if recovers else "failed")
        assert ("no heartbeat" in task.reason) == recovers


@pytest.mark.on_both
async def test_lapse_keeps_session_that_another_router_renews_meanwhile(rig, monkeypatch):
    async with rig("a") as r:
        name, lease = (await r.open()).session_id, r.tasks.lease
        r.clock.now += 19
        await r.beat()

        async def then_renew(*given):
            found = await lease(*given)
            await r.tasks.prolong({name: r.clock.now + 9})
            return found

        monkeypatch.setattr(r.tasks, "lease", then_renew)
        assert await r.actor.lapse() == 0 and await r.sessions() == [name] and not r.executors[0].closed
        monkeypatch.setattr(r.tasks, "lease", lease)
        r.clock.now += 19
        await r.beat()
        assert await r.actor.lapse() == 1


@pytest.mark.on_both
async def test_session_that_opens_while_a_router_takes_its_opening_for_abandoned_stays_open(rig, monkeypatch):
    async with rig("a") as r:
        started, goes_on = asyncio.Event(), asyncio.Event()
        start, lease = opening.Opening._start, r.tasks.lease

        async def slow(*given):
            started.set()
            await goes_on.wait()
            await start(*given)

        async def opens_after(*given):
            found = await lease(*given)
            goes_on.set()
            await openings[0]
            return found

        monkeypatch.setattr(opening.Opening, "_start", slow)
        openings = [asyncio.create_task(r.open())]
        await started.wait()
        r.clock.now += ABANDONED_S + 1
        await r.beat()
        monkeypatch.setattr(r.tasks, "lease", opens_after)
        assert await r.actor.lapse() == 0
        assert await r.sessions() == [openings[0].result().session_id] and not r.executors[0].closed


@pytest.mark.on_both
async def test_heartbeat_from_before_a_session_does_not_end_it(rig):
    """A router that was stopped may have an old heartbeat when it looks for sessions that executors do not have."""
    async with rig("a") as r:
        name = (await r.open()).session_id
        r.stop(20)
        assert await r.actor.reconcile() == 0
        r.clock.now += NEW_SESSION_S - 1
        assert await r.actor.reconcile() == 0
        await r.actor.on_heartbeat(r.executors[0].heartbeat(sessions=()))
        assert await r.actor.reconcile() == 1 and not await r.sessions(), name


@pytest.mark.on_both
@pytest.mark.parametrize("then", ["connected", "closed", "silent"])
async def test_lapse_waits_for_an_executor_that_has_not_spoken_since_the_lease_was_over(rig, then):
    """Its last heartbeat is from before it could know that the client is late."""
    async with rig("a") as r:
        name, executor = (await r.open()).session_id, r.executors[0]
        r.clock.now += 8.5
        await r.actor.on_heartbeat(executor.heartbeat(sessions=(name,)))
        r.clock.now += 1
        assert await r.actor.lapse() == 0
        r.clock.now += 1 if then != "silent" else 5
        if then != "silent":
            names = (name,) if then == "connected" else ()
            await r.actor.on_heartbeat(executor.heartbeat(sessions=names, late=names))
        assert await r.actor.lapse() == (then == "silent")
        assert await r.actor.reconcile() == (then == "closed")


async def test_lapse_does_not_trust_the_last_word_of_a_silent_executor(rig):
    async with rig("a") as r:
        name = (await r.open()).session_id
        await r.actor.on_heartbeat(r.executors[0].heartbeat(sessions=(name,), late=(name,)))
        r.clock.now += 9.5
        assert await r.actor.lapse() == 1


@pytest.mark.on_both
async def test_duties_with_failing_database_continue(rig, monkeypatch, caplog):
    async with rig("a") as r:
        calls = []

        async def failing(now):
            calls.append(now)
            raise OSError("disk away")

        monkeypatch.setattr(r.tasks, "lapsed", failing)
        task = asyncio.create_task(r.duties().run(0.01))
        while len(calls) < 3:
            await asyncio.sleep(0.01)
        assert not task.done() and "trying again" in caplog.text
        task.cancel()


async def test_reconcile_session_missing_on_executor_ends_unless_new(rig):
    async with rig("a") as r:
        old = await r.open()
        r.clock.now += NEW_SESSION_S + 0.1
        await r.beat()
        fresh = await r.open()
        await r.actor.on_heartbeat(r.executors[0].heartbeat(sessions=()))
        assert await r.actor.reconcile() == 1 and await r.sessions() == [fresh.session_id]
        story = await r.tasks.story(old.session_id)
        assert [e.state for e in story] == ["pending", "started", "failed"] and "does not have it" in story[-1].reason


@pytest.mark.on_both
@pytest.mark.parametrize("recovers", [True, False])
@pytest.mark.parametrize("how", ["in order", "failed", "at another attempt", "unknown"])
async def test_session_that_ended_while_no_router_listened_ends_as_its_executor_says(rig, recovers, how):
    """The script ended while NATS and the router were away: the executor's event was lost, and the client's request, too."""
    async with rig("a") as r:
        name = (await r.open(recovers=recovers)).session_id
        executor = r.executors[0]
        del executor.sessions[name]
        if how != "unknown":
            why = "its client's process has ended" if how == "failed" else ""
            epoch = 1 if how == "at another attempt" else 0
            executor.ended[name] = SessionClosed(session_id=name, executor_id="a", reason=why, epoch=epoch)
        r.clock.now += 30
        await r.actor.resume()
        r.clock.now += 10  # the lease is over, too
        await r.beat()
        await r.duties().round()
        await eventually(lambda: executor.closed)
        found = {
            "in order": ("completed", "closed by its client"),
            "failed": ("failed", "its client's process has ended"),
        }
        state, why = found.get(how, ("pending" if recovers else "failed", "executor a does not have it"))
        while (task := await r.tasks.get(name)).state == "started":
            await asyncio.sleep(0.05)
        assert task.state == state and why in task.reason


async def test_reconcile_lost_executor_fails_its_sessions_within_ten_seconds(rig):
    async with rig("a", "b") as r:
        mine, pair = await r.open(), await r.open(gpu_count=2)
        await r.beat()
        for _ in range(9):
            r.clock.now += 1
            await r.actor.on_heartbeat(r.executors[1].heartbeat())
            await r.actor.reconcile()
        assert await r.sessions() == [] and names(mine) == ["a"]
        task = await r.tasks.get(pair.session_id)
        assert task.state == "failed" and task.ended_at - 1_000_000.0 < 10 and "executor a is lost" in task.reason
        await eventually(lambda: r.executors[1].sessions == {})
        error = await refusal(
            r.actor.on_renew_session(RenewSessionRequest(session_id=mine.session_id, token=mine.token))
        )
        assert error.code == "router.no_session"


async def test_reconcile_after_router_start_waits_for_heartbeats(rig):
    async with rig("a") as r:
        opened = await r.open()
        r.actor.registry.forget("a")
        r.actor._started = r.clock.now
        r.clock.now += 4
        assert await r.actor.reconcile() == 0
        await r.beat()
        r.clock.now += 4
        assert await r.actor.reconcile() == 0 and await r.sessions() == [opened.session_id]


async def test_lapse_of_session_opened_by_dead_router_ends_it(rig):
    async with rig("a") as r:
        opened = await r.open()
        async with r.tasks.database.writing() as s:
            await r.tasks.add(s, dataclasses.replace(await r.tasks.get(opened.session_id), id="half", state="pending"))
        assert await r.actor.lapse() == 0
        r.clock.now += ABANDONED_S + 1
        await r.tasks.prolong_all(r.clock.now + 9)
        assert await r.actor.lapse() == 1 and (await r.tasks.get("half")).state == "failed"
        assert r.executors[0].closed == [("half", "the router that was opening it has ended")]


@pytest.mark.on_both
async def test_two_routers_on_one_database_give_exclusive_device_once(rig):
    """Two routers on one database, asked at the same time, give an exclusive device once. Either router renews and closes."""
    async with rig("a", "b") as r:
        other = r.another()
        await r.beat()
        for executor in r.executors:
            await other.on_heartbeat(executor.heartbeat())
        answers = await asyncio.gather(
            *[x.on_open_session(r.ask(gpu_mode="exclusive")) for x in (r.actor, other) * 3], return_exceptions=True
        )
        opened = [a for a in answers if not isinstance(a, Exception)]
        assert sorted(names(o)[0] for o in opened) == ["a", "b"]
        for o in opened:
            await other.on_renew_session(RenewSessionRequest(session_id=o.session_id, token=o.token))
            assert (await r.actor.on_close_session(CloseSessionRequest(session_id=o.session_id, token=o.token))).closed
        assert sessions_by_executor(r) == [[], []]


async def test_open_that_is_refused_stores_failed_task_with_reason(rig):
    async with rig("a") as r:
        await refusal(r.open(required_vram=10**6))
        (task,) = await r.tasks.in_states("failed")
        assert "1000 bytes unreserved, but the task requests 1000000" in task.reason and task.parts == ()


async def test_open_without_group_avoids_grouped_nodes(rig):
    async with rig("a") as r:
        assert "not in any of the groups g" in str(await refusal(r.open(node_groups=("g",))))
        await r.actor.world.nodes.put_group(GroupRecord("g", "", 0.0, ("host",)))
        assert "reserved for the group g" in str(await refusal(r.open()))
        assert names(await r.open(node_groups=("x", "g"))) == ["a"]


@pytest.mark.parametrize("wish", ["cordoned", "draining"])
async def test_cordoned_or_draining_node_keeps_sessions_and_takes_no_new_ones(rig, wish):
    async with rig("a") as r:
        opened = await r.open()
        await r.duties().keep_nodes()
        assert await r.actor.world.nodes.set_wish("host", wish)
        assert f"a is {wish}" in str(await refusal(r.open()))
        await r.actor.on_renew_session(RenewSessionRequest(session_id=opened.session_id, token=opened.token))
        (node,) = (await r.actor.on_nodes(NodesRequest())).nodes
        assert (node.wish, node.state) == (wish, "alive")
        await r.actor.world.nodes.set_wish("host", "active")
        await r.open()


async def test_overcommit_of_cluster_and_node_is_used_by_placement_and_executor(rig):
    async with rig("a") as r:
        await r.duties().keep_nodes()
        world = r.actor.world

        async def sent(**wanted):
            opened = await r.open(**wanted)
            host = r.executors[0].sessions[opened.session_id]
            await r.actor.on_close_session(CloseSessionRequest(session_id=opened.session_id, token=opened.token))
            return host.overcommit_vram_percent, host.swap

        assert await sent() == (0, True)
        await world.config.write({"default_vram_overcommit_percent": 50}, 0.0, "t")
        assert await sent(swap=False) == (50, False)
        await world.nodes.set_overcommit("host", 0)
        assert await sent() == (0, True)
        await world.nodes.set_overcommit("host", 100)
        first, second = await r.open(required_vram=900), await r.open(required_vram=900)
        assert "1000 overcommitted by 100 %" in str(await refusal(r.open(required_vram=900)))
        assert "cannot" in str(await refusal(r.open(required_vram=200, swap=False)))
        await world.nodes.set_overcommit("host", None)
        assert "overcommitted by 50 %" in str(await refusal(r.open(required_vram=1)))
        assert {first.session_id, second.session_id} == set(r.executors[0].sessions)


async def test_session_closed_event_ends_session(rig):
    async with rig("a") as r:
        opened = await r.open()
        event = SessionClosed(session_id=opened.session_id, executor_id="a", reason="the device is on fire")
        await r.app.publish(contracts.EXECUTOR_SESSION_CLOSED, event)
        await r.app.publish(contracts.EXECUTOR_SESSION_CLOSED, event)
        deadline = asyncio.get_running_loop().time() + 5
        while await r.sessions():
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.01)
        task = await r.tasks.get(opened.session_id)
        assert task.state == "failed" and "on fire" in task.reason
        again = await r.open()
        await r.actor.on_session_closed(SessionClosed(session_id=again.session_id, executor_id="a"))
        task = await r.tasks.get(again.session_id)
        assert (task.state, task.reason) == ("completed", "closed by its client")


async def test_session_closed_event_of_executor_that_answered_too_late_ends_nothing(rig, monkeypatch):
    """An executor that was stopped hosts the session when it goes on, and then closes it: the session runs elsewhere."""
    monkeypatch.setattr(executors, "EXECUTOR_TIMEOUT_S", 0.2)
    monkeypatch.setattr(actor, "CLOSE_GRACE_S", 0.0)
    async with rig("a", "b") as r:
        for executor in r.executors:
            executor.held_up = 1
        opened = await r.open()
        (other,) = {"a", "b"} - {part.executor_id for part in opened.parts}
        for reason, passing in (
            ("it was opened elsewhere, or not at all", False),
            ("its lease is over", True),
            ("", False),
        ):
            event = SessionClosed(session_id=opened.session_id, executor_id=other, reason=reason, passing=passing)
            await r.actor.on_session_closed(event)
        await asyncio.sleep(0.1)
        assert await r.sessions() == [opened.session_id]
        (late,) = [executor for executor in r.executors if executor.name == other]
        await eventually(lambda: late.left == [opened.session_id])  # it may have been opened there since


@pytest.mark.on_both
async def test_open_prefers_executor_with_contents_of_last_session_of_model(rig):
    names = tuple(digit * 64 for digit in "123")

    async def run(r, **wanted):
        """Run a session that shares these contents. Returns its executor and the placement's reasons."""
        opened = await r.open(**wanted)
        await r.actor.on_close_session(CloseSessionRequest(session_id=opened.session_id, token=opened.token))
        task = await r.tasks.get(opened.session_id)
        closed = SessionClosed(session_id=task.id, executor_id=task.parts[0].executor_id, contents=names)
        await r.actor.on_session_closed(closed)
        return opened.parts[0].executor_id, task.placement["here"]

    async with rig("a", "b") as r:
        await r.actor.on_heartbeat(r.executors[1].heartbeat(weights=(*names, "4" * 64)))
        shares = {"tenant": "x", "dedup": "tenant"}
        assert await run(r, **shares) == ("a", {"a": {"cost": 0}})  # no contents are known yet
        assert await run(r, **shares) == ("b", {"b": {"resident": -1000, "cost": -1000}})
        for other in ({"tenant": "y"}, {"dedup": "shared"}, {"dedup": "off"}, {"model": "llama"}):
            assert (await run(r, **shares | other))[0] == "a"
        await r.actor.on_heartbeat(r.executors[1].heartbeat(weights=names[:1]))
        assert await run(r, **shares) == ("b", {"b": {"resident": -333, "cost": -333}})
        await r.actor.on_heartbeat(r.executors[1].heartbeat())
        assert (await run(r, **shares))[0] == "a"


async def test_open_for_tenant_without_credits_is_refused_with_reason(rig, nats_server):
    metering = ServiceApp("metering", nats_server)

    async def on_check(request):
        return CheckBudgetReply(refusal="5 of 4 were spent" if request.tenant == "poor" else "")

    metering.serve(contracts.METERING_BUDGET_CHECK, on_check)
    async with rig("a") as r:
        assert await r.open(tenant="poor")  # metering does not run yet
        async with metering.running():
            with pytest.raises(RefusedError, match="5 of 4 were spent") as caught:
                await r.open(tenant="poor")
            assert await r.open(tenant="rich")
        assert caught.value.code == "router.over_budget" and not caught.value.retryable
        (task,) = await r.tasks.in_states("failed")
        assert (task.tenant, task.reason) == ("poor", "no session is opened: 5 of 4 were spent") and len(
            r.executors[0].sessions
        ) == 2


async def test_resume_gives_sessions_a_full_lease(rig):
    async with rig("a") as r:
        opened = await r.open()
        r.clock.now += 100
        await r.actor.resume()
        assert await r.actor.lapse() == 0
        await r.actor.on_renew_session(RenewSessionRequest(session_id=opened.session_id, token=opened.token))


async def test_nodes_mark_lost_executors(rig):
    async with rig("a", "b") as r:
        r.clock.now += 6
        await r.actor.on_heartbeat(r.executors[1].heartbeat(utilization=0.5, memory_used=7))
        nodes = (await r.actor.on_nodes(NodesRequest())).nodes
        assert [(n.executor_id, n.state, n.age_s) for n in nodes] == [("a", "lost", 6.0), ("b", "alive", 0.0)]
        assert (nodes[1].utilization, nodes[1].memory_used) == (0.5, 7)


# -- several devices ---------------------------------------------------------------------------------------------------


def names(opened):
    return [p.executor_id for p in opened.parts]


def sessions_by_executor(r):
    """The sessions of each executor."""
    return [sorted(e.sessions) for e in r.executors]


async def eventually(condition):
    deadline = asyncio.get_running_loop().time() + 5
    while not condition():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)


async def test_open_of_two_devices_uses_two_executors_and_one_token(rig):
    async with rig("a", "b", "c") as r:
        first = await r.open(gpu_count=2, required_vram=600)
        assert names(first) == ["a", "b"] and [p.endpoints[0] for p in first.parts] == [
            "unix:///tmp/a.sock",
            "unix:///tmp/b.sock",
        ]
        assert sessions_by_executor(r) == [[first.session_id], [first.session_id], []]
        hosted = [e.sessions[first.session_id] for e in r.executors[:2]]
        assert {h.token for h in hosted} == {first.token} and {h.quota for h in hosted} == {600}
        assert [p.executor_id for p in (await r.tasks.get(first.session_id)).parts] == ["a", "b"]
        assert names(await r.open(gpu_count=2)) == ["c", "a"]
        error = await refusal(r.open(gpu_count=2, required_vram=600))
        assert (
            error.code == "router.no_fit"
            and "2 devices were requested, but only 1 of 3 executors can take one" in str(error)
        )
        assert "a has 400 bytes unreserved" in str(error) and "b has 400 bytes unreserved" in str(error)


async def test_open_of_more_devices_than_executors_is_refused_with_numbers(rig):
    async with rig("a", "b") as r:
        error = await refusal(r.open(gpu_count=3))
        assert error.code == "router.too_few" and error.retryable
        assert "3 devices were requested, but only 2 executors are alive" in str(error) and "wooly up --gpus 3" in str(
            error
        )
        assert sessions_by_executor(r) == [[], []] and await r.sessions() == []


async def test_open_of_two_devices_with_one_refusal_opens_nothing(rig):
    async with rig("a", "b") as r:
        r.executors[1].refuse = RefusedError("executor.admission", "full")
        error = await refusal(r.open(gpu_count=2))
        assert (
            error.code == "router.no_fit" and "1 of 2 executors can take one" in str(error) and "b: full" in str(error)
        )
        ((session_id, reason),) = r.executors[0].closed
        assert sessions_by_executor(r) == [[], []] and "another executor" in reason
        assert r.executors[0].left == [session_id]  # a late request must not end a session that was opened there since
        assert await r.sessions() == []
        assert (await r.tasks.get(session_id)).state == "failed"
        r.executors[1].refuse = None
        assert names(await r.open(gpu_count=2)) == ["a", "b"]


async def test_open_of_two_devices_with_dead_executor_uses_others_and_cleans_up(rig):
    async with rig("a", "b") as r:
        await r.actor.on_heartbeat(r.executors[0].heartbeat(executor_id="0-dead"))
        opened = await r.open(gpu_count=2)
        assert names(opened) == ["a", "b"] and sessions_by_executor(r) == [[opened.session_id]] * 2
        assert len(r.executors[0].closed) == 1


async def test_open_concurrent_exclusive_pairs_never_share_a_device(rig):
    async with rig("a", "b", "c") as r:
        answers = await asyncio.gather(
            *[r.open(gpu_count=2, gpu_mode="exclusive") for _ in range(3)], return_exceptions=True
        )
        assert sum(not isinstance(a, Exception) for a in answers) == 1
        assert sorted(len(s) for s in sessions_by_executor(r)) == [0, 1, 1]


async def test_renewal_of_two_devices_reaches_both_executors(rig):
    async with rig("a", "b") as r:
        opened = await r.open(gpu_count=2)
        request = RenewSessionRequest(session_id=opened.session_id, token=opened.token)
        r.clock.now += 5
        assert (await r.actor.on_renew_session(request)).lease_s == 9.0
        await r.actor.write_leases()
        assert (await r.tasks.lease(opened.session_id)).lease_until == r.clock.now + 9.0
        r.executors[1].sessions.clear()
        error = await refusal(r.actor.on_renew_session(request))
        assert error.code == "router.no_session" and "executor b" in str(error)
        await eventually(lambda: sessions_by_executor(r) == [[], []])
        assert r.executors[0].closed == [(opened.session_id, "it ended on executor b")]
        assert await r.sessions() == []


async def test_renewal_with_one_silent_executor_fails_by_name(rig):
    async with rig("a") as r:
        opened = await r.open()
        lease = await r.tasks.lease(opened.session_id)
        await add_silent_part(r, opened.session_id)
        r.clock.now += 5
        request = RenewSessionRequest(session_id=opened.session_id, token=opened.token)
        error = await refusal(r.actor.on_renew_session(request))
        assert error.code == "router.executor_lost" and "ghost" in str(error) and error.retryable
        assert (await r.tasks.lease(opened.session_id)).lease_until == lease.lease_until


async def test_close_and_lapse_of_two_devices_reach_both_executors(rig):
    async with rig("a", "b") as r:
        first = await r.open(gpu_count=2)
        await r.actor.on_close_session(CloseSessionRequest(session_id=first.session_id, token=first.token))
        second = await r.open(gpu_count=2)
        r.clock.now += 9.5
        assert await r.actor.lapse() == 1
        for executor in r.executors:
            assert [s for s, _ in executor.closed] == [first.session_id, second.session_id]
        assert sessions_by_executor(r) == [[], []]


@pytest.mark.parametrize("how", ["restarted", "closed"])
async def test_loss_of_one_part_ends_session_on_other_executors(rig, how):
    async with rig("a", "b", "c") as r:
        opened, other = await r.open(gpu_count=3), await r.open()
        r.clock.now += NEW_SESSION_S + 0.1
        del r.executors[1].sessions[opened.session_id]
        if how == "restarted":
            await r.beat()
            await r.actor.reconcile()
        else:
            await r.actor.on_session_closed(SessionClosed(session_id=opened.session_id, executor_id="b"))
        await eventually(lambda: sessions_by_executor(r) == [[other.session_id], [], []])
        assert r.executors[2].closed == [(opened.session_id, "it ended on executor b")]
        asked = [(opened.session_id, "its executor did not list it")]
        assert r.executors[1].closed == (asked if how == "restarted" else [])
        assert await r.sessions() == [other.session_id]


# -- admission -------------------------------------------------------------------------------------------------------


class FakeScheduler:
    """A scheduler with fixed answers to admission requests, by executor."""

    def __init__(self, app, answers):
        self.answers, self.asked = answers, []
        app.serve(contracts.SCHEDULER_SESSION_ADMIT, self.on_admit)

    async def on_admit(self, request):
        self.asked.append(request)
        answer = self.answers[request.executor_id]
        if isinstance(answer, Exception):
            raise answer
        return answer


@contextlib.asynccontextmanager
async def scheduler_on(url, **answers):
    """A scheduler and a router on their own NATS server, because all schedulers share one admission subject."""
    app = ServiceApp("scheduler", url)
    scheduler = FakeScheduler(app, answers)
    async with app.running():
        yield scheduler


@pytest.fixture
def own_rig(rig, monkeypatch):
    monkeypatch.setattr(advice, "SCHEDULER_TIMEOUT_S", 10.0)  # long enough for an answer on a busy machine
    with start_nats_server() as url:

        @contextlib.asynccontextmanager
        async def make(*names, **answers):
            async with rig(*names, url=url) as r, scheduler_on(url, **answers) as scheduler:
                yield r, scheduler

        yield make


ADMITTED = AdmitSessionReply(admitted=True, policy=SessionPolicy(priority=1, weight=3, rate_permille=110))
REFUSED = AdmitSessionReply(admitted=False, reason="GPU a: P0 session x (t) would answer in 3 ms", missed_by_ns=1)


async def test_open_hosts_with_policy_of_scheduler(own_rig):
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
            overcommit_vram_percent=0,
        )


async def test_open_refused_by_scheduler_uses_other_executor_or_fails_with_reason(own_rig):
    async with own_rig("a", "b", a=REFUSED, b=ADMITTED) as (r, _):
        assert (await r.open()).parts[0].executor_id == "b"
        assert r.executors[0].sessions == {}
    async with own_rig("a", a=REFUSED) as (r, _):
        error = await refusal(r.open())
        assert (error.code, error.retryable) == ("scheduler.refused", True)
        assert str(error) == "not admitted: GPU a: P0 session x (t) would answer in 3 ms"
        assert r.executors[0].sessions == {}


async def test_open_with_failing_scheduler_is_admitted(own_rig):
    async with own_rig("a", a=RefusedError("scheduler.behind", "replaying", retryable=True)) as (r, _):
        opened = await r.open(priority=0, objective_ns=7)
        policy = r.executors[0].sessions[opened.session_id].policy
        assert policy == SessionPolicy(priority=0, objective_ns=7)


async def test_open_without_scheduler_uses_declared_limits(rig):
    async with rig("a") as r:
        opened = await r.open(priority=0, service_ns=20, objective_ns=50, interval_ns=100)
        policy = r.executors[0].sessions[opened.session_id].policy
        assert (policy.rate_permille, policy.burst_ns) == (220, 40)
