"""Experts with weights of four bits in the format MXFP4 (gpt-oss): a kernel in Triton makes them whole in each step.

vLLM's emulation does the same with a library of AMD's, which needs a GPU in this machine.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
import vllm.model_executor.layers.fused_moe.experts.ocp_mx_emulation_moe as emulation
from torch import Tensor
from vllm.model_executor.layers.fused_moe.oracle import mxfp4

#: Bytes, of two numbers each, that have a common scale; groups that a program computes.
GROUP, GROUPS = 16, 64


# Triton refuses annotations of types.
@triton.jit
def _value(number, scale):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    """What numbers of four bits mean: a sign, two bits of an exponent, and one bit of a fraction. 0 and 1 have no exponent."""
    exponent, fraction = (number >> 1) & 3, number & 1
    quarters = tl.where(exponent > 0, (2 + fraction) << exponent, 2 * fraction)
    return tl.where(number >= 8, -quarters, quarters).to(tl.float32) * 0.25 * scale


@triton.jit  # type: ignore[untyped-decorator]
def _make_whole(packed, scales, out, groups, GROUP: tl.constexpr, GROUPS: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    """Program k computes `GROUPS` groups."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    inside = (group < groups)[:, None]
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    byte = tl.load(packed + at, mask=inside, other=0).to(tl.int32)
    power = tl.load(scales + group, mask=group < groups, other=0).to(tl.int32)
    scale = (power << 23).to(tl.float32, bitcast=True)[:, None]
    both = tl.interleave(_value(byte & 15, scale), _value(byte >> 4, scale))
    to = group[:, None] * (2 * GROUP) + tl.arange(0, 2 * GROUP)[None, :]
    tl.store(out + to, both.to(out.dtype.element_ty), mask=inside)


def whole(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Replaces `dequant_mxfp4`.

    Args:
        packed: two numbers per byte, the first one in the low bits `[…, n / 2]`.
        scales: exponents of two, plus 127 `[…, n / 32]`.
        dtype: dtype of the result `[…, n]`.
    """
    out = torch.empty(*packed.shape[:-1], 2 * packed.shape[-1], dtype=dtype, device=packed.device)
    groups = scales.numel()
    _make_whole[(triton.cdiv(groups, GROUPS),)](
        packed.contiguous(), scales.view(torch.uint8).contiguous(), out, groups, GROUP=GROUP, GROUPS=GROUPS
    )
    return out


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
