"""Programs that `wooly run` starts, and the Python processes below them: each has a session of its own."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from wooly_testkit import forks

CHILD = """
import json, sys, torch
x = torch.arange(4.0, device="cuda") if torch.cuda.is_available() else None
from wooly import api
said = [sys.argv[1], torch.cuda.device_count(), x is not None and x.sum().item()]
print(json.dumps([*said, api.opened_session().session_id if api.has_session() else ""]), flush=True)
"""
PARENT = """
import os, subprocess, sys, torch

if __name__ == "__main__":
    before = torch.ones(2, device="cuda")
    child = os.path.join(os.path.dirname(__file__), "child.py")
    running = [subprocess.Popen(["sh", "-c", f"exec python {child} shell"])]
    running.append(subprocess.Popen([sys.executable, child, "hidden"], env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1"}))
    assert [r.wait() for r in running] == [0, 0]
    assert before.sum().item() == 2
"""


def environment(stack, **more):
    free = {k: v for k, v in os.environ.items() if not k.startswith("WOOLYAI_")}
    return free | {"OMP_NUM_THREADS": "1"} | stack.client_env | more


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "child.py").write_text(CHILD)
    (tmp_path / "parent.py").write_text(PARENT)
    return tmp_path


def wooly(*argv, env, **options):
    return subprocess.run(
        [sys.executable, "-m", "wooly", *map(str, argv)],
        capture_output=True,
        text=True,
        timeout=240,
        env=env,
        **options,
    )


def lines(text):
    return {said[0]: said[1:] for said in [json.loads(line) for line in text.splitlines() if line.startswith("[")]}


@pytest.mark.slow  # each child imports PyTorch again
def test_child_of_script_has_own_session_and_hidden_devices_none(stack, folder):
    done = forks.run("wooly", "run", str(folder / "parent.py"), env=environment(stack), timeout=240)
    assert done.returncode == 0, done.stderr
    said = lines(done.stdout)
    assert said["shell"][:2] == [1, 6.0] and said["hidden"] == [0, False, ""]
    assert f"1 more session: {said['shell'][2]}" in done.stderr
    assert not stack.request("GET", "sessions")["sessions"]


ENDING = """
import atexit, gzip, multiprocessing, sys, threading, time, torch

def later():
    time.sleep(0.2)
    print("thread", torch.ones(2, device="cuda").sum().item(), flush=True)

def at_exit():
    print("at exit", (total + 1).tolist(), api.has_session(), flush=True)

if __name__ == "__main__":
    from wooly import api
    total = torch.ones(2, device="cuda")
    locks = multiprocessing.get_context("spawn").Queue()
    plain, packed = open("plain.txt", "w"), gzip.open("packed.gz", "wt")
    plain.write("kept in memory")
    packed.write("kept in memory")
    cycle = [plain, packed]
    cycle.append(cycle)
    atexit.register(at_exit)
    threading.Thread(target=later).start()
    print("end of script", flush=True)
    if "fails" in sys.argv:
        raise SystemExit(5)
"""


@pytest.mark.parametrize(("arguments", "code"), [([], 0), (["fails"], 5)])
def test_end_of_script_is_that_of_python(stack, tmp_path, arguments, code):
    """Threads end, exit functions run while the session is open, files are written, and semaphores are removed."""
    (tmp_path / "ending.py").write_text(ENDING)
    done = forks.run("wooly", "run", "-q", "ending.py", *arguments, env=environment(stack), cwd=tmp_path, timeout=240)
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines() == ["end of script", "thread 2.0", "at exit [2.0, 2.0] True"]
    assert (tmp_path / "plain.txt").read_text() == "kept in memory"
    assert gzip.decompress((tmp_path / "packed.gz").read_bytes()) == b"kept in memory"
    assert "leaked" not in done.stderr and "Error" not in done.stderr
    assert not stack.request("GET", "sessions")["sessions"]


def test_program_has_captured_children_exit_code_and_bill(stack, folder):
    argv = ["run", "sh", "-c", "python child.py first; exit 7"]
    done = forks.run("wooly", *argv, env=environment(stack), cwd=folder, timeout=240)
    said = lines(done.stdout)
    assert done.returncode == 7 and said["first"][:2] == [1, 6.0], done.stderr
    assert f"1 session: {said['first'][2]}" in done.stderr and "credits: " in done.stderr
    none = forks.run("wooly", "run", "true", env=environment(stack), timeout=240)
    assert none.returncode == 0 and "no Python process used" in none.stderr
    missing = forks.run("wooly", "run", "no-such-program", env=environment(stack), timeout=240)
    assert missing.returncode == 1 and "no-such-program" in missing.stderr


def test_terminated_program_reports_its_signal(stack, tmp_path):
    argv = ["wooly", "run", "-q", "sh", "-c", "touch started; exec sleep 60"]
    with forks.Forked(*argv, env=environment(stack), cwd=tmp_path) as running:
        deadline = time.monotonic() + 60
        while not (tmp_path / "started").exists():
            assert time.monotonic() < deadline and running.poll() is None
            time.sleep(0.02)
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 128 + signal.SIGTERM


@pytest.mark.slow
def test_shell_captures_what_is_typed(stack, folder):
    env = environment(stack, SHELL="/bin/sh")
    done = wooly("shell", env=env, cwd=folder, input="python child.py typed\nexit 3\n")
    assert done.returncode == 3 and lines(done.stdout)["typed"][:2] == [1, 6.0], done.stderr


@pytest.mark.slow
def test_launchers_and_test_runners_are_captured(stack, folder):
    """torchrun, accelerate and `pytest -n` start Python processes in ways of their own."""
    (folder / "rank.py").write_text(
        textwrap.dedent("""
        import os, torch
        x = torch.full((3,), float(os.environ["RANK"]), device="cuda")
        print("rank", os.environ["RANK"], x.sum().item(), flush=True)
        """)
    )
    (folder / "test_it.py").write_text(
        textwrap.dedent("""
        import os, pytest, torch
        @pytest.mark.parametrize("n", range(4))
        def test_it(n):
            assert "PYTEST_XDIST_WORKER" in os.environ
            assert torch.full((3,), n, device="cuda").sum().item() == 3 * n
        """)
    )
    env = environment(stack)
    torchrun = wooly("run", "-q", "torchrun", "--nproc-per-node", "2", "rank.py", env=env, cwd=folder)
    assert torchrun.returncode == 0, torchrun.stderr
    assert sorted(torchrun.stdout.splitlines()) == ["rank 0 0.0", "rank 1 3.0"]
    accelerate = wooly(
        "run", "-q", "accelerate", "launch", "--num_processes", "1", "child.py", "a", env=env, cwd=folder
    )
    assert accelerate.returncode == 0 and lines(accelerate.stdout)["a"][:2] == [1, 6.0], accelerate.stderr
    pytest_n = wooly("run", "pytest", "-n", "2", "-q", "-p", "no:cacheprovider", "test_it.py", env=env, cwd=folder)
    assert pytest_n.returncode == 0 and "2 sessions" in pytest_n.stderr, pytest_n.stdout


LOADERS = """
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

class Host(Dataset):
    def __len__(self): return 12
    def __getitem__(self, i): return torch.full((3,), float(i)), i

class Device(Host):
    def __getitem__(self, i): return torch.full((3,), float(i), device="cuda")

class Stream(IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        return iter([torch.tensor([i]) for i in range(info.id, 8, info.num_workers)])

def total(**options):
    loader, sums = DataLoader(Host(), batch_size=4, **options), []
    for _ in range(2):
        sums.append(sum((batch.to("cuda", non_blocking=True).sum() * bias).item() for batch, _ in loader))
    return sums

if __name__ == "__main__":
    bias = torch.full((), 2.0, device="cuda")
    spawn = {"num_workers": 1, "multiprocessing_context": "spawn"}
    print(total(num_workers=2), total(num_workers=2, pin_memory=True, persistent_workers=True), total(**spawn))
    print(sorted(t.to("cuda").item() for b in DataLoader(Stream(), num_workers=2, pin_memory=True) for t in b))
    print([(b.sum().item(), str(b.device)) for b in DataLoader(Device(), batch_size=6, **spawn)])
    for options, error in (({"num_workers": 1}, "'spawn' start method"), (spawn | {"pin_memory": True}, "cannot pin")):
        try:
            list(DataLoader(Device(), batch_size=6, **options))
        except RuntimeError as e:
            print(error in str(e))
"""


@pytest.mark.slow
def test_data_loaders_with_workers(stack, tmp_path):
    """Workers may return device tensors if they are spawned; otherwise the errors are CUDA's."""
    (tmp_path / "loaders.py").write_text(LOADERS)
    done = wooly("run", "-q", tmp_path / "loaders.py", env=environment(stack))
    sums = "[396.0, 396.0]"
    assert done.stdout.splitlines() == [
        f"{sums} {sums} {sums}",
        str(list(range(8))),
        "[(45.0, 'cuda:0'), (153.0, 'cuda:0')]",
        "True",
        "True",
    ], done.stderr


@pytest.mark.slow
def test_notebook_cell_can_be_interrupted(stack, tmp_path):
    """The installed kernel captures the notebook. An interrupted cell leaves its session and its tensors."""
    from jupyter_client.manager import KernelManager

    env = environment(stack, JUPYTER_PATH=str(tmp_path / "share/jupyter"))
    installed = wooly("jupyter", "install", "--prefix", tmp_path, env=env)
    assert installed.returncode == 0, installed.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", env["JUPYTER_PATH"])
        kernel = KernelManager(kernel_name="wooly")
        kernel.start_kernel(env=env)
    client = kernel.blocking_client()
    client.start_channels()
    client.wait_for_ready(120)

    def run(code, interrupt_after=None):
        """What a cell printed, and its error's name."""
        request = client.execute(code)
        printed, error = "", ""
        if interrupt_after is not None:
            while "started" not in printed:
                message = client.get_iopub_msg(timeout=120)
                printed += message["content"].get("text", "")
            time.sleep(interrupt_after)
            kernel.interrupt_kernel()
        while True:
            message = client.get_iopub_msg(timeout=120)
            if message["parent_header"].get("msg_id") != request:
                continue
            printed += message["content"].get("text", "")
            error = message["content"].get("ename", error)
            if message["content"].get("execution_state") == "idle":
                return printed, error

    try:
        assert run("import torch; x = torch.ones(400, 400, device='cuda'); print(x.sum().item())") == ("160000.0\n", "")
        session = run("from wooly import api; print(api.opened_session().session_id)")
        forever = "print('started', flush=True)\nwhile True:\n    y = (x @ x).sum().item()"
        rng = random.Random(0)
        for after in [0.7, *[0.2 * rng.random() for _ in range(30)]]:
            assert run(forever, after) == ("started\n", "KeyboardInterrupt")
            assert run("print(x.sum().item(), (x @ x)[0, 0].item())") == ("160000.0 400.0\n", "")
        assert run("print(api.opened_session().session_id)") == session
        assert run("%load_ext wooly")[1] == ""
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
