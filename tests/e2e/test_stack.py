"""The whole stack from a user's view: real nats-server, router, executor and client processes.

Tests of a process's start or imports start a fresh process (`run`). All others use a fork (`run_in_fork`).
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from wooly_bus import contracts, host
from wooly_local import stack as stack_module
from wooly_local.stack import StackError, read_stack, start_stack
from wooly_testkit import forks
from wooly_testkit.control import ask
from wooly_testkit.executor import executor_process
from wooly_testkit.forks import Forked
from wooly_testkit.nats import nats_server as start_nats_server
from wooly_wis.codec import encode_program
from wooly_wis.messages import NodesRequest
from wooly_wis.program import Program

pytestmark = [pytest.mark.connected, pytest.mark.timeout(180)]
ROOT = Path(__file__).parents[2]
WOOLY = [sys.executable, "-m", "wooly"]


def environment(stack, env):
    full = {k: v for k, v in os.environ.items() if not k.startswith("WOOLYAI_")} | {"OMP_NUM_THREADS": "1"}
    return full | (env or {}) | (stack.client_env if stack is not None else {})


def run(*argv, stack=None, env=None, timeout=120, **options):
    env = environment(stack, env)
    return subprocess.run([*WOOLY, *argv], capture_output=True, text=True, env=env, timeout=timeout, **options)


def run_in_fork(*argv, stack=None, env=None, **options):
    """Like `run`, but in a fork."""
    return forks.run("wooly", *map(str, argv), env=environment(stack, env), timeout=120, **options)


def script(tmp_path, text):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


@pytest.mark.slow  # the conformance tests compare the losses of this training with the CPU's
def test_digits_example_equals_cpu_losses(stack, tmp_path):
    ours = run_in_fork("run", ROOT / "examples/train_digits.py", "--epochs", "1", stack=stack)
    assert ours.returncode == 0, ours.stderr
    source = (ROOT / "examples/train_digits.py").read_text()
    local = source.replace('device = "cuda"', 'device = "cpu"').replace("torch.cuda.get_device_name()", "'cpu'")
    script(tmp_path, local)
    theirs = forks.run("script", "--epochs", "1", env=environment(None, None), cwd=tmp_path, timeout=120)
    assert theirs.returncode == 0, theirs.stderr

    def figures(text):
        return [line.split("  ")[1] if line.startswith("epoch") else line for line in text.splitlines()[1:]]

    assert figures(ours.stdout) == figures(theirs.stdout) and "test accuracy" in ours.stdout
    assert "local-0" in ours.stderr and "operations" in ours.stderr and "wooly top" in ours.stderr
    listed = run_in_fork("tasks", "--json", stack=stack).stdout
    assert str(ROOT / "examples/train_digits.py") in {t["name"] for t in json.loads(listed)["tasks"]}


@pytest.mark.slow
def test_lora_example_learns_to_count(stack):
    done = run("run", str(ROOT / "examples/finetune_lora.py"), "--steps", "25", stack=stack, timeout=170)
    assert done.returncode == 0, done.stderr
    assert "right: 100%" in done.stdout and "counts 60 61 62 63 0 1 2 3" in done.stdout


def test_run_without_stack_starts_one_and_cleans_up(tmp_path):
    before = {p.pid for p in psutil.process_iter() if "wooly" in " ".join(_argv(p))}
    text = """import gc, sys, torch
x = torch.ones(3, 3, device="cuda")
print((x @ x).sum().item(), [name for name in ("torch._dynamo", "sympy") if name in sys.modules], gc.isenabled())
"""
    done = run("run", script(tmp_path, text), env={"XDG_STATE_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "27.0 [] True\n"  # modules that only compiling needs are not loaded
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        left = {p.pid for p in psutil.process_iter() if f"{tmp_path}" in " ".join(_argv(p))} - before
        if not left:
            break
        time.sleep(0.1)
    assert not left


def _argv(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.parametrize(
    ("method", "children"),
    [
        # Each process imports PyTorch again. `test_children` has another process with a session of its own.
        pytest.param("spawn", 1, marks=pytest.mark.slow),
        pytest.param("spawn", 2, marks=pytest.mark.slow),
        pytest.param("forkserver", 2, marks=pytest.mark.slow),
    ],
)
def test_spawned_processes_have_separate_sessions(stack, tmp_path, method, children):
    path = script(
        tmp_path,
        f"""
        import torch
        import torch.multiprocessing as mp

        def work(rank, answers):
            total = (torch.ones(3, device="cuda") * (rank + 1)).sum()
            answers.put((rank, total.item(), str(total.device)))

        if __name__ == "__main__":
            mine = torch.ones(2, device="cuda")
            answers = mp.get_context({method!r}).SimpleQueue()
            mp.start_processes(work, (answers,), nprocs={children}, start_method={method!r})
            print(sorted(answers.get() for _ in range({children})), mine.sum().item())
        """,
    )
    done = run_in_fork("run", "-q", path, stack=stack)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{[(0, 3.0, 'cuda:0'), (1, 6.0, 'cuda:0')][:children]} 2.0"
    deadline = time.monotonic() + 10  # the router waits a moment before it ends sessions of vanished children
    while (left := _sessions(stack)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def test_script_error_keeps_traceback_and_exit_code(stack, tmp_path):
    done = run_in_fork(
        "run", script(tmp_path, "import torch\ntorch.zeros(2, device='cuda')\nraise KeyError('mine')"), stack=stack
    )
    assert done.returncode == 1
    assert "KeyError: 'mine'" in done.stderr and 'script.py", line 3' in done.stderr
    assert "runpy" not in done.stderr and "wooly/cli" not in done.stderr
    assert run_in_fork("run", script(tmp_path, "import sys; sys.exit(7)"), stack=stack).returncode == 7
    assert run_in_fork("run", script(tmp_path, "import sys; sys.exit('words')"), stack=stack).returncode == 1


def test_script_sees_its_own_arguments_and_main(stack, tmp_path):
    path = script(tmp_path, "import sys; print(__name__, sys.argv[1:], sys.path[0])")
    done = run_in_fork("run", path, "--epochs", "3", "-m", "x", stack=stack)
    assert done.stdout == f"__main__ ['--epochs', '3', '-m', 'x'] {tmp_path}\n"
    (tmp_path / "mod.py").write_text("import sys; print('mod', __name__, sys.argv[1:])")
    done = run_in_fork("run", "-m", "mod", "a", stack=stack, cwd=tmp_path)
    assert done.stdout == "mod __main__ ['a']\n", done.stderr


def test_error_of_last_operation_is_reported(stack, tmp_path):
    path = script(
        tmp_path, "import torch\nt = torch.zeros(3, device='cuda')\nt.index_select(0, torch.tensor([9], device='cuda'))"
    )
    done = run_in_fork("run", path, stack=stack)
    assert done.returncode == 1 and "index out of range" in done.stderr and "script.py:3" in done.stderr


def test_run_without_controller_fails_with_remedy(tmp_path):
    path = script(tmp_path, "print('never')")
    done = run_in_fork("run", path, env={"WOOLYAI_CONTROLLER_URL": "nats://127.0.0.1:9"})
    assert done.returncode == 1 and "wooly up" in done.stderr and "never" not in done.stdout


def test_run_without_executor_fails_with_remedy(nats_server, tmp_path):
    env = os.environ | {
        "WOOLY_ROUTER_NATS_URL": nats_server,
        "WOOLY_ROUTER_STATE_DIR": str(tmp_path),
        "WOOLY_ROUTER_HTTP_PORT": "0",
    }
    router = Forked("wooly_router", env=env, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while not (tmp_path / "router.port").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        done = run_in_fork("run", script(tmp_path, ""), env={"WOOLYAI_CONTROLLER_URL": nats_server})
    finally:
        router.terminate()
        router.wait(10)
    assert done.returncode == 1 and "no executor is registered" in done.stderr and "wooly up" in done.stderr


def test_killed_executor_reports_error_and_does_not_hang(stack, tmp_path):
    path = script(
        tmp_path,
        """
        import torch
        t = torch.zeros(64, 64, device="cuda")
        print("ready", flush=True)
        while True:
            t = t + 1
        """,
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    env = environment(stack, None) | {"WOOLYAI_RECOVERY": "off"}
    with Forked("wooly", "run", path, env=env, **pipes) as client:
        assert client.stdout.readline() == "ready\n"
        os.kill(stack.services["executor-0"], signal.SIGKILL)
        _, errors = client.communicate(timeout=60)
    assert client.returncode == 1 and "lost the executor" in errors


@pytest.mark.slow
def test_frozen_executor_fails_and_busy_executor_is_awaited(tmp_path, monkeypatch):
    monkeypatch.setenv("WOOLY_ROUTER_LEASE_S", "4")
    own = start_stack(tmp_path / "own", ephemeral=True)
    try:
        path = script(
            tmp_path,
            """
            import sys, time, torch
            t, started = torch.eye(1500, device="cuda"), time.monotonic()
            while time.monotonic() < started + 6:
                for _ in range(20):
                    t = t @ t
                t.sum().item()
            print("ready", flush=True)
            sys.stdin.readline()
            (t + 1).sum().item()
            """,
        )
        # With recovery, the session would wait in the queue until its executor goes on.
        env = os.environ | own.client_env | {"WOOLYAI_RECOVERY": "off"}
        client = subprocess.Popen(
            [*WOOLY, "run", path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        assert client.stdout.readline() == "ready\n"
        os.kill(own.services["executor-0"], signal.SIGSTOP)
        _, errors = client.communicate("go on\n", timeout=60)
        assert client.returncode == 1 and "lost the executor" in errors and "does not answer" in errors
    finally:
        os.kill(own.services["executor-0"], signal.SIGCONT)
        own.stop()


def test_nodes_and_status_in_json_and_rest(stack):
    nodes = json.loads(run_in_fork("nodes", "--json", stack=stack).stdout)["nodes"]
    assert [n["executor_id"] for n in nodes] == ["local-0"] and nodes[0]["state"] == "alive"
    status = json.loads(run_in_fork("status", "--json", stack=stack).stdout)
    assert status["state"] == "up"
    assert stack.request("GET", "nodes")["nodes"][0]["gpus"][0]["executor_id"] == "local-0"
    with urllib.request.urlopen(f"{stack.rest_url}/healthz") as answer:
        assert json.load(answer) == {"status": "ok", "executors": 1}


def test_doctor_on_running_stack_passes(stack):
    done = run_in_fork("doctor", "--json", stack=stack)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {c["check"]: (c["ok"], c["detail"]) for c in json.loads(done.stdout)["checks"]}
    assert all(ok for ok, _ in found.values()) and "was built, and ran" in found["kernels"][1]


def test_doctor_says_why_an_executor_builds_no_kernels():
    with executor_process(start=Forked) as running:  # the runtime torch_cpu computes, but has no OpenCL
        url = running.endpoints[0].replace("//", f"//{running.token}@")
        done = run_in_fork("doctor", "--json", env={"WOOLYAI_EXECUTOR_URL": url})
    found = {c["check"]: c for c in json.loads(done.stdout)["checks"]}
    assert found["round trip"]["ok"] and not found["kernels"]["ok"]
    assert found["kernels"]["detail"].endswith("(set WOOLY_EXECUTOR_RUNTIME=opencl)")


@pytest.mark.slow  # the tests of intercept count fallbacks
def test_doctor_counts_fallbacks_of_script(stack, tmp_path):
    clean = script(tmp_path, "import torch; x = torch.randn(5, device='cuda'); print(x.softmax(0).sum().item())")
    done = run_in_fork("doctor", "--fallbacks", "--json", clean, stack=stack)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert (
        report["ok"] and report["fallbacks"] == {} and report["operations"] > 1 and report["inferences"]["on_meta"] > 0
    )
    forced = script(
        tmp_path,
        """
        import torch
        torch.library.define("forced::double", "(Tensor x) -> Tensor")
        torch.library.impl("forced::double", "CompositeImplicitAutograd", lambda x: (x.cpu() * 2).to(x.device))
        print(torch.ops.forced.double(torch.ones(2, device="cuda")).tolist())
        """,
    )
    done = run_in_fork("doctor", "--fallbacks", "--json", forced, stack=stack)
    assert done.returncode == 1, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["fallbacks"] == {"aten.mul.Tensor": 1}


def test_session_is_listed_only_while_it_runs(stack, tmp_path):
    path = script(tmp_path, "import torch, time; torch.zeros(2, device='cuda').cpu(); print('up', flush=True); input()")
    env = environment(stack, None)
    client = Forked("wooly", "run", path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    assert client.stdout.readline() == "up\n"
    assert len(_sessions(stack)) == 1
    client.kill()
    client.communicate()
    deadline = time.monotonic() + 10
    while _sessions(stack) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _sessions(stack) == []


def _sessions(stack):
    return stack.request("GET", "sessions")["sessions"]


def test_stack_serves_behind_a_proxy_and_from_a_folder_that_is_longer_than_a_socket_address(tmp_path):
    """Machines of companies set `http_proxy`, which knows nothing of this machine; batch systems have long folders."""
    folder = tmp_path / ("long" * 30)
    own = forks.start_stack(folder, ephemeral=True, http_proxy="http://127.0.0.1:9", HTTP_PROXY="http://127.0.0.1:9")
    try:
        done = run_in_fork(
            "run", script(tmp_path, "import torch; print(torch.ones(2, device='cuda').sum())"), stack=own
        )
    finally:
        own.stop()
    assert "tensor(2., device='cuda:0')" in done.stdout, done.stderr
    assert "over a unix socket" in done.stderr


def test_ephemeral_stack_avoids_a_folder_for_temporary_files_that_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.setenv("WOOLYAI_STATE_DIR", str(tmp_path / "own"))
    assert not stack_module._temporary().is_relative_to(tmp_path / "own")
    temporary = Path(tempfile.gettempdir())
    assert host.why_no_code(temporary / "not" / "made" / "yet") == "", "this test needs a folder that runs code"
    flags = {temporary: os.ST_NOEXEC}  # as hardened machines mount it
    monkeypatch.setattr(host.os, "statvfs", lambda folder: SimpleNamespace(f_flag=flags.get(folder, 0)))
    assert "noexec" in host.why_no_code(temporary / "not" / "made" / "yet")
    assert stack_module._temporary().parent == tmp_path / "own"


def test_up_twice_is_refused_crash_is_repaired_and_down_stops_all(tmp_path):
    env = {"XDG_STATE_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    assert run_in_fork("down", env=env).stdout == "no stack was running\n"
    own = forks.start_stack(tmp_path / "wooly", ephemeral=True)  # `test_run_without_stack` has a fresh process
    try:
        again = run_in_fork("up", env=env)
        assert again.returncode == 1 and "runs in" in again.stderr.replace("\n", " ")
        with pytest.raises(StackError):
            start_stack(tmp_path / "wooly")
        assert "local-0" in run_in_fork("status", env=env).stdout
        first = read_stack(tmp_path / "wooly").services["router"]
        os.kill(first, signal.SIGKILL)
        deadline = time.monotonic() + 40
        while True:  # NATS, router, executor, scheduler, metering; the compiler starts last
            services = read_stack(tmp_path / "wooly").services
            if len(services) == 6 and services.get("router") not in (None, first):
                break
            assert time.monotonic() < deadline, services
            time.sleep(0.1)
        processes = [psutil.Process(pid) for pid in services.values()]
    finally:
        assert run_in_fork("down", env=env).stdout == "stack is down\n"
    gone, alive = psutil.wait_procs(processes, 5)
    own.stop()
    assert not alive and len(gone) == 6
    assert run_in_fork("status", "--json", env=env).returncode == 1


@pytest.mark.slow
def test_interrupt_during_start_cleans_up(tmp_path):
    env = {"XDG_STATE_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    starting = subprocess.Popen(
        [*WOOLY, "up"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(None, env),
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # as in a terminal, even if the tests run in the background
    )
    file = tmp_path / "wooly/stack.json"
    deadline = time.monotonic() + 60
    while not file.exists():
        assert starting.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    supervisor = psutil.Process(json.loads(file.read_text())["supervisor"]["pid"])
    supervisor.suspend()  # so that it is still starting, on any machine
    refused = run_in_fork("up", env=env)
    assert refused.returncode == 1 and "started in" in refused.stderr.replace("\n", " ")
    assert json.loads(run_in_fork("status", "--json", env=env).stdout)["state"] == "starting"
    starting.send_signal(signal.SIGINT)
    supervisor.resume()
    _, errors = starting.communicate(timeout=60)
    assert starting.returncode != 0 and "Traceback" not in errors
    assert psutil.wait_procs([supervisor], 10)[1] == [] and not file.exists()
    assert run_in_fork("down", env=env).stdout == "no stack was running\n"


HOT = """
import sys, torch
x, w = torch.arange(1 << 18, device="cuda") / 7, torch.ones(1 << 18, device="cuda")
for _ in sys.stdin:
    seen = set()
    for _ in range(20):
        y = torch.relu((x * w + x) * 3 - w)
        seen.add((y.sum().item(), y[1000].item()))
    print(len(seen), seen.pop(), flush=True)
"""


def test_frequent_program_becomes_plan_in_top_and_disasm(stack, tmp_path):
    path, programs = tmp_path / "hot.py", tmp_path / "programs"
    path.write_text(HOT)
    programs.mkdir()
    printed, pipes = set(), {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    env = environment(stack, {"WOOLYAI_PROGRAMS_DIR": str(programs)})
    deadline = time.monotonic() + 90
    with Forked("wooly", "run", "-q", str(path), env=env, **pipes) as client:
        while True:  # the compiler waits until the device is idle for a second, and takes its time
            client.stdin.write("again\n")
            client.stdin.flush()
            printed.add(client.stdout.readline())
            (node,) = ask(stack, contracts.ROUTER_NODE_LIST, NodesRequest()).nodes
            if node.work.kernel_instructions:
                break
            assert time.monotonic() < deadline, f"nothing ran as a kernel: {node.work}"
            time.sleep(2)
    assert len(printed) == 1 and printed.pop().startswith("1 (")
    (shown,) = json.loads(run_in_fork("top", "--json", stack=stack).stdout)["gpus"]
    assert shown["work"]["kernel_instructions"]
    assert "instructions: generated kernels" in run_in_fork("top", "--once", stack=stack).stdout
    # The largest program may include the set-up.
    for program in sorted(programs.iterdir(), key=lambda p: -p.stat().st_size):
        told = run_in_fork("disasm", "--passes", "--jit", "exact", program, stack=stack)
        assert told.returncode == 0, told.stderr
        assert told.stdout.startswith("; program\nwis 1\n") and "; after lower\n" in told.stdout
        if "kernel k_" in told.stdout:
            return
    pytest.fail("no program has a kernel")


def test_disasm_without_compiler_fails_with_remedy(tmp_path):
    (tmp_path / "empty.wis").write_bytes(encode_program(Program((), ())))
    with start_nats_server() as url:
        told = run_in_fork("disasm", "--passes", tmp_path / "empty.wis", env={"WOOLYAI_CONTROLLER_URL": url})
    assert (
        told.returncode == 1 and "the service compiler is not connected to it; start it with `wooly up`" in told.stderr
    )
