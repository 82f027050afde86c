"""The driver of NVIDIA GPUs. It uses the driver API in torch's primary context."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from wooly_wis.artifact import cuda_target

from wooly_executor.errors import MissingDriverError, OperationError
from wooly_executor.runtime.gpu import GpuRuntime
from wooly_executor.runtime.nvml import Nvml
from wooly_executor.runtime.packing import Arguments, Kind, layout
from wooly_executor.runtime.torch_gpu import TorchGpu
from wooly_executor.runtime.torch_runtime import HOT

_LIBRARY = "libcuda.so.1"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
#: Flag for cuMemHostRegister: the memory is page-locked for all contexts (CU_MEMHOSTREGISTER_PORTABLE).
PORTABLE = 1
#: Bytes of shared memory that every launch may use. A function that needs more must request it.
SHARED = 48 << 10
#: Error numbers (cuda.h) after which a context fails every call.
STICKY = frozenset(
    (
        214,  # CUDA_ERROR_ECC_UNCORRECTABLE
        220,  # CUDA_ERROR_NVLINK_UNCORRECTABLE
        700,  # CUDA_ERROR_ILLEGAL_ADDRESS
        702,  # CUDA_ERROR_LAUNCH_TIMEOUT
        709,  # CUDA_ERROR_CONTEXT_IS_DESTROYED
        710,  # CUDA_ERROR_ASSERT
        714,  # CUDA_ERROR_HARDWARE_STACK_ERROR
        715,  # CUDA_ERROR_ILLEGAL_INSTRUCTION
        716,  # CUDA_ERROR_MISALIGNED_ADDRESS
        717,  # CUDA_ERROR_INVALID_ADDRESS_SPACE
        718,  # CUDA_ERROR_INVALID_PC
        719,  # CUDA_ERROR_LAUNCH_FAILED
        999,  # CUDA_ERROR_UNKNOWN
    )
)


@dataclass(frozen=True)
class Found:
    """The parts of CUDA that are present on this machine.

    Attributes:
        torch_version: version of torch.
        torch_cuda: CUDA version that torch was built for; None: torch was built without CUDA.
        bindings: whether the module cuda.bindings is installed.
        library: why the driver's library does not load; empty: it loads.
        driver: newest CUDA version that the driver supports, as 1000 * major + 10 * minor.
        error: error of the driver's initialisation; empty: it succeeds.
        devices: number of GPUs that this process sees.
    """

    torch_version: str = ""
    torch_cuda: str | None = None
    bindings: bool = False
    library: str = ""
    driver: int = 0
    error: str = ""
    devices: int = 0


def find() -> Found:
    """Find out which parts of CUDA are present. Initialises the driver, and nothing else on a GPU."""
    found = {"torch_version": torch.__version__, "torch_cuda": torch.version.cuda, "bindings": _has_bindings()}
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as e:
        return Found(**found, library=str(e))  # type: ignore[arg-type]
    number, devices = ctypes.c_int(0), ctypes.c_int(0)
    library.cuDriverGetVersion(ctypes.byref(number))
    status = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(devices))
    name = ctypes.c_char_p()
    if status:
        library.cuGetErrorName(status, ctypes.byref(name))
    error = (name.value or b"error %d" % status).decode() if status else ""
    return Found(**found, driver=number.value, error=error, devices=devices.value)  # type: ignore[arg-type]


def _has_bindings() -> bool:
    try:
        return importlib.util.find_spec("cuda.bindings.driver") is not None
    except ImportError:
        return False


def missing(found: Found, index: int = 0) -> str:
    """Return what is missing for using GPU `index`, and how to get it; empty if nothing is missing."""
    if found.library:
        return (
            f"the NVIDIA driver cannot be loaded ({found.library}): install it, or give the container access to the GPU "
            "(docker run --gpus all; on Kubernetes a limit of nvidia.com/gpu)"
        )
    if found.torch_cuda is None:
        return (
            f"PyTorch {found.torch_version} is a build without CUDA: install a build with CUDA (pytorch.org lists the package "
            "indexes)"
        )
    if not found.bindings:
        return "the module cuda.bindings is not installed: pip install cuda-bindings"
    if found.driver // 1000 < int(found.torch_cuda.split(".")[0]):
        return (
            f"the driver is too old: it supports CUDA {found.driver // 1000}.{found.driver % 1000 // 10}, but PyTorch "
            f"{found.torch_version} is built for CUDA {found.torch_cuda}: install a newer driver, or an older build of PyTorch"
        )
    visible = os.environ.get(_VISIBLE)
    hint = "" if visible is None else f"; {_VISIBLE} is {visible!r}"
    if found.error == "CUDA_ERROR_NO_DEVICE" or (not found.error and not found.devices):
        return f"the driver shows this process no GPU{hint}; check whether nvidia-smi lists one"
    if found.error:
        return f"the driver does not start: {found.error}{hint}; check whether nvidia-smi works"
    if index >= found.devices:
        return f"there is no GPU {index}: this process sees {found.devices}{hint}; WOOLY_EXECUTOR_DEVICE counts from 0"
    return ""


class CudaDriver(TorchGpu):
    """One NVIDIA GPU.

    Raises:
        MissingDriverError: the GPU cannot be used; the message says what is missing and how to get it.
    """

    vendor = "nvidia"
    sticky = STICKY

    def __init__(self, index: int = 0) -> None:
        why = missing(find(), index)
        if why:
            raise MissingDriverError(f"the runtime 'cuda' cannot run here: {why}")
        try:
            super().__init__(index)
        except RuntimeError as e:
            raise MissingDriverError(f"the runtime 'cuda' cannot run here: PyTorch does not start CUDA: {e}") from e
        self._cuda: Any = importlib.import_module("cuda.bindings.driver")
        self._handle = self._cuda.CUstream(self.stream.cuda_stream)
        self._ok = self._cuda.CUresult.CUDA_SUCCESS
        self._device = self._do(self._cuda.cuDeviceGet(index))
        self._context = self._do(self._cuda.cuDevicePrimaryCtxRetain(self._device))
        self._nvml = Nvml()

    def arch(self) -> str:
        """See `TorchGpu`."""
        major, minor = torch.cuda.get_device_capability(self.index)
        return f"sm_{major}{minor}"

    def target(self) -> str:
        """See `Driver`."""
        found = cuda_target(*torch.cuda.get_device_capability(self.index))
        if not found:
            raise MissingDriverError(
                f"Wooly generates no kernels for {torch.cuda.get_device_name(self.index)} ({self.arch()}): its programs run "
                "with library calls only"
            )
        return found

    def load(self, image: bytes, entry: str, kinds: Sequence[Kind], shared: int = 0) -> Any:
        """See `Driver`."""
        with self._turns.use():
            return self._load(image, entry, kinds, shared)

    def _load(self, image: bytes, entry: str, kinds: Sequence[Kind], shared: int) -> Any:
        cuda = self._cuda
        self._do(cuda.cuCtxSetCurrent(self._context))  # every thread has its own current context
        module = self._do(cuda.cuModuleLoadData(image))
        try:
            function = self._do(cuda.cuModuleGetFunction(module, entry.encode()))
            self._check_parameters(function, entry, kinds)
            self._allow_shared_memory(function, shared)
        except OperationError:
            cuda.cuModuleUnload(module)
            raise
        return function  # its module stays loaded until the process ends

    def _allow_shared_memory(self, function: Any, shared: int) -> None:
        """Allow the launches of a function to use more shared memory than the default."""
        cuda = self._cuda
        names, kinds = cuda.CUdevice_attribute, cuda.CUfunction_attribute
        own = self._do(cuda.cuFuncGetAttribute(kinds.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function))
        most = self._do(
            cuda.cuDeviceGetAttribute(names.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, self._device)
        )
        if own + shared > most:
            raise OperationError(f"it needs {own + shared} bytes of shared memory, but {self.arch()} has {most}")
        if own + shared > SHARED:
            self._do(cuda.cuFuncSetAttribute(function, kinds.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared))

    def _check_parameters(self, function: Any, entry: str, kinds: Sequence[Kind]) -> None:
        ask = getattr(self._cuda, "cuFuncGetParamInfo", None)
        if ask is None:
            return
        found: list[tuple[int, int]] = []
        while len(found) <= len(kinds):
            status, *place = ask(function, len(found))
            if status != self._ok:
                break
            found.append((int(place[0]), int(place[1])))
        # drivers older than CUDA 12.4 cannot report parameters, and then `found` is empty
        if found and tuple(found) != layout(kinds):
            raise OperationError(
                f"{entry} has parameters at (offset, bytes) {found}, but {list(layout(kinds))} was expected"
            )

    def blocks_per_core(self, function: Any, threads: int) -> int:
        """See `Driver`. Generated kernels use no dynamic shared memory."""
        self._do(self._cuda.cuCtxSetCurrent(self._context))
        return int(self._do(self._cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, threads, 0)))

    def sm_utilisation(self) -> float | None:
        """See `Driver`. NVML measures it, if its module is installed."""
        uuid = str(self.torch_cuda.get_device_properties(self.index).uuid)
        return self._nvml.utilisation(uuid)

    def launch(
        self,
        function: Any,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: Arguments,
        shared: int = 0,
    ) -> None:
        """See `Driver`."""
        (status,) = self._cuda.cuLaunchKernel(function, *grid, *block, shared, self._handle, arguments.address, 0)
        self._check_launch(status, grid, block)

    def lock(self, address: int, nbytes: int) -> None:
        """See `Driver`."""
        self._do(self._cuda.cuCtxSetCurrent(self._context))
        self._do(self._cuda.cuMemHostRegister(address, nbytes, PORTABLE))

    def unlock(self, address: int) -> None:
        """See `Driver`."""
        self._cuda.cuCtxSetCurrent(self._context)
        self._cuda.cuMemHostUnregister(address)

    def lost(self) -> str:
        """See `TorchGpu`."""
        (status,) = self._cuda.cuStreamSynchronize(self._handle)
        if int(status) not in STICKY:
            return ""
        said, text = self._cuda.cuGetErrorString(status)
        return f"{status.name}, {text.decode()}" if said == self._ok else str(status.name)


class CudaRuntime(GpuRuntime):
    """Runs programs on an NVIDIA GPU.

    Args:
        index: number of the GPU, among those that this process sees.
        hot: see `TorchRuntime`.
        cache: see `GpuRuntime`.

    Raises:
        MissingDriverError: the GPU cannot be used; the message says what is missing and how to get it.
    """

    def __init__(self, index: int = 0, hot: int = HOT, cache: Path | None = None) -> None:
        super().__init__(CudaDriver(index), hot, cache)
