"""What of vLLM does not work on Wooly's device, as far as a server's configuration tells. The guide (serving.md) lists all.

The functions take vLLM's configuration, but this module does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Releases of vLLM, by the first two numbers of their version, that the tests have run with.
TESTED = ("0.32", "0.33")
#: Formats of quantised weights, as vLLM names them, whose kernels are Triton's or PyTorch's.
QUANTISED = ("auto_awq", "awq", "auto_gptq", "gptq", "moe_wna16", "fp8", "compressed-tensors", "mxfp4", "gpt_oss_mxfp4")
#: Kinds of models, as Transformers names them, with the first form of Mamba.
FIRST_MAMBA = ("mamba", "falcon_mamba", "jamba")
#: Dtypes of the cache of keys and values, as vLLM names them.
CACHE_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3")
#: Attention backends, as vLLM names them.
ATTENTION = ("TRITON_ATTN", "TRITON_MLA")


def _parallel(config: Any, *kinds: str) -> bool:
    return any(getattr(config.parallel_config, f"{kind}_parallel_size", 1) > 1 for kind in kinds)


def _speculation(config: Any) -> bool:
    return config.speculative_config is not None and config.speculative_config.method != "ngram"


def _quantisation(config: Any) -> bool:
    return bool(config.model_config and config.model_config.quantization) and (
        config.model_config.quantization not in QUANTISED
    )


#: For each part of a configuration: whether the configuration uses it, and what the error says about it.
_RULES: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (
        lambda c: _parallel(c, "data", "prefill_context", "decode_context"),
        "data or context parallelism (tensor and pipeline parallelism work)",
    ),
    (
        lambda c: _parallel(c, "tensor", "pipeline") and bool(c.model_config and c.model_config.enable_sleep_mode),
        "sleep mode of a server with several devices",
    ),
    (
        _quantisation,
        "quantised weights in other formats than AWQ, GPTQ, FP8, MXFP4 and compressed-tensors: their kernels are operators that "
        "vLLM compiled for CUDA, which need a GPU in this machine",
    ),
    (
        lambda c: hasattr(getattr(c.model_config, "hf_text_config", None), "index_topk"),
        "sparse latent attention (DeepSeek from V3.2 on): its kernels are compiled for CUDA",
    ),
    (
        lambda c: bool(c.model_config and c.model_config.enable_prompt_embeds),
        "embeddings as prompts (--enable-prompt-embeds): their kernel reads addresses of tensors from memory",
    ),
    (
        lambda c: c.cache_config is not None and c.cache_config.cache_dtype not in CACHE_DTYPES,
        "a cache of keys and values in another dtype than the model's (--kv-cache-dtype)",
    ),
    (
        lambda c: (
            c.lora_config is not None
            and _parallel(c, "tensor")
            and c.lora_config.fully_sharded_loras
            and c.model_config.is_moe
        ),
        "adapters that are divided among devices (--fully-sharded-loras) in mixtures of experts",
    ),
    (
        lambda c: (
            c.speculative_config is not None
            and getattr(getattr(c.model_config, "hf_text_config", None), "model_type", "") in FIRST_MAMBA
        ),
        "speculative decoding of the first form of Mamba: vLLM keeps no state for each token of a draft (Mamba 2 works)",
    ),
    (
        lambda c: (
            c.speculative_config is not None
            and bool(c.model_config and c.model_config.has_inner_state and not c.model_config.is_hybrid)
            and not c.use_v2_model_runner
        ),
        "speculative decoding of Mamba by vLLM's model runner V1, which does not count accepted tokens for it (V2 works)",
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


def needs_fp8(config: Any) -> bool:
    """Whether a server computes with 8-bit floats, as its configuration tells: weights in FP8's format, or the cache.

    Args:
        config: vLLM's configuration (`vllm.config.VllmConfig`).
    """
    of_weights = config.model_config is not None and config.model_config.quantization == "fp8"
    return of_weights or (config.cache_config is not None and config.cache_config.cache_dtype.startswith("fp8"))


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
