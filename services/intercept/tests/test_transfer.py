"""Uploads of one number: the number keeps its bits, and the upload does not end the program."""

import pytest
import torch
from wooly.device import current_devices

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(t):
    return t.reshape(1).view(_BITS.get(t.element_size(), torch.int64)).tolist()


@pytest.mark.parametrize(
    "number",
    [
        *[torch.tensor(v) for v in (0.1, -0.0, float("inf"), -float("inf"), 1e-45, 3.4e38, float("nan"))],
        torch.tensor([0x7FA00001], dtype=torch.int32).view(torch.float32),  # a NaN with a payload
        *[torch.tensor([v], dtype=torch.float64) for v in (5e-324, 1 / 3, 1.7e308)],
        *[torch.tensor(v, dtype=torch.float16) for v in (6e-8, 65504.0)],
        *[torch.tensor(v, dtype=torch.bfloat16) for v in (1e-40, 3.38e38)],
        *[torch.tensor([[v]]) for v in (-(2**63), 2**63 - 1, 2**53 + 1)],
        *[torch.tensor(v) for v in (True, False, 1 + 2j)],
        *[torch.tensor(v, dtype=d) for v, d in ((255, torch.uint8), (-128, torch.int8), (-(2**31), torch.int32))],
    ],
    ids=str,
)
def test_upload_one_number_keeps_bits(cuda, number):
    there = number.to(cuda)
    assert there.dtype is number.dtype and there.shape == number.shape
    assert _bits(there.cpu()) == _bits(number)


def test_upload_one_number_to_view_has_dtype_of_view(cuda):
    x = torch.zeros(3, 4, dtype=torch.int32, device=cuda)
    x[1, 2] = torch.tensor(7.9)
    x[:, 1:2][2:].copy_(torch.tensor([[300]]))
    x.T[3:, :1] = torch.tensor(True)
    assert x.tolist() == [[0, 0, 0, 1], [0, 0, 7, 0], [0, 300, 0, 0]]


def test_upload_one_number_keeps_program_open(cuda):
    recorder = current_devices().recorders[0]
    x = torch.arange(12.0, device=cuda).reshape(3, 4)
    torch.cuda.synchronize()

    def step(k):
        before = recorder.programs
        with recorder.lock:  # the timer must not close the program
            y = x[:, [k]].add_(torch.tensor(0.5, device=cuda))
            torch.cuda.synchronize()
        assert recorder.programs == before + 1
        return y.tolist()

    assert step(1) == [[1.5], [5.5], [9.5]]
    defined = len(recorder._sent)
    assert step(-1) == [[3.5], [7.5], [11.5]]
    assert len(recorder._sent) == defined  # the number is a param, not a part of the program


def test_read_after_upload_returns_new_number(cuda):
    x = torch.zeros(1, device=cuda)
    assert x.item() == 0 and x.item() == 0
    x.copy_(torch.tensor([3.0]))
    assert x.item() == 3


def test_upload_one_number_with_many_dimensions_keeps_value(cuda):
    number = torch.full([1] * 65, 2.5)
    there = number.to(cuda)
    assert there.shape == number.shape and there.cpu().item() == 2.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3, True, 0.1])
def test_copy_of_python_number_equals_the_host(cuda, value, dtype):
    host, there = torch.zeros(3, dtype=dtype), torch.zeros(3, dtype=dtype, device=cuda)
    assert there.copy_(value) is there
    assert torch.equal(there.cpu().nan_to_num(nan=7), host.copy_(value).nan_to_num(nan=7))


def test_copy_of_wide_python_integer_is_exact(cuda):
    wide = torch.zeros(2, dtype=torch.int64, device=cuda).copy_((1 << 62) + 1)
    assert wide.tolist() == [(1 << 62) + 1] * 2


def test_conversion_operators_take_cuda_without_an_index(cuda):
    aten, host = torch.ops.aten, torch.arange(3.0)
    for device in ("cuda", torch.device("cuda"), torch.device("cuda", 0)):
        for there in (
            aten._to_copy(host, device=device),
            aten._to_copy.default(host, device=device),
            aten.to.device(host, device, torch.float64),
            aten.to.dtype_layout(host, device=device),
            aten.to(host, device, torch.float32),
        ):
            assert str(there.device) == "cuda:0" and there.tolist() == [0, 1, 2]
    back = aten._to_copy(there, device="cpu", dtype=torch.int64)
    assert back.device.type == "cpu" and back.dtype is torch.int64
    assert aten._to_copy(host, dtype=torch.float16).dtype is torch.float16


def test_conversion_operators_stay_keys_of_tables(cuda):
    operator = torch.ops.aten._to_copy.default
    assert {operator: 1}[torch.ops.aten._to_copy.default] == 1 and hash(operator) in map(
        hash, torch._decomp.decomposition_table
    )


@pytest.mark.parametrize("n", [1 << 18, (1 << 18) + 1, 3 << 20])
def test_large_tensor_keeps_its_bytes_both_ways(cuda, n):
    host = torch.randn(n)
    there = host.to(cuda)
    assert torch.equal(there.cpu(), host)
    back = torch.zeros(n)
    before = back._version
    assert back.copy_(there) is back and torch.equal(back, host) and back._version == before + 1


@pytest.mark.parametrize(
    "target",
    [
        lambda: torch.zeros(1 << 20, dtype=torch.float64),
        lambda: torch.zeros(1 << 20, 2)[:, 0],
        lambda: torch.zeros(3, 1 << 20),
        lambda: torch.zeros(1 << 20, dtype=torch.complex64).imag,
    ],
    ids=["dtype", "gaps", "expanded", "part of complex numbers"],
)
def test_large_download_to_another_layout_converts(cuda, target):
    host, found = torch.randn(1 << 20), target()
    found.copy_(host.to(cuda))
    assert torch.equal(found, torch.zeros_like(found).copy_(host))


def test_large_download_of_transposed_tensor_and_of_views(cuda):
    host = torch.randn(1000, 1001)
    there = host.to(cuda)
    assert torch.equal(there.T.cpu(), host.T) and torch.equal(there[500:].cpu(), host[500:])
    assert torch.equal(there[:, 7:].cpu(), host[:, 7:])
    z = torch.randn(600_000, dtype=torch.complex64)
    assert torch.equal(z.to(cuda).conj().cpu(), z.conj())
    found = torch.zeros_like(z).conj()
    found.copy_(z.to(cuda))
    assert torch.equal(found, z)


def test_failed_large_download_leaves_its_target(cuda):
    lost = torch.arange(3.0, device=cuda).gather(0, torch.full((1 << 20,), 7, device=cuda))
    host = torch.ones(1 << 20)
    with pytest.raises(RuntimeError, match="out of bounds"):
        host.copy_(lost)
    assert bool((host == 1).all())


def test_read_error_while_the_answer_is_awaited_keeps_the_session(cuda, monkeypatch):
    """The answer that nobody waits for is taken when it arrives, and the next reads get their own answers."""
    recorder = current_devices().recorders[0]
    x = torch.zeros(4, dtype=torch.complex64, device=cuda)  # sums of complex numbers are not computed on the host

    def fails(*args):
        raise RecursionError("maximum recursion depth exceeded")

    with monkeypatch.context() as patch:
        patch.setattr(recorder, "note_read", fails)
        with pytest.raises(RecursionError):
            x.add_(1)[1].item()
    for k in range(2, 6):
        assert x.add_(1)[k % 4].item() == k
    assert x.tolist() == [5, 5, 5, 5] and not recorder.require_link()._abandoned


def test_read_that_is_abandoned_leaves_its_error_to_the_next_wait(cuda, monkeypatch):
    recorder = current_devices().recorders[0]
    x = -torch.eye(3, device=cuda)
    failing = torch.nn.functional.embedding(torch.tensor([7], device=cuda), x)

    def fails(*args):
        raise RecursionError("maximum recursion depth exceeded")

    with monkeypatch.context() as patch:
        patch.setattr(recorder, "note_read", fails)
        with pytest.raises(RecursionError):
            failing[0, 0].item()
    with pytest.raises(RuntimeError, match="embedding"):
        x.sum().item()
    assert x.sum().item() == -3


def test_module_with_uninitialised_parameters_moves_converts_and_loads(cuda):
    lazy = torch.nn.LazyLinear(4, device=cuda)
    for moved in (lazy.half(), lazy.float().cpu(), lazy.to(cuda)):
        assert torch.nn.parameter.is_lazy(moved.weight)
    assert lazy.weight.device.type == "cuda"
    for source in (torch.nn.LazyLinear(4), torch.nn.LazyLinear(4, device=cuda)):
        lazy.load_state_dict(source.state_dict())
        assert torch.nn.parameter.is_lazy(lazy.weight)
    assert lazy(torch.ones(2, 3, device=cuda)).shape == (2, 4) and lazy.weight.shape == (4, 3)


@pytest.mark.parametrize(
    ("to", "given"), [((), (3, 4)), ((0, 3), (1, 4)), ((2, 1), (2, 4)), ((4,), (2, 4)), ((3, 2), (2, 3))]
)
@pytest.mark.parametrize("places", ["device", "upload", "download"])
def test_copy_of_a_shape_that_does_not_fit_raises_atens_error(cuda, to, given, places):
    a, b = torch.zeros(to), torch.ones(given)
    with pytest.raises(RuntimeError) as theirs:
        a.copy_(b)
    a, b = a if places == "download" else a.to(cuda), b if places == "upload" else b.to(cuda)
    with pytest.raises(RuntimeError) as ours:
        a.copy_(b)
    assert str(ours.value) == str(theirs.value)
