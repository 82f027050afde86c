"""The data model of kernel IR. These are plain values; `laws` decides which values are valid.

A kernel runs once for every point of its index space. Points are independent and run in any order. Inside a point, code runs in
order, with three kinds of loop: `For` is sequential. `Lanes` runs its iterations in any order and at the same time. `Reduce`
combines values in a fixed order that does not depend on the chip. A GPU maps lanes to the threads of one work-group, a CPU maps
them to the elements of a vector. The end of `Lanes` or `Reduce` is a barrier. So one kernel serves GPUs and CPUs.

Values are numbered in the order of the text, and each value is defined once. There are no pointers: an access names an array and
the index of an element.
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
    """An array that a launch provides.

    Attributes:
        name: name in the kernel.
        dtype: dtype of the elements.
        numel: minimum number of elements that the launch must provide.
        role: whether the kernel reads the array, writes it, or both.
    """

    name: str
    dtype: DType
    numel: int
    role: Role


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory of one point, shared by its lanes: shared memory on a GPU, stack memory on a CPU. Its initial content is
    undefined.
    """

    name: str
    dtype: DType
    numel: int


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number that a launch provides."""

    name: str
    dtype: DType


@dataclass(frozen=True, slots=True)
class Const:
    """A constant."""

    out: int
    dtype: DType
    value: Number


@dataclass(frozen=True, slots=True)
class Param:
    """The value of the launch's scalar `name`."""

    out: int
    name: str


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply an operation of `ops.OPS`. `dtype` is the dtype of the result."""

    out: int
    op: str
    dtype: DType
    args: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Read an element. If `mask` is false, or the access is `checked` and the index is out of range, the result is 0 and
    nothing is read.
    """

    out: int
    array: str
    index: int
    mask: int | None = None
    checked: bool = False


@dataclass(frozen=True, slots=True)
class Store:
    """Write an element. If `mask` is false, or the access is `checked` and the index is out of range, nothing is written."""

    array: str
    index: int
    value: int
    mask: int | None = None
    checked: bool = False


@dataclass(frozen=True, slots=True)
class Atomic:
    """Combine an element with a value atomically; `kind` is one of `ops.ATOMICS`. The result is the old element, or 0 without
    access.
    """

    out: int
    kind: str
    array: str
    index: int
    value: int
    mask: int | None = None
    checked: bool = False


@dataclass(frozen=True, slots=True)
class For:
    """A sequential loop: `index` runs from `lower` up to, but not including, `upper`, by `step`.

    In the first iteration, `args` have the values of `inits`; later, the values that the body yielded in the previous iteration.
    """

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
    """`extent` independent iterations. After the last one, all lanes of the point see everything that the iterations wrote."""

    index: int
    extent: int
    body: Block


@dataclass(frozen=True, slots=True)
class Reduce:
    """A reduction in a fixed order.

    Lane l of `lanes` starts with `inits` and combines the values that the body yields for l, l + lanes, l + 2*lanes, …, in this
    order. Then lanes are combined pairwise: l with l + lanes/2, then l with l + lanes/4, …. At the end, lane 0 holds the results.

    Attributes:
        inits: neutral elements of the combination.
        left: the accumulator, inside `combine`.
        right: the value to add to the accumulator, inside `combine`.
        combined: the new accumulator, which `combine` yields.
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
    """Run one of two blocks. The values that the block yields are the results."""

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
        arrays: arrays of a launch, in binding order. A written array does not overlap another array.
        scalars: numbers of a launch, in binding order.
        scratch: memory of each point.
        space: extent of the index space in each dimension. Neighbours along the last dimension are neighbours in memory.
        points: the value that holds each coordinate.
        body: code for one point.
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
    """Yield every statement, outer statements before inner statements."""
    for statement in block:
        yield statement
        for inner in blocks(statement):
            yield from walk(inner)


def has_lanes(kernel: Kernel) -> bool:
    """Whether each point is a work-group with lanes (True) or a single element (False)."""
    return any(isinstance(s, (Lanes, Reduce)) for s in walk(kernel.body))
