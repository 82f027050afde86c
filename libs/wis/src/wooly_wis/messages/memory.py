"""Where the memory of devices is, and who bears it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from wooly_wis.messages.base import Bytes, Id, Message


class SessionMemory(Message):
    """Where the memory of one session is, in bytes.

    `own` is on the device and nobody else's, `shared` its part of contents that it shares, `host` and `disk` what is swapped out;
    `promised` what it declared to need, `swaps` how often it was swapped out. `residence`: here, leaving, away, coming. What is
    pinned is listed as a session called `pin …`.
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


class MemoryState(Message):
    """Where every byte of a device is: `own + contents + slots + reserve + free = capacity`.

    `contents` is what sessions bear in parts, `slots` lost to rounding, `reserve` the free bytes that large allocations leave.
    `fixed`, `movable`, `largest` are promises, as in `wooly_dispatch.overcommit.Promises`. `sessions` are at most 1,000.
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
    largest: Bytes = 0
    swapped_out: int = Field(default=0, ge=0)
    swapped_in: int = Field(default=0, ge=0)
    sessions: tuple[SessionMemory, ...] = Field(default=(), max_length=1000)

    def of_tenant(self, tenant: str) -> MemoryState:
        """What a tenant may know of it: the sums, and its own sessions."""
        return self.model_copy(update={"sessions": tuple([s for s in self.sessions if s.tenant == tenant])})


class MemoryBorne(Message):
    """What one session bore of a device's memory from one moment to another (event, for metering).

    `run` names the executor's process, `sequence` counts 1, 2, 3, … for each session of a run, without gaps: (executor_id, run,
    session_id, sequence) is unique however often it is delivered. Times are the executor's monotonic ns: only differences mean
    something. `own_byte_us` and `shared_byte_us` are bytes times microseconds, exact integrals over the stretch, rounded so that
    their sums over a session are; `own`, `shared`, `host`, `disk` are bytes at its end. Swapped out, a session bears nothing.
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
