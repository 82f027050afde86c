"""Trains a small network with Adam and dropout for some seconds, and prints its parameters. `train.py SEED [DEVICE]`."""

import hashlib
import sys
import time

import torch
from torch import nn

seed, device = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "cuda"
torch.manual_seed(seed)
model = nn.Sequential(
    nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 8)
)
model = model.to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
batches = torch.randn(16, 64, 32)
labels = torch.randint(0, 8, (16, 64))
for step in range(240):
    x, y = batches[step % 16].to(device), labels[step % 16].to(device)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 0:
        loss.item()
    if device == "cuda":
        time.sleep(0.03)
name = hashlib.sha256()
for parameter in model.parameters():
    name.update(parameter.detach().cpu().numpy().tobytes())
print("result", name.hexdigest())
