"""Requests over NATS from synchronous code: the client's control connection.

One daemon thread has its own event loop. It uses nats-py directly, because importing FastStream takes half a second, which every
`wooly run` would pay.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import queue
import ssl
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from wooly_wis.messages import Message

from wooly_bus import subjects
from wooly_bus.access import Access, options
from wooly_bus.contract_types import Event, Q, R, Rpc
from wooly_bus.envelope import decode_reply, encode
from wooly_bus.errors import BusConnectError, BusError, BusTimeoutError, NoResponderError, RefusedError
from wooly_bus.nats_client import NOTICING, NatsClient, PlainTextError
from wooly_bus.supervision import start_errand, start_task, start_thread

if TYPE_CHECKING:
    from wooly_bus.credentials import Credentials

log = logging.getLogger("wooly.bus")
#: Seconds for which a connection with old credentials stays open, for replies to earlier requests.
OLD_CONNECTION_S = 5.0
#: Timeout in seconds for closing a connection after a failed handshake: nats-py waits for an answer that never comes.
CLOSE_S = 0.2
#: Maximum seconds to send what is left when a connection in use is closed.
FLUSH_S = 2.0
#: Interval in seconds between two checks whether credentials must be renewed. One timer for the whole validity is not enough,
#: because a machine that sleeps stops timers but not the clock.
LOOK_S = 15.0
#: Minimum and maximum back-off in seconds between two attempts to renew credentials.
AGAIN_S = (0.5, 30.0)
#: The remedy for expired credentials, as part of an error message.
CURE = (
    "renew the .creds file (POST /api/v1/credentials of the controller), or use the controller's REST URL and an API token "
    "instead of the file: then credentials are renewed automatically"
)
E = TypeVar("E", bound=Message)
T = TypeVar("T")


@contextlib.contextmanager
def nats_errors(url: str, subject: str, timeout: float) -> Iterator[None]:
    """Convert the errors of nats-py in the block, which sends a request, to errors of the bus.

    Raises:
        NoResponderError: no service subscribes to the subject.
        BusTimeoutError: no reply within `timeout` seconds.
        BusConnectError: the connection is broken.
    """
    try:
        yield
    except nats.errors.NoRespondersError as e:
        raise NoResponderError(f"no service answers {subject}") from e
    except (TimeoutError, nats.errors.TimeoutError) as e:
        raise BusTimeoutError(f"no answer to {subject} within {timeout:g} s") from e
    except nats.errors.Error as e:
        raise BusConnectError(f"the connection to {url} is broken: {e}") from e


async def settled(client: Client) -> None:
    """Wait until the server has processed all earlier subscriptions and messages of the client.

    One `flush` of nats-py is not enough: its PING goes to the socket at once, while earlier commands still wait for the flusher
    task. When the answer to the first PING arrives, the flusher task has run. So the second PING follows those commands.
    """
    await client.flush()
    await client.flush()


class ControlClient:
    """A connection to NATS for all threads of a process. It reconnects when NATS is reachable again.

    Credentials are renewed before they expire: a second connection with new credentials replaces the first. If this was not
    possible in time (the machine slept, or there were no new credentials), the next request does it, because nats-py closes a
    connection with expired credentials for good.

    Raises:
        BusConnectError: no server answers within `timeout` seconds.
        CredentialsError: the credentials cannot be read.
    """

    def __init__(self, there: str | Access, *, timeout: float = 3.0, name: str = "wooly-client") -> None:
        self.access = Access.of(there)
        self.url = str(self.access)
        self._tls = self.access.tls()
        self._timeout = timeout
        self._name = name
        self._last_error = ""
        self._closing = False
        self._ended, self._renewing = asyncio.Event(), asyncio.Lock()
        self._subscriptions: dict[queue.SimpleQueue[bytes], tuple[str, Subscription]] = {}
        self._hold(None if self.access.credentials is None else self.access.credentials())
        self._loop = asyncio.new_event_loop()
        self._thread = start_thread(self._run, "wooly-control")
        try:
            self._nc: Client = self._await(self._connect(self._held), timeout + 2)
        except BaseException:
            self._stop()
            raise
        if self._held is not None and self._held.expires_at is not None:
            self._loop.call_soon_threadsafe(lambda: start_task(self._keep_valid(), "renewal of credentials"))

    def _hold(self, held: Credentials | None) -> None:
        """Use these credentials from now on. `_due` is the time of their renewal. `_ends` is None if they do not expire, or if
        the clock of this machine is ahead of their end.
        """
        self._held = held
        now, ends = time.time(), None if held is None else held.expires_at
        self._ends = ends if ends is not None and ends > now else None
        self._due = None if self._ends is None else now + (self._ends - now) / 3 * 2

    @property
    def tenant(self) -> str | None:
        """The tenant of the credentials; None if they belong to no tenant, or if there are no credentials."""
        return None if self._held is None else self._held.tenant

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            if left:  # the end of a user's process must not wait for a task that does not end
                self._loop.run_until_complete(asyncio.wait(left, timeout=CLOSE_S))
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _on_error(self, error: Exception) -> None:
        """Store a connection error. The caller gets it through the request that fails."""
        self._last_error = str(error) or type(error).__name__

    async def _keep_valid(self) -> None:
        """Renew the credentials before they expire, or as soon as new credentials exist."""
        pause, last_error = 0.0, ""
        while True:
            if pause:
                await asyncio.sleep(pause)
            else:
                await self._until_due()
            try:
                await self._renew()
                pause = 0.0
            except BusError as e:
                if str(e) != last_error:
                    log.warning("cannot renew the credentials for NATS at %s: %s; retrying", self.url, e)
                pause, last_error = min(max(pause * 2, AGAIN_S[0]), AGAIN_S[1]), str(e)

    async def _until_due(self) -> None:
        while not self._ended.is_set() and (self._due is None or time.time() < self._due):
            left = LOOK_S if self._due is None else min(LOOK_S, self._due - time.time())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), max(left, 0.01))

    def _is_over(self) -> bool:
        """Whether the connection cannot be used any more: it was closed, or its credentials have expired."""
        return self._nc.is_closed or (self._ends is not None and time.time() > self._ends)

    async def _renew(self) -> None:
        """Replace the connection by one with new credentials. Do nothing if another task did it, or if there are no new
        credentials.

        Raises:
            BusError: the old credentials have expired, and there are no new ones.
        """
        before = self._held
        assert self.access.credentials is not None
        async with self._renewing:
            if self._held is not before:
                return
            try:
                held = await asyncio.to_thread(self.access.credentials)
            except OSError as e:
                raise BusConnectError(f"no new credentials for NATS at {self.url}: {e}") from e
            if before is not None and held.jwt == before.jwt:
                if self._is_over():
                    raise BusConnectError(
                        f"the credentials for NATS at {self.url} expired{_expiry_time(before)}; {CURE}"
                    )
                self._hold(held)  # the credentials were not renewed yet
                return
            old_subscriptions = [subscription for _, subscription in self._subscriptions.values()]
            connection = await self._connect(held)
            await _unsubscribe(self._nc, old_subscriptions)
            old, self._nc = self._nc, connection
            self._hold(held)
            self._ended.clear()
        start_errand(self._leave(old), "leaving of NATS")

    async def _leave(self, connection: Client) -> None:
        try:
            await asyncio.sleep(OLD_CONNECTION_S)  # for replies to earlier requests
        finally:
            await _close_soon(connection, FLUSH_S)

    async def _connect(self, held: Credentials | None) -> Client:
        client, timeout = NatsClient(), self._timeout
        first = True  # nats-py is "connecting" in every attempt to reconnect, too

        async def on_error(error: Exception) -> None:
            await self._on_error(error)
            refused = "authorization" in str(error).lower()
            if first and (refused or isinstance(error, (ssl.SSLCertVerificationError, PlainTextError))):
                raise error  # a retry would fail in the same way, and nats-py would retry without end
            if refused and held is not None and not client.is_connected:  # the same credentials will always be refused
                start_errand(client.close(), "leaving of NATS")

        async def on_closed() -> None:
            if held is not None and held is self._held and not self._closing:
                self._ended.set()

        connecting = client.connect(
            self.access.servers,
            name=self._name,
            connect_timeout=timeout / len(self.access.servers),  # type: ignore[arg-type]  # one of them may be silent
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.2,  # type: ignore[arg-type]  # the client sleeps this many seconds; annotated int
            allow_reconnect=True,
            **NOTICING,
            error_cb=on_error,
            closed_cb=on_closed,
            **options(held, self._tls),
        )
        try:
            await asyncio.wait_for(connecting, timeout)
            first = False
            for heard, (subject, _) in list(self._subscriptions.items()):
                self._subscriptions[heard] = (subject, await client.subscribe(subject, cb=_into(heard)))
            if self._subscriptions:
                await settled(client)
        except asyncio.CancelledError:
            await client.close()
            raise
        except TimeoutError as e:
            await _close_soon(client)
            why = self._last_error or f"no answer within {timeout:g} s"
            raise BusConnectError(f"no NATS server answers at {self.url}: {why}") from e
        except (OSError, ValueError, nats.errors.Error) as e:
            if isinstance(e, (ssl.SSLCertVerificationError, PlainTextError)):
                await _close_soon(client)
                raise BusConnectError(f"cannot trust NATS at {self.url}: {e}") from e
            if "authorization" in str(e).lower():
                await client.close()
                if held is not None and held.expires_at is not None and held.expires_at < time.time():
                    raise BusConnectError(
                        f"the credentials for NATS at {self.url} expired{_expiry_time(held)}; {CURE}"
                    ) from e
                cure = "set credentials" if held is None else "use credentials of this installation"
                raise BusConnectError(f"NATS at {self.url} refused the connection: authorization failed; {cure}") from e
            raise BusConnectError(f"cannot use {self.url} as the address of a NATS server: {e}") from e
        return client

    async def _usable(self) -> Client:
        """The connection. If it cannot be used any more, replace it first.

        Raises:
            BusError: the connection cannot be replaced.
        """
        if self._is_over() and not self._closing and self.access.credentials is not None:
            await self._renew()
        return self._nc

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
            raise BusTimeoutError(f"no answer from NATS at {self.url} within {timeout:g} s") from e
        except concurrent.futures.CancelledError as e:  # another thread closed the connection meanwhile
            raise BusConnectError(f"the connection to {self.url} is closed") from e

    def request(self, rpc: Rpc[Q, R], message: Q, *, timeout: float = 4.0) -> R:
        """Send a request, and wait for the reply.

        Raises:
            RefusedError: the service answered with an error, or these credentials do not permit the request.
            NoResponderError: no service subscribes to the subject.
            BusTimeoutError: no reply within `timeout` seconds.
            BusConnectError: the connection is broken or was closed.
        """
        data, headers = encode(message)
        held, subject = self._held, rpc.subject
        if held is not None:
            if held.tenant is not None:
                subject = rpc.for_tenant(held.tenant)
            if not held.permissions.may_publish(subject):
                raise RefusedError(
                    "bus.forbidden", f"these credentials do not permit the request {subjects.template(subject)}"
                )

        async def ask() -> R:
            connection = await self._usable()
            with nats_errors(self.url, subject, timeout):
                answer = await connection.request(subject, data, timeout=timeout, headers=headers)
            return decode_reply(answer.data, answer.headers, rpc.reply)

        return self._await(ask(), timeout + self._timeout + 5)

    def request_until_answered(
        self, rpc: Rpc[Q, R], message: Q, *, timeout: float = 4.0, patience_s: float = 20.0
    ) -> R:
        """Send a request again and again until a reply arrives: services restart, connections break. The request must be
        idempotent.

        Raises:
            BusError: as `request`: after `patience_s` seconds, or at once if the error is not retryable.
        """
        until, pause = time.monotonic() + patience_s, 0.1
        while True:
            try:
                return self.request(rpc, message, timeout=timeout)
            except BusError as e:
                if not e.retryable or time.monotonic() + pause > until:
                    raise
            time.sleep(pause)
            pause = min(pause * 2, 2.0)

    @contextlib.contextmanager
    def subscription(self, event: Event[E]) -> Iterator[EventSubscription[E]]:
        """Subscribe to an event for the duration of the block. Yields the received events.

        Events that are published while the connection is down are lost. While the connection is being replaced, an event may be
        received twice.

        Raises:
            RefusedError: these credentials do not permit the subscription.
            BusConnectError: the connection is broken or was closed.
        """
        subject = event.subject
        if self._held is not None and not self._held.permissions.may_subscribe(subject):
            raise RefusedError(
                "bus.forbidden", f"these credentials do not permit to subscribe to {subjects.template(subject)}"
            )
        heard: queue.SimpleQueue[bytes] = queue.SimpleQueue()

        async def begin() -> None:
            connection = await self._usable()
            with nats_errors(self.url, subject, self._timeout):
                self._subscriptions[heard] = (subject, await connection.subscribe(subject, cb=_into(heard)))
                await settled(connection)

        async def end() -> None:
            await _unsubscribe(self._nc, [self._subscriptions.pop(heard)[1]])

        self._await(begin(), 2 * self._timeout + 5)
        try:
            yield EventSubscription(event, heard)
        finally:
            with contextlib.suppress(BusConnectError):
                self._await(end(), 2)

    def close(self) -> None:
        """Close the connection and end the thread. A second call does nothing."""
        if self._loop.is_closed():
            return
        self._closing = True
        try:
            with contextlib.suppress(BusError):  # nats-py cancels its reconnect task, which may be the current one
                self._await(_close_soon(self._nc, FLUSH_S), FLUSH_S + 1)
        finally:
            self._stop()

    def _stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop may have ended meanwhile
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(2)


class EventSubscription(Generic[E]):
    """Received events that `get` has not returned yet."""

    def __init__(self, event: Event[E], heard: queue.SimpleQueue[bytes]) -> None:
        self._event, self._heard = event, heard

    def get(self, timeout: float) -> E:
        """Return the next event; wait at most `timeout` seconds for it.

        Raises:
            queue.Empty: no event was received in time.
            EnvelopeError: the received bytes are not an event of this contract.
        """
        return self._event.decoded(self._heard.get(timeout=timeout))


def _into(heard: queue.SimpleQueue[bytes]) -> Callable[[Msg], Awaitable[None]]:
    async def hear(message: Msg) -> None:
        heard.put(message.data)

    return hear


async def _close_soon(connection: Client, seconds: float = CLOSE_S) -> None:
    """Close a connection that is not used any more. It is of no interest whether the server is still there."""
    with contextlib.suppress(TimeoutError, AssertionError, OSError, nats.errors.Error):
        async with asyncio.timeout(seconds):
            await connection.close()


async def _unsubscribe(connection: Client, subscriptions: list[Subscription]) -> None:
    """End subscriptions. If the connection is down, do nothing."""
    if not subscriptions or not connection.is_connected:
        return
    with contextlib.suppress(nats.errors.Error, OSError, TimeoutError):
        for subscription in subscriptions:
            await subscription.unsubscribe()
        await settled(connection)


def _expiry_time(held: Credentials) -> str:
    """The end of the credentials' validity, as text for messages."""
    return "" if held.expires_at is None else time.strftime(" at %Y-%m-%d %H:%M:%S", time.localtime(held.expires_at))
