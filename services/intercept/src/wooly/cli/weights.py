"""`wooly weights`: keeps the weights of a model on every executor, and lists and removes them, over one session per executor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from wooly_bus.contents import MIN_OFFER_BYTES

from wooly.errors import WoolyError
from wooly.link import Link
from wooly.settings import Settings

_KINDS = (".safetensors", ".pt", ".pth", ".bin")


T = TypeVar("T")


@dataclass
class OnExecutors(Generic[T]):
    """What was done on each executor, and why not on the others, by executor."""

    done: dict[str, T] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def on_every_executor(
    settings: Settings, nodes: Sequence[Mapping[str, Any]], work: Callable[[Link], T]
) -> OnExecutors[T]:
    """Open a session that shares contents on one executor after the other, and call `work` with its link.

    An executor that is draining, or that takes no session of this user, is left out, and the others are done.

    Args:
        settings: the client's settings.
        nodes: the executors that the controller knows.
        work: called with the link of each session.
    """
    from wooly import api

    changes: dict[str, Any] = {"gpu_count": 1, "queue_s": 0.0}
    if settings.dedup == "off":
        changes["dedup"] = "tenant"
    found: OnExecutors[T] = OnExecutors()
    for node in sorted(nodes, key=lambda n: str(n["executor_id"])):
        name = str(node["executor_id"])
        reason = _left_out(node, settings)
        if reason:
            found.left_out[name] = reason
            continue
        try:
            api.enable(settings.model_copy(update=changes | {"node": name}))
            try:
                (link,) = api.attached_links()
                found.done[name] = work(link)
            finally:
                api.disable()
        except WoolyError as e:
            found.left_out[name] = str(e)
    return found


def _left_out(node: Mapping[str, Any], settings: Settings) -> str:
    """The reason why an executor gets no session; empty if it may get one."""
    if node["state"] != "alive":
        return "does not answer"
    if node["wish"] != "active":
        return f"its node is {node['wish']}"
    groups = set(node["groups"])
    if groups and groups.isdisjoint(settings.node_groups):
        return f"its node takes only sessions of {', '.join(sorted(groups))} (WOOLYAI_NODE_GROUPS)"
    if settings.node_groups and not groups:
        return "its node is in no group, and WOOLYAI_NODE_GROUPS asks for one"
    return ""


def load_and_pin(path: Path, name: str, link: Link) -> tuple[int, int]:
    """Upload all tensors in `path` to a device, and pin them under `name`. Returns the number of tensors and of bytes.

    Tensors smaller than 16 KiB are not pinned, because sending them costs no more than asking whether the device has them.

    Raises:
        FileNotFoundError: `path` does not contain weights.
        WoolyError: the weights cannot be pinned.
    """
    held = [t.to("wooly:0") for t in _tensors(path) if t.nbytes >= MIN_OFFER_BYTES]
    if not held:
        raise FileNotFoundError(
            f"nothing to keep: {path} has no tensor of {MIN_OFFER_BYTES} bytes or more, and smaller tensors are not kept"
        )
    torch.wooly.synchronize(0)  # type: ignore[attr-defined]
    return len(held), int(link.pin("add", name)["bytes"])


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
