"""The encoding of the scheduler's checkpoint: versioned JSON with declared fields; the reader checks every field.

A checkpoint is in a JetStream bucket that other services can write. So the reader creates only numbers, strings, and the tables
that are declared here and in the record classes. A value of another type is a `CheckpointError`.

    whole      line of JSON: [version, position in the stream, [[executor id, position, bytes], ...]]; then each follower's bytes
    follower   zlib of: line of JSON (`FollowerRecord`), line of JSON (journal, next entry, link), line of JSON (`DispatchState`)
"""

from __future__ import annotations

import json
import zlib
from typing import Literal

from pydantic import BaseModel, TypeAdapter, ValidationError
from wooly_dispatch.errors import DispatchError
from wooly_dispatch.invariants import check_state
from wooly_dispatch.journal import Replayer

from wooly_scheduler.core.follower import Follower, FollowerRecord

VERSION = 4
"""Version of the encoding. Increase it when a record's fields change. The reader refuses other versions."""
MAX_FOLLOWER_BYTES = 64 << 20
"""Maximum size, in bytes, of one follower before compression: about 30,000 sessions of ten minutes. It bounds decompression,
too.
"""
MAX_BYTES = 256 << 20
"""Maximum size, in bytes, of a whole checkpoint. A starting scheduler has all of it in memory at the same time."""
_COMPRESSION = 1
_MAX_HEAD_BYTES = 1 << 20


class CheckpointError(ValueError):
    """Bytes are not a checkpoint of this version, or a follower is too large for a checkpoint."""

    code = "scheduler.checkpoint"


class _Session(BaseModel, extra="forbid"):
    id: str
    tenant: str
    resident: bool
    asked: bool
    suspended: bool
    expected: int
    finish: tuple[int, int, int, int, int]
    lift: int
    period: int
    lane: int
    in_flight: int
    proven: bool
    stretch: int
    wall: int
    rhythm: tuple[int, list[int]]
    tokens: int
    refilled: int
    policy: tuple[int, int, int, int, int, int]
    programs: list[tuple[int, int, bool, list[int]]]
    early: list[tuple[int, list[int]]]


class _State(BaseModel, extra="forbid"):
    """The fields that `wooly_dispatch.state.snapshot` writes."""

    version: Literal[3]
    config: tuple[int, int, int, int, int, int, int, bool, int, int, int, int, int, int, int]
    now: int
    launches: int
    floor_credit: int
    tokens: int
    refilled: int
    device_ns: int
    exclusive: str
    width: int
    begun: int
    withheld_until: int
    withheld_tokens: int
    withheld_refilled: int
    virtual: tuple[int, int, int, int, int]
    sessions: list[_Session]
    flights: list[
        tuple[
            int,
            str | None,
            tuple[int, int, bool, list[int], int, int],
            int,
            int,
            int,
            int,
            int,
            int,
            bool,
            bool,
            bool,
            bool,
        ]
    ]


_RECORD = TypeAdapter(FollowerRecord)
_HEAD = TypeAdapter(tuple[str, int, str])
_WHOLE = TypeAdapter(tuple[Literal[4], int, list[tuple[str, int, int]]])


def encode_follower(follower: Follower) -> bytes:
    """Encode the whole state of one GPU. The bytes are a copy.

    Raises:
        CheckpointError: the result is larger than `MAX_FOLLOWER_BYTES`, or a value does not have its declared type.
    """
    try:
        books = _RECORD.dump_json(follower.record(), warnings="error")
    except ValueError as e:  # pydantic's error, or a string is not valid Unicode
        raise CheckpointError(f"the state of {follower.executor_id} cannot be encoded: {e}") from e
    data = books + b"\n" + follower.replayer.checkpoint()
    if len(data) > MAX_FOLLOWER_BYTES:
        raise CheckpointError(
            f"the state of {follower.executor_id} has {len(data)} bytes; the limit is {MAX_FOLLOWER_BYTES}"
        )
    return zlib.compress(data, _COMPRESSION)


def decode_follower(data: bytes) -> Follower:
    """Decode the follower of one GPU.

    Raises:
        CheckpointError: the bytes are damaged, too large, inconsistent, or have a value of another type.
    """
    try:
        inflate = zlib.decompressobj()
        plain = inflate.decompress(data, MAX_FOLLOWER_BYTES)
        if not inflate.eof:
            raise CheckpointError(f"a follower is incomplete, or larger than {MAX_FOLLOWER_BYTES} bytes")
        books, _, rest = plain.partition(b"\n")
        head, _, state = rest.partition(b"\n")
        record = _RECORD.validate_json(books, strict=True)
        _HEAD.validate_json(head, strict=True)
        _State.model_validate_json(state, strict=True)
        replayer = Replayer.resume(rest)
        bytes.fromhex(replayer.link)
        follower = Follower.of_record(record, replayer)
        if not follower.lost:
            check_state(replayer.state)
    except (zlib.error, ValidationError, ValueError, LookupError, TypeError, DispatchError, RecursionError) as e:
        reason = e.errors(include_url=False)[0]["msg"] if isinstance(e, ValidationError) else str(e)
        raise CheckpointError(f"a follower cannot be decoded: {reason}") from e
    return follower


def encode(sequence: int, followers: list[tuple[str, int, bytes]]) -> bytes:
    """Encode a whole checkpoint.

    Args:
        sequence: number of the last message of the journal stream that the checkpoint covers.
        followers: for each executor: id, number of the executor's last message that its bytes cover, bytes of `encode_follower`.

    Raises:
        CheckpointError: the result is larger than `MAX_BYTES`.
    """
    head = json.dumps([VERSION, sequence, [[name, position, len(data)] for name, position, data in followers]]).encode()
    whole = head + b"\n" + b"".join(data for _, _, data in followers)
    if len(whole) > MAX_BYTES:
        raise CheckpointError(f"the checkpoint has {len(whole)} bytes; the limit is {MAX_BYTES}")
    return whole


def decode(data: bytes) -> tuple[int, list[tuple[str, int, Follower]]]:
    """Decode a whole checkpoint: the position in the stream; and per executor its id, position and follower.

    Raises:
        CheckpointError: the bytes are not a checkpoint of this version, or are damaged.
    """
    end = data.find(b"\n", 0, _MAX_HEAD_BYTES)
    try:
        _, sequence, names = _WHOLE.validate_json(data[: max(end, 0)], strict=True)
    except ValidationError as e:
        raise CheckpointError(f"the bytes are not a checkpoint of version {VERSION}") from e
    found, at = [], end + 1
    for name, position, size in names:
        follower = decode_follower(data[at : at + max(size, 0)])
        if follower.executor_id != name or position < 0:
            raise CheckpointError(f"the state of {follower.executor_id} is stored under the name {name}")
        found.append((name, position, follower))
        at += size
    if at != len(data) or sequence < 0:
        raise CheckpointError(
            f"the checkpoint has a wrong length ({len(data) - at} bytes too many), or a negative position"
        )
    return sequence, found
