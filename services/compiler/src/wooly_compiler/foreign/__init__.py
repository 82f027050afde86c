"""Kernels in languages of others, lowered to C in which every access is checked.

docs/reference/foreign-kernels.md has the contract.

A language is a row of `LANGUAGES`; for GPUs, of `gpu`. Runs in the worker: texts are untrusted, and what builds them may crash.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from wooly_wis.foreign import OPAQUE, ForeignCode, Parameter, encode_code

from wooly_compiler.build import pocl
from wooly_compiler.errors import BuildError, ForeignError

_CPU: Final = re.compile(r"opencl:[0-9a-f]{12}-x(\d{1,4})")
_GPU: Final = re.compile(r"(?:cuda:sm_\d{2,3}|hip:gfx[0-9a-f]{3,5})")


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be lowered.

    Attributes:
        text: the source.
        entry: the function.
        args: per argument: ``*f32`` for a buffer of such elements, else a scalar's dtype.
        block: threads of a group.
        options: hints and needs.
    """

    text: str
    entry: str
    args: tuple[str, ...]
    block: tuple[int, int, int]
    options: dict[str, int | bool | str]


@dataclass(frozen=True, slots=True)
class Lowered:
    """What became of it.

    Attributes:
        text: OpenCL C 1.2, with the ABI in docs/reference/foreign-kernels.md.
        entry: the kernel in it.
        parameters: of the kernel, one per argument.
        places: what complaints are about, by number.
    """

    text: str
    entry: str
    parameters: tuple[Parameter, ...]
    places: tuple[str, ...] = ()


#: Per language the module whose `lower` makes OpenCL C of a request; imported when first asked for.
LANGUAGES: Final[dict[str, str]] = {
    "ttir": "wooly_compiler.foreign.ttir.lower",
    "cuda-c": "wooly_compiler.cudac.lower",
}


def lower(language: str, request: Request) -> Lowered:
    """A kernel as OpenCL C.

    Raises:
        ForeignError: names the operation that has no lowering, or the law that the text breaks.
    """
    module = LANGUAGES.get(language)
    if language in OPAQUE:
        raise ForeignError(
            f"{language} is code for NVIDIA's chips; this device, a CPU, runs kernels in {', '.join(LANGUAGES)}"
        )
    if module is None:
        raise ForeignError(f"kernels in {language} are not compiled here; those in {', '.join(LANGUAGES)} are")
    function: Callable[[Request], Lowered] = importlib.import_module(module).lower
    try:
        return function(request)
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
