"""The texts that the executor's GPU runtimes launch, built with all guards for GPUs that are not present.

The tests do not run the built code. Other tests run the same text on the CPU. They show that the guards keep a kernel's results
and block accesses out of bounds.
"""

from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
import torch  # noqa: E402
from wooly.device import current  # noqa: E402
from wooly.kernels.launch import ForeignKernel, Pointer  # noqa: E402
from wooly_compiler.build.worker import Limits, WorkerProcess  # noqa: E402
from wooly_wis.dtypes import DType  # noqa: E402
from wooly_wis.foreign import Source, decode_code  # noqa: E402

from libs.triton.tests.texts import guarded, request, signature  # noqa: E402
from services.compiler.tests.kernels import triton_kernels as kernels  # noqa: E402

TARGETS = ("cuda:sm_90", "hip:gfx942")
NAMES = ("add", "softmax", "matmul", "layer norm", "layer norm's gradient", "dropout", "attention", "grouped gemm")


def captured(name):
    """The text of a launch of one of our kernels."""
    x, ints = torch.ones(64, 64, device="cuda"), torch.tensor([0, 32, 64], dtype=torch.int32, device="cuda")
    w = torch.ones(64, device="cuda")
    locks = torch.zeros(8, dtype=torch.int32, device="cuda")
    square = (x, x, torch.empty_like(x), 64, 64, 64, 64, 1, 64, 1, 64, 1)
    compiled = {
        "add": lambda: kernels.add_kernel[(1,)](x, x, torch.empty_like(x), 64, BLOCK=1024),
        "softmax": lambda: kernels.softmax_kernel[(64,)](torch.empty_like(x), x, 64, 64, BLOCK=64),
        "matmul": lambda: kernels.matmul_kernel.fn.fn[(1,)](*square, BM=64, BN=64, BK=32, EVEN=True),
        "layer norm": lambda: kernels.layer_norm_forward[(64,)](
            x, w, w, torch.empty_like(x), w, w, 64, 64, 1e-5, BLOCK=64
        ),
        "layer norm's gradient": lambda: kernels.layer_norm_backward[(64,)](
            torch.empty_like(x), x, x.clone(), x.clone(), x, w, w, w, locks, 64, 64, GROUPS=4, BLOCK=64
        ),
        "dropout": lambda: kernels.dropout_kernel[(8,)](x, torch.empty_like(x), 4096, 0.5, 7, BLOCK=512),
        "attention": lambda: kernels.attention_kernel[(2, 1)](
            x, x, x, torch.empty_like(x), 0.1, 4096, 64, 64, D=64, BM=32, BN=32, CAUSAL=True
        ),
        "grouped gemm": lambda: kernels.grouped_gemm_kernel[(2,)](
            x, x, torch.empty_like(x), ints, 1, 64, 64, BM=16, BN=32, BK=16
        ),
    }[name]()
    torch.cuda.synchronize()
    return compiled.asm["ttir"].decode()


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    found = WorkerProcess(Limits(seconds=200), "wooly_compiler.worker", (str(tmp_path_factory.mktemp("worker")),))
    yield found
    found.close()


@pytest.fixture(scope="module")
def build(worker):
    """Builds in the same way as an executor."""
    return lambda asked: decode_code(worker.ask(asked, asked["target"], "kernel"), "n")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_triton_kernels_build_with_guards(gpu, build, name, target):
    text = captured(name)
    entry, args = signature(text)
    code = build(request(text, target))
    assert code.entry == entry and len(code.parameters) == len(args) and not code.code
    assert any(p.writes for p in code.parameters) and not all(p.writes for p in code.parameters if p.buffer)
    first, last = code.images
    assert max(first.claims) == 16 and set(last.claims) == {1}
    for image in code.images:
        assert image.threads == 4 * (32 if target.startswith("cuda") else 64) and len(image.code) > 1000
        assert image.passed[: len(args)] == tuple(
            [f"{'address' if a.startswith('*') else 'value'} {k}" for k, a in enumerate(args)]
        )
        assert "status" in image.passed and any(p.startswith("length ") for p in image.passed)
        assert not image.scratch and (image.shared or name in ("add", "dropout", "softmax", "layer norm"))


# -- the same texts, run here ------------------------------------------------------------------------------------------

_DTYPE = {"f32": DType.F32, "i32": DType.I32, "i64": DType.I64}


def run_guarded(text, grid, values, lengths=None):
    """Run a text with guards on the CPU, with the arguments of a launch on a GPU. Returns the status words."""
    made = guarded(text)
    entry, args = signature(made.text)
    status = torch.zeros(8, dtype=torch.int32, device="cuda")
    given = [*values]
    for k, unit in made.extra:
        given.append((lengths or {}).get(k, values[k].nbytes) // unit)
    parameters = [Pointer(_DTYPE[a[1:]], writes=True) if a.startswith("*") else _DTYPE[a] for a in args]
    kernel = ForeignKernel(Source("ttir", made.text), entry, tuple(parameters), (1, 1, 1), ())
    current().launches.launch(kernel, grid, [*given, status])
    return status.tolist(), made.places


def operands(name):
    """The arguments and the grid of a kernel."""
    torch.manual_seed(0)
    x, y = torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda")
    w, b = torch.randn(64, device="cuda"), torch.randn(64, device="cuda")
    out, mean, rstd = torch.zeros(64, 64, device="cuda"), torch.zeros(64, device="cuda"), torch.zeros(64, device="cuda")
    ints = torch.tensor([0, 32, 64], dtype=torch.int32, device="cuda")
    return {
        "add": ((1, 1, 1), (x, y, out, 64), out),
        "softmax": ((64, 1, 1), (out, x, 64, 64), out),
        "matmul": ((1, 1, 1), (x, y, out, 64, 64, 64, 64, 64, 64), out),
        "layer norm": ((64, 1, 1), (x, w, b, out, mean, rstd, 64, 64, 1e-5), out),
        "dropout": ((8, 1, 1), (x, out, 4096, 0.5, 7), out),
        "attention": ((2, 1, 1), (x, y, x, out, 0.1, 4096, 64, 64), out),
        "grouped gemm": ((2, 1, 1), (x, y, out, ints, 64, 64), out),
    }[name]


@pytest.mark.parametrize("name", ["add", "softmax", "matmul", "layer norm", "dropout", "attention", "grouped gemm"])
@pytest.mark.slow
def test_guards_keep_results_and_protect_other_memory(gpu, name):
    text = captured(name)
    grid, values, out = operands(name)
    entry, args = signature(text)
    parameters = [Pointer(_DTYPE[a[1:]], writes=True) if a.startswith("*") else _DTYPE[a] for a in args]
    plain = ForeignKernel(Source("ttir", text), entry, tuple(parameters), (1, 1, 1), ())
    current().launches.launch(plain, grid, list(values))
    wanted = out.clone()
    assert wanted.any()
    out.zero_()
    status, _ = run_guarded(text, grid, values)
    assert torch.equal(out, wanted) and status[1] == 0
    out.zero_()
    (k,) = [k for k, v in enumerate(values) if v is out]
    status, places = run_guarded(text, grid, values, {k: 33 * 4})  # 33 elements of the result are in bounds
    assert torch.equal(out.view(-1)[:33], wanted.view(-1)[:33]) and not out.view(-1)[33:].any()
    assert status[1] & 7 == 2 and places[status[1] >> 3].startswith("tt.store in line")


def test_kernels_are_found_by_gpu_check():
    script = Path(__file__).parents[4] / "tests" / "gpu" / "run.sh"
    assert "PYTHONPATH=services/compiler/tests/kernels" in script.read_text()
