"""Tests of the device loop with the dispatch core: order of sessions, interruption of programs, completeness of the journal."""

import itertools
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wooly_dispatch.decisions import LaunchDecision, WithholdDecision
from wooly_dispatch.events import LaunchDoneEvent, WithheldEvent
from wooly_executor import estimates
from wooly_executor.dispatch import Dispatch
from wooly_executor.errors import SteeringError, UnknownSessionError
from wooly_executor.estimates import Estimate, turns
from wooly_executor.runtime.protocol import Rates
from wooly_executor.runtime.torch_cpu import TorchCpuRuntime
from wooly_wis.dtypes import DType

WAIT_S = 30
STEP_NS = 100_000


class PacedExecution:
    """Reports `step_ns` for each instruction, and waits before it until the test releases the device."""

    def __init__(self, runtime, inner, prepared, label):
        self.runtime, self.inner, self.label = runtime, inner, label
        self.at, self.size = 0, len(prepared.program.body)
        self.outcome, self.host_bound, self.unchecked = inner.outcome, (), False

    def advance(self, edges, ahead_ns=0):
        self.runtime.arrived.set()
        assert self.runtime.going.wait(WAIT_S)
        self.inner.advance(edges)
        times = []
        for edge in edges:
            end = min(edge, self.size)
            times.append((end - self.at) * self.runtime.step_ns)
            self.at = end
        self.runtime.ran.append((self.label, sum(times)))
        return times


class PacedRuntime(TorchCpuRuntime):
    """The CPU runtime with a fake clock and a gate before the device. `ran`: (first buffer, ns) per piece."""

    def __init__(self, step_ns=STEP_NS):
        super().__init__()
        self.step_ns = step_ns
        self.ran = []
        self.going, self.arrived = threading.Event(), threading.Event()
        self.going.set()

    def rates(self):
        return Rates(bytes_per_us=1 << 40, flops_per_us=1 << 40, launch_ns=self.step_ns)

    def begin(self, prepared, buffers, bindings, params):
        return PacedExecution(self, super().begin(prepared, buffers, bindings, params), prepared, bindings[0])

    def hold(self):
        self.ran.clear()
        self.arrived.clear()
        self.going.clear()

    def release(self):
        time.sleep(0.005)  # longer than the loop's interval between two polls
        self.going.set()


@pytest.fixture
def runtime():
    return PacedRuntime()


@pytest.fixture
def paced(make_device, runtime):
    return make_device(runtime=runtime)


@pytest.fixture
def adds(wis):
    """A program of `n` additions to x."""
    v = wis.at(DType.F32, 4)

    def make(n):
        body = wis.body()
        for _ in range(n):
            body.call("aten.add_.Tensor", ("inout", "x", v), ("in", "x", v))
        return body

    return make


def opened(device, adds, *, length=1, **sessions):
    """Clients by name with a program of `length` additions; their buffers 100, 101, … hold ones."""
    found = {}
    for label, (name, priority) in enumerate(sessions.items(), 100):
        policy = {"priority": priority} if isinstance(priority, int) else priority
        client = device.open(name, **policy)
        client.make(label, 1, 1, 1, 1)
        client.label, client.program = label, client.define(adds(length))
        client.start(client.program, [label])  # one measured run, so that pieces may have several kernels
        client.sync()
        found[name] = client
    return found.values()


def occupy(runtime, client):
    """Make the device busy with a program of this client."""
    runtime.hold()
    client.start(client.program, [client.label])
    assert runtime.arrived.wait(WAIT_S)


def test_dispatch_waiting_frames_run_by_class_then_in_order(paced, runtime, adds):
    clients = opened(paced, adds, p4=4, p2=2, p0=0, p1=1)
    p4, p2, p0, p1 = clients
    occupy(runtime, p4)
    for client in clients:
        for _ in range(2):
            client.start(client.program, [client.label])
    runtime.release()
    for client in clients:
        client.sync()
        assert client.floats(client.label, 4) == [16.0 if client is p4 else 8.0] * 4
    labels = [label for label, _ in runtime.ran]
    assert labels == [p4.label, *[p0.label] * 2, *[p1.label] * 2, *[p2.label] * 2, *[p4.label] * 2]


def test_dispatch_long_program_is_interrupted_by_a_higher_class(paced, runtime, adds):
    low, high = opened(paced, adds, low=4, high=0)
    low.program = low.define(adds(20))
    occupy(runtime, low)
    high.start(high.program, [high.label])
    runtime.release()
    low.sync(), high.sync()
    labels = [label for label, _ in runtime.ran]
    assert labels[:2] == [low.label, high.label] and set(labels[2:]) == {low.label}
    assert (
        max(ns for label, ns in runtime.ran) <= 250_000
    )  # half of the window next to a P0 session with unknown service time
    assert low.floats(low.label, 4) == [2.0**21] * 4


def test_dispatch_frequent_program_is_still_interrupted(make_device, adds):
    paced = make_device(runtime=(runtime := PacedRuntime(40_000)))
    low, high = opened(paced, adds, low=4, high=0)
    low.program = low.define(adds(20))
    for _ in range(estimates.SETTLED + 8):
        low.start(low.program, [low.label])
    low.sync()
    (ready,) = paced.call(
        lambda: [p for s in paced.loop.sessions.all() for p in s.programs.all() if len(p.prepared.steps) > 20]
    )
    deadline = time.monotonic() + 30
    while not paced.call(lambda: ready.prepared.places):  # a decoder's thread combines the steps
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert ready.estimate.cut.edges == (6, 12, 18, 20) and ready.prepared.places == [0, 6, 12, 18, 19]
    occupy(runtime, low)
    high.start(high.program, [high.label])
    runtime.release()
    low.sync(), high.sync()
    assert [label for label, _ in runtime.ran][:2] == [low.label, high.label]


def test_dispatch_equal_sessions_share_by_measured_time(paced, runtime, adds):
    long, short, _ = opened(paced, adds, long=3, short=3, p1=1)
    long.program = long.define(adds(10))
    occupy(runtime, long)
    for _ in range(20):
        long.start(long.program, [long.label])
    for _ in range(200):
        short.start(short.program, [short.label])
    runtime.release()
    long.sync(), short.sync()
    got = {long.label: 0, short.label: 0}
    for label, ns in runtime.ran[1:]:
        got[label] += ns
        if got[short.label] >= 180 * STEP_NS:
            break
        assert abs(got[long.label] - got[short.label]) <= 4 * 250_000


def test_dispatch_weighted_sessions_share_by_weight(paced, runtime, adds):
    heavy, light = opened(paced, adds, heavy={"priority": 3, "weight": 3}, light={"priority": 3, "weight": 1})
    occupy(runtime, light)
    for client in (heavy, light):
        for _ in range(120):
            client.start(client.program, [client.label])
    runtime.release()
    heavy.sync(), light.sync()
    first = [label for label, _ in runtime.ran[1:121]]
    assert abs(first.count(heavy.label) - 90) <= 2


def test_dispatch_failure_in_a_later_piece_names_the_instruction_and_poisons_its_results(paced, runtime, wis, adds):
    low, high = opened(paced, adds, low=4, high=0)
    v = wis.at(DType.F32, 4)
    body = adds(5)
    for name in "yz":
        body.alloc(name, 16)
    body.call("aten.neg.default", ("in", "x", v), ("out", "y", v))
    body.call("aten.mm.default", ("in", "y", v), ("in", "y", v), ("out", "z", v)).fill("x", v, 0.0)
    program, low.program = low.define(body), low.program
    runtime.hold()
    low.start(program, [low.label, 2, 3])
    assert runtime.arrived.wait(WAIT_S)
    high.start(high.program, [high.label])
    runtime.release()
    with pytest.raises(wis.error, match=r"must be a matrix|2D") as caught:
        low.sync()
    assert caught.value.instruction == 8
    assert low.floats(2, 4) == [-64.0] * 4
    for lost in (low.label, 3):
        with pytest.raises(wis.error, match=caught.value.message[:20]):
            low.read(lost, 16)
    high.sync()
    assert high.floats(high.label, 4) == [4.0] * 4
    assert [label for label, _ in runtime.ran][1] == high.label


@pytest.mark.parametrize("end", ["disconnect", "control"])
def test_dispatch_session_closed_during_a_program_leaves_nothing(paced, runtime, adds, end):
    going, other = opened(paced, adds, going=4, other=2)
    going.program = going.define(adds(20))
    occupy(runtime, going)
    going.start(going.program, [going.label])
    if end == "disconnect":
        going.channel.close()
        closing = None
    else:
        closing = paced.loop.call(lambda: paced.loop.sessions.close("going", "enough"))
    other.start(other.program, [other.label])
    runtime.release()
    other.sync()
    paced.wait_closed("going")
    assert closing is None or closing.result(WAIT_S)
    assert other.floats(other.label, 4) == [4.0] * 4 and paced.held() == {"other": (16, 1)}
    assert sum(ns for label, ns in runtime.ran if label == going.label) < 20 * STEP_NS


class Gate(list):
    """A list of pieces that holds the device when it has `size` of them."""

    def __init__(self, runtime, size):
        super().__init__()
        self.runtime, self.size, self.reached = runtime, size, threading.Event()

    def append(self, piece):
        super().append(piece)
        if len(self) == self.size:
            self.runtime.arrived.clear()
            self.runtime.going.clear()
            self.reached.set()


def launches_of(device):
    entries = device.call(lambda: list(device.entries))
    return [d for _, decisions in entries for d in decisions if isinstance(d, LaunchDecision)]


def test_dispatch_frames_that_arrive_together_are_one_launch(paced, runtime, adds):
    (only,) = opened(paced, adds, only=2)
    before = len(launches_of(paced))
    occupy(runtime, only)
    for _ in range(10):
        only.start(only.program, [only.label])
    runtime.release()
    only.sync()
    assert only.floats(only.label, 4) == [2.0**12] * 4
    assert [ns for _, ns in runtime.ran] == [STEP_NS] * 11
    assert [d.last - d.first for d in launches_of(paced)[before:]] == [1, 10]


@pytest.mark.parametrize("priority", [0, 4])
def test_dispatch_launch_of_several_frames_stops_between_them_when_another_session_comes(
    paced, runtime, adds, priority
):
    going, other = opened(paced, adds, going=4, other=priority)
    occupy(runtime, going)
    for _ in range(9):
        going.start(going.program, [going.label])
    runtime.ran = gate = Gate(runtime, 4)
    runtime.release()
    assert gate.reached.wait(WAIT_S) and runtime.arrived.wait(WAIT_S)  # in the middle of the launch
    other.start(other.program, [other.label])
    runtime.release()
    going.sync(), other.sync()
    assert going.floats(going.label, 4) == [2.0**11] * 4 and other.floats(other.label, 4) == [4.0] * 4
    assert [label for label, _ in runtime.ran] == [*[going.label] * 5, other.label, *[going.label] * 5]


def test_dispatch_device_stays_idle_before_the_next_program_of_p0_and_goes_on_without_it(make_device, adds):
    paced = make_device(runtime=PacedRuntime(2_000_000))
    low, high = opened(paced, adds, low=4, high=0)
    deadline, rounds = time.monotonic() + WAIT_S, 0

    def found(kind):
        return [x for event, decisions in list(paced.entries) for x in (event, *decisions) if isinstance(x, kind)]

    while not found(WithholdDecision):
        assert time.monotonic() < deadline
        for _ in range(6):  # a rhythm
            high.start(high.program, [high.label])
            high.sync()
            time.sleep(0.0002)
        high.start(high.program, [high.label])
        high.sync()
        low.start(low.program, [low.label])
        low.sync()  # the next program of P0 does not come
        rounds += 1
    assert found(WithheldEvent)
    assert low.floats(low.label, 4) == [2.0 ** (rounds + 1)] * 4
    assert paced.loop.dispatch.state.withheld_until == 0
    # the fixture replays the journal and checks its laws


def test_dispatch_nothing_is_withheld_if_the_share_is_0():
    assert Dispatch(withheld_permille=0).state.config.withheld_permille == 0
    assert Dispatch().state.config.withheld_permille == 250


def test_dispatch_suspended_session_keeps_its_frames(paced, runtime, adds):
    a, b = opened(paced, adds, a=2, b=2)
    paced.steer("a", suspended=True)
    a.start(a.program, [a.label])
    b.start(b.program, [b.label])
    b.sync()
    assert paced.call(lambda: runtime.ran[-1][0]) == b.label
    paced.steer("a")
    assert a.sync() == {} and a.floats(a.label, 4) == [4.0] * 4


def test_dispatch_exclusive_session_runs_alone(paced, runtime, adds):
    a, b = opened(paced, adds, a=4, b=0)
    paced.steer("a", exclusive=True)
    runtime.ran.clear()
    b.start(b.program, [b.label])
    a.start(a.program, [a.label])
    a.sync()
    with pytest.raises(SteeringError, match="session a has exclusive use of the device"):
        paced.steer("b", exclusive=True)
    paced.steer("a")
    b.sync()
    assert [label for label, _ in runtime.ran] == [a.label, b.label]


def test_dispatch_unknown_session_cannot_be_steered(paced):
    with pytest.raises(UnknownSessionError):
        paced.steer("nobody", suspended=True)


def test_dispatch_suspended_session_answers_a_sync_after_its_runs(paced, adds):
    (a,) = opened(paced, adds, a=2)
    paced.steer("a", suspended=True)
    assert a.sync() == {}  # no frame waits before the sync
    a.start(a.program, [a.label])
    a.ask(a.label, 16)
    paced.steer("a")
    assert a.take(16) == b"\0\0\x80\x40" * 4


def test_dispatch_launch_time_is_the_runtimes_measurement(paced, runtime, adds):
    (a,) = opened(paced, adds, a=2)
    a.program = a.define(adds(7))
    a.start(a.program, [a.label])
    a.sync()
    entries = paced.call(lambda: list(paced.entries))
    launches = [d for _, decisions in entries for d in decisions if isinstance(d, LaunchDecision)]
    took = {event.launch: event.gpu_ns for event, _ in entries if isinstance(event, LaunchDoneEvent)}
    pieces = [d for d in launches if d.program == launches[-1].program]
    assert [took[d.launch] for d in pieces] == [(d.last - d.first) * STEP_NS for d in pieces]
    assert pieces[0].first == 0 and pieces[-1].last == 7


def test_dispatch_new_journal_begins_with_open_sessions_and_queued_frames(paced, runtime, adds, wis):
    low, high, idle = opened(paced, adds, low=4, high=1, idle=3)
    low.program = low.define(adds(20))
    paced.steer("idle", suspended=True)
    occupy(runtime, low)
    for client in (low, high, idle):
        client.start(client.program, [client.label])
    before = paced.entries
    begun = paced.loop.call(paced.loop.dispatch.begin_journal)
    runtime.release()
    paced.entries = begun.result(WAIT_S)
    paced.steer("idle")
    for client in (low, high, idle):
        client.sync()
    assert low.floats(low.label, 4) == [2.0**41] * 4
    assert high.floats(high.label, 4) == idle.floats(idle.label, 4) == [4.0] * 4
    wis.replay(before)
    launches = [d for _, decisions in paced.entries for d in decisions if isinstance(d, LaunchDecision)]
    ends = {e.launch: e.last for e, _ in paced.entries if isinstance(e, LaunchDoneEvent) and e.last >= 0}
    done = sum(ends.get(d.launch, d.last) - d.first for d in launches if d.session == "low")
    assert done in (38, 39)  # all kernels except those of the earlier piece
    # the fixture `paced` replays the second journal at its end


def test_dispatch_fifo_runs_frames_in_order_of_arrival(make_device, runtime, adds, monkeypatch):
    device = make_device(runtime=runtime, dispatch=Dispatch(fifo=True))
    p4, p0 = opened(device, adds, p4=4, p0=0)
    occupy(runtime, p4)
    for _ in range(3):
        p4.start(p4.program, [p4.label])
    p0.start(p0.program, [p0.label])
    runtime.release()
    p4.sync()
    p0.sync()
    assert [label for label, _ in runtime.ran] == [*[p4.label] * 4, p0.label]
    with pytest.raises(SteeringError, match="in order of arrival"):
        device.steer("p0", suspended=True)


# -- estimates -------------------------------------------------------------------------------------------------------


def estimate(adds, *form_ns, n=10):
    return Estimate(adds(n).program, form_ns)


def test_estimate_close_edges_are_merged_and_a_long_instruction_stays_alone(adds):
    assert estimate(adds, 20_000).cut[:2] == ((2, 4, 6, 8, 10), (40_000,) * 5)
    assert estimate(adds, 70_000, n=3).cut[:2] == ((1, 2, 3), (70_000,) * 3)
    assert estimate(adds, 0).cut[:2] == ((10,), (1000,))
    assert len(estimate(adds, 60_000, n=3000).cut.edges) <= estimates.EDGES + 1


def test_estimate_is_the_same_object_until_measurements_differ(adds):
    found = estimate(adds, 20_000, n=2)
    cut = found.cut
    for _ in range(3):
        assert not found.observe(cut, 0, [41_000])
    assert found.cut.kernels is cut.kernels
    found.observe(cut, 0, [90_000])
    assert found.cut.edges is cut.edges and found.cut.kernels == (90_000,)


def test_estimate_wrong_at_first_moves_its_edges_until_it_settles(adds):
    found = estimate(adds, 1_000)
    cut = found.cut
    assert cut.edges == (10,)
    assert found.observe(cut, 0, [1_000_000]) and found.cut.edges == tuple(range(1, 11))
    assert not found.observe(cut, 0, [5])  # a run submitted with the old edges is ignored
    for _ in range(estimates.SETTLED - 1):
        cut = found.cut
        found.observe(cut, 0, [100_000] * len(cut.edges))
    assert found.cut.edges == (2, 4, 6, 8, 10) and found.cut.kernels == (200_000,) * 5
    for _ in range(100):
        assert not found.observe(found.cut, 0, [10_000] * 5)
    assert found.cut.kernels == (10_000,) * 5


def test_estimate_edges_follow_the_device_and_not_a_slow_host(adds):
    rates = Rates(1, 1, launch_ns=30_000, edge_ns=100_000, segment_ns=100_000, own_ns=3_000)
    found = Estimate(adds(20).program, [30_000], rates=rates)
    # 20 instructions of 3 us on the device: one part, although the host needs 600 us for them
    assert found.cut[:2] == ((20,), (600_000,))
    for _ in range(estimates.SETTLED):
        found.observe(found.cut, 0, [900_000], [True])
    assert found.cut[:2] == ((20,), (900_000,))
    slow = Estimate(adds(20).program, [30_000], rates=rates)
    assert slow.observe(slow.cut, 0, [900_000], [False])  # the device itself needs 45 us for each
    assert slow.cut.edges == tuple(range(2, 21, 2))
    for _ in range(estimates.SETTLED):
        parts = [15_000 * (end - begin) for begin, end in itertools.pairwise((0, *slow.cut.edges))]
        slow.observe(slow.cut, 0, parts, [True] * len(parts))
    # the host is the limit with 15 us for each, so the device needs at most so much
    assert slow.cut.edges == (6, 12, 18, 20)


@given(
    kernels=st.lists(st.integers(1_000, 3_000_000), min_size=1, max_size=40),
    ends=st.tuples(st.integers(0, 39), st.integers(1, 40)),
    longest=st.integers(1, 4_000_000),
)
def test_turns_last_at_most_the_limit_or_one_kernel(kernels, ends, longest):
    last = min(ends[1], len(kernels))
    first = min(ends[0], last - 1)
    found = turns(tuple(kernels), first, last, longest)
    begins = (first, *found)
    assert found[-1] == last and list(begins) == sorted(set(begins))
    for begin, end in zip(begins, found, strict=False):
        assert end - begin == 1 or sum(kernels[begin:end]) <= longest


def test_turns_are_kept_with_their_estimate_alone_and_few_of_them(adds):
    cut = estimate(adds, 20_000).cut
    holders = sys.getrefcount(cut.kernels)
    for longest in range(1_000, 200_000, 1_000):
        assert cut.turns(0, 5, longest) == cut.ends[0, 5, longest] == turns(cut.kernels, 0, 5, longest)
    left = sys.getrefcount(cut.kernels)
    assert len(cut.ends) <= estimates.ENDS_KEPT and left == holders


def test_turns_small_changes_of_estimates_move_no_turn():
    assert turns((100,) * 22, 0, 22, 2_300) == (22,)
    assert turns((100,) * 22, 0, 22, 2_000) == turns((90, 110) * 11, 0, 22, 1_900) == (11, 22)
    assert turns((100,) * 22, 11, 22, 2_000) == (22,)
    assert turns((5_000, 10, 10, 10), 0, 4, 100) == (1, 4)


def test_estimate_is_the_95th_percentile_of_late_measurements(adds):
    found = estimate(adds, 20_000, n=1)
    for i in range(160):
        found.observe(found.cut, 0, [100_000 if i % 32 < 3 else 30_000])
    assert found.cut.kernels == (100_000,)
    for i in range(160):
        found.observe(found.cut, 0, [100_000 if i % 32 < 1 else 30_000])
    assert found.cut.kernels == (30_000,)
