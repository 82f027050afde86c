"""`torch.compile`: results on our device, compared with uncompiled CUDA, which needs no compiler on the machine."""

import torch
from cases import Case
from torch import nn
from torch.nn import functional as F


def cases(selection):
    for name, function in FUNCTIONS.items():
        if selection.takes(name):
            for gradients in (False, True):
                yield Case(
                    f"{name}/{'gradients' if gradients else 'inference'}",
                    lambda device, f=function, g=gradients: run(f, g, device, selection.side == "ours"),
                )


def run(function, gradients, device, compiles):
    """Three calls, the last with another size; with gradients of the inputs and the parameters."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = function().to(device)
    call = torch.compile(model) if compiles else model
    found = []
    for rows in (6, 6, 9):
        x = torch.randn(rows, 8).to(device).requires_grad_(gradients)
        if gradients:
            result = call(x)
            result.square().sum().backward()
            found.append([result, x.grad, *[p.grad for p in model.parameters()]])
            model.zero_grad()
        else:
            with torch.no_grad():
                found.append(call(x))
    return found


class Breaks(nn.Module):
    """A model that reads a value in the middle and branches on it."""

    def forward(self, x):
        x = torch.sin(x)
        if x.sum().item() > 0:
            return x * 2
        return x - 1


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, x):
        return self.last(F.gelu(self.norm(self.first(x))))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(0, 1) for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)


class Pointwise(nn.Module):
    def forward(self, x):
        return torch.where(x > 0, x.exp(), x.tanh()) / (1 + x.abs()).sqrt()


class Indexed(nn.Module):
    def forward(self, x):
        order = x[:, 0].argsort()
        return x[order].cumsum(0)[x[:, 1] > -10]


FUNCTIONS = {"norm": Normed, "attention": Attention, "pointwise": Pointwise, "break": Breaks, "indexed": Indexed}
