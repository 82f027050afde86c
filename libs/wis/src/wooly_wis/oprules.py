"""The vocabulary of the op table: arguments, dtype rules, shape rules. Each rule has a sentence and a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from wooly_wis.dtypes import DType
from wooly_wis.errors import RuleError
from wooly_wis.program import Attr, View
from wooly_wis.promotion import NumberKind, kind_of, real_of, result_type

Sizes: TypeAlias = tuple[int, ...]


class ArgKind(Enum):
    """What a form may pass as an argument."""

    TENSOR = "tensor"
    NUMBER = "number"
    EITHER = "tensor or number"
    TENSORS = "tensors"
    INT = "int"
    INTS = "ints"
    BOOL = "bool"
    DTYPE = "dtype"


@dataclass(frozen=True, slots=True)
class Arg:
    """An argument of a row. A `required` argument has no default. The default None means that the argument may be absent."""

    name: str
    kind: ArgKind
    required: bool = True
    default: Attr = None


Value: TypeAlias = "View | NumberKind | tuple[View, ...] | Attr"


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of one form: tensors as views, numbers as their kinds, other arguments as constants.

    Attributes:
        values: by name, with defaults.
        deciding: names of the arguments that decide the computation's dtype.
    """

    values: dict[str, Value]
    deciding: tuple[str, ...]

    def view(self, name: str) -> View:
        """A tensor argument.

        Raises:
            RuleError: the argument is not a tensor.
        """
        value = self.values[name]
        if not isinstance(value, View):
            raise RuleError("operands", f"argument {name} must be a tensor")
        return value

    def maybe(self, name: str) -> View | None:
        """A tensor argument that may be absent."""
        return None if self.values[name] is None else self.view(name)

    def views(self) -> Iterator[View]:
        """All tensors, in the order of the arguments."""
        for value in self.values.values():
            if isinstance(value, View):
                yield value
            elif isinstance(value, tuple):
                yield from [v for v in value if isinstance(v, View)]

    def tensors(self, name: str) -> tuple[View, ...]:
        """A list of tensors."""
        value = self.values[name]
        assert isinstance(value, tuple)
        return tuple([v for v in value if isinstance(v, View)])

    def integer(self, name: str) -> int:
        """A constant integer."""
        value = self.values[name]
        assert isinstance(value, int)
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """A constant list of integers; empty if the argument is absent."""
        value = self.values[name]
        return tuple([v for v in value if isinstance(v, int)]) if isinstance(value, tuple) else ()

    def promoted(self) -> DType:
        """The common dtype of the deciding arguments."""
        chosen = [self.values[n] for n in self.deciding]
        views = [v for v in chosen if isinstance(v, View)]
        for value in chosen:
            if isinstance(value, tuple):
                views += [v for v in value if isinstance(v, View)]
        return result_type(views, [v for v in chosen if isinstance(v, NumberKind)])


# -- dtypes --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DTypeRule:
    """The dtype of a result."""

    says: str
    of: Callable[[Arguments], DType]


def _floating(a: Arguments) -> DType:
    dtype = a.promoted()
    return dtype if kind_of(dtype) >= NumberKind.FLOAT else DType.F32


def _asked(a: Arguments) -> DType | None:
    asked = a.values.get("dtype")
    return asked if isinstance(asked, DType) else None


def _summed(a: Arguments) -> DType:
    dtype = a.promoted()
    return _asked(a) or (dtype if kind_of(dtype) >= NumberKind.FLOAT else DType.I64)


def _averaged(a: Arguments) -> DType:
    dtype = _asked(a) or a.promoted()
    if kind_of(dtype) < NumberKind.FLOAT:
        raise RuleError("dtype", f"the mean of {dtype.label} is not defined; pass a floating point or complex `dtype`")
    return dtype


def _alike(a: Arguments) -> DType:
    dtypes = {v.dtype for name in a.deciding for v in [a.values[name]] if isinstance(v, View)}
    if len(dtypes) != 1:
        raise RuleError("dtype", f"the operands' dtypes {sorted(d.label for d in dtypes)} must be the same")
    return next(iter(dtypes))


SAME = DTypeRule("the operands' common dtype", lambda a: a.promoted())
FLOATING = DTypeRule("the operands' common dtype; f32 for integers and truth values", _floating)
REAL = DTypeRule(
    "the operands' common dtype; for complex operands, the dtype of the parts", lambda a: real_of(a.promoted())
)
TRUTH = DTypeRule("bool", lambda _: DType.BOOL)
INDEX = DTypeRule("i64", lambda _: DType.I64)
SUMMED = DTypeRule("`dtype` if given; i64 for integers and truth values; otherwise the operand's dtype", _summed)
AVERAGED = DTypeRule("`dtype` if given, otherwise the operand's dtype, which must not be an integer", _averaged)
ALIKE = DTypeRule("the operands' dtype, which must be the same for all", _alike)


# -- shapes --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShapeRule:
    """The sizes of a result."""

    says: str
    of: Callable[[Arguments], Sizes]


def broadcast(shapes: list[Sizes]) -> Sizes:
    """Broadcast shapes. Dimensions are aligned at the right; a size of 1 is expanded.

    Raises:
        RuleError: two sizes of a dimension differ, and neither is 1.
    """
    out: list[int] = []
    for sizes in shapes:
        if len(sizes) > len(out):
            out = [1] * (len(sizes) - len(out)) + out
        at = len(out) - len(sizes)
        for k, size in enumerate(sizes):
            if out[at + k] == 1:
                out[at + k] = size
            elif size not in (1, out[at + k]):
                raise RuleError("shape", f"sizes {', '.join(str(list(s)) for s in shapes)} do not broadcast")
    return tuple(out)


def dim_of(dim: int, ndim: int) -> int:
    """The index of a dimension, counted from the front.

    Raises:
        RuleError: the dimension does not exist.
    """
    if not -max(ndim, 1) <= dim < max(ndim, 1):
        raise RuleError("shape", f"dimension {dim} does not exist: the tensor has {ndim} dimensions")
    return dim % max(ndim, 1)


def reduced_dims(a: Arguments) -> tuple[int, ...]:
    """The dimensions that a reduction removes, counted from the front. If the form names no dimensions, these are all
    dimensions.
    """
    ndim = len(a.view("a").sizes)
    if "dim" in a.values:
        value = a.values["dim"]
        dims = tuple(range(ndim)) if value is None else (a.integer("dim"),)
    else:
        dims = a.integers("dims") or tuple(range(ndim))
    found = tuple([dim_of(d, ndim) for d in dims])
    if len(set(found)) != len(found):
        raise RuleError("shape", f"dimensions {list(dims)} name a dimension twice")
    return tuple([d for d in found if d < ndim])


def _reduced(a: Arguments) -> Sizes:
    dims, keep = reduced_dims(a), a.values["keepdim"]
    sizes = a.view("a").sizes
    return tuple([1 if d in dims else s for d, s in enumerate(sizes) if keep or d not in dims])


def _rank(a: Arguments, name: str, ndim: int) -> Sizes:
    sizes = a.view(name).sizes
    if len(sizes) != ndim:
        raise RuleError("shape", f"{name} has {len(sizes)} dimensions, but must have {ndim}")
    return sizes


def _product(rank: int) -> Callable[[Arguments], Sizes]:
    def of(a: Arguments) -> Sizes:
        left, right = _rank(a, "a", rank), _rank(a, "b", rank)
        if left[:-2] != right[:-2] or left[-1] != right[-2]:
            raise RuleError("shape", f"matrices of sizes {list(left)} and {list(right)} cannot be multiplied")
        out = (*left[:-1], right[-1])
        bias = a.view("bias").sizes if "bias" in a.values else ()
        if broadcast([bias, out]) != out:
            raise RuleError("shape", f"bias {list(bias)} does not broadcast to {list(out)}")
        return out

    return of


def _linear(a: Arguments) -> Sizes:
    x, weight, bias = a.view("a").sizes, _rank(a, "weight", 2), a.maybe("bias")
    if not x or x[-1] != weight[1]:
        raise RuleError("shape", f"{list(x)} cannot be multiplied with the transpose of {list(weight)}")
    if bias is not None and bias.sizes != weight[:1]:
        raise RuleError("shape", f"bias has sizes {list(bias.sizes)}, but there are {weight[0]} features")
    return (*x[:-1], weight[0])


def _concatenated(a: Arguments) -> Sizes:
    shapes = [v.sizes for v in a.tensors("parts")]
    if not shapes or not shapes[0]:
        raise RuleError("shape", "there must be at least one part, and each part must have at least one dimension")
    dim = dim_of(a.integer("dim"), len(shapes[0]))
    for sizes in shapes:
        if len(sizes) != len(shapes[0]) or any(
            s != t for d, (s, t) in enumerate(zip(sizes, shapes[0], strict=True)) if d != dim
        ):
            raise RuleError(
                "shape", f"{list(sizes)} and {list(shapes[0])} cannot be concatenated along dimension {dim}"
            )
    total = sum(s[dim] for s in shapes)
    return (*shapes[0][:dim], total, *shapes[0][dim + 1 :])


def _selected(a: Arguments) -> Sizes:
    sizes, index = a.view("a").sizes, a.view("index").sizes
    dim = dim_of(a.integer("dim"), len(sizes))
    if len(index) > 1 or not sizes:
        raise RuleError("shape", f"an index of sizes {list(index)} does not fit a tensor of sizes {list(sizes)}")
    return (*sizes[:dim], index[0] if index else 1, *sizes[dim + 1 :])


def _gathered(a: Arguments) -> Sizes:
    sizes, index = a.view("a").sizes, a.view("index").sizes
    dim = dim_of(a.integer("dim"), len(sizes))
    if len(index) != len(sizes) or any(i > s for d, (i, s) in enumerate(zip(index, sizes, strict=True)) if d != dim):
        raise RuleError("shape", f"an index of sizes {list(index)} does not fit a tensor of sizes {list(sizes)}")
    return index


def _rows(a: Arguments) -> Sizes:
    return (*a.view("index").sizes, _rank(a, "weight", 2)[1])


def _normalised(a: Arguments) -> Sizes:
    sizes, tail = a.view("a").sizes, a.integers("sizes")
    if not tail or sizes[len(sizes) - len(tail) :] != tail:
        raise RuleError("shape", f"the operand's sizes {list(sizes)} do not end with the normalized sizes {list(tail)}")
    for name in ("weight", "bias"):
        view = a.maybe(name)
        if view is not None and view.sizes != tail:
            raise RuleError("shape", f"{name} has sizes {list(view.sizes)}, but must have {list(tail)}")
    return sizes


def _statistics(a: Arguments) -> Sizes:
    sizes, tail = _normalised(a), a.integers("sizes")
    return sizes[: len(sizes) - len(tail)] + (1,) * len(tail)


def _as(name: str) -> Callable[[Arguments], Sizes]:
    def of(a: Arguments) -> Sizes:
        sizes = a.view(name).sizes
        if "dim" in a.values:
            dim_of(a.integer("dim"), len(sizes))
        return sizes

    return of


BROADCAST = ShapeRule("the operands' sizes, broadcast", lambda a: broadcast([v.sizes for v in a.views()]))
REDUCED = ShapeRule(
    "the operand's sizes without the reduced dimensions, or (`keepdim`) with 1 for each of them", _reduced
)
AS_A = ShapeRule("the operand's sizes", _as("a"))
AS_GRAD = ShapeRule("the gradient's sizes", _as("grad"))
MATRIX = ShapeRule("[m, k] times [k, n] is [m, n]", _product(2))
MATRICES = ShapeRule("[b, m, k] times [b, k, n] is [b, m, n]", _product(3))
LINEAR = ShapeRule("[…, k] times the transpose of [n, k] is […, n]", _linear)
CONCATENATED = ShapeRule("the parts' sizes, added along `dim`", _concatenated)
SELECTED = ShapeRule("the operand's sizes, with the number of indices along `dim`", _selected)
GATHERED = ShapeRule("the index's sizes", _gathered)
ROWS = ShapeRule("the index's sizes, then the row length", _rows)
NORMALISED = ShapeRule("the operand's sizes, which end with `sizes`", _normalised)
STATISTICS = ShapeRule("the operand's sizes, with 1 for each of `sizes`", _statistics)
