"""`out=` tensors: the size and layout that CPU kernels would give them, and the warnings of CPU kernels."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from wooly import storage
from wooly.kernels.overlap import refuse_overlap
from wooly.kernels.schema import SHAPED_BY_SCALARS, Call, OpFacts, unsupported
from wooly.torch_private import warn_of_resize

#: `out=` arguments to which LAPACK's kernels give a column-major layout when they resize them: always, only if the tensor is
#: empty, or only if they solve from the left.
_COLUMN_MAJOR = {
    ("aten.linalg_ldl_factor_ex.out", "LD"): "always",
    ("aten.linalg_ldl_solve.out", "out"): "always",
    ("aten.linalg_lu_factor_ex.out", "LU"): "always",
    ("aten.linalg_lu_solve.out", "out"): "from the left",
    ("aten.linalg_qr.out", "Q"): "always",
    ("aten.linalg_qr.out", "R"): "always",
    ("aten._linalg_eigh.eigenvalues", "eigenvectors"): "always",
    ("aten.cholesky_inverse.out", "out"): "empty",
    ("aten.linalg_eig.out", "eigenvectors"): "empty",
    ("aten.linalg_householder_product.out", "out"): "empty",
    ("aten.ormqr.out", "out"): "empty",
    ("aten.triangular_solve.X", "M"): "always",
    ("aten.triangular_solve.X", "X"): "always",
}

#: Operators that are inferred on the host if `out=` is resized, because meta kernels give another warning or another layout.
RESIZED_ON_HOST = frozenset(
    {
        *("aten._fft_c2c.out", "aten._fft_r2c.out", "aten.cat.out", "aten.complex.out", "aten.conj_physical.out"),
        *("aten.kthvalue.values", "aten.polar.out"),
    }
)

#: Operators whose CPU kernels resize `out=` without the warning that their meta kernels give.
RESIZE_SILENTLY = frozenset(
    {
        "addbmm",
        "arange",
        "bernoulli",
        "eye",
        "linspace",
        "log_sigmoid_forward",
        "logspace",
        "multinomial",
        "narrow_copy",
    }
)

#: `torch.normal(mean, 1.0, out=out)`, whose result has the broadcast size of the mean and `out`. Its meta kernel ignores `out`.
BROADCAST_WITH_OUT = "aten.normal.Tensor_float_out"


class ResizeOutError(Exception):
    """Internal signal: an `out=` tensor must be resized before the call can be planned."""

    def __init__(self, sizes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
        super().__init__("out tensors must be resized")
        self.sizes = sizes


def check_outs(facts: OpFacts, call: Call, metas: dict[str, Any]) -> None:
    """Compare the sizes of a call's `out=` tensors with the sizes that inference has found.

    Args:
        facts: the operator.
        call: the arguments.
        metas: keyword arguments of the inference, whose `out=` tensors have the inferred sizes.

    Raises:
        ResizeOutError: an `out=` tensor must be resized first.
        NotImplementedError: an `out=` list has tensors of other sizes.
        RuntimeError: an `out=` tensor cannot be resized, because it is expanded.
    """
    name_of = facts.op.overloadpacket.__name__
    wrong = {}
    for name in facts.out_args:
        real: Any = call.kwargs.get(name)
        meta: Any = metas.get(name)
        listed = isinstance(real, (list, tuple))
        for r, m in zip(real, meta, strict=True) if listed else [(real, meta)]:
            if not isinstance(r, Tensor) or tuple(r.shape) == tuple(m.shape):
                continue
            if listed:
                raise unsupported(
                    facts.name,
                    "a tensor in the list of `out` tensors has another size than the result; allocate it with that size",
                )
            if name_of in SHAPED_BY_SCALARS and r.numel() == m.numel():
                continue  # these operators accept any shape with this number of elements
            if name_of == "arange" and r.numel():
                _warn_of_rounding(r, m)
            sizes = tuple(m.shape)
            if facts.name == BROADCAST_WITH_OUT:
                sizes = tuple(torch.broadcast_shapes(call.args[0].shape, r.shape))
                if sizes == tuple(r.shape):
                    continue
                warn_of_resize(r, sizes)
                m = torch.empty(sizes, device="meta")
            refuse_overlap(r)
            wrong[name] = (sizes, column_major(sizes) if _by_columns(facts, call, name, r) else m.stride())
    if wrong:
        raise ResizeOutError(wrong)


def _warn_of_rounding(r: Tensor, m: Tensor) -> None:
    warnings.warn(
        f"The number of elements in the out tensor of shape {list(r.shape)} is {r.numel()} which does not "
        f"match the computed number of elements {m.numel()}. Note that this may occur as a result of "
        f"rounding error. The out tensor will be resized to a tensor of shape ({m.numel()},).",
        stacklevel=3,
    )


def _by_columns(facts: OpFacts, call: Call, name: str, out: Tensor) -> bool:
    """Whether the CPU kernel gives `out` a column-major layout when it resizes `out`."""
    when = _COLUMN_MAJOR.get((facts.name, name))
    if when == "from the left":
        return bool(call.kwargs.get("left", True))
    return when == "always" or (when == "empty" and out.numel() == 0)


def column_major(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a batch of column-major matrices."""
    if len(sizes) < 2:
        return storage.contiguous_strides(sizes)
    turned = storage.contiguous_strides((*sizes[:-2], sizes[-1], sizes[-2]))
    return (*turned[:-2], turned[-1], turned[-2])
