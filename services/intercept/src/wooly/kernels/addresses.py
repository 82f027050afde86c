"""Refuses `Tensor.data_ptr()` while a Python kernel of a script runs: the memory of a device tensor is on another machine.

The recorder and the capture of Triton kernels use the number behind `data_ptr`, so calls from Wooly and Triton pass.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from wooly.python_private import frame_at
from wooly.torch_private import raw_data_ptr, raw_device

_OWN = ("wooly", "triton", "torch")
_running = threading.local()
_lock = threading.Lock()
_users = 0


def _data_ptr(self: torch.Tensor) -> int:
    """`Tensor.data_ptr` while kernels of scripts run."""
    name = getattr(_running, "name", None)
    if name is not None and raw_device(self).type == "wooly":
        frame: FrameType | None = frame_at(1)
        while frame is not None and "__name__" not in frame.f_globals:
            frame = frame.f_back  # code that was generated, such as Triton's binder of arguments
        caller = frame.f_globals["__name__"] if frame is not None else ""
        if caller.partition(".")[0] not in _OWN:
            raise RuntimeError(
                f"the kernel of {name} asks for the address of a CUDA tensor (data_ptr), but the tensor's memory is on "
                "the executor; write the kernel with PyTorch's operators or Triton, or install its library on the executor "
                "and name it in WOOLY_EXECUTOR_LIBRARIES there"
            )
    return raw_data_ptr(self)


@contextmanager
def no_addresses(name: str) -> Iterator[None]:
    """Refuse `data_ptr` of device tensors in this thread, while the kernel of operator `name` runs."""
    global _users
    before = getattr(_running, "name", None)
    with _lock:
        _users += 1
        if _users == 1:
            torch.Tensor.data_ptr = _data_ptr  # type: ignore[method-assign, assignment]
    _running.name = name
    try:
        yield
    finally:
        _running.name = before
        with _lock:
            _users -= 1
            if not _users:
                del torch.Tensor.data_ptr  # the method of the base class is visible again
