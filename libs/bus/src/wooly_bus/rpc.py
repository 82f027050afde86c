"""Requests over NATS from code that is not asynchronous: the client's control connection.

One daemon thread with its own event loop; nats-py alone, because FastStream would cost every `wooly run` half a second.
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
from wooly_bus.nats_client import NatsClient, PlainTextError
from wooly_bus.supervision import start_errand, start_task, start_thread

if TYPE_CHECKING:
    from wooly_bus.credentials import Credentials

log = logging.getLogger("wooly.bus")
#: Seconds for which a connection with old credentials is kept, for answers that are on their way.
OLD_CONNECTION_S = 5.0
#: Seconds that closing a connection may take whose handshake failed: nats-py waits for the other end's word, which never comes.
CLOSE_S = 0.2
#: Seconds after which it is looked whether credentials are to be renewed: a machine that sleeps stops timers, not the clock.
LOOK_S = 15.0
#: Seconds between two attempts to renew them, at least and at most.
AGAIN_S = (0.5, 30.0)
#: What to do about credentials that ended and that nobody renews.
CURE = (
    "whoever keeps the .creds file must renew it (POST /api/v1/credentials of the controller), or name the controller's REST and "
    "an API token in place of it: from there they are renewed by themselves"
)
E = TypeVar("E", bound=Message)
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

    Credentials that end are renewed in time: a second connection is made with new ones, and takes the place of the first. Where
    that was missed (the machine slept, or nobody had new ones), the next request does it: nats-py gives up a connection whose
    credentials have ended, for good.

    Raises:
        BusConnectError: no server answers within `timeout` seconds.
        CredentialsError: there are no credentials to show.
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
        self._hears: dict[queue.SimpleQueue[bytes], tuple[str, Subscription]] = {}
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
        """Show these from now on. `_ends` is unknown where our clock is not the issuer's; at `_due` they are renewed."""
        self._held = held
        now, ends = time.time(), None if held is None else held.expires_at
        self._ends = ends if ends is not None and ends > now else None
        self._due = None if self._ends is None else now + (self._ends - now) / 3 * 2

    @property
    def tenant(self) -> str | None:
        """Whose the credentials are; None: nobody's in particular, or there are none."""
        return None if self._held is None else self._held.tenant

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            if left:  # this is a user's process, whose end must not wait for a task that does not end
                self._loop.run_until_complete(asyncio.wait(left, timeout=CLOSE_S))
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _on_error(self, error: Exception) -> None:
        """Connection errors reach the caller through the request that they break."""
        self._last_error = str(error) or type(error).__name__

    async def _keep_valid(self) -> None:
        """Have a connection with new credentials before the old ones end, or as soon as there are any."""
        pause, complaint = 0.0, ""
        while True:
            if pause:
                await asyncio.sleep(pause)
            else:
                await self._until_due()
            try:
                await self._renew()
                pause = 0.0
            except BusError as e:
                if str(e) != complaint:
                    log.warning("the credentials for NATS at %s could not be renewed: %s", self.url, e)
                pause, complaint = min(max(pause * 2, AGAIN_S[0]), AGAIN_S[1]), str(e)

    async def _until_due(self) -> None:
        while not self._ended.is_set() and (self._due is None or time.time() < self._due):
            left = LOOK_S if self._due is None else min(LOOK_S, self._due - time.time())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), max(left, 0.01))

    def _is_over(self) -> bool:
        """The connection is of no use any more: it was closed, or what it showed has ended."""
        return self._nc.is_closed or (self._ends is not None and time.time() > self._ends)

    async def _renew(self) -> None:
        """A connection with new credentials in the place of ours; nothing if another did it, or nobody has new ones yet.

        Raises:
            BusError: the old ones have ended, and there are no new ones.
        """
        before = self._held
        assert self.access.credentials is not None
        async with self._renewing:
            if self._held is not before:
                return
            held = await asyncio.to_thread(self.access.credentials)
            if before is not None and held.jwt == before.jwt:
                if self._is_over():
                    raise BusConnectError(f"the credentials for NATS at {self.url} ended{_when(before)}: {CURE}")
                self._hold(held)  # whoever renews them has not done so yet
                return
            before_hears = [subscription for _, subscription in self._hears.values()]
            connection = await self._connect(held)
            await _unsubscribe(self._nc, before_hears)
            old, self._nc = self._nc, connection
            self._hold(held)
            self._ended.clear()
        start_errand(self._leave(old), "leaving of NATS")

    async def _leave(self, connection: Client) -> None:
        try:
            await asyncio.sleep(OLD_CONNECTION_S)  # for what was asked by it
        finally:
            await connection.close()

    async def _connect(self, held: Credentials | None) -> Client:
        client, timeout = NatsClient(), self._timeout

        async def on_error(error: Exception) -> None:
            await self._on_error(error)
            if client.is_connecting and isinstance(error, (ssl.SSLCertVerificationError, PlainTextError)):
                raise error  # no server is to be trusted more at the next attempt
            if "authorization" in str(error).lower():
                if client.is_connecting:
                    raise error  # nats-py would try for ever
                if client.is_reconnecting and held is not None:  # with what it showed before, it always will be refused
                    start_errand(client.close(), "leaving of NATS")

        async def on_closed() -> None:
            if held is not None and held is self._held and not self._closing:
                self._ended.set()

        connecting = client.connect(
            [server.strip() for server in self.access.url.split(",")],
            name=self._name,
            connect_timeout=max(1, int(timeout)),
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.2,  # type: ignore[arg-type]  # it sleeps so long; annotated int
            allow_reconnect=True,
            error_cb=on_error,
            closed_cb=on_closed,
            **options(held, self._tls),
        )
        try:
            await asyncio.wait_for(connecting, timeout)
            for heard, (subject, _) in list(self._hears.items()):
                self._hears[heard] = (subject, await client.subscribe(subject, cb=_into(heard)))
            if self._hears:
                await settled(client)
        except asyncio.CancelledError:
            await client.close()
            raise
        except TimeoutError as e:
            await client.close()
            why = self._last_error or f"silence for {timeout:g} s"
            raise BusConnectError(f"no NATS server answers at {self.url}: {why}") from e
        except (OSError, ValueError, nats.errors.Error) as e:
            if isinstance(e, (ssl.SSLCertVerificationError, PlainTextError)):
                with contextlib.suppress(TimeoutError, AssertionError, OSError, nats.errors.Error):
                    async with asyncio.timeout(CLOSE_S):
                        await client.close()
                raise BusConnectError(f"NATS at {self.url} is not to be trusted: {e}") from e
            if "authorization" in str(e).lower():
                await client.close()
                if held is not None and held.expires_at is not None and held.expires_at < time.time():
                    raise BusConnectError(f"the credentials for NATS at {self.url} ended{_when(held)}: {CURE}") from e
                what = "its credentials" if held is None else "other credentials"
                raise BusConnectError(f"NATS at {self.url} does not let us in: it wants to see {what}") from e
            raise BusConnectError(f"cannot use {self.url} as the address of a NATS server: {e}") from e
        return client

    async def _usable(self) -> Client:
        """The connection, or another one if that one is over.

        Raises:
            BusError: there is no other one to be had.
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
            raise BusTimeoutError(f"no answer over {self.url} within {timeout:g} s") from e
        except concurrent.futures.CancelledError as e:  # another thread closed it meanwhile
            raise BusConnectError(f"the connection to {self.url} is closed") from e

    def request(self, rpc: Rpc[Q, R], message: Q, *, timeout: float = 4.0) -> R:
        """Ask and wait.

        Raises:
            RefusedError: the service answered with an error.
            NoResponderError: nobody serves the subject.
            BusTimeoutError: no answer within `timeout` seconds.
            BusConnectError: the connection is broken or was closed.
        """
        data, headers = encode(message)
        held, subject = self._held, rpc.subject
        if held is not None:
            if held.tenant is not None:
                subject = rpc.for_tenant(held.tenant)
            if not held.permissions.may_publish(subject):
                raise RefusedError("bus.forbidden", f"these credentials may not ask {subjects.template(subject)}")

        async def ask() -> R:
            connection = await self._usable()
            with nats_errors(self.url, subject, timeout):
                answer = await connection.request(subject, data, timeout=timeout, headers=headers)
            return decode_reply(answer.data, answer.headers, rpc.reply)

        return self._await(ask(), timeout + self._timeout + 5)

    def insist(self, rpc: Rpc[Q, R], message: Q, *, timeout: float = 4.0, patience_s: float = 20.0) -> R:
        """Ask until there is an answer, for what may be asked twice: services restart, connections break.

        Raises:
            BusError: as `request`, after `patience_s` seconds, or at once where asking again would not help.
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
    def hearing(self, event: Event[E]) -> Iterator[Heard[E]]:
        """Yields what is published from now on.

        What is published while the connection is away is not heard, and something may be heard twice while it is replaced.

        Raises:
            RefusedError: these credentials may not.
            BusConnectError: the connection is broken or was closed.
        """
        subject = event.subject
        if self._held is not None and not self._held.permissions.may_subscribe(subject):
            raise RefusedError("bus.forbidden", f"these credentials may not hear {subjects.template(subject)}")
        heard: queue.SimpleQueue[bytes] = queue.SimpleQueue()

        async def begin() -> None:
            connection = await self._usable()
            with nats_errors(self.url, subject, self._timeout):
                self._hears[heard] = (subject, await connection.subscribe(subject, cb=_into(heard)))
                await settled(connection)

        async def end() -> None:
            await _unsubscribe(self._nc, [self._hears.pop(heard)[1]])

        self._await(begin(), 2 * self._timeout + 5)
        try:
            yield Heard(event, heard)
        finally:
            with contextlib.suppress(BusConnectError):
                self._await(end(), 2)

    def close(self) -> None:
        """Close the connection and end the thread. Closing twice is no error."""
        if self._loop.is_closed():
            return
        self._closing = True
        try:
            with contextlib.suppress(
                concurrent.futures.CancelledError
            ):  # nats-py ends its attempts to reconnect, itself in it
                self._await(self._nc.close(), 2)
        finally:
            self._stop()

    def _stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop may have ended meanwhile
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(2)


class Heard(Generic[E]):
    """Events that were heard and not taken yet."""

    def __init__(self, event: Event[E], heard: queue.SimpleQueue[bytes]) -> None:
        self._event, self._heard = event, heard

    def get(self, timeout: float) -> E:
        """The next event; waits at most `timeout` seconds for it.

        Raises:
            queue.Empty: nothing was heard in time.
            EnvelopeError: what was heard is no such event.
        """
        return self._event.decoded(self._heard.get(timeout=timeout))


def _into(heard: queue.SimpleQueue[bytes]) -> Callable[[Msg], Awaitable[None]]:
    async def hear(message: Msg) -> None:
        heard.put(message.data)

    return hear


async def _unsubscribe(connection: Client, subscriptions: list[Subscription]) -> None:
    """Hear no more of them; nothing where the connection is gone."""
    if not subscriptions or not connection.is_connected:
        return
    with contextlib.suppress(nats.errors.Error, OSError, TimeoutError):
        for subscription in subscriptions:
            await subscription.unsubscribe()
        await settled(connection)


def _when(held: Credentials) -> str:
    """When credentials ended, for people."""
    return "" if held.expires_at is None else time.strftime(" at %Y-%m-%d %H:%M:%S", time.localtime(held.expires_at))
