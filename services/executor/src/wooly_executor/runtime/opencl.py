"""The default runtime: generated kernels through OpenCL on the CPU (PoCL), and torch as the library on the same memory.

Nothing is copied: a plan's kernels are launched on the addresses of torch's tensors. Library steps and tier 0 are those of
`torch_cpu`. PoCL offers the CPU as two devices: `basic` runs a kernel in the thread that launches it, at a cost of 2 us;
`pthread` uses all cores, at a cost of 40 us. OpenCL is initialised when the first kernel is loaded, or when `target` is called.
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
from wooly_wis.artifact import POCL_UNITS, Artifact, Code, pocl_target
from wooly_wis.dtypes import DType
from wooly_wis.foreign import STATUS_WORDS, ForeignCode, Parameter
from wooly_wis.kernel.ir import Kernel
from wooly_wis.kernel.text import digest
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

#: Maximum number of memory addresses whose OpenCL buffer is kept. At this number, the cache is cleared.
WRAPPED = 4096
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
#: Estimated core time, in ns, up to which a launch runs where launches were faster lately. One of `TRIED_EVERY` runs at the other
#: place, so that both times stay known. In the device thread, the measured core time is also exact.
TRIED_UP_TO_NS = 8 * ALONE_NS
TRIED_EVERY = 64
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
        return "the module pyopencl is not installed: pip install 'pyopencl[pocl]'"
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
        return pocl_target(torch.get_num_threads(), units[0].platform, [u.name for u in units])

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
        self.platform = f"{device.platform.name} {device.platform.version}"
        self._context = cl.Context([device])
        profiling = 0 if alone else cl.command_queue_properties.PROFILING_ENABLE
        self._queue = cl.CommandQueue(self._context, properties=profiling)
        self._buffers: dict[int, tuple[int, Any]] = {}
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
            entry.set_scalar_arg_dtypes([None] * len(kernel.arrays) + [_NUMPY[s.dtype] for s in kernel.scalars])
        except (cl.Error, ValueError) as e:
            raise OperationError(f"the driver refuses the code of kernel {kernel.name}: {str(e)[:500]}") from e
        sizes = [a.numel * a.dtype.itemsize for a in kernel.arrays]
        total, local = (code.groups * code.threads,), (code.threads,)
        queue, buffers, wrap, alone = self._queue, self._buffers, self._wrap, self._alone
        groups, threads, spread = code.groups, self.threads, self._add_core_time

        def run(at: list[int], scalars: Sequence[Any]) -> int:
            arrays = []
            for address, nbytes in zip(at, sizes, strict=True):
                known = buffers.get(address)
                arrays.append(known[1] if known is not None and known[0] >= nbytes else wrap(address, nbytes))
            event = entry(queue, total, local, *arrays, *scalars)
            queue.finish()
            if alone:
                return 0
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
            entry.set_scalar_arg_dtypes(types)
        except (cl.Error, ValueError, KeyError) as e:
            raise OperationError(f"the driver refuses its code: {str(e)[:500]}") from e
        _, word = self._status()
        if self._alone:
            launch = self._launch_here(entry, block, parameters)
        else:
            launch = self._launch_on_all(entry, block, parameters)
        watch = _watch()

        def run(values: Sequence[Value], grid: tuple[int, int, int]) -> Taken:
            word[:] = 0
            watch.begin(word, limit_s())
            try:
                taken = launch(values, grid)
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

    def _launch_on_all(self, entry: Any, block: tuple[int, ...], parameters: Sequence[Parameter]) -> Launch:
        halves = [p.dtype if p.dtype in _HALVES else None for p in parameters]
        status, _ = self._status()

        def launch(values: Sequence[Value], grid: tuple[int, int, int]) -> Taken:
            arguments: list[Any] = [status]
            for value, half in zip(values, halves, strict=True):
                if isinstance(value, tuple):
                    address, nbytes = value
                    arguments += [self._window(address, nbytes) if nbytes else status, nbytes]
                else:
                    arguments.append(value if half is None else half_bits(value, half))
            total = tuple([n * b for n, b in zip(grid, block, strict=True)])
            event = entry(self._queue, total, block, *arguments)
            self._queue.finish()
            taken: int = max(event.profile.end - event.profile.start, 0)
            return taken, taken + beyond(taken, grid[0] * grid[1] * grid[2], self.threads)

        return launch

    def _launch_here(self, entry: Any, block: tuple[int, ...], parameters: Sequence[Parameter]) -> Launch:
        """Launch in the calling thread, without the interpreter's lock, which pyopencl would keep.

        Otherwise no other thread could tell the kernel to end. Only arguments that changed are set again: a launch has many of
        those of the last launch. To set one takes 1 us.
        """
        driver, queue = _driver(self._cl._cl.__file__), self._queue
        local = (ctypes.c_size_t * 3)(*block)
        total = (ctypes.c_size_t * 3)()
        x, y, z = block
        set_each, at = [], 1
        for p in parameters:
            set_each.append(self._set_buffer(entry, at) if p.buffer else self._set_number(entry, at, p))
            at += 2 if p.buffer else 1
        entry.set_arg(0, self._status()[0])
        #: The arguments that the kernel has. None is not equal to any.
        given: list[Value | None] = [None] * len(parameters)
        measured = 0

        def launch(values: Sequence[Value], grid: tuple[int, int, int]) -> Taken:
            nonlocal measured
            for k, value in enumerate(values):
                if value != given[k] or value == 0:  # 0.0 and -0.0 are equal
                    given[k] = None
                    set_each[k](value)
                    given[k] = value
            total[0], total[1], total[2] = grid[0] * x, grid[1] * y, grid[2] * z
            measured -= 1
            begun = time.thread_time_ns() if measured < 0 else 0
            failed = driver.clEnqueueNDRangeKernel(queue.int_ptr, entry.int_ptr, 3, None, total, local, 0, None, None)
            failed = failed or driver.clFinish(queue.int_ptr)
            if failed:
                raise OperationError(f"PoCL does not launch it (OpenCL's error {failed})")
            if not begun:
                return 0, 0
            measured = MEASURED_EVERY - 1
            return 0, time.thread_time_ns() - begun

        return launch

    def _set_buffer(self, entry: Any, at: int) -> Callable[[Any], None]:
        """Return a function that sets argument `at` of a kernel to a buffer, given as (address, bytes), and the next one to its
        size.
        """
        handle, size = ctypes.c_void_p(), ctypes.c_uint64()
        set_handle, set_size = self._argument(entry, at, handle), self._argument(entry, at + 1, size)
        status, window = self._status()[0], self._window
        held: Any = None  # the kernel does not keep the buffer
        last = -1

        def put(value: tuple[int, int]) -> None:
            nonlocal held, last
            address, nbytes = value
            buffer = window(address, nbytes) if nbytes else status
            handle.value = buffer.int_ptr
            set_handle()
            held = buffer
            if nbytes != last:
                last, size.value = -1, nbytes
                set_size()
                last = nbytes

        return put

    def _argument(self, entry: Any, at: int, cell: Any) -> Callable[[], None]:
        """Return a function that sets argument `at` of a kernel to the content of a cell of ctypes."""
        put, size, place = _set_argument(self._cl._cl.__file__), ctypes.sizeof(cell), ctypes.byref(cell)

        def set_it() -> None:
            if failed := put(entry.int_ptr, at, size, place):
                raise OperationError(f"PoCL does not take argument {at} (OpenCL's error {failed})")

        return set_it

    def _set_number(self, entry: Any, at: int, parameter: Parameter) -> Callable[[Any], None]:
        """Return a function that sets argument `at` of a kernel to a number."""
        cell = np.ctypeslib.as_ctypes_type(_scalar(parameter))()
        set_cell, half = self._argument(entry, at, cell), parameter.dtype if parameter.dtype in _HALVES else None

        def put(value: Any) -> None:
            cell.value = value if half is None else int(half_bits(value, half))
            set_cell()

        return put

    def _status(self) -> tuple[Any, Any]:
        """Return the words through which a running kernel is told to end and reports violations.

        Only one launch runs at a time.
        """
        if self._word is None:
            self._word = np.zeros(STATUS_WORDS, np.int32)
            flags = self._cl.mem_flags.READ_WRITE | self._cl.mem_flags.USE_HOST_PTR
            self._word_buffer = self._cl.Buffer(self._context, flags, hostbuf=self._word)
        return self._word_buffer, self._word

    def _window(self, address: int, nbytes: int) -> Any:
        known = self._buffers.get(address)
        return known[1] if known is not None and known[0] >= nbytes else self._wrap(address, nbytes)

    def _wrap(self, address: int, nbytes: int) -> Any:
        """Return an OpenCL buffer on memory that torch owns.

        It does not keep the memory alive. After the memory is freed, its address is not used again until new memory is wrapped
        there.
        """
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        flags = self._cl.mem_flags.READ_WRITE | self._cl.mem_flags.USE_HOST_PTR
        made = self._cl.Buffer(self._context, flags, hostbuf=np.frombuffer(memoryview(memory), np.uint8))
        if len(self._buffers) >= WRAPPED:
            self._buffers.clear()
        self._buffers[address] = nbytes, made
        return made


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
        if here:
            self._until_trial = TRIED_EVERY
        elif expected <= TRIED_UP_TO_NS:
            here = expected <= self._waited.get(size, 0)
            self._until_trial -= 1
            if self._until_trial < 0:
                here, self._until_trial = not here, TRIED_EVERY
        if here:
            taken, core_ns = self._here(values, grid)
        else:
            begun = self._clock()
            taken, core_ns = self._on_all(values, grid)
            waited = self._clock() - begun
            self._waited[size] = self._waited.get(size, waited) * 0.75 + waited * 0.25
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
def _driver(extension: str) -> Any:
    """The functions of OpenCL that pyopencl's extension module uses."""
    found, pointer = ctypes.CDLL(extension), ctypes.c_void_p
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
    return found


@functools.cache
def _set_argument(extension: str) -> Any:
    """OpenCL's function that sets a kernel's argument. It keeps the interpreter's lock: to get it back could take longer."""
    found = ctypes.PyDLL(extension).clSetKernelArg
    found.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_size_t, ctypes.c_void_p]
    return found


def _open_units(cache: Path | None, threads: int, spread: Callable[[int], None]) -> tuple[_Unit, ...]:
    """Return PoCL's devices, in the order of `POCL_UNITS`.

    Raises:
        MissingDriverError: PoCL is missing, or has other devices.
    """
    os.environ["POCL_DEVICES"] = " ".join(POCL_UNITS)
    os.environ["POCL_MAX_PTHREAD_COUNT"] = str(threads)
    if cache is not None:
        os.environ["POCL_CACHE_DIR"] = str(cache)
    try:
        import pyopencl as cl

        platforms = cl.get_platforms()
    except Exception as e:  # drivers may raise any exception
        why = f"OpenCL does not start: {type(e).__name__}: {e}; install PoCL with pip install 'pyopencl[pocl]'"
        raise MissingDriverError(why) from e
    named = {d.name.split("-")[0]: d for p in platforms if "Portable" in p.name for d in p.get_devices()}
    if not named.keys() >= set(POCL_UNITS):
        have = ", ".join(f"{p.name} ({', '.join(d.name for d in p.get_devices())})" for p in platforms) or "nothing"
        raise MissingDriverError(
            f"PoCL with its devices {' and '.join(POCL_UNITS)} is needed, but OpenCL has {have}: pip install 'pyopencl[pocl]'"
        )
    return tuple([_Unit(cl, named[name], alone=name == POCL_UNITS[0], spread=spread) for name in POCL_UNITS])
