"""A cluster of two executors with one folder for checkpoints. A thread starts each process again that ended."""

import contextlib
import socket
import threading
from pathlib import Path

import pytest
from wooly_testkit import forks
from wooly_testkit.cluster import Cluster, Tenant
from wooly_testkit.links import Link

SCRIPTS = Path(__file__).parent / "scripts"
TIMEOUT_S = 300


class Keeper:
    """Starts processes again that ended, and writes their process ids to files."""

    def __init__(self, cluster, names, more):
        self.cluster, self.names, self._more = cluster, names, more
        self.pids = cluster.folder / "pids"
        self.pids.mkdir()
        self.restarts = 0
        self._over = threading.Event()
        for name in names:
            self._note(name)
        self._thread = threading.Thread(target=self._keep)
        self._thread.start()

    def _note(self, name):
        new = self.pids / f"{name}.new"
        new.write_text(str(self.cluster.processes[name].pid))
        new.rename(self.pids / name)

    def _keep(self):
        while not self._over.wait(0.05):
            for name in self.names:
                if self.cluster.processes[name].poll() is not None:
                    self.restarts += 1
                    self.cluster.start(name, **self._more.get(name, {}))
                    self._note(name)

    def stop(self):
        self._over.set()
        self._thread.join()


@pytest.fixture(scope="module")
def cluster(request, tmp_path_factory):
    """The cluster. A module may have settings and environments of the executors in `EXECUTORS`."""
    (own, env), (others, other_env) = getattr(request.module, "EXECUTORS", (({}, {}), ({}, {})))
    with contextlib.ExitStack() as stack:
        folder = tmp_path_factory.mktemp("cluster")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        executor = {
            "CHECKPOINTS": str(folder / "checkpoints"),
            "HEARTBEAT_S": "0.2",
            "RUNTIME": "opencl",
            "DRAIN_S": "30",
        }
        cluster = Cluster(folder, stack, executors=(), router={"HTTP_PORT": port})
        for name, node, settings, more in (("a", "one", own, env), ("b", "two", others, other_env)):
            place = {"ID": name, "NODE": node, "LISTEN": f"unix://{folder}/{name}.sock", "MEMORY": str(1 << 30)}
            key = {"CHANNEL_KEY": cluster.keys.channel_public}
            cluster.prepare(name, "executor", executor | key | place | settings)
            cluster.start(name, **more)
        cluster.wait(lambda: len(cluster.rest("GET", "nodes")["nodes"]) == 2)
        cluster.keeper = Keeper(cluster, ("a", "b", "router"), {"a": env, "b": other_env})
        try:
            yield cluster
        finally:
            cluster.keeper.stop()  # before the processes end


class Linked:
    """A cluster whose executors reach NATS and their clients through links that can be cut: by executor, by name."""

    def __init__(self, folder, stack):
        executor = {"CHECKPOINTS": str(folder / "checkpoints"), "HEARTBEAT_S": "0.5"}
        self.cluster = Cluster(folder, stack, executors=())
        host, port = self.cluster.nats_url.removeprefix("nats://").rsplit(":", 1)
        self.nats, self.data = {}, {}
        for name in "ab":
            self.nats[name] = self._link(stack, name, (host, int(port)))
            with socket.create_server(("127.0.0.1", 0)) as free:
                own = free.getsockname()[1]
            self.data[name] = self._link(stack, name, ("127.0.0.1", own))
            settings = executor | {
                "ID": name,
                "NODE": f"node-{name}",
                "NATS_URL": f"nats://127.0.0.1:{self.nats[name].port}",
                "LISTEN": f"tcp://127.0.0.1:{own}",
                "ADVERTISE": f"tcp://127.0.0.1:{self.data[name].port}",
                "CHANNEL_KEY": self.cluster.keys.channel_public,
                "MEMORY": str(1 << 30),
                "RUNTIME": "torch_cpu",
            }
            self.cluster.prepare(name, "executor", settings)
            self.cluster.start(name)
        self.cluster.wait(lambda: len(self.cluster.rest("GET", "nodes")["nodes"]) == 2)

    @staticmethod
    def _link(stack, name, target):
        link = Link(name, [target])
        stack.callback(link.close)
        return link


@pytest.fixture(scope="module")
def linked(tmp_path_factory):
    with contextlib.ExitStack() as stack:
        yield Linked(tmp_path_factory.mktemp("linked"), stack)


@pytest.fixture(scope="module")
def alice(cluster):
    alice = Tenant(cluster, "alice")
    yield alice
    alice.control.close()


@pytest.fixture
def operator(cluster, alice):
    """Run a command of `wooly` as the administrator."""

    def operate(*argv):
        env = alice.env(CREDENTIAL=cluster.token) | {"OMP_NUM_THREADS": "1"}
        ran = forks.run("wooly", *argv, env=env, timeout=100)
        assert ran.returncode == 0, ran.stderr + ran.stdout
        return ran.stdout

    return operate


@pytest.fixture
def run(cluster, alice):
    """Run a script. Returns its output and what it said."""

    def run(script, *arguments, code=0, **env):
        more = {"OMP_NUM_THREADS": "1", "PIDS": str(cluster.keeper.pids), **env}
        argv = ["run", str(SCRIPTS / script), *map(str, arguments)]
        done = forks.run("wooly", *argv, env=alice.env() | more, timeout=TIMEOUT_S)
        assert done.returncode == code, done.stderr + done.stdout
        return done.stdout, done.stderr

    return run
