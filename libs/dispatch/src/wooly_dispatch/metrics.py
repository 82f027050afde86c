"""Utilization, starvation, unjust wait, fairness and objective attainment, computed exactly from events and decisions.

The definitions, over the observed time, in integer ns:

- *utilization*: share of wall time in which the device executes, that is, in which a launch is in flight;
- *starvation*: share of wall time in which the device executes a program of one session while another session is ready (resident
  and
  not suspended). A high value means that the device is never short of work;
- *unjust wait*: time in which a session is ready and the rule says that it should have run: the device executes nothing, or a
  lower
  class was launched before the session (except by P4's floor) and the session has not run since. It must be 0;
- *withheld time*: time in which a session is ready, and the rule keeps the device idle for the next program of P0 or P1. It is
  nobody's usage, and it is not unjust;
- *share error* of a class in an epoch: the largest difference, in permille, between a session's share of the class's GPU time and
  its
  share of the class's weights, over the sessions that were ready during the whole epoch;
- *attainment*: share of a session's finished programs whose response time (from submission to the end of the last kernel) is
  within
  the session's objective.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from wooly_dispatch.events import PRIORITIES, EpochEndedEvent, LaunchDoneEvent
from wooly_dispatch.ledger import Account, LaunchInFlight, Ledger, LedgerRecord, Work

_STEPS = 16


@dataclass(slots=True)
class Histogram:
    """A histogram of times. A bucket is 1/16 of a power of two wide, so quantiles are exact to 6 %. Integers only."""

    count: int = 0
    buckets: dict[int, int] = field(default_factory=dict)

    def add(self, value: int) -> None:
        """Count `value`, which must not be negative."""
        shift = max(value.bit_length() - 5, 0)
        bucket = shift * _STEPS + (value >> shift)
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1
        self.count += 1

    def quantile(self, permille: int) -> int:
        """The upper end of the bucket with this quantile; 0 if the histogram is empty."""
        wanted = (self.count * permille + 999) // 1000
        for bucket in sorted(self.buckets):
            wanted -= self.buckets[bucket]
            if wanted <= 0:
                shift = max(bucket // _STEPS - 1, 0)
                return ((bucket - shift * _STEPS + 1) << shift) - 1
        return 0


@dataclass(slots=True)
class Meter:
    """The usage and the waiting time of one session. Times are in ns. `paid_ns`: device time of launches that occupied cores."""

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
        """Share of programs within the objective; 1000 if the session declares no objective."""
        return self.on_time * 1000 // self.with_objective if self.with_objective else 1000


@dataclass(slots=True)
class ShareError:
    """The share error of one class, in permille: the worst epoch, and the sum over all `epochs`."""

    worst: int = 0
    total: int = 0
    epochs: int = 0


@dataclass(frozen=True, slots=True)
class MetricsRecord:
    """`Metrics` as plain data, with the same attribute names."""

    ledger: LedgerRecord
    meters: dict[str, Meter]
    wall_ns: int
    executing_ns: int
    starving_ns: int
    withheld_ns: int
    run_ns: int
    shares: list[ShareError]
    ready_since: dict[str, int]
    wronged: dict[str, int]
    epoch_run: dict[str, int]
    epoch_began: int


class Metrics(Ledger):
    """Meters of the device, and of every session that was ever open."""

    def __init__(self) -> None:
        super().__init__()
        self.meters: dict[str, Meter] = {}
        self.wall_ns = 0
        self.executing_ns = 0
        self.starving_ns = 0
        self.withheld_ns = 0
        self.run_ns = 0
        self.shares = [ShareError() for _ in range(PRIORITIES)]
        self._ready_since: dict[str, int] = {}
        self._passed_over: dict[str, int] = {}  # passed-over sessions that are ready, and since when
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
        """The sums over each tenant's sessions. Response times are omitted, because they cannot be added."""
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
        """All state as plain data. The record shares tables with this object: encode the record before the next event."""
        return MetricsRecord(
            self.record(), self.meters, self.wall_ns, self.executing_ns, self.starving_ns, self.withheld_ns,
            self.run_ns, self.shares, self._ready_since, self._passed_over, self._epoch_run, self._epoch_began,
        )  # fmt: skip

    def load_metrics_record(self, record: MetricsRecord) -> None:
        """Replace the state by that of `record`.

        Raises:
            LookupError: the record is inconsistent.
        """
        self.load_record(record.ledger)
        if len(record.shares) != PRIORITIES:
            raise LookupError(f"the record has {len(record.shares)} classes, but must have {PRIORITIES}")
        self.meters, self.shares = record.meters, record.shares
        self.wall_ns, self.executing_ns = record.wall_ns, record.executing_ns
        self.starving_ns, self.withheld_ns, self.run_ns = record.starving_ns, record.withheld_ns, record.run_ns
        self._ready_since, self._passed_over = record.ready_since, record.wronged
        self._epoch_run, self._epoch_began = record.epoch_run, record.epoch_began

    # -- the fold ----------------------------------------------------------------------------------------------------

    def on_time(self, elapsed: int) -> None:
        self.wall_ns += elapsed
        if self.airborne:
            self.executing_ns += elapsed
            if self.busy > 1:
                self.starving_ns += elapsed
        elif self.withheld_until:
            self.withheld_ns += elapsed if any(self.ready) else 0
        else:
            for account in self._all_ready():
                self._meter(account).unjust_ns += elapsed
                if account.id in self._passed_over:
                    self._passed_over[account.id] += elapsed  # this time is already counted above

    def on_launched(self, flight: LaunchInFlight) -> None:
        account, decision = flight.account, flight.decision
        meter = self._meter(account)
        meter.launches += 1
        since = self._passed_over.pop(account.id, None)
        if since is not None:
            meter.unjust_ns += self.now - since
        spared = (2, 3) if decision.floor else ()
        for priority in range(decision.priority):
            if priority not in spared:
                for passed in self.ready[priority]:
                    self._passed_over.setdefault(passed, self.now)

    def on_done(self, flight: LaunchInFlight, event: LaunchDoneEvent) -> None:
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
            since = self._passed_over.pop(account.id, None)
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
