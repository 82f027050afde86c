"""Records operators as one instruction that PyTorch would decompose, with one more instruction for all gradients.

The backward is the `vjp` of the same operator: the executor runs the operator's forward again with autograd, and computes the
gradients from that graph. So the gradients equal those of the library bit for bit. For large operators, the second forward costs
less than the dozens of instructions into which the operator decomposes. Cells of recurrent networks and `rms_norm` decompose if
gradients are wanted from an executor on a CPU (`SMALL`). Calls with tangents (forward-mode AD) decompose, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wooly.kernels import cells, folding
from wooly.kernels.generic import Generic
from wooly.kernels.schema import host_tensor_at
from wooly.torch_private import (
    OpOverload,
    dispatch_modes,
    for_each_of_batch,
    has_tangents,
    in_trace,
    in_transform,
    is_zero_tensor,
    schema_of,
)

aten = torch.ops.aten

#: Operators that are always recorded as one instruction. `layers` has operators for which this depends on the arguments.
WHOLE = (
    aten._scaled_dot_product_attention_math.default,
    aten.rms_norm.default,
    aten.gru.input,
    aten.gru.data,
    aten.lstm.data,
    aten.rnn_tanh.data,
    aten.rnn_relu.data,
    aten.rnn_tanh.input,
    aten.rnn_relu.input,
    aten.lstm_cell.default,
    aten.gru_cell.default,
    aten.rnn_tanh_cell.default,
    aten.rnn_relu_cell.default,
)

#: Those that decompose on CPUs if gradients are wanted. There, the parts cost less than a second forward: training a loop over
#: cells takes 0.6 of the time. On GPUs they are few fused kernels.
SMALL = (aten.rms_norm.default, *cells.COMPOSED)

_PLAIN = (Tensor, torch.nn.Parameter)

#: How arguments were flattened: for each, the length of its list, or None; and the names of those that are keywords.
Spec = tuple[tuple[int | None, ...], tuple[str, ...]]


def is_traced(t: Tensor) -> bool:
    """Whether PyTorch traces the call (fake tensors, dispatch modes). Then only operators that PyTorch knows may be called."""
    return t.__class__ not in _PLAIN or dispatch_modes() > 0


class Whole:
    """The kernel of an operator that is recorded as one instruction, with and without gradients.

    Args:
        generic: makes the generic kernels of the operator.
        op: the operator.
    """

    def __init__(self, generic: Generic, op: OpOverload) -> None:
        self._record = generic.kernel(op)
        #: Records a call without gradients.
        self.record = self._record_with_flags if op in folding.RECURRENT else self._record
        self.differentiated = generic.differentiated(op)
        self.generator_of = generic.generator_of
        self._host_at = host_tensor_at(op)
        self.takes_host_tensor = self._host_at is not None
        self.random = torch.Tag.nondeterministic_seeded in op.tags
        self._op = op
        self._on_cpu = generic.on_cpu
        self._small = op in SMALL

    def drops(self, args: tuple[Any, ...]) -> bool:
        """Whether a call uses dropout."""
        names = [a.name for a in schema_of(self._op).arguments]
        return any(
            n.startswith("dropout") and isinstance(a, float) and a > 0 for n, a in zip(names, args, strict=False)
        )

    def _record_with_flags(self, *args: Any) -> Any:
        """Record a call of a recurrent layer without gradients. If the results depend on it, tell which tensors require them.

        On GPUs, cuDNN computes the layer. It does not ask for gradients.
        """
        if not folding.depends_on_gradients(args):
            return self._record(*args)
        tensors = [a for a in _flatten(args, {})[0] if isinstance(a, Tensor)]
        if not self._on_cpu(tensors):
            return self._record(*args)
        places, distinct = _distinct(tensors)
        wanted = tuple([k for k, i in enumerate(distinct) if tensors[i].requires_grad])
        drawn = self.generator_of(tensors).draw() if self.random else None
        return tuple(self.differentiated(args, {}, places, wanted, None, drawn, no_grad=True))

    def decompose(self, *args: Any, **kwargs: Any) -> Any:
        """Call the operators into which this operator decomposes."""
        composed = cells.COMPOSED.get(self._op)
        if composed is not None:
            return composed(*args, **kwargs)
        at = self._host_at
        if at is not None and not isinstance(args[at], Tensor):
            args = (*args[:at], torch.tensor(args[at], device="cpu"), *args[at + 1 :])
        return self._op.decompose(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the operator, with gradients if a tensor requires them."""
        leaves, spec = _flatten(args, kwargs)
        tensors = [a for a in leaves if isinstance(a, Tensor)]
        if in_transform() or in_trace() or any(map(is_traced, tensors)) or has_tangents(tensors):
            return self.decompose(*args, **kwargs)
        at = self._host_at
        if at is not None:  # lengths in a host tensor become constants of the form
            args = (*args[:at], tuple(args[at].tolist()), *args[at + 1 :])
            leaves, spec = _flatten(args, kwargs)
            tensors = [a for a in leaves if isinstance(a, Tensor)]
        if any(t.is_conj() or t.is_neg() or is_zero_tensor(t) for t in tensors):
            # Above autograd, PyTorch has not resolved these tensors yet.
            leaves = [_resolved(a) if isinstance(a, Tensor) else a for a in leaves]
            args, kwargs = _restored(leaves, spec)
            tensors = [a for a in leaves if isinstance(a, Tensor)]
        if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
            return self.record(*args, **kwargs)
        if self._small and self._on_cpu(tensors):
            return self.decompose(*args, **kwargs)
        return _WholeCall.apply(self, spec, *leaves)  # type: ignore[no-untyped-call]


def _resolved(t: Tensor) -> Tensor:
    return t.clone() if is_zero_tensor(t) else t.resolve_conj().resolve_neg()


def _flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Spec]:
    """Return the arguments, with the elements of lists in place of the lists, and how to restore them."""
    leaves: list[Any] = []
    lengths: list[int | None] = []
    for a in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(a, (list, tuple)):
            lengths.append(len(a))
            leaves += a
        else:
            lengths.append(None)
            leaves.append(a)
    return leaves, (tuple(lengths), tuple(kwargs))


def _restored(leaves: Sequence[Any], spec: Spec) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Reverse `_flatten`. All lists are tuples."""
    lengths, names = spec
    found: list[Any] = []
    at = 0
    for length in lengths:
        if length is None:
            found.append(leaves[at])
            at += 1
        else:
            found.append(tuple(leaves[at : at + length]))
            at += length
    n = len(found) - len(names)
    return tuple(found[:n]), dict(zip(names, found[n:], strict=True))


def _distinct(tensors: list[Tensor]) -> tuple[tuple[int, ...], list[int]]:
    """Return each tensor's index among the distinct tensors, and the position where each distinct tensor occurs first."""
    ranks: dict[int, int] = {}
    places = tuple([ranks.setdefault(id(t), len(ranks)) for t in tensors])
    return places, [places.index(k) for k in range(len(ranks))]


class _WholeCall(torch.autograd.Function):
    """Autograd function for one call of a `Whole` operator."""

    @staticmethod
    def forward(ctx: Any, whole: Whole, spec: Spec, *leaves: Any) -> Any:
        args, kwargs = _restored(leaves, spec)
        at = [i for i, a in enumerate(leaves) if isinstance(a, Tensor)]
        tensors = [leaves[i] for i in at]
        # A tensor that is passed twice has one gradient. It is returned at the first position of the tensor.
        places, firsts = _distinct(tensors)
        distinct = [at[i] for i in firsts]
        needs = ctx.needs_input_grad
        wanted = [i for i in distinct if needs[2 + i]]
        ranked = tuple([k for k, i in enumerate(distinct) if needs[2 + i]])
        drawn = whole.generator_of(tensors).draw() if whole.random else None
        rest = [None if isinstance(a, Tensor) else a for a in leaves]
        ctx.set_materialize_grads(False)
        ctx.kept = whole, spec, at, rest, places, ranked, wanted, drawn
        ctx.save_for_backward(*tensors)
        results = whole.differentiated(args, kwargs, places, ranked, None, drawn)
        return results[0] if len(results) == 1 else tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        whole, spec, at, rest, places, ranked, wanted, drawn = ctx.kept
        results: list[Any] = [None] * (2 + len(rest))
        if all(g is None for g in grads):  # nothing depends on the results
            return tuple(results)
        leaves = rest.copy()
        for i, t in zip(at, ctx.saved_tensors, strict=True):
            leaves[i] = t
        args, kwargs = _restored(leaves, spec)
        if torch.is_grad_enabled():
            found = _differentiable(whole, args, kwargs, grads, [leaves[i] for i in wanted])
        else:
            call = partial(whole.differentiated, args, kwargs, places, ranked, drawn=drawn)
            # `torch.vmap` over gradients, or `is_grads_batched=True`.
            found = _Gradients.apply(call, *grads) if in_transform() else for_each_of_batch(call, grads)  # type: ignore[no-untyped-call]
        for i, g in zip(wanted, found, strict=True):
            results[2 + i] = g
        return tuple(results)


class _Gradients(torch.autograd.Function):
    """The gradients of one call for gradients of its results, of which `vmap` may have made batches: one instruction for each."""

    @staticmethod
    def forward(call: Callable[..., list[Tensor]], *grads: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(call(grads))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing: these gradients cannot be differentiated."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: Any, *grads: Tensor | None) -> Any:
        found = []
        for i in range(info.batch_size):
            of_one = [g if g is None or d is None else g.select(d, i) for g, d in zip(grads, in_dims[1:], strict=True)]
            found.append(_Gradients.apply(call, *of_one))  # type: ignore[no-untyped-call]
        return tuple([torch.stack(parts) for parts in zip(*found, strict=True)]), (0,) * len(found[0])


def _differentiable(whole: Whole, args: Any, kwargs: Any, grads: Any, inputs: list[Tensor]) -> Any:
    """Compute gradients that can be differentiated again, by PyTorch's decomposition of the operator.

    Raises:
        NotImplementedError: the call uses dropout. The decomposition would draw other random numbers.
    """
    if whole.drops(args):
        raise NotImplementedError(
            "second derivatives through dropout inside attention or a recurrent network are not supported on the wooly device; "
            "set its dropout to 0"
        )
    result = whole.decompose(*args, **kwargs)
    results = list(result) if isinstance(result, (list, tuple)) else [result]
    given = [(t, g) for t, g in zip(results, grads, strict=True) if g is not None]
    return torch.autograd.grad(
        [t for t, _ in given], inputs, [g for _, g in given], create_graph=True, allow_unused=True
    )
