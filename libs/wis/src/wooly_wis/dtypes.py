"""Element types of WIS. This module does not know torch."""

from __future__ import annotations

from enum import Enum


class DType(Enum):
    """An element type: stable wire code, assembly label, size in bytes, kind.

    `kind` is one of ``bool``, ``uint``, ``int``, ``float``, ``complex``.
    """

    BOOL = (1, "bool", 1, "bool")
    U8 = (2, "u8", 1, "uint")
    I8 = (3, "i8", 1, "int")
    I16 = (4, "i16", 2, "int")
    I32 = (5, "i32", 4, "int")
    I64 = (6, "i64", 8, "int")
    U16 = (7, "u16", 2, "uint")
    U32 = (8, "u32", 4, "uint")
    U64 = (9, "u64", 8, "uint")
    F16 = (10, "f16", 2, "float")
    BF16 = (11, "bf16", 2, "float")
    F32 = (12, "f32", 4, "float")
    F64 = (13, "f64", 8, "float")
    C32 = (14, "c32", 4, "complex")
    C64 = (15, "c64", 8, "complex")
    C128 = (16, "c128", 16, "complex")
    F8E4M3FN = (17, "f8e4m3fn", 1, "float")
    F8E5M2 = (18, "f8e5m2", 1, "float")
    F8E4M3FNUZ = (19, "f8e4m3fnuz", 1, "float")
    F8E5M2FNUZ = (20, "f8e5m2fnuz", 1, "float")
    F8E8M0FNU = (21, "f8e8m0fnu", 1, "float")

    code: int
    label: str
    itemsize: int
    kind: str

    def __init__(self, code: int, label: str, itemsize: int, kind: str) -> None:
        self.code = code
        self.label = label
        self.itemsize = itemsize
        self.kind = kind

    def __repr__(self) -> str:
        return f"DType.{self.name}"


BY_CODE: dict[int, DType] = {d.code: d for d in DType}
BY_LABEL: dict[str, DType] = {d.label: d for d in DType}
