"""Decides which fault happens when. This is a pure function of a seed, so that a failed run can be repeated."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Kind = Literal["kill", "stop", "cut", "slow", "full", "clock", "restart"]
#: Relative frequency of each kind, among the kinds that the installation supports.
WEIGHTS: dict[Kind, int] = {"kill": 8, "stop": 5, "cut": 4, "slow": 3, "full": 2, "clock": 2, "restart": 3}
#: Minimum and maximum duration of a fault, in seconds. A kill ends with the start of the next process, and a restart with its own
#: end.
LASTS: dict[Kind, tuple[float, float]] = {
    "kill": (0.5, 4.0),
    "stop": (3.0, 20.0),
    "cut": (1.0, 12.0),
    "slow": (5.0, 20.0),
    "full": (5.0, 15.0),
    "clock": (5.0, 20.0),
    "restart": (0.0, 0.0),
}
#: Mean time between the beginnings of two faults, in seconds.
EVERY_S = 9.0
#: Time without faults at the beginning (until work runs) and at the end, in seconds.
QUIET_S = 15.0


@dataclass(frozen=True)
class Fault:
    """One fault: it begins `at_s` seconds after the start of the run and lasts `lasts_s` seconds.

    `amount`: delay of a link or shift of a clock, in seconds.
    """

    at_s: float
    kind: Kind
    target: str
    lasts_s: float
    amount: float = 0.0

    @property
    def until_s(self) -> float:
        """The end of the fault, in seconds after the start of the run."""
        return self.at_s + self.lasts_s


def draw(seed: int, minutes: float, targets: dict[Kind, tuple[str, ...]]) -> list[Fault]:
    """Return the faults of a run, in order of time. Two faults never affect one target, or two NATS servers, at the same time,
    because two of three servers must be alive.

    Args:
        seed: the same seed, minutes and targets give the same faults.
        minutes: length of the run.
        targets: possible targets of each kind of fault; kinds without targets do not happen.
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
    """Whether two faults must not overlap. Each target gets three seconds to recover."""
    if fault.at_s >= other.until_s + 3.0:
        return False
    return fault.target == other.target or (fault.target.startswith("nats") and other.target.startswith("nats"))
