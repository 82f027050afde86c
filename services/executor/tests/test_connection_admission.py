"""Who may enter: one client per session, whatever comes at once, and nobody whose session ended meanwhile."""

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
    """A pass whose check waits until all who try are inside it."""

    def __init__(self, n):
        self.barrier = threading.Barrier(n)

    def check(self, shown):
        self.barrier.wait(30)


def test_pass_shown_by_many_at_once_lets_one_in():
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


def test_session_that_closes_while_its_pass_is_checked_lets_nobody_in():
    class Closing:
        def check(self, shown):
            entrance.close("a")
            entrance.open("a", SharedPass("another"))

    entrance = ConnectionAdmission()
    entrance.open("a", Closing())
    with pytest.raises(HelloRefusedError, match="not open here"):
        entrance.check(hello())
    assert entrance.check(hello(token="another")).session_id == "a"


def test_refused_hello_does_not_use_the_pass_up():
    entrance = ConnectionAdmission()
    entrance.open("a", SharedPass("secret"))
    for wrong in (hello(token="other"), hello("b"), hello(jit="fast"), hello(protocol=99), bytearray(b"[]")):
        with pytest.raises(HelloRefusedError):
            entrance.check(wrong)
    found = entrance.check(hello(jit="full", trace="t"))
    assert (found.session_id, found.jit, found.trace) == ("a", "full", "t")


def test_guest_whose_session_closed_on_its_way_to_the_device_is_told(device, wis):
    """Closed, and opened again under the same name: the guest was let in at another session than the present one."""
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
    assert frame.kind == Kind.ERROR and said["code"] == "executor.turned_away" and "not open here" in said["message"]
    client.close()
    rightful = wis.client(device.endpoint, "a", "token of a")
    assert rightful.sync() == {}
    rightful.close()


def test_hello_costs_the_device_s_thread_no_signature(device, wis):
    """The pass is checked in the acceptor's thread."""
    checked = []

    class Watched:
        def check(self, shown):
            checked.append(threading.current_thread())

    device.call(lambda: device.loop.sessions.open("a", Watched(), None))
    client = wis.client(device.endpoint, "a", "anything")
    assert client.sync() == {} and [t.name for t in checked] == ["acceptor"]
    client.close()


def test_job_s_own_socket_enters_as_any_other(device):
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


def test_executor_whose_acceptor_dies_ends(tmp_path):
    """It would hold its sessions and let nobody in; whoever supervises it starts another."""
    (tmp_path / "with_a_dead_acceptor.py").write_text(WITH_A_DEAD_ACCEPTOR)
    env = os.environ | {"OMP_NUM_THREADS": "1", "WOOLY_EXECUTOR_STATE_DIR": str(tmp_path)}
    options = {"like": "wooly_executor", "cwd": tmp_path, "env": env}
    ran = forks.run("with_a_dead_acceptor", f"unix://{tmp_path}/s", timeout=120, **options)
    assert ran.returncode == 4 and "ZeroDivisionError" in ran.stderr, ran.stderr


def test_server_takes_guests_between_two_polls():
    server, (near, far) = ChannelServer(), socket.socketpair()
    far.setblocking(False)
    threading.Thread(target=server.enter, args=(Guest(far, "g", 7),)).start()
    (event,) = server.poll(30)
    assert isinstance(event, Connected) and event.admitted == 7
    server.close()
    near.close()
