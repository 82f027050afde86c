"""Substitutes for operators that only the CPU's library has, or that differ on a GPU: programs are recorded as a CPU would run
them (ADR 6).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wooly_wis.dtypes import DType
from wooly_wis.program import Form

from wooly_executor.runtime import gpu_bags, gpu_lstm, gpu_norms
from wooly_executor.runtime.gpu_absent import ABSENT, on_host
from wooly_executor.runtime.gpu_attention import Attention, attention_backward
from wooly_executor.runtime.torch_private import OpOverload

_DONE_BY: dict[str, Callable[..., Any]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": attention_backward,
    "aten.mkldnn_rnn_layer.default": gpu_lstm.layer,
    "aten.mkldnn_rnn_layer_backward.default": gpu_lstm.layer_backward,
    "aten._batch_norm_with_update.default": gpu_norms.batch_norm_with_update,
    "aten.batch_norm_backward.default": gpu_norms.batch_norm_backward_of_update,
    "aten._embedding_bag.default": gpu_bags.forward,
    "aten._embedding_bag_forward_only.default": gpu_bags.forward_only,
    "aten._embedding_bag_backward.default": gpu_bags.backward,
    "aten._embedding_bag_dense_backward.default": gpu_bags.dense_backward,
    "aten._embedding_bag_per_sample_weights_backward.default": gpu_bags.weights_backward,
}
#: Each instruction has an `Attention` of its own.
_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"
#: Substitutes that are needed for half precision only.
_HALVES_DONE_BY: dict[str, Callable[..., Any]] = {
    "aten.native_layer_norm.default": gpu_norms.layer_norm,
    "aten.native_layer_norm_backward.default": gpu_norms.layer_norm_backward,
    "aten.native_group_norm.default": gpu_norms.group_norm,
    "aten.native_group_norm_backward.default": gpu_norms.group_norm_backward,
    "aten.native_batch_norm_backward.default": gpu_norms.batch_norm_backward,
}
_HALVES = (DType.F16, DType.BF16)


def substitute(op: OpOverload, form: Form | None = None) -> Callable[..., Any] | None:
    """Return the substitute for an operator that a GPU's library lacks or does otherwise; None: the operator is called itself.

    Args:
        op: the operator.
        form: the instruction; None: without the substitutes that depend on dtypes.
    """
    name = str(op)
    if op.namespace == "aten" and op.overloadpacket.__name__ in ABSENT:
        return on_host(op)
    if name in _HALVES_DONE_BY and form is not None:
        halves = any(o.view is not None and o.view.dtype in _HALVES for o in form.operands)
        return _HALVES_DONE_BY[name] if halves else None
    return Attention() if name == _ATTENTION else _DONE_BY.get(name)
