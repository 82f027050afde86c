"""Operators with dtypes that CUDA has and the CPU lacks: they are computed in a wider dtype."""

import pytest
import torch
import torch.nn.functional as F
from wooly import api
from wooly.dtypes import DTYPES

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}
UNARY = "acos acosh angle asin asinh atan atanh cos cosh exp log rsqrt sigmoid sin sinh sqrt tan tanh prod sum"
HALVES = (torch.float16, torch.bfloat16)
CALLS = {
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 2), (1, 2, 4, 4, 4), HALVES),
    "antialias": (lambda x: F.interpolate(x, (3, 3), mode="bilinear", antialias=True), (1, 2, 6, 6), HALVES),
    "bicubic": (lambda x: F.interpolate(x, (3, 3), mode="bicubic", antialias=True), (1, 2, 6, 6), HALVES),
    "multi_margin": (lambda x: F.multi_margin_loss(x, torch.arange(4, device=x.device)), (4, 5), HALVES),
    "multilabel": (
        lambda x: F.multilabel_margin_loss(x, torch.tensor([[1, 2, -1]] * 4, device=x.device)),
        (4, 3),
        HALVES,
    ),
    **{name: (getattr(torch, name), (3, 4), (torch.complex32,)) for name in UNARY.split()},
    "div": (lambda x: x / (x + 2), (3, 4), (torch.complex32,)),
    "pow": (lambda x: x**2.5, (3, 4), (torch.complex32,)),
    "pow_number": (lambda x: x ** (1 + 2j), (3, 4), (torch.complex32,)),
    "lerp": (lambda x: torch.lerp(x, x + 1, 0.25), (3, 4), (torch.complex32,)),
    "trace": (torch.trace, (4, 4), (torch.complex32,)),
    "fft": (torch.fft.fft, (3, 8), (torch.float16, torch.complex32)),
    "rfft2": (torch.fft.rfft2, (4, 8), (torch.float16,)),
    "irfftn": (torch.fft.irfftn, (4, 8), (torch.complex32,)),
    "ihfft": (lambda x: torch.fft.ihfft(x, norm="ortho"), (8,), (torch.float16,)),
}
NARROW = {torch.float32: torch.float16, torch.complex64: torch.complex32}


def narrowed(t, dtype):
    return t.to(dtype if dtype is torch.bfloat16 else NARROW.get(t.dtype, t.dtype))


def values(t):
    return torch.view_as_real(t) if t.is_complex() else t


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(n, d) for n, (_, _, dtypes) in CALLS.items() for d in dtypes],
    ids=lambda v: str(v).split(".")[-1],
)
def test_operator_without_host_kernel_is_computed_in_wider_dtype(cuda, name, dtype):
    call, shape, _ = CALLS[name]
    wide = torch.randn(shape, dtype=WIDER[dtype]).to(dtype)
    expected = narrowed(call(wide.to(WIDER[dtype])), dtype)
    found = call(wide.to(cuda))
    assert (found.dtype, found.device.type, found.shape) == (expected.dtype, "cuda", expected.shape)
    torch.testing.assert_close(values(found.cpu()), values(expected), rtol=2e-3, atol=2e-3, equal_nan=True)


@pytest.mark.parametrize("name", ["avg_pool3d", "antialias", "bicubic", "multi_margin", "multilabel"])
def test_gradient_without_host_kernel_is_computed_in_wider_dtype(cuda, name):
    call, shape, _ = CALLS[name]
    leaves = [torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape) for _ in range(2)]
    there = leaves[0].to(cuda, torch.float16).requires_grad_()
    here = leaves[1].half().float().requires_grad_()
    call(there).sum().backward()
    call(here).sum().backward()
    assert there.grad.dtype is torch.float16
    torch.testing.assert_close(there.grad.cpu(), here.grad.half(), rtol=2e-3, atol=2e-3)


def test_gradient_of_half_fft_equals_single_precision(cuda):
    x = torch.randn(16).half()
    there, here = x.to(cuda).requires_grad_(), x.float().requires_grad_()
    torch.fft.rfft(there).abs().float().sum().backward()
    torch.fft.rfft(here).abs().sum().backward()
    torch.testing.assert_close(there.grad.cpu(), here.grad.half(), rtol=1e-2, atol=1e-2)


def test_in_place_and_out_without_host_kernel_write_their_tensors(cuda):
    x = torch.randn(3, 4, dtype=torch.complex64).to(torch.complex32)
    expected = x.to(torch.complex64).cos().to(torch.complex32)
    there = x.to(cuda)
    assert there.cos_() is there and torch.equal(values(there.cpu()), values(expected))
    out = torch.empty(0, dtype=torch.complex32, device=cuda)
    assert torch.cos(x.to(cuda), out=out) is out and torch.equal(values(out.cpu()), values(expected))
    summed = torch.sum(x.to(cuda), dim=1, dtype=torch.complex32)
    assert summed.dtype is torch.complex32
    assert torch.sum(x.to(cuda), dtype=torch.complex64).dtype is torch.complex64


def test_rrelu_in_half_writes_its_noise_and_draws_random_numbers(cuda):
    x = -torch.ones(1000, dtype=torch.float16, device=cuda)
    noise = torch.zeros_like(x)
    y = torch.ops.aten.rrelu_with_noise(x, noise, 0.1, 0.3, True)
    assert y.dtype is noise.dtype is torch.float16
    assert torch.equal((-noise).cpu(), y.cpu()) and 0.09 < noise.min().item() < noise.max().item() < 0.31


def test_sums_of_bool_and_complex_numbers_have_dtypes_of_cuda(cuda):
    flags = torch.tensor([[True, False], [False, True]], device=cuda)
    assert torch.equal(flags.abs().cpu(), flags.cpu())
    assert flags.trace().dtype is torch.int64 and flags.trace().item() == 2
    numbers = torch.tensor([1 + 2j, complex("nan"), 3 - 1j], device=cuda)
    assert torch.nansum(numbers).item() == 4 + 1j
    assert torch.nansum(numbers.to(torch.complex32)).item() == 4 + 1j


@pytest.mark.parametrize("dtype", [torch.int16, torch.bfloat16, torch.float32])
def test_power_of_other_dtype_and_complex_number_equals_cpu(cuda, dtype):
    x = torch.tensor([1, 2, 3], dtype=dtype)
    if torch.result_type(x, 1j) not in DTYPES:  # from torch 2.14 on, a dtype of two bfloat16
        with pytest.raises(NotImplementedError, match="BComplex32"):
            x.cuda() ** (1 + 2j)
        return
    there = api._attached.link.device["torch_version"]
    if dtype is torch.bfloat16 and there != torch.__version__.partition("+")[0]:
        pytest.skip("which complex type belongs to bfloat16 depends on the release of PyTorch")
    found, expected = x.cuda() ** (1 + 2j), x ** (1 + 2j)
    assert found.dtype is expected.dtype and found.cpu().equal(expected)


def test_power_of_half_and_complex_number_is_complex_half(cuda):
    x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float16)
    found = x.cuda() ** (1 + 2j)
    assert found.dtype is torch.complex32 and torch.view_as_real(found.cpu()).equal(
        torch.view_as_real((x.float() ** (1 + 2j)).to(torch.complex32))
    )


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_grid_sample_in_half_is_rounded_once(cuda, mode, dtype):
    x, grid = torch.randn(1, 2, 8, 8).to(dtype), (torch.rand(1, 6, 6, 2) * 2 - 1).to(dtype)
    leaves = [x.to(cuda).requires_grad_(), x.float().requires_grad_()]
    found = F.grid_sample(leaves[0], grid.to(cuda), mode=mode, align_corners=False)
    expected = F.grid_sample(leaves[1], grid.float(), mode=mode, align_corners=False)
    assert torch.equal(found.cpu(), expected.to(dtype))
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(leaves[0].grad.cpu(), leaves[1].grad.to(dtype), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dims", [2, 3])
def test_fractional_pooling_in_half_has_the_windows_of_float32(cuda, dims, dtype):
    """The bounds of the windows are products of the samples. In bfloat16 they are several elements away."""
    pool = getattr(F, f"fractional_max_pool{dims}d")
    x = torch.randn(2, 3, *(301, 41, 5)[:dims]).to(dtype)
    samples = torch.full((2, 3, dims), 0.9, dtype=dtype)
    how = {"kernel_size": 3, "output_size": (100, 13, 2)[:dims], "return_indices": True}
    leaf, wide = x.to(cuda).requires_grad_(), x.float().requires_grad_()
    found, at = pool(leaf, _random_samples=samples.to(cuda), **how)
    expected, expected_at = pool(wide, _random_samples=samples.float(), **how)
    assert found.dtype == dtype
    assert torch.equal(at.cpu(), expected_at)
    assert torch.equal(found.detach().cpu().float(), expected.detach())
    (expected.sum() + found.cpu().float().sum()).backward()
    assert torch.equal(leaf.grad.cpu().float(), wide.grad)


def test_transforms_below_the_checks_of_dtypes_take_half_precision(cuda):
    """PyTorch's references call them."""
    x = torch.tensor([1.0, 2.0, 4.0, 8.0]).half()
    found = torch.ops.aten._fft_r2c(x.to(cuda), [0], 0, True)
    assert found.dtype is torch.complex32
    expected = torch.fft.rfft(x.float())
    torch.testing.assert_close(found.to(torch.complex64).cpu(), expected, rtol=1e-3, atol=1e-3)
    again = torch.ops.aten._fft_c2r(found, [0], 0, 4)
    assert again.dtype is torch.float16 and again.cpu().tolist() == [4.0, 8.0, 16.0, 32.0]


@pytest.mark.parametrize("name", ["fft", "rfft", "irfft", "hfft", "ihfft", "fft2", "hfft2", "ihfftn"])
def test_transforms_write_half_precision_into_out(cuda, name):
    x = torch.arange(16.0).reshape(4, 4).remainder(3)
    transform = getattr(torch.fft, name)
    expected = transform(x)
    narrow = torch.complex32 if expected.is_complex() else torch.float16
    for given in (x.shape, (0,)):
        out = torch.empty(expected.shape if given == x.shape else given, dtype=narrow, device=cuda)
        assert transform(x.half().to(cuda), out=out) is out and out.shape == expected.shape
        torch.testing.assert_close(out.to(expected.dtype).cpu(), expected, rtol=1e-3, atol=1e-2)
    wide = torch.empty(expected.shape, dtype=expected.dtype, device=cuda)
    torch.testing.assert_close(transform(x.to(cuda), out=wide).cpu(), expected)
    torch.testing.assert_close(transform(x.half().to(cuda), out=wide).cpu(), expected)


@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("dtype", HALVES)
def test_weight_norm_in_half_has_norms_and_gradients_of_cpu(cuda, dtype, dim):
    found = []
    for where in ("cpu", cuda):
        layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 4), dim=dim).to(dtype)
        for p in layer.parameters():
            p.data = torch.linspace(-1, 2, p.numel()).reshape(p.shape).to(dtype)
        layer.to(where)(torch.ones(2, 3, dtype=dtype, device=where)).sum().backward()
        found.append([p.grad.cpu() for p in layer.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    g, v = torch.ones(4, 1, dtype=dtype, device=cuda), torch.ones(4, 3, dtype=dtype, device=cuda)
    assert torch.ops.aten._weight_norm_interface(v, g)[1].dtype is torch.float32


@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu],
)
def test_equal_compares_tensors_of_eight_bits(cuda, dtype):
    a, b = [torch.tensor(values).to(dtype).to(cuda) for values in ([1.0, 2.0, 4.0], [1.0, 2.0, 8.0])]
    assert torch.equal(a, a.clone()) and torch.equal(a[:2], b[:2])
    assert not torch.equal(a, b) and not torch.equal(a, a[:2])
    with pytest.raises(RuntimeError):
        torch.equal(a, a.float())
