"""A program made ready: what it does, as acts, and the flat list of steps that do it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from wooly_wis.dtypes import DType
from wooly_wis.pauses import pause
from wooly_wis.program import Form, Program, Role, View
from wooly_wis.verifier import ProgramFacts

from wooly_executor.runtime.frame import Step
from wooly_executor.runtime.segments import CompiledSteps, Gather, Trace, compile_steps, memory_name, register_name

#: Times that a stretch is run as a whole before its steps are put together across the edges within.
STRETCH_OFTEN = 8
#: Stretches of one program that are put together so, and those whose runs are counted: they change with what is measured.
STRETCHES, STRETCHES_SEEN = 6, 64
#: So often the parts of what is run at once are measured one by one; and of so many spans they are known.
MEASURED_EVERY, SPANS = 8, 64


class Span(NamedTuple):
    """Part of a run, over several edges.

    Attributes:
        hot: whether steps are counted among the hot ones.
        begin: its first step.
        edges: where kernels end within; the last is its end.
    """

    hot: bool
    begin: int
    edges: tuple[int, ...]


class Stretch(NamedTuple):
    """Steps of a span that are run at once.

    Attributes:
        steps: what to do, where hot steps were put together across the edges within.
        begins: per step, the step of the program that it begins with.
        took: what lies between its edges took when it was last run one by one, in ns.
    """

    steps: list[Step]
    begins: list[int]
    took: Sequence[int] = ()

    def parts(self, ns: int, edges: int) -> list[int]:
        """The time of a run as a whole, up to each of so many edges: shared out as it was before."""
        took = self.took if len(self.took) == edges and any(self.took) else (1,) * edges
        whole, so_far, reached = sum(took), 0, 0
        parts = []
        for part in took:
            so_far += part
            parts.append(ns * so_far // whole - reached)
            reached += parts[-1]
        return parts


@dataclass(frozen=True, slots=True)
class Launch:
    """A generated kernel, ready to run.

    Attributes:
        run: runs it on the addresses of its arrays and the params of the run; gives the device time that was not this thread's.
        slots: per array.
        dtypes: per array.
        params: which of the run's params it uses.
    """

    run: Callable[[list[int], Sequence[Any]], int]
    slots: tuple[int, ...]
    dtypes: tuple[DType, ...]
    params: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Act:
    """One thing that a program does: an instruction, or a kernel for several.

    Attributes:
        at: the instruction that it is, or the first of those.
        first_param: where its params begin.
        launch: the kernel, in place of an instruction.
        lines: what the kernel does, as forms on slots.
        dirty: of an `alloc`: the memory need not be zero, as the next to touch it fills it.
    """

    at: int
    form: Form
    slots: tuple[int, ...]
    first_param: int
    launch: Launch | None = None
    lines: tuple[tuple[Form, tuple[int, ...]], ...] = ()
    dirty: bool = False

    @property
    def params(self) -> Sequence[int]:
        """Which of the run's params it uses."""
        if self.launch is not None:
            return self.launch.params
        return range(self.first_param, self.first_param + len(self.form.params))

    def writes(self) -> tuple[int, ...]:
        """The slots that it writes."""
        done = self.lines or ((self.form, self.slots),)
        return tuple([s for f, on in done for o, s in zip(f.operands, on, strict=True) if o.role is not Role.IN])


def acts_of(program: Program) -> list[Act]:
    """A program's instructions."""
    found: list[Act] = []
    first_param = 0
    for i, instruction in enumerate(program.body):
        if not i & 63:
            pause()
        form = program.forms[instruction.form]
        found.append(Act(i, form, instruction.slots, first_param))
        first_param += len(form.params)
    return found


@dataclass(slots=True)
class PreparedProgram:
    """A program as steps.

    Attributes:
        acts: what it does, each one or more steps.
        by_kernel: how many of its computing instructions are done by generated kernels; None: it is no plan's.
        by_library: how many, of a plan, by the library.
        steps: what to do, in order.
        owner: per step, the act that it belongs to.
        where: per step, the position before which runs may be stopped there; rising.
        pieces: per instruction that is split, into how many pieces. Each is a position; an instruction that stays whole is one.
        end: the position at the program's end.
        kept: (slot, register, view, nbytes) of buffers that the program leaves behind, adopted from a register.
        made: (slot, nbytes) of buffers that the program leaves behind and whose memory a step made.
        dropped: slots bound from outside that the program frees.
        writes: per act, the slots that it writes.
        traces: per step, what it does, where that is known.
        slot_of: slot per register.
        runs: how often it was run.
        gathers: once it was run often: steps that fill registers from buffers.
        hot: once it was run often: the other steps, many of them put together.
        begins: per hot step, the step that it begins with.
        edges: positions before which runs are likely to be stopped.
        places: per hot step, the position that it begins with.
        whole: stretches of hot steps, by their ends, that are run as a whole: put together, or how often they were run.
        spans: what took how long between its edges when it was last run one by one.
        stretches: what a GPU knows of the hot steps between two edges.
        restless: steps that no graph can hold: what they do is not the same each time, or not the device's alone.
        words: acts that call the library, on a GPU, and where they say that an operand was out of range.
        status: where its kernels and these acts complain, on a GPU.
        kernel_permille: share of its time that is its kernels', as last measured, on a GPU.
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
    writes: list[tuple[int, ...]] = field(default_factory=list)
    traces: list[Trace | None] = field(default_factory=list)
    slot_of: list[int] = field(default_factory=list)
    runs: int = 0
    gathers: list[Step] = field(default_factory=list)
    hot: list[Step] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    edges: Sequence[int] = ()
    places: list[int] = field(default_factory=list)
    whole: dict[tuple[int, int], Stretch | int] = field(default_factory=dict)
    spans: dict[Span, Stretch] = field(default_factory=dict)
    stretches: dict[tuple[int, int], Any] = field(default_factory=dict)
    restless: set[int] = field(default_factory=set)
    words: list[tuple[int, Any]] = field(default_factory=list)
    status: Any = None
    kernel_permille: int = 0

    def heat(self, *, always: bool = False) -> None:
        """Put steps together where that is worth it. `always`: tell those that fill registers from the others in any case."""
        stops = {bisect_left(self.where, edge) for edge in self.edges}
        found = compile_steps(self.traces, self.steps, self._needed(), stops)
        if found is None and always:
            filling = [isinstance(trace, Gather) for trace in self.traces]
            others = [k for k, fills in enumerate(filling) if not fills]
            gathers = [step for step, fills in zip(self.steps, filling, strict=True) if fills]
            found = CompiledSteps(gathers, [self.steps[k] for k in others], others)
        if found is not None:
            self.gathers, self.hot, self.begins = found
            self.places = [self.where[step] for step in self.begins]

    def _needed(self) -> Callable[[str, int], bool]:
        """Whether a name is wanted from a step on."""
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
        """The hot steps of a span, which end before `end`, as fewer ones; None before it was asked often.

        An edge costs a call of the library's interpreter, and those are a fifth of a program of small operators. Who runs on
        over an edge anyway need not pay for it.
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
        made = compile_steps(self.traces, self.steps, self._needed(), within=range(first, last))
        fewer = made is not None and len(made.hot) < end - begin
        measured = self.spans.get(span)
        took = measured.took if measured is not None else ()
        known = Stretch(made.hot, made.begins, took) if made is not None and fewer else Stretch([], [])
        self.whole[begin, end] = known
        return known if known.steps else None

    def known(self, span: Span) -> Stretch | None:
        """How long the parts of a span take; None where it is to be measured (again)."""
        return self.spans.get(span) if self.runs % MEASURED_EVERY else None

    def took(self, span: Span, times: Sequence[int]) -> None:
        """A span was run edge by edge."""
        if len(self.spans) >= SPANS:  # they change with what is measured
            self.spans.clear()
        self.spans[span] = Stretch([], [], times)
