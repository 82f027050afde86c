"""Trains a small network with Adam, dropout and autocast. Prints a digest of all losses and of the weights.

    train.py STEPS EVERY     reads the loss at every EVERY-th step

At the steps in LOSE (comma separated), it kills its own executor, whose process id is in PIDS/<executor>.
"""

import hashlib
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

steps, every = int(sys.argv[1]), int(sys.argv[2])
lose = {int(s) for s in os.environ.get("LOSE", "").split(",") if s}


def lose_executor():
    from wooly import api

    name = api._attached.parts[0].executor_id
    os.kill(int(Path(os.environ["PIDS"], name).read_text()), signal.SIGKILL)


torch.manual_seed(1)
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(64), nn.Linear(64, 8)).to("cuda")
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
data = torch.randn(512, 32)
labels = torch.randint(0, 8, (512,))
losses = []
for step in range(steps):
    if step in lose:
        lose_executor()
    at = step * 16 % 496
    x, y = data[at : at + 16].to("cuda"), labels[at : at + 16].to("cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % every == 0:
        losses.append(loss.item())
said = hashlib.sha256(repr(losses).encode())
for p in model.parameters():
    said.update(p.detach().cpu().numpy().tobytes())
print(said.hexdigest(), losses[-1])
