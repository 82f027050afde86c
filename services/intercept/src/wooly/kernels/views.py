"""View operators. They change only metadata, so the client sends nothing for them.

Most of them run the CPU kernel, which reads only metadata. `as_strided` and `view` have faster kernels here, because models call
them several times per layer.
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
#: Maximum number of cached shapes; a full cache is cleared.
_MAX_KNOWN = 65536
_known: dict[tuple[Any, ...], tuple[tuple[int, ...], tuple[int, ...]]] = {}


def as_strided(t: Tensor, size: list[int], stride: list[int], storage_offset: int | None = None) -> Tensor:
    """`aten.as_strided`, with a check against the bounds of the storage.

    In inference mode, `reinterpret` would make an inference tensor. A view of a normal tensor must not be an inference tensor, so
    the CPU kernel makes that view.
    """
    if stride and min(stride) < 0:
        raise RuntimeError(f"as_strided: Negative strides are not supported at the moment, got strides: {list(stride)}")
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
    return reinterpret(t, tuple(size), tuple(stride), offset - here)


def view(t: Tensor, size: list[int]) -> Tensor:
    """`aten.view`. The first call for a shape and strides computes the new strides in C++; later calls use the cached strides."""
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
    """`aten._reshape_alias`: as `as_strided`, without a storage offset."""
    return as_strided(t, size, stride)


#: View operators that have a kernel in this file.
KERNELS: dict[OpOverload, Callable[..., Any]] = {
    aten.as_strided.default: as_strided,
    aten.view.default: view,
    aten._reshape_alias.default: reshape_alias,
}


def is_view(op: OpOverload) -> bool:
    """Whether `op` returns a view of an argument and writes nothing."""
    schema = schema_of(op)
    return not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)
