"""Tests of the admission of connections: one client per session, and none after the session has ended."""

import os
import socket
import threading

import pytest
from wooly_bus.channel import ChannelClient, ChannelServer, Connected, Guest
from wooly_bus.channel.token import SharedPass
from wooly_executor.connection_admission import ConnectionAdmission, HelloRefusedError
from wooly_testkit import forks
from wooly_wis.frames import PROTOCOL, Kind, pack_json, unpack_json


def hello(session_id="a", token="secret", **more):
    return bytearray(pack_json({"protocol": PROTOCOL, "session_id": session_id, "token": token, **more}))


class Slow:
    """A pass whose check waits until all clients are inside it."""

    def __init__(self, n):
        self.barrier = threading.Barrier(n)

    def check(self, shown):
        self.barrier.wait(30)


def test_admission_many_hellos_with_one_pass_admits_one():
    entrance, slow = ConnectionAdmission(), Slow(8)
    entrance.open("a", slow)
    outcomes = []

    def enter():
        try:
            outcomes.append(entrance.check(hello()).entry is slow)
        except HelloRefusedError as e:
            outcomes.append(str(e))

    threads = [threading.Thread(target=enter) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count(True) == 1
    assert outcomes.count("the session already has a client; a token opens one channel only") == 7


def test_admission_session_closed_during_the_check_refuses_the_hello():
    class Closing:
        def check(self, shown):
            entrance.close("a")
            entrance.open("a", SharedPass("another"))

    entrance = ConnectionAdmission()
    entrance.open("a", Closing())
    with pytest.raises(HelloRefusedError, match="not open here"):
        entrance.check(hello())
    assert entrance.check(hello(token="another")).session_id == "a"


def test_admission_refused_hello_leaves_the_pass_usable():
    entrance = ConnectionAdmission()
    entrance.open("a", SharedPass("secret"))
    for wrong in (hello(token="other"), hello("b"), hello(jit="fast"), hello(protocol=99), bytearray(b"[]")):
        with pytest.raises(HelloRefusedError):
            entrance.check(wrong)
    found = entrance.check(hello(jit="full", trace="t"))
    assert (found.session_id, found.jit, found.trace) == ("a", "full", "t")


def test_admission_session_reopened_after_the_check_refuses_the_client(device, wis):
    """The session is closed and opened again under the same name, so the client was admitted to an older session."""
    entry = SharedPass("secret")
    device.call(lambda: device.loop.sessions.open("a", entry, None))
    admitted = device.loop.admission.check(hello())
    device.call(lambda: device.loop.sessions.close("a", "closed by a test"))
    device.admit("a")
    near, far = socket.socketpair()
    far.setblocking(False)
    device.loop.server.enter(Guest(far, "late", admitted))
    client = ChannelClient(near)
    frame = client.recv(30)
    said = unpack_json(frame.payload)
    assert frame.kind == Kind.ERROR and said["code"] == "executor.no_session" and "not open here" in said["message"]
    client.close()
    rightful = wis.client(device.endpoint, "a", "token of a")
    assert rightful.sync() == {}
    rightful.close()


def test_admission_signature_is_verified_outside_the_devices_thread(device, wis):
    """The acceptor's thread checks the pass."""
    checked = []

    class Watched:
        def check(self, shown):
            checked.append(threading.current_thread())

    device.call(lambda: device.loop.sessions.open("a", Watched(), None))
    client = wis.client(device.endpoint, "a", "anything")
    assert client.sync() == {} and [t.name for t in checked] == ["acceptor"]
    client.close()


def test_admission_local_socket_of_a_job_is_checked(device):
    device.admit("a")
    near, far = socket.socketpair()
    device.loop.acceptor.adopt(far, "job")
    client = ChannelClient(near)
    client.send(Kind.HELLO, bytes(hello(token="token of a")))
    assert client.recv(30).kind == Kind.WELCOME
    client.close()


WITH_A_DEAD_ACCEPTOR = """
import sys
from wooly_bus.channel import Acceptor
from wooly_executor.app import main
Acceptor._timeout = lambda self: 1 / 0
sys.exit(main(["--standalone", "--token", "t", "--runtime", "torch_cpu", "--listen", sys.argv[1]]))
"""


def test_executor_acceptor_failed_exits_with_status_4(tmp_path):
    """Without its acceptor, an executor would keep its sessions but admit no clients. The supervisor starts another executor."""
    (tmp_path / "with_a_dead_acceptor.py").write_text(WITH_A_DEAD_ACCEPTOR)
    env = os.environ | {"OMP_NUM_THREADS": "1", "WOOLY_EXECUTOR_STATE_DIR": str(tmp_path)}
    options = {"like": "wooly_executor", "cwd": tmp_path, "env": env}
    ran = forks.run("with_a_dead_acceptor", f"unix://{tmp_path}/s", timeout=120, **options)
    assert ran.returncode == 4 and "ZeroDivisionError" in ran.stderr, ran.stderr


def test_server_connection_admitted_between_polls_is_served():
    server, (near, far) = ChannelServer(), socket.socketpair()
    far.setblocking(False)
    threading.Thread(target=server.enter, args=(Guest(far, "g", 7),)).start()
    (event,) = server.poll(30)
    assert isinstance(event, Connected) and event.admitted == 7
    server.close()
    near.close()
