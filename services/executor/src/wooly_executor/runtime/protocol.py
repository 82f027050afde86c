"""What a runtime offers to the device loop. Implementations: `torch_cpu`, `reference`; later OpenCL, CUDA, HIP, simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from wooly_wis.program import Program
from wooly_wis.verifier import ProgramFacts

from wooly_executor.runtime.buffers import Buffer


@dataclass(slots=True)
class Outcome:
    """What a run reports back.

    Attributes:
        outputs: for each output whose shape only the device knew: its description, or None if undefined.
        values: numbers and booleans that an operator returned instead of tensors.
        failed_at: instruction that failed, or None.
        error: message of the failure.
    """

    outputs: list[dict[str, Any] | None] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    failed_at: int | None = None
    error: str = ""


class Prepared(Protocol):
    """A program made ready to run again and again."""

    program: Program
    facts: ProgramFacts


class Runtime(Protocol):
    """One device."""

    def facts(self) -> dict[str, Any]:
        """Name, vendor, runtime, memory in bytes, cores."""
        ...

    def allocate(self, nbytes: int) -> Buffer:
        """Zeroed memory."""
        ...

    def prepare(self, program: Program, facts: ProgramFacts) -> Prepared:
        """Resolve and lay out everything that does not change from run to run."""
        ...

    def run(self, prepared: Any, buffers: dict[int, Buffer], bindings: Sequence[int], params: Sequence[Any]) -> Outcome:
        """Run. Creates and removes entries of `buffers` as the program allocates and frees.

        The caller has checked the bindings. A failing instruction is reported, not raised; what the rest of the program should
        have written is poisoned.
        """
        ...
