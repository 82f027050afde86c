"""What this process may use of its machine: memory and cores, or the limits of its container (cgroups), and folders with code."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

#: A memory limit of at least this many bytes means that the group is unlimited.
_ENDLESS = 1 << 60
_CGROUPS = Path("sys/fs/cgroup")
#: Seconds between two calls of `bound`.
BOUND_S = 0.25
#: Bytes that `bound` leaves to other processes, and bytes that it always grants, because without any memory a process fails.
_MARGIN, _SMALL = 256 << 20, 32 << 20


def memory(root: Path = Path("/")) -> int:
    """Bytes of memory that this process may use: the memory of the machine, or the smallest limit of its control groups.

    Args:
        root: root of the file system.
    """
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for group in _groups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _number(group / name)
            if limit is not None and 0 < limit < _ENDLESS:
                found = min(found, limit)
    return found


def cores(root: Path = Path("/")) -> int:
    """Hardware threads that this process may use at the same time, at least 1: its CPU affinity, or the CPU quota of a group.

    A quota is rounded up.

    Args:
        root: root of the file system.
    """
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _groups(root, "cpu"):
        quota, _, period = _text(group / "cpu.max").partition(" ")
        if not period:
            quota, period = _text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(quota) and int(period):
            found = min(found, math.ceil(int(quota) / int(period)))
    return max(found, 1)


def available(root: Path = Path("/")) -> int | None:
    """Bytes of memory that can be taken before the system ends processes: of the machine, and of the groups of this process.

    Args:
        root: root of the file system.

    Returns:
        The number of bytes; None if the system does not say it.
    """
    told = dict(re.findall(r"^(MemAvailable|SwapFree):\s*(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE))
    if "MemAvailable" not in told:
        return None
    found = sum(map(int, told.values())) << 10
    for group in _groups(root, "memory"):
        for limited, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            limit, usage = _number(group / limited), _number(group / used)
            if limit is not None and usage is not None and 0 < limit < _ENDLESS:
                # The pages of files that nobody used lately count as used, but are given back first.
                files = re.search(r"^(?:total_)?inactive_file (\d+)", _text(group / "memory.stat"), re.MULTILINE)
                found = min(found, max(limit - usage, 0) + (int(files[1]) if files else 0))
    return found


def spare(root: Path = Path("/")) -> int | None:
    """Bytes that a process may still take, so that other processes keep a little; None if the system does not say it.

    Args:
        root: root of the file system.
    """
    left = available(root)
    return None if left is None else max(left - _MARGIN, 0)


def bound(nbytes: int) -> None:
    """Limit the private memory of this process: a larger allocation then fails, and the process continues.

    Without a limit, the machine overcommits memory, and its kernel kills a process when the memory is used. Other processes take
    memory, too, so call this again and again (`BOUND_S`).

    Args:
        nbytes: the limit, in bytes. It is lower while the machine cannot give that much; small allocations always succeed.
    """
    import resource  # not on Windows, whose clients ask for `cores`

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    left = spare()
    if left is not None:
        own = int(_text(Path("/proc/self/statm")).split()[5]) * resource.getpagesize()
        nbytes = min(nbytes, own + max(left, _SMALL))
    resource.setrlimit(resource.RLIMIT_DATA, (nbytes if hard < 0 else min(nbytes, hard), hard))


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of the control groups of this process, innermost first.

    In a container, the group may be mounted at the top, while its name is still the path on the machine. Then the folders of that
    path are missing, and the top folder is the group of the container.
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


def why_no_code(folder: Path) -> str:
    """Why code that is kept in this folder cannot run; empty if nothing is known to prevent it.

    PoCL ends the process when it cannot load a kernel's library. Hardened machines mount `/tmp` and `/home` with `noexec`.
    """
    known = next((p for p in (folder, *folder.absolute().parents) if p.is_dir()), None)
    if known is None or not hasattr(os, "ST_NOEXEC") or not os.statvfs(known).f_flag & os.ST_NOEXEC:
        return ""
    return f"kernels cannot run from {folder}: its file system is mounted with noexec"
