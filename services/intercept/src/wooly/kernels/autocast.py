"""Mixed precision: the dtype in which each operator runs under autocast, by CUDA's lists.

Autocast is a layer of the dispatcher above autograd, so the casts are part of the autograd graph. Each kernel here casts the
floating-point tensors of a call and then calls the operator below that layer. An operator in no list runs without casts.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from wooly.kernels.schema import Kernel
from wooly.torch_private import (
    OpOverload,
    below_autocast,
    has_kernel,
    is_view,
    raw_device,
    raw_to,
    redispatch_cuda_autocast,
    schema_of,
)

#: Operators that run in autocast's dtype: matrix products and convolutions, which gain most speed.
LOWER = (
    "_convolution", "_convolution.deprecated", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul",
    "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
    "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
)  # fmt: skip

#: Recurrent networks. CUDA runs each as one operator of its library, and autocast always runs this operator in float16.
RECURRENT = tuple(f"{kind}.{form}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for form in ("input", "data"))

#: Operators that run in float32, because they overflow or lose too much precision in a shorter dtype.
FULL = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity",
    "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss",
    "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss",
    "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm",
    "logsumexp", "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d",
    "upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa",
    "linalg_matrix_sqrth",
)  # fmt: skip

#: Operators that get `dtype=torch.float32` for their result, unless the call specifies a dtype.
FULL_RESULT = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
)  # fmt: skip

#: As `FULL_RESULT`, for operators whose result dtype is an argument of another overload.
FULL_RESULT_OVERLOAD = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}

#: Operators that run in the widest dtype of their arguments.
PROMOTE = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
    "scatter_add",
)  # fmt: skip

#: Operator that is refused: its input is a probability, which a shorter dtype may have rounded to 0 or 1.
BANNED = "binary_cross_entropy"


class CastCache:
    """Cache of casts of float32 weights (leaf tensors), valid until the outermost autocast region ends."""

    def __init__(self) -> None:
        self._casts: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def get(self, t: Tensor) -> Tensor | None:
        """The cached cast of `t`; None if there is none."""
        known = self._casts.get(id(t))
        return known[1] if known is not None and known[0]() is t else None

    def put(self, t: Tensor, cast: Tensor) -> None:
        self._casts[id(t)] = (weakref.ref(t), cast)

    def clear(self) -> None:
        self._casts.clear()


class Autocast:
    """Autocast's kernels for the tensors of one device type.

    Args:
        device_type: device type for which PyTorch keeps the autocast state.
    """

    def __init__(self, device_type: str) -> None:
        self._type = device_type
        self.cache = CastCache()

    def register(self, library: torch.library.Library) -> None:
        """Register the kernels of all lists in `library`, which implements `aten`."""

        def listed(names: Iterable[str]) -> list[str]:
            # CUDA's lists grow with the releases of PyTorch; do not register operators that are not in this release's lists.
            known = [n for n in names if hasattr(torch.ops.aten, n.partition(".")[0])]
            return [n for n in known if n in RECURRENT or has_kernel(f"aten::{n}", "AutocastCUDA")]

        names = listed((*LOWER, *RECURRENT, *FULL, *FULL_RESULT, *PROMOTE))
        below = {name: below_autocast(_overload(name)) for name in names}
        kernels: dict[str, Kernel] = {}
        kernels.update({name: self._lower(below[name]) for name in listed(LOWER)})
        kernels.update({name: self._fixed(below[name], torch.float16) for name in listed(RECURRENT)})
        kernels.update({name: self._fixed(below[name], torch.float32) for name in listed(FULL)})
        kernels.update({name: self._full_result(_overload(name), below[name]) for name in listed(FULL_RESULT)})
        kernels.update({name: self._promote(below[name]) for name in listed(PROMOTE)})
        for name in listed(FULL_RESULT_OVERLOAD):
            typed = FULL_RESULT_OVERLOAD[name]
            kernels[name] = self._append_type(_overload(name), below_autocast(_overload(typed)))
        kernels[BANNED] = redispatch_cuda_autocast(_overload(BANNED))  # always raises CUDA's error
        for name, kernel in kernels.items():
            library.impl(name, kernel, "AutocastPrivateUse1")

    # -- one kernel per policy ---------------------------------------------------------------------------------------

    def _lower(self, call: Kernel) -> Kernel:
        cast, kind = self._cast, self._type

        def run(*args: Any, **kwargs: Any) -> Any:
            to = torch.get_autocast_dtype(kind)
            return call([cast(a, to) for a in args], {k: cast(v, to) for k, v in kwargs.items()})

        return run

    def _fixed(self, call: Kernel, to: torch.dtype) -> Kernel:
        cast = self._cast

        def run(*args: Any, **kwargs: Any) -> Any:
            return call([cast(a, to) for a in args], {k: cast(v, to) for k, v in kwargs.items()})

        return run

    def _full_result(self, op: OpOverload, call: Kernel) -> Kernel:
        at = next(i for i, a in enumerate(schema_of(op).arguments) if a.name == "dtype")
        positional = not schema_of(op).arguments[at].kwarg_only
        eligible = self._eligible

        def run(*args: Any, **kwargs: Any) -> Any:
            if eligible(args[0]):
                if positional and len(args) > at:
                    if args[at] is None:
                        args = (*args[:at], torch.float32, *args[at + 1 :])
                elif kwargs.get("dtype") is None:
                    kwargs["dtype"] = torch.float32
            return call(args, kwargs)

        return run

    def _append_type(self, op: OpOverload, call: Kernel) -> Kernel:
        defaults = [a.default_value if a.has_default_value() else None for a in schema_of(op).arguments]
        eligible = self._eligible

        def run(*args: Any) -> Any:
            to = torch.float32 if eligible(args[0]) else args[0].dtype
            return call((*args, *defaults[len(args) :]), {"dtype": to})

        return run

    def _promote(self, call: Kernel) -> Kernel:
        cast, widest, kind = self._cast, self._widest, self._type

        def run(*args: Any, **kwargs: Any) -> Any:
            to = widest(torch.get_autocast_dtype(kind), args)
            return call([cast(a, to) for a in args], {k: cast(v, to) for k, v in kwargs.items()})

        return run

    # -- casts -------------------------------------------------------------------------------------------------------

    def _eligible(self, t: Tensor) -> bool:
        """Whether autocast may cast `t`: a floating-point tensor on the device that is not float64."""
        dtype = t.dtype
        return dtype.is_floating_point and dtype is not torch.float64 and raw_device(t).type == self._type

    def _cast(self, a: Any, to: torch.dtype) -> Any:
        """Cast the tensors in one argument of a call. Other values do not change."""
        if isinstance(a, Tensor):
            if a.dtype is to or not self._eligible(a):
                return a
            weight = (
                a.dtype is torch.float32
                and a.requires_grad
                and to is torch.get_autocast_dtype(self._type)
                and a.is_leaf
                and not is_view(a)
                and torch.is_autocast_cache_enabled()
            )
            if not weight:
                return raw_to(a, to)
            cast = self.cache.get(a)
            return self._cast_weight(a, to) if cast is None else cast
        if a.__class__ is list:
            return [self._cast(x, to) for x in a]
        return a

    def _cast_weight(self, weight: Tensor, to: torch.dtype) -> Tensor:
        """Cast a weight for all uses in this region of autocast, also for those with gradients after a first use without."""
        if torch.is_inference_mode_enabled():
            return raw_to(weight, to)  # autograd must not get a tensor that was made in inference mode
        with torch.enable_grad():
            cast = raw_to(weight, to)
        self.cache.put(weight, cast)
        return cast

    def _widest(self, current: torch.dtype, args: Any) -> torch.dtype:
        """The widest dtype of the tensors in `args`, at least `current`.

        Raises:
            RuntimeError: a tensor has a 16-bit dtype that is not autocast's dtype. It is PyTorch's error.
        """
        lower = torch.get_autocast_dtype(self._type)
        for a in args:
            if isinstance(a, Tensor):
                if not self._eligible(a):
                    continue
                if torch.float32 in (current, a.dtype):
                    current = torch.float32
                elif current is not lower or a.dtype is not lower:
                    raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
            elif a.__class__ is list:
                current = self._widest(current, a)
        return current


def _overload(name: str) -> OpOverload:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    assert isinstance(op, OpOverload)
    return op
