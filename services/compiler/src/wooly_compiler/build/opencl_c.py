"""Declarations of the functions of OpenCL C that Wooly's texts call, for PoCL.

PoCL declares its functions in a header of a megabyte, which its clang parses again for each text. That takes 0.1 s, which is most
of the time of a build. The header has a guard, so a text that defines it and begins with these declarations is built without it.
The declarations are those of the header, with the same attributes, so the code is the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

#: Options with which PoCL does not read its own header.
WITHOUT_HEADER: Final = ["-D_OPENCL_H_"]

_UNARY: Final = (
    "acos acosh asin asinh atan atanh cbrt ceil cos cosh cospi erf erfc exp exp10 exp2 expm1 fabs floor lgamma log log10 log1p "
    "log2 rint round rsqrt sin sinh sinpi sqrt tan tanh tgamma trunc"
)
_BINARY: Final = "atan2 copysign fdim fmax fmin fmod hypot nextafter pow remainder"
_PLACES: Final = "get_global_id get_global_size get_group_id get_local_id get_local_size get_num_groups"
_ATOMICS: Final = "add sub xchg min max and or xor"


def _of_floats() -> Iterable[str]:
    for t in ("float", "double"):
        for n, names in ((1, _UNARY), (2, _BINARY), (3, "fma")):
            yield from (f"{t} W_OVERLOADED W_CONST {name}({', '.join([t] * n)});" for name in names.split())
    yield "int W_OVERLOADED W_CONST signbit(float);"
    yield "int W_OVERLOADED W_CONST signbit(double);"


def _of_integers() -> Iterable[str]:
    for t in ("int", "uint", "long", "ulong"):
        yield from (f"{t} W_OVERLOADED W_CONST {name}({t}, {t});" for name in ("max", "min", "mul_hi"))
        prefix = "atom" if t in ("long", "ulong") else "atomic"
        for space in ("__global", "__local"):
            pointer = f"volatile {space} {t}*"
            yield from (f"{t} W_OVERLOADED {prefix}_{name}({pointer}, {t});" for name in _ATOMICS.split())
            yield f"{t} W_OVERLOADED {prefix}_cmpxchg({pointer}, {t}, {t});"


#: The start of a text.
DECLARATIONS: Final = "\n".join(
    [
        "#define W_OVERLOADED __attribute__((overloadable))",
        "#define W_CONST __attribute__((const))",
        "#define W_CONVERGENT __attribute__((convergent))",
        *[f"size_t W_OVERLOADED W_CONST {name}(uint);" for name in _PLACES.split()],
        "void W_OVERLOADED W_CONVERGENT barrier(cl_mem_fence_flags);",
        "void W_OVERLOADED mem_fence(cl_mem_fence_flags);",
        *_of_floats(),
        *_of_integers(),
        "#line 1\n",
    ]
)
