"""The state of one run of a prepared program: registers, memory, and the run's outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from wooly_executor.runtime.buffers import Buffer
from wooly_executor.runtime.protocol import Outcome


class Frame:
    """The state of one run."""

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


Step = Callable[[Frame], None]
