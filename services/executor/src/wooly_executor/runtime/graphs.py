"""Captures repeated stretches of a program as graphs, and replays each with one launch.

A stretch lies between two edges, at which a run may stop. So a graph is never longer than the part that the dispatch core
launches at a time. A stretch also ends before each step that a graph cannot contain: a step that waits for the device, that draws
random numbers, or that uses a number which changes from run to run. A graph contains the addresses and params of its run, so it
can be replayed only for runs with the same addresses and params. The graphs of a device share memory pools. Results that outlive
a stretch are copied out of the pool at once, so that graphs may follow each other in any order.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from wooly_wis.verifier import ProgramFacts

from wooly_executor.errors import ContextLostError
from wooly_executor.runtime.buffers import bytes_of
from wooly_executor.runtime.captures import InvalidCaptureError
from wooly_executor.runtime.device import TorchDevice
from wooly_executor.runtime.driver import Driver, Graph
from wooly_executor.runtime.frame import Frame, Step
from wooly_executor.runtime.prepared import PreparedProgram
from wooly_executor.runtime.segments import Free, Gather, Review, SegmentError

#: Minimum number of library calls and launches of a stretch that is captured. A shorter stretch saves too little.
WORTH = 4
#: Number of runs with the same addresses and params before a stretch is captured for them.
STEADY = 3
#: Maximum number of graphs per stretch: sessions that share a program have different buffers, and a loop may alternate between
#: sets of buffers. A graph that was not used in the last IDLE runs of its stretch makes room for another one.
VARIANTS, IDLE = 8, 64
#: Maximum number of sets of addresses and params per stretch whose runs are counted.
COUNTED = 32
#: Number of recent values that are known per param. A param is changing when its score exceeds CHANGING: a new value adds 2, a
#: known one subtracts 1.
VALUES, CHANGING = 8, 12
#: Limits per device: number of graphs, and bytes of their memory pools. The third one limits the memory that one stretch may
#: allocate, in bytes. The fourth one limits the number of failed captures, because torch keeps memory for each of them.
GRAPHS, POOL_BYTES, STRETCH_BYTES, FAILURES = 512, 256 << 20, 64 << 20, 256

#: Steps that launch nothing on the device.
_FREE_OF_WORK = (Gather, Free, Review)

Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """The memory and layout of a tensor in a register.

    Attributes:
        of: a register (or ~slot for the memory of a slot) that existed before the stretch, or an index into `Captured.made`.
        old: whether `of` is a register or slot.
    """

    of: int
    old: bool
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def on(self, memory: Tensor) -> Tensor:
        """Return a tensor of this layout on the storage of `memory`."""
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), self.offset, self.sizes, self.strides)


@dataclass(slots=True, weakref_slot=True)
class Captured:
    """The graph of a stretch for certain addresses and params.

    Attributes:
        graph: the captured work.
        made: memory in the pool whose content outlives the stretch.
        left: for each register (or ~slot) that the stretch changes, its tensor after the stretch; None: it is empty then.
        inner: the part of `made` that the program frees itself. A run uses it in place, without a copy.
        used: number of the last run of the stretch that used the graph.
        frame: the last run that used the graph.
    """

    graph: Graph
    made: list[Tensor]
    left: dict[int, Place | None]
    inner: frozenset[int]
    used: int = 0
    frame: weakref.ref[Frame] | None = None

    def busy(self, frame: Frame) -> bool:
        """Whether another run than `frame` still uses the inner memory. It stopped at an edge."""
        other = self.frame() if self.frame is not None and self.inner else None
        if other is None or other is frame:
            return False
        inner = [name for name, place in self.left.items() if place and not place.old and place.of in self.inner]
        return any((other.registers[name] if name >= 0 else other.bases[~name]) is not None for name in inner)


@dataclass(slots=True)
class Stretch:
    """State of steps between two edges that a graph can contain.

    Attributes:
        begin: index of the first hot step.
        end: index after the last hot step.
        params: the run's params that the stretch uses.
        names: the registers (or ~slots) whose memory the stretch may use.
        never: the stretch cannot be captured.
        runs: number of runs.
        seen: number of runs per set of addresses and params, by its hash; the last one was used last.
        captured: graphs by addresses and params; the last one was used last.
    """

    begin: int
    end: int
    params: tuple[int, ...]
    names: tuple[int, ...]
    never: bool = False
    runs: int = 0
    seen: OrderedDict[int, int] = field(default_factory=OrderedDict)
    captured: OrderedDict[Key, Captured] = field(default_factory=OrderedDict)


class History:
    """Recent values of the params of a program. It tells which params change from run to run."""

    def __init__(self) -> None:
        self._recent: dict[int, OrderedDict[str, None]] = {}
        self._score: dict[int, int] = {}

    def note(self, params: Sequence[Any], which: Iterable[int]) -> list[int]:
        """Note the values of some params of a run. Returns those that are changing."""
        found = []
        for k in which:
            recent = self._recent.setdefault(k, OrderedDict())
            value = repr(params[k])
            score = self._score.get(k, 0)
            if value in recent:
                recent.move_to_end(value)
                score = max(score - 1, 0)
            else:
                recent[value] = None
                if len(recent) > VALUES:
                    recent.popitem(last=False)
                score += 2
            self._score[k] = score
            if score > CHANGING:
                found.append(k)
        return found


class Graphs:
    """The graphs of one device. Only the device thread uses it.

    Args:
        driver: the driver of the GPU.
        device: the memory of the GPU.

    Attributes:
        replayed: number of replays.
        count: number of graphs.
    """

    def __init__(self, driver: Driver, device: TorchDevice) -> None:
        self._driver, self._device = driver, device
        self._failures = self._bytes = 0
        #: Operators that a graph cannot contain, as failed captures have shown.
        self._refused: set[str] = set()
        #: One entry per destroyed graph. Other threads destroy programs and their graphs.
        self._destroyed: deque[None] = deque()
        self.replayed = self.count = 0

    def observe(self, prepared: PreparedProgram, params: Sequence[Any]) -> None:
        """Note the params of a run of a program that is not hot yet."""
        _mark_changing(prepared, _history(prepared).note(params, range(len(params))))

    def mark(self, prepared: PreparedProgram) -> None:
        """Mark the steps of operators that a graph cannot contain."""
        if self._refused:
            refused = {i for i, act in enumerate(prepared.acts) if act.form.attr("name") in self._refused}
            _mark(prepared, refused)

    def steps(
        self, prepared: PreparedProgram, frame: Frame, begin: int, steps: Sequence[Step]
    ) -> Iterable[tuple[int, Step]]:
        """Return what to run instead of the hot steps from `begin` on, with the index of the first step that each one replaces.

        Each item must be run before the next one is taken.
        """
        where = begin, begin + len(steps)
        stretches = prepared.stretches.get(where)
        if stretches is None:
            self.mark(prepared)
            stretches = prepared.stretches[where] = _split(prepared, *where)
        if not stretches:
            return enumerate(steps, begin)
        return self._with_replays(prepared, frame, begin, steps, stretches)

    def _with_replays(
        self,
        prepared: PreparedProgram,
        frame: Frame,
        begin: int,
        steps: Sequence[Step],
        stretches: list[Stretch],
    ) -> Iterator[tuple[int, Step]]:
        hot, at = prepared.hot, begin
        for stretch in stretches:
            yield from enumerate(steps[at - begin : stretch.begin - begin], at)
            inside = steps[stretch.begin - begin : stretch.end - begin]
            captured = None
            if not stretch.never and prepared.hot is hot:
                captured = self._find(prepared, frame, inside, stretch)
            if captured is None:
                yield from enumerate(inside, stretch.begin)
            else:
                yield stretch.begin, functools.partial(self._replay, captured)
            at = stretch.end
        yield from enumerate(steps[at - begin :], at)

    def _find(
        self,
        prepared: PreparedProgram,
        frame: Frame,
        steps: Sequence[Step],
        stretch: Stretch,
    ) -> Captured | None:
        """Return the graph of a stretch for this run. Captures it if the run has been repeated often enough."""
        stretch.runs += 1
        key = _key(stretch, frame)
        captured = stretch.captured.get(key)
        if captured is None:
            short = hash(key)
            times = stretch.seen.get(short, 0) + 1
            stretch.seen[short] = times
            stretch.seen.move_to_end(short)
            if len(stretch.seen) > COUNTED:
                stretch.seen.popitem(last=False)
            if times <= STEADY:
                if _mark_changing(prepared, _history(prepared).note(frame.params, stretch.params)):
                    _fold_again(prepared)
                return None
            if not self._has_room(stretch):
                return None
            captured = self._capture(prepared, frame, steps, stretch)
            if captured is None:
                return None
            stretch.captured[key] = captured
            del stretch.seen[short]
        elif captured.busy(frame):
            return None
        captured.used = stretch.runs
        stretch.captured.move_to_end(key)
        return captured

    def _has_room(self, stretch: Stretch) -> bool:
        """Whether another graph may be captured. A graph of the stretch that is not used any more makes room."""
        if stretch.captured:
            oldest, captured = next(iter(stretch.captured.items()))
            unused = stretch.runs - captured.used > IDLE
            del captured
            if unused:
                del stretch.captured[oldest]
            elif len(stretch.captured) >= VARIANTS:
                return False
        if self._destroyed:
            while self._destroyed:
                self._destroyed.popleft()
                self.count -= 1
            self._bytes = self._driver.graph_bytes()
        return self.count < GRAPHS and self._failures < FAILURES and self._bytes <= POOL_BYTES

    def _capture(
        self,
        prepared: PreparedProgram,
        frame: Frame,
        steps: Sequence[Step],
        stretch: Stretch,
    ) -> Captured | None:
        tensors = _tensors_by_name(frame)
        before = {name: tensors[name] for name in stretch.names if name in tensors} | tensors
        registers, bases = list(frame.registers), list(frame.bases)
        at = -1

        def body() -> None:
            nonlocal at
            for at, step in enumerate(steps, stretch.begin):  # noqa: B007 - the failing step's index is used below
                step(frame)
            at = -1

        try:
            graph = self._driver.capture(body)
            made, left = _changed(before, _tensors_by_name(frame))
        except ContextLostError:
            raise
        except Exception as e:  # a graph cannot contain this work; if it is an error, the steps raise it again
            self._driver.check()
            self._failures += 1
            self._learn(prepared, stretch, at, e)
            return None
        finally:
            frame.registers[:], frame.bases[:] = registers, bases
        captured = Captured(graph, made, left, _inner(prepared, left, len(made)))
        self.count += 1
        self._bytes = self._driver.graph_bytes()
        weakref.finalize(captured, self._destroyed.append, None).atexit = False
        return captured

    def _learn(self, prepared: PreparedProgram, stretch: Stretch, at: int, cause: Exception) -> None:
        """Exclude the step with index `at`, whose capture failed, from graphs; or the stretch if the step is not to blame."""
        stretch.never = True
        invalid = isinstance(cause, InvalidCaptureError)
        first = cause.__cause__ if invalid else cause
        text = str(first)
        if at < 0 or not (invalid or "captur" in text) or "previous error" in text:
            return
        step = first.at if isinstance(first, SegmentError) else prepared.begins[at]
        if step is None:
            return
        act = prepared.acts[prepared.owner[step]]
        name = act.form.attr("name")
        if act.launch is None and isinstance(name, str):
            self._refused.add(name)
        prepared.uncapturable.add(step)
        _fold_again(prepared)

    def _replay(self, captured: Captured, frame: Frame) -> None:
        captured.graph.replay()
        captured.frame = weakref.ref(frame)
        self.replayed += 1
        self._restore(captured, frame)

    def _restore(self, captured: Captured, frame: Frame) -> None:
        """Set registers and memory to the state that the steps would leave."""
        fresh = []
        for k, memory in enumerate(captured.made):
            if k in captured.inner:
                fresh.append(memory)
                continue
            own = self._device.empty(len(memory))
            own.copy_(memory, non_blocking=True)
            fresh.append(own)
        old = _tensors_by_name(frame)
        for name, place in captured.left.items():
            found = None
            if place is not None:
                found = place.on(old[place.of] if place.old else fresh[place.of])
            if name >= 0:
                frame.registers[name] = found
            else:
                frame.bases[~name] = found


def _tensors_by_name(frame: Frame) -> dict[int, Tensor]:
    """Return the tensors of all registers, and the memory of slots under ~slot."""
    found: dict[int, Tensor] = {k: t for k, t in enumerate(frame.registers) if t is not None}
    found.update({~k: t for k, t in enumerate(frame.bases) if t is not None})
    return found


def _inner(prepared: PreparedProgram, left: dict[int, Place | None], made: int) -> frozenset[int]:
    """Return the memory that a stretch made and that no buffer will ever use, because the program frees its slots itself."""
    facts, outer = prepared.facts, set[int]()
    for name, place in left.items():
        slot = prepared.slot_of[name] if name >= 0 else ~name
        if place is not None and not place.old and (facts.slot_alloc[slot] is None or not facts.slot_freed[slot]):
            outer.add(place.of)
    return frozenset(set(range(made)) - outer)


def _key(stretch: Stretch, frame: Frame) -> Key:
    """Return everything that a graph depends on: addresses, and the type and value of each param."""
    registers, bases, params = frame.registers, frame.bases, frame.params
    used = [registers[name] if name >= 0 else bases[~name] for name in stretch.names]
    places = [-1 if t is None else t.data_ptr() for t in used]
    numbers = [(type(params[k]), repr(params[k])) for k in stretch.params]
    return (*places, *numbers)


def _history(prepared: PreparedProgram) -> History:
    if prepared.history is None:
        prepared.history = History()
    history: History = prepared.history
    return history


def _mark_changing(prepared: PreparedProgram, params: list[int]) -> bool:
    """Mark the steps that use changing params. Returns whether there are steps that were not marked before."""
    changing = set(params)
    return bool(params) and _mark(
        prepared, {i for i, act in enumerate(prepared.acts) if not changing.isdisjoint(act.params)}
    )


def _mark(prepared: PreparedProgram, acts: set[int]) -> bool:
    """Mark the steps of some acts as ones that a graph cannot contain. Returns whether there are new ones."""
    known = len(prepared.uncapturable)
    for step, owner in enumerate(prepared.owner):
        if owner in acts and not isinstance(prepared.traces[step], _FREE_OF_WORK):
            prepared.uncapturable.add(step)
    return len(prepared.uncapturable) > known


def _fold_again(prepared: PreparedProgram) -> None:
    """Combine the steps anew, because other steps than before are uncapturable. Runs in progress keep their steps."""
    prepared.heat(graphs=True)
    prepared.stretches.clear()


def _split(prepared: PreparedProgram, begin: int, end: int) -> list[Stretch]:
    """Return the stretches of the hot steps from `begin` to `end` that are worth a capture."""
    facts, found = prepared.facts, []
    bounds = [*prepared.begins, len(prepared.steps)]
    first, work, nbytes, acts, near, slots = begin, 0, 0, dict[int, None](), set[int](), set[int]()

    def close(last: int) -> None:
        if work >= WORTH:
            params = dict.fromkeys([k for i in acts for k in prepared.acts[i].params])
            names = [name for name, slot in enumerate(prepared.slot_of) if slot in near]
            found.append(Stretch(first, last, tuple(params), (*names, *[~slot for slot in sorted(near)])))

    for k in range(begin, end):
        inside = range(bounds[k], bounds[k + 1])
        active = [s for s in inside if not isinstance(prepared.traces[s], _FREE_OF_WORK)]
        own = {prepared.owner[s]: None for s in inside}
        writes = {slot for i in own for slot in prepared.writes[i]}
        blocked = not prepared.uncapturable.isdisjoint(active) or _nbytes(facts, writes) > STRETCH_BYTES
        if blocked or nbytes + _nbytes(facts, writes - slots) > STRETCH_BYTES:
            close(k)
            first, work, nbytes, acts, near, slots = k, 0, 0, {}, set(), set()
        if blocked:
            first = k + 1
            continue
        work += len(active)
        nbytes += _nbytes(facts, writes - slots)
        # a step that frees memory belongs to the act behind it, whose params the stretch does not use
        acts.update({prepared.owner[s]: None for s in active})
        near.update([slot for i in own for slot in prepared.acts[i].slots])
        slots |= writes
    close(end)
    return found


def _nbytes(facts: ProgramFacts, slots: Iterable[int]) -> int:
    """Return the bytes that the program allocates for some slots."""
    return sum([facts.slot_alloc[slot] or 0 for slot in slots])


def _changed(before: dict[int, Tensor], after: dict[int, Tensor]) -> tuple[list[Tensor], dict[int, Place | None]]:
    """Return the memory that a stretch allocated and that outlives it, and the new place of each name that it changed."""
    known: dict[int, tuple[int, bool]] = {}
    for name, t in before.items():
        known.setdefault(t.untyped_storage().data_ptr(), (name, True))
    left: dict[int, Place | None] = {name: None for name in before if name not in after}
    made: list[Tensor] = []
    for name, t in after.items():
        if before.get(name) is t:
            continue
        storage = t.untyped_storage()
        found = known.get(storage.data_ptr())
        if found is None or not storage.nbytes():
            found = known[storage.data_ptr()] = (len(made), False)
            made.append(bytes_of(t, 0, storage.nbytes()))
        left[name] = Place(*found, t.dtype, tuple(t.shape), t.stride(), int(t.storage_offset()))
    return made, left
