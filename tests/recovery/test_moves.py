"""Running sessions that an operator moves to another device, with the bits of an undisturbed run."""

import threading
import time

import pytest

pytestmark = pytest.mark.connected
WAIT_S = 40.0
COMMAND = ("train.py", 40, 5)


@pytest.fixture
def running(run, cluster):
    """A training in the background. Returns its task, and a function that returns its output."""
    found = []
    known = {t["task_id"] for t in tasks(cluster)}
    thread = threading.Thread(target=lambda: found.append(run(*COMMAND, SLOW="1")))
    thread.start()
    until = time.monotonic() + WAIT_S
    while not (new := [t for t in tasks(cluster) if t["task_id"] not in known and t["state"] == "started"]):
        assert time.monotonic() < until
        time.sleep(0.05)

    def output():
        thread.join(WAIT_S)
        return found[0]

    yield new[0], output
    thread.join(WAIT_S)


def tasks(cluster):
    return cluster.rest("GET", "tasks?limit=50")["tasks"]


def story(cluster, task):
    return [(s["state"], s["reason"]) for s in cluster.rest("GET", f"tasks/{task['task_id']}")["story"]]


def gone_on(cluster, task, executor):
    """Wait until a session has started on an executor."""
    until = time.monotonic() + WAIT_S
    while ("started", f"on {executor}") not in (told := story(cluster, task))[2:]:
        assert time.monotonic() < until, told
        time.sleep(0.05)


def test_a_session_is_moved_on_request(cluster, alice, running, run):
    task, output = running
    (old,) = task["executors"]
    new = {"a": "b", "b": "a"}[old]
    alice.wooly("tasks", "move", task["task_id"])
    gone_on(cluster, task, new)
    assert ("pending", "moved on request") in story(cluster, task)
    found, said = output()
    assert found == run(*COMMAND, WOOLYAI_RECOVERY="off")[0]
    assert said.count("goes on in the executor") == 1
    assert story(cluster, task)[-1][0] == "completed"


def test_draining_a_node_moves_its_sessions(cluster, running, run):
    task, output = running
    (old,) = task["nodes"]
    cluster.rest("PUT", f"nodes/{old}/state", {"state": "draining"})
    try:
        gone_on(cluster, task, {"one": "b", "two": "a"}[old])
        cluster.wait(
            lambda: {n["node_id"]: n["state"] for n in cluster.rest("GET", "nodes")["nodes"]}[old] == "drained"
        )
        found, _ = output()
    finally:
        cluster.rest("PUT", f"nodes/{old}/state", {"state": "active"})
    assert found == run(*COMMAND, WOOLYAI_RECOVERY="off")[0]


@pytest.mark.slow
def test_a_session_without_another_device_stays(cluster, alice, running):
    task, output = running
    (node,) = task["nodes"]
    other = {"one": "two", "two": "one"}[node]
    cluster.rest("PUT", f"nodes/{other}/state", {"state": "cordoned"})
    try:
        said = alice.wooly("tasks", "move", task["task_id"], code=1)
    finally:
        cluster.rest("PUT", f"nodes/{other}/state", {"state": "active"})
    assert "no other device can take session" in said
    assert "goes on" not in output()[1]
