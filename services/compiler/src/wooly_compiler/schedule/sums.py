"""Sums by index: a point is a block of columns, and a sequential loop adds its elements at the positions that an index gives.

The loop fixes the order of the additions for all indices, because no two points add to the same element.
"""

from __future__ import annotations

from wooly_wis.kernel.builder import Value

from wooly_compiler.dag import Put, Target
from wooly_compiler.schedule.values import Values


class Sums(Values):
    """A kernel whose only store adds elements up by index."""

    def write(self) -> None:
        """Write the kernel's body."""
        (put,) = self.puts
        target = put.target
        assert target is not None
        width = self.nest.width or 1
        self._clear(put, target, width)
        with self.k.loop(self._number(0), self._number(self.nest.layout.extent)) as loop:
            self.lane = loop.index
            self.known.append({})
            counts, behind = self._place(target)
            with self.k.when(counts), self.k.lanes(width) as self.column:
                self._add(put, behind)
            self.known.pop()
        self.lane = self.column = None

    def _clear(self, put: Put, target: Target, width: int) -> None:
        """Set all sums to zero."""
        array, wide = self.arrays[put.place.slot, put.place.dtype], self.graph.nodes[put.node].dtype
        with self.k.loop(self._number(0), self._number(target.size)) as loop:
            self.known.append({})
            behind = self.k.apply("mul", loop.index, self._number(target.step))
            zero = self.k.convert(self.k.const(wide, 0), put.place.dtype)
            with self.k.lanes(width) as self.column:
                self.k.store(array, self.k.apply("add", self.index(put.place), behind), zero)
            self.known.pop()
        self.column = None

    def _place(self, target: Target) -> tuple[Value, Value]:
        """Return whether the current element is added, and the distance from the put's place, which is always within the
        array.
        """
        k, index, last = self.k, self.value(target.index), self._number(target.size - 1)
        inside = k.apply("and", k.apply("ge", index, self._number(0)), k.apply("le", index, last))
        counts = k.apply("and", self.value(target.counts), inside)
        forced = k.apply("min", k.apply("max", index, self._number(0)), last)
        return counts, k.apply("mul", forced, self._number(target.step))

    def _add(self, put: Put, behind: Value) -> None:
        """Add the current element to its sum, in the type in which elements are computed."""
        k, array = self.k, self.arrays[put.place.slot, put.place.dtype]
        self.known.append({})
        at = k.apply("add", self.index(put.place), behind)
        value = self.value(put.node)
        total = k.apply("add", k.convert(k.load(array, at), value.dtype), value)
        k.store(array, at, k.convert(total, put.place.dtype))
        self.known.pop()
