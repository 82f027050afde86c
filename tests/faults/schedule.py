"""Which fault comes when: a pure function of a seed, so that a run which found something can be run again."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Kind = Literal["kill", "stop", "cut", "slow", "full", "clock", "restart"]
#: How often each kind comes, among those that the installation can have.
WEIGHTS: dict[Kind, int] = {"kill": 8, "stop": 5, "cut": 4, "slow": 3, "full": 2, "clock": 2, "restart": 3}
#: Seconds that a fault lasts at least and at most; a kill ends with the start of the next process, a restart with its own.
LASTS: dict[Kind, tuple[float, float]] = {
    "kill": (0.5, 4.0),
    "stop": (3.0, 20.0),
    "cut": (1.0, 12.0),
    "slow": (5.0, 20.0),
    "full": (5.0, 15.0),
    "clock": (5.0, 20.0),
    "restart": (0.0, 0.0),
}
#: Seconds between the beginnings of two faults, on average.
EVERY_S = 9.0
#: Seconds without faults at the beginning (until work runs) and at the end.
QUIET_S = 15.0


@dataclass(frozen=True)
class Fault:
    """One fault: from `at_s` seconds after the beginning, for `lasts_s` seconds.

    `amount`: seconds by which a link is slowed or a clock is moved.
    """

    at_s: float
    kind: Kind
    target: str
    lasts_s: float
    amount: float = 0.0

    @property
    def until_s(self) -> float:
        """When it is over."""
        return self.at_s + self.lasts_s


def draw(seed: int, minutes: float, targets: dict[Kind, tuple[str, ...]]) -> list[Fault]:
    """The faults of a run, by time. No two on one target at once, and never two NATS servers at once: two of three must live.

    Args:
        seed: the same seed, minutes and targets give the same faults.
        minutes: length of the run.
        targets: what each kind of fault can meet; kinds without targets do not come.
    """
    chance = random.Random(seed)
    kinds = [kind for kind in WEIGHTS if targets.get(kind)]
    faults: list[Fault] = []
    at = QUIET_S
    while True:
        at += chance.expovariate(1 / EVERY_S)
        kind = chance.choices(kinds, [WEIGHTS[k] for k in kinds])[0]
        target = chance.choice(targets[kind])
        lasts = chance.uniform(*LASTS[kind])
        amount = {"slow": chance.uniform(0.05, 0.4), "clock": chance.choice((-1, 1)) * chance.uniform(10, 3600)}
        if at + lasts > minutes * 60 - QUIET_S:
            return faults
        fault = Fault(round(at, 3), kind, target, round(lasts, 3), round(amount.get(kind, 0.0), 3))
        if not any(_together(fault, other) for other in faults):
            faults.append(fault)


def _together(fault: Fault, other: Fault) -> bool:
    """Whether two faults may not be at once: each leaves its target three seconds to come back."""
    if fault.at_s >= other.until_s + 3.0:
        return False
    return fault.target == other.target or (fault.target.startswith("nats") and other.target.startswith("nats"))
