"""Plans as acts: what a compiler made of a program, for runtimes that launch its kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from wooly_wis.dtypes import DType
from wooly_wis.kernel.text import digest
from wooly_wis.plan import STATUS, AllocStep, FreeStep, KernelStep, LibraryStep, Plan
from wooly_wis.program import Form, Operand, Role, View

from wooly_executor.runtime.prepared import Act, Launch, PreparedProgram

#: Runs a kernel on the addresses of its arrays and the scalars that it takes; ns of device time that were not the caller's.
Run = Callable[[list[int], Sequence[Any]], int]
#: Gives what runs a kernel that is handed a word for its status: what ran it, where among its arrays the word is, the
#: instructions that it may complain of, and which act of the program it is.
Asking = Callable[[Run, int, Sequence[Form], int], Run]


def acts_of_plan(plan: Plan, runs: dict[bytes, Run], asking: Asking) -> list[Act]:
    """A verified plan's steps as acts.

    Args:
        plan: verified.
        runs: per digest of a kernel, what runs it.
        asking: see `Asking`.
    """
    found: list[Act] = []
    at = 0
    for step in plan.steps:
        match step:
            case AllocStep():
                view = View(DType.U8, (step.nbytes,), (1,))
                form = Form("alloc", (Operand(Role.OUT, view),))
                found.append(Act(at, form, (step.slot,), 0, dirty=not step.zero))
            case FreeStep():
                found.append(Act(at, Form("free", (Operand(Role.IN, None),)), (step.slot,), 0))
            case LibraryStep():
                line = step.line
                at = line.origin
                found.append(Act(at, line.form, line.slots, line.first_param))
            case KernelStep():
                first = step.lines[0]
                at = first.origin
                run = _with_params(runs[digest(step.kernel)], step.params)
                if STATUS in step.slots:
                    run = asking(run, step.slots.index(STATUS), [line.form for line in step.lines], len(found))
                slots = tuple([s for s in step.slots if s != STATUS])
                dtypes = [a.dtype for a, s in zip(step.kernel.arrays, step.slots, strict=True) if s != STATUS]
                launch = Launch(run, slots, tuple(dtypes), step.params)
                lines = tuple([(line.form, line.slots) for line in step.lines])
                found.append(Act(at, first.form, slots, first.first_param, launch, lines))
    return found


def _with_params(run: Run, params: tuple[int, ...]) -> Run:
    """`run`, given only some params of the program's."""
    if not params:
        return lambda at, given: run(at, ())
    return lambda at, given: run(at, [given[p] for p in params])


def complaint(forms: Sequence[Form], word: int) -> Exception:
    """What the library raises where an operand of an instruction is out of range, without the number that it was.

    Args:
        forms: the instructions of a kernel.
        word: which of them it complained of, from 1.
    """
    form = forms[min(max(word, 1), len(forms)) - 1]
    if form.opcode in ("div_floor", "div_trunc", "remainder", "fmod"):
        return RuntimeError("ZeroDivisionError")
    if "nll_loss" in str(form.attr("name")):
        return IndexError("Target is out of bounds.")
    return IndexError("index out of range in self")


def count_work(prepared: PreparedProgram, plan: Plan) -> None:
    """Note who computes how much of a plan."""
    program = plan.program
    computing = sum(program.forms[i.form].opcode not in ("alloc", "free") for i in program.body)
    origins = {s.line.origin for s in plan.steps if isinstance(s, LibraryStep)}
    prepared.by_library, prepared.by_kernel = len(origins), computing - len(origins)


def kernels_of(acts: Sequence[Act]) -> list[list[Form]]:
    """Per generated kernel, the instructions that it does."""
    return [[form for form, _ in act.lines] for act in acts if act.launch is not None]
