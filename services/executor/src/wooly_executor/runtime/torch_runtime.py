"""The base of the runtimes that use torch as their library. Tier 0: instruction by instruction, prepared once per program.

A prepared program is a flat list of steps on registers. Results of operators become buffers without a copy. A result that the
program allocates and frees itself never becomes a buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from wooly_wis.program import Program
from wooly_wis.verifier import ProgramFacts

from wooly_executor.bounds import Bounds
from wooly_executor.bounds.limits import default_limits
from wooly_executor.runtime.acts import acts_of
from wooly_executor.runtime.buffers import Buffer
from wooly_executor.runtime.combining import most_held
from wooly_executor.runtime.device import TorchDevice
from wooly_executor.runtime.execution import StepExecution
from wooly_executor.runtime.families import Families, outline_of
from wooly_executor.runtime.foreign import Foreign
from wooly_executor.runtime.preparation import prepare_acts, prepare_like
from wooly_executor.runtime.prepared import PreparedProgram
from wooly_executor.runtime.protocol import Execution, Outcome
from wooly_executor.runtime.similar import Similar
from wooly_executor.runtime.sparse import operators as _sparse_operators  # noqa: F401 - registers their kernels

#: Number of runs after which a program's steps are combined. Most programs run only once or twice.
HOT = 16


class TorchRuntime:
    """Runs programs with torch on one device.

    Args:
        device: the device.
        hot: number of runs after which a program's steps are combined.

    Attributes:
        defers: whether a program's steps are combined later (`PreparedProgram.later`), and not while it begins.
    """

    def __init__(self, device: TorchDevice, hot: int = HOT) -> None:
        self._hot = hot
        self.extra_core_ns = 0
        self.defers = False
        self.device = device
        self.foreign = Foreign()
        self._families, self._similar = Families(), Similar()
        self.bounds = Bounds(default_limits(host=device.host, cores=torch.get_num_threads()))

    def allocate(self, nbytes: int) -> Buffer:
        """Allocate a buffer of zeroed memory."""
        return Buffer(nbytes, self.device.zeroed(nbytes))

    def settle(self) -> None:
        """See `Runtime.settle`. Nothing is in flight when a run returns."""

    def prepare(self, program: Program, facts: ProgramFacts, notes: Sequence[dict[str, Any]] = ()) -> Any:
        """Prepare the steps of a verified program. See `Runtime.prepare`.

        Raises:
            OperationError: an operator is not available on this device.
            TooMuchWorkError: an instruction exceeds the limits of the device.
        """
        pieces = self.bounds.pieces(program)
        if pieces or not self.device.host:
            return prepare_acts(program, facts, acts_of(program, notes), self.foreign, self.device, pieces)
        like = self._similar.to(program)
        acts = acts_of(program, notes, like.acts if like is not None else ())
        prepared, steps = prepare_like(program, facts, acts, self.foreign, self.device, like)
        if not prepared.foreign:  # steps of foreign kernels belong to one program
            self._similar.keep(program, steps)
            self._find_family(prepared)
        return prepared

    def _find_family(self, prepared: PreparedProgram) -> None:
        """Set the family of a program: those that differ from it in sizes only."""
        found = outline_of(
            prepared.acts,
            prepared.traces,
            prepared.owner,
            most_held(on_gpu=False),
            tuple(prepared.slot_of),
            tuple([(slot, register) for slot, register, _, _ in prepared.kept]),
            tuple([slot for slot, _ in prepared.made]),
        )
        if found is not None:
            outline, prepared.sizes = found
            prepared.family = self._families.of(outline, len(prepared.steps))

    def begin(
        self,
        prepared: Any,
        buffers: dict[int, Buffer],
        bindings: Sequence[int],
        params: Sequence[Any],
        *,
        single: bool = False,
    ) -> Execution:
        """See `Runtime.begin`."""
        self.heat(prepared)
        return StepExecution(prepared, buffers, bindings, params, single=single)

    def heat(self, prepared: PreparedProgram) -> None:
        """Count a run of a prepared program, and combine its steps when it becomes hot."""
        prepared.runs += 1
        prepared.defers = self.defers
        if prepared.runs == self._hot:
            if not prepared.asked:
                prepared.heat(graphs=not self.device.host)
        elif prepared.settled and prepared.completed and not prepared.asked and prepared.runs < self._hot:
            # a run has shown the layouts of results, and the edges stay where they are
            family = prepared.family
            if family is not None and family.learned != prepared.tried:
                prepared.heat(early=True)

    def run(self, prepared: Any, buffers: dict[int, Buffer], bindings: Sequence[int], params: Sequence[Any]) -> Outcome:
        """Run a program from begin to end."""
        execution = self.begin(prepared, buffers, bindings, params)
        execution.advance((prepared.end,))
        return execution.outcome
