"""State that is kept and brought back: generators, and the storages that `torch.save` and `torch.load` see."""

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
    """(owner, name, value) of everything that is replaced for generators and storages."""
    yield (torch, "Generator", Generator)
    # The functions of torch.cuda.random are PyTorch's own, on generators of ours.
    module = torch.wooly  # type: ignore[attr-defined]
    yield (torch.cuda, "default_generators", module.default_generators)
    yield (torch.cuda.random, "_lazy_init", module.require_same_process)
    yield (torch.cuda.random, "_lazy_call", lambda callable, **kwargs: callable())
    yield (torch.cuda.random, "is_initialized", lambda: True)
    yield (torch.cuda.random, "device_count", module.device_count)
    yield (torch.cuda.random, "current_device", module.current_device)
    yield from _storage_patches()


def _storage_patches() -> Iterator[Patch]:
    """A storage that says and takes "cuda": `torch.save` and `torch.load` need no more than that."""
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
            return self if target == raw_storage_device(self) else _bytes(self).to(target).untyped_storage()
        if not isinstance(target, torch.device) or target.type != NAME:
            moved: torch.UntypedStorage = real_to(self, device=device, non_blocking=non_blocking)
            return moved
        return _bytes(self).to(target).untyped_storage()

    def cuda(self: torch.UntypedStorage, device: Any = None, non_blocking: bool = False) -> torch.UntypedStorage:
        """The storage, or a copy of it on the device."""
        return to(self, device=CUDA if device is None else device, non_blocking=non_blocking)

    def device(self: torch.UntypedStorage) -> torch.device:
        """Device of the storage; the Wooly device says cuda:0."""
        real = raw_storage_device(self)
        return torch.device(CUDA, real.index) if real.type == NAME else real

    def share(self: torch.UntypedStorage, *args: Any) -> Any:
        raise NotImplementedError(
            "memory of the wooly device cannot be shared with another process; send tensor.cpu() instead"
        )

    yield (storage, "__new__", staticmethod(new))
    yield (storage, "to", to)
    yield (storage, "cuda", cuda)
    yield (storage, "device", property(device))
    yield (storage, "_share_cuda_", share)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """The whole storage as a tensor of bytes."""
    empty = torch.empty(0, dtype=torch.uint8, device=raw_storage_device(storage))
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))


class _GeneratorMeta(type):
    """Lets `torch.Generator("cuda")` answer a generator of ours, and keeps `isinstance` true for PyTorch's class."""

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
    """`torch.Generator`; for "cuda" it makes one that the device's operators draw from."""

    __doc__ = BaseGenerator.__doc__


# Pickles name it as PyTorch's own, so that they can be read without Wooly.
Generator.__module__ = "torch"
