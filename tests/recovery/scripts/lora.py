"""Trains low-rank updates of a frozen network whose weights another session shares: lora.py STEPS."""

import hashlib
import sys

import losing
import torch
from torch import nn

steps = int(sys.argv[1])


class Lora(nn.Module):
    """A frozen linear layer with a trained low-rank update."""

    def __init__(self, base, rank):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.02)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.down.t() @ self.up.t()


torch.manual_seed(4)
model = nn.Sequential(Lora(nn.Linear(256, 512), 4), nn.ReLU(), Lora(nn.Linear(512, 256), 4)).to("cuda")
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
x = torch.randn(32, 256).to("cuda")
for step in range(steps):
    losing.step(step)
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
said = hashlib.sha256()
for p in model.parameters():
    said.update(p.detach().cpu().numpy().tobytes())
print(said.hexdigest(), loss.item())
