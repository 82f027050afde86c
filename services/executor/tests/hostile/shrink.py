"""Makes calls smaller: fewer arguments, smaller tensors, the same number everywhere."""

from dataclasses import replace

import torch
from call import Memory, Window, windows_of


def simpler(call):
    """Yield calls that are a little simpler, the largest simplification first."""
    for flag in ("read", "unsaid"):
        if getattr(call, flag):
            yield replace(call, **{flag: ()})
    if call.late:
        yield replace(call, late=False)
    for k in range(len(call.kwargs)):
        yield replace(call, kwargs=call.kwargs[:k] + call.kwargs[k + 1 :])
    declared = call.schema.arguments
    if call.args and declared[len(call.args) - 1].has_default_value():
        yield replace(call, args=call.args[:-1])
    yield from _other_shapes(call)
    yield from _simpler_numbers(call)
    yield from _uniform_contents(call)


def _replaceable(call):
    """Yield (argument, function that replaces its value) for each argument."""
    for k, value in enumerate(call.args):
        yield value, lambda v, k=k: replace(call, args=call.args[:k] + (v,) + call.args[k + 1 :])
    for k, (name, value) in enumerate(call.kwargs):
        yield (
            value,
            lambda v, k=k, name=name: replace(call, kwargs=call.kwargs[:k] + ((name, v),) + call.kwargs[k + 1 :]),
        )


def _other_shapes(call):
    """Yield calls with tensors of other shapes."""
    shared = [w.memory for w in windows_of((call.args, call.kwargs))]
    for value, at in _replaceable(call):
        if isinstance(value, tuple) and any(isinstance(v, Window) for v in value):
            for k in range(len(value)):
                yield at(value[:k] + value[k + 1 :])
        if not isinstance(value, Window):
            continue
        dense = tuple(torch.empty(value.sizes, device="meta").stride())
        if shared.count(value.memory) > 1 or value.strides != dense or value.offset:
            yield _with_dense_tensor(call, at, value, value.sizes)
        for k, n in enumerate(value.sizes):
            for less in dict.fromkeys((n // 2, n - 1)):
                if 0 < less < n:
                    yield _with_dense_tensor(call, at, value, value.sizes[:k] + (less,) + value.sizes[k + 1 :])
        if len(value.sizes) > 8:
            yield _with_dense_tensor(call, at, value, value.sizes[: len(value.sizes) // 2])


def _with_dense_tensor(call, at, w, sizes):
    """Return the call with a dense tensor of this size and dtype, filled with the first numbers of the old tensor."""
    n = torch.Size(sizes).numel() * w.dtype.itemsize
    raw = call.memories[w.memory].raw[w.offset * w.dtype.itemsize :] or bytes(w.dtype.itemsize)
    raw = (raw * (n // len(raw) + 1))[:n]
    strides = tuple(torch.empty(sizes, device="meta").stride())
    made = at(Window(len(call.memories), w.dtype, tuple(sizes), strides))
    return replace(made, memories=(*made.memories, Memory(w.dtype, raw))).tidy()


def _simpler_numbers(call):
    """Yield calls with simpler numbers."""
    for value, at in _replaceable(call):
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value not in (0, 1):
            yield at(type(value)(1))
            yield at(type(value)(0))
        if isinstance(value, tuple) and value and not any(isinstance(v, (Window, tuple, type(None))) for v in value):
            for plain in (1, 0):
                if any(v != plain for v in value):
                    yield at((type(value[0])(plain),) * len(value))


def _uniform_contents(call):
    """Yield calls in which a memory has the same number everywhere."""
    for k, memory in enumerate(call.memories):
        size, n = memory.dtype.itemsize, len(memory.raw) // memory.dtype.itemsize
        if not n:
            continue
        one = torch.ones((), dtype=torch.float32).to(memory.dtype).reshape(1).view(torch.uint8).numpy().tobytes()
        found = [memory.raw[at : at + size] for at in range(0, n * size, size)]
        for unit in (one, bytes(size), found[0], found[-1]):
            if any(f != unit for f in found):
                yield replace(
                    call, memories=call.memories[:k] + (Memory(memory.dtype, unit * n),) + call.memories[k + 1 :]
                )
