"""Requests over NATS from code that is not asynchronous: the client's control connection.

One daemon thread with its own event loop; nats-py alone, because FastStream would cost every `wooly run` half a second.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Coroutine, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import nats.errors
from nats.aio.client import Client
from wooly_wis.messages import Message

from wooly_bus import subjects
from wooly_bus.access import Access, options
from wooly_bus.envelope import decode_reply, encode
from wooly_bus.errors import BusConnectError, BusError, BusTimeoutError, NoResponderError, RefusedError

if TYPE_CHECKING:
    from wooly_bus.credentials import Credentials

log = logging.getLogger("wooly.bus")
#: Seconds for which a connection with old credentials is kept, for answers that are on their way.
OLD_CONNECTION_S = 5.0
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

    Credentials that end are renewed in time: a second connection is made with new ones, and takes the place of the first.

    Raises:
        BusConnectError: no server answers within `timeout` seconds.
        CredentialsError: there are no credentials to show.
    """

    def __init__(self, there: str | Access, *, timeout: float = 3.0, name: str = "wooly-client") -> None:
        self.access = Access.of(there)
        self.url = str(self.access)
        self._tls = self.access.tls()
        self._held = None if self.access.credentials is None else self.access.credentials()
        self._name = name
        self._last_error = ""
        self._leaving: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="wooly-control", daemon=True)
        self._thread.start()
        try:
            self._nc: Client = self._await(self._connect(timeout, self._held), timeout + 2)
        except BaseException:
            self._stop()
            raise
        if self._held is not None and self._held.expires_at is not None:
            asyncio.run_coroutine_threadsafe(self._keep_valid(timeout), self._loop)

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

    async def _keep_valid(self, timeout: float) -> None:
        """Have a connection with new credentials before the old ones end."""
        while self._held is not None and self._held.expires_at is not None and self.access.credentials is not None:
            await asyncio.sleep(max(0.2, (self._held.expires_at - time.time()) / 3 * 2))
            try:
                held = await asyncio.to_thread(self.access.credentials)
                if held.jwt == self._held.jwt:
                    continue  # whoever renews them has not done so yet
                connection = await self._connect(timeout, held)
            except BusError as e:
                log.warning("the credentials for NATS at %s could not be renewed: %s", self.url, e)
                continue
            leaving = asyncio.create_task(self._leave(self._nc))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
            self._held, self._nc = held, connection

    async def _leave(self, connection: Client) -> None:
        try:
            await asyncio.sleep(OLD_CONNECTION_S)  # for what was asked by it
        finally:
            await connection.close()

    async def _connect(self, timeout: float, held: Credentials | None) -> Client:
        client = Client()

        async def on_error(error: Exception) -> None:
            await self._on_error(error)
            if client.is_connecting and "authorization" in str(error).lower():
                raise error  # nats-py would try for ever

        connecting = client.connect(
            [server.strip() for server in self.access.url.split(",")],
            name=self._name,
            connect_timeout=max(1, int(timeout)),
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.2,  # type: ignore[arg-type]  # it sleeps so long; annotated int
            allow_reconnect=True,
            error_cb=on_error,
            **options(held, self._tls),
        )
        try:
            await asyncio.wait_for(connecting, timeout)
        except asyncio.CancelledError:
            await client.close()
            raise
        except TimeoutError as e:
            await client.close()
            why = self._last_error or f"silence for {timeout:g} s"
            raise BusConnectError(f"no NATS server answers at {self.url}: {why}") from e
        except (OSError, ValueError, nats.errors.Error) as e:
            if "authorization" in str(e).lower():
                await client.close()
                what = "its credentials" if held is None else "other credentials"
                raise BusConnectError(f"NATS at {self.url} does not let us in: it wants to see {what}") from e
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
        held = self._held
        if held is not None:
            if held.tenant is not None:
                subject = subjects.for_tenant(subject, held.tenant)
            if not held.permissions.may_publish(subject):
                raise RefusedError("bus.forbidden", f"these credentials may not ask {subjects.template(subject)}")

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
