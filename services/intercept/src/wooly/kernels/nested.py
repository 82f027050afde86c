"""Kernels of operators on nested tensors with the strided layout.

Such a tensor is an object with one dense tensor, its buffer, and with sizes, strides and offsets in host memory. Most of
PyTorch's kernels for nested host tensors only handle that object and call dense operators on the buffer, by the dispatcher.
Those run for device tensors as they are. The list is closed: other kernels would read through an address that does not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from wooly.torch_private import (
    OpOverload,
    all_aten_overloads,
    has_kernel,
    overload_name,
    redispatch_cpu,
    redispatch_nested_host,
    short_name,
)

aten = torch.ops.aten

#: Operators whose kernels for nested host tensors read no memory of the tensor.
_OF_OBJECTS = frozenset(
    (
        *(
            "_nested_tensor_size",
            "_nested_tensor_strides",
            "_nested_tensor_storage_offsets",
            "is_same_size",
            "is_pinned",
        ),
        *(
            "alias",
            "chunk",
            "clone",
            "copy_",
            "detach",
            "empty_like",
            "ones_like",
            "_to_copy",
            "values",
            "zero_",
            "cat",
        ),
        *("narrow", "select", "split_with_sizes", "squeeze", "transpose", "unbind", "unsqueeze", "view"),
        *("_nested_from_padded_and_nested_example", "_nested_select_backward", "to_padded_tensor"),
        *("value_selecting_reduction_backward", "fill_", "normal_"),
    )
)
#: Functions of elements, which these kernels compute on the buffer.
_OF_ELEMENTS = frozenset(
    (
        *(
            "abs",
            "abs_",
            "cos",
            "gelu",
            "gelu_",
            "gelu_backward",
            "isinf",
            "isnan",
            "isneginf",
            "isposinf",
            "logical_not",
        ),
        *(
            "logical_not_",
            "neg",
            "neg_",
            "relu",
            "relu_",
            "sgn",
            "sgn_",
            "silu",
            "silu_",
            "silu_backward",
            "sin",
            "sqrt",
        ),
        *(
            "tanh",
            "tanh_",
            "threshold_backward",
            "add",
            "add_",
            "div",
            "eq",
            "ge",
            "gt",
            "masked_fill",
            "mul",
            "mul_",
            "sub",
        ),
        *("where", "native_dropout", "native_dropout_backward", "all"),
    )
)
#: Those of two tensors.
_ARITHMETIC = frozenset(("add", "add_", "div", "eq", "mul", "mul_", "sub"))
#: Operators that compute on the parts, or on the padded tensor.
_OF_PARTS = frozenset(
    (
        *(
            "_safe_softmax",
            "_softmax",
            "_softmax_backward_data",
            "_nested_tensor_softmax_with_shape",
            "bmm",
            "embedding",
        ),
        *("linear", "linear_backward", "matmul", "matmul_backward", "_fused_sdp_choice"),
        *("_native_multi_head_attention", "_transformer_encoder_layer_fwd"),
    )
)
#: Operators that make a nested tensor of a dense one, or check its mask. Their kernels for host tensors read no memory, either.
_FROM_DENSE = (
    aten._nested_tensor_from_mask.default,
    aten._nested_tensor_from_mask_left_aligned.default,
    aten._nested_view_from_buffer.default,
)


def register_nested(library: torch.library.Library) -> None:
    """Register the kernels of nested device tensors, and those that make nested tensors of dense ones."""
    own = {aten.native_layer_norm.default: _layer_norm, aten.native_layer_norm_backward.default: _layer_norm_backward}
    own[aten._transform_bias_rescale_qkv.default] = _transform_bias_rescale_qkv
    for op, kernel in [*_redispatched(), *own.items()]:
        library.impl(short_name(op), kernel, "NestedTensorPrivateUse1")


def dense_kernels() -> dict[str, Callable[..., Any]]:
    """Kernels of dense device tensors, by the operator's name, whose results are nested or describe a nested tensor."""
    own: dict[str, Callable[..., Any]] = {
        "_nested_from_padded": _from_padded,
        "_transform_bias_rescale_qkv": _transform_bias_rescale_qkv,
        "_jagged_to_padded_dense_forward": _jagged_to_padded,
        "_padded_dense_to_jagged_forward": _padded_to_jagged,
    }
    return own | {short_name(op): redispatch_cpu(op) for op in _FROM_DENSE}


def _redispatched() -> Iterator[tuple[OpOverload, Callable[..., Any]]]:
    for op in all_aten_overloads():
        packet = op.overloadpacket.__name__
        if packet in _OF_OBJECTS | _OF_ELEMENTS | _OF_PARTS and has_kernel(op.name(), "NestedTensorCPU"):
            kernel = redispatch_nested_host(op)
            yield (op, _with_more(kernel) if packet in _ARITHMETIC and overload_name(op) == "Tensor" else kernel)


def _with_more(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel of two tensors that takes what C++ kernels do not: numbers as PyTorch passes them, and a row for each part."""

    def run(first: Any, second: Any, **kwargs: Any) -> Any:
        if not isinstance(first, Tensor):
            return kernel(_number(first, second), second, **kwargs)
        if not isinstance(second, Tensor):
            return kernel(first, _number(second, first), **kwargs)
        if first.is_nested and not second.is_nested and _is_row_per_part(first, second):
            second = _nested(_repeated(first, second), aten._nested_tensor_size(first))
            first = first.contiguous()
        return kernel(first, second, **kwargs)

    return run


def _is_row_per_part(nested: Tensor, dense: Tensor) -> bool:
    """Whether tensors are `[batch, *, width]` and `[batch, 1, width]`, or without the width: CUDA adds and multiplies them."""
    sizes = aten._nested_tensor_size(nested)
    if nested.dim() not in (2, 3) or dense.dim() != nested.dim() or dense.device != nested.device:
        return False
    return [*dense.shape[:2]] == [nested.size(0), 1] and bool(
        (sizes[:, 1:] == torch.tensor(dense.shape[2:], device="cpu")).all()
    )


def _repeated(nested: Tensor, rows: Tensor) -> Tensor:
    """The buffer of a nested tensor with the sizes of `nested`, all of whose parts consist of one row of `rows`."""
    lengths = aten._nested_tensor_size(nested)[:, 0].tolist()
    return torch.cat(
        [row.expand(length, *row.shape[1:]).reshape(-1) for row, length in zip(rows.unbind(), lengths, strict=True)]
    )


def _number(value: Any, other: Tensor) -> Tensor:
    """A number as a host tensor that leaves the dtype of the result as it is for a number, and loses no precision."""
    dtype = torch.result_type(torch.empty(1, dtype=other.dtype, device="cpu"), value)
    if dtype == other.dtype and dtype.is_floating_point:
        dtype = torch.float64
    return torch.scalar_tensor(value, dtype=dtype)


def _nested(buffer: Tensor, sizes: Tensor) -> Tensor:
    """A contiguous nested tensor of a buffer `[elements]` and host sizes `[parts, dimensions]`."""
    strides, offsets = aten._nested_compute_contiguous_strides_offsets(sizes)
    return aten._nested_view_from_buffer(buffer, sizes, strides, offsets)  # type: ignore[no-any-return]


def _from_padded(padded: Tensor, sizes: Tensor, fuse_transform_0213: bool = False) -> Tensor:
    """`aten._nested_from_padded`: drop the padding of each part. Nothing waits, because the sizes are in host memory."""
    if fuse_transform_0213:
        padded = padded.transpose(1, 2).flatten(2)
    if padded.dim() - 1 != sizes.size(1):
        raise RuntimeError(f"dim: {padded.dim()} target_size: {sizes.size(1)}")
    parts = list[Tensor]()
    for part, size in zip(padded.unbind(), sizes.tolist(), strict=True):
        for dim, length in enumerate(size):
            part = part.narrow(dim, 0, length)
        parts.append(part.reshape(-1))
    return _nested(torch.cat(parts) if parts else padded.new_empty(0), sizes)


def _rows(input: Tensor, normalized_shape: list[int]) -> Tensor:
    """The buffer of a nested tensor as `[rows, *normalized_shape]`. Raises RuntimeError as PyTorch does."""
    if not input.is_contiguous():
        raise RuntimeError("layer_norm needs a contiguous nested tensor")
    sizes = aten._nested_tensor_size(input)
    rest = sizes[:, -len(normalized_shape) :]
    if len(normalized_shape) > sizes.size(1) or (rest != rest[:1]).any():
        raise RuntimeError("normalized_shape extends into irregular dimensions for the nested tensor")
    for dim, (length, normalized) in enumerate(zip(rest[0].tolist(), normalized_shape, strict=True)):
        if length != normalized:
            raise RuntimeError(f"The shape at dimension {dim} of normalized_shape doesn't match the input")
    return input.values().view(-1, *normalized_shape)


def _layer_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    if weight is None or bias is None:
        raise RuntimeError("NestedTensor layer_norm requires weight and bias")
    rows = _rows(input, list(normalized_shape))
    normal, mean, rstd = aten.native_layer_norm(rows, normalized_shape, weight, bias, eps)
    return _nested(normal.view(-1), aten._nested_tensor_size(input)), mean.view(-1), rstd.view(-1)


def _layer_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: list[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    rows = _rows(input, list(normalized_shape))
    column = [rows.size(0), *[1] * len(normalized_shape)]
    found, of_weight, of_bias = aten.native_layer_norm_backward(
        *(
            grad_out.contiguous().values().view(rows.shape),
            rows,
            normalized_shape,
            mean.view(column),
            rstd.view(column),
        ),
        *(weight, bias, output_mask),
    )
    of_input = _nested(found.view(-1), aten._nested_tensor_size(input)) if output_mask[0] else None
    return of_input, of_weight, of_bias


#: CUDA pads sequences to a multiple of this length, for its products of matrices.
_LENGTH_UNIT = 8


def _transform_bias_rescale_qkv(qkv: Tensor, qkv_bias: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, each `[batch, heads, length, width]`, of a projection `[batch, length, 3 * heads * width]`.

    Those of a nested projection are padded with zeros to a multiple of `_LENGTH_UNIT`, as on CUDA.
    """
    if qkv.is_nested:
        lengths = aten._nested_tensor_size(qkv)[:, 0]
        longest = -(-int(lengths.max()) // _LENGTH_UNIT) * _LENGTH_UNIT
        padded = qkv.to_padded_tensor(0.0, (qkv.size(0), longest, qkv.size(2)))
        inside = (torch.arange(longest) < lengths[:, None]).to(padded.device)
        biased = torch.where(inside[..., None], padded + qkv_bias, 0)
    else:
        biased = qkv + qkv_bias
    width = biased.size(2) // (3 * num_heads)
    q, k, v = biased.unflatten(2, (3, num_heads, width)).permute(2, 0, 3, 1, 4).unbind()
    scale = 1.0 / torch.tensor(float(width), dtype=qkv.dtype, device="cpu").sqrt().item()
    return (q * scale).contiguous(), k.contiguous(), v.contiguous()


def _only(offsets: list[Tensor]) -> Tensor:
    if len(offsets) != 1 or offsets[0].dim() != 1:
        raise RuntimeError("only a single jagged dimension, with offsets in one dimension, is supported")
    return offsets[0]


def _jagged_to_padded(
    values: Tensor, offsets: list[Tensor], max_lengths: list[int], padding_value: float = 0.0
) -> Tensor:
    """`aten._jagged_to_padded_dense_forward`: rows `[total, ...]` as `[batch, length, ...]`. Longer parts are cut, as on CUDA."""
    (length,) = max_lengths
    starts, ends = _only(offsets)[:-1, None], _only(offsets)[1:, None]
    padded = values.new_full((starts.size(0), length, *values.shape[1:]), padding_value)
    if padded.numel() == 0 or values.size(0) == 0:
        return padded
    rows = starts + torch.arange(length, device=values.device)
    inside = rows < ends
    shape = (*inside.shape, *[1] * (values.dim() - 1))
    return torch.where(inside.view(shape), values[torch.where(inside, rows, 0)], padded)


def _padded_to_jagged(dense: Tensor, offsets: list[Tensor], total_L: int | None = None) -> Tensor:
    """`aten._padded_dense_to_jagged_forward`: the rows of `[batch, length, ...]` without padding. Waits if `total_L` is None."""
    only = _only(offsets)
    total = int(only[-1]) if total_L is None else total_L
    rows = torch.arange(total, device=dense.device, dtype=only.dtype)
    part = torch.searchsorted(only, rows, right=True) - 1
    return dense[part, rows - only[part]]
