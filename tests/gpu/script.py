"""A whole training script as a user runs it: `python digits.py` with CUDA, `wooly run digits.py` without."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from cases import RUNTIME, VISIBLE, Case

_SCRIPT = Path(__file__).with_name("digits.py")


def cases(selection):
    if selection.takes("digits"):
        # AdamW's losses differ by rounding alone; a wrong gradient or step differs far more than this tolerance.
        allowed = {torch.float32: (5e-2, 2e-2), torch.float64: (5e-2, 2e-2)}
        yield Case("digits/three epochs", lambda device: run(device, selection.side), tolerances=allowed)


def run(device, side):
    with tempfile.TemporaryDirectory(prefix="wooly-gpu-run-") as folder:
        wooly = ["-m", "wooly", "run"] if side == "ours" else []
        environment = os.environ | {"XDG_STATE_HOME": folder, "XDG_CONFIG_HOME": folder}
        environment = {k: v for k, v in environment.items() if not k.startswith("WOOLYAI_")}
        if side == "ours":
            # `wooly run` starts the executor, too, so the GPU must be visible again.
            environment.pop("CUDA_VISIBLE_DEVICES", None)
            visible = environment.pop(VISIBLE, "")
            environment |= {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
            environment["WOOLY_EXECUTOR_RUNTIME"] = {"cpu": "torch_cpu"}.get(environment.get(RUNTIME, "cpu"), "cuda")
        argv = [sys.executable, *wooly, str(_SCRIPT), "--device", device]
        done = subprocess.run(argv, capture_output=True, text=True, env=environment, timeout=150)
    if done.returncode:
        raise RuntimeError(f"status {done.returncode}: {done.stderr[-1500:]}")
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
