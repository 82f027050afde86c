"""Launches a Triton kernel in a loop: triton_loop.py STEPS."""

import sys

import losing
import torch
import triton
import triton.language as tl


@triton.jit
def scale_add(x, y, out, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + at, mask=inside) * factor + tl.load(y + at, mask=inside), mask=inside)


torch.manual_seed(5)
x, y = torch.randn(1000, device="cuda"), torch.randn(1000, device="cuda")
for step in range(int(sys.argv[1])):
    losing.step(step)
    out = torch.empty_like(x)
    scale_add[(triton.cdiv(1000, 256),)](x, y, out, 1000, 0.5 + step / 64, BLOCK=256)
    x = out
    if step % 4 == 0:
        print(x[0].item())
print(x.sum().item(), x.abs().max().item())
