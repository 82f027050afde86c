"""Tests of an unexpected error in the device's thread: clients get the reason, memory is freed, and no call blocks for ever."""

import threading

import pytest
from wooly_bus.channel import ChannelClosedError
from wooly_executor.errors import LoopEndedError
from wooly_wis.dtypes import DType
from wooly_wis.frames import Kind


def wait_for_a_run(wis, client):
    """Submit work, and wait for an answer that comes after the work."""
    client.run(wis.body().alloc("x", 8).fill("x", wis.at(DType.F32, 2), 0.0), {"x": 1})
    client.channel.send(Kind.SYNC)


def broken(device, error, meanwhile):
    """Make the device's thread raise before the frames that clients submit `meanwhile`. Returns the reports in order."""
    device.may_end = True

    def fail():
        raise error

    held, asked = threading.Event(), threading.Event()
    device.loop.call(lambda: (held.set(), asked.wait(), setattr(device.loop, "_run_calls", fail)))
    held.wait(30)
    meanwhile()
    asked.set()
    return device.told


@pytest.mark.parametrize("error", [KeyError("left"), SystemExit(0)], ids=["exception", "exit"])
def test_loop_failed_tells_clients_and_callers(device, wis, error):
    a, b = device.open("a"), device.open("b")
    told = broken(device, error, lambda: wait_for_a_run(wis, a))
    with pytest.raises(wis.error, match=f"the executor failed: {type(error).__name__}") as caught:
        a.answer()
    assert caught.value.code == "executor.ended"
    device.wait_closed("a")
    device.wait_closed("b")
    with pytest.raises(ChannelClosedError):
        b.sync()
    device.thread.join(30)
    assert told == [error, f"ended: {device.loop.lost}"] and device.loop.lost.startswith("the executor failed")
    with pytest.raises(LoopEndedError, match="the executor failed"):
        device.loop.call(device.loop.sessions.all).result(5)


def test_loop_failing_twice_still_tells_the_other_clients(device, wis):
    a, b = device.open("a"), device.open("b")
    tell = device.loop._report_loss

    def fail_for_a(session, code):
        if session.id == "a":
            raise MemoryError
        tell(session, code)

    device.loop._report_loss = fail_for_a
    told = broken(device, KeyError("left"), lambda: [wait_for_a_run(wis, client) for client in (a, b)])
    with pytest.raises(wis.error, match="the executor failed"):
        b.answer()
    with pytest.raises(ChannelClosedError):
        a.answer()
    device.thread.join(30)
    assert told[-1] == f"ended: {device.loop.lost}" and set(device.closed) == {"a", "b"}


def test_loop_stopped_refuses_calls_at_once(device):
    device.may_end = True
    device.loop.stop()
    device.thread.join(30)
    with pytest.raises(LoopEndedError, match="stopping"):
        device.loop.call(device.loop.sessions.all).result(5)
