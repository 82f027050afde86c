"""A byte proxy that simulates a link with a long round trip: it adds a fixed delay in each direction, at full throughput."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Iterator

_CHUNK = 1 << 20


def _dial(target: str) -> socket.socket:
    if target.startswith("unix://"):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(target.removeprefix("unix://"))
        return sock
    host, port = target.removeprefix("tcp://").rsplit(":", 1)
    return socket.create_connection((host, int(port)))


def _read(source: socket.socket, line: queue.Queue[tuple[float, bytes]], delay_s: float) -> None:
    data = b"."
    while data:
        try:
            data = source.recv(_CHUNK)
        except OSError:
            data = b""
        line.put((time.monotonic() + delay_s, data))


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
def delay_proxy(target: str, one_way_s: float) -> Iterator[str]:
    """Yield a TCP endpoint (``tcp://127.0.0.1:port``) that forwards to `target` with a delay of `one_way_s` in each direction."""
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
                threading.Thread(target=_read, args=(source, line, one_way_s), daemon=True).start()
                threading.Thread(target=_write, args=(sink, line), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
