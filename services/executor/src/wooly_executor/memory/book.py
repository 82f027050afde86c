"""Which content each buffer of each session has: equal content once, a copy the moment somebody writes, every byte on an account.

A *store* is bytes on the device (or, while nobody who holds it is resident, elsewhere); the book numbers them and the executor
keeps where they are. A buffer is a session's name for one store. Stores with a known content id can be joined by other buffers:

- scope `off`: by none;
- scope `tenant`: it is in its tenant's circle, in which sessions of that tenant with `tenant` or `shared` find it;
- scope `shared`: it is in the public circle, in which sessions with `shared` find it, whoever they belong to.

So whether a stranger holds some content makes no difference, in answers or in time, unless both chose `shared`.

Bytes are counted twice over. What a session *has* is the sum of its buffers, as on a device of its own: quotas are of it, so that
neither a copy on write nor the end of a sharer can break one. What it *bears* is its part of the stores that are resident: split
among the sharers that are resident, to the byte, so that the sum over all sessions is what is allocated.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from enum import Enum

from wooly_executor.errors import AdmissionError, BindingError, OutOfMemoryError

ContentId = bytes
_Key = tuple[str | None, ContentId, int]  # circle (None: the public one), content, bytes


class Scope(Enum):
    """With whom a session shares equal content."""

    OFF = "off"
    TENANT = "tenant"
    SHARED = "shared"


@dataclass(frozen=True, slots=True)
class Gone:
    """A store that nobody holds any more.

    Attributes:
        resident: it is on the device, to be freed.
        saved: a copy of it is elsewhere, to be deleted.
    """

    store: int
    resident: bool
    saved: bool


@dataclass(frozen=True, slots=True)
class InPlace:
    """Write where it is.

    Attributes:
        stale: the copy elsewhere is no longer equal: delete it.
    """

    store: int
    stale: bool = False


@dataclass(frozen=True, slots=True)
class CopyFirst:
    """Others have the same content: allocate `store`, copy `source` to it (unless all of it is overwritten), then write there.

    Attributes:
        leaving: all others are swapped out, so that `source` leaves the device afterwards.
    """

    source: int
    store: int
    nbytes: int
    leaving: Leaving | None = None


@dataclass(frozen=True, slots=True)
class Leaving:
    """A store leaves the device; those who hold it are all swapped out.

    Attributes:
        saved: an equal copy is elsewhere: drop it.
    """

    store: int
    nbytes: int
    saved: bool


@dataclass(frozen=True, slots=True)
class Coming:
    """A store must be on the device, from its copy elsewhere."""

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
    """`holders`: per session, how many of its buffers have this content. `paying`: those that are resident, as they came."""

    __slots__ = ("holders", "key", "nbytes", "number", "paying", "saved")

    def __init__(self, number: int, nbytes: int) -> None:
        self.number, self.nbytes = number, nbytes
        self.holders: dict[str, int] = {}
        self.paying: dict[str, _Session] = {}
        self.key: _Key | None = None
        self.saved = False


class Book:
    """Owned by one thread. Nothing is changed by a call that raises."""

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}
        self._stores: dict[int, _Store] = {}
        self._known: dict[_Key, _Store] = {}
        self._last = 0
        self.allocated = 0  # bytes of the stores that are resident

    # -- sessions ----------------------------------------------------------------------------------------------------

    def open(self, session: str, *, tenant: str = "", scope: Scope = Scope.OFF, quota: int | None = None) -> None:
        """Begin a session that may have `quota` bytes of buffers.

        Raises:
            AdmissionError: there is one of that name.
        """
        if session in self._sessions:
            raise AdmissionError(f"session {session} is open already")
        self._sessions[session] = _Session(session, tenant, scope, quota)

    def close(self, session: str) -> list[Gone | Leaving]:
        """End a session, however it ended, resident or not. What it shared stays with the others."""
        known = self._sessions.get(session)
        if known is None:
            return []
        gone = [found for buffer in list(known.buffers) for found in self.free(session, buffer)]
        del self._sessions[session]
        return gone

    # -- buffers -----------------------------------------------------------------------------------------------------

    def allocate(self, session: str, buffer: int, nbytes: int) -> int:
        """A new buffer with a store of its own, whose number it returns.

        Raises:
            OutOfMemoryError: over the session's quota.
            BindingError: no such session, it is not resident, or the buffer exists.
        """
        owner = self._new_buffer(session, buffer, nbytes)
        store = self._new_store(nbytes)
        self._join(owner, buffer, store)
        return store.number

    def share(self, session: str, buffer: int, nbytes: int, content: ContentId) -> int | None:
        """A new buffer on content that is on the device already; None if there is none that this session may share.

        Raises:
            OutOfMemoryError: over the session's quota.
            BindingError: no such session, it is not resident, or the buffer exists.
        """
        owner = self._new_buffer(session, buffer, nbytes)
        store = self._find(owner, nbytes, content)
        if store is None or not store.paying:
            return None
        self._join(owner, buffer, store)
        return store.number

    def join(self, session: str, buffer: int, store: int) -> None:
        """A new buffer on a store that is on the device, whatever its circle: who holds it lets this session hold it, too.

        Raises:
            OutOfMemoryError: over the session's quota.
            BindingError: no such session or store, it is not resident, or the buffer exists.
        """
        known = self._stores.get(store)
        if known is None or not known.paying:
            raise BindingError(f"store {store} is not on the device")
        self._join(self._new_buffer(session, buffer, known.nbytes), buffer, known)

    def seal(self, session: str, buffer: int, content: ContentId) -> list[Gone | Leaving]:
        """All of the buffer is written, and its content is this, as the executor itself found: others may share it from now on.

        Where an equal store is on the device, the buffer moves there, and the one that it had is gone.

        Raises:
            BindingError: no such buffer, or the session is not resident.
        """
        owner, store = self._resident_buffer(session, buffer)
        if owner.scope is Scope.OFF or store.key is not None:  # content that is not known has one buffer
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
        """The buffer is about to be written, wholly or in part: to where?

        Raises:
            BindingError: no such buffer, or the session is not resident.
        """
        owner, store = self._resident_buffer(session, buffer)
        if sum(store.holders.values()) == 1:
            stale, store.saved = store.saved, False
            self._forget(store)
            return InPlace(store.number, stale)
        own = self._new_store(store.nbytes)
        left = self._leave(owner, buffer)  # nothing is gone: another buffer is on it
        self._join(owner, buffer, own)
        return CopyFirst(store.number, own.number, own.nbytes, *[x for x in left if isinstance(x, Leaving)])

    def free(self, session: str, buffer: int) -> list[Gone | Leaving]:
        """Forget a buffer, of a session that is resident or not. What only sessions hold that are swapped out leaves the device.

        Raises:
            BindingError: no such buffer.
        """
        owner, _ = self._buffer(session, buffer)
        return self._leave(owner, buffer)

    # -- residency ---------------------------------------------------------------------------------------------------

    def swap_out(self, session: str) -> list[Leaving]:
        """The session's memory leaves the device: the stores that no resident session holds. They are `saved` from now on.

        Raises:
            BindingError: no such session, or it is not resident.
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
        """The session's memory comes back: the stores that are not there. Their copies stay good until they are written.

        Raises:
            BindingError: no such session, or it is resident.
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
        """The copy elsewhere of a resident store was deleted to make room.

        Raises:
            BindingError: no such store, or its copy is all there is of it.
        """
        known = self._stores.get(store)
        if known is None or not known.paying:
            raise BindingError(f"store {store} {'is nowhere else' if known else 'does not exist'}")
        known.saved = False

    # -- figures -----------------------------------------------------------------------------------------------------

    def has(self, session: str) -> int:
        """Bytes of the session's buffers, shared or not, resident or not."""
        return self._session(session).has

    def bears(self, session: str) -> int:
        """The session's part of the bytes on the device, to the byte: the sum over all sessions is `allocated`."""
        return self._session(session).bears

    def resident(self, session: str) -> bool:
        """Whether its memory is on the device."""
        return self._session(session).resident

    def store_of(self, session: str, buffer: int) -> int:
        """The number of the store that a buffer is on."""
        return self._buffer(session, buffer)[1].number

    def sharers(self, store: int) -> int:
        """Buffers that are on a store."""
        return sum(self._stores[store].holders.values())

    def leaves_with(self, session: str, store: int) -> bool:
        """Whether the store leaves the device with this session and has no copy elsewhere."""
        known = self._stores[store]
        return not known.saved and list(known.paying) == [session]

    def borne(self, store: int) -> bool:
        """Whether a resident session holds the store."""
        return bool(self._stores[store].paying)

    def contents(self, session: str) -> tuple[int, ...]:
        """The numbers of the stores that a session holds, as `swap.choose` wants them."""
        return tuple(self._session(session).stores)

    def known_as(self, store: int) -> tuple[ContentId, str | None] | None:
        """The content of a store and in whose circle it is (None: the public one); None if nobody may share it."""
        key = self._stores[store].key
        return None if key is None else (key[1], key[0])

    def largest(self, count: int) -> list[tuple[ContentId, str | None]]:
        """What others may share on the device, as `known_as`: at most `count`, largest first."""
        here = [(-s.nbytes, s.number, key) for key, s in self._known.items() if s.paying]
        return [(content, tenant) for _, _, (tenant, content, _) in heapq.nsmallest(count, here)]

    def stores(self) -> dict[int, tuple[int, bool]]:
        """(bytes, saved) of the stores that are on the device, by number."""
        return {s.number: (s.nbytes, s.saved) for s in self._stores.values() if s.paying}

    # -- inside ------------------------------------------------------------------------------------------------------

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
                f"buffer {buffer} of {nbytes} bytes {'exists' if buffer in owner.buffers else 'cannot be'}"
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
        """Add (or take back) the parts of a store: equal ones, and a byte more for as many who came first as are left over."""
        if not store.paying:
            return
        part, rest = divmod(store.nbytes, len(store.paying))
        for i, session in enumerate(store.paying.values()):
            session.bears += sign * (part + (i < rest))
