"""Folds of columns: a point is a block of neighbouring columns, lanes are columns, what is folded is a sequential loop."""

from __future__ import annotations

from collections.abc import Sequence

from wooly_wis.dtypes import DType

from wooly_compiler.schedule.folds import Folds
from wooly_compiler.schedule.nest import lanes_of


class Columns(Folds):
    """A kernel whose points are blocks of columns."""

    def write(self) -> None:
        """The kernel's body."""
        full = [p for p in self.puts if not p.rows]
        for now in self._rounds():
            if now:
                self._fold_columns(now)
        if full:
            self._hold([p.node for p in full])
            with self.k.loop(self._number(0), self._number(self.nest.layout.extent)) as loop:
                self.lane = loop.index
                with self.k.lanes(self.nest.width) as self.column:
                    self._stores(full)
            self.lane = self.column = None
        rows = [p for p in self.puts if p.rows]
        if rows:
            with self.k.lanes(self.nest.width) as self.column:
                self._stores(rows)
            self.column = None

    def _hold(self, roots: Sequence[int]) -> None:
        """Compute once per column what is the same for all iterations."""
        held = [k for k in self._edge(roots) if k not in self.held and self.graph.nodes[k].kind == "apply"]
        held = [k for k in held if self.nest.depth[k]]
        if not held:
            return
        made = {
            k: self.k.scratch(f"column{len(self.held) + i}", self._dtype(k), self.nest.width)
            for i, k in enumerate(held)
        }
        with self.k.lanes(self.nest.width) as self.column:
            self.known.append({})
            for k, s in made.items():
                self.k.store(s, self.column, self.value(k))
            self.known.pop()
        self.column = None
        self.held |= made

    def _fold_columns(self, now: Sequence[int]) -> None:
        """Accumulators are rows of scratch, a column each; the loop fills them in turn, then they are combined in pairs."""
        k, width = self.k, self.nest.width
        nodes = [self.graph.nodes[f] for f in now]
        self._hold([n.args[0] for n in nodes])
        lanes = lanes_of(self.nest.layout.extent)
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
        with k.loop(zero, self._number(self.nest.layout.extent)) as loop:
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
