"""A recording that can be sent again: assigns buffers to its inputs, its results and its temporary slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wooly import storage
from wooly.devices import NAME
from wooly.graphs.counters import counters
from wooly.graphs.recording import NotOneProgramError, Recording
from wooly.recorder import Recorder
from wooly.storage import ID_SHIFT, Heap, Layout, address_of
from wooly.torch_private import raw_device, reinterpret

#: Per device, ids for temporary buffers of programs. A program frees its temporary buffers, so all programs share these ids.
_temporary: tuple[list[int], ...] = tuple([[] for _ in storage.heaps])


def temporary_ids(heap: Heap, count: int) -> list[int]:
    """At least `count` ids for buffers that a program allocates, and that are freed with it."""
    ids = _temporary[heap.index]
    while len(ids) < count:
        ids.append(heap.reserve_id())
    return ids


class Out(NamedTuple):
    """One result tensor that the program makes.

    Attributes:
        slot: slot of its buffer.
        layout: layout of the buffer.
        whole: whether the tensor has exactly this layout. Otherwise it is a view of the buffer.
        dtype: dtype of the tensor.
        sizes: shape of the tensor.
        strides: strides of the tensor.
        offset: storage offset of the tensor, in elements.
        grad: whether the tensor requires a gradient.
    """

    slot: int
    layout: Layout
    whole: bool
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    grad: bool

    @classmethod
    def of(cls, t: Tensor, slot: int) -> Out:
        nbytes = t.untyped_storage().nbytes()
        layout = Layout(t.dtype, tuple(t.shape), t.stride())
        whole = t.storage_offset() == 0 and layout.nbytes == nbytes
        if not whole:
            layout = Layout(torch.uint8, (nbytes,), (1,))
        return cls(slot, layout, whole, t.dtype, tuple(t.shape), t.stride(), int(t.storage_offset()), t.requires_grad)

    def seen_in(self, base: Tensor) -> Tensor:
        """Make the tensor on the storage of `base`, which `layout` has made."""
        if self.whole:
            return base
        return storage.reinterpret_bytes(base, self.dtype, self.sizes, self.strides, self.offset)


class Alias(NamedTuple):
    """A result that is an argument, a view of an argument, or a constant."""

    key: Any
    constant: Tensor | None
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def seen_in(self, tensors: dict[Any, Tensor]) -> Tensor:
        t = self.constant if self.constant is not None else tensors[self.key]
        if t.shape == self.sizes and t.stride() == self.strides and t.storage_offset() == self.offset:
            return t
        return reinterpret(t, self.sizes, self.strides, self.offset - t.storage_offset())


class Program:
    """A recording whose slots are classified as inputs, results and temporary buffers.

    Args:
        recorder: recorder of the device on which the program runs.
        recorded: the recording.
        tensors: input tensors of the recording, by key. `run` gets other inputs with the same keys.
        constants: buffers of inputs that are the same in every run.
        results: result tensors. Other values among the results are constants.
        buffers: key per input buffer that belongs to no tensor.
    """

    def __init__(
        self,
        recorder: Recorder,
        recorded: Recording,
        tensors: dict[Any, Tensor],
        constants: set[int],
        results: Sequence[Any],
        buffers: dict[int, Any] | None = None,
    ) -> None:
        self._recorder = recorder
        self._recorded = recorded
        outside = (buffers or {}) | _by_id(tensors)
        dtypes = {k: t.dtype for k, t in tensors.items()}
        self.made = dict(recorded.made)
        inside = {*recorded.made, *recorded.gone}
        self.outside: list[tuple[int, Any]] = []
        for slot, buffer in enumerate(recorded.bind):
            if slot in inside:
                continue
            if buffer in outside:
                self.outside.append((slot, outside[buffer]))
            elif buffer not in constants:
                raise NotOneProgramError("it uses a tensor that is not one of its arguments")
        slot_of = {buffer: slot for slot, buffer in enumerate(recorded.bind) if slot not in recorded.gone}
        self.results = [self._result(t, slot_of, outside, dtypes, constants) for t in results]
        self._made_here = list(dict.fromkeys(r.slot for r in self.results if isinstance(r, Out)))
        #: Slots that the program allocates and does not free, without results. `want` can make their buffers outlive the program.
        self.left = [s for s in recorded.made if s not in self._made_here]
        self._template = list(recorded.bind)
        self._settle(set())

    def _result(
        self,
        t: Any,
        slot_of: dict[int, int],
        outside: dict[int, Any],
        dtypes: dict[Any, torch.dtype],
        constants: set[int],
    ) -> Any:
        if not isinstance(t, Tensor):
            return t
        if raw_device(t).type != NAME:
            raise NotOneProgramError("it computes on the host")
        buffer = address_of(t) >> ID_SHIFT
        if buffer in outside or buffer in constants:
            key = outside.get(buffer)
            if key is not None and dtypes[key] is not t.dtype:
                raise NotOneProgramError("it returns an argument with another dtype")
            return Alias(key, t if key is None else None, tuple(t.shape), t.stride(), int(t.storage_offset()))
        slot = slot_of.get(buffer)
        if slot is None or slot not in self.made:
            raise NotOneProgramError("it returns a tensor that is not an argument and that it did not make")
        return Out.of(t, slot)

    def _settle(self, wanted: set[int]) -> None:
        """Assign temporary buffers to the slots that are not wanted, and free those that the program does not free."""
        recorded = self._recorded
        unasked = [s for s in self.left if s not in wanted]
        ids = iter(temporary_ids(self._recorder.heap, len(unasked) + len(recorded.gone)))
        for slot in recorded.gone:
            self._template[slot] = next(ids)
        self._frees = []
        for slot in unasked:
            self._template[slot] = buffer = next(ids)
            self._frees.append(buffer)
        self.wanted = [s for s in self.left if s in wanted]

    def want(self, slots: set[int]) -> None:
        """Keep the buffers of these slots after the program. From now on, `run` needs buffer ids for all `wanted` slots."""
        self._settle({*self.wanted, *slots})

    @property
    def words(self) -> list[int]:
        """The recorded words. Equal words mean equal programs."""
        return self._recorded.work.words

    @property
    def written(self) -> list[Any]:
        """Keys of the inputs that the program writes."""
        of = dict(self.outside)
        return [of[s] for s in self._recorded.written if s in of]

    def run(self, ids: dict[Any, int], kept: Sequence[int], tensors: dict[Any, Tensor]) -> list[Any]:
        """Send the program again, and return its results.

        Args:
            ids: buffer id per key of `outside`.
            kept: buffer ids for the `wanted` slots.
            tensors: tensor per key, for results that are arguments.
        """
        recorder, recorded = self._recorder, self._recorded
        bind = list(self._template)
        for slot, key in self.outside:
            bind[slot] = ids[key]
        for slot, buffer in zip(self.wanted, kept, strict=True):
            bind[slot] = buffer
        params = recorded.params
        if recorded.random:
            params = list(params)
            for at in recorded.random:
                params[at : at + 2] = recorder.generator.draw()
        bases: dict[int, Tensor] = {}
        results: list[Any] = []
        with recorder.lock:
            for r in self.results:
                if isinstance(r, Out):
                    base = bases.get(r.slot)
                    if base is None:
                        base, bind[r.slot] = r.layout.new(recorder.heap)
                        bases[r.slot] = base
                    results.append(r.seen_in(base))
                else:
                    results.append(r.seen_in(tensors) if isinstance(r, Alias) else r)
            link = recorder.link
            if link is not None and link.mirroring:
                for slot in recorded.written:
                    link.forget(bind[slot])
            recorder.operations += recorded.operations
            recorder.replay(recorded.work, bind, params, self._frees)
        counters.operations += recorded.operations
        return results


def _by_id(tensors: dict[Any, Tensor]) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for k, t in tensors.items():
        found.setdefault(address_of(t) >> ID_SHIFT, k)
    return found
