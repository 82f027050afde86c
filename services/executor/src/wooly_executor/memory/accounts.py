"""Data that the ledger keeps and returns: accounts, charges, totals, the effect of a write."""

from __future__ import annotations

from dataclasses import dataclass

from wooly_executor.memory.book import Gone, Leaving, Scope


class Account:
    """The device memory of one session. Only the ledger changes it; others may read it.

    Attributes:
        name: session id, or name of a pin.
        tenant: tenant of the session.
        scope: with whom it shares contents.
        own: offset of the block of each of its own buffers, by buffer.
        shared: store of each of its shared buffers, by buffer.
        away: requested bytes of each of its own buffers that is swapped out, by buffer.
        blocks: offsets of the blocks of its workspace.
        workspace: bytes of its workspace.
        reserved: bytes reserved for its programs that wait.
        resident: its memory is on the device, or on its way there.
        peak: most bytes that it has ever held.
        ooms: number of failed allocations.
        own_byte_ns: integral of the bytes of its own blocks.
        shared_byte_ns: integral of its part of shared contents.
        settled_at: time up to which the integrals are computed, ns.
    """

    __slots__ = (
        "away",
        "blocks",
        "name",
        "ooms",
        "own",
        "own_byte_ns",
        "peak",
        "reserved",
        "resident",
        "scope",
        "settled_at",
        "shared",
        "shared_byte_ns",
        "tenant",
        "workspace",
    )

    def __init__(self, name: str, tenant: str, scope: Scope, now: int) -> None:
        self.name, self.tenant, self.scope = name, tenant, scope
        self.own: dict[int, int] = {}
        self.shared: dict[int, int] = {}
        self.away: dict[int, int] = {}
        self.blocks: list[int] = []  # blocks of the workspace
        self.workspace = self.reserved = self.peak = self.ooms = 0
        self.resident = True
        self.own_byte_ns = self.shared_byte_ns = 0
        self.settled_at = now


@dataclass(frozen=True, slots=True)
class Bearing:
    """What one session is charged for: bytes now, and integrals in bytes times nanoseconds.

    Attributes:
        own: bytes of its own blocks and of its workspace.
        shared: its part of shared contents.
        own_byte_ns: integral of `own`.
        shared_byte_ns: integral of `shared`.
    """

    own: int
    shared: int
    own_byte_ns: int
    shared_byte_ns: int


@dataclass(frozen=True, slots=True)
class LedgerFacts:
    """Where every byte of the device is: `own + contents + slots + reserve + free = capacity`.

    Attributes:
        capacity: bytes of the device.
        own: bytes of sessions' own blocks, workspaces included.
        contents: bytes of shared contents; sessions are charged for parts of them.
        slots: bytes of slabs that are in no block.
        reserve: free bytes up to the safety reserve.
        free: all other free bytes.
        largest: bytes of the largest free extent.
        promised: free bytes that are reserved for programs that wait.
    """

    capacity: int
    own: int
    contents: int
    slots: int
    reserve: int
    free: int
    largest: int
    promised: int


@dataclass(frozen=True, slots=True)
class Written:
    """The effect of the first write to a shared buffer, which is then its session's own.

    Attributes:
        store: its old store.
        copy: other buffers still use the store, so its bytes must be copied, unless all bytes are overwritten.
        found: what happened to the store.
    """

    store: int
    copy: bool
    found: list[Gone | Leaving]
