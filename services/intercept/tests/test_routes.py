"""Endpoints of an executor that offers TLS: if an attacker on the network breaks TLS, the client does not use plain text."""

import contextlib
import http.client
import json
import socket
import threading
import urllib.error

import pytest
from wooly import access, control, opening, turn
from wooly.control import ControlError, Controller
from wooly.errors import NotConnectedError
from wooly.routes import is_loopback, reason_not_to_try, tunnel_is_safe
from wooly.settings import Settings
from wooly_bus.access import Access
from wooly_bus.channel import ChannelClient, ChannelClosedError, Endpoint, client_context, server_context
from wooly_testkit.certificates import make_certificates

TLS, TCP = "tls://gpu.example.org:7400", "tcp://gpu.example.org:7401"
NATS = "nats://control.example.org:4222#wooly.v1.rpc.executor.tunnel.open.x"
UNIX, LOCAL = "unix:///run/x.sock", "tcp://127.0.0.1:7401"


@pytest.mark.parametrize(
    ("offered", "nats_url", "channel", "plaintext", "tried"),
    [
        ([TLS, TCP, NATS], "nats://control.example.org", "auto", False, [TLS]),
        ([TCP, TLS, NATS], "nats://control.example.org", "auto", False, [TLS]),
        ([TLS, TCP, NATS], "nats://control.example.org", "auto", True, [TLS, TCP, NATS]),
        ([TLS, UNIX, LOCAL, NATS], "tls://control.example.org", "auto", False, [TLS, UNIX, LOCAL, NATS]),
        ([TLS, NATS], "tls://a.example.org,nats://b.example.org", "auto", False, [TLS]),
        ([TLS, NATS], "nats://127.0.0.1:4222, nats://[::1]:4222", "auto", False, [TLS, NATS]),
        ([TCP, NATS], "nats://control.example.org", "auto", False, [TCP, NATS]),
        ([TLS, TCP, NATS], "nats://control.example.org", "direct", False, [TLS]),
        ([TLS, TCP, NATS], "nats://control.example.org", "tunnel", False, [NATS]),
    ],
    ids=[
        "TLS first",
        "TLS later",
        "plain text allowed",
        "safe endpoints without TLS",
        "one NATS server in plain text",
        "NATS on this host",
        "no TLS offered",
        "direct",
        "only tunnels, as the user chose",
    ],
)
def test_why_not_allows_expected_endpoints(offered, nats_url, channel, plaintext, tried):
    parsed = [Endpoint.parse(text) for text in offered]
    found = {str(e): reason_not_to_try(e, parsed, channel, nats_url, plaintext) for e in parsed}
    assert [text for text, why in found.items() if not why] == tried
    assert all("WOOLYAI_" in why for why in found.values() if why)


@pytest.mark.parametrize(
    ("host", "ours"),
    [("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("", False)]
    + [("localhost.example.org", False), ("127.0.0.1.example.org", False)],
)
def test_is_loopback_host(host, ours):
    assert (
        is_loopback(host) == ours
        and tunnel_is_safe(f"nats://{host}:4222" if ":" not in host else f"nats://[{host}]") == ours
    )


# -- with real sockets ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("tls"), "localhost")


@contextlib.contextmanager
def listening(answer):
    """Start a server on this host. Yields its port, and the list of accepted connections."""
    seen = []
    with socket.create_server(("localhost", 0)) as server:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = server.accept()
                    seen.append(sock)
                    with contextlib.suppress(OSError):
                        answer(sock)
                    sock.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1], seen
        finally:  # a failed test would leave a thread that keeps the process from ending
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def attach(*endpoints, tls_ca=None, plaintext=False):
    """The error of a client that cannot connect. Calls `_connect`, because `attach` does nothing if the process has a session."""
    with pytest.raises(NotConnectedError) as failed:
        greet = opening.greeting("session", "secret", "exact", "", None)
        opening.connect(opening.Part(endpoints), opening.Reach(tls_ca=tls_ca, plaintext=plaintext), greet)
    return str(failed.value)


def shaking_hands(files):
    context = server_context(files.certificate, files.key)

    def answer(sock):
        context.wrap_socket(sock, server_side=True).close()

    return answer


def test_attach_untrusted_certificate_tries_no_other_endpoint(files):
    with listening(shaking_hands(files)) as (secure, _), listening(lambda sock: None) as (plain, seen):
        said = attach(f"tls://localhost:{secure}", f"tcp://localhost:{plain}", plaintext=True)
    assert "certificate is not trusted" in said and "WOOLYAI_TLS_CA" in said and not seen


def test_attach_plain_server_on_tls_endpoint_tries_no_other_endpoint(files):
    with (
        listening(lambda sock: sock.sendall(b"HTTP/1.1 400 Bad\r\n\r\n")) as (secure, _),
        listening(lambda sock: None) as (plain, seen),
    ):
        said = attach(f"tls://localhost:{secure}", f"tcp://localhost:{plain}", tls_ca=files.authority)
    assert "the executor does not speak TLS" in said and not seen


def test_attach_silent_tls_endpoint_uses_no_plain_text(files, monkeypatch):
    tried = []

    def connect(endpoint, *, tls=None):
        tried.append(str(endpoint))
        raise ChannelClosedError("connection refused")

    monkeypatch.setattr(ChannelClient, "connect", connect)
    said = attach(TLS, TCP, UNIX)
    assert tried == [TLS, UNIX]
    assert (
        f"{TCP}: not tried: this endpoint is not encrypted, but the executor offers TLS; set WOOLYAI_PLAINTEXT=1"
        in said
    )
    attach(TLS, TCP, UNIX, plaintext=True)
    assert tried[2:] == [TLS, TCP, UNIX]


def test_attach_interrupted_handshake_is_not_a_trust_error(files):
    with listening(lambda sock: sock.recv(1)) as (port, _), pytest.raises(ChannelClosedError, match=r"handshake|reset"):
        ChannelClient.connect(Endpoint("tls", "localhost", port), tls=client_context(files.authority))


def test_rest_untrusted_certificate_error_names_setting(files):
    with (
        listening(shaking_hands(files)) as (port, _),
        pytest.raises(access.AccessError, match=r"certificate that is not trusted.*WOOLYAI_TLS_CA") as failed,
    ):
        access.RestCredentials(f"https://localhost:{port}", "token")
    assert isinstance(failed.value.__cause__, urllib.error.URLError)


def test_rest_redirect_does_not_send_token():
    with listening(lambda sock: None) as (elsewhere, seen):
        answer = f"HTTP/1.1 302 Found\r\nLocation: http://localhost:{elsewhere}/\r\nContent-Length: 0\r\n\r\n".encode()

        def send_away(sock):
            sock.recv(4096)
            sock.sendall(answer)

        with listening(send_away) as (port, _), pytest.raises(access.AccessError, match="HTTP 302"):
            access.RestCredentials(f"http://localhost:{port}", "token")
        assert not seen


def refusing(sent, code, retryable):
    """Answer each request with a refusal."""
    body = json.dumps({"code": "router.database", "message": "the database does not answer", "retryable": retryable})

    def answer(sock):
        sock.recv(4096)
        sent.append(code)
        sock.sendall(f"HTTP/1.1 {code} No\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode())

    return answer


@pytest.mark.parametrize(("code", "retryable", "cure"), [(503, True, "Try again later"), (401, False, "API token")])
def test_rest_refusal_is_repeated_while_database_is_away(monkeypatch, code, retryable, cure):
    monkeypatch.setattr(access, "RETRY_S", 0.5)
    sent = []
    with listening(refusing(sent, code, retryable)) as (port, _), pytest.raises(access.AccessError, match=cure):
        access.RestCredentials(f"http://localhost:{port}", "token")
    assert len(sent) > 1 if retryable else len(sent) == 1


def test_new_session_waits_while_rest_has_no_database(monkeypatch, capsys):
    """It used to end with an error after 15 s."""
    monkeypatch.setattr(access, "RETRY_S", 0.0)
    monkeypatch.setattr(turn, "QUIET_S", 0.0)
    monkeypatch.setattr(turn, "RETRY_S", 0.01)
    sent = []
    with listening(refusing(sent, 503, True)) as (port, _):
        settings = Settings(controller_url=f"http://localhost:{port}", credential="token", queue_s=0.5)
        with pytest.raises(
            turn.QueueTimeoutError, match=r"within 0.5 s \(WOOLYAI_QUEUE_S\): .*the database does not answer"
        ):
            control.open_session(settings)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith(
        "wooly: the session waits for the controller's database: the controller at"
    )
    assert len(sent) > 1


def test_new_session_that_must_not_wait_ends_while_rest_has_no_database(monkeypatch):
    monkeypatch.setattr(access, "RETRY_S", 0.0)
    sent = []
    with listening(refusing(sent, 503, True)) as (port, _):
        settings = Settings(controller_url=f"http://localhost:{port}", credential="token", queue_s=0)
        with pytest.raises(control.ControlError, match="the database does not answer") as caught:
            control.open_session(settings)
    assert caught.value.code == turn.DATABASE_AWAY and len(sent) == 1


@pytest.mark.parametrize(("retry_s", "asked"), [(0.0, 2), (1.0, 4)])
def test_rest_slow_controller_is_asked_again(monkeypatch, retry_s, asked):
    monkeypatch.setattr(access, "TIMEOUTS_S", (0.1, 0.2))
    monkeypatch.setattr(access, "RETRY_S", retry_s)

    def silent(sock):
        while sock.recv(4096):  # until the client gives up
            pass

    with listening(silent) as (port, seen), pytest.raises(access.AccessError, match=r"not answer within 0.2 s"):
        access.RestCredentials(f"http://localhost:{port}", "token")
    assert len(seen) == 2 if retry_s == 0 else len(seen) >= asked


def test_rest_of_a_controller_that_cannot_be_reached_is_asked_twice(monkeypatch):
    """A wrong address is told soon."""
    asked = []

    def unreachable(self, *_, **__):
        asked.append(self)
        raise TimeoutError("timed out")

    monkeypatch.setattr(http.client.HTTPConnection, "connect", unreachable)
    with pytest.raises(access.AccessError, match="did not answer within 4 s"):
        access.RestCredentials("http://localhost:1", "token")
    assert len(asked) == 2


@pytest.mark.parametrize("begin", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"])
def test_rest_connection_that_breaks_is_asked_again(monkeypatch, begin):
    """A router that is stopped ends its connections; another one may answer."""
    monkeypatch.setattr(access, "RETRY_S", 0.5)

    def breaking(sock):
        sock.recv(4096)
        sock.sendall(begin)

    with (
        listening(breaking) as (port, seen),
        pytest.raises(access.AccessError, match=r"the connection to .* broke: .* Try again later"),
    ):
        access.RestCredentials(f"http://localhost:{port}", "token")
    assert len(seen) > 1


def greeting(tls_required, then=lambda sock: None):
    """Answer with the first line of a NATS server, then call `then`."""

    def answer(sock):
        info = {"server_id": "x", "version": "2.10.0", "max_payload": 1 << 20, "tls_required": tls_required}
        sock.sendall(b"INFO " + json.dumps(info).encode() + b"\r\n")
        then(sock)

    return answer


def test_nats_untrusted_certificate_error_names_setting(files):
    with (
        listening(greeting(True, shaking_hands(files))) as (port, _),
        pytest.raises(ControlError, match=r"certificate that is not trusted.*WOOLYAI_TLS_CA"),
    ):
        Controller(Access(f"tls://localhost:{port}"))


def test_nats_tls_sends_no_credentials_in_plain_text(files):
    """An attacker answers that TLS is not required. The client must not send user and password."""
    heard = []

    def listen(sock):
        sock.settimeout(60)
        heard.append(sock.recv(4096))

    with (
        listening(greeting(False, listen)) as (port, _),
        pytest.raises(ControlError, match="does not offer TLS, so nothing was sent to it"),
    ):
        Controller(Access(f"tls://user:password@localhost:{port}", None, files.authority))
    assert heard == [b""]
