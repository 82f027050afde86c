"""Captures repeated stretches of a program as graphs, and replays each with one launch.

A stretch is the part between two edges, at which a run may stop. So a graph is never longer than the part that the dispatch core
launches at a time. A graph contains the addresses and params of its run, so it can be replayed only for runs with the same
addresses and params. All graphs of a device share one memory pool. Results that outlive a stretch are copied out of the pool at
once, so that graphs may follow each other in any order.
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

#: Minimum number of steps of a stretch that is captured. A shorter stretch saves too little.
WORTH = 4
#: Number of consecutive runs with the same addresses and params after which a stretch is captured.
STEADY = 3
#: Maximum number of graphs per stretch: a loop may alternate between sets of buffers.
VARIANTS = 4
#: Limits per device: number of graphs, and growth of their memory pool in bytes. The third one limits the memory that one stretch
#: may allocate, in bytes.
GRAPHS, POOL_BYTES, STRETCH_BYTES = 512, 256 << 20, 64 << 20

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


@dataclass(slots=True)
class Captured:
    """The graph of a stretch for certain addresses and params.

    Attributes:
        graph: the captured work.
        made: memory in the pool whose content outlives the stretch.
        left: for each register (or ~slot) that the stretch changes, its tensor after the stretch; None: it is empty then.
    """

    graph: Graph
    made: list[Tensor]
    left: dict[int, Place | None]


@dataclass(slots=True)
class Stretch:
    """State of the steps between two edges.

    Attributes:
        params: the run's params that the stretch uses.
        never: the stretch cannot be captured.
        last: addresses and params of the last run.
        same: number of consecutive runs with these addresses and params.
        captured: graphs by addresses and params.
    """

    params: tuple[int, ...]
    never: bool
    last: Key = ()
    same: int = 0
    captured: dict[Key, Captured] = field(default_factory=dict)


class Graphs:
    """The graphs of one device. Only the device thread uses it.

    Args:
        driver: the driver of the GPU.
        device: the memory of the GPU.
    """

    def __init__(self, driver: Driver, device: TorchDevice) -> None:
        self._driver, self._device = driver, device
        self._count = self._bytes = 0
        self.replayed = 0

    def run(self, prepared: PreparedProgram, frame: Frame, begin: int, steps: Sequence[Step]) -> Sequence[Step]:
        """Replay the stretch of hot steps from `begin` on, if it has a graph for this run.

        Returns the steps that remain to be run.
        """
        if len(steps) < WORTH:
            return steps
        stretches: dict[tuple[int, int], Stretch] = prepared.stretches
        where = begin, begin + len(steps)
        stretch = stretches.get(where)
        if stretch is None:
            stretch = stretches[where] = self._new_stretch(prepared, *where)
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
        self._restore(captured, frame)
        return ()

    def _new_stretch(self, prepared: PreparedProgram, begin: int, end: int) -> Stretch:
        first = prepared.begins[begin]
        last = prepared.begins[end] if end < len(prepared.begins) else len(prepared.steps)
        acts = [prepared.acts[k] for k in sorted({prepared.owner[s] for s in range(first, last)})]
        params = [k for act in acts for k in act.params]
        slots = {slot for act in acts for slot in act.writes()}
        nbytes = sum([prepared.facts.slot_alloc[slot] or 0 for slot in slots])
        never = any(first <= s < last for s in prepared.uncapturable) or nbytes > STRETCH_BYTES
        return Stretch(tuple(dict.fromkeys(params)), never)

    def _capture(self, stretch: Stretch, frame: Frame, steps: Sequence[Step]) -> Captured | None:
        if self._count >= GRAPHS or self._bytes > POOL_BYTES:
            return None
        before = _tensors_by_name(frame)
        registers, bases = list(frame.registers), list(frame.bases)

        def body() -> None:
            for step in steps:
                step(frame)

        held = self._driver.reserved()
        try:
            graph = self._driver.capture(body)
            made, left = _changed(before, _tensors_by_name(frame))
        except ContextLostError:
            raise
        except Exception:  # a graph cannot contain this work; if it is an error, the steps raise it again
            self._driver.check()
            stretch.never = True
            return None
        finally:
            frame.registers[:], frame.bases[:] = registers, bases
        self._count += 1
        self._bytes += max(self._driver.reserved() - held, 0)
        return Captured(graph, made, left)

    def _restore(self, captured: Captured, frame: Frame) -> None:
        """Set registers and memory to the state that the steps would leave."""
        fresh = []
        for memory in captured.made:
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


def _key(stretch: Stretch, frame: Frame) -> Key:
    """Return everything that a graph depends on: addresses, and the type and value of each param."""
    places = [-1 if t is None else t.data_ptr() for t in frame.registers]
    places += [-1 if t is None else t.data_ptr() for t in frame.bases]
    numbers = [(type(frame.params[k]), repr(frame.params[k])) for k in stretch.params]
    return (*places, *numbers)


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
