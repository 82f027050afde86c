"""Errors that the executor reports later name the operation that failed, wherever they surface."""

import gc
import os
import weakref

import pytest
import torch
import wooly
from wooly import api, device
from wooly.errors import RemoteOperationError
from wooly_testkit.forks import OTHER_PYTHON

#: The executor's PyTorch is another one than the client's, and may refuse a call in other words.
MIXED = OTHER_PYTHON in os.environ


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
    error = link._error_of({"message": "\"dot\" not implemented for 'Bool'", "code": code})
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


def test_kernel_that_is_refused_leaves_the_values_before_it(cuda):
    """The tenant may not launch PTX, so the executor refuses the program with the launch."""
    text = ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry k(.param .u64 k_param_0) { ret; }"
    kernel = wooly.ptx_kernel(text, "k")
    torch.cuda.synchronize()
    known, written = torch.arange(3.0, device=cuda), torch.zeros(3, device=cuda)
    known.add_(1)
    made = known * 2
    kernel(args=(written,))
    with pytest.raises(RemoteOperationError, match="needs the permission opaque_kernels"):
        torch.cuda.synchronize()
    assert known.tolist() == [1, 2, 3] and made.tolist() == [2, 4, 6]
    with pytest.raises(RemoteOperationError, match="needs the permission opaque_kernels"):
        written.tolist()


SINGULAR = {
    "cholesky_ex": (torch.linalg.cholesky_ex, "linalg.cholesky_ex: The factorization could not be completed"),
    "inv_ex": (torch.linalg.inv_ex, "linalg.inv_ex: The diagonal element 1 is zero"),
    "solve_ex": (lambda t, **k: torch.linalg.solve_ex(t, t, **k), "torch.linalg.solve_ex: The solver failed"),
}


@pytest.mark.parametrize("name", SINGULAR)
def test_checked_factorisation_raises_at_the_call(cuda, name):
    factorise, text = SINGULAR[name]
    assert factorise(torch.zeros(2, 2, device=cuda)).info.item()
    with pytest.raises(torch.linalg.LinAlgError, match=text):
        factorise(torch.zeros(2, 2, device=cuda), check_errors=True)
    with pytest.raises(torch.linalg.LinAlgError, match=r"Batch element 0"):
        factorise(torch.zeros(2, 2, 2, device=cuda), check_errors=True)


@pytest.mark.parametrize(
    "call",
    [
        lambda t: torch.histc(t),
        lambda t: torch.searchsorted(t, t, sorter=torch.full((2,), 9, device=t.device)),
    ],
    ids=["histc", "searchsorted"],
)
def test_operator_whose_check_waits_on_cuda_raises_at_the_call(cuda, call):
    found = []
    for where in ("cpu", cuda):
        with pytest.raises(RuntimeError) as raised:
            call(torch.full((2,), torch.inf, device=where))
        found.append((type(raised.value), str(raised.value)))
    assert found[0] == found[1]


def test_decomposition_that_fails_raises_at_the_call(cuda):
    bad = torch.full((2, 2), float("nan"), device=cuda)
    with pytest.raises(torch.linalg.LinAlgError, match=r"linalg.svd: The algorithm failed to converge"):
        torch.linalg.svd(bad)
    with pytest.raises(RuntimeError, match=r"^torch.linalg.eig: input tensor should not contain infs or NaNs.$"):
        torch.linalg.eig(bad)
    torch.cuda.synchronize()


def test_call_whose_trial_on_zeros_fails_does_not_keep_its_operands(cuda, no_garbage):
    """The trial divides by zero, and the device does not."""
    x, y = (torch.full((5, 3), n, dtype=torch.int16, device=cuda) for n in (7, 4))
    gc.disable()  # a cycle would keep them until the next collection
    try:
        assert (x % y).tolist() == [[3] * 3] * 5
        held = weakref.ref(x), weakref.ref(y)
        del x, y
        assert [w() for w in held] == [None, None]
    finally:
        gc.enable()


def test_write_to_a_part_that_the_device_refuses_raises_at_each_call(cuda):
    """The call is tried on copies first, which begin at another offset, so that they are a call of their own."""
    for _ in range(3):
        x = torch.ones(2, 3, dtype=torch.bool, device=cuda)
        with pytest.raises(RuntimeError, match="with two bool tensors is not supported"):
            x[-1].sub_(x[0].clone())
        torch.cuda.synchronize()
        assert x.tolist() == [[True] * 3] * 2


#: Calls with a number, a number that they accept, and one that they refuse because of its value.
NUMBERS = {
    "renorm": (lambda t: t[:, None], lambda t, n: t.renorm(2, 0, n), 2.0, -1.0),
    "renorm_ with a power": (lambda t: t[:, None], lambda t, n: t.renorm_(n, 0, 2), 2.0, -1.0),
    "softshrink": (lambda t: t, torch.nn.functional.softshrink, 2.0, -1.0),
    "softshrink, NaN": (lambda t: t.double(), torch.nn.functional.softshrink, 2.0, float("nan")),
    "fill_": (lambda t: t.byte(), lambda t, n: t.fill_(n), 2, 300),
    "fill_ of float": (lambda t: t.byte(), lambda t, n: t.fill_(n), 2.0, -1.0),
    "setitem": (lambda t: t.byte(), lambda t, n: t.__setitem__(0, n), 2.0, -1.0),
    "full_like": (lambda t: t.char(), torch.full_like, -128, -129),
    "masked_fill_": (lambda t: t.half(), lambda t, n: t.masked_fill_(t > 1, n), -2.0, -1e9),
    "scatter": (lambda t: t.half(), lambda t, n: t.scatter(0, torch.zeros_like(t, dtype=torch.long), n), 2.0, 1e9),
    "clamp": (lambda t: t.byte(), lambda t, n: t.clamp(n), 2, 300),
    "alpha": (lambda t: t.byte(), lambda t, n: t.add(t, alpha=n), 2, 300),
    "list": (lambda t: t.byte(), lambda t, n: torch._foreach_add([t], [t], alpha=n), 2, 300),
    "pow": (lambda t: t.long(), lambda t, n: t.pow(n), 2, -1),
    "fill_ of float32": (lambda t: t, lambda t, n: t.fill_(n), 2.0, 1e300),
}


@pytest.mark.parametrize("size", [3, 100_000])
@pytest.mark.parametrize("name", NUMBERS)
def test_number_that_does_not_fit_is_refused_at_call_after_numbers_that_fit(cuda, name, size):
    to, call, good, bad = NUMBERS[name]
    host = to(torch.arange(size).remainder(5).float())
    t = host.to(cuda)
    for _ in range(3):
        call(t.clone(), good)
    for _ in range(2):
        with pytest.raises(RuntimeError) as expected:
            call(host.clone(), bad)
        with pytest.raises(RuntimeError) as found:
            call(t, bad)
        assert MIXED or str(found.value) == str(expected.value)
    torch.cuda.synchronize()
    assert torch.equal(t.cpu(), host)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_number_outside_of_dtype_wraps_around_where_pytorch_lets_it(cuda, dtype):
    host = torch.tensor([1, 2, 100], dtype=dtype)
    for work in (
        *(lambda t: t.remainder(300), lambda t: t.fmod(300), lambda t: t * 300, lambda t: torch.remainder(300, t)),
        *(lambda t: t.remainder(-1), lambda t: t.clone().fill_(-1), lambda t: t == 300, lambda t: t // 300),
    ):
        for _ in range(2):
            assert torch.equal(work(host.to(cuda)).cpu(), work(host))


def summing(x):
    return x.expand(1 << 40).sum()


def test_program_that_is_refused_names_cause_and_line_each_time(cuda):
    for _ in range(4):  # from the third time on, the program is known
        x = torch.ones(1, device=cuda)
        torch.cuda.synchronize()
        y = summing(x)
        with pytest.raises(RemoteOperationError, match="is too much work for one call") as first:
            y.item()
        with pytest.raises(RemoteOperationError, match="is too much work for one call") as later:
            (y + 1).item()
        for error in (first.value, later.value):
            assert error.operation == "sum" and f"recorded at {line_of(summing)}" in str(error)
        assert x.item() == 1


def test_number_that_does_not_fit_is_refused_at_call_without_trials(cuda, monkeypatch):
    """Calls for a GPU are not tried on the host, so the client asks the device."""
    recorder = device.current().devices.recorders[0]
    monkeypatch.setitem(recorder.require_link().device, "vendor", "nvidia")
    t = torch.zeros(5, 3, dtype=torch.uint8, device=cuda)
    for good, bad in ((2, 300), (2.0, -1.0)):
        for row in t:  # at each offset
            row.fill_(good)
            with pytest.raises(RuntimeError, match="cannot be converted to type uint8_t without overflow"):
                row.fill_(bad)
    waits = recorder.require_link().waits.count
    numbers = torch.zeros(5, dtype=torch.int64, device=cuda)
    for k in range(5):
        numbers[k] = -1
    assert recorder.require_link().waits.count == waits
    assert numbers.tolist() == [-1] * 5 and t.tolist() == [[2] * 3] * 5
