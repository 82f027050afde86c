"""Collective operations of the ranks of a group: the payload of COLLECTIVE frames.

Each rank sends a frame of its own. A frame says what its rank reads and writes, so the executor needs no tensors, only ranges of
buffers. Ranges count elements of one dtype. This module checks what one frame can tell; the executor compares the frames of a
group's ranks.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from wooly_wis.dtypes import BY_CODE, DType
from wooly_wis.errors import DecodeError

GROUP_BYTES = 16
#: In a range: instead of the id of a buffer, the memory that client and executor share. Only for executors whose WELCOME frame
#: says `shared_operands`.
SHARED_MEMORY = 0
#: Maximum number of ranks of a group.
MAX_RANKS = 1024
#: Maximum number of ranges of one frame.
MAX_RANGES = 4096
#: Maximum size, in bytes, of the text that says which Python line asks for the collective.
MAX_ORIGIN = 512
#: Maximum timeout: 10 years, in ms.
_MAX_TIMEOUT_MS = 10 * 366 * 86_400_000
_HEAD = struct.Struct(f"<{GROUP_BYTES}sQQIIIBBBBdIII")
_RANGE = struct.Struct("<QQQI")
_SEQUENCE = struct.Struct("<Q")
#: Byte behind the sequence number.
_NUMBERED = GROUP_BYTES + _SEQUENCE.size
#: Size, in bytes, up to which a `CollectiveReader` remembers frames, and their number. DDP sends one kind of frame per bucket.
_REMEMBERED, _MOST_KNOWN = 1024, 256
#: Maximum number of executors among which the collectives of a group are divided.
MAX_SHARES = 16
#: Flags of a frame.
_FAULTY, _RECOVERS, _SHARE = 1, 2, 4


class What(IntEnum):
    """What the ranks of a group do together. `EXCHANGE`: sends and receives between pairs of ranks, in any number. `LEAVE`: the
    rank leaves the group.
    """

    ALL_REDUCE = 1
    REDUCE = 2
    BROADCAST = 3
    ALL_GATHER = 4
    REDUCE_SCATTER = 5
    ALL_TO_ALL = 6
    GATHER = 7
    SCATTER = 8
    BARRIER = 9
    EXCHANGE = 10
    LEAVE = 11


class Reduction(IntEnum):
    """How the elements of all ranks become one. `AVG`: the sum, divided by the number of ranks. `PREMUL_SUM`: the sum of the
    elements times a factor.
    """

    NONE = 0
    SUM = 1
    AVG = 2
    PRODUCT = 3
    MIN = 4
    MAX = 5
    PREMUL_SUM = 6


REDUCING = frozenset((What.ALL_REDUCE, What.REDUCE, What.REDUCE_SCATTER))
ROOTED = frozenset((What.REDUCE, What.BROADCAST, What.GATHER, What.SCATTER))
#: Dtypes whose elements can be reduced: those of PyTorch's groups of the backend nccl.
REDUCIBLE = frozenset(
    (
        *(DType.BOOL, DType.U8, DType.I8, DType.I32, DType.I64),
        *(DType.F16, DType.BF16, DType.F32, DType.F64),
    )
)


class Range(NamedTuple):
    """Elements of a buffer.

    Attributes:
        buffer: id of the buffer, or `SHARED_MEMORY`.
        offset: first byte, in the buffer or in the shared memory.
        elements: number of elements.
        peer: the other rank of a send or receive; 0 in other frames.
    """

    buffer: int
    offset: int
    elements: int
    peer: int = 0


@dataclass(frozen=True, slots=True)
class Collective:
    """One rank's part in a collective.

    Attributes:
        group: random id of the group.
        sequence: number of the collective in its group, from 1; 0: EXCHANGE and LEAVE have none.
        rank: this rank.
        size: number of ranks of the group.
        timeout_ms: maximum time for which this rank waits for the others.
        what: what the ranks do.
        dtype: type of the elements.
        reads: the ranges that this rank reads. One per rank, in the order of the ranks, if each rank gets a part of its own.
        writes: the ranges that this rank writes.
        reduction: how elements are reduced.
        root: the rank that gives or gets everything.
        factor: the factor of PREMUL_SUM.
        origin: the Python line that asks for it.
        fault: why this rank cannot take part, so that the collective fails for all ranks; empty: it takes part. Executors say so
            for their ranks.
        recovers: the rank's session can go on in another executor, together with those of the other ranks.
        share: the group is a share of another one (`share_of`), so not each of its numbers comes here.
    """

    group: bytes
    sequence: int
    rank: int
    size: int
    timeout_ms: int
    what: What
    dtype: DType = DType.U8
    reads: tuple[Range, ...] = ()
    writes: tuple[Range, ...] = ()
    reduction: Reduction = Reduction.NONE
    root: int = 0
    factor: float = 1.0
    origin: str = ""
    fault: str = ""
    recovers: bool = False
    share: bool = False

    @property
    def name(self) -> str:
        """What the ranks do, for messages."""
        name = self.what.name.lower()
        if self.what is What.EXCHANGE:
            return "send" if not self.writes else "recv" if not self.reads else "batch_isend_irecv"
        return name


def pack_collective(c: Collective) -> bytes:
    """Payload of a COLLECTIVE frame."""
    origin = c.origin.encode(errors="replace")[:MAX_ORIGIN]
    if c.fault:
        origin = origin[: MAX_ORIGIN // 2] + b"\0" + c.fault.encode(errors="replace")
        origin = origin[:MAX_ORIGIN]
    head = _HEAD.pack(
        *(c.group, c.sequence, c.timeout_ms, c.rank, c.size, c.root),
        *(c.what, c.reduction, c.dtype.code, _flags(c), c.factor, len(c.reads), len(c.writes), len(origin)),
    )
    return b"".join([head, *[_RANGE.pack(*r) for r in (*c.reads, *c.writes)], origin])


def _flags(c: Collective) -> int:
    return (_FAULTY if c.fault else 0) | (_RECOVERS if c.recovers else 0) | (_SHARE if c.share else 0)


def group_of(payload: bytes | memoryview) -> bytes:
    """The id of the group in the payload of a COLLECTIVE frame that `pack_collective` has made."""
    return bytes(payload[:GROUP_BYTES])


def with_sequence(payload: bytes, sequence: int) -> bytes:
    """The payload of a COLLECTIVE frame that `pack_collective` has made, with another sequence number."""
    return payload[:GROUP_BYTES] + _SEQUENCE.pack(sequence) + payload[_NUMBERED:]


def with_group(payload: bytes | memoryview, group: bytes) -> bytes:
    """The payload of a COLLECTIVE frame that `pack_collective` has made, with another group's id."""
    return group + bytes(payload[GROUP_BYTES:])


def share_of(group: bytes, index: int) -> bytes:
    """The id of the group in which an executor carries its share of another group's collectives.

    Args:
        group: id of the whole group.
        index: number of the executor among those that carry the group. The first one carries it under its own id.
    """
    if not index:
        return group
    return hashlib.sha256(group + index.to_bytes(2, "little")).digest()[:GROUP_BYTES]


def unpack_collective(payload: bytes | memoryview) -> Collective:
    """The content of a COLLECTIVE frame.

    Raises:
        DecodeError: the payload is malformed, or its ranges do not fit what the frame asks for.
    """
    if len(payload) < _HEAD.size:
        raise DecodeError("COLLECTIVE frame is shorter than its header")
    head = _HEAD.unpack_from(payload)
    group, sequence, timeout_ms, rank, size, root, what, reduction, code, flags, factor, n_read, n_write, n_origin = (
        head
    )
    if n_read + n_write > MAX_RANGES or n_origin > MAX_ORIGIN:
        raise DecodeError(
            f"COLLECTIVE frame has {n_read + n_write} ranges and {n_origin} bytes of origin; the limits are {MAX_RANGES} and "
            f"{MAX_ORIGIN}"
        )
    if _HEAD.size + (n_read + n_write) * _RANGE.size + n_origin != len(payload) or flags > _FAULTY + _RECOVERS + _SHARE:
        raise DecodeError("COLLECTIVE frame's counts do not match its length, or it has unknown flags")
    if what not in _WHATS or reduction not in _REDUCTIONS or code not in BY_CODE:
        raise DecodeError(
            f"COLLECTIVE frame asks for {what} with reduction {reduction} of dtype {code}, which are unknown"
        )
    ranges = [Range(*_RANGE.unpack_from(payload, _HEAD.size + k * _RANGE.size)) for k in range(n_read + n_write)]
    origin, fault = bytes(payload[len(payload) - n_origin :]).decode(errors="replace"), ""
    if flags & _FAULTY:
        origin, _, fault = origin.partition("\0")
        fault = fault or "it has a failure without a reason"
    found = Collective(
        *(group, sequence, rank, size, timeout_ms, What(what), BY_CODE[code]),
        *(tuple(ranges[:n_read]), tuple(ranges[n_read:]), Reduction(reduction), root, factor, origin, fault),
        recovers=bool(flags & _RECOVERS),
        share=bool(flags & _SHARE),
    )
    _check(found)
    return found


class CollectiveReader:
    """Unpacks COLLECTIVE frames. A script sends the same frames many times, with other sequence numbers: small ones are unpacked
    once, and remembered.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, Collective] = {}

    def unpack(self, payload: bytes | memoryview) -> Collective:
        """As `unpack_collective`."""
        if len(payload) > _REMEMBERED:
            return unpack_collective(payload)
        key = bytes(payload[:GROUP_BYTES]) + bytes(payload[_NUMBERED:])
        k = self._known.get(key)
        if k is None or not k.sequence:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            found = self._known[key] = unpack_collective(payload)
            return found
        (sequence,) = _SEQUENCE.unpack_from(payload, GROUP_BYTES)
        if not sequence:
            return unpack_collective(payload)
        return Collective(
            *(k.group, sequence, k.rank, k.size, k.timeout_ms, k.what, k.dtype, k.reads, k.writes, k.reduction, k.root),
            *(k.factor, k.origin, k.fault, k.recovers, k.share),
        )


_WHATS = frozenset(map(int, What))
_REDUCTIONS = frozenset(map(int, Reduction))


def _check(c: Collective) -> None:
    if not 0 < c.size <= MAX_RANKS or c.rank >= c.size or c.root >= c.size:
        raise DecodeError(
            f"COLLECTIVE frame has rank {c.rank} and root {c.root} of {c.size} ranks; a group has 1 to {MAX_RANKS} ranks"
        )
    if not 0 < c.timeout_ms <= _MAX_TIMEOUT_MS:
        raise DecodeError(f"COLLECTIVE frame has a timeout of {c.timeout_ms} ms")
    if (c.sequence > 0) == (c.what in (What.EXCHANGE, What.LEAVE)):
        raise DecodeError(f"COLLECTIVE frame of a {c.name} has the sequence number {c.sequence}")
    if (c.reduction != Reduction.NONE) != (c.what in REDUCING):
        raise DecodeError(f"COLLECTIVE frame of a {c.name} has the reduction {c.reduction.name}")
    if c.reduction is not Reduction.PREMUL_SUM and c.factor != 1.0:
        raise DecodeError("COLLECTIVE frame has a factor, but its reduction has none")
    if c.what in REDUCING:
        _check_reduction(c)
    counts = len(c.reads), len(c.writes)
    if c.what is What.EXCHANGE:
        wrong = next((r.peer for r in (*c.reads, *c.writes) if r.peer >= c.size or r.peer == c.rank), None)
        if wrong is not None:
            raise DecodeError(f"rank {c.rank} of {c.size} cannot exchange data with rank {wrong}")
        if not any(counts):
            raise DecodeError("COLLECTIVE frame exchanges nothing")
    elif counts != _ranges(c):
        raise DecodeError(
            f"COLLECTIVE frame of a {c.name} reads {counts[0]} ranges and writes {counts[1]}; expected: {_ranges(c)}"
        )
    if c.what is What.ALL_REDUCE and c.reads[0].elements != c.writes[0].elements:
        raise DecodeError("an all_reduce must read as many elements as it writes")


def _check_reduction(c: Collective) -> None:
    if c.dtype not in REDUCIBLE:
        raise DecodeError(f"elements of type {c.dtype.label} cannot be reduced")
    if c.dtype is DType.BOOL and c.reduction in (Reduction.AVG, Reduction.PREMUL_SUM):
        raise DecodeError(f"the reduction {c.reduction.name} is not defined for bool")
    if c.reduction is Reduction.PREMUL_SUM and (c.dtype.kind != "float" or not math.isfinite(c.factor)):
        raise DecodeError("PREMUL_SUM needs elements of a floating-point type, and a finite factor")


def _ranges(c: Collective) -> tuple[int, int]:
    """The number of ranges that a frame reads and writes."""
    mine = c.rank == c.root
    return {
        What.ALL_REDUCE: (1, 1),
        What.REDUCE: (1, int(mine)),
        What.BROADCAST: (int(mine), int(not mine)),
        What.ALL_GATHER: (1, c.size),
        What.REDUCE_SCATTER: (c.size, 1),
        What.ALL_TO_ALL: (c.size, c.size),
        What.GATHER: (1, c.size if mine else 0),
        What.SCATTER: (c.size if mine else 0, 1),
    }.get(c.what, (0, 0))
