"""`wooly record` and `wooly replay` as commands, with an executor that several of them use."""

import json
import os
import signal
from pathlib import Path

import pytest
from wooly_testkit import forks
from wooly_testkit.executor import executor_process

SCRIPTS = Path(__file__).parents[1] / "recovery" / "scripts"
KILLED = """
import os, signal, torch
x = torch.ones(100, device="cuda")
for k in range(10):
    x = x * 1.5 + 1
    x.sum().item()
os.kill(os.getpid(), signal.SIGKILL)
"""
KERNELS = """
import torch, triton, triton.language as tl
@triton.jit
def scale_add(x, y, out, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + at, mask=inside) * factor + tl.load(y + at, mask=inside), mask=inside)
x, y = torch.randn(1000).to("cuda"), torch.randn(1000).to("cuda")
for step in range(3):
    out = torch.empty_like(x)
    scale_add[(4,)](x, y, out, 1000, 0.5 + step / 64, BLOCK=256)
    x = out
print(x.sum().item())
source = 'extern "C" __global__ void twice(float* x, int n) { int i = blockIdx.x*blockDim.x+threadIdx.x; if (i<n) x[i] *= 2; }'
torch.cuda._compile_kernel(source, "twice")((4, 1, 1), (256, 1, 1), (x, 1000))
print(x.sum().item())
model = torch.compile(torch.nn.Sequential(torch.nn.Linear(1000, 16), torch.nn.Dropout(0.5)).to("cuda"))
for _ in range(3):
    print(model(x).sum().item())
graph, held = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
with torch.cuda.graph(graph):
    result = held * 2 + 1
for k in range(3):
    held.fill_(k)
    graph.replay()
    print(result.sum().item())
"""


@pytest.fixture(scope="module")
def wooly(tmp_path_factory):
    """Run a command with a standalone executor."""
    folder = tmp_path_factory.mktemp("recording")
    with executor_process(runtime="opencl", start=forks.Forked) as x:
        url = x.endpoints[0].replace("unix://", f"unix://{x.token}@")
        free = {k: v for k, v in os.environ.items() if not k.startswith("WOOLYAI_")}
        env = free | {"OMP_NUM_THREADS": "1", "WOOLYAI_EXECUTOR_URL": url, "WOOLYAI_STATE_DIR": str(folder)}

        def wooly(*arguments, code=0, **more):
            done = forks.run("wooly", *map(str, arguments), env=env | more, cwd=folder, timeout=240)
            assert done.returncode == code, done.stderr + done.stdout
            return done.stdout, done.stderr

        yield wooly


@pytest.fixture(scope="module")
def training(wooly, tmp_path_factory):
    """A bundle of a training."""
    path = tmp_path_factory.mktemp("training") / "bug.wooly"
    printed, said = wooly("record", "-o", path, SCRIPTS / "train.py", 6, 2)
    assert len(printed.split()) == 2 and f"frames in {path}" in said.replace("\n", " ")
    return path


def test_replay_of_a_training_has_its_answers(wooly, training):
    report = json.loads(wooly("replay", training, "--json")[0])
    assert report["complete"] and report["frames"] == report["of"] > 0
    assert report["compared"] >= 3 and report["different"] == 0 and report["first_difference"] is None


def test_until_a_line_prints_and_saves_the_live_tensors(wooly, training, tmp_path):
    import torch

    line = next(
        n for n, text in enumerate((SCRIPTS / "train.py").read_text().splitlines(), 1) if "loss.backward" in text
    )
    saved = tmp_path / "live.pt"
    report = json.loads(wooly("replay", training, "--until", f"train.py:{line}", "--save", saved, "--json")[0])
    rows = {row["name"]: row for row in report["tensors"]}
    tensors = torch.load(saved, weights_only=True)
    assert tensors.keys() == rows.keys() and all(list(t.shape) == rows[n]["shape"] for n, t in tensors.items())
    gradients = [row for row in rows.values() if row["made"].endswith(f"train.py:{line}")]
    assert gradients and all(row["dtype"] in ("f32", "bf16", "bool", "i64") for row in gradients)


def test_a_killed_recorder_leaves_a_bundle_that_replays(wooly, tmp_path):
    (tmp_path / "killed.py").write_text(KILLED)
    path = tmp_path / "killed.wooly"
    wooly("record", "-o", path, tmp_path / "killed.py", code=-signal.SIGKILL)
    printed, said = wooly("replay", path)
    assert "the recording did not end normally" in said and "all 10 answers are those of the recording" in printed


def test_info_names_what_is_inside(wooly, training, tmp_path):
    report = json.loads(wooly("replay", "--info", training, "--json")[0])
    assert report["program"] == "train.py" and report["device"]["runtime"] == "opencl" and report["data"]
    assert list(report["files"]) == [str(SCRIPTS / "train.py")]
    (tmp_path / "x.wooly").write_bytes(training.read_bytes()[:-60] + bytes(60))
    assert "is damaged at byte" in wooly("replay", "--info", tmp_path / "x.wooly", code=1)[1]


@pytest.mark.parametrize(
    ("arguments", "env", "why"),
    [
        (("record", "-o", "b.wooly", "torchrun"), {}, "torchrun is no Python script"),
        (("record", "-o", "no/folder/b.wooly", SCRIPTS / "train.py"), {}, "no/folder does not exist"),
        (
            ("record", "-o", "b.wooly", SCRIPTS / "train.py"),
            {"WOOLYAI_GPU_COUNT": "2"},
            "only sessions with one device",
        ),
        (
            ("record", "-o", SCRIPTS / "train.py", SCRIPTS / "train.py", "1", "1"),
            {},
            "is no bundle, so it is not replaced",
        ),
        (("replay", SCRIPTS / "train.py"), {}, "is no bundle of `wooly record`"),
        (("replay", "b.wooly", "--save", "x.pt"), {}, "need --until"),
    ],
)
def test_a_mistake_is_an_error_with_a_cure(wooly, arguments, env, why):
    assert why in wooly(*arguments, code=1, **env)[1].replace("\n", " ")


@pytest.mark.slow
@pytest.mark.parametrize("native", ["auto", "off"])
def test_own_kernels_compiled_functions_and_graphs_replay(wooly, tmp_path, native):
    pytest.importorskip("triton")
    (tmp_path / "kernels.py").write_text(KERNELS)
    path = tmp_path / "kernels.wooly"
    wooly("record", "-o", path, tmp_path / "kernels.py", WOOLYAI_NATIVE=native)
    report = json.loads(wooly("replay", path, "--json")[0])
    assert report["compared"] >= 8 and report["different"] == 0 and not report["errors"]


@pytest.mark.slow
def test_against_another_runtime_finds_no_difference(wooly, training):
    report = json.loads(wooly("replay", training, "--against", "torch_cpu", "--json")[0])
    assert report["first_difference"] is None and report["runs"] > 0


@pytest.mark.slow
def test_without_data_a_training_replays(wooly, tmp_path):
    path = tmp_path / "none.wooly"
    wooly("record", "--no-data", "-o", path, SCRIPTS / "train.py", 4, 2)
    report = json.loads(wooly("replay", path, "--json")[0])
    assert not report["data"] and report["errors"] == [] and report["compared"] == 0
    assert report["frames"] == report["of"]
