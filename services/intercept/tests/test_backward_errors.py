"""Exceptions of Python code that autograd calls in a backward: hooks, custom functions, saved tensors."""

import pytest
import torch


class HookError(Exception):
    """Raised by the tests' hooks."""


class RaisingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        raise HookError("in a backward")


def _raise(*_):
    raise HookError("in a hook")


def _hook_of_tensor(x):
    y = x * 2
    y.register_hook(_raise)
    return y


def _hook_of_node(x):
    y = x * 2
    y.grad_fn.register_hook(_raise)
    return y


def _prehook_of_node(x):
    y = (x * 2).tanh()
    y.grad_fn.register_prehook(_raise)
    return y


def _hook_after_accumulation(x):
    x.register_post_accumulate_grad_hook(_raise)
    return x * 2


def _saved_tensors(x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, _raise):
        return (x * 2).tanh()


def _module(x):
    layer = torch.nn.Linear(3, 3).to("cuda")
    layer.register_full_backward_hook(_raise)
    return layer(x)


@pytest.mark.parametrize(
    "make",
    [
        _hook_of_tensor,
        _hook_of_node,
        _prehook_of_node,
        _hook_after_accumulation,
        _saved_tensors,
        _module,
        RaisingFunction.apply,
    ],
)
@pytest.mark.parametrize(
    "begin", [lambda y, x: y.backward(), lambda y, x: torch.autograd.grad(y, x)], ids=["backward", "grad"]
)
def test_exception_in_backward_is_raised_and_process_goes_on(cuda, make, begin):
    """PyTorch's guard for backends in Python once ended the process: "terminate called without an active exception"."""
    x = torch.ones(3, device=cuda, requires_grad=True)
    loss = make(x).sum() * 3
    if make is _hook_after_accumulation and "grad" in begin.__code__.co_names:
        begin(loss, x)  # nothing is accumulated
    else:
        with pytest.raises(HookError, match="in a") as error:
            begin(loss, x)
        assert error.value.__context__ is None and error.traceback[-1].name in ("_raise", "backward")
    y = (x * 4).tanh().sum()
    assert torch.autograd.grad(y, x)[0].shape == (3,)


@pytest.mark.parametrize("kind", [torch.nn.GRU, torch.nn.LSTM])
def test_backward_of_recurrent_network_without_any_gradient(cuda, kind):
    class Cut(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, grad):
            return None

    x = torch.ones(2, 1, 3, device=cuda, requires_grad=True)
    y, _ = kind(3, 4, device=cuda)(x)
    (grad,) = torch.autograd.grad(Cut.apply(y).sum(), x, allow_unused=True)
    assert grad is None or not grad.any().item()


def test_errors_about_gradients_of_another_device_name_cuda(cuda):
    ours, theirs = torch.ones(2, device=cuda).requires_grad_(), torch.ones(2).requires_grad_()
    for t, grad, kinds in (
        (theirs, ours, "'cuda' to a tensor with device type 'cpu'"),
        (ours, theirs, "'cpu' to a tensor with device type 'cuda'"),
    ):
        with pytest.raises(RuntimeError, match=f"attempting to assign a gradient with device type {kinds}"):
            t.grad = grad.detach()
    with pytest.raises(RuntimeError, match="expected device cuda:0 but got cpu"):
        torch.autograd.backward(ours * 2, torch.ones(2))
    with pytest.raises(RuntimeError, match=r"gradient of size '\[3\]'"):
        ours.grad = torch.ones(3, device=cuda)
    ours.grad = torch.ones(2, device=cuda)
    assert ours.grad.tolist() == [1, 1]
    del ours.grad
    assert ours.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_changed_tensor_error_names_type_of_cuda(cuda, dtype):
    x = torch.ones(3, device=cuda, dtype=dtype, requires_grad=True)
    y = x.exp()
    y.add_(1)
    name = {torch.float32: "FloatTensor", torch.bfloat16: "BFloat16Tensor"}[dtype]
    with pytest.raises(RuntimeError, match=rf"inplace operation: \[torch\.cuda\.{name} \[3\]\]"):
        y.sum().backward()
