"""Large instructions as pieces, where pieces have the bits of the whole: element by element, over kept dimensions, by rows.

A piece is the same instruction on parts of its operands' views, so the whole has its shape, its dtypes and its place. What is
split and what stays whole is decided by the tables here; tests compare the bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from wooly_wis.dtypes import DType
from wooly_wis.optable import TABLE, Family, result_operands
from wooly_wis.program import Form, OperandRef, View

#: (dimension, start, length) of what a piece takes of a view; several in order.
Cuts: TypeAlias = tuple[tuple[int, int, int], ...]


class Piece(NamedTuple):
    """Part of an instruction.

    Attributes:
        cuts: per operand.
        share: elements of its part of the index space.
    """

    cuts: tuple[Cuts, ...]
    share: int


#: Elements of a piece along the last dimension are a multiple of this: no vector ends within.
ALIGNED = 4096
#: Rows of a product that are taken at once: a multiple of the first, and no less than the second.
ROWS, LEAST_ROWS = 64, 256
#: Products of these dtypes have the same bits by parts of their rows. Those of float64 do not where columns are odd, and
#: batches of vectors do not.
BY_ROWS = frozenset((DType.F32, DType.BF16))
#: Operators whose result's element hangs on nothing but the elements that it is made of, on CPUs. Others (sigmoid, gelu, pow)
#: compute what does not fill a vector in another way, and have other bits there: they stay whole.
EXACT = frozenset(
    """
        abs acos add addcdiv addcmul asin atan bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min
        cos div div_floor div_trunc eq erf erfc exp expm1 floor fmod ge gt isnan le lerp log log10 log1p log2 logical_and
        logical_not logical_or logical_xor lt masked_fill maximum minimum mul ne neg reciprocal relu relu_backward remainder
        round rsub sigmoid_backward sign sin sqrt sub tan tanh tanh_backward trunc where
    """.split()  # noqa: SIM905
)
#: Per reduction, the argument that says over which dimensions; the result keeps the others.
_REDUCED = {"sum": "dims", "mean": "dims", "amax": "dims", "amin": "dims", "any": "dims", "all": "dims",
            "argmax": "dim", "argmin": "dim"}  # fmt: skip
#: Those that give the same in whatever order elements come.
_ORDERLESS = frozenset(("amax", "amin", "any", "all", "argmax", "argmin"))
#: The same, of those whose result has the shape of their argument.
_ALONG = frozenset(("softmax", "log_softmax", "softmax_backward", "log_softmax_backward"))


def divide(form: Form, slots: Sequence[int], parts: int) -> tuple[Piece, ...] | None:
    """An instruction as about so many pieces; None where its operator, or its operands, do not allow it."""
    views = [o.view for o in form.operands]
    if parts < 2 or any(v is None or not v.numel or v.dtype.kind == "complex" for v in views):
        return None
    known = [v for v in views if v is not None]
    if form.opcode in ("copy", "fill"):
        result = len(known) - 1
        return _elementwise(known, result, parts) if _apart(known, slots, result) else None
    row = TABLE.get(form.opcode)
    if row is None:
        return None
    results = result_operands(form)
    if len(results) != 1 or not _apart(known, slots, results[0], same=row.family is Family.POINTWISE):
        return None
    if form.opcode in EXACT:
        return _elementwise(known, results[0], parts)
    if form.opcode in _REDUCED or form.opcode in _ALONG:
        return _kept(form, known, results[0], parts)
    if row.family is Family.CONTRACTION:
        return _rows(form, known, results[0], parts)
    return None


def _apart(views: Sequence[View], slots: Sequence[int], result: int, *, same: bool = False) -> bool:
    """Whether no operand lies where the result is written; `same`: unless it is the very view that is written."""
    return all(
        slot != slots[result] or k == result or (same and views[k] == views[result]) for k, slot in enumerate(slots)
    )


def _elementwise(views: Sequence[View], result: int, parts: int) -> tuple[Piece, ...] | None:
    """Boxes of the result's index space, along its outermost dimensions in memory."""
    out = views[result]
    order = sorted(range(len(out.sizes)), key=lambda d: -out.strides[d])
    pieces = []
    for box in _boxes(out.sizes, order, -(-out.numel // parts)):
        share = out.numel
        for d, _, length in box:
            share = share // out.sizes[d] * length
        pieces.append(Piece(tuple([_narrowed(v, box, len(out.sizes)) for v in views]), share))
    return tuple(pieces) if len(pieces) > 1 else None


def _boxes(sizes: tuple[int, ...], order: Sequence[int], most: int) -> Iterator[Cuts]:
    """Boxes of about `most` elements that cover an index space, cut along `order`."""
    inner = math.prod(sizes)
    if inner <= most or not order:
        yield ()
        return
    d, rest = order[0], order[1:]
    inner //= sizes[d]
    length = max(most // inner, 1)
    if inner == 1 and length > ALIGNED:
        length -= length % ALIGNED
    elif length > ROWS:
        length -= length % ROWS
    for start in range(0, sizes[d], length):
        cut = (d, start, min(length, sizes[d] - start))
        if length > 1 or inner <= most:
            yield (cut,)
        else:
            smaller = tuple([1 if k == d else s for k, s in enumerate(sizes)])
            yield from [(cut, *more) for more in _boxes(smaller, rest, most)]


def _narrowed(view: View, box: Cuts, rank: int) -> Cuts:
    """A box of the result as what an operand that broadcasts to it gives."""
    lacking = rank - len(view.sizes)
    return tuple([(d - lacking, start, n) for d, start, n in box if d >= lacking and view.sizes[d - lacking] > 1])


def _kept(form: Form, views: Sequence[View], result: int, parts: int) -> tuple[Piece, ...] | None:
    """Along the outermost dimension that a reduction keeps. A piece has two rows at least: one alone is computed otherwise."""
    args = form.attr("args", ())
    names = [a.name for a in TABLE[form.opcode].args]
    given = dict(zip(names, args, strict=False)) if isinstance(args, tuple) else {}
    first = given[names[0]]
    if not isinstance(first, OperandRef):
        return None
    a = views[first.index]
    said = given.get(_REDUCED.get(form.opcode, "dim"))
    dims = said if isinstance(said, tuple) else (said,)
    reduced = {d % len(a.sizes) for d in dims if isinstance(d, int) and a.sizes}
    kept = [d for d in range(len(a.sizes)) if d not in reduced]
    if not reduced or not kept:
        return None
    along = max(kept, key=lambda d: (a.strides[d], -d))
    inside = [a.strides[d] for d in reduced]
    if form.opcode in _ALONG and (reduced != {len(a.sizes) - 1} or inside != [1]):
        return None
    if form.opcode not in _ORDERLESS and not 0 < max(inside) < a.strides[along]:
        return None
    size, length = a.sizes[along], -(-a.sizes[along] // parts)
    length = max(length - length % ROWS, 2) if length > ROWS else max(length, 2)
    if size < 2 * length:
        return None
    shifted = form.opcode not in _ALONG and given.get("keepdim") is not True
    out_dim = along - sum([d < along for d in reduced]) if shifted else along
    pieces = []
    starts = list(range(0, size - length + 1, length))
    for start, end in zip(starts, [*starts[1:], size], strict=True):
        n = end - start
        cuts = [((along if k != result else out_dim, start, n),) for k in range(len(views))]
        pieces.append(Piece(tuple(cuts), a.numel // size * n))
    return tuple(pieces)


def _rows(form: Form, views: Sequence[View], result: int, parts: int) -> tuple[Piece, ...] | None:
    """By rows of the left operand."""
    args = form.attr("args", ())
    names = [a.name for a in TABLE[form.opcode].args]
    given = dict(zip(names, args, strict=False)) if isinstance(args, tuple) else {}
    refs = {name: v.index for name, v in given.items() if isinstance(v, OperandRef)}
    a, out = views[refs["a"]], views[result]
    if form.opcode not in ("mm", "addmm", "linear") or a.dtype not in BY_ROWS or len(refs) + 1 != len(views):
        return None
    along = next((d for d, size in enumerate(a.sizes[:-1]) if size > 1), 0)
    rest = math.prod(a.sizes[along + 1 : -1])
    step = ROWS // math.gcd(ROWS, rest)
    least = -(-max(-(-LEAST_ROWS // rest), step) // step) * step
    size = a.sizes[along]
    length = max(-(-size // parts) // step * step, least)
    starts = list(range(0, size - length + 1, length))
    if len(a.sizes) < 2 or len(starts) < 2:
        return None
    pieces = []
    for start, end in zip(starts, [*starts[1:], size], strict=True):
        cut = (along, start, end - start)
        cuts: list[Cuts] = [()] * len(views)
        cuts[refs["a"]] = cuts[result] = (cut,)
        if form.opcode == "addmm":
            cuts[refs["bias"]] = _narrowed(views[refs["bias"]], (cut,), len(out.sizes))
        pieces.append(Piece(tuple(cuts), end - start))
    return tuple(pieces)
