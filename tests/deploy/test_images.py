"""What a machine without Docker and without a GPU can show of the images: their requirements fit together, and executors say what
is missing.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
#: Images with torch or a compiler, and the arguments of their builds.
IMAGES = {
    "executor-cuda": {},
    "executor-rocm": {},
    "executor-cpu": {},
    "client": {},
    "compiler": {},
    "compiler-cuda": {"EXTRAS": "[cuda]"},
    "compiler-rocm": {"EXTRAS": "[rocm]"},
}
#: Images whose requirements are resolved, which takes minutes. The one for AMD gets PyPI's torch, because ROCm's index is not
#: known here: this shows its other requirements.
RESOLVED = ("executor-cuda", "executor-rocm", "compiler-cuda")
#: What pip says if it does not reach the index.
OFFLINE = re.compile(r"NewConnectionError|NameResolutionError|ConnectTimeout|Network is unreachable|ProxyError")


def dockerfile(image):
    path = DOCKER / f"{image}.Dockerfile"
    return path if path.exists() else DOCKER / f"{image.partition('-')[0]}.Dockerfile"


def requirements(image):
    """The requirements of all `pip install` commands of an image, and whether its constraints leave out Triton."""
    text = dockerfile(image).read_text().replace("\\\n", " ")
    text = re.sub(r"\$\{TORCH_INDEX:\+[^}]*\}", "", text)
    for name, value in IMAGES[image].items():
        text = text.replace(f"${{{name}}}", value)
    found = []
    for command in re.findall(r"pip install ([^&\n]*)", text.replace("${EXTRAS}", "")):
        words = iter(shlex.split(command))
        found += [w for w in words if not (w in ("-c", "--find-links") and next(words))]
    return found, "/^triton==/d" in text


@pytest.mark.parametrize("image", IMAGES)
def test_image_requirements_are_read_from_its_dockerfile(image):
    found, without_triton = requirements(image)
    assert all(not w.startswith("-") for w in found) and "./libs/wis" in found
    assert all((ROOT / w.partition("[")[0]).is_dir() for w in found if w.startswith("./"))
    assert ("torch" in found) == without_triton, "a torch for GPUs names its own Triton, so the pin must not"
    extras = {w for w in found if "[" in w}
    assert bool(extras) == (image not in ("compiler", "client"))


@pytest.fixture(scope="module")
def pip(tmp_path_factory):
    """A pip that needs only the metadata of packages, without this machine's configuration."""
    folder = tmp_path_factory.mktemp("pip")
    venv.create(folder / "env", with_pip=True)
    python = str(folder / "env" / "bin" / "python")

    def run(*arguments):
        done = subprocess.run(
            [python, "-m", "pip", "--isolated", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600
        )
        if done.returncode and OFFLINE.search(done.stdout + done.stderr):
            pytest.skip("PyPI is not reachable")
        return done

    done = run("install", "--quiet", "--upgrade", "pip>=25")
    assert not done.returncode, done.stderr
    return run


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("image", RESOLVED)
def test_image_requirements_fit_together(pip, tmp_path, image):
    """Pip resolves all requirements of the image at once with the pins, and downloads no wheel of PyPI for this."""
    found, without_triton = requirements(image)
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    (tmp_path / "constraints.txt").write_text(
        "\n".join([pin for pin in pins if not (without_triton and pin.startswith("triton=="))])
    )
    report = tmp_path / "report.json"
    options = ("--dry-run", "--ignore-installed", "--quiet", "-c", str(tmp_path / "constraints.txt"))
    done = pip("install", *options, "--report", str(report), *found)
    assert not done.returncode, done.stderr[-4000:]
    installed = {
        i["metadata"]["name"].lower(): i["metadata"]["version"] for i in json.loads(report.read_text())["install"]
    }
    assert {"wooly-wis", "pydantic"} <= installed.keys()
    pinned = dict(pin.partition(";")[0].split("==") for pin in pins if "==" in pin and not pin.startswith("#"))
    wrong = {n: v for n, v in installed.items() if n in pinned and pinned[n].strip() != v and n != "triton"}
    assert not wrong, "pip has not taken the pinned versions"
    if "cuda" in image:
        assert {"cuda-bindings", "nvidia-cuda-nvrtc", "triton"} <= installed.keys()
    if "rocm" in image:
        assert {"hip-python", "triton"} <= installed.keys()


@pytest.mark.slow
@pytest.mark.parametrize(("image", "runtime"), [("executor-cuda", "cuda"), ("executor-rocm", "hip")])
def test_image_entry_point_without_a_device_says_so(tmp_path, image, runtime):
    """With the image's command and environment, but this machine's Python. A GPU image never computes on the CPU by itself."""
    text = dockerfile(image).read_text()
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)
    (given,) = re.findall(r"^ENV (.*)$", text, re.MULTILINE)
    names = dict(pair.split("=", 1) for pair in given.split())
    command = [sys.executable if word == "python" else word for word in json.loads(entry)]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WOOLY_", "CUDA_", "NVIDIA_"))}
    folder = {"WOOLY_EXECUTOR_STATE_DIR": str(tmp_path), "WOOLY_EXECUTOR_LISTEN": f"unix://{tmp_path}/x.sock"}
    done = subprocess.run(
        [*command, "--standalone"], env=kept | names | folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"the runtime '{runtime}' cannot run here: " in done.stderr
