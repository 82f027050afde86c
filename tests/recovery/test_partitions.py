"""Executors that live and cannot be reached: no session is lost, none goes on twice, and what an old executor says is ignored."""

import threading
import time
from pathlib import Path

import pytest
from wooly_testkit import forks
from wooly_testkit.cluster import Tenant

pytestmark = [pytest.mark.connected, pytest.mark.slow]
SCRIPTS = Path(__file__).parent / "scripts"
PARTITION_S = 30.0
WAIT_S = 120.0


@pytest.fixture(scope="module")
def bob(linked):
    bob = Tenant(linked.cluster, "bob")
    yield bob
    bob.control.close()


@pytest.fixture
def training(linked, bob):
    """A training in the background. Returns its task, and a function that returns its output."""
    found = []

    def run(steps, slow="1", recovery="on"):
        env = bob.env(RECOVERY=recovery, CHECKPOINT_S="1") | {"OMP_NUM_THREADS": "1"} | ({"SLOW": slow} if slow else {})
        done = forks.run("wooly", "run", str(SCRIPTS / "train.py"), str(steps), "5", env=env, timeout=300)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout, done.stderr

    def tasks():
        return linked.cluster.rest("GET", "tasks?limit=50")["tasks"]

    known = {t["task_id"] for t in tasks()}
    thread = threading.Thread(target=lambda: found.append(run(220)))
    thread.start()
    linked.cluster.wait(lambda: [t for t in tasks() if t["task_id"] not in known and t["state"] == "started"])
    (task,) = [t for t in tasks() if t["task_id"] not in known]

    def output():
        thread.join(WAIT_S)
        return *found[0], run(220, slow="", recovery="off")[0]

    yield task, output
    thread.join(WAIT_S)


def story(linked, task):
    return [(s["state"], s["reason"]) for s in linked.cluster.rest("GET", f"tasks/{task['task_id']}")["story"]]


def held(linked):
    """Number of sessions on all devices."""
    return sum(gpu["sessions"] for node in linked.cluster.rest("GET", "nodes")["nodes"] for gpu in node["gpus"])


@pytest.mark.parametrize("links", ["nats", "data", "both"])
def test_a_partition_of_30_s_loses_no_session(linked, training, links):
    """The executor is cut off from NATS (the client still reaches it), from its client, or from both."""
    task, output = training
    (old,) = task["executors"]
    cut = [getattr(linked, name)[old] for name in ("nats", "data") if links in (name, "both")]
    time.sleep(3)  # the training runs, and has checkpoints
    for link in cut:
        link.cut()
    time.sleep(PARTITION_S)
    for link in cut:
        link.mend()
    found, said, undisturbed = output()
    assert found == undisturbed
    told = story(linked, task)
    assert told[-1][0] == "completed", told
    if links != "data":  # a silent executor is lost; one that only its client cannot reach is not
        (new,) = {"a", "b"} - {old}
        assert ("started", f"on {new}") in told
        assert said.count("the session goes on in the executor") == 1
    linked.cluster.wait(lambda: not held(linked))  # the old executor has dropped it, too
