"""The counter of operators on device tensors that the client's CPU computes."""

import pytest
import torch
from wooly import api
from wooly.fallbacks import Fallbacks

pytestmark = pytest.mark.connected


@pytest.fixture
def device(cuda):
    return api.attached_device()


@pytest.fixture(scope="module")
def forced():
    """Make two operators fall back: one in composite code, one in a kernel of the device."""
    library = torch.library.Library("wooly_forced", "DEF")
    library.define("composite(Tensor x) -> Tensor")
    library.define("kernel(Tensor x) -> Tensor")
    library.impl("composite", lambda x: (x.cpu() * 2).to(x.device), "CompositeImplicitAutograd")
    library.impl(
        "kernel",
        lambda x: (api.attached_device().reading.to_host(x) * 2).to("cuda"),
        "PrivateUse1",
    )
    yield torch.ops.wooly_forced
    library._destroy()


def test_fallback_in_composite_code_is_counted(cuda, device, forced):
    x = torch.ones(3, device=cuda)
    with Fallbacks(device) as fallbacks:
        y = forced.composite(x)
    assert y.tolist() == [2, 2, 2]
    assert dict(fallbacks.found) == {"aten.mul.Tensor": 1}


def test_fallback_in_a_kernel_is_counted(cuda, device, forced):
    x = torch.ones(3, device=cuda)
    with Fallbacks(device) as fallbacks:
        y = forced.kernel(x)
    assert y.tolist() == [2, 2, 2]
    assert dict(fallbacks.found) == {"wooly_forced.kernel.default": 1}


def test_fallback_of_data_already_on_the_host_is_counted(cuda, device, forced):
    x = torch.ones(3, device=cuda)
    x.cpu()
    with Fallbacks(device) as fallbacks:
        forced.kernel(x)
        forced.composite(x)
    assert fallbacks.found.total() == 2


def test_fallback_outside_the_context_is_not_counted(cuda, device, forced):
    x = torch.ones(3, device=cuda)
    with Fallbacks(device) as fallbacks:
        x + 1
    forced.composite(x)
    assert fallbacks.found.total() == 0
    assert fallbacks.calls == 1


def test_computation_of_program_on_host_is_not_counted(cuda, device):
    x = torch.arange(5.0, device=cuda)
    with Fallbacks(device) as fallbacks:
        host = (x * 2).cpu()
        host = host.softmax(0) + x.max().item()
        x.add_(host.to(cuda))
        print(x, x.tolist(), bool((x > 0).all()))
    assert dict(fallbacks.found) == {}


def test_training_has_no_fallback(cuda, device):
    torch.manual_seed(0)
    before = device.generic.inferences.on_meta
    with Fallbacks(device) as fallbacks:
        model = torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3),
            torch.nn.BatchNorm2d(4),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(144, 10),
        ).to(cuda)
        optimizer = torch.optim.Adam(model.parameters())
        x, y = torch.randn(8, 1, 8, 8, device=cuda), torch.randint(10, (8,), device=cuda)
        for _ in range(3):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        hits = (model(x).argmax(1) == y).float().mean().item()
        kept = x[y > 4].nonzero().unique().sort()
    assert 0 <= hits <= 1 and kept
    assert dict(fallbacks.found) == {}
    assert fallbacks.calls > 100
    assert device.generic.inferences.on_meta > before


def test_operations_of_compiled_function_are_counted_in_each_call(cuda, device):
    @torch.compile
    def f(x):
        return (x * 2 + 1).relu().sum()

    x = torch.ones(3, device=cuda)
    with torch.no_grad():
        f(x)
        f(x)
        before = api.session_stats()["operations"]
        with Fallbacks(device) as fallbacks:
            once = [f(x), fallbacks.calls]
            again = [f(x), fallbacks.calls]
    assert once[0].item() == again[0].item() == 9
    assert again[1] == 2 * once[1] >= 8
    assert api.session_stats()["operations"] - before == again[1]
    assert fallbacks.found.total() == 0
