"""Takes the bias out of a matrix product where a kernel reads the result next: it adds the bias while it has the element at hand.

The library would copy the bias into the result before the product is added to it: one more pass over memory. The sum is rounded
once more than in the library, so it is done only where results need not have the library's bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from wooly_wis.dtypes import DType
from wooly_wis.optable import TABLE, Family
from wooly_wis.plan import Line
from wooly_wis.program import Form, Operand, OperandRef, Role, View

from wooly_compiler.unit import Unit

NAME = "split-bias"

_KERNELS: Final = (Family.POINTWISE, Family.REDUCTION)


def run(unit: Unit) -> Unit:
    """The unit with sums of their own for biases."""
    lines: list[Line] = []
    for k, line in enumerate(unit.lines):
        lines += _split(line, unit.lines[k + 1 :]) if line.form.opcode in ("linear", "addmm") else [line]
    return replace(unit, lines=tuple(lines))


def _split(line: Line, later: tuple[Line, ...]) -> list[Line]:
    form = line.form
    given = form.attr("args", ())
    refs = [a.index for a in given if isinstance(a, OperandRef)] if isinstance(given, tuple) else []
    if (
        len(refs) != 3
        or refs != list(range(3))
        or len(form.operands) != 4
        or form.params
        or given != tuple(map(OperandRef, refs))
    ):
        return [line]
    bias_at = 2 if form.opcode == "linear" else 0
    bias, out = form.operands[bias_at], form.operands[3]
    seen = _seen(line.slots[3], out.view, later)
    if (
        seen is None
        or bias.view is None
        or out.role is not Role.OUT
        or bias.view.sizes != seen.sizes[-1:]
        or seen.dtype not in (DType.F32, DType.F64)
        or line.slots[bias_at] == line.slots[3]
    ):
        return [line]
    kept = [k for k in range(4) if k != bias_at]
    product = Form(
        "linear" if form.opcode == "linear" else "mm",
        tuple([form.operands[k] for k in kept]),
        attrs=(("args", (OperandRef(0), OperandRef(1))),),
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


def _seen(slot: int, out: View | None, later: tuple[Line, ...]) -> View | None:
    """The result as the next instruction that touches it reads it, if a kernel may do that one and it reads all of it."""
    if out is None or not _dense(out):
        return None
    for line in later:
        if slot in line.slots:
            row = TABLE.get(line.form.opcode)
            if row is None or row.family not in _KERNELS:
                return None
            views = {a.view for a in line.accesses if a.slot == slot}
            view = views.pop()
            whole = view is not None and view.numel == out.numel and _dense(view) and view.offset == out.offset
            return view if not views and whole else None
    return None


def _dense(view: View) -> bool:
    """Whether elements lie one after the other in the order of their coordinates."""
    expected = 1
    for size, stride in zip(reversed(view.sizes), reversed(view.strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return bool(view.sizes)
