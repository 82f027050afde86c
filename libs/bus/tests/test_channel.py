"""The data channel over real sockets: both ends, flow control, bulk frames, hostile peers, dead peers."""

import contextlib
import os
import random
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wooly_bus.channel import (
    ChannelClient,
    ChannelClosedError,
    ChannelServer,
    Connected,
    Disconnected,
    Endpoint,
    EndpointError,
    FrameReceived,
    ProtocolError,
)
from wooly_bus.channel.framing import ACK, END, HEADER, MAX_FRAME, MAX_REASON
from wooly_testkit.channel import acceptor_of, connect

HELLO, ECHO, BULK, DATA, HOLD, BYE = 2, 20, 21, 22, 23, 24


class EchoServer:
    """Echoes ECHO frames, stores BULK data, never acknowledges after HOLD."""

    def __init__(self, endpoint, **options):
        self.memory = bytearray(8 << 20)
        self.server = ChannelServer({BULK: 8}, self.sink, **options)
        self.acceptor = acceptor_of(self.server)
        self.endpoint = self.acceptor.listen(Endpoint.parse(endpoint))
        self.acceptor.start()
        self.seen, self.gone, self.stopping = [], [], False
        self.put_off, self.later = 0, []
        self.hold = False
        self.thread = threading.Thread(target=self.loop, daemon=True)
        self.thread.start()

    def sink(self, conn, kind, prefix, n):
        if self.put_off:
            self.put_off -= 1
            threading.Timer(0.02, lambda: (self.later.append(conn), self.server.wake())).start()
            return None
        at = int.from_bytes(prefix, "little")
        return memoryview(self.memory)[at : at + n]

    def loop(self):
        while not self.stopping:
            for event in self.server.poll(0.2):
                if isinstance(event, Connected):
                    event.conn.ack(1)
                elif isinstance(event, Disconnected):
                    self.gone.append(event.reason)
                elif isinstance(event, FrameReceived):
                    self.seen.append(event.kind)
                    if event.kind == BYE:
                        event.conn.close(event.payload.decode())
                    if event.kind == HOLD:
                        self.hold = True
                    if not self.hold:
                        event.conn.ack(event.seq)
                    if event.kind == ECHO:
                        event.conn.send(ECHO, event.payload)
                    if event.kind == DATA:
                        n = int.from_bytes(event.payload, "little")
                        for at in range(0, n, 1 << 20):
                            event.conn.send(DATA, memoryview(self.memory)[at : min(n, at + (1 << 20))])
            while self.later:
                self.later.pop().resume()
        self.acceptor.close()
        self.server.close()

    def stop(self):
        if not self.stopping:
            self.stopping = True
            self.server.wake()
        self.thread.join(5)


@pytest.fixture(params=["unix", "tcp"])
def echo(request, tmp_path):
    server = EchoServer(f"unix://{tmp_path}/s" if request.param == "unix" else "tcp://127.0.0.1:0")
    yield server
    server.stop()


def test_channel_frames_return_in_order(echo):
    client = connect(echo.endpoint)
    for n in (0, 1, 100, 70_000):
        client.send(ECHO, b"a" * n, b"", b"b" * 3)
        assert client.recv(5).payload == b"a" * n + b"bbb"
    assert client.acked == 5 and client.in_flight == 0
    client.close()


def test_channel_frames_that_arrive_together_are_received_in_order(echo):
    """Both ends read ahead: small frames, a payload that is longer than one receive, and bulk data between small frames."""
    client = connect(echo.endpoint)
    data = random.Random(0).randbytes(10_000)
    sizes = (3, 0, 5000, 1, 4096, 4080, 2, 20_000, 7)
    parts, seq = [], client._sent
    for n in sizes:
        parts += [HEADER.pack(n, ECHO, 0, 0, seq := seq + 1), bytes([n % 251]) * n]
    parts += [HEADER.pack(8 + len(data), BULK, 0, 0, seq := seq + 1), (64).to_bytes(8, "little"), data]
    parts += [HEADER.pack(4, ECHO, 0, 0, seq + 1), b"last"]
    client._sock.sendall(b"".join(parts))
    client._sent = seq + 1
    assert [client.recv(5).payload for _ in sizes] == [bytes([n % 251]) * n for n in sizes]
    assert client.recv(5).payload == b"last" and echo.memory[64 : 64 + len(data)] == data
    client.close()


def test_channel_small_answers_have_one_acknowledgement_behind_them(echo):
    """An answer must not come behind the acknowledgement of its frame: who sees the acknowledgement knows of all failures."""
    client = connect(echo.endpoint)
    client.hold(2)
    for n in (1, 2, 3):
        client.send(ECHO, b"a" * n)
    client._sock.settimeout(5)
    got, kinds = b"", []
    while not kinds or kinds[-1][0] != ACK or kinds[-1][1] < 4:
        got += client._sock.recv(4096)
        kinds, at = [], 0
        while len(got) - at >= HEADER.size:
            length, kind, _, _, seq = HEADER.unpack_from(got, at)
            at += HEADER.size + length
            kinds.append((kind, seq))
    answers = [kinds.index((ECHO, seq)) for seq in (1, 2, 3)]
    # the server may read the three frames in one turn or in several; each turn has one acknowledgement, behind its answers
    for place, (kind, seq) in enumerate(kinds):
        if kind == ACK:
            assert all(answers[frame - 2] < place for frame in range(2, seq + 1)), kinds
    assert len(kinds) - 3 <= 3, kinds
    client.close()


def test_channel_acknowledgement_behind_an_answer_is_processed_with_it(echo):
    """It must not stay until the next receive: a sender that needs room would wait for the system instead."""
    client = connect(echo.endpoint)
    first, second = client.expect_frame(), client.expect_frame()
    client._ahead[: 3 * HEADER.size] = b"".join(
        (HEADER.pack(0, ECHO, 0, 0, 1), HEADER.pack(0, ECHO, 0, 0, 2), HEADER.pack(0, ACK, 0, 0, 3))
    )
    client._ahead_at, client._ahead_end = 0, 3 * HEADER.size
    client._sent = 3
    client.complete(first)
    assert first.done and second.done and client.acked == 3 and client._ahead_at == client._ahead_end
    client.close()


@pytest.mark.parametrize("then", ["send", "wait", "poll"])
def test_channel_held_frame_is_sent_with_the_next_one_or_before_a_wait(echo, then):
    client = connect(echo.endpoint)
    payload = bytearray(b"held")
    client.hold()
    client.send(ECHO, payload)
    payload[:] = b"over"
    assert client._held
    if then == "send":
        client.send(ECHO, b"next")
    elif then == "poll":
        with contextlib.suppress(ProtocolError):  # the echo may have arrived, and nobody has announced it
            client.poll_acks()
    if then in ("send", "wait"):
        assert client.recv(5).payload == b"held"
        assert then == "wait" or client.recv(5).payload == b"next"
    deadline = time.monotonic() + 10
    while echo.seen.count(ECHO) < (2 if then == "send" else 1):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not client._held
    client.close()


def test_channel_several_held_frames_are_sent_with_the_first_that_is_not(echo, monkeypatch):
    client = connect(echo.endpoint)
    writes, write = [], client._write
    monkeypatch.setattr(client, "_write", lambda buffers, size: (writes.append(size), write(buffers, size)))
    client.hold(3)
    client.send(ECHO, b"a")
    client.send(ECHO, b"b")
    client.hold(0)
    assert not writes
    client.send(ECHO, b"c")
    assert [client.recv(5).payload for _ in range(3)] == [b"a", b"b", b"c"]
    assert writes == [3 * (HEADER.size + 1)]
    client.send(ECHO, b"d")
    assert client.recv(5).payload == b"d" and writes == [3 * (HEADER.size + 1), HEADER.size + 1]
    client.close()


def test_channel_large_frame_is_not_held(echo):
    client = connect(echo.endpoint)
    client.hold()
    client.send(ECHO, b"a" * 100_000)
    assert not client._held and client.recv(5).payload == b"a" * 100_000
    client.hold()
    client.send(ECHO, b"b")
    client.send(ECHO, b"c" * 100_000)
    assert [len(client.recv(5).payload) for _ in range(2)] == [1, 100_000]
    client.close()


def test_channel_frames_read_ahead_of_a_paused_connection_arrive_after_resume(tmp_path):
    server = ChannelServer()
    acceptor = acceptor_of(server)
    endpoint = acceptor.listen(Endpoint.parse(f"unix://{tmp_path}/s"))
    acceptor.start()
    try:
        client = connect(endpoint)
        (conn,) = [e.conn for e in server.poll(5) if isinstance(e, Connected)]
        for n in range(200):
            client.send(ECHO, bytes([n]))
        found = []
        while len(found) < 200:
            found += [e.payload[0] for e in server.poll(5) if isinstance(e, FrameReceived)]
            conn.pause()
            assert not [e for e in server.poll(0) if isinstance(e, FrameReceived)]
            conn.resume()
        assert found == list(range(200))
        client.close()
    finally:
        acceptor.close()
        server.close()


def test_frames_sent_before_a_hangup_arrive_although_an_answer_could_not_be_sent(tmp_path):
    """The server writes before it reads that the client has closed the connection."""
    server = ChannelServer()
    acceptor = acceptor_of(server)
    endpoint = acceptor.listen(Endpoint.parse(f"unix://{tmp_path}/s"))
    acceptor.start()
    try:
        client = connect(endpoint)
        (conn,) = [e.conn for e in server.poll(5) if isinstance(e, Connected)]
        conn.ack(1)
        server.poll(0)
        payloads = [bytes([n]) * n for n in range(20)] + [b"x" * 10_000]
        for payload in payloads:
            client.send(ECHO, payload)
        client.await_end(0.01)  # so that no byte is unread: a reset would drop what was sent
        client.close()
        conn.send(ECHO, b"late")
        events = []
        while not events or not isinstance(events[-1], Disconnected):
            events += server.poll(5)
        assert [e.payload for e in events if isinstance(e, FrameReceived)] == payloads
        assert (events[-1].reason, events[-1].hung_up) == ("", True)
    finally:
        acceptor.close()
        server.close()


@given(sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=20))
@settings(max_examples=25, deadline=None)
def test_channel_frames_of_any_size_are_echoed(sizes):
    path = f"/tmp/wooly-test-{os.getpid()}-{random.random()}"
    server = EchoServer(f"unix://{path}")
    try:
        client = connect(server.endpoint)
        for n in sizes:
            client.send(ECHO, bytes([n % 251]) * n)
        for n in sizes:
            assert client.recv(5).payload == bytes([n % 251]) * n
        client.close()
    finally:
        server.stop()


@pytest.mark.parametrize("why", ["enough is enough", "ü" * MAX_REASON])
def test_waiting_client_gets_reason_of_close(echo, why):
    client = connect(echo.endpoint)
    client.send(ECHO, b"before")
    client.send(BYE, why.encode())
    assert client.recv(5).payload == b"before"
    with pytest.raises(ChannelClosedError) as caught:
        client.recv(5)
    assert str(caught.value) == why.encode()[:MAX_REASON].decode()
    client.close()


def test_sending_client_gets_reason_of_close(echo):
    """Frames before the END frame are processed: acknowledgements, expected data, an unexpected answer."""
    client = connect(echo.endpoint)
    into = bytearray(100)
    expected = client.expect(memoryview(into), DATA)
    client.send(DATA, len(into).to_bytes(8, "little"))
    client.send(ECHO, b"nobody waits")
    client.send(BYE, b"enough is enough")
    deadline = time.monotonic() + 5
    with pytest.raises(ChannelClosedError, match=r"^enough is enough$"):
        while time.monotonic() < deadline:
            client.send(ECHO, b"more")
            time.sleep(0.001)  # without a pause, the server's thread of this process would not run
    assert expected.done and expected.other is None
    with pytest.raises(ChannelClosedError):
        client.send(ECHO, b"more")
    client.close()


def test_bulk_data_arrives_in_place_both_ways(echo):
    client = connect(echo.endpoint)
    data = os.urandom(5 << 20)
    for at in range(0, len(data), 1 << 20):
        client.send(BULK, at.to_bytes(8, "little"), memoryview(data)[at : at + (1 << 20)])
    into = bytearray(len(data))
    client.send(DATA, len(data).to_bytes(8, "little"))
    assert client.recv_data(memoryview(into), DATA) is None
    assert into == data and echo.memory[: len(data)] == data
    client.close()


def test_expected_data_is_filled_by_next_receive(echo):
    client = connect(echo.endpoint)
    data = os.urandom(3 << 20)
    client.send(BULK, (0).to_bytes(8, "little"), data)
    parts = [bytearray(n) for n in (5, len(data), 7)]
    coming = []
    for into in parts:
        client.send(DATA, len(into).to_bytes(8, "little"))
        coming.append(client.expect(memoryview(into), DATA))
    client.send(ECHO, b"after")
    client.complete(coming[0])
    assert [c.done for c in coming] == [True, False, False] and parts[0] == data[:5]
    assert client.recv(5).payload == b"after"
    assert all(c.done and c.other is None for c in coming) and [bytes(p) for p in parts] == [
        data[: len(p)] for p in parts
    ]
    client.send(DATA, (4).to_bytes(8, "little"))
    last, none = client.expect(memoryview(bytearray(4)), DATA), client.expect(memoryview(b""), DATA)
    while not last.done:
        client.poll_acks()
    assert none.done
    client.send(ECHO, b"instead")
    other = client.expect(memoryview(bytearray(1)), DATA)
    client.complete(other)
    assert other.other is not None and other.other.payload == b"instead"
    client.close()


def test_bulk_frame_waits_until_sink_is_ready(echo):
    echo.put_off = 2
    client = connect(echo.endpoint)
    client.send(BULK, (0).to_bytes(8, "little"), b"later")
    client.send(ECHO, b"x")
    assert client.recv(5).payload == b"x" and echo.memory[:5] == b"later" and echo.put_off == 0
    client.close()


def test_client_without_acknowledgements_stops_at_window(echo):
    client = connect(echo.endpoint)
    client.window = 100_000
    client.send(HOLD)
    sent = []

    def push():
        with contextlib.suppress(ChannelClosedError):
            for _ in range(10):
                client.send(BULK, (0).to_bytes(8, "little"), b"z" * 30_000)
                sent.append(1)

    thread = threading.Thread(target=push, daemon=True)
    thread.start()
    time.sleep(0.3)
    assert len(sent) == 3 and client.in_flight <= 100_000
    echo.stop()
    thread.join(5)
    assert not thread.is_alive() and len(sent) == 3
    client.close()


@pytest.mark.parametrize(
    "hostile",
    [
        os.urandom(4096),
        HEADER.pack(MAX_FRAME + 1, ECHO, 0, 0, 2),
        HEADER.pack(0, ECHO, 1, 0, 2),
        HEADER.pack(0, ECHO, 0, 0, 7),
        HEADER.pack(4, ACK, 0, 0, 1) + b"1234",
        HEADER.pack(4, BULK, 0, 0, 2) + b"1234",
        HEADER.pack(100, ECHO, 0, 0, 2) + b"cut",
    ],
    ids=["garbage", "oversize", "flags", "sequence", "ack-with-payload", "bulk-too-short", "truncated"],
)
def test_hostile_client_is_closed_and_does_not_affect_others(echo, hostile):
    good = connect(echo.endpoint)
    address = echo.endpoint
    bad = socket.socket(socket.AF_UNIX) if address.scheme == "unix" else socket.socket()
    bad.connect(address.path if address.scheme == "unix" else (address.host, address.port))
    bad.sendall(HEADER.pack(0, HELLO, 0, 0, 1) + hostile)
    with contextlib.suppress(OSError):  # the connection is already refused and closed
        bad.shutdown(socket.SHUT_WR)
    bad.settimeout(5)
    try:
        while said := bad.recv(4096):
            assert said[4] in (ACK, END)  # the acknowledgement of the hello, or the reason
    except ConnectionResetError:
        bad.close()
    deadline = time.monotonic() + 5
    while not echo.gone and time.monotonic() < deadline:
        time.sleep(0.01)
    assert echo.gone[0]
    good.send(ECHO, b"still here")
    assert good.recv(5).payload == b"still here"
    good.close()
    bad.close()


def test_dead_server_is_detected_at_once(echo):
    client = connect(echo.endpoint)
    client.send(ECHO, b"x")
    client.recv(5)
    echo.stop()
    with pytest.raises(ChannelClosedError):
        for _ in range(100):
            client.send(ECHO, b"x" * 100_000)
            client.recv(5)
    client.close()


def test_unix_socket_with_a_path_longer_than_an_address_connects(tmp_path):
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    server = EchoServer(f"unix://{folder}/x.sock")
    try:
        client = connect(server.endpoint)
        client.send(ECHO, b"here")
        assert client.recv(5).payload == b"here"
        client.close()
    finally:
        server.stop()
    held = [str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    assert str(folder) not in held, "the folder stays open"
    with pytest.raises(ChannelClosedError, match="No such file"):
        ChannelClient.connect(Endpoint.parse(f"unix://{folder}/nothing"))


def test_connect_without_listener_raises(tmp_path):
    with pytest.raises(ChannelClosedError, match="No such file"):
        ChannelClient.connect(Endpoint.parse(f"unix://{tmp_path}/nothing"))


@pytest.mark.parametrize("held", [0, 1])
def test_send_that_fails_before_it_writes_uses_up_no_frame_number(echo, held):
    """A RecursionError may end a send anywhere; the next one goes on, and no held frame is lost."""
    client = connect(echo.endpoint)

    def send_below(depth, send):
        return send() if not depth else send_below(depth - 1, send)

    def deepest(send):
        """Send at the smallest depth at which there is no RecursionError, after all larger ones."""
        failed = 0
        for depth in range(sys.getrecursionlimit(), 0, -1):
            try:
                send_below(depth, send)
            except RecursionError:
                failed += 1
            else:
                return failed
        raise AssertionError("no send succeeded")

    client.hold(held)
    for n in range(2):
        assert deepest(lambda n=n: client.send(ECHO, bytes([n]))) > 0
    assert deepest(lambda: client.send_bulk(BULK, (8).to_bytes(8, "little"), b"x" * 1000)) > 0
    client.send(DATA, (4).to_bytes(8, "little"))
    received = [client.recv(5).payload for _ in range(3)]
    assert received == [b"\0", b"\1", bytes(echo.memory[:4])] and bytes(echo.memory[8:1008]) == b"x" * 1000
    client.close()


def test_send_oversize_frame_raises():
    near, far = socket.socketpair()
    with near, far, pytest.raises(ProtocolError):
        ChannelClient(near).send(ECHO, b"x" * (MAX_FRAME + 1))


@pytest.mark.parametrize(
    "text", ["unix:///a/b", "tcp://127.0.0.1:80", "tls://h:1", "nats://h:4222#wooly.x", "tcp://[::1]:9"]
)
def test_endpoint_text_round_trips(text):
    assert str(Endpoint.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "http://x:1", "unix://host/x", "tcp://h", "tcp://h:99999", "nats://h:1", "tcp://h:1#x"]
)
def test_endpoint_of_other_form_is_refused(text):
    with pytest.raises(EndpointError):
        Endpoint.parse(text)


@pytest.mark.parametrize("selectable", [1024, 0], ids=["exact", "whole milliseconds"])
def test_channel_events_come_during_short_waits(tmp_path, monkeypatch, selectable):
    monkeypatch.setattr("wooly_bus.channel.server._SELECTABLE", selectable)
    server = ChannelServer()
    acceptor = acceptor_of(server)
    endpoint = acceptor.listen(Endpoint.parse(f"unix://{tmp_path}/s"))
    acceptor.start()

    def next_events():
        until = time.monotonic() + 30
        while not (found := server.poll(0.0003)) and time.monotonic() < until:
            pass
        return found

    try:
        client = connect(endpoint)
        (connected,) = next_events()
        assert isinstance(connected, Connected)
        for n in range(20):
            client.send(ECHO, bytes([n]))
            (frame,) = next_events()
            assert frame.payload == bytes([n])
        assert server.poll(0.0003) == []
        client.close()
    finally:
        acceptor.close()
        server.close()
