"""Where the memory of each device is, and which session is charged for it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from wooly_wis.messages.base import Bytes, Id, Message


class StoredCheckpoint(Message):
    """The newest stored checkpoint of a session.

    Attributes:
        number: its number; the first has the number 1.
        at: when it was stored, in seconds since the epoch.
        nbytes: bytes of all buffers in it.
        written: bytes of those that it stored, because they had changed since the last checkpoint.
        pause_s: seconds for which the session waited for it.
    """

    number: int = Field(ge=1)
    at: float = Field(ge=0)
    nbytes: Bytes = 0
    written: Bytes = 0
    pause_s: float = Field(default=0.0, ge=0)


class SessionMemory(Message):
    """The memory of one session, in bytes.

    Attributes:
        own: on the device, used by this session only.
        shared: on the device, the session's part of contents that it shares with other sessions.
        host: swapped out to host memory.
        disk: swapped out to disk.
        promised: bytes with which the session counts against the device's promises: the size that it declared; without one, the
            default claim or what it uses, whichever is more.
        swaps: how often the session was swapped out.
        residence: here, leaving, away or coming.
        checkpoint: its newest stored checkpoint; None: it has none.

    Pinned contents are listed as a session called `pin …`.
    """

    session_id: Annotated[str, StringConstraints(max_length=320)]
    tenant: Annotated[str, StringConstraints(max_length=128)] = ""
    own: Bytes = 0
    shared: Bytes = 0
    host: Bytes = 0
    disk: Bytes = 0
    promised: Bytes = 0
    swappable: bool = True
    residence: Literal["here", "leaving", "away", "coming"] = "here"
    swaps: int = Field(default=0, ge=0)
    checkpoint: StoredCheckpoint | None = None


class MemoryState(Message):
    """Where every byte of a device is: `own + contents + slots + reserve + free = capacity`.

    Attributes:
        contents: contents that sessions share.
        slots: cost of rounding.
        reserve: safety reserve that large allocations do not use.
        fixed: promises, as `movable`; see `wooly_dispatch.overcommit.Promises`.
        sessions: at most 1,000.
    """

    capacity: Bytes
    own: Bytes = 0
    contents: Bytes = 0
    slots: Bytes = 0
    reserve: Bytes = 0
    free: Bytes = 0
    host: Bytes = 0
    host_budget: Bytes = 0
    disk: Bytes = 0
    disk_budget: Bytes = 0
    overcommit_percent: int = Field(default=0, ge=0, le=1000)
    fixed: Bytes = 0
    movable: Bytes = 0
    swapped_out: int = Field(default=0, ge=0)
    swapped_in: int = Field(default=0, ge=0)
    sessions: tuple[SessionMemory, ...] = Field(default=(), max_length=1000)

    def of_tenant(self, tenant: str) -> MemoryState:
        """The part that a tenant may see: the sums, and the tenant's own sessions."""
        return self.model_copy(update={"sessions": tuple([s for s in self.sessions if s.tenant == tenant])})


class MemoryBorne(Message):
    """The device memory that one session is charged for in a span of time (event, for metering).

    `run` names the executor's process. `sequence` counts 1, 2, 3, … without gaps, for each session of a run. So (executor_id,
    run, session_id, sequence) identifies an event that is delivered several times. Times are monotonic ns of the executor: only
    differences have a meaning. `own_byte_us` and `shared_byte_us` are bytes times microseconds: exact integrals over the span,
    rounded so that the sums over a session are exact, too. `own`, `shared`, `host`, `disk` are bytes at the end of the span. A
    session is not charged while it is swapped out.
    """

    executor_id: Id
    run: Id
    session_id: Annotated[str, StringConstraints(max_length=320)]
    tenant: Annotated[str, StringConstraints(max_length=128)]
    sequence: int = Field(ge=1)
    from_ns: int = Field(ge=0)
    to_ns: int = Field(ge=0)
    own: Bytes = 0
    shared: Bytes = 0
    own_byte_us: int = Field(default=0, ge=0)
    shared_byte_us: int = Field(default=0, ge=0)
    host: Bytes = 0
    disk: Bytes = 0
    last: bool = False
