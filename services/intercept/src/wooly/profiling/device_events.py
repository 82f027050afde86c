"""Turns the executor's records into events with names, shapes, and times of the client's clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from wooly_wis.codec import decode_form
from wooly_wis.frames import WHOLE_FRAME, Record
from wooly_wis.program import Form, Role, View

from wooly.interned_forms import InternedForm
from wooly.profiling.watch import BytesCopied, LaunchPoint, ProgramRun, Watch
from wooly.recorder import Recorder

#: A kind of work, as in PyTorch's trace files.
Category = Literal["kernel", "gpu_memcpy"]
#: Number of CUDA's default stream in PyTorch's profiles. Other streams follow.
DEFAULT_STREAM = 7
_DEVICE_COPY = "Memcpy DtoD (Device -> Device)"


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """Something that occupied a device.

    Attributes:
        name: name of the library operator, opcode or kernel.
        category: kind of work.
        correlation: number that connects the event with its launch.
        device: index of the device.
        stream: number of the stream, as in a profile of CUDA: the default stream is `DEFAULT_STREAM`.
        begin_ns: start, in ns since 1970 by the client's clock.
        ns: duration in ns.
        launched_ns: when the instruction was recorded or the copy was asked for, in ns since 1970.
        thread: the system's number of the thread that did so.
        where: `file(line): function` that did so; empty for copies.
        shapes: shape of each operand that is read.
        dtypes: dtype of each operand that is read.
        nbytes: bytes that were copied; 0 for a kernel.
    """

    name: str
    category: Category
    correlation: int
    device: int
    stream: int
    begin_ns: int
    ns: int
    launched_ns: int
    thread: int
    where: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    nbytes: int = 0

    @property
    def end_ns(self) -> int:
        """End, in ns since 1970."""
        return self.begin_ns + self.ns


class _Meaning(NamedTuple):
    """What a form says about the work of its instruction."""

    name: str
    category: Category
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    nbytes: int


def events_of(watch: Watch) -> list[DeviceEvent]:
    """The events of a watch that has ended, in the order of their start. Work that was launched while nothing was collected is
    left out.
    """
    found = list(in_turn(_events(watch)))
    found.sort(key=lambda event: event.begin_ns)
    return found


def in_turn(events: Iterable[DeviceEvent]) -> Iterator[DeviceEvent]:
    """The events, each after the end of the one before on its stream.

    `_event` moves work that seems to begin before it was launched. Without this, it could overlap with the work behind it.
    """
    ends: dict[int, int] = {}
    for event in events:
        moved = replace(event, begin_ns=max(event.begin_ns, ends.get(event.stream, 0)))
        ends[event.stream] = moved.end_ns
        yield moved


def _events(watch: Watch) -> Iterator[DeviceEvent]:
    meanings: dict[InternedForm, _Meaning] = {}
    forms: dict[int, list[InternedForm]] = {}
    for number, record in enumerate(watch.records, 1):
        frame = watch.frames.get(record.seq)
        if isinstance(frame, BytesCopied) and record.instruction == WHOLE_FRAME:
            name = "Memcpy HtoD (Pageable -> Device)" if frame.to_device else "Memcpy DtoH (Device -> Pageable)"
            meaning = _Meaning(name, "gpu_memcpy", (), (), frame.nbytes)
            yield _event(watch, record, meaning, frame.point, number, "")
        elif isinstance(frame, ProgramRun) and record.instruction < len(frame.points):
            point = frame.replayed or frame.points[record.instruction]
            if not isinstance(point, LaunchPoint):
                continue
            known = forms.get(id(frame.words))
            if known is None:
                known = forms[id(frame.words)] = _forms_of(watch.recorder, frame.words)
            form = known[record.instruction]
            found = meanings.get(form)
            if found is None:
                found = meanings[form] = _meaning(form)
            if record.instructions > 1:
                found = found._replace(name=f"fused {found.name} and {record.instructions - 1} more")
            yield _event(watch, record, found, point, number, _line(frame.points[record.instruction]))


def _event(watch: Watch, record: Record, meaning: _Meaning, point: LaunchPoint, number: int, where: str) -> DeviceEvent:
    # The clocks are aligned to within half a round trip. Nothing runs before it was launched.
    begin = max(record.begin_ns + watch.shift_ns, point.at_ns)
    return DeviceEvent(
        meaning.name,
        meaning.category,
        number << 3 | point.device,
        point.device,
        DEFAULT_STREAM + point.stream,
        begin,
        record.ns,
        point.at_ns,
        point.thread,
        where,
        meaning.shapes,
        meaning.dtypes,
        meaning.nbytes,
    )


def _forms_of(recorder: Recorder, words: list[int]) -> list[InternedForm]:
    return [form for form, _ in recorder.instructions_of(words)]


def _meaning(interned: InternedForm) -> _Meaning:
    form = decode_form(interned.raw)
    views = [o.view for o in form.operands if o.role is not Role.OUT and o.view is not None]
    shapes, dtypes = tuple([v.sizes for v in views]), tuple([v.dtype.label for v in views])
    if form.opcode == "copy" and _moves_bytes(form):
        source = views[0]
        return _Meaning(_DEVICE_COPY, "gpu_memcpy", shapes, dtypes, source.end - source.offset)
    named = form.opcode in ("extern", "kernel.launch")
    return _Meaning(interned.name if named else f"wis.{form.opcode}", "kernel", shapes, dtypes, 0)


def _moves_bytes(form: Form) -> bool:
    """Whether a copy only moves bytes: both sides are contiguous and have one dtype. CUDA then copies without a kernel."""
    source, target = [o.view for o in form.operands]
    if source is None or target is None or source.dtype != target.dtype:
        return False
    return _is_contiguous(source) and _is_contiguous(target)


def _is_contiguous(view: View) -> bool:
    expected = 1
    for size, stride in zip(reversed(view.sizes), reversed(view.strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _line(where: tuple[object, int]) -> str:
    """An origin as PyTorch writes it in stacks: `file(line): function`."""
    code, last = where
    line = code.co_firstlineno  # type: ignore[attr-defined]
    for start, end, number in code.co_lines():  # type: ignore[attr-defined]
        if start <= last < end and number is not None:
            line = number
            break
    return f"{code.co_filename}({line}): {code.co_name}"  # type: ignore[attr-defined]
