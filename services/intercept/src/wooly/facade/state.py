"""State that is kept and brought back: generators, and what `torch.load` reads."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from wooly.device import NAME
from wooly.facade.names import CUDA, to_wooly
from wooly.rng import DeviceGenerator

Patch = tuple[Any, str, Any]


def patches() -> Iterator[Patch]:
    """(owner, name, value) of everything that is replaced for generators and loading."""
    yield (torch, "Generator", Generator)
    # The functions of torch.cuda.random are PyTorch's own, on generators of ours.
    module = torch.wooly  # type: ignore[attr-defined]
    yield (torch.cuda, "default_generators", module.default_generators)
    yield (torch.cuda.random, "_lazy_init", lambda: None)
    yield (torch.cuda.random, "_lazy_call", lambda callable, **kwargs: callable())
    yield (torch.cuda.random, "is_initialized", lambda: True)
    yield (torch.cuda.random, "device_count", module.device_count)
    yield (torch.cuda.random, "current_device", module.current_device)
    real_load = torch.load

    @functools.wraps(real_load)
    def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
        where = torch.device(map_location).type if isinstance(map_location, (str, torch.device)) else ""
        if where not in (CUDA, NAME):
            return real_load(f, map_location="cpu" if map_location is None else map_location, **kwargs)
        return _move(real_load(f, map_location="cpu", **kwargs))

    yield (torch, "load", load)


class _GeneratorMeta(type):
    """Lets `torch.Generator("cuda")` answer a generator of ours, and keeps `isinstance` true for PyTorch's class."""

    def __call__(cls, device: Any = "cpu") -> Any:
        target = to_wooly(device)
        if isinstance(target, torch.device) and target.type == NAME:
            return DeviceGenerator(target.index)
        return torch._C.Generator(device)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch._C.Generator)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, torch._C.Generator)


class Generator(metaclass=_GeneratorMeta):
    """`torch.Generator`; for "cuda" it makes one that the device's operators draw from."""

    __doc__ = torch._C.Generator.__doc__


# Pickles name it as PyTorch's own, so that they can be read without Wooly.
Generator.__module__ = "torch"


def _move(value: Any) -> Any:
    """Loaded objects, every tensor on the device; shared storages stay shared."""
    from torch.utils._pytree import tree_map

    moved: dict[int, torch.Tensor] = {}

    def one(t: Any) -> Any:
        if isinstance(t, torch.nn.Module):
            return t.to(torch.device(NAME, 0))
        if not isinstance(t, torch.Tensor):
            return t
        key = t.untyped_storage().data_ptr()
        whole = moved.get(key)
        if whole is None:
            flat = torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage(), 0, (t.untyped_storage().nbytes(),), (1,))
            whole = moved[key] = flat.to(torch.device(NAME, 0))
        with torch.no_grad():
            out = torch.empty(0, dtype=t.dtype, device=torch.device(NAME, 0)).set_(
                whole.untyped_storage(), t.storage_offset(), t.shape, t.stride()
            )
        if isinstance(t, torch.nn.Parameter):
            return torch.nn.Parameter(out, t.requires_grad)
        return out.requires_grad_(t.requires_grad)

    return tree_map(one, value)
