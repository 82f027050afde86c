"""The default runtime: generated kernels through OpenCL on the CPU (PoCL), and torch as the library on the same memory.

Nothing is copied: kernels are launched on the addresses of torch's tensors, without buffers of OpenCL. To make a buffer takes
20 us, and buffers that are kept lie between torch's blocks, which then cannot be joined when they are freed. Library steps and
tier 0 are those of `torch_cpu`.

PoCL offers the CPU as two devices: `basic` runs a kernel in the thread that launches it, at a cost of 2 us; `pthread` uses all
cores, at a cost of 40 us. OpenCL is initialised when the first kernel is loaded, or when `target` is called.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import math
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from wooly_bus import host
from wooly_wis.artifact import Artifact, Code
from wooly_wis.dtypes import DType
from wooly_wis.foreign import STATUS_WORDS, ForeignCode, Parameter
from wooly_wis.kernel.ir import Kernel
from wooly_wis.kernel.text import digest
from wooly_wis.pocl import HOW_TO_GET, POCL_UNITS, cpu_of, pocl_target, prepare
from wooly_wis.program import Form

from wooly_executor.billing.cores import apart, beyond
from wooly_executor.errors import FullDiskError, MissingDriverError, OperationError
from wooly_executor.plans.artifacts import ArtifactCache
from wooly_executor.runtime.builds import WorkerBuilder
from wooly_executor.runtime.device import InexactHost
from wooly_executor.runtime.foreign import KERNEL_BYTES, Foreign, Loaded, Value, violation_message
from wooly_executor.runtime.packing import half_bits
from wooly_executor.runtime.plans import Run, acts_of_plan, complaint, count_work, kernels_of
from wooly_executor.runtime.preparation import prepare_acts
from wooly_executor.runtime.prepared import PreparedProgram
from wooly_executor.runtime.torch_cpu import TorchCpuRuntime
from wooly_executor.runtime.torch_runtime import HOT
from wooly_executor.runtime.watch import Watch

#: Maximum number of loaded kernels, over all programs. At this number, the cache is cleared.
KERNELS_KEPT = 8192
#: Bytes that must be free on the disk of PoCL's files before code is loaded.
SPACE = 4 << 20
_NUMPY = {DType.F64: np.float64, DType.I64: np.int64, DType.BOOL: np.uint8}
#: The NumPy type in which a scalar argument of a foreign kernel is passed.
_SCALAR = {
    DType.BOOL: np.uint8,
    DType.F16: np.uint16,
    DType.BF16: np.uint16,
    **{d: getattr(np, f"{'u' * (d.kind == 'uint')}int{8 * d.itemsize}") for d in DType if d.kind in ("int", "uint")},
    DType.F32: np.float32,
    DType.F64: np.float64,
}
_HALVES = (DType.F16, DType.BF16)
#: Index of the unit that foreign kernels are compiled for: all cores.
_FOREIGN_UNIT = 1
#: Core time, in ns, up to which a launch of a foreign kernel runs in the device thread. A launch on all cores takes 40 us more,
#: or longer if other processes use the cores.
ALONE_NS = 80_000
#: Estimated core time, in ns, up to which a launch runs where launches were faster lately. After `TRIED_EVERY` launches, the next
#: `TRIAL` run at the other place, so that both times stay known. In the device thread, the measured core time is exact, too. The
#: first launch on all cores after launches in the device thread is not counted: it waits for threads that sleep.
TRIED_UP_TO_NS = 8 * ALONE_NS
TRIED_EVERY = 64
TRIAL = 3
#: One of so many launches in the device thread is measured. To read the clock of a thread twice takes as long as a small kernel.
MEASURED_EVERY = 8
#: The place in a binary of PoCL's where the device is named: after 8 bytes that are equal for all devices.
_NAMED = slice(8, 16)
#: The device time of a launch that other threads took, and its core time, in ns.
Taken = tuple[int, int]
#: Launches a foreign kernel with values for its arguments on a grid.
Launch = Callable[[Sequence[Value], tuple[int, int, int]], Taken]
#: The device for library steps of plans of mode `full`.
_INEXACT_HOST = InexactHost()


def missing() -> str:
    """Return what is missing for OpenCL kernels, without initialising OpenCL; empty if nothing is known to be missing."""
    if importlib.util.find_spec("pyopencl") is None:
        return f"the module pyopencl is not installed: {HOW_TO_GET}"
    return ""


def _scalar(parameter: Parameter) -> Any:
    """Return the NumPy type of a kernel's scalar parameter.

    Raises:
        KeyError: kernels cannot have such a parameter.
    """
    if parameter.dtype is None:
        raise KeyError("a scalar parameter has no dtype")
    return _SCALAR[parameter.dtype]


class OpenClRuntime(TorchCpuRuntime):
    """torch on the CPU, with generated kernels.

    Args:
        cache: folder in which PoCL keeps its files.
        hot: see `TorchCpuRuntime`.
        sure: fail at once if a driver is missing, and not when the first kernel is loaded.

    Raises:
        MissingDriverError: OpenCL cannot be used; the message says what is missing and how to get it.
    """

    def __init__(self, cache: Path | None = None, hot: int = HOT, *, sure: bool = False) -> None:
        super().__init__(hot)
        self.exact = True
        folder = (cache or Path(tempfile.gettempdir()) / f"wooly-executor-{os.getuid()}") / "foreign"
        kept = ArtifactCache(folder / "code", KERNEL_BYTES) if cache is not None else None
        self.foreign = Foreign(WorkerBuilder(folder), self.target, self._load_foreign, cache=kept)
        self.kernel_s = 10.0
        why = missing()
        if why:
            raise MissingDriverError(f"the runtime 'opencl' cannot run here: {why}")
        self._cache = cache
        self._opening = threading.Lock()
        self._units: tuple[_Unit, ...] = ()
        self._kernels: dict[tuple[bytes, int, bytes], Run] = {}
        if sure:
            self._open()

    def facts(self) -> dict[str, Any]:
        """See `Runtime.facts`."""
        return super().facts() | {"runtime": "opencl"}

    def target(self) -> str:
        """Return the target that code must be built for.

        Raises:
            MissingDriverError: OpenCL does not start.
        """
        units = self._open()
        return pocl_target(torch.get_num_threads(), units[0].platform, [u.name for u in units], units[0].cpu)

    def load(self, artifact: Artifact, program: Any, facts: Any) -> PreparedProgram:
        """Prepare a program as its plan's steps. Thread-safe.

        Raises:
            OperationError: the driver refuses the code.
            FullDiskError: the disk is full.
            TooMuchWorkError: a kernel exceeds the limits of the device.
            MissingDriverError: OpenCL does not start.
        """
        plan, units = artifact.plan, self._open()
        self._require_space()
        runs: dict[bytes, Run] = {}
        for kernel, code in zip(plan.kernels, artifact.codes, strict=True):
            name = digest(kernel)
            key = name, code.unit, code.code
            known = self._kernels.get(key)
            if known is None:
                known = units[code.unit].load(kernel, code)
                if len(self._kernels) >= KERNELS_KEPT:
                    self._kernels.clear()
                self._kernels[key] = known
            runs[name] = known
        device = _INEXACT_HOST if artifact.key.mode == "full" else self.device
        acts = acts_of_plan(plan, runs, _add_status)
        self.bounds.check_kernels(kernels_of(acts))
        prepared = prepare_acts(program, facts, acts, self.foreign, device, self.bounds.pieces(program))
        count_work(prepared, plan)
        prepared.runs = max(self._hot - 2, 0)  # a compiled program runs often, so its library steps are combined soon
        return prepared

    def _require_space(self) -> None:
        """Check that PoCL can unpack code. If a file is missing at a launch, PoCL ends the process.

        Raises:
            FullDiskError: the disk is full.
        """
        if self._cache is None:
            return
        self._cache.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._cache).free
        if free < SPACE:
            raise FullDiskError(
                f"the disk of {self._cache} has {free >> 10} KiB free, and {SPACE >> 10} KiB are needed to load kernels; make "
                "room on the executor's disk"
            )

    def _load_foreign(self, code: ForeignCode, block: tuple[int, ...]) -> Loaded:
        self._require_space()
        units = self._open()
        on_all = units[_FOREIGN_UNIT].load_foreign(code, block, lambda: self.kernel_s)
        here = units[0].adopt_foreign(code, block, lambda: self.kernel_s)
        return _ByWork(on_all, here or on_all, self._add_core_time).run

    def _add_core_time(self, ns: int) -> None:
        """Add core time beyond the device time, in ns, for a kernel that used more than one core. Called by the device thread."""
        self.extra_core_ns += ns

    def _open(self) -> tuple[_Unit, ...]:
        with self._opening:
            if not self._units:
                with apart("wooly-opencl"):
                    self._units = _open_units(self._cache, torch.get_num_threads(), self._add_core_time)
            return self._units


def _add_status(run: Run, where: int, forms: Sequence[Form], act: int) -> Run:
    """Return `run` with a status word for the kernel. If the kernel reports a violation, raise the library's exception for it."""
    word = np.zeros(1, np.int32)
    address = word.ctypes.data

    def asked(at: list[int], given: Sequence[Any]) -> int:
        word[0] = 0
        taken = run([*at[:where], address, *at[where:]], given)
        if word[0]:
            raise complaint(forms, int(word[0]))
        return taken

    return asked


class _Unit:
    """One of PoCL's devices, with an in-order queue. `spread` is called with the core time of a launch beyond its device time."""

    def __init__(self, cl: Any, device: Any, alone: bool, spread: Callable[[int], None]) -> None:
        self._cl = cl
        self._device = device
        self._alone, self._add_core_time = alone, spread
        self.threads: int = 1 if alone else device.max_compute_units
        self.name: str = device.name.strip()
        self.cpu = cpu_of(device.int_ptr)
        self.platform = f"{device.platform.name} {device.platform.version}"
        self._context = cl.Context([device])
        profiling = 0 if alone else cl.command_queue_properties.PROFILING_ENABLE
        self._queue = cl.CommandQueue(self._context, properties=profiling)
        self._word: Any = None

    def load(self, kernel: Kernel, code: Code) -> Run:
        """Return a function that launches a kernel.

        Raises:
            OperationError: the driver refuses the code.
        """
        cl = self._cl
        try:
            program = cl.Program(self._context, [self._device], [code.code]).build()
            entry = cl.Kernel(program, code.entry)
            if entry.num_args != len(kernel.arrays) + len(kernel.scalars):
                raise OperationError(
                    f"the code of kernel {kernel.name} has {entry.num_args} parameters, another number than the kernel"
                )
            set_all = self._setter(entry, [None] * len(kernel.arrays) + [_NUMPY[x.dtype] for x in kernel.scalars])
        except (cl.Error, ValueError) as e:
            raise OperationError(f"the driver refuses the code of kernel {kernel.name}: {str(e)[:500]}") from e
        total, local = (code.groups * code.threads,), (code.threads,)
        groups, threads, spread = code.groups, self.threads, self._add_core_time
        start = self._starter(entry, locked=True) if self._alone else None
        if start is not None:
            at_once, block = (ctypes.c_size_t * 1)(*total), (ctypes.c_size_t * 1)(*local)

            def run_here(at: list[int], scalars: Sequence[Any]) -> int:
                set_all((*at, *scalars))
                start(1, at_once, block)
                return 0

            return run_here
        queue = self._queue

        def run(at: list[int], scalars: Sequence[Any]) -> int:
            set_all((*at, *scalars))
            event = cl.enqueue_nd_range_kernel(queue, entry, total, local)
            queue.finish()
            taken: int = max(event.profile.end - event.profile.start, 0)
            spread(beyond(taken, groups, threads))
            return taken

        return run

    def load_foreign(self, code: ForeignCode, block: tuple[int, ...], limit_s: Callable[[], float]) -> Launch:
        """Return a function that launches a foreign kernel, by the ABI in docs/reference/foreign-kernels.md.

        Raises:
            OperationError: the driver refuses the code.
        """
        cl = self._cl
        parameters = code.parameters
        try:
            program = cl.Program(self._context, [self._device], [code.code]).build()
            entry = cl.Kernel(program, code.entry)
            types: list[Any] = [None]
            for p in parameters:
                types += [None, np.uint64] if p.buffer else [_scalar(p)]
            if entry.num_args != len(types):
                raise OperationError(f"its code has {entry.num_args} parameters, but {len(types)} were expected")
            set_all = self._setter(entry, types)
        except (cl.Error, ValueError, KeyError) as e:
            raise OperationError(f"the driver refuses its code: {str(e)[:500]}") from e
        halves = [p.dtype if p.dtype in _HALVES else None for p in parameters]
        word, watch = self._status(), _watch()
        status = word.ctypes.data
        launch = (self._launch_here if self._alone else self._launch_on_all)(entry, block)

        def run(values: Sequence[Value], grid: tuple[int, int, int]) -> Taken:
            arguments: list[Any] = [status]
            for value, half in zip(values, halves, strict=True):
                if isinstance(value, tuple):
                    address, nbytes = value
                    arguments += [address if nbytes else status, nbytes]
                else:
                    arguments.append(value if half is None else half_bits(value, half))
            set_all(arguments)
            word[:] = 0
            watch.begin(word, limit_s())
            try:
                taken = launch(grid)
            finally:
                watch.end()
            if word[0]:
                raise OperationError(f"stopped because it took more than {limit_s():g} s (WOOLY_EXECUTOR_KERNEL_S)")
            if word[1]:
                raise OperationError(violation_message(int(word[1]), int(word[2]), code.places))
            return taken

        return run

    def adopt_foreign(self, code: ForeignCode, block: tuple[int, ...], limit_s: Callable[[], float]) -> Launch | None:
        """See `load_foreign`, for code that was built for another of PoCL's devices. None if PoCL does not take it.

        PoCL's devices have the same code, but a binary names the device that it was built for.
        """
        mine, theirs = self._own_binary, code.code
        if mine[: _NAMED.start] != theirs[: _NAMED.start]:
            return None
        renamed = replace(code, code=mine[: _NAMED.stop] + theirs[_NAMED.stop :])
        try:
            return self.load_foreign(renamed, block, limit_s)
        except OperationError:  # a release of PoCL that writes other binaries
            return None

    @functools.cached_property
    def _own_binary(self) -> bytes:
        """A binary for this device."""
        cl = self._cl
        program = cl.Program(self._context, "kernel void one(global int *x) { *x = 1; }").build(cache_dir=False)
        return bytes(program.get_info(cl.program_info.BINARIES)[0])

    def _launch_on_all(self, entry: Any, block: tuple[int, ...]) -> Callable[[tuple[int, int, int]], Taken]:
        cl, queue, threads = self._cl, self._queue, self.threads

        def launch(grid: tuple[int, int, int]) -> Taken:
            total = tuple([n * b for n, b in zip(grid, block, strict=True)])
            event = cl.enqueue_nd_range_kernel(queue, entry, total, block)
            queue.finish()
            taken: int = max(event.profile.end - event.profile.start, 0)
            return taken, taken + beyond(taken, grid[0] * grid[1] * grid[2], threads)

        return launch

    def _launch_here(self, entry: Any, block: tuple[int, ...]) -> Callable[[tuple[int, int, int]], Taken]:
        """Launch in the calling thread, without the interpreter's lock, which pyopencl would keep.

        Otherwise no other thread could tell the kernel to end.
        """
        local = (ctypes.c_size_t * 3)(*block)
        total = (ctypes.c_size_t * 3)()
        x, y, z = block
        start = self._starter(entry, locked=False)
        measured = 0

        def launch(grid: tuple[int, int, int]) -> Taken:
            nonlocal measured
            total[0], total[1], total[2] = grid[0] * x, grid[1] * y, grid[2] * z
            measured -= 1
            begun = time.thread_time_ns() if measured < 0 else 0
            start(3, total, local)
            if not begun:
                return 0, 0
            measured = MEASURED_EVERY - 1
            return 0, time.thread_time_ns() - begun

        return launch

    def _starter(self, entry: Any, *, locked: bool) -> Callable[[int, Any, Any], None]:
        """Return a function that runs a kernel in the calling thread. Arguments: dimensions, size of the grid and of a block.

        Args:
            entry: the kernel.
            locked: whether the thread keeps the interpreter's lock. For short kernels: to get it back could take longer.
        """
        driver, queue = _driver(self._cl._cl.__file__, locked=locked), self._queue.int_ptr

        def start(dimensions: int, total: Any, local: Any) -> None:
            failed = driver.clEnqueueNDRangeKernel(queue, entry.int_ptr, dimensions, None, total, local, 0, None, None)
            failed = failed or driver.clFinish(queue)
            if failed:
                raise OperationError(f"PoCL does not launch it (OpenCL's error {failed})")

        return start

    def _setter(self, entry: Any, types: Sequence[Any]) -> Callable[[Sequence[Any]], None]:
        """Return a function that sets all arguments of a kernel.

        Only arguments that changed are set again: a launch has many of those of the last launch. To set one takes 1 us.

        Args:
            entry: the kernel.
            types: the NumPy type of each argument; None: an address.
        """
        driver = _driver(self._cl._cl.__file__, locked=True)
        #: The arguments that the kernel has. None is not equal to any.
        given: list[Any] = [None] * len(types)

        def pointer(at: int) -> Callable[[Any], int]:
            put = driver.clSetKernelArgSVMPointer
            return lambda address: int(put(entry.int_ptr, at, address))

        def number(at: int, numpy_type: Any) -> Callable[[Any], int]:
            cell = np.ctypeslib.as_ctypes_type(numpy_type)()
            put, size, place = driver.clSetKernelArg, ctypes.sizeof(cell), ctypes.byref(cell)

            def put_number(value: Any) -> int:
                cell.value = value
                return int(put(entry.int_ptr, at, size, place))

            return put_number

        put_each = [pointer(at) if t is None else number(at, t) for at, t in enumerate(types)]

        def set_all(values: Sequence[Any]) -> None:
            for at, value in enumerate(values):
                if value != given[at] or value == 0:  # 0.0 and -0.0 are equal
                    given[at] = None
                    if failed := put_each[at](value):
                        raise OperationError(f"PoCL does not take argument {at} (OpenCL's error {failed})")
                    given[at] = value

        return set_all

    def _status(self) -> Any:
        """Return the words through which a running kernel is told to end and reports violations.

        Only one launch runs at a time.
        """
        if self._word is None:
            self._word = np.zeros(STATUS_WORDS, np.int32)
        return self._word


class _ByWork:
    """Launches a foreign kernel on all cores, or in the device thread if the launch is expected to be shorter there.

    Args:
        on_all: launches on all cores.
        here: launches in the device thread.
        spread: called with the core time of a launch, in ns, beyond its device time.
        clock: returns monotonic ns.
    """

    def __init__(
        self,
        on_all: Launch,
        here: Launch,
        spread: Callable[[int], None],
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._on_all, self._here, self._spread, self._clock = on_all, here, spread, clock
        self._ns_per_block = math.inf
        self._until_trial = 0
        self._trial_here = False
        #: Times of launches on all cores, in ns, by the number of binary digits of their number of blocks.
        self._waited: dict[int, float] = {}

    def run(self, values: Sequence[Value], grid: tuple[int, int, int]) -> int:
        """See `ForeignKernel.run`.

        Blocks are assumed to take equally long. A block may take longer than those of earlier launches, so the estimate follows a
        longer launch slowly and a shorter one at once: a launch on all cores looks longer than it is while its threads wake up.
        """
        blocks = grid[0] * grid[1] * grid[2]
        expected, size = blocks * self._ns_per_block, blocks.bit_length()
        here = blocks == 1 or expected <= ALONE_NS
        counts = True
        if here:
            self._until_trial = TRIED_EVERY
        elif expected <= TRIED_UP_TO_NS:
            here = expected <= self._waited.get(size, 0)
            # not the first launch of a trial, and not the first one after it
            counts = self._until_trial not in (0, TRIED_EVERY)
            self._until_trial -= 1
            if self._until_trial == -1:
                self._trial_here = not here
            if self._until_trial < 0:
                here = self._trial_here
            if self._until_trial == -TRIAL:
                self._until_trial = TRIED_EVERY
        if here:
            taken, core_ns = self._here(values, grid)
        else:
            begun = self._clock()
            taken, core_ns = self._on_all(values, grid)
            waited = self._clock() - begun
            known_wait = self._waited.get(size, waited)
            if counts or size not in self._waited:
                self._waited[size] = known_wait + (waited - known_wait) / (2 if waited < known_wait else 4)
        self._spread(core_ns - taken if taken else 0)
        if not core_ns:  # not measured
            return taken
        found, known = core_ns / blocks, self._ns_per_block
        self._ns_per_block = found if found < known else known + (found - known) / 8
        return taken


@functools.cache
def _watch() -> Watch:
    """The watch over this process's launches. One launch runs at a time."""
    return Watch()


@functools.cache
def _driver(extension: str, *, locked: bool) -> Any:
    """The functions of OpenCL that pyopencl's extension module uses. `locked`: they keep the interpreter's lock."""
    found, pointer = (ctypes.PyDLL if locked else ctypes.CDLL)(extension), ctypes.c_void_p
    found.clEnqueueNDRangeKernel.argtypes = [
        pointer,
        pointer,
        ctypes.c_uint32,
        *[pointer] * 3,
        ctypes.c_uint32,
        pointer,
        pointer,
    ]
    found.clFinish.argtypes = [pointer]
    found.clSetKernelArg.argtypes = [pointer, ctypes.c_uint32, ctypes.c_size_t, pointer]
    found.clSetKernelArgSVMPointer.argtypes = [pointer, ctypes.c_uint32, pointer]
    return found


def _open_units(cache: Path | None, threads: int, spread: Callable[[int], None]) -> tuple[_Unit, ...]:
    """Return PoCL's devices, in the order of `POCL_UNITS`.

    Raises:
        MissingDriverError: PoCL is missing, or has other devices, or cannot run code from `cache`.
    """
    prepare(cache)
    os.environ["POCL_MAX_PTHREAD_COUNT"] = str(threads)
    if cache is not None and (why := host.why_no_code(cache)):
        raise MissingDriverError(
            f"{why}; set WOOLY_EXECUTOR_STATE_DIR (for a stack of `wooly up`: WOOLYAI_STATE_DIR) to a folder on another one"
        )
    try:
        import pyopencl as cl

        platforms = cl.get_platforms()
    except Exception as e:  # drivers may raise any exception
        why = f"OpenCL does not start: {type(e).__name__}: {e}; PoCL is missing: {HOW_TO_GET}"
        raise MissingDriverError(why) from e
    named = {d.name.split("-")[0]: d for p in platforms if "Portable" in p.name for d in p.get_devices()}
    if not named.keys() >= set(POCL_UNITS):
        have = ", ".join(f"{p.name} ({', '.join(d.name for d in p.get_devices())})" for p in platforms) or "nothing"
        raise MissingDriverError(
            f"PoCL with its devices {' and '.join(POCL_UNITS)} is needed, but OpenCL has {have}: {HOW_TO_GET}"
        )
    return tuple([_Unit(cl, named[name], alone=name == POCL_UNITS[0], spread=spread) for name in POCL_UNITS])
