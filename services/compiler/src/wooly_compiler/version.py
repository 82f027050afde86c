"""Which compiler this is: a digest of everything that decides what it makes. Artifacts of another one are not this one's."""

from __future__ import annotations

import functools
from pathlib import Path

from wooly_wis.artifact import compiler_version

import wooly_compiler


@functools.cache
def version() -> str:
    """Twelve hex digits over the sources of the compiler, of the installed languages of kernels, and of what it speaks."""
    return compiler_version(Path(next(iter(wooly_compiler.__path__))))
