"""Liger Kernel and flash-linear-attention: kernels in Triton on "cuda", against the same operations in PyTorch on the CPU."""

import torch
from torch.nn import functional as F


def fused(x, weight, head, labels, gate):
    from fla.ops.gla import fused_recurrent_gla
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    normed = LigerRMSNormFunction.apply(x, weight, 1e-6, 0.0, "llama", False)
    mixed = LigerSiLUMulFunction.apply(normed, x.cos())  # its backward writes into both operands
    attended, _ = fused_recurrent_gla(*[mixed.view(1, 16, 2, 32)] * 3, gate)
    loss, *_ = LigerFusedLinearCrossEntropyFunction.apply(attended.reshape(16, 64), head, labels)
    return attended, loss


def plain(x, weight, head, labels, gate):
    mixed = F.silu(F.rms_norm(x, (64,), weight, 1e-6)) * x.cos()
    q = k = v = mixed.view(16, 2, 32).transpose(0, 1)
    state, rows = torch.zeros(2, 32, 32), []
    for t in range(16):
        state = state * gate[0, t, :, :, None].exp() + k[:, t, :, None] * v[:, t, None, :]
        rows.append(((q[:, t, :, None] * 32**-0.5) * state).sum(1))
    attended = torch.stack(rows)[None]
    return attended, F.cross_entropy(attended.reshape(16, 64) @ head.t(), labels)


def run(device):
    x = torch.arange(16 * 64.0).reshape(16, 64).sin().to(device).requires_grad_()
    weight = torch.linspace(0.5, 1.5, 64).to(device).requires_grad_()
    head = (torch.arange(100 * 64.0).reshape(100, 64).cos() * 0.1).to(device).requires_grad_()
    gate = F.logsigmoid(torch.arange(16 * 64.0).reshape(1, 16, 2, 32).cos()).to(device)
    attended, loss = (plain if device == "cpu" else fused)(x, weight, head, torch.arange(16).to(device), gate)
    loss.backward()
    return {"attended": attended, "loss": loss, "x": x.grad, "weight": weight.grad, "head": head.grad}
