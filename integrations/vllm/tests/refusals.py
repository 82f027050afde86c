"""Configures vLLM with what does not work on Wooly's device, and prints each error as a line of JSON. `test_refusals.py` runs it.

Arguments: a folder for configurations of models, which need no weights, and the folder of a model.
"""

import json
import sys
from pathlib import Path

from transformers import DeepseekV2Config, Lfm2Config, LlamaConfig, MambaConfig, MixtralConfig
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "num_key_value_heads": 4, "n_routed_experts": 4, "moe_intermediate_size": 32,
}  # fmt: skip
#: Models: the class of the configuration, the name of the model's class, and more sizes.
MODELS = {
    "experts": (MixtralConfig, "MixtralForCausalLM", {}),
    "mamba": (MambaConfig, "MambaForCausalLM", {}),
    "hybrid": (Lfm2Config, "Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}),
    "latent attention": (DeepseekV2Config, "DeepseekV2ForCausalLM", LATENT),
}
QUANTISED = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "mxfp4": {"quant_method": "mxfp4"},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8"},
}
#: Options of an engine for a plain model.
OPTIONS = {
    "fp8 at start": {"quantization": "fp8", "dtype": "bfloat16"},
    "cache": {"kv_cache_dtype": "fp8_e5m2"},
    "embeddings as prompts": {"enable_prompt_embeds": True},
    "draft model": {"speculative_config": {"num_speculative_tokens": 2}},
    "transfer": {"kv_transfer_config": KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")},
    "tensor parallel": {"tensor_parallel_size": 2},
    "pipeline parallel": {"pipeline_parallel_size": 2},
    "data parallel": {"data_parallel_size": 2},
    "nothing": {},
}


def saved(folder, kind, name, **more):
    """Write the configuration of a model. Returns its folder."""
    config = kind(**SIZES | more)
    config.architectures = [name]
    config.save_pretrained(folder)
    return str(folder)


def cases(folder, model):
    """For each case: the options of the engine."""
    for name, (kind, of, more) in MODELS.items():
        yield name, {"model": saved(folder / name, kind, of, **more)}
    ngrams = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    for name in ("mamba", "hybrid"):
        yield f"speculation of {name}", {"model": str(folder / name), "speculative_config": ngrams}
    yield "adapters of experts", {"model": str(folder / "experts"), "enable_lora": True}
    divided = {"fully_sharded_loras": True, "tensor_parallel_size": 2}
    yield "divided adapters of experts", {"model": str(folder / "experts"), "enable_lora": True} | divided
    for name, how in QUANTISED.items():
        path = saved(folder / name, LlamaConfig, "LlamaForCausalLM", quantization_config=how)
        yield name, {"model": path, "dtype": "bfloat16"}
    for name, options in OPTIONS.items():
        if name == "draft model":
            options["speculative_config"]["model"] = model
        yield name, {"model": model} | options


if __name__ == "__main__":
    for name, options in cases(Path(sys.argv[1]), sys.argv[2]):
        try:
            EngineArgs(**{"dtype": "float32", "skip_tokenizer_init": True} | options).create_engine_config()
        except Exception as e:
            print(json.dumps({name: str(e)}), flush=True)
        else:
            print(json.dumps({name: None}), flush=True)
