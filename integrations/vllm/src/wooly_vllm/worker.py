"""The worker: vLLM's GPU worker without what needs CUDA's allocator."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from vllm.v1.worker.gpu_worker import Worker
from wooly_vllm import replacements

replacements.install()


class WoolyWorker(Worker):  # type: ignore[misc] # vLLM has no stubs
    """vLLM's GPU worker on Wooly's "cuda"."""

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        return nullcontext()
