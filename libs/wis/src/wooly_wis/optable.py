"""The op table: one row per native opcode. Verifier, interpreters, compiler, cost model and the reference page use it.

A form of a native opcode has one attribute, ``args``: per argument of the row an operand, a param or a constant. Trailing
arguments that equal their defaults are omitted. The results are the OUT operands. An in-place form has no OUT operand: its result
is its first argument, an INOUT operand, and the computed value is converted to that operand's dtype.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from wooly_wis import oprules as r
from wooly_wis.dtypes import DType
from wooly_wis.errors import RuleError
from wooly_wis.oprules import Arg, ArgKind, Arguments, DTypeRule, ShapeRule, Sizes, Value
from wooly_wis.program import Attr, Form, OperandRef, ParamKind, ParamRef, Role, View
from wooly_wis.promotion import NumberKind, kind_of
from wooly_wis.scalar_expr import Apply, Expr, Name, apply, walk


class Family(Enum):
    """How an opcode uses memory. The family decides how a compiler lowers the opcode."""

    MEMORY = "memory"
    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    CONTRACTION = "contraction"
    MOVEMENT = "movement"
    INDEXING = "indexing"
    EXTERN = "extern"


#: How the compiler lowers each family.
LOWERING: Final[dict[Family, str]] = {
    Family.MEMORY: "calls of the memory manager",
    Family.POINTWISE: "one loop over the result, fused with its neighbours",
    Family.REDUCTION: "a loop with an accumulator, fused with its producers and consumers",
    Family.CONTRACTION: "the library's matrix product, with a fused epilogue if the library has one",
    Family.MOVEMENT: "a loop of copies, fused with its neighbours",
    Family.INDEXING: "a loop of loads at computed indices, each checked against its bounds",
    Family.EXTERN: "a call of the device's library",
}


@dataclass(frozen=True, slots=True)
class Result:
    """One result tensor of a row."""

    name: str
    dtype: DTypeRule
    shape: ShapeRule


@dataclass(frozen=True, slots=True)
class Spelling:
    """A library operator that computes the same as the row.

    Attributes:
        operator: its ATen name.
        args: per argument of the operator's schema, an argument of the row (a `Name`) or a required constant.
    """

    operator: str
    args: tuple[Name | Attr, ...]

    @property
    def in_place(self) -> bool:
        """Whether the operator writes its first argument."""
        return self.operator.split(".")[1].endswith("_")


@dataclass(frozen=True, slots=True)
class Row:
    """An opcode.

    Attributes:
        opcode: name.
        family: how a compiler lowers the opcode.
        says: the computation, as a formula or a sentence.
        args: arguments, in order.
        results: results, in order.
        spellings: library operators that compute the same.
        expr: for pointwise rows, the computation of an element.
        deciding: arguments whose dtypes decide the dtype of the computation.
        truths: arguments that must be bool tensors.
        indices: arguments that must be i32 or i64 tensors.
        flops: number of operations, from the arguments and the sizes of the first result.
    """

    opcode: str
    family: Family
    says: str
    args: tuple[Arg, ...]
    results: tuple[Result, ...]
    spellings: tuple[Spelling, ...]
    expr: Expr | None
    deciding: tuple[str, ...]
    truths: frozenset[str]
    indices: frozenset[str]
    flops: Callable[[Arguments, Sizes], int]


# -- making rows ---------------------------------------------------------------------------------------------------------

_TABLE: dict[str, Row] = {}
_A, _B, _C = Name("a"), Name("b"), Name("c")


def _arg(text: str) -> Arg:
    """Parse an argument: ``b:either``, or with a default ``alpha:number=1``. Without a default, the argument is required."""
    head, has_default, default = text.partition("=")
    name, _, kind = head.partition(":")
    value = ast.literal_eval(default) if has_default else None
    return Arg(name, ArgKind[(kind or "tensor").upper()], not has_default, value)


def _spelling(text: str, args: tuple[Arg, ...]) -> Spelling:
    """Parse a spelling: ``aten.add.Tensor``, or with its arguments ``aten.gelu.default(a, 'none')``."""
    operator, parens, inside = text.partition("(")
    if not parens:
        return Spelling(operator, tuple([Name(a.name) for a in args]))
    call = ast.parse(f"f({inside}", mode="eval").body
    assert isinstance(call, ast.Call)
    return Spelling(
        operator, tuple([Name(n.id) if isinstance(n, ast.Name) else ast.literal_eval(n) for n in call.args])
    )


def _row(
    opcode: str,
    family: Family,
    args: str,
    results: tuple[Result, ...],
    spellings: str,
    *,
    says: str = "",
    expr: Expr | None = None,
    deciding: str = "",
    truths: str = "",
    indices: str = "",
    flops: Callable[[Arguments, Sizes], int],
) -> None:
    made = tuple([_arg(a) for a in args.split()])
    tensors = [
        a.name
        for a in made
        if a.kind in (ArgKind.TENSOR, ArgKind.EITHER, ArgKind.TENSORS) and a.name not in f"{truths} {indices}".split()
    ]
    _TABLE[opcode] = Row(
        opcode,
        family,
        says or f"{results[0].name} = {expr}",
        made,
        results,
        tuple([_spelling(s, made) for s in spellings.split("; ")]),
        expr,
        tuple(deciding.split() or tensors),
        frozenset(truths.split()),
        frozenset(indices.split()),
        flops,
    )


def _numel(sizes: Sizes) -> int:
    n = 1
    for size in sizes:
        n *= size
    return n


def _pointwise(
    opcode: str,
    args: str,
    expr: Expr,
    dtype: DTypeRule = r.SAME,
    spellings: str = "",
    *,
    deciding: str = "",
    truths: str = "",
) -> None:
    steps = sum(isinstance(node, Apply) for node in walk(expr))
    _row(
        opcode,
        Family.POINTWISE,
        args,
        (Result("out", dtype, r.BROADCAST),),
        spellings or f"aten.{opcode}.default; aten.{opcode}_.default",
        expr=expr,
        deciding=deciding,
        truths=truths,
        flops=lambda _, sizes: steps * _numel(sizes),
    )


def _unary(opcode: str, expr: Expr, dtype: DTypeRule = r.SAME, spellings: str = "") -> None:
    _pointwise(opcode, "a", expr, dtype, spellings)


def _binary(
    opcode: str, expr: Expr, dtype: DTypeRule = r.SAME, overloads: str = "Tensor", *, args: str = "a:either b:either"
) -> None:
    names = [f"aten.{opcode}.{o}" for o in overloads.split()] + [f"aten.{opcode}_.{o}" for o in overloads.split()]
    _pointwise(opcode, args, expr, dtype, "; ".join(names))


def _read_once(a: Arguments, _: Sizes) -> int:
    return sum(v.numel for v in a.views())


def _reduction(
    opcode: str, args: str, dtype: DTypeRule, spellings: str, says: str, shape: ShapeRule = r.REDUCED
) -> None:
    _row(opcode, Family.REDUCTION, args, (Result("out", dtype, shape),), spellings, says=says, flops=_read_once)


def _call(primitive: str, *args: Expr | float) -> Apply:
    return apply(primitive, *args)


def _max(a: Expr, b: Expr | float) -> Expr:
    return _call("select", _call("isnan", a) | (a > b), a, b)


def _min(a: Expr, b: Expr | float) -> Expr:
    return _call("select", _call("isnan", a) | (a < b), a, b)


def _sigmoid(a: Expr) -> Expr:
    return 1 / (_call("exp", -a) + 1)


# -- pointwise -----------------------------------------------------------------------------------------------------------

_binary("add", _A + Name("alpha") * _B, args="a:either b:either alpha:number=1")
_binary("sub", _A - Name("alpha") * _B, args="a:either b:either alpha:number=1")
_pointwise("rsub", "a b:number alpha:number=1", _B - Name("alpha") * _A, r.SAME, "aten.rsub.Scalar")
_binary("mul", _A * _B)
_binary("div", _A / _B, r.FLOATING)
for _opcode, _mode in (("div_floor", "floor"), ("div_trunc", "trunc")):
    _pointwise(
        _opcode,
        "a:either b:either",
        _call(_opcode, _A, _B),
        r.SAME,
        f"aten.div.Tensor_mode(a, b, '{_mode}'); aten.div_.Tensor_mode(a, b, '{_mode}')",
    )
_binary("remainder", _A - _call("div_floor", _A, _B) * _B)
_binary("fmod", _call("fmod", _A, _B))
_pointwise(
    "pow",
    "a:either b:either",
    _A**_B,
    r.SAME,
    "aten.pow.Tensor_Tensor; aten.pow.Tensor_Scalar; aten.pow.Scalar; aten.pow_.Tensor; aten.pow_.Scalar",
)
_pointwise("maximum", "a b", _max(_A, _B), r.SAME, "aten.maximum.default")
_pointwise("minimum", "a b", _min(_A, _B), r.SAME, "aten.minimum.default")
_binary("atan2", _call("atan2", _A, _B), r.FLOATING, overloads="default")
for _opcode in ("eq", "ne", "lt", "le", "gt", "ge"):
    _binary(_opcode, _call(_opcode, _A, _B), r.TRUTH, overloads="Tensor Scalar")
for _opcode in ("and", "or", "xor"):
    _binary(f"bitwise_{_opcode}", _call(_opcode, _A, _B), overloads="Tensor Scalar")
    _binary(f"logical_{_opcode}", _call(_opcode, _call("ne", _A, 0), _call("ne", _B, 0)), r.TRUTH, overloads="default")
_unary("bitwise_not", ~_A)
_unary("logical_not", _call("eq", _A, 0), r.TRUTH)
_unary("isnan", _call("isnan", _A), r.TRUTH, "aten.isnan.default")

_unary("neg", -_A)
_unary("abs", _call("abs", _A), r.REAL)
_unary("sign", _call("select", _A > 0, 1, _call("select", _A < 0, -1, 0)))
for _opcode in ("floor", "ceil", "trunc"):
    _unary(_opcode, _call(_opcode, _A))
_unary("round", _call("round", _A))
for _opcode in (
    "sqrt exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh erf erfc".split()  # noqa: SIM905
):
    _unary(_opcode, _call(_opcode, _A), r.FLOATING)
_unary("rsqrt", 1 / _call("sqrt", _A), r.FLOATING)
_unary("reciprocal", 1 / _A, r.FLOATING)
_unary("sigmoid", _sigmoid(_A), r.FLOATING)
_unary("relu", _call("select", _A < 0, 0, _A))  # returns -0.0 for -0.0, like the library
_unary("silu", _A * _sigmoid(_A))
_unary("gelu", _A * 0.5 * (_call("erf", _A * 0.7071067811865476) + 1), spellings="aten.gelu.default(a, 'none')")
_GELU_INNER = (_A + _A * _A * _A * 0.044715) * 0.7978845608028654
_unary("gelu_tanh", _A * 0.5 * (_call("tanh", _GELU_INNER) + 1), spellings="aten.gelu.default(a, 'tanh')")

_pointwise("clamp", "a lo:either hi:either", _min(_max(_A, Name("lo")), Name("hi")), r.SAME,
           "aten.clamp.default; aten.clamp.Tensor; aten.clamp_.default; aten.clamp_.Tensor")  # fmt: skip
_pointwise("clamp_min", "a lo:either", _max(_A, Name("lo")), r.SAME,
           "aten.clamp_min.default; aten.clamp_min.Tensor; aten.clamp.default(a, lo, None); aten.clamp_min_.default; "
           "aten.clamp_min_.Tensor; aten.clamp_.default(a, lo, None)")  # fmt: skip
_pointwise("clamp_max", "a hi:either", _min(_A, Name("hi")), r.SAME,
           "aten.clamp_max.default; aten.clamp_max.Tensor; aten.clamp.default(a, None, hi); aten.clamp_max_.default; "
           "aten.clamp_max_.Tensor; aten.clamp_.default(a, None, hi)")  # fmt: skip
_pointwise("where", "mask a:either b:either", _call("select", Name("mask"), _A, _B), r.SAME, "aten.where.self",
           truths="mask")  # fmt: skip
_pointwise("masked_fill", "a mask value:either", _call("select", Name("mask"), Name("value"), _A), r.SAME,
           "aten.masked_fill.Scalar; aten.masked_fill.Tensor; aten.masked_fill_.Scalar; aten.masked_fill_.Tensor",
           truths="mask", deciding="a")  # fmt: skip
_pointwise("addcmul", "a b c value:number=1", _A + Name("value") * _B * _C)
_pointwise("addcdiv", "a b c value:number=1", _A + Name("value") * (_B / _C))
_pointwise(
    "lerp",
    "a b weight:either",
    _call(
        "select",
        _call("abs", Name("weight")) < 0.5,
        _A + Name("weight") * (_B - _A),
        _B - (_B - _A) * (1 - Name("weight")),
    ),
    r.SAME,
    "aten.lerp.Scalar; aten.lerp.Tensor; aten.lerp_.Scalar; aten.lerp_.Tensor",
    deciding="a b",
)

_G, _Y = Name("grad"), Name("y")
_pointwise("relu_backward", "grad a threshold:number", _call("select", Name("threshold") >= _A, 0, _G), r.SAME,
           "aten.threshold_backward.default", deciding="grad a")  # fmt: skip
_pointwise("sigmoid_backward", "grad y", _G * (1 - _Y) * _Y, spellings="aten.sigmoid_backward.default")
_pointwise("tanh_backward", "grad y", _G * (1 - _Y * _Y), spellings="aten.tanh_backward.default")
_pointwise("silu_backward", "grad a", _G * _sigmoid(_A) * (1 + _A * (1 - _sigmoid(_A))),
           spellings="aten.silu_backward.default")  # fmt: skip
_pointwise(
    "gelu_backward",
    "grad a",
    _G * ((_call("erf", _A * 0.7071067811865476) + 1) * 0.5 + _A * _call("exp", _A * _A * -0.5) * 0.3989422804014327),
    spellings="aten.gelu_backward.default(grad, a, 'none')",
)

# -- reductions ----------------------------------------------------------------------------------------------------------

_reduction("sum", "a dims:ints=None keepdim:bool=False dtype:dtype=None", r.SUMMED,
           "aten.sum.dim_IntList; aten.sum.default(a, dtype)", "sum over the dimensions")  # fmt: skip
_reduction("mean", "a dims:ints=None keepdim:bool=False dtype:dtype=None", r.AVERAGED,
           "aten.mean.dim; aten.mean.default(a, dtype)", "sum over the dimensions / number of elements")  # fmt: skip
_reduction("amax", "a dims:ints=() keepdim:bool=False", r.SAME, "aten.amax.default; aten.max.default(a)",
           "largest element over the dimensions; not-a-number if any element is")  # fmt: skip
_reduction("amin", "a dims:ints=() keepdim:bool=False", r.SAME, "aten.amin.default; aten.min.default(a)",
           "smallest element over the dimensions; not-a-number if any element is")  # fmt: skip
for _opcode, _says in (("any", "whether any element is not zero"), ("all", "whether every element is not zero")):
    _reduction(
        _opcode,
        "a dims:ints=None keepdim:bool=False",
        r.TRUTH,
        f"aten.{_opcode}.dims; aten.{_opcode}.default(a)",
        _says,
    )
for _opcode, _says in (
    ("argmax", "index of the first largest element"),
    ("argmin", "index of the first smallest element"),
):
    _reduction(
        _opcode,
        "a dim:int=None keepdim:bool=False",
        r.INDEX,
        f"aten.{_opcode}.default",
        f"{_says}; not-a-number counts as the extreme",
    )
_reduction("softmax", "a dim:int", r.SAME, "aten._softmax.default(a, dim, False)",
           "exp(a - m) / sum(exp(a - m)), with m the largest element along `dim`", r.AS_A)  # fmt: skip
_reduction("log_softmax", "a dim:int", r.SAME, "aten._log_softmax.default(a, dim, False)",
           "a - m - log(sum(exp(a - m))), with m the largest element along `dim`", r.AS_A)  # fmt: skip
_reduction("softmax_backward", "grad y dim:int dtype:dtype", r.ALIKE, "aten._softmax_backward_data.default",
           "y * (grad - sum(grad * y)) along `dim`", r.AS_GRAD)  # fmt: skip
_reduction("log_softmax_backward", "grad y dim:int dtype:dtype", r.ALIKE, "aten._log_softmax_backward_data.default",
           "grad - exp(y) * sum(grad) along `dim`", r.AS_GRAD)  # fmt: skip
_row(
    "layer_norm",
    Family.REDUCTION,
    "a sizes:ints weight:tensor=None bias:tensor=None eps:number=1e-5",
    (
        Result("out", r.ALIKE, r.NORMALISED),
        Result("mean", r.ALIKE, r.STATISTICS),
        Result("rstd", r.ALIKE, r.STATISTICS),
    ),
    "aten.native_layer_norm.default",
    says="mean over `sizes`, rstd = 1 / sqrt(variance + eps), out = (a - mean) * rstd * weight + bias",
    flops=lambda a, _: 8 * a.view("a").numel,
)


# -- contraction, movement, indexing -------------------------------------------------------------------------------------


def _contraction(opcode: str, args: str, shape: ShapeRule, spellings: str, says: str) -> None:
    _row(
        opcode,
        Family.CONTRACTION,
        args,
        (Result("out", r.ALIKE, shape),),
        spellings,
        says=says,
        flops=lambda a, sizes: 2 * _numel(sizes) * a.view("a").sizes[-1],
    )


_contraction("mm", "a b", r.MATRIX, "aten.mm.default", "matrix product")
_contraction("bmm", "a b", r.MATRICES, "aten.bmm.default", "matrix product per batch")
_contraction("addmm", "bias a b beta:number=1 alpha:number=1", r.MATRIX, "aten.addmm.default",
             "beta * bias + alpha * (a times b); beta 0 ignores bias")  # fmt: skip
_contraction("baddbmm", "bias a b beta:number=1 alpha:number=1", r.MATRICES, "aten.baddbmm.default",
             "beta * bias + alpha * (a times b) per batch; beta 0 ignores bias")  # fmt: skip
_contraction(
    "linear", "a weight bias:tensor=None", r.LINEAR, "aten.linear.default", "a times the transpose of weight, plus bias"
)


def _move(
    opcode: str, family: Family, args: str, shape: ShapeRule, spellings: str, says: str, indices: str = ""
) -> None:
    _row(
        opcode,
        family,
        args,
        (Result("out", r.SAME, shape),),
        spellings,
        says=says,
        indices=indices,
        flops=lambda _, __: 0,
    )


_move(
    "concat",
    Family.MOVEMENT,
    "parts:tensors dim:int=0",
    r.CONCATENATED,
    "aten.cat.default",
    "the parts joined along `dim`",
)
_move(
    "tril",
    Family.MOVEMENT,
    "a diagonal:int=0",
    r.AS_A,
    "aten.tril.default",
    "a on and below the diagonal of the last two dimensions, else 0",
)
_move(
    "triu",
    Family.MOVEMENT,
    "a diagonal:int=0",
    r.AS_A,
    "aten.triu.default",
    "a on and above the diagonal of the last two dimensions, else 0",
)
_move("index_select", Family.INDEXING, "a dim:int index", r.SELECTED, "aten.index_select.default",
      "the slices of a along `dim` that the indices select", indices="index")  # fmt: skip
_move("gather", Family.INDEXING, "a dim:int index", r.GATHERED, "aten.gather.default(a, dim, index, False)",
      "the elements of a at the given indices along `dim`", indices="index")  # fmt: skip
_move("embedding", Family.INDEXING, "weight index padding:int=-1", r.ROWS,
      "aten.embedding.default(weight, index, padding, False, False)",
      "the rows of weight that the indices select; `padding` affects only the gradient", indices="index")  # fmt: skip

TABLE: Final[dict[str, Row]] = _TABLE


# -- reading a form against its row --------------------------------------------------------------------------------------

_NUMBER_OF = {
    ParamKind.BOOL: NumberKind.BOOL,
    ParamKind.I64: NumberKind.INT,
    ParamKind.F64: NumberKind.FLOAT,
    ParamKind.C128: NumberKind.COMPLEX,
}


def _number(value: Attr, form: Form) -> NumberKind | None:
    if isinstance(value, ParamRef):
        return _NUMBER_OF[form.params[value.index]] if value.index < len(form.params) else None
    if isinstance(value, bool):
        return NumberKind.BOOL
    if isinstance(value, int):
        return NumberKind.INT
    if isinstance(value, float):
        return NumberKind.FLOAT
    return NumberKind.COMPLEX if isinstance(value, complex) else None


def _tensor(value: Attr, form: Form) -> View | None:
    if isinstance(value, OperandRef) and value.index < len(form.operands):
        operand = form.operands[value.index]
        return None if operand.role is Role.OUT else operand.view
    return None


def _is_int(value: Attr) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _read(arg: Arg, value: Attr, form: Form) -> Value:
    """Convert one argument to the value that rules use.

    Raises:
        RuleError: the argument has another kind than the row asks for.
    """
    kind = arg.kind
    if value is None and not arg.required and arg.default is None:
        return None
    if kind in (ArgKind.TENSOR, ArgKind.EITHER):
        view = _tensor(value, form)
        if view is not None:
            return view
    if kind in (ArgKind.NUMBER, ArgKind.EITHER):
        number = _number(value, form)
        if number is not None:
            return number
    elif kind is ArgKind.TENSORS and isinstance(value, tuple):
        views = [_tensor(v, form) for v in value]
        if all(v is not None for v in views):
            return tuple([v for v in views if v is not None])
    elif (
        (kind is ArgKind.INT and _is_int(value))
        or (kind is ArgKind.INTS and isinstance(value, tuple) and all(_is_int(v) for v in value))
        or (kind is ArgKind.BOOL and isinstance(value, bool))
        or (kind is ArgKind.DTYPE and isinstance(value, DType))
    ):
        return value
    raise RuleError("args", f"argument {arg.name!r} must be of kind {kind.value}")


def arguments(form: Form) -> Arguments:
    """The arguments of a native form, with defaults.

    Raises:
        RuleError: the arguments do not match the row.
    """
    row = TABLE[form.opcode]
    given = form.attr("args", ())
    if not isinstance(given, tuple) or len(given) > len(row.args):
        raise RuleError("args", f"the attribute args must be a list of at most {len(row.args)} arguments")
    values: dict[str, Value] = {}
    for k, arg in enumerate(row.args):
        if k >= len(given) and arg.required:
            raise RuleError("args", f"argument {arg.name!r} is missing")
        value = given[k] if k < len(given) else arg.default
        values[arg.name] = found = _read(arg, value, form)
        if arg.name in row.truths and isinstance(found, View) and found.dtype is not DType.BOOL:
            raise RuleError("dtype", f"argument {arg.name!r} has dtype {found.dtype.label}, but must be bool")
        if arg.name in row.indices and isinstance(found, View) and found.dtype not in (DType.I32, DType.I64):
            raise RuleError("dtype", f"argument {arg.name!r} has dtype {found.dtype.label}, but must be i32 or i64")
    return Arguments(values, row.deciding)


def result_operands(form: Form) -> tuple[int, ...]:
    """Indices of the operands that hold the results: all OUT operands, or the INOUT operand that is the first argument.

    Raises:
        RuleError: the form has neither, or both.
    """
    outs = tuple([k for k, o in enumerate(form.operands) if o.role is Role.OUT])
    inouts = [k for k, o in enumerate(form.operands) if o.role is Role.INOUT]
    if outs and not inouts:
        return outs
    given = form.attr("args", ())
    if not outs and len(inouts) == 1 and isinstance(given, tuple) and given and given[0] == OperandRef(inouts[0]):
        return tuple(inouts)
    raise RuleError(
        "operands", "the results must be OUT operands, or (in place) one INOUT operand that is the first argument"
    )


def check(form: Form) -> None:
    """Check a native form against its row.

    Raises:
        RuleError: names the part of the form that does not match.
    """
    row = TABLE[form.opcode]
    found = arguments(form)
    if not any(True for _ in found.views()):
        raise RuleError("args", "at least one argument must be a tensor")
    results = result_operands(form)
    if len(results) != len(row.results):
        raise RuleError("operands", f"the form has {len(results)} results, but must have {len(row.results)}")
    in_place = form.operands[results[0]].role is Role.INOUT
    for k, result in zip(results, row.results, strict=True):
        view = form.operands[k].view
        if view is None:
            raise RuleError("operands", f"result {result.name!r} has no view")
        dtype, sizes = result.dtype.of(found), result.shape.of(found)
        if sizes != view.sizes:
            raise RuleError(
                "shape", f"result {result.name!r} has sizes {list(view.sizes)}, but the arguments give {list(sizes)}"
            )
        if in_place:
            if kind_of(dtype) > kind_of(view.dtype):
                raise RuleError(
                    "dtype", f"a result of dtype {dtype.label} cannot be written in place to {view.dtype.label}"
                )
        elif dtype is not view.dtype:
            raise RuleError(
                "dtype", f"result {result.name!r} has dtype {view.dtype.label}, but the arguments give {dtype.label}"
            )


def canonical_args(row: Row, args: tuple[Attr, ...]) -> tuple[Attr, ...]:
    """`args` without trailing arguments that equal their defaults."""
    n = len(args)
    while n and not row.args[n - 1].required and type(args[n - 1]) is type(row.args[n - 1].default):
        if args[n - 1] != row.args[n - 1].default:
            break
        n -= 1
    return args[:n]


# -- cost ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cost:
    """The memory traffic and arithmetic of one instruction.

    Attributes:
        bytes_read: bytes of all operands that it reads. Elements that broadcasting repeats count once.
        bytes_written: bytes of all operands that it writes.
        flops: arithmetic operations; None if unknown (`extern`).
    """

    bytes_read: int
    bytes_written: int
    flops: int | None


def _touched(view: View | None) -> int:
    if view is None:
        return 0
    n = view.dtype.itemsize
    for size, stride in zip(view.sizes, view.strides, strict=True):
        n *= size if stride or not size else 1
    return n


def cost(form: Form) -> Cost:
    """The cost of a verified form."""
    if form.opcode in ("alloc", "free"):
        return Cost(0, 0, 0)
    read = sum(_touched(o.view) for o in form.operands if o.role is not Role.OUT)
    written = sum(_touched(o.view) for o in form.operands if o.role is not Role.IN)
    row = TABLE.get(form.opcode)
    if row is None:
        return Cost(read, written, None if form.opcode in ("extern", "kernel.launch") else 0)
    found = arguments(form)
    return Cost(read, written, row.flops(found, row.results[0].shape.of(found)))
