"""A short training and a chain of adds, in a separate client process with a given endpoint. Prints one line of JSON.

Run: python training.py ENDPOINT TOKEN   (without arguments: the same on the local CPU)
"""

import json
import sys

import torch
from torch import nn

STEPS = 50


def train(device):
    """Losses of `STEPS` steps of SGD with momentum, each read at once."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(32, 20), (32,), (5, 32), (5,)]
    weights = [(torch.randn(size, generator=generator) * 0.3).to(device).requires_grad_() for size in sizes]
    x, y = (
        torch.randn(64, 20, generator=generator).to(device),
        torch.randint(0, 5, (64,), generator=generator).to(device),
    )
    optimizer = torch.optim.SGD(weights, lr=0.2, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        hidden = nn.functional.linear(x, weights[0], weights[1]).tanh()
        loss = nn.functional.cross_entropy(nn.functional.linear(hidden, weights[2], weights[3]), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def chain(device):
    """A sum of 1,000 terms, one add after the other, read at the end."""
    t, step = torch.zeros(64, device=device), torch.linspace(0, 1, 64).to(device)
    for _ in range(1000):
        t = t + step
    return t.tolist()


def main():
    torch.set_num_threads(1)
    if len(sys.argv) == 1:
        print(json.dumps({"losses": train("cpu"), "chain": chain("cpu")}))
        return
    from wooly import api

    def waits():
        return api.session_stats()["syncs"]

    api.attach([sys.argv[1]], "standalone", sys.argv[2])
    api.install_facade()
    start = waits()
    losses = train("cuda")
    trained = waits()
    summed = chain("cuda")
    found = {"losses": losses, "chain": summed, "waits": [trained - start, waits() - trained]}
    found["bytes_sent"] = api.session_stats()["bytes_sent"]
    api.disable()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
