"""Random programs whose executor is lost again and again show what they show on the CPU."""

import pytest

pytestmark = pytest.mark.connected
GONE_ON = "the session goes on in the executor"


@pytest.mark.parametrize(
    ("seeds", "every", "checkpoint_s"),
    [((0, 6), 25, "10"), pytest.param((100, 160), 60, "0", marks=pytest.mark.slow)],
    ids=["frames", "cuts"],
)
def test_random_programs_equal_the_cpu_although_their_executor_is_lost(run, seeds, every, checkpoint_s):
    found, said = run("random_programs.py", *seeds, every, WOOLYAI_CHECKPOINT_S=checkpoint_s)
    *differ, last = found.splitlines()
    assert not differ and last.startswith(f"{seeds[1] - seeds[0]} programs")
    assert said.count(GONE_ON) >= 3, said
