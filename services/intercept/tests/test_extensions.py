"""Extension operators from a client to an executor: what is recorded, what runs here, and what fails with which message."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from wooly import api
from wooly.torch_private import fake_results
from wooly_testkit import forks
from wooly_testkit.executor import executor_process

FOLDER = Path(__file__).parent


def _cases(*chosen, opaque=True, version="1", libraries="extension_operators", runtime="torch_cpu"):
    """The results of cases of `extension_cases.py`, by name; without names, of all cases."""
    env = {"PYTHONPATH": str(FOLDER), "WOOLY_EXECUTOR_LIBRARIES": libraries}

    def permitted(module, *arguments, **options):
        return forks.Forked(module, *arguments, *(["--opaque-kernels"] if opaque else []), **options)

    with executor_process(
        runtime=runtime, environment=env | {"EXTENSION_OPERATORS_VERSION": version}, start=permitted
    ) as running:
        done = forks.run(
            "extension_cases",
            running.endpoints[0],
            running.session_id,
            running.token,
            *chosen,
            like="wooly",
            cwd=FOLDER,
            env=os.environ | {"PYTHONPATH": str(FOLDER), "EXTENSION_OPERATORS_VERSION": "1"},
            timeout=200,
        )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def cases():
    return _cases()


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("scale", [0, 2, 4, 6, 8]),
        ("gradient", [3, 3, 3, 3, 3]),
        ("data-dependent", [[2, 3, 4], [4], []]),
        ("no fake kernel", [1, 2, 3]),
        ("in place", [3, 4, 5, 6, 7]),
        ("several results", [[0, 2, 4, 6, 8], [0, 2, 4, 6, 8]]),
        ("optional tensor", [[0, 2, 4, 6, 8], [0, 1, 4, 9, 16]]),
        ("unwritten", 0),
        ("known name", [100, 101, 102, 103, 104]),
        ("compiled", [0, 2, 4, 6, 8]),
        ("kernel for cuda", [0, 3, 6, 9, 12]),
        ("kernel for all", [0, 2, 4, 6, 8]),
    ],
)
def test_extension_operator_call_gives_result(cases, case, expected):
    assert cases[case] == expected


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("view", "NotImplementedError", "the executor offers extension_operators 1"),
        ("mixed devices", "RuntimeError", "Expected all tensors to be on the same device"),
        ("kernel for cpu", "NotImplementedError", "add its import name to WOOLY_EXECUTOR_LIBRARIES"),
        ("address", "RuntimeError", "asks for the address of a CUDA tensor (data_ptr)"),
    ],
)
def test_extension_operator_without_kernel_says_what_to_do(cases, case, kind, words):
    assert cases[case].startswith(kind) and words in cases[case]


def test_extension_operator_without_permission_names_permission():
    cases = _cases("scale", "kernel for cuda", opaque=False)
    assert cases["scale"].startswith("NotImplementedError") and "needs the permission opaque_kernels" in cases["scale"]
    assert cases["kernel for cuda"] == [0, 3, 6, 9, 12]


def test_extension_operator_with_triton_kernel_launches_it():
    assert _cases("kernel in Triton", runtime="opencl")["kernel in Triton"] == [7, 8, 9, 10, 11]


@pytest.mark.parametrize(("runtime", "most"), [("opencl", 0), ("torch_cpu", 1e-6)])
def test_recursive_filter_of_torchaudio_has_the_bits_of_its_kernel_for_cpus(runtime, most):
    names = ("recursive filter", "recursive filter in float64", "recursive filter in float16")
    single, double, half = _cases(*names, runtime=runtime, opaque=False).values()
    assert single <= most and double <= most
    assert half == "NotImplementedError: \"iir_cu_loop\" not implemented for 'Half'"


def test_extension_operator_with_other_schema_names_both_versions():
    changed = _cases("changed", version="2")["changed"]
    assert changed.startswith("NotImplementedError")
    assert (
        "its arguments differ between extension_operators 1 here and extension_operators 2 on the executor" in changed
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)  # compiles C++ twice
def test_native_library_and_inline_sources_work_on_cuda(tmp_path):
    built, inline = tmp_path / "built", tmp_path / "inline"
    built.mkdir()
    inline.mkdir()
    made = subprocess.run(
        [sys.executable, "native_cases.py", "build", str(built)],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert made.returncode == 0, made.stderr
    path = os.pathsep.join([str(FOLDER), str(built)])

    def permitted(module, *arguments, **options):
        return forks.Forked(module, *arguments, "--opaque-kernels", **options)

    env = {"PYTHONPATH": path, "WOOLY_EXECUTOR_LIBRARIES": "native_operators"}
    with executor_process(environment=env, start=permitted) as running:
        done = subprocess.run(
            [
                *(sys.executable, "native_cases.py", "call", str(inline)),
                *(running.endpoints[0], running.session_id, running.token),
            ],
            cwd=FOLDER,
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout[done.stdout.index("{") :])
    assert found["native"] == [0, 1, 3, 6, 10]
    assert found["inline"] == [[2, 2], [0, 2, 4, 6, 8]]
    assert found["cuda sources"].startswith("NotImplementedError") and "wooly" in found["cuda sources"]


def test_kernel_of_torchaudio_does_not_run_with_values_that_are_not_there():
    """PyTorch runs the kernels of this namespace with zeros if they have no fake kernel."""
    calls = []
    library = torch.library.Library("torchaudio", "FRAGMENT")
    try:
        library.define("test_first(Tensor x, Tensor n) -> Tensor")
        library.impl("test_first", lambda x, n: calls.append(n) or x[: int(n)].clone(), "CPU")
        first = torch.ops.torchaudio.test_first.default
        assert fake_results(lambda fake: first(fake(torch.ones(3)), fake(torch.tensor(2)))) is None
        assert not calls
    finally:
        library._destroy()


@torch.library.custom_op("wooly_rules::halve", mutates_args=())
def halve(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5


halve.register_fake(torch.empty_like)


class _Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.wooly_rules.triple(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * 7  # other than a derivative of its operators


def _cast_and_call(x):
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)):
        return torch.ops.wooly_rules.triple(x.half())


@pytest.mark.parametrize("before", [False, True])
def test_rules_for_cudas_autocast_and_autograd_hold_for_the_device(cuda, before):
    """Also those that are registered before the device is."""
    library = torch.library.Library("wooly_rules", "FRAGMENT")
    if before:
        api._facade.uninstall()
    try:
        library.define("triple(Tensor x) -> Tensor")
        library.impl("triple", lambda x: x * 3, "CompositeExplicitAutograd")
        library.impl("triple", _Tripled.apply, "AutogradCUDA")
        library.impl("triple", _cast_and_call, "AutocastCUDA")
        torch.library.register_autocast("wooly_rules::halve", "cuda", torch.bfloat16)
        api.install_facade()
        x = torch.ones(3, device=cuda, requires_grad=True)
        out = torch.ops.wooly_rules.triple(x)
        out.sum().backward()
        assert out.tolist() == [3.0] * 3 and x.grad.tolist() == [7.0] * 3
        with torch.autocast("cuda"):
            assert torch.ops.wooly_rules.triple(x.detach()).dtype is torch.float16
            assert halve(x.detach()).dtype is torch.bfloat16
        assert halve(x.detach()).dtype is torch.float32
    finally:
        api.install_facade()
        library._destroy()
