"""Kernels in Python that scripts register for PyTorch's own operators under the key CUDA."""

import pytest
import torch
from torch.nn import functional as F
from wooly import api
from wooly.facade import registrations

pytestmark = pytest.mark.usefixtures("cuda")

aten = torch.ops.aten


@pytest.fixture
def library():
    library = torch.library.Library("aten", "IMPL")
    yield library
    library._destroy()


class Noted:
    """A kernel that notes its calls."""

    def __init__(self, kernel):
        self.calls = 0
        self._kernel = kernel

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self._kernel(*args, **kwargs)


def _values():
    return torch.arange(4.0, device="cuda")


def test_kernel_for_cuda_replaces_the_devices_until_its_library_ends(library):
    x = _values()
    assert (x + x).tolist() == [0, 2, 4, 6]
    library.impl("add.Tensor", lambda a, b, *, alpha=1: aten.sub(a, b, alpha=-10 * alpha), "CUDA")
    for _ in range(3):  # native calls know the signature
        assert (x + x).tolist() == [0, 11, 22, 33]
        assert (x.cpu() + x.cpu()).tolist() == [0, 2, 4, 6]
    library._destroy()
    assert (x + x).tolist() == [0, 2, 4, 6]


def test_gradient_of_operator_with_kernel_for_cuda_is_pytorchs(library):
    library.impl("silu", lambda x: x * 100, "CUDA")
    x = torch.zeros(2, device="cuda", requires_grad=True)
    F.silu(x + 1).sum().backward()
    expected = torch.ones(2, requires_grad=True)
    F.silu(expected).sum().backward()
    assert torch.equal(x.grad.cpu(), expected.grad)


@pytest.mark.parametrize("way", ["of one key", "decorator", "register_kernel", "overload", "qualified"])
def test_kernel_for_cuda_is_called_whatever_way_registers_it(way):
    def kernel(x):
        return x + 5

    with torch.library._scoped_library("aten", "IMPL", "CUDA" if way == "of one key" else "") as library:
        if way == "of one key":
            library.impl("relu", kernel)
        elif way == "decorator":
            torch.library.impl("aten::relu", "cuda", lib=library)(kernel)
        elif way == "register_kernel":
            torch.library.register_kernel("aten::relu", "cuda", kernel, lib=library)
        else:
            library.impl(aten.relu.default if way == "overload" else "aten::relu", kernel, "CUDA")
        assert _values().relu().tolist() == [5, 6, 7, 8]
    assert _values().relu().tolist() == [0, 1, 2, 3]


def test_kernel_of_collected_library_is_gone():
    library = torch.library.Library("aten", "IMPL")
    library.impl("relu", lambda x: x + 5, "CUDA")
    assert _values().relu().tolist() == [5, 6, 7, 8]
    del library
    assert _values().relu().tolist() == [0, 1, 2, 3]


def test_kernel_may_call_the_kernel_that_it_replaces(library):
    replaced = torch.library.get_kernel("aten::sin", "CUDA")
    library.impl("sin", lambda keys, x: replaced.call_boxed(keys, x) + 100, "CUDA", with_keyset=True)
    assert torch.equal(_values().sin(), _values().cpu().sin().cuda() + 100)


def test_factory_for_cuda_is_called(library):
    library.impl("zeros", lambda size, **named: torch.full(size, 7, device=named["device"]), "CUDA")
    assert torch.zeros(2, device="cuda").tolist() == [7, 7] and torch.zeros(2).tolist() == [0, 0]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_operators_that_are_recorded_whole_call_their_parts(library, mode):
    product = Noted(lambda bias, a, b, **scales: torch.mm(a, b) + bias)
    softmax = Noted(lambda x, dim, half: (x - x.amax(dim, True)).exp())
    x, w, b = (torch.ones(shape, device="cuda") for shape in ((2, 4), (3, 4), (3,)))
    classes = torch.tensor([0, 1], device="cuda")
    expected = F.linear(x, w, b)
    library.impl("addmm", product, "CUDA")
    library.impl("_log_softmax", softmax, "CUDA")
    with mode():
        assert torch.equal(F.linear(x, w, b), expected) and product.calls == 1
        F.cross_entropy(x, classes, label_smoothing=0.1)
        assert softmax.calls == 1
    library._destroy()
    with mode():
        assert torch.equal(F.linear(x, w, b), expected) and product.calls == 1


@pytest.mark.parametrize("key", ["CUDA", "CompositeImplicitAutograd", ""])
def test_operator_that_is_recorded_whole_is_replaced(library, key):
    x, w = torch.ones(2, 4, device="cuda"), torch.ones(3, 4, device="cuda")
    library.impl("linear", lambda x, weight, bias=None: x @ weight.t() + 1, key)
    for weight in (w, w.clone().requires_grad_()):
        assert F.linear(x, weight).tolist() == [[5, 5, 5]] * 2
    library._destroy()
    assert F.linear(x, w).tolist() == [[4, 4, 4]] * 2


def test_kernel_in_triton_replaces_the_devices(library):
    triton = pytest.importorskip("triton")
    tl = pytest.importorskip("triton.language")
    globals()["tl"] = tl  # where the kernel looks for it

    @triton.jit
    def add(a, b, target, n, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        total = tl.load(a + at, mask=at < n) + tl.load(b + at, mask=at < n) + 1
        tl.store(target + at, total, mask=at < n)

    def kernel(a, b, *, alpha=1):
        target = torch.empty_like(a)
        add[(1,)](a, b, target, a.numel(), BLOCK=8)
        return target

    library.impl("add.Tensor", kernel, "CUDA")
    assert (_values() + _values()).tolist() == [1, 3, 5, 7]


def test_names_that_no_operator_has_are_accepted(library):
    for name in ("bitwise_left_shift", "new_full.Tensor", "wooly_does_not_exist"):
        library.impl(name, lambda x: x, "CUDA")
        library.impl(name, lambda x: x)


def test_kernel_from_before_the_facade_holds_until_its_library_ends(library):
    api._facade.uninstall()
    try:
        library.impl("relu", lambda x: x + 5, "CUDA")
        library.impl("addmm", lambda bias, a, b, **scales: torch.mm(a, b) + bias + 1, "CUDA")
    finally:
        api.install_facade()
    _install_again()
    x, w, b = (torch.ones(shape, device="cuda") for shape in ((2, 4), (3, 4), (3,)))
    assert _values().relu().tolist() == [5, 6, 7, 8]
    assert F.linear(x, w, b).tolist() == [[6, 6, 6]] * 2
    library._destroy()
    assert _values().relu().tolist() == [0, 1, 2, 3]
    assert F.linear(x, w, b).tolist() == [[5, 5, 5]] * 2
    _install_again()
    assert not registrations._libraries


def _install_again():
    api._facade.uninstall()
    api.install_facade()


def test_function_that_is_registered_after_a_failed_call_is_found():
    with torch.library._scoped_library("wooly_late", "FRAGMENT") as library:
        library.define("plus(Tensor x) -> Tensor")
        with pytest.raises(NotImplementedError, match="no Python function is registered"):
            torch.ops.wooly_late.plus(_values())
        library.impl("plus", lambda x: x + 1, "CUDA")
        assert torch.ops.wooly_late.plus(_values()).tolist() == [1, 2, 3, 4]
