"""LU decompositions of batches on a CPU: the device's thread computes one matrix after another, with MKL's threads.

The library divides a batch among its threads, and each of them calls MKL. After `torch.set_num_threads`, MKL expects several
threads there, too, but gets one. For matrices from about 130 rows on, it then leaves a part of the pivots unwritten, and nothing
reports an error: determinants and decompositions are wrong. With 256 rows and 128 columns, the call sometimes does not return.

MKL divides no matrix whose sides have at most `UNDIVIDED` elements. The library divides a batch of such matrices as usual.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from wooly_wis.program import Form

from wooly_executor.bounds.work import product
from wooly_executor.runtime.calls import LibraryCall, function_of, view_of_first
from wooly_executor.runtime.torch_private import limit_products, limit_threads, threads_of_this_thread

#: Operators that decompose their first argument.
LU: Final = frozenset(
    ("_linalg_det", "_linalg_slogdet", "_linalg_solve_ex", "linalg_inv_ex", "linalg_lu", "linalg_lu_factor_ex")
)

#: Maximum number of rows and columns of a matrix that MKL computes in one part. Measured with 2 and 4 threads and four dtypes: no
#: matrix with sides of up to this many elements was wrong. The smallest wrong matrix had 134 rows.
UNDIVIDED: Final = 64


def lu_of_batch(call: LibraryCall, form: Form) -> Callable[..., Any] | None:
    """Return a function that takes an operator's place; None: the library computes it.

    The library computes single matrices, batches of small matrices, and all matrices if it has one thread.
    """
    op = call.op
    if op.namespace != "aten" or op.overloadpacket.__name__ not in LU or torch.get_num_threads() == 1:
        return None
    limit, products, threads = limit_threads, limit_products, threads_of_this_thread
    if limit is None or products is None or threads is None:
        return None  # the library has no MKL
    view = view_of_first(call, form)
    if view is not None and (product(view.sizes[:-2]) < 2 or max(view.sizes[-2:]) <= UNDIVIDED):
        return None
    function = function_of(op)

    def one_after_another(*args: Any, **kwargs: Any) -> Any:
        team = threads()
        cores = products(team)
        limit(1)
        try:
            return function(*args, **kwargs)
        finally:
            limit(team)
            products(cores)

    return one_after_another
