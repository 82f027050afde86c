"""Fixed memory ("homes") for large inputs whose addresses change from run to run, so that the runs are equal for a graph.

A graph lends its results, so the inputs of the graph behind it have the same addresses in each run. But the first graph of such
a chain may get an input from a step that no graph contains, such as an embedding at the end of the optimizer's program. If its
address is another one in each run, no later graph of the chain is ever captured. So this input is copied to a home, and its
buffer uses the home from then on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

from torch import Tensor

from wooly_executor.runtime.buffers import bytes_of
from wooly_executor.runtime.frame import Frame
from wooly_executor.runtime.replays import OWN_USES, place_of
from wooly_executor.runtime.torch_private import address_of_storage, uses_of

Key = tuple[object, ...]
#: Inputs of a run: their places in its key, and the key without them.
Stray = tuple[tuple[int, ...], Key]
#: Maximum number of inputs of a run that get a home: if more of them move, the runs before it are to blame.
STRAYS = 12
#: Number of runs in which an input strays before it gets a home.
STRAYED = 2
#: Number of recent keys that a key is compared with.
NEAR = 64
#: Number of comparisons without a new home after which a stretch is given up.
SOUGHT = 1024
#: Maximum number of homes of the same inputs, because a loop may use a result until it has made the next one; and per stretch.
HOMES_ALIKE, HOMES = 2, 64
#: Maximum bytes that are copied to a home, per library call of the stretch. To launch a call takes the host about 5 us, in which
#: a GPU copies some MiB.
BYTES_PER_CALL = 2 << 20


class Home:
    """Memory for some inputs of a stretch.

    Args:
        empty: allocates memory, of a number of bytes.
        sizes: the bytes of the storage of each slot.

    Attributes:
        addresses: the addresses of the memory.
        nbytes: its size.
        replay: number of the device's replays when it was used last.
    """

    __slots__ = ("__weakref__", "_counted", "_memory", "addresses", "nbytes", "replay")

    def __init__(self, empty: Callable[[int], Tensor], sizes: Mapping[int, int]) -> None:
        self._memory = {slot: empty(size) for slot, size in sizes.items()}
        storages = [memory.untyped_storage() for memory in self._memory.values()]
        self._counted = [(storage, address_of_storage(storage)) for storage in storages]
        self.addresses = [storage.data_ptr() for storage in storages]
        self.nbytes, self.replay = sum(sizes.values()), 0

    def take(self, frame: Frame, names: Mapping[int, Sequence[int]]) -> bool:
        """Enqueue copies of the inputs to this memory, and let the run and the buffers use it.

        Returns:
            Whether it was done: not if somebody else uses this memory, or the inputs.
        """
        if any(uses_of(address) != OWN_USES for _, address in self._counted):
            return False
        moving: list[tuple[Tensor, dict[int, Tensor]]] = []
        for slot, memory in self._memory.items():
            found = inputs_of(frame, slot, names[slot])
            if found is None or size_of(found) != len(memory):
                return False
            moving.append((memory, found))
        for memory, found in moving:
            memory.copy_(bytes_of(next(iter(found.values())), 0, len(memory)))
        for slot, memory in self._memory.items():
            buffer = frame.buffers.get(frame.bindings[slot])
            if buffer is not None and buffer.base is not None:
                buffer.base = place_of(buffer.base, 0, True).on(memory)
        for memory, found in moving:
            frame.put([(name, place_of(tensor, name, True).on(memory)) for name, tensor in found.items()])
        return True


def inputs_of(frame: Frame, slot: int, names: Sequence[int]) -> dict[int, Tensor] | None:
    """Return the tensors of a slot by name; None if somebody else than the run and the slot's buffer uses their memory.

    Others may be a peer that shares the memory, a read that waits, or another buffer with the same content. Tensors that read as
    the conjugate or the negative of their memory are left out, too.
    """
    held = frame.held(names)
    buffer = frame.buffers.get(frame.bindings[slot])
    known = {id(t): t for t in held.values()}
    if buffer is not None and buffer.base is not None:
        known[id(buffer.base)] = buffer.base
    storages = {t.untyped_storage().data_ptr() for t in known.values()}
    if not held or len(storages) != 1 or any(t.is_conj() or t.is_neg() for t in known.values()):
        return None
    storage = next(iter(held.values())).untyped_storage()
    return held if uses_of(address_of_storage(storage)) == len(known) + 1 else None


def size_of(held: Mapping[int, Tensor]) -> int:
    """Return the bytes of the storage of a slot's tensors."""
    return next(iter(held.values())).untyped_storage().nbytes()


class Homes:
    """The homes of one stretch. The places of inputs are positions in its keys."""

    def __init__(self) -> None:
        #: The inputs that have homes, as sets of places.
        self._strays: dict[tuple[int, ...], None] = {}
        self._known: dict[Stray, list[Home]] = {}
        self._times: OrderedDict[Stray, int] = OrderedDict()
        self._sought = 0

    def of(self, key: Key) -> Stray | None:
        """Return the inputs of a run that have homes; None if there are none."""
        for strays in self._strays:
            where = strays, _without(key, strays)
            if where in self._known:
                return where
        return None

    def at(self, where: Stray) -> list[Home]:
        """Return the homes of these inputs."""
        return self._known.get(where, [])

    @property
    def given_up(self) -> bool:
        """Whether no more homes are made: there are enough, or many runs have shown no input that could get one."""
        return self._sought >= SOUGHT or len(self._known) >= HOMES

    def seek(self, key: Key, others: OrderedDict[Key, Key], may: set[int], fixed: int) -> Stray | None:
        """Return the inputs of a run that should get a home: those by which its key differs from the most similar recent one.

        Args:
            key: the key of a run without a graph.
            others: the keys of earlier ones; the last one was used last.
            may: the places of the inputs that may get a home.
            fixed: number of addresses at the beginning of a key.
        """
        if not may:
            return None
        self._sought += 1
        best: list[int] = []
        for other in islice(reversed(others.values()), NEAR):
            if len(other) != len(key) or other[fixed:] != key[fixed:]:
                continue
            differing: list[int] = []
            for place in range(fixed):
                if other[place] != key[place]:
                    differing.append(place)
                    if place not in may or len(differing) > STRAYS:
                        break
            else:
                if differing and (not best or len(differing) < len(best)):
                    best = differing
        if not best:
            return None
        where = tuple(best), _without(key, best)
        times = self._times[where] = self._times.get(where, 0) + 1
        self._times.move_to_end(where)
        if len(self._times) > NEAR:
            self._times.popitem(last=False)
        return where if times >= STRAYED else None

    def add(self, where: Stray, home: Home) -> None:
        """Add a home of these inputs."""
        self._strays[where[0]] = None
        self._known.setdefault(where, []).append(home)
        self._times.pop(where, None)
        self._sought = 0

    def forget(self, before: int) -> None:
        """Drop the homes that were used last before this replay of the device."""
        for where, homes in list(self._known.items()):
            homes[:] = [home for home in homes if home.replay >= before]
            if not homes:
                del self._known[where]


def _without(key: Key, places: Sequence[int]) -> Key:
    found = list(key)
    for place in places:
        found[place] = 0
    return tuple(found)
