"""The built-in functions and constants, one table each. The reference page is generated from these tables."""

from __future__ import annotations

from typing import Final

_OF_ONE: Final = (
    "sqrt rsqrt cbrt exp exp2 exp10 expm1 log log2 log10 log1p sin cos tan sinpi cospi asin acos atan sinh cosh tanh "
    "asinh acosh atanh erf erfc tgamma lgamma floor ceil trunc round rint fabs"
)
#: Functions of floating-point numbers, without the suffix `f` of the float version, and their number of arguments.
MATH: Final[dict[str, int]] = (
    dict.fromkeys(
        _OF_ONE.split(),
        1,
    )
    | dict.fromkeys(["pow", "fmod", "atan2", "hypot", "copysign", "fmin", "fmax", "fdim", "remainder"], 2)
    | {"fma": 3}
)
#: Other names of these functions. CUDA's fast versions are as accurate as the others here.
ALIASES: Final[dict[str, str]] = {
    "nearbyint": "rint", "nearbyintf": "rintf", "__expf": "expf", "__exp10f": "exp10f", "__logf": "logf", "__log2f": "log2f",
    "__log10f": "log10f", "__sinf": "sinf", "__cosf": "cosf", "__tanf": "tanf", "__powf": "powf", "__fsqrt_rn": "sqrtf",
    "__frsqrt_rn": "rsqrtf", "__fmaf_rn": "fmaf", "__fma_rn": "fma", "__dsqrt_rn": "sqrt",
}  # fmt: skip
#: Functions that are operators.
OPERATORS: Final[dict[str, tuple[str, str]]] = {
    f"__{kind}{name}_rn": (op, scalar)
    for kind, scalar in (("f", "f32"), ("d", "f64"))
    for name, op in (("add", "+"), ("sub", "-"), ("mul", "*"), ("div", "/"))
} | {"__fdividef": ("/", "f32"), "__mul24": ("*", "i32"), "__umul24": ("*", "u32")}
#: Functions with fixed types: argument types, result type.
PLAIN: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    "__popc": (("u32",), "i32"), "__popcll": (("u64",), "i32"), "__clz": (("i32",), "i32"), "__clzll": (("i64",), "i32"),
    "__ffs": (("i32",), "i32"), "__ffsll": (("i64",), "i32"), "__brev": (("u32",), "u32"), "__mulhi": (("i32", "i32"), "i32"),
    "__umulhi": (("u32", "u32"), "u32"), "__float_as_int": (("f32",), "i32"), "__int_as_float": (("i32",), "f32"),
    "__float_as_uint": (("f32",), "u32"), "__uint_as_float": (("u32",), "f32"), "__double_as_longlong": (("f64",), "i64"),
    "__longlong_as_double": (("i64",), "f64"), "__float2int_rn": (("f32",), "i32"), "__float2int_rz": (("f32",), "i32"),
    "__float2int_rd": (("f32",), "i32"), "__float2int_ru": (("f32",), "i32"), "__int2float_rn": (("i32",), "f32"),
    "__uint2float_rn": (("u32",), "f32"), "__double2float_rn": (("f64",), "f32"), "__saturatef": (("f32",), "f32"),
    "__frcp_rn": (("f32",), "f32"), "lrintf": (("f32",), "i64"), "__sad": (("i32", "i32", "u32"), "u32"),
}  # fmt: skip
#: Functions of 16-bit floats: argument types, result type.
HALVES: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    "__half2float": (("f16",), "f32"), "__float2half": (("f32",), "f16"), "__float2half_rn": (("f32",), "f16"),
    "__double2half": (("f64",), "f16"), "__int2half_rn": (("i32",), "f16"), "__bfloat162float": (("bf16",), "f32"),
    "__float2bfloat16": (("f32",), "bf16"), "__float2bfloat16_rn": (("f32",), "bf16"), "__double2bfloat16": (("f64",), "bf16"),
    "__int2bfloat16_rn": (("i32",), "bf16"),
}  # fmt: skip
HALF_BITS: Final[dict[str, tuple[str, str]]] = {
    "__half_as_ushort": ("f16", "u16"), "__half_as_short": ("f16", "i16"), "__ushort_as_half": ("u16", "f16"),
    "__short_as_half": ("i16", "f16"), "__bfloat16_as_ushort": ("bf16", "u16"), "__bfloat16_as_short": ("bf16", "i16"),
    "__ushort_as_bfloat16": ("u16", "bf16"), "__short_as_bfloat16": ("i16", "bf16"),
}  # fmt: skip
HALF_OPERATORS: Final[dict[str, str]] = {
    "__hadd": "+", "__hsub": "-", "__hmul": "*", "__hdiv": "/", "__hadd_rn": "+", "__hsub_rn": "-", "__hmul_rn": "*",
    "__heq": "==", "__hne": "!=", "__hlt": "<", "__hle": "<=", "__hgt": ">", "__hge": ">=",
}  # fmt: skip
HALF_MORE: Final = ("__hfma", "__hneg", "__hmin", "__hmax", "__hisnan")
#: Functions of one 16-bit float, by the names of the float functions.
HALF_MATH: Final[dict[str, str]] = {
    f"h{n}": n
    for n in "sqrt rsqrt exp exp2 exp10 log log2 log10 sin cos tanh floor ceil rint trunc".split()  # noqa: SIM905
} | {"__habs": "fabs"}
#: Tests of a floating-point number.
TESTS: Final = ("isnan", "isinf", "isfinite", "signbit")
#: Functions of two numbers of any type, computed in their common type.
EXTREMES: Final = {"min": "min", "max": "max", "umin": "min", "umax": "max"}
#: Loads with a cache hint, which is ignored.
LOADS: Final = ("__ldg", "__ldca", "__ldcg", "__ldcs")
#: Atomic operations, with the types that they support.
ATOMICS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "atomicAdd": ("add", ("i32", "u32", "i64", "u64", "f32", "f64")),
    "atomicSub": ("sub", ("i32", "u32")),
    "atomicExch": ("exchange", ("i32", "u32", "i64", "u64", "f32")),
    "atomicMin": ("min", ("i32", "u32", "i64", "u64")),
    "atomicMax": ("max", ("i32", "u32", "i64", "u64")),
    "atomicAnd": ("and", ("i32", "u32", "i64", "u64")),
    "atomicOr": ("or", ("i32", "u32", "i64", "u64")),
    "atomicXor": ("xor", ("i32", "u32", "i64", "u64")),
    "atomicInc": ("increase", ("u32",)),
    "atomicDec": ("decrease", ("u32",)),
    "atomicCAS": ("compare", ("i32", "u32", "i64", "u64")),
}
#: Barriers of a block: all threads or no thread must reach them.
BARRIERS: Final = ("__syncthreads", "__syncwarp", "__syncthreads_count", "__syncthreads_and", "__syncthreads_or")
FENCES: Final = ("__threadfence", "__threadfence_block", "__threadfence_system")
#: Exchanges between the 32 threads of a warp. Without subgroups they use shared memory and act as a barrier.
WARP: Final = (
    "__shfl_sync", "__shfl_up_sync", "__shfl_down_sync", "__shfl_xor_sync", "__ballot_sync", "__any_sync", "__all_sync",
    "__reduce_add_sync", "__reduce_min_sync", "__reduce_max_sync", "__reduce_and_sync", "__reduce_or_sync", "__reduce_xor_sync",
    "__match_any_sync",
)  # fmt: skip
SHUFFLED: Final = ("i32", "u32", "i64", "u64", "f32", "f64")
#: Known functions that are not supported, and what to use instead.
UNSUPPORTED: Final[dict[str, str]] = {
    "__activemask": "write the mask: 0xffffffff",
    "__match_all_sync": "compare values through shared memory",
    "__nanosleep": "kernels cannot wait",
    "clock": "kernels have no clock",
    "clock64": "kernels have no clock",
    "sincosf": "call sinf and cosf",
    "sincos": "call sin and cos",
    "memcpy": "copy in a loop",
    "memset": "write in a loop",
    "__shfl": "use __shfl_sync with a mask of threads",
    "__shfl_down": "use __shfl_down_sync with a mask of threads",
    "__shfl_up": "use __shfl_up_sync with a mask of threads",
    "__shfl_xor": "use __shfl_xor_sync with a mask of threads",
    "__ballot": "use __ballot_sync with a mask of threads",
    "__any": "use __any_sync with a mask of threads",
    "__all": "use __all_sync with a mask of threads",
}
#: Indices and sizes of threads and blocks. The first differs between threads of a block, the others do not.
PLACES: Final = {"threadIdx": "tid", "blockIdx": "bid", "blockDim": "bdim", "gridDim": "gdim"}
#: Constants by name: type, value.
NUMBERS: Final[dict[str, tuple[str, str]]] = {
    "INFINITY": ("f32", "inf"), "CUDART_INF_F": ("f32", "inf"), "CUDART_INF": ("f64", "inf"), "HUGE_VALF": ("f32", "inf"),
    "NAN": ("f32", "nan"), "CUDART_NAN_F": ("f32", "nan"), "CUDART_NAN": ("f64", "nan"),
    "FLT_MAX": ("f32", "3.402823466e+38"), "FLT_MIN": ("f32", "1.175494351e-38"), "FLT_EPSILON": ("f32", "1.192092896e-07"),
    "DBL_MAX": ("f64", "1.7976931348623157e+308"), "DBL_EPSILON": ("f64", "2.220446049250313e-16"),
    "M_PI": ("f64", "3.141592653589793"), "M_E": ("f64", "2.718281828459045"), "M_SQRT2": ("f64", "1.4142135623730951"),
    "M_SQRT1_2": ("f64", "0.7071067811865476"), "M_LOG2E": ("f64", "1.4426950408889634"), "M_LN2": ("f64", "0.6931471805599453"),
    "CUDART_PI_F": ("f32", "3.141592654"), "INT_MAX": ("i32", "2147483647"), "INT_MIN": ("i32", "-2147483648"),
    "UINT_MAX": ("u32", "4294967295"), "LLONG_MAX": ("i64", "9223372036854775807"), "LLONG_MIN": ("i64", "-9223372036854775808"),
    "ULLONG_MAX": ("u64", "18446744073709551615"), "INT32_MAX": ("i32", "2147483647"), "UINT32_MAX": ("u32", "4294967295"),
    "warpSize": ("i32", "32"), "CHAR_BIT": ("i32", "8"),
}  # fmt: skip
