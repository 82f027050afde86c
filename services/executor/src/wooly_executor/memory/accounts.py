"""What the ledger keeps of each session and says of them all: accounts, what they bear, what a write did."""

from __future__ import annotations

from dataclasses import dataclass

from wooly_executor.memory.book import Gone, Leaving, Scope


class Account:
    """What one session has. Read what you like; the ledger changes it.

    Attributes:
        own: blocks of its own buffers, by buffer: where each is.
        shared: its buffers whose content is known, by buffer: the store.
        away: its own buffers that are not on the device, by buffer: bytes asked for.
        workspace: bytes of its workspace.
        reserved: bytes promised to its programs that wait.
        resident: its memory is on the device, or on its way there.
        peak: most bytes that it ever held.
        ooms: allocations that failed.
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
        self.blocks: list[int] = []  # of the workspace
        self.workspace = self.reserved = self.peak = self.ooms = 0
        self.resident = True
        self.own_byte_ns = self.shared_byte_ns = 0
        self.settled_at = now


@dataclass(frozen=True, slots=True)
class Bearing:
    """What one session bears now, and has borne. Bytes, and bytes times nanoseconds.

    Attributes:
        own: of its own, and its workspace.
        shared: its part of contents.
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
        own: sessions' own bytes, workspaces included.
        contents: bytes of contents, which sessions bear in parts.
        slots: bytes of slabs that are in no block.
        reserve: free bytes up to the safety reserve.
        free: all other free bytes.
        largest: bytes of the largest free extent.
        promised: of the free bytes, those reserved for programs that wait.
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
    """A shared buffer became its session's own.

    Attributes:
        store: what it was on.
        copy: others have that still: copy it, unless all of it is overwritten.
        found: what became of the store.
    """

    store: int
    copy: bool
    found: list[Gone | Leaving]
