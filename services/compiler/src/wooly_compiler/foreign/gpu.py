"""Kernels in languages of others for GPUs: Triton's text through Triton, CUDA C through the vendors' compilers.

What is compiled is what was checked: texts of TTIR into which guards were written, and CUDA C that the front end printed anew.
PTX is compiled as it is, and so are texts of TTIR whose launches say so: the executor takes those of tenants who may.
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

#: Compilers of PTX, in the order in which they are looked for.
_PTXAS: Final = ("ptxas", "ptxas-blackwell")


def build(language: str, request: Request, target: str) -> ForeignCode:
    """A kernel's code for a GPU.

    Args:
        language: of the text.
        request: what is to be compiled.
        target: like ``cuda:sm_90`` or ``hip:gfx942``.

    Raises:
        ForeignError: it cannot be checked, or is no text of this language.
        BuildError: the vendor's compiler does not take it.
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
    """Assembly of NVIDIA's: by its own assembler, in this process's place rather than in the driver's."""
    if toolchain != "cuda":
        raise ForeignError(f"ptx is code for NVIDIA's chips; this device is {arch}")
    with tempfile.TemporaryDirectory(prefix="wooly-ptx-") as folder:
        text, out = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        text.write_text(request.text)
        said = "ptxas is missing: pip install triton, which brings it"
        for assembler in _assemblers():
            done = subprocess.run(
                [str(assembler), f"--gpu-name={arch}", str(text), "-o", str(out)],
                capture_output=True,
                text=True,
                check=False,
            )
            if not done.returncode:
                return _unchecked(request, out.read_bytes())
            said = f"ptxas refuses the text: {done.stderr[:2000]}"
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
        raise ForeignError(f"the option {SHARED} is a number of bytes")
    buffers = [a.startswith("*") for a in request.args]
    parameters = tuple(
        [Parameter(None if b else BY_LABEL[a], b, b) for a, b in zip(request.args, buffers, strict=True)]
    )
    passed = tuple([f"address {k}" if b else f"value {k}" for k, b in enumerate(buffers)])
    image = Image(request.entry, passed, 0, shared, 0, (1,) * len(buffers), code)
    return ForeignCode(request.entry, parameters, (), b"", (image,))
