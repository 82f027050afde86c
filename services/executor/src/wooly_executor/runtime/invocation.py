"""Calls of the library as functions of a frame, as short as their arguments allow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from wooly_wis.program import Form, OperandRef

from wooly_executor.errors import OperationError
from wooly_executor.runtime.calls import (
    Gradients,
    LibraryCall,
    constant_tree,
    differentiate,
    filler,
    function_of,
    mix,
    refers,
    typed_params,
)
from wooly_executor.runtime.device import TorchDevice
from wooly_executor.runtime.fast_bindings import FAST
from wooly_executor.runtime.frame import Frame


def differentiated(
    call: Callable[[Frame], Any], operands: list[int], registers: list[int], gradients: Gradients
) -> Callable[[Frame], Any]:
    """What `gradients` asks of `call`, which reads `registers`."""

    def run(f: Frame) -> Any:
        def on(own: list[Tensor]) -> Any:
            for register, t in zip(registers, own, strict=True):
                f.registers[register] = t
            return call(f)

        try:
            return differentiate(on, [f.registers[k] for k in operands], gradients)
        finally:
            for register in registers:
                f.registers[register] = None

    return run


def keeping_sizes(call: Callable[[Frame], Any], operands: list[tuple[int, tuple[int, ...]]]) -> Callable[[Frame], Any]:
    """`call`, failing where `out=` was given a new size: that would be memory which nobody counts."""

    def run(f: Frame) -> Any:
        result = call(f)
        for register, sizes in operands:
            t = f.registers[register]
            check_size(t, sizes)
            if t.is_conj():  # LAPACK's results may lie there conjugated; a buffer holds plain numbers
                f.registers[register] = t.conj().copy_(t.resolve_conj())
        return result

    return run


def check_size(t: Tensor, sizes: tuple[int, ...]) -> None:
    """Make sure that an operator has left an argument's size as it was.

    Raises:
        OperationError: it has not.
    """
    if t.shape != sizes:
        raise OperationError(f"the result has shape {list(t.shape)}, out= has {list(sizes)}")


def seeded(call: Callable[[Frame], Any], pair: list[int], device: TorchDevice) -> Callable[[Frame], Any]:
    """`call` that draws from the numbers that a (seed, offset) pair of params stands for."""
    seed, offset = pair

    def run(f: Frame) -> Any:
        # torch takes seeds of 64 bits signed or unsigned; the generator is this process's own, set before every draw.
        device.seed(mix(f.params[seed], f.params[offset]) >> 1)
        return call(f)

    return run


def calling(
    form: Form, library: LibraryCall, registers: dict[int, int], first_param: int, device: TorchDevice
) -> Callable[[Frame], Any]:
    """A function of the frame that calls the operator, as short as its arguments allow."""
    op, args, kwargs = library.op, library.args, library.kwargs
    fn = library.instead or FAST.get(str(op)) or function_of(op)
    typed = typed_params(form, library)
    if not any(refers(v) for _, v in kwargs) and not typed:
        n = 0
        while n < len(args) and isinstance(args[n], OperandRef):
            n += 1
        if n and not any(refers(a) for a in args[n:]):
            return _plain_call(fn, [registers[a.index] for a in args[:n]], args[n:], kwargs)
    fills = [filler(a, registers, first_param, typed, device.named) for a in args]
    named = [(k, filler(v, registers, first_param, typed, device.named)) for k, v in kwargs]
    if len(fills) == 2 and not named:
        first, second = fills

        def two(f: Frame) -> Any:
            r, p = f.registers, f.params
            return fn(first(r, p), second(r, p))  # type: ignore[arg-type]

        return two

    def general(f: Frame) -> Any:
        r, p = f.registers, f.params
        return fn(*[g(r, p) for g in fills], **{k: g(r, p) for k, g in named})  # type: ignore[arg-type]

    return general


def _plain_call(
    fn: Callable[..., Any], operands: list[int], rest: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]
) -> Callable[[Frame], Any]:
    tail = [constant_tree(a) for a in rest]
    named = {k: constant_tree(v) for k, v in kwargs}
    if named:
        return lambda f: fn(*[f.registers[i] for i in operands], *tail, **named)
    if len(operands) == 1:
        (a,) = operands
        if not tail:
            return lambda f: fn(f.registers[a])
        return lambda f: fn(f.registers[a], *tail)
    if len(operands) == 2:
        a, b = operands
        if not tail:

            def two(f: Frame) -> Any:
                r = f.registers
                return fn(r[a], r[b])

            return two

        def two_and_tail(f: Frame) -> Any:
            r = f.registers
            return fn(r[a], r[b], *tail)

        return two_and_tail
    return lambda f: fn(*[f.registers[i] for i in operands], *tail)
