"""Tunnels through a real nats-server: a channel works as on a socket, and both ends learn why a tunnel ended."""

import asyncio
import contextlib
import os
import queue
import signal
import socket
import subprocess
import threading
import time

import nats.aio.client
import psutil
import pytest
from nats.aio.client import Client
from wooly_bus import contracts
from wooly_bus.access import Access
from wooly_bus.app import ServiceApp
from wooly_bus.channel import (
    ChannelClient,
    ChannelClosedError,
    ChannelError,
    ChannelServer,
    ChannelTimeoutError,
    Connected,
    Disconnected,
    EndpointError,
    FrameReceived,
)
from wooly_bus.channel import tunnel as tunnels
from wooly_bus.channel.framing import HEADER
from wooly_bus.channel.tunnel import (
    BEAT,
    CHUNK,
    CREDIT,
    DATA,
    END,
    HEAD,
    WINDOW,
    OpenTunnelReply,
    OpenTunnelRequest,
    TunnelListener,
    open_tunnel,
    tunnel_endpoint,
)
from wooly_bus.channel.tunnel_places import TunnelLimits
from wooly_bus.envelope import encode
from wooly_bus.errors import RefusedError
from wooly_bus.rpc import ControlClient
from wooly_testkit.channel import acceptor_of, greeted
from wooly_testkit.forks import Forked
from wooly_testkit.nats import nats_server as start_nats_server

pytestmark = pytest.mark.connected
ECHO, BULK, FETCH, HOLD, BYE = 20, 21, 22, 23, 24
MB = 1 << 20


class Host:
    """An executor's part: a ChannelServer in one thread, a service with a TunnelListener in another."""

    def __init__(self, url, name, **options):
        self.url, self.rpc = url, contracts.EXECUTOR_TUNNEL_OPEN.at(name)
        self.memory = bytearray(5 * WINDOW)
        self.server = ChannelServer({BULK: 8}, self.sink)
        self.jobs, self.gone = queue.SimpleQueue(), queue.SimpleQueue()
        self.held = None
        self.stopping = threading.Event()
        self.acceptor = acceptor_of(self.server)
        self.acceptor.start()
        self.listener = TunnelListener(url, self.acceptor.adopt, **options)
        self.polling = threading.Thread(target=self.poll)
        self.polling.start()
        started = threading.Event()
        self.serving = threading.Thread(target=lambda: asyncio.run(self.serve(started)))
        self.serving.start()
        started.wait()

    def sink(self, conn, kind, prefix, n):
        at = int.from_bytes(prefix, "little")
        return memoryview(self.memory)[at : at + n]

    def call(self, job):
        self.jobs.put(job)
        self.server.wake()

    def poll(self):
        while not self.stopping.is_set():
            for event in self.server.poll(1):
                if isinstance(event, Connected):
                    event.conn.ack(1)
                elif isinstance(event, Disconnected):
                    self.gone.put(event.reason)
                elif isinstance(event, FrameReceived):
                    self.on_frame(event)
            self.run_jobs()
        self.run_jobs()
        self.server.close()

    def run_jobs(self):
        while not self.jobs.empty():
            self.jobs.get()()

    def on_frame(self, event):
        event.conn.ack(event.seq)
        if event.kind == ECHO:
            event.conn.send(ECHO, event.payload)
        elif event.kind == FETCH:
            for at in range(0, len(self.memory), MB):
                event.conn.send(FETCH, memoryview(self.memory)[at : at + MB])
        elif event.kind == HOLD:
            event.conn.pause()
            self.held = event.conn
        elif event.kind == BYE:
            event.conn.close()

    async def serve(self, started):
        self.loop, self.stop_serving = asyncio.get_running_loop(), asyncio.Event()
        app = ServiceApp("executor", self.url)
        app.serve(self.rpc, self.listener.on_open_tunnel)
        async with app.running(), contextlib.aclosing(self.listener):
            started.set()
            await self.stop_serving.wait()

    def stop_listening(self):
        if self.serving.is_alive():
            self.loop.call_soon_threadsafe(self.stop_serving.set)
            self.serving.join()

    def close(self):
        self.stop_listening()
        self.acceptor.close()
        self.stopping.set()
        self.server.wake()
        self.polling.join()

    def dial(self):
        return greeted(ChannelClient(open_tunnel(self.url, self.rpc)))


@pytest.fixture
def host(nats_server, request):
    running = Host(nats_server, f"h{abs(hash(request.node.name))}-{os.getpid()}")
    yield running
    running.close()


def eventually(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def broken(client):
    """The error that the client gets at the end of its stream."""
    with pytest.raises(ChannelClosedError) as caught:
        client.recv(60)
    client.close()
    return str(caught.value)


def test_tunnel_frames_of_all_sizes_return_in_order(host):
    client = host.dial()
    sizes = [0, 1, 17, 4095, CHUNK - 17, CHUNK - 16, CHUNK, CHUNK + 1, 3 * CHUNK, MB, 15 * MB]
    for n in sizes:
        data = os.urandom(n)
        client.send(ECHO, data)
        assert client.recv(60).payload == data
    for n in range(300):
        client.send(ECHO, n.to_bytes(2, "little") * n)
    for n in range(300):
        assert client.recv(60).payload == n.to_bytes(2, "little") * n
    client.close()
    assert host.gone.get(timeout=60) == ""


def test_tunnel_five_windows_arrive_both_ways(host):
    client, data = host.dial(), os.urandom(len(host.memory))
    for at in range(0, len(data), 4 * MB):
        client.send(BULK, at.to_bytes(8, "little"), memoryview(data)[at : at + 4 * MB])
    client.send(ECHO)
    client.recv(60)
    assert host.memory == data
    into = bytearray(len(data))
    client.send(FETCH)
    assert client.recv_data(memoryview(into), FETCH) is None
    assert into == data
    client.close()


def test_tunnel_chunks_fit_server_limit(tmp_path):
    config = tmp_path / "nats.conf"
    config.write_text("max_payload: 4096\n")
    with start_nats_server("-c", str(config)) as url, contextlib.closing(Host(url, "small")) as host:
        client, data = host.dial(), os.urandom(3 * MB)
        client.send(ECHO, data)
        assert client.recv(60).payload == data
        client.close()


def test_two_tunnels_do_not_mix_bytes(host):
    failures = []

    def work(mark):
        client = host.dial()
        for n in range(1, 60):
            client.send(ECHO, mark * (n * 5000))
            if client.recv(60).payload != mark * (n * 5000):
                failures.append((mark, n))
        client.close()

    threads = [threading.Thread(target=work, args=(mark,)) for mark in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and [host.gone.get(timeout=60), host.gone.get(timeout=60)] == ["", ""]


def test_tunnel_paused_reader_blocks_sender_without_loss(host):
    sock = open_tunnel(host.url, host.rpc)
    client = greeted(ChannelClient(sock))
    client.window = 1 << 40
    client.send(HOLD)
    eventually(lambda: host.held is not None)
    accepted, done = [], threading.Event()

    def push():
        for n in range(len(host.memory) // MB):
            client.send(BULK, (n * MB).to_bytes(8, "little"), bytes([n]) * MB)
            accepted.append(n)
        done.set()

    thread = threading.Thread(target=push)
    thread.start()
    eventually(lambda: len(accepted) * MB >= WINDOW)
    assert not done.wait(0.5)
    # At most these hold data: the window, the buffers of four sockets, one frame that is half received.
    assert len(accepted) * MB <= WINDOW + 5 * tunnels.SOCKET_BUFFER
    host.call(lambda: host.held.resume())
    thread.join()
    client.send(ECHO, b"through")
    assert client.recv(60).payload == b"through"
    assert all(host.memory[n * MB : (n + 1) * MB] == bytes([n]) * MB for n in accepted)
    client.close()


def test_tunnel_close_leaves_no_thread_socket_or_subscription(host):
    process = psutil.Process()
    host.dial().close()
    eventually(lambda: host.listener.open == 0)
    host.gone.get(timeout=60)
    before = process.num_fds()
    for _ in range(10):
        client = host.dial()
        client.send(ECHO, b"x" * 100_000)
        client.recv(60)
        client.close()
        assert "wooly-tunnel" not in {t.name for t in threading.enumerate()}
    for _ in range(10):
        assert host.gone.get(timeout=60) == ""
    eventually(lambda: host.listener.open == 0 and process.num_fds() <= before)


def test_tunnel_closed_by_server_ends_normally(host):
    client = host.dial()
    client.send(BYE)
    assert broken(client) == "the executor closed the connection"


# -- missing peers -----------------------------------------------------------------------------------------------------


def test_open_tunnel_without_responder_raises(nats_server):
    with pytest.raises(ChannelClosedError, match="no service answers"):
        open_tunnel(nats_server, contracts.EXECUTOR_TUNNEL_OPEN.at("nobody"))
    assert "wooly-tunnel" not in {t.name for t in threading.enumerate()}


def test_open_tunnel_without_nats_server_hides_password():
    with pytest.raises(ChannelClosedError, match=r"cannot connect to NATS at nats://127\.0\.0\.1:9") as caught:
        open_tunnel("nats://user:secret@127.0.0.1:9", contracts.EXECUTOR_TUNNEL_OPEN.at("x"))
    assert "secret" not in str(caught.value)


def test_open_tunnel_silent_server_times_out():
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(ChannelTimeoutError, match=r"within 0\.3 s"):
        open_tunnel(f"nats://127.0.0.1:{mute.getsockname()[1]}", contracts.EXECUTOR_TUNNEL_OPEN.at("x"), timeout=0.3)


async def test_tunnel_tries_the_next_server_if_the_first_is_silent(nats_server, monkeypatch):
    monkeypatch.setattr(nats.aio.client, "shuffle", lambda servers: None)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        servers = Access(f"nats://127.0.0.1:{mute.getsockname()[1]},{nats_server}")
        tunnel = tunnels._Tunnel(servers, "00" * 8, tunnels.SILENT_BEATS)
        await tunnel.connect(0.6)
        assert not tunnel._client.options["allow_reconnect"]  # a stream with a gap is worth nothing
        await tunnel._disconnect(1.0)


async def test_open_tunnel_silent_executor_times_out(nats_server):
    client = Client()
    await client.connect(nats_server)
    await client.subscribe(contracts.EXECUTOR_TUNNEL_OPEN.at("mute").subject)
    await client.flush()
    await client.flush()
    with pytest.raises(ChannelTimeoutError, match=r"cannot open a tunnel to .*no answer within"):
        await asyncio.to_thread(open_tunnel, nats_server, contracts.EXECUTOR_TUNNEL_OPEN.at("mute"), timeout=0.3)
    await client.close()


def test_open_tunnel_above_limit_is_refused(nats_server):
    with contextlib.closing(Host(nats_server, "narrow", limits=TunnelLimits(total=1))) as host:
        first = host.dial()
        with pytest.raises(
            ChannelError,
            match=r"refused the tunnel: 1 tunnels are open on this executor; the limit is 1 \(WOOLY_EXECUTOR_TUNNELS\)",
        ):
            host.dial()
        first.close()
        eventually(lambda: host.listener.open == 0)
        host.dial().close()


def test_open_tunnel_subject_is_not_inbox_is_refused(host):
    client = ControlClient(host.url)
    for bad in ("wooly.v1.cmd.router.job.submit", "_INBOX.>", ""):
        request = OpenTunnelRequest.model_construct(inbox=bad, key="0" * 16, window=WINDOW)
        with pytest.raises(RefusedError, match="inbox") as refused:
            client.request(host.rpc, request)
        assert refused.value.code == "bus.envelope"
    client.close()
    assert host.listener.open == 0


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("nats://10.0.0.1:4333", "nats://10.0.0.1:4333#"),
        ("nats://user:pw@host", "nats://host:4222#"),
        ("one:4000, two:4000", "nats://one:4000#"),
        ("tls://[::1]:4222", "nats://[::1]:4222#"),
    ],
)
def test_tunnel_endpoint_has_server_and_no_password(url, endpoint):
    assert str(tunnel_endpoint(url, "gpu-0")) == endpoint + contracts.EXECUTOR_TUNNEL_OPEN.at("gpu-0").subject


def test_tunnel_endpoint_without_host_raises():
    with pytest.raises(EndpointError):
        tunnel_endpoint("nats://", "gpu-0")


# -- protocol violations -----------------------------------------------------------------------------------------------


class Spy:
    """Receives all messages of a server, and can publish messages with the key of the tunnel."""

    def __init__(self, client):
        self.client, self.request, self.reply, self.ends = client, None, None, queue.SimpleQueue()

    @classmethod
    async def start(cls, url):
        spy = cls(Client())
        await spy.client.connect(url)
        await spy.client.subscribe(">", cb=spy.hear)
        await spy.client.flush()
        await spy.client.flush()
        return spy

    async def hear(self, message):
        kind = (message.headers or {}).get("Wooly-Kind")
        if kind == "OpenTunnelRequest":
            self.request = OpenTunnelRequest.model_validate_json(message.data)
        elif kind == "OpenTunnelReply":
            self.reply = OpenTunnelReply.model_validate_json(message.data)
        elif len(message.data) > HEAD.size and HEAD.unpack_from(message.data)[1] == END:
            self.ends.put(message.data[HEAD.size :].decode())

    async def tunnel(self, host):
        """A connected client, after one message in each direction."""
        client = await asyncio.to_thread(host.dial)
        while self.reply is None or not client.acked:
            client.poll_acks()
            await asyncio.sleep(0.01)
        return client

    async def say(self, inbox, kind, number, data=b"", key=None):
        key = bytes.fromhex(self.request.key) if key is None else key
        await self.client.publish(inbox, HEAD.pack(key, kind, number) + data)
        await self.client.flush()


@pytest.fixture
def private_host():
    with start_nats_server() as url, contextlib.closing(Host(url, "private")) as running:
        yield running


async def test_tunnel_messages_without_key_are_ignored(private_host):
    spy = await Spy.start(private_host.url)
    client = await spy.tunnel(private_host)
    for inbox in (spy.request.inbox, spy.reply.inbox):
        for garbage in (b"", b"x", os.urandom(17), os.urandom(5000), HEAD.pack(bytes(8), END, 0)):
            await spy.client.publish(inbox, garbage)
        for kind in (DATA, CREDIT, BEAT, END, 99):
            await spy.say(inbox, kind, 7, b"evil", key=bytes(8))
    await asyncio.to_thread(client.send, ECHO, b"still here")
    assert (await asyncio.to_thread(client.recv, 60)).payload == b"still here"
    await asyncio.to_thread(client.close)
    assert await asyncio.to_thread(private_host.gone.get, timeout=60) == ""
    await spy.client.close()


@pytest.mark.parametrize("side", ["client", "server"])
@pytest.mark.parametrize(
    ("kind", "number", "data", "words"),
    [
        (DATA, 9, b"later", "received message 9, but expected message 2"),
        (DATA, 2, b"", "without credit"),
        (BEAT, 3, b"", "3 messages were sent, 1 were received"),
        (END, 3, b"", "3 messages were sent, 1 were received"),
        (CREDIT, 1 << 40, b"", "credit for"),
        (99, 0, b"", "kind 99"),
        (END, 1, b"the peer's own reason", "the peer's own reason"),
    ],
)
async def test_tunnel_protocol_violation_ends_with_reason(private_host, side, kind, number, data, words):
    spy = await Spy.start(private_host.url)
    client = await spy.tunnel(private_host)
    await spy.say(spy.request.inbox if side == "client" else spy.reply.inbox, kind, number, data)
    if (kind, data) == (END, b"the peer's own reason") and side == "server":
        assert words in await asyncio.to_thread(private_host.gone.get, timeout=60)
        await asyncio.to_thread(client.close)
    else:
        # The end that detects the violation sends the reason to the other end.
        assert words in await asyncio.to_thread(broken, client)
        if kind != END or number != 1:
            assert words in await asyncio.to_thread(private_host.gone.get, timeout=60)
    await spy.client.close()


async def test_tunnel_data_beyond_window_is_refused(private_host):
    spy = await Spy.start(private_host.url)
    spy.request = OpenTunnelRequest(inbox=spy.client.new_inbox(), key="0123456789abcdef", window=WINDOW)
    data, headers = encode(spy.request)
    answer = await spy.client.request(private_host.rpc.subject, data, timeout=5, headers=headers)
    inbox = OpenTunnelReply.model_validate_json(answer.data).inbox
    await spy.say(inbox, DATA, 1, HEADER.pack(0, 2, 0, 0, 1) + HEADER.pack(0, HOLD, 0, 0, 2))
    await asyncio.to_thread(eventually, lambda: private_host.held is not None)  # the data after this is not a frame
    chunk = bytes(500_000)
    for n in range(2, (WINDOW + 5 * tunnels.SOCKET_BUFFER) // len(chunk) + 2):
        await spy.say(inbox, DATA, n, chunk)
    await asyncio.to_thread(eventually, lambda: private_host.listener.open == 0)
    private_host.call(lambda: private_host.held.resume())
    assert "without credit" in await asyncio.to_thread(spy.ends.get, timeout=60)
    await spy.client.close()


# -- dead peers --------------------------------------------------------------------------------------------------------

HOST_PROCESS = """
import importlib.util, signal, sys
spec = importlib.util.spec_from_file_location("hosting", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.Host(sys.argv[2], "other")
print("ready", flush=True)
signal.pause()  # a main thread that has ended would keep the others from starting threads
"""
CLIENT_PROCESS = """
import sys, time
from wooly_bus import contracts
from wooly_bus.channel import ChannelClient
from wooly_bus.channel.tunnel import open_tunnel
client = ChannelClient(open_tunnel(sys.argv[1], contracts.EXECUTOR_TUNNEL_OPEN.on(sys.argv[2])))
client.send(2)
client.send(20, b"x")
client.recv(60)
print("ready", flush=True)
time.sleep(600)
"""


ASKING_PROCESS = """
import sys
from wooly_bus import contracts
from wooly_bus.channel import ChannelClient
from wooly_bus.channel.tunnel import open_tunnel
client = ChannelClient(open_tunnel(sys.argv[1], contracts.EXECUTOR_TUNNEL_OPEN.on(sys.argv[2])))
client.send(2)
print("ready", flush=True)
for number in iter(sys.stdin.readline, ""):
    client.send(20, number.encode())
    while not bytes(client.recv(60).payload):
        pass
    print(number, end="", flush=True)
"""


@pytest.fixture
def process(tmp_path):
    """Starts a process that runs a text, and waits until it is ready."""
    with contextlib.ExitStack() as stack:

        def start(code, *args):
            (tmp_path / "other_end.py").write_text(code)
            env = os.environ | {"PYTHONPATH": str(tmp_path)}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            running = stack.enter_context(Forked("other_end", *args, **pipes, env=env))
            stack.callback(running.kill)
            assert running.stdout.readline() == "ready\n"
            return running

        yield start


def test_tunnel_killed_listener_is_detected(nats_server, process):
    other = process(HOST_PROCESS, __file__, nats_server)
    client = greeted(ChannelClient(open_tunnel(nats_server, contracts.EXECUTOR_TUNNEL_OPEN.at("other"))))
    client.send(ECHO, b"x")
    client.recv(60)
    other.kill()
    assert "the other end closed its NATS connection" in broken(client)


def test_tunnel_outlasts_an_executor_that_stands_still_for_a_moment(nats_server, process, monkeypatch):
    """A virtual machine that is moved, a line that is slow. A connection over TCP outlasts it, too."""
    other = process(HOST_PROCESS, __file__, nats_server)
    monkeypatch.setattr(tunnels, "BEAT_S", 0.1)
    client = greeted(ChannelClient(open_tunnel(nats_server, contracts.EXECUTOR_TUNNEL_OPEN.at("other"))))
    other.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    other.send_signal(signal.SIGCONT)
    client.send(ECHO, b"x")
    client.recv(60)
    client.close()


def test_tunnel_frozen_listener_is_detected_while_sending(nats_server, process, monkeypatch):
    monkeypatch.setattr(tunnels, "SILENT_BEATS", 5)
    other = process(HOST_PROCESS, __file__, nats_server)
    client = greeted(ChannelClient(open_tunnel(nats_server, contracts.EXECUTOR_TUNNEL_OPEN.at("other"))))
    client.window = 1 << 40
    other.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(tunnels, "BEAT_S", 0.1)
    with pytest.raises(ChannelClosedError, match=r"silent for 0\.5 s"):
        while True:
            client.send(BULK, bytes(8), bytes(MB))
    client.close()


def test_tunnel_killed_client_is_detected(host, process):
    other = process(CLIENT_PROCESS, host.url, host.rpc.subject)
    other.kill()
    assert "the other end closed its NATS connection" in host.gone.get(timeout=60)


def asked(process, text):
    """What the executor echoes to a process of `ASKING_PROCESS`."""
    process.stdin.write(text)
    process.stdin.flush()
    return process.stdout.readline()


def test_tunnel_outlasts_a_client_that_is_stopped(host, process, monkeypatch):
    """Ctrl-Z, a debugger, a laptop that sleeps."""
    other = process(ASKING_PROCESS, host.url, host.rpc.subject)
    monkeypatch.setattr(tunnels, "BEAT_S", 0.1)
    assert asked(other, "before\n") == "before\n"
    other.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    other.send_signal(signal.SIGCONT)
    assert asked(other, "after\n") == "after\n" and host.gone.empty()
    other.kill()
    host.gone.get(timeout=60)


def test_tunnel_of_a_client_that_is_silent_for_too_long_ends(host, process, monkeypatch):
    monkeypatch.setattr(tunnels, "SILENT_CLIENT_BEATS", 5)
    other = process(ASKING_PROCESS, host.url, host.rpc.subject)
    monkeypatch.setattr(tunnels, "BEAT_S", 0.1)
    assert asked(other, "before\n") == "before\n"
    other.send_signal(signal.SIGSTOP)
    assert "silent for 0.5 s" in host.gone.get(timeout=60)


def test_tunnel_stopping_listener_sends_reason(host):
    client = host.dial()
    host.stop_listening()
    assert "the executor is stopping" in broken(client)


def test_tunnel_dead_nats_server_ends_both_ends():
    with contextlib.ExitStack() as server:
        host = Host(server.enter_context(start_nats_server()), "orphan")
        client = host.dial()
        client.send(ECHO, b"x")
        client.recv(60)
        server.close()
        assert "the connection to NATS" in broken(client)
        assert "the connection to NATS" in host.gone.get(timeout=60)
        host.close()
