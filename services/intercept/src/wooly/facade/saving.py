"""Lets `torch.save` and safetensors read many small tensors with one wait.

Both read their tensors one by one. On a GPU beside the process, this costs microseconds; here, each read would be a round trip.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from wooly.device import current
from wooly.devices import NAME
from wooly.facade.imports import ReplacedAfterImport
from wooly.facade.state import bytes_of
from wooly.read_ahead import SMALL, TOGETHER
from wooly.torch_private import raw_device, raw_storage_device


class _Saving(threading.local):
    """The small device storages that a thread saves and has not read yet, in the order in which it will, by their memory."""

    storages: dict[int, torch.UntypedStorage] | None = None


_saving = _Saving()


def patches() -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches (owner, name, value) for `torch.save`, which notes all storages before it reads the first one."""
    real_save, real_tag = torch.save, torch.serialization.location_tag
    real_cpu: Callable[[torch.UntypedStorage], torch.UntypedStorage] = torch.UntypedStorage.cpu

    @functools.wraps(real_save)
    def save(*args: Any, **kwargs: Any) -> None:
        before, _saving.storages = _saving.storages, {}
        try:
            real_save(*args, **kwargs)
        finally:
            _saving.storages = before

    @functools.wraps(real_tag)
    def location_tag(storage: Any) -> Any:
        noted, untyped = _saving.storages, getattr(storage, "_untyped_storage", storage)
        if noted is not None and raw_storage_device(untyped).type == NAME and 0 < untyped.nbytes() <= SMALL:
            noted[untyped.data_ptr()] = untyped
        return real_tag(storage)

    @functools.wraps(real_cpu)
    def cpu(self: torch.UntypedStorage) -> torch.UntypedStorage:
        noted = _saving.storages
        if noted and raw_storage_device(self).type == NAME and self.data_ptr() in noted:
            first = list(itertools.islice(noted, TOGETHER))
            current().reading.read_together([bytes_of(noted.pop(at)) for at in first])
        return real_cpu(self)

    yield (torch, "save", save)
    yield (torch.serialization, "save", save)
    yield (torch.serialization, "location_tag", location_tag)
    yield (torch.UntypedStorage, "cpu", cpu)


def _safetensors_patches(module: ModuleType) -> list[tuple[Any, str, Any]]:
    return [(module, name, _reading_together(getattr(module, name))) for name in ("save", "save_file")]


def _reading_together(real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def save(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensors, dict):
            small = iter([t for t in tensors.values() if _is_small(t)])
            while group := list(itertools.islice(small, TOGETHER)):
                current().reading.read_together(group)
        return real(tensors, *args, **kwargs)

    return save


def _is_small(t: Any) -> bool:
    if type(t) not in (torch.Tensor, torch.nn.Parameter) or t.layout is not torch.strided:
        return False
    return (
        raw_device(t).type == NAME and 0 < t.nbytes <= SMALL and t.is_contiguous() and not (t.is_conj() or t.is_neg())
    )


_safetensors = ReplacedAfterImport("safetensors.torch", _safetensors_patches)
activate, deactivate = _safetensors.activate, _safetensors.deactivate
