"""Tests of tensor subclasses that wrap device tensors, as quantized and logging tensors do."""

import pytest
import torch
from torch.overrides import TorchFunctionMode
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


# -- functions that Wooly replaces, with `__torch_function__` ----------------------------------------------------------------

LIKE = ("empty_like", "full_like", "ones_like", "zeros_like", "rand_like", "randn_like", "randint_like")


class Table:
    """A container that is no tensor and that handles functions by identity."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        names = [name for name in (*LIKE, "tensor_split") if getattr(torch, name) is func]
        return (*names, args[1:], kwargs)


@pytest.mark.parametrize("name", LIKE)
def test_replaced_function_is_passed_to_a_container_as_programs_see_it(cuda, name):
    assert getattr(torch, name)(Table(), device="cuda") == (name, (), {"device": "cuda"})
    assert getattr(torch, name)(input=Table(), device="cuda")[0] == name
    assert torch.tensor_split(Table(), 2) == ("tensor_split", (2,), {})


class Seen(TorchFunctionMode):
    """Collects the names of the functions that it sees, by identity."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names += [name for name in (*LIKE, "empty", "zeros", "arange", "tensor") if getattr(torch, name) is func]
        return func(*args, **(kwargs or {}))


def test_replaced_function_is_passed_to_a_mode_as_programs_see_it(cuda):
    with Seen() as seen:
        x = torch.zeros(2, device="cuda")
        assert torch.empty_like(x).device.type == torch.arange(3, device="cuda").device.type == "cuda"
        torch.tensor([1.0], device="cuda")
    assert seen.names == ["zeros", "empty_like", "arange", "tensor"]


def test_replaced_function_keeps_the_class_of_a_tensor(cuda):
    x = torch.arange(3.0, device="cuda").as_subclass(Named)
    made = torch.zeros_like(x)
    assert type(made) is Named and made.device.type == "cuda" and made.tolist() == [0, 0, 0]
    assert type(torch.ones_like(torch.nn.Parameter(torch.zeros(2, device="cuda")))) is torch.Tensor


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor", "ignore:Sparse CSR tensor support is in beta")
def test_function_that_takes_a_tensor_as_data_ignores_its_class(cuda):
    x = torch.arange(3.0, device="cuda").as_subclass(Named)
    assert type(torch.tensor(x)) is torch.Tensor and torch.as_tensor(x) is x and torch.asarray(x) is x
    assert type(torch.as_tensor(x, dtype=torch.float64)) is torch.Tensor
    at = torch.tensor([[0, 2, 4]], device="cuda").as_subclass(Named)
    coo = torch.sparse_coo_tensor(at, x, (5,), check_invariants=True)
    assert type(coo) is torch.Tensor and coo.to_dense().tolist() == [0, 0, 1, 0, 2]
    rows = torch.tensor([0, 1, 3], device="cuda").as_subclass(Named)
    columns = torch.tensor([1, 0, 1], device="cuda").as_subclass(Named)
    csr = torch.sparse_csr_tensor(rows, columns, x, (2, 2), check_invariants=True)
    assert type(csr) is torch.Tensor and csr.to_dense().tolist() == [[0, 0], [1, 2]]


def test_device_context_sets_the_device_of_replaced_and_of_original_functions(cuda):
    with torch.device("cuda"), Seen() as seen:
        assert torch.zeros(2).device.type == torch.tensor([1]).device.type == "cuda"
        assert torch._C._VariableFunctions.ones(2).device.type == "cuda"
    assert seen.names == ["zeros", "tensor"]
    assert torch.zeros(2).device.type == "cpu"
