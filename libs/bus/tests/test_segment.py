"""Shared memory of a data channel: both ends, rings, and clients that offer something else."""

import contextlib
import ctypes
import fcntl
import gc
import itertools
import mmap
import os
import re
import socket
import struct
import threading
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wooly_bus.channel import (
    ChannelClient,
    ChannelServer,
    Connected,
    Disconnected,
    Endpoint,
    FrameReceived,
    ProtocolError,
)
from wooly_bus.channel.acceptor import StrangerLimits
from wooly_bus.channel.framing import HEADER, SHARED
from wooly_bus.channel.pinned_area import PinnedArea
from wooly_bus.channel.segment import (
    LEAST,
    PLACE,
    RING,
    SEGMENT,
    SHARED_FROM,
    Ring,
    Segment,
    SegmentError,
    accepted,
    offered_memory,
)
from wooly_testkit.channel import acceptor_of

pytestmark = pytest.mark.skipif(offered_memory() is None, reason="this system has no memfd")
HELLO, BULK, DATA, READY = 2, 21, 22, 23
PIECE = 1 << 20
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Store:
    """A server with memory that BULK frames write, and DATA frames read."""

    def __init__(self, path, limits=None):
        self.memory = bytearray(64 << 20)
        self.server = ChannelServer({BULK: 8}, self.sink)
        self.acceptor = acceptor_of(self.server, **({} if limits is None else {"limits": limits}))
        self.endpoint = self.acceptor.listen(Endpoint.parse(f"unix://{path}"))
        self.acceptor.start()
        self.connections, self.gone, self.shared = [], [], []
        self.stopping = False
        self.thread = threading.Thread(target=self.loop, daemon=True)
        self.thread.start()

    def sink(self, conn, kind, prefix, nbytes):
        at = int.from_bytes(prefix, "little")
        return memoryview(self.memory)[at : at + nbytes]

    def loop(self):
        while not self.stopping:
            for event in self.server.poll(0.2):
                if isinstance(event, Connected):
                    segment = event.conn.segment
                    self.connections.append(event.conn)
                    self.shared.append(segment)
                    event.conn.ack(1)
                    event.conn.send(READY, struct.pack("<Q", 0 if segment is None else segment.nbytes))
                elif isinstance(event, Disconnected):
                    self.gone.append(event.reason)
                elif isinstance(event, FrameReceived):
                    event.conn.ack(event.seq)
                    if event.kind == DATA:
                        at, nbytes = struct.unpack("<QQ", event.payload)
                        for k in range(at, at + nbytes, PIECE):
                            event.conn.send_bulk(DATA, memoryview(self.memory)[k : min(k + PIECE, at + nbytes)])
        self.acceptor.close()
        self.server.close()

    def stop(self):
        self.stopping = True
        self.server.wake()
        self.thread.join(5)


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path / "s")
    yield made
    made.stop()


def connect(store):
    """A client that shares memory with the server."""
    client = ChannelClient.connect(store.endpoint)
    client.send_hello(HELLO, b"")
    client.share(struct.unpack("<Q", client.recv(5).payload)[0])
    return client


def upload(client, at, data):
    """Send data in pieces, and wait until the server has all."""
    for k in range(0, len(data), PIECE):
        client.send_bulk(BULK, struct.pack("<Q", at + k), data[k : k + PIECE])


def download(client, at, nbytes):
    """Read bytes of the server's memory."""
    into = bytearray(nbytes)
    client.send(DATA, struct.pack("<QQ", at, nbytes))
    assert client.recv_data(memoryview(into), DATA) is None
    return bytes(into)


def wait_until(condition):
    """Wait for a condition of another thread."""
    event = threading.Event()
    for _ in range(1000):
        if condition():
            return
        event.wait(0.01)
    raise AssertionError("the condition has not become true within 10 s")


def descriptors():
    """Number of open descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def memory(nbytes, seals=SEALS, flags=os.MFD_ALLOW_SEALING):
    """A memfd as a client may make it."""
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | flags)
    os.ftruncate(descriptor, nbytes)
    if seals:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def hello(store, descriptors):
    """Say hello with these descriptors. Returns the socket."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(5)
    sock.connect(store.endpoint.path)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
    sock.sendmsg([HEADER.pack(0, HELLO, 0, 0, 1)], rights)
    return sock


def refusal(sock):
    """The text of the refusal that a socket receives."""
    with sock:
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := sock.recv(4096):
                received += piece
    return received[HEADER.size :].decode()


# -- both ends ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, SHARED_FROM - 1, SHARED_FROM, PIECE, 3 * RING + 12345])
def test_channel_with_segment_transfers_data_unchanged(store, nbytes):
    client = connect(store)
    data = os.urandom(nbytes)
    upload(client, 5, memoryview(data))
    assert download(client, 5, nbytes) == data
    assert bytes(store.memory[5 : 5 + nbytes]) == data
    client.close()


def test_large_data_passes_through_segment_and_small_data_through_socket(store):
    client = connect(store)
    untouched = store.connections[0].shared_bytes
    upload(client, 0, bytes(SHARED_FROM - 1))
    assert len(download(client, 0, SHARED_FROM - 1)) == SHARED_FROM - 1
    assert store.connections[0].shared_bytes == untouched
    upload(client, 0, bytes(SHARED_FROM))
    assert len(download(client, 0, SHARED_FROM)) == SHARED_FROM
    assert store.connections[0].shared_bytes == untouched + 2 * SHARED_FROM
    client.close()


def test_server_without_segment_uses_socket(tmp_path):
    store = Store(tmp_path / "s", StrangerLimits(segment=0))
    client = connect(store)
    assert client.segment is None and store.shared == [None]
    data = os.urandom(3 << 20)
    upload(client, 0, data)
    assert download(client, 0, len(data)) == data
    client.close()
    store.stop()


def test_client_that_offers_nothing_uses_socket(store):
    client = ChannelClient.connect(store.endpoint)
    client.send(HELLO)
    assert client.recv(5).payload == bytes(8)
    data = os.urandom(3 << 20)
    upload(client, 0, data)
    assert download(client, 0, len(data)) == data
    client.close()


def test_closed_connection_frees_segment_on_both_ends(store):
    before = descriptors()
    client = connect(store)
    upload(client, 0, bytes(4 << 20))
    download(client, 0, 4 << 20)
    client.close()
    wait_until(lambda: store.gone)
    assert store.shared[0].descriptor == -1 and client.segment is None
    wait_until(lambda: descriptors() == before)


def test_client_that_ends_inside_an_upload_leaves_the_server_to_others(store):
    client = connect(store)
    client._write([HEADER.pack(8 + PLACE.size, BULK, SHARED, 0, 2)], HEADER.size)
    client.close()
    wait_until(lambda: store.gone)
    assert store.gone == ["the connection ended inside a frame"]
    other = connect(store)
    upload(other, 0, b"x" * PIECE)
    assert download(other, 0, PIECE) == b"x" * PIECE
    other.close()


def test_download_waits_for_a_client_that_reads_later(store):
    client = connect(store)
    into = bytearray(4 * RING)
    client.send(DATA, struct.pack("<QQ", 0, 2 * RING))
    client.send(DATA, struct.pack("<QQ", 0, 2 * RING))
    conn = store.connections[0]
    wait_until(lambda: conn._ring_full)
    store.memory[-1:] = b"z"
    assert client.recv_data(memoryview(into), DATA) is None
    wait_until(lambda: not conn.queued_bytes)
    client.close()


# -- clients that offer something else ------------------------------------------------------------------------------


def pipe():
    """A descriptor that is no memory."""
    reader, writer = os.pipe()
    os.close(writer)
    return reader


def huge():
    """Memory of huge pages, of which the system may run out."""
    try:
        return memory(LEAST, flags=os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    except OSError:
        pytest.skip("this system has no huge pages")


def file(tmp_path):
    """A descriptor of a file, which anybody may truncate."""
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    os.truncate(path, LEAST)
    return os.open(path, os.O_RDWR)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda _: pipe(), "not one of shared memory"),
        (file, "not one of shared memory|may change its size"),
        (lambda _: memory(LEAST, 0, 0), "may change its size"),
        (lambda _: memory(LEAST, fcntl.F_SEAL_GROW), "may change its size"),
        (lambda _: huge(), "huge pages"),
        (lambda _: memory(LEAST - 1), "at least 33554432 are needed"),
        (lambda _: memory(0), "at least 33554432 are needed"),
        (lambda _: memory(LEAST, SEALS | fcntl.F_SEAL_WRITE), "cannot be mapped"),
    ],
    ids=["pipe", "file", "no seals", "may shrink", "huge pages", "small", "empty", "read only"],
)
def test_other_descriptor_is_refused_and_closed(store, tmp_path, make, why):
    before = descriptors()
    descriptor = make(tmp_path)
    sock = hello(store, [descriptor])
    os.close(descriptor)
    answer = refusal(sock)
    assert answer.startswith("channel.segment: ") and re.search(why, answer)
    wait_until(lambda: descriptors() == before)
    other = connect(store)
    upload(other, 0, b"y" * PIECE)
    assert download(other, 0, PIECE) == b"y" * PIECE
    other.close()


def test_several_descriptors_are_refused_and_closed(store):
    before = descriptors()
    made = [memory(LEAST) for _ in range(5)]
    sock = hello(store, made)
    for descriptor in made:
        os.close(descriptor)
    assert "send one" in refusal(sock)
    wait_until(lambda: descriptors() == before)


def test_descriptor_of_a_stranger_that_leaves_is_closed(store):
    before = descriptors()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(store.endpoint.path)
    descriptor = memory(LEAST)
    sock.sendmsg([HEADER.pack(100, HELLO, 0, 0, 1)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]))])
    wait_until(lambda: descriptors() == before + 4)
    os.close(descriptor)
    sock.close()
    wait_until(lambda: descriptors() == before)


def test_server_maps_no_more_than_it_allows(tmp_path):
    store = Store(tmp_path / "s", StrangerLimits(segment=LEAST + 4096))
    client = connect(store)
    assert client.segment.nbytes == store.shared[0].nbytes == LEAST + 4096
    client.close()
    store.stop()


def test_client_above_the_limit_of_all_clients_uses_socket_until_another_leaves(tmp_path):
    store = Store(tmp_path / "s", StrangerLimits(segment=LEAST, segments=2 * LEAST))
    clients = [connect(store) for _ in range(3)]
    assert [client.segment is None for client in clients] == [False, False, True]
    for client in clients:
        upload(client, 0, b"c" * PIECE)
        assert download(client, 0, PIECE) == b"c" * PIECE
    clients[0].close()
    wait_until(lambda: store.gone)
    clients.append(connect(store))
    assert clients[-1].segment is not None
    for client in clients[1:]:
        client.close()
    store.stop()


@pytest.mark.parametrize("operation", [lambda fd: os.ftruncate(fd, 0), lambda fd: os.ftruncate(fd, 2 * SEGMENT)])
def test_offered_memory_cannot_change_its_size(operation):
    descriptor = offered_memory()
    with pytest.raises(PermissionError):
        operation(descriptor)
    os.close(descriptor)


@pytest.mark.parametrize(
    ("at", "nbytes"),
    [
        (256 << 20, 1),
        (0, (256 << 20) + 1),
        ((256 << 20) - 10, 11),
        ((1 << 64) - 1, 1),
        (1, (1 << 64) - 1),
        (0, 17 << 20),
    ],
)
def test_place_outside_the_segment_ends_its_connection_only(store, at, nbytes):
    client, other = connect(store), connect(store)
    size = 8 + PLACE.size
    client._write([HEADER.pack(size, BULK, SHARED, 0, 2), bytes(8), PLACE.pack(at, nbytes)], HEADER.size + size)
    wait_until(lambda: store.gone)
    assert "shared memory" in store.gone[0]
    upload(other, 0, b"o" * PIECE)
    assert download(other, 0, PIECE) == b"o" * PIECE
    client.close(), other.close()


@pytest.mark.parametrize(
    ("kind", "length", "shared"), [(BULK, 8, True), (BULK, 25, True), (DATA, 16, True), (BULK, 24, False)]
)
def test_frame_that_cannot_have_its_data_in_a_segment_is_refused(store, kind, length, shared):
    if shared:
        client = connect(store)
    else:
        client = ChannelClient.connect(store.endpoint)
        client.send(HELLO)
        client.recv(5)
    client._write([HEADER.pack(length, kind, SHARED, 0, 2), bytes(length)], HEADER.size + length)
    wait_until(lambda: store.gone)
    assert "cannot have its data in shared memory" in store.gone[0]
    client.close()


def client_of(answer):
    """A client whose server sends this after its hello, and that expects a mebibyte of DATA."""
    near, far = socket.socketpair()
    client = ChannelClient(near)
    client.send_hello(HELLO, b"")
    client.share(LEAST)
    far.sendall(answer)
    return client, far


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (HEADER.pack(16, DATA, SHARED, 0, 1) + PLACE.pack(LEAST, 1), "not in the shared memory"),
        (HEADER.pack(16, DATA, SHARED, 0, 1) + PLACE.pack(0, PIECE + 1), "expected at most"),
        (HEADER.pack(17, DATA, SHARED, 0, 1) + bytes(17), "unexpected frame"),
        (HEADER.pack(16, READY, SHARED, 0, 1) + PLACE.pack(0, 1), "unexpected frame"),
    ],
    ids=["outside", "too long", "wrong length", "other kind"],
)
def test_client_refuses_wrong_places_of_a_hostile_server(answer, why):
    client, far = client_of(answer)
    with pytest.raises(ProtocolError, match=why):
        client.recv_data(memoryview(bytearray(PIECE)), DATA)
    client.close(), far.close()


def test_client_without_segment_refuses_data_in_shared_memory():
    near, far = socket.socketpair()
    client = ChannelClient(near)
    far.sendall(HEADER.pack(16, DATA, SHARED, 0, 1) + PLACE.pack(0, 1))
    with pytest.raises(ProtocolError, match="shared memory"):
        client.recv_data(memoryview(bytearray(PIECE)), DATA)
    client.close(), far.close()


@pytest.mark.parametrize("nbytes", [0, LEAST - 1, SEGMENT + 1])
def test_client_shares_nothing_if_the_server_says_a_wrong_size(nbytes):
    near, far = socket.socketpair()
    client = ChannelClient(near)
    client.send_hello(HELLO, b"")
    client.share(nbytes)
    assert client.segment is None
    client.close(), far.close()


def test_accepted_closes_what_it_refuses():
    reader = pipe()
    with pytest.raises(SegmentError):
        accepted(reader, SEGMENT)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reader)


def test_segment_in_use_ends_with_its_last_user():
    segment = Segment(memory(LEAST), LEAST)
    part = segment.part(10, 3)
    segment.close()
    part[:] = b"abc"
    assert bytes(part) == b"abc"


def test_resident_bytes_are_those_that_were_used():
    segment = Segment(memory(LEAST), LEAST)
    assert segment.resident == 0
    segment.view[0] = 1
    assert segment.resident == mmap.PAGESIZE
    segment.close()


# -- rings -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 3)), max_size=60))
@settings(max_examples=100, deadline=None)
def test_ring_never_hands_out_bytes_that_are_in_use(steps):
    ring, lent, given_back = Ring(1000, 8192), {}, 0
    for seq, (nbytes, acked) in enumerate(steps, 1):
        at = ring.take(nbytes, seq)
        if at is None:
            assert lent, "an empty ring has room for half of its bytes"
        else:
            assert at >= 1000 and at + nbytes <= 1000 + 8192
            assert all(at + nbytes <= other or at >= other + size for other, size in lent.values())
            lent[seq] = (at, nbytes)
        given_back = min(given_back + acked, seq)
        ring.give_back(given_back)
        lent = {k: v for k, v in lent.items() if k > given_back}


def test_pinned_area_hands_out_each_byte_once_and_joins_what_is_freed():
    segment = Segment(offered_memory(), LEAST + (1 << 20))
    area = PinnedArea(segment)
    parts = [area.allocate(100_000) for _ in range(10)]
    assert area.allocate(100_000) is None
    starts = sorted(map(ctypes.addressof, parts))
    assert all(b - a >= 100_000 and a % 64 == 0 for a, b in itertools.pairwise(starts))
    del parts[::2]
    gc.collect()
    assert area.allocate(200_000) is None
    del parts
    gc.collect()
    whole = area.allocate(1 << 20)
    segment.close()
    whole[:] = [1] * (1 << 20)
    assert sum(whole) == 1 << 20 and area.allocate(64) is None
