"""Which numbers cannot be: a device has so many cores and bytes, and a second has a second of time.

What fails here is put in quarantine: shown, and neither booked nor dropped.
"""

from __future__ import annotations

from wooly_wis.credits import UsageRecord, UsageRecorded

#: Clocks of different kinds are compared: a share, and so much more.
SLACK_PERCENT = 2
SLACK_US = 20_000
#: How far an executor's clock may be ahead of ours, and the time before which there was no Wooly (2020).
AHEAD_US = 300_000_000
EARLIEST_US = 1_577_836_800_000_000
LARGEST = (1 << 63) - 1
#: How much faster than the one that is priced in full a core may be.
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
)
_FORBIDDEN = frozenset(".*> \t\r\n")


def _shown(value: int) -> str:
    return str(value) if abs(value) < 1 << 70 else "astronomical"


def impossible(record: UsageRecord, event: UsageRecorded, now_us: int) -> str:
    """Why a record cannot be right; empty if it can."""
    for name in _QUANTITIES:
        value = getattr(record, name)
        if value < 0 or value > LARGEST:
            return f"{name} is {_shown(value)}"
    if not 0 < record.pace_ppm <= FASTEST_PPM:
        return f"a pace of {_shown(record.pace_ppm)} millionths"
    if not 0 <= record.priority <= 4:
        return f"there is no class {record.priority}"
    if not record.session_id or len(record.session_id) > 64 or not _FORBIDDEN.isdisjoint(record.session_id):
        return "that is no session's id"
    if not record.tenant or len(record.tenant) > 128 or len(record.model) > 256:
        return "no tenant is named, or names are too long"
    if "\0" in record.tenant or "\0" in record.model or "\0" in record.session_id:
        return "a name has a zero byte"
    if record.at_us > now_us + AHEAD_US:
        return f"it is {(record.at_us - now_us) // 1_000_000} s from the future"
    if record.at_us - record.span_us < EARLIEST_US:
        return "it began before there was anything to use"
    span_us = record.span_us + record.span_us * SLACK_PERCENT // 100 + SLACK_US
    if record.gpu_ns > span_us * 1000:
        return f"{record.gpu_ns} ns of device time in {record.span_us} us"
    gpu_us = record.gpu_ns // 1000
    gpu_us += gpu_us * SLACK_PERCENT // 100 + SLACK_US
    if record.core_ns > (gpu_us * event.cores + span_us) * 1000:  # a core may have decoded what the client sent
        return f"{record.core_ns} core-ns in {record.span_us} us and {record.gpu_ns} ns of a device with {event.cores} cores"
    memory_mib = -(-event.memory >> 20)
    if record.resident_mib_us > gpu_us * memory_mib:
        return f"{record.resident_mib_us} MiB-us resident in {record.gpu_ns} ns of a device with {memory_mib} MiB"
    if record.resident_mib_us + record.idle_mib_us > span_us * memory_mib:
        return f"more MiB-us resident than {memory_mib} MiB have in {record.span_us} us"
    return ""
