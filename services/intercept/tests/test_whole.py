"""Operators that are recorded as one instruction, with one more for all gradients. PyTorch decomposes them for other devices."""

import copy
import functools

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import nn
from wooly import device

pytestmark = pytest.mark.connected


@pytest.fixture
def recorded(cuda):
    """Names of the instructions that a function records, without `alloc` and `free`."""

    def names(function):
        recorder = device.current().recorder
        torch.cuda.synchronize()
        limit, recorder.limit = recorder.limit, 1 << 20
        recorder.room = recorder.limit
        try:
            with recorder.lock:  # the timer must not send the program before its instructions are counted
                result = function()
                found = [form.name for form, _ in recorder.instructions_of(recorder.words)]
        finally:
            recorder.limit = recorder.room = limit
        return result, [n for n in found if n not in ("alloc", "free", "fill")]

    return names


def leaves(*shapes, where="cpu"):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(where).detach().requires_grad_() for s in shapes]


LABELS = torch.tensor([1, 0, 3])
CALLS = {
    "rms_norm": (lambda x, w: F.rms_norm(x, (8,), w), [(3, 8), (8,)]),
    "rms_norm without weight": (lambda x: F.rms_norm(x, (8,)), [(3, 8)]),
    "attention, float64": (
        lambda q, k, v: F.scaled_dot_product_attention(q.double(), k.double(), v.double()).float(),
        [(2, 3, 5, 4)] * 3,
    ),
    "attention, mask with gradient": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        [*[(2, 3, 5, 4)] * 3, (5, 5)],
    ),
    "attention, three dimensions": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), [(3, 5, 4)] * 3),
    "attention, three dimensions and a mask": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=torch.eye(5, device=q.device).bool()),
        [(3, 5, 4)] * 3,
    ),
    "attention, three dimensions, mask with gradient": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        [*[(3, 5, 4)] * 3, (5, 5)],
    ),
    "attention of one tensor": (lambda x: F.scaled_dot_product_attention(x, x, x, x), [(1, 2, 4, 4)]),
    "smoothed labels": (lambda x: F.cross_entropy(x, LABELS.to(x.device), label_smoothing=0.1), [(3, 5)]),
    "probable labels": (lambda x, p: F.cross_entropy(x, p.softmax(-1)), [(3, 5), (3, 5)]),
}


@pytest.mark.parametrize("name", CALLS)
def test_operator_and_gradients_equal_cpu(cuda, name):
    function, shapes = CALLS[name]
    found = []
    for where in ("cpu", cuda):
        inputs = leaves(*shapes, where=where)
        y = function(*inputs)
        y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(where))
        found.append([y.detach().cpu(), *[t.grad.cpu() for t in inputs]])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.rms_norm(x, (19,)),
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], x.new_ones(17, 17)),
        lambda x: F.cross_entropy(x, torch.arange(17, device=x.device), label_smoothing=0.2),
    ],
)
def test_hooks_get_same_device_tensors_at_first_and_at_later_calls(cuda, call):
    x = torch.randn(17, 19, device=cuda, requires_grad=True)  # a shape that no other test uses
    handed = []

    def keep(t):
        handed[-1].append((t.device.type, tuple(t.shape)))
        return t

    for _ in range(3):
        handed.append([])
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            call(x).sum().backward()
    assert handed[0] and handed[0] == handed[1] == handed[2]
    assert {kind for kind, _ in handed[0]} == {"cuda"}


def test_first_call_under_detection_of_anomalies_has_gradients_and_finds_nan(cuda):
    x = torch.randn(17, 21, device=cuda, requires_grad=True)  # a shape that no other test uses
    with torch.autograd.set_detect_anomaly(True):
        F.rms_norm(x, (21,)).sum().backward()
        assert x.grad.isfinite().all()
        y = F.rms_norm(x, (21,)).sum() * float("nan")
        with (
            pytest.warns(UserWarning, match="Error detected"),
            pytest.raises(RuntimeError, match="returned nan values"),
        ):
            y.backward()
        assert torch.is_anomaly_enabled()


@pytest.mark.parametrize("shape", [(2, 0, 5, 8), (0, 2, 5, 8), (2, 2, 0, 8)])
def test_attention_of_no_elements_is_empty(cuda, shape):
    x = torch.randn(shape, device=cuda, requires_grad=True)
    y = F.scaled_dot_product_attention(x, x, x)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape


@pytest.mark.parametrize("name", ["attention, mask with gradient", "smoothed labels"])
def test_operator_forward_and_backward_are_one_instruction_each(cuda, recorded, name):
    function, shapes = CALLS[name]
    inputs = leaves(*shapes, where=cuda)
    LABELS.to(cuda)
    y, forward = recorded(lambda: function(*inputs))
    seed = torch.ones_like(y)
    grads, backward = recorded(lambda: torch.autograd.grad(y, inputs, seed))
    assert len(forward) == len(backward) == 1
    del grads


@pytest.mark.parametrize("name", ["rms_norm", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"])
def test_small_operator_decomposes_for_gradients_on_a_cpu_and_is_one_instruction_on_a_gpu(
    cuda, recorded, monkeypatch, name
):
    def call(x, w):
        if name == "rms_norm":
            return F.rms_norm(x, (8,), w[0])
        rows = w.repeat({"lstm_cell": 4, "gru_cell": 3}.get(name, 1), 1)
        result = getattr(torch, name)(x, (x, x) if name == "lstm_cell" else x, rows, rows)
        return result[0] if name == "lstm_cell" else result

    x, w = inputs = leaves((3, 8), (8, 8), where=cuda)
    on_host = leaves((3, 8), (8, 8))
    expected = torch.autograd.grad(call(*on_host).sum(), on_host)

    def gradients():
        return torch.autograd.grad(call(x, w).sum(), inputs)

    found, parts = recorded(gradients)
    assert parts and not any(name in part for part in parts)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))
    connection = device.current().recorder.link.connection
    monkeypatch.setattr(connection, "device", connection.device | {"vendor": "nvidia"})
    assert sum(name in part for part in recorded(gradients)[1]) == 2


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("name", ["lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"])
@pytest.mark.parametrize(
    ("x", "hx", "wide"), [((3, 9), (3, 8), 8), ((3, 8), (1, 8), 8), ((1, 8), (3, 8), 8), ((3, 8), (3, 1), 8)]
)
def test_cell_whose_sizes_do_not_fit_raises_error_of_pytorch(cuda, name, gradients, x, hx, wide):
    said = []
    for where in ("cpu", cuda):
        x_, hx_, w = leaves(x, hx, ({"lstm_cell": 4, "gru_cell": 3}.get(name, 1) * wide, wide), where=where)
        with torch.set_grad_enabled(gradients), pytest.raises(RuntimeError) as raised:
            getattr(torch, name)(x_, (hx_, hx_) if name == "lstm_cell" else hx_, w, w)
        said.append(str(raised.value))
    assert said[0] == said[1]


def test_lstm_cell_with_one_state_raises_error_of_pytorch(cuda):
    x, w = leaves((3, 8), (32, 8), where=cuda)
    with pytest.raises(RuntimeError, match="lstm_cell expects two hidden states"):
        torch.lstm_cell(x, (x,), w, w)


@pytest.mark.parametrize("make", [nn.GRU, nn.RNN, nn.LSTM])
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}, {"bias": False}]
)
def test_recurrent_network_equals_cpu(cuda, make, options):
    torch.manual_seed(0)
    local = make(4, 6, **options)
    ours = copy.deepcopy(local).to(cuda)
    x = torch.randn(5, 3, 4)
    found = []
    for net, where in ((local, "cpu"), (ours, cuda)):
        inputs = x.clone().to(where).requires_grad_()
        y, _ = net(inputs)
        y.square().sum().backward()
        found.append([y.detach().cpu(), inputs.grad.cpu(), *[p.grad.cpu() for p in net.parameters()]])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("make", [nn.GRU, nn.RNN, nn.LSTM, nn.Linear])
@pytest.mark.parametrize("bias", [True, False])
def test_layer_without_gradients_multiplies_as_its_weights_require_them(cuda, mode, make, bias):
    torch.manual_seed(0)
    # The layer sees a sequence whose strides permit no view as a matrix. The CPU's LSTM is another operator in float32.
    options, dtype = ({}, torch.float32) if make is nn.Linear else ({"batch_first": True}, torch.float64)
    local = make(33, 64, bias=bias, dtype=dtype, **options)
    sequence = torch.randn(3, 20, 33, dtype=dtype)
    found = []
    for where in ("cpu", cuda):
        net, x = copy.deepcopy(local).to(where), sequence.to(where)
        x = x.transpose(0, 1) if make is nn.Linear else x
        results = []
        with mode():
            for required in (False, True, True):
                net.requires_grad_(required)
                y = net(x)
                results.append(y if make is nn.Linear else y[0])
        assert not any(r.requires_grad for r in results)
        found.append([r.cpu() for r in results])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not torch.equal(found[0][0], found[0][1])  # else this test compares nothing


@pytest.mark.parametrize("make", [nn.GRU, nn.RNN])
def test_recurrent_network_forward_and_backward_are_one_instruction_each(cuda, recorded, make):
    net = make(4, 6, num_layers=2, bidirectional=True).to(cuda)
    x = torch.randn(7, 3, 4, device=cuda, requires_grad=True)
    (y, _), forward = recorded(lambda: net(x))
    seed = torch.ones_like(y)
    _, backward = recorded(lambda: torch.autograd.grad(y, [x, *net.parameters()], seed))
    assert len(forward) == len(backward) == 1


NETWORKS = {
    "GRU": nn.GRU,
    "LSTM": nn.LSTM,
    "tanh": nn.RNN,
    "relu": functools.partial(nn.RNN, nonlinearity="relu"),
}


#: Each kind of network with each option. The slow run has all pairs of both.
PACKED = [
    pytest.param(make, options, marks=() if make == "LSTM" or not options else pytest.mark.slow, id=f"{make}-{name}")
    for name, options in (
        ("plain", {}),
        ("layers", {"num_layers": 2, "bidirectional": True}),
        ("unbiased", {"bias": False}),
    )
    for make in NETWORKS
]


@pytest.mark.parametrize(("make", "options"), PACKED)
def test_packed_sequences_equal_cpu(cuda, make, options):
    torch.manual_seed(0)
    local = NETWORKS[make](4, 6, **options)
    ours = copy.deepcopy(local).to(cuda)
    x = torch.randn(5, 3, 4)
    found = []
    for net, where in ((local, "cpu"), (ours, cuda)):
        for lengths in ([5, 3, 1], [4, 4, 2]):
            inputs = x.clone().to(where).requires_grad_()
            net.zero_grad()
            packed = nn.utils.rnn.pack_padded_sequence(inputs, torch.tensor(lengths))
            results, state = net(packed)
            with torch.inference_mode():
                again = net(packed)[0].data
            y, _ = nn.utils.rnn.pad_packed_sequence(results)
            (y.square().sum() + sum(s.sum() for s in (state if isinstance(state, tuple) else (state,)))).backward()
            found.append([t.detach().cpu() for t in (y, again, inputs.grad, *[p.grad for p in net.parameters()])])
    for theirs, there in zip(found[:2], found[2:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(theirs, there, strict=True))


@pytest.mark.parametrize("make", NETWORKS)
def test_packed_sequences_forward_and_backward_are_one_instruction_each(cuda, recorded, make):
    net = NETWORKS[make](4, 6, num_layers=2, bidirectional=True).to(cuda)
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(5, 3, 4, device=cuda), torch.tensor([5, 3, 1]))
    hidden = torch.zeros(4, 3, 6, device=cuda)
    state = (hidden, hidden.clone()) if make == "LSTM" else hidden
    data = packed.data.detach().requires_grad_()
    packed = nn.utils.rnn.PackedSequence(data, packed.batch_sizes)
    (y, _), forward = recorded(lambda: net(packed, state))
    seed = torch.ones_like(y.data)
    _, backward = recorded(lambda: torch.autograd.grad(y.data, [data, *net.parameters()], seed))
    assert len(forward) == len(backward) == 1


def test_attention_dropout_is_same_in_forward_and_backward(cuda):
    q, k, v = leaves(*[(1, 2, 6, 4)] * 3, where=cuda)
    y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    (grad,) = torch.autograd.grad(y.sum(), v)
    torch.testing.assert_close(y.sum(), (grad * v).sum())  # attention is linear in its values
    again = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert not torch.equal(again, y)


def test_layer_dropout_is_same_in_forward_and_backward(cuda):
    net = nn.RNN(4, 6, num_layers=2, nonlinearity="relu", bias=False, dropout=0.5).to(cuda)
    x = torch.rand(3, 2, 4, device=cuda, requires_grad=True)
    y, _ = net(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(y.sum(), (grad * x).sum())  # relu without bias is homogeneous


def test_second_derivatives_equal_cpu(cuda):
    found = []
    for where in ("cpu", cuda):
        (x,) = leaves((3, 8), where=where)
        (g,) = torch.autograd.grad(F.rms_norm(x, (8,)).pow(3).sum(), x, create_graph=True)
        (h,) = torch.autograd.grad(g.square().sum(), x)
        found.append((g.detach().cpu(), h.cpu()))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_second_derivatives_through_dropout_raise(cuda):
    q, k, v = leaves(*[(1, 2, 6, 4)] * 3, where=cuda)
    y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    with pytest.raises(NotImplementedError, match="second derivatives through dropout"):
        torch.autograd.grad(y.sum(), v, create_graph=True)


def test_function_transforms_equal_autograd(cuda):
    (x,) = leaves((3, 8), where=cuda)
    function = torch.func.grad(lambda t: F.rms_norm(t, (8,)).sum())
    (there,) = torch.autograd.grad(F.rms_norm(x, (8,)).sum(), x)
    torch.testing.assert_close(function(x.detach()), there)


def test_changed_saved_tensor_raises_error_of_pytorch(cuda):
    x, w = leaves((3, 8), (8,), where=cuda)
    y = F.rms_norm(x, (8,), w * 1).sum() + F.rms_norm(x * 1, (8,), w.detach()).sum()
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("way", ["native_batch_norm", "native_batch_norm.out", "batch_norm_update_stats"])
def test_undeclared_statistics_writes_equal_cpu(cuda, way):
    x, mean, var = torch.rand(6, 3, 5), torch.rand(3), torch.rand(3)

    def statistics(where):
        data, m, v = [t.clone().to(where) for t in (x, mean, var)]
        if way == "batch_norm_update_stats":
            found = torch.batch_norm_update_stats(data, m, v, 0.1)
        elif way == "native_batch_norm":
            found = torch.native_batch_norm(data, None, None, m, v, True, 0.1, 1e-5)
        else:
            outs = dict(
                zip(
                    ("out", "save_mean", "save_invstd"),
                    [torch.empty(n, device=where) for n in ((6, 3, 5), 3, 3)],
                    strict=True,
                )
            )
            found = torch.ops.aten.native_batch_norm.out(data, None, None, m, v, True, 0.1, 1e-5, **outs)
        return [t.cpu() for t in (*found, m, v)]

    assert all(torch.equal(a, b) for a, b in zip(statistics("cpu"), statistics(cuda), strict=True))


WITH_TANGENTS = {
    "linear": (lambda x: F.linear(x, x, x[:, 0]), (4, 4)),
    "linear, tangent of the bias": (lambda b: F.linear(torch.ones_like(b)[None], torch.ones_like(b)[:, None], b), (1,)),
    "rms_norm": (lambda x: F.rms_norm(x, (8,)), (3, 8)),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x, x), (2, 4, 4)),
    "smoothed labels": (lambda x: F.cross_entropy(x, LABELS.to(x.device), label_smoothing=0.1), (3, 5)),
    "gru_cell": (lambda x: torch.gru_cell(x, x[:, :2], x.repeat(3, 1), x.repeat(3, 1)[:, :2]), (2, 4)),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", WITH_TANGENTS)
def test_tangent_of_forward_mode_equals_cpu(cuda, name, requires_grad):
    function, shape = WITH_TANGENTS[name]
    found = []
    for where in ("cpu", cuda):
        x = leaves(shape, where=where)[0].detach().requires_grad_(requires_grad)
        tangent = torch.linspace(-1, 1, x.numel()).view(shape).to(where)
        with forward_ad.dual_level():
            try:
                result = forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent)))
            except NotImplementedError as e:
                if where == "cpu":
                    pytest.skip(f"PyTorch {torch.__version__} has no tangent on the CPU: {e}")
                raise
            found.append([t.detach().cpu() for t in result])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def laid_out_on(where, t):
    """A copy of a tensor with the same strides on a device."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=where).copy_(t)


GROUPED = {
    "rows": ((6, 8), (2, 8, 16), (2, 6)),
    "rows, an empty group": ((6, 8), (3, 8, 16), (2, 2, 6)),
    "columns": ((2, 3, 8), (8, 24), (8, 24)),
    "inner elements": ((4, 16), (16, 8), (8, 16)),
    "two batches": ((2, 3, 8), (2, 8, 16), None),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", GROUPED)
def test_products_of_groups_equal_cpu_and_need_no_wait(cuda, name, dtype):
    left, right, ends = GROUPED[name]
    link = device.current().recorder.require_link()
    found = []
    for where in ("cpu", "cuda"):
        a, b = [t.to(where, dtype).detach().requires_grad_() for t in leaves(left, right)]
        offsets = None if ends is None else torch.tensor(ends, dtype=torch.int32, device=where)
        before = link.syncs
        result = F.grouped_mm(a, b, offs=offsets)
        result.float().sin().sum().backward()
        assert link.syncs == before
        found.append([t.detach() for t in (result, a.grad, b.grad)])
    for here, there in zip(*found, strict=True):
        assert here.stride() == there.stride() and torch.equal(here, there.cpu())


def test_product_of_groups_of_columns_in_memory_has_rows_at_multiples_of_16_bytes(cuda):
    a, b = leaves((6, 8), (2, 5, 8))
    offsets = torch.tensor([2, 6], dtype=torch.int32)
    here = F.grouped_mm(a, b.mT, offs=offsets)
    there = F.grouped_mm(a.to(cuda), b.to(cuda).mT, offs=offsets.to(cuda))
    assert here.stride() == there.stride() == (8, 1) and torch.equal(here, there.cpu())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offs": None}, "Have to provide offsets"),
        ({"offs": torch.tensor([2, 6])}, "Offsets have to be int32"),
        ({"offs": torch.tensor([6], dtype=torch.int32)}, "batch sizes have to match"),
        ({"mat_a": torch.randn(6, 8).double()}, "Expected mat_a to be Float32, BFloat16 or Float16"),
        ({"mat_a": torch.randn(6, 4)}, "contraction dimension"),
        ({"mat_a": torch.randn(6, 9)[:, :8]}, "multiple of 16 bytes"),
        ({"bias": torch.randn(16)}, "Bias not supported yet"),
        ({"out_dtype": torch.bfloat16}, "output dtype must match"),
    ],
)
def test_wrong_product_of_groups_raises_error_of_pytorch_at_the_call(cuda, change, message):
    given = {
        "mat_a": torch.randn(6, 8),
        "mat_b": torch.randn(2, 8, 16),
        "offs": torch.tensor([2, 6], dtype=torch.int32),
    }
    given |= change
    for where in ("cpu", cuda):
        placed = {k: laid_out_on(where, v) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
        with pytest.raises(RuntimeError, match=message):
            F.grouped_mm(placed.pop("mat_a"), placed.pop("mat_b"), **placed)
