"""Which loops a group becomes: its points, what goes along what is folded, and how its tensors lie over both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from wooly_compiler.dag import Graph, Place, Put

#: Accumulators of a fold, at most: the order of every fold on every device follows from this number and the extent alone.
LANES: Final = 128
#: Columns of a point, at most, and bytes of what their folds keep.
COLUMNS: Final = 256
COLUMN_BYTES: Final = 30 << 10
#: Elements of a last dimension from which on an index for all of them is worth being looked at once.
SPREAD: Final = 32


def lanes_of(extent: int) -> int:
    """Accumulators of a fold of that extent."""
    return min(LANES, 1 << max(extent - 1, 0).bit_length())


@dataclass(slots=True)
class Layout:
    """Loops and, per place, the strides over outer and inner ones."""

    outer: list[int]
    inner: list[int]
    strides: dict[Place, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)

    @property
    def extent(self) -> int:
        """Iterations of the inner loops together."""
        return math.prod(self.inner)


@dataclass(frozen=True, slots=True)
class Nest:
    """The loops of a kernel.

    Attributes:
        needed: nodes that its stores are made of.
        layout: its dimensions, neighbours merged where every tensor allows it.
        depth: per node, for how many folds one after another it waits.
        full: per node, whether it differs along what is folded.
        width: columns of a point; 0 where points are rows.
        spread: whether the last dimension becomes lanes.
    """

    needed: frozenset[int]
    layout: Layout
    depth: tuple[int, ...]
    full: tuple[bool, ...]
    width: int
    spread: bool

    @property
    def space(self) -> list[int]:
        """Extents of the points."""
        outer = list(self.layout.outer)
        if self.width:
            outer[-1] //= self.width
        if self.spread:
            outer.pop()
        return outer


def nest_of(graph: Graph, puts: Sequence[Put]) -> Nest:
    """The loops for the stores that are made."""
    needed = _needed(graph, puts)
    layout = _layout(graph, places_of(graph, puts, needed), puts)
    depth, full = _levels(graph, layout)
    width = _columns_of_sums(layout) if graph.closed else _width(graph, needed, layout)
    return Nest(needed, layout, depth, full, width, _spreads(graph, needed, layout))


def places_of(graph: Graph, puts: Sequence[Put], needed: frozenset[int]) -> list[Place]:
    """Where the nodes that are needed are loaded from, then where is stored."""
    places = [n.place for k, n in enumerate(graph.nodes) if k in needed and n.place is not None]
    return places + [p.place for p in puts]


def _needed(graph: Graph, puts: Sequence[Put]) -> frozenset[int]:
    found: set[int] = set()
    todo = [k for p in puts for k in p.nodes]
    while todo:
        k = todo.pop()
        if k not in found:
            found.add(k)
            todo += graph.nodes[k].args
    return frozenset(found)


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


def _layout(graph: Graph, places: list[Place], puts: Sequence[Put]) -> Layout:
    order = [d for d in range(len(graph.space)) if d not in graph.folded]
    if not graph.folded and puts:  # the last dimension is that along which the result lies in memory
        first = puts[0].place.strides
        order.sort(key=lambda d: -first[d])
    along = sorted(graph.folded)
    outer, strides = _collapse([graph.space[d] for d in order], [[p.strides[d] for d in order] for p in places])
    inner, inside = _collapse([graph.space[d] for d in along], [[p.strides[d] for d in along] for p in places])
    found = {p: (tuple(s), tuple(a)) for p, s, a in zip(places, strides, inside, strict=True)}
    return Layout(outer, inner, found)


def _divisor(n: int, most: int) -> int:
    """The largest divisor up to a limit."""
    return next(c for c in range(min(n, most), 0, -1) if n % c == 0)


def _levels(graph: Graph, layout: Layout) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """How many folds each node waits for, and which differ along what is folded."""
    depth: list[int] = []
    full: list[bool] = []
    for node in graph.nodes:
        depths = [depth[a] for a in node.args]
        if node.kind == "fold":
            depth.append(depths[0] + 1)
            full.append(False)
        else:
            depth.append(max(depths, default=0))
            place = layout.strides.get(node.place) if node.place is not None else None
            full.append(any(full[a] for a in node.args) or (place is not None and any(place[1])))
    return tuple(depth), tuple(full)


def _width(graph: Graph, needed: frozenset[int], layout: Layout) -> int:
    """Columns of a point; 0 where points are rows."""
    if not graph.folded or not layout.outer or layout.outer[-1] < 4:
        return 0
    rows = columns = 0
    for outer, inner in layout.strides.values():
        if any(inner) and any(outer):  # one that all rows share lies well either way
            rows += inner[-1] == 1
            columns += inner[-1] != 1 and outer[-1] == 1
    if columns <= rows:
        return 0
    folds = [n for k, n in enumerate(graph.nodes) if k in needed and n.kind == "fold"]
    size = sum(n.dtype.itemsize + 8 * n.op.startswith("arg") for n in folds)
    kept = (
        lanes_of(layout.extent).bit_length() + 1
    )  # the accumulator whose turn it is, and one for each step of the pairing
    width = _divisor(layout.outer[-1], min(COLUMNS, COLUMN_BYTES // max(size * kept, 1)))
    return width if width >= 4 else 0


def _columns_of_sums(layout: Layout) -> int:
    """Columns of a point where elements are added up by index: neighbours, as the places that are added to are rows."""
    return _divisor(layout.outer[-1], COLUMNS) if layout.outer else 0


def _spreads(graph: Graph, needed: frozenset[int], layout: Layout) -> bool:
    """Whether the last dimension becomes lanes, so that an index that is the same for all of them is looked at once."""
    picks = [n for k, n in enumerate(graph.nodes) if k in needed and n.kind in ("pick", "guard")]
    if graph.folded or not picks or not layout.outer or layout.outer[-1] < SPREAD:
        return False
    moves: list[bool] = []
    for n in graph.nodes:
        strides = layout.strides.get(n.place) if n.place is not None else None
        moves.append(any(moves[a] for a in n.args) or (strides is not None and strides[0][-1] != 0))
    return not any(moves[a] for n in picks for a in n.args)
