"""The scheduler's checkpoint as bytes: JSON of declared fields, versioned, checked field by field when it is read.

A checkpoint lies in a JetStream bucket that other services can reach. So reading one makes numbers, strings and the tables that
are declared here and in the records of the books, and nothing else; a value of another type is a `CheckpointError`.

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

VERSION = 3
"""Of the encoding; raise it when a record's fields change. A checkpoint of another version is not read."""
MAX_FOLLOWER_BYTES = 64 << 20
"""Bytes of one follower before compression: thirty thousand sessions of ten minutes. Bounds what damaged bytes may inflate to."""
MAX_BYTES = 256 << 20
"""Bytes of a whole checkpoint, which a scheduler holds in memory at once when it starts."""
_COMPRESSION = 1
_MAX_HEAD_BYTES = 1 << 20


class CheckpointError(ValueError):
    """Bytes are not a checkpoint of this version, or a follower is too large to be kept."""

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
    tokens: int
    refilled: int
    policy: tuple[int, int, int, int, int, int]
    programs: list[tuple[int, int, bool, list[int]]]
    early: list[tuple[int, list[int]]]


class _State(BaseModel, extra="forbid"):
    """What `wooly_dispatch.state.snapshot` writes."""

    version: Literal[2]
    config: tuple[int, int, int, int, int, int, int, bool, int, int, int, int, int]
    now: int
    launches: int
    floor_credit: int
    tokens: int
    refilled: int
    device_ns: int
    exclusive: str
    width: int
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
_WHOLE = TypeAdapter(tuple[Literal[3], int, list[tuple[str, int, int]]])


def encode_follower(follower: Follower) -> bytes:
    """Everything that is known of one GPU, as bytes that do not change with it.

    Raises:
        CheckpointError: more than `MAX_FOLLOWER_BYTES`, or something in it is not of its declared type.
    """
    try:
        books = _RECORD.dump_json(follower.record(), warnings="error")
    except ValueError as e:  # pydantic's, or of a string that is no Unicode
        raise CheckpointError(f"the books of {follower.executor_id} cannot be written: {e}") from e
    data = books + b"\n" + follower.replayer.checkpoint()
    if len(data) > MAX_FOLLOWER_BYTES:
        raise CheckpointError(
            f"the books of {follower.executor_id} are {len(data)} bytes; a checkpoint takes {MAX_FOLLOWER_BYTES}"
        )
    return zlib.compress(data, _COMPRESSION)


def decode_follower(data: bytes) -> Follower:
    """The follower that `encode_follower` described.

    Raises:
        CheckpointError: the bytes are damaged, larger than allowed, of other types, or contradict themselves.
    """
    try:
        inflate = zlib.decompressobj()
        plain = inflate.decompress(data, MAX_FOLLOWER_BYTES)
        if not inflate.eof:
            raise CheckpointError(f"a follower ends too early, or is larger than {MAX_FOLLOWER_BYTES} bytes")
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
        raise CheckpointError(f"not a checkpoint of a follower: {reason}") from e
    return follower


def encode(sequence: int, followers: list[tuple[str, int, bytes]]) -> bytes:
    """A whole checkpoint.

    Args:
        sequence: the last message of the journal stream that is in it.
        followers: executor id, the last message of that executor's that is in it, `encode_follower`.

    Raises:
        CheckpointError: more than `MAX_BYTES`.
    """
    head = json.dumps([VERSION, sequence, [[name, position, len(data)] for name, position, data in followers]]).encode()
    whole = head + b"\n" + b"".join(data for _, _, data in followers)
    if len(whole) > MAX_BYTES:
        raise CheckpointError(f"it would be {len(whole)} bytes; {MAX_BYTES} are allowed")
    return whole


def decode(data: bytes) -> tuple[int, list[tuple[str, int, Follower]]]:
    """The opposite of `encode`: the position in the stream; executor id, position, follower.

    Raises:
        CheckpointError: the bytes are not a checkpoint of this version, or damaged.
    """
    end = data.find(b"\n", 0, _MAX_HEAD_BYTES)
    try:
        _, sequence, names = _WHOLE.validate_json(data[: max(end, 0)], strict=True)
    except ValidationError as e:
        raise CheckpointError("not a checkpoint of this version") from e
    found, at = [], end + 1
    for name, position, size in names:
        follower = decode_follower(data[at : at + max(size, 0)])
        if follower.executor_id != name or position < 0:
            raise CheckpointError(f"the books of {follower.executor_id} stand under the name {name}")
        found.append((name, position, follower))
        at += size
    if at != len(data) or sequence < 0:
        raise CheckpointError(f"{len(data) - at} bytes are left over")
    return sequence, found
