"""Operators on sparse tensors, as instructions over dense operands.

A sparse tensor exists only inside a call. A program has its components (indices and values) as dense buffers. The operators of
the namespace `wooly_sparse` take these, make sparse tensors of them on the executor, call one ATen operator and return the
components of its result ([ADR 61](../../../../docs/adr/0061-send-the-components-of-sparse-tensors.md)). This file has their
schemas, the closed list of ATen operators, and the text that describes a call. It knows nothing of PyTorch.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

NAMESPACE = "wooly_sparse"

#: The operators by name, with their ATen schemas. `call` is the text of a `SparseCall`.
#:
#: - `dense`: the results are dense, and `results` (the text of `DenseResult`s) announces their layouts.
#: - `values`: the result is sparse and has the indices of an argument; only its values return.
#: - `sparse`: the result is sparse; only the executor knows its number of elements. The results are: compressed indices (of a
#:   COO tensor: nothing), plain indices, values, and a tensor without elements whose shape is the text of `SparseFacts`.
#: - `update`: the operator writes `self`, a dense tensor.
SCHEMAS: Mapping[str, str] = MappingProxyType(
    {
        "dense": "dense(str call, str results, Tensor[] tensors, Scalar[] numbers) -> Tensor[]",
        "values": "values(str call, str results, Tensor[] tensors, Scalar[] numbers) -> Tensor[]",
        "sparse": "sparse(str call, Tensor[] tensors, Scalar[] numbers) -> (Tensor?, Tensor?, Tensor?, Tensor?)",
        "update": "update(str call, Tensor(a!) self, Tensor[] tensors, Scalar[] numbers) -> ()",
    }
)

#: The operators whose results have a shape that depends on data.
DYNAMIC = frozenset({"sparse"})
#: Maximum length of the text of a call or of its results, in characters.
MAX_TEXT = 16384
#: Maximum number of elements of the shape of a sparse tensor. Kernels number the elements with 64-bit integers.
MAX_NUMEL = 1 << 62
#: Maximum number of dimensions of a sparse tensor, and of a result.
MAX_DIMS = 32
#: ATen operators that a call may name. All of them are functions of their arguments; none makes a view.
OPERATORS = frozenset(
    (
        *("aten._coalesce.default", "aten._to_dense.default", "aten._to_sparse.default", "aten._to_sparse.sparse_dim"),
        *(f"aten._to_sparse_{layout}.default" for layout in ("csr", "csc", "bsr", "bsc")),
        *("aten.add.Tensor", "aten.add_.Tensor", "aten.sub.Tensor", "aten.sub_.Tensor", "aten.mul.Tensor"),
        *("aten.mul_.Tensor", "aten.div.Tensor", "aten.floor_divide.default", "aten.pow.Tensor_Scalar"),
        *("aten.mm.default", "aten.mm.out", "aten.addmm.default", "aten.addmm_.default", "aten.addmm.out"),
        *("aten.mv.default", "aten.addmv.default", "aten.addmv.out", "aten.bmm.default", "aten.hspmm.default"),
        *("aten._sparse_sparse_matmul.default", "aten.sparse_sampled_addmm.default"),
        *("aten._sparse_mm_reduce_impl.default",),
        *("aten.sparse_mask.default", "aten._sparse_mask_projection.default"),
        *("aten._sparse_softmax.default", "aten._sparse_softmax_backward_data.default"),
        *("aten._sparse_log_softmax.default", "aten._sparse_log_softmax_backward_data.default"),
        *("aten._sparse_sum_backward.default", "aten._sparse_csr_sum.dim_dtype", "aten._sparse_csr_prod.dim_dtype"),
        *("aten.index_select.default", "aten.narrow_copy.default", "aten._validate_compressed_sparse_indices.default"),
    )
)


class Layout(enum.StrEnum):
    """Layouts of sparse tensors, with PyTorch's names."""

    COO = "sparse_coo"
    CSR = "sparse_csr"
    CSC = "sparse_csc"
    BSR = "sparse_bsr"
    BSC = "sparse_bsc"


#: Number of a layout in the text of `SparseFacts`.
LAYOUTS = tuple(Layout)


class SparseTextError(ValueError):
    """The text of a call is malformed. The message says where."""


@dataclass(frozen=True, slots=True)
class Dense:
    """A dense argument: its position in `tensors`."""

    at: int


@dataclass(frozen=True, slots=True)
class Sparse:
    """A sparse argument.

    Attributes:
        layout: its layout.
        size: its shape.
        indices: positions of its indices in `tensors`: one for COO; compressed and plain indices for the other layouts.
        values: position of its values in `tensors`.
        coalesced: whether its indices are said to be sorted and distinct (COO only).
    """

    layout: Layout
    size: tuple[int, ...]
    indices: tuple[int, ...]
    values: int
    coalesced: bool


@dataclass(frozen=True, slots=True)
class Number:
    """A number: its position in `numbers`. `dtype` is the label of the dtype of a host scalar; empty: a Python number."""

    at: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Named:
    """A constant of PyTorch: `kind` is ``dtype`` or ``layout``, `name` its label."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Written:
    """The tensor `self` of the operator `update`."""


#: An argument: one of the above, a constant, or a tuple of arguments.
Argument = Dense | Sparse | Number | Named | Written | None | bool | int | float | str | tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class SparseCall:
    """A call of an ATen operator.

    Attributes:
        operator: its name, such as ``aten.mm.default``.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """

    operator: str
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]

    def text(self) -> str:
        """Return the call as text."""
        named = [[k, _node(v)] for k, v in self.kwargs]
        return json.dumps([self.operator, [_node(a) for a in self.args], named], separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> SparseCall:
        """Read the text of a call.

        Raises:
            SparseTextError: the text is too long or malformed, or the operator is not in `OPERATORS`.
        """
        whole = _loaded(text)
        if not (_is_list(whole, 3) and isinstance(whole[0], str) and all(isinstance(p, list) for p in whole[1:])):
            raise SparseTextError("a sparse call must be [operator, arguments, named arguments]")
        operator, args, named = whole
        if operator not in OPERATORS:
            raise SparseTextError(f"operator {operator[:64]!r} is not one of the operators on sparse tensors")
        if not all(_is_list(pair, 2) and isinstance(pair[0], str) for pair in named):
            raise SparseTextError("a named argument must be [name, value]")
        return cls(operator, tuple([_argument(a) for a in args]), tuple([(k, _argument(v)) for k, v in named]))

    def sparse(self) -> list[Sparse]:
        """Return the sparse arguments, in order."""
        return [a for a in (*self.args, *[v for _, v in self.kwargs]) if isinstance(a, Sparse)]


@dataclass(frozen=True, slots=True)
class DenseResult:
    """A result whose layout the client knows: sizes and strides in elements, and the label of its dtype."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


def results_text(results: list[DenseResult]) -> str:
    """Return announced results as text."""
    return json.dumps([[r.sizes, r.strides, r.dtype] for r in results], separators=(",", ":"))


def parse_results(text: str) -> list[DenseResult]:
    """Read the text of announced results.

    Raises:
        SparseTextError: the text is malformed.
    """
    whole = _loaded(text)
    if not (isinstance(whole, list) and all(_is_list(r, 3) and isinstance(r[2], str) for r in whole)):
        raise SparseTextError("results must be a list of [sizes, strides, dtype]")
    return [DenseResult(_sizes(r[0]), _numbers(r[1]), r[2]) for r in whole]


@dataclass(frozen=True, slots=True)
class SparseFacts:
    """What a client needs of a sparse result besides its components.

    Attributes:
        layout: the layout.
        size: the shape.
        dense_dim: number of dimensions of a value.
        coalesced: whether the indices are sorted and distinct (COO only).
    """

    layout: Layout
    size: tuple[int, ...]
    dense_dim: int
    coalesced: bool

    def shape(self) -> tuple[int, ...]:
        """Return the facts as the shape of a tensor without elements, because an executor reports shapes only."""
        return (0, LAYOUTS.index(self.layout), self.dense_dim, int(self.coalesced), *self.size)

    @classmethod
    def of_shape(cls, shape: tuple[int, ...]) -> SparseFacts:
        """Read the facts from such a shape."""
        _, layout, dense_dim, coalesced, *size = shape
        return cls(LAYOUTS[layout], tuple(size), dense_dim, bool(coalesced))


def _node(a: Argument) -> Any:
    """An argument as JSON. A list starts with the name of its kind; everything else is a constant."""
    match a:
        case Dense(at):
            return ["dense", at]
        case Sparse(layout, size, indices, values, coalesced):
            return ["sparse", layout.value, list(size), list(indices), values, coalesced]
        case Number(at, dtype):
            return ["number", at, dtype]
        case Named(kind, name):
            return [kind, name]
        case Written():
            return ["self"]
        case tuple():
            return ["list", *[_node(x) for x in a]]
    return a


def _argument(node: Any, depth: int = 0) -> Argument:
    if node is None or isinstance(node, (bool, int, float, str)):
        return node
    match node:
        case ["dense", int(at)]:
            return Dense(_position(at))
        case ["sparse", str(layout), list(size), list(indices), int(values), bool(coalesced)]:
            return _sparse(layout, _sizes(size), indices, values, coalesced)
        case ["number", int(at), str(dtype)]:
            return Number(_position(at), dtype)
        case ["dtype" | "layout" as kind, str(name)]:
            return Named(kind, name)
        case ["self"]:
            return Written()
        case ["list", *rest] if depth == 0:
            return tuple([_argument(x, 1) for x in rest])
    raise SparseTextError(f"an argument of a sparse call is malformed: {str(node)[:100]}")


def _sparse(layout: str, size: tuple[int, ...], indices: list[Any], values: int, coalesced: bool) -> Sparse:
    if layout not in LAYOUTS:
        raise SparseTextError(f"{layout[:32]!r} is not a sparse layout")
    if len(indices) != (1 if layout == Layout.COO else 2):
        raise SparseTextError(f"a tensor of layout {layout} has {len(indices)} index tensors")
    at = tuple([_position(i) for i in indices])
    return Sparse(Layout(layout), size, at, _position(values), coalesced)


def _position(at: Any) -> int:
    if not isinstance(at, int) or isinstance(at, bool) or at < 0:
        raise SparseTextError(f"{str(at)[:32]} is not a position in a list of arguments")
    return at


def _sizes(found: Any) -> tuple[int, ...]:
    """Sizes.

    Raises:
        SparseTextError: they are not integers of at least 0, there are too many, or their product is too large.
    """
    sizes, total = _numbers(found), 1
    for n in sizes:
        total *= max(n, 1)
        if total > MAX_NUMEL:
            raise SparseTextError(f"the shape {list(sizes)} has more than {MAX_NUMEL} elements")
    return sizes


def _numbers(found: Any) -> tuple[int, ...]:
    if not isinstance(found, list) or len(found) > MAX_DIMS:
        raise SparseTextError(f"sizes and strides must be lists of at most {MAX_DIMS} numbers")
    return tuple([_position(n) for n in found])


def _is_list(node: Any, n: int) -> bool:
    return isinstance(node, list) and len(node) == n


def _loaded(text: str) -> Any:
    if len(text) > MAX_TEXT:
        raise SparseTextError(f"the text of a sparse call has {len(text)} characters, at most {MAX_TEXT} are allowed")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        raise SparseTextError(f"the text of a sparse call is not JSON: {e}") from None
