"""bitsandbytes: weights of four bits under a trained adapter, optimizers with states of 8 bits, also paged ones."""

import bitsandbytes as bnb
import torch
from torch import nn


class Adapted(nn.Module):
    """A layer with frozen weights of four bits, and a trained adapter of rank 4."""

    def __init__(self):
        super().__init__()
        self.base = bnb.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4")
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def trained(model, optimizer, x):
    losses = []
    for _ in range(4):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run(device):
    model, large = Adapted().to(device), nn.Linear(512, 512).to(device)
    x = torch.arange(32 * 64.0).reshape(32, 64).sin().to(device)
    wide = torch.arange(32 * 512.0).reshape(32, 512).sin().to(device)
    adapter = [*model.down.parameters(), *model.up.parameters()]
    return {
        "adapter": trained(model, bnb.optim.AdamW8bit(adapter, lr=1e-2, min_8bit_size=64), x),
        "paged": trained(large, bnb.optim.PagedAdamW8bit(large.parameters(), lr=1e-3), wide),
    }
