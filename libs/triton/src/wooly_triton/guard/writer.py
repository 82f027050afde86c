"""Base of the guards: a function, and the operations that are inserted before its own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from wooly_triton.ops import is_float
from wooly_triton.text import Function, Op, Type

NAME: Final = r"%[A-Za-z0-9_$.\-]+(?:#\d+)?"
_CONSTANT: Final = re.compile(r"arith\.constant (?:dense<)?(-?\d+)>? :")


@dataclass(slots=True)
class Def:
    """The definition of a name.

    Attributes:
        op: the operation; None for an argument of the function or of a block.
        argument: number of the function's argument.
        passed: number of the value that a loop passes on.
        depth: number of loops around the definition.
    """

    op: Op | None = None
    argument: int = -1
    passed: int = -1
    depth: int = 0


Scope = dict[str, Def]


@dataclass(slots=True)
class Loop:
    """A counting loop: its counter, first value, step (1 or more), and the counter's type."""

    counter: str
    low: str
    step: str
    type: str


@dataclass
class GuardWriter:
    """One function while guards are inserted."""

    lines: list[str]
    function: Function
    args: Sequence[str]
    claims: Sequence[int]
    threads: int
    _out: dict[int, list[str]] = field(default_factory=dict)
    _new: list[str] = field(default_factory=list)
    _places: list[str] = field(default_factory=list)
    _extra: list[tuple[int, int]] = field(default_factory=list)
    _written: set[int] = field(default_factory=set)
    _loops: dict[int, Loop] = field(default_factory=dict)
    _prefix: str = ""
    _count: int = 0
    #: For each loop around the current operation: whether it contains a product.
    _loops_around: list[bool] = field(default_factory=list)

    def _name(self) -> str:
        self._count += 1
        return f"{self._prefix}{self._count}"

    def _put(self, text: str) -> str:
        """Insert an operation before the current one, and return the name of its result."""
        name = self._name()
        self._new.append(f"{name} = {text}")
        return name

    def _constant(self, t: Type, value: str) -> str:
        return self._put(constant(t, value))

    def _binary(self, what: str, a: str, b: str, t: Type) -> str:
        return self._put(f"{what} {a}, {b} : {t}")

    def _select(self, condition: str, a: str, b: str, t: Type) -> str:
        kind = f"{Type('i1', t.shape)}, {t}" if t.shape is not None else str(t)
        return self._put(f"arith.select {condition}, {a}, {b} : {kind}")

    def _splat(self, value: str, elem: Type, shape: tuple[int, ...] | None) -> str:
        if shape is None:
            return value
        return self._put(f"tt.splat {value} : {elem} -> {Type(elem.elem, shape, elem.pointer)}")

    def _length(self, argument: int, unit: int) -> str:
        """Return the name of the length of an argument's buffer, and add it to the parameters."""
        if (argument, unit) not in self._extra:
            self._extra.append((argument, unit))
        return f"{self._prefix}n{argument}_{unit}"

    def _number(self, name: str, scope: Scope) -> int | None:
        """Return the constant integer that a name holds; None if it is not known."""
        made = scope.get(name)
        if made is None or made.op is None or made.op.name != "arith.constant":
            return None
        found = _CONSTANT.search(self.lines[made.op.line - 1])
        return None if found is None else int(found[1])

    @staticmethod
    def _named(name: str, text: str, t: Type) -> str:
        kind = f"{Type('i1', t.shape)}, {t}" if t.shape is not None else str(t)
        return f"    {name} = {text}{kind}"


def constant(t: Type, value: str) -> str:
    """Return the operation for a constant whose elements are all `value`."""
    if t == Type("i1"):  # MLIR does not print its type
        return f"arith.constant {value}"
    return f"arith.constant {f'dense<{value}>' if t.shape is not None else value} : {t}"


def zero(elem: str) -> str:
    """Return 0 as a constant of an element type."""
    if elem == "i1":
        return "false"
    return "0.0" if is_float(elem) else "0"
