"""Translates device arguments: "cuda" means the Wooly device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from wooly.device import current_devices
from wooly.devices import NAME

CUDA = "cuda"


def to_wooly(device: Any) -> Any:
    """Translate a device argument: "cuda" becomes the Wooly device. Other values do not change.

    Raises:
        RuntimeError: the session does not have this device. It is CUDA's own error.
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


def naming_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function whose errors contain the device of a tensor, so that they call it "cuda"."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError) as e:
            said = str(e)
            if f"{NAME}:" not in said:
                raise
            raise type(e)(said.replace(f"{NAME}:", f"{CUDA}:")).with_traceback(e.__traceback__) from None

    return call


def with_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` so that its keyword argument `device` is translated by `to_wooly`."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = to_wooly(kwargs["device"])
        return function(*args, **kwargs)

    return call
