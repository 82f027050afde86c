"""Publishes usage to JetStream: collects it from the device loop twice a second, and publishes numbered batches in order.

While NATS is away nothing is collected: the counters go on, one set per session. A collected batch is published again under the
same number until JetStream has stored it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from nats.js import JetStreamContext
from wooly_bus import contracts
from wooly_bus.steady_clock import SteadyClock
from wooly_bus.streams import StreamError, ensure_stream, publish
from wooly_wis.credits import UsageRecord, UsageRecorded
from wooly_wis.program import Program

from wooly_executor.billing.core_comparison import CoreComparison
from wooly_executor.billing.usage import UsageDelta, work_of
from wooly_executor.device_loop import DeviceLoop

log = logging.getLogger("wooly.executor")
PERIOD_S = 0.5
RETRY_S = 0.5
#: Maximum number of records in one message: 700 KB with the longest names.
RECORDS = 500
#: Number of programs whose work is cached.
WORK_KEPT = 8192
_MAX_COUNT = (1 << 63) - 1


class UsagePublisher:
    """Publishes one device's usage until cancelled.

    Args:
        js: the JetStream context.
        loop: the device loop.
        executor_id: id of the executor.
        process: name of this process, unique among all processes of the executor. It is the source of the records.
        measured: returns the share of the device's cores that this process has used since the last call, as the vendor's library
            measures it, or None. It is compared with the bills in the log. None: nothing measures it.
    """

    def __init__(
        self,
        js: JetStreamContext,
        loop: DeviceLoop,
        executor_id: str,
        process: str,
        measured: Callable[[], float | None] | None = None,
    ) -> None:
        self._js, self._loop, self._id = js, loop, executor_id
        self._event = contracts.EXECUTOR_USAGE_RECORDED.at(executor_id)
        self.source = process
        facts = loop.runtime.facts()
        self._kind, self._cores = str(facts["vendor"]), int(facts["cores"])
        self._clock = SteadyClock()  # a machine's clock that is set moves no usage to another hour
        self._batch = 0
        self._collected: deque[UsageDelta] = deque()
        self._waiting: deque[UsageRecorded] = deque()
        self._work: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._ensured = False
        self._complaint = ""
        self._measured, self._billed = measured, CoreComparison(self._cores, time.monotonic_ns())

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            try:
                await self.publish()
                self._complaint = ""
                if self._measured is not None and self._billed.due(time.monotonic_ns()):
                    found = await asyncio.to_thread(self._measured)
                    log.info("%s", self._billed.text(found, time.monotonic_ns()))
                await self._loop.usage.bell.heard(PERIOD_S)
            except StreamError as e:
                if str(e) != self._complaint:
                    log.warning("cannot publish usage: %s; it is kept and sent later", e)
                self._complaint, self._ensured = str(e), False
                await asyncio.sleep(RETRY_S)

    async def publish(self) -> None:
        """Publish all usage so far.

        Raises:
            StreamError: a batch could not be published. It is kept.
        """
        if not self._waiting:
            # No usage is in a local variable across an await: the task may be cancelled, and collected usage must not be lost.
            await asyncio.wrap_future(self._loop.call(lambda: self._collected.extend(self._loop.take_usage())))
            at_us = int(self._clock() * 1e6)
            while self._collected:
                some = [self._collected.popleft() for _ in range(min(RECORDS, len(self._collected)))]
                self._waiting.append(self._message(some, at_us))
            if not self._waiting:
                return
        if not self._ensured:
            await ensure_stream(self._js, contracts.EXECUTOR_USAGE_RECORDED)
            self._ensured = True
        while self._waiting:
            message = self._waiting[0]
            await publish(self._js, self._event, message, id=f"{self.source}:{message.batch}")
            self._waiting.popleft()

    def _message(self, taken: list[UsageDelta], at_us: int) -> UsageRecorded:
        self._batch += 1
        return UsageRecorded(
            source=self.source,
            batch=self._batch,
            executor_id=self._id,
            device_kind=self._kind,
            cores=self._cores,
            memory=self._loop.memory,
            records=tuple([self._record(t, at_us) for t in taken]),
        )

    def _record(self, taken: UsageDelta, at_us: int) -> UsageRecord:
        self._billed.add(taken.core_ns)
        runs, moved_bytes, flops = taken.summed
        work = [(self._work_of(digest, program), times) for digest, (program, times) in taken.runs.items()]
        return UsageRecord(
            session_id=taken.session_id,
            tenant=taken.tenant or "default",
            model=taken.model,
            priority=taken.priority,
            at_us=at_us,
            span_us=-(-taken.span_ns // 1000),
            runs=runs + sum([times for _, times in work]),
            gpu_ns=taken.gpu_ns,
            core_ns=taken.core_ns,
            pace_ppm=taken.pace,
            moved_bytes=min(moved_bytes + sum([moved * times for (moved, _), times in work]), _MAX_COUNT),
            flops=min(flops + sum([arithmetic * times for (_, arithmetic), times in work]), _MAX_COUNT),
            resident_mib_us=taken.resident,
            idle_mib_us=taken.idle,
            ended=taken.ended,
            part=taken.part,
            epoch=taken.epoch,
            repeats_core_ns=taken.repeated_ns,
            unsaved_core_ns=taken.unsaved_ns,
            trace=taken.trace,
        )

    def _work_of(self, digest: bytes, program: Program) -> tuple[int, int]:
        found = self._work.get(digest)
        if found is None:
            found = self._work[digest] = work_of(program)
            if len(self._work) > WORK_KEPT:
                self._work.popitem(last=False)
        return found
