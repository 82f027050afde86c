"""Kills the executor of this process at the steps in LOSE; its process id is in PIDS/<executor>."""

import os
import signal
from pathlib import Path

LOSE = {int(s) for s in os.environ.get("LOSE", "").split(",") if s}


def step(number):
    """Say that a step begins."""
    if number in LOSE:
        from wooly import api

        name = api._attached.parts[0].executor_id
        os.kill(int(Path(os.environ["PIDS"], name).read_text()), signal.SIGKILL)
