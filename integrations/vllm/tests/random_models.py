"""Makes tiny models with random weights: mixtures of experts, latent attention, states, quantised ones, and adapters."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from integrations.vllm.tests import random_llama

GROUP = 32
#: Rank of adapters.
RANK = 8
#: Places of eight numbers in a word of AWQ's format.
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
FP8, FP8_MAX = torch.float8_e4m3fn, 448.0
_LATENT = {
    "kv_lora_rank": 256, "qk_rope_head_dim": 64, "qk_nope_head_dim": 16, "v_head_dim": 8, "num_key_value_heads": 4,
    "moe_intermediate_size": 32, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_shared_experts": 1,
    "routed_scaling_factor": 1.0, "topk_group": 1,
}  # fmt: skip
_STATES = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 32}
_LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4, "head_dim": 32,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
#: Models with a state per request.
WITH_STATES = ("mamba", "falcon-mamba", "jamba", "mamba2", "granite-hybrid", "qwen3next")
#: For each model: the name of its class in Transformers, sizes beside those of the tiny Llama, and what only vLLM reads.
MODELS = {
    "mixtral": ("Mixtral", _EXPERTS, {}),
    "qwen3moe": (
        "Qwen3Moe",
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16, "norm_topk_prob": True},
        {},
    ),
    "deepseek2": (
        "DeepseekV2",
        _LATENT | {"q_lora_rank": None, "n_routed_experts": 4, "n_group": 1, "topk_method": "greedy"},
        {},
    ),
    "deepseek3": (
        "DeepseekV3",
        _LATENT | {"q_lora_rank": 24, "n_routed_experts": 8, "n_group": 2},
        {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
    "gpt-oss": (
        "GptOss",
        _EXPERTS | {"head_dim": 32, "sliding_window": 32, "max_position_embeddings": 131072},
        {},
    ),
    "mamba": ("Mamba", {"state_size": 16}, {}),
    "falcon-mamba": ("FalconMamba", {"state_size": 16}, {}),
    "jamba": (
        "Jamba",
        {
            "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
            "mamba_d_state": 16, "use_mamba_kernels": False,
        },
        {},
    ),
    "mamba2": ("Mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 32}, {}),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        _EXPERTS | _STATES | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 64},
        {},
    ),
    "qwen3next": (
        "Qwen3Next",
        _LINEAR
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"shared_expert_intermediate_size": 32, "layer_types": ["linear_attention", "full_attention"]},
        {},
    ),
}  # fmt: skip


def save(folder, name):
    """Write a model of `MODELS` with random weights, and its tokenizer, to a folder."""
    import transformers

    kind, sizes, more = MODELS[name]
    fast = random_llama.tokenizer()
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    ends = {"bos_token_id": fast.bos_token_id, "eos_token_id": fast.eos_token_id, "max_position_embeddings": 2048}
    config = getattr(transformers, f"{kind}Config")(**{**random_llama.SIZES["tiny"], **ends, **sizes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    if name == "gpt-oss":  # Transformers makes the biases 0
        for key, parameter in model.named_parameters():
            if key.endswith(("bias", "sinks")):
                torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    _change_config(folder, **more)


def _change_config(folder, **more):
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))


def packed(values, dim, bits, order=None):
    """Pack integers of `bits` bits into int32, the lowest bits first, along a dimension."""
    per = 32 // bits
    parts = values.long().unflatten(dim, (-1, per)).movedim(dim + 1, 0)
    word = sum(parts[at] << (bits * k) for k, at in enumerate(order or range(per)))
    return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32).contiguous()


def _by_group(weight):
    """Weights `[out, in]` as `[groups, GROUP, out]`."""
    return weight.t().float().unflatten(0, (-1, GROUP))


def _with_zeros(weight):
    """Four bits with zero points: numbers, scales, zero points, and the weights that they mean."""
    groups = _by_group(weight)
    low, high = groups.amin(1), groups.amax(1)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    numbers = (groups / scales.float()[:, None] + zeros[:, None]).round().clamp(0, 15)
    meant = ((numbers - zeros[:, None]) * scales.float()[:, None]).flatten(0, 1).t()
    return numbers.flatten(0, 1), scales, zeros, meant


def _symmetric(weight, bits):
    half = 2 ** (bits - 1)
    groups = _by_group(weight)
    scales = (groups.abs().amax(1) / (half - 1)).half()
    numbers = (groups / scales.float()[:, None]).round().clamp(-half, half - 1) + half
    return numbers.flatten(0, 1), scales, ((numbers - half) * scales.float()[:, None]).flatten(0, 1).t()


def _awq(weight):
    numbers, scales, zeros, meant = _with_zeros(weight)
    parts = {"qweight": packed(numbers, 1, 4, AWQ_ORDER), "qzeros": packed(zeros, 1, 4, AWQ_ORDER), "scales": scales}
    return parts, meant


def _gptq(weight, bits):
    numbers, scales, meant = _symmetric(weight, bits)
    zeros = torch.full(scales.shape, 2 ** (bits - 1) - 1)  # the format stores zero points one too small
    parts = {"qweight": packed(numbers, 0, bits), "qzeros": packed(zeros, 1, bits), "scales": scales}
    return parts | {"g_idx": (torch.arange(len(numbers)) // GROUP).int()}, meant


def _packed_groups(weight):
    numbers, scales, meant = _symmetric(weight, 4)
    parts = {"weight_packed": packed(numbers.t().contiguous(), 1, 4), "weight_scale": scales.t().contiguous()}
    return parts | {"weight_shape": torch.tensor(weight.shape)}, meant


def _scaled(weight, scale, dtype, name="weight_scale"):
    numbers = (weight / scale if dtype == FP8 else (weight / scale).round()).to(dtype)
    return {"weight": numbers, name: scale}, numbers.float() * scale


def _fp8_blocks(weight):
    blocks = weight.unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP))
    scale = blocks.abs().amax((1, 3)) / FP8_MAX
    whole = scale.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    parts, meant = _scaled(weight, whole, FP8)
    return {"weight": parts["weight"], "weight_scale_inv": scale}, meant


def _by_row(weight, most):
    return weight.abs().amax(1, keepdim=True) / most


def _compressed(form, weights, inputs):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*gate$"], "config_groups": {"group_0": group},
    }  # fmt: skip


def _eight(kind, strategy, dynamic):
    return {"num_bits": 8, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": dynamic}


#: For each format: what a layer's weight becomes, with the weight that it means; the configuration.
FORMATS = {
    "awq": (_awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    **{
        f"gptq{bits}": (
            lambda weight, bits=bits: _gptq(weight, bits),
            {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": False, "sym": True},
        )
        for bits in (4, 8)
    },
    "fp8": (
        lambda weight: _scaled(weight, weight.abs().max() / FP8_MAX, FP8),
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
    ),
    "fp8-blocks": (
        _fp8_blocks,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [GROUP, GROUP]},
    ),
    "compressed-int4": (
        _packed_groups,
        _compressed(
            "pack-quantized",
            {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP},
            None,
        ),
    ),
    "compressed-int8": (
        lambda weight: _scaled(weight, _by_row(weight, 127), torch.int8),
        _compressed("int-quantized", _eight("int", "channel", False), _eight("int", "token", True)),
    ),
    "compressed-fp8": (
        lambda weight: _scaled(weight, _by_row(weight, FP8_MAX), FP8),
        _compressed("float-quantized", _eight("float", "channel", False), _eight("float", "token", True)),
    ),
}  # fmt: skip


def quantise(source, form, folder):
    """Write a model in a format of `FORMATS` to `folder`, and to `folder/plain` a model with the weights that it means."""
    plain = Path(folder) / "plain"
    plain.mkdir(parents=True)
    for path in Path(source).iterdir():
        if path.name != "model.safetensors":
            shutil.copy(path, folder)
            shutil.copy(path, plain)
    make, config = FORMATS[form]
    stored, meant = {}, {}
    for name, weight in load_file(Path(source) / "model.safetensors").items():
        if name.endswith("_proj.weight") or ".experts." in name:
            parts, meant[name] = make(weight)
            stored |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
        else:
            stored[name] = meant[name] = weight.half()
    save_file({k: v.contiguous() for k, v in stored.items()}, Path(folder) / "model.safetensors", {"format": "pt"})
    save_file({k: v.float().contiguous() for k, v in meant.items()}, plain / "model.safetensors", {"format": "pt"})
    _change_config(folder, quantization_config=config, dtype="float16")


def _mxfp4(weight):
    """Weights `[experts, in, out]` as blocks of 32 numbers, their exponents, and the weights that they mean."""
    groups = weight.transpose(1, 2).float().unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1).log2().floor() - 2
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    scaled = groups / exponents.exp2()[..., None]
    numbers = (scaled.abs()[..., None] - values).abs().argmin(-1)
    meant = (values[numbers] * scaled.sign() * exponents.exp2()[..., None]).flatten(-2).transpose(1, 2)
    bits = numbers + 8 * (scaled < 0)
    blocks = (bits[..., ::2] + 16 * bits[..., 1::2]).to(torch.uint8)
    return {"blocks": blocks, "scales": (exponents + 127).to(torch.uint8)}, meant


def pack_experts(source, folder):
    """Write gpt-oss with experts in the format MXFP4 to `folder`, and to `folder/plain` with the weights that they mean."""
    plain = Path(folder) / "plain"
    plain.mkdir(parents=True)
    for path in Path(source).iterdir():
        if path.name != "model.safetensors":
            shutil.copy(path, folder)
            shutil.copy(path, plain)
    stored, meant = {}, {}
    for name, weight in load_file(Path(source) / "model.safetensors").items():
        if name.endswith(("_up_proj", "down_proj")):
            parts, meant[name] = _mxfp4(weight)
            stored |= {f"{name}_{part}": value for part, value in parts.items()}
        else:
            stored[name] = meant[name] = weight.bfloat16()
    save_file({k: v.contiguous() for k, v in stored.items()}, Path(folder) / "model.safetensors", {"format": "pt"})
    save_file({k: v.float().contiguous() for k, v in meant.items()}, plain / "model.safetensors", {"format": "pt"})
    others = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    _change_config(
        folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": others}, dtype="bfloat16"
    )


def adapt(source, folder, seed):
    """Write an adapter of all layers of a model, also of its experts, to `folder`, and to `folder/merged` the adapted model."""
    merged = Path(folder) / "merged"
    merged.mkdir(parents=True)
    for path in Path(source).iterdir():
        if path.is_file() and path.name != "model.safetensors":
            shutil.copy(path, merged)
    torch.manual_seed(seed)
    weights, parts = load_file(Path(source) / "model.safetensors"), {}
    for name, weight in weights.items():
        if name.endswith("_proj.weight") or ".experts." in name:
            a, b = torch.randn(RANK, weight.shape[1]) / 8, torch.randn(weight.shape[0], RANK) / 50
            key = f"base_model.model.{name.removesuffix('.weight')}"
            parts |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
            weights[name] = (weight + 2 * (b @ a)).contiguous()
    save_file(parts, Path(folder) / "adapter_model.safetensors")
    save_file(weights, merged / "model.safetensors", {"format": "pt"})
    targets = sorted({key.split(".")[-3] for key in parts})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": targets,
    }
    (Path(folder) / "adapter_config.json").write_text(json.dumps(config))
