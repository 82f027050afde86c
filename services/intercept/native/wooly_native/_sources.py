"""The digest of the sources from which the module was built. A checkout's sources may be newer than its module."""

from __future__ import annotations

import hashlib
from pathlib import Path


def digest(package: Path) -> str | None:
    """Return the digest of the C++ sources beside the package; None if there are none, because a wheel was installed."""
    folder = package.parent / "src"
    if not (folder / "kernel.cpp").is_file():  # a wheel's neighbours may have a folder of this name, too
        return None
    found = hashlib.sha256()
    for file in sorted([*folder.glob("*.cpp"), *folder.glob("*.h")]):
        found.update(file.name.encode() + b"\0" + file.read_bytes())
    return found.hexdigest()
