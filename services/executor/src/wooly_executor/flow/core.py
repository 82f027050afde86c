"""The rule of a session's life: `step` takes an event and returns the next instruction.

Frames are processed in the order of their arrival. Runs are submitted to the dispatch core before their turn, so that the device
need not wait for this thread. A run is submitted only behind other runs, never behind another kind of frame. Nothing begins while
an answer is sent straight from the session's buffers, or while its client has too many unread answers.

A collective that waits for other ranks is set aside. Definitions, and runs that do not use its buffers, go on meanwhile, so the
device computes while data travels. All other frames wait for its end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wooly_wis.frames import Kind

from wooly_executor.flow.errors import FlowError
from wooly_executor.flow.events import ClientCame, Event, Held, Overdue, Signal
from wooly_executor.flow.instructions import Instruction
from wooly_executor.flow.state import (
    COLLECTIVE,
    DEFINITIONS,
    MOST_BYTES,
    MOST_FRAMES,
    OVERTAKES,
    READ,
    RUN,
    TOUCHES,
    TURN,
    WORK,
    Flow,
    Frame,
    Link,
    Readiness,
    Residence,
    Stage,
)

#: Members of enumerations, by names of this module: looked up on its class, a member costs as much as a handler.
_CLOSED = Link.CLOSED
_END = Instruction.END
_PROCESS = Instruction.PROCESS
_REFUSE = Instruction.REFUSE
_STAGE_NEW = Stage.NEW
_CHECK_KERNELS = Instruction.CHECK_KERNELS
_STAGE_PLANNED = Stage.PLANNED
_CHECK_PLAN = Instruction.CHECK_PLAN
_SUBMIT = Instruction.SUBMIT
_DECODE = Instruction.DECODE
_REACH = Instruction.REACH
_RESUME = Instruction.RESUME
_YIELD = Instruction.YIELD
_READ_ON = Instruction.READ_ON
_STOP_READING = Instruction.STOP_READING
_READY = Readiness.READY
_OPENING = Link.OPENING
_OPEN = Link.OPEN
_BROKEN = Link.BROKEN
_WAITS_DECODER = Readiness.DECODER
_STAGE_READY = Stage.READY
_MEMORY_HERE = Residence.HERE
_WAITS_ROOM = Readiness.ROOM
_WAITS_MEMORY = Readiness.MEMORY
_WAITS_PEERS = Readiness.PEERS
#: Signals up to this one are outcomes of instructions.
_LAST_OUTCOME = Signal.YIELDED
_SOURCE = int(Kind.SOURCE)
#: Signals after which no instruction can follow: they forbid something, or say where the session's memory is.
NOTES = frozenset(
    (
        Signal.LINK_BROKEN,
        Signal.CLOSED,
        Signal.RUN_BEGUN,
        Signal.ANSWERS_UNREAD,
        Signal.BUFFERS_LENT,
        Signal.UPLOAD_WAITS,
        Signal.UPLOAD_LACKS_MEMORY,
        Signal.LEAVING,
        Signal.PREEMPTED,
        Signal.STAYED,
        Signal.LEFT,
        Signal.COMING,
        Signal.ARRIVED,
    )
)


def step(flow: Flow[Any], event: Event) -> Instruction | None:
    """Feed an event.

    Returns:
        The next instruction; its outcome is the next event. None: nothing to do before another event, or an instruction is in
        progress.

    Raises:
        FlowError: the event is impossible in this state.
    """
    if flow.link is _CLOSED:
        return None
    if isinstance(event, Signal):
        if event <= _LAST_OUTCOME:
            flow.busy = False
        _SIGNALS[event](flow)
    else:
        _others(flow, event)
    found = None if flow.busy else _next(flow)
    if found is not None:
        flow.busy = True
    if flow.entries is not None:
        flow.entries.append((event, found))
    return found


def note(flow: Flow[Any], signal: Signal) -> None:
    """Feed a signal after which no instruction can follow: one of `NOTES`.

    Raises:
        FlowError: the event is impossible in this state.
    """
    if flow.link is _CLOSED:
        return
    if not _NOTED[signal]:
        raise FlowError(f"{signal.name} may lead to an instruction: it is not to be noted")
    _SIGNALS[signal](flow)
    if flow.entries is not None:
        flow.entries.append((signal, None))


def _next(flow: Flow[Any]) -> Instruction | None:
    if flow.overdue:
        return _END
    if flow.link is not _OPEN:
        return None
    if flow.current is not None:
        return _PROCESS
    if flow.refusing:
        return _REFUSE
    if flow.aside_came and not flow.unread and not flow.lent and not flow.hold.paused and not flow.hold.reason:
        flow.aside_came, flow.resuming = False, True
        return _RESUME
    inbox = flow.inbox
    waiting, submitted = len(inbox.frames), inbox.submitted
    if submitted < waiting and not flow.unread and not flow.lent:
        found = _begin(flow, inbox.frames[submitted])
        if found is not None:
            return found
    if inbox.congested or inbox.upload or waiting > MOST_FRAMES or inbox.nbytes > MOST_BYTES:
        return _reading(flow)
    return None


def _begin(flow: Flow[Any], frame: Frame) -> Instruction | None:
    """The instruction that the next frame needs."""
    if flow.readiness is not _READY:
        return None
    kind, stage = frame.kind, frame.stage
    if kind == RUN:
        if flow.own_kernels and stage is _STAGE_NEW:
            return _CHECK_KERNELS
        if flow.planned and stage is not _STAGE_PLANNED:
            return _CHECK_PLAN
        return _SUBMIT
    if kind in DEFINITIONS and stage is _STAGE_NEW:  # decoded while the runs before it are in progress
        return None if flow.hold.paused or flow.hold.reason else _DECODE
    if flow.inbox.submitted or flow.yielded or (flow.aside is not None and kind not in OVERTAKES):
        return None
    if kind in TOUCHES and stage is _STAGE_NEW and (kind != READ or flow.residence is not _MEMORY_HERE):
        if kind == COLLECTIVE and (flow.hold.paused or flow.hold.reason):
            return None
        return _REACH
    if flow.served >= TURN:  # even if no other session is open: a new client may be waiting for admission
        return _YIELD
    flow.served += frame.turns
    _take(flow)
    return _PROCESS


def _take(flow: Flow[Any]) -> None:
    """Make the first frame the current one."""
    inbox = flow.inbox
    flow.current = frame = inbox.frames.popleft()
    inbox.nbytes -= frame.nbytes


def _reading(flow: Flow[Any]) -> Instruction | None:
    """Whether to stop or to resume reading from the client."""
    inbox = flow.inbox
    waiting = len(inbox.frames)
    if inbox.congested:
        if waiting < MOST_FRAMES // 2 and inbox.nbytes < MOST_BYTES // 2:
            return _READ_ON
    elif waiting > MOST_FRAMES or inbox.nbytes > MOST_BYTES:
        return _STOP_READING
    if inbox.upload and not waiting and not flow.lent and flow.readiness is _READY and flow.aside is None:
        return _READ_ON
    return None


# -- events with data ----------------------------------------------------------------------------------------------------


def _others(flow: Flow[Any], event: Event) -> None:
    if isinstance(event, Frame):
        inbox = flow.inbox
        inbox.frames.append(event)
        inbox.nbytes += event.nbytes
        if flow.hold.reason and (flow.aside is not None or any(f.kind in WORK for f in inbox.frames)):
            flow.refusing.append(event)
    elif isinstance(event, Held):
        flow.hold.reason = event.reason
        if event.reason:
            flow.refusing = _stuck(flow)
    elif isinstance(event, Overdue):
        flow.overdue = event.reason
    else:
        assert isinstance(event, ClientCame)
        if flow.link is not _OPENING:
            raise FlowError("a client arrived, but the session already has one")
        flow.link, flow.planned = _OPEN, event.planned


def _stuck(flow: Flow[Any]) -> list[Frame]:
    """The frames that wait as long as the session is held: its first run, definition or collective, and all frames behind it."""
    found: list[Frame] = []
    for frame in flow.inbox.frames:
        if found or frame.kind in WORK or flow.aside is not None:
            found.append(frame)
    return [frame for frame in found if not frame.refused]


# -- signals -------------------------------------------------------------------------------------------------------------


def _next_is(stage: Stage) -> Callable[[Flow[Any]], None]:
    def outcome(flow: Flow[Any]) -> None:
        frame = flow.next
        if frame is None:
            raise FlowError("an outcome of an instruction arrived, but no frame is waiting")
        frame.stage = stage

    return outcome


def _wait_for(readiness: Readiness) -> Callable[[Flow[Any]], None]:
    def outcome(flow: Flow[Any]) -> None:
        flow.readiness = readiness

    return outcome


def _came(readiness: Readiness) -> Callable[[Flow[Any]], None]:
    """The next frame can go on. If it waits for something else by now, the event is late and has no effect."""

    def event(flow: Flow[Any]) -> None:
        if flow.readiness is readiness:
            flow.readiness = _READY

    return event


def _memory_ready(flow: Flow[Any]) -> None:
    if flow.resuming:
        flow.resuming, flow.current, flow.aside = False, flow.aside, None
    else:
        _next_is(_STAGE_READY)(flow)


def _memory_awaited(flow: Flow[Any]) -> None:
    if flow.resuming:
        flow.resuming = False
    else:
        flow.readiness = _WAITS_MEMORY


def _memory_came(flow: Flow[Any]) -> None:
    flow.aside_came = flow.aside is not None
    if flow.readiness is _WAITS_MEMORY:
        flow.readiness = _READY


def _peers_awaited(flow: Flow[Any]) -> None:
    if flow.resuming:
        flow.resuming = False
        return
    frame = flow.next
    if frame is None or (frame.kind != COLLECTIVE and flow.aside is None):
        raise FlowError("a frame waits for other ranks, but there is no collective")
    if frame.kind == COLLECTIVE:
        _take(flow)
        flow.aside, flow.current = flow.current, None
    else:
        flow.readiness = _WAITS_PEERS


def _peers_came(flow: Flow[Any]) -> None:
    flow.aside_came = flow.aside is not None


def _submitted(flow: Flow[Any]) -> None:
    frame = flow.next
    if frame is None or frame.kind != RUN:
        raise FlowError("a frame was submitted that is not a run")
    flow.inbox.submitted += 1


def _processed(flow: Flow[Any]) -> None:
    frame = flow.current
    if frame is None:
        raise FlowError("no frame was being processed")
    flow.current = None
    if frame.kind == _SOURCE:
        flow.own_kernels = True
    elif frame.kind == COLLECTIVE and flow.readiness is _WAITS_PEERS:
        flow.readiness = _READY


def _refused(flow: Flow[Any]) -> None:
    flow.refusing = []


def _reading_stopped(flow: Flow[Any]) -> None:
    flow.inbox.congested = True


def _reading_on(flow: Flow[Any]) -> None:
    flow.inbox.congested = flow.inbox.upload = False


def _yielded(flow: Flow[Any]) -> None:
    flow.yielded = True


def _broken(flow: Flow[Any]) -> None:
    flow.link = _BROKEN


def _closed(flow: Flow[Any]) -> None:
    flow.link = _CLOSED
    flow.inbox.frames.clear()
    flow.inbox.nbytes = flow.inbox.submitted = 0
    flow.current, flow.refusing = None, []
    flow.aside, flow.aside_came = None, False
    flow.running = False


def _decoded(flow: Flow[Any]) -> None:
    if flow.readiness is _WAITS_DECODER:
        flow.readiness = _READY
        _next_is(_STAGE_READY)(flow)


def _run_begun(flow: Flow[Any]) -> None:
    if not flow.inbox.submitted or flow.running or flow.current is not None:
        raise FlowError("a run begins out of order")
    if flow.residence is not _MEMORY_HERE:
        raise FlowError(f"a run begins, but its memory is {flow.residence.value}")
    flow.running = True


def _run_ended(flow: Flow[Any]) -> None:
    if not flow.inbox.submitted:
        raise FlowError("a run ended that was not submitted")
    flow.running = False
    flow.inbox.submitted -= 1
    _take(flow)
    if flow.readiness is _WAITS_ROOM:
        flow.readiness = _READY


def _unread(flow: Flow[Any]) -> None:
    flow.unread = True


def _read(flow: Flow[Any]) -> None:
    flow.unread = False


def _lent(flow: Flow[Any]) -> None:
    flow.lent = True


def _returned(flow: Flow[Any]) -> None:
    flow.lent = False


def _upload_waits(flow: Flow[Any]) -> None:
    flow.inbox.upload = True


def _upload_lacks_memory(flow: Flow[Any]) -> None:
    flow.inbox.upload = True
    flow.readiness = _WAITS_MEMORY


def _turn_came(flow: Flow[Any]) -> None:
    flow.served, flow.yielded = 0, False


def _paused(flow: Flow[Any]) -> None:
    flow.hold.paused = True


def _resumed(flow: Flow[Any]) -> None:
    flow.hold.paused = False


def _moves(to: Residence, *allowed: Residence) -> Callable[[Flow[Any]], None]:
    def event(flow: Flow[Any]) -> None:
        if flow.residence not in allowed:
            raise FlowError(f"memory that is {flow.residence.value} cannot be {to.value} next")
        if flow.running and to is not _MEMORY_HERE:
            raise FlowError(f"memory cannot be {to.value} while a run uses it")
        flow.residence = to

    return event


_HANDLERS: dict[Signal, Callable[[Flow[Any]], None]] = {
    Signal.KERNELS_READY: _next_is(Stage.COMPILED),
    Signal.KERNELS_AWAITED: _wait_for(Readiness.KERNELS),
    Signal.PLAN_READY: _next_is(Stage.PLANNED),
    Signal.PLAN_AWAITED: _wait_for(Readiness.PLAN),
    Signal.SUBMITTED: _submitted,
    Signal.ROOM_AWAITED: _wait_for(Readiness.ROOM),
    Signal.MEMORY_READY: _memory_ready,
    Signal.MEMORY_AWAITED: _memory_awaited,
    Signal.PEERS_AWAITED: _peers_awaited,
    Signal.DEFINITION_READY: _next_is(Stage.READY),
    Signal.DEFINITION_AWAITED: _wait_for(Readiness.DECODER),
    Signal.PROCESSED: _processed,
    Signal.REFUSED: _refused,
    Signal.READING_STOPPED: _reading_stopped,
    Signal.READING: _reading_on,
    Signal.YIELDED: _yielded,
    Signal.LINK_BROKEN: _broken,
    Signal.CLOSED: _closed,
    Signal.KERNELS_BUILT: _came(Readiness.KERNELS),
    Signal.PLAN_KNOWN: _came(Readiness.PLAN),
    Signal.DECODED: _decoded,
    Signal.MEMORY_CAME: _memory_came,
    Signal.PEERS_CAME: _peers_came,
    Signal.RUN_BEGUN: _run_begun,
    Signal.RUN_ENDED: _run_ended,
    Signal.ANSWERS_UNREAD: _unread,
    Signal.ANSWERS_READ: _read,
    Signal.BUFFERS_LENT: _lent,
    Signal.BUFFERS_RETURNED: _returned,
    Signal.UPLOAD_WAITS: _upload_waits,
    Signal.UPLOAD_LACKS_MEMORY: _upload_lacks_memory,
    Signal.TURN_CAME: _turn_came,
    Signal.PAUSED: _paused,
    Signal.RESUMED: _resumed,
    Signal.LEAVING: _moves(Residence.LEAVING, Residence.HERE),
    Signal.PREEMPTED: _moves(Residence.PREEMPTED, Residence.HERE),
    Signal.STAYED: _moves(Residence.HERE, Residence.LEAVING, Residence.PREEMPTED),
    Signal.LEFT: _moves(Residence.AWAY, Residence.LEAVING, Residence.PREEMPTED),
    Signal.COMING: _moves(Residence.COMING, Residence.AWAY),
    Signal.ARRIVED: _moves(Residence.HERE, Residence.COMING),
}
#: Handlers by the signal's number, so that a step needs no lookup by name.
_SIGNALS = tuple([_HANDLERS[signal] for signal in Signal])
_NOTED = tuple([signal in NOTES for signal in Signal])
