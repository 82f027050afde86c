"""Sends the frames of a bundle over a link, and compares what it reads with what the script has read."""

from __future__ import annotations

import difflib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import PurePath
from typing import Any

import torch
from wooly_bus.contents import chunk_digest, chunk_hasher
from wooly_wis.codec import digest
from wooly_wis.dtypes import DType
from wooly_wis.frames import PROTOCOL, pack_json
from wooly_wis.releases import mismatch

from wooly.dtypes import TORCH_DTYPES
from wooly.errors import ExecutorLostError, WoolyError
from wooly.link import Link
from wooly.origins import Origin
from wooly.recorder import PROGRAMS_KEPT
from wooly.recording.bundle import (
    ERROR,
    AnyFrame,
    Bundle,
    BundleError,
    Line,
    ReadFrame,
    RunFrame,
    WriteFrame,
)
from wooly.recording.programs import Decoded, Programs
from wooly.recording.tensors import READ_PIECE, REMOTE_ERRORS, LiveBuffers, dtypes_of_writes

#: Upper bound of the random numbers that replace contents. They are positive and small: probabilities and variances stay valid.
RANDOM_BELOW = 0.1


class ReplayError(WoolyError):
    """A bundle cannot be replayed. The message says why."""

    code = "wooly.replay"


class LineNotFoundError(WoolyError):
    """No frame of a bundle was made by this Python line."""

    code = "wooly.replay_line"


@cache
def origin_of(line: Line) -> Origin:
    """An origin that `describe_origin` shows as this line."""
    code = (lambda: None).__code__
    return code.replace(co_filename=line.file, co_firstlineno=line.number, co_name=line.function), 0


class Inputs:
    """The bytes of uploads: those of the bundle, or random ones if it has none.

    Random floats are from 0 to `RANDOM_BELOW`. Integers are 0, because 0 is a valid index, class and position.
    """

    def __init__(self, bundle: Bundle, programs: Programs, seed: int = 0) -> None:
        self._bundle = bundle
        self._seed = seed
        self._dtypes = {} if bundle.has_data else dtypes_of_writes(bundle, programs)

    def of(self, frame: WriteFrame) -> bytes | bytearray:
        """The bytes that a frame writes."""
        if self._bundle.has_data:
            return self._bundle.content(frame)
        dtype = self._dtypes.get(frame.number)
        if dtype is None or dtype.kind in ("int", "uint"):
            return bytes(frame.nbytes)
        return _random(dtype, frame.nbytes, self._seed + frame.number)


def _random(dtype: DType, nbytes: int, seed: int) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    n = nbytes // dtype.itemsize
    if dtype is DType.BOOL:
        numbers = torch.randint(0, 2, (n,), generator=generator, dtype=torch.uint8)
    elif dtype.kind == "complex":
        parts = torch.rand(2 * n, generator=generator) * RANDOM_BELOW
        numbers = torch.view_as_complex(parts.view(n, 2)).to(TORCH_DTYPES[dtype])
    else:
        numbers = (torch.rand(n, generator=generator) * RANDOM_BELOW).to(TORCH_DTYPES[dtype])
    raw = numbers.view(torch.uint8).numpy().tobytes()
    return raw + bytes(nbytes - len(raw))


class Player:
    """Plays frames and parts of programs over one link.

    Args:
        bundle: the bundle.
        programs: its programs.
        inputs: the bytes of its uploads.
        link: link of a session that has sent nothing.

    Raises:
        ReplayError: the bundle's releases and the executor's do not work together.
    """

    def __init__(self, bundle: Bundle, programs: Programs, inputs: Inputs, link: Link) -> None:
        check_releases(bundle, link)
        self._bundle, self._programs, self._inputs = bundle, programs, inputs
        self.link = link
        self._defined: OrderedDict[bytes, None] = OrderedDict()
        #: Operators of the instructions of each program that was run, for errors. A run names them by their index here.
        self._operators: list[list[str]] = []
        self._operators_of: dict[bytes, int] = {}
        link.name_of = lambda words, instruction: self._operators[words[0]][instruction]

    def play(self, frame: AnyFrame) -> bytes:
        """Play a frame. Returns the digest of the answer; empty: the frame has none.

        Raises:
            RemoteOperationError: an operation failed.
            ExecutorLostError: the executor is lost.
        """
        self.send_sources(frame)
        if isinstance(frame, WriteFrame):
            self.link.write(frame.buffer, frame.offset, memoryview(self._inputs.of(frame)))
            return b""
        if isinstance(frame, ReadFrame):
            return self._read(frame)
        decoded, run, lines = self._programs.of(frame), frame.run, self._bundle.origins(frame.origins)
        return self.run(decoded.raw, decoded.names, run.bindings, run.params, run.frees, lines, reply=run.reply)

    def send_sources(self, frame: AnyFrame) -> None:
        """Send the sources of kernels that came before a frame."""
        for raw in self._bundle.sources(frame.number):
            self.link.source(digest(raw), raw)

    def run(
        self,
        raw: bytes,
        names: list[str],
        bindings: list[int],
        params: bytes,
        frees: list[int],
        lines: list[Line],
        *,
        reply: bool = False,
    ) -> bytes:
        """Run a program. Returns the digest of the answer; empty: no answer was asked for."""
        name = digest(raw)
        if name not in self._defined:
            self.link.define(raw)
        self._defined[name] = None
        self._defined.move_to_end(name)
        if len(self._defined) > PROGRAMS_KEPT:
            self._defined.popitem(last=False)
        number = self._operators_of.get(name)
        if number is None:
            number = self._operators_of[name] = len(self._operators)
            self._operators.append(names)
        self.link.run(name, bindings, params, frees, [number], [origin_of(line) for line in lines], reply)
        return chunk_digest(pack_json(self.link.result())) if reply else b""

    def _read(self, frame: ReadFrame) -> bytes:
        hashing = chunk_hasher()
        piece = memoryview(bytearray(min(frame.nbytes, READ_PIECE)))
        for at in range(0, frame.nbytes, READ_PIECE):
            into = piece[: min(READ_PIECE, frame.nbytes - at)]
            self.link.read(frame.buffer, frame.offset + at, into)
            hashing.update(into)
        return hashing.digest()


def check_releases(bundle: Bundle, link: Link) -> None:
    """Check that the executor works with the client that recorded the bundle.

    Raises:
        ReplayError: it does not.
    """
    if bundle.facts.get("protocol") != PROTOCOL:
        raise ReplayError(
            f"the bundle was recorded with protocol {bundle.facts.get('protocol')}, and this release of Wooly speaks {PROTOCOL}; "
            "replay it with the release that recorded it"
        )
    theirs = str(link.device.get("torch_version", ""))
    if why := mismatch(str(bundle.facts.get("torch", "")), theirs):
        raise ReplayError(f"the bundle cannot be replayed on {link.where}: {why}")


@dataclass(frozen=True)
class Difference:
    """An answer that is another one than in the recording.

    Attributes:
        frame: number of the frame.
        line: the Python line that asked.
        what: what differs, in words.
    """

    frame: int
    line: Line | None
    what: str

    def row(self) -> dict[str, Any]:
        """For JSON."""
        return {"frame": self.frame, "line": None if self.line is None else str(self.line), "what": self.what}


@dataclass
class Replayed:
    """What a replay found.

    Attributes:
        frames: number of frames that were played.
        compared: number of answers that were compared.
        differences: the answers that differ, in order.
        errors: errors that the recording does not have, or that bundles without contents may have.
        repeated: errors that the recording has, too.
    """

    frames: int = 0
    compared: int = 0
    differences: list[Difference] = field(default_factory=list)
    errors: list[Difference] = field(default_factory=list)
    repeated: list[Difference] = field(default_factory=list)


@dataclass(frozen=True)
class Stop:
    """Where to stop: after a frame, or after an instruction of it.

    Attributes:
        frame: number of the frame.
        instruction: index of the last instruction to run; None: the whole frame.
    """

    frame: int
    instruction: int | None = None


def replay(
    bundle: Bundle,
    programs: Programs,
    player: Player,
    stop: Stop,
    progress: Callable[[int], None] = lambda frame: None,
) -> tuple[Replayed, LiveBuffers]:
    """Play the frames up to `stop`, and compare the answers.

    Args:
        bundle: the bundle.
        programs: its programs.
        player: plays frames on the executor.
        stop: where to stop.
        progress: is told the number of each frame.

    Returns:
        What the replay found, and the live buffers at its end.

    Raises:
        ReplayError: the executor is lost. The message names the frames that were not answered.
    """
    found, live, answered = Replayed(), LiveBuffers(bundle, programs), 0
    for frame in bundle.all_frames(last=stop.frame):
        progress(frame.number)
        try:
            if frame.number == stop.frame and stop.instruction is not None:
                assert isinstance(frame, RunFrame)
                _play_part(bundle, programs, player, live, frame, stop.instruction)
                found.frames += 1
                break
            answered = _play(bundle, player, frame, found) or answered
        except ExecutorLostError as e:
            lines = bundle.lines_of(frame)
            raise ReplayError(
                f"{e}\n  The executor was lost between frame {answered}, the last that it answered, and frame {frame.number} "
                f"({_lines(lines)}). `wooly replay --until` with numbers between them finds the frame."
            ) from e
        live.apply(frame)
        found.frames += 1
    try:
        player.link.sync()
    except REMOTE_ERRORS as e:
        if stop.frame == bundle.frames and bundle.complete:  # the script did not ask either
            found.repeated.append(Difference(stop.frame, None, str(e)))
        else:
            found.errors.append(Difference(stop.frame, None, str(e)))
    except ExecutorLostError as e:
        raise ReplayError(
            f"{e}\n  The executor was lost after frame {answered}, the last that it answered, of {stop.frame} frames. "
            "`wooly replay --until` with numbers between them finds the frame."
        ) from e
    return found, live


def _play(bundle: Bundle, player: Player, frame: AnyFrame, found: Replayed) -> int:
    """Play a frame, and compare its answer. Returns its number if it was answered, else 0."""
    error = ""
    try:
        answer = player.play(frame)
        if frame.number in bundle.failed:
            player.link.sync()
    except REMOTE_ERRORS as e:
        answer, error = ERROR, str(e)
    if not answer and frame.number not in bundle.failed:
        return 0
    expected = ERROR if frame.number in bundle.failed else bundle.answers.get(frame.number, b"")
    lines = bundle.lines_of(frame)
    line = lines[-1] if lines else None
    if error:
        note = Difference(frame.number, line, error)
        (found.repeated if expected == ERROR else found.errors).append(note)
    if not expected or not (bundle.has_data or expected == ERROR):
        return frame.number
    found.compared += bundle.has_data
    if answer != expected and bundle.has_data:
        what = "the bytes differ" if isinstance(frame, ReadFrame) else "the shapes or values of the results differ"
        if error or expected == ERROR:
            what = f"it fails: {error}" if error else "it failed in the recording, and does not fail here"
        found.differences.append(Difference(frame.number, line, what))
    return frame.number


def _play_part(
    bundle: Bundle, programs: Programs, player: Player, live: LiveBuffers, frame: RunFrame, instruction: int
) -> None:
    """Run a program up to an instruction."""
    decoded, lines = programs.of(frame), bundle.origins(frame.origins)
    part = decoded.piece(0, instruction + 1)
    player.send_sources(frame)
    own, run = lines[: instruction + 1], frame.run
    player.run(part.raw, decoded.names[: instruction + 1], part.bindings(run), part.params(run), [], own)
    live.run(frame.number, Decoded(part.raw), part.bindings(run), own)


def _lines(lines: list[Line]) -> str:
    return f"{lines[0]}" if len(set(lines)) == 1 else f"{lines[0]} to {lines[-1]}" if lines else "no line"


# -- where to stop ---------------------------------------------------------------------------------------------------------


def find_stop(bundle: Bundle, text: str) -> Stop:
    """Where to stop: after the frame with a number, or after the last instruction that a Python line has made.

    Args:
        bundle: the bundle.
        text: a number, or FILE:LINE. FILE is a path or the last parts of one.

    Raises:
        LineNotFoundError: there is no such frame or line. The message names close ones.
    """
    if text.isdecimal():
        number = int(text)
        if not 1 <= number <= bundle.frames:
            raise LineNotFoundError(f"there is no frame {number}: the bundle has frames 1 to {bundle.frames}")
        return Stop(number)
    file, colon, number_text = text.rpartition(":")
    if not colon or not number_text.isdecimal():
        raise LineNotFoundError(f"{text!r} is neither a number of a frame nor FILE:LINE")
    wanted = int(number_text)
    files = {line.file for line in bundle.lines}
    matching = {name for name in files if _ends_with(name, file)}
    if not matching:
        close = difflib.get_close_matches(file, [PurePath(n).name for n in files], 3, 0.4)
        hint = f"; did you mean {', '.join(close)}?" if close else ""
        raise LineNotFoundError(f"no line of a file {file} made anything in this recording{hint}")
    if len(matching) > 1:
        raise LineNotFoundError(f"several files end with {file}: {', '.join(sorted(matching))}; write more of the path")
    at = {k for k, line in enumerate(bundle.lines) if line.file in matching and line.number == wanted}
    found: Stop | None = None
    if at:
        lines = {bundle.lines[k] for k in at}

        @cache
        def last_of(origins: int) -> int:
            return max([k for k, line in enumerate(bundle.origins(origins)) if line in lines], default=-1)

        for frame in bundle.all_frames():
            if not isinstance(frame, RunFrame):
                found = Stop(frame.number) if frame.line in at else found
            elif last_of(frame.origins) >= 0:
                found = Stop(frame.number, last_of(frame.origins))
    if found is None:
        numbers = sorted({line.number for line in bundle.lines if line.file in matching})
        near = sorted(numbers, key=lambda n: abs(n - wanted))[:6]
        raise LineNotFoundError(
            f"line {wanted} of {file} made nothing in this recording; lines near it that did: {', '.join(map(str, sorted(near)))}"
        )
    return found


def _ends_with(path: str, end: str) -> bool:
    """Whether a path ends with the parts of another one."""
    parts, wanted = path.replace("\\", "/").split("/"), end.replace("\\", "/").split("/")
    return path == end or parts[-len(wanted) :] == wanted


def jit_of(bundle: Bundle) -> str:
    """The mode of generated kernels that the bundle was recorded with."""
    mode = str(bundle.facts.get("jit", "exact"))
    if mode not in ("0", "exact", "full"):
        raise BundleError(f"the bundle names an unknown mode of generated kernels, {mode!r}")
    return mode
