"""Laws for pooling, resampling and padding: gradients have the shape of the result, and indices lie within the input."""

from __future__ import annotations

import torch
from torch import Tensor

from wooly_executor.runtime.guards.law import (
    ArgumentLaw,
    Arguments,
    Check,
    all_of,
    backward_of,
    require,
    require_range,
    require_shape,
)

aten = torch.ops.aten


def _pooled(dims: int) -> Check:
    """Require that `grad_output` (and `indices`) have the shape of `self` except in the last `dims` dimensions, which are
    pooled.
    """

    def check(given: Arguments) -> None:
        grad, whole = given["grad_output"], given["self"]
        require(whole.dim() in (dims + 1, dims + 2), f"self must have {dims + 1} or {dims + 2} dimensions")
        require(grad.dim() == whole.dim(), f"grad_output must have {whole.dim()} dimensions, but it has {grad.dim()}")
        require_shape(given, "grad_output", [*whole.shape[:-dims], *grad.shape[-dims:]])
        require(whole.shape[-dims:].numel() > 0 or not grad.numel(), "the pooled dimensions of self must not be empty")
        if "indices" in given:
            require_shape(given, "indices", grad.shape)

    return check


def _packed_indices(given: Arguments) -> None:
    """Require contiguous `indices`. The kernel ignores their strides."""
    require(given["indices"].is_contiguous(), "indices must be contiguous")


def _in_window(dims: int) -> Check:
    """Require that the indices of a pooling operator lie within the pooled dimensions of its input."""
    return lambda given: require_range("indices", given["indices"], 0, given["self"].shape[-dims:].numel())


def _fractional(dims: int) -> Check:
    def check(given: Arguments) -> None:
        for name in ("kernel_size", "output_size"):
            require(len(given[name]) == dims, f"{name} must have {dims} elements")
        whole = given["self"]
        require(whole.dim() in (dims + 1, dims + 2), f"self must have {dims + 1} or {dims + 2} dimensions")
        for name in ("grad_output", "indices"):
            require_shape(given, name, [*whole.shape[:-dims], *given["output_size"]])

    return check


def _unfolded(given: Arguments) -> None:
    whole = torch.empty(given["input_sizes"], device="meta")
    require_shape(given, "grad_in", whole.unfold(given["dim"], given["size"], given["step"]).shape)


def _scaled(given: Arguments) -> None:
    """Require that scale and size fit together.

    The kernel computes the source position from the position in the result and the scale, as a 32-bit integer, which must not
    overflow.
    """
    sizes = given["output_size"]
    scales = [given[n] for n in ("scales_d", "scales_h", "scales_w") if n in given] or [given.get("scales")]
    for n, scale in zip(sizes[-len(scales) :], scales[-len(sizes) :], strict=False):
        require(
            scale is None or not scale > 0 or n / scale < 1 << 31,
            f"output size {n} divided by scale {scale} must be less than 2**31; use a larger scale or a smaller size",
        )


def _sampled(dims: int) -> Check:
    """Require that `input` and `grid` fit together, and that `grad_output` has the shape of the result.

    PyTorch's meta kernel of `grid_sampler_2d` also knows this shape, but its first call imports Dynamo, which takes a second.
    """

    def check(given: Arguments) -> None:
        image, grid = given["input"], given["grid"]
        for name, t in (("input", image), ("grid", grid)):
            require(t.dim() == dims + 2, f"{name} must have {dims + 2} dimensions, but it has {t.dim()}")
        require_shape(given, "grid", [len(image), *grid.shape[1:-1], dims])
        require(image.shape[2:].numel() > 0, "the sampled dimensions of input must not be empty")
        require_shape(given, "grad_output", [*image.shape[:2], *grid.shape[1:-1]])

    return check


#: Largest absolute value of a grid for which the vectorised kernel is called.
_FAR = 1e12


def _near(given: Arguments) -> None:
    """Require finite, moderate positions. From others, the CPU's bilinear kernel computes addresses outside of the image."""
    grid = given["grid"]
    folds = given["interpolation_mode"] == 0 and given["padding_mode"] in (1, 2)
    if folds and grid.device.type == "cpu" and grid.numel():
        require(bool(grid.abs().amax() <= _FAR), "grid must be finite")


def _sampled_backward(given: Arguments) -> tuple[Tensor | None, Tensor]:
    """Compute the gradients with the library's kernel for large images, which checks each address."""
    names = ("grad_output", "input", "grid", "interpolation_mode", "padding_mode", "align_corners")
    for_input, for_grid = aten._grid_sampler_2d_cpu_fallback_backward.default(*[given[n] for n in names])
    return (for_input if given["output_mask"][0] else None), for_grid


def _antialiased(given: Arguments) -> None:
    """Require that the scales fit the sizes.

    The kernel reads around the source position of each element, which it computes from the scale. If the result is larger than
    the source times the scale, it reads behind the source.
    """
    _scaled(given)
    source = given["input_size"] if "input_size" in given else given["self"].shape
    for n, size, scale in zip(given["output_size"], source[-2:], (given["scales_h"], given["scales_w"]), strict=True):
        if scale is not None and scale > 0 and not given.get("align_corners"):
            require(n <= size * scale + 0.25, f"output size {n} must be at most {size} times the scale {scale}")


#: Resampling operators, without the suffix of their backward.
_UPSAMPLED = (
    *(
        f"upsample_{n}"
        for n in ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "bicubic2d", "trilinear3d")
    ),
    *(f"_upsample_{n}" for n in ("nearest_exact1d", "nearest_exact2d", "nearest_exact3d")),
)
_ANTIALIASED = tuple(f"_upsample_{n}2d_aa" for n in ("bilinear", "bicubic", "lanczos"))
LAWS: dict[str, ArgumentLaw] = {
    **{name + ending: ArgumentLaw(_scaled) for name in _UPSAMPLED for ending in ("", "_backward")},
    **{name + ending: ArgumentLaw(_antialiased) for name in _ANTIALIASED for ending in ("", "_backward")},
    "adaptive_max_pool2d_backward": ArgumentLaw(_pooled(2), _in_window(2)),
    "adaptive_max_pool3d_backward": ArgumentLaw(all_of(_pooled(3), _packed_indices), _in_window(3)),
    "_adaptive_avg_pool2d_backward": ArgumentLaw(_pooled(2)),
    "_adaptive_avg_pool3d_backward": ArgumentLaw(_pooled(3)),
    "adaptive_avg_pool3d_backward": ArgumentLaw(_pooled(3)),
    "avg_pool2d_backward": ArgumentLaw(backward_of(aten.avg_pool2d.default, grad_output=0)),
    "avg_pool3d_backward": ArgumentLaw(backward_of(aten.avg_pool3d.default, grad_output=0)),
    "max_pool2d_with_indices_backward": ArgumentLaw(
        backward_of(aten.max_pool2d_with_indices.default, grad_output=0, indices=1), _in_window(2)
    ),
    "max_pool3d_with_indices_backward": ArgumentLaw(
        backward_of(aten.max_pool3d_with_indices.default, grad_output=0, indices=1), _in_window(3)
    ),
    "fractional_max_pool2d_backward": ArgumentLaw(all_of(_fractional(2), _packed_indices), _in_window(2)),
    "fractional_max_pool3d_backward": ArgumentLaw(all_of(_fractional(3), _packed_indices), _in_window(3)),
    "grid_sampler_2d_backward": ArgumentLaw(_sampled(2), _near, instead=_sampled_backward),
    "grid_sampler_3d_backward": ArgumentLaw(_sampled(3)),
    "reflection_pad1d_backward": ArgumentLaw(backward_of(aten.reflection_pad1d.default, grad_output=0)),
    "reflection_pad2d_backward": ArgumentLaw(backward_of(aten.reflection_pad2d.default, grad_output=0)),
    "reflection_pad3d_backward": ArgumentLaw(backward_of(aten.reflection_pad3d.default, grad_output=0)),
    "replication_pad1d_backward": ArgumentLaw(backward_of(aten.replication_pad1d.default, grad_output=0)),
    "replication_pad2d_backward": ArgumentLaw(backward_of(aten.replication_pad2d.default, grad_output=0)),
    "replication_pad3d_backward": ArgumentLaw(backward_of(aten.replication_pad3d.default, grad_output=0)),
    "unfold_backward": ArgumentLaw(_unfolded),
}
