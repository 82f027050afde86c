"""Infers dtype, shape and layout of results without device data.

It runs the call on meta tensors. If the meta kernel is missing or gives other results than the CPU kernel, it runs the call on
host tensors of zeros. Both raise PyTorch's own errors. For some operators, this file corrects the results of meta kernels to
those of CPU kernels: layouts, dtypes of statistics, sizes of `out=`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from wooly.kernels.outs import BROADCAST_WITH_OUT, RESIZE_SILENTLY, RESIZED_ON_HOST, ResizeOutError, check_outs
from wooly.kernels.overlap import is_iterated, must_fit, overlaps
from wooly.kernels.schema import Call, OpFacts, tensors_of
from wooly.storage import contiguous_strides, dense_strides
from wooly.torch_private import (
    fake_results,
    neg_view,
    no_autocast,
    raw_device,
    suggested_format,
    tree_leaves,
    tree_map,
    unobserved_graph,
)

#: Elementwise functions of two tensors whose meta kernels (written in Python) take the layout of the result from another operand
#: than ATen's iterator.
_ITERATED = frozenset(
    {
        *(
            f"aten.{name}_backward.default"
            for name in ("elu", "hardsigmoid", "hardswish", "hardtanh", "logit", "softplus")
        ),
        *(f"aten.{name}.default" for name in ("heaviside", "logaddexp", "logaddexp2", "special_xlog1py")),
        *(f"aten.logical_{name}.default" for name in ("and", "or", "xor")),
        *("aten.copysign.Tensor", "aten.div.Tensor_mode", "aten.floor_divide.default", "aten.xlogy.Tensor"),
    }
)
#: Operators that are inferred on the host, because their meta kernel gives another shape than the CPU kernel (oneDNN's workspace,
#: unused statistics) or another layout (LAPACK's column-major matrices, MKL's order of axes), or because they have none.
INFERRED_ON_HOST = frozenset(
    {
        "aten.mkldnn_rnn_layer.default",
        "aten.native_batch_norm.default",
        "aten._native_batch_norm_legit.default",
        "aten._native_batch_norm_legit.no_stats",
        "aten._batch_norm_with_update.default",
        "aten._histogramdd_bin_edges.default",
        "aten._histogramdd_from_bin_cts.default",
        "aten._embedding_bag.default",
        "aten._embedding_bag_forward_only.default",
        "aten._linalg_svd.default",
        "aten.linalg_eig.default",
        "aten._fft_r2c.default",
        "aten._fft_c2r.default",
        "aten.max_unpool2d.default",
        "aten.native_batch_norm.out",
        "aten._native_batch_norm_legit.out",
        "aten.batch_norm_update_stats.default",
        "aten.multi_margin_loss.default",
        "aten.multilabel_margin_loss_forward.default",
        "aten.multi_margin_loss_backward.default",
        "aten.multilabel_margin_loss_backward.default",
        "aten.fractional_max_pool3d_backward.default",
        "aten._logcumsumexp.default",
    }
)

#: Further operators that are inferred on the host if strides of dimensions of size 1 are not those of a contiguous tensor (see
#: `_has_loose_strides`).
_STRICT = frozenset(
    {
        "aten.native_group_norm.default",
        "aten.native_group_norm_backward.default",
        "aten.native_batch_norm_backward.default",
        "aten.upsample_bilinear2d.default",
        "aten.upsample_nearest2d.default",
        "aten.mse_loss.default",
        "aten.mse_loss_backward.default",
        "aten.glu_backward.default",
    }
)

#: Operators whose results are channels-last on CPUs if an operand is; the meta kernels say contiguous.
_KEEP_CHANNELS_LAST = frozenset(
    {
        f"aten.{how}_pad{n}d{part}.default"
        for how in ("reflection", "replication")
        for n in (2, 3)
        for part in ("", "_backward")
    }
)

#: Maximum number of elements of a call that is inferred on the host because of its strides, or again if its meta kernel fails.
_STAND_IN_LIMIT = 1 << 24

#: Dtypes that meta kernels widen before they compute.
_WIDENED = frozenset({torch.float16, torch.bfloat16})

_CAT = "aten.cat.default"
_GROUPED_MM = "aten._grouped_mm.default"
_CONVOLUTION_BACKWARD = "aten.convolution_backward.default"
_GROUP_NORM_BACKWARD = "aten.native_group_norm_backward.default"
_POWERS = frozenset({"aten.pow.Tensor_Scalar", "aten._foreach_pow.Scalar", "aten._foreach_pow.ScalarList"})
#: Attention with the logarithms of its sums, which the CPU kernel computes in float64 for float64.
_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"
_MULTI_HEAD = "aten._native_multi_head_attention.default"
_WEIGHT_NORM = "aten._weight_norm_interface.default"

#: Gradients whose meta or CPU kernels also make those that the argument `output_mask` does not ask for.
_MASKED = frozenset(
    {"aten.native_batch_norm_backward.default", "aten.batch_norm_backward.default", _CONVOLUTION_BACKWARD}
)

#: Gradients whose CPU kernels divide by the size of a tensor.
_DIVIDING = frozenset({"native_batch_norm_backward", "batch_norm_backward"})

#: Operators that return a result and its statistics.
_NORMS = frozenset({"aten.native_layer_norm.default", "aten.native_group_norm.default"})

#: Operators whose first result is contiguous on CPUs and GPUs. The meta kernels take the layout of an operand.
_CONTIGUOUS = frozenset(
    {
        *(
            "aten.native_layer_norm.default",
            "aten.native_layer_norm_backward.default",
            "aten.mse_loss_backward.default",
            "aten._transformer_encoder_layer_fwd.default",
        ),
        "aten.pow.Scalar",
    }
)
_ANGLE = "aten.angle.default"
_ADDR = "aten.addr.out"
#: Operators that make a complex result of complex numbers first, and copy its real part to a contiguous `out=`.
_COMPOSED_OF_COMPLEX = frozenset({"aten.abs.out", "aten.angle.out"})


class Inferences:
    """Number of calls whose result was inferred instead of taken from the cache of plans. Inference uses no device data.

    Attributes:
        on_meta: inferences on meta tensors, which have no memory.
        on_host: inferences on host tensors of zeros.
        trials: trial calls on host tensors of zeros, to find errors that only kernels raise.
    """

    __slots__ = ("on_host", "on_meta", "trials")

    def __init__(self) -> None:
        self.on_meta = self.on_host = self.trials = 0


class NoMetaKernelError(Exception):
    """Internal signal: the operator has no meta kernel, or its result depends on values."""


def infer(
    facts: OpFacts, call: Call, counts: Inferences, *, on_host: bool = False, with_scalars: bool = False
) -> list[Tensor | None]:
    """Infer the results of a call that are new tensors. Returns tensors without data, in order.

    Args:
        facts: the operator.
        call: the arguments.
        counts: counters of inferences.
        on_host: infer on host tensors of zeros, for any operator.
        with_scalars: also replace 0-dimensional host tensors by meta tensors.

    Raises:
        NoMetaKernelError: the result cannot be inferred without values.
        ResizeOutError: an `out=` argument must be resized first.
    """
    if facts.extension:
        return _infer_extension(facts, call, counts)
    if facts.name == _CAT and not on_host:
        joined = _joined(call)
        if joined is not None:
            counts.on_meta += 1
            return [joined]
    if facts.name == _GROUPED_MM and not on_host:
        product = _grouped_product(facts, call)
        if product is not None:
            counts.on_meta += 1
            return [product]
    on_host = (
        on_host or facts.name in INFERRED_ON_HOST or _library_chooses_layout(facts, call) or _is_bool_power(facts, call)
    )
    risky = may_end_process(facts, call)
    if not on_host and not facts.mutable and not risky and _has_loose_strides(facts, call):
        with contextlib.suppress(Exception):  # such as a division of integers by zeros
            return infer(facts, call, counts, on_host=True)
    where = "cpu" if on_host else "meta"
    if on_host:
        counts.on_host += 1
    else:
        counts.on_meta += 1
    if with_scalars:
        call = Call(*tree_map(_scalar_on_meta, (call.args, call.kwargs)))
    args = [_without_data(a, where) for a in call.args]
    kwargs = {k: _without_data(v, where) for k, v in call.kwargs.items()}
    ask_host = facts.name in RESIZED_ON_HOST and not on_host
    silently = bool(facts.out_args) and (
        ask_host
        or facts.name == BROADCAST_WITH_OUT
        or facts.op.overloadpacket.__name__ in RESIZE_SILENTLY
        or must_fit(facts, call)
    )
    try:
        result = _result(facts, args, kwargs, where, silently)
    except NotImplementedError as e:
        if on_host:
            raise
        raise NoMetaKernelError from e
    except Exception:
        # The host raises the CPU kernel's error. Meta kernels have other error texts, and refuse some calls that the CPU accepts.
        if on_host or with_scalars or risky or not _small(call):
            raise
        if any(_is_host_scalar(t) for t in tree_leaves((call.args, call.kwargs))):
            # Some meta kernels refuse a host tensor. The host is not asked first, because it cannot divide integers by zeros.
            with contextlib.suppress(Exception):
                return infer(facts, call, counts, with_scalars=True)
        return infer(facts, call, counts, on_host=True)
    if facts.out_args:
        try:
            check_outs(facts, call, kwargs)
        except ResizeOutError as e:
            if ask_host and _small(call):
                return infer(facts, call, counts, on_host=True)
            composed = facts.name in _COMPOSED_OF_COMPLEX and call.args[0].is_complex()
            if (is_iterated(facts) or facts.name == _ADDR) and len(e.sizes) == 1 and not on_host and not composed:
                ((name, (sizes, strides)),) = e.sizes.items()
                raise ResizeOutError({name: (sizes, _iterated_strides(facts, call, sizes, strides))}) from None
            raise
    if facts.mutable and all(name is not None for name in facts.returns_written):
        return []
    fresh = _fresh_of(facts, result)
    _correct(facts, call, args, kwargs, where, fresh)
    return fresh


def _joined(call: Call) -> Tensor | None:
    """The result of `cat` for tensors of one dtype that fit; None: the meta kernel must decide.

    Its meta kernel, in Python, takes ten times as long. Each token of a generation makes one such call with new shapes.
    """
    tensors = call.args[0]
    dim = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)
    if not tensors or not all(isinstance(t, Tensor) and raw_device(t).type == "wooly" for t in tensors):
        return None
    first = tensors[0]
    n, dtype = first.dim(), first.dtype
    if type(dim) is not int or not -n <= dim < n or dtype.is_complex:
        return None
    at, sizes = dim % n, list(first.shape)
    sizes[at] = 0
    for t in tensors:
        of_t = list(t.shape)
        if len(of_t) != n or t.dtype is not dtype:
            return None
        size, of_t[at] = of_t[at], sizes[at]
        if of_t != sizes:
            return None
        sizes[at] += size
    if not any(suggested_format(t) is torch.contiguous_format for t in tensors):
        return None
    return torch.empty(sizes, dtype=dtype, device="meta")


def _grouped_product(facts: OpFacts, call: Call) -> Tensor | None:
    """The result of a product of groups; None: the library refuses the call. Its meta kernel knows bfloat16 only."""
    left, right, ends = call.args[0], call.args[1], _given(facts, call, "offs", None)
    bias, dtype = _given(facts, call, "bias", None), _given(facts, call, "out_dtype", None)
    flat = [t.dim() == 2 for t in (left, right)]
    if (
        not {left.dim(), right.dim()} <= {2, 3}
        or left.dtype is not right.dtype
        or left.dtype not in (torch.float32, *_WIDENED)
        or bias is not None
        or dtype not in (None, left.dtype)
        or any(flat) is not isinstance(ends, Tensor)
        or not all(map(_is_aligned, (left, right)))
        or left.shape[-1] != right.shape[-2]
    ):
        return None
    groups = [t.shape[0] for t in (left, right) if t.dim() == 3]
    if isinstance(ends, Tensor):
        if ends.dtype is not torch.int32 or ends.dim() != 1:
            return None
        groups.append(ends.shape[0])
    if any(n != groups[0] for n in groups):
        return None
    sizes: tuple[int, ...] = left.shape[-2], right.shape[-1]
    if flat[0] is flat[1]:
        sizes = groups[0], *sizes
    whole = 16 // left.itemsize  # rows begin at multiples of 16 bytes
    padded = (*sizes[:-1], -(-sizes[-1] // whole) * whole)
    return torch.empty_strided(sizes, contiguous_strides(padded), dtype=left.dtype, device="meta")


def _is_aligned(t: Tensor) -> bool:
    """Whether rows or columns of matrices are contiguous and begin at multiples of 16 bytes."""
    whole, (rows, columns), (down, right) = 16 // t.itemsize, t.shape[-2:], t.stride()[-2:]
    if down == 1 and right >= max(1, rows):
        return right % whole == 0
    return right == 1 and down >= max(1, columns) and down % whole == 0


def _infer_extension(facts: OpFacts, call: Call, counts: Inferences) -> list[Tensor | None]:
    """Infer the results of an extension operator with its fake kernel.

    Raises:
        NoMetaKernelError: it has no fake kernel, or the shapes of its results depend on data.
    """
    counts.on_meta += 1

    def with_fakes(fake: Callable[[Tensor], Tensor]) -> Any:
        def convert(a: Any) -> Any:
            if isinstance(a, Tensor):
                return fake(a) if raw_device(a).type == "wooly" else a
            if isinstance(a, (list, tuple)):
                return [convert(x) for x in a]
            return torch.device("cpu") if isinstance(a, torch.device) else a

        with no_autocast():
            return facts.op(*[convert(a) for a in call.args], **{k: convert(v) for k, v in call.kwargs.items()})

    found = fake_results(with_fakes)
    if facts.mutable and all(name is not None for name in facts.returns_written):
        return []
    if found is None or found[1]:
        raise NoMetaKernelError
    return [
        t
        if t is None
        else torch.empty_strided([int(n) for n in t.shape], [int(n) for n in t.stride()], dtype=t.dtype, device="meta")
        for t in _fresh_of(facts, found[0])
    ]


def infer_differentiated(
    facts: OpFacts,
    call: Call,
    places: tuple[int, ...],
    wanted: tuple[int, ...],
    grads: tuple[Tensor | None, ...] | None,
) -> list[Tensor]:
    """Infer the results of a differentiated call, or its gradients, as meta tensors.

    The layout of a composite operator's results depends on which arguments require a gradient.

    Args:
        facts: the operator.
        call: the arguments.
        places: index among the distinct tensors, for each tensor argument. A tensor that is passed twice has one index.
        wanted: indices of the distinct tensors that require a gradient.
        grads: gradients of the results, to infer the gradients of the arguments; None: infer the results.
    """
    place = iter(places)
    distinct: dict[int, Tensor] = {}

    def to_meta(a: Any) -> Any:
        if isinstance(a, Tensor) and raw_device(a).type == "wooly":
            k = next(place)
            if k not in distinct:
                m = torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="meta")
                distinct[k] = m.requires_grad_(k in wanted)
            return distinct[k]
        return [to_meta(x) for x in a] if isinstance(a, (list, tuple)) else a

    with torch.enable_grad(), unobserved_graph():
        result = call_operator(
            facts, [to_meta(a) for a in call.args], {k: to_meta(v) for k, v in call.kwargs.items()}, "meta"
        )
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        if grads is None:
            return results
        given = [
            (t, torch.empty_strided(g.shape, g.stride(), dtype=g.dtype, device="meta"))
            for t, g in zip(results, grads, strict=True)
            if g is not None
        ]
        leaves = [distinct[k] for k in wanted]
        found = torch.autograd.grad([t for t, _ in given], leaves, [g for _, g in given], allow_unused=True)
    # For a tensor without a gradient, the executor returns zeros in the tensor's shape.
    return [
        leaf.detach().as_strided(leaf.shape, dense_strides(tuple(leaf.shape), leaf.stride())) if g is None else g
        for leaf, g in zip(leaves, found, strict=True)
    ]


def _iterated_strides(facts: OpFacts, call: Call, sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides that ATen's iterator gives to a new result of these sizes. Meta kernels make a resized `out=` contiguous.

    The host's iterator decides by the layouts of the operands, in their order. `strides` are for operands that it does not take.
    """
    read = [t for t in tree_leaves(call.args) if isinstance(t, Tensor)]
    if facts.name == _ADDR:
        read = [read[0], read[1][:, None], read[2][None, :]]
    if all(t.is_contiguous() for t in read) or not 1 <= len(read) <= 3 or not _small(call):
        return strides
    first, *others = [torch.empty_strided(t.shape, t.stride(), dtype=torch.int8, device="cpu") for t in read]
    found = torch.addcmul(first, *others) if len(others) == 2 else torch.add(first, others[0] if others else first)
    return found.stride() if tuple(found.shape) == sizes else strides


def _small(call: Call) -> bool:
    return sum([t.numel() for t in tensors_of(call)]) <= _STAND_IN_LIMIT


def _without_data(a: Any, where: str) -> Any:
    """Replace device tensors in an argument by meta tensors, or by host tensors of zeros."""
    if isinstance(a, Tensor):
        if raw_device(a).type != "wooly":
            return a
        m = torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=where)
        return seen_as(a, m if where == "meta" else m.zero_())
    if isinstance(a, (list, tuple)):
        return [_without_data(x, where) for x in a]
    if isinstance(a, torch.device):
        return torch.device(where)
    return a


def _is_host_scalar(a: Any) -> bool:
    return isinstance(a, Tensor) and a.dim() == 0 and raw_device(a).type == "cpu"


def _scalar_on_meta(a: Any) -> Any:
    return torch.empty((), dtype=a.dtype, device="meta") if _is_host_scalar(a) else a


def _result(facts: OpFacts, args: list[Any], kwargs: dict[str, Any], where: str, silently: bool) -> Any:
    if not silently:
        return call_operator(facts, args, kwargs, where)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call_operator(facts, args, kwargs, where)


def _fresh_of(facts: OpFacts, result: Any) -> list[Tensor | None]:
    """The results of an operator that are not arguments."""
    flat = list(result) if isinstance(result, (list, tuple)) else [result]
    fresh: list[Tensor | None] = []
    names = facts.returns_written if len(flat) == facts.n_returns else (None,) * len(flat)
    for t, name in zip(flat, names, strict=True):
        if name is not None:
            continue
        if t is not None and not isinstance(t, Tensor):
            raise NoMetaKernelError
        fresh.append(t)
    return fresh


def _correct(
    facts: OpFacts, call: Call, args: list[Any], kwargs: dict[str, Any], where: str, fresh: list[Tensor | None]
) -> None:
    """Correct layout and dtype of inferred results to those of the CPU kernel, in place."""
    if facts.name == "aten.convolution.default" and where == "meta" and fresh[0] is not None:
        fresh[0] = _in_format(fresh[0], _convolution_format(call.args[:2]))
    if facts.name == _CONVOLUTION_BACKWARD and where == "meta":
        # Before torch 2.13, the meta kernel decides by the gradient of the output, too.
        both = _convolution_format(call.args[1:3])
        empty = [t if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in fresh[:2]]
        fresh[:2] = [t if t is None else t.to(memory_format=both) for t in empty]
    if facts.name == "aten.nonzero_static.default" and fresh[0] is not None:
        fresh[0] = fresh[0].contiguous()
    if where == "meta" and torch.Tag.pointwise in facts.op.tags:
        halves = [t for t in tensors_of(call) if t.dtype in _WIDENED]
        if any(
            overlaps(t) for t in halves
        ):  # meta kernels widen these tensors first, which gives expanded tensors a new layout
            wide = call_operator(facts, tree_map(_wide, args), tree_map(_wide, kwargs), where)
            for t, w in zip(fresh, tree_leaves(wide), strict=False):
                if t is not None and t.shape == w.shape:
                    t.as_strided_(w.shape, w.stride())
    if facts.name in _ITERATED and where == "meta" and fresh[0] is not None:
        iterated = [a for a in args if isinstance(a, Tensor)]
        if len(iterated) == 2:  # else an operand is a number
            layout = torch.add(*iterated)
            fresh[0] = torch.empty_strided(layout.shape, layout.stride(), dtype=fresh[0].dtype, device=where)
    if facts.name == _ATTENTION and fresh[1] is not None:  # before torch 2.13, the meta kernel says float32
        fresh[1] = fresh[1].to(torch.float64 if call.args[0].dtype is torch.float64 else torch.float32)
    if facts.name == _WEIGHT_NORM and fresh[1] is not None and fresh[1].dtype in _WIDENED:
        fresh[1] = fresh[1].float()  # the meta kernel keeps float16, and then the gradient's kernel refuses the norm
    if facts.name == _MULTI_HEAD and not _given(facts, call, "need_weights", True):
        fresh[1] = None  # the meta kernel says an empty tensor
    if facts.name in _MASKED:
        at = facts.positions["output_mask"]
        mask = call.args[at] if at < len(call.args) else call.kwargs["output_mask"]
        fresh[:] = [t if wanted else None for t, wanted in zip(fresh, mask, strict=True)]
    complex_angle = facts.name == _ANGLE and call.args[0].is_complex()
    if (facts.name in _CONTIGUOUS or complex_angle) and fresh[0] is not None:
        fresh[0] = _in_format(fresh[0], torch.contiguous_format)
    if facts.name in _NORMS:
        fresh[1:] = [t if t is None else t.to(_statistics_dtype(call)) for t in fresh[1:]]


def _given(facts: OpFacts, call: Call, name: str, default: Any) -> Any:
    """An argument of a call."""
    at = facts.positions[name]
    return call.args[at] if at < len(call.args) else call.kwargs.get(name, default)


def _wide(a: Any) -> Any:
    return a.to(torch.float32).as_strided(a.shape, a.stride()) if isinstance(a, Tensor) and a.dtype in _WIDENED else a


def _in_format(t: Tensor, layout: torch.memory_format) -> Tensor:
    """A new tensor like `t` in a layout, also with the strides of that layout in dimensions of size 1."""
    return torch.empty(t.shape, dtype=t.dtype, device=t.device, memory_format=layout)


def _convolution_format(tensors: Sequence[Tensor]) -> torch.memory_format:
    """Layout of a convolution's results on the CPU: channels last if input or weight is. The meta kernel gives another layout."""
    formats = {suggested_format(t) for t in tensors}
    return torch.channels_last if torch.channels_last in formats else torch.contiguous_format


def _statistics_dtype(call: Call) -> torch.dtype:
    """Dtype of a norm's statistics on the CPU: float32 if input and weights differ in dtype, else the dtype of the input."""
    found = tensors_of(call)
    return found[0].dtype if all(t.dtype is found[0].dtype for t in found) else torch.float32


def _library_chooses_layout(facts: OpFacts, call: Call) -> bool:
    """Whether the library chooses another layout than the meta kernel says.

    It does so for 1D and 3D convolutions with strides other than a contiguous tensor's. Strides of dimensions of size 1 count,
    too. A permuted input of a 1D convolution does not: the library makes it contiguous. It also does for paddings of
    channels-last tensors.
    """
    if facts.name in _KEEP_CHANNELS_LAST:
        return any(suggested_format(t) is not torch.contiguous_format for t in tensors_of(call)) and _small(call)
    if not facts.name.startswith("aten.convolution"):
        return False
    strided = [t for t in tensors_of(call) if t.dim() in (3, 5) and t.stride() != contiguous_strides(t.shape)]
    if facts.name != "aten.convolution.default":
        return bool(strided)
    return any(t.dim() == 5 or t is call.args[1] or t.is_contiguous() for t in strided)


def _is_bool_power(facts: OpFacts, call: Call) -> bool:
    """Whether a call is a power of bools with a bool as exponent, which is bool. The meta kernel says int64."""
    if facts.name not in _POWERS:
        return False
    bases, exponents = [a if isinstance(a, (list, tuple)) else (a,) for a in call.args[:2]]
    return any(t.dtype is torch.bool for t in bases) and any(isinstance(a, bool) for a in exponents)


def may_end_process(facts: OpFacts, call: Call) -> bool:
    """Whether a call may end the process that runs it.

    Some kernels divide by the size of an empty tensor. That of group norms writes the gradient of a channels-last input also if
    nobody asks for it, to memory that nobody has made.
    """
    if facts.name == _GROUP_NORM_BACKWARD:
        asked = _given(facts, call, "output_mask", (True,))
        return not asked[0] and suggested_format(call.args[1]) is not torch.contiguous_format
    return facts.op.overloadpacket.__name__ in _DIVIDING and not all(t.numel() for t in tensors_of(call))


def _has_loose_strides(facts: OpFacts, call: Call) -> bool:
    """Whether the result's layout depends on strides of dimensions of size 1, which meta kernels treat in another way.

    ATen's iterator gives a result the strides of a contiguous tensor if all operands are contiguous, which does not depend on
    strides of dimensions of size 1. Meta kernels keep these strides, and a later convolution would take another kernel for them.
    """
    tags = facts.op.tags
    if (torch.Tag.pointwise not in tags and facts.name not in _STRICT) or torch.Tag.nondeterministic_seeded in tags:
        return False
    return any(1 in t.shape and t.stride() != contiguous_strides(t.shape) for t in tensors_of(call)) and _small(call)


def call_operator(facts: OpFacts, args: list[Any], kwargs: dict[str, Any], where: str) -> Any:
    """Call the operator. If it refuses Python numbers in place of tensors, convert the numbers to tensors and call again.

    The autocast of the script, which may be that of the CPU, does not hold for the call.
    """
    with no_autocast():
        return _call_operator(facts, args, kwargs, where)


def _call_operator(facts: OpFacts, args: list[Any], kwargs: dict[str, Any], where: str) -> Any:
    if facts.host_at is not None:
        args[facts.host_at] = torch.tensor(args[facts.host_at], device="cpu")
    like = next((a for a in args if isinstance(a, Tensor)), None)
    numbers = [i for i, a in enumerate(args) if isinstance(a, (bool, int, float, complex)) and facts.wants_tensor[i]]
    try:
        return facts.op(*args, **kwargs)
    except RuntimeError as e:
        if not numbers or like is None or "with a bool tensor" in str(e):  # a number is no bool after the conversion
            raise
    for i in numbers:
        dtype = torch.result_type(torch.empty((0,) * min(1, like.dim()), dtype=like.dtype, device="cpu"), args[i])
        args[i] = torch.tensor(args[i], dtype=dtype, device=where)
    return facts.op(*args, **kwargs)


def seen_as(a: Tensor, t: Tensor) -> Tensor:
    """`t`, as a conjugate or negative view if `a` is such a view."""
    t = t.conj() if a.is_conj() else t
    return neg_view(t) if a.is_neg() else t
