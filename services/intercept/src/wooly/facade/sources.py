"""Refuses CUDA sources in `torch.utils.cpp_extension.load` and `load_inline`: they would launch kernels in this process.

C++ sources are compiled as usual. Extensions that are only built here (`CUDAExtension`) are not refused.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from wooly.facade.imports import AfterImport

_CUDA_FILES = (".cu", ".cuh")


def _refusing(name: str, real: Callable[..., Any], has_cuda: Callable[..., bool]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("with_cuda") or has_cuda(*args, **kwargs):
            raise NotImplementedError(
                f"torch.utils.cpp_extension.{name} with CUDA sources is not supported on the wooly device, because this "
                "process has no GPU to launch their kernels on; send the kernels to the executor with wooly.cuda_kernel or "
                "torch.cuda._compile_kernel, or install the extension on the executor and name it in WOOLY_EXECUTOR_LIBRARIES"
            )
        return real(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = real.__doc__
    call.wooly_replaces = real  # type: ignore[attr-defined]
    return call


def _files_have_cuda(name: str, sources: Any, *args: Any, **kwargs: Any) -> bool:
    files = [sources] if isinstance(sources, str) else sources
    return any(str(file).endswith(_CUDA_FILES) for file in files)


def _inline_has_cuda(name: str, cpp_sources: Any, cuda_sources: Any = None, *args: Any, **kwargs: Any) -> bool:
    return bool(cuda_sources)


def _install(module: ModuleType) -> None:
    for name, has_cuda in (("load", _files_have_cuda), ("load_inline", _inline_has_cuda)):
        real = getattr(module, name)
        if not hasattr(real, "wooly_replaces"):
            setattr(module, name, _refusing(name, real, has_cuda))


_waiting = AfterImport("torch.utils.cpp_extension", _install)
activate = _waiting.activate


def deactivate() -> None:
    """Restore PyTorch's functions."""
    module = _waiting.deactivate()
    for name in ("load", "load_inline") if module is not None else ():
        ours = getattr(module, name)
        setattr(module, name, getattr(ours, "wooly_replaces", ours))
