"""Tests of device memory in the device loop: accounts, shared contents, swapping, and failures."""

import contextlib
import errno
import os
import struct
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from wooly_bus.contents import chunk_digest, content_id, shared_name
from wooly_executor import mover, swap_space
from wooly_executor.errors import AdmissionError
from wooly_executor.memory.book import Scope
from wooly_executor.memory.swap import Place, Policy
from wooly_executor.runtime.torch_cpu import TorchCpuRuntime
from wooly_executor.swap_space import Copy
from wooly_executor.vram import SwapSettings, vram
from wooly_executor.vram.swapping import Swapping
from wooly_executor.weights import contents, pinned_weights
from wooly_wis.dtypes import DType

MIB = 1 << 20
SHARED, TENANT, OFF = Scope.SHARED, Scope.TENANT, Scope.OFF
WAIT_S = 30


def swap(folder, *, host=64 * MIB, disk=64 * MIB, idle_ms=0, reserve=0, patience_ms=WAIT_S * 1000):
    policy = Policy(reserve, MIB, idle_ms * 1_000_000)
    return SwapSettings(policy, host, disk, Path(folder), patience_ms * 1_000_000)


def content(seed, nbytes=MIB):
    return bytes([seed, seed ^ 0x55]) * (nbytes // 2)


def in_place(wis, nbytes):
    """x = ~x, on bytes."""
    v = wis.at(DType.U8, nbytes)
    return wis.body().call("aten.bitwise_not_.default", ("inout", "x", v))


def inverted(data):
    return bytes([255 - b for b in data[:2]]) * (len(data) // 2)


def wait(device, condition):
    until = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.002)
        device.check()


def vram_of(device, function):
    return device.call(lambda: function(device.loop.vram))


def swapped(device):
    return vram_of(device, lambda v: (v.swap_space.used[Place.HOST], v.swap_space.used[Place.DISK]))


# -- promises --------------------------------------------------------------------------------------------------------


def promised(device):
    state = vram_of(device, lambda v: v.state())
    return {s.session_id: s.promised for s in state.sessions}, state.movable, state.fixed


def test_session_without_size_counts_with_its_use_on_the_device_and_off_it(make_device, wis, tmp_path):
    device = make_device(memory=8 * MIB, swap=swap(tmp_path))
    a = device.open("a")
    assert promised(device) == ({"a": 0}, 0, 0)
    a.run(wis.body().alloc("x", 6 * MIB), {"x": 1})
    a.sync()
    assert promised(device) == ({"a": 6 * MIB}, 6 * MIB, 0)
    with pytest.raises(AdmissionError, match=r"6\.00 MiB of 8\.00 MiB are promised already"):
        device.admit("big", quota=3 * MIB)
    b = device.open("b")  # without a size, there is always room: a leaves
    b.run(wis.body().alloc("x", 6 * MIB), {"x": 1})
    b.sync()
    assert sum(swapped(device)) == 6 * MIB and promised(device)[:2] == ({"a": 6 * MIB, "b": 6 * MIB}, 12 * MIB)
    device.open("c").run(wis.body().alloc("x", MIB), {"x": 1})
    b.run(wis.body().free("x"), {"x": 1})
    b.sync()
    assert promised(device)[0]["b"] == 0


def test_session_without_size_counts_with_default_claim_until_it_uses_more(make_device, wis):
    device = make_device(memory=8 * MIB)
    a = device.open("a", claim=3 * MIB)
    device.open("b", quota=MIB, claim=3 * MIB)
    assert promised(device) == ({"a": 3 * MIB, "b": MIB}, 4 * MIB, 0)
    with pytest.raises(AdmissionError, match=r"asks for 5\.00 MiB"):
        device.admit("c", claim=5 * MIB)
    a.run(wis.body().alloc("x", 4 * MIB), {"x": 1})
    a.sync()
    assert promised(device)[0] == {"a": 4 * MIB, "b": MIB} and a.stats()["quota_bytes"] == 8 * MIB


# -- accounts --------------------------------------------------------------------------------------------------------


def test_out_of_memory_names_own_sessions_but_no_other_tenants(make_device, wis):
    device = make_device(memory=8 * MIB)
    a = device.open("a", tenant="t", swappable=False)
    device.open("mine", tenant="t", swappable=False).run(wis.body().alloc("x", MIB), {"x": 1})
    device.open("secret", tenant="u", swappable=False).run(wis.body().alloc("x", 2 * MIB), {"x": 1})
    device.clients[1].sync(), device.clients[2].sync()
    a.run(wis.body().alloc("x", 2 * MIB), {"x": 1})
    a.run(wis.body().alloc("x", 16 * MIB), {"x": 2})
    with pytest.raises(wis.error) as caught:
        a.sync()
    message = caught.value.message
    assert caught.value.code == "executor.out_of_memory" and "Tried to allocate 16.00 MiB" in message
    assert "total capacity of 8.00 MiB" in message or "quota is 8.00 MiB" in message
    assert "This session holds 2.00 MiB in 1 buffers" in message and "Session mine holds 1.00 MiB" in message
    assert "Sessions of other tenants hold 2.00 MiB" in message and "secret" not in message
    assert a.stats()["out_of_memory"] == 1
    device.check()


def test_results_of_unknown_size_are_charged(device, wis):
    a = device.open("a")
    a.make(1, 1, 0, 2, 0)
    v = wis.at(DType.F32, 4)
    a.run(wis.body().call("aten.nonzero.default", ("in", "x", v), ("out", "y", None)), {"x": 1, "y": 2}, reply=True)
    assert a.stats()["own_bytes"] == 2 * 256
    a.run(wis.body().free("y"), {"y": 2})
    assert a.stats()["own_bytes"] == 256
    device.check()


def test_stats_of_a_cpu_device_say_what_other_processes_leave(make_device, tmp_path, monkeypatch):
    device = make_device(runtime=TorchCpuRuntime(), memory=8 * MIB, swap=swap(tmp_path))
    a = device.open("a")
    monkeypatch.setattr(vram, "spare", lambda: 3 * MIB)
    assert (a.stats()["machine_bytes"], a.stats()["available_bytes"]) == (3 * MIB, 8 * MIB)
    monkeypatch.setattr(vram, "spare", lambda: None)
    assert "machine_bytes" not in a.stats()


def test_workspace_of_a_large_program_is_freed(device, wis):
    a = device.open("a")
    a.run(wis.body().alloc("x", 8 * MIB).alloc("y", 512).free("x"), {"x": 1, "y": 2})
    stats = a.stats()
    assert stats["workspace_bytes"] == 0 and stats["own_bytes"] == 512
    assert stats["reserved_peak_bytes"] >= 8 * MIB
    device.check()


def test_charges_are_integrated_exactly(device, wis):
    """Between two samples nothing changes, so the integral is exactly bytes times nanoseconds."""
    a = device.open("a", tenant="t")
    a.run(wis.body().alloc("x", MIB), {"x": 1})
    a.sync()
    (first,) = vram_of(device, lambda v: v.samples())
    (second,) = vram_of(device, lambda v: v.samples())
    assert (second.session, second.tenant, second.own, second.shared) == ("a", "t", MIB, 0)
    assert second.sequence == first.sequence + 1 and second.from_ns == first.to_ns
    assert second.own_byte_ns == MIB * (second.to_ns - second.from_ns) > 0
    a.close()
    device.wait_closed("a")
    (last,) = vram_of(device, lambda v: v.samples())
    assert last.last and last.sequence == 3 and last.from_ns == second.to_ns
    assert vram_of(device, lambda v: v.samples()) == []


# -- contents --------------------------------------------------------------------------------------------------------


def shared_pair(device, data, scope=TENANT, tenants=("t", "t")):
    a = device.open("a", tenant=tenants[0], scope=scope)
    b = device.open("b", tenant=tenants[1], scope=scope)
    assert not a.load(1, data)
    a.sealed()
    return a, b


def test_content_on_the_device_is_shared_and_charged_in_parts(device):
    data = content(7, 3 * MIB)
    a, b = shared_pair(device, data)
    assert b.offer_head(99, data) is False  # the buffer does not exist; the next sync reports it
    with pytest.raises(Exception, match="does not exist"):
        b.sync()
    assert b.load(1, data)
    assert b.read(1, len(data)) == data
    assert a.stats()["shared_bytes"] == b.stats()["shared_bytes"] == len(data) // 2
    assert vram_of(device, lambda v: v.ledger.facts().contents) == len(data)
    device.check()


def test_closed_session_reports_its_largest_contents(device, wis):
    small, large = content(7), content(8, 3 * MIB)
    a, b = shared_pair(device, small)
    b.load(1, large)
    b.sealed()
    assert b.load(2, small)
    b.run(wis.body().free("x"), {"x": 1})
    alone = device.open("c", tenant="t")
    alone.load(1, small)
    names = [shared_name(content_id([chunk_digest(data)], len(data)), "t") for data in (large, small)]
    for client, name in ((a, "a"), (b, "b"), (alone, "c")):
        client.close()
        device.wait_closed(name)
    assert device.brought == {"a": (names[1],), "b": tuple(names), "c": ()}


def test_write_to_a_shared_buffer_keeps_the_other_copy(device, wis):
    data = content(9)
    a, b = shared_pair(device, data)
    assert b.load(1, data)
    a.run(in_place(wis, len(data)), {"x": 1})
    assert a.read(1, len(data)) == inverted(data) and b.read(1, len(data)) == data
    device.check()
    b.write(1, b"\xff" * 16, 32)
    assert b.read(1, 48) == data[:32] + b"\xff" * 16
    assert b.stats()["shared_bytes"] == a.stats()["shared_bytes"] == 0
    device.check()


def test_write_through_a_view_copies_first(device, wis):
    data = content(3)
    a, b = shared_pair(device, data)
    assert b.load(1, data)
    part = wis.at(DType.U8, 100, offset=1000)
    b.run(wis.body().fill("x", part, 0), {"x": 1})
    assert b.read(1, len(data)) == data[:1000] + bytes(100) + data[1100:]
    assert a.read(1, len(data)) == data
    device.check()


def test_content_written_during_hashing_is_not_shared(device, wis):
    data = content(5, 16 * MIB)
    a = device.open("a", tenant="t", scope=TENANT)
    assert not a.load(1, data)
    a.run(in_place(wis, len(data)), {"x": 1})
    a.sealed()
    b = device.open("b", tenant="t", scope=TENANT)
    assert not b.load(1, data)
    assert not b.load(2, inverted(data))
    device.check()


def test_content_with_a_false_name_is_not_shared(device):
    """No session may get bytes under a false name."""
    a, b = (device.open(n, tenant="t", scope=TENANT) for n in "ab")
    true, lie = content(1), content(2)
    a.load(1, true)
    a.sealed()
    b.load(1, content(3))
    b.seal(1, lie)
    b.sealed()
    c = device.open("c", tenant="t", scope=TENANT)
    assert not c.load(1, lie)


@pytest.mark.parametrize(
    ("first", "second", "tenants", "known"),
    [
        (TENANT, TENANT, ("t", "t"), True),
        (TENANT, TENANT, ("t", "u"), False),
        (SHARED, SHARED, ("t", "u"), True),
        (SHARED, TENANT, ("t", "u"), False),
        (TENANT, SHARED, ("t", "u"), False),
        (OFF, TENANT, ("t", "t"), False),
        (TENANT, OFF, ("t", "t"), False),
        (TENANT, SHARED, ("t", "t"), True),
    ],
)
def test_content_is_offered_only_within_its_scope(device, wis, first, second, tenants, known):
    data = content(4, 8 * MIB)
    a = device.open("a", tenant=tenants[0], scope=first)
    a.load(1, data)
    a.sealed()
    b = device.open("b", tenant=tenants[1], scope=second)
    b.run(wis.body().alloc("x", len(data)), {"x": 1})
    assert b.offer_head(1, data) == known
    assert b.offer(1, data) == known
    device.check()


def test_content_survives_a_killed_sharer(device):
    data = content(8)
    a, b = shared_pair(device, data)
    assert b.load(1, data)
    a.channel.close()  # as `kill -9` does
    device.wait_closed("a")
    assert b.read(1, len(data)) == data and b.stats()["shared_bytes"] == len(data)
    b.close()
    device.wait_closed("b")
    facts = vram_of(device, lambda v: v.ledger.facts())
    assert facts.contents == facts.own == 0
    device.check()


def test_pinned_weights_survive_their_session(device):
    data = content(6)
    a = device.open("a", tenant="t", scope=TENANT)
    a.load(1, data)
    assert a.pin("add", "llama") == {"bytes": len(data)}
    assert "already" in a.pin("add", "llama")["error"]
    a.close()
    device.wait_closed("a")
    device.check()
    b, stranger = device.open("b", tenant="t", scope=TENANT), device.open("c", tenant="u", scope=TENANT)
    (pinned,) = b.pin("list")["pins"]
    assert (pinned["name"], pinned["bytes"], pinned["tensors"]) == ("llama", len(data), 1)
    assert stranger.pin("list") == {"pins": []} and not stranger.pin("remove", "llama")["removed"]
    assert b.load(1, data)
    assert b.pin("remove", "llama") == {"removed": True}
    assert b.read(1, len(data)) == data
    device.check()


@pytest.mark.parametrize("name", ["", "x" * 129, "a\r\nNats-Rollup: all", "\ud800"])
def test_pin_with_an_invalid_name_is_refused(device, name):
    a = device.open("a", scope=SHARED, tenant="acme")
    assert not a.load(1, content(4))
    a.sealed()
    assert "not a valid name for weights" in a.pin("add", name)["error"]
    assert device.call(lambda: device.loop.vram.state().model_dump_json()) and not a.pin("list")["pins"]


def test_pins_above_the_tenants_limit_are_refused(device, monkeypatch):
    monkeypatch.setattr(pinned_weights, "PINS_PER_TENANT", 2)
    monkeypatch.setattr(pinned_weights, "TENSORS_PER_TENANT", 3)
    a, b = [device.open(n, scope=SHARED, tenant=t) for n, t in (("a", "acme"), ("b", "other"))]
    for client in (a, b):
        client.load(1, content(4))
        client.sealed()
    assert "bytes" in a.pin("add", "one") and "bytes" in a.pin("add", "two")
    assert "at most" not in b.pin("add", "one").get("error", "")
    assert "at most 2 models and 3 tensors" in a.pin("add", "three")["error"]
    assert a.pin("remove", "one")["removed"]
    a.load(2, content(5))
    a.load(3, content(6))
    a.sealed()
    assert "with this one 4 tensors" in a.pin("add", "three")["error"]


def test_hash_cancelled_releases_its_memory(device, wis, monkeypatch):
    """A client that starts a hash and frees the buffer does not make the queue of hashes keep the buffer's memory."""
    going, go_on = threading.Event(), threading.Event()
    steps = mover.HashJob.steps

    def slow(job):
        going.set()
        assert go_on.wait(30)
        yield from steps(job)

    monkeypatch.setattr(mover.HashJob, "steps", slow)
    submitted = []
    submit = device.loop.vram.mover.submit
    monkeypatch.setattr(device.loop.vram.mover, "submit", lambda job: (submitted.append(job), submit(job)))
    a = device.open("a", scope=SHARED)
    try:
        for k in range(1, 5):
            a.load(k, content(4))
            # The first hash has begun, so the others are in the queue when their buffers are freed.
            assert going.wait(30)
            a.run(wis.body().free("x"), {"x": k})
        a.sync()
        assert len(submitted) == 4 and all(job.source is None for job in submitted)
    finally:
        go_on.set()


# -- swapping --------------------------------------------------------------------------------------------------------


def test_idle_session_is_swapped_out_and_in(make_device, tmp_path, wis):
    device = make_device(memory=10 * MIB, swap=swap(tmp_path))
    a, b = device.open("a"), device.open("b")
    first, second = content(1, 6 * MIB), content(2, 6 * MIB)
    for client, data in ((a, first), (b, second)):
        client.run(wis.body().alloc("x", len(data)), {"x": 1})
        client.write(1, data)
        client.sync()
    assert device.residence() == {"a": "away", "b": "here"}
    assert swapped(device) == (6 * MIB, 0)
    device.check()
    for _ in range(3):
        a.run(in_place(wis, len(first)), {"x": 1})
        first = inverted(first)
        assert a.read(1, len(first)) == first
        assert device.residence() == {"a": "here", "b": "away"}
        b.run(in_place(wis, len(second)), {"x": 1})
        second = inverted(second)
        assert b.read(1, len(second)) == second
        device.check()


def test_read_or_write_swaps_a_session_in(make_device, tmp_path, wis):
    device = make_device(memory=10 * MIB, swap=swap(tmp_path))
    a, b = device.open("a"), device.open("b")
    data = content(1, 6 * MIB)
    for client in (a, b):
        client.run(wis.body().alloc("x", len(data)), {"x": 1})
        client.write(1, data)
        client.sync()
    a.write(1, b"\xee" * 8, 8)
    assert a.read(1, 24) == data[:8] + b"\xee" * 8 + data[16:24]
    assert b.read(1, len(data)) == data
    device.check()


def one_content_twice_and_a_neighbour(make_device, tmp_path, wis, **settings):
    """A session with two buffers of one content, and a session that uses the rest of the device."""
    device = make_device(memory=10 * MIB, swap=swap(tmp_path, **settings))
    a = device.open("a", scope=Scope.TENANT)
    for buffer in (1, 2):
        a.load(buffer, content(1, 4 * MIB))
        a.sealed()
    b = device.open("b")
    b.run(wis.body().alloc("x", 5 * MIB), {"x": 1})
    b.write(1, content(2, 5 * MIB))
    b.sync()
    assert device.residence() == {"a": "here", "b": "here"}
    return device, a, b


def test_write_to_shared_content_waits_for_room(make_device, tmp_path, wis):
    device, a, b = one_content_twice_and_a_neighbour(make_device, tmp_path, wis)
    a.write(1, b"\xee" * 8, 8)
    assert a.read(1, 24) == content(1, 8) + b"\xee" * 8 + content(1, 8)
    assert device.residence() == {"a": "here", "b": "away"}
    assert a.read(2, 24) == content(1, 24) and b.read(1, 5 * MIB) == content(2, 5 * MIB)
    device.check()


def test_write_without_room_fails_after_its_patience(make_device, tmp_path, wis):
    device, a, b = one_content_twice_and_a_neighbour(make_device, tmp_path, wis, host=0, disk=0, patience_ms=10)
    with pytest.raises(wis.error, match="CUDA out of memory"):
        a.write(1, b"\xee" * 8, 8)
        a.sync()
    assert a.read(1, 24) == a.read(2, 24) == content(1, 24)
    assert b.read(1, 5 * MIB) == content(2, 5 * MIB)
    device.check()


def test_swap_above_the_host_budget_goes_to_disk(make_device, tmp_path, wis):
    device = make_device(memory=10 * MIB, swap=swap(tmp_path, host=MIB))
    a, b = device.open("a"), device.open("b")
    a.run(wis.body().alloc("x", 5 * MIB).alloc("y", MIB), {"x": 1, "y": 2})
    a.write(1, content(1, 5 * MIB))
    a.write(2, content(2))
    a.sync()
    b.run(wis.body().alloc("x", 8 * MIB), {"x": 1})
    b.sync()
    assert device.residence()["a"] == "away" and swapped(device) == (MIB, 5 * MIB)
    assert a.read(1, 5 * MIB) == content(1, 5 * MIB) and a.read(2, MIB) == content(2)
    assert device.residence()["b"] == "away" and swapped(device) == (0, 8 * MIB)
    assert list(tmp_path.iterdir()) == []  # swap files have no names
    device.check()


def swap_files(folder):
    """Files in a folder that this process has open, by descriptor."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(folder) in str(link.readlink()):
                found.append(link)
    return found


def test_lost_swap_file_fails_its_session_only(make_device, tmp_path, wis):
    device = make_device(memory=10 * MIB, swap=swap(tmp_path, host=0))
    a, b = device.open("a"), device.open("b")
    a.make(2, 1, 2)
    a.run(wis.body().alloc("x", 6 * MIB), {"x": 1})
    a.sync()
    b.run(wis.body().alloc("x", 6 * MIB), {"x": 1})
    b.sync()
    assert device.residence()["a"] == "away"
    (file,) = swap_files(tmp_path)
    os.truncate(file, 100)
    with pytest.raises(wis.error, match="swapped to disk is lost"):
        a.read(1, 6 * MIB)
    a.make(3, 5)
    assert a.floats(3, 1) == [5]
    assert b.read(1, 16) == bytes(16)
    device.check()


def test_lost_shared_content_fails_its_session_only(make_device, tmp_path, wis):
    """Nothing shares the lost content, and the session's memory still leaves the device and comes back."""
    device = make_device(memory=16 * MIB, swap=swap(tmp_path, host=0))
    data = content(1, 6 * MIB)
    a, b, c = [device.open(name, tenant="t", scope=TENANT) for name in "abc"]
    a.load(1, data)
    a.sealed()
    b.run(wis.body().alloc("x", 14 * MIB), {"x": 1})
    b.sync()
    assert device.residence()["a"] == "away"
    (file,) = swap_files(tmp_path)
    os.truncate(file, 100)
    with pytest.raises(wis.error, match="swapped to disk is lost"):
        a.read(1, len(data))
    b.run(wis.body().free("x"), {"x": 1})
    assert not c.load(1, data) and c.read(1, len(data)) == data
    device.check()
    b.run(wis.body().alloc("x", 14 * MIB), {"x": 2})
    b.sync()
    assert device.residence() == {"a": "away", "b": "here", "c": "away"}
    device.check()
    a.load(1, data)
    assert a.read(1, len(data)) == c.read(1, len(data)) == data
    device.check()


def test_content_that_is_coming_back_is_not_shared_before_it_is_there(make_device, tmp_path, wis, monkeypatch):
    device = make_device(memory=16 * MIB, swap=swap(tmp_path))
    data = content(1, 4 * MIB)
    a, b, c = [device.open(name, tenant="t", scope=TENANT) for name in "abc"]
    a.load(1, data)
    a.sealed()
    b.run(wis.body().alloc("x", 14 * MIB), {"x": 1}, frees=[1])
    b.sync()
    assert device.residence()["a"] == "away"
    going, go_on, steps = threading.Event(), threading.Event(), mover.LoadJob.steps

    def slow(job):
        going.set()
        go_on.wait(WAIT_S)
        yield from steps(job)

    monkeypatch.setattr(mover.LoadJob, "steps", slow)
    a.ask(1, len(data))
    try:
        assert going.wait(WAIT_S)
        assert not c.load(1, data)
        c.sync()
        device.check()
    finally:
        go_on.set()
    assert a.take(len(data)) == c.read(1, len(data)) == data
    c.sealed()
    assert c.load(2, data)
    device.check()


def test_block_that_was_copied_back_half_way_is_poisoned(make_device, tmp_path, wis, monkeypatch):
    device = make_device(memory=40 * MIB, swap=swap(tmp_path))
    data = content(1, 24 * MIB)
    a, b = device.open("a"), device.open("b")
    a.run(wis.body().alloc("x", len(data)), {"x": 1})
    a.write(1, data)
    a.sync()
    b.run(wis.body().alloc("x", 30 * MIB), {"x": 1})
    b.sync()
    assert device.residence()["a"] == "away"
    load = Copy.load

    def fails(copy, target, start, stop):
        if start:
            raise RuntimeError("no more pinned memory")
        load(copy, target, start, stop)

    monkeypatch.setattr(Copy, "load", fails)
    with pytest.raises(wis.error, match="could not be copied back: no more pinned memory"):
        a.read(1, len(data))
    device.check()


def test_place_that_takes_no_copy_is_not_tried_again(make_device, tmp_path, wis, monkeypatch):
    device = make_device(memory=10 * MIB, swap=swap(tmp_path, patience_ms=50))
    data = content(1, 6 * MIB)
    a, b = device.open("a"), device.open("b")
    a.run(wis.body().alloc("x", len(data)), {"x": 1})
    a.write(1, data)
    a.sync()
    tried = []

    def fails(copy, source, start, stop):
        tried.append(copy.place)
        raise RuntimeError("no more pinned memory")

    monkeypatch.setattr(Copy, "save", fails)
    b.run(wis.body().alloc("x", 8 * MIB), {"x": 1})
    with pytest.raises(wis.error, match="CUDA out of memory"):
        b.sync()
    assert tried == [Place.HOST, Place.DISK]
    assert a.read(1, len(data)) == data
    device.check()


def test_error_after_memory_was_moved_ends_the_device_loop(make_device, tmp_path, wis, monkeypatch):
    """The session would wait for its memory for ever."""
    device = make_device(memory=10 * MIB, swap=swap(tmp_path))
    device.may_end = True
    a, b = device.open("a"), device.open("b")
    for client in (a, b):
        client.run(wis.body().alloc("x", 6 * MIB), {"x": 1})
        client.sync()
    assert device.residence() == {"a": "away", "b": "here"}

    def fails(*_):
        raise KeyError("a bug")

    monkeypatch.setattr(Swapping, "_install_loaded", fails)
    with pytest.raises(wis.error, match="the executor failed: KeyError: 'a bug'"):
        a.read(1, 6 * MIB)
    assert isinstance(device.told[0], KeyError)


def test_full_disk_fails_the_allocation_only(make_device, tmp_path, wis, monkeypatch):
    device = make_device(memory=10 * MIB, swap=swap(tmp_path, host=0, idle_ms=20, patience_ms=50))
    a, b = device.open("a"), device.open("b")
    data = content(1, 6 * MIB)
    a.run(wis.body().alloc("x", len(data)), {"x": 1})
    a.write(1, data)
    a.sync()

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    b.run(wis.body().alloc("x", 6 * MIB), {"x": 1})
    with pytest.raises(wis.error, match="CUDA out of memory"):
        b.sync()
    b.make(2, 3)
    assert b.floats(2, 1) == [3] and a.read(1, len(data)) == data
    assert swapped(device) == (0, 0)
    device.check()


def test_disk_that_was_full_is_used_again_and_wakes_a_waiting_session(make_device, tmp_path, wis, monkeypatch):
    """One full disk used to end all swapping for good: a session that was swapped out waited for its memory for ever."""
    monkeypatch.setattr(swap_space, "FULL_NS", 500_000_000)
    device = make_device(memory=10 * MIB, swap=swap(tmp_path, host=0, idle_ms=20, patience_ms=50))
    a, b = device.open("a"), device.open("b")
    data, write = content(1, 6 * MIB), os.pwrite
    a.run(wis.body().alloc("x", len(data)), {"x": 1})
    a.write(1, data)
    a.sync()
    b.run(wis.body().alloc("x", 6 * MIB), {"x": 1})
    b.sync()
    assert device.residence()["a"] == "away"
    failed = threading.Event()

    def full(*args):
        failed.set()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    a.ask(1, len(data))
    assert failed.wait(WAIT_S)
    monkeypatch.setattr(os, "pwrite", write)
    assert a.take(len(data)) == data
    assert device.residence() == {"a": "here", "b": "away"}
    device.check()


@pytest.fixture
def orphaned(make_device, tmp_path, wis):
    """`orphaned()`: a content of 4 MiB loses its last session on the device; the other session is swapped out.

    Returns the device, the session that is swapped out, and a session that may use the room.
    """

    def make():
        device = make_device(memory=10 * MIB, swap=swap(tmp_path, patience_ms=50))
        a, b = (device.open(n, tenant="t", scope=TENANT) for n in "ab")
        c = device.open("c", swappable=False)
        a.load(1, content(1, 4 * MIB))
        a.sealed()
        assert b.load(1, content(1, 4 * MIB))
        a.run(wis.body().alloc("x", 3 * MIB), {"x": 2})
        a.sync()
        b.run(wis.body().alloc("x", 1024), {"x": 3})
        b.sync()
        c.run(wis.body().alloc("x", 5 * MIB), {"x": 1})
        c.sync()
        assert device.residence()["a"] == "away"
        b.run(wis.body().free("x"), {"x": 1})
        return device, a, c

    return make


def test_content_whose_copy_off_the_device_failed_is_copied_again(orphaned, monkeypatch, wis):
    """It used to stay on the device, charged to no session, until its session came back."""
    monkeypatch.setattr(contents, "ORPHANS_AGAIN_NS", 100_000_000)
    save, failed = Copy.save, threading.Event()

    def fails_once(self, *args):
        if self.nbytes == 4 * MIB and not failed.is_set():
            failed.set()
            raise MemoryError("no host memory")
        save(self, *args)

    monkeypatch.setattr(Copy, "save", fails_once)
    device, a, c = orphaned()
    assert failed.wait(WAIT_S)
    wait(device, lambda: vram_of(device, lambda v: v.ledger.facts().contents) == 0)
    c.run(wis.body().free("x"), {"x": 1})
    assert a.read(1, 4 * MIB) == content(1, 4 * MIB)
    device.check()


def test_run_waits_for_content_that_leaves_the_device(orphaned, monkeypatch, wis):
    """It used to fail for lack of memory, although the memory became free a moment later."""
    save, saving, go_on = Copy.save, threading.Event(), threading.Event()

    def slow(self, *args):
        if self.nbytes == 4 * MIB:
            saving.set()
            go_on.wait(WAIT_S)
        save(self, *args)

    monkeypatch.setattr(Copy, "save", slow)
    device, _, c = orphaned()
    assert saving.wait(WAIT_S)
    c.run(wis.body().alloc("x", 4 * MIB), {"x": 2})
    threading.Timer(0.2, go_on.set).start()
    c.sync()
    assert vram_of(device, lambda v: v.ledger.facts().contents) == 0
    device.check()


def test_session_closed_while_swapped_out_leaves_nothing(make_device, tmp_path, wis):
    device = make_device(memory=10 * MIB, swap=swap(tmp_path, host=4 * MIB))
    a, b = device.open("a", tenant="t", scope=TENANT), device.open("b")
    a.load(1, content(1, 3 * MIB))
    a.load(2, content(2, 3 * MIB))
    a.sealed()
    a.run(wis.body().alloc("x", 2 * MIB), {"x": 3})
    a.sync()
    b.run(wis.body().alloc("x", 8 * MIB), {"x": 1})
    b.sync()
    assert device.residence()["a"] == "away"
    a.channel.close()
    device.wait_closed("a")
    wait(device, lambda: swapped(device) == (0, 0))
    assert swap_files(tmp_path) == []
    facts = vram_of(device, lambda v: v.ledger.facts())
    assert facts.contents == 0 and facts.own == 8 * MIB


def test_shared_content_stays_with_a_resident_sharer(make_device, tmp_path, wis):
    device = make_device(memory=12 * MIB, swap=swap(tmp_path))
    data = content(1, 4 * MIB)
    a, b, c = (device.open(n, tenant="t", scope=TENANT) for n in "abc")
    a.load(1, data)
    a.sealed()
    assert b.load(1, data)
    a.run(wis.body().alloc("x", 4 * MIB), {"x": 2})
    a.write(2, content(2, 4 * MIB))
    a.sync()
    c.run(wis.body().alloc("x", 5 * MIB), {"x": 1})
    c.sync()
    assert device.residence()["a"] == "away"
    assert vram_of(device, lambda v: v.ledger.facts().contents) in (0, 4 * MIB)
    assert b.read(1, len(data)) == data
    assert a.read(2, 4 * MIB) == content(2, 4 * MIB) and a.read(1, len(data)) == data
    device.check()


def test_clean_content_is_dropped_without_a_second_copy(make_device, tmp_path, wis):
    device = make_device(memory=10 * MIB, swap=swap(tmp_path))
    data = content(1, 6 * MIB)
    a, b = device.open("a", tenant="t", scope=TENANT), device.open("b")
    a.load(1, data)
    a.sealed()
    for _ in range(3):
        b.run(wis.body().alloc("x", 6 * MIB), {"x": 1}, frees=[1])
        b.sync()
        assert device.residence()["a"] == "away" and swapped(device) == (6 * MIB, 0)
        moved = vram_of(device, lambda v: v.mover.moved)
        assert a.read(1, len(data)) == data
        assert vram_of(device, lambda v: v.mover.moved) == moved + len(data)  # copied back, but not saved again
    device.check()


def test_run_writing_swapped_out_shared_content_brings_it_back(make_device, tmp_path, wis):
    device = make_device(memory=10 * MIB, swap=swap(tmp_path))
    a, b, c = [device.open(name, scope=SHARED) for name in "abc"]
    data = content(7, 4 * MIB)
    a.load(1, data)
    a.sealed()
    assert b.load(1, data)
    c.run(wis.body().alloc("x", 8 * MIB), {"x": 1})
    c.sync()
    assert device.residence() == {"a": "away", "b": "away", "c": "here"}
    a.run(in_place(wis, len(data)), {"x": 1})
    assert a.read(1, len(data)) == inverted(data) and b.read(1, len(data)) == data
    device.check()


def test_p0_session_stays_while_another_is_eligible(make_device, tmp_path, wis):
    device = make_device(memory=10 * MIB, swap=swap(tmp_path))
    urgent, other, third = device.open("p0", priority=0), device.open("p3", priority=3), device.open("p2")
    for client in (other, urgent):
        client.run(wis.body().alloc("x", 4 * MIB), {"x": 1})
        client.sync()
    third.run(wis.body().alloc("x", 4 * MIB), {"x": 1})
    third.sync()
    assert device.residence() == {"p0": "here", "p3": "away", "p2": "here"}
    device.check()


def test_unswappable_session_is_never_swapped_out(make_device, tmp_path, wis):
    device = make_device(memory=10 * MIB, swap=swap(tmp_path, idle_ms=1))
    a, b = device.open("a", swappable=False), device.open("b")
    a.run(wis.body().alloc("x", 6 * MIB), {"x": 1})
    a.sync()
    b.run(wis.body().alloc("x", 6 * MIB), {"x": 1})
    with pytest.raises(wis.error, match="CUDA out of memory"):
        b.sync()
    assert device.residence() == {"a": "here", "b": "here"}


def test_waiting_session_is_passed_over_until_another_is_idle(make_device, tmp_path, wis):
    device = make_device(memory=10 * MIB, swap=swap(tmp_path, idle_ms=150))
    a, b, c = device.open("a"), device.open("b"), device.open("c")
    a.run(wis.body().alloc("x", 6 * MIB), {"x": 1})
    a.sync()
    b.run(wis.body().alloc("x", 6 * MIB), {"x": 1})
    b.write(1, content(3, 6 * MIB))
    c.make(1, 4)
    assert c.floats(1, 1) == [4]  # b is still waiting
    assert b.read(1, 6 * MIB) == content(3, 6 * MIB)
    assert device.residence()["a"] == "away"
    device.check()


def test_two_sessions_waiting_for_each_other_both_finish(make_device, tmp_path, wis):
    device = make_device(memory=10 * MIB, swap=swap(tmp_path, idle_ms=50))
    pair = device.open("a"), device.open("b")
    for client in pair:
        client.run(wis.body().alloc("x", 4 * MIB), {"x": 1})
        client.write(1, content(1, 4 * MIB))
    for n, client in enumerate(pair):
        client.run(wis.body().alloc("x", 4 * MIB), {"x": 2})
        client.write(2, content(10 + n, 4 * MIB))
    for n, client in enumerate(pair):
        assert client.read(2, 4 * MIB) == content(10 + n, 4 * MIB)
        assert client.read(1, 4 * MIB) == content(1, 4 * MIB)
    device.check()


def stepping(wis, nbytes):
    """A program that needs room beside its buffer: x = ~x, by way of a temporary buffer."""
    v = wis.at(DType.U8, nbytes)
    body = wis.body().alloc("t", nbytes).call("aten.bitwise_not.default", ("in", "x", v), ("out", "t", v))
    return body.copy("t", v, "x", v).free("t")


@pytest.mark.parametrize("pipelined", [1, 50])
def test_p0_takes_memory_of_a_busy_lower_class_between_its_programs(make_device, tmp_path, wis, pipelined):
    """The lower class never becomes idle, and idle sessions would have to wait for a minute."""
    device = make_device(memory=10 * MIB, swap=swap(tmp_path, idle_ms=60_000))
    low, high = device.open("low", priority=4), device.open("high", priority=0)
    data, step, stop, done = content(1, 4 * MIB), stepping(wis, 4 * MIB), threading.Event(), []
    low.run(wis.body().alloc("x", len(data)), {"x": 1})
    low.write(1, data)
    name = low.define(step)
    ids = [{"x": 1, "t": 2}[n] for n in step.names]

    def train():
        while not stop.is_set() or len(done) < 4 * pipelined:
            for _ in range(pipelined):
                low.start(name, ids)
                done.append(None)
            low.sync()

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        wait(device, lambda: len(done) > 2 * pipelined)
        for n in range(3):
            high.run(wis.body().alloc("x", 8 * MIB), {"x": 1})
            high.write(1, content(7 + n, 8 * MIB))
            assert high.read(1, 8 * MIB) == content(7 + n, 8 * MIB)
            assert device.residence()["low"] in ("away", "preempted")
            before = len(done)
            high.run(wis.body().free("x"), {"x": 1})
            high.sync()
            wait(device, lambda before=before: len(done) > before + pipelined)
    finally:
        stop.set()
        trainer.join(WAIT_S)
    assert low.read(1, len(data)) == (data if len(done) % 2 == 0 else inverted(data))
    assert device.call(lambda: device.loop.sessions["low"].holdings.swaps) == 3
    device.check()


def test_p0_gets_memory_when_the_answer_from_a_lower_class_is_sent(make_device, tmp_path, wis):
    """The lower class does nothing afterwards, and idle sessions would have to wait for a minute."""
    device = make_device(memory=40 * MIB, swap=swap(tmp_path, idle_ms=60_000))
    low, high = device.open("low", priority=4), device.open("high", priority=0)
    data = content(1, 32 * MIB)
    low.run(wis.body().alloc("x", len(data)), {"x": 1})
    low.write(1, data)
    low.sync()
    low.ask(1, len(data))
    wait(device, lambda: device.call(lambda: device.loop.sessions["low"].flow.lent))
    high.run(wis.body().alloc("x", 30 * MIB), {"x": 1})
    wait(device, lambda: vram_of(device, lambda v: v.preempting))
    assert low.take(len(data)) == data
    high.sync()
    assert device.residence() == {"low": "away", "high": "here"}
    device.check()


def test_p0_gets_memory_when_contents_of_a_lower_class_are_hashed(make_device, tmp_path, wis, monkeypatch):
    device = make_device(memory=10 * MIB, swap=swap(tmp_path, idle_ms=60_000))
    low, high = device.open("low", priority=4, scope=SHARED), device.open("high", priority=0)
    go_on, steps = threading.Event(), mover.HashJob.steps

    def slow(job):
        go_on.wait(WAIT_S)
        yield from steps(job)

    monkeypatch.setattr(mover.HashJob, "steps", slow)
    low.load(1, content(1, 8 * MIB))
    low.sync()
    high.run(wis.body().alloc("x", 8 * MIB), {"x": 1})
    try:
        wait(device, lambda: vram_of(device, lambda v: v.preempting))
    finally:
        go_on.set()
    high.sync()
    assert device.residence() == {"low": "away", "high": "here"}
    device.check()


def test_p0_waits_for_idle_sessions_if_memory_may_not_be_preempted(make_device, tmp_path, wis):
    settings = swap(tmp_path, idle_ms=60_000, patience_ms=1)
    settings = replace(settings, policy=replace(settings.policy, preempt=False))
    device = make_device(memory=10 * MIB, swap=replace(settings, policy=replace(settings.policy, idle_ns=300_000_000)))
    low, high = device.open("low", priority=4), device.open("high", priority=0)
    low.run(wis.body().alloc("x", 8 * MIB), {"x": 1})
    low.sync()
    begun = time.monotonic()
    high.run(wis.body().alloc("x", 8 * MIB), {"x": 1})
    high.sync()
    assert time.monotonic() - begun > 0.25  # the idle time, which no fast machine shortens


def test_preempted_session_that_cannot_be_copied_goes_on(make_device, tmp_path, wis, monkeypatch):
    device = make_device(memory=10 * MIB, swap=swap(tmp_path, host=0, idle_ms=60_000, patience_ms=100))
    low, high = device.open("low", priority=4), device.open("high", priority=0)
    data = content(3, 8 * MIB)
    low.run(wis.body().alloc("x", len(data)), {"x": 1})
    low.write(1, data)
    low.sync()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    high.run(wis.body().alloc("x", 8 * MIB), {"x": 1})
    low.run(in_place(wis, len(data)), {"x": 1})
    assert low.read(1, len(data)) == inverted(data)
    assert device.residence()["low"] == "here"
    device.check()


def test_work_during_a_swap_out_cancels_it(make_device, tmp_path, wis):
    """Whatever the timing, the bytes are right and every byte is on an account."""
    device = make_device(memory=40 * MIB, swap=swap(tmp_path))
    a, b = device.open("a"), device.open("b")
    data = content(1, 24 * MIB)
    a.run(wis.body().alloc("x", len(data)), {"x": 1})
    a.write(1, data)
    a.sync()
    for n in range(6):
        b.run(wis.body().alloc("x", 20 * MIB), {"x": 1})
        a.run(in_place(wis, 16), {"x": 1})
        b.run(wis.body().free("x"), {"x": 1})
        b.sync()
        assert struct.unpack("<B", a.read(1, 1))[0] == (1 if n % 2 else 254)
        device.check()
