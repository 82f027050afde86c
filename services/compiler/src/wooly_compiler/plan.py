"""What an executor runs instead of a program: steps in order, each a generated kernel or an instruction for the library.

A plan keeps the program's slots and params, so a run binds it as it would the program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from wooly_wis.dtypes import DType
from wooly_wis.kernel import laws
from wooly_wis.kernel.ir import Kernel
from wooly_wis.kernel.text import digest
from wooly_wis.program import Program, Role

from wooly_compiler.errors import PlanError
from wooly_compiler.unit import Line, Unit, conflicts, line_text


@dataclass(frozen=True, slots=True)
class AllocStep:
    """Memory for a slot. `zero`: somebody may read what no step writes."""

    slot: int
    nbytes: int
    zero: bool


@dataclass(frozen=True, slots=True)
class FreeStep:
    """A slot ends."""

    slot: int


#: Stands for a slot where a kernel is given a word of the run, an i32 that is 0 at first. A kernel that finds an index out of
#: range writes there which line of its step complains, counted from 1.
STATUS: Final = -1


@dataclass(frozen=True, slots=True)
class KernelStep:
    """Run a kernel.

    Attributes:
        slots: per array of the kernel, the slot whose first bytes it is, or `STATUS`.
        params: per scalar of the kernel, its index among the run's params.
        lines: the instructions that it does, in the program's order.
    """

    kernel: Kernel
    slots: tuple[int, ...]
    params: tuple[int, ...]
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class LibraryStep:
    """Run an instruction through the device's library. `why`: why there is no kernel for it."""

    line: Line
    why: str


Step = AllocStep | FreeStep | KernelStep | LibraryStep


@dataclass(frozen=True, slots=True)
class Plan:
    """A compiled program.

    Attributes:
        program: where it came from.
        steps: what to do, in order.
        removed: per instruction that nothing does, why.
        temporaries: slots whose bytes never exist: their values stay within a kernel.
        assumed: params that the kernels were made for, with their values; a run with others needs another plan.
    """

    program: Program
    unit: Unit
    steps: tuple[Step, ...]
    removed: Mapping[int, str]
    temporaries: frozenset[int]
    assumed: Mapping[int, Any] = field(default_factory=dict)

    def fits(self, params: Sequence[Any]) -> bool:
        """Whether the plan is for a run with these params."""
        return all(params[k] == v for k, v in self.assumed.items())

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The different kernels, in the order of first use."""
        found: dict[bytes, Kernel] = {}
        for s in self.steps:
            if isinstance(s, KernelStep):
                found.setdefault(digest(s.kernel), s.kernel)
        return tuple(found.values())

    def share(self) -> float:
        """The part of the computing instructions that generated kernels do (those removed count as done by them)."""
        by_library = sum(isinstance(s, LibraryStep) for s in self.steps)
        total = len(self.removed) + by_library + sum(len(s.lines) for s in self.steps if isinstance(s, KernelStep))
        return 1 - by_library / total if total else 1.0


def text(plan: Plan) -> str:
    """One line per step; kernels by their names, with the instructions that they do."""
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


@dataclass(frozen=True, slots=True)
class PlanLaw:
    """A law of plans."""

    name: str
    says: str
    check: Callable[[Plan], str | None]


def _done(step: Step) -> tuple[Line, ...]:
    return step.lines if isinstance(step, KernelStep) else (step.line,) if isinstance(step, LibraryStep) else ()


def _covers(plan: Plan) -> str | None:
    done = [(line.origin, line.part) for s in plan.steps for line in _done(s)]
    if len(set(done)) != len(done):
        return "an instruction is done twice"
    missing = {(line.origin, line.part) for line in plan.unit.lines} - set(done)
    return f"instruction {min(missing)[0]} is not done" if missing else None


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
    facts = plan.unit.facts
    live = {s for s in range(len(facts.slot_bytes)) if s not in plan.unit.allocs}
    for step in plan.steps:
        match step:
            case AllocStep():
                live.add(step.slot)
            case FreeStep():
                live.discard(step.slot)
            case KernelStep():
                for a, slot in zip(step.kernel.arrays, step.slots, strict=True):
                    if slot == STATUS:
                        if a.numel != 1 or a.dtype is not DType.I32:
                            return f"kernel {step.kernel.name} takes more than a word for its status"
                        continue
                    if slot not in live:
                        return f"kernel {step.kernel.name} uses slot {slot}, which has no memory"
                    have = facts.slot_alloc[slot]
                    have = facts.slot_bytes[slot] if have is None else have
                    if a.numel * a.dtype.itemsize > have:
                        return f"kernel {step.kernel.name} reaches beyond slot {slot}"
            case LibraryStep():
                unsized = {a.slot for a in step.line.accesses if a.view is None}
                missing = set(step.line.slots) - live - unsized
                live |= unsized
                if missing:
                    return f"instruction {step.line.origin} uses slot {min(missing)}, which has no memory"
    left = {s for s in live if s in plan.unit.allocs}
    kept = {s for s in plan.unit.allocs if s not in plan.unit.frees}
    freed = {s for s in plan.unit.frees if s not in plan.unit.allocs}
    if left != kept or freed & live:
        return "the slots that are left are not the program's"
    return None


def _overlap(plan: Plan) -> str | None:
    for step in plan.steps:
        if isinstance(step, KernelStep):
            written = {s for a, s in zip(step.kernel.arrays, step.slots, strict=True) if a.role is not Role.IN}
            for slot in written:
                if step.slots.count(slot) > 1:
                    return f"kernel {step.kernel.name} is given slot {slot} twice and writes it"
    return None


def _kernels(plan: Plan) -> str | None:
    for kernel in plan.kernels:
        try:
            laws.verify(kernel)
        except laws.KernelError as e:
            return f"kernel {kernel.name}: {e}"
    return None


PLAN_LAWS: tuple[PlanLaw, ...] = (
    PlanLaw("covers", "Every line of the last unit is done, once.", _covers),
    PlanLaw("order", "What depends on an instruction runs in its step or later.", _ordered),
    PlanLaw("memory", "A step's slots have memory, as much as it reaches; what is left are the program's results.", _memory),
    PlanLaw("overlap", "A kernel is not given a slot twice that it writes.", _overlap),
    PlanLaw("kernels", "Every kernel obeys the laws of kernel IR.", _kernels),
)  # fmt: skip


def verify(plan: Plan) -> None:
    """Check a plan.

    Raises:
        PlanError: names the law.
    """
    for law in PLAN_LAWS:
        complaint = law.check(plan)
        if complaint is not None:
            raise PlanError(f"{complaint} [law: {law.name}]")
