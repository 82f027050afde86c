"""Patches for saved state: generators, and the storages that `torch.save` and `torch.load` use."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from wooly.devices import NAME
from wooly.facade.names import CUDA, to_wooly
from wooly.rng import DeviceGenerator
from wooly.torch_private import BaseGenerator, raw_storage_device

Patch = tuple[Any, str, Any]


def patches() -> Iterator[Patch]:
    """Yield the patches (owner, name, value) for generators and storages."""
    yield (torch, "Generator", Generator)
    # The functions of torch.cuda.random stay PyTorch's own, and use Wooly's generators.
    module = torch.wooly  # type: ignore[attr-defined]
    yield (torch.cuda, "default_generators", module.default_generators)
    yield (torch.cuda.random, "_lazy_init", module.require_same_process)
    yield (torch.cuda.random, "_lazy_call", lambda callable, **kwargs: callable())
    yield (torch.cuda.random, "is_initialized", module.is_initialized)
    yield (torch.cuda.random, "device_count", module.device_count)
    yield (torch.cuda.random, "current_device", module.current_device)
    yield from _storage_patches()


def _storage_patches() -> Iterator[Patch]:
    """Yield the patches for storages: they report and accept the device "cuda". `torch.save` and `torch.load` need only this."""
    storage = torch.UntypedStorage
    real_to: Any = storage.to
    real_new: Any = storage.__new__

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        target = to_wooly(kwargs.get("device"))
        if not isinstance(target, torch.device) or target.type != NAME:
            return real_new(cls, *args, **kwargs)
        if args and not isinstance(args[0], int):
            return real_new(cls, args[0]).to(device=target)
        return torch.empty(args[0] if args else 0, dtype=torch.uint8, device=target).untyped_storage()

    @functools.wraps(real_to)
    def to(self: torch.UntypedStorage, *, device: Any, non_blocking: bool = False) -> torch.UntypedStorage:
        target = to_wooly(device)
        if raw_storage_device(self).type == NAME:
            return self if target == raw_storage_device(self) else bytes_of(self).to(target).untyped_storage()
        if not isinstance(target, torch.device) or target.type != NAME:
            moved: torch.UntypedStorage = real_to(self, device=device, non_blocking=non_blocking)
            return moved
        return bytes_of(self).to(target).untyped_storage()

    def cuda(self: torch.UntypedStorage, device: Any = None, non_blocking: bool = False) -> torch.UntypedStorage:
        """`UntypedStorage.cuda`: the storage itself if it is on the device, else a copy on the device."""
        return to(self, device=CUDA if device is None else device, non_blocking=non_blocking)

    def device(self: torch.UntypedStorage) -> torch.device:
        """Device of the storage; a Wooly device is reported as "cuda"."""
        real = raw_storage_device(self)
        return torch.device(CUDA, real.index) if real.type == NAME else real

    yield (storage, "__new__", staticmethod(new))
    yield (storage, "to", to)
    yield (storage, "cuda", cuda)
    yield (storage, "device", property(device))


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """The whole storage as a tensor of bytes."""
    empty = torch.empty(0, dtype=torch.uint8, device=raw_storage_device(storage))
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))


class _GeneratorMeta(type):
    """Makes `torch.Generator("cuda")` return a `DeviceGenerator`. `isinstance` stays true for PyTorch's generators."""

    def __call__(cls, device: Any = "cpu") -> Any:
        target = to_wooly(device)
        if isinstance(target, torch.device) and target.type == NAME:
            return DeviceGenerator(target.index)
        return BaseGenerator(device)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, BaseGenerator)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, BaseGenerator)


class Generator(metaclass=_GeneratorMeta):
    """`torch.Generator`. For "cuda" it makes a generator for operators on the Wooly device."""

    __doc__ = BaseGenerator.__doc__


# Pickles then contain the name of PyTorch's class, so they can be read without Wooly.
Generator.__module__ = "torch"
