"""Scripts whose executor ends go on in another one, with the bits of an undisturbed run."""

import pytest

pytestmark = pytest.mark.connected


def test_a_training_goes_on_after_the_death_of_its_executor(run):
    expected, _ = run("train.py", 30, 5)
    found, said = run("train.py", 30, 5, LOSE="0,7,8,20")
    assert found == expected
    assert said.count("goes on in the executor") >= 3, said
