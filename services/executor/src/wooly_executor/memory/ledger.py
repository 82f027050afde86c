"""The accounts of one device: where every byte of it is, and which session bears it, at any moment.

`pool` says where blocks are, `book` who shares which content; here the two are one. A buffer of a session is *its own* (a block
on its account), *shared* (a store of the book, whose block is on the account of all contents) or *away* (no block: the session is
swapped out). A session also has a *workspace*, which holds what its programs allocate and free themselves; small ones are kept
from one program to the next. *Reserved* bytes are promised to programs that wait for their turn, and free until these begin.

    capacity = own bytes and workspaces of all sessions + their parts of contents + slots of slabs that are in no block + free

`check` proves it. Residency is integrated: what each session has borne until a time, in bytes times nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from wooly_executor.errors import AdmissionError, OutOfMemoryError
from wooly_executor.memory.accounts import Account, Bearing, LedgerFacts, Written
from wooly_executor.memory.book import Book, ContentId, Gone, Leaving, Scope
from wooly_executor.memory.heads import Heads
from wooly_executor.memory.pool import Pool, room_of
from wooly_executor.memory.shortage import shortage

#: Bytes of a workspace that a session keeps between two programs.
WORKSPACE_KEPT = 256 << 10
#: The pool's account of all contents.
_CONTENTS = "\0contents"


class Ledger:
    """Owned by one thread. Times are monotonic ns and come from the caller.

    Args:
        capacity: bytes of the device.
        reserve: bytes that large allocations leave free.
        name: the device, in messages.
    """

    def __init__(self, capacity: int, *, reserve: int = 0, name: str = "GPU 0") -> None:
        self.pool = Pool(capacity, name=name)
        self.book = Book()
        self.reserve = min(reserve, self.pool.capacity)
        self.reserved = 0
        self.accounts: dict[str, Account] = {}
        self._where: dict[int, int] = {}  # store -> offset
        self._nominal: dict[int, int] = {}  # store -> bytes asked for
        self._heads = Heads()
        self.pool.open(_CONTENTS)

    # -- sessions ----------------------------------------------------------------------------------------------------

    def open(self, session: str, *, tenant: str = "", scope: Scope = Scope.OFF, now: int = 0) -> Account:
        """Begin an account.

        Raises:
            AdmissionError: there is one of that name.
        """
        if session in self.accounts:
            raise AdmissionError(f"session {session} is open already")
        self.pool.open(session, tenant=tenant)
        self.book.open(session, tenant=tenant, scope=scope)
        account = self.accounts[session] = Account(session, tenant, scope, now)
        return account

    def close(self, account: Account, now: int = 0) -> list[Gone | Leaving]:
        """End an account and free all it has. Returns what became of the contents that it shared."""
        if self.accounts.pop(account.name, None) is None:
            return []
        self._settle_all(now)
        self.settle(account, now)
        self.reserved -= account.reserved
        account.reserved = 0
        self.pool.close(account.name)
        found = self._depart(self.book.close(account.name))
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
        """Promise bytes to a program of the session's that waits; the caller has seen that they are there."""
        account.reserved += nbytes
        self.reserved += nbytes

    def unreserve(self, account: Account, nbytes: int) -> None:
        """Take a promise back: the program begins, or will not."""
        account.reserved -= nbytes
        self.reserved -= nbytes

    def begin(self, account: Account, kept: Sequence[tuple[int, int]], workspace: int, now: int) -> None:
        """A program begins that leaves the buffers `kept` (buffer, bytes) behind and needs so much for the others.

        Raises:
            OutOfMemoryError: there is no room; nothing was allocated.
        """
        pool, own, name = self.pool, account.own, account.name
        self.settle(account, now)
        done: list[int] = []
        try:
            if self.reserved > account.reserved:
                self._leave_promises(account, [*[n for _, n in kept], max(0, workspace - account.workspace)])
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

    def _leave_promises(self, account: Account, wanted: Sequence[int]) -> None:
        """See that these allocations take nothing that is promised to other accounts.

        Raises:
            OutOfMemoryError: they would.
        """
        promised = self.reserved - account.reserved
        if room_of(wanted) > self.pool.free_bytes - promised:
            raise OutOfMemoryError(f"{promised} bytes are promised to others")

    def _compact(self, wanted: int) -> bool:
        """Put the free bytes together, where they suffice but no piece does."""
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
        """A program ended that had a large workspace: it is given back."""
        self.settle(account, now)
        self.drop_workspace(account)

    def _grow(self, account: Account, nbytes: int) -> None:
        self.drop_workspace(account)
        pieces, piece = 0, nbytes
        try:
            while pieces < nbytes:  # what programs allocate are many blocks: it need not be one extent
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
        """Give the workspace back: none of the session's programs runs."""
        for offset in account.blocks:
            self.pool.free(offset)
        account.blocks.clear()
        account.workspace = 0

    # -- buffers -----------------------------------------------------------------------------------------------------

    def allocate(self, account: Account, buffer: int, nbytes: int, now: int) -> None:
        """A buffer whose size nobody knew before.

        Raises:
            OutOfMemoryError: there is no room.
        """
        self.settle(account, now)
        try:
            if self.reserved > account.reserved:
                self._leave_promises(account, [nbytes])
            account.own[buffer] = self.pool.allocate(account.name, nbytes)
        except OutOfMemoryError as e:
            if self._compact(room_of([nbytes])):
                self.allocate(account, buffer, nbytes, now)
                return
            account.ooms += 1
            raise OutOfMemoryError(self.out_of_memory(account, nbytes)) from e
        account.peak = max(account.peak, self.pool.held(account.name))

    def free(self, account: Account, buffer: int, now: int) -> list[Gone | Leaving]:
        """A buffer is no more, wherever it was; one that is not known is ignored."""
        offset = account.own.pop(buffer, None)
        if offset is not None:
            self.settle(account, now)
            self.pool.free(offset)
            return []
        if account.shared.pop(buffer, None) is not None:
            self._settle_all(now)
            return self._depart(self.book.free(account.name, buffer))
        account.away.pop(buffer, None)
        return []

    # -- contents ----------------------------------------------------------------------------------------------------

    def knows_head(self, account: Account, nbytes: int, head: ContentId) -> bool:
        """Whether there is a content of so many bytes with this first chunk that the session may share."""
        if account.scope is Scope.OFF:
            return False
        circles = [account.tenant] if account.scope is Scope.TENANT else [None, account.tenant]
        return any((circle, head, nbytes) in self._heads for circle in circles)

    def share(self, account: Account, buffer: int, nbytes: int, content: ContentId, now: int) -> int | None:
        """A buffer of its own has this content: the store on the device that it may share instead, which it then does."""
        if account.scope is Scope.OFF or buffer not in account.own:
            return None
        size = self.pool.size(account.own[buffer])
        self._settle_all(now)
        store = self.book.share(account.name, buffer, size, content)
        if store is not None:
            self.pool.free(account.own.pop(buffer))
            account.shared[buffer] = store
        return store

    def seal(
        self, account: Account, buffer: int, nbytes: int, content: ContentId, head: ContentId, now: int
    ) -> tuple[int, bool] | None:
        """A buffer of its own has this content, as the executor found: others may share it from now on.

        Returns:
            Its store, and whether that was there before (the buffer's own block is gone then). None: it shares nothing.
        """
        if account.scope is Scope.OFF or buffer not in account.own or not account.resident:
            return None
        found = self.share(account, buffer, nbytes, content, now)
        if found is not None:
            return found, True
        offset = account.own.pop(buffer)
        store = self.book.allocate(account.name, buffer, self.pool.size(offset))
        self.book.seal(account.name, buffer, content)
        self.pool.move(offset, _CONTENTS)
        self._where[store], self._nominal[store] = offset, nbytes
        account.shared[buffer] = store
        self._heads.add(store, (None if account.scope is Scope.SHARED else account.tenant, head, nbytes))
        return store, False

    def adopt(self, account: Account, buffer: int, store: int, now: int) -> None:
        """Another account holds a store, too, under this name."""
        self._settle_all(now)
        self.book.join(account.name, buffer, store)
        account.shared[buffer] = store

    def write(self, account: Account, buffer: int, now: int) -> Written:
        """A shared buffer is about to be written: it is its session's own from now on.

        Raises:
            OutOfMemoryError: there is no room for the copy; nothing changed.
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
            return Written(store, False, [Gone(store, False, True)])  # a copy elsewhere is stale
        self.allocate(account, buffer, self._nominal[store], now)
        self._settle_all(now)
        del account.shared[buffer]
        return Written(store, True, self._depart(self.book.free(account.name, buffer)))

    def cost_of_writing(self, account: Account, buffers: Iterable[int]) -> int:
        """Bytes that copies would take if these buffers were written."""
        shared = account.shared
        stores = [shared[b] for b in buffers if b in shared]
        return sum([self.pool.rounded(self._nominal[s]) for s in stores if self.book.sharers(s) > 1])

    def stores(self) -> Iterable[int]:
        """The stores that have blocks."""
        return self._where.keys()

    def store_bytes(self, store: int) -> int:
        """Bytes of a content, as asked for."""
        return self._nominal[store]

    def _depart(self, found: list[Gone | Leaving]) -> list[Gone | Leaving]:
        """Free the blocks of stores that nobody holds. One that is only left by the resident keeps its block: see `evict`."""
        for each in found:
            if isinstance(each, Gone):
                offset = self._where.pop(each.store, None)
                if offset is not None:
                    self.pool.free(offset)
                self._forget(each.store)
        return found

    def _forget(self, store: int) -> None:
        self._nominal.pop(store, None)
        self._heads.remove(store)

    # -- residency ---------------------------------------------------------------------------------------------------

    def sole_stores(self, account: Account) -> list[int]:
        """Stores that leave the device if this session does, and have no copy elsewhere."""
        return [s for s in dict.fromkeys(account.shared.values()) if self.book.leaves_with(account.name, s)]

    def swap_out(self, account: Account, now: int) -> list[Leaving]:
        """The session's memory has left the device. Returns the stores that left with it, whose blocks are free."""
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
        """A store is on the device no more."""
        offset = self._where.pop(store, None)
        if offset is not None:
            self.pool.free(offset)

    def needed(self, account: Account) -> int:
        """Bytes that the session's return takes."""
        pool = self.pool
        own = sum([pool.rounded(n) for n in account.away.values()])
        stores = {s for s in account.shared.values() if s not in self._where}
        return own + sum([pool.rounded(self._nominal[s]) for s in stores])

    def swap_in(self, account: Account, now: int) -> list[int]:
        """The session's memory is coming back: it has blocks. Returns the stores that must be brought.

        Raises:
            OutOfMemoryError: there is no room; nothing changed.
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
        account.resident = True
        self.book.swap_in(name)
        account.peak = max(account.peak, pool.held(name))
        return list(where)

    # -- figures -----------------------------------------------------------------------------------------------------

    def settle(self, account: Account, now: int) -> None:
        """Integrate what the session bore until now; before anything of it changes."""
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
        """What a session bears now, and has borne."""
        self.settle(account, now)
        return Bearing(
            self.pool.held(account.name), self.book.bears(account.name), account.own_byte_ns, account.shared_byte_ns
        )

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
        """Prove that every byte is on an account, from scratch.

        Raises:
            AssertionError: it is not.
        """
        pool, facts = self.pool, self.facts()
        own = 0
        for account in self.accounts.values():
            blocks = [*account.own.values(), *account.blocks]
            held = sum(pool.size(offset) for offset in blocks)
            assert held == pool.held(account.name), f"{account.name}: {held} bytes of blocks, {pool.held(account.name)}"
            assert account.resident or not blocks, f"{account.name} is away and has blocks"
            assert not (account.resident and account.away), f"{account.name} is here and has buffers elsewhere"
            own += held
        parts = sum(self.book.bears(name) for name in self.accounts)
        unborne = sum(pool.size(o) for s, o in self._where.items() if not self.book.borne(s))
        assert facts.contents == sum(pool.size(o) for o in self._where.values()), "contents"
        assert parts + unborne == facts.contents, f"{parts} bytes borne, {unborne} by nobody, {facts.contents} there"
        assert own == facts.own, f"{own} bytes of blocks, {facts.own} on accounts"
        assert own + parts + unborne + facts.slots + facts.reserve + facts.free == facts.capacity, str(facts)
        assert self.reserved == sum(a.reserved for a in self.accounts.values()) >= 0, "promises"
        extents = sum(size for _, size in pool.extents())
        assert extents == pool.free_bytes, f"{extents} bytes of free extents, {pool.free_bytes} free"

    def out_of_memory(self, account: Account, nbytes: int, quota: int | None = None, held: int = 0) -> str:
        """Why so many bytes cannot be had, and who holds what; see `shortage`."""
        return shortage(self.pool, self.book, self.accounts.values(), account, nbytes, quota, held)
