"""The client on macOS and Windows, as far as Linux can show it: without Unix's names, and by the types that mypy has for them."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from wooly_testkit.executor import executor_process
from wooly_testkit.forks import Forked

ROOT = Path(__file__).parents[3]
#: Folders of the packages that a client loads.
SOURCES = [ROOT / place for place in ("services/intercept/src", "libs/wis/src", "libs/bus/src", "libs/cuda-c/src")]
#: Parts of the bus that only services load. Services run on Unix.
OF_SERVICES = {
    f"wooly_bus.{name}"
    for name in ("app", "authority", "host", "http_front", "http_listener", "leadership", "private", "web", "worker")
}
#: Parts of the client's package that need an extra (Triton), and programs.
LEFT_OUT = ("wooly.triton_capture", "__main__")


def modules():
    for source in SOURCES:
        for path in sorted(source.rglob("*.py")):
            name = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
            if name not in OF_SERVICES and not name.startswith(LEFT_OUT[0]) and not name.endswith(LEFT_OUT[1]):
                yield name


@pytest.mark.connected
@pytest.mark.timeout(900)  # it imports everything anew: ten seconds, minutes on a busy machine
def test_client_without_names_of_unix_works_over_tcp():
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    with executor_process(port=port, start=Forked) as running:
        told = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("without_unix.py")), running.endpoints[1], running.token],
            input="\n".join(modules()),
            capture_output=True,
            text=True,
            timeout=800,
        )
    assert told.returncode == 0, told.stderr[-3000:]
    found = json.loads(told.stdout)
    assert found["modules"] > 200
    assert "has no unix sockets; let the executor listen on tcp://" in found["refused"]
    assert found["y"] == 83.0 and found["grad"] == [[6.0, 10.0, 14.0], [6.0, 10.0, 14.0]] and found["same"]


#: Files of services, which mypy also reads: they may use names that Windows does not have.
SERVERS = {"acceptor", "authority", "host", "http_listener", "pocl", "private", "server", "worker"}


@pytest.mark.slow
@pytest.mark.timeout(1200)  # mypy without a cache takes minutes on a busy machine
@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_client_uses_only_names_of_the_platform(platform, tmp_path):
    packages = [part for name in ("wooly", "wooly_bus", "wooly_wis", "wooly_cuda_c") for part in ("-p", name)]
    told = subprocess.run(
        [sys.executable, "-m", "mypy", "--platform", platform, "--cache-dir", str(tmp_path), *packages],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert "checked" in told.stdout or "no issues" in told.stdout, told
    found = [line for line in told.stdout.splitlines() if ": error:" in line]
    assert not [line for line in found if Path(line.partition(":")[0]).stem not in SERVERS]
