"""What is said to clients: results, failures, and memory that leaves straight from a buffer.

Owned by the device loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wooly_bus.channel import ChannelServer, Connection
from wooly_wis.errors import DecodeError
from wooly_wis.frames import ANSWER_COPIED, MAX_CHUNK, Kind, pack_json, unpack_run

from wooly_executor.session import Failure, Frame, Session

_ASKS = frozenset((Kind.READ, Kind.SYNC, Kind.STATS, Kind.OFFER, Kind.PIN))


class Answers:
    """Gathers what is said until `flush`.

    Args:
        server: of the clients' channels.
        proceed: goes on with a session whose buffers were lent to its channel, once they are back.

    Attributes:
        lending: sessions whose buffers the channel has.
    """

    def __init__(self, server: ChannelServer, proceed: Callable[[Session], None]) -> None:
        self.lending: list[Session] = []
        self._server = server
        self._proceed = proceed
        self._said = False

    def say(self, conn: Connection, value: dict[str, Any], kind: Kind = Kind.RESULT) -> None:
        """Answer with a JSON object."""
        conn.send(kind, pack_json(value))
        self._said = True

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

    def data(self, session: Session, conn: Connection, memory: memoryview) -> None:
        """Answer with memory. What is large leaves straight from the buffer, which nothing may change until it is gone."""
        session.counters.bytes_out += len(memory)
        self._said = True
        if 0 < len(memory) <= ANSWER_COPIED:
            conn.send(Kind.DATA, bytes(memory))
            return
        for at in range(0, len(memory), MAX_CHUNK):
            conn.send(Kind.DATA, memory[at : at + MAX_CHUNK])
        if len(memory):
            session.lending = session.barred = True
            self.lending.append(session)

    def flush(self) -> None:
        """Send what was said."""
        while self._said:
            self._said = False
            self._server.flush()
            if self.lending:
                self.take_back()

    def take_back(self) -> None:
        """Go on with the sessions whose answers are gone."""
        lending, self.lending = self.lending, []
        for session in lending:
            conn = session.conn
            if conn is None or conn.closed:
                continue
            if conn.queued_bytes:
                self.lending.append(session)
            else:
                session.lending = session.barred = False
                self._proceed(session)


def awaited(frame: Frame) -> bool:
    """Whether the client waits for an answer."""
    return frame.kind in _ASKS or (frame.kind == Kind.RUN and _wants_reply(frame.payload))


def _wants_reply(payload: Any) -> bool:
    try:
        return unpack_run(payload).reply
    except DecodeError:
        return False
