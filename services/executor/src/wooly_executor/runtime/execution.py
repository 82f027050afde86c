"""Runs prepared programs, step by step."""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from wooly_executor.errors import MissingKernelError, OperationError, OutOfMemoryError, PoisonedError
from wooly_executor.runtime.buffers import Buffer
from wooly_executor.runtime.failed_segments import compute_again
from wooly_executor.runtime.frame import Frame, Step
from wooly_executor.runtime.graphs import Graphs
from wooly_executor.runtime.prepared import PreparedProgram, Span
from wooly_executor.runtime.segments import SegmentError

#: The library's error messages for a failed allocation of host memory.
_NO_MEMORY = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate|not enough) memory(?:: you tried to allocate (\d+) bytes)?|std::bad_alloc"
)
#: The library's error message for a dtype without a kernel. TorchScript's interpreter repeats the message in a RuntimeError.
_NO_KERNEL = re.compile(r"\"\w+\" not implemented for '")
#: Errors that operators raise, whose messages say enough. TorchScript's interpreter repeats these messages without the type.
_OF_OPERATORS = (RuntimeError, IndexError, ValueError, PoisonedError, OperationError, SegmentError)


class StepExecution:
    """One run of a prepared program. Times are CPU times of the computing thread."""

    __slots__ = (
        "_at",
        "_begins",
        "_frame",
        "_graphs",
        "_places",
        "_prepared",
        "_steps",
        "ended",
        "host_bound",
        "outcome",
        "unchecked",
    )
    #: Whether a step that fails is combined with later steps only, from then on.
    _notes_failures: ClassVar[bool] = True

    def __init__(
        self,
        prepared: PreparedProgram,
        buffers: dict[int, Buffer],
        bindings: Sequence[int],
        params: Sequence[Any],
        *,
        single: bool = False,
    ) -> None:
        self._prepared = prepared
        self._frame = Frame(buffers, bindings, params, prepared.n_registers)
        self._graphs: Graphs | None = None
        self._steps, self._places = prepared.steps, prepared.where
        self._begins: Sequence[int] = range(len(prepared.steps))
        self._at = 0
        self.ended = False
        self.host_bound: Sequence[bool] = ()
        self.unchecked = False
        if prepared.hot and not single:
            try:
                for step in prepared.gathers:
                    step(self._frame)
                self._steps, self._places, self._begins = prepared.hot, prepared.places, prepared.begins
            except PoisonedError:  # run the single steps, which report the instruction whose operand is poisoned
                self._frame = Frame(buffers, bindings, params, prepared.n_registers)
        self.outcome = self._frame.outcome

    def advance(self, edges: Sequence[int], ahead_ns: int = 0) -> list[int]:
        """See `Execution.advance`.

        Stopping at each edge and reading the clock costs more than many small operators. If the times of the parts between these
        edges are known from earlier runs, all parts run at once.
        """
        frame, prepared = self._frame, self._prepared
        if len(edges) == 1 and not self.ended:
            last = time.thread_time_ns()
            self._run_to(edges[0])
            took, frame.elsewhere_ns = time.thread_time_ns() - last + frame.elsewhere_ns, 0
            return [took]
        times: list[int] = []
        key = Span(self._steps is prepared.hot, self._at, tuple(edges))
        several, stretch, end = len(edges) > 1 and not self.ended, None, self._end(edges[-1])
        if several and key.hot:
            # Combining steps takes as long as several runs, so it is not counted as device time of this run.
            stretch = prepared.stretch(key, end)
        last = time.thread_time_ns()
        if several:
            if stretch is not None:
                self._run(stretch.steps, stretch.begins, 0, end, self._is_end(edges[-1]))
            elif (stretch := prepared.known(key)) is not None:
                self._run_to(edges[-1])
            if stretch is not None:
                total, frame.elsewhere_ns = time.thread_time_ns() - last + frame.elsewhere_ns, 0
                return stretch.parts(total, len(edges))
        for edge in edges:
            if not self.ended:
                self._run_to(edge)
            now = time.thread_time_ns()
            times.append(now - last + frame.elsewhere_ns)
            last, frame.elsewhere_ns = now, 0
        if len(edges) > 1 and self.outcome.failed_at is None:
            prepared.took(key, times)
        return times

    @property
    def kernel_ns(self) -> int:
        """Device time of generated kernels so far, in ns."""
        return self._frame.kernel_ns

    def _is_end(self, edge: int) -> bool:
        return edge >= self._prepared.end

    def _end(self, edge: int) -> int:
        """Return the index of the first step after an edge."""
        return len(self._steps) if self._is_end(edge) else bisect_left(self._places, edge, self._at)

    def _run_to(self, edge: int) -> None:
        begin, steps = self._at, self._steps
        whole = edge >= self._prepared.end
        if whole and not begin:
            end = len(steps)
        else:
            end = self._end(edge)
            steps = steps[begin:end]
        self._run(steps, self._begins, begin, end, whole)

    def _run(self, steps: Sequence[Step], begins: Sequence[int], begin: int, done: int, whole: bool) -> None:
        """Run some steps.

        The first one has the index `begin` in `begins`. Afterwards, `done` steps are done; `whole`: the run ends.
        """
        prepared, frame = self._prepared, self._frame
        i = begin - 1
        try:
            todo: Iterable[tuple[int, Step]] = enumerate(steps, begin)
            if self._graphs is not None and self._steps is prepared.hot:
                i = begin
                todo = self._graphs.steps(prepared, frame, begin, steps)
            for i, step in todo:  # noqa: B007 - the failing step's index is used below
                step(frame)
        except SegmentError as e:
            first, failed = begins[i], begins[i] if e.at is None else e.at
            if self._graphs is None:
                compute_again(prepared, frame, first, failed)
                first = failed
            self._fail(prepared, frame, first, failed, e)
        except Exception as e:
            self._fail(prepared, frame, begins[i], begins[i], e)
        else:
            self._at = done
            if not whole:
                return
            prepared.completed = True
            buffers, bindings, registers, bases = frame.buffers, frame.bindings, frame.registers, frame.bases
            for slot, register, view, nbytes in prepared.kept:
                buffers[bindings[slot]] = Buffer(nbytes, registers[register], view)
            for slot, nbytes in prepared.made:
                buffers[bindings[slot]] = Buffer(nbytes, bases[slot])
        for slot in prepared.dropped:
            frame.buffers.pop(frame.bindings[slot], None)
        self.ended = True

    def _fail(self, prepared: PreparedProgram, frame: Frame, first: int, step: int, cause: Exception) -> None:
        """Report the failure of a step, and poison everything that the program should have written from the step `first` on."""
        outcome, buffers, bindings = frame.outcome, frame.buffers, frame.bindings
        at = prepared.owner[first] if first >= 0 else 0
        if step >= 0 and self._notes_failures and not isinstance(cause, (PoisonedError, MemoryError)):
            prepared.note_failed(step)
        self._say(prepared.acts[prepared.owner[step]].at if step >= 0 else 0, cause)
        lost = self._poison(at)
        for slot, register, view, nbytes in prepared.kept:
            base = frame.registers[register] if slot not in lost else None
            poison = "" if base is not None else outcome.error
            buffers[bindings[slot]] = Buffer(nbytes, base, view if base is not None else None, poison)
        for slot, nbytes in prepared.made:
            base = frame.bases[slot] if slot not in lost else None
            buffers[bindings[slot]] = Buffer(nbytes, base, None, "" if base is not None else outcome.error)

    def _say(self, failed_at: int, cause: Exception) -> None:
        """Set the outcome: why the run has failed, and at which instruction."""
        outcome = self._frame.outcome
        outcome.failed_at, outcome.code = failed_at, OperationError.code
        if isinstance(cause, _OF_OPERATORS):
            outcome.error = str(cause)
            if isinstance(cause, PoisonedError):
                outcome.code = PoisonedError.code
            elif isinstance(cause, NotImplementedError) or _NO_KERNEL.search(outcome.error):
                outcome.code = MissingKernelError.code
        else:
            outcome.error = f"{type(cause).__name__}: {cause}"
        refused = _NO_MEMORY.search(outcome.error)
        if refused or isinstance(cause, MemoryError):
            asked = f"Tried to allocate {int(refused[1]) / (1 << 20):.2f} MiB. " if refused and refused[1] else ""
            outcome.code = OutOfMemoryError.code
            outcome.error = (
                f"CUDA out of memory. {asked}The executor's host has no memory left for the workspace of an operator."
            )

    def _poison(self, act: int) -> set[int]:
        """Poison the buffers that exist and that the program should have written from an act on. Returns all slots that it should
        have written from there on.
        """
        prepared, buffers, bindings, error = (
            self._prepared,
            self._frame.buffers,
            self._frame.bindings,
            self.outcome.error,
        )
        lost = {slot for later in prepared.acts[act:] for slot in later.writes()}
        for slot in lost:
            buffer = buffers.get(bindings[slot])
            if buffer is not None:
                buffer.base, buffer.view, buffer.poison = None, None, error
        return lost

    def _end_failed(self, act: int, cause: Exception) -> None:
        """End the run, because an act has failed that was thought to be done. Nothing happens if an earlier act has failed."""
        prepared, frame = self._prepared, self._frame
        failed_at = self.outcome.failed_at
        if failed_at is not None and failed_at <= prepared.acts[act].at:
            return
        step = bisect_left(prepared.owner, act)
        self._fail(prepared, frame, step, step, cause)
        for slot in prepared.dropped:
            frame.buffers.pop(frame.bindings[slot], None)
        self.ended = True
