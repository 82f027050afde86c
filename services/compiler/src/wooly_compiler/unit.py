"""A program between passes: its computing instructions, and, apart from them, where slots begin and end.

`alloc` and `free` only say how long a slot's bytes live. A unit keeps them out of the order of instructions, so that they do not
separate neighbours. The plan inserts those that are still needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from wooly_wis.law import Law
from wooly_wis.laws import FORM_LAWS
from wooly_wis.plan import Line, line_text
from wooly_wis.program import Program, Role
from wooly_wis.verifier import ProgramFacts, verify_program

from wooly_compiler.errors import UnitError


@dataclass(frozen=True, slots=True)
class Unit:
    """A program between passes.

    Attributes:
        program: the program from which the unit was made.
        facts: results of the verifier.
        lines: instructions that compute, in an order that keeps every dependency.
        allocs: slot to the instruction that allocates the slot.
        frees: slot to the instruction that frees the slot.
        removed: removed instruction to the reason.
    """

    program: Program
    facts: ProgramFacts
    lines: tuple[Line, ...]
    allocs: Mapping[int, int]
    frees: Mapping[int, int]
    removed: Mapping[int, str]

    def inner(self, slot: int) -> bool:
        """Whether a slot begins and ends within the program, so that no other code reads its bytes."""
        return slot in self.allocs and slot in self.frees


def unit_of(program: Program) -> Unit:
    """Make a unit of a program.

    Raises:
        VerifyError: the program breaks a law of WIS.
    """
    facts = verify_program(program)
    lines: list[Line] = []
    allocs: dict[int, int] = {}
    frees: dict[int, int] = {}
    first_param = 0
    for k, instruction in enumerate(program.body):
        form = program.forms[instruction.form]
        if form.opcode == "alloc":
            allocs[instruction.slots[0]] = k
        elif form.opcode == "free":
            frees[instruction.slots[0]] = k
        else:
            lines.append(Line(form, instruction.slots, first_param, k))
        first_param += len(form.params)
    return Unit(program, facts, tuple(lines), allocs, frees, {})


def text(unit: Unit) -> str:
    """Return the lines of a unit as text, each with its instruction number, then the removed instructions."""
    shown = [f"{line.origin:5}  {line_text(line)}" for line in unit.lines]
    shown += [f"    -  {k} removed: {why}" for k, why in sorted(unit.removed.items())]
    return "\n".join(shown) + "\n"


# -- laws ----------------------------------------------------------------------------------------------------------------


def _forms(unit: Unit) -> str | None:
    good: set[int] = set()
    for line in unit.lines:
        if id(line.form) in good:
            continue
        for law in FORM_LAWS:
            complaint = law.check(line.form)
            if complaint is not None:
                return f"instruction {line.origin}: {complaint}"
        good.add(id(line.form))
    return None


def _bounds(unit: Unit) -> str | None:
    for line in unit.lines:
        for a in line.accesses:
            if a.view is not None and a.view.end > max(
                unit.facts.slot_bytes[a.slot], unit.facts.slot_alloc[a.slot] or 0
            ):
                return f"instruction {line.origin} accesses byte {a.view.end} of slot {a.slot}, beyond its end"
    return None


def _complete(unit: Unit) -> str | None:
    seen = [(line.origin, line.part) for line in unit.lines]
    memory = {*unit.allocs.values(), *unit.frees.values()}
    if len(set(seen)) != len(seen):
        return "an instruction occurs twice"
    missing = set(range(len(unit.program.body))) - {k for k, _ in seen} - memory - set(unit.removed)
    return f"instruction {min(missing)} is missing" if missing else None


def _ordered(unit: Unit) -> str | None:
    written: dict[int, int] = {}
    read: dict[int, int] = {}
    for line in unit.lines:
        for a in line.accesses:
            if written.get(a.slot, -1) > line.origin or (a.role is not Role.IN and read.get(a.slot, -1) > line.origin):
                return f"instruction {line.origin} comes after an instruction that depends on it through slot {a.slot}"
        for a in line.accesses:
            table = read if a.role is Role.IN else written
            table[a.slot] = max(table.get(a.slot, -1), line.origin)
    return None


UNIT_LAWS: tuple[Law[[Unit]], ...] = (
    Law("forms", "Every line obeys the laws of its form.", _forms),
    Law("bounds", "Every view lies within its slot.", _bounds),
    Law("complete", "Every instruction is a line, allocates or frees a slot, or is removed with a reason.", _complete),
    Law("order", "If lines use the same slot and one of them writes it, they keep the program's order.", _ordered),
)


def verify(unit: Unit) -> None:
    """Check the laws of units.

    Raises:
        UnitError: the unit breaks a law; the error names it.
    """
    for law in UNIT_LAWS:
        complaint = law.check(unit)
        if complaint is not None:
            raise UnitError(f"{complaint} [law: {law.name}]")
