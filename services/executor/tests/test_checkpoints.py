"""Cuts of sessions, and sessions that go on from them in another device loop."""

import os
import shutil
import struct
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from wooly_bus.contents import CHUNK
from wooly_executor.checkpoints import folder as folder_of_checkpoints
from wooly_executor.host_account import HostLimits
from wooly_executor.memory.book import Scope
from wooly_executor.memory.swap import Policy
from wooly_executor.runtime.opencl import OpenClRuntime
from wooly_executor.runtime.torch_cpu import TorchCpuRuntime
from wooly_executor.vram import SwapSettings
from wooly_wis.dtypes import DType
from wooly_wis.frames import Kind

from services.executor.tests.checkpoint_places import KINDS, Place

#: Tests that say nothing else use a folder.
ALL = pytest.mark.parametrize("place", KINDS, indirect=True)


@pytest.fixture
def place(request, tmp_path):
    found = Place(getattr(request, "param", "folder"), tmp_path / "checkpoints")
    yield found
    found.remove()


@pytest.fixture
def device_with(make_device, place):
    """Makes devices that store checkpoints in one place."""

    def make(**more):
        return make_device(checkpoints=place.checkpoints(), **more)

    return make


def double(wis, client, buffer, n):
    at = wis.at(DType.F32, n)
    client.run(wis.body().call("aten.add_.Tensor", ("inout", "x", at), args=(wis.ref(0), wis.ref(0))), {"x": buffer})


def leave(client):
    """End the connection as a client that died."""
    client.channel.close()


def close(client):
    """Close the session, and wait until the executor has."""
    client.channel.send(Kind.CLOSE)
    client.channel.await_end(30)


def test_a_session_goes_on_from_its_cut_in_another_device(device_with, wis):
    first, second = device_with(), device_with()
    a = first.open("s")
    a.make(8, 1.0, 2.0)
    a.make(16, 3.0)
    assert a.cut(1)["stored"] == 1
    double(wis, a, 8, 2)  # after the cut
    leave(a)
    b = second.open("s")
    assert b.restore(1) == {"buffers": 2, "held": 12}
    assert b.floats(8, 2) == [1.0, 2.0]
    assert b.floats(16, 1) == [3.0]
    double(wis, b, 16, 1)
    assert b.floats(16, 1) == [6.0]
    second.check()


def test_a_cut_has_the_content_of_its_place_among_the_frames(device_with, wis):
    first, second = device_with(), device_with()
    a = first.open("s")
    a.make(8, *[1.0] * 4096)
    a.cut(1, stored=False)
    for _ in range(3):
        double(wis, a, 8, 4096)
    assert a.cut(stored=True)["stored"] == 1
    leave(a)
    b = second.open("s")
    b.restore(1)
    assert b.floats(8, 4096) == [1.0] * 4096


@ALL
def test_a_second_cut_stores_only_what_has_changed(device_with, place):
    device = device_with()
    a = device.open("s")
    large = os.urandom(3 * CHUNK)
    a.load(8, large)
    a.make(16, 1.0)
    a.cut(1)
    before = place.chunks()
    assert len(before) == 4
    a.write(16, struct.pack("<f", 2.0))
    assert a.cut(2, known=1)["stored"] == 2
    assert len(place.chunks() - before) == 1
    a.write(8, bytes([large[CHUNK] ^ 1]), offset=CHUNK)  # one chunk of the large buffer
    a.cut(3, known=2)
    assert len(place.chunks() - before) == 2
    a.cut(4, known=4)  # the chunks that only earlier cuts needed are gone
    assert len(place.chunks()) == 4


@ALL
def test_equal_chunks_of_a_tenants_sessions_are_stored_once(device_with, place):
    device = device_with()
    a, b = device.open("a", tenant="t"), device.open("b", tenant="t")
    data = os.urandom(CHUNK)
    for client in (a, b):
        client.load(8, data)
        client.cut(1)
    assert len(place.chunks()) == 1
    close(a)
    b.cut(2)
    leave(b)
    other = device_with()
    again = other.open("b", tenant="t")
    again.restore(1)
    assert again.read(8, CHUNK) == data


def test_a_shared_content_is_part_of_a_cut(device_with):
    device, other = device_with(), device_with()
    data = os.urandom(CHUNK)
    a = device.open("a", tenant="t", scope=Scope.TENANT)
    a.load(8, data)
    a.sealed()
    b = device.open("b", tenant="t", scope=Scope.TENANT)
    assert b.load(8, data)
    b.cut(1)
    leave(b)
    again = other.open("b", tenant="t")
    again.restore(1)
    assert again.read(8, CHUNK) == data


@pytest.mark.parametrize("order", ["torch to opencl", "opencl to torch"])
def test_a_session_goes_on_between_runtimes_and_back(device_with, wis, tmp_path, order):
    """On the CPU alone and with OpenCL: the same layouts, and here the same bits."""
    made = {"torch": TorchCpuRuntime, "opencl": lambda: OpenClRuntime(tmp_path)}
    there = [device_with(runtime=made[name]()) for name in order.split(" to ")]
    a = there[0].open("s")
    a.make(8, 0.1, 0.2, 0.3)
    a.cut(1)
    expected = [float(np.float32(x)) for x in (0.1, 0.2, 0.3)]
    for number, device in enumerate([there[1], there[0], there[1]], 1):
        leave(a)
        for each in there:
            if each.residence():
                each.wait_closed("s")
            each.closed.clear()
        a = device.open("s")
        a.restore(number)
        double(wis, a, 8, 3)
        expected = [2 * x for x in expected]
        assert a.floats(8, 3) == expected
        assert a.cut(number + 1, known=number)["stored"] == number + 1
    assert {d.call(lambda d=d: d.loop.runtime.facts()["runtime"]) for d in there} == {"torch-cpu", "opencl"}


def test_a_poisoned_buffer_stays_poisoned(device_with, wis):
    first, second = device_with(), device_with()
    a = first.open("s")
    a.make(8, 1.0)
    a.start(bytes(32), [8])  # an unknown program
    with pytest.raises(wis.error, match="has not defined"):
        a.sync()
    a.cut(1)
    leave(a)
    b = second.open("s")
    b.restore(1)
    with pytest.raises(wis.error, match="has not defined"):
        b.read(8, 4)


def test_a_failure_is_reported_in_place_of_a_cut(device_with, wis):
    a = device_with().open("s")
    a.make(8, 1.0)
    a.start(bytes(32), [8])
    with pytest.raises(wis.error, match="has not defined"):
        a.cut(1)
    assert a.cut()["taken"] == 0


def test_a_cut_of_a_swapped_out_session_brings_it_back(device_with, tmp_path):
    device = device_with(memory=1 << 20, swap=SwapSettings(Policy(0, 1 << 20, 0), 1 << 30, 0, tmp_path, 10_000_000_000))
    a = device.open("a")
    a.load(8, bytes(700_000))
    b = device.open("b", priority=0)
    b.load(8, bytes(700_000))
    b.sync()
    assert device.residence()["a"] == "away"
    b.close()
    assert a.cut(1)["stored"] == 1
    device.check()


@pytest.mark.parametrize("session_id, tenant", [("other", "t"), ("s", "u")])
def test_only_the_session_itself_can_restore_its_cut(device_with, wis, session_id, tenant):
    first, second = device_with(), device_with()
    a = first.open("s", tenant="t")
    a.make(8, 1.0)
    a.cut(1)
    leave(a)
    b = second.open(session_id, tenant=tenant)
    with pytest.raises(wis.error, match="does not have checkpoint 1"):
        b.restore(1)
    b.make(8, 5.0)  # the session is as new
    assert b.floats(8, 1) == [5.0]


def test_a_session_that_has_begun_cannot_restore(device_with, wis):
    a = device_with().open("s")
    a.make(8, 1.0)
    a.cut(1)
    with pytest.raises(wis.error, match="before it does anything else"):
        a.restore(1)
    assert a.floats(8, 1) == [1.0]


@ALL
def test_a_damaged_chunk_is_an_error_and_leaves_no_memory(device_with, wis, place):
    first, second = device_with(), device_with()
    a = first.open("s")
    a.make(8, 1.0)
    a.make(16, 2.0)
    a.cut(1)
    leave(a)
    name = sorted(place.chunks())[0]
    for path in place.chunk_paths(name):
        place.write(path, b"1234")
    b = second.open("s")
    with pytest.raises(wis.error, match="damaged"):
        b.restore(1)
    assert second.held() == {"s": (0, 0)}
    second.check()


def test_a_cut_larger_than_the_quota_is_an_error(device_with, wis):
    first, second = device_with(), device_with()
    a = first.open("s")
    a.load(8, bytes(1000))
    a.cut(1)
    leave(a)
    b = second.open("s", quota=500)
    with pytest.raises(wis.error, match="out of memory"):
        b.restore(1)
    second.check()


def test_a_full_disk_fails_the_cut_alone(device_with, monkeypatch, wis, caplog):
    first, second = device_with(), device_with()
    a = first.open("s")
    a.make(8, 1.0)
    a.cut(1)
    usage = shutil.disk_usage("/")._replace(free=0)
    with monkeypatch.context() as patch:
        patch.setattr(folder_of_checkpoints.shutil, "disk_usage", lambda path: usage)
        double(wis, a, 8, 1)
        for number in (2, 3):
            said = a.cut(number, known=1)
            assert (said["stored"], "almost full" in said["error"]) == (1, True)
    assert len([r for r in caplog.records if "almost full" in r.getMessage() and r.levelname == "WARNING"]) == 1
    assert a.cut(4, known=1)["stored"] == 4  # what changed before the failed cuts is in this one
    leave(a)
    b = second.open("s")
    b.restore(4)
    assert b.floats(8, 1) == [2.0]


def test_a_cut_beyond_the_budget_of_host_memory_is_refused(device_with):
    a = device_with(limits=HostLimits(checkpoints=1000)).open("s")
    a.load(8, bytes(2000))
    said = a.cut(1)
    assert (said["taken"], said["stored"]) == (0, 0)
    assert "WOOLY_EXECUTOR_CHECKPOINT_HOST" in said["error"]
    assert a.read(8, 4) == bytes(4)


def test_an_executor_without_a_folder_says_so(device, wis):
    a = device.open("s")
    assert "stores no checkpoints" in a.cut(1)["error"]
    with pytest.raises(wis.error, match="stores no checkpoints"):
        a.restore(1)


@ALL
def test_a_client_that_closes_its_session_removes_its_files(device_with, place):
    device = device_with()
    a = device.open("s")
    a.make(8, 1.0)
    a.cut(1)
    close(a)
    until = time.monotonic() + 30
    while place.paths() and time.monotonic() < until:
        time.sleep(0.01)
    assert not place.paths()


@ALL
def test_files_of_a_lost_session_are_removed_after_a_while(device_with, place):
    device = device_with()
    a, b = device.open("a"), device.open("b")
    for client in (a, b):
        client.make(8, 1.0)
        client.cut(1)
    leave(a)
    device.wait_closed("a")
    assert place.checkpoints().sweep() == 0
    place.age()
    device.call(lambda: device.loop.cuts.sweep(device.loop.sessions.all()))
    until = time.monotonic() + 30
    while len(place.sessions()) > 1 and time.monotonic() < until:
        time.sleep(0.01)
    assert len(place.sessions()) == 1  # the open session's
    assert b.cut(2)["stored"] == 2


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("make"), st.integers(1, 5), st.integers(0, 255)),
        st.tuples(st.just("write"), st.integers(1, 5), st.integers(0, 255)),
        st.tuples(st.just("double"), st.integers(1, 5), st.just(0)),
        st.tuples(st.just("free"), st.integers(1, 5), st.just(0)),
        st.tuples(st.just("cut"), st.just(0), st.booleans()),
    ),
    max_size=20,
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
@pytest.mark.parametrize("kind", KINDS)
def test_any_cut_restores_what_was_there(make_device, tmp_path_factory, wis, kind, steps):
    place = Place(kind, tmp_path_factory.mktemp("checkpoints") / "checkpoints")
    first, second = [make_device(checkpoints=place.checkpoints()) for _ in range(2)]
    a = first.open("s")
    model, cuts = {}, {}
    for what, buffer, value in [*steps, ("cut", 0, True)]:
        if what == "make" and buffer not in model:
            model[buffer] = [float(value)] * buffer
            a.make(buffer, *model[buffer])
        elif what == "write" and buffer in model:
            model[buffer] = [float(value), *model[buffer][1:]]
            a.write(buffer, struct.pack("<f", value))
        elif what == "double" and buffer in model:
            model[buffer] = [2 * x for x in model[buffer]]
            double(wis, a, buffer, buffer)
        elif what == "free" and buffer in model:
            del model[buffer]
            a.run(wis.body().free("x"), {"x": buffer})
        elif what == "cut":
            number = max(cuts, default=0) + 1
            a.cut(number, known=max(cuts, default=0), stored=bool(value))
            cuts[number] = {k: list(v) for k, v in model.items()}
    last = max(cuts)
    assert a.cut(stored=True)["stored"] == last
    leave(a)
    for number in [n for n in cuts if n >= last - 1]:
        b = second.open("s")
        b.restore(number)
        assert {k: b.floats(k, k) for k in cuts[number]} == cuts[number]
        leave(b)
        second.wait_closed("s")
        second.closed.clear()
    second.check()
    place.remove()


def usage(device):
    """By session: core time, its repeated part, and core time since the newest checkpoint."""
    taken = device.call(device.loop.take_usage)
    return {t.session_id: (t.core_ns, t.repeated_ns, t.unsaved_ns) for t in taken}


@pytest.mark.parametrize("repeats", [False, True])
def test_usage_says_what_was_repeated_and_what_the_checkpoint_does_not_have(device_with, wis, repeats):
    first, second = device_with(), device_with()
    a = first.open("s")
    a.make(8, 1.0, 2.0)
    double(wis, a, 8, 2)
    assert a.cut(1)["stored"] == 1
    double(wis, a, 8, 2)
    assert a.floats(8, 2) == [4.0, 8.0]
    core, repeated, unsaved = usage(first)["s"]
    assert 0 < unsaved < core and repeated == 0
    leave(a)
    b = second.open("s", repeats=repeats)
    b.restore(1)
    double(wis, b, 8, 2)  # it repeats this
    b.sync()
    core, repeated, unsaved = usage(second)["s"]
    assert core > 0 and unsaved is None and repeated == (core if repeats else 0)
    double(wis, b, 8, 2)  # this is new
    assert b.floats(8, 2) == [8.0, 16.0]
    core, repeated, unsaved = usage(second)["s"]
    assert core > 0 and repeated == 0


def test_a_checkpoint_ends_what_is_repeated(device_with, wis):
    """A client that goes on working without a word at the end of its repeats takes no checkpoint for free, either."""
    device = device_with()
    client = device.open("s", repeats=True)
    client.make(8, 1.0)
    double(wis, client, 8, 1)
    client.cut(1)
    usage(device)
    double(wis, client, 8, 1)
    assert client.floats(8, 1) == [4.0]
    core, repeated, unsaved = usage(device)["s"]
    assert core > 0 and repeated == 0 and unsaved is not None


@ALL
def test_the_devices_of_a_session_have_cuts_of_their_own(device_with, place):
    executors = [device_with() for _ in range(2)]
    for part, device in enumerate(executors):
        client = device.open("s", part=part)
        client.make(8, 1.0 + part)
        assert client.cut(1)["stored"] == 1
        leave(client)
    others = [device_with() for _ in range(2)]
    for part, device in enumerate(others):
        device.call(lambda device=device: device.loop.cuts.keep([("", "s", 0), ("", "s", 1)], []))
        client = device.open("s", part=part)
        client.restore(1)
        assert client.floats(8, 1) == [1.0 + part]
