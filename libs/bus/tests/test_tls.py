"""TLS on the data channel: bytes arrive as without TLS, and errors name the problem with a certificate."""

import contextlib
import os
import socket
import threading

import pytest
from wooly_bus.channel import (
    ChannelClient,
    ChannelClosedError,
    ChannelError,
    ChannelServer,
    ChannelTlsError,
    Connected,
    Disconnected,
    Endpoint,
    FrameReceived,
    client_context,
    server_context,
)
from wooly_testkit.certificates import make_certificates
from wooly_testkit.channel import acceptor_of, connect

ECHO, BULK, FETCH = 20, 21, 22
MB = 1 << 20


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("tls"), "localhost")


class Server:
    """Echoes, stores bulk data and sends it back, behind a certificate for "localhost"."""

    def __init__(self, files):
        self.memory = bytearray(32 * MB)
        self.channels = ChannelServer({BULK: 8}, self.sink)
        self.acceptor = acceptor_of(self.channels)
        self.endpoint = self.acceptor.listen(Endpoint("tls", "localhost"), server_context(files.certificate, files.key))
        self.acceptor.start()
        self.gone, self.stopping = [], threading.Event()
        self.thread = threading.Thread(target=self.loop)
        self.thread.start()

    def sink(self, conn, kind, prefix, n):
        at = int.from_bytes(prefix, "little")
        return memoryview(self.memory)[at : at + n]

    def loop(self):
        while not self.stopping.is_set():
            for event in self.channels.poll(1):
                if isinstance(event, Connected):
                    event.conn.ack(1)
                elif isinstance(event, Disconnected):
                    self.gone.append(event.reason)
                elif isinstance(event, FrameReceived):
                    event.conn.ack(event.seq)
                    if event.kind == ECHO:
                        event.conn.send(ECHO, event.payload)
                    elif event.kind == FETCH:
                        for at in range(0, len(self.memory), MB):
                            event.conn.send(FETCH, memoryview(self.memory)[at : at + MB])
        self.channels.close()

    def close(self):
        self.acceptor.close()
        self.stopping.set()
        self.channels.wake()
        self.thread.join()


@pytest.fixture
def server(files):
    with contextlib.closing(Server(files)) as running:
        yield running


def test_tls_frames_and_bulk_data_arrive_both_ways(server, files):
    client = connect(server.endpoint, client_context(files.authority))
    for n in (0, 1, 16_384, 16_385, 3 * MB):
        data = os.urandom(n)
        client.send(ECHO, data[: n // 2], memoryview(data)[n // 2 :])
        assert client.recv(60).payload == data
    data = os.urandom(len(server.memory))
    for at in range(0, len(data), 4 * MB):
        client.send(BULK, at.to_bytes(8, "little"), memoryview(data)[at : at + 4 * MB])
    into = bytearray(len(data))
    client.send(FETCH)
    assert client.recv_data(memoryview(into), FETCH) is None
    assert into == data
    client.poll_acks()  # nothing has arrived: the call must not wait
    client.close()


def test_tls_two_clients_do_not_mix_bytes(server, files):
    clients = [connect(server.endpoint, client_context(files.authority)) for _ in range(2)]
    for n in range(50):
        for mark, client in enumerate(clients):
            client.send(ECHO, bytes([mark]) * n)
    for n in range(50):
        for mark, client in enumerate(clients):
            assert client.recv(60).payload == bytes([mark]) * n
    for client in clients:
        client.close()


def test_connect_untrusted_authority_is_refused(server):
    with pytest.raises(ChannelTlsError, match="not trusted"):
        ChannelClient.connect(server.endpoint)


def test_connect_certificate_of_other_host_is_refused(server, files):
    elsewhere = Endpoint("tls", "127.0.0.1", server.endpoint.port)
    with pytest.raises(ChannelTlsError, match=r"not trusted.*127\.0\.0\.1"):
        ChannelClient.connect(elsewhere, tls=client_context(files.authority))


def test_connect_server_without_tls_is_refused(files):
    with socket.create_server(("localhost", 0)) as plain:

        def answer():
            conn, _ = plain.accept()
            with conn:
                conn.recv(1000)
                conn.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ChannelTlsError, match="the executor does not speak TLS"):
            ChannelClient.connect(
                Endpoint("tls", "localhost", plain.getsockname()[1]), tls=client_context(files.authority)
            )
        thread.join()


def test_client_without_tls_does_not_affect_others(server, files, caplog):
    with socket.create_connection(("localhost", server.endpoint.port)) as plain:
        # Random bytes would sometimes look like the beginning of a ClientHello of SSL 2, and the server would wait for its end.
        plain.sendall(b"not TLS " * 125)
        with contextlib.suppress(ConnectionError):
            while plain.recv(1000):
                pass
    client = connect(server.endpoint, client_context(files.authority))
    client.send(ECHO, b"still here")
    assert client.recv(60).payload == b"still here"
    client.close()
    assert "TLS handshake failed" in caplog.text


def test_silent_client_does_not_block_others(server, files):
    with socket.create_connection(("localhost", server.endpoint.port)):
        client = connect(server.endpoint, client_context(files.authority))
        client.send(ECHO, b"x")
        assert client.recv(60).payload == b"x"
        client.close()


def test_connect_without_listener_is_no_tls_error(files):
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ChannelClosedError):
        ChannelClient.connect(Endpoint("tls", "localhost", port), tls=client_context(files.authority))


def test_server_context_invalid_certificate_or_key_raises(files, tmp_path):
    with pytest.raises(ChannelTlsError, match="no certificate is configured"):
        server_context(None, None)
    with pytest.raises(ChannelTlsError, match=r"cannot read .*missing\.pem: No such file"):
        server_context(tmp_path / "missing.pem", None)
    other = make_certificates(tmp_path, "localhost")
    with pytest.raises(ChannelTlsError, match="cannot use certificate"):
        server_context(files.certificate, other.key)
    with pytest.raises(ChannelTlsError, match="cannot use certificate"):
        server_context(files.key, files.key)
    channels = ChannelServer()
    acceptor = acceptor_of(channels)
    with pytest.raises(ChannelError, match="TLS context"):
        acceptor.listen(Endpoint("tls", "localhost"))
    acceptor.close()
    channels.close()


def test_client_context_invalid_authorities_raise(files, tmp_path):
    with pytest.raises(ChannelTlsError, match=r"cannot read .*missing\.pem: No such file"):
        client_context(tmp_path / "missing.pem")
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    with pytest.raises(ChannelTlsError, match="contains no certificates"):
        client_context(empty)
