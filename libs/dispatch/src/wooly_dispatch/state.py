"""The state of the core. Only `core` changes the state; `snapshot` encodes it, `restore` makes an equal one."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import astuple
from typing import Any

from wooly_dispatch.events import PRIORITIES, Config, Policy
from wooly_dispatch.policing import undeclared_burst_ns
from wooly_dispatch.rhythm import Rhythm
from wooly_dispatch.windows import PROTECTED, WIDTH, windows

SCALE = 1 << 20
"""Virtual time per ns of GPU time at weight 1."""

STRETCH = 1 << 10
"""The stretch of a session whose estimates are right."""

SAVED_NS = 1_000_000_000
"""Time, in ns, over which `Config.withheld_permille` is an average: what is not withheld is saved for so long."""


class Program:
    """A queued program: `ends[i]` is the estimated time from its start to the end of kernel i; `next` is the first kernel not
    launched.
    """

    __slots__ = ("ends", "excess", "next", "number")

    def __init__(self, number: int, ends: list[int], excess: bool) -> None:
        self.number = number
        self.ends = ends  # shared with other programs with the same estimates; must not change
        self.next = 0
        self.excess = excess


class Session:
    """A session's queue of programs, which run in order.

    `finish[c]` is the virtual time up to which class c has served the session. `lift` is the class's virtual time at which the
    session last joined a class, plus the service since then. The session's start tag is the larger of both, so an idle session
    saves no credit. True-ups move both. `finish` is also moved by launches from before the session joined the class; these must
    not move the start tag below `lift`.
    """

    __slots__ = (
        "asked",
        "early",
        "expected",
        "finish",
        "id",
        "in_flight",
        "known",
        "lane",
        "lift",
        "period",
        "policy",
        "programs",
        "proven",
        "refilled",
        "resident",
        "rhythm",
        "stamp",
        "stretch",
        "suspended",
        "tenant",
        "tokens",
        "wall",
    )

    def __init__(self, id: str, tenant: str, policy: Policy, resident: bool, now: int) -> None:
        self.id = id
        self.tenant = tenant
        self.policy = policy
        self.resident = resident
        self.asked = False  # has asked for a swap-in; until then the session takes no part
        self.suspended = False
        self.programs: deque[Program] = deque()
        self.expected = 1  # the next program's number
        self.early: dict[int, tuple[int, ...]] = {}  # programs that arrived before their predecessors
        self.known: tuple[tuple[int, ...], list[int]] = ((0,), [0])  # the last estimates, and their prefix sums
        self.finish = [0] * PRIORITIES
        self.lift = 0
        self.period = 0  # how many times the session has joined a class
        self.lane = -1  # the class in which the session waits; -1: none
        self.stamp = 0  # stamp of the session's only valid entry in the heap of its class
        self.in_flight = 0
        self.proven = False  # whether a launch was measured; until then, at most one kernel is in flight
        self.stretch = STRETCH  # the factor between measured and estimated times
        self.wall = STRETCH  # the factor between wall time and estimates, while time may be withheld
        self.rhythm = Rhythm()
        self.tokens = policy.burst_ns
        self.refilled = now


class Flight:
    """A launch that is not done. `session` is None if the session has closed."""

    __slots__ = (
        "counted",
        "estimate",
        "first",
        "floor",
        "last",
        "period",
        "policed",
        "priority",
        "program",
        "raw",
        "session",
        "tag",
        "undeclared",
        "weight",
    )

    def __init__(
        self,
        session: Session | None,
        program: Program,
        first: int,
        last: int,
        estimate: int,
        raw: int,
        tag: int,
        weight: int,
        priority: int,
        period: int,
        policed: bool,
        undeclared: bool,
        counted: bool,
        floor: bool,
    ) -> None:
        self.session = session
        self.program = program
        self.first = first
        self.last = last
        self.estimate = estimate  # time that counts in the window
        self.raw = raw  # the estimate before the stretch
        self.tag = tag  # the virtual time that the launch was charged
        self.weight = weight
        self.priority = priority
        self.period = period
        self.policed = policed  # paid from the session's own token bucket
        self.undeclared = undeclared  # paid from the bucket that all undeclared sessions share
        self.counted = counted  # earned credit for P4's floor
        self.floor = floor  # launched because of P4's floor


class Lane:
    """One class: its virtual time, and a heap of (start tag, session id, stamp, session) that may contain stale entries."""

    __slots__ = ("due", "heap", "size", "virtual")

    def __init__(self) -> None:
        self.virtual = 0
        self.heap: list[tuple[int, str, int, Session]] = []
        self.size = 0  # number of sessions that wait in the class
        # of P4: the floor credit that its next piece costs, in ns * 1000; 0: unknown, because the class has changed
        self.due = 0


class DispatchState:
    """The state of `step`. Callers may read it, but must not change it."""

    __slots__ = (
        "begun",
        "config",
        "device_ns",
        "exclusive",
        "flights",
        "floor_credit",
        "guarded",
        "in_flight_ns",
        "lanes",
        "launches",
        "now",
        "pieces",
        "refilled",
        "sessions",
        "stamps",
        "tokens",
        "waiting",
        "width",
        "windows",
        "withheld_refilled",
        "withheld_tokens",
        "withheld_until",
    )

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()
        self.now = 0
        self.sessions: dict[str, Session] = {}
        self.lanes = [Lane() for _ in range(PRIORITIES)]
        self.flights: dict[int, Flight] = {}  # by launch, in order
        self.in_flight_ns = 0
        self.waiting = 0  # number of sessions that wait in all lanes
        self.launches = 0
        self.stamps = 0
        self.floor_credit = 0  # credit of P4 by its floor, in ns * 1000
        self.exclusive = ""  # the session that has the device for itself; empty: none
        self.tokens = undeclared_burst_ns(
            self.config
        )  # of the bucket that all P0 and P1 sessions without their own bucket share
        self.refilled = 0  # time of the last refill, by `device_ns`
        self.device_ns = (
            0  # device time of launches, and idle time; without the time that other programs of the host took
        )
        # P0 and P1 sessions for which time may be withheld from P2, P3 and P4
        self.guarded: list[Session] = []
        self.begun = -1  # time at which the launch in flight was decided, if `guarded` was not empty; else -1
        self.withheld_until = 0  # until when nothing is launched; 0: something may be launched
        self.withheld_tokens = 0  # time that may be withheld now, in ns
        self.withheld_refilled = 0  # time of the last refill
        self.width = WIDTH
        self.windows: tuple[int, ...] = ()
        self.pieces: tuple[int, ...] = ()
        self.refresh_windows()

    def end_withholding(self) -> None:
        """Charge the time that was withheld: less than decided if a program arrived, more if the executor was late."""
        if self.withheld_until:
            self.withheld_tokens += self.withheld_until - self.now
            self.withheld_until = 0

    def refresh_windows(self) -> None:
        """Compute windows and piece lengths from the live sessions. Call it after every change of a value that they depend on."""
        guarded = [] if self.exclusive else [
            s for s in self.sessions.values() if s.policy.priority < PROTECTED and not s.suspended
        ]  # fmt: skip
        before, self.guarded = self.guarded, guarded if self.config.withheld_permille else []
        for session in before:
            if session not in self.guarded:
                session.rhythm.rested = -1
        if not self.guarded:
            self.begun = -1
            self.end_withholding()
        live = [(s.policy.priority, s.policy.service_ns) for s in guarded]
        if not live:
            self.width = WIDTH
        self.windows = windows(self.config, live, self.width)
        for lane in self.lanes:
            lane.due = 0
        longest = self.config.piece_ns
        self.pieces = tuple(longest if self.config.stoppable else min(window // 2, longest) for window in self.windows)


_PLAIN = ("id", "tenant", "resident", "asked", "suspended", "expected", "finish", "lift", "period", "lane", "in_flight", "proven",
          "stretch", "wall", "tokens", "refilled")  # fmt: skip
_FLIGHT = ("estimate", "raw", "tag", "weight", "priority", "period", "policed", "undeclared", "counted", "floor")
_STATE = ("now", "launches", "floor_credit", "tokens", "refilled", "device_ns", "exclusive", "width", "begun",
          "withheld_until", "withheld_tokens", "withheld_refilled")  # fmt: skip


def snapshot(state: DispatchState) -> bytes:
    """The state as canonical bytes (JSON). Only equal states have equal bytes."""
    content = {
        "version": 3,
        "config": astuple(state.config),
        **{name: getattr(state, name) for name in _STATE},
        "virtual": [lane.virtual for lane in state.lanes],
        "sessions": [
            {
                **{name: getattr(s, name) for name in _PLAIN},
                "policy": astuple(s.policy),
                "rhythm": [s.rhythm.rested, s.rhythm.pauses],
                "programs": [[p.number, p.next, p.excess, p.ends] for p in s.programs],
                "early": sorted(s.early.items()),
            }
            for _, s in sorted(state.sessions.items())
        ],
        "flights": [
            [
                number,
                f.session.id if f.session else None,
                [f.program.number, f.program.next, f.program.excess, f.program.ends, f.first, f.last],
                *(getattr(f, name) for name in _FLIGHT),
            ]
            for number, f in state.flights.items()
        ],
    }
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def restore(data: bytes) -> DispatchState:
    """The state that `snapshot` encoded."""
    content: dict[str, Any] = json.loads(data)
    state = DispatchState(Config(*content["config"]))
    for name in _STATE:
        setattr(state, name, content[name])
    for lane, virtual in zip(state.lanes, content["virtual"], strict=True):
        lane.virtual = virtual
    for found in content["sessions"]:
        session = Session(found["id"], found["tenant"], Policy(*found["policy"]), found["resident"], 0)
        for name in _PLAIN:
            setattr(session, name, found[name])
        session.rhythm = Rhythm(*found["rhythm"])
        for number, next_kernel, excess, ends in found["programs"]:
            program = Program(number, ends, excess)
            program.next = next_kernel
            session.programs.append(program)
        session.early = {number: tuple(kernels) for number, kernels in found["early"]}
        state.sessions[session.id] = session
        if session.lane >= 0:
            state.stamps += 1
            session.stamp = state.stamps
            lane = state.lanes[session.lane]
            lane.size += 1
            state.waiting += 1
            lane.heap.append((max(session.lift, session.finish[session.lane]), session.id, session.stamp, session))
    for lane in state.lanes:
        lane.heap.sort()  # a sorted list is a valid heap
    for number, owner, (program_number, next_kernel, excess, ends, first, last), *values in content["flights"]:
        owned = None if owner is None else state.sessions[owner]
        queued = owned.programs[0] if owned is not None and owned.programs else None
        if queued is None or queued.number != program_number:
            queued = Program(program_number, ends, excess)
            queued.next = next_kernel
        flight = Flight(owned, queued, first, last, **dict(zip(_FLIGHT, values, strict=True)))
        state.flights[number] = flight
        state.in_flight_ns += flight.estimate
    state.refresh_windows()
    return state
