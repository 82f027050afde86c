"""Bounds on what one instruction may do: estimates per operator family, limits, and the pieces that large instructions become."""

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
#: Of a program whose instructions all stay whole.
WHOLE: Pieces = MappingProxyType({})
#: Forms whose work is remembered.
REMEMBERED = 65536


class Bounds:
    """What a device allows an instruction to be. May be asked by any thread.

    Args:
        limits: of the device.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        #: By identity, as decoded forms are kept and shared: the work of a form that is to be split or refused, else None.
        #: What is remembered does not keep the form: it goes with the last program that has it.
        self._large: dict[int, tuple[weakref.ref[Form], Work | None]] = {}

    def pieces(self, program: Program) -> Pieces:
        """Per instruction that is to be split, its pieces.

        Raises:
            TooMuchWorkError: an instruction is more than the device allows, and cannot be split.
            OperationError: the library has no operator for an instruction.
        """
        large = [self._of(form) for form in program.forms]
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
                f"the program's instructions are split into more than {PROGRAM_PIECES} pieces; submit several programs"
            )
        return found

    def check_kernels(self, kernels: Iterable[Sequence[Form]]) -> None:
        """Make sure that no generated kernel is more than a few pieces.

        Args:
            kernels: the instructions that each does.

        Raises:
            TooMuchWorkError: one is.
        """
        limits = self.limits.for_kernels()
        for forms in kernels:
            total = sum([limits.weighed(work_of(form), form) for form in forms], Work(0))
            if limits.exceeded(total):
                raise TooMuchWorkError(
                    f"a kernel for {len(forms)} instructions goes over {total.elements:,} elements with {total.flops:,} "
                    f"operations in one launch, at most {limits.elements:,} and {limits.flops:,}"
                )

    def _divide(self, at: int, form: Form, slots: Sequence[int], work: Work) -> tuple[Piece, ...] | None:
        pieces = divide(form, slots, min(self.limits.parts(work), PIECES))
        most, whole = (max([p.share for p in pieces]), sum([p.share for p in pieces])) if pieces else (1, 1)
        part = Work(work.elements * most // whole, work.flops * most // whole)
        if self.limits.exceeded(part):
            raise refused(form, at, part, self.limits, len(pieces or ()))
        return pieces

    def _of(self, form: Form) -> Work | None:
        """The work of a form that is to be split or refused; None of most."""
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


def refused(form: Form, at: int, work: Work, limits: Limits, pieces: int) -> TooMuchWorkError:
    """The error of an instruction whose work is too much; `pieces`: it was split into so many."""
    name = form.attr("name") if form.opcode == "extern" else form.opcode
    if work.elements > limits.elements:
        said = f"goes over about {work.elements:,} elements, at most {limits.elements:,}"
        setting = "WOOLY_EXECUTOR_MAX_ELEMENTS"
    else:
        said = f"takes about {work.flops:,} operations, at most {limits.flops:,}"
        setting = "WOOLY_EXECUTOR_MAX_FLOPS"
    where = f"even each of its {pieces} pieces {said}" if pieces else f"it {said}"
    return TooMuchWorkError(
        f"instruction {at} ({name}) is too much work for one call on this device: {where} are allowed ({setting}, a setting "
        "of the executor). Compute it in parts, for example over slices of its first dimension",
        at,
    )
