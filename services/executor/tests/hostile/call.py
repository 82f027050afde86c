"""A call of a library operator, as a value: what a session can ask for, separate from the memory of the trial.

Call -> program_of -> the bytes of a program that makes the call
Call -> literal    -> Python code that makes the same call, for `found.py`
"""

from dataclasses import dataclass, replace

import torch
from wooly_executor.runtime.buffers import WIS_DTYPE
from wooly_wis.codec import encode_program
from wooly_wis.program import (
    Form,
    Instruction,
    Operand,
    OperandRef,
    ParamKind,
    ParamRef,
    Program,
    Role,
    Symbol,
    View,
)


@dataclass(frozen=True)
class Memory:
    """The content of one buffer: bytes, written as numbers of a dtype."""

    dtype: torch.dtype
    raw: bytes


@dataclass(frozen=True)
class Window:
    """A tensor: the memory of the call that it shows, and its layout. The offset is in elements."""

    memory: int
    dtype: torch.dtype
    sizes: tuple
    strides: tuple
    offset: int = 0

    @property
    def view(self):
        return View(WIS_DTYPE[self.dtype], self.sizes, self.strides, self.offset * self.dtype.itemsize)


@dataclass(frozen=True)
class Call:
    """An operator and its arguments. Lists are tuples.

    Attributes:
        unsaid: arguments that the operator writes, but that the program declares as read-only.
        late: numbers travel as params of the run, not in the program.
        read: (argument, "conj" or "neg") for each tensor that is read conjugated or negated.
    """

    name: str
    args: tuple
    kwargs: tuple = ()
    memories: tuple = ()
    unsaid: tuple = ()
    late: bool = False
    read: tuple = ()

    @property
    def operator(self):
        _, packet, overload = self.name.split(".")
        return getattr(getattr(torch.ops.aten, packet), overload)

    @property
    def schema(self):
        return self.operator._schema

    def named(self):
        """Return (declared argument, value) of all given arguments."""
        declared = {a.name: a for a in self.schema.arguments}
        found = list(zip(self.schema.arguments, self.args, strict=False))
        return found + [(declared[k], v) for k, v in self.kwargs if k in declared]

    def tidy(self):
        """Return the same call without memories that no tensor shows."""
        used = sorted({w.memory for w in windows_of((self.args, self.kwargs))})
        place = {k: i for i, k in enumerate(used)}

        def moved(value):
            if isinstance(value, Window):
                return replace(value, memory=place[value.memory])
            return tuple([moved(v) for v in value]) if isinstance(value, tuple) else value

        return replace(
            self, args=moved(self.args), kwargs=moved(self.kwargs), memories=tuple([self.memories[k] for k in used])
        )


def windows_of(value):
    """Return all tensors in a tree of arguments, in order."""
    if isinstance(value, Window):
        return [value]
    return [w for v in value for w in windows_of(v)] if isinstance(value, tuple) else []


def is_written(argument):
    return argument.alias_info is not None and argument.alias_info.is_write


# -- from tensors --------------------------------------------------------------------------------------------------------


class UnfitError(Exception):
    """A value that no program can contain."""


def call_of(name, args, kwargs, most=1 << 16):
    """Return a call on tensors of the host. Tensors that share memory share it in the call, too.

    Raises:
        UnfitError: an argument is not a plain tensor or constant, or has more than `most` bytes.
    """
    memories, places = [], {}

    def plain(value):
        if isinstance(value, torch.Tensor):
            return window(value)
        if isinstance(value, (list, tuple)):
            return tuple([plain(v) for v in value])
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if value is None or isinstance(
            value, (bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format)
        ):
            return value
        raise UnfitError(type(value).__name__)

    def window(t):
        t = t.detach()
        if type(t) is not torch.Tensor or t.layout is not torch.strided or t.dtype not in WIS_DTYPE:
            raise UnfitError(f"a tensor of {t.dtype}, {t.layout}")
        if t.is_conj() or t.is_neg() or t.device.type != "cpu":
            t = t.resolve_conj().resolve_neg()
        storage = t.untyped_storage()
        if storage.nbytes() > most or t._is_zerotensor():
            raise UnfitError("too large")
        if storage.data_ptr() not in places or not storage.nbytes():
            places[storage.data_ptr()] = len(memories)
            memories.append(Memory(t.dtype, torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()))
        return Window(places[storage.data_ptr()], t.dtype, tuple(t.shape), tuple(t.stride()), t.storage_offset())

    return Call(name, plain(tuple(args)), tuple([(k, plain(v)) for k, v in kwargs.items()]), tuple(memories))


# -- to a program --------------------------------------------------------------------------------------------------------

_KINDS = {bool: ParamKind.BOOL, int: ParamKind.I64, float: ParamKind.F64, complex: ParamKind.C128}


def program_of(call):
    """Return the bytes of the program that makes a call, and its params. Slots: the memories in order, then the results.

    Raises:
        WisError, struct.error, OverflowError: a value does not fit the encoding.
    """
    operands, slots, kinds, params, readings = [], [], [], [], {"conj": [], "neg": []}
    reads = dict(call.read)

    def attribute(value, argument, top):
        if isinstance(value, Window):
            wrote = is_written(argument) and argument.name not in call.unsaid
            operands.append(Operand(Role.INOUT if wrote else Role.IN, value.view))
            slots.append(value.memory)
            if argument.name in reads:
                readings[reads[argument.name]].append(OperandRef(len(operands) - 1))
            return OperandRef(len(operands) - 1)
        if isinstance(value, tuple):
            return tuple([attribute(v, argument, False) for v in value])
        if call.late and top and type(value) in _KINDS and (type(value) is not int or abs(value) < 1 << 63):
            kinds.append(_KINDS[type(value)])
            params.append(value)
            return ParamRef(len(kinds) - 1)
        return _constant(value)

    args = tuple([attribute(v, a, True) for a, v in zip(call.schema.arguments, call.args, strict=False)])
    declared = {a.name: a for a in call.schema.arguments}
    kwargs = tuple([(k, attribute(v, declared[k], True)) for k, v in call.kwargs if k in declared])
    lists = [len(v) for v in call.args if isinstance(v, tuple)] or [1]
    results = sum([lists[0] if "List" in str(r.type) else 1 for r in call.schema.returns if r.alias_info is None])
    operands += [Operand(Role.OUT, None)] * results
    slots += range(len(call.memories), len(call.memories) + results)
    attrs = {"args": args, "kwargs": kwargs, "name": call.name}
    attrs |= {k: tuple(v) for k, v in readings.items() if v}
    form = Form("extern", tuple(operands), tuple(kinds), tuple(sorted(attrs.items())))
    order = {slot: k for k, slot in enumerate(dict.fromkeys(slots))}
    program = Program((form,), (Instruction(0, tuple([order[s] for s in slots])),))
    return encode_program(program), params, list(order)


def _constant(value):
    if isinstance(value, torch.dtype):
        return WIS_DTYPE[value]
    if isinstance(value, torch.device):
        return Symbol("device", "cpu")
    if isinstance(value, torch.layout):
        return Symbol("layout", str(value).removeprefix("torch."))
    if isinstance(value, torch.memory_format):
        return Symbol("memory_format", str(value).removeprefix("torch."))
    return value


# -- to Python -----------------------------------------------------------------------------------------------------------


def literal(call):
    """Return the line of `found.py` that makes this call."""
    shown = [w.memory for w in windows_of((call.args, call.kwargs))]
    defined = set()

    def text(value):
        if isinstance(value, Window):
            return window(value)
        if isinstance(value, tuple):
            return "[" + ", ".join([text(v) for v in value]) + "]"
        return _number(value)

    def window(w):
        memory = call.memories[w.memory]
        if shown.count(w.memory) > 1:
            name = f"m{w.memory}"
            base = name if name in defined else f"({name} := {flat(memory)})"
            defined.add(name)
            base += "" if w.dtype is memory.dtype else f".view({w.dtype})"
            return f"{base}.as_strided({w.sizes}, {w.strides}, {w.offset})"
        n = len(memory.raw) // memory.dtype.itemsize
        dense = torch.empty(w.sizes, device="meta").stride() == w.strides and not w.offset
        if dense and w.dtype is memory.dtype and n == torch.Size(w.sizes).numel():
            return flat(memory, w.sizes)
        base = flat(memory) + ("" if w.dtype is memory.dtype else f".view({w.dtype})")
        return f"{base}.as_strided({w.sizes}, {w.strides}, {w.offset})"

    def flat(memory, sizes=None):
        values = torch.frombuffer(bytearray(memory.raw), dtype=memory.dtype) if memory.raw else torch.empty(0)
        sizes = (len(values),) if sizes is None else sizes
        dtype = "" if memory.dtype is torch.float32 else f", dtype={memory.dtype}"
        same = {memory.raw[at : at + memory.dtype.itemsize] for at in range(0, len(memory.raw), memory.dtype.itemsize)}
        if not values.numel():
            return f"torch.zeros({tuple(sizes)}{dtype})"
        if len(same) == 1:
            return f"torch.full({tuple(sizes)}, {_number(values[0].item())}{dtype or ', dtype=torch.float32'})"
        numbers = ", ".join([_number(v) for v in values.tolist()])
        return f"torch.tensor([{numbers}]{dtype})" + (f".reshape({tuple(sizes)})" if len(sizes) != 1 else "")

    parts = [repr(call.name), *[text(v) for v in call.args], *[f"{k}={text(v)}" for k, v in call.kwargs]]
    for name in ("unsaid", "late", "read"):
        if getattr(call, name):
            parts.append(f"_{name}={getattr(call, name)!r}")
    return f"call({', '.join(parts)})"


def _number(value):
    if isinstance(value, float) and (value != value or value in (float("inf"), -float("inf"))):
        return f'float("{value}")'
    return repr(value)
