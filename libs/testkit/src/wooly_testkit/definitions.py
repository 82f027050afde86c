"""Computes the rows of the op table by their definitions: the table's formulas, with sums and products written out.

The reference runtime uses these definitions, so that the other runtimes are not compared with the library that they call. Only
elementary functions are torch's. The table defines the arguments, dtypes and elements to which they are applied.
"""

from __future__ import annotations

import operator as op
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from wooly_executor.runtime.buffers import TORCH_DTYPE
from wooly_wis.oprules import Arguments, dim_of, reduced_dims
from wooly_wis.optable import TABLE, Row, arguments
from wooly_wis.program import Attr, Form, OperandRef, ParamRef
from wooly_wis.promotion import NumberKind, kind_of, opmath, real_of
from wooly_wis.scalar_expr import Number, evaluate


def _truth(t: Tensor) -> bool:
    return t.dtype is torch.bool


def _add(a: Tensor, b: Tensor) -> Tensor:
    return a | b if _truth(a) else a + b


def _mul(a: Tensor, b: Tensor) -> Tensor:
    return a & b if _truth(a) else a * b


def _rounded(mode: str) -> Callable[[Tensor, Tensor], Tensor]:
    def divide(a: Tensor, b: Tensor) -> Tensor:
        return torch.div(a, b, rounding_mode=mode)

    return divide


def _whole(round_: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda a: round_(a) if a.is_floating_point() else a


PRIMITIVES: dict[str, Callable[..., Tensor]] = {
    "add": _add,
    "sub": op.sub,
    "mul": _mul,
    "div": op.truediv,
    "div_floor": _rounded("floor"),
    "div_trunc": _rounded("trunc"),
    "and": op.and_,
    "or": op.or_,
    "xor": op.xor,
    "not": op.invert,
    "eq": op.eq,
    "ne": op.ne,
    "lt": op.lt,
    "le": op.le,
    "gt": op.gt,
    "ge": op.ge,
    "neg": op.neg,
    "select": torch.where,
    "floor": _whole(torch.floor),
    "ceil": _whole(torch.ceil),
    "trunc": _whole(torch.trunc),
    "round": _whole(torch.round),
}
for _name in (
    *(
        "fmod",
        "pow",
        "conj",
        "abs",
        "sqrt",
        "exp",
        "exp2",
        "expm1",
        "log",
        "log2",
        "log10",
        "log1p",
        "sin",
        "cos",
        "tan",
    ),
    *("asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "erf", "erfc", "isnan", "isinf"),
):
    PRIMITIVES[_name] = getattr(torch, _name)


def define(form: Form, tensor: Callable[[int], Tensor], params: Sequence[Any]) -> list[Tensor]:
    """Compute the results of a native form by its row in the op table.

    Args:
        form: a verified form.
        tensor: returns the operand at an index.
        params: the params of the instruction.
    """
    row = TABLE[form.opcode]
    found = arguments(form)
    given = form.attr("args", ())
    assert isinstance(given, tuple)

    def value(attr: Attr) -> Any:
        if isinstance(attr, OperandRef):
            return tensor(attr.index)
        if isinstance(attr, ParamRef):
            return params[attr.index]
        return [value(a) for a in attr] if isinstance(attr, tuple) else attr

    values = {a.name: value(given[k]) if k < len(given) else a.default for k, a in enumerate(row.args)}
    if row.expr is not None:
        return [_pointwise(row, found, values)]
    return _RULES[form.opcode](found, values)


def _pointwise(row: Row, found: Arguments, values: dict[str, Any]) -> Tensor:
    assert row.expr is not None
    dtype = found.promoted()
    result = row.results[0].dtype.of(found)
    if kind_of(result) > kind_of(dtype):  # a function of integers with a floating-point result
        dtype = result
    compute = TORCH_DTYPE[opmath(dtype)]

    def element(name: str, v: Any) -> Tensor:
        if isinstance(v, Tensor):
            return v if name in row.truths else v.to(compute)
        return torch.tensor(v, dtype=compute)

    def constant(n: Number) -> Tensor:
        if isinstance(n, float) and kind_of(dtype) < NumberKind.FLOAT:
            return torch.tensor(n, dtype=torch.float32)
        return torch.tensor(n, dtype=TORCH_DTYPE[real_of(opmath(dtype))])

    elements = {name: element(name, v) for name, v in values.items() if v is not None}
    sizes = row.results[0].shape.of(found)
    return evaluate(row.expr, elements, PRIMITIVES, constant).expand(sizes).to(TORCH_DTYPE[result])


# -- rows without a formula -----------------------------------------------------------------------------------------------


def _wide(t: Tensor) -> Tensor:
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def _reduce(found: Arguments, values: dict[str, Any], fold: Callable[[Tensor], Tensor]) -> Tensor:
    """Move the reduced dimensions to the end, flatten them into one, and apply `fold` along it."""
    a: Tensor = values["a"]
    dims = reduced_dims(found)
    kept = [d for d in range(a.dim()) if d not in dims]
    flat = a.permute(*kept, *dims).reshape([a.shape[d] for d in kept] + [-1 if a.numel() else _extent(a, dims)])
    out = fold(flat)
    if values["keepdim"]:
        for d in sorted(dims):
            out = out.unsqueeze(d)
    return out


def _extent(a: Tensor, dims: tuple[int, ...]) -> int:
    n = 1
    for d in dims:
        n *= a.shape[d]
    return n


def _sum(found: Arguments, values: dict[str, Any]) -> list[Tensor]:
    dtype = TORCH_DTYPE[TABLE["sum"].results[0].dtype.of(found)]
    return [
        _reduce(found, values, lambda t: _wide(t.to(dtype)).cumsum(-1)[..., -1] if t.shape[-1] else t.sum(-1)).to(dtype)
    ]


def _mean(found: Arguments, values: dict[str, Any]) -> list[Tensor]:
    dtype = TORCH_DTYPE[TABLE["mean"].results[0].dtype.of(found)]
    return [_reduce(found, values, lambda t: _wide(t.to(dtype)).sum(-1) / t.shape[-1]).to(dtype)]


def _along(row: Callable[[Tensor, int], Tensor]) -> Callable[[Arguments, dict[str, Any]], list[Tensor]]:
    def run(found: Arguments, values: dict[str, Any]) -> list[Tensor]:
        a: Tensor = values["a"]
        return [row(_wide(a), dim_of(values["dim"], a.dim())).to(a.dtype)]

    return run


def _softmax(a: Tensor, dim: int) -> Tensor:
    if a.dim() == 0:
        return torch.ones_like(a)
    e = (a - a.amax(dim, keepdim=True)).exp()
    return e / e.sum(dim, keepdim=True)


def _log_softmax(a: Tensor, dim: int) -> Tensor:
    if a.dim() == 0:
        return torch.zeros_like(a)
    shifted = a - a.amax(dim, keepdim=True)
    return shifted - shifted.exp().sum(dim, keepdim=True).log()


def _softmax_backward(found: Arguments, values: dict[str, Any]) -> list[Tensor]:
    grad, y = _wide(values["grad"]), _wide(values["y"])
    dims = (dim_of(values["dim"], y.dim()),) if y.dim() else ()
    return [(y * (grad - (grad * y).sum(dims, keepdim=True))).to(values["grad"].dtype)]


def _log_softmax_backward(found: Arguments, values: dict[str, Any]) -> list[Tensor]:
    grad, y = _wide(values["grad"]), _wide(values["y"])
    dims = (dim_of(values["dim"], y.dim()),) if y.dim() else ()
    return [(grad - y.exp() * grad.sum(dims, keepdim=True)).to(values["grad"].dtype)]


def _layer_norm(found: Arguments, values: dict[str, Any]) -> list[Tensor]:
    a = _wide(values["a"])
    dims = list(range(a.dim() - len(values["sizes"]), a.dim()))
    mean = a.mean(dims, keepdim=True)
    rstd = 1 / ((a - mean).pow(2).mean(dims, keepdim=True) + values["eps"]).sqrt()
    out = (a - mean) * rstd
    if values["weight"] is not None:
        out = out * values["weight"]
    if values["bias"] is not None:
        out = out + values["bias"]
    dtype = values["a"].dtype
    return [out.to(dtype), mean.to(dtype), rstd.to(dtype)]


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply […, m, k] by [k, n], or [b, m, k] by [b, k, n], as a sum of outer products."""
    total = torch.zeros((*a.shape[:-1], b.shape[-1]), dtype=_wide(a).dtype)
    for k in range(a.shape[-1]):
        total = total + _wide(a[..., :, k, None]) * _wide(b[..., k, None, :])
    return total


def _mm(found: Arguments, values: dict[str, Any]) -> list[Tensor]:
    return [_product(values["a"], values["b"]).to(values["a"].dtype)]


def _addmm(found: Arguments, values: dict[str, Any]) -> list[Tensor]:
    out = values["alpha"] * _product(values["a"], values["b"])
    if values["beta"] != 0:
        out = out + values["beta"] * _wide(values["bias"])
    return [out.to(values["a"].dtype)]


def _linear(found: Arguments, values: dict[str, Any]) -> list[Tensor]:
    a: Tensor = values["a"]
    out = _product(a.reshape(-1, a.shape[-1]), values["weight"].t())
    if values["bias"] is not None:
        out = out + _wide(values["bias"])
    return [out.reshape(*a.shape[:-1], -1).to(a.dtype)]


def _concat(found: Arguments, values: dict[str, Any]) -> list[Tensor]:
    shape = TABLE["concat"].results[0].shape.of(found)
    out = torch.empty(shape, dtype=TORCH_DTYPE[found.promoted()])
    dim, at = dim_of(values["dim"], len(shape)), 0
    for part in values["parts"]:
        out.narrow(dim, at, part.shape[dim]).copy_(part)
        at += part.shape[dim]
    return [out]


def _triangle(keep: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Arguments, dict[str, Any]], list[Tensor]]:
    def run(found: Arguments, values: dict[str, Any]) -> list[Tensor]:
        a: Tensor = values["a"]
        rows, columns = torch.arange(a.shape[-2])[:, None], torch.arange(a.shape[-1])[None, :]
        return [torch.where(keep(columns - rows, torch.tensor(values["diagonal"])), a, torch.zeros((), dtype=a.dtype))]

    return run


def _index_select(found: Arguments, values: dict[str, Any]) -> list[Tensor]:
    a: Tensor = values["a"]
    rows = a.movedim(dim_of(values["dim"], a.dim()), 0)[values["index"].reshape(-1).long()]
    return [rows.movedim(0, dim_of(values["dim"], a.dim()))]


def _gather(found: Arguments, values: dict[str, Any]) -> list[Tensor]:
    a, index = values["a"], values["index"]
    dim = dim_of(values["dim"], a.dim())
    if not a.dim():
        return [a.clone()]
    places = list(torch.meshgrid(*[torch.arange(n) for n in index.shape], indexing="ij"))
    places[dim] = index.long()
    return [a[tuple(places)]]


def _embedding(found: Arguments, values: dict[str, Any]) -> list[Tensor]:
    return [values["weight"][values["index"].long()]]


def _extreme(name: str) -> Callable[[Arguments, dict[str, Any]], list[Tensor]]:
    return lambda found, values: [_reduce(found, values, lambda t: getattr(torch, name)(t, -1))]


_RULES: dict[str, Callable[[Arguments, dict[str, Any]], list[Tensor]]] = {
    "sum": _sum,
    "mean": _mean,
    "amax": _extreme("amax"),
    "amin": _extreme("amin"),
    "argmax": _extreme("argmax"),
    "argmin": _extreme("argmin"),
    "any": lambda found, values: [_reduce(found, values, lambda t: (t != 0).sum(-1) > 0)],
    "all": lambda found, values: [_reduce(found, values, lambda t: (t == 0).sum(-1) == 0)],
    "softmax": _along(_softmax),
    "log_softmax": _along(_log_softmax),
    "softmax_backward": _softmax_backward,
    "log_softmax_backward": _log_softmax_backward,
    "layer_norm": _layer_norm,
    "mm": _mm,
    "bmm": _mm,
    "addmm": _addmm,
    "baddbmm": _addmm,
    "linear": _linear,
    "concat": _concat,
    "tril": _triangle(op.le),
    "triu": _triangle(op.ge),
    "index_select": _index_select,
    "gather": _gather,
    "embedding": _embedding,
}
