"""Types of values, with CUDA's sizes and alignments, in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from wooly_cuda_c.syntax.words import SCALARS


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number type; `name` is a row of `SCALARS`."""

    name: str

    @property
    def size(self) -> int:
        """Size in bytes."""
        return SCALARS[self.name][0]

    @property
    def align(self) -> int:
        """Alignment in bytes."""
        return self.size

    @property
    def real(self) -> bool:
        """Whether it is floating point."""
        return SCALARS[self.name][1] == "f"

    @property
    def half(self) -> bool:
        """Whether it is a 16-bit float: stored as its bits, computed as a float."""
        return self.real and self.size == 2

    @property
    def signed(self) -> bool:
        """Whether it is a signed integer."""
        return SCALARS[self.name][1] == "i"

    @property
    def text(self) -> str:
        """Name in the printed text."""
        return f"w_{self.name}"

    def __str__(self) -> str:
        return _C_NAMES[self.name]


_C_NAMES: Final = {
    "b1": "bool", "i8": "char", "u8": "unsigned char", "i16": "short", "u16": "unsigned short", "i32": "int",
    "u32": "unsigned int", "i64": "long long", "u64": "unsigned long long", "f32": "float", "f64": "double",
    "f16": "__half", "bf16": "__nv_bfloat16",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Vector:
    """A vector of 2 to 4 numbers."""

    of: Scalar
    n: int

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.of.size * self.n

    @property
    def align(self) -> int:
        """Alignment in bytes: a vector of three is aligned as one element."""
        return self.of.size if self.n == 3 else min(self.size, 16)

    @property
    def text(self) -> str:
        """Name in the printed text."""
        return f"{self.of.text}x{self.n}"

    def __str__(self) -> str:
        return f"a vector of {self.n} {self.of}"


@dataclass(frozen=True, slots=True)
class Struct:
    """A struct; each field has a name, a type and an offset."""

    name: str
    fields: tuple[tuple[str, Type, int], ...]
    size: int
    align: int

    @property
    def text(self) -> str:
        """Name in the printed text."""
        return f"w_s_{self.name}"

    def __str__(self) -> str:
        return f"struct {self.name}"


@dataclass(frozen=True, slots=True)
class Array:
    """An array of `n` elements."""

    of: Type
    n: int

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.of.size * self.n

    @property
    def align(self) -> int:
        """Alignment in bytes."""
        return self.of.align

    @property
    def text(self) -> str:
        """Not available: an array is printed by its elements."""
        raise AssertionError

    def __str__(self) -> str:
        return f"an array of {self.n} {self.of}"


@dataclass(frozen=True, slots=True)
class Void:
    """No value; behind a pointer, bytes."""

    size: int = 1
    align: int = 1
    text: str = "void"

    def __str__(self) -> str:
        return "void"


@dataclass(frozen=True, slots=True)
class Pointer:
    """An address with the bounds of its memory.

    Attributes:
        to: type of the object.
        space: ``g`` a buffer of the launch, ``l`` shared by a block, ``p`` a variable of one thread, ``c`` constants of the
            source, ``?`` not known yet, or null.
        const: whether the object must not be written.
    """

    to: Type
    space: str
    const: bool = False

    @property
    def size(self) -> int:
        """Size in bytes."""
        return 8

    @property
    def align(self) -> int:
        """Alignment in bytes."""
        return 8

    @property
    def text(self) -> str:
        """Name in the printed text."""
        return f"w_{'g' if self.space == '?' else self.space}p"

    def __str__(self) -> str:
        return f"a pointer to {self.to}"


Type = Scalar | Vector | Struct | Array | Void | Pointer

B1, I8, U8, I32, U32, I64, U64, F32, F64 = (
    Scalar(n) for n in ("b1", "i8", "u8", "i32", "u32", "i64", "u64", "f32", "f64")
)
VOID: Final = Void()


def promoted(kind: Scalar) -> Scalar:
    """Return the type after C's integer promotion."""
    return I32 if SCALARS[kind.name][2] < 3 else kind


def common(a: Scalar, b: Scalar) -> Scalar:
    """Return the type in which an operation on two numbers is computed."""
    a, b = promoted(a), promoted(b)
    if a == b:
        return a
    if a.real or b.real:
        return a if SCALARS[a.name][2] >= SCALARS[b.name][2] else b
    if a.size != b.size:
        return a if a.size > b.size else b
    return a if not a.signed else b


def wrapped(value: float, kind: Scalar) -> float | int:
    """Convert a number to a type; integers keep their low bits."""
    if kind.real:
        return float(value)
    if kind == B1:
        return int(bool(value))
    if isinstance(value, float):
        low, high = (
            (-(1 << (kind.size * 8 - 1)), (1 << (kind.size * 8 - 1)) - 1)
            if kind.signed
            else (0, (1 << kind.size * 8) - 1)
        )
        return 0 if value != value else int(min(max(value, low), high))
    bits = kind.size * 8
    value &= (1 << bits) - 1
    return value - (1 << bits) if kind.signed and value >> (bits - 1) else value
