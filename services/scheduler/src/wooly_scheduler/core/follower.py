"""Follows one executor's journals: replays every entry, audits it, folds it. Bytes in, violations out.

A violation is no exception here: it is what an audit finds. After one that breaks the chain nothing of that journal can be
trusted any more; the follower waits for the executor's next one and says so (`lost`).
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from wooly_dispatch.errors import DispatchError, GapError, JournalError, ReplayError
from wooly_dispatch.invariants import Auditor
from wooly_dispatch.journal import Batch, Replayer
from wooly_dispatch.state import DispatchState

from wooly_scheduler.core.meters import GpuMeters

MAX_EARLY = 64
"""Batches that may wait for one before them; then it is taken to be gone for good."""
_FORMAT = b"wooly follower 2\n"


class CheckpointError(ValueError):
    """Bytes that are no checkpoint of this version."""

    code = "scheduler.checkpoint"


@dataclass(frozen=True, slots=True)
class Violation:
    """A journal is not what the rule would have written, or breaks a law."""

    journal: str
    entry: int
    law: str
    message: str


class Follower:
    """What is known of one executor from its journals.

    Attributes:
        journal: the one that is followed now.
        lost: why it cannot be followed any more; "" while it is.
        gaps: journals of which entries were missing.
        counts: violations by law, over all journals.
        last: the latest violation.
    """

    def __init__(self, executor_id: str) -> None:
        self.executor_id = executor_id
        self.lost = ""
        self.gaps = 0
        self.counts: Counter[str] = Counter()
        self.last: Violation | None = None
        self._past: dict[str, None] = {}
        self._early: dict[int, Batch] = {}
        self._begin("")

    def _begin(self, journal: str) -> None:
        self.journal = journal
        self.replayer = Replayer(journal)
        self.meters = GpuMeters()
        self.auditor = Auditor(raises=False)
        self._early = {}
        self.lost = ""

    @property
    def state(self) -> DispatchState:
        """The executor's dispatch state, as of the last entry replayed."""
        return self.replayer.state

    @property
    def entries(self) -> int:
        """Entries replayed of this journal."""
        return self.replayer.next - 1

    def feed(self, data: bytes) -> Iterator[Violation | None]:
        """Take a batch in. Yields after every entry: None, or what is wrong with it. Run it to its end."""
        try:
            batch = Batch.decode(data)
        except JournalError as e:
            yield self._violated(self.entries + 1, "bytes", str(e))
            return
        if batch.journal != self.journal:
            if batch.journal in self._past:
                return  # it came late: that run is over
            if not batch.journal.startswith(f"{self.executor_id}/"):
                yield self._violated(batch.first, "name", f"journal {batch.journal} is not one of {self.executor_id}")
                return
            self._past[self.journal] = None
            for old in list(self._past)[:-16]:
                del self._past[old]
            self._begin(batch.journal)
        if self.lost:
            return
        self._early[batch.first] = batch
        while not self.lost and (ready := self._next()) is not None:
            yield from self._replay(ready)
        if len(self._early) > MAX_EARLY:
            self._lose(GapError(self.replayer.next, min(self._early)))

    def _next(self) -> Batch | None:
        first = min(self._early, default=None)
        return self._early.pop(first) if first is not None and first <= self.replayer.next else None

    def _replay(self, batch: Batch) -> Iterator[Violation | None]:
        try:
            for event, decisions in self.replayer.replay(batch):
                self.meters.observe(event, decisions)
                self.auditor.audit(event, decisions, self.replayer.state.windows)
                found, self.auditor.violations = self.auditor.violations, []
                for error in found:
                    yield self._violated(self.replayer.next - 1, error.law, error.detail)
                yield None
        except ReplayError as e:
            self.lost = f"entry {e.entry} cannot be trusted"
            self._early = {}
            yield self._violated(e.entry, "replay", e.reason)
        except DispatchError as e:
            self.lost = str(e)
            yield self._violated(self.entries + 1, e.code, str(e))
        except Exception as e:  # entries that the rule would never write: the books, or the core, trip over them
            self.lost = f"entry {self.entries} cannot be booked"
            yield self._violated(self.entries, "books", f"{type(e).__name__}: {e}")

    def give_up(self) -> bool:
        """Whoever fetches has nothing more: entries that are missing will not come. True if there are some."""
        if self.lost or not self._early:
            return False
        self._lose(GapError(self.replayer.next, min(self._early)))
        return True

    def _lose(self, gap: GapError) -> None:
        self.gaps += 1
        self.lost = str(gap)
        self._early = {}

    @property
    def waiting(self) -> bool:
        """Whether batches wait for one before them."""
        return bool(self._early)

    def _violated(self, entry: int, law: str, message: str) -> Violation:
        self.counts[law] += 1
        self.last = Violation(self.journal, entry, law[:128], message[:2000])
        return self.last

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def checkpoint(self) -> bytes:
        """Everything, as it is: `resume`."""
        return _FORMAT + zlib.compress(pickle.dumps(self, protocol=5), 1)

    @staticmethod
    def resume(data: bytes) -> Follower:
        """The follower that `checkpoint` described. Only classes of the dispatch core and of this package are made.

        Raises:
            CheckpointError: it is of another version, or damaged.
        """
        if not data.startswith(_FORMAT):
            raise CheckpointError("not a checkpoint of this version")
        try:
            found = _Unpickler(io.BytesIO(zlib.decompress(data[len(_FORMAT) :]))).load()
        except Exception as e:
            raise CheckpointError(f"not a checkpoint: {type(e).__name__}: {e}") from e
        if not isinstance(found, Follower):
            raise CheckpointError("not a checkpoint of a follower")
        return found


class _Unpickler(pickle.Unpickler):
    """Makes plain data of ours and nothing else: a checkpoint comes from a store that others can reach."""

    def find_class(self, module: str, name: str) -> object:
        ours = module.startswith(("wooly_dispatch.", "wooly_scheduler.core.")) and "." not in name
        if ours or (module, name) in (("collections", "deque"), ("collections", "Counter"), ("builtins", "set")):
            found = super().find_class(module, name)
            if isinstance(found, type) and (not ours or found.__module__ == module):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint")
