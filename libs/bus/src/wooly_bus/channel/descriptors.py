"""Counts the file descriptors that this process may still open."""

from __future__ import annotations

import sys
from pathlib import Path

_OPEN = Path("/proc/self/fd") if Path("/proc/self/fd").is_dir() else Path("/dev/fd")
#: The result if there is no limit.
_PLENTY = 1 << 20


def free_descriptors() -> int:
    """Descriptors that this process may still open (current `RLIMIT_NOFILE`); 0 if no descriptor is left to count them."""
    if sys.platform == "win32":  # executors do not run there, but clients import this package
        return _PLENTY
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _PLENTY
    try:
        taken = sum(1 for _ in _OPEN.iterdir()) - 1  # listing the folder itself opens one
    except OSError:
        return 0
    return max(limit - taken, 0)
