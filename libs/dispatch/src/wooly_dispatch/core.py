"""The dispatch rule: which session's work runs next on one device.

    state = DispatchState()
    state, decisions = step(state, event)

Integers only; no clock, no randomness, no I/O, nothing that depends on hashing: the same events give the same decisions, always.
Classes are strict. In a class, start-time fair queueing: the session with the least start tag goes first, ties by session id.
What a lower class has in flight is bounded by a window of GPU time. `README.md` has the rule in pseudo-code and its bounds.

An event costs O(log n) in the number of sessions, plus O(kernels) for a program when it is submitted; opening, closing and
changing a session look at all others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from itertools import accumulate
from typing import Any

from wooly_dispatch.decisions import Decision, DemoteDecision, LaunchDecision, RefuseDecision, SwapInDecision
from wooly_dispatch.events import (
    ConfigChangedEvent,
    EpochEndedEvent,
    Event,
    ExclusiveBegunEvent,
    ExclusiveEndedEvent,
    LaunchDoneEvent,
    PolicyChangedEvent,
    ProgramSubmittedEvent,
    SessionClosedEvent,
    SessionOpenedEvent,
    SessionResumedEvent,
    SessionSuspendedEvent,
    SwappedInEvent,
    SwappedOutEvent,
)
from wooly_dispatch.policing import FULL, undeclared_burst_ns
from wooly_dispatch.state import SCALE, STRETCH, DispatchState, Flight, Lane, Program, Session
from wooly_dispatch.windows import PROTECTED, adapted

EXCESS = 2
"""The class of what P0 and P1 sessions submit beyond their buckets."""
FLOOR = 4
"""The class that has a floor."""
MIN_PIECE_NS = 1_000
"""What a launch counts for at least: also launches estimated at nothing fill a window."""
MAX_STRETCH = STRETCH << 10
ALONE = 4
"""Pieces that one launch may have where launches can be stopped and no other session is open: who comes has it stopped."""
MAX_EARLY = 1024
"""Programs of one session that may wait for one before them."""


def step(state: DispatchState, event: Event) -> tuple[DispatchState, list[Decision]]:
    """Take one event in; the decisions are to be carried out in order.

    The state is changed in place and returned: the caller must use no other reference as if it were the old one. `snapshot` makes
    a copy that stays. An event that makes no sense changes nothing but the time, and is answered with a `RefuseDecision`.

    Raises:
        KeyError: `event` is none of the types in `events`.
    """
    if event.at > state.now:
        if not state.flights:
            state.device_ns += event.at - state.now
        state.now = event.at
    decisions: list[Decision] = []
    _HANDLERS[type(event)](state, event, decisions)
    _decide(state, decisions)
    return state, decisions


# -- the choice ------------------------------------------------------------------------------------------------------


def _decide(state: DispatchState, decisions: list[Decision]) -> None:
    """Launch whatever may be launched now."""
    while True:
        session = _next(state, decisions)
        if session is None:
            return
        floor = False
        low = state.lanes[FLOOR]
        if state.floor_credit >= max(low.due, MIN_PIECE_NS * 1000) and session.lane in (2, 3):
            waiting = _top(low, decisions)
            if waiting is not None:
                low.due = _cut(state, waiting)[2] * 1000
                if low.due <= state.floor_credit:
                    session, floor = waiting, True
        last, raw, estimate = _cut(state, session)
        if state.flights:
            if state.in_flight_ns + estimate > state.windows[session.lane]:
                return  # and nothing of a lower class slips past
            if len(state.flights) >= state.config.max_flights or (session.in_flight and not session.proven):
                return
        decisions.append(_launch(state, session, last, raw, estimate, floor))


def _next(state: DispatchState, decisions: list[Decision]) -> Session | None:
    """The session whose turn it is. One that is swapped out asks for its memory and is passed over."""
    for lane in state.lanes:
        if lane.size:
            top = _top(lane, decisions)
            if top is not None:
                return top
    return None


def _top(lane: Lane, decisions: list[Decision]) -> Session | None:
    heap = lane.heap
    while heap:
        _, _, stamp, session = heap[0]
        if session.stamp != stamp:
            heappop(heap)
        elif session.resident:
            return session
        else:
            _ask(lane, session, decisions)
    return None


def _ask(lane: Lane, session: Session, decisions: list[Decision]) -> None:
    session.asked = True
    _leave(lane, session)
    decisions.append(SwapInDecision(session.id))


def _cut(state: DispatchState, session: Session) -> tuple[int, int, int]:
    """The session's next piece: up to which kernel, its time as estimated, and that time as it is to be expected."""
    program = session.programs[0]
    begin, ends = program.next, program.ends
    done = ends[begin - 1] if begin else 0
    if session.proven:
        longest = state.pieces[session.lane]
        if state.config.stoppable and len(state.sessions) == 1:
            longest *= ALONE
        else:
            longest = longest * STRETCH // session.stretch
        last = bisect_right(ends, done + longest, begin + 1)  # at least one kernel
    else:
        last = begin + 1
    raw = ends[last - 1] - done
    return last, raw, max(raw * session.stretch // STRETCH, MIN_PIECE_NS)


def _launch(state: DispatchState, session: Session, last: int, raw: int, estimate: int, floor: bool) -> LaunchDecision:
    priority = session.lane
    lane = state.lanes[priority]
    finish = session.finish
    program = session.programs[0]
    first = program.next
    weight = session.policy.weight
    tag = estimate * SCALE // weight
    start = max(session.lift, finish[priority])
    if start > lane.virtual:
        lane.virtual = start
    finish[priority] = start + tag
    session.lift += tag
    counted = False
    if floor:
        state.floor_credit -= estimate * 1000
    elif priority in (2, 3) and state.lanes[FLOOR].size:
        counted = True
        state.floor_credit += estimate * state.config.floor_permille
    policed = priority < PROTECTED and session.policy.rate_permille > 0
    undeclared = priority < PROTECTED and not policed and state.config.undeclared_permille < FULL
    state.launches += 1
    state.flights[state.launches] = Flight(
        session,
        program,
        first,
        last,
        estimate,
        raw,
        tag,
        weight,
        priority,
        session.period,
        policed,
        undeclared,
        counted,
        floor,
    )
    state.in_flight_ns += estimate
    session.in_flight += 1
    program.next = last
    if last < len(program.ends):
        _requeue(state, lane, session)
    else:
        session.programs.popleft()
        _settle(state, session)
    return LaunchDecision(state.launches, session.id, program.number, first, last, priority, estimate, floor)


# -- classes ---------------------------------------------------------------------------------------------------------


def _class_of(state: DispatchState, session: Session) -> int:
    """The class in which the session waits, -1 if it has nothing to run or may not."""
    if not session.programs or session.suspended or session.asked or state.exclusive not in ("", session.id):
        return -1
    priority = session.policy.priority
    return EXCESS if priority < PROTECTED and session.programs[0].excess else priority


def _settle(state: DispatchState, session: Session) -> None:
    """Put the session in the class where it belongs now."""
    wanted = _class_of(state, session)
    if wanted == session.lane:
        if wanted >= 0:
            _requeue(state, state.lanes[wanted], session)
        return
    if session.lane >= 0:
        _leave(state.lanes[session.lane], session)
        if not state.lanes[FLOOR].size:
            state.floor_credit = 0  # nor does P4 keep credit while it has nothing to run
    if wanted >= 0:
        lane = state.lanes[wanted]
        lane.size += 1
        session.lane = wanted
        session.period += 1
        session.lift = lane.virtual  # no credit for having been away
        _requeue(state, lane, session)


def _leave(lane: Lane, session: Session) -> None:
    priority = session.lane
    session.finish[priority] = max(session.lift, session.finish[priority])
    session.lane = -1
    session.stamp = 0
    lane.size -= 1
    lane.due = 0


def _requeue(state: DispatchState, lane: Lane, session: Session) -> None:
    """Give the session its one valid entry in the heap, at its start tag."""
    state.stamps += 1
    lane.due = 0
    heap = lane.heap
    entry = (max(session.lift, session.finish[session.lane]), session.id, state.stamps, session)
    is_first = False
    if heap:
        _, _, _, first = heap[0]
        is_first = first is session
    if is_first:
        heapreplace(heap, entry)
    else:
        heappush(heap, entry)
    session.stamp = state.stamps
    if len(heap) > 4 * lane.size + 64:
        heap[:] = [(start, name, stamp, waiting) for start, name, stamp, waiting in heap if waiting.stamp == stamp]
        heapify(heap)


# -- programs --------------------------------------------------------------------------------------------------------


def _on_submitted(state: DispatchState, event: ProgramSubmittedEvent, decisions: list[Decision]) -> None:
    session = state.sessions.get(event.session)
    if session is None:
        decisions.append(RefuseDecision(f"session {event.session} is not open"))
    elif event.program < session.expected or event.program in session.early:
        decisions.append(RefuseDecision(f"program {event.program} of {event.session} came before"))
    elif event.kernels is not session.known[0] and (not event.kernels or min(event.kernels) < 0):
        decisions.append(
            RefuseDecision(f"program {event.program} of {event.session} has no kernels, or negative estimates")
        )
    elif event.program > session.expected:
        if len(session.early) < MAX_EARLY:
            session.early[event.program] = event.kernels
        else:
            decisions.append(
                RefuseDecision(f"{MAX_EARLY} programs of {event.session} wait for program {session.expected}")
            )
    else:
        _enqueue(state, session, event.kernels, decisions)
        while session.expected in session.early:
            _enqueue(state, session, session.early.pop(session.expected), decisions)
        if len(session.programs) == 1 or session.lane < 0:
            _settle(state, session)


def _enqueue(state: DispatchState, session: Session, kernels: tuple[int, ...], decisions: list[Decision]) -> None:
    if session.known[0] is not kernels:  # who repeats a program passes the same tuple again, and pays for it once
        session.known = (kernels, list(accumulate(kernels)))
    ends = session.known[1]
    program = Program(session.expected, ends, False)
    session.programs.append(program)
    _police(state, session, program, decisions)
    session.expected += 1


def _police(state: DispatchState, session: Session, program: Program, decisions: list[Decision]) -> None:
    """Have a program of P0 or P1 pay for what is left of it, from its session's bucket or from that of all undeclared ones."""
    policy = session.policy
    if policy.priority >= PROTECTED:
        return
    estimate = program.ends[-1] - (program.ends[program.next - 1] if program.next else 0)
    if policy.rate_permille:
        paid = _paid(session, state.now, policy.rate_permille, policy.burst_ns, estimate)
    elif state.config.undeclared_permille < FULL:
        rate, burst = state.config.undeclared_permille, undeclared_burst_ns(state.config)
        paid = rate > 0 and _paid(state, state.device_ns, rate, burst, estimate)
    else:
        paid = True
    program.excess = not paid
    if not paid:
        decisions.append(DemoteDecision(session.id, program.number))


def _paid(bucket: Session | DispatchState, now: int, rate_permille: int, burst_ns: int, estimate: int) -> bool:
    """Take a program's time from a bucket, if it holds as much."""
    earned = (now - bucket.refilled) * rate_permille
    bucket.tokens = min(burst_ns, bucket.tokens + earned // 1000)
    bucket.refilled = now - (earned % 1000) // rate_permille  # what was too little to count is not lost
    if bucket.tokens < estimate:
        return False
    bucket.tokens -= estimate
    return True


def _on_done(state: DispatchState, event: LaunchDoneEvent, decisions: list[Decision]) -> None:
    flight = state.flights.get(event.launch)
    wrong = "is not in flight" if flight is None else _impossible(state, flight, event)
    if flight is None or wrong:
        decisions.append(RefuseDecision(f"launch {event.launch} {wrong}"))
        return
    del state.flights[event.launch]
    state.in_flight_ns -= flight.estimate
    state.device_ns += event.gpu_ns
    error = event.gpu_ns - flight.estimate
    if flight.counted:
        state.floor_credit += error * state.config.floor_permille
    elif flight.floor:
        state.floor_credit -= error * 1000
    if not state.lanes[FLOOR].size:
        state.floor_credit = 0
    if flight.undeclared:  # also of a session that is closed: the bucket is not its own
        burst = undeclared_burst_ns(state.config)
        state.tokens = min(burst, state.tokens + flight.raw - event.gpu_ns)
    session = flight.session
    if session is None:
        return
    session.in_flight -= 1
    session.proven = True
    stopped = 0 <= event.last < flight.last
    if stopped:
        _put_back(session, flight, event.last)
    overrun = min(event.gpu_ns * STRETCH // max(flight.raw, MIN_PIECE_NS), MAX_STRETCH)
    if overrun > session.stretch:
        session.stretch = overrun
    elif session.stretch > STRETCH:
        session.stretch -= (session.stretch - max(overrun, STRETCH) + 15) // 16
    if session.lane >= 0:
        state.lanes[session.lane].due = 0  # its estimates are stretched otherwise now
    if flight.policed:
        session.tokens = min(session.policy.burst_ns, session.tokens + flight.raw - event.gpu_ns)
    correction = event.gpu_ns * SCALE // flight.weight - flight.tag
    if correction:
        session.finish[flight.priority] += correction
        if flight.period == session.period:
            session.lift += correction
        if session.lane == flight.priority:
            _requeue(state, state.lanes[session.lane], session)
    if stopped:
        _settle(state, session)


def _impossible(state: DispatchState, flight: Flight, event: LaunchDoneEvent) -> str:
    """Why the launch cannot have ended like this; empty if it can."""
    if event.gpu_ns < 0:
        return f"cannot have taken {event.gpu_ns} ns"
    if event.last == -1:
        return ""
    if not flight.first < event.last <= flight.last:
        return f"has kernels {flight.first} to {flight.last - 1} and cannot have ended before kernel {event.last}"
    if event.last < flight.last and not state.config.stoppable:
        return f"ended before kernel {event.last}, and this device's launches are not stopped"
    if event.last < flight.last and flight.session is not None and flight.session.in_flight > 1:
        return f"ended before kernel {event.last}, and what comes after it is in flight"
    return ""


def _put_back(session: Session, flight: Flight, last: int) -> None:
    """Kernels from `last` on of a launch were not run: they are the session's next. It has no other launch in flight."""
    program = flight.program
    program.next = last
    if not session.programs or session.programs[0] is not program:
        session.programs.appendleft(program)
    flight.raw = program.ends[last - 1] - (program.ends[flight.first - 1] if flight.first else 0)


def overtaken(state: DispatchState) -> bool:
    """Whether a session waits for which what is in flight should be stopped, where it can be.

    That is one of a higher class (P4's turn by its floor gives way to P0 and P1 only); where the launch is longer than a piece
    because no other was open, also one of its own class.
    """
    for flight in state.flights.values():
        for priority in range(min(flight.priority, PROTECTED) if flight.floor else flight.priority):
            if state.lanes[priority].size:
                return True
        if flight.estimate > state.pieces[flight.priority]:
            own = flight.session is not None and flight.session.lane == flight.priority
            if state.lanes[flight.priority].size > own:
                return True
    return False


# -- sessions --------------------------------------------------------------------------------------------------------


def _on_opened(state: DispatchState, event: SessionOpenedEvent, decisions: list[Decision]) -> None:
    if not event.session or event.session in state.sessions:
        decisions.append(
            RefuseDecision(f"session {event.session} is open already" if event.session else "a session has a name")
        )
        return
    state.sessions[event.session] = Session(event.session, event.tenant, event.policy, event.resident, state.now)
    if event.policy.priority < PROTECTED:
        state.refresh_windows()


def _on_closed(state: DispatchState, event: SessionClosedEvent, decisions: list[Decision]) -> None:
    session = _known(state, event.session, decisions)
    if session is None:
        return
    session.programs.clear()
    _settle(state, session)
    for flight in state.flights.values():
        if flight.session is session:
            flight.session = None
    del state.sessions[session.id]
    if state.exclusive == session.id:
        _reserve(state, "")
    state.refresh_windows()


def _on_policy(state: DispatchState, event: PolicyChangedEvent, decisions: list[Decision]) -> None:
    session = _known(state, event.session, decisions)
    if session is None:
        return
    if (event.policy.rate_permille, event.policy.burst_ns) != (session.policy.rate_permille, session.policy.burst_ns):
        session.tokens, session.refilled = event.policy.burst_ns, state.now
    risen = event.policy.priority < PROTECTED <= session.policy.priority
    session.policy = event.policy
    if risen:
        for program in session.programs:  # nothing was paid for what was queued in a lower class
            _police(state, session, program, decisions)
    _settle(state, session)
    state.refresh_windows()


def _on_swapped_out(state: DispatchState, event: SwappedOutEvent, decisions: list[Decision]) -> None:
    session = _known(state, event.session, decisions)
    if session is not None:
        session.resident = session.asked = False
        _settle(state, session)  # its head may ask again


def _on_swapped_in(state: DispatchState, event: SwappedInEvent, decisions: list[Decision]) -> None:
    session = _known(state, event.session, decisions)
    if session is not None:
        session.resident, session.asked = True, False
        _settle(state, session)


def _on_suspended(state: DispatchState, event: SessionSuspendedEvent, decisions: list[Decision]) -> None:
    session = _known(state, event.session, decisions)
    if session is not None:
        session.suspended = True
        _settle(state, session)
        state.refresh_windows()


def _on_resumed(state: DispatchState, event: SessionResumedEvent, decisions: list[Decision]) -> None:
    session = _known(state, event.session, decisions)
    if session is not None:
        session.suspended = False
        _settle(state, session)
        state.refresh_windows()


def _on_exclusive_begun(state: DispatchState, event: ExclusiveBegunEvent, decisions: list[Decision]) -> None:
    if _known(state, event.session, decisions) is None:
        return
    if state.exclusive not in ("", event.session):
        decisions.append(RefuseDecision(f"{state.exclusive} has the device to itself"))
        return
    _reserve(state, event.session)


def _on_exclusive_ended(state: DispatchState, event: ExclusiveEndedEvent, decisions: list[Decision]) -> None:
    _reserve(state, "")


def _reserve(state: DispatchState, holder: str) -> None:
    state.exclusive = holder
    for session in state.sessions.values():
        _settle(state, session)
    state.refresh_windows()


def _on_config(state: DispatchState, event: ConfigChangedEvent, decisions: list[Decision]) -> None:
    state.config = event.config
    state.tokens, state.refilled = undeclared_burst_ns(event.config), state.device_ns
    state.refresh_windows()


def _on_epoch(state: DispatchState, event: EpochEndedEvent, decisions: list[Decision]) -> None:
    width = adapted(state.config, state.width, event.slowdown_permille, event.idle_permille)
    if width != state.width:
        state.width = width
        state.refresh_windows()


def _known(state: DispatchState, session_id: str, decisions: list[Decision]) -> Session | None:
    session = state.sessions.get(session_id)
    if session is None:
        decisions.append(RefuseDecision(f"session {session_id} is not open"))
    return session


_HANDLERS: dict[type, Callable[[DispatchState, Any, list[Decision]], None]] = {
    ConfigChangedEvent: _on_config,
    SessionOpenedEvent: _on_opened,
    SessionClosedEvent: _on_closed,
    PolicyChangedEvent: _on_policy,
    ProgramSubmittedEvent: _on_submitted,
    LaunchDoneEvent: _on_done,
    SwappedOutEvent: _on_swapped_out,
    SwappedInEvent: _on_swapped_in,
    SessionSuspendedEvent: _on_suspended,
    SessionResumedEvent: _on_resumed,
    ExclusiveBegunEvent: _on_exclusive_begun,
    ExclusiveEndedEvent: _on_exclusive_ended,
    EpochEndedEvent: _on_epoch,
}
