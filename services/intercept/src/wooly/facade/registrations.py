"""Kernels in Python that PyTorch and scripts register for CUDA's dispatch keys. They hold for the keys of the device, too.

These are the kernels of autocast and autograd that `torch.library` registers, and all kernels of operators on functions
(`torch.ops.higher_order`, such as flex attention). Kernels of `torch.library` under the key CUDA are found by their calls
(`wooly.kernels.extensions`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from wooly.torch_private import (
    DispatchKey,
    HigherOrderOperator,
    falls_through,
    higher_order_operators,
    python_kernels,
    python_registrations,
    redispatch_to,
    without_autocast,
)

#: CUDA's keys, and those of the device.
_KEYS = {
    getattr(DispatchKey, of_cuda): getattr(DispatchKey, of_device)
    for of_cuda, of_device in (
        ("CUDA", "PrivateUse1"),
        ("AutogradCUDA", "AutogradPrivateUse1"),
        ("AutocastCUDA", "AutocastPrivateUse1"),
    )
}
#: The same, as `torch.library` names them.
_NAMES = {
    "Autocast": "AutocastPrivateUse1",
    "AutocastCUDA": "AutocastPrivateUse1",
    "AutogradCUDA": "AutogradPrivateUse1",
}
#: Libraries of kernels that were registered before the facade was installed.
_libraries: list[torch.library.Library] = []
_AUTOCAST = DispatchKey.AutocastPrivateUse1  # type: ignore[attr-defined]


class _Copied:
    """A kernel of CUDA's key, registered for the device's. A kernel that is registered for the device itself replaces it."""

    def __init__(self, kernel: Callable[..., Any]) -> None:
        self._kernel = kernel

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._kernel(*args, **kwargs)


def patches() -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches (owner, name, value), for kernels that are registered later; register those that exist."""
    yield from _patches_of_library()
    yield from _patches_of_operators_on_functions()


def _patches_of_library() -> Iterator[tuple[Any, str, Any]]:
    register: Callable[..., None] = torch.library.Library.impl

    def impl(library: Any, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
        register(library, op_name, fn, dispatch_key, **options)
        key = _NAMES.get(dispatch_key or library.dispatch_key)
        if key is not None:
            # A kernel of autocast excludes CUDA's key before it calls the operator again.
            again = key == "AutocastPrivateUse1" and fn is not torch.library.fallthrough_kernel
            register(library, op_name, without_autocast(fn) if again else fn, key, **options)

    for of_cuda in ("AutocastCUDA", "AutogradCUDA"):
        for op in python_registrations(of_cuda, _NAMES[of_cuda]):
            library = torch.library.Library(op.namespace, "IMPL")
            _libraries.append(library)
            kernel = redispatch_to(op, of_cuda)
            register(library, op, without_autocast(kernel) if of_cuda == "AutocastCUDA" else kernel, _NAMES[of_cuda])
    yield torch.library.Library, "impl", impl


def _patches_of_operators_on_functions() -> Iterator[tuple[Any, str, Any]]:
    register, pass_by = HigherOrderOperator.py_impl, HigherOrderOperator.fallthrough

    def copy_kernel(op: HigherOrderOperator, key: Any, kernel: Callable[..., Any]) -> None:
        # A kernel of autocast excludes CUDA's key before it calls the operator again.
        copied = _Copied(without_autocast(kernel) if key == _AUTOCAST else kernel)
        if isinstance(python_kernels(op).get(key), _Copied):
            del python_kernels(op)[key]
        if key not in python_kernels(op):
            register(op, key)(copied)

    def py_impl(op: HigherOrderOperator, key: Any) -> Any:
        def inner(kernel: Callable[..., Any]) -> Any:
            if key in _KEYS.values() and isinstance(python_kernels(op).get(key), _Copied):
                del python_kernels(op)[key]
            result = register(op, key)(kernel)
            if key in _KEYS:
                copy_kernel(op, _KEYS[key], kernel)
            return result

        return inner

    def fallthrough(op: HigherOrderOperator, key: Any) -> None:
        pass_by(op, key)
        if key in _KEYS:
            pass_by(op, _KEYS[key])

    for op in higher_order_operators():
        for of_cuda, of_device in _KEYS.items():
            if of_cuda in python_kernels(op):
                copy_kernel(op, of_device, python_kernels(op)[of_cuda])
            elif falls_through(op, of_cuda) and of_device not in python_kernels(op):
                pass_by(op, of_device)
    yield HigherOrderOperator, "py_impl", py_impl
    yield HigherOrderOperator, "fallthrough", fallthrough
