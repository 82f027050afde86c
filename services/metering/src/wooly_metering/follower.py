"""Reads the usage stream in order and books it. The ledger stores the position in the stream, so there are no acknowledgements.

    a process killed before a commit: the transaction is undone, and its messages are read again
    a process killed after a commit: the position is stored with the entries, and reading continues after it

Booked messages are removed from the stream.
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
from wooly_bus.limited_log import LimitedLog, first_line
from wooly_bus.stream_reader import read_stream
from wooly_bus.streams import StreamError, ensure_stream
from wooly_bus.tracing import context_of, tracer

from wooly_metering.core.booking import Delivery
from wooly_metering.errors import OvertakenError
from wooly_metering.ledger.writer import Booked, Writer

log = logging.getLogger("wooly.metering")
STREAM = contracts.EXECUTOR_USAGE_RECORDED.stream_name
#: Maximum number of bytes of messages in one transaction.
BATCH_BYTES = 8 << 20
#: Seconds between two checks whether the stream was replaced, and between two removals of booked messages.
STREAM_CHECK_S = 2.0
PURGE_INTERVAL_S = 30.0
RETRY_S = 1.0
#: Maximum number of sessions per transaction whose traces get a span.
MAX_TRACED = 64


class Follower:
    """Books one stream without end.

    Args:
        js: JetStream.
        writer: the ledger.
        batch: maximum number of messages in one transaction.
        on_booked: called after each transaction.
        clock: returns seconds since 1970.
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
        self._away = LimitedLog(log, "attempts failed, too,", lines=1)

    async def run(self) -> None:
        """Read and book. After a failure, start again from the ledger's position."""
        while True:
            try:
                await self._follow(await self._created())
            except OvertakenError as e:
                log.info("%s", e)
            except (StreamError, nats.errors.Error, JetStreamError, OSError) as e:
                self._away.warning(f"the usage stream cannot be read: {first_line(e)}; metering tries again")
                await asyncio.sleep(RETRY_S)
            except sqlalchemy.exc.SQLAlchemyError as e:
                self._away.warning(f"the ledger cannot be written: {first_line(e)}; metering tries again")
                await asyncio.sleep(RETRY_S)

    async def _created(self) -> str:
        """The creation time of the stream, which identifies it. The stream is created if it does not exist."""
        try:
            info = await self._js.stream_info(STREAM)
        except NotFoundError:
            await ensure_stream(self._js, contracts.EXECUTOR_USAGE_RECORDED)
            info = await self._js.stream_info(STREAM)
        return str(info.created)

    async def _follow(self, created: str) -> None:
        """Book the stream until it is replaced by another one."""
        at = await asyncio.to_thread(self._writer.position, STREAM, created)
        waiting: list[Delivery] = []
        taking: asyncio.Task[Booked] | None = None
        size, looked = 0, time.monotonic()
        reading = read_stream(self._js, contracts.EXECUTOR_USAGE_RECORDED, first=at + 1)
        try:
            async for kept in reading:
                if kept is not None:
                    waiting.append(Delivery(kept.sequence, kept.data, int(kept.at * 1e6)))
                    size += len(kept.data)
                last = kept is None or not kept.pending
                if waiting and (last or len(waiting) >= self._batch or size > BATCH_BYTES):
                    await self._finish(taking)
                    taking = asyncio.create_task(self._take(created, at, waiting))  # continue to read in the meantime
                    at, waiting, size = waiting[-1].sequence, [], 0
                if last:
                    await self._finish(taking)
                    taking = None
                now = time.monotonic()
                if kept is None and now - looked > STREAM_CHECK_S:
                    looked = now
                    if await self._created() != created:
                        log.warning(
                            "stream %s was replaced by another stream of the same name; metering reads the new stream",
                            STREAM,
                        )
                        return
                    if now - self._tidied > PURGE_INTERVAL_S:
                        await self.tidy(at)
        finally:
            if taking is not None:
                await asyncio.wait((taking,))
            await reading.aclose()  # type: ignore[attr-defined]  # it is a generator

    async def _finish(self, taking: asyncio.Task[Booked] | None) -> None:
        """Wait for a transaction, and report it."""
        if taking is not None:
            await self._on_booked(await taking)

    async def _take(self, created: str, at: int, waiting: list[Delivery]) -> Booked:
        now_us, begun = int(self._clock() * 1e6), time.time_ns()
        booked = await asyncio.to_thread(self._writer.take, STREAM, created, at, waiting, now_us)
        for parent, session_id in booked.traced[:MAX_TRACED]:
            context = context_of(parent)
            if trace.get_current_span(context).get_span_context().is_valid:
                attributes: dict[str, str | int] = {"session_id": session_id, "entries": booked.entries}
                tracer("metering").start_span("metering.book", context, attributes=attributes, start_time=begun).end()
        return booked

    async def tidy(self, booked: int) -> None:
        """Remove booked messages from the stream."""
        self._tidied = time.monotonic()
        if booked:
            await self._js.purge_stream(STREAM, seq=booked + 1)
