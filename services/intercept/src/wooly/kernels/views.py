"""Operators that only look at a storage in another way. They never leave the client.

Most run the CPU kernel, which touches metadata alone. The two that everything else is built on, `as_strided` and `view`, have
their own short cut: they are called several times per layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wooly.storage import span
from wooly.torch_private import OpOverload, redispatch_cpu, reinterpret, schema_of

aten = torch.ops.aten

_view_cpu = redispatch_cpu(aten.view.default)
_as_strided_cpu = redispatch_cpu(aten.as_strided.default)
_inference_mode = torch.is_inference_mode_enabled
_MAX_KNOWN = 65536
_known: dict[tuple[Any, ...], tuple[tuple[int, ...], tuple[int, ...]]] = {}


def as_strided(t: Tensor, size: list[int], stride: list[int], storage_offset: int | None = None) -> Tensor:
    """`aten.as_strided`, bounds checked against the storage.

    The short cut makes inference tensors in inference mode, where a view of any other tensor is none.
    """
    here = t.storage_offset()
    offset = here if storage_offset is None else storage_offset
    need = span(tuple(size), tuple(stride))
    have = t.untyped_storage().nbytes()
    if (need and (offset + need) * t.element_size() > have) or offset < 0:
        raise RuntimeError(
            f"setStorage: sizes {list(size)}, strides {list(stride)}, storage offset {offset}, and itemsize "
            f"{t.element_size()} requiring a storage size of {(offset + need) * t.element_size()} are out of bounds "
            f"for storage of size {have}"
        )
    if _inference_mode() and not t.is_inference():
        return _as_strided_cpu(t, size, stride, offset)  # type: ignore[no-any-return]
    return reinterpret(t, size, stride, offset - here)


def view(t: Tensor, size: list[int]) -> Tensor:
    """`aten.view`: the first call of a kind computes the strides in C++, later ones reuse them."""
    key = (t.shape, t.stride(), tuple(size))
    known = _known.get(key)
    if known is None:
        r = _view_cpu(t, size)
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        _known[key] = (tuple(r.shape), r.stride())
        return r  # type: ignore[no-any-return]
    if _inference_mode() and not t.is_inference():
        return _view_cpu(t, size)  # type: ignore[no-any-return]
    return reinterpret(t, known[0], known[1], 0)


def reshape_alias(t: Tensor, size: list[int], stride: list[int]) -> Tensor:
    """`aten._reshape_alias`: the caller has computed the strides."""
    return as_strided(t, size, stride)


#: Operators with a kernel of their own here.
KERNELS: dict[OpOverload, Callable[..., Any]] = {
    aten.as_strided.default: as_strided,
    aten.view.default: view,
    aten._reshape_alias.default: reshape_alias,
}


def is_view(op: OpOverload) -> bool:
    """Whether `op` returns a view of an argument and writes nothing."""
    schema = schema_of(op)
    return not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)
