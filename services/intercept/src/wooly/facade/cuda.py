"""`torch.cuda` answers with the remote device's facts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from wooly.devices import Devices
from wooly.facade.streams import device_context, device_of
from wooly.storage import Heap, heaps

#: What every device says: enough for whatever asks before it takes a path.
_CAPABILITY = (8, 0)

Patch = tuple[Any, str, Any]


class Answers:
    """The questions of `torch.cuda`.

    Args:
        devices: the process's devices.
        facts: answers the executor's facts of the device of an index.
    """

    def __init__(self, devices: Devices, facts: Callable[[int], dict[str, Any]]) -> None:
        self._devices = devices
        self._facts_of = facts

    def patches(self) -> Iterator[Patch]:
        """(owner, name, value) of everything that is replaced in `torch.cuda`."""
        module = torch.wooly  # type: ignore[attr-defined]
        for name, value in {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "_initialized": True,
            "init": module.require_same_process,
            "_lazy_init": module.require_same_process,
            "_lazy_call": lambda callable, **kwargs: callable(),
            "_is_in_bad_fork": module._is_in_bad_fork,
            "device_count": module.device_count,
            "_device_count_nvml": module.device_count,
            "current_device": module.current_device,
            "set_device": module.set_device,
            "get_device_name": lambda d=None: self._name(self._existing(d)),
            "get_device_properties": lambda d=None: self._properties(self._existing(d)),
            "get_device_capability": self._capability,
            "get_arch_list": lambda: ["sm_80"],
            "is_bf16_supported": lambda including_emulation=True: True,
            "can_device_access_peer": lambda a, b: False,
            "synchronize": module.synchronize,
            "ipc_collect": lambda: None,
            "empty_cache": lambda: None,
            "memory_allocated": lambda d=None: self._heap(d).live_bytes,
            "max_memory_allocated": lambda d=None: self._heap(d).peak_bytes,
            "memory_reserved": lambda d=None: self._heap(d).live_bytes,
            "max_memory_reserved": lambda d=None: self._heap(d).peak_bytes,
            "reset_peak_memory_stats": lambda d=None: self._heap(d).reset_peak(),
            "reset_accumulated_memory_stats": lambda d=None: None,
            "reset_max_memory_allocated": lambda d=None: self._heap(d).reset_peak(),
            "memory_stats": lambda d=None: _memory_stats(self._heap(d)),
            "mem_get_info": lambda d=None: self._mem_get_info(self._heap(d)),
            "memory_summary": lambda d=None, abbreviated=False: self._memory_summary(self._heap(d)),
            "utilization": lambda d=None: 0,
            "device": device_context,
            "device_of": device_of,
        }.items():
            yield (torch.cuda, name, value)
        yield (torch.backends.cudnn, "is_acceptable", lambda tensor: False)
        yield (torch.cuda.memory, "memory_allocated", torch.cuda.memory_allocated)
        yield (torch.cuda.memory, "mem_get_info", torch.cuda.mem_get_info)

    def _existing(self, device: Any) -> int:
        try:
            return self._devices.index_of(device)
        except RuntimeError as e:
            raise AssertionError("Invalid device id") from e

    def _heap(self, device: Any) -> Heap:
        return heaps[self._devices.index_of(device)]

    def _capability(self, device: Any = None) -> tuple[int, int]:
        self._existing(device)
        return _CAPABILITY

    def _name(self, index: int) -> str:
        return f"{self._facts_of(index).get('name', 'unknown device')} (WOOLY)"

    def _properties(self, index: int) -> SimpleNamespace:
        facts = self._facts_of(index)
        return SimpleNamespace(
            name=self._name(index),
            major=_CAPABILITY[0],
            minor=_CAPABILITY[1],
            total_memory=int(facts.get("total_memory", 0)),
            multi_processor_count=int(facts.get("cores", 1)),
            is_integrated=False,
            is_multi_gpu_board=False,
            max_threads_per_multi_processor=2048,
            warp_size=32,
            gcnArchName="",
            uuid=f"wooly-{index}" if index else "wooly",
            L2_cache_size=0,
            regs_per_multiprocessor=65536,
            shared_memory_per_block=49152,
        )

    def _mem_get_info(self, heap: Heap) -> tuple[int, int]:
        total = int(self._facts_of(heap.index).get("total_memory", 0))
        return total - heap.live_bytes, total

    def _memory_summary(self, heap: Heap) -> str:
        mib = 1 << 20
        return (
            f"{self._name(heap.index)}: {heap.live_bytes / mib:.1f} MiB in {heap.live} tensors, "
            f"peak {heap.peak_bytes / mib:.1f} MiB, total {self._mem_get_info(heap)[1] / mib:.0f} MiB"
        )


def _memory_stats(heap: Heap) -> dict[str, int]:
    live, peak = heap.live_bytes, heap.peak_bytes
    return {
        "allocated_bytes.all.current": live,
        "allocated_bytes.all.peak": peak,
        "reserved_bytes.all.current": live,
        "reserved_bytes.all.peak": peak,
        "active_bytes.all.current": live,
        "active_bytes.all.peak": peak,
        "allocation.all.current": heap.live,
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }
