"""What happens to a session. Most events carry no data: they are numbers, so that a step allocates nothing.

The arrival of a frame is the `Frame` itself (`state`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, auto

from wooly_executor.flow.state import Frame


class Signal(IntEnum):
    """Events without data. The first group are outcomes: each answers an instruction."""

    #: Outcome of CHECK_KERNELS: all kernels of the next run are compiled, or cannot be. `_AWAITED`: one is being compiled.
    KERNELS_READY = 0
    KERNELS_AWAITED = auto()
    #: Outcome of CHECK_PLAN: it is known whether the next run has a plan. `_AWAITED`: a compiler is asked.
    PLAN_READY = auto()
    PLAN_AWAITED = auto()
    #: Outcome of SUBMIT: the dispatch core has the next run. `ROOM_AWAITED`: there is no room before the earlier runs have ended.
    SUBMITTED = auto()
    ROOM_AWAITED = auto()
    #: Outcome of REACH: the memory that the first frame touches is on the device. `_AWAITED`: it was asked for.
    MEMORY_READY = auto()
    MEMORY_AWAITED = auto()
    #: Outcome of DECODE: the definition is decoded. `_AWAITED`: a decoder has it.
    DEFINITION_READY = auto()
    DEFINITION_AWAITED = auto()
    #: Outcome of PROCESS.
    PROCESSED = auto()
    #: Outcome of REFUSE.
    REFUSED = auto()
    #: Outcome of STOP_READING and of READ_ON.
    READING_STOPPED = auto()
    READING = auto()
    #: Outcome of YIELD.
    YIELDED = auto()

    #: The connection is closed; the session ends next.
    LINK_BROKEN = auto()
    #: The session is over, for whatever reason.
    CLOSED = auto()
    #: A kernel that a run waited for is compiled.
    KERNELS_BUILT = auto()
    #: A compiler has answered.
    PLAN_KNOWN = auto()
    #: A decoder is done.
    DECODED = auto()
    #: Memory that was asked for has come, or will not; contents that were being hashed are.
    MEMORY_CAME = auto()
    #: The device begins to run the first frame.
    RUN_BEGUN = auto()
    #: It is done with it, or cannot run it.
    RUN_ENDED = auto()
    #: Too many answers wait for the client. `_READ`: it has read enough of them.
    ANSWERS_UNREAD = auto()
    ANSWERS_READ = auto()
    #: An answer leaves straight from buffers. `_RETURNED`: it is gone.
    BUFFERS_LENT = auto()
    BUFFERS_RETURNED = auto()
    #: A client uploads, and frames before that are not processed. `_LACKS_MEMORY`: its memory was asked for.
    UPLOAD_WAITS = auto()
    UPLOAD_LACKS_MEMORY = auto()
    #: Other sessions have had their turn.
    TURN_CAME = auto()
    #: Somebody suspends the session, or lets it go on.
    PAUSED = auto()
    RESUMED = auto()
    #: Its memory is being copied away; it has work and stays; it is away; it is being copied back; it is here.
    LEAVING = auto()
    STAYED = auto()
    LEFT = auto()
    COMING = auto()
    ARRIVED = auto()


@dataclass(frozen=True, slots=True)
class ClientCame:
    """A client was let in. `planned`: it wants no program to run before it is known whether there is a plan."""

    planned: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """The session is held. An empty reason: it no longer is."""

    reason: str


@dataclass(frozen=True, slots=True)
class Overdue:
    """The client did not do in time what it has to; the session ends."""

    reason: str


Event = Frame | Signal | ClientCame | Held | Overdue
