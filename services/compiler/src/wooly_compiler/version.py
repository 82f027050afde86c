"""The compiler's version: a digest of all sources that decide its output. A compiler does not use artifacts of another
version.
"""

from __future__ import annotations

import functools
from pathlib import Path

from wooly_wis.artifact import compiler_version

import wooly_compiler


@functools.cache
def version() -> str:
    """Return twelve hex digits over the sources of the compiler, of the installed kernel languages, and of the formats that it
    uses.
    """
    return compiler_version(Path(next(iter(wooly_compiler.__path__))))
