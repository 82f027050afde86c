"""Budgets: when a tenant has reached a limit, and where a budget's period begins."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

DAY_US = 86_400_000_000


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a tenant's spending in a period, in micro-credits. None: no such limit.

    At the `soft` limit, an event is published. At the `hard` limit, the tenant's sessions are suspended. `period`: `day` and
    `month` are those of the UTC calendar, `total` is all time.
    """

    tenant: str
    period: str = "total"
    soft_ucr: int | None = None
    hard_ucr: int | None = None

    def held(self, spent_ucr: int) -> bool:
        """Whether the tenant's sessions must be suspended."""
        return self.hard_ucr is not None and spent_ucr >= self.hard_ucr

    def reached(self, spent_ucr: int) -> str:
        """The highest reached limit: "hard", "soft" or ""."""
        if self.held(spent_ucr):
            return "hard"
        return "soft" if self.soft_ucr is not None and spent_ucr >= self.soft_ucr else ""


def period_begin_us(period: str, now_us: int) -> int:
    """Start of a budget's current period, in microseconds since 1970."""
    if period == "day":
        return now_us - now_us % DAY_US
    if period == "month":
        now = datetime.datetime.fromtimestamp(now_us // 1_000_000, datetime.UTC)
        first = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
        return int(first.timestamp()) * 1_000_000
    return 0
