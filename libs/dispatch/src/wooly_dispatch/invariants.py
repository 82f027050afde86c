"""Checks of the dispatch rule's laws: `Auditor` checks events and decisions, `check_state` checks the core's own state.

`Auditor` checks these laws on measured times. Only the law *window* is about estimates:

- *legal*: a launched session is open, resident, not suspended, and not excluded by an exclusive session; the launch has the next
  kernels in order;
- *strict*: no launch goes before a ready session of a higher class (except P4 before P2 and P3, by its floor);
- *window*: at each launch, the estimated time in flight is within the window of the launch's class, or the launch is alone;
- *conservation*: while a session is ready, a launch is in flight, or the device is kept idle (so no session waits unjustly);
- *withholding*: the device is kept idle only if no session is ready in P0 and P1, and one of them has nothing to run; each time
  for at most `withheld_ns`, and in all for at most `withheld_permille` of the time and what was saved of it (`SAVED_NS`);
- *inversion*: from the arrival of a P0 or P1 program at an idle session until the program is done, lower classes get at most
  (1 + e) * max(W, K): W their window, K the longest piece in flight, e the largest share by which a launch overran its estimate;
- *fairness*: over any interval in which two sessions of a class are both ready, their service A (in launch order) and weights w
  satisfy |A_f/w_f - A_g/w_g| <= c_f/w_f + c_g/w_g + 2 e * max(W, K)/w_min, with c the longest piece of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wooly_dispatch.decisions import Decision, WithholdDecision
from wooly_dispatch.errors import InvariantError
from wooly_dispatch.events import ConfigChangedEvent, Event, ExclusiveBegunEvent, LaunchDoneEvent
from wooly_dispatch.ledger import Account, LaunchInFlight, Ledger, LedgerRecord, Work
from wooly_dispatch.policing import undeclared_burst_ns
from wooly_dispatch.state import SAVED_NS, SCALE, DispatchState
from wooly_dispatch.windows import PROTECTED

_PERMILLE = 1000


@dataclass(slots=True)
class Arrival:
    """A program that arrived at an idle session: the session's class, what lower classes had run then, what they may still
    run.
    """

    priority: int
    lower: int
    allowed: int


@dataclass(slots=True)
class Pair:
    """Two ready sessions of a class: the difference of their service (scaled), and the extremes of the difference."""

    difference: int = 0
    highest: int = 0
    lowest: int = 0


@dataclass(frozen=True, slots=True)
class AuditorRecord:
    """An `Auditor` as plain data, with the same attribute names. Violations are omitted.

    Attributes:
        measured: (index in `ledger.flights`, measured time in ns) of launches that finished before an earlier launch.
        pairs: (era, era, difference) for each pair of sessions.
    """

    ledger: LedgerRecord
    checked: int
    worst_inversion_permille: int
    worst_unfairness_permille: int
    in_flight_ns: int
    allowed: dict[int, int]
    lower: list[int]
    arrivals: dict[str, dict[int, Arrival]]
    overrun: int
    error: int
    longest: int
    eras: dict[str, int]
    era: int
    pieces: dict[str, int]
    pairs: list[tuple[int, int, Pair]]
    peers: dict[int, tuple[int, int, list[tuple[int, str, int]]]]
    lightest: dict[str, int]
    measured: list[tuple[int, int]]
    counted: int
    began: int
    withheld_ns: int
    withheld_limits: tuple[int, int]


class Auditor(Ledger):
    """Checks every entry of a journal. `violations` has all violations.

    Args:
        raises: raise `InvariantError` at the first violation.
        pairs: also check fairness, which costs O(sessions of the class) per launch.
    """

    def __init__(self, raises: bool = True, pairs: bool = True) -> None:
        super().__init__()
        self.raises, self.pairs = raises, pairs
        self.violations: list[InvariantError] = []
        self.checked = 0
        self.worst_inversion_permille = 0
        self.worst_unfairness_permille = 0
        self._windows: Sequence[int] = ()
        self._in_flight_ns = 0
        self._allowed: dict[int, int] = {}  # of each launch in flight: maximum estimated time in flight at the launch
        self._lower = [0] * PROTECTED  # measured time of the classes below each protected class
        self._arrivals: dict[str, dict[int, Arrival]] = {}
        self._overrun = 0  # maximum, in permille, by which a launch exceeded its estimate
        self._error = 0  # maximum, in permille, by which a launch missed its estimate in either direction
        self._longest = 0  # the largest window or piece so far
        self._eras: dict[str, int] = {}
        self._era = 0
        self._pieces: dict[str, int] = {}
        self._pairs: dict[tuple[int, int], Pair] = {}
        # per launch: era and weight of its session; era, id and weight of each session that was ready in the same class
        self._peers: dict[int, tuple[int, int, list[tuple[int, str, int]]]] = {}
        # the smallest weight that each session ever had; a launch in flight may still be charged at this weight
        self._lightest: dict[str, int] = {}
        self._measured: dict[int, tuple[LaunchInFlight, int]] = {}
        self._counted = 0
        self._began = -1  # time of the first entry
        self._withheld_ns = 0  # time for which the device was kept idle
        self._withheld_limits = (0, 0)  # the largest `withheld_permille` and `withheld_ns` so far

    def audit(self, event: Event, decisions: Sequence[Decision], windows: Sequence[int]) -> None:
        """Check one entry. `windows`: the windows in force after the entry (`DispatchState.windows`)."""
        self._windows = windows
        if isinstance(event, ExclusiveBegunEvent):
            self._arrivals.clear()
        self.observe(event, decisions)

    def _fail(self, law: str, detail: str) -> None:
        error = InvariantError(law, f"{detail} (entry {self.entry})")
        self.violations.append(error)
        if self.raises:
            raise error

    # -- records -----------------------------------------------------------------------------------------------------

    def auditor_record(self) -> AuditorRecord:
        """All state as plain data. The record shares tables with this object: encode the record before the next event."""
        measured = list(self._measured.values())
        first = len(self.airborne)
        return AuditorRecord(
            self.record(flight for flight, _ in measured), self.checked, self.worst_inversion_permille,
            self.worst_unfairness_permille, self._in_flight_ns, self._allowed, self._lower, self._arrivals,
            self._overrun, self._error, self._longest, self._eras, self._era, self._pieces,
            [(*key, pair) for key, pair in self._pairs.items()], self._peers, self._lightest,
            [(first + place, gpu_ns) for place, (_, gpu_ns) in enumerate(measured)], self._counted,
            self._began, self._withheld_ns, self._withheld_limits,
        )  # fmt: skip

    def load_auditor_record(self, record: AuditorRecord) -> None:
        """Replace the state by that of `record`.

        Raises:
            LookupError: the record is inconsistent.
        """
        flights = self.load_record(record.ledger)
        if len(record.lower) != PROTECTED or any(not 0 <= place < len(flights) for place, _ in record.measured):
            raise LookupError(
                "the auditor's record is inconsistent: it has a wrong number of classes, or names a launch that does not exist"
            )
        self.checked = record.checked
        self.worst_inversion_permille = record.worst_inversion_permille
        self.worst_unfairness_permille = record.worst_unfairness_permille
        self._in_flight_ns, self._allowed, self._lower = record.in_flight_ns, record.allowed, record.lower
        self._arrivals, self._overrun, self._error = record.arrivals, record.overrun, record.error
        self._longest, self._eras, self._era = record.longest, record.eras, record.era
        self._pieces, self._peers, self._lightest = record.pieces, record.peers, record.lightest
        self._pairs = {(first, second): pair for first, second, pair in record.pairs}
        self._measured = {flights[p].decision.launch: (flights[p], gpu_ns) for p, gpu_ns in record.measured}
        self._counted = record.counted
        self._began, self._withheld_ns = record.began, record.withheld_ns
        self._withheld_limits = record.withheld_limits

    # -- launches ----------------------------------------------------------------------------------------------------

    def on_launched(self, flight: LaunchInFlight) -> None:
        account, decision, work = flight.account, flight.decision, flight.work
        self.checked += 1
        if (
            account.ready != decision.priority
            or work.number != decision.program
            or work.next != decision.first
            or not decision.first < decision.last <= work.kernels
        ):
            self._fail(
                "legal",
                f"{decision}, but the session has class {account.ready}, and kernel {work.next} of program {work.number} is next",
            )
        spared = (2, 3) if decision.floor and decision.priority == 4 else ()
        for priority in range(decision.priority):
            if self.ready[priority] and priority not in spared:
                self._fail(
                    "strict",
                    f"{decision} goes before session {min(self.ready[priority])} of class {priority}, which is ready",
                )
        window = self._windows[decision.priority]
        if self.airborne and self._in_flight_ns + decision.estimate_ns > window:
            self._fail(
                "window",
                f"{self._in_flight_ns} + {decision.estimate_ns} ns are in flight, but the window is {window} ns",
            )
        self._in_flight_ns += decision.estimate_ns
        self._allowed[decision.launch] = max(window, decision.estimate_ns)
        self._longest = max(self._longest, window, decision.estimate_ns)
        if self.pairs:
            era = self._eras.get(account.id, 0)
            peers = [
                (self._eras[peer], peer, other.event.policy.weight)
                for peer, other in self.ready[decision.priority].items()
                if other is not account
            ]
            weight = account.event.policy.weight
            self._peers[decision.launch] = (era, weight, peers)
            for name, w in ((account.id, weight), *((peer, w) for _, peer, w in peers)):
                self._lightest[name] = min(self._lightest.get(name, w), w)

    def on_settled(self) -> None:
        if self._began < 0:
            self._began = self.now
        if not self.airborne and (not self.withheld_until or self._protected()):
            for ready in self.ready:
                if ready:
                    self._fail("conservation", f"session {min(ready)} is ready, but the device is idle")

    # -- time that is withheld ---------------------------------------------------------------------------------------

    def _protected(self) -> bool:
        """Whether a session is ready in P0 or P1."""
        return any(self.ready[:PROTECTED])

    def on_config(self, event: ConfigChangedEvent) -> None:
        share, longest = self._withheld_limits
        config = event.config
        self._withheld_limits = max(share, config.withheld_permille), max(longest, config.withheld_ns)

    def on_time(self, elapsed: int) -> None:
        if self.withheld_until:
            self._withheld_ns += min(elapsed, self.withheld_until - self.now)

    def on_withheld(self, decision: WithholdDecision) -> None:
        share, longest = self._withheld_limits
        resting = [
            a.id
            for a in self.accounts.values()
            if a.event.policy.priority < PROTECTED and not (a.work or a.in_flight or a.suspended) and a.resident
        ]
        if self.airborne or self._protected() or not resting or not any(self.ready):
            self._fail(
                "withholding",
                f"{decision}, but {len(self.airborne)} launches are in flight, and of P0 and P1 {len(resting)} sessions rest",
            )
        if not 0 < decision.until - self.now <= longest:
            self._fail("withholding", f"{decision} at {self.now}, but {longest} ns are the limit")
        allowed = share * (self.now - self._began + SAVED_NS) // _PERMILLE
        if self._withheld_ns + decision.until - self.now > allowed:
            self._fail(
                "withholding", f"{self._withheld_ns} ns and {decision} at {self.now}, but {allowed} ns are the limit"
            )

    # -- measured times ----------------------------------------------------------------------------------------------

    def on_done(self, flight: LaunchInFlight, event: LaunchDoneEvent) -> None:
        decision = flight.decision
        self._in_flight_ns -= decision.estimate_ns
        del self._allowed[decision.launch]
        error = (event.gpu_ns - decision.estimate_ns) * _PERMILLE // decision.estimate_ns
        if 0 <= event.last < decision.last:
            error = max(error, 0)  # the launch was stopped, so a shorter time is not an error of the estimate
        self._overrun = max(self._overrun, error + 1)
        self._error = max(self._error, abs(error) + 1)
        for priority in range(PROTECTED):
            if decision.priority > priority:
                self._lower[priority] += event.gpu_ns
        if self.pairs:
            self._measured[decision.launch] = (flight, event.gpu_ns)
            while self._counted + 1 in self._measured:
                self._counted += 1
                self._fairness(*self._measured.pop(self._counted))

    def on_submitted(self, account: Account, work: Work) -> None:
        if account.ready not in range(PROTECTED) or len(account.work) > 1 or account.in_flight or self.exclusive:
            return
        below = [f.decision for f in self.airborne.values() if f.decision.priority > account.ready]
        allowed = max((self._allowed[d.launch] for d in below), default=0)
        self._arrivals.setdefault(account.id, {})[work.number] = Arrival(
            account.ready, self._lower[account.ready], allowed
        )

    def on_program_done(self, account: Account, work: Work) -> None:
        arrival = self._arrivals.get(account.id, {}).pop(work.number, None)
        if arrival is None:
            return
        suffered = self._lower[arrival.priority] - arrival.lower
        bound = arrival.allowed * (_PERMILLE + self._overrun) // _PERMILLE
        if arrival.allowed:
            self.worst_inversion_permille = max(self.worst_inversion_permille, suffered * _PERMILLE // arrival.allowed)
        if suffered > bound:
            self._fail(
                "inversion",
                f"session {account.id} waited {suffered} ns for lower classes, but at most {bound} ns are allowed",
            )

    def on_ready(self, account: Account, before: int) -> None:
        if before >= 0:
            if account.work:  # swapped out, suspended or reclassified: this wait is not an inversion
                self._arrivals.pop(account.id, None)
            self._eras.pop(account.id, None)
        if account.ready >= 0:
            self._era += 1
            self._eras[account.id] = self._era

    def _fairness(self, flight: LaunchInFlight, gpu_ns: int) -> None:
        """Account for one launch, in launch order, against every session that was ready in its class at the launch."""
        era, weight, peers = self._peers.pop(flight.decision.launch)
        own = flight.account
        piece = self._pieces[own.id] = max(self._pieces.get(own.id, 0), gpu_ns, flight.decision.estimate_ns)
        for other_era, other, other_weight in peers:
            first = min(era, other_era)
            key = (first, max(era, other_era))
            pair = self._pairs.get(key)
            if pair is None:
                self._forget_pairs()
                pair = self._pairs[key] = Pair()
            pair.difference += (gpu_ns if era == first else -gpu_ns) * SCALE // weight
            pair.highest = max(pair.highest, pair.difference)
            pair.lowest = min(pair.lowest, pair.difference)
            slack = 2 * self._error * self._longest // _PERMILLE
            bound = (
                piece * SCALE // weight
                + self._pieces.get(other, 0) * SCALE // other_weight
                + slack * SCALE // min(self._lightest[own.id], self._lightest[other])
                + 2 * SCALE
            )
            if pair.highest - pair.lowest > bound:
                self._fail(
                    "fairness",
                    f"the service of {own.id} and {other} differs by {(pair.highest - pair.lowest) // SCALE} ns, "
                    f"the limit is {bound // SCALE} ns",
                )
            self.worst_unfairness_permille = max(
                self.worst_unfairness_permille, (pair.highest - pair.lowest) * _PERMILLE // bound
            )

    def _forget_pairs(self) -> None:
        if len(self._pairs) > 4096:
            live = set(self._eras.values())
            self._pairs = {key: pair for key, pair in self._pairs.items() if live.issuperset(key)}


def check_state(state: DispatchState) -> None:
    """Check that the core's state is consistent. The cost grows with the whole state.

    Raises:
        InvariantError: the state is inconsistent.
    """

    def law(holds: bool, name: str, detail: object) -> None:
        if not holds:
            raise InvariantError(name, str(detail))

    law(state.in_flight_ns == sum(f.estimate for f in state.flights.values()), "window sum", state.in_flight_ns)
    for session in state.sessions.values():
        flights = sum(f.session is session for f in state.flights.values())
        law(
            session.in_flight == flights,
            "flights of a session",
            f"{session.id} has {session.in_flight} in its record, but {flights} in flight",
        )
        may = bool(session.programs) and not session.suspended and not session.asked
        may = may and state.exclusive in ("", session.id)
        law((session.lane >= 0) == may, "readiness", f"{session.id} is in lane {session.lane}")
        law(not (session.asked and session.resident), "asked", session.id)
        law(all(p.next < len(p.ends) for p in session.programs), "queue", session.id)
        law(session.expected not in session.early, "held back", session.id)
        law(session.tokens <= max(session.policy.burst_ns, 0) or not session.policy.rate_permille, "bucket", session.id)
    for priority, lane in enumerate(state.lanes):
        valid = [(start, session) for start, _, stamp, session in lane.heap if session.stamp == stamp]
        members = [s for s in state.sessions.values() if s.lane == priority]
        law(
            lane.size == len(valid) == len(members),
            "lane",
            f"class {priority}: {lane.size}, {len(valid)}, {len(members)}",
        )
        for start, session in valid:
            law(start == max(session.lift, session.finish[priority]), "start tag", session.id)
    waiting = sum([lane.size for lane in state.lanes])
    law(state.waiting == waiting, "waiting", f"{state.waiting} sessions wait by the count, but {waiting} by the lanes")
    law(state.tokens <= undeclared_burst_ns(state.config), "bucket of the undeclared", state.tokens)
    law(state.exclusive in ("", *state.sessions), "exclusive", state.exclusive)
    law(not (state.withheld_until and state.flights), "withholding", state.withheld_until)
    most = SAVED_NS * state.config.withheld_permille // _PERMILLE
    law(state.withheld_tokens <= most or not state.guarded, "bucket of withheld time", state.withheld_tokens)
    for session in state.guarded:
        rests = not session.programs and not session.in_flight
        law(rests or session.rhythm.rested < 0, "rest", session.id)
        law(session.rhythm.ordered == sorted(session.rhythm.pauses), "rhythm", session.id)
