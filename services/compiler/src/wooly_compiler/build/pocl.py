"""Code for a CPU, as PoCL keeps it: built for the calling thread or for all cores, complete, so that loading it compiles nothing.

PoCL finishes a kernel when it is first launched, for the work-group size it then has. So it is launched here once, on zeros, and
what comes of that is part of the binary. For a process of its own: `prepare` comes before OpenCL is first used.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from wooly_wis.artifact import POCL_UNITS, pocl_target
from wooly_wis.dtypes import DType
from wooly_wis.foreign import STATUS_WORDS, Parameter
from wooly_wis.kernel.ir import Kernel

from wooly_compiler.errors import BuildError
from wooly_compiler.render.dialects import OPENCL
from wooly_compiler.render.printer import render
from wooly_compiler.render.source import Form

if TYPE_CHECKING:  # whose module needs OpenCL, which where there are GPUs need not be
    from wooly_compiler.build import opencl

#: Bytes of a kernel's largest array up to which it is launched here.
LAUNCHED = 1 << 30
#: What switches pyopencl's cache of builds off; its annotation does not allow for that.
_NO_CACHE: Any = False


def prepare(cache: Path) -> None:
    """Have PoCL offer its devices one by one, and keep its files there."""
    os.environ["POCL_DEVICES"] = " ".join(POCL_UNITS)
    os.environ["POCL_CACHE_DIR"] = str(cache)


def _opencl() -> Any:
    """The module of OpenCL.

    Raises:
        BuildError: pyopencl is missing.
    """
    try:
        return importlib.import_module("wooly_compiler.build.opencl")
    except ImportError as e:
        raise BuildError(f"pyopencl is missing ({e}): pip install pyopencl[pocl]") from e


@functools.cache
def units() -> tuple[opencl.OpenClDevice, ...]:
    """A device for each of `POCL_UNITS`.

    Raises:
        BuildError: PoCL is missing, or another one.
    """
    opencl = _opencl()
    import pyopencl as cl

    try:
        platforms = cl.get_platforms()
    except cl.LogicError as e:
        raise BuildError(f"there is no OpenCL platform here ({e}); pip install pyopencl[pocl]") from e
    named = {d.name.split("-")[0]: d for p in platforms if "Portable" in p.name for d in p.get_devices()}
    if not named.keys() >= set(POCL_UNITS):
        raise BuildError(f"PoCL has no devices {' and '.join(POCL_UNITS)} here; it has {', '.join(named) or 'none'}")
    found = []
    for name in POCL_UNITS:
        device = named[name]
        context = cl.Context([device])
        platform = f"{device.platform.name} {device.platform.version}"
        found.append(opencl.OpenClDevice(context, cl.CommandQueue(context), device.name.strip(), platform, True))
    return tuple(found)


def target(cores: int) -> str:
    """The name of this machine's CPU as a target."""
    found = units()
    return pocl_target(cores, found[0].platform, [d.name for d in found])


#: The unit that runs kernels in languages of others: all cores, and the interpreter's lock is free meanwhile.
FOREIGN_UNIT = 1


def foreign(text: str, entry: str, parameters: Sequence[Parameter], block: tuple[int, int, int]) -> bytes:
    """The binary of a kernel in OpenCL C with the ABI in docs/reference/foreign-kernels.md.

    Raises:
        BuildError: PoCL refuses it.
    """
    opencl = _opencl()
    import pyopencl as cl

    device = units()[FOREIGN_UNIT]
    try:
        program = cl.Program(device.context, text).build(options=opencl.OPTIONS, cache_dir=_NO_CACHE)
        kernel = cl.Kernel(program, entry)
        (chip,) = device.context.devices
        local = kernel.get_work_group_info(cl.kernel_work_group_info.LOCAL_MEM_SIZE, chip)
        if local > chip.local_mem_size:
            raise BuildError(f"kernel {entry}: {local} bytes of a group's memory, the device has {chip.local_mem_size}")
        status = np.zeros(STATUS_WORDS, np.int32)
        status[0] = 1  # so that it is finished for these groups, and does nothing
        memory = opencl.wrap(device, np.zeros(64, np.uint8))
        arguments: list[Any] = [opencl.wrap(device, status)]
        for p in parameters:
            arguments += [memory, np.uint64(0)] if p.buffer else [scalar_type(p.dtype)(0)]
        kernel(device.queue, block, block, *arguments)
        device.queue.finish()
        return bytes(program.get_info(cl.program_info.BINARIES)[0])
    except cl.Error as e:
        raise BuildError(f"kernel {entry}: {str(e)[:2000]}") from e


def scalar_type(dtype: DType | None) -> Any:
    """How NumPy calls what a scalar argument is passed as: 16-bit floating point as its bits, booleans as bytes."""
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
    """Entry point, groups, threads and binary of a kernel.

    Raises:
        BuildError: PoCL refuses it.
    """
    opencl = _opencl()
    import pyopencl as cl

    device = units()[unit]
    source = render(kernel, OPENCL, Form.LOOPS)
    try:
        program = cl.Program(device.context, source.text).build(options=opencl.OPTIONS, cache_dir=_NO_CACHE)
        built = opencl.BuiltKernel(device, kernel, source, cl.Kernel(program, source.name))
        largest = max([a.numel * a.dtype.itemsize for a in kernel.arrays], default=1)
        if largest <= LAUNCHED:
            memory = opencl.wrap(device, np.zeros(largest, np.uint8))
            scalars: list[Any] = [0 for _ in kernel.scalars]
            built.launch([memory] * len(kernel.arrays), scalars)
            device.queue.finish()
        binary = bytes(program.get_info(cl.program_info.BINARIES)[0])
    except cl.Error as e:
        raise BuildError(f"kernel {kernel.name}: {str(e)[:2000]}") from e
    return source.name, source.groups, source.threads, binary
