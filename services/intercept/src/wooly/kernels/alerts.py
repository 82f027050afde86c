"""Alerts for operators that CUDA cannot compute deterministically.

The kernels here run where the executor's library is, which may be a CPU's. So the client itself raises the alerts of CUDA's
kernels, at the call, with the names that CUDA's kernels give.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from wooly.kernels.schema import Call, OpFacts
from wooly.torch_private import alert_not_deterministic

_Caller = Callable[[OpFacts, Call], str | None]


def _always(functional: str, out: str = "") -> _Caller:
    """The alert has the name `functional`, and for the overload with `out=` the name `out`, if that is another."""
    return lambda facts, call: out if out and facts.out_args else functional


def _argument(facts: OpFacts, call: Call, name: str, default: Any = None) -> Any:
    if name in call.kwargs:
        return call.kwargs[name]
    at = facts.positions.get(name, len(call.args))
    return call.args[at] if at < len(call.args) else default


def _of_bincount(facts: OpFacts, call: Call) -> str | None:
    return "_bincount_cuda" if _argument(facts, call, "weights") is not None else None


def _of_median(facts: OpFacts, call: Call) -> str | None:
    return "median CUDA with indices output" if "dim" in facts.positions else None


def _of_scatter(facts: OpFacts, call: Call) -> str | None:
    by = _argument(facts, call, "reduce")
    return (
        "scatter_reduce_cuda_kernel" if by == "multiply" and isinstance(_argument(facts, call, "src"), Tensor) else None
    )


def _of_scatter_reduce(facts: OpFacts, call: Call) -> str | None:
    return "scatter_reduce_cuda_prod_" if _argument(facts, call, "reduce") == "prod" else None


def _of_embedding_bag(facts: OpFacts, call: Call) -> str | None:
    maximum = _argument(facts, call, "mode") == 2 and not _argument(facts, call, "sparse", False)
    return "embedding_bag_backward_cuda_max" if maximum else None


def _of_nll_loss2d(facts: OpFacts, call: Call) -> str | None:
    return "nll_loss2d_forward_out_cuda_template" if _argument(facts, call, "reduction", 1) != 0 else None


def _of_cross_entropy(facts: OpFacts, call: Call) -> str | None:
    """ATen computes it with `nll_loss2d` if the classes have more dimensions than the batch, and the target has indices."""
    if call.args[0].dim() < 3 or call.args[1].is_floating_point():
        return None
    return _of_nll_loss2d(facts, call)


#: The operators that alert, without overload, and the name in the alert; None: this call has a deterministic kernel. Sources:
#: for each line the file of PyTorch's folder `aten/src/ATen/native/cuda`, if no other is given.
ALERTS: dict[str, _Caller] = {
    # AdaptiveAveragePooling.cu and AdaptiveAveragePooling3d.cu: sums by atomics.
    "_adaptive_avg_pool2d_backward": _always("adaptive_avg_pool2d_backward_cuda"),
    "_adaptive_avg_pool3d_backward": _always("adaptive_avg_pool3d_backward_cuda"),
    "adaptive_avg_pool3d_backward": _always("adaptive_avg_pool3d_backward_out_cuda"),
    # AdaptiveMaxPooling2d.cu. The kernel for three dimensions does not alert.
    "adaptive_max_pool2d_backward": _always("adaptive_max_pool2d_backward_cuda"),
    # AveragePool3d.cu.
    "avg_pool3d_backward": _always("avg_pool3d_backward_cuda"),
    # DilatedMaxPool3d.cu.
    "max_pool3d_with_indices_backward": _always("max_pool3d_with_indices_backward_cuda"),
    # FractionalMaxPool2d.cu and FractionalMaxPool3d.cu.
    "fractional_max_pool2d_backward": _always("fractional_max_pool2d_backward_cuda"),
    "fractional_max_pool3d_backward": _always(
        "fractional_max_pool3d_backward_cuda", "fractional_max_pool3d_backward_out_cuda"
    ),
    # MaxUnpooling.cu: equal indices. The CPU's kernels alert, too.
    "max_unpool2d": _always("max_unpooling2d_forward_out"),
    "max_unpool3d": _always("max_unpooling3d_forward_out"),
    # UpSampleLinear1d.cu, UpSampleBilinear2d.cu, UpSampleBicubic2d.cu, UpSampleTrilinear3d.cu.
    "upsample_linear1d_backward": _always("upsample_linear1d_backward_out_cuda"),
    "upsample_bilinear2d_backward": _always("upsample_bilinear2d_backward_out_cuda"),
    "_upsample_bilinear2d_aa_backward": _always("upsample_bilinear2d_aa_backward_out_cuda"),
    "upsample_bicubic2d_backward": _always("upsample_bicubic2d_backward_out_cuda"),
    "upsample_trilinear3d_backward": _always("upsample_trilinear3d_backward_out_cuda"),
    # ReflectionPad.cu and ReplicationPadding.cu.
    "reflection_pad1d_backward": _always("reflection_pad1d_backward_out_cuda"),
    "reflection_pad2d_backward": _always("reflection_pad2d_backward_cuda", "reflection_pad2d_backward_out_cuda"),
    "reflection_pad3d_backward": _always("reflection_pad3d_backward_out_cuda"),
    "replication_pad1d_backward": _always("replication_pad1d_backward_cuda"),
    "replication_pad2d_backward": _always("replication_pad2d_backward_cuda", "replication_pad2d_backward_out_cuda"),
    "replication_pad3d_backward": _always("replication_pad3d_backward_cuda", "replication_pad3d_backward_out_cuda"),
    # NLLLoss2d.cu: its reductions to one number use atomics.
    "nll_loss2d_forward": _of_nll_loss2d,
    "cross_entropy_loss": _of_cross_entropy,
    # LossCTC.cu.
    "_ctc_loss_backward": _always("ctc_loss_backward_gpu"),
    # EmbeddingBag.cu, for the mode max.
    "_embedding_bag_backward": _of_embedding_bag,
    "_embedding_bag_dense_backward": _of_embedding_bag,
    # TensorAdvancedIndexing.cpp in the folder above: CUDA alerts for each `put_`, the CPU only without accumulation.
    "put_": _always("put_"),
    # Indexing.cu.
    "index_reduce": _always("index_reduce_cuda"),
    "index_reduce_": _always("index_reduce_cuda"),
    # ScatterGatherKernel.cu. Sums and means take another way, through `index_put_`.
    "scatter": _of_scatter,
    "scatter_": _of_scatter,
    "scatter_reduce": _of_scatter_reduce,
    "scatter_reduce_": _of_scatter_reduce,
    # SummaryOps.cu. `histc` is in the same file; `backend.histc` alerts for it, because integers are converted there.
    "bincount": _of_bincount,
    # Sorting.cpp: which of equal elements gives the index.
    "kthvalue": _always("kthvalue CUDA"),
    "median": _of_median,
    "nanmedian": _of_median,
    # GridSampler.cpp.
    "grid_sampler_2d_backward": _always("grid_sampler_2d_backward_cuda"),
    "grid_sampler_3d_backward": _always("grid_sampler_3d_backward_cuda"),
}


def alert(facts: OpFacts, call: Call) -> bool:
    """Raise or warn, as CUDA does, if deterministic algorithms are on and the operator has none. Returns whether it warned.

    Raises:
        RuntimeError: the operator is not deterministic.
    """
    caller = ALERTS.get(facts.op.overloadpacket.__name__)
    name = None if caller is None else caller(facts, call)
    if name is None:
        return False
    alert_not_deterministic(name)
    return True
