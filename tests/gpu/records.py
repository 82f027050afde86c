"""Results that one process writes and another one compares: plain tensors, numbers and strings in a file."""

import io
import struct
import zlib

import torch
from torch.utils._pytree import tree_flatten

_LENGTH = struct.Struct("<Q")


def plain(value):
    """`value` as host tensors, numbers, strings, None, lists and dictionaries only. Waits for the device."""
    if isinstance(value, torch.Tensor):
        t = value.detach()
        t = t.to_dense() if t.layout is not torch.strided else t
        if t._is_zerotensor():
            return torch.zeros(t.shape, dtype=t.dtype)
        return t.cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, torch.Size):
        return f"torch.Size({list(value)})"
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (torch.dtype, torch.device, torch.layout, complex)):
        return str(value)
    return f"<{type(value).__name__}>"


def digest(value):
    """A number that differs for different inputs."""
    found = 0
    for leaf in tree_flatten(value)[0]:
        if isinstance(leaf, torch.Tensor):
            raw = plain(leaf).reshape(-1)
            data = f"{leaf.dtype}{tuple(leaf.shape)}".encode() + bytes(raw.view(torch.uint8).numpy().data)
        else:
            data = str(plain(leaf)).encode()
        found = zlib.crc32(data, found)
    return found


def append(path, records):
    """Add a list of records to a file."""
    buffer = io.BytesIO()
    torch.save(records, buffer)
    with path.open("ab") as out:
        out.write(_LENGTH.pack(buffer.tell()) + buffer.getvalue())


def read(path):
    """All records of a file, by name. A record that a killed process left incomplete is ignored."""
    found = {}
    if not path.exists():
        return found
    data = path.read_bytes()
    at = 0
    while at + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + length > len(data):
            break
        for record in torch.load(io.BytesIO(data[at : at + length]), weights_only=True):
            found[record["name"]] = record
        at += length
    return found
