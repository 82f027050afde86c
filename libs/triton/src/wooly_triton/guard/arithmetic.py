"""Guards for operations that are undefined for some operands: they are rewritten to have a defined result."""

from __future__ import annotations

from typing import Final

from wooly_wis.languages import ForeignError

from wooly_triton.guard.writer import GuardWriter, Scope, constant, zero
from wooly_triton.ops import BITS
from wooly_triton.text import Op

_MANTISSA: Final = {"f16": 11, "bf16": 8, "f32": 24, "f64": 53}
_LARGEST: Final = {"f16": 65504.0}


class Arithmetic(GuardWriter):
    """Guards operations that do not access memory."""

    def _poison(self, op: Op, scope: Scope, line: str) -> str:
        if not op.types or op.types[0].pointer:
            raise ForeignError(f"{op.place}: a pointer without a buffer is not supported")
        t = op.types[0]
        return f"    {op.results[0]} = {constant(t, zero(t.elem))}"

    def _divide(self, op: Op, scope: Scope, line: str) -> str | None:
        """Replace a divisor of 0 by a large power of two. It keeps divisibility, so that Triton still detects alignments."""
        x, d = op.operands
        if self._number(d, scope):
            return None
        t = op.types[0]
        is_zero = self._binary("arith.cmpi eq,", d, self._constant(t, "0"), t)
        by = self._select(is_zero, self._constant(t, str(1 << max(BITS[t.elem] - 2, 0))), d, t)
        return f"    {op.results[0]} = {op.name} {x}, {by} : {t}"

    def _unsupported_division(self, op: Op, scope: Scope, line: str) -> str:
        raise ForeignError(f"{op.place} cannot be checked on a GPU")

    def _shift(self, op: Op, scope: Scope, line: str) -> str | None:
        x, by = op.operands
        t = op.types[0]
        bits = BITS[t.elem]
        number = self._number(by, scope)
        if number is not None and 0 <= number < bits:
            return None
        last = self._constant(t, str(bits - 1))
        few = self._binary("arith.cmpi ule,", by, last, t)
        amount = self._select(few, by, last, t)
        if op.name == "arith.shrsi":
            return f"    {op.results[0]} = arith.shrsi {x}, {amount} : {t}"
        found = self._binary(op.name, x, amount, t)
        return self._named(op.results[0], f"arith.select {few}, {found}, {self._constant(t, '0')} : ", t)

    def _to_integer(self, op: Op, scope: Scope, line: str) -> str:
        if len(op.types) != 2 or op.types[0].elem not in _MANTISSA:
            raise ForeignError(f"{op.place} cannot be checked on a GPU")
        f, t = op.types
        signed, bits, p = op.name == "arith.fptosi", BITS[t.elem], _MANTISSA[f.elem]
        top = bits - signed
        most = float(2**top - 2 ** (top - p)) if top > p else float(2**top - 1)
        least = -float(2**top) if signed else 0.0
        limit = _LARGEST.get(f.elem)
        if limit is not None:
            most, least = min(most, limit), max(least, -limit)
        x = self._binary("arith.maxnumf", op.operands[0], self._constant(f, f"{least:.17e}"), f)
        x = self._binary("arith.minnumf", x, self._constant(f, f"{most:.17e}"), f)
        found = self._put(f"{op.name} {x} : {f} to {t}")
        nan = self._binary("arith.cmpf uno,", op.operands[0], op.operands[0], f)
        return self._named(op.results[0], f"arith.select {nan}, {self._constant(t, '0')}, {found} : ", t)

    def _gather(self, op: Op, scope: Scope, line: str) -> str:
        """Wrap an index out of range, because it would be an address beyond the program's memory."""
        axis = op.attrs.get("axis")
        if len(op.types) != 3 or type(axis) is not int or op.types[0].shape is None or len(op.operands) != 2:
            raise ForeignError(f"{op.place}: the gather has another form than MLIR prints")
        size, t, index = op.types[0].shape[axis], op.types[1], op.operands[1]
        kept = self._binary("arith.andi", index, self._constant(t, str(size - 1)), t)
        if size & (size - 1) or f"[{index}]" not in line:
            raise ForeignError(
                f"{op.place}: the gather has another form than MLIR prints, or the size {size} is not a power of two"
            )
        return line.replace(f"[{index}]", f"[{kept}]")
