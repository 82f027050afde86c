"""The text of operators, and queries on parts of the tree."""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from wooly_cuda_c.printing.types import (
    Pointer,
    Scalar,
    Struct,
    Type,
    Vector,
)
from wooly_cuda_c.syntax.errors import CudaSourceError
from wooly_cuda_c.syntax.tree import (
    ArrayOf,
    Assign,
    Call,
    Declare,
    Name,
    Named,
    Node,
    ReferenceTo,
    Unary,
    Written,
)

#: Maximum number of nodes that a loop may execute without a check whether the launch must end.
MAX_UNCHECKED_NODES: Final = 20_000
#: Size of a pointer with its bounds, in bytes.
POINTER: Final = 24
#: Maximum number of iterations of a loop without a check whether the launch must end.
MAX_UNCHECKED_TURNS: Final = 1024
WORDS: Final = {
    "+": "add",
    "-": "sub",
    "*": "mul",
    "/": "div",
    "%": "rem",
    "&": "and",
    "|": "or",
    "^": "xor",
    "<<": "shl",
    ">>": "shr",
}
COMPARISONS: Final = ("==", "!=", "<", ">", "<=", ">=")


def held_size(kind: Type) -> int:
    """Return the bytes of a value in the printed text."""
    return POINTER if isinstance(kind, Pointer) else kind.size


def operation(op: str, kind: Scalar, x: str, y: str, known: float | int | None) -> str:
    """Return the text of an operation with defined results: integers wrap, shifts use the low bits, a division by 0 gives 0."""
    if kind.real:
        return f"({x} {op} {y})"
    if op in ("/", "%"):
        if known is not None and known not in (0, -1):
            return f"({x} {op} {y})"
        return f"w_{WORDS[op]}_{kind.name}({x}, {y})"
    unsigned = kind.text.replace("w_i", "w_u")
    if op in ("<<", ">>"):
        by = f"((w_u32)({y}) & {kind.size * 8 - 1}u)"
        if op == "<<" and kind.signed:
            return f"(({kind.text})(({unsigned})({x}) << {by}))"
        return f"({x} {op} {by})"
    if op in ("&", "|", "^") or not kind.signed:
        return f"({x} {op} {y})"
    return f"(({kind.text})(({unsigned})({x}) {op} ({unsigned})({y})))"


def has_side_effects(node: object) -> bool:
    """Whether an expression has side effects."""
    if isinstance(node, Assign | Call) or (isinstance(node, Unary) and node.op in ("++", "--", "p++", "p--")):
        return True
    if isinstance(node, Node):
        return any(has_side_effects(getattr(node, f)) for c in type(node).__mro__ for f in getattr(c, "__slots__", ()))
    if isinstance(node, list | tuple):
        return any(has_side_effects(x) for x in node)
    return False


def contains(node: object, kinds: tuple[type[Node], ...]) -> bool:
    """Whether a part of the tree is, or contains, a node of some kinds."""
    if isinstance(node, kinds):
        return True
    if isinstance(node, Node):
        return any(contains(getattr(node, f), kinds) for c in type(node).__mro__ for f in getattr(c, "__slots__", ()))
    if isinstance(node, list | tuple):
        return any(contains(x, kinds) for x in node)
    return False


def joined_root(a: str, b: str) -> str:
    """Return the root of a pointer that may have either of two roots."""
    if not a or a == b:
        return b
    return a if not b else "one of several arrays"


def is_readonly(written: Written) -> bool:
    """Whether an array is const."""
    while isinstance(written, ArrayOf):
        written = written.of
    return isinstance(written, Named) and written.const


def field_of(kind: Type, name: str, line: int) -> tuple[int, Type, str]:
    """Return offset, type and printed name of a field."""
    if isinstance(kind, Vector):
        if name in "xyzw"[: kind.n] and len(name) == 1:
            k = "xyzw".index(name)
            return k * kind.of.size, kind.of, name
    elif isinstance(kind, Struct):
        for field, field_kind, offset in kind.fields:
            if field == name:
                return offset, field_kind, f"f_{name}"
    raise CudaSourceError(f"{kind} has no field {name}", line)


def may_change(node: object, name: str, functions: Container[str] | None = None) -> bool:
    """Whether a statement may change a variable: by assignment, or by passing it to a function or reference.

    `functions`: names of functions that may take references; None: all functions.
    """
    if isinstance(node, Assign) and isinstance(node.to, Name) and node.to.name == name:
        return True
    if (
        isinstance(node, Unary)
        and node.op in ("++", "--", "p++", "p--", "&")
        and isinstance(node.on, Name)
        and node.on.name == name
    ):
        return True
    if isinstance(node, Call):
        mine = functions is None or node.name.name in functions
        if mine and any(isinstance(a, Name) and a.name == name for a in node.args):
            return True
    if isinstance(node, Declare) and isinstance(node.type, ReferenceTo):
        return True
    if isinstance(node, Node):
        return any(
            may_change(getattr(node, f), name, functions)
            for c in type(node).__mro__
            for f in getattr(c, "__slots__", ())
        )
    if isinstance(node, list | tuple):
        return any(may_change(x, name, functions) for x in node)
    return False
