"""Estimates for operators on windows of images and signals, for resizing, and for transforms."""

from __future__ import annotations

from collections.abc import Callable

from wooly_wis.program import View

from wooly_executor.bounds.elementwise import over_all
from wooly_executor.bounds.products import over_own_pairs, over_pairs
from wooly_executor.bounds.work import Given, Work, log2, product

Rule = Callable[[Given], Work]


def _pooled(given: Given, n: int) -> int:
    """Return the number of elements of a pooling's result."""
    sizes = given.sizes("self")
    kernel = given.numbers("kernel_size", n, 1)
    stride = given.numbers("stride", n, 1) if given.values.get("stride") not in (None, ()) else kernel
    padding, dilation = given.numbers("padding", n, 0), given.numbers("dilation", n, 1)
    spatial = product(
        max((size + 2 * p - d * (k - 1) - 1) // max(s, 1) + 2, 1)
        for size, s, p, d, k in zip(sizes[-n:], stride, padding, dilation, kernel, strict=False)
    )
    return product(sizes[:-n]) * spatial


def _pool(n: int) -> Rule:
    """Count the window for each element of the result, cut to the size of the image."""

    def rule(given: Given) -> Work:
        sizes, kernel = given.sizes("self"), given.numbers("kernel_size", n, 1)
        window = product(min(k, size) for k, size in zip(kernel, sizes[-n:], strict=False))
        out = max(_pooled(given, n), given.numel("grad_output"))
        return Work(2 * out * max(window, 1)) + over_all(given, 1)

    return rule


def _adaptive(n: int) -> Rule:
    """Count windows that overlap by at most one element if the result is smaller than the input, or entirely if it is larger."""

    def rule(given: Given) -> Work:
        sizes = given.sizes("self")
        grads = given.sizes("grad_output")
        wanted = list(grads[-n:]) if grads else given.numbers("output_size", n, 1)
        wanted = [size if want < 0 else want for want, size in zip(wanted, sizes[-n:], strict=False)]
        touched = product(size + 2 * max(want, 0) for want, size in zip(wanted, sizes[-n:], strict=False))
        return Work(2 * product(sizes[:-n]) * touched) + over_all(given, 1)

    return rule


def _fractional(n: int) -> Rule:
    def rule(given: Given) -> Work:
        window = product(given.numbers("kernel_size", n, 1))
        out = product(given.sizes("self")[:-n]) * product(given.numbers("output_size", n, 1))
        return Work(2 * out * max(window, 1)) + over_all(given, 1)

    return rule


def _unpooled(n: int) -> Rule:
    def rule(given: Given) -> Work:
        return Work(product(given.sizes("self")[:-n]) * product(given.numbers("output_size", n, 1))) + over_all(
            given, 1
        )

    return rule


def _resized(n: int, taps: int) -> Rule:
    """Count `taps` elements of the source image per element of the result."""

    def rule(given: Given) -> Work:
        sizes = given.sizes("self") or tuple(given.numbers("input_size", n + 2, 1))
        out = product(sizes[:-n]) * product([max(v, 0) for v in given.numbers("output_size", n, 1)])
        return Work(taps * max(out, given.numel("grad_output"))) + over_all(given, 2)

    return rule


def _antialiased(given: Given) -> Work:
    """Count windows that grow with the reduction factor of the image, along one dimension and then along the other."""
    sizes = given.sizes("self") or tuple(given.numbers("input_size", 4, 1))
    wanted = [max(v, 1) for v in given.numbers("output_size", 2, 1)]
    if len(sizes) < 3:
        return over_all(given, 2)
    scales = [given.values.get(name) for name in ("scales_h", "scales_w")]
    planes, taps = product(sizes[:-2]), 0
    for size, want, scale in zip(sizes[-2:], wanted, scales, strict=True):
        stated = 1 / float(scale) if isinstance(scale, (int, float)) and scale > 0 else 0.0
        taps += 8 + 6 * (-(-size // want) + min(int(stated), 1 << 40))
    reached = max(sizes[-2], wanted[0]) * max(sizes[-1], wanted[1])
    return Work(planes * reached * taps) + over_all(given, 2)


def _padded(given: Given) -> Work:
    sizes, pads = list(given.sizes("self")), given.values.get("padding")
    widths = [p for p in pads if isinstance(p, int)] if isinstance(pads, tuple) else []
    for k in range(len(widths) // 2):
        if k < len(sizes):
            sizes[-1 - k] = max(sizes[-1 - k] + widths[2 * k] + widths[2 * k + 1], 0)
    return Work(2 * product(sizes)) + over_all(given, 2)


def _columns(given: Given) -> Work:
    """Count one column per position of the window."""
    sizes, kernel = given.sizes("self"), given.numbers("kernel_size", 2, 1)
    if given.values.get("output_size") is not None:  # col2im is the inverse
        return Work(2 * product(given.numbers("output_size", 2, 1))) + over_all(given, 2)
    stride, padding = given.numbers("stride", 2, 1), given.numbers("padding", 2, 0)
    dilation = given.numbers("dilation", 2, 1)
    places = product(
        max((size + 2 * p - d * (k - 1) - 1) // max(s, 1) + 1, 0)
        for size, s, p, d, k in zip(sizes[-2:], stride, padding, dilation, kernel, strict=False)
    )
    return Work(2 * product(sizes[:-2]) * product(kernel) * places) + over_all(given, 1)


def _sampled(taps: int) -> Rule:
    def rule(given: Given) -> Work:
        sizes, grid = given.sizes("input"), given.sizes("grid")
        return Work(2 * taps * product(sizes[:2]) * product(grid[1:-1])) + over_all(given, 2)

    return rule


def _transformed(given: Given) -> Work:
    """Count n log n, times four, because a length that is a large prime takes about four times as long."""
    sizes, dims = given.sizes("self"), given.values.get("dim")
    axes = [d for d in dims if isinstance(d, int) and -len(sizes) <= d < len(sizes)] if isinstance(dims, tuple) else []
    n = product(sizes)
    last = given.number("last_dim_size")
    if axes and last > 0:
        n = n // max(sizes[axes[-1]], 1) * max(last, sizes[axes[-1]])
    along = sum([log2(max(sizes[d], last)) for d in axes]) or log2(n)
    return Work(4 * n * along) + over_all(given, 1)


def _alignments(given: Given) -> Work:
    """Count, for each time step, each label of the targets and the gaps between the labels."""
    sizes = given.sizes("log_probs")
    steps, batch = (sizes[0] if sizes else 1), (sizes[1] if len(sizes) > 2 else 1)
    return Work(16 * steps * (2 * given.numel("targets") + batch)) + over_all(given, 4)


def _largest(given: Given) -> Work:
    """Count the selection of the k-th element of each row. Its time depends on the values, so it counts more than one pass."""
    rows: list[View] = [v for v in given.views() if v.sizes]
    return over_all(given, 4 * log2(max([max(v.sizes) for v in rows], default=1)))


WINDOWS: dict[str, Rule] = {
    **dict.fromkeys(("avg_pool2d", "avg_pool2d_backward", "max_pool2d_with_indices"), _pool(2)),
    **dict.fromkeys(("avg_pool3d", "avg_pool3d_backward", "max_pool3d_with_indices"), _pool(3)),
    **dict.fromkeys(
        ("adaptive_avg_pool2d", "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "adaptive_max_pool2d"),
        _adaptive(2),
    ),
    **dict.fromkeys(
        (
            "adaptive_avg_pool3d",
            "_adaptive_avg_pool3d",
            "_adaptive_avg_pool3d_backward",
            "adaptive_avg_pool3d_backward",
            "adaptive_max_pool3d",
        ),
        _adaptive(3),
    ),
    "fractional_max_pool2d": _fractional(2),
    "fractional_max_pool3d": _fractional(3),
    "max_unpool2d": _unpooled(2),
    "max_unpool3d": _unpooled(3),
    **{
        f"{name}{suffix}": _resized(n, taps)
        for name, n, taps in (
            ("upsample_nearest1d", 1, 1),
            ("upsample_nearest2d", 2, 1),
            ("upsample_nearest3d", 3, 1),
            ("_upsample_nearest_exact1d", 1, 1),
            ("_upsample_nearest_exact2d", 2, 1),
            ("_upsample_nearest_exact3d", 3, 1),
            ("upsample_linear1d", 1, 2),
            ("upsample_bilinear2d", 2, 4),
            ("upsample_trilinear3d", 3, 8),
            ("upsample_bicubic2d", 2, 16),
        )
        for suffix in ("", "_backward")
    },
    **{
        f"_upsample_{name}2d_aa{suffix}": _antialiased
        for name in ("bilinear", "bicubic", "lanczos")
        for suffix in ("", "_backward")
    },
    **{
        f"{name}_pad{n}d{suffix}": _padded
        for name in ("reflection", "replication")
        for n in (1, 2, 3)
        for suffix in ("", "_backward")
    },
    **dict.fromkeys(("im2col", "col2im"), _columns),
    **dict.fromkeys(("grid_sampler_2d", "grid_sampler_2d_backward"), _sampled(16)),
    **dict.fromkeys(("grid_sampler_3d", "grid_sampler_3d_backward"), _sampled(8)),
    **dict.fromkeys(("_fft_c2c", "_fft_c2r", "_fft_r2c"), _transformed),
    **dict.fromkeys(("_ctc_loss", "_ctc_loss_backward"), _alignments),
    **dict.fromkeys(("_cdist_forward", "_cdist_backward"), over_pairs),
    **dict.fromkeys(("_pdist_forward", "_pdist_backward"), over_own_pairs),
    "kthvalue": _largest,
}
