"""The reference runtime, for tests: it runs WIS literally, one instruction at a time, without any optimisation.

It defines the meaning of the instruction set, and the tests compare the other runtimes with it. It is slow by design.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from wooly_executor.bounds import Bounds
from wooly_executor.errors import OperationError, PoisonedError
from wooly_executor.runtime.buffers import WIS_DTYPE, Buffer, as_view
from wooly_executor.runtime.calls import (
    constant,
    differentiate,
    fresh_results,
    function_of,
    gradients_of,
    library_call,
    mix,
    readings,
    typed_params,
)
from wooly_executor.runtime.device import HOST
from wooly_executor.runtime.foreign import arguments_of
from wooly_executor.runtime.fresh_memory import fills_results, on_zeros
from wooly_executor.runtime.guards import guarded
from wooly_executor.runtime.invocation import check_size
from wooly_executor.runtime.protocol import Execution, Outcome
from wooly_executor.runtime.torch_cpu import TorchCpuRuntime
from wooly_wis.foreign import OPCODE, launch_of
from wooly_wis.optable import result_operands
from wooly_wis.program import Attr, Form, OperandRef, ParamRef, Program, Role, View
from wooly_wis.verifier import ProgramFacts

from wooly_testkit.definitions import define


@dataclass(slots=True)
class LiteralProgram:
    """A program without preparation."""

    program: Program
    facts: ProgramFacts
    dropped: tuple[int, ...]
    edges: Sequence[int] = ()
    settled: bool = False
    family: None = None
    pieces: Mapping[int, int] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """The position at the program's end. No instruction is split."""
        return len(self.program.body)


class LiteralExecution:
    """A run, instruction by instruction. After a failure, it continues to the end in order to poison and free buffers."""

    host_bound: Sequence[bool] = ()
    unchecked = False

    def __init__(
        self,
        runtime: ReferenceRuntime,
        literal: LiteralProgram,
        buffers: dict[int, Buffer],
        bindings: Sequence[int],
        params: Sequence[Any],
    ) -> None:
        self.outcome = Outcome()
        self._runtime, self._program, self._buffers = runtime, literal.program, buffers
        self._bindings, self._params = bindings, params
        self._at = self._first_param = 0

    def advance(self, edges: Sequence[int], ahead_ns: int = 0) -> list[int]:
        """See `Execution.advance`."""
        times = []
        last = time.thread_time_ns()
        for edge in edges:
            while self._at < min(edge, len(self._program.body)):
                instruction = self._program.body[self._at]
                form = self._program.forms[instruction.form]
                params = self._params[self._first_param : self._first_param + len(form.params)]
                ids = [self._bindings[s] for s in instruction.slots]
                self._runtime.instruct(form, ids, params, self._buffers, self._at, self.outcome)
                self._first_param += len(form.params)
                self._at += 1
            now = time.thread_time_ns()
            times.append(now - last)
            last = now
        return times


class ReferenceRuntime(TorchCpuRuntime):
    """Runs each instruction by its definition: read the operands as views, compute, copy into the destination views."""

    def facts(self) -> dict[str, Any]:
        """Return the facts of the CPU, with another runtime name."""
        return super().facts() | {"runtime": "reference"}

    def settle(self) -> None:
        """Nothing is in flight when a run returns."""

    def prepare(self, program: Program, facts: ProgramFacts, notes: Sequence[dict[str, Any]] = ()) -> Any:
        """Check for unknown operators and for instructions that exceed the limits. Nothing is prepared or split."""
        Bounds(self.bounds.limits.whole()).pieces(program)
        for form in program.forms:
            if form.opcode == "extern":
                library_call(form)
        dropped = [s for s, gone in enumerate(facts.slot_freed) if gone and facts.slot_alloc[s] is None]
        return LiteralProgram(program, facts, tuple(dropped))

    def begin(
        self,
        prepared: Any,
        buffers: dict[int, Buffer],
        bindings: Sequence[int],
        params: Sequence[Any],
        *,
        single: bool = False,
    ) -> Execution:
        """See `Runtime.begin`."""
        return LiteralExecution(self, prepared, buffers, bindings, params)

    def instruct(
        self,
        form: Form,
        ids: list[int],
        params: Sequence[Any],
        buffers: dict[int, Buffer],
        index: int,
        outcome: Outcome,
    ) -> None:
        """Run one instruction, or poison its results after a failure. `index` is its index in the program."""
        if outcome.failed_at is None or form.opcode == "free":
            try:
                self._execute(form, ids, params, buffers, outcome)
                return
            except Exception as e:
                outcome.failed_at = index
                plain = isinstance(e, (RuntimeError, IndexError, ValueError, OperationError, PoisonedError))
                outcome.error = str(e) if plain else f"{type(e).__name__}: {e}"
        self._poison(form, ids, buffers, outcome.error)

    def _poison(self, form: Form, ids: list[int], buffers: dict[int, Buffer], why: str) -> None:
        for operand, buffer in zip(form.operands, ids, strict=True):
            if form.opcode == "alloc" and operand.view is not None:
                buffers[buffer] = Buffer(operand.view.end, None, None, why)
            elif operand.role is not Role.IN and buffer in buffers:
                lost = buffers[buffer]
                lost.base, lost.view, lost.poison = None, None, why

    def _execute(
        self, form: Form, ids: list[int], params: Sequence[Any], buffers: dict[int, Buffer], outcome: Outcome
    ) -> None:
        if form.opcode == "alloc":
            view = form.operands[0].view
            assert view is not None
            buffers[ids[0]] = Buffer(view.end, HOST.zeroed(view.end))
            return
        if form.opcode == "free":
            buffers.pop(ids[0], None)
            return

        def tensor(k: int) -> Tensor:
            view = form.operands[k].view
            assert view is not None
            buffer = buffers[ids[k]]
            if buffer.base is None:
                raise PoisonedError(buffer.poison)
            return as_view(buffer.base, view)

        if form.opcode == "copy":
            tensor(1).copy_(tensor(0))
        elif form.opcode == "fill":
            tensor(0).fill_(self._value(form.attr("value"), [], params, {}))
        elif form.opcode == "sleep":
            HOST.sleep(int(str(form.attr("ns"))))
        elif form.opcode == OPCODE:
            values, grid = arguments_of(form)([(t.data_ptr(), t.nbytes) for t in map(tensor, range(len(ids)))], params)
            uses = tuple([True if isinstance(a, int) else None for a in launch_of(form).args])
            self.foreign.known(form).run(str(form.attr("entry")), uses, values, grid)
        elif form.opcode == "extern":
            self._extern(form, ids, params, buffers, tensor, outcome)
        else:
            for k, value in zip(result_operands(form), define(form, tensor, params), strict=True):
                tensor(k).copy_(value)

    def _extern(
        self,
        form: Form,
        ids: list[int],
        params: Sequence[Any],
        buffers: dict[int, Buffer],
        tensor: Any,
        outcome: Outcome,
    ) -> None:
        library = guarded(HOST.library(library_call(form), form), form)
        results = [k for k, o in enumerate(form.operands) if o.role is Role.OUT]
        operands: list[Any] = [None if k in results else tensor(k) for k in range(len(form.operands))]
        for k, read in readings(form):
            operands[k] = read(operands[k])
        typed = typed_params(form, library)
        rng = form.attr("rng")
        if isinstance(rng, tuple):
            pair = [params[r.index] for r in rng if isinstance(r, ParamRef)]
            torch.default_generator.manual_seed(mix(*pair) >> 1)

        def call(on: list[Any]) -> Any:
            return (library.instead or function_of(library.op))(
                *[self._value(a, on, params, typed) for a in library.args],
                **{k: self._value(v, on, params, typed) for k, v in library.kwargs},
            )

        gradients = gradients_of(form)
        if gradients is not None:
            given = [t for t in operands if t is not None]  # the results come last

            def backward(own: list[Tensor]) -> Any:
                return differentiate(call, own, gradients)

            gained = on_zeros(backward)(given)
            for k, t in zip(results, gained, strict=True):
                tensor(k).copy_(t)
            return
        value = (call if fills_results(library.op, form, host=True) else on_zeros(call))(operands)
        for k, operand in enumerate(form.operands):
            if operand.role is Role.INOUT and operand.view is not None:
                check_size(operands[k], operand.view.sizes)
        if not results:
            return
        fresh = fresh_results(library.op)
        if fresh is not None:
            value = [value[i] for i in fresh]
        flat = list(value) if isinstance(value, (list, tuple)) else [value]
        if form.operands[results[0]].view is None:
            if not all(t is None or isinstance(t, Tensor) for t in flat):
                outcome.values = flat
                return
            for k, t in zip(results, flat, strict=True):
                outcome.outputs.append(self._describe(ids[k], t, buffers))
            return
        if len(flat) > len(results):
            flat = [t for t in flat if t is not None]
        for k, t in zip(results, flat, strict=True):
            if t is not None:
                tensor(k).copy_(t)

    def _describe(self, buffer: int, t: Tensor | None, buffers: dict[int, Buffer]) -> dict[str, Any] | None:
        if t is None:
            return None
        own = t.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        view = View(WIS_DTYPE[own.dtype], tuple(own.shape), tuple(own.stride()), 0)
        buffers[buffer] = Buffer(view.end, own, view)
        return {
            "dtype": view.dtype.label,
            "sizes": list(view.sizes),
            "strides": list(view.strides),
            "offset": 0,
            "nbytes": view.end,
        }

    def _value(self, attr: Attr, operands: list[Any], params: Sequence[Any], typed: dict[int, torch.dtype]) -> Any:
        if isinstance(attr, OperandRef):
            return operands[attr.index]
        if isinstance(attr, ParamRef):
            value = params[attr.index]
            return torch.tensor(value, dtype=typed[attr.index]) if attr.index in typed else value
        if isinstance(attr, tuple):
            return [self._value(a, operands, params, typed) for a in attr]
        return constant(attr)
