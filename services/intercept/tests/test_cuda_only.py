"""Operators that ATen computes on GPUs only, or there in another way than on a CPU: the results are those of CUDA."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from wooly.kernels.tracing import Untraced


@pytest.mark.parametrize("out", [False, True])
def test_addmm_activation_approximates_gelu_by_tanh(cuda, out):
    bias, a, b = torch.randn(5), torch.randn(3, 4), torch.randn(4, 5)
    into = {"out": torch.empty(3, 5, device=cuda)} if out else {}
    found = torch._addmm_activation(bias.to(cuda), a.to(cuda), b.to(cuda), beta=2, use_gelu=True, **into)
    torch.testing.assert_close(found.cpu(), F.gelu(2 * bias + a @ b, approximate="tanh"))
    found = torch._addmm_activation(bias.to(cuda), a.to(cuda), b.to(cuda))
    torch.testing.assert_close(found.cpu(), F.relu(bias + a @ b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_operators_of_sync_batch_norm_equal_batch_norm(cuda, dtype):
    x, grad, eps = torch.randn(4, 3, 5).to(dtype), torch.randn(4, 3, 5).to(dtype), 1e-5
    weight, bias = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 1.0, 2.0])
    leaves = [t.float().requires_grad_() for t in (x, weight, bias)]
    running = [torch.zeros(3), torch.ones(3)]
    expected = F.batch_norm(leaves[0], *running, *leaves[1:], training=True, momentum=0.1, eps=eps)
    expected.backward(grad.float())
    halves = [h.to(cuda) for h in (x[:1], x[1:])]  # two processes with 5 and 15 elements per channel
    counts = torch.tensor([5.0, 15.0], device=cuda)
    mean, invstd = [torch.stack(s) for s in zip(*[torch.batch_norm_stats(h, eps) for h in halves], strict=True)]
    mine = [torch.zeros(3, device=cuda), torch.ones(3, device=cuda)]
    mean, invstd = torch.batch_norm_gather_stats_with_counts(halves[0], mean, invstd, *mine, 0.1, eps, counts)
    found = torch.batch_norm_elemt(x.to(cuda), weight.to(cuda), bias.to(cuda), mean, invstd, eps)
    assert found.dtype is dtype
    close = {"rtol": 2e-3, "atol": 2e-3} if dtype is torch.float16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(found.cpu().float(), expected.detach(), **close)
    for a, b in zip(mine, running, strict=True):
        torch.testing.assert_close(a.cpu(), b, **close)
    sums = torch.batch_norm_backward_reduce(grad.to(cuda), x.to(cuda), mean, invstd, weight.to(cuda), True, True, True)
    torch.testing.assert_close(sums[2].cpu(), leaves[1].grad, **close)
    torch.testing.assert_close(sums[3].cpu(), leaves[2].grad, **close)
    back = torch.batch_norm_backward_elemt(
        grad.to(cuda), x.to(cuda), mean, invstd, weight.to(cuda), *sums[:2], counts.to(torch.int32)
    )
    torch.testing.assert_close(back.cpu().float(), leaves[0].grad, **close)


def test_statistics_of_equal_counts(cuda):
    x = torch.randn(4, 3, 5, device=cuda)
    mean, invstd = torch.batch_norm_stats(x, 1e-5)
    found = torch.batch_norm_gather_stats(x, mean[None], invstd[None], None, None, 0.1, 1e-5, 20)
    torch.testing.assert_close(found[0].cpu(), mean.cpu())
    torch.testing.assert_close(found[1].cpu(), invstd.cpu())


def test_multi_margin_loss_of_one_sample_has_its_targets_shape(cuda):
    x = torch.randn(5, device=cuda)
    for target in (torch.tensor(1), torch.tensor([1])):
        assert F.multi_margin_loss(x, target.to(cuda), reduction="none").shape == target.shape
    torch.cuda.synchronize()


def test_masked_softmax_with_whole_mask_of_each_kind(cuda):
    x, mask = torch.randn(2, 3, 4, 4), torch.arange(4).eq(1).expand(2, 3, 4, 4)
    for kind in (0, 1, 2):
        found = torch._masked_softmax(x.to(cuda), mask.to(cuda), 3, kind)
        torch.testing.assert_close(found.cpu(), torch._masked_softmax(x, mask, 3, kind))


def test_module_with_new_parameters_on_conversion(cuda):
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model = nn.Linear(2, 2)
        weight = model.weight
        assert model.double().weight is not weight and weight.dtype is torch.float32
        model.weight.grad = torch.ones(2, 2, dtype=torch.float64)
        weight, grad = model.weight, model.weight.grad
        model.to(cuda)
        assert (weight.device.type, grad.device.type) == ("cpu", "cpu")
        assert (model.weight.device.type, model.weight.grad.device.type) == ("cuda", "cuda")
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def test_svd_takes_the_drivers_of_cusolver(cuda):
    x = torch.tensor([[3.0, 0.0], [0.0, 2.0]], device=cuda)
    for driver in ("gesvd", "gesvdj", "gesvda"):
        assert torch.linalg.svd(x, driver=driver).S.tolist() == [3.0, 2.0]
    with pytest.raises(RuntimeError, match="unknown svd driver"):
        torch.linalg.svd(x, driver="magma")


def test_norm_of_empty_tensor_raises_at_the_call_for_each_order(cuda):
    x = torch.empty(0, 3, device=cuda)
    assert torch.linalg.vector_norm(x, 2.0).item() == 0
    for order in (-1.0, float("inf")):
        with pytest.raises(RuntimeError, match=r"linalg.vector_norm cannot compute"):
            torch.linalg.vector_norm(x, order)


@pytest.mark.parametrize("shape", [(3, 3), (2, 70, 70), (5, 3), (3, 5), (2, 40, 70), (0, 0), (3, 0), (2, 0, 3, 3)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_lu_without_pivoting_gives_factors_without_exchanges(cuda, shape, dtype):
    t = torch.randn(shape, dtype=dtype)
    t.diagonal(dim1=-2, dim2=-1).add_(20)
    p, lower, upper = torch.linalg.lu(t.to(cuda), pivot=False)
    assert p.shape == (0,)
    torch.testing.assert_close((lower @ upper).cpu(), t, rtol=1e-5, atol=1e-4)
    assert torch.equal(lower.cpu(), lower.cpu().tril(-1) + torch.eye(*lower.shape[-2:])) and torch.equal(
        upper, upper.triu()
    )
    packed, pivots, info = torch.linalg.lu_factor_ex(t.to(cuda), pivot=False)
    theirs = torch.linalg.lu_factor_ex(t)
    assert [(a.shape, a.dtype, a.stride()) for a in (packed, pivots, info)] == [
        (a.shape, a.dtype, a.stride()) for a in theirs
    ]
    assert not info.any() and torch.equal(pivots.cpu(), torch.arange(1, min(shape[-2:]) + 1).expand_as(pivots))
    assert torch.equal(torch.lu_unpack(packed, pivots, unpack_pivots=False)[2], upper)


def test_lu_without_pivoting_names_the_first_zero_pivot(cuda):
    t = torch.tensor([[[0.0, 1.0], [1.0, 0.0]], [[2.0, 1.0], [4.0, 2.0]], [[1.0, 0.0], [0.0, 1.0]]], device=cuda)
    assert torch.linalg.lu_factor_ex(t, pivot=False).info.tolist() == [1, 2, 0]
    ones = torch.ones(3, 3, device=cuda)
    lower, upper = torch.linalg.lu(ones, pivot=False)[1:]
    assert torch.equal(lower @ upper, ones)
    for call in (
        lambda: torch.linalg.lu_factor(t, pivot=False),
        lambda: torch.linalg.lu_factor_ex(t, pivot=False, check_errors=True),
    ):
        with pytest.raises(RuntimeError, match=r"U\[1,1\] is zero"):
            call()


def test_lu_without_pivoting_has_gradients_and_outs(cuda):
    t = (torch.randn(3, 3, dtype=torch.float64) + 9 * torch.eye(3, dtype=torch.float64)).to(cuda).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: torch.linalg.lu(t, pivot=False)[1:], t)
    assert torch.autograd.gradcheck(lambda t: torch.linalg.lu_factor(t, pivot=False)[0], t)
    t = t.detach()
    outs = [torch.empty(0, dtype=torch.float64, device=cuda) for _ in range(3)]
    found = torch.linalg.lu(t, pivot=False, out=outs)
    assert all(a is b for a, b in zip(found, outs, strict=True)) and outs[0].shape == (0,)
    torch.testing.assert_close(outs[1] @ outs[2], t)
    with pytest.raises(NotImplementedError, match="Half"):
        torch.linalg.lu_factor(t.half(), pivot=False)


@pytest.mark.parametrize("limit", [3.0, 1e9, 65510.0, -1e9])
def test_limits_that_half_precision_does_not_hold_are_taken(cuda, limit):
    """CUDA compares in float32; the CPU's kernels refuse these limits."""
    host = torch.tensor([-torch.inf, -65504, -2, 0, 2, 65504, torch.inf, torch.nan], dtype=torch.float16)
    x = host.to(cuda)
    calls = (
        *(lambda t: t.clamp(max=limit), lambda t: t.clamp_min(limit), lambda t: t.clamp(-1e9, limit)),
        *(
            lambda t: F.hardtanh(t, -1e9, abs(limit)),
            lambda t: t.clone().clamp_(min=limit),
            lambda t: t.clamp_max(limit),
        ),
        lambda t: torch.clamp(t, limit, 1e9, out=torch.empty_like(t)),
    )
    for call in calls:
        for _ in range(2):
            assert call(x).dtype is torch.float16
            torch.testing.assert_close(call(x).cpu(), call(host.float()).half(), rtol=0, atol=0, equal_nan=True)
    leaf = x.clone().requires_grad_()
    leaf.clamp(-1e9, 1e9).sum().backward()
    assert leaf.grad[1:-2].tolist() == [1.0] * 5


def test_complex_limits_of_clamp_must_be_real(cuda):
    """The error is CUDA's, which names the type of the elements. The CPU's kernel has another type in it."""
    x = torch.tensor([-2.0, 0.5, 3.0], device=cuda)
    for _ in range(2):
        assert x.clamp(0, 1 + 0j).tolist() == [0.0, 0.5, 1.0]
        for call in (
            lambda: x.clamp(1j),
            lambda: x.clamp(max=1 + 1j),
            lambda: x.clamp(0.1, 1j),
            lambda: x.clone().clamp_(1j),
        ):
            with pytest.raises(RuntimeError, match="cannot be converted to type float without overflow"):
                call()
    with pytest.raises(NotImplementedError, match="clamp is not supported for complex types"):
        x.int().clamp(1j)


@pytest.mark.parametrize("axis", [-1, -2, 1])
@pytest.mark.parametrize("kind", ["lengths", "offsets"])
def test_segments_along_an_axis_from_the_end_have_cpus_values_and_gradients(cuda, axis, kind):
    found = []
    for device in ("cpu", cuda):
        x = torch.arange(24.0).reshape(2, 6, 2)[..., 0] if axis == -1 else torch.arange(24.0).reshape(2, 6, 2)
        leaf = x.to(device).requires_grad_()
        parts = torch.tensor([[2, 4], [1, 5]] if kind == "lengths" else [[0, 2, 6], [0, 1, 6]], device=device)
        torch.segment_reduce(leaf, "sum", axis=axis, unsafe=True, **{kind: parts}).square().sum().backward()
        found.append(leaf.grad.cpu())
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["tril_indices", "triu_indices"])
def test_indices_of_a_triangle_are_made_by_function_and_operator(cuda, name):
    """Exported programs call the operator with the device that scripts see."""
    for make in (getattr(torch, name), getattr(torch.ops.aten, name).default):
        for offset in (0, 1, -1):
            found = make(3, 4, offset, device=torch.device("cuda:0"))
            assert found.device == torch.device("cuda:0")
            assert torch.equal(found.cpu(), getattr(torch, name)(3, 4, offset))


def test_second_kernel_of_an_operator_needs_an_override(cuda):
    """PyTorch 2.13 would replace the first kernel without a word, and 2.11 refuses the second one when a session begins."""
    library = Untraced("aten", "IMPL")
    with pytest.raises(RuntimeError, match="already a kernel registered"):
        library.impl("tril_indices", torch.tril_indices, "PrivateUse1")
