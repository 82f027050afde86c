"""Interprets a kernel: the definition of kernel IR, with which tests compare generated code.

The interpreter is plain Python on lists, for small sizes. It runs lanes one after another, which is one of the allowed orders.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, MutableSequence
from typing import TypeAlias

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
    Scratch,
    Statement,
    Store,
)
from wooly_wis.kernel.laws import verify
from wooly_wis.kernel.ops import rounded

from wooly_testkit import kernel_scalars

Memory: TypeAlias = "dict[str, MutableSequence[Number]]"
Element: TypeAlias = Callable[[str, DType, list[Number], list[DType]], Number]


def run(
    kernel: Kernel,
    arrays: Mapping[str, MutableSequence[Number]],
    values: Mapping[str, Number] | None = None,
    element: Element = kernel_scalars.apply,
) -> None:
    """Execute a kernel on lists of Python numbers, one list per array (16-bit floats as floats).

    Args:
        kernel: the kernel; it is verified first.
        arrays: memory by name, changed in place.
        values: scalars by name.
        element: computes an operation. A test can replace it, to compute elementary functions as a device does.

    Raises:
        KernelError: the kernel is not valid.
        ValueError: a list is shorter than its array.
    """
    verify(kernel)
    for a in kernel.arrays:
        if len(arrays[a.name]) < a.numel:
            raise ValueError(f"array {a.name} has {len(arrays[a.name])} elements; the kernel needs {a.numel}")
    machine = _Machine(kernel, arrays, values or {}, element)
    for point in itertools.product(*[range(n) for n in kernel.space]):
        machine.point(point)


class _Machine:
    """The state of the interpreter at one point of the index space."""

    def __init__(
        self,
        kernel: Kernel,
        arrays: Mapping[str, MutableSequence[Number]],
        values: Mapping[str, Number],
        element: Element,
    ) -> None:
        self.kernel = kernel
        self.scalars = {s.name: (values[s.name], s.dtype) for s in kernel.scalars}
        self.memory: dict[str, tuple[Array | Scratch, MutableSequence[Number]]] = {
            a.name: (a, arrays[a.name]) for a in kernel.arrays
        }
        self.values: dict[int, Number] = {}
        self.types: dict[int, DType] = {}
        self.element = element

    def point(self, point: tuple[int, ...]) -> None:
        self.values.clear()
        for s in self.kernel.scratch:
            self.memory[s.name] = (s, [0] * s.numel)
        for value, at in zip(self.kernel.points, point, strict=True):
            self.set(value, at, DType.I64)
        self.block(self.kernel.body)

    def set(self, value: int, number: Number, dtype: DType) -> None:
        self.values[value] = number
        self.types[value] = dtype

    def get(self, values: tuple[int, ...]) -> list[Number]:
        return [self.values[v] for v in values]

    def block(self, block: Block) -> None:
        for s in block:
            self.statement(s)

    def place(self, s: Load | Store | Atomic) -> int | None:
        """The index of an access; None if the access is masked or out of bounds."""
        if s.mask is not None and not self.values[s.mask]:
            return None
        index = int(self.values[s.index])
        memory = self.memory[s.array][0]
        if 0 <= index < memory.numel:
            return index
        assert s.checked, "the verifier must have proved that this access is in bounds"
        return None

    def statement(self, s: Statement) -> None:
        match s:
            case Const():
                self.set(s.out, rounded(s.value, s.dtype) if s.dtype.kind == "float" else s.value, s.dtype)
            case Param():
                self.set(s.out, *self.scalars[s.name])
            case Apply():
                types = [self.types[a] for a in s.args]
                self.set(s.out, self.element(s.op, s.dtype, self.get(s.args), types), s.dtype)
            case Load():
                memory, content = self.memory[s.array]
                at = self.place(s)
                zero: Number = 0.0 if memory.dtype.kind == "float" else memory.dtype is DType.BOOL and False
                self.set(s.out, zero if at is None else content[at], memory.dtype)
            case Store():
                at = self.place(s)
                if at is not None:
                    self.memory[s.array][1][at] = self.values[s.value]
            case Atomic():
                self.atomic(s)
            case For():
                self.loop(s)
            case Lanes():
                for k in range(s.extent):
                    self.set(s.index, k, DType.I64)
                    self.block(s.body)
            case Reduce():
                self.reduce(s)
            case If():
                then = self.values[s.condition]
                self.block(s.then if then else s.otherwise)
                self.carry(s.results, s.then_yields if then else s.otherwise_yields)

    def carry(self, to: tuple[int, ...], source: tuple[int, ...]) -> None:
        for target, number, dtype in zip(to, self.get(source), [self.types[v] for v in source], strict=True):
            self.set(target, number, dtype)

    def atomic(self, s: Atomic) -> None:
        memory, content = self.memory[s.array]
        at = self.place(s)
        old: Number = 0 if at is None else content[at]
        self.set(s.out, old, memory.dtype)
        if at is not None:
            new = self.values[s.value]
            pair = [memory.dtype] * 2
            content[at] = new if s.kind == "exchange" else kernel_scalars.apply(s.kind, memory.dtype, [old, new], pair)

    def loop(self, s: For) -> None:
        self.carry(s.args, s.inits)
        for k in range(int(self.values[s.lower]), int(self.values[s.upper]), s.step):
            self.set(s.index, k, DType.I64)
            self.block(s.body)
            self.carry(s.args, s.yields)
        self.carry(s.results, s.args)

    def reduce(self, s: Reduce) -> None:
        types = [self.types[v] for v in s.inits]
        held = [self.get(s.inits) for _ in range(s.lanes)]
        for k in range(s.extent):
            self.set(s.index, k, DType.I64)
            self.block(s.body)
            lane = k % s.lanes
            held[lane] = self.combine(s, held[lane], self.get(s.yields), types)
        half = s.lanes // 2
        while half:
            for lane in range(half):
                held[lane] = self.combine(s, held[lane], held[lane + half], types)
            half //= 2
        for result, number, dtype in zip(s.results, held[0], types, strict=True):
            self.set(result, number, dtype)

    def combine(self, s: Reduce, left: list[Number], right: list[Number], types: list[DType]) -> list[Number]:
        for value, number, dtype in zip((*s.left, *s.right), (*left, *right), (*types, *types), strict=True):
            self.set(value, number, dtype)
        self.block(s.combine)
        return self.get(s.combined)
