"""The process at the other end of a unix socket, and whether it has ended."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def process_of(sock: socket.socket) -> int:
    """Id of the process that connected a unix socket; 0: it is not known, or it is this process.

    It is not known for other sockets, on systems other than Linux, and from another container with process ids of its own. If a
    program forwards the connection, such as ssh, it is that program.
    """
    if sock.family != getattr(socket, "AF_UNIX", -1) or not hasattr(socket, "SO_PEERCRED"):
        return 0
    try:
        pid: int = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0]
    except OSError:
        return 0
    return 0 if pid == os.getpid() else pid


def has_ended(pid: int) -> bool:
    """Whether a process has ended, with all its threads. Its parent may not have waited for it yet."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # it belongs to another user
        pass
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state in "ZX" and len(list(Path(f"/proc/{pid}/task").iterdir())) <= 1
    except OSError:  # it ended during the look, or is hidden from this user
        return False
