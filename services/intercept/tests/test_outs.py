"""Tests of results in tensors that the caller gives (`out=`)."""

import warnings

import pytest
import torch

OUTS_ON_THE_HOST = {
    "nonzero": lambda x: torch.nonzero(x, out=torch.empty(0, dtype=torch.int64)),
    "masked_select": lambda x: torch.masked_select(x, x > 0, out=torch.empty(0)),
    "mode": lambda x: torch.mode(x, out=(torch.empty(0), torch.empty(0, dtype=torch.int64))),
}


@pytest.mark.parametrize("name", OUTS_ON_THE_HOST)
def test_out_on_the_host_raises_as_cuda_does(cuda, name):
    with pytest.raises(
        RuntimeError, match="Expected all tensors to be on the same device, but found at least two devices"
    ):
        OUTS_ON_THE_HOST[name](torch.tensor([0.0, 1.0], device="cuda"))


#: Calls that would write a tensor on the host, although an operand is on the device.
WRITES_ON_THE_HOST = {
    "add_": lambda x: torch.tensor(2.0).add_(x),
    "pow_": lambda x: torch.tensor(2.0).pow_(x),
    "clamp_": lambda x: torch.tensor(2.0).clamp_(x),
    "lerp_": lambda x: torch.tensor(2.0).lerp_(torch.tensor(1.0), x),
    "out": lambda x: torch.add(x, x, out=torch.tensor(2.0)),
    "vector": lambda x: torch.ones(3).mul_(x),
}


@pytest.mark.parametrize("name", WRITES_ON_THE_HOST)
def test_write_on_the_host_with_operand_on_the_device_raises_as_cuda_does(cuda, name):
    with pytest.raises(
        RuntimeError, match="Expected all tensors to be on the same device, but found at least two devices"
    ):
        WRITES_ON_THE_HOST[name](torch.tensor(2.0, device="cuda"))


def test_write_on_the_host_that_raises_keeps_the_number(cuda):
    base = torch.tensor(3.0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            base.pow_(torch.tensor(5.0, device="cuda"))
    assert base.item() == 3


#: Calls that put a number into a tensor on the host. CUDA copies the number.
FILLS_ON_THE_HOST = {
    "fill_": lambda h, x: h.fill_(x),
    "index_fill_": lambda h, x: h.index_fill_(0, torch.tensor([1]), x),
    "masked_fill_": lambda h, x: h.masked_fill_(h == 0, x),
    "item": lambda h, x: h.__setitem__(1, x),
    "indices": lambda h, x: h.__setitem__(torch.tensor([0, 2]), x),
    "mask": lambda h, x: h.__setitem__(h == 0, x),
}


@pytest.mark.parametrize("name", FILLS_ON_THE_HOST)
def test_fill_on_the_host_takes_number_on_the_device(cuda, name):
    found, expected = torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0.0, 1.0, 0.0])
    FILLS_ON_THE_HOST[name](found, torch.tensor(7.0, device="cuda"))
    FILLS_ON_THE_HOST[name](expected, torch.tensor(7.0))
    assert found.is_cpu and found.equal(expected)


def test_efficient_zero_tensor_is_zero(cuda):
    zeros = torch._efficientzerotensor((2, 3), dtype=torch.float64, device="cuda")
    assert zeros.device.type == "cuda" and (zeros + 1).cpu().equal(torch.ones(2, 3, dtype=torch.float64))


def test_call_that_fails_at_once_keeps_the_content_of_out(cuda):
    x, out = torch.ones(3, 2, device="cuda"), torch.full((2,), 5.0, device="cuda")
    for name in ("all", "any"):
        with pytest.raises(RuntimeError, match=f"{name} only supports bool tensor for result, got: Float"):
            getattr(torch, name)(x, 0, out=out)
    assert out.tolist() == [5, 5]


def test_solve_triangular_into_its_argument(cuda):
    a, b = torch.tensor([[2.0, 1.0], [0.0, 4.0]]), torch.tensor([[2.0], [8.0]])
    there = b.to(cuda)
    assert torch.linalg.solve_triangular(a.to(cuda), there, upper=True, out=there) is there
    assert torch.equal(there.cpu(), torch.linalg.solve_triangular(a, b, upper=True))
    out = torch.linalg.solve_triangular(a.to(cuda), b.to(cuda), upper=True, out=torch.empty(0, device=cuda))
    assert out.stride() == torch.linalg.solve_triangular(a, b, upper=True, out=torch.empty(0)).stride()
    with pytest.raises(RuntimeError, match="expected scalar type Float but found Double"):
        torch.linalg.solve_triangular(a.to(cuda), there, upper=True, out=there.double())


def test_product_into_empty_vector(cuda):
    out = torch.empty(0, device=cuda)
    assert torch.mv(torch.ones(0, 2, device=cuda), torch.ones(2, device=cuda), out=out) is out
    torch.cuda.synchronize()


def test_in_place_operator_on_a_view_without_elements_is_no_overlap(cuda):
    """The gradient of `qr` without columns multiplies an empty diagonal in place."""
    x = torch.ones(5, 0, device="cuda", requires_grad=True)
    q, r = torch.linalg.qr(x)
    (q.sum() + r.sum()).backward()
    torch.cuda.synchronize()
    assert x.grad.shape == (5, 0)


def sized(*shape):
    return lambda device: torch.arange(1.0, 1 + torch.Size(shape).numel(), device=device).view(shape)


#: Calls that write an argument which has another size than the result: the argument, and the call with it.
ARGUMENTS_OF_ANOTHER_SIZE = {
    "add out=": (sized(5, 1), lambda x, d: torch.add(x, torch.ones(5, 5, device=d), out=x)),
    "where out=": (sized(4), lambda x, d: torch.where(x > 0, x, torch.zeros(3, 4, device=d), out=x)),
    "floor_divide out=": (sized(4), lambda x, d: torch.floor_divide(torch.ones(3, 4, device=d), x, out=x)),
    "ldexp_": (sized(3, 1, 2), lambda x, d: x.ldexp_(torch.ones(3, 3, 2, device=d))),
    "addr_ to a number": (sized(), lambda x, d: x.addr_(torch.ones(3, device=d), torch.ones(4, device=d))),
    "addr_ to a vector": (sized(4), lambda x, d: x.addr_(torch.ones(3, device=d), torch.ones(4, device=d))),
    "addr_ to a row": (sized(1, 4), lambda x, d: x.addr_(torch.ones(3, device=d), torch.ones(4, device=d))),
    "outer out=": (sized(5), lambda x, d: torch.outer(x, x, out=x)),
}


@pytest.mark.parametrize("name", ARGUMENTS_OF_ANOTHER_SIZE)
def test_out_that_is_an_argument_of_another_size_raises_and_keeps_its_content(cuda, name):
    make, call = ARGUMENTS_OF_ANOTHER_SIZE[name]
    errors = []
    for device in ("cpu", cuda, cuda):
        x = make(device)
        with pytest.raises(RuntimeError) as e:
            call(x, device)
        errors.append(str(e.value))
        assert x.shape == make("cpu").shape and x.tolist() == make("cpu").tolist()
    assert errors[0] == errors[1] == errors[2]


def test_out_that_is_an_argument_raises_also_if_another_tensor_was_resized_before(cuda):
    x, y = torch.ones(5, 1, device=cuda), torch.ones(5, 5, device=cuda)
    with pytest.warns(UserWarning, match="An output with one or more elements was resized"):
        assert torch.add(x, y, out=torch.ones(5, 1, device=cuda)).shape == (5, 5)
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        torch.add(x, y, out=x)


@pytest.mark.parametrize("function", [torch.cat, torch.hstack, torch.vstack])
def test_concatenation_into_one_of_its_arguments_raises_atens_error(cuda, function):
    errors = []
    for device in ("cpu", cuda, cuda):
        x = torch.ones(3, 4, device=device)
        with pytest.raises(RuntimeError) as e, warnings.catch_warnings(action="ignore"):
            function([x, torch.ones(3, 4, device=device)], out=x)
        errors.append(str(e.value))
    assert "some elements of the input tensor and the written-to tensor" in errors[0]
    assert errors[0] == errors[1] == errors[2]


#: Operators of ATen's iterator, called with one, two or three tensors.
ITERATED = {
    "sin": lambda x, y, o: torch.sin(x, out=o),
    "clamp": lambda x, y, o: torch.clamp(x, 0, 1, out=o),
    "add": lambda x, y, o: torch.add(x, y, out=o),
    "div": lambda x, y, o: torch.div(x, y, rounding_mode="floor", out=o),
    "copysign": lambda x, y, o: torch.copysign(x, y, out=o),
    "where": lambda x, y, o: torch.where(x > 0, x, y, out=o),
    "addcmul": lambda x, y, o: torch.addcmul(x, y, x, out=o),
    **{
        name: lambda x, y, o, name=name: getattr(torch._C._nn, name)(x, out=o)
        for name in (
            "elu",
            "gelu",
            "hardsigmoid",
            "hardswish",
            "hardtanh",
            "leaky_relu",
            "mish",
            "softplus",
            "softshrink",
        )
    },
    "threshold": lambda x, y, o: torch.ops.aten.threshold.out(x, 2.0, 3.0, out=o),
    "hardtanh_backward": lambda x, y, o: torch.ops.aten.hardtanh_backward.grad_input(x, x, 0, 5, grad_input=o),
    # These make their result contiguous.
    "mvlgamma": lambda x, y, o: torch.mvlgamma(x, 1, out=o),
    "pow of number": lambda x, y, o: torch.pow(0.5, x, out=o),
    "addr": lambda x, y, o: torch.addr(x, x[:, 0].contiguous(), x[0].contiguous(), out=o),
    "abs": lambda x, y, o: torch.abs(x.to(torch.complex64), out=o),
}


@pytest.mark.parametrize("name", ITERATED)
def test_resized_out_of_permuted_operands_has_their_layout(cuda, name):
    """Called twice: the second call takes the sizes of the first."""
    x, number = torch.arange(1.0, 13.0).view(3, 4).t(), torch.full((1, 1), 2.0)
    for given in ((x, x), (x, number), (number, x), (x.t().contiguous().t(), x.flip(0))):
        theirs = ITERATED[name](*given, torch.empty(0))
        for _ in range(2):
            ours = ITERATED[name](*[t.to(cuda) for t in given], torch.empty(0, device=cuda))
            assert ours.stride() == theirs.stride() and torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("size", [(3,), (2, 3), (1, 3), (1,), (4, 5)])
@pytest.mark.parametrize("tensor", ["mean", "std", "both"])
def test_out_of_normal_has_size_and_warning_of_cpu(cuda, tensor, size):
    found = []
    for device in ("cpu", cuda, cuda):
        numbers = [torch.ones(3, device=device) if tensor in (name, "both") else 1.0 for name in ("mean", "std")]
        out = torch.empty(size, device=device)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                torch.normal(*numbers, out=out)
            except RuntimeError as e:
                found.append(str(e))
                continue
        found.append((out.shape, [str(w.message).partition(" (Triggered")[0] for w in warned]))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("name", ["tril", "triu"])
def test_triangles_of_a_batch_into_a_permuted_out_equal_cpu(cuda, name):
    x = torch.arange(75.0).view(3, 5, 5)
    out = torch.zeros(5, 5, 3, device=cuda).permute(2, 0, 1)
    for diagonal in (0, 1, 0):
        getattr(torch, name)(x.to(cuda), diagonal, out=out)
        assert out.stride() == (1, 15, 3) and torch.equal(out.cpu(), getattr(torch, name)(x, diagonal))


def test_masked_select_into_its_argument_raises_as_on_cuda(cuda):
    x = torch.arange(4.0, device=cuda)
    for out in (x, x[1:]):
        with pytest.raises(RuntimeError, match="some elements of the input tensor and the written-to tensor"):
            torch.masked_select(x, x > 1, out=out)
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert torch.masked_select(x[2:], x[2:] > 2, out=x[:1]).tolist() == [3.0]
