"""The ledger: which sessions are ready and which launches are in flight, computed from events and decisions alone.

The ledger does not know the core's state, and of its rule only that classes are strict. So the modules that build on it
(`metrics`, `invariants`) verify the core independently. A subclass overrides the hooks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from wooly_dispatch.decisions import Decision, DemoteDecision, LaunchDecision, RefuseDecision, WithholdDecision
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
from wooly_dispatch.windows import PROTECTED


class Work:
    """A program that is queued or in flight; `estimates` of its kernels are in ns."""

    __slots__ = ("at", "demoted", "estimates", "kernels", "next", "number")

    def __init__(self, number: int, estimates: tuple[int, ...], at: int) -> None:
        self.number, self.estimates, self.kernels, self.at = number, estimates, len(estimates), at
        self.next = 0
        self.demoted = False


class Account:
    """The ledger's knowledge of one session. Times are in ns."""

    __slots__ = ("early", "event", "expected", "id", "in_flight", "ready", "resident", "suspended", "work")

    def __init__(self, event: SessionOpenedEvent) -> None:
        self.event = event  # the opening event, with the policy in force now
        self.id = event.session
        self.resident = event.resident
        self.suspended = False
        self.expected = 1
        self.early: dict[int, tuple[tuple[int, ...], int]] = {}
        self.work: deque[Work] = deque()
        self.in_flight = 0
        self.ready = -1  # the class in which it may be launched; -1: it may not be launched


class LaunchInFlight:
    """A launch that is not done."""

    __slots__ = ("account", "at", "decision", "work")

    def __init__(self, decision: LaunchDecision, account: Account, work: Work, at: int) -> None:
        self.decision, self.account, self.work, self.at = decision, account, work, at


@dataclass(frozen=True, slots=True)
class WorkRecord:
    """A `Work` as plain data."""

    number: int
    estimates: tuple[int, ...]
    at: int
    next: int
    demoted: bool


@dataclass(frozen=True, slots=True)
class AccountRecord:
    """An `Account` as plain data. `early`: number, estimates and time of programs. `work`: indices in `LedgerRecord.works`."""

    event: SessionOpenedEvent
    resident: bool
    suspended: bool
    expected: int
    early: tuple[tuple[int, tuple[int, ...], int], ...]
    work: tuple[int, ...]
    in_flight: int
    ready: int


@dataclass(frozen=True, slots=True)
class FlightRecord:
    """An `LaunchInFlight` as plain data. `account` and `work` are indices in `LedgerRecord.accounts` and `.works`."""

    decision: LaunchDecision
    account: int
    work: int
    at: int


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """A `Ledger` as plain data. Its tables share accounts and programs, so they contain indices in the lists of all of them.

    Attributes:
        accounts: all accounts, including those of closed sessions with launches in flight.
        open: indices of the accounts of open sessions.
        works: all programs.
        flights: all launches that are still needed.
        airborne: indices of the launches that are not done.
        ready: indices of the accounts of ready sessions, by class.
    """

    now: int
    entry: int
    accounts: tuple[AccountRecord, ...]
    open: tuple[int, ...]
    works: tuple[WorkRecord, ...]
    flights: tuple[FlightRecord, ...]
    airborne: tuple[int, ...]
    ready: tuple[tuple[int, ...], ...]
    busy: int
    exclusive: str
    stoppable: bool
    withheld_until: int


_T = TypeVar("_T")


def _at(found: Sequence[_T], place: int) -> _T:
    if not 0 <= place < len(found):
        raise LookupError(f"the record names index {place} of a list with {len(found)} items")
    return found[place]


class Ledger:
    """Feed every event with its decisions to `observe`, in order."""

    def __init__(self) -> None:
        self.now = 0
        self.entry = 0
        self.accounts: dict[str, Account] = {}
        self.airborne: dict[int, LaunchInFlight] = {}
        self.ready: list[dict[str, Account]] = [{} for _ in range(5)]
        self.busy = 0  # sessions that are ready or in flight
        self.exclusive = ""
        self.stoppable = False  # whether a launch can be stopped for a higher class
        self.withheld_until = 0  # until when the core keeps the device idle; 0: it does not

    # -- hooks -------------------------------------------------------------------------------------------------------

    def on_time(self, elapsed: int) -> None:
        """`elapsed` ns passed in the current state."""

    def on_launched(self, flight: LaunchInFlight) -> None:
        """A launch is about to be added."""

    def on_done(self, flight: LaunchInFlight, event: LaunchDoneEvent) -> None:
        """A launch is about to be removed, because it is done."""

    def on_program_done(self, account: Account, work: Work) -> None:
        """The last kernel of a program is done."""

    def on_ready(self, account: Account, before: int) -> None:
        """A session's class changed from `before` (-1: not ready) to `account.ready`."""

    def on_submitted(self, account: Account, work: Work) -> None:
        """A program joined the queue."""

    def on_epoch(self, event: EpochEndedEvent) -> None:
        """An epoch ended."""

    def on_config(self, event: ConfigChangedEvent) -> None:
        """The constants of the rule changed."""

    def on_withheld(self, decision: WithholdDecision) -> None:
        """The device is about to be kept idle."""

    def on_settled(self) -> None:
        """All decisions on one event are applied."""

    # -- records -----------------------------------------------------------------------------------------------------

    def record(self, more: Iterable[LaunchInFlight] = ()) -> LedgerRecord:
        """All state as plain data. `more`: further launches that a subclass needs; they are last in `flights`."""
        flights = [*self.airborne.values(), *more]
        ready = [a for accounts in self.ready for a in accounts.values()]
        accounts = {id(a): a for a in (*self.accounts.values(), *(f.account for f in flights), *ready)}
        works = {id(w): w for w in (*(w for a in accounts.values() for w in a.work), *(f.work for f in flights))}
        account_at = {key: place for place, key in enumerate(accounts)}
        work_at = {key: place for place, key in enumerate(works)}
        return LedgerRecord(
            self.now,
            self.entry,
            tuple([
                AccountRecord(a.event, a.resident, a.suspended, a.expected,
                              tuple([(number, *early) for number, early in a.early.items()]),
                              tuple([work_at[id(w)] for w in a.work]), a.in_flight, a.ready)
                for a in accounts.values()
            ]),
            tuple(range(len(self.accounts))),
            tuple([WorkRecord(w.number, w.estimates, w.at, w.next, w.demoted) for w in works.values()]),
            tuple([FlightRecord(f.decision, account_at[id(f.account)], work_at[id(f.work)], f.at) for f in flights]),
            tuple(range(len(self.airborne))),
            tuple([tuple([account_at[id(a)] for a in ready.values()]) for ready in self.ready]),
            self.busy,
            self.exclusive,
            self.stoppable,
            self.withheld_until,
        )  # fmt: skip

    def load_record(self, record: LedgerRecord) -> list[LaunchInFlight]:
        """Replace the state by that of `record`. Returns the record's launches, in the order of `LedgerRecord.flights`.

        Raises:
            LookupError: the record names an index that does not exist.
        """
        works = []
        for w in record.works:
            work = Work(w.number, w.estimates, w.at)
            work.next, work.demoted = w.next, w.demoted
            works.append(work)
        accounts = []
        for a in record.accounts:
            account = Account(a.event)
            account.resident, account.suspended, account.expected = a.resident, a.suspended, a.expected
            account.early = {number: (estimates, at) for number, estimates, at in a.early}
            account.work = deque(_at(works, place) for place in a.work)
            account.in_flight, account.ready = a.in_flight, a.ready
            accounts.append(account)
        flights = [
            LaunchInFlight(f.decision, _at(accounts, f.account), _at(works, f.work), f.at) for f in record.flights
        ]
        self.now, self.entry, self.busy = record.now, record.entry, record.busy
        self.exclusive, self.stoppable = record.exclusive, record.stoppable
        self.withheld_until = record.withheld_until
        self.accounts = {a.id: a for a in (_at(accounts, place) for place in record.open)}
        self.airborne = {f.decision.launch: f for f in (_at(flights, place) for place in record.airborne)}
        if len(record.ready) != len(self.ready):
            raise LookupError(f"the record has {len(record.ready)} classes, but must have {len(self.ready)}")
        self.ready = [{a.id: a for a in (_at(accounts, place) for place in ready)} for ready in record.ready]
        return flights

    # -- the fold ----------------------------------------------------------------------------------------------------

    def observe(self, event: Event, decisions: Sequence[Decision]) -> None:
        """Apply one entry of the journal."""
        self.entry += 1
        if event.at > self.now:
            self.on_time(event.at - self.now)
            self.now = event.at
            if self.withheld_until <= self.now:
                self.withheld_until = 0
        if not (decisions and isinstance(decisions[0], RefuseDecision)):
            self._book(event, decisions)
        for decision in decisions:
            if isinstance(decision, LaunchDecision):
                self.withheld_until = 0
                self._launch(decision)
            elif isinstance(decision, WithholdDecision):
                self.on_withheld(decision)
                self.withheld_until = decision.until
        self.on_settled()

    def _book(self, event: Event, decisions: Sequence[Decision]) -> None:
        match event:
            case LaunchDoneEvent():
                self._done(event)
            case ProgramSubmittedEvent():
                self._submitted(event, decisions)
            case SessionOpenedEvent():
                self.accounts[event.session] = Account(event)
            case SessionClosedEvent():
                account = self.accounts[event.session]
                account.work.clear()
                self._settle(account)
                del self.accounts[event.session]
                if self.exclusive == event.session:
                    self._reserve("")
            case PolicyChangedEvent():
                account = self.accounts[event.session]
                old = account.event
                if event.policy.priority < PROTECTED <= old.policy.priority:
                    over = {d.program for d in decisions if isinstance(d, DemoteDecision)}
                    for work in account.work:
                        work.demoted = work.number in over
                self._move(account, -1)  # a session with a new policy joins its class again
                account.event = SessionOpenedEvent(old.at, old.session, event.policy, old.tenant, old.resident)
                self._settle(account)
            case SwappedInEvent() | SwappedOutEvent():
                self.accounts[event.session].resident = isinstance(event, SwappedInEvent)
                self._settle(self.accounts[event.session])
            case SessionSuspendedEvent() | SessionResumedEvent():
                self.accounts[event.session].suspended = isinstance(event, SessionSuspendedEvent)
                self._settle(self.accounts[event.session])
            case ExclusiveBegunEvent():
                self._reserve(event.session)
            case ExclusiveEndedEvent():
                self._reserve("")
            case EpochEndedEvent():
                self.on_epoch(event)
            case ConfigChangedEvent():
                self.stoppable = event.config.stoppable
                self.on_config(event)
            case WithheldEvent():
                pass  # the time has passed

    def _submitted(self, event: ProgramSubmittedEvent, decisions: Sequence[Decision]) -> None:
        account = self.accounts[event.session]
        account.early[event.program] = (event.kernels, event.at)
        while account.expected in account.early:
            work = Work(account.expected, *account.early.pop(account.expected))
            work.demoted = any(isinstance(d, DemoteDecision) and d.program == work.number for d in decisions)
            account.work.append(work)
            account.expected += 1
            self._settle(account)
            self.on_submitted(account, work)

    def _launch(self, decision: LaunchDecision) -> None:
        account = self.accounts[decision.session]
        work = account.work[0]
        flight = LaunchInFlight(decision, account, work, self.now)
        self.on_launched(flight)
        self.airborne[decision.launch] = flight
        self._count(account, 1)
        work.next = decision.last
        if work.next >= work.kernels:
            account.work.popleft()
            self._settle(account)

    def _done(self, event: LaunchDoneEvent) -> None:
        flight = self.airborne[event.launch]
        self.on_done(flight, event)
        del self.airborne[event.launch]
        account, work = flight.account, flight.work
        self._count(account, -1)
        if 0 <= event.last < flight.decision.last:
            work.next = event.last
            if self.accounts.get(account.id) is account and (not account.work or account.work[0] is not work):
                account.work.appendleft(work)
                self._settle(account)
        elif flight.decision.last >= work.kernels:
            self.on_program_done(account, work)

    def _class_of(self, account: Account) -> int:
        if not account.work or not account.resident or account.suspended:
            return -1
        if self.exclusive and self.exclusive != account.id:
            return -1
        priority = account.event.policy.priority
        return max(priority, 2) if account.work[0].demoted else priority

    def _settle(self, account: Account) -> None:
        wanted = self._class_of(account)
        if wanted != account.ready:
            self._move(account, wanted)

    def _move(self, account: Account, wanted: int) -> None:
        before = account.ready
        if before >= 0:
            del self.ready[before][account.id]
        if wanted >= 0:
            self.ready[wanted][account.id] = account
        self.busy += ((wanted >= 0) - (before >= 0)) * (not account.in_flight)
        account.ready = wanted
        self.on_ready(account, before)

    def _count(self, account: Account, change: int) -> None:
        before = account.in_flight
        account.in_flight += change
        if account.ready < 0:
            self.busy += (account.in_flight > 0) - (before > 0)

    def _reserve(self, session: str) -> None:
        self.exclusive = session
        for account in self.accounts.values():
            self._settle(account)
