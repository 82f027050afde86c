"""`wooly weights add`: uploads the weights of a model from files to the devices, and pins them there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from wooly.contents import MIN_OFFER_BYTES
from wooly.errors import WoolyError
from wooly.link import Link

_KINDS = (".safetensors", ".pt", ".pth", ".bin")


def load_and_pin(path: Path, name: str, links: list[Link]) -> dict[str, Any]:
    """Upload all tensors in `path` to every device, and pin them under `name`.

    Tensors smaller than 16 KiB are not pinned, because sending them costs no more than asking whether the device has them.

    Raises:
        FileNotFoundError: `path` does not contain weights.
        WoolyError: the weights cannot be pinned.
    """
    kept = []
    count = 0
    for index, link in enumerate(links):
        held = [t.to(f"wooly:{index}") for t in _tensors(path) if t.nbytes >= MIN_OFFER_BYTES]
        if not held:
            raise WoolyError(
                f"nothing to keep: {path} has no tensor of {MIN_OFFER_BYTES} bytes or more, and smaller tensors are not kept"
            )
        count = len(held)
        torch.wooly.synchronize(index)  # type: ignore[attr-defined]
        kept.append(link.pin("add", name)["bytes"])
        del held
    return {"name": name, "tensors": count, "bytes": max(kept), "executors": len(links)}


def _tensors(path: Path) -> Iterator[torch.Tensor]:
    files = sorted(f for f in path.iterdir() if f.suffix in _KINDS) if path.is_dir() else [path]
    safe = [f for f in files if f.suffix == ".safetensors"]
    files = safe or files  # a folder with both kinds of files contains the same weights twice
    if not files:
        raise FileNotFoundError(f"{path} contains no files with weights ({', '.join(_KINDS)})")
    for file in files:
        yield from _tensors_of(file)


def _tensors_of(file: Path) -> Iterator[torch.Tensor]:
    if not file.exists():
        raise FileNotFoundError(f"the file {file} does not exist")
    if file.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(str(file), framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - `opened` is not a dictionary
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
