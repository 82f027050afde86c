"""What the rows of the op table compute per element, as nodes of a graph.

Library operators without a row are in `externs`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from wooly_wis.dtypes import DType
from wooly_wis.kernel.ops import FLOATS, STORED
from wooly_wis.oprules import Arguments, dim_of, reduced_dims
from wooly_wis.optable import TABLE, Row, arguments, result_operands
from wooly_wis.plan import Line
from wooly_wis.program import Attr, Form, OperandRef, Role, View
from wooly_wis.promotion import NumberKind, kind_of, opmath, real_of
from wooly_wis.scalar_expr import Number as ExprNumber
from wooly_wis.scalar_expr import evaluate

from wooly_compiler import externs
from wooly_compiler.dag import MAX_NODES, MAX_SLOTS, Emitter, Graph, GraphNode, Place
from wooly_compiler.errors import UnsupportedError
from wooly_compiler.primitives import primitives

# -- lines ---------------------------------------------------------------------------------------------------------------


def _values(form: Form, row: Row) -> dict[str, Attr]:
    given = form.attr("args", ())
    assert isinstance(given, tuple)
    return {a.name: given[k] if k < len(given) else a.default for k, a in enumerate(row.args)}


#: Rows that reject a divisor of 0 when they compute integers.
QUOTIENTS: Final = ("div_floor", "div_trunc", "remainder", "fmod")


def _pointwise(e: Emitter, row: Row, found: Arguments) -> None:
    assert row.expr is not None
    (to,) = result_operands(e.form)
    view = e.form.operands[to].view
    assert view is not None
    dtype, result = found.promoted(), row.results[0].dtype.of(found)
    if kind_of(result) > kind_of(dtype):  # the function takes integers and gives floating point
        dtype = result
    if kind_of(dtype) is NumberKind.COMPLEX:
        raise UnsupportedError("generated kernels do not support complex numbers")
    compute = opmath(dtype)
    if compute not in STORED:
        raise UnsupportedError(f"generated kernels do not support {compute.label}")
    elements: dict[str, int] = {}
    for name, value in _values(e.form, row).items():
        if isinstance(value, OperandRef):
            node = e.read(value.index, view.sizes)
            elements[name] = node if name in row.truths else e.to(node, compute)
        elif value is not None:
            # These values decide what is computed: a square is a product, and a known divisor is not 0.
            decides = name == "b" and (row.opcode == "pow" or (row.opcode in QUOTIENTS and compute not in FLOATS))
            elements[name] = e.number(e.assume(value) if decides else value, compute)

    def constant(n: ExprNumber) -> int:
        if isinstance(n, float) and kind_of(dtype) < NumberKind.FLOAT:
            return e.const(DType.F32, n)
        return e.const(real_of(compute), n)

    node = evaluate(row.expr, elements, primitives(e), constant)
    e.write(to, e.to(node, result), view.sizes)


def _copy(e: Emitter) -> None:
    a, b = e.form.operands[0].view, e.form.operands[1].view
    assert a is not None and b is not None
    e.write(1, e.to(e.read(0, b.sizes), b.dtype), b.sizes)


def _fill(e: Emitter) -> None:
    view = e.form.operands[0].view
    assert view is not None
    wide = DType.F32 if view.dtype in (DType.F16, DType.BF16) else view.dtype
    e.write(0, e.number(e.form.attr("value"), wide), view.sizes)


def _compute(dtype: DType) -> DType:
    compute = opmath(dtype)
    if compute not in STORED or kind_of(compute) is NumberKind.COMPLEX:
        raise UnsupportedError(f"generated kernels do not support {dtype.label}")
    return compute


def _floating(dtype: DType) -> DType:
    """As `_compute`, for operations that only floating point has."""
    compute = _compute(dtype)
    if compute not in FLOATS:
        raise UnsupportedError(f"a kernel needs floating point here, not {dtype.label}")
    return compute


def _reduction(e: Emitter, row: Row, found: Arguments) -> None:
    """Sums, means, extremes, positions of extremes, and truth values over dimensions."""
    values, result = _values(e.form, row), row.results[0].dtype.of(found)
    reference = values["a"]
    assert isinstance(reference, OperandRef)
    (to,) = result_operands(e.form)
    a, out = e.form.operands[reference.index].view, e.form.operands[to].view
    assert a is not None and out is not None
    node = e.read(reference.index, a.sizes)
    op = row.opcode
    if op in ("any", "all"):
        truth = e.apply("ne", e.to(node, _compute(a.dtype)), e.const(_compute(a.dtype), 0), dtype=DType.BOOL)
        folded = e.fold("or" if op == "any" else "and", node if a.dtype is DType.BOOL else truth)
    elif op in ("amax", "amin"):
        if a.dtype is DType.BOOL:
            folded = e.fold("or" if op == "amax" else "and", node)
        else:
            folded = e.fold(op[1:], e.to(node, _compute(a.dtype)))
    elif op in ("argmax", "argmin"):
        wide = e.to(node, DType.I32) if a.dtype is DType.BOOL else e.to(node, _compute(a.dtype))
        folded = e.fold(op, wide)
    else:
        compute = _compute(result)
        folded = e.fold("add", e.to(e.to(node, result), compute))
        if op == "mean":
            folded = e.apply("div", folded, e.const(compute, float(e.graph.extent)))
    e.write(to, e.to(folded, result), out.sizes)


def _softmax(e: Emitter, row: Row) -> None:
    values = _values(e.form, row)
    reference = values["a"]
    assert isinstance(reference, OperandRef)
    (to,) = result_operands(e.form)
    view = e.form.operands[to].view
    assert view is not None
    a = e.to(e.read(reference.index, view.sizes), _floating(view.dtype))
    shifted = e.apply("sub", a, e.fold("max", a))
    exponential = e.apply("exp", shifted)
    total = e.fold("add", exponential)
    if row.opcode == "softmax":  # one quotient per row instead of one per element
        node = e.apply("mul", exponential, e.apply("div", e.const(e.dtype(total), 1.0), total))
    else:
        node = e.apply("sub", shifted, e.apply("log", total))
    e.write(to, e.to(node, view.dtype), view.sizes)


def _softmax_backward(e: Emitter, row: Row) -> None:
    values = _values(e.form, row)
    grad, y = values["grad"], values["y"]
    assert isinstance(grad, OperandRef) and isinstance(y, OperandRef)
    (to,) = result_operands(e.form)
    view = e.form.operands[to].view
    assert view is not None
    compute = _floating(view.dtype)
    g, v = (e.to(e.read(k.index, view.sizes), compute) for k in (grad, y))
    if row.opcode == "softmax_backward":
        node = e.apply("mul", v, e.apply("sub", g, e.fold("add", e.apply("mul", g, v))))
    else:
        node = e.apply("sub", g, e.apply("mul", e.apply("exp", v), e.fold("add", g)))
    e.write(to, e.to(node, view.dtype), view.sizes)


def _layer_norm(e: Emitter, row: Row) -> None:
    values = _values(e.form, row)
    reference, weight, bias = values["a"], values["weight"], values["bias"]
    assert isinstance(reference, OperandRef)
    out, mean_to, rstd_to = result_operands(e.form)
    view = e.form.operands[out].view
    assert view is not None
    compute = _floating(view.dtype)
    n = e.const(compute, float(e.graph.extent))
    a = e.to(e.read(reference.index, view.sizes), compute)
    mean = e.apply("div", e.fold("add", a), n)
    centred = e.apply("sub", a, mean)
    variance = e.apply("div", e.fold("add", e.apply("mul", centred, centred)), n)
    eps = e.number(values["eps"], compute)
    rstd = e.apply("div", e.const(compute, 1.0), e.apply("sqrt", e.apply("add", variance, eps)))
    node = e.apply("mul", centred, rstd)
    for op, value in (("mul", weight), ("add", bias)):
        if isinstance(value, OperandRef):
            node = e.apply(op, node, e.to(e.read(value.index, view.sizes), compute))
    e.write(out, e.to(node, view.dtype), view.sizes)
    for to, value in ((mean_to, mean), (rstd_to, rstd)):
        stat = e.form.operands[to].view
        assert stat is not None
        e.write(to, e.to(value, stat.dtype), stat.sizes)


# -- movement and indexing -----------------------------------------------------------------------------------------------


def _operand(e: Emitter, row: Row, name: str) -> int:
    """Return the number of the operand that is the argument `name`."""
    value = _values(e.form, row)[name]
    assert isinstance(value, OperandRef)
    return value.index


def _result(e: Emitter) -> tuple[int, View]:
    """Return the number and the view of the operand that is the result."""
    (to,) = result_operands(e.form)
    view = e.form.operands[to].view
    assert view is not None
    return to, view


def _triangle(e: Emitter, found: Arguments) -> None:
    """Keep the elements on one side of a diagonal; the others are zero."""
    to, view = _result(e)
    if len(view.sizes) < 2:
        raise UnsupportedError("the operand is not a matrix")
    a = e.read(_operand(e, TABLE[e.form.opcode], "a"), view.sizes)
    row, column = e.coordinate(len(view.sizes) - 2), e.coordinate(len(view.sizes) - 1)
    diagonal = e.const(DType.I64, found.integer("diagonal"))
    op = "le" if e.form.opcode == "tril" else "ge"
    inside = e.apply(op, e.apply("sub", column, row), diagonal, dtype=DType.BOOL)
    wide = e.to(a, DType.F32) if view.dtype in (DType.F16, DType.BF16) else a
    zero = e.const(e.dtype(wide), 0)
    e.write(to, e.to(e.apply("select", inside, wide, zero), view.dtype), view.sizes)


def _index_of(e: Emitter, row: Row, strides: Sequence[int]) -> int:
    """Return the index at a point as i64: the element of `index` that these strides over the space select."""
    k = _operand(e, row, "index")
    view = e.form.operands[k].view
    assert view is not None
    place = Place(e.line.slots[k], view.dtype, tuple(strides), view.offset // view.dtype.itemsize)
    put = e.graph.puts.get(place.slot)
    if put is not None:
        if put.place != place:
            raise UnsupportedError(f"slot {place.slot} is read with another layout than it was written with")
        return e.to(put.node, DType.I64)
    return e.to(e.graph.add(GraphNode("load", view.dtype, place=place)), DType.I64)


def _moving(view: View) -> list[int]:
    """Return the strides, with 0 for dimensions of one element."""
    return [0 if n == 1 else s for n, s in zip(view.sizes, view.strides, strict=True)]


def _embedding(e: Emitter, found: Arguments) -> None:
    row, (to, view) = TABLE["embedding"], _result(e)
    weight, index = found.view("weight"), found.view("index")
    at = _index_of(e, row, [*_moving(index), 0])
    strides = [0] * len(index.sizes) + [_moving(weight)[1]]
    e.write(to, e.pick(_operand(e, row, "weight"), strides, weight.strides[0], weight.sizes[0], at), view.sizes)


def _index_select(e: Emitter, found: Arguments) -> None:
    row, (to, view) = TABLE["index_select"], _result(e)
    a, index = found.view("a"), found.view("index")
    dim = dim_of(found.integer("dim"), len(a.sizes))
    at = _index_of(e, row, [(*_moving(index), 0)[0] if d == dim else 0 for d in range(len(a.sizes))])
    strides = [0 if d == dim else s for d, s in enumerate(_moving(a))]
    e.write(to, e.pick(_operand(e, row, "a"), strides, a.strides[dim], a.sizes[dim], at), view.sizes)


def _gather(e: Emitter, found: Arguments) -> None:
    row, (to, view) = TABLE["gather"], _result(e)
    a, index = found.view("a"), found.view("index")
    if not a.sizes:
        raise UnsupportedError("the operand has no dimension to gather along")
    dim = dim_of(found.integer("dim"), len(a.sizes))
    at = _index_of(e, row, _moving(index))
    strides = [0 if d == dim or view.sizes[d] == 1 else s for d, s in enumerate(a.strides)]
    e.write(to, e.pick(_operand(e, row, "a"), strides, a.strides[dim], a.sizes[dim], at), view.sizes)


_MOVES: Final[dict[str, Callable[[Emitter, Arguments], None]]] = {
    "tril": _triangle,
    "triu": _triangle,
    "embedding": _embedding,
    "index_select": _index_select,
    "gather": _gather,
}
_FOLDS: Final = ("sum", "mean", "amax", "amin", "any", "all", "argmax", "argmin")
_NONE: Final[frozenset[int]] = frozenset()


def folded_dims(form: Form) -> tuple[tuple[int, ...], frozenset[int]]:
    """Return the index space of a line, and which of its dimensions the line folds; no dimensions if it folds none.

    Raises:
        UnsupportedError: no kernel can be generated for the line.
    """
    opcode = form.opcode
    if opcode in ("copy", "fill"):
        view = form.operands[-1].view
        assert view is not None
        return view.sizes, _NONE
    row = TABLE.get(opcode)
    if opcode == "extern":
        return externs.space_of(form)
    if row is None:
        raise UnsupportedError(f"{opcode} has no generated kernel")
    if row.expr is not None:
        view = form.operands[result_operands(form)[0]].view
        assert view is not None
        return view.sizes, _NONE
    found = arguments(form)
    if opcode in _MOVES:
        view = form.operands[result_operands(form)[0]].view
        assert view is not None
        return view.sizes, _NONE
    if opcode == "layer_norm":
        sizes = found.view("a").sizes
        return sizes, frozenset(range(len(sizes) - len(found.integers("sizes")), len(sizes)))
    if opcode in _FOLDS:
        sizes = found.view("a").sizes
        dims = frozenset(reduced_dims(found))
        if not dims:
            raise UnsupportedError("the operand has no dimension to reduce")
        return sizes, dims
    if opcode in ("softmax", "log_softmax", "softmax_backward", "log_softmax_backward"):
        sizes = found.view("a" if "a" in found.values else "grad").sizes
        if not sizes:
            raise UnsupportedError("the operand has no dimension to reduce")
        return sizes, frozenset({dim_of(found.integer("dim"), len(sizes))})
    raise UnsupportedError(f"{opcode} has no generated kernel")


def emit(graph: Graph, line: Line) -> None:
    """Add the values of a line to a graph.

    Raises:
        UnsupportedError: no kernel can be generated for the line, or not in this graph. The graph is then incomplete.
    """
    form = line.form
    views = [(o.role is Role.OUT, o.view) for o in form.operands if o.view is not None]
    results = [0 in v.sizes for out, v in views if out]  # of several results, some may be empty: unused statistics
    if any(0 in v.sizes for out, v in views if not out) or (results and all(results)):
        raise UnsupportedError("an operand or result is empty, so the kernel would compute nothing")
    if graph.closed:
        raise UnsupportedError("sums by index cannot share a kernel with other instructions")
    e = Emitter(graph, line)
    if form.opcode == "copy":
        _copy(e)
    elif form.opcode == "fill":
        _fill(e)
    elif form.opcode == "extern":
        externs.emit(e)
    else:
        row = TABLE[form.opcode]
        if row.expr is not None:
            _pointwise(e, row, arguments(form))
        elif form.opcode in _MOVES:
            _MOVES[form.opcode](e, arguments(form))
        elif form.opcode == "layer_norm":
            _layer_norm(e, row)
        elif form.opcode in _FOLDS:
            _reduction(e, row, arguments(form))
        elif form.opcode.endswith("softmax"):
            _softmax(e, row)
        else:
            _softmax_backward(e, row)
    if len(graph.nodes) > MAX_NODES or len(graph.slots()) > MAX_SLOTS:
        raise UnsupportedError(f"the kernel would exceed {MAX_NODES} values or {MAX_SLOTS} slots")
