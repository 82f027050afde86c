"""The graph of a stretch: what is copied before a replay, and where the results are afterwards.

A small result that outlives the stretch is copied out of the graph's memory after the replay. A larger one is lent: the graph
itself copies it to memory outside of its pool (`Outside`), and the run or the buffer gets this memory. The next replay needs it
again, so it waits until nobody else uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wooly_executor.runtime.buffers import bytes_of
from wooly_executor.runtime.calls import seed_of
from wooly_executor.runtime.driver import Graph
from wooly_executor.runtime.frame import Frame
from wooly_executor.runtime.prepared import PreparedProgram
from wooly_executor.runtime.torch_private import address_of_storage, copy_each, reinterpret, uses_of

#: Maximum size in bytes of a result that is copied out of a graph's memory. A loop may keep many small results.
COPIED = 64 << 10
#: Dtypes that `copy_each` copies with one launch. Tensors of other dtypes are copied as bytes.
_TOGETHER = frozenset(
    {
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    }
)
#: References to a result's storage that `Captured` has itself: the storage, and a tensor.
OWN_USES = 2


@dataclass(frozen=True, slots=True)
class Place:
    """The memory and layout of a tensor in a register.

    Attributes:
        of: a register (or ~slot for the memory of a slot) that existed before the stretch, or an index into the memory that
            the stretch made.
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
        if memory.dtype is self.dtype:
            return reinterpret(memory, self.sizes, self.strides, self.offset - memory.storage_offset())
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), self.offset, self.sizes, self.strides)

    def whole(self, nbytes: int) -> bool:
        """Whether a copy of the tensor copies each of the first `nbytes` bytes of its storage."""
        if not nbytes or self.dtype not in _TOGETHER:
            return False
        expected = 1
        for stride, size in sorted(zip(self.strides, self.sizes, strict=True)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return self.offset == 0 and expected * self.dtype.itemsize == nbytes


def place_of(t: Tensor, of: int, old: bool) -> Place:
    """Return the place of a tensor.

    Raises:
        RuntimeError: it reads as the conjugate or the negative of its memory.
    """
    if t.is_conj() or t.is_neg():
        raise RuntimeError("a graph cannot contain a tensor that reads as the conjugate or the negative of its memory")
    return Place(of, old, t.dtype, tuple(t.shape), t.stride(), int(t.storage_offset()))


class Inputs:
    """Private memory of a graph, for the inputs that are copied before each replay.

    Args:
        empty: allocates memory, of a number of bytes.
    """

    def __init__(self, empty: Callable[[int], Tensor]) -> None:
        self._empty = empty
        self._flat: list[tuple[Tensor, int]] = []
        self._groups: dict[torch.dtype, tuple[list[Tensor], list[int]]] = {}
        self.nbytes = 0

    def add(self, tensors: dict[int, Tensor], nbytes: int) -> dict[int, Tensor]:
        """Add an input.

        Args:
            tensors: its tensors by name, which share a storage.
            nbytes: the bytes of this storage that the program uses.

        Returns:
            Tensors of the same layout in private memory, by name.
        """
        memory = self._empty(nbytes)
        self.nbytes += nbytes
        places = {name: place_of(t, name, True) for name, t in tensors.items()}
        own = {name: place.on(memory) for name, place in places.items()}
        whole = next((name for name, place in places.items() if place.whole(nbytes)), None)
        if whole is None:
            self._flat.append((memory, next(iter(tensors))))
        else:
            targets, names = self._groups.setdefault(places[whole].dtype, ([], []))
            targets.append(own[whole])
            names.append(whole)
        return own

    def fill(self, frame: Frame) -> None:
        """Enqueue copies of a run's inputs to the private memory."""
        registers, bases = frame.registers, frame.bases
        for targets, names in self._groups.values():
            copy_each(targets, [registers[k] if k >= 0 else bases[~k] for k in names])
        for memory, k in self._flat:
            memory.copy_(bytes_of(registers[k] if k >= 0 else bases[~k], 0, len(memory)))


class Captured:
    """The graph of a stretch for certain addresses and params.

    Args:
        graph: the captured work.
        inputs: its private memory.
        made: memory that the stretch made and that outlives it, as bytes.
        left: for each register (or ~slot) that the stretch changes, its tensor after the stretch; None: it is empty then.
        held: the part of `made` that runs use in place, without a copy.
        draws: for each random call of the graph, the run's params with its seed and offset.

    Attributes:
        used: number of the last run of the stretch that used the graph.
        replay: number of its last replay among all replays of the device.
        lent: the addresses of the memory that runs use in place.
    """

    __slots__ = (
        "__weakref__",
        "_cleared",
        "_copies",
        "_counted",
        "_draws",
        "_inputs",
        "_memory",
        "_moved",
        "_set",
        "graph",
        "lent",
        "replay",
        "used",
    )

    def __init__(
        self,
        graph: Graph,
        inputs: Inputs,
        made: list[Tensor],
        left: dict[int, Place | None],
        held: frozenset[int],
        draws: Sequence[tuple[int, int]],
    ) -> None:
        self.graph, self._inputs, self.used, self.replay = graph, inputs, 0, 0
        self._draws = draws
        self._cleared: list[tuple[int, Tensor | None]] = [(name, None) for name, place in left.items() if place is None]
        self._moved = [(name, place) for name, place in left.items() if place is not None and place.old]
        new = [(name, place) for name, place in left.items() if place is not None and not place.old]
        #: For each part of `made`, the layout in which it is copied: that of a tensor that shows all of it, or bytes.
        layouts: dict[int, Place] = {}
        for _, place in new:
            if place.whole(len(made[place.of])):
                layouts.setdefault(place.of, place)
        self._memory = [layouts[k].on(t) if k in layouts else t for k, t in enumerate(made)]
        #: (name, index into `made`, place). Without a place, the name gets the copy itself.
        self._set: list[tuple[int, int, Place | None]] = []
        given = set(held)
        for name, place in new:
            itself = place.of not in given and layouts.get(place.of) is place
            self._set.append((name, place.of, None if itself else place))
            given.update({place.of} if itself else ())
        copied: dict[torch.dtype, list[int]] = {}
        for k, t in enumerate(self._memory):
            if k not in held:
                copied.setdefault(t.dtype, []).append(k)
        self._copies = [(ks, [self._memory[k] for k in ks]) for ks in copied.values()]
        storages = [self._memory[k].untyped_storage() for k in sorted(held)]
        self._counted = [(storage, address_of_storage(storage)) for storage in storages]
        self.lent = [storage.data_ptr() for storage in storages]

    @property
    def input_bytes(self) -> int:
        """Private memory for inputs, in bytes."""
        return self._inputs.nbytes

    def free(self) -> bool:
        """Whether nobody else uses the memory of results that stayed in place."""
        for _, address in self._counted:  # noqa: SIM110 - in each run
            if uses_of(address) != OWN_USES:
                return False
        return True

    def __call__(self, frame: Frame) -> None:
        """Enqueue the work, and set registers and memory to the state that the steps would leave."""
        registers, bases = frame.registers, frame.bases
        self._inputs.fill(frame)
        self.graph.replay([seed_of(frame.params, pair) for pair in self._draws] if self._draws else ())
        memory = self._memory
        if self._copies:
            memory = list(memory)
            for ks, sources in self._copies:
                fresh = [torch.empty_like(t) for t in sources]
                copy_each(fresh, sources)
                for k, t in zip(ks, fresh, strict=True):
                    memory[k] = t
        # all tensors before the first change, because they may be views of what is changed
        found: list[tuple[int, Tensor | None]] = [
            (name, place.on(registers[place.of] if place.of >= 0 else bases[~place.of])) for name, place in self._moved
        ]
        for name, k, place in self._set:
            found.append((name, memory[k] if place is None else place.on(memory[k])))
        frame.put(found + self._cleared)


class Outside:
    """Memory outside of a graph's pool for results that are used in place, so that graphs can share a pool for all else.

    Args:
        empty: allocates memory, of a number of bytes.
        sizes: bytes of each slot with such a result.
    """

    def __init__(self, empty: Callable[[int], Tensor], sizes: dict[int, int]) -> None:
        self._of = {slot: empty(size) for slot, size in sizes.items() if size}
        self.nbytes = sum(sizes.values())
        self._addresses = {memory.untyped_storage().data_ptr() for memory in self._of.values()}

    def take(self, frame: Frame, names: dict[int, tuple[int, ...]], before: dict[int, Tensor]) -> None:
        """Enqueue copies of the results to this memory, and put them in the place of the results, at the end of a capture.

        Raises:
            MisfitError: a result has another size than announced, or shares its memory.
        """
        known = {t.untyped_storage().data_ptr() for t in before.values()}
        for slot, memory in self._of.items():
            held = frame.held(names[slot])
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held.values()}
            if not held or not known.isdisjoint(storages):
                continue
            if list(storages.values()) != [len(memory)]:
                raise MisfitError
            memory.copy_(bytes_of(next(iter(held.values())), 0, len(memory)))
            frame.put([(name, place_of(t, name, False).on(memory)) for name, t in held.items()])

    def has(self, memory: Tensor) -> bool:
        """Whether this is a part of it."""
        return memory.untyped_storage().data_ptr() in self._addresses


class MisfitError(Exception):
    """A result that outlives a graph does not fit into the memory that was allocated for it."""


def tensors_by_name(frame: Frame) -> dict[int, Tensor]:
    """Return the tensors of all registers, and the memory of slots under ~slot."""
    found: dict[int, Tensor] = {k: t for k, t in enumerate(frame.registers) if t is not None}
    found.update({~k: t for k, t in enumerate(frame.bases) if t is not None})
    return found


def changed(before: dict[int, Tensor], after: dict[int, Tensor]) -> tuple[list[Tensor], dict[int, Place | None]]:
    """Return the memory that a stretch allocated and that outlives it, and the new place of each name that it changed.

    Raises:
        RuntimeError: a changed tensor reads as the conjugate or the negative of its memory.
    """
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
        left[name] = place_of(t, *found)
    return made, left


def held_in_place(
    prepared: PreparedProgram, left: Iterable[tuple[int, Place | None]], made: list[Tensor]
) -> frozenset[int]:
    """Return the memory that a stretch made and that is not copied: large memory, and memory that never becomes a buffer."""
    facts, outer = prepared.facts, set[int]()
    for name, place in left:
        slot = prepared.slot_of[name] if name >= 0 else ~name
        if place is not None and not place.old and (facts.slot_alloc[slot] is None or not facts.slot_freed[slot]):
            outer.add(place.of)
    return frozenset([k for k, t in enumerate(made) if len(t) > COPIED or (len(t) and k not in outer)])
