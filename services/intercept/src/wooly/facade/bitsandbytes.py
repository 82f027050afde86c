"""bitsandbytes: the kernel of its optimizers with 8-bit states, and the memory of its paged optimizers.

Most of its operators have kernels made of PyTorch's operators, which run as they are. Those for optimizers with 8-bit states are
in its library for CUDA, which needs addresses, and in Triton. That library also allocates the memory of paged optimizers. Here it
is memory of the device, because the executor itself moves what does not fit.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from wooly.devices import NAME
from wooly.facade.imports import AfterImport

_OPERATOR = "bitsandbytes::optimizer_update_8bit_blockwise"
#: The registered kernel. It stays registered while its library exists.
_libraries: list[torch.library.Library] = []
#: The optimizer's class and its method for the memory of a state, while ours is in its place.
_replaced: list[tuple[Any, Any]] = []


def _update_8bit(*args: Any, **kwargs: Any) -> None:
    from bitsandbytes.backends.triton import ops  # asks at its import which device there is

    ops.optimizer_update_8bit_blockwise(*args, **kwargs)


def _install(module: ModuleType) -> None:
    if not _libraries:
        library = torch.library.Library("bitsandbytes", "IMPL")
        torch.library.register_kernel(_OPERATOR, NAME, _update_8bit, lib=library)
        _libraries.append(library)
    optimizer = module.optim.optimizer.Optimizer8bit
    own = optimizer.get_state_buffer

    def get_state_buffer(self: Any, p: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        if p.device.type == "cuda":
            return torch.zeros_like(p, dtype=dtype)
        found: torch.Tensor = own(self, p, dtype)
        return found

    optimizer.get_state_buffer = get_state_buffer
    _replaced.append((optimizer, own))


_waiting = AfterImport("bitsandbytes", _install)


def activate() -> None:
    """Adapt bitsandbytes, now or when it is imported."""
    if not _replaced:
        _waiting.activate()


def deactivate() -> None:
    """Undo `activate`, except for the kernel, which only tensors of the device reach."""
    _waiting.deactivate()
    while _replaced:
        optimizer, own = _replaced.pop()
        optimizer.get_state_buffer = own
