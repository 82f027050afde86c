"""Freed memory of an executor on a CPU stays in its process, up to a limit."""

import functools
import json
import platform
import subprocess
import sys

import pytest
from wooly_executor.heap import KEPT, keep_freed

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these parameters")
#: Allocates and frees blocks as PyTorch does in a training step: some MiB each, several at a time. Prints faults, and what stays
#: resident. Before that, a fork says what a device of 1 GiB keeps. The script does not import PyTorch, which takes a second.
SCRIPT = """
import ctypes, json, os, resource, sys, threading
from wooly_executor.heap import give_back, keep_freed
if not os.fork():
    print(keep_freed(1 << 30), flush=True)
    os._exit(0)
assert os.wait()[1] == 0
kept = keep_freed(16 << 30)

libc = ctypes.CDLL(None)

def step(blocks, nbytes=4 << 20):
    found = [ctypes.c_void_p() for _ in range(blocks)]
    for block in found:
        assert libc.posix_memalign(ctypes.byref(block), ctypes.c_size_t(64), ctypes.c_size_t(nbytes)) == 0
        libc.memset(block, 1, ctypes.c_size_t(nbytes))
    for block in found:
        libc.free(block)

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def work():
    for _ in range(8):  # the heap may grow a second time, if a small object lies behind the first blocks
        step(16)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(2):
        step(16)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    start = resident()
    step(80)
    give_back()
    print(json.dumps({"kept": kept, "faults": faults, "left": resident() - start}))

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


@functools.cache
def measured(**environment):
    """What the script found in a new process with this environment: the C library reads it at its start."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    small, found = map(json.loads, done.stdout.splitlines())
    return found | {"kept of 1 GiB": small}


def test_blocks_of_a_step_get_pages_that_the_process_has():
    found = measured()
    assert found["kept"] == KEPT and found["faults"] < 100
    assert measured(MALLOC_TRIM_THRESHOLD_="131072")["faults"] > 2 * 16 * 1024 // 2


def test_freed_memory_can_be_given_back_to_the_system():
    assert measured()["left"] < 16 << 20


def test_a_small_device_keeps_a_sixteenth_of_its_memory():
    assert measured()["kept of 1 GiB"] == 64 << 20


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_own_settings_of_the_c_library_are_left_alone(name):
    assert keep_freed(1 << 40, {name: "1"}) == 0
