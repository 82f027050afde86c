"""An installation whose every part can be made to fail: NATS servers, routers, executors, scheduler, metering, compiler.

Real processes with keys and tokens. A database of PostgreSQL where a server is installed, else of SQLite. Clients and services
reach what they reach through links. `Installation` starts and ends it, and carries faults out; it decides nothing.
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
from links import Link
from schedule import Fault, Kind
from wooly_bus.authority import make_authority
from wooly_testkit.postgres import PostgresMissingError, postgres_server
from work import rest

#: Bytes of a disk that can be filled.
DISK = 192 << 20
#: Who has one, where this user may mount file systems.
ON_SMALL_DISKS = ("nats-2", "executor-1", "compiler")
#: Seconds for which an installation may start, on a busy machine.
START_S = 180.0


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@dataclass
class Process:
    """One process of the installation, started again whenever it ends, as a supervisor would.

    Attributes:
        wanted: it is to run; a kill takes that back until the fault is over.
        ends: (seconds since the beginning, status) of every end that no fault of ours brought about.
        starts: how often it was started.
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
        """Start it."""
        with self.log.open("ab") as out:
            self.popen = subprocess.Popen(
                self.argv, env=self.env, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self.starts += 1
        self.wanted, self.stopped = True, False

    def signal(self, number: int) -> None:
        """Send it a signal, if it lives."""
        if self.popen is not None and self.popen.poll() is None:
            self.popen.send_signal(number)

    @property
    def pid(self) -> int | None:
        """Its number while it lives."""
        return self.popen.pid if self.popen is not None and self.popen.poll() is None else None


class Installation:
    """Everything under one folder; `running()` starts it and leaves nothing behind.

    Args:
        folder: for keys, states and logs.
        routers: how many.
        executors: how many.
        nats: how many servers; three can lose one.
        small_caches: what is kept for later, in executors and in NATS servers, takes little memory, and is soon full.
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
        self.problems: list[str] = []
        self._counts = routers, executors, nats
        self._small_caches = small_caches
        self._keys = make_authority(folder / "keys")
        self._shim = clock_shim(folder)
        if self._shim is None:
            self.problems.append("no clock can be moved: there is no C compiler (cc)")
        self._watching = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        self._lock = threading.Lock()

    # -- beginning and end -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self) -> Iterator[Installation]:
        """Start everything; end everything with the block."""
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
                self.problems.append(f"no disk can be filled: {done.stderr.decode().strip()}")
                return
            stack.callback(subprocess.run, ["umount", "-l", str(place)], capture_output=True)
            self.disks[name] = place

    def _databases(self, stack: contextlib.ExitStack) -> None:
        try:
            server = stack.enter_context(postgres_server())
            self._urls = {"router": server.database(), "metering": server.database()}
            self.database = "PostgreSQL"
        except PostgresMissingError as e:
            self.problems.append(f"databases are SQLite: {e}")
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
        """Processes that were started by this installation or its clients and still live."""
        found = []
        for process in psutil.process_iter(["pid", "cmdline", "environ"]):
            if (process.info["environ"] or {}).get("WOOLY_FAULTS_MARK") == self.mark and process.pid != os.getpid():
                found.append(f"{process.pid}: {' '.join(process.info['cmdline'] or [])[:200]}")
        return found

    # -- what there is ---------------------------------------------------------------------------------------------

    @property
    def nats_url(self) -> str:
        """Of all servers, past the links."""
        return self._nats_url

    @property
    def service_creds(self) -> Path:
        """What a service shows NATS."""
        return self._keys.service_creds

    @property
    def databases(self) -> dict[str, str]:
        """The database of each service that has one, for a synchronous engine."""
        return {name: url.replace("+aiosqlite", "") for name, url in self._urls.items()}

    @property
    def admin_token(self) -> str:
        """Of the first administrator."""
        return self._admin_token

    @property
    def url(self) -> str:
        """Of REST: whichever router answers."""
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
        # Clients that are told of other servers would go round the links; a server would take a small disk for its limit.
        text = f'server_name: {name}\nhost: 127.0.0.1\nport: {port}\njetstream {{ store_dir: "{store}/js", max_file: 64GB }}\n'
        if len(routes) > 1:  # one server with routes would wait for the others, without JetStream
            text += (
                f"cluster {{ name: wooly, host: 127.0.0.1, port: {route}, no_advertise: true, routes: [{peers}] }}\n"
            )
        folder = self.folder / "nats"
        folder.mkdir(exist_ok=True)
        (folder / "nats.conf").write_text(self._keys.server_conf.read_text())
        conf = folder / f"{name}.conf"
        conf.write_text(text + 'include "nats.conf"\n')
        beside = Path(sysconfig.get_path("scripts")) / "nats-server"
        binary = str(beside) if beside.exists() else shutil.which("nats-server") or "nats-server"
        # Go's collector may let garbage grow to what lives: it is told to keep to less, so that what lives is seen.
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
        """What each kind of fault can meet here."""
        services = tuple(n for n in self.processes if not n.startswith("nats"))
        return {
            "kill": tuple(self.processes),
            "stop": tuple(self.processes),
            "restart": services,
            "cut": tuple(n for n in self._lines()),
            "slow": tuple(n for n in self._lines()),
            "full": tuple(self.disks),
            "clock": tuple(self.clocks),
        }

    def _lines(self) -> list[str]:
        """Links that faults meet, those of one process to all NATS servers as one."""
        return list(
            dict.fromkeys(n.rsplit(" ", 1)[0] if n.startswith("nats of") else n for n in self.links if n != "front")
        )

    def begin(self, fault: Fault) -> Callable[[], None]:
        """Carry a fault out. Returns what ends it."""
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
        """Start again what ended though no fault of ours ended it, and note that it did."""
        while not self._watching.wait(0.5):
            with self._lock:
                for process in self.processes.values():
                    if process.wanted and process.popen is not None and process.popen.poll() is not None:
                        process.ends.append((time.monotonic() - self.began, process.popen.returncode))
                        process.start()


def move_clock(clock: Path, seconds: int) -> None:
    """Have the process that reads `clock` be so far off the true time."""
    with clock.open("r+b" if clock.exists() else "wb") as file:  # in place: the process has it mapped
        file.write(struct.pack("=q", seconds))


def clock_shim(folder: Path) -> Path | None:
    """What is preloaded to move a process's clock; None where no C compiler is."""
    made = folder / "clock.so"
    source = Path(__file__).with_name("clock.c")
    with contextlib.suppress(FileNotFoundError):
        done = subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(made), str(source), "-ldl"], check=False)
        return made if done.returncode == 0 else None
    return None
