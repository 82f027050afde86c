"""Calls that ended the process: autograd asks for facts of a tensor where C++ permits no error."""

import pytest
import torch
from wooly.torch_private import raw_device

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    # PyTorch reads the attribute itself, and hides the warning only where warnings are not errors.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


def test_nested_tensor_with_gradients_raises_instead_of_ending_the_process(cuda):
    parts = [torch.ones(2, n, device=cuda, requires_grad=True) for n in (3, 4)]
    nested = torch.nested.as_nested_tensor(parts)
    assert nested.is_nested and nested.requires_grad and nested.device == torch.device("cuda", 0)
    assert nested.size(0) == 2
    with pytest.raises(NotImplementedError, match="not supported"):
        nested.sum(-1, keepdim=True)


def test_nested_tensor_metadata_equals_the_host_s(cuda):
    found = []
    for device in ("cpu", cuda):
        nested = torch.nested.as_nested_tensor([torch.ones(2, n, device=device) for n in (3, 4)])
        found.append(
            [
                getattr(nested, name)().tolist()
                for name in ("_nested_tensor_size", "_nested_tensor_strides", "_nested_tensor_storage_offsets")
            ]
        )
    assert found[0] == found[1]


def test_opcheck_of_custom_operator_on_device_tensor_succeeds(cuda):
    @torch.library.custom_op("wooly_no_abort::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    twice.register_autograd(lambda ctx, grad: grad * 2)
    results = torch.library.opcheck(twice, (torch.ones(3, device=cuda, requires_grad=True),))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("by_position", [True, False])
def test_wrapper_subclass_of_device_tensor_is_on_the_device(cuda, by_position):
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            raise NotImplementedError

    device = torch.device(cuda, 0)
    if by_position:
        layout = (torch.float32, torch.strided, device, False, True)
        t = torch.Tensor._make_wrapper_subclass(Wrapper, (2,), (1,), 0, None, *layout)
    else:
        t = torch.Tensor._make_wrapper_subclass(Wrapper, (2,), dtype=torch.float32, device=device, requires_grad=True)
    assert t.device == device and t.requires_grad and raw_device(t).type == "wooly"


def test_gradient_of_distances_between_no_rows_raises_instead_of_ending_the_process(cuda):
    x = torch.zeros(0, 5, device=cuda, requires_grad=True)
    torch.nn.functional.pdist(x).sum().backward()
    with pytest.raises(RuntimeError, match="self must have at least 1 row"):
        torch.cuda.synchronize()


@pytest.mark.parametrize("training", [True, False])
def test_gradients_of_batch_norm_for_an_empty_batch_are_zeros_as_on_cuda(cuda, training):
    """The CPU kernel divides by the size of the batch."""
    x, ones = torch.zeros(0, 3, 4, 4, device=cuda), torch.ones(3, device=cuda)
    for _ in range(2):
        for mask in ([True, True, True], [True, False, True]):
            arguments = (x, x, ones, ones, ones, ones, ones, training, 1e-5, mask)
            into, weight, bias = torch.ops.aten.native_batch_norm_backward(*arguments)
            assert into.shape == x.shape and bias.tolist() == [0.0] * 3
            assert weight is None if not mask[1] else weight.tolist() == [0.0] * 3
            found = torch.ops.aten.batch_norm_backward(*arguments, torch.empty(0, dtype=torch.uint8, device=cuda))
            assert [None if t is None else t.tolist() for t in found] == [
                None if t is None else t.tolist() for t in (into, weight, bias)
            ]


@pytest.mark.parametrize("name", ["linalg.lu", "lu_unpack"])
@pytest.mark.parametrize("shape", [(3, 5, 5), (2, 2, 5, 3)])
def test_factors_of_a_batch_into_permuted_outs_equal_cpu(cuda, name, shape):
    """The CPU kernel writes out of bounds."""
    a = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    arguments = (a,) if name == "linalg.lu" else torch.linalg.lu_factor(a)
    function = torch.linalg.lu if name == "linalg.lu" else torch.lu_unpack
    for _ in range(2):
        expected = function(*arguments)
        outs = tuple([torch.zeros(t.shape[::-1], device=cuda).permute(*reversed(range(t.dim()))) for t in expected])
        function(*[t.to(cuda) for t in arguments], out=outs)
        for out, t in zip(outs, expected, strict=True):
            assert not out.is_contiguous()
            torch.testing.assert_close(out.cpu(), t)


def test_gradient_of_empty_pooling_raises_the_cpus_error(cuda):
    errors = []
    for device in ("cpu", cuda):
        x = torch.ones(1, 4, 5, 5, device=device, requires_grad=True)
        with pytest.raises(RuntimeError) as error:
            torch.nn.functional.adaptive_avg_pool2d(x, 0).sum().backward()
        errors.append(str(error.value))
    assert errors[0] == errors[1] and "but grad_output has sizes" in errors[0]


def test_gradients_of_a_channels_last_group_norm_without_that_of_its_input(cuda):
    torch.manual_seed(0)
    x, d = [torch.randn(2, 16, 6, 5).contiguous(memory_format=torch.channels_last) for _ in range(2)]
    w, sizes = torch.randn(16), (2, 16, 30, 8)
    _, mean, rstd = torch.native_group_norm(x, w, w, *sizes, 1e-5)
    given = [t.to(cuda) for t in (d, x, mean, rstd, w)]
    found = torch.ops.aten.native_group_norm_backward(*given, *sizes, [False, True, True])
    good = torch.ops.aten.native_group_norm_backward(d, x, mean, rstd, w, *sizes, [True] * 3)
    assert found[0] is None and all(torch.equal(a.cpu(), b) for a, b in zip(found[1:], good[1:], strict=True))
