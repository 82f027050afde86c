"""Computes, and kills its own process."""

import os
import signal

import torch

print(torch.ones(3, device="cuda").sum().item(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
