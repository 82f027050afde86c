"""The decisions that the core returns. The caller carries them out in order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(
    slots=True
)  # not frozen, because creation (once per launch) would cost four times as much; still, nothing may change it
class LaunchDecision:
    """Run kernels `first` to `last - 1` of a program on the device; report the end of the launch with its measured time.

    Attributes:
        launch: 1, 2, 3, …: number of the launch on this device.
        priority: class of the launch: the session's class, or 2 for a program beyond the bucket of P0 or P1.
        estimate_ns: time that counts in the window until the launch is done.
        floor: whether the launch is P4's because of P4's floor, while P2 or P3 waited.
    """

    launch: int
    session: str
    program: int
    first: int
    last: int
    priority: int
    estimate_ns: int
    floor: bool = False


@dataclass(frozen=True, slots=True)
class SwapInDecision:
    """It is this session's turn, but its memory is not on the device: swap the session in. Other sessions run in the meantime."""

    session: str


@dataclass(frozen=True, slots=True)
class DemoteDecision:
    """This program exceeds the bucket of its P0 or P1 session, so it runs as P2."""

    session: str
    program: int


@dataclass(frozen=True, slots=True)
class WithholdDecision:
    """Launch nothing until the time `until`, because a P0 or P1 session will probably submit a program before then. If no launch
    is decided by that time, feed a `WithheldEvent`.
    """

    until: int


@dataclass(frozen=True, slots=True)
class RefuseDecision:
    """The event was invalid and changed nothing. `reason` says why. Journals have its text, and a replay compares it."""

    reason: str


Decision = LaunchDecision | SwapInDecision | DemoteDecision | WithholdDecision | RefuseDecision
