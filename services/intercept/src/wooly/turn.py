"""Waits for a session's turn: a full cluster queues sessions, and the client asks until its session is opened.

A session that does not wait in the queue yet is refused at once, with two exceptions. While the controller's database is away,
the client asks until the database is back. A controller that was reached and does not answer may be starting again: it is asked
for `UNANSWERED_S`.

It knows no transport: `ask` sends a request to the controller.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeVar

from wooly_wis.messages import CloseSessionRequest, OpenSessionReply, OpenSessionRequest, QueuePlace, SessionWait

from wooly.errors import WoolyError

T = TypeVar("T")
#: Seconds of waiting before the first line: a script that has just ended may still leave the device.
QUIET_S = 2.0
#: Minimum seconds between two lines about the same place.
REPEAT_S = 30.0
#: Seconds to wait after a question that was not answered.
RETRY_S = 1.0
#: Seconds after the first question of a session without a place in which a question without an answer is repeated.
UNANSWERED_S = 30.0
#: Seconds without an answer after which a session with a place says that it waits for the controller.
SILENT_S = 10.0
#: Code of the router's refusals while its database does not answer, and of questions without an answer.
DATABASE_AWAY = "router.database"
UNANSWERED = "wooly.control"


class QueueTimeoutError(WoolyError):
    """A session waited for devices, or for the controller's database, for as long as WOOLYAI_QUEUE_S allows."""

    code = "wooly.queue_timeout"
    retryable = True


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _waits_for_database(why: WoolyError) -> str:
    return f"the session waits for the controller's database: {why}"


def outlast_database(ask: Callable[[], T], queue_s: float) -> T:
    """Ask the controller for something that a new session needs, until the controller's database does not refuse it.

    Args:
        ask: asks once. It raises WoolyError.
        queue_s: maximum seconds to wait; 0: do not wait.

    Raises:
        QueueTimeoutError: the database was away for `queue_s` seconds.
        WoolyError: another error of `ask`.
    """
    since, said = time.monotonic(), float("-inf")
    while True:
        try:
            return ask()
        except WoolyError as e:
            now, why = time.monotonic(), _waits_for_database(e)
            left = since + queue_s - now
            if e.code != DATABASE_AWAY or queue_s <= 0:
                raise
            if left <= 0:
                raise QueueTimeoutError(
                    f"the session was not opened within {queue_s:g} s (WOOLYAI_QUEUE_S): {why}"
                ) from e
            if now - since >= QUIET_S and now - said >= REPEAT_S:
                said = now
                _say(f"wooly: {why}")
            time.sleep(min(RETRY_S, left))


class Turn:
    """One session's way through the queue.

    Args:
        request: the request that opens the session.
        queue_s: maximum seconds to wait for devices, and for the controller's database; 0: do not wait.
        ask: sends a request to open a session. It raises WoolyError; its attribute `retryable` says whether a later question
            may be answered.
        leave: tells the controller that the session no longer waits. It raises WoolyError.
        say: prints a line.
        clock: returns monotonic seconds.
        sleep: waits for some seconds.
        place: the session that is opened again, after it lost its executor; None: a new session.
    """

    def __init__(
        self,
        request: OpenSessionRequest,
        queue_s: float,
        ask: Callable[[OpenSessionRequest], OpenSessionReply],
        leave: Callable[[CloseSessionRequest], object],
        *,
        say: Callable[[str], None] = _say,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        place: QueuePlace | None = None,
    ) -> None:
        self._request = request.model_copy(update={"queue": queue_s > 0})
        self._queue_s, self._ask, self._leave = queue_s, ask, leave
        self._say, self._clock, self._sleep = say, clock, sleep
        self._since = clock()
        #: Since when the session has no place.
        self._new_since = self._since
        self._place = place
        self._wait: SessionWait | None = None
        #: Why the last question was not answered, None: it was; and the time of the last answer.
        self._failure: WoolyError | None = None
        self._answered = self._since
        self._said = ("", float("-inf"))

    def open(self) -> OpenSessionReply:
        """Return the opened session.

        If this call ends with an exception (KeyboardInterrupt, too), the session leaves the queue.

        Raises:
            QueueTimeoutError: the session waited for `queue_s` seconds.
            WoolyError: the controller refuses the session.
        """
        try:
            while True:
                reply = self._next()
                if reply is not None and reply.parts:
                    return reply
                left = self._since + self._queue_s - self._clock()
                if left <= 0:
                    what = "the session was not opened" if self._wait is None else "no device was free"
                    raise QueueTimeoutError(
                        f"{what} within {self._queue_s:g} s (WOOLYAI_QUEUE_S): {self._state()}"
                    ) from self._failure
                pause = RETRY_S if reply is None or reply.wait is None else reply.wait.ask_again_s
                self._sleep(min(pause, left))
        except BaseException:
            self._go()
            raise

    def _next(self) -> OpenSessionReply | None:
        """Ask once. Returns None if the controller cannot answer now, and a later question may be answered."""
        try:
            reply = self._ask(self._request.model_copy(update={"place": self._place}))
        except WoolyError as e:
            if not self._passes(e):
                raise
            if e.code == "router.place_lost":  # this process was stopped for a while
                if self._request.lost:  # another session would not have its checkpoints
                    raise
                self._place, self._new_since = None, self._clock()
            self._failure = e
            if e.code != UNANSWERED:
                self._answered = self._clock()
            if e.code == DATABASE_AWAY or self._place is None or self._clock() - self._answered >= SILENT_S:
                self._tell(e.code)
            return None
        self._failure, self._answered = None, self._clock()
        if reply.wait is not None:
            self._place = QueuePlace(session_id=reply.session_id, token=reply.token)
            self._wait = reply.wait
            self._tell(str(reply.wait.place))
        return reply

    def _passes(self, error: WoolyError) -> bool:
        """Tell whether the session waits for a later answer after this error."""
        if self._place is None:
            unanswered = error.code == UNANSWERED and self._clock() - self._new_since < UNANSWERED_S
            return self._queue_s > 0 and (unanswered or error.code == DATABASE_AWAY)
        return error.retryable or error.code == UNANSWERED

    def _tell(self, what: str) -> None:
        """Say why the session waits, if the session waits for something else than before, or for long."""
        now = self._clock()
        if now - self._since >= QUIET_S and (what != self._said[0] or now - self._said[1] >= REPEAT_S):
            self._said = what, now
            self._say(f"wooly: {self._state()}")

    def _state(self) -> str:
        wait, failure = self._wait, self._failure
        if failure is not None and failure.code == DATABASE_AWAY:
            return _waits_for_database(failure)
        if failure is not None and self._clock() - self._answered >= SILENT_S:
            silent_s = self._clock() - self._answered
            return f"the session waits for the controller, which has not answered for {silent_s:.0f} s: {failure}"
        if wait is None:
            return "the controller did not answer" if failure is None else f"the session is not open yet: {failure}"
        fits = f"; now would start: {wait.would_fit}" if wait.would_fit else ""
        return f"the session waits for a device, place {wait.place} of {wait.length} in the queue: {wait.reason}{fits}"

    def _go(self) -> None:
        """Leave the queue. If the controller does not answer, the session leaves when its lease ends."""
        if self._place is None:
            return
        place, self._place = self._place, None
        try:
            self._leave(CloseSessionRequest(session_id=place.session_id, token=place.token))
        except WoolyError:
            return
