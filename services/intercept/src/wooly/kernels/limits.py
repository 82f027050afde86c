"""Numbers of a call that may not fit into the dtype of its first argument, for which kernels then raise an error.

Numbers are params, so calls with other numbers have the same plan. Calls with such numbers have signatures of their own: they
are tried like a first call, so that their errors come at the call, as on CUDA. The native kernels do the same (`signature.h`).
"""

from __future__ import annotations

from math import inf
from typing import Any

import torch

_UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
#: Per dtype: the smallest number that raises no doubt, the smallest and the largest number of the dtype. A negative number raises
#: doubt for integers, because they have no negative powers. Unsigned dtypes take negative integers, which wrap around, but no
#: negative floats. The dtypes that are not here take each number.
_LIMITS: dict[Any, tuple[float, float, float]] = {
    **{dtype: (0, -torch.iinfo(dtype).max, torch.iinfo(dtype).max) for dtype in _UNSIGNED},
    **{dtype: (0, torch.iinfo(dtype).min, torch.iinfo(dtype).max) for dtype in _SIGNED},
    **{dtype: (-torch.finfo(dtype).max, -torch.finfo(dtype).max, torch.finfo(dtype).max) for dtype in _FLOATS},
}
_LIMITS[torch.complex64] = _LIMITS[torch.float32]


#: A number that does not fit into the dtype.
UNFIT = 2


def unusual(key: list[Any], params: list[Any]) -> tuple[int, ...]:
    """How the numbers of a call are related to the dtype of its first argument, a tensor or a list of tensors.

    Args:
        key: the signature of the call: the operator, and then its arguments.
        params: the numbers.

    Returns:
        For each number: 0 if it fits, 1 if it is negative, and fits into the dtype of integers, 2 if it does not fit. Empty if
        all are 0, or if the first argument is something else.
    """
    dtype = key[1]
    if dtype.__class__ is int:  # the length of a list of tensors
        dtype = key[2]
    limits = _LIMITS.get(dtype) if dtype.__class__ is torch.dtype else None
    if limits is None:
        return ()
    low, least, most = limits
    for x in params:
        if not low <= x <= most:
            break
    else:
        return ()
    if low:
        found = [0 if least <= x <= most or x != x or x in (inf, -inf) else UNFIT for x in params]
    else:
        wraps = dtype in _UNSIGNED
        found = [
            0 if 0 <= x <= most else 1 if least <= x < 0 and not (wraps and x.__class__ is float) else UNFIT
            for x in params
        ]
    return tuple(found) if any(found) else ()
