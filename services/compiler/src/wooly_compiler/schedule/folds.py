"""What folds of rows and folds of columns share: initial values, combinations, and the order of folds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from wooly_wis.dtypes import DType
from wooly_wis.kernel.builder import KernelBuilder, Value
from wooly_wis.kernel.ops import FLOATS

from wooly_compiler.dag import GraphNode, neutral
from wooly_compiler.schedule.values import Values

T = TypeVar("T")


class Folds(Values):
    """A kernel with folds."""

    def _rounds(self) -> list[list[int]]:
        """Return the folds in rounds. Folds of a round share a loop; each depends only on earlier rounds."""
        folds = [k for k in sorted(self.nest.needed) if self.graph.nodes[k].kind == "fold"]
        last = max([self.nest.depth[k] for k in folds] + [self.nest.depth[p.node] for p in self.puts])
        return [[k for k in folds if self.nest.depth[k] == d + 1] for d in range(last)]

    def _dtype(self, k: int) -> DType:
        return self.graph.nodes[k].dtype

    def _inits(self, nodes: Sequence[GraphNode]) -> list[Value]:
        """Return the initial values of folds. `argmax` and `argmin` have two values: value and position; at first no position."""
        found: list[Value] = []
        for n in nodes:
            dtype = self._dtype(n.args[0])
            found.append(self.k.const(dtype, neutral(n.op, dtype)))
            if n.op.startswith("arg"):
                found.append(self.k.const(DType.I64, self.nest.layout.extent))
        return found

    def _elements(self, nodes: Sequence[GraphNode]) -> list[Value]:
        """Return the elements that folds take at the current lane."""
        assert self.lane is not None
        found: list[Value] = []
        for n in nodes:
            found.append(self.value(n.args[0]))
            if n.op.startswith("arg"):
                found.append(self.lane)
        return found

    def _combine(self, nodes: Sequence[GraphNode], left: Sequence[Value], right: Sequence[Value]) -> list[Value]:
        found: list[Value] = []
        for n in nodes:
            at = len(found)
            if n.op.startswith("arg"):
                found += _better(self.k, n.op, left[at : at + 2], right[at : at + 2])
            else:
                found.append(self.k.apply(n.op, left[at], right[at]))
        return found

    def _results(self, now: Sequence[int], values: Sequence[T]) -> dict[int, T]:
        """Return the result of each fold, which is the last of its values."""
        found: dict[int, T] = {}
        at = 0
        for k in now:
            at += 2 if self.graph.nodes[k].op.startswith("arg") else 1
            found[k] = values[at - 1]
        return found

    def _reach(self, roots: Sequence[int]) -> set[int]:
        """Return the values along the inner dimension that a loop for `roots` would compute."""
        found: set[int] = set()
        todo = [k for k in roots if self.nest.full[k]]
        while todo:
            k = todo.pop()
            if k not in found:
                found.add(k)
                if k not in self.kept:
                    todo += [a for a in self.graph.nodes[k].args if self.nest.full[a]]
        return found

    def _edge(self, roots: Sequence[int]) -> list[int]:
        """Return the values that a loop for `roots` would need and that are the same in all iterations."""
        todo, found = list(roots), set()
        while todo:
            k = todo.pop()
            if k in found or k in self.kept:
                continue
            found.add(k)
            if self.nest.full[k]:
                todo += self.graph.nodes[k].args
        return [k for k in sorted(found) if not self.nest.full[k]]


def _better(k: KernelBuilder, op: str, a: Sequence[Value], b: Sequence[Value]) -> list[Value]:
    """Return the better of two (value, index): NaN before numbers, then the larger (smaller) value, then the smaller index."""
    takes = k.apply("gt" if op == "argmax" else "lt", b[0], a[0])
    same = k.apply("eq", b[0], a[0])
    if a[0].dtype in FLOATS:
        lost, lost_too = k.apply("isnan", a[0]), k.apply("isnan", b[0])
        takes = k.apply("or", takes, k.apply("and", lost_too, k.apply("not", lost)))
        same = k.apply("or", same, k.apply("and", lost, lost_too))
    takes = k.apply("or", takes, k.apply("and", same, k.apply("lt", b[1], a[1])))
    return [k.apply("select", takes, y, x) for x, y in zip(a, b, strict=True)]
