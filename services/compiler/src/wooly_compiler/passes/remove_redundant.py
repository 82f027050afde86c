"""Removes instructions that repeat a computation: the same form on the same values.

This is done only if both results are slots that begin and end in the program, and each is written once. Then readers of the
second slot can read the first.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from wooly_wis.optable import TABLE
from wooly_wis.plan import Line
from wooly_wis.program import Role

from wooly_compiler.unit import Unit

NAME = "remove-redundant"


def run(unit: Unit) -> Unit:
    """Return the unit without repeated computations."""
    writes = Counter(a.slot for line in unit.lines for a in line.writes())
    version: Counter[int] = Counter()
    known: dict[tuple[object, ...], tuple[int, ...]] = {}
    stands_for: dict[int, int] = {}
    kept: list[Line] = []
    removed = dict(unit.removed)
    for line in unit.lines:
        slots = tuple([stands_for.get(s, s) for s in line.slots])
        moved = replace(line, slots=slots) if slots != line.slots else line
        outs = [a.slot for a in moved.writes()]
        pure = (
            line.form.opcode in TABLE
            and not line.form.params
            and all(a.role is not Role.INOUT for a in moved.accesses)
            and all(unit.inner(s) and writes[s] == 1 for s in outs)
        )
        if pure:
            key = (line.form, *[(a.slot, version[a.slot]) for a in moved.reads()])
            before = known.get(key)
            if before is not None:
                stands_for |= dict(zip(outs, before, strict=True))
                removed[line.origin] = "an earlier instruction computes the same"
                continue
            known[key] = tuple(outs)
        version.update(outs)
        kept.append(moved)
    return replace(unit, lines=tuple(kept), removed=removed)
