"""Kills the executor of this process at the steps in LOSE, and the router if ROUTER is set. PIDS has their process ids, by name.

With CUT, only the connection of this process to its executor breaks. With UNTIL, a loss waits until that file exists.
"""

import os
import signal
import time
from pathlib import Path

LOSE = {int(s) for s in os.environ.get("LOSE", "").split(",") if s}


def step(number, part=0):
    """Say that a step begins. `part`: index of the device whose executor is lost."""
    if "SLOW" in os.environ:
        time.sleep(0.2)
    if number in LOSE:
        from wooly import api

        until = os.environ.get("UNTIL")
        while until and not Path(until).exists():
            time.sleep(0.01)
        if "CUT" in os.environ:
            api._attached.links[part].connection.channel.abort()
            return
        names = [api._attached.parts[part].executor_id, *(["router"] if "ROUTER" in os.environ else [])]
        for name in names:
            kill(int(Path(os.environ["PIDS"], name).read_text()))


def kill(pid):
    """Kill a process, and wait until its sockets are closed: the next steps must not be sent to it."""
    os.kill(pid, signal.SIGKILL)
    while _runs(pid):
        time.sleep(0.001)


def _runs(pid):
    """Whether a process has a thread that has not ended."""
    try:
        states = [stat.read_text().rpartition(")")[2].split()[0] for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # a thread ended during the look
        return True
    return any(state not in "ZX" for state in states)
