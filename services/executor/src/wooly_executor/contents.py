"""Contents that sessions share: who may have which, what a write does to them, and where their bytes are.

Owned by the device loop's thread.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from wooly_bus.contents import name_in_circle

from wooly_executor.errors import BindingError
from wooly_executor.flow import Residence, Signal
from wooly_executor.memory.book import Gone, Leaving, Scope
from wooly_executor.memory.ledger import Ledger
from wooly_executor.memory.swap import Place
from wooly_executor.mover import LEAST_URGENT, HashJob, Job, Mover, SaveJob, Saving
from wooly_executor.post import Post
from wooly_executor.runtime.buffers import bytes_of
from wooly_executor.session import BROUGHT, Session
from wooly_executor.swap_space import Copy, SwapSpace

#: Heartbeats name the same contents again and again.
_name = functools.lru_cache(maxsize=4096)(name_in_circle)


class Contents:
    """The bytes behind the stores of the ledger's book.

    Args:
        ledger: whose stores.
        swap_space: where copies go.
        mover: what hashes and copies.
        clock: monotonic ns.
        call: has a function run in the device loop's thread; from any thread.
        changed: there is room that was not there before.
        post: where sessions are told that all their contents are hashed.

    Attributes:
        here: the bytes on the device, by store.
        copies: the copies elsewhere, by store.
    """

    def __init__(
        self,
        ledger: Ledger,
        swap_space: SwapSpace,
        mover: Mover,
        clock: Callable[[], int],
        call: Callable[[Callable[[], None]], Any],
        changed: Callable[[], None],
        post: Post,
    ) -> None:
        self.here: dict[int, Tensor] = {}
        self.copies: dict[int, Copy] = {}
        self._ledger, self._swap_space, self._mover, self._clock = ledger, swap_space, mover, clock
        self._call, self._changed, self._post = call, changed, post

    def unshare(self, session: Session, buffers: Iterable[int], *, whole: bool = False) -> None:
        """Some buffers are about to be written: from now on they are the session's own.

        Args:
            session: whose.
            buffers: which; those that are not shared are left alone.
            whole: all their bytes are overwritten.

        Raises:
            OutOfMemoryError: there is no room for a copy.
        """
        for buffer in buffers:
            if buffer not in session.holdings.guarded:
                continue
            job = session.holdings.sealing.pop(buffer, None)
            if job is not None:
                job.cancel()
            if buffer in session.holdings.account.shared:
                written = self._ledger.write(session.holdings.account, buffer, self._clock())
                source = self.here[written.store] if written.copy else self.here.pop(written.store)
                known = session.buffers[buffer]
                if written.copy:
                    known.base = torch.zeros_like(source) if whole else source.clone()
                    known.view = None
                self.departed(written.found)
            session.holdings.guarded.discard(buffer)

    def departed(self, found: Iterable[Gone | Leaving]) -> None:
        """The book has let go of some contents: so do the device and what keeps copies."""
        for each in found:
            if isinstance(each, Gone):
                self.here.pop(each.store, None)
                copy = self.copies.pop(each.store, None)
                if copy is not None:
                    self._swap_space.drop(copy)
            else:
                self.orphan(each)
        self._changed()

    def orphan(self, each: Leaving) -> None:
        """Content that only sessions hold that are away leaves the device, whatever the budget: nobody else can be asked."""
        if each.store in self.copies:
            self._ledger.evict(each.store)
            self.here.pop(each.store, None)
            return
        source = self.here[each.store]
        copy = self._swap_space.take(Place.HOST, len(source), None)

        def left(job: Job, error: Exception | None) -> None:
            self._call(lambda: self._orphan_left(each.store, copy, error))

        self._mover.submit(SaveJob(LEAST_URGENT, left, pieces=[Saving(("store", each.store), source, copy)]))

    def _orphan_left(self, store: int, copy: Copy, error: Exception | None) -> None:
        known = store in self.here
        if error is not None or not known or store in self.copies:
            self._swap_space.drop(copy)
            return
        self.copies[store] = copy
        if not self._ledger.book.borne(store):
            self._ledger.evict(store)
            del self.here[store]
            self._changed()

    def offer(self, session: Session, buffer: int, nbytes: int, head: bool, name: bytes) -> bool:
        """A client is about to upload a content: is it here? Then the buffer has it from now on, and nothing need travel.

        Raises:
            BindingError: no such buffer.
        """
        known = session.buffers.get(buffer)
        if known is None or known.nbytes != nbytes:
            raise BindingError(f"buffer {buffer} {'does not exist' if known is None else f'has {known.nbytes} bytes'}")
        if head:
            return self._ledger.knows_head(session.holdings.account, nbytes, name)
        if buffer in session.holdings.guarded:
            self.unshare(session, [buffer], whole=True)
        store = self._ledger.share(session.holdings.account, buffer, nbytes, name, self._clock())
        if store is None:
            return False
        source = self.here[store]
        known.base, known.view, known.poison = source, None, ""
        session.holdings.guarded.add(buffer)
        self._brought(session, store, nbytes)
        return True

    def seal(self, session: Session, buffer: int, nbytes: int, name: bytes) -> None:
        """All of a buffer was uploaded: once its content is hashed here, others may share it. `name` is what the client says.

        Raises:
            BindingError: no such buffer.
        """
        known = session.buffers.get(buffer)
        if known is None or known.nbytes != nbytes:
            raise BindingError(f"buffer {buffer} {'does not exist' if known is None else f'has {known.nbytes} bytes'}")
        if (
            session.holdings.account.scope is Scope.OFF
            or known.base is None
            or not nbytes
            or buffer in session.holdings.guarded
        ):
            return

        def hashed(job: Job, error: Exception | None) -> None:
            self._call(lambda: self._sealed(session, buffer, job, name))

        job = HashJob(LEAST_URGENT, hashed, source=flat(known.base, nbytes))
        session.holdings.guarded.add(buffer)
        session.holdings.sealing[buffer] = job
        self._mover.submit(job)

    def _sealed(self, session: Session, buffer: int, job: Job, name: bytes) -> None:
        assert isinstance(job, HashJob)
        if session.holdings.sealing.get(buffer) is not job:
            return  # it was written meanwhile, or is no more
        del session.holdings.sealing[buffer]
        known = session.buffers.get(buffer)
        found = None
        if job.content and job.content == name and known is not None and session.flow.residence is Residence.HERE:
            found = self._ledger.seal(
                session.holdings.account, buffer, known.nbytes, job.content, job.head, self._clock()
            )
        if found is None or known is None:
            session.holdings.guarded.discard(buffer)
        elif found[1]:
            known.base, known.view = self.here[found[0]], None
        else:
            assert known.base is not None
            self.here[found[0]] = flat(known.base, known.nbytes)
        if found is not None and known is not None:
            self._brought(session, found[0], known.nbytes)
        if not session.holdings.sealing:
            self._post.add(session, Signal.MEMORY_CAME)

    def _brought(self, session: Session, store: int, nbytes: int) -> None:
        """A session shares this content: the router is told when the session ends, and looks for it when its like comes again."""
        known, brought = self._ledger.book.known_as(store), session.brought
        if known is not None:
            brought[_name(*known)] = nbytes
        if len(brought) > 4 * BROUGHT:
            session.brought = dict(heapq.nlargest(BROUGHT, brought.items(), key=lambda item: item[1]))

    def largest(self, count: int) -> list[str]:
        """What others may share on the device, at most `count`, largest first, by `name_in_circle`."""
        return list(dict.fromkeys([_name(*known) for known in self._ledger.book.largest(count)]))


def flat(base: Tensor, nbytes: int) -> Tensor:
    """The bytes of a buffer."""
    return bytes_of(base, 0, nbytes)
