"""Expressions while a kernel is printed, and facts that are learned of its variables."""

from __future__ import annotations

from dataclasses import dataclass, field

from wooly_cuda_c.printing.types import Type


@dataclass(frozen=True, slots=True)
class Linear:
    """How a value depends on its thread's position in the block: evenly, in each dimension. See `lockstep`.

    Attributes:
        text: text that computes it, with marks for the position; it reads nothing that changes while threads run it.
        slopes: growth along x, y and z, modulo 2^64; empty: no growth.
        checks: conditions under which no number that it is made of has wrapped.
    """

    text: str
    slopes: tuple[str, str, str]
    checks: tuple[str, ...]


@dataclass(slots=True)
class Value:
    """An expression.

    Attributes:
        text: text that computes it; for an object in memory, a pointer to it.
        type: its type.
        const: its number, if it is known.
        place: ``""`` a value, ``var`` a variable of the printed text, ``mem`` an object in memory.
        space: memory space of an object in memory.
        varying: whether it may differ between threads of a block; for an object in memory, whether its address may.
        root: description of the memory that a pointer belongs to.
        readonly: whether it must not be assigned to.
        variable: the variable that it is, or is a part of.
        linear: how it depends on the thread's position, if this is known; of an object in memory: its address.
        always, never: conditions under which it is true in all threads, or in no thread; empty: not known.
    """

    text: str
    type: Type
    const: float | int | None = None
    place: str = ""
    space: str = ""
    varying: bool = False
    root: str = ""
    readonly: bool = False
    variable: Variable | None = None
    linear: Linear | None = None
    always: str = ""
    never: str = ""


@dataclass(slots=True)
class Variable:
    """A name in a scope.

    Attributes:
        key: its identity in `Facts`.
        value: the value of the name.
        reference: whether it is a reference to another object.
    """

    key: int
    value: Value
    reference: bool = False


@dataclass(slots=True)
class Facts:
    """Facts learned of a function while it is printed. It is printed again until nothing new is learned.

    Attributes:
        varying: variables that may differ between threads.
        divergent: loops that some threads leave before others.
        barriers: statements that contain a barrier, and the function itself if it has one.
        spaces: memory spaces of pointers that were declared without a value.
        roots: roots of pointers.
        result_varying: whether threads may get different results.
        result: type of the result, if it was deduced.
        result_root: root of a pointer that the function returns.
    """

    varying: set[int] = field(default_factory=set)
    divergent: set[int] = field(default_factory=set)
    barriers: set[int] = field(default_factory=set)
    spaces: dict[int, str] = field(default_factory=dict)
    roots: dict[int, str] = field(default_factory=dict)
    result_varying: bool = False
    result: Type | None = None
    result_root: str = ""

    @property
    def size(self) -> tuple[object, ...]:
        """A summary that changes with every new fact."""
        return (
            len(self.varying),
            len(self.divergent),
            len(self.barriers),
            len(self.spaces),
            tuple(self.roots.values()),
            self.result_varying,
            self.result,
            self.result_root,
        )
