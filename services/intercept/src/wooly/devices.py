"""The process's devices: their recorders, how many of them the session has, and which one each thread means by "cuda".

Knows nothing of sessions beyond their number of devices; `api` sets it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from wooly.recorder import Recorder
from wooly.torch_private import raw_device

NAME = "wooly"


class _Thread(threading.local):
    current = 0


class Devices:
    """All devices that the process can have. A recorder without a link belongs to none of the session's.

    Attributes:
        recorders: one for each device, by index.
        count: devices that the session has.
    """

    def __init__(self, recorders: Iterable[Recorder]) -> None:
        self.recorders = tuple(recorders)
        self.count = 1
        self._thread = _Thread()

    @property
    def current(self) -> int:
        """The device that this thread means where it names none."""
        index = self._thread.current
        return index if index < self.count else 0

    @current.setter
    def current(self, index: int) -> None:
        self._thread.current = self.check(index)

    def check(self, index: int) -> int:
        """The index itself, if there is such a device.

        Raises:
            torch.AcceleratorError: CUDA's own error, a RuntimeError, if there is none.
        """
        if not 0 <= index < self.count:
            have = "1 device" if self.count == 1 else f"{self.count} devices"
            raise torch.AcceleratorError(
                "CUDA error: invalid device ordinal\n"
                f"GPU device may be out of range, do you have enough GPUs? This session has {have}, cuda:{index} was asked "
                "for; WOOLYAI_GPU_COUNT says how many to ask for"
            )
        return index

    def index_of(self, device: Any) -> int:
        """The index that a device argument means: a number, a name, a `torch.device`, or None for the current one.

        Raises:
            torch.AcceleratorError: CUDA's own error if there is no such device.
            ValueError: CUDA's own error for a device of another type.
        """
        if device is None:
            return self.current
        if isinstance(device, int) and not isinstance(device, bool):
            return self.check(device)
        found = torch.device(device)
        if found.type not in ("cuda", NAME):
            raise ValueError(f"Expected a cuda device, but got: {device}")
        return self.current if found.index is None else self.check(found.index)

    def active(self) -> tuple[Recorder, ...]:
        """The recorders of the session's devices."""
        return self.recorders[: self.count]


def shown(device: torch.device) -> torch.device:
    """A device as users know it: the Wooly device is "cuda"."""
    return torch.device("cuda", device.index) if device.type == NAME else device


def mixed_devices(tensors: Iterable[Tensor]) -> RuntimeError:
    """PyTorch's error for operands that are not on one device."""
    found = [raw_device(t) for t in tensors if t.dim() or not t.is_cpu]
    first = next((d for d in found if d.type == NAME), torch.device(NAME, 0))
    other = next((d for d in found if d != first), torch.device("cpu"))
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {shown(first)} and {shown(other)}!"
    )
