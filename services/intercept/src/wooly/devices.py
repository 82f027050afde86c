"""The devices of this process: their recorders, the number of devices in the session, and the current device of each thread.

This file does not depend on sessions. `api` sets the number of devices.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from wooly.recorder import Recorder
from wooly.storage import DEVICE_MASK, ID_SHIFT
from wooly.torch_private import raw_device
from wooly.visible import VISIBLE, visible

NAME = "wooly"


class _Thread(threading.local):
    current = 0


class Devices:
    """All devices that the process can have. The session uses the first `count` of them.

    A rank of torchrun sees as many devices as ranks are on its machine, although its session has one device. Then all its devices
    are this one: `share`.

    Attributes:
        recorders: one recorder per device, by index.
        count: number of devices that the process sees.
        hops: copies data between the devices of the session without this process (`wooly.hops`); None: it cannot.
        offered: until the first use, the number of devices of which CUDA_VISIBLE_DEVICES chooses; None: it does not choose.
        grouped: number of operations after which a process group was made, in a process that had not used a device before; None:
            no group was made first, or the process has chosen a device since.
    """

    def __init__(self, recorders: Iterable[Recorder]) -> None:
        self.recorders = tuple(recorders)
        self.count = 1
        self.offered: int | None = None
        self.hops: Any = None
        self.grouped: int | None = None
        self._thread = _Thread()

    @property
    def current(self) -> int:
        """Index of the device that "cuda" without an index means in this thread."""
        index = self._thread.current
        return index if index < self.count else 0

    @current.setter
    def current(self, index: int) -> None:
        self._thread.current = self.check(index)
        self.grouped = None

    def look(self) -> int:
        """The number of devices. Until the first use it follows CUDA_VISIBLE_DEVICES, as in CUDA."""
        if self.offered is not None:
            self.count = visible(self.offered)
        return self.count

    def at(self, address: int) -> Recorder:
        """The recorder of the device that has an address."""
        return self.recorders[address >> ID_SHIFT & DEVICE_MASK]

    @property
    def operations(self) -> int:
        """Number of operations of all devices so far."""
        return sum([recorder.operations for recorder in self.recorders])

    def is_used(self) -> bool:
        """Whether the script has used a device. A process group alone uses none, as in CUDA: `DeviceMesh` then chooses one."""
        is_open = any(recorder.link is not None for recorder in self.recorders)
        return is_open and self.operations != self.grouped

    def require_any(self) -> None:
        """Check that there is a device.

        Raises:
            RuntimeError: there is none. It is CUDA's own error.
        """
        if not self.look():
            have = (
                "device 0, the only one" if self.offered == 1 else f"any of the devices 0 to {(self.offered or 1) - 1}"
            )
            raise RuntimeError(
                f"No CUDA GPUs are available: {VISIBLE}={os.environ.get(VISIBLE, '')!r} does not name {have}; unset it, or set "
                "WOOLYAI_GPU_COUNT to the number of devices that the program needs"
            )

    def check(self, index: int) -> int:
        """Return `index` if the session has this device.

        Raises:
            torch.AcceleratorError: the session does not have this device. It is CUDA's own error, a RuntimeError.
            RuntimeError: there is no device. It is CUDA's own error.
        """
        if not self.count:
            self.require_any()
        if not 0 <= index < self.count:
            have = "1 device" if self.count == 1 else f"{self.count} devices"
            raise torch.AcceleratorError(
                "CUDA error: invalid device ordinal\n"
                f"GPU device may be out of range, do you have enough GPUs? The program uses cuda:{index}, but this session has "
                f"{have}; set WOOLYAI_GPU_COUNT to the number of devices that the program needs"
            )
        return index

    def index_of(self, device: Any) -> int:
        """The index of a device argument: a number, a name, a `torch.device`, or None for the current device.

        Raises:
            torch.AcceleratorError: the session does not have this device. It is CUDA's own error.
            ValueError: the device is of another type. It is CUDA's own error.
        """
        if device is None:
            return self.current
        if isinstance(device, int) and not isinstance(device, bool):
            return self.check(device)
        found = torch.device(device)
        if found.type not in ("cuda", NAME):
            raise ValueError(f"Expected a cuda device, but got: {device}")
        return self.current if found.index is None else self.check(found.index)

    def share(self, *, on: bool) -> None:
        """Let all devices be one device of the session. Call it while no session is open."""
        for recorder in self.recorders[1:]:
            recorder.share(self.recorders[0] if on else None)

    def active(self) -> tuple[Recorder, ...]:
        """The recorders of the session's devices."""
        return self.recorders[: self.count]


def shown(device: torch.device) -> torch.device:
    """The device under the name that users know: a Wooly device is named "cuda"."""
    return torch.device("cuda", device.index) if device.type == NAME else device


def mixed_devices(tensors: Iterable[Tensor]) -> RuntimeError:
    """Make PyTorch's error for operands that are on different devices."""
    found = [raw_device(t) for t in tensors if t.dim() or not t.is_cpu]
    first = next((d for d in found if d.type == NAME), torch.device(NAME, 0))
    other = next((d for d in found if d != first), torch.device("cpu"))
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {shown(first)} and {shown(other)}!"
    )
