"""Tensors and events that processes hand to each other: real processes, compared with the CPU."""

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
