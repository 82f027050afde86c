"""Optimizers in each implementation, gradient scaling and clipping give the same numbers as on the CPU."""

import inspect

import pytest
import torch
from torch import nn

INF_AT = 1  # the step whose gradients overflow


def train(device, optimizer, clip=None, scaler=None, **options):
    """Train five steps. Returns losses, scales, norms, parameters and the state of the scaler."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
    opt = getattr(torch.optim, optimizer)(model.parameters(), lr=0.05, **options)
    seen = []
    for step in range(5):
        x = torch.randn(4, 6)
        if scaler is not None and step == INF_AT:
            x[0, 0] = torch.inf
        loss = model(x.to(device)).square().mean()
        opt.zero_grad()
        if scaler is None:
            loss.backward()
            opt.step()
        else:
            scaler.scale(loss).backward()
            if clip is not None:
                scaler.unscale_(opt)
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=clip == "foreach")
                seen.append(str(norm.item()))
            scaler.step(opt)
            scaler.update()
            seen.append(scaler.get_scale())
        seen.append(str(loss.item()))
    state = [v for s in opt.state_dict()["state"].values() for v in s.values() if isinstance(v, torch.Tensor)]
    return seen, [t.detach().cpu() for t in (*model.parameters(), *state)], scaler and scaler.state_dict()


def assert_same(ours, theirs):
    assert ours[0] == theirs[0] and ours[2] == theirs[2] and len(ours[1]) == len(theirs[1])
    for a, b in zip(ours[1], theirs[1], strict=True):
        assert torch.equal(a, b)


FUSED = ["SGD", "Adam", "AdamW", "Adagrad"]
OPTIONS = {
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adam": {"amsgrad": True, "weight_decay": 0.1},
    "AdamW": {"maximize": True},
    "Adagrad": {"lr_decay": 0.1},
}
FOREACH = ["Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "Adafactor"]


@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("optimizer", FUSED)
def test_optimizer_equals_cpu(cuda, optimizer, how):
    if optimizer == "Adagrad" and "fused" in how and "cuda_unsupported" in inspect.getsource(torch.optim.Adagrad):
        with pytest.raises(RuntimeError, match="`fused=True` requires"):  # as on CUDA
            train(cuda, optimizer, **how)
        return
    for options in ({}, OPTIONS[optimizer]):
        assert_same(train(cuda, optimizer, **how, **options), train("cpu", optimizer, **how, **options))


@pytest.mark.parametrize("optimizer", FOREACH)
def test_other_optimizer_equals_cpu(cuda, optimizer):
    for foreach in (True, False):
        assert_same(train(cuda, optimizer, foreach=foreach), train("cpu", optimizer, foreach=foreach))


def test_foreach_is_the_default_as_on_cuda(cuda):
    assert_same(train(cuda, "NAdam"), train("cpu", "NAdam", foreach=True))


@pytest.mark.parametrize("clip", [None, "foreach", "one by one"])
@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_scaled_training_equals_cpu(cuda, optimizer, how, clip):
    def run(device):
        return train(device, optimizer, clip, torch.amp.GradScaler(device, growth_interval=2), **how)

    ours = run(cuda)
    assert_same(ours, run("cpu"))
    scales = [s for s in ours[0] if isinstance(s, float)]
    assert scales == [65536.0, 32768.0, 32768.0, 65536.0, 65536.0]


def test_older_scaler_state_round_trips(cuda):
    with pytest.warns(FutureWarning):
        scaler = torch.cuda.amp.GradScaler(init_scale=8.0)
    loss = torch.ones(1, device=cuda)
    assert scaler.is_enabled() and scaler.scale(loss).item() == 8.0
    other = torch.amp.GradScaler("cuda")
    other.load_state_dict(scaler.state_dict())
    assert other.get_scale() == 8.0 and other.scale([loss, loss * 2])[1].item() == 16.0
    other.update(new_scale=torch.full((), 4.0, device=cuda))
    assert other.get_scale() == 4.0


def test_scaler_skips_step_after_overflow(cuda):
    weight = torch.ones(3, device=cuda, requires_grad=True)
    opt = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    scaler.scale((weight * torch.tensor([1.0, torch.inf, 1.0], device=cuda)).sum()).backward()
    scaler.unscale_(opt)
    with pytest.raises(RuntimeError, match="has already been called on this optimizer"):
        scaler.unscale_(opt)
    assert scaler.step(opt) is None and weight.tolist() == [1.0, 1.0, 1.0]
    scaler.update()
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm", [2.0, 1.0, torch.inf])
def test_clipping_equals_cpu(cuda, norm, foreach):
    def run(device):
        torch.manual_seed(1)
        parameters = [nn.Parameter(torch.zeros(n).to(device)) for n in (3, 5, 1)]
        for p in parameters:
            p.grad = torch.randn(p.shape).to(device)
        total = nn.utils.clip_grad_norm_(parameters, 0.5, norm, foreach=foreach)
        nn.utils.clip_grad_value_(parameters, 0.2, foreach=foreach)
        return [total.cpu(), *(p.grad.cpu() for p in parameters)]

    for ours, theirs in zip(run(cuda), run("cpu"), strict=True):
        assert torch.allclose(ours, theirs) if foreach is None else torch.equal(ours, theirs)


def test_load_state_dict_moves_optimizer_state_to_device(cuda):
    weight = nn.Parameter(torch.ones(3, device=cuda))
    weight.grad = torch.ones_like(weight)
    opt = torch.optim.Adam([weight], fused=True)
    opt.step()
    state = opt.state_dict()["state"][0]
    assert state["exp_avg"].is_cuda and state["step"].is_cuda  # fused Adam counts on the device
    there = torch.optim.Adam([nn.Parameter(torch.ones(3))])
    there.load_state_dict(opt.state_dict())
    assert not there.state_dict()["state"][0]["exp_avg"].is_cuda
    opt.load_state_dict(there.state_dict())
    assert opt.state_dict()["state"][0]["exp_avg"].is_cuda


#: Operators on lists that write the first one.
WRITES_LISTS = {
    "number": lambda a, b: torch._foreach_add_(a, 1.0),
    "lists": lambda a, b: torch._foreach_mul_(a, b),
    "numbers": lambda a, b: torch._foreach_sub_(a, [1.0, 2.0]),
    "unary": lambda a, b: torch._foreach_neg_(a),
    "pointwise": lambda a, b: torch._foreach_addcmul_(a, b, b),
    "ternary": lambda a, b: torch._foreach_lerp_(a, b, 0.5),
    "zero": lambda a, b: torch._foreach_zero_(a),
    "copy": lambda a, b: torch._foreach_copy_(a, b),
    "shared": lambda a, b: torch._foreach_add_([a[0], a[0]], 1.0),
}


@pytest.mark.parametrize("name", WRITES_LISTS)
def test_operator_that_writes_a_list_counts_a_change_of_each_tensor(cuda, name):
    counts = {}
    for device in ("cpu", cuda):
        a, b = ([torch.ones(3, device=device) for _ in range(2)] for _ in range(2))
        counts[device] = []
        for _ in range(3):  # the second call with a signature is native
            WRITES_LISTS[name](a, b)
            counts[device] += [t._version for t in a + b]
    assert counts[cuda] == counts["cpu"]


def test_saved_tensor_that_an_operator_on_lists_changed_is_refused_by_backward(cuda):
    for _ in range(2):
        w = torch.ones(3, device=cuda, requires_grad=True)
        y = w * 2
        z = y * y
        torch._foreach_add_([y], 1.0)
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            z.sum().backward()


def test_operator_that_writes_a_list_takes_tensors_of_inference_mode(cuda):
    with torch.inference_mode():
        tensors = [torch.ones(3, device=cuda) for _ in range(2)]
        for _ in range(3):
            torch._foreach_add_(tensors, 1.0)
    assert [t.tolist() for t in tensors] == [[4.0] * 3] * 2


def _floats(n, dtype=torch.float32):
    return torch.arange(1.0, 1 + n).to(dtype)


#: Calls on lists of three tensors of which the second one is wrong, and the dtype and the size of this one.
WRONG_SECOND = {
    "size": (lambda a, b: torch._foreach_add_(a, b), 3, torch.float32),
    "dtype": (lambda a, b: torch._foreach_div_(a, b), 2, torch.int64),
    "number": (lambda a, b: torch._foreach_mul_(a, 2.5), 2, torch.int64),
    "value of number": (lambda a, b: torch._foreach_pow_(a, -1), 2, torch.int64),
    "bool": (lambda a, b: torch._foreach_neg_(a), 2, torch.bool),
    "copy": (lambda a, b: torch._foreach_copy_(a, b), 3, torch.float32),
}


@pytest.mark.parametrize("name", WRONG_SECOND)
def test_error_in_list_leaves_what_cuda_leaves(cuda, name):
    """CUDA's kernels on lists compute such lists tensor by tensor, as the CPU does."""
    call, size, dtype = WRONG_SECOND[name]
    for _ in range(2):
        found = []
        for device in ("cpu", cuda):
            written = [_floats(2).to(device), _floats(size, dtype).to(device), _floats(2).to(device)]
            other = [torch.full((2,), 3.0, device=device) for _ in range(3)]
            with pytest.raises(RuntimeError) as error:
                call(written, other)
            found.append((str(error.value), [t.tolist() for t in written]))
        assert found[0] == found[1] and found[0][1][0] != [1.0, 2.0] and found[0][1][2] == [1.0, 2.0]
