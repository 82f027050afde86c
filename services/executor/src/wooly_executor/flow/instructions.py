"""What the device's thread does next for a session. Instructions have no data; they refer to `flow.next` or `flow.current`."""

from __future__ import annotations

from enum import IntEnum, auto


class Instruction(IntEnum):
    """Each instruction is answered by one of its outcomes in `Signal`."""

    #: Check whether the kernels of the next run are compiled.
    CHECK_KERNELS = 0
    #: Check whether it is known if the next run has a plan.
    CHECK_PLAN = auto()
    #: Reserve the memory that the next run needs, and submit the run to the dispatch core.
    SUBMIT = auto()
    #: Decode the next frame, a definition.
    DECODE = auto()
    #: Bring in the memory that the first frame touches.
    REACH = auto()
    #: As REACH, for the collective that was set aside.
    RESUME = auto()
    #: Process the current frame, and answer it.
    PROCESS = auto()
    #: Let other sessions have their turn first.
    YIELD = auto()
    #: Answer `flow.refusing`: the session is held.
    REFUSE = auto()
    #: Stop reading from the client, or resume it.
    STOP_READING = auto()
    READ_ON = auto()
    #: End the session for `flow.overdue`.
    END = auto()
