"""What usage costs. Integers alone: an amount is in micro-credits (UCR), a rate in millionths of a credit.

    core credits = sum of cores * milliseconds * pace * core rate
    VRAM credits = sum of MiB * seconds * pace * VRAM rate while the session executes
                 + sum of MiB * seconds * idle rate while it does not

A core-nanosecond is a millionth of a core-millisecond, a MiB-microsecond a millionth of a MiB-second: at a rate of one credit and
full pace a quantity is its own amount in micro-credits. Each entry is rounded down to a whole micro-credit, once for each of its
two amounts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

#: Micro-credits in a credit, and the rate of one credit per core-millisecond or MiB-second.
UNIT = 1_000_000


@dataclass(frozen=True, slots=True)
class TariffPlan:
    """Prices on a kind of device and in a class, from a moment on.

    Attributes:
        device_kind: empty: any.
        priority: None: any class.
        valid_from_us: the first microsecond since 1970 at which it holds.
        valid_until_us: the first at which it does not any more; None: it holds on.
        core_rate: per core-millisecond.
        vram_rate: per MiB-second while the session executes.
        idle_rate: per MiB-second while it does not.
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


#: Where no plan fits: every credit at its plain price.
PLAIN = TariffPlan(0, "plain")


class Usage(Protocol):
    """What is priced."""

    @property
    def core_ns(self) -> int:
        """Cores times nanoseconds."""
        ...

    @property
    def pace_ppm(self) -> int:
        """How fast the cores were, in millionths."""
        ...

    @property
    def resident_mib_us(self) -> int:
        """MiB times microseconds of its own device time."""
        ...

    @property
    def idle_mib_us(self) -> int:
        """MiB times other microseconds."""
        ...


class Tariff:
    """All plans. What names most of kind and class holds; of two such, what began last, then what was added last."""

    def __init__(self, plans: Iterable[TariffPlan]) -> None:
        self.plans = sorted(
            plans,
            key=lambda p: (p.device_kind != "", p.priority is not None, p.valid_from_us, p.id),
            reverse=True,
        )
        self._found: dict[tuple[str, int], list[TariffPlan]] = {}

    def plan(self, device_kind: str, priority: int, at_us: int) -> TariffPlan:
        """The plan that holds for usage that began then."""
        key = device_kind, priority
        fitting = self._found.get(key)
        if fitting is None:
            fitting = [p for p in self.plans if p.device_kind in ("", device_kind) and p.priority in (None, priority)]
            self._found[key] = fitting
        for plan in fitting:
            if plan.valid_from_us <= at_us and (plan.valid_until_us is None or at_us < plan.valid_until_us):
                return plan
        return PLAIN


def price(usage: Usage, plan: TariffPlan) -> tuple[int, int]:
    """Core and VRAM credits of a usage, in micro-credits."""
    core = usage.core_ns * usage.pace_ppm * plan.core_rate // (UNIT * UNIT)
    resident = usage.resident_mib_us * usage.pace_ppm * plan.vram_rate
    vram = (resident + usage.idle_mib_us * plan.idle_rate * UNIT) // (UNIT * UNIT)
    return core, vram


def text(ucr: int) -> str:
    """An amount for people and files: credits with all six decimals."""
    sign, ucr = ("-", -ucr) if ucr < 0 else ("", ucr)
    return f"{sign}{ucr // UNIT}.{ucr % UNIT:06d}"
