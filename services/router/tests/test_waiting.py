"""Sessions that wait for devices: order, limits, leaving, several routers."""

import asyncio
from collections import namedtuple

import pytest
from sqlalchemy.exc import OperationalError
from wooly_bus.errors import BusTimeoutError, RefusedError
from wooly_router import opening
from wooly_router.actor import ABANDONED_S, LEFT
from wooly_router.core.registry import LOST_AFTER_S
from wooly_router.opening import RETURNS_S
from wooly_router.state.tasks import PartRecord
from wooly_wis.messages import CloseSessionRequest, RenewSessionRequest

pytestmark = pytest.mark.connected
#: Session id and token of a place, as a client would guess them.
Guess = namedtuple("Guess", "session_id token")
ALL = {"gpu_mode": "exclusive"}


async def refusal(work):
    with pytest.raises(RefusedError) as caught:
        await work
    return caught.value


@pytest.mark.on_both
async def test_open_on_full_device_waits_with_place_reason_and_what_would_fit(rig):
    async with rig("a") as r:
        first = await r.queue(required_vram=600)
        second = await r.queue(required_vram=500)
        third = await r.queue(required_vram=700)
        assert first.parts and not first.wait
        other = r.another()
        await other.on_heartbeat(r.executors[0].heartbeat())
        assert (second.wait.place, second.wait.length, third.wait.place, third.wait.length) == (1, 1, 2, 2)
        assert "has 400 bytes unreserved, but the task requests 500" in second.wait.reason
        assert second.wait.would_fit == "400 bytes on each device (WOOLYAI_REQUIRED_VRAM)"
        task = await r.tasks.get(second.session_id)
        assert task.state == "pending" and task.reason.startswith("waits: place 1 of 1: no executor")
        assert not (await r.turn(second, required_vram=500)).parts
        await r.close(first)
        again = await r.turn(third, other, required_vram=700)
        assert (again.wait.place, again.wait.length) == (2, 2)  # the room is for the session before it
        opened = await r.turn(second, other, required_vram=500)
        assert (opened.session_id, opened.token, opened.parts[0].executor_id) == (second.session_id, second.token, "a")
        assert (await r.turn(third, required_vram=700)).wait.place == 1
        assert await r.sessions() == [second.session_id]
        await r.actor.on_renew_session(RenewSessionRequest(session_id=opened.session_id, token=opened.token))


async def test_open_without_queue_is_refused_at_once_also_behind_waiting_session(rig):
    async with rig("a") as r:
        first = await r.queue(**ALL)
        assert (await refusal(r.open(**ALL))).code == "router.no_fit"
        waiting = await r.queue(**ALL)
        await r.close(first)
        r.clock.now += 0.001
        assert "exclusive" in str(await refusal(r.open(required_vram=1000, **ALL)))
        assert (await r.turn(waiting, **ALL)).parts


@pytest.mark.on_both
async def test_turn_goes_to_higher_class_and_then_to_earlier_session(rig):
    async with rig("a") as r:
        running = await r.queue(**ALL)
        waiting = []
        for priority in (3, 2, 2, 0):
            waiting.append(await r.queue(priority=priority, **ALL))
        low, early, late, high = waiting
        assert [w.wait.place for w in waiting] == [1, 1, 2, 1]
        started = []
        for _ in range(4):
            await r.close(running)
            for other in [w for w in (low, late, early, high) if w not in started]:
                answer = await r.turn(other, **ALL)
                if answer.parts:
                    started.append(other)
                    running = answer
        assert started == [high, early, late, low]


async def test_session_that_could_never_fit_is_refused_and_does_not_wait(rig):
    async with rig("a") as r:
        await r.open(required_vram=600)
        assert (await refusal(r.open(required_vram=1200, queue=True))).code == "router.no_fit"
        assert (await refusal(r.open(gpu_count=2, queue=True))).code == "router.too_few"
        assert not await r.tasks.in_states("pending")


@pytest.mark.parametrize("wanted", [{"node": "a"}, {"vendor": "nvidia"}, {"gpu_count": 2, "vendor": "nvidia"}])
async def test_session_that_only_a_dead_executor_fits_waits_for_its_return(rig, wanted):
    async def beat(*executors):
        for executor in executors:
            facts = executor.heartbeat().device.model_copy(
                update={"vendor": "cpu" if executor.name == "b" else "nvidia"}
            )
            await r.actor.on_heartbeat(executor.heartbeat(node=executor.name, device=facts))

    async with rig("a", "b", "c") as r:
        a, b, c = r.executors
        await beat(a, b, c)
        r.clock.now += LOST_AFTER_S + 1
        others = (b, c) if "gpu_count" in wanted or "node" in wanted else (b,)
        await beat(*others)
        waits = (await r.open(queue=True, **wanted)).wait
        assert waits is not None and "others may come back: a was heard 6 s ago" in waits.reason
        r.clock.now += RETURNS_S - LOST_AFTER_S
        await beat(*others)
        assert (await refusal(r.open(queue=True, **wanted))).code == "router.no_fit"


async def test_closed_session_leaves_queue(rig):
    async with rig("a") as r:
        first, second, third = [await r.queue(**ALL) for _ in range(3)]
        wrong = CloseSessionRequest(session_id=second.session_id, token="guessed")
        assert (await refusal(r.actor.on_close_session(wrong))).code == "router.no_session"
        assert (await r.close(second)).closed
        task = await r.tasks.get(second.session_id)
        assert (task.state, task.reason) == ("cancelled", "its client left the queue")
        assert (await r.turn(third, **ALL)).wait.place == 1
        assert "it is cancelled" in str(await refusal(r.turn(second, **ALL)))
        await r.close(first)
        assert (await r.turn(third, **ALL)).parts


@pytest.mark.on_both
async def test_session_whose_client_is_gone_leaves_queue_after_lease(rig):
    async with rig("a") as r:
        first, gone, third = [await r.queue(**ALL) for _ in range(3)]
        await r.close(first)
        assert (await r.turn(third, **ALL)).wait.place == 2
        r.clock.now += gone.lease_s + 0.1
        await r.beat()
        await r.turn(third, **ALL)
        assert await r.actor.lapse() == 1
        assert (await r.tasks.get(gone.session_id)).reason == LEFT
        lost = await refusal(r.turn(gone, **ALL))
        assert (lost.code, lost.retryable) == ("router.place_lost", True)
        assert (await r.turn(third, **ALL)).parts


async def test_waiting_session_outlives_router_that_took_it(rig):
    async with rig("a") as r:
        await r.queue(**ALL)
        waiting = await r.queue(**ALL)
        for _ in range(8):
            r.clock.now += ABANDONED_S / 6
            await r.beat()
            other = r.another()
            await other.on_heartbeat(r.executors[0].heartbeat())
            assert (await r.turn(waiting, other, **ALL)).wait.place == 1
            await r.tasks.prolong_all(r.clock.now + 9)
            assert await r.actor.lapse() == 0


async def test_turn_taken_by_router_that_died_is_given_again(rig):
    async with rig("a") as r:
        first, waiting = [await r.queue(**ALL) for _ in range(2)]
        await r.close(first)
        async with r.actor.world.database.deciding() as s:
            part = [PartRecord("a", "host")]
            await r.tasks.take_devices(s, waiting.session_id, part, retry_at=r.clock.now + ABANDONED_S)
        answer = await refusal(r.turn(waiting, **ALL))
        assert (answer.code, answer.retryable) == ("router.opening", True)
        await r.tasks.prolong({waiting.session_id: r.clock.now + 2 * ABANDONED_S})
        r.clock.now += ABANDONED_S + 0.1
        await r.beat()
        assert (await r.turn(waiting, **ALL)).parts


async def test_client_that_did_not_get_the_answer_which_opened_its_session_gets_another(rig):
    """Its router was killed just then, or NATS was restarted."""
    async with rig("a") as r:
        first, waiting = [await r.queue(**ALL) for _ in range(2)]
        await r.close(first)
        lost = await r.turn(waiting, **ALL)
        found = await r.turn(waiting, **ALL)
        assert [p.endpoints for p in found.parts] == [p.endpoints for p in lost.parts] and found.lease_s == lost.lease_s
        assert (found.session_id, found.token) == (waiting.session_id, waiting.token)
        assert await r.sessions() == [waiting.session_id] and len(r.executors[0].sessions) == 1
        stranger = waiting.model_copy(update={"token": "x" * 32})
        assert (await refusal(r.turn(stranger, **ALL))).code == "router.no_session"
        r.executors[0].refuse = RefusedError("executor.admission", "no room")
        answer = await refusal(r.turn(waiting, **ALL))
        assert (answer.code, answer.retryable) == ("router.opening", True) and "no room" in str(answer)
        r.clock.now += 6
        assert (await refusal(r.turn(waiting, **ALL))).code == "router.opening"  # its executor is silent
        assert await r.sessions() == [waiting.session_id] and len(r.executors[0].closed) == 1


@pytest.mark.on_both
@pytest.mark.parametrize(("then", "code"), [("hosts", "router.opening"), ("is silent", "router.cancelled")])
async def test_router_that_was_stopped_while_it_opened_a_session_leaves_it_to_the_router_that_did(
    rig, monkeypatch, then, code
):
    async with rig("a", "b") as r:
        firsts = [await r.queue(**ALL) for _ in range(2)]
        waiting = await r.queue(**ALL)
        for first in firsts:
            await r.close(first)
        other, opened, host = r.another(), [], r.actor.executors.host
        for executor in r.executors:
            await other.on_heartbeat(executor.heartbeat())

        async def stopped(asks, timeout_s):
            answers = await host(asks, timeout_s)
            if not opened:
                await r.tasks.prolong({waiting.session_id: r.clock.now + 2 * ABANDONED_S})
                r.clock.now += ABANDONED_S + 0.1
                for executor in r.executors:
                    await other.on_heartbeat(executor.heartbeat())
                    await r.actor.on_heartbeat(executor.heartbeat())
                opened.append(await r.turn(waiting, other, **ALL))
            return answers if then == "hosts" else [BusTimeoutError("no answer") for _ in answers]

        monkeypatch.setattr(r.actor.executors, "host", stopped)
        assert (await refusal(r.turn(waiting, **ALL))).code == code
        await asyncio.sleep(0.1)  # the router that was stopped closes its session in the background
        (part,) = opened[0].parts
        assert await r.sessions() == [waiting.session_id]
        assert waiting.session_id in r.executors["ab".index(part.executor_id)].sessions


async def test_new_session_waits_if_its_executor_has_just_ended(rig):
    """For five seconds, it counts as alive and does not answer. Then it counts as lost, and a session waits for it, too."""
    async with rig("a") as r:
        r.clock.now += 5.1
        await r.actor.on_heartbeat(r.executors[0].heartbeat(executor_id="ghost"))
        waiting = await r.queue()
        assert waiting.wait.place == 1 and "executor ghost is alive but does not answer" in waiting.wait.reason
        r.clock.now += 5.1
        assert "no executor is alive" in (await r.turn(waiting)).wait.reason
        await r.beat()
        assert (await r.turn(waiting)).parts


async def test_turn_while_executor_is_lost_goes_on_waiting(rig):
    async with rig("a") as r:
        first, waiting = [await r.queue(**ALL) for _ in range(2)]
        await r.close(first)
        r.clock.now += 5.1
        answer = await r.turn(waiting, **ALL)
        assert "no executor is alive; the last one, a, was heard 5 s ago" in answer.wait.reason
        await r.beat()
        r.executors[0].refuse = RefusedError("executor.admission", "full")
        assert (await r.turn(waiting, **ALL)).wait.reason == "full"
        r.executors[0].refuse = None
        assert (await r.turn(waiting, **ALL)).parts


async def test_session_waits_for_executors_that_were_heard_lately_only(rig):
    """All executors may be restarting. A cluster without any gets no queue, but an error with its remedy."""
    async with rig("a") as r, rig() as empty:
        await r.duties().keep_nodes()
        r.actor.registry.forget("a")  # as in another router
        r.clock.now += 3  # so that it does not wait for the first heartbeats
        empty.clock.now += 3 + 3601
        assert (await r.queue()).wait.place == 1
        assert (await refusal(r.open())).code == "router.no_executor"
        r.clock.now += 3601
        assert "no executor is registered; start one" in str(await refusal(r.queue()))
        assert "no executor is registered; start one" in str(await refusal(empty.queue()))


async def test_turn_keeps_terms_with_which_session_waits(rig):
    async with rig("a") as r:
        first, waiting = [await r.queue(priority=3, **ALL) for _ in range(2)]
        await r.close(first)
        opened = await r.turn(waiting, priority=0, required_vram=7)
        hosted = r.executors[0].sessions[opened.session_id]
        assert (hosted.priority, hosted.quota) == (3, None)
        assert (await r.tasks.get(opened.session_id)).gpu_mode == "exclusive"


async def test_place_of_another_tenant_or_unknown_token_is_refused(rig):
    async with rig("a") as r:
        await r.queue(**ALL)
        waiting = await r.queue(tenant="t", **ALL)
        for wrong in (
            r.turn(waiting, tenant="u", **ALL),
            r.turn(Guess(waiting.session_id, "guessed"), tenant="t", **ALL),
            r.turn(Guess("none", waiting.token), tenant="t", **ALL),
            r.actor.on_renew_session(RenewSessionRequest(session_id=waiting.session_id, token=waiting.token)),
        ):
            assert (await refusal(wrong)).code == "router.no_session"


async def test_waiting_sessions_count_against_limit_of_tenant(rig):
    async with rig("a") as r:
        r.actor.limits._settings = r.actor.settings.model_copy(update={"tenant_sessions": 2})
        await r.queue(tenant="t", **ALL)
        waiting = await r.queue(tenant="t", **ALL)
        assert (await refusal(r.queue(tenant="t", **ALL))).code == "router.limit"
        assert (await r.queue(tenant="u", **ALL)).wait.place == 2
        assert (await r.turn(waiting, tenant="t", **ALL)).wait.place == 1


async def test_turn_asked_without_a_pause_is_refused_and_keeps_its_place(rig):
    async with rig("a") as r:
        first = await r.queue(**ALL)
        waiting = await r.queue(**ALL)
        assert (await r.turn(waiting, **ALL)).wait.place == 1
        refused = await refusal(r.turn(waiting, pause_s=0, **ALL))
        assert (refused.code, refused.retryable) == ("router.asked_early", True)
        await r.close(first)
        assert (await r.turn(waiting, **ALL)).parts


@pytest.fixture
def interrupted(monkeypatch):
    """Lets the next start of a session fail, because the database does not answer.

    `again` is False: the devices of the session cannot be freed either.
    """

    def interrupt(r, again=True):
        tasks, started = r.tasks, []
        move, take = tasks.move, tasks.take_devices

        async def move_once(s, task_id, state, *args, **changes):
            if state == "started" and not started:
                started.append(task_id)
                raise r.database_away()
            return await move(s, task_id, state, *args, **changes)

        async def take_devices(s, task_id, parts, **changes):
            if not again and not parts:
                raise r.database_away()
            return await take(s, task_id, parts, **changes)

        monkeypatch.setattr(tasks, "move", move_once)
        monkeypatch.setattr(tasks, "take_devices", take_devices)

    return interrupt


@pytest.mark.on_both
async def test_turn_that_the_database_interrupts_keeps_place_and_leaves_nothing_on_executor(rig, interrupted):
    """It used to fail: a new session lost its place, and a session that had lost its executor ended."""
    async with rig("a") as r:
        first, waiting = [await r.queue(**ALL) for _ in range(2)]
        await r.close(first)
        interrupted(r)
        with pytest.raises(OperationalError):
            await r.turn(waiting, **ALL)
        executor, task = r.executors[0], await r.tasks.get(waiting.session_id)
        assert (task.state, task.parts, task.retry_at) == ("pending", (), None)
        assert executor.sessions == {}
        assert executor.closed[-1] == (waiting.session_id, "its start could not be stored: OperationalError")
        opened = await r.turn(waiting, **ALL)
        assert opened.session_id == waiting.session_id and opened.parts
        assert await r.sessions() == [waiting.session_id]


@pytest.mark.on_both
async def test_turn_that_the_database_interrupts_for_long_is_given_again(rig, interrupted, monkeypatch):
    async with rig("a") as r:
        first, waiting = [await r.queue(**ALL) for _ in range(2)]
        await r.close(first)
        interrupted(r, again=False)
        with pytest.raises(OperationalError):
            await r.turn(waiting, **ALL)
        assert (await refusal(r.turn(waiting, **ALL))).code == "router.opening"
        r.clock.now += ABANDONED_S
        await r.beat()
        assert await r.actor.lapse() == 0
        monkeypatch.undo()
        assert (await r.turn(waiting, **ALL)).parts


async def test_new_session_that_the_database_interrupts_fails(rig, interrupted):
    """Its client does not know its place, so nobody would ask for its turn."""
    async with rig("a") as r:
        interrupted(r)
        with pytest.raises(OperationalError):
            await r.queue(**ALL)
        assert r.executors[0].sessions == {}
        assert [t.state for t in await r.tasks.in_states("failed", kind="session")] == ["failed"]
        assert (await r.queue(**ALL)).parts


async def test_new_session_that_the_database_interrupts_for_long_fails_when_the_database_is_back(rig, monkeypatch):
    """It used to keep its place in the queue, and its device, until its lease ended."""
    async with rig("a") as r:
        move, asked = r.tasks.move, []

        async def away(s, task_id, *args, **changes):
            asked.append(task_id)
            if len(asked) < 5:
                raise r.database_away()
            return await move(s, task_id, *args, **changes)

        monkeypatch.setattr(opening, "FAIL_AGAIN_S", 0.01)
        monkeypatch.setattr(r.tasks, "move", away)
        with pytest.raises(OperationalError):
            await r.queue(**ALL)
        async with asyncio.timeout(10):
            while (await r.tasks.get(asked[0])).state == "pending":
                await asyncio.sleep(0.01)
        assert (await r.queue(**ALL)).parts


@pytest.mark.on_both
async def test_sessions_outlive_a_database_that_is_away_for_longer_than_their_leases(rig, monkeypatch, caplog):
    """No client can renew its lease or ask for its turn meanwhile. All waiting sessions used to leave the queue."""
    async with rig("a") as r:
        running, waiting = [await r.queue(**ALL) for _ in range(2)]
        lapsed, rounds = r.tasks.lapsed, []

        async def away(now):
            rounds.append(now)
            if len(rounds) < 3:
                r.clock.now += 100
                await r.beat()
                raise r.database_away()
            return await lapsed(now)

        monkeypatch.setattr(r.tasks, "lapsed", away)
        duties = asyncio.create_task(r.duties().run(0.01))
        while len(rounds) < 5:
            await asyncio.sleep(0.01)
        duties.cancel()
        assert not [r for r in caplog.records if r.exc_info]  # each round would fill the log
        assert await r.sessions() == [running.session_id]
        assert (await r.turn(waiting, **ALL)).wait.place == 1
        r.clock.now += 2 * r.actor.settings.lease_s + 0.1  # leases end as before afterwards
        await r.beat()
        await r.turn(waiting, **ALL)
        assert await r.actor.lapse() == 1
        assert (await r.turn(waiting, **ALL)).parts
