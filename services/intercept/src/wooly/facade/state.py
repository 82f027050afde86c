"""State that is kept and brought back: generators, and what `torch.load` reads."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from wooly.device import NAME
from wooly.facade.names import CUDA, to_wooly

Patch = tuple[Any, str, Any]


def patches() -> Iterator[Patch]:
    """(owner, name, value) of everything that is replaced for generators and loading."""
    _GeneratorMeta.real = torch.Generator
    yield (torch, "Generator", Generator)
    real_load = torch.load

    @functools.wraps(real_load)
    def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
        where = torch.device(map_location).type if isinstance(map_location, (str, torch.device)) else ""
        if where not in (CUDA, NAME):
            return real_load(f, map_location="cpu" if map_location is None else map_location, **kwargs)
        return _move(real_load(f, map_location="cpu", **kwargs))

    yield (torch, "load", load)


class _GeneratorMeta(type):
    """Lets `torch.Generator("cuda")` answer a host generator, and keeps `isinstance` true for the real class."""

    real: Any = None

    def __call__(cls, device: Any = "cpu") -> Any:
        target = to_wooly(device)
        if isinstance(target, torch.device) and target.type == NAME:
            raise NotImplementedError(
                "torch.Generator('cuda') is not supported yet; seed the device with torch.cuda.manual_seed(…)"
            )
        return cls.real(device)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.real)


class Generator(metaclass=_GeneratorMeta):
    """A generator; for "cuda", one whose seed drives the remote device."""


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
