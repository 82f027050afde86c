"""Limits on the work of one instruction: estimates per operator family, limits per device, and the splitting of large
instructions.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from wooly_wis.program import Form, Program

from wooly_executor.bounds.division import Piece, divide
from wooly_executor.bounds.estimate import work_of
from wooly_executor.bounds.limits import PIECES, PROGRAM_PIECES, Limits
from wooly_executor.bounds.work import Work
from wooly_executor.errors import TooMuchWorkError

Pieces = Mapping[int, tuple[Piece, ...]]
#: For a program in which no instruction is split.
WHOLE: Pieces = MappingProxyType({})
#: Maximum number of forms in the cache of estimates. At this size, the cache is cleared.
REMEMBERED = 65536


class Bounds:
    """Checks programs against the limits of a device, and splits large instructions. Thread-safe.

    Args:
        limits: the limits of the device.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        #: Cache by id() of a form, because decoded forms are kept and shared. The value is the work of a form that must be split
        #: or refused, and None for all other forms. The weak reference lets a form go with the last program that has it.
        self._large: dict[int, tuple[weakref.ref[Form], Work | None]] = {}

    def pieces(self, program: Program) -> Pieces:
        """Return the pieces of each instruction that is split, by its index.

        Raises:
            TooMuchWorkError: an instruction exceeds the limits and cannot be split.
            OperationError: the library has no operator for an instruction.
        """
        large = [self._large_work(form) for form in program.forms]
        if not any(large):
            return WHOLE
        found: dict[int, tuple[Piece, ...]] = {}
        for i, instruction in enumerate(program.body):
            work = large[instruction.form]
            if work is not None:
                pieces = self._divide(i, program.forms[instruction.form], instruction.slots, work)
                if pieces is not None:
                    found[i] = pieces
        if sum([len(pieces) for pieces in found.values()]) > PROGRAM_PIECES:
            raise TooMuchWorkError(
                f"the program is too large: its instructions are split into more than {PROGRAM_PIECES} pieces; "
                "submit several programs"
            )
        return found

    def check_kernels(self, kernels: Iterable[Sequence[Form]]) -> None:
        """Check that each generated kernel does at most the work of `KERNEL_PIECES` pieces.

        Args:
            kernels: for each kernel, the forms of its instructions.

        Raises:
            TooMuchWorkError: a kernel exceeds the limit.
        """
        limits = self.limits.for_kernels()
        for forms in kernels:
            total = sum([limits.weighed(work_of(form), form) for form in forms], Work(0))
            if limits.exceeded(total):
                raise TooMuchWorkError(
                    f"a kernel for {len(forms)} instructions is too much work for one launch: {total.elements:,} elements and "
                    f"{total.flops:,} operations, but at most {limits.elements:,} and {limits.flops:,} are allowed"
                )

    def _divide(self, at: int, form: Form, slots: Sequence[int], work: Work) -> tuple[Piece, ...] | None:
        pieces = divide(form, slots, min(self.limits.parts(work), PIECES))
        most, whole = (max([p.share for p in pieces]), sum([p.share for p in pieces])) if pieces else (1, 1)
        part = Work(work.elements * most // whole, work.flops * most // whole)
        if self.limits.exceeded(part):
            raise too_much_work(form, at, part, self.limits, len(pieces or ()))
        return pieces

    def _large_work(self, form: Form) -> Work | None:
        """Return the work of a form that must be split or refused, and None for all other forms."""
        known = self._large.get(id(form))
        if known is not None and known[0]() is form:
            return known[1]
        work = self.limits.weighed(work_of(form), form)
        large = work if self.limits.exceeded(work) or self.limits.parts(work) > 1 else None
        if len(self._large) >= REMEMBERED:
            self._large.clear()
        key, remembered = id(form), self._large
        remembered[key] = weakref.ref(form, lambda _: remembered.pop(key, None)), large
        return large


def too_much_work(form: Form, at: int, work: Work, limits: Limits, pieces: int) -> TooMuchWorkError:
    """Return the error for an instruction that exceeds the limits. `pieces` is the number of pieces of the instruction, or 0."""
    name = form.attr("name") if form.opcode == "extern" else form.opcode
    if work.elements > limits.elements:
        said = f"processes about {work.elements:,} elements, but at most {limits.elements:,} are allowed"
        setting = "WOOLY_EXECUTOR_MAX_ELEMENTS"
    else:
        said = f"takes about {work.flops:,} operations, but at most {limits.flops:,} are allowed"
        setting = "WOOLY_EXECUTOR_MAX_FLOPS"
    where = f"even each of its {pieces} pieces {said}" if pieces else f"it {said}"
    return TooMuchWorkError(
        f"instruction {at} ({name}) is too much work for one call on this device: {where} ({setting}, a setting of the "
        "executor). Compute it in parts, for example over slices of its first dimension",
        at,
    )
