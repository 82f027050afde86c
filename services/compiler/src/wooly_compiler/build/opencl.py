"""OpenCL in this process: builds sources for a device, and runs kernels on existing host memory without copies.

PoCL is the default, because it needs no hardware. Its compiler runs in this process, so sources that are not trusted are built in
`worker` first.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyopencl as cl
from wooly_wis.dtypes import DType
from wooly_wis.kernel.ir import Kernel
from wooly_wis.pocl import HOW_TO_GET, cpu_of

from wooly_compiler.build.opencl_c import DECLARATIONS, WITHOUT_HEADER
from wooly_compiler.errors import BuildError
from wooly_compiler.render.dialects import OPENCL
from wooly_compiler.render.printer import render_together
from wooly_compiler.render.source import Form, Source

_NUMPY = {DType.F64: np.float64, DType.F32: np.float32, DType.I64: np.int64, DType.BOOL: np.uint8, DType.I32: np.int32}

#: Turns off pyopencl's cache of builds. `Any`, because the annotation of the parameter does not allow False.
_NO_CACHE: Any = False


@dataclass(frozen=True, slots=True)
class OpenClDevice:
    """An OpenCL device with its context and an in-order queue. `cpu`: see `wooly_wis.pocl`; empty for other platforms."""

    context: Any
    queue: Any
    name: str
    platform: str
    cpu: str
    is_cpu: bool


@functools.cache
def default_device() -> OpenClDevice:
    """Return the first CPU device; PoCL's device if there are several.

    Raises:
        BuildError: this machine has no OpenCL platform or device.
    """
    try:
        platforms = cl.get_platforms()
    except cl.LogicError as e:
        raise BuildError(f"no OpenCL platform is installed ({e}); install PoCL: {HOW_TO_GET}") from e
    devices = [d for p in platforms for d in p.get_devices()]
    if not devices:
        raise BuildError(f"no OpenCL platform has a device; install PoCL: {HOW_TO_GET}")
    cpu = [d for d in devices if d.type & cl.device_type.CPU]
    pocl = [d for d in cpu if _is_pocl(d.platform.name)]
    device = (pocl or cpu or devices)[0]
    context = cl.Context([device])
    return OpenClDevice(
        context,
        cl.CommandQueue(context),
        device.name.strip(),
        f"{device.platform.name} {device.platform.version}",
        cpu_of(device.int_ptr) if pocl else "",
        bool(device.type & cl.device_type.CPU),
    )


class BuiltKernel:
    """A kernel that can be launched.

    Attributes:
        source: the source from which it was built.
    """

    def __init__(self, device: OpenClDevice, kernel: Kernel, source: Source, entry: Any) -> None:
        self.device = device
        self.kernel = kernel
        self.source = source
        self._entry = entry
        # This makes a launch with Python numbers ten times cheaper.
        entry.set_scalar_arg_dtypes([None] * len(kernel.arrays) + [_NUMPY[s.dtype] for s in kernel.scalars])

    def launch(self, arrays: Sequence[Any], scalars: Sequence[Any] = ()) -> Any:
        """Enqueue the kernel and return the event of its end.

        Args:
            arrays: OpenCL buffers (see `wrap`) of at least the kernel's sizes.
            scalars: Python numbers.
        """
        source = self.source
        return self._entry(self.device.queue, (source.groups * source.threads,), (source.threads,), *arrays, *scalars)


def wrap(device: OpenClDevice, memory: np.ndarray[Any, Any]) -> Any:
    """Make a buffer on NumPy's memory without a copy. On a CPU device, both sides see every write without map or unmap."""
    return cl.Buffer(device.context, cl.mem_flags.READ_WRITE | cl.mem_flags.USE_HOST_PTR, hostbuf=memory)


def build(kernel: Kernel, device: OpenClDevice | None = None, form: Form | None = None) -> BuiltKernel:
    """Print and build a kernel.

    Args:
        kernel: it is verified here.
        device: the device that runs it; without it, the default one.
        form: how it is printed; without it, the form that fits the device.

    Raises:
        KernelError: the kernel breaks a law.
        BuildError: the compiler rejects the source.
    """
    return build_together([kernel], device, form)[0]


def build_together(
    kernels: Sequence[Kernel], device: OpenClDevice | None = None, form: Form | None = None
) -> list[BuiltKernel]:
    """As `build`, for several kernels in one program: the compiler reads the declarations of the language only once.

    Raises:
        KernelError: a kernel breaks a law.
        BuildError: the compiler rejects the source.
    """
    device = device or default_device()
    form = form or (Form.LOOPS if device.is_cpu else Form.SIMT)
    if len({k.name for k in kernels}) < len(kernels):
        kernels = [replace(k, name=f"{k.name[:50]}_{n}") for n, k in enumerate(kernels)]
    if not kernels:
        return []
    sources = render_together(kernels, OPENCL, form)
    try:
        program = program_of(device, sources[0].text)
        return [BuiltKernel(device, k, s, cl.Kernel(program, s.name)) for k, s in zip(kernels, sources, strict=True)]
    except cl.Error as e:
        raise BuildError(f"OpenCL cannot build kernel {', '.join([k.name for k in kernels])}: {e}") from e


def program_of(device: OpenClDevice, text: str) -> Any:
    """Build a text to a program. PoCL reads its large header only if the text calls a function that `opencl_c` does not declare.

    Raises:
        pyopencl.Error: the compiler rejects the text.
    """
    if _is_pocl(device.platform):
        try:
            return program_with(device, DECLARATIONS + text, WITHOUT_HEADER)
        except cl.Error:
            pass  # if the text is wrong, the next build says so without these declarations
    return program_with(device, text)


def program_with(device: OpenClDevice, text: str, more: Sequence[str] = ()) -> Any:
    """Build a text as it is to a program, with further options.

    Raises:
        pyopencl.Error: the compiler rejects the text.
    """
    return cl.Program(device.context, text).build(options=[*OPTIONS, *more], cache_dir=_NO_CACHE)


def _is_pocl(platform: str) -> bool:
    return "portable" in platform.lower()


#: No fast mathematics: quotients and roots of f32 are rounded correctly, and subnormal numbers are kept.
OPTIONS = ["-cl-std=CL1.2", "-w", "-cl-fp32-correctly-rounded-divide-sqrt"]
