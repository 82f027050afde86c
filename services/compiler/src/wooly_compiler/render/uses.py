"""Counts the uses of a block's values. A value that is used once is printed at its use and has no name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from wooly_wis.kernel.ir import Apply, Atomic, Block, Const, For, If, Lanes, Load, Param, Reduce, Store, walk
from wooly_wis.kernel.laws import uses


def counted(block: Block) -> Counter[int]:
    """Count the uses of each value. A use inside of a loop counts twice if the value is defined outside of the loop."""
    found: Counter[int] = Counter()
    home: dict[int, int] = {}

    def visit(block: Block, at: int, yields: Sequence[int]) -> None:
        for s in block:
            for value in uses(s):
                found[value] += 1 if home.get(value) == at else 2
            match s:
                case Const() | Param() | Apply() | Load() | Atomic():
                    home[s.out] = at
                case For() | Lanes():
                    visit(s.body, id(s.body), s.yields if isinstance(s, For) else ())
                case Reduce():
                    visit(s.body, id(s.body), ())
                    for value in s.yields:  # the combination may print them more than once
                        found[value] += 2
                    visit(s.combine, id(s.combine), s.combined)
                case If():
                    visit(s.then, id(s.then), s.then_yields)
                    visit(s.otherwise, id(s.otherwise), s.otherwise_yields)
        for value in yields:
            found[value] += 1 if home.get(value) == at else 2

    visit(block, id(block), ())
    # These statements print the text of an argument more than once.
    for s in walk(block):
        if isinstance(s, Apply) and s.op in ("isnan", "isinf", "max", "min", "abs"):
            for value in s.args:
                found[value] += 1
        if isinstance(s, For):
            found[s.upper] += 1
        if isinstance(s, (Load, Store, Atomic)) and s.checked:
            found[s.index] += 1
    return found
