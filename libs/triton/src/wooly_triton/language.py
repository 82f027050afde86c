"""The entry point of `ttir`: what the compiler asks of this distribution (`wooly_wis.languages.CompiledLanguage`)."""

from __future__ import annotations

from collections.abc import Callable

from wooly_wis.foreign import ForeignCode
from wooly_wis.languages import Lowered, Request

from wooly_triton.lower import Lowering


def for_cpu(request: Request) -> Lowered:
    """A Triton kernel as OpenCL C.

    Raises:
        ForeignError: names the operation that has no lowering, or the law that the text breaks.
    """
    return Lowering(request).run()


def for_gpu(request: Request, target: str, build: Callable[[str], bytes]) -> ForeignCode:
    """A Triton kernel's code for a GPU, compiled by Triton itself after guards were written into the text.

    Args:
        request: what is to be compiled.
        target: like ``cuda:sm_90`` or ``hip:gfx942``.
        build: not used: Triton has compilers of its own.

    Raises:
        ForeignError: the text cannot be checked, or is no TTIR.
        ChipError: Triton is not installed, or does not compile the text.
    """
    from wooly_triton import chips

    parameters, places, images = chips.build(request, target)
    return ForeignCode(request.entry, parameters, places, b"", images)
