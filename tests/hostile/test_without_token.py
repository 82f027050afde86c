"""The attacker has no token and can only reach the ports."""

import contextlib
import http.client
import json
import os
import resource
import shutil
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from wooly_bus import contracts
from wooly_bus.channel import ChannelClient, Endpoint, client_context
from wooly_bus.channel.framing import HEADER
from wooly_bus.rpc import ControlClient
from wooly_local.stack import StackError, begin_stack
from wooly_testkit import forks
from wooly_testkit.cluster import enter
from wooly_wis.frames import PROTOCOL, Kind, pack_json
from wooly_wis.messages import ClientFacts, OpenSessionRequest

pytestmark = pytest.mark.connected


# -- another user of a machine on which somebody has a local stack --------------------------------------------------------

ASKED = (
    *(
        "/",
        "/healthz",
        "/metrics",
        "/openapi.json",
        "/ui/",
        "/varz",
        "/connz",
        "/api/v1/me",
        "/api/v1/tasks",
        "/api/v1/nodes",
    ),
    *("/api/v1/sessions", "/api/v1/tenants", "/api/v1/config", "/api/v1/audit", "/api/v1/events", "/api/v1/traces"),
    *(
        "/api/v1/overview",
        "/api/v1/metrics/gpus",
        "/api/v1/metrics/history",
        "/api/v1/credits",
        "/api/v1/credits/entries",
    ),
)
#: A script that runs as another user: it opens every file below a folder, connects to every socket, and prints its successes.
READS = """
import os, socket, sys
os.setgroups([]), os.setgid(65534), os.setuid(65534)
print(os.listdir(sys.argv[1] + "/..") != [], file=sys.stderr)
for path, folders, names in os.walk(sys.argv[1]):
    for name in names + folders:
        one = os.path.join(path, name)
        try:
            if name.endswith(".sock"):
                socket.socket(socket.AF_UNIX).connect(one)
            elif os.path.isdir(one):
                os.listdir(one)
            else:
                open(one, "rb").close()
        except PermissionError:
            continue
        print(one)
"""


@pytest.fixture(scope="module")
def local():
    """A local stack in a folder that its owner left open to all users, with a session of the owner."""
    folder = Path(tempfile.mkdtemp(prefix="wooly-open-"))
    folder.chmod(0o755)
    before = os.umask(0o022)
    try:
        stack = forks.start_stack(folder / "state", ephemeral=True)
    finally:
        os.umask(before)
    control = ControlClient(stack.access())
    try:
        client = ClientFacts(host="h", pid=1, program="secret-script.py")
        control.request(contracts.ROUTER_SESSION_OPEN, OpenSessionRequest(client=client, tenant="victim"))
        yield stack
    finally:
        control.close()
        stack.stop()
        shutil.rmtree(folder, ignore_errors=True)


def ports_of(stack):
    """The listening ports of a stack's processes, by port."""
    listening = {}
    for name, pid in stack.services.items():
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            for c in process.net_connections("inet"):
                if c.status == psutil.CONN_LISTEN:
                    assert c.laddr.ip in ("127.0.0.1", "::1"), f"{name} listens on {c.laddr.ip}"
                    listening[c.laddr.port] = name
    return listening


def get_response(port, path, headers):
    """(status, body) of one request; (0, received bytes) from a server that does not speak HTTP."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(1 << 16)
    except (http.client.HTTPException, OSError) as e:
        return 0, str(e).encode()
    finally:
        connection.close()


def test_ports_of_local_stack_refuse_other_user(local):
    ports = ports_of(local)
    assert {"nats", "router", "scheduler", "metering"} <= set(ports.values())
    owner = {"Authorization": f"Bearer {local.token}"}
    deadline = time.monotonic() + 60
    shown = set()  # with the token all of this is visible, without it nothing
    while len(shown) < 2 and time.monotonic() < deadline:
        for port, name in ports.items():
            for path in ("/metrics", "/api/v1/tasks"):
                _, body = get_response(port, path, owner)
                shown |= {name} & {"router", "scheduler"} if b"victim" in body else set()
    assert shown == {"router", "scheduler"}
    for headers in (
        {},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer wooly_guess"},
        {"Cookie": "wooly_token=x"},
    ):
        for port, name in ports.items():
            for path in ASKED:
                status, body = get_response(port, path, headers)
                assert b"victim" not in body and b"secret-script" not in body, (name, path)
                if path.startswith("/api/v1/") and name == "router":
                    assert status == 401, (name, path, status)  # also for paths that do not exist
    for port, name in ports.items():
        if name == "router":
            request = urllib.request.Request(f"http://127.0.0.1:{port}/api/v1/login/code", b"{}", {}, method="POST")
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(request, timeout=10)


def test_files_and_sockets_of_local_stack_are_private(local):
    found = [path for path in local.state_dir.rglob("*") if not path.is_symlink()]
    open_ = [(str(p), oct(p.lstat().st_mode)) for p in found if stat.S_IMODE(p.lstat().st_mode) & 0o077]
    assert open_ == [] and len(found) > 30
    if os.geteuid() == 0:
        local.state_dir.chmod(0o755)  # even with an open folder
        argv = [sys.executable, "-c", READS, str(local.state_dir)]
        told = subprocess.run(argv, capture_output=True, text=True, cwd="/")
        assert (told.returncode, told.stdout, told.stderr) == (0, "", "True\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder to another user")
def test_folder_of_other_user_is_refused_and_links_are_not_followed(tmp_path):
    victim, trap = tmp_path / "victim", tmp_path / "trap"
    victim.write_text("not to be emptied")
    trap.mkdir(mode=0o755)
    (trap / "supervisor.log").symlink_to(victim)
    os.chown(trap, 65534, 65534)
    with pytest.raises(StackError, match="belongs to user 65534"):
        begin_stack(trap)
    assert victim.read_text() == "not to be emptied"


def test_login_address_is_valid_once_and_not_logged(local):
    address = local.ui_url()
    code = address.rpartition("/")[2]
    assert address == f"{local.rest_url}/ui/#/login/{code}" and len(code) > 40
    logins = []
    for _ in range(2):
        request = urllib.request.Request(
            f"{local.rest_url}/api/v1/login", json.dumps({"token": code}).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                logins.append((json.load(answer)["actor"], answer.headers["Set-Cookie"]))
        except urllib.error.HTTPError as e:
            logins.append(e.code)
    (actor, cookie), second = logins
    assert actor == "owner" and "HttpOnly" in cookie and "SameSite=strict" in cookie and second == 401
    secret = cookie.partition("=")[2].partition(";")[0]
    for log in (local.state_dir / "logs").iterdir():
        text = log.read_text(errors="replace")
        assert not any(one in text for one in (code, secret, local.token)), log


# -- the executor's TLS port -----------------------------------------------------------------------------------------------

#: A training without a PyTorch optimizer, whose import would take most of the time.
TRAINING = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(20, 3).cuda()
x, y = torch.randn(50, 20).cuda(), (torch.arange(50) % 3).cuda()
losses = []
for _ in range(10):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients):
            parameter -= 0.1 * gradient
    losses.append(loss.item())
print("trained", losses[-1] < losses[0])
"""


@pytest.fixture
def opened(carol):
    made = carol.open()
    yield made
    carol.close(made)


@pytest.fixture
def port(opened):
    """The executor's TLS endpoint."""
    (part,) = opened.parts
    return next(e for e in map(Endpoint.parse, part.endpoints) if e.scheme == "tls")


def connect_to(port):
    return socket.create_connection((port.host, port.port), 30)


def synced(channel):
    channel.send(Kind.SYNC)
    return channel.recv(60).kind == Kind.RESULT


def test_resets_during_handshake_end_no_session(opened, port, carol, certificates, tmp_path):
    """Regression test: 20 resets at the wrong moment used to end the device thread."""
    inside, welcome = enter(opened)
    assert welcome.kind == Kind.WELCOME
    for n in range(600):
        sock = connect_to(port)
        with contextlib.suppress(OSError):
            sock.sendall((b"", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\n\r\n")[n % 3])
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
        if n % 100 == 0:
            assert synced(inside)
    assert synced(inside)
    inside.close()
    path = tmp_path / "script.py"
    path.write_text(TRAINING)
    env = carol.env(TLS_CA=str(certificates.authority), CHANNEL="direct")
    ran = forks.run("wooly", "run", str(path), env=env, timeout=100)
    assert ran.returncode == 0 and "trained True" in ran.stdout, ran.stderr


def test_half_open_connections_do_not_block_clients(opened, port, certificates):
    """More half-open connections than the executor's limit for strangers. Some of them send a byte now and then."""
    held = [connect_to(port) for _ in range(400)]
    for sock in held[::7]:
        with contextlib.suppress(OSError):
            sock.send(b"\x16")
    channel = ChannelClient.connect(port, timeout=30, tls=client_context(certificates.authority))
    hello = {"protocol": PROTOCOL, "session_id": opened.session_id, "token": opened.parts[0].token}
    channel.send(Kind.HELLO, pack_json(hello))
    assert channel.recv(60).kind == Kind.WELCOME and synced(channel)
    channel.close()
    for sock in held:
        sock.close()


@pytest.mark.parametrize(
    "frame",
    [
        HEADER.pack(1 << 20, Kind.HELLO, 0, 0, 1),
        HEADER.pack(0, Kind.RUN, 0, 0, 1),
        HEADER.pack(5, Kind.HELLO, 0, 0, 1) + b"{nope",
        HEADER.pack(60_000, Kind.HELLO, 0, 0, 1) + b"[" * 60_000,
    ],
    ids=["oversize hello", "run first", "no json", "deep json"],
)
def test_invalid_first_frame_is_refused_with_reason(opened, port, certificates, frame):
    with client_context(certificates.authority).wrap_socket(connect_to(port), server_hostname="localhost") as sock:
        sock.sendall(frame)
        said = b""
        with contextlib.suppress(OSError):
            while part := sock.recv(4096):
                said += part
    assert said[4] == Kind.ERROR and b'"message"' in said
    inside, welcome = enter(opened)
    assert welcome.kind == Kind.WELCOME and synced(inside)
    inside.close()


PATIENCE_S = 30
#: HTTP ports of the cluster: the service, the file with its port, a public path.
PORTS = {
    "router": ("router/router.port", "/healthz"),
    "metering": ("metering/metering.port", "/healthz"),
    "scheduler": ("scheduler/scheduler.port", "/metrics"),
}


def port_of(cluster, service):
    return int((cluster.folder / PORTS[service][0]).read_text())


def resident_bytes(process):
    """The resident memory of a process, in bytes."""
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def descriptors(process):
    return len(list(Path(f"/proc/{process.pid}/fd").iterdir()))


def answer(sock):
    """(status, code) of the answer on a connection."""
    raw = b""
    while b"\r\n\r\n" not in raw:
        part = sock.recv(65536)
        assert part, raw
        raw += part
    head, _, body = raw.partition(b"\r\n\r\n")
    (length,) = [int(line[16:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length: ")]
    while len(body) < length:
        body += sock.recv(65536)
    return int(head.split()[1]), json.loads(body)["code"]


def head(path, *more):
    return "\r\n".join([f"POST {path} HTTP/1.1", "host: h", "content-type: application/json", *more, "", ""]).encode()


@contextlib.contextmanager
def flood(port, count, sent=b""):
    """Open `count` connections that send only `sent`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(count):
                sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S))
                with contextlib.suppress(ConnectionError):
                    sock.sendall(sent)
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_body_of_200_mib_is_refused_unread(cluster):
    before = resident_bytes(cluster.processes["router"])
    with socket.create_connection(("127.0.0.1", port_of(cluster, "router")), PATIENCE_S) as sock:
        sock.sendall(head("/api/v1/tasks", f"content-length: {200 << 20}"))
        assert answer(sock) == (401, "router.unauthorized")
        sent = 0
        with contextlib.suppress(ConnectionError):  # the server closes the connection long before
            while sent < 200 << 20:
                sock.sendall(bytes(1 << 20))
                sent += 1 << 20
                assert cluster.rest("GET", "me")["auth"] == "tokens"
        assert sent < 200 << 20
    with socket.create_connection(("127.0.0.1", port_of(cluster, "router")), PATIENCE_S) as sock:
        sock.sendall(head("/api/v1/login", "transfer-encoding: chunked") + b"100000\r\n" + bytes(1 << 20))
        assert answer(sock) == (413, "router.too_large")
    assert resident_bytes(cluster.processes["router"]) < before + (64 << 20)


@pytest.mark.parametrize("service", [pytest.param(s, marks=() if s == "router" else pytest.mark.slow) for s in PORTS])
def test_two_thousand_connections_do_not_block_others(cluster, service):
    _, path = PORTS[service]
    for sent in (b"", head("/api/v1/login", "x: y")[:-4]):
        with flood(port_of(cluster, service), 1000, sent):
            with urllib.request.urlopen(f"http://127.0.0.1:{port_of(cluster, service)}{path}", timeout=PATIENCE_S) as r:
                assert r.status == 200
            assert cluster.rest("GET", "me")["auth"] == "tokens"
            assert descriptors(cluster.processes[service]) < 600


def test_full_descriptor_table_leaves_access_for_operator(cluster, alice):
    router = cluster.processes["router"]
    usual = resource.prlimit(router.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(router.pid, resource.RLIMIT_NOFILE, (descriptors(router) + 20, usual[1]))
    try:
        with flood(port_of(cluster, "router"), 200):
            for _ in range(20):
                assert cluster.rest("GET", "me")["auth"] == "tokens"
    finally:
        resource.prlimit(router.pid, resource.RLIMIT_NOFILE, usual)
    assert "cannot accept connections" in cluster.log("router")
    assert alice.close(alice.open()).closed


def test_token_guessing_slows_only_the_guesser(cluster, alice):
    assert cluster.rest("GET", "me", token=alice.token)["tenant"] == "alice"
    refused = set()
    stop = threading.Event()

    def guess():
        while not stop.is_set() and "router.too_many" not in refused:
            refused.add(cluster.rest("POST", "login", {"token": "guess"}, token="none"))

    guessers = [threading.Thread(target=guess) for _ in range(4)]
    for guesser in guessers:
        guesser.start()
    try:
        for guesser in guessers:
            guesser.join(PATIENCE_S)
        assert refused == {"router.unauthorized", "router.too_many"}
        assert cluster.rest("GET", "me", token=alice.token)["tenant"] == "alice"
    finally:
        stop.set()
