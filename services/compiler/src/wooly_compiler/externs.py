"""Library operators without a row in the op table, as nodes of a graph: losses, gradients of normalisations, ranges.

Each operator has an index space and a function that emits what it computes there. Arguments are those of the operator's schema,
by position. Results are the form's OUT operands, in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from wooly_wis.dtypes import DType
from wooly_wis.kernel.ops import FLOATS, STORED
from wooly_wis.program import Attr, Form, OperandRef, ParamRef, Role, View
from wooly_wis.promotion import NumberKind, kind_of, opmath

from wooly_compiler.dag import Emitter, GraphNode, Place, Target
from wooly_compiler.errors import UnsupportedError

Space = tuple[tuple[int, ...], frozenset[int]]
_NONE: Final[frozenset[int]] = frozenset()


@dataclass(frozen=True, slots=True)
class Extern:
    """A library operator for which kernels can be generated.

    Attributes:
        space: returns the sizes of the index space and the dimensions that the operator folds.
        emit: adds the operator's values to a graph.
    """

    space: Callable[[Form], Space]
    emit: Callable[[Emitter], None]


def space_of(form: Form) -> Space:
    """Return the index space of an operator, and which of its dimensions the operator folds.

    Raises:
        UnsupportedError: no kernel can be generated for the operator.
    """
    return _known(form).space(form)


def emit(e: Emitter) -> None:
    """Add the values of an operator to a graph.

    Raises:
        UnsupportedError: no kernel can be generated for the operator, or not in this graph.
    """
    _known(e.form).emit(e)


def _known(form: Form) -> Extern:
    name = form.attr("name")
    found = EXTERNS.get(name) if isinstance(name, str) else None
    if found is None or any(o.view is None for o in form.operands):
        raise UnsupportedError(f"{name} has no generated kernel")
    return found


# -- reading a form ------------------------------------------------------------------------------------------------------


def args_of(form: Form) -> tuple[Attr, ...]:
    """The operator's arguments by position."""
    args = form.attr("args", ())
    assert isinstance(args, tuple)
    return args


def _arg(form: Form, k: int, default: Attr = None) -> Attr:
    args = args_of(form)
    return args[k] if k < len(args) else default


def _tensor(form: Form, k: int) -> tuple[int, View]:
    """Return the operand number and the view of argument `k`, which must be a tensor."""
    found = _maybe(form, k)
    if found is None:
        raise UnsupportedError(f"argument {k} is not a tensor")
    return found


def _maybe(form: Form, k: int) -> tuple[int, View] | None:
    value = _arg(form, k)
    if not isinstance(value, OperandRef):
        return None
    view = form.operands[value.index].view
    assert view is not None
    return value.index, view


def _outs(form: Form) -> list[tuple[int, View]]:
    """Return the results as operand numbers and views. For the form, an `out=` argument is both read and written."""
    return [(k, o.view) for k, o in enumerate(form.operands) if o.role is not Role.IN and o.view is not None]


def _floating(view: View) -> DType:
    """Return the type in which elements are computed."""
    compute = opmath(view.dtype)
    if compute not in FLOATS:
        raise UnsupportedError(f"a kernel needs floating point here, not {view.dtype.label}")
    return compute


def _over_out(form: Form) -> Space:
    return _outs(form)[0][1].sizes, _NONE


# -- ranges and tests ----------------------------------------------------------------------------------------------------


def _arange(e: Emitter) -> None:
    """Start + step * i for integers, in 64 bits as in the library. Floating-point ranges have no kernel."""
    ((to, view),) = _outs(e.form)
    numbers = [_arg(e.form, k, 1 if k == 2 else None) for k in (0, 2)]
    if kind_of(view.dtype) is not NumberKind.INT or view.dtype not in STORED:
        raise UnsupportedError("a floating-point range has no generated kernel")
    for n in numbers:
        whole = e.form.params[n.index].name == "I64" if isinstance(n, ParamRef) else isinstance(n, int)
        if not whole:
            raise UnsupportedError("a range with a fractional start or step has no generated kernel")
    start, step = (e.number(n, DType.I64) for n in numbers)
    node = e.apply("add", start, e.apply("mul", e.coordinate(0), step))
    e.write(to, e.to(node, view.dtype), view.sizes)


def _where(e: Emitter) -> None:
    """Select between tensors and numbers. Numbers have dtypes of their own."""
    ((to, view),) = _outs(e.form)
    k, mask = _tensor(e.form, 0)
    wide = DType.F32 if view.dtype in (DType.F16, DType.BF16) else view.dtype
    if mask.dtype is not DType.BOOL or wide not in STORED:
        raise UnsupportedError("where of these dtypes has no generated kernel")
    sides: list[int] = []
    for side in (1, 2):
        value = _arg(e.form, side)
        if isinstance(value, OperandRef):
            sides.append(e.to(e.read(value.index, view.sizes), wide))
        elif kind_of(wide) is NumberKind.FLOAT:
            sides.append(e.number(value, wide))
        else:
            raise UnsupportedError("where between integers and a number has no generated kernel")
    e.write(to, e.to(e.apply("select", e.read(k, view.sizes), *sides), view.dtype), view.sizes)


def _truth(e: Emitter, op: str) -> None:
    ((to, view),) = _outs(e.form)
    k, a = _tensor(e.form, 0)
    node = e.read(k, a.sizes)
    if a.dtype is not DType.BOOL:
        wide = opmath(a.dtype)
        node = e.apply("ne", e.to(node, wide), e.const(wide, 0), dtype=DType.BOOL)
    e.write(to, e.to(e.fold(op, node), view.dtype), view.sizes)


def _any(e: Emitter) -> None:
    _truth(e, "or")


def _all(e: Emitter) -> None:
    _truth(e, "and")


def _folding_dim(form: Form) -> Space:
    """Fold the first argument along the dimension that the second argument names."""
    _, a = _tensor(form, 0)
    dim = _arg(form, 1)
    if not isinstance(dim, int) or not a.sizes:
        raise UnsupportedError("the operand has no dimension to reduce")
    return a.sizes, frozenset({dim % len(a.sizes)})


def _isin(e: Emitter) -> None:
    """Tell whether an element is one of up to 8 others."""
    ((to, view),) = _outs(e.form)
    (k, a), (other, among) = _tensor(e.form, 0), _tensor(e.form, 1)
    if len(args_of(e.form)) > 2 or e.form.attr("kwargs", ()) or among.numel > 8 or a.dtype is not among.dtype:
        raise UnsupportedError("isin with options, more than 8 values or mixed dtypes has no generated kernel")
    node, wide = e.read(k, a.sizes), opmath(a.dtype)
    if e.line.slots[other] in e.graph.puts:
        raise UnsupportedError("the values to find are written in the same kernel")
    found = e.const(DType.BOOL, False)
    for n in range(among.numel):
        offset = among.offset // among.dtype.itemsize
        for size, stride in reversed(list(zip(among.sizes, among.strides, strict=True))):
            offset, n = offset + n % size * stride, n // size
        place = Place(e.line.slots[other], among.dtype, (0,) * len(e.graph.space), offset)
        one = e.graph.add(GraphNode("load", among.dtype, place=place))
        same = e.apply("eq", e.to(node, wide), e.to(one, wide), dtype=DType.BOOL)
        found = e.apply("or", found, same)
    e.write(to, found, view.sizes)


# -- losses --------------------------------------------------------------------------------------------------------------

_MEAN, _SUM = 1, 2


def _nll_forward_space(form: Form) -> Space:
    """Over the batch; folded, unless the caller asks for the loss of each sample."""
    _, a = _tensor(form, 0)
    if len(a.sizes) != 2:
        raise UnsupportedError("the loss of a single sample has no generated kernel")
    return a.sizes[:1], _NONE if _arg(form, 3) == 0 else frozenset({0})


def _nll_parts(e: Emitter, target_at: int, weight_at: int, ignore_at: int, rows: int) -> tuple[int, int, int]:
    """Return nodes over the first dimension of the space: class, whether the sample counts, and its weight."""
    (k, target), (_, a) = _tensor(e.form, target_at), _tensor(e.form, 1 if rows == 2 else 0)
    if target.sizes != a.sizes[:1] or target.dtype is not DType.I64:
        raise UnsupportedError("this loss has no generated kernel: classes must be i64, one per sample")
    ignored = _arg(e.form, ignore_at, -100)
    if not isinstance(ignored, int):
        raise UnsupportedError("the ignored class is a param")
    strides = (0 if target.sizes[0] == 1 else target.strides[0], *[0] * (rows - 1))
    if e.line.slots[k] in e.graph.puts:
        raise UnsupportedError("the classes are written in the same kernel")
    place = Place(e.line.slots[k], DType.I64, strides, target.offset // 8)
    label = e.graph.add(GraphNode("load", DType.I64, place=place))
    counts = e.apply("ne", label, e.const(DType.I64, ignored), dtype=DType.BOOL)
    compute = _floating(a)
    one, zero = e.const(compute, 1.0), e.const(compute, 0.0)
    weights = _maybe(e.form, weight_at)
    if weights is not None:
        at, view = weights
        inside = e.apply("select", counts, label, e.const(DType.I64, 0))
        picked = e.pick(at, (0,) * rows, view.strides[0], view.sizes[0], inside)
        one = e.to(picked, compute)
    return label, counts, e.apply("select", counts, one, zero)


def _nll_forward(e: Emitter) -> None:
    """-weight[class] * a[sample, class], summed or averaged; and the sum of the weights."""
    k, a = _tensor(e.form, 0)
    (to, view), (total_to, total_view) = _outs(e.form)
    label, counts, weight = _nll_parts(e, 1, 2, 4, 1)
    inside = e.apply("select", counts, label, e.const(DType.I64, 0))
    picked = e.pick(k, (0 if a.sizes[0] == 1 else a.strides[0],), a.strides[1], a.sizes[1], inside)
    compute = _floating(a)
    loss = e.apply("neg", e.apply("mul", weight, e.to(picked, compute)))
    loss = e.apply("select", counts, loss, e.const(compute, 0.0))
    reduction = _arg(e.form, 3)
    if reduction == 0:
        raise UnsupportedError("a loss per sample has no generated kernel")
    total, count = e.fold("add", loss), e.fold("add", weight)
    found = e.apply("div", total, count) if reduction == _MEAN else total
    e.write(to, e.to(found, view.dtype), view.sizes)
    e.write(total_to, e.to(count, total_view.dtype), total_view.sizes)


def _nll_backward(e: Emitter) -> None:
    """-weight[class] * grad at the class, else 0. For a mean, divided by the sum of the weights."""
    ((to, view),) = _outs(e.form)
    grad_at, grad = _tensor(e.form, 0)
    total_at, total = _tensor(e.form, 6)
    reduction = _arg(e.form, 4)
    if len(view.sizes) != 2 or reduction == 0 or grad.numel != 1 or total.numel != 1:
        raise UnsupportedError("the gradient of a loss per sample has no generated kernel")
    label, counts, weight = _nll_parts(e, 2, 3, 5, 2)
    compute = _floating(view)
    g = e.to(_single(e, grad_at, grad), compute)
    if reduction == _MEAN:
        g = e.apply("div", g, e.to(_single(e, total_at, total), compute))
    here = e.apply("and", counts, e.apply("eq", e.coordinate(1), label, dtype=DType.BOOL))
    found = e.apply("select", here, e.apply("neg", e.apply("mul", weight, g)), e.const(compute, 0.0))
    e.write(to, e.to(found, view.dtype), view.sizes)


def _single(e: Emitter, k: int, view: View) -> int:
    """Load the only element of an operand."""
    if e.line.slots[k] in e.graph.puts:
        raise UnsupportedError("a single element is read in the same kernel that writes it")
    place = Place(e.line.slots[k], view.dtype, (0,) * len(e.graph.space), view.offset // view.dtype.itemsize)
    return e.graph.add(GraphNode("load", view.dtype, place=place))


def _difference_space(form: Form) -> Space:
    sizes = _tensor(form, 0)[1].sizes
    if sizes != _tensor(form, 1)[1].sizes:
        raise UnsupportedError("a loss between tensors of different sizes has no generated kernel")
    return sizes, _NONE if _arg(form, 2, _MEAN) == 0 else frozenset(range(len(sizes)))


def _mse(e: Emitter) -> None:
    """Squares of the differences, summed or averaged."""
    (k, a), (m, _) = _tensor(e.form, 0), _tensor(e.form, 1)
    ((to, view),) = _outs(e.form)
    compute = _floating(a)
    difference = e.apply("sub", *[e.to(e.read(n, a.sizes), compute) for n in (k, m)])
    found, reduction = e.apply("mul", difference, difference), _arg(e.form, 2, _MEAN)
    if reduction != 0:
        found = e.fold("add", found)
    if reduction == _MEAN:
        found = e.apply("div", found, e.const(compute, float(e.graph.extent)))
    e.write(to, e.to(found, view.dtype), view.sizes)


def _mse_backward(e: Emitter) -> None:
    """2 * (a - b) * grad. For a mean, divided by the number of elements."""
    ((to, view),) = _outs(e.form)
    (g, grad), (k, _), (m, _) = (_tensor(e.form, n) for n in range(3))
    compute, reduction = _floating(view), _arg(e.form, 3, _MEAN)
    up = e.read(g, view.sizes) if reduction == 0 else _single(e, g, grad)
    difference = e.apply("sub", *[e.to(e.read(n, view.sizes), compute) for n in (k, m)])
    norm = 2.0 / view.numel if reduction == _MEAN else 2.0
    found = e.apply("mul", e.apply("mul", e.const(compute, norm), difference), e.to(up, compute))
    e.write(to, e.to(found, view.dtype), view.sizes)


# -- normalisations ------------------------------------------------------------------------------------------------------


def _wanted(form: Form, k: int) -> tuple[bool, ...]:
    mask = _arg(form, k)
    assert isinstance(mask, tuple)
    return tuple([bool(m) for m in mask])


def _norm_backward_space(form: Form) -> Space:
    """The gradient of the input folds the normalised dimensions. The gradients of weight and bias fold the others."""
    _, a = _tensor(form, 1)
    sizes = _arg(form, 2)
    assert isinstance(sizes, tuple)
    outer = len(a.sizes) - len(sizes)
    wanted = _wanted(form, 7)
    if wanted[0]:
        if any(wanted[1:]):
            raise UnsupportedError("gradients that fold different dimensions cannot share a kernel")
        return a.sizes, frozenset(range(outer, len(a.sizes)))
    if not outer:
        raise UnsupportedError("the operand has no dimension to reduce")
    return a.sizes, frozenset(range(outer))


def _norm_backward(e: Emitter) -> None:
    """Gradients of layer norm. The mask argument says which.

    dx = (g*w - mean(g*w) - x^ * mean(g*w*x^)) * rstd, dw = sum(g * x^), db = sum(g), with x^ = (x - mean) * rstd.
    """
    (g_at, _), (a_at, a) = _tensor(e.form, 0), _tensor(e.form, 1)
    (mean_at, _), (rstd_at, _) = _tensor(e.form, 3), _tensor(e.form, 4)
    compute, space = _floating(a), a.sizes
    g, x, mean, rstd = (e.to(e.read(k, space), compute) for k in (g_at, a_at, mean_at, rstd_at))
    centred = e.apply("mul", e.apply("sub", x, mean), rstd)
    outs, wanted = iter(_outs(e.form)), _wanted(e.form, 7)
    if wanted[0]:
        weight = _maybe(e.form, 5)
        scaled = e.apply("mul", g, e.to(e.read(weight[0], space), compute)) if weight is not None else g
        n = e.const(compute, float(e.graph.extent))
        first = e.apply("div", e.fold("add", scaled), n)
        second = e.apply("div", e.fold("add", e.apply("mul", scaled, centred)), n)
        inner = e.apply("sub", e.apply("sub", scaled, first), e.apply("mul", centred, second))
        _write_next(e, outs, e.apply("mul", inner, rstd))
    if wanted[1]:
        _write_next(e, outs, e.fold("add", e.apply("mul", g, centred)))
    if wanted[2]:
        _write_next(e, outs, e.fold("add", g))


def _write_next(e: Emitter, outs: object, node: int) -> None:
    to, view = next(outs)  # type: ignore[call-overload]
    e.write(to, e.to(node, view.dtype), view.sizes)


def _channels(form: Form, k: int, *, folding: bool) -> Space:
    """The sizes of argument `k`. With `folding`, all dimensions but the channels are folded."""
    _, a = _tensor(form, k)
    if len(a.sizes) < 2:
        raise UnsupportedError("the operand has no channel dimension")
    return a.sizes, frozenset(range(len(a.sizes))) - {1} if folding else _NONE


def _per_channel(e: Emitter, k: int) -> int:
    """Load an operand that has one element per channel."""
    view, slot = e.form.operands[k].view, e.line.slots[k]
    assert view is not None
    if view.sizes != e.graph.space[1:2] or view.dtype not in STORED:
        raise UnsupportedError("the operand does not have one supported element per channel")
    stride = 0 if view.sizes[0] == 1 else view.strides[0]
    strides = tuple([stride if d == 1 else 0 for d in range(len(e.graph.space))])
    place = Place(slot, view.dtype, strides, view.offset // view.dtype.itemsize)
    put = e.graph.puts.get(slot)
    if put is None:
        return e.graph.add(GraphNode("load", view.dtype, place=place))
    if put.place != place:
        raise UnsupportedError(f"slot {slot} is read with another layout than it was written with")
    return put.node


def _results(form: Form) -> list[tuple[int, View]]:
    """Return the operator's new results. Arguments that it updates are not among them."""
    return [(k, o.view) for k, o in enumerate(form.operands) if o.role is Role.OUT and o.view is not None]


def _batch_norm_space(form: Form) -> Space:
    """Training folds all dimensions but the channels."""
    return _channels(form, 0, folding=_arg(form, 5) is True)


def _batch_norm(e: Emitter) -> None:
    """(a - mean) * rstd * weight + bias, with the statistics of each channel.

    Training uses the statistics of the batch, otherwise the running ones. Training also returns mean and rstd, and moves the
    running statistics towards those of the batch; for this, the variance is the unbiased one.
    """
    k, a = _tensor(e.form, 0)
    running = [_maybe(e.form, n) for n in (3, 4)]
    training, momentum, eps = (_arg(e.form, n) for n in (5, 6, 7))
    compute, outs = _floating(a), _results(e.form)
    x, one = e.to(e.read(k, a.sizes), compute), e.const(compute, 1.0)
    kept = [e.to(_per_channel(e, s[0]), compute) for s in running if s is not None]
    if training is True:
        if any(s is not None and e.form.operands[s[0]].role is Role.IN for s in running):
            raise UnsupportedError("the operator writes running statistics, but its form declares them as inputs")
        if e.graph.extent < 2:
            raise UnsupportedError("the variance of one element is not defined")
        n = e.const(compute, float(e.graph.extent))
        mean = e.apply("div", e.fold("add", x), n)
        centred = e.apply("sub", x, mean)
        squares = e.fold("add", e.apply("mul", centred, centred))
        variance = e.apply("div", squares, n)
    elif training is False and len(kept) == 2:
        mean, variance = kept
        centred = e.apply("sub", x, mean)
    else:
        raise UnsupportedError("batch norm without running statistics has no generated kernel")
    rstd = e.apply("div", one, e.apply("sqrt", e.apply("add", variance, e.number(eps, compute))))
    node = e.apply("mul", centred, rstd)
    for op, at in (("mul", 1), ("add", 2)):
        given = _maybe(e.form, at)
        if given is not None:
            node = e.apply(op, node, e.to(_per_channel(e, given[0]), compute))
    to, view = outs[0]
    e.write(to, e.to(node, view.dtype), view.sizes)
    if training is not True:
        return
    for (to, view), value in zip(outs[1:], (mean, rstd), strict=True):
        e.write(to, e.to(value, view.dtype), view.sizes)
    part = e.number(momentum, compute)
    rest = e.apply("sub", one, part)
    unbiased = e.apply("div", squares, e.const(compute, float(e.graph.extent - 1)))
    for stat, old, new in zip(running, kept, (mean, unbiased), strict=False):
        assert stat is not None
        moved = e.apply("add", e.apply("mul", part, new), e.apply("mul", rest, old))
        e.write(stat[0], e.to(moved, stat[1].dtype), stat[1].sizes)


def _batch_norm_backward_space(form: Form) -> Space:
    """Without statistics of the batch, the gradient of the input folds no dimension."""
    return _channels(form, 1, folding=_arg(form, 7) is True or any(_wanted(form, 9)[1:]))


def _batch_norm_backward(e: Emitter) -> None:
    """Gradients of batch norm. The mask argument says which.

    After training: dx = (g - mean(g) - x^ * mean(g * x^)) * rstd * w, else dx = g * rstd * w. dw = sum(g * x^), db = sum(g), with
    x^ = (x - mean) * rstd.
    """
    (g_at, _), (a_at, a) = _tensor(e.form, 0), _tensor(e.form, 1)
    training, eps, wanted = _arg(e.form, 7) is True, _arg(e.form, 8), _wanted(e.form, 9)
    stats = [_maybe(e.form, k) for k in ((5, 6) if training else (3, 4))]
    compute, one = _floating(a), e.const(_floating(a), 1.0)
    if stats[0] is None or stats[1] is None:
        raise UnsupportedError("the gradient of batch norm without saved statistics has no generated kernel")
    g, x = (e.to(e.read(k, a.sizes), compute) for k in (g_at, a_at))
    mean, rstd = (e.to(_per_channel(e, s[0]), compute) for s in stats if s is not None)
    if not training:
        rstd = e.apply("div", one, e.apply("sqrt", e.apply("add", rstd, e.number(eps, compute))))
    centred = e.apply("mul", e.apply("sub", x, mean), rstd)
    outs, folding = iter(_results(e.form)), bool(e.graph.folded)
    total = e.fold("add", g) if folding else 0
    along = e.fold("add", e.apply("mul", g, centred)) if folding else 0
    if wanted[0]:
        node = g
        if training:
            n = e.const(compute, float(e.graph.extent))
            node = e.apply("sub", node, e.apply("div", total, n))
            node = e.apply("sub", node, e.apply("mul", centred, e.apply("div", along, n)))
        weight = _maybe(e.form, 2)
        factor = rstd if weight is None else e.apply("mul", rstd, e.to(_per_channel(e, weight[0]), compute))
        _write_next(e, outs, e.apply("mul", node, factor))
    if wanted[1]:
        _write_next(e, outs, along)
    if wanted[2]:
        _write_next(e, outs, total)


def _dropout_backward(e: Emitter) -> None:
    """Grad * mask * scale."""
    ((to, view),) = _outs(e.form)
    (g, _), (m, _) = _tensor(e.form, 0), _tensor(e.form, 1)
    compute = _floating(view)
    mask = e.to(e.read(m, view.sizes), compute)
    found = e.apply(
        "mul", e.apply("mul", e.to(e.read(g, view.sizes), compute), mask), e.number(_arg(e.form, 2), compute)
    )
    e.write(to, e.to(found, view.dtype), view.sizes)


# -- sums by index -------------------------------------------------------------------------------------------------------

EMBEDDING_BACKWARD: Final = "aten.embedding_dense_backward.default"


def _embedding_backward_space(form: Form) -> Space:
    """Over the gradient's rows, in order."""
    sizes = _tensor(form, 0)[1].sizes
    if len(sizes) < 2 or _tensor(form, 1)[1].sizes != sizes[:-1]:
        raise UnsupportedError("this gradient of an embedding has no generated kernel")
    return sizes, frozenset(range(len(sizes) - 1))


def _embedding_backward(e: Emitter) -> None:
    """Add up the rows of the gradient by index, in order. As in the library, an index out of range is ignored."""
    ((to, view),) = _outs(e.form)
    (g, grad), (at, index) = _tensor(e.form, 0), _tensor(e.form, 1)
    padding, by_number = _arg(e.form, 3), _arg(e.form, 4)
    if by_number or not isinstance(padding, int) or len(view.sizes) != 2:
        raise UnsupportedError("this gradient of an embedding has no generated kernel")
    moving = [0 if n == 1 else s for n, s in zip(index.sizes, index.strides, strict=True)]
    place = Place(e.line.slots[at], index.dtype, (*moving, 0), index.offset // index.dtype.itemsize)
    where = e.to(e.graph.add(GraphNode("load", index.dtype, place=place)), DType.I64)
    counts = e.apply("ne", where, e.const(DType.I64, padding), dtype=DType.BOOL)
    columns = 0 if view.sizes[1] == 1 else view.strides[1]
    target = Target(where, counts, view.strides[0], view.sizes[0])
    e.add_up(to, [*[0] * len(index.sizes), columns], e.to(e.read(g, grad.sizes), _floating(view)), target)


EXTERNS: Final[dict[str, Extern]] = {
    "aten.arange.start_out": Extern(_over_out, _arange),
    "aten.where.self": Extern(_over_out, _where),
    "aten.any.dim": Extern(_folding_dim, _any),
    "aten.all.dim": Extern(_folding_dim, _all),
    "aten.isin.Tensor_Tensor": Extern(_over_out, _isin),
    "aten.nll_loss_forward.default": Extern(_nll_forward_space, _nll_forward),
    "aten.nll_loss_backward.default": Extern(_over_out, _nll_backward),
    "aten.mse_loss.default": Extern(_difference_space, _mse),
    "aten.mse_loss_backward.default": Extern(_over_out, _mse_backward),
    "aten.native_layer_norm_backward.default": Extern(_norm_backward_space, _norm_backward),
    "aten.native_batch_norm.default": Extern(_batch_norm_space, _batch_norm),
    "aten._native_batch_norm_legit.default": Extern(_batch_norm_space, _batch_norm),
    "aten.native_batch_norm_backward.default": Extern(_batch_norm_backward_space, _batch_norm_backward),
    "aten.native_dropout_backward.default": Extern(_over_out, _dropout_backward),
    EMBEDDING_BACKWARD: Extern(_embedding_backward_space, _embedding_backward),
}
