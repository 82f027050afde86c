"""Builds complete binaries for a CPU with PoCL, for the calling thread or for all cores. Loading one compiles nothing.

PoCL finishes a kernel at its first launch, for the size of work-group of that launch. So this module launches the kernel once, on
zeros, and the binary contains the result. Use it in a process of its own: call `wooly_wis.pocl.prepare` first.
"""

from __future__ import annotations

import functools
import importlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from wooly_bus import host
from wooly_wis.dtypes import DType
from wooly_wis.foreign import STATUS_WORDS, Parameter
from wooly_wis.kernel.ir import Kernel
from wooly_wis.pocl import HOW_TO_GET, POCL_UNITS, cpu_of, pocl_target

from wooly_compiler.errors import BuildError
from wooly_compiler.render.dialects import OPENCL
from wooly_compiler.render.printer import render
from wooly_compiler.render.source import Form

if TYPE_CHECKING:  # this module needs OpenCL, which machines with GPUs may lack
    from wooly_compiler.build import opencl

#: Maximum size of a kernel's largest array, in bytes, for which the kernel is launched here. The limit bounds the build's memory.
LAUNCHED = 1 << 30


def _opencl() -> Any:
    """Import the module of OpenCL.

    Raises:
        BuildError: pyopencl is missing.
    """
    try:
        return importlib.import_module("wooly_compiler.build.opencl")
    except ImportError as e:
        raise BuildError(f"pyopencl is missing ({e}); install it: {HOW_TO_GET}") from e


@functools.cache
def units() -> tuple[opencl.OpenClDevice, ...]:
    """Return a device for each of `POCL_UNITS`.

    Raises:
        BuildError: PoCL is missing, or has other devices, or cannot run code from its folder.
    """
    opencl = _opencl()
    import pyopencl as cl

    if why := host.why_no_code(Path(os.environ.get("POCL_CACHE_DIR", tempfile.gettempdir()))):
        raise BuildError(f"{why}; set the compiler's state directory to a folder on another one")
    try:
        platforms = cl.get_platforms()
    except cl.LogicError as e:
        raise BuildError(f"no OpenCL platform is installed ({e}); install PoCL: {HOW_TO_GET}") from e
    named = {d.name.split("-")[0]: d for p in platforms if "Portable" in p.name for d in p.get_devices()}
    if not named.keys() >= set(POCL_UNITS):
        raise BuildError(f"PoCL must have devices {' and '.join(POCL_UNITS)}, but has {', '.join(named) or 'none'}")
    found = []
    for name in POCL_UNITS:
        device = named[name]
        context = cl.Context([device])
        platform = f"{device.platform.name} {device.platform.version}"
        queue, cpu = cl.CommandQueue(context), cpu_of(device.int_ptr)
        found.append(opencl.OpenClDevice(context, queue, device.name.strip(), platform, cpu, True))
    return tuple(found)


def target(cores: int) -> str:
    """Return the name of this machine's CPU as a target."""
    found = units()
    return pocl_target(cores, found[0].platform, [d.name for d in found], found[0].cpu)


#: The unit that runs foreign kernels: all cores. The interpreter's lock is free meanwhile.
FOREIGN_UNIT = 1


def foreign(text: str, entry: str, parameters: Sequence[Parameter], block: tuple[int, int, int]) -> bytes:
    """Return the binary of a kernel in OpenCL C with the ABI in docs/reference/foreign-kernels.md.

    Raises:
        BuildError: PoCL rejects the kernel.
    """
    opencl = _opencl()
    import pyopencl as cl

    device = units()[FOREIGN_UNIT]
    try:
        program = opencl.program_of(device, text)
        kernel = cl.Kernel(program, entry)
        (chip,) = device.context.devices
        local = kernel.get_work_group_info(cl.kernel_work_group_info.LOCAL_MEM_SIZE, chip)
        if local > chip.local_mem_size:
            raise BuildError(
                f"kernel {entry}: it needs {local} bytes of shared memory, the device has {chip.local_mem_size}"
            )
        status = np.zeros(STATUS_WORDS, np.int32)
        status[0] = 1  # the kernel then does nothing, but PoCL finishes it for this size of work-group
        memory = opencl.wrap(device, np.zeros(64, np.uint8))
        arguments: list[Any] = [opencl.wrap(device, status)]
        for p in parameters:
            arguments += [memory, np.uint64(0)] if p.buffer else [scalar_type(p.dtype)(0)]
        kernel(device.queue, block, block, *arguments)
        device.queue.finish()
        return bytes(program.get_info(cl.program_info.BINARIES)[0])
    except cl.Error as e:
        raise BuildError(f"PoCL cannot build kernel {entry}: {str(e)[:2000]}") from e


def scalar_type(dtype: DType | None) -> Any:
    """Return NumPy's type for a scalar argument: 16-bit floats are passed as their bits, booleans as bytes."""
    assert dtype is not None
    return getattr(np, _NUMPY[dtype])


_NUMPY = {
    DType.BOOL: "uint8",
    DType.F16: "uint16",
    DType.BF16: "uint16",
    DType.F32: "float32",
    DType.F64: "float64",
    **{d: f"{'u' * (d.kind == 'uint')}int{8 * d.itemsize}" for d in DType if d.kind in ("int", "uint")},
}


def code(kernel: Kernel, unit: int) -> tuple[str, int, int, bytes]:
    """Return entry point, groups, threads and binary of a kernel.

    Raises:
        BuildError: PoCL rejects the kernel.
    """
    opencl = _opencl()
    import pyopencl as cl

    device = units()[unit]
    source = render(kernel, OPENCL, Form.LOOPS)
    try:
        program = opencl.program_of(device, source.text)
        built = opencl.BuiltKernel(device, kernel, source, cl.Kernel(program, source.name))
        largest = max([a.numel * a.dtype.itemsize for a in kernel.arrays], default=1)
        if largest <= LAUNCHED:
            memory = opencl.wrap(device, np.zeros(largest, np.uint8))
            scalars: list[Any] = [0 for _ in kernel.scalars]
            built.launch([memory] * len(kernel.arrays), scalars)
            device.queue.finish()
        binary = bytes(program.get_info(cl.program_info.BINARIES)[0])
    except cl.Error as e:
        raise BuildError(f"PoCL cannot build kernel {kernel.name}: {str(e)[:2000]}") from e
    return source.name, source.groups, source.threads, binary
