"""What the scheduler is asked and tells: admission, epochs, what every GPU does, audits."""

from __future__ import annotations

from pydantic import Field

from wooly_wis.messages.base import Bytes, Id, Message, Name, SessionId
from wooly_wis.messages.memory import MemoryState, SessionMemory
from wooly_wis.messages.sessions import SessionPolicy


class EndEpochRequest(Message):
    """What an epoch measured (from the scheduler to an executor); see `wooly_dispatch.events.EpochEndedEvent`."""

    slowdown_permille: int = Field(default=0, ge=0, lt=1 << 31)
    idle_permille: int = Field(default=0, ge=0, le=1000)


class EndEpochReply(Message):
    """The windows in force now, in nanoseconds, by class."""

    windows_ns: tuple[int, ...]


class AdmitSessionRequest(Message):
    """May this session run on that executor? (router to scheduler)

    `objective_ns` is the response time that it declares for one request, `service_ns` the GPU time that one takes,
    `interval_ns` the time between two; 0 where not declared. `required_vram` in bytes; `swappable`: it may be swapped out;
    `overcommit_vram_percent`: in force for this executor from now on (None: as it says itself).
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
    """Its policy, or why not: who would miss which objective, and by how much."""

    admitted: bool
    policy: SessionPolicy | None = None
    reason: str = Field(default="", max_length=4096)
    missed_by_ns: int = Field(default=0, ge=0)


class GpusRequest(Message):
    """Ask the scheduler what every GPU and session does; `after`: only GPUs whose id comes after this one."""

    after: str = Field(default="", max_length=128)


class GpuSession(Message):
    """One session on one GPU, as audited from its journal. Times in nanoseconds, shares in permille.

    `share_permille`: of what all sessions ran on the GPU in the last ten seconds; `queued`: programs.
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
    """One GPU: utilization and starvation over the last ten seconds, worst share error, windows by class, state of its audit.

    `lost` says why its journal cannot be followed (empty: it is); `gaps` counts journals of which entries were missing; `age_s`:
    since its last entries. `sessions` are at most 1,000, those with the largest shares; `open_sessions` counts all.
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
        """What a tenant may know of it: how busy it is, and its own sessions."""
        own = tuple([s for s in self.sessions if s.tenant == tenant])
        hidden = {"sessions": own, "last_violation": "", "memory": self.memory and self.memory.of_tenant(tenant)}
        return self.model_copy(update=hidden)


class GpusReply(Message):
    """The GPUs that the scheduler follows, by id. With `more`, ask again after the last one."""

    gpus: tuple[GpuState, ...]
    more: bool = False


class AuditViolated(Message):
    """A journal is not what the rule would have written, or breaks a law (event)."""

    executor_id: Id
    journal: str
    entry: int = Field(ge=0)
    law: str = Field(max_length=128)
    message: str = Field(max_length=4096)
