"""Takes in what happens to sessions: frames of clients, connections that begin or end, and posted events.

Each becomes an event of the session's fold, which the interpreter carries out. The device loop and the launcher call this module,
in the device's thread.
"""

from __future__ import annotations

import time

from wooly_bus.channel import ChannelServer, Connected, Event, FrameReceived

from wooly_executor.answers import Answers
from wooly_executor.decoding import DeviceActivity
from wooly_executor.dispatch import Dispatch
from wooly_executor.frames import Frame
from wooly_executor.interpreter import Interpreter
from wooly_executor.post import Post
from wooly_executor.session import Session
from wooly_executor.sessions import Sessions

#: Seconds between two checks of how much host memory sessions use.
REVIEW_S = 0.5


class Intake:
    """Polls connections and handles events.

    Args:
        server: the connections.
        sessions: the open sessions.
        interpreter: carries out what the fold of a session decides.
        answers: queued answers; they are sent after the events.
        post: events that the device's thread posts to itself.
        activity: tells decoders what the device's thread does.
        dispatch: orders the runs.

    Attributes:
        polled_ns: time of the last poll, by `time.perf_counter_ns`.
    """

    def __init__(
        self,
        server: ChannelServer,
        sessions: Sessions,
        interpreter: Interpreter,
        answers: Answers,
        post: Post,
        activity: DeviceActivity,
        dispatch: Dispatch,
    ) -> None:
        self._dispatch = dispatch
        self._server, self._sessions, self._interpreter = server, sessions, interpreter
        self._answers, self._post, self._activity = answers, post, activity
        self.polled_ns = self._reviewed_ns = 0
        self._unreviewed = False  # an event arrived since the last review

    @property
    def waiting(self) -> bool:
        """Whether frames have arrived that no poll has taken."""
        return bool(self._server.waiting())

    @property
    def posted(self) -> bool:
        """Whether there are posted events."""
        return bool(self._post)

    def timeout(self) -> float | None:
        """Seconds until there is work without a new event; None: only an event brings work."""
        if self._interpreter.yielding:
            return 0.0
        return REVIEW_S if self._unreviewed else None

    def poll(self, timeout: float | None = 0) -> None:
        """Wait up to `timeout` seconds (None: without a limit) for frames of clients, and handle them."""
        activity, interpreter = self._activity, self._interpreter
        if not interpreter.yielding:  # here, while no client waits: nothing is processed before the frames that come
            interpreter.next_turn()
        activity.resting = timeout != 0
        events = self._server.poll(timeout)
        activity.resting = False
        if interpreter.yielding:
            interpreter.next_turn()
        for event in events:
            try:
                self._handle(event)
            except (MemoryError, RecursionError) as e:
                self._sessions.exhausted(event.conn, e)
        if self._answers.waiting:
            self._answers.check_waiting()
        self.settle()
        self.polled_ns = now = time.perf_counter_ns()
        self._unreviewed = self._unreviewed or bool(events)
        if self._unreviewed and now - self._reviewed_ns > REVIEW_S * 1e9:
            self._reviewed_ns, self._unreviewed = now, False
            self._sessions.review()

    def settle(self) -> None:
        """Handle posted events and send queued answers until there are no more of either. Commit the frames that were queued."""
        post, go_on = self._post, self._interpreter.go_on
        if not post:
            self._answers.flush()
        while post:  # first: if a collective has ended, no rank waits while the answer to another one is sent
            while post:
                go_on(*post.take())
            self._answers.flush()
        if self._dispatch.pending:
            self._dispatch.commit()

    def _handle(self, event: Event) -> None:
        conn = event.conn
        if isinstance(event, FrameReceived):
            session: Session | None = conn.owner
            if session is not None:  # otherwise the session ended while this frame was in transit
                payload = event.payload
                session.holdings.idle_since = None
                self._interpreter.go_on(session, Frame(event.seq, event.kind, payload, len(payload)))
        elif isinstance(event, Connected):
            self._sessions.welcome(conn, event.admitted)
        else:
            self._sessions.gone(conn, event.reason, hung_up=event.hung_up)
