"""What sessions ran in all by a journal, told to metering when their executor is gone.

An executor that is killed has not published what ran since its last usage record. Its journal knows: metering books what the
ledger lacks. Telling the same again, or of an executor that lives, changes nothing in the ledger.
"""

from __future__ import annotations

from collections.abc import Iterator

from nats.js import JetStreamContext
from wooly_bus import contracts
from wooly_bus.streams import ensure_stream, publish
from wooly_wis.credits import UsageRecord, UsageRecorded
from wooly_wis.messages import DeviceFacts

from wooly_scheduler.core.follower import Ran, Totals

RECORDS = 500
"""Sessions of one message: 700 KB of names at their longest."""
_ANY_CORES = (1 << 31) - 1


def messages(totals: Totals, executor_id: str, device: DeviceFacts | None, at_us: int) -> Iterator[UsageRecorded]:
    """A journal's totals as records of usage that are whole.

    Args:
        totals: of the journal.
        executor_id: whose.
        device: its device, where a heartbeat told; else metering takes the kind from what it booked before.
        at_us: until when, microseconds since 1970.
    """
    for first in range(0, len(totals.ran), RECORDS):
        yield UsageRecorded(
            source=f"journal/{totals.journal}/{first // RECORDS}",
            batch=totals.entries,
            executor_id=executor_id,
            device_kind="" if device is None else device.vendor[:64],
            cores=_ANY_CORES if device is None else device.cores,
            memory=0,
            records=tuple([_record(ran, at_us) for ran in totals.ran[first : first + RECORDS]]),
            whole=True,
        )


def _record(ran: Ran, at_us: int) -> UsageRecord:
    return UsageRecord(
        session_id=ran.session,
        tenant=ran.tenant or "default",
        priority=ran.priority,
        at_us=at_us,
        span_us=-(-ran.gpu_ns // 1000),
        gpu_ns=ran.gpu_ns,
        core_ns=ran.core_ns,
    )


async def tell(js: JetStreamContext, told: Iterator[UsageRecorded]) -> None:
    """Put messages into the stream of usage.

    Raises:
        StreamError: not all of them could be.
    """
    for message in told:
        await ensure_stream(js, contracts.EXECUTOR_USAGE_RECORDED)
        event = contracts.EXECUTOR_USAGE_RECORDED.at(message.executor_id)
        await publish(js, event, message, id=f"{message.source}:{message.batch}")
