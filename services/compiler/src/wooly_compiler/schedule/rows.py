"""Folds of rows: a point is a row, and lanes go along the folded dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from wooly_compiler.schedule.folds import Folds
from wooly_compiler.schedule.nest import lanes_of

#: Maximum bytes of a row's values that are stored between loops. Beyond this limit, values are computed again.
KEPT_BYTES: Final = 32 << 10
#: Expensive operations, whose results are worth storing.
_EXPENSIVE: Final = frozenset(
    "exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan "  # noqa: SIM905
    "atan2 sinh cosh tanh erf erfc pow fmod".split()
)


class Rows(Folds):
    """A kernel whose points are rows."""

    def write(self) -> None:
        """Write the kernel's body."""
        rounds = self._rounds()
        full = [p for p in self.puts if not p.rows]
        for d, now in enumerate(rounds):
            if now:
                later = [self.graph.nodes[k].args[0] for r in rounds[d + 1 :] for k in r] + [p.node for p in full]
                self._fold(now, self._keep([self.graph.nodes[k].args[0] for k in now], later))
        if full:
            self._rows_first([p.node for p in full])
            with self.k.lanes(self.nest.layout.extent) as self.lane:
                self._stores(full)
            self.lane = None
        rows = [p for p in self.puts if p.rows]
        for put in rows:
            self.value(put.node)
        for put in rows:
            self._store(put)

    def _expensive(self, k: int) -> bool:
        todo = [k]
        while todo:
            at = todo.pop()
            node = self.graph.nodes[at]
            if node.op in _EXPENSIVE and node.kind == "apply":
                return True
            if at not in self.kept:
                todo += [a for a in node.args if self.nest.full[a]]
        return False

    def _keep(self, now: Sequence[int], later: Sequence[int]) -> list[int]:
        """Return the expensive values of this loop that a later loop needs, as long as there is room for them."""
        both = self._reach(now) & self._reach(later)
        inside = {a for k in both for a in self.graph.nodes[k].args}
        room = KEPT_BYTES - sum(s.numel * s.dtype.itemsize for s in self.kept.values())
        chosen: list[int] = []
        for k in sorted(both - inside):
            size = self.nest.layout.extent * self.graph.nodes[k].dtype.itemsize
            if k not in self.kept and self._expensive(k) and size <= room:
                chosen.append(k)
                room -= size
        return chosen

    def _rows_first(self, roots: Sequence[int]) -> None:
        """Compute, before the loop, the values that are the same in all iterations."""
        for k in self._edge(roots):
            self.value(k)

    def _fold(self, now: Sequence[int], kept: Sequence[int]) -> None:
        nodes = [self.graph.nodes[k] for k in now]
        self._rows_first([n.args[0] for n in nodes])
        extent = self.nest.layout.extent
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
        for key, value in self._results(now, folding.results).items():
            self.known[-1][key] = value
