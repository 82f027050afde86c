"""QR decompositions of complex matrices on a CPU: MKL computes matrices that are not tall on one core.

The diagonal of R is real. MKL with several threads leaves the last element of the diagonal complex if a matrix has no more rows
than columns. The product of Q and R is right, but R depends on the number of threads, and gradients assume a real diagonal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from wooly_wis.program import Form

from wooly_executor.runtime.calls import LibraryCall, function_of, view_of_first
from wooly_executor.runtime.torch_private import limit_products

#: Operators that decompose their first argument.
QR: Final = frozenset(("linalg_qr", "geqrf"))


def complex_qr(call: LibraryCall, form: Form) -> Callable[..., Any] | None:
    """Return a function that takes an operator's place; None: the library computes it, because R is right with all threads."""
    op = call.op
    if op.namespace != "aten" or op.overloadpacket.__name__ not in QR or torch.get_num_threads() == 1:
        return None
    products = limit_products
    if products is None:
        return None  # the library has no MKL
    view = view_of_first(call, form)
    if view is not None and (view.dtype.kind != "complex" or len(view.sizes) < 2 or view.sizes[-2] > view.sizes[-1]):
        return None
    function = function_of(op)

    def on_one_core(*args: Any, **kwargs: Any) -> Any:
        cores = products(1)
        try:
            return function(*args, **kwargs)
        finally:
            products(cores)

    return on_one_core
