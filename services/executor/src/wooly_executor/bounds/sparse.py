"""Estimates for operators on sparse tensors, from the text of the call and the shapes of the components.

What only the values of indices determine is limited in the run (`runtime.sparse.laws`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from wooly_wis.program import View
from wooly_wis.sparse import Dense, Sparse, SparseCall, SparseTextError

from wooly_executor.bounds.work import Given, Work, broadcast, product
from wooly_executor.errors import OperationError

#: Cost of one element of an operand or a result, in additions: kernels sort, search and compare indices.
EACH = 16
#: Cost of one row or column of a sparse tensor, in additions: kernels make tables of them.
ROW = 4
_PRODUCTS = frozenset(
    ("mm", "addmm", "addmm_", "mv", "addmv", "bmm", "hspmm", "sparse_sampled_addmm", "_sparse_mm_reduce_impl")
)


def of_sparse(given: Given) -> Work:
    """Return the estimated work of an operator of the namespace `wooly_sparse`.

    Raises:
        OperationError: the text of the call is malformed, or it refers to a tensor that the call does not have.
    """
    text, tensors = given.values.get("call"), given.tensors("tensors")
    try:
        call = SparseCall.parse(text if isinstance(text, str) else "")
    except SparseTextError as e:
        raise OperationError(str(e)) from None
    arguments = call.sparse()
    if any(max(*a.indices, a.values) >= len(tensors) for a in arguments):
        raise OperationError("a sparse argument refers to a tensor that the call does not have")
    dense = [tensors[a.at] for a in call.args if isinstance(a, Dense) and a.at < len(tensors)]
    found = EACH * given.touched() + ROW * sum([sum(a.size) for a in arguments])
    rule = _RULES.get(call.operator.split(".")[1])
    if rule is not None:
        found += sum([rule(call, a, tensors[a.values], dense) for a in arguments])
    return Work(found)


Rule = Callable[[SparseCall, Sparse, View, Sequence[View]], int]


def _columns(call: SparseCall, a: Sparse, values: View, dense: Sequence[View]) -> int:
    """A product with a dense matrix: each element meets each column."""
    return values.numel * max([v.sizes[-1] for v in dense if len(v.sizes) > 1], default=1)


def _broadcast(call: SparseCall, a: Sparse, values: View, dense: Sequence[View]) -> int:
    """A product by element: each element is repeated where the other operand has more elements."""
    space = broadcast([a.size, *[v.sizes for v in dense]])
    return EACH * values.numel * (space // max(product(a.size), 1))


def _selected(call: SparseCall, a: Sparse, values: View, dense: Sequence[View]) -> int:
    """A selection: each index may select each element."""
    return values.numel * max([v.numel for v in dense], default=1)


def _pools(call: SparseCall, a: Sparse, values: View, dense: Sequence[View]) -> int:
    """A softmax: the kernel makes a table of all places outside the dimension."""
    dims = [d for d in call.args if isinstance(d, int) and not isinstance(d, bool)]
    size = a.size[dims[0]] if dims and -len(a.size) <= dims[0] < len(a.size) else 1
    return EACH * (product(a.size) // max(size, 1))


_RULES: dict[str, Rule] = {
    **dict.fromkeys(_PRODUCTS, _columns),
    "mul": _broadcast,
    "mul_": _broadcast,
    "index_select": _selected,
    **dict.fromkeys(
        (
            "_sparse_softmax",
            "_sparse_log_softmax",
            "_sparse_softmax_backward_data",
            "_sparse_log_softmax_backward_data",
        ),
        _pools,
    ),
}
