"""The registry of executors, fed by heartbeats. No clock, no I/O: every method is told the time in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from wooly_wis.messages import ExecutorHeartbeat, MemoryState, NodeInfo

LOST_AFTER_S = 5.0
FORGOTTEN_AFTER_S = 3600.0
#: Sessions whose memory a listing shows.
LISTED = 50


@dataclass(frozen=True, slots=True)
class Seen:
    """The last that was heard of an executor. `ended`: why its process ended, if it said so."""

    heartbeat: ExecutorHeartbeat
    at: float
    ended: str = ""

    def lives(self, now: float) -> bool:
        """Whether it is to be given work."""
        return not self.ended and now - self.at <= LOST_AFTER_S


class Registry:
    """All executors that were heard of."""

    def __init__(self) -> None:
        self._seen: dict[str, Seen] = {}

    def hear(self, heartbeat: ExecutorHeartbeat, now: float) -> bool:
        """Take in a heartbeat. True if the executor was not known, or lost, before, and lives now."""
        before = self._seen.get(heartbeat.executor_id)
        if not heartbeat.ending:
            self._seen[heartbeat.executor_id] = Seen(heartbeat, now)
            return before is None or not before.lives(now)
        # Its successor may have been heard of before: then the last word of the old process says nothing of the executor.
        if before is not None and before.heartbeat.pid == heartbeat.pid:
            self._seen[heartbeat.executor_id] = Seen(before.heartbeat, before.at, heartbeat.ending)
        return False

    def forget_old(self, now: float) -> None:
        """Drop executors that have been silent for an hour."""
        for executor_id, seen in list(self._seen.items()):
            if now - seen.at > FORGOTTEN_AFTER_S:
                del self._seen[executor_id]

    def alive(self, now: float) -> list[ExecutorHeartbeat]:
        """Executors heard of within the last five seconds that did not say that they end, by id."""
        return [s.heartbeat for _, s in sorted(self._seen.items()) if s.lives(now)]

    def all(self) -> list[ExecutorHeartbeat]:
        """The last word of everybody who was not forgotten, by id."""
        return [s.heartbeat for _, s in sorted(self._seen.items())]

    def heard(self, executor_id: str) -> float | None:
        """When an executor was last heard of."""
        seen = self._seen.get(executor_id)
        return None if seen is None else seen.at

    def ended(self, executor_id: str) -> str:
        """Why an executor's process has ended; empty if it did not say that it does."""
        seen = self._seen.get(executor_id)
        return "" if seen is None else seen.ended

    def has(self, executor_id: str, session_id: str) -> bool:
        """Whether an executor said last that it has a session."""
        seen = self._seen.get(executor_id)
        return seen is not None and session_id in seen.heartbeat.sessions

    def forget(self, executor_id: str) -> None:
        """Drop one that will not come back."""
        self._seen.pop(executor_id, None)

    def nodes(self, now: float) -> tuple[NodeInfo, ...]:
        """Everything known, for people."""
        return tuple(
            NodeInfo(
                executor_id=k,
                node=s.heartbeat.node,
                state="alive" if s.lives(now) else "lost",
                age_s=round(now - s.at, 3),
                device=s.heartbeat.device,
                sessions=len(s.heartbeat.sessions),
                memory_used=s.heartbeat.memory_used,
                utilization=s.heartbeat.utilization,
                memory=_listed(s.heartbeat),
                work=s.heartbeat.work,
            )
            for k, s in sorted(self._seen.items())
        )


def _listed(heartbeat: ExecutorHeartbeat) -> MemoryState | None:
    """Its memory with the sessions that have most of it: a listing of many executors must stay small."""
    memory = heartbeat.memory
    if memory is None or len(memory.sessions) <= LISTED:
        return memory
    most = sorted(memory.sessions, key=lambda s: (-s.own - s.shared - s.host - s.disk, s.session_id))
    return memory.model_copy(update={"sessions": tuple(most[:LISTED])})
