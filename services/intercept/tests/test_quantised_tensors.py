"""Quantised tensors on the device: bits, quantisers, views, copies, files and errors are the CPU's or CUDA's."""

import copy
import io
import platform

import numpy as np
import pytest
import torch
import torch.ao.quantization as quantization
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import nn
from torch.nn import functional
from wooly_testkit.effort import examples

pytestmark = pytest.mark.filterwarnings("ignore")  # quantised tensors and their storages are deprecated
#: Other CPUs' kernels round sums of products in other places.
x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the bits are those of PyTorch's kernels for x86 CPUs")
LIMITS = {torch.qint8: (-128, 127), torch.quint8: (0, 255), torch.qint32: (-(2**31), 2**31 - 1)}
X = torch.linspace(-3, 3, 24).reshape(2, 3, 4)
SCALES, POINTS = torch.tensor([0.1, 0.25, 0.03]), torch.tensor([0, 3, 7])
numbers = st.floats(width=32) | st.integers(-300, 300).map(lambda n: n + 0.5)  # ties of rounding, and all others


def same(found, expected):
    """Whether two results, in lists or alone, have the same numbers, layout and quantiser; the first is on the device."""
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(same(a, b) for a, b in zip(found, expected, strict=True))
    if not isinstance(expected, torch.Tensor):
        return found == expected
    assert found.is_cuda and found.is_quantized == expected.is_quantized
    assert (found.dtype, found.shape, found.stride()) == (expected.dtype, expected.shape, expected.stride())
    if not expected.is_quantized:
        return torch.equal(found.cpu().nan_to_num(7), expected.nan_to_num(7))
    return same(found.int_repr(), expected.int_repr()) and same_quantiser(found, expected)


def same_quantiser(a, b):
    if a.qscheme() is not b.qscheme():
        return False
    if a.qscheme() is torch.per_tensor_affine:
        return (a.q_scale(), a.q_zero_point()) == (b.q_scale(), b.q_zero_point())
    channels = [(q.q_per_channel_scales().cpu(), q.q_per_channel_zero_points().cpu()) for q in (a, b)]
    return a.q_per_channel_axis() == b.q_per_channel_axis() and all(map(torch.equal, *channels))


def one_scale(t, dtype=torch.qint8):
    return torch.quantize_per_tensor(t, 0.1, 3, dtype)


def channels(t, dtype=torch.qint8):
    return torch.quantize_per_channel(t, SCALES.to(t.device), POINTS.to(t.device), 1, dtype)


@x86
@settings(max_examples=examples(10, 100))
@given(
    values=arrays.arrays(np.float32, st.integers(0, 70), elements=numbers.map(lambda x: float(np.float32(x)))),
    scale=st.floats(1e-6, 1e3),
    point=st.integers(0, 127),
    dtype=st.sampled_from(list(LIMITS)),
)
def test_quantisation_has_the_bits_of_the_cpu(cuda, values, scale, point, dtype):
    t = torch.from_numpy(values)
    for x in (t, t * scale):
        expected = torch.quantize_per_tensor(x, scale, point, dtype)
        found = torch.quantize_per_tensor(x.to(cuda), scale, point, dtype)
        assert same(found, expected) and same(found.dequantize(), expected.dequantize())


@x86
@settings(max_examples=examples(10, 100))
@given(
    values=arrays.arrays(np.float32, (2, 3, 5), elements=numbers.map(lambda x: float(np.float32(x)))),
    scales=st.lists(st.floats(1e-6, 1e3), min_size=3, max_size=3),
    points=st.lists(st.integers(0, 127), min_size=3, max_size=3),
    dtype=st.sampled_from(list(LIMITS)),
    whole=st.booleans(),
)
def test_quantisation_by_channel_has_the_bits_of_the_cpu(cuda, values, scales, points, dtype, whole):
    by = (
        torch.tensor(scales),
        torch.tensor(points, dtype=torch.int64 if whole or dtype is torch.qint32 else torch.float32),
    )
    t = torch.from_numpy(values)
    if by[1].is_floating_point():  # the CPU's kernel for such zero points does not define what is larger than an int32
        t = t.nan_to_num(0).clamp(-1e6, 1e6)
    expected = torch.quantize_per_channel(t * by[0][:, None], *by, 1, dtype)
    found = torch.quantize_per_channel((t * by[0][:, None]).to(cuda), *[b.to(cuda) for b in by], 1, dtype)
    assert same(found, expected) and same(found.dequantize(), expected.dequantize())


@pytest.mark.parametrize("dtype", LIMITS)
def test_integers_dequantise_to_the_bits_of_the_cpu(cuda, dtype):
    low, high = LIMITS[dtype]
    whole = torch.tensor([low, low + 1, -1 if low else 1, 0, 5, high - 1, high], dtype=torch.int64)
    whole = whole.to({torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}[dtype])
    for scale, point in ((0.1, 0), (1e-3, 100), (3.0, 7)):
        expected = torch._make_per_tensor_quantized_tensor(whole, scale, point)
        found = torch._make_per_tensor_quantized_tensor(whole.to(cuda), scale, point)
        assert same(found, expected) and same(found.dequantize(), expected.dequantize())
        by = torch.tensor([scale, 0.7]), torch.tensor([point, 1])
        expected = torch._make_per_channel_quantized_tensor(torch.stack([whole, whole]), *by, 0)
        found = torch._make_per_channel_quantized_tensor(
            torch.stack([whole, whole]).to(cuda), *[b.to(cuda) for b in by], 0
        )
        assert same(found, expected) and same(found.dequantize(), expected.dequantize())


def test_quantisers_from_tensors_and_from_the_range(cuda):
    for make in (
        lambda t: torch.quantize_per_tensor(
            t, torch.tensor(0.1, device=t.device), torch.tensor(2, device=t.device), torch.quint8
        ),
        lambda t: torch.quantize_per_tensor_dynamic(t, torch.quint8, False),
        lambda t: torch.quantize_per_tensor_dynamic(t, torch.qint8, True),
        lambda t: torch.quantize_per_tensor_dynamic(t, torch.float16, False),
    ):
        assert same(make(X.to(cuda)), make(X))


def boolean(q):
    return (torch.arange(q.numel(), device=q.device).reshape(q.shape) % 3).eq(0)


#: Operators of both kinds of quantisers. Each has a name for the test's id.
BOTH = {
    "clone": lambda q: q.clone(),
    "detach": lambda q: q.detach(),
    "select": lambda q: q[1],
    "slice": lambda q: q[:, 1:],
    "split": lambda q: q.split(1, 1),
    "unsqueeze": lambda q: q.unsqueeze(0),
    "squeeze": lambda q: q.unsqueeze(0).squeeze(0).unsqueeze(3).squeeze(),
    "view": lambda q: q.view(2, 3, 2, 2),
    "flatten": lambda q: q.flatten(2),
    "fill": lambda q: q.fill_(0.55),
    "assign": lambda q: (q[0].copy_(torch.ones(3, 4, device=q.device)), q),
    "copy": lambda q: q.clone().copy_(q),
    "item": lambda q: q[0, 1, 2].item(),
    "int_repr": lambda q: q.int_repr(),
    "parameter": lambda q: nn.Parameter(q, requires_grad=False).data,
    "deepcopy": copy.deepcopy,
    "channels last": lambda q: q.unsqueeze(0).contiguous(memory_format=torch.channels_last),
}
#: Operators of tensors with one scale.
ONE_SCALE = {
    **BOTH,
    "transpose": lambda q: q.transpose(0, 2),
    "contiguous": lambda q: q.permute(2, 0, 1).contiguous(),
    "expand": lambda q: q[0].expand(5, 3, 4).clone(),
    "unfold": lambda q: q.unfold(2, 2, 1),
    "as_strided": lambda q: q.as_strided((3, 2), (4, 2), 1),
    "repeat": lambda q: q.repeat(2, 1, 1),
    "empty_like": lambda q: torch.empty_like(q).q_scale(),
    "relu": torch.relu,
    "relu_": torch.relu_,
    "max": lambda q: tuple(q.max(2)),
    "min": lambda q: tuple(torch.min(q, 0, keepdim=True)),
    "flip": lambda q: q.flip(0, 2),
    "index_select": lambda q: q.index_select(1, torch.tensor([2, 0, 2], device=q.device)),
    "masked_fill": lambda q: q.masked_fill_(boolean(q), 0.35),
    "masked_fill with a tensor": lambda q: q.masked_fill_(boolean(q), torch.tensor(-0.35, device=q.device)),
    "index_put": lambda q: q.index_put_((torch.tensor([0, 1], device=q.device),), torch.tensor(0.5, device=q.device)),
    "max_pool2d": lambda q: functional.max_pool2d(q, 2, stride=1, padding=1),
}


@pytest.mark.parametrize("name", ONE_SCALE)
@pytest.mark.parametrize("dtype", LIMITS)
def test_operator_with_one_scale_equals_cpu(cuda, name, dtype):
    if name == "max_pool2d" and dtype is torch.qint32:
        expected = one_scale(X.double().float(), dtype)  # the CPU has no such kernel: compare with larger integers
        found = ONE_SCALE[name](one_scale(X.to(cuda), dtype)).dequantize()
        assert torch.equal(found.cpu(), functional.max_pool2d(expected.dequantize(), 2, stride=1, padding=1))
        return
    assert same(ONE_SCALE[name](one_scale(X.to(cuda), dtype)), ONE_SCALE[name](one_scale(X, dtype)))


@pytest.mark.parametrize("name", BOTH)
def test_operator_with_channels_equals_cpu(cuda, name):
    assert same(BOTH[name](channels(X.to(cuda))), BOTH[name](channels(X)))


@pytest.mark.parametrize("operate", [functional.gelu, lambda q: functional.adaptive_avg_pool2d(q, 2)])
def test_operator_of_float32_is_within_one_step_of_the_cpu(cuda, operate):
    found, expected = operate(one_scale(X.to(cuda))), operate(one_scale(X))
    assert (found.int_repr().cpu().int() - expected.int_repr().int()).abs().max() <= 1
    assert found.q_scale() == pytest.approx(expected.q_scale()) and found.q_zero_point() == expected.q_zero_point()


@pytest.mark.parametrize("make", [one_scale, channels])
def test_quantised_tensor_travels_between_host_and_device(cuda, make):
    host, q = make(X), make(X.to(cuda))
    assert same(host.to(cuda), host) and same(host.cuda(), host)
    back = q.cpu()
    assert not back.is_cuda and torch.equal(back, host)
    model = nn.ParameterList([nn.Parameter(host, requires_grad=False)]).to(cuda)
    assert same(model[0].data, host) and torch.equal(model.cpu()[0].data, host)


@pytest.mark.parametrize("make", [one_scale, channels])
@pytest.mark.parametrize("target", [None, "cpu", "cuda"])
def test_quantised_tensor_is_saved_and_loaded(cuda, make, target):
    file = io.BytesIO()
    torch.save({"q": make(X.to(cuda))[:, :, 1:]}, file)
    file.seek(0)
    found = torch.load(file, map_location=target)["q"]
    assert found.device.type == (target or "cuda")
    expected = make(X)[:, :, 1:]
    assert torch.equal(found.int_repr().cpu(), expected.int_repr()) and same_quantiser(found, expected)


def test_copy_brings_the_quantiser(cuda):
    for source in (
        torch.quantize_per_tensor(X, 0.5, 1, torch.qint8),
        torch.quantize_per_tensor(X.to(cuda), 0.5, 1, torch.qint8),
    ):
        host, q = one_scale(X), one_scale(X.to(cuda))
        view = q[0]
        assert torch.equal(host.copy_(source), source.cpu()) and same(q.copy_(source), source.cpu())
        assert view.q_scale() == 0.1 and same(view.int_repr(), source.cpu()[0].int_repr())
    for bad, why in ((channels(X), "same qscheme"), (one_scale(X, torch.quint8), "same scalar type")):
        with pytest.raises(RuntimeError, match=why):
            q.copy_(bad)
    with pytest.raises(RuntimeError, match="please use dequantize"):
        torch.empty(2, 3, 4, device=cuda).copy_(q)


def test_factories_make_quantised_tensors(cuda):
    q = torch._empty_affine_quantized([2, 3], scale=0.5, zero_point=2, dtype=torch.quint8, device=cuda)
    assert (q.device.type, q.q_scale(), q.q_zero_point(), q.int_repr().tolist()) == ("cuda", 0.5, 2, [[0] * 3] * 2)
    by = {"scales": SCALES.to(cuda), "zero_points": POINTS.to(cuda), "axis": 0}
    q = torch._empty_per_channel_affine_quantized([3, 2], **by, dtype=torch.qint8, device=cuda)
    assert q.q_per_channel_scales().is_cuda and q.q_per_channel_axis() == 0
    assert torch.empty_quantized([4], one_scale(X.to(cuda))).q_scale() == 0.1
    assert torch.empty(2, dtype=torch.qint8, device=cuda).is_quantized
    assert torch._empty_affine_quantized(
        [0, 3], scale=1.0, zero_point=0, dtype=torch.qint8, device=cuda
    ).dequantize().shape == (0, 3)


def test_printed_quantised_tensor_names_device_and_quantiser(cuda):
    said = " ".join(str(one_scale(X.to(cuda))).split())
    assert said.startswith("tensor([[[-3.0000,") and "device='cuda:0', size=(2, 3, 4), dtype=torch.qint8" in said
    assert "quantization_scheme=torch.per_tensor_affine, scale=0.1, zero_point=3" in said


@pytest.mark.parametrize("operate", [
    lambda q: torch.cat([q, q]), lambda q: q + q, lambda q: q.topk(2), lambda q: torch.equal(q, q), lambda q: q.resize_(1),
    lambda q: torch.ops.quantized.add(q, q, 1.0, 0), lambda q: q[boolean(q)], lambda q: q.dequantize().q_scale(),
])  # fmt: skip
def test_operator_that_cuda_lacks_raises_its_error_at_the_call(cuda, operate):
    with pytest.raises(NotImplementedError, match=r"'Quantized?CUDA|is not supported on the wooly device"):
        operate(one_scale(X.to(cuda)))


@pytest.mark.parametrize(("call", "kind", "why"), [
    (lambda t: torch.quantize_per_tensor(t, 0.1, 300, torch.quint8), RuntimeError, "zero_point"),
    (lambda t: torch.quantize_per_tensor(t.double(), 0.1, 0, torch.quint8), RuntimeError, "Float"),
    (lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.int8), RuntimeError, "."),
    (lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.quint4x2), NotImplementedError, "quint4x2"),
    (lambda t: torch.quantize_per_channel(t, *[p[:2].to(t.device) for p in (SCALES, POINTS)], 1, torch.qint8), RuntimeError, "."),
    (lambda t: torch.quantize_per_channel(t, SCALES, POINTS, 1, torch.qint8), RuntimeError, "same device"),
    (lambda t: torch._make_per_channel_quantized_tensor(t.to(torch.int8), SCALES, POINTS, 1), RuntimeError, "same device"),
    (lambda t: torch._make_per_tensor_quantized_tensor(t, 1.0, 0), RuntimeError, "."),
    (lambda t: torch.empty(2, dtype=torch.quint4x2, device=t.device), NotImplementedError, "quint4x2"),
    (lambda t: torch.empty([-1], dtype=torch.qint8, device=t.device), RuntimeError, "negative"),
    (lambda t: torch.empty([1 << 50], dtype=torch.qint8, device=t.device), torch.OutOfMemoryError, "CUDA out of memory"),
    (lambda t: one_scale(t).index_select(0, torch.tensor([0])), RuntimeError, "same device"),
    (lambda t: channels(t).index_select(0, torch.tensor([0], device=t.device)), RuntimeError, "per tensor"),
    (lambda t: channels(t).transpose(0, 1), RuntimeError, "Setting strides"),
    (lambda t: one_scale(t)[0].copy_(torch.ones(4, device=t.device)), RuntimeError, "same shape"),
])  # fmt: skip
def test_bad_argument_raises_clear_error(cuda, call, kind, why):
    with pytest.raises(kind, match=why):
        call(X.to(cuda))


def test_dynamic_quantisation_of_a_device_model_fails_at_its_first_call(cuda):
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    expected = quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)(X)
    ours = quantization.quantize_dynamic(model.to(cuda), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(NotImplementedError, match=r"quantized.linear_dynamic"):
        ours(X.to(cuda))
    torch.testing.assert_close(ours(X), expected)


@pytest.mark.parametrize("call", [
    torch._saturate_weight_to_fp16, torch.fbgemm_pack_gemm_matrix_fp16, torch.fbgemm_linear_quantize_weight,
    lambda t: torch.choose_qparams_optimized(t, 8, 200, 0.16, 8),
])  # fmt: skip
def test_operator_that_reads_host_memory_is_refused(cuda, call):
    with pytest.raises(NotImplementedError, match="reads host memory"):
        call(X.to(cuda))


def test_quantised_tensor_frees_its_memory(cuda, no_garbage):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    q = one_scale(torch.zeros(1 << 20, device=cuda))
    assert torch.cuda.memory_allocated() - before == 1 << 20
    q = q[:4]
    assert torch.cuda.memory_allocated() - before == 1 << 20
    del q
    assert torch.cuda.memory_allocated() == before
