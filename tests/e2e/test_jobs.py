"""Jobs through the whole stack: exported, submitted, run by real executors, with the CPU's results; kills and deadlines."""

import asyncio
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from wooly_bus import contracts
from wooly_bus.errors import RefusedError
from wooly_local.stack import read_stack
from wooly_testkit import forks
from wooly_testkit.control import ask
from wooly_wis.messages import NodesRequest, TaskRequest

pytestmark = [pytest.mark.connected, pytest.mark.timeout(240)]
ROOT = Path(__file__).parents[2]
WOOLY = [sys.executable, "-m", "wooly"]


@pytest.fixture
def stack(pair):
    return pair


def run(*argv, stack=None, code=0, **options):
    env = {k: v for k, v in os.environ.items() if not k.startswith("WOOLYAI_")} | {"OMP_NUM_THREADS": "1"}
    if stack is not None:
        env |= stack.client_env
    done = forks.run("wooly", *map(str, argv), env=env, timeout=120, **options)
    assert done.returncode == code, done.stderr + done.stdout
    return done


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """The example's module, its input, and the CPU's results."""
    import torch

    folder = tmp_path_factory.mktemp("job")
    run("export", f"{ROOT / 'examples/job.py'}:build", "-o", folder / "job.wism")
    x = np.random.default_rng(0).standard_normal((32, 64), dtype=np.float32)
    np.save(folder / "x.npy", x)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 10)).eval()
    with torch.no_grad():
        scores = model(torch.from_numpy(x)).softmax(-1)
    return folder, x, scores.numpy()


@pytest.fixture(scope="module")
def slow_module(tmp_path_factory):
    """A module that runs long enough to be killed: many products of one matrix."""
    folder = tmp_path_factory.mktemp("slow")
    (folder / "slow.py").write_text(
        "import torch\n"
        "def build():\n"
        "    def work(x):\n"
        "        for _ in range(300):\n"
        "            x = (x @ x).tanh()\n"
        "        return x\n"
        "    return work, (torch.empty(600, 600),)\n"
    )
    run("export", f"{folder / 'slow.py'}:build", "-o", folder / "slow.wism")
    np.save(folder / "x.npy", np.eye(600, dtype=np.float32))
    return folder


def task(stack, name):
    """A submitted task, after a router has accepted it."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return ask(stack, contracts.ROUTER_TASK_GET, TaskRequest(task_id=name)).task.model_dump()
        except RefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def wait_for(stack, name, *states):
    deadline = time.monotonic() + 120
    while (found := task(stack, name))["state"] not in states:
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    return found


def test_job_results_equal_cpu_bitwise(stack, classifier, tmp_path):
    folder, _, scores = classifier
    done = run(
        "submit", folder / "job.wism", "-i", f"x={folder / 'x.npy'}", "-o", tmp_path / "out", "--json", stack=stack
    )
    report = json.loads(done.stdout)
    assert report["state"] == "completed" and {Path(f).name for f in report["files"]} == {"scores.npy", "best.npy"}
    ours = np.load(tmp_path / "out/scores.npy")
    assert ours.tobytes() == scores.tobytes() and (np.load(tmp_path / "out/best.npy") == scores.argmax(-1)).all()
    told = run("logs", report["task_id"], stack=stack).stdout.splitlines()
    assert [line.split()[1] for line in told] == ["pending", "started", "completed"] and "6 programs" in told[2]
    found = task(stack, report["task_id"])
    assert found["kind"] == "job" and found["placement"]["why"] == "here" and found["name"] == "job"


def test_submit_with_wrong_inputs_is_refused_unsent(stack, classifier, tmp_path):
    folder, x, _ = classifier
    np.save(tmp_path / "y.npy", x[:3])
    module = folder / "job.wism"
    assert "inputs of the module are missing: x" in run("submit", module, stack=stack, code=1).stderr
    assert "float32 [3, 64]" in run("submit", module, "-i", f"x={tmp_path / 'y.npy'}", stack=stack, code=1).stderr
    (tmp_path / "x.py").write_text("import torch")
    assert f"`wooly run {tmp_path}/x.py` runs it" in run("submit", tmp_path / "x.py", stack=stack, code=1).stderr
    assert "is not of the form NAME=FILE" in run("submit", module, "-i", "z=1", stack=stack, code=1).stderr
    (tmp_path / "bad.wism").write_bytes(module.read_bytes()[:-1] + b"?")
    assert (
        "the content of a constant does not match its digest"
        in run("submit", tmp_path / "bad.wism", stack=stack, code=1).stderr
    )


def test_export_of_script_that_reads_values_is_refused(tmp_path):
    path = tmp_path / "refused.py"
    path.write_text(
        """
import torch
from wooly.export import ExportError, export

answers = "during recording"
for body, why in {
    "x[x > 0]": answers, "x * x.sum().item()": answers, "x if x.any() else -x": answers, "x.cpu()": answers,
    "3": "output output is a int", "[x, None]": "output 1 is a NoneType", "x.to_sparse()": "",
}.items():
    try:
        export(lambda: (eval("lambda x: " + body), (torch.ones(3),)))
    except (ExportError, NotImplementedError) as e:
        assert why in str(e), (body, str(e))
    else:
        raise AssertionError(body)
for bad in (3, (torch.sin, 3), (torch.sin, ("x",)), ("sin", ())):
    try:
        export(lambda: bad)
    except ExportError as e:
        assert "did not return" in str(e)
    else:
        raise AssertionError(bad)
export(lambda: (torch.no_grad()(lambda x: x.add(x, alpha=x.sum())), (torch.ones(3),)))  # the number is not read
made = export(lambda: (lambda a, b: {"s": [a + b, a]}, {"a": torch.ones(2), "b": torch.ones(2)}))
print([t.name for t in made.module.inputs], [o.tensor.name for o in made.module.outputs])
"""
    )
    done = forks.run("refused", like="wooly", cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['a', 'b'] ['s.0', 's.1']\n"


@pytest.mark.slow  # the tests of tenants run the example with a token
def test_nats_py_example_reads_its_result(stack, classifier, tmp_path):
    pytest.importorskip("nkeys", reason="nats-py needs it for authentication")
    _, x, scores = classifier
    module = run("export", f"{ROOT / 'examples/job.py'}:build", "--blobs", tmp_path / "job").stdout.strip()
    assert (tmp_path / "job" / module).exists()
    x.tofile(tmp_path / "x.bin")
    me = tmp_path / "me.json"
    me.write_text(json.dumps(stack.request("POST", "credentials", {"role": "user"})))
    argv = [sys.executable, ROOT / "examples/job_over_nats.py", me, tmp_path / "job", module, tmp_path / "x.bin"]
    done = subprocess.run([str(a) for a in argv], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert f"scores f32 [32, 10] {scores.tobytes()[:16].hex()}" in done.stdout and "completed" in done.stdout
    code = (ROOT / "examples/job_over_nats.py").read_text().split("async def main")[1]
    assert len([line for line in code.splitlines() if line.strip()]) <= 22


def test_job_sent_several_times_runs_once(stack, classifier):
    folder, x, _ = classifier
    name = f"job-{hashlib.sha256(os.urandom(8)).hexdigest()[:16]}"

    from wooly.jobs import follow, jetstream, read_module, submit

    job = submit(stack.access(), "default", read_module(folder / "job.wism"), {"x": x.tobytes()}, job_id=name)

    async def again():
        async with jetstream(stack.access()) as js:
            for _ in range(5):
                await js.publish(contracts.ROUTER_JOB_COMMAND.subject, job.model_dump_json().encode())

    asyncio.run(again())
    states = []
    follow(stack.access(), "default", name, lambda e: states.append((e.number, e.state)))
    assert states == [(1, "pending"), (2, "started"), (3, "completed")]
    assert task(stack, name)["attempt"] == 1


@pytest.mark.slow  # the router's own tests show the retry, with a fake executor
def test_job_of_killed_executor_runs_on_another(stack, slow_module):
    name = run("submit", slow_module / "slow.wism", "-i", f"x={slow_module / 'x.npy'}", stack=stack).stdout.strip()
    found = wait_for(stack, name, "started")
    (victim,) = found["executors"]
    os.kill(read_stack(stack.state_dir).services[f"executor-{victim.rpartition('-')[2]}"], signal.SIGKILL)
    last = wait_for(stack, name, "completed", "failed")
    assert last["state"] == "completed" and last["attempt"] == 2, last
    story = [json.loads(line) for line in run("logs", name, "--json", stack=stack).stdout.splitlines()]
    assert [s["state"] for s in story] == ["pending", "started", "pending", "started", "completed"]
    assert re.search("lost|does not have it", story[2]["reason"])


def test_cancel_and_deadline_stop_running_jobs(stack, slow_module):
    wait_for_executors(stack, 2)
    submit = ["submit", slow_module / "slow.wism", "-i", f"x={slow_module / 'x.npy'}"]
    cancelled = run(*submit, stack=stack).stdout.strip()
    wait_for(stack, cancelled, "started")
    ask(stack, contracts.ROUTER_TASK_CANCEL, TaskRequest(task_id=cancelled, reason="enough"))
    late = run(*submit, "--deadline", "0.5", "--wait", "--json", stack=stack, code=1)
    assert "deadline of 0.5 s" in json.loads(late.stdout)["reason"]
    assert (task(stack, cancelled)["state"], task(stack, cancelled)["reason"]) == ("cancelled", "enough")
    deadline = time.monotonic() + 30
    while any(n.sessions for n in nodes(stack)):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def nodes(stack):
    return ask(stack, contracts.ROUTER_NODE_LIST, NodesRequest()).nodes


def wait_for_executors(stack, count):
    deadline = time.monotonic() + 60
    while sum(n.state == "alive" for n in nodes(stack)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_tasks_list_has_sessions_and_jobs(stack, tmp_path):
    path = tmp_path / "s.py"
    path.write_text("import torch; print(torch.ones(2, device='cuda').sum().item())")
    run("run", "-q", path, stack=stack)
    listed = json.loads(run("tasks", "--kind", "session", "--json", stack=stack).stdout)["tasks"]
    assert [(t["state"], t["reason"]) for t in listed[:1]] == [("completed", "closed by its client")]
    table = run("tasks", "--limit", "3", stack=stack).stdout
    assert re.search("session|job", table) and "state" in table
    assert "task nobody does not exist" in run("logs", "nobody", stack=stack, code=1).stderr
    assert "completed" in run("tasks", "cancel", listed[0]["task_id"], stack=stack).stdout
    assert "it must be a state" in run("tasks", "--state", "odd", stack=stack, code=1).stderr


def test_job_failing_on_device_reports_error_without_retry(stack, tmp_path):
    path = tmp_path / "bad.py"
    path.write_text(
        "import torch\n"
        "def build():\n"
        "    return lambda x, i: x.index_select(0, i), (torch.empty(3), torch.empty(1, dtype=torch.int64))\n"
    )
    run("export", f"{path}:build", "-o", tmp_path / "bad.wism")
    np.save(tmp_path / "x.npy", np.zeros(3, np.float32))
    np.save(tmp_path / "i.npy", np.array([99]))
    submit = [
        "submit",
        tmp_path / "bad.wism",
        "-i",
        f"x={tmp_path / 'x.npy'}",
        "-i",
        f"i={tmp_path / 'i.npy'}",
        "--wait",
        "--json",
    ]
    report = json.loads(run(*submit, stack=stack, code=1).stdout)
    assert report["state"] == "failed" and "out of range" in report["reason"], report
    assert task(stack, report["task_id"])["attempt"] == 1
    report = json.loads(run(*submit, "--vram", "1", stack=stack, code=1).stdout)
    assert report["state"] == "failed" and "its quota is 1; raise the quota" in report["reason"]


KERNELS = '''
import torch
import triton
import triton.language as tl
import wooly

@triton.autotune([triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=["n"])
@triton.jit
def double(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n), mask=at < n)

def build():
    add = wooly.cuda_kernel("""__global__ void add(float *x, float by, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) x[i] += by;
    }""", "add")
    def work(x):
        out = torch.empty_like(x)
        double[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, x.numel())
        add((4, 1, 1), (32, 1, 1), [out, 1.0, out.numel()])
        return {"y": out * 3}
    return work, (torch.empty(100),)
'''


@pytest.mark.slow
def test_export_includes_kernels_of_script(stack, tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed")
    (tmp_path / "kernels.py").write_text(KERNELS)
    x = np.arange(100, dtype=np.float32)
    np.save(tmp_path / "x.npy", x)
    told = run("export", f"{tmp_path / 'kernels.py'}:build", "-o", tmp_path / "k.wism")
    assert "its first configuration is used" in told.stderr
    run("submit", tmp_path / "k.wism", "-i", f"x={tmp_path / 'x.npy'}", "-o", tmp_path / "out", "--json", stack=stack)
    assert (np.load(tmp_path / "out/y.npy") == (2 * x + 1) * 3).all()
