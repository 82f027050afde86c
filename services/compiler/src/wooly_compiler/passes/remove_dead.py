"""Removes instructions whose results no other instruction reads, and whose slots end within the program."""

from __future__ import annotations

from dataclasses import replace

from wooly_wis.optable import TABLE, Family
from wooly_wis.plan import Line
from wooly_wis.promotion import NumberKind, kind_of

from wooly_compiler.unit import Unit

NAME = "remove-dead"

#: Rows that may raise an error for some integers. They stay, because removing them would remove the error.
_MAY_RAISE = frozenset({"div_floor", "div_trunc", "remainder", "fmod", "pow"})


def _cannot_raise(line: Line) -> bool:
    """Whether an instruction has no effect but its results: it cannot raise an error."""
    opcode = line.form.opcode
    if opcode in ("copy", "fill"):
        return True
    row = TABLE.get(opcode)
    if row is None or row.family is Family.INDEXING:
        return False
    floats = all(a.view is not None and kind_of(a.view.dtype) >= NumberKind.FLOAT for a in line.accesses)
    return opcode not in _MAY_RAISE or floats


def run(unit: Unit) -> Unit:
    """Return the unit without dead instructions."""
    wanted: set[int] = set()
    kept: list[Line] = []
    removed = dict(unit.removed)
    for line in reversed(unit.lines):
        if _cannot_raise(line) and all(unit.inner(a.slot) and a.slot not in wanted for a in line.writes()):
            removed[line.origin] = "its result is never read"
            continue
        wanted |= {a.slot for a in line.reads()}
        kept.append(line)
    return replace(unit, lines=tuple(reversed(kept)), removed=removed)
