"""What a text says of itself before it is gone through: its arguments, what it claims of them, its operations."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from wooly_wis.dtypes import BY_LABEL
from wooly_wis.languages import ForeignError

from wooly_triton.ops import BITS, is_float
from wooly_triton.text import Block, Function, Op, read

#: Bytes that one instruction reads at most: what addresses and lengths must be multiples of, to be read so.
WIDEST: Final = 16


def claims_of(text: str, count: int) -> tuple[int, ...]:
    """Per argument of the text's public function, what it says that its address or value is a multiple of."""
    head = re.search(r"tt\.func public @[^(]*\(([^\n]*)\) attributes", text)
    parts = re.split(r", (?=%)", head[1]) if head is not None else []
    found = [re.search(r"tt\.divisibility = (\d{1,4}) : i32", p) for p in parts]
    if len(found) != count:
        return (1,) * count
    # of any number only the power of two in it is of use
    return tuple([min(int(m[1]) & -int(m[1]), WIDEST) if m is not None and int(m[1]) else 1 for m in found])


def check_arguments(function: Function, args: Sequence[str]) -> None:
    """Make sure that a launch gives what a function takes.

    Raises:
        ForeignError: it does not.
    """
    if len(function.args) != len(args):
        raise ForeignError(f"{function.name} takes {len(function.args)} arguments, {len(args)} are given")
    for k, ((_, t), kind) in enumerate(zip(function.args, args, strict=True)):
        if t.shape is not None:
            raise ForeignError(f"argument {k} is a tensor")
        dtype = BY_LABEL.get(kind)
        if t.pointer:
            if not kind.startswith("*") and kind != "u64":
                raise ForeignError(f"argument {k} is {t}, a {kind} is given")
        elif dtype is None or 8 * dtype.itemsize != max(BITS[t.elem], 8) or (dtype.kind == "float") != is_float(t.elem):
            raise ForeignError(f"argument {k} is {t}, a {kind} is given")


def names_of(text: str) -> list[str]:
    """The names of all operations of a text, as this reads it: to be held against what MLIR reads.

    Raises:
        ForeignError: it cannot be read.
    """
    return sorted(op.name for function in read(text) for op in _nested(function.blocks))


def _nested(blocks: list[Block]) -> Iterator[Op]:
    for block in blocks:
        for op in block.ops:
            yield op
            for region in op.regions:
                yield from _nested(region)
