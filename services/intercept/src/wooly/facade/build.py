"""What a CUDA build of PyTorch has and a CPU build lacks: version numbers, and functions whose C++ part is missing.

A function that means something for a remote device works. For each other one there is an error that says why it does not. Without
these patches, a CPU build would raise an AttributeError of `torch._C`, or crash.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from wooly.facade.memory import Memory
from wooly.python_private import frame_at
from wooly.storage import pinned
from wooly.sync_debug import sync_debug
from wooly.torch_private import CAPTURE_CHECK_CODE, PREFERABLE, compiled_version_patches

Patch = tuple[Any, str, Any]

#: CUDA and cuDNN of PyTorch's default build for CUDA, releases 2.11 to 2.15.
CUDA_VERSION, CUDNN_VERSION = "13.0", 91900
_HANDLE = "this process has no handles of CUDA's libraries, because its operations run on another machine"
_ALLOCATOR = "the executor allocates the device's memory, and another allocator cannot replace it"
_TUNING = "the libraries of the executor choose their kernels"
_SENSOR = "executors do not report this figure; nvidia-smi shows it on the machine of the executor"
#: Functions of `torch.cuda` that raise an error, and why.
REFUSED = {
    "CUDAPluggableAllocator": _ALLOCATOR,
    "GreenContext": "all sessions of a device share one context, whose scheduler divides the device",
    "change_current_allocator": _ALLOCATOR,
    "clock_rate": _SENSOR,
    "current_blas_handle": _HANDLE,
    "current_solver_handle": _HANDLE,
    "power_draw": _SENSOR,
    "temperature": _SENSOR,
}


def _refusal(name: str, why: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"torch.cuda.{name} is not supported on the wooly device: {why}")

    refuse.__name__ = refuse.__qualname__ = name
    return refuse


#: CUDA's texts of the statuses that scripts see most.
_ERRORS = {
    0: "no error",
    1: "invalid argument",
    2: "out of memory",
    3: "initialization error",
    100: "no CUDA-capable device is detected",
    101: "invalid device ordinal",
    700: "an illegal memory access was encountered",
    709: "context is destroyed",
    999: "unknown error",
}


def _error_text(code: int) -> str:
    """`cudaGetErrorString`."""
    return _ERRORS.get(code, "unrecognized error code")


class _Runtime(types.SimpleNamespace):
    """`torch.cuda.cudart()`: the functions of CUDA's runtime that scripts call."""

    def __init__(self, memory: Memory) -> None:
        def done(*args: Any) -> int:
            return 0

        def register(address: int, nbytes: int, flags: int = 0) -> int:
            pinned.add(address)
            return 0

        def unregister(address: int) -> int:
            pinned.discard(address)
            return 0

        super().__init__(
            cudaError=types.SimpleNamespace(success=0),
            cudaGetErrorString=_error_text,
            cudaHostRegister=register,
            cudaHostUnregister=unregister,
            cudaMemGetInfo=memory.answers()["mem_get_info"],
            cudaProfilerStart=done,
            cudaProfilerStop=done,
            cudaStreamSynchronize=self._wait,
        )

    def _wait(self, stream: Any) -> int:
        torch.cuda.synchronize()
        return 0


class _Allocations:
    """`caching_allocator_alloc` and `caching_allocator_delete`: memory by its address."""

    def __init__(self) -> None:
        self._held: dict[int, torch.Tensor] = {}

    def alloc(self, size: int, device: Any = None, stream: Any = None) -> int:
        """Allocate bytes on the device. Returns their address, which only `delete` understands."""
        index = torch.cuda.current_device() if device is None else device
        t = torch.empty(max(int(size), 1), dtype=torch.uint8, device=torch.device("cuda", index))
        address = t.untyped_storage().data_ptr()
        self._held[address] = t
        return address

    def delete(self, mem_ptr: int) -> None:
        """Free what `alloc` has allocated."""
        self._held.pop(mem_ptr, None)


def patches(memory: Memory, cuda_version: str) -> Iterator[Patch]:
    """Yield the patches (owner, name, value).

    Args:
        memory: the memory functions.
        cuda_version: the version that `torch.version.cuda` reports; empty: that of the local PyTorch.
    """
    if cuda_version:
        yield (torch.version, "cuda", cuda_version)
        yield from compiled_version_patches(cuda_version)
        yield (torch.backends.cuda, "is_built", _is_built)
        yield (torch.backends.cudnn, "is_available", lambda: True)
        yield (torch.backends.cudnn, "version", lambda: CUDNN_VERSION)
    allocations = _Allocations()
    answers: dict[str, Any] = {
        **memory.answers(),
        "empty_cache": lambda: None,
        "get_sync_debug_mode": lambda: sync_debug.mode,
        "set_sync_debug_mode": _set_sync_debug_mode,
        "caching_allocator_alloc": allocations.alloc,
        "caching_allocator_delete": allocations.delete,
        "caching_allocator_enable": lambda value=True: None,
        "get_allocator_backend": lambda: "native",
        "list_gpu_processes": lambda device=None: "GPU processes are shown by the command `wooly top`",
    }
    refused = {name: _refusal(name, why) for name, why in REFUSED.items() if hasattr(torch.cuda, name)}
    runtime = _Runtime(memory)
    for name, value in {**answers, **refused}.items():
        for owner in (torch.cuda, torch.cuda.memory):
            if hasattr(owner, name):
                yield (owner, name, value)
    for owner in (torch.cuda, torch.cuda.profiler):
        yield (owner, "cudart", lambda: runtime)
        yield (owner, "check_error", _check_error)
    yield (torch.cuda.CudaError, "__init__", _init_error)
    for name in torch.cuda.tunable.__all__:
        off = name.endswith("is_enabled")
        yield (torch.cuda.tunable, name, (lambda: False) if off else _refusal(f"tunable.{name}", _TUNING))
    for name, known in PREFERABLE.items():
        yield (torch.backends.cuda, name, _preference(getattr(torch.backends.cuda, name), known))
    cublas, cublaslt = _workspace_size(), _workspace_size()

    def of_blas(size: int | None = None, backend: Any = None) -> int:
        return (cublaslt if str(backend).lower().endswith("lt") else cublas)(size)

    for name, value in {
        "cublas_workspace_size": cublas,
        "cublaslt_workspace_size": cublaslt,
        "blas_workspace_size": of_blas,
    }.items():
        if hasattr(torch.backends.cuda, name):
            yield (torch.backends.cuda, name, value)
    yield from _accelerator()


def _preference(real: Callable[..., Any], known: dict[str, Any]) -> Callable[..., Any]:
    """A function that keeps the preferred library, without effect: the executor's PyTorch chooses its libraries itself.

    Args:
        real: PyTorch's function, which refuses libraries that are not in this build.
        known: the libraries by name.
    """
    kept = real()

    @functools.wraps(real)
    def preferred(backend: Any = None) -> Any:
        nonlocal kept
        try:
            chosen = real(backend)
        except RuntimeError as e:
            if "has not been compiled" not in str(e):
                raise
            chosen = known.get(backend, backend)
        if backend is not None:
            kept = chosen
        return kept

    return preferred


def _workspace_size() -> Callable[[int | None], int]:
    """A function that keeps the size it is given, and returns it. The executor's library decides about its workspaces itself."""
    kept = 0

    def workspace_size(size: int | None = None) -> int:
        nonlocal kept
        kept = kept if size is None else size
        return kept

    return workspace_size


_TORCH = os.path.dirname(torch.__file__) + os.sep
_really_built: Callable[[], bool] = torch.backends.cuda.is_built


def _is_built() -> bool:
    """`torch.backends.cuda.is_built`: yes, but PyTorch's own code, which goes on to use the C++ part, gets the truth.

    The optimizers' check, whether a CUDA graph may capture their step, uses no C++ part.
    """
    caller = frame_at(1).f_code
    return _really_built() if caller.co_filename.startswith(_TORCH) and caller is not CAPTURE_CHECK_CODE else True


def _set_sync_debug_mode(debug_mode: int | str) -> None:
    """`torch.cuda.set_sync_debug_mode`: "default" (0), "warn" (1) or "error" (2) when an operation waits for the device."""
    modes = ("default", "warn", "error")
    if isinstance(debug_mode, str):
        if debug_mode not in modes:
            raise RuntimeError("invalid value of debug_mode, expected one of `default`, `warn`, `error`")
        debug_mode = modes.index(debug_mode)
    if debug_mode not in (0, 1, 2):
        raise RuntimeError("invalid value of debug_mode, expected 0, 1 or 2")
    sync_debug.mode = debug_mode


def _check_error(res: int) -> None:
    """`torch.cuda.check_error`: raise an error for a status of CUDA's runtime other than success."""
    if res:
        raise torch.cuda.CudaError(res)


def _init_error(self: RuntimeError, code: int) -> None:
    """`torch.cuda.CudaError.__init__`, which would ask CUDA's runtime for the text."""
    RuntimeError.__init__(self, f"{_error_text(code)} ({code})")


def _accelerator() -> Iterator[Patch]:
    types_of_numbers = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
    types_of_numbers += [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]

    def get_device_capability(device: Any = None, /) -> dict[str, Any]:
        return {"supported_dtypes": set(types_of_numbers)}

    def empty_host_cache() -> None:
        return None

    for name, value in {
        "get_device_capability": get_device_capability,
        "empty_host_cache": empty_host_cache,
    }.items():
        for owner in (torch.accelerator, torch.accelerator.memory):
            if hasattr(owner, name):
                yield (owner, name, value)
