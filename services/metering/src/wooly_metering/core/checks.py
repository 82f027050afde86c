"""Checks for impossible usage: a device has a limited number of cores and bytes, and usage cannot be longer than its time span.

A record that fails a check is put into quarantine: it is visible there, and it is neither booked nor dropped.
"""

from __future__ import annotations

from wooly_wis.credits import UsageRecord, UsageRecorded

#: Tolerance for the comparison of different clocks: a percentage, plus an absolute time in microseconds.
SLACK_PERCENT = 2
SLACK_US = 20_000
#: Maximum time, in microseconds, by which an executor's clock may be ahead; and the earliest possible time (2020).
MAX_CLOCK_AHEAD_US = 300_000_000
EARLIEST_US = 1_577_836_800_000_000
LARGEST = (1 << 63) - 1
#: Maximum pace, in millionths: a core at most 100 times as fast as a core that is priced in full.
FASTEST_PPM = 100_000_000
_QUANTITIES = (
    "span_us",
    "runs",
    "gpu_ns",
    "core_ns",
    "moved_bytes",
    "flops",
    "resident_mib_us",
    "idle_mib_us",
    "repeats_core_ns",
    "epoch",
)
#: Maximum number of devices of a session, and of its attempts: the widths of the ledger's columns.
_PARTS, _EPOCHS = 8, 1 << 31
_FORBIDDEN = frozenset(".*> \t\r\n")


def _shown(value: int) -> str:
    return str(value) if abs(value) < 1 << 70 else "astronomical"


def in_time(record: UsageRecord, latest_us: int) -> tuple[UsageRecord, str]:
    """A record with a time that can be right, and the reason if its time was changed.

    A record from the future comes from an executor whose clock was set. Its amounts are right, so it is booked, but at the time
    of its arrival.

    Args:
        record: the record.
        latest_us: the latest time that any clock at hand shows, in us since 1970.
    """
    ahead_us = record.at_us - latest_us
    if ahead_us <= MAX_CLOCK_AHEAD_US:
        return record, ""
    ahead = f"{ahead_us // 1_000_000} s" if ahead_us < 1 << 70 else "far"
    return record.model_copy(update={"at_us": latest_us}), f"its executor's clock was {ahead} ahead"


def impossible(record: UsageRecord, event: UsageRecorded) -> str:
    """Why a record cannot be right; empty if it can.

    Args:
        record: the record.
        event: the message that contains it.
    """
    for name in _QUANTITIES:
        value = getattr(record, name)
        if value < 0 or value > LARGEST:
            return f"{name} is {_shown(value)}"
    if not 0 <= record.part < _PARTS or record.epoch >= _EPOCHS:
        return f"device {_shown(record.part)} at attempt {_shown(record.epoch)} does not exist"
    if record.unsaved_core_ns is not None and not 0 <= record.unsaved_core_ns <= LARGEST:
        return f"unsaved_core_ns is {_shown(record.unsaved_core_ns)}"
    if record.repeats_core_ns > record.core_ns:
        return f"it repeated {record.repeats_core_ns} core-ns, but used only {record.core_ns}"
    if not 0 < record.pace_ppm <= FASTEST_PPM:
        return f"pace_ppm is {_shown(record.pace_ppm)}"
    if not 0 <= record.priority <= 4:
        return f"class {record.priority} does not exist"
    if not record.session_id or len(record.session_id) > 64 or not _FORBIDDEN.isdisjoint(record.session_id):
        return "the session id is not valid"
    if not record.tenant or len(record.tenant) > 128 or len(record.model) > 256:
        return "the tenant is empty, or a name is too long"
    if "\0" in record.tenant or "\0" in record.model or "\0" in record.session_id:
        return "a name contains a zero byte"
    if record.at_us - record.span_us < EARLIEST_US:
        return "it began before 2020"
    span_us = record.span_us + record.span_us * SLACK_PERCENT // 100 + SLACK_US
    if record.gpu_ns > span_us * 1000:
        return f"it has {record.gpu_ns} ns of device time in only {record.span_us} us"
    gpu_us = record.gpu_ns // 1000
    gpu_us += gpu_us * SLACK_PERCENT // 100 + SLACK_US
    if record.core_ns > (gpu_us * event.cores + span_us) * 1000:  # one more core may have decoded the client's data
        return f"it has {record.core_ns} core-ns in {record.span_us} us, {record.gpu_ns} ns of a device with {event.cores} cores"
    memory_mib = -(-event.memory >> 20)
    if record.resident_mib_us > gpu_us * memory_mib:
        return (
            f"it has {record.resident_mib_us} resident MiB-us in {record.gpu_ns} ns of a device with {memory_mib} MiB"
        )
    if record.resident_mib_us + record.idle_mib_us > span_us * memory_mib:
        return f"it has more resident MiB-us than a device with {memory_mib} MiB can have in {record.span_us} us"
    return ""
