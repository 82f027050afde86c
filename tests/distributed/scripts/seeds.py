"""Runs random programs of several ranks, seed by seed. Knows nothing about what they do."""

import sys

import torch
import torch.distributed as dist


def seeds():
    """The seeds that the command line names: the first one, and the one behind the last."""
    return range(*map(int, sys.argv[1:3]))


def agree(check):
    """Whether no seed makes a difference on any rank. `check(seed)` says what differs, or nothing; what it says is printed."""
    for seed in seeds():
        said = check(seed)
        wrong = torch.tensor([len(said)])
        dist.all_reduce(wrong)
        if wrong:
            print(said, flush=True)
            return False
    return True
