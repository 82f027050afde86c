"""Which compiler this is: a digest of everything that decides what it makes. Artifacts of another one are not this one's."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import wooly_wis

import wooly_compiler


@functools.cache
def version() -> str:
    """Twelve hex digits over the sources of the compiler and of what it speaks."""
    found = hashlib.blake2b(digest_size=6)
    for package in (wooly_compiler, wooly_wis):
        root = Path(package.__path__[0])
        for path in sorted(root.rglob("*.py")):
            found.update(f"{root.name}/{path.relative_to(root)}\0".encode())
            found.update(path.read_bytes())
    return found.hexdigest()
