"""Sleep mode: gives the session's memory back while a server has nothing to do, and takes it again.

vLLM's own backend unmaps CUDA's memory below PyTorch. Here the storages are resized, so the executor gets their memory back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend


class WoolySleepBackend(SleepModeBackend):  # type: ignore[misc] # vLLM has no stubs
    """Moves the weights to this process (level 1) or drops them (level 2), and drops the cache of keys and values.

    Args:
        runner: the model runner.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._runner = runner
        #: What is asleep, by tag: the storage, its bytes, and its content; None: the content was dropped.
        self._asleep: dict[str, list[tuple[torch.UntypedStorage, int, torch.Tensor | None]]] = {}

    def suspend(self, level: int = 1) -> None:
        model = self._runner.get_model()
        self._put_to_sleep("weights", [*model.parameters(), *model.buffers()], keep=level == 1)
        self._put_to_sleep("kv_cache", _tensors_in(self._runner.kv_caches), keep=False)
        self._state = "SUSPENDED"

    def resume(self, tags: list[str] | None = None) -> None:
        for tag in list(self._asleep) if tags is None else tags:
            for storage, nbytes, content in self._asleep.pop(tag, []):
                storage.resize_(nbytes)
                whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                whole.zero_() if content is None else whole.copy_(content)
        self._state = "SUSPENDED" if self._asleep else "RUNNING"

    def discard(self, tags: tuple[str, ...]) -> None:
        """Drop the cache of keys and values.

        Raises:
            RuntimeError: other tags are named.
        """
        if set(tags) - {"kv_cache"}:
            raise RuntimeError(f"the sleep backend of Wooly discards the tag kv_cache alone, not {', '.join(tags)}")
        self._put_to_sleep("kv_cache", _tensors_in(self._runner.kv_caches), keep=False)
        self._state = "SUSPENDED"

    @classmethod
    def preserves_communicators(cls) -> bool:
        return True

    def _put_to_sleep(self, tag: str, tensors: Iterable[torch.Tensor], *, keep: bool) -> None:
        if tag in self._asleep:
            return
        storages = {s.data_ptr(): s for t in tensors if not t.is_cpu and (s := t.untyped_storage()).nbytes()}
        self._asleep[tag] = []
        for storage in storages.values():
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self._asleep[tag].append((storage, storage.nbytes(), whole.cpu() if keep else None))
            storage.resize_(0)


def _tensors_in(found: Any) -> list[torch.Tensor]:
    """The tensors in nested lists."""
    return [found] if isinstance(found, torch.Tensor) else [t for part in found for t in _tensors_in(part)]
