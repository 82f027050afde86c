"""Tests of when the executor collects garbage, and that sessions leave no reference cycles."""

import gc
import time
import weakref

import pytest
from wooly_executor import collector
from wooly_executor.collector import IDLE_S, LONG_IDLE_S, MAX_INTERVAL_S, Collector
from wooly_wis.frames import Kind, pack_run


class Interpreter:
    """A fake `gc` that records calls in order."""

    def __init__(self):
        self.done = []

    def get_threshold(self):
        return 700, 10, 10

    def set_threshold(self, *thresholds):
        self.done.append(thresholds)

    def __getattr__(self, name):
        return lambda: self.done.append(name)

    def taken(self):
        done, self.done = self.done, []
        return done


@pytest.fixture
def interpreter(monkeypatch):
    found = Interpreter()
    monkeypatch.setattr(collector, "gc", found)
    return found


@pytest.fixture
def now():
    return [100.0]


@pytest.fixture
def started(interpreter, now):
    found = Collector(lambda: now[0])
    found.begin()
    thresholds, *looked = interpreter.taken()
    assert thresholds[:2] == (700, 10) and thresholds[2] > 10**6
    assert looked == ["collect", "freeze"]
    return found


def test_collector_after_work_collects_once_when_idle(started, interpreter, now):
    assert started.timeout() is None
    started.worked()
    assert started.timeout() == IDLE_S
    now[0] += IDLE_S / 2
    started.rest(alone=False)
    assert interpreter.taken() == [] and started.timeout() == IDLE_S / 2
    now[0] += IDLE_S / 2
    started.rest(alone=True)
    assert interpreter.taken() == ["collect", "freeze"] and started.timeout() == LONG_IDLE_S - IDLE_S
    now[0] += LONG_IDLE_S
    started.rest(alone=False)
    assert interpreter.taken() == [] and started.timeout() is None


def test_collector_long_idle_without_sessions_collects_everything(started, interpreter, now):
    started.worked()
    now[0] += IDLE_S
    started.rest(alone=True)
    interpreter.taken()
    now[0] += LONG_IDLE_S
    started.rest(alone=True)
    assert interpreter.taken() == ["unfreeze", "collect", "freeze"] and started.timeout() is None
    now[0] += LONG_IDLE_S
    started.rest(alone=True)
    assert interpreter.taken() == []


def test_collector_gives_memory_back_once_after_a_long_idle_time_also_if_sessions_are_open(interpreter, now):
    given = []
    found = Collector(lambda: now[0], lambda: given.append(now[0]))
    found.begin()
    found.worked()
    for seconds in (IDLE_S, LONG_IDLE_S, LONG_IDLE_S):
        now[0] += seconds
        found.rest(alone=False)
    assert given == [100.0 + IDLE_S + LONG_IDLE_S]


def test_collector_never_idle_collects_after_a_maximum_time(started, interpreter, now):
    begun = now[0]
    while now[0] < begun + MAX_INTERVAL_S - 1:
        now[0] += 0.5
        started.worked()
    assert interpreter.taken() == []
    now[0] += 1
    started.worked()
    now[0] += 1
    started.worked()
    assert interpreter.taken() == ["collect", "freeze"]


@pytest.mark.parametrize(
    "how", ["executor", "client", "vanished", "spoilt", "refused", "failed", "decoding", "running"]
)
def test_session_closed_leaves_no_reference_cycle(device, wis, how):
    """Collections freeze the objects of open sessions, so a session's objects must be freed by reference counts."""
    client = device.open("a")
    client.make(1, 1.0, 2.0)
    assert client.floats(1, 2) == [1, 2]
    session = device.loop.sessions["a"]
    left = [weakref.ref(session), weakref.ref(session.conn)]
    del session
    gc.collect()
    gc.disable()
    try:
        if how == "executor":
            device.call(lambda: device.loop.sessions.close("a", "the test"))
        elif how == "client":
            client.channel.send(Kind.CLOSE)
        elif how == "vanished":
            client.channel.abort()
        elif how == "spoilt":
            client.channel.send(99, b"what is this")
        elif how in ("refused", "failed"):
            if how == "refused":
                client.channel.send(Kind.DEFINE, b"no program")
            else:
                client.channel.send(Kind.RUN, pack_run(b"d" * 32, [1], b"", []))
            with pytest.raises(wis.error):
                client.read(1, 8)
            client.channel.send(Kind.CLOSE)
        else:
            client.channel.send(Kind.DEFINE, b"no program" * 20_000)
            if how == "running":
                client.run(wis.body().alloc("x", 8), {"x": 2})
            client.channel.abort()
        device.wait_closed("a")
        until = time.monotonic() + 10
        while any(r() is not None for r in left) and time.monotonic() < until:  # earlier calls release their frames
            device.call(lambda: None)
            time.sleep(0.01)
        assert [r() for r in left] == [None] * len(left)
    finally:
        gc.enable()
