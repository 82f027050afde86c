"""Each public name of `torch.cuda`, its submodules and the modules beside it works, or raises an error with a reason."""

import inspect
import json
import os
import re
import types
import warnings
from pathlib import Path

import pytest
import torch
import torch.cuda.comm
import torch.cuda.profiler
import torch.cuda.tunable
from wooly.facade.cuda import capability_of
from wooly_testkit import forks

MODULES = {
    m.__name__: m
    for m in (
        torch.cuda,
        torch.cuda.memory,
        torch.cuda.random,
        torch.cuda.graphs,
        torch.cuda.nvtx,
        torch.cuda.profiler,
        torch.cuda.tunable,
        torch.cuda.comm,
        torch.backends.cuda,
        torch.backends.cudnn,
        torch.accelerator,
        torch.accelerator.memory,
    )
}
#: Functions that would change the state of the process for other tests.
LEFT_ALONE = {"seed", "seed_all", "sdp_kernel", "flags", "set_flags"}


def names():
    for where, module in MODULES.items():
        for name in getattr(module, "__all__", None) or [n for n in dir(module) if not n.startswith("_")]:
            value = getattr(module, name)
            if callable(value) and not isinstance(value, types.ModuleType) and name not in LEFT_ALONE:
                yield f"{where}.{name}"


@pytest.mark.parametrize("path", list(names()))
def test_public_name_works_or_says_why_not(cuda, path):
    """A CPU build has no C++ part for many of these: an AttributeError of `torch._C` in most cases, once a crash."""
    where, _, name = path.rpartition(".")
    value = getattr(MODULES[where], name)
    try:
        needed = [p for p in inspect.signature(value).parameters.values() if p.default is p.empty and p.kind < 2]
    except (TypeError, ValueError):
        needed = []
    if needed:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            value()
        except NotImplementedError as e:
            assert "on the wooly device" in str(e)
        except TypeError as e:
            assert "argument" in str(e)


def parameters():
    """For each public function, the names of the parameters that can be given by position or by name."""
    found = {}
    for path in names():
        where, _, name = path.rpartition(".")
        try:
            signature = inspect.signature(getattr(MODULES[where], name))
        except (TypeError, ValueError):
            continue
        kinds = {p.kind for p in signature.parameters.values()}
        if not kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
            found[path] = [p.name for p in signature.parameters.values()]
    return found


def test_functions_have_the_parameter_names_of_pytorch(cuda):
    """People call them by name: `memory_allocated(device=0)`."""
    # A fork has no device. As `cuda` has forked an executor, the process that forks has imported PyTorch.
    plain = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    done = forks.run(Path(__file__).stem, env=plain, timeout=100)
    assert done.returncode == 0, done.stderr
    theirs, ours = json.loads(done.stdout.splitlines()[-1]), parameters()
    assert len(theirs) > 100 and "torch.cuda.memory_allocated" in ours
    wrong = {path: (ours[path], theirs[path]) for path in ours.keys() & theirs.keys() if ours[path] != theirs[path]}
    assert wrong == {}


def eval_in_torch(expression):
    """What PyTorch's own code gets: it takes the answer for a reason to use the C++ part."""
    code = compile(f"answer = torch.backends.{expression}", torch.nn.__file__, "exec")
    found = {"torch": torch}
    types.FunctionType(code, found)()
    return found["answer"]


def test_build_says_cuda(cuda):
    assert torch.version.cuda == "13.0" and torch.backends.cuda.is_built()
    assert torch._C._cuda_getCompiledVersion() == 13000  # read at the import of PyTorch's test library
    assert eval_in_torch("cuda.is_built()") is torch._C._has_cuda
    assert torch.backends.cudnn.is_available() and torch.backends.cudnn.version() >= 90000


def test_memory_fraction_limits_process(cuda, no_garbage):
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + (8 << 20)) / total)
    try:
        kept = torch.empty(4 << 20, dtype=torch.uint8, device=cuda)
        with pytest.raises(torch.cuda.OutOfMemoryError, match="set_per_process_memory_fraction allows"):
            torch.empty(8 << 20, dtype=torch.uint8, device=cuda)
        del kept
        torch.empty(7 << 20, dtype=torch.uint8, device=cuda)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.empty(64 << 20, dtype=torch.uint8, device=cuda).numel() == 64 << 20
    for wrong, error in ((2.0, ValueError), (1, TypeError)):
        with pytest.raises(error):
            torch.cuda.set_per_process_memory_fraction(wrong)


def test_sync_debug_mode_warns_or_raises_when_operation_waits(cuda):
    x = torch.arange(4.0, device=cuda)
    read = x.sum()
    assert read.item() == 6.0
    waits = [
        lambda: x.sum().item(),
        lambda: (x + 1).cpu(),
        lambda: x.nonzero(),
        lambda: bool((x == 0).any()),
        read.item,
    ]
    try:
        torch.cuda.set_sync_debug_mode("error")
        assert torch.cuda.get_sync_debug_mode() == 2
        for wait in waits:
            with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
                wait()
        torch.cuda.synchronize()  # asked for, so no error
        torch.cuda.set_sync_debug_mode(1)
        for wait in waits:
            with pytest.warns(UserWarning, match="called a synchronizing CUDA operation"):
                wait()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert x.nonzero().tolist() == [[1], [2], [3]]


def test_allocator_addresses_and_nested_figures(cuda, no_garbage):
    before = torch.cuda.memory_allocated()
    address = torch.cuda.caching_allocator_alloc(4096)
    assert address and torch.cuda.memory_allocated() == before + 4096
    torch.cuda.caching_allocator_delete(address)
    assert torch.cuda.memory_allocated() == before
    nested = torch.cuda.memory_stats_as_nested_dict()
    assert nested["allocated_bytes"]["all"]["current"] == before
    assert torch.cuda.device_memory_used() >= 0 and 0 <= torch.cuda.memory_usage() <= 100
    free, total = torch.cuda.cudart().cudaMemGetInfo(0)
    assert 0 < free <= total == torch.cuda.mem_get_info(0)[1]


def test_utilization_is_that_of_the_device(cuda):
    torch.cuda.synchronize()
    x = torch.ones(500, 500, device=cuda)
    for _ in range(60):
        x = (x @ x) / 500.0
    assert 0 < torch.cuda.utilization() <= 100 and torch.cuda.utilization("cuda:0") <= 100


@pytest.mark.parametrize(
    ("arch", "capability"),
    [
        ("sm_90", (9, 0)),
        ("sm_86", (8, 6)),
        ("sm_100a", (10, 0)),
        ("gfx942", (9, 4)),
        ("gfx90a", (9, 0)),
        ("gfx1100", (11, 0)),
        ("x86_64", (8, 0)),
        ("", (8, 0)),
    ],
)
def test_capability_is_that_of_the_chip(arch, capability):
    assert capability_of(arch) == capability


def test_capability_of_a_cpu_is_in_all_answers(cuda):
    assert torch.cuda.get_device_capability() == (8, 0) and torch.cuda.get_arch_list() == ["sm_80"]
    found = torch.cuda.get_device_properties(0)
    assert (found.major, found.minor) == (8, 0)


def test_jiterator_says_what_to_use_instead(cuda):
    negated = torch.cuda.jiterator._create_jit_fn("template <typename T> T negated(T x) { return -x; }")
    with pytest.raises(NotImplementedError, match="_compile_kernel"):
        negated(torch.ones(2, device="cuda"))


def test_error_of_a_status_has_cudas_text(cuda):
    torch.cuda.check_error(0)
    with pytest.raises(torch.cuda.CudaError, match=r"^out of memory \(2\)$"):
        torch.cuda.check_error(2)


def test_preferred_libraries_are_kept(cuda):
    linalg, blas = torch.backends.cuda.preferred_linalg_library, torch.backends.cuda.preferred_blas_library
    assert linalg().name == "Default"
    try:
        assert linalg("cusolver").name == linalg().name == "Cusolver"
        assert blas("cublaslt").name == blas().name == "Cublaslt"
        assert blas(blas()).name == "Cublaslt"
        with pytest.raises(RuntimeError, match="Choose from: default, cusolver, magma"):
            linalg("lapack")
    finally:
        linalg("default"), blas("default")


def test_uuid_of_the_device_has_cudas_form(cuda):
    found = torch.cuda.get_device_properties(0).uuid
    assert len(str(found)) == 36 and len(found.bytes) == 16
    assert found == torch.cuda.get_device_properties(0).uuid


def test_properties_of_the_device_are_printed_as_cudas(cuda):
    found = torch.cuda.get_device_properties(0)
    assert re.fullmatch(
        r"_CudaDeviceProperties\(name='.*', major=8, minor=0, total_memory=\d+MB, multi_processor_count=\d+, uuid=[\da-f-]{36}, "
        r"pci_bus_id=0, pci_device_id=0, pci_domain_id=0, L2_cache_size=0MB\)",
        repr(found),
    )


def test_property_that_no_executor_reports_says_where_it_is_shown(cuda):
    found = torch.cuda.get_device_properties(0)
    with pytest.raises(AttributeError, match="executors do not report memory_clock_rate; nvidia-smi shows it"):
        found.memory_clock_rate  # noqa: B018 - the access raises
    with pytest.raises(AttributeError, match="'_CudaDeviceProperties' object has no attribute 'clocks'"):
        found.clocks  # noqa: B018 - the access raises
    assert getattr(found, "memory_clock_rate", 5) == 5


if __name__ == "__main__":
    print(json.dumps(parameters()))
