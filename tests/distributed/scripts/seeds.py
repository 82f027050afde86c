"""Runs random programs of several ranks, one per seed. It does not know what the programs do."""

import sys

import torch
import torch.distributed as dist


def seeds():
    """The seeds that the command line names: the first one, and the one behind the last."""
    return range(*map(int, sys.argv[1:3]))


def agree(check):
    """Check all seeds, until one differs on some rank. Returns whether all agree.

    Args:
        check: runs the program of a seed, and returns what differs: a text, which is printed; empty if nothing does.
    """
    for seed in seeds():
        said = check(seed)
        wrong = torch.tensor([len(said)])
        dist.all_reduce(wrong)
        if wrong:
            print(said, flush=True)
            return False
    return True
