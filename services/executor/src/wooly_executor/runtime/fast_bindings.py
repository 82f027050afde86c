"""Python bindings that do exactly the same as an overload, 0.7 us faster per call than the generic operator call.

The table has only overloads whose positional arguments have the same meaning in both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from wooly_executor.runtime.torch_private import gelu, linear, silu

FAST: dict[str, Callable[..., Any]] = {
    "aten.add.Tensor": torch.add,
    "aten.sub.Tensor": torch.sub,
    "aten.mul.Tensor": torch.mul,
    "aten.div.Tensor": torch.div,
    "aten.add_.Tensor": torch.Tensor.add_,
    "aten.sub_.Tensor": torch.Tensor.sub_,
    "aten.mul_.Tensor": torch.Tensor.mul_,
    "aten.div_.Tensor": torch.Tensor.div_,
    "aten.mm.default": torch.mm,
    "aten.bmm.default": torch.bmm,
    "aten.addmm.default": torch.addmm,
    "aten.relu.default": torch.relu,
    "aten.sigmoid.default": torch.sigmoid,
    "aten.tanh.default": torch.tanh,
    "aten.exp.default": torch.exp,
    "aten.log.default": torch.log,
    "aten.neg.default": torch.neg,
    "aten.sqrt.default": torch.sqrt,
    "aten.rsqrt.default": torch.rsqrt,
    "aten.sin.default": torch.sin,
    "aten.cos.default": torch.cos,
    "aten.pow.Tensor_Scalar": torch.pow,
    "aten.cat.default": torch.cat,
    "aten.mean.dim": torch.mean,
    "aten.embedding.default": torch.embedding,
    "aten.linear.default": linear,
    "aten.silu.default": silu,
    "aten.gelu.default": gelu,
    "aten.clone.default": torch.clone,
    "aten.eq.Tensor": torch.eq,
    "aten.zero_.default": torch.Tensor.zero_,
}
