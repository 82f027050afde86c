"""Splits a large instruction into pieces that compute the same bits: element-wise, along kept dimensions, by rows, or by heads.

A piece is the same instruction on parts of the operands' views. Therefore the result has the same shape, dtype and place as that
of the whole instruction. The tables in this file decide which operators are split. Tests compare the bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from wooly_wis.dtypes import DType
from wooly_wis.optable import TABLE, Family, result_operands
from wooly_wis.program import Form, OperandRef, View

#: The part of a view that a piece takes: (dimension, start, length) for each dimension that is cut.
Cuts: TypeAlias = tuple[tuple[int, int, int], ...]


class Piece(NamedTuple):
    """Part of an instruction.

    Attributes:
        cuts: the cuts of each operand.
        share: size of the piece, relative to the sum over all pieces.
    """

    cuts: tuple[Cuts, ...]
    share: int


#: The length of a piece along the last dimension is a multiple of this number of elements: no SIMD vector crosses its end.
ALIGNED = 4096
#: Rows of a matrix product per piece: a multiple of ROWS, and at least LEAST_ROWS.
ROWS, LEAST_ROWS = 64, 256
#: Dtypes for which a product by parts of rows has the same bits as the whole product. float64 is missing, because its bits
#: differ when the number of columns is odd. Batches of vectors differ, too, and are not split.
BY_ROWS = frozenset((DType.F32, DType.BF16))
#: Operators for which each element of the result depends only on the corresponding elements of the operands, on CPUs. Other
#: operators (sigmoid, gelu, pow) use different code for elements that do not fill a SIMD vector, with different bits: they
#: are not split.
EXACT = frozenset(
    """
        abs acos add addcdiv addcmul asin atan bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min
        cos div div_floor div_trunc eq erf erfc exp expm1 floor fmod ge gt isnan le lerp log log10 log1p log2 logical_and
        logical_not logical_or logical_xor lt masked_fill maximum minimum mul ne neg reciprocal relu relu_backward remainder
        round rsub sigmoid_backward sign sin sqrt sub tan tanh tanh_backward trunc where
    """.split()  # noqa: SIM905
)
#: For each reduction, the argument that names the reduced dimensions. The result keeps the other dimensions.
_REDUCED = {"sum": "dims", "mean": "dims", "amax": "dims", "amin": "dims", "any": "dims", "all": "dims",
            "argmax": "dim", "argmin": "dim"}  # fmt: skip
#: Reductions whose result does not depend on the order of the elements.
_ORDERLESS = frozenset(("amax", "amin", "any", "all", "argmax", "argmin"))
#: Operators along one dimension whose result has the shape of their argument.
_ALONG = frozenset(("softmax", "log_softmax", "softmax_backward", "log_softmax_backward"))
#: Operators of attention on CPUs, which compute each head of each sequence independently: the number of arguments that are
#: tensors, of results, and which of both together has one number per row.
_ATTENTION = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": (3, 2, 4),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": (6, 3, 5),
}


def divide(form: Form, slots: Sequence[int], parts: int) -> tuple[Piece, ...] | None:
    """Split an instruction into about `parts` pieces; None if its operator or its operands do not allow a split."""
    views = [o.view for o in form.operands]
    if parts < 2 or any(v is None or not v.numel or v.dtype.kind == "complex" for v in views):
        return None
    known = [v for v in views if v is not None]
    if form.opcode in ("copy", "fill"):
        result = len(known) - 1
        return _elementwise(known, result, parts) if _apart(known, slots, result) else None
    if form.opcode == "extern" and form.attr("name") in _ATTENTION:
        return _heads(form, known, slots, parts)
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
    """Whether no operand shares the result's slot. With `same`, an operand may be the result's own view."""
    return all(
        slot != slots[result] or k == result or (same and views[k] == views[result]) for k, slot in enumerate(slots)
    )


def _elementwise(views: Sequence[View], result: int, parts: int) -> tuple[Piece, ...] | None:
    """Split into boxes of the result's index space, along the dimensions with the largest strides."""
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
    """Yield boxes of about `most` elements that cover an index space. Dimensions are cut in the order of `order`."""
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
    """Return the part of an operand that broadcasts to a box of the result."""
    lacking = rank - len(view.sizes)
    return tuple([(d - lacking, start, n) for d, start, n in box if d >= lacking and view.sizes[d - lacking] > 1])


def _kept(form: Form, views: Sequence[View], result: int, parts: int) -> tuple[Piece, ...] | None:
    """Split along the kept dimension with the largest stride. A piece has at least two rows: the library computes a single row in
    another way.
    """
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
    """Split a matrix product by rows of its left operand."""
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


def _heads(form: Form, views: Sequence[View], slots: Sequence[int], parts: int) -> tuple[Piece, ...] | None:
    """Split attention by sequences and heads. In half precision the library chooses its products by the number of heads, so only
    float32 is split.
    """
    given, results = form.attr("args", ()), result_operands(form)
    count, count_of_results, of_rows = _ATTENTION[str(form.attr("name"))]
    inputs = [a.index for a in given[:count] if isinstance(a, OperandRef)] if isinstance(given, tuple) else []
    if len(inputs) != count or len(results) != count_of_results or form.attr("wanted") is not None:
        return None
    rows = (*inputs, *results)[of_rows]
    space = views[inputs[0]].sizes[:2]
    for k, view in enumerate(views):
        if view.dtype is not DType.F32:
            return None
        if k in inputs or k in results:
            fits = len(view.sizes) == (3 if k == rows else 4) and view.sizes[:2] == space
        else:  # the mask
            fits = len(view.sizes) == 2 or (len(view.sizes) == 4 and all(map(_spans, view.sizes, space)))
        if not fits:
            return None
    if not all(_apart(views, slots, result) for result in results):
        return None
    pieces = []
    for box in _boxes(space, (0, 1), -(-math.prod(space) // parts)):
        cuts = [box if k == rows else _narrowed(view, box, 4) for k, view in enumerate(views)]
        lengths = {d: length for d, _, length in box}
        pieces.append(Piece(tuple(cuts), math.prod([lengths.get(d, size) for d, size in enumerate(space)])))
    return tuple(pieces) if len(pieces) > 1 else None


def _spans(size: int, whole: int) -> bool:
    return size in (1, whole)
