"""The life of a task: its states, the transitions between them, and the times of retries. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

State = Literal["pending", "started", "hibernated", "completed", "failed", "cancelled"]
Kind = Literal["session", "job"]

#: The states that may follow each state. A task whose executor is lost becomes pending again. A session that hibernates has no
#: executor and no place in the queue.
TRANSITIONS: dict[str, frozenset[str]] = {
    "pending": frozenset({"started", "hibernated", "failed", "cancelled"}),
    "started": frozenset({"pending", "hibernated", "completed", "failed", "cancelled"}),
    "hibernated": frozenset({"pending", "completed", "failed", "cancelled"}),
    "completed": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
}
ENDED = frozenset(s for s, after in TRANSITIONS.items() if not after)
#: Back-off before the second attempt, in seconds. It doubles with each further attempt, up to `RETRY_LIMIT_S`.
RETRY_S = 1.0
RETRY_LIMIT_S = 60.0
#: Upper bound of every wait before a task is examined again, in seconds. Twice the back-off limit: a router's clock may be
#: ahead.
LONGEST_WAIT_S = 2 * RETRY_LIMIT_S


def sources(state: str) -> tuple[str, ...]:
    """Return the states from which a task may enter `state`."""
    return tuple(s for s, after in TRANSITIONS.items() if state in after)


def is_due(at: float, now: float) -> bool:
    """Tell whether the time has come to examine a task again.

    Routers share these times, and the clock of one router may have been wrong. A time further ahead than the longest wait comes
    from such a clock, and delays nothing.
    """
    return at <= now or at > now + LONGEST_WAIT_S


def backoff_s(attempt: int) -> float:
    """Return the seconds to wait after attempt `attempt` (from 1) was lost."""
    return float(min(RETRY_S * 2.0 ** min(attempt - 1, 32), RETRY_LIMIT_S))


def still_running(reason: str, running: Mapping[str, float]) -> str:
    """Extend the reason why a task ended by its operators that still run and that no executor can stop.

    Args:
        reason: why the task ended.
        running: seconds for which the operator has run, by executor.
    """
    said = ", ".join([f"on executor {name} for {seconds:.1f} s so far" for name, seconds in running.items()])
    return f"{reason}; one operator still runs {said}: it holds the device, and is billed, until it ends"
