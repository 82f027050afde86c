"""From a group's graph to a kernel: which dimensions are loops, what is computed in which of them, what is kept between them.

Without folds, points are elements. With folds, a point is a row and its lanes go along what is folded; where the tensors lie the
other way round, so that rows are neighbours in memory, a point is a block of columns, its lanes are the columns, and what is
folded is a sequential loop. Both have the same accumulators and combine them in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from wooly_wis.dtypes import DType
from wooly_wis.kernel.builder import KernelBuilder, Value
from wooly_wis.kernel.ir import Array, Kernel, Scalar, Scratch
from wooly_wis.kernel.ops import FLOATS
from wooly_wis.program import Role

from wooly_compiler.dag import NOWHERE, Graph, Node, Place, Put, neutral

T = TypeVar("T")

#: Accumulators of a fold, at most: the order of every fold on every device follows from this number and the extent alone.
LANES: Final = 128
#: Bytes of a row's values that are kept from one loop for the next, at most; beyond, they are computed again.
KEPT_BYTES: Final = 32 << 10
#: Columns of a point, at most, and bytes of its accumulators.
COLUMNS: Final = 64
COLUMN_BYTES: Final = 30 << 10
#: Elements of a last dimension from which on an index for all of them is worth being looked at once.
SPREAD: Final = 32
#: The name of the array in which a kernel says whose index was out of range: 1 and more for the group's lines in order.
STATUS: Final = "status"
#: Worth keeping.
_DEAR: Final = frozenset(
    "exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan "  # noqa: SIM905
    "atan2 sinh cosh tanh erf erfc pow fmod".split()
)


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A kernel and what its arguments are.

    Attributes:
        slots: per array; `dag.NOWHERE` for the status.
        params: per scalar, the index among the run's params.
    """

    kernel: Kernel
    slots: tuple[int, ...]
    params: tuple[int, ...]


def lanes_of(extent: int) -> int:
    """Accumulators of a fold of that extent."""
    return min(LANES, 1 << max(extent - 1, 0).bit_length())


def schedule(graph: Graph, puts: Sequence[Put], name: str, origins: Sequence[int] = ()) -> Scheduled:
    """The kernel of a group.

    Args:
        graph: what is computed.
        puts: which stores are made; temporaries of the group are not.
        name: of the kernel.
        origins: the instructions of the group in order, as complaints count them.
    """
    return _Schedule(graph, puts, name, origins).finish()


def _collapse(sizes: list[int], strides: list[list[int]]) -> tuple[list[int], list[list[int]]]:
    """Merge neighbouring dimensions where every tensor goes on from the end of one row to the next."""
    keep = [d for d, n in enumerate(sizes) if n > 1]
    sizes = [sizes[d] for d in keep]
    strides = [[s[d] for d in keep] for s in strides]
    d = len(sizes) - 2
    while d >= 0:
        if all(s[d] == s[d + 1] * sizes[d + 1] for s in strides):
            sizes[d] *= sizes[d + 1]
            del sizes[d + 1]
            for s in strides:
                s[d] = s[d + 1]
                del s[d + 1]
        d -= 1
    return sizes, strides


@dataclass(slots=True)
class _Layout:
    """Loops and, per place, the strides over outer and inner ones."""

    outer: list[int]
    inner: list[int]
    strides: dict[Place, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)

    @property
    def extent(self) -> int:
        """Iterations of the inner loops together."""
        return math.prod(self.inner)


def _layout(graph: Graph, places: list[Place], puts: Sequence[Put]) -> _Layout:
    order = [d for d in range(len(graph.space)) if d not in graph.folded]
    if not graph.folded and puts:  # the last dimension is that along which the result lies in memory
        first = puts[0].place.strides
        order.sort(key=lambda d: -first[d])
    along = sorted(graph.folded)
    outer, strides = _collapse([graph.space[d] for d in order], [[p.strides[d] for d in order] for p in places])
    inner, inside = _collapse([graph.space[d] for d in along], [[p.strides[d] for d in along] for p in places])
    found = {p: (tuple(s), tuple(a)) for p, s, a in zip(places, strides, inside, strict=True)}
    return _Layout(outer, inner, found)


def _divisor(n: int, most: int) -> int:
    """The largest divisor up to a limit."""
    return next(c for c in range(min(n, most), 0, -1) if n % c == 0)


def _better(k: KernelBuilder, op: str, a: Sequence[Value], b: Sequence[Value]) -> list[Value]:
    """Of two (value, index), the one that wins: not-a-number before numbers, the larger (smaller), the first of equal ones."""
    takes = k.apply("gt" if op == "argmax" else "lt", b[0], a[0])
    same = k.apply("eq", b[0], a[0])
    if a[0].dtype in FLOATS:
        lost, lost_too = k.apply("isnan", a[0]), k.apply("isnan", b[0])
        takes = k.apply("or", takes, k.apply("and", lost_too, k.apply("not", lost)))
        same = k.apply("or", same, k.apply("and", lost, lost_too))
    takes = k.apply("or", takes, k.apply("and", same, k.apply("lt", b[1], a[1])))
    return [k.apply("select", takes, y, x) for x, y in zip(a, b, strict=True)]


class _Schedule:
    """One kernel under construction."""

    def __init__(self, graph: Graph, puts: Sequence[Put], name: str, origins: Sequence[int]) -> None:
        self.graph = graph
        self.puts = list(puts)
        self.origins = {origin: k + 1 for k, origin in reversed(list(enumerate(origins)))}
        self.needed = self._needed()
        places = [n.place for k, n in enumerate(graph.nodes) if k in self.needed and n.place is not None]
        places += [p.place for p in puts]
        self.layout = _layout(graph, places, puts)
        self.depth: list[int] = []
        self.full: list[bool] = []
        self._levels()
        self.width = self._width()
        self.spread = self._spread()
        outer = list(self.layout.outer)
        if self.width:
            outer[-1] //= self.width
        if self.spread:
            outer.pop()
        self.k = KernelBuilder(name, outer)
        self.slots: list[int] = []
        self.params: list[int] = []
        self.arrays: dict[tuple[int, DType], Array] = {}
        self.scalars: dict[int, Scalar] = {}
        self.status: Array | None = None
        self._memory(places)
        #: Values that exist, innermost block last.
        self.known: list[dict[object, Value]] = [{}]
        #: Values along a row that a loop has left for the next; values of columns.
        self.kept: dict[int, Scratch] = {}
        self.held: dict[int, Scratch] = {}
        #: The place along what is folded, and the column of a point.
        self.lane: Value | None = None
        self.column: Value | None = None

    def _needed(self) -> set[int]:
        found: set[int] = set()
        todo = [p.node for p in self.puts]
        while todo:
            k = todo.pop()
            if k not in found:
                found.add(k)
                todo += self.graph.nodes[k].args
        return found

    def _memory(self, places: list[Place]) -> None:
        """An array per slot and type, a scalar per param, in the order of the graph."""
        written = {p.place.slot for p in self.puts}
        nodes = [n for k, n in enumerate(self.graph.nodes) if k in self.needed]
        loaded = {n.place.slot for n in nodes if n.place is not None}
        ends: dict[tuple[int, DType], int] = {}
        beyond = {n.place: (n.size - 1) * n.step for n in nodes if n.kind == "pick" and n.place is not None}
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

    def _levels(self) -> None:
        """Which values differ along what is folded, and how many folds each waits for."""
        for node in self.graph.nodes:
            depths = [self.depth[a] for a in node.args]
            if node.kind == "fold":
                self.depth.append(depths[0] + 1)
                self.full.append(False)
            else:
                self.depth.append(max(depths, default=0))
                place = self.layout.strides.get(node.place) if node.place is not None else None
                self.full.append(any(self.full[a] for a in node.args) or (place is not None and any(place[1])))

    def _width(self) -> int:
        """Columns of a point; 0 where points are rows."""
        if not self.graph.folded or not self.layout.outer or self.layout.outer[-1] < 4:
            return 0
        rows = columns = 0
        for outer, inner in self.layout.strides.values():
            if any(inner) and any(outer):  # one that all rows share lies well either way
                rows += inner[-1] == 1
                columns += inner[-1] != 1 and outer[-1] == 1
        if columns <= rows:
            return 0
        folds = [n for k, n in enumerate(self.graph.nodes) if k in self.needed and n.kind == "fold"]
        size = sum(n.dtype.itemsize + 8 * n.op.startswith("arg") for n in folds)
        lanes = lanes_of(self.layout.extent)
        width = _divisor(self.layout.outer[-1], min(COLUMNS, COLUMN_BYTES // max(size * (lanes + lanes // 2), 1)))
        return width if width >= 4 else 0

    def _spread(self) -> bool:
        """Whether the last dimension becomes lanes, so that an index that is the same for all of them is looked at once."""
        graph, outer = self.graph, self.layout.outer
        picks = [n for k, n in enumerate(graph.nodes) if k in self.needed and n.kind in ("pick", "guard")]
        if graph.folded or not picks or not outer or outer[-1] < SPREAD:
            return False
        moves: list[bool] = []
        for n in graph.nodes:
            strides = self.layout.strides.get(n.place) if n.place is not None else None
            moves.append(any(moves[a] for a in n.args) or (strides is not None and strides[0][-1] != 0))
        return not any(moves[a] for n in picks for a in n.args)

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
        """The coordinates of a row."""
        points = list(self.k.points)
        if self.spread and self.column is not None:
            points.append(self.column)
        if self.width and self.column is not None:
            key = ("column", self.column.number)
            found = self._find(key)
            if found is None:
                first = self._product(points[-1], self.width)
                found = self.known[-1][key] = self.k.apply("add", first, self.column)
            points[-1] = found
        return points

    def _inner(self) -> list[Value]:
        """The coordinates along what is folded."""
        if self.lane is None or not self.layout.inner:
            return []
        found: list[Value] = []
        below = 1
        for d in reversed(range(len(self.layout.inner))):
            key = ("along", self.lane.number, d)
            known = self._find(key)
            if known is None:
                known = self.lane if below == 1 else self.k.apply("div_trunc", self.lane, self._number(below))
                if d:
                    known = self.k.apply("fmod", known, self._number(self.layout.inner[d]))
                self.known[-1][key] = known
            found.append(known)
            below *= self.layout.inner[d]
        return found[::-1]

    def index(self, place: Place) -> Value:
        """The index of a place's element at the current point (and lane)."""
        strides, along = self.layout.strides[place]
        terms = [(v, s) for v, s in zip(self._outer(), strides, strict=not self.spread) if s]
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
        """A node's value; computed here if no block around has it."""
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

    def _complain(self, node: Node, wrong: Value) -> None:
        assert self.status is not None
        line = self.k.const(DType.I32, self.origins.get(int(node.value), 1))
        self.k.store(self.status, self._number(0), line, wrong)

    def _guard(self, node: Node) -> Value:
        """A value, and a complaint where it is wrong."""
        key = ("guard", node)
        if self._find(key) is None:
            self._complain(node, self.value(node.args[1]))
            self.known[-1][key] = self.value(node.args[0])
        return self.value(node.args[0])

    def _pick(self, node: Node) -> Value:
        """An element at an index that only the run knows. Where that is out of range, another's and a complaint."""
        assert node.place is not None
        at = self.k.apply("add", self.index(node.place), self._inside(node))
        return self.k.load(self.arrays[node.place.slot, node.dtype], at)

    def _inside(self, node: Node) -> Value:
        """How far from its place a pick reads: the index is forced into its range, so that what is read is there to be read."""
        key = ("pick", node.args, node.step, node.size, node.value)
        found = self._find(key)
        if found is None:
            index, zero, last = self.value(node.args[0]), self._number(0), self._number(node.size - 1)
            self._complain(node, self.k.apply("or", self.k.apply("lt", index, zero), self.k.apply("gt", index, last)))
            found = self.k.apply("min", self.k.apply("max", index, zero), last)
            found = found if node.step == 1 else self.k.apply("mul", found, self._number(node.step))
            self.known[-1][key] = found
        return found

    # -- the kernel --------------------------------------------------------------------------------------------------

    def finish(self) -> Scheduled:
        if self.spread:
            for k in sorted(self.needed):
                node = self.graph.nodes[k]
                if node.kind == "pick":
                    self._inside(node)
                elif node.kind == "guard":
                    self._guard(node)
            with self.k.lanes(self.layout.outer[-1]) as self.column:
                self._stores(self.puts)
            return self._done()
        if not self.graph.folded:
            for put in self.puts:
                self.value(put.node)
            for put in self.puts:
                self._store(put)
            return self._done()
        folds = [k for k in sorted(self.needed) if self.graph.nodes[k].kind == "fold"]
        last = max([self.depth[k] for k in folds] + [self.depth[p.node] for p in self.puts])
        rounds = [[k for k in folds if self.depth[k] == d + 1] for d in range(last)]
        return self._finish_columns(rounds) if self.width else self._finish_rows(rounds)

    def _finish_rows(self, rounds: Sequence[Sequence[int]]) -> Scheduled:
        full = [p for p in self.puts if not p.rows]
        for d, now in enumerate(rounds):
            if now:
                later = [self.graph.nodes[k].args[0] for r in rounds[d + 1 :] for k in r] + [p.node for p in full]
                self._fold(now, self._keep([self.graph.nodes[k].args[0] for k in now], later))
        if full:
            self._rows_first([p.node for p in full])
            with self.k.lanes(self.layout.extent) as self.lane:
                self._stores(full)
            self.lane = None
        rows = [p for p in self.puts if p.rows]
        for put in rows:
            self.value(put.node)
        for put in rows:
            self._store(put)
        return self._done()

    def _stores(self, puts: Sequence[Put]) -> None:
        """Values, then stores, in a block of their own."""
        self.known.append({})
        for put in puts:
            self.value(put.node)
        for put in puts:
            self._store(put)
        self.known.pop()

    def _done(self) -> Scheduled:
        return Scheduled(self.k.finish(), tuple(self.slots), tuple(self.params))

    def _store(self, put: Put) -> None:
        place = put.place
        self.k.store(self.arrays[place.slot, place.dtype], self.index(place), self.value(put.node))

    # -- folds -------------------------------------------------------------------------------------------------------

    def _inits(self, nodes: Sequence[Node]) -> list[Value]:
        """What folds start from; one that looks for a place has two values, and no element at first."""
        found: list[Value] = []
        for n in nodes:
            dtype = self._dtype(n.args[0])
            found.append(self.k.const(dtype, neutral(n.op, dtype)))
            if n.op.startswith("arg"):
                found.append(self.k.const(DType.I64, self.layout.extent))
        return found

    def _elements(self, nodes: Sequence[Node]) -> list[Value]:
        """What comes to folds at the current lane."""
        assert self.lane is not None
        found: list[Value] = []
        for n in nodes:
            found.append(self.value(n.args[0]))
            if n.op.startswith("arg"):
                found.append(self.lane)
        return found

    def _combine(self, nodes: Sequence[Node], left: Sequence[Value], right: Sequence[Value]) -> list[Value]:
        found: list[Value] = []
        for n in nodes:
            at = len(found)
            if n.op.startswith("arg"):
                found += _better(self.k, n.op, left[at : at + 2], right[at : at + 2])
            else:
                found.append(self.k.apply(n.op, left[at], right[at]))
        return found

    def _results(self, now: Sequence[int], values: Sequence[T]) -> dict[int, T]:
        """Per fold its result, which is the last of its values."""
        found: dict[int, T] = {}
        at = 0
        for k in now:
            at += 2 if self.graph.nodes[k].op.startswith("arg") else 1
            found[k] = values[at - 1]
        return found

    def _reach(self, roots: Sequence[int]) -> set[int]:
        """Values along the inner dimension that computing `roots` in a loop would compute."""
        found: set[int] = set()
        todo = [k for k in roots if self.full[k]]
        while todo:
            k = todo.pop()
            if k not in found:
                found.add(k)
                if k not in self.kept:
                    todo += [a for a in self.graph.nodes[k].args if self.full[a]]
        return found

    def _dear(self, k: int) -> bool:
        todo = [k]
        while todo:
            at = todo.pop()
            node = self.graph.nodes[at]
            if node.op in _DEAR and node.kind == "apply":
                return True
            if at not in self.kept:
                todo += [a for a in node.args if self.full[a]]
        return False

    def _keep(self, now: Sequence[int], later: Sequence[int]) -> list[int]:
        """The dear values of this loop that a later one asks for, and that a row has room for."""
        both = self._reach(now) & self._reach(later)
        inside = {a for k in both for a in self.graph.nodes[k].args}
        room = KEPT_BYTES - sum(s.numel * s.dtype.itemsize for s in self.kept.values())
        chosen: list[int] = []
        for k in sorted(both - inside):
            size = self.layout.extent * self.graph.nodes[k].dtype.itemsize
            if k not in self.kept and self._dear(k) and size <= room:
                chosen.append(k)
                room -= size
        return chosen

    def _edge(self, roots: Sequence[int]) -> list[int]:
        """The values that are the same for all iterations, and that computing `roots` in a loop would ask for."""
        todo, found = list(roots), set()
        while todo:
            k = todo.pop()
            if k in found or k in self.kept:
                continue
            found.add(k)
            if self.full[k]:
                todo += self.graph.nodes[k].args
        return [k for k in sorted(found) if not self.full[k]]

    def _rows_first(self, roots: Sequence[int]) -> None:
        """Compute outside of the loop what is the same for all its iterations."""
        for k in self._edge(roots):
            self.value(k)

    def _fold(self, now: Sequence[int], kept: Sequence[int]) -> None:
        nodes = [self.graph.nodes[k] for k in now]
        self._rows_first([n.args[0] for n in nodes])
        extent = self.layout.extent
        scratch = {k: self.k.scratch(f"row{len(self.kept) + i}", self._dtype(k), extent) for i, k in enumerate(kept)}
        inits = self._inits(nodes)
        with self.k.reduce(extent, lanes_of(extent), inits, lambda a, b: self._combine(nodes, a, b)) as folding:
            self.lane = folding.index
            self.known.append({})
            folding.yields = tuple(self._elements(nodes))
            for k, s in scratch.items():
                self.k.store(s, self.lane, self.value(k))
            self.known.pop()
        self.lane = None
        self.kept |= scratch
        self.known[-1] |= self._results(now, folding.results)

    def _dtype(self, k: int) -> DType:
        return self.graph.nodes[k].dtype

    # -- columns -----------------------------------------------------------------------------------------------------

    def _finish_columns(self, rounds: Sequence[Sequence[int]]) -> Scheduled:
        full = [p for p in self.puts if not p.rows]
        for now in rounds:
            if now:
                self._fold_columns(now)
        if full:
            self._hold([p.node for p in full])
            with self.k.loop(self._number(0), self._number(self.layout.extent)) as loop:
                self.lane = loop.index
                with self.k.lanes(self.width) as self.column:
                    self._stores(full)
            self.lane = self.column = None
        rows = [p for p in self.puts if p.rows]
        if rows:
            with self.k.lanes(self.width) as self.column:
                self._stores(rows)
            self.column = None
        return self._done()

    def _hold(self, roots: Sequence[int]) -> None:
        """Compute once per column what is the same for all iterations."""
        held = [k for k in self._edge(roots) if k not in self.held and self.graph.nodes[k].kind == "apply"]
        held = [k for k in held if self.depth[k]]
        if not held:
            return
        made = {
            k: self.k.scratch(f"column{len(self.held) + i}", self._dtype(k), self.width) for i, k in enumerate(held)
        }
        with self.k.lanes(self.width) as self.column:
            self.known.append({})
            for k, s in made.items():
                self.k.store(s, self.column, self.value(k))
            self.known.pop()
        self.column = None
        self.held |= made

    def _fold_columns(self, now: Sequence[int]) -> None:
        """Accumulators are rows of scratch, a column each; the loop fills them in turn, then they are combined in pairs."""
        k, width = self.k, self.width
        nodes = [self.graph.nodes[f] for f in now]
        self._hold([n.args[0] for n in nodes])
        lanes = lanes_of(self.layout.extent)
        with_place = [d for n in nodes for d in ([self._dtype(n.args[0])] + [DType.I64] * n.op.startswith("arg"))]
        first = len(self.held)
        sides = [
            [k.scratch(f"fold{first}_{side}{i}", dtype, max(n, 1) * width) for i, dtype in enumerate(with_place)]
            for side, n in (("a", lanes), ("b", lanes // 2))
        ]
        zero = self._number(0)
        row = self._number(width)
        with k.loop(zero, self._number(lanes)) as loop, k.lanes(width) as column:
            at = k.apply("add", k.apply("mul", loop.index, row), column)
            for s, value in zip(sides[0], self._inits(nodes), strict=True):
                k.store(s, at, value)
        with k.loop(zero, self._number(self.layout.extent)) as loop:
            self.lane = loop.index
            with k.lanes(width) as self.column:
                self.known.append({})
                lane = k.apply("fmod", loop.index, self._number(lanes))
                at = k.apply("add", k.apply("mul", lane, row), self.column)
                elements = self._elements(nodes)
                held = [k.load(s, at) for s in sides[0]]
                for s, value in zip(sides[0], self._combine(nodes, held, elements), strict=True):
                    k.store(s, at, value)
                self.known.pop()
        self.lane = self.column = None
        half = lanes // 2
        while half:  # from one side to the other, so that no column reads what another writes
            with k.loop(zero, self._number(half)) as loop, k.lanes(width) as column:
                at = k.apply("add", k.apply("mul", loop.index, row), column)
                over = k.apply("add", at, k.const(DType.I64, half * width))
                left, right = ([k.load(s, place) for s in sides[0]] for place in (at, over))
                for s, value in zip(sides[1], self._combine(nodes, left, right), strict=True):
                    k.store(s, at, value)
            sides.reverse()
            half //= 2
        self.held |= self._results(now, sides[0])
