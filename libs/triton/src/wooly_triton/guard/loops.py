"""Guards for loops and jumps: each loop ends, and checks whether the launch must end."""

from __future__ import annotations

import re

from wooly_wis.languages import ForeignError

from wooly_triton.guard.writer import GuardWriter, Loop, Scope
from wooly_triton.ops import BITS
from wooly_triton.text import Op, Type


class Loops(GuardWriter):
    """Guards operations that repeat or skip code."""

    def _for(self, op: Op, scope: Scope, line: str) -> str:
        """Guard a loop: its counter cannot overflow, and it does not start if the launch must end."""
        counter, low, high, step = op.operands[:4]
        head = f"{counter} = {low} to {high} step {step}"
        kind = re.search(r": (i8|i16|i32|i64) \{$", line)
        if kind is None or line.count(head) != 1:
            raise ForeignError(f"{op.place}: the loop has another form than MLIR prints")
        t, signed = Type(kind[1]), "unsigned" not in op.words
        by = self._number(step, scope) or 0
        bits, ends, positive = BITS[t.elem], high, step
        if by < 1:
            positive = self._binary("arith.maxsi" if signed else "arith.maxui", step, self._constant(t, "1"), t)
        if by != 1:
            last = self._constant(t, str(2 ** (bits - 1) - 1 if signed else -1))
            last = self._binary("arith.subi", last, positive, t)
            ends = self._binary("arith.minsi" if signed else "arith.minui", high, last, t)
        if self._loops_around:
            ends = self._select(self._stopped(), low, ends, t)
        if signed:
            self._loops[id(op)] = Loop(counter, low, "" if by == 1 else positive, t.elem)
        return line.replace(head, f"{counter} = {low} to {ends} step {positive}")

    def _stopped(self) -> str:
        """Return whether the launch must end. One thread reads it by an atomic update, so that all threads of a program agree."""
        nothing, always = self._constant(Type("i32"), "0"), self._constant(Type("i1"), "true")
        word = self._put(
            f"tt.atomic_rmw or, relaxed, gpu, {self._prefix}s, {nothing}, {always} : (!tt.ptr<i32>, i32, i1) -> i32"
        )
        return self._put(f"arith.cmpi ne, {word}, {nothing} : i32")

    def _while(self, op: Op, scope: Scope, line: str) -> None:
        """Keep the line: the loop's condition checks whether the launch must end."""

    def _condition(self, op: Op, scope: Scope, line: str) -> str:
        go = self._binary("arith.xori", self._stopped(), self._constant(Type("i1"), "true"), Type("i1"))
        both = self._binary("arith.andi", op.operands[0], go, Type("i1"))
        if line.count(f"scf.condition({op.operands[0]})") != 1:
            raise ForeignError(f"{op.place}: the condition has another form than MLIR prints")
        return line.replace(f"scf.condition({op.operands[0]})", f"scf.condition({both})")

    def _jump(self, op: Op, scope: Scope, line: str) -> None:
        """Keep the line: only jumps forward get here, see `_blocks`."""
