"""Sends answers to clients: results, failures, and memory straight from a buffer.

If a client does not read its answers, the answers are queued up to a limit. Above the limit, the client's session waits until the
client reads. The session ends if the client reads nothing for too long.

The device loop's thread owns this module.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor
from wooly_bus.channel import ChannelServer, Connection
from wooly_wis.frames import MAX_CHUNK, Kind, pack_json

from wooly_executor.errors import BindingError
from wooly_executor.flow import Frame as AnyFrame
from wooly_executor.flow import Overdue, Signal, note
from wooly_executor.frames import Failure, awaited
from wooly_executor.host_account import MAX_PIECES, HostLimits
from wooly_executor.post import Post
from wooly_executor.runtime.device import TorchDevice
from wooly_executor.session import Session

_NOTHING = pack_json({})


def require_place(conn: Connection, place: int, nbytes: int) -> None:
    """Check that an answer fits into shared memory at a place that the client names.

    Raises:
        BindingError: no memory is shared, or the place is not in it.
    """
    have = 0 if conn.segment is None else conn.segment.nbytes
    if place > have or nbytes > have - place:
        raise BindingError(
            f"{nbytes} bytes at {place} are not in the memory that client and executor share ({have} bytes)"
        )


class Answers:
    """Queues answers until `flush` sends them.

    Args:
        server: the channels of the clients.
        device: the device that holds the buffers.
        post: gets the event that a client has read, or has read nothing for too long.
        limits: bounds the answers that are queued for one client.
        returned: called when an answer was sent from buffers, so that the session may leave the device again.
        clock: returns monotonic seconds.

    Attributes:
        waiting: sessions that wait until their clients read, because the channel still uses their buffers or because too many
            answers are queued.
    """

    def __init__(
        self,
        server: ChannelServer,
        device: TorchDevice,
        post: Post,
        limits: HostLimits,
        returned: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.waiting: list[Session] = []
        self._server, self._device, self._post = server, device, post
        self._limits, self._returned, self._clock = limits, returned, clock
        self._said = False

    def say(self, conn: Connection, value: dict[str, Any], kind: Kind = Kind.RESULT) -> None:
        """Answer with a JSON object."""
        conn.send(kind, pack_json(value) if value else _NOTHING)
        self._said = True
        if conn.queued_bytes > self._limits.answers or conn.queued_pieces > MAX_PIECES:
            self._wait_if_full(conn)

    def records(self, conn: Connection, payload: bytes) -> None:
        """Answer with the records of a profile."""
        conn.send(Kind.RECORDS, payload)
        self._said = True
        if conn.queued_bytes > self._limits.answers or conn.queued_pieces > MAX_PIECES:
            self._wait_if_full(conn)

    def failure(self, session: Session, conn: Connection) -> bool:
        """Answer with the session's first failure since the last answer. Returns False if nothing failed."""
        failure = session.take_failure()
        if failure is None:
            return False
        self.say(conn, failure.to_json(), Kind.ERROR)
        return True

    def failure_if_awaited(self, session: Session, conn: Connection, frame: AnyFrame) -> None:
        """Report a frame's failure if the client waits for an answer to that frame. Otherwise the session keeps the failure."""
        if not frame.refused and awaited(frame):
            self.failure(session, conn)

    def refuse(self, conn: Connection, frame: AnyFrame, code: str, message: str) -> None:
        """Tell the client why a frame is not processed now. The frame may still be processed later."""
        self.say(conn, Failure(code, message, frame.seq, None).to_json(), Kind.ERROR)

    def copied(self, session: Session, conn: Connection, data: bytes) -> None:
        """Answer with a copy of a few bytes of the session."""
        session.counters.bytes_out += len(data)
        self._said = True
        conn.send(Kind.DATA, data)
        if conn.queued_bytes > self._limits.answers or conn.queued_pieces > MAX_PIECES:
            self._wait_if_full(conn)

    def data(self, session: Session, conn: Connection, memory: Tensor, place: int | None = None) -> None:
        """Answer with the bytes of a flat tensor of the session, in shared memory at `place` if that is not None.

        They are sent straight from the buffer, and nothing may change the buffer until all bytes are sent. If the host cannot
        address the device's memory, the data goes through host memory in pieces, each no larger than the limit of unread answers.
        """
        session.counters.bytes_out += len(memory)
        self._said = True
        note(session.flow, Signal.BUFFERS_LENT)
        session.unread.lent, session.unread.place = memory, place
        self._lend(session, conn)
        self._wait(session, conn)

    def _lend(self, session: Session, conn: Connection) -> None:
        """Send the next piece of a large answer."""
        memory, place = session.unread.lent, session.unread.place
        assert memory is not None
        most = len(memory) if self._device.host else max(self._limits.answers // MAX_CHUNK, 1) * MAX_CHUNK
        piece = self._device.read(memory[:most])
        session.unread.lent = memory[most:] if len(memory) > most else None
        for at in range(0, len(piece), conn.bulk_bytes):
            conn.send_bulk(Kind.DATA, piece[at : at + conn.bulk_bytes], None if place is None else place + at)
        if place is not None:
            session.unread.place = place + len(piece)
        self._said = True

    def _wait_if_full(self, conn: Connection) -> None:
        """Make the session wait for its client if too many answers remain queued after a flush."""
        self._server.flush()
        session: Session | None = conn.owner
        if conn.closed or session is None or session.flow.unread:
            return
        if self._still_full(conn):
            note(session.flow, Signal.ANSWERS_UNREAD)
            if not session.flow.lent:
                self._wait(session, conn)

    def _still_full(self, conn: Connection) -> bool:
        """Whether more than half of the limit is still queued, so that a waiting session must go on waiting."""
        return conn.queued_bytes > self._limits.answers // 2 or conn.queued_pieces > MAX_PIECES // 2

    def _wait(self, session: Session, conn: Connection) -> None:
        session.unread.since, session.unread.nbytes = self._clock(), conn.queued_bytes
        self.waiting.append(session)

    def flush(self) -> None:
        """Send all queued answers."""
        while self._said:
            self._said = False
            self._server.flush()
            if self.waiting:
                self.check_waiting()

    def timeout(self) -> float | None:
        """Seconds until the first waiting client exceeds its time limit. None: no session waits for a client."""
        if not self.waiting:
            return None
        return max(min([s.unread.since for s in self.waiting]) + self._limits.answers_s - self._clock(), 0.0)

    def check_waiting(self) -> None:
        """Check all waiting sessions. Post an event for each client that has read enough, or has read nothing for too long."""
        waiting, self.waiting = self.waiting, []
        now = self._clock()
        for session in waiting:
            conn = session.conn
            if conn is None or conn.closed:
                continue
            left, flow, unread = conn.queued_bytes, session.flow, session.unread
            if not left and unread.lent is not None:
                self._lend(session, conn)
                left = unread.nbytes = conn.queued_bytes
                unread.since = now
            if left and (flow.lent or self._still_full(conn)):
                if left < unread.nbytes:
                    unread.since, unread.nbytes = now, left
                elif now - unread.since > self._limits.answers_s:
                    self._post.add(session, Overdue(self._overdue(left)))
                    continue
                self.waiting.append(session)
            else:
                if flow.lent:
                    self._post.add(session, Signal.BUFFERS_RETURNED)
                    self._returned()
                if flow.unread:
                    self._post.add(session, Signal.ANSWERS_READ)

    def _overdue(self, left: int) -> str:
        return (
            f"its client has read nothing for {self._limits.answers_s:g} s, and {left} bytes of answers are queued; read the "
            "answers sooner, or raise the limit (WOOLY_EXECUTOR_ANSWERS_S)"
        )
