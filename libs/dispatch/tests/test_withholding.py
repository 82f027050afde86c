"""Time that is withheld from P2, P3 and P4 before the next program of a P0 or P1 session."""

import pytest
from wooly_dispatch.decisions import LaunchDecision, WithholdDecision
from wooly_dispatch.events import (
    Config,
    ConfigChangedEvent,
    ExclusiveBegunEvent,
    Policy,
    PolicyChangedEvent,
    SessionClosedEvent,
    SessionSuspendedEvent,
    SwappedOutEvent,
    WithheldEvent,
)
from wooly_dispatch.rhythm import KEPT, LONGEST_NS, Rhythm
from wooly_testkit.dispatch import Rig, rhythm_beside_work

US = 1_000
MS = 1_000_000


def rig_with(share=250, longest=2 * MS):
    rig = Rig()
    rig.now = 1_000 * MS  # the right to withhold time is earned first
    rig.send(
        ConfigChangedEvent(
            0, Config(max_flights=1, stoppable=True, piece_ns=4 * MS, withheld_permille=share, withheld_ns=longest)
        )
    )
    rig.open("front", 0)
    rig.open("behind", 4)
    return rig


def steps(rig, count=8, pause=700 * US, name="front", took=50 * US):
    """A session computes in a rhythm. Other sessions have no work."""
    for _ in range(count):
        rig.submit(name, took)
        rig.finish(took)
        rig.now += pause
    rig.now -= pause


def launched(decisions):
    return [(d.session, d.first, d.last) for d in decisions if isinstance(d, LaunchDecision)]


def proven(rig, *kernels, name="behind"):
    """A session has run the kernels as estimated, so more than one of its kernels may be in one launch."""
    rig.submit(name, *kernels)
    rig.drain()


# -- the decision ------------------------------------------------------------------------------------------------------


def test_piece_longer_than_the_pause_waits_for_the_next_program_of_p0():
    rig = rig_with()
    proven(rig, MS)
    steps(rig)
    (withheld,) = rig.submit("behind", MS)
    assert isinstance(withheld, WithholdDecision) and 700 * US <= withheld.until - rig.now <= 2 * MS
    rig.now += 650 * US
    assert launched(rig.submit("front", 50 * US)) == [("front", 0, 1)]
    assert rig.state.withheld_until == 0
    assert rig.metrics.withheld_ns == 650 * US and rig.metrics.unjust_ns == 0


def test_piece_shorter_than_the_pause_is_launched():
    rig = rig_with()
    proven(rig, 400 * US)
    steps(rig)
    assert launched(rig.submit("behind", 400 * US)) == [("behind", 0, 1)]


def test_launch_is_cut_to_the_kernels_that_fit_before_the_next_program():
    rig = rig_with()
    proven(rig, *[200 * US] * 4)
    steps(rig)
    assert launched(rig.submit("behind", *[200 * US] * 9)) == [("behind", 0, 3)]
    rig.finish()
    assert rig.state.withheld_until == 0  # a kernel of 200 us is not longer than half a window
    assert [(d.first, d.last) for d in rig.in_flight] == [(3, 4)]


def test_wall_time_of_pieces_counts_not_the_time_of_the_device():
    rig = rig_with()
    for _ in range(8):  # 400 us of the device take 1 ms
        rig.submit("behind", 400 * US)
        rig.now += 600 * US
        rig.finish(400 * US)
    steps(rig)
    (withheld,) = rig.submit("behind", 400 * US)
    assert isinstance(withheld, WithholdDecision)


def test_time_over_without_a_program_lets_the_piece_run():
    rig = rig_with()
    proven(rig, MS)
    steps(rig)
    rig.submit("behind", MS)
    until = rig.state.withheld_until
    assert rig.send(WithheldEvent(until - 1)) == []
    rig.now = until
    assert launched(rig.send(WithheldEvent(until))) == [("behind", 0, 1)]
    assert not rig.send(WithheldEvent(until))


def test_program_that_is_far_away_does_not_hold_up_a_long_piece():
    rig = rig_with()
    proven(rig, 20 * MS)
    steps(rig, pause=10 * MS)
    assert launched(rig.submit("behind", 20 * MS)) == [("behind", 0, 1)]


def test_two_kinds_of_pauses_leave_room_between_them():
    """A client that sends two programs in each step: the piece fits into the second pause."""
    rig = rig_with()
    proven(rig, MS)
    for _ in range(8):
        steps(rig, 1)
        rig.now += 100 * US
        steps(rig, 1)
        rig.now += 1_500 * US
    steps(rig, 1)
    rig.submit("behind", MS)
    assert 100 * US <= rig.state.withheld_until - rig.now <= 150 * US
    assert launched(rig.wait()) == [("behind", 0, 1)]


@pytest.mark.parametrize("priority", [1, 0])
def test_protected_classes_are_not_held_up(priority):
    rig = rig_with()
    rig.open("other", priority)
    proven(rig, MS, name="other")
    steps(rig)
    assert launched(rig.submit("other", MS)) == [("other", 0, 1)]


def test_nothing_is_withheld_without_a_rhythm():
    rig = rig_with()
    proven(rig, MS)
    steps(rig, 3)  # too few pauses
    assert launched(rig.submit("behind", MS)) == [("behind", 0, 1)]


@pytest.mark.parametrize(
    "end",
    [
        lambda rig: SessionClosedEvent(rig.now, "front"),
        lambda rig: SessionSuspendedEvent(rig.now, "front"),
        lambda rig: SwappedOutEvent(rig.now, "front"),
        lambda rig: PolicyChangedEvent(rig.now, "front", Policy(2)),
        lambda rig: ExclusiveBegunEvent(rig.now, "behind"),
        lambda rig: ConfigChangedEvent(rig.now, Config(max_flights=1, stoppable=True)),
    ],
    ids=["closed", "suspended", "swapped out", "other class", "exclusive", "switched off"],
)
def test_withholding_ends_with_its_reason(end):
    rig = rig_with()
    proven(rig, MS)
    steps(rig)
    rig.submit("behind", MS)
    assert rig.state.withheld_until
    assert launched(rig.send(end(rig))) == [("behind", 0, 1)]


def test_session_that_rises_to_p0_begins_without_a_rhythm():
    rig = rig_with()
    proven(rig, MS)
    steps(rig)
    rig.send(PolicyChangedEvent(rig.now, "front", Policy(2)))
    rig.now += 100 * MS
    rig.send(PolicyChangedEvent(rig.now, "front", Policy(0)))
    assert launched(rig.submit("behind", MS)) == [("behind", 0, 1)]


def test_without_p0_or_without_a_share_nothing_changes():
    for share, priority in ((250, 2), (0, 0)):
        rig = Rig(config=Config(max_flights=1, stoppable=True, withheld_permille=share))
        rig.open("front", priority)
        rig.open("behind", 4)
        proven(rig, MS)
        steps(rig)
        assert not rig.state.guarded
        assert launched(rig.submit("behind", MS)) == [("behind", 0, 1)]


def test_share_and_flights_are_checked():
    with pytest.raises(ValueError, match="withheld_permille must be 0 to 1000"):
        Config(max_flights=1, withheld_permille=1001)
    with pytest.raises(ValueError, match="max_flights must be 1"):
        Config(withheld_permille=250)


# -- the share ---------------------------------------------------------------------------------------------------------


def test_p0_in_a_rhythm_is_not_delayed_and_p4_keeps_its_share_of_the_time():
    wall, pause, piece = 4_000 * MS, 400 * US, MS  # pauses of 400 us, pieces of 1 ms
    without, with_it, all_of_it = (rig_with(share) for share in (0, 250, 1000))
    ran, done = rhythm_beside_work(without, wall, pause, piece)
    assert done < wall // MS  # each step waits for the rest of a piece
    ran, more = rhythm_beside_work(with_it, wall, pause, piece)
    assert more > done * 5 // 4
    withheld = with_it.metrics.withheld_ns
    assert wall * 20 // 100 < withheld <= (wall + 1_000 * MS) * 25 // 100
    assert ran > (wall - withheld) // 2
    ran, most = rhythm_beside_work(all_of_it, wall, pause, piece)
    assert most > wall // (pause + 100 * US) * 95 // 100  # nearly as many as without P4


def test_time_is_saved_for_a_second_at_most():
    rig = rig_with(share=100)
    rig.now += 100_000 * MS
    assert rig.state.withheld_tokens <= 100 * MS
    rhythm_beside_work(rig, 1_000 * MS, 400 * US, MS)
    assert rig.metrics.withheld_ns <= 200 * MS


# -- the rhythm --------------------------------------------------------------------------------------------------------


def paused(*pauses):
    rhythm = Rhythm(0)
    for pause in pauses:
        rhythm.rested = 0
        rhythm.ended(pause, pause)
    rhythm.rested = 0
    return rhythm


def test_rhythm_remembers_the_last_pauses_and_no_long_ones():
    rhythm = paused(*range(1, KEPT + 3), LONGEST_NS + 1)
    assert rhythm.pauses == list(range(3, KEPT + 3))
    assert paused(7, 5, 6, 8).ordered == [5, 6, 7, 8]


def test_pause_that_ended_during_a_launch_counts_to_the_middle_of_the_launch():
    rhythm = Rhythm(100)
    rhythm.ended(500, 300)
    assert rhythm.pauses == [300] and rhythm.rested == -1


def test_next_program_is_expected_by_the_pauses_that_were_longer():
    rhythm = paused(10, 20, 30, 40)
    assert [rhythm.next(now) for now in (0, 9, 10, 35, 40, 99)] == [10, 1, 10, 5, -1, -1]
    assert paused(10, 20, 30).next(0) == -1


def test_program_has_probably_arrived_after_pauses_without_room_between_them():
    rhythm = paused(100, 120, 140, 1000)
    assert rhythm.over(0, 200, 10_000) == 175  # the next pause leaves room for 200
    assert rhythm.over(0, 900, 10_000) == 1250
    assert rhythm.over(500, 900, 10_000) == 750


def test_nothing_is_waited_for_that_probably_comes_later():
    rhythm = paused(100, 700, 800, 900)
    assert rhythm.over(0, 2_000, 500) == 0
    assert rhythm.over(0, 2_000, 700) == 700
