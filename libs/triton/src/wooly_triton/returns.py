"""Rewrites functions that return early as functions of one block, with `scf.if` in place of jumps.

A call inside a loop or a condition can only be inlined if the called function has one block. So the code after a jump moves into
the regions of a condition. Code that both branches reach is written twice.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from wooly_wis.languages import ForeignError

from wooly_triton.text import MAX_OPS, MAX_TEXT, Block, Function, Op, read

#: Maximum number of nested branches of a rewritten function.
MAX_BRANCHES: Final = 24
_NAME: Final = re.compile(r'"(?:[^"\\\n]|\\.)*"|%[A-Za-z0-9_$.-]+(?:#\d+)?')
_TERMINATORS: Final = ("tt.return", "cf.br", "cf.cond_br")


def without_early_returns(text: str, entry: str) -> str:
    """Return the text, in which every function but `entry` has one block. A text without calls is returned as it is.

    Raises:
        ForeignError: a called function jumps back, or becomes too large.
    """
    if "tt.call" not in text:
        return text
    lines = text.splitlines()
    prefix = "%ret"
    while prefix in text:
        prefix += "t"
    for function in reversed(read(text)):
        if function.name == entry or len(function.blocks) == 1:
            continue
        if any(not b.ops or b.ops[-1].name not in _TERMINATORS for b in function.blocks):
            raise ForeignError(
                f"the function {function.name[:80]} has a block that does not end with a jump or a return"
            )
        first, last = function.blocks[0].ops[0].line, function.blocks[-1].ops[-1].line
        lines[first - 1 : last] = _Structure(function, lines, prefix).lines()
    return "\n".join(lines) + "\n"


@dataclass(slots=True)
class _Returned:
    """The values that the code returns, and their types, as text."""

    names: list[str]
    types: str


class _Structure:
    """Writes one function again."""

    def __init__(self, function: Function, lines: list[str], prefix: str) -> None:
        self._function, self._lines, self._prefix = function, lines, prefix
        self._blocks = {b.label: b for b in function.blocks[1:]}
        self._out: list[str] = []
        self._count = self._ops = self._chars = 0

    def lines(self) -> list[str]:
        """The lines of the function's body."""
        found = self._block(self._function.blocks[0], {}, ())
        self._put(f"tt.return {', '.join(found.names)} : {found.types}" if found.names else "tt.return")
        return self._out

    def _put(self, line: str) -> None:
        self._chars += len(line)
        if self._chars > MAX_TEXT:
            raise self._large()
        self._out.append(line)

    def _large(self) -> ForeignError:
        return ForeignError(
            f"the function {self._function.name[:80]} returns early in too many places; return once, at its end"
        )

    def _block(self, block: Block, known: dict[str, str], path: tuple[str, ...]) -> _Returned:
        """Write a block and all that follows it. `known` maps the arguments of blocks to the values that jumps pass."""
        if len(path) > MAX_BRANCHES:
            raise self._large()
        for op, after in zip(block.ops, block.ops[1:], strict=False):
            self._ops += 1
            if self._ops > MAX_OPS:
                raise self._large()
            for line in self._lines[op.line - 1 : after.line - 1]:
                self._put(_NAME.sub(lambda found: known.get(found[0], found[0]), line))
        return self._end(block.ops[-1], known, path)

    def _end(self, op: Op, known: dict[str, str], path: tuple[str, ...]) -> _Returned:
        if op.name == "tt.return":
            _, _, types = self._lines[op.line - 1].partition(" : ")
            return _Returned([known.get(n, n) for n in op.operands], types.strip())
        if op.name == "cf.br" and len(op.targets) == 1:
            return self._target(op, 0, known, path)
        if op.name != "cf.cond_br" or len(op.targets) != 2 or not op.operands:
            raise ForeignError(f"{op.place}: a jump has 1 target; one with a condition has 2")
        self._count += 1
        result, at = f"{self._prefix}{self._count}", len(self._out)
        self._put("")  # the types of its results are not known yet
        found = self._target(op, 0, known, path)
        self._yield(found)
        self._put("} else {")
        other = self._target(op, 1, known, path)
        if len(other.names) != len(found.names) or other.types != found.types:
            raise ForeignError(f"{op.place}: its branches return values of different types")
        self._yield(other)
        self._put("}")
        condition, n = known.get(op.operands[0], op.operands[0]), len(found.names)
        head = f"scf.if {condition} -> ({found.types}) {{" if n else f"scf.if {condition} {{"
        self._out[at] = (f"{result}:{n} = " if n > 1 else f"{result} = " if n else "") + head
        return _Returned([f"{result}#{k}" for k in range(n)] if n > 1 else [result] * n, found.types)

    def _yield(self, found: _Returned) -> None:
        if found.names:
            self._put(f"scf.yield {', '.join(found.names)} : {found.types}")

    def _target(self, op: Op, k: int, known: dict[str, str], path: tuple[str, ...]) -> _Returned:
        label, passed = op.targets[k]
        block = self._blocks.get(label)
        if block is None or len(block.args) != len(passed):
            raise ForeignError(f"{op.place}: the text has no block {label[:40]} with {len(passed)} arguments")
        if label in path:
            raise ForeignError(f"{op.place}: a called function must not jump back; write it as a loop")
        given = [known.get(n, n) for n in passed]
        inner = known | {name: value for (name, _), value in zip(block.args, given, strict=True)}
        return self._block(block, inner, (*path, label))
