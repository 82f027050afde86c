"""The memory that a session has on a device, and the memory that it waits for. Only `vram` changes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from wooly_executor.memory.accounts import Account
from wooly_executor.mover import Job
from wooly_executor.swap_space import Copy


@dataclass(eq=False, slots=True)
class IpcBuffer:
    """One buffer that sessions share for reading and writing. Only `ipc` changes it.

    Attributes:
        name: its name.
        tenant: tenant of the sessions.
        store: its store in the ledger.
        nbytes: its size.
        exporter: id of the session that has exported it; empty: that session has ended.
        exports: number of exports that were not imported or taken back.
        holders: the key of the buffer in `Holdings.ipc`, by id of the session.
    """

    name: bytes
    tenant: str
    store: int
    nbytes: int
    exporter: str
    exports: int = 0
    holders: dict[str, int] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Holdings:
    """The device memory of one session.

    Attributes:
        account: the session's account in the ledger.
        allows_swap: the session was opened so that it may be swapped out.
        declared: bytes that the session declared as its requirement; None: it declared none.
        claim: bytes with which a session without a declaration counts at least.
        idle_since: when the session last had work, monotonic ns; None while it has work.
        lacking: since when its next program or write waits for room, monotonic ns; 0: it does not wait.
        writing: bytes that the client's next write needs for the copy of a shared buffer.
        parked: since when it waits at a collective for other ranks, monotonic ns; 0: it does not wait.
        travelling: the buffers of a collective that is in progress.
        given_up: there will be no room for that write.
        chosen: number of the last eviction decision that chose this session.
        swaps: how often the session was swapped out.
        guarded: buffers that are shared or being hashed, so that a write must be announced.
        ipc: buffers that it shares with other sessions for reading and writing, by buffer. A negative key stands for a buffer
            that it has freed while an export of it was not imported.
        sealing: hash jobs in progress, by buffer.
        copies: copies of its own buffers outside the device, by buffer.
        jobs: the jobs that use its memory now. They are several if a cancelled one has not ended when the next one begins.
        leaving_bytes: bytes that become free when the session has left.
        closed: the session has ended; its blocks are freed when no job uses them any more.
    """

    account: Account
    allows_swap: bool = True
    declared: int | None = None
    claim: int = 0
    idle_since: int | None = None
    lacking: int = 0
    writing: int = 0
    parked: int = 0
    travelling: frozenset[int] = frozenset()
    given_up: bool = False
    chosen: int = 0
    swaps: int = 0
    guarded: set[int] = field(default_factory=set)
    ipc: dict[int, IpcBuffer] = field(default_factory=dict)
    sealing: dict[int, Job] = field(default_factory=dict)
    copies: dict[int, Copy] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)
    leaving_bytes: int = 0
    closed: bool = False

    @property
    def swappable(self) -> bool:
        """Whether the session may be swapped out. A session that shares buffers with others for writing stays on the device."""
        return self.allows_swap and not self.ipc
