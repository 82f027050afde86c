"""When a tenant has spent what it may, and what then holds."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

DAY_US = 86_400_000_000


@dataclass(frozen=True, slots=True)
class Budget:
    """What a tenant may spend in a period, in micro-credits: `soft` is told, `hard` stops its sessions. None: no such limit.

    `period`: `day` and `month` are those of UTC's calendar, `total` is all time.
    """

    tenant: str
    period: str = "total"
    soft_ucr: int | None = None
    hard_ucr: int | None = None

    def held(self, spent_ucr: int) -> bool:
        """Whether its sessions must stop."""
        return self.hard_ucr is not None and spent_ucr >= self.hard_ucr

    def reached(self, spent_ucr: int) -> str:
        """The highest limit that is reached: hard, soft, or none."""
        if self.held(spent_ucr):
            return "hard"
        return "soft" if self.soft_ucr is not None and spent_ucr >= self.soft_ucr else ""


def period_begin_us(period: str, now_us: int) -> int:
    """Where a budget's period began, in microseconds since 1970."""
    if period == "day":
        return now_us - now_us % DAY_US
    if period == "month":
        now = datetime.datetime.fromtimestamp(now_us // 1_000_000, datetime.UTC)
        first = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
        return int(first.timestamp()) * 1_000_000
    return 0
