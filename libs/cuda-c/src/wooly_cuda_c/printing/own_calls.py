"""Prints calls of the source's own functions: overloads, template parameters, and arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from wooly_cuda_c.printing.accesses import PASS
from wooly_cuda_c.printing.arithmetic import POINTER, held_size
from wooly_cuda_c.printing.scope import Bound
from wooly_cuda_c.printing.types import (
    VOID,
    Array,
    Pointer,
    Scalar,
    Type,
    Void,
    wrapped,
)
from wooly_cuda_c.printing.values import Value
from wooly_cuda_c.syntax.errors import CudaSourceError
from wooly_cuda_c.syntax.tree import Call, Function, Named, Node, PointerTo, ReferenceTo, Written

if TYPE_CHECKING:
    from wooly_cuda_c.printing.context import FunctionContext
    from wooly_cuda_c.printing.translate import Instance, Translation


def call_own(printer: FunctionContext, node: Call, candidates: Sequence[Function]) -> Value:
    """Return the value of a call of the source's own function. The function is printed for these arguments if it is not yet.

    Raises:
        CudaSourceError: no candidate takes these arguments.
    """
    name, line = node.name.name, node.line
    function, values = _chosen(printer, node, candidates)
    bound = bind(printer.whole, function, node.name.template or [], [v.type for v in values], printer.bound, line)
    arguments, texts = _passed(printer, node, function, values, bound)
    instance, facts = printer.whole.instance(
        function, bound, arguments, printer.cause, printer.masked and bool(printer.cause), line
    )
    printer.weight += instance.weight
    printer.free += instance.free
    printer.private += instance.private
    result = instance.result
    text = f"{instance.name}({', '.join([PASS, *texts])})"
    if instance.barriers:
        printer.require_all_threads(f"{name}, which has a barrier,", line, not instance.blocks)
        if printer.dialect.flat:
            if not printer.grouped:
                return Value(
                    "0" if isinstance(result, Scalar) else "", result
                )  # a placeholder: the function is printed again
            text = _called_for_the_block(printer, instance, arguments, texts)
    return Value(text, result, None, "", "", facts.result_varying, facts.result_root)


def _chosen(printer: FunctionContext, node: Call, candidates: Sequence[Function]) -> tuple[Function, list[Value]]:
    """Return the function that a call selects, and its arguments, not loaded yet."""
    name, line = node.name.name, node.line
    fitting = [f for f in candidates if len(f.params) == len(node.args)]
    if not fitting:
        wanted = " or ".join(sorted({str(len(f.params)) for f in candidates}))
        raise CudaSourceError(f"{name} takes {wanted} arguments, not {len(node.args)}", line)
    values = [printer.expression(a) for a in node.args]
    if len(fitting) > 1:
        loaded = [printer.loaded(v, line).type if v.type is not VOID else v.type for v in values]
        exact = [f for f in fitting if not f.template and _exact(printer, f, loaded)]
        if len(exact) != 1:
            raise CudaSourceError(
                f"the call of {name} is ambiguous: no single overload has exactly these argument types", line
            )
        fitting = exact
    if fitting[0].kernel:
        raise CudaSourceError(f"{name} is a kernel: a kernel cannot be called, only launched", line)
    return fitting[0], values


def _passed(
    printer: FunctionContext, node: Call, function: Function, values: Sequence[Value], bound: Bound
) -> tuple[list[Value], list[str]]:
    """Return the arguments of a function: as its body sees them, and as text."""
    name, line = node.name.name, node.line
    arguments: list[Value] = []
    texts: list[str] = []
    for param, value in zip(function.params, values, strict=True):
        if isinstance(param.type, ReferenceTo):
            to = printer.memory(value, line)
            kind = printer.types.of(param.type.to, bound, param.line)
            if kind != to.type:
                raise CudaSourceError(f"{name} takes a reference to {kind} as {param.name}, not to {to.type}", line)
            const = isinstance(param.type.to, Named) and param.type.to.const
            if to.readonly and not const:
                raise CudaSourceError(f"{to.root or 'this'} is const, but {name} may change {param.name}", line)
            arguments.append(Value("", kind, None, "mem", to.space, to.varying, to.root, const))
            texts.append(to.text)
            continue
        value = printer.loaded(value, line)
        kind = printer.types.of(param.type, bound, param.line)
        value = printer.converted(value, kind, line)
        arguments.append(Value("", value.type, None, "", "", value.varying, value.root))
        texts.append(value.text)
    return arguments, texts


def _called_for_the_block(
    printer: FunctionContext, instance: Instance, arguments: Sequence[Value], texts: Sequence[str]
) -> str:
    """Print a call of a function with barriers, once for all threads of the block; return the text of its result."""
    result = instance.result
    passed = [
        printer.kept(f"w_{a.space}p", t, POINTER)
        if a.place == "mem"
        else printer.kept(a.type.text, t, held_size(a.type))
        for a, t in zip(arguments, texts, strict=True)
    ]
    if not isinstance(result, Void):
        passed.append(printer.room(result))
    if instance.masked:
        passed.append(printer.active)
    printer.boundary()
    printer.line(f"{instance.name}({', '.join([PASS, *passed])});")
    return "" if isinstance(result, Void) else f"{passed[len(texts)]}[w_t]"


def _exact(printer: FunctionContext, function: Function, given: Sequence[Type]) -> bool:
    for param, kind in zip(function.params, given, strict=True):
        written = param.type.to if isinstance(param.type, ReferenceTo) else param.type
        wanted = printer.types.of(written, Bound(), param.line)
        if isinstance(wanted, Pointer) and isinstance(kind, Pointer):
            if wanted.to != kind.to:
                return False
        elif wanted != kind:
            return False
    return True


def bind(
    whole: Translation,
    function: Function,
    given: Sequence[Written | Node],
    arguments: Sequence[Type],
    outer: Bound,
    line: int,
) -> Bound:
    """Bind a function's template parameters: from the given ones, from the arguments, or by default.

    Raises:
        CudaSourceError: a template parameter has no value.
    """
    bound = whole.constants()
    if len(given) > len(function.template):
        raise CudaSourceError(
            f"{function.name} takes {len(function.template)} template arguments, not {len(given)}", line
        )
    for k, param in enumerate(function.template):
        chosen = given[k] if k < len(given) else None
        origin = outer
        if chosen is None:
            for p, kind in zip(function.params, arguments, strict=False):
                found = _unified(p.type, kind, param.name)
                if found is not None and param.kind is None:
                    bound.types[param.name] = found
                    break
            if param.name in bound.types and param.kind is None:
                continue
            chosen, origin = param.default, bound
        if chosen is None:
            raise CudaSourceError(
                f"{function.name}: its template parameter {param.name} cannot be deduced: name it {function.name}<…>",
                line,
            )
        if param.kind is None:
            if isinstance(chosen, Node):
                raise CudaSourceError(
                    f"{function.name}: the template parameter {param.name} must be a type, not a number", line
                )
            bound.types[param.name] = whole.types.of(chosen, origin, line)
        else:
            if not isinstance(chosen, Node):
                raise CudaSourceError(
                    f"{function.name}: the template parameter {param.name} must be a number, not a type", line
                )
            kind = whole.types.of(param.kind, bound, line)
            if not isinstance(kind, Scalar) or kind.real:
                raise CudaSourceError(f"{function.name}: the template parameter {param.name} must be an integer", line)
            bound.numbers[param.name] = (kind, wrapped(whole.types.constant(chosen, origin), kind))
    return bound


def _unified(written: Written, kind: Type, name: str) -> Type | None:
    """Deduce the type of a template parameter from the type of an argument."""
    if isinstance(written, Named):
        return kind if written.name == name else None
    if isinstance(written, ReferenceTo):
        return _unified(written.to, kind, name)
    if isinstance(written, PointerTo):
        if isinstance(kind, Pointer):
            return _unified(written.to, kind.to, name)
        if isinstance(kind, Array):
            return _unified(written.to, kind.of, name)
    return None
