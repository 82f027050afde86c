"""Any events in any order: every law holds after each event, and the journal replays to the same decisions."""

from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from wooly_dispatch.decisions import LaunchDecision, RefuseDecision
from wooly_dispatch.events import (
    Config,
    ConfigChangedEvent,
    EpochEndedEvent,
    ExclusiveBegunEvent,
    ExclusiveEndedEvent,
    LaunchDoneEvent,
    Policy,
    PolicyChangedEvent,
    ProgramSubmittedEvent,
    SessionClosedEvent,
    SessionResumedEvent,
    SessionSuspendedEvent,
    SwappedInEvent,
    SwappedOutEvent,
    WithheldEvent,
)
from wooly_dispatch.journal import Journal, Replayer
from wooly_dispatch.state import restore, snapshot
from wooly_testkit.dispatch import Rig
from wooly_testkit.effort import examples

US = 1_000
SESSIONS = st.sampled_from(["a", "b", "c", "d", "e"])
KERNELS = st.lists(
    st.sampled_from([0, 1, 5, 40, 120, 300, 900, 30_000]).map(lambda us: us * US), min_size=1, max_size=12
)
POLICIES = st.builds(
    Policy,
    priority=st.integers(0, 4),
    weight=st.integers(1, 4),
    service_ns=st.sampled_from([0, 2_000 * US, 20_000 * US]),
    rate_permille=st.sampled_from([0, 0, 300]),
    burst_ns=st.sampled_from([1_000 * US, 10_000 * US]),
)


class DispatchMachine(RuleBasedStateMachine):
    """`Rig` raises at the first broken law. This machine adds the laws that need the whole history."""

    @initialize(
        policies=st.lists(POLICIES, min_size=2, max_size=3),
        floor=st.sampled_from([0, 20, 300]),
        stoppable=st.booleans(),
    )
    def begin(self, policies, floor, stoppable):
        self.rig = Rig()
        flights = {"max_flights": 1, "stoppable": True} if stoppable else {}
        self.rig.send(ConfigChangedEvent(0, Config(floor_permille=floor, **flights)))
        for name, policy in zip("abc", policies, strict=False):
            self.opened(name, policy)

    def opened(self, name, policy):
        values = {n: getattr(policy, n) for n in ("weight", "service_ns", "rate_permille", "burst_ns")}
        self.rig.open(name, policy.priority, **values)

    @rule(name=SESSIONS, policy=POLICIES)
    def open(self, name, policy):
        self.opened(name, policy)

    @rule(name=SESSIONS)
    def close(self, name):
        self.rig.send(SessionClosedEvent(self.rig.now, name))

    @rule(name=SESSIONS, programs=st.lists(KERNELS, min_size=1, max_size=4))
    def submit(self, name, programs):
        for kernels in programs:
            if name in self.rig.state.sessions:
                self.rig.submit(name, *kernels)

    @rule(name=SESSIONS, program=st.integers(0, 6), kernels=KERNELS)
    def submit_again_or_early(self, name, program, kernels):
        self.rig.send(ProgramSubmittedEvent(self.rig.now, name, program, tuple(kernels)))
        session = self.rig.state.sessions.get(name)
        if session is not None:
            self.rig.submitted[name] = session.expected - 1

    @precondition(lambda self: self.rig.in_flight)
    @rule(count=st.integers(1, 6), factor=st.sampled_from([0, 300, 1000, 1000, 1100, 3000]))
    def done(self, count, factor):
        for _ in range(min(count, len(self.rig.in_flight))):
            self.rig.finish(self.rig.in_flight[0].estimate_ns * factor // 1000)

    @precondition(lambda self: self.rig.in_flight)
    @rule(kernels=st.integers(1, 12), factor=st.sampled_from([100, 1000, 1100]))
    def stopped(self, kernels, factor):
        launch = self.rig.in_flight[0]
        last = min(launch.first + kernels, launch.last)
        if self.rig.state.config.stoppable or last == launch.last:
            share = (last - launch.first) * factor // (launch.last - launch.first)
            self.rig.finish(launch.estimate_ns * share // 1000, last)

    @rule(launch=st.integers(0, 40))
    def done_again(self, launch):
        if all(d.launch != launch for d in self.rig.in_flight):
            (refused,) = self.rig.send(LaunchDoneEvent(self.rig.now, launch, 5))
            assert isinstance(refused, RefuseDecision)

    @rule(
        name=SESSIONS,
        kind=st.sampled_from([SwappedOutEvent, SwappedInEvent, SessionSuspendedEvent, SessionResumedEvent]),
    )
    def moved(self, name, kind):
        self.rig.send(kind(self.rig.now, name))

    @rule(name=SESSIONS, policy=POLICIES)
    def reprioritise(self, name, policy):
        self.rig.send(PolicyChangedEvent(self.rig.now, name, policy))

    @rule(name=SESSIONS)
    def exclusive(self, name):
        self.rig.send(ExclusiveBegunEvent(self.rig.now, name))

    @rule()
    def shared(self):
        self.rig.send(ExclusiveEndedEvent(self.rig.now))

    @rule(slowdown=st.sampled_from([0, 1010, 1200]), idle=st.sampled_from([0, 200]))
    def epoch(self, slowdown, idle):
        self.rig.send(EpochEndedEvent(self.rig.now, slowdown, idle))

    @rule(ns=st.sampled_from([10 * US, 300 * US, 5_000 * US, -3 * US]))
    def time(self, ns):
        self.rig.now += ns

    @rule()
    def forget_and_remember(self):
        data = snapshot(self.rig.state)
        self.rig.state = restore(data)
        assert snapshot(self.rig.state) == data

    @invariant()
    def nothing_waits_unjustly(self):
        if hasattr(self, "rig"):
            assert self.rig.metrics.unjust_ns == 0

    def teardown(self):
        if not hasattr(self, "rig"):
            return
        rig = self.rig
        rig.drain()
        assert not any(s.lane >= 0 for s in rig.state.sessions.values()), "work conservation"
        metrics = rig.metrics
        assert metrics.run_ns == sum(m.run_ns for m in metrics.meters.values()) == sum(rig.run_ns.values())
        assert metrics.run_ns == sum(m.run_ns for m in metrics.by_tenant().values())
        launched = [d for _, ds in rig.entries for d in ds if isinstance(d, LaunchDecision)]
        assert sum(m.launches for m in metrics.meters.values()) == len(launched) == rig.state.launches
        assert [d.launch for d in launched] == list(range(1, len(launched) + 1))
        assert metrics.starving_ns <= metrics.executing_ns <= metrics.wall_ns
        journal, replayer = Journal("test"), Replayer("test")
        for event, decisions in rig.entries:
            journal.record(event, decisions)
        batch = journal.cut()
        assert replayer.feed(batch) == rig.entries
        assert snapshot(replayer.state) == snapshot(rig.state) and replayer.link == journal.link


class WithholdingMachine(DispatchMachine):
    """The same beside a P0 session that computes in a rhythm, on a device whose time may be withheld for it."""

    @initialize(
        policies=st.lists(POLICIES, min_size=2, max_size=3),
        share=st.sampled_from([10, 250, 1000]),
        floor=st.sampled_from([0, 300]),
    )
    def begin(self, policies, share, floor):
        self.rig = Rig()
        self.rig.now = 1_000_000 * US  # the right to withhold time is earned before
        config = Config(max_flights=1, stoppable=True, withheld_permille=share, floor_permille=floor)
        self.rig.send(ConfigChangedEvent(0, config))
        for name, policy in zip("bcd", policies, strict=False):
            self.opened(name, policy)
        self.opened("a", Policy())
        self.computes("a", 0, 700 * US, 6)

    def computes(self, name, priority, pause, steps):
        """A session computes in regular steps, and begins to rest."""
        if name in self.rig.state.sessions:
            self.rig.send(PolicyChangedEvent(self.rig.now, name, Policy(priority)))
            for _ in range(steps):
                self.rig.drain()
                self.rig.now += pause
                self.rig.submit(name, 40 * US)
            self.rig.drain()

    @rule(
        name=st.sampled_from(["a", "e"]),
        priority=st.integers(0, 1),
        pause=st.sampled_from([100 * US, 700 * US]),
        steps=st.integers(0, 8),
        other=st.sampled_from(["b", "c", "d"]),
        kernels=KERNELS,
    )
    def rhythm(self, name, priority, pause, steps, other, kernels):
        """A session computes in a rhythm, and others get work in its next pause."""
        self.computes(name, priority, pause, steps)
        if other not in self.rig.state.sessions:
            self.opened(other, Policy(2))
        self.rig.submit(other, *kernels)

    @rule(early=st.booleans())
    def withheld(self, early):
        """The executor tells the core that the time has come, perhaps too early, or without a reason."""
        if early or not self.rig.state.withheld_until:
            self.rig.send(WithheldEvent(self.rig.now))
        else:
            self.rig.wait()

    @rule(share=st.sampled_from([0, 250, 1000]))
    def reconfigure(self, share):
        config = self.rig.state.config
        if config.stoppable:
            self.rig.send(ConfigChangedEvent(self.rig.now, replace(config, withheld_permille=share)))


TestDispatch = DispatchMachine.TestCase
TestWithholding = WithholdingMachine.TestCase
TestDispatch.settings = TestWithholding.settings = settings(
    max_examples=examples(40, 150),
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
