"""Experts with weights of four bits in the format MXFP4 (gpt-oss): made whole by PyTorch's operators in each step.

vLLM's emulation does the same with a library of AMD's, which needs a GPU in this machine.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.experts.ocp_mx_emulation_moe as emulation
from torch import Tensor
from vllm.model_executor.layers.fused_moe.oracle import mxfp4

#: What the numbers 0 to 7 mean; the highest bit is the sign.
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: Numbers that have a common scale.
GROUP = 32


@functools.cache
def _meanings(dtype: torch.dtype, device: torch.device) -> Tensor:
    """What each number means, on a device. It is sent once, because a graph cannot send it."""
    return torch.tensor([sign * value for sign in (1, -1) for value in _VALUES], dtype=dtype, device=device)


def whole(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Replaces `dequant_mxfp4`.

    Args:
        packed: two numbers per byte, the first one in the low bits `[…, n / 2]`.
        scales: exponents of two, plus 127 `[…, n / 32]`.
        dtype: dtype of the result `[…, n]`.
    """
    values = _meanings(dtype, packed.device)
    numbers = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).int()
    by_group = values[numbers].unflatten(-1, (-1, GROUP))
    found: Tensor = (by_group * torch.exp2(scales.float() - 127).to(dtype)[..., None]).flatten(-2)
    return found


def configure(quant_dtype: str, **more: Any) -> Any:
    """Replaces `ocp_mx_moe_quant_config` of the emulation: activations stay as they are, as in vLLM's kernels for CUDA."""
    return mxfp4.mxfp4_w4a16_moe_quant_config(**more)


def install() -> None:
    """Let vLLM choose its emulation. Calling it again changes nothing."""
    emulation.dequant_mxfp4 = whole
    emulation.has_quark = lambda: True
    mxfp4.ocp_mx_moe_quant_config = configure
    for choice in ("_get_priority_backends_for_gpt_oss", "_get_priority_backends"):
        setattr(mxfp4, choice, lambda: [mxfp4.Mxfp4MoeBackend.EMULATION])
