"""A small training that is long enough to show leaks. Prints a line of JSON: memory and container sizes, early and at the end.

Run: python long_training.py ENDPOINT TOKEN EXECUTOR_PID STEPS WARM_UP READ_EVERY   (READ_EVERY 0: read nothing until the end)
"""

import collections
import gc
import json
import sys

import psutil
import torch
from torch import nn
from wooly import api, storage

SIZED = (list, dict, set, collections.deque)


def containers():
    """The length of every container that the client keeps for the life of the process or session, by name."""
    attached = api._attached
    device, link = attached.device, attached.link
    owners = {
        "recorder": vars(device.recorder),
        "forms": vars(device.recorder.forms),
        "link": vars(link),
        "failures": vars(link._failures),
        "channel": vars(link.connection.channel),
        "generic": vars(device.generic),
        "transfer": vars(device.transfer),
        "factories": vars(device.factories),
        "copies": vars(device.copies),
        "heap": {name: getattr(storage.heaps[0], name) for name in storage.Heap.__slots__},
    }
    return {
        f"{owner}.{name}": len(value)
        for owner, attributes in owners.items()
        for name, value in attributes.items()
        if isinstance(value, SIZED) and not name.startswith("__")
    }


def measure(executor):
    """Memory and container sizes of both sides, after everything recorded has run."""
    gc.collect()
    torch.cuda.synchronize()
    return {
        "client_rss": psutil.Process().memory_info().rss,
        "executor_rss": executor.memory_info().rss,
        "containers": containers(),
        "remote": api._attached.link.stats(),
        "live": [storage.live_count(), storage.live_bytes()],
    }


def main():
    endpoint, token, pid, steps, warm_up, read_every = sys.argv[1:3] + [int(a) for a in sys.argv[3:]]
    torch.set_num_threads(1)
    api.attach([endpoint], "standalone", token)
    api.install_facade()
    executor = psutil.Process(pid)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4)).to("cuda")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    y = torch.arange(8).to("cuda") % 4
    found, peak = {}, {}
    for step in range(1, steps + 1):
        x = torch.randn(8, 16).to("cuda")  # random data, so that the model cannot learn and the loss stays constant
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if read_every and step % read_every == 0:
            assert 0 < loss.item() < 10
            assert len((model[0].bias > -10).nonzero()) == 32  # a shape that only the executor knows
        if step % 50 == 25:
            peak = {name: max(n, peak.get(name, 0)) for name, n in containers().items()}
        if step == warm_up:
            found["early"] = measure(executor)
    found |= {"end": measure(executor), "peak": peak}
    api.disable()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
