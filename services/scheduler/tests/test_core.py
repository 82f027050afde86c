"""The scheduler's pure core: admission, epochs, follower, book of sessions."""

from hypothesis import given, settings
from hypothesis import strategies as st
from wooly_dispatch.events import (
    Config,
    ConfigChangedEvent,
    EpochEndedEvent,
    Policy,
    SessionClosedEvent,
    SessionOpenedEvent,
)
from wooly_dispatch.invariants import Auditor
from wooly_dispatch.journal import Batch, Journal
from wooly_dispatch.policing import declared
from wooly_scheduler.checkpoint import decode_follower, encode_follower
from wooly_scheduler.core.admission import Demand, admit, response_ns
from wooly_scheduler.core.book import PENDING_S, Book
from wooly_scheduler.core.epochs import decide, slowdown_permille
from wooly_scheduler.core.follower import MAX_EARLY, Follower
from wooly_testkit.dispatch import Rig, rhythm_beside_work
from wooly_testkit.effort import examples

MS = 1_000_000
CONFIG = Config()


def demand(name, priority=0, service=10 * MS, objective=0, interval=100 * MS, weight=1, longest=0, tenant="acme"):
    return Demand(name, tenant, declared(priority, weight, service, objective, interval), longest)


# -- admission -------------------------------------------------------------------------------------------------------


def test_declared_bucket_exists_for_p0_and_p1_only():
    policy = declared(0, 3, 10 * MS, 20 * MS, 100 * MS)
    assert (policy.rate_permille, policy.burst_ns, policy.weight, policy.objective_ns) == (110, 20 * MS, 3, 20 * MS)
    assert declared(0, 1, 10 * MS, 0, 0).rate_permille == 0
    assert declared(2, 1, 10 * MS, 20 * MS, 100 * MS).rate_permille == 0
    assert declared(0, 1, 10 * MS, 0, 1).rate_permille == 1000


def test_admit_single_session_unless_objective_is_below_service_time():
    assert admit(demand("a", objective=11 * MS), []).admitted
    verdict = admit(demand("a", objective=9 * MS), [])
    # 10 ms of its own, and a window of 2.5 % of that with an overrun of a tenth
    assert verdict.missed_by_ns == 10 * MS + 275_000 - 9 * MS
    assert verdict.reason == "P0 session a (acme) would answer in 10.3 ms, 1.27 ms beyond its objective of 9 ms"


def test_admit_second_session_is_refused_with_the_miss_of_the_first():
    first = demand("a", objective=12 * MS)
    verdict = admit(demand("b", service=5 * MS), [first])
    assert [m.demand.session for m in verdict.misses] == ["a"] and verdict.missed_by_ns > 0
    assert "P0 session a (acme) would answer in" in verdict.reason and "objective of 12 ms" in verdict.reason
    assert admit(demand("b", priority=1, service=5 * MS), [first]).admitted, "a lower class is held to its window"
    assert admit(demand("b", priority=4, service=0, interval=0), [first]).admitted


def test_admit_candidate_that_would_be_late_is_refused_with_its_own_miss():
    verdict = admit(demand("b", priority=1, service=5 * MS, objective=20 * MS), [demand("a")])
    assert [m.demand.session for m in verdict.misses] == ["b"]
    assert admit(demand("b", priority=1, service=5 * MS, objective=40 * MS), [demand("a")]).admitted


def test_admit_undeclared_session_is_refused_with_the_variables_to_set():
    low = demand("low", priority=1, objective=90 * MS)
    verdict = admit(Demand("high", "acme", Policy(0)), [low])
    assert not verdict.admitted and "declares no service time and interval" in verdict.reason
    assert "WOOLYAI_INTERVAL_MS" in verdict.reason and verdict.missed_by_ns == 0
    assert admit(Demand("peer", "acme", Policy(2)), [low]).admitted


def test_admit_undeclared_sessions_count_as_one_bucket():
    """The shared bucket is 20 % of the device and 40 ms at once: the 10 ms of `low` need at most (10 + 40 + blocking) / 0.8."""
    policing, low = Config(undeclared_permille=200), demand("low", priority=1, objective=90 * MS)
    one, two = Demand("high", "acme", Policy(0)), Demand("higher", "acme", Policy(0))
    assert admit(one, [low], policing).admitted
    assert admit(two, [low, one], policing).admitted
    tight = demand("tight", priority=1, objective=40 * MS)
    assert not admit(one, [tight], policing).admitted and admit(tight, [], policing).admitted


def test_admit_tight_objective_is_refused_beside_a_long_kernel():
    background = Demand("train", "acme", Policy(4), longest_ns=30 * MS)
    verdict = admit(demand("a", objective=15 * MS), [background])
    assert verdict.missed_by_ns == 30 * MS + 10 * MS - 15 * MS
    assert admit(demand("a", objective=40 * MS), [background]).admitted


def test_admit_ignores_misses_that_the_candidate_does_not_increase():
    late = demand("late", objective=5 * MS)
    assert admit(Demand("train", "acme", Policy(4)), [late]).admitted
    assert not admit(demand("b", service=2 * MS), [late]).admitted


def test_admit_ignores_suspended_sessions_and_the_candidates_former_self():
    other = Demand("b", "acme", declared(0, 1, 50 * MS, 0, 100 * MS), suspended=True)
    me = demand("a", objective=12 * MS)
    assert admit(me, [other]).admitted
    assert admit(me, [demand("a", service=90 * MS)]).admitted


def test_admit_overload_is_refused_without_a_response_time():
    crowd = [demand(f"h{i}", service=40 * MS) for i in range(3)]
    verdict = admit(demand("z", priority=1, objective=900 * MS), crowd)
    assert not verdict.admitted and "% of the device" in verdict.reason


SESSIONS = st.lists(
    st.tuples(st.integers(0, 1), st.integers(1, 4), st.integers(1, 8), st.integers(10, 120)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=examples(30, 60))
@given(SESSIONS, st.integers(0, 3), st.randoms(use_true_random=False))
def test_response_bound_holds_in_the_core_for_declared_sessions(sessions, background, chance):
    """Periodic P0 and P1 sessions beside saturating P4 sessions, in virtual time: no response exceeds its bound."""
    everybody = [
        demand(f"s{i}", priority, service * MS, 1, interval * MS, weight, longest=250_000)
        for i, (priority, weight, service, interval) in enumerate(sessions)
    ]
    lower = [Demand(f"bg{i}", "acme", Policy(4), longest_ns=200_000) for i in range(background)]
    bounds = {d.session: response_ns(d, [*everybody, *lower], CONFIG) for d in everybody}
    rig = Rig(books=False)
    for d in everybody:
        rig.send(SessionOpenedEvent(0, d.session, d.policy, d.tenant))
    for i in range(background):
        rig.open(f"bg{i}", 4)
        for _ in range(3):
            rig.submit(f"bg{i}", *[200_000] * 100)
    phases = [chance.randrange(interval * MS) for _, _, _, interval in sessions]
    arrivals = sorted(
        (phases[i] + k * interval * MS, f"s{i}", service)
        for i, (_, _, service, interval) in enumerate(sessions)
        for k in range(4)
    )
    came, worst = {}, dict.fromkeys(bounds, 0)
    while arrivals or rig.in_flight:
        ends = rig.now + rig.in_flight[0].estimate_ns if rig.in_flight else None
        if arrivals and (ends is None or arrivals[0][0] <= ends):
            at, name, service = arrivals.pop(0)
            running_since, rig.now = rig.now, max(at, rig.now)
            rig.submit(name, *[250_000] * (service * 4))
            came[name, rig.submitted[name]] = at, service * 4
            if ends is not None:  # kernels in flight continue
                rig.now = running_since
        else:
            done = rig.finish()
            at, kernels = came.get((done.session, done.program), (0, 0))
            if done.last == kernels:
                worst[done.session] = max(worst[done.session], rig.now - at)
    for d in everybody:
        bound = bounds[d.session]
        assert bound is None or 0 < worst[d.session] <= bound, d


# -- the follower ----------------------------------------------------------------------------------------------------


def recorded(name="gpu-0/1", programs=20, **session):
    """A rig, and the batches of its journal with 7 entries each."""
    rig = Rig()
    rig.open("p0", 0, objective_ns=MS, **session)
    rig.open("bg", 4)
    for _ in range(programs):
        rig.submit("bg", 300_000, 200_000)
        rig.submit("p0", 400_000)
        rig.drain()
    return rig, batches(rig.entries, name)


def batches(entries, name="gpu-0/1", size=7):
    journal, found = Journal(name), []
    for at in range(0, len(entries), size):
        for event, decisions in entries[at : at + size]:
            journal.record(event, decisions)
        found.append(journal.cut())
    return found


def fed(follower, *items):
    return [v for b in items for v in follower.feed(b.encode() if isinstance(b, Batch) else b) if v is not None]


def figures(follower):
    m = follower.meters
    return (
        follower.journal,
        follower.entries,
        m.wall_ns,
        m.executing_ns,
        m.starving_ns,
        m.run_ns,
        {k: (v.run_ns, v.programs, v.unjust_ns, v.responses.buckets) for k, v in m.meters.items()},
        m.recent(),
        {k: (v.best_ns, v.recent.buckets) for k, v in m.paces.items()},
        dict(follower.counts),
    )


def test_follower_meters_match_the_rig():
    rig, found = recorded()
    follower = Follower("gpu-0")
    assert fed(follower, *found) == [] and not follower.lost
    assert follower.entries == len(rig.entries) and follower.meters.run_ns == rig.metrics.run_ns
    assert follower.meters.starving_ns == rig.metrics.starving_ns and follower.meters.unjust_ns == 0


def test_time_before_the_first_entry_does_not_count():
    rig = Rig()
    rig.now = 10**15
    rig.open("a")
    rig.submit("a", 5 * MS)
    rig.drain()
    follower = Follower("gpu-0")
    fed(follower, *batches(rig.entries))
    assert (follower.meters.wall_ns, follower.meters.utilization_permille) == (5 * MS, 1000)


def test_repeated_and_reordered_batches_change_nothing():
    _, found = recorded()
    straight, shuffled = Follower("gpu-0"), Follower("gpu-0")
    fed(straight, *found)
    assert fed(shuffled, found[0], found[2], found[1], found[1], *reversed(found[3:])) == []
    assert figures(shuffled) == figures(straight)


def test_follower_missing_batch_is_a_gap_until_the_next_journal():
    _, found = recorded()
    follower = Follower("gpu-0")
    assert fed(follower, found[0], *found[2:]) == []
    assert follower.waiting and follower.give_up() and not follower.give_up()
    assert follower.gaps == 1 and "entry 8 is next" in follower.lost
    assert fed(follower, found[1]) == [] and follower.entries == 7, "lost is lost"
    rig, second = recorded("gpu-0/2")
    assert fed(follower, *second) == [] and not follower.lost and follower.entries == len(rig.entries)
    assert fed(follower, found[3]) == [] and follower.journal == "gpu-0/2"


def test_follower_gives_up_a_gap_after_max_early_batches():
    rig, _ = recorded(programs=40)
    found = batches(rig.entries, size=2)
    follower = Follower("gpu-0")
    assert fed(follower, *found[1 : MAX_EARLY + 3]) == []
    assert follower.lost and follower.gaps == 1


def test_follower_corrupt_bytes_are_a_violation_and_the_journal_continues():
    _, found = recorded()
    follower = Follower("gpu-0")
    seen = fed(follower, found[0], b"\xff\x00nonsense", Batch("other/1", 1, 1, "0", "0", b"x\n"), *found[1:])
    assert [v.law for v in seen] == ["bytes", "name"] and not follower.lost
    assert follower.counts == {"bytes": 1, "name": 1} and follower.last.law == "name"


def test_follower_changed_entry_is_a_violation_with_its_number():
    _, found = recorded()
    bad = found[1]
    lines = bad.lines()
    at = next(i for i, line in enumerate(lines) if b"400000" in line)
    lines[at] = lines[at].replace(b"400000", b"400001")
    follower = Follower("gpu-0")
    forged = Batch(bad.journal, bad.first, bad.last, bad.previous, bad.digest, b"\n".join(lines) + b"\n")
    (violation,) = fed(follower, found[0], forged, *found[2:])
    assert violation.law == "replay" and violation.journal == "gpu-0/1" and 8 <= violation.entry <= 14
    assert follower.lost and follower.gaps == 0


def test_follower_counts_a_broken_law_and_continues(monkeypatch):
    _, found = recorded()
    follower = Follower("gpu-0")
    monkeypatch.setattr(
        Auditor, "on_settled", lambda self: self._fail("conservation", "made up") if self.entry == 9 else None
    )
    (violation,) = fed(follower, *found)
    assert (violation.law, violation.entry) == ("conservation", 9) and not follower.lost
    assert follower.counts == {"conservation": 1}


def test_recent_figures_cover_ten_seconds_and_closed_meters_are_summed():
    rig = Rig(books=False)
    rig.open("old", 2)
    rig.submit("old", 2_000 * MS)
    rig.drain()
    rig.send(SessionClosedEvent(rig.now, "old"))
    rig.open("new", 2)
    for _ in range(1400):
        rig.now += 250 * MS
        rig.submit("new", 250 * MS)
        rig.drain()
    follower = Follower("gpu-0")
    fed(follower, *batches(rig.entries))
    recent = follower.meters.recent()
    assert recent.run.keys() == {"new"} and 9_000 * MS <= recent.wall <= 11_000 * MS
    assert 480 <= recent.executing * 1000 // recent.wall <= 520
    assert "old" not in follower.meters.meters and follower.meters.by_tenant()[""].run_ns == rig.metrics.run_ns
    assert recent.wall == 10_000 * MS
    silent = follower.meters.recent(idle_ns=10_000 * MS)
    assert silent.executing * 1000 // silent.wall <= 270


# -- epochs ----------------------------------------------------------------------------------------------------------


def epoch_of(alone_ns, behind_ns, idle_ns=0, service_ns=20 * MS, seen_alone=True, own_ns=0):
    """P0 requests alone, then each after a P4 launch of `behind_ns`, with `idle_ns` after each."""
    rig = Rig(books=False)
    rig.open("p0", 0, service_ns=service_ns)
    for _ in range(40 if seen_alone else 0):
        rig.submit("p0", alone_ns)
        rig.finish(alone_ns)
        rig.now += MS
    rig.open("bg", 4)
    for _ in range(40):
        rig.submit("bg", 100_000)
        rig.submit("p0", 100_000)
        rig.finish(behind_ns)
        rig.finish(own_ns or alone_ns)
        rig.now += idle_ns
    follower = Follower("gpu-0")
    fed(follower, *batches(rig.entries))
    return follower


def test_epoch_with_slow_p0_halves_the_windows():
    follower = epoch_of(MS, MS)
    assert slowdown_permille(follower.state, follower.meters) > 1900
    decision = decide(follower.state, follower.meters)
    assert decision.slowdown_permille > 1900


def test_epoch_slowness_without_lower_classes_changes_no_window():
    follower = epoch_of(MS, 10_000, own_ns=5 * MS)
    assert slowdown_permille(follower.state, follower.meters) < 1020


def test_epoch_with_fast_p0_widens_the_windows_only_on_an_idle_device():
    idle = epoch_of(4 * MS, 10_000, idle_ns=2 * MS)
    decision = decide(idle.state, idle.meters)
    assert decision.slowdown_permille < 1020 and decision.idle_permille > 50
    busy = epoch_of(4 * MS, 10_000)
    busy.meters.executing_ns = busy.meters.wall_ns
    assert decide(busy.state, busy.meters) is None


def withholding():
    rig = Rig(books=False)
    rig.send(ConfigChangedEvent(0, Config(max_flights=1, stoppable=True, withheld_permille=1000)))
    rig.open("front", 0)
    rig.open("behind", 4)
    rhythm_beside_work(rig, 400 * MS, 400_000, MS)
    follower = Follower("gpu-0")
    assert fed(follower, *batches(rig.entries)) == [] and not follower.lost
    return rig, follower


def test_epoch_does_not_count_withheld_time_as_idle():
    rig, follower = withholding()
    meters = follower.meters
    assert meters.withheld_ns == rig.metrics.withheld_ns > 200 * MS
    assert meters.executing_ns + meters.withheld_ns == meters.wall_ns and meters.idle_permille() == 0
    assert meters.unjust_ns == 0


def test_follower_with_withheld_time_survives_a_checkpoint():
    rig, follower = withholding()
    again = decode_follower(encode_follower(follower))
    assert again.meters.withheld_ns == follower.meters.withheld_ns
    before = len(rig.entries)
    rhythm_beside_work(rig, 100 * MS, 400_000, MS)
    journal = Journal(again.journal, again.replayer.next, again.replayer.link)
    for event, decisions in rig.entries[before:]:
        journal.record(event, decisions)
    assert fed(again, journal.cut()) == [] and not again.lost
    assert again.meters.withheld_ns == rig.metrics.withheld_ns and not again.counts


def test_epoch_uses_the_declared_service_time_without_a_p99_alone():
    follower = epoch_of(20 * MS, 10 * MS, service_ns=20 * MS, seen_alone=False)
    assert 1400 < slowdown_permille(follower.state, follower.meters) < 1700
    undeclared = epoch_of(20 * MS, 10 * MS, service_ns=0, seen_alone=False)
    assert slowdown_permille(undeclared.state, undeclared.meters) == 0
    assert decide(undeclared.state, undeclared.meters) is None


def test_epoch_that_changes_no_window_sends_nothing():
    follower = epoch_of(MS, MS, service_ns=2 * CONFIG.latency_ns)
    assert min(follower.state.windows) == 2 * CONFIG.latency_ns
    assert decide(follower.state, follower.meters) is None


def test_epoch_resets_the_measurements():
    rig = Rig(books=False)
    rig.open("p0", 0, service_ns=MS)
    for _ in range(40):
        rig.submit("p0", MS)
        rig.drain()
    rig.send(EpochEndedEvent(rig.now, 2000, 0))
    follower = Follower("gpu-0")
    fed(follower, *batches(rig.entries))
    assert follower.meters.epochs == 1 and slowdown_permille(follower.state, follower.meters) == 0


# -- the book --------------------------------------------------------------------------------------------------------


def test_book_counts_admitted_sessions_until_the_journal_shows_them():
    _, found = recorded()
    follower, book = Follower("gpu-0"), Book()
    book.promise(demand("p0"), 100.0)
    book.promise(demand("never"), 100.0)
    assert [d.session for d in book.demands(follower, 101.0)] == ["never", "p0"]
    fed(follower, *found)
    known = {d.session: d for d in book.demands(follower, 102.0)}
    assert known.keys() == {"bg", "never", "p0"} and known["bg"].longest_ns == 300_000
    assert known["p0"].policy == Policy(0, objective_ns=MS)
    assert [d.session for d in book.demands(follower, 100.0 + PENDING_S + 1)] == ["bg", "p0"]
