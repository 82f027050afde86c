"""Tables of type names, and of C++ words that are ignored or rejected."""

from __future__ import annotations

from typing import Final

#: Size in bytes of each scalar type, its kind (i, u: integer; f: float; b: truth value), and its rank in conversions.
SCALARS: Final[dict[str, tuple[int, str, int]]] = {
    "b1": (1, "b", 0),
    "i8": (1, "i", 1),
    "u8": (1, "u", 1),
    "i16": (2, "i", 2),
    "u16": (2, "u", 2),
    "i32": (4, "i", 3),
    "u32": (4, "u", 3),
    "i64": (8, "i", 4),
    "u64": (8, "u", 4),
    "f16": (2, "f", 5),
    "bf16": (2, "f", 5),
    "f32": (4, "f", 6),
    "f64": (8, "f", 7),
}
#: Types with a name of one word.
TYPES: Final[dict[str, str]] = {
    "bool": "b1",
    "int8_t": "i8",
    "uint8_t": "u8",
    "int16_t": "i16",
    "uint16_t": "u16",
    "int32_t": "i32",
    "uint32_t": "u32",
    "int64_t": "i64",
    "uint64_t": "u64",
    "size_t": "u64",
    "ssize_t": "i64",
    "ptrdiff_t": "i64",
    "intptr_t": "i64",
    "uintptr_t": "u64",
    "uchar": "u8",
    "ushort": "u16",
    "uint": "u32",
    "ulong": "u64",
    "float": "f32",
    "double": "f64",
    "__half": "f16",
    "half": "f16",
    "__nv_bfloat16": "bf16",
    "nv_bfloat16": "bf16",
}
#: Types with a name of several words, sorted; `int` is left out if other words suffice.
PHRASES: Final[dict[tuple[str, ...], str]] = {
    ("char",): "i8",
    ("char", "signed"): "i8",
    ("char", "unsigned"): "u8",
    ("short",): "i16",
    ("short", "signed"): "i16",
    ("short", "unsigned"): "u16",
    ("signed",): "i32",
    ("int",): "i32",
    ("unsigned",): "u32",
    ("long",): "i64",
    ("long", "signed"): "i64",
    ("long", "unsigned"): "u64",
    ("long", "long"): "i64",
    ("long", "long", "signed"): "i64",
    ("long", "long", "unsigned"): "u64",
}
#: Element types of vectors, by CUDA's names without the number.
VECTORS: Final[dict[str, str]] = {
    "char": "i8",
    "uchar": "u8",
    "short": "i16",
    "ushort": "u16",
    "int": "i32",
    "uint": "u32",
    "longlong": "i64",
    "ulonglong": "u64",
    "float": "f32",
    "double": "f64",
}
VECTOR_TYPES: Final[dict[str, tuple[str, int]]] = {
    f"{name}{n}": (scalar, n) for name, scalar in VECTORS.items() for n in (2, 3, 4)
} | {
    "dim3": ("u32", 3),
    "half2": ("f16", 2),
    "__half2": ("f16", 2),
    "nv_bfloat162": ("bf16", 2),
    "__nv_bfloat162": ("bf16", 2),
}
_IGNORED: Final = (
    "__restrict__ __restrict restrict volatile inline __inline__ __forceinline__ __noinline__ register static typename "
    "struct"
)
#: Words before a declaration that have no effect here.
IGNORED: Final = frozenset(_IGNORED.split())
#: Words that are rejected, with the reason.
REFUSED: Final[dict[str, str]] = {
    "asm": "inline assembly cannot be checked",
    "__asm__": "inline assembly cannot be checked",
    "__asm": "inline assembly cannot be checked",
    "goto": "goto is not supported: use loops",
    "try": "kernels have no exceptions",
    "throw": "kernels have no exceptions",
    "new": "a kernel has no heap",
    "delete": "a kernel has no heap",
    "malloc": "a kernel has no heap",
    "free": "a kernel has no heap",
    "class": "classes are not supported: use a plain struct",
    "union": "unions are not supported: use __float_as_int and similar functions",
    "virtual": "classes are not supported: use a plain struct",
    "operator": "user-defined operators are not supported: use a function",
    "namespace": "namespaces are not supported",
    "enum": "enums are not supported: use constexpr int",
    "printf": "a kernel cannot print: write to a tensor",
    "__managed__": "managed memory does not exist: pass a tensor",
    "__cluster_dims__": "clusters are not supported",
    "decltype": "decltype is not supported: name the type",
    "va_list": "functions with a variable number of arguments are not supported",
    "thread_local": "every thread already has its own variables",
    "wmma": "tensor cores are not supported",
    "cooperative_groups": "cooperative groups are not supported: use __syncthreads, or another kernel to synchronize blocks",
    "<<<": "a kernel cannot launch kernels",
}
