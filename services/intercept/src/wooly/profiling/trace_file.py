"""Adds the device's events to a trace file of PyTorch's profiler, in the form that Perfetto and TensorBoard know from CUDA.

Each device is a process of its own, and each stream one of its threads. A flow leads from the operator that recorded the work to
the work. A slice "cudaLaunchKernel" of the host stands for the recording, because TensorBoard connects kernels with operators
through such slices.
"""

from __future__ import annotations

import gzip
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from wooly.profiling.device_events import DeviceEvent
from wooly.profiling.enclosing import enclosing
from wooly.profiling.watch import MemoryChange
from wooly.storage import DEVICE_MASK, ID_SHIFT

#: Numbers of CUDA's functions in trace files of PyTorch.
_LAUNCH, _COPY = 211, 41
#: Devices are sorted below processes.
_SORT_INDEX = 5_000_000
#: Duration of the slice that stands for the recording of an instruction, in us.
_RECORDING_US = 1.0


def add_to_trace(
    path: Path, device_events: Sequence[DeviceEvent], memory: Sequence[MemoryChange], names: dict[int, str]
) -> None:
    """Add events to a trace file.

    Args:
        path: the file. If its name ends in .gz, it is compressed.
        device_events: what occupied the devices.
        memory: storages of devices that were made or freed.
        names: name of each device by its index.
    """
    opened: Any = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", errors="replace") as file:  # names of functions of C extensions may not be UTF-8
        trace = json.load(file)
    events = trace["traceEvents"]
    base = int(trace.get("baseTimeNanoseconds", 0))
    trace["deviceProperties"] = [{"id": index, "name": name} for index, name in sorted(names.items())]
    events += list(_tracks(device_events, names, base))
    events += list(_slices(events, device_events, base))
    events += list(_memory(memory, base))
    with opened(path, "wt") as file:
        json.dump(trace, file)


def _us(ns: int, base: int) -> float:
    return (ns - base) / 1000


def _tracks(device_events: Sequence[DeviceEvent], names: dict[int, str], base: int) -> Iterator[dict[str, Any]]:
    """Names of devices and streams."""
    begin = _us(min([e.begin_ns for e in device_events], default=base), base)

    def named(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
        return {"ph": "M", "name": name, "ts": begin, "pid": pid, "tid": tid, "args": args}

    for device in sorted(names):
        yield named("process_name", device, 0, {"name": "python"})
        yield named("process_labels", device, 0, {"labels": f"GPU {device}"})
        yield named("process_sort_index", device, 0, {"sort_index": _SORT_INDEX + device})
    for device, stream in sorted({(e.device, e.stream) for e in device_events}):
        yield named("thread_name", device, stream, {"name": f"stream {stream} "})
        yield named("thread_sort_index", device, stream, {"sort_index": stream})


def _host_spans(events: Iterable[dict[str, Any]]) -> dict[int, list[tuple[float, float, dict[str, Any]]]]:
    """The operators and annotations of the host, by thread."""
    found: dict[int, list[tuple[float, float, dict[str, Any]]]] = defaultdict(list)
    for e in events:
        if e.get("ph") == "X" and e.get("cat") in ("cpu_op", "user_annotation"):
            found[e["tid"]].append((e["ts"], e["ts"] + e.get("dur", 0), e))
    return found


def _slices(events: list[dict[str, Any]], device_events: Sequence[DeviceEvent], base: int) -> Iterator[dict[str, Any]]:
    spans = _host_spans(events)
    threads: dict[int, list[DeviceEvent]] = defaultdict(list)
    for event in device_events:
        threads[event.thread].append(event)
    for thread, launched in threads.items():
        around = enclosing(spans.get(thread, ()), [_us(e.launched_ns, base) for e in launched])
        annotated: dict[tuple[int, int, int], tuple[dict[str, Any], list[DeviceEvent]]] = {}
        for event, parents in zip(launched, around, strict=True):
            yield from _launch(event, parents, base)
            for parent in parents:
                if parent["cat"] == "user_annotation":
                    annotated.setdefault((id(parent), event.device, event.stream), (parent, []))[1].append(event)
        for (_, device, stream), (parent, inside) in annotated.items():
            begin, end = min(e.begin_ns for e in inside), max(e.end_ns for e in inside)
            yield {
                "ph": "X",
                "cat": "gpu_user_annotation",
                "name": parent["name"],
                "pid": device,
                "tid": stream,
                "ts": _us(begin, base),
                "dur": (end - begin) / 1000,
                "args": {"External id": parent.get("args", {}).get("External id", 0)},
            }


def _launch(event: DeviceEvent, parents: list[dict[str, Any]], base: int) -> Iterator[dict[str, Any]]:
    """The work itself. If an operator launched it: also the slice on the host, and the flow between the two."""
    stream, name = event.stream, event.name
    args: dict[str, Any] = {
        "device": event.device,
        "context": 1,
        "stream": stream,
        "correlation": event.correlation,
    }
    if event.nbytes:
        args["bytes"] = event.nbytes
        args["memory bandwidth (GB/s)"] = event.nbytes / max(event.ns, 1)
    if event.shapes:
        args["Input Dims"] = [list(s) for s in event.shapes]
        args["Input type"] = list(event.dtypes)
    if event.where:
        args["recorded at"] = event.where
    work: dict[str, Any] = {
        "ph": "X",
        "cat": event.category,
        "name": name,
        "pid": event.device,
        "tid": stream,
        "args": args,
    }
    work |= {"ts": _us(event.begin_ns, base), "dur": event.ns / 1000}
    if not parents:
        yield work
        return
    operators = [p for p in parents if p["cat"] == "cpu_op"] or parents
    parent = operators[-1]
    args["External id"] = external = parent.get("args", {}).get("External id", 0)
    yield work
    host = {"pid": parent["pid"], "tid": parent["tid"], "ts": _us(event.launched_ns, base)}
    copies = event.category == "gpu_memcpy"
    yield {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": "cudaMemcpyAsync" if copies else "cudaLaunchKernel",
        **host,
        "dur": min(_RECORDING_US, max(parent["ts"] + parent.get("dur", 0) - host["ts"], 0)),
        "args": {
            "External id": external,
            "cbid": _COPY if copies else _LAUNCH,
            "correlation": event.correlation,
        },
    }
    flow = {"id": event.correlation, "cat": "ac2g", "name": "ac2g"}
    yield {"ph": "s", **flow, **host}
    yield {"ph": "f", **flow, "pid": event.device, "tid": stream, "ts": work["ts"], "bp": "e"}


def _memory(memory: Sequence[MemoryChange], base: int) -> Iterator[dict[str, Any]]:
    for change in memory:
        yield {
            "ph": "i",
            "cat": "cpu_instant_event",
            "s": "t",
            "name": "[memory]",
            "pid": os.getpid(),
            "tid": change.thread,
            "ts": _us(change.at_ns, base),
            "args": {
                "Total Reserved": change.live_bytes,
                "Total Allocated": change.live_bytes,
                "Bytes": change.nbytes,
                "Device Id": change.buffer & DEVICE_MASK,
                "Device Type": 1,
                "Addr": change.buffer << ID_SHIFT,
            },
        }
