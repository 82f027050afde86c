"""Several devices from a user's view: a stack with one executor per device, sessions over them, the loss of an executor."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
from wooly_bus import host
from wooly_local.stack import read_stack, start_stack
from wooly_testkit import forks
from wooly_testkit.forks import Forked

pytestmark = [pytest.mark.connected, pytest.mark.timeout(180)]
WOOLY = [sys.executable, "-m", "wooly"]


@pytest.fixture
def stack(pair):
    return pair


def environment(stack=None, **variables):
    full = {k: v for k, v in os.environ.items() if not k.startswith("WOOLYAI_")} | variables
    return full | (stack.client_env if stack else {})


def run(*argv, stack=None, **variables):
    env = environment(stack, **variables)
    return forks.run("wooly", *argv, env=env, timeout=120)


def script(tmp_path, text):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def sessions(stack):
    return stack.request("GET", "sessions")["sessions"]


KEEPS = """
    import sys, torch
    from wooly import api
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 256).to("cuda")
    torch.cuda.synchronize()
    if sys.argv[1] == "pin":
        api.attached_links()[0].pin("add", "model")
"""


@pytest.mark.slow  # the router's own tests show the choice
def test_session_prefers_executor_with_its_weights(stack, tmp_path):
    def tasks():
        return stack.request("GET", "tasks?text=weights.py")["tasks"]

    def until(condition):
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    path = tmp_path / "weights.py"
    path.write_text(textwrap.dedent(KEEPS))
    # Without weights, a task gets the first of two equal executors.
    done = run("run", "-q", str(path), "pin", stack=stack, WOOLYAI_DEDUP="tenant", WOOLYAI_NODE="local-1")
    assert done.returncode == 0, done.stderr
    (first,) = tasks()
    with_weights = first["executors"]
    assert with_weights == ["local-1"]
    until(lambda: not sessions(stack))
    places = {}
    for dedup in ("off", "tenant"):
        time.sleep(2.5)  # until heartbeats report both devices as idle
        done = run("run", "-q", str(path), "load", stack=stack, WOOLYAI_DEDUP=dedup)
        assert done.returncode == 0, done.stderr
        places[dedup] = tasks()[0]
    assert places["off"]["executors"] != with_weights
    assert places["tenant"]["executors"] == with_weights
    assert places["tenant"]["placement"]["here"][with_weights[0]]["resident"] == -1000
    assert run("weights", "rm", "model", stack=stack).returncode == 0


PIPELINE = """
    import torch
    from torch import nn

    first, second = DEVICES
    torch.manual_seed(0)
    torch.set_num_threads(1)
    head = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 32)).to(first)
    tail = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 6)).to(second)
    parameters = [*head.parameters(), *tail.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    x, y = torch.randn(64, 24), torch.randint(0, 6, (64,))
    for _ in range(15):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(tail(head(x.to(first)).to(second)), y.to(second))
        loss.backward()
        optimizer.step()
        print(loss.item().hex())
    print([p.detach().cpu().double().sum().item().hex() for p in parameters])
"""


@pytest.mark.slow  # the conformance tests of several devices and of a session show both
def test_model_over_two_executors_trains_as_on_cpu(stack, tmp_path):
    script(tmp_path, PIPELINE.replace("DEVICES", "'cpu', 'cpu'"))
    local = forks.run("script", like="wooly_executor", cwd=tmp_path, timeout=120)
    assert local.returncode == 0, local.stderr
    path = script(tmp_path, PIPELINE.replace("DEVICES", "'cuda:0', 'cuda:1'"))
    ours = run("run", path, stack=stack, WOOLYAI_GPU_COUNT="2")
    assert ours.returncode == 0, ours.stderr
    assert ours.stdout == local.stdout and len(ours.stdout.splitlines()) == 16
    assert "cuda:0 local-" in ours.stderr and "cuda:1 local-" in ours.stderr


def test_session_over_two_executors_lists_and_releases_both(stack, tmp_path):
    path = script(tmp_path, "import torch; torch.ones(2, device='cuda:1').cpu(); print('up', flush=True); input()")
    client = Forked(
        "wooly",
        "run",
        path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(stack, WOOLYAI_GPU_COUNT="2"),
    )
    assert client.stdout.readline() == "up\n"
    (session,) = sessions(stack)
    assert sorted(p["executor_id"] for p in session["parts"]) == ["local-0", "local-1"]
    client.kill()
    client.communicate()
    deadline = time.monotonic() + 10
    while sessions(stack) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert sessions(stack) == []


def test_request_for_too_many_devices_is_refused_with_numbers(stack, tmp_path):
    done = run("run", script(tmp_path, "print('never')"), stack=stack, WOOLYAI_GPU_COUNT="3")
    assert done.returncode == 1 and "never" not in done.stdout
    assert (
        "3 devices were requested, but only 2 executors are alive" in done.stderr and "wooly up --gpus 3" in done.stderr
    )


def test_nodes_show_executors_with_share_of_host(stack):
    nodes = json.loads(run("nodes", "--json", stack=stack).stdout)["nodes"]
    assert [(n["executor_id"], n["state"]) for n in nodes] == [("local-0", "alive"), ("local-1", "alive")]
    share = host.memory() // 2
    assert all(n["device"]["total_memory"] == share - share // 8 for n in nodes)


@pytest.mark.slow
def test_run_without_stack_starts_requested_executors(tmp_path):
    path = script(
        tmp_path,
        "import torch\nprint(torch.cuda.device_count(), [torch.ones(3, device=f'cuda:{i}').sum().item() for i in (0, 1)])",
    )
    done = run("run", path, XDG_STATE_HOME=str(tmp_path), XDG_CONFIG_HOME=str(tmp_path), WOOLYAI_GPU_COUNT="2")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "2 [3.0, 3.0]\n"


@pytest.mark.slow
def test_up_with_two_gpus_runs_two_executors(tmp_path):
    variables = {"XDG_STATE_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    try:
        assert run("up", "--gpus", "2", **variables).returncode == 0
        shown = run("status", **variables).stdout
        assert all(word in shown for word in ("executor-0", "executor-1", "scheduler", "local-0", "local-1"))
        services = read_stack(tmp_path / "wooly").services
        assert sorted(services) == ["compiler", "executor-0", "executor-1", "metering", "nats", "router", "scheduler"]
        processes = [psutil.Process(pid) for pid in services.values()]
    finally:
        assert run("down", **variables).stdout == "stack is down\n"
    gone, alive = psutil.wait_procs(processes, 5)
    assert not alive and len(gone) == 7


@pytest.mark.slow
@pytest.mark.parametrize("used", [0, 1])
def test_killed_executor_ends_session_and_is_named(tmp_path, used):
    """The script uses only cuda:`used`, and the executor of cuda:1 dies."""
    own = start_stack(tmp_path / "own", ephemeral=True, gpus=2)
    try:
        path = script(
            tmp_path,
            f"""
            import torch
            from wooly import api
            t = [torch.zeros(64, 64, device=f"cuda:{{i}}") for i in (0, 1)]
            print(*[d["executor_id"] for d in api.session_stats()["devices"]], flush=True)
            while True:
                t[{used}] = t[{used}] + 1
            """,
        )
        client = subprocess.Popen(
            [*WOOLY, "run", path],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(own, WOOLYAI_GPU_COUNT="2", WOOLYAI_RECOVERY="off"),
        )
        _, lost = client.stdout.readline().split()
        os.kill(own.services[lost.replace("local", "executor")], signal.SIGKILL)
        _, errors = client.communicate(timeout=60)
        assert client.returncode == 1 and f"lost the executor {lost} " in errors
        deadline = time.monotonic() + 10
        while sessions(own) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert sessions(own) == []
    finally:
        own.stop()


def test_weights_are_kept_on_every_executor(stack, tmp_path):
    import torch

    torch.save({"w": torch.arange(65536.0)}, tmp_path / "m.pt")
    done = run("weights", "add", str(tmp_path / "m.pt"), "--name", "m", "--json", stack=stack)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["executors"], said["bytes"], said["left_out"]) == (2, 1 << 18, {})
    kept = json.loads(run("weights", "list", "--json", stack=stack).stdout)["weights"]
    assert sorted(pin["executor"] for pin in kept) == sorted(said["on"])
    assert run("weights", "rm", "m", stack=stack).returncode == 0


SHARES = """
    import torch, torch.multiprocessing as mp
    from wooly import api

    def fill(t, value, way):
        t.fill_(value)  # the tensor has opened the session
        way.send(api.opened_session().parts[0].executor_id)

    def make(way):
        t = torch.arange(4.0, device="cuda")  # this has
        way.send((api.opened_session().parts[0].executor_id, t))
        way.recv()

    if __name__ == "__main__":
        context = mp.get_context("spawn")
        t = torch.zeros(4, device="cuda")
        here = api.opened_session().parts[0].executor_id
        for value in (1.0, 2.0):
            way, there = context.Pipe()
            child = context.Process(target=fill, args=(t, value, there))
            child.start()
            assert way.recv() == here
            child.join()
            assert child.exitcode == 0 and t.cpu().tolist() == [value] * 4
        way, there = context.Pipe()
        child = context.Process(target=make, args=(there,))
        child.start()
        at, made = way.recv()
        assert at == here and made.cpu().tolist() == [0.0, 1.0, 2.0, 3.0]
        way.send(None)
        child.join()
        print("shared on", here)
"""


@pytest.mark.slow  # children import PyTorch
def test_child_processes_share_tensors_on_the_executor_of_their_parent(stack, tmp_path):
    """The other executor is idle, so sessions without a reason would go there."""
    done = run("run", script(tmp_path, SHARES), stack=stack)
    assert done.returncode == 0 and "shared on local-" in done.stdout, done.stdout + done.stderr


HOPS = """
    import threading, torch
    from wooly import api
    big = torch.arange(3 << 20, dtype=torch.float32)
    x = big.to("cuda:0")
    torch.cuda.synchronize()
    before = api.session_stats()
    y = x.to("cuda:1")
    strided = x.view(-1, 4).t()[1].to("cuda:1")
    back = (y * 2).to("cuda:0")
    torch.cuda.synchronize()
    after = api.session_stats()
    moved = sum([after[name] - before[name] for name in ("bytes_sent", "bytes_received")])
    assert moved < 100_000, moved
    assert torch.equal(y.cpu(), big) and torch.equal(back.cpu(), big * 2)
    assert torch.equal(strided.cpu(), big.view(-1, 4).t()[1])
    found = {}
    def go(name, source, target):
        a = torch.full((300_000,), float(source), device=f"cuda:{source}")
        for _ in range(10):
            a = a.to(f"cuda:{target}") + 1
            a = a.to(f"cuda:{source}")
        found[name] = a.sum().item()
    threads = [threading.Thread(target=go, args=(k, k % 2, 1 - k % 2)) for k in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert found == {k: (k % 2 + 10) * 300_000 for k in range(4)}, found
    print("copies agree")
"""


def test_copies_between_devices_go_from_executor_to_executor(stack, tmp_path):
    settings = {
        "WOOLYAI_GPU_COUNT": "2",
        "WOOLYAI_RECOVERY": "off",
    }  # a session that can go on elsewhere copies through the client
    done = run("run", "-q", script(tmp_path, HOPS), stack=stack, **settings)
    assert done.returncode == 0 and "copies agree" in done.stdout, done.stderr
