"""Chooses faster functions for float32 products on CPUs than torch's own call of MKL.

On chips of another vendor than its own, MKL reaches three quarters of the possible speed, and it hardly uses the other cores if
one factor has few rows. There are two ways around this:

- A product with few rows is split by its columns into one batch, whose products MKL spreads over the cores (`split_product`). The
  bits are the library's. A model computes the next token with such products: 1.1 to 2 times as fast with two cores.
- In plans of mode `full`, which may have other bits, oneDNN, which torch contains, too, computes products with many rows. It
  rounds the product before it adds the bias, as a separate addition would.

Which products are affected depends on the chip, the number of threads and the instruction alone, so it does not matter where
programs are cut.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import torch
from torch import Tensor
from wooly_wis.assembly import row_major
from wooly_wis.dtypes import DType
from wooly_wis.program import Form, OperandRef, Role, View

from wooly_executor.runtime.calls import function_of, gradients_of, readings
from wooly_executor.runtime.torch_private import OpOverload, linear_pointwise

#: Minimum numbers of rows and columns of the result, and of products per element. The BLAS is as fast or faster below them.
ROWS: Final = 256
COLUMNS: Final = 128
DEPTH: Final = 256
#: Work, in float32 operations, up to which a product is small. One core takes 20 to 60 us for so much. MKL spreads even products
#: that take 3 us, and each time the device thread waits until the other threads are awake and have a core.
SMALL_PRODUCT: Final = 1 << 21
#: A product that is split is not small. It has at most so many rows, at least so many columns in a part, and at least so many
#: elements in its second factor. MKL spreads more rows well, and smaller factors stay in the cores' caches.
FEW_ROWS: Final = 128
PART_COLUMNS: Final = 64
LARGE_FACTOR: Final = 1 << 18
#: The columns of a part are a multiple of this. MKL computes the columns beside it in another order.
STEP: Final = 4
#: Depth of the products that are compared. Each takes a quarter of a millisecond.
_SAMPLE_DEPTH: Final = 64
_Product = Callable[..., Tensor]
_T = TypeVar("_T")


class _Shape(NamedTuple):
    """A product of float32 matrices, [rows, depth] with rows next to each other, and [depth, columns], with a bias or without."""

    rows: int
    depth: int
    columns: int
    weight: View


def _shape_of(form: Form) -> _Shape | None:
    """Return the shape of an instruction's product; None: it is no product, or no plain one, or its views do not fit together."""
    if form.opcode not in _PRODUCTS or form.params or readings(form) or gradients_of(form) is not None:
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
    first, second, bias, counts, _ = _PRODUCTS[form.opcode]
    if len(given) not in counts:
        return None
    x, w = given[first], given[second]
    depth = x.sizes[-1] if x.sizes else 0
    if not depth or not _row_major(x):
        return None
    columns, linear = w.numel // depth, form.opcode == "linear"
    if w.sizes != ((columns, depth) if linear else (depth, columns)) or not (linear or len(x.sizes) == 2):
        return None  # the library refuses such views; a batch of parts would compute another product
    if len(given) == 3 and (given[bias].sizes != (columns,) or not _row_major(given[bias])):
        return None
    return _Shape(x.numel // depth, depth, columns, w)


def onednn_product(form: Form) -> _Product | None:
    """Return the oneDNN function for a product, with the arguments of the library's operator; None: use the BLAS."""
    shape = _shape_of(form)
    if shape is None or shape.rows < ROWS or shape.columns < COLUMNS or shape.depth < DEPTH:
        return None
    if not _is_matrix(shape.weight) or not _mkl_is_slow() or not _onednn_is_there():
        return None  # oneDNN refuses a factor whose elements overlap
    return _PRODUCTS[form.opcode].onednn


class SplitProduct:
    """Computes parts of the columns of a product as one batch. Takes the arguments of the library's operator.

    Args:
        library: the library's operator, for arguments of other shapes: a piece of the instruction.
        opcode: one of `linear`, `mm` and `addmm`.
        shape: the shape of the product.
        sizes: sizes of its first factor, and of its result.
        parts: number of parts.

    Attributes:
        left, right, bias: sizes and strides of the factors and of the bias, with a dimension for the parts in front.
        apart: sizes and strides of the batch's result, with the rows in front; None: one row, which is the result.
        sizes: sizes of the batch's result, as part of the product's.
        rest: the columns that are left over, which the library computes: dimension, begin and length among the second factor's
            sizes. None: there are none.
    """

    __slots__ = ("_bias", "_first", "_given", "_library", "_second", "apart", "bias", "left", "rest", "right", "sizes")

    def __init__(
        self, library: _Product, opcode: str, shape: _Shape, sizes: tuple[tuple[int, ...], tuple[int, ...]], parts: int
    ) -> None:
        self._library = library
        self._first, self._second, self._bias, *_ = _PRODUCTS[opcode]
        rows, depth, width = shape.rows, shape.depth, shape.columns // parts // STEP * STEP
        whole = parts * width
        along, across = shape.weight.strides if opcode != "linear" else reversed(shape.weight.strides)
        self._given = sizes[0], shape.weight.sizes
        self.left = (parts, rows, depth), (0, depth, 1)
        self.right = (parts, depth, width), (width * across, along, across)
        self.bias = (parts, rows, width), (width, 0, 1)
        self.apart = ((rows, parts, width), (width, rows * width, 1)) if rows > 1 else None
        self.sizes = (*sizes[1][:-1], whole)
        dim = 0 if opcode == "linear" else 1
        self.rest = (dim, whole, shape.columns - whole) if whole < shape.columns else None

    @property
    def key(self) -> Hashable:
        """Equal for two products of one operator if and only if they compute the same."""
        where, looks = (self._first, self._second, self._bias), (self.left, self.right, self.bias, self.apart)
        return where, looks, self._given, self.sizes, self.rest

    def factors(self, given: Sequence[_T]) -> tuple[_T, _T, _T | None]:
        """The two factors and the bias among the arguments of the library's operator."""
        return given[self._first], given[self._second], given[self._bias] if len(given) == 3 else None

    def __call__(self, *given: Tensor) -> Tensor:
        x, w, bias = self.factors(given)
        if (x.shape, w.shape) != self._given:
            return self._library(*given)
        left, right = x.as_strided(*self.left), w.as_strided(*self.right)
        found = left.bmm(right) if bias is None else torch.baddbmm(bias.as_strided(*self.bias), left, right)
        found = (found if self.apart is None else found.as_strided(*self.apart)).reshape(self.sizes)
        return found if self.rest is None else torch.cat((found, self._library(*self.of_rest(given, _narrowed))), -1)

    def of_rest(self, given: Sequence[_T], narrowed: Callable[[_T, int, int, int], _T]) -> list[_T]:
        """The library's arguments for the columns that are left over, with a function that narrows a dimension."""
        assert self.rest is not None
        dim, begin, length = self.rest
        found = list(given)
        found[self._second] = narrowed(found[self._second], dim, begin, length)
        if len(given) == 3:
            found[self._bias] = narrowed(found[self._bias], 0, begin, length)
        return found


def split_product(form: Form, op: OpOverload) -> SplitProduct | None:
    """Return the function that computes a product with few rows in parts, with the library's bits; None: use the library."""
    threads, shape = torch.get_num_threads(), _shape_of(form)
    if shape is None or threads == 1 or not 1 <= shape.rows <= FEW_ROWS or not _mkl_is_slow():
        return None
    x, out = form.operands[_PRODUCTS[form.opcode].first].view, form.operands[-1].view
    if x is None or out is None or len(x.sizes) < 2:
        return None
    if not _row_major(out) or out.sizes != (*x.sizes[:-1], shape.columns):
        return None
    if math.prod(x.sizes[:-2]) > 1 and x.strides != row_major(x.sizes):
        # Strides that differ for a dimension with one element: the library computes a batch of products with fewer rows each.
        return None
    if shape.depth * shape.columns < LARGE_FACTOR or shape.depth < DEPTH:
        return None
    if 2 * shape.rows * shape.depth * shape.columns <= SMALL_PRODUCT:
        return None  # one core computes it
    if not _is_matrix(shape.weight):
        return None  # the library would copy the factor
    for parts in (2 * threads, threads):  # more parts than threads, so that a slow core computes fewer of them
        # what is left over has the library's bits if there is one row
        if (shape.rows == 1 or shape.columns % (parts * STEP) == 0) and shape.columns // parts >= PART_COLUMNS:
            if not _splits_exactly(shape.rows, threads):
                return None
            return SplitProduct(function_of(op), form.opcode, shape, (x.sizes, out.sizes), parts)
    return None


@functools.cache
def _splits_exactly(rows: int, threads: int) -> bool:
    """Whether a product with this number of rows has the same bits in parts as from one call on all cores, on this machine.

    MKL may give a core three rows or fewer of a product with more rows. For so few rows it adds in another order. This depends on
    the numbers of rows and threads alone.
    """
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, _SAMPLE_DEPTH, generator=generator)
    w = torch.randn(_SAMPLE_DEPTH, PART_COLUMNS * threads, generator=generator)
    view = View(DType.F32, tuple(w.shape), tuple(w.stride()))
    shape = _Shape(rows, _SAMPLE_DEPTH, w.shape[1], view)
    product = SplitProduct(torch.mm, "mm", shape, ((rows, _SAMPLE_DEPTH), (rows, w.shape[1])), threads)
    return torch.equal(product(x, w), x @ w)


def _narrowed(t: Tensor, dim: int, begin: int, length: int) -> Tensor:
    return t.narrow(dim, begin, length)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear_pointwise(x, weight, bias, "none", [], "")


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return linear_pointwise(a, b.t(), None, "none", [], "")


def _addmm(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return linear_pointwise(a, b.t(), bias, "none", [], "")


class _Operator(NamedTuple):
    """Where an operator has its factors and its bias among the arguments, how many arguments, and oneDNN's function."""

    first: int
    second: int
    bias: int
    counts: tuple[int, ...]
    onednn: _Product


_PRODUCTS: Final = {
    "linear": _Operator(0, 1, 2, (2, 3), _linear),
    "mm": _Operator(0, 1, 2, (2,), _mm),
    "addmm": _Operator(1, 2, 0, (3,), _addmm),
}


def _is_matrix(view: View) -> bool:
    """Whether a view is a matrix as libraries take it: its rows or its columns are dense, and lie apart."""
    return any(view.strides[k] == 1 and view.strides[1 - k] >= view.sizes[k] for k in (0, 1))


def _row_major(view: View) -> bool:
    expected = 1
    for size, stride in zip(reversed(view.sizes), reversed(view.strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


@functools.cache
def _mkl_is_slow() -> bool:
    """Whether other ways were measured to be faster on this vendor's chips."""
    try:
        vendor = Path("/proc/cpuinfo").read_text().partition("vendor_id")[2].partition("\n")[0].strip(" \t:")
    except OSError:
        return False
    return vendor == "AuthenticAMD" and torch.backends.mkl.is_available()


def _onednn_is_there() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)
