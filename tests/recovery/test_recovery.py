"""Scripts whose executor ends go on in another one, with the bits of an undisturbed run."""

import pytest

pytestmark = pytest.mark.connected
GONE_ON = "the session goes on in the executor"

CASES = {
    "train": (("train.py", 24, 5), "0,6,13"),
    "generate": (("generate.py", 12), "1,7,15"),
    "lora": (("lora.py", 20), "0,5,12"),
    "triton": (("triton_loop.py", 20), "3,12"),
}


@pytest.mark.parametrize("checkpoint_s", ["0", "10"], ids=["cuts", "frames"])
@pytest.mark.parametrize("case", CASES)
def test_a_script_goes_on_after_the_death_of_its_executor(run, case, checkpoint_s):
    command, lose = CASES[case]
    expected, _ = run(*command, WOOLYAI_RECOVERY="off")
    found, said = run(*command, LOSE=lose, WOOLYAI_CHECKPOINT_S=checkpoint_s)
    assert found == expected
    assert said.count(GONE_ON) >= 2, said
