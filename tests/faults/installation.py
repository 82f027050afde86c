"""An installation in which every part can fail: NATS servers, routers, executors, scheduler, metering, compiler.

It consists of real processes with keys and tokens. The database is PostgreSQL if a server is installed, else SQLite. All
connections go through links. `Installation` starts and ends the processes, and carries out faults. It makes no decisions.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from schedule import Fault, Kind
from wooly_bus.authority import make_authority
from wooly_testkit.links import Link
from wooly_testkit.postgres import PostgresMissingError, PostgresServer, postgres_server
from work import rest

#: Size in bytes of a disk that can be filled.
DISK = 192 << 20
#: Processes with such a disk, if this user may mount file systems.
ON_SMALL_DISKS = ("nats-2", "executor-1", "compiler")
#: The database server as a target of faults.
DATABASE = "postgresql"
#: Maximum time of the installation's start on a busy machine, in seconds.
START_S = 180.0


def free_port() -> int:
    """Return a port of the loopback interface on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@dataclass
class Process:
    """One process of the installation. It is restarted whenever it ends, as by a supervisor.

    Attributes:
        wanted: the process should run. A kill sets this to false until the fault is over.
        ends: (seconds since the beginning, status) of each end that was not caused by a fault.
        starts: number of starts.
    """

    name: str
    argv: list[str]
    env: dict[str, str]
    log: Path
    user: str | None = None
    wanted: bool = True
    stopped: bool = False
    ends: list[tuple[float, int]] = field(default_factory=list)
    starts: int = 0
    popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process."""
        with self.log.open("ab") as out:
            self.popen = subprocess.Popen(
                self.argv, env=self.env, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self.starts += 1
        self.wanted, self.stopped = True, False

    def signal(self, number: int) -> None:
        """Send the process a signal, if it is alive."""
        if self.popen is not None and self.popen.poll() is None:
            self.popen.send_signal(number)

    @property
    def pid(self) -> int | None:
        """The process id while the process is alive, else None."""
        return self.popen.pid if self.popen is not None and self.popen.poll() is None else None


class Installation:
    """All processes of an installation, with their files in one folder. `running()` starts them and removes everything at its
    end.

    Args:
        folder: folder for keys, states and logs.
        routers: number of routers.
        executors: number of executors.
        nats: number of NATS servers; three servers tolerate the loss of one.
        small_caches: make the caches of executors and NATS servers small, so that they are full soon.
    """

    def __init__(
        self, folder: Path, *, routers: int = 2, executors: int = 2, nats: int = 3, small_caches: bool = False
    ) -> None:
        self.folder = folder
        self.mark = secrets.token_hex(8)
        self.processes: dict[str, Process] = {}
        self.links: dict[str, Link] = {}
        self.disks: dict[str, Path] = {}
        self.clocks: dict[str, Path] = {}
        self.began = time.monotonic()
        self.database = ""
        self._postgres: PostgresServer | None = None
        self.problems: list[str] = []
        self._counts = routers, executors, nats
        self._small_caches = small_caches
        self._keys = make_authority(folder / "keys")
        self._shim = clock_shim(folder)
        if self._shim is None:
            self.problems.append("no clock can be moved, because there is no C compiler (cc)")
        self._watching = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        self._lock = threading.Lock()

    # -- beginning and end -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self) -> Iterator[Installation]:
        """Start all processes, and end them at the end of the block."""
        with contextlib.ExitStack() as stack:
            self._mount(stack)
            self._databases(stack)
            stack.callback(self._end)
            self._describe()
            for process in self.processes.values():
                process.start()
            self._supervisor.start()
            self._wait_for_nodes()
            yield self

    def _mount(self, stack: contextlib.ExitStack) -> None:
        for name in ON_SMALL_DISKS:
            place = self.folder / name
            place.mkdir(mode=0o700)
            done = subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={DISK},mode=0700", f"wooly-{self.mark}", str(place)],
                capture_output=True,
                check=False,
            )
            if done.returncode:
                self.problems.append(f"no disk can be filled, because mounting fails: {done.stderr.decode().strip()}")
                return
            stack.callback(subprocess.run, ["umount", "-l", str(place)], capture_output=True)
            self.disks[name] = place

    def _databases(self, stack: contextlib.ExitStack) -> None:
        try:
            self._postgres = server = stack.enter_context(postgres_server(durable=True))
            self._urls = {"router": server.database(), "metering": server.database()}
            self.database = "PostgreSQL"
        except PostgresMissingError as e:
            self.problems.append(f"databases are SQLite, because PostgreSQL cannot be used: {e}")
            self._urls = {name: f"sqlite+aiosqlite:///{self.folder}/{name}.sqlite" for name in ("router", "metering")}
            self.database = "SQLite"

    def _end(self) -> None:
        self._watching.set()
        for process in self.processes.values():
            process.wanted = False
            process.signal(signal.SIGCONT)
            process.signal(signal.SIGTERM)
        until = time.monotonic() + 20
        for process in self.processes.values():
            if process.popen is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.popen.wait(max(until - time.monotonic(), 0.1))
                process.signal(signal.SIGKILL)
                process.popen.wait(10)
        for link in self.links.values():
            link.close()

    def left_over(self) -> list[str]:
        """Return the processes of this installation and its clients that are still alive."""
        found = []
        for process in psutil.process_iter(["pid", "cmdline", "environ"]):
            if (process.info["environ"] or {}).get("WOOLY_FAULTS_MARK") == self.mark and process.pid != os.getpid():
                found.append(f"{process.pid}: {' '.join(process.info['cmdline'] or [])[:200]}")
        return found

    # -- addresses and credentials ------------------------------------------------------------------------------------

    @property
    def nats_url(self) -> str:
        """Addresses of all NATS servers, without links."""
        return self._nats_url

    @property
    def service_creds(self) -> Path:
        """The credentials file of a service."""
        return self._keys.service_creds

    @property
    def databases(self) -> dict[str, str]:
        """The database URL of each service that has a database, for a synchronous engine."""
        return {name: url.replace("+aiosqlite", "") for name, url in self._urls.items()}

    @property
    def admin_token(self) -> str:
        """The token of the first administrator."""
        return self._admin_token

    @property
    def url(self) -> str:
        """The URL of the REST API, through the load balancer."""
        return f"http://127.0.0.1:{self.links['front'].port}"

    def _describe(self) -> None:
        routers, executors, nats = self._counts
        ports = [free_port() for _ in range(nats)]
        routes = [free_port() for _ in range(nats)]
        all_nats = self._nats_url = ",".join(f"nats://127.0.0.1:{port}" for port in ports)
        names = [f"nats-{i}" for i in range(nats)]
        for i, name in enumerate(names):
            self._nats(name, ports[i], routes[i], routes)
        self._admin_token = "wooly_" + secrets.token_hex(24)
        http = [free_port() for _ in range(routers)]
        for i in range(routers):
            near = self._link(f"nats of router-{i}", ports)
            self._service(
                f"router-{i}",
                "router",
                near,
                HTTP_PORT=str(http[i]),
                AUTH="tokens",
                SIGNING_KEY=str(self._keys.signing_seed),
                CHANNEL_KEY=str(self._keys.channel_seed),
                DATABASE_URL=self._urls["router"],
                ADMIN_TOKEN=self._admin_token,
                CLIENT_NATS_URL=all_nats,
                RATE_LIMIT="1000",
            )
        self.links["front"] = Link("front", [("127.0.0.1", port) for port in http])
        self._service("scheduler", "scheduler", all_nats, METRICS_PORT="0")
        self._service("metering", "metering", all_nats, HTTP_PORT="0", DATABASE_URL=self._urls["metering"])
        self._service("compiler", "compiler", all_nats)
        for i in range(executors):
            port = free_port()
            near = self._link(f"nats of executor-{i}", ports)
            link = self.links[f"clients of executor-{i}"] = Link(f"clients-{i}", [("127.0.0.1", port)])
            self._service(
                f"executor-{i}",
                "executor",
                near,
                ID=f"executor-{i}",
                NODE=f"node-{i}",
                LISTEN=f"tcp://127.0.0.1:{port}",
                ADVERTISE=f"tcp://127.0.0.1:{link.port}",
                CHANNEL_KEY=self._keys.channel_public,
                MEMORY=str(1 << 30),
                SWAP_DISK=str(256 << 20),
                **({"PROGRAMS": str(8 << 20)} if self._small_caches else {}),
            )

    def _link(self, name: str, ports: list[int]) -> str:
        urls = []
        for i, port in enumerate(ports):
            link = self.links[f"{name} {i}"] = Link(f"{name} {i}", [("127.0.0.1", port)])
            urls.append(f"nats://127.0.0.1:{link.port}")
        return ",".join(urls)

    def _nats(self, name: str, port: int, route: int, routes: list[int]) -> None:
        store = self.folder / name
        store.mkdir(exist_ok=True, mode=0o700)
        peers = ", ".join(f"nats://127.0.0.1:{r}" for r in routes)
        # no_advertise: clients that learn the addresses of other servers would bypass the links. max_file: without it, a server
        # would use the size of a small disk as its limit.
        text = f'server_name: {name}\nhost: 127.0.0.1\nport: {port}\njetstream {{ store_dir: "{store}/js", max_file: 64GB }}\n'
        if len(routes) > 1:  # a single server with routes would wait for the others, without JetStream
            text += (
                f"cluster {{ name: wooly, host: 127.0.0.1, port: {route}, no_advertise: true, routes: [{peers}], "
                'ping_interval: "5s", ping_max: 2 }\n'
            )
        folder = self.folder / "nats"
        folder.mkdir(exist_ok=True)
        (folder / "nats.conf").write_text(self._keys.server_conf.read_text())
        conf = folder / f"{name}.conf"
        conf.write_text(text + 'include "nats.conf"\n')
        beside = Path(sysconfig.get_path("scripts")) / "nats-server"
        binary = str(beside) if beside.exists() else shutil.which("nats-server") or "nats-server"
        # A smaller target of Go's garbage collector makes the live memory visible.
        self._process(name, [binary, "-c", str(conf)], {"GOMEMLIMIT": "32MiB"} if self._small_caches else {})

    def _service(self, name: str, service: str, nats_url: str, **settings: str) -> None:
        prefix = f"WOOLY_{service.upper()}_"
        own = {"NATS_URL": nats_url, "STATE_DIR": str(self.folder / name), **settings}
        (self.folder / name).mkdir(exist_ok=True, mode=0o700)
        env = {prefix + k: v for k, v in own.items()}
        nats = self._counts[2]
        env |= {"WOOLY_NATS_CREDS": str(self._keys.service_creds), "OMP_NUM_THREADS": "1"}
        env |= {"WOOLY_NATS_REPLICAS": "3"} if nats >= 3 else {}
        if self._shim is not None:
            clock = self.clocks[name] = self.folder / f"{name}.clock"
            move_clock(clock, 0)
            env |= {"LD_PRELOAD": str(self._shim), "WOOLY_FAULTS_CLOCK": str(clock)}
        self._process(name, [sys.executable, "-m", f"wooly_{service}"], env)

    def _process(self, name: str, argv: list[str], env: Mapping[str, str]) -> None:
        whole = {**os.environ, **env, "WOOLY_FAULTS_MARK": self.mark}
        self.processes[name] = Process(name, argv, whole, self.folder / f"{name}.log")

    def _wait_for_nodes(self) -> None:
        _, executors, _ = self._counts
        until = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError, ValueError, KeyError):
                if len(rest(self.url, "GET", "nodes", self._admin_token)["nodes"]) >= executors:
                    return
            if time.monotonic() > until:
                ends = {p.name: p.log.read_text(errors="replace")[-600:] for p in self.processes.values()}
                raise RuntimeError(f"the installation did not start in {START_S:.0f} s: {ends}")
            time.sleep(0.5)

    # -- faults ----------------------------------------------------------------------------------------------------

    def targets(self) -> dict[Kind, tuple[str, ...]]:
        """Return the possible targets of each kind of fault."""
        services = tuple(n for n in self.processes if not n.startswith("nats"))
        return {
            "kill": (*self.processes, *((DATABASE,) if self._postgres is not None else ())),
            "stop": tuple(self.processes),
            "restart": services,
            "cut": tuple(n for n in self._lines()),
            "slow": tuple(n for n in self._lines()),
            "full": tuple(self.disks),
            "clock": tuple(self.clocks),
        }

    def _lines(self) -> list[str]:
        """Return the links that faults can affect. The links of one process to all NATS servers count as one."""
        return list(
            dict.fromkeys(n.rsplit(" ", 1)[0] if n.startswith("nats of") else n for n in self.links if n != "front")
        )

    def begin(self, fault: Fault) -> Callable[[], None]:
        """Begin a fault. Returns the function that ends it."""
        if fault.target == DATABASE:
            assert self._postgres is not None
            self._postgres.crash()
            return self._postgres.start
        if fault.kind in ("kill", "stop", "restart"):
            return self._to_process(self.processes[fault.target], fault.kind)
        if fault.kind in ("cut", "slow"):
            links = [
                link for name, link in self.links.items() if name == fault.target or name.startswith(f"{fault.target} ")
            ]
            for link in links:
                link.cut() if fault.kind == "cut" else link.slow(fault.amount, 2 << 20)
            return lambda: [link.mend() for link in links] and None
        if fault.kind == "full":
            filling = self.disks[fault.target] / "filling"
            with filling.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(1 << 20))
            return lambda: filling.unlink(missing_ok=True)
        clock = self.clocks[fault.target]
        move_clock(clock, int(fault.amount))
        return lambda: move_clock(clock, 0)

    def _to_process(self, process: Process, kind: Kind) -> Callable[[], None]:
        with self._lock:
            if kind == "stop":
                process.stopped = True
                process.signal(signal.SIGSTOP)
            else:
                process.wanted = False
                process.signal(signal.SIGKILL if kind == "kill" else signal.SIGTERM)

        def mend() -> None:
            if kind == "stop":
                process.signal(signal.SIGCONT)
                process.stopped = False
                return
            if process.popen is not None:
                try:
                    process.popen.wait(20)
                except subprocess.TimeoutExpired:
                    self.problems.append(f"{process.name} did not end within 20 s of a signal")
                    process.signal(signal.SIGKILL)
                    process.popen.wait(10)
            with self._lock:
                process.start()

        return mend

    def _supervise(self) -> None:
        """Restart processes that ended without a fault, and record their ends."""
        while not self._watching.wait(0.5):
            with self._lock:
                for process in self.processes.values():
                    if process.wanted and process.popen is not None and process.popen.poll() is not None:
                        process.ends.append((time.monotonic() - self.began, process.popen.returncode))
                        process.start()


def move_clock(clock: Path, seconds: int) -> None:
    """Move the clock of the process that reads the file `clock`, by `seconds`."""
    with clock.open(
        "r+b" if clock.exists() else "wb"
    ) as file:  # written in place, because the process has mapped the file
        file.write(struct.pack("=q", seconds))


def clock_shim(folder: Path) -> Path | None:
    """Build the library that moves a process's clock. Returns its path, or None without a C compiler."""
    made = folder / "clock.so"
    source = Path(__file__).with_name("clock.c")
    with contextlib.suppress(FileNotFoundError):
        done = subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(made), str(source), "-ldl"], check=False)
        return made if done.returncode == 0 else None
    return None
