"""What a client needs so that its session can go on in another executor: the frames that the session sent since its last stored
cut.

A cut is a checkpoint of the session that an executor has stored. After a loss, another executor restores the newest stored cut
(or starts empty, if there is none), and the link sends the kept frames again. Frames have no times and no random state, so the
results are the same bits. Bytes that the script has already read are compared with what is read again.

This module knows no sockets: the link sends the frames, and `reopen` finds the executor.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from wooly_bus.channel import ChannelClient, Expected, Frame
from wooly_bus.contents import chunk_digest
from wooly_wis.codec import DIGEST_SIZE, digest
from wooly_wis.externs import names_in
from wooly_wis.frames import Kind

from wooly.errors import WoolyError

if TYPE_CHECKING:
    from wooly.settings import Settings

log = logging.getLogger("wooly")
#: Bytes of kept frames, and number of kept frames, after which the client asks for a cut.
CUT_BYTES, CUT_FRAMES = 64 << 20, 20_000
#: A session waits for its cuts, and executors work on them, for at most this part of the time.
COST = 0.02
#: Bytes of kept frames up to which the client waits until a cut is stored. Above, it gives recovery up.
KEPT_BYTES = 256 << 20
#: The same for a rank of a group, which cannot wait: the other ranks may be waiting for it.
KEPT_BYTES_OF_RANK = 1 << 30
#: Bytes of a session's buffers above which a session without WOOLYAI_RECOVERY=on takes no cuts.
AUTO_BYTES = 2 << 30
#: Number of programs that an executor knows at the end of a replay. It equals `recorder.PROGRAMS_KEPT`; the recorder needs torch.
PROGRAMS_KEPT = 1024
#: Seconds between two questions whether the last cut is stored.
ASK_S = 0.5
#: Maximum number of recoveries of a session without progress, a new cut, or `HEALED_S` seconds between them.
MAX_RECOVERIES, HEALED_S = 4, 60.0
#: Kinds of frames that change a session, or whose answers a script has read.
KEPT = frozenset((Kind.RUN, Kind.WRITE, Kind.SEAL, Kind.READ, Kind.COLLECTIVE))
#: Answer of a frame that was answered by an error.
ERROR = b"error"


class Pending:
    """An answer that is expected.

    Attributes:
        expected: what the channel will receive. After a recovery, another channel receives it.
        frame: the kept frame that is answered; None: no frame is kept for it.
        tell: is told the digest of the answer, or `ERROR`; None: nobody records the session.
    """

    __slots__ = ("expected", "frame", "tell")

    def __init__(self, expected: Expected, frame: KeptFrame | None = None) -> None:
        self.expected, self.frame = expected, frame
        self.tell: Callable[[bytes], None] | None = None
        if frame is not None:
            frame.pending = self

    def answered(self, other: Frame | None, into: memoryview | None = None, *, by: str) -> None:
        """Note the answer: one frame, or what was received into memory. `by`: the kind of the executor."""
        if self.frame is None and self.tell is None:
            return
        if other is not None:
            answer = ERROR if other.kind == Kind.ERROR else chunk_digest(memoryview(other.payload))
        else:
            answer = chunk_digest(memoryview(b"") if into is None else into)
        if self.frame is not None:
            self.frame.answered(answer, by)
        if self.tell is not None:
            self.tell(answer)


class KeptFrame:
    """One frame since the last stored cut.

    Attributes:
        kind: kind of the frame; CUT: the place of a cut.
        payload: its payload.
        seq: its number, as the link counts.
        into: memory for the answer to a READ that is not answered.
        asks: the executor answers it.
        pending: the answer, if it is expected.
        answer: digest of the answer, or `ERROR`; empty: not answered.
        by: the kind of the executor that answered.
    """

    __slots__ = ("answer", "asks", "by", "into", "kind", "payload", "pending", "seq")

    def __init__(self, kind: Kind, payload: bytes) -> None:
        self.kind, self.payload = kind, payload
        self.seq = 0
        self.into: memoryview | None = None
        self.asks = False
        self.pending: Pending | None = None
        self.answer, self.by = b"", ""

    def answered(self, answer: bytes, by: str) -> None:
        """Note the digest of the answer, or `ERROR`, and the kind of the executor."""
        self.answer, self.by, self.into, self.pending = answer, by, None, None


class Reopened(NamedTuple):
    """A session that was opened again.

    Attributes:
        channel: a connected channel to its executor.
        session_id: id of the session.
        token: token for the executor.
        where: name and endpoint of the executor, for messages.
    """

    channel: ChannelClient
    session_id: str
    token: str
    where: str


class DifferentResultError(WoolyError):
    """After a recovery, an executor computed another result than the one that the script has read."""

    code = "wooly.different_result"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class OtherRanks(Protocol):
    """The other ranks of a program, whose sessions go on elsewhere together with this one (`wooly.distributed.together`).

    Attributes:
        over: why they cannot any more; empty: they can.
    """

    over: str

    def on_wire(self, payload: bytes) -> bytes:
        """The payload of a COLLECTIVE frame as it is sent now."""

    def holds(self, number: int) -> bool:
        """Whether a stored cut is this session's part of a cut of all ranks. The other ranks learn that it is stored."""

    def taken(self, cut: int, number: int) -> None:
        """A cut of all ranks was asked for, under a number of this session."""

    def failed(self) -> None:
        """The last cut was not taken, or not stored."""

    def can_go_back(self) -> bool:
        """Whether all ranks can go on elsewhere together."""

    def go_back(self) -> None:
        """This session leaves its executor: let all ranks go back. Raises WoolyError."""

    def meet(self, broken: Callable[[], bool], recovery: Recovery) -> list[bytes]:
        """Wait until all ranks have gone back. Returns contents of GROUP frames. Raises WoolyError and ChannelClosedError."""

    def end(self, why: str) -> None:
        """From now on, the ranks cannot go back any more, because this one cannot."""


class Recovery:
    """The kept frames of one session, and when it needs a cut.

    Args:
        reopen: opens the session at another executor. It gets the reason, the number of the cut that this executor must have (0:
            none), and whether the session still has its executor. It raises WoolyError.
        hibernate: tells the controller that the session has no executor any more. It gets the number of the last cut, and the
            reason. It raises WoolyError.
        always: take cuts of a session of any size.
        every_s: minimum seconds between two cuts that only time makes due; 0: take a cut after each program.
        say: prints a line.
        note: adds a line to the story of the session's task.
        left: whether the session has left this executor, because of another one of its devices.
        around: a context for the time in which the session goes on elsewhere, because of the reason that it gets.
        clock: returns monotonic seconds.

    Attributes:
        frames: the kept frames.
        nbytes: bytes of their payloads.
        programs: definitions by digest, least recently used first.
        sources: kernel sources.
        number: number of the last cut that was asked for.
        saved: number of the newest cut that is known to be stored; 0: none.
        stored: number of the cut from which the session would go on: the newest stored one; of a rank of a group, the newest one
            that all ranks have stored; 0: none.
        together: the other ranks with which the session goes on elsewhere; None: it goes on alone.
        tied: a kept frame was sent that needs other ranks.
        answer: the expected answer to the last CUT frame; None: it was answered.
        failure: why the last cut was not taken or not stored; empty if it was.
        hibernates: the session has no executor.
        resumed: seconds for which the script waited when the session last went on elsewhere, and number of frames that were sent
            again; None: it was told.
    """

    def __init__(
        self,
        reopen: Callable[[str, int, bool], Reopened],
        hibernate: Callable[[int, str], None],
        *,
        always: bool = False,
        every_s: float = 10.0,
        say: Callable[[str], None] = _say,
        note: Callable[[str], None] = lambda line: None,
        left: Callable[[], bool] = lambda: False,
        around: Callable[[str], AbstractContextManager[object]] = nullcontext,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reopen, self.hibernate, self._always, self.say, self._clock = reopen, hibernate, always, say, clock
        self.every_s, self.note, self.left, self.around = every_s, note, left, around
        self.frames: deque[KeptFrame] = deque()
        self.nbytes = 0
        self.programs: OrderedDict[bytes, bytes] = OrderedDict()
        self.sources: list[bytes] = []
        self.number = self.saved = self.stored = 0
        self.together: OtherRanks | None = None
        self.tied = False
        self.answer: Expected | None = None
        self.failure = ""
        self.hibernates = False
        self.resumed: tuple[float, int] | None = None
        #: Why the executor stores nothing, and why the session is too large; empty: it does, it is not.
        self._refused = self._too_large = ""
        self._told = False
        self._taken = 0
        self._next_cut = clock() + every_s
        self._next_question = 0.0
        self._recent: deque[float] = deque(maxlen=MAX_RECOVERIES)

    # -- keeping frames ----------------------------------------------------------------------------------------------

    def keep(
        self, kind: Kind, buffers: tuple[Any, ...], into: memoryview | None = None, *, asks: bool = False
    ) -> KeptFrame:
        """Keep a frame that is about to be sent.

        Args:
            kind: its kind.
            buffers: its payload.
            into: memory for the answer to a READ.
            asks: the executor answers it.
        """
        payload = bytes(buffers[0]) if len(buffers) == 1 else b"".join(buffers)
        frame = KeptFrame(kind, payload)
        frame.into, frame.asks = into, asks
        self.frames.append(frame)
        self.nbytes += len(payload)
        self.tied = self.tied or kind == Kind.COLLECTIVE
        if kind == Kind.RUN and payload[:DIGEST_SIZE] in self.programs:
            self.programs.move_to_end(payload[:DIGEST_SIZE])
        return frame

    def drop(self, frame: KeptFrame) -> None:
        """Forget the last frame, which was not sent."""
        if self.frames and self.frames[-1] is frame:
            self.frames.pop()
            self.nbytes -= len(frame.payload)

    def define(self, raw: bytes) -> None:
        """Keep the definition of a program."""
        self.programs[digest(raw)] = raw

    # -- cuts --------------------------------------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """Whether to ask for a cut now, or whether the last cut is stored."""
        if self.answer is not None or self._refused or self._too_large:
            return False
        if self._taken > self.saved:
            return self._clock() >= self._next_question
        return self.alone and self.wants_cut

    @property
    def alone(self) -> bool:
        """Whether the session may take cuts when it wants. Otherwise, all ranks take them together."""
        return self.together is None or not self.tied or bool(self.together.over)

    @property
    def wants_cut(self) -> bool:
        """Whether so much or such old work is kept that a cut should be taken."""
        return not (self._refused or self._too_large) and (
            self.nbytes > CUT_BYTES
            or len(self.frames) > CUT_FRAMES
            or (bool(self.frames) and self._clock() >= self._next_cut)
        )

    @property
    def needs_ranks(self) -> bool:
        """Whether other ranks must repeat their part of what is kept."""
        return any(frame.kind == Kind.COLLECTIVE for frame in self.frames)

    def on_wire(self, kind: Kind, buffers: tuple[Any, ...]) -> tuple[Any, ...]:
        """The payload of a frame as it is sent now. `keep` gets it without the change."""
        if kind == Kind.COLLECTIVE and self.together is not None:
            return (self.together.on_wire(buffers[0]),)
        return buffers

    @property
    def complete(self) -> bool:
        """Whether the newest stored cut has everything that the session did."""
        return not self.frames and self.stored == self.number

    @property
    def over(self) -> bool:
        """Whether so much is kept that the client waits until a cut is stored, or gives recovery up."""
        return self.nbytes > (KEPT_BYTES if self.alone else KEPT_BYTES_OF_RANK)

    def begin(self, *, new: bool = False) -> int:
        """The number of the cut to ask for; 0: ask only whether the last one is stored. `new`: ask for a cut in any case."""
        if self._taken > self.saved and not new:
            self._next_question = self._clock() + ASK_S
            return 0
        self.number += 1
        mark = KeptFrame(Kind.CUT, b"")
        mark.seq = self.number
        self.frames.append(mark)
        return self.number

    def taken(self, answer: dict[str, Any]) -> None:
        """Process the answer to a CUT."""
        now = self._clock()
        stored, self._taken = int(answer["stored"]), int(answer["taken"])
        if stored > self.saved:
            self.saved = stored
            if self.together is None or not self.together.holds(stored):
                self.keep_from(stored)
            pause, store = int(answer["pause_ns"]) / 1e9, int(answer["store_ns"]) / 1e9
            self._next_cut = now + (max(self.every_s, (pause + store) / COST) if self.every_s else 0)
        elif self._taken > stored and not answer["error"]:
            self._next_question = now + ASK_S
        else:
            self._next_cut = now + self.every_s
        self.failure = str(answer["error"])
        if answer["error"]:  # the last cut was not taken or not stored; another one may be
            self._taken = stored
            if self.together is not None:
                self.together.failed()
            if not self._told:
                log.warning("a checkpoint of this session is missing: %s", answer["error"])
            self._told = True
            if self.over or answer.get("never"):
                self._refused = str(answer["error"])
        if not self._always and int(answer["held"]) > AUTO_BYTES:
            self._too_large = f"the session has {int(answer['held'])} bytes, and WOOLYAI_RECOVERY is not `on`"

    def failed(self) -> None:
        """The CUT was answered by an error of the session: there is no cut, and the answer has taken the error."""
        self._next_cut = self._clock() + self.every_s
        if self.together is not None:
            self.together.failed()
        self.failure = "an operation of the session failed"
        frame = KeptFrame(Kind.SYNC, b"")
        frame.seq = -1  # no frame of the session has this number
        frame.answered(ERROR, "")
        self.frames.append(frame)

    def keep_from(self, stored: int) -> None:
        """Forget the frames before a stored cut. The session goes on from there, if it goes on elsewhere."""
        frames = self.frames
        if any(f.kind == Kind.CUT and f.seq == stored for f in frames):
            while frames:
                gone = frames.popleft()
                self.nbytes -= len(gone.payload)
                if gone.kind == Kind.CUT and gone.seq == stored:
                    break
        self.stored = stored
        self.saved, self._taken = max(self.saved, stored), max(self._taken, stored)
        while len(self.programs) > PROGRAMS_KEPT:
            self.programs.popitem(last=False)
        self._recent.clear()

    @property
    def given_up(self) -> str:
        """Why the session cannot go on elsewhere any more; empty if it can."""
        if self._too_large:
            return self._too_large
        return (self._refused or "its checkpoints are stored too slowly") if self.over else ""

    def tell_given_up(self, why: str) -> None:
        """Say that the session cannot go on elsewhere any more, if the user has asked for it."""
        if self._always:
            self.say(f"wooly: this session cannot go on in another executor any more: {why}")
        else:
            log.info("this session cannot go on in another executor any more: %s", why)

    def newest_programs(self) -> OrderedDict[bytes, bytes]:
        """The programs that the recorder may name without defining them, least recently used first."""
        return OrderedDict(list(self.programs.items())[-PROGRAMS_KEPT:])

    def undefined(self, run: KeptFrame, defined: OrderedDict[bytes, bytes]) -> bytes:
        """The definition of a kept run's program, if the executor has none; empty if it has. Updates `defined`."""
        name = run.payload[:DIGEST_SIZE]
        if name in defined:
            defined.move_to_end(name)
            return b""
        defined[name] = raw = self.programs[name]
        if len(defined) > PROGRAMS_KEPT:
            defined.popitem(last=False)
        return raw

    # -- going on ----------------------------------------------------------------------------------------------------

    def begun(self, *, progress: bool) -> bool:
        """A recovery begins. Returns False if the session was recovered too often lately without getting any further.

        Args:
            progress: since the last recovery, an executor has processed a frame that none had processed before. So it is not the
                session that ends executors.
        """
        now = self._clock()
        if progress:
            self._recent.clear()
        if len(self._recent) == MAX_RECOVERIES and now - self._recent[0] < HEALED_S:
            return False
        self._recent.append(now)
        self.answer = None
        self._taken = self.saved = self.stored
        return True


def stateful_operator(program: bytes, libraries: Mapping[str, Mapping[str, Any]]) -> str:
    """Why a session with this program cannot go on elsewhere: it calls native code that may keep values outside of buffers.

    Args:
        program: the canonical bytes of the program.
        libraries: the extension libraries that the executor offers, from its WELCOME.

    Returns:
        The reason; empty: the program calls no such code.
    """
    library_of = {name: library for library, facts in libraries.items() for name in facts.get("stateful", ())}
    found = next((name for name in names_in(program) if name in library_of), "") if library_of else ""
    if not found:
        return ""
    library = library_of[found]
    return (
        f"the operator {found} is native code of {library}, which may keep values outside of buffers, and checkpoints have "
        f"buffers only. If it keeps none, add {library} to WOOLY_EXECUTOR_STATELESS_LIBRARIES of the executors"
    )


def wanted(settings: Settings) -> bool:
    """Whether the session of these settings is to go on after the loss of its executor."""
    return settings.recovery != "off"
