"""The life of a task: its states, which may follow which, and when it is tried again. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

State = Literal["pending", "started", "completed", "failed", "cancelled"]
Kind = Literal["session", "job"]

#: What may follow. A job whose executor was lost is pending again.
TRANSITIONS: dict[str, frozenset[str]] = {
    "pending": frozenset({"started", "failed", "cancelled"}),
    "started": frozenset({"pending", "completed", "failed", "cancelled"}),
    "completed": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
}
ENDED = frozenset(s for s, after in TRANSITIONS.items() if not after)
#: Seconds before the second attempt; each further one waits twice as long, to a limit.
RETRY_S = 1.0
RETRY_LIMIT_S = 60.0
#: No task is told to wait for so long before it is looked at again, even by a router whose clock is a little ahead.
LONGEST_WAIT_S = 2 * RETRY_LIMIT_S


def sources(state: str) -> tuple[str, ...]:
    """The states that may come before `state`."""
    return tuple(s for s, after in TRANSITIONS.items() if state in after)


def is_due(at: float, now: float) -> bool:
    """Whether the time at which a task is to be looked at again has come.

    Routers share these times, and the clock of one may have been wrong: one that lies further ahead than any wait is long was
    written by such a clock, and holds nothing back.
    """
    return at <= now or at > now + LONGEST_WAIT_S


def backoff_s(attempt: int) -> float:
    """Seconds to wait after the attempt of this number (from 1) was lost."""
    return float(min(RETRY_S * 2.0 ** min(attempt - 1, 32), RETRY_LIMIT_S))


def still_running(reason: str, running: Mapping[str, float]) -> str:
    """Why a task ended, and the operators of it that no executor can stop.

    Args:
        reason: why it ended.
        running: per executor, for how many seconds its operator has run.
    """
    said = ", ".join([f"on executor {name} for {seconds:.1f} s so far" for name, seconds in running.items()])
    return f"{reason}; one operator still runs {said}: it holds the device, and is billed, until it ends"
