"""Writes combining regions on vectors of OpenCL C.

Compilers keep an array of partial results in memory, and each step of a reduction then waits for the store of the step before.
They keep vectors in registers. Comparisons of vectors give masks: 0 or -1, as wide as the elements; of numbers, they give 0 or 1.
The texts here have the same results on vectors and on numbers, and on each lane the bits of `ops.ELEMENTWISE`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from wooly_triton.ops import C_TYPE, FLOAT_ORDER, INTEGER_ORDER, UNSIGNED_ORDER, is_float
from wooly_triton.text import Block

#: Bits of the elements that vectors can have.
BITS: Final = {"f32": 32, "i32": 32, "f64": 64, "i64": 64}
#: Bits of a vector: what common chips have.
VECTOR_BITS: Final = 256

#: Writes an operation. Arguments: the operation's words, element type of the operands, number of lanes, operands.
Write = Callable[[Sequence[str], str, int, Sequence[str]], str]


def vector_type(elem: str, lanes: int) -> str:
    """Return the C type of a vector; of a number if there is one lane."""
    return C_TYPE[elem] + (str(lanes) if lanes > 1 else "")


def _unsigned(elem: str, lanes: int, text: str) -> str:
    return f"as_u{vector_type(elem, lanes)}({text})"


def _wraps(sign: str) -> Write:
    def write(words: Sequence[str], elem: str, lanes: int, a: Sequence[str]) -> str:
        return f"as_{vector_type(elem, lanes)}({_unsigned(elem, lanes, a[0])} {sign} {_unsigned(elem, lanes, a[1])})"

    return write


def _plain(text: str) -> Write:
    return lambda words, elem, lanes, a: text.format(*a)


def _extreme_unsigned(sign: str) -> Write:
    return lambda words, elem, lanes, a: (
        f"({_unsigned(elem, lanes, a[0])} {sign} {_unsigned(elem, lanes, a[1])} ? {a[0]} : {a[1]})"
    )


def _compare(words: Sequence[str], elem: str, lanes: int, a: Sequence[str]) -> str:
    order = words[0]
    if order in UNSIGNED_ORDER:
        return f"({_unsigned(elem, lanes, a[0])} {UNSIGNED_ORDER[order]} {_unsigned(elem, lanes, a[1])})"
    return f"({a[0]} {INTEGER_ORDER[order]} {a[1]})"


_COMBINING: Final[dict[str, Write]] = {
    "arith.addf": _plain("({0} + {1})"),
    "arith.mulf": _plain("({0} * {1})"),
    "arith.maxnumf": _plain("(({0} > {1}) | ({1} != {1}) ? {0} : {1})"),
    "arith.minnumf": _plain("(({0} < {1}) | ({1} != {1}) ? {0} : {1})"),
    "arith.maximumf": _plain("(({0} > {1}) | ({0} != {0}) ? {0} : {1})"),
    "arith.minimumf": _plain("(({0} < {1}) | ({0} != {0}) ? {0} : {1})"),
    "arith.addi": _wraps("+"),
    "arith.muli": _wraps("*"),
    "arith.andi": _plain("({0} & {1})"),
    "arith.ori": _plain("({0} | {1})"),
    "arith.xori": _plain("({0} ^ {1})"),
    "arith.maxsi": _plain("({0} > {1} ? {0} : {1})"),
    "arith.minsi": _plain("({0} < {1} ? {0} : {1})"),
    "arith.maxui": _extreme_unsigned(">"),
    "arith.minui": _extreme_unsigned("<"),
    "arith.cmpf": lambda words, elem, lanes, a: FLOAT_ORDER[words[0]].format(*a),
    "arith.cmpi": _compare,
    "arith.select": _plain("({0} ? {1} : {2})"),
}


def lanes_of(block: Block, elems: Sequence[str], most: int) -> int:
    """Return the lanes of a vector for a region that combines elements of these types; 0: the region is not written on vectors.

    `most` is the maximum.
    """
    bits = {BITS.get(e, 0) for e in elems}
    if len(bits) != 1 or not (width := bits.pop()) or VECTOR_BITS // width > most:
        return 0
    types = {name: t.elem for name, t in block.args}
    for op in block.ops:
        if op.name == "tt.reduce.return":
            return VECTOR_BITS // width if all(types.get(n) in BITS for n in op.operands) else 0
        found = [types.get(n) for n in op.operands]
        order = op.words[0] if op.words else ""
        compares = op.name in ("arith.cmpf", "arith.cmpi")
        if (
            op.name not in _COMBINING
            or len(op.results) != 1
            or len(found) != (3 if op.name == "arith.select" else 2)
            or any(e != "i1" and BITS.get(e or "") != width for e in found)
            or (op.name == "arith.cmpf" and (order not in FLOAT_ORDER or order in ("true", "false")))
            or (op.name == "arith.cmpi" and order not in INTEGER_ORDER | UNSIGNED_ORDER)
            or (compares and (found[0] != found[1] or is_float(found[0] or "") != (op.name == "arith.cmpf")))
            or ("i1" in found and op.name not in ("arith.andi", "arith.ori", "arith.xori", "arith.select"))
            or (op.name == "arith.select" and (found[0] != "i1" or found[1] != found[2] or found[1] == "i1"))
        ):
            return 0
        types[op.results[0]] = "i1" if compares else str(found[-1])
    return 0


def combined(
    block: Block, args: Sequence[str], lanes: int, out: Callable[[str], None], fresh: Callable[[], str]
) -> list[str]:
    """Write a region for which `lanes_of` is not 0, and return its results.

    Args:
        block: the region.
        args: C text of its arguments.
        lanes: lanes of the arguments.
        out: takes a line of C.
        fresh: returns a new name.
    """
    known = {name: (t.elem, text) for (name, t), text in zip(block.args, args, strict=True)}
    width = max(BITS.get(t.elem, 0) for _, t in block.args)
    for op in block.ops:
        if op.name == "tt.reduce.return":
            return [known[n][1] for n in op.operands]
        given = [known[n] for n in op.operands]
        text = _COMBINING[op.name](op.words, given[-1][0], lanes, [x for _, x in given])
        truth = op.name in ("arith.cmpf", "arith.cmpi") or given[-1][0] == "i1"
        c_type = (
            vector_type("i64" if width == 64 and lanes > 1 else "i32", lanes)
            if truth
            else vector_type(given[-1][0], lanes)
        )
        name = fresh()
        out(f"const {c_type} {name} = {text};")
        known[op.results[0]] = ("i1" if truth else given[-1][0], name)
    raise AssertionError("the region was checked by lanes_of")
