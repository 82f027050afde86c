"""Tests of limits: how much memory a client may use in the executor, and for how long it may keep the executor busy."""

import itertools
import threading

import pytest
from wooly_bus.channel import Endpoint
from wooly_executor.flow import core
from wooly_executor.host_account import HostLimits
from wooly_testkit import forks
from wooly_testkit.executor import executor_process
from wooly_wis.dtypes import DType
from wooly_wis.frames import MAX_CHUNK

HUGE = 32 << 20


def program_of(wis, size, number):
    """A program with a definition of about `size` bytes."""
    return wis.body().alloc("x", number + 1).call("aten.neg.default", args=("x" * size, number))


def test_definitions_above_the_limit_forget_the_least_recently_used(make_device, wis):
    device = make_device(limits=HostLimits(definitions=60_000, programs=100_000))
    clients = [device.open(name) for name in "abc"]
    names = []
    for i, client in enumerate(clients):
        for number in range(20):
            names.append(client.define(program_of(wis, 90, 20 * i + number)))
        assert client.sync() == {}
    held = device.call(lambda: [(len(s.programs), s.programs.held) for s in device.loop.sessions.all()])
    assert all(2 <= n < 20 and size <= 60_000 for n, size in held)
    store = device.loop.store
    assert store._idle_held <= 100_000 and store._forms_held <= 50_000
    assert store.held == sum(size for _, size in held)
    assert len(store._ready) == len(store._idle) + sum(n for n, _ in held)
    clients[0].start(names[0], [1])
    with pytest.raises(
        wis.error, match=r"or the executor has forgotten it: .* 60000 bytes of host memory .WOOLY_EXECUTOR_DEFINITIONS"
    ):
        clients[0].sync()
    for client in clients:
        client.close()
    for name in "abc":
        device.wait_closed(name)
    assert store.held == 0 and device.call(lambda: store._idle_held) <= 100_000


def test_session_alone_with_many_definitions_still_lets_new_clients_in(device, wis):
    a = device.open("a")
    a.sync()
    (session,) = device.call(lambda: device.loop.sessions.all())
    counts, gate, calls = [0], threading.Event(), device.loop._run_calls

    def noted():
        counts.append(len(session.programs))
        calls()

    device.loop._run_calls = noted
    held = device.loop.call(gate.wait)
    for number in range(500):
        a.define(program_of(wis, 90, number))
    gate.set()
    assert a.sync() == {} and held.result(10)
    device.call(lambda: None)
    assert counts[-1] == 500 and max(after - before for before, after in itertools.pairwise(counts)) <= core.TURN


def test_program_defined_twice_counts_once(device, wis):
    a = device.open("a")
    for _ in range(3):
        a.define(program_of(wis, 1000, 0))
    a.sync()
    assert device.call(lambda: device.loop.sessions.all()[0].programs.nbytes) == len(program_of(wis, 1000, 0).raw)


@pytest.mark.parametrize("count", [65537, 100_000])
def test_program_with_too_many_instructions_is_refused(device, wis, count):
    body = wis.body().alloc("x", 1)
    body.fill("x", wis.at(DType.U8, 1), 0)
    body.body += body.body[-1:] * (count - 2)
    a = device.open("a")
    a.define(body)
    with pytest.raises(wis.error, match=r"(limit is|more than) 65536") as caught:
        a.sync()
    assert caught.value.code in ("wis.decode", "wis.verify") and not device.loop.store._ready


def test_allocations_above_the_capacity_are_refused_alone_and_together(make_device, wis):
    device = make_device(memory=1 << 20)
    a = device.open("a")
    for i in range(4):
        a.run(wis.body().alloc("x", 400_000), {"x": i})
    with pytest.raises(wis.error, match="out of memory"):
        a.sync()
    body = wis.body()
    for name in "xyz":
        body.alloc(name, 400_000)
    a.run(body, dict(zip("xyz", (10, 11, 12), strict=True)), frees=[0, 1])
    with pytest.raises(wis.error, match="out of memory"):
        a.sync()
    a.run(wis.body(), {}, frees=[2, 3, 10, 11, 12])
    assert a.sync() == {} and device.held() == {"a": (0, 0)}


def test_operator_needing_too_much_host_memory_fails_alone(wis):
    """The result has 4 bytes, but the library makes an intermediate copy of 4 GiB."""
    limited = {"WOOLY_EXECUTOR_HOST_MEMORY": str(2 << 30), "WOOLY_EXECUTOR_MAX_ELEMENTS": str(10**13)}
    with executor_process(environment=limited, start=forks.Forked) as running:
        client = wis.client(Endpoint.parse(running.endpoints[0]), running.session_id, running.token)
        assert client.welcome["device"]["total_memory"] == (2 << 30) - (2 << 27)
        client.make(1, 1.0)
        wide, one = wis.at(DType.F32, 1 << 20, 1 << 10, strides=(0, 0)), wis.at(DType.F32)
        body = wis.body().alloc("y", 4).call("aten.median.default", ("in", "x", wide), ("out", "y", one))
        client.run(body, {"x": 1, "y": 2})
        with pytest.raises(wis.error, match=r"out of memory. Tried to allocate 4096.00 MiB") as caught:
            client.sync()
        assert caught.value.code == "executor.out_of_memory"
        client.run(wis.body().alloc("y", 4).fill("y", one, 3.0), {"y": 3})
        assert client.floats(3, 1) == [3.0]
        client.channel.close()


def test_out_argument_needing_a_resize_is_refused(device, wis):
    a = device.open("a")
    a.make(1, *range(64))
    small, large = wis.at(DType.F32, 1), wis.at(DType.F32, 64)
    operands = ("in", "x", large), ("inout", "y", small)
    body = wis.body().call("aten.neg.out", *operands, args=(wis.ref(0),), kwargs=(("out", wis.ref(1)),))
    a.run(wis.body().alloc("y", 4).fill("y", small, 1.0), {"y": 2})
    a.run(body, {"x": 1, "y": 2})
    with pytest.raises(wis.error, match=r"but out= has \[1\]|was resized"):
        a.sync()
    with pytest.raises(wis.error):
        a.read(2, 4)
    assert a.floats(1, 64) == list(range(64))


def test_result_smaller_than_announced_is_refused(device, wis):
    """The same program announces its result's size correctly at first, then wrongly."""
    a = device.open("a")
    a.make(1, 1, 2, 3, 4)
    a.make(2, 0, 0, 0, 4)
    full = wis.at(DType.I64, 4, 1, strides=(1, 4))
    body = wis.body().alloc("i", 32).call("aten.nonzero.default", ("in", "x", wis.at(DType.F32, 4)), ("out", "i", full))
    a.run(body, {"x": 1, "i": 3})
    assert a.sync() == {}
    a.run(body, {"x": 2, "i": 4})
    with pytest.raises(wis.error, match=r"shape \[1, 1\], but the program announced \[4, 1\]"):
        a.sync()
    with pytest.raises(wis.error):
        a.read(4, 32)


def test_client_not_reading_stalls_no_other(device, wis):
    slow, other = device.open("slow"), device.open("other")
    slow.run(wis.body().alloc("x", HUGE).fill("x", wis.at(DType.U8, HUGE), 3), {"x": 1})
    for _ in range(8):
        slow.ask(1, HUGE)
    other.make(1, 1, 2)
    add = wis.body().call("aten.add_.Tensor", ("inout", "x", wis.at(DType.F32, 2)), ("in", "x", wis.at(DType.F32, 2)))
    for _ in range(20):
        other.run(add, {"x": 1})
        other.sync()
    assert other.floats(1, 2) == [2.0**20, 2.0**21]
    queued = device.call(
        lambda: {s.id: (s.conn.queued_bytes, len(s.flow.inbox.frames)) for s in device.loop.sessions.all()}
    )
    assert 0 < queued["slow"][0] < HUGE + MAX_CHUNK and queued["slow"][1] == 7
    assert slow.take(HUGE) == b"\3" * HUGE


def test_client_sending_too_fast_is_not_read(device, wis, monkeypatch):
    monkeypatch.setattr(core, "MOST_FRAMES", 8)
    a = device.open("a")
    a.make(1, 0)
    a.make(2, 1)
    v = wis.at(DType.F32, 1)
    add = wis.body().call("aten.add_.Tensor", ("inout", "x", v), ("in", "y", v))
    name = a.define(add)
    for _ in range(1000):
        a.start(name, [1, 2])
    assert a.floats(1, 1) == [1000]
