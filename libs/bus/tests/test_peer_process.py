import os
import signal
import socket
import subprocess
import sys

import pytest
from wooly_bus.channel.peer_process import has_ended, process_of

CONNECT = "import socket, sys, time; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); time.sleep(100)"


@pytest.fixture
def connected(tmp_path):
    """A process that is connected to a unix socket of this one, and this one's end."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        process = subprocess.Popen([sys.executable, "-S", "-c", CONNECT, str(tmp_path / "s")])
        sock, _ = listener.accept()
    with sock:
        yield process, sock
    process.kill()
    process.wait()


def test_process_of_unix_socket_is_known_also_after_its_end(connected):
    process, sock = connected
    assert process_of(sock) == process.pid and not has_ended(process.pid)
    process.send_signal(signal.SIGSTOP)
    assert not has_ended(process.pid)
    process.kill()
    assert sock.recv(1) == b"" and process_of(sock) == process.pid
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, but its parent has not waited for it
    assert has_ended(process.pid)
    process.wait()
    assert has_ended(process.pid)


def test_process_of_other_sockets_is_not_known():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as sock:
        assert process_of(sock) == 0
    mine, other = socket.socketpair()
    with mine, other:
        assert process_of(mine) == 0  # it is this process itself


def test_process_of_another_user_has_not_ended():
    assert not has_ended(1)
