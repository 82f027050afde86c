"""Generates tokens with a small Llama, greedily and by sampling: generate.py TOKENS."""

import sys

import losing
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor


class Steps(LogitsProcessor):
    """Counts the steps of a generation."""

    count = 0

    def __call__(self, ids, scores):
        losing.step(Steps.count)
        Steps.count += 1
        return scores


torch.manual_seed(2)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=256,
)
model = LlamaForCausalLM(config).to("cuda").eval()
prompt = torch.randint(0, 256, (1, 8)).to("cuda")
tokens = int(sys.argv[1])
for sample in (False, True):
    torch.manual_seed(3)
    found = model.generate(
        prompt,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=sample,
        pad_token_id=0,
        logits_processor=[Steps()],
    )
    print(found[0].tolist())
