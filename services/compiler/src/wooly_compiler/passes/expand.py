"""Spells library operators natively where rows of the op table mean the same: lists tensor by tensor, clones as copies.

`_foreach_mul_(tensors, 0.9)` becomes one `mul` per tensor, so that an optimizer's whole step for a tensor can be one kernel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from wooly_wis.errors import RuleError
from wooly_wis.optable import TABLE, check
from wooly_wis.program import Attr, Form, Operand, OperandRef, Role

from wooly_compiler.unit import Line, Unit

NAME = "expand"

_LIST: Final = "aten._foreach_"
#: Whose arguments, tensor by tensor, are those of the row of the same name, in the same order.
_ROWS: Final = frozenset(
    "add sub mul div sqrt rsqrt neg exp abs reciprocal lerp addcmul addcdiv maximum minimum sigmoid tanh".split()  # noqa: SIM905
)


def run(unit: Unit) -> Unit:
    """The unit with native lines where there were library operators that mean the same."""
    lines: list[Line] = []
    for line in unit.lines:
        lines += _expanded(line) or [line]
    return replace(unit, lines=tuple(lines))


def _expanded(line: Line) -> list[Line]:
    """The lines that mean the same; none if there are none."""
    form = line.form
    name = form.attr("name")
    if form.opcode != "extern" or not isinstance(name, str):
        return []
    if name == "aten.clone.default":
        return _clone(line)
    if name.startswith(_LIST):
        return _each(line, name[len(_LIST) :].split(".")[0])
    return []


def _clone(line: Line) -> list[Line]:
    views = [o.view for o in line.form.operands]
    if [o.role for o in line.form.operands] != [Role.IN, Role.OUT] or None in views or line.form.params:
        return []
    a, out = views
    if a is None or out is None or a.sizes != out.sizes:
        return []
    return [replace(line, form=Form("copy", line.form.operands))]


def _each(line: Line, bare: str) -> list[Line]:
    form = line.form
    opcode = bare.rstrip("_")
    args, kwargs = form.attr("args", ()), form.attr("kwargs", ())
    if opcode not in _ROWS or not isinstance(args, tuple) or not args or not isinstance(args[0], tuple):
        return []
    names = {a.name for a in TABLE[opcode].args}
    named = dict(k for k in kwargs if isinstance(k, tuple)) if isinstance(kwargs, tuple) else {}
    if not set(named) <= names:
        return []
    outs = [k for k, o in enumerate(form.operands) if o.role is Role.OUT]
    count = len(args[0])
    if len(outs) not in (0, count):
        return []
    found: list[Line] = []
    for k in range(count):
        mine: list[Attr] = [a[k] if isinstance(a, tuple) and len(a) == count else a for a in args]
        mine += [named.get(a.name, a.default) for a in TABLE[opcode].args[len(mine) :]]
        made = _one(line, opcode, mine, outs[k] if outs else None, k)
        if made is None:
            return []
        found.append(made)
    return found


def _one(line: Line, opcode: str, args: list[Attr], out: int | None, part: int) -> Line | None:
    """The row on one tensor of each list, or None if it does not fit."""
    operands: list[Operand] = []
    slots: list[int] = []
    given: list[Attr] = []
    place: dict[int, int] = {}
    for value in args:
        if isinstance(value, tuple):
            return None
        if isinstance(value, OperandRef):
            if value.index not in place:
                place[value.index] = len(operands)
                operands.append(line.form.operands[value.index])
                slots.append(line.slots[value.index])
            value = OperandRef(place[value.index])
        given.append(value)
    if out is not None:
        operands.append(line.form.operands[out])
        slots.append(line.slots[out])
    form = Form(opcode, tuple(operands), line.form.params, (("args", tuple(given)),))
    try:
        check(form)
    except RuleError:
        return None
    return replace(line, form=form, slots=tuple(slots), part=part)
