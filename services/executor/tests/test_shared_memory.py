"""Tests of sessions that share memory with their client: uploads, downloads, places that the client names, limits, ends."""

import os
import struct
import threading

import pytest
from wooly_bus.channel import ChannelClient
from wooly_bus.channel.segment import LEAST, SHARED_FROM, offered_memory
from wooly_executor.host_account import HostLimits
from wooly_wis.collectives import SHARED_MEMORY, Collective, Range, Reduction, What, pack_collective
from wooly_wis.dtypes import DType
from wooly_wis.frames import MAX_CHUNK, READ_HEAD, READ_PLACE, WRITE_HEAD, Kind, pack_json

from services.executor.tests.conftest import Body, Client, RemoteError

pytestmark = pytest.mark.skipif(offered_memory() is None, reason="this system has no memfd")
NBYTES = 9 * MAX_CHUNK + 1234


class SharingClient(Client):
    """One session's end of a real channel that shares memory."""

    def __init__(self, endpoint, session_id, token, **more):
        self.channel = ChannelClient.connect(endpoint)
        self.channel.send_hello(
            Kind.HELLO, pack_json({"protocol": 1, "session_id": session_id, "token": token, **more})
        )
        self.welcome = self.answer(Kind.WELCOME)
        self.channel.share(self.welcome["segment"])

    def write(self, buffer, data, offset=0):
        for at in range(0, len(data), MAX_CHUNK):
            self.channel.send_bulk(Kind.WRITE, WRITE_HEAD.pack(buffer, offset + at), data[at : at + MAX_CHUNK])

    def ask_at(self, place, buffer, nbytes):
        """Ask for the bytes of a buffer at a place in the shared memory."""
        self.channel.send(Kind.READ, READ_HEAD.pack(buffer, 0, nbytes), READ_PLACE.pack(place))

    def place(self, at, nbytes):
        """Memory of this client that is shared."""
        return self.channel.segment.view[at : at + nbytes]


def opened(device, session_id="s", **policy):
    device.admit(session_id, **policy)
    device.clients.append(SharingClient(device.endpoint, session_id, f"token of {session_id}"))
    return device.clients[-1]


def allocated(client, nbytes=NBYTES):
    client.run(Body().alloc("x", nbytes), {"x": 1})
    return client


def descriptors():
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def test_shared_memory_brings_bytes_there_and_back(make_device):
    client = allocated(opened(make_device()))
    data = os.urandom(NBYTES)
    client.write(1, memoryview(data))
    assert client.read(1, NBYTES) == data
    assert client.stats()["host_segment"] > 0


def test_pinned_data_is_copied_by_the_executor_alone(make_device):
    client = allocated(opened(make_device()), 2 * SHARED_FROM)
    data = os.urandom(2 * SHARED_FROM)
    source, target = client.place(LEAST, len(data)), client.place(LEAST + len(data), len(data))
    source[:] = data
    client.write(1, source)
    client.channel.await_placed()
    source[:] = bytes(len(data))
    client.ask_at(LEAST + len(data), 1, len(data))
    assert client.channel.recv_data(target, Kind.DATA) is None
    assert bytes(target) == data


def test_answer_without_an_expected_place_is_copied_from_where_it_is(make_device):
    client = allocated(opened(make_device()), 3 << 20)
    data = os.urandom(3 << 20)
    client.write(1, data)
    client.ask_at(LEAST + 4096, 1, 3 << 20)
    assert client.take(3 << 20) == data
    assert bytes(client.place(LEAST + 4096, 3 << 20)) == data


@pytest.mark.parametrize("place", [256 << 20, (256 << 20) - (1 << 20) + 1, (1 << 64) - 1, 1 << 63])
def test_place_outside_the_shared_memory_is_refused(make_device, place):
    client = allocated(opened(make_device()), 1 << 20)
    client.ask_at(place, 1, 1 << 20)
    with pytest.raises(RemoteError, match="not in the memory that client and executor share"):
        client.take(1 << 20)
    assert client.read(1, 1 << 20) == bytes(1 << 20)


def test_place_without_shared_memory_is_refused(make_device):
    client = make_device().open("s")
    client.run(Body().alloc("x", 8), {"x": 1})
    client.channel.send(Kind.READ, READ_HEAD.pack(1, 0, 8), READ_PLACE.pack(0))
    with pytest.raises(RemoteError, match="share"):
        client.take(8)
    client.channel.send(Kind.READ, READ_HEAD.pack(1, 0, 8), bytes(7))
    with pytest.raises(RemoteError, match="READ frame has 31 bytes"):
        client.take(8)


def test_refused_upload_keeps_the_session_and_its_ring(make_device):
    client = opened(make_device())
    for _ in range(8):
        client.write(77, bytes(MAX_CHUNK))
    with pytest.raises(RemoteError, match="buffer 77 does not exist"):
        client.sync()
    allocated(client).write(1, b"x" * NBYTES)
    assert client.read(1, NBYTES) == b"x" * NBYTES


def test_bytes_that_change_while_they_are_copied_change_only_the_buffer(make_device):
    client = allocated(opened(make_device()), 4 << 20)
    place, stop = client.place(0, 8 << 20), threading.Event()

    def scribble():
        while not stop.is_set():
            place[::4096] = bytes([os.urandom(1)[0]]) * (len(place) // 4096)

    other = threading.Thread(target=scribble)
    other.start()
    for _ in range(20):
        client.write(1, bytes(4 << 20))
    stop.set()
    other.join()
    assert client.sync() == {}
    client.write(1, b"q" * (4 << 20))
    assert client.read(1, 4 << 20) == b"q" * (4 << 20)


def test_client_that_leaves_during_a_download_frees_all(make_device):
    device = make_device()
    before = descriptors()
    client = allocated(opened(device), 64 << 20)
    client.ask(1, 64 << 20)
    client.channel.close()
    with device.changed:
        assert device.changed.wait_for(lambda: device.closed == ["s"], 30)
    while descriptors() > before:
        threading.Event().wait(0.01)
    other = allocated(opened(device, "t"), 4 << 20)
    other.write(1, b"t" * (4 << 20))
    assert other.read(1, 4 << 20) == b"t" * (4 << 20)


def test_shared_memory_is_shown_and_no_part_of_the_limit_of_host_memory(make_device):
    client = opened(make_device(limits=HostLimits(session=20 << 20)))
    client.place(0, 64 << 20)[::4096] = b"1" * (16 << 10)
    found = client.stats()
    assert found["host_segment"] == 64 << 20 and found["host_total"] < 20 << 20


def test_sessions_share_nothing_with_each_other(make_device):
    device = make_device()
    one, two = allocated(opened(device, "a"), 4 << 20), allocated(opened(device, "b"), 4 << 20)
    one.write(1, b"a" * (4 << 20))
    two.write(1, b"b" * (4 << 20))
    one.sync(), two.sync()
    assert bytes(two.place(0, 10)) == b"b" * 10 and bytes(one.place(0, 10)) == b"a" * 10
    assert one.read(1, 10) == b"a" * 10


def test_download_of_one_session_leaves_time_for_another(make_device):
    device = make_device()
    one, two = allocated(opened(device, "a"), 128 << 20), allocated(opened(device, "b"), 8)
    one.ask(1, 128 << 20)
    assert two.sync() == {}
    assert one.take(128 << 20) == bytes(128 << 20)


# -- operands of collectives -------------------------------------------------------------------------------------------


def reduced(client, *ranges, sequence=1, group=bytes(16)):
    """A collective of a group of one rank, on ranges of the shared memory."""
    read, write = [Range(SHARED_MEMORY, at, elements) for at, elements in ranges]
    call = Collective(
        group, sequence, 0, 1, 60_000, What.ALL_REDUCE, DType.F32, (read,), (write,), Reduction.SUM, recovers=True
    )
    client.channel.send(Kind.COLLECTIVE, pack_collective(call))
    return client.sync()


def test_collective_computes_with_operands_in_shared_memory(make_device):
    client = opened(make_device())
    assert client.welcome["shared_operands"] is True
    source, target = client.place(LEAST, 8), client.place(LEAST + 64, 8)
    source[:] = struct.pack("<2f", 1.5, -2.0)
    reduced(client, (LEAST, 2), (LEAST + 64, 2))
    assert struct.unpack("<2f", target) == (1.5, -2.0)


def test_operands_outside_shared_memory_fail_the_collective_alone(make_device):
    device = make_device()
    client, stranger = opened(device), device.open("socket alone")
    end = client.welcome["segment"]
    for sequence, (at, text) in enumerate(
        [(end - 4, "are not in the shared memory"), (1 << 62, "are not"), (2, "multiple")], 1
    ):
        with pytest.raises(RemoteError, match=text):
            reduced(client, (at, 2), (LEAST, 2), sequence=sequence)
    with pytest.raises(RemoteError, match="share no memory that a collective can use"):
        reduced(stranger, (0, 2), (64, 2), group=bytes(range(16)))
    for session in (client, stranger):
        session.make(1, 3.0)
        assert session.floats(1, 1) == [3.0]


def test_segment_of_a_client_that_leaves_during_a_collective_stays_until_its_end(make_device):
    """The mover still works with the memory."""
    device, count = make_device(), 4 << 20
    part = Range(SHARED_MEMORY, LEAST, count)
    call = Collective(bytes(16), 1, 0, 1, 60_000, What.ALL_REDUCE, DType.F32, (part,), (part,), Reduction.AVG)
    for number in range(3):
        client = opened(device, f"s{number}")
        client.channel.send(Kind.COLLECTIVE, pack_collective(call))
        client.channel.close()
        device.wait_closed(f"s{number}")
    last = allocated(opened(device, "last"), 4096)
    assert last.read(1, 4) is not None
    assert device.held().keys() == {"last"}
