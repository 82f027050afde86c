"""What the preparation of a program needs to know of an instruction's form: the library's call, its checks and its results.

All of it follows from the form and the device. A new program rarely has new forms: each token of a generation is one, because a
few of its shapes have grown. So it is worked out once per form and kept with the form (see `ProgramStore`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from wooly_wis.program import Form, ParamRef, Role, View

from wooly_executor.runtime.buffers import required_view
from wooly_executor.runtime.calls import (
    Gradients,
    LibraryCall,
    asks_grad_mode,
    fresh_results,
    gradients_of,
    library_call,
    readings,
    returns_one_tensor,
)
from wooly_executor.runtime.device import TorchDevice
from wooly_executor.runtime.families import CallOutline, call_outline
from wooly_executor.runtime.fresh_memory import fills_results
from wooly_executor.runtime.gpu_ranges import word_of
from wooly_executor.runtime.guards import guarded, looks_at_values
from wooly_executor.runtime.invocation import Calling, calling_of, settings_of
from wooly_executor.runtime.one_thread import Threads, choice
from wooly_executor.runtime.products import SplitProduct
from wooly_executor.runtime.synchronising import draws, waits
from wooly_executor.runtime.torch_private import schema_of


@dataclass(frozen=True, slots=True)
class Lowered:
    """What is known of a form on a device.

    Attributes:
        library: the call, with its checks, adapted to the device.
        calling: how to call it with registers.
        gradients: the gradients that the form asks for.
        threads: how many threads of a CPU it should use.
        flags: the settings of the device's libraries that it asks for (see `settings_of`).
        covers: it is known to write every element of its results.
        repeatable: it may run twice, because it writes nothing but `out=`.
        word: status word of operands that are out of range, on a GPU.
        waiting: it makes the host of a GPU wait.
        operands: the operands that it reads, with their views.
        readings: of these, the ones that it reads through a view, with the function that makes the view.
        results: the operands that it makes.
        views: the views of its results; None: some are only known after a run.
        sized: operands with `out=` and their sizes, which must stay; None: it has no `out=`.
        rng: the params with the seed and the offset of its random numbers.
        draws: it draws random numbers in a way that a graph can contain.
        deterministic: it must use deterministic algorithms.
        fresh: which returned values are its results; None: all.
        single: it returns exactly one tensor.
        traced: it can be part of a segment: it is a call and nothing else.
        outline: the call without its sizes; None: it cannot be part of a segment, or its arguments cannot be compared.
    """

    library: LibraryCall
    calling: Calling
    gradients: Gradients | None
    threads: Threads
    flags: tuple[str, ...] | None
    covers: bool
    repeatable: bool
    word: Any
    waiting: bool
    operands: tuple[tuple[int, View], ...]
    readings: tuple[tuple[int, Callable[[Tensor], Tensor]], ...]
    results: tuple[int, ...]
    views: tuple[View, ...] | None
    sized: tuple[tuple[int, tuple[int, ...]], ...] | None
    rng: tuple[int, int] | None
    draws: bool
    deterministic: bool
    fresh: tuple[int, ...] | None
    single: bool
    traced: bool
    outline: CallOutline | None


def lowered(
    form: Form, device: TorchDevice, notes: dict[str, Any] | None, anew: tuple[int, LibraryCall] | None = None
) -> Lowered:
    """Return what is known of a form.

    Args:
        form: the form of an `extern` or a native instruction.
        device: the device where it will run.
        notes: what was found out about the form before; None: nothing, and nothing is kept.
        anew: the operand that a call makes as a new tensor, and this call (see `out_of_place`).

    Raises:
        OperationError: the operator is not available on this device, or an operand has no view.
    """
    if notes is None:
        return _lower(form, device, anew)
    name = "lowered" if anew is None else "lowered anew"
    found: Lowered | None = notes.get(name)
    if found is None:
        found = _lower(form, device, anew)
        # On a GPU, what takes a call's place may remember something of one instruction.
        if device.host or found.library.instead is None:
            notes[name] = found
    return found


def _lower(form: Form, device: TorchDevice, anew: tuple[int, LibraryCall] | None) -> Lowered:
    out, library = anew or (None, library_call(form))
    library = device.library(library, form)
    gradients = gradients_of(form)
    threads = choice(library, form) if device.host and gradients is None else Threads.ANY
    covers = fills_results(library.op, form, host=device.host) or getattr(library.instead, "writes_all", False)
    word = word_of(library)
    library = guarded(library, form)
    schema = schema_of(library.op)
    operands, results = [], []
    for k, operand in enumerate(form.operands):
        if operand.role is Role.OUT or k == out:
            results.append(k)
        else:
            operands.append((k, required_view(operand.view)))
    has_out = any(a.is_out for a in schema.arguments)
    written = [
        (k, required_view(o.view).sizes) for k, o in enumerate(form.operands) if o.role is Role.INOUT and k != out
    ]
    rng = form.attr("rng")
    dynamic = gradients is None and any(form.operands[k].view is None for k in results)
    plain = _is_plain(form, library, len(results), has_out=has_out)
    traced = gradients is None and (covers or device.host) and plain
    calling, flags = calling_of(form, library), settings_of(form, library, device)
    outline = call_outline(library, form.params, calling.typed, flags, threads, covers) if traced else None
    return Lowered(
        library=library,
        calling=calling,
        gradients=gradients,
        threads=threads,
        flags=flags,
        covers=covers,
        repeatable=all(a.is_out for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write),
        word=word,
        waiting=looks_at_values(library) or waits(library, form),
        operands=tuple(operands),
        readings=tuple(readings(form)),
        results=tuple(results),
        views=None if dynamic else tuple([required_view(form.operands[k].view) for k in results]),
        sized=tuple(written) if has_out else None,
        rng=_pair(rng) if isinstance(rng, tuple) else None,
        draws=rng is not None and not device.host and draws(library),
        deterministic=bool(form.attr("deterministic")),
        fresh=fresh_results(library.op),
        single=returns_one_tensor(library.op),
        traced=traced,
        outline=outline,
    )


def _pair(rng: tuple[Any, ...]) -> tuple[int, int]:
    seed, offset = [r.index for r in rng if isinstance(r, ParamRef)]
    return seed, offset


def _is_plain(form: Form, library: LibraryCall, results: int, *, has_out: bool) -> bool:
    """Whether an instruction is a call of the library and nothing else, so that `segments` can describe it."""
    if form.attr("rng") is not None or form.attr("deterministic"):
        return False
    if asks_grad_mode(library.op) or not (library.instead is None or isinstance(library.instead, SplitProduct)):
        return False
    if library.op.namespace != "aten":
        return False
    if has_out:
        # The size of `out=` must not change from run to run, and LAPACK may leave `out=` conjugated.
        views = [o.view for o in form.operands]
        if form.params or any(v is not None and v.dtype.kind == "complex" for v in views):
            return False
    returned = [str(r.type) for r in schema_of(library.op).returns if r.alias_info is None]
    return not results or len(returned) == results or returned == ["List[Tensor]"]
