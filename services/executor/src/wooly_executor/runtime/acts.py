"""The actions of a program: its instructions, or the kernels of its plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from wooly_wis.dtypes import DType
from wooly_wis.pauses import pause
from wooly_wis.program import Form, Program, Role


@dataclass(frozen=True, slots=True)
class Launch:
    """A generated kernel, ready to run.

    Attributes:
        run: runs the kernel on the addresses of its arrays and the params of the run. Returns the device time of other threads,
            in ns.
        slots: the slot of each array.
        dtypes: the dtype of each array.
        params: the run's params that the kernel uses.
    """

    run: Callable[[list[int], Sequence[Any]], int]
    slots: tuple[int, ...]
    dtypes: tuple[DType, ...]
    params: tuple[int, ...] = ()


class Act(NamedTuple):
    """One action of a program: an instruction, or a kernel that replaces several instructions.

    Attributes:
        at: index of the instruction, or of the first replaced instruction.
        form: the form of this instruction.
        slots: the slots of the instruction or the kernel.
        first_param: index of its first param.
        launch: the kernel, in place of an instruction.
        lines: the instructions that the kernel replaces, as forms on slots.
        dirty: for an `alloc`: the memory need not be zeroed, because the next act overwrites it.
        notes: what was found out about the form (see `lowering`); None: nothing is kept.
    """

    at: int
    form: Form
    slots: tuple[int, ...]
    first_param: int
    launch: Launch | None = None
    lines: tuple[tuple[Form, tuple[int, ...]], ...] = ()
    dirty: bool = False
    notes: dict[str, Any] | None = None

    @property
    def params(self) -> Sequence[int]:
        """The run's params that the act uses."""
        if self.launch is not None:
            return self.launch.params
        return range(self.first_param, self.first_param + len(self.form.params))

    def writes(self) -> tuple[int, ...]:
        """Return the slots that the act writes."""
        done = self.lines or ((self.form, self.slots),)
        return tuple([s for f, on in done for o, s in zip(f.operands, on, strict=True) if o.role is not Role.IN])


def acts_of(program: Program, notes: Sequence[dict[str, Any]] = (), like: Sequence[Act] = ()) -> list[Act]:
    """Return a program's instructions as acts.

    Args:
        program: the program.
        notes: what was found out about each of its forms; empty: nothing.
        like: the acts of a program with the same body and the same params. They are taken where the form is the same.
    """
    forms = program.forms
    if like:
        return [
            act
            if act.form is (form := forms[i.form])
            else act._replace(form=form, notes=notes[i.form] if notes else None)
            for i, act in zip(program.body, like, strict=True)
        ]
    found: list[Act] = []
    first_param = 0
    for i, instruction in enumerate(program.body):
        if not i & 63:
            pause()
        form = program.forms[instruction.form]
        known = notes[instruction.form] if notes else None
        found.append(Act(i, form, instruction.slots, first_param, None, (), False, known))
        first_param += len(form.params)
    return found
