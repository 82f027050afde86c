"""Everything the core can be told. An event is a fact with the time at which it became known, in integer nanoseconds.

Times come from whoever owns the device; the core never asks for one. A time that runs backwards counts as the latest one seen.
Events are plain values: the journal writes their fields in the order in which they stand here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

PRIORITIES = 5


@dataclass(frozen=True, slots=True)
class Config:
    """The constants of the rule.

    Attributes:
        free_window_ns: GPU time in flight while nothing needs protection, and of P0 itself.
        max_window_ns: The widest pacing window beside a live session of a higher class.
        piece_ns: The longest piece that a program is cut to; one longer kernel stands alone.
        latency_ns: From a decision to the start on the device; a window is at least twice as long, or the device would idle.
        window_permille: A pacing window as a share of the smallest service time that it protects.
        service_ns: The service time of a P0 or P1 session that declares none.
        max_flights: Launches in flight at most; 1 for a runtime that executes while one waits.
        stoppable: The runtime looks for arrivals at a launch's kernel edges, at least once per window, and stops there for a
            higher class (`overtaken`). Launches are then as long as pieces are: what protects higher classes is the stop.
        undeclared_permille: The share of the device that all P0 and P1 sessions without a bucket of their own get together in
            their classes; they run as P2 beyond it. 0: they always run as P2; 1000: they are not policed.
        floor_permille: GPU time that P4 gets for each unit of P2 and P3 while it waits. P0 and P1 never pay for it.
        slow_permille: p99 of P0 over its p99 alone above which an epoch halves the windows.
        calm_permille: The same ratio below which an epoch may widen them.
        idle_permille: The idle share above which it does.
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

    def __post_init__(self) -> None:
        if min(self.free_window_ns, self.max_window_ns, self.piece_ns, self.latency_ns, self.service_ns) < 1:
            raise ValueError("windows, pieces, latency and service time are positive")
        if self.max_flights < 1:
            raise ValueError("something must be in flight now and then")
        if self.stoppable and self.max_flights > 1:
            raise ValueError("a launch can be stopped only where nothing is in flight behind it: max_flights is 1 then")
        if not 0 <= self.floor_permille <= 1000:
            raise ValueError(f"the floor is 0 to 1000 permille, not {self.floor_permille}")
        if not 0 <= self.undeclared_permille <= 1000:
            raise ValueError(f"the share of undeclared P0 and P1 is 0 to 1000 permille, not {self.undeclared_permille}")


@dataclass(frozen=True, slots=True)
class Policy:
    """What the scheduler decided about one session.

    Attributes:
        priority: The class, 0 (highest) to 4.
        weight: Share inside the class, relative to the others'.
        service_ns: GPU time of one request of a P0 or P1 session; 0: not known.
        objective_ns: Response time within which a program is on time; 0: none declared.
        rate_permille: P0 and P1 are policed to this share of the device by a bucket of the session's own; 0: the session declares
            nothing, and shares the bucket of `Config.undeclared_permille` with all such sessions.
        burst_ns: GPU time that may come at once on top; of the session's own bucket.
    """

    priority: int = 2
    weight: int = 1
    service_ns: int = 0
    objective_ns: int = 0
    rate_permille: int = 0
    burst_ns: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.priority < PRIORITIES:
            raise ValueError(f"priority is 0 to {PRIORITIES - 1}, not {self.priority}")
        if not 1 <= self.weight <= 1 << 20:
            raise ValueError(f"weight is 1 to {1 << 20}, not {self.weight}")
        if min(self.service_ns, self.objective_ns, self.rate_permille, self.burst_ns) < 0:
            raise ValueError("times and rates are not negative")


@dataclass(frozen=True, slots=True)
class ConfigChangedEvent:
    """New constants, from now on."""

    at: int
    config: Config


@dataclass(frozen=True, slots=True)
class SessionOpenedEvent:
    """A session was admitted. `tenant` is who pays; sessions of one tenant are scheduled apart."""

    at: int
    session: str
    policy: Policy = field(default_factory=Policy)
    tenant: str = ""
    resident: bool = True


@dataclass(frozen=True, slots=True)
class SessionClosedEvent:
    """A session ended; what it had queued is dropped, what is in flight will still be reported done."""

    at: int
    session: str


@dataclass(frozen=True, slots=True)
class PolicyChangedEvent:
    """A session has another class, weight, rate or objective."""

    at: int
    session: str
    policy: Policy


@dataclass(frozen=True, slots=True)
class ProgramSubmittedEvent:
    """A program joined its session's queue.

    Attributes:
        program: 1, 2, 3, … in each session. A number seen before is refused, one too high waits for those before it.
        kernels: Estimated GPU time in ns between one edge and the next at which the program may be cut; at least one.
    """

    at: int
    session: str
    program: int
    kernels: tuple[int, ...]


@dataclass(
    slots=True
)  # not frozen: one is made per launch, and that would cost four times as much. Nothing changes one.
class LaunchDoneEvent:
    """The device finished a launch, or stopped it at the edge of a kernel.

    Attributes:
        launch: The number in the `LaunchDecision`.
        gpu_ns: Time it really took on the device.
        core_ns: Cores it occupied times that time, for metering.
        last: The first kernel that was not done, -1: all that were launched are. The others go back to the head of their queue.
    """

    at: int
    launch: int
    gpu_ns: int
    core_ns: int = 0
    last: int = -1


@dataclass(frozen=True, slots=True)
class SwappedOutEvent:
    """A session's memory left the device."""

    at: int
    session: str


@dataclass(frozen=True, slots=True)
class SwappedInEvent:
    """A session's memory is on the device again."""

    at: int
    session: str


@dataclass(frozen=True, slots=True)
class SessionSuspendedEvent:
    """Nothing more of this session is launched until it is resumed. It may go on submitting."""

    at: int
    session: str


@dataclass(frozen=True, slots=True)
class SessionResumedEvent:
    """A suspended session takes part again."""

    at: int
    session: str


@dataclass(frozen=True, slots=True)
class ExclusiveBegunEvent:
    """From now on only this session is launched."""

    at: int
    session: str


@dataclass(frozen=True, slots=True)
class ExclusiveEndedEvent:
    """All sessions are launched again."""

    at: int


@dataclass(frozen=True, slots=True)
class EpochEndedEvent:
    """What the last epoch (100 ms) measured; windows follow it.

    Attributes:
        slowdown_permille: The worst P0 session's p99 over its p99 alone; 0: not measured.
        idle_permille: Share of the epoch in which the device had nothing to run.
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
)
