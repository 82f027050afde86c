"""Replaces instructions by simpler ones with the same meaning: list operators by one instruction per tensor, clones and
concatenations by copies, operators with several gradients by one instruction per kind.

`_foreach_mul_(tensors, 0.9)` becomes one `mul` per tensor, so that an optimizer's whole step for a tensor can be one kernel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from wooly_wis.errors import RuleError
from wooly_wis.optable import TABLE, check
from wooly_wis.plan import Line
from wooly_wis.program import Attr, Form, Operand, OperandRef, Role, View

from wooly_compiler.unit import Unit

NAME = "expand"

_LIST: Final = "aten._foreach_"
#: List operators whose arguments, tensor by tensor, are those of the row with the same name, in the same order.
_ROWS: Final = frozenset(
    "add sub mul div sqrt rsqrt neg exp abs reciprocal lerp addcmul addcdiv maximum minimum sigmoid tanh".split()  # noqa: SIM905
)


def run(unit: Unit) -> Unit:
    """Return the unit with library operators replaced by native lines of the same meaning."""
    lines: list[Line] = []
    for line in unit.lines:
        lines += _expanded(line) or [line]
    return replace(unit, lines=tuple(lines))


def _expanded(line: Line) -> list[Line]:
    """Return the lines that replace a line; no lines if it is not replaced."""
    form = line.form
    if form.opcode == "concat":
        return _concat(line)
    name = form.attr("name")
    if form.opcode != "extern" or not isinstance(name, str):
        return []
    if name == "aten.clone.default":
        return _clone(line)
    if name == "aten.cat.default":
        return _concat(line)
    if name == "aten.native_layer_norm_backward.default":
        return _gradients(line, 7)
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


def _concat(line: Line) -> list[Line]:
    """Copy each part to its position in the result."""
    form = line.form
    args = form.attr("args", ())
    outs = [k for k, o in enumerate(form.operands) if o.role is Role.OUT]
    if not isinstance(args, tuple) or not args or not isinstance(args[0], tuple) or len(outs) != 1:
        return []
    out = form.operands[outs[0]].view
    dim = args[1] if len(args) > 1 else 0
    if out is None or not isinstance(dim, int) or not out.sizes:
        return []
    dim %= len(out.sizes)
    found: list[Line] = []
    at = 0
    for part in args[0]:
        view = form.operands[part.index].view if isinstance(part, OperandRef) else None
        if view is None or not isinstance(part, OperandRef):
            return []
        if view.sizes == (0,):  # the library allows empty tensors of any kind among the parts
            continue
        if len(view.sizes) != len(out.sizes):
            return []
        offset = out.offset + at * out.strides[dim] * out.dtype.itemsize
        at += view.sizes[dim]
        if view.numel:
            operands = (Operand(Role.IN, view), Operand(Role.OUT, View(out.dtype, view.sizes, out.strides, offset)))
            slots = (line.slots[part.index], line.slots[outs[0]])
            found.append(replace(line, form=Form("copy", operands), slots=slots, part=len(found)))
    return found


def _gradients(line: Line, mask_at: int) -> list[Line]:
    """Separate the first gradient from the others, because it folds other dimensions."""
    form = line.form
    args = form.attr("args", ())
    outs = [k for k, o in enumerate(form.operands) if o.role is Role.OUT]
    mask = args[mask_at] if isinstance(args, tuple) and len(args) > mask_at else None
    if not isinstance(args, tuple) or not isinstance(mask, tuple) or sum(bool(m) for m in mask) != len(outs):
        return []
    if not mask[0] or not any(mask[1:]):
        return []
    found: list[Line] = []
    for part, wanted in enumerate(((True, *[False] * (len(mask) - 1)), (False, *mask[1:]))):
        left_out = outs[1:] if part == 0 else outs[:1]
        kept = [k for k in range(len(form.operands)) if k not in left_out]
        if any(k > min(left_out) for k in kept if k not in outs):  # results come last, so arguments keep their numbers
            return []
        attrs = tuple(
            [(n, (*args[:mask_at], wanted, *args[mask_at + 1 :]) if n == "args" else v) for n, v in form.attrs]
        )
        made = Form(form.opcode, tuple([form.operands[k] for k in kept]), form.params, attrs)
        found.append(replace(line, form=made, slots=tuple([line.slots[k] for k in kept]), part=part))
    return found


def _each(line: Line, bare: str) -> list[Line]:
    form = line.form
    opcode = bare.rstrip("_")
    args, kwargs = form.attr("args", ()), form.attr("kwargs", ())
    if opcode not in _ROWS or not isinstance(args, tuple) or not args or not isinstance(args[0], tuple):
        return []
    names = {a.name for a in TABLE[opcode].args}
    pairs = kwargs if isinstance(kwargs, tuple) else ()
    named = {k[0]: k[1] for k in pairs if isinstance(k, tuple) and len(k) == 2}
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
    """Return the row's instruction on one tensor of each list; None if it does not fit."""
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
