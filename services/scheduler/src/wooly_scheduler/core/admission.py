"""The admission test: a response-time test of all P0 and P1 sessions of a GPU that declare an objective.

In the worst case, a request of a session of class c with service time C waits for:

- *blocking*: work of lower classes in flight at the arrival, at most max((1 + e) * W, K). W is the widest window of a lower class
  after the admission. K is the longest launch of a lower class so far (a kernel cannot be interrupted);
- higher classes: their token buckets limit them to burst + rate * t in any time t;
- its own class: the limit of the class's buckets; or, if the session finishes a request before its next one, the fair shares of
  the
  other sessions while the session runs for C (weights w and w_g): (C + piece) * w_g / w, and one launch each.

The response time is the smallest t that covers all of this, with the smaller limit for its own class. Integers only, in ns,
rounded up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from wooly_dispatch.events import Config, Policy
from wooly_dispatch.policing import FULL, undeclared_burst_ns
from wooly_dispatch.windows import PROTECTED, WIDTH, windows


@dataclass(frozen=True, slots=True)
class Demand:
    """One session as the test sees it. Times are in ns.

    Attributes:
        session: id.
        tenant: tenant that pays.
        policy: class, weight, service time, objective, and the bucket that limits the session.
        longest_ns: the session's longest launch so far; 0: none yet.
        suspended: the session is suspended and takes no time.
    """

    session: str
    tenant: str
    policy: Policy
    longest_ns: int = 0
    suspended: bool = False


@dataclass(frozen=True, slots=True)
class Miss:
    """A session that would miss its objective. `response_ns` is None if its response time has no bound; then `why` says why."""

    demand: Demand
    response_ns: int | None
    why: str = ""

    @property
    def by_ns(self) -> int:
        """Time in ns by which the session exceeds its objective; 0 if its response time has no bound."""
        return 0 if self.response_ns is None else self.response_ns - self.demand.policy.objective_ns

    def __str__(self) -> str:
        policy = self.demand.policy
        session = f"P{policy.priority} session {self.demand.session} ({self.demand.tenant})"
        objective = f"objective of {_ms(policy.objective_ns)}"
        if self.response_ns is None:
            return f"{session} could exceed its {objective} without limit: {self.why}"
        return f"{session} would answer in {_ms(self.response_ns)}, {_ms(self.by_ns)} beyond its {objective}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The sessions that would miss their objectives, worst first. Without such a session, the candidate is admitted."""

    misses: tuple[Miss, ...] = ()

    @property
    def admitted(self) -> bool:
        return not self.misses

    @property
    def missed_by_ns(self) -> int:
        return max((miss.by_ns for miss in self.misses), default=0)

    @property
    def reason(self) -> str:
        """A sentence about the three worst misses."""
        more = f"; and {len(self.misses) - 3} more" if len(self.misses) > 3 else ""
        return "; ".join(str(miss) for miss in self.misses[:3]) + more


def admit(
    candidate: Demand,
    others: Iterable[Demand],
    config: Config | None = None,
    width: int = WIDTH,
    error_permille: int = 100,
) -> Verdict:
    """Test whether all P0 and P1 sessions with an objective keep it after the admission of `candidate`.

    If `candidate` is open already, it replaces itself. A session that misses its objective even without the candidate is not a
    reason for a refusal, unless the candidate makes its response time longer.
    """
    config = config or Config()
    present = [d for d in others if d.session != candidate.session and not d.suspended]
    before = {d.session: _response(d, present, config, width, error_permille) for d in present if _tested(d)}
    everybody = [*present, candidate]
    misses = []
    for demand in everybody:
        if not _tested(demand):
            continue
        response, why = _response(demand, everybody, config, width, error_permille)
        objective = demand.policy.objective_ns
        if response is not None and response <= objective:
            continue
        if demand.session in before and before[demand.session][0] == response:
            continue
        misses.append(Miss(demand, response, why))
    misses.sort(key=lambda m: (m.response_ns is not None, -m.by_ns, m.demand.session))
    return Verdict(tuple(misses))


def response_ns(
    demand: Demand, everybody: Sequence[Demand], config: Config, width: int = WIDTH, error_permille: int = 100
) -> int | None:
    """The worst response time of one request of `demand` among `everybody` (including itself); None: it has no bound."""
    return _response(demand, everybody, config, width, error_permille)[0]


def _tested(demand: Demand) -> bool:
    return demand.policy.priority < PROTECTED and demand.policy.objective_ns > 0


def _response(
    demand: Demand, everybody: Sequence[Demand], config: Config, width: int, error_permille: int
) -> tuple[int | None, str]:
    policy = demand.policy
    own = policy.service_ns or config.service_ns
    higher = [d for d in everybody if d.policy.priority < policy.priority]
    peers = [d for d in everybody if d.policy.priority == policy.priority and d.session != demand.session]
    if _buckets(higher, config) is None:
        return None, _unbounded(higher)
    rate, burst = _buckets(higher, config) or (0, 0)
    live = [(d.policy.priority, d.policy.service_ns) for d in everybody if d.policy.priority < PROTECTED]
    found = windows(config, live, width)
    blocking = _blocking(demand, everybody, max(found[policy.priority + 1 :]), error_permille, config)
    base = blocking + own + burst
    answers = []
    if rate < FULL:
        window = _up(found[policy.priority] * (FULL + error_permille), FULL) if config.max_flights > 1 and peers else 0
        shares = sum(_share(demand, own, d, config, window * error_permille // FULL) for d in peers)
        # While the request was blocked, higher classes were blocked, too; their work of that time is still to do.
        response = _up((base + window + shares) * FULL + rate * blocking, FULL - rate)
        # The fair shares limit one request. If the next request arrives before the end, only the buckets limit the class.
        if response * policy.rate_permille <= own * FULL:
            answers.append(response)
    theirs = _buckets(peers, config)
    total = rate + (theirs[0] if theirs else 0)
    if theirs is not None and total < FULL and total + policy.rate_permille <= FULL:
        answers.append(_up((base + theirs[1]) * FULL, FULL - total))
    if answers:
        return min(answers), ""
    if theirs is None:
        return None, _unbounded(peers)
    taken = (total + policy.rate_permille) / 10
    return None, f"the P0 and P1 sessions of its class and of higher classes may use {taken:.0f} % of the device"


def _buckets(demands: Sequence[Demand], config: Config) -> tuple[int, int] | None:
    """Limits of P0 and P1 sessions in their classes: permille of the device, and burst in ns. None: there is no limit."""
    rate = sum(d.policy.rate_permille for d in demands)
    burst = sum(d.policy.burst_ns for d in demands if d.policy.rate_permille)
    if all(d.policy.rate_permille for d in demands):
        return rate, burst
    if config.undeclared_permille >= FULL:
        return None
    return rate + config.undeclared_permille, burst + undeclared_burst_ns(
        config
    )  # all undeclared sessions share one bucket


def _share(demand: Demand, own: int, peer: Demand, config: Config, slack: int) -> int:
    """Maximum time that one peer gets while `demand` runs for `own`: the fairness bound of the dispatch rule."""
    mine, its = demand.policy.weight, peer.policy.weight
    piece = max(demand.longest_ns, config.piece_ns)
    return _up((own + piece) * its, mine) + max(peer.longest_ns, config.piece_ns) + _up(2 * slack * its, min(mine, its))


def _blocking(demand: Demand, everybody: Sequence[Demand], window: int, error_permille: int, config: Config) -> int:
    """Maximum time that lower classes have in flight. The window counts even if no lower session is open now."""
    longest = [
        d.longest_ns
        for d in everybody
        if d.session != demand.session
        # Work of P0 and P1 sessions beyond their buckets runs in a lower class.
        and (d.policy.priority > demand.policy.priority or (d.policy.priority < PROTECTED and _policed(d, config)))
    ]
    return max(_up(window * (FULL + error_permille), FULL), *longest, 0)


def _policed(demand: Demand, config: Config) -> bool:
    return demand.policy.rate_permille > 0 or config.undeclared_permille < FULL


def _unbounded(demands: Sequence[Demand]) -> str:
    demand = next(d for d in demands if not d.policy.rate_permille)
    return (
        f"P{demand.policy.priority} session {demand.session} declares no service time and interval, so its GPU time has no "
        "limit; declare them with WOOLYAI_SERVICE_MS and WOOLYAI_INTERVAL_MS"
    )


def _up(value: int, by: int) -> int:
    return -(-value // by)


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.3g} ms" if ns < 1_000_000_000 else f"{ns / 1e9:.3g} s"
