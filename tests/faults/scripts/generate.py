"""Generates tokens with a small Llama of random weights, repeatedly, and prints them. `generate.py SEED [DEVICE]`."""

import hashlib
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

seed, device = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "cuda"
torch.manual_seed(seed)
config = LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0,
)  # fmt: skip
model = LlamaForCausalLM(config).eval().to(device)
name = hashlib.sha256()
for turn in range(6):
    prompt = torch.arange(1 + turn, 9 + turn).reshape(1, 8).to(device)
    tokens = model.generate(prompt, max_new_tokens=12, do_sample=False)
    name.update(tokens.cpu().numpy().tobytes())
    if device == "cuda":
        time.sleep(0.5)
print("result", name.hexdigest())
