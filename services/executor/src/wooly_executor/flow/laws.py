"""The invariants of a session's life. Tests check them from outside.

- *order*: frames are processed once each, in the order of their arrival, except that a collective that was set aside comes later;
- *no overtaking*: a run is submitted only behind runs, never before a definition, a read or another unprocessed frame;
- *aside*: while a collective is set aside, nothing but runs and definitions is processed, and no other collective begins;
- *memory*: a run begins only while the session's memory is on the device, and that memory stays there while the run lasts;
- *lent buffers*: while an answer is sent from the session's buffers, or too many answers are unread, nothing is submitted, and
  nothing but the end of a run is processed;
- *held*: no definition is decoded while the session is held or suspended;
- *answers*: a frame is answered once: refused, or processed;
- *progress*: if a session's next frame does not proceed, the frame waits for something that `waits_for` names;
- *reading*: a client is not read while too many of its frames wait, and is read while few wait.
"""

from __future__ import annotations

from typing import Any

from wooly_executor.flow.errors import FlowError
from wooly_executor.flow.events import Event
from wooly_executor.flow.instructions import Instruction
from wooly_executor.flow.state import (
    COLLECTIVE,
    DEFINITIONS,
    MOST_BYTES,
    MOST_FRAMES,
    OVERTAKES,
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
    """Watches one session: call `saw` for each step."""

    def __init__(self) -> None:
        self._last = 0
        self._arrived = 0
        self._aside = 0

    def saw(self, flow: Flow[Any], event: Event, found: Instruction | None) -> None:
        """Check one step.

        Raises:
            FlowError: the step broke a law.
        """
        if flow.link is Link.CLOSED:
            _true(found is None and not flow.inbox.frames, "closed", "a closed session has something to do")
            return
        if isinstance(event, Frame):
            _true(event.seq > self._arrived, "order", "frames arrived out of order")
            self._arrived = event.seq
        if flow.aside is not None:
            _true(self._aside in (0, flow.aside.seq), "aside", "a collective began before another one had ended")
            self._aside = flow.aside.seq
        if found is Instruction.PROCESS:
            self._processed(flow, event)
        elif found is Instruction.SUBMIT:
            frame = flow.next
            _true(frame is not None and frame.kind == RUN, "no overtaking", "a frame was submitted that is not a run")
            _true(not flow.lent and not flow.unread, "lent buffers", "a run was submitted")
        elif found is Instruction.DECODE:
            _true(not flow.hold.paused and not flow.hold.reason, "held", "a definition is decoded")
            _true(
                flow.next is not None and flow.next.kind in DEFINITIONS,
                "held",
                "a frame was decoded that is not a definition",
            )
        self._books(flow)
        if found is None and not flow.busy:
            _true(
                flow.next is None or waits_for(flow) != "",
                "progress",
                f"the next frame neither proceeds nor waits after {event!r}",
            )
            inbox = flow.inbox
            much = len(inbox.frames) > MOST_FRAMES or inbox.nbytes > MOST_BYTES
            little = len(inbox.frames) < MOST_FRAMES // 2 and inbox.nbytes < MOST_BYTES // 2
            if flow.link is Link.OPEN and not flow.overdue:
                _true(inbox.congested or not much, "reading", "too many frames wait, but the client is read")
                _true(not inbox.congested or not little, "reading", "few frames wait, but the client is not read")

    def _processed(self, flow: Flow[Any], event: Event) -> None:
        frame = flow.current
        assert frame is not None
        resumed = frame.seq == self._aside
        _true(frame.seq > self._last or resumed, "order", f"frame {frame.seq} is processed after {self._last}")
        self._last = max(self._last, frame.seq)
        _true(flow.aside is None or frame.kind in OVERTAKES, "aside", f"frame {frame.seq} overtakes a collective")
        if resumed:
            self._aside = 0
        if frame.kind != RUN:
            _true(not flow.lent and not flow.unread, "lent buffers", "a frame was processed")
            _true(not flow.inbox.submitted or resumed, "no overtaking", "a frame was processed past a run")
            _true(
                frame.kind not in DEFINITIONS or frame.stage is Stage.READY,
                "order",
                "a definition was processed that is not decoded",
            )

    def _books(self, flow: Flow[Any]) -> None:
        inbox = flow.inbox
        submitted = list(inbox.frames)[: inbox.submitted]
        _true(len(submitted) == inbox.submitted, "no overtaking", "more runs are submitted than frames wait")
        _true(all(f.kind == RUN for f in submitted), "no overtaking", "a run was submitted before an unprocessed frame")
        _true(inbox.nbytes == sum(f.nbytes for f in inbox.frames), "reading", "the count of waiting bytes is wrong")
        _true(
            not flow.running or flow.residence is Residence.HERE,
            "memory",
            "a run uses memory that is not on the device",
        )
        _true(all(not f.refused for f in flow.refusing), "answers", "a frame is refused twice")


def waits_for(flow: Flow[Any]) -> str:
    """What the next frame of a session waits for, in words. Empty: the frame does not wait, or there is no frame."""
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
    if frame.kind in DEFINITIONS | {COLLECTIVE} and frame.stage is Stage.NEW:
        if flow.hold.reason:
            return f"the session's hold: {flow.hold.reason}"
        if flow.hold.paused:
            return "the session to be resumed"
    if frame.kind != RUN and inbox.submitted:
        return "the runs before it"
    if frame.kind not in OVERTAKES and flow.aside is not None:
        return str(Readiness.PEERS.value)
    if flow.yielded and flow.served >= TURN:
        return "other sessions' turns"
    return ""


def _true(holds: bool, law: str, what: str) -> None:
    if not holds:
        raise FlowError(f"the law of {law} is broken: {what}")
