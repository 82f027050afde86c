"""Messages of the scheduler: admission, epochs, the state of every GPU, results of audits."""

from __future__ import annotations

from pydantic import Field

from wooly_wis.messages.base import Bytes, Id, Message, Name, SessionId
from wooly_wis.messages.memory import MemoryState, SessionMemory
from wooly_wis.messages.sessions import SessionPolicy


class EndEpochRequest(Message):
    """The measurements of an epoch (scheduler to executor); see `wooly_dispatch.events.EpochEndedEvent`."""

    slowdown_permille: int = Field(default=0, ge=0, lt=1 << 31)
    idle_permille: int = Field(default=0, ge=0, le=1000)


class EndEpochReply(Message):
    """The windows in force after the epoch, in nanoseconds, by class."""

    windows_ns: tuple[int, ...]


class AdmitSessionRequest(Message):
    """Ask whether a session may run on an executor (router to scheduler).

    Attributes:
        objective_ns: declared response time of one request; 0: not declared.
        service_ns: declared GPU time of one request; 0: not declared.
        interval_ns: declared time between two requests; 0: not declared.
        required_vram: device memory in bytes.
        swappable: the session may be swapped out.
        overcommit_vram_percent: overcommit of this executor from now on; None: the executor's own value.
    """

    session_id: SessionId
    executor_id: Id
    tenant: Name
    priority: int = Field(ge=0, le=4)
    weight: int = Field(default=1, ge=1, le=1 << 20)
    service_ns: int = Field(default=0, ge=0, lt=1 << 62)
    objective_ns: int = Field(default=0, ge=0, lt=1 << 62)
    interval_ns: int = Field(default=0, ge=0, lt=1 << 62)
    required_vram: Bytes = 0
    swappable: bool = True
    overcommit_vram_percent: int | None = Field(default=None, ge=0, le=1000)


class AdmitSessionReply(Message):
    """The session's policy, or the reason of the refusal: the session that would miss its objective, and by how much.

    `full`: the device's memory is promised to other sessions, so the session may be admitted after them.
    """

    admitted: bool
    full: bool = False
    policy: SessionPolicy | None = None
    reason: str = Field(default="", max_length=4096)
    missed_by_ns: int = Field(default=0, ge=0)


class GpusRequest(Message):
    """Ask the scheduler for the state of every GPU and session. `after`: only GPUs with an id after this one."""

    after: str = Field(default="", max_length=128)


class GpuSession(Message):
    """One session on one GPU, from the audit of the GPU's journal. Times are in nanoseconds, shares in permille.

    `share_permille`: share of the GPU time that all sessions used in the last ten seconds. `queued`: number of queued programs.
    """

    session_id: SessionId
    tenant: Name
    policy: SessionPolicy
    suspended: bool = False
    queued: int = Field(default=0, ge=0)
    in_flight: int = Field(default=0, ge=0)
    share_permille: int = Field(default=0, ge=0)
    run_ns: int = Field(default=0, ge=0)
    unjust_ns: int = Field(default=0, ge=0)
    programs: int = Field(default=0, ge=0)
    p50_ns: int = Field(default=0, ge=0)
    p99_ns: int = Field(default=0, ge=0)
    attainment_permille: int = Field(default=1000, ge=0, le=1000)
    memory: SessionMemory | None = None


class GpuState(Message):
    """One GPU: utilization and starvation over the last ten seconds, worst share error, windows by class, state of the audit.

    Attributes:
        lost: why the scheduler cannot follow the journal; empty if it can.
        gaps: number of journals with missing entries.
        age_s: seconds since the journal's last entries.
        sessions: the sessions with the largest shares, at most 1,000.
        open_sessions: number of all open sessions.
    """

    executor_id: Id
    journal: str
    entries: int = Field(ge=0)
    utilization_permille: int = Field(default=0, ge=0, le=1000)
    starvation_permille: int = Field(default=0, ge=0, le=1000)
    share_error_permille: int = Field(default=0, ge=0)
    windows_ns: tuple[int, ...] = ()
    violations: int = Field(default=0, ge=0)
    last_violation: str = Field(default="", max_length=4096)
    lost: str = Field(default="", max_length=4096)
    gaps: int = Field(default=0, ge=0)
    age_s: float = Field(default=0.0, ge=0)
    open_sessions: int = Field(default=0, ge=0)
    sessions: tuple[GpuSession, ...] = ()
    memory: MemoryState | None = None

    def of_tenant(self, tenant: str) -> GpuState:
        """The part that a tenant may see: how busy the GPU is, and the tenant's own sessions."""
        own = tuple([s for s in self.sessions if s.tenant == tenant])
        hidden = {"sessions": own, "last_violation": "", "memory": self.memory and self.memory.of_tenant(tenant)}
        return self.model_copy(update=hidden)


class GpusReply(Message):
    """The GPUs that the scheduler follows, ordered by id. `more`: ask again with `after` set to the last id."""

    gpus: tuple[GpuState, ...]
    more: bool = False


class AuditViolated(Message):
    """A journal differs from the dispatch rule, or breaks a law (event)."""

    executor_id: Id
    journal: str
    entry: int = Field(ge=0)
    law: str = Field(max_length=128)
    message: str = Field(max_length=4096)
