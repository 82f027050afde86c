"""The price of usage. Integers only: amounts are in micro-credits (UCR), rates in millionths of a credit.

    core credits = sum of cores * milliseconds * pace * core rate
    VRAM credits = sum of MiB * seconds * pace * VRAM rate while the session executes
                 + sum of MiB * seconds * idle rate while it does not

A core-nanosecond is a millionth of a core-millisecond, a MiB-microsecond a millionth of a MiB-second. So at a rate of one credit
and at full pace, a quantity equals its amount in micro-credits. Each of an entry's two amounts is rounded down once, to a whole
micro-credit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

#: Micro-credits per credit; also the rate of one credit per core-millisecond or MiB-second.
UNIT = 1_000_000


@dataclass(frozen=True, slots=True)
class TariffPlan:
    """Prices for a kind of device and a class, for a span of time.

    Attributes:
        device_kind: empty: any kind.
        priority: None: any class.
        valid_from_us: first microsecond since 1970 at which the plan is valid.
        valid_until_us: first microsecond at which the plan is no longer valid; None: no end.
        core_rate: price per core-millisecond.
        vram_rate: price per MiB-second while the session executes.
        idle_rate: price per MiB-second while the session does not execute.
    """

    id: int
    name: str = ""
    device_kind: str = ""
    priority: int | None = None
    valid_from_us: int = 0
    valid_until_us: int | None = None
    core_rate: int = UNIT
    vram_rate: int = UNIT
    idle_rate: int = 0


#: The plan for usage without a matching plan: all rates are one credit.
PLAIN = TariffPlan(0, "plain")


class Usage(Protocol):
    """The quantities of usage that have a price."""

    @property
    def core_ns(self) -> int:
        """Device time in nanoseconds times the number of occupied cores."""
        ...

    @property
    def pace_ppm(self) -> int:
        """Speed of the cores, in millionths."""
        ...

    @property
    def resident_mib_us(self) -> int:
        """Resident MiB times microseconds of the session's own device time."""
        ...

    @property
    def idle_mib_us(self) -> int:
        """Resident MiB times all other microseconds."""
        ...


class Tariff:
    """All plans. The plan with the most specific kind and class is used; among these the latest start; among these the last
    added.
    """

    def __init__(self, plans: Iterable[TariffPlan]) -> None:
        self.plans = sorted(
            plans,
            key=lambda p: (p.device_kind != "", p.priority is not None, p.valid_from_us, p.id),
            reverse=True,
        )
        self._found: dict[tuple[str, int], list[TariffPlan]] = {}

    def plan(self, device_kind: str, priority: int, at_us: int) -> TariffPlan:
        """The plan for usage that began at `at_us`."""
        key = device_kind, priority
        fitting = self._found.get(key)
        if fitting is None:
            fitting = [p for p in self.plans if p.device_kind in ("", device_kind) and p.priority in (None, priority)]
            self._found[key] = fitting
        for plan in fitting:
            if plan.valid_from_us <= at_us and (plan.valid_until_us is None or at_us < plan.valid_until_us):
                return plan
        return PLAIN


def price(usage: Usage, plan: TariffPlan, repeated_core_ns: int = 0) -> tuple[int, int]:
    """Core and VRAM credits for usage, in micro-credits.

    Args:
        usage: the usage.
        plan: the prices.
        repeated_core_ns: the part of the core time that is free, because it repeated lost work.
    """
    core = (usage.core_ns - repeated_core_ns) * usage.pace_ppm * plan.core_rate // (UNIT * UNIT)
    resident = usage.resident_mib_us * usage.pace_ppm * plan.vram_rate
    vram = (resident + usage.idle_mib_us * plan.idle_rate * UNIT) // (UNIT * UNIT)
    return core, vram


def text(ucr: int) -> str:
    """An amount as text: credits with six decimals."""
    sign, ucr = ("-", -ucr) if ucr < 0 else ("", ucr)
    return f"{sign}{ucr // UNIT}.{ucr % UNIT:06d}"
