"""The names that a source declares, its types, and constant expressions."""

from __future__ import annotations

from dataclasses import dataclass, field
from struct import pack
from typing import Final

from wooly_cuda_c.printing.types import VOID, Array, Pointer, Scalar, Struct, Type, Vector, common, promoted, wrapped
from wooly_cuda_c.syntax.errors import CudaSourceError
from wooly_cuda_c.syntax.parser import fold
from wooly_cuda_c.syntax.tree import (
    ArrayOf,
    Binary,
    Cast,
    Conditional,
    Name,
    Named,
    Node,
    Number,
    PointerTo,
    ReferenceTo,
    SizeOf,
    Unary,
    Unit,
    Written,
)
from wooly_cuda_c.syntax.words import SCALARS, VECTOR_TYPES

#: Maximum size of one object, in bytes.
MAX_OBJECT: Final = 1 << 20


@dataclass(slots=True)
class Bound:
    """Names of types and numbers: template parameters, aliases, constants."""

    types: dict[str, Type] = field(default_factory=dict)
    numbers: dict[str, tuple[Scalar, float | int]] = field(default_factory=dict)


class Types:
    """The types of a source."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._structs: dict[str, Struct] = {}
        self._open: list[str] = []
        self.used: dict[str, Struct] = {}

    def of(self, written: Written, bound: Bound, line: int) -> Type:
        """Return the type that a source names; ``auto`` and references are not supported here.

        Raises:
            CudaSourceError: the type does not exist, or is not supported here.
        """
        match written:
            case Named(name=name):
                return self._named(name, bound, line)
            case PointerTo(to=to):
                inner = self.of(to, bound, line)
                if isinstance(inner, Pointer):
                    raise CudaSourceError("pointers to pointers are not supported: their bounds are not known", line)
                return Pointer(inner, "?", isinstance(to, Named) and to.const)
            case ArrayOf(of=of, count=count):
                if count is None:
                    raise CudaSourceError("the size of this array is not known", line)
                inner = self.of(of, bound, line)
                n = self.constant(count, bound)
                if not isinstance(n, int) or n < 1:
                    raise CudaSourceError(f"an array cannot have {n} elements: it needs 1 or more", line)
                if isinstance(inner, Pointer):
                    raise CudaSourceError("arrays of pointers are not supported: their bounds are not known", line)
                if inner.size * n > MAX_OBJECT:
                    raise CudaSourceError(
                        f"the array has {inner.size * n} bytes, at most {MAX_OBJECT} are allowed", line
                    )
                return Array(inner, n)
            case ReferenceTo():
                raise CudaSourceError("a reference is not supported here", line)
        raise AssertionError(written)

    def _named(self, name: str, bound: Bound, line: int) -> Type:
        if name in bound.types:
            return bound.types[name]
        if name in SCALARS:
            return Scalar(name)
        if name == "void":
            return VOID
        if name in VECTOR_TYPES:
            scalar, n = VECTOR_TYPES[name]
            return Vector(Scalar(scalar), n)
        if name in self._open:
            raise CudaSourceError(f"{name} contains itself", line)
        if name in self._unit.aliases:
            self._open.append(name)
            found = self.of(self._unit.aliases[name].type, bound, line)
            self._open.pop()
            return found
        if name in self._unit.structs:
            return self._struct(name, line)
        if name == "auto":
            raise CudaSourceError("auto is not supported here", line)
        raise CudaSourceError(f"{name} is not a type", line)

    def _struct(self, name: str, line: int) -> Struct:
        if name not in self._structs:
            self._open.append(name)
            declared = self._unit.structs[name]
            fields: list[tuple[str, Type, int]] = []
            at, align = 0, 1
            for field_name, written in declared.fields:
                kind = self.of(written, Bound(), declared.line)
                if isinstance(kind, Pointer):
                    raise CudaSourceError(f"{name}.{field_name}: pointers in structs are not supported", declared.line)
                if isinstance(kind, Vector) and kind.align != kind.of.size:
                    raise CudaSourceError(f"{name}.{field_name}: vectors in structs are not supported", declared.line)
                at = -(-at // kind.align) * kind.align
                fields.append((field_name, kind, at))
                at += kind.size
                align = max(align, kind.align)
                if at > MAX_OBJECT:
                    raise CudaSourceError(f"{name} is larger than {MAX_OBJECT} bytes", declared.line)
            if not fields:
                raise CudaSourceError(f"{name} has no fields", declared.line)
            self._open.pop()
            self._structs[name] = Struct(name, tuple(fields), -(-at // align) * align, align)
        found = self._structs[name]
        self.used[name] = found
        return found

    def text(self) -> str:
        """Return the text of the structs that are used."""
        out = []
        for struct in self.used.values():
            fields = []
            for name, kind, _ in struct.fields:
                counts = ""
                while isinstance(kind, Array):
                    counts += f"[{kind.n}]"
                    kind = kind.of
                fields.append(f"{kind.text} f_{name}{counts};")
            out.append(f"typedef struct {{ {' '.join(fields)} }} {struct.text};\n")
        return "".join(out)

    # -- constants -----------------------------------------------------------------------------------------------------

    def constant(self, node: Node, bound: Bound) -> float | int:
        """Return the number of a constant expression.

        Raises:
            CudaSourceError: the expression is not constant.
        """
        return self.typed_constant(node, bound)[1]

    def typed_constant(self, node: Node, bound: Bound) -> tuple[Scalar, float | int]:
        """Return a constant with its type."""
        found = self.maybe_constant(node, bound)
        if found is None:
            raise CudaSourceError("this expression must be constant", node.line)
        return found

    def maybe_constant(self, node: Node, bound: Bound) -> tuple[Scalar, float | int] | None:
        """Return a constant with its type; None if the expression is not constant."""
        match node:
            case Number(value=value, kind=kind):
                return Scalar(kind), value
            case Name(name=name, template=None):
                return bound.numbers.get(name)
            case Unary(op=op, on=on) if op in ("-", "+", "!", "~"):
                return folded_unary(op, self.maybe_constant(on, bound))
            case Binary(op=op, left=left, right=right) if op != ",":
                a, b = self.maybe_constant(left, bound), self.maybe_constant(right, bound)
                return folded_binary(op, a, b)
            case Conditional(condition=c, then=then, other=other):
                known = self.maybe_constant(c, bound)
                return None if known is None else self.maybe_constant(then if known[1] else other, bound)
            case Cast(to=to, on=on) if on is not None:
                wanted = self.of(to, bound, node.line) if isinstance(to, Named) and to.name != "auto" else None
                inner = self.maybe_constant(on, bound)
                if isinstance(wanted, Scalar) and inner is not None:
                    return wanted, wrapped(inner[1], wanted)
            case SizeOf(of=of) if not isinstance(of, Node):
                return Scalar("u64"), self.of(of, bound, node.line).size
        return None


def folded_unary(op: str, of: tuple[Scalar, float | int] | None) -> tuple[Scalar, float | int] | None:
    """Apply a unary operator to a constant."""
    if of is None:
        return None
    kind, value = of
    if op == "!":
        return Scalar("b1"), int(not value)
    kind = promoted(kind)
    if op == "~":
        return None if kind.real else (kind, wrapped(~int(value), kind))
    return kind, wrapped(-value if op == "-" else value, kind)


def folded_binary(
    op: str, a: tuple[Scalar, float | int] | None, b: tuple[Scalar, float | int] | None
) -> tuple[Scalar, float | int] | None:
    """Apply a binary operator to two constants. Real numbers are only compared."""
    if a is None or b is None:
        return None
    kind = common(a[0], b[0])
    if op in ("<<", ">>"):
        kind = promoted(a[0])
    asks = op in ("==", "!=", "<", ">", "<=", ">=", "&&", "||")
    if kind.real and not asks:
        return None
    x, y = (wrapped(v, kind) if op not in ("<<", ">>", "&&", "||") else v for v in (a[1], b[1]))
    found = fold(op, x, y)
    if found is None:
        return None
    return (Scalar("b1"), int(found)) if asks else (kind, wrapped(found, kind))


def half_bits(kind: Scalar, value: float | int) -> int:
    """Return the bits of the nearest 16-bit float."""
    if kind.name == "f16":
        try:
            return int.from_bytes(pack("<e", value), "little")
        except OverflowError:
            return 0xFC00 if value < 0 else 0x7C00
    if value != value:
        return 0x7FFF
    exact = int.from_bytes(pack("<d", value), "little")
    sign, rest = exact >> 63 << 15, exact & ((1 << 63) - 1)
    if abs(value) < 2.0**-126:  # a subnormal number
        return sign | round(abs(value) * 2.0**133)
    rest = (rest + (1 << 44) - 1 + (rest >> 45 & 1)) >> 45
    return sign | min(rest - (896 << 7), 0x7F80)


def literal(kind: Scalar, value: float | int) -> str:
    """Return the text of a number."""
    if kind.half:
        return f"((w_{kind.name}){half_bits(kind, value):#06x})"
    if kind.real:
        if value != value or value in (float("inf"), float("-inf")):
            word = "nan" if value != value else "inf"
            return f"({'-' if value < 0 else ''}w_{word}_{kind.name})"
        text = repr(float(value))
        return (
            f"({text}{'f' if kind.name == 'f32' else ''})" if value < 0 else text + ("f" if kind.name == "f32" else "")
        )
    n = int(value)
    if kind.name in ("b1", "u8", "u16", "i8", "i16"):
        return f"(({kind.text}){n})" if n >= 0 else f"(({kind.text})({n}))"
    if kind.name == "i32":
        return str(n) if n >= 0 else "(-2147483647 - 1)" if n == -(1 << 31) else f"({n})"
    if kind.name == "u32":
        return f"{n}u"
    if kind.name == "i64":
        return f"((w_i64){n}l)" if n >= 0 else f"((w_i64)0x{n & ((1 << 64) - 1):x}ul)"
    return f"((w_u64){n}ul)"
