"""Utilization, starvation, unjust wait, fairness and objective attainment, exactly: a fold over events and decisions.

Over the time observed, in integer ns:

- *utilization*: share of wall time in which the device executes, that is, in which a launch is in flight;
- *starvation*: share of wall time in which the device executes one session's program while another session's is ready (resident,
  not suspended, launched or not). High means well fed, never idle;
- *unjust wait*: time in which a session is ready while the rule says that it should have run: the device executes nothing, or a
  lower class was launched past it (P4's floor excepted) and it has not run since. It must be 0;
- *share error* of a class in an epoch: the largest difference between the share of GPU time that a session got of its class and
  the share its weight is of the class's, over the sessions that were ready throughout, in permille;
- *attainment*: programs whose response time (submitted to last kernel done) is within the session's objective, over all that it
  finished.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from wooly_dispatch.events import PRIORITIES, EpochEndedEvent, LaunchDoneEvent
from wooly_dispatch.ledger import Account, Airborne, Ledger, LedgerRecord, Work

_STEPS = 16


@dataclass(slots=True)
class Histogram:
    """Counts of times in buckets 1/16 of a power of two wide: quantiles to 6 %, any range, integers only."""

    count: int = 0
    buckets: dict[int, int] = field(default_factory=dict)

    def add(self, value: int) -> None:
        """Count `value` (not negative)."""
        shift = max(value.bit_length() - 5, 0)
        bucket = shift * _STEPS + (value >> shift)
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1
        self.count += 1

    def quantile(self, permille: int) -> int:
        """A value that `permille` of those counted do not exceed: the upper end of its bucket; 0 if none was counted."""
        wanted = (self.count * permille + 999) // 1000
        for bucket in sorted(self.buckets):
            wanted -= self.buckets[bucket]
            if wanted <= 0:
                shift = max(bucket // _STEPS - 1, 0)
                return ((bucket - shift * _STEPS + 1) << shift) - 1
        return 0


@dataclass(slots=True)
class Meter:
    """What one session used, waited for and got. Times in ns; `paid_ns`: device time of launches that occupied cores."""

    tenant: str
    run_ns: int = 0
    core_ns: int = 0
    paid_ns: int = 0
    ready_ns: int = 0
    unjust_ns: int = 0
    launches: int = 0
    programs: int = 0
    on_time: int = 0
    with_objective: int = 0
    responses: Histogram = field(default_factory=Histogram)

    @property
    def attainment_permille(self) -> int:
        """1000 where no objective was declared."""
        return self.on_time * 1000 // self.with_objective if self.with_objective else 1000


@dataclass(slots=True)
class ShareError:
    """The share error of one class: the worst epoch, and the sum over `epochs` of them, in permille."""

    worst: int = 0
    total: int = 0
    epochs: int = 0


@dataclass(frozen=True, slots=True)
class MetricsRecord:
    """`Metrics` as plain data, by the names of its attributes."""

    ledger: LedgerRecord
    meters: dict[str, Meter]
    wall_ns: int
    executing_ns: int
    starving_ns: int
    run_ns: int
    shares: list[ShareError]
    ready_since: dict[str, int]
    wronged: dict[str, int]
    epoch_run: dict[str, int]
    epoch_began: int


class Metrics(Ledger):
    """Meters of every session that was ever open, and of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.meters: dict[str, Meter] = {}
        self.wall_ns = 0
        self.executing_ns = 0
        self.starving_ns = 0
        self.run_ns = 0
        self.shares = [ShareError() for _ in range(PRIORITIES)]
        self._ready_since: dict[str, int] = {}
        self._wronged: dict[str, int] = {}  # ready sessions that were passed, and since when
        self._epoch_run: dict[str, int] = {}
        self._epoch_began = 0

    @property
    def utilization_permille(self) -> int:
        return self.executing_ns * 1000 // self.wall_ns if self.wall_ns else 0

    @property
    def starvation_permille(self) -> int:
        return self.starving_ns * 1000 // self.wall_ns if self.wall_ns else 0

    @property
    def unjust_ns(self) -> int:
        return sum(meter.unjust_ns for meter in self.meters.values())

    def by_tenant(self) -> dict[str, Meter]:
        """The sums over each tenant's sessions (without response times, which do not add up)."""
        found: dict[str, Meter] = {}
        for meter in self.meters.values():
            total = found.setdefault(meter.tenant, Meter(meter.tenant))
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
        return found

    # -- records -----------------------------------------------------------------------------------------------------

    def metrics_record(self) -> MetricsRecord:
        """All of it as plain data. The record shares tables with this object: encode it before the next event."""
        return MetricsRecord(
            self.record(), self.meters, self.wall_ns, self.executing_ns, self.starving_ns, self.run_ns, self.shares,
            self._ready_since, self._wronged, self._epoch_run, self._epoch_began,
        )  # fmt: skip

    def take_up_metrics(self, record: MetricsRecord) -> None:
        """Be what `record` describes.

        Raises:
            LookupError: the record contradicts itself.
        """
        self.take_up(record.ledger)
        if len(record.shares) != PRIORITIES:
            raise LookupError(f"the record has {len(record.shares)} classes, not {PRIORITIES}")
        self.meters, self.shares = record.meters, record.shares
        self.wall_ns, self.executing_ns = record.wall_ns, record.executing_ns
        self.starving_ns, self.run_ns = record.starving_ns, record.run_ns
        self._ready_since, self._wronged = record.ready_since, record.wronged
        self._epoch_run, self._epoch_began = record.epoch_run, record.epoch_began

    # -- the fold ----------------------------------------------------------------------------------------------------

    def on_time(self, elapsed: int) -> None:
        self.wall_ns += elapsed
        if self.airborne:
            self.executing_ns += elapsed
            if self.busy > 1:
                self.starving_ns += elapsed
        else:
            for account in self._all_ready():
                self._meter(account).unjust_ns += elapsed
                if account.id in self._wronged:
                    self._wronged[account.id] += elapsed  # counted already

    def on_launched(self, flight: Airborne) -> None:
        account, decision = flight.account, flight.decision
        meter = self._meter(account)
        meter.launches += 1
        since = self._wronged.pop(account.id, None)
        if since is not None:
            meter.unjust_ns += self.now - since
        spared = (2, 3) if decision.floor else ()
        for priority in range(decision.priority):
            if priority not in spared:
                for passed in self.ready[priority]:
                    self._wronged.setdefault(passed, self.now)

    def on_done(self, flight: Airborne, event: LaunchDoneEvent) -> None:
        meter = self._meter(flight.account)
        meter.run_ns += event.gpu_ns
        meter.core_ns += event.core_ns
        meter.paid_ns += event.gpu_ns if event.core_ns else 0
        self.run_ns += event.gpu_ns
        run = self._epoch_run
        run[flight.account.id] = run.get(flight.account.id, 0) + event.gpu_ns

    def on_program_done(self, account: Account, work: Work) -> None:
        meter = self._meter(account)
        response = max(self.now - work.at, 0)
        meter.programs += 1
        meter.responses.add(response)
        objective = account.event.policy.objective_ns
        if objective:
            meter.with_objective += 1
            meter.on_time += response <= objective

    def on_ready(self, account: Account, before: int) -> None:
        if before >= 0:
            self._meter(account).ready_ns += self.now - self._ready_since.pop(account.id)
            since = self._wronged.pop(account.id, None)
            if since is not None:
                self._meter(account).unjust_ns += self.now - since
        if account.ready >= 0:
            self._ready_since[account.id] = self.now

    def on_epoch(self, event: EpochEndedEvent) -> None:
        for priority, ready in enumerate(self.ready):
            steady = [a for a in ready.values() if self._ready_since[a.id] <= self._epoch_began]
            total = sum(self._epoch_run.get(a.id, 0) for a in steady)
            weights = sum(a.event.policy.weight for a in steady)
            if len(steady) < 2 or not total:
                continue
            worst = max(
                abs(self._epoch_run.get(a.id, 0) * weights - a.event.policy.weight * total) * 1000 // (total * weights)
                for a in steady
            )
            share = self.shares[priority]
            share.worst = max(share.worst, worst)
            share.total += worst
            share.epochs += 1
        self._epoch_run = {}
        self._epoch_began = self.now

    def _meter(self, account: Account) -> Meter:
        found = self.meters.get(account.id)
        if found is None:
            found = self.meters[account.id] = Meter(account.event.tenant)
        return found

    def _all_ready(self) -> Iterable[Account]:
        for ready in self.ready:
            yield from ready.values()
