"""Steady stretches of a program as graphs: captured once, replayed with one launch.

A stretch is what lies between two edges at which runs may be stopped, so no graph is longer than what the dispatch core launches
at a time. A graph has the addresses of what it reads and the numbers of the run in it, so it is for runs that have the same ones.
What it makes lies in memory that all graphs share; what outlives the stretch is copied out at once, so any graph may follow any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wooly_executor.errors import ContextLostError
from wooly_executor.runtime.buffers import bytes_of
from wooly_executor.runtime.device import TorchDevice
from wooly_executor.runtime.driver import Driver, Graph
from wooly_executor.runtime.frame import Frame, Step
from wooly_executor.runtime.prepared import PreparedProgram

#: Steps below which a stretch is not worth a graph.
WORTH = 4
#: Runs with the same addresses after which a stretch is captured.
STEADY = 3
#: Graphs of one stretch: a loop may take turns with its buffers.
VARIANTS = 4
#: Graphs of one device, and the bytes that their shared memory may grow by; what one stretch may make.
GRAPHS, POOL_BYTES, STRETCH_BYTES = 512, 256 << 20, 64 << 20

Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """How a register looks at memory.

    Attributes:
        of: a register (or the memory of a slot, as ~slot) that was there before the stretch; or a number among `Captured.made`.
        old: which of these.
    """

    of: int
    old: bool
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def on(self, memory: Tensor) -> Tensor:
        """A tensor that looks so at the storage of `memory`."""
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), self.offset, self.sizes, self.strides)


@dataclass(slots=True)
class Captured:
    """A stretch for some addresses and numbers.

    Attributes:
        graph: what it enqueues.
        made: memory of the graphs' that outlives the stretch, whole.
        left: per name that the stretch changes, what it is then; a name is a register, or ~slot for the memory of one.
    """

    graph: Graph
    made: list[Tensor]
    left: dict[int, Place | None]


@dataclass(slots=True)
class Stretch:
    """What is known of the steps between two edges.

    Attributes:
        params: which of the run's params it uses.
        never: it cannot be captured.
        last: addresses and numbers of the last run, and how often in a row they were the same.
    """

    params: tuple[int, ...]
    never: bool
    last: Key = ()
    same: int = 0
    captured: dict[Key, Captured] = field(default_factory=dict)


class Graphs:
    """The graphs of one device. Used by its thread alone.

    Args:
        driver: of the GPU.
        device: its memory.
    """

    def __init__(self, driver: Driver, device: TorchDevice) -> None:
        self._driver, self._device = driver, device
        self._count = self._bytes = 0
        self.replayed = 0

    def run(self, prepared: PreparedProgram, frame: Frame, begin: int, steps: Sequence[Step]) -> Sequence[Step]:
        """Replay the stretch of hot steps from `begin` on, if there is a graph for this run. Returns what is left to be done."""
        if len(steps) < WORTH:
            return steps
        stretches: dict[tuple[int, int], Stretch] = prepared.stretches
        where = begin, begin + len(steps)
        stretch = stretches.get(where)
        if stretch is None:
            stretch = stretches[where] = self._seen(prepared, *where)
        if stretch.never:
            return steps
        key = _key(stretch, frame)
        captured = stretch.captured.get(key)
        if captured is None:
            stretch.same = stretch.same + 1 if key == stretch.last else 0
            stretch.last = key
            if stretch.same < STEADY or len(stretch.captured) >= VARIANTS:
                return steps
            captured = self._capture(stretch, frame, steps)
            if captured is None:
                return steps
            stretch.captured[key] = captured
        captured.graph.replay()
        self.replayed += 1
        self._leave(captured, frame)
        return ()

    def _seen(self, prepared: PreparedProgram, begin: int, end: int) -> Stretch:
        first = prepared.begins[begin]
        last = prepared.begins[end] if end < len(prepared.begins) else len(prepared.steps)
        acts = [prepared.acts[k] for k in sorted({prepared.owner[s] for s in range(first, last)})]
        params = [k for act in acts for k in act.params]
        slots = {slot for act in acts for slot in act.writes()}
        nbytes = sum([prepared.facts.slot_alloc[slot] or 0 for slot in slots])
        never = any(first <= s < last for s in prepared.restless) or nbytes > STRETCH_BYTES
        return Stretch(tuple(dict.fromkeys(params)), never)

    def _capture(self, stretch: Stretch, frame: Frame, steps: Sequence[Step]) -> Captured | None:
        if self._count >= GRAPHS or self._bytes > POOL_BYTES:
            return None
        before = _names(frame)
        registers, bases = list(frame.registers), list(frame.bases)

        def body() -> None:
            for step in steps:
                step(frame)

        held = self._driver.reserved()
        try:
            graph = self._driver.capture(body)
            made, left = _changed(before, _names(frame))
        except ContextLostError:
            raise
        except Exception:  # whatever it is that no graph can hold: the steps themselves will say, if it is an error
            self._driver.check()
            stretch.never = True
            return None
        finally:
            frame.registers[:], frame.bases[:] = registers, bases
        self._count += 1
        self._bytes += max(self._driver.reserved() - held, 0)
        return Captured(graph, made, left)

    def _leave(self, captured: Captured, frame: Frame) -> None:
        """Registers and memory as the steps would have left them."""
        fresh = []
        for memory in captured.made:
            own = self._device.empty(len(memory))
            own.copy_(memory, non_blocking=True)
            fresh.append(own)
        old = _names(frame)
        for name, place in captured.left.items():
            found = None
            if place is not None:
                found = place.on(old[place.of] if place.old else fresh[place.of])
            if name >= 0:
                frame.registers[name] = found
            else:
                frame.bases[~name] = found


def _names(frame: Frame) -> dict[int, Tensor]:
    """What registers hold, and the memory of slots under ~slot."""
    found: dict[int, Tensor] = {k: t for k, t in enumerate(frame.registers) if t is not None}
    found.update({~k: t for k, t in enumerate(frame.bases) if t is not None})
    return found


def _key(stretch: Stretch, frame: Frame) -> Key:
    """All that a graph has in it: addresses, and what kind of number each param is beside the number."""
    places = [-1 if t is None else t.data_ptr() for t in frame.registers]
    places += [-1 if t is None else t.data_ptr() for t in frame.bases]
    numbers = [(type(frame.params[k]), repr(frame.params[k])) for k in stretch.params]
    return (*places, *numbers)


def _changed(before: dict[int, Tensor], after: dict[int, Tensor]) -> tuple[list[Tensor], dict[int, Place | None]]:
    """What a stretch made that outlives it, and what it left under each name that it changed."""
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
