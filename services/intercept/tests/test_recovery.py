"""What is kept of a session so that it can go on in another executor, and when it asks for a cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wooly.recovery import AUTO_BYTES, CUT_BYTES, ERROR, KEPT_BYTES, MAX_RECOVERIES, PROGRAMS_KEPT, Recovery
from wooly_wis.codec import digest
from wooly_wis.frames import Kind

TAKEN = {"taken": 0, "stored": 0, "held": 0, "pause_ns": 0, "store_ns": 0, "error": ""}


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def recovery(clock):
    return Recovery(lambda why, cut, leaves: None, lambda cut, why: None, every_s=10.0, clock=clock)


def keep(recovery, *payloads):
    return [recovery.keep(Kind.WRITE, (payload,)) for payload in payloads]


def answer(recovery, **more):
    recovery.answer = None
    recovery.taken(TAKEN | more)


def test_a_cut_is_due_after_some_time_or_many_bytes(recovery, clock):
    keep(recovery, b"x")
    assert not recovery.due
    clock.now += 10
    assert recovery.due
    clock.now -= 10
    keep(recovery, bytes(CUT_BYTES))
    assert recovery.due


def test_a_session_that_does_nothing_needs_no_cut(recovery, clock):
    clock.now += 1000
    assert not recovery.due


def test_a_stored_cut_ends_the_need_for_the_frames_before_it(recovery):
    keep(recovery, b"one", b"two")
    assert recovery.begin() == 1
    keep(recovery, b"three")
    answer(recovery, taken=1)
    assert [f.payload for f in recovery.frames] == [b"one", b"two", b"", b"three"]  # taken, not stored
    assert recovery.begin() == 0  # asks again, and takes no other cut meanwhile
    answer(recovery, taken=1, stored=1)
    assert [f.payload for f in recovery.frames] == [b"three"]
    assert (recovery.nbytes, recovery.stored) == (5, 1)


def test_cuts_that_cost_much_are_rare(recovery, clock):
    keep(recovery, b"x")
    recovery.begin()
    answer(recovery, taken=1, stored=1, pause_ns=1_000_000_000, store_ns=3_000_000_000)
    keep(recovery, b"y")
    clock.now += 199
    assert not recovery.due
    clock.now += 2
    assert recovery.due


def test_a_large_session_is_given_up_unless_it_is_wanted(recovery):
    keep(recovery, b"x")
    recovery.begin()
    answer(recovery, taken=1, stored=1, held=AUTO_BYTES + 1)
    assert "WOOLYAI_RECOVERY is not `on`" in recovery.given_up
    wanted = Recovery(lambda why, cut, leaves: None, lambda cut, why: None, always=True)
    keep(wanted, b"x")
    wanted.begin()
    answer(wanted, taken=1, stored=1, held=AUTO_BYTES + 1)
    assert not wanted.given_up


def test_an_executor_that_stores_nothing_is_enough_for_short_sessions(clock):
    recovery = Recovery(lambda why, cut, leaves: None, lambda cut, why: None, always=True, clock=clock)
    keep(recovery, b"x")
    recovery.begin()
    answer(recovery, error="this executor stores no checkpoints", never=True)
    clock.now += 1000
    assert not recovery.due and not recovery.given_up
    keep(recovery, bytes(KEPT_BYTES))
    assert recovery.given_up == "this executor stores no checkpoints"


def test_a_cut_that_could_not_be_stored_is_followed_by_another(recovery, clock):
    keep(recovery, b"x")
    assert recovery.begin() == 1
    answer(recovery, taken=1, error="the disk is almost full")
    assert not recovery.due and not recovery.given_up
    clock.now += 10
    assert recovery.due and recovery.begin() == 2
    answer(recovery, taken=2, stored=2)
    assert recovery.stored == 2 and not recovery.frames


def test_an_error_that_a_cut_reported_is_not_reported_again(recovery):
    keep(recovery, b"x")
    recovery.begin()
    recovery.failed()
    assert [(f.kind, f.answer) for f in recovery.frames][-1] == (Kind.SYNC, ERROR)


def test_a_session_that_is_lost_again_and_again_ends(recovery, clock):
    assert all(recovery.begun(progress=False) for _ in range(MAX_RECOVERIES))
    assert not recovery.begun(progress=False)
    assert all(recovery.begun(progress=True) for _ in range(2 * MAX_RECOVERIES))
    assert all(recovery.begun(progress=False) for _ in range(MAX_RECOVERIES - 1))
    assert not recovery.begun(progress=False)
    clock.now += 61
    assert recovery.begun(progress=False)


def test_programs_are_kept_while_a_kept_run_names_them(recovery):
    raws = [b"program %d" % i for i in range(PROGRAMS_KEPT + 10)]
    for raw in raws:
        recovery.define(raw)
        recovery.keep(Kind.RUN, (digest(raw) + bytes(16),))
    defined = recovery.newest_programs()
    assert list(defined.values()) == raws[10:]
    runs = list(recovery.frames)
    assert recovery.undefined(runs[0], defined) == raws[0]
    assert recovery.undefined(runs[0], defined) == b""
    recovery.begin()
    answer(recovery, taken=1, stored=1)
    assert list(recovery.programs.values()) == raws[10:]


@given(st.lists(st.sampled_from(["keep", "cut", "stored", "failed", "recovered"]), max_size=40))
def test_all_frames_since_the_stored_cut_are_kept_in_order(steps):
    recovery, sent, cuts, n = Recovery(lambda why, cut, leaves: None, lambda cut, why: None, every_s=0.0), [], {0: 0}, 0
    for step in steps:
        if step == "keep":
            n += 1
            keep(recovery, str(n).encode())
            sent.append(str(n).encode())
        elif step == "cut":
            if number := recovery.begin():
                cuts[number] = len(sent)
            answer(recovery, taken=recovery.number, stored=recovery.stored)
        elif step == "stored":
            answer(recovery, taken=recovery.number, stored=recovery.number)
        elif step == "failed":
            recovery.failed()
        else:
            recovery._recent.clear()
            recovery.begun(progress=False)
        assert [f.payload for f in recovery.frames if f.kind == Kind.WRITE] == sent[cuts[recovery.stored] :]
        assert recovery.nbytes == sum(len(p) for p in sent[cuts[recovery.stored] :])
