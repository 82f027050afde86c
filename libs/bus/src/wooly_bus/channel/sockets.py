"""What a client of a data channel does with its socket, on every system.

Python for Windows has neither `poll` nor `sendmsg` nor unix sockets.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

Buffer = bytes | bytearray | memoryview
#: Longest wait of one `select`, in seconds. On Windows, a signal does not interrupt it; the handler runs between two waits.
_SLICE_S = 0.2
#: Bytes of a path in the address of a unix socket, without the zero at its end.
_ADDRESS = 107
_INPUT = getattr(select, "POLLIN", 0)
_HANGUP = getattr(select, "POLLRDHUP", 0)  # `poll` always reports POLLHUP and POLLERR


class Input(Protocol):
    """Waits for input of one socket."""

    def poll(self, milliseconds: float | None = None, /) -> Sequence[object]:
        """Wait until the socket has input, or until the time is over. The result is empty if there is no input."""


class _Selected:
    """Waits with `select.select`, which is available on every system."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def poll(self, milliseconds: float | None = None, /) -> Sequence[object]:
        left = float("inf") if milliseconds is None else milliseconds / 1000
        while True:
            ready, _, _ = select.select([self._sock], [], [], max(min(left, _SLICE_S), 0))
            left -= _SLICE_S
            if ready or left <= 0:
                return ready


def input_of(sock: socket.socket) -> Input:
    """Return what waits for input of a socket: `poll` if the system has it, since `select` refuses descriptors above 1023."""
    if not hasattr(select, "poll"):
        return _Selected(sock)
    found: Input = _poll(sock, _INPUT)
    return found


def unix_socket() -> socket.socket:
    """Return a new unix socket.

    Raises:
        OSError: this system, or its Python, has no unix sockets.
    """
    if not hasattr(socket, "AF_UNIX"):
        raise OSError(
            "Python on this system has no unix sockets; let the executor listen on tcp://… or tls://… as well"
        )
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


@contextlib.contextmanager
def unix_address(path: Path) -> Iterator[str]:
    """A name of a unix socket's path that fits in an address, which has room for 107 bytes. It is valid within the block.

    Folders of batch systems and builds have longer names. On systems other than Linux, the path itself is the name.

    Raises:
        OSError: the folder of a long path cannot be opened.
    """
    if len(os.fsencode(path)) <= _ADDRESS or sys.platform != "linux":
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def send_gathered(sock: socket.socket, buffers: Sequence[Buffer]) -> int:
    """Send the first bytes of consecutive buffers. Returns their number: all, where `sendmsg` is missing."""
    if hasattr(sock, "sendmsg"):
        return int(sock.sendmsg(buffers))
    for buffer in buffers:
        sock.sendall(buffer)
    return sum([len(buffer) for buffer in buffers])


def send_with_descriptor(sock: socket.socket, data: Buffer, descriptor: int) -> int:
    """Send data and a file descriptor over a unix socket. Returns the number of bytes sent."""
    if sys.platform != "linux":
        raise OSError("only a client on Linux sends a descriptor")
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]))
    return int(sock.sendmsg([data], [rights]))


def receive_with_descriptors(sock: socket.socket, into: memoryview) -> tuple[int, list[int]]:
    """Receive data, and the file descriptors that came with it, from a unix socket.

    At most two descriptors are received, of which the first is meant; the system drops the others.

    Returns:
        The number of bytes, and the descriptors.
    """
    if sys.platform != "linux":
        return sock.recv_into(into), []
    room = socket.CMSG_SPACE(2 * array("i").itemsize)
    n, ancillary, _, _ = sock.recvmsg_into([into], room, socket.MSG_CMSG_CLOEXEC)
    found = array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return n, found.tolist()


def hung_up(sock: socket.socket) -> bool:
    """Whether the other end closed the connection, or this end did. Received bytes may still be unread, and stay so.

    Where `poll` is missing, only a close of this end is seen: another thread may be the reader, and a look at its input could
    wait. The reader then finds the close.
    """
    if not hasattr(select, "poll"):
        return sock.fileno() < 0
    try:
        return bool(_poll(sock, _HANGUP).poll(0))
    except (OSError, ValueError):  # this end is closed
        return True


def _poll(sock: socket.socket, events: int) -> Any:
    found = select.poll()  # type: ignore[attr-defined, unused-ignore] # the callers have checked that it exists
    found.register(sock, events)
    return found
