"""The data model of kernel IR. Plain values; `laws` says which values are valid.

A kernel is run once for every point of its index space; points are independent and come in any order. Inside a point, code runs
in order, but for three shapes of loop: `For` is sequential, `Lanes` runs its iterations in any order and at the same time,
`Reduce` folds in a fixed order that does not depend on the chip. Lanes are what a GPU gives to the threads of one work-group
and a CPU to the elements of a vector; the end of `Lanes` or `Reduce` is a barrier. So one kernel has both loop structures.

Values are numbered in the order in which the text writes them; a value is defined once. There are no pointers: an array is
named, an index counts its elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from wooly_wis.dtypes import DType
from wooly_wis.program import Role

Number: TypeAlias = bool | int | float


@dataclass(frozen=True, slots=True)
class Array:
    """Memory that a launch is given.

    Attributes:
        name: as the kernel calls it.
        dtype: of its elements.
        numel: how many elements the launch must give at least.
        role: whether it is read, written or both.
    """

    name: str
    dtype: DType
    numel: int
    role: Role


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory of one point, shared by its lanes: a GPU's shared memory, a CPU's stack. Its content is undefined at first."""

    name: str
    dtype: DType
    numel: int


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number that a launch is given."""

    name: str
    dtype: DType


@dataclass(frozen=True, slots=True)
class Const:
    """A number of the kernel."""

    out: int
    dtype: DType
    value: Number


@dataclass(frozen=True, slots=True)
class Param:
    """The launch's scalar of that name."""

    out: int
    name: str


@dataclass(frozen=True, slots=True)
class Apply:
    """A row of `ops.OPS`. `dtype` is that of the result."""

    out: int
    op: str
    dtype: DType
    args: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """An element. Where `mask` is false, or `checked` and out of range, nothing is read and the result is 0."""

    out: int
    array: str
    index: int
    mask: int | None = None
    checked: bool = False


@dataclass(frozen=True, slots=True)
class Store:
    """Write an element. Where `mask` is false, or `checked` and out of range, nothing is written."""

    array: str
    index: int
    value: int
    mask: int | None = None
    checked: bool = False


@dataclass(frozen=True, slots=True)
class Atomic:
    """Combine an element with a value; `kind` is of `ops.ATOMICS`. The result is what was there, 0 where nothing is done."""

    out: int
    kind: str
    array: str
    index: int
    value: int
    mask: int | None = None
    checked: bool = False


@dataclass(frozen=True, slots=True)
class For:
    """Sequential: `index` goes from `lower` to below `upper` by `step`; `args` hold `inits`, then what the body yielded last."""

    results: tuple[int, ...]
    index: int
    lower: int
    upper: int
    step: int
    args: tuple[int, ...]
    inits: tuple[int, ...]
    body: Block
    yields: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Lanes:
    """`extent` independent iterations; after them, all they wrote is seen by everyone in the point."""

    index: int
    extent: int
    body: Block


@dataclass(frozen=True, slots=True)
class Reduce:
    """A fold in a fixed order.

    Lane l of `lanes` starts from `inits` and combines with what the body yields for l, l + lanes, l + 2*lanes, … in this order.
    Then lanes are combined pairwise: l with l + lanes/2, then l with l + lanes/4, …; lane 0 holds the results.

    Attributes:
        inits: neutral elements of the combination.
        left: the accumulator, as `combine` sees it.
        right: what comes to it.
        combined: what `combine` yields.
    """

    results: tuple[int, ...]
    index: int
    extent: int
    lanes: int
    inits: tuple[int, ...]
    body: Block
    yields: tuple[int, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    combine: Block
    combined: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class If:
    """One of two blocks; its yields are the results."""

    results: tuple[int, ...]
    condition: int
    then: Block
    then_yields: tuple[int, ...]
    otherwise: Block
    otherwise_yields: tuple[int, ...]


Statement: TypeAlias = Const | Param | Apply | Load | Store | Atomic | For | Lanes | Reduce | If
Block: TypeAlias = tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel.

    Attributes:
        name: an identifier.
        arrays: memory of a launch, in the order of its bindings. An array that is written overlaps no other.
        scalars: numbers of a launch, in the order of its bindings.
        scratch: memory of each point.
        space: extent of the index space in each dimension; the last is the one along which neighbours in memory lie.
        points: the value of each coordinate.
        body: what is done at a point.
    """

    name: str
    arrays: tuple[Array, ...]
    scalars: tuple[Scalar, ...]
    scratch: tuple[Scratch, ...]
    space: tuple[int, ...]
    points: tuple[int, ...]
    body: Block


def blocks(statement: Statement) -> tuple[Block, ...]:
    """The blocks inside a statement."""
    match statement:
        case For() | Lanes():
            return (statement.body,)
        case Reduce():
            return statement.body, statement.combine
        case If():
            return statement.then, statement.otherwise
    return ()


def walk(block: Block) -> Iterator[Statement]:
    """Every statement, outer ones before inner ones."""
    for statement in block:
        yield statement
        for inner in blocks(statement):
            yield from walk(inner)


def has_lanes(kernel: Kernel) -> bool:
    """Whether points are work-groups (some code is spread over lanes) or single elements."""
    return any(isinstance(s, (Lanes, Reduce)) for s in walk(kernel.body))
