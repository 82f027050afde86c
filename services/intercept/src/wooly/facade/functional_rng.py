"""Compiled functions that get seed and offset of the random numbers as arguments (`functorch.config.functionalize_rng_ops`).

PyTorch adds to the offset what CUDA's generators would for each operator. Wooly's generators count operators, so that an eager
function draws the same numbers.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from wooly.facade.imports import ReplacedAfterImport
from wooly.torch_private import random_number_primitives


def _one_operator(shape: Any) -> torch.Tensor:
    return torch.scalar_tensor(1, dtype=torch.int64)


def _unchanged(offset: Any) -> Any:
    return offset


def _patches(module: ModuleType) -> tuple[tuple[Any, str, Any], ...]:
    return (
        (random_number_primitives(), "philox_rand_offset", _one_operator),
        (module.PhiloxStateTracker, "multiple_of_4", staticmethod(_unchanged)),
    )


_compiler = ReplacedAfterImport("torch._decomp.decompositions_for_rng", _patches)
activate, deactivate = _compiler.activate, _compiler.deactivate
