"""Refuses AOTInductor for tensors on the device: it would compile and measure CUDA code in this process.

Programs on the host are compiled as usual.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from wooly.facade.imports import AfterImport
from wooly.torch_private import tree_leaves

_NAMES = ("aoti_compile_and_package", "aot_compile")


def _on_device(program: Any, *args: Any, **kwargs: Any) -> bool:
    held: list[Any] = [
        program.state_dict() if isinstance(program, torch.nn.Module) else program.state_dict,
        args,
        kwargs,
    ]
    held += [getattr(program, name, None) for name in ("constants", "example_inputs")]
    return any(isinstance(t, torch.Tensor) and t.is_cuda for t in tree_leaves(held))


def _refusing(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _on_device(*args, **kwargs):
            raise NotImplementedError(
                f"torch._inductor.{name} is not supported for tensors on the wooly device, because this process has no CUDA "
                "compiler and no GPU; save the program with torch.export.save and call its module() instead, or use torch.compile"
            )
        return real(*args, **kwargs)

    call.wooly_replaces = real  # type: ignore[attr-defined]
    return call


def _install(module: ModuleType) -> None:
    for name in _NAMES:
        real = getattr(module, name)
        if not hasattr(real, "wooly_replaces"):
            setattr(module, name, _refusing(name, real))


_waiting = AfterImport("torch._inductor", _install)
activate = _waiting.activate


def deactivate() -> None:
    """Restore PyTorch's functions."""
    module = _waiting.deactivate()
    for name in _NAMES if module is not None else ():
        ours = getattr(module, name)
        setattr(module, name, getattr(ours, "wooly_replaces", ours))
