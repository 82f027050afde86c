"""torch.distributed on one and two executors: collectives, trainings, and ranks that die, are late, or ask for other things."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from wooly.torch_private import swap_memory
from wooly_testkit import forks
from wooly_testkit.executor import executor_process

from tests.distributed.conftest import standalone_url

SCRIPTS = Path(__file__).parent / "scripts"
fully_sharded = pytest.mark.skipif(swap_memory is None, reason="before torch 2.13, storages cannot be resized")


def test_collectives_of_two_ranks_have_the_bits_of_gloo(program):
    assert all("all collectives agree" in out for out in program("collectives.py").output())


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_collectives_of_gloo_on_device_tensors_have_the_values_of_host_tensors(program, ranks):
    assert all("gloo agrees" in out for out in program("on_host.py", ranks=ranks).output())


@pytest.mark.parametrize(
    ("ranks", "seeds"),
    [(2, (0, 4)), *[pytest.param(n, (100, 140), marks=pytest.mark.slow) for n in (2, 4)]],
    ids=["2-few", "2", "4"],
)
def test_random_collectives_have_the_values_of_gloo(program, ranks, seeds):
    assert all("all sequences agree" in out for out in program("random_collectives.py", *seeds, ranks=ranks).output())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_random_collectives_on_two_executors_have_the_values_of_gloo(program, url, other_url, ranks):
    found = program("random_collectives.py", 200, 220, at=[url, other_url] * (ranks // 2), ranks=ranks).output()
    assert all("all sequences agree" in out for out in found)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_random_programs_of_dtensor_have_the_values_of_a_mesh_of_cpus(program, url, other_url, ranks):
    found = program("random_dtensors.py", 100, 115, at=[url, other_url] * (ranks // 2), ranks=ranks).output()
    assert all("all programs agree" in out for out in found)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_random_trainings_have_the_weights_of_trainings_on_the_cpu(program, url, other_url, tmp_path, ranks):
    found = program("random_trainings.py", 0, 10, tmp_path, at=[url, other_url] * (ranks // 2), ranks=ranks).output()
    assert all("all trainings agree" in out for out in found)


@fully_sharded
def test_trainings_of_two_ranks_have_the_weights_of_one_process(program):
    status, out, errors = program("training.py").results()[0]
    assert status == 0 and "Time stats" not in errors, errors
    assert all(part in out for part in ("DDP agrees", "FSDP2 agrees", "tensor parallel agrees", "attention agrees"))


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


@pytest.mark.parametrize("how", ["", "destroy"])
def test_rank_that_ends_first_still_does_its_part(program, how):
    """Its script ends without a wait, or leaves the group and ends without Python's exit functions."""
    assert "[3.0, 3.0, 3.0, 3.0]" in program("leaving.py", how).output()[0]


def test_groups_are_made_again_after_they_were_destroyed(program):
    assert program("again.py").output() == ["all groups agree\n"] * 2


def test_collectives_above_the_limit_of_host_memory_are_done_in_rounds(program):
    with contextlib.ExitStack() as stack:
        how = {"start": forks.Forked, "environment": {"WOOLY_EXECUTOR_SESSION_HOST": str(16 << 20)}}
        urls = [standalone_url(stack.enter_context(executor_process(**how))) for _ in range(2)]
        assert program("rounds.py", at=urls).output() == ["all rounds agree\n"] * 2


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
@pytest.mark.parametrize("ranks", [2, 4])
def test_wrappers_hooks_pipelines_and_sharded_tensors_agree_with_gloo(program, url, other_url, ranks):
    expected = program("wrappers.py", "cpu", ranks=ranks).output()
    assert program("wrappers.py", "cuda", ranks=ranks).output() == expected
    if ranks == 2:
        assert program("wrappers.py", "cuda", at=[url, other_url]).output() == expected


@pytest.mark.slow
def test_collectives_through_the_clients_agree(program):
    assert all(
        "all collectives agree" in out for out in program("collectives.py", WOOLYAI_COLLECTIVES="clients").output()
    )
    assert "FSDP2 agrees" in program("training.py", WOOLYAI_COLLECTIVES="clients").output()[0]


@pytest.mark.slow
def test_collectives_and_trainings_of_ranks_on_two_executors_agree(program, url, other_url):
    running = program("collectives.py", "all", ranks=3, at=[url, other_url, url])
    assert all("all collectives agree" in out for out in running.output())
    running = program("training.py", "all", ranks=4, at=[url, other_url, other_url, url])
    status, out, errors = running.results()[0]
    assert status == 0, errors
    parts = (
        "DDP agrees",
        "DDP with options agrees",
        "FSDP2 agrees",
        "FSDP agrees",
        "precision runs",
        "parallel agrees",
    )
    assert all(part in out for part in parts)
    assert "the 4 ranks of this program share 2 devices" in errors


@pytest.mark.slow
def test_trainings_on_two_executors_have_the_bits_of_one(program, url, other_url):
    apart, together = [program("bits.py", at=at).output() for at in ([url, other_url], url)]
    assert apart == together and "FSDP2" in apart[0]


def test_rank_that_is_killed_ends_a_rank_at_another_executor(program, url, other_url):
    running = program("waiting.py", "killed", at=[url, other_url])
    for rank in running.ranks:
        assert rank.stdout.readline() == "ready\n"
    running.ranks[1].send_signal(signal.SIGKILL)
    text, _ = running.ranks[0].communicate(timeout=100)
    assert running.ranks[0].returncode == 7 and "rank 1 has ended" in text and "waiting.py" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "case,text",
    [
        ("killed", "rank 1 has ended"),
        ("first killed", "which carries the collectives of the group, cannot be used any more"),
    ],
)
def test_executor_that_is_killed_ends_ranks_at_others_with_the_reason(program, url, case, text):
    with executor_process(start=forks.Forked) as other:
        at = [url, standalone_url(other)] if case == "killed" else [standalone_url(other), url]
        running = program("waiting.py", case, at=at)
        for rank in running.ranks:
            assert rank.stdout.readline() == "ready\n"
        other.process.kill()
        waits = running.ranks[0 if case == "killed" else 1]
        said, _ = waits.communicate(timeout=100)
        assert waits.returncode == 7 and text in said


@pytest.mark.slow
def test_ranks_on_two_executors_may_go_through_the_clients(program, url, other_url):
    through = program("training.py", at=[url, other_url], WOOLYAI_COLLECTIVES="clients").output()
    assert "FSDP2 agrees" in through[0]


def test_profiles_of_ranks_that_share_a_device_have_its_events(program):
    """All devices of such a rank are one device, and the profile of the last one took the events of the others."""
    for rank, out in enumerate(program("profiled.py").output()):
        assert f"rank {rank}: 32.0 [('wis.mul', {rank}), ('wis.sum', {rank})" in out and out.endswith("True\n"), out


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


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_sharded_checkpoints_are_saved_and_loaded(program, url, other_url, tmp_path, ranks):
    out = program("checkpoints.py", tmp_path, ranks=ranks, at=[url, other_url] * (ranks // 2)).output()[0]
    for part in ("torch.distributed.checkpoint agrees", "full state dict agrees", "FSDP's state dict agrees"):
        assert part in out


@fully_sharded
@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    [(2, 1), *[pytest.param(*ranks, marks=pytest.mark.slow) for ranks in ((1, 2), (2, 4), (4, 2))]],
)
def test_checkpoints_are_loaded_by_another_number_of_ranks(program, url, other_url, tmp_path, saved_by, loaded_by):
    for does, ranks in (("save", saved_by), ("load", loaded_by)):
        at = [url, other_url, url, other_url][:ranks]
        out = program("resharding.py", does, tmp_path, ranks=ranks, at=at).output()[0]
        assert out == "FSDP2 agrees\ntensor parallel agrees\nboth agrees\n"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_accelerate_and_trainer_run_with_several_ranks(program, url, other_url, tmp_path, ranks):
    out = program("libraries.py", tmp_path, ranks=ranks, at=[url, other_url] * (ranks // 2)).output()[0]
    assert "Accelerate agrees" in out and "Trainer agrees" in out


@pytest.mark.parametrize("executors", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_graphs_with_collectives_have_the_bits_of_work_without_graphs(program, url, other_url, executors):
    at = [url, other_url] if executors == 2 else url
    assert program("graphs.py", at=at).output() == ["all graphs agree\n"] * 2


def test_rank_that_prints_more_than_a_pipe_holds_lets_the_others_end(program):
    first, last = program("printing.py").output()
    assert first.endswith("all were there\n") and len(last) > 1 << 20
