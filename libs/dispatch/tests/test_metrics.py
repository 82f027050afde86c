"""The metrics on histories that are short enough to add up by hand."""

import random

from wooly_dispatch.decisions import LaunchDecision
from wooly_dispatch.events import EpochEndedEvent, LaunchDoneEvent, Policy, ProgramSubmittedEvent, SessionOpenedEvent
from wooly_dispatch.metrics import Histogram, Metrics
from wooly_testkit.dispatch import Rig

US = 1_000


def test_utilization_and_starvation_are_shares_of_wall_time():
    rig = Rig()
    rig.open("a")
    rig.open("b")
    rig.now = 100 * US  # the device is idle
    rig.submit("a", 300 * US)  # a runs alone for 300 us
    rig.finish()
    rig.submit("a", 200 * US)
    rig.submit("b", 100 * US)  # b waits for 200 us, then runs alone for 100 us
    rig.finish()
    rig.finish()
    rig.now += 300 * US
    rig.send(EpochEndedEvent(rig.now))
    metrics = rig.metrics
    assert (metrics.wall_ns, metrics.executing_ns, metrics.starving_ns) == (1000 * US, 600 * US, 200 * US)
    assert (metrics.utilization_permille, metrics.starvation_permille, metrics.unjust_ns) == (600, 200, 0)


def test_unjust_wait_counts_mistakes_of_a_wrong_core():
    """No correct core launches like this: b waits beside a free device, then a lower class is launched before b."""
    metrics = Metrics()
    for event, decisions in [
        (SessionOpenedEvent(0, "a", Policy(3)), []),
        (SessionOpenedEvent(0, "b", Policy(2)), []),
        (ProgramSubmittedEvent(0, "b", 1, (5,)), []),
        (ProgramSubmittedEvent(30, "a", 1, (5,)), [LaunchDecision(1, "a", 1, 0, 1, 3, 5)]),
        (LaunchDoneEvent(80, 1, 50), [LaunchDecision(2, "b", 1, 0, 1, 2, 5)]),
    ]:
        metrics.observe(event, decisions)
    assert metrics.meters["b"].unjust_ns == 30 + 50
    assert metrics.meters["a"].unjust_ns == 0


def test_attainment_counts_programs_within_the_objective():
    rig = Rig()
    rig.open("a", 1, objective_ns=150 * US)
    for _ in range(3):
        rig.submit("a", 100 * US)
    for _ in range(3):
        rig.finish()
    meter = rig.metrics.meters["a"]
    assert (meter.programs, meter.on_time, meter.attainment_permille) == (3, 1, 333)
    assert (meter.run_ns, meter.launches) == (300 * US, 3)


def test_share_error_of_an_epoch_compares_with_weights():
    rig = Rig(books=False)
    rig.open("a", weight=3)
    rig.open("b", weight=1)
    for _ in range(300):
        rig.submit("a", *(100 * US,) * 5)
        rig.submit("b", *(100 * US,) * 5)
    rig.send(EpochEndedEvent(rig.now))
    for _ in range(200):
        rig.finish()
    rig.send(EpochEndedEvent(rig.now))
    share = rig.metrics.shares[2]
    assert share.epochs >= 1 and share.worst <= 40


def test_histogram_quantiles_are_within_a_bucket():
    stream = random.Random(0)
    values = sorted(stream.randrange(1, 10**9) for _ in range(2000))
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    for permille in (10, 500, 990, 1000):
        exact = values[(len(values) * permille + 999) // 1000 - 1]
        assert exact <= histogram.quantile(permille) <= exact * 1.07
    assert Histogram().quantile(500) == 0
