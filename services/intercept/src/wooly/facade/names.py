"""Which device arguments mean the Wooly device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from wooly.device import current_devices
from wooly.devices import NAME

CUDA = "cuda"


def to_wooly(device: Any) -> Any:
    """A device argument with "cuda" read as the Wooly device; anything else unchanged.

    Raises:
        RuntimeError: CUDA's own error for an index that does not exist.
    """
    if isinstance(device, str):
        if not device.startswith(CUDA):
            return device
        device = torch.device(device)
    elif isinstance(device, int) and not isinstance(device, bool):
        device = torch.device(CUDA, device)
    if isinstance(device, torch.device) and device.type == CUDA:
        return torch.device(NAME, current_devices().index_of(device))
    return device


def with_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its `device` keyword read by `to_wooly`."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = to_wooly(kwargs["device"])
        return function(*args, **kwargs)

    return call
