"""Reads the usage stream in its order and books it. The ledger itself remembers how far: there is nothing to acknowledge.

    killed before a commit: nothing of the transaction is there, its messages come again
    killed after it: the position is kept with the entries, and reading goes on behind them

What is booked is removed from the stream.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import nats.errors
import sqlalchemy.exc
from nats.js import JetStreamContext
from nats.js.errors import Error as JetStreamError
from nats.js.errors import NotFoundError
from opentelemetry import trace
from wooly_bus import contracts
from wooly_bus.stream_reader import read_stream
from wooly_bus.streams import StreamError, ensure_stream
from wooly_bus.tracing import context_of, tracer

from wooly_metering.core.booking import Delivery
from wooly_metering.errors import OvertakenError
from wooly_metering.ledger.writer import Booked, Writer

log = logging.getLogger("wooly.metering")
STREAM = contracts.EXECUTOR_USAGE_RECORDED.stream_name
#: Bytes that one transaction takes at most.
BATCH_BYTES = 8 << 20
#: Seconds between looks at whether the stream is still the same one, and between removals of what is booked.
LOOK_S = 2.0
TIDY_S = 30.0
RETRY_S = 1.0
#: Sessions of one transaction whose traces are told of it.
TRACED = 64


class Follower:
    """Books one stream, for ever.

    Args:
        js: JetStream.
        writer: the ledger.
        batch: messages of one transaction at most.
        on_booked: called after each transaction.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        js: JetStreamContext,
        writer: Writer,
        batch: int,
        on_booked: Callable[[Booked], Awaitable[None]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._js, self._writer, self._batch, self._on_booked, self._clock = js, writer, batch, on_booked, clock
        self._tidied = time.monotonic()

    async def run(self) -> None:
        """Read and book. Whatever fails is tried again from where the ledger is."""
        while True:
            try:
                await self._follow(await self._created())
            except OvertakenError as e:
                log.info("%s", e)
            except (StreamError, nats.errors.Error, JetStreamError, OSError) as e:
                log.warning("the usage stream cannot be read: %s; trying again", str(e) or type(e).__name__)
                await asyncio.sleep(RETRY_S)
            except sqlalchemy.exc.SQLAlchemyError as e:
                log.warning("the ledger cannot be written: %s; trying again", e)
                await asyncio.sleep(RETRY_S)

    async def _created(self) -> str:
        """Which stream it is: it is made where there is none."""
        try:
            info = await self._js.stream_info(STREAM)
        except NotFoundError:
            await ensure_stream(self._js, contracts.EXECUTOR_USAGE_RECORDED)
            info = await self._js.stream_info(STREAM)
        return str(info.created)

    async def _follow(self, created: str) -> None:
        """Until the stream is another one."""
        at = await asyncio.to_thread(self._writer.position, STREAM, created)
        waiting: list[Delivery] = []
        taking: asyncio.Task[Booked] | None = None
        size, looked = 0, time.monotonic()
        reading = read_stream(self._js, contracts.EXECUTOR_USAGE_RECORDED, first=at + 1)
        try:
            async for kept in reading:
                if kept is not None:
                    waiting.append(Delivery(kept.sequence, kept.data))
                    size += len(kept.data)
                last = kept is None or not kept.pending
                if waiting and (last or len(waiting) >= self._batch or size > BATCH_BYTES):
                    await self._finish(taking)
                    taking = asyncio.create_task(self._take(created, at, waiting))  # and read on meanwhile
                    at, waiting, size = waiting[-1].sequence, [], 0
                if last:
                    await self._finish(taking)
                    taking = None
                now = time.monotonic()
                if kept is None and now - looked > LOOK_S:
                    looked = now
                    if await self._created() != created:
                        log.warning("stream %s is another one than before", STREAM)
                        return
                    if now - self._tidied > TIDY_S:
                        await self.tidy(at)
        finally:
            if taking is not None:
                await asyncio.wait((taking,))
            await reading.aclose()  # type: ignore[attr-defined]  # it is a generator

    async def _finish(self, taking: asyncio.Task[Booked] | None) -> None:
        """Wait for a transaction, and tell of it."""
        if taking is not None:
            await self._on_booked(await taking)

    async def _take(self, created: str, at: int, waiting: list[Delivery]) -> Booked:
        now_us, begun = int(self._clock() * 1e6), time.time_ns()
        booked = await asyncio.to_thread(self._writer.take, STREAM, created, at, waiting, now_us)
        for parent, session_id in booked.traced[:TRACED]:
            context = context_of(parent)
            if trace.get_current_span(context).get_span_context().is_valid:
                attributes: dict[str, str | int] = {"session_id": session_id, "entries": booked.entries}
                tracer("metering").start_span("metering.book", context, attributes=attributes, start_time=begun).end()
        return booked

    async def tidy(self, booked: int) -> None:
        """Remove what is booked from the stream."""
        self._tidied = time.monotonic()
        if booked:
            await self._js.purge_stream(STREAM, seq=booked + 1)
