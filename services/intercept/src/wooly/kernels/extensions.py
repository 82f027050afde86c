"""Calls of extension operators: operators that other libraries than PyTorch, or scripts, register with `torch.library` or C++.

The kernel for such a call is, in this order:

1. the executor's, if the executor offers the operator with the same schema. The call is recorded as one instruction.
2. a Python function that is registered for CUDA, or for all devices. It runs here, and the operators that it calls are recorded.
3. an error that says what is missing and what to do.

PyTorch itself runs functions for all devices before it asks this file, and decomposes operators that are registered so.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wooly.devices import Devices
from wooly.kernels.addresses import no_addresses
from wooly.kernels.generic import Generic
from wooly.kernels.schema import Kernel
from wooly.link import Link
from wooly.torch_private import (
    OpOverload,
    below_autocast,
    has_kernel,
    python_body,
    raw_device,
    schema_of,
    tree_leaves,
    tree_map,
)

#: Operators of torchvision that autocast computes in float32 on CUDA. The results get the dtype of the first argument.
IN_FLOAT32 = ("nms", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")


class _Resolved(NamedTuple):
    """The kernel of an operator for the executor behind `link`."""

    link: Link
    kernel: Callable[..., Any]


class Extensions:
    """The fallback of all operators without a kernel of their own.

    Args:
        devices: the devices of this process.
        generic: makes kernels that record a call.
        unsupported: raises the error for PyTorch's own operators.
    """

    def __init__(self, devices: Devices, generic: Generic, unsupported: Callable[..., Any]) -> None:
        self._devices = devices
        self._generic = generic
        self._unsupported = unsupported
        self._recorded: dict[OpOverload, Kernel] = {}
        self._resolved: dict[tuple[OpOverload, int], _Resolved] = {}

    def __call__(self, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
        """Run one call.

        Raises:
            NotImplementedError: neither the executor nor this process has a kernel for the operator.
        """
        index = self._device_of(args, kwargs)
        link = self._devices.recorders[index].require_link()
        found = self._resolved.get((op, index))
        if found is None or found.link is not link:
            found = _Resolved(link, self._kernel(op, link))
            if not isinstance(found.kernel, _Failing):  # a script may register a function later
                self._resolved[op, index] = found
        return found.kernel(*args, **kwargs)

    def _device_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        for a in tree_leaves((args, kwargs)):
            if isinstance(a, Tensor) and raw_device(a).type == "wooly":
                return raw_device(a).index or 0
        return self._devices.current

    def _kernel(self, op: OpOverload, link: Link) -> Callable[..., Any]:
        if op.namespace in ("aten", "prims", "quantized"):
            return lambda *args, **kwargs: self._unsupported(op, *args, **kwargs)
        name, mine = str(op), hashlib.sha256(str(schema_of(op)).encode()).hexdigest()[:16]
        body = python_body(op)
        missing = ""
        for library, facts in link.device.get("libraries", {}).items():
            theirs = facts["operators"].get(name)
            if theirs is None:
                continue
            if name in facts.get("withheld", ()):
                missing = (
                    f"the executor offers it with {library} {facts['version']}, but cannot check its loads and stores, so it "
                    "needs the permission opaque_kernels; ask an administrator for it: PUT /api/v1/tenants/NAME with "
                    '{"opaque_kernels": true}'
                )
            elif theirs != mine:
                missing = (
                    f"its arguments differ between {library} {_own_version(library)} here and {library} {facts['version']} on "
                    "the executor; install the same version on both sides"
                )
            else:
                kernel = self._recorded.get(op)
                if kernel is None:
                    kernel = self._recorded[op] = self._generic.kernel(op)
                return kernel
        if body is not None:
            return lambda *args, **kwargs: _run_here(op, body, args, kwargs)
        return _Failing(op, missing or _not_offered(op, link))


def register_autocast() -> torch.library.Library:
    """Register the autocast rules of torchvision's operators. The library may be imported later, or never."""
    library = torch.library.Library("torchvision", "IMPL")
    for name in IN_FLOAT32:
        library.impl(name, partial(_in_float32, name), "AutocastPrivateUse1")
    return library


def _in_float32(name: str, *args: Any, **kwargs: Any) -> Any:
    call, dtype = below_autocast(getattr(torch.ops.torchvision, name).default), args[0].dtype
    result = call(*tree_map(_widened, (args, kwargs)))
    return result if name == "nms" else tree_map(lambda t: t.to(dtype), result)


def _widened(a: Any) -> Any:
    return a.to(torch.float32) if isinstance(a, Tensor) and a.is_floating_point() else a


def _run_here(op: OpOverload, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with no_addresses(str(op)):
        return body(*args, **kwargs)


def _own_version(library: str) -> str:
    """The version of a library in this process."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get(library), "__version__", "of another version"))


def _not_offered(op: OpOverload, link: Link) -> str:
    libraries = link.device.get("libraries", {})
    known = ", ".join([f"{name} {facts['version']}" for name, facts in libraries.items()]) or "no extension library"
    native = any(has_kernel(op.name(), key) for key in ("CPU", "CUDA"))
    cure = (
        f"install the library that registers {op.namespace} on the executor and add its import name to "
        "WOOLY_EXECUTOR_LIBRARIES there"
    )
    if not native:
        cure += ", or register a Python function for it: torch.library.register_kernel(NAME, 'cuda', FUNCTION)"
    return f"the executor offers {known}, and no Python function is registered for it under CUDA; {cure}"


class _Failing:
    """The kernel of an operator that has none."""

    def __init__(self, op: OpOverload, why: str) -> None:
        self._op = op
        self._why = why

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{self._op} is not supported on the wooly device: {self._why}; or compute it on the CPU: x.cpu()"
        )
