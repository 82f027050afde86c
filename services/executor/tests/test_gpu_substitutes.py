"""Substitutes for operators that differ on a GPU. Here they run on the host, and match the host library's own operators."""

import pytest
import torch
from wooly_executor.errors import OperationError
from wooly_executor.runtime import gpu_absent, gpu_bags, gpu_lstm, gpu_norms
from wooly_executor.runtime.adoption import put
from wooly_executor.runtime.gpu import GpuDevice
from wooly_executor.runtime.gpu_absent import ABSENT
from wooly_executor.runtime.substitutes import substitute
from wooly_wis.dtypes import DType
from wooly_wis.program import Form, Operand, Role, View

from services.executor.tests.fake_gpu import FakeDriver

aten = torch.ops.aten
BF16, F32 = torch.bfloat16, torch.float32
NEAR = {"atol": 3e-2, "rtol": 3e-2}


def some(*shape, dtype=F32):
    return torch.randn(shape).to(dtype)


def assert_same(ours, theirs, **near):
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine is None) is (other is None)
        if mine is not None:
            torch.testing.assert_close(mine, other, **near)


# -- LSTM ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("biases", [False, True])
def test_lstm_layer_and_gradients_match_cpu_library(reverse, biases):
    torch.manual_seed(1)
    bias = [some(16) for _ in "io"] if biases else [torch.zeros(16) for _ in "io"]
    data, cell, states = some(5, 2, 3), (some(16, 3), some(16, 4), *bias), (some(2, 4), some(2, 4))
    numbers = (reverse, [], 2, 4, 1, biases, False, False)
    with torch.enable_grad():
        theirs = aten.mkldnn_rnn_layer.default(data, *cell, *states, *numbers, True)
    *ours, workspace = gpu_lstm.layer(data, *cell, *states, *numbers, True)
    assert_same(ours, theirs[:3], atol=1e-5, rtol=1e-5)
    assert workspace is None
    grads = (some(5, 2, 4), some(2, 4), some(2, 4))
    rest = (reverse, 2, 4, 1, biases, True, False, [], False)
    wanted = aten.mkldnn_rnn_layer_backward.default(data, *cell, *states, *theirs[:3], *grads, *rest, theirs[3])
    with torch.inference_mode():
        found = gpu_lstm.layer_backward(data, *cell, *states, *theirs[:3], *grads, *rest, theirs[3])
    if not biases:
        found, wanted = [[*g[:3], *g[5:]] for g in (found, wanted)]
    assert_same(found, wanted, atol=1e-4, rtol=1e-4)


def test_lstm_layer_without_incoming_gradients_has_zero_gradients():
    args = (some(5, 2, 3), some(16, 3), some(16, 4), some(16), some(16), some(2, 4), some(2, 4))
    outs = (some(5, 2, 4), some(2, 4), some(2, 4))
    rest = (False, 2, 4, 1, True, True, False, [], False, torch.empty(0, dtype=torch.uint8))
    found = gpu_lstm.layer_backward(*args, *outs, None, None, None, *rest)
    assert [g.shape for g in found] == [a.shape for a in args]
    assert not any(g.any() for g in found)


@pytest.mark.parametrize("biases", [False, True])
def test_lstm_layer_gives_the_library_weights_in_one_piece_of_memory(monkeypatch, biases):
    given = []

    class Operators:
        class lstm:
            @staticmethod
            def input(steps, states, weights, *rest):
                given.extend(weights)
                return aten.lstm.input(steps, states, weights, *rest)

    monkeypatch.setattr(gpu_lstm, "aten", Operators)
    weights = [some(16, 3), some(16, 4), some(16), some(16)]
    gpu_lstm.layer(some(5, 2, 3), *weights, some(2, 4), some(2, 4), False, [], 2, 4, 1, biases, False, False, False)
    ends = [given[0].data_ptr() + 4 * sum(w.numel() for w in weights[:k]) for k in range(4)]
    assert [w.data_ptr() for w in given] == ends
    wanted = weights if biases else [*weights[:2], torch.zeros(16), torch.zeros(16)]
    assert all(torch.equal(a, b) for a, b in zip(given, wanted, strict=True))


# -- bags of embeddings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forward", ["_embedding_bag", "_embedding_bag_forward_only"])
@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("last", [False, True])
def test_bags_from_gpu_shapes_fit_the_cpus(forward, mode, last):
    """The library's shape functions give the shapes of CUDA's kernels."""
    function = {"_embedding_bag": gpu_bags.forward, "_embedding_bag_forward_only": gpu_bags.forward_only}[forward]
    weight, indices, offsets = some(5, 4), torch.tensor([1, 2, 3, 4]), torch.tensor([0, 2, 4] if last else [0, 2])
    rest = (False, mode, False, None, last, -1)
    theirs = getattr(aten, forward).default(weight, indices, offsets, *rest)
    ours = function(weight.to("meta"), indices.to("meta"), offsets.to("meta"), *rest)
    device = GpuDevice(FakeDriver())
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype is other.dtype
        assert mine.shape == other.shape or device.result(mine, tuple(other.shape)).shape == other.shape


def test_bags_gradient_of_sample_weights_computes_the_bag_of_each_index():
    torch.manual_seed(1)
    weight, indices, offsets = some(5, 4), torch.tensor([1, 2, 3, 4, 0]), torch.tensor([0, 2, 2])
    grad, bag_of = some(3, 4), torch.tensor([0, 0, 2, 2, 2])
    expected = aten._embedding_bag_per_sample_weights_backward.default(grad, weight, indices, offsets, bag_of, 0, -1)
    found = gpu_bags.weights_backward(grad, weight, indices, offsets, torch.empty(0, dtype=torch.int64), 0)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("padding", [-1, 3])
def test_bags_gradient_of_the_maximum_skips_empty_bags(dtype, padding):
    """The GPU's library marks an empty bag with the index -1, and the CPU's library with 0."""
    torch.manual_seed(1)
    weight, indices, offsets = some(5, 4, dtype=dtype), torch.tensor([1, 2, 4, 3]), torch.tensor([0, 2, 2, 3])
    out, bag_of, sizes, largest = aten._embedding_bag.default(
        weight, indices, offsets, False, 2, False, None, False, padding
    )
    grad, numbers = some(4, 4, dtype=dtype), (5, False, 2)
    expected = aten._embedding_bag_dense_backward.default(
        grad, indices, bag_of, sizes, largest, *numbers, None, padding
    )
    marked = torch.where((sizes == 0).unsqueeze(1), -1, largest)
    for given in (largest, marked):
        found = gpu_bags.dense_backward(grad, indices, bag_of, sizes, given, *numbers, None, padding)
        torch.testing.assert_close(found, expected)
        found = gpu_bags.backward(grad, indices, offsets, bag_of, sizes, given, *numbers, False, None, padding)
        torch.testing.assert_close(found, expected)
    assert torch.equal(gpu_bags._as_on_cpu((out, bag_of, sizes, marked), cut=True)[3], largest)


@pytest.mark.parametrize("mode", [0, 1])
def test_bags_gradients_of_sums_are_the_librarys(mode):
    weight, indices, offsets = some(5, 4), torch.tensor([1, 2, 4, 3]), torch.tensor([0, 2, 2])
    _, _, sizes, largest = aten._embedding_bag.default(weight, indices, offsets, False, mode)
    bag_of, grad, numbers = torch.tensor([0, 0, 2, 2]), some(3, 4), (5, False, mode)
    given = (bag_of, sizes, largest, *numbers)
    expected = aten._embedding_bag_dense_backward.default(grad, indices, *given, None, -1)
    assert torch.equal(gpu_bags.dense_backward(grad, indices, *given, None), expected)
    assert torch.equal(gpu_bags.backward(grad, indices, offsets, *given, False, None), expected)


# -- normalisation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [BF16, F32])
def test_layer_norm_of_half_precision_matches_cpu_library(weights):
    torch.manual_seed(1)
    data, weight, bias = some(2, 3, 8, dtype=BF16), some(8, dtype=weights), some(8, dtype=weights)
    theirs = aten.native_layer_norm.default(data, [8], weight, bias, 1e-5)
    ours = gpu_norms.layer_norm(data, [8], weight, bias, 1e-5)
    assert_same(ours, theirs, **NEAR)
    given = (some(2, 3, 8, dtype=BF16), data, [8], theirs[1], theirs[2], weight, bias, [True] * 3)
    wanted = aten.native_layer_norm_backward.default(*given)
    if weights is F32:  # with weights of half precision, the host's operator takes no statistics in float32
        assert_same(gpu_norms.layer_norm_backward(*given), wanted, **NEAR)


@pytest.mark.parametrize("weights", [BF16, F32])
def test_group_norm_of_half_precision_matches_cpu_library(weights):
    torch.manual_seed(1)
    data, weight, bias = some(2, 4, 8, dtype=BF16), some(4, dtype=weights), some(4, dtype=weights)
    theirs = aten.native_group_norm.default(data, weight, bias, 2, 4, 8, 2, 1e-5)
    assert_same(gpu_norms.group_norm(data, weight, bias, 2, 4, 8, 2, 1e-5), theirs, **NEAR)
    given = (some(2, 4, 8, dtype=BF16), data, theirs[1], theirs[2], weight, 2, 4, 8, 2, [True] * 3)
    wanted = aten.native_group_norm_backward.default(*given)
    assert_same(gpu_norms.group_norm_backward(*given), wanted, **NEAR)


def given_to(monkeypatch, name, call):
    """Return the dtypes of the tensors that `call` gives to an operator."""
    given = []

    class Operators:
        pass

    def record(*args):
        given.extend(a.dtype for a in args if isinstance(a, torch.Tensor))
        return args[0], None, None

    monkeypatch.setattr(Operators, name, Operators, raising=False)
    monkeypatch.setattr(Operators, "default", staticmethod(record), raising=False)
    monkeypatch.setattr(gpu_norms, "aten", Operators)
    call()
    return given


def test_layer_norm_backward_gives_statistics_in_float32(monkeypatch):
    half = some(4, 8, dtype=BF16)
    stat, weight = some(4, 1, dtype=BF16), some(8, dtype=BF16)
    given = given_to(
        monkeypatch,
        "native_layer_norm_backward",
        lambda: gpu_norms.layer_norm_backward(half, half, [8], stat, stat, weight, weight, [True] * 3),
    )
    assert given == [BF16, BF16, F32, F32, BF16, BF16]


def test_batch_norm_backward_gives_saved_statistics_in_float32(monkeypatch):
    half, stat = some(4, 8, dtype=BF16), some(8, dtype=BF16)
    given = given_to(
        monkeypatch,
        "native_batch_norm_backward",
        lambda: gpu_norms.batch_norm_backward(half, half, stat, stat, stat, stat, stat, True, 1e-5, [True] * 3),
    )
    assert given == [BF16, BF16, BF16, BF16, BF16, F32, F32]


def test_batch_norm_with_update_and_its_gradients_match_cpu_library():
    torch.manual_seed(1)
    data, weight = some(4, 3, 5), some(3)
    moving = [[torch.zeros(3), torch.ones(3)] for _ in "ab"]
    theirs = aten._batch_norm_with_update.default(data, weight, weight, *moving[0], 0.1, 1e-5)
    ours = gpu_norms.batch_norm_with_update(data, weight, weight, *moving[1], 0.1, 1e-5)
    assert_same(ours, theirs)
    assert_same(*moving)
    rest = (weight, *moving[0], theirs[1], theirs[2], True, 1e-5, [True] * 3, theirs[3])
    grad = some(4, 3, 5)
    found = gpu_norms.batch_norm_backward_of_update(grad, data, *rest)
    assert_same(found, aten.batch_norm_backward.default(grad, data, *rest))


@pytest.mark.parametrize(("dtype", "expected"), [(DType.BF16, gpu_norms.layer_norm), (DType.F32, None)])
def test_substitute_of_norms_only_for_half_precision(dtype, expected):
    view = View(dtype, (4,), (1,), 0)
    form = Form("extern", (Operand(Role.IN, view),), (), ())
    assert substitute(aten.native_layer_norm.default, form) is expected


def test_result_that_the_cpu_leaves_empty_is_empty():
    device = GpuDevice(FakeDriver())
    assert device.result(torch.ones(4), (0,)).shape == (0,)
    assert device.result(torch.ones(4), (3,)).shape == (4,)
    assert torch.equal(device.result(torch.ones(0), (2,)), torch.zeros(2))


def test_result_in_memory_of_the_program_that_the_cpu_leaves_empty_is_not_copied():
    device = GpuDevice(FakeDriver())
    put(torch.ones(4), torch.empty(0), device)
    put(torch.ones(2), target := torch.zeros(2), device)
    assert target.tolist() == [1, 1]
    put(torch.ones(0), target, device)
    assert target.tolist() == [0, 0]


# -- operators of the host --------------------------------------------------------------------------------------------------


def test_absent_operator_is_computed_by_the_host():
    x = torch.tensor([1.0, 2.0, 2.0, 5.0])
    counts, edges = substitute(aten.histogram.bin_ct)(x, 4, range=(1.0, 5.0))
    assert counts.tolist() == [1, 2, 0, 1]
    assert edges.tolist() == [1, 2, 3, 4, 5]


def test_absent_operator_writes_its_arguments():
    x, counts, edges = torch.tensor([1.0, 2.0]), torch.empty(2), torch.empty(3)
    found = substitute(aten.histogram.bin_ct_out)(x, 2, hist=counts, bin_edges=edges)
    assert found[0] is counts
    assert counts.tolist() == [1, 1]
    y = torch.tensor([1.0, -5.0])
    assert substitute(aten._add_relu_.Tensor)(y, x) is y
    assert y.tolist() == [2, 0]


def test_absent_operator_of_too_many_bytes_is_refused(monkeypatch):
    monkeypatch.setattr(gpu_absent, "MOST", 15)
    with pytest.raises(OperationError, match=r"its 16 bytes of arguments are too many for the host, which takes 15"):
        substitute(aten.histogram.bin_ct)(torch.ones(4), 4)


def test_absent_operators_exist_in_this_library():
    assert all(hasattr(aten, name) for name in ABSENT)
