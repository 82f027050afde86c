"""Which way a program runs: as it is (tier 0), or as the plan that a compiler made of it; and who did how much of the work.

    tiers.choose(ready, jit, params)       what to run now, by the device loop's thread, between runs
    tiers.wanted.get()                     what somebody should get a plan for, by another thread; `tiers.bell` rings for it
    tiers.took(wanted, prepared)           a plan is there (or will not be), in the loop's thread again

A plan of mode `exact` has the library's own bits, so it is taken up between any two runs. One of mode `full` has not: there a
session runs none of its programs before it is known whether there is a plan, and then always that way. ADR 17 says why.
"""

from __future__ import annotations

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

#: How a session wants its programs to run: as the library does, with kernels of the same bits, with all kernels.
Jit = Literal["0", "exact", "full"]
#: Runs after which a plan of mode `exact` is wanted: most programs are run once or twice. When it is asked for, `leisure` says.
OFTEN = 16
#: Programs of which it is known whether there is a plan.
KEPT = 8192
#: Digest of a program, mode, the params that decide on its plan.
Key = tuple[bytes, str, tuple[tuple[int, bytes], ...]]


class State(Enum):
    """What is known of a plan."""

    NEW = "new"
    WANTED = "wanted"
    READY = "ready"
    NONE = "none"


@dataclass(eq=False, slots=True)
class Wanted:
    """A plan that is asked for.

    Attributes:
        decided: values of the params on which the computation hangs, as words.
        estimate: what a run of it takes.
        state: what is known.
        runs: how often it was run without.
        prepared: the plan, ready to run.
        why: why there is none.
        waiting: to be called once more is known.
        trace: the session that asked first, as `traceparent`; empty: it is not traced.
        forgotten: nobody can use it any more.
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
    why: str = ""
    waiting: list[Callable[[], None]] = field(default_factory=list)
    trace: str = ""
    forgotten: bool = False
    _run: tuple[Cut | None, int] = (None, 0)

    def taken_ns(self) -> int:
        """The device time that it has taken so far without a plan, about. For one thread, whichever."""
        cut = self.estimate.cut
        if self._run[0] is not cut:
            self._run = cut, sum(cut.kernels)
        return self.runs * self._run[1]


def choose(
    tiers: Tiers | None, ready: ReadyProgram, jit: Jit, params: Sequence[Any], spans: SessionSpans | None = None
) -> Any:
    """What to run for a program; see `Tiers.choose`. Without tiers, all programs run as they are.

    Raises:
        NoCompilerError: the session wants no program to run as it is.
    """
    if tiers is not None:
        return tiers.choose(ready, jit, params, spans)
    if jit == "full":
        raise NoCompilerError(
            "WOOLYAI_JIT=full needs a runtime that runs kernels, and compilers; this executor has none. Not so WOOLYAI_JIT=exact"
        )
    return ready.prepared


class Tiers:
    """Owned by the device loop's thread, but for `wanted`, `unwanted` and `bell`.

    Args:
        exact: whether there are plans of mode `exact` for the device.
    """

    def __init__(self, *, exact: bool = True) -> None:
        self._exact = exact
        self.wanted: queue.SimpleQueue[Wanted | None] = queue.SimpleQueue()
        #: What was wanted and no session can use any more: the task that gets it holds its program.
        self.unwanted: queue.SimpleQueue[Wanted] = queue.SimpleQueue()
        #: Rings when there is something in either queue.
        self.bell = Bell()
        self._known: OrderedDict[Key, Wanted] = OrderedDict()
        self._keys: dict[bytes, dict[Key, None]] = {}
        self._deciding: dict[bytes, tuple[int, ...]] = {}

    def choose(self, ready: ReadyProgram, jit: Jit, params: Sequence[Any], spans: SessionSpans | None = None) -> Any:
        """What to run for a program.

        Raises:
            NoCompilerError: of mode `full`, nobody could say whether there is a plan. Asked again, it is asked for again.
        """
        if jit == "0" or not ready.computing or (jit == "exact" and not self._exact):
            return ready.prepared
        entry = self._entry(ready, jit, params)
        if entry.state is State.READY:
            plan = entry.prepared
            assert plan is not None
            plan.edges = ready.prepared.edges
            return plan
        if jit == "full" and entry.state is not State.NONE:
            why, entry.why, entry.state = entry.why, "", State.NEW
            raise NoCompilerError(why or "no plan was waited for")
        entry.runs += 1
        if entry.runs >= OFTEN and entry.state is State.NEW:
            self._want(entry, spans)
        return ready.prepared

    def awaits(
        self,
        ready: ReadyProgram,
        params: Sequence[Any],
        then: Callable[[], None],
        spans: SessionSpans | None = None,
    ) -> bool:
        """Whether a session of mode `full` has to wait before it may run a program; then `then` is called when it is over."""
        entry = self._entry(ready, "full", params)
        if entry.state in (State.READY, State.NONE) or entry.why:
            return False
        entry.waiting.append(then)
        if entry.state is State.NEW:
            self._want(entry, spans)
        return True

    def took(self, entry: Wanted, prepared: PreparedProgram | None, why: str = "", *, final: bool = True) -> None:
        """A plan is there; or there is none, and why.

        Args:
            entry: what was asked for.
            prepared: the plan.
            why: why there is none.
            final: there never will be; else the next run asks again.
        """
        if prepared is not None:
            entry.prepared, entry.state = prepared, State.READY
        else:
            entry.state, entry.why = (State.NONE, "") if final else (State.WANTED, why)
            if not final and entry.mode == "exact":
                entry.state, entry.runs = State.NEW, 0
        waiting, entry.waiting = entry.waiting, []
        for then in waiting:
            then()

    def forget(self, digest: bytes) -> None:
        """No session has this program any more: what is known of its plans goes with it."""
        self._deciding.pop(digest, None)
        for key in self._keys.pop(digest, ()):
            self._forget(self._known.pop(key, None))

    def _forget(self, entry: Wanted | None) -> None:
        if entry is not None and entry.state is State.WANTED and not entry.waiting:
            entry.forgotten = True
            self.unwanted.put(entry)
            self.bell.ring()

    def _want(self, entry: Wanted, spans: SessionSpans | None) -> None:
        entry.state = State.WANTED
        entry.trace = spans.parent if spans is not None and spans.take() else ""
        self.wanted.put(entry)
        self.bell.ring()

    def _entry(self, ready: ReadyProgram, mode: Mode, params: Sequence[Any]) -> Wanted:
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
            entry = self._known[key] = Wanted(name, ready.prepared.program, ready.facts, mode, decided, ready.estimate)
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
