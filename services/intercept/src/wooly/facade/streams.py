"""Streams, events and the contexts of `torch.cuda`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from wooly.device import current_devices
from wooly.facade.names import CUDA


class Stream:
    """A stream. Work of a session runs in the order of its recording, so every stream is in order with every other."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device = torch.device(CUDA, 0 if device is None else current_devices().index_of(device))
        self.priority = priority
        self.cuda_stream = 0
        self.stream_id = 0

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def wait_stream(self, stream: Any) -> None:
        """In order already."""

    def wait_event(self, event: Any) -> None:
        """In order already."""

    def record_event(self, event: Any = None) -> Any:
        event = event or torch.cuda.Event()
        event.record(self)
        return event

    def query(self) -> bool:
        torch.cuda.synchronize(self.device)
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: Any) -> None:
        return None


DEFAULT_STREAM = Stream()


class Event:
    """An event: recording waits for the work before it, so that the times between events are those of the device's work."""

    def __init__(
        self,
        synchronize: Callable[[], None],
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
    ) -> None:
        self._synchronize = synchronize
        self._timing = enable_timing
        self._at: float | None = None

    def record(self, stream: Any = None) -> None:
        if self._timing:
            self._synchronize()
        self._at = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """In order already."""

    def synchronize(self) -> None:
        self._synchronize()

    def query(self) -> bool:
        self._synchronize()
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to `end`.

        Raises:
            RuntimeError: an event has not been recorded, or was made without `enable_timing`.
        """
        if not self._timing or not end._timing:
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if self._at is None or end._at is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (end._at - self._at) * 1e3


@contextlib.contextmanager
def stream_context(stream: Any) -> Iterator[Any]:
    """`torch.cuda.stream(…)`: work is in order anyway."""
    yield stream


class device_context(contextlib.AbstractContextManager[Any]):
    """`torch.cuda.device(…)`: in the block, this thread means that device by "cuda". A negative index changes nothing."""

    def __init__(self, device: Any) -> None:
        keep = device is None or (isinstance(device, int) and device < 0)
        self.idx = -1 if keep else current_devices().index_of(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        devices = current_devices()
        self.prev_idx = devices.current
        if self.idx >= 0:
            devices.current = self.idx

    def __exit__(self, *exc: Any) -> None:
        if self.idx >= 0:
            current_devices().current = self.prev_idx


class device_of(device_context):
    """`torch.cuda.device_of(…)`: the device of a tensor; nothing for what is on none."""

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.get_device() if obj.is_cuda else -1)
