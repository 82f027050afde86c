"""Prevents leaks between sessions through uninitialised memory: which operators need zeroed memory, and how they get it.

The library allocates results and workspaces from the process's heap, which may contain bytes of other sessions. An operator that
leaves a part of a result unwritten would show these bytes. Therefore the library's allocator zeroes memory for every operator,
except for the operators below, which write every element of every result. `make hostile` runs all operators with several patterns
in new memory and reports each result that depends on the pattern ([ADR
45](../../../../../docs/adr/0045-zero-the-memory-that-an-operator-may-leave-unwritten.md)).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, TypeVar

import torch
from wooly_wis.dtypes import DType
from wooly_wis.externs import allowed
from wooly_wis.optable import TABLE
from wooly_wis.program import Form

from wooly_executor.runtime.torch_private import OpOverload, zero_fill

_T = TypeVar("_T")
_R = TypeVar("_R")

#: Operators whose kernels write every element of every result, whatever their arguments. Operators of the op table and those that
#: the library tags as element-wise are added to them. Names stand for all overloads. An operator is in this table if zeroing
#: would cost a noticeable share of its time, its kernel visits each element of the result whatever the arguments, and `make
#: hostile` finds no dependence on the memory's content. New operators of a new torch are not in the table, so they are zeroed.
WRITE_ALL: Final = frozenset(
    (
        *(
            "arange",
            "copy",
            "fill",
            "flip",
            "index",
            "linspace",
            "narrow_copy",
            "native_channel_shuffle",
            "pixel_shuffle",
        ),
        *("pixel_unshuffle", "roll", "_stack", "unfold_backward", "zero"),
        *("index_add", "index_copy", "index_fill", "_index_put_impl", "masked_scatter", "scatter", "scatter_add"),
        *("aminmax", "count_nonzero", "cumprod", "cumsum", "linalg_vector_norm", "nansum", "norm", "prod", "std"),
        *("std_mean", "trace", "var", "var_mean"),
        *("addbmm", "addmv", "addr", "convolution", "convolution_backward", "dot", "vdot"),
        *("_native_batch_norm_legit", "batch_norm_backward", "native_batch_norm", "native_batch_norm_backward"),
        *("embedding_dense_backward", "native_group_norm", "native_layer_norm_backward"),
        *("_adaptive_avg_pool2d", "adaptive_avg_pool2d", "avg_pool2d"),
        *("max_pool2d_with_indices", "max_pool2d_with_indices_backward"),
        *("glu", "glu_backward", "mse_loss", "mse_loss_backward", "native_dropout", "nll_loss_backward"),
        *("_fused_adagrad", "_fused_adam", "_fused_adamw", "_fused_sgd"),
    )
)

#: Operators of the op table that may write nothing on a CPU with numbers of 16 bits: here, if `alpha` and `beta` are 0.
_NOT_HALVES: Final = frozenset(("baddbmm",))
#: Further operators that write all on a GPU (read in CUDA's kernels). On a CPU, the total weight stays unwritten without a
#: reduction.
_ON_GPU: Final = frozenset(("nll_loss_forward",))


def writes_all(op: OpOverload) -> bool:
    """Whether an operator is known to write every element of every result. Nothing is known about extension operators."""
    if op.namespace != "aten":
        return False
    name = op.overloadpacket.__name__.removesuffix("_")
    return name in _known() or name.removeprefix("_foreach_") in _known()


def fills_results(op: OpOverload, form: Form, *, host: bool) -> bool:
    """Whether an operator is known to write every element of the results of a form, on a CPU (`host`) or a GPU."""
    name = op.overloadpacket.__name__.removesuffix("_")
    if host and name in _NOT_HALVES:
        return not any(o.view is not None and o.view.dtype in (DType.F16, DType.BF16) for o in form.operands)
    return writes_all(op) or (not host and op.namespace == "aten" and name in _ON_GPU)


@functools.cache
def _known() -> frozenset[str]:
    table = {spelling.operator for row in TABLE.values() for spelling in row.spellings}
    return WRITE_ALL | _elementwise() | {name.split(".")[1].removesuffix("_") for name in table}


def _elementwise() -> frozenset[str]:
    """Return the operators that the library tags as element-wise: its iterator visits each element of the result once."""
    found = set()
    for name in allowed():
        _, packet, overload = name.split(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload, None)
        if op is not None and torch.Tag.pointwise in op.tags:
            found.add(packet.removesuffix("_"))
    return frozenset(found)


def on_zeros(call: Callable[[_T], _R]) -> Callable[[_T], _R]:
    """Return `call` with an allocator that zeroes all host memory that the library allocates.

    The switch is global to the process. Only the device thread runs operators, and allocations of other threads in the meantime
    are zeroed, too.
    """

    def run(f: _T) -> _R:
        zero_fill.value = True
        try:
            return call(f)
        finally:
            zero_fill.value = False

    return run
