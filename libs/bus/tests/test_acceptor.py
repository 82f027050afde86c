"""Strangers at the acceptor: floods, half-open connections, slow writers, garbage, no descriptors. Guests are not affected."""

import contextlib
import logging
import os
import resource
import signal
import socket
import ssl
import struct
import threading
import time

import pytest
from wooly_bus.channel import (
    Acceptor,
    ChannelClient,
    ChannelClosedError,
    ChannelError,
    ChannelServer,
    Connected,
    Disconnected,
    Endpoint,
    FrameReceived,
    Guest,
    ProtocolError,
    StrangerLimits,
    client_context,
    server_context,
)
from wooly_bus.channel.acceptor import MAX_HELLO, PAUSE_S
from wooly_bus.channel.descriptors import free_descriptors
from wooly_bus.channel.framing import HEADER, MAX_FRAME
from wooly_testkit.certificates import make_certificates
from wooly_testkit.channel import acceptor_of, connect
from wooly_testkit.effort import examples
from wooly_wis.frames import Kind

HELLO, ECHO = int(Kind.HELLO), 20
RST_ON_CLOSE = struct.pack("ii", 1, 0)


class Host:
    """An acceptor, and a server in a thread that echoes frames."""

    def __init__(self, endpoint, tls=None, **options):
        self.server = ChannelServer()
        self.acceptor = acceptor_of(self.server, **options)
        self.endpoint = self.acceptor.listen(Endpoint.parse(endpoint), tls)
        self.acceptor.start()
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self.loop)
        self.thread.start()

    def loop(self):
        while not self.stopping.is_set():
            for event in self.server.poll(1):
                if isinstance(event, Connected):
                    event.conn.ack(1)
                elif isinstance(event, FrameReceived):
                    event.conn.ack(event.seq)
                    event.conn.send(ECHO, event.payload)
        self.server.close()

    def close(self):
        self.acceptor.close()
        self.stopping.set()
        self.server.wake()
        self.thread.join()

    def knock(self):
        """A connection without a hello."""
        unix = self.endpoint.scheme == "unix"
        sock = socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
        sock.settimeout(30)
        sock.connect(self.endpoint.path if unix else (self.endpoint.host, self.endpoint.port))
        return sock

    def strangers(self, n):
        """Wait until there are this many."""
        eventually(lambda: len(self.acceptor._strangers) == n)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("tls"), "localhost", "127.0.0.1")


@pytest.fixture
def host(request, files):
    """A host behind TLS, unless the test asks for another scheme."""
    made = []

    def make(scheme="tls", **limits):
        tls = server_context(files.certificate, files.key) if scheme == "tls" else None
        made.append(Host(f"{scheme}://127.0.0.1:0", tls, limits=StrangerLimits(**limits)))
        return made[-1]

    yield make
    for running in made:
        running.close()


def eventually(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def echoes(client, data=b"still here"):
    client.send(ECHO, data)
    return client.recv(60).payload == data


def told(sock):
    """The bytes that a stranger receives before its connection ends."""
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(4096):
            said += part
    sock.close()
    return said[HEADER.size :].decode()


def reset(sock):
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST_ON_CLOSE)
    sock.close()


# -- floods ------------------------------------------------------------------------------------------------------------


def test_acceptor_flood_of_resets_leaves_no_connection(host, files):
    """Resets at each point of a handshake: at once, inside the first message, after it. The slow run repeats each more often."""
    storm = examples(1_000, 10_000)
    running = host()
    inside = connect(running.endpoint, client_context(files.authority))
    assert echoes(inside)
    hello = tls_client_hello(files)
    for n in range(storm):
        sock = running.knock()
        with contextlib.suppress(OSError):  # the connection is already refused
            sock.sendall((b"", hello[:5], hello[:100], hello)[n % 4])
        reset(sock)
        if n % 100 == 0:
            assert echoes(inside)
    newcomer = connect(running.endpoint, client_context(files.authority))
    assert echoes(newcomer) and echoes(inside)
    running.strangers(0)
    assert running.acceptor._groups == {} and len(running.acceptor._selector.get_map()) == 2
    assert running.acceptor.accepted >= storm
    eventually(lambda: running.acceptor.welcomed == 2)  # counted after a guest is handed over, which may already echo
    newcomer.close()
    inside.close()


def tls_client_hello(files):
    """The first bytes of a handshake."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    shaking = client_context(files.authority).wrap_bio(incoming, outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        shaking.do_handshake()
    return outgoing.read()


def test_connection_reset_before_accept_is_closed_without_log(host, monkeypatch):
    """`wrap_socket` raises for such a connection. This error once ended the thread."""
    running = host()

    def wrap(self, sock, **options):
        raise ConnectionResetError(104, "Connection reset by peer")

    with monkeypatch.context() as patched:
        patched.setattr(ssl.SSLContext, "wrap_socket", wrap)
        with running.knock() as sock:
            assert told(sock) == ""
    running.strangers(0)
    with running.knock():
        running.strangers(1)


def test_half_open_connections_above_peer_limit_evict_oldest(host, files):
    running = host(per_peer=8)
    held = [running.knock() for _ in range(20)]
    eventually(lambda: running.acceptor.accepted == 20)
    running.strangers(8)
    assert [told(sock) for sock in held[:12]] == [""] * 12  # no reason can be sent during the handshake
    client = connect(running.endpoint, client_context(files.authority))
    assert echoes(client)
    client.close()
    for sock in held[12:]:
        sock.close()


def test_acceptor_full_evicts_from_largest_group(tmp_path):
    running = Host(f"unix://{tmp_path}/s", limits=StrangerLimits(total=6, per_peer=100))
    held = [running.knock() for _ in range(5)]
    running.strangers(5)
    pairs = [socket.socketpair() for _ in range(3)]
    for n, (far, _) in enumerate(pairs):
        running.acceptor.adopt(far, f"tunnel {n}", f"tunnels of {n}")
    eventually(lambda: len(running.acceptor._groups) == 4)
    assert [told(sock) for sock in held[:2]] == [
        "channel.busy: 6 connections have not sent a valid hello, which is the limit; this one is the oldest, so it was closed"
    ] * 2
    running.strangers(6)
    for _, near in pairs:  # a stranger that is alone in its group keeps its place and is accepted
        client = ChannelClient(near)
        client.send(HELLO)
        assert echoes(client)
        client.close()
    for sock in held[2:]:
        sock.close()
    running.close()


def test_client_connects_during_flood_of_connections(host, files):
    running = host(total=8, per_peer=4)
    over = threading.Event()

    def storm():
        held = []
        while not over.is_set():
            held.append(running.knock())
            if len(held) > 50:
                held.pop(0).close()
        for sock in held:
            sock.close()

    thread = threading.Thread(target=storm)
    thread.start()
    try:
        for _ in range(5):
            assert_gets_in(running, files)
    finally:
        over.set()
        thread.join()


def assert_gets_in(running, files):
    """The client has the address of the attacker: it may be the oldest stranger once, and retries."""
    deadline = time.monotonic() + 60
    while True:
        tls = client_context(files.authority)
        with contextlib.suppress(ChannelError), contextlib.closing(connect(running.endpoint, tls)) as client:
            if echoes(client):  # otherwise the answer is the END of an evicted connection
                return
        assert time.monotonic() < deadline


# -- slow, silent and wrong ------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize("silent", [True, False], ids=["silent", "byte by byte"])
def test_stranger_has_one_deadline_for_handshake_and_hello(tmp_path, silent):
    clock = Clock()
    running = Host(f"unix://{tmp_path}/s", limits=StrangerLimits(hello_s=10), clock=clock)
    sock = running.knock()
    running.strangers(1)
    for n, byte in enumerate(HEADER.pack(100, HELLO, 0, 0, 1)):
        clock.now = 100 + n / 2
        if not silent:
            sock.send(bytes([byte]))
    running.strangers(1)
    clock.now = 110
    running.acceptor._wake()
    assert told(sock) == "channel.timeout: received no valid hello within 10 s"
    running.close()


def test_hello_byte_by_byte_within_deadline_is_accepted(host):
    running = host("tcp")
    sock = running.knock()
    for byte in HEADER.pack(3, HELLO, 0, 0, 1) + b"abc":
        sock.sendall(bytes([byte]))
    sock.sendall(HEADER.pack(2, ECHO, 0, 0, 2) + b"xy")
    said = b""
    while b"xy" not in said:  # its acknowledgement may follow
        said += sock.recv(100)
    sock.close()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (
            HEADER.pack(MAX_HELLO + 1, HELLO, 0, 0, 1),
            f"the HELLO frame has {MAX_HELLO + 1} bytes; the limit is {MAX_HELLO}",
        ),
        (HEADER.pack(MAX_FRAME + 1, HELLO, 0, 0, 1), f"the frame has {MAX_FRAME + 1} bytes"),
        (HEADER.pack(0, ECHO, 0, 0, 1), "the first frame must be HELLO"),
        (HEADER.pack(0, HELLO, 0, 0, 2), "received frame 2, but expected frame 1"),
        (HEADER.pack(0, HELLO, 1, 0, 1), "reserved header bits"),
        (b"GET / HTTP/1.1\r\n", "reserved header bits"),
    ],
    ids=["oversize", "larger than any frame", "other frame", "other number", "flags", "http"],
)
def test_first_frame_not_hello_is_answered_with_reason(host, said, why):
    running = host("tcp")
    sock = running.knock()
    sock.sendall(said)
    heard = told(sock)
    assert heard.startswith("channel.protocol: ") and why in heard
    client = connect(running.endpoint)
    assert echoes(client)
    client.close()


@pytest.mark.parametrize("said", [b"", b"\x16\x03", os.urandom(4096), HEADER.pack(0, HELLO, 0, 0, 1)])
def test_garbage_instead_of_tls_ends_only_its_connection(host, files, said):
    running = host()
    sock = running.knock()
    sock.sendall(said)
    with contextlib.suppress(OSError):  # the connection is already closed
        sock.shutdown(socket.SHUT_WR)
    told(sock)
    client = connect(running.endpoint, client_context(files.authority))
    assert echoes(client)
    client.close()


def test_frames_after_hello_in_one_tls_record_are_not_lost(host, files):
    running = host()
    sock = client_context(files.authority).wrap_socket(running.knock(), server_hostname="localhost")
    sock.sendall(HEADER.pack(0, HELLO, 0, 0, 1) + HEADER.pack(2, ECHO, 0, 0, 2) + b"xy")
    said = b""
    while b"xy" not in said:
        said += sock.recv(100)
    sock.close()


@pytest.mark.parametrize("error", [ValueError("a"), RecursionError("b"), MemoryError("c"), KeyError("d")])
def test_check_error_ends_only_its_stranger(tmp_path, error):
    def check(payload):
        if payload:
            raise error
        return "fine"

    taken = []
    acceptor = Acceptor(check, lambda code, words: (11, f"{code}: {words}".encode()), taken.append, hello=HELLO)
    running = acceptor.listen(Endpoint.parse(f"unix://{tmp_path}/s"))
    acceptor.start()
    bad = ChannelClient.connect(running)
    bad.send(HELLO, b"x")
    assert type(error).__name__ in bytes(bad.recv(30).payload).decode()
    good = ChannelClient.connect(running)
    good.send(HELLO)
    eventually(lambda: taken)
    assert taken[0].admitted == "fine"
    taken[0].sock.close()
    good.close()
    bad.close()
    acceptor.close()


def test_refusals_are_logged_with_rate_limit(host, caplog):
    running = host("tcp")
    with caplog.at_level(logging.WARNING, "wooly.channel"):
        for _ in range(300):
            sock = running.knock()
            sock.sendall(b"x" * HEADER.size)
            told(sock)
    assert len(caplog.records) == 10 and "refused the connection of " in caplog.text


def test_connection_closed_without_hello_is_not_logged(host, caplog):
    running = host("tcp")
    for _ in range(5):
        running.knock().close()
    eventually(lambda: running.acceptor.accepted == 5)
    running.strangers(0)
    assert not caplog.records


# -- the end -----------------------------------------------------------------------------------------------------------


def test_acceptor_thread_failure_is_reported_and_closes_strangers(tmp_path, monkeypatch, caplog):
    server = ChannelServer()
    acceptor = acceptor_of(server)
    endpoint = acceptor.listen(Endpoint.parse(f"unix://{tmp_path}/s"))
    monkeypatch.setattr(acceptor, "_timeout", lambda: 1 / 0)
    acceptor.start()
    eventually(lambda: "ZeroDivisionError" in caplog.text and "acceptor" in caplog.text)
    with pytest.raises(ChannelClosedError):
        ChannelClient.connect(endpoint)
    acceptor.close()
    server.close()


def test_close_of_acceptor_closes_strangers_and_of_server_guests(tmp_path):
    running = Host(f"unix://{tmp_path}/s")
    stranger, guest = running.knock(), connect(running.endpoint)
    assert echoes(guest)
    running.acceptor.close()
    assert stranger.recv(10) == b"" and echoes(guest)
    near, far = socket.socketpair()
    running.acceptor.adopt(far, "late")
    assert near.recv(10) == b""
    running.close()
    with pytest.raises(ChannelClosedError, match="the executor is stopping"):
        guest.recv(30)
    for sock in (stranger, near, guest):
        sock.close()


def test_guest_after_server_close_gets_reason(tmp_path):
    server = ChannelServer()
    acceptor = acceptor_of(server)
    endpoint = acceptor.listen(Endpoint.parse(f"unix://{tmp_path}/s"))
    acceptor.start()
    server.close()
    client = connect(endpoint)
    assert b"the executor is stopping" in client.recv(30).payload
    client.close()
    acceptor.close()


# -- no descriptors ------------------------------------------------------------------------------------------------------


def in_a_process(work):
    """Run `work` in a forked process; an error in it fails the test."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.close(read)
            work()
            code = 0
        except BaseException as e:
            os.write(write, f"{type(e).__name__}: {e}".encode()[:4000])
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as told_here:
        said = told_here.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, said


def low_limit(more):
    """Let this process open this many further descriptors."""
    taken = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - free_descriptors()
    # The descriptor numbers in use may have gaps: unused numbers below the limit are free, too.
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken + more, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return taken


def test_acceptor_without_descriptors_does_not_spin_or_close_guests(tmp_path):
    """Without a free descriptor, new connections cause few turns and no accepts; guests continue. Later, all are accepted."""

    def work():
        running = Host(f"unix://{tmp_path}/s", limits=StrangerLimits(spare_descriptors=4))
        inside = connect(running.endpoint)
        assert echoes(inside), "before"
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(3)]
        low_limit(10)
        hoard = []
        with contextlib.suppress(OSError):
            while True:
                hoard.append(os.dup(0))
        for sock in waiting:
            sock.settimeout(60)
            sock.connect(running.endpoint.path)
        started, turns = time.monotonic(), running.acceptor.turns
        accepted = running.acceptor.accepted
        while time.monotonic() < started + 5 * PAUSE_S:
            assert echoes(inside), "while exhausted"
        passed = time.monotonic() - started
        assert running.acceptor.turns - turns <= 3 * (passed / PAUSE_S + 2), "spinning"
        assert running.acceptor.accepted == accepted, "accepted"
        for fd in hoard:
            os.close(fd)
        for sock in waiting:
            client = ChannelClient(sock)
            client.send(HELLO)
            assert echoes(client), "with room again"
        assert echoes(inside), "afterwards"

    in_a_process(work)


def test_strangers_leave_spare_descriptors(tmp_path):
    def work():
        running = Host(f"unix://{tmp_path}/s", limits=StrangerLimits(spare_descriptors=16, per_peer=1000))
        inside = connect(running.endpoint)
        assert echoes(inside), "before"
        low_limit(60)
        attacker = os.fork()  # a separate process has its own descriptor table
        if not attacker:
            held = []
            with contextlib.suppress(OSError):
                for _ in range(200):
                    held.append(running.knock())
            signal.pause()
        try:
            eventually(lambda: running.acceptor.accepted > 60)
            files = [os.dup(0) for _ in range(16)]  # the files of sessions
            assert echoes(inside), "while strangers hold what they can"
            for fd in files:
                os.close(fd)
            client = connect(running.endpoint)  # strangers are evicted for this client
            assert echoes(client), "a newcomer"
        finally:
            os.kill(attacker, signal.SIGKILL)
            os.waitpid(attacker, 0)

    in_a_process(work)


def test_free_descriptors_counts_open_files():
    before = free_descriptors()
    with socket.socket():
        assert free_descriptors() == before - 1
    assert free_descriptors() == before


# -- the channel server ----------------------------------------------------------------------------------------------------


class Faulty(socket.socket):
    """A socket that raises the given error from its next use on."""

    fault = None

    def recv_into(self, *args):
        if self.fault is not None:
            raise self.fault
        return super().recv_into(*args)

    def sendmsg(self, *args):
        if self.fault is not None:
            raise self.fault
        return super().sendmsg(*args)


def polled(server, kind):
    """The next event of a kind; the other events of the same poll are returned by the next call."""
    for _ in range(100):
        found = [event for event in server.poll(1) if isinstance(event, kind)]
        server._events[:0] = found[1:]
        if found:
            return found[0]
    raise AssertionError(f"no {kind.__name__}")


@pytest.mark.parametrize("way", ["reading", "writing"])
@pytest.mark.parametrize(
    "fault", [ValueError("v"), MemoryError("m"), ssl.SSLError("s"), OverflowError("o"), OSError("e")]
)
def test_server_connection_error_does_not_leave_poll(way, fault):
    server = ChannelServer()
    ends = []
    for n in range(2):
        near, far = socket.socketpair()
        far = Faulty(fileno=far.detach())
        far.setblocking(False)
        server.enter(Guest(far, f"peer {n}", n))
        ends.append((ChannelClient(near), far))
    conns = {e.admitted: e.conn for e in server.poll(5)}
    ends[0][1].fault = fault
    ends[0][0]._sent = ends[1][0]._sent = 1  # frame 1 is the hello
    if way == "reading":
        ends[0][0].send(ECHO, b"x")
    else:
        conns[0].send(ECHO, b"x")
    left = polled(server, Disconnected)
    assert left.conn is conns[0] and str(fault) in left.reason
    ends[1][0].send(ECHO, b"still here")
    assert polled(server, FrameReceived).payload == b"still here"
    for client, _ in ends:
        client.close()
    server.close()


def test_server_sink_error_closes_connection_unless_fatal():
    class Lost(Exception):
        pass

    raised = [KeyError("a bug"), ProtocolError("a rule"), Lost("the device")]

    def sink(conn, kind, prefix, n):
        raise raised[conn.owner]

    server = ChannelServer({ECHO: 8}, sink, fatal=(Lost,))
    clients = []
    for n in range(3):
        near, far = socket.socketpair()
        far.setblocking(False)
        server.enter(Guest(far, "peer", n))
        clients.append(ChannelClient(near))
    for event in server.poll(5):
        event.conn.owner = event.admitted
    for client in clients[:2]:
        client._sent = 1
        client.send(ECHO, bytes(8), b"data")
    assert {polled(server, Disconnected).conn.owner for _ in range(2)} == {0, 1}
    clients[2]._sent = 1
    clients[2].send(ECHO, bytes(8), b"data")
    with pytest.raises(Lost):
        polled(server, Disconnected)
    for client in clients:
        client.close()
    server.close()
