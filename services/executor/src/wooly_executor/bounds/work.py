"""How much work an instruction is: two numbers, estimated from its form alone, never too small by more than a small factor.

`elements` counts what an operator goes over one by one; an element that costs more than an addition counts more than once.
`flops` counts the arithmetic of matrix products, convolutions, attention and decompositions, which libraries do far faster.
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
    """What one instruction does.

    Attributes:
        elements: elements that it goes over, in additions of a float.
        flops: arithmetic of products, in operations of float32.
    """

    elements: int
    flops: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.elements + other.elements, self.flops + other.flops)

    def times(self, n: int) -> Work:
        """So many times the same."""
        return Work(self.elements * n, self.flops * n)


class Param:
    """Stands for a number that only a run has."""


PARAM = Param()

#: Operations of float32 that one operation of a dtype takes on any device; half precision is left to the device.
PRODUCT_FACTOR = {DType.F64: 2, DType.C64: 4, DType.C128: 8}
#: The same for integers: no library has fast products of them.
INTEGER_FACTOR = 32


def product(sizes: Iterable[int]) -> int:
    """The number of elements of a shape."""
    return math.prod(sizes)


def broadcast(shapes: Iterable[Sequence[int]]) -> int:
    """Elements of the index space that shapes broadcast to; where they do not, of one that is no smaller."""
    space: dict[int, int] = {}
    for sizes in shapes:
        for k, size in enumerate(reversed(sizes)):
            found = space.get(k, 1)
            space[k] = size if found == 1 else found if size == 1 else max(found, size)
    return product(space.values())


def stored(view: View) -> int:
    """Elements that a view shows and memory holds: one that a stride of 0 repeats counts once."""
    return product(size for size, stride in zip(view.sizes, view.strides, strict=True) if stride or not size)


def log2(n: int) -> int:
    """Rounded up, at least 1."""
    return max(n.bit_length(), 1)


class Given:
    """The arguments of one form, by the names of the operator's schema.

    Attributes:
        values: views for tensors, `PARAM` for what only a run has, constants as they are.
        outs: views of the results, as announced; nobody has checked them yet.
    """

    def __init__(self, values: Mapping[str, Any], outs: Sequence[View]) -> None:
        self.values = values
        self.outs = outs

    def view(self, name: str) -> View | None:
        """A tensor argument, if it is there."""
        found = self.values.get(name)
        return found if isinstance(found, View) else None

    def sizes(self, name: str) -> tuple[int, ...]:
        """Its shape; () where it is not there."""
        found = self.view(name)
        return found.sizes if found is not None else ()

    def numel(self, name: str) -> int:
        """Its elements; 0 where it is not there."""
        found = self.view(name)
        return found.numel if found is not None else 0

    def tensors(self, name: str) -> list[View]:
        """A list of tensors."""
        found = self.values.get(name)
        return [v for v in found if isinstance(v, View)] if isinstance(found, tuple) else []

    def number(self, name: str, default: int = 0) -> int:
        """A constant whole number; `default` where there is none, or only a run has it."""
        found = self.values.get(name)
        return int(found) if isinstance(found, (int, float)) and math.isfinite(found) else default

    def numbers(self, name: str, n: int, default: int) -> list[int]:
        """A list of `n` whole numbers, of which the last stands for what is missing."""
        found = self.values.get(name)
        items = list(found) if isinstance(found, tuple) else [found]
        known = [int(v) if isinstance(v, int) else default for v in items if v is not None] or [default]
        return (known + [known[-1]] * n)[:n]

    def views(self) -> Iterator[View]:
        """All tensors, in lists too."""
        for value in self.values.values():
            if isinstance(value, View):
                yield value
            elif isinstance(value, tuple):
                yield from [v for v in value if isinstance(v, View)]

    def space(self) -> int:
        """Elements of the index space that the tensors and the results broadcast to, lists apart."""
        shapes = [v.sizes for v in self.values.values() if isinstance(v, View)]
        return max([broadcast(shapes), *[v.numel for v in self.outs]])

    def touched(self) -> int:
        """Elements of all tensors and all results."""
        return sum([v.numel for v in self.views()]) + sum([v.numel for v in self.outs])

    def factor(self) -> int:
        """Operations of float32 per operation of the widest dtype of the arguments, half precision apart."""
        dtypes = {v.dtype for v in self.views() if len(v.sizes) > 1} or {v.dtype for v in self.views()}
        if dtypes and all(d.kind in ("int", "uint", "bool") for d in dtypes):
            return INTEGER_FACTOR
        return max([PRODUCT_FACTOR.get(d, 1) for d in dtypes], default=1)
