"""Ranks that compute without collectives, until their session ends."""

import os

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
x = torch.ones(64, device="cuda")
os.write(1, b"ready\n")  # in one piece, because ranks may share the output
while True:
    x = (x * 1.0001).clamp(max=2)
    torch.cuda.synchronize()
