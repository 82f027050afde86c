"""Functions of vLLM that this platform replaces. They call operators compiled for CUDA, or expect a GPU of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import vllm._custom_ops as compiled
import vllm.compilation.cuda_graph as graphs
import vllm.model_executor.model_loader.base_loader as loaders
from vllm.distributed import parallel_state
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker import gpu_worker

from wooly_vllm import (
    block_tables,
    cache_blocks,
    expert_adapters,
    facts,
    kernels,
    mxfp4,
    selective_scan,
    states,
    steps_ahead,
    stopping,
    transfers,
)


def warm_up(worker: Any, *, process_local_only: bool = False) -> None:
    """Do nothing. vLLM's function tunes kernels of NVIDIA's libraries, and compiles kernels that a server may never need."""


def request_memory(snapshot: Any, cache_config: Any, external_weight_memory: int = 0) -> int:
    """Bytes that the server may take: `gpu_memory_utilization` of what the session can get.

    vLLM's function asks for this part of the whole device, and refuses to start if another session has some of it.

    Raises:
        NotImplementedError: the weights are in another process.
    """
    if external_weight_memory:
        raise NotImplementedError("weights that another process holds are not supported on Wooly's device")
    return int(snapshot.free_memory * cache_config.gpu_memory_utilization)


def load_model(self: Any, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
    """Load a model into this machine's memory, and send it to the device.

    vLLM's function writes the parts of a file to parts of the device's weights. Whole weights are sent by their content, so those
    that another server of the tenant has are neither sent nor stored again.
    """
    load_config = vllm_config.load_config
    if load_config.device is not None:
        return loaders.BaseModelLoader.load_model(self, vllm_config, model_config, prefix)
    load_config.device = "cpu"
    try:
        model = loaders.BaseModelLoader.load_model(self, vllm_config, model_config, prefix)
    finally:
        load_config.device = None
    return model.to(vllm_config.device_config.device)


def keep(tensors: Any) -> Any:
    """Replaces `weak_ref_tensors` in model runner V1: the results of a graph. The executor shares inner memory without it."""
    return tensors


@contextmanager
def graph_capture(self: Any, context: Any = None) -> Iterator[Any]:
    """Replaces `GroupCoordinator.graph_capture`: the stream on which graphs with a group's collectives are captured.

    vLLM's function demands the communicator of CUDA, whose all-reduce of its own must know when a capture begins. Here, a capture
    contains the collectives of torch.distributed.
    """
    context = context or parallel_state.GraphCaptureContext(torch.cuda.Stream())
    context.stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(context.stream):
        yield context


def install() -> None:
    """Replace the functions. Calling it again changes nothing."""
    gpu_worker.kernel_warmup = warm_up
    gpu_worker.request_memory = request_memory
    graphs.weak_ref_tensors = keep
    parallel_state.GroupCoordinator.graph_capture = graph_capture
    stopping.install()
    steps_ahead.install()
    block_tables.install()
    cache_blocks.install()
    states.install()
    kernels.install()
    expert_adapters.install()
    mxfp4.install()
    transfers.install()
    DefaultModelLoader.load_model = load_model
    if not facts.is_gpu():  # PyTorch's sort needs no compiler; compiling the kernel for a CPU takes a minute
        topk_topp_sampler.HAS_TRITON = False
    compiled.selective_scan_fwd = selective_scan.scan
    compiled.apply_repetition_penalties_cuda = compiled.apply_repetition_penalties_torch
