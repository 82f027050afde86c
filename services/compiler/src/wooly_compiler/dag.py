"""What a group of instructions computes per element: a graph of loads, operations, folds and stores over one index space.

The space is that of the group's largest tensors, split into outer dimensions (rows) and inner ones (what is folded along). A
tensor of the group either has an element per point of the whole space, or one per row.

Each value is rounded to its tensor's type even where the tensor itself never exists, so that a fused kernel has the bits of
the single ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from wooly_wis.dtypes import DType
from wooly_wis.kernel.ir import Number
from wooly_wis.kernel.ops import FLOATS, INTS, STORED, bounds
from wooly_wis.oprules import Arguments, dim_of, reduced_dims
from wooly_wis.optable import TABLE, Row, arguments, result_operands
from wooly_wis.program import Attr, Form, OperandRef, ParamKind, ParamRef, View
from wooly_wis.promotion import NumberKind, kind_of, opmath, real_of
from wooly_wis.scalar_expr import Number as ExprNumber
from wooly_wis.scalar_expr import evaluate

from wooly_compiler.errors import UnsupportedError
from wooly_compiler.unit import Line

#: Limits of one kernel: registers, arguments, the reader's patience.
MAX_NODES: Final = 512
MAX_SLOTS: Final = 24

PARAM_DTYPE: Final = {ParamKind.F64: DType.F64, ParamKind.I64: DType.I64, ParamKind.BOOL: DType.BOOL}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor's elements lie.

    Attributes:
        slot: of the program.
        dtype: of the elements.
        strides: per dimension of the space, in elements; 0 where it does not move.
        offset: of the first element, in elements.
    """

    slot: int
    dtype: DType
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Node:
    """A value of the graph. `kind` is load, const, param, apply or fold.

    Attributes:
        op: operation of an `apply`, combination of a `fold`.
        args: numbers of the nodes that it is made of.
        place: of a load.
        value: of a constant; of a param its index in the run.
    """

    kind: str
    dtype: DType
    op: str = ""
    args: tuple[int, ...] = ()
    place: Place | None = None
    value: Number = 0


@dataclass(frozen=True, slots=True)
class Put:
    """A store: `rows` says that it has one element per row."""

    place: Place
    node: int
    rows: bool


@dataclass(slots=True)
class Graph:
    """What a group computes.

    Attributes:
        space: sizes of the largest tensors.
        inner: how many of the last dimensions are folded along; 0 if nothing is.
        params: the run's, where they are known.
        assumed: which of them the graph depends on, with their values.
        nodes: values, each after those that it is made of.
        puts: the last store to each slot.
    """

    space: tuple[int, ...]
    inner: int = 0
    params: Sequence[Any] | None = None
    assumed: dict[int, Any] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    puts: dict[int, Put] = field(default_factory=dict)
    _known: dict[Node, int] = field(default_factory=dict)

    def add(self, node: Node) -> int:
        """The number of a node; equal nodes are one."""
        known = self._known.get(node)
        if known is None:
            known = self._known[node] = len(self.nodes)
            self.nodes.append(node)
        return known

    def copy(self) -> Graph:
        """A graph that can grow by itself."""
        return Graph(
            self.space,
            self.inner,
            self.params,
            dict(self.assumed),
            list(self.nodes),
            dict(self.puts),
            dict(self._known),
        )

    def loads(self, slot: int) -> set[Place]:
        """The places from which a slot is loaded."""
        return {n.place for n in self.nodes if n.place is not None and n.place.slot == slot}

    def slots(self) -> set[int]:
        """All slots that are loaded from or stored to."""
        return {n.place.slot for n in self.nodes if n.place is not None} | set(self.puts)

    @property
    def outer(self) -> tuple[int, ...]:
        """Sizes of the rows."""
        return self.space[: len(self.space) - self.inner]


class Emitter:
    """Adds one line's values to a graph.

    Raises (all methods):
        UnsupportedError: no kernel can do this, or not within this graph.
    """

    def __init__(self, graph: Graph, line: Line) -> None:
        self.graph = graph
        self.line = line
        self.form = line.form

    # -- places ------------------------------------------------------------------------------------------------------

    def _strides(self, view: View, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
        """Strides over the space of a tensor that is used as one of `sizes`; whether it has one element per row only."""
        graph = self.graph
        lead = len(sizes) - len(view.sizes)
        wide = [0] * lead + [0 if n == 1 else s for n, s in zip(view.sizes, view.strides, strict=True)]
        if sizes == graph.space:
            return tuple(wide), False
        rows = len(graph.outer)
        if graph.inner and sizes in (graph.outer, graph.outer + (1,) * graph.inner):
            return tuple(wide[:rows]) + (0,) * graph.inner, True
        raise UnsupportedError(f"sizes {list(sizes)} in a kernel over {list(graph.space)}")

    def place(self, slot: int, view: View, sizes: tuple[int, ...]) -> tuple[Place, bool]:
        """Where an operand lies."""
        if view.dtype not in STORED:
            raise UnsupportedError(f"kernels do not know {view.dtype.label}")
        strides, rows = self._strides(view, sizes)
        return Place(slot, view.dtype, strides, view.offset // view.dtype.itemsize), rows

    def read(self, k: int, sizes: tuple[int, ...]) -> int:
        """The element of operand `k`, used as a tensor of `sizes`."""
        view = self.form.operands[k].view
        assert view is not None
        place, _ = self.place(self.line.slots[k], view, sizes)
        put = self.graph.puts.get(place.slot)
        if put is not None:
            if put.place != place:
                raise UnsupportedError(f"slot {place.slot} is read otherwise than it was written")
            return put.node
        return self.graph.add(Node("load", place.dtype, place=place))

    def write(self, k: int, node: int, sizes: tuple[int, ...]) -> None:
        """Operand `k` becomes a tensor of `sizes` with this element."""
        view = self.form.operands[k].view
        assert view is not None
        place, rows = self.place(self.line.slots[k], view, sizes)
        put = self.graph.puts.get(place.slot)
        if put is not None and put.place != place:
            raise UnsupportedError(f"slot {place.slot} is written in two ways")
        if any(p != place for p in self.graph.loads(place.slot)):
            raise UnsupportedError(f"slot {place.slot} is read otherwise than it is written")
        self.graph.puts[place.slot] = Put(place, self.to(node, place.dtype), rows)

    # -- values ------------------------------------------------------------------------------------------------------

    def dtype(self, node: int) -> DType:
        return self.graph.nodes[node].dtype

    def const(self, dtype: DType, value: Number) -> int:
        if dtype in FLOATS:
            return self.graph.add(Node("const", dtype, value=float(value)))
        if dtype is DType.BOOL:
            return self.graph.add(Node("const", dtype, value=bool(value)))
        if dtype in INTS and value == value and abs(value) != math.inf and int(value) == value:
            low, high = bounds(dtype)
            if low <= value <= high:
                return self.graph.add(Node("const", dtype, value=int(value)))
        raise UnsupportedError(f"{value!r} as {dtype.label}")

    def apply(self, op: str, *args: int, dtype: DType | None = None) -> int:
        return self.graph.add(Node("apply", dtype or self.dtype(args[-1]), op, args))

    def to(self, node: int, dtype: DType) -> int:
        """The value in another type."""
        source = self.dtype(node)
        if source is dtype:
            return node
        halves = (DType.F16, DType.BF16)
        if source in halves and dtype is not DType.F32:
            node = self.apply("convert", node, dtype=DType.F32)
        if dtype in halves and self.dtype(node) is not DType.F32:
            if self.dtype(node) is DType.F64:
                raise UnsupportedError("f64 to 16 bits would be rounded twice")
            node = self.apply("convert", node, dtype=DType.F32)
        return self.apply("convert", node, dtype=dtype)

    def number(self, value: Attr, dtype: DType) -> int:
        """A number of the form or of the run."""
        if isinstance(value, ParamRef):
            kind = self.form.params[value.index]
            if kind not in PARAM_DTYPE:
                raise UnsupportedError("kernels have no complex numbers")
            param = Node("param", PARAM_DTYPE[kind], value=self.line.first_param + value.index)
            return self.to(self.graph.add(param), dtype)
        if isinstance(value, (bool, int, float)):
            return self.const(dtype, value)
        raise UnsupportedError(f"{value!r} is no real number")

    def assume(self, value: Attr) -> Attr:
        """A number that decides what is computed: the run's, if it is known; then the kernel is for this number only."""
        params = self.graph.params
        if isinstance(value, ParamRef) and params is not None:
            index = self.line.first_param + value.index
            self.graph.assumed[index] = params[index]
            found: Attr = params[index]
            return found
        return value

    def fold(self, op: str, node: int) -> int:
        """The value folded along the inner dimensions."""
        return self.graph.add(Node("fold", self.dtype(node), op, (node,)))


# -- primitives ----------------------------------------------------------------------------------------------------------


def _primitives(e: Emitter) -> dict[str, Callable[..., int]]:
    """The primitives of scalar expressions, as nodes."""

    def both(a: int, b: int) -> DType:
        if e.dtype(a) is not e.dtype(b):
            raise UnsupportedError(f"{e.dtype(a).label} with {e.dtype(b).label}")
        return e.dtype(a)

    def arithmetic(op: str, truth: str | None) -> Callable[[int, int], int]:
        def make(a: int, b: int) -> int:
            if both(a, b) is DType.BOOL:
                if truth is None:
                    raise UnsupportedError(f"{op} of truth values")
                return e.apply(truth, a, b)
            return e.apply(op, a, b)

        return make

    def floats(op: str) -> Callable[..., int]:
        def make(*args: int) -> int:
            if e.dtype(args[0]) not in FLOATS:
                raise UnsupportedError(f"{op} of {e.dtype(args[0]).label}")
            return e.apply(op, *args)

        return make

    def whole(op: str) -> Callable[[int], int]:
        return lambda a: e.apply(op, a) if e.dtype(a) in FLOATS else a

    def compare(op: str) -> Callable[[int, int], int]:
        def make(a: int, b: int) -> int:
            both(a, b)
            return e.apply(op, a, b, dtype=DType.BOOL)

        return make

    def test(op: str) -> Callable[[int], int]:
        return lambda a: e.apply(op, a, dtype=DType.BOOL) if e.dtype(a) in FLOATS else e.const(DType.BOOL, False)

    def bits(op: str) -> Callable[..., int]:
        def make(*args: int) -> int:
            if e.dtype(args[0]) in FLOATS:
                raise UnsupportedError(f"{op} of floating point")
            return e.apply(op, *args)

        return make

    def negative(a: int) -> int:
        if e.dtype(a) is DType.BOOL:
            raise UnsupportedError("neg of truth values")
        return e.apply("neg", a)

    def power(a: int, b: int) -> int:
        """Small exponents that the program knows are products, as in the library."""
        exponent = e.graph.nodes[b]
        if e.dtype(a) not in FLOATS:
            raise UnsupportedError("pow of integers")
        if exponent.kind == "const":
            square = e.apply("mul", a, a)
            one = e.const(e.dtype(a), 1.0)
            known: dict[float, Callable[[], int]] = {
                1.0: lambda: a,
                2.0: lambda: square,
                3.0: lambda: e.apply("mul", square, a),
                0.5: lambda: e.apply("sqrt", a),
                -0.5: lambda: e.apply("div", one, e.apply("sqrt", a)),
                -1.0: lambda: e.apply("div", one, a),
                -2.0: lambda: e.apply("div", one, square),
            }
            if exponent.value in known:
                return known[float(exponent.value)]()
        return e.apply("pow", a, b)

    def choose(c: int, a: int, b: int) -> int:
        if e.dtype(c) is not DType.BOOL:
            raise UnsupportedError("select by numbers")
        both(a, b)
        return e.apply("select", c, a, b)

    def div_trunc(a: int, b: int) -> int:
        return e.apply("trunc", floats("div")(a, b))

    found: dict[str, Callable[..., int]] = {
        "add": arithmetic("add", "or"),
        "sub": arithmetic("sub", None),
        "mul": arithmetic("mul", "and"),
        "div_trunc": div_trunc,
        "neg": negative,
        "abs": lambda a: a if e.dtype(a) is DType.BOOL else e.apply("abs", a),
        "conj": lambda a: a,
        "pow": power,
        "select": choose,
    }
    found |= {op: floats(op) for op in ("div", "fmod", "atan2")}
    unary = "sqrt exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh erf erfc"
    found |= {op: floats(op) for op in unary.split()}
    found |= {op: whole(op) for op in ("floor", "ceil", "round", "trunc")}
    found |= {op: compare(op) for op in ("eq", "ne", "lt", "le", "gt", "ge")}
    found |= {op: test(op) for op in ("isnan", "isinf")}
    found |= {op: bits(op) for op in ("and", "or", "xor", "not")}

    def rounded_down(a: int, b: int) -> int:
        raise UnsupportedError("quotients rounded down are the library's")

    found["div_floor"] = rounded_down
    return found


# -- lines ---------------------------------------------------------------------------------------------------------------


def _values(form: Form, row: Row) -> dict[str, Attr]:
    given = form.attr("args", ())
    assert isinstance(given, tuple)
    return {a.name: given[k] if k < len(given) else a.default for k, a in enumerate(row.args)}


def _pointwise(e: Emitter, row: Row, found: Arguments) -> None:
    assert row.expr is not None
    (to,) = result_operands(e.form)
    view = e.form.operands[to].view
    assert view is not None
    dtype, result = found.promoted(), row.results[0].dtype.of(found)
    if kind_of(result) > kind_of(dtype):  # a function of integers that gives floating point
        dtype = result
    if kind_of(dtype) is NumberKind.COMPLEX:
        raise UnsupportedError("kernels have no complex numbers")
    compute = opmath(dtype)
    if compute not in STORED:
        raise UnsupportedError(f"kernels do not know {compute.label}")
    elements: dict[str, int] = {}
    for name, value in _values(e.form, row).items():
        if isinstance(value, OperandRef):
            node = e.read(value.index, view.sizes)
            elements[name] = node if name in row.truths else e.to(node, compute)
        elif value is not None:
            decides = row.opcode == "pow" and name == "b"
            elements[name] = e.number(e.assume(value) if decides else value, compute)

    def constant(n: ExprNumber) -> int:
        if isinstance(n, float) and kind_of(dtype) < NumberKind.FLOAT:
            return e.const(DType.F32, n)
        return e.const(real_of(compute), n)

    node = evaluate(row.expr, elements, _primitives(e), constant)
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
        raise UnsupportedError(f"kernels do not know {dtype.label}")
    return compute


def _floating(dtype: DType) -> DType:
    """As `_compute`, for what is defined on floating point alone."""
    compute = _compute(dtype)
    if compute not in FLOATS:
        raise UnsupportedError(f"{dtype.label} is not floating point")
    return compute


def _extent(e: Emitter) -> int:
    return math.prod(e.graph.space[len(e.graph.outer) :])


_NEUTRAL: Final = {"add": 0, "max": -math.inf, "min": math.inf, "and": True, "or": False}


def neutral(op: str, dtype: DType) -> Number:
    """What a fold starts from."""
    if dtype in INTS and op in ("max", "min"):
        return bounds(dtype)[0 if op == "max" else 1]
    return _NEUTRAL[op]


def _reduction(e: Emitter, row: Row, found: Arguments) -> None:
    """Sums, means, extremes and truths over the last dimensions."""
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
    else:
        compute = _compute(result)
        folded = e.fold("add", e.to(e.to(node, result), compute))
        if op == "mean":
            folded = e.apply("div", folded, e.const(compute, float(_extent(e))))
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
    n = e.const(compute, float(_extent(e)))
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


_FOLDS: Final = ("sum", "mean", "amax", "amin", "any", "all")


def folded_dims(form: Form) -> tuple[tuple[int, ...], int]:
    """The space of a reduction, and how many of its last dimensions it folds along; (result sizes, 0) if it is none.

    Raises:
        UnsupportedError: it folds along other dimensions, or is no row that kernels know.
    """
    opcode = form.opcode
    if opcode in ("copy", "fill"):
        view = form.operands[-1].view
        assert view is not None
        return view.sizes, 0
    row = TABLE.get(opcode)
    if row is None:
        raise UnsupportedError(f"{opcode} is the library's")
    if row.expr is not None:
        view = form.operands[result_operands(form)[0]].view
        assert view is not None
        return view.sizes, 0
    found = arguments(form)
    if opcode == "layer_norm":
        return found.view("a").sizes, len(found.integers("sizes"))
    if opcode in _FOLDS:
        sizes = found.view("a").sizes
        dims = sorted(reduced_dims(found))
        if not dims or dims != list(range(len(sizes) - len(dims), len(sizes))):
            raise UnsupportedError("only the last dimensions are folded")
        return sizes, len(dims)
    if opcode in ("softmax", "log_softmax", "softmax_backward", "log_softmax_backward"):
        sizes = found.view("a" if "a" in found.values else "grad").sizes
        if not sizes or dim_of(found.integer("dim"), len(sizes)) != len(sizes) - 1:
            raise UnsupportedError("only the last dimension is folded")
        return sizes, 1
    raise UnsupportedError(f"{opcode} is the library's")


def emit(graph: Graph, line: Line) -> None:
    """Add what a line computes to a graph.

    Raises:
        UnsupportedError: it cannot be, or not in this graph; the graph is then half changed.
    """
    form = line.form
    if any(0 in o.view.sizes for o in form.operands if o.view is not None):
        raise UnsupportedError("there is nothing to compute")
    e = Emitter(graph, line)
    if form.opcode == "copy":
        _copy(e)
    elif form.opcode == "fill":
        _fill(e)
    else:
        row = TABLE[form.opcode]
        if row.expr is not None:
            _pointwise(e, row, arguments(form))
        elif form.opcode == "layer_norm":
            _layer_norm(e, row)
        elif form.opcode in _FOLDS:
            _reduction(e, row, arguments(form))
        elif form.opcode.endswith("softmax"):
            _softmax(e, row)
        else:
            _softmax_backward(e, row)
    if len(graph.nodes) > MAX_NODES or len(graph.slots()) > MAX_SLOTS:
        raise UnsupportedError("the kernel would be too large")


def stored_slots(puts: Sequence[Put]) -> tuple[int, ...]:
    """The slots of some stores."""
    return tuple([p.place.slot for p in puts])
