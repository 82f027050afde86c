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
