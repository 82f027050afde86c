"""The interface of a runtime for the device loop. Implementations: `torch_cpu`, `opencl`, `cuda`, `hip`."""

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
    """The result of a run.

    Attributes:
        outputs: for each output whose shape only the device knew: its description, or None if it is undefined.
        values: numbers and booleans that an operator returned instead of tensors.
        failed_at: index of the instruction that failed, or None.
        error: message of the failure.
        code: error code of the failure.
    """

    outputs: list[dict[str, Any] | None] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    failed_at: int | None = None
    error: str = ""
    code: str = OperationError.code


class Prepared(Protocol):
    """A program that is prepared to run many times."""

    program: Program
    facts: ProgramFacts
    edges: Sequence[int]
    """Positions at which runs are likely to stop. Steps are not combined across them."""
    pieces: Mapping[int, int]
    """For each instruction that is split, the number of its pieces.

    The positions of a program are its instructions and, for a split instruction, its pieces, all in order.
    """
    settled: bool
    """Whether `edges` stay as they are."""
    family: Any
    """The programs that differ from this one in sizes only (`families.Family`); None: it has none."""
    later: list[Any]
    """Steps that are to be combined, outside the thread that runs programs (`Combination`)."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Approximate speed of a device. It gives the expected time of a program that has not been measured yet.

    Attributes:
        bytes_per_us: memory read or written per microsecond.
        flops_per_us: float32 operations per microsecond.
        launch_ns: time of an instruction that does almost nothing, in ns.
        edge_ns: minimum distance of two edges of a program, in ns: each edge costs a reading of the device's clock.
        segment_ns: the same after the first runs, when the runtime combines the steps between two edges.
        own_ns: the part of `launch_ns` that the device itself needs, where the host is slower. It decides where edges are. None:
            all of it.
    """

    bytes_per_us: int
    flops_per_us: int
    launch_ns: int
    edge_ns: int = 50_000
    segment_ns: int = 250_000
    own_ns: int | None = None


class Execution(Protocol):
    """One run of a program. It may stop between positions. If the object is dropped, the rest of the program does not run."""

    outcome: Outcome

    @property
    def host_bound(self) -> Sequence[bool]:
        """For each part between two edges that has run: whether the device waited for the host, so that the device itself needs
        less than the part's time. Empty: it never waits.
        """
        ...

    @property
    def unchecked(self) -> bool:
        """Whether the run has ended, but may still fail when its work, which is in flight, has landed: see `Runtime.settle`."""
        ...

    def advance(self, edges: Sequence[int], ahead_ns: int = 0) -> list[int]:
        """Run to the first of `edges`, then to the next, and so on to the last.

        If an instruction fails, `outcome` reports the error, nothing is raised, and the run ends. Everything that the rest of the
        program should have written is poisoned.

        Args:
            edges: positions before which to stop, ascending. The number of the program's positions is its end.
            ahead_ns: device time of earlier work that may still be in flight when this work is enqueued, in ns; at least one
                launch may be. This work may be in flight at the return. 0: the device has done all work then. A runtime that
                blocks while it computes ignores it.

        Returns:
            Device time between each edge and the one before, in ns, by the runtime's own clock: a GPU's events, or the CPU time
            of the computing thread. It is never wall time, which includes the work of others, and it does not include the
            preparation of later runs. It is 0 after the end and after a failure. Of work that is still in flight, it is the time
            that was last measured for the same part of the program, corrected by what earlier estimates were wrong by.
        """
        ...


class Runtime(Protocol):
    """One device."""

    device: TorchDevice
    """The device on which the buffers are."""

    foreign: Foreign
    """The foreign kernels."""
    bounds: Bounds
    """The limits on instructions."""
    extra_core_ns: int
    """Core time of launches beyond their device time, in ns, that the CPU times of the library's threads do not include.

    Counted since the start.
    """
    defers: bool
    """Whether the steps of a program that runs often are combined later, by who takes them from `Prepared.later`."""

    def facts(self) -> dict[str, Any]:
        """Return name, vendor, runtime, memory in bytes, cores."""
        ...

    def allocate(self, nbytes: int) -> Buffer:
        """Allocate zeroed memory."""
        ...

    def settle(self) -> None:
        """Wait until no work is in flight."""
        ...

    def prepare(self, program: Program, facts: ProgramFacts, notes: Sequence[dict[str, Any]] = ()) -> Prepared:
        """Look up and lay out everything that does not change from run to run.

        Args:
            program: the verified program.
            facts: the facts that the verifier found.
            notes: for each form, what was found out about it for other programs. More is added. Empty: nothing is kept.
        """
        ...

    def rates(self) -> Rates:
        """Return the speed of the device, measured once."""
        ...

    def begin(
        self,
        prepared: Any,
        buffers: dict[int, Buffer],
        bindings: Sequence[int],
        params: Sequence[Any],
        *,
        single: bool = False,
    ) -> Execution:
        """Begin a run. It adds and removes entries of `buffers` as the program allocates and frees.

        The caller has checked the bindings. Nothing else may use the session's buffers until the run ends.

        `single`: do not combine steps, so that the run can stop between any two positions.
        """
        ...


@runtime_checkable
class PlanRuntime(Runtime, Protocol):
    """A device that can run plans."""

    exact: bool
    """Whether plans with the library's bits exist for this device. If not, only sessions of mode `full` use plans."""
    kernel_s: float
    """Maximum time of a foreign kernel's launch, in seconds."""

    def target(self) -> str:
        """Return the target that code must be built for.

        Raises:
            MissingDriverError: no code can be built for this device.
        """
        ...

    def load(self, artifact: Artifact, program: Program, facts: ProgramFacts) -> Any:
        """Prepare a program as its plan's steps. Thread-safe.

        Raises:
            OperationError: the driver refuses the code.
            TooMuchWorkError: a kernel exceeds the limits of the device.
        """
        ...
