"""What sessions make an executor hold of the host's memory beside the contents of buffers, and how much is too much.

Pure: it is told numbers, and answers who has to go. A session's own limits are looked at where something is added; the sums, now
and then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

#: Bytes of the interpreter's own for each frame that waits, for each piece of an answer, and for each buffer with its block.
FRAME_BYTES = 400
PIECE_BYTES = 512
BUFFER_BYTES = 600
#: Pieces of answers (a frame has two) that wait for a client, at most: many small answers are few bytes and much memory.
MOST_PIECES = 8192


@dataclass(frozen=True, slots=True)
class HostLimits:
    """Limits, in bytes of the host's memory; times in seconds.

    Attributes:
        answers: of one session, not read by its client: with more, nothing else of the session is processed.
        answers_s: a client that reads nothing for so long, while its session waits for that, loses its session.
        definitions: of one session, decoded and prepared: with more, it forgets what it used longest ago.
        session: of one session, in all: with more, it ends.
        executor: of all sessions: with more, the largest session of the tenant that has most ends.
        decode_s: time of a core that taking in one definition may take.
        programs: of those that no session has any more. They are kept for who defines them again.
    """

    answers: int = 16 << 20
    answers_s: float = 30.0
    definitions: int = 512 << 20
    session: int = 1 << 30
    executor: int = 4 << 30
    decode_s: float = 10.0
    programs: int = 256 << 20


@dataclass(frozen=True, slots=True)
class HostUse:
    """Bytes that one session makes the host hold.

    Attributes:
        queue: frames that are not processed, and the one that is on its way.
        answers: answers that its client has not read.
        definitions: what it has defined, as it came.
        decoded: the same, decoded and prepared.
        sources: texts of kernels.
        buffers: what is kept of each buffer beside its contents.
    """

    queue: int
    answers: int
    definitions: int
    decoded: int
    sources: int
    buffers: int

    @property
    def total(self) -> int:
        """In all. A definition is not kept as it came."""
        return self.queue + self.answers + self.decoded + self.sources + self.buffers

    def to_json(self) -> dict[str, int]:
        """Its numbers by name."""
        return {f"host_{f.name}": getattr(self, f.name) for f in fields(self)} | {"host_total": self.total}


@dataclass(frozen=True, slots=True)
class Holder:
    """A session, whose it is, and what it holds."""

    session_id: str
    tenant: str
    use: HostUse


def session_to_end(holders: Iterable[Holder], limits: HostLimits, decoded: int) -> tuple[str, str] | None:
    """Whose session has to end, and why; None: nobody's.

    Args:
        holders: all sessions.
        limits: what they may hold.
        decoded: bytes of all programs that sessions have, each counted once: sessions share them.
    """
    known = list(holders)
    for h in known:
        if h.use.total > limits.session:
            return h.session_id, (
                f"it makes the executor hold {h.use.total} bytes of host memory ({_parts(h.use)}), at most "
                f"{limits.session} (WOOLY_EXECUTOR_SESSION_HOST)"
            )
    total = decoded + sum([h.use.total - h.use.decoded for h in known])
    if total <= limits.executor or not known:
        return None
    tenants: dict[str, int] = {}
    for h in known:
        tenants[h.tenant] = tenants.get(h.tenant, 0) + h.use.total
    most = max(tenants, key=lambda t: tenants[t])
    found = max([h for h in known if h.tenant == most], key=lambda h: h.use.total)
    return found.session_id, (
        f"all sessions make the executor hold {total} bytes of host memory, at most {limits.executor} "
        f"(WOOLY_EXECUTOR_SESSIONS_HOST), and it holds most: {_parts(found.use)}"
    )


def _parts(use: HostUse) -> str:
    parts = sorted([(n, k) for k, n in use.to_json().items() if k not in ("host_total", "host_definitions") and n])
    return ", ".join([f"{name.removeprefix('host_')} {n}" for n, name in reversed(parts)])
