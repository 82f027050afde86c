"""Results are the same every time, and over any distance. A slower link causes no additional waits."""

import importlib.util
import json
import os
from pathlib import Path

import pytest
from wooly_bus.channel.framing import DEFAULT_WINDOW
from wooly_testkit import forks
from wooly_testkit.delay_proxy import delay_proxy
from wooly_testkit.executor import executor_process

pytestmark = pytest.mark.connected
PROGRAM = Path(__file__).with_name("training.py")


def client(*argv):
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = forks.run(PROGRAM.stem, *argv, cwd=PROGRAM.parent, env=env, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def local():
    """The results of the CPU without Wooly."""
    return client()


@pytest.mark.slow  # a rare race needs many trainings; a broken rule shows in the trainings of test_models.py
def test_repeated_trainings_equal_cpu_losses(cuda, local):
    spec = importlib.util.spec_from_file_location("training", PROGRAM)
    training = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(training)
    assert len(set(local["losses"])) == training.STEPS and local["losses"][-1] < local["losses"][0]
    unlike = [n for n in range(60) if training.train(cuda) != local["losses"]]
    assert unlike == []


@pytest.mark.slow
def test_slow_link_gives_same_numbers_and_waits(local):
    with executor_process() as near:
        loopback = client(near.endpoints[0], near.token)
    with executor_process() as far, delay_proxy(far.endpoints[0], 0.010) as endpoint:
        distant = client(endpoint, far.token)
    for found in (loopback, distant):
        assert found["losses"] == local["losses"]
        assert found["chain"] == local["chain"]
        # One wait per number that is read, and no other wait: the 1,000 adds wait once, for their sum.
        assert found["waits"] == [len(local["losses"]), 1]
        assert found["bytes_sent"] < DEFAULT_WINDOW  # the window delayed no send
