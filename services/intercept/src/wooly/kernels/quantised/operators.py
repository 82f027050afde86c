"""The operators that CUDA has for quantised tensors, made of plain operators on their integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from wooly.devices import mixed_devices
from wooly.kernels.quantised.arithmetic import INTEGERS, dequantise, dequantise_channels, quantise, quantise_channels
from wooly.kernels.quantised.tensors import (
    integers,
    is_ours,
    is_per_channel,
    of_integers,
    per_channel,
    per_tensor,
    require_dtype,
    set_quantiser,
)
from wooly.kernels.schema import Kernel
from wooly.torch_private import raw_device, suggested_format

aten = torch.ops.aten


# -- from numbers to integers and back --------------------------------------------------------------------------------


def quantize_per_tensor(t: Tensor, scale: float, zero_point: int, dtype: torch.dtype) -> Tensor:
    """`aten.quantize_per_tensor`."""
    require_dtype(dtype)
    torch.quantize_per_tensor(torch.empty(0, dtype=t.dtype), scale, zero_point, dtype)  # raises PyTorch's errors
    return per_tensor(quantise(_laid_out(t), scale, zero_point, dtype), scale, zero_point, dtype)


def quantize_per_tensor_by_tensors(t: Tensor, scale: Tensor, zero_point: Tensor, dtype: torch.dtype) -> Tensor:
    """`aten.quantize_per_tensor.tensor_qparams`. It waits for the device, as on CUDA."""
    return quantize_per_tensor(t, float(scale.item()), int(zero_point.item()), dtype)


def quantize_per_tensor_dynamic(t: Tensor, dtype: torch.dtype, reduce_range: bool) -> Tensor:
    """`aten.quantize_per_tensor_dynamic`. The host chooses scale and zero point from the range of the numbers."""
    torch.quantize_per_tensor_dynamic(torch.zeros(1, dtype=t.dtype), dtype, reduce_range)  # raises PyTorch's errors
    if dtype is torch.float16:
        return t.contiguous().to(dtype)
    ends = torch.stack(t.aminmax()).cpu()
    chosen = torch.quantize_per_tensor_dynamic(ends, dtype, reduce_range)
    return quantize_per_tensor(t, chosen.q_scale(), chosen.q_zero_point(), dtype)


def quantize_per_channel(t: Tensor, scales: Tensor, zero_points: Tensor, axis: int, dtype: torch.dtype) -> Tensor:
    """`aten.quantize_per_channel`."""
    require_dtype(dtype)
    sizes = [n if d == axis else 0 for d, n in enumerate(t.shape)]
    scale, point = torch.ones(scales.shape, dtype=scales.dtype), torch.zeros(zero_points.shape, dtype=zero_points.dtype)
    torch.quantize_per_channel(torch.zeros(sizes, dtype=t.dtype), scale, point, axis, dtype)  # raises PyTorch's errors
    _require_device(t, scales, zero_points)
    return per_channel(
        quantise_channels(_laid_out(t), scales, zero_points, axis, dtype), scales, zero_points, axis, dtype
    )


def make_per_tensor(t: Tensor, scale: float, zero_point: int) -> Tensor:
    """`aten._make_per_tensor_quantized_tensor`: a quantised tensor with a copy of the integers `t`."""
    like = aten._make_per_tensor_quantized_tensor(
        torch.empty(0, dtype=t.dtype), scale, zero_point
    )  # raises PyTorch's errors
    return per_tensor(t.clone(memory_format=torch.contiguous_format), scale, zero_point, like.dtype)


def make_per_channel(t: Tensor, scales: Tensor, zero_points: Tensor, axis: int) -> Tensor:
    """`aten._make_per_channel_quantized_tensor`: a quantised tensor with a copy of the integers `t`."""
    _require_device(t, scales, zero_points)
    like = aten._make_per_tensor_quantized_tensor(torch.empty(0, dtype=t.dtype), 1.0, 0)  # raises PyTorch's errors
    return per_channel(t.clone(memory_format=torch.contiguous_format), scales, zero_points, axis, like.dtype)


def int_repr(q: Tensor) -> Tensor:
    """`aten.int_repr`."""
    return integers(q).clone(memory_format=suggested_format(q))


def dequantize(q: Tensor) -> Tensor:
    """`aten.dequantize.self`."""
    t = integers(q).contiguous(memory_format=suggested_format(q))
    if is_per_channel(q):
        scales, zero_points = q.q_per_channel_scales(), q.q_per_channel_zero_points()
        return dequantise_channels(t, scales, zero_points, q.q_per_channel_axis())
    return dequantise(t, q.q_scale(), q.q_zero_point())


def _laid_out(t: Tensor) -> Tensor:
    """A float32 tensor in the memory format in which PyTorch makes the quantised tensor."""
    return t.contiguous(memory_format=suggested_format(t))


def _quantised_as(t: Tensor, q: Tensor) -> Tensor:
    """The integers of the numbers `t`, with the quantiser of `q`."""
    if is_per_channel(q):
        scales, zero_points = q.q_per_channel_scales(), q.q_per_channel_zero_points()
        return quantise_channels(t, scales, zero_points, q.q_per_channel_axis(), q.dtype)
    return quantise(t, q.q_scale(), q.q_zero_point(), q.dtype)


def _require_device(*tensors: Tensor) -> None:
    if len({raw_device(t) for t in tensors}) > 1:
        raise mixed_devices(tensors)


def _require_one_scale(q: Tensor, operator: str) -> None:
    if q.qscheme() is not torch.per_tensor_affine:
        raise RuntimeError(
            f"{operator} for quantized tensors is currently only supported for per tensor quantized tensors"
        )


# -- copies -----------------------------------------------------------------------------------------------------------


def copy_(dst: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    """`aten.copy_`, where one of the tensors is quantised and one is on the device."""
    if not dst.is_quantized:
        raise RuntimeError(
            "Copying from quantized Tensor to non-quantized Tensor is not allowed, please use dequantize to get a float Tensor "
            "from a quantized Tensor"
        )
    if not src.is_quantized:
        return _quantise_into(dst, src)
    if dst is src:
        return dst
    if dst.dtype is not src.dtype:
        raise RuntimeError("Quantized copy only works with the same scalar type")
    if not is_ours(dst):
        return dst.copy_(_on_host(src))
    if dst.qscheme() is not src.qscheme():
        raise RuntimeError("Quantized Copy only works with same qscheme")
    set_quantiser(dst, _moved_quantiser(src, dst))
    integers(dst).copy_(integers(src) if is_ours(src) else src.int_repr())
    return dst


def copy_from(src: Tensor, dst: Tensor, non_blocking: bool = False) -> Tensor:
    """`aten._copy_from`."""
    return copy_(dst, src, non_blocking)


def _quantise_into(q: Tensor, t: Tensor) -> Tensor:
    """Write float32 numbers into a quantised tensor."""
    if not is_ours(q):
        return q.copy_(t.cpu())
    if t.dtype is not torch.float32:
        raise RuntimeError("Quantized copy only works with kFloat as source Tensor")
    if t.shape != q.shape:
        raise RuntimeError("Quantized copy only works with Tensors with the same shape")
    integers(q).copy_(_quantised_as(t.to(raw_device(q)), q))
    return q


def _on_host(q: Tensor) -> Tensor:
    """A copy of a quantised device tensor in host memory."""
    t = integers(q).cpu()
    if not is_per_channel(q):
        return aten._make_per_tensor_quantized_tensor(t, q.q_scale(), q.q_zero_point())  # type: ignore[no-any-return]
    scales, zero_points = q.q_per_channel_scales().cpu(), q.q_per_channel_zero_points().cpu()
    return aten._make_per_channel_quantized_tensor(  # type: ignore[no-any-return]
        t, scales, zero_points, q.q_per_channel_axis()
    )


def _moved_quantiser(src: Tensor, dst: Tensor) -> Tensor:
    """A quantised tensor without elements on the device of `dst`, with the quantiser of `src`."""
    there = raw_device(dst)
    if not is_per_channel(src):
        return aten._empty_affine_quantized(  # type: ignore[no-any-return]
            [0], dtype=src.dtype, device=there, scale=src.q_scale(), zero_point=src.q_zero_point()
        )
    axis = src.q_per_channel_axis()
    sizes = [n if d == axis else 0 for d, n in enumerate(src.shape)]
    channels = {
        "scales": src.q_per_channel_scales().to(there),
        "zero_points": src.q_per_channel_zero_points().to(there),
    }
    return aten._empty_per_channel_affine_quantized(  # type: ignore[no-any-return]
        sizes, **channels, axis=axis, dtype=src.dtype, device=there
    )


# -- operators on integers --------------------------------------------------------------------------------------------


def relu(q: Tensor) -> Tensor:
    """`aten.relu`: integers are at least the zero point."""
    return of_integers(integers(q).clamp_min(q.q_zero_point()), q)


def relu_(q: Tensor) -> Tensor:
    """`aten.relu_`."""
    integers(q).clamp_min_(q.q_zero_point())
    return q


def gelu(q: Tensor, *, approximate: str = "none") -> Tensor:
    """`aten.gelu`: computed in float32, as on CUDA."""
    _require_one_scale(q, "gelu")
    return of_integers(_quantised_as(aten.gelu(dequantize(q), approximate=approximate), q), q)


def flip(q: Tensor, dims: list[int]) -> Tensor:
    """`aten.flip`."""
    _require_one_scale(q, "flip")
    return of_integers(integers(q).flip(dims), q)


def index_select(q: Tensor, dim: int, index: Tensor) -> Tensor:
    """`aten.index_select`."""
    _require_one_scale(q, "index_select")
    return of_integers(integers(q).index_select(dim, index), q)


def masked_fill_(q: Tensor, mask: Tensor, value: Any) -> Tensor:
    """`aten.masked_fill_`, with a number or a tensor without dimensions."""
    _require_one_scale(q, "masked_fill_")
    if isinstance(value, Tensor) and value.dim():
        raise RuntimeError(
            f"masked_fill_ only supports a 0-dimensional value tensor, but got tensor with {value.dim()} dimension(s)."
        )
    integers(q).masked_fill_(mask, _integer(value, q))
    return q


def index_put(
    q: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False, unsafe: bool = False
) -> Tensor:
    """`aten._index_put_impl_`: the values are numbers, which are quantised first."""
    if values.is_quantized:
        raise RuntimeError("Value argument for quantized input_put should not be quantized")
    _require_one_scale(q, "index_put")
    if accumulate:
        raise RuntimeError("index_put for quantized tensors is currently only supported for accumulate=False")
    integers(q).index_put_(list(indices), _quantised_as(values.to(raw_device(q)).float(), q))
    return q


def fill_(q: Tensor, value: Any) -> Tensor:
    """`aten.fill_`, with a number or a tensor without dimensions."""
    if is_per_channel(q):
        return _quantise_into(q, torch.empty(q.shape, device=raw_device(q)).fill_(value))
    integers(q).fill_(_integer(value, q))
    return q


def max_pool2d(
    q: Tensor, kernel_size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> Tensor:
    """`aten.quantized_max_pool2d`. Float64 has all integers, so the largest one is exact."""
    _require_one_scale(q, "max_pool2d")
    t = integers(q).contiguous(memory_format=suggested_format(q)).double()
    pooled = aten.max_pool2d_with_indices(t, kernel_size, list(stride) or kernel_size, padding, dilation, ceil_mode)[0]
    return of_integers(pooled.to(INTEGERS[q.dtype]), q)


def adaptive_avg_pool2d(q: Tensor, output_size: list[int]) -> Tensor:
    """`aten._adaptive_avg_pool2d`: computed in float32, as on CUDA."""
    _require_one_scale(q, "adaptive_avg_pool2d")
    return of_integers(_quantised_as(aten._adaptive_avg_pool2d(dequantize(q), output_size), q), q)


def local_scalar_dense(q: Tensor) -> Any:
    """`aten._local_scalar_dense`, which `.item()` calls."""
    return dequantize(q).item()


def _integer(value: Any, q: Tensor) -> int:
    """The integer of a number, with the quantiser of `q`."""
    host = torch.tensor([float(value)])
    return int(torch.quantize_per_tensor(host, q.q_scale(), q.q_zero_point(), q.dtype).int_repr())


def linear_prepack(weight: Tensor, bias: Tensor | None = None) -> Any:
    """`quantized.linear_prepack`: the weight of PyTorch's quantised layers, packed in host memory.

    CUDA packs such weights for cuDNN. The operators that use packed weights exist for host tensors only.
    """
    _require_one_scale(weight, "linear_prepack")
    return torch.ops.quantized.linear_prepack(weight.cpu(), None if bias is None else bias.detach().cpu())


#: Kernels of ordinary device tensors, by operator name.
MAKERS: dict[str, Kernel] = {
    "quantize_per_tensor": quantize_per_tensor,
    "quantize_per_tensor.tensor_qparams": quantize_per_tensor_by_tensors,
    "quantize_per_tensor_dynamic": quantize_per_tensor_dynamic,
    "quantize_per_channel": quantize_per_channel,
    "_make_per_tensor_quantized_tensor": make_per_tensor,
    "_make_per_channel_quantized_tensor": make_per_channel,
    "dequantize.self": Tensor.float,
}
#: Kernels of quantised device tensors, by operator name.
KERNELS: dict[str, Callable[..., Any]] = {
    "_adaptive_avg_pool2d": adaptive_avg_pool2d,
    "_copy_from": copy_from,
    "_index_put_impl_": index_put,
    "_local_scalar_dense": local_scalar_dense,
    "copy_": copy_,
    "dequantize.self": dequantize,
    "fill_.Scalar": fill_,
    "fill_.Tensor": fill_,
    "flip": flip,
    "gelu": gelu,
    "index_select": index_select,
    "int_repr": int_repr,
    "masked_fill_.Scalar": masked_fill_,
    "masked_fill_.Tensor": masked_fill_,
    "quantized_max_pool2d": max_pool2d,
    "relu": relu,
    "relu_": relu_,
}
