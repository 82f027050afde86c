"""Tests of eviction and admission as pure functions."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wooly_executor.errors import AdmissionError
from wooly_executor.memory.swap import (
    GIB,
    MINUTE_NS,
    Commitment,
    Content,
    Move,
    Place,
    Policy,
    Resident,
    Room,
    admit,
    choose,
)
from wooly_testkit.effort import examples

NOW = 100 * MINUTE_NS
IDLE = NOW - 5 * MINUTE_NS
PLENTY = 1 << 50
POLICY = Policy()


def resident(session, *contents, priority=2, idle_since=IDLE, swappable=True, chosen=0):
    return Resident(session, priority, idle_since, contents, swappable, chosen)


def gibs(**sizes):
    """Contents by number: `_1=4` is content 1 with 4 GiB."""
    return {int(name[1:]): Content(n * GIB) for name, n in sizes.items()}


def leave(gib, residents, contents, free=0, host=PLENTY, disk=PLENTY, policy=POLICY, priority=0):
    return choose(gib * GIB, NOW, Room(free * GIB, host, disk), residents, contents, policy, priority=priority)


# -- preemption ------------------------------------------------------------------------------------------------------


def busy(session, *contents, priority=4, chosen=0, between=True):
    """A session with work, between two programs."""
    return Resident(session, priority, None, contents, True, chosen, between)


def preempt(gib, residents, contents, priority=0, free=0, policy=POLICY):
    room = Room(free * GIB, PLENTY, PLENTY)
    return choose(gib * GIB, NOW, room, residents, contents, policy, priority=priority, preempting=True)


def test_choose_preempts_lowest_class_between_programs_and_least_recent_victim():
    contents = gibs(_1=4, _2=4, _3=4, _4=4)
    sessions = [busy("p2", 1, priority=2), busy("p4", 2, chosen=7), busy("p4-new", 3), busy("p3", 4, priority=3)]
    assert preempt(4, sessions, contents).victims == ("p4-new",)
    assert preempt(15, sessions, contents).victims == ("p4-new", "p4", "p3", "p2")


def test_choose_preempts_no_session_before_those_that_are_idle():
    sessions = [busy("p4", 1), resident("idle", 2, priority=1), resident("p0", 3, priority=0)]
    assert preempt(4, sessions, gibs(_1=4, _2=4, _3=4)).victims == ("idle",)
    assert preempt(12, sessions, gibs(_1=4, _2=4, _3=4)).victims == ("idle", "p0", "p4")


@pytest.mark.parametrize(
    ("priority", "other", "may"), [(0, 1, True), (0, 0, False), (1, 2, True), (1, 1, False), (2, 4, False)]
)
def test_choose_preempts_only_lower_classes_for_p0_and_p1(priority, other, may):
    plan = preempt(4, [busy("b", 1, priority=other)], gibs(_1=4), priority=priority)
    assert (plan.victims == ("b",)) == may and bool(plan.short) != may


def test_choose_preempts_neither_during_a_program_nor_for_the_reserve_nor_unless_asked():
    contents = gibs(_1=4)
    assert preempt(4, [busy("b", 1, between=False)], contents).short
    assert leave(4, [busy("b", 1)], contents).short
    assert preempt(4, [busy("b", 1)], contents, free=4) == preempt(4, [], contents, free=4)


# -- the reserve -----------------------------------------------------------------------------------------------------


def test_choose_enough_free_memory_evicts_no_session():
    plan = leave(4, [resident("a", 1)], gibs(_1=8), free=6)
    assert plan.victims == () and plan.freed == plan.reserve_short == plan.short == 0


def test_choose_large_allocation_keeps_the_reserve():
    """5 GiB are free and 4 GiB are requested: they fit, but 2 GiB must stay free afterwards."""
    plan = leave(4, [resident("a", 1)], gibs(_1=8), free=5)
    assert plan.victims == ("a",)
    assert plan.moves == (Move(1, 8 * GIB, Place.HOST),)
    assert plan.freed == 8 * GIB


def test_choose_small_allocation_uses_the_reserve():
    """The reserve is for small allocations, so they evict no session until the reserve is used up."""
    contents = gibs(_1=8)
    assert choose(1 << 20, NOW, Room(1 << 20, PLENTY, PLENTY), [resident("a", 1)], contents, priority=2).victims == ()
    assert choose(1 << 20, NOW, Room(4096, PLENTY, PLENTY), [resident("a", 1)], contents, priority=2).victims == ("a",)


def test_choose_reserve_is_given_up_before_the_allocation():
    """All eligible sessions leave. 1 GiB of the reserve is still missing, but the allocation succeeds."""
    plan = leave(4, [resident("a", 1)], gibs(_1=3), free=2)
    assert plan.victims == ("a",) and plan.short == 0 and plan.reserve_short == GIB


def test_choose_impossible_allocation_evicts_no_session():
    """An eviction before a failing allocation would be useless."""
    plan = leave(40, [resident("a", 1)], gibs(_1=8), free=5)
    assert plan.victims == plan.moves == () and plan.short == 27 * GIB


# -- who is eligible, and in which order -----------------------------------------------------------------------------


def test_choose_busy_or_unswappable_session_is_no_victim():
    stay = [
        resident("busy", 1, idle_since=None),
        resident("lately busy", 2, idle_since=IDLE + 1),
        resident("fixed", 3, swappable=False),
    ]
    contents = gibs(_1=8, _2=8, _3=8, _4=8)
    assert leave(1, stay, contents).short == GIB
    assert leave(1, [*stay, resident("idle", 4)], contents).victims == ("idle",)


def test_choose_p0_is_the_last_victim():
    """The P0 session is idle for longest and was never a victim. Still the others are victims first, even twice."""
    residents = [
        resident("p0", 1, priority=0, idle_since=0),
        resident("p1", 2, priority=1, chosen=7),
        resident("p4", 3, priority=4),
    ]
    contents = gibs(_1=8, _2=8, _3=8)
    assert leave(4, residents, contents).victims == ("p4",)
    assert leave(10, residents, contents).victims == ("p4", "p1")
    assert leave(20, residents, contents).victims == ("p4", "p1", "p0")


@pytest.mark.parametrize("priority", [1, 2, 3, 4])
def test_choose_p0_is_no_victim_of_a_lower_class(priority):
    residents, contents = [resident("p0", 1, priority=0, idle_since=0), resident("p4", 2, priority=4)], gibs(_1=8, _2=8)
    assert leave(20, residents, contents, priority=priority).short == 12 * GIB
    assert leave(4, residents, contents, priority=priority).victims == ("p4",)
    assert leave(4, residents[:1], contents, priority=priority).victims == ()
    assert leave(4, residents[:1], contents, priority=0).victims == ("p0",)


def test_choose_every_eligible_session_is_a_victim_once_before_any_twice():
    """Three sessions take turns, and a new session is the next victim, however often the others were victims."""
    contents = gibs(_1=8, _2=8, _3=8, _4=8)
    chosen = {"a": 0, "b": 0, "c": 0}
    seen = []
    for number in range(1, 9):
        if number == 6:
            chosen["d"] = 0
        residents = [resident(name, i + 1, chosen=n) for i, (name, n) in enumerate(chosen.items())]
        (victim,) = leave(4, residents, contents).victims
        chosen[victim] = number
        seen.append(victim)
    assert "".join(seen) == "abcabdca"


def test_choose_equal_turns_evict_the_lowest_class_then_the_longest_idle():
    contents = gibs(_1=8, _2=8, _3=8)
    residents = [resident("a", 1, priority=2), resident("b", 2, priority=3), resident("c", 3, priority=3, idle_since=5)]
    assert leave(10, residents, contents).victims == ("c", "b")


# -- shared content --------------------------------------------------------------------------------------------------


def test_choose_session_with_only_shared_content_is_no_victim():
    """Ten LoRA sessions over one base: the idle session would free its adapter only. Without an adapter it is not evicted."""
    busy = [resident(f"busy{i}", 1, idle_since=None) for i in range(9)]
    contents = gibs(_1=14, _2=1, _3=8)
    assert leave(4, [resident("idle", 1), *busy, resident("other", 3)], contents).victims == ("other",)
    plan = leave(1, [resident("idle", 1, 2), *busy], contents)
    assert plan.victims == ("idle",) and plan.freed == GIB and plan.reserve_short == 2 * GIB


def test_choose_content_shared_by_two_victims_moves_once():
    plan = leave(10, [resident("a", 1), resident("b", 1)], gibs(_1=14))
    assert plan.victims == ("a", "b") and plan.freed == 14 * GIB
    assert plan.moves == (Move(1, 14 * GIB, Place.HOST),)


# -- where it goes ---------------------------------------------------------------------------------------------------


def test_choose_content_with_a_clean_copy_is_dropped():
    contents = gibs(_2=2) | {1: Content(14 * GIB, clean=True)}
    plan = leave(10, [resident("a", 1, 2)], contents, host=2 * GIB, disk=0)
    assert plan.moves == (Move(1, 14 * GIB, Place.NOWHERE), Move(2, 2 * GIB, Place.HOST))


def test_choose_fills_host_memory_then_disk_then_keeps_the_session():
    contents = gibs(_1=4, _2=4, _3=4)
    residents = [resident(name, i) for i, name in enumerate("abc", 1)]
    plan = leave(12, residents, contents, free=2, host=5 * GIB, disk=5 * GIB, policy=Policy(reserve=0))
    assert plan.short == 2 * GIB
    plan = leave(10, residents, contents, free=2, host=5 * GIB, disk=5 * GIB)
    assert plan.victims == ("a", "b") and plan.reserve_short == 2 * GIB
    assert [m.to for m in plan.moves] == [Place.HOST, Place.DISK]


def test_choose_session_without_space_elsewhere_is_skipped():
    plan = leave(1, [resident("big", 1), resident("small", 2)], gibs(_1=9, _2=3), host=4 * GIB, disk=0)
    assert plan.victims == ("small",)


# -- laws ------------------------------------------------------------------------------------------------------------


@st.composite
def situations(draw):
    """Up to eight sessions with up to ten contents. Numbers are small, so that many cases are at the limit."""
    n = draw(st.integers(1, 10))
    contents = {k: Content(draw(st.integers(0, 8)), draw(st.booleans())) for k in range(n)}
    residents = [
        Resident(
            f"s{i}",
            draw(st.integers(0, 4)),
            draw(st.integers(0, 20) | st.none()),
            tuple(draw(st.lists(st.integers(0, n - 1), max_size=4))),
            draw(st.booleans() | st.just(True)),
            draw(st.integers(0, 5)),
        )
        for i in range(draw(st.integers(0, 8)))
    ]
    room = Room(draw(st.integers(0, 10)), draw(st.integers(0, 20) | st.just(1000)), draw(st.integers(0, 20)))
    policy = Policy(reserve=draw(st.integers(0, 6)), large=draw(st.integers(0, 8)), idle_ns=draw(st.integers(0, 10)))
    return draw(st.integers(1, 30)), draw(st.integers(0, 25)), room, residents, contents, policy


PRIORITIES = st.integers(0, 4)


def freed_by(leaving, residents, contents):
    """Bytes of content that no remaining session holds, computed from the definition."""
    stays = {k for r in residents if r.session not in leaving for k in r.contents}
    return sum(contents[k].nbytes for k in {k for r in residents for k in r.contents} - stays)


@settings(max_examples=examples(40, 200))
@given(situations(), PRIORITIES)
def test_choose_any_situation_obeys_the_laws(situation, priority):
    nbytes, now, room, residents, contents, policy = situation
    plan = choose(*situation, priority=priority)
    by_name = {r.session: r for r in residents}
    victims = [by_name[name] for name in plan.victims]
    eligible = [
        r
        for r in residents
        if r.swappable
        and r.idle_since is not None
        and now - r.idle_since >= policy.idle_ns
        and (r.priority != 0 or priority == 0)
    ]
    wanted = nbytes + (policy.reserve if nbytes >= policy.large else 0) - room.device

    def freed(leaving):
        return freed_by({r.session for r in leaving}, residents, contents)

    # only eligible sessions leave, once each, and the plan's sum of freed bytes is exact
    assert len(set(plan.victims)) == len(victims) and all(r in eligible for r in victims)
    assert plan.freed == freed(victims) == sum(m.nbytes for m in plan.moves)
    # each victim frees bytes, and without the last victim the bytes would not suffice
    assert all(freed([v for v in victims if v is not r]) < plan.freed for r in victims)
    assert not victims or freed(victims[:-1]) < wanted
    # the reported shortage is exact
    if plan.short:
        assert not victims and room.device < nbytes
    else:
        assert room.device + plan.freed >= nbytes
        assert plan.reserve_short == max(0, wanted - plan.freed)
    # content moves once, within the budgets, and is dropped exactly if it has a clean copy
    assert len({m.content for m in plan.moves}) == len(plan.moves)
    for place, budget in ((Place.HOST, room.host), (Place.DISK, room.disk)):
        assert sum(m.nbytes for m in plan.moves if m.to is place) <= budget
    assert all((m.to is Place.NOWHERE) == contents[m.content].clean for m in plan.moves)
    if room.host < 1000:
        return
    # with unlimited space elsewhere, a useful victim is never skipped for a P0 session or for a more recent victim
    if plan.short or plan.reserve_short:
        assert plan.short == 0 or room.device + freed(eligible) < nbytes
        assert plan.short or freed(eligible) == plan.freed
    others = [r for r in eligible if r.priority]
    if any(r.priority == 0 for r in victims):
        assert freed(victims + others) == plan.freed
    for r in victims:
        earlier = [o for o in eligible if (o.priority == 0) == (r.priority == 0) and o.chosen < r.chosen]
        assert freed(victims + earlier) == plan.freed


@settings(max_examples=examples(40, 200))
@given(situations(), PRIORITIES, st.randoms())
def test_choose_order_of_the_list_does_not_change_the_plan(situation, priority, chance):
    nbytes, now, room, residents, contents, policy = situation
    shuffled = random.Random(chance.random()).sample(residents, len(residents))
    plan = choose(*situation, priority=priority)
    assert plan == choose(nbytes, now, room, shuffled, contents, policy, priority=priority)


@settings(max_examples=examples(25, 200))
@given(st.data())
def test_choose_any_history_gives_every_eligible_session_its_turn(data):
    """Random sessions. Between two evictions of one session, every other eligible session was evicted."""
    chosen, priority, order = {}, {}, []
    for number in range(1, 30):
        if not chosen or data.draw(st.integers(0, 5)) == 0:
            chosen[f"s{number}"], priority[f"s{number}"] = 0, data.draw(st.sampled_from([0, 1, 2]))
        idle = data.draw(st.sets(st.sampled_from(sorted(chosen)), min_size=1))
        names = sorted(chosen)
        residents = [
            Resident(s, priority[s], 0 if s in idle else None, (i,), True, chosen[s]) for i, s in enumerate(names)
        ]
        contents = {i: Content(1) for i in range(len(names))}
        plan = choose(1, 10, Room(0, 99, 99), residents, contents, Policy(0, 0, 5), priority=0)
        (victim,) = plan.victims
        group = {s for s in idle if (priority[s] == 0) == (priority[victim] == 0)}
        assert priority[victim] or all(priority[s] == 0 for s in idle)
        if victim in order:
            since = order[len(order) - order[::-1].index(victim) :]
            assert group - {victim} <= set(since)
        order.append(victim)
        chosen[victim] = number


# -- admission -------------------------------------------------------------------------------------------------------


def test_admit_unswappable_fits_in_physical_memory_or_is_refused_with_the_numbers():
    """80 GiB, overcommitted by half. An unswappable session has 60 GiB, so another unswappable one may have 20 GiB."""
    fixed = [Commitment("serve", 60 * GIB, swappable=False)]
    admit(Commitment("a", 20 * GIB, swappable=False), fixed, 80 * GIB, 50)
    with pytest.raises(
        AdmissionError, match=r"21\.00 GiB .*, but only 20\.00 GiB of 80\.00 GiB are left: 60\.00 GiB belong to "
    ):
        admit(Commitment("a", 21 * GIB, swappable=False), fixed, 80 * GIB, 50)


def test_admit_swappable_sessions_share_the_headroom():
    """20 percent means 120 % of the memory, for swappable sessions."""
    granted = [Commitment("a", 60 * GIB)]
    admit(Commitment("b", 36 * GIB), granted, 80 * GIB, 20)
    with pytest.raises(
        AdmissionError, match=r"60\.00 GiB of 96\.00 GiB are promised already \(80\.00 GiB overcommitted by 20 %\)"
    ):
        admit(Commitment("b", 37 * GIB), granted, 80 * GIB, 20)
    with pytest.raises(AdmissionError):
        admit(Commitment("b", 21 * GIB), granted, 80 * GIB, 0)


def test_admit_unswappable_gets_physical_memory_that_is_not_promised():
    granted = [Commitment("a", 30 * GIB), Commitment("b", 40 * GIB)]
    admit(Commitment("c", 10 * GIB, swappable=False), granted, 80 * GIB, 1000)
    with pytest.raises(AdmissionError, match=r"Allow the session to be swapped out, or ask for at most 10\.00 GiB"):
        admit(Commitment("c", 11 * GIB, swappable=False), granted, 80 * GIB, 1000)


@pytest.mark.parametrize("percent", [-1, 1001])
def test_admit_percentage_out_of_range_is_an_error(percent):
    with pytest.raises(ValueError, match="0 to 1000 percent"):
        admit(Commitment("a", 1), [], 10, percent)


@given(st.integers(1, 100), st.integers(0, 1000), st.lists(st.tuples(st.integers(0, 60), st.booleans()), max_size=20))
def test_admit_any_admitted_session_fits_with_all_unswappable_ones(capacity, percent, asked):
    granted = []
    for i, (nbytes, swappable) in enumerate(asked):
        commitment = Commitment(str(i), nbytes, swappable)
        try:
            admit(commitment, granted, capacity, percent)
        except AdmissionError:
            continue
        granted.append(commitment)
    fixed = sum(c.nbytes for c in granted if not c.swappable)
    assert all(fixed + c.nbytes <= capacity for c in granted if c.swappable) and fixed <= capacity
    assert sum(c.nbytes for c in granted) * 100 <= capacity * (100 + percent)
