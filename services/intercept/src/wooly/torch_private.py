"""Every private name of PyTorch that Wooly leans on, in one place, so that a new torch release is checked in one file.

Checked against torch 2.11 to 2.13. Nothing here knows what Wooly does with it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch._prims_common.wrappers as prims_wrappers
from torch._C import DispatchKey, DispatchKeySet
from torch._C._dynamo.guards import _reinterpret_tensor
from torch._prims_common import suggest_memory_format
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

TensorBase: Any = torch._C.TensorBase
#: The getters that C++ defines, reachable even after the facade has put its own properties on `torch.Tensor`.
raw_device: Callable[[torch.Tensor], torch.device] = TensorBase.device.__get__
raw_is_cuda: Callable[[torch.Tensor], bool] = TensorBase.is_cuda.__get__

#: `from_dlpack(capsule) -> Tensor`, without the Python wrapper's device negotiation.
from_dlpack: Callable[[object], torch.Tensor] = torch._C._from_dlpack

#: `reinterpret(t, sizes, strides, storage_offset_increment)`: a new tensor on the storage of `t`, metadata only (0.7 us).
reinterpret: Callable[..., torch.Tensor] = _reinterpret_tensor

#: The memory format that ATen's kernels take a tensor to be in, from its strides.
suggested_format: Callable[[torch.Tensor], torch.memory_format] = suggest_memory_format

CPU_KEYS = DispatchKeySet(DispatchKey.CPU)


def register_backend(name: str, module: Any) -> None:
    """Make `name` the PrivateUse1 device type, with `module` as `torch.<name>`."""
    _setup_privateuseone_for_python_backend(name, backend_module=module)


def warn_of_resize(out: torch.Tensor, shape: Any) -> None:
    """ATen's warning for an `out=` tensor that had elements and takes another shape."""
    if out.numel():
        warnings.warn(
            f"An output with one or more elements was resized since it had shape {list(out.shape)}, which does not match "
            f"the required output shape {list(shape)}. This behavior is deprecated, and in a future PyTorch release "
            "outputs will not be resized unless they have zero elements. You can explicitly reuse an out tensor t by "
            "resizing it, inplace, to zero elements with t.resize_(0).",
            stacklevel=3,
        )


def word_resizes_as_aten_does() -> None:
    """Let PyTorch's meta kernels in Python warn of a resized `out=` in the words of those in C++."""

    def check(out: torch.Tensor, shape: Any) -> bool:
        if tuple(out.shape) == tuple(shape):
            return False
        warn_of_resize(out, shape)
        return True

    prims_wrappers._resize_output_check = check


def redispatch_cpu(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """A callable that runs the CPU kernel of `op` on tensors of any device: right only where it touches metadata alone."""
    call = op._handle.redispatch_boxed

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(CPU_KEYS, *args, **kwargs)

    return run


def has_kernel(op_name: str, key: str) -> bool:
    """Whether `op_name` ("aten::add.Tensor") has a kernel registered directly for the dispatch key `key`."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op_name, key)


def all_aten_overloads() -> list[torch._ops.OpOverload]:
    """Every overload of the aten namespace that this torch build knows, in a stable order."""
    found = []
    for qualified in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, rest = qualified.partition("::")
        if namespace != "aten":
            continue
        name, _, overload = rest.partition(".")
        packet = getattr(torch.ops.aten, name, None)
        op = getattr(packet, overload or "default", None)
        if isinstance(op, torch._ops.OpOverload):
            found.append(op)
    return found
