"""Compiles foreign kernels for GPUs: Triton's text with Triton, CUDA C with the vendors' compilers.

The compiled text is the checked text: TTIR with guards inserted, or CUDA C as the front end printed it. PTX is compiled without
changes. So is TTIR if its launch asks for that; the executor accepts this only from tenants with the permission.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final

from wooly_wis import languages
from wooly_wis.dtypes import BY_LABEL
from wooly_wis.foreign import SHARED, ForeignCode, Image, Parameter
from wooly_wis.languages import ForeignError, Request

from wooly_compiler.build.toolchains import BUILDERS, missing
from wooly_compiler.errors import BuildError

#: Assemblers of PTX, in the order in which they are tried.
_PTXAS: Final = ("ptxas", "ptxas-blackwell")


def build(language: str, request: Request, target: str) -> ForeignCode:
    """Return a kernel's code for a GPU.

    Args:
        language: language of the text.
        request: the text, its entry point and its arguments.
        target: like ``cuda:sm_90`` or ``hip:gfx942``.

    Raises:
        ForeignError: the text cannot be checked, or is not in this language.
        BuildError: the vendor's compiler rejects the text.
    """
    toolchain, _, arch = target.partition(":")
    if language == "ptx":
        return _of_ptx(request, toolchain, arch)

    def vendors(text: str) -> bytes:
        why = missing(toolchain)
        if why:
            raise BuildError(why)
        return BUILDERS[toolchain](text, arch)

    return languages.compiled(language).for_gpu(request, target, vendors)


def _of_ptx(request: Request, toolchain: str, arch: str) -> ForeignCode:
    """Assemble PTX with NVIDIA's assembler. This happens in the worker, because the driver would do it in the executor."""
    if toolchain != "cuda":
        raise ForeignError(f"ptx is code for NVIDIA's chips; this device is {arch}")
    with tempfile.TemporaryDirectory(prefix="wooly-ptx-") as folder:
        text, out = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        text.write_text(request.text)
        said = "ptxas is missing; install it with: pip install triton"
        for assembler in _assemblers():
            done = subprocess.run(
                [str(assembler), f"--gpu-name={arch}", str(text), "-o", str(out)],
                capture_output=True,
                text=True,
                check=False,
            )
            if not done.returncode:
                return _unchecked(request, out.read_bytes())
            said = f"ptxas rejects the text: {done.stderr[:2000]}"
    raise BuildError(said)


def _assemblers() -> list[Path]:
    try:
        import triton
    except ImportError:
        return []
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    return [folder / name for name in _PTXAS if os.access(folder / name, os.X_OK)]


def _unchecked(request: Request, code: bytes) -> ForeignCode:
    shared: Any = request.options.get(SHARED, 0)
    if type(shared) is not int or shared < 0:
        raise ForeignError(f"the option {SHARED} is {shared!r}; pass a number of bytes, 0 or more")
    buffers = [a.startswith("*") for a in request.args]
    parameters = tuple(
        [Parameter(None if b else BY_LABEL[a], b, b) for a, b in zip(request.args, buffers, strict=True)]
    )
    passed = tuple([f"address {k}" if b else f"value {k}" for k, b in enumerate(buffers)])
    image = Image(request.entry, passed, 0, shared, 0, (1,) * len(buffers), code)
    return ForeignCode(request.entry, parameters, (), b"", (image,))
