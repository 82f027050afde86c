"""Contents that sessions share: which session may share which content, what a write does, and where the bytes are.

The device loop's thread owns this module.
"""

from __future__ import annotations

import functools
import heapq
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from wooly_bus.contents import shared_name

from wooly_executor.errors import BindingError
from wooly_executor.flow import Residence, Signal
from wooly_executor.memory.book import Gone, Leaving, Scope
from wooly_executor.memory.ledger import Ledger
from wooly_executor.memory.swap import Place
from wooly_executor.mover import LEAST_URGENT, HashJob, Job, Mover, SaveJob, Saving
from wooly_executor.post import Post
from wooly_executor.runtime.buffers import bytes_of
from wooly_executor.session import SHARED_KEPT, Session
from wooly_executor.swap_space import Copy, SwapSpace

log = logging.getLogger("wooly.executor")
#: Time, in ns, after which content is copied off the device again whose copy failed: the host may have memory again.
ORPHANS_AGAIN_NS = 1_000_000_000
#: A cache, because heartbeats ask for the names of the same contents again and again.
_name = functools.lru_cache(maxsize=4096)(shared_name)


class Contents:
    """The bytes of the stores in the ledger's book.

    Args:
        ledger: has the stores.
        swap_space: holds copies outside the device.
        mover: hashes and copies bytes.
        clock: returns monotonic ns.
        call: runs a function in the device loop's thread; any thread may use it.
        changed: called when memory has become free, or a session may be swapped out that could not before.
        post: gets the event that all contents of a session are hashed.

    Attributes:
        here: the bytes on the device, by store.
        copies: the copies outside the device, by store.
        leaving: bytes of content whose sessions are all swapped out, and which is being copied off the device.
        again: when `copy_orphans` has something to do, monotonic ns; None: never.
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
        self.leaving = 0
        self.again: int | None = None
        #: Stores that no resident session has, and whose copy off the device failed.
        self._stuck: dict[int, Leaving] = {}
        self._ledger, self._swap_space, self._mover, self._clock = ledger, swap_space, mover, clock
        self._call, self._changed, self._post = call, changed, post

    def unshare(self, session: Session, buffers: Iterable[int], *, whole: bool = False) -> None:
        """Give the session its own copy of shared buffers that it is about to write.

        Args:
            session: the session that writes.
            buffers: ids of the buffers; buffers that are not shared are ignored.
            whole: all bytes will be overwritten, so nothing needs to be copied.

        Raises:
            OutOfMemoryError: the device has no room for a copy.
        """
        for buffer in buffers:
            if buffer not in session.holdings.guarded:
                continue
            job = session.holdings.sealing.pop(buffer, None)
            if job is not None:
                job.cancel()
            if buffer in session.holdings.account.shared:
                written = self._ledger.write(session.holdings.account, buffer, self._clock())
                source = self.here.get(written.store) if written.copy else self.here.pop(written.store, None)
                known = session.buffers[buffer]
                if written.copy and source is not None:  # else the bytes are lost, and the buffer is poisoned
                    known.base = torch.zeros_like(source) if whole else source.clone()
                    known.view = None
                self.drop_released(written.found)
            session.holdings.guarded.discard(buffer)

    def own(self, session: Session, buffer: int) -> None:
        """Make a buffer that no other buffer shares its session's own. Its bytes stay where they are."""
        written = self._ledger.write(session.holdings.account, buffer, self._clock())
        assert not written.copy, "a buffer that others share is made a session's own"
        self.drop_released(written.found)

    def drop_released(self, found: Iterable[Gone | Leaving]) -> None:
        """Delete the bytes and copies of contents that the book has released."""
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
        """Copy content off the device whose sessions are all swapped out.

        The copy goes to host memory even beyond its budget, because no session could be told that there is no room.
        """
        if each.store in self.copies:
            self._ledger.evict(each.store)
            self.here.pop(each.store, None)
            return
        source = self.here[each.store]
        copy = self._swap_space.take(Place.HOST, len(source), None)

        def left(job: Job, error: Exception | None) -> None:
            self._call(lambda: self._orphan_left(each, copy, job, error))

        self.leaving += copy.nbytes
        self._mover.submit(SaveJob(LEAST_URGENT, left, pieces=[Saving(("store", each.store), source, copy)]))

    def _orphan_left(self, each: Leaving, copy: Copy, job: Job, error: Exception | None) -> None:
        assert isinstance(job, SaveJob)
        job.pieces, store = [], each.store
        self.leaving -= copy.nbytes
        if error is not None or store not in self.here or store in self.copies:
            self._swap_space.drop(copy)
            if error is not None and store in self.here:
                log.warning(
                    "content of %d bytes of sessions that are swapped out stays on the device: %s", copy.nbytes, error
                )
                self._stuck[store] = each
                self.again = self._clock() + ORPHANS_AGAIN_NS
            self._changed()  # a request may have waited for this room
            return
        self.copies[store] = copy
        if not self._ledger.book.borne(store):
            self._ledger.evict(store)
            del self.here[store]
        self._changed()

    def copy_orphans(self) -> None:
        """Copy content off the device again whose copy failed a while ago, unless a session has it again."""
        if self.again is None or self._clock() < self.again:
            return
        stuck, self._stuck, self.again = self._stuck, {}, None
        for store, each in stuck.items():
            if store in self.here and not self._ledger.book.borne(store):
                self.orphan(each)

    def offer(self, session: Session, buffer: int, nbytes: int, head: bool, name: bytes) -> bool:
        """Check whether the device already has a content that a client is about to upload. If so, the buffer shares it, and the
        client need not upload it.

        Args:
            session: the session of the client.
            buffer: id of the buffer.
            nbytes: size of the content.
            head: `name` is the digest of the first chunk only; then nothing is shared yet.
            name: the content id, or the digest of the first chunk.

        Raises:
            BindingError: the buffer does not exist, or has another size.
        """
        known = session.buffers.get(buffer)
        if known is None or known.nbytes != nbytes:
            raise BindingError(
                f"buffer {buffer} {'does not exist' if known is None else f'has {known.nbytes} bytes, not {nbytes}'}"
            )
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
        self._note_shared(session, store, nbytes)
        return True

    def seal(self, session: Session, buffer: int, nbytes: int, name: bytes) -> None:
        """Hash a buffer that the client has uploaded completely. Other sessions may share its content after that.

        Args:
            session: the session of the client.
            buffer: id of the buffer.
            nbytes: size of the content.
            name: the content id that the client claims; it must equal the hash.

        Raises:
            BindingError: the buffer does not exist, or has another size.
        """
        known = session.buffers.get(buffer)
        if known is None or known.nbytes != nbytes:
            raise BindingError(
                f"buffer {buffer} {'does not exist' if known is None else f'has {known.nbytes} bytes, not {nbytes}'}"
            )
        if (
            session.holdings.account.scope is Scope.OFF
            or known.base is None
            or not nbytes
            or buffer in session.holdings.guarded
            or buffer in session.holdings.ipc  # another session may write it
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
        job.source = None
        if session.holdings.sealing.get(buffer) is not job:
            return  # the buffer was written or freed meanwhile
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
            self._note_shared(session, found[0], known.nbytes)
        if not session.holdings.sealing:
            self._post.add(session, Signal.MEMORY_CAME)
            self._changed()  # from now on, the session may be swapped out

    def _note_shared(self, session: Session, store: int, nbytes: int) -> None:
        """Remember that the session shares this content. When the session ends, the router gets the list, so that it can place
        similar sessions here.
        """
        known, shared_contents = self._ledger.book.known_as(store), session.shared_contents
        if known is not None:
            shared_contents[_name(*known)] = nbytes
        if len(shared_contents) > 4 * SHARED_KEPT:
            session.shared_contents = dict(
                heapq.nlargest(SHARED_KEPT, shared_contents.items(), key=lambda item: item[1])
            )

    def largest(self, count: int) -> list[str]:
        """Names (`shared_name`) of contents on the device that others may share: at most `count`, largest first."""
        return list(dict.fromkeys([_name(*known) for known in self._ledger.book.largest(count)]))


def flat(base: Tensor, nbytes: int) -> Tensor:
    """The bytes of a buffer as a flat tensor."""
    return bytes_of(base, 0, nbytes)
