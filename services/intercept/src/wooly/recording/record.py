"""Writes what a link sends to a bundle, while a script runs. The link calls it under the recorder's lock."""

from __future__ import annotations

import os
import platform
import sys
from array import array
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from wooly_bus.contents import chunk_digest
from wooly_wis.codec import DIGEST_SIZE, digest
from wooly_wis.frames import PROTOCOL

from wooly.origins import Origin, line_of, origin
from wooly.recording import bundle
from wooly.recording.bundle import BundleError, BundleWriter, Line, Part

if TYPE_CHECKING:
    from wooly.link import Link

_CODE, _OFFSET = itemgetter(0), itemgetter(1)


class Recording:
    """The log of a link (`wooly.observers.SessionLog`) that becomes a bundle.

    If the file cannot be written any more, the recording ends and the script goes on.

    Args:
        writer: the bundle.
        data: keep contents and the digests of answers.
        say: prints a line.

    Attributes:
        frames: number of runs, writes and reads so far.
        data: whether contents are kept.
        ended: why the recording ended early; empty: it has not.
    """

    def __init__(self, writer: BundleWriter, *, data: bool, say: Callable[[str], None]) -> None:
        self._writer, self.data, self._say = writer, data, say
        self.frames = 0
        self.ended = ""
        self._pid = os.getpid()
        self._programs: dict[bytes, int] = {}
        self._contents: set[bytes] = set()
        self._lines: dict[Line, int] = {}
        #: Numbers of lines by code object and bytecode offset. Code objects are named by id, because some have no hash, and kept
        #: alive by `_codes`, so that ids are not reused.
        self._line_of: dict[tuple[int, int], int] = {}
        self._codes: list[Any] = []
        self._origins: dict[tuple[int, ...], int] = {}
        #: The last origins of each program (ids of code objects, then offsets), and their number. In a loop, a program has the
        #: same origins each time.
        self._last: dict[bytes, tuple[list[int], int]] = {}

    # -- what the link says ----------------------------------------------------------------------------------------------

    def defined(self, program: bytes) -> None:
        """A program will be defined."""
        name = digest(program)
        if name not in self._programs and self._add(Part.PROGRAM, program):
            self._programs[name] = len(self._programs)

    def source(self, raw: bytes) -> None:
        """The source of foreign kernels was sent."""
        self._add(Part.SOURCE, raw)

    def ran(self, payload: bytes, origins: list[Origin]) -> Callable[[bytes], None]:
        """A run was sent. Returns what is told its answer, if it has one."""
        name = payload[:DIGEST_SIZE]
        number = self._number_of(name, origins)
        return self._frame(Part.RUN, bundle.run_frame(self._programs.get(name, 0), number), payload)

    def wrote(self, buffer: int, offset: int, data: memoryview) -> None:
        """A write was sent. Equal contents are kept once."""
        content = chunk_digest(data) if self.data else b""
        if self.data and content not in self._contents and self._add(Part.CONTENT, content, data):
            self._contents.add(content)
        self._frame(Part.WRITE, bundle.write_frame(buffer, offset, len(data), self._line(origin()), content))

    def asked(self, buffer: int, offset: int, nbytes: int) -> Callable[[bytes], None]:
        """A read was sent. Returns what is told its answer."""
        return self._frame(Part.READ, bundle.read_frame(buffer, offset, nbytes, self._line(origin())))

    def failed(self, after: int) -> None:
        """An answer took the session's error, after so many frames."""
        self._add(Part.FAILED, bundle.failed_record(after))

    # -- writing ---------------------------------------------------------------------------------------------------------

    def _frame(self, kind: Part, *payload: bytes) -> Callable[[bytes], None]:
        self._add(kind, *payload)
        self.frames += 1
        return partial(self._answered, self.frames)

    def _answered(self, frame: int, answer: bytes) -> None:
        if self.data or answer == bundle.ERROR:  # the digest of a small content would tell it
            self._add(Part.ANSWER, bundle.answer_record(frame, answer))

    def _number_of(self, name: bytes, origins: list[Origin]) -> int:
        """The number of the lines of a program's instructions."""
        where = [*map(id, map(_CODE, origins)), *map(_OFFSET, origins)]
        last = self._last.get(name)
        if last is not None and last[0] == where:
            return last[1]
        lines = tuple([self._line(one) for one in origins])
        number = self._origins.get(lines)
        if number is None:
            number = self._origins[lines] = len(self._origins)
            self._add(Part.ORIGINS, bundle.origins_record(array("I", lines)))
        self._last[name] = where, number
        return number

    def _line(self, where: Origin) -> int:
        """The number of a Python line."""
        code, last = where
        key = id(code), last
        number = self._line_of.get(key)
        if number is None:
            line = Line(code.co_filename, line_of(where), code.co_name)
            number = self._lines.get(line)
            if number is None:
                number = self._lines[line] = len(self._lines)
                self._add(Part.LINE, bundle.line_record(line))
            self._line_of[key] = number
            self._codes.append(code)
        return number

    def _add(self, kind: Part, *payload: bytes | memoryview) -> bool:
        """Append a record. Returns False if the recording has ended."""
        if self.ended or os.getpid() != self._pid:
            return False
        try:
            self._writer.add(kind, *payload)
        except BundleError as e:
            self.ended = str(e)
            self._writer.close()
            self._say(f"wooly: the recording ends here, after {self.frames} frames, and the script goes on: {e}")
            return False
        return True

    def end(self) -> int:
        """Complete the bundle. Returns its size in bytes."""
        if not self.ended:
            try:
                self._writer.end()
            except BundleError as e:
                self.ended = str(e)
                self._say(f"wooly: the recording is not complete: {e}")
        return self._writer.nbytes


def begin(path: Path, link: Link, program: str, jit: str, *, data: bool, say: Callable[[str], None]) -> Recording:
    """Record what a link sends from now on.

    Args:
        path: file of the bundle.
        link: link of a session that has sent nothing.
        program: name of the script.
        jit: generated kernels that the executor may use.
        data: keep contents and the digests of answers.
        say: prints a line.

    Raises:
        BundleError: the session has several devices, or the file cannot be written.
    """
    from wooly import __version__

    if link.siblings:
        raise BundleError(
            f"the session has {len(link.siblings) + 1} devices, and only sessions with one device can be recorded: set "
            "WOOLYAI_GPU_COUNT=1"
        )
    facts = {
        "wooly": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": sys.platform,
        "protocol": PROTOCOL,
        "program": program,
        "device": link.device,
        "jit": jit,
        "data": data,
    }
    link.log = recording = Recording(BundleWriter(path, facts), data=data, say=say)
    return recording
