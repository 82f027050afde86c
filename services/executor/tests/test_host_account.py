"""Tests of the limits of host memory per session, and that only the session that exceeds a limit ends."""

import contextlib
import gc
import socket
import threading
import time

import pytest
from wooly_bus.channel import ChannelError
from wooly_bus.channel.framing import HEADER, MAX_FRAME
from wooly_executor import upload_targets
from wooly_executor.host_account import Holder, HostLimits, HostUse, session_to_end
from wooly_executor.runs import LOST_AT_ONCE, Runs
from wooly_executor.session_programs import SessionPrograms
from wooly_wis.frames import CONTENT, MAX_CHUNK, READ_HEAD, Kind, pack_json
from wooly_wis.limits import MAX_FREES, MAX_REFERENCES

NONE = HostUse(0, 0, 0, 0, 0, 0)
CHUNK = 64 << 10


def use(**more):
    return HostUse(**{n: more.get(n, 0) for n in ("queue", "answers", "definitions", "decoded", "sources", "buffers")})


def test_host_account_below_all_limits_ends_no_session():
    holders = [Holder(f"s{k}", "a", use(decoded=100, queue=1)) for k in range(10)]
    assert session_to_end(holders, HostLimits(session=200, executor=200), decoded=100) is None
    assert session_to_end([], HostLimits(), decoded=0) is None


def test_host_account_session_above_its_limit_ends_with_the_parts():
    holders = [Holder("s", "a", NONE), Holder("t", "b", use(answers=60, queue=50, definitions=1000))]
    name, why = session_to_end(holders, HostLimits(session=100), decoded=0)
    assert name == "t" and "110 bytes of the executor's host memory (answers 60, queue 50), at most 100" in why


def test_host_account_above_the_total_limit_ends_the_largest_session_of_the_largest_tenant():
    holders = [Holder("alice", "a", use(answers=50))]
    holders += [Holder(f"bob{k}", "b", use(answers=20 + k)) for k in range(4)]
    name, why = session_to_end(holders, HostLimits(executor=100), decoded=0)
    assert name == "bob3" and "136 bytes of the executor's host memory, at most 100" in why


def test_host_account_shared_programs_count_once():
    holders = [Holder(f"s{k}", "a", use(decoded=90)) for k in range(10)]
    assert session_to_end(holders, HostLimits(executor=100), decoded=90) is None
    assert session_to_end(holders, HostLimits(executor=100), decoded=101) is not None


# -- answers ---------------------------------------------------------------------------------------------------------


def stocked(device, wis, name, nbytes=1 << 20):
    client = device.open(name)
    client.run(wis.body().alloc("x", nbytes), {"x": 1})
    client.sync()
    return client


def until(true):
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def waiting(device, name):
    session = device.loop.sessions.get(name)
    return None if session is None else session.host_use().answers


def test_answers_unread_make_the_session_wait_until_the_client_reads(make_device, wis):
    device = make_device(limits=HostLimits(answers=1 << 20))
    a, b = stocked(device, wis, "a"), stocked(device, wis, "b")
    a.write(1, bytes(range(256)) * 256)
    for _ in range(1000):
        a.ask(1, CHUNK)
    deadline = time.monotonic() + 30
    while not device.call(lambda: device.loop.sessions["a"].flow.unread):
        assert time.monotonic() < deadline
    for _ in range(50):
        assert b.read(1, 4) == bytes(4)
    assert device.call(lambda: waiting(device, "a")) < (1 << 20) + 2 * CHUNK
    for _ in range(1000):
        assert a.take(CHUNK) == bytes(range(256)) * 256
    assert a.sync() == {} and device.call(lambda: waiting(device, "a")) == 0


def test_answers_small_and_unread_are_limited_by_number(make_device, wis):
    device = make_device(limits=HostLimits(answers=64 << 20))
    a, b = stocked(device, wis, "a"), device.open("b")

    def ask():
        with contextlib.suppress(ChannelError):
            for _ in range(60_000):
                a.ask(1, 300)

    asking = threading.Thread(target=ask)
    asking.start()
    deadline = time.monotonic() + 60
    while not device.call(lambda: device.loop.sessions["a"].flow.unread):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert device.call(lambda: device.loop.sessions["a"].conn.queued_pieces) <= 8192 + 4
    assert b.sync() == {}
    a.channel.abort()
    asking.join()


@pytest.mark.parametrize("nbytes", [CHUNK, 64 << 20], ids=["copied", "lent"])
def test_answers_unread_for_too_long_end_the_session_only(make_device, wis, caplog, nbytes):
    device = make_device(limits=HostLimits(answers=1 << 20, answers_s=0.2))
    a, b = stocked(device, wis, "a", 64 << 20), stocked(device, wis, "b")
    for _ in range(500):
        a.ask(1, nbytes)
    device.wait_closed("a")
    assert b.read(1, 4) == bytes(4)
    with pytest.raises(ChannelError):  # the reason could not be sent
        for _ in range(500):
            a.take(nbytes)
    assert "its client has read nothing for 0.2 s" in caplog.text


def test_answers_read_slowly_keep_the_session_open(make_device, wis):
    device = make_device(limits=HostLimits(answers=1 << 20, answers_s=1.0))
    a = stocked(device, wis, "a", 64 << 20)
    a.ask(1, 64 << 20)
    into, taken = bytearray(4 << 20), 0
    begun = time.monotonic()
    while taken < 64 << 20:
        frame = a.channel.recv_data(memoryview(into), Kind.DATA)
        assert frame is None
        taken += len(into)
        time.sleep(0.1)
    assert time.monotonic() - begun > 1.5 and a.sync() == {}


def test_answers_large_from_a_separate_device_are_sent_in_pieces(make_device, wis, monkeypatch):
    device = make_device(limits=HostLimits(answers=1 << 20))
    a = device.open("a")
    content = bytes(range(256)) * (3 << 14)
    a.run(wis.body().alloc("x", len(content)), {"x": 1})
    a.write(1, content)
    a.sync()
    pieces = []
    seen = device.loop.runtime.device
    read = seen.read

    def copied(memory):
        pieces.append(len(memory))
        return memoryview(bytes(read(memory)))

    monkeypatch.setattr(seen, "read", copied)
    monkeypatch.setattr(seen, "host", False)
    try:
        assert a.read(1, len(content)) == content
    finally:
        monkeypatch.undo()
    assert len(pieces) == 3 and max(pieces) <= MAX_CHUNK


# -- what else there is ----------------------------------------------------------------------------------------------


def test_stats_report_the_host_memory(device, wis):
    a = stocked(device, wis, "a")
    stats = a.stats()
    assert stats["host_definitions"] > 0 and stats["host_decoded"] > 10 * stats["host_definitions"]
    assert stats["host_buffers"] == 600 and stats["host_sources"] == 0
    assert stats["host_total"] >= stats["host_decoded"] + stats["host_buffers"]


def test_write_without_a_valid_target_takes_no_memory(device, wis, monkeypatch):
    a = device.open("a")
    assert memoryview is type(upload_targets._DROPPED)
    for k in range(40):
        a.write(1000 + k, bytes(MAX_CHUNK))
    with pytest.raises(wis.error, match="buffer 1000 does not exist"):
        a.sync()
    gc.collect()
    assert not [o for o in gc.get_objects() if type(o) is bytearray and len(o) >= MAX_CHUNK]


@pytest.mark.parametrize("error", [MemoryError("no bytes"), RecursionError("too deep")])
def test_memory_error_at_a_frame_ends_the_session_not_the_loop(device, wis, monkeypatch, error):
    a, b = stocked(device, wis, "a"), stocked(device, wis, "b")
    copied = device.loop.runs.copied

    def fails(session, *args, **kwargs):
        if session.id == "a":
            raise error
        return copied(session, *args, **kwargs)

    monkeypatch.setattr(device.loop.runs, "copied", fails)
    a.ask(1, 4)
    device.wait_closed("a")
    with pytest.raises(ChannelError, match=f"executor.host_memory: .*{error}"):
        a.take(4)
    assert b.read(1, 4) == bytes(4)


def test_memory_error_at_a_run_or_definition_ends_the_session(device, wis, monkeypatch):
    a, b, c = [stocked(device, wis, name) for name in "abc"]

    def fails(*args, **kwargs):
        raise MemoryError

    for name, client, method in (("a", a, (Runs, "begin")), ("b", b, (SessionPrograms, "define"))):
        with monkeypatch.context() as patch:
            patch.setattr(*method, fails)
            with contextlib.suppress(ChannelError):  # the session may end before all frames are sent
                client.run(wis.body().alloc("y", 4), {"y": 9})
            device.wait_closed(name)
    assert c.read(1, 4) == bytes(4)


def test_session_above_the_host_limit_ends_alone_with_the_parts(make_device, wis):
    device = make_device(limits=HostLimits(session=300_000))
    a, b = stocked(device, wis, "a"), stocked(device, wis, "b")
    for k in range(1000):
        body = wis.body()
        body.alloc("x", 4)
        a.run(body, {"x": 10 + k})
    device.wait_closed("a")
    with pytest.raises(ChannelError, match=r"buffers .* at most 300000 are allowed .WOOLY_EXECUTOR_SESSION_HOST"):
        a.sync()
    assert b.read(1, 4) == bytes(4)


def test_pin_frame_too_large_is_refused(device, wis):
    a = device.open("a")
    a.channel.send(Kind.PIN, pack_json({"do": "list", "name": "x" * 10_000}))
    with pytest.raises(wis.error, match=r"PIN frame has .* bytes, at most 4096 are allowed"):
        a.answer()


def test_read_of_zero_bytes_is_answered(device, wis):
    a = stocked(device, wis, "a")
    a.channel.send(Kind.READ, READ_HEAD.pack(1, 0, 0))
    frame = a.channel.recv(30)
    assert frame.kind == Kind.DATA and not frame.payload


@pytest.mark.parametrize("kind", ["bindings", "frees"])
def test_run_with_too_many_bindings_is_refused_before_unpacking(device, wis, kind):
    a, b = stocked(device, wis, "a"), stocked(device, wis, "b")
    many = range(10, 10 + (1 << 20))
    a.start(b"?" * 32, many if kind == "bindings" else (), b"", many if kind == "frees" else ())
    with pytest.raises(wis.error, match=rf"RUN frame has .*1048576 .*limits are {MAX_REFERENCES}, .* and {MAX_FREES}"):
        a.sync()
    assert device.held()["a"][1] == 1 and b.read(1, 4) == bytes(4)


def test_run_of_an_unknown_program_poisons_few_unknown_buffers(device, wis):
    a = stocked(device, wis, "a")
    a.start(b"?" * 32, [*range(10, 10 + MAX_REFERENCES - 1), 1])
    with pytest.raises(wis.error, match="has not defined"):
        a.sync()
    assert device.held()["a"][1] == 1 + LOST_AT_ONCE
    with pytest.raises(wis.error, match="has not defined"):
        a.read(1, 4)


def test_frame_being_received_counts_as_host_memory(device, wis):
    a = stocked(device, wis, "a")
    a.sync()
    before = device.call(lambda: device.loop.sessions["a"].host_use().queue)
    a.channel._sock.sendall(HEADER.pack(MAX_FRAME, Kind.DEFINE, 0, 0, a.channel._sent + 1))
    until(lambda: device.call(lambda: device.loop.sessions["a"].host_use().queue) - before >= MAX_FRAME)


def test_acknowledgements_unread_replace_each_other(device, wis):
    a = stocked(device, wis, "a")
    conn = device.call(lambda: device.loop.sessions["a"].conn)
    conn.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    a.write(1, bytes(1 << 20))
    for _ in range(40):
        a.ask(1, 64 << 10)
    until(lambda: device.call(lambda: conn._ack) == a.channel._sent)
    before = device.call(lambda: conn.queued_pieces)
    for _ in range(100):
        a.channel.send(Kind.SEAL, CONTENT.pack(1, 1 << 20, 0, bytes(32)))
        until(lambda seq=a.channel._sent: device.call(lambda: conn._ack) == seq)
    assert before > 40 and device.call(lambda: conn.queued_pieces) <= before + 1
