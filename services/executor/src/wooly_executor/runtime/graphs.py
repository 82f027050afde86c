"""Captures repeated stretches of a program as graphs, and replays each with one launch.

A stretch is never longer than the part that the dispatch core launches at a time (see `stretches`). A graph contains the
addresses and params of its run, so it can be replayed only for runs with the same addresses and params, except for seeds and
offsets of random numbers, which each replay gets. Small inputs whose addresses change from run to run are copied to memory of the
graph first. All graphs share a memory pool for their own values, so
results must leave it before another graph runs. Small results are copied after a replay. Large results, and values that the
program frees itself, are copied by the graph to memory that it lends until its next replay (see `replays`). A graph whose results
have other sizes than announced has a pool of its own, and lends the pool's memory.
"""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from wooly_executor.errors import ContextLostError
from wooly_executor.runtime.captures import InvalidCaptureError
from wooly_executor.runtime.device import TorchDevice
from wooly_executor.runtime.driver import Driver
from wooly_executor.runtime.frame import Frame, Step
from wooly_executor.runtime.homes import BYTES_PER_CALL, HOMES_ALIKE, Home, Stray, inputs_of, size_of
from wooly_executor.runtime.prepared import PreparedProgram
from wooly_executor.runtime.replays import (
    Captured,
    Inputs,
    MisfitError,
    Outside,
    changed,
    held_in_place,
    tensors_by_name,
)
from wooly_executor.runtime.segments import SegmentError
from wooly_executor.runtime.stretches import COUNTED, FREE_OF_WORK, Key, Stretch, fixed_params, split

log = logging.getLogger("wooly.executor")

#: Number of runs with the same key before a stretch is captured for it.
STEADY = 3
#: Maximum number of graphs per stretch whose keys differ only in addresses that its graphs lend, because a loop may alternate
#: between sets of buffers; and in all, because each layer of a model, and each session, runs the same program on its own weights.
#: A graph that was not used in the last IDLE runs of its stretch makes room for another one.
VARIANTS, VARIANTS_ALL, IDLE = 8, 256, 1024
#: Maximum number of graphs that lend their memory, per key and per such family of keys. Where a loop keeps a result until it
#: makes the next one, the second graph of a key has other memory. Where each result is the input of the next run, lent memory
#: gives each run another key; the other graphs of the family copy their results, so that the keys recur.
LENDING, LENDING_ALL = 2, 6
#: The same per stretch. Two programs may feed each other, and then each run of a loop has another key.
LENDING_STRETCH = 128
#: Graphs of a family that were not used in so many runs of the stretch are dropped before another one is captured. Most of them
#: are from runs before the memory of earlier programs was lent by graphs.
STALE = 96
#: Number of runs with a key before a capture for which there was no room is tried again.
PATIENCE = 32
#: Number of recent values that are known per param. A param is changing when its score exceeds CHANGING: a new value adds 2, a
#: known one subtracts 1.
VALUES, CHANGING = 8, 12
#: Limits per device: number of graphs, and number of failed captures, because torch keeps memory for each of them.
GRAPHS, FAILURES = 1024, 256
#: If there is no room for another graph, those make room that were not used in the last replays of the device: RECENT for each
#: graph that there is, and at least RECENT_ALL. A working set of graphs stays, however large it is.
RECENT, RECENT_ALL = 4, 1024
#: A stretch may allocate at most 1/STRETCH_SHARE of the memory for all graphs.
STRETCH_SHARE = 4
#: Device memory for seed and offset of a random call, in bytes: two blocks of torch's allocator.
DRAW_BYTES = 1024


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
        self._failures = self._bytes = self._input_bytes = 0
        self._room = driver.graph_room()
        #: Addresses of memory that graphs lend.
        self._lent: set[int] = set()
        #: Operators that a graph cannot contain, as failed captures have shown.
        self._refused: set[str] = set()
        #: Whether random numbers are the same in graphs; None: not known yet.
        self._draws: bool | None = None
        #: The stretches that have had graphs or homes.
        self._stretches: dict[int, weakref.ref[Stretch]] = {}
        #: For each destroyed graph or home, the number of graphs, the bytes outside of pools, and the memory that it lent. Other
        #: threads destroy them.
        self._destroyed: deque[tuple[int, int, list[int]]] = deque()
        self.replayed = self.count = 0

    def observe(self, prepared: PreparedProgram, params: Sequence[Any]) -> None:
        """Note the params of a run of a program that is not hot yet."""
        _mark_changing(prepared, _history(prepared).note(params, range(len(params))))

    def mark(self, prepared: PreparedProgram) -> None:
        """Mark the steps of operators that a graph cannot contain."""
        if self._refused:
            refused = {i for i, act in enumerate(prepared.acts) if act.form.attr("name") in self._refused}
            _mark(prepared, refused)
        if self._draws is False:
            _mark(prepared, set(prepared.draws))

    def steps(
        self, prepared: PreparedProgram, frame: Frame, begin: int, steps: Sequence[Step]
    ) -> Iterable[tuple[int, Step]]:
        """Return what to run instead of the hot steps from `begin` on, with the index of the first step that each one replaces.

        Each item must be run before the next one is taken.
        """
        where = begin, begin + len(steps)
        stretches: list[Stretch] | None = prepared.stretches.get(where)
        if stretches is None:
            self.mark(prepared)
            stretches = prepared.stretches[where] = split(prepared, *where, self._room // STRETCH_SHARE)
        if not stretches:
            return enumerate(steps, begin)
        first = stretches[0]
        if first.whole and len(steps) == first.end:
            captured = None if first.never else self._find(prepared, frame, steps, first)
            return enumerate(steps, begin) if captured is None else ((begin, captured),)
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
                yield stretch.begin, captured
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
        key = stretch.key(frame)
        captured = self._captured(stretch, key)
        if captured is not None:
            return captured
        if key not in stretch.captured and self._bring_home(stretch, frame, key):
            key = stretch.key(frame)
            captured = self._captured(stretch, key)
            if captured is not None:
                return captured
        return self._capture_if_steady(prepared, frame, steps, stretch, key)

    def _captured(self, stretch: Stretch, key: Key) -> Captured | None:
        """Return a graph of this key that can be replayed now."""
        graphs = stretch.captured.get(key)
        if graphs is not None:
            for captured in graphs:
                if captured.free():
                    captured.used, captured.replay = stretch.runs, self.replayed
                    stretch.captured.move_to_end(key)
                    self.replayed += 1
                    return captured
        return None

    def _bring_home(self, stretch: Stretch, frame: Frame, key: Key) -> bool:
        """Copy the inputs of a run that stray to their homes. Returns whether there were such inputs."""
        homes = stretch.homes
        where = homes.of(key) or stretch.strays(key, frame)
        if where is None:
            return False
        home = next((home for home in homes.at(where) if home.take(frame, stretch.names)), None)
        if home is None and len(homes.at(where)) < HOMES_ALIKE:
            home = self._home(stretch, frame, where)
            if home is not None and not home.take(frame, stretch.names):
                home = None
        if home is not None:
            home.replay = self.replayed
        return home is not None

    def _home(self, stretch: Stretch, frame: Frame, where: Stray) -> Home | None:
        """Make a home for these inputs, if there is room for it."""
        sizes = {}
        for place in where[0]:
            slot, _ = (stretch.entered or [])[place]
            found = inputs_of(frame, slot, stretch.names[slot])
            if not found:
                return None
            sizes[slot] = size_of(found)
        nbytes = sum(sizes.values())
        self._count_destroyed()
        if self._bytes + self._input_bytes + nbytes > self._room:
            self._forget_unused()
            self._count_destroyed()
        if nbytes > BYTES_PER_CALL * stretch.calls or self._bytes + self._input_bytes + nbytes > self._room:
            return None
        try:
            home = Home(self._device.empty, sizes)
        except torch.OutOfMemoryError:
            return None
        stretch.homes.add(where, home)
        self._stretches[id(stretch)] = weakref.ref(stretch)
        self._input_bytes += nbytes
        self._lent.update(home.addresses)
        weakref.finalize(home, self._destroyed.append, (0, nbytes, home.addresses)).atexit = False
        return home

    def _capture_if_steady(
        self,
        prepared: PreparedProgram,
        frame: Frame,
        steps: Sequence[Step],
        stretch: Stretch,
        key: Key,
    ) -> Captured | None:
        """Count a run without a graph. If there were enough, capture a graph and return it."""
        known = len(stretch.captured.get(key, ()))
        short = hash((key, known))
        times = stretch.seen.get(short)
        if not known and stretch.moved(key, frame, new=times is None):
            return None
        if times is None and not known and stretch.changed_to(key, self._lent):
            times = STEADY  # an earlier stretch became a graph, whose results have the same address in every run
        times = (times or 0) + 1
        stretch.missed(key)
        stretch.seen[short] = times
        stretch.seen.move_to_end(short)
        if len(stretch.seen) > COUNTED:
            stretch.seen.popitem(last=False)
        if times <= STEADY:
            if _mark_changing(prepared, _history(prepared).note(frame.params, stretch.params)):
                _fold_again(prepared)
            return None
        family = self._recent_family(stretch, key)
        if len(family) >= VARIANTS or not self._has_room(stretch, key):
            stretch.seen[short] = -PATIENCE
            return None
        lending = len([c for c in family if c.lent])
        lend = bool(stretch.lends) and known < LENDING and lending < LENDING_ALL
        lend = lend and sum([bool(c.lent) for graphs in stretch.captured.values() for c in graphs]) < LENDING_STRETCH
        if stretch.draws and not self._may_draw(prepared):
            return None
        captured = self._capture(prepared, frame, steps, stretch, lend=lend)
        if captured is None:
            return None
        stretch.captured.setdefault(key, []).append(captured)
        stretch.captured.move_to_end(key)
        del stretch.seen[short]
        captured.used, captured.replay = stretch.runs, self.replayed
        self._stretches[id(stretch)] = weakref.ref(stretch)
        self.replayed += 1
        return captured

    def _may_draw(self, prepared: PreparedProgram) -> bool:
        """Whether graphs may contain random numbers. If it is known that not, the program's steps that draw some are marked."""
        if self._draws is None:
            self._draws = self._driver.draws_in_graphs()
            if self._draws is False:
                log.warning(
                    "random numbers differ in graphs of this device: operators that draw some run outside of graphs"
                )
        if self._draws is False and _mark(prepared, set(prepared.draws)):
            _fold_again(prepared)
        return bool(self._draws)

    def _has_room(self, stretch: Stretch, key: Key) -> bool:
        """Whether another graph may be captured. Graphs of another key of the stretch that are not used any more make room."""
        oldest = next(iter(stretch.captured), key)
        if oldest != key and stretch.runs - max([c.used for c in stretch.captured[oldest]]) > IDLE:
            del stretch.captured[oldest]
        elif sum([len(graphs) for graphs in stretch.captured.values()]) >= VARIANTS_ALL:
            return False
        self._count_destroyed()
        if not self._fits(stretch):
            self._forget_unused()
            self._count_destroyed()
        return self._fits(stretch) and self._failures < FAILURES

    def _recent_family(self, stretch: Stretch, key: Key) -> list[Captured]:
        """Return the graphs of a key's family. Those that were not used in the last STALE runs of the stretch are dropped."""
        found, since = [], stretch.runs - STALE
        for other, graphs in stretch.family(key):
            graphs[:] = [captured for captured in graphs if captured.used >= since]
            found += graphs
            if not graphs:
                del stretch.captured[other]
        return found

    def _fits(self, stretch: Stretch) -> bool:
        """Whether there is room for a graph of a stretch."""
        return self.count < GRAPHS and self._bytes + self._input_bytes + stretch.nbytes <= self._room

    def _count_destroyed(self) -> None:
        """Take the graphs that were destroyed since the last time off the counts."""
        if self._destroyed:
            while self._destroyed:
                graphs, nbytes, lent = self._destroyed.popleft()
                self._input_bytes -= nbytes
                self._lent.difference_update(lent)
                self.count -= graphs
            self._bytes = self._driver.graph_bytes()

    def _forget_unused(self) -> None:
        """Destroy the graphs and homes of all programs that were not used for long."""
        since = self.replayed - max(RECENT * self.count, RECENT_ALL)
        for known, reference in list(self._stretches.items()):
            stretch = reference()
            if stretch is None:
                del self._stretches[known]
                continue
            for key, graphs in list(stretch.captured.items()):
                if max([captured.replay for captured in graphs]) < since:
                    del stretch.captured[key]
            stretch.homes.forget(since)

    def _capture(
        self,
        prepared: PreparedProgram,
        frame: Frame,
        steps: Sequence[Step],
        stretch: Stretch,
        *,
        lend: bool,
    ) -> Captured | None:
        """Return the graph of a stretch. `lend`: large results are used in place until its next replay."""
        registers, bases = list(frame.registers), list(frame.bases)
        at, outside = -1, None

        def body() -> None:
            nonlocal at
            for at, step in enumerate(steps, stretch.begin):  # noqa: B007 - the failing step's index is used below
                step(frame)
            at = -1
            if outside is not None:
                outside.take(frame, stretch.names, before)

        try:
            inputs = self._private_inputs(stretch, frame)
            tensors = tensors_by_name(frame)
            names = [name for of_slot in stretch.names.values() for name in of_slot]
            before = {name: tensors[name] for name in names if name in tensors} | tensors
            if lend and stretch.outside:
                outside = Outside(self._device.empty, stretch.lends)
            graph = self._driver.capture(body, apart=lend and outside is None, draws=len(stretch.draws))
            if graph is None:  # a later run tries again
                return None
            made, left = changed(before, tensors_by_name(frame))
            held = held_in_place(prepared, left.items(), made) if lend else frozenset[int]()
            if outside is not None and not all(map(outside.has, [made[k] for k in held])):
                raise MisfitError
        except ContextLostError:
            raise
        except MisfitError:
            stretch.outside = False
            return None
        except Exception as e:  # a graph cannot contain this work; if it is an error, the steps raise it again
            self._driver.check()
            self._failures += 1
            if _no_memory(e) and not stretch.full:  # cached memory is not released during a capture
                stretch.full = True
                self._driver.release_cached()
            else:
                self._learn(prepared, stretch, at, e)
            return None
        finally:
            frame.registers[:], frame.bases[:] = registers, bases
        if stretch.whole:  # the run ends, and drops its registers
            left = {name: place for name, place in left.items() if place is not None}
        captured = Captured(graph, inputs, made, left, held, stretch.draws)
        self.count += 1
        self._bytes = self._driver.graph_bytes()
        own = inputs.nbytes + (outside.nbytes if outside is not None else 0) + DRAW_BYTES * len(stretch.draws)
        self._input_bytes += own
        self._lent.update(captured.lent)
        weakref.finalize(captured, self._destroyed.append, (1, own, captured.lent)).atexit = False
        return captured

    def _private_inputs(self, stretch: Stretch, frame: Frame) -> Inputs:
        """Give a run private memory in place of the inputs that are copied before each replay."""
        inputs = Inputs(self._device.empty)
        for slot, _ in stretch.moving:
            frame.put(inputs.add(frame.held(stretch.names[slot]), stretch.small[slot]).items())
        return inputs

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


def _no_memory(e: BaseException) -> bool:
    return isinstance(e, torch.OutOfMemoryError) or isinstance(e.__cause__, torch.OutOfMemoryError)


def _history(prepared: PreparedProgram) -> History:
    if prepared.history is None:
        prepared.history = History()
    history: History = prepared.history
    return history


def _mark_changing(prepared: PreparedProgram, params: list[int]) -> bool:
    """Mark the steps that use changing params. Returns whether there are steps that were not marked before."""
    changing = set(params)
    return bool(params) and _mark(
        prepared, {i for i in range(len(prepared.acts)) if not changing.isdisjoint(fixed_params(prepared, i))}
    )


def _mark(prepared: PreparedProgram, acts: set[int]) -> bool:
    """Mark the steps of some acts as ones that a graph cannot contain. Returns whether there are new ones."""
    known = len(prepared.uncapturable)
    for step, owner in enumerate(prepared.owner):
        if owner in acts and not isinstance(prepared.traces[step], FREE_OF_WORK):
            prepared.uncapturable.add(step)
    return len(prepared.uncapturable) > known


def _fold_again(prepared: PreparedProgram) -> None:
    """Combine the steps anew, because other steps than before are uncapturable. Runs in progress keep their steps."""
    prepared.heat(graphs=True)
    prepared.stretches.clear()
