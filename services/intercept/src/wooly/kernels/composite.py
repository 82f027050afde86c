"""Kernels for composite operators that PyTorch decomposes differently for an unknown device than for the CPU.

For convolution, attention and LSTM, ATen's choice depends on the device type. The kernels here make the choice of the executor's
library, so that the results have the same bits. `linear` is recorded as one instruction instead of five.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wooly.devices import mixed_devices
from wooly.kernels.schema import unsupported
from wooly.kernels.trials import stand_in
from wooly.storage import dense_strides, span
from wooly.torch_private import (
    OpOverload,
    OpOverloadPacket,
    SDPBackend,
    alert_not_deterministic,
    attention_choice,
    convolution_with_flags,
    dispatch_modes,
    in_trace,
    is_zero_tensor,
    may_use_flash,
    may_use_math,
    neg_view,
    raw_device,
    schema_of,
    warn_of_resize,
)

aten = torch.ops.aten
Kernel = Callable[..., Any]


_PLAIN = (Tensor, torch.nn.Parameter)


def is_traced(t: Tensor) -> bool:
    """Whether PyTorch traces the call (fake tensors, dispatch modes). Then only operators that PyTorch knows may be called."""
    return t.__class__ not in _PLAIN or dispatch_modes() > 0


def linear(record: Kernel) -> Kernel:
    """`aten.linear` under autograd: one instruction without gradients, PyTorch's decomposition with gradients."""
    decompose = aten.linear.default.decompose

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        if torch.is_grad_enabled() and (
            x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
        ):
            return decompose(x, weight, bias)
        if is_traced(x) or is_traced(weight):
            return decompose(x, weight, bias)
        if weight.requires_grad and not _folds(x):
            return decompose(
                x, weight, bias
            )  # ATen's choice of the product depends on `requires_grad` also without gradients
        if x.is_complex() or x.is_neg() or weight.is_neg() or (bias is not None and bias.is_neg()):
            return decompose(x, weight, bias)  # conjugate and negative views are not resolved yet
        return record(x, weight, bias)

    return run


def _folds(x: Tensor) -> bool:
    """Whether the strides permit a view as a matrix with the last dimension as columns. `aten.matmul` checks the same."""
    sizes, strides = x.shape, x.stride()
    return all(strides[i] == strides[i + 1] * sizes[i + 1] for i in range(len(sizes) - 2))


def convolution(record: Kernel) -> Kernel:
    """`aten.convolution`. `torch.jit.trace` cannot record it, so a traced call becomes `aten._convolution`, as on CUDA."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if in_trace():
            return convolution_with_flags(*args, **kwargs, **_CONVOLUTION_FLAGS)
        return record(*args, **kwargs)

    return run


#: Arguments of `aten._convolution` that `aten.convolution` does not have. They choose among CUDA's algorithms.
_CONVOLUTION_FLAGS = {"benchmark": False, "deterministic": False, "cudnn_enabled": True, "allow_tf32": True}


def flagged_convolution(record: Kernel) -> Kernel:
    """`aten._convolution`: `aten.convolution` with four more arguments, which the executor ignores."""
    return lambda *args, **kwargs: record(*args[:9], **{k: v for k, v in kwargs.items() if k not in _CONVOLUTION_FLAGS})


def plain(t: Tensor) -> Tensor:
    """A tensor with the same values that is not a conjugate view, not a negative view and not a zero tensor without memory."""
    if is_zero_tensor(t):
        return torch.zeros(t.shape, dtype=t.dtype, device=raw_device(t))
    laid = t
    if t.is_conj():
        t = torch.conj_physical(t.conj())
    if t.is_neg():
        t = torch.neg(neg_view(t))
    if t is not laid and t.stride() != laid.stride():
        # The CPU clones, which also keeps the strides of dimensions of size 1. Matrix products depend on these strides.
        kept = dense_strides(laid.shape, laid.stride())
        if all(n == 1 or a == b for n, a, b in zip(laid.shape, t.stride(), kept, strict=True)):
            t = t.as_strided(laid.shape, kept)
    return t


#: Operators (mostly matrix products) whose kernels read conjugate views without a copy, because BLAS can conjugate operands.
_CONJUGATING = frozenset(
    {"addmm", "addmm_", "baddbmm", "baddbmm_", "bmm", "dot", "linalg_solve_triangular", "mm", "vdot"}
)
#: Operators whose kernels also read negative views without a copy.
_NEGATING = frozenset({"linalg_solve_triangular"})


def _is_unresolved(a: Any) -> bool:
    return isinstance(a, Tensor) and (a.is_conj() or a.is_neg() or is_zero_tensor(a))


def on_plain(op: OpOverload, kernel: Callable[[tuple[Any, ...]], Kernel]) -> Kernel:
    """Wrap an operator to which PyTorch passes conjugate and negative views. Views that its kernel cannot read are resolved
    first.

    Args:
        op: the operator.
        kernel: makes its kernel from, per positional argument, whether it is a conjugate view and whether it is a negative view.
    """
    record = kernel(())
    kernels: dict[tuple[Any, ...], Kernel] = {}
    conjugates = op.overloadpacket.__name__ in _CONJUGATING
    negates = op.overloadpacket.__name__ in _NEGATING
    schema = schema_of(op).arguments
    written = frozenset(a.name for a in schema if a.alias_info is not None and a.alias_info.is_write)

    def resolve(a: Any, written: bool) -> Any:
        if isinstance(a, list):
            return [resolve(x, written) for x in a]
        if not isinstance(a, Tensor):
            return a
        if written or is_zero_tensor(a) or (a.is_conj() and not conjugates) or (a.is_neg() and not negates):
            return plain(a)
        return a

    def run_resolved(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = tuple([resolve(a, declared.name in written) for a, declared in zip(args, schema, strict=False)])
        named = {k: resolve(a, k in written) for k, a in kwargs.items()}
        pattern = tuple([isinstance(a, Tensor) and (a.is_conj(), a.is_neg()) for a in own])
        run = kernels.get(pattern)
        if run is None:
            run = kernels[pattern] = kernel(pattern) if any(map(_is_unresolved, own)) else record
        result = run(*own, **named)
        for name, a, b in [
            *[(declared.name, a, b) for declared, a, b in zip(schema, args, own, strict=False)],
            *[(k, a, named[k]) for k, a in kwargs.items()],
        ]:
            if name in written and isinstance(a, Tensor) and a is not b:
                if a.shape != b.shape:
                    a.resize_(b.shape)
                a.copy_(b)
                result = a if result is b else result
        return result

    def run(*args: Any, **kwargs: Any) -> Any:
        for a in args:
            if a.__class__ is list or _is_unresolved(a):
                return run_resolved(args, kwargs)
        if kwargs and any(_is_unresolved(a) for a in kwargs.values()):
            return run_resolved(args, kwargs)
        return record(*args, **kwargs)

    return run


#: Operators that also accept indices on the host.
INDEXED = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"})


def with_host_indices(record: Kernel, op: OpOverload) -> Kernel:
    """Wrap an indexing operator so that index tensors may be on the host, as in CUDA. They are copied to the device.

    A number on the device may be put into a tensor on the host.
    """

    def run(t: Tensor, indices: list[Tensor | None], *args: Any, **kwargs: Any) -> Any:
        if t.is_cpu and all(i is None or i.is_cpu for i in indices) and args and not args[0].dim():
            return op(t, indices, args[0].cpu(), *args[1:], **kwargs)
        for i in indices:
            if i is not None and i.is_cpu:
                return record(t, _on_device_of(t, indices), *args, **kwargs)
        if t.is_cpu:
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        return record(t, indices, *args, **kwargs)

    return run


#: Operators that write one number into a tensor. The number may be on another device than the tensor, as in CUDA.
FILLING = frozenset({"fill_.Tensor", "index_fill_.int_Tensor", "masked_fill_.Tensor"})


def with_host_target(record: Kernel, op: OpOverload) -> Kernel:
    """Wrap an operator that writes a number into a tensor, so that the tensor may be on the host and the number on the device."""

    def run(t: Tensor, *args: Any) -> Any:
        if t.is_cpu and not args[-1].dim():
            return op(t, *args[:-1], args[-1].cpu())
        return record(t, *args)

    return run


def _on_device_of(t: Tensor, indices: list[Tensor | None]) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    for i in indices:
        if i is None or not i.is_cpu:
            found.append(i)
        elif i.dtype in (torch.bool, torch.uint8) and i.dim() and i.shape == t.shape[len(found) : len(found) + i.dim()]:
            # The client knows the values of a mask on the host. As indices, they give a result shape that is known without
            # waiting.
            found += [n.to(raw_device(t)) for n in i.nonzero().unbind(1)]
        else:
            found.append(i.to(raw_device(t)))
    return found


def conj_physical_(t: Tensor) -> Tensor:
    """`aten.conj_physical_`, for which ATen has a CPU and a CUDA kernel but no generic kernel."""
    return t.copy_(torch.conj_physical(t)) if t.is_complex() else t


def _widened(op: OpOverloadPacket) -> Kernel:
    """A matrix product with an `out_dtype` that is wider than its factors. This kernel widens the factors first."""

    def run(*args: Any, **kwargs: Any) -> Tensor:
        *factors, dtype = args
        return op(*[t.to(dtype) for t in factors], **kwargs)  # type: ignore[no-any-return]

    return run


def _widened_into(op: OpOverloadPacket) -> Kernel:
    run = _widened(op)

    def into(*args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        result = run(*args, **kwargs)
        return out.resize_(result.shape).copy_(result)

    return into


def nonzero_into(t: Tensor, *, out: Tensor) -> Tensor:
    """`aten.nonzero.out`. Only the device knows the size of the result, so `out` is resized after the result is there."""
    _require_one_device(t, out)
    if out.dtype is not torch.int64:
        raise RuntimeError(
            f"nonzero: Expected out tensor to have scalar type Long but got scalar type{_scalar_type(out)}"
        )
    return _resized(out, aten.nonzero(t), laid_out=True)


def masked_select_into(t: Tensor, mask: Tensor, *, out: Tensor) -> Tensor:
    """`aten.masked_select.out`. Only the device knows the size of the result, so `out` is resized after the result is there."""
    _require_one_device(t, out)
    if mask.dtype is not torch.bool:
        raise RuntimeError("masked_select: expected BoolTensor for mask")
    if out.dtype is not t.dtype:
        raise RuntimeError("masked_select(): self and result must have the same scalar type")
    return _resized(out, aten.masked_select(t, mask))


def assert_async(condition: Tensor, message: str = "an assertion of the script failed") -> None:
    """`aten._assert_async`. If the condition is false, a later operation raises the error, as on CUDA."""
    if condition.numel() != 1:
        raise RuntimeError(
            "Boolean value of Tensor with "
            + ("no values" if not condition.numel() else "more than one value")
            + " is ambiguous"
        )
    aten._functional_assert_async.msg(condition, message, condition.new_empty(0))


def rows_to_compressed(rows: Tensor, size: int, *, out_int32: bool = False) -> Tensor:
    """`aten._convert_indices_from_coo_to_csr`: for each row and the end, the number of elements in the rows before.

    The library's kernel uses the indices as addresses without a check, so executors do not offer it.

    Args:
        rows: the sorted row indices, one dimension.
        size: the number of rows.
    """
    bounds = torch.arange(size + 1, dtype=rows.dtype, device=rows.device)
    found: Tensor = aten.searchsorted.Tensor(rows.contiguous(), bounds, out_int32=out_int32)
    return found


def compressed_to_coordinates(
    compressed: Tensor, plain: Tensor, *, out_int32: bool = False, transpose: bool = False
) -> Tensor:
    """`aten._convert_indices_from_csr_to_coo`: indices of rows and columns, int64 or int32 of shape (2, elements).

    Args:
        compressed: for each row, where its elements begin, and the end; one dimension.
        plain: the column of each element.
        transpose: rows and columns are exchanged in the result.
    """
    dtype = torch.int32 if out_int32 else torch.int64
    if compressed.dim() != 1:
        raise unsupported("aten._convert_indices_from_csr_to_coo.default", "the indices are a batch")
    places = torch.arange(plain.numel(), dtype=compressed.dtype, device=compressed.device)
    rows = aten.searchsorted.Tensor(compressed[1:].contiguous(), places, right=True)
    pair = [rows.to(dtype), plain.to(dtype)]
    return torch.stack(pair[::-1] if transpose else pair)


def mode_into(
    t: Tensor, dim: int = -1, keepdim: bool = False, *, values: Tensor, indices: Tensor
) -> tuple[Tensor, Tensor]:
    """`aten.mode.values`. ATen's own code refuses tensors that are not on the CPU or on CUDA."""
    _require_one_device(t, values, indices)
    if values.dtype is not t.dtype:
        raise RuntimeError(
            f"expected scalar type '{_scalar_type(t)}' but got '{_scalar_type(values)}' for values output"
        )
    if indices.dtype is not torch.int64:
        raise RuntimeError(f"expected scalar type 'Long' but got '{_scalar_type(indices)}' for indices output")
    found = aten.mode(t, dim, keepdim)
    if values.shape != found[0].shape or indices.shape != found[1].shape:
        # The CPU kernel's warnings contain shapes that only the CPU kernel knows, so let it warn.
        outs = {"values": stand_in(values), "indices": stand_in(indices)}
        aten.mode.values(stand_in(t), dim, keepdim, **outs)
    return _resized(values, found[0], warn=False), _resized(indices, found[1], warn=False)


def lstsq_into(
    t: Tensor,
    b: Tensor,
    rcond: float | None = None,
    *,
    driver: str | None = None,
    solution: Tensor,
    residuals: Tensor,
    rank: Tensor,
    singular_values: Tensor,
) -> tuple[Tensor, ...]:
    """`aten.linalg_lstsq.out`. Only the device knows the number of residuals, so the outputs are resized afterwards."""
    outs = {"solution": solution, "residuals": residuals, "rank": rank, "singular_values": singular_values}
    if any(o.dtype != (torch.int64 if k == "rank" else t.dtype) for k, o in outs.items()):
        # The CPU kernel raises its error for wrong dtypes before it reads values.
        stand_ins = [torch.eye(*a.shape[-2:], dtype=a.dtype).expand(a.shape).clone() for a in (t,) if a.dim() > 1]
        aten.linalg_lstsq.out(
            *(stand_ins or [stand_in(t)]),
            stand_in(b),
            rcond,
            driver=driver,
            **{k: stand_in(o) for k, o in outs.items()},
        )
    found = aten.linalg_lstsq(t, b, rcond, driver=driver)
    return tuple([_resized(o, r) for o, r in zip(outs.values(), found, strict=True)])


def _require_one_device(*tensors: Tensor) -> None:
    """Check that results go to the device of the operand.

    Raises:
        RuntimeError: they do not; the message is PyTorch's.
    """
    if len({raw_device(t) for t in tensors}) > 1:
        raise mixed_devices(tensors)


def _resized(out: Tensor, result: Tensor, *, warn: bool = True, laid_out: bool = False) -> Tensor:
    if out.shape != result.shape:
        if warn:
            warn_of_resize(out, result.shape)
        laid_out = laid_out or out.numel() == 0
        if laid_out:
            out.resize_([span(tuple(result.shape), result.stride())]).as_strided_(result.shape, result.stride())
        else:
            out.resize_(result.shape)
    return out.copy_(result)


def _scalar_type(t: Tensor) -> str:
    """ATen's name of a tensor's dtype, such as ``Float``."""
    return torch.empty(0, dtype=t.dtype).type().removeprefix("torch.").removesuffix("Tensor")


def embedding_bag_backward(record: Kernel) -> Kernel:
    """Wrap the gradient of `embedding_bag`. A sparse gradient consists of dense parts, which ATen's composite operator makes."""

    def run(
        grad: Tensor, indices: Tensor, offsets: Tensor, offset2bag: Tensor, bag_size: Tensor, max_indices: Tensor,
        num_weights: int, scale_grad_by_freq: bool, mode: int, sparse: bool, *rest: Any, **named: Any,
    ) -> Tensor:  # fmt: skip
        counts = (num_weights, scale_grad_by_freq, mode)
        if not sparse:
            told = (grad, indices, offsets, offset2bag, bag_size, max_indices, *counts, sparse)
            return record(*told, *rest, **named)  # type: ignore[no-any-return]
        # The forward does not compute `offset2bag` in its fast case. Here as there: the bag of each index, from the bags' begins.
        begins = offsets.new_zeros(indices.shape[0] + 1).index_add_(0, offsets, torch.ones_like(offsets))
        bag_of = (begins.cumsum(0) - 1)[:-1]
        made = aten._embedding_bag_sparse_backward
        return made(grad, indices, offsets, bag_of, bag_size, *counts, *rest, **named)  # type: ignore[no-any-return]

    return run


def histc(record: Kernel) -> Kernel:
    """`aten.histc`. CUDA also supports integers, but the CPU kernel does not, so integers are converted to doubles."""

    def run(t: Tensor, bins: int = 100, min: Any = 0, max: Any = 0) -> Any:
        if t.is_floating_point():
            alert_not_deterministic("_histc_cuda with floating point input")
            return record(t, bins, min, max)
        if t.is_complex() or t.dtype is torch.bool:
            return record(t, bins, min, max)
        return record(t.double(), bins, min, max).to(t.dtype)

    return run


def nansum(record: Kernel) -> Kernel:
    """`aten.nansum`. CUDA also supports complex numbers, but the CPU kernel does not, so numbers with NaN become zeros first."""

    def run(t: Tensor, *args: Any, **kwargs: Any) -> Any:
        return torch.where(t.isnan(), 0, t).sum(*args, **kwargs) if t.is_complex() else record(t, *args, **kwargs)

    return run


def batch_norm(record: Kernel, record_training: Kernel) -> Kernel:
    """`aten.native_batch_norm`, which writes the running statistics in training although its schema does not declare it.

    In training, this kernel records the operator `_native_batch_norm_legit`, which has the same kernel and declares the write. So
    a later read of the statistics gets the new values, and the compiler does not move the read before the write.
    """

    def run(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor | None,
        var: Tensor | None,
        *rest: Any,
        **outs: Any,
    ) -> Any:
        updates = rest[0] and mean is not None and var is not None
        return (record_training if updates else record)(x, weight, bias, mean, var, *rest, **outs)

    return run


def efficient_zero(size: Any, **options: Any) -> Tensor:
    """`aten._efficientzerotensor`, which derivatives use for zeros. Here it is an ordinary tensor of zeros."""
    return torch.zeros(size, **options)


#: Kernels for operators that each backend must implement itself.
KERNELS: dict[str, Kernel] = {
    "_assert_async": assert_async,
    "_assert_async.msg": assert_async,
    "_convert_indices_from_coo_to_csr": rows_to_compressed,
    "_convert_indices_from_csr_to_coo": compressed_to_coordinates,
    "_efficientzerotensor": efficient_zero,
    "conj_physical_": conj_physical_,
    "linalg_lstsq.out": lstsq_into,
    "masked_select.out": masked_select_into,
    "mode.values": mode_into,
    "nonzero.out": nonzero_into,
    **{f"{name}.dtype": _widened(getattr(aten, name)) for name in ("mm", "bmm", "addmm", "baddbmm")},
    **{f"{name}.dtype_out": _widened_into(getattr(aten, name)) for name in ("mm", "bmm", "addmm", "baddbmm")},
}

_flash = aten._scaled_dot_product_flash_attention_for_cpu.default
_attention_math = aten._scaled_dot_product_attention_math.default
_BACKENDS: Any = SDPBackend
_FLASH, _MATH = int(_BACKENDS.FLASH_ATTENTION), int(_BACKENDS.MATH)
_choices: dict[tuple[Any, ...], int] = {}


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`aten.scaled_dot_product_attention`: one instruction if the CPU would use its fused kernel, else the decomposition."""
    grad = torch.is_grad_enabled()
    needs = grad and (query.requires_grad or key.requires_grad or value.requires_grad)
    mask_needs = attn_mask is not None and grad and attn_mask.requires_grad
    signature = (
        *[(t.dtype, t.shape, t.stride()) for t in (query, key, value)],
        None if attn_mask is None else (attn_mask.dtype, attn_mask.shape, attn_mask.stride()),
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        needs,
        mask_needs,
        may_use_flash(),
        may_use_math(),
    )
    traced = is_traced(query)
    choice = None if traced else _choices.get(signature)
    if traced:
        # Shapes may be symbolic, so PyTorch's choice is not available. Choose a kernel that is always correct.
        choice = _MATH if dropout_p or mask_needs or query.dim() != 4 else _FLASH
    elif choice is None:
        if len(_choices) > 16384:
            _choices.clear()
        inputs = (query, key, value, attn_mask)
        stand_ins: list[Any] = [None if t is None else _like(t, grad and t.requires_grad) for t in inputs]
        # Ask PyTorch for its choice with host tensors of the same kind. A wrong call raises PyTorch's own error here.
        choice = _choices[signature] = attention_choice(
            *stand_ins,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.where(attn_mask, torch.zeros((), dtype=query.dtype), -torch.inf)
    if choice == _FLASH:
        return _flash(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]  # type: ignore[no-any-return]
    return _attention_math(  # type: ignore[no-any-return]
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]


def cross_entropy(
    whole: Kernel,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """`aten.cross_entropy_loss`: ATen's two operators for class indices; one instruction for label smoothing or probabilities."""
    call = whole if label_smoothing or target.is_floating_point() else aten.cross_entropy_loss.default.decompose
    return call(logits, target, weight, reduction, ignore_index, label_smoothing)  # type: ignore[no-any-return]


def _like(t: Tensor, grad: bool) -> Tensor:
    """A host tensor with the same dtype, shape and strides. Its memory is never read or written."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).requires_grad_(grad)


@functools.cache
def _onednn_takes_bfloat16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def lstm_input(
    whole: Kernel,
    x: Tensor,
    hx: list[Tensor],
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`aten.lstm.input`: the CPU's fused layers if the CPU would use them, else one instruction by `whole`."""
    h0, c0 = [t.contiguous() for t in hx]
    fused = (
        torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and (x.dtype is torch.float32 or (x.dtype is torch.bfloat16 and _onednn_takes_bfloat16()))
        and x.numel() > 0
        and h0.shape[-1] == c0.shape[-1]
        and len(params) == (4 if has_biases else 2) * num_layers * (2 if bidirectional else 1)
    )
    if not fused:
        return whole(  # type: ignore[no-any-return]
            x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
        )
    return _fused_lstm(x, h0, c0, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)


def _fused_lstm(
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Call `mkldnn_rnn_layer` once per layer and direction. Each call has its own gradient."""
    lstm_mode = 2
    directions = 2 if bidirectional else 1
    per_layer = 4 if has_biases else 2
    layer_in = x.transpose(0, 1) if batch_first else x
    layer_in = layer_in.contiguous()
    hidden = h0.shape[2]
    hs, cs = [], []
    for layer in range(num_layers):
        outs = []
        for direction in range(directions):
            index = layer * directions + direction
            w = params[index * per_layer : (index + 1) * per_layer]
            if has_biases:
                biases = (w[2], w[3])
            else:
                biases = (w[0].new_zeros(w[0].shape[0]), w[0].new_zeros(w[0].shape[0]))
            out, h, c, _ = torch.mkldnn_rnn_layer(
                layer_in,
                w[0],
                w[1],
                *biases,
                h0[index],
                c0[index],
                direction == 1,
                [],
                lstm_mode,
                hidden,
                num_layers,
                has_biases,
                bidirectional,
                False,
                torch.is_grad_enabled(),  # the kernel uses only this flag, also in evaluation
            )
            outs.append(out)
            hs.append(h)
            cs.append(c)
        layer_in = outs[0] if directions == 1 else torch.cat(outs, outs[0].dim() - 1)
        if dropout != 0 and train and layer < num_layers - 1:
            layer_in = torch.dropout(layer_in, dropout, True)
    if batch_first:
        layer_in = layer_in.transpose(0, 1)
    return layer_in, torch.stack(hs, 0), torch.stack(cs, 0)
