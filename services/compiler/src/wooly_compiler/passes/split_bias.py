"""Separates the bias from a matrix product, so that the kernel that reads the product next can add the bias.

The library would copy the bias into the result before it adds the product: one more pass over memory. The separate sum is rounded
once more than in the library, so this pass runs only if results need not have the library's bits. It then runs even if no kernel
follows: a timer decides where a program ends, and the bits must not depend on that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from wooly_wis.dtypes import DType
from wooly_wis.plan import Line
from wooly_wis.program import Form, Operand, OperandRef, Role, View

from wooly_compiler.unit import Unit

NAME = "split-bias"


def run(unit: Unit, refuse: Callable[[Line], str] = lambda line: "") -> Unit:
    """Return the unit with biases as separate sums, except for sums that no kernel may do (`refuse` returns the reason)."""
    lines: list[Line] = []
    for k, line in enumerate(unit.lines):
        parts = _split(line, unit.lines[k + 1 :]) if line.form.opcode in ("linear", "addmm") else [line]
        lines += [line] if refuse(parts[-1]) else parts
    return replace(unit, lines=tuple(lines))


def _split(line: Line, later: tuple[Line, ...]) -> list[Line]:
    form = line.form
    given = form.attr("args", ())
    asked = tuple([(name, value) for name, value in form.attrs if name == "flags"])
    refs = [a.index for a in given if isinstance(a, OperandRef)] if isinstance(given, tuple) else []
    if (
        len(refs) != 3
        or refs != list(range(3))
        or len(form.operands) != 4
        or form.params
        or form.attrs != (("args", tuple(map(OperandRef, refs))), *asked)
    ):
        return [line]
    bias_at = 2 if form.opcode == "linear" else 0
    bias, out = form.operands[bias_at], form.operands[3]
    if (
        bias.view is None
        or out.view is None
        or not _dense(out.view)
        or out.role is not Role.OUT
        or bias.view.sizes != out.view.sizes[-1:]
        or out.view.dtype not in (DType.F32, DType.F64)
        or line.slots[bias_at] == line.slots[3]
    ):
        return [line]
    seen = _seen(line.slots[3], out.view, later)
    kept = [k for k in range(4) if k != bias_at]
    product = Form(
        "linear" if form.opcode == "linear" else "mm",
        tuple([form.operands[k] for k in kept]),
        attrs=(("args", (OperandRef(0), OperandRef(1))), *asked),
    )
    added = Form(
        "add",
        (Operand(Role.INOUT, seen), Operand(Role.IN, bias.view)),
        attrs=(("args", (OperandRef(0), OperandRef(1))),),
    )
    return [
        replace(line, form=product, slots=tuple([line.slots[k] for k in kept])),
        replace(line, form=added, slots=(line.slots[3], line.slots[bias_at]), part=line.part + 1),
    ]


def _seen(slot: int, out: View, later: tuple[Line, ...]) -> View:
    """Return the view by which the next instruction reads the whole result in rows of the same length; else the view `out`."""
    for line in later:
        if slot in line.slots:
            views = {a.view for a in line.accesses if a.slot == slot}
            view = views.pop()
            same = view is not None and not views and view.numel == out.numel and _dense(view)
            if view is not None and same and view.offset == out.offset and view.sizes[-1:] == out.sizes[-1:]:
                return view
            break
    return out


def _dense(view: View) -> bool:
    """Whether the elements are contiguous, in the order of their coordinates."""
    expected = 1
    for size, stride in zip(reversed(view.sizes), reversed(view.strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return bool(view.sizes)
