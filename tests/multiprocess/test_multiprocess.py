"""Tensors and events that processes hand to each other: real processes, compared with the CPU."""

import signal

import pytest

PARTS = ("arguments", "views", "counts", "errors", "events", "training")


def test_two_processes_share_tensors_modules_and_events(script, tmp_path):
    one, two = [script("sharing.py", how, tmp_path / "way") for how in ("listen", "connect")]
    out = one.output()
    assert [line.split()[0] for line in out.splitlines()] == list(PARTS), out
    two.output()


@pytest.mark.slow  # the child imports PyTorch
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_child_process_shares_tensors_modules_and_events(script, method):
    out = script("sharing.py", method).output()
    assert [line.split()[0] for line in out.splitlines()] == list(PARTS), out


@pytest.mark.slow  # the children import PyTorch
def test_hogwild_pool_and_queue_have_the_results_of_the_cpu(script):
    assert script("hogwild.py").output().splitlines() == ["hogwild agrees", "pool agrees", "queue agrees"]


def pair(script, tmp_path, what, **where):
    return [script("deaths.py", role, tmp_path / "way", what, **where.get(role, {})) for role in ("sender", "receiver")]


def test_receiver_keeps_the_tensor_of_a_sender_that_was_killed(script, tmp_path):
    sender, receiver = pair(script, tmp_path, "sender-dies")
    out = receiver.output()
    assert "no buffer of this size" in out and out.splitlines()[-1] == "[10.0, 20.0, 30.0, 40.0]"
    assert sender.process.wait(60) == -signal.SIGKILL


def test_sender_keeps_the_tensor_when_its_receiver_was_killed(script, tmp_path):
    sender, receiver = pair(script, tmp_path, "receiver-dies")
    assert sender.output().split("\n")[0] == "[8.0, 16.0, 24.0, 32.0] [1.0, 1.0, 1.0, 1.0]"
    assert receiver.process.wait(60) == -signal.SIGKILL


def test_tensor_of_another_executor_is_refused_with_the_cure(script, tmp_path, other_url):
    sender, receiver = pair(script, tmp_path, "elsewhere", receiver={"at": other_url})
    assert "processes share memory on one executor only" in receiver.output()
    assert sender.output() == "6.0\n"
