"""Sentence-Transformers: a small model with random weights is built, trained with a contrastive loss, and encodes."""

import tempfile
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer, losses, util
from sentence_transformers.sentence_transformer import modules as models
from transformers import BertConfig, BertModel, BertTokenizerFast

WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "mat", "hill", "quick", "brown", "fox", "jumps", "over", "lazy"]


def run(device):
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = Path(folder, "vocab.txt")
        vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
        BertTokenizerFast(str(vocabulary)).save_pretrained(folder)
        config = BertConfig(
            vocab_size=20,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        BertModel(config).save_pretrained(folder)
        transformer = models.Transformer(folder, max_seq_length=16)
        pooling = models.Pooling(transformer.get_embedding_dimension())
        model = SentenceTransformer(modules=[transformer, pooling, models.Normalize()], device=device)
    texts = [
        "the cat sat on the mat",
        "a dog ran",
        "the quick brown fox jumps over the lazy dog",
        "a cat ran on a hill",
    ]
    before = model.encode(texts, convert_to_tensor=True)
    loss = losses.MultipleNegativesRankingLoss(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    values = []
    for _ in range(4):
        features = [
            {k: v.to(device) for k, v in model.preprocess([a]).items() if torch.is_tensor(v)} for a in texts[:2]
        ]
        value = loss(features, torch.arange(1, device=device))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        values.append(value.item())
    after = model.encode(texts, convert_to_tensor=True, batch_size=2)
    return {"before": before, "losses": values, "after": after, "similarity": util.cos_sim(after, after)}
