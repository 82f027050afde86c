"""Tells which operators of a GPU's library wait for the device, or draw random numbers in a way that a graph can contain."""

from __future__ import annotations

from typing import Final

import torch
from wooly_wis.dtypes import DType
from wooly_wis.program import Form, OperandRef

from wooly_executor.runtime.calls import LibraryCall
from wooly_executor.runtime.torch_private import schema_of

#: Operators that take indices, which may be masks. A mask is turned into indices, and their number is read.
_INDEXED: Final = frozenset(
    ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")
)
_MASKS: Final = (DType.BOOL, DType.U8)
#: Operators that read a result of the device and have no tag for this.
_WAITING: Final = frozenset(
    (
        *("nonzero", "masked_select", "item", "_local_scalar_dense", "equal", "allclose", "is_nonzero"),
        *("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"),
        *("bincount", "histc", "histogram", "repeat_interleave", "mode", "segment_reduce", "_segment_reduce_backward"),
        *("_ctc_loss", "_ctc_loss_backward", "ctc_loss", "_pack_padded_sequence", "_pad_packed_sequence"),
        *("cholesky", "cholesky_inverse", "cholesky_solve", "logdet", "slogdet", "_det_lu_based_helper", "inverse"),
        *(
            "geqrf",
            "orgqr",
            "ormqr",
            "lu_solve",
            "lu_unpack",
            "_lu_with_info",
            "triangular_solve",
            "lobpcg",
            "_symeig_helper",
        ),
        *("to_sparse", "_to_sparse", "coalesce"),
    )
)
#: Operators of linear algebra that wait for nothing. The others check the status that their solver left on the device.
_FREE_LINALG: Final = frozenset(("linalg_vector_norm", "linalg_cross", "linalg_vecdot", "linalg_diagonal"))
#: Operators whose kernels take seed and offset from device memory in a graph, by `CUDAGeneratorImpl::philox_cuda_state`. Others
#: look at values (`multinomial`, `normal` with a tensor), or keep a state of their own (dropout in cuDNN's LSTM).
_DRAWING: Final = frozenset(
    (
        *("native_dropout", "bernoulli", "uniform", "exponential", "geometric", "cauchy", "log_normal", "random"),
        *("rand", "randn", "randint", "rand_like", "randn_like", "randint_like"),
    )
)
_TAGS: Final = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


def waits(call: LibraryCall, form: Form) -> bool:
    """Whether a library call makes the host wait for the device. `form`: its instruction."""
    op = call.op
    name = op.overloadpacket.__name__.removesuffix("_out")
    if name in _INDEXED:
        given = dict(zip([a.name for a in schema_of(op).arguments], call.args, strict=False)).get("indices", ())
        views = [form.operands[r.index].view for r in given if isinstance(r, OperandRef)]
        return any(view is None or view.dtype in _MASKS for view in views)
    if name == "_grouped_mm":  # only numbers of this type have a kernel; for others, the library reads the offsets
        return form.operands[0].view is None or form.operands[0].view.dtype is not DType.BF16
    if name in _WAITING or any(tag in op.tags for tag in _TAGS) or _reads_number(call):
        return True
    return name.lstrip("_").startswith("linalg_") and name.lstrip("_") not in _FREE_LINALG


def draws(call: LibraryCall) -> bool:
    """Whether a graph can contain a library call that draws random numbers."""
    op = call.op
    name = op.overloadpacket.__name__
    return op.namespace == "aten" and (name == "normal_" or name.removesuffix("_") in _DRAWING)


def _reads_number(call: LibraryCall) -> bool:
    """Whether an operand is in the place of a number, which the operator then reads."""
    declared = schema_of(call.op).arguments
    given = {a.name: v for a, v in zip(declared, call.args, strict=False)} | dict(call.kwargs)
    return any(isinstance(given.get(a.name), OperandRef) and str(a.type) == "number" for a in declared)
