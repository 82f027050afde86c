"""Publishes the dispatch journal to JetStream: takes entries from the device loop, batches them, and publishes them in order.

The device does not wait for NATS. The queue of batches is bounded. If it overflows, the journal ends. When JetStream is back, a
new journal begins under another name, with a reset core (`Dispatch.begin_journal`).
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
#: Maximum size, in bytes, of the batches that wait for NATS: half an hour at a hundred programs per second.
WAITING_BYTES = 64 << 20
#: Entries to encode before the thread releases Python's lock to the device loop's thread.
_AT_ONCE = 16


class JournalPublisher:
    """Publishes one device's journal until cancelled.

    Args:
        js: the JetStream context.
        loop: the device loop.
        executor_id: id of the executor.
        process: name of this process, unique among all processes of the executor. Its journals are `<process>.1`,
            `<process>.2`, and so on.
    """

    def __init__(self, js: JetStreamContext, loop: DeviceLoop, executor_id: str, process: str) -> None:
        self._js = js
        self._loop = loop
        self._process = process
        self._begun = 0
        self._event = contracts.EXECUTOR_DISPATCH_JOURNALED.at(executor_id)
        self._entries: Entries | None = None
        self._journal = Journal("")
        self._waiting: deque[Batch] = deque()
        self._waiting_bytes = 0
        self._complaint = ""
        self._cutting = threading.Lock()

    @property
    def name(self) -> str:
        """Name of the current journal; empty if there is no journal."""
        return self._journal.name if self._entries is not None else ""

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            try:
                if self._entries is None:
                    await self._begin()
                await self.publish()
                self._complaint = ""
                await asyncio.sleep(PERIOD_S)
            except StreamError as e:
                if str(e) != self._complaint:
                    log.warning("cannot publish the dispatch journal: %s; trying again", e)
                self._complaint = str(e)
                await asyncio.sleep(RETRY_S)
                await self._hold_back()

    async def _begin(self) -> None:
        """Start a journal, if its stream exists or can be created."""
        await ensure_stream(self._js, contracts.EXECUTOR_DISPATCH_JOURNALED)
        self._entries = await asyncio.wrap_future(self._loop.call(self._loop.dispatch.begin_journal))
        self._begun += 1
        self._journal = Journal(f"{self._process}.{self._begun}")
        log.info("the dispatch journal %s begins", self._journal.name)

    async def publish(self) -> None:
        """Publish all entries so far.

        Raises:
            StreamError: a batch could not be published. It is kept.
        """
        while self._entries or self._waiting:
            await asyncio.to_thread(self._cut)
            if self._complaint:
                # After the loss of its disk, a NATS server has no streams either.
                await ensure_stream(self._js, contracts.EXECUTOR_DISPATCH_JOURNALED)
            while self._waiting:
                batch = self._waiting[0]
                await publish(self._js, self._event, batch.encode(), id=f"{batch.journal}:{batch.first}")
                self._waiting.popleft()
                self._waiting_bytes -= len(batch.entries)

    async def _hold_back(self) -> None:
        """Queue entries that cannot be published. End the journal if the queue is full."""
        await asyncio.to_thread(self._cut)
        if self._waiting_bytes > WAITING_BYTES:
            log.warning(
                "the dispatch journal %s ends: NATS was away until %d bytes waited; a new journal begins later",
                self._journal.name,
                self._waiting_bytes,
            )
            self._entries = None
            self._waiting.clear()
            self._waiting_bytes = 0
            await asyncio.wrap_future(self._loop.call(self._loop.dispatch.end_journal))

    def _cut(self) -> None:
        """Put the entries so far into batches. They are encoded and hashed in this thread, not in the device's thread."""
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
