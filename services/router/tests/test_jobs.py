"""Jobs on a real nats-server: submission, placement, retries, ends, events. The executors are small fakes."""

import asyncio
import contextlib
import json

import pytest
from sqlalchemy import Engine, event
from wooly_bus import contracts
from wooly_bus.app import ServiceApp
from wooly_bus.blobs import BlobStore
from wooly_bus.errors import RefusedError
from wooly_router import jobs as jobs_module
from wooly_router.core.tasks import RETRY_S
from wooly_router.jobs import JobActor, session_of
from wooly_router.state.nodes import GroupRecord
from wooly_testkit.nats import nats_server as start_nats_server
from wooly_wis.credits import CheckBudgetReply
from wooly_wis.messages import (
    JobEnded,
    JobOutput,
    PrioritizeTaskRequest,
    SessionClosed,
    SessionPolicy,
    SteerSessionReply,
    SubmitJob,
    TaskChanged,
    TaskRequest,
    TasksRequest,
)
from wooly_wis.module import Module, encode_module

pytestmark = pytest.mark.connected
EMPTY = encode_module(Module((), (), (), (), ()))
OUTPUT = JobOutput(name="y", dtype="f32", sizes=(2,), digest="0" * 64, nbytes=8)


@pytest.fixture
def rig_on(rig):
    """A rig on its own nats-server, because all queues have the same names."""
    with start_nats_server() as url:

        @contextlib.asynccontextmanager
        async def make(*names):
            async with rig(*names, url=url) as r:
                r.module = await BlobStore(r.app.jetstream(), "t").put(EMPTY)
                yield r

        yield make


def job(r, job_id="job-0001", **changes):
    return SubmitJob(**{"job_id": job_id, "tenant": "t", "module": r.module, "required_vram": 100} | changes)


async def state(r, name="job-0001"):
    return (await r.tasks.get(name)).state


async def story(r, name="job-0001"):
    return [e.state for e in await r.tasks.story(name)]


def ended(r, executor=0, state="completed", **changes):
    request = r.executors[executor].jobs[-1]
    r.executors[executor].sessions.pop(request.session_id, None)
    fields = {
        "task_id": request.task_id,
        "attempt": request.attempt,
        "executor_id": r.executors[executor].name,
        "state": state,
    }
    return JobEnded(**fields | changes)


@pytest.mark.on_both
async def test_job_runs_and_ends_with_results(rig_on):
    async with rig_on("a") as r:
        await r.jobs.on_submit_job(job(r, priority=3, noswap=True, name="mine"))
        assert await state(r) == "pending"
        await r.jobs.round()
        (request,) = r.executors[0].jobs
        assert (request.task_id, request.attempt, request.tenant, request.quota, request.swap) == (
            "job-0001",
            1,
            "t",
            100,
            False,
        )
        assert request.policy.priority == 3 and request.session_id == "job-0001-1"
        task = await r.tasks.get("job-0001")
        assert task.state == "started" and task.placement["why"] == "here" and task.parts[0].executor_id == "a"
        assert await r.jobs.on_job_ended(ended(r, outputs=(OUTPUT,), reason="in no time"))
        task = await r.tasks.get("job-0001")
        assert task.state == "completed" and task.outputs[0]["digest"] == "0" * 64 and task.reason == "in no time"
        assert await story(r) == ["pending", "started", "completed"]


@pytest.fixture
def statements():
    """The SQL statements since the fixture was made or the list was cleared."""
    found = []

    def note(connection, cursor, statement, *_):
        found.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    yield found
    event.remove(Engine, "before_cursor_execute", note)


async def test_round_without_jobs_asks_the_database_once(rig_on, statements):
    """Every router that leads does a round per second, also while no session is open."""
    async with rig_on("a") as r:
        await r.open()
        statements.clear()
        await r.jobs.round()
        assert len([text for text in statements if text.startswith("SELECT")]) == 1
        await r.jobs.on_submit_job(job(r))
        await r.jobs.round()
        assert await state(r) == "started" and len(r.executors[0].jobs) == 1


@pytest.mark.on_both
async def test_job_prefers_executor_with_constants_of_last_job_of_module(rig_on):
    names = tuple(digit * 64 for digit in "123")

    async def run(r, job_id, **changes):
        """Run a job that shares these contents. Returns its executor."""
        await r.jobs.on_submit_job(job(r, job_id, **changes))
        await r.jobs.round()
        task = await r.tasks.get(job_id)
        executor = next(k for k, e in enumerate(r.executors) if e.name == task.parts[0].executor_id)
        closed = SessionClosed(session_id=session_of(task), executor_id=task.parts[0].executor_id, contents=names)
        await r.actor.on_session_closed(closed)
        assert await r.jobs.on_job_ended(ended(r, executor))
        await r.beat()
        await r.actor.on_heartbeat(r.executors[1].heartbeat(weights=names))
        return task.parts[0].executor_id

    async with rig_on("a", "b") as r:
        await BlobStore(r.app.jetstream(), "u").put(EMPTY)
        assert await run(r, "first-job") == "a"  # no contents are known yet
        assert await run(r, "second-job") == "b"
        assert await run(r, "job-of-another", tenant="u") == "a"


@pytest.mark.on_both
async def test_job_submitted_twice_is_one_task(rig_on):
    async with rig_on("a") as r:
        await asyncio.gather(*[r.jobs.on_submit_job(job(r)) for _ in range(5)])
        await r.jobs.on_submit_job(job(r, priority=0))
        await r.jobs.round()
        assert len(r.executors[0].jobs) == 1 and (await r.tasks.get("job-0001")).priority == 2
        stranger = await r.jobs.on_submit_job(job(r, tenant="u"))
        assert stranger.tenant == "t" and len(await r.tasks.in_states("started")) == 1


async def test_job_with_bad_module_fails_with_reason(rig_on):
    async with rig_on("a") as r:
        store = BlobStore(r.app.jetstream(), "t")
        for name, module, why in (
            ("missing-1", "1" * 64, "bus.blob_missing"),
            ("garbage-1", await store.put(b"garbage"), "wis.decode"),
            ("another-1", r.module, "bus.blob_missing"),
        ):
            await r.jobs.on_submit_job(job(r, name, module=module, tenant="u" if name == "another-1" else "t"))
            task = await r.tasks.get(name)
            assert task.state == "failed" and task.reason.startswith(why)


async def test_job_without_room_waits_with_reason(rig_on):
    async with rig_on("a") as r:
        mine = await r.open(required_vram=950)
        await r.jobs.on_submit_job(job(r))
        await r.jobs.round()
        task = await r.tasks.get("job-0001")
        assert task.state == "pending" and "a has 50 bytes unreserved, but the task requests 100" in task.reason
        assert task.placement["why"] == "waiting"
        await r.actor.end(await r.tasks.get(mine.session_id), "completed", "")
        await r.jobs.round()
        assert await state(r) == "started"


async def test_job_of_tenant_over_budget_waits_for_credits(rig_on):
    async with rig_on("a") as r:
        spent = {"t": "5 of 4 were spent"}
        metering = ServiceApp("metering", r.app.url)

        async def on_check(request):
            return CheckBudgetReply(refusal=spent.get(request.tenant, ""))

        metering.serve(contracts.METERING_BUDGET_CHECK, on_check)
        async with metering.running():
            await r.jobs.on_submit_job(job(r, required_vram=1000))
            for _ in range(3):
                await r.jobs.round()
                r.clock.now += 20  # longer than the queue's patience
            task = await r.tasks.get("job-0001")
            assert task.state == "pending" and task.reason == "waits for credits: 5 of 4 were spent"
            assert r.executors[0].jobs == [] and task.attempt == 0 and not task.parts
            assert [(e.state, e.reason) for e in await r.tasks.story("job-0001")] == [
                ("pending", ""),
                ("pending", "waits for credits: 5 of 4 were spent"),
            ]
            await r.beat()
            await r.jobs.round()
            assert await r.open(tenant="rich", required_vram=1)  # the device is not held for the job over budget
            await r.actor.end((await r.tasks.in_states("started", kind="session"))[0], "completed", "")
            spent["t"] = "6 of 4 were spent"  # by earlier sessions
            r.clock.now += 3
            await r.beat()
            await r.jobs.round()
            assert (await r.tasks.get("job-0001")).reason.endswith("6 of 4 were spent")
            assert len(await story(r)) == 2
            spent.clear()
            r.clock.now += 10
            await r.beat()
            await r.jobs.round()
            assert await state(r) == "started" and len(r.executors[0].jobs) == 1


async def test_job_with_group_runs_on_grouped_node(rig_on):
    async with rig_on("a") as r:
        await r.jobs.on_submit_job(job(r, node_groups=("g",)))
        await r.jobs.round()
        assert await state(r) == "pending"
        await r.actor.world.nodes.put_group(GroupRecord("g", "", 0.0, ("host",)))
        await r.jobs.round()
        assert await state(r) == "started"


@pytest.mark.on_both
async def test_jobs_start_by_class_and_age(rig_on):
    async with rig_on("a") as r:
        for i, priority in enumerate((4, 2, 2, 0)):
            r.clock.now += 0.001
            await r.jobs.on_submit_job(job(r, f"job-000{i}", priority=priority, required_vram=400))
        await r.jobs.round()
        assert sorted(j.task_id for j in r.executors[0].jobs) == ["job-0001", "job-0003"]


async def test_open_on_device_held_for_waiting_job_is_refused(rig_on):
    async with rig_on("a") as r:
        small = await r.open(required_vram=100)
        await r.jobs.on_submit_job(job(r, required_vram=1000))
        await r.open(required_vram=100)
        r.clock.now += 31
        await r.tasks.prolong_all(r.clock.now + 9)
        await r.beat()
        with pytest.raises(RefusedError, match="held for a task that has waited longer"):
            await r.open(required_vram=100)
        assert small.session_id in await r.sessions()


@pytest.mark.parametrize("how", ["silent", "restarted", "reported"])
async def test_job_with_lost_attempt_is_retried_elsewhere_within_ten_seconds(rig_on, how):
    async with rig_on("a", "b") as r:
        await r.jobs.on_submit_job(job(r))
        await r.jobs.round()
        old = ended(r, state="lost", reason="stopped")
        begun = r.clock.now
        r.executors[0].sessions.clear()
        if how == "reported":
            assert await r.jobs.on_job_ended(old)
            assert not await r.jobs.on_job_ended(old)
        while not r.executors[1].jobs and r.clock.now < begun + 20:
            r.clock.now += 1
            await r.actor.on_heartbeat(r.executors[1].heartbeat(utilization=0.0))
            if how != "silent":
                await r.actor.on_heartbeat(r.executors[0].heartbeat(utilization=0.5))
            await r.jobs.round()
        assert r.clock.now - begun <= (15 if how == "restarted" else 10)
        assert r.executors[1].jobs[0].attempt == 2 and await story(r) == ["pending", "started", "pending", "started"]
        # a late report about the first attempt changes nothing
        late = ended(r, 1)
        assert not await r.jobs.on_job_ended(late.model_copy(update={"attempt": 1, "executor_id": "a"}))
        assert await state(r) == "started" and await r.jobs.on_job_ended(late) and await state(r) == "completed"
        assert not await r.jobs.on_job_ended(late)


async def test_job_after_last_attempt_fails(rig_on):
    async with rig_on("a") as r:
        await r.jobs.on_submit_job(job(r, attempts=2))
        for _ in range(2):
            await r.jobs.round()
            await r.jobs.on_job_ended(ended(r, state="lost", reason="pulled the plug"))
            r.clock.now += 4
            await r.beat()
        task = await r.tasks.get("job-0001")
        assert task.state == "failed" and "pulled the plug; this was attempt 2 of 2" in task.reason
        assert len(r.executors[0].jobs) == 2


async def test_job_refused_by_executor_is_retried_later(rig_on):
    async with rig_on("a") as r:
        r.executors[0].refuse = RefusedError("executor.starting", "just a moment", retryable=True)
        await r.jobs.on_submit_job(job(r))
        await r.jobs.round()
        task = await r.tasks.get("job-0001")
        assert task.state == "pending" and task.parts == () and "just a moment" in task.reason
        r.executors[0].refuse = None
        await r.jobs.round()
        assert await state(r) == "pending"
        r.clock.now += RETRY_S
        await r.jobs.round()
        assert await state(r) == "started" and r.executors[0].jobs[0].attempt == 2


async def test_job_report_before_executor_answer_counts(rig_on):
    async with rig_on("a") as r:
        await r.jobs.on_submit_job(job(r))
        start = r.jobs._start
        asked = []
        r.jobs._start = lambda *args: asyncio.sleep(0, asked.append(args))
        await r.jobs.round()
        report = JobEnded(task_id="job-0001", attempt=1, executor_id="a", state="completed")
        assert await state(r) == "pending" and await r.jobs.on_job_ended(report)
        assert await story(r) == ["pending", "started", "completed"]
        await start(*asked[0])
        assert await state(r) == "completed" and len(await story(r)) == 3


@pytest.mark.on_both
@pytest.mark.parametrize("meanwhile", ["taken for lost", "waits for its retry", "being started again"])
async def test_job_report_that_comes_before_the_next_attempt_has_begun_counts(rig_on, monkeypatch, meanwhile):
    """The executor was cut off, and the job was taken for lost. Its results are there, so it need not run again."""
    async with rig_on("a", "b") as r:
        await r.jobs.on_submit_job(job(r))
        await r.jobs.round()
        report = ended(r, outputs=(OUTPUT,), reason="in no time")
        lost = ended(r, state="lost", reason="no heartbeat")
        if meanwhile == "taken for lost":
            get = r.tasks.get

            async def then_lost(task_id, s=None):
                found = await get(task_id, s)
                if s is None:
                    monkeypatch.undo()
                    assert await r.jobs.on_job_ended(lost)
                return found

            monkeypatch.setattr(r.tasks, "get", then_lost)
            assert await r.jobs.on_job_ended(report)
        elif meanwhile == "waits for its retry":
            assert await r.jobs.on_job_ended(lost) and await r.jobs.on_job_ended(report)
        else:
            assert await r.jobs.on_job_ended(lost)
            request = r.app.request

            async def then_reported(rpc, message, **wanted):
                answer = await request(rpc, message, **wanted)
                if getattr(message, "attempt", 0) == 2:
                    assert await r.jobs.on_job_ended(report)
                return answer

            r.app.request = then_reported
            r.clock.now += RETRY_S
            await r.beat()
            await r.jobs.round()
            r.app.request = request
            while not any(e.closed for e in r.executors):
                await asyncio.sleep(0.05)
            assert [name for e in r.executors for name, _ in e.closed] == ["job-0001-2"]
        task = await r.tasks.get("job-0001")
        assert (task.state, task.reason, task.attempt) == ("completed", "in no time", 1)
        assert [p.executor_id for p in task.parts] == ["a"] and task.outputs[0]["digest"] == "0" * 64
        r.clock.now += 60
        await r.beat()
        await r.jobs.round()
        assert await story(r) == ["pending", "started", "pending", "started", "completed"]


async def test_job_of_dead_router_is_started_by_next_router(rig_on):
    async with rig_on("a") as r:
        await r.jobs.on_submit_job(job(r))
        start = r.jobs._start
        r.jobs._start = lambda *args: asyncio.sleep(0)
        await r.jobs.round()
        assert await state(r) == "pending" and (await r.tasks.get("job-0001")).parts
        r.jobs._start = start
        r.clock.now += jobs_module.START_CONFIRM_S + 1
        await r.beat()
        await r.jobs.round()
        r.clock.now += 3
        await r.jobs.round()
        assert await state(r) == "started" and r.executors[0].jobs[0].attempt == 2


async def test_attempt_that_its_executor_begins_too_late_is_ended_there(rig_on, monkeypatch):
    """The job runs again elsewhere. Two executions would hold two devices, and be billed."""
    monkeypatch.setattr(jobs_module, "EXECUTOR_TIMEOUT_S", 0.2)
    async with rig_on("a") as r:
        await r.jobs.on_submit_job(job(r))
        executor = r.executors[0]
        executor.late_s = 0.5
        await r.jobs.round()
        assert await state(r) == "pending"
        while not executor.closed:
            await asyncio.sleep(0.05)
        assert executor.closed == [("job-0001-1", "its executor did not confirm it in time")]


@pytest.mark.parametrize("then", ["its place is free", "it runs again"])
async def test_start_that_comes_after_another_router_took_it_for_lost_does_not_count(rig_on, then):
    """The router that starts it was stopped meanwhile. A job that has started without a device would never end."""
    async with rig_on("a") as r:
        await r.jobs.on_submit_job(job(r))
        request = r.app.request

        async def stopped(rpc, message, **wanted):
            answer = await request(rpc, message, **wanted)
            if message in r.executors[0].jobs and message.attempt == 1:
                r.clock.now += jobs_module.START_CONFIRM_S + 1
                await r.beat()
                await r.jobs.round()
                if then == "it runs again":
                    r.clock.now += RETRY_S + 1
                    await r.jobs.round()
            return answer

        r.app.request = stopped
        await r.jobs.round()
        r.app.request = request
        task = await r.tasks.get("job-0001")
        assert (task.state, task.attempt) == (("pending", 1) if then == "its place is free" else ("started", 2))
        assert bool(task.parts) == (then == "it runs again")
        while not r.executors[0].closed:
            await asyncio.sleep(0.05)
        assert [name for name, _ in r.executors[0].closed] == ["job-0001-1"]
        r.clock.now += RETRY_S + 1
        await r.beat()
        await r.jobs.round()
        assert await r.jobs.on_job_ended(ended(r)) and await story(r) == ["pending", "started", "completed"]


@pytest.mark.parametrize("wrong_for", ["a lost attempt", "a start without a confirmation"])
async def test_job_postponed_by_wrong_clock_is_retried_soon(rig_on, wrong_for):
    async with rig_on("a") as r:
        start = r.jobs._start
        if wrong_for == "a lost attempt":
            await r.jobs.on_submit_job(job(r))
            await r.jobs.round()
            r.clock.now += 3600
            assert await r.jobs.on_job_ended(ended(r, state="lost", reason="stopped"))
        else:
            r.clock.now += 3600
            await r.beat()
            await r.jobs.on_submit_job(job(r))
            r.jobs._start = lambda *args: asyncio.sleep(0)
            await r.jobs.round()
        r.jobs._start = start
        assert await state(r) == "pending"
        r.clock.now -= 3600 - 1
        await r.beat()
        await r.jobs.round()
        r.clock.now += 2
        await r.beat()
        await r.jobs.round()
        assert await state(r) == "started" and r.executors[0].jobs[-1].attempt == 2


async def test_job_past_deadline_fails_in_queue_and_on_executor(rig_on):
    async with rig_on("a") as r:
        await r.jobs.on_submit_job(job(r, "job-wait", deadline_s=5, required_vram=5000))
        await r.jobs.on_submit_job(job(r, "job-run1", deadline_s=5))
        await r.jobs.round()
        r.clock.now += 4
        await r.beat()
        await r.jobs.round()
        assert (await state(r, "job-wait"), await state(r, "job-run1")) == ("pending", "started")
        r.clock.now += 2
        await r.beat()
        await r.jobs.round()
        for name in ("job-wait", "job-run1"):
            assert await state(r, name) == "failed" and "deadline of 5 s" in (await r.tasks.get(name)).reason
        assert r.executors[0].closed == [("job-run1-1", "its deadline of 5 s has passed")]


async def test_job_after_cancel_stays_cancelled(rig_on):
    async with rig_on("a") as r:
        desk = r.desk
        await r.jobs.on_submit_job(job(r))
        await r.jobs.round()
        last = ended(r)
        reply = await desk.on_cancel_task(TaskRequest(task_id="job-0001", reason="no need"))
        assert reply.task.state == "cancelled" and [s.state for s in reply.story] == ["pending", "started", "cancelled"]
        assert r.executors[0].closed == [("job-0001-1", "no need")]
        assert not await r.jobs.on_job_ended(last) and await state(r) == "cancelled"
        assert (await desk.on_cancel_task(TaskRequest(task_id="job-0001"))).task.reason == "no need"


async def test_job_whose_attempt_begins_while_it_is_cancelled_ends_on_its_executor(rig_on):
    async with rig_on("a") as r:
        await r.jobs.on_submit_job(job(r))
        before = await r.tasks.get("job-0001")
        await r.jobs.round()
        assert await r.jobs.end(before, "cancelled", "no need")
        assert r.executors[0].closed == [("job-0001-1", "no need")]


async def test_sessions_are_listed_and_cancelled_as_tasks(rig_on):
    async with rig_on("a") as r:
        desk = r.desk
        opened = await r.open(tenant="t")
        await r.jobs.on_submit_job(job(r))
        for i in range(3):
            r.clock.now += 0.25
            await r.open(tenant="u", priority=i)
        pages, after = [], ""
        while True:
            reply = await desk.on_tasks(TasksRequest(limit=2, after=after))
            pages += [t.task_id for t in reply.tasks]
            after = reply.next
            if not after:
                break
        assert len(pages) == len(set(pages)) == 5 and pages[-1] in ("job-0001", opened.session_id)
        assert {t.tenant for t in (await desk.on_tasks(TasksRequest(tenant="t"))).tasks} == {"t"}
        assert len((await desk.on_tasks(TasksRequest(kind="session", states=("started",)))).tasks) == 4
        with pytest.raises(RefusedError, match="not a valid cursor"):
            await desk.on_tasks(TasksRequest(after="x"))
        for wrong in ({"task_id": "nobody"}, {"task_id": opened.session_id, "tenant": "u"}):
            with pytest.raises(RefusedError, match="does not exist"):
                await desk.on_cancel_task(TaskRequest(**wrong))
        assert (await desk.on_cancel_task(TaskRequest(task_id=opened.session_id))).task.state == "cancelled"
        assert r.executors[0].closed == [(opened.session_id, "cancelled on request")]


async def test_prioritize_waiting_job_moves_it_forward(rig_on):
    async with rig_on("a") as r:
        desk = r.desk
        for i in range(2):
            r.clock.now += 0.1
            await r.jobs.on_submit_job(job(r, f"job-000{i}", required_vram=900))
        reply = await desk.on_prioritize_task(PrioritizeTaskRequest(task_id="job-0001", priority=0))
        assert reply.task.priority == 0
        await r.jobs.round()
        assert await state(r) == "started" and await state(r, "job-0000") == "pending"


async def test_job_that_starts_while_it_is_prioritized_runs_in_its_new_class(rig_on, monkeypatch):
    async with rig_on("a") as r:
        steered, set_priority = [], r.tasks.set_priority

        async def on_steer(request):
            steered.append((request.session_id, request.priority))
            return SteerSessionReply(policy=SessionPolicy(), suspended=False, exclusive=False)

        async def start_and_set(*args):
            await r.jobs.round()
            return await set_priority(*args)

        other = ServiceApp("scheduler", r.app.url)
        other.serve(contracts.SCHEDULER_SESSION_STEER, on_steer)
        monkeypatch.setattr(r.tasks, "set_priority", start_and_set)
        await r.jobs.on_submit_job(job(r))
        async with other.running():
            await r.desk.on_prioritize_task(PrioritizeTaskRequest(task_id="job-0001", priority=0))
        assert steered == [("job-0001-1", 0)]


@pytest.mark.on_both
async def test_queue_and_events_after_router_change_are_processed_once(rig_on):
    """Commands and reports arrive through JetStream, each twice. A second router publishes what the first one did not."""
    async with rig_on("a") as r:
        js = r.app.jetstream()
        takers = [asyncio.create_task(t) for t in (r.jobs.take_commands(), r.jobs.take_reports())]
        for _ in range(100):
            with contextlib.suppress(Exception):
                await js.publish(contracts.ROUTER_JOB_COMMAND.subject, job(r).model_dump_json().encode())
                break
            await asyncio.sleep(0.02)
        await js.publish(contracts.ROUTER_JOB_COMMAND.subject, job(r).model_dump_json().encode())
        await js.publish(contracts.ROUTER_JOB_COMMAND.subject, b"garbage")
        await until(lambda: r.tasks.get("job-0001"))
        await r.jobs.round()
        report = ended(r, outputs=(OUTPUT,)).model_dump_json().encode()
        for _ in range(2):
            await js.publish(contracts.EXECUTOR_JOB_ENDED.at("a").subject, report)

        async def completed():
            return await state(r) == "completed"

        await until(completed)
        other = JobActor(r.app, r.actor)
        assert await other.tell() == 3 and await other.tell() == 0 and await r.jobs.tell() == 0
        subscription = await js.subscribe(contracts.ROUTER_TASK_CHANGED.at("t").subject, ordered_consumer=True)
        events = [TaskChanged(**json.loads((await subscription.next_msg(5)).data)) for _ in range(3)]
        assert [(e.number, e.state) for e in events] == [(1, "pending"), (2, "started"), (3, "completed")]
        assert events[2].outputs == (OUTPUT,) and events[0].outputs == () and {e.tenant for e in events} == {"t"}

        async def drained():
            return all(
                [
                    (await js.stream_info(n)).state.messages == 0
                    for n in (contracts.ROUTER_JOB_COMMAND.stream_name, contracts.EXECUTOR_JOB_ENDED.stream_name)
                ]
            )

        await until(drained)
        for task in takers:
            task.cancel()
        await asyncio.wait(takers)


async def until(condition):
    for _ in range(250):
        if await condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError


def test_session_of_job_differs_per_attempt():
    from wooly_router.state.tasks import TaskRecord

    task = TaskRecord(id="j", kind="job", tenant="t", created_at=0.0, attempt=2)
    assert session_of(task) == "j-2"
