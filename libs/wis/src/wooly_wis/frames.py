"""Encoding and decoding of the data channel's frame payloads. This module does not know sockets."""

from __future__ import annotations

import json
import struct
from array import array
from enum import IntEnum
from typing import Any, NamedTuple

from wooly_wis.codec import DIGEST_SIZE
from wooly_wis.errors import DecodeError
from wooly_wis.limits import MAX_FREES, MAX_PARAMS, MAX_REFERENCES

PROTOCOL = 1
MAX_CHUNK = 4 << 20
#: Maximum size, in bytes, of an answer to a READ that the executor copies. The executor continues before the client receives the
#: copy.
ANSWER_COPIED = 64 << 10
#: Maximum size, in bytes, of a result whose shape depends on data, up to which the answer has its data besides the shape.
ANSWER_DATA = 1024
REPLY = 1


class Kind(IntEnum):
    """Frame kinds; ARCHITECTURE.md has their directions and meanings."""

    ACK = 1
    HELLO = 2
    WELCOME = 3
    DEFINE = 4
    RUN = 5
    WRITE = 6
    READ = 7
    SYNC = 8
    DATA = 9
    RESULT = 10
    ERROR = 11
    CLOSE = 12
    STATS = 13
    OFFER = 14
    SEAL = 15
    PIN = 16
    SOURCE = 17
    END = 18
    PROFILE = 19
    RECORDS = 20
    BUFFERS = 21
    CUT = 22
    RESTORE = 23
    COLLECTIVE = 24
    IPC = 25
    GROUP = 26


RUN_HEAD = struct.Struct(f"<{DIGEST_SIZE}sIIII")
_RUN_HEAD_SIZE = RUN_HEAD.size
#: A RUN frame of at most this size, in bytes, exceeds no limit.
_RUN_UNCHECKED = _RUN_HEAD_SIZE + 8 * min(MAX_REFERENCES, 2 * MAX_PARAMS, MAX_FREES)
WRITE_HEAD = struct.Struct("<QQ")
READ_HEAD = struct.Struct("<QQQ")
#: Behind READ_HEAD, if the client wants a large answer in memory that it shares with the executor: offset in that memory.
READ_PLACE = struct.Struct("<Q")
#: Layout of STATS: bytes that the session wants to allocate, or 0. The payload may be empty.
STATS_HEAD = struct.Struct("<Q")
#: Layout of BUFFERS: the answer lists at most `BUFFERS_AT_ONCE` buffers, from the first id that is greater than this one.
BUFFERS_HEAD = struct.Struct("<Q")
BUFFERS_AT_ONCE = 1 << 14
#: Layout of CUT: number of the new cut (0: none), newest cut that the client knows to be stored, whether to wait until the
#: newest cut is stored.
CUT_HEAD = struct.Struct("<III")
#: Layout of RESTORE: number of the cut.
RESTORE_HEAD = struct.Struct("<I")
#: Layout of PROFILE: what to do.
PROFILE_HEAD = struct.Struct("<I")
#: What a PROFILE frame asks for: begin to measure, only answer, or end. Each answer has the records since the last answer.
PROFILE_BEGIN, PROFILE_TAKE, PROFILE_END = 1, 2, 0
#: Layout of the head of RECORDS: the executor's clock in ns, records that were dropped, records that are left for later answers.
RECORDS_HEAD = struct.Struct("<QQQ")
#: Number of 64-bit words of a record, and the instruction that stands for a whole frame (WRITE, READ).
RECORD_WORDS, WHOLE_FRAME = 4, 0xFFFFFFFF
#: Layout of OFFER and SEAL: buffer, byte count, whether the digest covers only the first chunk, digest.
CONTENT = struct.Struct("<QQI32s")
#: Layout of IPC: what to do, buffer, bytes of the buffer, name of the exported buffer. What is not needed is zero.
IPC_NAME_BYTES = 16
IPC_HEAD = struct.Struct(f"<IQQ{IPC_NAME_BYTES}s")
#: What an IPC frame asks for: export a buffer, import an exported buffer, or take back one export that nobody will import.
IPC_EXPORT, IPC_IMPORT, IPC_RELEASE = 1, 2, 3


class Record(NamedTuple):
    """How long one step of a session occupied the device.

    Attributes:
        seq: number of the client's frame.
        instruction: index of the instruction in its program; `WHOLE_FRAME`: the frame copied bytes.
        instructions: number of instructions that this step replaces; 1 for a library call.
        begin_ns: start, in ns of the executor's clock.
        ns: device time in ns.
    """

    seq: int
    instruction: int
    instructions: int
    begin_ns: int
    ns: int


class Run(NamedTuple):
    """A request to run one program.

    Attributes:
        digest: the program.
        bindings: buffer id per slot.
        params: one 8-byte little-endian word per param (two for a complex one).
        frees: buffers to free after the run.
        reply: whether the executor answers with RESULT or ERROR.
    """

    digest: bytes
    bindings: list[int]
    params: bytes
    frees: list[int]
    reply: bool


def pack_run(digest: bytes, bindings: list[int], params: bytes, frees: list[int], *, reply: bool = False) -> bytes:
    """Payload of a RUN frame."""
    head = RUN_HEAD.pack(digest, len(bindings), len(params) // 8, len(frees), REPLY if reply else 0)
    return b"".join((head, array("Q", bindings).tobytes(), params, array("Q", frees).tobytes() if frees else b""))


def unpack_run(payload: bytes | memoryview) -> Run:
    """The content of a RUN frame.

    Raises:
        DecodeError: the counts do not match the payload's length or exceed a limit, or a flag is unknown.
    """
    a, size = _RUN_HEAD_SIZE, len(payload)
    if size < a:
        raise DecodeError("RUN frame is shorter than its header")
    digest, n_bind, n_param, n_free, flags = RUN_HEAD.unpack_from(payload)
    b = a + 8 * n_bind
    c = b + 8 * n_param
    if c + 8 * n_free != size or flags & ~REPLY or size > _RUN_UNCHECKED:
        _check_counts(n_bind, n_param, n_free)
        if c + 8 * n_free != size or flags & ~REPLY:
            raise DecodeError("RUN frame's counts do not match its length, or a flag is unknown")
    words = memoryview(payload)
    frees = words[c:].cast("Q").tolist() if n_free else []
    return Run(digest, words[a:b].cast("Q").tolist(), bytes(words[b:c]), frees, bool(flags & REPLY))


def _check_counts(n_bind: int, n_param: int, n_free: int) -> None:
    if n_bind > MAX_REFERENCES or n_param > 2 * MAX_PARAMS or n_free > MAX_FREES:
        raise DecodeError(
            f"RUN frame has {n_bind} bindings, {n_param} words of params and {n_free} buffers to free; "
            f"the limits are {MAX_REFERENCES}, {2 * MAX_PARAMS} and {MAX_FREES}"
        )


def wants_reply(payload: bytes | memoryview) -> bool:
    """Whether a RUN frame asks for an answer. This function reads only the frame's header.

    Raises:
        DecodeError: the frame is shorter than its header.
    """
    if len(payload) < RUN_HEAD.size:
        raise DecodeError("RUN frame is shorter than its header")
    _, _, _, _, flags = RUN_HEAD.unpack_from(payload)
    return bool(flags & REPLY)


def unpack_read(payload: bytes | memoryview) -> tuple[int, int, int, int | None]:
    """(buffer, byte offset, byte count, place in shared memory or None) of a READ frame.

    Raises:
        DecodeError: the frame's length is wrong.
    """
    placed = READ_HEAD.size + READ_PLACE.size
    if len(payload) not in (READ_HEAD.size, placed):
        raise DecodeError(f"READ frame has {len(payload)} bytes, not {READ_HEAD.size} or {placed}")
    buffer, offset, nbytes = READ_HEAD.unpack_from(payload)
    place = READ_PLACE.unpack_from(payload, READ_HEAD.size)[0] if len(payload) == placed else None
    return buffer, offset, nbytes, place


def unpack_stats(payload: bytes | memoryview) -> int:
    """The bytes that the session of a STATS frame wants to allocate; 0 if it does not say.

    Raises:
        DecodeError: the frame's length is wrong.
    """
    if not len(payload):
        return 0
    if len(payload) != STATS_HEAD.size:
        raise DecodeError(f"STATS frame has {len(payload)} bytes, not {STATS_HEAD.size}")
    return int(STATS_HEAD.unpack(payload)[0])


def unpack_cut(payload: bytes | memoryview) -> tuple[int, int, bool]:
    """The number of a CUT frame, the newest cut that the client knows to be stored, and whether to wait until one is stored.

    Raises:
        DecodeError: the frame's length is wrong.
    """
    if len(payload) != CUT_HEAD.size:
        raise DecodeError(f"CUT frame has {len(payload)} bytes, not {CUT_HEAD.size}")
    number, known, wait = CUT_HEAD.unpack(payload)
    return number, known, bool(wait)


def unpack_restore(payload: bytes | memoryview) -> int:
    """The number of the cut that a RESTORE frame names.

    Raises:
        DecodeError: the frame's length is wrong.
    """
    if len(payload) != RESTORE_HEAD.size:
        raise DecodeError(f"RESTORE frame has {len(payload)} bytes, not {RESTORE_HEAD.size}")
    return int(RESTORE_HEAD.unpack(payload)[0])


def unpack_profile(payload: bytes | memoryview) -> int:
    """What a PROFILE frame asks for.

    Raises:
        DecodeError: the frame's length is wrong, or it asks for something unknown.
    """
    if len(payload) != PROFILE_HEAD.size:
        raise DecodeError(f"PROFILE frame has {len(payload)} bytes, not {PROFILE_HEAD.size}")
    (what,) = PROFILE_HEAD.unpack(payload)
    if what not in (PROFILE_BEGIN, PROFILE_TAKE, PROFILE_END):
        raise DecodeError(f"PROFILE frame asks for {what}, which is unknown")
    return int(what)


def unpack_ipc(payload: bytes | memoryview) -> tuple[int, int, int, bytes]:
    """(what to do, buffer, byte count, name) of an IPC frame.

    Raises:
        DecodeError: the frame's length is wrong, or it asks for something unknown.
    """
    if len(payload) != IPC_HEAD.size:
        raise DecodeError(f"IPC frame has {len(payload)} bytes, not {IPC_HEAD.size}")
    what, buffer, nbytes, name = IPC_HEAD.unpack(payload)
    if what not in (IPC_EXPORT, IPC_IMPORT, IPC_RELEASE):
        raise DecodeError(f"IPC frame asks for {what}, which is unknown")
    return what, buffer, nbytes, name


def unpack_buffers(payload: bytes | memoryview) -> int:
    """The id behind which the list of a BUFFERS frame begins.

    Raises:
        DecodeError: the frame's length is wrong.
    """
    if len(payload) != BUFFERS_HEAD.size:
        raise DecodeError(f"BUFFERS frame has {len(payload)} bytes, not {BUFFERS_HEAD.size}")
    return int(BUFFERS_HEAD.unpack(payload)[0])


def pack_records(clock_ns: int, dropped: int, left: int, words: array[int]) -> bytes:
    """Payload of a RECORDS frame. Each record is four words: frame, instruction and instructions (32 bits each), begin, ns."""
    return RECORDS_HEAD.pack(clock_ns, dropped, left) + words.tobytes()


def unpack_records(payload: bytes | bytearray | memoryview) -> tuple[int, int, int, list[Record]]:
    """The executor's clock, the numbers of records that were dropped and that are left, and the records of a RECORDS frame.

    Raises:
        DecodeError: the frame's length is wrong.
    """
    if len(payload) < RECORDS_HEAD.size or (len(payload) - RECORDS_HEAD.size) % (8 * RECORD_WORDS):
        raise DecodeError(f"a RECORDS frame cannot have {len(payload)} bytes")
    words = array("Q")
    words.frombytes(payload[RECORDS_HEAD.size :])
    found = [
        Record(words[k], words[k + 1] & WHOLE_FRAME, words[k + 1] >> 32, words[k + 2], words[k + 3])
        for k in range(0, len(words), RECORD_WORDS)
    ]
    clock, dropped, left = RECORDS_HEAD.unpack_from(payload)
    return clock, dropped, left, found


def unpack_content(payload: bytes | memoryview) -> tuple[int, int, bool, bytes]:
    """(buffer, byte count, whether the digest covers only the first chunk, digest) of an OFFER or SEAL frame.

    Raises:
        DecodeError: the frame's length is wrong, or a flag is unknown.
    """
    if len(payload) != CONTENT.size:
        raise DecodeError(f"OFFER or SEAL frame has {len(payload)} bytes, not {CONTENT.size}")
    buffer, nbytes, head, name = CONTENT.unpack(payload)
    if head not in (0, 1):
        raise DecodeError(f"OFFER or SEAL frame has the unknown flag value {head}")
    return buffer, nbytes, bool(head), name


def pack_json(value: dict[str, Any]) -> bytes:
    """Payload of HELLO, WELCOME, RESULT and ERROR frames."""
    return json.dumps(value, separators=(",", ":")).encode()


def unpack_json(payload: bytes | bytearray | memoryview) -> dict[str, Any]:
    """The object in a JSON payload.

    Raises:
        DecodeError: the payload is not a JSON object.
    """
    try:
        value = json.loads(bytes(payload))
    except (ValueError, RecursionError) as e:
        raise DecodeError(f"payload is not JSON: {e}") from e
    if not isinstance(value, dict):
        raise DecodeError("payload is not a JSON object")
    return value
