"""Operators on lists of more tensors than an instruction takes."""

import inspect

import pytest
import torch
from torch import nn
from wooly.kernels import lists


@pytest.fixture
def few(monkeypatch):
    """An instruction takes 12 tensors."""
    monkeypatch.setattr(lists, "_MOST", 12)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("join", [torch.cat, torch.stack])
def test_more_tensors_than_an_instruction_takes_are_joined(cuda, join):
    found = []
    for where in ("cpu", cuda):
        parts = [torch.full((1, 2), float(k), device=where, requires_grad=True) for k in range(11)]
        whole = join(parts, 1)
        (whole * torch.arange(22.0, device=where).view(whole.shape)).sum().backward()
        out = join([t.detach() for t in parts], 1, out=torch.empty(0, device=where))
        found.append([whole.tolist(), out.tolist(), [t.grad.tolist() for t in parts]])
    assert found[0] == found[1]
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        torch.cat([torch.ones(2, k, device=cuda) for k in range(1, 11)])


#: Before PyTorch 2.13, as on CUDA, Adagrad refuses `fused=True` (test_optimizers has this error).
REFUSED = pytest.mark.skipif(
    "cuda_unsupported" in inspect.getsource(torch.optim.Adagrad), reason="this PyTorch has no fused Adagrad for devices"
)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    "more",
    [
        {"kind": torch.optim.AdamW, "foreach": True, "amsgrad": True},
        {"kind": torch.optim.AdamW, "fused": True},
        {"kind": torch.optim.AdamW, "fused": True, "amsgrad": True},
        {"kind": torch.optim.SGD, "fused": True, "momentum": 0.9},
        {"kind": torch.optim.SGD, "foreach": True, "momentum": 0.9},
        pytest.param({"kind": torch.optim.Adagrad, "fused": True}, marks=REFUSED),
        {"kind": torch.optim.NAdam, "foreach": True},
    ],
    ids=str,
)
def test_optimizers_of_many_parameters(cuda, more):
    more = dict(more)
    kind = more.pop("kind")
    found = []
    for where in ("cpu", cuda):
        given = torch.Generator().manual_seed(0)
        weights = [nn.Parameter(torch.randn(3, generator=given).to(where)) for _ in range(25)]
        optimizer = kind(weights, lr=0.1, **more)
        for _ in range(3):
            for k, w in enumerate(weights):
                w.grad = torch.full_like(w, k - 9.0)
            norm = nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
        found.append([norm.item(), [w.tolist() for w in weights]])
    assert found[0] == found[1]


@pytest.mark.usefixtures("few")
def test_functions_of_lists(cuda):
    found = []
    for where in ("cpu", cuda):
        x = [torch.full((2,), k + 0.5, device=where) for k in range(11)]
        numbers, half = [float(k) for k in range(11)], torch.tensor(0.5, device=where)
        y = torch._foreach_mul(x, numbers)
        torch._foreach_addcdiv_(y, x, x, 0.25)
        torch._foreach_lerp_(y, x, numbers)
        kept = torch._foreach_pow(2.0, x)
        torch._foreach_copy_(y[:5], kept[:5])
        results = [y, kept, torch._foreach_mul(x, half), torch._foreach_max(x), torch._foreach_norm(x, ord=1)]
        found.append([[t.tolist() for t in result] for result in results])
    assert found[0] == found[1]
    with pytest.raises(RuntimeError, match="must have the same number of tensors"):
        torch._foreach_add(x, x[:9])


@pytest.mark.usefixtures("few")
def test_scaler_sees_an_infinite_gradient_of_any_part(cuda):
    grads = [torch.ones(2, device=cuda) for _ in range(25)]
    found, scale = torch.zeros(1, device=cuda), torch.full((1,), 0.5, device=cuda)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, scale)
    assert found.item() == 0 and torch.stack(grads).eq(0.5).all()
    grads[3][1] = torch.inf
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, scale)
    assert found.item() == 1


def test_list_of_ten_thousand_tensors(cuda):
    x = torch.arange(10_000.0, device=cuda)
    torch._foreach_mul_(list(x.unbind()), 2.0)
    assert torch.equal(x.cpu(), torch.arange(10_000.0) * 2)
