"""The dispatch rule: which session's work runs next on one device.

    state = DispatchState()
    state, decisions = step(state, event)

The core uses integers only. It has no clock, no randomness and no I/O, and does not depend on hashing, so the same events always
give the same decisions. Classes are strict. Inside a class, start-time fair queueing decides: the session with the smallest start
tag goes first, ties by session id. A window of GPU time bounds the work of a lower class in flight. The device may stay idle
for a short time before the next program of a P0 or P1 session. `README.md` has the rule in
pseudo-code, and its bounds.

An event costs O(log n) in the number of sessions; submitting a program also costs O(kernels). Opening, closing or changing a
session costs O(n).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from itertools import accumulate
from typing import Any

from wooly_dispatch.decisions import (
    Decision,
    DemoteDecision,
    LaunchDecision,
    RefuseDecision,
    SwapInDecision,
    WithholdDecision,
)
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
    WithheldEvent,
)
from wooly_dispatch.policing import FULL, undeclared_burst_ns
from wooly_dispatch.rhythm import Rhythm
from wooly_dispatch.state import SAVED_NS, SCALE, STRETCH, DispatchState, Flight, Lane, Program, Session
from wooly_dispatch.windows import PROTECTED, adapted

EXCESS = 2
"""Class of P0's and P1's work beyond their buckets."""
FLOOR = 4
"""The class with a guaranteed minimum share."""
MIN_PIECE_NS = 1_000
"""Minimum time, in ns, that a launch counts for. So launches with an estimate of 0 fill the window, too."""
MAX_STRETCH = STRETCH << 10
ALONE = 4
"""Maximum pieces in one launch while no other session is open. Launches can be stopped, so a new session does not wait for the
end.
"""
MAX_EARLY = 1024
"""Maximum number of a session's programs that wait for an earlier program."""


def step(state: DispatchState, event: Event) -> tuple[DispatchState, list[Decision]]:
    """Apply one event, and return the decisions, which the caller must carry out in order.

    The function changes the state in place and returns it; the caller must not use the old state any more. `snapshot` makes a
    copy. An invalid event changes nothing but the time, and gets a `RefuseDecision`.

    Raises:
        KeyError: `event` has none of the types in `events`.
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
    """Launch everything that may be launched now."""
    while state.waiting:
        session = _next(state, decisions)
        if session is None:
            return
        floor = False
        low = state.lanes[FLOOR]
        credit = state.floor_credit
        if credit >= MIN_PIECE_NS * 1000 and credit >= low.due and session.lane in (2, 3):
            waiting = _top(state, low, decisions)
            if waiting is not None:
                low.due = _cut(state, waiting)[2] * 1000
                if low.due <= state.floor_credit:
                    session, floor = waiting, True
        elif len(state.flights) >= state.config.max_flights:
            return
        last, raw, estimate = _cut(state, session)
        if state.guarded and not state.flights:
            if session.policy.priority >= PROTECTED and not floor:
                last, raw, estimate = _fitting(state, session, last, decisions)
                if not last:
                    return
            state.end_withholding()
            state.begun = state.now
        if state.flights:
            if state.in_flight_ns + estimate > state.windows[session.lane]:
                return  # do not launch a lower class instead
            if len(state.flights) >= state.config.max_flights or (session.in_flight and not session.proven):
                return
        decisions.append(_launch(state, session, last, raw, estimate, floor))


def _next(state: DispatchState, decisions: list[Decision]) -> Session | None:
    """The session whose turn it is. A swapped-out session asks for its memory and is skipped."""
    for lane in state.lanes:
        if lane.size:
            top = _top(state, lane, decisions)
            if top is not None:
                return top
    return None


def _top(state: DispatchState, lane: Lane, decisions: list[Decision]) -> Session | None:
    heap = lane.heap
    while heap:
        _, _, stamp, session = heap[0]
        if session.stamp != stamp:
            heappop(heap)
        elif session.resident:
            return session
        else:
            _ask(state, lane, session, decisions)
    return None


def _ask(state: DispatchState, lane: Lane, session: Session, decisions: list[Decision]) -> None:
    session.asked = True
    _leave(state, lane, session)
    decisions.append(SwapInDecision(session.id))


def _cut(state: DispatchState, session: Session) -> tuple[int, int, int]:
    """The session's next piece: the kernel after its last one, its estimated time, and this time with the stretch."""
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


# -- time that is withheld from P2, P3 and P4 --------------------------------------------------------------------------


def _fitting(state: DispatchState, session: Session, last: int, decisions: list[Decision]) -> tuple[int, int, int]:
    """The part of the session's next piece, which ends before kernel `last`, that is launched now on the idle device. Returns
    values like those of `_cut`; the first one is 0 if nothing is launched.

    What is launched probably ends before a P0 or P1 session submits its next program. If not even the first kernel does, the
    device stays idle until then. If that takes too long, or too much time was withheld already, the first kernel is launched.
    """
    now = state.now
    resting = [s for s in state.guarded if s.rhythm.rested >= 0 and s.resident]
    if state.withheld_until > now and resting:
        return 0, 0, 0
    state.end_withholding()
    program = session.programs[0]
    begin, ends = program.next, program.ends
    done = ends[begin - 1] if begin else 0
    expected = [(left, s) for s in resting if (left := s.rhythm.next(now)) >= 0]
    fitting = last
    if expected:
        # a higher class waits for half a window in any case: the runtime does not look for it more often
        room = max(min([left for left, _ in expected]), state.windows[session.lane] // 2)
        fitting = bisect_right(ends, done + room * STRETCH // session.wall, begin, last)
        if fitting == begin:
            wall_ns = (ends[begin] - done) * session.wall // STRETCH
            longest = min(state.config.withheld_ns, _refilled(state))
            times = [s.rhythm.over(now, wall_ns, longest) for left, s in expected if left < wall_ns]
            idle_ns = min([ns for ns in times if ns > 0], default=0)
            if idle_ns:
                state.withheld_tokens -= idle_ns
                state.withheld_until = now + idle_ns
                decisions.append(WithholdDecision(now + idle_ns))
                return 0, 0, 0
            fitting = begin + 1
    raw = ends[fitting - 1] - done
    return fitting, raw, max(raw * session.stretch // STRETCH, MIN_PIECE_NS)


def _refilled(state: DispatchState) -> int:
    """Refill the right to withhold time. Returns the time that may be withheld now, in ns."""
    share = state.config.withheld_permille
    earned = (state.now - state.withheld_refilled) * share
    state.withheld_tokens = min(state.withheld_tokens + earned // 1000, SAVED_NS * share // 1000)
    state.withheld_refilled = state.now - (earned % 1000) // share  # keep the remainder for the next refill
    return max(state.withheld_tokens, 0)


def _note_times(state: DispatchState, session: Session, flight: Flight) -> None:
    """Note that a launch of the session has ended: a P0 or P1 session may rest now, the others have a new `wall`."""
    begun, state.begun = state.begun, -1
    if session.policy.priority < PROTECTED:
        if not session.programs and not session.in_flight:
            session.rhythm.rested = state.now
        return
    if begun < 0:  # nobody had to be guarded when the launch was decided
        return
    ratio = min((state.now - begun) * STRETCH // max(flight.raw, MIN_PIECE_NS), MAX_STRETCH)
    session.wall = max(session.wall + (ratio - session.wall) // (4 if ratio > session.wall else 16), 1)


# -- classes ---------------------------------------------------------------------------------------------------------


def _class_of(state: DispatchState, session: Session) -> int:
    """The class in which the session waits; -1 if it has nothing to run or may not run."""
    if not session.programs or session.suspended or session.asked or state.exclusive not in ("", session.id):
        return -1
    priority = session.policy.priority
    return EXCESS if priority < PROTECTED and session.programs[0].excess else priority


def _settle(state: DispatchState, session: Session) -> None:
    """Put the session into its class."""
    wanted = _class_of(state, session)
    if wanted == session.lane:
        if wanted >= 0:
            _requeue(state, state.lanes[wanted], session)
        return
    if session.lane >= 0:
        _leave(state, state.lanes[session.lane], session)
        if not state.lanes[FLOOR].size:
            state.floor_credit = 0  # P4 loses its credit when it has nothing to run
    if wanted >= 0:
        lane = state.lanes[wanted]
        lane.size += 1
        state.waiting += 1
        session.lane = wanted
        session.period += 1
        session.lift = lane.virtual  # no credit for the time away
        _requeue(state, lane, session)


def _leave(state: DispatchState, lane: Lane, session: Session) -> None:
    priority = session.lane
    session.finish[priority] = max(session.lift, session.finish[priority])
    session.lane = -1
    session.stamp = 0
    lane.size -= 1
    state.waiting -= 1
    lane.due = 0


def _requeue(state: DispatchState, lane: Lane, session: Session) -> None:
    """Push the session's only valid entry on the heap, with its start tag."""
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
        if state.guarded and session.rhythm.rested >= 0:
            session.rhythm.ended(state.now, state.begun if state.flights and state.begun >= 0 else state.now)
        _enqueue(state, session, event.kernels, decisions)
        while session.expected in session.early:
            _enqueue(state, session, session.early.pop(session.expected), decisions)
        if len(session.programs) == 1 or session.lane < 0:
            _settle(state, session)


def _enqueue(state: DispatchState, session: Session, kernels: tuple[int, ...], decisions: list[Decision]) -> None:
    if session.known[0] is not kernels:  # a repeated program passes the same tuple again, so its sums are computed once
        session.known = (kernels, list(accumulate(kernels)))
    ends = session.known[1]
    program = Program(session.expected, ends, False)
    session.programs.append(program)
    _police(state, session, program, decisions)
    session.expected += 1


def _police(state: DispatchState, session: Session, program: Program, decisions: list[Decision]) -> None:
    """Charge the rest of a P0 or P1 program to its session's bucket, or to the bucket that undeclared sessions share."""
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
    """Take a program's time from a bucket. Returns False if the bucket has less."""
    earned = (now - bucket.refilled) * rate_permille
    bucket.tokens = min(burst_ns, bucket.tokens + earned // 1000)
    bucket.refilled = now - (earned % 1000) // rate_permille  # keep the remainder for the next refill
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
    if flight.undeclared:  # also if the session has closed, because the bucket is not the session's own
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
    if state.guarded:
        _note_times(state, session, flight)
    overrun = min(event.gpu_ns * STRETCH // max(flight.raw, MIN_PIECE_NS), MAX_STRETCH)
    if overrun > session.stretch:
        session.stretch = overrun
    elif session.stretch > STRETCH:
        session.stretch -= (session.stretch - max(overrun, STRETCH) + 15) // 16
    if session.lane >= 0:
        state.lanes[session.lane].due = 0  # its estimates have another stretch now
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
    """Why the launch cannot have ended like this; empty if it can. Journals have this text, and a replay compares it."""
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
    """Return the kernels from `last` on, which did not run, to the head of the session's queue. No other launch of the session
    is in flight.
    """
    program = flight.program
    program.next = last
    if not session.programs or session.programs[0] is not program:
        session.programs.appendleft(program)
    flight.raw = program.ends[last - 1] - (program.ends[flight.first - 1] if flight.first else 0)


def should_stop(state: DispatchState) -> bool:
    """Whether a waiting session is a reason to stop a launch in flight, if launches can be stopped.

    A session of a higher class is a reason. (For a launch by P4's floor, only P0 and P1 are.) If the launch is longer than a
    piece, because no other session was open, a session of the same class is a reason, too.
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
            RefuseDecision(
                f"session {event.session} is open already" if event.session else "the session id must not be empty"
            )
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
    if event.policy.priority != session.policy.priority:
        session.rhythm = Rhythm()
    session.policy = event.policy
    if risen:
        for program in session.programs:  # programs that were queued in a lower class have not paid yet
            _police(state, session, program, decisions)
    _settle(state, session)
    state.refresh_windows()


def _on_swapped_out(state: DispatchState, event: SwappedOutEvent, decisions: list[Decision]) -> None:
    session = _known(state, event.session, decisions)
    if session is not None:
        session.resident = session.asked = False
        _settle(state, session)  # the session's head may ask for memory again


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
    state.withheld_until = state.withheld_tokens = 0
    state.withheld_refilled = state.now
    state.refresh_windows()


def _on_epoch(state: DispatchState, event: EpochEndedEvent, decisions: list[Decision]) -> None:
    width = adapted(state.config, state.width, event.slowdown_permille, event.idle_permille)
    if width != state.width:
        state.width = width
        state.refresh_windows()


def _on_withheld(state: DispatchState, event: WithheldEvent, decisions: list[Decision]) -> None:
    if state.withheld_until <= state.now:
        state.end_withholding()


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
    WithheldEvent: _on_withheld,
}
