"""A kernel without folds: each point computes its own elements."""

from __future__ import annotations

from wooly_compiler.schedule.values import Values


class Points(Values):
    """Points are elements, or parts of the last dimension that share an index."""

    def write(self) -> None:
        """Write the kernel's body."""
        if not self.nest.spread:
            for put in self.puts:
                self.value(put.node)
            for put in self.puts:
                self._store(put)
            return
        for k in sorted(self.nest.needed):
            node = self.graph.nodes[k]
            if node.kind == "pick":
                self._inside(node)
            elif node.kind == "guard":
                self._guard(node)
        with self.k.lanes(self.nest.layout.outer[-1]) as self.column:
            self._stores(self.puts)
