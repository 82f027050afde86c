"""The registry of executors, filled by heartbeats. It has no clock and no I/O: each method takes the time in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from wooly_wis.messages import ExecutorHeartbeat, MemoryState, NodeInfo, StoredCheckpoint

#: Seconds without a heartbeat after which an executor gets no work, and after which its sessions count as lost unless
#: `RouterSettings.lost_after_s` says otherwise.
LOST_AFTER_S = 5.0
FORGOTTEN_AFTER_S = 3600.0
#: Maximum number of sessions whose memory a listing shows per executor.
MAX_LISTED_SESSIONS = 50


@dataclass(frozen=True, slots=True)
class Seen:
    """The last heartbeat of an executor. `ended`: the reason why its process ended, if the executor reported one."""

    heartbeat: ExecutorHeartbeat
    at: float
    ended: str = ""

    def lives(self, now: float) -> bool:
        """Tell whether the executor may get work."""
        return not self.ended and now - self.at <= LOST_AFTER_S


class Registry:
    """All executors that have sent a heartbeat."""

    def __init__(self) -> None:
        self._seen: dict[str, Seen] = {}

    def hear(self, heartbeat: ExecutorHeartbeat, now: float) -> bool:
        """Record a heartbeat. Returns True if the executor is alive now and was unknown or lost before."""
        before = self._seen.get(heartbeat.executor_id)
        if not heartbeat.ending:
            self._seen[heartbeat.executor_id] = Seen(heartbeat, now)
            return before is None or not before.lives(now)
        # The new process of this executor may have sent a heartbeat before: then the last heartbeat of the old process changes
        # nothing.
        if before is not None and before.heartbeat.pid == heartbeat.pid:
            self._seen[heartbeat.executor_id] = Seen(before.heartbeat, before.at, heartbeat.ending)
        return False

    def forget_old(self, now: float) -> None:
        """Drop executors that have been silent for an hour."""
        for executor_id, seen in list(self._seen.items()):
            if now - seen.at > FORGOTTEN_AFTER_S:
                del self._seen[executor_id]

    def alive(self, now: float) -> list[ExecutorHeartbeat]:
        """Return the executors with a heartbeat in the last five seconds that did not report their end, by id."""
        return [s.heartbeat for _, s in sorted(self._seen.items()) if s.lives(now)]

    def all(self) -> list[ExecutorHeartbeat]:
        """Return the last heartbeat of every known executor, by id."""
        return [s.heartbeat for _, s in sorted(self._seen.items())]

    def heard(self, executor_id: str) -> float | None:
        """Return the time of an executor's last heartbeat; None for an unknown executor."""
        seen = self._seen.get(executor_id)
        return None if seen is None else seen.at

    def ended(self, executor_id: str) -> str:
        """Return the reason why an executor's process has ended; empty if the executor reported none."""
        seen = self._seen.get(executor_id)
        return "" if seen is None else seen.ended

    def leaving(self, now: float) -> dict[str, str]:
        """Return the executors that end as soon as their sessions have gone on elsewhere, each with its reason."""
        return {h.executor_id: h.leaving for h in self.alive(now) if h.leaving}

    def store(self, executor_id: str) -> str:
        """Return the identity of the place where an executor stores checkpoints; empty: nowhere, or unknown."""
        seen = self._seen.get(executor_id)
        return "" if seen is None else seen.heartbeat.checkpoints

    def checkpoint(self, executor_id: str, session_id: str) -> StoredCheckpoint | None:
        """Return the newest stored checkpoint of a session, as its executor's last heartbeat says."""
        seen = self._seen.get(executor_id)
        if seen is None or seen.heartbeat.memory is None:
            return None
        return next((s.checkpoint for s in seen.heartbeat.memory.sessions if s.session_id == session_id), None)

    def has(self, executor_id: str, session_id: str) -> bool:
        """Tell whether an executor's last heartbeat lists a session."""
        seen = self._seen.get(executor_id)
        return seen is not None and session_id in seen.heartbeat.sessions

    def holds(self, executor_id: str, session_id: str, now: float) -> bool:
        """Tell whether an executor is alive and lists a session."""
        seen = self._seen.get(executor_id)
        return seen is not None and seen.lives(now) and session_id in seen.heartbeat.sessions

    def lacks(self, executor_id: str, session_id: str, now: float) -> bool:
        """Tell whether an executor is alive and does not list a session."""
        seen = self._seen.get(executor_id)
        return seen is not None and seen.lives(now) and session_id not in seen.heartbeat.sessions

    def late(self, executor_id: str, session_id: str, now: float) -> bool:
        """Tell whether an executor that is alive reports that a session's client is silent, but connected."""
        seen = self._seen.get(executor_id)
        return seen is not None and seen.lives(now) and session_id in seen.heartbeat.late

    def counted(self) -> dict[tuple[str, str], int]:
        """Return what each session counts against its device's promises, in bytes, by executor and session.

        A heartbeat lists a limited number of sessions.
        """
        return {
            (name, session.session_id): session.promised
            for name, seen in self._seen.items()
            if seen.heartbeat.memory is not None
            for session in seen.heartbeat.memory.sessions
        }

    def forget(self, executor_id: str) -> None:
        """Drop an executor that will not return."""
        self._seen.pop(executor_id, None)

    def nodes(self, now: float) -> tuple[NodeInfo, ...]:
        """List all known executors, for display."""
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
    """Return the memory with only the sessions that use most of it: a listing of many executors must stay small."""
    memory = heartbeat.memory
    if memory is None or len(memory.sessions) <= MAX_LISTED_SESSIONS:
        return memory
    most = sorted(memory.sessions, key=lambda s: (-s.own - s.shared - s.host - s.disk, s.session_id))
    return memory.model_copy(update={"sessions": tuple(most[:MAX_LISTED_SESSIONS])})
