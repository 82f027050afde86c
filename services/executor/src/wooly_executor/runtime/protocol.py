"""What a runtime offers to the device loop. Implementations: `torch_cpu`, `opencl`, `reference`, `cuda`, `hip`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from wooly_wis.artifact import Artifact
from wooly_wis.program import Program
from wooly_wis.verifier import ProgramFacts

from wooly_executor.bounds import Bounds
from wooly_executor.errors import OperationError
from wooly_executor.runtime.buffers import Buffer
from wooly_executor.runtime.device import TorchDevice
from wooly_executor.runtime.foreign import Foreign


@dataclass(slots=True)
class Outcome:
    """What a run reports back.

    Attributes:
        outputs: for each output whose shape only the device knew: its description, or None if undefined.
        values: numbers and booleans that an operator returned instead of tensors.
        failed_at: instruction that failed, or None.
        error: message of the failure.
        code: its kind.
    """

    outputs: list[dict[str, Any] | None] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    failed_at: int | None = None
    error: str = ""
    code: str = OperationError.code


class Prepared(Protocol):
    """A program made ready to run again and again."""

    program: Program
    facts: ProgramFacts
    edges: Sequence[int]
    """Where runs are likely to be stopped, as positions: what puts instructions together keeps these apart."""
    pieces: Mapping[int, int]
    """Into how many pieces instructions are split, where they are.

    A program's positions are its instructions and, of one that is split, its pieces, all in order.
    """


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast a device is, roughly: what a program is expected to take before it was ever measured.

    Attributes:
        bytes_per_us: memory read or written.
        flops_per_us: arithmetic in float32.
        launch_ns: of an instruction that does next to nothing.
    """

    bytes_per_us: int
    flops_per_us: int
    launch_ns: int


class Execution(Protocol):
    """One run of a program, which may be interrupted between its positions. Dropping it leaves the rest undone."""

    outcome: Outcome

    def advance(self, edges: Sequence[int]) -> list[int]:
        """Go on to the first of `edges`, then to the next, to the last.

        A failing instruction is reported in `outcome`, not raised, and ends the run; what the rest of the program should have
        written is poisoned.

        Args:
            edges: positions not to be begun, rising; the number of the program's positions is its end.

        Returns:
            Device time up to each edge since the one before, in ns, by the runtime's own clock: a GPU's events, the CPU time of
            the thread that computes. Never wall time, which counts others' work too; nor what prepares the program for later
            runs. After the end and after a failure it is 0.
        """
        ...


class Runtime(Protocol):
    """One device."""

    device: TorchDevice
    """Where buffers are."""

    foreign: Foreign
    """Kernels in languages of others."""
    bounds: Bounds
    """What an instruction may be at most."""
    beyond_ns: int
    """Core time of launches beyond their device time that the library's threads do not tell, in ns, since the runtime began."""

    def facts(self) -> dict[str, Any]:
        """Name, vendor, runtime, memory in bytes, cores."""
        ...

    def allocate(self, nbytes: int) -> Buffer:
        """Zeroed memory."""
        ...

    def prepare(self, program: Program, facts: ProgramFacts) -> Prepared:
        """Resolve and lay out everything that does not change from run to run."""
        ...

    def rates(self) -> Rates:
        """How fast the device is, measured once."""
        ...

    def begin(
        self, prepared: Any, buffers: dict[int, Buffer], bindings: Sequence[int], params: Sequence[Any]
    ) -> Execution:
        """Begin a run, which creates and removes entries of `buffers` as the program allocates and frees.

        The caller has checked the bindings. Until the end nothing else may touch the session's buffers.
        """
        ...


@runtime_checkable
class PlanRuntime(Runtime, Protocol):
    """A device that runs plans: what compilers made of programs."""

    exact: bool
    """Whether there are plans with the library's bits for it; else plans are for sessions that want all kernels."""
    kernel_s: float
    """Seconds that a kernel of a session's own may take."""

    def target(self) -> str:
        """What code must be built for.

        Raises:
            MissingDriverError: there is nothing that it can be built for.
        """
        ...

    def load(self, artifact: Artifact, program: Program, facts: ProgramFacts) -> Any:
        """A program as its plan's steps. May be called by any thread.

        Raises:
            OperationError: the driver does not take the code.
            TooMuchWorkError: a kernel is more than the device allows.
        """
        ...
