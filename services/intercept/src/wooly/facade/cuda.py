"""The functions of `torch.cuda` that report properties of the remote device."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from wooly.devices import Devices
from wooly.facade import build
from wooly.facade.memory import Memory
from wooly.facade.streams import current_stream, device_context, device_of
from wooly.kernels.cuda_c import compile_kernel
from wooly.kernels.sleep import sleep
from wooly.torch_private import JittedFunction, cuda_function_patches

#: Compute capability of a device that has none, such as a CPU. 8.0 (Ampere) is enough for programs that check for features such
#: as bfloat16.
_CAPABILITY = (8, 0)
#: Shared memory of a multiprocessor in KiB, by compute capability (CUDA C++ Programming Guide). The driver keeps 1 KiB per block.
_SHARED_KIB = {
    (7, 0): 96, (7, 5): 64, (8, 0): 164, (8, 6): 100, (8, 7): 164, (8, 9): 100,
    (9, 0): 228, (10, 0): 228, (10, 3): 228, (11, 0): 228, (12, 0): 100, (12, 1): 100,
}  # fmt: skip
_RESERVED = 1 << 10
#: Names of chips: NVIDIA's (sm_90, sm_100a), and AMD's, whose last digit is a stepping (gfx942, gfx90a).
_CHIP = re.compile(r"sm_(\d+)(\d)[a-z]?|gfx(\d+)([\da-f])[\da-f]")

Patch = tuple[Any, str, Any]


def capability_of(arch: str) -> tuple[int, int]:
    """The compute capability of a chip (major, minor), as a CUDA or ROCm build of PyTorch reports it."""
    found = _CHIP.fullmatch(arch)
    if found is None:
        return _CAPABILITY
    major, minor = [part for part in found.groups() if part is not None]
    return int(major), int(minor, 16)


class DeviceProperties(SimpleNamespace):
    """What `torch.cuda.get_device_properties` returns. It is printed as CUDA's."""

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name={self.name!r}, major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory >> 20}MB, multi_processor_count={self.multi_processor_count}, uuid={self.uuid}, "
            f"pci_bus_id={self.pci_bus_id}, pci_device_id={self.pci_device_id}, pci_domain_id={self.pci_domain_id}, "
            f"L2_cache_size={self.L2_cache_size >> 20}MB)"
        )

    def __getattr__(self, name: str) -> Any:
        if name in ("clock_rate", "memory_clock_rate", "memory_bus_width"):
            raise AttributeError(f"executors do not report {name}; nvidia-smi shows it on the machine of the executor")
        raise AttributeError(f"'_CudaDeviceProperties' object has no attribute {name!r}")


def _refuse_jiterator(function: Any, *tensors: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(
        "torch.cuda.jiterator is not supported on the wooly device; write the function with torch's operators, or as a kernel: "
        "torch.cuda._compile_kernel"
    )


class Answers:
    """The functions of `torch.cuda`.

    Args:
        devices: the process's devices.
        facts: returns the properties of a device, from its executor, by index.
        cuda_version: the version that `torch.version.cuda` reports; empty: that of the local PyTorch.
    """

    def __init__(self, devices: Devices, facts: Callable[[int], dict[str, Any]], cuda_version: str) -> None:
        self._devices = devices
        self._cuda_version = cuda_version
        self._facts_of = facts
        self._memory = Memory(devices)

    def patches(self) -> Iterator[Patch]:
        """Yield the patches (owner, name, value) for `torch.cuda`."""
        module = torch.wooly  # type: ignore[attr-defined]
        for name, value in {
            # Dynamo evaluates some functions while it traces, but no bound methods.
            "is_available": lambda: module.is_available(),
            "is_initialized": lambda: module.is_initialized() and not module._is_in_bad_fork(),
            "_initialized": True,
            "init": module.require_same_process,
            "_lazy_init": module.require_same_process,
            "_lazy_call": lambda callable, **kwargs: callable(),
            "_is_in_bad_fork": module._is_in_bad_fork,
            "device_count": lambda: module.device_count(),
            "_device_count_nvml": module.device_count,
            "current_device": lambda: module.require_same_process() or module.current_device(),
            "set_device": lambda device: module.require_same_process() or module.set_device(device),
            "get_device_name": lambda device=None: self.name_of(self._existing(device)),
            "get_device_properties": lambda device=None: self._properties(self._existing(device)),
            "get_device_capability": lambda device=None: self._capability(device),
            "get_arch_list": self._arch_list,
            "is_bf16_supported": lambda including_emulation=True: True,
            "can_device_access_peer": lambda device, peer_device: False,
            "synchronize": module.synchronize,
            "ipc_collect": lambda: None,
            "empty_cache": lambda: None,
            "utilization": self._memory.utilization,
            "_CudaDeviceProperties": DeviceProperties,
            "device": device_context,
            "device_of": device_of,
            # Dynamo puts these into graphs for `with torch.cuda.device(...)`. Those of a build without CUDA only raise.
            "_exchange_device": lambda index: self._exchange_device(index),
            "_maybe_exchange_device": lambda index: self._exchange_device(index),
            "_compile_kernel": compile_kernel,
            "_sleep": lambda cycles: sleep(self._devices, cycles),
        }.items():
            yield (torch.cuda, name, value)
        yield from cuda_function_patches(
            {
                "getCurrentRawStream": lambda index: current_stream(index).cuda_stream,
                "getDevice": lambda: module.current_device(),
                # Dynamo has other rules for these than for the functions that they call.
                "setDevice": lambda index: module.set_device(index),
                "exchangeDevice": lambda index: self._exchange_device(index),
                "maybeExchangeDevice": lambda index: self._exchange_device(index),
                "synchronize": lambda: module.synchronize(),
                "clearCublasWorkspaces": lambda: None,  # they are the executor's
            }
        )
        yield (torch.backends.cudnn, "is_acceptable", lambda tensor: False)
        yield (JittedFunction, "__call__", _refuse_jiterator)
        yield from build.patches(self._memory, self._cuda_version)

    def _exchange_device(self, index: int) -> int:
        """Set the current device, unless the index is negative, and return the one before."""
        before = self._devices.current
        if index >= 0:
            self._devices.current = self._devices.index_of(index)
        return before

    def _existing(self, device: Any) -> int:
        torch.wooly.require_same_process()  # type: ignore[attr-defined]
        try:
            return self._devices.index_of(device)
        except RuntimeError as e:
            raise AssertionError("Invalid device id") from e

    def _capability(self, device: Any = None) -> tuple[int, int]:
        return capability_of(self._facts_of(self._existing(device)).get("arch", ""))

    def _arch_list(self) -> list[str]:
        arch = str(self._facts_of(0).get("arch", "")) if self._devices.look() else ""
        return [arch if _CHIP.fullmatch(arch) else f"sm_{_CAPABILITY[0]}{_CAPABILITY[1]}"]

    def name_of(self, index: int) -> str:
        """Name of a device by its index."""
        return f"{self._facts_of(index).get('name', 'unknown device')} (WOOLY)"

    def _properties(self, index: int) -> DeviceProperties:
        facts = self._facts_of(index)
        major, minor = capability_of(facts.get("arch", ""))
        per_core = _SHARED_KIB.get((major, minor), _SHARED_KIB[_CAPABILITY]) << 10
        return DeviceProperties(
            name=self.name_of(index),
            major=major,
            minor=minor,
            total_memory=int(facts.get("total_memory", 0)),
            multi_processor_count=int(facts.get("cores", 1)),
            is_integrated=False,
            is_multi_gpu_board=False,
            max_threads_per_multi_processor=2048,
            warp_size=32,
            gcnArchName="",
            uuid=uuid.uuid5(uuid.NAMESPACE_URL, f"wooly:{self.name_of(index)}/{index}"),
            L2_cache_size=0,
            regs_per_multiprocessor=65536,
            shared_memory_per_block=49152,
            shared_memory_per_block_optin=per_core - _RESERVED,
            shared_memory_per_multiprocessor=per_core,
            max_threads_per_block=1024,
            pci_domain_id=0,
            pci_bus_id=index,
            pci_device_id=0,
        )
