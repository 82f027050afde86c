"""Functions of vLLM that this platform replaces, because they call operators that vLLM compiled for CUDA, or warm kernels for them."""

from __future__ import annotations

from typing import Any

import vllm._custom_ops as compiled
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker import gpu_worker
from wooly_vllm import block_tables, facts


def warm_up(worker: Any, *, process_local_only: bool = False) -> None:
    """Do nothing. vLLM's function tunes kernels of NVIDIA's libraries, and compiles kernels that a server may never need."""


def install() -> None:
    """Replace the functions. Calling it again changes nothing."""
    gpu_worker.kernel_warmup = warm_up
    block_tables.install()
    if not facts.is_gpu():  # PyTorch's sort needs no compiler; compiling the kernel for a CPU takes a minute
        topk_topp_sampler.HAS_TRITON = False
    compiled.apply_repetition_penalties_cuda = compiled.apply_repetition_penalties_torch
