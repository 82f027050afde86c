"""What a session holds of a device's memory, and what it lacks. `vram` alone changes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from wooly_executor.memory.accounts import Account
from wooly_executor.mover import Job
from wooly_executor.swap_space import Copy


@dataclass(eq=False, slots=True)
class Holdings:
    """One session's.

    Attributes:
        account: its account in the ledger.
        swappable: its memory may leave the device.
        promised: bytes that it declared to need.
        idle_since: when it last had something to do, ns; None while it has.
        lacking: since when its next program or write waits for room, ns; 0 if it does not.
        writing: bytes that its client's next write lacks: the buffer is shared, and a copy is to be made.
        given_up: there will be no room for that write.
        chosen: the number of the choice at which it last had to leave.
        swaps: how often it was swapped out.
        guarded: buffers that are shared, or being hashed: a write must be announced.
        sealing: those being hashed.
        copies: its own buffers' bytes while it is away.
        job: what moves its memory now.
        leaving_bytes: what will be free when it has left.
        closed: the session is over; its blocks are freed when `job` is done with them.
    """

    account: Account
    swappable: bool = True
    promised: int = 0
    idle_since: int | None = None
    lacking: int = 0
    writing: int = 0
    given_up: bool = False
    chosen: int = 0
    swaps: int = 0
    guarded: set[int] = field(default_factory=set)
    sealing: dict[int, Job] = field(default_factory=dict)
    copies: dict[int, Copy] = field(default_factory=dict)
    job: Job | None = None
    leaving_bytes: int = 0
    closed: bool = False
