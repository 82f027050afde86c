"""Sessions that go on between the runtimes `torch_cpu` and `opencl`, whose libraries compute other bits."""

import threading

import pytest

pytestmark = [pytest.mark.connected, pytest.mark.slow]
#: The library of the second executor adds in another order.
EXECUTORS = (({"RUNTIME": "torch_cpu"}, {"OMP_NUM_THREADS": "1"}), ({"RUNTIME": "opencl"}, {"OMP_NUM_THREADS": "2"}))
COMMAND = ("kinds.py", 12)
DIFFERENT = "results that the script has read differ on"


@pytest.fixture(scope="module")
def undisturbed(cluster, alice):
    """The numbers of the script on each executor alone."""
    found = {}

    def on(run, name):
        if name not in found:
            found[name] = numbers(run(*COMMAND, WOOLYAI_RECOVERY="off", WOOLYAI_NODE=name)[0])
        return found[name]

    return on


def numbers(output):
    return [float(x) for x in output.split()]


def check(run, undisturbed, output):
    """The numbers are close to those of each executor, which are different."""
    one, other = undisturbed(run, "a"), undisturbed(run, "b")
    assert one != other
    assert numbers(output) == pytest.approx(one, rel=1e-3) and numbers(output) == pytest.approx(other, rel=1e-3)


def newest(cluster):
    return cluster.rest("GET", "tasks?limit=1")["tasks"][0]["task_id"]


OTHER = {"a": "b", "b": "a"}


def story(cluster, task):
    return [step["reason"] for step in cluster.rest("GET", f"tasks/{task}")["story"]]


@pytest.fixture
def begin(cluster, run):
    """Start the script in a thread, on an executor, from which the session may go on in the other one.

    Returns a function that waits for its output.
    """
    threads = []

    def begin(first, **env):
        begun, (own, other) = cluster.keeper.pids / "begun", {"a": ("one", "two"), "b": ("two", "one")}[first]
        begun.unlink(missing_ok=True)
        cluster.rest("PUT", f"nodes/{own}/state", {"state": "active"})
        cluster.rest("PUT", f"nodes/{other}/state", {"state": "cordoned"})
        found = []
        threads.append(threading.Thread(target=lambda: found.append(run(*COMMAND, WOOLYAI_RECOVERY="on", **env))))
        threads[-1].start()
        try:
            cluster.wait(begun.exists)
        finally:
            cluster.rest("PUT", f"nodes/{other}/state", {"state": "active"})
        cluster.rest("PUT", f"nodes/{own}/state", {"state": "cordoned"})  # an executor that was killed is back soon

        def output():
            threads[-1].join()
            cluster.rest("PUT", f"nodes/{own}/state", {"state": "active"})
            return found[0]

        (cluster.keeper.pids / "go").touch()
        return output

    yield begin
    for thread in threads:
        thread.join()
    (cluster.keeper.pids / "go").unlink(missing_ok=True)
    for node in ("one", "two"):
        cluster.rest("PUT", f"nodes/{node}/state", {"state": "active"})


@pytest.mark.parametrize("first", ["a", "b"])
def test_a_session_goes_on_from_its_checkpoint_on_another_runtime(begin, run, undisturbed, first):
    output, said = begin(first, WOOLYAI_CHECKPOINT_S="0", STORED="1", LOSE="3")()
    assert said.count(f"the session goes on in the executor {OTHER[first]}") == 1
    check(run, undisturbed, output)


@pytest.mark.parametrize("first", ["a", "b"])
def test_different_results_are_told_once_and_are_in_the_story(cluster, begin, run, undisturbed, first):
    """Without a checkpoint, the other executor repeats all results."""
    output, said = begin(first, WOOLYAI_CHECKPOINT_S="1000", LOSE="8")()
    assert said.count(DIFFERENT) == 1 and said.count("goes on in the executor") == 1
    told = [reason for reason in story(cluster, newest(cluster)) if DIFFERENT in reason]
    assert len(told) == 1 and told[0].startswith("its client says: ")
    assert "(torch-cpu, 1 cores" in told[0] and "(opencl, 2 cores" in told[0]
    own = undisturbed(run, first)
    assert numbers(output)[:8] == own[:8]  # what was read before the loss is the first executor's
    check(run, undisturbed, output)


@pytest.mark.parametrize("first", ["a", "b"])
@pytest.mark.parametrize("checkpoint_s", ["0", "1000"])
def test_a_session_is_moved_to_another_runtime_on_request(cluster, alice, begin, run, undisturbed, first, checkpoint_s):
    waits = cluster.keeper.pids / "waits"
    waits.unlink(missing_ok=True)
    output = begin(first, WAIT="5", WOOLYAI_CHECKPOINT_S=checkpoint_s)
    cluster.wait(waits.exists)
    task = newest(cluster)
    alice.wooly("tasks", "move", task)
    found, said = output()
    assert f"the session goes on in the executor {OTHER[first]}" in said
    assert "moved on request" in story(cluster, task)
    assert DIFFERENT not in said  # it left at a checkpoint, so nothing was done again
    check(run, undisturbed, found)
