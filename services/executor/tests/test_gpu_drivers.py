"""Drivers that are absent report what is missing; kernel arguments are packed as kernels declare them."""

import ctypes
import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from wooly_executor.app import make_runtime
from wooly_executor.errors import MissingDriverError
from wooly_executor.runtime import cuda, hip
from wooly_executor.runtime.packing import Arguments, layout
from wooly_testkit import forks
from wooly_wis.artifact import cuda_target
from wooly_wis.dtypes import DType

GOLDEN = Path(__file__).parents[2] / "compiler" / "tests" / "golden"
CUDA = cuda.Found(torch_version="2.11.0+cu130", torch_cuda="13.0", bindings=True, driver=13000, devices=2)
HIP = hip.Found(torch_version="2.11.0+rocm7.1", torch_hip="7.1.0", bindings=True, devices=1)


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (
            replace(CUDA, library="libcuda.so.1: cannot open"),
            "the NVIDIA driver cannot be loaded (libcuda.so.1: cannot open): install",
        ),
        (replace(CUDA, torch_cuda=None), "PyTorch 2.11.0+cu130 is a build without CUDA"),
        (replace(CUDA, bindings=False), "pip install cuda-bindings"),
        (
            replace(CUDA, driver=12080),
            "the driver is too old: it supports CUDA 12.8, but PyTorch 2.11.0+cu130 is built for CUDA 13.0",
        ),
        (replace(CUDA, devices=0), "the driver shows this process no GPU"),
        (replace(CUDA, error="CUDA_ERROR_NO_DEVICE", devices=0), "the driver shows this process no GPU"),
        (replace(CUDA, error="CUDA_ERROR_SYSTEM_NOT_READY"), "the driver does not start: CUDA_ERROR_SYSTEM_NOT_READY"),
    ],
)
def test_cuda_missing_part_is_named(found, says):
    assert says in cuda.missing(found)


def test_cuda_missing_gpu_message_names_visible_devices(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES is ''" in cuda.missing(replace(CUDA, devices=0))
    assert cuda.missing(CUDA, 2).startswith("there is no GPU 2: this process sees 2")
    assert not cuda.missing(CUDA, 1)


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (replace(HIP, torch_hip=None), "is a build without ROCm"),
        (replace(HIP, bindings=False), "pip install hip-python"),
        (replace(HIP, devices=0), "/dev/kfd"),
    ],
)
def test_hip_missing_part_is_named(found, says):
    assert says in hip.missing(found)
    assert not hip.missing(HIP) and hip.missing(HIP, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["cuda", "hip"])
def test_runtime_without_driver_raises_with_reason(name):
    with pytest.raises(MissingDriverError, match=f"the runtime '{name}' cannot run here: "):
        make_runtime(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_executor_without_driver_exits_with_reason():
    done = forks.run("wooly_executor", "--standalone", "--runtime", "cuda", timeout=60)
    assert done.returncode == 2
    assert "the runtime 'cuda' cannot run here: " in done.stderr and "Traceback" not in done.stderr


def test_cuda_target_is_nearest_chip_of_same_generation():
    found = {c: cuda_target(*c) for c in ((7, 5), (8, 0), (8, 7), (8, 9), (9, 0), (10, 3), (12, 1))}
    assert found == {
        (7, 5): "",
        (8, 0): "cuda:sm_80",
        (8, 7): "cuda:sm_86",
        (8, 9): "cuda:sm_89",
        (9, 0): "cuda:sm_90",
        (10, 3): "cuda:sm_100",
        (12, 1): "cuda:sm_120",
    }


# -- arguments ---------------------------------------------------------------------------------------------------------

_C = {"double": DType.F64, "long long": DType.I64, "unsigned char": DType.BOOL}
_CTYPES = {None: ctypes.c_uint64, DType.F64: ctypes.c_double, DType.I64: ctypes.c_int64, DType.BOOL: ctypes.c_uint8}


def declared(text):
    """Return the kinds of the parameters that a kernel's source declares."""
    (args,) = re.findall(r"__global__[^\n]*\n\w+\((.*)\) \{", text)
    return [None if "*" in a else _C[re.fullmatch(r"const (.+) \w+", a)[1]] for a in args.split(", ")]


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.cu")), ids=lambda p: p.stem)
def test_arguments_of_golden_kernels_have_c_layout(path):
    kinds = declared(path.read_text())
    fields = [(f"a{k}", _CTYPES[kind]) for k, kind in enumerate(kinds)]
    struct_of = type("Struct", (ctypes.Structure,), {"_fields_": fields})
    assert layout(kinds) == tuple((getattr(struct_of, n).offset, getattr(struct_of, n).size) for n, _ in fields)
    values = [k + 1 for k in range(len(kinds))]
    arguments = Arguments(kinds).fill(values)
    pointers = (ctypes.c_void_p * len(kinds)).from_address(arguments.address)
    assert [_CTYPES[k].from_address(p).value for k, p in zip(kinds, pointers, strict=True)] == values


def test_arguments_small_types_are_aligned_and_large_floats_become_infinite():
    kinds = [None, DType.BOOL, DType.F32, DType.I16, DType.F64, DType.BF16]
    assert layout(kinds) == ((0, 8), (8, 1), (12, 4), (16, 2), (24, 8), (32, 2))
    arguments = Arguments(kinds).fill([1 << 63, True, 1e300, -2, 0.5, 0x3F80])
    assert struct.unpack_from("@QBfhdH", arguments.data) == (1 << 63, 1, float("inf"), -2, 0.5, 0x3F80)


def test_arguments_of_kernel_without_parameters_are_empty():
    assert Arguments([]).fill([]).address == 0


def test_cuda_bindings_have_all_called_functions():
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed", exc_type=ImportError)
    called = {
        n
        for n in re.findall(r"cuda\.(cu[A-Z]\w+)|_cuda\.(cu[A-Z]\w+)", Path(cuda.__file__).read_text())
        for n in n
        if n
    }
    assert {"cuLaunchKernel", "cuModuleLoadData", "cuModuleGetFunction", "cuStreamSynchronize"} <= called
    assert not [n for n in called if not hasattr(driver, n)]
    assert set(cuda.STICKY) <= {int(e) for e in driver.CUresult}
    assert int(driver.CUstream(12345)) == 12345


def test_built_kernels_parameters_match_packed_layout():
    """The parameters that NVRTC reports for a kernel have the sizes of our layout."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed", exc_type=ImportError)
    sizes = {"u64": 8, "b64": 8, "f64": 8, "u8": 1, "b8": 1, "u32": 4, "f32": 4, "u16": 2}
    for path in sorted(GOLDEN.glob("*.cu")):
        text = path.read_text()
        try:
            status, program = nvrtc.nvrtcCreateProgram(text.encode(), b"k.cu", 0, [], [])
        except RuntimeError as e:
            pytest.skip(f"NVRTC does not load: {e}")
        assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS
        assert (
            nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=compute_80"])[0]
            == nvrtc.nvrtcResult.NVRTC_SUCCESS
        )
        ptx = b" " * nvrtc.nvrtcGetPTXSize(program)[1]
        nvrtc.nvrtcGetPTX(program, ptx)
        head = re.search(r"\.entry \w+\((.*?)\)", ptx.decode(), re.DOTALL)[1]
        found = [sizes[t] for t in re.findall(r"\.param \.(\w+)", head)]
        assert found == [size for _, size in layout(declared(text))]
