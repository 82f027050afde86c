"""`wooly serve`: one executor without a controller serves several programs, and compiles plans."""

import json
import os
import signal
import subprocess
import time

import pytest
from wooly_testkit import forks

SCRIPT = """
import sys, time
from pathlib import Path
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
x = torch.randn(64, 16)

def train(device):
    torch.manual_seed(0)
    m = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).to(device)
    data = x.to(device)
    for _ in range(5):  # by hand: PyTorch's optimizers import Dynamo, which takes seconds of CPU time in each process
        m.zero_grad()
        loss = m(data).square().mean()
        loss.backward()
        with torch.no_grad():
            for p in m.parameters():
                p.sub_(p.grad, alpha=0.1)
    return loss.item()

mine, other = Path(sys.argv[1]), Path(sys.argv[2])
remote = train("cuda")
mine.touch()
while not other.exists():  # both sessions are open
    time.sleep(0.01)
print(remote == train("cpu"), torch.cuda.get_device_properties(0).total_memory)
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The report of `wooly serve --json`, and its process."""
    folder = tmp_path_factory.mktemp("serve")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WOOLYAI_STATE_DIR": str(folder / "state")}
    arguments = ["--standalone", "--json", "--listen", f"unix://{folder}/x.sock,tcp://127.0.0.1:0"]
    environment["WOOLY_EXECUTOR_STATE_DIR"] = str(folder / "state")
    with (
        open(folder / "log", "w") as log,
        forks.Forked(
            "wooly_executor", *arguments, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        ) as executor,
    ):
        yield json.loads(executor.stdout.readline()), executor
        executor.kill()


def environment(url, **more):
    free = {k: v for k, v in os.environ.items() if not k.startswith("WOOLYAI_")}
    return free | {"OMP_NUM_THREADS": "1", "WOOLYAI_EXECUTOR_URL": url} | more


def test_serve_two_programs_at_once_have_exact_results(served, tmp_path):
    report, _ = served
    (tmp_path / "script.py").write_text(SCRIPT)
    marks = [str(tmp_path / "a"), str(tmp_path / "b")]
    started = [
        forks.Forked(
            "wooly", "run", str(tmp_path / "script.py"), *order,
            env=environment(url, WOOLYAI_REQUIRED_VRAM=str(64 << 20)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for url, order in zip(report["urls"], (marks, marks[::-1]), strict=True)
    ]  # fmt: skip
    said = [running.communicate(timeout=240) for running in started]
    assert [out for out, _ in said] == [f"True {64 << 20}\n"] * 2, said
    assert [running.returncode for running in started] == [0, 0]
    for _, errors in said:
        assert "operations in" in errors and "credits" not in errors and "more:" not in errors


def test_serve_mode_full_compiles_plans(served, tmp_path):
    report, _ = served
    script = tmp_path / "script.py"
    script.write_text("import torch\nx = torch.ones(8, device='cuda')\nprint((x * 2 + 1).sum().item())\n")
    done = forks.run("wooly", "run", str(script), env=environment(report["urls"][0], WOOLYAI_JIT="full"), timeout=240)
    assert (done.returncode, done.stdout) == (0, "24.0\n"), done.stderr


def test_serve_wrong_token_is_refused(served, tmp_path):
    report, _ = served
    scheme, _, rest = report["urls"][0].partition("://")
    script = tmp_path / "script.py"
    script.write_text("import torch\n")
    env = environment(f"{scheme}://wrong@{rest.partition('@')[2]}")
    done = forks.run("wooly", "run", str(script), env=env, timeout=240)
    assert done.returncode == 1 and "the channel token is not valid" in done.stderr


def test_serve_commands_that_need_a_controller_say_so(served):
    report, _ = served
    done = forks.run("wooly", "nodes", env=environment(report["urls"][0]), timeout=240)
    assert done.returncode == 1 and "WOOLYAI_EXECUTOR_URL names an executor without one" in done.stderr


def test_serve_stopped_ends_its_sessions_with_the_reason(served, tmp_path):
    report, executor = served
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time, torch\nfrom pathlib import Path\nx = torch.ones(2, device='cuda').sum().item()\n"
        "Path(sys.argv[1]).touch()\nwhile True:\n    torch.ones(2, device='cuda').sum().item()\n    time.sleep(0.01)\n"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with forks.Forked(
        "wooly", "run", str(script), str(tmp_path / "up"), env=environment(report["urls"][0]), **pipes
    ) as running:
        deadline = time.monotonic() + 120
        while not (tmp_path / "up").exists():
            assert time.monotonic() < deadline and running.poll() is None
            time.sleep(0.02)
        executor.send_signal(signal.SIGTERM)
        _, errors = running.communicate(timeout=60)
    assert executor.wait(60) == 0
    assert running.returncode == 1 and "lost the executor" in errors and "the executor is stopping" in errors


LOSING = """
import sys, time
from pathlib import Path
import torch

torch.manual_seed(0)
x = torch.rand(64, 64, device="cuda")
for step in range(12):
    if step == 6:
        Path(sys.argv[1]).touch()
        while not Path(sys.argv[2]).exists():
            x = x + 0.0
            torch.cuda.synchronize()
            time.sleep(0.01)
    x = torch.tanh(x @ x * 0.1 + torch.rand(64, 64, device="cuda"))
print(x.double().sum().item())
"""


@pytest.mark.slow
def test_serve_a_session_goes_on_when_the_executor_is_started_again(tmp_path):
    script, reached, restarted = tmp_path / "script.py", tmp_path / "reached", tmp_path / "restarted"
    script.write_text(LOSING)
    own = os.environ | {"OMP_NUM_THREADS": "1", "WOOLY_EXECUTOR_STATE_DIR": str(tmp_path / "state")}
    arguments = ["--standalone", "--json", "--listen", f"unix://{tmp_path}/x.sock"]

    def serve(log):
        return forks.Forked("wooly_executor", *arguments, stdout=subprocess.PIPE, stderr=log, text=True, env=own)

    def run(url, **more):
        env = environment(url, **more)
        argv = ["run", str(script), str(reached), str(restarted)]
        return forks.Forked("wooly", *argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    with open(tmp_path / "log", "w") as log:
        with serve(log) as first:
            (url,) = json.loads(first.stdout.readline())["urls"]
            running = run(url, WOOLYAI_RECOVERY="on", WOOLYAI_CHECKPOINT_S="0")
            until = time.monotonic() + 120
            while not reached.exists():
                assert time.monotonic() < until and running.poll() is None
                time.sleep(0.02)
            first.kill()
        with serve(log) as second:
            assert json.loads(second.stdout.readline())["urls"] == [url]
            restarted.touch()
            out, said = running.communicate(timeout=120)
            assert running.returncode == 0 and "goes on in the executor" in said, said
            undisturbed = run(url).communicate(timeout=120)[0]
            second.kill()
    assert out == undisturbed != ""
