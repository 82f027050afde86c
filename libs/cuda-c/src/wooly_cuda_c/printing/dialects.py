"""What differs between the three dialects of C in which checked kernels are printed, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from wooly_cuda_c.printing.builtins import MATH


@dataclass(frozen=True, slots=True)
class Dialect:
    """One dialect of C. The names in braces are the fields of a template.

    Attributes:
        name: name of the dialect.
        prologue: types and functions that the printed text uses.
        spaces: words before a pointer, per space of `Pointer`.
        function: head of a function.
        constant: head of a table of constants.
        kernel: head of a kernel; `{threads}`, `{name}`, `{args}`.
        shared: declaration of a block's memory; `{n}` units of 16 bytes.
        barrier, fence: a barrier of the block; a memory fence.
        places: indices and sizes of threads and blocks; `{0}` is the dimension, 0 to 2.
        math: call of a function of `MATH`; `{0}`: its name, `{1}`: its suffix, `{2}`: the dtype.
        instructions: functions for which processors have an instruction; `{0}`: name, `{1}`: suffix.
        atomics: text per kind of atomic; `{q}` (the address), `{v}`, `{c}` (the value to compare with), `{t}` (the type).
        native_floats: whether the device has atomic additions of floats.
        flat: whether the device runs a block's threads in turn; functions with barriers are then printed for the whole block.
        subgroups: whether threads of a warp can exchange values; the prologue then has functions for this.
    """

    name: str
    prologue: str
    spaces: Mapping[str, str]
    function: str
    constant: str
    kernel: str
    shared: str
    barrier: str
    fence: str
    places: Mapping[str, str]
    math: str
    instructions: Mapping[str, str]
    atomics: Mapping[str, str]
    native_floats: bool
    flat: bool
    subgroups: bool

    def call(self, name: str, single: bool) -> str:
        """Return the dialect's name of a function of `MATH`."""
        assert name in MATH
        suffix, width = ("f", "f32") if single else ("", "f64")
        found = self.instructions.get(name)
        return found.format(name, suffix) if found else self.math.format(name, suffix, width)


#: Functions of all dialects: arithmetic with defined results, because a compiler could remove checks if results are undefined.
_COMMON: Final = """
W_FN int w_go(W_G int *w_status) { return ((volatile W_G int *)w_status)[0] == 0; }
W_FN void w_fault(W_G int *w_status, int kind, int place) {
  if (w_status[1] == 0) { w_status[2] = place; w_status[1] = kind; }
}
W_FN w_i32 w_div_i32(w_i32 a, w_i32 b) { return b == 0 ? 0 : b == -1 ? (w_i32)(0u - (w_u32)a) : a / b; }
W_FN w_i64 w_div_i64(w_i64 a, w_i64 b) { return b == 0 ? 0 : b == -1 ? (w_i64)((w_u64)0 - (w_u64)a) : a / b; }
W_FN w_u32 w_div_u32(w_u32 a, w_u32 b) { return b == 0 ? 0 : a / b; }
W_FN w_u64 w_div_u64(w_u64 a, w_u64 b) { return b == 0 ? 0 : a / b; }
W_FN w_i32 w_rem_i32(w_i32 a, w_i32 b) { return b == 0 || b == -1 ? 0 : a % b; }
W_FN w_i64 w_rem_i64(w_i64 a, w_i64 b) { return b == 0 || b == -1 ? 0 : a % b; }
W_FN w_u32 w_rem_u32(w_u32 a, w_u32 b) { return b == 0 ? 0 : a % b; }
W_FN w_u64 w_rem_u64(w_u64 a, w_u64 b) { return b == 0 ? 0 : a % b; }
#define W_CONVERT(f, i, t, low, high, least, most) \\
  W_FN t w_##f##_to_##i(w_##f x) { return x >= (high) ? (most) : x > (low) ? (t)x : x == x ? (least) : (t)0; }
#define W_LEAST (w_i64)0x8000000000000000ul
#define W_MOST (w_i64)0x7ffffffffffffffful
W_CONVERT(f32, i32, w_i32, -2147483648.0f, 2147483648.0f, (w_i32)0x80000000u, (w_i32)0x7fffffff)
W_CONVERT(f64, i32, w_i32, -2147483649.0, 2147483648.0, (w_i32)0x80000000u, (w_i32)0x7fffffff)
W_CONVERT(f32, u32, w_u32, -1.0f, 4294967296.0f, 0u, 0xffffffffu)
W_CONVERT(f64, u32, w_u32, -1.0, 4294967296.0, 0u, 0xffffffffu)
W_CONVERT(f32, i64, w_i64, -9223372036854775808.0f, 9223372036854775808.0f, W_LEAST, W_MOST)
W_CONVERT(f64, i64, w_i64, -9223372036854775808.0, 9223372036854775808.0, W_LEAST, W_MOST)
W_CONVERT(f32, u64, w_u64, -1.0f, 18446744073709551616.0f, (w_u64)0, (w_u64)0xfffffffffffffffful)
W_CONVERT(f64, u64, w_u64, -1.0, 18446744073709551616.0, (w_u64)0, (w_u64)0xfffffffffffffffful)
W_FN w_i32 w_popc(w_u32 x) {
  x -= (x >> 1) & 0x55555555u; x = (x & 0x33333333u) + ((x >> 2) & 0x33333333u); x = (x + (x >> 4)) & 0x0f0f0f0fu;
  return (w_i32)((x * 0x01010101u) >> 24);
}
W_FN w_i32 w_popcll(w_u64 x) { return w_popc((w_u32)x) + w_popc((w_u32)(x >> 32)); }
W_FN w_i32 w_clz(w_i32 v) {
  w_u32 x = (w_u32)v; x |= x >> 1; x |= x >> 2; x |= x >> 4; x |= x >> 8; x |= x >> 16; return 32 - w_popc(x);
}
W_FN w_i32 w_clzll(w_i64 v) {
  w_u32 high = (w_u32)((w_u64)v >> 32); return high ? w_clz((w_i32)high) : 32 + w_clz((w_i32)(w_u32)v);
}
W_FN w_i32 w_ffs(w_i32 v) { w_u32 x = (w_u32)v; return x ? w_popc((x & (0u - x)) - 1u) + 1 : 0; }
W_FN w_i32 w_ffsll(w_i64 v) { w_u64 x = (w_u64)v; return x ? w_popcll((x & ((w_u64)0 - x)) - 1u) + 1 : 0; }
W_FN w_u32 w_brev(w_u32 x) {
  x = ((x >> 1) & 0x55555555u) | ((x & 0x55555555u) << 1); x = ((x >> 2) & 0x33333333u) | ((x & 0x33333333u) << 2);
  x = ((x >> 4) & 0x0f0f0f0fu) | ((x & 0x0f0f0f0fu) << 4); x = ((x >> 8) & 0x00ff00ffu) | ((x & 0x00ff00ffu) << 8);
  return (x >> 16) | (x << 16);
}
W_FN w_i32 w_mulhi(w_i32 a, w_i32 b) { return (w_i32)(((w_i64)a * (w_i64)b) >> 32); }
W_FN w_u32 w_umulhi(w_u32 a, w_u32 b) { return (w_u32)(((w_u64)a * (w_u64)b) >> 32); }
W_FN w_u32 w_sad(w_i32 a, w_i32 b, w_u32 c) { return (a < b ? (w_u32)b - (w_u32)a : (w_u32)a - (w_u32)b) + c; }
W_FN w_f32 w_saturatef(w_f32 x) { return x >= 1.0f ? 1.0f : x > 0.0f ? x : 0.0f; }
W_FN w_f32 w_fmin_f32(w_f32 a, w_f32 b) { return a < b || b != b ? a : b; }
W_FN w_f64 w_fmin_f64(w_f64 a, w_f64 b) { return a < b || b != b ? a : b; }
W_FN w_f32 w_fmax_f32(w_f32 a, w_f32 b) { return a > b || b != b ? a : b; }
W_FN w_f64 w_fmax_f64(w_f64 a, w_f64 b) { return a > b || b != b ? a : b; }
"""


def _pointers(spaces: Mapping[str, str]) -> str:
    """Return a struct per space: the start of the bounds, their size in bytes, and the offset of the pointer."""
    out = []
    for space, word in spaces.items():
        p = f"w_{space}p"
        out.append(
            f"typedef struct {{ {word} w_u8 *base; w_u64 n; w_u64 at; }} {p};\n"
            f"W_FN {p} w_mk_{space}({word} w_u8 *base, w_u64 n) {{ {p} p; p.base = base; p.n = n; p.at = 0; return p; }}\n"
            f"W_FN {p} w_null_{space}(void) {{ {p} p; p.base = 0; p.n = 0; p.at = 0; return p; }}\n"
            f"W_FN {p} w_by_{space}({p} p, w_u64 bytes) {{ p.at += bytes; return p; }}\n"
            f"W_FN w_u64 w_where_{space}({p} p) {{ return (w_u64)p.base + p.at; }}\n"
            # A part of an object that is within bounds; else an empty pointer.
            f"W_FN {p} w_in_{space}({p} p, w_u64 whole, w_u64 offset, w_u64 n) {{\n"
            f"  {p} q; q.base = p.base; q.n = 0; q.at = 0;\n"
            f"  if (p.at < p.n && p.n - p.at >= whole) {{ q.base = p.base + p.at + offset; q.n = n; }}\n"
            f"  return q;\n}}\n"
            # The remaining memory, as objects of another size.
            f"W_FN {p} w_as_{space}({p} p, w_u64 size, w_u64 align) {{\n"
            f"  {p} q; q.base = p.base; q.n = 0; q.at = 0;\n"
            f"  if (p.at < p.n && (w_u64)(p.base + p.at) % align == 0) {{\n"
            f"    q.base = p.base + p.at; q.n = p.n - p.at; q.n -= q.n % size;\n  }}\n"
            f"  return q;\n}}\n"
        )
    return "".join(out)


def _types(names: Mapping[str, str]) -> str:
    return "".join(f"typedef {text} w_{name};\n" for name, text in names.items())


_SAME: Final = {"g": "", "l": "", "p": "", "c": "const"}
_OPENCL_SPACES: Final = {"g": "global", "l": "local", "p": "private", "c": "constant"}
_OPENCL_TYPES: Final = {
    "b1": "uchar", "i8": "char", "u8": "uchar", "i16": "short", "u16": "ushort", "i32": "int", "u32": "uint", "i64": "long",
    "u64": "ulong", "f16": "ushort", "bf16": "ushort", "f32": "float", "f64": "double",
}  # fmt: skip
_C_TYPES: Final = {
    "b1": "unsigned char", "i8": "signed char", "u8": "unsigned char", "i16": "short", "u16": "unsigned short", "i32": "int",
    "u32": "unsigned int", "i64": "long long", "u64": "unsigned long long", "f16": "unsigned short", "bf16": "unsigned short",
    "f32": "float", "f64": "double",
}  # fmt: skip
#: Vectors are plain structs, so that every dialect has CUDA's layout in memory.
_VECTORS: Final = "".join(
    f"typedef struct {{ w_{t} {', '.join('xyzw'[:n])}; }} w_{t}x{n};\n"
    for t in ("i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64", "f16", "bf16", "f32", "f64")
    for n in (2, 3, 4)
)
#: 16-bit floats are stored as their bits. A double first becomes a float by round-to-odd, so that it is rounded only once.
_HALVES: Final = """
W_FN w_f32 w_f16_to_f32(w_f16 h) {
  w_u32 s = ((w_u32)h & 0x8000u) << 16, a = (w_u32)h & 0x7fffu;
  w_u32 n = w_as_u32_f32(w_as_f32_u32(a << 13) * 5192296858534827628530496329220096.0f);
  return w_as_f32_u32(s | (a >= 0x7c00u ? 0x7f800000u | (a & 0x3ffu) << 13 : n));
}
W_FN w_f16 w_f32_to_f16(w_f32 x) {
  w_u32 u = w_as_u32_f32(x), s = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  w_u32 n = ((a + 0xfffu + ((a >> 13) & 1u)) >> 13) - (112u << 10);
  w_u32 t = w_as_u32_f32(w_as_f32_u32(a < 0x38800000u ? a : 0u) + 0.5f) - 0x3f000000u;
  return (w_f16)(s | (a > 0x7f800000u ? 0x7fffu : a < 0x38800000u ? t : n > 0x7c00u ? 0x7c00u : n));
}
W_FN w_f32 w_bf16_to_f32(w_bf16 h) { return w_as_f32_u32((w_u32)h << 16); }
W_FN w_bf16 w_f32_to_bf16(w_f32 x) {
  w_u32 u = w_as_u32_f32(x);
  return (w_bf16)((u & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
W_FN w_f32 w_odd(w_f64 x) {
  w_f32 f = (w_f32)x;
  w_u32 u = w_as_u32_f32(f);
  if (x != x || (w_f64)f == x) return f;
  if ((x < 0 ? -(w_f64)f : (w_f64)f) > (x < 0 ? -x : x)) u -= 1u;
  return w_as_f32_u32(u | 1u);
}
W_FN w_f16 w_f64_to_f16(w_f64 x) { return w_f32_to_f16(w_odd(x)); }
W_FN w_bf16 w_f64_to_bf16(w_f64 x) { return w_f32_to_bf16(w_odd(x)); }
"""
OPENCL: Final = Dialect(
    name="opencl",
    prologue=(
        "#pragma OPENCL FP_CONTRACT OFF\n"
        "#pragma OPENCL EXTENSION cl_khr_fp64 : enable\n"
        "#pragma OPENCL EXTENSION cl_khr_int64_base_atomics : enable\n"
        "#pragma OPENCL EXTENSION cl_khr_int64_extended_atomics : enable\n"
        + _types(_OPENCL_TYPES)
        + _VECTORS
        + "#define W_FN static inline __attribute__((always_inline))\n#define W_G global\n"
        + _COMMON
        + _pointers(_OPENCL_SPACES)
        + """
#define w_as_u32_f32(x) as_uint(x)
#define w_as_f32_u32(x) as_float(x)
#define w_as_u64_f64(x) as_ulong(x)
#define w_as_f64_u64(x) as_double(x)
#define w_inf_f32 INFINITY
#define w_nan_f32 NAN
#define w_inf_f64 ((double)INFINITY)
#define w_nan_f64 ((double)NAN)
W_FN float __attribute__((overloadable)) w_tanh(float x) { return fabs(x) > 9.0109f ? copysign(1.0f, x) : tanh(x); }
W_FN double __attribute__((overloadable)) w_tanh(double x) { return tanh(x); }
"""
        + _HALVES
    ),
    spaces=_OPENCL_SPACES,
    function="static inline __attribute__((always_inline))",
    constant="constant",
    kernel="kernel __attribute__((reqd_work_group_size({x}, {y}, {z})))\nvoid {name}({args})",
    shared="local ulong2 w_block[{n}]; local w_u8 *w_shared = (local w_u8 *)w_block;",
    barrier="barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE)",
    fence="mem_fence(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE)",
    places={
        "tid": "((w_u32)get_local_id({0}))",
        "bid": "((w_u32)get_group_id({0}))",
        "bdim": "((w_u32)get_local_size({0}))",
        "gdim": "((w_u32)get_num_groups({0}))",
    },
    math="{0}",
    # PoCL's tanh of a float never gives 1, so that 1 - tanh(x) * tanh(x) is not 0 for large x.
    instructions=dict.fromkeys(("sqrt", "floor", "ceil", "trunc", "rint", "fabs", "fma"), "__builtin_{0}{1}")
    | {"tanh": "w_tanh"},
    atomics={
        **{k: f"atomic_{k}({{q}}, {{v}})" for k in ("add", "sub", "min", "max", "and", "or", "xor")},
        **{k + "64": f"atom_{k}({{q}}, {{v}})" for k in ("add", "min", "max", "and", "or", "xor")},
        "exchange": "atomic_xchg({q}, {v})",
        "exchange64": "atom_xchg({q}, {v})",
        "compare": "atomic_cmpxchg({q}, {c}, {v})",
        "compare64": "atom_cmpxchg({q}, {c}, {v})",
    },
    native_floats=False,
    flat=True,
    subgroups=False,
)

_CUDA_BITS: Final = """
#define w_as_u32_f32(x) __float_as_uint(x)
#define w_as_f32_u32(x) __uint_as_float(x)
#define w_as_u64_f64(x) ((w_u64)__double_as_longlong(x))
#define w_as_f64_u64(x) __longlong_as_double((long long)(x))
#define w_inf_f32 __int_as_float(0x7f800000)
#define w_nan_f32 __int_as_float(0x7fc00000)
#define w_inf_f64 __longlong_as_double(0x7ff0000000000000LL)
#define w_nan_f64 __longlong_as_double(0x7ff8000000000000LL)
#define w_shuffle32(mask, v, lane) __shfl_sync(mask, v, lane)
#define w_ballot(mask, p) __ballot_sync(mask, p)
#define w_count(p) __syncthreads_count(p)
#define w_every(p) __syncthreads_and(p)
#define w_some(p) __syncthreads_or(p)
#define w_lane() ((w_u32)(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) & 31u)
"""
_C_ATOMICS: Final = {
    **{
        k: f"atomic{n}({{q}}, {{v}})"
        for k, n in {
            "add": "Add",
            "sub": "Sub",
            "min": "Min",
            "max": "Max",
            "and": "And",
            "or": "Or",
            "xor": "Xor",
        }.items()
    },
    "exchange": "atomicExch({q}, {v})",
    "compare": "atomicCAS({q}, {c}, {v})",
}
CUDA: Final = Dialect(
    name="cuda",
    prologue=_types(_C_TYPES)
    + _VECTORS
    + "#define W_FN static __device__ __forceinline__\n#define W_G\n"
    + _CUDA_BITS
    + _COMMON
    + _HALVES
    + _pointers(_SAME),
    spaces=_SAME,
    function="static __device__ __forceinline__",
    constant="static __device__ const",
    kernel='extern "C" __global__ void __launch_bounds__({threads})\n{name}({args})',
    shared="__shared__ ulonglong2 w_block[{n}]; w_u8 *w_shared = (w_u8 *)w_block;",
    barrier="__syncthreads()",
    fence="__threadfence()",
    places={
        "tid": "threadIdx.{1}",
        "bid": "blockIdx.{1}",
        "bdim": "blockDim.{1}",
        "gdim": "gridDim.{1}",
    },
    math="{0}{1}",
    instructions={},
    atomics=_C_ATOMICS,
    native_floats=True,
    flat=False,
    subgroups=True,
)

_HIP_BITS: Final = """
#pragma clang fp contract(off)
#ifndef __device__
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#endif
#ifndef __forceinline__
#define __forceinline__ inline __attribute__((always_inline))
#endif
"""
_HIP_WORDS: Final = """
template <class To, class From> static __device__ __forceinline__ To w_bits(From from) { return __builtin_bit_cast(To, from); }
#define w_as_u32_f32(x) w_bits<w_u32>((w_f32)(x))
#define w_as_f32_u32(x) w_bits<w_f32>((w_u32)(x))
#define w_as_u64_f64(x) w_bits<w_u64>((w_f64)(x))
#define w_as_f64_u64(x) w_bits<w_f64>((w_u64)(x))
#define w_inf_f32 __builtin_inff()
#define w_nan_f32 __builtin_nanf("")
#define w_inf_f64 __builtin_inf()
#define w_nan_f64 __builtin_nan("")
static __device__ __forceinline__ void w_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "workgroup");
}
static __device__ __forceinline__ w_u32 w_bdim(int k) {
  // hsa_kernel_dispatch_packet_t: three 16-bit sizes of a work-group from byte 4, three 32-bit sizes of the grid from byte 12
  return ((const __attribute__((address_space(4))) unsigned short *)__builtin_amdgcn_dispatch_ptr())[2 + k];
}
static __device__ __forceinline__ w_u32 w_gdim(int k) {
  return ((const __attribute__((address_space(4))) unsigned int *)__builtin_amdgcn_dispatch_ptr())[3 + k] / w_bdim(k);
}
#define w_lane() \\
  ((w_u32)(__builtin_amdgcn_workitem_id_x() + w_bdim(0) * (__builtin_amdgcn_workitem_id_y() + \\
   w_bdim(1) * __builtin_amdgcn_workitem_id_z())) & 31u)
static __device__ __forceinline__ w_u32 w_wave() { return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0)); }
static __device__ __forceinline__ w_u32 w_shuffle32(w_u32, w_u32 v, w_u32 lane) {
  return (w_u32)__builtin_amdgcn_ds_bpermute((int)(((w_wave() & ~31u) | (lane & 31u)) * 4u), (int)v);
}
static __device__ __forceinline__ w_u32 w_ballot(w_u32 mask, int p) {
  return (w_u32)(__builtin_amdgcn_ballot_w64(p != 0) >> (w_wave() & 32u)) & mask;
}
static __device__ w_i32 w_count(int p) {
  static __shared__ w_i32 yes;
  yes = 0;
  w_barrier();
  if (p) __hip_atomic_fetch_add(&yes, 1, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
  w_barrier();
  w_i32 found = yes;
  w_barrier();
  return found;
}
#define w_some(p) (w_count(p) != 0 ? 1 : 0)
#define w_every(p) (w_count((p) ? 0 : 1) == 0 ? 1 : 0)
"""
_SCOPE: Final = "__ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT"
HIP: Final = Dialect(
    name="hip",
    prologue=_HIP_BITS
    + _types(_C_TYPES)
    + _VECTORS
    + "#define W_FN static __device__ __forceinline__\n#define W_G\n"
    + _HIP_WORDS
    + "".join(
        f'extern "C" __device__ {t} __ocml_{name}_{w}({", ".join([t] * n)});\n'
        for name, n in MATH.items()
        for t, w in (("float", "f32"), ("double", "f64"))
    )
    + _COMMON
    + _HALVES
    + _pointers(_SAME),
    spaces=_SAME,
    function="static __device__ __forceinline__",
    constant="static __device__ const",
    kernel='extern "C" __global__ void __attribute__((amdgpu_flat_work_group_size({threads}, {threads})))\n{name}({args})',
    shared="__shared__ __attribute__((aligned(16))) w_u8 w_block[{n} * 16]; w_u8 *w_shared = w_block;",
    barrier="w_barrier()",
    fence='__builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent")',
    places={
        "tid": "((w_u32)__builtin_amdgcn_workitem_id_{1}())",
        "bid": "((w_u32)__builtin_amdgcn_workgroup_id_{1}())",
        "bdim": "w_bdim({0})",
        "gdim": "w_gdim({0})",
    },
    math="__ocml_{0}_{2}",
    instructions=dict.fromkeys(
        ("sqrt", "floor", "ceil", "trunc", "rint", "fabs", "fma", "copysign"), "__builtin_{0}{1}"
    ),
    atomics={
        **{k: f"__hip_atomic_fetch_{k}({{q}}, {{v}}, {_SCOPE})" for k in ("add", "min", "max", "and", "or", "xor")},
        "sub": f"__hip_atomic_fetch_add({{q}}, ({{t}})0 - {{v}}, {_SCOPE})",
        "exchange": f"__hip_atomic_exchange({{q}}, {{v}}, {_SCOPE})",
    },
    native_floats=True,
    flat=False,
    subgroups=True,
)
DIALECTS: Final = {d.name: d for d in (OPENCL, CUDA, HIP)}
