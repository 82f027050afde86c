"""The dispatch journal's way to JetStream: entries are taken off the device loop's hands, batched, and published in order.

The device goes on without NATS. What waits for it is bounded: beyond that the journal ends, and when JetStream is there again
another begins, under another name, with the core's state as of a new start (`Dispatch.begin_journal`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque

from nats.js import JetStreamContext
from wooly_bus import contracts
from wooly_bus.streams import StreamError, ensure_stream, publish
from wooly_dispatch.journal import Batch, Journal

from wooly_executor.device_loop import DeviceLoop
from wooly_executor.dispatch import Entries

log = logging.getLogger("wooly.executor")
PERIOD_S = 0.1
RETRY_S = 0.5
BATCH_ENTRIES = 1000
BATCH_BYTES = 256 << 10
#: Bytes of batches that may wait for NATS: half an hour of a hundred programs a second.
WAITING_BYTES = 64 << 20
#: Entries encoded before the device loop's thread may have the interpreter.
_AT_ONCE = 16


class JournalPublisher:
    """Publishes one device's journal, for ever.

    Args:
        js: where to.
        loop: whose.
        executor_id: the executor's name; journals are called `<executor>/<ns since 1970 at which it began>`.
    """

    def __init__(self, js: JetStreamContext, loop: DeviceLoop, executor_id: str) -> None:
        self._js = js
        self._loop = loop
        self._id = executor_id
        self._event = contracts.EXECUTOR_DISPATCH_JOURNALED.at(executor_id)
        self._entries: Entries | None = None
        self._journal = Journal("")
        self._waiting: deque[Batch] = deque()
        self._waiting_bytes = 0
        self._complaint = ""
        self._cutting = threading.Lock()

    @property
    def name(self) -> str:
        """The journal's that is being published; empty where none is."""
        return self._journal.name if self._entries is not None else ""

    async def run(self) -> None:
        """Publish, until cancelled."""
        while True:
            try:
                if self._entries is None:
                    await self._begin()
                await self.publish()
                self._complaint = ""
                await asyncio.sleep(PERIOD_S)
            except StreamError as e:
                if str(e) != self._complaint:
                    log.warning("the dispatch journal is not published: %s", e)
                self._complaint = str(e)
                await asyncio.sleep(RETRY_S)
                await self._hold_back()

    async def _begin(self) -> None:
        """Begin a journal, where it can be kept."""
        await ensure_stream(self._js, contracts.EXECUTOR_DISPATCH_JOURNALED)
        self._entries = await asyncio.wrap_future(self._loop.call(self._loop.dispatch.begin_journal))
        self._journal = Journal(f"{self._id}/{time.time_ns()}")
        log.info("dispatch journal %s", self._journal.name)

    async def publish(self) -> None:
        """Publish everything so far.

        Raises:
            StreamError: not all of it could be.
        """
        while self._entries or self._waiting:
            await asyncio.to_thread(self._cut)
            if self._complaint:
                # A NATS server that lost its disk has no streams either.
                await ensure_stream(self._js, contracts.EXECUTOR_DISPATCH_JOURNALED)
            while self._waiting:
                batch = self._waiting[0]
                await publish(self._js, self._event, batch.encode(), id=f"{batch.journal}:{batch.first}")
                self._waiting.popleft()
                self._waiting_bytes -= len(batch.entries)

    async def _hold_back(self) -> None:
        """Keep what cannot be published, unless it gets too much."""
        await asyncio.to_thread(self._cut)
        if self._waiting_bytes > WAITING_BYTES:
            log.warning("the dispatch journal %s ends: NATS was away for too long", self._journal.name)
            self._entries = None
            self._waiting.clear()
            self._waiting_bytes = 0
            await asyncio.wrap_future(self._loop.call(self._loop.dispatch.end_journal))

    def _cut(self) -> None:
        """Put the entries so far into batches: encoded and hashed here, in a thread that is not the device's."""
        with self._cutting:
            entries, journal = self._entries, self._journal
            parts: list[Batch] = []
            size = 0
            while entries:
                for _ in range(min(_AT_ONCE, len(entries))):
                    journal.record(*entries.popleft())
                part = journal.cut()
                assert part is not None
                parts.append(part)
                size += len(part.entries)
                if not entries or size > BATCH_BYTES or part.last - parts[0].first + 1 >= BATCH_ENTRIES - _AT_ONCE:
                    whole = b"".join([p.entries for p in parts])
                    self._waiting.append(
                        Batch(journal.name, parts[0].first, part.last, parts[0].previous, part.digest, whole)
                    )
                    self._waiting_bytes += len(whole)
                    parts, size = [], 0
                time.sleep(0)
