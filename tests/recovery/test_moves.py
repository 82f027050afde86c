"""Running sessions that an operator moves to another device, with the bits of an undisturbed run."""

import threading
import time

import pytest
from wooly_testkit.cluster import LOOK_S

pytestmark = pytest.mark.connected
WAIT_S = 40.0
COMMAND = ("train.py", 40, 5)


@pytest.fixture(scope="module")
def outputs():
    """The outputs of undisturbed runs, by script."""
    return {}


@pytest.fixture
def undisturbed(run, outputs):
    """The output of the training that nobody moved."""
    if "train" not in outputs:
        outputs["train"] = run(*COMMAND, WOOLYAI_RECOVERY="off")[0]
    return outputs["train"]


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
        time.sleep(LOOK_S)

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
        time.sleep(LOOK_S)


def test_a_session_is_moved_on_request(cluster, alice, running, undisturbed):
    task, output = running
    (old,) = task["executors"]
    new = {"a": "b", "b": "a"}[old]
    alice.wooly("tasks", "move", task["task_id"])
    gone_on(cluster, task, new)
    assert ("pending", "moved on request") in story(cluster, task)
    found, said = output()
    assert found == undisturbed
    assert said.count("goes on in the executor") == 1 and "lost the executor" not in said
    told = story(cluster, task)
    assert told[-1][0] == "completed"
    (pause,) = [reason for _, reason in told if "after a pause of" in reason]
    assert "sent again" not in pause  # it left at its checkpoint


def test_draining_a_node_moves_its_sessions(cluster, operator, running, undisturbed):
    task, output = running
    (old,) = task["nodes"]
    try:
        said = operator("nodes", "drain", old)
        assert "1 task left" in said and "without tasks" in said
        gone_on(cluster, task, {"one": "b", "two": "a"}[old])
        cluster.wait(
            lambda: {n["node_id"]: n["state"] for n in cluster.rest("GET", "nodes")["nodes"]}[old] == "drained"
        )
        found, _ = output()
    finally:
        operator("nodes", "activate", old)
    assert found == undisturbed


@pytest.mark.slow
def test_a_rolling_upgrade_of_all_executors_loses_no_session(cluster, run):
    """Each executor gets SIGTERM in turn, while three trainings run."""
    found = []
    command = ("train.py", 120, 5)
    threads = [threading.Thread(target=lambda: found.append(run(*command, SLOW="1"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    cluster.wait(lambda: held(cluster) == 3)
    for name in ("a", "b", "a"):
        before, process = cluster.keeper.restarts, cluster.processes[name]
        process.terminate()
        cluster.wait(lambda before=before: cluster.keeper.restarts > before)
        assert process.returncode == 0
        cluster.wait(lambda: len([n for n in cluster.rest("GET", "nodes")["nodes"] if n["state"] == "active"]) == 2)
    for thread in threads:
        thread.join(3 * WAIT_S)
    undisturbed = run(*command, WOOLYAI_RECOVERY="off")[0]
    for output, said in found:
        assert output == undisturbed
        assert "lost the executor" not in said
    assert sum(said.count("the session goes on in the executor") for _, said in found) >= 3


@pytest.fixture
def pausing(run, cluster, tmp_path, request):
    """A script that uses no device for now. Returns its task, and a function that lets it go on and returns its output."""
    found, paused, code = [], tmp_path / "paused", getattr(request, "param", 0)
    known = {t["task_id"] for t in tasks(cluster)}
    thread = threading.Thread(target=lambda: found.append(run("pausing.py", paused, code=code)))
    thread.start()
    until = time.monotonic() + WAIT_S
    while not paused.exists():
        assert time.monotonic() < until
        time.sleep(LOOK_S)
    (task,) = [t for t in tasks(cluster) if t["task_id"] not in known]

    def output():
        paused.with_suffix(".go").touch()
        thread.join(WAIT_S)
        return found[0]

    yield task, output
    paused.with_suffix(".go").touch()
    thread.join(WAIT_S)


@pytest.fixture
def unpaused(run, outputs, tmp_path):
    """The output of the script that never hibernated."""
    if "pausing" not in outputs:
        go = tmp_path / "undisturbed"
        go.with_suffix(".go").touch()
        outputs["pausing"] = run("pausing.py", go, WOOLYAI_RECOVERY="off")[0]
    return outputs["pausing"]


def in_state(cluster, task, state):
    """Wait until a task is in a state. Returns the task."""
    until = time.monotonic() + WAIT_S
    while (now := cluster.rest("GET", f"tasks/{task['task_id']}")["task"])["state"] != state:
        assert time.monotonic() < until, now
        time.sleep(LOOK_S)
    return now


def held(cluster):
    """Number of sessions on all devices."""
    return sum(gpu["sessions"] for node in cluster.rest("GET", "nodes")["nodes"] for gpu in node["gpus"])


def test_a_hibernated_session_holds_no_device_until_its_next_operation(cluster, alice, pausing, unpaused):
    task, output = pausing
    alice.wooly("tasks", "hibernate", task["task_id"])
    assert in_state(cluster, task, "hibernated")["executors"] == []
    cluster.wait(lambda: held(cluster) == 0)
    found, said = output()
    assert found == unpaused
    assert "the session hibernates" in said and "the session wakes up: its script goes on" in said
    assert [state for state, _ in story(cluster, task)][-1] == "completed"


@pytest.mark.slow
def test_a_hibernated_session_is_woken_on_request(cluster, alice, pausing, unpaused):
    task, output = pausing
    alice.wooly("tasks", "hibernate", task["task_id"])
    said = alice.wooly("tasks", "wake", task["task_id"])
    assert "started: on " in said
    cluster.wait(lambda: held(cluster) == 1)  # after the next heartbeat
    found, said = output()
    assert found == unpaused and "woken on request" in said


def test_a_session_hibernates_after_a_time_without_operations(cluster, pausing, unpaused):
    task, output = pausing
    cluster.rest("PUT", "config", {"hibernate_after_s": 1.0})
    try:
        in_state(cluster, task, "hibernated")
    finally:
        cluster.rest("PUT", "config", {"hibernate_after_s": 0.0})
    assert output()[0] == unpaused


@pytest.mark.parametrize("pausing", [1], indirect=True)
def test_a_cancelled_hibernated_session_ends_with_a_clear_error(cluster, alice, pausing):
    task, output = pausing
    alice.wooly("tasks", "hibernate", task["task_id"])
    sessions = [*cluster.folder.glob("checkpoints/*/sessions/*")]
    assert len(sessions) == 1
    alice.wooly("tasks", "cancel", task["task_id"])
    cluster.wait(lambda: not sessions[0].exists())
    assert "it is cancelled (cancelled on request)" in output()[1]


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
