"""A plan: what an executor runs in place of a program. Each step runs a generated kernel, or an instruction of the device
library.

A plan has the program's slots and params, so a run binds it as it binds the program. Compilers make plans, executors use them,
and both check the laws in this module. An executor checks each plan before its first use, because plans come from outside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from wooly_wis.assembly import disassemble
from wooly_wis.dtypes import DType
from wooly_wis.errors import PlanError, VerifyError
from wooly_wis.flags import followed
from wooly_wis.kernel import laws
from wooly_wis.kernel.ir import Kernel
from wooly_wis.kernel.text import digest
from wooly_wis.law import Law
from wooly_wis.program import Form, Instruction, ParamKind, Program, Role, View
from wooly_wis.verifier import ProgramFacts, Verifier

#: Stands for a slot in `KernelStep.slots`. The kernel gets a word of the run, an i32 that is 0 at first. A kernel that finds an
#: index out of range writes the number of the line of its step that has the index, counted from 1.
STATUS: Final = -1

#: The dtype of a kernel's scalar, by the kind of the param that it gets.
PARAM_DTYPE: Mapping[ParamKind, DType] = {
    ParamKind.F64: DType.F64,
    ParamKind.I64: DType.I64,
    ParamKind.BOOL: DType.BOOL,
}


@dataclass(frozen=True, slots=True)
class Access:
    """One operand of a line: slot, view and role."""

    slot: int
    view: View | None
    role: Role


@dataclass(frozen=True, slots=True)
class Line:
    """An instruction of the program that a step computes, or a part of one.

    Attributes:
        form: the form of the instruction, or of the part.
        slots: the slots of the form's operands.
        first_param: index, among the run's params, of the line's first param.
        origin: index of the instruction in the program.
        part: number of the part, if the instruction is split.
    """

    form: Form
    slots: tuple[int, ...]
    first_param: int
    origin: int
    part: int = 0

    @property
    def accesses(self) -> tuple[Access, ...]:
        """The operands of the line."""
        return tuple([Access(s, o.view, o.role) for s, o in zip(self.slots, self.form.operands, strict=True)])

    def reads(self) -> list[Access]:
        """The operands that the line reads."""
        return [a for a in self.accesses if a.role is not Role.OUT]

    def writes(self) -> list[Access]:
        """The operands that the line writes."""
        return [a for a in self.accesses if a.role is not Role.IN]


def conflicts(first: Line, second: Line) -> bool:
    """Whether two lines must stay in order: one of them writes a slot that the other one uses."""
    a, b = {x.slot for x in first.writes()}, {x.slot for x in second.writes()}
    return bool(a & set(second.slots)) or bool(b & set(first.slots))


def line_text(line: Line) -> str:
    """The assembly text of a line."""
    return disassemble(Program((line.form,), (Instruction(0, line.slots),))).split("\n")[1]


@dataclass(frozen=True, slots=True)
class AllocStep:
    """Allocate memory for a slot. `zero`: the memory must be zeroed, because a later step may read bytes that no step wrote."""

    slot: int
    nbytes: int
    zero: bool


@dataclass(frozen=True, slots=True)
class FreeStep:
    """Free a slot."""

    slot: int


@dataclass(frozen=True, slots=True)
class KernelStep:
    """Run a kernel.

    Attributes:
        slots: per array of the kernel, the slot in whose first bytes the array is, or `STATUS`.
        params: per scalar of the kernel, the index of the run's param.
        lines: the instructions that the kernel computes, in the program's order.
    """

    kernel: Kernel
    slots: tuple[int, ...]
    params: tuple[int, ...]
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class LibraryStep:
    """Run an instruction through the device's library. `why`: the reason why the instruction has no kernel."""

    line: Line
    why: str


Step = AllocStep | FreeStep | KernelStep | LibraryStep


@dataclass(frozen=True)
class Plan:
    """A compiled program.

    Attributes:
        program: the program.
        facts: result of the program's verification.
        steps: the steps, in order.
        removed: per instruction that no step computes, the reason.
        temporaries: slots that have no memory, because their values stay within a kernel.
        assumed: params for whose values the kernels were made, with these values. A run with other values needs another plan.
    """

    program: Program
    facts: ProgramFacts
    steps: tuple[Step, ...]
    removed: Mapping[int, str]
    temporaries: frozenset[int]
    assumed: Mapping[int, Any] = field(default_factory=dict)

    def fits(self, params: Sequence[Any]) -> bool:
        """Whether the plan can be used for a run with these params."""
        return all(params[k] == v for k, v in self.assumed.items())

    @cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        """The distinct kernels of the plan, in order of first use."""
        found: dict[bytes, Kernel] = {}
        for s in self.steps:
            if isinstance(s, KernelStep):
                found.setdefault(digest(s.kernel), s.kernel)
        return tuple(found.values())

    def share(self) -> float:
        """The fraction of computing instructions that generated kernels compute, 0 to 1. Removed instructions count for the
        kernels.
        """
        by_library = sum(isinstance(s, LibraryStep) for s in self.steps)
        total = len(self.removed) + by_library + sum(len(s.lines) for s in self.steps if isinstance(s, KernelStep))
        return 1 - by_library / total if total else 1.0


def text(plan: Plan) -> str:
    """The text of a plan: one line per step, and below each kernel the instructions that it computes."""
    shown: list[str] = []
    for s in plan.steps:
        match s:
            case AllocStep():
                shown.append(f"alloc %{s.slot} {s.nbytes} bytes{', zero' if s.zero else ''}")
            case FreeStep():
                shown.append(f"free %{s.slot}")
            case KernelStep():
                arrays = ", ".join(f"{a.name}=%{slot}" for a, slot in zip(s.kernel.arrays, s.slots, strict=True))
                scalars = "".join(f", {p.name}=${at}" for p, at in zip(s.kernel.scalars, s.params, strict=True))
                shown.append(f"kernel {s.kernel.name} {digest(s.kernel).hex()[:12]} ({arrays}{scalars})")
                shown += [f"    {line.origin:5}  {line_text(line)}" for line in s.lines]
            case LibraryStep():
                shown.append(f"library ({s.why})")
                shown.append(f"    {s.line.origin:5}  {line_text(s.line)}")
    shown += [f"removed {k}: {why}" for k, why in sorted(plan.removed.items())]
    if plan.temporaries:
        shown.append("never in memory: " + ", ".join(f"%{s}" for s in sorted(plan.temporaries)))
    return "\n".join(shown) + "\n"


# -- laws ----------------------------------------------------------------------------------------------------------------


def _done(step: Step) -> tuple[Line, ...]:
    return step.lines if isinstance(step, KernelStep) else (step.line,) if isinstance(step, LibraryStep) else ()


def _opcode(plan: Plan, instruction: int) -> str:
    return plan.program.forms[plan.program.body[instruction].form].opcode


def _covers(plan: Plan) -> str | None:
    parts: dict[int, list[int]] = {}
    for step in plan.steps:
        for line in _done(step):
            parts.setdefault(line.origin, []).append(line.part)
    for k in range(len(plan.program.body)):
        found = sorted(parts.pop(k, ()))
        if _opcode(plan, k) in ("alloc", "free"):
            if found:
                return f"instruction {k} is alloc or free, but a step computes it"
        elif k in plan.removed:  # or some parts of it
            if len(set(found)) != len(found):
                return f"a part of instruction {k} is computed twice"
        elif not found:
            return f"instruction {k} is neither computed nor removed"
        elif found != list(range(len(found))):
            return f"a part of instruction {k} is computed twice, or is missing"
    return f"a line names instruction {min(parts)}, which does not exist" if parts else None


def _lines(plan: Plan) -> str | None:
    program, facts, kinds = plan.program, plan.facts, plan.program.param_kinds
    verifier = Verifier()
    for step in plan.steps:
        for line in _done(step):
            instruction = program.body[line.origin]
            form = program.forms[instruction.form]
            where = f"instruction {line.origin}"
            try:
                ends = verifier.verify_form(line.form)
            except VerifyError as e:
                return f"the line for {where} is not a valid instruction: {e}"
            if len(line.slots) != len(ends) or any(not 0 <= s < len(facts.slot_bytes) for s in line.slots):
                return f"the line for {where} has a wrong number of slots, or a slot that does not exist"
            for slot, end in zip(line.slots, ends, strict=True):
                if end > _nbytes(facts, slot):
                    return f"the line for {where} accesses byte {end} of slot {slot}, which is smaller"
            if line.form.opcode in ("alloc", "free"):
                return f"the line for {where} has the opcode {line.form.opcode}"
            if line.form.opcode == "extern" and line.form.attr("name") != form.attr("name"):
                return f"the line for {where} calls another library operator than the instruction"
            if line.form.attr("deterministic") != form.attr("deterministic"):
                return f"the line for {where} differs from the instruction in the attribute deterministic"
            follows = line.form.opcode == "extern" or followed(line.form.opcode)
            if follows and line.form.attr("flags") != form.attr("flags"):
                return f"the line for {where} differs from the instruction in the attribute flags"
            if kinds[line.first_param : line.first_param + len(line.form.params)] != line.form.params:
                return f"the params of the line for {where} have other kinds than those of the run"
            may = {s for s, o in zip(instruction.slots, form.operands, strict=True) if o.role is not Role.IN}
            if not {a.slot for a in line.writes()} <= may:
                return f"the line for {where} writes a slot that the instruction does not write"
    return None


def _nbytes(facts: ProgramFacts, slot: int) -> int:
    """Minimum size of a slot in bytes."""
    have = facts.slot_alloc[slot]
    return facts.slot_bytes[slot] if have is None else have


def _ordered(plan: Plan) -> str | None:
    done = [(k, line) for k, s in enumerate(plan.steps) for line in _done(s)]
    by_slot: dict[int, list[tuple[int, Line]]] = {}
    for k, line in done:
        for slot in set(line.slots):
            by_slot.setdefault(slot, []).append((k, line))
    for slot, users in by_slot.items():
        latest: tuple[int, Line] | None = None
        reads: tuple[int, Line] | None = None
        for k, line in sorted(users, key=lambda u: u[1].origin):
            writing = any(a.slot == slot and a.role is not Role.IN for a in line.accesses)
            for before in (latest, reads if writing else None):
                if before is not None and before[0] > k and conflicts(before[1], line):
                    return f"instruction {line.origin} runs before instruction {before[1].origin}, which it depends on"
            if writing:
                latest = (k, line) if latest is None or k >= latest[0] else latest
            else:
                reads = (k, line) if reads is None or k >= reads[0] else reads
    return None


def _memory(plan: Plan) -> str | None:
    facts = plan.facts
    allocs = {s for s, n in enumerate(facts.slot_alloc) if n is not None}
    frees = {s for s, gone in enumerate(facts.slot_freed) if gone}
    live = {s for s in range(len(facts.slot_bytes)) if s not in allocs}
    made: set[int] = set()
    unwritten: set[int] = set()
    for step in plan.steps:
        match step:
            case AllocStep():
                if step.slot not in allocs or step.slot in made or step.nbytes != facts.slot_alloc[step.slot]:
                    return f"slot {step.slot} is allocated twice, or not as in the program"
                live.add(step.slot)
                made.add(step.slot)
                if not step.zero:
                    unwritten.add(step.slot)
            case FreeStep():
                if step.slot not in frees or step.slot not in live:
                    return f"slot {step.slot} is freed, but the program does not free it, or the slot has no memory"
                live.discard(step.slot)
            case KernelStep() | LibraryStep():
                slots = set(step.slots) - {STATUS} if isinstance(step, KernelStep) else set(step.line.slots)
                unsized = {a.slot for line in _done(step) for a in line.accesses if a.view is None}
                missing = slots - live - unsized
                live |= unsized
                if missing:
                    return f"instruction {_done(step)[0].origin} uses slot {min(missing)}, which has no memory"
                for slot in slots & unwritten:
                    if not fills(step, slot, facts.slot_alloc[slot] or 0):
                        return f"slot {slot} is not zeroed, and its first user does not fill it"
                unwritten -= slots
    if live & allocs != allocs - frees or frees - allocs & live or unwritten & live:
        return "after the last step, other slots have memory than after the program"
    return None


def fills(step: Step, slot: int, nbytes: int) -> bool:
    """Whether a step writes all bytes of a slot, if the step is the slot's first user: with one view, or with adjacent parts of
    one instruction.
    """
    users = [(line, a) for line in _done(step) for a in line.accesses if a.slot == slot]
    first = users[0][0].origin if users else None
    views: list[View] = []
    for line, a in users:
        if line.origin != first or a.role is not Role.OUT or a.view is None:
            break
        views.append(a.view)
    whole = _side_by_side(views)
    return whole is not None and whole.fills(nbytes)


def _side_by_side(views: Sequence[View]) -> View | None:
    """The union of views, if each view continues at the end of the previous one along one dimension; otherwise None."""
    if not views:
        return None
    first, sizes = views[0], list(views[0].sizes)
    along = next((d for v in views[1:] for d, (m, n) in enumerate(zip(sizes, v.sizes, strict=False)) if m != n), None)
    for v in views[1:]:
        if (v.dtype, v.strides) != (first.dtype, first.strides):
            return None
        if along is None:  # all views have one size: the second view's offset tells the dimension
            step = (v.offset - first.offset) // first.dtype.itemsize
            along = next((d for d, (n, s) in enumerate(zip(sizes, v.strides, strict=True)) if n * s == step), None)
        if along is None or v.offset != first.offset + sizes[along] * first.strides[along] * first.dtype.itemsize:
            return None
        if any(m != n for d, (m, n) in enumerate(zip(sizes, v.sizes, strict=True)) if d != along):
            return None
        sizes[along] += v.sizes[along]
    return View(first.dtype, tuple(sizes), first.strides, first.offset)


def _bounds(plan: Plan) -> str | None:
    kinds = plan.program.param_kinds
    for step in plan.steps:
        if not isinstance(step, KernelStep):
            continue
        kernel = step.kernel
        if not step.lines or len(step.slots) != len(kernel.arrays) or len(step.params) != len(kernel.scalars):
            return f"kernel {kernel.name} has no lines, or a wrong number of slots or params"
        for a, slot in zip(kernel.arrays, step.slots, strict=True):
            if slot == STATUS:
                if a.numel != 1 or a.dtype is not DType.I32:
                    return f"the status array of kernel {kernel.name} is not one i32"
                continue
            if not 0 <= slot < len(plan.facts.slot_bytes) or a.numel * a.dtype.itemsize > _nbytes(plan.facts, slot):
                return f"an array of kernel {kernel.name} is larger than slot {slot}, or the slot does not exist"
        for s, at in zip(kernel.scalars, step.params, strict=True):
            if not 0 <= at < len(kinds) or PARAM_DTYPE.get(kinds[at]) is not s.dtype:
                return f"kernel {kernel.name} gets param {at} as {s.dtype.label}, but the param has another dtype or is missing"
        may = {STATUS} | {a.slot for line in step.lines for a in line.writes()}
        if any(a.role is not Role.IN and slot not in may for a, slot in zip(kernel.arrays, step.slots, strict=True)):
            return f"kernel {kernel.name} writes a slot that its lines do not write"
    return None


def peak_of(facts: ProgramFacts, steps: Sequence[Step]) -> int:
    """Maximum number of bytes that the program's own slots have at the same time while these steps run."""
    held = peak = 0
    for step in steps:
        if isinstance(step, AllocStep):
            held += step.nbytes
            peak = max(peak, held)
        elif isinstance(step, FreeStep):
            held -= facts.slot_alloc[step.slot] or 0
    return peak


def peak_of_program(program: Program, facts: ProgramFacts) -> int:
    """Maximum number of bytes that a program's own slots have at the same time."""
    steps: list[Step] = []
    for i in program.body:
        opcode, slot = program.forms[i.form].opcode, i.slots[0] if i.slots else 0
        if opcode == "alloc":
            steps.append(AllocStep(slot, facts.slot_alloc[slot] or 0, True))
        elif opcode == "free":
            steps.append(FreeStep(slot))
    return peak_of(facts, steps)


def _peak(plan: Plan) -> str | None:
    peak, most = peak_of(plan.facts, plan.steps), peak_of_program(plan.program, plan.facts)
    return f"the plan holds {peak} bytes at the same time, but its program needs only {most}" if peak > most else None


def _overlap(plan: Plan) -> str | None:
    for step in plan.steps:
        if isinstance(step, KernelStep):
            written = {s for a, s in zip(step.kernel.arrays, step.slots, strict=True) if a.role is not Role.IN}
            for slot in written:
                if step.slots.count(slot) > 1:
                    return f"kernel {step.kernel.name} gets slot {slot} twice and writes it"
    return None


def _kernels(plan: Plan) -> str | None:
    for kernel in plan.kernels:
        try:
            laws.verify(kernel)
        except laws.KernelError as e:
            return f"kernel {kernel.name}: {e}"
    return None


def _assumed(plan: Plan) -> str | None:
    wrong = [k for k in plan.assumed if not 0 <= k < len(plan.program.param_kinds)]
    return f"the plan assumes param {wrong[0]}, which does not exist" if wrong else None


PLAN_LAWS: tuple[Law[[Plan]], ...] = (
    Law("covers", "Every computing instruction is removed for a reason, or all its parts are computed once.", _covers),
    Law("lines", "A line is a valid instruction within its slots and writes only slots that its instruction writes.", _lines),
    Law("order", "A line runs in the same step as the lines that it depends on, or in a later step.", _ordered),
    Law("bounds", "A kernel's arrays fit into their slots, and a kernel writes only slots that its lines write.", _bounds),
    Law("memory", "Used slots have memory, which is zeroed or written before a read; the program's slots are left.", _memory),
    Law("peak", "A plan never holds more memory than its program, because sessions reserve that much.", _peak),
    Law("overlap", "A kernel does not get a slot twice that it writes.", _overlap),
    Law("kernels", "Every kernel obeys the laws of kernel IR.", _kernels),
    Law("assumed", "A plan assumes only params that exist.", _assumed),
)  # fmt: skip


def verify(plan: Plan) -> None:
    """Check a plan against the laws.

    Raises:
        PlanError: names the broken law.
    """
    for law in PLAN_LAWS:
        complaint = law.check(plan)
        if complaint is not None:
            raise PlanError(complaint, law=law.name)
