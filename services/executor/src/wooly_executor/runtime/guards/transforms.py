"""Laws for Fourier transforms, convolutions and integer division."""

from __future__ import annotations

import torch
from torch import Tensor
from wooly_wis.program import Form, OperandRef

from wooly_executor.runtime.guards.law import (
    ArgumentLaw,
    Arguments,
    require,
    require_shape,
    results_of,
)

aten = torch.ops.aten


def _fourier(given: Arguments) -> None:
    t, dims = given["self"], given["dim"]
    require(all(-t.dim() <= d < t.dim() for d in dims), f"dim must be between {-t.dim()} and {t.dim() - 1}")
    require(len({d % t.dim() for d in dims}) == len(dims), "dim must not contain a dimension twice")
    require(given["normalization"] in (0, 1, 2), "normalization must be 0, 1 or 2")
    require(len(dims) > 0 or "forward" in given, "dim must not be empty")
    n = given.get("last_dim_size")
    if n is not None:
        require(
            n > 0 and t.shape[dims[-1]] == n // 2 + 1,
            f"self must have {n // 2 + 1} elements along the last dimension that dim names",
        )


def _real_fourier(given: Arguments) -> None:
    _fourier(given)
    require(min(given["dim"]) >= 0, "dim must not be negative")


def _convolved(given: Arguments) -> None:
    dims = given["input"].dim() - 2
    for name in ("stride", "padding", "dilation", "output_padding"):
        require(len(given[name]) in (1, dims), f"{name} must have 1 or {dims} elements")
        require(all(n >= 0 for n in given[name]), f"{name} must not be negative")
    padding = given["padding"]
    if not given["transposed"]:
        sizes = list(results_of(aten.convolution.default, given, bias=None)[0].shape)
    else:  # the meta kernel refuses an empty result, which only the padding can make; the library computes it
        whole = results_of(aten.convolution.default, given, bias=None, padding=[0] * dims)[0].shape
        cut = padding if len(padding) == dims else [*padding] * dims
        sizes = [*whole[:2], *[n - 2 * p for n, p in zip(whole[2:], cut, strict=True)]]
    require_shape(given, "grad_output", sizes)


def _has_multiple(given: Arguments) -> None:
    """Require that no value is the smallest integer. Its absolute value overflows, and dividing it by -1 ends the process.

    The library divides narrower integers in a wider type.
    """
    for name in ("self", "other"):
        t = given[name]
        if t.numel() and t.dtype in (torch.int32, torch.int64):
            least = torch.iinfo(t.dtype).min
            require(
                int(t.min()) > least,
                f"lcm: {name} contains {least}, whose absolute value overflows {t.dtype}",
            )


def _truncates_integers(given: Arguments, form: Form) -> bool:
    """Whether the form divides integers, rounds towards zero, and may have -1 as a divisor."""
    if given.get("rounding_mode") != "trunc":
        return False
    for value in (given["self"], given["other"]):
        view = form.operands[value.index].view if isinstance(value, OperandRef) else None
        if view is not None and view.dtype.kind not in ("int", "uint", "bool"):
            return False
    divisor = given["other"]
    return not isinstance(divisor, (int, float)) or divisor == -1


def _has_quotient(given: Arguments) -> None:
    """Require that the smallest integer is not divided by -1. The quotient overflows, and the CPU ends the process."""
    a, b = given["self"], given["other"]
    dtype = torch.result_type(a, b)
    if any(isinstance(t, Tensor) and t.device.type != "cpu" for t in (a, b)) or dtype not in (torch.int32, torch.int64):
        return  # the library computes narrower integers in a wider type, which does not overflow
    least = torch.iinfo(dtype).min
    if _has(b, -1) and _has(a, least):
        raise RuntimeError(f"{least} / -1 overflows {dtype}")


def _has(value: Tensor | int, number: int) -> bool:
    if not isinstance(value, Tensor):
        return int(value) == number
    return value.dtype is not torch.bool and bool((value == number).any())


LAWS: dict[str, ArgumentLaw] = {
    "div": ArgumentLaw(None, _has_quotient, applies=_truncates_integers),
    "div_": ArgumentLaw(None, _has_quotient, applies=_truncates_integers),
    "_fft_c2c": ArgumentLaw(_fourier),
    "_fft_r2c": ArgumentLaw(_real_fourier),
    "_fft_c2r": ArgumentLaw(_real_fourier),
    "convolution_backward": ArgumentLaw(_convolved),
    "lcm": ArgumentLaw(None, _has_multiple),
    "lcm_": ArgumentLaw(None, _has_multiple),
}
