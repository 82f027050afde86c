"""Decides whether a program runs at tier 0 (library calls one by one) or with the plan that a compiler made of it.

    tiers.choose(ready, jit, params)       what to run now; called by the device loop's thread, between runs
    tiers.wanted.get()                     the next plan to get; called by another thread, which `tiers.bell` wakes
    tiers.deliver(wanted, prepared)        delivers a plan, or the reason for none; called in the loop's thread again

A plan of mode `exact` has the library's own bits, so a program can switch to it between any two runs. A plan of mode `full` has
other bits. So a session of mode `full` runs a program only after it is known whether there is a plan, and then always in the same
way (ADR 17).

A new plan of mode `exact` is on trial: the program runs in turn with it and without it, and keeps what is faster. The device loop
reports the time of each run of a trial to `PlanRequest.ran`.
"""

from __future__ import annotations

import logging
import queue
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from wooly_wis.artifact import Mode, deciding_params, word
from wooly_wis.program import Program
from wooly_wis.verifier import ProgramFacts

from wooly_executor.bell import Bell
from wooly_executor.errors import NoCompilerError
from wooly_executor.estimates import Cut, Estimate
from wooly_executor.programs import ReadyProgram
from wooly_executor.runtime.prepared import PreparedProgram
from wooly_executor.spans import SessionSpans

log = logging.getLogger(__name__)

#: The mode of a session: `0` (library only), `exact` (kernels with the library's bits), `full` (all kernels).
Jit = Literal["0", "exact", "full"]
#: Number of runs after which a plan of mode `exact` is requested, because most programs run once or twice. `compile_throttle`
#: decides when the compilers are asked.
OFTEN = 16
#: Maximum number of requests and plans that are remembered.
KEPT = 8192
#: Number of runs of each side of a trial.
TRIAL = 8
#: A plan is given up if its best run took longer than the library's best by more than this factor, which leaves room for noise.
SLOWER = 1.1
#: Digest of a program, mode, and the params that determine its plan.
Key = tuple[bytes, str, tuple[tuple[int, bytes], ...]]


class State(Enum):
    """State of a request for a plan."""

    NEW = "new"
    WANTED = "wanted"
    READY = "ready"
    NONE = "none"


@dataclass(eq=False, slots=True)
class Trial:
    """Measures a program with its plan and without it, in turn.

    Attributes:
        plan: device times of runs with the plan, in ns.
        library: device times of runs without it, in ns.
    """

    plan: list[int] = field(default_factory=list)
    library: list[int] = field(default_factory=list)

    @property
    def plan_is_next(self) -> bool:
        """Whether the next run should use the plan."""
        return len(self.plan) <= len(self.library)

    @property
    def over(self) -> bool:
        """Whether both sides have run often enough."""
        return min(len(self.plan), len(self.library)) >= TRIAL

    @property
    def slower(self) -> bool:
        """Whether the plan is slower. The best runs decide, because other work on the machine can only add time."""
        return min(self.plan) > min(self.library) * SLOWER


@dataclass(eq=False, slots=True)
class PlanRequest:
    """A request for a plan.

    Attributes:
        digest: digest of the program.
        program: the program.
        facts: the verifier's facts.
        mode: mode of the plan.
        decided: values of the params that determine the plan, as words.
        estimate: expected times of a run.
        state: state of the request.
        runs: number of runs without the plan.
        prepared: the loaded plan.
        trial: the trial of the plan; None: it is not on trial.
        why: why there is no plan.
        waiting: callbacks for the next change of the state.
        trace: session that asked first, as `traceparent`; empty: it is not traced.
        forgotten: no session can use the plan any more.
    """

    digest: bytes
    program: Program
    facts: ProgramFacts
    mode: Mode
    decided: tuple[tuple[int, bytes], ...]
    estimate: Estimate
    state: State = State.NEW
    runs: int = 0
    prepared: PreparedProgram | None = None
    trial: Trial | None = None
    why: str = ""
    waiting: list[Callable[[], None]] = field(default_factory=list)
    trace: str = ""
    forgotten: bool = False
    _run: tuple[Cut | None, int] = (None, 0)

    def taken_ns(self) -> int:
        """Estimated device time of all runs without a plan, in ns. Only one thread may call this."""
        cut = self.estimate.cut
        if self._run[0] is not cut:
            self._run = cut, sum(cut.kernels)
        return self.runs * self._run[1]

    def ran(self, used: Any, ns: int) -> None:
        """Add a run to the trial of the plan, and end the trial if it was the last one.

        Args:
            used: what ran.
            ns: device time of the whole run, in ns.
        """
        trial = self.trial
        if trial is None:  # it ended while this run was in flight
            return
        (trial.plan if used is self.prepared else trial.library).append(ns)
        if not trial.over:
            return
        self.trial = None
        if trial.slower:
            took = f"{min(trial.plan) / 1e6:.3f} ms against {min(trial.library) / 1e6:.3f} ms"
            log.info(
                "the plan of program %s is not used: it is slower than the library (%s)", self.digest.hex()[:12], took
            )
            self.prepared, self.state = None, State.NONE


#: What to run for a program: the plan, or the program for the library; and the request whose `ran` wants the time of this run, if
#: one does. A plain tuple, because every run makes one.
Choice = tuple[Any, PlanRequest | None]


def choose(
    tiers: Tiers | None, ready: ReadyProgram, jit: Jit, params: Sequence[Any], spans: SessionSpans | None = None
) -> Choice:
    """What to run for a program: see `Tiers.choose`. Without tiers, all programs run at tier 0.

    Raises:
        NoCompilerError: the session has mode `full`, and this executor runs no kernels.
    """
    if tiers is not None:
        return tiers.choose(ready, jit, params, spans)
    if jit == "full":
        raise NoCompilerError(
            "WOOLYAI_JIT=full needs a runtime that runs kernels, and compilers; this executor has none. Use WOOLYAI_JIT=exact"
        )
    return ready.prepared, None


class Tiers:
    """Chooses between tier 0 and plans. The device loop's thread owns it, except `wanted`, `unwanted` and `bell`.

    Args:
        exact: whether compilers make plans of mode `exact` for the device.
        trials: whether a new plan of mode `exact` must be as fast as the library to stay.
    """

    def __init__(self, *, exact: bool = True, trials: bool = True) -> None:
        self._exact, self._trials = exact, trials
        self.wanted: queue.SimpleQueue[PlanRequest | None] = queue.SimpleQueue()
        #: Cancelled requests, because no session can use the plan any more. The task that serves a request still refers to the
        #: program.
        self.unwanted: queue.SimpleQueue[PlanRequest] = queue.SimpleQueue()
        #: Rings when one of the two queues has an entry.
        self.bell = Bell()
        self._known: OrderedDict[Key, PlanRequest] = OrderedDict()
        self._keys: dict[bytes, dict[Key, None]] = {}
        self._deciding: dict[bytes, tuple[int, ...]] = {}

    def choose(self, ready: ReadyProgram, jit: Jit, params: Sequence[Any], spans: SessionSpans | None = None) -> Choice:
        """What to run for a program.

        Raises:
            NoCompilerError: in mode `full`, it is unknown whether there is a plan. The next run asks the compilers again.
        """
        if jit == "0" or not ready.computing or (jit == "exact" and not self._exact):
            return ready.prepared, None
        entry = self._entry(ready, jit, params)
        if entry.state is State.READY:
            plan, trial = entry.prepared, entry.trial
            assert plan is not None
            if trial is not None and not trial.plan_is_next:
                return ready.prepared, entry
            plan.edges = ready.prepared.edges
            return plan, None if trial is None else entry
        if jit == "full" and entry.state is not State.NONE:
            why, entry.why, entry.state = entry.why, "", State.NEW
            raise NoCompilerError(
                why
                or "WOOLYAI_JIT=full needs a plan of the program, and the executor has not asked a compiler yet; run it again"
            )
        entry.runs += 1
        if entry.runs >= OFTEN and entry.state is State.NEW:
            self._want(entry, spans)
        return ready.prepared, None

    def awaits(
        self,
        ready: ReadyProgram,
        params: Sequence[Any],
        then: Callable[[], None],
        spans: SessionSpans | None = None,
    ) -> bool:
        """Whether a session of mode `full` must wait for the compilers before it runs a program. If so, `then` is called when the
        answer is there.
        """
        entry = self._entry(ready, "full", params)
        if entry.state in (State.READY, State.NONE) or entry.why:
            return False
        entry.waiting.append(then)
        if entry.state is State.NEW:
            self._want(entry, spans)
        return True

    def deliver(
        self, entry: PlanRequest, prepared: PreparedProgram | None, why: str = "", *, final: bool = True
    ) -> None:
        """Deliver a plan, or the reason why there is none.

        Args:
            entry: the request.
            prepared: the loaded plan, or None.
            why: why there is no plan.
            final: the result will not change; otherwise the next run asks again.
        """
        if prepared is not None:
            entry.prepared, entry.state = prepared, State.READY
            entry.trial = Trial() if self._trials and entry.mode == "exact" else None
        else:
            entry.state, entry.why = (State.NONE, "") if final else (State.WANTED, why)
            if not final and entry.mode == "exact":
                entry.state, entry.runs = State.NEW, 0
        waiting, entry.waiting = entry.waiting, []
        for then in waiting:
            then()

    def forget(self, digest: bytes) -> None:
        """Forget the plans of a program that no session has any more."""
        self._deciding.pop(digest, None)
        for key in self._keys.pop(digest, ()):
            self._forget(self._known.pop(key, None))

    def _forget(self, entry: PlanRequest | None) -> None:
        if entry is not None and entry.state is State.WANTED and not entry.waiting:
            entry.forgotten = True
            self.unwanted.put(entry)
            self.bell.ring()

    def _want(self, entry: PlanRequest, spans: SessionSpans | None) -> None:
        entry.state = State.WANTED
        entry.trace = spans.parent if spans is not None and spans.take() else ""
        self.wanted.put(entry)
        self.bell.ring()

    def _entry(self, ready: ReadyProgram, mode: Mode, params: Sequence[Any]) -> PlanRequest:
        name = ready.digest
        deciding = self._deciding.get(name)
        if deciding is None:
            if len(self._deciding) >= KEPT:
                self._deciding.clear()
            deciding = self._deciding[name] = deciding_params(ready.prepared.program)
        decided = tuple([(k, word(ready.kinds[k], params[k])) for k in deciding]) if deciding else ()
        key = name, mode, decided
        entry = self._known.get(key)
        if entry is None:
            entry = self._known[key] = PlanRequest(
                name, ready.prepared.program, ready.facts, mode, decided, ready.estimate
            )
            if not ready.computing:
                entry.state = State.NONE
            self._keys.setdefault(name, {})[key] = None
            if len(self._known) > KEPT:
                gone, forgotten = self._known.popitem(last=False)
                self._keys[gone[0]].pop(gone)
                self._forget(forgotten)
        else:
            self._known.move_to_end(key)
        return entry
