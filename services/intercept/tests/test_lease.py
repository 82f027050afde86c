"""The thread that renews a session's lease: it waits only for the router, and reports every unexpected end."""

import threading
import time
from types import SimpleNamespace

import pytest
from wooly import control, opening
from wooly.control import RENEWALS_PER_LEASE, RETRY_DIVISOR, ControlError, OpenedSession
from wooly.departures import Departures
from wooly.errors import NotConnectedError
from wooly_bus import contracts
from wooly_wis.messages import ClientFacts, OpenSessionRequest

LEASE_S = 0.6
WAIT_S = 30.0


class Controller:
    """A controller that calls `answer` for each renewal, and records the time of each renewal."""

    ephemeral, reach, access = False, {}, None

    def __init__(self, answer=lambda: None):
        self.answer, self.asked, self.changed = answer, [], threading.Condition()
        self.notes, self.resumed = [], []

    def ask(self, rpc, message, timeout=4.0):
        if rpc != contracts.ROUTER_SESSION_RENEW:
            return
        with self.changed:
            self.asked.append(time.monotonic())
            self.changed.notify_all()
        self.answer()
        self.notes += filter(None, [message.note])
        self.resumed += filter(None, [message.resumed])

    def wait_asked(self, count):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.asked) >= count, WAIT_S)

    def close(self):
        pass


class Trace:
    trace_id = "1"

    def __init__(self, send=lambda *_: None):
        self.send = send

    def end(self):
        pass

    def flush(self):
        pass

    def current(self):
        return threading.Lock()


@pytest.fixture
def opened():
    sessions = []

    def make(controller, trace=None, *, recovers=False):
        reply = SimpleNamespace(
            session_id="s",
            token="t",
            parts=(),
            lease_s=LEASE_S,
            trace_id="1" if trace else "",
            credentials="",
            recovery="auto",
        )
        sessions.append(OpenedSession(controller, reply, trace or Trace(), SimpleNamespace(recovers=recovers)))
        return sessions[-1]

    yield make
    for session in sessions:
        session.close()


def test_renewals_continue_while_sending_spans_blocks(opened):
    released, controller = threading.Event(), Controller()
    sending = []
    opened(controller, Trace(lambda *_: (sending.append(1), released.wait(WAIT_S))))
    controller.wait_asked(4)
    assert sending == [1]  # no second thread was started
    released.set()


def test_failed_renewal_is_retried_early(opened, monkeypatch):
    pauses = []

    class Event(threading.Event):
        def wait(self, timeout=None):
            pauses.append(timeout)
            return super().wait(timeout)

    monkeypatch.setattr(control, "threading", SimpleNamespace(Event=Event, Lock=threading.Lock))
    left = [ControlError("no answer")] * 2

    def answer():
        if left:
            raise left.pop()

    controller = Controller(answer)
    opened(controller)
    controller.wait_asked(3)
    assert pauses[0] == LEASE_S / RENEWALS_PER_LEASE and all(
        0 < pause <= LEASE_S / RETRY_DIVISOR for pause in pauses[1:3]
    )


def test_renewals_that_fail_for_the_same_reason_are_told_once_until_one_succeeds(opened, caplog):
    answers = ["no router"] * 4 + ["no NATS"] * 2 + [""] + ["no NATS"] * 3

    def answer():
        if text := answers.pop(0) if answers else "":
            raise ControlError(text)

    controller = Controller(answer)
    opened(controller)
    controller.wait_asked(11)
    told = [r.getMessage().rpartition(": ")[2] for r in caplog.records]
    assert told == ["no router", "no NATS", "no NATS"]


def test_renewals_that_fail_while_the_session_is_closed_are_not_told(opened, caplog):
    failed = []

    def refuse():
        failed.append(1)
        raise ControlError("the executor says that the session is not open")

    controller = Controller()
    session, told = opened(controller), []
    session.when_lost(told.append)
    session.expect_end()
    controller.answer = refuse
    controller.wait_asked(len(controller.asked) + 2)
    assert failed and not told and not caplog.records


def test_loss_of_session_before_anybody_listens_is_told_to_the_listener(opened):
    def refuse():
        error = ControlError("gone")
        error.code = "router.no_session"
        raise error

    session, told = opened(Controller(refuse)), []
    session._thread.join(WAIT_S)
    session.when_lost(told.append)
    assert told == ["gone"]


def test_unexpected_error_in_lease_thread_ends_session(opened):
    told, heard = [], threading.Event()

    def fail():
        raise KeyError("left")

    session = opened(Controller(fail))
    session.when_lost(lambda why: (told.append(why), heard.set()))
    assert heard.wait(WAIT_S)
    assert told == ["the thread that renews the session's lease failed: KeyError: 'left'"]


@pytest.mark.parametrize("retryable", [True, False])
def test_close_tells_a_note_that_no_renewal_has_told(opened, retryable):
    asked, here = [], threading.current_thread()

    def answer():
        """Refuse all renewals of the thread that renews, and two of this thread: of `note`, and the first one of `close`."""
        if threading.current_thread() is here:
            asked.append(1)
            if len(asked) > 2:
                return
        error = ControlError("the lease is being renewed already")
        error.code, error.retryable = "router.renewing", retryable
        raise error

    controller = Controller()
    session = opened(controller)
    controller.answer = answer
    session.note("results differ")
    assert controller.notes == []
    session.close()
    assert controller.notes == (["results differ"] if retryable else [])


@pytest.mark.parametrize("when", ["renewal", "close"])
def test_how_session_went_on_is_told_once_although_a_renewal_fails(opened, when):
    """A failed renewal used to lose it, and so did a script that ended before its next renewal."""
    recovery = SimpleNamespace(resumed=(2.5, 3), hibernates=False, together=None)
    controller, failed = Controller(), threading.Event()

    def answer():
        if when == "close" or not failed.is_set():
            failed.set()
            error = ControlError("no answer" if when == "close" else "the lease is being renewed already")
            error.retryable = True
            raise error

    controller.answer = answer
    session = opened(controller)
    departures = Departures([(SimpleNamespace(recovery=recovery, stays=""), threading.Lock())])
    departures.heed = lambda reply: None
    session.departures = departures
    assert failed.wait(WAIT_S)
    if when == "renewal":
        controller.wait_asked(4)
    controller.answer = lambda: None
    session.close()
    assert [(told.seconds, told.frames) for told in controller.resumed] == [(2.5, 3)] and recovery.resumed is None


@pytest.mark.parametrize("lost", ["before", "after"])
def test_session_whose_script_has_ended_does_not_wait_for_another_executor(opened, lost):
    """Its process used to end only after WOOLYAI_QUEUE_S, an hour, if no controller answered."""
    asked = threading.Event()

    def refuse(rpc, message, timeout=4.0):
        if rpc == contracts.ROUTER_SESSION_OPEN:
            asked.set()
        raise ControlError("no controller answers")

    session, told = opened(Controller()), []
    session._queue_s = 3600.0
    session._request = OpenSessionRequest(client=ClientFacts(host="h", pid=1))
    session._controller = SimpleNamespace(ask=refuse, close=lambda: None)

    def recover():
        with pytest.raises(ControlError) as e:
            session.recover("the executor is stopping", 0, leaves=False)
        told.append(str(e.value))

    if lost == "after":
        session.stop_recovering()
    recovering = threading.Thread(target=recover, daemon=True)
    recovering.start()
    if lost == "before":
        assert asked.wait(WAIT_S)
        session.stop_recovering()
    recovering.join(WAIT_S)
    assert told == ["its script has ended, so the session does not go on in another executor"]


def error(code, *, retryable=False):
    failure = ControlError("not now")
    failure.code, failure.retryable = code or failure.code, retryable
    return failure


@pytest.mark.parametrize(
    ("answers", "over"),
    [
        (["", "router.renewing", "router.no_session"], True),
        (["", "router.executor_lost"], True),
        (["", "router.database", None], False),
        (["router.forbidden"], False),
        ([""] * 50, False),
    ],
)
def test_session_is_over_if_the_router_says_so_and_it_is_asked_until_it_answers(opened, monkeypatch, answers, over):
    monkeypatch.setattr(control, "OVER_S", 0.3)
    monkeypatch.setattr(control, "OVER_AGAIN_S", 0.01)
    left, controller = list(answers), Controller()
    session = opened(controller)
    controller.wait_asked(1)
    session.expect_end()

    def answer():
        if threading.current_thread() is threading.main_thread() and left:
            code = left.pop(0)
            if code is not None:
                raise error(code, retryable=code in ("router.renewing", "router.database"))

    controller.answer = answer
    begun = time.monotonic()
    assert session.is_over() == over
    assert not left or (time.monotonic() - begun >= 0.3 and len(left) < 50)


@pytest.mark.parametrize("answers", [True, False])
def test_another_session_is_asked_for_until_the_controller_answers_again(monkeypatch, answers):
    """The first session ended before its client connected to it. A controller that never answered is not waited for."""
    monkeypatch.setattr(opening, "OUTLAST_S", WAIT_S if answers else 0.1)
    monkeypatch.setattr(opening, "AGAIN_S", 0.01)
    lost = SimpleNamespace(ephemeral=False, is_over=lambda: True, close=lambda: None)
    left = [error(""), error(""), lost, error(""), error(""), "found"]

    def ask(*_):
        found = left.pop(0) if len(left) > 1 or answers else error("")
        if isinstance(found, ControlError):
            raise found
        return found

    def use(opened, recoveries):
        if opened is lost:
            raise NotConnectedError("the session is not open here")

    monkeypatch.setattr(opening, "_ask_for", ask)
    monkeypatch.setattr(opening, "_recoveries", lambda *_: (None, []))
    for _ in range(2):
        with pytest.raises(ControlError):
            opening.open_and_use(None, "", None, use, None)
    if answers:
        assert opening.open_and_use(None, "", None, use, None) == "found"
    else:
        with pytest.raises(ControlError):
            opening.open_and_use(None, "", None, use, None)


@pytest.mark.parametrize("answers", [True, False])
def test_close_says_whether_the_controller_knows_the_end(opened, answers):
    class Away(Controller):
        def ask(self, rpc, message, timeout=4.0):
            if rpc == contracts.ROUTER_SESSION_CLOSE and not answers:
                raise ControlError("no answer")

    session = opened(Away())
    assert session.close() == answers
