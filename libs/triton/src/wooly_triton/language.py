"""The entry point of `ttir`: what the compiler calls in this distribution (`wooly_wis.languages.CompiledLanguage`)."""

from __future__ import annotations

from collections.abc import Callable

from wooly_wis.foreign import ForeignCode
from wooly_wis.languages import Lowered, Request

from wooly_triton.lower import Lowering


def for_cpu(request: Request) -> Lowered:
    """Translate a Triton kernel to OpenCL C.

    Raises:
        ForeignError: the text has an unsupported operation, or breaks a law; the message names it.
    """
    return Lowering(request).run()


def for_gpu(request: Request, target: str, build: Callable[[str], bytes]) -> ForeignCode:
    """Compile a Triton kernel for a GPU with Triton, after guards were inserted into the text.

    Args:
        request: the kernel to compile.
        target: like ``cuda:sm_90`` or ``hip:gfx942``.
        build: not used, because Triton has its own compilers.

    Raises:
        ForeignError: the text cannot be checked, or is not TTIR.
        ChipError: Triton is not installed, or cannot compile the text.
    """
    from wooly_triton import chips

    parameters, places, images = chips.build(request, target)
    return ForeignCode(request.entry, parameters, places, b"", images)
