"""What this process may use of its machine: all of it, or what its container was given (Linux control groups, both versions)."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path

#: What an unlimited group says where it says a number.
_ENDLESS = 1 << 60
_CGROUPS = Path("sys/fs/cgroup")


def memory(root: Path = Path("/")) -> int:
    """Bytes of memory: the machine's, or less where a group that this process is in has a limit.

    Args:
        root: of the file system.
    """
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for group in _groups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _number(group / name)
            if limit is not None and 0 < limit < _ENDLESS:
                found = min(found, limit)
    return found


def cores(root: Path = Path("/")) -> int:
    """Hardware threads that may run at a time, at least 1: those that this process may run on, or what a group's quota of CPU
    time comes to, rounded up.

    Args:
        root: of the file system.
    """
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _groups(root, "cpu"):
        quota, _, period = _text(group / "cpu.max").partition(" ")
        if not period:
            quota, period = _text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(quota) and int(period):
            found = min(found, math.ceil(int(quota) / int(period)))
    return max(found, 1)


def bound(nbytes: int) -> None:
    """Let this process have so many bytes of memory of its own at most: what asks for more is refused it, and the process lives.

    Without this a machine gives what it does not have, and ends a process when that is used.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (nbytes if hard < 0 else min(nbytes, hard), hard))


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of the groups that this process is in, the innermost first.

    A container may see its own group where the machine's would be, while its name is still the machine's: then folders on the
    way are missing, and the top is its own.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / _CGROUPS / controller if controllers else root / _CGROUPS
        inner = top / name.lstrip("/")
        for folder in (inner, *inner.parents):
            if ".." not in folder.parts:
                yield folder
            if folder == top:
                break


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None
