"""Small models of Hugging Face's architectures: their configurations, and inputs that give each a loss.

Every model is created from its configuration only. Its dropout rates are zero.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

VOCABULARY = 96
#: Options of most decoders and encoders.
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
#: Option names of the GPT-2 family.
GPT = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: Option names of the BART family.
BART = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
PICTURE = {"image_size": 32, "patch_size": 8, "num_channels": 3}
VIT = {k: SIZES[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")} | PICTURE
SPEECH = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,
    "pad_token_id": 0,
}
EXPERTS = GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _tokens(*shape, seed=6):
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def _normal(*shape, seed=7):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _mask():
    """A mask in which the second of two sequences is shorter."""
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 9:] = 0
    return mask


def causal():
    return {"input_ids": _tokens(2, 12), "attention_mask": _mask(), "labels": _tokens(2, 12)}


def unpadded():
    return {"input_ids": _tokens(2, 12), "labels": _tokens(2, 12)}


def classes():
    return {"input_ids": _tokens(2, 12), "attention_mask": _mask(), "labels": torch.tensor([1, 0])}


def tagged():
    return causal() | {"labels": _tokens(2, 12) % 2}


def spans():
    ends = {"start_positions": torch.tensor([1, 4]), "end_positions": torch.tensor([3, 6])}
    return {"input_ids": _tokens(2, 12), "attention_mask": _mask()} | ends


def translation():
    return {"input_ids": _tokens(2, 12), "attention_mask": _mask(), "labels": _tokens(2, 9, seed=8)}


def pictures():
    return {"pixel_values": _normal(2, 3, 32, 32), "labels": torch.tensor([1, 0])}


def larger_pictures():
    return {"pixel_values": _normal(2, 3, 64, 64), "labels": torch.tensor([1, 0])}


def segments():
    return {"pixel_values": _normal(2, 3, 64, 64), "labels": _tokens(2, 64, 64) % 3}


def sound():
    return {"input_values": _normal(2, 600), "labels": _tokens(2, 5)}


def spectrum():
    return {"input_features": _normal(2, 8, 40), "labels": _tokens(2, 9)}


def captioned():
    return {
        "input_ids": _tokens(2, 12),
        "attention_mask": _mask(),
        "pixel_values": _normal(2, 3, 32, 32),
        "return_loss": True,
    }


def unlabelled():
    return {"pixel_values": _normal(2, 3, 64, 64)}


def pointed():
    """Pixel positions first, then words."""
    return (
        causal()
        | {"input_ids": _pictured(16, 20), "attention_mask": torch.ones(2, 20, dtype=torch.long)}
        | {
            "pixel_values": _normal(2, 3, 32, 32),
            "labels": _tokens(2, 20),
        }
    )


def _pictured(places, length):
    tokens = _tokens(2, length)
    tokens[:, :places] = VOCABULARY - 1
    tokens[:, places:] %= VOCABULARY - 1
    return tokens


@dataclass(frozen=True)
class Architecture:
    """One model of the matrix.

    Attributes:
        model: its class in `transformers`.
        config: the class of its configuration.
        options: arguments of the configuration.
        inputs: makes the keyword arguments of `forward`.
        family: name of its family.
    """

    family: str
    model: str
    config: str
    options: dict[str, Any] = field(hash=False)
    inputs: Any = causal

    def build(self, **more):
        """Build the model, with weights from a fixed seed."""
        import transformers

        config = getattr(transformers, self.config)(**self.options | more)
        for part in _parts(config):
            for name, value in vars(part).items():
                if ("drop" in name or name == "dropout") and isinstance(value, float):
                    setattr(part, name, 0.0)
        torch.manual_seed(5)
        model = getattr(transformers, self.model)(config)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        return model


def _parts(config):
    """A configuration and its nested configurations."""
    from transformers import PreTrainedConfig

    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value)


def _decoder(name, options=GROUPED, inputs=causal, family="decoder", model="ForCausalLM", config="Config"):
    return Architecture(family, name + model, name + config, options, inputs)


ARCHITECTURES = {
    "llama": _decoder("Llama"),
    "gpt2": _decoder("GPT2", GPT, model="LMHeadModel"),
    "mistral": _decoder("Mistral", GROUPED | {"sliding_window": 6, "head_dim": 8}),
    "qwen2": _decoder("Qwen2"),
    "qwen3": _decoder("Qwen3", GROUPED | {"head_dim": 16}),
    "gemma": _decoder("Gemma", GROUPED | {"head_dim": 16}),
    "gemma2": _decoder("Gemma2", GROUPED | {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16}),
    "gemma3": _decoder("Gemma3", GROUPED | {"head_dim": 16, "sliding_window": 6}, config="TextConfig"),
    "phi": _decoder("Phi", GROUPED | {"partial_rotary_factor": 0.5}),
    "phi3": _decoder("Phi3"),
    "olmo2": _decoder("Olmo2"),
    "cohere": _decoder("Cohere"),
    "stablelm": _decoder("StableLm"),
    "smollm3": _decoder("SmolLM3"),
    "opt": _decoder("OPT", SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gpt-neo": _decoder(
        "GPTNeo",
        {**SIZES, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 6},
    ),
    "gpt-neox": _decoder("GPTNeoX", SIZES),
    "gptj": _decoder("GPTJ", GPT | {"rotary_dim": 4}),
    "falcon": _decoder("Falcon", SIZES | {"num_kv_heads": 2, "new_decoder_architecture": True}),
    "falcon-alibi": _decoder("Falcon", SIZES | {"alibi": True, "multi_query": True}),
    "bloom": _decoder("Bloom", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "mpt": _decoder("Mpt", {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}),
    "xlnet": _decoder(
        "XLNet",
        {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
        model="LMHeadModel",
    ),
    "mixtral": _decoder("Mixtral", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}, family="experts"),
    "qwen2-moe": _decoder("Qwen2Moe", EXPERTS | {"shared_expert_intermediate_size": 32}, family="experts"),
    "qwen3-moe": _decoder("Qwen3Moe", EXPERTS | {"head_dim": 16}, family="experts"),
    "gpt-oss": _decoder(
        "GptOss",
        GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 6},
        family="experts",
    ),
    "olmoe": _decoder("Olmoe", EXPERTS, family="experts"),
    "deepseek-v3": _decoder(
        "DeepseekV3",
        EXPERTS
        | {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "first_k_dense_replace": 1,
        },
        family="experts",
    ),
    "mamba": _decoder("Mamba", SIZES | {"state_size": 8}, unpadded, "state space"),
    "mamba2": _decoder(
        "Mamba2",
        SIZES | {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
        unpadded,
        "state space",
    ),
    "falcon-mamba": _decoder("FalconMamba", SIZES | {"state_size": 8}, unpadded, "state space"),
    "rwkv": _decoder("Rwkv", SIZES | {"attention_hidden_size": 32, "context_length": 64}, unpadded, "state space"),
    "jamba": _decoder(
        "Jamba",
        GROUPED
        | {
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
        },
        family="state space",
    ),
    "qwen3-next": _decoder(
        "Qwen3Next",
        EXPERTS
        | {
            "head_dim": 8,
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "shared_expert_intermediate_size": 32,
        },
        unpadded,
        "state space",
    ),
    "recurrent-gemma": _decoder(
        "RecurrentGemma",
        GROUPED | {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8},
        unpadded,
        "state space",
    ),
    "bert": _decoder("Bert", SIZES, model="ForMaskedLM", family="encoder"),
    "roberta": _decoder("Roberta", SIZES, classes, "encoder", "ForSequenceClassification"),
    "xlm-roberta": _decoder("XLMRoberta", SIZES, model="ForTokenClassification", family="encoder", inputs=tagged),
    "distilbert": _decoder(
        "DistilBert",
        SIZES | {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
        spans,
        "encoder",
        "ForQuestionAnswering",
    ),
    "electra": _decoder("Electra", SIZES | {"embedding_size": 16}, classes, "encoder", "ForSequenceClassification"),
    "deberta": _decoder(
        "Deberta",
        SIZES | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
        classes,
        "encoder",
        "ForSequenceClassification",
    ),
    "deberta-v2": _decoder(
        "DebertaV2",
        SIZES
        | {
            "relative_attention": True,
            "position_buckets": 8,
            "pos_att_type": ["c2p", "p2c"],
            "norm_rel_ebd": "layer_norm",
        },
        classes,
        "encoder",
        "ForSequenceClassification",
    ),
    "albert": _decoder("Albert", SIZES | {"embedding_size": 16}, family="encoder", model="ForMaskedLM"),
    "mpnet": _decoder("MPNet", SIZES, family="encoder", model="ForMaskedLM"),
    "modernbert": _decoder("ModernBert", SIZES | {"local_attention": 6}, family="encoder", model="ForMaskedLM"),
    "funnel": _decoder(
        "Funnel",
        {"vocab_size": VOCABULARY, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48, "block_sizes": [1, 1]},
        classes,
        "encoder",
        "ForSequenceClassification",
    ),
    "longformer": _decoder(
        "Longformer", SIZES | {"attention_window": 4}, classes, "encoder", "ForSequenceClassification"
    ),
    "big-bird": _decoder("BigBird", SIZES | {"attention_type": "original_full"}, family="encoder", model="ForMaskedLM"),
    "t5": _decoder(
        "T5",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        translation,
        "encoder-decoder",
        "ForConditionalGeneration",
    ),
    "bart": _decoder("Bart", BART, translation, "encoder-decoder", "ForConditionalGeneration"),
    "mbart": _decoder("MBart", BART, translation, "encoder-decoder", "ForConditionalGeneration"),
    "pegasus": _decoder("Pegasus", BART, translation, "encoder-decoder", "ForConditionalGeneration"),
    "marian": _decoder("Marian", BART, translation, "encoder-decoder", "MTModel"),
    "m2m100": _decoder("M2M100", BART, translation, "encoder-decoder", "ForConditionalGeneration"),
    "whisper": _decoder(
        "Whisper",
        BART | {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 20},
        spectrum,
        "speech",
        "ForConditionalGeneration",
    ),
    "wav2vec2": _decoder("Wav2Vec2", SPEECH, sound, "speech", "ForCTC"),
    "hubert": _decoder("Hubert", SPEECH, sound, "speech", "ForCTC"),
    "vit": _decoder("ViT", VIT, pictures, "vision", "ForImageClassification"),
    "deit": _decoder("DeiT", VIT, pictures, "vision", "ForImageClassification"),
    "dinov2": _decoder("Dinov2", VIT, pictures, "vision", "ForImageClassification"),
    "beit": _decoder("Beit", VIT, pictures, "vision", "ForImageClassification"),
    "swin": _decoder(
        "Swin",
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
        pictures,
        "vision",
        "ForImageClassification",
    ),
    "convnext": _decoder(
        "ConvNext",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
        pictures,
        "vision",
        "ForImageClassification",
    ),
    "resnet": _decoder(
        "ResNet",
        {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1]},
        larger_pictures,
        "vision",
        "ForImageClassification",
    ),
    "mobilenet-v2": _decoder(
        "MobileNetV2", {"image_size": 64, "depth_multiplier": 0.25}, larger_pictures, "vision", "ForImageClassification"
    ),
    "segformer": _decoder(
        "Segformer",
        {
            "hidden_sizes": [8, 16, 16, 32],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 1, 2, 2],
            "decoder_hidden_size": 16,
            "num_labels": 3,
        },
        segments,
        "vision",
        "ForSemanticSegmentation",
    ),
    "yolos": _decoder(
        "Yolos",
        VIT | {"image_size": [64, 64], "num_detection_tokens": 6, "num_labels": 3},
        unlabelled,
        "vision",
        "ForObjectDetection",
    ),
    "clip": Architecture(
        "vision",
        "CLIPModel",
        "CLIPConfig",
        {"text_config": SIZES, "vision_config": VIT, "projection_dim": 16},
        captioned,
    ),
    "siglip": Architecture(
        "vision", "SiglipModel", "SiglipConfig", {"text_config": SIZES, "vision_config": VIT}, captioned
    ),
    "llava": Architecture(
        "vision",
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "text_config": GROUPED | {"model_type": "llama"},
            "vision_config": VIT | {"model_type": "clip_vision_model"},
            "image_token_index": VOCABULARY - 1,
        },
        pointed,
    ),
    "detr": _decoder(
        "Detr",
        {
            **{k: v for k, v in BART.items() if k not in ("vocab_size", "max_position_embeddings")},
            "use_timm_backbone": False,
            "use_pretrained_backbone": False,
            "backbone": None,
            "backbone_config": {
                "model_type": "resnet",
                "embedding_size": 8,
                "hidden_sizes": [16, 32],
                "depths": [1, 1],
                "out_features": ["stage2"],
            },
            "num_queries": 5,
            "num_labels": 3,
        },
        unlabelled,
        "vision",
        "ForObjectDetection",
    ),
    "audio-spectrogram": _decoder(
        "AST",
        {k: VIT[k] for k in VIT if k not in PICTURE}
        | {"patch_size": 8, "num_mel_bins": 16, "max_length": 32, "time_stride": 8, "frequency_stride": 8},
        lambda: {"input_values": _normal(2, 32, 16), "labels": torch.tensor([1, 0])},
        "speech",
        "ForAudioClassification",
    ),
}
