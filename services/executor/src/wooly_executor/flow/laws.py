"""What always holds in a session's life, checked from outside: by tests, and by whoever looks for a fault.

- *order*: frames are processed once each, in the order of their arrival;
- *no overtaking*: a run is submitted only behind runs: never past a definition, a read or anything else that is not processed;
- *memory*: a run begins only while the session's memory is on the device, and that memory does not leave while it runs;
- *lent buffers*: nothing is submitted, and nothing but the end of a run is processed, while an answer leaves from the session's
  buffers, or while its client has too many answers to read;
- *held*: no definition is decoded while the session is held or suspended;
- *answers*: a frame is answered once: refused, or processed;
- *progress*: a session whose next frame does not go on waits for something that has a name (`waits_for`);
- *reading*: a client is not read while too much of it waits, and is read while little does.
"""

from __future__ import annotations

from typing import Any

from wooly_executor.flow.errors import FlowError
from wooly_executor.flow.events import Event
from wooly_executor.flow.instructions import Instruction
from wooly_executor.flow.state import (
    DEFINITIONS,
    MOST_BYTES,
    MOST_FRAMES,
    RUN,
    TURN,
    Flow,
    Frame,
    Link,
    Readiness,
    Residence,
    Stage,
)


class Laws:
    """Watches one session: `saw` each step."""

    def __init__(self) -> None:
        self._last = 0
        self._arrived = 0

    def saw(self, flow: Flow[Any], event: Event, found: Instruction | None) -> None:
        """One step.

        Raises:
            FlowError: it broke a law.
        """
        if flow.link is Link.CLOSED:
            _true(found is None and not flow.inbox.frames, "closed", "a closed session has something to do")
            return
        if isinstance(event, Frame):
            _true(event.seq > self._arrived, "order", "frames arrive in order")
            self._arrived = event.seq
        if found is Instruction.PROCESS:
            self._processed(flow, event)
        elif found is Instruction.SUBMIT:
            frame = flow.next
            _true(frame is not None and frame.kind == RUN, "no overtaking", "only runs are submitted")
            _true(not flow.lent and not flow.unread, "lent buffers", "a run was submitted")
        elif found is Instruction.DECODE:
            _true(not flow.hold.paused and not flow.hold.reason, "held", "a definition is decoded")
            _true(flow.next is not None and flow.next.kind in DEFINITIONS, "held", "what is decoded is a definition")
        self._books(flow)
        if found is None and not flow.busy:
            _true(flow.next is None or waits_for(flow) != "", "progress", f"nothing is waited for after {event!r}")
            inbox = flow.inbox
            much = len(inbox.frames) > MOST_FRAMES or inbox.nbytes > MOST_BYTES
            little = len(inbox.frames) < MOST_FRAMES // 2 and inbox.nbytes < MOST_BYTES // 2
            if flow.link is Link.OPEN and not flow.overdue:
                _true(inbox.congested or not much, "reading", "too much waits, and the client is read")
                _true(not inbox.congested or not little, "reading", "little waits, and the client is not read")

    def _processed(self, flow: Flow[Any], event: Event) -> None:
        frame = flow.current
        assert frame is not None
        _true(frame.seq > self._last, "order", f"frame {frame.seq} is processed after {self._last}")
        self._last = frame.seq
        if frame.kind != RUN:
            _true(not flow.lent and not flow.unread, "lent buffers", "a frame was processed")
            _true(not flow.inbox.submitted, "no overtaking", "a frame was processed past a run")
            _true(frame.kind not in DEFINITIONS or frame.stage is Stage.READY, "order", "it was not decoded")

    def _books(self, flow: Flow[Any]) -> None:
        inbox = flow.inbox
        submitted = list(inbox.frames)[: inbox.submitted]
        _true(len(submitted) == inbox.submitted, "no overtaking", "more is submitted than there is")
        _true(all(f.kind == RUN for f in submitted), "no overtaking", "a frame before a run is not processed")
        _true(inbox.nbytes == sum(f.nbytes for f in inbox.frames), "reading", "the bytes that wait are not counted")
        _true(not flow.running or flow.residence is Residence.HERE, "memory", "a run uses memory that is not there")
        _true(all(not f.refused for f in flow.refusing), "answers", "a frame is refused twice")


def waits_for(flow: Flow[Any]) -> str:
    """What the next frame of a session waits for, in words; empty: for nothing, or there is none."""
    frame, inbox = flow.next, flow.inbox
    if frame is None:
        return ""
    if flow.link is not Link.OPEN:
        return "a client" if flow.link is Link.OPENING else "its end"
    if flow.current is not None:
        return "the frame before it"
    if flow.unread:
        return "the client, which has to read its answers first"
    if flow.lent:
        return "an answer, which leaves from the session's buffers"
    if flow.readiness is not Readiness.READY:
        return str(flow.readiness.value)
    if frame.kind in DEFINITIONS and frame.stage is Stage.NEW:
        if flow.hold.reason:
            return f"the session's hold: {flow.hold.reason}"
        return "whoever suspended the session" if flow.hold.paused else ""
    if frame.kind != RUN and inbox.submitted:
        return "the runs before it"
    if flow.yielded and flow.served >= TURN:
        return "other sessions' turns"
    return ""


def _true(holds: bool, law: str, what: str) -> None:
    if not holds:
        raise FlowError(f"the law of {law} is broken: {what}")
