"""Writes what a kernel computes at one point or lane: loads, operations and stores. Each value is computed once per block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from wooly_wis.dtypes import DType
from wooly_wis.kernel.builder import KernelBuilder, Value
from wooly_wis.kernel.ir import Array, Scalar, Scratch
from wooly_wis.program import Role

from wooly_compiler.dag import NOWHERE, Graph, GraphNode, Place, Put
from wooly_compiler.schedule.nest import Nest, places_of

#: Name of the array in which a kernel reports a violation: 0 for none, else the number of the group's line, from 1.
STATUS: Final = "status"


class Values:
    """One kernel under construction: its arguments, and the values that exist in the current block.

    Args:
        graph: what the kernel computes.
        puts: the stores to make.
        nest: the kernel's loops.
        name: name of the kernel.
        origins: the instructions of the group in order, for numbering in reports of violations.

    Attributes:
        k: writes the kernel.
        slots: slot of each array; `dag.NOWHERE` for the status.
        params: index of each scalar among the run's params.
        known: values that exist, innermost block last.
        kept: values along a row that a loop stores for later loops.
        held: values of columns.
        lane: position along the folded dimensions.
        column: column of the point if points are blocks of columns; the lane if the last dimension is lanes.
    """

    def __init__(self, graph: Graph, puts: Sequence[Put], nest: Nest, name: str, origins: Sequence[int]) -> None:
        self.graph: Final = graph
        self.nest: Final = nest
        self.puts = list(puts)
        self.origins = {origin: k + 1 for k, origin in reversed(list(enumerate(origins)))}
        self.k = KernelBuilder(name, nest.space)
        self.slots: list[int] = []
        self.params: list[int] = []
        self.arrays: dict[tuple[int, DType], Array] = {}
        self.scalars: dict[int, Scalar] = {}
        self.status: Array | None = None
        self._memory(places_of(graph, puts, nest.needed))
        self.known: list[dict[object, Value]] = [{}]
        self.kept: dict[int, Scratch] = {}
        self.held: dict[int, Scratch] = {}
        self.lane: Value | None = None
        self.column: Value | None = None

    def _memory(self, places: list[Place]) -> None:
        """Declare an array per slot and type, and a scalar per param, in the order of the graph."""
        written = {p.place.slot for p in self.puts}
        nodes = [n for k, n in enumerate(self.graph.nodes) if k in self.nest.needed]
        loaded = {n.place.slot for n in nodes if n.place is not None}
        ends: dict[tuple[int, DType], int] = {}
        beyond = {n.place: (n.size - 1) * n.step for n in nodes if n.kind == "pick" and n.place is not None}
        for put in self.puts:
            if put.target is not None:  # the kernel also reads its sums
                beyond[put.place] = (put.target.size - 1) * put.target.step
                loaded.add(put.place.slot)
        for p in places:
            if p.slot == NOWHERE:
                continue
            last = sum((n - 1) * s for n, s in zip(self.graph.space, p.strides, strict=True)) + beyond.get(p, 0)
            key = p.slot, p.dtype
            ends[key] = max(ends.get(key, 0), p.offset + last + 1)
        for (slot, dtype), end in ends.items():
            role = Role.IN if slot not in written else Role.INOUT if slot in loaded else Role.OUT
            prefix = {Role.IN: "in", Role.OUT: "out", Role.INOUT: "io"}[role]
            self.arrays[slot, dtype] = self.k.array(f"{prefix}{len(self.slots)}", dtype, end, role)
            self.slots.append(slot)
        if any(n.kind in ("pick", "guard") for n in nodes):
            self.status = self.k.array(STATUS, DType.I32, 1, Role.INOUT)
            self.slots.append(NOWHERE)
        for node in nodes:
            if node.kind == "param":
                index = int(node.value)
                self.scalars[index] = self.k.scalar(f"p{len(self.params)}", node.dtype)
                self.params.append(index)

    # -- values in the current block ---------------------------------------------------------------------------------

    def _find(self, key: object) -> Value | None:
        for block in self.known:
            if key in block:
                return block[key]
        return None

    def _number(self, n: int) -> Value:
        found = self._find(("index", n))
        if found is None:
            found = self.known[-1]["index", n] = self.k.const(DType.I64, n)
        return found

    def _outer(self) -> list[Value]:
        """Return the coordinates of a row."""
        points = list(self.k.points)
        if self.nest.spread and self.column is not None:
            points.append(self.column)
        if self.nest.width and self.column is not None:
            key = ("column", self.column.number)
            found = self._find(key)
            if found is None:
                first = self._product(points[-1], self.nest.width)
                found = self.known[-1][key] = self.k.apply("add", first, self.column)
            points[-1] = found
        return points

    def _inner(self) -> list[Value]:
        """Return the coordinates along the folded dimensions."""
        if self.lane is None or not self.nest.layout.inner:
            return []
        found: list[Value] = []
        below = 1
        for d in reversed(range(len(self.nest.layout.inner))):
            key = ("along", self.lane.number, d)
            known = self._find(key)
            if known is None:
                known = self.lane if below == 1 else self.k.apply("div_trunc", self.lane, self._number(below))
                if d:
                    known = self.k.apply("fmod", known, self._number(self.nest.layout.inner[d]))
                self.known[-1][key] = known
            found.append(known)
            below *= self.nest.layout.inner[d]
        return found[::-1]

    def index(self, place: Place) -> Value:
        """Return the index of a place's element at the current point (and lane)."""
        strides, along = self.nest.layout.strides[place]
        terms = [(v, s) for v, s in zip(self._outer(), strides, strict=not self.nest.spread) if s]
        if any(along) and self.lane is not None:
            terms += [(v, s) for v, s in zip(self._inner(), along, strict=True) if s]
        key = ("at", tuple([(v.number, s) for v, s in terms]), place.offset)
        found = self._find(key)
        if found is not None:
            return found
        total: Value | None = None
        for v, s in terms:
            term = v if s == 1 else self._product(v, s)
            total = term if total is None else self.k.apply("add", total, term)
        if place.offset or total is None:
            base = self._number(place.offset)
            total = base if total is None else self.k.apply("add", total, base)
        self.known[-1][key] = total
        return total

    def _product(self, v: Value, s: int) -> Value:
        key = ("times", v.number, s)
        found = self._find(key)
        if found is None:
            found = self.known[-1][key] = self.k.apply("mul", v, self._number(s))
        return found

    def value(self, k: int) -> Value:
        """Return a node's value; compute it in this block, unless an enclosing block has it."""
        found = self._find(k)
        if found is not None:
            return found
        stack = [k]
        while stack:  # arguments first, without recursion: chains may be long
            at = stack[-1]
            there = at in self.kept or at in self.held
            missing = [a for a in self.graph.nodes[at].args if self._find(a) is None and not there]
            if missing:
                stack += missing
                continue
            stack.pop()
            if self._find(at) is None:
                self.known[-1][at] = self._make(at)
        return self.known[-1][k]

    def _make(self, k: int) -> Value:
        node = self.graph.nodes[k]
        if node.kind in ("pick", "guard"):
            return self._pick(node) if node.kind == "pick" else self._guard(node)
        if k in self.held and self.column is not None:
            return self.k.load(self.held[k], self.column)
        if k in self.kept and self.lane is not None:
            return self.k.load(self.kept[k], self.lane)
        match node.kind:
            case "load":
                assert node.place is not None
                return self.k.load(self.arrays[node.place.slot, node.dtype], self.index(node.place))
            case "place":
                assert node.place is not None
                return self.index(node.place)
            case "const":
                return self.k.const(node.dtype, node.value)
            case "param":
                return self.k.param(self.scalars[int(node.value)])
            case "apply":
                return self.k.apply(node.op, *[self.value(a) for a in node.args], dtype=node.dtype)
        raise AssertionError(f"{node.kind} is not computed in place")

    def _complain(self, node: GraphNode, wrong: Value) -> None:
        assert self.status is not None
        line = self.k.const(DType.I32, self.origins.get(int(node.value), 1))
        self.k.store(self.status, self._number(0), line, wrong)

    def _guard(self, node: GraphNode) -> Value:
        """Return the value of a guard, and report a violation if its condition is true."""
        key = ("guard", node)
        if self._find(key) is None:
            self._complain(node, self.value(node.args[1]))
            self.known[-1][key] = self.value(node.args[0])
        return self.value(node.args[0])

    def _pick(self, node: GraphNode) -> Value:
        """Load an element at an index that only the run knows. If it is out of range, load another element and report a
        violation.
        """
        assert node.place is not None
        at = self.k.apply("add", self.index(node.place), self._inside(node))
        return self.k.load(self.arrays[node.place.slot, node.dtype], at)

    def _inside(self, node: GraphNode) -> Value:
        """Return the distance of a pick from its place. The index is clamped to its range, so that the load stays in the
        array.
        """
        key = ("pick", node.args, node.step, node.size, node.value)
        found = self._find(key)
        if found is None:
            index, zero, last = self.value(node.args[0]), self._number(0), self._number(node.size - 1)
            self._complain(node, self.k.apply("or", self.k.apply("lt", index, zero), self.k.apply("gt", index, last)))
            found = self.k.apply("min", self.k.apply("max", index, zero), last)
            found = found if node.step == 1 else self.k.apply("mul", found, self._number(node.step))
            self.known[-1][key] = found
        return found

    def _stores(self, puts: Sequence[Put]) -> None:
        """Compute values, then store them, in a block of their own."""
        self.known.append({})
        for put in puts:
            self.value(put.node)
        for put in puts:
            self._store(put)
        self.known.pop()

    def _store(self, put: Put) -> None:
        place = put.place
        self.k.store(self.arrays[place.slot, place.dtype], self.index(place), self.value(put.node))
