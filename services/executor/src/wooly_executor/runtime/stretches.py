"""Divides a program into stretches that a graph can contain, and says which runs of a stretch are equal for a graph.

A stretch lies between two edges, at which a run may stop. It also ends before each step that a graph cannot contain.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from wooly_wis.program import ParamKind
from wooly_wis.verifier import ProgramFacts

from wooly_executor.runtime.bindings import picker
from wooly_executor.runtime.buffers import Buffer, Buffers, next_number
from wooly_executor.runtime.frame import Frame
from wooly_executor.runtime.homes import Homes, Stray
from wooly_executor.runtime.prepared import PreparedProgram
from wooly_executor.runtime.replays import COPIED, Captured
from wooly_executor.runtime.segments import Free, Gather, Review

#: Minimum number of library calls and launches of a stretch that is captured. A shorter stretch saves too little.
WORTH = 4
#: Maximum size in bytes of an input that is copied before a replay because its address changes.
SMALL = 256 << 10
#: Alignment in bytes of memory from torch's allocators. Kernels choose their loads by the alignment.
ALIGNED = 64
#: Maximum number of keys per stretch that are remembered.
COUNTED = 512
#: Number of new keys, in which an input has another address than in the run before, that make the input a moving one. Inputs
#: with at least MOVED of them become moving ones at the same time. Keys are counted if at most RECENT runs lie between them: now
#: and then, a run without graphs has other addresses.
MOVES, MOVED, RECENT = 4, 2, 8
#: Number of runs in which a small input has a buffer that the session made after its first run of the stretch. Then the input is
#: a moving one.
YOUNG = 2
#: Number of sessions whose first run of a stretch is remembered.
SESSIONS = 64

#: Steps that launch nothing on the device.
FREE_OF_WORK = (Gather, Free, Review)

Key = tuple[Any, ...]
#: Takes some elements of a list.
Taking = Callable[[list[Any]], Sequence[Any]]
#: Returns the address of a tensor. A key is made in each run, so no Python runs per address.
_address = torch.Tensor.data_ptr


@dataclass(slots=True, weakref_slot=True)
class Stretch:
    """State of steps between two edges that a graph can contain.

    Attributes:
        begin: index of the first hot step.
        end: index after the last hot step.
        floats: the run's params of type F64 that the stretch uses.
        others: its other params, without those in `draws`.
        draws: for each step that draws random numbers, the run's params with its seed and offset.
        names: the registers (or ~slots) whose memory the stretch may use, by slot.
        small: the bytes of each slot that the stretch reads and does not write, if they are at most SMALL.
        large: the other slots that it reads and does not write.
        calls: number of its library calls and launches.
        lends: bytes of each slot whose memory is used in place after a replay, until the next one.
        nbytes: bytes that the stretch allocates.
        never: the stretch cannot be captured.
        runs: number of runs.
        seen: number of runs per key, by its hash and the number of its graphs; the last one was used last.
        captured: graphs by key; the last one was used last.
        entered: the slots in use when the stretch begins, each with one of its names. Fixed ones come first, and registers before
            the memory of slots.
        fixed: number of slots whose addresses are in the key. The other slots are moving: they are copied before a replay.
        moves: for small slots, the number of recent changes of address, and the run of the last one.
        young: for small slots, the number of runs in which their buffer was made after the session's first run. A training step
            passes small tensors on from program to program, and their addresses never recur.
        firsts: for each session, a number that is larger than those of the buffers before its first run (see `Buffer.number`).
        full: whether a capture has failed because there was no memory.
        outside: whether the program announced the true sizes of what the stretch lends. Then this memory is allocated before a
            capture, outside of the graph's pool.
        last: the last keys of runs without a graph, by the addresses of their large slots. Each layer of a model runs the same
            program on weights of its own, so the run before is that of another layer.
        moving: the slots that are copied before a replay, each with one of its names.
        take: returns the tensors of the fixed slots, from the registers and from the memory of slots.
        whole: whether the program has nothing but this stretch.
        homes: memory for large inputs that would have another address in each run.
    """

    begin: int
    end: int
    floats: tuple[int, ...]
    others: tuple[int, ...]
    draws: tuple[tuple[int, int], ...]
    names: dict[int, tuple[int, ...]]
    small: dict[int, int]
    large: frozenset[int]
    calls: int
    lends: dict[int, int]
    nbytes: int
    never: bool = False
    runs: int = 0
    seen: OrderedDict[int, int] = field(default_factory=OrderedDict)
    captured: OrderedDict[Key, list[Captured]] = field(default_factory=OrderedDict)
    entered: list[tuple[int, int]] | None = None
    fixed: int = 0
    moves: dict[int, tuple[int, int]] = field(default_factory=dict)
    young: dict[int, int] = field(default_factory=dict)
    firsts: OrderedDict[int, int] = field(default_factory=OrderedDict)
    full: bool = False
    outside: bool = True
    last: OrderedDict[Key, Key] = field(default_factory=OrderedDict)
    moving: list[tuple[int, int]] = field(default_factory=list)
    take: tuple[Taking, Taking] = (tuple, tuple)
    whole: bool = False
    homes: Homes = field(default_factory=Homes)

    @property
    def params(self) -> tuple[int, ...]:
        """The run's params that a graph of the stretch contains."""
        return self.floats + self.others

    def key(self, frame: Frame) -> Key:
        """Return everything that a graph depends on: addresses, alignments, and the type and value of each param.

        All names of a slot show the same storage, in layouts that do not change. So one address per slot is enough.
        """
        if self.entered is None:
            self._enter(frame)
        registers, bases, params = frame.registers, frame.bases, frame.params
        in_registers, in_bases = self.take
        try:
            places: Key = (*map(_address, in_registers(registers)), *map(_address, in_bases(bases)))
            if self.moving:
                found = [registers[k] if k >= 0 else bases[~k] for _, k in self.moving]
                places += tuple([t.data_ptr() % ALIGNED for t in found])
        except (AttributeError, TypeError):  # another slot is empty than in the runs before
            self.entered = None
            self.reset()
            return self.key(frame)
        if not self.others and not self.floats:
            return places
        others = [params[k] for k in self.others]
        # equal floats may differ in bits: 0.0 and -0.0
        return (*places, array("d", [params[k] for k in self.floats]).tobytes(), *others, *map(type, others))

    def _enter(self, frame: Frame) -> None:
        registers, bases = frame.registers, frame.bases
        entered = []
        for slot, names in self.names.items():
            held = [k for k in names if (registers[k] if k >= 0 else bases[~k]) is not None]
            if held:
                entered.append((slot, held[0]))
        self._order(entered, [])

    def _order(self, fixed: list[tuple[int, int]], moving: list[tuple[int, int]]) -> None:
        """Set the slots whose addresses are in the key, and the moving ones."""
        fixed, self.moving = [sorted(entries, key=lambda entry: entry[1] < 0) for entries in (fixed, moving)]
        self.entered, self.fixed = [*fixed, *self.moving], len(fixed)
        self.take = picker([k for _, k in fixed if k >= 0]), picker([~k for _, k in fixed if k < 0])

    def moved(self, key: Key, frame: Frame, *, new: bool) -> bool:
        """Note the inputs of a run without a graph. Returns whether slots become moving ones, so that keys change.

        `new`: the key is a new one.
        """
        entered, moves = self.entered or [], self.moves
        now_moving = self._have_young(frame)
        before = self.last.get(self._large(key), ()) if new else ()
        for (slot, _), then, now in zip(entered[: self.fixed], before, key, strict=False):
            if then != now and slot in self.small:
                times, run = moves.get(slot, (0, self.runs))
                moves[slot] = (times + 1 if self.runs - run <= RECENT else 1), self.runs
        if any(times >= MOVES for times, _ in moves.values()):
            now_moving.update([slot for slot, (times, _) in moves.items() if times >= MOVED])
        if not now_moving:
            return False
        stay = [entry for entry in entered[: self.fixed] if entry[0] not in now_moving]
        self._order(stay, [entry for entry in entered if entry not in stay])
        self.reset()
        return True

    def _have_young(self, frame: Frame) -> set[int]:
        """Return the fixed small slots whose buffers were made after the session's first run of the stretch.

        Nothing is returned before one of them had such buffers in `YOUNG` runs.
        """
        session = _number_of(frame.buffers)
        if session is None:
            return set()
        first = self.firsts.get(session)
        if first is None:
            self.firsts[session] = next_number()
            if len(self.firsts) > SESSIONS:
                self.firsts.popitem(last=False)
            return set()
        fixed = [slot for slot, _ in (self.entered or [])[: self.fixed]]
        found = {slot for slot in fixed if slot in self.small and _is_younger(frame, slot, first)}
        for slot in found:
            self.young[slot] = self.young.get(slot, 0) + 1
        return found if any(self.young[slot] >= YOUNG for slot in found) else set()

    def strays(self, key: Key, frame: Frame) -> Stray | None:
        """Return the large inputs of a run that should get a home (see `homes`)."""
        session = _number_of(frame.buffers)
        first = self.firsts.get(session) if session is not None else None
        if not self.large or first is None or self.homes.given_up:
            return None
        may = {
            place
            for place, (slot, _) in enumerate((self.entered or [])[: self.fixed])
            if slot in self.large and _is_younger(frame, slot, first)  # weights are older
        }
        return self.homes.seek(key, self.last, may, self.fixed)

    def missed(self, key: Key) -> None:
        """Remember the key of a run without a graph."""
        large = self._large(key)
        self.last[large] = key
        self.last.move_to_end(large)
        if len(self.last) > COUNTED:
            self.last.popitem(last=False)

    def _large(self, key: Key) -> Key:
        """Return the addresses of the slots that cannot become moving ones."""
        entered = self.entered or []
        return tuple(
            [now for (slot, _), now in zip(entered[: self.fixed], key, strict=False) if slot not in self.small]
        )

    def reset(self) -> None:
        """Forget all keys and graphs, because keys have another form from now on."""
        self.seen.clear()
        self.captured.clear()
        self.last.clear()
        self.moves = {}
        self.homes = Homes()

    def family(self, key: Key) -> list[tuple[Key, list[Captured]]]:
        """Return the graphs, by key, of the keys with which a loop runs the stretch on its own results.

        They differ from `key` only in addresses that the stretch's own graphs lend.
        """
        lent = {address for graphs in self.captured.values() for captured in graphs for address in captured.lent}
        wanted = self._without(key, lent)
        return [(other, graphs) for other, graphs in self.captured.items() if self._without(other, lent) == wanted]

    def _without(self, key: Key, lent: set[int]) -> Key:
        """Return the key without some addresses."""
        fixed = self.fixed
        return (*[0 if place in lent else place for place in key[:fixed]], *key[fixed:])

    def changed_to(self, key: Key, lent: set[int]) -> bool:
        """Whether this key differs from that of an earlier run only in addresses that are lent."""
        fixed = self.fixed
        if lent.isdisjoint(key[:fixed]):
            return False
        for last in self.last.values():
            if len(last) == len(key) and last[fixed:] == key[fixed:]:
                differing = [now for then, now in zip(last[:fixed], key, strict=False) if then != now]
                if lent.issuperset(differing):
                    return True
        return False


def _number_of(buffers: Mapping[int, Buffer]) -> int | None:
    """Return the number of the session that has these buffers; None if they are not those of a session."""
    return buffers.number if isinstance(buffers, Buffers) else None


def _is_younger(frame: Frame, slot: int, first: int) -> bool:
    """Whether the buffer of a slot was made after the one with number `first`, or is not there yet."""
    buffer = frame.buffers.get(frame.bindings[slot])
    return buffer is None or buffer.number > first


class Survey(NamedTuple):
    """What the stretches of a program have in common. A long program has many, so this is found out once.

    Attributes:
        spans: see `_spans`.
        floats: see `_floats`.
        names: the registers of each slot.
    """

    spans: dict[int, int]
    floats: set[int]
    names: dict[int, list[int]]

    @classmethod
    def of(cls, prepared: PreparedProgram) -> Survey:
        """Look at all of a program's steps."""
        names: dict[int, list[int]] = {}
        for name, slot in enumerate(prepared.slot_of):
            names.setdefault(slot, []).append(name)
        return cls(_spans(prepared), _floats(prepared), names)


def split(prepared: PreparedProgram, begin: int, end: int, most: int) -> list[Stretch]:
    """Return the stretches of the hot steps from `begin` to `end` that are worth a capture.

    `most`: maximum number of bytes that a stretch may allocate.
    """
    facts, found = prepared.facts, []
    bounds = [*prepared.begins, len(prepared.steps)]
    if prepared.survey is None:
        prepared.survey = Survey.of(prepared)
    spans, floats, names = prepared.survey
    first, work, nbytes, acts, near, slots = begin, 0, 0, dict[int, None](), dict[int, None](), set[int]()

    def close(last: int) -> None:
        if work < WORTH:
            return
        params = dict.fromkeys([k for i in acts for k in fixed_params(prepared, i)])
        freed = _freed(prepared, range(bounds[first], bounds[last]))
        results = [slot for slot in slots - freed if facts.slot_alloc[slot] is not None]
        found.append(
            Stretch(
                first,
                last,
                tuple([k for k in params if k in floats]),
                tuple([k for k in params if k not in floats]),
                tuple([prepared.draws[i] for i in acts if i in prepared.draws]),
                {slot: (*names.get(slot, ()), ~slot) for slot in sorted(near)},
                {slot: spans[slot] for slot in near if slot not in slots and 0 < spans.get(slot, 0) <= SMALL},
                frozenset([slot for slot in near if slot not in slots and spans.get(slot, 0) > SMALL]),
                work,
                {
                    slot: size
                    for slot in results
                    if (size := facts.slot_alloc[slot] or 0) > COPIED or facts.slot_freed[slot]
                },
                nbytes,
                whole=(first, last) == (0, len(prepared.hot)),
            )
        )

    for k in range(begin, end):
        inside = range(bounds[k], bounds[k + 1])
        active = [s for s in inside if not isinstance(prepared.traces[s], FREE_OF_WORK)]
        own = {prepared.owner[s]: None for s in inside}
        writes = {slot for i in own for slot in prepared.acts[i].writes()}
        blocked = not prepared.uncapturable.isdisjoint(active) or _nbytes(facts, writes) > most
        if blocked or nbytes + _nbytes(facts, writes - slots) > most:
            close(k)
            first, work, nbytes, acts, near, slots = k, 0, 0, {}, {}, set()
        if blocked:
            first = k + 1
            continue
        work += len(active)
        nbytes += _nbytes(facts, writes - slots)
        # a step that frees memory belongs to the act behind it, whose params the stretch does not use
        acts.update({prepared.owner[s]: None for s in active})
        near.update({slot: None for i in own for slot in prepared.acts[i].slots})
        slots |= writes
    close(end)
    return found


def fixed_params(prepared: PreparedProgram, act: int) -> Sequence[int]:
    """Return the run's params of an act that a graph contains. Seeds and offsets are given to each replay."""
    params = prepared.acts[act].params
    pair = prepared.draws.get(act)
    return params if pair is None else [k for k in params if k not in pair]


def _nbytes(facts: ProgramFacts, slots: Iterable[int]) -> int:
    """Return the bytes that the program allocates for some slots."""
    return sum([facts.slot_alloc[slot] or 0 for slot in slots])


def _freed(prepared: PreparedProgram, steps: range) -> set[int]:
    """Return the slots that some steps free."""
    frees = [trace for trace in (prepared.traces[s] for s in steps) if isinstance(trace, Free)]
    return {slot for f in frees for slot in (*f.slots, *[prepared.slot_of[r] for r in f.registers])}


def _spans(prepared: PreparedProgram) -> dict[int, int]:
    """Return the bytes of each slot that the program's views span. Slots that are used without a view are left out."""
    spans: dict[int, int] = {}
    unknown: set[int] = set()
    for act in prepared.acts:
        shown = set()
        for form, slots in act.lines or ((act.form, act.slots),):
            for operand, slot in zip(form.operands, slots, strict=True):
                shown.add(slot)
                if operand.view is not None:
                    spans[slot] = max(spans.get(slot, 0), operand.view.end)
                elif form.opcode not in ("alloc", "free"):
                    unknown.add(slot)
        unknown.update(set(act.slots) - shown)
    return {slot: nbytes for slot, nbytes in spans.items() if slot not in unknown}


def _floats(prepared: PreparedProgram) -> set[int]:
    """Return the run's params of type F64."""
    program = prepared.program
    kinds = [kind for instruction in program.body for kind in program.forms[instruction.form].params]
    return {k for k, kind in enumerate(kinds) if kind is ParamKind.F64}
