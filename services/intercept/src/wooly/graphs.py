"""Functions of tensors as programs: recorded at the first call of a kind, sent again with other buffers at every later one.

A *kind* is everything about the arguments but the buffers: layouts, which of them share storage, numbers, who wants a gradient.
The first call of a kind runs as any eager code does, and what it recorded is kept; later calls cost one message, however many
operations there are. Results are those of eager execution, for they are the same instructions. A function that waits for the
device in its middle, computes on the host, or returns views of its arguments where a gradient is wanted, stays eager.

Knows nothing of Dynamo: whoever calls must see to it that the function depends on its arguments alone.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from wooly import storage
from wooly.device import Device
from wooly.devices import NAME, Devices
from wooly.recorder import Recorder, Work
from wooly.storage import DEVICE_MASK, ID_SHIFT, PLACE_MASK, Layout, address_of
from wooly.torch_private import raw_device, reinterpret

log = logging.getLogger("wooly.graphs")

Function = Callable[..., Any]
#: Kinds of arguments that one function keeps programs for; a function called with more kinds stays eager for the rest.
KINDS_KEPT = 64
#: Layouts of arguments that one function keeps numbers for.
PLACES_KEPT = 4096
#: Forwards without a backward after which only every so many are recorded: a backward may never come.
_PATIENCE = 8
#: Instructions that one program may have.
INSTRUCTIONS = 32768

#: Per device, ids of buffers that live inside one program only. Every program gives them back, so all share them.
_temporary: tuple[list[int], ...] = tuple([[] for _ in storage.heaps])


class NotOneProgramError(Exception):
    """Internal signal: what was recorded cannot be sent again; the message says why."""


class Recording(NamedTuple):
    """What one call recorded.

    Attributes:
        work: the program.
        bind: buffer per slot.
        params: values of the params.
        random: index, in `params`, of each (seed, offset).
        made: bytes per slot that the program allocates and does not free.
        gone: slots that it allocates and frees.
        written: slots from outside that it writes.
        operations: operators that it stands for.
    """

    work: Work
    bind: list[int]
    params: list[float | int]
    random: list[int]
    made: dict[int, int]
    gone: list[int]
    written: list[int]
    operations: int


class _Recorded:
    """Where `recording` puts its result."""

    result: Recording | None = None


@contextmanager
def recording(recorder: Recorder) -> Iterator[_Recorded]:
    """Keep what is recorded in the block, which runs and is sent as usual."""
    out = _Recorded()
    with recorder.lock:
        recorder.flush()
        generation, limit, draws = recorder.generation, recorder.limit, recorder.foreign_draws
        before = recorder.operations
        recorder.set_limit(INSTRUCTIONS)
        recorder.recording = True
        try:
            yield out
            recorder.release_dead()
            if recorder.foreign_draws != draws:
                raise NotOneProgramError("it draws from a generator of its own")
            if recorder.generation == generation and recorder.words:
                out.result = _keep(recorder, recorder.operations - before)
            recorder.flush()
        finally:
            recorder.set_limit(limit)
            recorder.recording = False


def _keep(recorder: Recorder, operations: int) -> Recording:
    words, bind = recorder.words, recorder.bind
    made: dict[int, int] = {}
    gone: list[int] = []
    written: dict[int, None] = {}
    random: list[int] = []
    n_params = 0
    for form, slots in recorder.instructions_of(words):
        n_params += len(form.param_format)
        if form.name == "alloc":
            made[slots[0]] = form.nbytes
        elif form.name == "free":
            if slots[0] not in made:
                raise NotOneProgramError("it frees what it did not make")
            del made[slots[0]]
            gone.append(slots[0])
        else:
            if form.random:
                random.append(n_params - 2)
            for k in form.writes:
                written[slots[k]] = None
    inside = {*made, *gone}
    outside = [s for s in written if s not in inside]
    work = Work(array("I", words).tobytes(), words, recorder.origins)
    return Recording(work, bind, recorder.params, random, made, gone, outside, operations)


class _Out(NamedTuple):
    """One tensor that comes out.

    Attributes:
        slot: its buffer's.
        layout: of the buffer.
        whole: the tensor is the buffer as `layout` says.
        dtype: of the tensor.
        sizes: its shape.
        strides: its strides.
        offset: its first element.
        grad: whether it has a gradient.
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
    def of(cls, t: Tensor, slot: int) -> _Out:
        nbytes = t.untyped_storage().nbytes()
        layout = Layout(t.dtype, tuple(t.shape), t.stride())
        whole = t.storage_offset() == 0 and layout.nbytes == nbytes
        if not whole:
            layout = Layout(torch.uint8, (nbytes,), (1,))
        return cls(slot, layout, whole, t.dtype, tuple(t.shape), t.stride(), t.storage_offset(), t.requires_grad)

    def seen_in(self, base: Tensor) -> Tensor:
        """This tensor on a storage that was made by `layout`."""
        if self.whole:
            return base
        return storage.review(base, self.dtype, self.sizes, self.strides, self.offset)


class Program:
    """A recording with its slots sorted: what comes from outside, what comes out, what lives inside.

    Args:
        recorder: that of the device where it runs.
        recorded: the recording.
        tensors: tensor per key from outside; at a later run, `run` is told others by these keys.
        constants: buffers from outside that stay the same.
        results: tensors that come out; anything else among them is a constant.
        buffers: key per buffer from outside that no tensor stands for.
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
                raise NotOneProgramError("it uses a tensor that is not among its arguments")
        slot_of = {buffer: slot for slot, buffer in enumerate(recorded.bind) if slot not in recorded.gone}
        self.results = [self._result(t, slot_of, outside, dtypes, constants) for t in results]
        self._made_here = list(dict.fromkeys(r.slot for r in self.results if isinstance(r, _Out)))
        #: Slots made inside whose buffers somebody may still want: for these, `run` can be given ids.
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
                raise NotOneProgramError("it returns an argument as another dtype")
            return _Alias(key, t if key is None else None, tuple(t.shape), t.stride(), t.storage_offset())
        slot = slot_of.get(buffer)
        if slot is None or slot not in self.made:
            raise NotOneProgramError("it returns a tensor that it did not make")
        return _Out.of(t, slot)

    def _settle(self, wanted: set[int]) -> None:
        """Give every slot that nobody asks for a temporary id, and free those that the program does not free itself."""
        recorded = self._recorded
        unasked = [s for s in self.left if s not in wanted]
        heap = self._recorder.heap
        temporary = _temporary[heap.index]
        while len(temporary) < len(unasked) + len(recorded.gone):
            temporary.append(heap.reserve_id())
        ids = iter(temporary)
        for slot in recorded.gone:
            self._template[slot] = next(ids)
        self._frees = []
        for slot in unasked:
            self._template[slot] = buffer = next(ids)
            self._frees.append(buffer)
        self.wanted = [s for s in self.left if s in wanted]

    def want(self, slots: set[int]) -> None:
        """From now on, the buffers of these slots outlive the program: `run` must be given ids for `wanted`."""
        self._settle({*self.wanted, *slots})

    @property
    def words(self) -> list[int]:
        """What was recorded: equal words are equal programs."""
        return self._recorded.work.words

    @property
    def written(self) -> list[Any]:
        """Keys of what it writes outside."""
        of = dict(self.outside)
        return [of[s] for s in self._recorded.written if s in of]

    def run(self, ids: dict[Any, int], kept: Sequence[int], tensors: dict[Any, Tensor]) -> list[Any]:
        """Send it again.

        Args:
            ids: buffer id per key of `outside`.
            kept: ids for the `wanted` slots.
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
                if isinstance(r, _Out):
                    base = bases.get(r.slot)
                    if base is None:
                        base, bind[r.slot] = r.layout.new(recorder.heap)
                        bases[r.slot] = base
                    results.append(r.seen_in(base))
                else:
                    results.append(r.seen_in(tensors) if isinstance(r, _Alias) else r)
            link = recorder.link
            if link is not None and link.mirroring:
                for slot in recorded.written:
                    link.forget(bind[slot])
            recorder.operations += recorded.operations
            recorder.replay(recorded.work, bind, params, self._frees)
        counters.operations += recorded.operations
        return results


class _Alias(NamedTuple):
    """A result that is an argument, a view of one, or a constant."""

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


class Counters:
    """What graphs did in this process.

    Attributes:
        recorded: calls that were recorded.
        replayed: calls that were one program.
        eager: calls that stayed eager.
        operations: operators that the replayed programs stand for.
    """

    def __init__(self) -> None:
        self.recorded = self.replayed = self.eager = self.operations = 0


counters = Counters()


class GraphFunction:
    """A function of tensors that becomes one program per kind of arguments.

    Args:
        device: where it runs.
        function: depends on its positional arguments alone, and returns a tree of tensors and constants.
        constants: tensors that it uses besides.
    """

    def __init__(self, device: Device, function: Function, constants: Sequence[Tensor] = ()) -> None:
        self._device = device
        self._function = function
        self._held = list(constants)
        self._kinds: dict[tuple[Any, ...], Any] = {}
        self._places: dict[tuple[Any, ...], int] = {}
        self._numbers = 0
        self._parameters: dict[int, tuple[int, int, bool, int]] = {}

    def __call__(self, *inputs: Any) -> Any:
        """Run it."""
        of: dict[int, int] = {}  # buffer id per input on the device
        kind: list[Any] = []
        for k, a in enumerate(inputs):
            if not isinstance(a, Tensor):
                kind += (a.__class__, a)  # 1, 1.0 and True are equal, and not the same
                continue
            at = a.data_ptr()
            grad = a.requires_grad
            parameter = a.__class__ is Parameter
            if parameter:
                # The same object in the same memory lies there as it did: whatever changes that, Dynamo looks for.
                seen = self._parameters.get(k)
                if seen is not None and seen[0] == id(a) and seen[1] == at and seen[2] is grad:
                    of[k] = at >> ID_SHIFT
                    kind.append(seen[3])
                    continue
            here = raw_device(a).type == NAME
            if not here or a.is_conj() or a.is_neg():
                if here or a.dim() or grad:
                    return self._eager(inputs)
                kind.append((a.dtype, a.item()))
                continue
            if not at:
                at = address_of(a)
            of[k] = at >> ID_SHIFT
            place = (a.dtype, a.shape, a.stride(), at & PLACE_MASK, grad)
            number = self._number_of(place)
            kind.append(number)
            if parameter:
                self._parameters[k] = (id(a), at, grad, number)
        ids = list(of.values())
        if len(set(ids)) != len(ids):
            kind.append(tuple([ids.index(i) for i in ids]))
        grad = torch.is_grad_enabled()
        kind.append(grad)
        devices = self._device.devices
        if devices.count > 1:
            kind.append(devices.current)
        known = self._kinds.get(signature := tuple(kind))
        if known is None:
            recorder = devices.recorders[ids[0] & DEVICE_MASK if ids else devices.current]
            if len(self._kinds) >= KINDS_KEPT or recorder.recording or len({i & DEVICE_MASK for i in ids}) > 1:
                return self._eager(inputs)
            wants = grad and any(isinstance(a, Tensor) and a.requires_grad for a in inputs)
            known = self._kinds[signature] = (_Training if wants else _Inference)(recorder, self)
        if known.why:
            return self._eager(inputs)
        return known(inputs, of)

    def _number_of(self, place: tuple[Any, ...]) -> int:
        number = self._places.get(place)
        if number is None:
            if len(self._places) >= PLACES_KEPT:  # every kind becomes a new one
                self._places.clear()
                self._parameters.clear()
                self._kinds.clear()
            number = self._places[place] = self._numbers
            self._numbers += 1
        return number

    def _eager(self, inputs: Sequence[Any]) -> Any:
        counters.eager += 1
        return self._function(*inputs)

    @property
    def function(self) -> Function:
        """The function itself."""
        return self._function

    @property
    def devices(self) -> Devices:
        """All devices."""
        return self._device.devices

    def operations_besides(self, recorder: Recorder) -> int:
        """Operations recorded so far on other devices."""
        return sum([r.operations for r in self.devices.active() if r is not recorder])

    @property
    def constant_ids(self) -> set[int]:
        """Buffers of the constants."""
        return {address_of(t) >> ID_SHIFT for t in self._held if raw_device(t).type == NAME}


def _device_tensors(values: Sequence[Any]) -> dict[int, Tensor]:
    return {i: a for i, a in enumerate(values) if isinstance(a, Tensor) and raw_device(a).type == NAME}


def _ids(tensors: dict[Any, Tensor]) -> dict[Any, int]:
    return {k: address_of(t) >> ID_SHIFT for k, t in tensors.items()}


def _by_id(tensors: dict[Any, Tensor]) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for k, t in tensors.items():
        found.setdefault(address_of(t) >> ID_SHIFT, k)
    return found


class _Kind:
    """One kind of arguments.

    Attributes:
        why: why this kind stays eager; empty while it does not.
    """

    def __init__(self, recorder: Recorder, owner: GraphFunction) -> None:
        self.recorder = recorder
        self.owner = owner
        self.why = ""
        self.spec: TreeSpec | None = None

    def give_up(self, why: str) -> None:
        """Stay eager from now on."""
        self.why = why
        log.info("a compiled function stays eager: %s", why)

    def record(self, inputs: Sequence[Any], call: Callable[[], list[Any]]) -> tuple[list[Any], Recording | None]:
        """Run `call` and keep what it records; None, with the reason in `why`, where that is not one program."""
        counters.recorded += 1
        recorded = None
        with ExitStack() as locks:
            # All devices, in one order for all threads: the call may go to any, while this one's lock is held.
            for recorder in self.owner.devices.active():
                locks.enter_context(recorder.lock)
            others = self.owner.operations_besides(self.recorder)
            try:
                with recording(self.recorder) as out:
                    results = call()
                recorded = out.result
                if self.owner.operations_besides(self.recorder) != others:
                    recorded = None
                    raise NotOneProgramError("it computes on several devices")
                if recorded is None:
                    raise NotOneProgramError(
                        "it waits for the device in its middle, or sends data, or does nothing there"
                    )
            except NotOneProgramError as e:
                self.recorder.flush()
                self.give_up(str(e))
        return results, recorded

    def flat(self, result: Any) -> list[Any]:
        """Results as a list; remembers their structure."""
        leaves, self.spec = tree_flatten(result)
        return leaves

    def unflat(self, leaves: Sequence[Any]) -> Any:
        """The function's result from its leaves."""
        assert self.spec is not None
        return tree_unflatten(leaves, self.spec)


class _Inference(_Kind):
    """Without gradients."""

    program: Program | None = None

    def __call__(self, inputs: Sequence[Any], of: dict[int, int]) -> Any:
        tensors = {k: inputs[k] for k in of}
        if self.program is None:
            leaves, recorded = self.record(inputs, lambda: self.flat(self.owner.function(*inputs)))
            if recorded is not None:
                try:
                    self.program = Program(self.recorder, recorded, tensors, self.owner.constant_ids, leaves)
                except NotOneProgramError as e:
                    self.give_up(str(e))
            return self.unflat(leaves)
        counters.replayed += 1
        for k in self.program.written:
            _touch(tensors[k])
        return self.unflat(self.program.run(of, (), tensors))


def _touch(t: Tensor) -> None:
    if not t.is_inference():
        torch.autograd.graph.increment_version(t)


class _Training(_Kind):
    """With gradients: a forward program, and a backward program per set of results that have a gradient.

    Until a backward was recorded, forwards run eagerly inside the autograd function and keep their own graph.
    """

    def __init__(self, recorder: Recorder, owner: GraphFunction) -> None:
        super().__init__(recorder, owner)
        self.forwards = 0
        self.forward_program: Program | None = None
        self.backward_programs: dict[tuple[bool, ...], Program] = {}

    def __call__(self, inputs: Sequence[Any], of: dict[int, int]) -> Any:
        leaves = _Call.apply(self, *inputs)
        if self.spec is None:
            raise AssertionError("the first forward remembers the structure")
        return self.unflat(leaves)

    # -- forward -----------------------------------------------------------------------------------------------------

    def forward(self, ctx: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        ctx.kind = self
        ctx.set_materialize_grads(False)
        if self.forward_program is not None and self.backward_programs and not self.why:
            return self._replay_forward(ctx, inputs)
        alone = [a.detach().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in inputs]

        def call() -> list[Any]:
            with torch.enable_grad():
                return self.flat(self.owner.function(*alone))

        self.forwards += 1
        if self.why or (self.forwards > _PATIENCE and self.forwards % _PATIENCE):
            counters.eager += 1
            leaves, recorded = call(), None
        else:
            leaves, recorded = self.record(inputs, call)
        ctx.graph = (alone, leaves, recorded)
        tensors = _device_tensors(inputs)
        if recorded is not None:
            try:
                program = Program(self.recorder, recorded, tensors, self.owner.constant_ids, leaves)
                self._check(program, inputs)
                self.forward_program = self.forward_program or program
            except NotOneProgramError as e:
                self.give_up(str(e))
        outs = tuple([t.detach() if isinstance(t, Tensor) else t for t in leaves])
        ctx.mark_non_differentiable(
            *[o for o, t in zip(outs, leaves, strict=True) if isinstance(t, Tensor) and not t.requires_grad]
        )
        return outs

    def _check(self, program: Program, inputs: Sequence[Any]) -> None:
        slots = [r.slot for r in program.results if isinstance(r, _Out)]
        if any(isinstance(r, _Alias) for r in program.results) or len(set(slots)) != len(slots):
            raise NotOneProgramError("a gradient is wanted, and it returns an argument or two views of one storage")
        if any(inputs[k].requires_grad for k in program.written):
            raise NotOneProgramError("it writes an argument that wants a gradient")

    def _replay_forward(self, ctx: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        program = self.forward_program
        assert program is not None
        counters.replayed += 1
        tensors = _device_tensors(inputs)
        lease = storage.Lease(self.recorder.heap, [program.made[s] for s in program.wanted])
        results = program.run(_ids(tensors), lease.ids, tensors)
        for k in program.written:
            _touch(tensors[k])
        needed = sorted({key[1] for p in self.backward_programs.values() for _, key in p.outside if key[0] == "in"})
        outs = sorted({key[1] for p in self.backward_programs.values() for _, key in p.outside if key[0] == "out"})
        carrier = torch.empty(0)
        carrier.lease = lease  # type: ignore[attr-defined]  # the buffers live as long as autograd keeps what was saved
        ctx.graph = None
        ctx.saved = (needed, outs, list(program.wanted))
        ctx.save_for_backward(carrier, *[tensors[k] for k in needed], *[results[k] for k in outs])
        ctx.mark_non_differentiable(
            *[t for t, r in zip(results, program.results, strict=True) if isinstance(r, _Out) and not r.grad]
        )
        return tuple(results)

    # -- backward ----------------------------------------------------------------------------------------------------

    def backward(self, ctx: Any, grads: tuple[Any, ...]) -> list[Any]:
        pattern = tuple([g is not None for g in grads])
        if ctx.graph is None:
            return self._replay_backward(ctx, pattern, grads)
        alone, leaves, forward = ctx.graph
        wanting = [a for a in alone if isinstance(a, Tensor) and a.requires_grad]
        roots = [t for t, g in zip(leaves, grads, strict=True) if g is not None]

        def call() -> list[Any]:
            found = iter(
                torch.autograd.grad(
                    roots, wanting, [g for g in grads if g is not None], retain_graph=True, allow_unused=True
                )
            )
            return [next(found) if isinstance(a, Tensor) and a.requires_grad else None for a in alone]

        if self.why or forward is None or pattern in self.backward_programs or self.forward_program is None:
            return call()
        results, recorded = self.record((), call)
        if recorded is not None:
            try:
                self._keep_backward(pattern, recorded, forward, alone, leaves, grads, results)
            except NotOneProgramError as e:
                self.give_up(str(e))
        return results

    def _keep_backward(
        self,
        pattern: tuple[bool, ...],
        recorded: Recording,
        forward: Recording,
        alone: Sequence[Any],
        leaves: Sequence[Any],
        grads: Sequence[Any],
        results: Sequence[Any],
    ) -> None:
        assert self.forward_program is not None
        if forward.work.words != self.forward_program.words:
            raise NotOneProgramError("its forward recorded something else this time")
        kept = {forward.bind[s]: ("kept", s) for s in forward.made}
        tensors = {
            (where, k): t
            for where, values in (("grad", grads), ("in", alone), ("out", leaves))
            for k, t in _device_tensors(values).items()
        }
        program = Program(self.recorder, recorded, tensors, self.owner.constant_ids, results, kept)
        if program.written:
            raise NotOneProgramError("its backward writes what was there before")
        self.forward_program.want({key[1] for _, key in program.outside if key[0] == "kept"})
        self.backward_programs[pattern] = program

    def _replay_backward(self, ctx: Any, pattern: tuple[bool, ...], grads: Sequence[Any]) -> list[Any]:
        program = self.backward_programs.get(pattern)
        if program is None:
            raise NotImplementedError(
                "a compiled function was given gradients for other results than in its backwards before; run it without "
                "torch.compile, or make every backward of it use the same results"
            )
        counters.replayed += 1
        carrier, *saved = ctx.saved_tensors
        needed, outs, kept = ctx.saved
        tensors: dict[Any, Tensor] = {("in", k): t for k, t in zip(needed, saved, strict=False)}
        tensors |= {("out", k): t for k, t in zip(outs, saved[len(needed) :], strict=True)}
        tensors |= {("grad", k): g for k, g in enumerate(grads) if g is not None}
        ids = _ids(tensors) | {("kept", s): i for s, i in zip(kept, carrier.lease.ids, strict=True)}
        return program.run(ids, (), tensors)


class _Call(torch.autograd.Function):
    """One call of a function of some kind, as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, kind: _Training, *inputs: Any) -> tuple[Any, ...]:
        return kind.forward(ctx, inputs)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return (None, *ctx.kind.backward(ctx, grads))
