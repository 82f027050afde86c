"""Dtypes that CUDA's kernels have and the CPU's lack: the operands are converted to a wider dtype, and the results back.

An executor on a CPU uses the CPU's kernels. A GPU computes the narrow dtype itself, except in Fourier transforms: PyTorch refuses
half precision in them before a device is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, Final

import torch
from torch import Tensor

from wooly.kernels.schema import Call, OpFacts, tensors_of
from wooly.torch_private import OpOverload, tree_map

_HALVES: Final = frozenset({torch.float16, torch.bfloat16})
_COMPLEX_HALF: Final = frozenset({torch.complex32})
_FLOAT8: Final = frozenset(
    {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu}
)
#: The dtype in which a narrow dtype is computed.
_WIDER: Final = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
    torch.bool: torch.uint8,
    **dict.fromkeys(_FLOAT8, torch.float32),
}
#: Per narrow dtype: the dtypes of results in the wider dtype, and the dtypes to which they are converted.
_NARROWED: Final = {
    torch.float16: {torch.float32: torch.float16, torch.complex64: torch.complex32},
    torch.bfloat16: {torch.float32: torch.bfloat16},
    torch.complex32: {torch.complex64: torch.complex32, torch.float32: torch.float16},
    torch.bool: {torch.uint8: torch.bool},
    **{dtype: {torch.float32: dtype} for dtype in _FLOAT8},
}
_COMPLEX: Final = (
    "acos acosh angle asin asinh atan atanh cos cosh div exp lerp log logaddexp pow prod rsqrt sigmoid sigmoid_backward sin sinh "
    "sqrt sum tan tanh tanh_backward trace"
)
_HALF: Final = (
    "_upsample_bicubic2d_aa _upsample_bicubic2d_aa_backward _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward avg_pool3d "
    "avg_pool3d_backward multi_margin_loss multi_margin_loss_backward multilabel_margin_loss_backward "
    "multilabel_margin_loss_forward"
)
#: By name of an operator: the dtypes that its CUDA kernel supports and its CPU kernel does not. Source: `dtypesIfCUDA` and
#: `dtypes` in PyTorch's `op_db` (for `abs`, those of softsign, which calls it). tests/conformance/test_dtypes.py compares them.
_GAPS: Final = {
    **dict.fromkeys(_COMPLEX.split(), _COMPLEX_HALF),
    **dict.fromkeys(_HALF.split(), _HALVES),
    **dict.fromkeys(("_fft_c2c", "_fft_c2r"), _COMPLEX_HALF),
    "_fft_r2c": frozenset({torch.float16}),
    "abs": frozenset({torch.bool}),
    "equal": _FLOAT8,
    "rrelu_with_noise": frozenset({torch.float16}),
    "trace": _COMPLEX_HALF | {torch.bool},
}
#: Operators that CUDA computes in float32 if their arguments are narrower, and the CPU in the dtype of the arguments.
_PRECISE: Final = frozenset(
    {
        "fractional_max_pool2d",
        "fractional_max_pool3d",
        "grid_sampler_2d",
        "grid_sampler_2d_backward",
        "grid_sampler_3d",
        "grid_sampler_3d_backward",
    }
)
#: Fourier transforms. PyTorch checks their dtypes before it chooses a kernel.
FOURIER: Final = tuple(
    f"fft_{inverse}{kind}{dims}" for kind in ("fft", "rfft", "hfft") for inverse in ("", "i") for dims in ("", "2", "n")
)


def gaps_of(op: OpOverload) -> frozenset[torch.dtype]:
    """Dtypes that the operator's CUDA kernel supports, and its CPU kernel does not, or with less precision."""
    name = op.overloadpacket.__name__.removesuffix("_")
    return _HALVES if name in _PRECISE else _GAPS.get(name, frozenset())


def gap_of(gaps: frozenset[torch.dtype], call: Call) -> torch.dtype | None:
    """The dtype in which the call would be computed, if it is one of `gaps`; else None."""
    dtype = call.kwargs.get("dtype")
    if dtype is None:
        dtypes = [t.dtype for t in tensors_of(call)]
        if torch.complex32 in gaps and any(isinstance(a, complex) for a in call.args):
            dtypes = [torch.complex32 if d is torch.float16 else d for d in dtypes]  # the number makes them complex
        dtype = reduce(torch.promote_types, dtypes) if gaps.intersection(dtypes) else None
    return dtype if dtype in gaps else None


def compute_wider(facts: OpFacts, narrow: torch.dtype, call: Call) -> Any:
    """Run a call in the wider dtype, and return its results in the narrow one. Tensors that the operator writes are written."""
    args, kwargs = tree_map(lambda a: _widened(a, narrow), (call.args, call.kwargs))
    found = facts.op(*args, **kwargs)
    written: dict[str | None, Any] = {}
    for name in facts.written:
        own, wide = _argument(facts, name, call), _argument(facts, name, Call(args, kwargs))
        if own is not wide:
            if own.shape != wide.shape:
                own.resize_(wide.shape)
            own.copy_(wide)
        written[name] = own
    results = list(found) if isinstance(found, (list, tuple)) else [found]
    names = facts.returns_written if len(results) == len(facts.returns_written) else (None,) * len(results)
    results = [_narrowed(r, narrow) if name is None else written[name] for r, name in zip(results, names, strict=True)]
    return tuple(results) if isinstance(found, tuple) else results if isinstance(found, list) else results[0]


def _argument(facts: OpFacts, name: str, call: Call) -> Any:
    at = facts.positions.get(name, len(call.args))
    return call.args[at] if at < len(call.args) else call.kwargs.get(name)


def fourier(op: OpOverload) -> Callable[..., Any]:
    """Make the kernel of a Fourier transform: half precision is computed in single precision."""
    decompose = op.decompose

    def run(t: Tensor, *args: Any, **kwargs: Any) -> Any:
        if t.dtype is not torch.float16 and t.dtype is not torch.complex32:
            return decompose(t, *args, **kwargs)
        return _narrowed(decompose(t.to(_WIDER[t.dtype]), *args, **kwargs), t.dtype)

    return run


def fourier_into(op: OpOverload) -> Callable[..., Any]:
    """Make the kernel of a Fourier transform with `out=`: half precision is computed in single precision."""
    decompose = op.decompose

    def run(t: Tensor, *args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        if t.dtype is not torch.float16 and t.dtype is not torch.complex32:
            return decompose(t, *args, out=out, **kwargs)  # type: ignore[no-any-return]
        if out.dtype not in _WIDER:
            return decompose(t.to(_WIDER[t.dtype]), *args, out=out, **kwargs)  # type: ignore[no-any-return]
        wide = torch.empty(out.shape, dtype=_WIDER[out.dtype], device=out.device)
        decompose(t.to(_WIDER[t.dtype]), *args, out=wide, **kwargs)
        if out.shape != wide.shape:
            out.resize_(wide.shape)
        return out.copy_(wide)

    return run


def _widened(a: Any, narrow: torch.dtype) -> Any:
    if isinstance(a, Tensor):
        mixed = narrow is torch.complex32 and a.dtype is torch.float16  # with a complex tensor or number
        return a.to(_WIDER[a.dtype]) if a.dtype is narrow or mixed else a
    return _WIDER[narrow] if a is narrow else a


def _narrowed(a: Any, narrow: torch.dtype) -> Any:
    return a.to(_NARROWED[narrow].get(a.dtype, a.dtype)) if isinstance(a, Tensor) else a
