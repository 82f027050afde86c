"""Sends metering the totals of a journal: what each session ran, for the case that the executor is gone.

A killed executor has not published the work since its last usage record. The journal has that work, and metering books the part
that is missing in the ledger. It is safe to send totals again, or totals of a live executor: the ledger does not change.
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
"""Maximum number of sessions in one message. With the longest names, these are 700 KB."""
_ANY_CORES = (1 << 31) - 1


def messages(totals: Totals, executor_id: str, device: DeviceFacts | None, at_us: int) -> Iterator[UsageRecorded]:
    """Make usage records (`whole`) of a journal's totals.

    Args:
        totals: totals of the journal.
        executor_id: the executor of the journal.
        device: the executor's device, if a heartbeat reported it. Otherwise, metering uses the device kind of earlier entries.
        at_us: end of the covered time, in microseconds since 1970.
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
            process=totals.journal.rpartition(".")[
                0
            ],  # empty for journals without "." in their names, of older executors
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


async def send_totals(js: JetStreamContext, records: Iterator[UsageRecorded]) -> None:
    """Publish messages on the stream of usage.

    Raises:
        StreamError: a message could not be published.
    """
    for message in records:
        await ensure_stream(js, contracts.EXECUTOR_USAGE_RECORDED)
        event = contracts.EXECUTOR_USAGE_RECORDED.at(message.executor_id)
        await publish(js, event, message, id=f"{message.source}:{message.batch}")
