"""Reads what a text declares: its arguments, its claims about them, and its operations."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from wooly_wis.dtypes import BY_LABEL
from wooly_wis.languages import ForeignError

from wooly_triton.ops import BITS, is_float
from wooly_triton.text import Block, Function, Op, read

#: Maximum bytes that one instruction reads. Such a read needs addresses and lengths that are multiples of it.
WIDEST: Final = 16


def claims_of(text: str, count: int) -> tuple[int, ...]:
    """Return, per argument of the text's public function, a number of which the text claims a multiple."""
    head = re.search(r"tt\.func public @[^(]*\(([^\n]*)\) attributes", text)
    parts = re.split(r", (?=%)", head[1]) if head is not None else []
    found = [re.search(r"tt\.divisibility = (\d{1,4}) : i32", p) for p in parts]
    if len(found) != count:
        return (1,) * count
    # Only the largest power of two in a number is useful.
    return tuple([min(int(m[1]) & -int(m[1]), WIDEST) if m is not None and int(m[1]) else 1 for m in found])


def check_arguments(function: Function, args: Sequence[str]) -> None:
    """Check that a launch passes the arguments that a function takes.

    Raises:
        ForeignError: number or types of the arguments differ.
    """
    if len(function.args) != len(args):
        raise ForeignError(f"{function.name} takes {len(function.args)} arguments, but the launch passes {len(args)}")
    for k, ((_, t), kind) in enumerate(zip(function.args, args, strict=True)):
        if t.shape is not None:
            raise ForeignError(f"argument {k} is a tensor; a kernel takes pointers and numbers")
        dtype = BY_LABEL.get(kind)
        if t.pointer:
            if not kind.startswith("*") and kind != "u64":
                raise ForeignError(f"argument {k} is {t}, but the launch passes {kind}")
        elif dtype is None or 8 * dtype.itemsize != max(BITS[t.elem], 8) or (dtype.kind == "float") != is_float(t.elem):
            raise ForeignError(f"argument {k} is {t}, but the launch passes {kind}")


def names_of(text: str) -> list[str]:
    """Return the names of all operations of a text, for a comparison with MLIR's.

    Raises:
        ForeignError: the text cannot be read.
    """
    return sorted(op.name for function in read(text) for op in _nested(function.blocks))


def _nested(blocks: list[Block]) -> Iterator[Op]:
    for block in blocks:
        for op in block.ops:
            yield op
            for region in op.regions:
                yield from _nested(region)
