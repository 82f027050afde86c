"""The names that random programs use. A program is executed in a copy of this module whose `D` is its device.

This module uses PyTorch alone, because its text stands at the head of a program that `programs` prints as a script. Each function
that is not the same on both sides says why.
"""

import contextlib
import copy
import gc
import io
import pickle
import re
import threading
import weakref

import torch
import torch.autograd.forward_ad as fwad
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

#: The device of a program.
D = "cpu"
#: Held by what one thread of a process may do at a time.
LOCK = threading.Lock()
#: What a program has shown: a list of values, and of host copies of tensors.
SEEN = []


def R(seed, *shape, dtype=torch.float32):
    """Numbers that both sides draw on the CPU, because the generators differ: multiples of 1/8, or of the whole range."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-24, 25, shape, generator=generator)
    if dtype is torch.bool:
        return (values > 0).to(D)
    if dtype.is_complex:
        return torch.complex(values / 8, torch.randint(-24, 25, shape, generator=generator) / 8).to(dtype).to(D)
    if dtype.is_floating_point:
        values = torch.randn(shape, generator=generator) if seed % 3 == 0 else values / 8
    elif dtype is torch.uint8:
        values = values.abs()
    return values.to(dtype).to(D)


def order(seed, n):
    """A random order of the numbers below n. Writes at indices that occur twice have no defined result on CUDA."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed)).to(D)


def see(*values):
    """Show values, as a script that prints them or decides by them."""
    for value in values:
        if isinstance(value, tuple):
            see(*value)
        else:
            SEEN.append(host(value) if isinstance(value, torch.Tensor) else value)


def text(t):
    """The text of a tensor without its device, whose name also moves the ends of lines.

    An assignment of one element copies it on CUDA, too, while the CPU fills.
    """
    said = "".join(str(t).split()).replace(",device='cuda:0'", "")
    return re.sub(r"=<FillBackward\d+>", "=<CopyBackwards>", said)


def host(t):
    """A copy on the host, also where the device is the CPU: `t.cpu()` would be `t` itself there."""
    t = t.detach()
    return t.cpu() if t.device.type != "cpu" else t.to("cpu", copy=True)


def sync():
    """Wait for the device, if there is one."""
    if D == "cuda":
        torch.cuda.synchronize()


def pinned(t):
    """A pinned copy of a host tensor. A CPU without an accelerator has no pinned memory."""
    return t.pin_memory() if D == "cuda" else t.clone()


def larger(t):
    """Resize a tensor, and write the elements that it did not have, because they have no defined values."""
    there = t.untyped_storage().nbytes() // t.element_size() - t.storage_offset()
    n = max(0, min(t.numel(), there))
    t.resize_(n + 3)
    t[n:] = 1


def apart(out, *read):
    """The tensor for a result, or a new one if it is expanded or shares memory with an operand.

    Some kernels refuse such a call, and the others give anything if they resize the tensor.
    """
    memory = out.untyped_storage()
    # On the CPU, all storages without memory have one address.
    shares = memory.nbytes() and any(t.untyped_storage().data_ptr() == memory.data_ptr() for t in read)
    expanded = out.numel() and 0 in out.stride()
    return torch.zeros(out.shape, dtype=out.dtype, device=D) if shares or expanded else out


def late(call):
    """Whether a call whose index is out of bounds raises.

    The CPU looks at the index and raises an IndexError. A device reports an error of its own when somebody waits.
    """
    try:
        call()
        sync()
    except Exception:
        return True
    return False


@contextlib.contextmanager
def side_stream():
    """Work on another stream, which waits for the current one before and after. The CPU has none."""
    if D != "cuda":
        yield
        return
    here, there = torch.cuda.current_stream(), torch.cuda.Stream()
    there.wait_stream(here)
    with torch.cuda.stream(there):
        yield
    event = there.record_event()
    here.wait_event(event)


def graph(body):
    """Capture the body and return what replays it. A capture computes nothing, so the CPU begins with the first replay."""
    if D != "cuda":
        return torch.no_grad()(body)
    captured = torch.cuda.CUDAGraph()
    with side_stream():
        pass
    with torch.no_grad(), torch.cuda.graph(captured):
        body()
    return captured.replay


def compiled(function):
    """The function as `torch.compile` makes it. Inductor's code for CPUs has other last bits, so the CPU runs the function."""
    return torch.compile(function) if D == "cuda" else function


def in_thread(call):
    """Call in another thread and wait for its end."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def passed(thing, how):
    """A copy of an object that was written and read again, or copied deeply."""
    if how == "deepcopy":
        return copy.deepcopy(thing)
    if how == "pickle":
        return pickle.loads(pickle.dumps(thing))  # noqa: S301 # its own bytes
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    read = torch.load(file, weights_only=False, map_location=D if how == "map" else None)
    # The CPU's storages of a file cannot be resized.
    return read.clone() if isinstance(thing, torch.Tensor) else read


def module(seed, make):
    """A module whose parameters were drawn on the CPU, by a generator of its own: programs may run in several threads."""
    net, generator = make(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.parameters():
            p.uniform_(-0.6, 0.6, generator=generator)
    return net.to(D)


def alive(t):
    """Whether an object lives on when nothing but a weak reference to it is left."""
    return weakref.ref(t)


def collect():
    """Collect garbage."""
    gc.collect()


class Scaled(torch.autograd.Function):
    """A function of a script whose gradient depends on a saved tensor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x * factor

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x * (2 * ctx.factor), None


class Doubled(torch.autograd.Function):
    """A function of a script that writes its argument."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def written(x):
    """A function that writes views of its result."""
    y = x.clone()
    y[:1].mul_(2)
    y.view(-1)[-1:] = x.reshape(-1)[:1]
    return y.add_(x.sin())


def saved_on_host(function, x):
    """The function, whose tensors for the backward are kept on the host."""
    with torch.autograd.graph.save_on_cpu():
        return function(x)


def through_host(seed, n, views):
    """What is left of a large tensor that was written through views, copied to the host and back, and freed."""
    t = R(seed, n)
    for at in views:
        t[at::7] += t[at : at + len(t[at::7])].clone()
    h = pinned(torch.empty(n))
    h.copy_(t, non_blocking=True)
    sync()
    t.copy_(h[: n // 2].repeat(2)[:n] if n % 2 == 0 else h)
    half = host(t[: n // 2])
    del t
    return torch.cat([half[:3], half[-3:], half.sum().reshape(1), h[-3:]]).to(D)


def alone(call):
    """Call while no other thread uses forward-mode differentiation, whose levels belong to the process."""
    with LOCK:
        return call()


def dual(function, x, tangent):
    """Value and tangent of a function by forward-mode differentiation."""
    with LOCK, fwad.dual_level():
        return fwad.unpack_dual(function(fwad.make_dual(x, tangent)))


def again(function, x):
    """The function under a checkpoint, whose backward computes it again."""
    return checkpoint(function, x, use_reentrant=False)


def attend(x):
    """Attention, which is one call."""
    return F.scaled_dot_product_attention(x, x * 0.5, x.sin())


def train(net, optimizer, x, scaler=None, dtype=None):
    """One step of a training, with or without mixed precision."""
    optimizer.zero_grad()
    with torch.autocast(D, dtype or torch.bfloat16, enabled=dtype is not None):
        y = net(x)
    y = y[0] if isinstance(y, tuple) else y
    loss = y.float().square().mean()
    if scaler is None:
        loss.backward()
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return loss.detach()


def parameters(net):
    """The parameters of a module, as a list."""
    return [p for p in net.parameters() if isinstance(p, nn.Parameter)]


def halves(net):
    """Other parameters for a module."""
    return {name: p.detach() * 0.5 for name, p in net.named_parameters()}
