"""The platform that tells vLLM what Wooly's "cuda" is. vLLM imports it in each of its processes."""

from __future__ import annotations

import importlib.metadata
import os
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger
from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum

from wooly_vllm import facts, support

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# The name makes the line a part of vLLM's log.
log = init_logger("vllm.wooly")


class WoolyPlatform(Platform):  # type: ignore[misc] # vLLM has no stubs
    """Wooly's "cuda" as a platform of vLLM: PyTorch's operators and Triton's kernels, but none that vLLM compiled for CUDA."""

    _enum = PlatformEnum.OOT
    device_name = "cuda"
    device_type = "cuda"
    dispatch_key = "CUDA"
    dist_backend = "gloo"
    device_control_env_var = "CUDA_VISIBLE_DEVICES"
    simple_compile_backend = "eager"

    @classmethod
    def import_kernels(cls) -> None:
        """Do nothing: vLLM's compiled operators need a GPU in this machine."""

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        torch.cuda.set_device(device)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        torch.cuda.manual_seed_all(seed)

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(*facts.capability(device_id))

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return facts.name(device_id)

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return facts.total_memory(device_id)

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return facts.cores(device_id)

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.max_memory_allocated(device)

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        """False: the device cannot read this machine's memory. vLLM then sends what it would leave in pinned memory."""
        return False

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """The attention of vLLM that is written in Triton.

        Raises:
            ValueError: another one was chosen, or the model's attention is sparse.
        """
        if attn_selector_config.use_sparse:
            raise ValueError("sparse latent attention is compiled for CUDA and does not run on Wooly's device")
        if selected_backend is not None and selected_backend.name not in support.ATTENTION:
            raise ValueError(
                f"the attention backend {selected_backend.name} is compiled for CUDA and does not run on Wooly's device; "
                f"leave --attention-backend out, or choose {', '.join(support.ATTENTION)}"
            )
        if attn_selector_config.use_mla:
            return "vllm.v1.attention.backends.mla.triton_mla.TritonMLABackend"
        return "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"

    @classmethod
    def get_mla_prefill_backend_cls(cls, mla_selector_config: Any) -> Any:
        """The class that computes the attention of prompts in models with latent attention."""
        from wooly_vllm.latent_attention import WoolyMLAPrefill

        return WoolyMLAPrefill

    @classmethod
    def get_punica_wrapper(cls) -> str:
        return "wooly_vllm.adapters.WoolyPunicaWrapper"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        """Accept each dtype: the device computes with all of them."""

    @classmethod
    def supports_fp8(cls) -> bool:
        """Whether the device multiplies 8-bit floats: NVIDIA's from compute capability 8.9 on, AMD's newer ones, and CPUs."""
        return facts.multiplies_fp8()

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return True

    def is_sleep_mode_available(self) -> bool:
        """Whether the memory of a server can be given back: `wooly_vllm.sleeping` does it."""
        return True

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        """True: CUDA graphs are Wooly's own. A replay is one message."""
        return True

    @classmethod
    def get_static_graph_wrapper_cls(cls) -> str:
        """The class that captures and replays, of model runner V1."""
        return "vllm.compilation.cuda_graph.CUDAGraphWrapper"

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: VllmConfig) -> None:
        """Turn `torch.compile` off, and capture whole decode steps as CUDA graphs unless the user asks for another mode."""
        from vllm.config import CompilationMode, CUDAGraphMode

        compilation = vllm_config.compilation_config
        compilation.mode = CompilationMode.NONE
        if compilation.cudagraph_mode is None:
            compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY

    @classmethod
    def opaque_attention_op(cls) -> bool:
        return True

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Choose the worker, and turn off what the device has not: `torch.compile`, custom all-reduce, warm-up of kernels.

        Raises:
            ValueError: the configuration uses what does not work on Wooly's device. The message names all of it.
        """
        from vllm.config import CompilationMode, CUDAGraphMode

        from wooly_vllm import stopping  # vLLM imports the platform before its engine

        refused = support.unsupported(vllm_config)
        if support.needs_fp8(vllm_config) and not cls.supports_fp8():
            refused.append(f"8-bit floats (FP8) on {cls.get_device_name()}, which does not multiply them")
        needed, own = vllm_config.parallel_config.world_size, facts.devices()
        if needed > own:
            refused.append(
                f"{needed} ranks on {own} device{'s'[: own != 1]}: run the server with `wooly run --gpus {needed} …`"
            )
        if refused:
            raise ValueError(
                "vLLM on Wooly does not support: " + "; ".join(refused) + ". docs/guides/serving.md lists what works"
            )
        version = importlib.metadata.version("vllm")
        if not support.is_tested(version):
            log.warning("vLLM %s was not tested with Wooly; tested: %s", version, ", ".join(support.TESTED))
        parallel = vllm_config.parallel_config
        if parallel.worker_cls == "auto":
            parallel.worker_cls = "wooly_vllm.worker.WoolyWorker"
        parallel.disable_custom_all_reduce = True
        stopping.install()
        if facts.has_session():  # a forked process cannot use the session of its parent
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        vllm_config.kernel_config.enable_jit_warmup = False
        compilation = vllm_config.compilation_config
        compilation.mode = CompilationMode.NONE
        if compilation.cudagraph_mode and (why := support.uncaptured(vllm_config)):
            log.info("%s: CUDA graphs are off", why)
            compilation.cudagraph_mode = CUDAGraphMode.NONE
