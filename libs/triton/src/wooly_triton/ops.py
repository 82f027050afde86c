"""Which operations of TTIR are lowered, and how those that go element by element are written in C.

Values of f16, bf16 and 8-bit floating point are held as floats and rounded after each operation, i1 as 0 or 1. Nothing here is
undefined in C: sums wrap, shifts and conversions stay in range, a division by zero gives 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from wooly_wis.languages import ForeignError

#: Names in C of what values are held as.
C_TYPE: Final = {
    "i1": "int",
    "i8": "char",
    "i16": "short",
    "i32": "int",
    "i64": "long",
    "f8E4M3FN": "float",
    "f8E5M2": "float",
    "f16": "float",
    "bf16": "float",
    "f32": "float",
    "f64": "double",
}
BITS: Final = {
    "i1": 1,
    "i8": 8,
    "i16": 16,
    "i32": 32,
    "i64": 64,
    "f8E4M3FN": 8,
    "f8E5M2": 8,
    "f16": 16,
    "bf16": 16,
    "f32": 32,
    "f64": 64,
}
#: What lies in memory of floating point that is held as floats.
SMALL: Final = {"f8E4M3FN": "uchar", "f8E5M2": "uchar", "f16": "ushort", "bf16": "ushort"}

Exprs = Sequence[str]
#: Operation's words, element types of its operands, of its result, the operands in C: the result in C.
Write = Callable[[Sequence[str], Sequence[str], str, Exprs], str]


@dataclass(frozen=True, slots=True)
class Elementwise:
    """An operation that goes element by element.

    Attributes:
        write: its C.
        heavy: it is worth being computed only once.
        says: for the reference page.
    """

    write: Write
    heavy: bool
    says: str = ""


def is_float(elem: str) -> bool:
    """Whether elements are floating point."""
    return elem.startswith(("f", "bf"))


def unsigned(elem: str) -> str:
    """The unsigned type in which integers wrap."""
    return "ulong" if elem == "i64" else "uint"


def rounded(elem: str, text: str) -> str:
    """A result of floating point, as its type holds it."""
    return f"w_round_{elem}({text})" if elem in SMALL else text


def _wrapping(sign: str, of_bits: str) -> Write:
    def write(words: Sequence[str], ins: Sequence[str], out: str, a: Exprs) -> str:
        if out == "i1":
            return f"({a[0]} {of_bits} {a[1]})"
        u = unsigned(out)
        return f"(({C_TYPE[out]})(({u})({a[0]}) {sign} ({u})({a[1]})))"

    return write


def _bits(sign: str) -> Write:
    return lambda words, ins, out, a: f"({a[0]} {sign} {a[1]})"


def _helper(name: str) -> Write:
    """A function of the prelude for 32 and 64 bits."""

    def write(words: Sequence[str], ins: Sequence[str], out: str, a: Exprs) -> str:
        if out == "i64":
            return f"{name}_i64({a[0]}, {a[1]})"
        if out == "i32" or name.endswith("s"):
            return f"(({C_TYPE[out]}){name}_i32({a[0]}, {a[1]}))"
        mask = (1 << BITS[out]) - 1
        return f"(({C_TYPE[out]}){name}_i32(({a[0]}) & {mask}, ({a[1]}) & {mask}))"

    return write


def _shift(left: bool, signed: bool) -> Write:
    def write(words: Sequence[str], ins: Sequence[str], out: str, a: Exprs) -> str:
        if out == "i1":
            raise ForeignError("shifts of i1 are not supported")
        bits, c, u = BITS[out], C_TYPE[out], unsigned(out)
        amount = f"({u})({a[1]})"
        if left:
            return f"(({c})({amount} < {bits} ? ({u})({a[0]}) << ({amount} & {bits - 1}) : 0))"
        if signed:
            return f"(({c})(({a[0]}) >> ({amount} < {bits} ? {amount} : {bits - 1})))"
        mask = "" if bits >= 32 else f" & {(1 << bits) - 1}"
        return f"(({c})({amount} < {bits} ? (({u})({a[0]}){mask}) >> ({amount} & {bits - 1}) : 0))"

    return write


def _extreme(sign: str, unsigned_: bool) -> Write:
    def write(words: Sequence[str], ins: Sequence[str], out: str, a: Exprs) -> str:
        if not unsigned_:
            return f"(({a[0]}) {sign} ({a[1]}) ? ({a[0]}) : ({a[1]}))"
        return f"({_as_unsigned(out, a[0])} {sign} {_as_unsigned(out, a[1])} ? ({a[0]}) : ({a[1]}))"

    return write


def _as_unsigned(elem: str, text: str) -> str:
    bits = BITS[elem]
    return f"(({unsigned(elem)})({text}){f' & {(1 << bits) - 1}' if bits < 32 else ''})"


_INTEGER_ORDER = {"eq": "==", "ne": "!=", "slt": "<", "sle": "<=", "sgt": ">", "sge": ">="}
_UNSIGNED_ORDER = {"ult": "<", "ule": "<=", "ugt": ">", "uge": ">="}
_FLOAT_ORDER = {
    "oeq": "({0} == {1})",
    "ogt": "({0} > {1})",
    "oge": "({0} >= {1})",
    "olt": "({0} < {1})",
    "ole": "({0} <= {1})",
    "one": "(({0} < {1}) | ({0} > {1}))",
    "ord": "(({0} == {0}) & ({1} == {1}))",
    "ueq": "!(({0} < {1}) | ({0} > {1}))",
    "ugt": "!({0} <= {1})",
    "uge": "!({0} < {1})",
    "ult": "!({0} >= {1})",
    "ule": "!({0} > {1})",
    "une": "({0} != {1})",
    "uno": "(({0} != {0}) | ({1} != {1}))",
    "false": "0",
    "true": "1",
}


def _cmpi(words: Sequence[str], ins: Sequence[str], out: str, a: Exprs) -> str:
    order = words[0] if words else ""
    if order in _INTEGER_ORDER:
        if ins[0] == "i1" and order not in ("eq", "ne"):
            return f"(-({a[0]}) {_INTEGER_ORDER[order]} -({a[1]}))"
        return f"({a[0]} {_INTEGER_ORDER[order]} {a[1]})"
    if order in _UNSIGNED_ORDER:
        return f"({_as_unsigned(ins[0], a[0])} {_UNSIGNED_ORDER[order]} {_as_unsigned(ins[0], a[1])})"
    raise ForeignError(f"there is no order {order[:20]!r} of integers")


def _cmpf(words: Sequence[str], ins: Sequence[str], out: str, a: Exprs) -> str:
    order = words[0] if words else ""
    if order not in _FLOAT_ORDER:
        raise ForeignError(f"there is no order {order[:20]!r} of floating point")
    return _FLOAT_ORDER[order].format(f"({a[0]})", f"({a[1]})")


def _f(sign: str) -> Write:
    return lambda words, ins, out, a: rounded(out, f"({a[0]} {sign} {a[1]})")


def _call(name: str, single: str = "") -> Write:
    """A function of OpenCL, or for floats one of the prelude."""

    def write(words: Sequence[str], ins: Sequence[str], out: str, a: Exprs) -> str:
        return rounded(out, f"{name if out == 'f64' or not single else single}({', '.join(a)})")

    return write


def _chosen(text: str) -> Write:
    return lambda words, ins, out, a: text.format(*[f"({x})" for x in a])


def _to_integer(kind: str) -> Write:
    def write(words: Sequence[str], ins: Sequence[str], out: str, a: Exprs) -> str:
        if out == "i1":
            return f"(({a[0]}) != 0)"
        wide = "i64" if out == "i64" or kind == "u" else "i32"
        source = "f64" if ins[0] == "f64" else "f32"
        if kind == "u" and out == "i64":
            return f"((long)w_{source}_to_u64({a[0]}))"
        return f"(({C_TYPE[out]})w_{source}_to_{wide}({a[0]}))"

    return write


def _clamp(words: Sequence[str], ins: Sequence[str], out: str, a: Exprs) -> str:
    x, low, high = [f"({e})" for e in a]
    if "all" in words:
        return f"({x} < {low} ? {low} : {x} > {high} ? {high} : {x})"
    return f"({x} > {high} ? {high} : {x} >= {low} ? {x} : {low})"


def _unsigned_of(words: Sequence[str], ins: Sequence[str], out: str, a: Exprs) -> str:
    return f"(({C_TYPE[out]}){_as_unsigned(ins[0], a[0])})"


def _bitcast(words: Sequence[str], ins: Sequence[str], out: str, a: Exprs) -> str:
    source = ins[0]
    if source == out or {source, out} <= {"i1", "i8"} or not (is_float(source) or is_float(out)):
        return f"(({C_TYPE[out]})({a[0]}))"
    if BITS[source] != BITS[out]:
        raise ForeignError(f"bits of {source} are no {out}")
    if BITS[source] <= 16:
        u, s = ("ushort", "short") if BITS[source] == 16 else ("uchar", "char")
        bits = f"w_{source}_bits({a[0]})" if is_float(source) else f"(({u})({a[0]}))"
        return f"w_{out}_of({bits})" if is_float(out) else f"(({s}){bits})"
    return f"as_{C_TYPE[out]}(({C_TYPE[source]})({a[0]}))"


def _mulhi(words: Sequence[str], ins: Sequence[str], out: str, a: Exprs) -> str:
    if out == "i64":
        return f"((long)mul_hi((ulong)({a[0]}), (ulong)({a[1]})))"
    return f"((int)(((ulong)(uint)({a[0]}) * (ulong)(uint)({a[1]})) >> 32))"


def _absi(words: Sequence[str], ins: Sequence[str], out: str, a: Exprs) -> str:
    u = unsigned(out)
    return f"(({a[0]}) < 0 ? ({C_TYPE[out]})(0 - ({u})({a[0]})) : ({a[0]}))"


def _cheap(write: Write, says: str = "") -> Elementwise:
    return Elementwise(write, False, says)


def _heavy(write: Write, says: str = "") -> Elementwise:
    return Elementwise(write, True, says)


def _plain_cast(words: Sequence[str], ins: Sequence[str], out: str, a: Exprs) -> str:
    if ins[0] == "i1" and not is_float(out):
        return f"(({C_TYPE[out]})-({a[0]}))"
    return rounded(out, f"(({C_TYPE[out]})({a[0]}))")


def _truncated(words: Sequence[str], ins: Sequence[str], out: str, a: Exprs) -> str:
    return f"(({a[0]}) & 1)" if out == "i1" else f"(({C_TYPE[out]})({a[0]}))"


def _negated(words: Sequence[str], ins: Sequence[str], out: str, a: Exprs) -> str:
    return f"(-({a[0]}))"


_SELECT = _chosen("({0} ? {1} : {2})")
_WRAPS = "wraps"
_ZERO = "by 0 it gives 0"

ELEMENTWISE: Final[dict[str, Elementwise]] = {
    "arith.addi": _cheap(_wrapping("+", "^"), _WRAPS),
    "arith.subi": _cheap(_wrapping("-", "^"), _WRAPS),
    "arith.muli": _cheap(_wrapping("*", "&"), _WRAPS),
    "arith.andi": _cheap(_bits("&")),
    "arith.ori": _cheap(_bits("|")),
    "arith.xori": _cheap(_bits("^")),
    "arith.shli": _cheap(_shift(True, False)),
    "arith.shrsi": _cheap(_shift(False, True)),
    "arith.shrui": _cheap(_shift(False, False)),
    "arith.divsi": _heavy(_helper("w_divs"), _ZERO),
    "arith.divui": _heavy(_helper("w_divu"), _ZERO),
    "arith.remsi": _heavy(_helper("w_rems"), _ZERO),
    "arith.remui": _heavy(_helper("w_remu"), _ZERO),
    "arith.minsi": _cheap(_extreme("<", False)),
    "arith.maxsi": _cheap(_extreme(">", False)),
    "arith.minui": _cheap(_extreme("<", True)),
    "arith.maxui": _cheap(_extreme(">", True)),
    "arith.cmpi": _cheap(_cmpi),
    "arith.cmpf": _cheap(_cmpf),
    "arith.select": _cheap(_SELECT),
    "arith.addf": _heavy(_f("+")),
    "arith.subf": _heavy(_f("-")),
    "arith.mulf": _heavy(_f("*")),
    "arith.divf": _heavy(_f("/"), "rounded once"),
    "arith.remf": _heavy(_call("fmod")),
    "arith.negf": _heavy(_negated),
    "arith.maxnumf": _heavy(_chosen("({0} > {1} || {1} != {1} ? {0} : {1})")),
    "arith.minnumf": _heavy(_chosen("({0} < {1} || {1} != {1} ? {0} : {1})")),
    "arith.maximumf": _heavy(_chosen("({0} > {1} || {0} != {0} ? {0} : {1})")),
    "arith.minimumf": _heavy(_chosen("({0} < {1} || {0} != {0} ? {0} : {1})")),
    "arith.extsi": _cheap(_plain_cast),
    "arith.extui": _cheap(_unsigned_of),
    "arith.trunci": _cheap(_truncated),
    "arith.sitofp": _heavy(lambda w, i, o, a: rounded(o, f"(({C_TYPE[o]}){'-' * (i[0] == 'i1')}({a[0]}))")),
    "arith.uitofp": _heavy(lambda w, i, o, a: rounded(o, f"(({C_TYPE[o]}){_as_unsigned(i[0], a[0])})")),
    "arith.fptosi": _heavy(_to_integer("s"), "what does not fit is the nearest that does, NaN 0"),
    "arith.fptoui": _heavy(_to_integer("u"), "likewise"),
    "arith.extf": _heavy(_plain_cast),
    "arith.truncf": _heavy(_plain_cast),
    "arith.bitcast": _cheap(_bitcast),
    "tt.bitcast": _cheap(_bitcast, "of pointers: to elements of the same size"),
    "tt.fp_to_fp": _heavy(_plain_cast, "among all of floating point, to the nearest; 8-bit ones stay finite"),
    "tt.mulhiui": _cheap(_mulhi, "of i32 and i64"),
    "tt.clampf": _heavy(_clamp),
    "tt.precise_sqrt": _heavy(_call("sqrt")),
    "tt.precise_divf": _heavy(_f("/")),
    "math.exp": _heavy(_call("exp", "w_exp"), "about 1 ulp"),
    "math.exp2": _heavy(_call("exp2", "w_exp2"), "about 1 ulp"),
    "math.log": _heavy(_call("log")),
    "math.log2": _heavy(_call("log2")),
    "math.log1p": _heavy(_call("log1p")),
    "math.sin": _heavy(_call("sin")),
    "math.cos": _heavy(_call("cos")),
    "math.tanh": _heavy(_call("tanh")),
    "math.sqrt": _heavy(_call("sqrt")),
    "math.rsqrt": _heavy(_chosen("(1 / sqrt({0}))")),
    "math.erf": _heavy(_call("erf")),
    "math.floor": _heavy(_call("floor")),
    "math.ceil": _heavy(_call("ceil")),
    "math.absf": _heavy(_call("fabs")),
    "math.absi": _cheap(_absi),
    "math.fma": _heavy(_call("fma")),
}

#: Functions of `triton.language.extra.libdevice` by the neutral names under which the client writes them, in OpenCL C.
EXTERNS: Final[dict[str, str]] = {
    **{
        n: f"{n}({{0}})"
        for n in (
            "acos",
            "acosh",
            "asin",
            "asinh",
            "atan",
            "atanh",
            "cbrt",
            "ceil",
            "cos",
            "cosh",
            "cospi",
            "erf",
            "erfc",
            "exp",
            "exp10",
            "exp2",
            "expm1",
            "fabs",
            "floor",
            "lgamma",
            "log",
            "log10",
            "log1p",
            "log2",
            "rint",
            "round",
            "rsqrt",
            "sin",
            "sinh",
            "sinpi",
            "sqrt",
            "tan",
            "tanh",
            "tgamma",
            "trunc",
        )
    },
    **{
        n: f"{n}({{0}}, {{1}})"
        for n in ("atan2", "copysign", "fdim", "fmax", "fmin", "fmod", "hypot", "nextafter", "pow", "remainder")
    },
    "fma": "fma({0}, {1}, {2})",
    "div_rn": "({0} / {1})",
    "isnan": "({0} != {0})",
    "isinf": "(fabs({0}) == INFINITY)",
    "isfinite": "(fabs({0}) < INFINITY)",
    "signbit": "(signbit({0}) != 0)",
}

#: Structure, memory and everything else that is lowered, with what is to be said of it.
STRUCTURAL: Final[dict[str, str]] = {
    "arith.constant": "numbers, splats, and lists in one dimension",
    "ub.poison": "0",
    "tt.get_program_id": "",
    "tt.get_num_programs": "",
    "tt.make_range": "",
    "tt.splat": "",
    "tt.unsplat": "",
    "tt.broadcast": "",
    "tt.expand_dims": "",
    "tt.reshape": "keeps the order, also where it need not",
    "tt.trans": "",
    "tt.join": "",
    "tt.split": "",
    "tt.cat": "along the first dimension",
    "tt.gather": "an index out of range is an error",
    "tt.addptr": "a pointer is a buffer of the launch and an offset",
    "tt.load": "each element checked: out of bounds it is 0 and the launch fails",
    "tt.store": "each element checked: out of bounds nothing is written and the launch fails",
    "tt.atomic_rmw": "i32, i64, f32, f64: add, and, or, xor, min, max, exchange; f16, bf16: add",
    "tt.atomic_cas": "i32, i64",
    "tt.atomic_load": "what is masked off is 0",
    "tt.atomic_store": "",
    "tt.reduce": "any combination that is associative and commutative",
    "tt.scan": "",
    "tt.dot": "in f32 whatever the input precision says, f64, or i32; also of batches",
    "tt.histogram": "what is out of range is left out",
    "tt.call": "functions of one block (noinline=True): written in place",
    "tt.extern_elementwise": "of Triton's libdevice: " + ", ".join(sorted(EXTERNS)),
    "tt.assert": "the launch fails",
    "tt.print": "left out",
    "tt.return": "",
    "scf.for": "signed or unsigned bounds; ended if the launch takes too long",
    "scf.while": "ended if the launch takes too long",
    "scf.if": "",
    "scf.yield": "",
    "scf.condition": "",
    "cf.br": "between blocks of the function; ended if the launch takes too long",
    "cf.cond_br": "likewise",
    "gpu.barrier": "nothing: a program is one thread here",
    "ttg.barrier": "nothing: a program is one thread here",
}

#: What is refused, and why.
REFUSED: Final[dict[str, str]] = {
    "tt.int_to_ptr": "a pointer that is made of a number belongs to no buffer of the launch",
    "tt.ptr_to_int": "where a buffer lies is nobody's business",
    "tt.elementwise_inline_asm": "a vendor's assembly",
    "tt.make_tensor_ptr": "block pointers, which Triton has no more; use tensor descriptors",
    "tt.advance": "block pointers, which Triton has no more; use tensor descriptors",
    "tt.make_tensor_descriptor": "the client writes tensor descriptors as pointers",
    "tt.descriptor_load": "the client writes tensor descriptors as pointers",
    "tt.descriptor_store": "the client writes tensor descriptors as pointers",
    "tt.descriptor_reduce": "the client writes tensor descriptors as pointers",
    "tt.descriptor_gather": "the client writes tensor descriptors as pointers",
    "tt.descriptor_scatter": "the client writes tensor descriptors as pointers",
    "tt.dot_scaled": "microscaled formats",
    "tt.atomic_poll": "programs take turns on a CPU: who waits for another may wait for ever",
    "tt.map_elementwise": "use the operations themselves",
}
