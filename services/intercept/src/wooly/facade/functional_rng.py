"""Compiled functions that get seed and offset of the random numbers as arguments (`functorch.config.functionalize_rng_ops`).

PyTorch adds to the offset what CUDA's generators would for each operator. Wooly's generators count operators, so that an eager
function draws the same numbers.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from wooly.facade.imports import AfterImport
from wooly.torch_private import random_number_primitives

_replaced: list[tuple[Any, str, Any]] = []


def activate() -> None:
    """Replace the functions now, or when a function is compiled first."""
    _compiler.activate()


def deactivate() -> None:
    """Undo `activate`."""
    _compiler.deactivate()
    while _replaced:
        setattr(*_replaced.pop())


def _install(module: ModuleType) -> None:
    tracker = module.PhiloxStateTracker
    for owner, name, value in (
        (random_number_primitives(), "philox_rand_offset", _one_operator),
        (tracker, "multiple_of_4", staticmethod(_unchanged)),
    ):
        _replaced.append((owner, name, owner.__dict__[name]))
        setattr(owner, name, value)


_compiler = AfterImport("torch._decomp.decompositions_for_rng", _install)


def _one_operator(shape: Any) -> torch.Tensor:
    return torch.scalar_tensor(1, dtype=torch.int64)


def _unchanged(offset: Any) -> Any:
    return offset
