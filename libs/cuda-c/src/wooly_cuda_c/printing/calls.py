"""Prints calls of built-in functions, and rejects unsupported ones with a clear message."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wooly_cuda_c.printing import builtins
from wooly_cuda_c.printing.accesses import ASSERTION, PASS, TRAP
from wooly_cuda_c.printing.own_calls import call_own
from wooly_cuda_c.printing.scope import literal
from wooly_cuda_c.printing.types import (
    B1,
    F32,
    F64,
    I32,
    U32,
    VOID,
    Scalar,
    Vector,
    common,
    promoted,
)
from wooly_cuda_c.printing.values import Value
from wooly_cuda_c.syntax.errors import CudaSourceError
from wooly_cuda_c.syntax.tree import Call
from wooly_cuda_c.syntax.words import REFUSED, VECTOR_TYPES

if TYPE_CHECKING:
    from wooly_cuda_c.printing.context import FunctionContext


def call(printer: FunctionContext, node: Call) -> Value:
    """Return the value of a call.

    Raises:
        CudaSourceError: the function does not exist, or does not take these arguments.
    """
    name = node.name.name
    own = printer.whole.unit.functions.get(name)
    if own is not None:
        return call_own(printer, node, own)
    name = builtins.ALIASES.get(name, name)
    for group, found in _GROUPS:
        if name in group:
            return found(printer, node, name)
    plain = name[:-1] if name.endswith("f") and name[:-1] in builtins.MATH else name
    if plain in builtins.MATH:
        return _math(printer, node, plain, single=plain != name)
    if name in ("abs", "labs", "llabs", "fabsf"):
        return _abs(printer, node)
    if name.startswith("make_") and name[5:] in VECTOR_TYPES:
        scalar, n = VECTOR_TYPES[name[5:]]
        kind = Vector(Scalar(scalar), n)
        values = [printer.converted(v, kind.of, node.line) for v in _arguments(printer, node, n)]
        return Value(
            printer.built(kind, [v.text for v in values]), kind, None, "", "", any(v.varying for v in values)
        )  # fmt: skip
    if name in builtins.UNSUPPORTED:
        raise CudaSourceError(f"{name} is not supported: {builtins.UNSUPPORTED[name]}", node.line)
    if name in REFUSED:
        raise CudaSourceError(f"{name}: {REFUSED[name]}", node.line)
    raise CudaSourceError(f"there is no function {name}", node.line)


def _arguments(printer: FunctionContext, node: Call, *counts: int) -> list[Value]:
    if len(node.args) not in counts:
        wanted = " or ".join(str(n) for n in counts)
        raise CudaSourceError(f"{node.name.name} takes {wanted} arguments, not {len(node.args)}", node.line)
    if node.name.template is not None:
        raise CudaSourceError(f"{node.name.name} is not a template", node.line)
    return [printer.value(a) for a in node.args]


def _scalars(printer: FunctionContext, node: Call, *counts: int) -> list[tuple[Value, Scalar]]:
    out = []
    for value in _arguments(printer, node, *counts):
        if not isinstance(value.type, Scalar):
            raise CudaSourceError(f"{node.name.name} does not take {value.type}", node.line)
        out.append((value, value.type))
    return out


def _math(printer: FunctionContext, node: Call, name: str, single: bool) -> Value:
    given = _scalars(printer, node, builtins.MATH[name])
    kind = F32 if single else F64
    if not single and all(k == F32 or k.half for _, k in given):
        kind = F32
    values = [printer.converted(v, kind, node.line) for v, _ in given]
    varying = any(v.varying for v in values)
    called = f"w_{name}_{kind.name}" if name in ("fmin", "fmax") else printer.dialect.call(name, kind == F32)
    return Value(f"{called}({', '.join(v.text for v in values)})", kind, None, "", "", varying)


def _abs(printer: FunctionContext, node: Call) -> Value:
    ((value, kind),) = _scalars(printer, node, 1)
    if kind.real or node.name.name == "fabsf":
        return _math(printer, node, "fabs", single=kind == F32 or node.name.name == "fabsf")
    kind = promoted(kind)
    x = printer.converted(value, kind, node.line)
    minus = printer.operate("-", Value("0", I32, 0), x, node.line)
    return printer.select(f"({x.text} < 0)", minus, x, kind)


def _extreme(printer: FunctionContext, node: Call, name: str) -> Value:
    (a, ka), (b, kb) = _scalars(printer, node, 2)
    kind = common(ka, kb)
    what = builtins.EXTREMES[name]
    x, y = printer.converted(a, kind, node.line), printer.converted(b, kind, node.line)
    varying = a.varying or b.varying
    if kind.half:
        x, y = [printer.converted(v, F32, node.line) for v in (x, y)]
        return printer.converted(
            Value(f"w_f{what}_f32({x.text}, {y.text})", F32, None, "", "", varying), kind, node.line
        )
    if kind.real:
        return Value(f"w_f{what}_{kind.name}({x.text}, {y.text})", kind, None, "", "", varying)
    helper = printer.helpers.extreme(kind, what)
    const = None if x.const is None or y.const is None else (min if what == "min" else max)(x.const, y.const)
    if const is not None:
        return Value(literal(kind, const), kind, const)
    return Value(f"{helper}({x.text}, {y.text})", kind, None, "", "", varying)


def _plain(printer: FunctionContext, node: Call, name: str) -> Value:
    kinds, result = builtins.PLAIN[name]
    given = _scalars(printer, node, len(kinds))
    values = [printer.converted(v, Scalar(k), node.line) for (v, _), k in zip(given, kinds, strict=True)]
    x = ", ".join(v.text for v in values)
    kind = Scalar(result)
    rounding = {"rn": "rint", "rz": "trunc", "rd": "floor", "ru": "ceil"}
    if name.startswith("__float2int"):
        text = f"w_f32_to_i32({printer.dialect.call(rounding[name[-2:]], True)}({x}))"
    elif name == "lrintf":
        text = f"w_f32_to_i64({printer.dialect.call('rint', True)}({x}))"
    elif name == "__frcp_rn":
        text = f"(1.0f / {x})"
    elif "_as_" in name:
        bits = "u64" if kind.size == 8 else "u32"
        source = Scalar(kinds[0])
        text = (
            f"w_as_{bits}_{source.name}({x})" if source.real else f"w_as_{kind.name}_{bits}(({Scalar(bits).text})({x}))"
        )
        if not kind.real:
            text = f"(({kind.text}){text})"
    elif name.endswith("_rn"):
        text = f"(({kind.text})({x}))"
    else:
        text = f"w_{name.strip('_')}({x})"
    return Value(text, kind, None, "", "", any(v.varying for v in values))


def _operator(printer: FunctionContext, node: Call, name: str) -> Value:
    op, scalar = builtins.OPERATORS[name]
    given = _scalars(printer, node, 2)
    a, b = (printer.converted(v, Scalar(scalar), node.line) for v, _ in given)
    return printer.operate(op, a, b, node.line)


def _asked(printer: FunctionContext, node: Call, name: str) -> Value:
    ((value, kind),) = _scalars(printer, node, 1)
    if not kind.real or kind.half:
        kind = F32 if kind.half else F64
        value = printer.converted(value, kind, node.line)
    bits, one = ("u32", "u") if kind == F32 else ("u64", "ul")
    shift, exponent = (23, 0xFF) if kind == F32 else (52, 0x7FF)
    x = f"w_as_{bits}_{kind.name}({value.text})"
    low = (1 << (shift + kind.size * 8 - shift - 1)) - 1
    infinite = exponent << shift
    text = {
        "isnan": f"(({x} & {low}{one}) > {infinite}{one})",
        "isinf": f"(({x} & {low}{one}) == {infinite}{one})",
        "isfinite": f"(({x} & {low}{one}) < {infinite}{one})",
        "signbit": f"({x} > {low}{one})",
    }[name]
    return Value(text, B1, None, "", "", value.varying)


def _load(printer: FunctionContext, node: Call, name: str) -> Value:
    (pointer,) = _arguments(printer, node, 1)
    return printer.loaded(printer.at(pointer, node.line), node.line)


# -- memory and other threads ----------------------------------------------------------------------------------------------


def _atomic(printer: FunctionContext, node: Call, name: str) -> Value:
    what, kinds = builtins.ATOMICS[name]
    pointer, *given = _arguments(printer, node, 3 if what == "compare" else 2)
    to = printer.at(pointer, node.line)
    if not isinstance(to.type, Scalar) or to.type.name not in kinds:
        raise CudaSourceError(
            f"{name} of {to.type} is not supported: it takes {', '.join(str(Scalar(k)) for k in kinds)}", node.line
        )
    if to.readonly or to.space == "c":
        raise CudaSourceError(f"{to.root or 'this'} is const: {name} cannot change it", node.line)
    if to.space == "p":
        raise CudaSourceError(
            f"{name} needs shared or global memory, but this variable belongs to one thread", node.line
        )
    values = [printer.converted(v, to.type, node.line) for v in given]
    if what == "sub":
        what = "add"
        values = [printer.converted(printer.operate("-", Value("0", I32, 0), values[0], node.line), to.type, node.line)]
    helper = printer.helpers.atomic(to.space, to.type, what)
    place = printer.whole.place(node.line, to.root)
    printer.whole.record_write(to.root)
    text = f"{helper}({PASS}, {to.text}, {', '.join(v.text for v in values)}, {place})"
    return Value(text, to.type, None, "", "", True)


def _barrier(printer: FunctionContext, node: Call, name: str) -> Value:
    counts = name not in ("__syncthreads", "__syncwarp")
    given = (
        _arguments(printer, node, 1)
        if counts
        else _arguments(printer, node, *((0, 1) if name == "__syncwarp" else (0,)))
    )
    if name == "__syncwarp" and printer.dialect.subgroups:
        return Value(printer.dialect.fence, VOID)
    printer.require_all_threads(name, node.line, name == "__syncwarp")
    if not counts:
        if printer.grouped:
            printer.boundary()
        return Value("" if printer.dialect.flat else printer.dialect.barrier, VOID)
    truth = printer.as_truth(given[0], node.line)
    if not printer.dialect.flat:
        how = {"__syncthreads_count": "w_count", "__syncthreads_and": "w_every", "__syncthreads_or": "w_some"}[name]
        return Value(f"{how}({truth.text})", I32)
    if not printer.grouped:
        return Value("0", I32)  # a placeholder: the function is printed again
    votes = printer.kept("w_b1", truth.text, 1)
    printer.boundary()
    text = printer.block_value("w_i32", f"{printer.helpers.count()}({PASS}, {votes})")
    if name.endswith("_and"):
        text = f"({text} == {printer.whole.threads})"
    elif name.endswith("_or"):
        text = f"({text} != 0)"
    return Value(text, I32)


def _fence(printer: FunctionContext, node: Call, name: str) -> Value:
    _arguments(printer, node, 0)
    return Value(printer.dialect.fence, VOID)


def _half(printer: FunctionContext, node: Call, name: str) -> Value:
    """Print a function of 16-bit floats: it computes a float and rounds once."""
    line = node.line
    if name in builtins.HALVES:
        kinds, result = builtins.HALVES[name]
        ((value, _),) = _scalars(printer, node, len(kinds))
        return printer.converted(printer.converted(value, Scalar(kinds[0]), line), Scalar(result), line)
    if name in builtins.HALF_BITS:
        source, to = [Scalar(k) for k in builtins.HALF_BITS[name]]
        ((value, _),) = _scalars(printer, node, 1)
        value = printer.converted(value, source, line)
        return Value(f"(({to.text})({value.text}))", to, None, "", "", value.varying)
    count = 3 if name == "__hfma" else 2 if name in builtins.HALF_OPERATORS or name in ("__hmin", "__hmax") else 1
    given = _scalars(printer, node, count)
    kind = next((k for _, k in given if k.half), None)
    if kind is None:
        raise CudaSourceError(f"{name} of {given[0][1]} is not supported: it takes __half and __nv_bfloat16", line)
    values = [printer.converted(v, kind, line) for v, _ in given]
    varying = any(v.varying for v in values)
    if name in builtins.HALF_OPERATORS:
        left, right = values
        return printer.operate(builtins.HALF_OPERATORS[name], left, right, line)
    if name == "__hfma":  # a double holds the product exactly, and the sum too, except for the smallest numbers
        a, b, c = [printer.converted(v, F64, line).text for v in values]
        return printer.converted(Value(f"({a} * {b} + {c})", F64, None, "", "", varying), kind, line)
    singles = [printer.converted(v, F32, line).text for v in values]
    if name == "__hneg":
        return printer.converted(Value(f"(-{singles[0]})", F32, None, "", "", varying), kind, line)
    if name == "__hisnan":
        return Value(f"({singles[0]} != {singles[0]})", B1, None, "", "", varying)
    called = (
        f"w_f{name[3:]}_f32" if name in ("__hmin", "__hmax") else printer.dialect.call(builtins.HALF_MATH[name], True)
    )
    return printer.converted(Value(f"{called}({', '.join(singles)})", F32, None, "", "", varying), kind, line)


def _folded(printer: FunctionContext, node: Call, name: str) -> Value:
    """Print a combination of values of a warp's threads, or the mask of threads with an equal value."""
    given = _scalars(printer, node, 2)
    what = name.split("_")[3] if name.startswith("__reduce") else "match"
    kind = U32 if what in ("and", "or", "xor") else promoted(given[1][1])
    if what == "match" and kind.real:
        wide = F64 if kind.size == 8 else F32
        value = printer.converted(given[1][0], wide, node.line)
        kind = Scalar("u64" if kind.size == 8 else "u32")
        value = Value(f"w_as_{kind.name}_{wide.name}({value.text})", kind, None, "", "", value.varying)
    elif given[1][1].real or (kind.size != 4 and what != "match"):
        raise CudaSourceError(f"{name} of {given[1][1]} is not supported: it takes int and unsigned int", node.line)
    else:
        value = printer.converted(given[1][0], kind, node.line)
    if not printer.dialect.subgroups:
        printer.require_all_threads(f"{name} (on a device without subgroups)", node.line, True)
    mask = printer.converted(given[0][0], U32, node.line)
    result = U32 if what == "match" else kind
    if printer.dialect.subgroups:
        helper = printer.helpers.folded(kind, what)
        return Value(f"{helper}({PASS}, {mask.text}, {value.text})", result, None, "", "", True)
    if not printer.grouped:
        return Value("0", result, None, "", "", True)  # a placeholder: the function is printed again
    masks, values = printer.kept("w_u32", mask.text, 4), printer.kept(kind.text, value.text, kind.size)
    printer.boundary()
    return Value(f"{printer.helpers.folded(kind, what)}({PASS}, {masks}[w_t], {values})", result, None, "", "", True)


def _warp(printer: FunctionContext, node: Call, name: str) -> Value:
    if name.startswith(("__reduce", "__match")):
        return _folded(printer, node, name)
    shuffle = name.startswith("__shfl")
    given = _scalars(printer, node, *((3, 4) if shuffle else (2,)))
    if not printer.dialect.subgroups:
        printer.require_all_threads(f"{name} (on a device without subgroups)", node.line, True)
    mask = printer.converted(given[0][0], U32, node.line)
    if not shuffle:
        truth = printer.as_truth(given[1][0], node.line)
        # All values are true if no value is false.
        asked = f"(!{truth.text})" if name == "__all_sync" else truth.text
        if printer.dialect.subgroups:
            text = f"{printer.helpers.ballot()}({PASS}, {mask.text}, {asked})"
        elif printer.grouped:
            masks, votes = printer.kept("w_u32", mask.text, 4), printer.votes(asked)
            printer.boundary()
            text = f"{printer.helpers.ballot()}({PASS}, {masks}[w_t], {votes})"
        else:
            text = "0u"  # a placeholder: the function is printed again
        if name == "__ballot_sync":
            return Value(text, U32, None, "", "", True)
        return Value(f"({text} {'==' if name == '__all_sync' else '!='} 0u ? 1 : 0)", I32, None, "", "", True)
    value, kind = given[1]
    if kind.half:  # a float holds it exactly
        single = Value(printer.converted(value, F32, node.line).text, F32, None, "", "", value.varying)
        return printer.converted(_shuffled(printer, node, name, given, mask, single, F32), kind, node.line)
    return _shuffled(printer, node, name, given, mask, value, kind)


def _shuffled(
    printer: FunctionContext,
    node: Call,
    name: str,
    given: list[tuple[Value, Scalar]],
    mask: Value,
    value: Value,
    kind: Scalar,
) -> Value:
    if kind.size < 4:
        kind = promoted(kind)
        value = printer.converted(value, kind, node.line)
    by = printer.converted(given[2][0], U32, node.line)
    width = printer.converted(given[3][0], U32, node.line).text if len(given) == 4 else "32u"
    how = name.removeprefix("__shfl").removesuffix("_sync")
    if printer.dialect.subgroups:
        helper = printer.helpers.shuffle(kind, how)
        return Value(f"{helper}({PASS}, {mask.text}, {value.text}, {by.text}, {width})", kind, None, "", "", True)
    if not printer.grouped:
        return Value(value.text, kind, None, "", "", True)  # a placeholder: the function is printed again
    values = printer.kept(kind.text, value.text, kind.size)
    threads = printer.whole.threads
    if width == "32u" and not by.varying and threads % 32 == 0:
        printer.boundary()
        distance, room = printer.block_value("w_u32", by.text), printer.room(kind)
        moved = printer.helpers.moved(kind, how)
        first, past = printer.active.split(", ")[1:]
        printer.line(
            f"for (w_u32 k = {first} & ~31u; k < {past}; k += 32u) {moved}({room} + k, {values} + k, {distance});"
        )
        return Value(f"{room}[w_t]", kind, None, "", "", True)
    source = printer.kept("w_u32", f"(w_t & ~31u) | {printer.helpers.lane(how)}(w_t & 31u, {by.text}, {width})", 4)
    printer.boundary()
    # If the source thread does not exist, the thread gets its own value.
    text = f"{values}[{source}[w_t] < {printer.whole.threads}u ? {source}[w_t] : w_t]"
    return Value(text, kind, None, "", "", True)


def _assert(printer: FunctionContext, node: Call, name: str) -> Value:
    (value,) = _arguments(printer, node, 1)
    truth = printer.as_truth(value, node.line)
    place = printer.whole.place(node.line, "an assertion")
    return Value(f"(void)({truth.text} ? 0 : (w_fault(w_status, {ASSERTION}, {place}), 0))", VOID)


def _trap(printer: FunctionContext, node: Call, name: str) -> Value:
    _arguments(printer, node, 0)
    place = printer.whole.place(node.line, "a trap")
    return Value(f"w_fault(w_status, {TRAP}, {place})", VOID)


_GROUPS = (
    (builtins.ATOMICS, _atomic),
    (builtins.BARRIERS, _barrier),
    (builtins.FENCES, _fence),
    (builtins.WARP, _warp),
    (builtins.EXTREMES, _extreme),
    (builtins.PLAIN, _plain),
    (builtins.OPERATORS, _operator),
    (
        (*builtins.HALVES, *builtins.HALF_BITS, *builtins.HALF_OPERATORS, *builtins.HALF_MATH, *builtins.HALF_MORE),
        _half,
    ),
    (builtins.TESTS, _asked),
    (builtins.LOADS, _load),
    (("assert",), _assert),
    (("__trap",), _trap),
)
