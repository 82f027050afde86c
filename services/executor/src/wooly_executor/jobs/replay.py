"""Replays a job's module over a data channel, as a client. One thread per job; everything here blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from wooly_bus.channel import ChannelClient, ChannelError
from wooly_bus.contents import CHUNK, MIN_OFFER_BYTES, chunk_digest, content_id
from wooly_bus.tracing import step as span
from wooly_wis.codec import digest
from wooly_wis.frames import CONTENT, MAX_CHUNK, PROTOCOL, READ_HEAD, WRITE_HEAD, Kind, pack_json, pack_run, unpack_json
from wooly_wis.messages import JobOutput
from wooly_wis.module import Load, Module, Output

from wooly_executor.jobs.blobs import PIECE_BYTES, JobBlobs
from wooly_executor.session_programs import PROGRAMS_KEPT

#: Maximum seconds to wait for the end of the session after its last answer. The device may be busy with other sessions.
END_S = 5.0
#: Number of programs that the client names by digest. It is below the session's limit, so that no named program was forgotten.
PROGRAMS_NAMED = PROGRAMS_KEPT - 64
#: Number of blobs whose content ids an executor remembers.
CONTENTS_REMEMBERED = 4096


class JobFailedError(Exception):
    """The job failed, and another attempt would fail in the same way."""


class JobLostError(Exception):
    """The job was interrupted through no fault of its own. Another attempt may succeed."""


class KnownContents:
    """The content ids of blobs that jobs of this executor have loaded, by the blobs' names. Any thread may use it.

    A blob is named by another digest than a content on the device. With this table, a job can ask the device for a constant
    before it fetches the blob. Jobs may only ask for blobs that their own tenant has.
    """

    def __init__(self) -> None:
        self._ids: OrderedDict[str, bytes] = OrderedDict()

    def get(self, name: str) -> bytes | None:
        """The content id of a blob, or None."""
        return self._ids.get(name)

    def add(self, name: str, content: bytes) -> None:
        """Remember the content id of a blob."""
        self._ids[name] = content
        while len(self._ids) > CONTENTS_REMEMBERED:
            self._ids.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A module that is ready to be replayed.

    Attributes:
        module: the checked module.
        names: the blobs of the module's constants, then of its inputs.
        whole: numbers of the load steps that fill a whole buffer.
    """

    module: Module
    names: tuple[str, ...]
    whole: frozenset[int]


@dataclass(slots=True)
class Moved:
    """Bytes that a replay moved.

    Attributes:
        fetched: bytes of sources that were fetched and uploaded.
        shared: bytes of constants that the device already had.
        outputs: the stored results.
    """

    fetched: int = 0
    shared: int = 0
    outputs: list[JobOutput] = field(default_factory=list)


def replay(
    client: ChannelClient, session_id: str, token: str, prepared: Prepared, blobs: JobBlobs, contents: KnownContents
) -> Moved:
    """Run the steps of a module, and store its outputs as blobs.

    Args:
        client: a channel to the device.
        session_id: the job's session.
        token: the token that admits the client.
        prepared: the module and its sources.
        blobs: the blobs of the job's tenant.
        contents: content ids that are known already; gets those that are found out.

    Raises:
        JobFailedError: a step failed.
        JobLostError: the session was closed.
        JobStoppedError: the job was stopped.
        BusError: a blob cannot be read or stored.
    """
    module, moved = prepared.module, Moved()
    try:
        client.send(Kind.HELLO, pack_json({"protocol": PROTOCOL, "session_id": session_id, "token": token}))
        _answer(client, Kind.WELCOME)
        for raw in module.sources:
            client.send(Kind.SOURCE, raw)
        names = [digest(raw) for raw in module.programs]
        defined: OrderedDict[int, None] = OrderedDict()
        for number, step in enumerate(module.steps):
            if isinstance(step, Load):
                shareable = number in prepared.whole and step.source < len(module.constants)
                _load(
                    client,
                    step,
                    module.source_bytes(step.source),
                    prepared,
                    blobs,
                    contents if shareable else None,
                    moved,
                )
                continue
            if step.program not in defined:
                client.send(Kind.DEFINE, module.programs[step.program])
            defined[step.program] = None
            defined.move_to_end(step.program)
            if len(defined) > PROGRAMS_NAMED:
                defined.popitem(last=False)
            client.send(Kind.RUN, pack_run(names[step.program], list(step.bindings), step.params, list(step.frees)))
        client.send(Kind.SYNC)
        _answer(client, Kind.RESULT)
        with span("executor", "keep_results"):
            for output in module.outputs:
                moved.outputs.append(_keep(client, output, blobs))
        client.send(Kind.CLOSE)
        client.await_end(END_S)
        return moved
    except ChannelError as e:
        raise JobLostError(f"its session was closed: {e}") from e


def _load(
    client: ChannelClient,
    step: Load,
    nbytes: int,
    prepared: Prepared,
    blobs: JobBlobs,
    contents: KnownContents | None,
    moved: Moved,
) -> None:
    """Fill a part of a buffer. With `contents`, the source fills the whole buffer, and sessions may share it."""
    name = prepared.names[step.source]
    if contents is None or nbytes < MIN_OFFER_BYTES:
        for at, piece in _placed(blobs.pieces(name, nbytes)):
            _write(client, step.buffer, step.offset + at, piece)
        moved.fetched += nbytes
        return
    known = contents.get(name)
    if known is not None and _offer(client, step.buffer, nbytes, known):
        moved.shared += nbytes
        return
    digests, chunk = [], bytearray()
    for at, piece in _placed(blobs.pieces(name, nbytes)):
        _write(client, step.buffer, at, piece)
        chunk += piece
        while len(chunk) >= CHUNK:
            digests.append(chunk_digest(bytes(chunk[:CHUNK])))
            del chunk[:CHUNK]
    if chunk:
        digests.append(chunk_digest(bytes(chunk)))
    content = content_id(digests, nbytes)
    client.send(Kind.SEAL, CONTENT.pack(step.buffer, nbytes, 0, content))
    contents.add(name, content)
    moved.fetched += nbytes


def _placed(pieces: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield each piece with its offset in bytes."""
    at = 0
    for piece in pieces:
        yield at, piece
        at += len(piece)


def _write(client: ChannelClient, buffer: int, offset: int, data: bytes) -> None:
    view = memoryview(data)
    for at in range(0, len(view), MAX_CHUNK):
        client.send(Kind.WRITE, WRITE_HEAD.pack(buffer, offset + at), view[at : at + MAX_CHUNK])


def _offer(client: ChannelClient, buffer: int, nbytes: int, content: bytes) -> bool:
    client.send(Kind.OFFER, CONTENT.pack(buffer, nbytes, 0, content))
    return bool(unpack_json(_answer(client, Kind.RESULT)).get("known"))


def _keep(client: ChannelClient, output: Output, blobs: JobBlobs) -> JobOutput:
    tensor = output.tensor

    def pieces() -> Iterator[bytes]:
        for at in range(0, tensor.nbytes, PIECE_BYTES):
            data = bytearray(min(PIECE_BYTES, tensor.nbytes - at))
            client.send(Kind.READ, READ_HEAD.pack(output.buffer, output.offset + at, len(data)))
            other = client.recv_data(memoryview(data), Kind.DATA)
            if other is not None:
                raise _failure(other.payload)
            yield bytes(data)

    name = blobs.put(pieces())
    return JobOutput(name=tensor.name, dtype=tensor.dtype.label, sizes=tensor.sizes, digest=name, nbytes=tensor.nbytes)


def _answer(client: ChannelClient, kind: Kind) -> bytes | bytearray | memoryview:
    frame = client.recv()
    if frame.kind == Kind.ERROR:
        raise _failure(frame.payload)
    if frame.kind != kind:
        raise JobLostError(f"expected a {kind.name} frame, got kind {frame.kind}")
    return frame.payload


def _failure(payload: bytes | bytearray | memoryview) -> JobFailedError:
    error = unpack_json(payload)
    return JobFailedError(f"{error.get('code')}: {error.get('message')}")
