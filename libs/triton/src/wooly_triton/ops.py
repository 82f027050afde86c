"""The table of supported TTIR operations, and the C text of elementwise ones.

Registers hold f16, bf16 and 8-bit floats as floats, rounded after each operation, and i1 as 0 or 1. No C text has undefined
behaviour: sums wrap, shifts and conversions stay in range, and a division by zero gives 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from wooly_wis.languages import ForeignError

#: C types of elements in registers.
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
#: C types in memory of small floats, which registers hold as floats.
SMALL: Final = {"f8E4M3FN": "uchar", "f8E5M2": "uchar", "f16": "ushort", "bf16": "ushort"}

Exprs = Sequence[str]
#: Writes an operation in C. Arguments: the operation's words, element types of operands, element type of result, operands in C.
Write = Callable[[Sequence[str], Sequence[str], str, Exprs], str]


@dataclass(frozen=True, slots=True)
class Elementwise:
    """An elementwise operation.

    Attributes:
        write: writes it in C.
        heavy: whether to compute it only once instead of once per user.
        says: note for the reference page.
    """

    write: Write
    heavy: bool
    says: str = ""


def is_float(elem: str) -> bool:
    """Whether elements are floating point."""
    return elem.startswith(("f", "bf"))


def unsigned(elem: str) -> str:
    """Return the unsigned C type in which an integer type wraps."""
    return "ulong" if elem == "i64" else "uint"


def rounded(elem: str, text: str) -> str:
    """Round a floating-point result to its type."""
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
    """Call a function of the prelude; it exists for 32 and 64 bits."""

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


INTEGER_ORDER = {"eq": "==", "ne": "!=", "slt": "<", "sle": "<=", "sgt": ">", "sge": ">="}
UNSIGNED_ORDER = {"ult": "<", "ule": "<=", "ugt": ">", "uge": ">="}
FLOAT_ORDER = {
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
    if order in INTEGER_ORDER:
        if ins[0] == "i1" and order not in ("eq", "ne"):
            return f"(-({a[0]}) {INTEGER_ORDER[order]} -({a[1]}))"
        return f"({a[0]} {INTEGER_ORDER[order]} {a[1]})"
    if order in UNSIGNED_ORDER:
        return f"({_as_unsigned(ins[0], a[0])} {UNSIGNED_ORDER[order]} {_as_unsigned(ins[0], a[1])})"
    raise ForeignError(f"the comparison {order[:20]!r} of integers is not supported")


def _cmpf(words: Sequence[str], ins: Sequence[str], out: str, a: Exprs) -> str:
    order = words[0] if words else ""
    if order not in FLOAT_ORDER:
        raise ForeignError(f"the comparison {order[:20]!r} of floating point is not supported")
    return FLOAT_ORDER[order].format(f"({a[0]})", f"({a[1]})")


def _f(sign: str) -> Write:
    return lambda words, ins, out, a: rounded(out, f"({a[0]} {sign} {a[1]})")


def _call(name: str, single: str = "") -> Write:
    """Call a function of OpenCL; for floats, the function `single` of the prelude if given."""

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
        raise ForeignError(f"{source} and {out} have different sizes")
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
_ZERO = "a division by 0 gives 0"

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
    "arith.divf": _heavy(_f("/"), "correctly rounded"),
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
    "arith.fptosi": _heavy(_to_integer("s"), "saturates; NaN gives 0"),
    "arith.fptoui": _heavy(_to_integer("u"), "saturates; NaN gives 0"),
    "arith.extf": _heavy(_plain_cast),
    "arith.truncf": _heavy(_plain_cast),
    "arith.bitcast": _cheap(_bitcast),
    "tt.bitcast": _cheap(_bitcast, "a pointer keeps the size of its elements"),
    "tt.fp_to_fp": _heavy(_plain_cast, "between all floating-point types, to nearest; 8-bit results stay finite"),
    "tt.mulhiui": _cheap(_mulhi, "i32 and i64"),
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
    "math.tanh": _heavy(_call("tanh", "w_tanh")),
    "math.sqrt": _heavy(_call("sqrt")),
    "math.rsqrt": _heavy(_chosen("(1 / sqrt({0}))")),
    "math.erf": _heavy(_call("erf")),
    "math.floor": _heavy(_call("floor")),
    "math.ceil": _heavy(_call("ceil")),
    "math.absf": _heavy(_call("fabs")),
    "math.absi": _cheap(_absi),
    "math.fma": _heavy(_call("fma")),
}

#: Functions of `triton.language.extra.libdevice` in OpenCL C, by the neutral names that the client writes.
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
            "tgamma",
            "trunc",
        )
    },
    **{
        n: f"{n}({{0}}, {{1}})"
        for n in ("atan2", "copysign", "fdim", "fmax", "fmin", "fmod", "hypot", "nextafter", "pow", "remainder")
    },
    "tanh": "w_tanh({0})",
    "fma": "fma({0}, {1}, {2})",
    **{f"{n}_rn": f"({{0}} {sign} {{1}})" for n, sign in (("add", "+"), ("sub", "-"), ("mul", "*"), ("div", "/"))},
    "isnan": "({0} != {0})",
    "isinf": "(fabs({0}) == INFINITY)",
    "isfinite": "(fabs({0}) < INFINITY)",
    "signbit": "(signbit({0}) != 0)",
}

#: All other supported operations (structure, memory, control flow), with a note for the reference page.
STRUCTURAL: Final[dict[str, str]] = {
    "arith.constant": "numbers, splats, and one-dimensional lists",
    "ub.poison": "gives 0",
    "tt.get_program_id": "",
    "tt.get_num_programs": "",
    "tt.make_range": "",
    "tt.splat": "",
    "tt.unsplat": "",
    "tt.broadcast": "",
    "tt.expand_dims": "",
    "tt.reshape": "always keeps the order of elements",
    "tt.trans": "",
    "tt.join": "",
    "tt.split": "",
    "tt.cat": "along the first dimension",
    "tt.gather": "an index out of range makes the launch fail",
    "tt.addptr": "a pointer is a buffer of the launch plus an offset",
    "tt.load": "each element is checked; out of bounds, it reads 0 and the launch fails",
    "tt.store": "each element is checked; out of bounds, it writes nothing and the launch fails",
    "tt.atomic_rmw": "i32, i64, f32, f64: add, and, or, xor, min, max, exchange; f16, bf16: add",
    "tt.atomic_cas": "i32, i64",
    "tt.atomic_load": "masked elements are 0",
    "tt.atomic_store": "",
    "tt.reduce": "any associative and commutative combination",
    "tt.scan": "",
    "tt.dot": "computes in f32 (for each input precision), f64 or i32; batches are supported",
    "tt.histogram": "values out of range are not counted",
    "tt.call": "functions of the same text, also if they return early; they are inlined",
    "tt.extern_elementwise": "functions of Triton's libdevice: " + ", ".join(sorted(EXTERNS)),
    "tt.assert": "a false condition makes the launch fail",
    "tt.print": "prints nothing",
    "tt.return": "",
    "scf.for": "signed or unsigned bounds; ends if the launch exceeds its time limit",
    "scf.while": "ends if the launch exceeds its time limit",
    "scf.if": "",
    "scf.yield": "",
    "scf.condition": "",
    "cf.br": "between blocks of the function; ends if the launch exceeds its time limit",
    "cf.cond_br": "between blocks of the function; ends if the launch exceeds its time limit",
    "gpu.barrier": "no effect: a program is one thread on a CPU",
    "ttg.barrier": "no effect: a program is one thread on a CPU",
}

#: Operations that are rejected, with the reason.
REFUSED: Final[dict[str, str]] = {
    "tt.int_to_ptr": "a pointer made of a number is not part of a buffer of the launch",
    "tt.ptr_to_int": "kernels must not see the addresses of buffers",
    "tt.elementwise_inline_asm": "assembly of a vendor cannot be checked",
    "tt.make_tensor_ptr": "Triton has removed block pointers; use tensor descriptors",
    "tt.advance": "Triton has removed block pointers; use tensor descriptors",
    "tt.make_tensor_descriptor": "the client writes tensor descriptors as pointers",
    "tt.descriptor_load": "the client writes tensor descriptors as pointers",
    "tt.descriptor_store": "the client writes tensor descriptors as pointers",
    "tt.descriptor_reduce": "the client writes tensor descriptors as pointers",
    "tt.descriptor_gather": "the client writes tensor descriptors as pointers",
    "tt.descriptor_scatter": "the client writes tensor descriptors as pointers",
    "tt.dot_scaled": "microscaled formats",
    "tt.atomic_poll": "on a CPU, a program that waits for another one may wait forever",
    "tt.map_elementwise": "use the single operations",
}
