"""`python -m wooly_scheduler` as a process: journals, admission, steering, epochs, audit, `/metrics`, restarts."""

import asyncio
import contextlib
import pickle
import signal
import socket

import httpx
import pytest
from nats.js.errors import NotFoundError
from prometheus_client.parser import text_string_to_metric_families
from wooly_bus import contracts
from wooly_bus.app import ServiceApp
from wooly_bus.errors import RefusedError
from wooly_bus.stream_reader import read_stream
from wooly_dispatch.events import LaunchDoneEvent, Policy, SessionOpenedEvent
from wooly_wis.messages import (
    AdmitSessionRequest,
    DeviceFacts,
    ExecutorHeartbeat,
    GpusReply,
    GpusRequest,
    SteerSessionRequest,
)

from .conftest import MS, followed, listed, until

pytestmark = pytest.mark.connected


def admission(session, executor="gpu-0", **declared):
    return AdmitSessionRequest(session_id=session, executor_id=executor, tenant="acme", **{"priority": 0} | declared)


async def scraped(tmp_path):
    """All samples of `/metrics`, by name and labels."""
    port = (tmp_path / "scheduler" / "scheduler.port").read_text()
    async with httpx.AsyncClient(trust_env=False) as http:
        answer = await http.get(f"http://127.0.0.1:{port}/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        (s.name, *sorted(s.labels.items())): s.value
        for family in text_string_to_metric_families(answer.text)
        for s in family.samples
    }


def lasting(state):
    """The fields of a listing that do not depend on the time of the request."""
    fields = {
        "entries",
        "journal",
        "share_error_permille",
        "windows_ns",
        "violations",
        "last_violation",
        "lost",
        "gaps",
    }
    return state.model_dump(include=fields) | {
        "sessions": sorted(
            [s.model_dump(exclude={"share_permille"}) for s in state.sessions], key=lambda s: s["session_id"]
        )
    }


async def test_journal_is_followed_listed_and_scraped(executor, start_scheduler, tmp_path):
    start_scheduler()
    async with executor() as e:
        e.populate()
        await e.publish()
        state = await followed(e)
        sessions = {s.session_id: s for s in state.sessions}
        assert sessions.keys() == {"p0", "bg"} and not state.lost and state.violations == 0
        assert (sessions["p0"].policy.priority, sessions["p0"].programs) == (0, 20)
        assert sessions["p0"].run_ns == 20 * 400_000 and sessions["p0"].unjust_ns == 0
        assert state.windows_ns == e.rig.state.windows
        assert sum(s.share_permille for s in state.sessions) in (999, 1000)
        found = await scraped(tmp_path)
        # The length of the silence after the last entry is not part of this test.
        assert 0 < found["wooly_gpu_starvation_ratio", ("gpu", "gpu-0")] <= 1
        assert 0 < found["wooly_gpu_utilization_ratio", ("gpu", "gpu-0")] <= 1
        assert found["wooly_gpu_executing_seconds_total", ("gpu", "gpu-0")] == e.rig.metrics.executing_ns / 1e9
        of_p0 = (("gpu", "gpu-0"), ("session", "p0"), ("tenant", "default"))
        assert found["wooly_session_unjust_wait_seconds_total", *of_p0] == 0
        assert found["wooly_session_objective_attainment_ratio", *of_p0] == sessions["p0"].attainment_permille / 1000
        assert found["wooly_tenant_programs_total", ("gpu", "gpu-0"), ("tenant", "default")] == 40
        assert found["wooly_gpu_window_seconds", ("class", "P4"), ("gpu", "gpu-0")] == state.windows_ns[4] / 1e9


@pytest.mark.parametrize("how", ["killed", "terminated"])
async def test_restarted_scheduler_lists_the_same_state(executor, start_scheduler, how):
    first = start_scheduler(WOOLY_SCHEDULER_CHECKPOINT_S="0.2")
    async with executor() as e:
        e.populate()
        await e.publish()
        await followed(e)
        e.work()
        await e.publish()
        before = await followed(e)
        first.send_signal(signal.SIGKILL if how == "killed" else signal.SIGTERM)
        _, log = await asyncio.to_thread(first.communicate, timeout=20)
        assert "Traceback" not in log
        second = start_scheduler()
        assert lasting(await followed(e)) == lasting(before)
        e.work()
        await e.publish()
        after = await followed(e)
        assert after.entries > before.entries and after.violations == 0
        second.terminate()
        _, log = await asyncio.to_thread(second.communicate, timeout=20)
        assert ("loaded the checkpoint" in log) or how == "killed"


async def test_scheduler_without_a_checkpoint_rebuilds_from_the_stream(executor, start_scheduler):
    async with executor() as e:
        e.populate()
        for _ in range(5):
            e.work(4)
            await e.publish()
        first = start_scheduler(WOOLY_SCHEDULER_CHECKPOINT_S="1000")
        before = await followed(e)
        first.kill()
        await asyncio.to_thread(first.communicate, timeout=20)
        start_scheduler()
        assert lasting(await followed(e)) == lasting(before)


async def test_checkpoint_replaces_messages_that_the_stream_discarded(executor, start_scheduler):
    first = start_scheduler()
    async with executor() as e:
        e.populate()
        await e.publish()
        before = await followed(e)
        first.terminate()
        await asyncio.to_thread(first.communicate, timeout=20)
        await e.app.jetstream().purge_stream(contracts.EXECUTOR_DISPATCH_JOURNALED.stream_name)
        e.work()
        await e.publish()
        start_scheduler()
        after = await followed(e)
        assert not after.lost and after.entries > before.entries
        assert {s.programs for s in after.sessions} == {40}


@pytest.mark.parametrize(
    "content", [pickle.dumps(print), b"", b"[99,1,[]]\n"], ids=["pickle", "empty", "another version"]
)
async def test_unreadable_checkpoint_is_ignored(executor, start_scheduler, content):
    first = start_scheduler()
    async with executor() as e:
        e.populate()
        await e.publish()
        before = await followed(e)
        first.terminate()
        await asyncio.to_thread(first.communicate, timeout=20)
        await (await e.app.jetstream().object_store("WOOLY_SCHEDULER")).put("checkpoint", content)
        second = start_scheduler()
        assert lasting(await followed(e)) == lasting(before)
        second.terminate()
        _, log = await asyncio.to_thread(second.communicate, timeout=20)
        assert (
            "the last checkpoint cannot be used (the bytes are not a checkpoint of version 4); the scheduler replays"
            in log
        )


def beat(journal):
    device = DeviceFacts(name="d", vendor="cpu", runtime="cpu", total_memory=1, cores=1)
    return ExecutorHeartbeat(executor_id="gpu-0", node="host", pid=1, device=device, endpoints=(), journal=journal)


def ran(executor, session, gpu_ns, core_ns):
    """Run one launch of a session, with these times."""
    executor.rig.submit(session, gpu_ns)
    launch = executor.rig.in_flight.popleft()
    executor.rig.now += gpu_ns
    executor.rig.send(LaunchDoneEvent(executor.rig.now, launch.launch, gpu_ns, core_ns))


async def totals_told(app):
    """The totals that metering got, by journal: number of entries, and core and device time of each session."""
    found = {}
    with contextlib.suppress(NotFoundError):
        await app.jetstream().stream_info(contracts.EXECUTOR_USAGE_RECORDED.stream_name)
        async for kept in read_stream(app.jetstream(), contracts.EXECUTOR_USAGE_RECORDED, poll_s=0.1):
            if kept is None:
                break
            event = kept.payload()
            assert event.whole and event.executor_id == "gpu-0"
            assert event.process == ("gpu-0/2" if event.source == "journal/gpu-0/2.1/0" else "")
            found[event.source] = event.batch, {r.session_id: (r.tenant, r.core_ns, r.gpu_ns) for r in event.records}
    return found


async def test_journal_totals_are_sent_to_metering_at_a_new_journal_or_silence(executor, start_scheduler):
    start_scheduler(WOOLY_SCHEDULER_SILENCE_S="4")
    async with executor() as e:
        for name in ("s1", "s2", "idle"):
            e.rig.open(name, 2)
        ran(e, "s1", 500, 900)
        ran(e, "s2", 70, 70)
        ran(e, "s1", 500, 1000)
        await e.publish()
        await followed(e)
        entries = e.told
        assert await totals_told(e.app) == {}, "an executor that lives tells of its usage itself"
        first = {"s1": ("default", 1900, 1000), "s2": ("default", 70, 70)}
        e.begin("2.1")
        e.rig.open("s3", 2)
        ran(e, "s3", 30, 40)
        await e.publish()
        await until(lambda: totals_told(e.app))
        assert (await totals_told(e.app))["journal/gpu-0/1/0"] == (entries, first)
        second = {"s3": ("default", 40, 30)}
        found = await until(lambda: both(e.app))
        assert found == {"journal/gpu-0/1/0": (entries, first), "journal/gpu-0/2.1/0": (e.told, second)}


async def test_journal_totals_are_sent_if_a_restarted_executor_has_nothing_to_do(executor, start_scheduler):
    start_scheduler()
    async with executor() as e:
        e.rig.open("s1", 2)
        ran(e, "s1", 500, 900)
        await e.publish()
        await followed(e)

        async def told(journal):
            await e.app.publish(contracts.EXECUTOR_NODE_HEARTBEAT, beat(journal))
            return await totals_told(e.app)

        for _ in range(15):  # more than one check whether totals must be sent
            assert await told("gpu-0/1") == await told("") == {}, "an executor that lives tells of its usage itself"
            await asyncio.sleep(0.1)
        found = await until(lambda: told("gpu-0/2"))
        assert found == {"journal/gpu-0/1/0": (e.told, {"s1": ("default", 900, 500)})}


async def both(app):
    found = await totals_told(app)
    return found if len(found) == 2 else None


async def test_missing_entries_are_logged_and_the_next_journal_is_followed(executor, start_scheduler, tmp_path):
    process = start_scheduler()
    async with executor() as e:
        e.populate()
        e.cut()  # never published
        e.work()
        await e.publish()
        state = await until(lambda: _when(e, lambda s: s.gaps))
        assert "is next" in state.lost and state.violations == 0
        found = await scraped(tmp_path)
        assert found["wooly_gpu_journal_followed", ("gpu", "gpu-0")] == 0
        assert found["wooly_gpu_journal_gaps_total", ("gpu", "gpu-0")] == 1
        e.begin("2")
        e.populate()
        await e.publish()
        state = await followed(e)
        assert not state.lost and state.gaps == 1
        process.terminate()
        _, log = await asyncio.to_thread(process.communicate, timeout=20)
        assert "has a gap" in log and "Traceback" not in log


async def _when(executor, condition):
    state = await listed(executor.app, executor.name)
    return state if state is not None and condition(state) else None


async def test_corrupt_batches_are_violations_events_and_a_metric(executor, start_scheduler, nats, tmp_path):
    heard = []

    async def on_violated(event):
        heard.append(event)

    watcher = ServiceApp("watcher", nats)
    watcher.listen(contracts.SCHEDULER_AUDIT_VIOLATED, on_violated)
    process = start_scheduler()
    async with watcher.running(), executor() as e:
        e.populate()
        await e.publish()
        await followed(e)
        await e.send(b"\x00\xff")
        await until(lambda: len(heard) == 1)
        assert (heard[0].executor_id, heard[0].law) == ("gpu-0", "bytes")
        e.work()
        await e.publish()
        assert not (await followed(e)).lost
        e.work()
        forged = e.cut().encode().replace(b"400000", b"400001", 1)
        await e.send(forged)
        await until(lambda: len(heard) == 2)
        assert heard[1].law == "replay" and heard[1].journal == "gpu-0/1" and heard[1].entry > 0
        state = await listed(e.app)
        assert state.violations == 2 and "replay" in state.last_violation and "cannot be trusted" in state.lost
        found = await scraped(tmp_path)
        for law in ("bytes", "replay"):
            assert found["wooly_audit_violations_total", ("gpu", "gpu-0"), ("law", law)] == 1
        process.terminate()
        _, log = await asyncio.to_thread(process.communicate, timeout=20)
        assert "Traceback" not in log and process.returncode == 0


async def test_admission_counts_admitted_sessions_and_refuses_with_the_miss(executor, start_scheduler):
    start_scheduler()
    async with executor() as e:
        declared = {"service_ns": 10 * MS, "interval_ns": 100 * MS}
        await until(lambda: _when_up(e))
        first = await ask(e, admission("a", objective_ns=12 * MS, **declared))
        assert first.admitted and (first.policy.rate_permille, first.policy.burst_ns) == (110, 20 * MS)
        refused = await ask(e, admission("b", objective_ns=50 * MS, **declared))
        assert not refused.admitted and refused.missed_by_ns > 0 and refused.policy is None
        assert refused.reason.startswith("GPU gpu-0: P0 session a (acme) would answer in ")
        assert "beyond its objective of 12 ms" in refused.reason
        assert (await ask(e, admission("b", "gpu-1", objective_ns=50 * MS, **declared))).admitted
        assert (await ask(e, admission("c", priority=4, weight=3))).policy.weight == 3


async def _when_up(executor):
    try:
        return await ask(executor, admission("probe", "probe", priority=4))
    except Exception:
        return None


async def ask(executor, request):
    return await executor.app.request(contracts.SCHEDULER_SESSION_ADMIT, request, timeout=3)


async def test_steer_running_session_unless_an_objective_would_be_missed(executor, start_scheduler):
    start_scheduler()

    async def steer(session, **changes):
        request = SteerSessionRequest(session_id=session, **changes)
        return await e.app.request(contracts.SCHEDULER_SESSION_STEER, request, timeout=5)

    async with executor() as e:
        policy = Policy(0, 1, 10 * MS, 12 * MS, 110, 20 * MS)
        e.rig.send(SessionOpenedEvent(0, "tight", policy, "acme"))
        e.rig.send(SessionOpenedEvent(0, "train", Policy(3), "blue"))
        await e.publish()
        await followed(e)
        assert (await steer("train", weight=3)).policy.weight == 3
        assert (await steer("train", suspended=True)).suspended
        await followed(e)
        state = await listed(e.app)
        train = next(s for s in state.sessions if s.session_id == "train")
        assert train.suspended and train.policy.weight == 3
        assert not (await steer("train", suspended=False)).suspended
        with pytest.raises(RefusedError, match=r"tight .acme. would answer in .* beyond its objective") as caught:
            await steer("train", priority=0)
        assert caught.value.code == "scheduler.refused"
        assert e.rig.state.sessions["train"].policy.priority == 3
        with pytest.raises(RefusedError, match="is not open on any GPU"):
            await steer("nobody", weight=2)


async def test_epoch_is_sent_only_if_windows_change(executor, start_scheduler):
    start_scheduler()
    async with executor() as e:
        e.rig.open("p0", 0, service_ns=4 * MS)
        e.rig.open("bg", 4)
        wide = e.rig.state.windows[4]
        for _ in range(40):
            e.rig.submit("p0", MS)
            e.rig.finish(4 * MS)
            e.rig.now += 2 * MS
        await e.publish()
        await followed(e)
        assert e.epochs == [] or e.epochs[0].slowdown_permille <= 1050

        async def slowed():  # publish again and again, as executors do: the scheduler does not judge old measurements
            for _ in range(80):
                e.rig.submit("bg", 100_000)
                e.rig.submit("p0", 100_000)
                e.rig.finish(4 * MS)
                e.rig.finish(4 * MS)
            await e.publish()
            await asyncio.sleep(0.2)
            return any(x.slowdown_permille > 1500 for x in e.epochs)

        await until(slowed)
        await until(lambda: e.rig.state.windows[4] < wide)

        async def agree():  # the next epoch may change the windows after the scheduler's answer
            return (await followed(e)).windows_ns == e.rig.state.windows

        await until(agree)


async def test_silent_gpu_is_forgotten_unless_it_sends_heartbeats(executor, start_scheduler):
    start_scheduler(WOOLY_SCHEDULER_SILENCE_S="1")
    async with executor() as e, executor("gpu-1") as other:
        for one in (e, other):
            one.populate()
            await one.publish()
            await followed(one)

        async def gone():
            await e.app.publish(contracts.EXECUTOR_NODE_HEARTBEAT, beat(""))
            return await listed(e.app, "gpu-1") is None

        await until(gone)
        assert await listed(e.app, "gpu-0") is not None


@pytest.mark.parametrize("meanwhile", ["nothing", "the scheduler is started again"])
async def test_gpu_that_was_silent_for_long_is_followed_on(executor, start_scheduler, meanwhile):
    """NATS was away, and its executor goes on with the same journal."""
    first = start_scheduler(WOOLY_SCHEDULER_SILENCE_S="1")
    async with executor() as e:
        e.populate()
        await e.publish()
        before = await followed(e)

        async def gone():
            return await e.app.request(contracts.SCHEDULER_GPU_LIST, GpusRequest(), timeout=2) == GpusReply(gpus=())

        await until(gone)
        if meanwhile != "nothing":
            first.terminate()
            await asyncio.to_thread(first.communicate, timeout=20)
            await e.app.jetstream().purge_stream(contracts.EXECUTOR_DISPATCH_JOURNALED.stream_name)
            start_scheduler()
        e.work()
        await e.publish()
        after = await followed(e)
        assert not after.lost and after.entries > before.entries
        assert {s.programs for s in after.sessions} == {40}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_ends_the_scheduler_normally(executor, start_scheduler, tmp_path, number):
    process = start_scheduler()
    async with executor() as e:
        e.populate()
        await e.publish()
        await followed(e)
        process.send_signal(number)
        _, log = await asyncio.to_thread(process.communicate, timeout=20)
    assert process.returncode == 0 and "Traceback" not in log
    assert not (tmp_path / "scheduler" / "scheduler.port").exists()


async def test_metrics_require_the_scrapers_token_if_set(executor, start_scheduler, tmp_path):
    (tmp_path / "scraper").write_text("secret-of-the-scraper\n")
    start_scheduler(WOOLY_SCHEDULER_METRICS_TOKEN=str(tmp_path / "scraper"))
    async with executor() as e:
        e.populate()
        await e.publish()
        await followed(e)
        port = (tmp_path / "scheduler" / "scheduler.port").read_text()
        async with httpx.AsyncClient(trust_env=False, base_url=f"http://127.0.0.1:{port}") as http:
            for shown in (None, "Bearer guess", "secret-of-the-scraper"):
                answer = await http.get("/metrics", headers={} if shown is None else {"Authorization": shown})
                assert answer.status_code == 401 and "wooly_" not in answer.text
            answer = await http.get("/metrics", headers={"Authorization": "Bearer secret-of-the-scraper"})
            assert answer.status_code == 200 and "wooly_tenant_programs_total" in answer.text


async def test_metrics_can_be_off_and_a_used_port_is_an_error(executor, start_scheduler, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = start_scheduler(WOOLY_SCHEDULER_METRICS_PORT=str(taken.getsockname()[1]))
        _, log = await asyncio.to_thread(process.communicate, timeout=30)
    assert process.returncode == 1 and "Address already in use" in log and "Traceback" not in log
    start_scheduler(WOOLY_SCHEDULER_METRICS_PORT="")
    async with executor() as e:
        e.populate()
        await e.publish()
        await followed(e)
    assert not (tmp_path / "scheduler" / "scheduler.port").exists()
