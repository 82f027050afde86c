"""Programs of several processes at a controller with two executors: placed, shown, cancelled and ended as one task."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
from pathlib import Path

import nats
import pytest
from wooly_bus import contracts
from wooly_testkit.cluster import Cluster, Tenant

SCRIPTS = Path(__file__).parent / "scripts"
pytestmark = [pytest.mark.slow, pytest.mark.connected]


@pytest.fixture(scope="module")
def tenant(tmp_path_factory):
    with contextlib.ExitStack() as stack:
        cluster = Cluster(
            tmp_path_factory.mktemp("cluster"), stack, executors=("a", "b"), executor={"HEARTBEAT_S": "0.2"}
        )
        yield Tenant(cluster, "acme")


@pytest.fixture
def torchrun(tenant):
    """Starts a script in several ranks with `wooly run torchrun`."""
    started = []

    def start(script, *arguments, ranks=2, gpus=1, **env):
        wooly = [sys.executable, "-m", "wooly", "run", "--quiet", "--gpus", str(gpus)]
        launcher = ["torchrun", "--standalone", "--nproc-per-node", str(ranks), str(SCRIPTS / script), *arguments]
        started.append(
            subprocess.Popen(
                [*wooly, *launcher],
                env=tenant.env(**env) | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.terminate()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def tasks(tenant, *states):
    chosen = [part for state in states for part in ("--state", state)]
    return json.loads(tenant.wooly("tasks", "--json", *chosen))["tasks"]


def ready(process, ranks):
    for _ in range(ranks):
        assert process.stdout.readline() == "ready\n"


def test_ranks_on_two_executors_of_a_cluster_agree(tenant, torchrun):
    running = torchrun("training.py", ranks=4, gpus=2)
    out, errors = running.communicate(timeout=280)
    assert running.returncode == 0 and "tensor parallel agrees" in out, errors
    assert "the 4 ranks of this program share 2 devices" in errors
    (task,) = tasks(tenant)
    assert task["ranks"] == 4 and task["state"] == "completed", tenant.wooly("tasks", "show", task["task_id"], "--json")
    shown = tenant.wooly("tasks")
    assert task["task_id"] in shown and "4 ranks" in shown and f"{task['task_id']}-rank-" not in shown
    tenant.cluster.wait(lambda: all(row["ended"] for row in credits_of(tenant)))
    (row,) = credits_of(tenant)
    assert row["name"] == task["task_id"] and row["runs"] > 0


def credits_of(tenant):
    return json.loads(tenant.wooly("credits", "--json"))["rows"]


def test_cancelled_program_ends_all_ranks(tenant, torchrun):
    running = torchrun("waiting.py", "killed", ranks=2, gpus=2)
    ready(running, 2)
    (task,) = tasks(tenant, "started")
    assert task["executors"] == ["a", "b"]
    tenant.wooly("tasks", "cancel", task["task_id"], "--reason", "enough of it")
    out, errors = running.communicate(timeout=100)
    assert running.returncode != 0 and "enough of it" in out + errors
    (task,) = [t for t in tasks(tenant) if t["task_id"] == task["task_id"]]
    assert task["state"] == "cancelled"


def end_of_computing(tenant, how):
    """Let rank 1 of two ranks that compute die. Returns what rank 0 printed when it ended."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        common["MASTER_PORT"] = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "wooly", "run", "--quiet", str(SCRIPTS / "computing.py"), how],
            env=tenant.env() | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            ready(rank, 1)
        if how == "killed":
            ranks[1].kill()
        _, errors = ranks[0].communicate(timeout=100)
        assert ranks[0].returncode != 0 and "rank 1 of the program ended" in errors
        tenant.cluster.wait(lambda: not tasks(tenant, "started"))
        return errors
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            rank.stdout.close()
            rank.stderr.close()


@pytest.mark.parametrize(
    "how,why",
    [
        ("killed", "its client's process has ended"),  # known at once, and not only when its lease is over
        (
            "fails",
            "its script ended with ValueError: broken",
        ),  # it does not wait for its collective, in which it is alone
    ],
)
def test_rank_that_dies_ends_a_rank_that_computes(tenant, how, why):
    """No collective tells rank 0 that rank 1 has died: the router ends its session."""
    errors = end_of_computing(tenant, how)
    assert why in errors
    task = next(t for t in tasks(tenant) if t["ranks"])
    shown = json.loads(tenant.wooly("tasks", "show", task["task_id"], "--json"))
    assert [r["rank"] for r in shown["ranks"]] == [0, 1]
    assert "rank 0: rank 1 of the program ended" in "\n".join([step["reason"] for step in shown["story"]])


@contextlib.contextmanager
def ends_of_sessions(cluster):
    """Collects what the cluster's executors say about sessions that end."""
    said, hears, done = [], threading.Event(), threading.Event()

    async def hear(message):
        said.append(contracts.EXECUTOR_SESSION_CLOSED.decoded(message.data))

    async def listen():
        connection = await nats.connect(cluster.nats_url, user_credentials=str(cluster.keys.service_creds))
        await connection.subscribe(contracts.EXECUTOR_SESSION_CLOSED.subject, cb=hear)
        await connection.flush()
        hears.set()
        await asyncio.to_thread(done.wait)
        await connection.drain()

    listener = threading.Thread(target=asyncio.run, args=[listen()])
    listener.start()
    try:
        assert hears.wait(60)
        yield said
    finally:
        done.set()
        listener.join()


def test_rank_that_is_killed_on_another_host_ends_a_rank_that_computes(tmp_path):
    """Its executor, which has only a TCP connection, does not see the process.

    It sees that the client's system closed the connection. Then the router waits for a fifth of a lease only, and not for the
    time in which a session comes back: see `test_rank_whose_client_hangs_up_is_waited_for_only_if_its_client_is_heard`.
    """
    with contextlib.ExitStack() as stack:
        settings = {"HEARTBEAT_S": "0.2", "LISTEN": "tcp://127.0.0.1:0"}
        cluster = Cluster(tmp_path, stack, executors=("a",), executor=settings)
        said = stack.enter_context(ends_of_sessions(cluster))
        errors = end_of_computing(Tenant(cluster, "acme"), "killed")
        assert "its client did not ask for another executor" in errors
        assert (said[0].hung_up, said[0].passing) == (True, True)


def test_processes_of_mp_spawn_are_ranks_of_one_program(tenant):
    script = str(SCRIPTS / "spawned.py")
    out = tenant.wooly("run", "--quiet", "--gpus", "2", script)
    assert out.count("rank 0 of 3 sees 3 devices") == 1 and out.count("sum 6.0") == 3
    newest = next(t for t in tasks(tenant) if t["ranks"])
    assert newest["ranks"] == 3 and newest["executors"] == ["a", "b"]


def test_process_of_mp_spawn_that_fails_ends_the_others(tenant):
    argv = [sys.executable, "-m", "wooly", "run", "--quiet", str(SCRIPTS / "spawned.py"), "fails"]
    done = subprocess.run(
        argv, env=tenant.env() | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode != 0 and "ValueError: broken" in done.stderr
    tenant.cluster.wait(lambda: not tasks(tenant, "started"))
    newest = next(t for t in tasks(tenant) if t["ranks"])
    assert newest["state"] == "failed" and "ValueError: broken" in newest["reason"], newest


def test_trainer_spreads_batches_over_the_devices_of_a_session(tenant, tmp_path):
    out = tenant.wooly("run", "--quiet", "--gpus", "2", str(SCRIPTS / "data_parallel.py"), str(tmp_path))
    assert "parameters agree on 2 devices" in out


def test_accelerate_launch_starts_ranks_by_name(tenant, tmp_path):
    accelerate = ["accelerate", "launch", "--num_processes", "2", str(SCRIPTS / "libraries.py")]
    out = tenant.wooly("run", "--quiet", "--gpus", "2", *accelerate, str(tmp_path))
    assert "Accelerate agrees" in out and "Trainer agrees" in out
    newest = next(t for t in tasks(tenant) if t["ranks"])
    assert newest["ranks"] == 2 and newest["executors"] == ["a", "b"]
