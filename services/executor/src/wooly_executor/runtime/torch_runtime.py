"""A runtime whose library is torch, on whatever device. Tier 0: instruction by instruction, prepared once per program.

A prepared program is a flat list of steps over registers. Operators' results are adopted as buffers without a copy; a buffer that
is allocated and freed inside the program never becomes one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from wooly_wis.program import Program
from wooly_wis.verifier import ProgramFacts

from wooly_executor.bounds import Bounds
from wooly_executor.bounds.limits import default_limits
from wooly_executor.runtime.buffers import Buffer
from wooly_executor.runtime.device import TorchDevice
from wooly_executor.runtime.execution import StepExecution
from wooly_executor.runtime.foreign import Foreign
from wooly_executor.runtime.preparation import prepare_acts
from wooly_executor.runtime.prepared import PreparedProgram, acts_of
from wooly_executor.runtime.protocol import Execution, Outcome

#: Runs after which a program's steps are put together: most programs are run once or twice.
HOT = 16


class TorchRuntime:
    """Executes WIS with torch on one device.

    Args:
        device: where.
        hot: runs after which a program's steps are put together.
    """

    def __init__(self, device: TorchDevice, hot: int = HOT) -> None:
        self._hot = hot
        self.beyond_ns = 0
        self.device = device
        self.foreign = Foreign()
        self.bounds = Bounds(default_limits(host=device.host, cores=torch.get_num_threads()))

    def allocate(self, nbytes: int) -> Buffer:
        """Zeroed memory."""
        return Buffer(nbytes, self.device.zeroed(nbytes))

    def prepare(self, program: Program, facts: ProgramFacts) -> Any:
        """Lay out the steps of a verified program.

        Raises:
            OperationError: an operator is not available here.
            TooMuchWorkError: an instruction is more than the device allows.
        """
        return prepare_acts(program, facts, acts_of(program), self.foreign, self.device, self.bounds.pieces(program))

    def begin(
        self, prepared: Any, buffers: dict[int, Buffer], bindings: Sequence[int], params: Sequence[Any]
    ) -> Execution:
        """See `Runtime.begin`."""
        self.heat(prepared)
        return StepExecution(prepared, buffers, bindings, params)

    def heat(self, prepared: PreparedProgram) -> None:
        """A prepared program is run once more."""
        prepared.runs += 1
        if prepared.runs == self._hot:
            prepared.heat(always=not self.device.host)

    def run(self, prepared: Any, buffers: dict[int, Buffer], bindings: Sequence[int], params: Sequence[Any]) -> Outcome:
        """All of a run at once."""
        execution = self.begin(prepared, buffers, bindings, params)
        execution.advance((prepared.end,))
        return execution.outcome
