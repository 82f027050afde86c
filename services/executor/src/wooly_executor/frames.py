"""A frame of a client while the executor works on it: what the fold knows of it (`flow`), and what is done for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wooly_wis.errors import DecodeError
from wooly_wis.frames import Kind, Run, wants_reply

from wooly_executor import flow
from wooly_executor.estimates import UNKNOWN, Cut
from wooly_executor.programs import ReadyProgram
from wooly_executor.runtime.protocol import Execution

#: Frames that their clients wait for.
_ASKS = frozenset((Kind.READ, Kind.SYNC, Kind.STATS, Kind.OFFER, Kind.PIN))


@dataclass(frozen=True, slots=True)
class Failure:
    """The first thing that went wrong since the client was last answered."""

    code: str
    message: str
    seq: int
    instruction: int | None

    def to_json(self) -> dict[str, Any]:
        """Payload of an ERROR frame."""
        return {"code": self.code, "message": self.message, "seq": self.seq, "instruction": self.instruction}


@dataclass(slots=True)
class Running:
    """A program of a session that was begun and is not finished.

    Attributes:
        gpu_ns: device time so far.
        core_ns: time of cores so far.
        paced_ns: the same at full pace.
        priced_ns: what it counts for so far.
    """

    run: Run
    seq: int
    ready: ReadyProgram
    execution: Execution
    before: int
    freed: int
    prepared: Any
    gpu_ns: int = 0
    core_ns: int = 0
    paced_ns: int = 0
    priced_ns: int = 0


@dataclass(eq=False, slots=True)
class Frame(flow.Frame):
    """A frame that was received and is not processed.

    Attributes:
        cut: of a run: its kernels.
        next: the first of them that is not done.
        running: its program, once begun.
        ended: it is processed, or failed to.
        need: bytes that it lacks, where it waits for room.
        reserved: bytes that are promised to it.
        begun_ns: when its program began, or it was first looked at, where that is to be told; ns since 1970.
        decoded: what it defines, once that is decoded: the result, or what was raised.
        error: why its run could not be begun, or ended early.
    """

    cut: Cut = UNKNOWN
    next: int = 0
    running: Running | None = None
    ended: bool = False
    need: int = 0
    reserved: int = 0
    begun_ns: int = 0
    decoded: tuple[Any, Exception | None] | None = None
    error: Exception | None = None


def awaited(frame: flow.Frame) -> bool:
    """Whether the client waits for an answer."""
    return frame.kind in _ASKS or (frame.kind == Kind.RUN and _wants_reply(frame.payload))


def _wants_reply(payload: Any) -> bool:
    try:
        return wants_reply(payload)
    except DecodeError:
        return False
