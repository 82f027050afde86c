"""If a part of a service fails, its whole process ends at once, and other processes take over.

No service continues half alive.
"""

import contextlib
import json
import os
import subprocess
import threading
import time

import pytest
from wooly_bus import contracts
from wooly_bus.channel import ChannelClosedError
from wooly_bus.supervision import BROKEN
from wooly_testkit import forks
from wooly_testkit.cluster import Cluster, Tenant, enter
from wooly_testkit.forks import Forked
from wooly_testkit.postgres import PostgresMissingError, postgres_server
from wooly_wis.frames import Kind
from wooly_wis.messages import ClientFacts, OpenSessionRequest, QueuePlace, RenewSessionRequest, TaskRequest

pytestmark = pytest.mark.connected
#: An executor that works until a file exists. Then its device thread, or its journal, meets a fault in our own code.
FAULTY = """
import os, sys
from wooly_executor import app, device_loop, journal

def faulty(method):
    def run(self, *arguments):
        if os.path.exists(os.environ["FAULT"]):
            raise KeyError("injected")
        return method(self, *arguments)
    return run

if os.environ["FAULTY"] == "device":
    device_loop.DeviceLoop._run_calls = faulty(device_loop.DeviceLoop._run_calls)
else:
    journal.JournalPublisher.publish = faulty(journal.JournalPublisher.publish)
sys.exit(app.main())
"""
#: A script whose executor ends after the session was opened and before the client connects.
LATE = """
import json, os, signal, sys, time
import torch
from wooly import api, opening

processes, how = json.loads(sys.argv[1]), getattr(signal, sys.argv[2])
connect = opening.connect

def late(part, *arguments):
    opening.connect = connect
    os.kill(processes[part.executor_id], how)
    print("ended", part.executor_id, flush=True)
    while True:
        try:
            with open(f"/proc/{processes[part.executor_id]}/stat") as stat:
                if stat.read().split()[2] == "Z":
                    break
        except FileNotFoundError:
            break
        time.sleep(0.01)
    return connect(part, *arguments)

opening.connect = late
api.enable()
print(torch.ones(3, device="cuda").sum().item(), api._attached.parts[0].executor_id)
"""
#: Maximum time of a process's end, in seconds: 1 s, and reserve for a machine with other work.
ENDED_S = 4.0
FAILED_OVER_S = 10.0
#: Time for which the database is away, in seconds: longer than `wooly.access.RETRY_S`.
AWAY_S = 20.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with contextlib.ExitStack() as stack:
        folder = tmp_path_factory.mktemp("cluster")
        (folder / "faulty_executor.py").write_text(FAULTY)
        cluster = Cluster(folder, stack, executors=("a", "b"), executor={"HEARTBEAT_S": "0.2"})
        for name in "ab":
            cluster.wait(lambda name=name: states(cluster).get(name) == "alive")
        yield cluster


@pytest.fixture(scope="module")
def alice(cluster):
    alice = Tenant(cluster, "alice")
    yield alice
    alice.control.close()


def states(cluster):
    nodes = cluster.rest("GET", "nodes")["nodes"]
    return {g["executor_id"]: g["state"] for n in nodes for g in n["gpus"]}


@pytest.mark.parametrize("part", ["device", pytest.param("journal", marks=pytest.mark.slow)])
def test_executor_with_failed_part_ends_and_sessions_move(cluster, alice, part):
    fault = cluster.folder / f"fault-{part}"
    for name in "ab":  # only the executor that will fail is available
        cluster.kill(name)
    path = os.pathsep.join((str(cluster.folder), os.environ.get("PYTHONPATH", "")))
    cluster.start("a", "faulty_executor", FAULT=str(fault), FAULTY=part, PYTHONPATH=path)
    cluster.wait(lambda: states(cluster) == {"a": "alive", "b": "lost"})
    opened = alice.open()
    channel, _ = enter(opened)
    cluster.start("b")
    cluster.wait(lambda: states(cluster)["b"] == "alive")

    begun = time.monotonic()
    fault.touch()
    assert cluster.processes["a"].wait(60) == BROKEN
    ended = time.monotonic() - begun
    cluster.wait(lambda: alice.story(opened.session_id)[-1] == "failed")
    failed_over = time.monotonic() - begun
    assert states(cluster) == {"a": "lost", "b": "alive"}
    again = alice.open()
    assert [p.executor_id for p in again.parts] == ["b"]
    assert ended < ENDED_S and failed_over < FAILED_OVER_S
    with pytest.raises(ChannelClosedError):
        channel.recv(20)
    channel.close()
    alice.close(again)
    log = cluster.log("a")
    assert "ended unexpectedly: KeyError: 'injected'" in log and "Traceback" in log
    last = alice.ask(contracts.ROUTER_TASK_GET, TaskRequest(task_id=opened.session_id)).story[-1]
    assert "KeyError: 'injected'" in last.reason, last.reason
    print(f"{part}: ended after {ended:.2f} s, failed over after {failed_over:.2f} s")


def test_stopped_executor_ends_sessions_with_reason(cluster, alice):
    for name in "ab":
        cluster.kill(name)
    cluster.start("a")
    cluster.wait(lambda: states(cluster) == {"a": "alive", "b": "lost"})
    opened = alice.open()
    channel, _ = enter(opened)
    cluster.processes["a"].terminate()
    assert cluster.processes["a"].wait(60) == 0
    cluster.wait(lambda: alice.story(opened.session_id)[-1] == "failed")
    assert "executor a is ending: it received a signal to stop" in cluster.log("router")
    last = alice.ask(contracts.ROUTER_TASK_GET, TaskRequest(task_id=opened.session_id)).story[-1]
    assert last.reason == "executor a is lost: it received a signal to stop"
    channel.close()


@pytest.mark.parametrize("how", [pytest.param("SIGTERM", marks=pytest.mark.slow), "SIGKILL"])
def test_executor_ending_before_connect_is_replaced(cluster, alice, how):
    for name in "ab":
        cluster.kill(name)
        cluster.start(name)
    cluster.wait(lambda: states(cluster) == {"a": "alive", "b": "alive"})
    (cluster.folder / "late.py").write_text(LATE)
    processes = json.dumps({name: cluster.processes[name].pid for name in "ab"})
    env = alice.env() | {"OMP_NUM_THREADS": "1"}
    done = forks.run("late", processes, how, env=env, cwd=cluster.folder, timeout=60, like="wooly")
    assert done.returncode == 0, done.stderr
    (_, first), (answer, second) = map(str.split, done.stdout.splitlines())
    assert answer == "3.0" and {first, second} == {"a", "b"}


@pytest.mark.slow
def test_session_waits_for_client_that_is_stopped(tmp_path):
    """A client that is stopped (Ctrl-Z) renews no lease, but its system holds the connection."""
    with contextlib.ExitStack() as stack:
        cluster = Cluster(tmp_path, stack, router={"LEASE_S": "1"}, executor={"HEARTBEAT_S": "0.2"})
        alice = Tenant(cluster, "alice")
        stack.callback(alice.control.close)
        opened = alice.open()
        channel, _ = enter(opened)

        def story():
            return alice.ask(contracts.ROUTER_TASK_GET, TaskRequest(task_id=opened.session_id)).story

        cluster.wait(lambda: "its client is silent, but connected" in story()[-1].reason)
        time.sleep(3)
        channel.send(Kind.SYNC)
        assert channel.recv(20).kind == Kind.RESULT
        renewal = RenewSessionRequest(session_id=opened.session_id, token=opened.token)
        assert alice.ask(contracts.ROUTER_SESSION_RENEW, renewal).lease_s == 1
        # not only the last step: on a busy machine, the lease of a second may lapse again before the question
        assert any(step.reason.startswith("its client is heard again after") for step in story())
        cluster.kill("router")  # nor does anybody renew it while no router runs
        time.sleep(3)
        cluster.start("router")
        cluster.find_router()
        channel.send(Kind.SYNC)
        assert channel.recv(20).kind == Kind.RESULT
        assert story()[-1].state == "started"
        channel.close()
        cluster.wait(lambda: story()[-1].state == "failed")


@pytest.mark.slow
def test_database_that_is_away_ends_no_session_and_new_sessions_wait_for_it(tmp_path):
    """It is away for longer than leases, and than a client asks for credentials."""
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(postgres_server(durable=True))
        except PostgresMissingError as e:
            pytest.skip(str(e))
        cluster = Cluster(tmp_path, stack, router={"LEASE_S": "8", "DATABASE_URL": server.database()})
        alice = Tenant(cluster, "alice", exclusive=True)
        stack.callback(alice.control.close)
        opened = alice.open(gpu_mode="exclusive")
        waiting = alice.open(gpu_mode="exclusive", queue=True)
        place = QueuePlace(session_id=waiting.session_id, token=waiting.token)
        (tmp_path / "script.py").write_text("import torch\nprint(torch.ones(3, device='cuda').sum().item())")
        renewal = RenewSessionRequest(session_id=opened.session_id, token=opened.token)
        alice.ask(contracts.ROUTER_SESSION_RENEW, renewal)
        server.crash()
        said, told = tmp_path / "script.err", "wooly: the session waits for the controller's database"
        pipes = {"stdout": subprocess.PIPE, "stderr": stack.enter_context(said.open("w")), "text": True}
        env = alice.env() | {"OMP_NUM_THREADS": "1"}
        script = stack.enter_context(Forked("wooly", "run", str(tmp_path / "script.py"), env=env, **pipes))
        stack.callback(script.kill)
        begun = time.monotonic()
        # Its executor would end the session, because no client is connected. The script may start late on a busy machine.
        while time.monotonic() < begun + AWAY_S or (told not in said.read_text() and script.poll() is None):
            time.sleep(0.3)
            assert alice.ask(contracts.ROUTER_SESSION_RENEW, renewal).lease_s == 8
        assert script.poll() is None
        starting = threading.Thread(target=server.start)
        starting.start()
        while starting.is_alive():
            assert alice.ask(contracts.ROUTER_SESSION_RENEW, renewal).lease_s == 8
            time.sleep(0.3)
        time.sleep(1)  # the first round of the leader would end it
        alice.ask(contracts.ROUTER_SESSION_RENEW, renewal)
        assert alice.story(opened.session_id)[-1] == "started"
        asked = OpenSessionRequest(client=ClientFacts(host="h", pid=1), gpu_mode="exclusive", queue=True, place=place)
        assert alice.ask(contracts.ROUTER_SESSION_OPEN, asked).wait.place == 1
        alice.close(opened)
        alice.close(waiting)
        out, _ = script.communicate(timeout=100)
        assert (script.returncode, out) == (0, "3.0\n") and told in said.read_text(), said.read_text()
