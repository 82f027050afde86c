"""The memory functions of `torch.cuda`. The client counts the bytes of tensors itself, and asks the executor for other figures.

- *Allocated*: bytes of the session's tensors.
- *Reserved*: bytes that the executor holds for the session: rounded blocks, a workspace, and shared contents in full size.
- *Free*: bytes that the session can still allocate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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


#: The four figures of each metric: now, at most, and the sums of all increases and of all decreases.
_KINDS = ("current", "peak", "allocated", "freed")


class _Total(NamedTuple):
    """A number of storages and their bytes."""

    number: int
    nbytes: int

    def since(self, before: _Total) -> _Total:
        return _Total(self.number - before.number, self.nbytes - before.nbytes)


_NOTHING = _Total(0, 0)


class Memory:
    """The memory functions of `torch.cuda`.

    Args:
        devices: the process's devices.
    """

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        #: What was allocated and what was freed until the last reset of the totals, by index of the device.
        self._since: dict[int, tuple[_Total, _Total]] = {}

    def answers(self) -> dict[str, Callable[..., Any]]:
        """The functions, by their name in `torch.cuda`."""
        return {
            "memory_allocated": lambda device=None: self._live_bytes(self._heap(device)),
            "max_memory_allocated": lambda device=None: self._heap(device).peak_bytes,
            "memory_reserved": lambda device=None: self._asked(self._heap(device))["reserved_bytes"],
            "max_memory_reserved": lambda device=None: self._asked(self._heap(device))["reserved_peak_bytes"],
            "reset_peak_memory_stats": lambda device=None: self._heap(device).reset_peak(),
            "reset_accumulated_memory_stats": lambda device=None: self._reset_totals(self._heap(device)),
            "reset_max_memory_allocated": lambda device=None: self._heap(device).reset_peak(),
            "memory_stats": lambda device=None: self._stats(self._heap(device)),
            "mem_get_info": lambda device=None: self._info(self._heap(device)),
            "memory_stats_as_nested_dict": lambda device=None: _nested(self._stats(self._heap(device))),
            "memory_cached": lambda device=None: self._asked(self._heap(device))["reserved_bytes"],
            "max_memory_cached": lambda device=None: self._asked(self._heap(device))["reserved_peak_bytes"],
            "reset_max_memory_cached": lambda device=None: self._heap(device).reset_peak(),
            "device_memory_used": lambda device=None: self._used(self._heap(device)),
            "memory_usage": self._usage,
            "get_per_process_memory_fraction": lambda device=None: self._heap(device).fraction,
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
        """Free and total bytes. The memory of a CPU device is its machine's, of which other processes take some, too."""
        asked = self._asked(heap)
        return min(asked["available_bytes"], asked.get("machine_bytes", asked["quota_bytes"])), asked["quota_bytes"]

    def _totals(self, heap: Heap) -> tuple[_Total, _Total]:
        """What was allocated and what was freed since the process began."""
        freed = _Total(heap.freed, heap.freed_bytes)
        return _Total(heap.live + freed.number, heap.live_bytes + freed.nbytes), freed

    def _reset_totals(self, heap: Heap) -> None:
        self._asked(heap)
        self._since[heap.index] = self._totals(heap)

    def _stats(self, heap: Heap) -> dict[str, int]:
        """The figures of PyTorch's native allocator, with all of its keys.

        A storage is one allocation, one active block and one segment. There is one pool, so figures of the large and of the small
        pool are 0, as with PyTorch's backend `cudaMallocAsync`.
        """
        asked, live = self._asked(heap), heap.live_bytes
        (allocated, freed), before = self._totals(heap), self._since.get(heap.index, (_NOTHING, _NOTHING))
        allocated, freed = (now.since(then) for now, then in zip((allocated, freed), before, strict=True))
        held, unused = asked["reserved_bytes"], max(0, asked["reserved_bytes"] - live)
        counts = (heap.live, max(heap.peak_live, heap.live), allocated.number, freed.number)
        nbytes = (live, heap.peak_bytes, allocated.nbytes, freed.nbytes)
        metrics = dict.fromkeys(("allocation", "active", "segment"), counts)
        metrics |= dict.fromkeys(("allocated_bytes", "active_bytes", "requested_bytes"), nbytes)
        metrics["reserved_bytes"] = (held, asked["reserved_peak_bytes"], held + freed.nbytes, freed.nbytes)
        metrics["inactive_split"] = (0, 0, 0, 0)
        metrics["inactive_split_bytes"] = (unused, unused, unused, 0)
        found = {"num_alloc_retries": 0, "num_ooms": asked["out_of_memory"], "num_sync_all_streams": 0}
        found |= {"num_device_alloc": allocated.number, "num_device_free": freed.number, "max_split_size": -1}
        for metric, figures in metrics.items():
            for pool in ("all", "large_pool", "small_pool"):
                shown = figures if pool == "all" else (0, 0, 0, 0)
                found |= {f"{metric}.{pool}.{kind}": n for kind, n in zip(_KINDS, shown, strict=True)}
        for metric in ("oversize_allocations", "oversize_segments"):
            found |= {f"{metric}.{kind}": 0 for kind in _KINDS}
        return dict(sorted(found.items()))
