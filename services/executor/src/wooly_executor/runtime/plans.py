"""Translates a plan into acts, for runtimes that launch generated kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from wooly_wis.dtypes import DType
from wooly_wis.kernel.text import digest
from wooly_wis.plan import STATUS, AllocStep, FreeStep, KernelStep, LibraryStep, Plan
from wooly_wis.program import Form, Operand, Role, View

from wooly_executor.runtime.acts import Act, Launch
from wooly_executor.runtime.prepared import PreparedProgram

#: Runs a kernel on the addresses of its arrays and on its scalars. Returns the ns of device time that other threads took.
Run = Callable[[list[int], Sequence[Any]], int]
#: Wraps a kernel that has a status word. The arguments are: the function that runs the kernel, the position of the word among its
#: arrays, the instructions that it may report a violation of, and the index of its act in the program.
AddStatus = Callable[[Run, int, Sequence[Form], int], Run]


def acts_of_plan(plan: Plan, runs: dict[bytes, Run], add_status: AddStatus) -> list[Act]:
    """Return a verified plan's steps as acts.

    Args:
        plan: a verified plan.
        runs: for each digest of a kernel, the function that runs the kernel.
        add_status: see `AddStatus`.
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
                    run = add_status(run, step.slots.index(STATUS), [line.form for line in step.lines], len(found))
                slots = tuple([s for s in step.slots if s != STATUS])
                dtypes = [a.dtype for a, s in zip(step.kernel.arrays, step.slots, strict=True) if s != STATUS]
                launch = Launch(run, slots, tuple(dtypes), step.params)
                lines = tuple([(line.form, line.slots) for line in step.lines])
                found.append(Act(at, first.form, slots, first.first_param, launch, lines))
    return found


def _with_params(run: Run, params: tuple[int, ...]) -> Run:
    """Return `run` with only the given params of the program as scalars."""
    if not params:
        return lambda at, given: run(at, ())
    return lambda at, given: run(at, [given[p] for p in params])


def complaint(forms: Sequence[Form], word: int) -> Exception:
    """Return the exception that the library raises for an operand that is out of range, without the value of the operand.

    Args:
        forms: the instructions of a kernel.
        word: value of the status word: the number of the failed instruction, from 1.
    """
    form = forms[min(max(word, 1), len(forms)) - 1]
    if form.opcode in ("div_floor", "div_trunc", "remainder", "fmod"):
        return RuntimeError("ZeroDivisionError")
    if "nll_loss" in str(form.attr("name")):
        return IndexError("Target is out of bounds.")
    return IndexError("index out of range in self")


def count_work(prepared: PreparedProgram, plan: Plan) -> None:
    """Set how many instructions of a plan the library computes, and how many the generated kernels."""
    program = plan.program
    computing = sum(program.forms[i.form].opcode not in ("alloc", "free") for i in program.body)
    origins = {s.line.origin for s in plan.steps if isinstance(s, LibraryStep)}
    prepared.by_library, prepared.by_kernel = len(origins), computing - len(origins)


def kernels_of(acts: Sequence[Act]) -> list[list[Form]]:
    """Return, for each generated kernel, the forms of its instructions."""
    return [[form for form, _ in act.lines] for act in acts if act.launch is not None]
