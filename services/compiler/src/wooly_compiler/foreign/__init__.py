"""Kernels in languages of others, compiled to code in which every access is checked.

docs/reference/foreign-kernels.md has the contract.

The languages are distributions of their own (`wooly_wis.languages`); PTX, which nobody can check, is in `gpu`. Runs in the
worker: texts are untrusted, and what builds them may crash.
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
    """A kernel as OpenCL C.

    Raises:
        ForeignError: names the operation that has no lowering, the law that the text breaks, or the distribution that is missing.
    """
    if language in OPAQUE:
        checked = ", ".join(languages.DISTRIBUTIONS)
        raise ForeignError(f"{language} is code for NVIDIA's chips; this device, a CPU, runs kernels in {checked}")
    try:
        return languages.compiled(language).for_cpu(request)
    except RecursionError:
        raise ForeignError("the text is nested too deeply") from None


def build(asked: dict[str, Any]) -> bytes:
    """The bytes of a kernel's code, for a request to the worker.

    Raises:
        WisError: it cannot be lowered, or not built.
    """
    target = str(asked["target"])
    block = tuple([int(n) for n in asked["block"]])
    options = {str(name): value for name, value in asked["options"]}
    request = Request(str(asked["text"]), str(asked["entry"]), tuple(asked["args"]), block, options)  # type: ignore[arg-type]
    if _GPU.fullmatch(target):
        from wooly_compiler.foreign import gpu

        code = gpu.build(str(asked["language"]), request, target)
        return encode_code(code, str(asked["name"]))
    cpu = _CPU.fullmatch(target)
    if cpu is None or target != pocl.target(int(cpu[1])):
        raise BuildError(f"code for {target} cannot be built here")
    lowered = lower(str(asked["language"]), request)
    binary = pocl.foreign(lowered.text, lowered.entry, lowered.parameters, request.block)
    return encode_code(ForeignCode(lowered.entry, lowered.parameters, lowered.places, binary), str(asked["name"]))
