"""Runs matrix products with oneDNN instead of the BLAS if other bits are allowed: in plans of mode `full`.

torch uses MKL for float32 products. On chips of another vendor than its own, MKL reaches three quarters of the possible speed.
oneDNN, which torch contains, too, does not depend on the vendor. Which products are affected depends on the chip and the
instruction alone, so it does not matter where programs are cut. oneDNN rounds the product before it adds the bias, as a separate
addition would.
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

#: Minimum numbers of rows and columns of the result, and of products per element. The BLAS is as fast or faster below them.
ROWS: Final = 256
COLUMNS: Final = 128
DEPTH: Final = 256
_Product = Callable[..., Tensor]


class InexactHost(TorchDevice):
    """The CPU, for plans that may have other bits than the library."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def library(self, call: LibraryCall, form: Form) -> LibraryCall:
        """See `TorchDevice`."""
        found = onednn_product(form)
        return call if found is None else replace(call, instead=found)


def onednn_product(form: Form) -> _Product | None:
    """Return the oneDNN function for a product, with the arguments of the library's operator; None: use the BLAS."""
    if (
        form.opcode not in _PRODUCTS
        or not _onednn_is_faster()
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
        return None  # oneDNN would copy the rows first
    if len(given) == 3 and given[bias].sizes != (columns,):
        return None
    return weight_rows


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear_pointwise(x, weight, bias, "none", [], "")


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return linear_pointwise(a, b.t(), None, "none", [], "")


def _addmm(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return linear_pointwise(a, b.t(), bias, "none", [], "")


#: For each opcode: positions of the two factors and of the bias among the arguments, and the function to call.
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
def _onednn_is_faster() -> bool:
    """Whether oneDNN was measured to be faster on this vendor's chips."""
    try:
        vendor = Path("/proc/cpuinfo").read_text().partition("vendor_id")[2].partition("\n")[0].strip(" \t:")
    except OSError:
        return False
    return vendor == "AuthenticAMD" and torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)
