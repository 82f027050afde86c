"""A client's frame while the executor processes it: the fold's part (`flow.Frame`) and the executor's own part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wooly_wis.errors import DecodeError
from wooly_wis.frames import Kind, Run, wants_reply

from wooly_executor import flow
from wooly_executor.estimates import UNKNOWN, Cut
from wooly_executor.plans.tiers import PlanRequest
from wooly_executor.programs import ReadyProgram
from wooly_executor.runtime.protocol import Execution

#: Kinds of frames whose client always waits for an answer.
_ASKS = frozenset(
    (
        Kind.READ,
        Kind.SYNC,
        Kind.STATS,
        Kind.OFFER,
        Kind.PIN,
        Kind.PROFILE,
        Kind.BUFFERS,
        Kind.CUT,
        Kind.RESTORE,
        Kind.IPC,
    )
)


@dataclass(frozen=True, slots=True)
class Failure:
    """The first failure of a session since its last answer."""

    code: str
    message: str
    seq: int
    instruction: int | None

    def to_json(self) -> dict[str, Any]:
        """Payload of an ERROR frame."""
        return {"code": self.code, "message": self.message, "seq": self.seq, "instruction": self.instruction}


@dataclass(slots=True)
class Running:
    """A program of a session that has begun and not ended.

    Attributes:
        prepared: what runs.
        trial: the plan whose trial counts this run; None: none does.
        gpu_ns: device time so far.
        core_ns: core time so far.
        paced_ns: core time so far, converted to a core at full speed.
        priced_ns: core time billed so far.
        measured: its client profiles, so the run stops after each instruction.
    """

    run: Run
    seq: int
    ready: ReadyProgram
    execution: Execution
    before: int
    freed: int
    prepared: Any
    trial: PlanRequest | None = None
    gpu_ns: int = 0
    core_ns: int = 0
    paced_ns: int = 0
    priced_ns: int = 0
    measured: bool = False


@dataclass(eq=False, slots=True)
class Frame(flow.Frame):
    """A frame that was received and is not yet processed.

    Attributes:
        cut: the kernels of a run.
        next: the first kernel that has not run.
        running: the program of the frame while it runs.
        ended: the frame was processed, with or without an error.
        need: bytes of memory that the frame lacks while it waits for room.
        reserved: bytes of memory that are reserved for it.
        begun_ns: start of its program or of its decoding, for spans; ns since 1970.
        decoded: of a definition: the decoded result or None, and the error or None.
        error: why its run could not begin, or ended early.
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
    """Whether the client waits for an answer to this frame."""
    return frame.kind in _ASKS or (frame.kind == Kind.RUN and _wants_reply(frame.payload))


def _wants_reply(payload: Any) -> bool:
    try:
        return wants_reply(payload)
    except DecodeError:
        return False
