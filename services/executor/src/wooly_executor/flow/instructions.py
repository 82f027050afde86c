"""What the device's thread is to do next for a session. They carry no data, and are about `flow.next` or `flow.current`."""

from __future__ import annotations

from enum import IntEnum, auto


class Instruction(IntEnum):
    """Each is answered by one of the outcomes that `Signal` lists."""

    #: Are the kernels of the next run compiled?
    CHECK_KERNELS = 0
    #: Is it known whether there is a plan of the next run?
    CHECK_PLAN = auto()
    #: Reserve the memory that the next run needs, and give it to the dispatch core.
    SUBMIT = auto()
    #: Decode the next frame, a definition.
    DECODE = auto()
    #: Bring in the memory that the first frame touches.
    REACH = auto()
    #: Do what the current frame asks for, and answer it.
    PROCESS = auto()
    #: Let other sessions have their turn first.
    YIELD = auto()
    #: Answer `flow.refusing`: the session is held.
    REFUSE = auto()
    #: Stop to read from the client, or read on.
    STOP_READING = auto()
    READ_ON = auto()
    #: End the session for `flow.overdue`.
    END = auto()
