"""TorchScript and forward-mode gradients: scripts, traces, saved modules, and modules that move between devices."""

import copy
import io
import zipfile

import pytest
import torch
from torch import nn
from wooly.facade.torchscript import rename_devices

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.torch.jit:{kind}") for kind in ("DeprecationWarning", "FutureWarning")
]


def with_constants(x):
    return x + torch.zeros(2, 3) + torch.full((3,), 2.0)


def with_factories(x):
    return x + torch.ones(2, 3, device=x.device) + torch.arange(3, device=x.device) + torch.zeros_like(x)


def with_device_name(x):
    return x * torch.full((3,), 3.0, device="cuda")


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        return self.inner(x) + torch.eye(3, device=x.device)[: x.shape[0]]


def convolutions():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 2, 3), nn.Flatten())
    return model.eval()


@pytest.mark.parametrize(
    ("function", "devices"),
    [(with_constants, ["cpu"]), (with_factories, ["cpu", "cuda"]), (with_device_name, ["cuda"])],
)
def test_script_with_factories_equals_python(cuda, function, devices):
    for device in devices:
        x = torch.arange(6.0, device=device).view(2, 3)
        assert torch.equal(torch.jit.script(function)(x), function(x))


def test_script_module_equals_python(cuda):
    model, x = Masked().to("cuda"), torch.ones(2, 3, device="cuda")
    assert torch.equal(torch.jit.script(model)(x), model(x))


def test_script_after_disable_of_facade_works(cuda):
    """The identities of removed functions must not stay in TorchScript's table."""
    from wooly import api

    patched = torch.zeros
    api._facade.uninstall()
    try:
        assert torch.zeros is not patched
        assert torch.jit.script(with_constants)(torch.ones(2, 3)).sum() == 18
        from torch.jit import _builtins

        assert _builtins._find_builtin(patched) is None
    finally:
        api.install_facade()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_forward_mode_gradients_equal_analytic_ones(cuda, device):
    x = torch.tensor([1.0, 2.0, 3.0], device=device)

    def cubes(t):
        return (t**3).sum()

    assert torch.equal(torch.func.jacfwd(cubes)(x), 3 * x**2)
    assert torch.equal(torch.func.hessian(cubes)(x), torch.diag(6 * x))
    value, tangent = torch.func.jvp(cubes, (x,), (torch.ones_like(x),))
    assert (value.item(), tangent.item()) == (36.0, 42.0)


def test_trace_of_convolutions_equals_module_and_has_gradients(cuda):
    model, x = convolutions().to("cuda"), torch.randn(1, 3, 8, 8, device="cuda")
    traced = torch.jit.trace(model, x)
    assert torch.equal(traced(x), model(x))
    traced(x).sum().backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(found, model.parameters(), strict=True))


@pytest.mark.parametrize(
    "make", [lambda m, x: torch.jit.trace(m, x), lambda m, x: torch.jit.script(m)], ids=["trace", "script"]
)
def test_saved_module_names_cuda_and_loads_on_each_device(cuda, tmp_path, make):
    model, x = convolutions().to("cuda"), torch.randn(1, 3, 8, 8, device="cuda")
    made, path = make(model, x), str(tmp_path / "model.pt")
    made.save(path)
    with zipfile.ZipFile(path) as archive:
        texts = [archive.read(name) for name in archive.namelist() if name.endswith((".py", ".pkl"))]
    assert not any(b"wooly" in text for text in texts) and any(b"cuda:0" in text for text in texts)
    expected = model(x)
    for where in (None, "cuda", "cuda:0", torch.device("cuda")):
        loaded = torch.jit.load(path, map_location=where)
        assert next(loaded.parameters()).device == torch.device("cuda:0") and torch.equal(loaded(x), expected)
    on_host = torch.jit.load(path, map_location="cpu")
    assert torch.equal(on_host(x.cpu()), copy.deepcopy(model).cpu()(x.cpu()))
    assert torch.equal(on_host.to("cuda")(x), expected) and next(on_host.parameters()).is_cuda


def test_saved_module_of_buffer_keeps_extra_files(cuda):
    buffer, extra = io.BytesIO(), {"note": ""}
    torch.jit.save(torch.jit.script(Masked().to("cuda")), buffer, _extra_files={"note": "wooly:0"})
    buffer.seek(0)
    loaded = torch.jit.load(buffer, _extra_files=extra)
    assert extra == {"note": b"wooly:0"} and next(loaded.parameters()).is_cuda


def test_script_module_moved_to_device_keeps_gradients_and_buffers(cuda):
    scripted = torch.jit.script(convolutions().train())
    x = torch.randn(2, 3, 8, 8)
    scripted(x).sum().backward()
    expected = [p.grad.clone() for p in scripted.parameters()]
    assert scripted.to("cuda") is scripted
    assert all(t.is_cuda for t in (*scripted.parameters(), *scripted.buffers()))
    assert all(
        p.requires_grad and torch.equal(p.grad.cpu(), g) for p, g in zip(scripted.parameters(), expected, strict=True)
    )
    assert torch.equal(scripted.cpu()(x), scripted(x))


def test_rename_devices_other_bytes_stay():
    assert rename_devices(b"not an archive", "wooly", "cuda") == b"not an archive"
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), buffer)
    assert rename_devices(buffer.getvalue(), "wooly", "cuda") == buffer.getvalue()


def test_load_of_missing_or_broken_file_raises_error_of_pytorch(cuda, tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        torch.jit.load(str(tmp_path / "nothing.pt"))
    (tmp_path / "broken.pt").write_bytes(b"PK\x03\x04 but not an archive")
    with pytest.raises(RuntimeError, match="archive"):
        torch.jit.load(str(tmp_path / "broken.pt"))


def test_script_and_trace_under_older_executor_equal_eager(cuda):
    def f(x):
        return torch.sigmoid(x) * x.tanh()

    x = torch.ones(2, 3, device=cuda)
    before = torch._C._jit_set_profiling_executor(False)
    try:
        for compiled in (torch.jit.script(f), torch.jit.trace(f, x)):
            for _ in range(3):
                assert torch.equal(compiled(x), f(x))
        assert torch._C._jit_set_profiling_executor(False) is False
    finally:
        assert torch._C._jit_set_profiling_executor(before) is False


def masked(x):
    y = x.abs()
    y[y < 0.3] = 0.3
    return y


def set_rows(x):
    y = x.clone()
    y[:, 0], y[1] = 1.0, x[0]
    return y


@pytest.mark.parametrize("f", [masked, set_rows])
def test_trace_of_assignments_to_parts_equals_eager_for_other_values(cuda, f):
    traced = torch.jit.trace(f, torch.rand(3, 8, device=cuda))
    x = torch.rand(3, 8, device=cuda)
    assert torch.equal(traced(x), f(x))
    assert "prim::NumToTensor" not in str(torch.jit.trace(masked, x).graph)  # no kernel's use of a size is in the graph


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    "make", [nn.LSTMCell, nn.GRUCell, nn.RNNCell, lambda *sizes: nn.RNNCell(*sizes, nonlinearity="relu")]
)
def test_trace_of_cell_equals_eager_for_other_values(cuda, make, grad):
    cell = make(8, 4).requires_grad_(grad).to(cuda)
    x = torch.rand(3, 8, device=cuda)
    traced = torch.jit.trace(cell, torch.rand(3, 8, device=cuda))
    torch.testing.assert_close(traced(x), cell(x))
