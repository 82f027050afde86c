"""Tensors, modules and events that are handed to another process, and what each process sees of the other's writes.

sharing.py spawn | forkserver       starts a process
sharing.py listen ADDRESS           waits for a process that was started as
sharing.py connect ADDRESS
"""

import sys
import time
from multiprocessing.connection import Client, Listener
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing as mp
from torch import nn


def make():
    """The same on any device."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


# -- in the child --------------------------------------------------------------------------------------------------------


def serve(argument, module, way):
    """Do what the other process asks for: names of the functions below."""
    tensors = {}
    while (asked := way.recv()) is not None:
        name, *given = asked
        try:
            way.send(globals()[name](tensors, argument, module, *given))
        except Exception as e:
            way.send(f"{type(e).__name__}: {e}")
        del asked, given


def look(tensors, argument, module):
    return (
        argument.is_cuda,
        argument.cpu(),
        [p.detach().cpu() for p in module.parameters()],
        next(module.parameters()).is_leaf,
    )


def fill(tensors, argument, module, value):
    argument.fill_(value)


def keep(tensors, argument, module, name, t):
    tensors[name] = t
    return tuple(t.shape), t.stride(), t.storage_offset(), t.requires_grad, type(t).__name__, t.device.type


def values(tensors, argument, module, *names):
    return [tensors[name].detach().cpu() for name in names]


def write(tensors, argument, module, name, value):
    tensors[name].detach().fill_(value)


def same_storage(tensors, argument, module, *names):
    return len({tensors[name].untyped_storage().data_ptr() for name in names}) == 1


def drop(tensors, argument, module, name):
    del tensors[name]


def send_back(tensors, argument, module, name):
    ForkingPickler.dumps(tensors[name])


def send_clone(tensors, argument, module, name):
    tensors["sent"] = tensors[name].clone()  # a sender keeps what it sends
    return tensors["sent"]


def resize(tensors, argument, module, name):
    tensors[name].untyped_storage().resize_(1)


def event(tensors, argument, module, e, t):
    e.wait()
    e.synchronize()
    return e.query(), t.sum().item(), type(e).__name__


def step(tensors, argument, module, n):
    """Hogwild: own gradients, shared parameters."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x = torch.ones(3, 4, device="cuda")
    for _ in range(n):
        optimizer.zero_grad()
        module(x).square().sum().backward()
        optimizer.step()


# -- in the parent -------------------------------------------------------------------------------------------------------


class Other:
    """The other process. `how` starts it, or waits for it."""

    def __init__(self, argument, module, how, *address):
        self.process = None
        if how == "listen":
            with Listener(*address) as listener:
                self.way = listener.accept()
            self.way.send((argument, module))
            return
        context = mp.get_context(how)
        self.way, there = context.Pipe()
        self.process = context.Process(target=serve, args=(argument, module, there), daemon=True)
        self.process.start()
        there.close()

    def ask(self, *what):
        self.way.send(what)
        return self.answer()

    def answer(self):
        assert self.way.poll(200), "the other process does not answer"
        return self.way.recv()

    def end(self):
        self.way.send(None)
        if self.process is not None:
            self.process.join(200)
            assert self.process.exitcode == 0, self.process.exitcode


def main(*how):
    argument, module = torch.arange(6.0, device="cuda"), make().cuda()
    other = Other(argument, module, *how)
    is_cuda, seen, parameters, is_leaf = other.ask("look")
    assert is_cuda and is_leaf and torch.equal(seen, torch.arange(6.0))
    assert all(torch.equal(a, b) for a, b in zip(parameters, make().parameters(), strict=True))
    assert argument.sum().item() == 15  # a host copy of this must not be used below
    other.ask("fill", 3.0)
    assert argument.cpu().tolist() == [3.0] * 6
    print("arguments agree")

    base = torch.arange(24.0, device="cuda").reshape(4, 6)
    view, parameter = base[1:, ::2].t(), nn.Parameter(torch.ones(2, device="cuda"))
    assert other.ask("keep", "base", base) == ((4, 6), (6, 1), 0, False, "Tensor", "cuda")
    assert other.ask("keep", "view", view) == ((3, 3), (2, 6), 6, False, "Tensor", "cuda")
    assert other.ask("same_storage", "base", "view")
    assert other.ask("keep", "leaf", torch.ones(2, device="cuda", requires_grad=True))[3:5] == (True, "Tensor")
    assert other.ask("keep", "parameter", parameter)[3:5] == (True, "Parameter")
    assert other.ask("keep", "empty", torch.empty(0, 3, device="cuda"))[0] == (0, 3)
    for dtype in (torch.bool, torch.bfloat16, torch.complex64, torch.int8):
        host = torch.tensor([0, 1, 1]).to(dtype)
        other.ask("keep", "typed", host.cuda())
        assert torch.equal(other.ask("values", "typed")[0], host), dtype
    base[1, 0] = 100.0
    torch.cuda.synchronize()
    assert torch.equal(other.ask("values", "view")[0], base.cpu()[1:, ::2].t())
    other.ask("write", "view", -1.0)
    expected = torch.arange(24.0).reshape(4, 6)
    expected[1:, ::2] = -1.0
    assert torch.equal(base.cpu(), expected)
    print("views agree")

    del base, view  # the child's views keep the memory
    assert torch.equal(other.ask("values", "base")[0], expected)
    short_lived = torch.full((1000,), 5.0, device="cuda")
    other.way.send(("keep", "short", short_lived))
    del short_lived
    assert other.answer()[0] == (1000,)
    torch.ones(1000, device="cuda").sum().item()
    assert other.ask("values", "short")[0].sum().item() == 5000
    print("counts agree")

    clone = other.ask("send_clone", "short")
    assert clone.is_cuda and clone.sum().item() == 5000
    del clone
    said = other.ask("send_back", "short")
    assert "received from another process" in said, said
    said = other.ask("resize", "short")
    assert "storage that is not resizable" in said, said
    kept = torch.ones(2, device="cuda")
    try:
        ForkingPickler.loads(ForkingPickler.dumps(kept))
    except RuntimeError as e:
        assert "cannot receive what it has sent" in str(e), e
    else:
        raise AssertionError("a process received its own tensor")
    try:
        ForkingPickler.dumps(torch.ones(2, device="cuda", requires_grad=True) * 2)
    except RuntimeError as e:
        assert "non-leaf tensor which requires_grad" in str(e)
    print("errors agree")

    e = torch.cuda.Event(interprocess=True)
    data = torch.zeros(1000, device="cuda")
    for _ in range(5):
        data += 1
    e.record()
    assert other.ask("event", e, data) == (True, 5000.0, "Event")
    print("events agree")

    here = make()
    optimizer = torch.optim.SGD(here.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        here(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()
    other.ask("step", 3)
    assert all(p.grad is None for p in module.parameters())
    for shared, alone in zip(module.parameters(), here.parameters(), strict=True):
        assert torch.equal(shared.cpu(), alone), (shared, alone)
    print("training agrees")
    other.end()
    for shared, alone in zip(module.parameters(), here.parameters(), strict=True):
        assert torch.equal(shared.cpu(), alone)


if __name__ == "__main__":
    if sys.argv[1] == "connect":
        while True:
            try:
                connected = Client(sys.argv[2])
                break
            except (FileNotFoundError, ConnectionRefusedError):
                time.sleep(0.01)
        serve(*connected.recv(), connected)
    else:
        main(*sys.argv[1:])
