"""TRL: supervised fine-tuning and direct preference optimization of a small model with random weights."""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

SPECIAL = ["<pad>", "<eos>", "<unk>"]
WORDS = [
    *SPECIAL,
    *["the", "a", "cat", "dog", "sat", "ran", "on", "mat", "hill", "fox", "jumps", "over", "it", "is", "good", "bad"],
]


def tokenizer():
    inner = Tokenizer(models.WordLevel({word: k for k, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            pad_token_id=0,
            eos_token_id=1,
        )
    )


def run(device):
    ordinary = {
        "per_device_train_batch_size": 2, "max_steps": 3, "logging_steps": 1, "report_to": [], "save_strategy": "no",
        "disable_tqdm": True, "use_cpu": device == "cpu", "bf16": False, "dataloader_pin_memory": False, "seed": 0,
        "gradient_checkpointing": False,
    }  # fmt: skip
    texts = Dataset.from_dict({"text": ["the cat sat on the mat", "a dog ran", "the fox jumps over it", "it is good"]})
    pairs = Dataset.from_dict(
        {
            "prompt": ["the cat", "a dog", "it is", "the fox"],
            "chosen": [" sat", " ran", " good", " jumps"],
            "rejected": [" bad"] * 4,
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        tuned = SFTTrainer(
            model(),
            args=SFTConfig(folder, max_length=16, **ordinary),
            train_dataset=texts,
            processing_class=tokenizer(),
        )
        tuned.train()
        preferred = DPOTrainer(
            model(),
            ref_model=model(),
            args=DPOConfig(folder, **ordinary),
            train_dataset=pairs,
            processing_class=tokenizer(),
        )
        preferred.train()
    losses = [[entry["loss"] for entry in t.state.log_history if "loss" in entry] for t in (tuned, preferred)]
    return {"losses": losses, "weight": preferred.model.lm_head.weight}
