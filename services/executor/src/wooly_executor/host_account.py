"""Accounts for the host memory that sessions use in the executor, without the contents of their buffers, and limits it.

Pure: it gets numbers, and answers which session must end. The limits of a single session are checked where something is added;
the sums are checked periodically.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

#: Host memory, in bytes, that the interpreter needs per queued frame, per piece of an answer, and per buffer with its block.
FRAME_BYTES = 400
PIECE_BYTES = 512
BUFFER_BYTES = 600
#: Maximum number of pieces of answers queued for a client (a frame has two). Many small answers are few bytes but much
#: interpreter memory.
MAX_PIECES = 8192


@dataclass(frozen=True, slots=True)
class HostLimits:
    """Limits of host memory, in bytes, and of times, in seconds.

    Attributes:
        answers: unread answers of one session. Above it, no other frame of the session is processed.
        answers_s: maximum time for which a session waits for a client that reads nothing. After it, the session ends.
        definitions: decoded and prepared programs of one session. Above it, the least recently used programs are forgotten.
        session: all host memory of one session. Above it, the session ends.
        executor: host memory of all sessions. Above it, the largest session of the tenant with the most memory ends.
        decode_s: core time for decoding one definition.
        programs: programs that no session has any more. They are cached for sessions that define them again.
        checkpoints: copies of buffers of all sessions that are being stored as checkpoints.
    """

    answers: int = 16 << 20
    answers_s: float = 30.0
    definitions: int = 512 << 20
    session: int = 1 << 30
    executor: int = 4 << 30
    decode_s: float = 10.0
    programs: int = 256 << 20
    checkpoints: int = 1 << 30


@dataclass(frozen=True, slots=True)
class HostUse:
    """Host memory that one session uses, in bytes.

    Attributes:
        queue: frames that wait, and the frame that is being received.
        answers: answers that the client has not read.
        definitions: definitions of programs, as received.
        decoded: the same programs, decoded and prepared.
        sources: kernel sources.
        buffers: bookkeeping of the buffers, without their contents.
        records: records of a profile that the client has not taken.
        peers: operands and results of a collective that another executor carries.
        segment: memory that the session shares with its client. It has limits of its own, and is no part of the total.
        job: module and pieces of sources and results, if the session is a job: its client is a thread of this process.
    """

    queue: int
    answers: int
    definitions: int
    decoded: int
    sources: int
    buffers: int
    records: int = 0
    job: int = 0
    peers: int = 0
    segment: int = 0

    @property
    def total(self) -> int:
        """The sum. Received definitions do not count, because they are not kept."""
        return (
            self.queue
            + self.answers
            + self.decoded
            + self.sources
            + self.buffers
            + self.records
            + self.job
            + self.peers
        )

    def to_json(self) -> dict[str, int]:
        """The numbers by name."""
        return {f"host_{f.name}": getattr(self, f.name) for f in fields(self)} | {"host_total": self.total}


@dataclass(frozen=True, slots=True)
class Holder:
    """A session, its tenant and its host memory."""

    session_id: str
    tenant: str
    use: HostUse


def session_to_end(holders: Iterable[Holder], limits: HostLimits, decoded: int) -> tuple[str, str] | None:
    """The session that must end because of the limits, and why. None: no session must end.

    Args:
        holders: all sessions.
        limits: the limits.
        decoded: bytes of all programs of all sessions, each program counted once, because sessions share programs.
    """
    known = list(holders)
    for h in known:
        if h.use.total > limits.session:
            return h.session_id, (
                f"the session uses {h.use.total} bytes of the executor's host memory ({_parts(h.use)}), at most "
                f"{limits.session} are allowed (WOOLY_EXECUTOR_SESSION_HOST)"
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
        f"all sessions use {total} bytes of the executor's host memory, at most {limits.executor} are allowed "
        f"(WOOLY_EXECUTOR_SESSIONS_HOST), and this session uses the most: {_parts(found.use)}"
    )


def _parts(use: HostUse) -> str:
    parts = sorted(
        [(n, k) for k, n in use.to_json().items() if k not in ("host_total", "host_definitions", "host_segment") and n]
    )
    return ", ".join([f"{name.removeprefix('host_')} {n}" for n, name in reversed(parts)])
