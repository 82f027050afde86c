"""A GPU for tests: its memory is host memory, and the kernel interpreter runs its kernels.

The code of a kernel is its text. As on a real GPU, captured work runs only when the graph is replayed, and a graph contains
addresses. Tests set failures.
"""

import contextlib
import ctypes
import functools
import itertools
import struct
import threading
import weakref
from typing import ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from wooly_executor.errors import ContextLostError, OperationError
from wooly_executor.runtime.buffers import TORCH_DTYPE
from wooly_executor.runtime.captures import Captures
from wooly_executor.runtime.core_use import KernelRecord
from wooly_executor.runtime.fresh_memory import on_zeros
from wooly_executor.runtime.gpu import GpuRuntime
from wooly_executor.runtime.packing import _CHARACTER, layout
from wooly_executor.runtime.torch_gpu import TorchGpu
from wooly_testkit import kernel_interpreter
from wooly_wis.kernel import text as kernel_text
from wooly_wis.program import Role

from services.executor.tests.device_order import HOST, Order

LAUNCH_NS, MARK_NS = 1000, 10


#: Operators for which CUDA's library waits for the device.
WAITING = {
    *("_local_scalar_dense", "nonzero", "masked_select", "equal", "bincount", "histc", "repeat_interleave", "mode"),
    *("_unique2", "unique_dim", "unique_consecutive", "_linalg_eigh", "_linalg_svd", "linalg_eig"),
}
#: What CUDA says to the first forbidden call of a capture, to the calls after it, and about the capture in the end.
FORBIDDEN = "CUDA error: operation not permitted when stream is capturing"
FAILED = "CUDA error: operation failed due to a previous error during capture"


#: What torch says if a tensor of the host is copied during a capture. The capture stays valid.
HOST_COPY = "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned."


class AbortedError(BaseException):
    """Torch would have ended the process here."""


class Recording(TorchDispatchMode):
    """Records operators without running them. Written tensors stay unchanged, and new tensors have a shape but no values."""

    def __init__(self, graph):
        super().__init__()
        self.graph, self.work = graph, graph.work

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        schema = func._schema
        if func.is_view or schema.name in ("aten::as_strided", "aten::set_"):
            seen = func(*args, **kwargs)
            if not isinstance(seen, torch.Tensor) or _storage_address(seen) in map(_storage_address, _tensors(args)):
                return seen  # otherwise it is a copy, such as that of `to` or `reshape`
        if not self.graph.valid:
            raise RuntimeError(FAILED)
        if waits_for_device(func) or _has_mask(args):
            self.graph.driver.forbidden()
        if _makes_host_tensor(schema, kwargs):
            raise RuntimeError(HOST_COPY)
        mutated = [a for a, s in zip(args, schema.arguments, strict=False) if s.alias_info and s.alias_info.is_write]
        mutated += [kwargs[s.name] for s in schema.arguments if s.kwarg_only and s.alias_info and s.name in kwargs]
        by_address = tree_map_only(torch.Tensor, _without_owner, (args, kwargs))
        if mutated:
            self.work.append(lambda: func(*by_address[0], **by_address[1]))
            return mutated[0] if schema.returns else None
        made = func(*args, **kwargs)
        targets = []

        def in_graph(t):
            if t.is_floating_point():
                t.fill_(float("nan"))
            self.graph.memory.append(t)
            targets.append(_without_owner(t))
            return _without_owner(t, t)

        def again():
            fresh = func(*by_address[0], **by_address[1])
            fresh = [t for t in (fresh if isinstance(fresh, (tuple, list)) else [fresh]) if isinstance(t, torch.Tensor)]
            for t, new in zip(targets, fresh, strict=True):
                t.copy_(new)

        self.work.append(again)
        return tree_map_only(torch.Tensor, in_graph, made)


def waits_for_device(op):
    """Whether CUDA's library reads a result of the operator on the host."""
    name = op._schema.name.removeprefix("aten::").removesuffix("_out")
    return name in WAITING or any(
        tag in op.tags for tag in (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
    )


def _tensors(args):
    return [a for a in args if isinstance(a, torch.Tensor)]


def _storage_address(t):
    return t.untyped_storage().data_ptr()


def _without_owner(t, owner=None):
    """Return a tensor on the memory of `t` with another storage, which keeps only `owner` alive. Graphs contain addresses."""
    if not t.untyped_storage().nbytes():
        return t
    memory = (ctypes.c_uint8 * t.untyped_storage().nbytes()).from_address(t.untyped_storage().data_ptr())
    memory.owner = owner
    other = torch.empty(0, dtype=t.dtype).set_(
        torch.frombuffer(memory, dtype=torch.uint8).untyped_storage(), t.storage_offset(), t.shape, t.stride()
    )
    other = other.conj() if t.is_conj() else other
    return torch._neg_view(other) if t.is_neg() else other


def _makes_host_tensor(schema, kwargs):
    """Whether an operator makes a tensor from numbers only, on no device that it names."""
    if any("Tensor" in str(a.type) for a in schema.arguments):
        return False
    return any(a.name == "device" for a in schema.arguments) and kwargs.get("device") is None


def _has_mask(args):
    """Whether an argument is a list of indices with a mask."""
    lists = [a for a in args if isinstance(a, (list, tuple))]
    return any(isinstance(t, torch.Tensor) and t.dtype in (torch.bool, torch.uint8) for a in lists for t in a)


class FakeGenerator:
    """A generator of random numbers with a seed and an offset, which every draw adds to."""

    def __init__(self, driver):
        self.driver, self.seed, self.offset, self.graph = driver, 0, 0, None

    def manual_seed(self, seed):
        if self.driver.capturing is not None:
            raise RuntimeError("Cannot call CUDAGeneratorImpl::set_current_seed during CUDA graph capture.")
        self.seed, self.offset = seed, 0
        if self.graph is None:
            assert self.driver.generator_works, "Offset increment outside graph capture encountered unexpectedly."
            self.draw()

    def draw(self):
        """Let the next operator draw from this generator."""
        differs = self.graph is not None and self.driver.draws_differ
        torch.default_generator.manual_seed((self.seed + self.offset + differs) % (1 << 63))
        self.offset += 4


class FakeGraph:
    """A graph, as torch captures it: after an invalidated capture, torch counts it as one in progress.

    Torch may end the process if such a graph is destroyed while it is recorded, during another capture, or in another thread
    than the one that captures.
    """

    def __init__(self, driver):
        self.driver, self.work, self.valid, self.ended = driver, [], True, False
        self.memory, self.number, self.pool, self.thread = [], next(driver.numbers), None, threading.get_ident()

    def __del__(self):
        driver = self.driver
        if self.pool in driver.recording and driver.recording[self.pool] is self:
            driver.aborts.append("a graph was destroyed whose capture torch still records")
        elif not self.valid or self.pool is None or not self.ended:
            driver.aborts.append("a graph was destroyed whose capture did not end")
        elif driver.capturing is not None:
            driver.aborts.append("a graph was destroyed during a capture")
        elif threading.get_ident() != self.thread:
            driver.aborts.append("a graph was destroyed in another thread")

    def capture_end(self):
        self.driver.capturing = None
        if not self.valid:
            raise RuntimeError(FAILED)
        del self.driver.recording[self.pool]
        self.driver.generator_works = True
        self.ended = True

    def replay(self):
        assert self.ended and self.driver.capturing is None
        self.driver.replays += 1
        for later in self.driver.graphs_of[
            self.pool
        ]:  # captures into a pool get memory that earlier graphs use for their own values
            for t in later.memory if later.number > self.number else ():
                t.fill_(float("nan") if t.is_floating_point() else 77)
        with self.driver.order.by_address():
            for do in self.work:
                do()


class FakeGraphs:
    """See `captures.GraphLibrary`. A pool without graphs is refused, as by torch. `fail_begin`: error of the next capture."""

    def __init__(self, driver):
        self.driver, self.pools, self.fail_begin = driver, 0, None

    def new_pool(self):
        self.pools += 1
        self.driver.graphs_of[0, self.pools] = weakref.WeakSet()
        return 0, self.pools

    def new_graph(self):
        return FakeGraph(self.driver)

    def new_draw(self, graph):
        assert self.driver.capturing is None, "Cannot register the state during capturing stage."
        generator = FakeGenerator(self.driver)
        generator.graph = weakref.ref(graph)
        return generator

    def draw_by(self, generator):
        driver = self.driver
        before, driver.draws_by = driver.draws_by, generator
        if generator.graph is not None:
            assert generator.graph() is driver.capturing, "a CUDA generator not in capture mode"
            driver.capturing.work.append(generator.draw)
        return before

    def begin(self, graph, pool):
        driver = self.driver
        if pool in driver.recording:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        members = driver.graphs_of[pool]
        assert members or pool not in driver.used_pools, "INTERNAL ASSERT FAILED: use_count > 0"
        driver.used_pools.add(pool)
        if self.fail_begin is not None:
            error, self.fail_begin = self.fail_begin, None
            raise error
        members.add(graph)
        graph.pool, driver.recording[pool], driver.capturing, driver.generator_works = pool, graph, graph, False

    def end_recording(self, pool):
        if pool not in self.driver.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.driver.graphs_of[pool].discard(self.driver.recording.pop(pool))

    def renew_generator(self):
        self.driver.generator_works = True

    def pool_bytes(self, pool):
        if not self.driver.graphs_of[pool]:
            raise AbortedError("the size of a pool without graphs was asked")
        return self.driver.bytes_per_graph * len(self.driver.graphs_of[pool])


class Function:
    """A function of an image: `do(values, grid, block)` with the values of its parameters, which have these kinds."""

    def __init__(self, kinds, do):
        self.kinds, self.do = kinds, do


class FakeStream:
    """A stream. Work on it is done at once; what counts is the order that it has with work on other streams."""

    def __init__(self, driver, name):
        self.driver, self.order, self.name = driver, driver.order, name

    def wait_stream(self, other):
        self.order.after(self.name, self.order.point(other.name))

    def synchronize(self):
        self.driver.waits()
        self.order.after(HOST, self.order.point(self.name))


class FakeEvent:
    """An event, with the time at which it was recorded."""

    def __init__(self, driver):
        self.driver, self.at, self.clock = driver, 0, {}

    def record(self, stream):
        self.driver.check()
        self.driver.now += MARK_NS
        self.at, self.clock = self.driver.now, self.driver.order.point(stream.name)

    def synchronize(self):
        self.driver.check()
        self.driver.waits()
        self.driver.order.after(HOST, self.clock)

    def elapsed_time(self, later):
        return (later.at - self.at) / 1e6


class FakeCuda:
    """What `TorchGpu` uses of `torch.cuda`.

    A thread that has set no stream uses the default stream, as on a GPU. Tests run programs in the main thread, which uses the
    stream of programs.
    """

    def __init__(self, driver):
        self.driver, self.default_generators = driver, [driver.draws_by]
        self._names, self._default = itertools.count(), FakeStream(driver, "the default stream")
        self._local = threading.local()

    def init(self):
        pass

    def set_device(self, index):
        pass

    def mem_get_info(self, index):
        return 1 << 30, 1 << 30

    def Stream(self, device, priority=0):
        names = ("the stream of programs", "the stream of copies", "the urgent stream")
        return FakeStream(self.driver, names[next(self._names)])

    def Event(self, enable_timing):
        return FakeEvent(self.driver)

    def current_stream(self, device=None):
        main = threading.current_thread() is threading.main_thread()
        return getattr(self._local, "stream", self.driver.stream if main else self._default)

    def set_stream(self, stream):
        self._local.stream = stream

    @contextlib.contextmanager
    def stream(self, stream):
        before = self.current_stream()
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)

    def synchronize(self, index):
        self.driver.stream.synchronize()

    def empty_cache(self):
        self.driver.released += 1


class FakeDriver(TorchGpu):
    """A `Driver`. `lost`: why the context is lost; `refuse`: load no code; `fail_next`: exception that the next launch raises.

    `functions` has the functions of foreign kernels by their image. `hung`: number of waits that time out; `ended`: whether the
    running kernel was told to end. `order` knows which accesses to memory have an order; `drivers` has all drivers that exist.
    """

    vendor = "fake"
    lost = ""
    drivers: ClassVar = weakref.WeakSet()

    def __init__(self):
        self.order = Order(lambda: self.torch_cuda.current_stream().name, waits_for_device)
        #: The generator whose state the default generator uses, and whether random numbers are others in graphs.
        self.draws_by, self.draws_differ = FakeGenerator(self), False
        self.torch_cuda = FakeCuda(self)
        super().__init__(0)
        self.device = torch.device("cpu")
        self.now = 0
        self.refuse = False
        self.fail_next = None
        self.asides = self.attached = self.replays = self.captures = 0
        self.launches = []
        self.functions = {}
        self.numbers, self.released = itertools.count(), 0
        self.hung, self.ended = 0, False
        #: The graph that is captured, and what the library keeps about captures.
        self.capturing, self.recording, self.graphs_of, self.used_pools = None, {}, {}, set()
        self.generator_works, self.bytes_per_graph = True, 1024
        self.library = FakeGraphs(self)
        self._captures = Captures(self.library)
        #: Why torch would have ended the process.
        self.aborts = []
        self.keeps_room = True
        #: Blocks that a core takes at once; the kernels of the library in each profiled part of a run; the kernels of a profile
        #: in progress; number of profiles; whether the profiler fails.
        self.occupancy, self.library_kernels, self.profile, self.profiles, self.fail_profile = 2, [], None, 0, False
        #: Sizes of page-locked host memory by address; sizes of all memory that was ever locked; whether locking fails.
        self.locked, self.locks, self.refuse_locks = {}, [], False
        FakeDriver.drivers.add(self)

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
        super().attach()
        self.order.watch_thread()

    @contextlib.contextmanager
    def copy_context(self):
        with self.order.watched(), super().copy_context():
            self.asides += 1
            yield

    def on_zeros(self, call):
        def run(f):
            assert self.capturing is None, "the pool of zeroed memory is looked at during a capture"
            return on_zeros(call)(f)

        return run

    def pinned(self, nbytes):
        memory = torch.frombuffer(bytearray(max(nbytes, 1)), dtype=torch.uint8)[:nbytes]
        self.order.host_memory(memory.untyped_storage().data_ptr(), max(nbytes, 1), memory)
        return memory

    def lock(self, address, nbytes):
        if self.refuse_locks:
            raise OperationError("CUDA_ERROR_OUT_OF_MEMORY")
        assert address not in self.locked
        self.locked[address] = nbytes
        self.locks.append(nbytes)
        self.order.host_memory(address, nbytes)

    def unlock(self, address):
        del self.locked[address]
        self.order.host_memory_ends(address)

    def blocks_per_core(self, function, threads):
        if self.occupancy is None:
            raise OperationError("CUDA_ERROR_INVALID_VALUE")
        return self.occupancy

    def begin_profile(self):
        if self.fail_profile:
            raise OperationError("the profiler does not start: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")
        assert self.profile is None
        self.profile = list(self.library_kernels)

    def end_profile(self):
        found, self.profile = self.profile, None
        self.profiles += 1
        return found

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
            given = [code for code, kind in zip(codes, function.kinds, strict=True) if kind is None and code]
            self.order.kernel("of a script", self.stream.name, [(address, None, True, True) for address in given])
            with self.order.ignored():
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
        if self.capturing is not None:
            self.capturing.work.append(lambda: self._do(function, values, grid))
        else:
            self._do(function, values, grid)

    def _do(self, kernel, values, grid):
        self.now += LAUNCH_NS
        if self.profile is not None:
            self.profile.append(KernelRecord(kernel.name, LAUNCH_NS, grid[0]))
        n = len(kernel.arrays)
        given = [
            (address, a.numel * a.dtype.itemsize, a.role is not Role.OUT, a.role is not Role.IN)
            for a, address in zip(kernel.arrays, values[:n], strict=True)
        ]
        self.order.kernel(kernel.name, self.stream.name, given)
        with self.order.ignored():
            seen = {a.name: _at(address, a) for a, address in zip(kernel.arrays, values[:n], strict=True)}
            lists = {name: t.tolist() for name, t in seen.items()}
            scalars = {s.name: v for s, v in zip(kernel.scalars, values[n:], strict=True)}
            kernel_interpreter.run(kernel, lists, scalars)
            for a in kernel.arrays:
                seen[a.name].copy_(torch.tensor(lists[a.name], dtype=seen[a.name].dtype))

    def wait(self, mark, seconds):
        self.check()
        self.hung -= self.hung > 0
        if not self.hung:
            mark.synchronize()
        return not self.hung

    def sleep(self, ns):
        self.check()
        self.now += ns

    def urgent(self, target, source):
        self.ended = True
        with self.order.ignored():  # the running kernel reads the words while they are written
            super().urgent(target, source)

    def graph_room(self):
        return 256 << 20

    def capture(self, body, *, apart=False, draws=0):
        self.captures += 1
        self.survives()

        def recorded():
            with self.order.ignored(), Recording(self.capturing):
                body()

        return super().capture(recorded, apart=apart, draws=draws)

    def forbidden(self):
        """The capture in progress becomes invalid, as CUDA's does after a call that it forbids."""
        self.capturing.valid = False
        raise RuntimeError(FORBIDDEN)

    def waits(self):
        """The host waits for the device, which the thread that captures must not."""
        if self.capturing is not None and self.capturing.thread == threading.get_ident():
            self.forbidden()

    def keep_no_room_for_graphs(self):
        self.keeps_room = False

    def survives(self):
        """Raise an error if torch would have ended the process by now."""
        if self.aborts:
            raise AbortedError(self.aborts[0])

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
