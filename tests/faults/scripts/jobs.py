"""The computations of jobs: `short` takes milliseconds, `long` takes some seconds, so that faults can happen meanwhile."""

import torch


def _work(steps, size):
    torch.manual_seed(7)
    weight = torch.randn(size, size) / size**0.5

    def work(x):
        w = weight.to("cuda")
        for _ in range(steps):
            x = torch.tanh(x @ w)
        return x

    return work, (torch.empty(64, 64),)


def short():
    return _work(8, 64)


def long():
    torch.manual_seed(7)
    wide, back = torch.randn(64, 1536) / 8, torch.randn(1536, 64) / 39

    def work(x):
        there, again = wide.to("cuda"), back.to("cuda")
        for _ in range(400):
            x = torch.tanh(torch.tanh(x @ there) @ again)
        return x

    return work, (torch.empty(64, 64),)
