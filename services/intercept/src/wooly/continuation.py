"""How the session of a link goes on in another executor: cuts, the loss of an executor, restores, and departures.

The link sends frames and receives answers; `Recovery` keeps the frames and says when a cut is due. This module decides what to
ask the executor for, and brings the session in another executor to where it was.

Callers hold the recorder's lock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from wooly_bus.channel import ChannelClient, ChannelClosedError, ChannelError
from wooly_bus.contents import chunk_digest
from wooly_wis.frames import CUT_HEAD, READ_HEAD, RESTORE_HEAD, Kind, unpack_json

from wooly.departures import STAYS, HibernatedChannel
from wooly.errors import WoolyError
from wooly.recovery import ERROR, DifferentResultError, KeptFrame, Pending, Recovery

if TYPE_CHECKING:
    from wooly.link import Link

#: Maximum time, in seconds, that another executor takes to answer the hello of a session that goes on there.
RESTORE_S = 30.0
#: Seconds after which a hibernated session that found no executor asks for one again. The timer that sends open programs would
#: otherwise ask all the time.
WAKE_AGAIN_S = 5.0


class Continuation:
    """Lets the session of a link go on in another executor, if the link has a `recovery`.

    Args:
        link: the link.
        hello: what the hello to another executor says besides the session's id and token.

    Attributes:
        why: why the session lost its executor, if the controller said so; empty: the connection tells.
    """

    def __init__(self, link: Link, hello: dict[str, Any]) -> None:
        self._link, self._hello = link, hello
        self.why = ""
        #: Number of the log's frames when the last cut was asked for.
        self._cut_at = 0
        #: Number of the last frame that was sent again at the last recovery.
        self._resumed_at = 0
        #: When a hibernated session may be woken again, and why the last attempt failed.
        self._not_woken: tuple[float, WoolyError] | None = None

    def _recovery(self) -> Recovery | None:
        """How an open session goes on; None: it has ended, or cannot go on."""
        return None if self._link.lost is not None else self._link.recovery

    # -- cuts --------------------------------------------------------------------------------------------------------

    def cut_if_due(self, recovery: Recovery) -> None:
        """Ask for a cut if one is due. If too much is kept, wait until one is stored, or give recovery up."""
        if recovery.answer is not None:
            if not recovery.over and not recovery.answer.done:
                return
            if not self._link.wait(Pending(recovery.answer)):
                return
            self.take_cut(recovery)
        while recovery.over and recovery.alone:
            self._ask_cut(recovery, wait=True)
            if recovery.answer is not None and self._link.wait(Pending(recovery.answer)):
                self.take_cut(recovery)
            if recovery.given_up:
                break
        if why := recovery.given_up:
            self._link.stay(why)
        elif recovery.due:
            self._ask_cut(recovery, wait=False)

    def take_common_cut(self, cut: int) -> None:
        """Take a cut that all ranks of the session's group take at this place."""
        recovery = self._recovery()
        if recovery is None or recovery.together is None:
            return
        if recovery.answer is not None and self._link.wait(Pending(recovery.answer)):
            self.take_cut(recovery)
        self._ask_cut(recovery, wait=False, new=True)
        recovery.together.taken(cut, recovery.number)

    def _ask_cut(self, recovery: Recovery, *, wait: bool, new: bool = False) -> None:
        link = self._link
        number = recovery.begin(new=new)
        link.send(Kind.CUT, CUT_HEAD.pack(number, recovery.stored, wait))
        self._cut_at = 0 if link.log is None else link.log.frames
        recovery.answer = link.connection.channel.expect_frame()

    def take_cut(self, recovery: Recovery) -> None:
        """Process the answer to the last CUT, if it has arrived."""
        answer = recovery.answer
        if answer is None or not answer.done or answer.other is None:
            return
        recovery.answer = None
        if answer.other.kind == Kind.ERROR:
            self._link.note_error(answer.other.payload)
            recovery.failed()
            if self._link.log is not None:
                self._link.log.failed(self._cut_at)
        else:
            recovery.taken(unpack_json(answer.other.payload))

    @property
    def next_cut(self) -> int:
        """Number of the next cut."""
        recovery = self._link.recovery
        return 0 if recovery is None else recovery.number + 1

    def advance_cut(self, number: int) -> bool:
        """Bring about, without waiting, that a cut with this number is stored. Returns False if that takes longer.

        Returns True, too, if there is nothing to store, the cut failed, or the session cannot go on elsewhere any more.
        """
        self._link.poll()
        recovery = self._recovery()
        if recovery is None or recovery.complete or recovery.hibernates:
            return True
        self.take_cut(recovery)
        if recovery.stored >= number or (recovery.failure and recovery.number >= number):
            return True
        if recovery.answer is None:
            self._ask_cut(recovery, wait=False)
        return False

    def cut_here(self) -> str:
        """Wait until a cut of the session as it is now is stored. Returns why there is none; empty: it is stored."""
        for _ in range(3):  # the answer to an earlier CUT, its storing, and the cut itself
            recovery = self._link.recovery
            if recovery is None:
                return "it cannot go on in another executor any more"
            if recovery.answer is None and not recovery.complete:
                self._ask_cut(recovery, wait=True)
            if recovery.answer is not None and self._link.wait(Pending(recovery.answer)):
                self.take_cut(recovery)
            if recovery.complete:
                return ""
        return (recovery and recovery.failure) or "its checkpoint is not stored"

    # -- departures --------------------------------------------------------------------------------------------------

    def move(self, why: str, begun: float) -> None:
        """Go on in another executor.

        Args:
            why: the reason.
            begun: since when the script waits, on the monotonic clock.

        Raises:
            WoolyError: there is no room elsewhere any more; the session stays. Or the session has ended.
        """
        recovery = self._recovery()
        if recovery is None or recovery.hibernates:
            return
        if recovery.answer is not None and self._link.wait(Pending(recovery.answer)):
            self.take_cut(recovery)
        recovery.say(f"wooly: the session leaves the executor {self._link.where}: {why} ...")
        try:
            self._go_on(recovery, why, begun, leaves=True)
        except WoolyError as e:
            if e.code == STAYS:
                if recovery.together is not None:
                    recovery.together.failed()  # a cut that is being stored is not asked for again
                recovery.say(f"wooly: the session stays: {e}")
                raise
            raise self._link.lose(e) from e

    def hibernate(self, why: str) -> None:
        """Leave the executor until the next operation. The last cut has everything that the session did.

        Raises:
            WoolyError: the controller refuses.
        """
        recovery, connection = self._recovery(), self._link.connection
        if recovery is None or recovery.hibernates:
            return
        recovery.hibernate(recovery.stored, why)
        connection.replace(HibernatedChannel(connection.channel_last), connection.where)
        recovery.hibernates = True
        recovery.say(f"wooly: the session hibernates: {why}. Its next operation wakes it")

    def wake(self, why: str) -> None:
        """End the hibernation.

        Raises:
            ExecutorLostError: the session cannot go on.
            WoolyError: no executor has room now, or the controller does not answer. The session still hibernates.
        """
        recovery = self._recovery()
        if recovery is None or not recovery.hibernates:
            return
        begun = time.monotonic()
        if self._not_woken is not None and begun < self._not_woken[0]:
            raise self._not_woken[1]
        recovery.say(f"wooly: the session wakes up: {why} ...")
        try:
            self._go_on(recovery, why, begun)
        except WoolyError as e:
            if not recovery.hibernates:
                raise self._link.lose(e) from e
            recovery.say(f"wooly: the session still hibernates: {e}")
            self._not_woken = time.monotonic() + WAKE_AGAIN_S, e
            raise

    # -- after a loss ------------------------------------------------------------------------------------------------

    def abandon(self, why: str) -> None:
        """Break the connection to the executor, because the session leaves it. Any thread may call this; waiting threads wake up.

        A session that hibernates has no connection.
        """
        recovery = self._link.recovery
        if recovery is not None and not recovery.hibernates and self._link.lost is None:
            self.why = why
            self._link.connection.channel.abort()

    def go_on(self) -> None:
        """Go on in another executor now, if the connection is broken, or if the session has left this executor."""
        channel, recovery = self._link.connection.channel, self._recovery()
        if recovery is not None and recovery.hibernates and recovery.left():
            self.wake("another device wakes up")
        elif recovery is not None and channel.broken():
            cause: ChannelError = ChannelClosedError("the connection broke")
            try:
                channel.poll_acks()  # the executor may have said why
            except ChannelError as e:
                cause = e
            self.recover(cause)

    def recover(self, cause: ChannelError) -> None:
        """Go on in another executor after the loss of this one, or at the end of the hibernation.

        Raises:
            ExecutorLostError: the session cannot go on.
            WoolyError: a hibernated session does not find an executor now. It still hibernates.
        """
        recovery, link = self._recovery(), self._link
        if recovery is None or not cause.passing:
            raise link.lose(cause) from cause
        begun = time.monotonic()
        if recovery.hibernates and not link.connection.channel.broken():
            self.wake("its script goes on")
            return
        why, self.why = self.why or str(cause), ""
        recovery.say(f"wooly: lost the executor {link.where}: {why}. The session goes on in another executor ...")
        try:
            self._go_on(recovery, why, begun)
        except WoolyError as e:
            raise link.lose(e) from cause

    def _go_on(self, recovery: Recovery, why: str, begun: float, *, leaves: bool = False) -> None:
        """Open the session at another executor, and bring it there to where it was. `leaves`: it still has its executor.

        Raises:
            WoolyError: the session cannot go on.
        """
        with recovery.around(why):
            self._reopen(recovery, why, leaves)
        took = time.monotonic() - begun
        recovery.resumed = took, sum([frame.kind != Kind.CUT for frame in recovery.frames])
        recovery.say(f"wooly: the session goes on in the executor {self._link.where}, after {took:.1f} s")

    def _reopen(self, recovery: Recovery, why: str, leaves: bool) -> None:
        connection = self._link.connection
        while True:
            reached = max(connection.acked, self._link.answered)
            together = recovery.together
            if together is not None and not recovery.needs_ranks and not together.can_go_back():
                together = None
            if not recovery.begun(progress=reached > self._resumed_at or recovery.left()):
                raise WoolyError(f"{why}; the session has gone on elsewhere too often lately")
            try:
                if together is not None and not leaves:
                    together.go_back()
                there = recovery.reopen(why, recovery.stored, leaves)
                if together is not None and leaves:
                    together.go_back()
                leaves = False
                connection.replace(there.channel, there.where)
                recovery.hibernates = False
                waits = self._link.waits
                asked = waits.clock()
                connection.greet(self._hello | {"session_id": there.session_id, "token": there.token}, RESTORE_S)
                waits.trip_s = waits.clock() - asked  # this executor may be nearer or farther
                self._replay(recovery, [] if together is None else together.meet(connection.channel.broken, recovery))
                return
            except ChannelError as e:
                why = str(e)
            except WoolyError as e:
                if not recovery.left():  # else it has left that executor meanwhile
                    raise
                why = str(e)
            except BaseException:  # of a signal handler: the next use recovers again
                if not recovery.hibernates:
                    connection.channel.abort()
                raise

    def _replay(self, recovery: Recovery, groups: Sequence[bytes]) -> None:
        """Bring the session in the new executor to where it was: restore the last cut and send all kept frames again.

        Args:
            recovery: what is kept.
            groups: contents of the GROUP frames that the executor needs.

        Raises:
            WoolyError: the cut cannot be restored, or a result differs.
            ChannelError: this connection broke, too.
        """
        link, connection = self._link, self._link.connection
        channel = connection.channel
        link.forget_unkept_answers()
        if recovery.stored:
            channel.send(Kind.RESTORE, RESTORE_HEAD.pack(recovery.stored))
            answer = channel.recv()
            if answer.kind == Kind.ERROR:
                raise WoolyError(str(unpack_json(answer.payload).get("message")))
        for raw in recovery.sources:
            channel.send(Kind.SOURCE, raw)
        defined = recovery.newest_programs()
        for raw in defined.values():
            channel.send(Kind.DEFINE, raw)
        for raw in groups:
            channel.send(Kind.GROUP, raw)
        numbers: dict[int, int] = {}
        other = ""
        for frame in recovery.frames:
            if frame.kind == Kind.CUT:
                continue
            if frame.kind == Kind.RUN and (missing := recovery.undefined(frame, defined)):
                channel.send(Kind.DEFINE, missing)
            sent = channel.send(frame.kind, *recovery.on_wire(frame.kind, (frame.payload,)))
            if not frame.seq:
                connection.last += 1
                frame.seq = connection.last
            numbers[sent] = frame.seq
            if frame.answer:
                other = self._compare(channel, frame) or other
            elif frame.asks:
                into = frame.into
                expected = channel.expect_frame() if into is None else channel.expect(into, Kind.DATA)
                if frame.pending is None:
                    Pending(expected, frame)
                else:
                    frame.pending.expected = expected
        self._resumed_at = connection.last
        if other:
            told = f"results that the script has read differ on {connection.kind} from those of {other}"
            recovery.say(f"wooly: {told}; the session goes on")
            recovery.note(told)
        connection.resume(channel.send(Kind.SYNC), numbers)
        done = channel.expect_frame()
        if recovery.needs_ranks:  # another rank may wait for the script, so the script must not wait for that rank
            link.abandon(Pending(done))
            return
        channel.complete(done)
        assert done.other is not None
        if done.other.kind == Kind.ERROR:
            link.note_error(done.other.payload)
            if link.log is not None:
                link.log.failed(link.log.frames)

    def _compare(self, channel: ChannelClient, frame: KeptFrame) -> str:
        """Receive an answer that the script has read before, and compare it.

        Returns:
            The kind of the executor that gave the earlier answer, if it is another kind and its answer differs; else nothing.

        Raises:
            DifferentResultError: it differs, and both executors are of one kind; or only one of the answers is an error.
        """
        kind = self._link.connection.kind
        if frame.kind == Kind.READ:
            into = memoryview(bytearray(READ_HEAD.unpack(frame.payload)[2]))
            other = channel.recv_data(into, Kind.DATA)
            answer = chunk_digest(into) if other is None else ERROR
        else:
            found = channel.recv()
            answer = ERROR if found.kind == Kind.ERROR else chunk_digest(memoryview(found.payload))
        if answer == frame.answer:
            return ""
        if ERROR in (answer, frame.answer):
            said = "fails" if answer == ERROR else "succeeds"
            raise DifferentResultError(
                f"after the recovery, an operation {said} on {kind} whose earlier answer was another: the script read it from "
                f"{frame.by or kind}"
            )
        if frame.by == kind:
            raise DifferentResultError(
                "after the recovery, a result differs from the one that the script has read, and both executors are "
                f"{kind}: the operation does not repeat"
            )
        return frame.by
