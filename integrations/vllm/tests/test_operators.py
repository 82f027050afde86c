"""Operators that vLLM compiled for CUDA, made of PyTorch's operators, against plain loops. These tests need no vLLM."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from wooly_testkit import forks
from wooly_testkit.executor import executor_process
from wooly_vllm import operators

operators.install()
MOE, PLAIN, CACHE = torch.ops._moe_C, torch.ops._C, torch.ops._C_cache_ops
seeds = st.integers(0, 2**32 - 1)


def drawn(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(seed, low, high, *shape, dtype=torch.int32):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def aligned(ids, experts, block, expert_map, size, blocks):
    """What `moe_align_block_size` writes, place by place."""
    places = {e: [] for e in range(experts)}
    for place, expert in enumerate(ids.flatten().tolist()):
        if 0 <= expert < experts:
            expert = expert if expert_map is None else int(expert_map[expert])
            if expert >= 0:
                places[expert].append(place)
    found, of_block = [], []
    for expert, mine in places.items():
        padded = mine + [ids.numel()] * (-len(mine) % block)
        found += padded
        of_block += [expert] * (len(padded) // block)
    rest = 0 if expert_map is None else -1
    return found + [ids.numel()] * (size - len(found)), of_block + [rest] * (blocks - len(of_block)), len(found)


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(0, 20), st.integers(1, 4), st.integers(1, 9), st.sampled_from([1, 4, 16]), st.booleans())
def test_tokens_are_sorted_by_expert_and_padded_to_blocks(seed, tokens, k, experts, block, mapped):
    ids = whole(seed, -1, experts + 1, tokens, k)
    expert_map = whole(seed + 1, -1, experts, experts) if mapped else None
    size = ids.numel() + experts * (block - 1)
    blocks = -(-size // block)
    ours = [torch.full((n,), 77, dtype=torch.int32) for n in (size, blocks, 1)]
    scatter = torch.full((ids.numel(), 1), 77, dtype=torch.int32)
    MOE.moe_align_block_size(ids, experts, block, *ours, expert_map, scatter)
    want = aligned(ids, experts, block, expert_map, size, blocks)
    assert (ours[0].tolist(), ours[1].tolist(), ours[2].item()) == want
    taken = set(want[0])
    assert scatter.flatten().tolist() == [p if p in taken else -1 for p in range(ids.numel())]


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(0, 9), st.integers(1, 8), st.data())
def test_experts_of_a_token_have_the_largest_scores(seed, tokens, experts, data):
    k = data.draw(st.integers(1, experts))
    name = data.draw(st.sampled_from(["softmax", "sigmoid"]))
    bias = drawn(seed + 1, experts) if data.draw(st.booleans()) else None
    padding = whole(seed + 2, 0, 2, tokens).bool() if data.draw(st.booleans()) else None
    renormalize = data.draw(st.booleans())
    gating = whole(seed, -2, 3, tokens, experts).half()  # equal scores are frequent
    weights, ids, rows = torch.empty(tokens, k), *(torch.empty(tokens, k, dtype=torch.int32) for _ in range(2))
    if name == "softmax":
        MOE.topk_softmax(weights, ids, rows, gating, renormalize, bias, padding)
        scores, factor = gating.float().softmax(-1), 1.0
    else:
        MOE.topk_sigmoid(weights, ids, rows, gating, renormalize, bias, 2.5, padding)
        scores, factor = gating.float().sigmoid(), 2.5
    for t in range(tokens):
        by = scores[t] if bias is None else scores[t] + bias
        best = sorted(range(experts), key=lambda e: (-by[e].item(), e))[:k]
        taken = scores[t, best]
        taken = taken / taken.sum() if renormalize else taken
        torch.testing.assert_close(weights[t], taken * factor)
        assert ids[t].tolist() == ([-1] * k if padding is not None and padding[t] else best)
        assert rows[t].tolist() == [j * tokens + t for j in range(k)]


def test_results_of_experts_are_added_where_an_expert_has_computed():
    parts, ids = drawn(1, 3, 2, 8, dtype=torch.float16), torch.tensor([[0, 1], [-1, 2], [1, -1]])
    out = torch.empty(3, 8, dtype=torch.float16)
    MOE.moe_sum(parts, out)
    assert torch.equal(out, parts.float().sum(1).half())
    parts[1, 0] = parts[2, 1] = float("nan")
    MOE.moe_sum(parts, out, ids)
    assert torch.equal(out[1], parts[1, 1]) and torch.equal(out[2], parts[2, 0])
    MOE.moe_sum(parts, out, ids, torch.tensor([0, -1, 1], dtype=torch.int32))
    assert torch.equal(out[0], parts[0, 0]) and torch.equal(out[2], torch.zeros(8).half())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_activations(dtype):
    x = drawn(1, 5, 16, dtype=dtype)
    gate, up = x.float().chunk(2, -1)
    out = torch.empty(5, 8, dtype=dtype)
    for call, want in (
        (PLAIN.silu_and_mul, gate * gate.sigmoid() * up),
        (PLAIN.gelu_and_mul, torch.nn.functional.gelu(gate) * up),
        (PLAIN.gelu_tanh_and_mul, torch.nn.functional.gelu(gate, approximate="tanh") * up),
    ):
        call(out, x)
        torch.testing.assert_close(out.float(), want, rtol=2e-2, atol=2e-2) if dtype != torch.float32 else (
            torch.testing.assert_close(out, want)
        )
    PLAIN.silu_and_mul_with_clamp(out, x, 0.5, 1.7, 1.0)
    gate, up = gate.clamp(max=0.5), up.clamp(-0.5, 0.5)
    torch.testing.assert_close(out, (gate * (1.7 * gate).sigmoid() * (up + 1)).to(dtype))


def test_gated_activation_of_gpt_oss():
    x, out = drawn(1, 5, 16) * 9, torch.empty(5, 8)
    PLAIN.swigluoai_and_mul(out, x)
    gate, up = x[:, ::2].clamp(max=7), x[:, 1::2].clamp(-7, 7)
    torch.testing.assert_close(out, gate * (1.702 * gate).sigmoid() * (up + 1))


def nearest_fp8(values):
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).float()


@settings(max_examples=30, deadline=None)
@given(seeds, st.integers(1, 6), st.sampled_from([16, 32]), st.floats(1e-6, 1e6))
def test_floats_of_eight_bits_come_back_within_their_precision(seed, tokens, width, size):
    x = drawn(seed, tokens, width) * size
    out, scale = torch.empty(tokens + 3, width, dtype=torch.float8_e4m3fn), torch.empty(1)
    PLAIN.dynamic_scaled_fp8_quant(out, x, scale)
    assert scale.item() == pytest.approx(max(x.abs().max().item() / 448, 1 / (448 * 512)), rel=1e-5)
    torch.testing.assert_close(out[:tokens].float() * scale, x, rtol=0.07, atol=scale.item() / 256)
    scales = torch.empty(tokens, 1)
    PLAIN.dynamic_per_token_scaled_fp8_quant(out[:tokens], x, scales, None)
    torch.testing.assert_close(scales, (x.abs().amax(1, keepdim=True) / 448).clamp(min=1 / (448 * 512)))
    PLAIN.dynamic_per_token_scaled_fp8_quant(out[:tokens], x, scales, torch.tensor([size / 4]))
    assert scales.max().item() <= max(size / 4 / 448, 1 / (448 * 512)) * 1.00001


@pytest.mark.parametrize(
    ("scale", "group", "whole_scale"),
    [
        (torch.tensor([2.0]), None, torch.full((4, 8), 2.0)),
        (torch.tensor([1.0, 2.0, 4.0, 8.0]), (1, -1), torch.tensor([1.0, 2.0, 4.0, 8.0])[:, None].expand(4, 8)),
        (torch.arange(1.0, 9.0), (-1, 1), torch.arange(1.0, 9.0).expand(4, 8)),
        (
            torch.tensor([[1.0, 2.0], [4.0, 8.0]]), None,
            torch.tensor([[1.0, 2.0], [4.0, 8.0]]).repeat_interleave(2, 0).repeat_interleave(4, 1),
        ),
    ],
    ids=["tensor", "tokens", "channels", "blocks"],
)  # fmt: skip
def test_given_scales_of_eight_bit_floats(scale, group, whole_scale):
    x, out = drawn(3, 4, 8) * 100, torch.empty(4, 8, dtype=torch.float8_e4m3fn)
    PLAIN.static_scaled_fp8_quant(out, x, scale, group)
    assert torch.equal(out.float(), nearest_fp8(x * (1 / whole_scale)))


@settings(max_examples=30, deadline=None)
@given(seeds, st.integers(1, 6), st.booleans())
def test_integers_of_eight_bits_come_back_within_a_step(seed, tokens, symmetric):
    x = drawn(seed, tokens, 16) + (0 if symmetric else 3)
    x[0] = 0
    out, scale = torch.empty(tokens, 16, dtype=torch.int8), torch.empty(tokens, 1)
    zero = None if symmetric else torch.empty(tokens, 1, dtype=torch.int32)
    PLAIN.dynamic_scaled_int8_quant(out, x, scale, zero)
    back = (out.float() - (0 if symmetric else zero)) * scale
    assert ((back - x).abs() <= scale * 1.01).all()
    static = torch.empty_like(out)
    PLAIN.static_scaled_int8_quant(
        static, x, torch.tensor([0.5]), None if symmetric else torch.tensor([-7], dtype=torch.int32)
    )
    assert torch.equal(static, ((x / 0.5).round() + (0 if symmetric else -7)).clamp(-128, 127).to(torch.int8))


@settings(max_examples=30, deadline=None)
@given(seeds, st.sampled_from([2, 4, 8]), st.booleans())
def test_product_with_packed_weights(seed, bits, second_format):
    rows, columns, groups, per = 64, 32, 4, 32 // bits
    q = whole(seed, 0, 2**bits, rows, columns, dtype=torch.int64)
    zeros = whole(seed + 1, 0 if second_format else 1, 2**bits, groups, columns, dtype=torch.int64)
    scales = drawn(seed + 2, groups, columns).abs()

    def packed(values, dim):
        parts = values.unflatten(dim, (-1, per)).movedim(dim + 1, 0)
        word = sum(part << (bits * k) for k, part in enumerate(parts))
        return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32)

    stored = packed(zeros if second_format else zeros - 1, 1)
    x, by = drawn(seed + 3, 5, rows), torch.arange(rows) // (rows // groups)
    want = x @ ((q - zeros[by]).float() * scales[by])
    torch.testing.assert_close(PLAIN.gptq_gemm(x, packed(q, 0), stored, scales, True, second_format, bits), want)


@pytest.mark.parametrize("skip_scale", [(), (False,), (True,)])
def test_latent_states_are_written_to_their_slots(skip_scale):
    """In 8-bit floats, divided by the scale unless vLLM says that it is 1."""
    states, positions = drawn(0, 3, 8), drawn(1, 3, 4)
    slots = torch.tensor([5, -1, 2])  # blocks of two slots; padding goes to block 0
    cache = torch.zeros(4, 2, 12, dtype=torch.uint8)
    CACHE.concat_and_cache_mla(states, positions, cache, slots, "fp8", torch.tensor(0.25), *skip_scale)
    expected = nearest_fp8(torch.cat((states, positions), 1) / (1 if skip_scale == (True,) else 0.25))
    found = cache.view(torch.float8_e4m3fn).float()
    assert torch.equal(found[2, 1], expected[0]) and torch.equal(found[1, 0], expected[2])
    assert not found[3].any() and not found[1, 1].any()


def test_installing_again_changes_nothing():
    before = len(operators._LIBRARIES)
    operators.install()
    assert len(operators._LIBRARIES) == before > 0


def _on_device(libraries, *options):
    """The results of `operator_cases.py` on an executor that offers these libraries."""

    def start(module, *arguments, **more):
        return forks.Forked(module, *arguments, *options, **more)

    folder = Path(__file__).parent
    env = {"PYTHONPATH": str(folder), "WOOLY_EXECUTOR_LIBRARIES": libraries}
    with executor_process(environment=env, start=start) as running:
        asked = running.endpoints[0], running.session_id, running.token
        done = forks.run("operator_cases", *asked, like="wooly", cwd=folder, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


GELU = [[0.0, pytest.approx(6 * 0.8413447)]]
SILU = [[0.0, pytest.approx(6 * 0.7310586)]]


@pytest.mark.parametrize(
    ("libraries", "options", "gelu", "product"),
    [
        ("", (), GELU, 4),
        ("compiled_operators", ("--opaque-kernels",), [[7, 7]], 8),
        ("compiled_operators", (), GELU, 4),  # the tenant may not run them
    ],
)
def test_operator_runs_in_library_of_executor_if_there_is_one(libraries, options, gelu, product):
    found = _on_device(libraries, *options)
    assert found == [gelu, [[product] * 8] * 2, SILU]
