"""Sessions with several devices that lose one of their executors, hibernate, and leave an executor that is being drained."""

import contextlib
import socket
import threading

import pytest
from wooly_testkit.cluster import Cluster

from tests.recovery.conftest import Keeper

pytestmark = pytest.mark.connected
COMMAND = ("two.py", 16)
GONE_ON = "the session goes on in the executor"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Three executors with one device each."""
    with contextlib.ExitStack() as stack:
        folder = tmp_path_factory.mktemp("cluster")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        executor = {"CHECKPOINTS": str(folder / "checkpoints"), "HEARTBEAT_S": "0.2", "MEMORY": str(1 << 30)}
        names = ("a", "b", "c")
        cluster = Cluster(folder, stack, executors=(), router={"HTTP_PORT": port})
        for name in names:
            own = {"ID": name, "NODE": f"node-{name}", "LISTEN": f"unix://{folder}/{name}.sock", "RUNTIME": "torch_cpu"}
            cluster.prepare(name, "executor", executor | own | {"CHANNEL_KEY": cluster.keys.channel_public})
            cluster.start(name)
        cluster.wait(lambda: len(cluster.rest("GET", "nodes")["nodes"]) == len(names))
        cluster.keeper = Keeper(cluster, names, {})
        try:
            yield cluster
        finally:
            cluster.keeper.stop()  # before the processes end


@pytest.fixture(scope="module")
def undisturbed():
    return []


@pytest.fixture
def expect(run, undisturbed):
    """The output of an undisturbed run."""
    if not undisturbed:
        undisturbed.append(run(*COMMAND, WOOLYAI_GPU_COUNT="2", WOOLYAI_RECOVERY="off")[0])
    return undisturbed[0]


def newest(cluster):
    return cluster.rest("GET", "tasks?limit=1")["tasks"][0]


def story(cluster, task):
    return [step["reason"] for step in cluster.rest("GET", f"tasks/{task}")["story"]]


SLOW = pytest.mark.slow
LOSSES = [
    pytest.param("0", {"WOOLYAI_CHECKPOINT_S": "0"}, id="first-cuts"),
    pytest.param("1", {"WOOLYAI_CHECKPOINT_S": "1000"}, id="second-frames", marks=SLOW),
    pytest.param("1", {"WOOLYAI_CHECKPOINT_S": "0", "CUT": "1"}, id="second-link", marks=SLOW),
    pytest.param("0", {"WOOLYAI_CHECKPOINT_S": "1000"}, id="first-frames", marks=SLOW),
]


@pytest.mark.parametrize(("part", "env"), LOSSES)
def test_a_session_with_two_devices_goes_on_after_the_loss_of_one(run, expect, part, env):
    found, said = run(*COMMAND, WOOLYAI_GPU_COUNT="2", LOSE="3,9", LOSE_PART=part, **env)
    assert found == expect
    assert said.count(GONE_ON) == 4, said  # both devices, twice


@pytest.fixture
def running(cluster, run):
    """The script in the background. Returns its task, and a function that returns its output."""
    known, found = newest(cluster)["task_id"] if cluster.rest("GET", "tasks?limit=1")["tasks"] else "", []

    def work():
        found.append(run("two.py", 60, WOOLYAI_GPU_COUNT="2", WOOLYAI_RECOVERY="on", SLOW="1"))

    thread = threading.Thread(target=work)
    thread.start()
    cluster.wait(lambda: newest(cluster)["task_id"] != known and newest(cluster)["state"] == "started")

    def output():
        thread.join()
        return found[0]

    yield newest(cluster), output
    thread.join()


@pytest.mark.slow
def test_a_session_with_two_devices_leaves_a_node_that_is_drained_and_keeps_its_other_device(cluster, running, run):
    task, output = running
    gone, kept = task["executors"]
    (new,) = {"a", "b", "c"} - {gone, kept}
    cluster.rest("PUT", f"nodes/node-{gone}/state", {"state": "draining"})
    try:
        cluster.wait(lambda: sorted(newest(cluster)["executors"]) == sorted([kept, new]))
        found, said = output()
    finally:
        cluster.rest("PUT", f"nodes/node-{gone}/state", {"state": "active"})
    assert found == run("two.py", 60, WOOLYAI_GPU_COUNT="2", WOOLYAI_RECOVERY="off")[0]
    assert "lost the executor" not in said and said.count(GONE_ON) == 2
    assert not any("sent again" in reason for reason in story(cluster, task["task_id"]))


@pytest.mark.slow
def test_a_session_with_two_devices_hibernates_and_wakes_at_its_next_operation(cluster, running, run, alice):
    task, output = running
    alice.wooly("tasks", "hibernate", task["task_id"])
    cluster.wait(lambda: any(reason.startswith("hibernated on") for reason in story(cluster, task["task_id"])))
    found, said = output()
    assert found == run("two.py", 60, WOOLYAI_GPU_COUNT="2", WOOLYAI_RECOVERY="off")[0]
    assert said.count("the session hibernates") == 2 and said.count("the session wakes up") == 2
