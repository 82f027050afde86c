"""Additions to elements that several indices name, on a CPU: the device's thread adds, in the order of the indices.

The library divides these additions among its threads if the dtype is float32. Threads that add to one element do it in any order,
and a sum of three numbers then has other last bits in each run. With other dtypes, one thread adds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from wooly_wis.dtypes import DType
from wooly_wis.program import Form

from wooly_executor.runtime.calls import LibraryCall, function_of, view_of_first
from wooly_executor.runtime.torch_private import limit_threads, threads_of_this_thread

#: Operators that add to indexed elements if `accumulate` is true. Clients write the other names of these operators with them.
ADDING: Final = frozenset(("_index_put_impl_", "put_"))
#: The position of `accumulate` in each of them.
_ACCUMULATE: Final = 3


def ordered_sum(call: LibraryCall, form: Form) -> Callable[..., Any] | None:
    """Return a function that takes an operator's place; None: the library has one order for it, or one thread."""
    op = call.op
    if op.namespace != "aten" or op.overloadpacket.__name__ not in ADDING or torch.get_num_threads() == 1:
        return None
    limit, threads = limit_threads, threads_of_this_thread
    if limit is None or threads is None:
        return None  # the library has no OpenMP
    place = call.args[_ACCUMULATE] if len(call.args) > _ACCUMULATE else False
    if dict(call.kwargs).get("accumulate", place) is False:
        return None
    view = view_of_first(call, form)
    if view is not None and view.dtype is not DType.F32:
        return None
    function = function_of(op)

    def in_order(*args: Any, **kwargs: Any) -> Any:
        team = threads()
        limit(1)
        try:
            return function(*args, **kwargs)
        finally:
            limit(team)

    return in_order
