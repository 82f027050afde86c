"""Builds the steps of a program, once: looks up operators and lays out arguments."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from wooly_wis.dtypes import DType
from wooly_wis.foreign import OPCODE, launch_of
from wooly_wis.optable import result_operands
from wooly_wis.pauses import pause
from wooly_wis.program import Form, Program, Role, View
from wooly_wis.verifier import ProgramFacts

from wooly_executor.bounds import WHOLE, Pieces
from wooly_executor.bounds.division import Piece
from wooly_executor.errors import OperationError, PoisonedError
from wooly_executor.runtime.acts import Act, Launch
from wooly_executor.runtime.adoption import Layout, adopt_dynamic, adopted, fits, fits_places, put
from wooly_executor.runtime.buffers import TORCH_DTYPE, WIS_DTYPE, as_view, required_view
from wooly_executor.runtime.calls import LibraryCall, filler, only, out_of_place
from wooly_executor.runtime.device import HOST, MAPPED_FROM, TorchDevice
from wooly_executor.runtime.foreign import Foreign, arguments_of
from wooly_executor.runtime.frame import Frame, Step
from wooly_executor.runtime.gpu_attention import Attention
from wooly_executor.runtime.invocation import (
    calling,
    deterministic,
    differentiated,
    seeded,
    with_flags,
    with_size_check,
)
from wooly_executor.runtime.lowering import Lowered, lowered
from wooly_executor.runtime.one_thread import Threads, choice_of_copy, on_one_thread
from wooly_executor.runtime.parts import on_part, part_of
from wooly_executor.runtime.prepared import PreparedProgram
from wooly_executor.runtime.reuse import reused_memory
from wooly_executor.runtime.segments import (
    Free,
    Gather,
    Invoke,
    Make,
    Review,
    Trace,
    Write,
    has_fixed_layout,
    memory_name,
    register_name,
)
from wooly_executor.runtime.similar import Building, Steps
from wooly_executor.runtime.slots import Change

_COPY = torch.ops.aten.copy_.default
_FILL = torch.ops.aten.fill_.Scalar


def prepare_acts(
    program: Program,
    facts: ProgramFacts,
    acts: list[Act],
    foreign: Foreign,
    device: TorchDevice = HOST,
    pieces: Pieces = WHOLE,
) -> PreparedProgram:
    """Build the steps of a program.

    Args:
        program: the verified program.
        facts: the facts that the verifier found.
        acts: its instructions, or the steps of its plan.
        foreign: has the foreign kernels of the program.
        device: the device on which the program will run.
        pieces: the pieces of the instructions that are split.

    Raises:
        OperationError: an operator is not available on this device.
    """
    return _Preparation(program, facts, acts, foreign, device, pieces, None).finish()


def prepare_like(
    program: Program, facts: ProgramFacts, acts: list[Act], foreign: Foreign, device: TorchDevice, like: Steps | None
) -> tuple[PreparedProgram, Steps]:
    """Build the steps of a program without pieces and plan: see `prepare_acts`.

    Args:
        program: the verified program.
        facts: the facts that the verifier found.
        acts: its instructions.
        foreign: has the foreign kernels of the program.
        device: the device on which the program will run.
        like: the steps of a similar program (see `similar`); None: there is none.

    Returns:
        The program, and how its steps were built, for programs that are similar to it.

    Raises:
        OperationError: an operator is not available on this device.
    """
    preparation = _Preparation(program, facts, acts, foreign, device, WHOLE, like)
    return preparation.finish(), preparation.steps()


class _Target(NamedTuple):
    """Where a result of an operator goes.

    Attributes:
        register: the register.
        view: the announced view.
        fresh: whether the result becomes the buffer; else it is copied to the memory that the buffer has.
        unread: whether the program frees it without a use: its layout does not matter.
    """

    register: int
    view: View
    fresh: bool
    unread: bool


class _Preparation:
    """Builds the steps of one program."""

    def __init__(
        self,
        program: Program,
        facts: ProgramFacts,
        acts: list[Act],
        foreign: Foreign,
        device: TorchDevice,
        pieces: Pieces,
        like: Steps | None,
    ) -> None:
        self._foreign = foreign
        self._device = device
        self._pieces = pieces
        more = sum([len(found) - 1 for found in pieces.values()])
        counts = {at: len(found) for at, found in pieces.items()}
        self.out = PreparedProgram(program, facts, acts, pieces=counts, end=len(program.body) + more)
        self._piece = 0
        self._act = self._first_param = 0
        self._first_use, self._uses = (like.first_use, like.uses) if like is not None else self._first_uses()
        self._reused = reused_memory(acts, facts.slot_alloc, self._first_use)
        self._reused_later = frozenset(self._reused.values())
        self._building = Building(self.out, like if like is not None and like.reused == self._reused else None)
        self._slots = self._building.slots

    def steps(self) -> Steps:
        """Return how the steps were built."""
        return self._building.done(self._first_use, self._uses, self._reused)

    def finish(self) -> PreparedProgram:
        out, building = self.out, self._building
        acts, freed, i = out.acts, list[int](), 0
        while i < len(acts):
            pause()
            act = acts[i]
            if act.form.opcode == "free":
                freed.append(act.slots[0])
                i += 1
                continue
            following = building.copy(i, freed)
            if following == i:
                building.begin()
                if freed:  # one step frees several slots in a row, because most operators are followed by several
                    self._free(freed)
                self._act, self._first_param = i, act.first_param
                if act.launch is not None:
                    self._launch(act, act.launch)
                else:
                    self._instruction(i, act)
                building.end(i)
                following += 1
            freed, i = [], following
        building.begin()
        self._free(freed)
        building.end(len(acts) - 1)
        out.n_registers, out.slot_of = len(self._slots.slot_of), self._slots.slot_of
        places = list(accumulate([act.at for act in acts], max))
        out.where = [places[k] for k in out.owner]
        if self._pieces:
            begins = self._positions()
            out.where = [begins[at] + k for at, k in zip(out.where, building.within, strict=True)]
        self._find_buffers()
        return out

    def _find_buffers(self) -> None:
        """Find the buffers that the program leaves behind, and those that it frees."""
        out, facts = self.out, self.out.facts
        for slot, nbytes in enumerate(facts.slot_alloc):
            if nbytes is None:
                if facts.slot_freed[slot]:
                    out.dropped.append(slot)
            elif not facts.slot_freed[slot]:
                adopted = self._slots.adopted.get(slot)
                if adopted is not None:
                    out.kept.append((slot, *adopted, nbytes))
                elif slot in self._slots.based:
                    out.made.append((slot, nbytes))

    def _positions(self) -> list[int]:
        """Return the position at which each instruction begins, counted in pieces."""
        counts = self.out.pieces
        return [0, *accumulate([counts.get(i, 1) for i in range(len(self.out.program.body))])]

    def _first_uses(self) -> tuple[dict[int, tuple[int, int]], Counter[int]]:
        """Return, for each slot, act and operand of its first use after the alloc, and the number of its uses."""
        first: dict[int, tuple[int, int]] = {}
        uses: Counter[int] = Counter()
        for i, act in enumerate(self.out.acts):
            if not i & 63:
                pause()
            if act.form.opcode == "alloc":
                continue
            uses.update(act.slots if act.form.opcode != "free" else ())
            for k, slot in enumerate(act.slots):
                first.setdefault(slot, (i, k))
        return first, uses

    # -- operands ----------------------------------------------------------------------------------------------------

    def _step(self, step: Step, trace: Trace | None = None) -> None:
        self.out.steps.append(step)
        self.out.traces.append(trace)
        self._building.within.append(self._piece)

    def _mark_uncapturable(self) -> None:
        """Mark the last step as one that a graph cannot contain."""
        self.out.uncapturable.add(len(self.out.steps) - 1)

    def _operand(self, slot: int, view: View) -> int:
        """Return the register of this view. For a new view, add a step that fills the register."""
        pause()
        known = self._slots.register_of.get((slot, id(view)))
        if known is not None:
            return known
        register = self._slots.new_register(slot, view)
        adopted = self._slots.adopted.get(slot)
        if adopted is not None:
            source = adopted[0]

            def from_register(f: Frame) -> None:
                f.registers[register] = as_view(f.registers[source], view)

            self._step(from_register, _review(register, register_name(source), view, adopted[1].dtype))
        elif slot in self._slots.based:

            def from_base(f: Frame) -> None:
                f.registers[register] = as_view(f.bases[slot], view)

            self._step(from_base, _review(register, memory_name(slot), view, WIS_DTYPE[self._slots.based[slot]]))
        else:

            def from_buffer(f: Frame) -> None:
                buffer = f.buffers[f.bindings[slot]]
                base = buffer.base
                if base is None:
                    raise PoisonedError(buffer.poison)
                if buffer.view is not view:
                    if buffer.view != view:
                        base = as_view(base, view)
                    if not view.offset:  # most buffers are only seen through one view: keep its tensor
                        buffer.base, buffer.view = base, view
                f.registers[register] = base

            self._step(from_buffer, Gather(register, slot, view))
        return register

    def _make_base(self, slot: int, nbytes: int, dtype: torch.dtype, dirty: bool) -> None:
        self._slots.change(Change("based", slot, 0, dtype))
        device, old = self._device, self._reused.get(slot)
        if old is not None:

            def move(f: Frame) -> None:
                base, f.bases[old] = f.bases[old], None
                f.bases[slot] = (
                    device.zeroed(nbytes, dtype) if base is None else base
                )  # a graph that ran keeps its memory

            self._step(move)
            self._mark_uncapturable()
            return
        if dirty:
            numel = -(-nbytes // dtype.itemsize)

            def take(f: Frame) -> None:
                f.bases[slot] = device.empty(numel, dtype)

            self._step(take, Make(slot, nbytes, dtype, device.named, zeroed=False))
            return

        def make(f: Frame) -> None:
            f.bases[slot] = device.zeroed(nbytes, dtype)

        if device.host and nbytes >= MAPPED_FROM:  # the interpreter would write to each page
            self._step(make)
            return
        threads = choice_of_copy(-(-nbytes // dtype.itemsize)) if device.host else Threads.ANY
        self._step(make, Make(slot, nbytes, dtype, device.named, threads=threads))
        if slot in self._reused_later:  # memory of a graph cannot be given away
            self._mark_uncapturable()

    # -- instructions ------------------------------------------------------------------------------------------------

    def _launch(self, act: Act, launch: Launch) -> None:
        """Add a step that launches a generated kernel on the memory of its slots."""
        views = {s: o.view for f, on in act.lines for o, s in zip(f.operands, on, strict=True)}
        registers: list[tuple[bool, int]] = []
        for slot in launch.slots:
            adopted = self._slots.adopted.get(slot)
            if adopted is not None:
                registers.append((True, adopted[0]))
            elif slot in self._slots.based:
                registers.append((False, slot))
            else:
                registers.append((True, self._operand(slot, required_view(views.get(slot)))))
        kernel, clock = launch.run, time.thread_time_ns
        if not self._device.host:  # the marks around a kernel measure its time

            def enqueue(f: Frame) -> None:
                r, b = f.registers, f.bases
                kernel([(r if known else b)[k].untyped_storage().data_ptr() for known, k in registers], f.params)

            self._step(enqueue)
            return

        def run(f: Frame) -> None:
            begun, r, b = clock(), f.registers, f.bases
            at = [(r if known else b)[k].untyped_storage().data_ptr() for known, k in registers]
            elsewhere = kernel(at, f.params)
            f.elsewhere_ns += elsewhere
            f.kernel_ns += clock() - begun + elsewhere

        self._step(run)

    def _write(self, write: Callable[[Frame], None], target: View, trace: Write) -> None:
        """Add a copy or a fill as a step."""
        threads = choice_of_copy(target.numel) if self._device.host else Threads.ANY
        self._step(on_one_thread(write) if threads is Threads.ONE else write, trace._replace(threads=threads))

    def _instruction(self, i: int, act: Act) -> None:
        form, slots = act.form, act.slots
        pieces = self._pieces_of(act) if self._pieces else None
        if form.opcode == "alloc":
            self._alloc(slots[0], act.dirty)
        elif pieces is not None:
            self._divided(form, slots, pieces)
        elif form.opcode == "copy":
            source, target = [required_view(o.view) for o in form.operands]
            src, dst = self._operand(slots[0], source), self._operand(slots[1], target)

            def copy(f: Frame) -> None:
                f.registers[dst].copy_(f.registers[src])

            self._write(copy, target, Write(_COPY, (dst, src)))
        elif form.opcode == "fill":
            target = required_view(form.operands[0].view)
            to = self._operand(slots[0], target)
            number = form.attr("value")
            value = filler(number, {}, self._first_param, {})

            def fill(f: Frame) -> None:
                f.registers[to].fill_(value(f.registers, f.params))

            self._write(fill, target, Write(_FILL, (to,), (number,), self._first_param, form.params))
        elif form.opcode == OPCODE:
            self._foreign_launch(form, slots)
        elif form.opcode == "sleep":
            self._sleep(form)
        else:
            self._compute(act, self._slots.out_of_place.get(i))

    def _pieces_of(self, act: Act) -> tuple[Piece, ...] | None:
        """Return the pieces of an instruction that is split, or None if a plan replaces the instruction."""
        pieces, program = self._pieces.get(act.at), self.out.program
        if pieces is None or program.body[act.at].slots != act.slots:
            return None
        return pieces if program.forms[program.body[act.at].form] == act.form else None

    def _divided(self, form: Form, slots: tuple[int, ...], pieces: tuple[Piece, ...]) -> None:
        """Add one step per piece of an instruction. A run may stop between them."""
        results = (len(slots) - 1,) if form.opcode in ("copy", "fill") else result_operands(form)
        registers = {
            k: self._operand(s, required_view(o.view))
            for k, (s, o) in enumerate(zip(slots, form.operands, strict=True))
            if k not in results or o.role is not Role.OUT
        }
        for k in results:
            if k not in registers:
                registers[k] = self._destination(slots[k], required_view(form.operands[k].view))
        parts = {k: self._slots.new_register(slots[k]) for k in registers}
        call = part_of(form, results, parts, self._first_param, self._device)
        for k, piece in enumerate(pieces):
            self._piece = k
            self._step(on_part(call, registers, parts, piece))
        self._piece = 0

    def _destination(self, slot: int, view: View) -> int:
        """Return the register of the result that the pieces write together."""
        device = self._device
        if not self._is_fresh(slot):
            return self._operand(slot, view)
        register = self._slots.adopt(slot, view)
        dtype = TORCH_DTYPE[view.dtype]
        filled = view.fills(view.end)

        def make(f: Frame) -> None:
            memory = device.empty(view.numel, dtype) if filled else device.zeroed(view.end, dtype)
            f.registers[register] = as_view(memory, view)

        self._step(make)
        return register

    def _foreign_launch(self, form: Form, slots: tuple[int, ...]) -> None:
        """Add a step that launches a foreign kernel on the memory that its operands show."""
        views = [required_view(o.view) for o in form.operands]
        registers = [(self._operand(s, v), v.numel * v.dtype.itemsize) for s, v in zip(slots, views, strict=True)]
        kernel, arguments = self._foreign.known(form), arguments_of(form)
        writable = [o.role is not Role.IN for o in form.operands]
        first, last = self._first_param, self._first_param + len(form.params)
        entry, kinds = launch_of(form).entry, [a if isinstance(a, int) else None for a in launch_of(form).args]
        uses = tuple([None if k is None else writable[k] for k in kinds])
        step, begins = len(self.out.steps), self._foreign.begins
        self.out.foreign = True

        def run(f: Frame) -> None:
            r = f.registers
            values, grid = arguments([(r[k].data_ptr(), nbytes) for k, nbytes in registers], f.params[first:last])
            begins(step)
            taken = kernel.run(entry, uses, values, grid)
            f.elsewhere_ns += taken

        self._step(run)
        self._mark_uncapturable()

    def _sleep(self, form: Form) -> None:
        """Add a step that occupies the device for a time."""
        ns, sleep = form.attr("ns"), self._device.sleep
        assert isinstance(ns, int)

        def occupy(f: Frame) -> None:
            f.elsewhere_ns += sleep(ns)

        self._step(occupy)

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
                if operand.role is Role.OUT and whole:
                    if form.opcode not in ("copy", "fill"):
                        return  # the operator's result becomes the buffer
                    dirty = dirty or view.fills(nbytes)
                anew = out_of_place(form)
                if anew is not None and anew[0] == first[1] and whole:
                    self._slots.change(Change("out of place", first[0], *anew))
                    return
                if nbytes % view.dtype.itemsize == 0:
                    dtype = TORCH_DTYPE[view.dtype]
        self._make_base(slot, nbytes, dtype, dirty)

    def _free(self, slots: Sequence[int]) -> None:
        alloc, names = self.out.facts.slot_alloc, {slot: self._slots.registers_of.pop(slot, []) for slot in slots}
        registers = [r for of_slot in names.values() for r in of_slot]
        based = [slot for slot in slots if slot in self._slots.based and slot not in self._reused_later]
        held = tuple(
            [
                ((*map(register_name, of_slot), *([memory_name(slot)] if slot in based else ())), nbytes)
                for slot, of_slot in names.items()
                if (nbytes := alloc[slot])
            ]
        )
        if not registers and not based:
            return

        if len(registers) == 1 and not based:
            (register,) = registers

            def free_one(f: Frame) -> None:
                f.registers[register] = None

            self._step(free_one, Free((register,), (), held))
            return

        def free(f: Frame) -> None:
            held = f.registers
            for r in registers:
                held[r] = None
            for slot in based:
                f.bases[slot] = None

        self._step(free, Free(tuple(registers), tuple(based), held))

    def _compute(self, act: Act, anew: tuple[int, LibraryCall] | None) -> None:
        form, slots, device = act.form, act.slots, self._device
        known = lowered(form, device, act.notes, anew)
        gradients, library, waiting = known.gradients, known.library, known.waiting
        if known.word is not None:
            self.out.words.append((self._act, known.word))
        registers = {k: self._operand(slots[k], view) for k, view in known.operands}
        for k, reading in known.readings:
            registers[k] = self._read(reading, registers[k], slots[k])
        operands = list(registers.values())
        if gradients is not None:  # each operand gets its own register, even if two operands are the same tensor
            registers = {k: self._slots.new_register(slots[k]) for k in registers}
        call = calling(known.calling, registers, self._first_param, device)
        if known.flags:
            call = with_flags(call, known.flags)
        if known.threads is Threads.ONE:
            call = on_one_thread(call)
        if known.deterministic:
            call = deterministic(call)
        invoke = None
        if known.traced and (device.host or not waiting):  # on a GPU, a segment that waits could not be captured
            invoke = self._traced(form, known, registers)
        if known.sized is not None:
            call = with_size_check(call, [(registers[k], sizes) for k, sizes in known.sized])
        if known.rng is not None:
            seed, offset = known.rng
            pair = self._first_param + seed, self._first_param + offset
            call = seeded(call, pair, device)
            if known.draws:
                self.out.draws[self._act] = pair
            else:
                waiting = True  # the host seeds the generator
        if gradients is None and not known.covers:
            plain, call = call, device.on_zeros(call, repeatable=known.repeatable)
            waiting = waiting or call is not plain  # the host looks at the pool of zeroed memory
        outs = None if known.views is None else [(slots[k], v) for k, v in zip(known.results, known.views, strict=True)]
        if gradients is not None:
            waiting = True
            assert outs is not None
            # The flags must hold during the backward pass, too, which is not a part of `call`.
            call = differentiated(call, operands, list(registers.values()), gradients)
            if known.flags:
                call = with_flags(call, known.flags)
            self._results(device.on_zeros(call), outs, single=False)
        elif not known.results:
            self._step(call, invoke)  # the result of an in-place operator is its argument
        elif outs is None:
            waiting = True
            self._dynamic(call, [slots[k] for k in known.results])
        else:
            if isinstance(library.instead, Attention):
                library.instead.logs_read = not self._is_unread(slots[known.results[1]])
            if known.fresh is not None:
                call = only(call, known.fresh)
            self._results(call, outs, known.single, invoke)
        if waiting:
            self._mark_uncapturable()

    def _traced(self, form: Form, known: Lowered, registers: dict[int, int]) -> Invoke:
        """Describe the call for `segments`."""
        return Invoke(
            known.library,
            registers,
            self._first_param,
            form.params,
            known.calling.typed,
            self._device.named,
            zeros=not known.covers,
            flags=known.flags,
            threads=known.threads,
            outline=known.outline,
        )

    def _read(self, view: Callable[[Tensor], Tensor], source: int, slot: int) -> int:
        """Add a step that reads a register through a view. Returns the new register."""
        register = self._slots.new_register(slot)

        def read(f: Frame) -> None:
            f.registers[register] = view(f.registers[source])

        self._step(read)
        return register

    def _dynamic(self, call: Callable[[Frame], Any], slots: list[int]) -> None:
        device = self._device

        def run(f: Frame) -> None:
            result = call(f)
            flat = list(result) if isinstance(result, (list, tuple)) else [result]
            if not all(t is None or isinstance(t, Tensor) for t in flat):
                f.outcome.values = flat
                return
            if len(flat) != len(slots):
                raise OperationError(
                    f"the operator returned {len(flat)} results, but the program announced {len(slots)}"
                )
            for slot, t in zip(slots, flat, strict=True):
                f.outcome.outputs.append(adopt_dynamic(f, slot, t, device))

        self._step(run)

    def _is_unread(self, slot: int) -> bool:
        """Whether the program makes a slot and frees it without a use."""
        facts = self.out.facts
        return facts.slot_alloc[slot] is not None and facts.slot_freed[slot] and self._uses[slot] == 1

    def _results(
        self,
        call: Callable[[Frame], Any],
        outs: list[tuple[int, View]],
        single: bool,
        invoke: Invoke | None = None,
    ) -> None:
        """Add the step that calls an operator and puts its results in their registers.

        Args:
            call: calls the operator.
            outs: slot and view of each result.
            single: whether the operator returns one tensor.
            invoke: the description of the call; None: it has none.
        """
        targets = [self._target(slot, view) for slot, view in outs]
        all_fresh = all(target.fresh for target in targets)
        trusted = [Layout.SAME if target.unread else Layout.UNKNOWN for target in targets]
        if invoke is not None:
            if not all_fresh:
                invoke = None
            else:
                invoke.results = tuple([target.register for target in targets])
                invoke.views = tuple([target.view for target in targets])
                invoke.trusted = trusted
        if single and len(targets) == 1 and all_fresh:
            self._step(self._adopting_one(call, targets[0], trusted, invoke), invoke)
        else:
            self._step(self._adopting_all(call, targets, trusted), invoke)

    def _target(self, slot: int, view: View) -> _Target:
        """Return where a result goes: a new register, or the memory that its buffer has."""
        fresh = self._is_fresh(slot)
        register = self._slots.adopt(slot, view) if fresh else self._operand(slot, view)
        return _Target(register, view, fresh, fresh and self._is_unread(slot))

    def _is_fresh(self, slot: int) -> bool:
        """Whether the program makes a slot that has no memory yet."""
        slots = self._slots
        return self.out.facts.slot_alloc[slot] is not None and slot not in slots.adopted and slot not in slots.based

    def _adopting_one(
        self, call: Callable[[Frame], Any], target: _Target, trusted: list[Layout], invoke: Invoke | None
    ) -> Step:
        """Return a step that keeps the only result of a call."""
        device, same, register, view = self._device, Layout.SAME, target.register, target.view
        if invoke is not None and has_fixed_layout(invoke):

            def adopt_fixed(f: Frame) -> None:
                t = call(f)
                if not trusted[0]:
                    t, trusted[0] = adopted(t, view, f, device)
                elif trusted[0] is not same:
                    t = as_view(t, view)
                f.registers[register] = t

            return adopt_fixed

        def adopt(f: Frame) -> None:
            t = call(f)
            if trusted[0] is not same or not fits(t, view):
                t, trusted[0] = adopted(t, view, f, device)
            f.registers[register] = t

        return adopt

    def _adopting_all(self, call: Callable[[Frame], Any], targets: list[_Target], trusted: list[Layout]) -> Step:
        """Return a step that keeps all results of a call."""
        device, same = self._device, Layout.SAME
        read = [k for k, target in enumerate(targets) if not target.unread]
        one = read[0] if len(read) == 1 and targets[read[0]].fresh else None

        def adopt_all(f: Frame) -> None:
            result = call(f)
            if one is not None and trusted[one] is same and type(result) is tuple and len(result) == len(targets):
                t, (register, view, _, _) = result[one], targets[one]
                if t is not None and fits(t, view):
                    f.registers[register] = t
                    return
            flat = list(result) if isinstance(result, (list, tuple)) else [result]
            if len(flat) > len(targets):
                flat = [t for t in flat if t is not None]
            if len(flat) != len(targets):
                raise OperationError(
                    f"the operator returned {len(flat)} results, but the program announced {len(targets)}"
                )
            for k, (t, (register, view, fresh, unread)) in enumerate(zip(flat, targets, strict=True)):
                if unread:
                    f.registers[register] = t
                elif t is None:
                    # The result is announced, but undefined here (for example a workspace that inference does not need): it is
                    # never read.
                    f.registers[register] = as_view(device.zeroed(view.end, TORCH_DTYPE[view.dtype]), view)
                    trusted[k] = Layout.UNKNOWN
                elif not fresh:
                    put(t, f.registers[register], device)
                elif trusted[k] is same and fits(t, view):
                    f.registers[register] = t
                elif trusted[k] is Layout.SAME_PLACES and fits_places(t, view):
                    f.registers[register] = as_view(t, view)
                else:
                    f.registers[register], trusted[k] = adopted(t, view, f, device)

        return adopt_all


def _review(register: int, source: str, view: View, dtype: DType) -> Review | None:
    return Review(register, source, view) if view.dtype is dtype else None
