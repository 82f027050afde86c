"""The state of one run of a prepared program: registers, memory, and the run's outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from wooly_executor.runtime.buffers import Buffer
from wooly_executor.runtime.protocol import Outcome


class Frame:
    """The state of one run.

    Its tensors have names: a register is its own name, and the memory of a slot has the name ~slot.
    """

    __slots__ = (
        *("__weakref__", "bases", "bindings", "buffers", "elsewhere_ns", "kernel_ns", "outcome", "params", "registers"),
    )

    def __init__(
        self, buffers: dict[int, Buffer], bindings: Sequence[int], params: Sequence[Any], n_registers: int
    ) -> None:
        self.buffers = buffers
        self.bindings = bindings
        self.params = params
        self.registers: list[Any] = [None] * n_registers
        self.bases: list[Any] = [None] * len(bindings)
        self.outcome = Outcome()
        #: Device time of generated kernels in ns, and the part of it that other threads took.
        self.kernel_ns = 0
        self.elsewhere_ns = 0

    def held(self, names: Iterable[int]) -> dict[int, Tensor]:
        """Return the tensors with some names, without those that are empty."""
        registers, bases = self.registers, self.bases
        return {k: t for k in names if (t := registers[k] if k >= 0 else bases[~k]) is not None}

    def put(self, tensors: Iterable[tuple[int, Tensor | None]]) -> None:
        """Set the tensors with some names."""
        registers, bases = self.registers, self.bases
        for name, tensor in tensors:
            if name >= 0:
                registers[name] = tensor
            else:
                bases[~name] = tensor


Step = Callable[[Frame], None]
