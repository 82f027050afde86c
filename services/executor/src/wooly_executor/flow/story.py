"""Prints the story of one session from its recorded steps: what its client sent, and what each frame waited for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from wooly_wis.frames import Kind

from wooly_executor.flow.events import ClientCame, Event, Held, Overdue, Signal
from wooly_executor.flow.instructions import Instruction
from wooly_executor.flow.state import Frame

_SIGNALS: dict[Signal, str] = {
    Signal.KERNELS_AWAITED: "waits for kernels that are being compiled",
    Signal.PLAN_AWAITED: "waits for a compiler's answer",
    Signal.ROOM_AWAITED: "waits for the runs before it to make room",
    Signal.MEMORY_AWAITED: "waits for its memory",
    Signal.DEFINITION_AWAITED: "a decoder has the definition",
    Signal.PEERS_AWAITED: "waits for the other ranks of a collective",
    Signal.SUBMITTED: "submitted to the dispatch core",
    Signal.LINK_BROKEN: "its client is gone",
    Signal.CLOSED: "closed",
    Signal.KERNELS_BUILT: "a kernel is compiled",
    Signal.PLAN_KNOWN: "the compiler has answered",
    Signal.DECODED: "the definition is decoded",
    Signal.MEMORY_CAME: "its memory is there, or cannot be had",
    Signal.PEERS_CAME: "the other ranks are there, or will not come",
    Signal.RUN_BEGUN: "the device begins a run",
    Signal.RUN_ENDED: "the device has finished the run",
    Signal.ANSWERS_UNREAD: "its client has too many unread answers",
    Signal.ANSWERS_READ: "its client has read enough of them",
    Signal.BUFFERS_LENT: "an answer is being sent from its buffers",
    Signal.BUFFERS_RETURNED: "the answer was sent",
    Signal.UPLOAD_WAITS: "an upload waits for the frames before it",
    Signal.UPLOAD_LACKS_MEMORY: "an upload waits for its memory",
    Signal.YIELDED: "other sessions have their turn",
    Signal.TURN_CAME: "its turn comes again",
    Signal.PAUSED: "suspended",
    Signal.RESUMED: "goes on",
    Signal.LEAVING: "its memory is being copied off the device",
    Signal.PREEMPTED: "its memory is being copied off the device for a higher class",
    Signal.STAYED: "its memory stays, because the session has work, or it could not be copied",
    Signal.LEFT: "its memory has left the device",
    Signal.COMING: "its memory is being copied back",
    Signal.ARRIVED: "its memory is on the device",
    Signal.READING_STOPPED: "the executor stops reading from its client",
    Signal.READING: "the executor reads from its client again",
}


def story(entries: Iterable[tuple[Event, Instruction | None]]) -> Iterator[str]:
    """One line for each step that is of interest to people."""
    for event, found in entries:
        line = _line(event)
        if line:
            yield line + (f"; {found.name.lower().replace('_', ' ')}" if found is Instruction.PROCESS else "")


def _line(event: Event) -> str:
    if isinstance(event, Frame):
        return f"frame {event.seq}: {Kind(event.kind).name} of {event.nbytes} bytes"
    if isinstance(event, ClientCame):
        return "a client came" + (", which wants plans" if event.planned else "")
    if isinstance(event, Held):
        return f"held: {event.reason}" if event.reason else "no longer held"
    if isinstance(event, Overdue):
        return f"ends: {event.reason}"
    return _SIGNALS.get(event, "")
