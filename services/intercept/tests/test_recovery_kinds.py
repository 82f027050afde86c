"""Results that the script has read and that another executor repeats: on the same kind they must be equal."""

import struct
import threading
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from wooly.departures import Departures
from wooly.errors import ExecutorLostError
from wooly.hops import Hops
from wooly.link import Link
from wooly.recovery import Recovery, Reopened
from wooly_bus.channel import ChannelClosedError
from wooly_wis.codec import digest, encode_program
from wooly_wis.foreign import Source, encode_source
from wooly_wis.frames import READ_HEAD, Kind, pack_json
from wooly_wis.program import Form, Program

RELEASE = torch.__version__.split("+")[0]
CPU = {"name": "CPU", "runtime": "torch-cpu", "cores": 2, "torch_version": RELEASE}


class Answer:
    """An expected answer, as the channel's."""

    def __init__(self, into=None):
        self.into, self.other, self.done = into, None, False


class Other:
    def __init__(self, kind, payload):
        self.kind, self.payload = kind, payload


class Executor:
    """A channel to an executor that answers each READ with `value`, or with an error if it is None."""

    def __init__(self, value, **device):
        self.value, self.device = value, CPU | device
        self.sent, self.lost, self.window, self.acked = 0, False, 1 << 20, 0
        self.answers, self.expected = deque(), deque()
        self.segment, self.bulk_bytes, self.receiving_s = None, 1 << 20, 0.0

    def look_before_blocking(self, look_ns):
        pass

    def hold(self, frames=1):
        pass

    def share(self, nbytes):
        assert not nbytes

    def place_of(self, into):
        return None

    def await_placed(self):
        if self.lost:
            raise ChannelClosedError("the connection broke")

    def send_hello(self, kind, payload):
        self.send(kind, payload)

    def send_bulk(self, kind, prefix, data):
        return self.send(kind, prefix, data)

    def send(self, kind, *buffers):
        if self.lost:
            raise ChannelClosedError("the connection broke")
        self.sent += 1
        if kind == Kind.HELLO:
            self.answers.append(Other(Kind.WELCOME, pack_json({"device": self.device})))
        elif kind == Kind.READ and self.value is None:
            self.answers.append(Other(Kind.ERROR, pack_json({"message": "it failed", "code": "executor.operation"})))
        elif kind == Kind.READ:
            size = READ_HEAD.unpack(bytes(buffers[0]))[2]
            self.answers.append(Other(Kind.DATA, struct.pack("<f", self.value)[:size]))
        elif kind == Kind.SYNC:
            self.answers.append(Other(Kind.RESULT, b"{}"))
        return self.sent

    def expect(self, into, kind):
        self.expected.append(Answer(into))
        return self.expected[-1]

    def expect_frame(self):
        return self.expect(None, None)

    def complete(self, wanted, timeout=None):
        if self.lost:
            raise ChannelClosedError("the connection broke")
        while not wanted.done:
            at, answer = self.expected.popleft(), self.answers.popleft()
            at.done = True
            if answer.kind == Kind.DATA:
                at.into[:] = answer.payload
            else:
                at.other = answer

    def recv(self, timeout=None):
        return self.answers.popleft()

    def recv_data(self, into, kind):
        answer = self.answers.popleft()
        if answer.kind != kind:
            return answer
        into[:] = answer.payload
        return None

    def poll_acks(self):
        if self.lost:
            raise ChannelClosedError("the connection broke")

    def broken(self):
        return self.lost

    def close(self):
        self.lost = True


class Session:
    """A link whose executor can be lost. `said` and `noted`: what the user and the story were told."""

    def __init__(self, first, *others):
        self.said, self.noted, self.channel = [], [], first
        coming = iter(others)

        def reopen(why, cut, leaves):
            self.channel = next(coming)
            return Reopened(self.channel, "s", "t", "other")

        self.link = Link(first, "s", "t", "first")
        told = {"say": self.said.append, "note": self.noted.append}
        self.link.recovery = Recovery(reopen, lambda cut, why: None, every_s=1000.0, **told)

    def read(self):
        into = bytearray(4)
        self.link.read(8, 0, memoryview(into))
        return struct.unpack("<f", into)[0]

    def lose(self):
        self.channel.lost = True

    @property
    def differences(self):
        return [line for line in self.said if "differ" in line]


OTHER_KINDS = [{"name": "GPU"}, {"runtime": "opencl"}, {"cores": 4}]


@pytest.mark.parametrize("device", OTHER_KINDS)
def test_a_result_that_differs_on_another_kind_is_told_once_and_the_session_goes_on(device):
    session = Session(Executor(1.0), Executor(2.0, **device))
    assert [session.read(), session.read()] == [1.0, 1.0]
    session.lose()
    assert session.read() == 2.0
    assert len(session.differences) == len(session.noted) == 1
    assert "CPU (torch-cpu, 2 cores" in session.noted[0] and "the session goes on" in session.differences[0]


def test_a_result_that_differs_on_the_same_kind_ends_the_session():
    session = Session(Executor(1.0), Executor(2.0))
    session.read()
    session.lose()
    with pytest.raises(ExecutorLostError, match=r"both executors are CPU .*does not repeat"):
        session.read()
    assert not session.noted


def test_equal_results_of_another_kind_are_not_told():
    session = Session(Executor(1.0), Executor(1.0, runtime="opencl"))
    session.read()
    session.lose()
    assert session.read() == 1.0
    assert not session.differences and not session.noted


def test_results_are_compared_with_the_kind_that_gave_them():
    """The first answer is of the first kind, the second of the other, to which the session returns."""
    session = Session(Executor(1.0), Executor(2.0, runtime="opencl"), Executor(2.5, runtime="opencl"))
    session.read()
    session.lose()
    assert session.read() == 2.0
    session.lose()
    with pytest.raises(ExecutorLostError, match=r"both executors are CPU \(opencl"):
        session.read()


def test_a_session_that_returns_to_its_first_kind_goes_on():
    session = Session(Executor(1.0), Executor(2.0, runtime="opencl"), Executor(1.0))
    session.read()
    session.lose()
    assert session.read() == 2.0
    session.lose()
    assert session.read() == 1.0
    assert len(session.differences) == 2  # the answer of the other kind differs as well
    assert session.link.device["runtime"] == "torch-cpu"


def test_an_operation_that_fails_only_on_another_kind_ends_the_session():
    session = Session(Executor(1.0), Executor(None, runtime="opencl"))
    session.read()
    session.lose()
    with pytest.raises(ExecutorLostError, match=r"an operation fails on CPU \(opencl"):
        session.read()
    assert not session.noted


def test_a_kernel_with_hidden_state_ends_recovery_and_is_named():
    session = Session(Executor(1.0))
    session.link.recovery._always = True
    text = ".global .u32 counter;\n.visible .entry count(.param .u64 out) { ret; }\n"
    raw = encode_source(Source("ptx", text))
    session.link.source(digest(raw), raw)
    assert session.link.recovery is None
    (said,) = session.said
    assert "cannot go on in another executor any more" in said and "kernel count has the variable counter" in said
    departures = Departures([(session.link, threading.RLock())])
    assert not departures.recovers
    assert "kernel count has the variable counter" in departures.take_stays() == departures.take_stays()
    session.lose()
    with pytest.raises(ExecutorLostError):
        session.read()


def calls(name):
    """A program that calls an operator of the device library."""
    return encode_program(Program((Form("extern", (), (), (("args", ()), ("kwargs", ()), ("name", name))),), ()))


LIBRARIES = {"native": {"operators": {"native.count.default": "", "native.other.default": ""}}}


def with_library(stateful, **more):
    return Executor(1.0, libraries={"native": LIBRARIES["native"] | {"stateful": stateful}}, **more)


def test_native_code_that_may_keep_values_ends_recovery_and_is_named_once():
    session = Session(with_library(["native.count.default"]))
    session.link.recovery._always = True
    session.link.define(calls("native.other.default"))
    assert not session.said
    session.link.define(calls("native.count.default"))
    session.link.define(calls("native.count.default"))
    assert session.link.recovery is None
    (said,) = session.said
    assert "the operator native.count.default is native code of native" in said
    assert "WOOLY_EXECUTOR_STATELESS_LIBRARIES" in said
    assert Departures([(session.link, threading.RLock())]).take_stays() in said


@pytest.mark.parametrize("libraries", [{}, LIBRARIES, {"native": LIBRARIES["native"] | {"stateful": []}}])
def test_native_code_that_keeps_nothing_does_not_end_recovery(libraries):
    """Executors of an earlier release do not say which operators may keep values."""
    session = Session(Executor(1.0, libraries=libraries), Executor(1.0))
    session.link.define(calls("native.count.default"))
    session.lose()
    assert session.read() == 1.0


def test_answer_of_another_executor_that_came_during_recovery_is_no_bound_of_the_round_trip():
    """Such an answer is there at once. A distant executor would count as a near one from then on."""

    class Dies(Executor):
        def send(self, kind, *buffers):
            sent = super().send(kind, *buffers)
            self.lost = kind == Kind.READ
            return sent

    session = Session(Dies(1.0), Executor(1.0))
    asked, greeting, greeted, again = 0.0, 1.0, 1.08, 2.0
    times = iter([asked, greeting, greeted, again, again])
    session.link.waits.clock = lambda: next(times)
    assert session.read() == 1.0
    assert session.link.waits.trip_s == pytest.approx(0.08) and not list(times)


def test_a_lost_executor_is_replaced_before_recovery_ends():
    session = Session(Executor(1.0), Executor(1.0))
    session.lose()
    session.link.stay("a reason")
    assert session.read() == 1.0 and session.link.recovery is None


def test_a_session_that_hibernates_wakes_before_recovery_ends():
    session = Session(Executor(1.0), Executor(1.0))
    session.link.continuation.hibernate("idle")
    session.link.stay("a reason")
    assert session.read() == 1.0 and session.link.recovery is None


def test_reads_after_recovery_ended_do_not_take_the_answer_to_a_read_before():
    session = Session(Executor(1.0))
    early = bytearray(4)
    session.link.fetch(8, 0, memoryview(early), early)
    session.link.stay("its checkpoints are stored too slowly")
    session.channel.value = 2.0
    assert session.read() == 2.0
    assert struct.unpack("<f", early)[0] == 1.0


def test_copies_pass_the_client_only_while_the_session_can_go_on_elsewhere():
    """The session ends with its executors as soon as one of its devices cannot go on."""
    first, second = Session(Executor(1.0)), Session(Executor(1.0))
    departures = Departures([(session.link, threading.RLock()) for session in (first, second)])
    hops = Hops(None, SimpleNamespace(departures=departures))
    assert not hops.usable
    first.link.stay("a reason")
    assert hops.usable and second.link.recovery is not None
    assert Hops(None, SimpleNamespace(departures=None)).usable
