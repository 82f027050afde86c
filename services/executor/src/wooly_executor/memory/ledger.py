"""The accounts of one device: where every byte is, and which session is charged for it, at any time.

`pool` knows where blocks are, and `book` knows which sessions share which content; the ledger combines both. A session's buffer
is *own* (a block on its account), *shared* (a store of the book; its block is on the account of all contents) or *away* (no
block, because the session is swapped out). A session also has a *workspace* for the memory that its programs allocate and free
themselves; a small workspace is kept from one program to the next. *Reserved* bytes are promised to programs that wait for their
turn; they stay free until these programs begin.

    capacity = own bytes and workspaces of all sessions + their parts of contents + slots of slabs that are in no block + free

`check` verifies this equation. Charges are integrated over time, in bytes times nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from wooly_executor.errors import AdmissionError, OutOfMemoryError
from wooly_executor.memory.accounts import Account, Bearing, LedgerFacts, Written
from wooly_executor.memory.book import Book, ContentId, Gone, Leaving, Scope
from wooly_executor.memory.heads import Heads
from wooly_executor.memory.pool import Pool, room_of
from wooly_executor.memory.shortage import shortage

#: Maximum workspace, in bytes, that a session keeps between two programs.
WORKSPACE_KEPT = 256 << 10
#: The pool's account of all contents.
_CONTENTS = "\0contents"


class Ledger:
    """The accounts of one device. One thread owns it. Times are monotonic ns from the caller.

    Args:
        capacity: bytes of the device.
        reserve: bytes that large allocations leave free.
        name: name of the device in messages.
    """

    def __init__(self, capacity: int, *, reserve: int = 0, name: str = "GPU 0") -> None:
        self.pool = Pool(capacity, name=name)
        self.book = Book()
        self.reserve = min(reserve, self.pool.capacity)
        self.reserved = 0
        self.accounts: dict[str, Account] = {}
        self._where: dict[int, int] = {}  # store -> offset
        #: Stores that have a block, but whose bytes are still being copied to the device, or are lost.
        self.coming: set[int] = set()
        self._nominal: dict[int, int] = {}  # store -> requested bytes
        self._heads = Heads()
        self.pool.open(_CONTENTS)

    # -- sessions ----------------------------------------------------------------------------------------------------

    def open(self, session: str, *, tenant: str = "", scope: Scope = Scope.OFF, now: int = 0) -> Account:
        """Open an account.

        Raises:
            AdmissionError: the name is in use.
        """
        if session in self.accounts:
            raise AdmissionError(f"session {session} is open already")
        self.pool.open(session, tenant=tenant)
        self.book.open(session, tenant=tenant, scope=scope)
        account = self.accounts[session] = Account(session, tenant, scope, now)
        return account

    def close(self, account: Account, now: int = 0) -> list[Gone | Leaving]:
        """Close an account and free its memory. Returns what happened to its shared contents."""
        if self.accounts.pop(account.name, None) is None:
            return []
        self._settle_all(now)
        self.settle(account, now)
        self.reserved -= account.reserved
        account.reserved = 0
        self.pool.close(account.name)
        found = self._release_stores(self.book.close(account.name))
        account.own.clear()
        account.shared.clear()
        account.away.clear()
        return found

    # -- programs ----------------------------------------------------------------------------------------------------

    @property
    def spare(self) -> int:
        """Free bytes that are not reserved."""
        return self.pool.free_bytes - self.reserved

    def reserve_for(self, account: Account, nbytes: int) -> None:
        """Reserve bytes for a waiting program. The caller has checked that they are free."""
        account.reserved += nbytes
        self.reserved += nbytes

    def unreserve(self, account: Account, nbytes: int) -> None:
        """Release a reservation, because the program begins or was dropped."""
        account.reserved -= nbytes
        self.reserved -= nbytes

    def begin(self, account: Account, kept: Sequence[tuple[int, int]], workspace: int, now: int) -> None:
        """Allocate the memory of a program that begins.

        Args:
            account: the session's account.
            kept: (buffer, bytes) of the buffers that remain after the program.
            workspace: bytes for the program's other buffers.
            now: time in ns.

        Raises:
            OutOfMemoryError: there is no room; nothing was allocated.
        """
        pool, own, name = self.pool, account.own, account.name
        self.settle(account, now)
        done: list[int] = []
        try:
            if self.reserved > account.reserved:
                self._check_reservations(account, [*[n for _, n in kept], max(0, workspace - account.workspace)])
            for buffer, nbytes in kept:
                own[buffer] = pool.allocate(name, nbytes)
                done.append(buffer)
            if workspace > account.workspace:
                self._grow(account, workspace)
        except OutOfMemoryError as e:
            for buffer in done:
                pool.free(own.pop(buffer))
            if self._compact(room_of([*[n for _, n in kept], max(0, workspace - account.workspace)])):
                self.begin(account, kept, workspace, now)
                return
            account.ooms += 1
            wanted = sum(n for _, n in kept) + workspace
            raise OutOfMemoryError(self.out_of_memory(account, wanted)) from e
        held = pool.held(name)
        if held > account.peak:
            account.peak = held

    def _check_reservations(self, account: Account, wanted: Sequence[int]) -> None:
        """Check that allocations of these sizes leave the reservations of other accounts free.

        Raises:
            OutOfMemoryError: they do not.
        """
        promised = self.reserved - account.reserved
        if room_of(wanted) > self.pool.free_bytes - promised:
            raise OutOfMemoryError(f"the free memory has {promised} bytes that are reserved for other sessions")

    def _compact(self, wanted: int) -> bool:
        """Compact the pool if the free bytes suffice, but no free extent does. Returns whether it did."""
        free = self.pool.free_bytes
        if free < wanted or self.pool.facts().largest == free:
            return False
        moved = self.pool.compact()
        for account in self.accounts.values():
            for buffer, offset in account.own.items():
                account.own[buffer] = moved.get(offset, offset)
            account.blocks = [moved.get(offset, offset) for offset in account.blocks]
        for store, offset in self._where.items():
            self._where[store] = moved.get(offset, offset)
        return True

    def end(self, account: Account, now: int) -> None:
        """Free the large workspace of a program that has ended."""
        self.settle(account, now)
        self.drop_workspace(account)

    def _grow(self, account: Account, nbytes: int) -> None:
        self.drop_workspace(account)
        pieces, piece = 0, nbytes
        try:
            while pieces < nbytes:  # a workspace holds many blocks, so it need not be one extent
                piece = min(piece, nbytes - pieces)
                try:
                    account.blocks.append(self.pool.allocate(account.name, piece))
                except OutOfMemoryError:
                    if piece <= self.pool.alignment:
                        raise
                    piece //= 2
                else:
                    pieces += piece
        except OutOfMemoryError:
            account.workspace = nbytes
            self.drop_workspace(account)
            raise
        account.workspace = nbytes

    def drop_workspace(self, account: Account) -> None:
        """Free the workspace. No program of the session may be running."""
        for offset in account.blocks:
            self.pool.free(offset)
        account.blocks.clear()
        account.workspace = 0

    # -- buffers -----------------------------------------------------------------------------------------------------

    def allocate(self, account: Account, buffer: int, nbytes: int, now: int) -> None:
        """Allocate a buffer whose size was unknown before its program ran.

        Raises:
            OutOfMemoryError: there is no room.
        """
        self.settle(account, now)
        try:
            if self.reserved > account.reserved:
                self._check_reservations(account, [nbytes])
            account.own[buffer] = self.pool.allocate(account.name, nbytes)
        except OutOfMemoryError as e:
            if self._compact(room_of([nbytes])):
                self.allocate(account, buffer, nbytes, now)
                return
            account.ooms += 1
            raise OutOfMemoryError(self.out_of_memory(account, nbytes)) from e
        account.peak = max(account.peak, self.pool.held(account.name))

    def free(self, account: Account, buffer: int, now: int) -> list[Gone | Leaving]:
        """Free a buffer, own, shared or away. An unknown buffer is ignored."""
        offset = account.own.pop(buffer, None)
        if offset is not None:
            self.settle(account, now)
            self.pool.free(offset)
            return []
        if account.shared.pop(buffer, None) is not None:
            self._settle_all(now)
            return self._release_stores(self.book.free(account.name, buffer))
        account.away.pop(buffer, None)
        return []

    # -- contents ----------------------------------------------------------------------------------------------------

    def knows_head(self, account: Account, nbytes: int, head: ContentId) -> bool:
        """Whether the session may share a content of this size with this first chunk."""
        if account.scope is Scope.OFF:
            return False
        circles = [account.tenant] if account.scope is Scope.TENANT else [None, account.tenant]
        return any((circle, head, nbytes) in self._heads for circle in circles)

    def share(self, account: Account, buffer: int, nbytes: int, content: ContentId, now: int) -> int | None:
        """Move a session's own buffer to an equal store on the device. Returns the store, or None if there is no store that the
        session may share.
        """
        if account.scope is Scope.OFF or buffer not in account.own:
            return None
        size = self.pool.size(account.own[buffer])
        if self.book.find(account.name, size, content) in self.coming:
            return None
        self._settle_all(now)
        store = self.book.share(account.name, buffer, size, content)
        if store is not None:
            self.pool.free(account.own.pop(buffer))
            account.shared[buffer] = store
        return store

    def seal(
        self, account: Account, buffer: int, nbytes: int, content: ContentId, head: ContentId, now: int
    ) -> tuple[int, bool] | None:
        """Set the content of a session's own buffer, as the executor has computed it. Other sessions may share it from now on.

        Returns:
            The store, and whether the store existed before (then the buffer's own block was freed). None: the session shares
            nothing.
        """
        if account.scope is Scope.OFF or buffer not in account.own or not account.resident:
            return None
        found = self.share(account, buffer, nbytes, content, now)
        if found is not None:
            return found, True
        offset = account.own.pop(buffer)
        size = self.pool.size(offset)
        store = self.book.allocate(account.name, buffer, size)
        if self.book.find(account.name, size, content) not in self.coming:
            self.book.seal(account.name, buffer, content)
        self.pool.move(offset, _CONTENTS)
        self._where[store], self._nominal[store] = offset, nbytes
        account.shared[buffer] = store
        self._heads.add(store, (None if account.scope is Scope.SHARED else account.tenant, head, nbytes))
        return store, False

    def expose(self, account: Account, buffer: int, nbytes: int, now: int) -> int:
        """Move a session's own buffer to a store without a content id, which other accounts can `adopt`. Returns the store."""
        self._settle_all(now)
        offset = account.own.pop(buffer)
        store = self.book.allocate(account.name, buffer, self.pool.size(offset))
        self.pool.move(offset, _CONTENTS)
        self._where[store], self._nominal[store] = offset, nbytes
        account.shared[buffer] = store
        return store

    def adopt(self, account: Account, buffer: int, store: int, now: int) -> None:
        """Add a buffer on an existing store to another account."""
        self._settle_all(now)
        self.book.join(account.name, buffer, store)
        account.shared[buffer] = store

    def write(self, account: Account, buffer: int, now: int) -> Written:
        """Make a shared buffer its session's own, before a write.

        Raises:
            OutOfMemoryError: there is no room for the copy; nothing changes.
        """
        store = account.shared[buffer]
        if self.book.sharers(store) == 1:
            self._settle_all(now)
            del account.shared[buffer]
            self.book.free(account.name, buffer)
            offset = self._where.pop(store)
            self._forget(store)
            self.pool.move(offset, account.name)
            account.own[buffer] = offset
            return Written(store, False, [Gone(store, False, True)])  # a copy elsewhere is outdated
        self.allocate(account, buffer, self._nominal[store], now)
        self._settle_all(now)
        del account.shared[buffer]
        return Written(store, True, self._release_stores(self.book.free(account.name, buffer)))

    def cost_of_writing(self, account: Account, buffers: Iterable[int]) -> int:
        """Bytes that copies would need if these buffers were written."""
        shared = account.shared
        stores = [shared[b] for b in buffers if b in shared]
        return sum([self.pool.rounded(self._nominal[s]) for s in stores if self.book.sharers(s) > 1])

    def stores(self) -> Iterable[int]:
        """The stores that have blocks."""
        return self._where.keys()

    def store_bytes(self, store: int) -> int:
        """Requested bytes of a store."""
        return self._nominal[store]

    def _release_stores(self, found: list[Gone | Leaving]) -> list[Gone | Leaving]:
        """Free the blocks of stores that no buffer uses. A store that only swapped-out sessions hold keeps its block: see
        `evict`.
        """
        for each in found:
            if isinstance(each, Gone):
                offset = self._where.pop(each.store, None)
                if offset is not None:
                    self.pool.free(offset)
                self._forget(each.store)
        return found

    def _forget(self, store: int) -> None:
        self.coming.discard(store)
        self._nominal.pop(store, None)
        self._heads.remove(store)

    # -- residency ---------------------------------------------------------------------------------------------------

    def sole_stores(self, account: Account) -> list[int]:
        """Stores that would leave the device with this session, and that have no copy elsewhere."""
        return [s for s in dict.fromkeys(account.shared.values()) if self.book.leaves_with(account.name, s)]

    def swap_out(self, account: Account, now: int) -> list[Leaving]:
        """Free the blocks of a session whose memory was copied off the device. Returns the stores that left with the session."""
        self._settle_all(now)
        self.drop_workspace(account)
        pool = self.pool
        for buffer, offset in account.own.items():
            account.away[buffer] = pool.requested(offset)
            pool.free(offset)
        account.own.clear()
        account.resident = False
        leaving = self.book.swap_out(account.name)
        for each in leaving:
            self.evict(each.store)
        return leaving

    def evict(self, store: int) -> None:
        """Free the block of a store that has left the device."""
        self.coming.discard(store)
        offset = self._where.pop(store, None)
        if offset is not None:
            self.pool.free(offset)

    def needed(self, account: Account) -> int:
        """Bytes that the session needs to return to the device."""
        pool = self.pool
        own = sum([pool.rounded(n) for n in account.away.values()])
        stores = {s for s in account.shared.values() if s not in self._where}
        return own + sum([pool.rounded(self._nominal[s]) for s in stores])

    def swap_in(self, account: Account, now: int) -> list[int]:
        """Allocate the blocks of a session that returns to the device. Returns the stores whose bytes must be copied back.

        Raises:
            OutOfMemoryError: there is no room; nothing changes.
        """
        pool, name = self.pool, account.name
        taken: list[int] = []
        try:
            own = {}
            for buffer, nbytes in account.away.items():
                own[buffer] = pool.allocate(name, nbytes)
                taken.append(own[buffer])
            where = {}
            for store in dict.fromkeys(account.shared.values()):
                if store not in self._where:
                    where[store] = pool.allocate(_CONTENTS, self._nominal[store])
                    taken.append(where[store])
        except OutOfMemoryError:
            for offset in taken:
                pool.free(offset)
            if self._compact(self.needed(account)):
                return self.swap_in(account, now)
            raise
        self._settle_all(now)
        account.own.update(own)
        account.away.clear()
        self._where.update(where)
        self.coming.update(where)
        account.resident = True
        self.book.swap_in(name)
        account.peak = max(account.peak, pool.held(name))
        return list(where)

    def arrived(self, store: int) -> None:
        """Note that the bytes of a store are on the device again, so that other sessions may share it."""
        self.coming.discard(store)

    # -- figures -----------------------------------------------------------------------------------------------------

    def settle(self, account: Account, now: int) -> None:
        """Integrate the session's charges up to now. Call it before they change."""
        elapsed = now - account.settled_at
        if elapsed <= 0:
            return
        account.settled_at = now
        account.own_byte_ns += self.pool.held(account.name) * elapsed
        if account.shared and account.name in self.accounts:
            account.shared_byte_ns += self.book.bears(account.name) * elapsed

    def _settle_all(self, now: int) -> None:
        for account in self.accounts.values():
            self.settle(account, now)

    def bearing(self, account: Account, now: int) -> Bearing:
        """The session's charges: now, and integrated up to now."""
        self.settle(account, now)
        return Bearing(
            self.pool.held(account.name), self.book.bears(account.name), account.own_byte_ns, account.shared_byte_ns
        )

    def borne(self, account: Account, now: int) -> tuple[int, int]:
        """The sum of the session's charges: bytes now, and their integral up to now."""
        held = self.pool.held(account.name)
        elapsed = now - account.settled_at
        if account.shared:
            self.settle(account, now)
            held += self.book.bears(account.name)
        elif elapsed > 0:
            account.settled_at = now
            account.own_byte_ns += held * elapsed
        return held, account.own_byte_ns + account.shared_byte_ns

    def facts(self) -> LedgerFacts:
        """Where every byte is now."""
        facts = self.pool.facts()
        contents = self.pool.held(_CONTENTS)
        reserve = min(self.reserve, facts.free)
        return LedgerFacts(
            facts.capacity,
            facts.held - contents,
            contents,
            facts.slots,
            reserve,
            facts.free - reserve,
            facts.largest,
            self.reserved,
        )

    def check(self) -> None:
        """Check that every byte is on exactly one account, by counting from the blocks.

        Raises:
            AssertionError: the counts disagree.
        """
        pool, facts = self.pool, self.facts()
        own = 0
        for account in self.accounts.values():
            blocks = [*account.own.values(), *account.blocks]
            held = sum(pool.size(offset) for offset in blocks)
            assert held == pool.held(account.name), (
                f"{account.name} has {held} bytes of blocks, its account says {pool.held(account.name)}"
            )
            assert account.resident or not blocks, f"{account.name} is swapped out but has blocks"
            assert not (account.resident and account.away), f"{account.name} is resident but has buffers elsewhere"
            own += held
        parts = sum(self.book.bears(name) for name in self.accounts)
        unborne = sum(pool.size(o) for s, o in self._where.items() if not self.book.borne(s))
        assert facts.contents == sum(pool.size(o) for o in self._where.values()), "the bytes of contents differ"
        assert parts + unborne == facts.contents, (
            f"{parts} bytes charged, {unborne} charged to no session, {facts.contents} allocated"
        )
        assert own == facts.own, f"blocks have {own} bytes, accounts say {facts.own}"
        assert own + parts + unborne + facts.slots + facts.reserve + facts.free == facts.capacity, str(facts)
        assert self.coming <= self._where.keys(), "a store that is coming has no block"
        assert self.reserved == sum(a.reserved for a in self.accounts.values()) >= 0, "the reservations differ"
        extents = sum(size for _, size in pool.extents())
        assert extents == pool.free_bytes, f"free extents have {extents} bytes, the pool says {pool.free_bytes}"

    def out_of_memory(self, account: Account, nbytes: int, quota: int | None = None, held: int = 0) -> str:
        """The message of a failed allocation; see `shortage`."""
        return shortage(self.pool, self.book, self.accounts.values(), account, nbytes, quota, held)
