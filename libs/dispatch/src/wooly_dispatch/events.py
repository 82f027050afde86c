"""The events that the core takes. An event is a fact, with the time at which the executor knew it, in integer nanoseconds.

The owner of the device supplies the times; the core never reads a clock. A time before the latest time counts as the latest time.
Events are plain values. The journal writes their fields in the order of this module.
"""

from __future__ import annotations

from dataclasses import dataclass, field

PRIORITIES = 5


@dataclass(frozen=True, slots=True)
class Config:
    """The constants of the rule.

    Attributes:
        free_window_ns: GPU time in flight while no class needs protection, and for P0 always.
        max_window_ns: maximum pacing window while a session of a higher class is live.
        piece_ns: maximum length of a piece of a program. A longer kernel is a piece of its own.
        latency_ns: time from a decision to the start on the device. A window is at least twice as long, so that the device does
            not idle.
        window_permille: pacing window, as a share of the smallest service time that the window protects.
        service_ns: assumed service time of a P0 or P1 session that declares none.
        max_flights: maximum number of launches in flight; 1 for a runtime that blocks while it executes.
        stoppable: the runtime looks for new work at the kernel edges inside a launch, at least once per window, and stops there
            for a
            higher class (`should_stop`). Then launches are as long as pieces, because the stop protects higher classes.
        undeclared_permille: share of the device for all P0 and P1 sessions without their own bucket together. Work beyond this
            share
            runs as P2. 0: all their work runs as P2; 1000: no limit.
        floor_permille: GPU time that P4 gets for each unit of P2 and P3 while P4 waits. P0 and P1 do not pay for it.
        slow_permille: ratio of P0's p99 to its p99 alone; above it, an epoch halves the windows.
        calm_permille: the same ratio; below it, an epoch may widen the windows.
        idle_permille: idle share of the device above which an epoch may widen the windows.
        withheld_permille: maximum share of the time for which the device stays idle although P2, P3 or P4 waits, because a P0 or
            P1 session will probably submit its next program before a piece would end; 0: never. It needs `max_flights` 1.
        withheld_ns: maximum time for which the device stays idle before one program.
    """

    free_window_ns: int = 4_000_000
    max_window_ns: int = 1_000_000
    piece_ns: int = 500_000
    latency_ns: int = 20_000
    window_permille: int = 25
    service_ns: int = 20_000_000
    max_flights: int = 1 << 20
    stoppable: bool = False
    undeclared_permille: int = 1000
    floor_permille: int = 20
    slow_permille: int = 1050
    calm_permille: int = 1020
    idle_permille: int = 50
    withheld_permille: int = 0
    withheld_ns: int = 2_000_000

    def __post_init__(self) -> None:
        if min(self.free_window_ns, self.max_window_ns, self.piece_ns, self.latency_ns, self.service_ns) < 1:
            raise ValueError("free_window_ns, max_window_ns, piece_ns, latency_ns and service_ns must be positive")
        if self.max_flights < 1:
            raise ValueError(f"max_flights must be at least 1, but is {self.max_flights}")
        if self.stoppable and self.max_flights > 1:
            raise ValueError(
                "max_flights must be 1 if stoppable is set, because a launch with another one behind it cannot be stopped"
            )
        if not 0 <= self.floor_permille <= 1000:
            raise ValueError(f"floor_permille must be 0 to 1000, but is {self.floor_permille}")
        if not 0 <= self.undeclared_permille <= 1000:
            raise ValueError(f"undeclared_permille must be 0 to 1000, but is {self.undeclared_permille}")
        if not 0 <= self.withheld_permille <= 1000 or self.withheld_ns < 1:
            raise ValueError("withheld_permille must be 0 to 1000, and withheld_ns must be positive")
        if self.withheld_permille and self.max_flights > 1:
            raise ValueError(
                "max_flights must be 1 if time is withheld, because the core must know when a launch begins"
            )


@dataclass(frozen=True, slots=True)
class Policy:
    """The scheduler's decisions about one session.

    Attributes:
        priority: the class, 0 (highest) to 4.
        weight: share inside the class, relative to other sessions.
        service_ns: GPU time of one request of a P0 or P1 session; 0: unknown.
        objective_ns: maximum response time of a program that is on time; 0: none declared.
        rate_permille: refill rate of the session's own bucket in P0 and P1, as a share of the device; 0: the session declares
            nothing,
            and shares the bucket of `Config.undeclared_permille` with all such sessions.
        burst_ns: size of the session's own bucket: GPU time that may be used at once.
    """

    priority: int = 2
    weight: int = 1
    service_ns: int = 0
    objective_ns: int = 0
    rate_permille: int = 0
    burst_ns: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.priority < PRIORITIES:
            raise ValueError(f"priority must be 0 to {PRIORITIES - 1}, but is {self.priority}")
        if not 1 <= self.weight <= 1 << 20:
            raise ValueError(f"weight must be 1 to {1 << 20}, but is {self.weight}")
        if min(self.service_ns, self.objective_ns, self.rate_permille, self.burst_ns) < 0:
            raise ValueError("service_ns, objective_ns, rate_permille and burst_ns must not be negative")


@dataclass(frozen=True, slots=True)
class ConfigChangedEvent:
    """The constants of the rule change."""

    at: int
    config: Config


@dataclass(frozen=True, slots=True)
class SessionOpenedEvent:
    """A session opens. `tenant` pays for it; sessions of one tenant are scheduled independently."""

    at: int
    session: str
    policy: Policy = field(default_factory=Policy)
    tenant: str = ""
    resident: bool = True


@dataclass(frozen=True, slots=True)
class SessionClosedEvent:
    """A session closes. Its queue is dropped. A launch in flight will still be reported as done."""

    at: int
    session: str


@dataclass(frozen=True, slots=True)
class PolicyChangedEvent:
    """A session's class, weight, bucket or objective changes."""

    at: int
    session: str
    policy: Policy


# Not frozen, because creation (once per program) would cost four times as much; still, nothing may change it.
@dataclass(slots=True)
class ProgramSubmittedEvent:
    """A program joins its session's queue.

    Attributes:
        program: 1, 2, 3, … in each session. A known number is refused. A number that is too high waits for the programs before
            it.
        kernels: estimated GPU time, in ns, between one edge and the next one; at least one number. A program may be split at its
            edges.
    """

    at: int
    session: str
    program: int
    kernels: tuple[int, ...]


@dataclass(
    slots=True
)  # not frozen, because creation (once per launch) would cost four times as much; still, nothing may change it
class LaunchDoneEvent:
    """The device finished a launch, or stopped it at a kernel's edge.

    Attributes:
        launch: number of the `LaunchDecision`.
        gpu_ns: measured device time.
        core_ns: measured device time times the number of occupied cores, for metering.
        last: first kernel that did not run; -1: all launched kernels ran. The other kernels return to the head of the session's
            queue.
    """

    at: int
    launch: int
    gpu_ns: int
    core_ns: int = 0
    last: int = -1


@dataclass(frozen=True, slots=True)
class SwappedOutEvent:
    """A session was swapped out of the device."""

    at: int
    session: str


@dataclass(frozen=True, slots=True)
class SwappedInEvent:
    """A session was swapped in."""

    at: int
    session: str


@dataclass(frozen=True, slots=True)
class SessionSuspendedEvent:
    """A session is suspended: nothing more of it is launched. The session may still submit programs."""

    at: int
    session: str


@dataclass(frozen=True, slots=True)
class SessionResumedEvent:
    """A suspended session is resumed."""

    at: int
    session: str


@dataclass(frozen=True, slots=True)
class ExclusiveBegunEvent:
    """A session gets the device for itself: only this session is launched."""

    at: int
    session: str


@dataclass(frozen=True, slots=True)
class ExclusiveEndedEvent:
    """The exclusive use of the device ends: all sessions are launched again."""

    at: int


@dataclass(frozen=True, slots=True)
class WithheldEvent:
    """The time of a `WithholdDecision` has come, and nothing was launched since then."""

    at: int


@dataclass(frozen=True, slots=True)
class EpochEndedEvent:
    """The measurements of the last epoch (100 ms). The core adapts the windows.

    Attributes:
        slowdown_permille: the worst ratio of a P0 session's p99 to its p99 alone; 0: not measured.
        idle_permille: share of the epoch in which the device was idle.
    """

    at: int
    slowdown_permille: int = 0
    idle_permille: int = 0


Event = (
    ConfigChangedEvent
    | SessionOpenedEvent
    | SessionClosedEvent
    | PolicyChangedEvent
    | ProgramSubmittedEvent
    | LaunchDoneEvent
    | SwappedOutEvent
    | SwappedInEvent
    | SessionSuspendedEvent
    | SessionResumedEvent
    | ExclusiveBegunEvent
    | ExclusiveEndedEvent
    | EpochEndedEvent
    | WithheldEvent
)
