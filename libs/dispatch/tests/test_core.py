"""Single steps of the rule: each test feeds events and compares the exact list of decisions."""

import ast
from pathlib import Path

import pytest
import wooly_dispatch
from wooly_dispatch.core import ALONE, should_stop, step
from wooly_dispatch.decisions import DemoteDecision, LaunchDecision, RefuseDecision, SwapInDecision
from wooly_dispatch.events import (
    Config,
    EpochEndedEvent,
    ExclusiveBegunEvent,
    ExclusiveEndedEvent,
    LaunchDoneEvent,
    Policy,
    PolicyChangedEvent,
    ProgramSubmittedEvent,
    SessionClosedEvent,
    SessionOpenedEvent,
    SessionResumedEvent,
    SessionSuspendedEvent,
    SwappedInEvent,
    SwappedOutEvent,
)
from wooly_dispatch.state import DispatchState, restore, snapshot
from wooly_dispatch.windows import WIDTH, adapted, windows
from wooly_testkit.dispatch import Rig

US = 1_000
MS = 1_000_000


def proven(rig, *names):
    """Measure one launch of each session, so that the core trusts its estimates."""
    for name in names:
        rig.submit(name, 10 * US)
        rig.finish()


def test_submit_to_an_idle_device_launches_at_once():
    state = DispatchState()
    step(state, SessionOpenedEvent(0, "a"))
    _, decisions = step(state, ProgramSubmittedEvent(5, "a", 1, (10 * US,)))
    assert decisions == [LaunchDecision(1, "a", 1, 0, 1, 2, 10 * US)]


def test_long_program_is_split_at_kernel_edges_into_pieces():
    rig = Rig()
    rig.open("a")
    proven(rig, "a")
    decisions = rig.submit("a", *(200 * US,) * 4, 900 * US, *(100 * US,) * 2)
    assert [(d.first, d.last, d.estimate_ns) for d in decisions] == [
        (0, 2, 400 * US),
        (2, 4, 400 * US),
        (4, 5, 900 * US),  # longer than a piece, so it runs alone
        (5, 7, 200 * US),
    ]


def test_full_window_blocks_lower_classes_too():
    rig = Rig(config=Config(free_window_ns=MS, piece_ns=MS))
    rig.open("a", 2)
    rig.open("b", 3)
    proven(rig, "a", "b")
    assert len(rig.submit("a", *(400 * US,) * 4)) == 2
    assert rig.submit("b", 100 * US) == []
    launch = rig.finish()
    assert launch.session == "a" and rig.in_flight[-1].session == "a"


def test_open_p0_session_narrows_the_windows_of_lower_classes():
    rig = Rig()
    assert rig.state.windows == (4 * MS,) * 5
    rig.open("front", 0, service_ns=20 * MS)
    assert rig.state.windows == (4 * MS, *(500 * US,) * 4)
    rig.open("second", 1, service_ns=4 * MS)
    assert rig.state.windows == (4 * MS, 500 * US, 100 * US, 100 * US, 100 * US)
    rig.send(SessionSuspendedEvent(0, "front"))
    assert rig.state.windows == (4 * MS, 4 * MS, 100 * US, 100 * US, 100 * US)
    rig.send(SessionClosedEvent(0, "second"))
    assert rig.state.windows == (4 * MS,) * 5


@pytest.mark.parametrize(
    ("service", "window"), [(0, 500 * US), (1, 40 * US), (MS, 40 * US), (8 * MS, 200 * US), (100 * MS, MS)]
)
def test_window_is_a_bounded_share_of_the_service_time(service, window):
    assert windows(Config(), [(0, service)], WIDTH)[4] == window


@pytest.mark.parametrize(
    ("slowdown", "idle", "width"),
    [(1051, 0, 500), (1050, 500, 1000), (1019, 51, 1125), (1019, 50, 1000), (1020, 500, 1000), (0, 900, 1000)],
)
def test_epoch_adapts_the_width(slowdown, idle, width):
    assert adapted(Config(), 1000, slowdown, idle) == width


def test_epoch_with_slow_p0_halves_the_windows():
    rig = Rig()
    rig.open("front", 0, service_ns=20 * MS)
    rig.send(EpochEndedEvent(0, 1200, 0))
    assert rig.state.windows[4] == 250 * US
    rig.send(SessionClosedEvent(0, "front"))
    rig.open("other", 0, service_ns=20 * MS)
    assert rig.state.windows[4] == 500 * US  # the smaller service time of one session does not affect the next session


def test_ties_are_resolved_by_session_id():
    for names in ("abc", "cba", "bca"):
        rig = Rig()
        rig.open("z")
        rig.submit("z", 10 * MS)  # occupies the device
        for name in names:
            rig.open(name)
            rig.submit(name, 100 * US)
        rig.finish()
        assert [d.session for d in rig.in_flight] == ["a", "b", "c"]


def test_swapped_out_head_asks_once_and_is_skipped():
    rig = Rig()
    rig.open("away", 2, resident=False)
    rig.open("here", 3)
    assert rig.submit("away", 100 * US) == [SwapInDecision("away")]
    assert rig.submit("away", 100 * US) == []
    assert [d.session for d in rig.submit("here", 100 * US)] == ["here"]
    assert [d.session for d in rig.send(SwappedInEvent(0, "away"))] == ["away"]
    assert rig.send(SwappedOutEvent(0, "away")) == [SwapInDecision("away")]  # the session has more to run


def test_swapped_out_low_class_does_not_ask_before_its_turn():
    rig = Rig()
    rig.open("busy", 2)
    rig.open("away", 4, resident=False)
    rig.submit("busy", 5 * MS, 5 * MS)
    assert rig.submit("away", 100 * US) == []
    rig.finish()
    rig.finish()
    assert SwapInDecision("away") in rig.entries[-2][1] + rig.entries[-1][1]


def test_suspended_session_keeps_its_queue_and_runs_when_resumed():
    rig = Rig()
    rig.open("a")
    rig.send(SessionSuspendedEvent(0, "a"))
    assert rig.submit("a", 100 * US) == []
    assert [d.session for d in rig.send(SessionResumedEvent(0, "a"))] == ["a"]


def test_exclusive_session_runs_alone_until_it_ends_or_closes():
    rig = Rig()
    rig.open("a", 4)
    rig.open("b", 0)
    rig.send(ExclusiveBegunEvent(0, "a"))
    assert rig.submit("b", 100 * US) == []
    assert len(rig.submit("a", 100 * US)) == 1
    (refused,) = rig.send(ExclusiveBegunEvent(0, "b"))
    assert refused == RefuseDecision("a has the device to itself")
    rig.finish()
    assert [d.session for d in rig.send(ExclusiveEndedEvent(0))] == ["b"]
    rig.finish()
    rig.send(ExclusiveBegunEvent(0, "a"))
    rig.submit("b", 100 * US)
    assert [d.session for d in rig.send(SessionClosedEvent(0, "a"))] == ["b"]


def test_p0_beyond_its_bucket_runs_as_p2_until_the_bucket_refills():
    rig = Rig()
    rig.open("front", 0, rate_permille=500, burst_ns=2 * MS)
    assert rig.submit("front", 2 * MS)[0].priority == 0
    assert rig.submit("front", MS)[0] == DemoteDecision("front", 2)
    rig.finish()
    assert rig.in_flight[0].priority == 2
    rig.finish()
    rig.now += 2 * MS
    assert rig.submit("front", MS)[0].priority == 0


def test_p0_with_low_estimates_pays_the_measured_time():
    rig = Rig()
    rig.open("front", 0, rate_permille=100, burst_ns=MS)
    rig.submit("front", 100 * US)
    rig.finish(5 * MS)
    assert rig.state.sessions["front"].tokens < 0
    assert rig.submit("front", 100 * US)[0] == DemoteDecision("front", 2)


POLICING = Config(undeclared_permille=200, service_ns=2 * MS)
"""Policing of undeclared P0 and P1: 20 % of the device, and two requests of 2 ms at once."""


def test_undeclared_p0_beyond_the_shared_bucket_runs_as_p2_until_it_refills():
    rig = Rig(config=POLICING)
    rig.open("front", 0)
    assert rig.submit("front", 4 * MS)[0].priority == 0
    assert rig.submit("front", MS)[0] == DemoteDecision("front", 2)
    rig.finish()
    assert rig.in_flight[0].priority == 2
    rig.finish()
    rig.now += 5 * MS
    assert rig.submit("front", MS)[0].priority == 0, "5 ms earn 1 ms"


def test_undeclared_sessions_share_one_bucket():
    rig = Rig(config=POLICING)
    rig.open("a", 0)
    rig.open("b", 1)
    assert rig.submit("a", 4 * MS)[0].priority == 0
    assert rig.submit("b", MS)[0] == DemoteDecision("b", 1)
    rig.open("c", 0)
    assert rig.submit("c", MS)[0] == DemoteDecision("c", 1), "opening another session brings no tokens"


def test_shared_bucket_earns_nothing_while_the_host_is_busy():
    rig = Rig(config=POLICING)
    rig.open("front", 0)
    rig.open("behind", 2)
    rig.submit("front", 4 * MS)
    rig.finish()
    rig.submit("behind", MS)
    rig.now += 100 * MS  # the launch is in flight, but the host gives the device's thread no core
    assert rig.submit("front", MS)[0] == DemoteDecision("front", 2), "4 ms of work earned 0.8 ms"
    rig.finish()
    rig.now += MS  # the device is idle
    rig.finish()
    rig.now += 5 * MS
    assert rig.submit("front", MS)[0].priority == 0


def test_declared_p0_does_not_use_the_shared_bucket():
    rig = Rig(config=POLICING)
    rig.open("front", 0, rate_permille=500, burst_ns=8 * MS)
    rig.open("silent", 0)
    assert rig.submit("front", 8 * MS)[0].priority == 0
    rig.finish()
    assert rig.submit("silent", 4 * MS)[0].priority == 0


def test_undeclared_p0_pays_the_measured_time_even_after_it_closed():
    rig = Rig(config=POLICING)
    rig.open("front", 0)
    rig.submit("front", US)
    rig.send(SessionClosedEvent(rig.now, "front"))
    rig.finish(20 * MS)
    assert rig.state.tokens < 0
    rig.open("front", 0)
    assert rig.submit("front", US)[0] == DemoteDecision("front", 1)


def test_undeclared_share_zero_runs_all_undeclared_work_as_p2():
    rig = Rig(config=Config(undeclared_permille=0))
    rig.open("front", 0)
    assert rig.submit("front", US)[0] == DemoteDecision("front", 1)


def test_queued_programs_pay_when_their_session_rises_to_p0():
    rig = Rig(config=POLICING)
    rig.open("other", 2)
    rig.submit("other", 4 * MS)
    rig.open("front", 3)
    for _ in range(6):
        rig.submit("front", MS)
    decisions = rig.send(PolicyChangedEvent(rig.now, "front", Policy(0)))
    assert [d for d in decisions if isinstance(d, DemoteDecision)] == [
        DemoteDecision("front", 5),
        DemoteDecision("front", 6),
    ]
    for _ in range(7):
        rig.finish()
    assert not rig.in_flight


def test_snapshot_with_policed_launch_in_flight_is_restored():
    rig = Rig(config=POLICING)
    rig.open("front", 0)
    rig.submit("front", MS)
    data = snapshot(rig.state)
    assert rig.state.tokens == 3 * MS and snapshot(restore(data)) == data


def test_launch_of_a_closed_session_still_counts_in_the_window():
    rig = Rig()
    rig.open("a")
    rig.submit("a", MS)
    rig.send(SessionClosedEvent(0, "a"))
    assert rig.state.in_flight_ns == MS
    rig.open("a")  # a new session with the same name: the old launch does not belong to it
    rig.finish(3 * MS)
    assert rig.state.in_flight_ns == 0 and rig.state.sessions["a"].finish == [0] * 5


@pytest.mark.parametrize("order", [[1, 2, 3, 4], [4, 3, 2, 1], [2, 2, 1, 1, 4, 3, 1], [3, 1, 3, 2, 4, 4]])
def test_duplicated_and_reordered_submissions_run_once_in_order(order):
    rig = Rig()
    rig.open("a")
    for program in order:
        rig.send(ProgramSubmittedEvent(0, "a", program, (100 * US * program,)))
    assert [d.program for d in rig.drain()] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (ProgramSubmittedEvent(0, "none", 1, (5,)), "session none is not open"),
        (ProgramSubmittedEvent(0, "a", 1, ()), "has no kernels"),
        (ProgramSubmittedEvent(0, "a", 1, (5, -1)), "negative estimates"),
        (ProgramSubmittedEvent(0, "a", 0, (5,)), "came before"),
        (SessionOpenedEvent(0, "a"), "session a is open already"),
        (SessionOpenedEvent(0, ""), "the session id must not be empty"),
        (SessionClosedEvent(0, "none"), "session none is not open"),
        (SwappedInEvent(0, "none"), "session none is not open"),
        (ExclusiveBegunEvent(0, "none"), "session none is not open"),
        (LaunchDoneEvent(0, 7, 5), "launch 7 is not in flight"),
    ],
)
def test_invalid_event_is_refused(event, reason):
    rig = Rig()
    rig.open("a")
    (refused,) = rig.send(event)
    assert isinstance(refused, RefuseDecision) and reason in refused.reason


def test_max_flights_one_runs_pieces_one_by_one():
    rig = Rig(config=Config(max_flights=1))
    rig.open("front", 0, service_ns=20 * MS)
    rig.open("behind", 4)
    proven(rig, "behind")
    assert [(d.first, d.last) for d in rig.submit("behind", *(50 * US,) * 20)] == [(0, 5)]
    assert rig.submit("front", 100 * US) == []
    assert rig.finish().session == "behind"
    assert [d.session for d in rig.in_flight] == ["front"]


@pytest.mark.parametrize("values", [{"priority": 5}, {"priority": -1}, {"weight": 0}, {"burst_ns": -1}])
def test_policy_out_of_range_raises_value_error(values):
    with pytest.raises(ValueError):
        Policy(**values)


def test_heap_keeps_no_more_stale_entries_than_its_bound():
    rig = Rig(books=False)
    for name in "abcdef":
        rig.open(name)
        for _ in range(400):
            rig.submit(name, *(100 * US,) * 5)
    for _ in range(1500):
        rig.finish(rig.in_flight[0].estimate_ns * 9 // 10)
        assert all(len(lane.heap) <= 4 * lane.size + 65 for lane in rig.state.lanes)


def test_core_has_no_floats():
    """The core uses integers only: no module has a float literal or a true division."""
    root = Path(wooly_dispatch.__file__).parent
    for path in root.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.Constant) and isinstance(node.value, float)), f"{path.name}:{node.lineno}"
            assert not isinstance(node, ast.Div), path.name


STOPPABLE = Config(max_flights=1, stoppable=True, piece_ns=2 * MS)


def test_stopped_kernels_run_next_after_the_higher_class():
    rig = Rig(config=STOPPABLE)
    rig.open("front", 0, service_ns=5 * MS)
    rig.open("behind", 4)
    proven(rig, "behind")
    (launch,) = rig.submit("behind", *(100 * US,) * 20)
    assert (launch.first, launch.last) == (0, 20)  # longer than the window, because the launch can be stopped
    rig.submit("behind", 30 * US)
    assert not should_stop(rig.state)
    rig.submit("front", 300 * US)
    assert should_stop(rig.state)
    rig.finish(350 * US, last=3)
    assert [(d.session, d.first, d.last) for d in rig.in_flight] == [("front", 0, 1)]
    assert not should_stop(rig.state)
    rig.finish()
    assert [(d.session, d.program, d.first, d.last) for d in rig.drain()] == [("behind", 2, 3, 20), ("behind", 3, 0, 1)]
    assert rig.metrics.meters["behind"].run_ns == rig.run_ns["behind"]


def test_launch_of_the_only_session_is_several_pieces_long():
    rig = Rig(config=STOPPABLE)
    rig.open("a")
    proven(rig, "a")
    rig.submit("a", 100 * US)
    rig.finish(400 * US)  # the estimates are too small by a factor of four
    (launch,) = rig.submit("a", *(500 * US,) * 20)
    assert (launch.first, launch.last) == (0, 4 * ALONE)
    rig.finish()
    assert [(d.first, d.last) for d in rig.drain()] == [(4 * ALONE, 20)]


def test_long_launch_is_stopped_for_a_session_of_the_same_class():
    rig = Rig(config=STOPPABLE)
    rig.open("a", 3)
    proven(rig, "a")
    (launch,) = rig.submit("a", *(500 * US,) * 40)
    rig.submit("a", *(500 * US,) * 4)
    rig.open("b", 3)
    rig.open("below", 4)
    rig.submit("below", 50 * MS)  # more than P4's floor allows in this time
    assert launch.last == 4 * ALONE and not should_stop(
        rig.state
    )  # only the session's own class and a lower class wait
    rig.submit("b", *(500 * US,) * 8)
    assert should_stop(rig.state)
    rig.finish(3 * MS, last=6)
    assert not should_stop(rig.state)
    turns = [(d.session, d.last - d.first) for d in rig.drain()]
    assert {n for _, n in turns} <= {1, 2, 3, 4} and "b" in [session for session, _ in turns[:2]]
    assert rig.metrics.unjust_ns == 0


def test_launch_of_one_piece_is_not_stopped_for_the_same_class():
    rig = Rig(config=STOPPABLE)
    for name in ("a", "b"):
        rig.open(name, 3)
        proven(rig, name)
    (launch,) = rig.submit("a", *(500 * US,) * 4)
    rig.submit("b", 500 * US)
    assert launch.last == 4 and not should_stop(rig.state)


def test_stopped_launch_is_charged_for_its_measured_time():
    """Two sessions of equal weight get equal shares, even if one of them is stopped at every launch."""
    rig = Rig(config=STOPPABLE)
    rig.open("front", 0, service_ns=5 * MS)
    for name in ("a", "b"):
        rig.open(name, 3)
        proven(rig, name)
    for name in ("a", "b") * 40:
        rig.submit(name, *(100 * US,) * 20)
    begun = dict(rig.run_ns)
    for _ in range(120):
        launch = rig.in_flight[0]
        if launch.session == "a" and launch.last - launch.first > 4:
            rig.submit("front", 20 * US)
            rig.finish(400 * US, last=launch.first + 4)
        else:
            rig.finish()
    a, b = (rig.run_ns[name] - begun[name] for name in ("a", "b"))
    assert abs(a - b) <= 2 * MS


def test_stopped_launch_of_a_closed_or_suspended_session_is_not_requeued():
    rig = Rig(config=STOPPABLE)
    for name in ("closed", "suspended"):
        rig.open(name, 3)
        proven(rig, name)
    rig.submit("closed", *(100 * US,) * 10)
    rig.send(SessionClosedEvent(rig.now, "closed"))
    rig.finish(last=2)
    rig.submit("suspended", *(100 * US,) * 10)
    rig.send(SessionSuspendedEvent(rig.now, "suspended"))
    rig.finish(200 * US, last=2)
    assert not rig.in_flight
    (again,) = rig.send(SessionResumedEvent(rig.now, "suspended"))
    assert (again.first, again.last) == (2, 10)


@pytest.mark.parametrize("last", [0, 11, -2])
def test_done_event_outside_of_the_launch_is_refused(last):
    rig = Rig(config=STOPPABLE)
    rig.open("a")
    proven(rig, "a")
    rig.submit("a", *(100 * US,) * 10)
    (refused,) = rig.send(LaunchDoneEvent(rig.now, rig.in_flight[0].launch, 5, last=last))
    assert "kernels 0 to 9" in refused.reason


def test_stop_on_a_device_that_is_not_stoppable_is_refused():
    rig = Rig(config=Config(max_flights=1))
    rig.open("a")
    proven(rig, "a")
    rig.submit("a", *(100 * US,) * 3)
    (refused,) = rig.send(LaunchDoneEvent(rig.now, rig.in_flight[0].launch, 5, last=1))
    assert "are not stopped" in refused.reason
    with pytest.raises(ValueError, match="max_flights must be 1"):
        Config(stoppable=True)
