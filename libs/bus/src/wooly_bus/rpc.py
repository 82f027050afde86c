"""Requests over NATS from code that is not asynchronous: the client's control connection.

One daemon thread with its own event loop; nats-py alone, because FastStream would cost every `wooly run` half a second.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import nats.errors
from nats.aio.client import Client
from wooly_wis.messages import Message

from wooly_bus.envelope import decode_reply, encode
from wooly_bus.errors import BusConnectError, BusTimeoutError, NoResponderError, shown

M = TypeVar("M", bound=Message)
T = TypeVar("T")


@contextlib.contextmanager
def nats_errors(url: str, subject: str, timeout: float) -> Iterator[None]:
    """NATS's own errors of a request as ours.

    Raises:
        NoResponderError: nobody serves the subject.
        BusTimeoutError: no answer within `timeout` seconds.
        BusConnectError: the connection is broken.
    """
    try:
        yield
    except nats.errors.NoRespondersError as e:
        raise NoResponderError(f"nobody answers {subject}") from e
    except (TimeoutError, nats.errors.TimeoutError) as e:
        raise BusTimeoutError(f"no answer to {subject} within {timeout:g} s") from e
    except nats.errors.Error as e:
        raise BusConnectError(f"the connection to {url} is broken: {e}") from e


async def settled(client: Client) -> None:
    """Return once the server has taken in everything that was subscribed and published before.

    nats-py's `flush` alone does not say so: its PING goes to the socket at once, while commands before it still wait for the
    flusher task. When that PING's answer is here the flusher has run, so a second PING comes after them.
    """
    await client.flush()
    await client.flush()


class ControlClient:
    """A connection to NATS that can be used from any thread. It comes back by itself when NATS does.

    Raises:
        BusConnectError: no server answers within `timeout` seconds.
    """

    def __init__(self, url: str, *, timeout: float = 3.0, name: str = "wooly-client") -> None:
        self.url = shown(url)
        self._address = url
        self._last_error = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="wooly-control", daemon=True)
        self._thread.start()
        try:
            self._nc: Client = self._await(self._connect(timeout, name), timeout + 2)
        except BaseException:
            self._stop()
            raise

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _on_error(self, error: Exception) -> None:
        """Connection errors reach the caller through the request that they break."""
        self._last_error = str(error) or type(error).__name__

    async def _connect(self, timeout: float, name: str) -> Client:
        client = Client()
        connecting = client.connect(
            self._address,
            name=name,
            connect_timeout=max(1, int(timeout)),
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.2,  # type: ignore[arg-type]  # it sleeps so long; annotated int
            allow_reconnect=True,
            error_cb=self._on_error,
        )
        try:
            await asyncio.wait_for(connecting, timeout)
        except TimeoutError as e:
            await client.close()
            why = self._last_error or f"silence for {timeout:g} s"
            raise BusConnectError(f"no NATS server answers at {self.url}: {why}") from e
        except (OSError, ValueError, nats.errors.Error) as e:
            raise BusConnectError(f"cannot use {self.url} as the address of a NATS server: {e}") from e
        return client

    def _await(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as e:
            work.close()
            raise BusConnectError(f"the connection to {self.url} is closed") from e
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError as e:
            future.cancel()
            raise BusTimeoutError(f"no answer over {self.url} within {timeout:g} s") from e

    def request(self, subject: str, message: Message, reply: type[M], *, timeout: float = 4.0) -> M:
        """Ask and wait.

        Raises:
            RefusedError: the service answered with an error.
            NoResponderError: nobody serves the subject.
            BusTimeoutError: no answer within `timeout` seconds.
            BusConnectError: the connection is broken or was closed.
        """
        data, headers = encode(message)

        async def ask() -> M:
            with nats_errors(self.url, subject, timeout):
                answer = await self._nc.request(subject, data, timeout=timeout, headers=headers)
            return decode_reply(answer.data, answer.headers, reply)

        return self._await(ask(), timeout + 2)

    def close(self) -> None:
        """Close the connection and end the thread. Closing twice is no error."""
        if self._loop.is_closed():
            return
        try:
            self._await(self._nc.close(), 2)
        finally:
            self._stop()

    def _stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop may have ended meanwhile
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(2)
