"""Inlines the functions that a kernel calls, after `returns` has given each of them one block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from wooly_wis.languages import ForeignError

from wooly_triton.text import MAX_OPS, Block, Function, Op

#: Maximum depth of nested calls.
MAX_CALLS: Final = 16


def inlined(functions: list[Function], entry: str) -> Function:
    """Return the function `entry`, with all functions that it calls inlined.

    Raises:
        ForeignError: the text has no such function, calls an unknown one, or becomes too large.
    """
    found = [f for f in functions if f.name == entry]
    if len(found) != 1:
        raise ForeignError(f"the text has no function {entry}")
    if len(functions) == 1:
        return found[0]
    return _Inliner({f.name: f for f in functions}).function(found[0])


class _Inliner:
    def __init__(self, functions: dict[str, Function]) -> None:
        self._functions = functions
        self._calls = self._ops = 0

    def function(self, function: Function) -> Function:
        return replace(function, blocks=[self._block(b, {}, "", 0) for b in function.blocks])

    def _block(self, block: Block, known: dict[str, str], prefix: str, depth: int) -> Block:
        """Copy a block. New names begin with `prefix`; `known` maps other names to their new ones."""
        known = dict(known)
        args = [(self._named(n, known, prefix), t) for n, t in block.args]
        ops: list[Op] = []
        for op in block.ops:
            if op.name == "tt.call":
                ops += self._called(op, known, depth)
            else:
                ops.append(self._copied(op, known, prefix, depth))
        return Block(block.label, args, ops)

    @staticmethod
    def _named(name: str, known: dict[str, str], prefix: str) -> str:
        new = known[name] = f"{prefix}{name}"
        return new

    def _copied(self, op: Op, known: dict[str, str], prefix: str, depth: int) -> Op:
        self._ops += 1
        if self._ops > MAX_OPS:
            raise ForeignError(
                f"the text has more than {MAX_OPS} operations after its calls are inlined; make it smaller"
            )
        of: Callable[[str], str] = lambda name: known.get(name, f"{prefix}{name}")  # noqa: E731
        operands = [of(n) for n in op.operands]
        regions = [[self._block(b, known, prefix, depth) for b in region] for region in op.regions]
        targets = [(label, [of(n) for n in passed]) for label, passed in op.targets]
        results = [self._named(n, known, prefix) for n in op.results]
        return replace(op, operands=operands, regions=regions, targets=targets, results=results)

    def _called(self, op: Op, known: dict[str, str], depth: int) -> list[Op]:
        callee = self._functions.get(next((w[1:] for w in op.words if w.startswith("@")), ""))
        if callee is None or depth >= MAX_CALLS:
            raise ForeignError(
                f"{op.place}: the text has no such function, or has calls nested deeper than {MAX_CALLS}"
            )
        if len(callee.blocks) != 1 or len(callee.args) != len(op.operands):
            raise ForeignError(
                f"{op.place}: {callee.name[:80]} takes {len(callee.args)} arguments in {len(callee.blocks)} blocks; "
                f"the call passes {len(op.operands)} arguments, and a called function must have 1 block"
            )
        self._calls += 1
        given = [known.get(n, n) for n in op.operands]
        inner = {name: value for (name, _), value in zip(callee.args, given, strict=True)}
        block = self._block(callee.blocks[0], inner, f"%c{self._calls}.", depth + 1)
        if not block.ops or block.ops[-1].name != "tt.return" or len(block.ops[-1].operands) != len(op.results):
            raise ForeignError(f"{op.place}: {callee.name} does not return {len(op.results)} values")
        last = block.ops.pop()
        known.update(zip(op.results, last.operands, strict=True))
        return block.ops
