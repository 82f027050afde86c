"""Trains for ten steps, says so, waits for the file PAUSED.go, and trains for ten more. Prints a digest of the weights.

pausing.py PAUSED
"""

import hashlib
import sys
import time
from pathlib import Path

import torch
from torch import nn

paused = Path(sys.argv[1])
torch.manual_seed(2)
model = nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.2), nn.Linear(256, 8)).to("cuda")
optimizer = torch.optim.Adam(model.parameters())


def train():
    for _ in range(10):
        model(torch.randn(16, 64, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


train()
paused.touch()
while not paused.with_suffix(".go").exists():
    time.sleep(0.05)
train()
said = hashlib.sha256()
for p in model.parameters():
    said.update(p.detach().cpu().numpy().tobytes())
print(said.hexdigest())
