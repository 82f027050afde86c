"""Makes sparse tensors from a size. `device="cuda"` reaches the dispatcher as CUDA, so the kernels have the keys of CUDA, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wooly.devices import NAME, Devices
from wooly.kernels.sparse.arguments import components

aten = torch.ops.aten
#: For each key of sparse device tensors, the key of sparse CUDA tensors.
_CUDA_KEYS = {"SparsePrivateUse1": "SparseCUDA", "SparseCsrPrivateUse1": "SparseCsrCUDA"}


def register_factories(library: torch.library.Library, devices: Devices) -> None:
    """Register the factories that `torch.empty`, `torch.zeros` and their kin call for sparse layouts.

    The kernels for device keys exist already, but for the one that PyTorch's own code cannot do.
    """

    def on_device(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any, device: torch.device | None = None, **kwargs: Any) -> Tensor:
            return factory(*args, device=torch.device(NAME, devices.index_of(device)), **kwargs)

        return run

    for key in _CUDA_KEYS.values():
        library.impl("empty.memory_format", on_device(aten.empty.memory_format), key)
    own = {"_sparse_compressed_tensor_with_dims": _with_dims, "zeros": _zeros}
    for name, factory in own.items():
        for key in ("SparseCsrPrivateUse1", _CUDA_KEYS["SparseCsrPrivateUse1"]):
            library.impl(name, on_device(factory), key)


def _with_dims(*args: Any, device: torch.device, pin_memory: bool | None = None, **options: Any) -> Tensor:
    """`aten._sparse_compressed_tensor_with_dims`: a compressed tensor with a number of elements. Its content is undefined.

    PyTorch's own code makes it only for the device types of a list. So that code makes one without memory, for its sizes.
    """
    model = aten._sparse_compressed_tensor_with_dims.default(*args, device=torch.device("meta"), **options)
    indices, values = components(model)
    own = [torch.empty(t.shape, dtype=t.dtype, device=device) for t in (*indices, values)]
    with torch.sparse.check_sparse_tensor_invariants(enable=False):
        return aten._sparse_compressed_tensor_unsafe(  # type: ignore[no-any-return]
            *own, model.shape, dtype=model.dtype, layout=model.layout, device=device
        )


def _zeros(size: list[int], *, device: torch.device, pin_memory: bool | None = None, **options: Any) -> Tensor:
    """`aten.zeros`: a compressed tensor without elements."""
    model = aten.zeros.default(size, device=torch.device("cpu"), **options)
    return model.to(device)  # type: ignore[no-any-return]
