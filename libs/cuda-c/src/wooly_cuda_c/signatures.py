"""The entry point of `cuda-c` for clients: what they call here (`wooly_wis.languages.ReadLanguage`).

When a script compiles a kernel, the client checks the text for syntax errors and reads the kernel's parameters.
"""

from __future__ import annotations

from wooly_wis.languages import ParameterKind

from wooly_cuda_c.syntax.errors import CudaSourceError
from wooly_cuda_c.syntax.parser import parse, parse_arguments


def parameters(text: str, entry: str, template: str) -> tuple[ParameterKind, ...]:
    """Return the kinds of a kernel's parameters.

    Args:
        text: the source.
        entry: name of a ``__global__`` function.
        template: its template arguments as text; empty if it has none.

    Raises:
        CudaSourceError: the source has errors, or has no such kernel; the message names the line.
    """
    unit = parse(text)
    kernels = [f for f in unit.functions.get(entry, []) if f.kernel]
    if len(kernels) != 1:
        have = ", ".join(unit.kernels()) or "none"
        raise CudaSourceError(f"the source has no kernel {entry}; it has {have}", 1)
    (kernel,) = kernels
    given = parse_arguments(template, unit) if template else []
    if len(given) < sum(p.default is None for p in kernel.template):
        names = ", ".join(p.name for p in kernel.template)
        raise CudaSourceError(f"{kernel.name} is a template of {names}: name it {kernel.name}<…>", kernel.line)
    pointed = [ParameterKind.READ if p.const else ParameterKind.WRITTEN for p in kernel.params]
    return tuple([how if p.pointer else ParameterKind.NUMBER for p, how in zip(kernel.params, pointed, strict=True)])
