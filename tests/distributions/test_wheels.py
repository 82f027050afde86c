"""The wheels of `make dist`, installed into virtual environments with only the wheels' requirements."""

import json
import subprocess

import pytest

from tests.distributions.distributions import ALL, VERSION
from tests.distributions.environments import build_wheels, clean_variables, install, make_environment
from tests.distributions.test_requirements import HOSTS, extra_of

#: Timeout in seconds. An environment and a stack in it take half a minute, and several minutes on a busy machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
#: Imports all modules that its standard input names, and prints the file of the first one.
IMPORT = "import importlib, sys; print([importlib.import_module(m) for m in sys.stdin.read().split()][0].__file__)"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    return build_wheels(tmp_path_factory.mktemp("wheels"))


def test_wheels_exist_for_all_distributions(wheels):
    assert {w.name for w in wheels.values()} == {f"{n.replace('-', '_')}-{VERSION}-py3-none-any.whl" for n in ALL}


def of_host(distribution):
    """The modules that only a host of the distribution can load, because they import it, or modules that do."""
    hosts = {host for name, host in HOSTS if name == distribution.name}
    imports = [(i.importer.removesuffix(".__init__"), i) for i in distribution.imports if i.always]
    found, known = set(), None
    while found != known:
        known = set(found)
        found |= {module for module, i in imports if i.package in hosts or i.module in found}
    return found


def modules(distribution):
    """The modules that an import loads, without scripts (`__main__`, migrations) and modules of extras and hosts."""
    source = distribution.folder / "src"
    found = [
        ".".join(p.relative_to(source).with_suffix("").parts).removesuffix(".__init__") for p in distribution.sources()
    ]
    without = of_host(distribution)
    return [
        m for m in found if m not in without and extra_of(m) is None and "__main__" not in m and ".migrations." not in m
    ]


def test_modules_of_vllm_are_those_that_import_no_vllm():
    found = modules(ALL["wooly-vllm"])
    assert "wooly_vllm" in found and "wooly_vllm.platform" not in found
    # `wooly` adapts bitsandbytes when a script imports it, so all its modules load without it.
    assert not of_host(ALL["wooly"])


@pytest.mark.parametrize("name", ALL)
def test_wheel_modules_import_with_only_their_requirements(name, wheels, tmp_path):
    python = make_environment(tmp_path / "env", wheels, name)
    command, every = [str(python), "-I", "-c", IMPORT], modules(ALL[name])
    variables = clean_variables(tmp_path)
    told = subprocess.run(command, input="\n".join(every), capture_output=True, text=True, env=variables, cwd=tmp_path)
    assert not told.returncode, told.stderr[-2000:]
    assert told.stdout.startswith(str(tmp_path / "env"))


def doctor(python, folder):
    """The checks of `wooly doctor` by name: the verdict, and the message."""
    command = [str(python.with_name("wooly")), "doctor", "--json"]
    told = subprocess.run(command, capture_output=True, text=True, env=clean_variables(folder), cwd=folder)
    assert told.stdout, told.stderr
    return {c["check"]: (c["ok"], c["detail"]) for c in json.loads(told.stdout)["checks"]}


def test_doctor_without_stack_fails_only_checks_that_need_it(wheels, tmp_path):
    found = doctor(make_environment(tmp_path / "env", wheels, "wooly"), tmp_path)
    assert {name for name, (ok, _) in found.items() if not ok} == {"controller", "executor", "round trip"}
    assert {"python", "torch", "configuration"} <= found.keys() and "WOOLYAI_CONTROLLER_URL" in found["controller"][1]


KERNEL = """
import torch, wooly
text = "__global__ void twice(float *x, int n) { int i = threadIdx.x; if (i < n) x[i] *= 2; }"
x = torch.ones(4, device="cuda")
print("before", x.sum().item(), flush=True)
wooly.cuda_kernel(text, "twice")((1, 1, 1), (32, 1, 1), [x, 4])
print("after", x.sum().item())
"""


def test_client_without_cuda_c_runs_and_refuses_cuda_c_kernel(wheels, tmp_path):
    python = make_environment(tmp_path / "env", wheels, "wooly", "wooly-local")
    found = doctor(python, tmp_path)
    assert all(ok for ok, _ in found.values()) and "round trip" in found, found
    (tmp_path / "kernel.py").write_text(KERNEL)

    def run():
        command = [str(python.with_name("wooly")), "run", "kernel.py"]
        return subprocess.run(command, capture_output=True, text=True, env=clean_variables(tmp_path), cwd=tmp_path)

    told = run()
    assert told.returncode == 1 and told.stdout == "before 4.0\n", told
    assert "kernels in cuda-c need wooly-cuda-c, which is not installed: pip install wooly-cuda-c" in told.stderr
    install(python, wheels, "wooly-cuda-c")
    told = run()
    assert told.returncode == 0 and told.stdout == "before 4.0\nafter 8.0\n", told
