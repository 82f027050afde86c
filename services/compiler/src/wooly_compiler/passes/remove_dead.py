"""Removes instructions whose results no other instruction reads, and whose slots end within the program."""

from __future__ import annotations

from dataclasses import replace

from wooly_wis.optable import TABLE, Family
from wooly_wis.plan import Line
from wooly_wis.promotion import NumberKind, kind_of

from wooly_compiler.unit import Unit

NAME = "remove-dead"


def _cannot_raise(line: Line) -> bool:
    """Whether an instruction has no effect but its results: it cannot raise an error, which would be removed, too.

    Many rows raise errors for integers (divisions, GELU), for complex numbers (ReLU), or for no numbers at all (maxima).
    """
    opcode = line.form.opcode
    if opcode in ("copy", "fill"):
        return True
    row = TABLE.get(opcode)
    if row is None or row.family is Family.INDEXING:
        return False
    views = [a.view for a in line.accesses]
    return all(v is not None and 0 not in v.sizes and kind_of(v.dtype) is NumberKind.FLOAT for v in views)


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
