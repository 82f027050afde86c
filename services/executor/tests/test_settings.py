"""Tests of settings from the environment, and of the messages for invalid settings and command lines."""

import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError
from wooly_bus import host
from wooly_bus.channel import Endpoint
from wooly_executor.app import make_runtime
from wooly_executor.errors import MissingDriverError
from wooly_executor.runtime.torch_cpu import TorchCpuRuntime
from wooly_executor.settings import PREFIX, ExecutorSettings, complaints
from wooly_testkit import forks
from wooly_testkit.executor import executor_process

VALID = {
    "WOOLY_EXECUTOR_ID": "gpu-7",
    "WOOLY_EXECUTOR_NODE": "rack.local",
    "WOOLY_EXECUTOR_RUNTIME": "torch_cpu",
    "WOOLY_EXECUTOR_MEMORY": "1048576",
    "WOOLY_EXECUTOR_DISPATCH": "fifo",
    "WOOLY_EXECUTOR_HEARTBEAT_S": "0.5",
    "WOOLY_EXECUTOR_NATS_URL": "nats://control:4222",
    "WOOLY_EXECUTOR_STATE_DIR": "/var/lib/executor",
}
INVALID = [
    ("WOOLY_EXECUTOR_MEMORY", "0", "greater than or equal to 256"),
    ("WOOLY_EXECUTOR_MEMORY", "-1", "greater than or equal to 256"),
    ("WOOLY_EXECUTOR_OVERCOMMIT_PERCENT", "1001", "less than or equal to 1000"),
    ("WOOLY_EXECUTOR_SWAP_HOST", "-1", "greater than or equal to 0"),
    ("WOOLY_EXECUTOR_MEMORY", "16 GB", "valid integer"),
    ("WOOLY_EXECUTOR_RUNTIME", "gpu", "'auto', 'cuda', 'hip', 'opencl' or 'torch_cpu'"),
    ("WOOLY_EXECUTOR_DEVICE", "-1", "greater than or equal to 0"),
    ("WOOLY_EXECUTOR_DISPATCH", "unfair", "'fair' or 'fifo'"),
    ("WOOLY_EXECUTOR_HEARTBEAT_S", "0", "greater than 0"),
    ("WOOLY_EXECUTOR_ID", "gpu.7", "match pattern"),
]


@pytest.fixture
def clean(monkeypatch):
    for name in [n for n in os.environ if n.startswith("WOOLY_EXECUTOR_")]:
        monkeypatch.delenv(name)
    return monkeypatch


def run(*arguments, **variables):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WOOLY_EXECUTOR_")} | variables
    return forks.run("wooly_executor", *arguments, env=environment, timeout=60)


def test_settings_every_variable_is_read(clean):
    for name, value in VALID.items():
        clean.setenv(name, value)
    s = ExecutorSettings()
    assert (s.id, s.node, s.runtime, s.memory, s.heartbeat_s) == ("gpu-7", "rack.local", "torch_cpu", 1 << 20, 0.5)
    assert s.nats_url == "nats://control:4222" and s.dispatch == "fifo"
    assert s.endpoints() == ["unix:///var/lib/executor/gpu-7.sock"]


def test_settings_listen_accepts_several_endpoints(clean):
    clean.setenv("WOOLY_EXECUTOR_LISTEN", "tcp://10.0.0.7:7400, unix:///run/x.sock,")
    assert ExecutorSettings().endpoints() == ["tcp://10.0.0.7:7400", "unix:///run/x.sock"]


def test_settings_wildcard_address_is_advertised_by_the_nodes_name(clean):
    clean.setenv("WOOLY_EXECUTOR_NODE", "rack.local")
    bound = [
        Endpoint.parse(text) for text in ("tcp://0.0.0.0:7400", "tls://[::]:7401", "tcp://10.0.0.7:1", "unix:///x")
    ]
    assert ExecutorSettings().advertised(bound) == [
        "tcp://rack.local:7400",
        "tls://rack.local:7401",
        "tcp://10.0.0.7:1",
        "unix:///x",
    ]
    clean.setenv("WOOLY_EXECUTOR_ADVERTISE", "tcp://gpu7.example.org:9000, unix:///x")
    assert ExecutorSettings().advertised(bound) == ["tcp://gpu7.example.org:9000", "unix:///x"]


def test_settings_every_variable_is_in_the_readme():
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    assert {f"`{PREFIX}{name.upper()}`" for name in ExecutorSettings.model_fields} == set(
        re.findall(rf"^\| (`{PREFIX}\w+`)", readme, re.MULTILINE)
    )


def test_settings_cpu_device_leaves_host_memory_to_the_executor(clean, monkeypatch):
    monkeypatch.setenv("WOOLY_EXECUTOR_HOST_MEMORY", str(16 << 30))
    settings = ExecutorSettings()
    assert settings.device_memory(None) == 14 << 30 and settings.device_memory(1 << 40) == 1 << 40
    assert settings.swap(14 << 30).host == 1 << 30
    assert settings.swap(0).host == settings.swap(1 << 30).host == 4 << 30 and settings.swap(17 << 30).host == 0
    monkeypatch.setenv("WOOLY_EXECUTOR_SWAP_HOST", "5")
    assert ExecutorSettings().swap(14 << 30).host == 5


def test_settings_default_memory_is_the_whole_device(clean):
    assert ExecutorSettings().memory is None and ExecutorSettings().runtime == "auto"


def test_settings_overcommit_defaults_to_the_clusters(clean):
    clean.setenv("CONTROLLER_DEFAULT_VRAM_OVERCOMMIT_PERCENT", "20")
    assert ExecutorSettings().overcommit_percent == 20
    clean.setenv("WOOLY_EXECUTOR_OVERCOMMIT_PERCENT", "150")
    assert ExecutorSettings().overcommit_percent == 150


@pytest.mark.parametrize(("name", "value", "message"), INVALID)
def test_settings_invalid_value_names_its_variable(clean, name, value, message):
    clean.setenv(name, value)
    with pytest.raises(ValidationError) as caught:
        ExecutorSettings()
    (line,) = complaints(caught.value)
    assert line.startswith(f"{name}={value}: ") and message in line


def test_make_runtime_by_name():
    assert type(make_runtime("torch_cpu")) is TorchCpuRuntime
    with pytest.raises(ValueError, match="unknown runtime 'gpu'; use one of auto, cuda, hip, opencl, torch_cpu"):
        make_runtime("gpu")


def test_make_runtime_auto_prefers_opencl(monkeypatch):
    assert make_runtime("auto").facts()["runtime"] == "opencl"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert make_runtime("auto").facts()["runtime"] == "torch-cpu"
    with pytest.raises(MissingDriverError, match=r"pyopencl is not installed: pip install 'pyopencl\[pocl\]'"):
        make_runtime("opencl")


def test_process_without_a_driver_names_what_is_missing(tmp_path):
    ended = run(
        "--standalone", "--runtime", "opencl", OCL_ICD_VENDORS=str(tmp_path), PYTHONPATH=_without_pocl(tmp_path)
    )
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert "OpenCL does not start" in ended.stderr and "pip install 'pyopencl[pocl]'" in ended.stderr


def test_executor_whose_folder_runs_no_code_says_what_to_set(monkeypatch, tmp_path):
    """PoCL would end the process at the first launch."""
    mounted = SimpleNamespace(f_flag=os.ST_NOEXEC | os.ST_NOSUID)
    monkeypatch.setattr(host.os, "statvfs", lambda folder: mounted)
    with pytest.raises(MissingDriverError, match=r"noexec; set WOOLY_EXECUTOR_STATE_DIR"):
        make_runtime("opencl", state_dir=tmp_path)


def _without_pocl(folder):
    """A PYTHONPATH with a pyopencl that finds no platform, as on a machine without a driver."""
    (folder / "pyopencl.py").write_text("def get_platforms():\n    raise RuntimeError('PLATFORM_NOT_FOUND_KHR')\n")
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


def test_process_with_invalid_variables_names_all_of_them():
    ended = run(WOOLY_EXECUTOR_MEMORY="much", WOOLY_EXECUTOR_ID="a.b")
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert "WOOLY_EXECUTOR_MEMORY=much" in ended.stderr and "WOOLY_EXECUTOR_ID=a.b" in ended.stderr


@pytest.mark.parametrize(
    ("listen", "message"),
    [
        ("http://x", "the scheme must be one of"),
        ("unix:///nowhere/x.sock", "cannot listen on"),
        ("tls://localhost:0", "WOOLY_EXECUTOR_TLS_CERT"),
    ],
)
def test_process_with_an_unusable_address_exits_with_the_cause(tmp_path, listen, message):
    ended = run("--standalone", "--listen", listen, WOOLY_EXECUTOR_STATE_DIR=str(tmp_path))
    assert ended.returncode == 2 and message in ended.stderr and "Traceback" not in ended.stderr


def test_process_with_an_invalid_other_name_exits_with_the_cause():
    ended = run(WOOLYAI_GPU_IDS="0,1")
    assert ended.returncode == 2 and "WOOLYAI_GPU_IDS=0,1" in ended.stderr and "WOOLY_EXECUTOR_DEVICE" in ended.stderr


def test_process_without_a_state_directory_exits_with_the_cause(tmp_path):
    (tmp_path / "file").write_text("")
    ended = run("--standalone", WOOLY_EXECUTOR_STATE_DIR=str(tmp_path / "file" / "x"))
    assert ended.returncode == 2 and "file/x" in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.parametrize("runtime", ["torch_cpu", pytest.param("opencl", marks=pytest.mark.slow)])
def test_process_serves_its_session_until_sigterm(wis, runtime):
    anew = {} if runtime == "opencl" else {"start": forks.Forked}  # one process starts from nothing, as a user's does
    with executor_process(runtime=runtime, **anew) as running:
        client = wis.client(Endpoint.parse(running.endpoints[0]), running.session_id, running.token)
        client.make(1, 1, 2)
        assert client.floats(1, 2) == [1, 2]
        assert client.welcome["device"]["runtime"] == {"torch_cpu": "torch-cpu"}.get(runtime, runtime)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(30) == 0
        client.channel.close()
