"""The driver of AMD GPUs. It uses HIP's module API in torch's own context."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wooly_executor.errors import MissingDriverError, OperationError
from wooly_executor.runtime.gpu import GpuRuntime
from wooly_executor.runtime.packing import Arguments, Kind
from wooly_executor.runtime.torch_gpu import TorchGpu
from wooly_executor.runtime.torch_runtime import HOT

#: Error numbers (hip_runtime_api.h) after which a context fails every call.
STICKY = frozenset((214, 700, 702, 709, 710, 718, 719, 999))

#: Flag for hipHostRegister: the memory is page-locked for all contexts (hipHostRegisterPortable).
PORTABLE = 1


@dataclass(frozen=True)
class Found:
    """The parts of ROCm that are present on this machine.

    Attributes:
        torch_version: version of torch.
        torch_hip: HIP version that torch was built for; None: torch was built without HIP.
        bindings: whether the module hip is installed.
        devices: number of GPUs that this process sees.
    """

    torch_version: str = ""
    torch_hip: str | None = None
    bindings: bool = False
    devices: int = 0


def find() -> Found:
    """Find out which parts of ROCm are present. Initialises nothing on a GPU."""
    try:
        bindings = importlib.util.find_spec("hip.hip") is not None
    except ImportError:
        bindings = False
    devices = torch.cuda.device_count() if torch.version.hip is not None else 0
    return Found(torch.__version__, torch.version.hip, bindings, devices)


def missing(found: Found, index: int = 0) -> str:
    """Return what is missing for using GPU `index`, and how to get it; empty if nothing is missing."""
    if found.torch_hip is None:
        return (
            f"PyTorch {found.torch_version} is a build without ROCm: install a build with ROCm (pytorch.org lists the package "
            "indexes)"
        )
    if not found.bindings:
        return "the module hip is not installed: pip install hip-python"
    if not found.devices:
        return (
            "the driver shows this process no GPU: check that the amdgpu driver is loaded, that this user may open "
            "/dev/kfd and /dev/dri, and that rocminfo lists a GPU"
        )
    if index >= found.devices:
        return f"there is no GPU {index}: this process sees {found.devices}; WOOLY_EXECUTOR_DEVICE counts from 0"
    return ""


class HipDriver(TorchGpu):
    """One AMD GPU.

    Raises:
        MissingDriverError: the GPU cannot be used; the message says what is missing and how to get it.
    """

    vendor = "amd"
    sticky = STICKY

    def __init__(self, index: int = 0) -> None:
        why = missing(find(), index)
        if why:
            raise MissingDriverError(f"the runtime 'hip' cannot run here: {why}")
        try:
            super().__init__(index)
        except RuntimeError as e:
            raise MissingDriverError(f"the runtime 'hip' cannot run here: PyTorch does not start ROCm: {e}") from e
        self._hip: Any = importlib.import_module("hip.hip")
        self._ok = self._hip.hipError_t.hipSuccess
        self._handle = self._hip.ihipStream_t(self.stream.cuda_stream)

    def arch(self) -> str:
        """See `TorchGpu`."""
        name: str = torch.cuda.get_device_properties(self.index).gcnArchName
        return name.partition(":")[0]

    def target(self) -> str:
        """See `Driver`."""
        return f"hip:{self.arch()}"

    def load(self, image: bytes, entry: str, kinds: Sequence[Kind], shared: int = 0) -> Any:
        """See `Driver`. A block may use all shared memory of a compute unit without a request."""
        self._do(self._hip.hipSetDevice(self.index))
        most: int = torch.cuda.get_device_properties(self.index).shared_memory_per_block
        if shared > most:
            raise OperationError(f"it needs {shared} bytes of shared memory, but {self.arch()} has {most}")
        with self._turns.use():
            module = self._do(self._hip.hipModuleLoadData(image))
            return self._do(self._hip.hipModuleGetFunction(module, entry.encode()))

    def blocks_per_core(self, function: Any, threads: int) -> int:
        """See `Driver`. Generated kernels use no dynamic shared memory."""
        self._do(self._hip.hipSetDevice(self.index))
        return int(self._do(self._hip.hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(function, threads, 0)))

    def launch(
        self,
        function: Any,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: Arguments,
        shared: int = 0,
    ) -> None:
        """See `Driver`."""
        (status,) = self._hip.hipModuleLaunchKernel(
            function, *grid, *block, shared, self._handle, arguments.address, None
        )
        self._check_launch(status, grid, block)

    def lock(self, address: int, nbytes: int) -> None:
        """See `Driver`."""
        self._do(self._hip.hipSetDevice(self.index))
        try:
            self._do(self._hip.hipHostRegister(address, nbytes, PORTABLE))
        except OperationError:
            self._hip.hipGetLastError()  # clears the error, which torch would otherwise report after its next launch
            raise

    def unlock(self, address: int) -> None:
        """See `Driver`."""
        self._hip.hipSetDevice(self.index)
        self._hip.hipHostUnregister(address)

    def lost(self) -> str:
        """See `TorchGpu`."""
        (status,) = self._hip.hipStreamSynchronize(self._handle)
        return str(status.name) if int(status) in STICKY else ""


class HipRuntime(GpuRuntime):
    """Runs programs on an AMD GPU.

    Args:
        index: number of the GPU, among those that this process sees.
        hot: see `TorchRuntime`.
        cache: see `GpuRuntime`.

    Raises:
        MissingDriverError: the GPU cannot be used; the message says what is missing and how to get it.
    """

    def __init__(self, index: int = 0, hot: int = HOT, cache: Path | None = None) -> None:
        super().__init__(HipDriver(index), hot, cache)
