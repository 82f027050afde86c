"""Lets the sessions of all ranks of a program go on elsewhere together, after any of them has lost its executor.

`Continuation` brings one session to where it was. It asks this module, when the session leaves its executor, to let the other
ranks go back, too; and before it sends frames again, from which cut, and under which names the groups meet. A thread looks
whether another rank has gone back.

A group has another name in each epoch (`wire`), so frames of an earlier epoch meet nobody.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from wooly_bus.channel import ChannelClosedError
from wooly_bus.supervision import start_call, start_thread
from wooly_wis.collectives import GROUP_BYTES, group_of, with_group
from wooly_wis.frames import Kind

from wooly.distributed.agreement import Agreement, KeyStore, Turn
from wooly.distributed.peers import introductions
from wooly.errors import WoolyError

if TYPE_CHECKING:
    from wooly.link import Link
    from wooly.recorder import Lock
    from wooly.recovery import Recovery

#: Seconds between two looks whether another rank has gone back.
LOOK_S = 0.2
#: Seconds between two questions to the store, at first and at most, while a rank waits for others.
ASK_S, ASK_AT_MOST_S = 0.001, 0.05
#: Seconds between two collectives at which the first rank decides whether all ranks take a cut. The other ranks wait there until
#: the first rank's script has come to the same collective.
TURN_S = 0.25
#: Seconds after which the first rank decides on another cut, if the last one was not stored by all ranks.
AFTER_FAILURE_S = 10.0
#: Seconds to wait for a new epoch if another rank's executor cannot be reached.
UNREACHABLE_S = 0.5


class Together:
    """One rank's part in the recovery of a program.

    Args:
        store: a connection of its own to the store of the group of all ranks.
        rank: this rank.
        size: number of ranks.
        link: the session's link.
        lock: the lock of its recorder.
        place: returns where the session is now.
        introduction: returns the content of the GROUP frame by which the executor learns that a place's executor carries a group,
            or its share.
        clock: returns monotonic seconds.

    Attributes:
        rank: see Args.
        link: see Args.
        epoch: the epoch in which this rank's frames are.
        over: why the ranks cannot go back together any more; empty: they can.
        behind: the largest number of a collective at which this rank could take a cut; None: further ones may come, in a group of
            all ranks that it has not left.
    """

    def __init__(
        self,
        store: KeyStore,
        rank: int,
        size: int,
        link: Link,
        lock: Lock,
        place: Callable[[], dict[str, Any]],
        introduction: Callable[[dict[str, Any], bytes], bytes],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._agreement = Agreement(store, size)
        self.rank, self.link, self._lock, self._place, self._introduction = rank, link, lock, place, introduction
        self._clock = clock
        self.epoch = 0
        self.over = ""
        self.behind: int | None = 0
        self._last_number = 0
        #: By group, also for those that this rank has left: its ranks, by their numbers in the program.
        self._groups: dict[bytes, Sequence[int]] = {}
        self._places: list[dict[str, Any]] = []
        #: Processes of other executors with which this session's executor works in this epoch.
        self._introduced: set[str] = set()
        #: The numbers that this session gives to common cuts, and those that are reported.
        self._numbers: dict[int, int] = {}
        self._reported: set[int] = set()
        #: The number of the collective at which the first rank decides next, and its last decision.
        self._next_turn, self._decided = 2, Turn(0, 0, 2)
        self._turns: list[int] = []
        self._turned = clock()
        #: The newest cut that was decided.
        self._last_cut = 0
        #: Of the first rank: the cut that is not common yet (0: none), and when the next one may be decided.
        self._pending, self._not_before = 0, 0.0
        self._going_back = False
        self._closed = threading.Event()

    # -- entering ----------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Tell the other ranks where this session is, and wait for them. Then let the session go back together with theirs.

        Raises:
            WoolyError: a rank cannot.
        """
        self._meet(lambda: self.link.lost is not None)
        start_thread(self._watch, "wooly-ranks")

    def form(self, name: bytes, members: Sequence[int]) -> list[dict[str, Any]]:
        """Make a group.

        Args:
            name: its random id.
            members: its ranks, by their numbers in the program.

        Returns:
            The places of the ranks, by rank of the group.

        The recorder's lock is held.
        """
        self._groups[name] = members
        for payload in self._introductions({name}):
            self.link.send(Kind.GROUP, payload)
        return [self._places[rank] for rank in members]

    def lead(self, first: int) -> None:
        """From now on, the ranks take cuts at the collectives of a new group of all ranks.

        Args:
            first: what is added to their numbers: the largest `behind` of all ranks.
        """
        self.behind, self._next_turn = None, first + 2  # the group's first collective forms it

    def follow(self) -> None:
        """The ranks leave the group at whose collectives they take cuts."""
        self.behind = self._last_number

    def wire(self, name: bytes) -> bytes:
        """The name under which the ranks of a group meet in this epoch."""
        if not self.epoch:
            return name
        return hashlib.sha256(name + self.epoch.to_bytes(8, "little")).digest()[:GROUP_BYTES]

    def on_wire(self, payload: bytes) -> bytes:
        """The payload of a COLLECTIVE frame as it is sent in this epoch."""
        return with_group(payload, self.wire(group_of(payload)))

    # -- common cuts -------------------------------------------------------------------------------------------------

    def turn(self, number: int, recovery: Recovery) -> bool:
        """Before a collective of the group of all ranks: decide, or learn, what happens behind it. Waits for the first rank.

        Args:
            number: number of the collective.
            recovery: what the session keeps.

        Returns:
            False if it is not known and the recovery of the ranks has ended, or the session.
        """
        self._last_number = number
        if number < self._next_turn or self.over:
            return not self.over
        try:
            found = self._decide(number, recovery) if not self.rank else self._await_turn(number, recovery)
        except RuntimeError as e:
            self._lose_store(e)
            return False
        if found is None:
            return False
        self._decided, self._next_turn = found, found.following
        self._last_cut = max(self._last_cut, found.cut)
        if found.common in self._numbers:
            with self._lock:
                self._become_common(found.common, recovery)
        return True

    def cut_behind(self, number: int) -> int:
        """The common cut that all ranks take behind a collective; 0: none."""
        turns = self._turns
        return self._decided.cut if turns and turns[-1] == number and not self.over else 0

    def taken(self, cut: int, number: int) -> None:
        """A common cut was asked for, under a number of this session."""
        self._numbers[cut] = number

    def holds(self, number: int) -> bool:
        """Whether a stored cut of this session is its part of a common one. The other ranks learn that it is stored."""
        cut = next((c for c, n in self._numbers.items() if n == number), 0)
        if cut and cut not in self._reported:
            self._reported.add(cut)
            with self._telling():
                self._agreement.stored(cut)
        return bool(cut)

    def failed(self) -> None:
        """The last cut of this session was not taken, or not stored."""
        for cut in self._numbers.keys() - self._reported:
            self._reported.add(cut)
            with self._telling():
                self._agreement.failed(cut)

    def _decide(self, number: int, recovery: Recovery) -> Turn | None:
        agreement, before, now = self._agreement, self._decided, self._clock()
        common = before.common
        with self._lock:  # nobody goes back meanwhile
            epoch, pending = self.epoch, self._pending
            if pending and agreement.make_common(pending, epoch):
                common, self._pending = pending, 0
                agreement.forget(self._turns[:-1], range(before.common, common))
                self._turns = self._turns[-1:]
            elif pending and agreement.has_failed(pending):
                self._pending, self._not_before = 0, now + AFTER_FAILURE_S
            cut = 0
            wanted = not self._pending and now >= self._not_before
            if wanted and (recovery.wants_cut or agreement.cut_wanted(self._last_cut)):
                cut = self._pending = self._last_cut = self._last_cut + 1
            self._turns.append(number)
            each = max(self._step(number, now), 1) if recovery.every_s else 1
            found = Turn(cut, common, number + each)
            agreement.tell_turn(number, found)
        self._turned = now
        return found

    def _step(self, number: int, now: float) -> int:
        """After how many collectives to decide again, by how fast they came since the last decision."""
        passed = number - (self._turns[-2] if len(self._turns) > 1 else 1)
        rate = passed / max(now - self._turned, 1e-6)
        return min(int(rate * TURN_S), 2 * passed)

    def _await_turn(self, number: int, recovery: Recovery) -> Turn | None:
        if recovery.wants_cut:
            self._agreement.want_cut(self._last_cut)
        for _ in self._asking():
            found = self._agreement.turn(number)
            if found is not None:
                self._turns = [number]
                return found
            self.over = self.over or self._agreement.ended()
            if self.over or self.link.lost is not None:
                return None
        return None

    def _become_common(self, cut: int, recovery: Recovery) -> None:
        """Forget what is before a common cut. The recorder's lock is held: another thread may have done it already (`meet`)."""
        if cut not in self._numbers:
            return
        recovery.keep_from(self._numbers[cut])
        for known in [c for c in self._numbers if c <= cut]:
            del self._numbers[known]

    # -- going back --------------------------------------------------------------------------------------------------

    def can_go_back(self) -> bool:
        """Whether all ranks can go on elsewhere together."""
        with self._telling():
            self.over = self.over or self._agreement.ended()
        return not self.over

    def go_back(self) -> None:
        """This session leaves its executor: let all ranks go back.

        Raises:
            WoolyError: they cannot.
        """
        self._going_back = True
        with self._asked():
            self._check_over()
            self._agreement.go_back(self.epoch)

    def meet(self, broken: Callable[[], bool], recovery: Recovery) -> list[bytes]:
        """Wait until all ranks have gone back, and forget what is before the cut from which they go on.

        Args:
            broken: whether this session has lost its new executor meanwhile.
            recovery: what the session keeps.

        Returns:
            The contents of the GROUP frames that this session's executor needs.

        Raises:
            WoolyError: a rank cannot go back.
            ChannelClosedError: the session has lost its new executor.
        """
        self._going_back = True
        try:
            cut = self._meet(broken)
        finally:
            self._going_back = False
        self._pending = 0
        self._become_common(cut, recovery)
        self.failed()  # what is not stored by now will not be
        kept = {group_of(f.payload) for f in recovery.frames if f.kind == Kind.COLLECTIVE}
        try:
            return list(self._introductions(self._groups.keys() | kept))
        except WoolyError as e:  # that rank's executor is lost, too, and its client will say so
            time.sleep(UNREACHABLE_S)
            raise ChannelClosedError(str(e)) from e

    def _meet(self, broken: Callable[[], bool]) -> int:
        """Wait until all ranks have told their places in the newest epoch. Returns the cut from which they go on."""
        told = -1
        with self._asked():
            for _ in self._asking():
                self._check_over()
                now = self._agreement.standing()
                if now.epoch != told:
                    told = now.epoch
                    self._agreement.tell_place(told, self.rank, self._place())
                found = self._agreement.places(told)
                if found is not None:
                    self.epoch, self._places, self._introduced = told, found, set()
                    return now.cut
                if broken():
                    raise ChannelClosedError("the connection broke while the session waited for the other ranks")
        raise AssertionError

    def _introductions(self, names: set[bytes]) -> Iterator[bytes]:
        for name in sorted(names):
            members = self._groups[name]
            places = [self._places[rank] for rank in members]
            own = members.index(self.rank)
            yield from introductions(places, own, self.wire(name), self._introduced, self._introduction)

    # -- the other ranks ---------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Go back when another rank does."""
        acted = 0
        while not self._closed.wait(LOOK_S):
            try:
                epoch = self._agreement.standing().epoch
                self.over = self.over or self._agreement.ended()
            except RuntimeError as e:
                self._lose_store(e)
                return
            if epoch > max(self.epoch, acted) and not self._going_back and not self.over:
                acted = epoch
                self.link.continuation.abandon("another rank of the program has lost its executor")
                start_call(self._follow, "wooly-recovery")

    def _follow(self) -> None:  # a thread that waits for an answer does it first
        with self._lock, contextlib.suppress(WoolyError):
            self.link.continuation.go_on()

    # -- the end -----------------------------------------------------------------------------------------------------

    def end(self, why: str) -> None:
        """From now on, the ranks cannot go back any more, because this one cannot."""
        self._closed.set()
        if not self.over:
            self.over = why
            with contextlib.suppress(RuntimeError):
                self._agreement.end(f"rank {self.rank}: {why}")

    def _check_over(self) -> None:
        self.over = self.over or self._agreement.ended()
        if self.over:
            raise WoolyError(f"the ranks of the program cannot go on in other executors any more: {self.over}")

    def _lose_store(self, error: Exception) -> None:
        self.over = self.over or f"torch.distributed's store does not answer: {error}"

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as e:
            self._lose_store(e)

    @contextlib.contextmanager
    def _asked(self) -> Iterator[None]:
        try:
            yield
        except WoolyError:
            raise
        except RuntimeError as e:
            self._lose_store(e)
            raise WoolyError(f"the ranks of the program cannot go on in other executors: {self.over}") from e

    @staticmethod
    def _asking() -> Iterator[None]:
        """Questions with pauses between them, for ever."""
        pause = ASK_S
        while True:
            yield
            time.sleep(pause)
            pause = min(2 * pause, ASK_AT_MOST_S)
