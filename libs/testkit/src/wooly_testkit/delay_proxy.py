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


def _read(source: socket.socket, line: queue.Queue[tuple[float, bytes]], delay_s: float, bytes_per_s: float) -> None:
    data, free = b".", 0.0
    while data:
        try:
            data = source.recv(_SLOW_CHUNK if bytes_per_s else _CHUNK)
        except OSError:
            data = b""
        now = time.monotonic()
        free = max(free, now) + (len(data) / bytes_per_s if bytes_per_s else 0.0)
        line.put((free + delay_s, data))
        if free - now > _AHEAD_S:  # the sender notices that the link is full
            time.sleep(free - now)


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
        bytes_per_s: throughput in each direction; 0: not limited.
    """
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
            for source, sink in ((near, far), (far, near)):
                line: queue.Queue[tuple[float, bytes]] = queue.Queue()
                threading.Thread(target=_read, args=(source, line, one_way_s, bytes_per_s), daemon=True).start()
                threading.Thread(target=_write, args=(sink, line), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
