"""Calls the library on parts of the operands, for an instruction that is split into pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from wooly_wis.optable import TABLE, Family
from wooly_wis.program import Form, OperandRef, Role

from wooly_executor.bounds.division import Cuts, Piece
from wooly_executor.runtime.calls import LibraryCall, filler, library_call
from wooly_executor.runtime.device import TorchDevice
from wooly_executor.runtime.frame import Frame, Step
from wooly_executor.runtime.guards import guarded
from wooly_executor.runtime.invocation import calling, calling_of, flagged
from wooly_executor.runtime.torch_private import OpOverload, schema_of


def part_of(
    form: Form, results: Sequence[int], parts: dict[int, int], first_param: int, device: TorchDevice
) -> Callable[[Frame], None]:
    """Return a function that runs an instruction on the registers `parts`, by operand.

    The results go to the registers of the operands `results`.
    """
    outs = [parts[k] for k in results]
    out = outs[0]
    if form.opcode == "copy":
        source = parts[0]

        def copy(f: Frame) -> None:
            f.registers[out].copy_(f.registers[source])

        return copy
    if form.opcode == "fill":
        value = filler(form.attr("value"), {}, first_param, {})

        def fill(f: Frame) -> None:
            f.registers[out].fill_(value(f.registers, list(f.params)))

        return fill
    library = guarded(device.library(library_call(form), form), form)
    if form.operands[results[0]].role is not Role.OUT:
        return flagged(calling(calling_of(form, library), parts, first_param, device), form, library, device)
    row = TABLE.get(form.opcode)
    into = _into(library, results[0]) if row and row.family in (Family.POINTWISE, Family.REDUCTION) else None
    if into is not None:
        return calling(calling_of(form, into), parts, first_param, device)
    call = flagged(calling(calling_of(form, library), parts, first_param, device), form, library, device)

    def kept(f: Frame) -> None:
        found = call(f)
        for register, t in zip(outs, (found,) if isinstance(found, Tensor) else found, strict=True):
            f.registers[register].copy_(t)

    return kept


def _into(library: LibraryCall, result: int) -> LibraryCall | None:
    """Return the variant of the call that writes its result to a given tensor; None if the library has no such variant with the
    same arguments.
    """
    if library.instead is not None:
        return None
    packet, said = library.op.overloadpacket, _declared(library.op)
    for name in packet.overloads():
        op = getattr(packet, name)
        outs = [a for a in schema_of(op).arguments if a.is_out]
        if len(outs) == 1 and _declared(op) == said:
            return replace(library, op=op, kwargs=(*library.kwargs, (outs[0].name, OperandRef(result))))
    return None


def _declared(op: OpOverload) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in schema_of(op).arguments if not a.is_out]


def on_part(call: Callable[[Frame], Any], registers: dict[int, int], parts: dict[int, int], piece: Piece) -> Step:
    """Return a step that runs `call` on one piece.

    Args:
        call: reads and writes the registers `parts`.
        registers: register of each whole operand.
        parts: register of each operand's part.
        piece: the piece.
    """
    narrowed = [(registers[k], register, piece.cuts[k]) for k, register in parts.items()]

    def run(f: Frame) -> None:
        held = f.registers
        for source, target, cuts in narrowed:
            held[target] = _cut(held[source], cuts)
        try:
            call(f)
        finally:
            for _, target, _ in narrowed:
                held[target] = None

    return run


def _cut(t: Tensor, cuts: Cuts) -> Tensor:
    for dim, start, length in cuts:
        t = t.narrow(dim, start, length)
    return t
