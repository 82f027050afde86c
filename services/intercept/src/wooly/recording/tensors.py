"""The buffers that are live at one place among the frames of a bundle, with the Python lines that made them, as tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from wooly_wis.dtypes import DType
from wooly_wis.program import View

from wooly.dtypes import TORCH_DTYPES
from wooly.errors import RemoteOperationError
from wooly.link import Link
from wooly.recording.bundle import AnyFrame, Bundle, Line, ReadFrame, RunFrame, WriteFrame
from wooly.recording.programs import Decoded, Programs, larger

#: What operators are called that are no instructions.
UPLOAD = "upload"
#: Errors of an operation that an executor reports.
REMOTE_ERRORS = (RemoteOperationError, torch.OutOfMemoryError)
#: Maximum size, in bytes, of one read.
READ_PIECE = 16 << 20


@dataclass
class LiveBuffer:
    """One buffer.

    Attributes:
        buffer: its id.
        frame: number of the frame that wrote it last.
        made: Python line of its first content; None: it was not written.
        written: Python line of its last write.
        operator: operator of its last write.
        view: its largest dense view so far; None: none is known.
        nbytes: its bytes; None: only the executor knows.
    """

    buffer: int
    frame: int = 0
    made: Line | None = None
    written: Line | None = None
    operator: str = ""
    view: View | None = None
    nbytes: int | None = None

    def write(self, frame: int, line: Line, operator: str) -> None:
        """Note a write."""
        self.made = self.made or line
        self.frame, self.written, self.operator = frame, line, operator

    @property
    def name(self) -> str:
        """A name for files: the line that made it, its last operator, its buffer."""
        made = (
            ""
            if self.made is None
            else f"{self.made.file.replace(chr(92), '/').rpartition('/')[2]}:{self.made.number} "
        )
        return f"{made}{self.operator or 'zeros'} #{self.buffer}"


class LiveBuffers:
    """The live buffers of a session, as its frames change them."""

    def __init__(self, bundle: Bundle, programs: Programs) -> None:
        self._bundle, self._programs = bundle, programs
        self.by_id: dict[int, LiveBuffer] = {}

    def apply(self, frame: AnyFrame) -> None:
        """Note what a frame changes."""
        if isinstance(frame, ReadFrame):
            return
        if isinstance(frame, WriteFrame):
            self.of(frame.buffer).write(frame.number, self._bundle.lines[frame.line], UPLOAD)
            return
        self.run(frame.number, self._programs.of(frame), frame.run.bindings, self._bundle.origins(frame.origins))
        for buffer in frame.run.frees:
            self.by_id.pop(buffer, None)

    def of(self, buffer: int) -> LiveBuffer:
        """A buffer."""
        return self.by_id.setdefault(buffer, LiveBuffer(buffer))

    def run(self, frame: int, decoded: Decoded, bindings: list[int], lines: list[Line]) -> None:
        """Note what a program changes. `lines`: the Python line of each instruction."""
        sizes = decoded.facts.slot_alloc
        for slot, (buffer, use) in enumerate(zip(bindings, decoded.slots, strict=True)):
            if use.freed:
                self.by_id.pop(buffer, None)
                continue
            if use.born:
                self.by_id[buffer] = LiveBuffer(buffer, frame, nbytes=sizes[slot])
            found = self.of(buffer)
            found.view = larger(found.view, use.view)
            if use.made is not None and use.written is not None:
                found.made = found.made or lines[use.made]
                found.write(frame, lines[use.written], decoded.names[use.written])

    def find_views(self, after: int) -> None:
        """Take the shapes of buffers that no program has used yet from the frames after `after`."""
        missing = {b.buffer for b in self.by_id.values() if b.view is None}
        for buffer, view in first_views(self._bundle, self._programs, missing, after + 1):
            self.by_id[buffer].view = view


def first_views(bundle: Bundle, programs: Programs, buffers: set[int], first: int) -> Iterator[tuple[int, View]]:
    """Yield each of these buffers with the largest view of the first program from the frame `first` on that uses it."""
    for frame in bundle.all_frames(first):
        if not buffers:
            return
        if not isinstance(frame, RunFrame) or buffers.isdisjoint(frame.run.bindings):
            continue
        for buffer, use in zip(frame.run.bindings, programs.of(frame).slots, strict=True):
            if buffer in buffers:
                buffers.discard(buffer)
                if use.view is not None and not use.born:
                    yield buffer, use.view


def dtypes_of_writes(bundle: Bundle, programs: Programs) -> dict[int, DType]:
    """The dtype of each WRITE frame's bytes: that of the first view through which a later program reads the buffer."""
    found: dict[int, DType] = {}
    waiting: dict[int, list[int]] = {}
    for frame in bundle.all_frames():
        if isinstance(frame, WriteFrame):
            waiting.setdefault(frame.buffer, []).append(frame.number)
        elif not isinstance(frame, ReadFrame) and not waiting.keys().isdisjoint(frame.run.bindings):
            for buffer, use in zip(frame.run.bindings, programs.of(frame).slots, strict=True):
                if buffer in waiting and (use.read is not None or use.freed or use.born):
                    dtype = None if use.read is None else use.read.dtype
                    found |= {number: dtype for number in waiting.pop(buffer) if dtype is not None}
    return found


def read_bytes(link: Link, buffer: int, offset: int, nbytes: int) -> bytearray:
    """A part of a buffer.

    Raises:
        RemoteOperationError: an operation that computed the buffer failed, or another operation before the read.
        MemoryError: this process has no memory for it.
    """
    data = bytearray(nbytes)
    view = memoryview(data)
    for at in range(0, nbytes, READ_PIECE):
        piece = view[at : at + READ_PIECE]
        link.read(buffer, offset + at, piece)
    return data


def flat_view(dtype: DType, nbytes: int) -> View:
    """All whole elements of a buffer, in one dimension."""
    return View(dtype, (nbytes // dtype.itemsize,), (1,))


def as_tensor(data: bytearray, view: View) -> torch.Tensor:
    """The tensor of a view, whose bytes are from its first to its last element."""
    dtype = TORCH_DTYPES[view.dtype]
    if not view.numel:
        return torch.empty(view.sizes, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).as_strided(view.sizes, view.strides)


def statistics(t: torch.Tensor) -> dict[str, Any]:
    """Minimum, maximum and mean of the numbers of a tensor, and how many are NaN or infinite. Complex numbers: their sizes."""
    if not t.numel():
        return {"min": None, "max": None, "mean": None, "nan": 0, "inf": 0}
    if t.is_complex():
        t = t.to(torch.complex128).abs()
    t = t.to(torch.float64)
    numbers = t[~t.isnan()]
    found: dict[str, Any] = {"nan": t.numel() - numbers.numel(), "inf": int(numbers.isinf().sum())}
    if not numbers.numel():
        return {"min": None, "max": None, "mean": None, **found}
    return {"min": float(numbers.min()), "max": float(numbers.max()), "mean": float(numbers.mean()), **found}


@dataclass(frozen=True)
class LiveTensor:
    """A live buffer with its content.

    Attributes:
        buffer: the buffer.
        row: the tensor for tables and JSON.
        tensor: the content; None: it cannot be read, or was dropped.
        error: why it cannot be read.
    """

    buffer: LiveBuffer
    row: dict[str, Any]
    tensor: torch.Tensor | None
    error: str = ""

    def without_content(self) -> LiveTensor:
        """The row alone, so that the content does not stay in memory."""
        return replace(self, tensor=None)


def _live_tensor(b: LiveBuffer, view: View, tensor: torch.Tensor | None, error: str = "") -> LiveTensor:
    row: dict[str, Any] = {
        "name": b.name,
        "made": None if b.made is None else str(b.made),
        "written": None if b.written is None else str(b.written),
        "operator": b.operator,
        "frame": b.frame,
        "dtype": view.dtype.label,
        "shape": list(view.sizes),
        "error": error,
    }
    return LiveTensor(b, row if tensor is None else row | statistics(tensor), tensor, error)


def live_tensors(live: Mapping[int, LiveBuffer], link: Link) -> Iterable[LiveTensor]:
    """Read all live buffers of a session, one by one, in the order of the lines that made them."""
    sizes = dict(link.buffers())
    known = [replace(live[b], nbytes=n) if b in live else LiveBuffer(b, nbytes=n) for b, n in sizes.items()]

    def place(b: LiveBuffer) -> tuple[str, int, int, int]:
        return (b.made.file, b.made.number, b.frame, b.buffer) if b.made else ("", 0, b.frame, b.buffer)

    for b in sorted(known, key=place):
        nbytes = b.nbytes or 0
        view = b.view if b.view is not None and b.view.end <= nbytes else flat_view(DType.U8, nbytes)
        try:
            data = read_bytes(link, b.buffer, view.offset, max(view.end - view.offset, 0))
        except REMOTE_ERRORS as e:
            yield _live_tensor(b, view, None, str(e))
            continue
        yield _live_tensor(b, view, as_tensor(data, view))
