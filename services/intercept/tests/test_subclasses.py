"""Tests of tensor subclasses that wrap device tensors, as quantized and logging tensors do."""

import torch
from torch.utils._pytree import tree_map


class Wrapper(torch.Tensor):
    """Holds a tensor, has its device, and runs each operator on what it holds."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            dtype=held.dtype,
            device=held.device,
            requires_grad=held.requires_grad,
        )

    def __init__(self, held):
        self.held = held.detach()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map(lambda a: a.held if isinstance(a, cls) else a, (args, kwargs or {}))
        return tree_map(lambda r: cls(r) if isinstance(r, torch.Tensor) else r, func(*args, **kwargs))


def test_wrapper_of_a_device_tensor_is_on_the_device(cuda):
    x = Wrapper(torch.arange(3.0, device="cuda"))
    assert x.device == torch.device("cuda", 0) and x.is_cuda and (x * 2).held.tolist() == [0, 2, 4]


def test_wrapper_moved_to_the_device_has_gradients(cuda):
    """A wrapper on CUDA itself would end the process in autograd, which asks for the guard of its device."""
    x = Wrapper(torch.arange(3.0)).requires_grad_()
    for moved in (x.to("cuda"), x.cuda()):
        (gradient,) = torch.autograd.grad((moved * 3).sum(), x)
        assert not gradient.is_cuda and gradient.held.tolist() == [3, 3, 3]


def test_jacobian_of_a_wrapper_over_two_devices_equals_that_of_a_tensor(cuda):
    def results(x, y):
        return x * y, (x * y).cuda()

    plain = torch.arange(1.0, 4.0), torch.arange(2.0, 5.0)
    wanted = torch.autograd.functional.jacobian(results, plain, vectorize=True)
    found = torch.autograd.functional.jacobian(results, tuple(map(Wrapper, plain)), vectorize=True)
    assert all(w.equal(f.held) for ws, fs in zip(wanted, found, strict=True) for w, f in zip(ws, fs, strict=True))


class Named(torch.Tensor):
    """A subclass without behaviour of its own."""


def test_gradient_of_a_subclass_is_the_same_object_each_time(cuda):
    x = torch.arange(3.0, device="cuda").as_subclass(Named).requires_grad_()
    (x * 2).sum().backward()
    assert x.grad is x.grad and x.grad.tolist() == [2, 2, 2]


def test_property_of_the_gradient_has_the_names_of_the_descriptor(cuda):
    """TorchDynamo reads them while it is imported."""
    getter = torch.Tensor.grad.__get__
    assert (getter.__self__.__name__, getter.__self__.__objclass__) == ("grad", torch._C.TensorBase)
    assert getter in torch.overrides.get_default_nowrap_functions()
