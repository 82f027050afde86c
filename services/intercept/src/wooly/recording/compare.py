"""Plays a bundle on two executors side by side, and names the first instruction whose results differ.

Both play the same frames. After each run, the buffers that it wrote are compared. If they differ within the tolerance, the second
executor gets the bytes of the first, so each run begins with the same bits on both, and rounding does not accumulate over runs.
The first run that differs by more is played again, in new sessions, instruction by instruction.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from wooly_wis.dtypes import DType
from wooly_wis.program import Role, View

from wooly.errors import WoolyError
from wooly.recording.bundle import AnyFrame, Bundle, Line, ReadFrame, RunFrame, WriteFrame
from wooly.recording.programs import Decoded, Programs
from wooly.recording.replay import Player
from wooly.recording.tensors import REMOTE_ERRORS, as_tensor, flat_view, read_bytes


class UnrepeatableError(WoolyError):
    """A second comparison of the same frames had another result."""

    code = "wooly.unrepeatable"


class Pair(NamedTuple):
    """Players on the two executors, each in a new session, and the names of the executors."""

    one: Player
    two: Player
    names: tuple[str, str]


class Result(NamedTuple):
    """One result of one executor: its bytes, or the error."""

    data: bytearray
    error: str = ""


@dataclass(frozen=True)
class Gap:
    """How two results differ.

    Attributes:
        largest: largest absolute difference; None if it is no number (NaN, bytes, an error).
        scale: largest absolute number of the first result.
        at: index of the largest difference.
        values: both numbers there, or both errors.
        count: number of elements that differ.
        of: number of elements.
    """

    largest: float | None
    scale: float
    at: list[int]
    values: tuple[Any, Any]
    count: int
    of: int

    def within(self, tolerance: float) -> bool:
        """Whether the difference is at most `tolerance` times the largest number of the result."""
        return self.largest is not None and self.largest <= tolerance * self.scale


@dataclass(frozen=True)
class Culprit:
    """The first instruction whose results differ, or the run if no single instruction of it differs.

    Attributes:
        frame: number of the frame.
        instruction: index of the instruction in its program; None: only the program as a whole differs.
        operator: its operator, or the last one that wrote the buffer.
        line: its Python line.
        operands: role, dtype and sizes of each operand.
        result: index of the operand that differs most.
        gap: how it differs.
        names: names of the executors.
    """

    frame: int
    instruction: int | None
    operator: str
    line: Line
    operands: list[str]
    result: int
    gap: Gap
    names: tuple[str, str]

    def row(self) -> dict[str, Any]:
        """For JSON."""
        gap = self.gap
        return {
            "frame": self.frame,
            "instruction": self.instruction,
            "operator": self.operator,
            "line": str(self.line),
            "operands": self.operands,
            "result": self.result,
            "largest_difference": gap.largest,
            "largest_value": gap.scale,
            "index": gap.at,
            "values": [*gap.values],
            "different_elements": gap.count,
            "elements": gap.of,
            "executors": [*self.names],
        }


@dataclass
class Compared:
    """What a comparison found.

    Attributes:
        frames: number of frames that were compared.
        runs: number of runs whose results were compared.
        rounded: number of runs whose results differed within the tolerance.
        accumulated: number of runs that differed by more, although no instruction did.
        culprit: the first difference; None: there is none.
    """

    frames: int = 0
    runs: int = 0
    rounded: int = 0
    accumulated: int = 0
    culprit: Culprit | None = None


def compare(
    bundle: Bundle,
    programs: Programs,
    open_pair: Callable[[], AbstractContextManager[Pair]],
    tolerance: float = 0.0,
    last: int | None = None,
    progress: Callable[[int], None] = lambda frame: None,
) -> Compared:
    """Find the first instruction whose results differ.

    Args:
        bundle: the bundle.
        programs: its programs.
        open_pair: opens a new session on each executor.
        tolerance: largest difference to accept, relative to the largest number of a result. Integers must be equal.
        last: last frame to compare.
        progress: is told the number of each frame.

    Raises:
        UnrepeatableError: the same frames had other results when they were played again.
    """
    found = Compared()
    with open_pair() as pair:
        whole = _Comparison(bundle, programs, pair, tolerance, found, progress)
        suspect = whole.play(1, last or bundle.frames)
    if suspect is None:
        return found
    again = Compared()
    with open_pair() as pair:
        single = _Comparison(bundle, programs, pair, tolerance, again, progress)
        other = single.play(1, suspect.frame - 1)
        if other is not None:
            raise UnrepeatableError(
                f"the first run that differs was frame {suspect.frame}, and frame {other.frame} ({other.line}) when it was "
                "played again: the operations of an executor do not repeat their bits"
            )
        again.culprit = single.single_step(suspect, last or bundle.frames)
    return again


@dataclass
class _Comparison:
    """Two sessions that play the same frames."""

    bundle: Bundle
    programs: Programs
    pair: Pair
    tolerance: float
    found: Compared
    progress: Callable[[int], None]
    #: Bytes of the buffers that programs have allocated; those of the others are asked for.
    sizes: dict[int, int] = field(default_factory=dict)

    def play(self, first: int, last: int) -> Culprit | None:
        """Play frames. Returns the first run that differs by more than the tolerance."""
        for frame in self.bundle.all_frames(first, last):
            self.progress(frame.number)
            self.found.frames += 1
            culprit = self._frame(frame)
            if culprit is not None:
                return culprit
        return None

    def single_step(self, suspect: Culprit, last: int) -> Culprit | None:
        """Play the frame of `suspect`, and with a tolerance the frames after it, instruction by instruction.

        Returns:
            The first instruction that differs by more than the tolerance. If the results have to be equal and no instruction
            differs: `suspect`, because then only the program as a whole differs.
        """
        for frame in self.bundle.all_frames(suspect.frame, last):
            self.progress(frame.number)
            self.found.frames += 1
            if isinstance(frame, RunFrame) and self.programs.of(frame).program.body:
                before = self.found.rounded
                culprit = self._instructions(frame)
                if culprit is not None:
                    return culprit
                if frame.number == suspect.frame:
                    if not self.tolerance or self.found.rounded == before:
                        return suspect
                    self.found.accumulated += 1
            else:
                culprit = self._frame(frame)
                if culprit is not None:
                    return culprit
        return None

    # -- whole frames ----------------------------------------------------------------------------------------------------

    def _frame(self, frame: AnyFrame) -> Culprit | None:
        if isinstance(frame, ReadFrame):
            return None  # what it reads was compared when it was written
        answers = [self._play(player, frame) for player in self.pair[:2]]
        if isinstance(frame, WriteFrame):
            return None
        self._note(frame)
        decoded, self.found.runs = self.programs.of(frame), self.found.runs + 1
        worst: tuple[int, View, Gap] | None = None
        rounded = False
        for slot, use in enumerate(decoded.slots):
            buffer = frame.run.bindings[slot]
            if use.written is None or use.freed or buffer in frame.run.frees:
                continue
            view = flat_view(use.dtype, self._size(buffer))
            gap = self._compare(buffer, view)
            if gap is None:
                continue
            rounded = True
            if not gap.within(self.tolerance) and (worst is None or _worse(gap, worst[2])):
                worst = use.written, view, gap
        self.found.rounded += rounded
        lines = self.bundle.origins(frame.origins)
        failure = _failure(*answers)
        if failure is not None and lines:
            worst = len(lines) - 1, flat_view(DType.U8, 0), failure[1]
        if worst is None:
            return None
        at, view, gap = worst
        shown = [_operand(Role.OUT, view)]
        return Culprit(frame.number, None, decoded.names[at], lines[at], shown, 0, gap, self.pair.names)

    def _play(self, player: Player, frame: AnyFrame) -> Result:
        try:
            answer = player.play(frame)
            if isinstance(frame, RunFrame):
                player.link.sync()  # takes the error of the run, so that each buffer tells its own
        except REMOTE_ERRORS as e:
            return Result(bytearray(), str(e) or "an error")
        return Result(bytearray(answer))

    def _note(self, frame: RunFrame) -> None:
        """Note the sizes of the buffers that a run makes."""
        decoded = self.programs.of(frame)
        for buffer, size, use in zip(frame.run.bindings, decoded.facts.slot_alloc, decoded.slots, strict=True):
            if size is not None:
                self.sizes[buffer] = size
            elif use.born:
                self.sizes.pop(buffer, None)
        for buffer in frame.run.frees:
            self.sizes.pop(buffer, None)

    def _size(self, buffer: int) -> int:
        """Bytes of a buffer; 0 if it does not exist in both sessions, or has different sizes."""
        if buffer not in self.sizes:
            one, two = [dict(player.link.buffers()) for player in self.pair[:2]]
            self.sizes |= {b: n for b, n in one.items() if two.get(b) == n}
        return self.sizes.get(buffer, 0)

    # -- single instructions ---------------------------------------------------------------------------------------------

    def _instructions(self, frame: RunFrame) -> Culprit | None:
        """Play a run instruction by instruction. Returns the first instruction that differs by more than the tolerance."""
        decoded, run = self.programs.of(frame), frame.run
        lines = self.bundle.origins(frame.origins)
        for player in self.pair[:2]:
            player.send_sources(frame)
        self._note(frame)
        rounded = False
        for index, _ in enumerate(decoded.program.body):
            piece, form = decoded.piece(index, index + 1), decoded.form(index)
            frees = run.frees if index == len(decoded.program.body) - 1 else []
            reply = run.reply and any(o.view is None and o.role is Role.OUT for o in form.operands)
            outcomes = []
            for player in self.pair[:2]:
                try:
                    answer = player.run(
                        piece.raw,
                        [decoded.names[index]],
                        piece.bindings(run),
                        piece.params(run),
                        frees,
                        [lines[index]],
                        reply=reply,
                    )
                    player.link.sync()
                    outcomes.append(Result(bytearray(answer)))
                except REMOTE_ERRORS as e:
                    outcomes.append(Result(bytearray(), str(e) or "an error"))
            found = None if form.opcode in ("alloc", "free") else self._results(decoded, frame, index)
            found = _failure(*outcomes) or found
            if found is not None:
                result, gap = found
                rounded = True
                if not gap.within(self.tolerance):
                    operands = [_operand(o.role, o.view) for o in form.operands]
                    return Culprit(
                        frame.number, index, decoded.names[index], lines[index], operands, result, gap, self.pair.names
                    )
        self.found.runs += 1
        self.found.rounded += rounded
        return None

    def _results(self, decoded: Decoded, frame: RunFrame, index: int) -> tuple[int, Gap] | None:
        """The operand of an instruction whose results differ most, and how."""
        instruction, form = decoded.program.body[index], decoded.form(index)
        worst: tuple[int, Gap] | None = None
        for k, (slot, operand) in enumerate(zip(instruction.slots, form.operands, strict=True)):
            buffer = frame.run.bindings[slot]
            if operand.role is Role.IN or (index == len(decoded.program.body) - 1 and buffer in frame.run.frees):
                continue
            view = operand.view
            if view is None:
                view = flat_view(decoded.slots[slot].dtype, self._size(buffer))
            gap = self._compare(buffer, view)
            if gap is not None and (worst is None or _worse(gap, worst[1])):
                worst = k, gap
        return worst

    # -- comparing -------------------------------------------------------------------------------------------------------

    def _compare(self, buffer: int, view: View) -> Gap | None:
        """Compare a view of a buffer. If the results differ within the tolerance, the second session gets those of the first.

        Returns:
            How they differ; None if they are equal, or if both failed.
        """
        if view.end > self._size(buffer):
            return None  # the run failed, or the buffers have different sizes: then it had different answers
        offset, nbytes = view.offset, max(view.end - view.offset, 0)
        one, two = [_read(player, buffer, offset, nbytes) for player in self.pair[:2]]
        if one.error or two.error:
            both = bool(one.error) == bool(two.error)
            values = one.error or "no error", two.error or "no error"
            return None if both else Gap(None, 0.0, [], values, view.numel, view.numel)
        if one.data == two.data:
            return None
        gap = difference(as_tensor(one.data, view), as_tensor(two.data, view))
        if gap is not None and not gap.within(self.tolerance):
            return gap
        self.pair.two.link.write(buffer, offset, memoryview(one.data))
        return gap


def _read(player: Player, buffer: int, offset: int, nbytes: int) -> Result:
    try:
        return Result(read_bytes(player.link, buffer, offset, nbytes))
    except REMOTE_ERRORS as e:
        return Result(bytearray(), str(e) or "an error")


def _failure(one: Result, two: Result) -> tuple[int, Gap] | None:
    """The difference between an error and a result, or between two answers; None if there is none."""
    if bool(one.error) == bool(two.error) and one.data == two.data:
        return None
    said = [r.error or ("an answer" if one.data and two.data else "no error") for r in (one, two)]
    return 0, Gap(None, 0.0, [], (said[0], said[1]), 1, 1)


def _worse(gap: Gap, other: Gap) -> bool:
    """Whether a difference is worse than another one."""
    return _relative(gap) > _relative(other)


def _relative(gap: Gap) -> float:
    if gap.largest is None or not gap.scale:
        return float("inf")
    return gap.largest / gap.scale


def difference(one: torch.Tensor, two: torch.Tensor) -> Gap | None:
    """How two tensors of the same dtype and sizes differ; None if all elements are equal (-0.0 and 0.0 are, and NaN and NaN)."""
    a, b = one.flatten(), two.flatten()
    exact = not (a.is_floating_point() or a.is_complex())
    if a.dtype in _SIGNED:
        a, b = a.view(_SIGNED[a.dtype]), b.view(_SIGNED[b.dtype])
    wide = torch.complex128 if a.is_complex() else torch.float64
    x, y = a.to(wide), b.to(wide)
    unlike = a != b if exact else (x != y) & ~(x.isnan() & y.isnan())
    if not bool(unlike.any()):
        return None
    gaps = (x - y).abs().where(unlike, 0.0)
    infinite = ~gaps.isfinite() & unlike
    at = (
        int((infinite if bool(infinite.any()) else gaps).to(torch.float64).argmax())
        if not exact
        else int(unlike.int().argmax())
    )
    sizes = x.abs()
    finite = sizes[sizes.isfinite()]
    return Gap(
        largest=None if exact or bool(infinite.any()) else float(gaps[at]),
        scale=float(finite.max()) if finite.numel() else 0.0,
        at=_index(at, tuple(one.shape)),
        values=(_number(one.flatten()[at]), _number(two.flatten()[at])),
        count=int(unlike.sum()),
        of=one.numel(),
    )


#: Unsigned dtypes, which torch compares only as the signed ones of their size.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def _index(at: int, sizes: tuple[int, ...]) -> list[int]:
    """The index of an element, of its position in row-major order."""
    index: list[int] = []
    for size in reversed(sizes):
        at, place = divmod(at, size)
        index.append(place)
    return index[::-1]


def _number(t: torch.Tensor) -> Any:
    value = t.item()
    return str(value) if isinstance(value, complex) else value


def _operand(role: Role, view: View | None) -> str:
    text = "of a size that depends on data" if view is None else f"{view.dtype.label}[{','.join(map(str, view.sizes))}]"
    return f"{role.name.lower()} {text}"
