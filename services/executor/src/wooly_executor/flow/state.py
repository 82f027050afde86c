"""The state of the fold of one session. Only `core.step` changes it; others may read it.

Future extensions belong here: the cut and the epoch of a session that can migrate, several runs in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Any, Generic, TypeVar

from wooly_wis.frames import Kind

#: Maximum number of waiting frames, and of their bytes, before the executor stops reading from the client.
MOST_FRAMES = 4096
MOST_BYTES = 32 << 20
#: Maximum number of frames of a session in one turn, before other sessions get their turn.
TURN = 64
#: Kinds of frames that define programs or kernels; decoders decode them.
DEFINITIONS = frozenset((int(Kind.DEFINE), int(Kind.SOURCE)))
#: Kinds of frames that wait while their session is held or suspended.
WORK = DEFINITIONS | {int(Kind.RUN), int(Kind.COLLECTIVE)}
#: Kinds of frames that need the session's memory on the device, but no launch. A PIN needs its contents hashed.
#: A CUT and a RESTORE need that memory copied. A COLLECTIVE needs the frames and the memory of all ranks.
#: An IPC needs room for a copy of its own if it exports a shared content.
TOUCHES = frozenset(
    map(int, (Kind.READ, Kind.OFFER, Kind.SEAL, Kind.PIN, Kind.CUT, Kind.RESTORE, Kind.COLLECTIVE, Kind.IPC))
)
RUN = int(Kind.RUN)
#: Kinds of frames that go on while a collective before them waits for other ranks. A run that names one of the collective's
#: buffers waits, too.
OVERTAKES = DEFINITIONS | {RUN}
#: A READ needs nothing but memory on the device: if it is there, the frame is processed at once.
READ = int(Kind.READ)
COLLECTIVE = int(Kind.COLLECTIVE)


class Link(Enum):
    """The connection to the client."""

    OPENING = "opening"
    OPEN = "open"
    BROKEN = "broken"
    CLOSED = "closed"


class Residence(Enum):
    """Where a session's memory is."""

    HERE = "here"
    LEAVING = "leaving"
    #: As LEAVING, but for a session of a higher class: new work of this session does not keep the memory here.
    PREEMPTED = "preempted"
    AWAY = "away"
    COMING = "coming"


class Readiness(Enum):
    """What the next frame waits for; the values are texts for people."""

    READY = "ready"
    KERNELS = "kernels that are being compiled"
    PLAN = "a compiler's answer"
    ROOM = "the runs before it"
    MEMORY = "its memory"
    DECODER = "a decoder"
    PEERS = "the other ranks of its collective"


class Stage(Enum):
    """How far the next frame is prepared."""

    NEW = 0
    #: A run whose kernels are compiled; then also: it is known whether the run has a plan.
    COMPILED = 1
    PLANNED = 2
    #: A definition that is decoded, or another frame whose memory is on the device.
    READY = 3


@dataclass(eq=False, slots=True)
class Frame:
    """A client's frame, from its arrival to its answer.

    Attributes:
        seq: number of the frame on the channel.
        kind: a `wooly_wis.frames.Kind`.
        payload: the bytes after the header; the fold does not read them.
        nbytes: size of the payload.
        stage: how far it is prepared.
        turns: number of frames that it counts for in its session's turn.
        refused: it was answered because its session was held; it runs later.
    """

    seq: int
    kind: int
    payload: Any
    nbytes: int
    stage: Stage = Stage.NEW
    turns: int = 1
    refused: bool = False


@dataclass(slots=True)
class Hold:
    """Why definitions wait. The dispatch core holds back the runs itself.

    Attributes:
        paused: the session is suspended.
        reason: why the session is held; empty: it is not held.
    """

    paused: bool = False
    reason: str = ""


F = TypeVar("F", bound=Frame)


@dataclass(eq=False, slots=True)
class Inbox(Generic[F]):
    """Unprocessed frames in the order of their arrival: submitted runs first, then the frames that are not submitted.

    Attributes:
        frames: the frames.
        nbytes: size of all payloads.
        submitted: number of runs, from the first frame on, that the dispatch core has.
        congested: the executor does not read from the client.
        upload: the client uploads, and the bytes wait for their target.
    """

    frames: deque[F] = field(default_factory=deque)
    nbytes: int = 0
    submitted: int = 0
    congested: bool = False
    upload: bool = False


@dataclass(eq=False, slots=True)
class Flow(Generic[F]):
    """State of one session.

    Attributes:
        own_kernels: its programs may contain foreign kernels.
        planned: no program may run before it is known whether there is a plan.
        link: the connection to the client.
        inbox: unprocessed frames of the client.
        current: the frame in processing.
        readiness: what the next frame waits for.
        residence: where the session's memory is.
        hold: why definitions wait.
        running: the device has begun the first frame.
        unread: the client must read answers before any other frame is processed.
        lent: an answer may still be in transit straight from the session's buffers.
        served: number of frames processed in this turn.
        yielded: other sessions get their turn first.
        refusing: frames to refuse, because the session is held.
        aside: a collective that waits for other ranks, or whose work is in progress. Runs and definitions behind it go on.
        aside_came: something has changed for it.
        resuming: a RESUME is in progress.
        overdue: why the session must end; empty: it goes on.
        busy: an instruction is in progress.
        entries: list that records the steps; None: no record.
    """

    own_kernels: bool = False
    planned: bool = False
    link: Link = Link.OPENING
    inbox: Inbox[F] = field(default_factory=Inbox)
    current: F | None = None
    readiness: Readiness = Readiness.READY
    residence: Residence = Residence.HERE
    hold: Hold = field(default_factory=Hold)
    running: bool = False
    unread: bool = False
    lent: bool = False
    served: int = 0
    yielded: bool = False
    refusing: list[F] = field(default_factory=list)
    aside: F | None = None
    aside_came: bool = False
    resuming: bool = False
    overdue: str = ""
    busy: bool = False
    entries: list[Any] | None = None

    @property
    def next(self) -> F | None:
        """The first frame that is not submitted."""
        inbox = self.inbox
        return inbox.frames[inbox.submitted] if inbox.submitted < len(inbox.frames) else None

    @property
    def run(self) -> F | None:
        """The first frame, if it is a run."""
        frames = self.inbox.frames
        return frames[0] if frames and frames[0].kind == RUN else None

    def submitted_runs(self) -> Iterator[F]:
        """The runs that the dispatch core has, in their order."""
        return islice(self.inbox.frames, self.inbox.submitted)

    @property
    def quiet(self) -> bool:
        """Whether every frame is processed and no answer is leaving from the session's buffers."""
        return not self.inbox.frames and not self.lent and self.current is None and self.aside is None

    @property
    def parked(self) -> bool:
        """Whether the session does nothing but wait for the other ranks of its collective."""
        frame = self.next
        return (
            self.aside is not None
            and not self.inbox.submitted
            and (frame is None or frame.kind not in OVERTAKES or self.readiness is Readiness.PEERS)
        )
