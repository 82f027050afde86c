"""Fourier transforms, convolutions, integers."""

from __future__ import annotations

import torch

from wooly_executor.runtime.guards.law import (
    Arguments,
    Law,
    require,
    results_of,
    sized,
)

aten = torch.ops.aten


def _fourier(given: Arguments) -> None:
    t, dims = given["self"], given["dim"]
    require(all(-t.dim() <= d < t.dim() for d in dims), f"dim must lie between {-t.dim()} and {t.dim() - 1}")
    require(len({d % t.dim() for d in dims}) == len(dims), "dim must not name a dimension twice")
    require(given["normalization"] in (0, 1, 2), "normalization must be 0, 1 or 2")
    require(len(dims) > 0 or "forward" in given, "dim must name a dimension")
    n = given.get("last_dim_size")
    if n is not None:
        require(n > 0 and t.shape[dims[-1]] == n // 2 + 1, f"self must have {n // 2 + 1} elements along the last dim")


def _convolved(given: Arguments) -> None:
    dims = given["input"].dim() - 2
    for name in ("stride", "padding", "dilation", "output_padding"):
        require(len(given[name]) in (1, dims), f"{name} must have {dims} numbers")
        require(all(n >= 0 for n in given[name]), f"{name} must not be negative")
    sized(given, "grad_output", results_of(aten.convolution.default, given, bias=None)[0].shape)


def _has_multiple(given: Arguments) -> None:
    """The least integer has no magnitude, and a division by -1 of it ends the process."""
    for name in ("self", "other"):
        t = given[name]
        if t.numel() and t.dtype is not torch.bool:
            least = torch.iinfo(t.dtype).min
            require(
                least == 0 or int(t.min()) > least, f"lcm: {name} has {least}, whose magnitude {t.dtype} does not hold"
            )


LAWS: dict[str, Law] = {
    "_fft_c2c": Law(_fourier),
    "_fft_r2c": Law(_fourier),
    "_fft_c2r": Law(_fourier),
    "convolution_backward": Law(_convolved),
    "lcm": Law(None, _has_multiple),
    "lcm_": Law(None, _has_multiple),
}
