"""Runs one program on one device and saves its results: `one.py PROGRAM DEVICE FILE`."""

import importlib
import sys
from pathlib import Path

import torch

if __name__ == "__main__":
    _, name, device, file = sys.argv
    sys.path.insert(0, str(Path(__file__).parent))
    torch.manual_seed(0)
    results = importlib.import_module(f"programs.{name}").run(device)
    torch.save({key: torch.as_tensor(value).detach().cpu() for key, value in results.items()}, file)
