"""Everything the core can answer. Whoever feeds the events carries the decisions out, in order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(
    slots=True
)  # not frozen: one is made per launch, and that would cost four times as much. Nothing changes one.
class LaunchDecision:
    """Put kernels `first` to `last - 1` of a program on the device, and report the launch done with its measured time.

    Attributes:
        launch: 1, 2, 3, …: the order of launches on this device.
        priority: The class in which it was chosen: the session's, or 2 for a program beyond the bucket of P0 or P1.
        estimate_ns: What it counts for in the window until it is done.
        floor: Whether this was P4's turn by its floor, with P2 or P3 waiting.
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
    """This session's turn has come and its memory is not on the device: bring it. Others run meanwhile."""

    session: str


@dataclass(frozen=True, slots=True)
class DemoteDecision:
    """This program is beyond what its P0 or P1 session may use, and runs as P2."""

    session: str
    program: int


@dataclass(frozen=True, slots=True)
class RefuseDecision:
    """The event changed nothing, for this reason."""

    reason: str


Decision = LaunchDecision | SwapInDecision | DemoteDecision | RefuseDecision
