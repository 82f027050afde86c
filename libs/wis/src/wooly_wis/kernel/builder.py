"""Builds kernels statement by statement. Values get their numbers at creation; blocks are context managers.

k = KernelBuilder("scale", (n,))
x, y = k.array("x", DType.F32, n), k.array("y", DType.F32, n, Role.OUT)
(i,) = k.points
k.store(y, i, k.apply("mul", k.load(x, i), k.const(DType.F32, 2.0)))
kernel = k.finish()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from wooly_wis.dtypes import DType
from wooly_wis.kernel.ir import (
    Apply,
    Array,
    Atomic,
    Block,
    Const,
    For,
    If,
    Kernel,
    Lanes,
    Load,
    Number,
    Param,
    Reduce,
    Scalar,
    Scratch,
    Statement,
    Store,
)
from wooly_wis.kernel.ops import FLOATS
from wooly_wis.program import Role


@dataclass(frozen=True, slots=True)
class Value:
    """A value of the kernel that is built."""

    number: int
    dtype: DType


@dataclass(slots=True)
class ReduceBlock:
    """An open reduction: set `yields` inside its block, read `results` after the block."""

    index: Value
    results: tuple[Value, ...]
    yields: tuple[Value, ...] = ()


@dataclass(slots=True)
class LoopBlock:
    """An open sequential loop: `args` are the carried values. Set `yields` inside its block, read `results` after the block."""

    index: Value
    args: tuple[Value, ...]
    results: tuple[Value, ...]
    yields: tuple[Value, ...] = ()


@dataclass(slots=True)
class IfBlock:
    """An open `if`: both blocks append their `yields`; read `results` after the block."""

    results: tuple[Value, ...]
    yields: list[tuple[Value, ...]] = field(default_factory=list)


class KernelBuilder:
    """Builds one kernel.

    Args:
        name: an identifier.
        space: extents of the index space.
    """

    def __init__(self, name: str, space: Sequence[int]) -> None:
        self.name = name
        self.space = tuple(space)
        self._next = 0
        self.points = tuple([self.new_value(DType.I64) for _ in space])
        self._arrays: list[Array] = []
        self._scalars: list[Scalar] = []
        self._scratch: list[Scratch] = []
        self._open: list[list[Statement]] = [[]]

    def new_value(self, dtype: DType) -> Value:
        """Reserve the number of a value that a later statement defines."""
        self._next += 1
        return Value(self._next - 1, dtype)

    def _emit(self, statement: Statement) -> None:
        self._open[-1].append(statement)

    # -- the head ----------------------------------------------------------------------------------------------------

    def array(self, name: str, dtype: DType, numel: int, role: Role = Role.IN) -> Array:
        """Add an array to the launch."""
        self._arrays.append(Array(name, dtype, numel, role))
        return self._arrays[-1]

    def scalar(self, name: str, dtype: DType) -> Scalar:
        """Add a scalar to the launch."""
        self._scalars.append(Scalar(name, dtype))
        return self._scalars[-1]

    def scratch(self, name: str, dtype: DType, numel: int) -> Scratch:
        """Add scratch memory to each point."""
        self._scratch.append(Scratch(name, dtype, numel))
        return self._scratch[-1]

    # -- values ------------------------------------------------------------------------------------------------------

    def const(self, dtype: DType, value: Number) -> Value:
        """A constant, converted to the Python type of `dtype`."""
        out = self.new_value(dtype)
        fitting: Number = float(value) if dtype in FLOATS else bool(value) if dtype is DType.BOOL else int(value)
        self._emit(Const(out.number, dtype, fitting))
        return out

    def param(self, scalar: Scalar) -> Value:
        """The value of a scalar of the launch."""
        out = self.new_value(scalar.dtype)
        self._emit(Param(out.number, scalar.name))
        return out

    def apply(self, op: str, *args: Value, dtype: DType | None = None) -> Value:
        """Apply an operation. The result has the last argument's type; a comparison gives a truth value; `dtype` overrides
        both.
        """
        if dtype is None:
            dtype = DType.BOOL if op in ("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf") else args[-1].dtype
        out = self.new_value(dtype)
        self._emit(Apply(out.number, op, dtype, tuple([a.number for a in args])))
        return out

    def convert(self, value: Value, dtype: DType) -> Value:
        """Convert a value to a dtype. A value of this dtype is returned unchanged."""
        return value if value.dtype is dtype else self.apply("convert", value, dtype=dtype)

    def load(self, array: Array | Scratch, index: Value, mask: Value | None = None, *, checked: bool = False) -> Value:
        """Read an element."""
        out = self.new_value(array.dtype)
        self._emit(Load(out.number, array.name, index.number, mask.number if mask is not None else None, checked))
        return out

    def store(
        self, array: Array | Scratch, index: Value, value: Value, mask: Value | None = None, *, checked: bool = False
    ) -> None:
        """Write an element."""
        at = mask.number if mask is not None else None
        self._emit(Store(array.name, index.number, value.number, at, checked))

    def atomic(
        self,
        kind: str,
        array: Array | Scratch,
        index: Value,
        value: Value,
        mask: Value | None = None,
        *,
        checked: bool = False,
    ) -> Value:
        """Combine an element with a value at once."""
        out = self.new_value(array.dtype)
        at = mask.number if mask is not None else None
        self._emit(Atomic(out.number, kind, array.name, index.number, value.number, at, checked))
        return out

    def each(self, *ops: str) -> Callable[[Sequence[Value], Sequence[Value]], Sequence[Value]]:
        """A combination for `reduce` that applies one operation per value."""
        return lambda left, right: [self.apply(op, a, b) for op, a, b in zip(ops, left, right, strict=True)]

    # -- blocks ------------------------------------------------------------------------------------------------------

    def _close(self) -> Block:
        return tuple(self._open.pop())

    @contextmanager
    def lanes(self, extent: int) -> Iterator[Value]:
        """Independent iterations; the block gets the index."""
        index = self.new_value(DType.I64)
        self._open.append([])
        yield index
        body = self._close()
        self._emit(Lanes(index.number, extent, body))

    @contextmanager
    def loop(self, lower: Value, upper: Value, step: int = 1, inits: Sequence[Value] = ()) -> Iterator[LoopBlock]:
        """A sequential loop."""
        results = tuple([self.new_value(v.dtype) for v in inits])
        index = self.new_value(DType.I64)
        made = LoopBlock(index, tuple([self.new_value(v.dtype) for v in inits]), results)
        self._open.append([])
        yield made
        body = self._close()
        self._emit(
            For(
                results=_numbers(results),
                index=index.number,
                lower=lower.number,
                upper=upper.number,
                step=step,
                args=_numbers(made.args),
                inits=_numbers(inits),
                body=body,
                yields=_numbers(made.yields),
            )
        )

    @contextmanager
    def reduce(
        self,
        extent: int,
        lanes: int,
        inits: Sequence[Value],
        combine: Callable[[Sequence[Value], Sequence[Value]], Sequence[Value]],
    ) -> Iterator[ReduceBlock]:
        """A reduction. `combine` gets the accumulator and the new values, and returns the new accumulator."""
        made = ReduceBlock(Value(-1, DType.I64), tuple([self.new_value(v.dtype) for v in inits]))
        made.index = self.new_value(DType.I64)
        self._open.append([])
        yield made
        body = self._close()
        left = tuple([self.new_value(v.dtype) for v in inits])
        right = tuple([self.new_value(v.dtype) for v in inits])
        self._open.append([])
        combined = combine(left, right)
        block = self._close()
        self._emit(
            Reduce(
                _numbers(made.results),
                made.index.number,
                extent,
                lanes,
                _numbers(inits),
                body,
                _numbers(made.yields),
                _numbers(left),
                _numbers(right),
                block,
                _numbers(combined),
            )
        )

    @contextmanager
    def when(self, condition: Value, dtypes: Sequence[DType] = ()) -> Iterator[IfBlock]:
        """An `if`: call `otherwise` between the two blocks, and append to `yields` at the end of each block."""
        made = IfBlock(tuple([self.new_value(d) for d in dtypes]))
        self._open.append([])
        depth = len(self._open)
        yield made
        otherwise: Block = ()
        if len(self._open) > depth:
            otherwise = self._close()
        then = self._close()
        yields = [_numbers(y) for y in made.yields] or [(), ()]
        if len(yields) == 1:
            yields.append(())
        self._emit(If(_numbers(made.results), condition.number, then, yields[0], otherwise, yields[1]))

    def otherwise(self) -> None:
        """End the first block of an `if`, and begin the second block."""
        self._open.append([])

    def finish(self) -> Kernel:
        """The finished kernel."""
        return Kernel(
            self.name,
            tuple(self._arrays),
            tuple(self._scalars),
            tuple(self._scratch),
            self.space,
            _numbers(self.points),
            tuple(self._open[0]),
        )


def _numbers(values: Sequence[Value]) -> tuple[int, ...]:
    return tuple([v.number for v in values])
