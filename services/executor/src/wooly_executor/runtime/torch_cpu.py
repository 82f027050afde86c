"""The CPU runtime: torch is its library, on torch's own memory. Tier 0: instruction by instruction, prepared once per program.

A prepared program is a flat list of steps over registers. Operators' results are adopted as buffers without a copy; a buffer that
is allocated and freed inside the program never becomes one.
"""

from __future__ import annotations

import functools
import os
import platform
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from torch import Tensor
from wooly_wis.dtypes import DType
from wooly_wis.foreign import OPCODE, launch_of
from wooly_wis.program import Form, OperandRef, ParamRef, Program, Role, View
from wooly_wis.verifier import ProgramFacts

from wooly_executor.errors import OperationError, PoisonedError
from wooly_executor.runtime.buffers import TORCH_DTYPE, WIS_DTYPE, Buffer, as_view, zeroed
from wooly_executor.runtime.calls import (
    Gradients,
    LibraryCall,
    asks_grad_mode,
    constant_tree,
    differentiate,
    filler,
    fresh_results,
    function_of,
    gradients_of,
    library_call,
    made_anew,
    mix,
    readings,
    refers,
    returns_one_tensor,
    typed_params,
)
from wooly_executor.runtime.fast_bindings import FAST
from wooly_executor.runtime.foreign import Foreign, arguments_of
from wooly_executor.runtime.protocol import Execution, Outcome, Rates
from wooly_executor.runtime.segments import (
    Free,
    Gather,
    Invoke,
    Make,
    Review,
    SegmentError,
    Trace,
    Write,
    compile_steps,
    memory_name,
    register_name,
)

#: Runs after which a program's steps are put together: most programs are run once or twice.
HOT = 16


class _Frame:
    """The state of one run."""

    __slots__ = ("bases", "bindings", "buffers", "elsewhere_ns", "kernel_ns", "outcome", "params", "registers")

    def __init__(
        self, buffers: dict[int, Buffer], bindings: Sequence[int], params: Sequence[Any], n_registers: int
    ) -> None:
        self.buffers = buffers
        self.bindings = bindings
        self.params = params
        self.registers: list[Any] = [None] * n_registers
        self.bases: list[Any] = [None] * len(bindings)
        self.outcome = Outcome()
        #: Device time of generated kernels; and what of it was not this thread's.
        self.kernel_ns = 0
        self.elsewhere_ns = 0


Step = Callable[[_Frame], None]
_COPY = torch.ops.aten.copy_.default
_FILL = torch.ops.aten.fill_.Scalar


@dataclass(frozen=True, slots=True)
class Launch:
    """A generated kernel, ready to run.

    Attributes:
        run: runs it on the addresses of its arrays and the params of the run; gives the device time that was not this thread's.
        slots: per array.
        dtypes: per array.
    """

    run: Callable[[list[int], Sequence[Any]], int]
    slots: tuple[int, ...]
    dtypes: tuple[DType, ...]


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

    def writes(self) -> tuple[int, ...]:
        """The slots that it writes."""
        done = self.lines or ((self.form, self.slots),)
        return tuple([s for f, on in done for o, s in zip(f.operands, on, strict=True) if o.role is not Role.IN])


def acts_of(program: Program) -> list[Act]:
    """A program's instructions."""
    found: list[Act] = []
    first_param = 0
    for i, instruction in enumerate(program.body):
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
        where: per step, the instruction before which runs may be stopped there; rising.
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
        edges: instructions before which runs are likely to be stopped.
        places: per hot step, the instruction that it begins with.
    """

    program: Program
    facts: ProgramFacts
    acts: list[Act]
    by_kernel: int | None = None
    by_library: int = 0
    steps: list[Step] = field(default_factory=list)
    owner: list[int] = field(default_factory=list)
    where: list[int] = field(default_factory=list)
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

    def heat(self) -> None:
        """Put steps together where that is worth it."""
        owner = [*self.owner, len(self.acts)]
        last_use: dict[int, int] = {}
        for i, act in enumerate(self.acts):
            if act.form.opcode != "free":
                last_use.update(dict.fromkeys(act.slots, i))
        forever = {register_name(r) for _, r, _, _ in self.kept} | {memory_name(s) for s, _ in self.made}

        def needed_after(name: str, step: int) -> bool:
            slot = self.slot_of[int(name[1:])] if name[0] == "r" else int(name[1:])
            return name in forever or last_use.get(slot, -1) >= owner[step]

        stops = {bisect_left(self.where, edge) for edge in self.edges}
        found = compile_steps(self.traces, self.steps, needed_after, stops)
        if found is not None:
            self.gathers, self.hot, self.begins = found
            self.places = [self.where[step] for step in self.begins]


class TorchCpuRuntime:
    """Executes WIS with torch on the CPU.

    Args:
        hot: runs after which a program's steps are put together.
    """

    def __init__(self, hot: int = HOT) -> None:
        self._hot = hot
        self.beyond_ns = 0
        self.foreign = Foreign()

    def facts(self) -> dict[str, Any]:
        """What `torch.cuda.get_device_properties` is answered from."""
        return {
            "name": _cpu_name(),
            "vendor": "cpu",
            "arch": platform.machine(),
            "runtime": "torch-cpu",
            "total_memory": psutil.virtual_memory().total,
            "cores": torch.get_num_threads(),
            "torch_version": torch.__version__.split("+")[0],
        }

    def allocate(self, nbytes: int) -> Buffer:
        """Zeroed memory."""
        return Buffer(nbytes, zeroed(nbytes))

    def prepare(self, program: Program, facts: ProgramFacts) -> PreparedProgram:
        """Lay out the steps of a verified program.

        Raises:
            OperationError: an operator is not available here.
        """
        return prepare_acts(program, facts, acts_of(program), self.foreign)

    def rates(self) -> Rates:
        """How fast torch is here, for what it is given to expect: see `Rates`."""
        return _rates(torch.get_num_threads())

    def begin(
        self, prepared: PreparedProgram, buffers: dict[int, Buffer], bindings: Sequence[int], params: Sequence[Any]
    ) -> Execution:
        """See `Runtime.begin`."""
        prepared.runs += 1
        if prepared.runs == self._hot:
            prepared.heat()
        return StepExecution(prepared, buffers, bindings, params)

    def run(self, prepared: Any, buffers: dict[int, Buffer], bindings: Sequence[int], params: Sequence[Any]) -> Outcome:
        """All of a run at once."""
        execution = self.begin(prepared, buffers, bindings, params)
        execution.advance((len(prepared.program.body),))
        return execution.outcome


class StepExecution:
    """A run of a prepared program. Its clock is the CPU time of the thread that computes."""

    __slots__ = ("_at", "_frame", "_places", "_prepared", "_steps", "ended", "outcome")

    def __init__(
        self, prepared: PreparedProgram, buffers: dict[int, Buffer], bindings: Sequence[int], params: Sequence[Any]
    ) -> None:
        self._prepared = prepared
        self._frame = _Frame(buffers, bindings, params, prepared.n_registers)
        self._steps, self._places = prepared.steps, prepared.where
        self._at = 0
        self.ended = False
        if prepared.hot:
            try:
                for step in prepared.gathers:
                    step(self._frame)
                self._steps, self._places = prepared.hot, prepared.places
            except PoisonedError:  # the steps one by one say which instruction it was that could not have its operand
                self._frame = _Frame(buffers, bindings, params, prepared.n_registers)
        self.outcome = self._frame.outcome

    def advance(self, edges: Sequence[int]) -> list[int]:
        """See `Execution.advance`."""
        times = []
        frame = self._frame
        last = time.thread_time_ns()
        for edge in edges:
            if not self.ended:
                self._go(edge)
            now = time.thread_time_ns()
            times.append(now - last + frame.elsewhere_ns)
            last, frame.elsewhere_ns = now, 0
        return times

    @property
    def kernel_ns(self) -> int:
        """Device time of generated kernels so far."""
        return self._frame.kernel_ns

    def _go(self, edge: int) -> None:
        prepared, frame, begin = self._prepared, self._frame, self._at
        whole = edge >= len(prepared.program.body)
        steps = self._steps
        if begin or not whole:
            steps = steps[begin : None if whole else bisect_left(self._places, edge, begin)]
        i = begin - 1
        try:
            for i, step in enumerate(steps, begin):  # noqa: B007 - the failing step's index is used below
                step(frame)
        except SegmentError as e:
            first = prepared.begins[i]
            self._fail(prepared, frame, first, first if e.at is None else e.at, e)
        except Exception as e:
            at = prepared.begins[i] if self._steps is prepared.hot else i
            self._fail(prepared, frame, at, at, e)
        else:
            self._at = begin + len(steps)
            if not whole:
                return
            buffers, bindings, registers, bases = frame.buffers, frame.bindings, frame.registers, frame.bases
            for slot, register, view, nbytes in prepared.kept:
                buffers[bindings[slot]] = Buffer(nbytes, registers[register], view)
            for slot, nbytes in prepared.made:
                buffers[bindings[slot]] = Buffer(nbytes, bases[slot])
        for slot in prepared.dropped:
            frame.buffers.pop(frame.bindings[slot], None)
        self.ended = True

    def _fail(self, prepared: PreparedProgram, frame: _Frame, first: int, step: int, cause: Exception) -> None:
        """Report the failure of a step and poison what the program should have written from the step `first` on."""
        outcome, buffers, bindings = frame.outcome, frame.buffers, frame.bindings
        outcome.failed_at = prepared.acts[prepared.owner[step]].at if step >= 0 else 0
        at = prepared.owner[first] if first >= 0 else 0
        if isinstance(cause, (PoisonedError, RuntimeError, OperationError, SegmentError)):
            outcome.error = str(cause)
        else:
            outcome.error = f"{type(cause).__name__}: {cause}"
        lost = {slot for writes in prepared.writes[at:] for slot in writes}
        for slot in lost:
            buffer = buffers.get(bindings[slot])
            if buffer is not None and prepared.facts.slot_alloc[slot] is None:
                buffer.base, buffer.view, buffer.poison = None, None, outcome.error
        for slot, register, view, nbytes in prepared.kept:
            base = frame.registers[register] if slot not in lost else None
            poison = "" if base is not None else outcome.error
            buffers[bindings[slot]] = Buffer(nbytes, base, view if base is not None else None, poison)
        for slot, nbytes in prepared.made:
            base = frame.bases[slot] if slot not in lost else None
            buffers[bindings[slot]] = Buffer(nbytes, base, None, "" if base is not None else outcome.error)


@functools.cache
def _rates(threads: int) -> Rates:
    """Measured with three operators whose time is memory's, arithmetic's, and their own."""

    def least(call: Callable[[], Any], times: int) -> int:
        found = []
        for _ in range(4):
            begun = time.thread_time_ns()
            for _ in range(times):
                call()
            found.append((time.thread_time_ns() - begun) // times)
        return max(min(found), 1)

    large, square, small = torch.ones(1 << 20), torch.ones(256, 256), torch.ones(4)
    out = torch.empty_like(large)
    moved = least(lambda: torch.add(large, large, out=out), 2)
    computed = least(lambda: torch.mm(square, square), 2)
    return Rates(
        bytes_per_us=max(2 * large.nbytes * 1000 // moved, 1),
        flops_per_us=max(2 * 256**3 * 1000 // computed, 1),
        launch_ns=least(lambda: torch.add(small, small), 100),
    )


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            for line in f:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        return platform.processor() or "CPU"
    return platform.processor() or f"CPU ({os.cpu_count()} cores)"


def prepare_acts(program: Program, facts: ProgramFacts, acts: list[Act], foreign: Foreign) -> PreparedProgram:
    """The steps of what a program does.

    Args:
        program: verified.
        facts: what its verifier found.
        acts: its instructions, or a plan's steps.
        foreign: has its kernels in other languages.

    Raises:
        OperationError: an operator is not available here.
    """
    return _Preparation(program, facts, acts, foreign).finish()


class _Preparation:
    """Builds the steps of one program."""

    def __init__(self, program: Program, facts: ProgramFacts, acts: list[Act], foreign: Foreign) -> None:
        self._foreign = foreign
        self.out = PreparedProgram(program, facts, acts)
        self._register_of: dict[tuple[int, View], int] = {}
        self._registers_of: dict[int, list[int]] = {}
        self._adopted: dict[int, tuple[int, View]] = {}
        self._based: dict[int, torch.dtype] = {}
        self._first_param = 0
        #: Per act whose `out=` nobody has seen yet: that operand, and the call that makes it.
        self._anew: dict[int, tuple[int, LibraryCall]] = {}

    def finish(self) -> PreparedProgram:
        out, facts = self.out, self.out.facts
        self._first_use = self._first_uses()
        freed: list[int] = []
        place, places = 0, []
        for i, act in enumerate(out.acts):
            if act.form.opcode == "free":
                freed.append(act.slots[0])
            else:
                if freed:  # one step for several in a row: most operators are followed by some
                    self._free(freed)
                    freed = []
                self._first_param = act.first_param
                if act.launch is not None:
                    self._launch(act, act.launch)
                else:
                    self._instruction(i, act)
            out.owner += [i] * (len(out.steps) - len(out.owner))
            out.writes.append(act.writes())
            place = max(place, act.at)
            places.append(place)
        self._free(freed)
        out.owner += [len(out.acts) - 1] * (len(out.steps) - len(out.owner))
        out.where = [places[k] for k in out.owner]
        for slot, nbytes in enumerate(facts.slot_alloc):
            if nbytes is None:
                if facts.slot_freed[slot]:
                    out.dropped.append(slot)
            elif not facts.slot_freed[slot]:
                adopted = self._adopted.get(slot)
                if adopted is not None:
                    out.kept.append((slot, *adopted, nbytes))
                elif slot in self._based:
                    out.made.append((slot, nbytes))
        return out

    def _first_uses(self) -> dict[int, tuple[int, int]]:
        """For every slot that the program allocates: act and operand of its first use after the alloc."""
        first: dict[int, tuple[int, int]] = {}
        for i, act in enumerate(self.out.acts):
            if act.form.opcode == "alloc":
                continue
            for k, slot in enumerate(act.slots):
                first.setdefault(slot, (i, k))
        return first

    # -- operands ----------------------------------------------------------------------------------------------------

    def _new_register(self, slot: int) -> int:
        self.out.n_registers += 1
        self.out.slot_of.append(slot)
        return self.out.n_registers - 1

    def _step(self, step: Step, trace: Trace | None = None) -> None:
        self.out.steps.append(step)
        self.out.traces.append(trace)

    def _name(self, slot: int, view: View) -> int:
        """A new register for this view."""
        register = self._register_of[slot, view] = self._new_register(slot)
        self._registers_of.setdefault(slot, []).append(register)
        return register

    def _operand(self, slot: int, view: View) -> int:
        """The register that holds this view, with a step that fills it if it is the first to ask."""
        known = self._register_of.get((slot, view))
        if known is not None:
            return known
        register = self._name(slot, view)
        adopted = self._adopted.get(slot)
        if adopted is not None:
            source = adopted[0]

            def from_register(f: _Frame) -> None:
                f.registers[register] = as_view(f.registers[source], view)

            self._step(from_register, _review(register, register_name(source), view, adopted[1].dtype))
        elif slot in self._based:

            def from_base(f: _Frame) -> None:
                f.registers[register] = as_view(f.bases[slot], view)

            self._step(from_base, _review(register, memory_name(slot), view, WIS_DTYPE[self._based[slot]]))
        else:

            def from_buffer(f: _Frame) -> None:
                buffer = f.buffers[f.bindings[slot]]
                base = buffer.base
                if base is None:
                    raise PoisonedError(buffer.poison)
                if buffer.view is not view:
                    if buffer.view != view:
                        base = as_view(base, view)
                    if not view.offset:  # most buffers are only ever seen in one way
                        buffer.base, buffer.view = base, view
                f.registers[register] = base

            self._step(from_buffer, Gather(register))
        return register

    def _make_base(self, slot: int, nbytes: int, dtype: torch.dtype, dirty: bool) -> None:
        self._based[slot] = dtype
        if dirty:
            numel = -(-nbytes // dtype.itemsize)

            def take(f: _Frame) -> None:
                f.bases[slot] = torch.empty(numel, dtype=dtype)

            self._step(take)
            return

        def make(f: _Frame) -> None:
            f.bases[slot] = zeroed(nbytes, dtype)

        self._step(make, Make(slot, nbytes, dtype))

    # -- instructions ------------------------------------------------------------------------------------------------

    def _launch(self, act: Act, launch: Launch) -> None:
        """A generated kernel on the memory of its slots."""
        views = {s: o.view for f, on in act.lines for o, s in zip(f.operands, on, strict=True)}
        registers: list[tuple[bool, int]] = []
        for slot in launch.slots:
            adopted = self._adopted.get(slot)
            if adopted is not None:
                registers.append((True, adopted[0]))
            elif slot in self._based:
                registers.append((False, slot))
            else:
                registers.append((True, self._operand(slot, _known(views.get(slot)))))
        kernel, clock = launch.run, time.thread_time_ns

        def run(f: _Frame) -> None:
            begun, r, b = clock(), f.registers, f.bases
            at = [(r if known else b)[k].untyped_storage().data_ptr() for known, k in registers]
            elsewhere = kernel(at, f.params)
            f.elsewhere_ns += elsewhere
            f.kernel_ns += clock() - begun + elsewhere

        self._step(run)

    def _instruction(self, i: int, act: Act) -> None:
        form, slots = act.form, act.slots
        if form.opcode == "alloc":
            self._alloc(slots[0], act.dirty)
        elif form.opcode == "copy":
            src, dst = [self._operand(s, _known(o.view)) for s, o in zip(slots, form.operands, strict=True)]

            def copy(f: _Frame) -> None:
                f.registers[dst].copy_(f.registers[src])

            self._step(copy, Write(_COPY, (dst, src)))
        elif form.opcode == "fill":
            to = self._operand(slots[0], _known(form.operands[0].view))
            number = form.attr("value")
            value = filler(number, {}, self._first_param, {})

            def fill(f: _Frame) -> None:
                f.registers[to].fill_(value(f.registers, list(f.params)))

            self._step(fill, None if refers(number) else Write(_FILL, (to,), (number,)))
        elif form.opcode == OPCODE:
            self._foreign_launch(form, slots)
        else:
            self._compute(form, slots, self._anew.get(i))

    def _foreign_launch(self, form: Form, slots: tuple[int, ...]) -> None:
        """A kernel in another language, on the memory that its operands show."""
        registers = [self._operand(s, _known(o.view)) for s, o in zip(slots, form.operands, strict=True)]
        kernel, arguments = self._foreign.known(form), arguments_of(form)
        writable = [o.role is not Role.IN for o in form.operands]
        first, last = self._first_param, self._first_param + len(form.params)
        entry, kinds = launch_of(form).entry, [a if isinstance(a, int) else None for a in launch_of(form).args]
        allowed = [k is not None and writable[k] for k in kinds]

        def run(f: _Frame) -> None:
            r = f.registers
            values, grid = arguments([(r[k].data_ptr(), r[k].nbytes) for k in registers], f.params[first:last])
            taken = kernel.run(entry, allowed, values, grid)
            f.elsewhere_ns += taken

        self._step(run)

    def _alloc(self, slot: int, dirty: bool) -> None:
        facts, acts = self.out.facts, self.out.acts
        nbytes = facts.slot_alloc[slot]
        assert nbytes is not None
        first = self._first_use.get(slot)
        dtype = torch.uint8
        launch = acts[first[0]].launch if first is not None else None
        if first is not None and launch is not None:
            made_of = launch.dtypes[launch.slots.index(slot)] if slot in launch.slots else DType.U8
            if nbytes % made_of.itemsize == 0:
                dtype = TORCH_DTYPE[made_of]
        elif first is not None:
            form = acts[first[0]].form
            operand = form.operands[first[1]]
            view = operand.view
            if view is not None:
                whole = view.offset == 0 and view.end == nbytes
                if form.opcode not in ("copy", "fill") and operand.role is Role.OUT and whole:
                    return  # the operator's result will be the buffer
                anew = made_anew(form)
                if anew is not None and anew[0] == first[1] and whole:
                    self._anew[first[0]] = anew
                    return
                if nbytes % view.dtype.itemsize == 0:
                    dtype = TORCH_DTYPE[view.dtype]
        self._make_base(slot, nbytes, dtype, dirty)

    def _free(self, slots: Sequence[int]) -> None:
        registers = [r for slot in slots for r in self._registers_of.pop(slot, ())]
        based = [slot for slot in slots if slot in self._based]
        if not registers and not based:
            return

        def free(f: _Frame) -> None:
            held = f.registers
            for r in registers:
                held[r] = None
            for slot in based:
                f.bases[slot] = None

        self._step(free, Free(tuple(registers), tuple(based)))

    def _compute(self, form: Form, slots: tuple[int, ...], anew: tuple[int, LibraryCall] | None) -> None:
        out, library = anew or (None, library_call(form))
        registers: dict[int, int] = {}
        results: list[int] = []
        for k, operand in enumerate(form.operands):
            if operand.role is Role.OUT or k == out:
                results.append(k)
            else:
                registers[k] = self._operand(slots[k], _known(operand.view))
        for k, view in readings(form):
            registers[k] = self._read(view, registers[k], slots[k])
        gradients = gradients_of(form)
        operands = list(registers.values())
        if gradients is not None:  # a register of its own for each operand, even where two are the same tensor
            registers = {k: self._new_register(slots[k]) for k in registers}
        call = _call(form, library, registers, self._first_param)
        invoke = self._traced(form, library, registers) if gradients is None else None
        if any(a.is_out for a in library.op._schema.arguments):
            written = [(r, form.operands[k]) for k, r in registers.items() if form.operands[k].role is Role.INOUT]
            call = _keeping_sizes(call, [(r, _known(o.view).sizes) for r, o in written])
        rng = form.attr("rng")
        if isinstance(rng, tuple):
            call = _seeded(call, [self._first_param + r.index for r in rng if isinstance(r, ParamRef)])
        if gradients is not None:
            outs = [(slots[k], _known(form.operands[k].view)) for k in results]
            self._results(_differentiated(call, operands, list(registers.values()), gradients), outs, single=False)
        elif not results:
            self._step(lambda f: _drop(call(f)), invoke)
        elif any(form.operands[k].view is None for k in results):
            self._dynamic(call, [slots[k] for k in results])
        else:
            outs = [(slots[k], _known(form.operands[k].view)) for k in results]
            self._results(fresh_results(library.op, call), outs, returns_one_tensor(library.op), invoke)

    def _traced(self, form: Form, library: LibraryCall, registers: dict[int, int]) -> Invoke | None:
        """The call as the interpreter can be told of it, or None if it is more than a call."""
        schema = library.op._schema
        if form.attr("rng") is not None or asks_grad_mode(library.op):
            return None
        if any(a.is_out for a in schema.arguments):
            # The size that `out=` is given must not change from run to run, and LAPACK may leave it conjugated.
            views = [o.view for o in form.operands]
            if form.params or any(v is not None and v.dtype.kind == "complex" for v in views):
                return None
        return Invoke(library, registers, self._first_param, form.params, typed_params(form, library))

    def _read(self, view: Callable[[Tensor], Tensor], source: int, slot: int) -> int:
        """A new register for what is in this one, through a view."""
        register = self._new_register(slot)

        def read(f: _Frame) -> None:
            f.registers[register] = view(f.registers[source])

        self._step(read)
        return register

    def _dynamic(self, call: Callable[[_Frame], Any], slots: list[int]) -> None:
        def run(f: _Frame) -> None:
            result = call(f)
            flat = list(result) if isinstance(result, (list, tuple)) else [result]
            if not all(t is None or isinstance(t, Tensor) for t in flat):
                f.outcome.values = flat
                return
            if len(flat) != len(slots):
                raise OperationError(f"{len(flat)} results where {len(slots)} were announced")
            for slot, t in zip(slots, flat, strict=True):
                f.outcome.outputs.append(_adopt_dynamic(f, slot, t))

        self._step(run)

    def _results(
        self,
        call: Callable[[_Frame], Any],
        outs: list[tuple[int, View]],
        single: bool,
        invoke: Invoke | None = None,
    ) -> None:
        facts = self.out.facts
        targets: list[tuple[int, View, bool]] = []
        for slot, view in outs:
            nbytes = facts.slot_alloc[slot]
            fresh = nbytes is not None and slot not in self._adopted and slot not in self._based
            if fresh:
                register = self._name(slot, view)
                self._adopted[slot] = (register, view)
            else:
                register = self._operand(slot, view)
            targets.append((register, view, fresh))
        trusted = [False] * len(targets)
        if invoke is not None:
            fresh = [r for r in invoke.call.op._schema.returns if r.alias_info is None]
            if not all(t[2] for t in targets) or (
                len(fresh) != len(targets) and [str(r.type) for r in fresh] != ["List[Tensor]"]
            ):
                invoke = None
            else:
                invoke.results = tuple([register for register, _, _ in targets])
                invoke.nbytes = sum([view.end for _, view, _ in targets])
                invoke.trusted = trusted
        if single and len(targets) == 1 and targets[0][2]:
            register, view, _ = targets[0]

            def adopt(f: _Frame) -> None:
                t = call(f)
                if not trusted[0] or not _fits(t, view):
                    checked = _adoptable(t, view, f)
                    trusted[0] = checked is t
                    t = checked
                f.registers[register] = t

            self._step(adopt, invoke)
            return

        def adopt_all(f: _Frame) -> None:
            result = call(f)
            flat = list(result) if isinstance(result, (list, tuple)) else [result]
            if len(flat) > len(targets):
                flat = [t for t in flat if t is not None]
            if len(flat) != len(targets):
                raise OperationError(f"{len(flat)} results where {len(targets)} were announced")
            for k, (t, (register, view, fresh)) in enumerate(zip(flat, targets, strict=True)):
                if t is None:
                    # Announced, but undefined here (a workspace that inference does not need): nobody will read it.
                    f.registers[register] = as_view(zeroed(view.end, TORCH_DTYPE[view.dtype]), view)
                    trusted[k] = False
                elif not fresh:
                    f.registers[register].copy_(t)
                elif trusted[k] and _fits(t, view):
                    f.registers[register] = t
                else:
                    f.registers[register] = checked = _adoptable(t, view, f)
                    trusted[k] = checked is t

        self._step(adopt_all, invoke)


def _review(register: int, source: str, view: View, dtype: DType) -> Review | None:
    return Review(register, source, view) if view.dtype is dtype else None


def _drop(_: Any) -> None:
    """An in-place operator's return value is its argument."""


def _known(view: View | None) -> View:
    if view is None:
        raise OperationError("an operand without a view where one is needed")
    return view


def _adoptable(t: Any, view: View, f: _Frame) -> Tensor:
    """`t` itself if it can be the buffer that `view` describes, else a copy that can."""
    if not isinstance(t, Tensor):
        raise OperationError(f"the operator returned a {type(t).__name__} where a tensor was announced")
    if tuple(t.shape) != view.sizes:
        raise OperationError(f"the result has shape {list(t.shape)}, announced was {list(view.sizes)}")
    dtype = TORCH_DTYPE[view.dtype]
    if (
        t.dtype is dtype
        and t.stride() == view.strides
        and t.storage_offset() == 0
        and not t.is_conj()
        and not t.is_neg()
        and not any((isinstance(r, Tensor) and r.is_set_to(t)) or _shares(r, t) for r in f.registers)
    ):
        return t
    own = as_view(zeroed(view.end, dtype), view)
    own.copy_(t)
    return own


def _fits(t: Tensor, view: View) -> bool:
    """Whether `t` lies as `view` says: its form may hang on numbers and contents that change from run to run."""
    return t.shape == view.sizes and t.stride() == view.strides and t.storage_offset() == 0


def _shares(r: Any, t: Tensor) -> bool:
    return isinstance(r, Tensor) and r.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() and t.numel() > 0


def _adopt_dynamic(f: _Frame, slot: int, t: Tensor | None) -> dict[str, Any] | None:
    if t is None:
        return None
    if t.is_conj() or t.is_neg() or t.storage_offset() or any(_shares(r, t) for r in f.registers):
        t = t.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    view = View(WIS_DTYPE[t.dtype], tuple(t.shape), tuple(t.stride()), 0)
    nbytes = view.end
    f.buffers[f.bindings[slot]] = Buffer(nbytes, t, view)
    return {
        "dtype": view.dtype.label,
        "sizes": list(view.sizes),
        "strides": list(view.strides),
        "offset": 0,
        "nbytes": nbytes,
    }


def _differentiated(
    call: Callable[[_Frame], Any], operands: list[int], registers: list[int], gradients: Gradients
) -> Callable[[_Frame], Any]:
    """What `gradients` asks of `call`, which reads `registers`."""

    def run(f: _Frame) -> Any:
        def on(own: list[Tensor]) -> Any:
            for register, t in zip(registers, own, strict=True):
                f.registers[register] = t
            return call(f)

        try:
            return differentiate(on, [f.registers[k] for k in operands], gradients)
        finally:
            for register in registers:
                f.registers[register] = None

    return run


def _keeping_sizes(
    call: Callable[[_Frame], Any], operands: list[tuple[int, tuple[int, ...]]]
) -> Callable[[_Frame], Any]:
    """`call`, failing where `out=` was given a new size: that would be memory which nobody counts."""

    def run(f: _Frame) -> Any:
        result = call(f)
        for register, sizes in operands:
            t = f.registers[register]
            check_size(t, sizes)
            if t.is_conj():  # LAPACK's results may lie there conjugated; a buffer holds plain numbers
                f.registers[register] = t.conj().copy_(t.resolve_conj())
        return result

    return run


def check_size(t: Tensor, sizes: tuple[int, ...]) -> None:
    """Make sure that an operator has left an argument's size as it was.

    Raises:
        OperationError: it has not.
    """
    if t.shape != sizes:
        raise OperationError(f"the result has shape {list(t.shape)}, out= has {list(sizes)}")


def _seeded(call: Callable[[_Frame], Any], pair: list[int]) -> Callable[[_Frame], Any]:
    seed, offset = pair

    def run(f: _Frame) -> Any:
        # torch takes seeds of 64 bits signed or unsigned; the generator is this process's own, set before every draw.
        torch.default_generator.manual_seed(mix(f.params[seed], f.params[offset]) >> 1)
        return call(f)

    return run


def _call(form: Form, library: LibraryCall, registers: dict[int, int], first_param: int) -> Callable[[_Frame], Any]:
    """A function of the frame that calls the operator, as short as its arguments allow."""
    op, args, kwargs = library.op, library.args, library.kwargs
    fn = FAST.get(str(op)) or function_of(op)
    typed = typed_params(form, library)
    if not any(refers(v) for _, v in kwargs) and not typed:
        n = 0
        while n < len(args) and isinstance(args[n], OperandRef):
            n += 1
        if n and not any(refers(a) for a in args[n:]):
            return _plain_call(fn, [registers[a.index] for a in args[:n]], args[n:], kwargs)
    fills = [filler(a, registers, first_param, typed) for a in args]
    named = [(k, filler(v, registers, first_param, typed)) for k, v in kwargs]
    if len(fills) == 2 and not named:
        first, second = fills

        def two(f: _Frame) -> Any:
            r, p = f.registers, f.params
            return fn(first(r, p), second(r, p))  # type: ignore[arg-type]

        return two

    def general(f: _Frame) -> Any:
        r, p = f.registers, f.params
        return fn(*[g(r, p) for g in fills], **{k: g(r, p) for k, g in named})  # type: ignore[arg-type]

    return general


def _plain_call(
    fn: Callable[..., Any], operands: list[int], rest: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]
) -> Callable[[_Frame], Any]:
    tail = [constant_tree(a) for a in rest]
    named = {k: constant_tree(v) for k, v in kwargs}
    if named:
        return lambda f: fn(*[f.registers[i] for i in operands], *tail, **named)
    if len(operands) == 1:
        (a,) = operands
        if not tail:
            return lambda f: fn(f.registers[a])
        return lambda f: fn(f.registers[a], *tail)
    if len(operands) == 2:
        a, b = operands
        if not tail:

            def two(f: _Frame) -> Any:
                r = f.registers
                return fn(r[a], r[b])

            return two

        def two_and_tail(f: _Frame) -> Any:
            r = f.registers
            return fn(r[a], r[b], *tail)

        return two_and_tail
    return lambda f: fn(*[f.registers[i] for i in operands], *tail)
