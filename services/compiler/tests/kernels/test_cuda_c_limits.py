# ruff: noqa: E501 (sources in one line)
"""Endless kernels in CUDA C on the executor's runtime: each is stopped, and the device continues."""

import functools

import numpy as np
import pytest

pytest.importorskip("pyopencl", reason="kernels run through OpenCL: pip install 'pyopencl[pocl]'")
from wooly_bus.worker import Limits, WorkerProcess
from wooly_executor.errors import OperationError
from wooly_executor.runtime.opencl import OpenClRuntime
from wooly_wis.foreign import decode_code


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    folder = tmp_path_factory.mktemp("limits")
    runtime = OpenClRuntime(folder / "executor", sure=True)
    worker = WorkerProcess(Limits(seconds=100), "wooly_compiler.worker", (str(folder / "compiler"),))

    @functools.cache
    def compiled(text, block):
        request = {
            "what": "foreign", "language": "cuda-c", "text": text, "entry": "f", "args": ["*u8"], "block": block, "options": [],
            "target": runtime.target(), "name": "a test's",
        }  # fmt: skip
        code = decode_code(worker.ask(request, runtime.target(), "a test's kernel"), "a test's")
        return runtime._load_foreign(code, block)

    def run(text, memory, grid=(1, 1, 1), block=(1, 1, 1), limit_s=0.05):
        kernel = compiled(text, block)
        runtime.kernel_s = limit_s
        return kernel([(memory.ctypes.data, memory.nbytes)], grid)

    yield run
    worker.close()


ENDLESS = {
    "for": "for (;;) a[0]++;",
    "while": "while (true) ;",
    "do": "do { a[0] = 1; } while (a[0]);",
    "counted": "for (int i = 0; i < 1000; i++) for (int j = 0; j < 1000; j++) for (int k = 0; k < 1000; k++) for (int l = 0; l < 1000; l++) a[0] ^= l;",
    "function": "spin(a);",
    "barrier": "while (true) __syncthreads();",
    "barrier in a function": "for (;;) { meet(a); }",
    "counter that is set back": "for (int i = 0; i < 4; i++) i = 0;",
    "counter that is set back elsewhere": "for (int i = 0; i < 4; i++) clear(i);",
    "counter that is set back through a pointer": "for (int i = 0; i < 4; i++) { int* p = &i; *p = 0; }",
    "continue": "for (int i = 0; i < 4;) { if (a[0] < 5) continue; i++; }",
    "lock": "while (atomicCAS(&a[1], 0, 1) != 2) ;",
}
#: The others are slow.
QUICK = ("barrier in a function", "lock")
HEAD = """__device__ void spin(int* a) { while (a[0] >= 0) ; }
__device__ void meet(int* a) { __syncthreads(); a[0] = 0; }
__device__ void clear(int& i) { i = 0; }
__global__ void f(int* a) { """


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=() if what in QUICK else pytest.mark.slow) for what in ENDLESS]
)
def test_endless_kernel_is_stopped(what, launch):
    memory = np.zeros(64, np.int32)
    with pytest.raises(OperationError, match=r"took more than 0.05 s \(WOOLY_EXECUTOR_KERNEL_S\)"):
        launch(HEAD + ENDLESS[what] + " }", memory, block=(8, 1, 1))
    memory[:] = 0
    launch("__global__ void f(int* a) { a[threadIdx.x] = threadIdx.x; }", memory, block=(64, 1, 1), limit_s=30)
    assert memory.tolist() == list(range(64))


def test_kernel_with_too_many_blocks_is_stopped(launch):
    memory = np.zeros(64, np.int32)
    text = "__global__ void f(int* a) { for (int i = 0; i < 512; i++) a[i % 64] ^= i; }"
    with pytest.raises(OperationError, match="took more than"):
        launch(text, memory, grid=(1 << 22, 1, 1), block=(256, 1, 1))
