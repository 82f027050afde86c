"""Strides of results equal the CPU's. The order of later sums depends on the strides, and so do the bits of their results."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from wooly_testkit.effort import examples


def steps(t):
    """Strides of the dimensions whose size is larger than 1."""
    return [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("last", ["none", "input", "weight", "both"])
@pytest.mark.parametrize("dims", [2, 3])
def test_convolution_channels_last_result_has_strides_of_cpu(cuda, dims, last, kernel, transposed):
    torch.manual_seed(0)
    make = {(2, False): nn.Conv2d, (2, True): nn.ConvTranspose2d, (3, False): nn.Conv3d, (3, True): nn.ConvTranspose3d}
    model = make[dims, transposed](4, 6, kernel)
    x = torch.randn(2, 4, *[6] * dims)
    layout = torch.channels_last if dims == 2 else torch.channels_last_3d
    if last in ("input", "both"):
        x = x.to(memory_format=layout)
    if last in ("weight", "both"):
        model = model.to(memory_format=layout)

    def run(device):
        there = make[dims, transposed](4, 6, kernel).to(device)
        there.load_state_dict(model.state_dict())
        if last in ("weight", "both"):
            there = there.to(memory_format=layout)
        a = x.to(device).requires_grad_()
        result = there(a)
        result.square().sum().backward()
        return [result.detach(), a.grad, there.weight.grad, there.bias.grad]

    for ours, theirs in zip(run(cuda), run("cpu"), strict=True):
        assert steps(ours) == steps(theirs)
        assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("convolution", [F.conv1d, F.conv_transpose1d], ids=["plain", "transposed"])
@pytest.mark.parametrize("last", ["input", "weight", "both"])
@pytest.mark.parametrize("length", [1, 4])
def test_convolution_1d_of_permuted_tensors_result_has_strides_of_cpu(cuda, length, last, convolution):
    """Also the strides of dimensions of size 1: a later product chooses its kernel by them."""
    torch.manual_seed(0)
    x, weight, given = torch.randn(2, length, 6), torch.randn(6, 3, 6), torch.randn(2, 6, length)
    x = x.transpose(1, 2) if last != "weight" else x.transpose(1, 2).contiguous()
    weight = weight.transpose(1, 2) if last != "input" else weight.transpose(1, 2).contiguous()

    def run(device):
        a, w = [t.to(device).requires_grad_() for t in (x, weight)]
        result = convolution(a, w, padding=1)
        return [result.detach(), *torch.autograd.grad(result, (a, w), given.to(device))]

    for ours, theirs in zip(run(cuda), run("cpu"), strict=True):
        assert ours.stride() == theirs.stride()
        assert torch.equal(ours.cpu(), theirs)


def test_gradients_of_transposed_convolution_with_empty_result_are_zeros(cuda):
    x, weight = [torch.ones(sizes, device=cuda, requires_grad=True) for sizes in ((2, 3, 1), (3, 4, 2))]
    bias = torch.ones(4, device=cuda, requires_grad=True)
    result = F.conv_transpose1d(x, weight, bias, padding=1)
    assert result.shape == (2, 4, 0)
    result.sum().backward()
    for t in (x, weight, bias):
        assert t.grad.shape == t.shape
        assert not t.grad.any()


@pytest.mark.parametrize("shape", [(0, 12, 4, 4), (2, 12, 0, 4)])
def test_shuffles_of_empty_tensors_have_shapes_of_other_tensors(cuda, shape):
    """As on CUDA. The CPU's `pixel_unshuffle` returns empty tensors in the shape of its input."""
    x = torch.ones(shape, device=cuda, requires_grad=True)
    for shuffle, expected in (
        (F.pixel_shuffle, (shape[0], 3, shape[2] * 2, 8)),
        (F.pixel_unshuffle, (shape[0], 48, shape[2] // 2, 2)),
    ):
        y = shuffle(x, 2)
        assert y.shape == expected
        (grad,) = torch.autograd.grad(y.sum(), x)
        torch.cuda.synchronize()
        assert grad.shape == shape
    out = torch.empty(0, device=cuda)
    torch.ops.aten.pixel_unshuffle.out(x.detach(), 2, out=out)
    torch.cuda.synchronize()
    assert out.shape == (shape[0], 48, shape[2] // 2, 2)


def test_gradient_of_another_shape_than_a_transposed_convolution_is_refused(cuda):
    x, weight, grad = [torch.ones(sizes, device=cuda) for sizes in ((2, 3, 1), (3, 4, 2), (2, 4, 1))]
    given = (grad, x, weight, [4], [1], [1], [1], True, [0], 1, [True] * 3)
    with pytest.raises(RuntimeError, match=r"grad_output must have shape \[2, 4, 0\]"):
        torch.ops.aten.convolution_backward(*given)[0].cpu()


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular", "constant"])
def test_padding_of_channels_last_tensor_and_its_gradient_have_strides_of_cpu(cuda, dims, mode):
    torch.manual_seed(0)
    last = torch.channels_last if dims == 2 else torch.channels_last_3d
    x = torch.randn(2, 3, *(5, 6, 4)[:dims]).contiguous(memory_format=last)

    def run(device, layout):
        a = x.to(device).requires_grad_()
        result = nn.functional.pad(a, (1, 2, 2, 0, 1, 0)[2 * (3 - dims) :], mode=mode)
        return [
            result.detach(),
            *torch.autograd.grad(result, a, torch.ones_like(result).contiguous(memory_format=layout)),
        ]

    for layout in (torch.contiguous_format, last):
        for ours, theirs in zip(run(cuda, layout), run("cpu", layout), strict=True):
            assert ours.stride() == theirs.stride()
            assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("convolution", [nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d, nn.Conv3d])
@pytest.mark.parametrize(("groups", "input"), [(1, True), (1, False), (4, False)])
def test_bias_of_a_convolution_is_trained_beside_a_frozen_weight(cuda, convolution, groups, input):
    torch.manual_seed(0)
    layer = convolution(4, 4, 3, groups=groups)
    x = torch.randn(2, 4, *[6] * (layer.weight.dim() - 2))

    def run(device):
        model = copy.deepcopy(layer).to(device)
        model.weight.requires_grad_(False)
        a = x.to(device).requires_grad_(input)
        model(a).square().sum().backward()
        assert model.weight.grad is None
        return [model.bias.grad, *([a.grad] if input else [])]

    for ours, theirs in zip(run(cuda), run("cpu"), strict=True):
        assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize(
    "call",
    [
        lambda t: torch.linalg.svd(t),
        lambda t: torch.linalg.svd(t, full_matrices=False),
        lambda t: torch.linalg.eig(t[..., :5, :5]),
        lambda t: [torch.fft.rfftn(t)],
        lambda t: [torch.fft.rfftn(t, dim=(0, 1))],
        lambda t: [torch.fft.hfft2(t.to(torch.complex64))],
        lambda t: [torch.fft.irfftn(t.to(torch.complex64), dim=(0, 2))],
        lambda t: [
            nn.functional.max_unpool2d(
                *nn.functional.max_pool2d(t[None].to(memory_format=torch.channels_last), 2, return_indices=True), 2
            )
        ],
    ],
)
def test_library_operator_result_has_strides_of_cpu(cuda, call):
    torch.manual_seed(0)
    x = torch.randn(4, 8, 6)
    for ours, theirs in zip(call(x.to(cuda)), call(x), strict=True):
        assert steps(ours) == steps(theirs)
        assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y, n: torch.copysign(x, n),
        lambda x, y, n: x // n,
        lambda x, y, n: x // y,
        lambda x, y, n: torch.div(x, y, rounding_mode="floor"),
        lambda x, y, n: x // 2,
        lambda x, y, n: torch.complex(x, y.expand_as(x)),
        lambda x, y, n: torch.polar(x, n),
        lambda x, y, n: torch.heaviside(y[0], x),
        lambda x, y, n: torch.logaddexp(y[0], x),
        lambda x, y, n: torch.logaddexp2(y[0], x),
        lambda x, y, n: torch.logical_and(y[0], x),
        lambda x, y, n: torch.logical_or(y[0], x),
        lambda x, y, n: torch.logical_xor(y[0], x),
        lambda x, y, n: torch.xlogy(x, x.contiguous()),
        lambda x, y, n: torch.special.xlog1py(x, x.contiguous()),
        lambda x, y, n: torch.angle(x.to(torch.complex64)),
        lambda x, y, n: torch.angle(x),
        lambda x, y, n: 2.0**x,
        lambda x, y, n: torch.ldexp(y[0], x),
    ],
)
def test_elementwise_result_of_permuted_operands_has_strides_of_cpu(cuda, call):
    x, y, n = torch.rand(4, 3, 2).permute(2, 1, 0), torch.rand(4, 3).t() + 1, torch.tensor(2.0)
    ours, theirs = call(x.to(cuda), y.to(cuda), n.to(cuda)), call(x, y, n)
    assert ours.stride() == theirs.stride()
    assert torch.equal(ours.cpu(), theirs)


def test_gradient_of_squared_error_is_contiguous_for_permuted_operands(cuda):
    found = []
    for where in ("cpu", cuda):
        x, y = [torch.arange(12.0, device=where).reshape(3, 4).t().detach().requires_grad_() for _ in range(2)]
        loss = F.mse_loss(x, y, reduction="none")
        found.append([t.stride() for t in torch.autograd.grad(loss, (x, y), torch.ones(4, 3, device=where))])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["elu", "hardsigmoid", "hardswish", "hardtanh", "logit", "softplus", "silu", "gelu"])
def test_activation_gradient_has_strides_of_cpu(cuda, name):
    function = getattr(F, name, None) or getattr(torch, name)
    found = []
    for where in ("cpu", cuda):
        x = torch.linspace(0.1, 0.9, 96).reshape(2, 12, 4).to(where).requires_grad_()
        outer = torch.linspace(-1, 1, 96).reshape(2, 4, 12).to(where).transpose(1, 2)
        (inner,) = torch.autograd.grad(function(x), x, outer)
        found.append((inner.stride(), inner.tolist()))
    assert found[0] == found[1]


def test_as_strided_negative_stride_raises_error_of_cpu(cuda):
    messages = []
    for device in ("cpu", cuda):
        with pytest.raises(RuntimeError) as error:
            torch.ones(4, device=device).as_strided((2,), (-1,), 3)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: F.conv2d(F.adaptive_avg_pool2d(x, 1), w),
        lambda x, w: F.conv2d(x, w.expand(4, 8, 5, 5)),
        lambda x, w: F.relu(F.conv2d(F.adaptive_avg_pool2d(x, 1), w)) * 2,
        lambda x, w: F.gelu(F.adaptive_avg_pool2d(x, 1)) + F.adaptive_avg_pool2d(x, 1).contiguous(),
        lambda x, w: F.layer_norm(F.adaptive_avg_pool2d(x, 1).permute(0, 2, 3, 1), (8,)).permute(0, 3, 1, 2),
        lambda x, w: F.batch_norm(F.conv2d(F.adaptive_avg_pool2d(x, 1), w), None, None, training=True),
        lambda x, w: F.group_norm(F.adaptive_avg_pool2d(x, 1), 2),
        lambda x, w: F.interpolate(F.adaptive_avg_pool2d(x, 1), (1, 1), mode="bilinear"),
        lambda x, w: F.mse_loss(F.adaptive_avg_pool2d(x, 1), F.adaptive_avg_pool2d(x * 2, 1), reduction="none"),
    ],
)
def test_dimensions_of_size_one_have_strides_of_cpu(cuda, call):
    found = []
    for where in ("cpu", cuda):
        torch.manual_seed(0)
        x = torch.randn(2, 8, 5, 5).to(memory_format=torch.channels_last).to(where).requires_grad_()
        result = call(x, torch.randn(4, 8, 1, 1).to(where))
        (inner,) = torch.autograd.grad(result.square().sum(), x)
        found.append((result.stride(), inner.stride(), result.tolist(), inner.tolist()))
    assert found[0] == found[1]


def test_remainder_of_integers_with_dimension_of_size_one_is_inferred(cuda):
    x = torch.arange(1, 9).reshape(1, 8, 1, 1).to(memory_format=torch.channels_last)
    assert torch.equal((x.to(cuda) % x.to(cuda).flip(1)).cpu(), x % x.flip(1))


@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_layer_without_gradients_makes_contiguous_results_of_permuted_tensors(cuda, norm_first):
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first).eval()
    x = torch.randn(5, 2, 8).transpose(0, 1)
    with torch.no_grad():
        expected, found = layer(x), layer.to("cuda")(x.to("cuda"))
    assert found.stride() == expected.stride() == (40, 8, 1)
    assert torch.equal(found.view(10, 8).cpu(), expected.view(10, 8))


def test_layer_norm_gradient_is_contiguous_for_permuted_gradient(cuda):
    found = []
    for where in ("cpu", cuda):
        torch.manual_seed(0)
        x = torch.randn(2, 5, 5, 8).to(where).requires_grad_()
        norm = F.layer_norm(x, (8,), torch.ones(8, device=where))
        (inner,) = torch.autograd.grad(norm, x, torch.randn(2, 8, 5, 5).to(where).permute(0, 2, 3, 1))
        found.append((inner.stride(), inner.tolist()))
    assert found[0] == found[1]


@st.composite
def parts(draw):
    """Tensors for `cat`, most of which fit, and a dimension."""
    n = draw(st.integers(0, 5))
    sizes, dim = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)), draw(st.integers(-n, max(n - 1, 0)))
    found = []
    for _ in range(draw(st.integers(1, 3))):
        shape = list(sizes)
        if n:
            shape[dim] = draw(st.integers(0, 3))
        order = draw(st.permutations(range(n)))
        dtype = draw(st.sampled_from([torch.float32] * 6 + [torch.int64, torch.complex64]))
        t = (
            torch.arange(math.prod(shape))
            .reshape([shape[k] for k in order])
            .permute([order.index(k) for k in range(n)])
        )
        found.append(draw(st.sampled_from([t.to(dtype)] * 9 + [torch.zeros(0), torch.zeros(2, 2)])))
    if draw(st.integers(0, 4)) == 0 and n in (4, 5):
        layout = torch.channels_last if n == 4 else torch.channels_last_3d
        found = [t.contiguous(memory_format=layout) if t.dim() == n else t for t in found]
    return found, dim


@given(joined=parts())
@settings(max_examples=examples(200, 2000), deadline=None, derandomize=True)
def test_joined_tensors_have_layout_of_cpu(cuda, joined):
    tensors, dim = joined
    found = []
    for where in ("cpu", cuda):
        try:
            whole = torch.cat([t.to(where) for t in tensors], dim)
        except (RuntimeError, IndexError) as e:
            found.append(type(e))
        else:
            found.append((whole.shape, whole.stride(), whole.dtype, whole.tolist()))
    assert found[0] == found[1]
