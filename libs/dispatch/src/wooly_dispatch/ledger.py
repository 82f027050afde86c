"""Books kept from events and decisions alone: who is ready, what is in flight, who may be launched.

They know nothing of the core's state or of its rule beyond strict classes, so that what is built on them (`metrics`,
`invariants`) is a second opinion. A subclass overrides the hooks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from wooly_dispatch.decisions import Decision, DemoteDecision, LaunchDecision, RefuseDecision
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
from wooly_dispatch.windows import PROTECTED


class Work:
    """A program that is queued or in flight; `estimates` of its kernels in ns."""

    __slots__ = ("at", "demoted", "estimates", "kernels", "next", "number")

    def __init__(self, number: int, estimates: tuple[int, ...], at: int) -> None:
        self.number, self.estimates, self.kernels, self.at = number, estimates, len(estimates), at
        self.next = 0
        self.demoted = False


class Account:
    """What the books say of one session. Times in ns."""

    __slots__ = ("early", "event", "expected", "in_flight", "ready", "resident", "suspended", "work")

    def __init__(self, event: SessionOpenedEvent) -> None:
        self.event = event  # as it was opened, with its policy as it is now
        self.resident = event.resident
        self.suspended = False
        self.expected = 1
        self.early: dict[int, tuple[tuple[int, ...], int]] = {}
        self.work: deque[Work] = deque()
        self.in_flight = 0
        self.ready = -1  # the class in which it may be launched, -1: it may not

    @property
    def id(self) -> str:
        return self.event.session


class Airborne:
    """A launch that is not done."""

    __slots__ = ("account", "at", "decision", "work")

    def __init__(self, decision: LaunchDecision, account: Account, work: Work, at: int) -> None:
        self.decision, self.account, self.work, self.at = decision, account, work, at


class Ledger:
    """Feed it every event with its decisions, in order: `observe`."""

    def __init__(self) -> None:
        self.now = 0
        self.entry = 0
        self.accounts: dict[str, Account] = {}
        self.airborne: dict[int, Airborne] = {}
        self.ready: list[dict[str, Account]] = [{} for _ in range(5)]
        self.busy = 0  # sessions that are ready or in flight
        self.exclusive = ""
        self.stoppable = False  # whether launches end where a higher class arrives

    # -- hooks -------------------------------------------------------------------------------------------------------

    def on_time(self, elapsed: int) -> None:
        """`elapsed` ns passed in the state that the books show now."""

    def on_launched(self, flight: Airborne) -> None:
        """A launch is about to be booked."""

    def on_done(self, flight: Airborne, event: LaunchDoneEvent) -> None:
        """A launch is about to be taken off the books."""

    def on_program_done(self, account: Account, work: Work) -> None:
        """The last kernel of a program is done."""

    def on_ready(self, account: Account, before: int) -> None:
        """A session may be launched in another class than `before` (-1: not at all)."""

    def on_submitted(self, account: Account, work: Work) -> None:
        """A program joined the queue."""

    def on_epoch(self, event: EpochEndedEvent) -> None:
        """An epoch ended."""

    def on_settled(self) -> None:
        """All decisions on one event are booked."""

    # -- the fold ----------------------------------------------------------------------------------------------------

    def observe(self, event: Event, decisions: Sequence[Decision]) -> None:
        """Book one entry of the journal."""
        self.entry += 1
        if event.at > self.now:
            self.on_time(event.at - self.now)
            self.now = event.at
        if not (decisions and isinstance(decisions[0], RefuseDecision)):
            self._book(event, decisions)
        for decision in decisions:
            if isinstance(decision, LaunchDecision):
                self._launch(decision)
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
                self._move(account, -1)  # under other terms it starts anew
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
        flight = Airborne(decision, account, work, self.now)
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
