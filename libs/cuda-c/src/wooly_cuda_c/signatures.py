"""The entry point of `cuda-c` in clients: what they ask of this distribution (`wooly_wis.languages.ReadLanguage`).

A client reads a text for errors of syntax and for the parameters of a kernel, where the script compiles it.
"""

from __future__ import annotations

from wooly_wis.languages import Passed

from wooly_cuda_c.syntax.errors import CudaSourceError
from wooly_cuda_c.syntax.parser import parse, parse_arguments


def parameters(text: str, entry: str, template: str) -> tuple[Passed, ...]:
    """What the parameters of a kernel are.

    Args:
        text: the source.
        entry: a ``__global__`` function in it.
        template: its template arguments as they are written; empty without any.

    Raises:
        CudaSourceError: the source is not understood, or has no such kernel; the message names the line.
    """
    unit = parse(text)
    kernels = [f for f in unit.functions.get(entry, []) if f.kernel]
    if len(kernels) != 1:
        have = ", ".join(unit.kernels()) or "none"
        raise CudaSourceError(f"there is no kernel {entry}; there is {have}", 1)
    (kernel,) = kernels
    given = parse_arguments(template, unit) if template else []
    if len(given) < sum(p.default is None for p in kernel.template):
        names = ", ".join(p.name for p in kernel.template)
        raise CudaSourceError(f"{kernel.name} is a template of {names}: name it {kernel.name}<…>", kernel.line)
    pointed = [Passed.READ if p.const else Passed.WRITTEN for p in kernel.params]
    return tuple([how if p.pointer else Passed.NUMBER for p, how in zip(kernel.params, pointed, strict=True)])
