"""The computation of a pointwise opcode for one element, as a small immutable tree.

The tree has names and arithmetic, but no dtypes and no tensors.

Python's operators on `Name` leaves build a tree. A tree can be printed as a formula. To evaluate a tree, the caller supplies the
primitives: the interpreter supplies functions of its library, a renderer supplies functions that return text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

Number = bool | int | float
T = TypeVar("T")

#: All primitives of a tree: number of arguments and meaning. Unless the text says otherwise, the meaning is that of C and IEEE
#: 754.
PRIMITIVES: dict[str, tuple[int, str]] = {
    "add": (2, "a + b"),
    "sub": (2, "a - b"),
    "mul": (2, "a * b"),
    "div": (2, "a / b"),
    "div_floor": (2, "quotient rounded down; a / 0 gives the same as `div` for floating point"),
    "div_trunc": (2, "quotient rounded towards zero"),
    "fmod": (2, "remainder with the sign of a"),
    "pow": (2, "a to the power b"),
    "neg": (1, "-a"),
    "conj": (1, "complex conjugate; a if a is real"),
    "abs": (1, "magnitude"),
    "sqrt": (1, "square root"),
    "exp": (1, "e to the power a"),
    "exp2": (1, "2 to the power a"),
    "expm1": (1, "exp(a) - 1 without cancellation"),
    "log": (1, "natural logarithm"),
    "log2": (1, "logarithm to base 2"),
    "log10": (1, "logarithm to base 10"),
    "log1p": (1, "log(1 + a) without cancellation"),
    "sin": (1, "sine"),
    "cos": (1, "cosine"),
    "tan": (1, "tangent"),
    "asin": (1, "arc sine"),
    "acos": (1, "arc cosine"),
    "atan": (1, "arc tangent"),
    "atan2": (2, "angle of the point (b, a)"),
    "sinh": (1, "hyperbolic sine"),
    "cosh": (1, "hyperbolic cosine"),
    "tanh": (1, "hyperbolic tangent"),
    "erf": (1, "error function"),
    "erfc": (1, "1 - erf(a) without cancellation"),
    "floor": (1, "rounded down"),
    "ceil": (1, "rounded up"),
    "round": (1, "rounded to nearest, ties to even"),
    "trunc": (1, "rounded towards zero"),
    "isnan": (1, "whether a, or a part of it, is not a number"),
    "isinf": (1, "whether a, or a part of it, is infinite"),
    "eq": (2, "a == b"),
    "ne": (2, "a != b"),
    "lt": (2, "a < b"),
    "le": (2, "a <= b"),
    "gt": (2, "a > b"),
    "ge": (2, "a >= b"),
    "and": (2, "bitwise and; logical for truth values"),
    "or": (2, "bitwise or; logical for truth values"),
    "xor": (2, "bitwise exclusive or; logical for truth values"),
    "not": (1, "bitwise complement; logical for truth values"),
    "select": (3, "b where a is true, c elsewhere"),
}

_INFIX = {
    "or": ("|", 1),
    "xor": ("^", 2),
    "and": ("&", 3),
    "eq": ("==", 4),
    "ne": ("!=", 4),
    "lt": ("<", 4),
    "le": ("<=", 4),
    "gt": (">", 4),
    "ge": (">=", 4),
    "add": ("+", 5),
    "sub": ("-", 5),
    "mul": ("*", 6),
    "div": ("/", 6),
}
_PREFIX = {"neg": ("-", 7), "not": ("~", 7)}
_ATOM = 9


class Expr:
    """A node. Operators make new nodes; `==` compares trees (the comparison of elements is `eq`)."""

    __slots__ = ()

    def __add__(self, other: Expr | Number) -> Expr:
        return apply("add", self, other)

    def __radd__(self, other: Number) -> Expr:
        return apply("add", other, self)

    def __sub__(self, other: Expr | Number) -> Expr:
        return apply("sub", self, other)

    def __rsub__(self, other: Number) -> Expr:
        return apply("sub", other, self)

    def __mul__(self, other: Expr | Number) -> Expr:
        return apply("mul", self, other)

    def __rmul__(self, other: Number) -> Expr:
        return apply("mul", other, self)

    def __truediv__(self, other: Expr | Number) -> Expr:
        return apply("div", self, other)

    def __rtruediv__(self, other: Number) -> Expr:
        return apply("div", other, self)

    def __pow__(self, other: Expr | Number) -> Expr:
        return apply("pow", self, other)

    def __neg__(self) -> Expr:
        return apply("neg", self)

    def __invert__(self) -> Expr:
        return apply("not", self)

    def __and__(self, other: Expr) -> Expr:
        return apply("and", self, other)

    def __or__(self, other: Expr) -> Expr:
        return apply("or", self, other)

    def __xor__(self, other: Expr) -> Expr:
        return apply("xor", self, other)

    def __lt__(self, other: Expr | Number) -> Expr:
        return apply("lt", self, other)

    def __le__(self, other: Expr | Number) -> Expr:
        return apply("le", self, other)

    def __gt__(self, other: Expr | Number) -> Expr:
        return apply("gt", self, other)

    def __ge__(self, other: Expr | Number) -> Expr:
        return apply("ge", self, other)

    def __str__(self) -> str:
        return _text(self)[0]


@dataclass(frozen=True, slots=True)
class Name(Expr):
    """An operand, or a numeric attribute of the row."""

    name: str

    __str__ = Expr.__str__


@dataclass(frozen=True, slots=True)
class Const(Expr):
    """A constant number."""

    value: Number

    __str__ = Expr.__str__


@dataclass(frozen=True, slots=True)
class Apply(Expr):
    """A primitive applied to nodes."""

    primitive: str
    args: tuple[Expr, ...]

    __str__ = Expr.__str__


def apply(primitive: str, *args: Expr | Number) -> Apply:
    """Make a node that applies a primitive of `PRIMITIVES`.

    Raises:
        ValueError: the primitive is unknown, or the number of arguments is wrong.
    """
    if primitive not in PRIMITIVES or PRIMITIVES[primitive][0] != len(args):
        raise ValueError(f"primitive {primitive!r} with {len(args)} arguments does not exist; see PRIMITIVES")
    return Apply(primitive, tuple([a if isinstance(a, Expr) else Const(a) for a in args]))


def _text(expr: Expr) -> tuple[str, int]:
    """The text of a node, and the precedence of the node's outermost operator."""
    if isinstance(expr, Name):
        return expr.name, _ATOM
    if isinstance(expr, Const):
        return repr(expr.value), _ATOM
    assert isinstance(expr, Apply)
    parts = [_text(a) for a in expr.args]
    if expr.primitive in _INFIX:
        sign, strength = _INFIX[expr.primitive]
        left, right = parts
        left_text = left[0] if (left[1] >= strength and strength != 4) or left[1] > strength else f"({left[0]})"
        right_text = right[0] if right[1] > strength else f"({right[0]})"
        return f"{left_text} {sign} {right_text}", strength
    if expr.primitive in _PREFIX:
        sign, strength = _PREFIX[expr.primitive]
        return sign + (parts[0][0] if parts[0][1] > strength else f"({parts[0][0]})"), strength
    return f"{expr.primitive}({', '.join(text for text, _ in parts)})", _ATOM


def walk(expr: Expr) -> Iterator[Expr]:
    """Yield every node of a tree, parents before children. A node that occurs twice is yielded twice."""
    yield expr
    if isinstance(expr, Apply):
        for a in expr.args:
            yield from walk(a)


def names(expr: Expr) -> frozenset[str]:
    """The names of the operands and attributes that a tree reads."""
    return frozenset(node.name for node in walk(expr) if isinstance(node, Name))


def evaluate(
    expr: Expr,
    values: Mapping[str, T],
    primitives: Mapping[str, Callable[..., T]],
    constant: Callable[[Number], T],
) -> T:
    """Compute a tree bottom up. Equal subtrees are computed once.

    Args:
        expr: the tree.
        values: the value of each name.
        primitives: an implementation per primitive.
        constant: makes a value from a number in the tree.

    Raises:
        KeyError: a name or a primitive is missing.
    """
    done: dict[Expr, T] = {}

    def visit(node: Expr) -> T:
        if isinstance(node, Name):
            return values[node.name]
        if isinstance(node, Const):
            return constant(node.value)
        assert isinstance(node, Apply)
        if node not in done:
            done[node] = primitives[node.primitive](*[visit(a) for a in node.args])
        return done[node]

    return visit(expr)


def operations(expr: Expr) -> int:
    """Number of different primitive applications in a tree. Each counts as one operation."""
    return len({node for node in walk(expr) if isinstance(node, Apply)})


def _unary(primitive: str) -> Callable[[Any], Expr]:
    def make(a: Expr | Number) -> Expr:
        return apply(primitive, a)

    return make


exp, erf, sqrt, tanh, magnitude, conj = map(_unary, ("exp", "erf", "sqrt", "tanh", "abs", "conj"))
isnan, isinf = map(_unary, ("isnan", "isinf"))


def select(condition: Expr, yes: Expr | Number, no: Expr | Number) -> Expr:
    """`yes` if the condition is true, else `no`."""
    return apply("select", condition, yes, no)


def eq(a: Expr, b: Expr | Number) -> Expr:
    """Whether two elements are equal."""
    return apply("eq", a, b)


def ne(a: Expr, b: Expr | Number) -> Expr:
    """Whether two elements differ."""
    return apply("ne", a, b)
