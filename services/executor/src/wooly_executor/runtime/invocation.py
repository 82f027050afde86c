"""Builds functions of a frame that call the library, with as little work per call as their arguments allow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from wooly_wis.flags import followed
from wooly_wis.program import Form, OperandRef

from wooly_executor.bounds.elementwise import ELEMENTWISE, PASSES, base_of
from wooly_executor.bounds.estimate import work_of_call
from wooly_executor.bounds.indexing import INDEXING
from wooly_executor.errors import OperationError
from wooly_executor.runtime.calls import (
    Gradients,
    LibraryCall,
    constant_tree,
    differentiate,
    filler,
    function_of,
    refers,
    seed_of,
    typed_params,
)
from wooly_executor.runtime.device import TorchDevice
from wooly_executor.runtime.fast_bindings import FAST
from wooly_executor.runtime.frame import Frame
from wooly_executor.runtime.one_thread import VECTOR_MATH, VECTOR_MATH_GRAIN
from wooly_executor.runtime.products import SMALL_PRODUCT
from wooly_executor.runtime.torch_private import (
    SWITCHES,
    deterministic_switches,
    limit_products,
    set_deterministic,
)

#: The setting of a small product, or of a function of vectors, on a CPU: MKL computes it on the calling core.
ONE_CORE = "one_core"
#: Operators that use MKL, among those that pass over their operands.
_BLAS = frozenset(("dot", "vdot"))


def differentiated(
    call: Callable[[Frame], Any], operands: list[int], registers: list[int], gradients: Gradients
) -> Callable[[Frame], Any]:
    """Return a function that computes what `gradients` asks for. `call` reads `registers`."""

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


def with_size_check(
    call: Callable[[Frame], Any], operands: list[tuple[int, tuple[int, ...]]]
) -> Callable[[Frame], Any]:
    """Return `call` with a check that `out=` keeps its size. A larger one would take memory that is not accounted for."""

    def run(f: Frame) -> Any:
        result = call(f)
        for register, sizes in operands:
            t = f.registers[register]
            check_size(t, sizes)
            if t.is_conj():  # LAPACK may leave a result conjugated, but a buffer must hold plain numbers
                f.registers[register] = t.conj().copy_(t.resolve_conj())
        return result

    return run


def check_size(t: Tensor, sizes: tuple[int, ...]) -> None:
    """Check that an operator has not resized an argument.

    Raises:
        OperationError: the argument has another shape.
    """
    if t.shape != sizes:
        raise OperationError(f"the result has shape {list(t.shape)}, but out= has {list(sizes)}")


def seeded(call: Callable[[Frame], Any], pair: tuple[int, int], device: TorchDevice) -> Callable[[Frame], Any]:
    """Return `call` with the generator seeded from a (seed, offset) pair of params."""

    def run(f: Frame) -> Any:
        device.seed(seed_of(f.params, pair))  # the generator belongs to this process
        return call(f)

    return run


def deterministic(call: Callable[[Frame], Any]) -> Callable[[Frame], Any]:
    """Return `call` with the library's deterministic algorithms. The client has raised the alerts already, so nothing is refused
    here.
    """

    def run(f: Frame) -> Any:
        before = deterministic_switches()
        set_deterministic(on=True, warn_only=True, fill=False)
        try:
            return call(f)
        finally:
            set_deterministic(*before)

    return run


def flagged(
    call: Callable[[Frame], Any], form: Form, library: LibraryCall, device: TorchDevice
) -> Callable[[Frame], Any]:
    """Return `call` with the settings of the device's libraries that the form asks for (see `settings_of`)."""
    flags = settings_of(form, library, device)
    return with_flags(call, flags) if flags else call


def settings_of(form: Form, library: LibraryCall, device: TorchDevice) -> tuple[str, ...] | None:
    """Return the settings of the device's libraries for a call; None: the call depends on no setting.

    On a GPU, these are the flags of the form. On a CPU, MKL's products depend on the number of cores: a few of their bits do, and
    the time that a small product takes. The choice depends on the form alone, so each run of it has the same bits. MKL's
    functions of vectors run on one core. If there are many numbers, each of the library's threads runs one on its part.
    """
    if not device.host:
        flags = form.attr("flags")
        if isinstance(flags, tuple):
            return tuple([str(flag) for flag in flags])
        return () if followed(str(library.op)) else None
    if library.op.namespace != "aten":
        return ()
    name = base_of(library.op.overloadpacket.__name__)[0]
    if name in VECTOR_MATH:
        views = [o.view for o in form.operands]
        small = all(v is not None and v.numel <= VECTOR_MATH_GRAIN for v in views)
        return None if small or limit_products is None or torch.get_num_threads() == 1 else (ONE_CORE,)
    if name not in _BLAS and (name in ELEMENTWISE or name in INDEXING or name in PASSES):
        return None
    if limit_products is None or torch.get_num_threads() == 1:
        return ()
    work = work_of_call(library, form)
    return (ONE_CORE,) if max(work.flops, work.elements) <= SMALL_PRODUCT else ()


def _on_one_core(call: Callable[[Frame], Any]) -> Callable[[Frame], Any]:
    """Return `call` with MKL's work on the calling core."""
    limit = limit_products
    assert limit is not None

    def run(f: Frame) -> Any:
        before = limit(1)
        try:
            return call(f)
        finally:
            limit(before)

    return run


def with_flags(call: Callable[[Frame], Any], flags: Iterable[str]) -> Callable[[Frame], Any]:
    """Return `call` with settings of the device's libraries."""
    if flags == (ONE_CORE,):
        return _on_one_core(call)
    switches = [SWITCHES[flag] for flag in flags]

    def run(f: Frame) -> Any:
        before: list[tuple[Any, ...]] = []
        try:
            for switch in switches:
                before.append(switch.read())
                switch.write(*switch.value)
            return call(f)
        finally:
            for switch, value in zip(reversed(switches[: len(before)]), reversed(before), strict=True):
                switch.write(*value)

    return run


class Calling(NamedTuple):
    """How to call an operator, apart from the registers of its operands.

    Attributes:
        function: what to call.
        args: the positional arguments.
        kwargs: the keyword arguments.
        typed: params that become 0-dimensional tensors.
        plain: number of leading arguments that are operands, if all other arguments are constants; otherwise 0.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    typed: dict[int, torch.dtype]
    plain: int


def calling_of(form: Form, library: LibraryCall) -> Calling:
    """Return how to call an operator."""
    op, args, kwargs = library.op, library.args, library.kwargs
    function = library.instead or FAST.get(str(op)) or function_of(op)
    typed, n = typed_params(form, library), 0
    if not any(refers(v) for _, v in kwargs) and not typed:
        while n < len(args) and isinstance(args[n], OperandRef):
            n += 1
        if any(refers(a) for a in args[n:]):
            n = 0
    if n:
        args = (*args[:n], *map(constant_tree, args[n:]))
        kwargs = tuple([(k, constant_tree(v)) for k, v in kwargs])
    return Calling(function, args, kwargs, typed, n)


def calling(how: Calling, registers: dict[int, int], first_param: int, device: TorchDevice) -> Callable[[Frame], Any]:
    """Return a function of the frame that calls the operator, with as little work per call as the arguments allow."""
    fn, args, kwargs, typed, n = how
    if n:
        return _plain_call(fn, [registers[a.index] for a in args[:n]], args[n:], dict(kwargs))
    fills = [filler(a, registers, first_param, typed, device.named) for a in args]
    named = [(k, filler(v, registers, first_param, typed, device.named)) for k, v in kwargs]
    if len(fills) == 2 and not named:
        first, second = fills

        def two(f: Frame) -> Any:
            r, p = f.registers, f.params
            return fn(first(r, p), second(r, p))

        return two

    def general(f: Frame) -> Any:
        r, p = f.registers, f.params
        return fn(*[g(r, p) for g in fills], **{k: g(r, p) for k, g in named})

    return general


def _plain_call(
    fn: Callable[..., Any], operands: list[int], tail: tuple[Any, ...], named: dict[str, Any]
) -> Callable[[Frame], Any]:
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
