"""x-transformers: decoders with several kinds of positions, heads and gates are trained, and generate with a cache."""

import torch
from x_transformers import Decoder, TransformerWrapper
from x_transformers.autoregressive_wrapper import AutoregressiveWrapper

VARIANTS = {
    "rotary": {"rotary_pos_emb": True, "attn_flash": True, "attn_dim_head": 32},
    "alibi": {"alibi_pos_bias": True, "alibi_num_heads": 2, "ff_glu": True, "use_rmsnorm": True},
    "buckets": {"rel_pos_bias": True, "sandwich_norm": True},
    "memories": {"attn_qk_norm": True, "attn_num_mem_kv": 4, "attn_pre_talking_heads": True},
    "sparse": {"attn_sparse_topk": 4, "gate_residual": True, "attn_kv_heads": 2},
}


def run(device):
    results = {}
    tokens = (torch.arange(2 * 33).reshape(2, 33) * 7 % 61).to(device)
    for name, options in VARIANTS.items():
        layers = Decoder(dim=32, depth=2, heads=4, **{"attn_dim_head": 8, **options})
        model = AutoregressiveWrapper(TransformerWrapper(num_tokens=64, max_seq_len=64, attn_layers=layers)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(tokens)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
        results[name] = losses
        written = model.eval().generate(tokens[:, :5], 8, temperature=0.0, cache_kv=name == "rotary")
        results[f"{name} generated"] = written
    return results
