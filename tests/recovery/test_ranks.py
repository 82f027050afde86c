"""Programs of several ranks go on after the death of an executor, with the bits of an undisturbed run."""

import os
import random
import secrets
import signal
import threading
import time
from pathlib import Path

import pytest
from wooly import ranks as gangs
from wooly_testkit import forks

from tests.distributed.conftest import Program

pytestmark = [pytest.mark.connected, pytest.mark.timeout(900)]
SCRIPTS = Path(__file__).parent / "scripts"
#: A program of torchrun imports PyTorch in three processes, which takes minutes on a machine that is busy with other work.
TIMEOUT_S = 400
EXECUTORS = (({"NODE": "node-a"}, {}), ({"NODE": "node-b"}, {}))
GONE_ON = "the session goes on in the executor"


@pytest.fixture
def environment(cluster, alice):
    """Waits for both executors. Returns the environment of a program."""

    def environment(**env):
        cluster.wait(lambda: [n["state"] for n in cluster.rest("GET", "nodes")["nodes"]] == ["active"] * 2)
        more = {"OMP_NUM_THREADS": "1", "PIDS": str(cluster.keeper.pids), "PYTHONPATH": str(SCRIPTS), **env}
        return alice.env() | more

    return environment


@pytest.fixture
def torchrun(environment):
    """Run a script in several ranks. Returns what each rank has printed, in the order of the ranks, and what all said."""

    def run(script, *arguments, ranks=2, gpus=2, code=0, **env):
        launcher = ["torchrun", "--standalone", "--nproc-per-node", str(ranks), str(SCRIPTS / script)]
        argv = ["run", "--gpus", str(gpus), *launcher, *map(str, arguments)]
        done = forks.run("wooly", *argv, env=environment(**env), timeout=TIMEOUT_S)
        assert done.returncode == code, done.stderr + done.stdout
        return sorted(done.stdout.splitlines()), done.stderr

    return run


@pytest.fixture
def forked(environment):
    """As `torchrun`, but each rank is a fork with PyTorch: torchrun's ranks import it again, which takes ten seconds."""

    def run(script, *arguments, gpus=2, **env):
        more = {"WOOLYAI_GPU_COUNT": str(gpus), gangs.VARIABLE: secrets.token_hex(16)}
        program = Program(None, SCRIPTS / script, *arguments, **environment(**env) | more)
        try:
            found = program.results()
        finally:
            program.close()
        assert [status for status, _, _ in found] == [0, 0], found
        return [out.strip() for _, out, _ in found], "".join([errors for _, _, errors in found])

    return run


@pytest.fixture(scope="module")
def undisturbed():
    return {}


@pytest.fixture
def expect(torchrun, undisturbed):
    """The output of an undisturbed run."""

    def expect(script, *arguments, run=torchrun, **how):
        key = script, arguments, tuple(how.items())
        if key not in undisturbed:
            undisturbed[key] = run(script, *arguments, **how, WOOLYAI_RECOVERY="off")[0]
        return undisturbed[key]

    return expect


LOSSES = {
    # both executors carry the collectives; the first rank's executor carries them alone
    "second": {"LOSE_RANK": "1", "LEAST_SHARE": "1"},
    "second of one carrier": {"LOSE_RANK": "1"},
    "first": {"LOSE_RANK": "0"},
    "frames": {"LOSE_RANK": "1", "WOOLYAI_CHECKPOINT_S": "1000"},
    "second, in the second group": {"LOSE_RANK": "1", "AGAIN": "4"},
    "link": {"LOSE_RANK": "0", "CUT": "1"},
}


def test_ranks_on_two_executors_go_on_after_the_loss_of_one_of_them(forked, expect):
    found, said = forked("ranks.py", 14, **{"LOSE": "0,7", "WOOLYAI_CHECKPOINT_S": "0"} | LOSSES["second"])
    assert found == expect("ranks.py", 14, run=forked)
    assert said.count(GONE_ON) >= 4, said


@pytest.mark.slow
@pytest.mark.parametrize("how", LOSSES)
def test_ranks_of_torchrun_on_two_executors_go_on_after_the_loss_of_one(torchrun, expect, how):
    found, said = torchrun("ranks.py", 14, **{"LOSE": "0,7", "WOOLYAI_CHECKPOINT_S": "0"} | LOSSES[how])
    assert found == expect("ranks.py", 14)
    assert said.count(GONE_ON) >= 4, said


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [1, 2])
def test_ranks_that_replay_a_graph_with_collectives_go_on_after_a_loss(torchrun, expect, gpus):
    found, said = torchrun("ranks.py", 14, gpus=gpus, LOSE="2,9", GRAPH="1", WOOLYAI_CHECKPOINT_S="0")
    assert found == expect("ranks.py", 14, gpus=gpus, GRAPH="1")
    assert said.count(GONE_ON) >= 4, said


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "gpus"), [(2, 1), (4, 1), (4, 2)])
def test_ranks_that_share_executors_go_on_after_the_death_of_one(torchrun, expect, ranks, gpus):
    found, said = torchrun("ranks.py", 14, ranks=ranks, gpus=gpus, LOSE="0,7", WOOLYAI_CHECKPOINT_S="0")
    assert found == expect("ranks.py", 14, ranks=ranks, gpus=gpus)
    assert said.count(GONE_ON) >= 2 * ranks, said


@pytest.mark.slow
@pytest.mark.parametrize("how", ["move", "drain"])
def test_program_that_is_moved_or_whose_node_is_drained_moves_all_its_ranks(
    cluster, alice, operator, torchrun, expect, how
):
    expected, found = expect("ranks.py", 60, gpus=1), []
    thread = threading.Thread(
        target=lambda: found.append(torchrun("ranks.py", 60, gpus=1, SLOW="1", WOOLYAI_CHECKPOINT_S="0.5"))
    )

    def running():
        return next((t for t in cluster.rest("GET", "tasks?state=started")["tasks"] if t["ranks"] == 2), None)

    thread.start()
    try:
        cluster.wait(running)
        (before,) = running()["executors"]
        time.sleep(2)
        if how == "move":
            alice.wooly("tasks", "move", running()["task_id"])
        else:
            operator("nodes", "drain", f"node-{before}")
        cluster.wait(lambda: (now := running()) is not None and before not in now["executors"])
        (after,) = running()["executors"]
    finally:
        thread.join()
        if how == "drain":
            operator("nodes", "activate", f"node-{before}")
    assert found and found[0][0] == expected and after != before
    assert "leaves the executor" in found[0][1] and found[0][1].count(GONE_ON) >= 2


@pytest.mark.slow
def test_rank_that_cannot_go_on_is_named_after_a_loss(torchrun):
    """Of two ranks, one has no recovery: so the other one is told that it ends with its executor."""
    _, said = torchrun("ranks.py", 14, LOSE="7", code=1, RECOVERY_OF_RANK_1="off")
    assert GONE_ON not in said and "ExecutorLostError" in said


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ten_random_kills_of_executors_change_no_bit(cluster, torchrun, expect, ranks):
    expected, chance, kills, runs = expect("ranks.py", 60, ranks=ranks), random.Random(ranks), 0, 0
    while kills < 10:
        found, over = [], threading.Event()

        def work(found=found, over=over):
            try:
                how = {"SLOW": "1", "WOOLYAI_CHECKPOINT_S": "0.5", "LEAST_SHARE": "1" if ranks == 4 else "1048576"}
                found.append(torchrun("ranks.py", 60, ranks=ranks, **how))
            finally:
                over.set()

        thread = threading.Thread(target=work)
        thread.start()
        while not over.wait(chance.uniform(1.0, 5.0)):
            running = cluster.rest("GET", "tasks?state=started")["tasks"]
            if running and kills < 10:
                name = chance.choice(sorted(running[0]["executors"]))
                os.kill(int((cluster.keeper.pids / name).read_text()), signal.SIGKILL)
                kills += 1
        thread.join()
        runs += 1
        assert found and found[0][0] == expected
    print(f"{kills} kills in {runs} runs of {ranks} ranks")
