"""Tests of usage: core time and residency in exact integers, the library's worker threads, and held sessions."""

import _thread
import threading
import time
from pathlib import Path

import pytest
import torch
from wooly_executor.billing import usage
from wooly_executor.billing.core_speed import FULL
from wooly_executor.billing.cores import WorkerClock, apart, beyond
from wooly_executor.billing.usage import IDLE_NS, MIB_US, UsageBook, work_of
from wooly_executor.billing.usage_publisher import UsagePublisher
from wooly_testkit.tape import Tape
from wooly_wis.dtypes import DType

SECOND = 1_000_000_000
MIB = 1 << 20


def taken(book, now, priority=2):
    return {t.session_id: t for t in book.take(lambda _: priority, now)}


class Holding:
    """The integral of a number of bytes over time. The number changes at each call."""

    __slots__ = ("_at", "byte_ns", "held")

    def __init__(self, now: int = 0) -> None:
        self.held = self.byte_ns = 0
        self._at = now

    def borne(self, held: int, now: int) -> tuple[int, int]:
        """Integrate the old number up to `now`, then hold `held` bytes. Returns `held` and the integral in bytes times ns."""
        self.byte_ns += self.held * (now - self._at)
        self._at, self.held = now, held
        return held, self.byte_ns


class Bears:
    """The bytes of a session, set by the test."""

    def __init__(self, held=0):
        self.held, self.holding = held, Holding()

    def __call__(self, now):
        return self.holding.borne(self.held, now)


def test_usage_residency_splits_into_executing_and_idle():
    book, bears = UsageBook(), Bears()
    used = book.opened("a", "acme", "llama", bears, 0)
    bears.held = 3 * MIB
    used.launched(5, 5, 10)  # before this, the session had no memory
    bears.held = 5 * MIB
    used.launched(2_000_000, 3_000_000, 10 + 10_000_000)
    found = taken(book, 20_000_010)["a"]
    assert (found.gpu_ns, found.core_ns, found.span_ns) == (2_000_005, 3_000_005, 20_000_010)
    assert found.resident == 3 * 2000 and found.idle == 3 * 8000 + 5 * 10_000
    book.closed("a", 30_000_010)
    last = taken(book, 30_000_010)["a"]
    assert last.ended and last.idle == 5 * 10_000 and not taken(book, 40_000_000)
    assert (found.tenant, found.model, found.priority) == ("acme", "llama", 2)


def test_usage_remainder_below_a_unit_is_carried_over():
    book = UsageBook()
    used = book.opened("a", "t", "", Bears(1000), 0)
    told = resident = 0
    for n in range(1, 2001):
        used.launched(700, 700, n * 1001)
        found = taken(book, n * 1001)["a"]
        told, resident = told + found.idle, resident + found.resident
    assert used.byte_ns == 1000 * 1001 * 2000 and used.executing_byte_ns == 1000 * 700 * 2000
    assert resident == used.executing_byte_ns // MIB_US and told == (used.byte_ns - used.executing_byte_ns) // MIB_US


def test_usage_pace_is_weighted_by_core_time():
    """Otherwise long launches on one core with a low price would make short launches on many cores cheap."""
    book = UsageBook()
    used = book.opened("a", "t", "", Bears(), 0)
    used.launched(1_000, 16_000, 10)
    used.launched(9_000, 9_000, 20, FULL // 2)
    found = taken(book, 30)["a"]
    assert (found.gpu_ns, found.core_ns, found.pace) == (10_000, 25_000, FULL * 41 // 50)
    assert found.core_ns * found.pace // FULL == 16_000 + 4_500
    used.ran(b"", None)
    assert taken(book, 40)["a"].pace == FULL  # no core time was used


def test_usage_session_with_memory_only_is_reported_rarely():
    book = UsageBook()
    used = book.opened("a", "t", "", Bears(MIB), 0)
    used.launched(1, 1, 1)
    assert taken(book, 1)["a"].gpu_ns == 1
    assert not taken(book, IDLE_NS)
    found = taken(book, IDLE_NS + 2)["a"]
    assert found.idle == (used.byte_ns - used.executing_byte_ns) // MIB_US == (IDLE_NS + 1) // 1000
    book.opened("b", "t", "", Bears(), IDLE_NS)
    assert not taken(book, 2 * IDLE_NS)  # neither session has news: one has no memory, the other was just reported


def test_usage_launch_ending_after_its_session_is_reported():
    book = UsageBook()
    used = book.opened("a", "t", "", Bears(), 0)
    book.closed("a", 5)
    used.launched(7, 8, 9)
    assert (taken(book, 10)["a"].gpu_ns, book.take(lambda _: 2, 11)) == (7, [])


def test_work_of_a_program_follows_the_op_table(wis):
    v = wis.at(DType.F32, 8, 16)
    w = wis.at(DType.F32, 16, 4)
    out = wis.at(DType.F32, 8, 4)
    body = wis.body().alloc("y", 128).call("aten.mm.default", ("in", "x", v), ("in", "w", w), ("out", "y", out))
    moved, flops = work_of(body.program)
    assert moved == 4 * (8 * 16 + 16 * 4 + 8 * 4) and flops == 0  # an extern: the op table knows only the bytes
    tape = Tape()
    x, y = tape.input(DType.F32, 8, 16), tape.input(DType.F32, 16, 4)
    tape.op("mm", x, y)
    assert work_of(tape.program()[0])[1] == 2 * 8 * 16 * 4


async def test_usage_work_above_the_program_limit_is_added_up(device, monkeypatch):
    monkeypatch.setattr(usage, "RUNS_KEPT", 3)
    book, publisher = UsageBook(), UsagePublisher(None, device.loop, "x", "x/1")
    used = book.opened("a", "t", "", Bears(), 0)
    programs = []
    for n in range(1, 8):
        tape = Tape()
        tape.op("mm", tape.input(DType.F32, n, 16), tape.input(DType.F32, 16, 4))
        programs.append(tape.program()[0])
    for times in range(2):
        for n, program in enumerate(programs):
            for _ in range(n + times):
                used.ran(bytes([n]), program)
        assert len(used.runs) <= 3
    record = publisher._record(book.take(lambda _: 2, 10)[0], 1)
    counts = [2 * n + 1 for n in range(7)]
    works = [work_of(p) for p in programs]
    assert record.runs == sum(counts)
    assert record.moved_bytes == sum(c * moved for c, (moved, _) in zip(counts, works, strict=True))
    assert record.flops == sum(c * flops for c, (_, flops) in zip(counts, works, strict=True)) > 0
    assert not book.take(lambda _: 2, 11)


def busy(wis, client, times=30, n=256):
    v = wis.at(DType.F32, n, n)
    client.run(wis.body().alloc("x", 4 * n * n).fill("x", v, 0.5), {"x": 1})
    body = (
        wis.body()
        .alloc("y", 4 * n * n)
        .call("aten.mm.default", ("in", "x", v), ("in", "x", v), ("out", "y", v))
        .free("y")
    )
    name = client.define(body)
    for k in range(times):
        client.start(name, [10 + k, 1])
    client.sync()


def test_usage_sum_over_sessions_equals_the_busy_time(device, wis):
    clients = [device.open(f"s{n}", weight=1 + n) for n in range(3)]
    threads = [threading.Thread(target=busy, args=(wis, c)) for c in clients]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    found = device.call(device.loop.take_usage)
    assert sorted(t.session_id for t in found) == ["s0", "s1", "s2"]
    assert sum(t.gpu_ns for t in found) == device.call(lambda: device.loop.busy.total_ns) > 0
    assert all(t.core_ns >= t.gpu_ns for t in found)
    assert [sum(n for _, n in t.runs.values()) for t in found] == [31] * 3


def test_usage_residency_equals_the_books_integral(device, wis):
    """The reported residency of all sessions equals the integral of their charges on the device."""
    a, b = device.open("a"), device.open("b")
    for n, client in enumerate((a, b)):
        client.make(1, *([1.0] * 1000 * (n + 1)))
        client.sync()
    loop = device.loop

    def integral():
        now = loop.vram.clock()
        loop.usage.take(lambda _: 2, now)
        facts = loop.vram.ledger.facts()
        return (
            now,
            facts.own + facts.contents,
            {s.id: (s.used.byte_ns, loop.vram.borne(s.holdings.account, now)[0]) for s in loop.sessions.all()},
        )

    first, _, before = device.call(integral)
    time.sleep(0.05)
    second, held, after = device.call(integral)
    for name, least in (("a", 4000), ("b", 8000)):
        borne = after[name][1]
        assert before[name][1] == borne >= least and after[name][0] - before[name][0] == borne * (second - first)
    assert sum(borne for _, borne in after.values()) == held


@pytest.mark.skipif(torch.get_num_threads() < 2, reason="one core")
def test_worker_clock_measures_the_librarys_threads():
    """Two threads that multiply use the time of two threads; the caller's clock has only its own part."""
    seen = {}

    def work():
        torch.set_num_threads(2)
        clock = WorkerClock()
        clock.attach()
        x = torch.ones(600, 600)
        own, others = time.thread_time_ns(), clock.read()
        for _ in range(20):
            torch.mm(x, x)
        seen["own"], seen["others"] = time.thread_time_ns() - own, clock.read() - others

    before = torch.get_num_threads()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.set_num_threads(before)
    assert seen["others"] > seen["own"] // 4 > 0


@pytest.mark.parametrize(
    ("groups", "threads", "cores"),
    [(0, 4, 1), (1, 4, 1), (3, 4, 3), (4, 4, 4), (5, 4, 2.5), (1000, 4, 4), (1001, 4, 1001 / 251), (7, 1, 1)],
)
def test_beyond_follows_from_groups_and_threads(groups, threads, cores):
    assert 1000 + beyond(1000, groups, threads) == int(1000 * cores)


def test_worker_clock_ignores_threads_started_apart():
    comm = Path("/proc/self/task") / str(threading.get_native_id()) / "comm"
    if not comm.exists():
        pytest.skip("names of threads are Linux's")
    before, seen = comm.read_text(), []

    def work():
        seen.append((Path("/proc/self/task") / str(threading.get_native_id()) / "comm").read_text())

    ended = threading.Event()
    with apart("wooly-opencl"):
        # As a library does: Python 3.14 names the threads of `threading.Thread` itself.
        _thread.start_new_thread(lambda: (work(), ended.set()), ())
        assert ended.wait(30)
    assert seen == ["wooly-opencl\n"] and comm.read_text() == before


def test_worker_clock_with_one_thread_is_zero():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    clock = WorkerClock()
    clock.attach()
    torch.set_num_threads(before)
    assert clock.read() == 0


# -- held sessions ---------------------------------------------------------------------------------------------------


def hold(device, session, why, paused=None):
    def steer():
        policy, _, exclusive = device.loop.dispatch.treatment(session)
        device.loop.dispatch.steer(session, policy, device.loop.sessions.suspend(session, paused, why), exclusive)

    device.call(steer)


def test_held_session_refuses_with_the_reason_and_resumes(device, wis):
    client = device.open("s")
    client.make(1, 1.0, 2.0)
    v = wis.at(DType.F32, 2)
    name = client.define(wis.body().call("aten.add_.Tensor", ("inout", "x", v), ("in", "x", v)))
    client.sync()
    hold(device, "s", "the credits are used up")
    assert client.floats(1, 2) == [1.0, 2.0]  # existing buffers can be read
    client.start(name, [1])
    for _ in range(2):
        with pytest.raises(wis.error, match="the credits are used up") as e:
            client.floats(1, 2)
        assert e.value.code == "executor.held"
    with pytest.raises(wis.error, match="used up"):
        client.sync()
    client.start(name, [1])
    hold(device, "s", "")
    assert client.floats(1, 2) == [4.0, 8.0]


def test_held_session_answers_frames_that_waited_before(device, wis):
    client = device.open("s")
    client.make(1, 1.0)
    v = wis.at(DType.F32, 1)
    name = client.define(wis.body().call("aten.add_.Tensor", ("inout", "x", v), ("in", "x", v)))
    client.sync()
    hold(device, "s", None, paused=True)
    client.start(name, [1])
    client.ask(1, 4)
    hold(device, "s", "no credits")
    with pytest.raises(wis.error, match="no credits"):
        client.take(4)
    hold(device, "s", "")  # the session was also suspended, so it stays suspended
    client.ask(1, 4)
    assert device.call(lambda: device.loop.dispatch.treatment("s")[1])
    hold(device, "s", None, paused=False)
    assert client.take(4) == b"\x00\x00\x00\x40"


def test_held_session_frees_late_results_of_a_refused_run(device, wis):
    client = device.open("s")
    client.make(1, 1.0, 0.0)
    v = wis.at(DType.F32, 2)
    find = wis.body().call("aten.nonzero.default", ("in", "x", v), ("out", "y", None))
    name = client.define(find)
    client.sync()
    hold(device, "s", "no credits")
    client.start(name, [1, 7], reply=True)
    with pytest.raises(wis.error, match="no credits"):
        client.answer()
    hold(device, "s", "")
    client.sync()
    assert device.held()["s"][1] == 1
    client.start(name, [1, 7], reply=True)
    assert client.answer()["outputs"][0]["sizes"] == [1, 1]


def test_usage_tells_what_was_repeated_and_what_no_checkpoint_has():
    book = UsageBook()
    used = book.opened("a", "acme", "llama", Bears(), 0)
    used.part, used.epoch, used.repeating = 1, 3, True
    used.launched(10, 10, 10)
    used.decoded(5)
    used.repeating = False
    used.launched(7, 7, 20)
    found = taken(book, 20)["a"]
    assert (found.part, found.epoch, found.core_ns, found.repeated_ns, found.unsaved_ns) == (1, 3, 22, 15, None)
    before = used.mark()
    used.launched(4, 4, 30)
    used.saved(before)
    used.launched(2, 2, 40)
    found = taken(book, 40)["a"]
    assert (found.core_ns, found.repeated_ns, found.unsaved_ns) == (6, 0, 6)
    used.launched(1, 1, 50)
    assert taken(book, 50)["a"].unsaved_ns == 7


def test_usage_counts_a_launch_to_the_frames_before_those_that_follow_it():
    """Frames behind a launch are processed before its time is known."""
    book = UsageBook()
    used = book.opened("a", "acme", "llama", Bears(), 0)
    used.repeating = True
    used.launches()
    mark = used.mark()
    used.repeating = False
    used.launched(10, 10, 10)
    used.saved(mark)
    used.launches()
    used.launched(3, 3, 20)
    found = taken(book, 20)["a"]
    assert (found.core_ns, found.repeated_ns, found.unsaved_ns) == (13, 10, 3)
