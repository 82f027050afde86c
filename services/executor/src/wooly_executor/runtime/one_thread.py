"""Chooses the operators that a CPU computes on the device's thread alone.

The library divides an operator among a team of threads. Between two operators these threads sleep, and to wake them takes 50 to
100 us: as long as one thread needs for 100,000 to 300,000 numbers. LayerNorm and softmax wake the team for a few rows.

One thread computes only what has the same bits with any number of threads:

- `EXACT`: each number is rounded as IEEE 754 says, or the library's vector functions compute it, or it is a sum along dimensions
  that one thread adds.
- `ALIGNED`: the library computes the numbers at the end of each thread's part with another function than those before. Only
  parts whose sizes are multiples of a vector have no such end.
- `ROWS`: one thread computes a row.

MKL has a number of threads of its own, which this choice does not change: see `invocation.settings_of`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Final

import torch
from wooly_wis.assembly import row_major
from wooly_wis.dtypes import DType
from wooly_wis.program import Form, ParamRef, Role, View

from wooly_executor.bounds.elementwise import ELEMENTWISE, PLAIN, base_of
from wooly_executor.bounds.work import product
from wooly_executor.runtime.calls import LibraryCall, readings
from wooly_executor.runtime.frame import Frame
from wooly_executor.runtime.products import SplitProduct
from wooly_executor.runtime.torch_private import limit_threads, schema_of, threads_of_this_thread


class Threads(enum.Enum):
    """How many threads an operator of the library should use: any number, if it never wakes the team; one; or all."""

    ANY = enum.auto()
    ONE = enum.auto()
    ALL = enum.auto()


#: The library divides an operator from so many elements on, unless `_GRAINS` says otherwise (`at::internal::GRAIN_SIZE`).
GRAIN: Final = 1 << 15
#: Maximum number of elements for one thread: of operators that only move or add numbers, and of others.
MOST_PLAIN: Final = 1 << 19
MOST: Final = 1 << 17
#: The size of a part is a multiple of this in `ALIGNED`: two vectors of 512 bits with numbers of 16 bits.
VECTORS: Final = 64

_HALF = (DType.F16, DType.BF16)
_FLOAT = (*_HALF, DType.F32, DType.F64)

_EXACT = """
    abs add addcdiv addcmul bitwise_and bitwise_not bitwise_or bitwise_xor cat ceil clamp clamp_max clamp_min clone copy cos div
    embedding eq erf erfc exp expm1 fill flip floor ge gt hardtanh index index_select le leaky_relu lerp log log10 log1p log2
    logical_and logical_not logical_or lt masked_fill maximum minimum mse_loss_backward mul native_dropout_backward ne neg
    reciprocal relu roll round rsub sigmoid_backward sign sin sqrt sub tan tanh tanh_backward threshold threshold_backward tril
    triu trunc where zero
"""
EXACT: Final = frozenset(_EXACT.split())
#: Members of `EXACT` that multiply by `alpha` first. With 16 bits, the library rounds this product only in vectors.
_WITH_ALPHA = frozenset(("add", "sub", "rsub"))
#: Members of `EXACT` that read as many elements of their first operand as the result has.
_PICKS = frozenset(("embedding", "index", "index_select"))
#: Sums and the like: one thread computes a number of the result. A single number is computed by all.
ALONG: Final = frozenset(("amax", "amin", "argmax", "argmin", "max", "mean", "min", "sum"))
ALIGNED: Final = frozenset(
    ("elu", "gelu", "gelu_backward", "mish", "pow", "rsqrt", "sigmoid", "silu", "silu_backward", "softplus")
)
#: Operators on rows, with the name of their argument that says which dimension is a row; "": the last ones are.
ROWS: Final = {
    "native_layer_norm": "",
    "_softmax": "dim",
    "_log_softmax": "dim",
    "_softmax_backward_data": "dim",
    "_log_softmax_backward_data": "dim",
}
#: Functions that MKL computes for float32 and float64. It wakes its team for 100 numbers, and the bits are those of one thread.
_VECTOR_MATH = "acos asin atan cos erf erfc erfinv exp log log10 log2 sin sqrt tan tanh trunc"
VECTOR_MATH: Final = frozenset(_VECTOR_MATH.split())
#: Maximum number of elements for which MKL wakes no thread.
VECTOR_MATH_GRAIN: Final = 64
#: Number of elements from which on the library divides an operator, where it is not `GRAIN`: measured.
_GRAINS: Final = (
    dict.fromkeys((*VECTOR_MATH, "ceil", "expm1", "floor", "index", "log1p", "round"), 1 << 11)
    | dict.fromkeys(("gelu", "gelu_backward", "max", "min", "tril", "triu"), 0)
    | dict.fromkeys(ROWS, 0)
)
_TABLES: Final = EXACT | ALONG | ALIGNED | ROWS.keys()
#: Products that MKL computes if their dtype is one of these.
_PRODUCTS = frozenset(("addmm", "addmv", "baddbmm", "bmm", "linear", "mm", "mv"))
_OF_MKL = (DType.F32, DType.F64)


def threads_for(library: LibraryCall, form: Form, threads: int) -> Threads:
    """Return how many of a CPU's `threads` an operator should use."""
    if threads == 1:
        return Threads.ANY
    if library.op.namespace != "aten" or not (library.instead is None or isinstance(library.instead, SplitProduct)):
        return Threads.ALL
    views = [o.view for o in form.operands]
    known = [v for v in views if v is not None]
    if len(known) != len(views) or not known or readings(form) or any(v.dtype.kind == "complex" for v in known):
        return Threads.ALL
    name, _ = base_of(library.op.overloadpacket.__name__)
    if name in _PRODUCTS:
        return Threads.ANY if all(v.dtype in _OF_MKL for v in known) else Threads.ALL
    if name not in _TABLES:
        return Threads.ALL
    made = [o.view.numel for o in form.operands if o.view is not None and o.role is Role.OUT]
    most = max(made if made and name in _PICKS else [v.numel for v in known])
    if name in ALONG and 1 in made:
        return Threads.ANY if most < GRAIN else Threads.ALL
    if most < _GRAINS.get(name, GRAIN):
        return Threads.ANY
    if name in ROWS:
        return _by_rows(name, library, known, most)
    if name in ALIGNED:
        return _aligned(name, known, most, threads)
    if name in _WITH_ALPHA and any(v.dtype in _HALF for v in known) and _alpha(library) != 1:
        return Threads.ALL
    plain = name in ALONG or ELEMENTWISE.get(name, PLAIN) == PLAIN
    return Threads.ONE if most <= (MOST_PLAIN if plain else MOST) else Threads.ALL


def _by_rows(name: str, library: LibraryCall, views: list[View], most: int) -> Threads:
    if most > MOST:
        return Threads.ALL
    dim = ROWS[name]
    if not dim:
        normalized = _argument(library, "normalized_shape")
        one_row = isinstance(normalized, tuple) and views[0].numel == product(normalized)
        return Threads.ANY if one_row else Threads.ONE
    rows = max(views, key=lambda v: v.numel)
    along = _argument(library, dim)
    # The gradient of softmax adds the numbers of a row in vectors, and those left over in another order.
    last = along in (-1, len(rows.sizes) - 1) and (name != "_softmax_backward_data" or rows.sizes[-1] % VECTORS == 0)
    if not last:
        return Threads.ALL
    return Threads.ANY if rows.sizes[-1:] == (most,) or most <= 1 else Threads.ONE


def _aligned(name: str, views: list[View], most: int, threads: int) -> Threads:
    # The library divides GELU into as many parts as there are threads.
    parts = threads if name in _GRAINS else min(threads, -(-most // GRAIN))
    fits = most <= MOST and -(-most // parts) % VECTORS == 0
    alike = all(v.numel == most and v.strides == row_major(v.sizes) and v.dtype in _FLOAT for v in views)
    return Threads.ONE if fits and alike else Threads.ALL


def _argument(library: LibraryCall, name: str) -> Any:
    """The value of an argument, or None if it is not given."""
    for argument, value in zip(schema_of(library.op).arguments, library.args, strict=False):
        if argument.name == name:
            return value
    return dict(library.kwargs).get(name)


def _alpha(library: LibraryCall) -> Any:
    alpha = _argument(library, "alpha")
    return 1 if alpha is None else None if isinstance(alpha, ParamRef) else alpha


def on_one_thread(call: Callable[[Frame], Any]) -> Callable[[Frame], Any]:
    """Return `call` without the library's team of threads."""
    limit, threads = limit_threads, threads_of_this_thread
    assert limit is not None and threads is not None

    def run(f: Frame) -> Any:
        before = threads()
        limit(1)
        try:
            return call(f)
        finally:
            limit(before)

    return run


def choice(library: LibraryCall, form: Form) -> Threads:
    """Return how many threads an operator should use on this host."""
    return Threads.ANY if limit_threads is None else threads_for(library, form, torch.get_num_threads())


def choice_of_copy(numel: int) -> Threads:
    """Return how many threads a copy of so many elements, or a fill, should use on this host."""
    if limit_threads is None or torch.get_num_threads() == 1 or numel < GRAIN:
        return Threads.ANY
    return Threads.ONE if numel <= MOST_PLAIN else Threads.ALL
