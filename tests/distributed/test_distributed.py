"""torch.distributed on one executor: collectives, trainings, and ranks that die, are late, or ask for different things."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "scripts"


def test_collectives_of_two_ranks_have_the_bits_of_gloo(program):
    assert all("all collectives agree" in out for out in program("collectives.py").output())


def test_trainings_of_two_ranks_have_the_weights_of_one_process(program):
    out = program("training.py").output()[0]
    assert all(part in out for part in ("DDP agrees", "FSDP2 agrees", "tensor parallel agrees"))


def test_rank_that_is_killed_ends_the_others_with_the_reason(program):
    running = program("waiting.py", "killed", ranks=3)
    for rank in running.ranks:
        assert rank.stdout.readline() == "ready\n"
    running.ranks[1].send_signal(signal.SIGKILL)
    begun = time.monotonic()
    for rank in (running.ranks[0], running.ranks[2]):
        text, _ = rank.communicate(timeout=100)
        assert rank.returncode == 7 and "rank 1 has ended" in text and "all_reduce" in text and "waiting.py" in text
    print(f"the others ended after {time.monotonic() - begun:.2f} s")


def test_ranks_that_call_different_collectives_are_told_where(program):
    for status, out, _ in program("waiting.py", "different").results():
        assert status == 7
        assert "different collective: all_reduce and broadcast" in out
        assert out.count("waiting.py:") >= 2


@pytest.mark.slow
def test_rank_that_is_late_is_waited_for_until_the_timeout(program):
    assert all("[4.0, 4.0, 4.0, 4.0]" in out for out in program("waiting.py", "slow").output())
    running = program("waiting.py", "late")
    text, _ = running.ranks[0].communicate(timeout=100)
    assert running.ranks[0].returncode == 7 and "rank 1 did not come to all_reduce" in text and "within 1 s" in text


@pytest.mark.slow
def test_collectives_and_trainings_of_three_ranks_agree(program):
    assert all("all collectives agree" in out for out in program("collectives.py", "all", ranks=3).output())
    out = program("training.py", "all", ranks=4).output()[0]
    parts = (
        "DDP agrees",
        "DDP with options agrees",
        "FSDP2 agrees",
        "FSDP agrees",
        "precision runs",
        "parallel agrees",
    )
    assert all(part in out for part in parts)


@pytest.mark.slow
def test_collectives_through_the_clients_agree(program):
    assert all(
        "all collectives agree" in out for out in program("collectives.py", WOOLYAI_COLLECTIVES="clients").output()
    )
    assert "FSDP2 agrees" in program("training.py", WOOLYAI_COLLECTIVES="clients").output()[0]


@pytest.mark.slow
def test_ranks_on_two_executors_get_an_error_with_two_cures_of_which_one_is_tried(program, url, other_url):
    for status, _, errors in program("waiting.py", "slow", at=[url, other_url]).results():
        assert status == 1 and "on 2 executors" in errors
        assert "WOOLYAI_NODE" in errors and "WOOLYAI_COLLECTIVES=clients" in errors
    through = program("training.py", at=[url, other_url], WOOLYAI_COLLECTIVES="clients").output()
    assert "FSDP2 agrees" in through[0]


@pytest.mark.slow
def test_torchrun_runs_an_unmodified_script(url):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    wooly = [sys.executable, "-m", "wooly", "run", "torchrun", "--nproc-per-node", "2", "--master-port", str(port)]
    done = subprocess.run(
        [*wooly, str(SCRIPTS / "training.py")],
        env=os.environ | {"WOOLYAI_EXECUTOR_URL": url, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0 and "tensor parallel agrees" in done.stdout, done.stderr
    assert "the 2 ranks of this program share one device" in done.stderr
