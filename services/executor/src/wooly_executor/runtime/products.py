"""Matrix products by oneDNN in place of the BLAS, where results need not have the BLAS's bits: in plans of mode `full`.

torch gives products of float32 to MKL, which runs another vendor's chips at three quarters of what they can do; oneDNN, which
comes with torch, too, does not ask whose they are. Which products these are hangs on the chip and on the instruction alone, so it
does not matter where programs are cut. oneDNN adds a bias after the product is rounded, as the sum by itself would.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from wooly_wis.dtypes import DType
from wooly_wis.program import Form, OperandRef, Role, View

from wooly_executor.runtime.calls import LibraryCall, gradients_of, readings
from wooly_executor.runtime.device import TorchDevice
from wooly_executor.runtime.torch_private import linear_pointwise

#: The least rows of a result, columns of it, and products in one element: below, the BLAS is as quick or quicker.
ROWS: Final = 256
COLUMNS: Final = 128
DEPTH: Final = 256
_Product = Callable[..., Tensor]


class LooseHost(TorchDevice):
    """The host, for plans that need not have the library's own bits."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def library(self, call: LibraryCall, form: Form) -> LibraryCall:
        """See `TorchDevice`."""
        found = by_onednn(form)
        return call if found is None else replace(call, instead=found)


def by_onednn(form: Form) -> _Product | None:
    """What does a product, given the arguments of the library's operator; None: it is the BLAS's."""
    if (
        form.opcode not in _PRODUCTS
        or not _quicker()
        or form.params
        or readings(form)
        or gradients_of(form) is not None
    ):
        return None
    args, views = form.attr("args"), [o.view for o in form.operands]
    if not isinstance(args, tuple) or [o.role for o in form.operands] != [Role.IN] * len(args) + [Role.OUT]:
        return None
    given: list[View] = []
    for a in args:
        view = views[a.index] if isinstance(a, OperandRef) else None
        if view is None or view.dtype is not DType.F32:
            return None
        given.append(view)
    first, second, bias, weight_rows = _PRODUCTS[form.opcode]
    if len(given) not in ({2, 3} if form.opcode == "linear" else {1 + max(first, second)}):
        return None
    x, w = given[first], given[second]
    depth = x.sizes[-1]
    columns = w.numel // depth
    if x.numel // depth < ROWS or columns < COLUMNS or depth < DEPTH or not _row_major(x):
        return None  # other rows would be copied first
    if len(given) == 3 and given[bias].sizes != (columns,):
        return None
    return weight_rows


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear_pointwise(x, weight, bias, "none", [], "")


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return linear_pointwise(a, b.t(), None, "none", [], "")


def _addmm(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return linear_pointwise(a, b.t(), bias, "none", [], "")


#: Per opcode, which arguments are multiplied and which is the bias; and what does it.
_PRODUCTS: Final[dict[str, tuple[int, int, int, _Product]]] = {
    "linear": (0, 1, 2, _linear),
    "mm": (0, 1, 2, _mm),
    "addmm": (1, 2, 0, _addmm),
}


def _row_major(view: View) -> bool:
    expected = 1
    for size, stride in zip(reversed(view.sizes), reversed(view.strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


@functools.cache
def _quicker() -> bool:
    """Whether this chip is one on which oneDNN was measured to be quicker."""
    try:
        vendor = Path("/proc/cpuinfo").read_text().partition("vendor_id")[2].partition("\n")[0].strip(" \t:")
    except OSError:
        return False
    return vendor == "AuthenticAMD" and torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)
