"""Patches for TorchScript: saved modules name the device "cuda".

PyTorch's C++ code writes and reads the files, and does not see the facade. So the device names in a file are exchanged after it
is written and before it is read. A file that this process writes can be read without Wooly.
"""

from __future__ import annotations

import functools
import io
import os
import pickletools
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from wooly.devices import NAME
from wooly.facade.names import CUDA, to_wooly
from wooly.torch_private import torchscript_executor_patches

Patch = tuple[Any, str, Any]


def patches() -> Iterator[Patch]:
    """Yield the patches (owner, name, value) for saving, loading and running modules of TorchScript."""
    torchscript: Any = torch.jit  # PyTorch does not annotate it
    module = torchscript.RecursiveScriptModule
    real_save, real_to_buffer, real_load = module.save, module.save_to_buffer, torchscript.load

    @functools.wraps(real_to_buffer)
    def save_to_buffer(self: Any, *args: Any, **kwargs: Any) -> bytes:
        return rename_devices(real_to_buffer(self, *args, **kwargs), NAME, CUDA)

    @functools.wraps(real_save)
    def save(self: Any, f: Any, **kwargs: Any) -> None:
        Path(f).write_bytes(save_to_buffer(self, **kwargs))

    @functools.wraps(real_load)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if map_location is not None:
            map_location = to_wooly(map_location)
        if isinstance(f, (str, os.PathLike)):
            if not zipfile.is_zipfile(f):
                return real_load(f, map_location, *args, **kwargs)  # it raises the error
            f = Path(f)
        raw = f.read_bytes() if isinstance(f, Path) else f.read()
        return real_load(io.BytesIO(rename_devices(raw, CUDA, NAME)), map_location, *args, **kwargs)

    # PyTorch copies the methods of RecursiveScriptModule to ScriptModule, the base of traced modules.
    for owner in (module, torchscript.ScriptModule):
        yield (owner, "save", save)
        yield (owner, "save_to_buffer", save_to_buffer)
    yield (torch.jit, "load", load)
    yield from torchscript_executor_patches()


def rename_devices(archive: bytes, old: str, new: str) -> bytes:
    """Return the archive of a module in which the devices of type `old` have the type `new`. Other bytes stay as they are.

    Args:
        archive: a zip file, as `torch.jit.save` writes it.
        old: device type, for example "wooly".
        new: device type.
    """
    try:
        source = zipfile.ZipFile(io.BytesIO(archive))
    except zipfile.BadZipFile:
        return archive
    with source:
        texts = {e.filename: _renamed(e.filename, source.read(e), old, new) for e in source.infolist() if _has_names(e)}
        if all(text is None for text in texts.values()):
            return archive
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as target:
            for entry in source.infolist():
                text = texts.get(entry.filename)
                target.writestr(entry.filename, source.read(entry) if text is None else text)
    return out.getvalue()


def _has_names(entry: zipfile.ZipInfo) -> bool:
    return entry.filename.endswith((".pkl", ".py"))


def _renamed(name: str, data: bytes, old: str, new: str) -> bytes | None:
    """The entry with new device names; None if it has no old ones."""
    if old.encode() not in data:
        return None
    if name.endswith(".py"):
        changed = re.sub(rb'torch\.device\("%s\b' % old.encode(), b'torch.device("%s' % new.encode(), data)
        return None if changed == data else changed
    device = re.compile(rf"{old}(:\d+)?")
    parts, end = [], 0
    for op, value, at in pickletools.genops(data):
        if op.name == "BINUNICODE" and isinstance(value, str) and at is not None and device.fullmatch(value):
            text = (new + value.removeprefix(old)).encode()
            parts += [data[end:at], op.code.encode(), len(text).to_bytes(4, "little"), text]
            end = at + 5 + len(value)
    return b"".join([*parts, data[end:]]) if parts else None
