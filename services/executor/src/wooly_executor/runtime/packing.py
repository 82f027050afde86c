"""The memory layout of kernel arguments: each argument at its own alignment, as in a C struct."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import torch
from wooly_wis.dtypes import DType

from wooly_executor.runtime.buffers import TORCH_DTYPE

#: Kind of a parameter: the dtype of a scalar, or None for an address.
Kind = DType | None
_CHARACTER: dict[Kind, str] = {
    None: "Q",
    DType.BOOL: "B",
    DType.U8: "B",
    DType.I8: "b",
    DType.U16: "H",
    DType.I16: "h",
    DType.F16: "H",
    DType.BF16: "H",
    DType.U32: "I",
    DType.I32: "i",
    DType.U64: "Q",
    DType.I64: "q",
    DType.F32: "f",
    DType.F64: "d",
}


def layout(kinds: Sequence[Kind]) -> tuple[tuple[int, int], ...]:
    """Return offset and size of each parameter, in bytes."""
    found, before = [], "@"
    for kind in kinds:
        character = _CHARACTER[kind]
        found.append((struct.calcsize(f"{before}0{character}"), struct.calcsize(character)))
        before += character
    return tuple(found)


def half_bits(value: Any, dtype: DType) -> int:
    """Return the bits of a 16-bit float as an integer."""
    return int(torch.tensor(value, dtype=TORCH_DTYPE[dtype]).view(torch.uint16).item())


class Arguments:
    """Memory for the arguments of one function's launches. It is filled again for each launch, by one thread.

    Args:
        kinds: the kinds of the parameters.

    Attributes:
        address: address of an array with the address of each argument; 0 if there are no parameters.
        data: the arguments, as a struct.
        nbytes: size of the struct, in bytes.
    """

    def __init__(self, kinds: Sequence[Kind]) -> None:
        self._struct = struct.Struct("@" + "".join([_CHARACTER[k] for k in kinds]))
        self._kinds = tuple(kinds)
        self.data = ctypes.create_string_buffer(max(self._struct.size, 1))
        first = ctypes.addressof(self.data)
        self._pointers = (ctypes.c_void_p * max(len(kinds), 1))(*[first + at for at, _ in layout(kinds)])
        self.address = ctypes.addressof(self._pointers) if kinds else 0
        self.nbytes = self._struct.size

    def fill(self, values: Sequence[Any]) -> Arguments:
        """Store the values of a launch: addresses and numbers, 16-bit floats as their bits."""
        try:
            self._struct.pack_into(self.data, 0, *values)
        except OverflowError:  # a number beyond the range of float32 becomes infinity
            fitted = [
                ctypes.c_float(v).value if k is DType.F32 else v for k, v in zip(self._kinds, values, strict=True)
            ]
            self._struct.pack_into(self.data, 0, *fitted)
        return self
