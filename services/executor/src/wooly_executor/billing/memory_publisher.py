"""Publishes to JetStream how much device memory each session is charged for. Metering reads these messages in order.

Nothing is lost while NATS is away. The samples of a session are added together meanwhile, so that the queue has at most one
sample per session. Integrals are additive, so the sum stays exact.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from nats.js import JetStreamContext
from wooly_bus import contracts
from wooly_bus.streams import StreamError, ensure_stream, publish
from wooly_wis.messages import MemoryBorne

from wooly_executor.billing.memory_samples import MemorySample
from wooly_executor.device_loop import DeviceLoop

log = logging.getLogger("wooly.executor")
PERIOD_S = 1.0
#: Minimum time, in ns, between two messages of a session that is charged for no memory.
_QUIET_NS = 60_000_000_000
_US = 1000


class MemoryPublisher:
    """Publishes the memory samples of one executor until cancelled.

    Args:
        js: the JetStream context.
        loop: the device loop.
        executor_id: id of the executor.
    """

    def __init__(self, js: JetStreamContext, loop: DeviceLoop, executor_id: str) -> None:
        self._js, self._loop, self._id = js, loop, executor_id
        self._event = contracts.EXECUTOR_MEMORY_BORNE.at(executor_id)
        self._run = str(time.time_ns())
        self._ready = False
        self._waiting: dict[str, MemorySample] = {}
        # by session: sequence number, then the remainders (byte-ns) of own and of shared memory
        self._sent: dict[str, tuple[int, int, int]] = {}
        self._complaint = ""

    async def run(self) -> None:
        """Publish every `PERIOD_S` seconds until cancelled."""
        while True:
            try:
                await self.publish()
                self._complaint = ""
            except StreamError as e:
                if str(e) != self._complaint:
                    log.warning("cannot publish the memory charges of sessions: %s; they are kept and sent later", e)
                self._complaint, self._ready = str(e), False
            await asyncio.sleep(PERIOD_S)

    async def publish(self) -> None:
        """Publish all samples taken so far.

        Raises:
            StreamError: a sample could not be published. The samples are kept.
        """
        for sample in await asyncio.wrap_future(self._loop.call(self._loop.vram.samples)):
            before = self._waiting.get(sample.session)
            self._waiting[sample.session] = sample if before is None else added(before, sample)
        if not self._ready:
            await ensure_stream(self._js, contracts.EXECUTOR_MEMORY_BORNE)
            self._ready = True
        for sample in list(self._waiting.values()):
            if self._quiet(sample):
                continue
            message = self._message(sample)
            id = f"{self._id}/{self._run}/{sample.session}/{message.sequence}"
            await publish(self._js, self._event, message, id=id)
            _, own, shared = self._sent.get(sample.session, (0, 0, 0))
            own, shared = own + sample.own_byte_ns, shared + sample.shared_byte_ns
            self._sent[sample.session] = (message.sequence, own % _US, shared % _US)
            del self._waiting[sample.session]
            if sample.last:
                del self._sent[sample.session]

    def _quiet(self, sample: MemorySample) -> bool:
        """Whether a sample can wait: it charges no memory, and the session goes on."""
        bears = sample.own_byte_ns or sample.shared_byte_ns or sample.own or sample.shared
        return not bears and not sample.last and sample.to_ns - sample.from_ns < _QUIET_NS

    def _message(self, sample: MemorySample) -> MemoryBorne:
        sequence, own, shared = self._sent.get(sample.session, (0, 0, 0))
        return MemoryBorne(
            executor_id=self._id,
            run=self._run,
            session_id=sample.session,
            tenant=sample.tenant,
            sequence=sequence + 1,
            from_ns=sample.from_ns,
            to_ns=sample.to_ns,
            own=sample.own,
            shared=sample.shared,
            own_byte_us=(own + sample.own_byte_ns) // _US,
            shared_byte_us=(shared + sample.shared_byte_ns) // _US,
            host=sample.host,
            disk=sample.disk,
            last=sample.last,
        )


def added(first: MemorySample, then: MemorySample) -> MemorySample:
    """Combine two consecutive samples of one session."""
    return replace(
        then,
        from_ns=first.from_ns,
        own_byte_ns=first.own_byte_ns + then.own_byte_ns,
        shared_byte_ns=first.shared_byte_ns + then.shared_byte_ns,
    )
