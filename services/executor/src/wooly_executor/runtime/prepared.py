"""A prepared program: what it does, as acts, and the flat list of steps that do it."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from wooly_wis.program import Program, View
from wooly_wis.verifier import ProgramFacts

from wooly_executor.runtime.acts import Act
from wooly_executor.runtime.combining import CompiledSteps, combine, gathered
from wooly_executor.runtime.core_use import CoreUse
from wooly_executor.runtime.families import Family, way_of
from wooly_executor.runtime.frame import Step
from wooly_executor.runtime.segments import Gather, Place, Trace, memory_name, register_name
from wooly_executor.runtime.torch_private import interpret_plainly

#: Number of runs of a stretch across its edges before the stretch is compiled into fewer steps.
STRETCH_OFTEN = 8
#: Maximum number of steps of a program that are remembered because they failed. Each costs all its sessions 4 us per run.
MOST_FAILED = 4
#: Maximum number of such compiled stretches per program, and of stretches whose runs are counted. Both change with the measured
#: times.
STRETCHES, STRETCHES_SEEN = 6, 64
#: One in this many runs measures the parts of a span one by one. SPANS is the maximum number of spans with known times.
MEASURED_EVERY, SPANS = 8, 64


#: A part is bound by the host if the device took at most this many percent of the host's time to enqueue it, plus so many ns.
HOST_BOUND_PERCENT, HOST_BOUND_NS = 120, 10_000


class DeviceTimes(NamedTuple):
    """What a GPU took for the parts of a span.

    Attributes:
        ns: the time of each part, in ns.
        enqueued: when the host began to enqueue each part, and when it had enqueued the last one, in ns.
    """

    ns: list[int]
    enqueued: Sequence[int]

    def host_bound(self) -> list[bool]:
        """Whether the device waited for the host meanwhile, for each part. Then the part's own time is shorter."""
        host = zip(self.ns, pairwise(self.enqueued), strict=True)
        return [ns <= (end - begin) * HOST_BOUND_PERCENT // 100 + HOST_BOUND_NS for ns, (begin, end) in host]


class Span(NamedTuple):
    """Part of a run that contains several edges.

    Attributes:
        hot: whether the steps are hot ones.
        begin: index of the first step.
        edges: the edges within; the last one is the end.
    """

    hot: bool
    begin: int
    edges: tuple[int, ...]


class Stretch(NamedTuple):
    """Steps of a span that run without a stop.

    Attributes:
        steps: the steps; hot steps are combined across the edges.
        begins: for each of these steps, the index of its first step in the program.
        took: the times between the edges, in ns, when they were last measured one by one.
    """

    steps: list[Step]
    begins: list[int]
    took: Sequence[int] = ()

    def parts(self, ns: int, edges: int) -> list[int]:
        """Divide the time of a whole run among its edges, in proportion to the last measured times."""
        took = self.took if len(self.took) == edges and any(self.took) else (1,) * edges
        whole, so_far, reached = sum(took), 0, 0
        parts = []
        for part in took:
            so_far += part
            parts.append(ns * so_far // whole - reached)
            reached += parts[-1]
        return parts


class Combination(NamedTuple):
    """Steps that are to be combined, in two parts, because the first one takes milliseconds.

    Attributes:
        make: compiles the combined steps. Any thread may call it, with pauses (`wooly_wis.pauses`).
        take: uses what `make` returned. Only the thread that runs programs calls it.
    """

    make: Callable[[], CompiledSteps | None]
    take: Callable[[CompiledSteps | None], None]


@dataclass(slots=True)
class PreparedProgram:
    """A program as steps.

    Attributes:
        acts: what the program does. Each act is one or more steps.
        by_kernel: number of computing instructions that generated kernels do; None: the program runs without a plan.
        by_library: number of computing instructions of a plan that the library does.
        steps: the steps, in order.
        owner: for each step, the act that it belongs to.
        where: for each step, the position before which a run may stop; ascending.
        pieces: for each instruction that is split, the number of its pieces. A position is a piece, or an instruction that is not
            split.
        end: the position at the program's end.
        kept: (slot, register, view, nbytes) of buffers that the program leaves behind and that are adopted from a register.
        made: (slot, nbytes) of buffers that the program leaves behind and whose memory a step allocated.
        dropped: slots of existing buffers that the program frees.
        traces: for each step, a description for `segments`; None: it has none.
        slot_of: the slot of each register.
        runs: number of runs.
        completed: whether one of them ended without a failure, so that all steps have been checked.
        failed: steps that failed in a run, on a CPU. They are not combined with earlier steps.
        gathers: of a hot program: steps that fill registers from buffers.
        hot: of a hot program: the other steps, many of them combined.
        begins: for each hot step, the index of its first step.
        edges: positions before which runs are likely to stop.
        places: for each hot step, its first position.
        whole: compiled stretches of hot steps by begin and end, or the number of their runs.
        spans: the last measured times of spans.
        stretches: state of `graphs` per pair of edges, on a GPU.
        survey: what `stretches` knows of its slots and params, on a GPU; None: nothing yet.
        device_times: device time of each part of a span as last measured, on a GPU (see `flights`).
        uncapturable: steps that a graph cannot contain, because they change from run to run or need the host.
        history: recent values of params, for `graphs`, on a GPU.
        foreign: whether it launches foreign kernels.
        draws: acts that draw random numbers in a way that a graph can contain, with their params for seed and offset.
        words: acts that call the library on a GPU, with the status words for operands that are out of range.
        status: the status words of kernels and of these acts, on a GPU.
        kernel_permille: last measured share of kernels in the device time, in 1/1000, on a GPU.
        core_use: the cores that it occupies, on a GPU.
        family: the programs that differ from it in sizes only; None: it shares nothing.
        sizes: its sizes, for `family`.
        settled: whether its edges stay as they are.
        asked: whether its steps are combined, or will be.
        tried: `Family.learned` when it was last tried to combine its steps; -1: never.
        defers: whether steps are combined later, by who takes them from `later`; otherwise at once.
        later: steps that are to be combined.
    """

    program: Program
    facts: ProgramFacts
    acts: list[Act]
    by_kernel: int | None = None
    by_library: int = 0
    steps: list[Step] = field(default_factory=list)
    owner: list[int] = field(default_factory=list)
    where: list[int] = field(default_factory=list)
    pieces: Mapping[int, int] = field(default_factory=dict)
    end: int = 0
    n_registers: int = 0
    kept: list[tuple[int, int, View, int]] = field(default_factory=list)
    made: list[tuple[int, int]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    traces: list[Trace | None] = field(default_factory=list)
    slot_of: list[int] = field(default_factory=list)
    runs: int = 0
    completed: bool = False
    failed: set[int] = field(default_factory=set)
    gathers: list[Step] = field(default_factory=list)
    hot: list[Step] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    edges: Sequence[int] = ()
    places: list[int] = field(default_factory=list)
    whole: dict[tuple[int, int], Stretch | int] = field(default_factory=dict)
    spans: dict[Span, Stretch] = field(default_factory=dict)
    stretches: dict[tuple[int, int], Any] = field(default_factory=dict)
    survey: Any = None
    device_times: dict[Span, DeviceTimes] = field(default_factory=dict)
    uncapturable: set[int] = field(default_factory=set)
    history: Any = None
    foreign: bool = False
    draws: dict[int, tuple[int, int]] = field(default_factory=dict)
    words: list[tuple[int, Any]] = field(default_factory=list)
    status: Any = None
    kernel_permille: int = 0
    core_use: CoreUse = field(default_factory=CoreUse)
    family: Family | None = None
    sizes: Mapping[Place, Any] = field(default_factory=dict)
    settled: bool = False
    asked: bool = False
    tried: int = -1
    defers: bool = False
    later: list[Combination] = field(default_factory=list)

    def heat(self, *, graphs: bool = False, early: bool = False) -> None:
        """Combine steps into segments if this saves enough.

        Args:
            graphs: the steps will be captured as graphs. The steps that fill registers, and the steps that graphs cannot contain,
                become separate ones.
            early: the program has hardly run. Its steps are combined if the family has shown how, or learns it.
        """
        stops = sorted({bisect_left(self.where, edge) for edge in self.edges} | self.failed)
        alone = self.uncapturable if graphs else ()
        self.tried = self.family.learned if self.family is not None else 0
        self.asked = self._do(self._use_hot, stops, None, alone, graphs=graphs, early=early)

    def note_failed(self, step: int) -> None:
        """Note that a step has failed. If it fails again, what earlier steps have computed is there: a segment loses values that
        cannot be computed again (`failed_segments`). A loop may go on after each failure.
        """
        known = step in self.failed
        if (known and (not self.hot or step in self.begins)) or (not known and len(self.failed) >= MOST_FAILED):
            return
        self.failed.add(step)
        if self.hot:
            self.gathers, self.hot, self.begins, self.places = [], [], [], []
            self.whole.clear()
            self.spans.clear()
            self.heat()

    def _do(
        self,
        take: Callable[[CompiledSteps | None], None],
        stops: Sequence[int],
        within: range | None,
        alone: Collection[int] = (),
        *,
        graphs: bool = False,
        early: bool = False,
    ) -> bool:
        """Combine steps and give them to `take`: now if the family has shown how, else when `defers` says.

        Returns:
            Whether this is done or will be; else it is too early (`Family.learns`).
        """
        family = self.family
        if family is not None:
            way = way_of(self.traces, stops, within)
            known, combined, _ = family.known(way, self.sizes)
            if known:
                take(combined.steps(self.traces, self.steps, self.sizes) if combined is not None else None)
                return True
            if not family.learns(way, early=early):
                return False
        make = functools.partial(self._combined, stops, within, alone, graphs=graphs)
        if self.defers:
            self.later.append(Combination(make, take))
        else:
            take(make())
        return True

    def _combined(
        self, stops: Sequence[int], within: range | None, alone: Collection[int], *, graphs: bool
    ) -> CompiledSteps | None:
        """Combine steps, in any thread, and let the family know how."""
        family, way = self.family, way_of(self.traces, stops, within)
        known, combined, opened = False, None, frozenset[Place]()
        if family is not None:
            known, combined, opened = family.known(way, self.sizes)
        if not known:
            kept = False
            try:
                combined = combine(self.traces, self._needed(), stops, within, alone, on_gpu=graphs, opened=opened)
                # a run may have found out more about the layouts of results meanwhile
                kept = way == way_of(self.traces, stops, within)
            finally:
                if family is not None and kept:
                    family.keep(way, self.sizes, combined)
                elif family is not None:
                    family.gave_up(way)
        if combined is not None:
            return combined.steps(self.traces, self.steps, self.sizes)
        if not graphs:
            return None
        others = [k for k, trace in enumerate(self.traces) if not isinstance(trace, Gather)]
        gathers = [(t, step) for t, step in zip(self.traces, self.steps, strict=True) if isinstance(t, Gather)]
        return CompiledSteps(gathered(gathers), [self.steps[k] for k in others], others)

    def _use_hot(self, found: CompiledSteps | None) -> None:
        interpret_plainly()
        if found is not None:
            self.gathers, self.hot, self.begins = found
            self.places = [self.where[step] for step in self.begins]

    def _needed(self) -> Callable[[str, int], bool]:
        """Return a function that tells whether a name is used from a step on."""
        owner = [*self.owner, len(self.acts)]
        last_use: dict[int, int] = {}
        for i, act in enumerate(self.acts):
            if act.form.opcode != "free":
                last_use.update(dict.fromkeys(act.slots, i))
        forever = {register_name(r) for _, r, _, _ in self.kept} | {memory_name(s) for s, _ in self.made}

        def needed_after(name: str, step: int) -> bool:
            slot = self.slot_of[int(name[1:])] if name[0] == "r" else int(name[1:])
            return name in forever or last_use.get(slot, -1) >= owner[step]

        return needed_after

    def stretch(self, span: Span, end: int) -> Stretch | None:
        """Return the hot steps of a span, up to step `end`, as fewer steps; None before the span has run often enough.

        An edge costs a call of the library's interpreter, about a fifth of the time of a program of small operators. A run that
        continues across an edge can avoid this cost.
        """
        begin = span.begin
        found = self.whole.get((begin, end), 0)
        if isinstance(found, Stretch):
            return found if found.steps else None
        if end - begin < 2 or (not found and len(self.whole) >= STRETCHES_SEEN):
            return None
        found += 1
        self.whole[begin, end] = found
        if found < STRETCH_OFTEN or sum([isinstance(known, Stretch) for known in self.whole.values()]) >= STRETCHES:
            return None
        first = self.begins[begin]
        last = self.begins[end] if end < len(self.hot) else len(self.steps)
        hot = self.hot

        def take(made: CompiledSteps | None) -> None:
            interpret_plainly()
            if made is not None and len(made.hot) < end - begin and self.hot is hot:
                measured = self.spans.get(span)
                took = measured.took if measured is not None else ()
                self.whole[begin, end] = Stretch(made.hot, made.begins, took)

        self.whole[begin, end] = Stretch([], [])
        stops = sorted(self.failed)
        if not self._do(take, stops, range(first, last), early=found < 2 * STRETCH_OFTEN):
            self.whole[begin, end] = found
        known = self.whole[begin, end]
        return known if isinstance(known, Stretch) and known.steps else None

    def known(self, span: Span) -> Stretch | None:
        """Return the known times of a span; None if they must be measured (again)."""
        return self.spans.get(span) if self.runs % MEASURED_EVERY else None

    def took(self, span: Span, times: Sequence[int]) -> None:
        """Store the times of a span that ran edge by edge."""
        if len(self.spans) >= SPANS:  # spans change with the measured times
            self.spans.clear()
        self.spans[span] = Stretch([], [], times)
