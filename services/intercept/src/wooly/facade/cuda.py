"""`torch.cuda` answers with the remote device's facts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from wooly import storage
from wooly.facade.streams import device_context

Patch = tuple[Any, str, Any]


class Answers:
    """The questions of `torch.cuda`.

    Args:
        facts: answers the executor's facts of the device.
    """

    def __init__(self, facts: Callable[[], dict[str, Any]]) -> None:
        self._facts = facts

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
            "device_count": lambda: 1,
            "_device_count_nvml": lambda: 1,
            "current_device": lambda: 0,
            "set_device": module.set_device,
            "get_device_name": lambda d=None: self._name(),
            "get_device_properties": lambda d=None: self._properties(),
            "get_device_capability": lambda d=None: (8, 0),
            "get_arch_list": lambda: ["sm_80"],
            "is_bf16_supported": lambda including_emulation=True: True,
            "can_device_access_peer": lambda a, b: False,
            "synchronize": module.synchronize,
            "ipc_collect": lambda: None,
            "empty_cache": lambda: None,
            "memory_allocated": lambda d=None: storage.live_bytes(),
            "max_memory_allocated": lambda d=None: storage.peak_bytes(),
            "memory_reserved": lambda d=None: storage.live_bytes(),
            "max_memory_reserved": lambda d=None: storage.peak_bytes(),
            "reset_peak_memory_stats": lambda d=None: storage.reset_peak(),
            "reset_max_memory_allocated": lambda d=None: storage.reset_peak(),
            "memory_stats": lambda d=None: self._memory_stats(),
            "mem_get_info": lambda d=None: self._mem_get_info(),
            "memory_summary": lambda d=None, abbreviated=False: self._memory_summary(),
            "utilization": lambda d=None: 0,
            "device": device_context,
            "device_of": device_context,
        }.items():
            yield (torch.cuda, name, value)
        yield (torch.backends.cudnn, "is_acceptable", lambda tensor: False)
        yield (torch.cuda.memory, "memory_allocated", torch.cuda.memory_allocated)
        yield (torch.cuda.memory, "mem_get_info", torch.cuda.mem_get_info)

    def _name(self) -> str:
        return f"{self._facts().get('name', 'unknown device')} (WOOLY)"

    def _properties(self) -> SimpleNamespace:
        facts = self._facts()
        return SimpleNamespace(
            name=self._name(),
            major=8,
            minor=0,
            total_memory=int(facts.get("total_memory", 0)),
            multi_processor_count=int(facts.get("cores", 1)),
            is_integrated=False,
            is_multi_gpu_board=False,
            max_threads_per_multi_processor=2048,
            warp_size=32,
            gcnArchName="",
            uuid="wooly",
            L2_cache_size=0,
            regs_per_multiprocessor=65536,
            shared_memory_per_block=49152,
        )

    def _memory_stats(self) -> dict[str, int]:
        live, peak = storage.live_bytes(), storage.peak_bytes()
        return {
            "allocated_bytes.all.current": live,
            "allocated_bytes.all.peak": peak,
            "reserved_bytes.all.current": live,
            "reserved_bytes.all.peak": peak,
            "active_bytes.all.current": live,
            "active_bytes.all.peak": peak,
            "allocation.all.current": storage.live_count(),
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    def _mem_get_info(self) -> tuple[int, int]:
        total = int(self._facts().get("total_memory", 0))
        return total - storage.live_bytes(), total

    def _memory_summary(self) -> str:
        mib = 1 << 20
        return (
            f"{self._name()}: {storage.live_bytes() / mib:.1f} MiB in {storage.live_count()} tensors, "
            f"peak {storage.peak_bytes() / mib:.1f} MiB, total {self._mem_get_info()[1] / mib:.0f} MiB"
        )
