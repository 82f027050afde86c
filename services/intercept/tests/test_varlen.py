"""Attention over packed sequences of different lengths: `torch.nn.attention.varlen`."""

import inspect

import pytest
import torch
from torch.nn import functional

QUERIES, KEYS = (3, 5, 1), (4, 5, 6)


@pytest.fixture(scope="module")
def varlen():
    from torch.nn.attention import varlen  # here, because it imports Dynamo, and collecting tests imports this module

    if "seqused_k" not in inspect.signature(varlen.varlen_attn).parameters:
        pytest.skip("this release of PyTorch has a shorter form")
    return varlen


def packed(device, lengths, heads, dtype=torch.float16):
    g = torch.Generator().manual_seed(sum(lengths) + heads)
    return torch.randn(sum(lengths), heads, 8, generator=g).to(device, dtype).requires_grad_()


def offsets(device, lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32).to(device)


def expected(query, key, value, lengths_q, lengths_k, window, scale=None):
    """The attention of each sequence on the host, by a mask."""
    outs, before, behind = [], *window
    for q, k, v in zip(
        *[t.split(n) for t, n in ((query, lengths_q), (key, lengths_k), (value, lengths_k))], strict=True
    ):
        own = torch.arange(len(q))[:, None] + len(k) - len(q)
        keys = torch.arange(len(k))
        mask = torch.ones(len(q), len(k), dtype=torch.bool)
        mask &= (keys <= own + behind) if behind >= 0 else True
        mask &= (keys >= own - before) if before >= 0 else True
        one = [t.transpose(0, 1)[None] for t in (q, k, v)]
        outs.append(
            functional.scaled_dot_product_attention(*one, mask, scale=scale, enable_gqa=True)[0].transpose(0, 1)
        )
    return torch.cat(outs)


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (1, 1)])
def test_outputs_and_gradients_equal_attention_over_each_sequence(cuda, varlen, window, heads):
    found = []
    for device in ("cpu", cuda):
        leaves = [packed(device, QUERIES, heads), packed(device, KEYS, 2), packed(device, KEYS, 2)]
        if device == "cpu":
            out = expected(*[t.float() for t in leaves], QUERIES, KEYS, window).half()
        else:
            places = [offsets(device, n) for n in (QUERIES, KEYS)]
            out = varlen.varlen_attn(*leaves, *places, 5, 6, window_size=window, enable_gqa=heads > 2)
        out.square().sum().backward()
        found.append([t.detach().cpu() for t in (out, *[t.grad for t in leaves])])
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=2e-3, atol=5e-3)


def test_the_sums_of_the_scores_are_returned(cuda, varlen):
    q, places = packed(cuda, QUERIES, 2).detach(), offsets(cuda, QUERIES)
    _, sums = varlen.varlen_attn(q, q, q, places, places, 5, 5, return_aux=varlen.AuxRequest(lse=True))
    parts = [t.transpose(0, 1) for t in q.float().cpu().split(QUERIES)]
    scores = [(t @ t.transpose(1, 2) / 8**0.5).logsumexp(2) for t in parts]
    assert torch.allclose(sums.cpu(), torch.cat(scores, 1), atol=1e-5)


def test_half_precision_and_a_limit_of_used_keys(cuda, varlen):
    q, k = packed(cuda, QUERIES, 2).detach(), packed(cuda, KEYS, 2).detach()
    used = torch.tensor([2, 5, 1], dtype=torch.int32, device=cuda)
    out = varlen.varlen_attn(q, k, k, offsets(cuda, QUERIES), offsets(cuda, KEYS), 5, 6, seqused_k=used)
    assert out.dtype is torch.float16
    shorter = [t[:n] for t, n in zip(k.float().cpu().split(KEYS), (2, 5, 1), strict=True)]
    host = torch.cat(shorter)
    assert torch.allclose(
        out.float().cpu(), expected(q.float().cpu(), host, host, QUERIES, (2, 5, 1), (-1, -1)), atol=1e-2
    )


def test_pages_of_keys_are_refused_with_a_reason(cuda, varlen):
    q, places = packed(cuda, QUERIES, 2).detach(), offsets(cuda, QUERIES)
    with pytest.raises(NotImplementedError, match="block_table"):
        varlen.varlen_attn(
            *(q, q[None], q[None], places, None, 5, 5),
            seqused_k=places[1:],
            block_table=torch.zeros(3, 1, dtype=torch.int32),
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64], ids=str)
def test_dtypes_that_cudas_kernel_lacks_are_refused(cuda, varlen, dtype):
    q, places = packed(cuda, QUERIES, 2).detach().to(dtype), offsets(cuda, QUERIES)
    with pytest.raises(RuntimeError, match="FlashAttention only support fp16 and bf16 data type"):
        varlen.varlen_attn(q, q, q, places, places, 5, 5)


def test_keys_and_values_of_another_dtype_are_refused(cuda, varlen):
    q, places = packed(cuda, QUERIES, 2).detach(), offsets(cuda, QUERIES)
    for name, key, value in (("key", q.float(), q), ("value", q, q.bfloat16())):
        with pytest.raises(RuntimeError, match=f"query and {name} must have the same dtype"):
            varlen.varlen_attn(q, key, value, places, places, 5, 5)
