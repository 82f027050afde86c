"""Laws for torchvision's operators on boxes and regions of images.

Their kernels take the image of a region from the first column of `rois` and compute addresses from coordinates, without checks.
A wrong image index, a NaN or a huge coordinate reads or writes out of bounds. Regions that are sampled adaptively also determine
the amount of work. The laws for backward operators check what autograd would pass: the maps that the forward operator returned.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wooly_executor.runtime.guards.law import ArgumentLaw, Arguments, require, require_range, require_shape

#: Maximum absolute value of a coordinate, in pixels of the feature map. Kernels convert coordinates to 32-bit integers.
MAX_COORDINATE = 1 << 24
#: Maximum number of samples of one region. Kernels keep a table of all samples of a region.
MAX_SAMPLES = 1 << 24
_FLOATS = (torch.float16, torch.float32, torch.float64)


def _tensor(given: Arguments, name: str, dims: int) -> Tensor:
    t = given[name]
    require(isinstance(t, Tensor) and t.dim() == dims, f"{name} must be a tensor with {dims} dimensions")
    assert isinstance(t, Tensor)
    return t


def _same_dtype(given: Arguments, *names: str) -> None:
    first = given[names[0]]
    require(first.dtype in _FLOATS, f"{names[0]} must be float16, float32 or float64, but it is {first.dtype}")
    for name in names[1:]:
        if given[name] is not None:
            require(given[name].dtype is first.dtype, f"{name} must have the dtype of {names[0]}: {first.dtype}")


def _number(given: Arguments, name: str, least: int) -> int:
    value = given[name]
    require(isinstance(value, int) and least <= value < 1 << 31, f"{name} must be at least {least} and less than 2**31")
    return int(value)


def _nms(given: Arguments) -> None:
    dets, scores = _tensor(given, "dets", 2), _tensor(given, "scores", 1)
    require(dets.shape[1] == 4, "dets must have 4 columns: x1, y1, x2, y2")
    require_shape(given, "scores", dets.shape[:1])
    _same_dtype(given, "dets", "scores")
    require(scores.device == dets.device, "dets and scores must be on one device")


def _pooled(given: Arguments) -> tuple[int, int]:
    return _number(given, "pooled_height", 1), _number(given, "pooled_width", 1)


def _regions(given: Arguments, like: str) -> int:
    rois = _tensor(given, "rois", 2)
    require(rois.shape[1] == 5, "rois must have 5 columns: image, x1, y1, x2, y2")
    _same_dtype(given, like, "rois")
    require(isinstance(given["spatial_scale"], (int, float)), "spatial_scale must be a number")
    require(math.isfinite(given["spatial_scale"]), "spatial_scale must be finite")
    return int(rois.shape[0])


def _forward(*, mapped: bool) -> ArgumentLaw:
    """A law for pooling; `mapped`: the channels of the input are divided among the bins."""

    def shapes(given: Arguments) -> None:
        image = _tensor(given, "input", 4)
        height, width = _pooled(given)
        _regions(given, "input")
        require(image.shape[2] > 0 and image.shape[3] > 0, "input must have at least one row and one column")
        require(image.numel() < 1 << 31, "input must have fewer than 2**31 elements")
        if mapped:
            require(
                image.shape[1] % (height * width) == 0,
                "the channels of input must be a multiple of pooled_height * pooled_width",
            )
        if "sampling_ratio" in given:
            _number(given, "sampling_ratio", -(1 << 31))

    return ArgumentLaw(shapes, lambda given: _regions_inside(given, int(given["input"].shape[0])))


def _backward(*, mapped: bool, index: str | None) -> ArgumentLaw:
    """A law for the gradient of pooling; `index` names the map that the forward operator returned."""

    def shapes(given: Arguments) -> None:
        height, width = _pooled(given)
        n = _regions(given, "grad")
        sizes = [_number(given, name, 0) for name in ("batch_size", "channels")]
        sizes += [_number(given, name, 1) for name in ("height", "width")]
        require(math.prod(sizes) < 1 << 31, "the gradient must have fewer than 2**31 elements")
        channels = sizes[1]
        if mapped:
            require(channels % (height * width) == 0, "channels must be a multiple of pooled_height * pooled_width")
            channels //= height * width
        require_shape(given, "grad", (n, channels, height, width))
        if index is not None:
            require_shape(given, index, (n, channels, height, width))
            require(given[index].dtype is torch.int32, f"{index} must be int32")
            require(given[index].is_contiguous(), f"{index} must be contiguous")
        if "sampling_ratio" in given:
            _number(given, "sampling_ratio", -(1 << 31))

    def values(given: Arguments) -> None:
        _regions_inside(given, int(given["batch_size"]))
        if index is not None:
            low, high = (0, given["channels"]) if mapped else (-1, given["height"] * given["width"])
            require_range(index, given[index], low, high)

    return ArgumentLaw(shapes, values)


def _regions_inside(given: Arguments, images: int) -> None:
    """Check image indices and coordinates, and the number of samples per region."""
    rois = given["rois"].to(torch.float64)
    if not rois.shape[0]:
        return
    require(bool(torch.isfinite(rois).all()), "rois must be finite")
    require_range("the image index of rois", rois[:, 0].trunc(), 0, images)
    require(bool((rois[:, 0] >= 0).all()), "the image index of rois must not be negative")
    scaled = rois[:, 1:] * given["spatial_scale"]
    require(
        float(scaled.abs().max()) < MAX_COORDINATE,
        f"coordinates of rois, times spatial_scale, must be between -{MAX_COORDINATE} and {MAX_COORDINATE}",
    )
    ratio = given.get("sampling_ratio")
    if ratio is None:
        return
    bins = given["pooled_height"] * given["pooled_width"]
    if ratio > 0:
        samples = bins * ratio * ratio
    else:
        high = ((scaled[:, 3] - scaled[:, 1]).clamp(min=1) / given["pooled_height"]).ceil() + 1
        wide = ((scaled[:, 2] - scaled[:, 0]).clamp(min=1) / given["pooled_width"]).ceil() + 1
        samples = bins * int((high * wide).max())
    require(samples <= MAX_SAMPLES, f"a region has {samples:,} samples, at most {MAX_SAMPLES:,} are allowed")


def _deformed(given: Arguments) -> tuple[int, ...]:
    """Check the arguments of a deformable convolution. Returns the shape of its result."""
    image, weight, _ = (_tensor(given, name, 4) for name in ("input", "weight", "offset"))
    _same_dtype(given, "input", "weight", "offset", "mask", "bias")
    stride = _number(given, "stride_h", 1), _number(given, "stride_w", 1)
    pad = _number(given, "pad_h", 0), _number(given, "pad_w", 0)
    dilation = [_number(given, k, 1) for k in ("dilation_h", "dilation_w")]
    groups, offset_groups = _number(given, "groups", 1), _number(given, "offset_groups", 1)
    n, channels = image.shape[:2]
    kernel = weight.shape[2:]
    require(min(*image.shape[1:], *weight.shape) > 0, "input and weight must not be empty")
    require(weight.shape[1] * groups == channels, "weight must have channels / groups input channels")
    require(weight.shape[0] % groups == 0, "the output channels of weight must be a multiple of groups")
    require(channels % offset_groups == 0, "the channels of input must be a multiple of offset_groups")
    out = [
        (size + 2 * p - (d * (k - 1) + 1)) // s + 1
        for size, p, d, k, s in zip(image.shape[2:], pad, dilation, kernel, stride, strict=True)
    ]
    require(min(out) > 0, f"the result would have the size {out[0]} x {out[1]}")
    taps = offset_groups * kernel[0] * kernel[1]
    require_shape(given, "offset", (n, 2 * taps, *out))
    if given["use_mask"]:
        require_shape(given, "mask", (n, taps, *out))
    require_shape(given, "bias", weight.shape[:1])
    columns = channels * kernel[0] * kernel[1] * n * out[0] * out[1]
    require(columns < 1 << 31, f"the call needs {columns:,} columns, fewer than 2**31 are allowed")
    return (n, weight.shape[0], *out)


def _offsets_are_numbers(given: Arguments) -> None:
    require(not bool(torch.isnan(given["offset"]).any()), "offset must not contain NaN")


def _deformed_forward(given: Arguments) -> None:
    _deformed(given)


def _deformed_backward(given: Arguments) -> None:
    require_shape(given, "grad", _deformed(given))
    _same_dtype(given, "input", "grad")


LAWS: dict[str, ArgumentLaw] = {
    "torchvision.nms": ArgumentLaw(_nms),
    "torchvision.roi_align": _forward(mapped=False),
    "torchvision.roi_pool": _forward(mapped=False),
    "torchvision.ps_roi_align": _forward(mapped=True),
    "torchvision.ps_roi_pool": _forward(mapped=True),
    "torchvision._roi_align_backward": _backward(mapped=False, index=None),
    "torchvision._roi_pool_backward": _backward(mapped=False, index="argmax"),
    "torchvision._ps_roi_align_backward": _backward(mapped=True, index="channel_mapping"),
    "torchvision._ps_roi_pool_backward": _backward(mapped=True, index="channel_mapping"),
    "torchvision.deform_conv2d": ArgumentLaw(_deformed_forward, _offsets_are_numbers),
    "torchvision._deform_conv2d_backward": ArgumentLaw(_deformed_backward, _offsets_are_numbers),
}
