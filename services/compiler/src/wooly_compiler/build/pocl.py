"""Code for a CPU, as PoCL keeps it: built for the calling thread or for all cores, complete, so that loading it compiles nothing.

PoCL finishes a kernel when it is first launched, for the work-group size it then has. So it is launched here once, on zeros, and
what comes of that is part of the binary. For a process of its own: `prepare` comes before OpenCL is first used.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
from wooly_wis.artifact import POCL_UNITS, pocl_target
from wooly_wis.kernel.ir import Kernel

from wooly_compiler.build import opencl
from wooly_compiler.errors import BuildError
from wooly_compiler.render.dialects import OPENCL
from wooly_compiler.render.printer import Form, render

#: Bytes of a kernel's largest array up to which it is launched here.
LAUNCHED = 1 << 30


def prepare(cache: Path) -> None:
    """Have PoCL offer its devices one by one, and keep its files there."""
    os.environ["POCL_DEVICES"] = " ".join(POCL_UNITS)
    os.environ["POCL_CACHE_DIR"] = str(cache)


@functools.cache
def units() -> tuple[opencl.Device, ...]:
    """A device for each of `POCL_UNITS`.

    Raises:
        BuildError: PoCL is missing, or another one.
    """
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
        found.append(opencl.Device(context, cl.CommandQueue(context), device.name.strip(), platform, True))
    return tuple(found)


def target(cores: int) -> str:
    """The name of this machine's CPU as a target."""
    found = units()
    return pocl_target(cores, found[0].platform, [d.name for d in found])


def code(kernel: Kernel, unit: int) -> tuple[str, int, int, bytes]:
    """Entry point, groups, threads and binary of a kernel.

    Raises:
        BuildError: PoCL refuses it.
    """
    import pyopencl as cl

    device = units()[unit]
    source = render(kernel, OPENCL, Form.LOOPS)
    try:
        program = cl.Program(device.context, source.text).build(options=opencl.OPTIONS, cache_dir=False)
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
