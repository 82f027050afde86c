"""Gives replaced functions to `__torch_function__`, of arguments and of modes, as PyTorch gives its own.

PyTorch passes its built-in function to `__torch_function__`. A library compares this with the name in `torch`, such as
`torch.empty_like`, and that is the replacement. So the replacement passes itself, before it calls the function of PyTorch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from wooly.torch_private import TENSOR_FUNCTIONS, device_constructors, is_function_mode_active

Patch = tuple[Any, str, Any]

#: Functions for which a tensor is data, as a list of numbers would be. PyTorch does not ask its `__torch_function__`.
_TAKE_DATA = frozenset(
    {
        *("arange", "as_tensor", "asarray", "tensor"),
        *(f"sparse_{layout}_tensor" for layout in ("bsc", "bsr", "compressed", "coo", "csc", "csr")),
    }
)


def patches(replaced: Iterable[tuple[Any, str, Any]]) -> Iterator[Patch]:
    """Yield the patches (owner, name, value) for the functions of `torch` that other patches have replaced.

    Args:
        replaced: owner, name and old value of the other patches.
    """
    for name in dict.fromkeys(
        [name for owner, name, _ in replaced if owner is torch and hasattr(TENSOR_FUNCTIONS, name)]
    ):
        if not name.startswith("_"):
            yield (torch, name, (_seen_by_modes if name in _TAKE_DATA else _overridable)(getattr(torch, name)))


def tell_device_contexts(replaced: Iterable[tuple[Any, str, Any]]) -> None:
    """Add the replacements of constructors to the functions whose device a device context sets."""
    known = device_constructors()
    known.update([getattr(torch, name) for owner, name, old in replaced if owner is torch and old in known])


def forget_in_device_contexts(functions: Iterable[Any]) -> None:
    """Undo `tell_device_contexts`."""
    device_constructors().difference_update(functions)


def _overridable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that the first argument's `__torch_function__`, or that of a mode, gets the wrapped function."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs.get("input")
        if is_function_mode_active() or (type(first) is not Tensor and has_torch_function_unary(first)):
            return handle_torch_function(call, (first,), *args, **kwargs)
        return function(*args, **kwargs)

    return call


def _seen_by_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that only the `__torch_function__` of a mode gets the wrapped function."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_function_mode_active():
            return handle_torch_function(call, (), *args, **kwargs)
        return function(*args, **kwargs)

    return call
