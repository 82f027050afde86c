"""A simulated device: it runs launches one after another in virtual time, and reports the end of each."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import accumulate

from wooly_dispatch.decisions import LaunchDecision
from wooly_dispatch.events import (
    Config,
    EpochEndedEvent,
    Event,
    LaunchDoneEvent,
    ProgramSubmittedEvent,
    SessionOpenedEvent,
)
from wooly_dispatch.invariants import Auditor
from wooly_dispatch.metrics import Metrics

from wooly_testkit.simulate.policies import POLICIES, Wooly
from wooly_testkit.simulate.workload import Tenant

#: Length of an epoch.
EPOCH_NS = 100_000_000
#: Number of recent responses that determine the slowdown.
_RECENT = 256
#: A saturating tenant keeps this many windows of programs queued, so that some are always waiting.
_AHEAD = 3


@dataclass(slots=True)
class Outcome:
    """The result of one tenant.

    Attributes:
        run_ns: device time.
        programs: number of finished programs.
        responses: response time of each finished program in ns; empty for a saturating tenant.
        alone: response time of each finished program, in ns, if the tenant had the device alone.
    """

    run_ns: int = 0
    programs: int = 0
    responses: list[int] = field(default_factory=list)
    alone: list[int] = field(default_factory=list)


@dataclass(slots=True)
class DeviceResult:
    """The result of one simulated device after `wall_ns`."""

    wall_ns: int
    run_ns: int
    launches: int
    outcomes: dict[str, Outcome]
    violations: int = 0
    metrics: Metrics | None = None


class _Running:
    """A tenant during the simulation."""

    __slots__ = (
        "alone_free",
        "durations",
        "ends",
        "kernels",
        "next",
        "outcome",
        "pauses",
        "programs",
        "recent",
        "tenant",
    )

    def __init__(self, tenant: Tenant, seed: str) -> None:
        self.tenant = tenant
        self.outcome = Outcome()
        self.durations = tenant.durations(seed)
        self.pauses = tenant.pauses(seed)
        self.programs: dict[
            int, tuple[int, int]
        ] = {}  # unfinished programs: duration in permille of the profile, time of submission
        self.next = 1
        self.ends = list(accumulate(tenant.profile.kernels))
        self.kernels = tuple(max(k // tenant.understated, 1) for k in tenant.profile.kernels)
        self.alone_free = 0  # time at which the device would be free if this tenant had it alone
        self.recent: deque[tuple[int, int]] = deque(maxlen=_RECENT)  # response time, and response time alone


def quantile(values: Sequence[int], permille: int) -> int:
    """The quantile of the values; 0 if there are no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) * permille // 1000, len(ordered) - 1)] if ordered else 0


class SimulatedDevice:
    """One device under one policy.

    Args:
        tenants: tenants that share the device.
        policy: a name in `POLICIES`.
        seed: seed of the random streams of arrivals and noise.
        config: constants of the dispatch rule; `latency_ns` is also the time from a decision to the start on the device.
        audit: check all invariants and keep metrics (for the core only); several times slower.
        adapt: report epochs, so that windows follow the slowdown of P0.
    """

    def __init__(
        self,
        tenants: Sequence[Tenant],
        policy: str = "wooly",
        seed: str = "0",
        config: Config | None = None,
        audit: bool = False,
        adapt: bool = True,
    ) -> None:
        self.config = config or Config()
        self.dispatcher = POLICIES[policy](self.config)
        self.seed, self.adapt = seed, adapt
        self.auditor: Auditor | None = None
        self.metrics: Metrics | None = None
        if audit and isinstance(self.dispatcher, Wooly):
            self.auditor, self.metrics = Auditor(raises=False), Metrics()
            self.state = self.dispatcher.state
        self.running = {tenant.id: _Running(tenant, seed) for tenant in tenants}
        self.pending: deque[tuple[int, LaunchDecision, int, _Running]] = deque()  # end, launch, duration, tenant
        self.arrivals: list[tuple[int, str, Iterator[int]]] = []
        self.free = self.run_ns = self.launches = 0

    def run(self, wall_ns: int) -> DeviceResult:
        """Simulate the time from 0 to `wall_ns`."""
        arrivals = self.arrivals = [(next(times), name, times) for name, times in self._arrivals()]
        heapify(arrivals)
        for running in self.running.values():
            self._feed(SessionOpenedEvent(0, running.tenant.id, running.tenant.policy))
        for running in self.running.values():
            if running.tenant.saturating:
                for _ in range(_AHEAD * self.config.free_window_ns // running.tenant.profile.total_ns + 2):
                    self._submit(running, 0)
        epoch = EPOCH_NS if self.adapt else wall_ns + 1
        epoch_run = 0
        pending = self.pending
        while True:
            done_at = pending[0][0] if pending else wall_ns + 1
            asked_at = arrivals[0][0] if arrivals else wall_ns + 1
            if min(done_at, asked_at, epoch) > wall_ns:
                break
            if epoch <= min(done_at, asked_at):
                idle = max(1000 - (self.run_ns - epoch_run) * 1000 // EPOCH_NS, 0)
                epoch_run = self.run_ns
                self._feed(EpochEndedEvent(epoch, self._slowdown(), idle))
                epoch += EPOCH_NS
            elif done_at <= asked_at:
                self._done(*pending.popleft())
            else:
                _, name, times = arrivals[0]
                self._submit(self.running[name], asked_at)
                following = next(times, None)
                if following is None:
                    heappop(arrivals)
                else:
                    heapreplace(arrivals, (following, name, times))
        return DeviceResult(
            wall_ns,
            self.run_ns,
            self.launches,
            {name: running.outcome for name, running in self.running.items()},
            len(self.auditor.violations) if self.auditor else 0,
            self.metrics,
        )

    def _arrivals(self) -> Iterator[tuple[str, Iterator[int]]]:
        for name, running in self.running.items():
            times = running.tenant.arrivals(self.seed)
            if running.tenant.think_ns:
                times = iter([next(running.pauses)])  # the next arrival is known after the answer
            if not running.tenant.saturating:
                yield name, times

    def _submit(self, running: _Running, at: int) -> None:
        number = running.next
        running.next += 1
        factor = next(running.durations)
        running.programs[number] = (factor, at)
        self._feed(ProgramSubmittedEvent(at, running.tenant.id, number, running.kernels))

    def _done(self, at: int, launch: LaunchDecision, took: int, running: _Running) -> None:
        self.run_ns += took
        outcome = running.outcome
        outcome.run_ns += took
        self._feed(LaunchDoneEvent(at, launch.launch, took))
        if launch.last < len(running.ends):
            return
        outcome.programs += 1
        factor, submitted = running.programs.pop(launch.program)
        if running.tenant.saturating:
            self._submit(running, at)
            return
        begin = max(submitted + self.config.latency_ns, running.alone_free)
        running.alone_free = begin + running.ends[-1] * factor // 1000
        outcome.responses.append(at - submitted)
        outcome.alone.append(running.alone_free - submitted)
        running.recent.append((at - submitted, running.alone_free - submitted))
        if running.tenant.think_ns:
            heappush(self.arrivals, (at + next(running.pauses), running.tenant.id, iter(())))

    def _feed(self, event: Event) -> None:
        decisions = self.dispatcher.step(event)
        if self.auditor is not None and self.metrics is not None:
            self.auditor.audit(event, decisions, self.state.windows)
            self.metrics.observe(event, decisions)
        for launch in decisions:
            if isinstance(launch, LaunchDecision):
                running = self.running[launch.session]
                factor, _ = running.programs[launch.program]
                ends, first = running.ends, launch.first
                took = (ends[launch.last - 1] - (ends[first - 1] if first else 0)) * factor // 1000
                self.free = max(self.free, event.at + self.config.latency_ns) + took
                self.launches += 1
                self.pending.append((self.free, launch, took, running))

    def _slowdown(self) -> int:
        """The worst slowdown of a P0 tenant: recent p99 over its p99 alone, in permille; 0 before 20 responses."""
        worst = 0
        for running in self.running.values():
            if running.tenant.policy.priority == 0 and len(running.recent) >= 20:
                ours = quantile([r for r, _ in running.recent], 990)
                alone = quantile([a for _, a in running.recent], 990)
                worst = max(worst, ours * 1000 // alone)
        return worst
