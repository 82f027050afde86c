"""Errors that the executor reports later name the operation that failed, wherever they surface."""

import pytest
import torch
from wooly import api, device
from wooly.errors import RemoteOperationError


def line_of(function):
    return f"{__file__}:{function.__code__.co_firstlineno + 1} in {function.__name__}"


def failing(cuda):
    return torch.arange(3.0, device=cuda)[torch.tensor([7], device=cuda)]


def needing(x):
    return (x * 2 + 1).sum()


@pytest.mark.parametrize(
    "work", [lambda x: x.cpu(), lambda x: needing(x).item(), repr], ids=["read", "compute", "print"]
)
def test_error_names_its_own_operation_each_time(cuda, work):
    x = failing(cuda)
    with pytest.raises(RemoteOperationError, match="index 7 is out of bounds"):
        torch.cuda.synchronize()
    for _ in range(2):
        with pytest.raises(RemoteOperationError) as error:
            work(x)
        assert error.value.operation == "aten.index.Tensor" and f"recorded at {line_of(failing)}" in str(error.value)
        assert str(error.value).count("failed on the remote device") == 1
    torch.cuda.synchronize()  # each error comes once
    assert torch.ones(3, device=cuda).sum().item() == 3


def test_error_of_dependent_operation_names_both_lines(cuda):
    x = failing(cuda)
    with pytest.raises(RemoteOperationError):
        torch.cuda.synchronize()
    with pytest.raises(RemoteOperationError, match="needed at") as error:
        needing(x).item()
    assert f"recorded at {line_of(failing)}, needed at {line_of(needing)}" in str(error.value)


def test_error_surfaces_at_unrelated_wait_with_its_own_operation(cuda):
    kept = failing(cuda)
    with pytest.raises(RemoteOperationError) as error:
        torch.ones(4, device=cuda).add(1).sum().item()
    assert error.value.operation == "aten.index.Tensor" and line_of(failing) in str(error.value)
    assert kept.shape == (1,)


@pytest.mark.parametrize("code", ["executor.missing_kernel", "executor.operation"])
def test_error_about_missing_kernel_is_a_not_implemented_error(cuda, code):
    link = device.current().devices.recorders[0].link
    error = link._remote_error({"message": "\"dot\" not implemented for 'Bool'", "code": code})
    assert isinstance(error, RemoteOperationError) and str(error) == "\"dot\" not implemented for 'Bool'"
    assert isinstance(error, NotImplementedError) is (code == "executor.missing_kernel")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_transforms_after_failed_print_differentiate(cuda, device):
    """PyTorch switches transforms off while it prints; an exception that is kept must not leave them off."""
    x = failing(cuda)
    with pytest.raises(RemoteOperationError):
        torch.cuda.synchronize()
    with pytest.raises(RemoteOperationError) as kept:
        repr(x)
    t = torch.arange(1.0, 4.0, device=device)
    assert torch.func.grad(lambda t: (t**3).sum())(t).tolist() == [3.0, 12.0, 27.0]
    assert torch.func.vmap(torch.func.grad(lambda t: t**3))(t).tolist() == [3.0, 12.0, 27.0]
    assert kept.value.operation == "aten.index.Tensor"


def test_assertion_that_holds_does_not_wait(cuda):
    x = torch.zeros(3, device=cuda)
    condition = (x == 0).all()
    torch.cuda.synchronize()
    before = api.session_stats()["syncs"]
    torch._assert_async(condition)
    torch._assert_async(condition, "x must be zero")
    assert api.session_stats()["syncs"] == before
    torch.cuda.synchronize()


def test_assertion_that_fails_raises_its_message_later(cuda):
    torch._assert_async((torch.zeros(3, device=cuda) == 1).all(), "x must be one")
    with pytest.raises(RemoteOperationError, match="x must be one"):
        torch.cuda.synchronize()
    assert torch.ones(3, device=cuda).sum().item() == 3


def test_assertion_of_several_values_raises_at_the_call(cuda):
    with pytest.raises(RuntimeError, match="more than one value is ambiguous"):
        torch._assert_async(torch.ones(3, device=cuda))
