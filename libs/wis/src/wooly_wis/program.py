"""The data model of WIS: views, operands, forms, instructions, programs. These are plain values; the verifier checks them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import TypeAlias

from wooly_wis.dtypes import DType


@dataclass(frozen=True, slots=True)
class View:
    """A strided window on a buffer.

    Attributes:
        dtype: element type.
        sizes: extent of each dimension, in elements.
        strides: distance between neighbours of each dimension, in elements, never negative.
        offset: first element's position in the buffer, in bytes.
    """

    dtype: DType
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        n = 1
        for size in self.sizes:
            n *= size
        return n

    @property
    def end(self) -> int:
        """Minimum size of the buffer in bytes, counted from the buffer's start; 0 for an empty view at any offset."""
        last = 0
        for size, stride in zip(self.sizes, self.strides, strict=True):
            if size == 0:
                return 0
            last += (size - 1) * stride
        return self.offset + (last + 1) * self.dtype.itemsize

    @property
    def dense(self) -> bool:
        """Whether the elements cover a contiguous part of memory, each address once.

        Equal numbers of elements and addresses do not show it: sizes (3, 3) with strides (2, 2) have nine of each, and leave four
        addresses out.
        """
        expected = 1
        for stride, size in sorted([(s, n) for n, s in zip(self.sizes, self.strides, strict=True) if n != 1]):
            if stride != expected:
                return False
            expected *= size
        return True

    def fills(self, nbytes: int) -> bool:
        """Whether a write of all elements writes each of the first `nbytes` bytes of the buffer."""
        return self.offset == 0 and self.dense and self.numel * self.dtype.itemsize == nbytes


class Role(IntEnum):
    """What an instruction does with an operand."""

    IN = 0
    OUT = 1
    INOUT = 2


@dataclass(frozen=True, slots=True)
class Operand:
    """One tensor operand of a form. `view` is None for `free` and for outputs whose shape only the executor knows."""

    role: Role
    view: View | None


@dataclass(frozen=True, slots=True)
class OperandRef:
    """A reference inside an attribute to operand `index` of the form."""

    index: int


@dataclass(frozen=True, slots=True)
class ParamRef:
    """A reference inside an attribute to param `index` of the form."""

    index: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """A named constant of an enumeration, for example ``Symbol("memory_format", "channels_last")``."""

    kind: str
    name: str


class ParamKind(IntEnum):
    """Type of a param, a scalar that is bound per run. A param takes one 8-byte word; C128 takes two (real, imaginary)."""

    F64 = 0
    I64 = 1
    C128 = 2
    BOOL = 3


Attr: TypeAlias = (
    "bool | int | float | complex | str | DType | OperandRef | ParamRef | Symbol | tuple[Attr, ...] | None"
)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Form:
    """An instruction without its slots. Equal forms are stored once per program.

    Attributes:
        opcode: name of a row of the op table.
        operands: tensor operands, in the order in which an instruction lists their slots.
        params: kinds of the scalars that each instruction of this form takes from the run.
        attrs: (name, value) pairs, sorted by name.
    """

    opcode: str
    operands: tuple[Operand, ...] = ()
    params: tuple[ParamKind, ...] = ()
    attrs: tuple[tuple[str, Attr], ...] = ()

    def attr(self, name: str, default: Attr = None) -> Attr:
        """Value of the attribute `name`, or `default`."""
        for key, value in self.attrs:
            if key == name:
                return value
        return default


@dataclass(frozen=True, slots=True)
class Instruction:
    """A form applied to slots, one per operand of the form."""

    form: int
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """Straight-line code over numbered slots. It has no buffer ids, so its digest does not depend on the buffers of a run."""

    forms: tuple[Form, ...]
    body: tuple[Instruction, ...]

    @cached_property
    def n_slots(self) -> int:
        """Number of slots that a run must bind."""
        return max((slot for instruction in self.body for slot in instruction.slots), default=-1) + 1

    @cached_property
    def param_kinds(self) -> tuple[ParamKind, ...]:
        """Kinds of all params of a run, flat, in instruction order."""
        return tuple(kind for instruction in self.body for kind in self.forms[instruction.form].params)
