"""The compose stack: its file in every run, the running stack if a Docker engine exists."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from wooly_testkit import forks

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "deploy" / "compose"
PROFILES = ("cpu", "nvidia", "amd", "three-nats")
SECRETS = {"WOOLY_DATABASE_PASSWORD": "3database", "WOOLY_ADMIN_TOKEN": "wooly_" + "1" * 48}


def compose(*arguments, files=("compose.yaml",), check=True, **environment):
    argv = ["docker", "compose", *[part for name in files for part in ("-f", str(COMPOSE / name))], *arguments]
    env = {**os.environ, **SECRETS, **environment}
    return subprocess.run(argv, env=env, cwd=COMPOSE, check=check, capture_output=True, text=True, timeout=600)


def need_compose():
    if shutil.which("docker") is None or compose("version", check=False).returncode:
        pytest.skip("the Docker CLI with its compose plugin is not installed")


@pytest.mark.parametrize("profile", PROFILES)
def test_compose_file_is_valid(profile):
    need_compose()
    compose("--profile", profile, "config", "-q")


@pytest.mark.parametrize("secret", SECRETS)
def test_compose_without_secret_is_refused(secret):
    need_compose()
    refused = compose("config", "-q", check=False, **{secret: ""})
    assert refused.returncode and "setup.sh" in refused.stderr


def test_setup_creates_secrets_once_and_prints_client_settings(tmp_path):
    script = tmp_path / "setup.sh"
    script.write_text((COMPOSE / "setup.sh").read_text())
    said = [subprocess.run(["sh", script], check=True, capture_output=True, text=True).stdout for _ in range(2)]
    assert said[0] == said[1] and re.fullmatch(
        r"WOOLYAI_CONTROLLER_URL=http://127.0.0.1:8420 WOOLYAI_CREDENTIAL=wooly_[0-9a-f]{48}\n", said[0]
    )
    assert (tmp_path / ".env").stat().st_mode & 0o777 == 0o600
    kept = dict(line.split("=", 1) for line in (tmp_path / ".env").read_text().splitlines() if not line.startswith("#"))
    assert set(SECRETS) <= set(kept)
    # From an earlier version with passwords.
    (tmp_path / ".env").write_text("WOOLY_DATABASE_PASSWORD=old\nWOOLY_HOST=h\n")
    subprocess.run(["sh", script], check=True, capture_output=True)
    text = (tmp_path / ".env").read_text()
    assert "WOOLY_DATABASE_PASSWORD=old" in text and "WOOLY_ADMIN_TOKEN=wooly_" in text


def keys_as_compose_makes_them(folder):
    """Do the work of init-keys, in a folder instead of its volumes."""
    service = services()["init-keys"]
    (command,) = service["command"]
    for volume in service["volumes"]:
        (folder / volume.split(":")[0]).mkdir()
    command = re.sub(r"(?<![\w/])/(keys[\w-]*)", rf"{folder}/\1", command)
    for _ in range(2):  # it runs at each start
        python = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        subprocess.run([*service["entrypoint"], command], check=True, env={**os.environ, "PATH": python}, timeout=60)


def test_keys_are_separate_and_private(tmp_path):
    keys_as_compose_makes_them(tmp_path)
    assert {p.name for p in (tmp_path / "keys-service").iterdir()} == {"service.creds"}
    assert {p.name for p in (tmp_path / "keys-nats").iterdir()} == {"nats.conf"}
    assert {p.name for p in (tmp_path / "keys-router").iterdir()} == {"service.creds", "signing.seed", "channel.seed"}
    assert {p.name for p in (tmp_path / "keys-executor").iterdir()} == {"checkpoint.key"}
    assert all(p.stat().st_mode & 0o077 == 0 for p in tmp_path.glob("keys*/*"))


@pytest.mark.connected
@pytest.mark.slow  # scripts and jobs with a token are tested with the same processes in tests/e2e
def test_stack_with_compose_keys_runs_scripts_and_jobs_with_token(tmp_path):
    """The processes of compose without containers: its commands, configurations and environments."""
    from wooly_testkit.nats import nats_server

    keys_as_compose_makes_them(tmp_path)
    (tmp_path / "nats").mkdir()
    config = (COMPOSE / "nats" / "single.conf").read_text().replace("../nats-keys", "../keys-nats")
    config = re.sub(r"^(port|http_port|server_name|jetstream).*$", "", config, flags=re.MULTILINE)
    (tmp_path / "nats" / "single.conf").write_text(config)
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(nats_server("-c", str(tmp_path / "nats" / "single.conf")))
        for name in ("router", "scheduler", "executor-cpu"):
            service = services()[name]
            mounts = [volume.split(":")[:2] for volume in service["volumes"] if volume.startswith("keys-")]
            prefix = f"WOOLY_{name.split('-')[0].upper()}_"
            env = {}
            for variable, value in service["environment"].items():
                value = re.sub(
                    r"\$\{(\w+)(?::-([^}]*)|[^}]*)\}",
                    lambda m: SECRETS.get(m[1], m[2] if (m[2] or "").startswith("/") else ""),
                    value or "",
                )
                for folder, there in mounts:
                    value = value.replace(there, str(tmp_path / folder))
                env[variable] = value
            assert env.pop(f"{prefix}NATS_URL") == "nats://nats:4222"
            assert all(volume.endswith(":ro") for volume in service["volumes"] if volume.startswith("keys-"))
            if name == "executor-cpu":
                env["WOOLY_EXECUTOR_CHECKPOINTS"] = str(tmp_path / "checkpoints")
            for other in ("DATABASE_URL", "CLIENT_NATS_URL", "ADVERTISE", "NODE", "MEMORY"):
                env.pop(f"{prefix}{other}", None)
            env = {k: v for k, v in env.items() if k.startswith("WOOLY_")}
            env |= {f"{prefix}NATS_URL": url, f"{prefix}STATE_DIR": str(tmp_path / name)}
            env |= {"WOOLY_EXECUTOR_LISTEN": "tcp://127.0.0.1:0", "WOOLY_EXECUTOR_ID": "x"}
            env |= {"WOOLY_ROUTER_HTTP_PORT": "0", "WOOLY_SCHEDULER_METRICS_PORT": "0"}
            log = stack.enter_context((tmp_path / f"{name}.log").open("w"))
            process = forks.Forked(f"wooly_{name.split('-')[0]}", env=os.environ | env, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)
        port, until = tmp_path / "router" / "router.port", time.monotonic() + 60
        while not port.exists() or not port.read_text():
            assert time.monotonic() < until, (tmp_path / "router.log").read_text()
            time.sleep(0.05)
        client = {**os.environ, "HOME": str(tmp_path), "WOOLYAI_CONTROLLER_URL": f"http://127.0.0.1:{port.read_text()}"}
        script = tmp_path / "script.py"
        script.write_text("import torch\nprint('sum', (torch.ones(4, 4, device='cuda') * 3).sum().item())\n")
        refused = forks.run("wooly", "run", str(script), env=client, timeout=100)
        assert refused.returncode and "a valid token is needed" in refused.stderr
        client["WOOLYAI_CREDENTIAL"] = SECRETS["WOOLY_ADMIN_TOKEN"]
        assert "sum 48.0" in _run_until_success(["run", str(script)], client).stdout
        report = json.loads(_job(client, tmp_path))
        assert report["state"] == "completed" and report["files"], report


def _job(client, folder):
    """The output of `wooly submit` for a job of a few milliseconds."""
    (folder / "work.py").write_text(WORK.replace("400", "4"))
    np.save(folder / "x.npy", np.eye(600, dtype=np.float32))
    export = ["export", folder / "work.py:build", "-o", folder / "work.wism"]
    submit = ["submit", folder / "work.wism", "-i", f"x={folder / 'x.npy'}", "-o", folder / "out", "--json"]
    for argv in (export, submit):
        ran = forks.run("wooly", *map(str, argv), env=client, timeout=100)
        assert ran.returncode == 0, ran.stderr + ran.stdout
    return ran.stdout


def services():
    return yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]


def test_compose_variables_are_service_settings():
    from .test_chart import settings_of

    seen = set()
    for service in services().values():
        for name in service.get("environment", {}):
            match = re.fullmatch(r"WOOLY_(ROUTER|SCHEDULER|METERING|COMPILER|EXECUTOR)_(\w+)", name)
            if match:
                assert match[2].lower() in settings_of(match[1]).model_fields
                seen.add(match[1])
    assert seen == {"ROUTER", "SCHEDULER", "METERING", "COMPILER", "EXECUTOR"}


def test_compose_services_have_minimal_rights():
    for name, service in services().items():
        if "wooly-" in service["image"] and name != "init-volumes":
            assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["init"]


def test_dockerfiles_are_built_by_script_and_not_root():
    script = (ROOT / "deploy" / "docker" / "build.sh").read_text()
    files = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))
    assert len(files) == 10
    for path in files:
        text = path.read_text()
        if path.name == "base.Dockerfile":
            assert "ARG BASE" in text
            continue
        assert text.rindex("USER 10001:10001") > text.rindex("FROM ${PYTHON}")
        assert "ENTRYPOINT" not in text or "HEALTHCHECK" in text
        for source in re.findall(r"COPY (libs|services/\w+|deploy/\w+) ", text):
            assert (ROOT / source).exists()
    assert '"$name.Dockerfile"' in script


#: CPU time in seconds on one core.
WORK = """
import torch
def build():
    def work(x):
        for _ in range(400):
            x = (x @ x).tanh()
        return x
    return work, (torch.empty(600, 600),)
"""


@pytest.mark.connected
@pytest.mark.slow
@pytest.mark.parametrize("channel", ["direct", "tunnel"])
def test_client_user_runs_script_but_cannot_act_as_service(channel, tmp_path):
    """NATS with the users of the chart without keys, the services, and a client with a client's rights."""
    from wooly_testkit.nats import nats_server

    users = (ROOT / "deploy" / "helm" / "wooly" / "files" / "users.conf").read_text()
    config = tmp_path / "nats.conf"
    config.write_text(users.replace("$SERVICES_PASSWORD", '"1services"').replace("$CLIENT_PASSWORD", '"2client"'))
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(nats_server("-c", str(config)))
        inner, outer = (url.replace("nats://", f"nats://{who}@") for who in ("services:1services", "client:2client"))
        env = {
            **os.environ,
            "WOOLY_ROUTER_NATS_URL": inner,
            "WOOLY_ROUTER_STATE_DIR": str(tmp_path / "router"),
            "WOOLY_ROUTER_HTTP_PORT": "0",
            "WOOLY_SCHEDULER_NATS_URL": inner,
            "WOOLY_SCHEDULER_STATE_DIR": str(tmp_path / "scheduler"),
            "WOOLY_SCHEDULER_METRICS_PORT": "0",
            "WOOLY_EXECUTOR_NATS_URL": inner,
            "WOOLY_EXECUTOR_LISTEN": "tcp://127.0.0.1:0",
            "WOOLY_EXECUTOR_STATE_DIR": str(tmp_path / "executor"),
        }
        for module in ("wooly_router", "wooly_scheduler", "wooly_executor"):
            log = stack.enter_context((tmp_path / f"{module}.log").open("w"))
            process = subprocess.Popen([sys.executable, "-m", module], env=env, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)
        script = tmp_path / "script.py"
        script.write_text("import torch\nprint('sum', (torch.ones(4, 4, device='cuda') * 3).sum().item())\n")
        client = {**env, "WOOLYAI_CONTROLLER_URL": outer, "WOOLYAI_CHANNEL": channel, "HOME": str(tmp_path)}
        ran = _run_until_success(["run", str(script)], client)
        assert "sum 48.0" in ran.stdout
        report = json.loads(_job(client, tmp_path))
        assert report["state"] == "completed" and report["files"]
        forbidden = "wooly.v1.evt.executor.node.heartbeat"
        with pytest.raises(subprocess.CalledProcessError):
            subprocess.run([sys.executable, "-c", FORGE, outer, forbidden], check=True, capture_output=True, timeout=60)
        subprocess.run([sys.executable, "-c", FORGE, inner, forbidden], check=True, capture_output=True, timeout=60)


#: A script that exits with 0 if the server lets this user publish.
FORGE = """
import asyncio, sys, nats
errors = []
async def error(e): errors.append(e)
async def main():
    nc = await nats.connect(sys.argv[1], error_cb=error)
    await nc.publish(sys.argv[2], b"{}")
    await nc.flush()
    await nc.flush()
    await nc.close()
asyncio.run(main())
sys.exit(1 if errors else 0)
"""


def _run_until_success(argv, env):
    """Run `wooly ARGV` until it succeeds, because services may still be starting."""
    until = time.monotonic() + 240
    while True:
        ran = forks.run("wooly", *argv, env=env, timeout=100)
        if ran.returncode == 0:
            return ran
        assert time.monotonic() < until and ("no " in ran.stderr or "answer" in ran.stderr), ran.stderr


def client_of(host):
    """The environment of a client."""
    return {"WOOLYAI_CONTROLLER_URL": f"http://{host}:8420", "WOOLYAI_CREDENTIAL": SECRETS["WOOLY_ADMIN_TOKEN"]}


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    """The stack of images from `make compose-test`, with its own address. Yields (compose, address)."""
    need_compose()
    host = "127.0.0.9"
    home = tmp_path_factory.mktemp("home")

    def run(*arguments, check=True, **more):
        environment = {"WOOLY_BIND": host, "WOOLY_HOST": host, "OTEL_EXPORTER_OTLP_ENDPOINT": "", **more}
        files = ("compose.yaml", "local.yaml") if os.environ.get("WOOLY_COMPOSE_LOCAL") else ("compose.yaml",)
        return compose("-p", "wooly-test", "--profile", "cpu", *arguments, files=files, check=check, **environment)

    try:
        run("up", "-d", "--wait", "--wait-timeout", "300")
        yield run, {**os.environ, **client_of(host), "HOME": str(home)}
    finally:
        print(run("logs", "--tail", "30", check=False).stdout)
        run("down", "--volumes", "--timeout", "5", check=False)


@pytest.mark.docker
@pytest.mark.timeout(900)
@pytest.mark.parametrize("channel", ["direct", "tunnel"])
def test_script_outside_containers_runs_on_stack(stack, channel):
    _, env = stack
    argv = [sys.executable, "-m", "wooly", "run", str(ROOT / "examples" / "train_digits.py")]
    ran = subprocess.run(
        argv, env={**env, "WOOLYAI_CHANNEL": channel}, capture_output=True, text=True, timeout=600, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "local-cpu" in ran.stdout + ran.stderr


#: Steps that each wait for the executor, so that a failure between them is noticed.
STEPS = """
import sys, time, torch
x = torch.ones(64, 64, device="cuda")
print("ready", flush=True)
for i in range(120):
    x = x * 1.0 + 0.0
    assert x.sum().item() == 4096
    time.sleep(0.25)
print("done", flush=True)
"""


@pytest.mark.docker
@pytest.mark.timeout(900)
def test_three_nats_servers_without_one_continue(tmp_path):
    need_compose()
    host, files = "127.0.0.8", ("compose.yaml", *(["local.yaml"] if os.environ.get("WOOLY_COMPOSE_LOCAL") else []))

    def run(*arguments, check=True):
        more = {
            "WOOLY_BIND": host,
            "WOOLY_HOST": host,
            "NATS_CONFIG": "cluster.conf",
            "OTEL_EXPORTER_OTLP_ENDPOINT": "",
        }
        argv = ("-p", "wooly-three", "--profile", "cpu", "--profile", "three-nats", *arguments)
        return compose(*argv, files=files, check=check, **more)

    try:
        run("up", "-d", "--wait", "--wait-timeout", "300")
        env = {**os.environ, **client_of(host), "HOME": str(tmp_path)}
        script = tmp_path / "script.py"
        script.write_text("import torch\nprint('sum', torch.ones(4, 4, device='cuda').sum().item())\n")
        assert "sum 16.0" in _run_until_success(["run", str(script)], env).stdout
        run("kill", "nats-2")
        assert "sum 16.0" in _run_until_success(["run", str(script)], env).stdout
    finally:
        print(run("logs", "--tail", "30", check=False).stdout)
        run("down", "--volumes", "--timeout", "5", check=False)


@pytest.mark.docker
@pytest.mark.timeout(900)
def test_restart_of_control_services_keeps_sessions(stack, tmp_path):
    run, env = stack
    two = {"WOOLY_REST_PORTS": "8420-8421"}
    run("up", "-d", "--wait", "--scale", "router=2", **two)
    script = tmp_path / "steps.py"
    script.write_text(STEPS)
    argv = [sys.executable, "-m", "wooly", "run", str(script)]
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as client:
        while "ready" not in (line := client.stdout.readline()):
            assert line, "the script ended"
        for name in [*run("ps", "-q", "router").stdout.split(), *run("ps", "-q", "scheduler").stdout.split()]:
            subprocess.run(["docker", "restart", name], check=True, capture_output=True)
            run("up", "-d", "--wait", "--no-recreate", "--scale", "router=2", **two)  # one restart after the other
        rest = client.communicate(timeout=300)[0]
    run("up", "-d", "--wait", "--scale", "router=1")  # a new router: the remaining one may have the second one's port
    assert client.returncode == 0 and "done" in rest, rest


@pytest.mark.docker
@pytest.mark.timeout(900)
def test_restart_of_every_service_keeps_jobs(stack, tmp_path):
    run, env = stack

    def wooly(*argv):
        return _run_until_success(list(map(str, argv)), env).stdout

    (tmp_path / "work.py").write_text(WORK)
    wooly("export", f"{tmp_path / 'work.py'}:build", "-o", tmp_path / "work.wism")
    np.save(tmp_path / "x.npy", np.eye(600, dtype=np.float32))
    jobs = set()
    for service in ("router", "scheduler", "metering", "compiler", "nats", "postgres", "executor-cpu"):
        jobs.add(wooly("submit", tmp_path / "work.wism", "-i", f"x={tmp_path / 'x.npy'}").strip())
        for name in run("ps", "-q", service).stdout.split():
            subprocess.run(["docker", "restart", name], check=True, capture_output=True)
        run("up", "-d", "--wait", "--no-recreate")
    while True:
        listed = json.loads(wooly("tasks", "--kind", "job", "--json"))["tasks"]
        states = {t["task_id"]: (t["state"], t["reason"]) for t in listed}
        assert jobs <= set(states) and not any(state in ("failed", "cancelled") for state, _ in states.values()), states
        if all(state == "completed" for state, _ in states.values()):
            return
        time.sleep(1)


@pytest.mark.docker
def test_images_are_small_and_do_not_run_as_root(stack):
    def inspect(name):
        argv = ["docker", "image", "inspect", name, "--format", "{{.Size}} {{.Config.User}}"]
        size, user = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split(" ", 1)
        return int(size), user.strip()

    base, _ = inspect("wooly-python")  # mostly a third-party image
    for name in ("router", "scheduler", "metering", "operator"):
        size, user = inspect(f"wooly-{name}:0.1.0")
        assert size - base <= 110e6 and user == "10001:10001", (name, size - base, user)


@pytest.mark.docker
def test_client_image_runs_a_script(stack, tmp_path):
    _, env = stack
    script = "import torch; print('sum', torch.ones(4, 4, device='cuda').sum().item())"
    inside = f'echo "{script}" > /tmp/s.py && wooly run /tmp/s.py'
    limits = ["--rm", "--read-only", "--tmpfs", "/tmp", "--network", "host"]
    variables = [
        part for name in ("WOOLYAI_CONTROLLER_URL", "WOOLYAI_CREDENTIAL") for part in ("-e", f"{name}={env[name]}")
    ]
    variables += ["-e", "HOME=/tmp"]
    argv = ["docker", "run", *limits, *variables, "wooly-client:0.1.0", "sh", "-c", inside]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0 and "sum 16.0" in ran.stdout, ran.stdout + ran.stderr
