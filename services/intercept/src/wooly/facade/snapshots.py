"""Snapshots of the device's memory, in the form that PyTorch's viewer (pytorch.org/memory_viz) reads, and memory pools.

Each storage is a segment of one block. The executor lists the storages, and `memory_history` knows where they were made, if the
script has asked for a history.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from wooly.devices import Devices
from wooly.memory_history import CONTEXTS, Action, History, Pools, Stack
from wooly.storage import DEVICE_MASK, ID_SHIFT, heaps

Patch = tuple[Any, str, Any]
#: Size in bytes above which PyTorch's snapshots call a segment large.
_LARGE = 1 << 20


class Snapshots:
    """The functions of `torch.cuda.memory` for histories, snapshots and pools.

    Args:
        devices: the process's devices.
    """

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._pools = Pools()
        self._histories = tuple([History(heap, self._pools) for heap in heaps])
        self._metadata = ""

    def patches(self) -> Iterator[Patch]:
        """Yield the patches (owner, name, value)."""
        memory = torch.cuda.memory
        pool_type = self._pool_type()
        functions: dict[str, Any] = {
            "_record_memory_history": self._record,
            "_snapshot": self._snapshot,
            "_allocation_traceback": self._traceback,
            "_set_memory_metadata": self._set_metadata,
            "_get_memory_metadata": lambda: self._metadata,
        }
        for name, value in functions.items():
            if hasattr(memory, name):
                yield (memory, name, value)
        functions = {"memory_snapshot": self._segments, "MemPool": pool_type, "use_mem_pool": self._use_pool}
        for name, value in functions.items():
            for owner in (torch.cuda, memory):
                yield (owner, name, value)

    # -- history -----------------------------------------------------------------------------------------------------

    def _record(
        self,
        enabled: Any = "all",
        context: Any = "all",
        stacks: str = "all",
        max_entries: int = sys.maxsize,
        device: Any = None,
        clear_history: bool = False,
        compile_context: bool = False,
        global_record_annotations: bool = False,
        skip_actions: Sequence[str] | None = None,
        **legacy: Any,
    ) -> None:
        """`torch.cuda.memory._record_memory_history`. There are no frames of C++, and `enabled` may be a bool as before."""
        if isinstance(enabled, bool):
            enabled = "all" if enabled and legacy.get("trace_alloc_max_entries", 1) else "state" if enabled else None
        if enabled not in (None, "state", "all"):
            raise RuntimeError("expected state to be 'state', 'all', or None")
        if context not in (None, *CONTEXTS):
            raise RuntimeError("expected context to be 'state', 'alloc', 'all', or None")
        for history in self._histories[: self._devices.look()]:
            history.metadata = self._metadata
            history.switch(enabled, context, max_entries, frozenset(skip_actions or ()), clear=clear_history)

    def _set_metadata(self, metadata: str) -> None:
        self._metadata = metadata
        for history in self._histories:
            history.metadata = metadata

    def _traceback(self, data_ptr: int) -> list[dict[str, Any]] | None:
        buffer = data_ptr >> ID_SHIFT
        stack = self._histories[buffer & DEVICE_MASK].live.get(buffer)
        return None if stack is None else _frames(stack, {})

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def _snapshot(self, device: Any = None, augment_with_fx_traces: bool = False) -> dict[str, Any]:
        """`torch.cuda.memory._snapshot`."""
        known: dict[tuple[Any, int], dict[str, Any]] = {}
        segments = self._segments()
        traces = []
        for history in self._histories[: self._devices.count]:
            history.snapshot_taken()
            traces.append([_trace_entry(entry, known) for entry in list(history.entries)])
        return {
            "segments": segments,
            "device_traces": traces,
            "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False},
            "external_annotations": [],
        }

    def _segments(self, mempool_id: Any = None, include_traces: bool = True) -> list[dict[str, Any]]:
        """`torch.cuda.memory_snapshot`: the segments of all devices, or of one pool."""
        known: dict[tuple[Any, int], dict[str, Any]] = {}
        found = []
        for recorder in self._devices.active():
            if recorder.link is None:
                continue
            with recorder.lock:
                recorder.flush()
                listed = recorder.link.buffers()
            live = self._histories[recorder.heap.index].live
            for buffer, nbytes in listed:
                pool = self._pools.of(buffer)
                if nbytes and (mempool_id is None or tuple(mempool_id) == pool):
                    found.append(
                        _segment(recorder.heap.index, buffer, nbytes, pool, _frames(live.get(buffer, ()), known))
                    )
        return found

    # -- pools -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _use_pool(self, pool: Any, device: Any = None) -> Iterator[None]:
        """`torch.cuda.use_mem_pool`: what this thread allocates in the block belongs to the pool."""
        heap = heaps[self._devices.index_of(device)]
        pool.users += 1
        try:
            with self._pools.using(heap, pool.id):
                yield
        finally:
            pool.users -= 1

    def _pool_type(self) -> type:
        new_id, segments = self._pools.new, self._segments

        class MemPool:
            """`torch.cuda.MemPool`: a label of storages. The executor has one allocator for all pools."""

            allocator = None

            def __init__(self, allocator: Any = None, use_on_oom: bool = False, no_split: bool = False) -> None:
                if allocator is not None:
                    raise NotImplementedError(
                        "torch.cuda.MemPool with an allocator is not supported on the wooly device: the executor allocates the "
                        "device's memory, and another allocator cannot replace it; use torch.cuda.MemPool()"
                    )
                self.id = new_id()
                self.users = 0

            def use_count(self) -> int:
                """Number of references: this object, and the blocks that use it now."""
                return 1 + self.users

            def snapshot(self, include_traces: bool = True) -> list[dict[str, Any]]:
                """The segments of the pool's storages."""
                return segments(self.id, include_traces)

        MemPool.__module__ = "torch.cuda.memory"
        MemPool.__qualname__ = "MemPool"
        return MemPool


def _segment(
    device: int, buffer: int, nbytes: int, pool: tuple[int, int], frames: list[dict[str, Any]]
) -> dict[str, Any]:
    address = buffer << ID_SHIFT
    block = {
        "address": address,
        "size": nbytes,
        "requested_size": nbytes,
        "state": "active_allocated",
        "frames": frames,
    }
    return {
        "device": device,
        "address": address,
        "total_size": nbytes,
        "allocated_size": nbytes,
        "active_size": nbytes,
        "requested_size": nbytes,
        "stream": 0,
        "segment_type": "large" if nbytes > _LARGE else "small",
        "segment_pool_id": pool,
        "is_expandable": False,
        "frames": frames,
        "blocks": [block],
    }


def _trace_entry(entry: Action, known: dict[tuple[Any, int], dict[str, Any]]) -> dict[str, Any]:
    found = {
        "action": entry.action,
        "addr": entry.buffer << ID_SHIFT,
        "size": entry.nbytes,
        "stream": 0,
        "time_us": entry.time_us,
        "compile_context": "N/A",
        "user_metadata": entry.metadata,
        "pool_id": entry.pool,
        "frames": _frames(entry.stack, known),
    }
    if entry.action == "oom":
        del found["addr"]
        found["device_free"] = entry.free
    return found


def _frames(stack: Stack, known: dict[tuple[Any, int], dict[str, Any]]) -> list[dict[str, Any]]:
    """Frames as PyTorch's snapshots have them. Equal frames are one object, which makes the pickle small."""
    found = []
    for code, last in stack:
        key = id(code), last
        frame = known.get(key)
        if frame is None:
            line = next((n for a, b, n in code.co_lines() if a <= last < b and n is not None), code.co_firstlineno)
            frame = known[key] = {"name": code.co_name, "filename": code.co_filename, "line": line}
        found.append(frame)
    return found
