"""Nothing grows during a training:

neither buffers on the device, nor the client's containers, nor the memory of both processes.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from wooly.failures import RUNS_REMEMBERED
from wooly.recorder import PROGRAMS_KEPT
from wooly_testkit.executor import executor_process

pytestmark = pytest.mark.connected
PROGRAM = Path(__file__).with_name("long_training.py")
MIB = 1 << 20
#: Memory of one program on the client, at most, in MiB.
PROGRAM_MIB = 16 / 1024

#: Containers that may grow up to their own limit after the warm-up.
LIMITED = {
    "recorder._sent": PROGRAMS_KEPT,  # the timer ends programs at varying places
}
#: Data of one step is released again. It is bounded by the size of a program and by how far the client runs ahead.
PASSING = {
    "recorder.words": 2000,
    "recorder.bind": 1000,
    "recorder.slot_of": 1000,
    "recorder.params": 1000,
    "recorder.origins": 500,
    "recorder._frees": 1000,
    "recorder._freed": 1000,
    "heap.dead": 1000,
    "heap._reusable": 1000,
    "channel._unacked": 50_000,
}


def train(steps, warm_up, read_every):
    with executor_process() as running:
        argv = [running.endpoints[0], running.token, running.process.pid, steps, warm_up, read_every]
        done = subprocess.run(
            [sys.executable, str(PROGRAM), *map(str, argv)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


def assert_nothing_piled_up(found):
    early, end = found["early"], found["end"]
    assert end["live"] == early["live"] and end["live"][0] > 0
    assert end["remote"]["programs"] > early["remote"]["programs"]
    # The device holds the client's live buffers, and those whose last frees were not sent yet.
    for name in ("buffers", "bytes"):
        assert end["remote"][name] == early["remote"][name]
    assert end["remote"]["buffers"] == end["live"][0]
    assert end["containers"].keys() == early["containers"].keys() == found["peak"].keys()
    # Runs that are not acknowledged are kept, too. On a busy machine, the client runs ahead by thousands.
    runs = 2 * RUNS_REMEMBERED + found["peak"]["channel._unacked"]
    limits = LIMITED | PASSING | {"failures.inflight": runs, "failures._run_of": runs}
    grown = {
        name: (early["containers"][name], highest)
        for name, highest in found["peak"].items()
        if highest > limits.get(name, early["containers"][name])
    }
    assert grown == {}


def growth(found, group, name):
    return max(found["end"][group][name] - found["early"][group][name], 0)


@pytest.mark.slow
@pytest.mark.parametrize("read_every", [50, 0], ids=["reading", "never-reading"])
def test_training_of_2000_steps_keeps_containers_small(read_every):
    assert_nothing_piled_up(train(2000, 500, read_every))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("read_every", [100, 0], ids=["reading", "never-reading"])
def test_training_of_100000_steps_does_not_grow(read_every, capsys):
    found = train(100_000, 5000, read_every)
    assert_nothing_piled_up(found)
    # On a busy machine, the timer ends programs at more places, and both sides keep up to `PROGRAMS_KEPT` of them. A program of a
    # whole step takes a tenth of a MiB on the executor, a part of a step takes less: the executor's account says how much it is.
    programs = {
        "client": growth(found, "containers", "recorder._sent") * PROGRAM_MIB,
        "executor": growth(found, "remote", "host_decoded") / MIB,
    }
    for side, more in programs.items():
        early, end = found["early"][f"{side}_rss"] / MIB, found["end"][f"{side}_rss"] / MIB
        said = f"{side}: {early:.1f} MiB after 5,000 steps, {end:.1f} MiB after 100,000, {more:.1f} MiB of it programs"
        with capsys.disabled():
            print(f"\n{said}")
        assert end - early < 8 + more, said
