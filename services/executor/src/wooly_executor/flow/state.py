"""What the fold remembers of one session. `core.step` alone changes it; everybody may read.

Other dimensions of a session's life get their place here when they are built: the cut and the epoch of a session that can move,
the peers of a collective, several runs in flight.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, TypeVar

from wooly_wis.frames import Kind

#: Frames, and bytes of them, that wait before the client is read no further.
MOST_FRAMES = 4096
MOST_BYTES = 32 << 20
#: Frames of a session that are processed before other sessions have their turn.
TURN = 64
#: Frames that define programs or kernels: decoders take them in.
DEFINITIONS = frozenset((int(Kind.DEFINE), int(Kind.SOURCE)))
#: Frames that wait while their session is held or suspended.
WORK = DEFINITIONS | {int(Kind.RUN)}
#: Frames that need the session's memory on the device, and not the device; a PIN needs its contents hashed.
TOUCHES = frozenset((int(Kind.READ), int(Kind.OFFER), int(Kind.SEAL), int(Kind.PIN)))
RUN = int(Kind.RUN)


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
    AWAY = "away"
    COMING = "coming"


class Readiness(Enum):
    """What the next frame waits for."""

    READY = "ready"
    KERNELS = "kernels that are being compiled"
    PLAN = "a compiler's answer"
    ROOM = "the runs before it"
    MEMORY = "its memory"
    DECODER = "a decoder"


class Stage(Enum):
    """What is known of the next frame."""

    NEW = 0
    #: A run: its kernels are compiled; it is known whether it has a plan, too.
    COMPILED = 1
    PLANNED = 2
    #: A definition: it is decoded. Any other frame: its memory is reachable.
    READY = 3


@dataclass(eq=False, slots=True)
class Frame:
    """A frame of a client, from its arrival until it is answered.

    Attributes:
        seq: its number, as the channel counts.
        kind: a `wooly_wis.frames.Kind`.
        payload: what follows its header; the fold does not look at it.
        nbytes: of the payload.
        stage: what is known of it.
        turns: how many frames it counts for, of those that its session may have processed in a turn.
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
    """Why definitions wait. The dispatch core holds back the runs.

    Attributes:
        paused: somebody suspended the session.
        reason: why it is held beside that; empty: it is not.
    """

    paused: bool = False
    reason: str = ""


F = TypeVar("F", bound=Frame)


@dataclass(eq=False, slots=True)
class Inbox(Generic[F]):
    """Frames that are not processed, in the order of their arrival: runs that were submitted, then those that were not.

    Attributes:
        frames: the frames.
        nbytes: of all their payloads.
        submitted: how many runs, from the first frame on, the dispatch core has.
        congested: the client is read no further.
        upload: the client uploads, and its bytes wait for their place.
    """

    frames: deque[F] = field(default_factory=deque)
    nbytes: int = 0
    submitted: int = 0
    congested: bool = False
    upload: bool = False


@dataclass(eq=False, slots=True)
class Flow(Generic[F]):
    """One session.

    Attributes:
        own_kernels: its programs may have kernels that its client sent.
        planned: it runs no program before it is known whether there is a plan.
        link: the connection to its client.
        inbox: what its client asked for.
        current: the frame that is being processed.
        readiness: what the next frame waits for.
        residence: where its memory is.
        hold: why definitions wait.
        running: the device has begun its first frame.
        unread: its client has to read answers before anything else is processed.
        lent: an answer may still be leaving straight from its buffers.
        served: frames that were processed in this turn.
        yielded: other sessions have their turn first.
        refusing: frames to answer, as the session is held.
        overdue: why it is to end; empty: it is not.
        busy: an instruction is being carried out.
        entries: where steps are recorded; None: nowhere.
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
    overdue: str = ""
    busy: bool = False
    entries: list[Any] | None = None

    @property
    def next(self) -> F | None:
        """The first frame that was not submitted."""
        inbox = self.inbox
        return inbox.frames[inbox.submitted] if inbox.submitted < len(inbox.frames) else None

    @property
    def run(self) -> F | None:
        """The first frame, if it is a run."""
        frames = self.inbox.frames
        return frames[0] if frames and frames[0].kind == RUN else None

    @property
    def quiet(self) -> bool:
        """Whether every frame is processed and no answer is leaving from the session's buffers."""
        return not self.inbox.frames and not self.lent and self.current is None
