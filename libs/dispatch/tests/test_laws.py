"""The laws under load, and proof that the checks work: each mutant of the core breaks at least one law."""

import inspect
import random
import types

import pytest
from wooly_dispatch import core
from wooly_dispatch.decisions import LaunchDecision, SwapInDecision
from wooly_dispatch.errors import InvariantError
from wooly_dispatch.events import (
    Config,
    ConfigChangedEvent,
    LaunchDoneEvent,
    Policy,
    PolicyChangedEvent,
    SessionSuspendedEvent,
    SwappedInEvent,
    SwappedOutEvent,
)
from wooly_testkit.dispatch import Rig, rhythm_beside_work

US = 1_000
MS = 1_000_000


def law(holds, name):
    if not holds:
        raise InvariantError(name, "in this scenario")


def saturate(rig, kernels, factors, launches, seed=0, between=lambda n: None):
    """Keep more work queued than a window holds, for `launches` launches. `factors`: measured over estimated time, in
    permille.
    """
    stream = random.Random(seed)
    for _ in range(40):
        for name, program in kernels.items():
            rig.submit(name, *program)
    for n in range(launches):
        between(n)
        launch = rig.in_flight[0]
        raw = sum(kernels[launch.session][launch.first : launch.last])
        rig.finish(raw * (factors[launch.session] + stream.randrange(-50, 51)) // 1000)
        if launch.last == len(kernels[launch.session]):
            rig.submit(launch.session, *kernels[launch.session])


def shares(rig, *names):
    total = sum(rig.run_ns.get(name, 0) for name in names)
    return [round(rig.run_ns.get(name, 0) * 1000 / total) for name in names]


# -- scenarios: each takes a core and raises InvariantError where a law breaks ------------------------------------------


def equal_tenants_with_unequal_programs(step):
    rig = Rig(step, books=False)
    rig.open("a")
    rig.open("b")
    saturate(rig, {"a": (400 * US,) * 10, "b": (20 * US,) * 7}, {"a": 1000, "b": 1000}, 1500)
    law(abs(shares(rig, "a", "b")[0] - 500) <= 10, "share")


def weights_three_to_one(step):
    rig = Rig(step, books=False)
    rig.open("a", weight=3)
    rig.open("b", weight=1)
    saturate(rig, {"a": (130 * US,) * 4, "b": (90 * US,) * 4}, {"a": 1000, "b": 1000}, 1500)
    law(abs(shares(rig, "a", "b")[0] - 750) <= 10, "share")


def session_with_too_high_estimates(step):
    rig = Rig(step, books=False)
    rig.open("a")
    rig.open("b")
    saturate(rig, {"a": (200 * US,) * 4, "b": (200 * US,) * 4}, {"a": 500, "b": 1000}, 1500)
    law(abs(shares(rig, "a", "b")[0] - 500) <= 10, "share")


def session_with_too_low_estimates(step):
    rig = Rig(step, books=False)
    rig.open("liar")
    rig.open("b")
    saturate(rig, {"liar": (US,) * 50, "b": (200 * US,) * 4}, {"liar": 100_000, "b": 1000}, 1500)
    law(abs(shares(rig, "liar", "b")[0] - 500) <= 20, "share")


def session_returning_after_idling(step):
    rig = Rig(step, books=False)
    rig.open("a")
    rig.open("b")
    rig.submit("b", 100 * US)
    rig.finish()
    saturate(rig, {"a": (100 * US,) * 5}, {"a": 1000, "b": 1000}, 1000)
    before = dict(rig.run_ns)
    for _ in range(400):
        rig.submit("b", 100 * US)
    for _ in range(400):
        launch = rig.finish()
        if launch.session == "a" and launch.last == 5:
            rig.submit("a", *(100 * US,) * 5)
    law(abs((rig.run_ns["a"] - before["a"]) - (rig.run_ns["b"] - before["b"])) <= 6 * MS, "no credit for idling")


def p0_beside_short_and_long_kernels(step):
    rig = Rig(step, books=False)
    rig.open("front", 0, service_ns=10 * MS)
    rig.open("behind", 4)
    kernels = {"behind": tuple(US * us for us in (5, 240, 10, 240, 230, 3, 1200, 240, 15) * 6)}

    def between(n):
        if n % 25 == 0 and not any(d.session == "front" for d in rig.in_flight):
            rig.submit("front", *(100 * US,) * 10)

    kernels["front"] = (100 * US,) * 10
    rig.submit("behind", *kernels["behind"])
    stream = random.Random(1)
    for n in range(1500):
        between(n)
        launch = rig.in_flight[0]
        rig.finish(sum(kernels[launch.session][launch.first : launch.last]) * stream.randrange(950, 1050) // 1000)
        if launch.session == "behind" and launch.last == len(kernels["behind"]):
            rig.submit("behind", *kernels["behind"])


def p4_beside_saturating_p2_gets_its_floor(step):
    rig = Rig(step, Config(floor_permille=100), books=False)
    rig.open("two", 2)
    rig.open("four", 4)
    saturate(rig, {"two": (100 * US,) * 4, "four": (250 * US,) * 4}, {"two": 1000, "four": 1000}, 1500)
    law(abs(rig.run_ns.get("four", 0) * 1000 // rig.run_ns["two"] - 100) <= 10, "floor")


def p0_beyond_its_bucket_leaves_room(step):
    rig = Rig(step, books=False)
    rig.open("greedy", 0, rate_permille=200, burst_ns=5 * MS)
    rig.open("two", 2)
    saturate(rig, {"greedy": (100 * US,) * 10, "two": (100 * US,) * 10}, {"greedy": 1000, "two": 1000}, 1500)
    law(shares(rig, "greedy", "two")[1] >= 350, "policing")


def swapped_out_and_suspended_sessions(step):
    rig = Rig(step, books=False)
    for name in ("a", "b", "c"):
        rig.open(name)
        for _ in range(60):
            rig.submit(name, *(100 * US,) * 3)
    rig.send(SwappedOutEvent(rig.now, "b"))
    rig.send(SessionSuspendedEvent(rig.now, "c"))
    for _ in range(30):
        rig.finish()
    law(any(d == SwapInDecision("b") for _, decisions in rig.entries for d in decisions), "asks for its memory")
    rig.send(SwappedInEvent(rig.now, "b"))
    rig.drain()


def p0_beside_a_session_with_false_estimates(step):
    rig = Rig(step, books=False)
    rig.open("front", 0, service_ns=20 * MS)
    rig.open("liar", 4)
    for _ in range(4):
        rig.submit("liar", *(US,) * 1000)  # each kernel takes 300 us, not the declared 1 us
    law([(d.first, d.last) for d in rig.in_flight] == [(0, 1)], "one kernel while unproven")
    for _ in range(200):
        launch = rig.in_flight[0]
        rig.finish(300 * US * (launch.last - launch.first))
        law(sum(300 * US * (d.last - d.first) for d in rig.in_flight) <= 500 * US, "window of real time")


def p0_in_a_rhythm_beside_long_kernels(step):
    rig = Rig(step, books=False)
    rig.send(ConfigChangedEvent(0, Config(max_flights=1, stoppable=True, withheld_permille=300)))
    rig.open("front", 0)
    rig.open("behind", 4)
    ran, ended = rhythm_beside_work(rig, 2_000 * MS, 400 * US, MS)
    law(ended >= 2_000, "P0 is not delayed while time may be withheld")
    law(ran >= 500 * MS, "P4 goes on")
    rig.now += MS  # P0 stays away
    rig.drain()
    law(not rig.state.sessions["behind"].programs, "work conservation")
    rig.open("other", 1)
    rig.submit("front", 100 * US)
    rig.finish()
    law(rig.submit("other", MS), "P1 is not held up")


SCENARIOS = [
    equal_tenants_with_unequal_programs,
    weights_three_to_one,
    session_with_too_high_estimates,
    session_with_too_low_estimates,
    session_returning_after_idling,
    p0_beside_short_and_long_kernels,
    p4_beside_saturating_p2_gets_its_floor,
    p0_beyond_its_bucket_leaves_room,
    swapped_out_and_suspended_sessions,
    p0_beside_a_session_with_false_estimates,
    p0_in_a_rhythm_beside_long_kernels,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_core_in_scenario_obeys_the_laws(scenario):
    scenario(core.step)


#: Mutations of the core, each with the scenario that detects it fastest.
MUTANTS = {
    "window by count": (
        "state.in_flight_ns + estimate > state.windows[session.lane]",
        "len(state.flights) >= 8",
        p0_beside_a_session_with_false_estimates,
    ),
    "no true-up": ("    if correction:", "    if False:", session_with_too_high_estimates),
    "no lift for idle tenants": ("session.lift = lane.virtual", "session.lift = 0", session_returning_after_idling),
    # The scenarios submit program n of every session before program n + 1 of any session, so a program's number is its queue
    # position.
    "FIFO in a class": (
        "entry = (max(session.lift, session.finish[session.lane]), session.id",
        "entry = (session.programs[0].number, session.id",
        equal_tenants_with_unequal_programs,
    ),
    "lowest class first": (
        "    for lane in state.lanes:\n",
        "    for lane in reversed(state.lanes):\n",
        p0_beside_short_and_long_kernels,
    ),
    "launches swapped-out sessions": (
        "elif session.resident:",
        "elif True:",
        swapped_out_and_suspended_sessions,
    ),
    "launches suspended sessions": ("or session.suspended", "", swapped_out_and_suspended_sessions),
    "no floor": (
        "state.floor_credit += estimate * state.config.floor_permille",
        "pass",
        p4_beside_saturating_p2_gets_its_floor,
    ),
    "no policing": ("    if bucket.tokens < estimate:", "    if False:", p0_beyond_its_bucket_leaves_room),
    "believes every estimate": (
        "    if overrun > session.stretch:",
        "    if False:",
        p0_beside_a_session_with_false_estimates,
    ),
    "withholds nothing": ("            if idle_ns:", "            if False:", p0_in_a_rhythm_beside_long_kernels),
    "withholds without a limit": (
        "min(state.config.withheld_ns, _refilled(state))",
        "state.config.withheld_ns",
        p0_in_a_rhythm_beside_long_kernels,
    ),
    "withholds without a charge": ("state.withheld_tokens -= idle_ns", "pass", p0_in_a_rhythm_beside_long_kernels),
    "withholds from P0": (
        "            if session.policy.priority >= PROTECTED and not floor:",
        "            if session.rhythm.rested < 0 and not floor:",
        p0_in_a_rhythm_beside_long_kernels,
    ),
    "weights ignored": ("tag = estimate * SCALE // weight", "tag = estimate * SCALE", weights_three_to_one),
}


def mutant(old, new):
    source = inspect.getsource(core)
    assert source.count(old) == 1, f"the core has no longer one place that says {old!r}"
    module = types.ModuleType("mutant")
    exec(compile(source.replace(old, new), "mutant", "exec"), module.__dict__)  # noqa: S102  # mutants of our own source
    return module.step


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_of_the_core_breaks_a_law(name):
    old, new, scenario = MUTANTS[name]
    with pytest.raises(InvariantError):
        scenario(mutant(old, new))


# -- adversaries -------------------------------------------------------------------------------------------------------


def test_tenant_with_30ms_kernels_delays_p0_by_one_kernel_at_most():
    rig = Rig()
    rig.open("front", 0, service_ns=5 * MS)
    rig.open("long", 4)
    for _ in range(20):
        rig.submit("long", 30 * MS, 30 * MS)
    waits = []
    for _ in range(30):
        if not rig.in_flight:
            break
        rig.now += MS
        asked = rig.now
        rig.submit("front", *(100 * US,) * 50)
        while any(d.session == "front" for d in rig.in_flight) or rig.state.sessions["front"].programs:
            rig.finish()
        waits.append(rig.now - asked)
    assert max(waits) <= 30 * MS + 5 * MS
    assert rig.auditor.worst_inversion_permille <= 1000


def test_policy_reprioritised_while_queued_takes_effect_at_the_next_launch():
    rig = Rig()
    rig.open("a", 3)
    rig.open("b", 3)
    for name in ("a", "b"):
        for _ in range(30):
            rig.submit(name, *(400 * US,) * 4)
    for _ in range(10):
        rig.finish()
    decided = len(rig.entries)
    rig.send(PolicyChangedEvent(rig.now, "b", Policy(1)))
    for _ in range(20):
        rig.finish()
    after = [d.session for _, ds in rig.entries[decided:] for d in ds if isinstance(d, LaunchDecision)]
    assert after and set(after) == {"b"}


def test_done_events_out_of_order_and_repeated_are_applied_once():
    rig = Rig()
    rig.open("a")
    rig.submit("a", 100 * US)
    rig.finish()
    rig.submit("a", *(450 * US,) * 8)
    numbers = [d.launch for d in rig.in_flight]
    assert len(numbers) > 2
    for number in reversed(numbers):
        rig.send(LaunchDoneEvent(rig.now, number, 450 * US))
    for number in numbers:
        (refused,) = rig.send(LaunchDoneEvent(rig.now, number, 450 * US))
        assert "not in flight" in refused.reason
