"""Estimates for extension operators: rules for torchvision's, and one assumption for all others.

Nothing is known about the work of an operator without a rule. Only sessions with the permission `opaque_kernels` may call one, so
the assumption is for the order of work, not for protection.
"""

from __future__ import annotations

from collections.abc import Callable

from wooly_executor.bounds.work import Given, Work

#: Assumed cost, in additions, of one element of the operands and results of an operator without a rule.
UNKNOWN = 64
#: Cost of one bilinear sample, in additions.
SAMPLE = 16
#: Assumed number of samples per bin in each direction if a region is sampled adaptively.
ADAPTIVE = 64


def _suppression(given: Given) -> Work:
    """Non-maximum suppression compares all pairs of boxes."""
    n = given.sizes("dets")[0] if given.sizes("dets") else 0
    return Work(16 * n * n + given.touched())


def _bins(given: Given) -> int:
    """Number of elements of a pooled result."""
    rois, image, grad = given.sizes("rois"), given.sizes("input"), given.numel("grad")
    channels = image[1] if len(image) > 1 else given.number("channels", 1)
    return max((rois[0] if rois else 0) * channels * _per_region(given), grad)


def _per_region(given: Given) -> int:
    return max(given.number("pooled_height", 1), 1) * max(given.number("pooled_width", 1), 1)


def _result(given: Given) -> int:
    """Number of elements of the gradient that a backward operator makes."""
    sizes = [max(given.number(name, 1), 0) for name in ("batch_size", "channels", "height", "width")]
    return sizes[0] * sizes[1] * sizes[2] * sizes[3]


def _sampled(given: Given) -> Work:
    ratio = given.number("sampling_ratio")
    each = ratio if ratio > 0 else ADAPTIVE
    return Work(SAMPLE * each * each * _bins(given) + given.touched() + _result(given))


def _pooled(given: Given) -> Work:
    """Each bin may contain the whole image."""
    image = given.sizes("input")
    pixels = image[2] * image[3] if len(image) == 4 else given.number("height", 1) * given.number("width", 1)
    regions = _bins(given) // _per_region(given)
    return Work(2 * (regions * pixels + _bins(given)) * 4 + given.touched() + _result(given))


def _deformed(passes: int) -> Callable[[Given], Work]:
    def rule(given: Given) -> Work:
        weight, offset = given.sizes("weight"), given.sizes("offset")
        image = given.sizes("input")
        if len(weight) != 4 or len(offset) != 4 or len(image) != 4:
            return Work(given.touched())
        places = offset[0] * offset[2] * offset[3]
        columns = image[1] * weight[2] * weight[3] * places
        flops = 2 * weight[0] * weight[1] * weight[2] * weight[3] * places * given.factor()
        return Work(SAMPLE * columns + given.touched(), flops).times(passes)

    return rule


RULES: dict[str, Callable[[Given], Work]] = {
    "torchvision.nms": _suppression,
    "torchvision.roi_align": _sampled,
    "torchvision._roi_align_backward": _sampled,
    "torchvision.ps_roi_align": _sampled,
    "torchvision._ps_roi_align_backward": _sampled,
    "torchvision.roi_pool": _pooled,
    "torchvision._roi_pool_backward": _pooled,
    "torchvision.ps_roi_pool": _pooled,
    "torchvision._ps_roi_pool_backward": _pooled,
    "torchvision.deform_conv2d": _deformed(1),
    "torchvision._deform_conv2d_backward": _deformed(4),
}


def of_extension(name: str, given: Given) -> Work:
    """Return the estimated work of an extension operator; `name` is like ``torchvision.nms``."""
    rule = RULES.get(name)
    return rule(given) if rule is not None else Work(UNKNOWN * given.touched())
