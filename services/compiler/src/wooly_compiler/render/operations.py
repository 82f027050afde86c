"""Prints computations: constants, and operations on values as expressions and functions of C."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from wooly_wis.dtypes import DType
from wooly_wis.kernel import ranges
from wooly_wis.kernel.ir import Apply, Block, Const
from wooly_wis.kernel.laws import Facts
from wooly_wis.kernel.ops import FLOATS, INTS, SIGNED, bounds

from wooly_compiler.mathlib import Function, function
from wooly_compiler.render.dialects import Dialect
from wooly_compiler.render.page import Page, bare
from wooly_compiler.render.source import RenderError
from wooly_compiler.render.uses import counted

_INFIX: Final = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_COMPARE: Final = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_BITWISE: Final = {"and": "&", "or": "|", "xor": "^"}
_UNSIGNED: Final = {
    DType.I8: DType.U8,
    DType.I16: DType.U16,
    DType.I32: DType.U32,
    DType.I64: DType.U64,
}


class Operations(Page):
    """A page that prints computations.

    Args:
        dialect: the dialect of C.
        facts: what is known of the values.
        block: all statements of the page.
        functions: texts of the functions before the page, by name; the page adds the functions that it needs.

    Attributes:
        counts: number of uses of each value.
        known: names of values that are computed elsewhere.
    """

    def __init__(self, dialect: Dialect, facts: Facts, block: Block, functions: dict[str, str]) -> None:
        super().__init__(dialect, dict(facts.types))
        self.facts: Final = facts
        self.functions: Final = functions
        self.counts = counted(block)
        self.known: dict[int, str] = {}

    def compute(self, s: Const | Apply) -> None:
        """Print a value. A value that is used more than once gets a name."""
        self.types[s.out] = s.dtype
        if isinstance(s, Const):
            self.text[s.out] = self.number(s.value, s.dtype)
            return
        if s.out in self.known:
            self.text[s.out] = self.known[s.out]
            return
        text = self.apply(s)
        if self.counts[s.out] == 1:
            self.text[s.out] = f"({text})"
        elif self.counts[s.out]:
            self.declare(s.out, s.dtype, text)

    def apply(self, s: Apply) -> str:
        types = [self.types[a] for a in s.args]
        args = [self.text[a] for a in s.args]
        own = function(s.op, types[0], s.dtype)
        if own is not None:
            self._function(own)
            return f"{own.name}({bare(args[0])})"
        if s.op in _COMPARE:
            return f"{args[0]} {_COMPARE[s.op]} {args[1]}"
        if s.op == "select":
            return f"{args[0]} ? {args[1]} : {args[2]}"
        if s.op == "isnan":
            return f"{args[0]} != {args[0]}"
        if s.op == "isinf":
            both = self.d.infinity[types[0]]
            return f"{args[0]} == {both} || {args[0]} == -{both}"
        if s.op in ("max", "min"):
            sign = ">" if s.op == "max" else "<"
            # `larger` gives the second argument if that is NaN, as a processor's max does. The test below covers NaN in
            # the first.
            larger = f"{args[0]} {sign} {args[1]} ? {args[0]} : {args[1]}"
            return f"{args[0]} != {args[0]} ? {args[0]} : ({larger})" if s.dtype in FLOATS else larger
        if s.op == "convert":
            return self._convert(args[0], types[0], s.dtype)
        if s.op == "bitcast":
            same = self.d.types[types[0]] == self.d.types[s.dtype]
            return args[0] if same else self.d.bits.format(type=self.d.types[s.dtype], value=bare(args[0]))
        if s.dtype in FLOATS:
            if s.op in _INFIX:
                return f"{args[0]} {_INFIX[s.op]} {args[1]}"
            if s.op == "neg":
                return f"-{args[0]}"
            builtin = self.d.builtins.get((s.op, s.dtype))
            if builtin is None:
                raise RenderError(f"{self.d.name} has no {s.op} of {s.dtype.label}")
            return builtin.format(*[bare(a) for a in args])
        return self._integer(s, args)

    def _integer(self, s: Apply, args: Sequence[str]) -> str:
        c = self.d.types[s.dtype]
        if s.op in _BITWISE:
            text = f"{args[0]} {_BITWISE[s.op]} {args[1]}"
            return text if s.dtype is DType.BOOL or s.dtype.itemsize >= 4 else f"({c})({text})"
        if s.dtype is DType.BOOL:
            return f"!{args[0]}"
        if s.op == "not":
            return f"({c})~{args[0]}"
        known = [self.facts.intervals.get(a) for a in s.args]
        if s.op in ("add", "sub", "mul", "neg"):
            if s.op == "neg":
                text = f"-{args[0]}"
            else:
                text = f"{args[0]} {_INFIX[s.op]} {args[1]}"
            if ranges.fits(s.op, s.dtype, known):
                return text if s.dtype.itemsize >= 4 else f"({c})({text})"
            if s.dtype in SIGNED:  # signed overflow is undefined in C, but wraps around in kernel IR
                u = self.d.types[_UNSIGNED[s.dtype]]
                wide = [f"({u}){a}" for a in args]
                text = f"-{wide[0]}" if s.op == "neg" else f"{wide[0]} {_INFIX[s.op]} {wide[1]}"
            return f"({c})({text})"
        if s.op == "abs":
            if s.dtype not in SIGNED:
                return args[0]
            return f"{args[0]} < 0 ? ({c})(0 - ({self.d.types[_UNSIGNED[s.dtype]]}){args[0]}) : {args[0]}"
        if s.op in ("shl", "shr"):
            width = 8 * s.dtype.itemsize - 1
            by = f"({args[1]} & {width})"
            if s.op == "shl" and s.dtype in SIGNED:
                return f"({c})(({self.d.types[_UNSIGNED[s.dtype]]}){args[0]} << {by})"
            return f"({c})({args[0]} {'<<' if s.op == 'shl' else '>>'} {by})"
        return self._division(s.op, s.dtype, args, known)

    def _division(self, op: str, dtype: DType, args: Sequence[str], known: Sequence[ranges.Interval | None]) -> str:
        """Print a quotient or remainder. A divisor of 0 or -1 may trap, so the text tests the divisor unless its range is
        safe.
        """
        divisor = known[1]
        numerator = known[0]
        if divisor is not None and divisor[0] > 0 and numerator is not None:
            if op == "fmod":
                return f"{args[0]} % {args[1]}"
            if op == "div_trunc" or numerator[0] >= 0:
                return f"{args[0]} / {args[1]}"
        c = self.d.types[dtype]
        name = f"wooly_{op}_{dtype.label}"
        if name not in self.functions:
            head = self.d.function.format(result=c, name=name, args=f"{c} a, {c} b")
            signed = dtype in SIGNED
            negated = f"({c})(0 - ({self.d.types[_UNSIGNED[dtype]]})a)" if signed else "a"
            special = f"if (b == -1) return {'0' if op == 'fmod' else negated}; " if signed else ""
            body = {
                "fmod": f"return ({c})(a % b);",
                "div_trunc": f"return ({c})(a / b);",
                "div_floor": f"const {c} q = ({c})(a / b); return ({c})(q - (a % b != 0 && (a < 0) != (b < 0)));",
            }[op]
            self.functions[name] = f"{head} {{\n  if (b == 0) return 0; {special}\n  {body}\n}}\n"
        return f"{name}({', '.join([bare(a) for a in args])})"

    def _convert(self, text: str, source: DType, target: DType) -> str:
        if target is DType.BOOL:
            return f"{text} != 0"
        c = self.d.types[target]
        if source in FLOATS and target in INTS:
            name = f"wooly_{source.label}_to_{target.label}"
            if name not in self.functions:
                low, high = bounds(target)
                # `beyond` is the first number of `source` above the integer's range; the range's ends may not be representable.
                beyond = self.number(float(high + 1), source)
                below = self.number(float(low), source)
                head = self.d.function.format(result=c, name=name, args=f"{self.d.types[source]} a")
                ends = (
                    f"a >= {beyond} ? {self.number(high, target)} : a <= {below} ? {self.number(low, target)} : ({c})a"
                )
                self.functions[name] = f"{head} {{\n  return a != a ? 0 : {ends};\n}}\n"
            return f"{name}({bare(text)})"
        return f"({c}){text}"

    def _function(self, own: Function) -> None:
        """Print a function of elements, once."""
        if own.name in self.functions:
            return
        inner = Operations(self.d, Facts(dict(enumerate(own.args)), {}), own.body, self.functions)
        inner.text = {k: f"x{k}" if k else "x" for k in range(len(own.args))}
        inner.counts[own.result] += 1
        for s in own.body:
            assert isinstance(s, (Const, Apply))
            inner.compute(s)
        args = ", ".join(f"{self.ctype(t)} {inner.text[k]}" for k, t in enumerate(own.args))
        head = self.d.function.format(result=self.ctype(own.dtype), name=own.name, args=args)
        body = "\n".join(inner.lines)
        returned = bare(inner.text[own.result])
        self.functions[own.name] = f"{head} {{\n{body}\n  return {returned};\n}}\n"
