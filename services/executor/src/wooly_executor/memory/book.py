"""Records which content each buffer of each session has: deduplication with copy-on-write, and every byte on an account.

A *store* is a block of bytes on the device, or elsewhere while no session that holds it is resident. The book numbers the stores;
the executor knows where they are. Each buffer of a session refers to one store. If the content id of a store is known, other
buffers can join it, depending on the scope:

- scope `off`: no other buffer can join;
- scope `tenant`: the store is in its tenant's circle; sessions of that tenant with `tenant` or `shared` find it;
- scope `shared`: the store is in the public circle; all sessions with `shared` find it, of any tenant.

So neither answers nor their timing tell a session whether another tenant holds some content, unless both chose `shared`.

There are two counts of bytes. What a session *has* is the size of all its buffers, as on a device of its own. Quotas limit this
count, so neither a copy on write nor the end of another sharer can exceed a quota. What a session *bears* is its charge: each
resident store is divided among its resident sharers, to the byte, so the sum over all sessions equals the allocated bytes.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from enum import Enum

from wooly_executor.errors import AdmissionError, BindingError, OutOfMemoryError

ContentId = bytes
_Key = tuple[str | None, ContentId, int]  # circle (None: the public circle), content id, size in bytes


class Scope(Enum):
    """With which sessions a session shares equal content."""

    OFF = "off"
    TENANT = "tenant"
    SHARED = "shared"


@dataclass(frozen=True, slots=True)
class Gone:
    """A store that no buffer uses any more.

    Attributes:
        store: number of the store.
        resident: it is on the device; free its block.
        saved: there is a copy elsewhere; delete it.
    """

    store: int
    resident: bool
    saved: bool


@dataclass(frozen=True, slots=True)
class InPlace:
    """Write to the existing store.

    Attributes:
        store: number of the store.
        stale: the copy elsewhere is outdated; delete it.
    """

    store: int
    stale: bool = False


@dataclass(frozen=True, slots=True)
class CopyFirst:
    """Other buffers have the same content: allocate `store`, copy `source` to it unless all bytes are overwritten, then write to
    `store`.

    Attributes:
        source: number of the old store.
        store: number of the new store.
        nbytes: size of both.
        leaving: set if all other holders are swapped out, so that `source` leaves the device afterwards.
    """

    source: int
    store: int
    nbytes: int
    leaving: Leaving | None = None


@dataclass(frozen=True, slots=True)
class Leaving:
    """A store that leaves the device, because all its holders are swapped out.

    Attributes:
        store: number of the store.
        nbytes: size of the store.
        saved: there is an equal copy elsewhere, so the bytes can be dropped.
    """

    store: int
    nbytes: int
    saved: bool


@dataclass(frozen=True, slots=True)
class Coming:
    """A store that must be copied back to the device."""

    store: int
    nbytes: int


class _Session:
    __slots__ = ("bears", "buffers", "has", "id", "quota", "resident", "scope", "stores", "tenant")

    def __init__(self, id: str, tenant: str, scope: Scope, quota: int | None) -> None:
        self.id, self.tenant, self.scope, self.quota = id, tenant, scope, quota
        self.resident = True
        self.buffers: dict[int, _Store] = {}
        self.stores: dict[int, _Store] = {}  # by number, each once
        self.has = self.bears = 0


class _Store:
    """A store. `holders`: number of its buffers by session. `paying`: its resident sessions, in order of joining."""

    __slots__ = ("holders", "key", "nbytes", "number", "paying", "saved")

    def __init__(self, number: int, nbytes: int) -> None:
        self.number, self.nbytes = number, nbytes
        self.holders: dict[str, int] = {}
        self.paying: dict[str, _Session] = {}
        self.key: _Key | None = None
        self.saved = False


class Book:
    """The table of contents. One thread owns it. A call that raises changes nothing."""

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}
        self._stores: dict[int, _Store] = {}
        self._known: dict[_Key, _Store] = {}
        self._last = 0
        self.allocated = 0  # bytes of all resident stores

    # -- sessions ----------------------------------------------------------------------------------------------------

    def open(self, session: str, *, tenant: str = "", scope: Scope = Scope.OFF, quota: int | None = None) -> None:
        """Add a session that may have `quota` bytes of buffers; None: no limit.

        Raises:
            AdmissionError: the name is in use.
        """
        if session in self._sessions:
            raise AdmissionError(f"session {session} is open already")
        self._sessions[session] = _Session(session, tenant, scope, quota)

    def close(self, session: str) -> list[Gone | Leaving]:
        """Remove a session, resident or not. Shared stores remain for the other holders."""
        known = self._sessions.get(session)
        if known is None:
            return []
        gone = [found for buffer in list(known.buffers) for found in self.free(session, buffer)]
        del self._sessions[session]
        return gone

    # -- buffers -----------------------------------------------------------------------------------------------------

    def allocate(self, session: str, buffer: int, nbytes: int) -> int:
        """Add a buffer with a new store, and return the number of the store.

        Raises:
            OutOfMemoryError: the session's quota is exceeded.
            BindingError: the session is unknown or swapped out, or the buffer exists.
        """
        owner = self._new_buffer(session, buffer, nbytes)
        store = self._new_store(nbytes)
        self._join(owner, buffer, store)
        return store.number

    def share(self, session: str, buffer: int, nbytes: int, content: ContentId) -> int | None:
        """Add a buffer on an equal store that is on the device. None: there is no store that this session may share.

        Raises:
            OutOfMemoryError: the session's quota is exceeded.
            BindingError: the session is unknown or swapped out, or the buffer exists.
        """
        owner = self._new_buffer(session, buffer, nbytes)
        store = self._find(owner, nbytes, content)
        if store is None or not store.paying:
            return None
        self._join(owner, buffer, store)
        return store.number

    def find(self, session: str, nbytes: int, content: ContentId) -> int | None:
        """The store on the device that the session would `share`. None: there is none."""
        store = self._find(self._session(session), nbytes, content)
        return store.number if store is not None and store.paying else None

    def join(self, session: str, buffer: int, store: int) -> None:
        """Add a buffer on a store that is on the device, in any circle. The caller has checked that a holder allows it.

        Raises:
            OutOfMemoryError: the session's quota is exceeded.
            BindingError: the session or store is unknown or swapped out, or the buffer exists.
        """
        known = self._stores.get(store)
        if known is None or not known.paying:
            raise BindingError(f"store {store} is not on the device")
        self._join(self._new_buffer(session, buffer, known.nbytes), buffer, known)

    def seal(self, session: str, buffer: int, content: ContentId) -> list[Gone | Leaving]:
        """Set the content id of a completely written buffer, as the executor has computed it. Other sessions may share it from
        now on.

        If an equal store is on the device, the buffer moves to that store, and its old store is gone.

        Raises:
            BindingError: the buffer is unknown, or the session is swapped out.
        """
        owner, store = self._resident_buffer(session, buffer)
        if owner.scope is Scope.OFF or store.key is not None:  # a store without a content id has one buffer
            return []
        equal = self._find(owner, store.nbytes, content)
        if equal is not None and equal.paying:
            gone = self._leave(owner, buffer)
            self._join(owner, buffer, equal)
            return gone
        key = (None if owner.scope is Scope.SHARED else owner.tenant, content, store.nbytes)
        if key not in self._known:
            store.key, self._known[key] = key, store
        return []

    def write(self, session: str, buffer: int) -> InPlace | CopyFirst:
        """Prepare a write to any part of a buffer. Returns where to write.

        Raises:
            BindingError: the buffer is unknown, or the session is swapped out.
        """
        owner, store = self._resident_buffer(session, buffer)
        if sum(store.holders.values()) == 1:
            stale, store.saved = store.saved, False
            self._forget(store)
            return InPlace(store.number, stale)
        own = self._new_store(store.nbytes)
        left = self._leave(owner, buffer)  # the old store remains, because another buffer is on it
        self._join(owner, buffer, own)
        return CopyFirst(store.number, own.number, own.nbytes, *[x for x in left if isinstance(x, Leaving)])

    def free(self, session: str, buffer: int) -> list[Gone | Leaving]:
        """Remove a buffer, whether its session is resident or not. A store with only swapped-out holders leaves the device.

        Raises:
            BindingError: the buffer is unknown.
        """
        owner, _ = self._buffer(session, buffer)
        return self._leave(owner, buffer)

    # -- residency ---------------------------------------------------------------------------------------------------

    def swap_out(self, session: str) -> list[Leaving]:
        """Mark a session as swapped out. Returns the stores that no resident session holds; from now on they are `saved`.

        Raises:
            BindingError: the session is unknown or swapped out.
        """
        owner = self._session(session, resident=True)
        owner.resident = False
        leaving = []
        for store in owner.stores.values():
            self._split(store, -1)
            del store.paying[session]
            self._split(store, 1)
            if not store.paying:
                self.allocated -= store.nbytes
                leaving.append(self._evict(store))
        return leaving

    def swap_in(self, session: str) -> list[Coming]:
        """Mark a session as resident. Returns its stores that are not on the device. Their copies stay valid until a write.

        Raises:
            BindingError: the session is unknown or resident.
        """
        owner = self._session(session)
        if owner.resident:
            raise BindingError(f"session {session} is resident already")
        owner.resident = True
        coming = []
        for store in owner.stores.values():
            if not store.paying:
                coming.append(Coming(store.number, store.nbytes))
                self.allocated += store.nbytes
            self._split(store, -1)
            store.paying[session] = owner
            self._split(store, 1)
        return coming

    def forget_copy(self, store: int) -> None:
        """Note that the copy elsewhere of a resident store was deleted.

        Raises:
            BindingError: the store is unknown, or the copy is its only one.
        """
        known = self._stores.get(store)
        if known is None or not known.paying:
            raise BindingError(f"store {store} {'has no other copy' if known else 'does not exist'}")
        known.saved = False

    # -- figures -----------------------------------------------------------------------------------------------------

    def has(self, session: str) -> int:
        """Size of the session's buffers, in bytes, shared or not, resident or not."""
        return self._session(session).has

    def bears(self, session: str) -> int:
        """The session's charge for resident stores, in bytes. The sum over all sessions is `allocated`."""
        return self._session(session).bears

    def resident(self, session: str) -> bool:
        """Whether the session's memory is on the device."""
        return self._session(session).resident

    def store_of(self, session: str, buffer: int) -> int:
        """The number of a buffer's store."""
        return self._buffer(session, buffer)[1].number

    def sharers(self, store: int) -> int:
        """The number of buffers on a store."""
        return sum(self._stores[store].holders.values())

    def leaves_with(self, session: str, store: int) -> bool:
        """Whether a store would leave the device with this session, and has no copy elsewhere."""
        known = self._stores[store]
        return not known.saved and list(known.paying) == [session]

    def borne(self, store: int) -> bool:
        """Whether a resident session holds the store."""
        return bool(self._stores[store].paying)

    def contents(self, session: str) -> tuple[int, ...]:
        """The numbers of the stores that a session holds, for `swap.choose`."""
        return tuple(self._session(session).stores)

    def known_as(self, store: int) -> tuple[ContentId, str | None] | None:
        """The content id of a store and its circle (None: the public circle). None: no other session may share the store."""
        key = self._stores[store].key
        return None if key is None else (key[1], key[0])

    def largest(self, count: int) -> list[tuple[ContentId, str | None]]:
        """Stores on the device that others may share, as in `known_as`: at most `count`, largest first."""
        here = [(-s.nbytes, s.number, key) for key, s in self._known.items() if s.paying]
        return [(content, tenant) for _, _, (tenant, content, _) in heapq.nsmallest(count, here)]

    def stores(self) -> dict[int, tuple[int, bool]]:
        """(bytes, saved) of the stores on the device, by number."""
        return {s.number: (s.nbytes, s.saved) for s in self._stores.values() if s.paying}

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _session(self, session: str, *, resident: bool = False) -> _Session:
        known = self._sessions.get(session)
        if known is None:
            raise BindingError(f"session {session} is not open")
        if resident and not known.resident:
            raise BindingError(f"session {session} is swapped out")
        return known

    def _buffer(self, session: str, buffer: int) -> tuple[_Session, _Store]:
        owner = self._session(session)
        store = owner.buffers.get(buffer)
        if store is None:
            raise BindingError(f"buffer {buffer} does not exist")
        return owner, store

    def _resident_buffer(self, session: str, buffer: int) -> tuple[_Session, _Store]:
        self._session(session, resident=True)
        return self._buffer(session, buffer)

    def _new_buffer(self, session: str, buffer: int, nbytes: int) -> _Session:
        owner = self._session(session, resident=True)
        if buffer in owner.buffers or nbytes < 0:
            raise BindingError(
                f"cannot create buffer {buffer} of {nbytes} bytes: "
                f"{'it exists' if buffer in owner.buffers else 'the size is negative'}"
            )
        if owner.quota is not None and owner.has + nbytes > owner.quota:
            mib = 1 << 20
            raise OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {nbytes / mib:.2f} MiB. The session's quota is "
                f"{owner.quota / mib:.2f} MiB of which {(owner.quota - owner.has) / mib:.2f} MiB is free."
            )
        return owner

    def _new_store(self, nbytes: int) -> _Store:
        self._last += 1
        store = self._stores[self._last] = _Store(self._last, nbytes)
        self.allocated += nbytes
        return store

    def _find(self, owner: _Session, nbytes: int, content: ContentId) -> _Store | None:
        if owner.scope is Scope.OFF:
            return None
        if owner.scope is Scope.SHARED:
            public = self._known.get((None, content, nbytes))
            if public is not None:
                return public
        return self._known.get((owner.tenant, content, nbytes))

    def _join(self, owner: _Session, buffer: int, store: _Store) -> None:
        owner.buffers[buffer] = store
        owner.has += store.nbytes
        store.holders[owner.id] = store.holders.get(owner.id, 0) + 1
        if store.number not in owner.stores:
            owner.stores[store.number] = store
            self._split(store, -1)
            store.paying[owner.id] = owner
            self._split(store, 1)

    def _leave(self, owner: _Session, buffer: int) -> list[Gone | Leaving]:
        store = owner.buffers.pop(buffer)
        owner.has -= store.nbytes
        store.holders[owner.id] -= 1
        if store.holders[owner.id]:
            return []
        del store.holders[owner.id], owner.stores[store.number]
        was_resident = bool(store.paying)
        if owner.resident:
            self._split(store, -1)
            del store.paying[owner.id]
            self._split(store, 1)
        if store.paying:
            return []
        if was_resident:
            self.allocated -= store.nbytes
        if store.holders:
            return [self._evict(store)] if was_resident else []
        self._forget(store)
        del self._stores[store.number]
        return [Gone(store.number, was_resident, store.saved)]

    @staticmethod
    def _evict(store: _Store) -> Leaving:
        leaving = Leaving(store.number, store.nbytes, store.saved)
        store.saved = True
        return leaving

    def _forget(self, store: _Store) -> None:
        if store.key is not None:
            del self._known[store.key]
            store.key = None

    @staticmethod
    def _split(store: _Store, sign: int) -> None:
        """Add the parts of a store to its holders' charges, or subtract them. Parts are equal; the first holders get the
        remaining bytes, one each.
        """
        if not store.paying:
            return
        part, rest = divmod(store.nbytes, len(store.paying))
        for i, session in enumerate(store.paying.values()):
            session.bears += sign * (part + (i < rest))
