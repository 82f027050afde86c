"""Calls that take a device tensor as a number (`alpha=`): no wait, and the same bits as on the CPU."""

import sys
import threading

import pytest
import torch
from wooly.api import attached_links
from wooly.python_private import call_at

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]


@pytest.fixture
def waits(cuda):
    """A function that returns the number of answers to reads since the last call."""
    link = attached_links()[0]
    torch.cuda.synchronize()
    last = link.syncs

    def since():
        nonlocal last
        last, before = link.syncs, last
        return last - before

    return since


def given(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def computed(device, *shape, dtype=torch.float32, seed=1):
    """A value that only the device knows."""
    return given(*shape, seed=seed).to(device).exp().to(dtype)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_sums_with_a_number_on_the_device_wait_for_nothing(cuda, waits, dtype, number):
    def results(device):
        x, y = given(300, dtype=dtype).to(device), given(300, dtype=dtype, seed=2).to(device)
        t = computed(device, dtype=number)
        found = [torch.add(x, y, alpha=t), torch.sub(x, y, alpha=t), x.add(y, alpha=t), x.t().sub(y[:1], alpha=t)]
        x.add_(y, alpha=t)
        x[100:200].sub_(y[:100], alpha=t)
        x.sub_(y, alpha=-t)
        return [*found, x]

    ours = results(cuda)
    assert waits() == 0
    for mine, local in zip(ours, results("cpu"), strict=True):
        assert mine.dtype is local.dtype and torch.equal(mine.cpu(), local)


@torch.no_grad()
def test_number_is_that_of_the_moment_of_the_call(cuda, waits):
    def result(device):
        t, x = computed(device), given(8).to(device)
        for _ in range(100):  # more than one program, and combined steps
            x.add_(x.flip(0), alpha=t)
            t.mul_(-0.7).add_(0.001)
        return x

    ours = result(cuda)
    assert waits() == 0 and torch.equal(ours.cpu(), result("cpu"))


@torch.no_grad()
def test_default_device_does_not_hide_the_call(cuda, waits):
    with torch.device(cuda):
        t, x = torch.rand(1).exp().sum(), torch.ones(3)
        local = torch.ones(3, device="cpu")
        waits()
        x.add_(x, alpha=t).sub_(torch.ones(3), alpha=t * 2)
        assert waits() == 0
        number = t.item()
        assert type(number) is float
    assert torch.equal(x.cpu(), local.add(local, alpha=number).sub(torch.ones(3), alpha=number * 2))


@torch.no_grad()
def test_number_within_the_written_tensor_is_read_before_the_write(cuda):
    ours, local = given(8).to(cuda), given(8)
    for x in (ours, local):
        for _ in range(3):
            x.add_(x, alpha=x[0])
    assert torch.equal(ours.cpu(), local)


def fit(device):
    """Losses of a fit by L-BFGS, and the parameters after it."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to(device)
    x = given(50, 2).to(device)
    y = x.prod(1, keepdim=True)
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=10, history_size=5, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = ((net(x) - y) ** 2).mean()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(3)]
    return losses, [p.detach().cpu() for p in net.parameters()]


def test_lbfgs_gives_the_bits_of_the_cpu(cuda):
    (losses, parameters), (local_losses, local) = fit(cuda), fit("cpu")
    assert losses == local_losses
    assert all(torch.equal(a, b) for a, b in zip(parameters, local, strict=True))


@torch.no_grad()
def test_script_gets_python_numbers(cuda):
    t, x = computed(cuda), given(4).to(cuda)
    x.add_(x, alpha=t)
    for value in (t.item(), float(t), t.tolist(), f"{t:f}", torch.Tensor.item(t), next(map(torch.Tensor.item, [t]))):
        assert type(value) in (float, str)
    x.add_(x, alpha=t.item())
    y = x.add(x, alpha=float(t) if t.item() > 0 else 1)
    assert type(y.sum().item()) is float


def test_number_that_autograd_keeps_is_read(cuda):
    def gradients(device):
        t, x, y = computed(device), given(4).to(device).requires_grad_(), given(4, seed=3).to(device).requires_grad_()
        z = torch.add(x, y, alpha=t)
        t.zero_()
        z.square().sum().backward()
        return x.grad.cpu(), y.grad.cpu()

    assert all(map(torch.equal, gradients(cuda), gradients("cpu")))


@torch.no_grad()
def test_calls_that_cannot_take_the_tensor_read_it(cuda):
    def results(device):
        t, x = computed(device), given(4, 4).to(device)
        whole = torch.full((), 3, dtype=torch.int32).to(device)
        ints = torch.arange(4).to(device)
        out = torch.empty(4, 4, device=device)
        sparse = torch.eye(4).to_sparse().to(device)
        return [
            torch.add(x, x, alpha=t, out=out),
            x.add(2.5, alpha=t),
            torch.add(ints, ints, alpha=whole),
            torch.add(x, x, alpha=whole),
            torch.add(x, ints, alpha=t),
            torch.add(sparse, sparse, alpha=t).to_dense(),
            torch.add(x, sparse, alpha=t),
            x.to(torch.complex64).conj().add(x, alpha=t).resolve_conj(),
            torch.addmm(x, x, x, alpha=t, beta=t),
            torch.addcmul(x, x, x, value=t),
            torch.stack(torch._foreach_add([x, x], [x, x], alpha=t.item())),
        ]

    for k, (mine, local) in enumerate(zip(results(cuda), results("cpu"), strict=True)):
        torch.testing.assert_close(mine.cpu(), local, rtol=0, atol=0, msg=f"result {k}")


@torch.no_grad()
def test_errors_are_those_of_the_cpu(cuda):
    def error(device, make):
        t, ints = computed(device), torch.arange(4).to(device)
        with pytest.raises((RuntimeError, TypeError)) as e:
            make(t, ints)
        return str(e.value)

    for make in (
        lambda t, ints: ints.add(ints, alpha=t),
        lambda t, ints: ints.add_(ints, alpha=t),
        lambda t, ints: (ints * 1.0).add_(t.expand(3), alpha=t),
    ):
        assert error(cuda, make) == error("cpu", make)


@torch.no_grad()
def test_debug_mode_tells_that_cuda_waits(cuda):
    t, x = computed(cuda), given(4).to(cuda)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            x.add_(x, alpha=t)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events at the end of each cycle")  # of PyTorch 2.11
@torch.no_grad()
def test_other_threads_and_profilers_see_nothing_else(cuda):
    x, found = given(4).to(cuda), []
    t = computed(cuda)

    def work():
        with torch.no_grad():
            found.append(torch.add(x, x, alpha=t))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    with torch.profiler.profile(record_shapes=True):
        found.append(torch.add(x, x, alpha=t))
    local = given(4)
    assert all(torch.equal(f.cpu(), torch.add(local, local, alpha=computed("cpu"))) for f in found)


def test_call_at_tells_function_and_keywords():
    found = []

    def spy(_):
        frame = sys._getframe(1)
        found.append(call_at(frame.f_code, frame.f_lasti))
        return 0

    class Holder:
        def __init__(self):
            self.values = [1]

        def get(self):
            return self.values

    q, wanted, more = Holder(), {"key": spy}, {"x": [[1]]}
    q.values.sort(key=spy)
    q.get().sort(
        key=spy,
    )
    (
        q.get()
        .sort(key=spy)
    )  # fmt: skip
    more["x"][0].sort(key=spy, reverse=not q)
    sorted(sorted(q.values), key=spy)
    assert found == [("sort", ("key",))] * 3 + [("sort", ("key", "reverse")), ("sorted", ("key",))]
    found.clear()
    max(q.values, **wanted)
    list(map(spy, q.values))
    assert found == [None, None]
