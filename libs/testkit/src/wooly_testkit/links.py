"""A TCP link that can be cut, slowed and restored while connections use it. With several targets, it is a load balancer."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass

_CHUNK = 64 << 10
#: Maximum time to connect to one target before the next one is tried, in seconds.
_CONNECT_S = 2.0


@dataclass(frozen=True)
class Condition:
    """State of a link. `delay_s`: delay of each piece in each direction; `bytes_per_s`: maximum rate, 0 without a limit."""

    up: bool = True
    delay_s: float = 0.0
    bytes_per_s: int = 0


class Link:
    """Listens on a port of the loopback interface and forwards to the first of `targets` (host, port) that answers.

    Like an unplugged cable, a cut link neither forwards bytes nor closes connections. It keeps the bytes until it is restored.
    """

    def __init__(self, name: str, targets: Sequence[tuple[str, int]]) -> None:
        self.name, self.targets = name, list(targets)
        self.condition = Condition()
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._mended = asyncio.Event()
        self._mended.set()
        self._server: asyncio.Server | None = None
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), name=f"link-{name}", daemon=True)
        self._thread.start()
        ready.wait()

    # -- called by any thread -----------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Stop forwarding."""
        self._set(Condition(up=False))

    def slow(self, delay_s: float, bytes_per_s: int) -> None:
        """Delay all bytes, and limit their rate."""
        self._set(Condition(delay_s=delay_s, bytes_per_s=bytes_per_s))

    def mend(self) -> None:
        """Forward normally again."""
        self._set(Condition())

    def close(self) -> None:
        """Close the link and all its connections."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    def _set(self, condition: Condition) -> None:
        def apply() -> None:
            self.condition = condition
            (self._mended.set if condition.up else self._mended.clear)()

        self._loop.call_soon_threadsafe(apply)

    # -- called by the link's thread ----------------------------------------------------------------------------------

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = self._server.sockets[0].getsockname()[1]
        ready.set()
        self._loop.run_forever()
        self._server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._mended.wait()
        for host, port in self.targets:
            try:
                far = await asyncio.wait_for(asyncio.open_connection(host, port), _CONNECT_S)
            except (OSError, TimeoutError):
                continue
            ways = (self._forward(reader, far[1]), self._forward(far[0], writer))
            await asyncio.gather(*ways, return_exceptions=True)
            break
        writer.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(_CHUNK):
                await self._mended.wait()
                condition = self.condition
                wait = condition.delay_s + (len(data) / condition.bytes_per_s if condition.bytes_per_s else 0.0)
                if wait:
                    await asyncio.sleep(wait)
                writer.write(data)
                await writer.drain()
        except (OSError, ConnectionError):
            pass
        finally:
            writer.close()
