"""Figures of one GPU in addition to the core's metrics: recent figures, and response times alone and beside other sessions.

All figures are computed from the journal, in the journal's time. So the same entries always give the same figures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from wooly_dispatch.decisions import Decision
from wooly_dispatch.events import EpochEndedEvent, Event, LaunchDoneEvent, SessionClosedEvent
from wooly_dispatch.ledger import Account, LaunchInFlight, Work
from wooly_dispatch.metrics import Histogram, Meter, Metrics, MetricsRecord

SAMPLE_NS = 1_000_000_000
SAMPLES = 10
"""Number of samples, one per second: "recent" means the last ten seconds."""
KEEP_CLOSED_NS = 600_000_000_000
"""Time, in ns, for which a closed session keeps its own meter. Its tenant's sums keep its values afterwards."""
ENOUGH = 32
"""Minimum number of responses for a p99."""


@dataclass(slots=True)
class Pace:
    """Response times of one P0 or P1 session, for programs that arrived while the session had no other work. Times are in ns.

    Attributes:
        alone: responses during which no other session had work.
        best_ns: the lowest p99 of 32 responses in `alone`; 0: not measured yet.
        recent: all responses since the last decision about the windows.
        suffered: work of lower classes during the responses in `recent`.
    """

    alone: Histogram = field(default_factory=Histogram)
    best_ns: int = 0
    recent: Histogram = field(default_factory=Histogram)
    suffered: Histogram = field(default_factory=Histogram)

    def restart_measurements(self) -> None:
        """Start new measurements, because the windows may change now."""
        self.recent, self.suffered = Histogram(), Histogram()


@dataclass(slots=True)
class Sample:
    """Sums at one moment. `now` is the journal's time; the other fields are as in `Metrics`."""

    now: int
    wall: int
    executing: int
    starving: int
    run: dict[str, int]


@dataclass(frozen=True, slots=True)
class GpuMetersRecord:
    """`GpuMeters` as plain data, with the same attribute names."""

    metrics: MetricsRecord
    longest: dict[str, int]
    paces: dict[str, Pace]
    retired: dict[str, Meter]
    epochs: int
    samples: list[Sample]
    closed: list[tuple[int, str]]
    shared_until: int
    lower: list[int]
    arrivals: dict[str, dict[int, int]]
    judged: tuple[int, int]


class GpuMeters(Metrics):
    """`Metrics` with the scheduler's additions. The share error is measured per second, not per epoch of the journal."""

    def __init__(self) -> None:
        super().__init__()
        self.longest: dict[str, int] = {}  # longest launch of each open session
        self.paces: dict[str, Pace] = {}
        self.retired: dict[str, Meter] = {}  # sums of sessions whose meters were removed, by tenant
        self.epochs = 0
        self.samples: deque[Sample] = deque([Sample(0, 0, 0, 0, {})], SAMPLES + 1)
        self._closed: deque[tuple[int, str]] = deque()
        self._shared_until = 0
        self._lower = [0, 0]  # time that the classes below P0, and below P1, ran
        self._arrivals: dict[str, dict[int, int]] = {}
        self._judged = (0, 0)

    # -- records -----------------------------------------------------------------------------------------------------

    def gpu_record(self) -> GpuMetersRecord:
        """All state as plain data. The record shares tables with this object: encode the record before the next event."""
        return GpuMetersRecord(
            self.metrics_record(), self.longest, self.paces, self.retired, self.epochs, list(self.samples),
            list(self._closed), self._shared_until, self._lower, self._arrivals, self._judged,
        )  # fmt: skip

    def load_gpu_record(self, record: GpuMetersRecord) -> None:
        """Replace the state by that of `record`.

        Raises:
            LookupError: the record is inconsistent.
        """
        self.load_metrics_record(record.metrics)
        if not record.samples or len(record.lower) != len(self._lower):
            raise LookupError("the record of the meters has no samples, or a wrong number of classes")
        self.longest, self.paces, self.retired = record.longest, record.paces, record.retired
        self.epochs, self._shared_until, self._lower = record.epochs, record.shared_until, record.lower
        self.samples = deque(record.samples, SAMPLES + 1)
        self._closed, self._arrivals, self._judged = deque(record.closed), record.arrivals, record.judged

    # -- asked by the actor ------------------------------------------------------------------------------------------

    def recent(self, idle_ns: int = 0) -> Sample:
        """Figures of the last ten seconds. `idle_ns`: silence since the last entry, which counts as idle time."""
        first = self._ten_seconds_ago()
        run = {
            name: meter.run_ns - first.run.get(name, 0)
            for name, meter in self.meters.items()
            if meter.run_ns > first.run.get(name, 0)
        }
        more = idle_ns if self.airborne else 0
        return Sample(
            self.now - first.now,
            self.wall_ns - first.wall + idle_ns,
            self.executing_ns - first.executing + more,
            self.starving_ns - first.starving + (more if self.busy > 1 else 0),
            run,
        )

    def _ten_seconds_ago(self) -> Sample:
        """The sums ten seconds ago, interpolated between two samples. This is exact if nothing happened between them, as in
        long gaps.
        """
        wanted = self.now - SAMPLES * SAMPLE_NS
        before = self.samples[0]
        for after in self.samples:
            if after.now > wanted:
                break
            before = after
        else:
            return before
        if before.now >= wanted:
            return before
        part, whole = wanted - before.now, after.now - before.now
        return Sample(
            wanted,
            before.wall + (after.wall - before.wall) * part // whole,
            before.executing + (after.executing - before.executing) * part // whole,
            before.starving + (after.starving - before.starving) * part // whole,
            {k: (old := before.run.get(k, 0)) + (v - old) * part // whole for k, v in after.run.items()},
        )

    def by_tenant(self) -> dict[str, Meter]:
        found = super().by_tenant()
        for tenant, gone in self.retired.items():
            _add(found.setdefault(tenant, Meter(tenant)), gone)
        return found

    def idle_permille(self) -> int:
        """Share of the time since the last decision about the windows in which nothing executed, and nothing was withheld."""
        wall, used = self.wall_ns - self._judged[0], self.executing_ns + self.withheld_ns - self._judged[1]
        return 1000 - used * 1000 // wall if wall else 0

    def restart_measurements(self) -> None:
        """Start new measurements, because the windows may change now."""
        self._judged = (self.wall_ns, self.executing_ns + self.withheld_ns)
        for pace in self.paces.values():
            pace.restart_measurements()

    # -- the fold ----------------------------------------------------------------------------------------------------

    def on_settled(self) -> None:
        if self.entry == 1:
            self.samples.clear()
            self._sample()
        elif self.now - self.samples[-1].now >= SAMPLE_NS:
            super().on_epoch(EpochEndedEvent(self.now))
            self._sample()
            self._retire()

    def _sample(self) -> None:
        run = {name: meter.run_ns for name, meter in self.meters.items() if meter.run_ns}
        self.samples.append(Sample(self.now, self.wall_ns, self.executing_ns, self.starving_ns, run))

    def _retire(self) -> None:
        while self._closed and self.now - self._closed[0][0] > KEEP_CLOSED_NS:
            _, name = self._closed.popleft()
            meter = self.meters.pop(name, None)
            if meter is not None:
                _add(self.retired.setdefault(meter.tenant, Meter(meter.tenant)), meter)

    def observe(self, event: Event, decisions: Sequence[Decision]) -> None:
        if not self.entry:
            self.now = self._epoch_began = event.at  # the executor's clock started long before its journal
        super().observe(event, decisions)
        if isinstance(event, SessionClosedEvent):
            name = event.session
            self._closed.append((self.now, name))
            self.longest.pop(name, None)
            self.paces.pop(name, None)
            self._arrivals.pop(name, None)

    def on_time(self, elapsed: int) -> None:
        super().on_time(elapsed)
        if self.busy > 1:
            self._shared_until = self.now + elapsed

    def on_epoch(self, event: EpochEndedEvent) -> None:
        self.epochs += 1
        self.restart_measurements()

    def on_done(self, flight: LaunchInFlight, event: LaunchDoneEvent) -> None:
        super().on_done(flight, event)
        name = flight.account.id
        for priority in range(min(flight.decision.priority, 2)):
            self._lower[priority] += event.gpu_ns
        if name in self.accounts:
            self.longest[name] = max(self.longest.get(name, 0), self._unbroken_ns(flight, event))

    def _unbroken_ns(self, flight: LaunchInFlight, event: LaunchDoneEvent) -> int:
        """How long the launch blocked a higher class: its whole time, or the time of its longest kernel if the launch can be
        stopped.
        """
        first, last = flight.decision.first, flight.decision.last if event.last < 0 else event.last
        if not self.stoppable or last - first < 2:
            return event.gpu_ns
        kernels = flight.work.estimates[first:last]
        return event.gpu_ns * max(kernels) // max(sum(kernels), 1)

    def on_submitted(self, account: Account, work: Work) -> None:
        priority = account.event.policy.priority
        if priority < 2 and len(account.work) == 1 and not account.in_flight and account.ready >= 0:
            self._arrivals.setdefault(account.id, {})[work.number] = self._lower[priority]

    def on_program_done(self, account: Account, work: Work) -> None:
        super().on_program_done(account, work)
        lower = self._arrivals.get(account.id, {}).pop(work.number, None)
        priority = account.event.policy.priority
        if lower is None or priority > 1:
            return
        pace = self.paces.setdefault(account.id, Pace())
        response = max(self.now - work.at, 0)
        pace.recent.add(response)
        pace.suffered.add(max(self._lower[priority] - lower, 0))
        if self._shared_until <= work.at:
            pace.alone.add(response)
            if pace.alone.count == ENOUGH:
                p99 = pace.alone.quantile(990)
                pace.best_ns = min(pace.best_ns or p99, p99)
                pace.alone = Histogram()


def _add(total: Meter, meter: Meter) -> None:
    for name in (
        "run_ns",
        "core_ns",
        "paid_ns",
        "ready_ns",
        "unjust_ns",
        "launches",
        "programs",
        "on_time",
        "with_objective",
    ):
        setattr(total, name, getattr(total, name) + getattr(meter, name))
