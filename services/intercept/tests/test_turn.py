"""Waiting for a session's turn, with a scripted controller and a manual clock."""

import pytest
from wooly.control import ControlError
from wooly.turn import DATABASE_AWAY, QUIET_S, REPEAT_S, RETRY_S, UNANSWERED_S, QueueTimeoutError, Turn
from wooly_wis.messages import (
    ClientFacts,
    DeviceFacts,
    OpenSessionReply,
    OpenSessionRequest,
    QueuePlace,
    SessionPart,
    SessionWait,
)

DEVICE = DeviceFacts(name="device", vendor="cpu", runtime="cpu", total_memory=1000, cores=1)
REQUEST = OpenSessionRequest(client=ClientFacts(host="h", pid=1))
OPENED = OpenSessionReply(
    session_id="s", token="t", lease_s=9.0, parts=(SessionPart(executor_id="a", node="n", endpoints=(), device=DEVICE),)
)


def waits(place=1, reason="a is full", would_fit="", session="s", pause=1.0):
    wait = SessionWait(place=place, length=5, reason=reason, would_fit=would_fit, ask_again_s=pause)
    return OpenSessionReply(session_id=session, token="t", lease_s=9.0, wait=wait)


def failure(code, retryable=False, text="no"):
    error = ControlError(text)
    error.code, error.retryable = code, retryable
    return error


AWAY = failure(DATABASE_AWAY, retryable=True, text="the database does not answer")
WAITS_FOR_DATABASE = "the session waits for the controller's database: the database does not answer"


class Script:
    """Answers questions in order; the last answer repeats."""

    def __init__(self, *answers, queue_s=100.0, place=None):
        self.answers, self.now = list(answers), 0.0
        self.asked, self.left, self.said = [], [], []
        self.turn = Turn(
            REQUEST,
            queue_s,
            self.ask,
            self.leave,
            say=self.said.append,
            clock=lambda: self.now,
            sleep=self.sleep,
            place=place,
        )

    def ask(self, request):
        self.asked.append((request.queue, request.place and request.place.session_id))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def leave(self, request):
        self.left.append((request.session_id, request.token))

    def sleep(self, seconds):
        self.now += seconds


def test_turn_asks_with_its_place_until_session_is_opened():
    script = Script(waits(2), waits(1), OPENED)
    assert script.turn.open() is OPENED and script.now == 2.0
    assert script.asked == [(True, None), (True, "s"), (True, "s")] and not script.left


def test_turn_says_place_reason_and_what_would_fit_when_place_changes():
    full = waits(2, would_fit="5 bytes on each device")
    script = Script(full, full, full, full, waits(1), OPENED)
    script.turn.open()
    assert script.said == [
        "wooly: the session waits for a device, place 2 of 5 in the queue: a is full; now would start: 5 bytes on each device",
        "wooly: the session waits for a device, place 1 of 5 in the queue: a is full",
    ]


def test_turn_of_session_that_waits_briefly_says_nothing():
    script = Script(waits(pause=QUIET_S), OPENED)
    script.turn.open()
    assert not script.said


def test_turn_repeats_its_line_while_place_is_the_same():
    script = Script(waits(pause=REPEAT_S), queue_s=4 * REPEAT_S)
    with pytest.raises(QueueTimeoutError):
        script.turn.open()
    assert len(script.said) == 4


def test_turn_with_queue_of_zero_seconds_is_refused_at_once():
    script = Script(failure("router.no_fit", retryable=True), queue_s=0.0)
    with pytest.raises(ControlError):
        script.turn.open()
    assert script.asked == [(False, None)] and script.now == 0.0


def test_turn_that_waits_too_long_leaves_queue_with_error():
    script = Script(waits(3, pause=7.0), queue_s=10.0)
    with pytest.raises(
        QueueTimeoutError, match=r"within 10 s \(WOOLYAI_QUEUE_S\): .*place 3 of 5.*a is full"
    ) as caught:
        script.turn.open()
    assert script.now == 10.0 and script.left == [("s", "t")] and caught.value.retryable


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_turn_that_is_interrupted_leaves_queue(interrupt):
    script = Script(waits(), waits(), interrupt())
    with pytest.raises(interrupt):
        script.turn.open()
    assert script.left == [("s", "t")]


@pytest.mark.parametrize("passing", [failure("wooly.control"), failure("router.opening", retryable=True)])
def test_turn_of_waiting_session_outlasts_controller_that_does_not_answer(passing):
    script = Script(waits(), passing, OPENED)
    assert script.turn.open() is OPENED
    assert script.asked[1:] == [(True, "s"), (True, "s")]


@pytest.mark.parametrize("place", [None, QueuePlace(session_id="s", token="t")], ids=["new", "recovering"])
def test_turn_of_waiting_session_says_that_its_controller_does_not_answer_for_long(place):
    script = Script(waits(2), failure("wooly.control", text="no router answers"), queue_s=60.0, place=place)
    with pytest.raises(QueueTimeoutError, match=r"the controller, which has not answered for \d+ s: no router answers"):
        script.turn.open()
    told = [line for line in script.said if "controller" in line]
    assert told == [
        f"wooly: the session waits for the controller, which has not answered for {s} s: no router answers"
        for s in (10, 40)
    ]


def test_turn_that_lost_its_place_asks_anew():
    script = Script(waits(), failure("router.place_lost", retryable=True), waits(session="other"), OPENED)
    script.turn.open()
    assert [place for _, place in script.asked] == [None, "s", None, "other"]


def test_turn_of_cancelled_session_ends_with_error():
    script = Script(waits(), failure("router.no_session"))
    with pytest.raises(ControlError):
        script.turn.open()
    assert len(script.asked) == 2


def test_turn_of_new_session_outlasts_controller_that_is_started_again():
    script = Script(*[failure("wooly.control", text="no router")] * 5, OPENED)
    assert script.turn.open() is OPENED and script.now == 5 * RETRY_S
    assert script.said == ["wooly: the session is not open yet: no router"]


@pytest.mark.parametrize("queue_s", [0.0, 100.0])
def test_turn_of_new_session_without_answer_ends_with_error(queue_s):
    script = Script(failure("wooly.control"), queue_s=queue_s)
    with pytest.raises(ControlError):
        script.turn.open()
    assert script.now == (UNANSWERED_S if queue_s else 0.0) and not script.left


def test_turn_that_lost_its_place_is_asked_anew_of_a_controller_that_does_not_answer_for_a_while():
    script = Script(
        *[waits()] * 40, failure("router.place_lost", retryable=True), failure("wooly.control"), waits(), OPENED
    )
    assert script.turn.open() is OPENED


@pytest.mark.parametrize("place", [None, QueuePlace(session_id="s", token="t")])
def test_turn_waits_with_a_line_while_database_is_away(place):
    script = Script(*[AWAY] * 5, OPENED, place=place)
    assert script.turn.open() is OPENED and script.now == 5 * RETRY_S
    assert script.said == [f"wooly: {WAITS_FOR_DATABASE}"]
    assert script.asked == [(True, place and "s")] * 6


def test_turn_of_new_session_says_nothing_while_database_is_away_briefly():
    script = Script(AWAY, OPENED)
    assert script.turn.open() is OPENED and not script.said


def test_turn_of_new_session_repeats_its_line_while_database_is_away():
    script = Script(AWAY, queue_s=QUIET_S + 2 * REPEAT_S + RETRY_S)
    with pytest.raises(QueueTimeoutError):
        script.turn.open()
    assert script.said == [f"wooly: {WAITS_FOR_DATABASE}"] * 3


def test_turn_of_new_session_ends_with_the_cause_if_database_is_away_for_too_long():
    script = Script(AWAY, queue_s=10.0)
    with pytest.raises(QueueTimeoutError) as caught:
        script.turn.open()
    assert str(caught.value) == f"the session was not opened within 10 s (WOOLYAI_QUEUE_S): {WAITS_FOR_DATABASE}"
    assert script.now == 10.0 and caught.value.__cause__ is AWAY and caught.value.retryable and not script.left


def test_turn_with_queue_of_zero_seconds_does_not_wait_for_database():
    script = Script(AWAY, queue_s=0.0)
    with pytest.raises(ControlError, match="the database does not answer"):
        script.turn.open()
    assert len(script.asked) == 1


def test_turn_of_new_session_joins_queue_after_database_is_back():
    script = Script(AWAY, AWAY, AWAY, waits(2), OPENED)
    assert script.turn.open() is OPENED
    assert script.said == [
        f"wooly: {WAITS_FOR_DATABASE}",
        "wooly: the session waits for a device, place 2 of 5 in the queue: a is full",
    ]


def test_turn_of_waiting_session_whose_database_goes_away_says_so():
    script = Script(waits(2), waits(2), AWAY, AWAY, OPENED)
    assert script.turn.open() is OPENED
    assert script.said == [f"wooly: {WAITS_FOR_DATABASE}"]


def test_turn_of_new_session_is_refused_at_once_for_other_passing_reasons():
    script = Script(failure("router.no_executor", retryable=True))
    with pytest.raises(ControlError):
        script.turn.open()
    assert len(script.asked) == 1
