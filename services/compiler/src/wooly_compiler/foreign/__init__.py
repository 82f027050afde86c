"""Compiles foreign kernels to code in which every access is checked.

docs/reference/foreign-kernels.md has the contract.

The languages are separate distributions (`wooly_wis.languages`). PTX, which cannot be checked, is in `gpu`. This runs in the
worker, because texts are not trusted and builds may crash.
"""

from __future__ import annotations

import re
from typing import Any, Final

from wooly_wis import languages
from wooly_wis.foreign import OPAQUE, ForeignCode, encode_code
from wooly_wis.languages import ForeignError, Lowered, Request

from wooly_compiler.build import pocl
from wooly_compiler.errors import BuildError

_CPU: Final = re.compile(r"opencl:[0-9a-f]{12}-x(\d{1,4})")
_GPU: Final = re.compile(r"(?:cuda:sm_\d{2,3}|hip:gfx[0-9a-f]{3,5})")


def lower(language: str, request: Request) -> Lowered:
    """Translate a kernel to OpenCL C.

    Raises:
        ForeignError: the text has an unsupported operation or breaks a law, or the language's distribution is missing.
    """
    if language in OPAQUE:
        checked = ", ".join(languages.DISTRIBUTIONS)
        raise ForeignError(f"{language} is code for NVIDIA's chips; this device, a CPU, runs kernels in {checked}")
    try:
        return languages.compiled(language).for_cpu(request)
    except RecursionError:
        raise ForeignError("the text is nested too deeply to translate; split its expressions or statements") from None


def build(asked: dict[str, Any]) -> bytes:
    """Return the bytes of a kernel's code, for a request to the worker.

    Raises:
        WisError: the kernel cannot be translated or built.
    """
    target = str(asked["target"])
    block = tuple([int(n) for n in asked["block"]])
    options = {str(name): value for name, value in asked["options"]}
    careful = bool(asked.get("careful"))
    request = Request(str(asked["text"]), str(asked["entry"]), tuple(asked["args"]), block, options, careful)  # type: ignore[arg-type]
    if _GPU.fullmatch(target):
        from wooly_compiler.foreign import gpu

        code = gpu.build(str(asked["language"]), request, target)
        return encode_code(code, str(asked["name"]))
    cpu = _CPU.fullmatch(target)
    if cpu is None or target != pocl.target(int(cpu[1])):
        raise BuildError(f"this machine cannot build code for {target}; run a compiler on a machine like the device's")
    lowered = lower(str(asked["language"]), request)
    binary = pocl.foreign(lowered.text, lowered.entry, lowered.parameters, request.block)
    return encode_code(ForeignCode(lowered.entry, lowered.parameters, lowered.places, binary), str(asked["name"]))
