"""The device against the CPU: creation, copies, views, in-place, out=, dynamic shapes, autograd, errors."""

import copy
import io
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from wooly import api, device, storage, torch_private
from wooly.errors import RemoteOperationError
from wooly.facade import tensors

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def bits(t):
    return t.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_transfer_any_dtype_round_trips_bits(cuda, dtype):
    raw = torch.randint(0, 2 if dtype is torch.bool else 120, (4 * 6 * dtype.itemsize,), dtype=torch.uint8)
    host = raw.view(dtype).reshape(4, 6)
    assert torch.equal(bits(host.to(cuda)), bits(host))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 7), (2, 3, 4, 5)])
def test_transfer_any_shape_round_trips(cuda, shape):
    host = torch.randn(shape)
    there = host.to(cuda)
    assert there.shape == host.shape and there.stride() == host.stride()
    assert torch.equal(there.cpu(), host)


def test_transfer_strided_views_round_trip(cuda):
    host = torch.arange(60.0).reshape(3, 4, 5)
    there = host.to(cuda)
    assert torch.equal(there.transpose(0, 2).cpu(), host.transpose(0, 2))
    assert torch.equal(there[:, ::2, 1:4].cpu(), host[:, ::2, 1:4])
    target = torch.zeros(3, 4, 5)
    there[:, 1::2].copy_(torch.full((3, 2, 5), 7.0))
    host[:, 1::2] = 7
    target.copy_(there)
    assert torch.equal(target, host)


def test_tensor_reports_cuda(cuda):
    t = torch.zeros(2, device=cuda)
    assert t.device == torch.device("cuda", 0) and t.is_cuda and type(t) is torch.Tensor
    assert t.get_device() == 0 and t.type() == "torch.cuda.FloatTensor" and not t.is_cpu
    assert "device='cuda:0'" in repr(t)
    assert torch.cuda.get_device_name().endswith("(WOOLY)") and torch.cuda.device_count() == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda d: torch.empty(3, device=d).zero_(),
        lambda d: torch.ones(2, 3, device=d, dtype=torch.int32),
        lambda d: torch.full((2,), 1.5, device=d),
        lambda d: torch.arange(2, 11, 3, device=d),
        lambda d: torch.linspace(0, 1, 7, device=d),
        lambda d: torch.eye(4, device=d),
        lambda d: torch.tensor([[1, 2], [3, 4]], device=d),
        lambda d: torch.as_tensor([1.0, 2.0], device=d),
        lambda d: torch.zeros(2).new_ones(3, device=d),
        lambda d: torch.zeros_like(torch.ones(2, 2), device=d),
        lambda d: torch.hann_window(9, device=d),
        lambda d: torch.tril_indices(3, 3, device=d),
        lambda d: torch.ones(3).to(d, torch.float64),
        lambda d: torch.ones(3).to(device=d),
        lambda d: torch.ones(3).to(torch.ones(1, device=d)),
        lambda d: torch.empty_strided((2, 3), (1, 2), device=d).fill_(4),
        lambda d: torch.empty(1, 2, 3, 4, device=d, memory_format=torch.channels_last).fill_(1),
    ],
)
def test_factories_on_cuda_equal_cpu(cuda, make):
    ours, theirs = make(cuda), make("cpu")
    assert ours.is_cuda and ours.dtype == theirs.dtype and ours.stride() == theirs.stride()
    assert torch.equal(ours.cpu(), theirs)


def test_device_with_number_alone_is_cuda(cuda):
    numbered = torch.device(0)
    assert repr(numbered) == "device(type='cuda', index=0)"
    assert numbered == torch.device(device=0) == torch.device(np.int64(0)) == torch.ones(2, device=0).device
    assert hash(numbered) == hash(torch.device("cuda", 0))
    with numbered:
        assert torch.ones(2).is_cuda
    with torch.autocast(numbered.type):
        assert (torch.ones(2, 2, device=numbered) @ torch.ones(2, 2, device=numbered)).dtype == torch.float16
    assert [str(torch.device(d)) for d in ("cpu", "cuda", "meta:1", torch.device("cpu"))] == [
        "cpu",
        "cuda",
        "meta:1",
        "cpu",
    ]
    with pytest.raises(RuntimeError, match="must not be negative"):
        torch.device(-1)
    with pytest.raises(TypeError, match="invalid combination"):
        torch.device(None)


def test_arguments_of_to_name_the_device_cuda(cuda):
    """tensordict, torchrl and torchao read the arguments of their methods `to` with this function."""
    parse = torch._C._nn._parse_to
    there = torch.device("cuda", 0)
    assert parse(0)[0] == parse(device=0, dtype=torch.float16)[0] == parse(torch.ones(1, device=cuda))[0] == there
    assert parse("cpu")[0] == parse(torch.ones(1))[0] == torch.device("cpu")
    assert parse(torch.float16, True) == (None, torch.float16, True, None)


def test_device_with_number_is_of_backend_again_after_removal_of_facade(cuda):
    api._facade.uninstall()
    try:
        assert torch.device(0).type == "wooly"
    finally:
        api.install_facade()
    assert torch.device(0).type == "cuda"


def test_device_context_makes_tensors_on_device(cuda):
    with torch.device("cuda"):
        assert torch.zeros(2).is_cuda and nn.Linear(2, 2).weight.is_cuda
    assert not torch.zeros(2).is_cuda


def test_views_share_storage(cuda):
    a = torch.zeros(4, 4, device=cuda)
    b = a.view(2, 8)[1]
    b.add_(1)
    assert a.sum().item() == 8 and b.untyped_storage().data_ptr() == a.untyped_storage().data_ptr()


def test_inplace_and_out_variants_equal_cpu(cuda):
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    x, y = a.to(cuda), b.to(cuda)
    x.add_(y).mul_(2).clamp_(min=0)
    assert torch.equal(x.cpu(), a.clone().add_(b).mul_(2).clamp_(min=0))
    out = torch.empty(0, device=cuda)
    torch.add(x, y, out=out)
    assert out.shape == (3, 4) and torch.equal(out, x + y)


def test_resize_keeps_old_content(cuda):
    t = torch.arange(4.0, device=cuda)
    t.resize_(6)
    assert torch.equal(t[:4].cpu(), torch.arange(4.0)) and t.shape == (6,)
    t.resize_(2, 1)
    assert torch.equal(t.cpu(), torch.tensor([[0.0], [1.0]]))


def test_operators_with_data_dependent_shape_equal_cpu(cuda):
    host = torch.tensor([3, 0, 1, 3, 0])
    there = host.to(cuda)
    assert torch.equal(there.nonzero().cpu(), host.nonzero())
    assert torch.equal(there[there > 0].cpu(), host[host > 0])
    for ours, theirs in zip(
        torch.unique(there, return_counts=True), torch.unique(host, return_counts=True), strict=True
    ):
        assert torch.equal(ours.cpu(), theirs)
    assert torch.equal(there, there.clone()) and not torch.equal(there, there + 1)


def test_host_scalars_mix_with_device_tensors(cuda):
    x = torch.arange(3, device=cuda)
    for other in (2, 2.5, True, torch.tensor(2), torch.tensor(2.5), torch.tensor(2.5, dtype=torch.float64)):
        ours, theirs = x * other, torch.arange(3) * other
        assert ours.dtype == theirs.dtype and torch.equal(ours.cpu(), theirs)
    zero = torch.tensor(1.0, device=cuda)
    wide = torch.tensor(2.0, dtype=torch.float64)
    assert (zero * 2.0).dtype == torch.float32 and (zero * wide).dtype == torch.float64


@pytest.mark.parametrize("mode", ["floor", "trunc"])
@pytest.mark.parametrize("dividend", [9, torch.tensor(9)], ids=["number", "tensor"])
def test_host_scalar_divided_by_integers_equals_cpu(cuda, dividend, mode):
    divisors = torch.tensor([7, -7, 3])
    found = torch.div(dividend, divisors.to(cuda), rounding_mode=mode)
    assert torch.equal(found.cpu(), torch.div(dividend, divisors, rounding_mode=mode))


@pytest.mark.parametrize(
    "call", [lambda t: t - True, lambda t: True - t, lambda t: t.sub_(True), lambda t: torch.rsub(t, True)]
)
def test_subtraction_of_bool_raises_at_call(cuda, call):
    for size in (3, 100_000):
        with pytest.raises(RuntimeError, match="with a bool tensor is not supported"):
            call(torch.ones(size, device=cuda))
    assert (torch.ones(3, device=cuda) - 1).tolist() == [0, 0, 0]


def test_smallest_integer_as_number_divided_by_minus_one_is_refused(cuda):
    with pytest.raises(RemoteOperationError, match=r"/ -1 overflows torch\.int64"):
        torch.div(-(2**63), torch.tensor([-1], device=cuda), rounding_mode="trunc").cpu()


@pytest.mark.parametrize(
    "look",
    [
        lambda t: t[1:],
        lambda t: t.t(),
        lambda t: t.view(4, 3),
        lambda t: t.t().reshape(-1),
        lambda t: torch.ops.aten._reshape_alias(t, [12], [1]),
        lambda t: t.detach(),
    ],
)
def test_view_in_inference_mode_is_inference_tensor_if_base_is(cuda, look):
    before = torch.arange(12.0).view(3, 4)
    found = []
    for where in ("cpu", cuda):
        outside = before.to(where)
        with torch.inference_mode():
            views = [look(t) for t in (outside, outside, outside + 1)]
            found.append([(v.is_inference(), v.cpu().tolist()) for v in views])
    assert found[0] == found[1]


def _conj(t):
    return t.conj()


def _negative(t):
    return torch._neg_view(t)


WRITES = {
    "addmm_": lambda x, a, b: x.addmm_(a, b),
    "addmm_ of conjugates": lambda x, a, b: x.addmm_(a.mH, b.conj()),
    "mm out": lambda x, a, b: torch.mm(a.conj(), b.mT, out=x),
    "bmm out": lambda x, a, b: torch.bmm(a[None], b.mH[None], out=x[None]),
    "add_": lambda x, a, b: x.add_(a.conj()),
    # The CPU has a bug: it writes solutions into a negative view with the wrong sign.
    "solve": lambda x, a, b: None if x.is_neg() else torch.linalg.solve_triangular(a.mH, b, upper=True, out=x),
}


@pytest.mark.parametrize("seen", [_conj, _negative])
@pytest.mark.parametrize("name", WRITES)
def test_write_to_conjugate_or_negative_view_changes_base(cuda, name, seen):
    torch.manual_seed(0)
    x, a, b = torch.randn(3, 4, 4, dtype=torch.complex64)
    found = []
    for where in ("cpu", cuda):
        base, left, right = (t.clone().to(where) for t in (x, a, b))
        WRITES[name](seen(base), left, right)
        found.append([t.cpu() for t in (base, left, right)])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


SOURCES = {
    "real": torch.tensor([1.0, -2.0, 0.0, -0.0]),
    "wider": torch.tensor([1.0, -2.0, 0.0, -0.0], dtype=torch.float64),
    "integer": torch.tensor([1, -2, 0, 3]),
    "unsigned": torch.tensor([0, 1, 255, 3], dtype=torch.uint8),
    "truth": torch.tensor([True, False, True, False]),
}


@pytest.mark.parametrize("seen", [_conj, _negative, lambda t: t.conj().imag])
@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("name", SOURCES)
def test_copy_of_other_dtype_into_conjugate_or_negative_view_has_the_cpus_bits(cuda, name, elsewhere, seen):
    found = []
    for where in ("cpu", cuda):
        base = torch.ones(4, dtype=torch.complex64, device=where)
        view = seen(base)
        view.copy_(SOURCES[name].to("cpu" if elsewhere else where))
        found.append([torch.view_as_real(base).view(torch.int32).tolist(), view.tolist()])
    assert found[0] == found[1]


PRODUCTS = {
    "mm": lambda a, b: a.mH @ b.conj(),
    "bmm": lambda a, b: a.mH[None] @ b.conj()[None],
    "dot": lambda a, b: torch.dot(a[0].conj(), a[0]),
    "dot of conjugates": lambda a, b: torch.dot(a[0].conj(), b[0].conj()),
    "vdot": lambda a, b: torch.vdot(a[0].conj(), b[0]),
    "vdot with conjugate": lambda a, b: torch.vdot(a[0], b[0].conj()),
    "vdot of conjugates": lambda a, b: torch.vdot(a[0].conj(), b[0].conj()),
    "addmm": lambda a, b: torch.addmm(a.conj(), a.mH, b, beta=0.5),
    "solve": lambda a, b: torch.linalg.solve_triangular(a.mH, b, upper=True),
    "solve negative": lambda a, b: torch.linalg.solve_triangular(_negative(a).mH, _negative(b), upper=False),
    "linear": lambda a, b: torch.nn.functional.linear(a.conj(), b.conj(), a[0].conj()),
    "linear of negatives": lambda a, b: torch.nn.functional.linear(a.conj().imag, b.conj().imag.clone()),
    "attention of negatives": lambda a, b: torch.nn.functional.scaled_dot_product_attention(
        *[t.conj().imag[None] for t in (a, b, a)]
    ),
    "smoothed labels of negatives": lambda a, b: torch.nn.functional.cross_entropy(
        a.conj().imag, torch.zeros(4, dtype=torch.int64, device=a.device), label_smoothing=0.1
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_product_of_conjugate_and_negative_views_equals_cpu(cuda, name):
    torch.manual_seed(0)
    a, b = torch.randn(2, 4, 4, dtype=torch.complex64)
    theirs, ours = PRODUCTS[name](a, b), PRODUCTS[name](a.to(cuda), b.to(cuda))
    assert torch.equal(ours.cpu(), theirs.resolve_conj().resolve_neg()) and ours.stride() == theirs.stride()
    assert ours.is_conj() == theirs.is_conj()


def test_complex_conjugate_views_equal_cpu(cuda):
    host = torch.randn(4, dtype=torch.complex64)
    there = host.to(cuda)
    assert torch.equal(there.conj().cpu(), host.conj().resolve_conj())
    assert torch.equal((there.conj() * there).cpu(), host.conj() * host)
    assert torch.equal(there.conj().imag.cpu(), host.conj().imag.resolve_neg())


def test_wrong_shape_raises_at_call(cuda):
    a, b = torch.zeros(2, 3, device=cuda), torch.zeros(4, 5, device=cuda)
    with pytest.raises(RuntimeError, match=r"size of tensor a|must match"):
        a + b
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        a @ b
    with pytest.raises(RuntimeError, match="same device"):
        a + torch.zeros(2, 3)


def test_remote_error_names_line(cuda):
    table, index = torch.zeros(3, device=cuda), torch.tensor([5], device=cuda)
    bad = table.index_select(0, index)  # the error must name this line
    with pytest.raises(
        RuntimeError, match=r"index out of range.*\n.*test_device\.py:\d+ in test_remote_error_names_line"
    ):
        bad.cpu()
    assert (table + 1).sum().item() == 3
    with pytest.raises(RuntimeError, match="index out of range"):
        (bad + 1).cpu()


@pytest.mark.parametrize("calls", [1, 2, 3])
@pytest.mark.parametrize("half", [False, True])
def test_interrupt_during_operation_leaves_no_instruction(cuda, monkeypatch, calls, half):
    """Ctrl-C can come at any time: before an instruction is recorded, or while it is incomplete."""
    x = torch.arange(3.0, device=cuda)
    torch.cuda.synchronize()
    recorder = device.current().devices.recorders[0]
    emit, left = recorder.emit, [calls]

    def interrupted(form, buffers, where):
        left[0] -= 1
        if not left[0]:
            if half:
                recorder.words.append(form)
                recorder.bind.append(buffers[0])
                recorder.slot_of[buffers[0]] = len(recorder.bind) - 1
            raise KeyboardInterrupt
        emit(form, buffers, where)

    monkeypatch.setattr(recorder, "emit", interrupted)
    monkeypatch.setattr(recorder, "emit_new", lambda form, buffer, where: interrupted(form, [buffer], where))
    monkeypatch.setattr(recorder, "replaced", True)
    with pytest.raises(KeyboardInterrupt):
        y = x * 2 + 1.5
        y.tolist()
        torch.zeros(3, device=cuda).add_(1)
    monkeypatch.undo()
    assert (x * 3 - 0.5).tolist() == [-0.5, 2.5, 5.5]


def test_operation_from_unhashable_code_is_recorded(cuda):
    """Dynamo makes functions whose code objects contain dictionaries as constants and therefore have no hash."""

    def double(x):
        return x + x

    code = double.__code__
    made = types.FunctionType(code.replace(co_consts=(*code.co_consts, {})), globals())
    with pytest.raises(TypeError):
        hash(made.__code__)
    assert made(torch.ones(2, device=cuda)).tolist() == [2, 2]


def test_item_second_call_needs_no_round_trip(cuda):
    t = torch.ones(3, device=cuda).sum()
    assert t.item() == 3
    before = api.session_stats()["syncs"]
    assert t.item() == 3 and t.item() == 3
    assert api.session_stats()["syncs"] == before
    t.exp_()  # the client would compute a sum itself
    assert t.item() == torch.tensor(3.0).exp().item() and api.session_stats()["syncs"] == before + 1


def test_repeat_interleave_with_output_size_does_not_wait(cuda):
    x, repeats = torch.arange(4.0), torch.tensor([1, 0, 2, 3])
    there = x.to(cuda), repeats.to(cuda)
    before = api.session_stats()["syncs"]
    found = torch.repeat_interleave(*there, output_size=6)
    assert found.shape == (6,) and api.session_stats()["syncs"] == before
    assert found.cpu().equal(torch.repeat_interleave(x, repeats))
    wrong = torch.repeat_interleave(*there, output_size=7)
    with pytest.raises(RemoteOperationError, match="allocated size does not match required size"):
        wrong.cpu()


@pytest.mark.parametrize(
    "index",
    [
        lambda x, i: x[i],
        lambda x, i: x[:, i],
        lambda x, i: x[..., [1, 0], :],
        lambda x, i: x[i, 1, i],
        lambda x, i: x.mT[i, :, i[:, None]],
        lambda x, i: x[i.to(torch.int32)[None]],
    ],
)
def test_index_with_integers_does_not_wait(cuda, index):
    x, i = torch.arange(24.0).reshape(3, 4, 2), torch.tensor([1, 0])
    there = x.to(cuda), i.to(cuda)
    before = api.session_stats()["syncs"]
    got = index(*there)
    assert api.session_stats()["syncs"] == before
    expected = index(x, i)
    assert got.shape == expected.shape and got.stride() == expected.stride() and torch.equal(got.cpu(), expected)


def test_index_out_of_range_raises_at_next_wait(cuda):
    x = torch.arange(3.0, device=cuda)
    lost = x[torch.tensor([1, 7], device=cuda)]
    with pytest.raises(RuntimeError, match=r"(?s)index 7 is out of bounds.*test_device\.py"):
        lost.tolist()
    assert x.tolist() == [0, 1, 2]
    with pytest.raises(IndexError, match="could not be broadcast"):
        x.reshape(1, 3)[torch.zeros(2, dtype=torch.long, device=cuda), torch.zeros(3, dtype=torch.long, device=cuda)]


def test_storage_is_freed_with_last_view(cuda, no_garbage):
    before = storage.live_count()
    a = torch.zeros(8, device=cuda)
    view = a[2:4]
    del a
    assert storage.live_count() == before + 1
    del view
    assert storage.live_count() == before


def test_manual_seed_repeats_random_numbers(cuda):
    torch.manual_seed(5)
    first = torch.rand(4, device=cuda), torch.randn(4, device=cuda), torch.randperm(9, device=cuda)
    torch.cuda.manual_seed(5)
    second = torch.rand(4, device=cuda), torch.randn(4, device=cuda), torch.randperm(9, device=cuda)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    assert not torch.equal(first[0], torch.rand(4, device=cuda))


def test_deepcopy_and_state_dict_keep_values(cuda):
    model = nn.Linear(3, 2).to(cuda)
    twin = copy.deepcopy(model)
    assert torch.equal(twin.weight, model.weight) and twin.weight.data_ptr() != model.weight.data_ptr()
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, map_location="cuda")
    assert loaded["weight"].is_cuda and torch.equal(loaded["weight"], model.weight)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad"])
def test_training_equals_cpu_bit_for_bit(cuda, optimizer):
    def losses(device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 3)).to(device)
        x, y = torch.randn(40, 12), torch.randint(0, 3, (40,))
        x, y = x.to(device), y.to(device)
        opt = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-2, foreach=False)
        found = []
        for _ in range(8):
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            found.append(loss.item())
        return found

    assert losses(cuda) == losses("cpu")


def test_conv_net_backward_equals_cpu(cuda):
    def grads(device):
        torch.manual_seed(1)
        net = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 4, 3),
            nn.Flatten(),
        ).to(device)
        net(torch.randn(2, 3, 12, 12).to(device)).pow(2).sum().backward()
        return [p.grad.cpu() for p in net.parameters()]

    for ours, theirs in zip(grads(cuda), grads("cpu"), strict=True):
        assert torch.equal(ours, theirs)


def test_running_statistics_read_after_training_step_are_new(cuda):
    """The operator writes the running statistics, but its schema does not declare it."""

    def story(device):
        torch.manual_seed(0)
        norm, seen = nn.BatchNorm2d(3).to(device), []
        for _ in range(3):
            norm(torch.randn(2, 3, 4, 4).to(device)).sum().backward()
            mean = norm.running_mean * 1  # an instruction that reads the statistics
            seen += [norm.running_mean.tolist(), norm.running_var.tolist(), mean.tolist()]
            seen += [norm.running_mean[1].item(), norm.running_mean[1].item()]
        norm.eval()
        seen += [norm(torch.ones(1, 3, 2, 2).to(device)).tolist(), norm.running_mean.tolist()]
        return seen

    assert story(cuda) == story("cpu")


@pytest.mark.parametrize(("layers", "bidirectional", "batch_first"), [(1, False, False), (2, True, True)])
def test_lstm_equals_cpu(cuda, layers, bidirectional, batch_first):
    def run(device):
        torch.manual_seed(2)
        net = nn.LSTM(6, 10, layers, bidirectional=bidirectional, batch_first=batch_first).to(device)
        y, (h, c) = net(torch.randn(3, 5, 6).to(device))
        (y.sum() + h.sum() + c.sum()).backward()
        return [t.detach().cpu() for t in (y, h, c, *(p.grad for p in net.parameters()))]

    for ours, theirs in zip(run(cuda), run("cpu"), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "gradients"])
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_lstm_training_and_grad_modes_equal_cpu(cuda, training, grad):
    def run(device):
        torch.manual_seed(3)
        net = nn.LSTM(6, 10, 2).train(training)
        x = torch.randn(5, 2, 6)
        net, x = net.to(device), x.to(device)
        with torch.set_grad_enabled(grad):
            found = net(x)
        out = [found[0], *found[1]]
        if grad:
            found[0].square().sum().backward()
            out += [p.grad for p in net.parameters()]
        return [t.detach().cpu() for t in out]

    for ours, theirs in zip(run(cuda), run("cpu"), strict=True):
        assert torch.equal(ours, theirs)


def test_attention_equals_cpu(cuda):
    def run(device):
        torch.manual_seed(3)
        q, k, v = (torch.randn(2, 4, 7, 8).to(device).requires_grad_() for _ in range(3))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out.pow(2).sum().backward()
        return [t.detach().cpu() for t in (out, q.grad, k.grad, v.grad)]

    for ours, theirs in zip(run(cuda), run("cpu"), strict=True):
        assert torch.equal(ours, theirs)


def test_memory_statistics_count_tensors(cuda, no_garbage):
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    t = torch.zeros(1 << 18, device=cuda)
    assert torch.cuda.memory_allocated() == before + (1 << 20)
    del t
    assert torch.cuda.memory_allocated() == before and torch.cuda.max_memory_allocated() >= before + (1 << 20)
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total


def test_free_memory_is_at_most_what_the_devices_machine_has(cuda, monkeypatch):
    link = device.current_devices().recorders[0].link
    real = link.stats
    monkeypatch.setattr(link, "stats", lambda *args: real(*args) | {"machine_bytes": 5 << 20})
    assert torch.cuda.mem_get_info()[0] == 5 << 20
    monkeypatch.setattr(link, "stats", lambda *args: {k: v for k, v in real(*args).items() if k != "machine_bytes"})
    assert torch.cuda.mem_get_info()[0] > 5 << 20  # a GPU, or an executor of an earlier version


def test_memory_stats_have_the_keys_of_the_native_allocator(cuda, no_garbage):
    before, stats = torch.cuda.memory_stats(), torch.cuda.memory_stats
    kept = [torch.zeros(1 << 18, device=cuda) for _ in range(3)]
    del kept[1:]
    now = stats()
    assert list(now) == sorted(now) and all(isinstance(n, int) for n in now.values())
    for metric in ("allocation", "active", "segment", "allocated_bytes", "active_bytes", "requested_bytes"):
        unit = 1 if metric in ("allocation", "active", "segment") else 1 << 20
        grown = [
            now[f"{metric}.all.{kind}"] - before[f"{metric}.all.{kind}"] for kind in ("current", "allocated", "freed")
        ]
        assert grown == [unit, 3 * unit, 2 * unit], metric
        assert now[f"{metric}.all.peak"] >= now[f"{metric}.all.current"] and now[f"{metric}.small_pool.peak"] == 0
    torch.cuda.reset_accumulated_memory_stats()
    assert stats()["allocation.all.allocated"] == stats()["allocated_bytes.all.freed"] == 0
    assert stats()["allocation.all.current"] == now["allocation.all.current"]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda t: t.numpy(),
        lambda t: np.asarray(t),
        lambda t: torch.asarray(t, device="cpu", copy=False),
        lambda t: torch.tensor_split(t, torch.tensor([1], device="cuda")),
        lambda t: torch.ones(1).set_(t),
    ],
    ids=("numpy", "array", "asarray", "tensor_split", "set_"),
)
def test_error_names_the_device_cuda(cuda, wrong):
    with pytest.raises((RuntimeError, TypeError, ValueError), match="cuda:0") as caught:
        wrong(torch.ones(2, device=cuda))
    assert "wooly" not in str(caught.value)


def test_memory_summary_is_the_table_of_pytorch(cuda):
    kept = torch.zeros(1 << 20, device=cuda)
    lines = torch.cuda.memory_summary(abbreviated=True).splitlines()
    assert kept.numel() and "PyTorch CUDA memory summary, device ID 0" in lines[1]
    (allocated,) = [line.split("|")[2].split() for line in lines if line.startswith("| Allocated memory")]
    assert allocated[1] in ("KiB", "MiB") and int(allocated[0]) >= 4
    assert torch.cuda.memory_summary("cuda:0").count("from small pool") == 9


def test_events_and_streams_are_in_order(cuda):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.ones(8, device=cuda).sum()
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) >= 0


def test_threads_share_device(cuda):
    from concurrent.futures import ThreadPoolExecutor

    def work(n):
        t = torch.full((16,), float(n), device=cuda)
        for _ in range(50):
            t = t + 1
        return t.sum().item()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(8))) == [16.0 * (n + 50) for n in range(8)]


def test_buffer_ids_are_reused(cuda):
    t = torch.zeros(1, device=cuda)
    seen = set()
    for _ in range(3000):
        t = t + 1
        seen.add(t.untyped_storage().data_ptr() >> storage.ID_SHIFT)
    assert t.item() == 3000 and len(seen) < 1000


@pytest.mark.filterwarnings("ignore:torch.range is deprecated")
@pytest.mark.parametrize(
    "make",
    [
        lambda d: torch.arange(5, device=d),
        lambda d: torch.arange(2, 7, 3, device=d),
        lambda d: torch.arange(3, 0, -1, device=d),
        lambda d: torch.arange(0.0, 1.0, 0.25, device=d, dtype=torch.float64),
        lambda d: torch.arange(3, device=d, dtype=torch.float16),
        lambda d: torch.range(5, 1, -2, device=d),
        lambda d: torch.linspace(0, 1, 7, device=d),
        lambda d: torch.kaiser_window(9, False, 3.0, device=d),
        lambda d: torch.kaiser_window(4, device=d, dtype=torch.float64),
        lambda d: torch.hann_window(5, device=d),
        lambda d: torch.fft.fftfreq(5, device=d),
        lambda d: torch.tril_indices(3, 4, device=d),
        lambda d: torch.eye(3, device=d),
    ],
)
def test_factory_equals_cpu(cuda, make):
    ours, theirs = make(cuda), make("cpu")
    assert ours.is_cuda and ours.dtype is theirs.dtype
    assert torch.equal(ours.cpu(), theirs)


def test_arange_wrong_direction_raises_error_of_pytorch(cuda):
    with pytest.raises(RuntimeError, match="inconsistent with step sign"):
        torch.arange(0, 5, -1, device=cuda)


# -- calls that CUDA allows, and errors of CUDA ------------------------------------------------------------------------


def both(call, cuda):
    """Result or error of a call on the CPU and on the device."""
    found = []
    for where in ("cpu", cuda):
        try:
            result = call(where)
            torch.cuda.synchronize()
            found.append(result.tolist())
        except Exception as e:
            found.append((type(e), str(e)))
    return found


@pytest.mark.parametrize(
    "call",
    [
        lambda d: torch.zeros(3, dtype=torch.bool, device=d).neg(),
        lambda d: torch.ones(3, device=d) << 1,
        lambda d: torch.ones(3, dtype=torch.int64, device=d).logit_(),
        lambda d: torch.logcumsumexp(torch.zeros(3, 2, device=d), 3),
        lambda d: torch.zeros(3, device=d).uniform_(3, 1),
        lambda d: torch.zeros(1, device=d).expand(3).add_(1),
        lambda d: torch.zeros(1, device=d).expand(3).copy_(torch.ones(3, device=d)),
        lambda d: torch.linalg.inv(torch.zeros(3, 3, device=d)),
        *(
            lambda d, sizes=sizes: torch.ops.aten.fractional_max_pool3d(
                torch.ones(1, 2, 6, 6, 6, device=d), [2] * 3, [3] * 3, torch.ones(sizes, device=d)
            )
            for sizes in ((0, 2, 3), (1, 3, 3), (1, 2, 2), (1, 2))
        ),
    ],
)
def test_invalid_call_raises_error_of_cpu(cuda, call):
    theirs, ours = both(call, cuda)
    assert isinstance(theirs, tuple)
    assert ours == theirs


def without_gradients(where):
    """A layer whose weights require gradients, called without gradients. ATen's choice of product depends on `requires_grad`."""
    generator = torch.Generator().manual_seed(1)
    layer = torch.nn.Linear(32, 64)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(64, 32, generator=generator))
        layer.bias.fill_(0.5)
        x = torch.randn(2, 16, 32, generator=generator).to(where)
        return layer.to(where)(x.transpose(1, 0))


def without_gradients_and_with_odd_strides(where):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(18, 48, generator=generator).to(where).requires_grad_()
    x = torch.randn(2, 48, 1, generator=generator).to(where).transpose(1, 2)
    with torch.no_grad():
        return torch.nn.functional.linear(x, weight)


@pytest.mark.parametrize(
    "call",
    [
        lambda d: torch.zeros(1, device=d).expand(3).fill_(2),
        lambda d: torch.linalg.cholesky(torch.eye(3, device=d) * 4),  # the trial on zeros fails, but the call is valid
        lambda d: torch.nonzero(
            torch.tensor([1, 0, 2], device=d), out=torch.empty(5, 7, dtype=torch.int64, device=d).resize_(0)
        ),
        lambda d: torch.masked_select(
            torch.arange(4, device=d), torch.arange(4, device=d) > 1, out=torch.arange(0, device=d)
        ),
        lambda d: torch.arange(4, device=d)[torch.tensor([2, 0])],
        lambda d: torch.arange(4, device=d)[torch.tensor([True, False, True, True])],
        lambda d: torch.arange(4, device=d).index_put_((torch.tensor([1]),), torch.tensor(7, device=d)),
        lambda d: torch.arange(3, device=d, out=torch.empty(3, device=d)),
        lambda d: torch.deg2rad(torch.arange(9, device=d).half()),
        lambda d: copy.deepcopy(torch.arange(3, device=d)),
        without_gradients,
        without_gradients_and_with_odd_strides,
    ],
)
def test_valid_call_equals_cpu(cuda, call):
    theirs, ours = both(call, cuda)
    assert ours == theirs and not isinstance(theirs, tuple)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_histc_counts_integers_as_cuda_does(cuda, dtype):
    x = torch.tensor([3, 0, 1, 3, 7, 2, 3], dtype=dtype, device=cuda)
    found = torch.histc(x, bins=4, min=0, max=3)
    assert found.dtype is dtype and found.tolist() == [1, 1, 1, 3]
    assert torch.histc(x, bins=2).tolist() == [6, 1]
    out = torch.empty(0, dtype=dtype, device=cuda)
    assert torch.histc(x, bins=4, min=0, max=3, out=out) is out and out.tolist() == [1, 1, 1, 3]
    assert torch.histc(torch.full_like(x, 5), bins=2).tolist() == [0, 7]
    assert torch.histc(x[:0], bins=2).tolist() == [0, 0]


@pytest.mark.parametrize("call", [torch.amin, torch.add, torch.cumsum, torch.Tensor.zero_])
def test_tensor_with_65_dimensions_is_refused_with_pytorchs_error(cuda, call):
    t = torch.ones([1] * 64, device=cuda).unsqueeze(0)
    with pytest.raises(RuntimeError, match="only tensors with up to 64 dims are supported"):
        call(*{torch.add: (t, t), torch.cumsum: (t, 0), torch.amin: (t, 0)}.get(call, (t,)))


def test_histc_puts_each_integer_into_its_own_bin(cuda):
    x = torch.arange(101, device=cuda)
    assert torch.histc(x, bins=100, min=0, max=100).tolist() == [1] * 99 + [2]  # 29 / 100 * 100 is less than 29


@pytest.mark.parametrize("size", [2, 200])
def test_list_operator_refuses_complex_numbers_after_real_ones(cuda, size):
    def halves():
        return [torch.ones(size, size, dtype=torch.float16, device=cuda) for _ in range(2)]

    torch._foreach_mul_([t[:2, :2] for t in halves()], [2.0, 3.0])
    with pytest.raises(RuntimeError, match="ComplexHalf can't be cast to the desired output type Half"):
        torch._foreach_mul_(halves(), [2j, 3.0])


def test_trial_of_random_operator_keeps_host_generator(cuda):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    torch.zeros(3, 1, 1, device=cuda).cauchy_()
    assert torch.equal(torch.rand(3), expected)


def test_module_keeps_parameter_objects_also_where_pytorch_cannot_exchange_their_memory(cuda, monkeypatch):
    def missing():
        raise NotImplementedError("a tensor cannot move in place")

    monkeypatch.setattr(torch_private, "_change_backend", missing)
    monkeypatch.setattr(torch.nn.Module, "_apply", tensors._swapping(torch_private.apply_of_modules()))
    model = torch.nn.Linear(3, 2)
    weight = model.weight
    expected = weight.detach().clone()
    assert model.to(cuda).weight is weight and weight.device.type == "cuda"
    assert torch.equal(model.cpu().weight, expected) and not torch.__future__.get_swap_module_params_on_conversion()
    with pytest.raises(NotImplementedError, match="cannot move in place"):
        model.weight.data = model.weight.data.to(cuda)


def test_module_to_device_keeps_parameter_objects(cuda):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = list(model.parameters())
    model.to(cuda)
    assert all(p is q for p, q in zip(before, model.parameters(), strict=True))
    old = model[0].weight.tolist()
    model(torch.randn(4, 3, device=cuda)).pow(3).sum().backward()
    optimizer.step()
    assert model[0].weight.tolist() != old and model[0].weight.is_cuda


def on_host_with_gradient():
    weight = nn.Parameter(torch.arange(3.0))
    weight.grad = torch.ones(3)
    return weight


def test_data_assignment_from_other_device_works(cuda):
    weight = on_host_with_gradient()
    weight.label, address = "mine", weight._cdata
    optimizer = torch.optim.SGD([weight], lr=0.5)
    weight.data = weight.data.cuda()
    assert isinstance(weight, nn.Parameter) and weight.is_leaf and weight.requires_grad and weight.label == "mine"
    assert weight.is_cuda and weight.grad.is_cpu and weight._cdata == address  # as CUDA
    weight.grad.data = weight.grad.data.cuda()
    optimizer.step()
    assert weight.tolist() == [-0.5, 0.5, 1.5]
    weight.data = torch.zeros(2)
    assert weight.tolist() == [0, 0] and not weight.is_cuda and weight.grad.is_cuda


def test_data_assignment_to_tensor_in_graph_works(cuda):
    weight = nn.Parameter(torch.ones(3))
    view, kept = weight[1:], (weight * 2).exp()
    weight.data = torch.full((3,), 5.0, device=cuda)
    assert weight.is_cuda and view._base is weight and view.is_cpu and view.tolist() == [1, 1]
    (weight * 2).sum().backward()
    assert weight.grad.tolist() == [2, 2, 2] and weight.grad.is_cuda
    with pytest.raises(RuntimeError, match="device"):  # as CUDA: the gradient of the host
        kept.sum().backward()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("change", [torch.Tensor.conj, torch.Tensor.to_sparse])
def test_data_assignment_of_special_tensor_from_other_device_works(cuda, change):
    values = torch.tensor([[1 + 1j, 2j], [0, 3]])
    t, expected = change(torch.ones_like(values)), change(values).to_dense().resolve_conj()
    t.data = change(values.to(cuda))
    assert t.is_cuda and torch.equal((t * 2).to_dense().cpu(), expected * 2)
    t.data = change(values)
    assert t.is_cpu and torch.equal((t * 2).to_dense(), expected * 2)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_deletion_of_data_raises_error_of_pytorch(cuda, device):
    t = torch.ones(2, device=device)
    with pytest.raises(RuntimeError, match="Deleting tensor data is not allowed"):
        del t.data


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_data_assignment_of_other_layout_raises(cuda):
    weight = torch.ones(2, 2)
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        weight.data = torch.ones(2, 2, device=cuda).to_sparse()
    compressed = torch.ones(2, 2).to_sparse_csr()
    with pytest.raises(RuntimeError, match="incompatible tensor type"):  # PyTorch would not copy the values
        compressed.data = torch.ones(2, 2, device=cuda).to_sparse_csr()
    assert weight.is_cpu and (weight + 1).tolist() == [[2, 2], [2, 2]]


def test_module_conversion_changes_the_memory_of_its_tensors(cuda):
    model = nn.Linear(2, 2)
    model.weight.grad = torch.ones(2, 2)
    kept = [model.weight, model.weight.grad]
    before, view = [t._cdata for t in kept], model.weight[:]
    model.to(cuda).double()
    assert [t._cdata for t in (model.weight, model.weight.grad)] == before
    assert all(t.is_cuda and t.dtype is torch.float64 for t in kept)
    assert view.is_cpu and view._base is model.weight
    optimizer = torch.optim.SGD(model.parameters(), 1)
    expected = (model.weight - 1).tolist()
    optimizer.step()
    assert model.weight.tolist() == expected and model.cpu().weight.tolist() == expected


def test_module_conversion_makes_new_tensors_if_the_script_wants_them(cuda):
    model = nn.Linear(2, 2)
    before = model.weight
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.to(cuda)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert before.is_cpu and model.weight.is_cuda


def test_data_assignment_of_meta_tensor_raises_error_of_pytorch(cuda):
    weight = nn.Parameter(torch.empty(3, device="meta"))
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        weight.data = torch.ones(3, device=cuda)


def test_lazy_module_is_converted_on_the_device_before_its_first_call(cuda):
    model = torch.nn.LazyLinear(2).to(cuda).double()
    assert model.weight.dtype is torch.float64 and model(torch.ones(1, 3, device=cuda, dtype=torch.float64)).is_cuda
    assert model.weight.shape == (2, 3)


@pytest.mark.parametrize(
    "wanted", [(False, True, True), (False, True, False), (False, False, True), (True, False, False)]
)
@pytest.mark.parametrize("train", [True, False])
def test_batch_norm_computes_only_the_gradients_that_are_asked_for(cuda, wanted, train):
    def gradients(device):
        x, weight, bias = torch.arange(12.0).view(2, 3, 2), torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3)
        given = [t.to(device).requires_grad_(w) for t, w in zip((x, weight, bias), wanted, strict=True)]
        mean, var = torch.zeros(3, device=device), torch.ones(3, device=device)
        y = nn.functional.batch_norm(given[0], mean, var, given[1], given[2], training=train)
        return torch.autograd.grad(y.square().sum(), [t for t in given if t.requires_grad])

    for found, expected in zip(gradients(cuda), gradients("cpu"), strict=True):
        torch.testing.assert_close(found.cpu(), expected)


def test_where_takes_a_condition_on_the_host_without_dimensions(cuda):
    x = torch.tensor([1.0, 2.0], device=cuda)
    for condition in (torch.tensor(True), torch.tensor(False)):
        assert torch.equal(torch.where(condition, x, -x).cpu(), torch.where(condition, x.cpu(), -x.cpu()))
        assert torch.equal(torch.where(condition, 3.0, x).cpu(), torch.where(condition, 3.0, x.cpu()))
    with pytest.raises(RuntimeError, match="boolean tensor"):
        torch.where(torch.tensor(1.0), x, -x)


def test_memory_of_a_lazy_module_cannot_be_shared(cuda):
    for model in (torch.nn.LazyLinear(2), torch.nn.Sequential(torch.nn.LazyBatchNorm1d())):
        with pytest.raises(RuntimeError, match="share memory on an uninitialized"):
            model.share_memory()


def test_lazy_module_initializes_on_device(cuda):
    model = torch.nn.LazyLinear(2).to(cuda)
    assert model(torch.ones(1, 3, device=cuda)).shape == (1, 2)
    assert model.weight.is_cuda and model.weight.shape == (2, 3)


def test_device_context_makes_parameters_on_device(cuda):
    with torch.device(cuda):
        assert torch.nn.Linear(2, 2).weight.is_cuda


@pytest.mark.parametrize("value", [(1 << 64) - 1, (1 << 63) + 5, 1 << 63, (1 << 63) - 1])
def test_fill_of_uint64_with_any_value_equals_the_host(cuda, value):
    expected = torch.full((2,), value, dtype=torch.uint64)
    assert torch.full((2,), value, dtype=torch.uint64, device=cuda).tolist() == expected.tolist()
    assert torch.zeros(2, dtype=torch.uint64, device=cuda).fill_(value).tolist() == expected.tolist()


def test_integer_that_is_too_large_error_says_cuda(cuda):
    with pytest.raises(OverflowError, match="on cuda"):
        torch.ones(2, dtype=torch.uint64, device=cuda).add_(1 << 63)


def test_operators_on_lists_take_tensors_of_host_and_device_one_by_one(cuda):
    """As on CUDA. A host tensor without dimensions is written, too."""
    for shape in ((3,), ()):
        mixed = [torch.ones(shape, device=cuda), torch.ones(shape)]
        doubled = torch._foreach_mul(mixed, 2)
        torch._foreach_add_(mixed, 4)
        torch._foreach_mul_(mixed, doubled)
        assert [t.sum().item() for t in mixed] == [10.0 * mixed[0].numel()] * 2
        assert [t.device.type for t in (*mixed, *doubled)] == ["cuda", "cpu"] * 2
    assert [t.item() for t in torch._foreach_pow(2, [torch.ones((), device=cuda), torch.ones(())])] == [2.0, 2.0]
    with pytest.raises(RuntimeError, match="cuda:0 and cpu"):
        torch._foreach_add([torch.ones(3, device=cuda)], [torch.ones(3)])


def test_pytorchs_references_in_python_run_on_the_device(cuda):
    from torch._prims.context import TorchRefsMode

    a, b = torch.tensor([[1.0, 2.0], [3.0, -4.0]]), torch.tensor([[0.5, -1.0], [2.0, 1.0]])
    there, other = a.to(cuda), b.to(cuda)
    with TorchRefsMode(strict=True):  # refuses every function that it does not know
        found = [torch.atan2(there, other), torch.triu(there), torch.ones(2, device=cuda), there.to(torch.bfloat16)]
        assert there.device.type == "cuda"
    expected = [torch.atan2(a, b), torch.triu(a), torch.ones(2), a.to(torch.bfloat16)]
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu(), two)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.logcumsumexp(1),
        lambda x: F.multi_margin_loss(x, torch.zeros(len(x), dtype=torch.long, device=x.device)),
        lambda x: F.multilabel_margin_loss(x, torch.zeros(x.shape, dtype=torch.long, device=x.device)),
        lambda x: F.fractional_max_pool3d(
            x[None, None].expand(1, 1, 4, *x.shape),
            2,
            (2, 2, 3),
            _random_samples=torch.full((1, 1, 3), 0.5, device=x.device),
        ),
    ],
    ids=["logcumsumexp", "multi_margin_loss", "multilabel_margin_loss", "fractional_max_pool3d"],
)
def test_operator_and_gradient_do_not_wait_for_device(cuda, call):
    host = torch.randn(4, 6, requires_grad=True)
    expected = torch.autograd.grad(call(host).sum(), host)[0]
    x = host.detach().cuda().requires_grad_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = torch.autograd.grad(call(x).sum(), x)[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("exponent", [True, False])
def test_power_of_bools_with_a_bool_is_bool(cuda, exponent):
    host = torch.tensor([True, False])
    for _ in range(2):
        found = host.to(cuda) ** exponent
        assert found.dtype is torch.bool and torch.equal(found.cpu(), host**exponent)
        for exponents in (exponent, [exponent]):
            (found,) = torch._foreach_pow([host.to(cuda)], exponents)
            assert found.dtype is torch.bool and torch.equal(found.cpu(), host**exponent)
    assert (host.to(cuda) ** 2).dtype is torch.int64
