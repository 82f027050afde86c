"""The unit of work: two numbers per instruction, estimated from its form alone. They are never much too small.

`elements` counts the elements that an operator processes one by one, in additions: an element with a more expensive function
counts several times. `flops` counts the arithmetic of matrix products, convolutions, attention and decompositions, for which
libraries are much faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wooly_wis.dtypes import DType
from wooly_wis.program import View


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one instruction.

    Attributes:
        elements: elements that it processes, in units of one float addition.
        flops: arithmetic of products, in float32 operations.
    """

    elements: int
    flops: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.elements + other.elements, self.flops + other.flops)

    def times(self, n: int) -> Work:
        """Return `n` times this work."""
        return Work(self.elements * n, self.flops * n)


class Param:
    """Placeholder for a number that only a run has."""


PARAM = Param()

#: Cost of one operation in a dtype, in float32 operations, on any device. `Limits` handles half precision.
PRODUCT_FACTOR = {DType.F64: 2, DType.C64: 4, DType.C128: 8}
#: The same for integers, for which libraries have no fast products.
INTEGER_FACTOR = 32


def product(sizes: Iterable[int]) -> int:
    """Return the number of elements of a shape."""
    return math.prod(sizes)


def broadcast(shapes: Iterable[Sequence[int]]) -> int:
    """Return the number of elements of the broadcast shape. If the shapes do not broadcast, take the larger size of each
    dimension.
    """
    space: dict[int, int] = {}
    for sizes in shapes:
        for k, size in enumerate(reversed(sizes)):
            found = space.get(k, 1)
            space[k] = size if found == 1 else found if size == 1 else max(found, size)
    return product(space.values())


def stored(view: View) -> int:
    """Return the number of elements that a view has in memory: elements repeated by a stride of 0 count once."""
    return product(size for size, stride in zip(view.sizes, view.strides, strict=True) if stride or not size)


def log2(n: int) -> int:
    """Return the number of bits of `n`, at least 1: an upper bound of its logarithm to base 2."""
    return max(n.bit_length(), 1)


class Given:
    """The arguments of one form, by their names in the operator's schema.

    Attributes:
        values: views for tensors, `PARAM` for params, constants as they are.
        outs: views of the results as the form states them, not yet checked.
    """

    def __init__(self, values: Mapping[str, Any], outs: Sequence[View]) -> None:
        self.values = values
        self.outs = outs

    def view(self, name: str) -> View | None:
        """Return the view of a tensor argument, or None."""
        found = self.values.get(name)
        return found if isinstance(found, View) else None

    def sizes(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor argument, or () if it is missing."""
        found = self.view(name)
        return found.sizes if found is not None else ()

    def numel(self, name: str) -> int:
        """Return the number of elements of a tensor argument, or 0 if it is missing."""
        found = self.view(name)
        return found.numel if found is not None else 0

    def tensors(self, name: str) -> list[View]:
        """Return the views of an argument that is a list of tensors."""
        found = self.values.get(name)
        return [v for v in found if isinstance(v, View)] if isinstance(found, tuple) else []

    def number(self, name: str, default: int = 0) -> int:
        """Return a constant integer, or `default` if the argument is missing or is a param."""
        found = self.values.get(name)
        return int(found) if isinstance(found, (int, float)) and math.isfinite(found) else default

    def numbers(self, name: str, n: int, default: int) -> list[int]:
        """Return `n` integers. If the argument has fewer, its last number is repeated."""
        found = self.values.get(name)
        items = list(found) if isinstance(found, tuple) else [found]
        known = [int(v) if isinstance(v, int) else default for v in items if v is not None] or [default]
        return (known + [known[-1]] * n)[:n]

    def views(self) -> Iterator[View]:
        """Yield the views of all tensors, including those in lists."""
        for value in self.values.values():
            if isinstance(value, View):
                yield value
            elif isinstance(value, tuple):
                yield from [v for v in value if isinstance(v, View)]

    def space(self) -> int:
        """Return the number of elements of the broadcast shape of all tensors and results, without lists."""
        shapes = [v.sizes for v in self.values.values() if isinstance(v, View)]
        return max([broadcast(shapes), *[v.numel for v in self.outs]])

    def touched(self) -> int:
        """Return the number of elements of all tensors and all results."""
        return sum([v.numel for v in self.views()]) + sum([v.numel for v in self.outs])

    def factor(self) -> int:
        """Return the cost of one operation in the widest dtype of the arguments, in float32 operations, without half
        precision.
        """
        dtypes = {v.dtype for v in self.views() if len(v.sizes) > 1} or {v.dtype for v in self.views()}
        if dtypes and all(d.kind in ("int", "uint", "bool") for d in dtypes):
            return INTEGER_FACTOR
        return max([PRODUCT_FACTOR.get(d, 1) for d in dtypes], default=1)
