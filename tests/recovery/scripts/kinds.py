"""Computes for some steps, and reads a result at each. Prints all results and sums of the state.

kinds.py STEPS     WAIT: a step at which the script waits until its session has gone on in another executor. STORED: before a loss
                   and before it waits, a checkpoint is stored. With WOOLYAI_RECOVERY=on, it begins when there is a file `go`

A library with several threads adds the gradients of the weights of a layer norm in another order than with one.
"""

import os
import sys
import time
from pathlib import Path

import losing
import torch
from wooly import api

steps, wait = int(sys.argv[1]), int(os.environ.get("WAIT", "-1"))
torch.manual_seed(1)
x = torch.rand(256, 1024, device="cuda")
w = torch.ones(1024, device="cuda", requires_grad=True)
results = []


def some_work():
    """Another program; a session asks for checkpoints when it sends one."""
    global x
    x = x + 0.0
    torch.cuda.synchronize()
    time.sleep(0.05)


def stored():
    recovery = api._attached.link.recovery
    number = recovery.number
    while recovery.stored <= number:
        some_work()


torch.cuda.synchronize()
pids = Path(os.environ["PIDS"])
(pids / "begun").touch()
while not (pids / "go").exists() and os.environ.get("WOOLYAI_RECOVERY") == "on":
    time.sleep(0.05)
for step in range(steps):
    if "STORED" in os.environ and (step in losing.LOSE or step == wait):
        stored()
    losing.step(step)
    y = torch.nn.functional.layer_norm(x, (1024,), w)
    w.grad = None
    (y * x.cos()).sum().backward()
    with torch.no_grad():
        w -= 1e-4 * w.grad
        x = torch.tanh(y + 0.01 * w)
    results.append(w.grad.square().sum().item())
    if step == wait:
        before = api._attached.parts[0].executor_id
        (pids / "waits").touch()
        while api._attached.parts[0].executor_id == before:
            some_work()
print(*results, x.detach().square().sum().item(), w.detach().sum().item())
