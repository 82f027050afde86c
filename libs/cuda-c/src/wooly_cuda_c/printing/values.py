"""What an expression is while a kernel is printed, and what is learned of its variables."""

from __future__ import annotations

from dataclasses import dataclass, field

from wooly_cuda_c.printing.types import Type


@dataclass(slots=True)
class Value:
    """An expression.

    Attributes:
        text: what computes it; of what is in memory, a pointer to it.
        type: its type.
        const: its number, if that is known.
        place: ``""`` a value, ``var`` a variable of the printed text, ``mem`` an object in memory.
        space: of an object in memory.
        varying: threads of a block may have different ones; of an object in memory, different places.
        root: what a pointer goes back to, in words.
        readonly: it must not be assigned to.
        variable: whose (part) it is.
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


@dataclass(slots=True)
class Variable:
    """A name in a scope.

    Attributes:
        key: who it is, for `Facts`.
        value: what its name stands for.
        reference: it is another object's other name.
    """

    key: int
    value: Value
    reference: bool = False


@dataclass(slots=True)
class Facts:
    """What is learned of a function while it is printed; it is printed again until nothing new is learned.

    Attributes:
        varying: variables that differ from thread to thread.
        divergent: loops that some threads leave before others.
        spaces: of pointers that were declared without a value.
        roots: of pointers.
        barriers: loops with a barrier in them, and the function itself if it has one.
        result_varying: threads may get different results.
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
        """Changes with everything that is learned."""
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
