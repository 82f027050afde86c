"""A dtype, a layout, a memory format or a device is one: the library takes a number for it, and looks it up in a table."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from wooly_wis.dtypes import DType
from wooly_wis.program import Attr, Symbol

from wooly_executor.runtime.calls import LibraryCall
from wooly_executor.runtime.torch_private import OpOverload, schema_of

#: By the schema's name of the type: what an argument may be, and of which kind a symbol that stands for it.
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "ScalarType": ((DType, torch.dtype), ""),
    "Layout": ((torch.layout,), "layout"),
    "MemoryFormat": ((torch.memory_format,), "memory_format"),
    "Device": ((torch.device,), "device"),
}


def mistaken(call: LibraryCall) -> str:
    """Which argument is no such thing where one is due; empty: none."""
    named = dict(call.kwargs)
    for at, name, kind in _due(call.op):
        value: Any = call.args[at] if at < len(call.args) else named.get(name)
        if not _is(value, kind):
            return f"{call.op}: {name} must be a {kind}"
    return ""


@cache
def _due(op: OpOverload) -> tuple[tuple[int, str, str], ...]:
    """The arguments of these types: position, name, type."""
    found = []
    for at, argument in enumerate(schema_of(op).arguments):
        kind = str(argument.real_type).removeprefix("Optional[").removesuffix("]")
        if kind in _KINDS:
            found.append((at, argument.name, kind))
    return tuple(found)


def _is(value: Attr, kind: str) -> bool:
    types, symbol = _KINDS[kind]
    if isinstance(value, Symbol):
        return value.kind == symbol
    return value is None or isinstance(value, types)
