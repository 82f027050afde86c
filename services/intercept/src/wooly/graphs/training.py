"""A kind of arguments for which gradients are needed: one forward program, and a backward program per set of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from wooly import storage
from wooly.devices import NAME
from wooly.graphs.counters import counters
from wooly.graphs.kinds import Body, Kind, touch
from wooly.graphs.program import Alias, Out, Program
from wooly.graphs.recording import NotOneProgramError, Recording
from wooly.recorder import Recorder
from wooly.storage import ID_SHIFT, address_of
from wooly.torch_private import has_saved_tensors_hooks, raw_device

#: After 8 recorded forwards without a recorded backward, only every eighth forward is recorded. The backward may never come.
_PATIENCE = 8


class Training(Kind):
    """A kind of arguments for which gradients are needed.

    It has one forward program, and one backward program per set of results for which gradients arrive. Until a backward is
    recorded, forwards run eagerly inside the autograd function and keep their autograd graph. Forwards whose saved tensors go to
    hooks of the script run as if they were not compiled: a checkpoint compares the tensors of two forwards, and computes again
    once per call of `backward`, of which there must be one only.
    """

    def __init__(self, recorder: Recorder, body: Body) -> None:
        super().__init__(recorder, body)
        self.forwards = 0
        self.forward_program: Program | None = None
        self.backward_programs: dict[tuple[bool, ...], Program] = {}

    def __call__(self, inputs: Sequence[Any], of: dict[int, int]) -> Any:
        if has_saved_tensors_hooks():
            counters.eager += 1
            return self.body.function(*inputs)
        leaves = _Call.apply(self, *inputs)  # type: ignore[no-untyped-call]
        if self.spec is None:
            raise AssertionError("the first forward must have set the structure of the result")
        return self.unflat(leaves)

    # -- forward -----------------------------------------------------------------------------------------------------

    def forward(self, ctx: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        ctx.kind = self
        ctx.set_materialize_grads(False)
        if self.forward_program is not None and self.backward_programs:
            return self._replay_forward(ctx, inputs)
        alone = [a.detach().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in inputs]

        def call() -> list[Any]:
            with torch.enable_grad():
                return self.flat(self.body.function(*alone))

        self.forwards += 1
        if self.forwards > _PATIENCE and self.forwards % _PATIENCE:
            counters.eager += 1
            leaves, recorded = call(), None
        else:
            leaves, recorded = self.record(inputs, call)
        ctx.graph = (alone, leaves, recorded)
        tensors = _device_tensors(inputs)
        if recorded is not None:
            try:
                program = Program(self.recorder, recorded, tensors, self.body.constant_ids, leaves)
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
        slots = [r.slot for r in program.results if isinstance(r, Out)]
        if any(isinstance(r, Alias) for r in program.results) or len(set(slots)) != len(slots):
            raise NotOneProgramError("it needs gradients, but returns an argument or two views of one storage")
        if any(inputs[k].requires_grad for k in program.written):
            raise NotOneProgramError("it writes an argument that requires a gradient")

    def _replay_forward(self, ctx: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        program = self.forward_program
        assert program is not None
        counters.replayed += 1
        tensors = _device_tensors(inputs)
        lease = storage.Lease(self.recorder.heap, [program.made[s] for s in program.wanted])
        results = program.run(_ids(tensors), lease.ids, tensors)
        for k in program.written:
            touch(tensors[k])
        needed = sorted({key[1] for p in self.backward_programs.values() for _, key in p.outside if key[0] == "in"})
        outs = sorted({key[1] for p in self.backward_programs.values() for _, key in p.outside if key[0] == "out"})
        carrier = torch.empty(0, device="cpu")
        carrier.lease = lease  # type: ignore[attr-defined]  # the buffers live as long as autograd keeps the saved tensors
        ctx.graph = None
        ctx.saved = (needed, outs, list(program.wanted))
        ctx.save_for_backward(carrier, *[tensors[k] for k in needed], *[results[k] for k in outs])
        ctx.mark_non_differentiable(
            *[t for t, r in zip(results, program.results, strict=True) if isinstance(r, Out) and not r.grad]
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
            raise NotOneProgramError("two of its forwards recorded different programs")
        kept = {forward.bind[s]: ("kept", s) for s in forward.made}
        tensors = {
            (where, k): t
            for where, values in (("grad", grads), ("in", alone), ("out", leaves))
            for k, t in _device_tensors(values).items()
        }
        program = Program(self.recorder, recorded, tensors, self.body.constant_ids, results, kept)
        if program.written:
            raise NotOneProgramError("its backward writes a tensor that existed before it")
        self.forward_program.want({key[1] for _, key in program.outside if key[0] == "kept"})
        self.backward_programs[pattern] = program

    def _replay_backward(self, ctx: Any, pattern: tuple[bool, ...], grads: Sequence[Any]) -> list[Any]:
        program = self.backward_programs.get(pattern)
        if program is None:
            raise NotImplementedError(
                "a compiled function got gradients for another set of results than in its earlier backwards; run the function "
                "without torch.compile, or use the same results in every backward"
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
    """Autograd function for one call of a compiled function."""

    @staticmethod
    def forward(ctx: Any, kind: Training, *inputs: Any) -> tuple[Any, ...]:
        return kind.forward(ctx, inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return (None, *ctx.kind.backward(ctx, grads))


def _device_tensors(values: Sequence[Any]) -> dict[int, Tensor]:
    return {i: a for i, a in enumerate(values) if isinstance(a, Tensor) and raw_device(a).type == NAME}


def _ids(tensors: dict[Any, Tensor]) -> dict[Any, int]:
    return {k: address_of(t) >> ID_SHIFT for k, t in tensors.items()}
