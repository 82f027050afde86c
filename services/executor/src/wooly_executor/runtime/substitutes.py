"""Substitutes for operators that only the CPU's library has: programs are recorded as a CPU would run them (ADR 6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wooly_executor.errors import OperationError
from wooly_executor.runtime.attention import attention, attention_backward
from wooly_executor.runtime.torch_private import OpOverload

_DONE_BY: dict[str, Callable[..., Any]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": attention_backward,
}
_LACKING = {
    "aten.mkldnn_rnn_layer.default": "set torch.backends.mkldnn.enabled = False in the script",
    "aten.mkldnn_rnn_layer_backward.default": "set torch.backends.mkldnn.enabled = False in the script",
    "aten.histogram.bin_ct": "use torch.histc",
    "aten.histogram.bin_ct_out": "use torch.histc",
    "aten.histogram.bins_tensor": "use torch.bucketize and torch.bincount",
    "aten.histogram.bins_tensor_out": "use torch.bucketize and torch.bincount",
}


def substitute(op: OpOverload) -> Callable[..., Any] | None:
    """Return the substitute for an operator that a GPU's library lacks; None: the library has the operator.

    Raises:
        OperationError: the library lacks the operator, and there is no substitute.
    """
    name = str(op)
    if name in _LACKING:
        raise OperationError(f"{name}: the library has this operator only for CPUs; {_LACKING[name]}")
    return _DONE_BY.get(name)
