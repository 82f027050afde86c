"""Streams, events and device contexts of `torch.cuda`.

All work of a session runs in the order in which it is recorded. So all streams are in order with each other, and a stream never
needs to wait for another one. Streams only keep their names, devices and priorities, and the current stream of each thread.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from wooly import ipc
from wooly.device import current_devices
from wooly.devices import NAME
from wooly.facade.names import CUDA, to_wooly
from wooly.recorder import Mark, Recorder
from wooly.torch_private import CUDA_DEVICE_TYPE, BaseEvent, BaseStream, next_operation, running_operation

Patch = tuple[Any, str, Any]


class _Numbers:
    """Gives streams their numbers. 1 and 2 are CUDA's names for the default streams, so the first number is 3."""

    def __init__(self) -> None:
        self._count = itertools.count(3)
        self._last = 0

    def new(self) -> int:
        self._last = next(self._count)
        return self._last

    def is_known(self, number: int) -> bool:
        """Whether the default stream, or a stream of this process, has the number."""
        return 0 <= number <= self._last


_numbers = _Numbers()
#: Number of the default stream, as in CUDA.
_DEFAULT_ID = 0


def _index(device: Any) -> int:
    """Index of a device argument; None means the current device."""
    return current_devices().index_of(device)


def _recorder(device: torch.device) -> Recorder:
    return current_devices().recorders[_index(device)]


class Stream(BaseStream):
    """`torch.cuda.Stream`."""

    priority: int

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        pointer = kwargs.pop("stream_ptr", None)
        if pointer is not None and not _numbers.is_known(pointer):
            raise NotImplementedError(
                "streams of other libraries are not supported on the wooly device, because this process has no CUDA runtime; use "
                "torch.cuda.Stream()"
            )
        if not kwargs:
            number = _numbers.new() if pointer is None else pointer
            kwargs = {"stream_id": number, "device_index": _index(device), "device_type": CUDA_DEVICE_TYPE}
        self: Stream = super().__new__(cls, **kwargs)
        self.priority = priority
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `__new__` has initialised the object."""

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Lowest and highest priority. A priority has no effect."""
        return 0, -1

    @property
    def cuda_stream(self) -> int:
        """Number of the stream, in place of CUDA's pointer; 0 is the default stream."""
        return self.stream_id

    @property
    def native_handle(self) -> int:
        return self.cuda_stream

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.cuda_stream)

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured on this stream."""
        capture = _recorder(self.device).capture
        return capture is not None and capture.owns(self.stream_id)

    def synchronize(self) -> None:
        """Wait until all recorded work has run."""
        torch.cuda.synchronize(self.device)

    def query(self) -> bool:
        """Whether all recorded work has run. Does not wait for the device. An error of this work comes at the next wait."""
        recorder = _recorder(self.device)
        with recorder.lock:
            return recorder.passed()

    def wait_stream(self, stream: Any) -> None:
        """Do nothing: all work runs in order."""

    def wait_event(self, event: Any) -> None:
        """Do nothing: all work runs in order."""

    def record_event(self, event: Any = None) -> Any:
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        self._outer = [*getattr(self, "_outer", ()), (torch.cuda.current_device(), current_stream(self.device))]
        set_stream(self)
        return self

    def __exit__(self, *exc: Any) -> None:
        *self._outer, (device, stream) = self._outer
        set_stream(stream)
        torch.cuda.set_device(device)

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"


class ExternalStream(Stream):
    """`torch.cuda.ExternalStream`: a stream of this process by its number. Streams of other libraries raise an error."""

    def __new__(cls, stream_ptr: int, device: Any = None, **kwargs: Any) -> ExternalStream:
        return super().__new__(cls, device, stream_ptr=stream_ptr, **kwargs)  # type: ignore[return-value]


#: Maximum number of changes of the current stream that a thread remembers per device. Then the older half is forgotten.
_MAX_CHANGES = 1 << 14


class _History:
    """The changes of one thread's current stream of one device, so that a backward finds the stream of its forward.

    A change has the number that the next operation of the thread gets in its autograd graph.
    """

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._streams: list[Stream] = []

    def add(self, stream: Stream) -> None:
        """Remember that `stream` is current from the next operation on."""
        number = next_operation()
        if self._numbers and self._numbers[-1] == number:  # no operation under the stream before
            self._streams[-1] = stream
            return
        if len(self._numbers) == _MAX_CHANGES:
            del self._numbers[: _MAX_CHANGES // 2], self._streams[: _MAX_CHANGES // 2]
        self._numbers.append(number)
        self._streams.append(stream)

    def at(self, operation: int) -> Stream | None:
        """The stream under which an operation was called; None for the default stream."""
        found = bisect.bisect_right(self._numbers, operation)
        return self._streams[found - 1] if found else None


class _Selected(threading.local):
    """The stream that each thread has set, by device.

    Attributes:
        streams: the current streams, outside of a backward.
        history: their changes.
        operation: the operation in whose backward streams were set last.
        within: the streams that were set there.
    """

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}
        self.history: dict[int, _History] = {}
        self.operation: int | None = None
        self.within: dict[int, Stream] = {}


_selected = _Selected()


def default_stream(device: Any = None) -> Stream:
    """`torch.cuda.default_stream`."""
    return Stream(stream_id=_DEFAULT_ID, device_index=_index(device), device_type=CUDA_DEVICE_TYPE)


def current_stream(device: Any = None) -> Stream:
    """`torch.cuda.current_stream`: the stream that this thread has set for the device, else the default stream.

    The backward of an operation, and its hooks, run under the stream of the forward.
    """
    index = _index(device)
    operation = running_operation() if _selected.history else None
    if operation is None:
        stream = _selected.streams.get(index)
    elif operation == _selected.operation and index in _selected.within:
        stream = _selected.within[index]
    else:
        history = _selected.history.get(index)
        stream = None if history is None else history.at(operation)
    return default_stream(index) if stream is None else stream


def current_stream_id(index: int) -> int:
    """Number of the stream that this thread has set for a device; 0: the default stream."""
    stream = _selected.streams.get(index)
    return _DEFAULT_ID if stream is None else stream.stream_id


def set_stream(stream: Stream | None) -> None:
    """`torch.cuda.set_stream`. It also sets the current device to the device of the stream."""
    if stream is None:
        return
    index, operation = stream.device_index, running_operation()
    if operation is None:
        _selected.streams[index] = stream
        _selected.history.setdefault(index, _History()).add(stream)
    else:  # until the operation's backward ends
        _selected.history.setdefault(index, _History())
        if operation != _selected.operation:
            _selected.within.clear()
        _selected.within[index] = stream
    _selected.operation = operation
    torch.cuda.set_device(index)


class Event(BaseEvent):
    """`torch.cuda.Event`. With `enable_timing` or `interprocess`, `record` waits until the work before the event has run.

    So another process that gets the event, or is told about it, has nothing to wait for.
    """

    _timing: bool
    _interprocess: bool
    _received: bool
    _handle: bytes
    _at: float
    _mark: Mark
    _device: torch.device | None

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> Event:
        self: Event = super().__new__(cls, device=NAME, enable_timing=enable_timing)
        self._timing = enable_timing
        self._interprocess = interprocess
        self._received = False
        self._handle = b""
        self._at = 0.0
        self._mark = Mark(None, 0)
        self._device = None
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `__new__` has initialised the object."""

    @property
    def device(self) -> torch.device | None:  # type: ignore[override]
        """Device on which the event was recorded; None before `record`."""
        return self._device

    @property
    def event_id(self) -> int:  # type: ignore[override]
        return self.cuda_event

    @property
    def cuda_event(self) -> int:
        """Number of the event, in place of CUDA's pointer; 0 before `record`."""
        return 0 if self._device is None else id(self)

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.cuda_event)

    def record(self, stream: Any = None) -> None:
        """Record the event at the current point of the work."""
        self._require_no_timing()
        self._device = (current_stream() if stream is None else stream).device
        self._received = False
        recorder = _recorder(self._device)
        if (self._timing or self._interprocess) and recorder.capture is None:
            torch.cuda.synchronize(self._device)
        with recorder.lock:
            self._mark = recorder.mark()
        self._at = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Do nothing: all work runs in order."""

    def synchronize(self) -> None:
        """Wait until the work before the event has run. Does nothing if the event was not recorded in this process."""
        if self._device is not None and not self._received:
            recorder = _recorder(self._device)
            with recorder.lock:
                recorder.reach(self._mark)

    def query(self) -> bool:
        """Whether the work before the event has run. Does not wait for the device. An error of it comes at the next wait."""
        if self._device is None or self._received:
            return True
        recorder = _recorder(self._device)
        with recorder.lock:
            return recorder.passed(self._mark)

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to `end_event`.

        Raises:
            RuntimeError: an event has not been recorded, or was made without `enable_timing`.
        """
        if not self._timing or not end_event._timing:
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if self._device is None or end_event._device is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return float(end_event._at - self._at) * 1e3

    def _require_no_timing(self) -> None:
        if self._timing and self._interprocess:
            raise RuntimeError(
                "CUDA error: invalid argument: an event cannot have both enable_timing=True and interprocess=True"
            )

    def ipc_handle(self) -> bytes:
        """The handle by which another process can make this event with `from_ipc_handle`.

        Raises:
            RuntimeError: the event was made without `interprocess`, or with `enable_timing`.
        """
        self._require_no_timing()
        if not self._interprocess:
            raise RuntimeError(
                "CUDA error: invalid resource handle: the event must be made with interprocess=True to have a handle"
            )
        if self._device is None:
            self._device, self._received = current_stream().device, True
        self._handle = self._handle or ipc.new_event_handle()
        return self._handle

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: Any) -> Event:
        """The event of another process.

        Raises:
            RuntimeError: the handle is not valid.
        """
        self = cls(interprocess=True)
        self._handle = ipc.check_event_handle(handle)
        self._device, self._received = torch.device(CUDA, _index(device)), True
        return self

    def __repr__(self) -> str:
        return (
            "<torch.cuda.Event uninitialized>" if self._device is None else f"<torch.cuda.Event {self.cuda_event:#x}>"
        )


class _GenericMeta(type):
    """Metaclass of `torch.Stream` and `torch.Event`.

    A call makes Wooly's object for "cuda", an index and no device, and PyTorch's object for other devices. `isinstance` and
    `issubclass` behave as for PyTorch's class.
    """

    real: Any
    ours: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        given = bool(args) or "device" in kwargs
        target = to_wooly(args[0] if args else kwargs.get("device"))
        if "stream_id" in kwargs or (given and not (target is None or isinstance(target, int) or _is_ours(target))):
            return cls.real(*args, **kwargs)
        kwargs.pop("device", None)
        return cls.make(target.index if isinstance(target, torch.device) else target, *args[1:], **kwargs)

    def make(cls, index: int | None, *args: Any, **kwargs: Any) -> Any:
        if issubclass(cls.ours, BaseEvent):
            return cls.ours(*args, **kwargs)
        return cls.ours(index, *args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.real)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.real)


def _is_ours(target: Any) -> bool:
    return isinstance(target, torch.device) and target.type == NAME


class AnyStream(metaclass=_GenericMeta):
    """`torch.Stream`."""

    real, ours = BaseStream, Stream


class AnyEvent(metaclass=_GenericMeta):
    """`torch.Event`."""

    real, ours = BaseEvent, Event


def patches() -> Iterator[Patch]:
    """Yield the patches (owner, name, value) for streams and events. `torch.cuda.stream(…)` is PyTorch's own and uses them."""
    for owner in (torch.cuda, torch.cuda.streams):
        yield (owner, "Stream", Stream)
        yield (owner, "ExternalStream", ExternalStream)
        yield (owner, "Event", Event)
    yield (torch, "Stream", AnyStream)
    yield (torch, "Event", AnyEvent)
    yield (torch.cuda, "current_stream", current_stream)
    yield (torch.cuda, "default_stream", default_stream)
    yield (torch.cuda, "set_stream", set_stream)
    yield (torch.cuda, "get_stream_from_external", lambda data_ptr, device=None: ExternalStream(data_ptr, device))


class device_context(contextlib.AbstractContextManager[Any]):
    """`torch.cuda.device(…)`: sets the current device of this thread in the block. A negative index changes nothing."""

    def __init__(self, device: Any) -> None:
        keep = device is None or (isinstance(device, int) and device < 0)
        self.idx = -1 if keep else current_devices().index_of(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        devices = current_devices()
        self.prev_idx = devices.current
        if self.idx >= 0:
            devices.current = self.idx

    def __exit__(self, *exc: Any) -> None:
        if self.idx >= 0:
            current_devices().current = self.prev_idx


class device_of(device_context):
    """`torch.cuda.device_of(…)`: sets the current device to that of a tensor. A host tensor changes nothing."""

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.get_device() if obj.is_cuda else -1)
