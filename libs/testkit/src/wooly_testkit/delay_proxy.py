"""A byte proxy that simulates a distant link: it adds a fixed delay in each direction, and may limit the throughput."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Iterator

_CHUNK = 1 << 20
#: Maximum number of bytes that the proxy receives at once if the throughput is limited.
_SLOW_CHUNK = 64 << 10
#: Maximum time, in seconds, that the proxy receives ahead of a limited throughput. Shorter sleeps are not exact.
_AHEAD_S = 0.002


def _dial(target: str) -> socket.socket:
    if target.startswith("unix://"):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(target.removeprefix("unix://"))
        return sock
    host, port = target.removeprefix("tcp://").rsplit(":", 1)
    return socket.create_connection((host, int(port)))


class _Pace:
    """The throughput of one direction, which all connections share.

    Args:
        bytes_per_s: the throughput; 0: not limited.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self.limited = bytes_per_s > 0
        self._bytes_per_s, self._free, self._lock = bytes_per_s, 0.0, threading.Lock()

    def passed(self, nbytes: int, now: float) -> float:
        """When bytes that come now have passed, in seconds."""
        if not self.limited:
            return now
        with self._lock:
            self._free = max(self._free, now) + nbytes / self._bytes_per_s
            return self._free


def _read(source: socket.socket, line: queue.Queue[tuple[float, bytes]], delay_s: float, pace: _Pace) -> None:
    data = b"."
    while data:
        try:
            data = source.recv(_SLOW_CHUNK if pace.limited else _CHUNK)
        except OSError:
            data = b""
        now = time.monotonic()
        passed = pace.passed(len(data), now)
        line.put((passed + delay_s, data))
        if passed - now > _AHEAD_S:  # the sender notices that the link is full
            time.sleep(passed - now)


def _write(sink: socket.socket, line: queue.Queue[tuple[float, bytes]]) -> None:
    while True:
        due, data = line.get()
        wait = due - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        try:
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return
            sink.sendall(data)
        except OSError:
            return


@contextlib.contextmanager
def delay_proxy(target: str, one_way_s: float, bytes_per_s: float = 0.0) -> Iterator[str]:
    """Yield a TCP endpoint (``tcp://127.0.0.1:port``) that forwards to `target`.

    Args:
        target: endpoint of the executor.
        one_way_s: delay in each direction, in seconds.
        bytes_per_s: throughput in each direction, of all connections together; 0: not limited.
    """
    paces = _Pace(bytes_per_s), _Pace(bytes_per_s)
    listener = socket.create_server(("127.0.0.1", 0))
    sockets: list[socket.socket] = [listener]

    def accept() -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            far = _dial(target)
            for sock in (near, far):
                sockets.append(sock)
                if sock.family == socket.AF_INET:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for source, sink, pace in ((near, far, paces[0]), (far, near, paces[1])):
                line: queue.Queue[tuple[float, bytes]] = queue.Queue()
                threading.Thread(target=_read, args=(source, line, one_way_s, pace), daemon=True).start()
                threading.Thread(target=_write, args=(sink, line), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
