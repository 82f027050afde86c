"""A session that leaves its executor: at a cut, to another executor or to none, and what happens if that does not work."""

import struct
import threading
import time

import pytest
from wooly import continuation
from wooly import link as links
from wooly.control import ControlError
from wooly.departures import STAYS, Departures
from wooly.link import Link
from wooly.recovery import Recovery, Reopened
from wooly_wis.codec import digest
from wooly_wis.frames import CUT_HEAD, Kind, pack_json
from wooly_wis.messages import RenewSessionReply

from services.intercept.tests.test_recovery_kinds import Executor, Other

WAIT_S = 30.0


class Storing(Executor):
    """An executor that takes cuts, and stores them unless `refuses` says why not."""

    def __init__(self, value=1.0, refuses=""):
        super().__init__(value)
        self.refuses, self.kinds, self.stored = refuses, [], 0

    def send(self, kind, *buffers):
        sent = super().send(kind, *buffers)
        self.kinds.append(kind)
        if kind == Kind.CUT:
            number, _, _ = CUT_HEAD.unpack(buffers[0])
            self.stored = self.stored if self.refuses else number or self.stored
            answer = {"taken": self.stored, "stored": self.stored, "held": 0, "pause_ns": 0, "store_ns": 0}
            self.answers.append(Other(Kind.RESULT, pack_json(answer | {"error": self.refuses})))
        elif kind == Kind.RESTORE:
            self.answers.append(Other(Kind.RESULT, b"{}"))
        return sent

    def poll_acks(self):
        while self.expected and self.answers:
            self.complete(self.expected[0])


class Session:
    """A link with a recovery. `outcomes`: for each attempt to open it elsewhere, an executor or an error."""

    def __init__(self, first, *outcomes):
        self.said, self.asked, self.hibernations, self.outcomes = [], [], [], list(outcomes)
        self.link = Link(first, "s", "t", "first")
        self.link.recovery = Recovery(
            self.reopen, lambda cut, why: self.hibernations.append((cut, why)), every_s=1000.0, say=self.said.append
        )
        self.departures = Departures([(self.link, threading.RLock())])

    def reopen(self, why, cut, leaves):
        self.asked.append((why, cut))
        self.left = leaves
        found = self.outcomes.pop(0)
        if isinstance(found, Exception):
            raise found
        return Reopened(found, "s", "t", "other")

    def work(self):
        self.link.define(b"a program")
        self.link.run(digest(b"a program"), [], b"", [], [], [])

    def read(self):
        into = bytearray(4)
        self.link.read(8, 0, memoryview(into))
        return struct.unpack("<f", into)[0]

    def heed(self, wish, **more):
        """Do what the controller asks for, and wait until it is done."""
        self.departures.heed(RenewSessionReply(lease_s=9.0, wish=wish, reason="on request", **more))
        until = time.monotonic() + WAIT_S
        while self.departures._busy.locked():
            assert time.monotonic() < until
            time.sleep(0.005)


def refused(code="router.no_fit"):
    error = ControlError("no room")
    error.code = code
    return error


def test_a_move_sends_nothing_again():
    first, second = Storing(1.0), Storing(2.0)
    session = Session(first, second)
    session.work()
    assert session.read() == 1.0
    session.heed("move")
    assert session.asked == [("on request", session.link.recovery.stored)] and session.link.recovery.stored
    assert session.left
    assert first.lost and Kind.RESTORE in second.kinds
    assert not {Kind.RUN, Kind.READ} & set(second.kinds)
    assert session.read() == 2.0
    assert session.departures.resumed.frames == 0 and session.departures.resumed is not None, (
        "the router did not hear it"
    )
    session.departures.told_resumed()
    assert session.departures.resumed is None


def test_a_session_without_room_elsewhere_stays():
    first = Storing(1.0)
    session = Session(first, refused(STAYS))
    session.work()
    session.heed("move")
    assert (session.departures.asked, session.departures.stays) == ("on request", "no room")
    assert session.read() == 1.0 and not first.lost


def test_a_move_without_a_checkpoint_sends_the_kept_frames_again():
    first, second = Storing(1.0, refuses="the disk is full"), Storing(1.0)
    session = Session(first, second)
    session.work()
    session.read()
    session.heed("move")
    assert session.asked == [("on request", 0)]
    assert [kind for kind in second.kinds if kind in (Kind.RUN, Kind.READ, Kind.RESTORE)] == [Kind.RUN, Kind.READ]


def test_a_session_without_a_checkpoint_does_not_hibernate():
    first = Storing(1.0, refuses="the disk is full")
    session = Session(first)
    session.work()
    session.heed("hibernate")
    assert session.departures.stays == "the disk is full" and not session.hibernations
    assert session.read() == 1.0


def test_a_hibernated_session_wakes_at_its_next_operation():
    session = Session(Storing(1.0), second := Storing(2.0))
    session.work()
    session.heed("hibernate")
    assert session.hibernations == [(1, "on request")] and session.asked == []
    assert session.link.poll()
    session.heed("hibernate")  # it does already
    assert session.read() == 2.0
    assert session.asked == [("its script goes on", 1)] and Kind.RUN not in second.kinds


def test_a_hibernated_session_that_finds_no_executor_asks_again_after_a_while(monkeypatch):
    session = Session(Storing(1.0), refused(), refused(), Storing(2.0))
    session.work()
    session.heed("hibernate")
    for _ in range(10):
        with pytest.raises(ControlError, match="no room"):
            session.read()
    assert len(session.asked) == 1 and session.link.recovery.hibernates
    monkeypatch.setattr(continuation, "WAKE_AGAIN_S", 0.0)
    session.link.continuation._not_woken = None
    with pytest.raises(ControlError, match="no room"):
        session.read()
    session.heed("wake")
    assert session.read() == 2.0 and len(session.asked) == 3


def test_the_router_ends_a_hibernated_session():
    session = Session(Storing(1.0), refused("router.no_session"))
    session.work()
    session.heed("hibernate")
    session.link.fail("it was cancelled")
    with pytest.raises(links.ExecutorLostError):
        session.link.continuation.go_on()
    with pytest.raises(links.ExecutorLostError):
        session.read()


def test_a_session_hibernates_when_it_was_idle_for_long():
    session = Session(Storing(1.0))
    session.work()
    session.heed(None, hibernate_after_s=0.01)
    time.sleep(0.02)
    assert not session.hibernations
    session.heed(None, hibernate_after_s=0.01)
    assert [cut for cut, _ in session.hibernations] == [1]


@pytest.mark.parametrize("known", [True, False])
def test_end_of_a_session_that_no_router_knows_is_read_before_the_connection_breaks(known):
    """A connection that is closed while answers are unread is reset, and the executor would lose the last frame."""
    first, done = Storing(), []
    first.await_end = lambda timeout: done.append(timeout)
    first.close = lambda: done.append("closed")
    link = Session(first).link
    link.say_end("it failed")
    assert first.kinds[-1] == Kind.CLOSE and done == []
    link.hang_up(known=known)
    assert done == (["closed"] if known else [links.CLOSE_S, "closed"])
