"""What a capture has recorded, as programs that are sent at each replay with the same buffers, and collectives between them.

A buffer that the capture allocates and frees stays an inner buffer of one program. A buffer that outlives the capture, or that
several programs or a collective use, is allocated once, after the capture. The graph keeps these buffers, and those that existed
before. Buffers that are needed one after the other, but not outside the graph, share their memory.
"""

from __future__ import annotations

import weakref
from array import array
from collections import defaultdict
from collections.abc import Collection, Hashable, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from wooly_wis.codec import decode_form
from wooly_wis.dtypes import DType
from wooly_wis.limits import MAX_FORMS, MAX_INSTRUCTIONS, MAX_NODES, MAX_PARAMS, MAX_PROGRAM_BYTES, MAX_REFERENCES
from wooly_wis.program import Form, Operand, Role, View
from wooly_wis.verifier import nodes_of

from wooly.errors import NotConnectedError
from wooly.graphs.program import temporary_ids
from wooly.interned_forms import InternedForm
from wooly.origins import Origin, describe_origin
from wooly.recorder import CapturedCollective, Recorder, Taken, Work
from wooly.rng import CapturedDraws, captured_draws
from wooly.storage import Heap, Keeper, Lease

if TYPE_CHECKING:
    from wooly.link import Link

#: Bytes of an encoded program besides its forms and words, and of each form besides its canonical bytes, at most.
_HEAD_BYTES, _FORM_BYTES = 64, 8


class Step(NamedTuple):
    """One instruction of a capture.

    Attributes:
        form: number of the interned form.
        info: the form.
        slots: one slot of the capture per operand.
        params: values of the params.
        where: the Python line.
    """

    form: int
    info: InternedForm
    slots: list[int]
    params: list[float | int]
    where: Origin


class Placed(NamedTuple):
    """A collective in a capture.

    Attributes:
        at: number of instructions before it.
        collective: the collective.
        slots: the slot of the capture of each of its buffers.
    """

    at: int
    collective: CapturedCollective
    slots: dict[int, int]


class Draw(NamedTuple):
    """A pair (seed, offset) of a random operator.

    Attributes:
        at: index of the pair in the params.
        draws: the draws of the capture in which the pair was drawn.
        which: number of the pair among these draws.
    """

    at: int
    draws: CapturedDraws
    which: int


class Part(NamedTuple):
    """One program of a graph.

    Attributes:
        work: the program.
        bind: buffer per slot.
        params: values of the params.
        random: the pairs in `params` that each replay replaces.
    """

    work: Work
    bind: list[int]
    params: list[float | int]
    random: list[Draw]


class Pool:
    """Buffers that the graphs of one pool share on one device: those whose values nobody needs between two replays.

    As under CUDA, graphs of one pool are not replayed at the same time.
    """

    def __init__(self) -> None:
        self._known: list[tuple[weakref.ref[Lease], int]] = []

    def take(self, heap: Heap, sizes: Sequence[int], used: Collection[int]) -> tuple[list[Lease], set[int]]:
        """Buffers of at least these sizes, for one graph.

        Args:
            heap: the device's storages.
            sizes: bytes of each buffer.
            used: buffers that the graph uses for something else.

        Returns:
            One lease of one buffer per size, and the buffers that are new.
        """
        free = [(lease, n) for ref, n in self._known if (lease := ref()) is not None and lease.ids[0] not in used]
        found: dict[int, Lease] = {}
        new: set[int] = set()
        for k in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
            best = min([i for i, (_, n) in enumerate(free) if n >= sizes[k]], key=lambda i: free[i][1], default=None)
            if best is not None:
                found[k] = free.pop(best)[0]
                continue
            lease = found[k] = Lease(heap, [sizes[k]])
            new.add(lease.ids[0])
            self._known.append((weakref.ref(lease), sizes[k]))
        self._known = [each for each in self._known if each[0]() is not None]
        return [found[k] for k in range(len(sizes))], new


#: By session, and by name and device: the pools of its graphs.
_pools: weakref.WeakKeyDictionary[Link, dict[tuple[Hashable, int], Pool]] = weakref.WeakKeyDictionary()


class CapturedGraph:
    """The programs and collectives of a graph, and the buffers that it keeps.

    Attributes:
        parts: the programs and collectives, in order.
        operations: number of recorded operators.
    """

    def __init__(
        self,
        recorder: Recorder,
        parts: list[Part | CapturedCollective],
        operations: int,
        draws: Sequence[CapturedDraws],
        written: list[int],
        kept: list[object],
    ) -> None:
        self._recorder = recorder
        self._link = recorder.link
        self.parts = parts
        self.operations = operations
        self._draws = draws
        self._written = written
        self._kept = kept

    def replay(self) -> None:
        """Send the programs and collectives.

        Raises:
            NotConnectedError: the session of the capture has ended.
            RuntimeError: the process group of a collective was destroyed.
            WoolyError: the connection ended.
        """
        recorder, params = self._recorder, []
        with recorder.lock:
            self._check_session()
            for draws in self._draws:
                draws.draw()
            for part in self.parts:
                if isinstance(part, Part):
                    params.append(self._params_of(part))
            recorder.operations += self.operations
            if len(params) == len(self.parts):
                self._forget_mirrors()
                for part, own in zip(self.parts, params, strict=True):
                    assert isinstance(part, Part)
                    recorder.replay(part.work, part.bind, own, [])
                return
        following = iter(params)
        for part in self.parts:  # without the lock, because a collective may wait for the script of another rank
            if isinstance(part, Part):
                with recorder.lock:
                    self._check_session()
                    self._forget_mirrors()
                    recorder.replay(part.work, part.bind, next(following), [])
            else:
                part.send()

    def _check_session(self) -> None:
        link = self._recorder.link
        if link is None or link is not self._link:
            raise NotConnectedError(
                "the session in which this CUDA graph was captured has ended, and with it the graph's memory; capture the "
                "graph again"
            )

    def _forget_mirrors(self) -> None:
        """Drop the host copies of what the graph writes."""
        link = self._recorder.link
        if link is not None and link.mirroring:
            for buffer in self._written:
                link.forget(buffer)

    @staticmethod
    def _params_of(part: Part) -> list[float | int]:
        """The params of a program in this replay, with the pairs that were drawn for it."""
        if not part.random:
            return part.params
        params = list(part.params)
        for at, draws, which in part.random:
            params[at : at + 2] = draws.pair(which)
        return params

    def release(self) -> None:
        """Give the buffers back. Those without a tensor are freed."""
        self.parts = []
        self._kept = []

    def dot(self) -> str:
        """The graph in the language of Graphviz: one node per instruction or collective, in order, with the Python line that
        recorded it.
        """
        lines = ["digraph dot {"]
        previous = ""
        for p, part in enumerate(self.parts):
            is_program = isinstance(part, Part)
            lines.append(f'subgraph cluster_{p} {{\nlabel="{"program" if is_program else "collective"} {p}"')
            nodes = [(part.name, part.where)] if not isinstance(part, Part) else self._nodes_of(part)
            for i, (what, where) in enumerate(nodes):
                name = f"node_{p}_{i}"
                label = f"{what}\n{describe_origin(where)}".replace("\\", "\\\\").replace('"', '\\"')
                lines.append(f'{name} [shape="record" label="{label}"]')
                if previous:
                    lines.append(f"{previous} -> {name}")
                previous = name
            lines.append("}")
        return "\n".join([*lines, "}", ""])

    def _nodes_of(self, part: Part) -> list[tuple[str, Origin]]:
        steps = self._recorder.instructions_of(part.work.words)
        return [(form.name, where) for (form, _), where in zip(steps, part.work.origins, strict=True)]


def build(
    recorder: Recorder,
    taken: Taken,
    draws: Sequence[CapturedDraws],
    deaths: dict[int, int],
    collectives: Sequence[Placed],
    pool: Hashable,
) -> CapturedGraph:
    """Make a graph of what was recorded, and record the allocation of its buffers. The caller holds the recorder's lock.

    Args:
        recorder: recorder of the device.
        taken: what was recorded.
        draws: the draws of the capture.
        deaths: for buffers whose storage was freed during the capture, the entry of `Heap.dead`.
        collectives: the collectives of the capture, in order.
        pool: name of the graph's pool.
    """
    heap = recorder.heap
    steps = _steps(recorder, taken)
    part_of = _parts(steps, {placed.at for placed in collectives})
    made, freed = _lives(steps)
    inner = {s for s, k in made.items() if s in freed and part_of[freed[s]] == part_of[k]}
    bind = list(taken.bind)
    kept: list[object] = []
    crossing = [s for s in made if s in freed and s not in inner]
    same = _shared(steps, crossing, made, freed)
    known: set[int] = set()
    if crossing:
        leased = [s for s in crossing if s not in same]
        shared = _pools.setdefault(recorder.require_link(), {}).setdefault((pool, heap.index), Pool())
        leases, new = shared.take(heap, [steps[made[s]].info.nbytes for s in leased], set(bind))
        kept += leases
        for slot, lease in zip(leased, leases, strict=True):
            (bind[slot],) = lease.ids
        known = {lease.ids[0] for lease in leases} - new
        for slot, other in same.items():
            bind[slot] = bind[other]
    outside = [s for s in range(len(bind)) if s not in inner]
    kept.append(Keeper(heap, [bind[s] for s in outside if s not in crossing]))
    for slot in freed:
        if slot not in made:  # the storage of an input was freed: the graph's keeper takes it over
            heap.dead.append(deaths[bind[slot]])
    gone = {taken.bind[s] for s in made if s in freed}
    heap.recycle([b for b in taken.freed if b in gone])
    zeroed = _read_before_written(steps, [s for s in made if s not in inner], collectives)
    programs = _programs(recorder, steps, part_of, inner, bind, zeroed, same)
    parts: list[Part | CapturedCollective] = []
    waiting = list(collectives)
    for begin, program in programs:
        while waiting and waiting[0].at <= begin:
            parts.append(waiting.pop(0).collective)
        parts.append(program)
    parts += [placed.collective for placed in waiting]
    for _, collective, slots in collectives:
        collective.bind({buffer: bind[slot] for buffer, slot in slots.items()})
    for slot in made:
        if slot not in inner and slot not in same and bind[slot] not in known:
            step = steps[made[slot]]
            recorder.emit(step.form, [bind[slot]], step.where)
    writes = dict.fromkeys([t.slots[w] for t in steps for w in t.info.writes])
    written = list(dict.fromkeys([bind[s] for s in writes if s not in inner]))
    return CapturedGraph(recorder, parts, taken.operations, draws, written, kept)


def _steps(recorder: Recorder, taken: Taken) -> list[Step]:
    """The recorded instructions."""
    known, words, at, n = recorder.forms.known, taken.words, 0, 0
    steps = []
    for where in taken.origins:
        info = known[words[at]]
        count = len(info.param_format)
        steps.append(Step(words[at], info, words[at + 1 : at + 1 + info.arity], taken.params[n : n + count], where))
        at, n = at + 1 + info.arity, n + count
    return steps


def _lives(steps: list[Step]) -> tuple[dict[int, int], dict[int, int]]:
    """Per slot, the instruction that allocates it, and the instruction that frees it."""
    made: dict[int, int] = {}
    freed: dict[int, int] = {}
    for k, step in enumerate(steps):
        if step.info.name == "alloc":
            made[step.slots[0]] = k
        elif step.info.name == "free":
            freed[step.slots[0]] = k
    return made, freed


def _shared(steps: list[Step], crossing: list[int], made: dict[int, int], freed: dict[int, int]) -> dict[int, int]:
    """Of slots that several programs use and that the capture frees: those that use the buffer of another slot, and that slot.

    A slot can use the buffer of a slot of the same size that was freed before.
    """
    found: dict[int, int] = {}
    free: defaultdict[int, list[tuple[int, int]]] = defaultdict(
        list
    )  # by size: when it is free, and the slot that has the buffer
    for slot in sorted(crossing, key=made.__getitem__):
        known = free[steps[made[slot]].info.nbytes]
        k = next((k for k, (since, _) in enumerate(known) if since < made[slot]), None)
        root = slot if k is None else known.pop(k)[1]
        if root != slot:
            found[slot] = root
        known.append((freed[slot], root))
    return found


def _parts(steps: list[Step], begins: set[int]) -> list[int]:
    """Per instruction, the program to which it belongs. A program is as long as the executor's limits allow.

    Args:
        steps: the instructions.
        begins: instructions at which a program begins, because a collective is before them.
    """
    found = []
    part = instructions = references = params = nodes = 0
    size = _HEAD_BYTES
    forms: set[int] = set()
    exact = sum([len(raw) for raw in {s.info.raw for s in steps}]) > MAX_NODES  # a node takes at least one byte
    for k, step in enumerate(steps):
        # A `fill` with an attribute may take the place of an `alloc`, so each instruction may add a second form.
        new = step.form not in forms
        more_nodes = (nodes_of(decode_form(step.info.raw)) if exact else 0) if new else 0
        more_bytes = 4 * (1 + len(step.slots)) + (2 * (len(step.info.raw) + _FORM_BYTES) if new else 0)
        if (
            (k in begins and instructions)
            or instructions + 1 > MAX_INSTRUCTIONS
            or references + len(step.slots) > MAX_REFERENCES
            or params + len(step.params) > MAX_PARAMS
            or 2 * len(forms) + 2 > MAX_FORMS
            or nodes + more_nodes + 4 > MAX_NODES
            or size + more_bytes > MAX_PROGRAM_BYTES
        ):
            part += 1
            instructions = references = params = nodes = 0
            size = _HEAD_BYTES
            forms = set()
        instructions += 1
        references += len(step.slots)
        params += len(step.params)
        nodes += more_nodes
        size += more_bytes
        forms.add(step.form)
        found.append(part)
    return found


def _read_before_written(steps: list[Step], slots: list[int], collectives: Sequence[Placed]) -> set[int]:
    """Of these slots, which the capture allocates, those that an instruction or a collective uses before another has written all
    their bytes.

    A new buffer contains zeros. A replay finds what the last one left there.
    """
    waiting = dict.fromkeys(slots)
    nbytes: dict[int, int] = {}
    found = set()
    coming = list(collectives)

    def meet(before: int) -> None:
        while coming and coming[0].at <= before:
            _, collective, own = coming.pop(0)
            for buffer, slot in own.items():
                if slot in waiting:
                    del waiting[slot]
                    if not _fills(collective, buffer, nbytes[slot]):
                        found.add(slot)

    for k, step in enumerate(steps):
        meet(k)
        if step.info.name == "alloc":
            nbytes[step.slots[0]] = step.info.nbytes
            continue
        here = [s for s in step.slots if s in waiting]
        if not here:
            continue
        operands = decode_form(step.info.raw).operands
        for slot in here:
            waiting.pop(slot, None)
            uses = [o for o, s in zip(operands, step.slots, strict=True) if s == slot]
            if step.info.name != "free" and not all(_writes_all(o, nbytes[slot]) for o in uses):
                found.add(slot)
    meet(len(steps))
    return found


def _writes_all(operand: Operand, nbytes: int) -> bool:
    view = operand.view
    if operand.role is not Role.OUT or not isinstance(view, View):
        return False
    whole = prod(view.sizes) * view.dtype.itemsize == nbytes and 0 not in view.strides
    return whole and view.offset == 0 and view.end == nbytes


def _fills(collective: CapturedCollective, buffer: int, nbytes: int) -> bool:
    """Whether a collective writes all bytes of a buffer, and reads none of them."""
    if any(own == buffer for own, _, _ in collective.reads):
        return False
    at = 0
    for own, begin, end in sorted(collective.writes):
        if own == buffer and begin <= at:
            at = max(at, end)
    return at >= nbytes


def _programs(
    recorder: Recorder,
    steps: list[Step],
    part_of: list[int],
    inner: set[int],
    bind: list[int],
    zeroed: set[int],
    same: dict[int, int],
) -> list[tuple[int, Part]]:
    """Write the programs, without the allocations and frees of buffers that the graph keeps. Each has the number of instructions
    before it.
    """
    parts: list[tuple[int, Part]] = []
    count = 1 + part_of[-1] if steps else 0
    for part in range(count):
        words: list[int] = []
        slot_of: dict[int, int] = {}
        params: list[float | int] = []
        origins: list[Origin] = []
        random: list[Draw] = []
        begin = part_of.index(part)
        for step in steps[begin : len(part_of) if part + 1 == count else part_of.index(part + 1)]:
            form = step.form
            if step.info.name in ("alloc", "free") and step.slots[0] not in inner:
                if step.info.name == "free" or step.slots[0] not in zeroed or not step.info.nbytes:
                    continue
                form = _zeros(recorder, step.info.nbytes)
            if step.info.random:
                seed, offset = step.params[-2:]
                drawn = captured_draws(int(seed))
                if drawn is not None:
                    random.append(Draw(len(params) + len(step.params) - 2, drawn, int(offset)))
            words.append(form)
            words.extend([slot_of.setdefault(same.get(s, s), len(slot_of)) for s in step.slots])
            params += step.params
            origins.append(step.where)
        ids = iter(temporary_ids(recorder.heap, len(inner & slot_of.keys())))
        bound = [next(ids) if s in inner else bind[s] for s in slot_of]
        if words:
            parts.append((begin, Part(Work(array("I", words).tobytes(), words, origins), bound, params, random)))
    return parts


def _zeros(recorder: Recorder, nbytes: int) -> int:
    """The number of the form that fills a buffer with zeros."""
    view = View(DType.U8, (nbytes,), (1,), 0)
    return recorder.forms.intern(Form("fill", (Operand(Role.OUT, view),), (), (("value", 0),)))
