"""Evaluates constant expressions."""

from __future__ import annotations

from wooly_cuda_c.syntax.errors import CudaSourceError
from wooly_cuda_c.syntax.tree import Binary, Conditional, Node, Number, Unary


def folded(node: Node) -> int:
    """Return the value of an integer expression of literals.

    Raises:
        CudaSourceError: the expression is not constant.
    """
    if isinstance(node, Number):
        return int(node.value)
    if isinstance(node, Unary) and node.op in ("-", "+", "!", "~"):
        value = folded(node.on)
        return {"-": -value, "+": value, "!": int(not value), "~": ~value}[node.op]
    if isinstance(node, Conditional):
        return folded(node.then if folded(node.condition) else node.other)
    if isinstance(node, Binary):
        found = fold(node.op, folded(node.left), folded(node.right))
        if found is not None:
            return int(found)
    raise CudaSourceError("this expression is not constant", node.line)


def fold(op: str, a: float, b: float) -> float | int | None:
    """Return the result of a binary operator on two numbers; None if it has none. Integers do not wrap."""
    whole = isinstance(a, int) and isinstance(b, int)
    if op in ("/", "%"):
        if not b:
            return None
        if not whole:
            return a / b if op == "/" else None
        quotient = abs(int(a)) // abs(int(b)) * (1 if (a < 0) == (b < 0) else -1)
        return quotient if op == "/" else int(a) - quotient * int(b)
    if op in ("<<", ">>", "&", "|", "^"):
        x, y = int(a), int(b)
        if not whole or (op in ("<<", ">>") and not 0 <= y < 64):
            return None
        return {"<<": x << y if op == "<<" else 0, ">>": x >> (y & 63), "&": x & y, "|": x | y, "^": x ^ y}[op]
    simple = {
        "+": a + b, "-": a - b, "*": a * b, "<": int(a < b), ">": int(a > b), "<=": int(a <= b), ">=": int(a >= b),
        "==": int(a == b), "!=": int(a != b), "&&": int(bool(a) and bool(b)), "||": int(bool(a) or bool(b)),
    }  # fmt: skip
    return simple.get(op)
