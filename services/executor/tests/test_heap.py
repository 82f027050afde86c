"""Freed memory of an executor on a CPU stays in its process, up to a limit."""

import json
import platform
import subprocess
import sys

import pytest
from wooly_executor.heap import KEPT, keep_freed

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these parameters")
#: Allocates and frees blocks as a training step does: some MiB each, several at a time. Prints faults, and what stays resident.
SCRIPT = """
import json, resource, sys, threading
import torch
from wooly_executor.heap import give_back, keep_freed
kept = keep_freed(int(sys.argv[1]))

def step(blocks, nbytes=4 << 20):
    found = [torch.ones(nbytes, dtype=torch.uint8) for _ in range(blocks)]

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def work():
    for _ in range(3):
        step(32)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        step(32)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    start = resident()
    step(200)
    give_back()
    print(json.dumps({"kept": kept, "faults": faults, "left": resident() - start}))

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def measured(memory, **environment):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(memory)], env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_blocks_of_a_step_get_pages_that_the_process_has():
    found = measured(16 << 30)
    assert found["kept"] == KEPT and found["faults"] < 100
    assert measured(16 << 30, MALLOC_TRIM_THRESHOLD_="131072")["faults"] > 10 * 32 * 1024 // 2


def test_freed_memory_can_be_given_back_to_the_system():
    assert measured(16 << 30)["left"] < 16 << 20


def test_a_small_device_keeps_a_sixteenth_of_its_memory():
    assert measured(1 << 30)["kept"] == 64 << 20


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_own_settings_of_the_c_library_are_left_alone(name):
    assert keep_freed(1 << 40, {name: "1"}) == 0
