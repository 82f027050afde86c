"""Limits of control groups replace the size of the machine. The folder trees are those of Docker and Kubernetes."""

import os
import subprocess
import sys

import pytest
from wooly_bus import host

PHYSICAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
CORES = len(os.sched_getaffinity(0))


@pytest.fixture
def machine(tmp_path):
    """A file system with these files."""

    def make(**files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        return tmp_path

    return make


def files(groups, **limits):
    return {"proc/self/cgroup": groups} | {f"sys/fs/cgroup/{name}": text for name, text in limits.items()}


def test_host_without_limits_is_whole_machine(machine):
    assert host.memory(machine()) == PHYSICAL and host.cores(machine()) == CORES
    root = machine(**files("0::/user.slice", **{"user.slice/memory.max": "max", "user.slice/cpu.max": "max 100000"}))
    assert host.memory(root) == PHYSICAL and host.cores(root) == CORES


def test_host_group_at_top_limits(machine):
    root = machine(**files("0::/", **{"memory.max": "1073741824", "cpu.max": "50000 100000"}))
    assert host.memory(root) == 1 << 30 and host.cores(root) == 1


def test_host_nested_groups_smallest_limit_counts(machine):
    limits = {"memory.max": "max", "kubepods/memory.max": str(1 << 28), "kubepods/pod1/memory.max": str(1 << 30)}
    assert host.memory(machine(**files("0::/kubepods/pod1", **limits))) == 1 << 28


def test_host_cgroup_version_1_limits(machine):
    groups = "9:name=systemd:/\n5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/"
    endless = {
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "cpu/cpu.cfs_quota_us": "-1",
        "cpu/cpu.cfs_period_us": "100000",
    }
    root = machine(**files(groups, **endless))
    assert host.memory(root) == PHYSICAL and host.cores(root) == CORES
    limited = {"memory/docker/abc/memory.limit_in_bytes": str(1 << 29), "cpu/docker/abc/cpu.cfs_quota_us": "100001"}
    root = machine(**files(groups, **limited, **{"cpu/docker/abc/cpu.cfs_period_us": "100000"}))
    assert host.memory(root) == 1 << 29 and host.cores(root) == min(2, CORES)


def test_host_group_with_machine_path_limits(machine):
    root = machine(**files("4:memory:/docker/abc", **{"memory/memory.limit_in_bytes": str(1 << 29)}))
    assert host.memory(root) == 1 << 29
    root = machine(**files("0::/../../other", **{"memory.max": str(1 << 27)}))
    assert host.memory(root) == 1 << 27


MEMINFO = {"proc/meminfo": "MemTotal: 8388608 kB\nMemAvailable:    4194304 kB\nMemFree: 1 kB"}


def test_host_available_memory_is_the_least_of_the_machine_and_its_groups(machine):
    assert host.available(machine()) is None
    swap = {"proc/meminfo": "MemAvailable: 1024 kB\nSwapTotal: 9 kB\nSwapFree: 512 kB"}
    assert host.available(machine(**swap)) == 1536 << 10
    assert host.available(machine(**MEMINFO)) == 4 << 30
    groups = files(
        "0::/a/b", **{"a/memory.max": str(3 << 30), "a/memory.current": str(1 << 30), "a/b/memory.max": "max"}
    )
    assert host.available(machine(**MEMINFO, **groups)) == 2 << 30
    stat = {"sys/fs/cgroup/a/memory.stat": f"anon 5\ninactive_file {1 << 20}\nactive_file 7"}
    assert host.available(machine(**stat)) == (2 << 30) + (1 << 20)
    over = {"sys/fs/cgroup/a/memory.current": str(4 << 30), "sys/fs/cgroup/a/memory.stat": "anon 5"}
    assert host.available(machine(**over)) == 0


def test_host_spare_memory_leaves_a_margin(machine):
    assert host.spare(machine()) is None
    assert host.spare(machine(**MEMINFO)) == (4 << 30) - (256 << 20)
    assert host.spare(machine(**{"proc/meminfo": "MemAvailable: 1024 kB"})) == 0


def test_host_available_memory_in_cgroup_version_1(machine):
    limits = {"memory/x/memory.limit_in_bytes": str(1 << 30), "memory/x/memory.usage_in_bytes": str(1 << 29)}
    root = machine(**MEMINFO, **files("4:memory:/x", **limits))
    assert host.available(root) == 1 << 29


def test_process_that_takes_more_than_others_leave_gets_an_error_and_goes_on():
    """The system would end it: the machine has promised more than it has."""
    code = """
import mmap
from wooly_bus import host
take = lambda n: mmap.mmap(-1, n, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
host.available = lambda root: host._MARGIN + (600 << 20)
host.bound(1 << 50)
kept = take(400 << 20)
try:
    take(400 << 20)
except OSError as e:
    print("refused", e.errno)
host.bound(1 << 50)  # others left as much again
kept = kept, take(400 << 20)
host.available = lambda root: 0
host.bound(1 << 50)
kept = kept, take(20 << 20)
try:
    take(400 << 20)
except OSError as e:
    print("refused", e.errno)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "refused 12\nrefused 12\n", done.stderr


def test_host_malformed_limits_are_ignored(machine):
    root = machine(**files("0::/", **{"memory.max": "much", "cpu.max": "0 0"}))
    assert host.memory(root) == PHYSICAL and host.cores(root) == CORES
