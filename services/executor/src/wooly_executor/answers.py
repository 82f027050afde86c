"""What is said to clients: results, failures, and memory that leaves straight from a buffer.

Answers that a client does not read are kept, up to a limit: then its session waits until it reads, and ends if it does not.

Owned by the device loop's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor
from wooly_bus.channel import ChannelServer, Connection
from wooly_wis.errors import DecodeError
from wooly_wis.frames import ANSWER_COPIED, MAX_CHUNK, Kind, pack_json, wants_reply

from wooly_executor.host_account import MOST_PIECES, HostLimits
from wooly_executor.session import Failure, Frame, Session

_ASKS = frozenset((Kind.READ, Kind.SYNC, Kind.STATS, Kind.OFFER, Kind.PIN))


class Answers:
    """Gathers what is said until `flush`.

    Args:
        server: of the clients' channels.
        proceed: goes on with a session that waited for its client to read.
        end: ends a session whose client does not read, and says why.
        limits: of what is kept for a client that does not read.
        clock: monotonic seconds.

    Attributes:
        lending: sessions that wait for their clients to read: the channel has their buffers, or too many of their answers.
    """

    def __init__(
        self,
        server: ChannelServer,
        proceed: Callable[[Session], None],
        end: Callable[[Session, str], None],
        limits: HostLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lending: list[Session] = []
        self._server = server
        self._proceed, self._end = proceed, end
        self._limits, self._clock = limits, clock
        self._said = False

    def say(self, conn: Connection, value: dict[str, Any], kind: Kind = Kind.RESULT) -> None:
        """Answer with a JSON object."""
        conn.send(kind, pack_json(value))
        self._said = True
        if conn.queued_bytes > self._limits.answers or conn.queued_pieces > MOST_PIECES:
            self._overfull(conn)

    def failure(self, session: Session, conn: Connection) -> bool:
        """Answer with what has failed in a session since its last answer; False if nothing has."""
        failure = session.take_failure()
        if failure is None:
            return False
        self.say(conn, failure.to_json(), Kind.ERROR)
        return True

    def failure_if_awaited(self, session: Session, conn: Connection, frame: Frame) -> None:
        """Answer a frame that failed, where its client waits; any other's failure is kept."""
        if not frame.refused and awaited(frame):
            self.failure(session, conn)

    def refuse(self, conn: Connection, frame: Frame, code: str, message: str) -> None:
        """Answer a frame that was not processed, and may yet be: why."""
        self.say(conn, Failure(code, message, frame.seq, None).to_json(), Kind.ERROR)

    def data(self, session: Session, conn: Connection, memory: Tensor) -> None:
        """Answer with the bytes of a flat tensor of the session's.

        What is large leaves straight from the buffer, which nothing may change until it is gone; from a device whose memory the
        host does not see, piece by piece through as much memory of the host as the session may have unread.
        """
        nbytes, device = len(memory), session.runtime.device
        session.counters.bytes_out += nbytes
        self._said = True
        if 0 < nbytes <= ANSWER_COPIED:
            conn.send(Kind.DATA, bytes(device.read(memory)))
            if conn.queued_bytes > self._limits.answers or conn.queued_pieces > MOST_PIECES:
                self._overfull(conn)
            return
        if nbytes:
            session.lending = session.barred = True
            session.lent = memory
            self._lend(session, conn)
            self._wait(session, conn)
        else:
            conn.send(Kind.DATA)

    def _lend(self, session: Session, conn: Connection) -> None:
        """Send the next piece of an answer."""
        memory, device = session.lent, session.runtime.device
        assert memory is not None
        most = len(memory) if device.host else max(self._limits.answers // MAX_CHUNK, 1) * MAX_CHUNK
        piece = device.read(memory[:most])
        session.lent = memory[most:] if len(memory) > most else None
        for at in range(0, len(piece), MAX_CHUNK):
            conn.send(Kind.DATA, piece[at : at + MAX_CHUNK])
        self._said = True

    def _overfull(self, conn: Connection) -> None:
        """Too much waits for a client: if it cannot be sent now, the session waits."""
        self._server.flush()
        session: Session | None = conn.owner
        if conn.closed or session is None or session.unread:
            return
        if self._much(conn):
            session.unread = True
            if not session.lending:
                self._wait(session, conn)

    def _much(self, conn: Connection) -> bool:
        """Whether a session that waits for its client to read goes on waiting."""
        return conn.queued_bytes > self._limits.answers // 2 or conn.queued_pieces > MOST_PIECES // 2

    def _wait(self, session: Session, conn: Connection) -> None:
        session.unread_since, session.unread_bytes = self._clock(), conn.queued_bytes
        self.lending.append(session)

    def flush(self) -> None:
        """Send what was said."""
        while self._said:
            self._said = False
            self._server.flush()
            if self.lending:
                self.take_back()

    def timeout(self) -> float | None:
        """Seconds until a client has read nothing for too long; None: nobody waits."""
        if not self.lending:
            return None
        return max(min([s.unread_since for s in self.lending]) + self._limits.answers_s - self._clock(), 0.0)

    def take_back(self) -> None:
        """Go on with the sessions whose answers are gone, and end those whose clients do not read."""
        lending, self.lending = self.lending, []
        now = self._clock()
        for session in lending:
            conn = session.conn
            if conn is None or conn.closed:
                continue
            left = conn.queued_bytes
            if not left and session.lent is not None:
                self._lend(session, conn)
                left = session.unread_bytes = conn.queued_bytes
                session.unread_since = now
            if left and (session.lending or self._much(conn)):
                if left < session.unread_bytes:
                    session.unread_since, session.unread_bytes = now, left
                elif now - session.unread_since > self._limits.answers_s:
                    self._end(
                        session,
                        f"its client has read nothing for {self._limits.answers_s:g} s, and {left} bytes of answers wait for it "
                        "(WOOLY_EXECUTOR_ANSWERS_S)",
                    )
                    continue
                self.lending.append(session)
            else:
                if session.lending:
                    session.lending = session.barred = False
                session.unread = False
                self._proceed(session)


def awaited(frame: Frame) -> bool:
    """Whether the client waits for an answer."""
    return frame.kind in _ASKS or (frame.kind == Kind.RUN and _wants_reply(frame.payload))


def _wants_reply(payload: Any) -> bool:
    try:
        return wants_reply(payload)
    except DecodeError:
        return False
