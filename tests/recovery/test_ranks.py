"""Programs of several ranks go on after the death of an executor, with the bits of an undisturbed run."""

from pathlib import Path

import pytest
from wooly_testkit import forks

pytestmark = pytest.mark.connected
SCRIPTS = Path(__file__).parent / "scripts"
TIMEOUT_S = 120
GONE_ON = "the session goes on in the executor"


@pytest.fixture
def torchrun(cluster, alice):
    """Run a script in several ranks. Returns what each rank has printed, in the order of the ranks, and what all said."""

    def run(script, *arguments, ranks=2, gpus=2, code=0, **env):
        launcher = ["torchrun", "--standalone", "--nproc-per-node", str(ranks), str(SCRIPTS / script)]
        argv = ["run", "--gpus", str(gpus), *launcher, *map(str, arguments)]
        more = {"OMP_NUM_THREADS": "1", "PIDS": str(cluster.keeper.pids), "PYTHONPATH": str(SCRIPTS), **env}
        done = forks.run("wooly", *argv, env=alice.env() | more, timeout=TIMEOUT_S)
        assert done.returncode == code, done.stderr + done.stdout
        return sorted(done.stdout.splitlines()), done.stderr

    return run


@pytest.fixture(scope="module")
def undisturbed():
    return {}


@pytest.fixture
def expect(torchrun, undisturbed):
    """The output of an undisturbed run."""

    def expect(script, *arguments, **how):
        key = script, arguments, tuple(how.items())
        if key not in undisturbed:
            undisturbed[key] = torchrun(script, *arguments, **how, WOOLYAI_RECOVERY="off")[0]
        return undisturbed[key]

    return expect


@pytest.mark.parametrize("lost", [0, 1], ids=["first", "second"])
def test_ranks_on_two_executors_go_on_after_the_death_of_one(torchrun, expect, lost):
    """The first rank's executor carries the collectives."""
    expected = expect("ranks.py", 14)
    found, said = torchrun("ranks.py", 14, LOSE="0,7", LOSE_RANK=str(lost), WOOLYAI_CHECKPOINT_S="0")
    assert found == expected
    assert said.count(GONE_ON) >= 4, said
