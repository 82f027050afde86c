"""Targets of a build: a toolchain and an architecture, with names like ``cuda:sm_90``, ``hip:gfx942``, ``opencl:cpu``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from wooly_wis.artifact import CUDA_CAPABILITIES

from wooly_compiler.errors import BuildError
from wooly_compiler.render.dialects import CUDA, HIP, OPENCL, Dialect
from wooly_compiler.render.source import Form


@dataclass(frozen=True, slots=True)
class Target:
    """One kind of chip.

    Attributes:
        name: its name on artifacts.
        toolchain: the compiler: ``cuda``, ``hip`` or ``opencl``.
        arch: the toolchain's name of the chip.
        dialect: the dialect of C that the toolchain reads.
        form: how kernels are printed for it.
    """

    name: str
    toolchain: str
    arch: str
    dialect: Dialect
    form: Form


CUDA_ARCHS: Final = tuple([f"sm_{major}{minor}" for major, minor in CUDA_CAPABILITIES])
HIP_ARCHS: Final = ("gfx90a", "gfx942", "gfx1100", "gfx1201")
TARGETS: Final[dict[str, Target]] = {
    t.name: t
    for t in (
        Target("opencl:cpu", "opencl", "cpu", OPENCL, Form.LOOPS),
        Target("opencl:gpu", "opencl", "gpu", OPENCL, Form.SIMT),
        *[Target(f"cuda:{a}", "cuda", a, CUDA, Form.SIMT) for a in CUDA_ARCHS],
        *[Target(f"hip:{a}", "hip", a, HIP, Form.SIMT) for a in HIP_ARCHS],
    )
}


def target(name: str) -> Target:
    """Return the target with this name.

    Raises:
        BuildError: there is no such target.
    """
    found = TARGETS.get(name)
    if found is None:
        raise BuildError(f"there is no target {name!r}; there are {', '.join(TARGETS)}")
    return found
