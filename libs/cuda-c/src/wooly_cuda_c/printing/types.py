"""Types as the compiler sees them, with sizes in bytes as CUDA lays them out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from wooly_cuda_c.syntax.words import SCALARS


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number; `name` is a row of `SCALARS`."""

    name: str

    @property
    def size(self) -> int:
        """Bytes."""
        return SCALARS[self.name][0]

    @property
    def align(self) -> int:
        """Bytes."""
        return self.size

    @property
    def real(self) -> bool:
        """A floating point number."""
        return SCALARS[self.name][1] == "f"

    @property
    def half(self) -> bool:
        """A floating point number of 16 bits: held as its bits, computed as a float."""
        return self.real and self.size == 2

    @property
    def signed(self) -> bool:
        """An integer with a sign."""
        return SCALARS[self.name][1] == "i"

    @property
    def text(self) -> str:
        """Its name in what is printed."""
        return f"w_{self.name}"

    def __str__(self) -> str:
        return _SAYS[self.name]


_SAYS: Final = {
    "b1": "bool", "i8": "char", "u8": "unsigned char", "i16": "short", "u16": "unsigned short", "i32": "int",
    "u32": "unsigned int", "i64": "long long", "u64": "unsigned long long", "f32": "float", "f64": "double",
    "f16": "__half", "bf16": "__nv_bfloat16",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Vector:
    """2 to 4 numbers."""

    of: Scalar
    n: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.of.size * self.n

    @property
    def align(self) -> int:
        """Bytes: three are aligned as one."""
        return self.of.size if self.n == 3 else min(self.size, 16)

    @property
    def text(self) -> str:
        """Its name in what is printed."""
        return f"{self.of.text}x{self.n}"

    def __str__(self) -> str:
        return f"a vector of {self.n} {self.of}"


@dataclass(frozen=True, slots=True)
class Struct:
    """Plain data; per field its name, type and offset."""

    name: str
    fields: tuple[tuple[str, Type, int], ...]
    size: int
    align: int

    @property
    def text(self) -> str:
        """Its name in what is printed."""
        return f"w_s_{self.name}"

    def __str__(self) -> str:
        return f"struct {self.name}"


@dataclass(frozen=True, slots=True)
class Array:
    """Elements one after the other."""

    of: Type
    n: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.of.size * self.n

    @property
    def align(self) -> int:
        """Bytes."""
        return self.of.align

    @property
    def text(self) -> str:
        """Never printed."""
        raise AssertionError

    def __str__(self) -> str:
        return f"an array of {self.n} {self.of}"


@dataclass(frozen=True, slots=True)
class Void:
    """Nothing; behind a pointer, bytes."""

    size: int = 1
    align: int = 1
    text: str = "void"

    def __str__(self) -> str:
        return "void"


@dataclass(frozen=True, slots=True)
class Pointer:
    """An address with the bounds of what it points into.

    Attributes:
        to: what is there.
        space: ``g`` of the launch's buffers, ``l`` shared by a block, ``p`` of one thread, ``c`` constants of the source,
            ``?`` not known yet, or null.
        const: what is there is only read.
    """

    to: Type
    space: str
    const: bool = False

    @property
    def size(self) -> int:
        """Bytes."""
        return 8

    @property
    def align(self) -> int:
        """Bytes."""
        return 8

    @property
    def text(self) -> str:
        """Its name in what is printed."""
        return f"w_{'g' if self.space == '?' else self.space}p"

    def __str__(self) -> str:
        return f"a pointer to {self.to}"


Type = Scalar | Vector | Struct | Array | Void | Pointer

B1, I8, U8, I32, U32, I64, U64, F32, F64 = (
    Scalar(n) for n in ("b1", "i8", "u8", "i32", "u32", "i64", "u64", "f32", "f64")
)
VOID: Final = Void()


def promoted(kind: Scalar) -> Scalar:
    """What arithmetic makes of a small integer."""
    return I32 if SCALARS[kind.name][2] < 3 else kind


def common(a: Scalar, b: Scalar) -> Scalar:
    """The type in which two numbers are computed."""
    a, b = promoted(a), promoted(b)
    if a == b:
        return a
    if a.real or b.real:
        return a if SCALARS[a.name][2] >= SCALARS[b.name][2] else b
    if a.size != b.size:
        return a if a.size > b.size else b
    return a if not a.signed else b


def wrapped(value: float, kind: Scalar) -> float | int:
    """A number as it is in a type: integers keep their low bits."""
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
