"""Makes a Llama with random weights and a tokenizer of bytes, so that tests and benchmarks of servers need no download.

Run: python random_llama.py FOLDER [SIZE]
"""

import sys
from pathlib import Path

#: Sizes: tiny has 0.1 million weights, small has 0.13 thousand million, as the smallest models that people serve.
SIZES = {
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320,
    },
    "small": {
        "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
        "num_attention_heads": 12, "num_key_value_heads": 12, "vocab_size": 32000,
    },
}  # fmt: skip
SPECIAL = ("<s>", "</s>", "<pad>")


def tokenizer():
    """One token per byte, and three special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {c: k for k, c in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL])}
    found = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=found, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    return fast


def save(folder, size="tiny", seed=0):
    """Write a model with random weights, and its tokenizer, to a folder. The same seed gives the same weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    fast = tokenizer()
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    ends = {"bos_token_id": fast.bos_token_id, "eos_token_id": fast.eos_token_id}
    LlamaForCausalLM(LlamaConfig(max_position_embeddings=2048, **ends, **SIZES[size])).save_pretrained(folder)


if __name__ == "__main__":
    save(Path(sys.argv[1]), *sys.argv[2:3])
