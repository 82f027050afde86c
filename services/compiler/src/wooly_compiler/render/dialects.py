"""What differs between OpenCL C, CUDA C and HIP C, as data. The printer knows no dialect by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from wooly_wis.dtypes import DType


@dataclass(frozen=True, slots=True)
class Dialect:
    """One dialect of C. The names in braces are the fields of a template.

    Attributes:
        name: name of the dialect.
        prologue: the start of every source. It turns contraction off, so that a product and a sum are rounded one by one.
        types: C type per dtype. 16-bit floats are stored as their bits, truth values as bytes.
        truth: C type of a truth value that is not in memory.
        kernel: head of a kernel; `{name}`, `{args}`, `{threads}`.
        function: head of a function; `{result}`, `{name}`, `{args}`.
        pointer: parameter for an array; `{const}`, `{type}`, `{name}`.
        shared: declaration of memory of a work-group; `{type}`, `{name}`, `{n}`.
        group, thread: index of the work-group, and of the thread in the group.
        barrier: waits until all threads of the group arrive and see each other's writes.
        long_suffix, ulong_suffix: suffixes of 64-bit integer constants.
        bits: reads the bits of a value as another type; `{type}`, `{value}`.
        infinity, nan: constants per floating-point type.
        builtins: functions of the language, per operation and dtype; `{0}`, `{1}` …
        atomics: functions per kind and dtype; `{pointer}`, `{value}`.
    """

    name: str
    prologue: str
    types: Mapping[DType, str]
    truth: str
    kernel: str
    function: str
    pointer: str
    shared: str
    group: str
    thread: str
    barrier: str
    long_suffix: str
    ulong_suffix: str
    bits: str
    infinity: Mapping[DType, str]
    nan: Mapping[DType, str]
    builtins: Mapping[tuple[str, DType], str]
    atomics: Mapping[tuple[str, DType], str] = field(default_factory=dict)


F32, F64 = DType.F32, DType.F64
_UNARY = "sqrt exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh erf erfc floor ceil trunc"


#: Operations for which processors have instructions, with their names in C.
_INSTRUCTIONS = {
    "sqrt": "sqrt",
    "floor": "floor",
    "ceil": "ceil",
    "trunc": "trunc",
    "round": "rint",
    "abs": "fabs",
    "fma": "fma",
}


def _functions(f32: str, f64: str) -> dict[tuple[str, DType], str]:
    """Return calls by their names in C. `f32` and `f64` are the templates of a name for each type."""
    found: dict[tuple[str, DType], str] = {}
    for dtype, decorated in ((F32, f32), (F64, f64)):
        for op in _UNARY.split():
            found[op, dtype] = decorated.format(op) + "({0})"
        found["round", dtype] = decorated.format("rint") + "({0})"
        found["abs", dtype] = decorated.format("fabs") + "({0})"
        for op in ("pow", "fmod", "atan2"):
            found[op, dtype] = decorated.format(op) + "({0}, {1})"
        found["fma", dtype] = decorated.format("fma") + "({0}, {1}, {2})"
    return found


_OPENCL_TYPES = {
    DType.BOOL: "uchar",
    DType.U8: "uchar",
    DType.I8: "char",
    DType.I16: "short",
    DType.I32: "int",
    DType.I64: "long",
    DType.U16: "ushort",
    DType.U32: "uint",
    DType.U64: "ulong",
    DType.F16: "ushort",
    DType.BF16: "ushort",
    DType.F32: "float",
    DType.F64: "double",
}
_C_TYPES = _OPENCL_TYPES | {
    DType.BOOL: "unsigned char",
    DType.U8: "unsigned char",
    DType.I8: "signed char",
    DType.I64: "long long",
    DType.U16: "unsigned short",
    DType.U32: "unsigned int",
    DType.U64: "unsigned long long",
    DType.F16: "unsigned short",
    DType.BF16: "unsigned short",
}


def _opencl_atomics() -> dict[tuple[str, DType], str]:
    found: dict[tuple[str, DType], str] = {}
    for dtype in (DType.I32, DType.U32, DType.I64, DType.U64):
        prefix = "atom" if dtype.itemsize == 8 else "atomic"
        for kind in ("add", "max", "min", "and", "or", "xor"):
            found[kind, dtype] = f"{prefix}_{kind}({{pointer}}, {{value}})"
        found["exchange", dtype] = f"{prefix}_xchg({{pointer}}, {{value}})"
    return found


def _c_atomics() -> dict[tuple[str, DType], str]:
    found: dict[tuple[str, DType], str] = {}
    names = {"add": "Add", "max": "Max", "min": "Min", "and": "And", "or": "Or", "xor": "Xor", "exchange": "Exch"}
    for dtype in (DType.I32, DType.U32, DType.I64, DType.U64):
        cast = "(unsigned long long*)" if dtype is DType.I64 else ""
        for kind, name in names.items():
            # The 64-bit functions take unsigned numbers only; max and min also take signed ones.
            ordered = kind in ("max", "min")
            found[kind, dtype] = f"atomic{name}({'' if ordered else cast}{{pointer}}, {{value}})"
    for dtype in (F32, F64):
        found["add", dtype] = "atomicAdd({pointer}, {value})"
    return found


#: Clang compiles its own functions to instructions. It calls PoCL's functions once per element, which prevents vectorized loops.
_OPENCL = """#pragma OPENCL FP_CONTRACT OFF
#ifdef __clang__
#define F32(name) __builtin_##name##f
#define F64(name) __builtin_##name
#else
#define F32(name) name
#define F64(name) name
#endif
"""


def _opencl_builtins() -> dict[tuple[str, DType], str]:
    found = _functions("{}", "{}")
    for op, name in _INSTRUCTIONS.items():
        args = found[op, F32].partition("(")[2]
        found[op, F32], found[op, F64] = f"F32({name})({args}", f"F64({name})({args}"
    return found


OPENCL: Final = Dialect(
    name="opencl",
    prologue=_OPENCL,
    types=_OPENCL_TYPES,
    truth="int",
    kernel="kernel __attribute__((reqd_work_group_size({threads}, 1, 1)))\nvoid {name}({args})",
    function="static inline {result} {name}({args})",
    pointer="global {const}{type}* restrict {name}",
    shared="local {type} {name}[{n}]",
    group="get_group_id(0)",
    thread="get_local_id(0)",
    barrier="barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE)",
    long_suffix="L",
    ulong_suffix="UL",
    bits="as_{type}({value})",
    infinity={F32: "INFINITY", F64: "(double)INFINITY"},
    nan={F32: "NAN", F64: "(double)NAN"},
    builtins=_opencl_builtins(),
    atomics=_opencl_atomics(),
)

#: Reads the bits of one type as another. The languages have different names for this.
_BITS = """template <class To, class From> static __device__ __forceinline__ To wooly_bits(From from) {
  union { From from; To to; } both;
  both.from = from;
  return both.to;
}
"""

CUDA: Final = Dialect(
    name="cuda",
    prologue=_BITS,
    types=_C_TYPES,
    truth="int",
    kernel='extern "C" __global__ void __launch_bounds__({threads})\n{name}({args})',
    function="static __device__ __forceinline__ {result} {name}({args})",
    pointer="{const}{type}* __restrict__ {name}",
    shared="__shared__ {type} {name}[{n}]",
    group="blockIdx.x",
    thread="threadIdx.x",
    barrier="__syncthreads()",
    long_suffix="LL",
    ulong_suffix="ULL",
    bits="wooly_bits<{type}>({value})",
    infinity={F32: "__int_as_float(0x7f800000)", F64: "__longlong_as_double(0x7ff0000000000000LL)"},
    nan={F32: "__int_as_float(0x7fc00000)", F64: "__longlong_as_double(0x7ff8000000000000LL)"},
    builtins=_functions("{}f", "{}"),
    atomics=_c_atomics(),
)

#: Definitions in place of the toolkit's headers, from what clang knows. hipRTC's header defines the same names, hence the guards.
_HIP = """#pragma clang fp contract(off)
#ifndef __device__
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#endif
#ifndef __forceinline__
#define __forceinline__ inline __attribute__((always_inline))
#endif
static __device__ __forceinline__ void wooly_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
"""


def _ocml(op: str, n: int) -> str:
    return f"__ocml_{op}_{{}}({', '.join(f'{{{{{k}}}}}' for k in range(n))})"


def _hip_builtins() -> dict[tuple[str, DType], str]:
    found: dict[tuple[str, DType], str] = {}
    for dtype, suffix, width in ((F32, "f", "f32"), (F64, "", "f64")):
        for op in _UNARY.split():
            found[op, dtype] = _ocml(op, 1).format(width)
        for op in ("pow", "fmod", "atan2"):
            found[op, dtype] = _ocml(op, 2).format(width)
        for op, name in _INSTRUCTIONS.items():
            args = "{0}, {1}, {2}" if op == "fma" else "{0}"
            found[op, dtype] = f"__builtin_{name}{suffix}({args})"
    return found


HIP: Final = Dialect(
    name="hip",
    prologue=_HIP + _BITS,
    types=_C_TYPES,
    truth="int",
    kernel='extern "C" __global__ void __attribute__((amdgpu_flat_work_group_size({threads}, {threads})))\n{name}({args})',
    function="static __device__ __forceinline__ {result} {name}({args})",
    pointer="{const}{type}* __restrict__ {name}",
    shared="__shared__ {type} {name}[{n}]",
    group="__builtin_amdgcn_workgroup_id_x()",
    thread="__builtin_amdgcn_workitem_id_x()",
    barrier="wooly_barrier()",
    long_suffix="LL",
    ulong_suffix="ULL",
    bits="wooly_bits<{type}>({value})",
    infinity={F32: "__builtin_inff()", F64: "__builtin_inf()"},
    nan={F32: '__builtin_nanf("")', F64: '__builtin_nan("")'},
    builtins=_hip_builtins(),
    atomics={
        key: text.replace("atomicAdd(", "__atomic_fetch_add(").replace(")", ", __ATOMIC_RELAXED)")
        for key, text in _c_atomics().items()
        if key[0] == "add"
    },
)
DIALECTS: Final = {d.name: d for d in (OPENCL, CUDA, HIP)}
