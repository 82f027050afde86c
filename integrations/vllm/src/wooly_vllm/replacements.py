"""Functions of vLLM that this platform replaces, because they call operators that vLLM compiled for CUDA, or warm kernels for them."""

from __future__ import annotations

from typing import Any

import vllm._custom_ops as compiled
from vllm.v1.worker import gpu_worker


def warm_up(worker: Any, *, process_local_only: bool = False) -> None:
    """Compile the Triton kernels that vLLM has registered for this. vLLM's function also tunes kernels of NVIDIA's libraries."""
    registry = getattr(worker.model_runner, "jit_warmup_registry", None)
    if registry is not None and worker.vllm_config.kernel_config.enable_jit_warmup:
        registry.warmup()


def install() -> None:
    """Replace the functions. Calling it again changes nothing."""
    gpu_worker.kernel_warmup = warm_up
    compiled.apply_repetition_penalties_cuda = compiled.apply_repetition_penalties_torch
