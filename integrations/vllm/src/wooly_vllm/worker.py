"""The worker: vLLM's GPU worker, with the session's memory in place of CUDA's."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from vllm.config import set_current_vllm_config
from vllm.logger import init_logger
from vllm.multimodal.gpu_ipc_memory import reserve_mm_ipc_gpu_memory
from vllm.v1.worker.gpu_worker import Worker
from wooly import api

from wooly_vllm import replacements
from wooly_vllm.platform import WoolyPlatform
from wooly_vllm.sleeping import WoolySleepBackend

replacements.install()
# The name makes the line a part of vLLM's log.
log = init_logger("vllm.wooly")


class WoolyWorker(Worker):  # type: ignore[misc] # vLLM has no stubs
    """vLLM's GPU worker on Wooly's "cuda"."""

    @functools.cached_property
    def sleep_mode_backend(self) -> WoolySleepBackend:
        """The backend of sleep mode."""
        return WoolySleepBackend(self.model_runner)

    def sleep(self, level: int = 1) -> None:
        """Free the weights (level 1: keep a copy on the host) and the cache of keys and values.

        vLLM's function requires that the device's free memory has not become less, but other sessions use the device, too. Here
        the tensors of this session are counted.
        """
        with _memory_of_this_session(self.device):
            super().sleep(level)

    def init_device(self) -> None:
        """Open the session. The ranks of a server with several devices exchange tensors from device to device."""
        WoolyPlatform.dist_backend = "nccl" if self.parallel_config.world_size > 1 else "gloo"
        super().init_device()

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        return nullcontext()

    def determine_available_memory(self) -> int:
        """Bytes for the cache of keys and values: the part of the session's memory that weights and activations do not need.

        vLLM's function compares the device's free memory before and after a step, but other sessions use the device, too. Here
        the tensors of this session are counted.
        """
        if self.cache_config.kv_cache_memory_bytes:
            return int(super().determine_available_memory())
        weights = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.profile_run(randomize_inputs=self.randomize_dummy_inputs)
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        self.available_kv_cache_memory_bytes = int(self.requested_memory) - peak
        free, quota = self.init_snapshot.free_memory, self.init_snapshot.total_memory
        log.info(
            "the server may take %s of memory: %s %% (gpu_memory_utilization) of the %s that the session could get at its start; "
            "its quota is %s. Weights take %s, a step takes %s more, and the cache of keys and values gets the other %s",
            *(
                _size(self.requested_memory),
                round(100 * self.cache_config.gpu_memory_utilization),
                _size(free),
                _size(quota),
            ),
            *(_size(weights), _size(peak - weights), _size(self.available_kv_cache_memory_bytes)),
        )
        return int(
            reserve_mm_ipc_gpu_memory(
                self.available_kv_cache_memory_bytes,
                self.model_config.multimodal_config,
                getattr(self.parallel_config, "_api_process_count", 1),
            )
        )

    def shutdown(self) -> None:
        """End the work on the device. If Python exits, the session may have ended already."""
        if api.has_session():
            super().shutdown()


def _size(nbytes: float) -> str:
    return f"{nbytes / (1 << 30):.2f} GiB" if abs(nbytes) >= 1 << 30 else f"{nbytes / (1 << 20):.1f} MiB"


@contextmanager
def _memory_of_this_session(device: torch.device) -> Iterator[None]:
    """Let `torch.accelerator.get_memory_info` tell how much of its quota this session does not use."""
    real, total = torch.accelerator.get_memory_info, torch.cuda.mem_get_info(device)[1]

    def info(_: object = None) -> tuple[int, int]:
        return total - torch.cuda.memory_allocated(device), total

    torch.accelerator.get_memory_info = info
    try:
        yield
    finally:
        torch.accelerator.get_memory_info = real
