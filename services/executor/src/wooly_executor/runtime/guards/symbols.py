"""Require that an argument for a dtype, a layout, a memory format or a device has that type.

The library accepts a number for such an argument and uses it as an index into a table, without a check.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from wooly_wis.dtypes import DType
from wooly_wis.program import Attr, Symbol

from wooly_executor.runtime.calls import LibraryCall
from wooly_executor.runtime.torch_private import OpOverload, schema_of

#: For each type name of a schema: the Python types that an argument may have, and the kind of `Symbol` that it may be.
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "ScalarType": ((DType, torch.dtype), ""),
    "Layout": ((torch.layout,), "layout"),
    "MemoryFormat": ((torch.memory_format,), "memory_format"),
    "Device": ((torch.device,), "device"),
}


def wrong_symbol(call: LibraryCall) -> str:
    """Return an error message if an argument for a dtype, layout, memory format or device has another type; empty: none has."""
    named = dict(call.kwargs)
    for at, name, kind in _symbol_arguments(call.op):
        value: Any = call.args[at] if at < len(call.args) else named.get(name)
        if not _matches(value, kind):
            return f"{call.op}: {name} must be a {kind}"
    return ""


@cache
def _symbol_arguments(op: OpOverload) -> tuple[tuple[int, str, str], ...]:
    """Return position, name and type of the arguments of these types."""
    found = []
    for at, argument in enumerate(schema_of(op).arguments):
        kind = str(argument.real_type).removeprefix("Optional[").removesuffix("]")
        if kind in _KINDS:
            found.append((at, argument.name, kind))
    return tuple(found)


def _matches(value: Attr, kind: str) -> bool:
    types, symbol = _KINDS[kind]
    if isinstance(value, Symbol):
        return value.kind == symbol
    return value is None or isinstance(value, types)
