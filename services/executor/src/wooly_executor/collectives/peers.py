"""The connection by which this executor lets another one carry the collectives of a session. It does not know sessions or groups.

This executor is an ordinary client of the other one, in a session of its own there. For each collective, it writes what the rank
reads, sends the rank's frame, and reads what the rank writes. So the other executor computes with the bits that it would have if
the rank were there. If both are on one host and the other device is a CPU, the operands are in memory that they share, and the
other executor computes with them where they are.
"""

from __future__ import annotations

import ctypes
import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from wooly_bus.channel import ChannelClient, ChannelClosedError, ChannelError, Endpoint
from wooly_bus.channel.endpoint import EndpointError
from wooly_bus.channel.pinned_area import PinnedArea
from wooly_bus.channel.tls import client_context
from wooly_bus.supervision import start_thread
from wooly_bus.web import is_loopback
from wooly_wis.codec import digest, encode_program
from wooly_wis.collectives import MAX_RANKS, MAX_SHARES, SHARED_MEMORY, Collective, Range, pack_collective
from wooly_wis.dtypes import DType
from wooly_wis.errors import DecodeError
from wooly_wis.frames import PROTOCOL, READ_HEAD, WRITE_HEAD, Kind, pack_json, pack_run, unpack_json
from wooly_wis.messages import DirectSession
from wooly_wis.messages.base import ChannelToken, Endpoints, Id, SessionId
from wooly_wis.program import Form, Instruction, Operand, Program, Role, View

from wooly_executor.errors import CollectiveError

#: Seconds to wait for the other executor when a connection is made.
CONNECT_S = 10.0
#: Alignment, in bytes, of each range in the buffers at the other executor: a multiple of the size of every element.
ALIGN = 64
#: Maximum size, in bytes, of the reason with which a session ends at the other executor.
MAX_REASON = 1024


class Peer(BaseModel):
    """Another executor, and the session that this executor has there.

    Attributes:
        executor_id: the other executor.
        endpoints: where it listens.
        session_id: the session.
        token: opens its data channel.
        session: of a standalone executor: what the session asks for. Its hello opens the session.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    executor_id: Id
    endpoints: Annotated[Endpoints, Field(min_length=1)]
    session_id: SessionId
    token: ChannelToken
    session: DirectSession | None = None

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Peer:
        """Check what a ticket or a client says.

        Raises:
            CollectiveError: it is not valid.
        """
        try:
            return cls.model_validate(dict(told))
        except ValidationError as e:
            wrong = e.errors()[0]
            where = ".".join([str(part) for part in wrong["loc"]])
            raise CollectiveError(f"the other executor's {where} is not valid: {wrong['msg']}") from e


class Introduction(BaseModel):
    """The content of a GROUP frame: another executor carries the collectives of a group.

    Attributes:
        group: id of the group, in hex.
        instance: names the process of the other executor, as its WELCOME frame does.
        ticket: what the router says about the other executor; empty: the session has told it before, for another group, and works
            with the other executor already.
        peer: at a standalone executor, instead of the ticket: what the client says.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    group: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
    instance: Annotated[str, StringConstraints(max_length=64)]
    ticket: Annotated[str, StringConstraints(max_length=16384)] = ""
    peer: dict[str, Any] | None = None


class DividedGroup(BaseModel):
    """The content of a GROUP frame: the collectives of a group are divided among its executors.

    Attributes:
        group: id of the group, in hex.
        carriers: for each rank, the number of its executor. Another frame has said who carries the share of each other executor.
        least: minimum bytes of a share.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    group: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
    carriers: Annotated[
        tuple[Annotated[int, Field(ge=0, lt=MAX_SHARES)], ...], Field(min_length=2, max_length=MAX_RANKS)
    ]
    least: Annotated[int, Field(ge=1, lt=1 << 40)]


@dataclass(eq=False, slots=True)
class Errand:
    """One rank's part in a collective, with the memory of this executor.

    Attributes:
        call: the rank's frame.
        data: what the rank reads: its ranges one after the other, each at a multiple of `ALIGN`.
        results: where the results go, laid out as `data`. It may be the same memory.
        done: called in the connection's thread, with the error (empty: none), and whether the connection is broken.
    """

    call: Collective
    data: memoryview
    results: memoryview
    done: Callable[[str, bool], None]


def laid_out(ranges: Sequence[Range], itemsize: int) -> tuple[list[int], int]:
    """Where each range begins if they lie one after the other, and their size together, in bytes."""
    starts, at = [], 0
    for r in ranges:
        starts.append(at)
        at += -(-r.elements * itemsize // ALIGN) * ALIGN
    return starts, at


class PeerLink:
    """A connection to another executor. One thread uses it.

    Args:
        peer: the other executor.
        instance: names its process. If another process answers, it is not used.
        tls_ca: certificate authorities of other executors; None: those of the system.
    """

    def __init__(self, peer: Peer, instance: str, tls_ca: Path | None) -> None:
        self.peer, self._instance, self._tls_ca = peer, instance, tls_ca
        self._errands: queue.SimpleQueue[Errand | None] = queue.SimpleQueue()
        self._client: ChannelClient | None = None
        self._busy, self._closing = False, False
        self._reason = self._why = ""
        self._programs: set[int] = set()
        self._buffers = 0
        #: Id and size of the buffers at the other executor that have what the rank reads, and what it writes.
        self._sides: dict[str, tuple[int, int]] = {}
        #: Buffers at the other executor that may be poisoned. The next program frees them.
        self._stale: list[int] = []
        #: Memory with which the other executor can compute; None: before the connection, or if it cannot.
        self._pinned: PinnedArea | None = None
        self._thread = start_thread(self._run, "peer")

    # -- called by any thread -----------------------------------------------------------------------------------------

    def submit(self, errand: Errand) -> None:
        """Do a rank's part. `errand.done` follows."""
        self._errands.put(errand)

    def memory(self, nbytes: int) -> ctypes.Array[ctypes.c_uint8] | None:
        """Host memory for an errand's data or results with which the other executor computes; None: there is none."""
        pinned = self._pinned
        return None if pinned is None or not nbytes else pinned.allocate(nbytes)

    def close(self, reason: str, *, passing: bool) -> None:
        """End the connection, and with it the session at the other executor. The ranks of its groups get the reason.

        Args:
            reason: why.
            passing: the session may go on elsewhere: the other executor sees a broken connection.
        """
        self._reason, self._closing = reason, True
        if self._busy or passing:  # before the thread ends, which would say goodbye
            self.abort("the session has ended")
        self._errands.put(None)

    def abort(self, why: str) -> None:
        """Break the connection, because the other executor does not answer."""
        self._why = self._why or why  # before the client is looked up: `_connect` does it the other way round
        client = self._client
        if client is not None:
            client.abort()

    # -- called by the connection's thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        failed = ""
        while (errand := self._errands.get()) is not None:
            self._busy = True
            error = failed
            if self._closing:
                error = "the session has ended"
            elif not failed:
                try:
                    self._do(errand)
                except CollectiveError as e:
                    error = str(e)
                except (ChannelError, DecodeError, OSError) as e:
                    why = self._why or str(e)
                    failed = error = (
                        f"executor {self.peer.executor_id}, which carries the collectives of the group, cannot be used any "
                        f"more: {why}"
                    )
            self._busy = False
            errand.done(error, bool(failed))
        client = self._client
        if client is not None:
            if not failed and not self._why:
                self._leave(client)
            client.close()

    def _leave(self, client: ChannelClient) -> None:
        try:
            client.send(Kind.CLOSE, self._reason.encode(errors="replace")[:MAX_REASON])
            client.await_end(1.0)
        except ChannelError:
            return

    def _do(self, errand: Errand) -> None:
        client = self._client or self._connect()
        call = errand.call
        if call.fault:
            client.send(Kind.COLLECTIVE, pack_collective(call))
            self._sync(client)
            return
        starts, ends = [laid_out(ranges, call.dtype.itemsize) for ranges in (call.reads, call.writes)]
        data, results = [client.place_of(m, 1) if len(m) else 0 for m in (errand.data, errand.results)]
        if self._pinned is not None and data is not None and results is not None:
            call = replace(
                call, reads=_ranges_at(call.reads, starts[0], data), writes=_ranges_at(call.writes, ends[0], results)
            )
            client.send(Kind.COLLECTIVE, pack_collective(call))
            self._sync(client)
            return
        source = self._side(client, "reads", starts[1])
        target = self._side(client, "writes", ends[1])
        piece = client.bulk_bytes
        for at in range(0, len(errand.data), piece):
            client.send_bulk(Kind.WRITE, WRITE_HEAD.pack(source, at), errand.data[at : at + piece])
        reads = [r._replace(buffer=source, offset=at) for r, at in zip(call.reads, starts[0], strict=True)]
        writes = [w._replace(buffer=target, offset=at) for w, at in zip(call.writes, ends[0], strict=True)]
        client.send(Kind.COLLECTIVE, pack_collective(replace(call, reads=tuple(reads), writes=tuple(writes))))
        if len(errand.results):
            client.send(Kind.READ, READ_HEAD.pack(target, 0, len(errand.results)))
            expected = client.expect(errand.results, Kind.DATA)
            client.complete(expected)
            self._check(expected.other)
        else:
            self._sync(client)

    def _sync(self, client: ChannelClient) -> None:
        client.send(Kind.SYNC)
        frame = client.recv()
        self._check(None if frame.kind == Kind.RESULT else frame)

    def _check(self, other: Any) -> None:
        if other is None:
            return
        if other.kind != Kind.ERROR:
            raise DecodeError(f"it answered with a frame of kind {other.kind}")
        self._stale += [buffer for buffer, _ in self._sides.values()]
        self._sides = {}  # the buffers may be poisoned
        raise CollectiveError(str(unpack_json(other.payload).get("message", "it gave no reason")))

    def _side(self, client: ChannelClient, name: str, nbytes: int) -> int:
        """A buffer at the other executor with at least this size."""
        buffer, size = self._sides.get(name, (0, 0))
        if size >= nbytes:
            return buffer
        size = max(1 << (nbytes - 1).bit_length(), 4096)
        raw = _allocation(size)
        if size not in self._programs:
            self._programs.add(size)
            client.send(Kind.DEFINE, raw)
        self._buffers += 1
        frees, self._stale = [*self._stale, *([buffer] if buffer else [])], []
        client.send(Kind.RUN, pack_run(digest(raw), [self._buffers], b"", frees))
        self._sides[name] = self._buffers, size
        return self._buffers

    def _connect(self) -> ChannelClient:
        """Connect to the first endpoint at which the other executor answers.

        Raises:
            ChannelError: no endpoint leads to it.
        """
        failures: list[str] = []
        try:
            known = [Endpoint.parse(text) for text in self.peer.endpoints]
        except EndpointError as e:
            raise DecodeError(str(e)) from e
        encrypted = any(e.scheme == "tls" for e in known)
        for endpoint in sorted(known, key=lambda e: e.scheme != "unix"):
            self._check_aborted()
            if endpoint.scheme == "nats":
                continue
            if endpoint.scheme == "tcp" and encrypted and not is_loopback(endpoint.host):
                continue  # an attacker who blocks the encrypted endpoint must not see the data
            try:
                tls = client_context(self._tls_ca) if endpoint.scheme == "tls" else None
                client = ChannelClient.connect(endpoint, timeout=CONNECT_S, tls=tls)
            except ChannelError as e:
                failures.append(str(e))
                continue
            self._client = client
            self._check_aborted()
            try:
                self._greet(client)
            except (ChannelError, DecodeError) as e:
                failures.append(f"{endpoint}: {e}")
                self._client = None
                client.close()
                continue
            return client
        raise DecodeError("; ".join(failures) or "it has no endpoint that other executors may use")

    def _check_aborted(self) -> None:
        """Check that `abort` was not called while there was no connection that it could break.

        Raises:
            ChannelClosedError: it was.
        """
        if self._why:
            raise ChannelClosedError(self._why)

    def _greet(self, client: ChannelClient) -> None:
        hello: dict[str, Any] = {
            "protocol": PROTOCOL,
            "session_id": self.peer.session_id,
            "token": self.peer.token,
            "jit": "0",
        }
        if self.peer.session is not None:
            hello["session"] = self.peer.session.model_dump(mode="json")
        client.send_hello(Kind.HELLO, pack_json(hello))
        frame = client.recv(CONNECT_S)
        told = unpack_json(frame.payload)
        if frame.kind != Kind.WELCOME:
            raise DecodeError(f"it refuses this executor: {told.get('message')}")
        device = told.get("device")
        if self._instance and (not isinstance(device, dict) or device.get("instance") != self._instance):
            raise DecodeError("another process answers there than that of the group's first rank")
        window = told.get("window")
        if isinstance(window, int) and window > 0:
            client.window = min(client.window, window)
        segment = told.get("segment")
        client.share(segment if isinstance(segment, int) else 0)
        if client.segment is not None and told.get("shared_operands") is True:
            self._pinned = PinnedArea(client.segment)


def _ranges_at(ranges: Sequence[Range], starts: Sequence[int], place: int) -> tuple[Range, ...]:
    """The ranges in shared memory, from a place on."""
    return tuple([r._replace(buffer=SHARED_MEMORY, offset=place + at) for r, at in zip(ranges, starts, strict=True)])


def _allocation(nbytes: int) -> bytes:
    """The program that allocates one buffer."""
    view = View(DType.U8, (nbytes,), (1,))
    form = Form("alloc", (Operand(Role.OUT, view),))
    return encode_program(Program((form,), (Instruction(0, (0,)),)))
