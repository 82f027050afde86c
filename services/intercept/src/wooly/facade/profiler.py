"""PyTorch's profiler: the work of the Wooly device is its CUDA activity.

While a profiler with CUDA activity runs, the executor measures the session's work step by step. PyTorch's C++ part profiles the
host only, and the device's events are added to its results: to the list of events, and to trace files after they are written.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerActivity

from wooly.device import current
from wooly.devices import Devices
from wooly.errors import WoolyError
from wooly.facade.names import CUDA
from wooly.facade.streams import current_stream_id
from wooly.profiling.device_events import DeviceEvent, events_of
from wooly.profiling.function_events import add_device_events
from wooly.profiling.trace_file import add_to_trace
from wooly.profiling.watch import MemoryChange, Watch
from wooly.recorder import Recorder
from wooly.torch_private import KINETO, ProfilerMethods, supported_activities

Patch = tuple[Any, str, Any]
_profile = autograd_profiler.profile


class DeviceProfile:
    """The devices' part of one profile.

    Args:
        devices: the process's devices.
        memory: also note storages.

    Attributes:
        events: what occupied the devices, after `end`.
        memory: storages that were made or freed.
        dropped: number of events that were dropped because there were too many.
    """

    def __init__(self, devices: Devices, *, memory: bool) -> None:
        self.events: list[DeviceEvent] = []
        self.memory: list[MemoryChange] = []
        self.dropped = 0
        self._watches: list[Watch] = []
        if current().forked:
            return  # this process has no session
        by_link: dict[Any, list[Recorder]] = {}  # recorders that share a link have one lock
        for recorder in devices.active():
            if recorder.link is not None or recorder.opener is not None:
                by_link.setdefault(recorder.lock, []).append(recorder)
        for recorders in by_link.values():
            watch = Watch(recorders, lambda: devices.current, current_stream_id, memory=memory)
            watch.begin()
            self._watches.append(watch)

    def collect(self, on: bool) -> None:
        """Note launches and copies from now on, or no longer."""
        for watch in self._watches:
            watch.collecting = on

    def end(self) -> None:
        """Stop, and make the events. If the session has ended, only the events that are here."""
        for watch in self._watches:
            with contextlib.suppress(WoolyError):  # the synchronisation that follows raises it
                watch.end()
            self.events += events_of(watch)
            self.memory += watch.memory
            self.dropped += watch.dropped
        self._watches = []


class Profiles:
    """Wraps the methods of PyTorch's profiler.

    Args:
        devices: the process's devices.
        name_of: returns the name of a device by its index.
    """

    def __init__(self, devices: Devices, name_of: Callable[[int], str]) -> None:
        self._devices, self._name_of = devices, name_of
        self._running: DeviceProfile | None = None

    def patches(self) -> Iterator[Patch]:
        """Yield the patches (owner, name, value)."""
        make: Any = _profile.__init__
        leave: Any = _profile.__exit__
        export: Any = _profile.export_chrome_trace
        toggle: Any = _profile.toggle_collection_dynamic

        @functools.wraps(make)
        def init(profile: Any, *args: Any, **kwargs: Any) -> None:
            make(profile, *args, **kwargs)
            if getattr(profile, "use_device", None) == CUDA:
                # The C++ part must not look for events of CUDA's runtime.
                profile.profiler_kind = KINETO
                if ProfilerActivity.CPU in profile.kineto_activities:
                    profile.kineto_activities.discard(ProfilerActivity.CUDA)

        @functools.wraps(ProfilerMethods.start)
        def start(profile: Any) -> None:
            if profile.use_device == CUDA and self._running is None:
                self._running = profile.device_profile = DeviceProfile(self._devices, memory=profile.profile_memory)
            ProfilerMethods.start(profile)

        @functools.wraps(leave)
        def stop(profile: Any, *exc: Any) -> Any:
            running = self._running
            failure: RuntimeError | None = None
            mine = getattr(profile, "device_profile", None) is running
            if running is not None and mine:
                self._running = None
                running.end()
                try:
                    torch.cuda.synchronize()
                except RuntimeError as e:  # the C++ part must stop, too
                    failure = e
            done = leave(profile, *exc)
            if failure is not None:
                raise failure
            return done

        @functools.wraps(ProfilerMethods.parse)
        def parse(profile: Any, result: Any, *args: Any, **kwargs: Any) -> list[Any]:
            events = ProfilerMethods.parse(profile, _Readable(result), *args, **kwargs)
            found: DeviceProfile | None = getattr(profile, "device_profile", None)
            if found is None:
                return events
            return add_device_events(
                events,
                found.events,
                found.memory,
                result.trace_start_ns(),
                shapes=profile.record_shapes,
                stacks=profile.with_stack,
            )

        @functools.wraps(export)
        def export_chrome_trace(profile: Any, path: str, *args: Any, **kwargs: Any) -> Any:
            done = export(profile, path, *args, **kwargs)
            found: DeviceProfile | None = getattr(profile, "device_profile", None)
            if found is not None:
                names = {index: self._name_of(index) for index in sorted({e.device for e in found.events})}
                add_to_trace(Path(path), found.events, found.memory, names)
            return done

        @functools.wraps(toggle)
        def toggle_collection(profile: Any, enabled: bool, activities: Any) -> None:
            wanted = set(activities)
            if ProfilerActivity.CUDA in wanted and self._running is not None:
                self._running.collect(enabled)
            if wanted - {ProfilerActivity.CUDA}:
                toggle(profile, enabled, wanted - {ProfilerActivity.CUDA})

        start_name, parse_name = ProfilerMethods.names
        yield (_profile, "__init__", init)
        yield (_profile, start_name, start)
        yield (_profile, "__exit__", stop)
        yield (_profile, parse_name, parse)
        yield (_profile, "export_chrome_trace", export_chrome_trace)
        yield (_profile, "toggle_collection_dynamic", toggle_collection)
        for owner in (torch.autograd, torch.autograd.profiler, torch.profiler):
            yield (owner, "_supported_activities", _supported)


class _Readable:
    """The results of PyTorch's C++ part, without events whose names are not UTF-8.

    With `with_stack`, the names of some functions of C extensions are not, and asking for them raises a UnicodeDecodeError.
    """

    def __init__(self, result: Any) -> None:
        self._result = result

    def events(self) -> list[Any]:
        """The events with readable names."""
        return [event for event in self._result.events() if _is_readable(event)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._result, name)


def _is_readable(event: Any) -> bool:
    try:
        event.name()
    except UnicodeDecodeError:
        return False
    return True


def _supported() -> set[ProfilerActivity]:
    """What can be profiled: what PyTorch's build can profile, and CUDA."""
    return supported_activities() | {ProfilerActivity.CUDA}


def patches(devices: Devices, name_of: Callable[[int], str]) -> Iterator[Patch]:
    """Yield the patches (owner, name, value) for PyTorch's profiler."""
    yield from Profiles(devices, name_of).patches()
