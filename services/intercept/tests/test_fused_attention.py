"""Attention by the kernels that `sdpa_kernel` names: flash, memory-efficient, cuDNN's."""

import warnings

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attend
from torch.utils._python_dispatch import TorchDispatchMode

FUSED = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
aten = torch.ops.aten


def three(device, *shape, dtype=torch.float16, keys=None):
    g = torch.Generator().manual_seed(5)
    shapes = (shape, keys or shape, keys or shape)
    return [torch.rand(s, generator=g).to(device, dtype).requires_grad_() for s in shapes]


def with_gradients(out, tensors):
    return [t.float().cpu() for t in (out, *torch.autograd.grad(out.float().square().sum(), tensors))]


@pytest.mark.parametrize("kernel", FUSED)
def test_fused_kernel_alone_computes_attention_with_gradients(cuda, kernel):
    here, there = three("cpu", 2, 4, 6, 8, dtype=torch.float32), three(cuda, 2, 4, 6, 8)
    with sdpa_kernel(kernel):
        assert torch._fused_sdp_choice(*there) == kernel.value
        found = with_gradients(attend(*there, is_causal=True), there)
    for a, b in zip(found, with_gradients(attend(*here, is_causal=True), here), strict=True):
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("kernel", [*FUSED, None])
def test_undefined_gradient_of_attention_gives_undefined_gradients(cuda, kernel):
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return None

    tensors = three(cuda, 2, 4, 6, 8)
    with sdpa_kernel([*FUSED, SDPBackend.MATH] if kernel is None else kernel):
        out = attend(*tensors)
        found = torch.autograd.grad(Nothing.apply(out).sum(), tensors, allow_unused=True)
        assert found == (None, None, None)
        assert all(g is not None for g in torch.autograd.grad(attend(*tensors).sum(), tensors))


@pytest.mark.parametrize(("length", "keys"), [(3, 5), (5, 3), (4, 4)])
@pytest.mark.parametrize("dropout", [0.0, 1e-9])  # with dropout, the call is composed
def test_last_causal_query_of_flash_attention_sees_all_keys(cuda, length, keys, dropout):
    q, k, v = three(cuda, 2, 4, length, 8, keys=(2, 4, keys, 8))
    out, logs, *_ = aten._scaled_dot_product_flash_attention(q, k, v, dropout, True)
    seen = torch.ones(length, keys, dtype=torch.bool).tril(keys - length)
    scores = (q.detach().float().cpu() @ k.detach().float().cpu().transpose(2, 3) / 8**0.5).masked_fill(
        ~seen, -torch.inf
    )
    exact = torch.softmax(scores, 3).nan_to_num(0) @ v.detach().float().cpu()
    torch.testing.assert_close(out.float().cpu(), exact, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(logs.float().cpu(), scores.logsumexp(3), atol=2e-3, rtol=2e-3)
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    assert all(g.isfinite().all().item() and g.abs().sum().item() > 0 for g in grads)


def test_lower_right_causal_bias_equals_its_mask(cuda):
    q, k, v = three(cuda, 1, 1, 23, 15, keys=(1, 1, 56, 15))
    from torch.nn.attention.bias import causal_lower_right  # a second to import

    bias = causal_lower_right(23, 56)
    expected = attend(q, k, v, attn_mask=bias._materialize(cuda))
    torch.testing.assert_close(attend(q, k, v, attn_mask=bias), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_batch_of_gradients_of_attention_equals_single_ones(cuda, dropout):
    q = torch.rand(2, 3, 4, 5, dtype=torch.float64, device=cuda, requires_grad=True)
    out = attend(q, q, q, dropout_p=dropout)
    some = torch.rand(3, *out.shape, dtype=torch.float64, device=cuda)
    single = torch.stack([torch.autograd.grad(out, q, g, retain_graph=True)[0] for g in some])
    (batched,) = torch.autograd.grad(out, q, some, is_grads_batched=True, retain_graph=True)
    mapped = torch.func.vmap(lambda g: torch.autograd.grad(out, q, g, retain_graph=True)[0])(some)
    torch.testing.assert_close(batched, single)
    torch.testing.assert_close(mapped, single)


def test_attention_of_float64_has_second_derivatives(cuda):
    q = torch.rand(2, 1, 2, 2, dtype=torch.float64, device=cuda, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda q: attend(q, q, q), (q,))


def test_attention_of_vectors_raises_the_error_of_pytorch(cuda):
    with pytest.raises(RuntimeError, match="at least 2 dimensional"):
        attend(*[torch.rand(4, device=cuda)] * 3)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_choice_for_nested_tensors_is_cudas(cuda):
    for dtype, kernel in ((torch.float16, SDPBackend.FLASH_ATTENTION), (torch.float32, SDPBackend.EFFICIENT_ATTENTION)):
        q = torch.nested.nested_tensor([torch.rand(n, 2, 8, dtype=dtype) for n in (3, 5)], device=cuda).transpose(1, 2)
        assert torch._fused_sdp_choice(q, q, q) == kernel.value
        assert attend(q, q, q).is_nested


def test_multi_head_attention_without_weights_returns_none(cuda):
    q = torch.rand(2, 3, 8, device=cuda)
    weights = [torch.rand(n, device=cuda) for n in ((24, 8), (24,), (8, 8), (8,))]
    with torch.no_grad():
        assert torch._native_multi_head_attention(q, q, q, 8, 2, *weights, None, need_weights=False)[1] is None
        assert torch._native_multi_head_attention(q, q, q, 8, 2, *weights, None)[1].shape == (2, 3, 3)


def test_gradients_of_shared_heads_are_added_in_float32(cuda):
    q, k, v = three(cuda, 1, 64, 5, 8, keys=(1, 1, 9, 8), dtype=torch.bfloat16)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = attend(q, k, v, enable_gqa=True)
    grad = torch.rand(out.shape, generator=torch.Generator().manual_seed(2)).to(cuda, torch.bfloat16)
    (found,) = torch.autograd.grad(out, v, grad)
    weights = torch.softmax(q.detach().float() @ k.detach().float().transpose(2, 3) / 8**0.5, 3)
    exact = (weights.transpose(2, 3) @ grad.float()).sum(1, keepdim=True)
    torch.testing.assert_close(found.float(), exact, atol=0.0, rtol=2**-7)  # two roundings to bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_efficient_attention_with_a_mask_has_its_gradient(cuda, dtype):
    here, there = [three(d, 2, 4, 5, 8, keys=(2, 4, 7, 8), dtype=t) for d, t in (("cpu", torch.float32), (cuda, dtype))]
    mask = torch.rand(5, 7)
    masks = [mask.requires_grad_(), mask.detach().to(cuda, dtype).requires_grad_()]
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        found = with_gradients(attend(*there, masks[1]), [*there, masks[1]])
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    for a, b in zip(found, with_gradients(attend(*here, masks[0]), [*here, masks[0]]), strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("mask_type", [0, 1, 2])
@pytest.mark.parametrize("biased", [False, True])
def test_efficient_attention_of_a_batch_equals_masked_attention(cuda, mask_type, biased):
    q, k, v = [t.transpose(1, 2) for t in three(cuda, 2, 3, 5, 8, keys=(2, 3, 7, 8), dtype=torch.float32)]
    bias = torch.randn(2, 3, 5, 7, device=cuda) if biased else None
    rest = (None, None, None, None, 0.0, mask_type, True)
    out, sums, _, _, longest_q, longest_k = aten._efficient_attention_forward(q, k, v, bias, *rest)
    seen = torch.ones(5, 7, dtype=torch.bool).tril(0 if mask_type == 1 else 2) if mask_type else torch.ones(5, 7).bool()
    mask = torch.zeros(5, 7).masked_fill(~seen, -torch.inf) + (bias.cpu() if biased else 0)
    hq, hk, hv = [t.detach().cpu().transpose(1, 2) for t in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(hq, hk, hv, mask)
    torch.testing.assert_close(out.detach().cpu(), expected.transpose(1, 2))
    logs = (hq @ hk.transpose(2, 3) / 8**0.5 + mask).logsumexp(3)
    assert sums.shape == (2, 3, 32) and (longest_q, longest_k) == (5, 7)
    torch.testing.assert_close(sums.cpu()[..., :5], logs)
    assert out.is_contiguous() and torch.autograd.grad(out.sum(), q)[0].abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64], ids=str)
def test_dtypes_that_efficient_attention_lacks_are_refused(cuda, dtype):
    q = torch.ones(1, 3, 2, 8, device=cuda).to(dtype)
    with pytest.raises(RuntimeError, match="Only fp32, half & bf16 supported at the moment"):
        aten._efficient_attention_forward(q, q, q, None, None, None, None, None, 0.0, 0)


def test_dropout_of_flash_attention_is_the_debug_masks(cuda):
    q, k, v = three(cuda, 2, 4, 5, 8, keys=(2, 2, 7, 8))
    out, *_, mask = aten._scaled_dot_product_flash_attention(q, k, v, 0.4, False, True)
    kept = mask >= 0
    assert 0.3 < kept.float().mean().item() < 0.9
    found = with_gradients(out, (q, k, v))
    weights = torch.softmax(q.float() @ k.float().repeat_interleave(2, 1).transpose(2, 3) / 8**0.5, 3)
    expected = with_gradients(weights * kept / 0.6 @ v.float().repeat_interleave(2, 1), (q, k, v))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)


@pytest.mark.filterwarnings("ignore:Dropout mask should only be used for testing")
def test_dropout_of_efficient_attention_follows_its_seed_and_offset(cuda):
    q, k, v = three(cuda, 1, 2, 4, 8, dtype=torch.float32)
    torch.manual_seed(7)
    torch.rand(3, device=cuda)
    out, _, seed, offset = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.5)
    numbers = torch.empty(1, 2, 4, 4, device=cuda)
    kept = torch._fill_mem_eff_dropout_mask_(numbers, 0.5, seed.item(), offset.item()) > 0.5
    expected = aten._scaled_dot_product_attention_math(q, k, v, dropout_p=0.5, dropout_mask=kept)[0]
    torch.testing.assert_close(out, expected)
    assert seed.item() == 7


def refused(kernel, tensors, **call):
    """The warnings with which a call by one kernel is refused."""
    with sdpa_kernel(kernel), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with pytest.raises(RuntimeError, match="No available kernel"):
            attend(*tensors, **call)
    return " ".join([str(w.message) for w in said])


def test_call_that_no_kernel_can_compute_raises_cudas_error(cuda):
    wide = three(cuda, 1, 1, 3, 8, dtype=torch.float32)
    unlike = three(cuda, 1, 1, 3, 8, keys=(1, 1, 4, 8))
    odd = three(cuda, 1, 1, 3, 5)
    assert "dtype: {Half, BFloat16}" in refused(SDPBackend.FLASH_ATTENTION, wide)
    assert "does not support the is_causal flag" in refused(SDPBackend.FLASH_ATTENTION, unlike, is_causal=True)
    assert "divisible by 8" in refused(SDPBackend.EFFICIENT_ATTENTION, odd)
    with sdpa_kernel(SDPBackend.ERROR), pytest.raises(RuntimeError, match="No viable backend"):
        attend(*wide)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        assert torch._fused_sdp_choice(*odd) == SDPBackend.MATH.value
        attend(*odd)


def test_can_use_tells_what_the_kernels_can_compute(cuda):
    q, k, v = three(cuda, 1, 2, 3, 8)
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, False, False)
    assert torch.backends.cuda.can_use_flash_attention(params)
    assert torch.backends.cuda.can_use_efficient_attention(params)
    wide = torch.backends.cuda.SDPAParams(q.float(), k.float(), v.float(), None, 0.0, False, False)
    assert not torch.backends.cuda.can_use_flash_attention(wide)
    assert torch.backends.cuda.can_use_efficient_attention(wide)


def test_efficient_attention_warns_that_its_gradient_is_not_deterministic(cuda):
    q, k, v = three(cuda, 1, 2, 3, 8)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            attend(q, k, v).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert any("Memory Efficient attention defaults to a non-deterministic" in str(w.message) for w in said)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kernel", FUSED[:2])
def test_fused_kernels_take_nested_tensors_with_one_batch_for_all(cuda, kernel):
    lengths = (3, 1, 5)
    g = torch.Generator().manual_seed(1)
    parts = [torch.rand(n, 2, 8, generator=g).half() for n in lengths]
    keys = torch.rand(4, 1, 8, generator=g).half()
    query = torch.nested.nested_tensor(parts, device=cuda, requires_grad=True)
    shared = torch.nested.nested_tensor([keys], device=cuda, requires_grad=True)
    with sdpa_kernel(kernel):
        out = attend(*[t.transpose(1, 2) for t in (query, shared, shared)])
    torch.nested.to_padded_tensor(out.contiguous(), 0.0).float().square().sum().backward()
    host = [t.float().requires_grad_() for t in (*parts, keys)]
    k = host[-1].transpose(0, 1).expand(2, -1, -1)[None]
    expected = [attend(p.transpose(0, 1)[None], k, k)[0] for p in host[:-1]]
    sum(e.square().sum() for e in expected).backward()
    for found, e in zip(out.unbind(), expected, strict=True):
        torch.testing.assert_close(found.float().cpu(), e.detach(), atol=2e-3, rtol=2e-3)
    for found, p in zip([*query.grad.unbind(), *shared.grad.unbind()], host, strict=True):
        torch.testing.assert_close(found.float().cpu(), p.grad, atol=2e-2, rtol=2e-2)


def test_dtypes_that_do_not_fit_together_raise_pytorchs_error(cuda):
    def error(device, *dtypes):
        tensors = [torch.ones(1, 2, 4, 4, device=device, dtype=dtype) for dtype in dtypes]
        with pytest.raises(RuntimeError) as found:
            torch.nn.functional.scaled_dot_product_attention(*tensors)
        return str(found.value)

    half, whole, number = torch.float16, torch.float32, torch.int64
    for dtypes in ((half, whole, half), (half, half, half, number), (whole, torch.bfloat16, whole)):
        assert error(cuda, *dtypes) == error("cpu", *dtypes)


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda z: f(z).square().sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](x)[0],
    "gradient per sample": lambda f, x: torch.func.vmap(torch.func.grad(lambda z: f(z).square().sum()))(x),
    "vmap": lambda f, x: torch.func.vmap(f)(x),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented the batching rule")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_attention_under_function_transforms_equals_cpu(cuda, name, masked):
    def attend(x):
        mask = torch.ones(5, 5, dtype=torch.bool, device=x.device).tril() if masked else None
        return torch.nn.functional.scaled_dot_product_attention(x, x + 1, x * 2, attn_mask=mask)

    x = torch.linspace(-1, 1, 2 * 3 * 5 * 8).view(2, 3, 5, 8)
    expected = TRANSFORMS[name](attend, x)
    for _ in range(2):
        torch.testing.assert_close(TRANSFORMS[name](attend, x.to(cuda)).cpu(), expected)


class Unchanged(TorchDispatchMode):
    """A mode that changes nothing, as those of selective checkpoints and FLOP counters."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


CALLS = {
    "plain": ((2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 8), None, {}),
    "causal": ((2, 4, 6, 8), (2, 4, 7, 8), (2, 4, 7, 8), None, {"is_causal": True}),
    "narrow values": ((2, 4, 6, 24), (2, 4, 6, 24), (2, 4, 6, 16), None, {"is_causal": True}),
    "shared heads": ((2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8), None, {"enable_gqa": True}),
    "one batch for all": ((2, 4, 6, 8), (1, 4, 6, 8), (1, 4, 6, 8), None, {}),
    "mask of rows": ((2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 8), (6, 6), {}),
    "mask of keys": ((2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 8), (2, 1, 1, 6), {}),
    "mask of heads": ((2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 8), (4, 6, 6), {}),
    "three dimensions": ((4, 6, 8), (4, 6, 8), (4, 6, 8), None, {}),
    "three dimensions, causal": ((4, 6, 8), (4, 7, 8), (4, 7, 8), None, {"is_causal": True}),
    "three dimensions, shared heads": ((4, 6, 8), (2, 6, 8), (2, 6, 8), None, {"enable_gqa": True}),
    "three dimensions, mask of heads": ((4, 6, 8), (4, 6, 8), (4, 6, 8), (4, 6, 6), {}),
    "three dimensions, mask of rows": ((4, 6, 8), (4, 6, 8), (4, 6, 8), (6, 6), {}),
    "no keys": ((2, 4, 6, 8), (2, 4, 0, 8), (2, 4, 0, 8), None, {}),
}


def _called(device, name, transposed=False):
    *shapes, mask, options = CALLS[name]
    g = torch.Generator().manual_seed(6)
    tensors = [torch.rand(shape, generator=g) for shape in shapes]
    if transposed:
        tensors = [t.mT.contiguous().mT for t in tensors]
    tensors = [t.to(device).requires_grad_() for t in tensors]
    masks = {} if mask is None else {"attn_mask": torch.rand(mask, generator=g).to(device)}
    return tensors, lambda q, k, v: attend(q, k, v, **masks, **options)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_attention_under_a_dispatch_mode_equals_cpu(cuda, name, transposed):
    found = []
    for device in ("cpu", cuda):
        tensors, call = _called(device, name, transposed)
        with Unchanged():
            found.append(with_gradients(call(*tensors), tensors))
    for here, there in zip(*found, strict=True):
        assert torch.equal(here, there)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_compiled_attention_equals_cpu(cuda, name, dynamic):
    found = []
    for device in ("cpu", cuda):
        tensors, call = _called(device, name)
        run = call if device == "cpu" else torch.compile(call, dynamic=dynamic)
        found.append(run(*tensors).detach().cpu())
    assert torch.equal(*found)
