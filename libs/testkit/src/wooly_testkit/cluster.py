"""A whole cluster with authentication: NATS with keys, a router that requires tokens, scheduler, metering and executors.

`Cluster` starts the processes. `Tenant` is a tenant of the cluster, with its token, its credentials and the actions of its
client.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from wooly_bus import contracts
from wooly_bus.access import Access
from wooly_bus.authority import make_authority
from wooly_bus.channel import ChannelClient, Endpoint
from wooly_bus.contract_types import Q, R, Rpc
from wooly_bus.credentials import Credentials
from wooly_bus.rpc import ControlClient
from wooly_wis.frames import PROTOCOL, Kind, pack_json
from wooly_wis.messages import (
    ClientFacts,
    CloseSessionReply,
    CloseSessionRequest,
    OpenSessionReply,
    OpenSessionRequest,
    TaskRequest,
)

from wooly_testkit import forks
from wooly_testkit.forks import Forked
from wooly_testkit.nats import nats_server

#: Longest wait in seconds for an action of several processes on a busy machine.
PATIENCE_S = 60.0
#: Seconds between two looks at a condition. Most looks are REST requests, which take a router several milliseconds of CPU.
LOOK_S = 0.1


class Cluster:
    """The processes of one installation.

    Args:
        folder: folder for keys, state, sockets and logs (`<service>.log`).
        stack: ends the processes.
        executors: ids of the executors, one process each.
        router: further settings of the router, without their prefix.
        executor: further settings of each executor, without their prefix.
        scheduler: further settings of the scheduler, without their prefix.
        metering: further settings of metering, without their prefix.

    Attributes:
        url: URL of the router's REST.
        token: token of the first administrator.
        processes: processes by name of the service; executors by id.
    """

    def __init__(
        self,
        folder: Path,
        stack: contextlib.ExitStack,
        *,
        executors: tuple[str, ...] = ("x",),
        router: Mapping[str, str] | None = None,
        executor: Mapping[str, str] | None = None,
        scheduler: Mapping[str, str] | None = None,
        metering: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.keys = make_authority(folder / "keys")
        self.nats_url = stack.enter_context(nats_server("-c", str(self.keys.server_conf)))
        self._stack = stack
        self._prepared: dict[str, tuple[str, dict[str, str]]] = {}
        self.processes: dict[str, Forked] = {}
        wanted: list[tuple[str, str, Mapping[str, str]]] = [
            (
                "router",
                "router",
                {
                    "HTTP_PORT": "0",
                    "AUTH": "tokens",
                    "SIGNING_KEY": str(self.keys.signing_seed),
                    "CHANNEL_KEY": str(self.keys.channel_seed),
                    "RATE_LIMIT": "1000",
                    "BLOB_BYTES": str(4 << 20),
                    "TENANT_BLOB_BYTES": str(12 << 20),
                    **(router or {}),
                },
            ),
            ("scheduler", "scheduler", {"METRICS_PORT": "0", **(scheduler or {})}),
            ("metering", "metering", {"HTTP_PORT": "0", **(metering or {})}),
        ]
        for name in executors:
            settings = {
                "ID": name,
                "LISTEN": f"unix://{folder}/{name}.sock",
                "CHANNEL_KEY": self.keys.channel_public,
                "MEMORY": str(1 << 30),
                "RUNTIME": "torch_cpu",
            }
            wanted.append((name, "executor", settings | dict(executor or {})))
        for name, service, own in wanted:
            self.prepare(name, service, own)
            self.start(name)
        self.find_router()
        self.token = (folder / "router" / "admin.token").read_text()
        self.wait(lambda: sum([len(n["gpus"]) for n in self.rest("GET", "nodes")["nodes"]]) >= len(executors))

    def prepare(self, name: str, service: str, settings: Mapping[str, str]) -> None:
        """Say how the process called `name` is to be started: the service and its settings, without their prefix."""
        prefix = f"WOOLY_{service.upper()}_"
        own = {"NATS_URL": self.nats_url, "STATE_DIR": str(self.folder / name), **settings}
        shared = {"WOOLY_NATS_CREDS": str(self.keys.service_creds), "OMP_NUM_THREADS": "1"}
        self._prepared[name] = service, {**os.environ, **shared, **{prefix + k: v for k, v in own.items()}}

    def start(self, name: str, module: str = "", **more: str) -> None:
        """Start or restart a process.

        Args:
            name: name of the process.
            module: module to run instead of the service's own; it must be on `PYTHONPATH`.
            more: further environment variables.
        """
        service, environment = self._prepared[name]
        log = self._stack.enter_context((self.folder / f"{name}.log").open("a"))
        process = Forked(module or f"wooly_{service}", env=environment | more, stdout=log, stderr=log)
        self._stack.callback(process.wait)
        self._stack.callback(process.terminate)
        self.processes[name] = process

    def find_router(self) -> None:
        """Wait until the router serves REST, and store its URL."""
        port = self.folder / "router" / "router.port"
        self.wait(lambda: port.exists() and bool(port.read_text()))
        self.url = f"http://127.0.0.1:{port.read_text()}"

    def kill(self, name: str) -> None:
        """Kill a process, as a crash would."""
        self.processes[name].kill()
        self.processes[name].wait()
        if name == "router":
            (self.folder / "router" / "router.port").unlink(missing_ok=True)

    def log(self, name: str) -> str:
        """The log of a process."""
        return (self.folder / f"{name}.log").read_text()

    def wait(self, condition: Callable[[], object]) -> None:
        """Wait until a condition holds.

        Raises:
            AssertionError: the condition does not hold after `PATIENCE_S`; the message has the ends of all logs.
        """
        until = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < until, [p.read_text()[-500:] for p in self.folder.glob("*.log")]
            time.sleep(LOOK_S)

    def rest(self, method: str, path: str, body: object = None, token: str | None = None) -> Any:
        """Send a request to `/api/v1/<path>`. Returns the answer, or the error code. Without `token`, use the administrator's."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {token or self.token}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/api/v1/{path}", data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as e:
            with e:
                return json.loads(e.read())["code"]


class Tenant:
    """One tenant of a cluster, with the actions of its client.

    Attributes:
        token: secret of its API token.
        held: its credentials for NATS at the time of its creation.
        control: its control connection.
    """

    def __init__(self, cluster: Cluster, name: str, **settings: object) -> None:
        self.cluster, self.name = cluster, name
        cluster.rest("PUT", f"tenants/{name}", settings)
        self.token: str = cluster.rest("POST", f"tenants/{name}/tokens", {})["secret"]
        self.held = self.credentials()
        self.control = ControlClient(Access(cluster.nats_url, self.credentials))

    def credentials(self) -> Credentials:
        """New credentials for NATS."""
        return Credentials.parse(self.cluster.rest("POST", "credentials", {}, self.token)["credentials"])

    def ask(self, rpc: Rpc[Q, R], message: Q) -> R:
        """Send a request to a service as this tenant."""
        return self.control.request(rpc, message, timeout=PATIENCE_S)

    def open(self, **wanted: Any) -> OpenSessionReply:
        """Open a session."""
        client = ClientFacts(host="h", pid=1, program=f"{self.name}.py")
        request = OpenSessionRequest(client=client, **wanted)
        return self.ask(contracts.ROUTER_SESSION_OPEN, request)

    def close(self, opened: OpenSessionReply) -> CloseSessionReply:
        """Close a session."""
        request = CloseSessionRequest(session_id=opened.session_id, token=opened.token)
        return self.ask(contracts.ROUTER_SESSION_CLOSE, request)

    def env(self, **more: str) -> dict[str, str]:
        """The environment of a client of this tenant. `more` has settings without their prefix."""
        settings = {"CONTROLLER_URL": self.cluster.url, "CREDENTIAL": self.token, **more}
        home = self.cluster.folder / self.name
        home.mkdir(exist_ok=True)
        return {**os.environ, "HOME": str(home), **{f"WOOLYAI_{k}": v for k, v in settings.items()}}

    def wooly(self, *argv: object, code: int = 0) -> str:
        """Run `wooly argv…` and check its exit status. Returns its output: stdout, or stderr if `code` is not 0."""
        env = self.env() | {"OMP_NUM_THREADS": "1"}
        ran = forks.run("wooly", *map(str, argv), env=env, timeout=100)
        assert ran.returncode == code, ran.stderr + ran.stdout
        return str(ran.stdout if code == 0 else ran.stderr)

    def story(self, name: str) -> list[str]:
        """The states that a task went through."""
        return [s.state for s in self.ask(contracts.ROUTER_TASK_GET, TaskRequest(task_id=name)).story]


def enter(
    opened: OpenSessionReply, *, session_id: str | None = None, token: str | None = None
) -> tuple[ChannelClient, Any]:
    """Open a data channel to the executor of a session. Returns the channel and the answer to the hello."""
    (part,) = opened.parts
    channel = ChannelClient.connect(Endpoint.parse(part.endpoints[0]))
    hello = {"protocol": PROTOCOL, "session_id": session_id or opened.session_id, "token": token or part.token}
    channel.send(Kind.HELLO, pack_json(hello))
    return channel, channel.recv(20)
