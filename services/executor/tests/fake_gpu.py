"""A GPU for tests: its memory is host memory, and the kernel interpreter runs its kernels.

The code of a kernel is its text. As on a real GPU, captured work runs only when the graph is replayed, and a graph contains
addresses. Tests set failures.
"""

import contextlib
import ctypes
import functools
import itertools
import struct

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from wooly_executor.errors import ContextLostError, OperationError
from wooly_executor.runtime.buffers import TORCH_DTYPE
from wooly_executor.runtime.fresh_memory import on_zeros
from wooly_executor.runtime.gpu import GpuRuntime
from wooly_executor.runtime.packing import _CHARACTER, layout
from wooly_testkit import kernel_interpreter
from wooly_wis.kernel import text as kernel_text

LAUNCH_NS, MARK_NS = 1000, 10


class Recording(TorchDispatchMode):
    """Records operators without running them. Written tensors stay unchanged, and new tensors have a shape but no values."""

    def __init__(self, work):
        super().__init__()
        self.work = work

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        schema = func._schema
        if func.is_view or schema.name in ("aten::as_strided", "aten::set_"):
            return func(*args, **kwargs)
        if schema.name == "aten::_local_scalar_dense":
            raise RuntimeError("operation not permitted when stream is capturing")
        mutated = [a for a, s in zip(args, schema.arguments, strict=False) if s.alias_info and s.alias_info.is_write]
        mutated += [kwargs[s.name] for s in schema.arguments if s.kwarg_only and s.alias_info and s.name in kwargs]
        if mutated:
            self.work.append(lambda: func(*args, **kwargs))
            return mutated[0] if schema.returns else None
        made = func(*args, **kwargs)
        kept = [t for t in (made if isinstance(made, (tuple, list)) else [made]) if isinstance(t, torch.Tensor)]
        for t in kept:
            if t.is_floating_point():
                t.fill_(float("nan"))

        def again():
            fresh = func(*args, **kwargs)
            fresh = [t for t in (fresh if isinstance(fresh, (tuple, list)) else [fresh]) if isinstance(t, torch.Tensor)]
            for t, new in zip(kept, fresh, strict=True):
                t.copy_(new)

        self.work.append(again)
        return made


class Replay:
    def __init__(self, driver, work):
        self.driver, self.work = driver, work

    def replay(self):
        self.driver.replays += 1
        for do in self.work:
            do()


class Function:
    """A function of an image: `do(values, grid, block)` with the values of its parameters, which have these kinds."""

    def __init__(self, kinds, do):
        self.kinds, self.do = kinds, do


class FakeDriver:
    """A `Driver`. `lost`: why the context is lost; `refuse`: load no code; `fail_next`: exception that the next launch raises.

    `functions` has the functions of foreign kernels by their image. `hung`: number of waits that time out; `ended`: whether the
    running kernel was told to end.
    """

    vendor = "fake"
    device = torch.device("cpu")

    def __init__(self):
        self.now = 0
        self.lost = ""
        self.refuse = False
        self.fail_next = None
        self.asides = self.attached = self.replays = self.captures = 0
        self.launches = []
        self.functions = {}
        self.hung, self.ended = 0, False
        self._capturing = None
        #: Sizes of page-locked host memory by address; sizes of all memory that was ever locked; whether locking fails.
        self.locked, self.locks, self.refuse_locks = {}, [], False

    def facts(self):
        return {
            "name": "fake GPU",
            "vendor": self.vendor,
            "arch": "fk_1",
            "runtime": "fake",
            "total_memory": 1 << 30,
            "cores": 4,
        }

    def capacity(self):
        return 1 << 30

    def target(self):
        return "fake:fk_1"

    def chip(self):
        return "cuda:sm_90"

    def attach(self):
        self.attached += 1

    @contextlib.contextmanager
    def copy_context(self):
        self.asides += 1
        yield

    def seed(self, seed):
        torch.default_generator.manual_seed(seed)

    def on_zeros(self, call):
        return on_zeros(call)

    def pinned(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8)

    def lock(self, address, nbytes):
        if self.refuse_locks:
            raise OperationError("CUDA_ERROR_OUT_OF_MEMORY")
        assert address not in self.locked
        self.locked[address] = nbytes
        self.locks.append(nbytes)

    def unlock(self, address):
        del self.locked[address]

    def load(self, image, entry, kinds, shared=0):
        if self.refuse:
            raise OperationError("CUDA_ERROR_INVALID_IMAGE")
        if shared > 200 << 10:
            raise OperationError(f"it needs {shared} bytes of shared memory, fk_1 has {200 << 10}")
        if image in self.functions:
            function = self.functions[image]
            if layout(kinds) != layout(function.kinds):
                raise OperationError(f"{entry} takes other parameters")
            return function
        kernel = kernel_text.read(image.decode())
        declared = [None] * len(kernel.arrays) + [s.dtype for s in kernel.scalars]
        if layout(kinds) != layout(declared) or entry != kernel.name:
            raise OperationError(f"{entry} takes other parameters")
        return kernel

    def launch(self, function, grid, block, arguments, shared=0):
        self.check()
        if isinstance(function, Function):
            pointers = (ctypes.c_void_p * len(function.kinds)).from_address(arguments.address)
            codes = struct.unpack_from("@" + "".join(_CHARACTER[k] for k in function.kinds), arguments.data)
            assert [p - ctypes.addressof(arguments.data) for p in pointers] == [o for o, _ in layout(function.kinds)]
            self.launches.append((grid, block, shared))
            self.now += LAUNCH_NS
            function.do(codes, grid, block)
            return
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        kinds = [None] * len(function.arrays) + [s.dtype for s in function.scalars]
        pointers = (ctypes.c_void_p * len(kinds)).from_address(arguments.address)
        types = {"f64": ctypes.c_double, "i64": ctypes.c_int64, "bool": ctypes.c_uint8}
        values = [
            (ctypes.c_uint64 if k is None else types[k.label]).from_address(p).value
            for k, p in zip(kinds, pointers, strict=True)
        ]  # arguments are read at the launch, as a real driver does
        self.launches.append((function.name, grid, block))
        if self._capturing is not None:
            self._capturing.append(lambda: self._do(function, values))
        else:
            self._do(function, values)

    def _do(self, kernel, values):
        self.now += LAUNCH_NS
        n = len(kernel.arrays)
        seen = {a.name: _at(address, a) for a, address in zip(kernel.arrays, values[:n], strict=True)}
        lists = {name: t.tolist() for name, t in seen.items()}
        scalars = {s.name: v for s, v in zip(kernel.scalars, values[n:], strict=True)}
        kernel_interpreter.run(kernel, lists, scalars)
        for a in kernel.arrays:
            seen[a.name].copy_(torch.tensor(lists[a.name], dtype=seen[a.name].dtype))

    def reserved(self):
        return 0

    def record(self):
        self.check()
        self.now += MARK_NS
        return self.now

    def elapsed_ns(self, marks):
        self.check()
        return [b - a for a, b in itertools.pairwise(marks)]

    def wait(self, mark, seconds):
        self.check()
        self.hung -= self.hung > 0
        return not self.hung

    def sleep(self, ns):
        self.check()
        self.now += ns

    def urgent(self, target, source):
        self.ended = True
        target.copy_(source)

    def capture(self, body):
        self.captures += 1
        self._capturing = work = []
        try:
            with Recording(work):
                body()
        finally:
            self._capturing = None
        return Replay(self, work)

    def check(self):
        if self.lost:
            raise ContextLostError(f"the context of fake GPU is lost: {self.lost}")


def gpu_runtime(driver, **how):
    """Return the GPU runtime on such a driver.

    All of them use the rates of one measurement, because all calls take the same time here.
    """
    made = GpuRuntime(driver, **how)
    made._rates = _rates()
    return made


@functools.cache
def _rates():
    return GpuRuntime(FakeDriver()).rates()


def _at(address, array):
    dtype = TORCH_DTYPE[array.dtype]
    memory = (ctypes.c_uint8 * (array.numel * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)
