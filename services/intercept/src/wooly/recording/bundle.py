"""The bundle: one file with what a session sent, as records that are only appended.

    bundle  := "WOOLYBDL" u32:version record*
    record  := u32:length u32:kind u32:crc of the payload u32:crc of these three words, payload

The first record has the facts of the recording, as JSON. Frames (WRITE, RUN, READ) are numbered from 1 in their order. Programs,
sources, contents, Python lines and origins come before the first frame that names them, each once. A file that ends within a
record is a recording whose process died: the rest is readable. Any other damage is an error. The reader keeps positions, not
contents, so its memory does not grow with the uploads.

This module knows neither torch nor executors. It trusts no number in a file.
"""

from __future__ import annotations

import json
import struct
import sys
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from wooly_bus.channel.sockets import Buffer
from wooly_bus.contents import DIGEST, chunk_digest
from wooly_wis.codec import digest
from wooly_wis.errors import WisError
from wooly_wis.frames import MAX_CHUNK, Run, unpack_run

from wooly.errors import WoolyError

MAGIC = b"WOOLYBDL"
VERSION = 1
#: Maximum size, in bytes, of a record's payload. The largest are contents and programs (4 MiB each).
MAX_RECORD = 8 << 20
#: Maximum number of Python lines. Real programs have thousands.
MAX_LINES = 1 << 20
#: What an answer is if the executor answered with an error. Other answers are digests.
ERROR = b"error"

_START = struct.Struct(f"<{len(MAGIC)}sI")
_HEAD = struct.Struct("<III")
_CRC = struct.Struct("<I")
_WRITE = struct.Struct(f"<QQQI{DIGEST}s")
_READ = struct.Struct("<QQQI")
_RUN = struct.Struct("<II")
_ANSWER = struct.Struct("<Q")
_FAILED = struct.Struct("<Q")
_NO_DIGEST = bytes(DIGEST)


class Part(IntEnum):
    """Kinds of records."""

    FACTS = 1
    PROGRAM = 2
    SOURCE = 3
    LINE = 4
    ORIGINS = 5
    CONTENT = 6
    WRITE = 7
    RUN = 8
    READ = 9
    ANSWER = 10
    FAILED = 11
    END = 12


_FRAMES = (Part.WRITE, Part.RUN, Part.READ)


class BundleError(WoolyError):
    """A bundle cannot be read or written. The message says why, and what to do."""

    code = "wooly.bundle"


class Line(NamedTuple):
    """A Python line.

    Attributes:
        file: path of the file.
        number: number of the line.
        function: name of the function.
    """

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


class WriteFrame(NamedTuple):
    """Bytes that were written to a buffer. `content` is their digest, or empty if the bundle has no contents."""

    number: int
    buffer: int
    offset: int
    nbytes: int
    line: int
    content: bytes


class RunFrame(NamedTuple):
    """A run: number of its program, number of its origins, and the payload of the RUN frame."""

    number: int
    program: int
    origins: int
    run: Run


class ReadFrame(NamedTuple):
    """Bytes that were read from a buffer."""

    number: int
    buffer: int
    offset: int
    nbytes: int
    line: int


AnyFrame = WriteFrame | RunFrame | ReadFrame


class BundleWriter:
    """Appends records to a new bundle. Each record is handed to the operating system at once.

    Args:
        path: the file. An existing bundle is replaced, another file is not.
        facts: facts of the recording.

    Attributes:
        nbytes: bytes written.

    Raises:
        BundleError: the file exists and is no bundle, or cannot be written.
    """

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self.path = path
        self.nbytes = 0
        try:
            if path.exists():
                with path.open("rb") as old:
                    if old.read(len(MAGIC)) != MAGIC:
                        raise BundleError(f"{path} exists and is no bundle, so it is not replaced; choose another name")
            self._file: BinaryIO = path.open("wb", buffering=0)
            path.chmod(0o600)  # it has the script's data
            self._write(_START.pack(MAGIC, VERSION))
        except OSError as e:
            raise BundleError(f"cannot write the bundle {path}: {e}") from e
        self.add(Part.FACTS, json.dumps(facts).encode())

    def add(self, kind: Part, *parts: Buffer) -> None:
        """Append a record whose payload is the concatenation of `parts`.

        Raises:
            BundleError: the file cannot be written.
        """
        size = crc = 0
        for part in parts:
            size += len(part)
            crc = zlib.crc32(part, crc)
        assert size <= MAX_RECORD, f"a record of kind {kind.name} has {size} bytes"
        head = _HEAD.pack(size, kind, crc)
        head += _CRC.pack(zlib.crc32(head))
        try:
            if size <= MAX_CHUNK // 64:
                self._write(b"".join((head, *parts)))
            else:
                for part in (head, *parts):
                    self._write(part)
        except OSError as e:
            raise BundleError(f"cannot write the bundle {self.path}: {e}") from e

    def _write(self, data: Buffer) -> None:
        view = memoryview(data)
        while len(view):
            written = self._file.write(view)
            self.nbytes += written
            view = view[written:]

    def end(self) -> None:
        """Say that the recording is complete, and close the file."""
        self.add(Part.END)
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def write_frame(buffer: int, offset: int, nbytes: int, line: int, content: bytes) -> bytes:
    """Payload of a WRITE record. `content`: digest of the bytes; empty: none."""
    return _WRITE.pack(buffer, offset, nbytes, line, content or _NO_DIGEST)


def run_frame(program: int, origins: int) -> bytes:
    """Head of the payload of a RUN record; the payload of the RUN frame follows."""
    return _RUN.pack(program, origins)


def read_frame(buffer: int, offset: int, nbytes: int, line: int) -> bytes:
    """Payload of a READ record."""
    return _READ.pack(buffer, offset, nbytes, line)


def answer_record(frame: int, answer: bytes) -> bytes:
    """Payload of an ANSWER record."""
    return _ANSWER.pack(frame) + answer


def failed_record(after: int) -> bytes:
    """Payload of a FAILED record."""
    return _FAILED.pack(after)


def line_record(line: Line) -> bytes:
    """Payload of a LINE record."""
    return json.dumps(list(line)).encode()


def origins_record(lines: array[int]) -> bytes:
    """Payload of an ORIGINS record: the number of a line per instruction (type code "I")."""
    if sys.byteorder == "big":
        lines = array("I", lines)
        lines.byteswap()
    return lines.tobytes()


@dataclass
class Bundle:
    """An open bundle.

    Attributes:
        path: the file.
        facts: facts of the recording.
        lines: the Python lines, by number.
        answers: digests of answers, or `ERROR`, by number of the frame. Frames without an answer were not answered.
        failed: numbers of frames after which another answer took the session's error.
        complete: the recording ended normally.
        dropped: bytes at the end that belong to an incomplete record.
        counts: number of records of each kind.
        written: bytes of all writes.
        kept: bytes of the contents, each once.
    """

    path: Path
    facts: dict[str, Any] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    answers: dict[int, bytes] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    complete: bool = False
    dropped: int = 0
    written: int = 0
    kept: int = 0
    counts: dict[Part, int] = field(default_factory=lambda: dict.fromkeys(Part, 0))

    def __post_init__(self) -> None:
        """Read and check all records.

        Raises:
            BundleError: the file is no bundle, has another version, or is damaged.
        """
        try:
            self._file = self.path.open("rb")
        except OSError as e:
            raise BundleError(f"cannot read the bundle {self.path}: {e}") from e
        self._at: dict[Part, array[int]] = {p: array("Q") for p in (Part.PROGRAM, Part.SOURCE, Part.ORIGINS)}
        self._frames_at = array("Q")
        #: Numbers of the frames before each source, in order.
        self._sources_before: list[int] = []
        self._contents: dict[bytes, int] = {}
        self._names: list[bytes] = []
        try:
            self._index()
        except BaseException:
            self.close()
            raise

    # -- reading the whole file ----------------------------------------------------------------------------------------

    def _index(self) -> None:
        start = self._file.read(_START.size)
        if len(start) < _START.size or not start.startswith(MAGIC):
            raise BundleError(f"{self.path} is no bundle of `wooly record`")
        version = _START.unpack(start)[1]
        if version != VERSION:
            raise BundleError(
                f"the bundle {self.path} has format {version}, and this release of Wooly reads format {VERSION}; replay it "
                "with the release that recorded it, or record it again"
            )
        while True:
            at = self._file.tell()
            found = self._record(at)
            if found is None:
                break
            kind, payload = found
            if self.complete or (kind == Part.FACTS) != (at == _START.size):
                raise self._damaged(at, f"a record of kind {kind.name} is out of place")
            self.counts[kind] += 1
            try:
                self._take(kind, at, payload)
            except (ValueError, struct.error, WisError, RecursionError) as e:
                raise self._damaged(at, str(e)) from e
        if not self.facts:
            raise BundleError(f"the bundle {self.path} is empty: the recording ended before it began")
        if any(number > len(self._frames_at) for number in self.answers):
            raise BundleError(f"the bundle {self.path} is damaged: it has an answer to a frame that does not exist")

    def _record(self, at: int) -> tuple[Part, bytes] | None:
        """The record at a position; None if the file ends before or within it."""
        self._file.seek(at)
        head = self._file.read(_HEAD.size + _CRC.size)
        if len(head) == _HEAD.size + _CRC.size:
            size, kind, crc = _HEAD.unpack_from(head)
            if _CRC.unpack_from(head, _HEAD.size)[0] != zlib.crc32(head[: _HEAD.size]):
                raise self._damaged(at, "a checksum differs")
            if kind not in Part.__members__.values() or size > MAX_RECORD:
                raise self._damaged(at, f"a record has the kind {kind} and {size} bytes")
            payload = self._file.read(size)
            if len(payload) == size:
                if zlib.crc32(payload) != crc:
                    raise self._damaged(at, "a checksum differs")
                return Part(kind), payload
            self.dropped = len(head) + len(payload)
        else:
            self.dropped = len(head)
        return None

    def _damaged(self, at: int, why: str) -> BundleError:
        return BundleError(f"the bundle {self.path} is damaged at byte {at}: {why}; copy it again, or record again")

    def _take(self, kind: Part, at: int, payload: bytes) -> None:
        """Check one record, and note where it is.

        Raises:
            ValueError: the record is not valid.
        """
        if kind == Part.FACTS:
            self.facts = _plain(_json(payload, dict))
        elif kind in self._at:
            if kind == Part.PROGRAM:
                self._names.append(digest(payload))
            elif kind == Part.SOURCE:
                self._sources_before.append(len(self._frames_at))
            elif len(payload) % 4 or any(n >= len(self.lines) for n in _words(payload)):
                raise ValueError("the lines of a program are not valid")
            self._at[kind].append(at)
        elif kind == Part.LINE:
            file, number, function = _json(payload, list)
            if len(self.lines) >= MAX_LINES or not (isinstance(number, int) and 0 <= number < 1 << 31):
                raise ValueError("a Python line is not valid")
            self.lines.append(Line(printable(str(file)), number, printable(str(function))))
        elif kind == Part.CONTENT:
            if len(payload) < DIGEST:
                raise ValueError("a content has no digest")
            self._contents[payload[:DIGEST]] = at
            self.kept += len(payload) - DIGEST
        elif kind in _FRAMES:
            self._frames_at.append(at)
            self._check(self._frame(len(self._frames_at), kind, payload))
        elif kind == Part.ANSWER:
            (number,) = _ANSWER.unpack_from(payload)
            answer = payload[_ANSWER.size :]
            if answer != ERROR and len(answer) != DIGEST:
                raise ValueError("an answer is neither a digest nor an error")
            self.answers[number] = answer
        elif kind == Part.FAILED:
            (after,) = _FAILED.unpack(payload)
            self.failed.add(after)
        else:
            self.complete = True

    def _check(self, frame: AnyFrame) -> None:
        if isinstance(frame, RunFrame):
            if frame.program >= len(self._names) or frame.origins >= len(self._at[Part.ORIGINS]):
                raise ValueError(f"frame {frame.number} names a program or lines that the bundle does not have")
            if self._names[frame.program] != frame.run.digest:
                raise ValueError(f"frame {frame.number} names another program than its digest")
            return
        if frame.line >= len(self.lines):
            raise ValueError(f"frame {frame.number} names a Python line that the bundle does not have")
        if isinstance(frame, WriteFrame):
            self.written += frame.nbytes
            if frame.nbytes > MAX_CHUNK:
                raise ValueError(f"frame {frame.number} writes {frame.nbytes} bytes; the limit is {MAX_CHUNK}")
            if frame.content and frame.content not in self._contents:
                raise ValueError(f"frame {frame.number} names a content that the bundle does not have")
            if not frame.content and self.has_data:
                raise ValueError(f"frame {frame.number} has no content")

    # -- parts -----------------------------------------------------------------------------------------------------------

    @property
    def frames(self) -> int:
        """Number of frames."""
        return len(self._frames_at)

    @property
    def has_data(self) -> bool:
        """Whether the bundle has the contents of uploads and the digests of answers."""
        return self.facts.get("data") is not False

    @property
    def device(self) -> dict[str, Any]:
        """Facts of the device on which it was recorded."""
        found = self.facts.get("device")
        return found if isinstance(found, dict) else {}

    @property
    def programs(self) -> int:
        """Number of programs."""
        return len(self._names)

    def program(self, number: int) -> bytes:
        """A program."""
        return self._again(self._at[Part.PROGRAM][number])

    def sources(self, frame: int) -> Iterator[bytes]:
        """The sources that were sent between the frame before `frame` and this frame."""
        for k in range(bisect_left(self._sources_before, frame - 1), bisect_left(self._sources_before, frame)):
            yield self._again(self._at[Part.SOURCE][k])

    def origins(self, number: int) -> list[Line]:
        """The Python line of each instruction."""
        return [self.lines[n] for n in _words(self._again(self._at[Part.ORIGINS][number]))]

    def content(self, frame: WriteFrame) -> bytes:
        """The bytes that a frame writes."""
        at = self._contents[frame.content]
        data = self._again(at)[DIGEST:]
        if len(data) != frame.nbytes or chunk_digest(data) != frame.content:
            raise self._damaged(at, f"the content of frame {frame.number} is another one")
        return data

    def frame(self, number: int) -> AnyFrame:
        """One frame."""
        at = self._frames_at[number - 1]
        found = self._record(at)
        if found is None:
            raise self._damaged(at, "it has changed")
        return self._frame(number, *found)

    def all_frames(self, first: int = 1, last: int | None = None) -> Iterator[AnyFrame]:
        """The frames from `first` to `last`, in order."""
        for number in range(first, (self.frames if last is None else last) + 1):
            yield self.frame(number)

    def lines_of(self, frame: AnyFrame) -> list[Line]:
        """The Python lines of a frame: one per instruction, or the line that wrote or read."""
        return self.origins(frame.origins) if isinstance(frame, RunFrame) else [self.lines[frame.line]]

    def _again(self, at: int) -> bytes:
        found = self._record(at)
        if found is None:
            raise self._damaged(at, "it has changed")
        return found[1]

    @staticmethod
    def _frame(number: int, kind: Part, payload: bytes) -> AnyFrame:
        if kind == Part.WRITE:
            buffer, offset, nbytes, line, content = _WRITE.unpack(payload)
            return WriteFrame(number, buffer, offset, nbytes, line, b"" if content == _NO_DIGEST else content)
        if kind == Part.READ:
            buffer, offset, nbytes, line = _READ.unpack(payload)
            return ReadFrame(number, buffer, offset, nbytes, line)
        program, origins = _RUN.unpack_from(payload)
        return RunFrame(number, program, origins, unpack_run(payload[_RUN.size :]))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Bundle:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _words(payload: bytes) -> array[int]:
    words = array("I")
    words.frombytes(payload)
    if sys.byteorder == "big":
        words.byteswap()
    return words


def _json(payload: bytes, kind: type) -> Any:
    try:
        value = json.loads(payload)
    except RecursionError as e:
        raise ValueError("a record is nested too deeply") from e
    if not isinstance(value, kind):
        raise ValueError("a record has JSON of another type")
    return value


def _plain(value: Any) -> Any:
    """A JSON value whose texts have no control characters."""
    if isinstance(value, dict):
        return {printable(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return printable(value) if isinstance(value, str) else value


def printable(text: str) -> str:
    """The text without control characters, which could change what a terminal shows."""
    return "".join([c if c.isprintable() else "?" for c in text])
