"""Products with weights of 8 bits, and with weights of 4 bits in CUDA's packing, as plain operators.

The CPU's kernel for 8 bits does not check its arguments, and there is none for CUDA's packing of 4 bits. CUDA packs 8 values of
4 bits into an int32, in the order in which its matrix units read them: `[n / 8][k / (16 * tiles)][32][tiles / 2]`, where `tiles`
is 2, 4 or 8. The packing here is the same, bit by bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wooly.devices import mixed_devices
from wooly.kernels.schema import Kernel
from wooly.torch_private import raw_device

aten = torch.ops.aten
#: Sizes of the groups of weights that have one scale.
_GROUPS = (32, 64, 128, 256)
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
#: Rows and columns of a tile.
_ROWS, _COLUMNS = 8, 16


def convert(weight: Tensor, inner_k_tiles: int) -> Tensor:
    """`aten._convert_weight_to_int4pack`: pack weights.

    Args:
        weight: `[n][k / 2]` in uint8. The upper 4 bits are the weight of the even column.
        inner_k_tiles: number of tiles of 16 columns that are stored together.

    Raises:
        RuntimeError: the arguments have other sizes or another dtype.
    """
    _require(weight.dim() == 2 and weight.dtype is torch.uint8, "the weight must be a matrix of uint8")
    _require(weight.is_contiguous(), "the weight must be contiguous")
    _require(inner_k_tiles in (2, 4, 8), f"innerKTiles must be 2, 4 or 8, but it is {inner_k_tiles}")
    rows, width = weight.shape
    step = inner_k_tiles * _COLUMNS
    _require(
        width > 0 and 2 * width % step == 0, f"the weight has {2 * width} columns, which must be a multiple of {step}"
    )
    if rows % _ROWS:
        weight = torch.nn.functional.pad(weight, (0, 0, 0, -rows % _ROWS))
    pairs = inner_k_tiles // 2
    # Dimensions: tile of rows, step of columns, row and lane (together 32), pair of tiles, byte of the lane.
    split = weight.reshape(-1, _ROWS, 2 * width // step, pairs, 4, 4).permute(0, 2, 1, 5, 3, 4)
    halves = torch.stack((split >> 4, split & 15), -2)  # all weights of even columns come first
    low, high = halves.reshape(*split.shape[:-1], 4, 2).unbind(-1)
    return (low | high << 4).view(torch.int32).reshape(-1, 2 * width // step, 32, pairs)


def values_of(packed: Tensor) -> Tensor:
    """The weights of a packed tensor, from 0 to 15, as `[n][k]` in uint8."""
    tiles, steps, _, pairs = packed.shape
    packed = packed.contiguous().view(torch.uint8).reshape(tiles, steps, _ROWS, 4, pairs, 4)
    halves = torch.stack((packed & 15, packed >> 4), -1).reshape(*packed.shape[:-1], 2, 4)
    # From (even or odd, byte) to (byte, even or odd), and then back to rows and columns.
    return halves.permute(0, 2, 1, 4, 6, 3, 5).reshape(tiles * _ROWS, steps * pairs * 32)


def multiply(t: Tensor, packed: Tensor, group: int, scales_and_zeros: Tensor) -> Tensor:
    """`aten._weight_int4pack_mm`: multiply a bfloat16 matrix by packed weights.

    A weight `w` stands for `(w - 8) * scale + zero`, in float32 as in the CPU's kernel (CUDA rounds it to bfloat16). Sums are in
    float32, too.

    Args:
        t: `[m][k]` in bfloat16.
        packed: the weights, see `convert`.
        group: number of consecutive columns that have the same scale and zero.
        scales_and_zeros: `[k / group][n][2]` in bfloat16.

    Raises:
        RuntimeError: the arguments have other sizes or dtypes.
    """
    _require_one_device(t, packed, scales_and_zeros)
    _require(t.dtype is torch.bfloat16 and t.dim() == 2, "self must be a matrix of bfloat16")
    _require(t.is_contiguous() and packed.is_contiguous(), "self and mat2 must be contiguous")
    _require(packed.dtype is torch.int32 and packed.dim() == 4, "mat2 must have 4 dimensions and the dtype int32")
    tiles, steps, lanes, pairs = packed.shape
    _require(
        lanes == 32 and pairs in (1, 2, 4), f"mat2 must be a packed weight, but it has the shape {list(packed.shape)}"
    )
    n, k = tiles * _ROWS, steps * pairs * 2 * _COLUMNS
    _require(t.shape[1] == k, f"self has {t.shape[1]} columns, and the weight has {k}")
    _require(
        group in _GROUPS and k > 0 and k % group == 0,
        f"qGroupSize must be 32, 64, 128 or 256 and divide {k}, but it is {group}",
    )
    wanted = [k // group, n, 2]
    _require(
        scales_and_zeros.dtype is torch.bfloat16 and list(scales_and_zeros.shape) == wanted,
        f"qScaleAndZeros must have the dtype bfloat16 and the shape {wanted}",
    )
    scales, zeros = scales_and_zeros.float().permute(2, 1, 0).unsqueeze(-1).unbind(0)
    weight = (values_of(packed).reshape(n, -1, group).float() - 8) * scales + zeros
    return torch.mm(t.float(), weight.reshape(n, k).t()).bfloat16()


def multiply_bytes(t: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """`aten._weight_int8pack_mm`: multiply a matrix by weights of int8. Sums are in float32.

    Args:
        t: `[m][k]` in bfloat16, float16 or float32.
        weight: `[n][k]` in int8.
        scales: `[n]`, with the dtype of `t`.

    Raises:
        RuntimeError: the arguments have other sizes or dtypes.
    """
    _require_one_device(t, weight, scales)
    _require(t.dtype in _FLOATS and t.dim() == 2, "self must be a matrix of bfloat16, float16 or float32")
    _require(weight.dtype is torch.int8 and weight.dim() == 2, "mat2 must be a matrix of int8")
    _require(t.shape[1] == weight.shape[1], f"self has {t.shape[1]} columns, and mat2 has {weight.shape[1]}")
    n = weight.shape[0]
    _require(
        scales.dtype is t.dtype and tuple(scales.shape) == (n,),
        f"scales must have the dtype {t.dtype} and the shape [{n}]",
    )
    return (torch.mm(t.float(), weight.float().t()) * scales.float()).to(t.dtype)


def _require(holds: bool, why: str) -> None:
    if not holds:
        raise RuntimeError(f"packed weights: {why}")


def _require_one_device(*tensors: Tensor) -> None:
    if len({raw_device(t) for t in tensors}) > 1:
        raise mixed_devices(tensors)


KERNELS: dict[str, Kernel] = {
    "_convert_weight_to_int4pack": convert,
    "_weight_int4pack_mm": multiply,
    "_weight_int8pack_mm": multiply_bytes,
}
