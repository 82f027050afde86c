"""`wooly weights add`: a model's weights, from its files to the devices, where they stay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from wooly.contents import WORTH
from wooly.errors import WoolyError
from wooly.link import Link

_KINDS = (".safetensors", ".pt", ".pth", ".bin")


def load_and_pin(path: Path, name: str, links: list[Link]) -> dict[str, Any]:
    """Upload every tensor under `path` to every device, and keep what is there under `name`.

    Tensors below 16 KiB are not kept: sending them costs what asking for them would.

    Raises:
        FileNotFoundError: there are no weights.
        WoolyError: they cannot be kept.
    """
    kept = []
    count = 0
    for index, link in enumerate(links):
        held = [t.to(f"wooly:{index}") for t in _tensors(path) if t.nbytes >= WORTH]
        if not held:
            raise WoolyError(f"{path} has no tensor of {WORTH} bytes or more: there is nothing to keep")
        count = len(held)
        torch.wooly.synchronize(index)  # type: ignore[attr-defined]
        kept.append(link.pin("add", name)["bytes"])
        del held
    return {"name": name, "tensors": count, "bytes": max(kept), "executors": len(links)}


def _tensors(path: Path) -> Iterator[torch.Tensor]:
    files = sorted(f for f in path.iterdir() if f.suffix in _KINDS) if path.is_dir() else [path]
    safe = [f for f in files if f.suffix == ".safetensors"]
    files = safe or files  # a folder that has both has the same weights twice
    if not files:
        raise FileNotFoundError(f"{path} has no files of weights ({', '.join(_KINDS)})")
    for file in files:
        yield from _tensors_of(file)


def _tensors_of(file: Path) -> Iterator[torch.Tensor]:
    if not file.exists():
        raise FileNotFoundError(f"{file}: no such file")
    if file.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(str(file), framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - it is no dictionary
                yield opened.get_tensor(key)
        return
    loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)  # noqa: TID251  # weights only
    yield from (t for t in _flat(loaded) if t.is_contiguous())


def _flat(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _flat(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
