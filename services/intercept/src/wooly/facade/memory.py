"""The memory functions of `torch.cuda`. The client counts the bytes of tensors itself, and asks the executor for other figures.

- *Allocated*: bytes of the session's tensors.
- *Reserved*: bytes that the executor holds for the session: rounded blocks, a workspace, and shared contents in full size.
- *Free*: bytes that the session can still allocate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wooly.devices import Devices
from wooly.storage import Heap, heaps, pinned


def _host_stats() -> dict[str, int]:
    """Numbers of pinned tensors of this process. Pinning allocates nothing, so there are no bytes to count."""
    return {"num_host_alloc": len(pinned), "num_host_free": 0, "allocation.current": len(pinned)}


def _nested(flat: dict[str, int]) -> dict[str, Any]:
    """Figures under "a.b.c" as {"a": {"b": {"c": …}}}."""
    found: dict[str, Any] = {}
    for name, value in flat.items():
        *outer, last = name.split(".")
        inner = found
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return found


class Memory:
    """The memory functions of `torch.cuda`.

    Args:
        devices: the process's devices.
        facts: returns the properties of a device, from its executor, by index.
    """

    def __init__(self, devices: Devices, facts: Callable[[int], dict[str, Any]]) -> None:
        self._devices = devices
        self._facts_of = facts

    def answers(self) -> dict[str, Callable[..., Any]]:
        """The functions, by their name in `torch.cuda`."""
        return {
            "memory_allocated": lambda d=None: self._live_bytes(self._heap(d)),
            "max_memory_allocated": lambda d=None: self._heap(d).peak_bytes,
            "memory_reserved": lambda d=None: self._asked(self._heap(d))["reserved_bytes"],
            "max_memory_reserved": lambda d=None: self._asked(self._heap(d))["reserved_peak_bytes"],
            "reset_peak_memory_stats": lambda d=None: self._heap(d).reset_peak(),
            "reset_accumulated_memory_stats": lambda d=None: None,
            "reset_max_memory_allocated": lambda d=None: self._heap(d).reset_peak(),
            "memory_stats": lambda d=None: self._stats(self._heap(d)),
            "mem_get_info": lambda d=None: self._info(self._heap(d)),
            "memory_summary": lambda d=None, abbreviated=False: self._summary(self._heap(d)),
            "memory_stats_as_nested_dict": lambda d=None: _nested(self._stats(self._heap(d))),
            "memory_cached": lambda d=None: self._asked(self._heap(d))["reserved_bytes"],
            "max_memory_cached": lambda d=None: self._asked(self._heap(d))["reserved_peak_bytes"],
            "reset_max_memory_cached": lambda d=None: self._heap(d).reset_peak(),
            "device_memory_used": lambda d=None: self._used(self._heap(d)),
            "memory_usage": self._usage,
            "get_per_process_memory_fraction": lambda d=None: self._heap(d).fraction,
            "set_per_process_memory_fraction": self._set_fraction,
            "host_memory_stats": _host_stats,
            "host_memory_stats_as_nested_dict": lambda: _nested(_host_stats()),
            "reset_accumulated_host_memory_stats": lambda: None,
            "reset_peak_host_memory_stats": lambda: None,
        }

    def _used(self, heap: Heap) -> int:
        free, total = self._info(heap)
        return total - free

    def _usage(self, device: Any = None) -> int:
        """Percent of the session's memory that is used."""
        free, total = self._info(self._heap(device))
        return round(100 * (total - free) / total) if total else 0

    def utilization(self, device: Any = None) -> int:
        """Percent of the last second in which the device worked, for all of its sessions."""
        return self._asked(self._heap(device))["utilization"]

    def _set_fraction(self, fraction: float, device: Any = None) -> None:
        """Limit this process to a fraction of the session's memory."""
        if not isinstance(fraction, float):
            raise TypeError("Invalid type for fraction argument, must be `float`")
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        heap = self._heap(device)
        heap.fraction = fraction
        heap.granted = 0  # the next storage asks

    def _heap(self, device: Any) -> Heap:
        return heaps[self._devices.index_of(device)]

    def _live_bytes(self, heap: Heap) -> int:
        if heap.kept:  # graphs keep buffers: process those that were deleted
            recorder = self._devices.recorders[heap.index]
            with recorder.lock:
                recorder.release_dead()
        return heap.live_bytes

    def _asked(self, heap: Heap) -> dict[str, int]:
        """The executor's counters for this session, including all work that is recorded so far."""
        recorder = self._devices.recorders[heap.index]
        with recorder.lock:
            if recorder.capture is None:
                recorder.flush()
            return recorder.require_link().stats()

    def _info(self, heap: Heap) -> tuple[int, int]:
        asked = self._asked(heap)
        return asked["available_bytes"], asked["quota_bytes"]

    def _stats(self, heap: Heap) -> dict[str, int]:
        asked, live, peak = self._asked(heap), heap.live_bytes, heap.peak_bytes
        found = {"allocation.all.current": heap.live, "num_alloc_retries": 0, "num_ooms": asked["out_of_memory"]}
        for name in ("allocated", "active", "requested"):
            found |= {f"{name}_bytes.all.current": live, f"{name}_bytes.all.peak": peak}
        return found | {
            "reserved_bytes.all.current": asked["reserved_bytes"],
            "reserved_bytes.all.peak": asked["reserved_peak_bytes"],
            "inactive_split_bytes.all.current": max(0, asked["reserved_bytes"] - live),
        }

    def _summary(self, heap: Heap) -> str:
        asked, mib = self._asked(heap), 1 << 20
        return (
            f"{self._facts_of(heap.index).get('name', 'unknown device')} (WOOLY): {heap.live_bytes / mib:.1f} MiB in "
            f"{heap.live} tensors, peak {heap.peak_bytes / mib:.1f} MiB; the executor holds "
            f"{asked['reserved_bytes'] / mib:.1f} MiB for this session, {asked['workspace_bytes'] / mib:.1f} MiB of it "
            f"workspace; its part of shared contents is {asked['shared_bytes'] / mib:.1f} MiB; "
            f"{asked['available_bytes'] / mib:.0f} MiB of {asked['quota_bytes'] / mib:.0f} MiB are free"
        )
