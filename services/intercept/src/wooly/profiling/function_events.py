"""Adds the device's events to the list of events that PyTorch's profiler shows in tables.

An event of the host gets the device time of the kernels that it launched, as in a profile of CUDA.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch.autograd.profiler_util import FunctionEvent

from wooly.profiling.device_events import DeviceEvent
from wooly.profiling.enclosing import enclosing
from wooly.profiling.watch import MemoryChange
from wooly.torch_private import DeviceType

#: Name under which PyTorch's profiler shows storages that no operator made or freed.
_MEMORY = "[memory]"


def add_device_events(
    events: list[Any],
    device_events: Sequence[DeviceEvent],
    memory: Sequence[MemoryChange],
    trace_start_ns: int,
    *,
    shapes: bool,
    stacks: bool,
) -> list[Any]:
    """The list with the device's events, in the order of their start.

    Args:
        events: PyTorch's events, without a tree.
        device_events: what occupied the devices.
        memory: storages that were made or freed.
        trace_start_ns: start of the profile, in ns since 1970.
        shapes: whether to show shapes.
        stacks: whether to show the Python line of a launch.
    """
    by_thread = _host_events(events)
    added: list[Any] = []
    for thread, launched in _by_thread(device_events).items():
        points = [_us(e.launched_ns, trace_start_ns) for e in launched]
        around = enclosing(by_thread.get(thread, ()), points)
        for event, parents in zip(launched, around, strict=True):
            made = _function_event(event, trace_start_ns, shapes=shapes, stacks=stacks)
            added.append(made)
            operators = [p for p in parents if not p.is_user_annotation] or parents
            if operators:
                operators[-1].append_kernel(event.name, event.device, event.ns / 1000)
                made.linked_correlation_id = operators[-1].id
        added += _annotations(launched, around, trace_start_ns)
    added += _with_memory(by_thread, memory, trace_start_ns)
    events += added
    events.sort(key=lambda e: (e.time_range.start, -e.time_range.end))
    return events


def _us(ns: int, trace_start_ns: int) -> float:
    return (ns - trace_start_ns) / 1000


def _host_events(events: Sequence[Any]) -> dict[int, list[tuple[float, float, Any]]]:
    """The events of operators and annotations, by the system's number of their thread."""
    found: dict[int, list[tuple[float, float, Any]]] = defaultdict(list)
    for e in events:
        if e.device_type == DeviceType.CPU and not e.is_async and not getattr(e, "is_python_function", False):
            found[e.device_resource_id].append((e.time_range.start, e.time_range.end, e))
    return found


def _by_thread(events: Sequence[DeviceEvent]) -> dict[int, list[DeviceEvent]]:
    found: dict[int, list[DeviceEvent]] = defaultdict(list)
    for event in events:
        found[event.thread].append(event)
    return found


def _function_event(event: DeviceEvent, trace_start_ns: int, *, shapes: bool, stacks: bool) -> Any:
    made: Any = FunctionEvent(
        id=event.correlation,
        name=event.name,
        overload_name="",
        trace_name=event.name,
        thread=event.stream,
        start_us=_us(event.begin_ns, trace_start_ns),
        end_us=_us(event.end_ns, trace_start_ns),
        input_shapes=[list(s) for s in event.shapes] if shapes else [],
        stack=[event.where] if stacks and event.where else [],
        use_device="cuda",
        device_type=DeviceType.CUDA,
        device_index=event.device,
        device_resource_id=event.stream,
        flops=0,
    )
    made.activity_type = event.category
    return made


def _annotations(launched: Sequence[DeviceEvent], around: list[list[Any]], trace_start_ns: int) -> list[Any]:
    """For each annotation of the host, the time from the first to the last of its kernels on each device."""
    spans: dict[tuple[int, int], tuple[Any, list[DeviceEvent]]] = {}
    for event, parents in zip(launched, around, strict=True):
        for parent in parents:
            if parent.is_user_annotation:
                spans.setdefault((id(parent), event.device), (parent, []))[1].append(event)
    found = []
    for (_, device), (parent, events) in spans.items():
        made: Any = FunctionEvent(
            id=parent.id,
            name=parent.name,
            overload_name="",
            trace_name=parent.trace_name,
            thread=events[0].stream,
            start_us=_us(min(e.begin_ns for e in events), trace_start_ns),
            end_us=_us(max(e.end_ns for e in events), trace_start_ns),
            input_shapes=[],
            stack=[],
            use_device="cuda",
            device_type=DeviceType.CUDA,
            device_index=device,
            device_resource_id=events[0].stream,
            is_user_annotation=True,
            flops=0,
        )
        made.activity_type = "gpu_user_annotation"
        found.append(made)
    return found


def _with_memory(
    by_thread: dict[int, list[tuple[float, float, Any]]], memory: Sequence[MemoryChange], trace_start_ns: int
) -> list[Any]:
    """Add each change of memory to the events of the host that contain it. Returns new events for the other changes."""
    alone = []
    threads: dict[int, list[MemoryChange]] = defaultdict(list)
    for change in memory:
        threads[change.thread].append(change)
    for thread, changes in threads.items():
        around = enclosing(by_thread.get(thread, ()), [_us(c.at_ns, trace_start_ns) for c in changes])
        for change, parents in zip(changes, around, strict=True):
            for parent in parents:
                parent.device_memory_usage += change.nbytes
            if not parents:
                at = _us(change.at_ns, trace_start_ns)
                alone.append(
                    FunctionEvent(
                        id=0,
                        name=_MEMORY,
                        overload_name="",
                        thread=thread,
                        start_us=at,
                        end_us=at,
                        input_shapes=[],
                        stack=[],
                        use_device="cuda",
                        device_memory_usage=change.nbytes,
                        flops=0,
                    )
                )
    return alone
