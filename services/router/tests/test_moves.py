"""Sessions that leave their executor: wishes in renewals, moves, hibernation, draining executors, and what clients answer."""

import asyncio

import pytest
from wooly_bus.errors import RefusedError
from wooly_router.actor import CLOSE_GRACE_S
from wooly_router.moves import ASK_AGAIN_S
from wooly_router.opening import ABANDONED_S
from wooly_router.state import tasks
from wooly_router.state.nodes import GroupRecord
from wooly_wis.messages import (
    CloseSessionRequest,
    GangPlace,
    HibernateSessionRequest,
    MoveTaskRequest,
    QueuePlace,
    RenewSessionRequest,
    Resumed,
    SetNodeStateRequest,
    TaskRequest,
)

pytestmark = pytest.mark.connected


async def refusal(work):
    with pytest.raises(RefusedError) as caught:
        await work
    return caught.value


async def beat(r, **stores):
    """Send a heartbeat of each executor, with the place of its checkpoints."""
    for executor in r.executors:
        await r.actor.on_heartbeat(executor.heartbeat(checkpoints=stores.get(executor.name, "store")))


async def renew(r, opened, **said):
    return await r.actor.on_renew_session(RenewSessionRequest(session_id=opened.session_id, token=opened.token, **said))


async def come_back(r, opened, lost="left", cut=1, leaves=False):
    """The client asks for another executor."""
    place = QueuePlace(session_id=opened.session_id, token=opened.token)
    r.clock.now += 1
    return await r.open(place=place, lost=lost, cut=cut, leaves=leaves, queue=True, recovers=True)


async def hibernate(r, opened, cut=1, reason="idle"):
    request = HibernateSessionRequest(session_id=opened.session_id, token=opened.token, cut=cut, reason=reason)
    return await r.actor.on_hibernate_session(request)


async def story(r, opened):
    reply = await r.desk.on_task(TaskRequest(task_id=opened.session_id))
    return [(step.state, step.reason) for step in reply.story]


async def record(r, opened):
    return await r.tasks.get(opened.session_id)


@pytest.mark.on_both
async def test_a_client_is_asked_to_move_and_gets_another_executor(rig):
    async with rig("a", "b") as r:
        await beat(r)
        opened = await r.open(recovers=True)
        assert (await renew(r, opened)).wish is None
        await r.actor.moves.move(await record(r, opened), "moved on request")
        reply = await renew(r, opened)
        assert (reply.wish, reply.reason) == ("move", "moved on request")
        (old,) = [p.executor_id for p in opened.parts]
        again = await come_back(r, opened, "moved on request", leaves=True)
        assert {old, again.parts[0].executor_id} == {"a", "b"}
        assert (await renew(r, opened)).wish is None
        assert await story(r, opened) == [
            ("pending", ""),
            ("started", f"on {old}"),
            ("started", "its client is asked to move it: moved on request"),
            ("pending", "moved on request"),
            ("started", f"on {again.parts[0].executor_id}"),
        ]


async def test_a_move_is_refused_if_no_other_device_has_room_or_the_checkpoint(rig):
    async with rig("a", "b") as r:
        await beat(r, b="another folder")
        opened = await r.open(recovers=True, node="a")
        error = await refusal(r.actor.moves.move(await record(r, opened), "why", "b"))
        assert error.code == "router.no_fit" and "does not have the session's checkpoint" in str(error)
        await beat(r)
        await r.open(node="b", gpu_mode="exclusive")
        error = await refusal(r.actor.moves.move(await record(r, opened), "why", "b"))
        assert "is held exclusively" in str(error)


async def test_moves_that_were_asked_for_before_count(rig):
    async with rig("a", "b") as r:
        await beat(r)
        first, second = [await r.open(recovers=True, node="a", required_vram=400) for _ in range(2)]
        await r.open(node="b", required_vram=400)
        await r.actor.moves.move(await record(r, first), "why", "b")
        error = await refusal(r.actor.moves.move(await record(r, second), "why", "b"))
        assert "unreserved" in str(error)


async def test_a_session_stays_if_the_room_is_taken_meanwhile(rig):
    async with rig("a", "b") as r:
        await beat(r)
        opened = await r.open(recovers=True, node="a", required_vram=600)
        await r.actor.moves.move(await record(r, opened), "why", "b")
        await r.open(node="b", required_vram=600)
        assert (await refusal(come_back(r, opened, leaves=True))).code == "router.stays"
        now = await record(r, opened)
        assert now.state == "started" and [p.executor_id for p in now.parts] == ["a"]
        assert (await renew(r, opened)).wish is None
        assert (await story(r, opened))[-1][1].startswith("it stays: no other device can take session")
        assert opened.session_id in r.executors[0].sessions


async def test_a_session_that_loses_its_executor_before_a_move_is_not_bound_to_it(rig):
    async with rig("a", "b") as r:
        await beat(r)
        opened = await r.open(recovers=True, node="", required_vram=600)
        (old,) = [p.executor_id for p in opened.parts]
        await r.actor.moves.move(await record(r, opened), "why")
        (other,) = {"a", "b"} - {old}
        await r.open(node=other, required_vram=600)  # no room elsewhere; the executor itself is back at once
        again = await come_back(r, opened, "the connection broke")
        assert again.parts[0].executor_id == old
        assert any(reason == f"its client lost {old}: the connection broke" for _, reason in await story(r, opened))
        assert (await renew(r, opened)).wish is None


async def test_what_a_client_says_about_a_move_is_in_the_story(rig):
    async with rig("a", "b") as r:
        await beat(r)
        opened = await r.open(recovers=True)
        await r.actor.moves.move(await record(r, opened), "why")
        assert (await renew(r, opened, stays="the disk is full")).wish is None
        assert (await renew(r, opened)).wish is None
        await renew(r, opened, resumed=Resumed(seconds=1.25, frames=7))
        await renew(r, opened, recovers=False, stays="too large")
        assert [reason for _, reason in await story(r, opened)][-3:] == [
            "it stays: the disk is full",
            "its script goes on after a pause of 1.2 s, 7 frames were sent again",
            "it cannot go on in another executor any more: too large",
        ]
        assert (await refusal(r.actor.moves.move(await record(r, opened), "why"))).code == "router.not_movable"


async def test_a_session_without_a_checkpoint_goes_on_in_any_executor_and_another_only_where_it_is(rig):
    async with rig("a", "b") as r:
        await beat(r, b="another folder")
        opened = await r.open(recovers=True, node="")
        (old,) = [p.executor_id for p in opened.parts]
        executor = {e.name: e for e in r.executors}[old]
        await r.actor.on_heartbeat(executor.heartbeat(ending="the machine was switched off", checkpoints="store"))
        await r.actor.reconcile()
        waiting = await come_back(r, opened, cut=3)
        assert waiting.wait is not None and "does not have the session's checkpoint" in waiting.wait.reason
        again = await come_back(r, opened, cut=0)
        assert again.parts[0].executor_id != old


@pytest.mark.on_both
async def test_a_hibernated_session_has_no_executor_and_keeps_its_lease(rig):
    async with rig("a") as r:
        await beat(r)
        opened = await r.open(recovers=True, required_vram=900)
        await r.actor.moves.hibernate(await record(r, opened), "hibernated on request")
        assert (await renew(r, opened)).wish == "hibernate"
        await hibernate(r, opened)
        now = await record(r, opened)
        assert (now.state, now.reason, now.parts) == ("hibernated", "hibernated on request", ())
        assert r.executors[0].sessions == {}
        other = await r.open(required_vram=900)
        for _ in range(4):
            r.clock.now += 8
            await beat(r)
            await renew(r, other)
            assert (await renew(r, opened)).wish is None
            await r.actor.lapse()
        assert (await record(r, opened)).state == "hibernated"
        await r.actor.moves.keep_checkpoints()
        assert r.executors[0].kept == [opened.session_id]
        assert (await come_back(r, opened)).wait is not None  # the device is in use
        await r.close(other)
        assert (await come_back(r, opened)).parts[0].executor_id == "a"


async def test_a_hibernated_session_ends_with_its_client_or_on_request(rig):
    async with rig("a") as r:
        ended = []
        for how in ("close", "cancel", "lapse"):
            await beat(r)
            opened = await r.open(recovers=True)
            await hibernate(r, opened)
            if how == "close":
                await r.close(opened)
            elif how == "cancel":
                await r.desk.on_cancel_task(TaskRequest(task_id=opened.session_id))
            else:
                r.clock.now += 100
                await beat(r)
                await r.actor.lapse()
            state = {"close": "completed", "cancel": "cancelled", "lapse": "failed"}[how]
            assert (await record(r, opened)).state == state
            assert (await refusal(renew(r, opened))).code == "router.no_session"
            ended.append(opened.session_id)
        while len(r.executors[0].dropped) < len(ended):
            await asyncio.sleep(0.01)
        assert sorted(r.executors[0].dropped) == sorted(ended)


async def test_a_session_that_loses_its_executor_while_it_leaves_it_hibernates(rig):
    """Its client frees the device in any case, and was told that it hibernates although it waited for a device."""
    async with rig("a") as r:
        await beat(r)
        opened = await r.open(recovers=True)
        close = r.actor.executors.close

        async def then_lost(names, *given, **wanted):
            r.actor.executors.close = close
            now = await record(r, opened)
            await r.actor.lose_part(now, "a", "executor a is lost", passing=True)
            return await close(names, *given, **wanted)

        r.actor.executors.close = then_lost
        assert (await hibernate(r, opened)) is not None
        now = await record(r, opened)
        assert (now.state, now.wants["store"], now.parts) == ("hibernated", "store", ())
        assert (await renew(r, opened)).lease_s == 9.0


@pytest.mark.parametrize("do", ["move", "hibernate"])
async def test_a_wish_for_a_session_that_has_just_left_its_executor_is_refused(rig, do):
    """It was forgotten, and the operator was told that the session was asked."""
    async with rig("a", "b") as r:
        await beat(r)
        opened = await r.open(recovers=True)
        before = await record(r, opened)
        await r.actor.lose_part(before, "a", "executor a is lost", passing=True)
        error = await refusal(getattr(r.actor.moves, do)(before, "on request"))
        assert error.code == "router.not_movable" and error.retryable
        assert not (await record(r, opened)).wish.do


async def test_a_client_that_stops_to_wait_hibernates_again(rig):
    async with rig("a") as r:
        await beat(r)
        opened = await r.open(recovers=True, required_vram=900)
        await hibernate(r, opened)
        await r.open(required_vram=900)
        assert (await come_back(r, opened)).wait is not None
        assert (await record(r, opened)).state == "pending"
        await hibernate(r, opened, reason="no device was free")
        assert (await record(r, opened)).state == "hibernated"
        assert (await record(r, opened)).wants["store"] == "store"


async def test_wake_is_a_wish(rig):
    async with rig("a") as r:
        await beat(r)
        opened = await r.open(recovers=True)
        task = TaskRequest(task_id=opened.session_id)
        assert (await refusal(r.desk.on_wake_task(TaskRequest(task_id="nothing")))).code == "router.no_task"
        await r.desk.on_hibernate_task(task)
        await r.desk.on_wake_task(task)  # before the client has heard of it
        assert (await renew(r, opened)).wish is None
        await hibernate(r, opened)
        await r.desk.on_hibernate_task(task)  # it does already
        await r.desk.on_wake_task(task)
        assert (await renew(r, opened)).wish == "wake"
        await come_back(r, opened)
        assert (await renew(r, opened)).wish is None


async def test_hibernation_needs_a_client_and_an_executor_that_can(rig):
    async with rig("a") as r:
        opened = await r.open(recovers=False)
        assert (await refusal(hibernate(r, opened))).code == "router.no_session"
        assert (await refusal(r.actor.moves.hibernate(await record(r, opened), "why"))).code == "router.not_movable"
        other = await r.open(recovers=True)
        error = await refusal(r.actor.moves.hibernate(await record(r, other), "why"))
        assert "stores no checkpoints" in str(error)


async def test_sessions_of_an_executor_that_will_end_are_asked_to_move(rig):
    async with rig("a", "b") as r:
        await beat(r)
        stays, opened = await r.open(recovers=False, node="a"), await r.open(recovers=True, node="")
        old = opened.parts[0].executor_id
        for executor in r.executors:
            leaving = "its executor is being stopped" if executor.name == old else ""
            await r.actor.on_heartbeat(executor.heartbeat(checkpoints="store", leaving=leaving))
        await r.actor.moves.drain()
        assert (await renew(r, opened)).wish == "move"
        assert (await renew(r, stays)).wish is None
        assert (await come_back(r, opened, leaves=True)).parts[0].executor_id != old


async def test_an_old_answer_of_an_executor_does_not_touch_a_session_that_left_it(rig):
    async with rig("a", "b") as r:
        await beat(r)
        opened = await r.open(recovers=True)
        before = await record(r, opened)
        await hibernate(r, opened)
        assert not await r.actor.moves.requeue(before, "an executor says that it is gone")
        assert (await record(r, opened)).state == "hibernated"
        r.clock.now += ABANDONED_S
        await beat(r)
        await renew(r, opened)
        await r.actor.reconcile()
        assert (await record(r, opened)).state == "hibernated"


async def test_the_cluster_says_whether_sessions_recover_whose_clients_do_not_say_it(rig):
    async with rig("a") as r:
        await beat(r)
        assert (await r.open(recovers=True, asks_recovery=True)).recovery == "auto"
        await r.actor.world.config.write({"recovery": "off"}, r.clock(), "admin")
        asks, says = await r.open(recovers=True, asks_recovery=True), await r.open(recovers=True)
        assert asks.recovery == "off" and not (await record(r, asks)).wants["recovers"]
        assert (await record(r, says)).wants["recovers"]


async def test_a_session_is_moved_to_a_group_or_a_vendor(rig):
    async with rig("a", "b") as r:
        for executor in r.executors:
            vendor = {"a": "cpu", "b": "nvidia"}[executor.name]
            device = executor.heartbeat().device.model_copy(update={"vendor": vendor})
            beats = {"node": f"node-{executor.name}", "device": device, "checkpoints": "store"}
            await r.actor.on_heartbeat(executor.heartbeat(**beats))
        await r.duties().keep_nodes()
        opened = await r.open(recovers=True, node="a")
        assert (await refusal(r.actor.moves.move_to(await record(r, opened), "why", "c"))).code == "router.no_node"
        await r.actor.moves.move_to(await record(r, opened), "why", "nvidia")
        again = await come_back(r, opened, leaves=True)
        assert again.parts[0].executor_id == "b" and (await record(r, opened)).want().vendor == "nvidia"
        await r.actor.world.nodes.put_group(GroupRecord("mine", "", r.clock(), ("node-a",)))
        error = await refusal(r.actor.moves.move_to(await record(r, opened), "why", "mine"))
        assert error.code == "router.no_fit"  # the group has no device of this vendor
        assert (await record(r, opened)).want().groups == ()


async def test_operators_cordon_and_drain_nodes_and_tenants_do_not(rig):
    async with rig("a", "b", auth="open") as r:
        await beat(r)
        await r.duties().keep_nodes()
        opened = await r.open(recovers=True)
        reply = await r.actor.on_set_node_state(SetNodeStateRequest(node="host", state="draining"))
        assert reply.tasks == (opened.session_id,) and reply.moving == ()
        again = await r.actor.on_set_node_state(SetNodeStateRequest(node="host", state="draining"))
        assert again == reply
        error = await refusal(r.actor.on_set_node_state(SetNodeStateRequest(node="nowhere", state="active")))
        assert error.code == "router.no_node"
        audit = [e.action for e in await r.actor.world.audit.page(10)]
        assert audit.count("node.state") == 1


async def test_what_clients_say_does_not_fill_the_database(rig, monkeypatch):
    monkeypatch.setattr(tasks, "STEPS", 8)
    async with rig("a") as r:
        await beat(r)
        opened = await r.open(recovers=True)
        for n in range(20):
            await renew(r, opened, resumed=Resumed(seconds=n, frames=0), note=f"line {n}")
        assert len(await story(r, opened)) == 8


async def test_a_session_that_stays_is_asked_again_after_a_while(rig):
    async with rig("a", "b") as r:
        await beat(r)
        opened = await r.open(recovers=True)
        old = opened.parts[0].executor_id

        async def drain():
            for executor in r.executors:
                leaving = "its executor is being stopped" if executor.name == old else ""
                await r.actor.on_heartbeat(executor.heartbeat(checkpoints="store", leaving=leaving))
            await r.actor.moves.drain()

        await drain()
        assert (await renew(r, opened)).wish == "move"
        await renew(r, opened, stays="the disk is full")
        await drain()
        assert (await renew(r, opened)).wish is None
        r.clock.now += ASK_AGAIN_S
        await drain()
        assert (await renew(r, opened)).wish == "move"


async def test_a_session_that_has_moved_is_asked_at_once_to_leave_the_next_executor(rig):
    """A rolling upgrade stops one executor after the other. The second one ended with the session."""
    async with rig("a", "b") as r:
        await beat(r)
        opened = await r.open(recovers=True)
        for _ in range(2):
            (part,) = (await record(r, opened)).parts
            for executor in r.executors:
                leaving = "its executor is being stopped" if executor.name == part.executor_id else ""
                await r.actor.on_heartbeat(executor.heartbeat(checkpoints="store", leaving=leaving))
            await r.actor.moves.drain()
            assert (await renew(r, opened)).wish == "move"
            (moved,) = (await come_back(r, opened, leaves=True)).parts
            assert moved.executor_id != part.executor_id
            await beat(r)


async def repeats(r, opened):
    """Whether the executor of a session was told that the session repeats lost work."""
    (part,) = opened.parts
    executor = next(e for e in r.executors if e.name == part.executor_id)
    return executor.sessions[opened.session_id].repeats


async def test_a_client_that_says_that_it_lost_a_living_executor_repeats_nothing_for_free(rig):
    async with rig("a", "b") as r:
        await beat(r)
        opened = await r.open(recovers=True)
        assert not await repeats(r, opened)
        again = await come_back(r, opened, "the connection broke")
        assert not await repeats(r, again)
        await r.actor.moves.move(await record(r, again), "moved on request")
        assert not await repeats(r, await come_back(r, again, "moved on request", leaves=True))


async def anywhere(r, opened):
    async with r.actor.world.database.writing() as s:
        await r.tasks.change_wants(s, opened.session_id, node="")


async def test_a_session_whose_executor_does_not_answer_repeats_lost_work_for_free(rig, beating_executor):
    async with rig("a") as r:
        async with beating_executor("gone") as gone:
            await r.actor.on_heartbeat(gone.heartbeat())
            opened = await r.open(recovers=True, node="gone")
            await anywhere(r, opened)
        again = await come_back(r, opened, "the connection broke")
        assert again.parts[0].executor_id == "a" and await repeats(r, again)
        assert not await repeats(r, await come_back(r, again, "the connection broke"))


async def test_a_session_whose_executor_sends_no_heartbeats_repeats_lost_work_for_free(rig):
    async with rig("a", "b") as r:
        await beat(r)
        opened = await r.open(recovers=True, node="a")
        await anywhere(r, opened)
        r.clock.now += ABANDONED_S
        await r.actor.on_heartbeat(r.executors[1].heartbeat(checkpoints="store"))
        await r.actor.reconcile()
        again = await come_back(r, opened, "it was quiet")
        assert again.parts[0].executor_id == "b" and await repeats(r, again)


async def test_all_ranks_of_a_program_that_lost_an_executor_repeat_for_free(rig, beating_executor):
    """They all go back to a common cut, also those whose executors live."""
    place = {"gang_id": "run", "size": 2, "devices": 2}
    async with rig("a") as r:
        async with beating_executor("gone") as gone:
            await beat(r)
            await r.actor.on_heartbeat(gone.heartbeat(checkpoints="store"))
            ranks = [await r.open(gang=GangPlace(rank=n, **place), recovers=True) for n in range(2)]
            assert {rank.parts[0].executor_id for rank in ranks} == {"a", "gone"}
        ranks.sort(key=lambda rank: rank.parts[0].executor_id == "a")
        for rank in ranks:
            back = await come_back(r, rank, "a rank of the program has lost its executor")
            assert back.parts[0].executor_id == "a" and await repeats(r, back)
        for rank in ranks:
            assert not await repeats(r, await come_back(r, rank, "the connection broke"))


async def test_a_session_with_two_devices_keeps_the_one_whose_node_is_not_drained(rig):
    async with rig("a", "b", "c") as r:
        await beat(r)
        opened = await r.open(recovers=True, gpu_count=2, gpu_mode="exclusive")
        before = {p.executor_id for p in opened.parts}
        old = opened.parts[0].executor_id
        for executor in r.executors:
            leaving = "its executor is being stopped" if executor.name == old else ""
            await r.actor.on_heartbeat(executor.heartbeat(checkpoints="store", leaving=leaving))
        await r.actor.moves.drain()
        assert (await renew(r, opened)).wish == "move"
        again = await come_back(r, opened, leaves=True)
        assert {p.executor_id for p in again.parts} == {"a", "b", "c"} - {old}
        asked = {e.name: e.sessions[opened.session_id].part for e in r.executors if opened.session_id in e.sessions}
        assert asked == {p.executor_id: part for part, p in enumerate(again.parts)}
        assert before - {old} <= asked.keys()


async def test_a_session_with_two_devices_leaves_both_when_one_is_lost(rig):
    async with rig("a", "b", "c") as r:
        await beat(r)
        opened = await r.open(recovers=True, gpu_count=2)
        lost, other = (p.executor_id for p in opened.parts)
        before = await record(r, opened)
        await r.actor.lose_part(before, lost, "it was lost", passing=True)
        (kept,) = [e for e in r.executors if e.name == other]
        assert opened.session_id not in kept.sessions
        again = await come_back(r, opened, "lost")
        count = len(kept.closed)
        await r.actor.lose_part(before, lost, "the same loss, reported late", passing=True)
        assert len(kept.closed) == count and len(again.parts) == 2


async def test_checkpoints_of_all_devices_of_a_hibernated_session_are_kept(rig):
    async with rig("a", "b") as r:
        await beat(r)
        opened = await r.open(recovers=True, gpu_count=2)
        await hibernate(r, opened)
        await r.actor.moves.keep_checkpoints()
        assert [named for e in r.executors for named in e.kept_devices] == [(opened.session_id, 2)]


async def test_a_session_that_cannot_go_on_elsewhere_says_why_in_its_story_and_to_who_moves_it(rig):
    async with rig("a", "b") as r:
        await beat(r)
        opened = await r.open(recovers=True)
        why = "the PTX of the kernel count has the variable counter on the device"
        for _ in range(2):
            await renew(r, opened, recovers=False, stays=why)
        told = [reason for _, reason in await story(r, opened) if why in reason]
        assert told == [f"it cannot go on in another executor any more: {why}"]
        error = await refusal(r.actor.moves.move(await record(r, opened), "moved on request"))
        assert error.code == "router.not_movable" and str(error).endswith(why)


async def test_a_session_goes_only_to_executors_that_can_read_its_checkpoint(rig):
    """While keys are changed: `b` stores under the new key and reads both, `a` knows only the former key."""
    async with rig("a", "b") as r:
        a, b = r.executors

        async def both():
            await r.actor.on_heartbeat(a.heartbeat(checkpoints="old"))
            await r.actor.on_heartbeat(b.heartbeat(checkpoints="new", checkpoints_read=("old",)))

        await both()
        opened = await r.open(recovers=True, node="a")
        await r.actor.moves.move(await record(r, opened), "why", "b")
        again = await come_back(r, opened, leaves=True)
        assert again.parts[0].executor_id == "b"
        await both()
        error = await refusal(r.actor.moves.move(await record(r, again), "why", "a"))
        assert "does not have the session's checkpoint" in str(error)


async def test_a_renewal_that_finds_a_session_that_its_client_closes_does_not_requeue_it(rig):
    async with rig("a") as r:
        await beat(r)
        opened = await r.open(recovers=True)
        r.executors[0].sessions.clear()  # the executor has processed the client's CLOSE
        assert (await refusal(renew(r, opened))).code == "router.no_session"
        assert (await record(r, opened)).state == "started"
        await r.actor.on_close_session(CloseSessionRequest(session_id=opened.session_id, token=opened.token))
        await asyncio.sleep(1.5 * CLOSE_GRACE_S)
        assert (await record(r, opened)).state == "completed"


async def two_ranks(r):
    return [
        await r.open(gang=GangPlace(gang_id="run", rank=rank, size=2, devices=1), recovers=True) for rank in range(2)
    ]


async def test_a_rank_that_lost_its_executor_gets_another_one_alone(rig):
    async with rig("a", "b") as r:
        await beat(r)
        ranks = await two_ranks(r)
        assert (await come_back(r, ranks[1], "the connection broke")).parts
        assert [(await record(r, rank)).state for rank in ranks] == ["started", "started"]
        assert [(await record(r, rank)).attempt for rank in ranks] == [0, 1]


async def test_a_program_is_moved_with_all_its_ranks_or_not_at_all(rig):
    async with rig("a", "b") as r:
        await beat(r)
        ranks = await two_ranks(r)
        (old,) = {rank.parts[0].executor_id for rank in ranks}
        task = (await record(r, ranks[0])).gang.task_id
        await r.desk.on_move_task(MoveTaskRequest(task_id=task))
        assert [(await renew(r, rank)).wish for rank in ranks] == ["move", "move"]
        first = await come_back(r, ranks[0], "moved on request", leaves=True)
        other = await come_back(r, ranks[1], "another rank of the program has lost its executor")
        assert old not in (first.parts[0].executor_id, other.parts[0].executor_id)
        await renew(r, ranks[1], recovers=False, stays="it has given recovery up")
        why = await refusal(r.desk.on_move_task(MoveTaskRequest(task_id=task)))
        assert "it has given recovery up" in str(why)
        assert [(await renew(r, rank)).wish for rank in ranks[:1]] == [None]


# -- changes between a look at a session and what is decided about it ------------------------------------------------------


@pytest.mark.on_both
async def test_session_that_leaves_keeps_what_changed_since_it_was_read(rig):
    async with rig("a") as r:
        await beat(r)
        opened = await r.open(recovers=True)
        before = await record(r, opened)
        async with r.actor.world.database.writing() as s:
            await r.tasks.change_wants(s, opened.session_id, groups=["fast"], peers=[["b", "peer"]])
        left = await r.actor.moves.requeue(before, "executor a is lost")
        assert left.wants["groups"] == ["fast"] and left.wants["peers"] == [["b", "peer"]] and left.wants["away"]


async def test_wish_that_comes_while_a_client_refuses_an_earlier_wish_is_kept(rig):
    async with rig("a", "b") as r:
        await beat(r)
        opened = await r.open(recovers=True)
        await r.actor.moves.move(await record(r, opened), "first")
        before = await record(r, opened)
        await r.actor.moves.hibernate(before, "second")
        said = RenewSessionRequest(session_id=opened.session_id, token=opened.token, stays="the disk is full")
        await r.actor.moves.hear(before, said)
        assert (await record(r, opened)).wish.reason == "second"
        await r.actor.moves.hear(await record(r, opened), said)
        assert (await renew(r, opened)).wish is None


async def test_client_that_refuses_an_earlier_wish_is_still_asked_for_the_newer_one(rig):
    """It may have been busy with the earlier wish for minutes."""
    async with rig("a", "b", "c") as r:
        await beat(r)
        opened = await r.open(recovers=True, node="a")
        await r.desk.on_move_task(MoveTaskRequest(task_id=opened.session_id, node="b"))
        first = await renew(r, opened)
        await r.desk.on_move_task(MoveTaskRequest(task_id=opened.session_id, node="c"))
        reply = await renew(r, opened, stays="no room", refused=first.reason)
        assert (reply.wish, reply.reason) == ("move", "moved on request to c") and first.reason != reply.reason
        assert "it stays: no room" not in [reason for _, reason in await story(r, opened)]
        assert (await renew(r, opened, stays="no room", refused=reply.reason)).wish is None
        assert (await story(r, opened))[-1][1] == "it stays: no room"


async def test_session_that_has_come_back_to_its_executor_is_not_ended_by_a_question_about_its_loss(rig):
    async with rig("a") as r:
        await beat(r)
        opened, (executor,) = await r.open(recovers=True), r.executors
        before = await record(r, opened)
        assert (await come_back(r, opened, "the connection broke")).parts
        executor.closed.clear()
        await r.actor.on_heartbeat(executor.heartbeat(sessions=()))  # from before it came back
        await r.actor._lose_missing(before, "a", "executor a does not have it")
        assert not executor.closed and (await record(r, opened)).state == "started"


@pytest.mark.parametrize("ends", [True, False], ids=["cancelled", "lost"])
async def test_session_that_has_moved_since_it_was_read_ends_where_it_is_and_does_not_fail(rig, ends):
    async with rig("a", "b") as r:
        await beat(r)
        opened = await r.open(recovers=True)
        before = await record(r, opened)
        await r.actor.moves.move(before, "why")
        again = await come_back(r, opened, leaves=True)
        (new,) = [e for e in r.executors if e.name == again.parts[0].executor_id]
        if ends:
            assert await r.actor.end(before, "cancelled", "by its owner")
            assert opened.session_id not in new.sessions
        else:
            await r.actor.lose_part(before, before.parts[0].executor_id, "it ended there")
            assert (await record(r, opened)).state == "started"


async def test_session_that_waits_after_a_loss_outlasts_an_answer_that_is_lost_with_its_router(rig):
    """It would fail, and its work with it. A new session asks anew."""
    async with rig("a") as r:
        await beat(r)
        opened = await r.open(recovers=True, required_vram=600)
        await r.actor.lose_part(await record(r, opened), "a", "the connection broke", passing=True)
        holder = await r.open(required_vram=600)
        assert (await come_back(r, opened)).wait is not None
        other = await r.queue(required_vram=600)
        r.clock.now += 21
        await beat(r)
        await renew(r, holder)
        await r.actor.lapse()
        assert [(await record(r, s)).state for s in (opened, other)] == ["pending", "failed"]
        await r.close(holder)
        assert (await come_back(r, opened)).parts[0].executor_id == "a"


async def test_session_whose_router_dies_while_it_opens_after_a_loss_outlasts_an_answer_that_is_lost(rig):
    """Until the other routers may open it, its client is refused. Its next answer may be lost with NATS, too."""
    async with rig("a") as r:
        await beat(r)
        opened = await r.open(recovers=True)
        await r.actor.lose_part(await record(r, opened), "a", "the connection broke", passing=True)
        dead = r.another()
        await dead.on_heartbeat(r.executors[0].heartbeat(checkpoints="store"))
        place = QueuePlace(session_id=opened.session_id, token=opened.token)
        task = await dead._opening._queue.enter(place, (await record(r, opened)).tenant)
        await dead._opening._choose(task, True, {})  # it dies here
        assert (await refusal(come_back(r, opened))).code == "router.opening"
        r.clock.now += ABANDONED_S + 21
        await beat(r)
        await r.actor.lapse()
        assert (await come_back(r, opened)).parts
