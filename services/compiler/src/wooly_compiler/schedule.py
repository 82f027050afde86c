"""From a group's graph to a kernel: which dimensions are loops, what is computed in which of them, what is kept between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from wooly_wis.dtypes import DType
from wooly_wis.kernel.builder import KernelBuilder, Value
from wooly_wis.kernel.ir import Array, Kernel, Scalar, Scratch
from wooly_wis.program import Role

from wooly_compiler.dag import Graph, Place, Put, neutral
from wooly_compiler.errors import UnsupportedError

#: Accumulators of a fold, at most: the order of every fold on every device follows from this number and the extent alone.
LANES: Final = 128
#: Bytes of a row's values that are kept from one loop for the next, at most; beyond, they are computed again.
KEPT_BYTES: Final = 32 << 10
#: Worth keeping.
_DEAR: Final = frozenset(
    "exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan "  # noqa: SIM905
    "atan2 sinh cosh tanh erf erfc pow fmod".split()
)


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A kernel and what its arguments are.

    Attributes:
        slots: per array.
        params: per scalar, the index among the run's params.
    """

    kernel: Kernel
    slots: tuple[int, ...]
    params: tuple[int, ...]


def lanes_of(extent: int) -> int:
    """Accumulators of a fold of that extent."""
    return min(LANES, 1 << max(extent - 1, 0).bit_length())


def schedule(graph: Graph, puts: Sequence[Put], name: str) -> Scheduled:
    """The kernel of a group.

    Args:
        graph: what is computed.
        puts: which stores are made; temporaries of the group are not.
        name: of the kernel.

    Raises:
        UnsupportedError: the inner dimensions are no single loop.
    """
    return _Schedule(graph, puts, name).finish()


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
    """Loops and, per place, the strides over them."""

    outer: list[int]
    inner: int
    strides: dict[Place, tuple[tuple[int, ...], int]] = field(default_factory=dict)


def _layout(graph: Graph, places: list[Place], puts: Sequence[Put]) -> _Layout:
    rows = len(graph.outer)
    order = list(range(rows))
    if not graph.inner and puts:  # the last dimension is that along which the result lies in memory
        first = puts[0].place.strides
        order.sort(key=lambda d: -first[d])
    outer, strides = _collapse([graph.space[d] for d in order], [[p.strides[d] for d in order] for p in places])
    inner = 1
    along = [[0] for _ in places]
    if graph.inner:
        sizes, along = _collapse(list(graph.space[rows:]), [list(p.strides[rows:]) for p in places])
        if len(sizes) > 1:
            raise UnsupportedError("the folded dimensions do not lie one after the other in memory")
        inner = sizes[0] if sizes else 1
        along = [s or [0] for s in along]
    found = {p: (tuple(s), a[0]) for p, s, a in zip(places, strides, along, strict=True)}
    return _Layout(outer, inner, found)


class _Schedule:
    """One kernel under construction."""

    def __init__(self, graph: Graph, puts: Sequence[Put], name: str) -> None:
        self.graph = graph
        self.puts = list(puts)
        self.needed = self._needed()
        places = [n.place for k, n in enumerate(graph.nodes) if k in self.needed and n.place is not None]
        places += [p.place for p in puts]
        self.layout = _layout(graph, places, puts)
        self.k = KernelBuilder(name, self.layout.outer)
        self.slots: list[int] = []
        self.params: list[int] = []
        self.arrays: dict[tuple[int, DType], Array] = {}
        self.scalars: dict[int, Scalar] = {}
        self._memory(places)
        self.depth: list[int] = []
        self.full: list[bool] = []
        self._levels()
        #: Values that exist, innermost block last.
        self.known: list[dict[object, Value]] = [{}]
        self.kept: dict[int, Scratch] = {}
        self.lane: Value | None = None

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
        loaded = {n.place.slot for k, n in enumerate(self.graph.nodes) if k in self.needed and n.place is not None}
        ends: dict[tuple[int, DType], int] = {}
        for p in places:
            last = sum((n - 1) * s for n, s in zip(self.graph.space, p.strides, strict=True))
            key = p.slot, p.dtype
            ends[key] = max(ends.get(key, 0), p.offset + last + 1)
        for (slot, dtype), end in ends.items():
            role = Role.IN if slot not in written else Role.INOUT if slot in loaded else Role.OUT
            prefix = {Role.IN: "in", Role.OUT: "out", Role.INOUT: "io"}[role]
            self.arrays[slot, dtype] = self.k.array(f"{prefix}{len(self.slots)}", dtype, end, role)
            self.slots.append(slot)
        for k, node in enumerate(self.graph.nodes):
            if k in self.needed and node.kind == "param":
                index = int(node.value)
                self.scalars[index] = self.k.scalar(f"p{len(self.params)}", node.dtype)
                self.params.append(index)

    def _levels(self) -> None:
        """Which values differ along the inner dimension, and how many folds each waits for."""
        for node in self.graph.nodes:
            depths = [self.depth[a] for a in node.args]
            if node.kind == "fold":
                self.depth.append(depths[0] + 1)
                self.full.append(False)
            else:
                self.depth.append(max(depths, default=0))
                moving = node.place is not None and node.place in self.layout.strides
                self.full.append(
                    any(self.full[a] for a in node.args)
                    or (moving and node.place is not None and self.layout.strides[node.place][1] != 0)
                )

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

    def index(self, place: Place) -> Value:
        """The index of a place's element at the current point (and lane)."""
        strides, along = self.layout.strides[place]
        terms = [(p, s) for p, s in zip(self.k.points, strides, strict=True) if s]
        if along and self.lane is not None:
            terms.append((self.lane, along))
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
            missing = [a for a in self.graph.nodes[at].args if self._find(a) is None and at not in self.kept]
            if missing:
                stack += missing
                continue
            stack.pop()
            if self._find(at) is None:
                self.known[-1][at] = self._make(at)
        return self.known[-1][k]

    def _make(self, k: int) -> Value:
        node = self.graph.nodes[k]
        if k in self.kept and self.lane is not None:
            return self.k.load(self.kept[k], self.lane)
        match node.kind:
            case "load":
                assert node.place is not None
                return self.k.load(self.arrays[node.place.slot, node.dtype], self.index(node.place))
            case "const":
                return self.k.const(node.dtype, node.value)
            case "param":
                return self.k.param(self.scalars[int(node.value)])
            case "apply":
                return self.k.apply(node.op, *[self.value(a) for a in node.args], dtype=node.dtype)
        raise AssertionError(f"{node.kind} is not computed in place")

    # -- the kernel --------------------------------------------------------------------------------------------------

    def finish(self) -> Scheduled:
        if not self.graph.inner:
            for put in self.puts:
                self.value(put.node)
            for put in self.puts:
                self._store(put)
            return self._done()
        full = [p for p in self.puts if not p.rows]
        folds = [k for k in sorted(self.needed) if self.graph.nodes[k].kind == "fold"]
        last = max([self.depth[k] for k in folds] + [self.depth[p.node] for p in self.puts])
        rounds = [[k for k in folds if self.depth[k] == d + 1] for d in range(last)]
        for d, now in enumerate(rounds):
            if now:
                later = [self.graph.nodes[k].args[0] for r in rounds[d + 1 :] for k in r] + [p.node for p in full]
                self._fold(now, self._keep([self.graph.nodes[k].args[0] for k in now], later))
        if full:
            self._rows_first([p.node for p in full])
            with self.k.lanes(self.layout.inner) as self.lane:
                self.known.append({})
                for put in full:
                    self.value(put.node)
                for put in full:
                    self._store(put)
                self.known.pop()
            self.lane = None
        rows = [p for p in self.puts if p.rows]
        for put in rows:
            self.value(put.node)
        for put in rows:
            self._store(put)
        return self._done()

    def _done(self) -> Scheduled:
        return Scheduled(self.k.finish(), tuple(self.slots), tuple(self.params))

    def _store(self, put: Put) -> None:
        place = put.place
        self.k.store(self.arrays[place.slot, place.dtype], self.index(place), self.value(put.node))

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
            size = self.layout.inner * self.graph.nodes[k].dtype.itemsize
            if k not in self.kept and self._dear(k) and size <= room:
                chosen.append(k)
                room -= size
        return chosen

    def _rows_first(self, roots: Sequence[int]) -> None:
        """Compute outside of the loop what is the same for all its iterations."""
        todo, found = list(roots), set()
        while todo:
            k = todo.pop()
            if k in found or k in self.kept:
                continue
            found.add(k)
            if self.full[k]:
                todo += self.graph.nodes[k].args
        for k in sorted(found):
            if not self.full[k]:
                self.value(k)

    def _fold(self, now: Sequence[int], kept: Sequence[int]) -> None:
        nodes = [self.graph.nodes[k] for k in now]
        roots = [n.args[0] for n in nodes]
        self._rows_first(roots)
        inits = [self.k.const(n.dtype, neutral(n.op, n.dtype)) for n in nodes]
        extent = self.layout.inner
        scratch = {k: self.k.scratch(f"row{len(self.kept) + i}", self._dtype(k), extent) for i, k in enumerate(kept)}
        with self.k.reduce(extent, lanes_of(extent), inits, [n.op for n in nodes]) as folding:
            self.lane = folding.index
            self.known.append({})
            folding.yields = tuple([self.value(r) for r in roots])
            for k, s in scratch.items():
                self.k.store(s, self.lane, self.value(k))
            self.known.pop()
        self.lane = None
        self.kept |= scratch
        self.known[-1] |= dict(zip(now, folding.results, strict=True))

    def _dtype(self, k: int) -> DType:
        return self.graph.nodes[k].dtype
