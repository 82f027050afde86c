"""Runs random programs (`tests/conformance/programs.py`), and loses the executor in them. Prints what differs from the CPU.

random_programs.py FIRST LAST EVERY     the programs FIRST to LAST - 1; the executor is lost before each EVERY-th step
"""

import os
import sys
from pathlib import Path

import losing
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "conformance"))
import program_runs

first, last, every = map(int, sys.argv[1:])
torch.set_num_threads(1)
torch.zeros(1, device="cuda").item()
done = 0


def before_step():
    """Lose the executor at once, or only the connection to it, in turns."""
    global done
    done += 1
    if done % every == 0:
        os.environ.pop("CUT", None)
        if done // every % 2:
            os.environ["CUT"] = "1"
        losing.LOSE.add(done)
        losing.step(done)


for seed in range(first, last):
    steps, looks, theirs = program_runs.make(seed)
    said = program_runs.difference(program_runs.execute(steps, "cuda", looks, before_step), theirs)
    if said:
        print(f"seed {seed}: {said}", flush=True)
print(f"{last - first} programs, lost {len(losing.LOSE)} times")
