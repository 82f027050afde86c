"""Programs of several processes: their ranks get devices together, are shown as one task, and end together."""

import asyncio

import pytest
from sqlalchemy.exc import OperationalError
from wooly_bus.channel.token import SignedPass
from wooly_bus.errors import RefusedError
from wooly_router import opening
from wooly_router.actor import NEW_SESSION_S
from wooly_router.gangs import RESERVED_S
from wooly_wis.messages import (
    CloseSessionRequest,
    GangPlace,
    PeerSessionRequest,
    QueuePlace,
    RenewSessionRequest,
    SessionClosed,
    TaskRequest,
    TasksRequest,
)

pytestmark = pytest.mark.connected


def place(rank, size=2, gang_id="run", devices=1):
    return GangPlace(gang_id=gang_id, rank=rank, size=size, devices=devices)


async def opened(r, size=2, **wanted):
    return [await r.open(gang=place(rank, size), **wanted) for rank in range(size)]


def executors_of(sessions):
    return [s.parts[0].executor_id for s in sessions]


async def state(r, session):
    return (await r.tasks.get(session.session_id)).state


async def test_ranks_of_a_program_get_one_executor(rig):
    async with rig("a", "b") as r:
        ranks = await opened(r, 3)
        assert len(set(executors_of(ranks))) == 1 and len({s.session_id for s in ranks}) == 3
        other = await r.open(gang=place(0, gang_id="another program"))
        assert other.parts[0].executor_id != ranks[0].parts[0].executor_id


async def test_ranks_that_need_more_memory_than_one_device_has_get_several(rig):
    async with rig("a", "b") as r:
        assert sorted(executors_of(await opened(r, 4, required_vram=450))) == ["a", "a", "b", "b"]


async def test_ranks_are_spread_over_as_many_devices_as_the_program_wants(rig):
    async with rig("a", "b") as r:
        ranks = [await r.open(gang=place(rank, 4, devices=2)) for rank in range(4)]
        assert executors_of(ranks) == ["a", "a", "b", "b"]
        with pytest.raises(RefusedError, match="3 devices were requested, but only 2 executors are alive"):
            await r.open(gang=place(0, 4, gang_id="too many", devices=3))


@pytest.mark.on_both
async def test_all_ranks_are_placed_or_none(rig):
    async with rig("a", "b") as r:
        before = await r.open(required_vram=600)
        with pytest.raises(RefusedError, match="no executors can take the 4 ranks"):
            await r.open(gang=place(0, 4), required_vram=450)
        assert await r.sessions() == [before.session_id]
        await r.close(before)
        ranks = [await r.open(gang=place(rank, 4, "again"), required_vram=450) for rank in range(4)]
        assert sorted(executors_of(ranks)) == ["a", "a", "b", "b"]


async def test_device_of_a_rank_that_has_not_asked_yet_is_not_given_to_others(rig):
    async with rig("a") as r:
        first = await r.open(gang=place(0), required_vram=500)
        with pytest.raises(RefusedError, match="0 bytes unreserved"):
            await r.open(required_vram=300)
        second = await r.open(gang=place(1), required_vram=500)
        assert executors_of([first, second]) == ["a", "a"]


@pytest.mark.on_both
async def test_ranks_wait_in_the_queue_and_start_together(rig):
    async with rig("a") as r:
        before = await r.open(required_vram=600)
        waiting = [await r.queue(gang=place(rank), required_vram=450) for rank in range(2)]
        assert all(w.wait is not None for w in waiting)
        behind = await r.queue(required_vram=600)
        await r.close(before)
        # the second rank asks first: the devices of both are chosen
        started = await r.turn(waiting[1], gang=place(1))
        assert started.parts and (await r.turn(behind)).wait is not None
        assert (await r.turn(waiting[0], gang=place(0))).parts


@pytest.mark.on_both
async def test_program_is_shown_as_one_task_with_its_ranks(rig):
    async with rig("a", "b") as r:
        ranks = await opened(r, 3)
        r.clock.now += 1
        single = await r.open()
        listed = (await r.desk.on_tasks(TasksRequest())).tasks
        assert [(t.ranks, t.state) for t in listed] == [(0, "started"), (3, "started")]
        assert listed[0].task_id == single.session_id and listed[1].executors == (ranks[0].parts[0].executor_id,)
        reply = await r.desk.on_task(TaskRequest(task_id=listed[1].task_id))
        assert [rank.task_id for rank in reply.ranks] == [s.session_id for s in ranks]
        assert [rank.rank for rank in reply.ranks] == [0, 1, 2]
        assert sum(["rank 2: " in step.reason for step in reply.story]) >= 2
        with pytest.raises(RefusedError, match="does not exist"):
            await r.desk.on_task(TaskRequest(task_id=listed[1].task_id, tenant="another"))


async def test_cancelled_program_ends_all_ranks(rig):
    async with rig("a") as r:
        ranks = await opened(r, 2)
        await r.open(gang=place(0, 3, "waits for two ranks"))
        (task,) = [t for t in (await r.desk.on_tasks(TasksRequest())).tasks if t.ranks == 2]
        assert (
            await r.desk.on_cancel_task(TaskRequest(task_id=task.task_id, reason="enough"))
        ).task.state == "cancelled"
        assert [await state(r, s) for s in ranks] == ["cancelled"] * 2
        assert {session for session, _ in r.executors[0].closed} == {s.session_id for s in ranks}


async def test_rank_that_dies_ends_the_others_with_the_reason(rig):
    async with rig("a", "b") as r:
        ranks = [await r.open(gang=place(rank, 3, devices=2)) for rank in range(3)]
        await r.actor.on_session_closed(
            SessionClosed(session_id=ranks[1].session_id, executor_id="a", reason="its memory is full")
        )
        async with asyncio.timeout(20):
            while "started" in [await state(r, s) for s in ranks]:
                await asyncio.sleep(0.01)
        record = await r.tasks.get(ranks[2].session_id)
        assert record.state == "failed" and "rank 1 of the program ended" in record.reason
        assert "its memory is full" in record.reason
        async with asyncio.timeout(20):
            while not r.executors[1].closed:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("alive", [False, True])
async def test_rank_whose_client_hangs_up_is_waited_for_only_if_its_client_is_heard(rig, alive):
    async with rig("a", "b") as r:
        ranks = [await r.open(gang=place(rank, devices=2), recovers=True) for rank in range(2)]
        lost = await r.tasks.get(ranks[1].session_id)
        event = SessionClosed(session_id=lost.id, executor_id="b", reason="its client closed the connection")
        event = event.model_copy(update={"passing": True, "hung_up": True, "epoch": lost.attempt})
        await r.actor.on_session_closed(event)
        async with asyncio.timeout(20):
            while await state(r, ranks[1]) == "started":
                await asyncio.sleep(0.01)
        await r.actor.on_renew_session(RenewSessionRequest(session_id=ranks[0].session_id, token=ranks[0].token))
        if alive:
            with pytest.raises(RefusedError, match="is not open: it is pending"):
                await r.actor.on_renew_session(RenewSessionRequest(session_id=lost.id, token=ranks[1].token))
        r.clock.now += 4
        await r.beat()
        await r.actor.lapse()
        if alive:
            assert [await state(r, s) for s in ranks] == ["started", "pending"]
            return
        assert [await state(r, s) for s in ranks] == ["failed", "failed"]
        assert "closed the connection; its client did not ask" in (await r.tasks.get(ranks[0].session_id)).reason


async def test_rank_whose_script_fails_ends_the_others(rig):
    async with rig("a") as r:
        ranks = await opened(r, 2)
        request = CloseSessionRequest(session_id=ranks[1].session_id, token=ranks[1].token, reason="its script ended")
        await r.actor.on_close_session(request)
        assert [await state(r, s) for s in ranks] == ["failed", "failed"]
        assert (await r.tasks.get(ranks[0].session_id)).reason == "rank 1 of the program ended: its script ended"


async def test_rank_that_completes_does_not_end_the_others(rig):
    async with rig("a") as r:
        ranks = await opened(r, 2)
        await r.close(ranks[0])
        assert [await state(r, s) for s in ranks] == ["completed", "started"]
        await r.actor.on_renew_session(RenewSessionRequest(session_id=ranks[1].session_id, token=ranks[1].token))
        await r.close(ranks[1])
        (task,) = (await r.desk.on_tasks(TasksRequest())).tasks
        assert task.state == "completed" and task.ended_at is not None


async def test_cancelled_program_ends_although_a_rank_completes_just_then(rig, monkeypatch):
    async with rig("a") as r:
        ranks = await opened(r)
        before = await r.tasks.gang((await r.tasks.get(ranks[0].session_id)).gang.task_id)
        await r.close(ranks[0])

        async def just_before(*_):
            return before

        monkeypatch.setattr(r.desk, "_ranks", just_before)
        await r.desk.on_cancel_task(TaskRequest(task_id=before[0].gang.task_id))
        assert [await state(r, s) for s in ranks] == ["completed", "cancelled"]


async def test_rank_that_never_asks_is_cancelled_with_the_last_of_the_others(rig):
    async with rig("a") as r:
        ranks = [await r.open(gang=place(rank, 3)) for rank in range(2)]
        reserved = (await r.tasks.gang((await r.tasks.get(ranks[0].session_id)).gang.task_id))[2]
        r.clock.now += RESERVED_S + 1
        for session in ranks:
            await r.actor.on_renew_session(RenewSessionRequest(session_id=session.session_id, token=session.token))
        assert await r.actor.lapse() == 0 and (await r.tasks.get(reserved.id)).state == "pending"
        for session in ranks:
            await r.close(session)
        assert (await r.tasks.get(reserved.id)).state == "cancelled"
        (task,) = (await r.desk.on_tasks(TasksRequest())).tasks
        assert task.state == "completed"


async def test_reserved_devices_are_free_again_if_no_rank_starts(rig):
    async with rig("a") as r:
        first = await r.open(gang=place(0), required_vram=500)
        async with r.tasks.database.writing() as s:  # as if its router had ended while it opened the session
            await r.tasks.move(s, first.session_id, "pending", "again", r.clock.now)
        r.clock.now += RESERVED_S + 1
        await r.beat()
        await r.actor.lapse()
        assert (await r.open(required_vram=900)).parts


async def test_reserved_device_cannot_be_taken_with_an_empty_token(rig):
    async with rig("a") as r:
        first = await r.open(gang=place(0))
        reserved = (await r.tasks.gang((await r.tasks.get(first.session_id)).gang.task_id))[1]
        with pytest.raises(RefusedError):
            await r.actor.on_close_session(CloseSessionRequest(session_id=reserved.id, token=""))


async def test_child_process_of_a_rank_gets_a_session_of_its_own(rig):
    async with rig("a") as r:
        ranks = await opened(r, 2)
        child = await r.open(gang=place(1))
        assert child.session_id not in {s.session_id for s in ranks}
        assert not (await r.tasks.get(child.session_id)).gang.task_id


async def test_program_that_starts_again_with_the_same_id_is_another_task(rig):
    async with rig("a") as r:
        for session in await opened(r, 2):
            await r.close(session)
        await opened(r, 2)
        assert [t.state for t in (await r.desk.on_tasks(TasksRequest())).tasks] == ["started", "completed"]


async def test_programs_of_two_tenants_with_the_same_id_are_apart(rig):
    async with rig("a") as r:
        mine, other = [await r.open(gang=place(0), tenant=tenant) for tenant in ("t", "u")]
        tasks = [await r.tasks.get(s.session_id) for s in (mine, other)]
        assert tasks[0].gang.task_id != tasks[1].gang.task_id


async def test_executor_that_refuses_a_rank_is_left_by_the_whole_program(rig):
    async with rig("a", "b") as r:
        r.executors[0].refuse = RefusedError("executor.admission", "no room")
        ranks = await opened(r, 2)
        assert executors_of(ranks) == ["b", "b"]


async def test_rank_that_its_executor_has_lost_ends_the_program_in_the_second_round(rig):
    """Between two heartbeats, the executor may report that the rank has completed."""
    async with rig("a") as r:
        ranks = await opened(r, 2)
        r.clock.now += NEW_SESSION_S + 1
        for session in ranks:
            await r.actor.on_renew_session(RenewSessionRequest(session_id=session.session_id, token=session.token))
        del r.executors[0].sessions[ranks[0].session_id]
        await r.beat()
        assert await r.actor.reconcile() == 0 and await state(r, ranks[0]) == "started"
        assert await r.actor.reconcile() == 1
        assert [await state(r, s) for s in ranks] == ["failed", "failed"]


@pytest.mark.parametrize("silent", ["executor", "client"])
async def test_rank_whose_executor_was_silent_for_longer_than_the_lease_is_left_to_recovery(rig, silent):
    """No renewal succeeds meanwhile. A rank whose client is silent ends, because the other ranks wait for it."""
    async with rig("a") as r:
        ranks = await opened(r, 2, recovers=True)
        r.clock.now += 6
        await r.beat()
        r.clock.now += 4  # the leases are over
        if silent == "client":
            await r.beat()
        await r.actor.lapse()
        assert await state(r, ranks[0]) == ("started" if silent == "executor" else "failed")
        r.clock.now += 2
        for _ in range(2):
            await r.duties().round()
        assert await state(r, ranks[0]) == ("failed" if silent == "client" else "pending")


@pytest.mark.parametrize("wanted", [{"gang": True}, {"gpu_count": 2}], ids=str)
async def test_program_that_begins_just_after_an_executor_died_waits_until_it_is_started_again(rig, wanted):
    async with rig("a", "b") as r:
        r.clock.now += 6
        await r.actor.on_heartbeat(r.executors[0].heartbeat())
        asks = [{"gang": place(rank, devices=2)} for rank in range(2)] if "gang" in wanted else [wanted]
        waiting = [await r.queue(**ask) for ask in asks]
        assert "only 1 executor is alive" in waiting[0].wait.reason and "b was heard 6 s ago" in waiting[0].wait.reason
        await r.beat()
        found = [await r.turn(each, **ask) for each, ask in zip(waiting, asks, strict=True)]
        assert [p.executor_id for each in found for p in each.parts] == ["a", "b"]
        r.clock.now += opening.RETURNS_S + 1
        await r.actor.on_heartbeat(r.executors[0].heartbeat())
        with pytest.raises(RefusedError, match="start more"):
            await r.queue(gpu_count=2)


async def test_program_that_asks_a_router_that_never_heard_enough_executors_is_refused(rig):
    """A local stack that is started again with fewer devices. Its database still has the others."""
    async with rig("a", "b") as r:
        await r.duties().keep_nodes()
        r.actor.registry.forget("b")
        with pytest.raises(RefusedError, match="start more"):
            await r.queue(gpu_count=2)


@pytest.mark.parametrize("how", ["lost", "never asked"])
async def test_rank_whose_executor_died_shares_one_that_is_left_if_others_run(rig, how):
    """Only the first placement of a program needs all of its devices."""
    async with rig("a", "b") as r:
        first = await r.open(gang=place(0, devices=2), recovers=True)
        other = await r.open(gang=place(1, devices=2), recovers=True) if how == "lost" else None
        r.clock.now += opening.RETURNS_S + 1
        await r.actor.on_heartbeat(r.executors[0].heartbeat(checkpoints="store"))
        if other is not None:
            mine = QueuePlace(session_id=other.session_id, token=other.token)
            again = await r.open(place=mine, lost="the connection broke", queue=True, recovers=True)
        else:
            again = await r.queue(gang=place(1, devices=2), recovers=True)
        assert executors_of([first, again]) == ["a", "a"]


# -- executors that work together --------------------------------------------------------------------------------------


async def ticket(r, mine, other, **changes):
    """Ask for a ticket, and return what it says."""
    request = {
        "session_id": mine.session_id,
        "token": mine.token,
        "executor_id": mine.parts[0].executor_id,
        "peer": other.session_id,
        "peer_executor_id": other.parts[0].executor_id,
    }
    reply = await r.actor.on_peer_session(PeerSessionRequest(**request | changes))
    executor = next(e for e in r.executors if e.name == mine.parts[0].executor_id)
    hosted = executor.sessions[mine.session_id]
    entry = SignedPass(hosted.channel_key, mine.session_id, hosted.tenant, executor.name, lambda: hosted.at)
    return entry.peer(reply.ticket)


async def test_executor_gets_a_ticket_and_a_session_at_the_executor_of_another_rank(rig):
    async with rig("a", "b") as r:
        ranks = [await r.open(gang=place(rank, devices=2)) for rank in range(2)]
        told = await ticket(r, ranks[1], ranks[0])
        hosted = r.executors[0].sessions[told["session_id"]]
        assert told["executor_id"] == "a" and told["endpoints"] == ["unix:///tmp/a.sock"]
        assert told["session_id"].startswith(ranks[1].session_id) and hosted.tenant == "default"
        entry = SignedPass(hosted.channel_key, told["session_id"], hosted.tenant, "a", lambda: hosted.at)
        entry.check(told["token"])
        await r.close(ranks[1])
        assert told["session_id"] in [session for session, _ in r.executors[0].closed]


async def test_peer_sessions_that_are_opened_at_the_same_time_all_end_with_their_session(rig, monkeypatch):
    async with rig("a", "b", "c") as r:
        ranks = [await r.open(gang=place(rank, 3, devices=3)) for rank in range(3)]
        get, both_read = r.tasks.get, asyncio.Barrier(2)

        async def get_together(task_id, s=None):
            found = await get(task_id, s)
            if task_id in (ranks[1].session_id, ranks[2].session_id) and s is None:
                await both_read.wait()
            return found

        monkeypatch.setattr(r.tasks, "get", get_together)
        told = await asyncio.gather(*[ticket(r, ranks[0], other) for other in ranks[1:]])
        monkeypatch.undo()
        await r.close(ranks[0])
        for executor, each in zip(r.executors[1:], told, strict=True):
            assert (each["executor_id"], each["session_id"] in executor.sessions) == (executor.name, False)


async def test_ticket_is_refused_for_strangers_and_for_executors_that_have_no_part(rig):
    async with rig("a", "b") as r:
        ranks = [await r.open(gang=place(rank, devices=2)) for rank in range(2)]
        stranger = await r.open(tenant="stranger")
        for changes in (
            {"token": "wrong"},
            {"peer": stranger.session_id},
            {"peer": "does-not-exist"},
            {"executor_id": "a"},
            {"peer_executor_id": "b"},
            {"session_id": "does-not-exist"},
        ):
            with pytest.raises(RefusedError):
                await ticket(r, ranks[1], ranks[0], **changes)
        assert not any("peer" in session for e in r.executors for session in e.sessions)
        r.executors[0].refuse = RefusedError("executor.admission", "no room")
        with pytest.raises(RefusedError, match="no room"):
            await ticket(r, ranks[1], ranks[0])


@pytest.mark.on_both
async def test_rank_that_the_database_interrupts_is_the_same_rank_when_it_asks_again(rig, monkeypatch):
    """It would be a session of its own else, and the end of the first one would end the program."""
    async with rig("a") as r:
        move = r.tasks.move

        async def away(*_, **__):
            raise r.database_away()

        monkeypatch.setattr(r.tasks, "move", away)
        with pytest.raises(OperationalError):
            await r.queue(gang=place(0))
        monkeypatch.setattr(r.tasks, "move", move)
        first, second = [await r.queue(gang=place(rank)) for rank in range(2)]
        assert (await r.tasks.get(first.session_id)).rank == 0
        assert {t.gang.task_id for t in [await r.tasks.get(o.session_id) for o in (first, second)]} != {""}
        await asyncio.sleep(2 * opening.FAIL_AGAIN_S)  # the end of the first request has no effect
        assert await r.sessions() == [first.session_id, second.session_id]
