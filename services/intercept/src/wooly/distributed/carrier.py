"""What a carrier of collectives is. Tensors are flat here: one dimension, dense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from wooly_wis.collectives import Reduction, What


@dataclass(frozen=True, eq=False, slots=True)
class Work:
    """One rank's part in a collective, as `wooly_wis.collectives.Collective` describes it, with tensors in place of ranges.

    Attributes:
        what: what the ranks do.
        reads: the tensors that this rank reads.
        writes: the tensors that this rank writes.
        reduction: how elements are reduced.
        root: the rank that gives or gets everything.
        factor: the factor of PREMUL_SUM.
        peers: of an exchange: the other rank of each tensor, those of `reads` first.
        timeout_s: maximum time to wait for other ranks; None: the group's timeout.
        awaited: the caller waits for it next (`Carrier.wait`).
    """

    what: What
    reads: Sequence[Tensor] = ()
    writes: Sequence[Tensor] = ()
    reduction: Reduction = Reduction.NONE
    root: int = 0
    factor: float = 1.0
    peers: Sequence[int] = ()
    timeout_s: float | None = None
    awaited: bool = False


class Carrier(Protocol):
    """Carries the collectives of one group."""

    def carry(self, work: Work) -> None:
        """Do this rank's part. It may return before the other ranks have done theirs, if later operations wait for it."""

    def wait(self) -> None:
        """Wait for the collectives so far.

        Raises:
            RuntimeError: one of them failed.
        """

    def leave(self) -> None:
        """Leave the group."""
