"""Patches for the default dtype: plans of calls depend on it, so the client keeps the plans of each default dtype apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from wooly.device import current
from wooly.torch_private import default_dtype_patches

Patch = tuple[Any, str, Any]


def patches() -> Iterator[Patch]:
    """Yield the patches (owner, name, value) for the functions of PyTorch that set the default dtype."""
    yield from default_dtype_patches(lambda before: current().generic.change_plans(before, torch.get_default_dtype()))
