"""Folds of columns: a point is a block of neighbouring columns, lanes are columns, and the fold is a sequential loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from wooly_wis.dtypes import DType
from wooly_wis.kernel.builder import Value
from wooly_wis.kernel.ir import Scratch

from wooly_compiler.dag import GraphNode
from wooly_compiler.schedule.folds import Folds
from wooly_compiler.schedule.nest import lanes_of

#: Number of rows per update of an accumulator, if a row needs at most `FEW_VALUES` values. Both numbers make the source longer.
ROWS_PER_UPDATE: Final = 4
FEW_VALUES: Final = 8


class Columns(Folds):
    """A kernel whose points are blocks of columns."""

    def write(self) -> None:
        """Write the kernel's body."""
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
        """Compute, once per column, the values that are the same in all iterations."""
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
        """Fold depth first: an accumulator takes all its elements, then it is combined with its pair, then the next one begins.

        This adds the same pairs as filling all accumulators first. But it stores one row of columns per level of pairing instead
        of one per accumulator. So blocks may be wide, and the accumulator stays in the cache.
        """
        k, width = self.k, self.nest.width
        nodes = [self.graph.nodes[f] for f in now]
        self._hold([n.args[0] for n in nodes])
        extent = self.nest.layout.extent
        lanes = lanes_of(extent)
        steps = lanes.bit_length() - 1
        kinds = [d for n in nodes for d in ([self._dtype(n.args[0])] + [DType.I64] * n.op.startswith("arg"))]
        first = len(self.held)
        current = [k.scratch(f"fold{first}_a{i}", d, width) for i, d in enumerate(kinds)]
        waiting = [k.scratch(f"fold{first}_b{i}", d, (steps + 1) * width) for i, d in enumerate(kinds)]
        with k.loop(self._number(0), self._number(lanes)) as turn:
            self.known.append({})
            with k.lanes(width) as column:
                for s, value in zip(current, self._inits(nodes), strict=True):
                    k.store(s, column, value)
            self._chain(nodes, current, self._accumulator(turn.index, steps), lanes)
            paired = self._pair(nodes, current, waiting, turn.index, steps)
            behind = k.apply("mul", paired, self._number(width))
            with k.lanes(width) as column:
                at = k.apply("add", behind, column)
                for s, to in zip(current, waiting, strict=True):
                    k.store(to, at, k.load(s, column))
            self.known.pop()
        self.held |= self._results(now, current)

    def _accumulator(self, turn: Value, steps: int) -> Value:
        """Return the accumulator of an iteration: the bits of `turn` reversed, so that pairs follow each other."""
        k, two = self.k, self._number(2)
        found = self._number(0)
        for bit in range(steps):
            up = turn if not bit else k.apply("div_trunc", turn, self._number(1 << bit))
            digit = k.apply("fmod", up, two)
            found = k.apply("add", found, k.apply("mul", digit, self._number(1 << (steps - 1 - bit))))
        return found

    def _chain(self, nodes: Sequence[GraphNode], current: Sequence[Scratch], first: Value, lanes: int) -> None:
        """Fold all elements of an accumulator: row `first`, then every row that is a multiple of `lanes` further."""
        k, extent = self.k, self.nest.layout.extent
        rows_at_once = ROWS_PER_UPDATE if len(self._reach([n.args[0] for n in nodes])) <= FEW_VALUES else 1
        whole = extent // (rows_at_once * lanes)
        if whole:
            with k.loop(self._number(0), self._number(whole)) as loop:
                self.known.append({})
                base = k.apply("add", k.apply("mul", loop.index, self._number(rows_at_once * lanes)), first)
                rows = [k.apply("add", base, self._number(n * lanes)) if n else base for n in range(rows_at_once)]
                self._take(nodes, current, rows)
                self.known.pop()
        done = whole * rows_at_once * lanes
        if done < extent:
            begin = k.apply("add", first, self._number(done)) if done else first
            with k.loop(begin, self._number(extent), lanes) as loop:
                self._take(nodes, current, [loop.index])

    def _take(self, nodes: Sequence[GraphNode], current: Sequence[Scratch], rows: Sequence[Value]) -> None:
        """Fold the elements of these rows into the accumulator, in order."""
        with self.k.lanes(self.nest.width) as self.column:
            held = [self.k.load(s, self.column) for s in current]
            for self.lane in rows:
                self.known.append({})
                held = self._combine(nodes, held, self._elements(nodes))
                self.known.pop()
            for s, value in zip(current, held, strict=True):
                self.k.store(s, self.column, value)
        self.lane = self.column = None

    def _pair(
        self,
        nodes: Sequence[GraphNode],
        current: Sequence[Scratch],
        waiting: Sequence[Scratch],
        turn: Value,
        steps: int,
    ) -> Value:
        """Combine an accumulator with its pair, the result with its pair, and so on while pairs are complete; return how
        often.
        """
        k, width = self.k, self.nest.width
        paired = self._number(0)
        for step in range(steps):
            ones = self._number((2 << step) - 1)
            there = k.apply("eq", k.apply("and", turn, ones), ones)
            with k.when(there), k.lanes(width) as column:
                at = k.apply("add", column, k.const(DType.I64, step * width))
                left, right = [k.load(s, at) for s in waiting], [k.load(s, column) for s in current]
                for s, value in zip(current, self._combine(nodes, left, right), strict=True):
                    k.store(s, column, value)
            paired = k.apply("add", paired, k.apply("select", there, self._number(1), self._number(0)))
        return paired
