"""What of vLLM does not work on Wooly's device, as far as a server's configuration tells. The guide (serving.md) lists all.

The functions take vLLM's configuration, but this module does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Releases of vLLM, by the first two numbers of their version, that the tests have run with.
TESTED = ("0.32",)
#: Attention backends, as vLLM names them.
ATTENTION = ("TRITON_ATTN",)


def _parallel(config: Any) -> bool:
    parallel = config.parallel_config
    sizes = ("tensor", "pipeline", "data", "prefill_context", "decode_context")
    return any(getattr(parallel, f"{name}_parallel_size", 1) > 1 for name in sizes)


def _speculation(config: Any) -> bool:
    return config.speculative_config is not None and config.speculative_config.method != "ngram"


#: For each part of a configuration: whether the configuration uses it, and what the error says about it.
_RULES: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (_parallel, "more than one device per server (tensor, pipeline, data or context parallelism)"),
    (
        lambda c: bool(c.model_config and c.model_config.quantization),
        "quantised weights: their kernels are operators that vLLM compiled for CUDA, which need a GPU in this machine",
    ),
    (
        lambda c: bool(c.model_config and (c.model_config.is_hybrid or c.model_config.has_inner_state)),
        "models with a state per request (Mamba and hybrids): their kernels read addresses of tensors from memory",
    ),
    (
        lambda c: bool(c.model_config and c.model_config.is_moe),
        "mixtures of experts: the kernels that sort tokens by expert are compiled for CUDA",
    ),
    (
        lambda c: bool(c.model_config and c.model_config.use_mla),
        "models with multi-head latent attention (DeepSeek): their attention kernels are compiled for CUDA",
    ),
    (
        lambda c: bool(c.model_config and c.model_config.enable_prompt_embeds),
        "embeddings as prompts (--enable-prompt-embeds): their kernel reads addresses of tensors from memory",
    ),
    (
        lambda c: c.cache_config is not None and c.cache_config.cache_dtype != "auto",
        "a cache of keys and values in another dtype than the model's (--kv-cache-dtype)",
    ),
    (_speculation, "speculative decoding by other methods than ngram"),
    (
        lambda c: c.kv_transfer_config is not None,
        "transfers of the cache of keys and values between servers (--kv-transfer-config)",
    ),
)


def unsupported(config: Any) -> list[str]:
    """What a server's configuration uses and what does not work here.

    Args:
        config: vLLM's configuration (`vllm.config.VllmConfig`).
    """
    return [text for uses, text in _RULES if uses(config)]


def uncaptured(config: Any) -> str:
    """Why decode steps cannot be CUDA graphs; empty: they can.

    A graph keeps its buffers. Sleep mode frees them, and the adapters of a step are other operators than those of the next step.

    Args:
        config: vLLM's configuration (`vllm.config.VllmConfig`).
    """
    if config.lora_config is not None:
        return "--enable-lora"
    return "--enable-sleep-mode" if config.model_config is not None and config.model_config.enable_sleep_mode else ""


def is_tested(version: str) -> bool:
    """Whether the tests have run with a release of vLLM."""
    return ".".join(version.split(".")[:2]) in TESTED
