"""The events of a session. Most events have no data: they are numbers, so that a step allocates no memory.

The arrival of a frame is the `Frame` itself (`state`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, auto

from wooly_executor.flow.state import Frame


class Signal(IntEnum):
    """Events without data. The first group has the outcomes of instructions."""

    #: Outcome of CHECK_KERNELS: all kernels of the next run are compiled, or compiling them failed. `_AWAITED`: a kernel is being
    #: compiled.
    KERNELS_READY = 0
    KERNELS_AWAITED = auto()
    #: Outcome of CHECK_PLAN: it is known whether the next run has a plan. `_AWAITED`: a compiler was asked.
    PLAN_READY = auto()
    PLAN_AWAITED = auto()
    #: Outcome of SUBMIT: the dispatch core has the next run. `ROOM_AWAITED`: the run has no room before the earlier runs end.
    SUBMITTED = auto()
    ROOM_AWAITED = auto()
    #: Outcome of REACH and RESUME: the memory that the frame touches is on the device, and a collective can be processed.
    #: `_AWAITED`: the memory was asked for.
    MEMORY_READY = auto()
    MEMORY_AWAITED = auto()
    #: Outcome of REACH and RESUME: other ranks of the collective are not there, or the work of all ranks is in progress.
    #: Outcome of SUBMIT: the next run uses buffers of the collective before it.
    PEERS_AWAITED = auto()
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
    #: The session has ended, for any reason.
    CLOSED = auto()
    #: A kernel that a run waited for is compiled.
    KERNELS_BUILT = auto()
    #: A compiler has answered.
    PLAN_KNOWN = auto()
    #: A decoder is done.
    DECODED = auto()
    #: Requested memory is on the device, or the request failed; or all contents are hashed.
    MEMORY_CAME = auto()
    #: Something has changed for a session that waits at a collective: the ranks are there, the work is done or has failed.
    PEERS_CAME = auto()
    #: The device begins to run the first frame.
    RUN_BEGUN = auto()
    #: The device has finished the first frame, or cannot run it.
    RUN_ENDED = auto()
    #: Too many answers are unread. `_READ`: the client has read enough of them.
    ANSWERS_UNREAD = auto()
    ANSWERS_READ = auto()
    #: An answer is being sent straight from buffers. `_RETURNED`: it was sent completely.
    BUFFERS_LENT = auto()
    BUFFERS_RETURNED = auto()
    #: A client uploads, but earlier frames are not processed. `_LACKS_MEMORY`: the upload waits for the session's memory.
    UPLOAD_WAITS = auto()
    UPLOAD_LACKS_MEMORY = auto()
    #: Other sessions have had their turn.
    TURN_CAME = auto()
    #: The session is suspended or resumed through the control plane.
    PAUSED = auto()
    RESUMED = auto()
    #: The session's memory: is being copied off the device; is being copied off for a higher class; stays, because the session
    #: has work, or because it could not be copied; has left; is being copied back; is on the device.
    LEAVING = auto()
    PREEMPTED = auto()
    STAYED = auto()
    LEFT = auto()
    COMING = auto()
    ARRIVED = auto()


@dataclass(frozen=True, slots=True)
class ClientCame:
    """A client was admitted. `planned`: no program may run before it is known whether there is a plan."""

    planned: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """The session is held. An empty reason ends the hold."""

    reason: str


@dataclass(frozen=True, slots=True)
class Overdue:
    """The client exceeded a time limit. The session ends."""

    reason: str


Event = Frame | Signal | ClientCame | Held | Overdue
