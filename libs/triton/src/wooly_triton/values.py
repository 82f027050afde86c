"""The values of names in a TTIR text during lowering: expressions of an index, arrays, and pointers with their buffers."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from wooly_wis.languages import ForeignError

from wooly_triton.ops import BITS, C_TYPE, is_float, rounded
from wooly_triton.text import Block, Function, Op, Type

Index = tuple[str, ...]
#: Growth of a value when an index grows by one, per dimension: 0, 1, or None if it is not known.
Steps = tuple[int | None, ...]


#: Returns C text for the number of elements that a mask sets in a row, if these are the first ones; the number is -1 if they are
#: not. None if no text is known. Arguments: index by position in the row, dimension, size of the row.
Leading = Callable[[Callable[[str], Index], int, int], str | None]


@dataclass(eq=False, slots=True)
class Late:
    """A load that is not written yet, because its only user may read memory itself.

    Attributes:
        op: the load.
        pointer: the pointers that it reads.
        mask: the elements that it reads; None: all.
        other: the value of the other elements.
        text: returns the C text of an element, once it is known.
    """

    op: Op
    pointer: Value
    mask: Value | None
    other: Value | None
    text: Callable[[Index], str] | None = None

    def at(self, index: Index) -> str:
        """Return an element in C."""
        assert self.text is not None
        return self.text(index)


@dataclass(frozen=True, slots=True)
class Value:
    """The value of a name.

    Attributes:
        type: scalar or tensor.
        at: returns its C text at an index; for a pointer, the offset in elements, a long.
        weight: number of operations in that text.
        steps: see `Steps`.
        uniform: its C text if all elements are equal, as for a scalar.
        array: name of the array that holds it, in row-major order.
        buffer: of a pointer: number of the buffer.
        local: whether `at` reads arrays only at the same index, and only arrays of the same shape.
        late: loads in it that are not written yet.
        leading: of a mask whose set elements are the first ones of a row: see `Leading`.
    """

    type: Type
    at: Callable[[Index], str]
    weight: int = 0
    steps: Steps = ()
    uniform: str | None = None
    array: str | None = None
    buffer: int | None = None
    local: bool = False
    late: tuple[Late, ...] = ()
    leading: Leading | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape; empty for a scalar."""
        return self.type.shape or ()


def set_first(mask: Value, at: Callable[[str], Index], row: int, size: int) -> str | None:
    """Return C text for the number of leading elements of a row that a mask sets, if it sets no others; see `Leading`."""
    if mask.uniform is not None:
        return f"(({mask.uniform}) ? {size} : 0)"
    return mask.leading(at, row, size) if mask.leading is not None else None


def flat(shape: Sequence[int], index: Index) -> str:
    """Return the position of an index in an array, in row-major order."""
    text = ""
    for size, i in zip(shape, index, strict=True):
        if size == 1:
            continue
        text = f"({text} * {size} + {i})" if text else i
    return text or "0"


def scalar(type_: Type, text: str, buffer: int | None = None) -> Value:
    """Return a value without dimensions."""
    return Value(type_, lambda i: text, 0, (), text, None, buffer, True)


def splat(type_: Type, text: str, buffer: int | None = None) -> Value:
    """Return a tensor whose elements are all equal."""
    return Value(type_, lambda i: text, 0, (0,) * len(type_.shape or ()), text, None, buffer, True)


def literal(elem: str, text: str) -> str:
    """Translate a number from MLIR's form to C.

    Raises:
        ForeignError: the text is not a number.
    """
    if elem == "i1":
        return "0" if text in ("false", "0") else "1"
    if is_float(elem):
        value = _bits_of(elem, int(text, 16)) if text.startswith("0x") else _float(text)
        if value != value:
            return "NAN"
        suffix = "" if elem == "f64" else "f"
        if elem != "f64" and math.isfinite(value):
            value = (
                struct.unpack("<f", struct.pack("<f", value))[0]
                if abs(value) < 3.5e38
                else math.copysign(math.inf, value)
            )
        if math.isinf(value):
            return "(-INFINITY)" if value < 0 else "INFINITY"
        return rounded(elem, f"({value.hex()}{suffix})")
    if not re.fullmatch(r"-?\d{1,20}|0x[0-9A-Fa-f]{1,16}", text):
        raise ForeignError(f"{text[:40]!r} is not a valid {elem}")
    number = int(text, 0) & ((1 << BITS[elem]) - 1)
    return f"((long){number:#x}ul)" if elem == "i64" else f"(({C_TYPE[elem]}){number:#x}u)"


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ForeignError(f"{text[:40]!r} is not a number") from None


def _bits_of(elem: str, bits: int) -> float:
    try:
        if elem == "f64":
            return float(struct.unpack("<d", struct.pack("<Q", bits))[0])
        if elem in ("f16", "f8E5M2"):
            half = bits << 8 if elem == "f8E5M2" else bits
            return float(struct.unpack("<e", struct.pack("<H", half))[0])
        if elem == "f8E4M3FN":
            sign, exponent, part = -1 if bits & 0x80 else 1, (bits >> 3) & 15, bits & 7
            if bits & 0x7F == 0x7F:
                return math.nan
            return sign * (math.ldexp(8 + part, exponent - 10) if exponent else math.ldexp(part, -9))
        return float(struct.unpack("<f", struct.pack("<I", bits << 16 if elem == "bf16" else bits))[0])
    except struct.error:
        raise ForeignError(f"{bits:#x} does not fit into {elem}") from None


# -- names ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Use:
    """A use of a value: the operation, its block, and the position of the operand."""

    op: Op
    block: Block
    at: int


class Names:
    """Gives each value of a function a unique name (MLIR reuses names in other regions), and finds the value's uses."""

    def __init__(self, function: Function) -> None:
        self.uses: dict[str, list[Use]] = {}
        self.defined: dict[str, Op] = {}
        self.home: dict[str, Block] = {}
        self._count = 0
        scope: dict[str, str] = {}
        function.args = [(self._define(name, scope), t) for name, t in function.args]
        self._blocks(function.blocks, scope)

    def _define(self, name: str, scope: dict[str, str]) -> str:
        self._count += 1
        new = scope[name] = f"{self._count}"
        self.uses[new] = []
        return new

    def _blocks(self, blocks: list[Block], scope: dict[str, str]) -> None:
        for block in blocks:
            block.args = [(self._define(name, scope), t) for name, t in block.args]
            self.home.update(dict.fromkeys([name for name, _ in block.args], block))
        for block in blocks:
            for op in block.ops:
                self._op(op, block, scope)

    def _op(self, op: Op, block: Block, scope: dict[str, str]) -> None:
        inner = dict(scope) if op.regions else scope
        bound: list[int] = []
        if op.name == "scf.for":
            bound = [0, *range(4, len(op.operands), 2)]
        elif op.name == "scf.while":
            bound = list(range(0, len(op.operands), 2))
        for k, name in enumerate(op.operands):
            if k in bound:
                continue
            new = scope.get(name)
            if new is None:
                raise ForeignError(f"{op.place}: {name[:40]} is not defined")
            op.operands[k] = new
            self.uses[new].append(Use(op, block, k))
        for label, passed in op.targets:
            for k, name in enumerate(passed):
                if name not in scope:
                    raise ForeignError(f"{op.place}: {name[:40]} is not defined")
                passed[k] = scope[name]
                self.uses[passed[k]].append(Use(op, block, -1))
            del label
        for k in bound:
            op.operands[k] = self._define(op.operands[k], inner)
        for region in op.regions:
            self._blocks(region, dict(inner))
        for k in bound:
            self.home[op.operands[k]] = op.regions[0][0] if op.regions else block
        for k, name in enumerate(op.results):
            op.results[k] = self._define(name, scope)
            self.defined[op.results[k]] = op
            self.home[op.results[k]] = block
