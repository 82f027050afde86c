"""Names of types, and the words of C++ that are understood to be something else than what they look like: one table each."""

from __future__ import annotations

from typing import Final

#: A scalar's size in bytes, whether it is an integer (i, u), a float (f) or a truth value (b), and its rank.
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
#: Types by one name.
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
#: Types of several words, sorted; `int` is left out where another word says enough.
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
#: Vectors: CUDA's names without the number.
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
_SILENT: Final = (
    "__restrict__ __restrict restrict volatile inline __inline__ __forceinline__ __noinline__ register static typename "
    "struct"
)
#: Words before a declaration that change nothing here.
SILENT: Final = frozenset(_SILENT.split())
#: What is refused by its word, and why.
REFUSED: Final[dict[str, str]] = {
    "asm": "inline assembly cannot be checked",
    "__asm__": "inline assembly cannot be checked",
    "__asm": "inline assembly cannot be checked",
    "goto": "goto is not understood: use loops",
    "try": "there are no exceptions in a kernel",
    "throw": "there are no exceptions in a kernel",
    "new": "a kernel has no heap",
    "delete": "a kernel has no heap",
    "malloc": "a kernel has no heap",
    "free": "a kernel has no heap",
    "class": "classes are not understood: use a plain struct",
    "union": "unions are not understood: use __float_as_int and kin for bits",
    "virtual": "classes are not understood: use a plain struct",
    "operator": "operators of one's own are not understood: use a function",
    "namespace": "namespaces are not understood",
    "enum": "enums are not understood: use constexpr int",
    "printf": "a kernel cannot print: write to a tensor",
    "__managed__": "managed memory is not there: pass a tensor",
    "__cluster_dims__": "clusters are not understood",
    "decltype": "decltype is not understood: name the type",
    "va_list": "functions with any number of arguments are not understood",
    "thread_local": "threads have their own variables as it is",
    "wmma": "tensor cores are not understood",
    "cooperative_groups": "cooperative groups are not understood: use __syncthreads; for all blocks, launch another kernel",
    "<<<": "a kernel cannot launch kernels",
}
