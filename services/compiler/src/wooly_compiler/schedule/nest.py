"""Chooses the loops of a group: points, loops of folds, and the strides of its tensors over both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from wooly_compiler.dag import Graph, Place, Put

#: Maximum number of accumulators of a fold. This number and the extent alone determine the order of every fold on every device.
LANES: Final = 128
#: Maximum number of columns of a point, and maximum bytes that its folds store.
COLUMNS: Final = 256
COLUMN_BYTES: Final = 30 << 10
#: Minimum size of the last dimension for which it pays to check a shared index once for all its elements.
SPREAD: Final = 32


def lanes_of(extent: int) -> int:
    """Return the number of accumulators of a fold of this extent."""
    return min(LANES, 1 << max(extent - 1, 0).bit_length())


@dataclass(slots=True)
class Layout:
    """The outer and inner loops and, per place, the strides over both."""

    outer: list[int]
    inner: list[int]
    strides: dict[Place, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)

    @property
    def extent(self) -> int:
        """Number of iterations of all inner loops together."""
        return math.prod(self.inner)


@dataclass(frozen=True, slots=True)
class Nest:
    """The loops of a kernel.

    Attributes:
        needed: nodes that the stores depend on.
        layout: dimensions of the loops; neighbours are merged if every tensor allows it.
        depth: per node, the number of folds in a row that it depends on.
        full: per node, whether it changes along the folded dimensions.
        width: number of columns of a point; 0 if points are rows.
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
    """Return the loops for the stores `puts`."""
    needed = _needed(graph, puts)
    layout = _layout(graph, places_of(graph, puts, needed), puts)
    depth, full = _levels(graph, layout)
    width = _columns_of_sums(layout) if graph.closed else _width(graph, needed, layout)
    return Nest(needed, layout, depth, full, width, _spreads(graph, needed, layout))


def places_of(graph: Graph, puts: Sequence[Put], needed: frozenset[int]) -> list[Place]:
    """Return the places of all needed loads, then those of the stores."""
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
    """Merge neighbouring dimensions that are contiguous in every tensor."""
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
    if not graph.folded and puts:  # the last dimension is the one that is contiguous in the result
        first = puts[0].place.strides
        order.sort(key=lambda d: -first[d])
    along = sorted(graph.folded)
    outer, strides = _collapse([graph.space[d] for d in order], [[p.strides[d] for d in order] for p in places])
    inner, inside = _collapse([graph.space[d] for d in along], [[p.strides[d] for d in along] for p in places])
    found = {p: (tuple(s), tuple(a)) for p, s, a in zip(places, strides, inside, strict=True)}
    return Layout(outer, inner, found)


def _divisor(n: int, most: int) -> int:
    """Return the largest divisor of `n` up to `most`."""
    return next(c for c in range(min(n, most), 0, -1) if n % c == 0)


def _levels(graph: Graph, layout: Layout) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Return, per node, the number of folds that it waits for, and whether it changes along the folded dimensions."""
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
    """Return the number of columns of a point; 0 if points are rows."""
    if not graph.folded or not layout.outer or layout.outer[-1] < 4:
        return 0
    rows = columns = 0
    for outer, inner in layout.strides.values():
        if any(inner) and any(outer):  # a tensor that all rows share suits both layouts
            rows += inner[-1] == 1
            columns += inner[-1] != 1 and outer[-1] == 1
    if columns <= rows:
        return 0
    folds = [n for k, n in enumerate(graph.nodes) if k in needed and n.kind == "fold"]
    size = sum(n.dtype.itemsize + 8 * n.op.startswith("arg") for n in folds)
    kept = lanes_of(layout.extent).bit_length() + 1  # the current accumulator, and one for each level of pairing
    width = _divisor(layout.outer[-1], min(COLUMNS, COLUMN_BYTES // max(size * kept, 1)))
    return width if width >= 4 else 0


def _columns_of_sums(layout: Layout) -> int:
    """Return the number of columns of a point for sums by index. They are neighbours, because the sums are rows."""
    return _divisor(layout.outer[-1], COLUMNS) if layout.outer else 0


def _spreads(graph: Graph, needed: frozenset[int], layout: Layout) -> bool:
    """Return whether the last dimension becomes lanes, so that an index that all of them share is checked once."""
    picks = [n for k, n in enumerate(graph.nodes) if k in needed and n.kind in ("pick", "guard")]
    if graph.folded or not picks or not layout.outer or layout.outer[-1] < SPREAD:
        return False
    moves: list[bool] = []
    for n in graph.nodes:
        strides = layout.strides.get(n.place) if n.place is not None else None
        moves.append(any(moves[a] for a in n.args) or (strides is not None and strides[0][-1] != 0))
    return not any(moves[a] for n in picks for a in n.args)
