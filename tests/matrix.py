"""Runs tests with several releases of Python and PyTorch. Each pair gets a virtual environment in `.matrix/`, made on the spot.

Run: python tests/matrix.py 3.12:2.12 3.13:2.13 3.11:2.11@3.14:2.15
`3.12:2.12` are the tests of the client, the executor and torch.distributed, and the conformance sample, with Python 3.12 and
PyTorch 2.12. `A@B` are the client's tests and the sample in environment A, with executors of environment B. The last lines are a
table. The exit status is 0 if everything was run and nothing failed.

Without uv, pip makes the environments, and each takes its own gigabytes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".matrix"
CLIENT = "services/intercept/tests"
SAMPLE = "tests/conformance/test_samples.py"
TESTS = (CLIENT, "services/executor/tests", "tests/distributed", SAMPLE)
#: Of the development's requirements: compilers for chips, whose releases are those of the pinned PyTorch.
LEFT_OUT = ("cuda-bindings", "nvidia-cuda-nvrtc")
PYTHON_VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"


@dataclass(frozen=True)
class Pair:
    """A release of Python and one of PyTorch, such as 3.12 and 2.12."""

    python: str
    torch: str

    @classmethod
    def parse(cls, text: str) -> Pair:
        if re.fullmatch(r"\d+\.\d+:\d+\.\d+(\.\d+)?", text) is None:
            raise argparse.ArgumentTypeError(f"{text!r} is not of the form 3.12:2.12")
        return cls(*text.split(":"))

    @property
    def folder(self) -> Path:
        return FOLDER / f"{self.python}-{self.torch}"

    @property
    def interpreter(self) -> Path:
        return self.folder / "bin" / "python"

    def __str__(self) -> str:
        return f"{self.python}:{self.torch}"


@dataclass(frozen=True)
class Entry:
    """One line of the matrix: an environment, and the environment of its executors if that is another one."""

    client: Pair
    executor: Pair | None = None

    @classmethod
    def parse(cls, text: str) -> Entry:
        client, at, executor = text.partition("@")
        return cls(Pair.parse(client), Pair.parse(executor) if at else None)

    @property
    def pairs(self) -> tuple[Pair, ...]:
        return (self.client,) if self.executor is None else (self.client, self.executor)

    def __str__(self) -> str:
        return "@".join([str(pair) for pair in self.pairs])


class MatrixError(Exception):
    """An entry cannot be run. The message says why and what to do."""


def interpreters(release: str) -> Iterator[str]:
    """Programs that may be a Python of this release: of PATH, pyenv and uv."""
    name = f"python{release}"
    for folder in os.get_exec_path():
        if (Path(folder) / name).is_file():
            yield str(Path(folder) / name)
    for home in (os.environ.get("PYENV_ROOT"), Path.home() / ".pyenv"):
        if home:
            yield from map(str, sorted(Path(home).glob(f"versions/{release}.*/bin/{name}")))
    uv = shutil.which("uv", path=search_path())
    if uv is not None:
        asked = [uv, "python", "find", "--no-python-downloads", "--no-project", release]
        told = subprocess.run(asked, capture_output=True, text=True, cwd="/")
        if told.returncode == 0:
            yield told.stdout.strip()


def find_python(release: str) -> str:
    """Return a Python of this release that starts. A shim of pyenv may not.

    Raises:
        MatrixError: this machine has none.
    """
    for program in interpreters(release):
        told = subprocess.run([program, "-c", PYTHON_VERSION], capture_output=True, text=True)
        if told.stdout.strip() == release:
            return program
    raise MatrixError(
        f"this machine has no Python {release}: neither python{release} in PATH, nor pyenv, nor uv has it. Install it "
        f"(`uv python install {release}`, `pyenv install {release}`), or leave it out of MATRIX"
    )


def search_path() -> str:
    """PATH, after the folder of this interpreter's programs."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def environment(pair: Pair) -> dict[str, str]:
    """The variables of a process of an environment: nothing of another environment's."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    kept |= {"PATH": os.pathsep.join([str(pair.folder / "bin"), os.environ.get("PATH", os.defpath)])}
    # uv does not read pip's settings.
    for name, source in (("UV_FIND_LINKS", "PIP_FIND_LINKS"), ("UV_DEFAULT_INDEX", "PIP_INDEX_URL")):
        if source in os.environ:
            kept.setdefault(name, os.environ[source])
    return kept


def wanted() -> tuple[list[str], list[str]]:
    """The lines of the requirements and of the constraints that every environment has."""
    requirements = (ROOT / "requirements/dev.txt").read_text().splitlines()
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    kept = [re.sub(r"^-e ", "-e ./", line) for line in requirements if not line.startswith(LEFT_OUT)]
    return kept, [line for line in constraints if not line.startswith(("torch==", "triton=="))]


def prepare(pair: Pair, torch_index: str) -> None:
    """Make the environment of a pair, unless it is there and complete.

    Raises:
        MatrixError: there is no such Python, or a package cannot be installed.
    """
    requirements, constraints = wanted()
    stamp = pair.folder / ".ready"
    state = hashlib.sha256("\n".join([*requirements, *constraints]).encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == state:
        return
    python = find_python(pair.python)
    if pair.folder.exists():
        shutil.rmtree(pair.folder)
    FOLDER.mkdir(exist_ok=True)
    print(f"{pair}: makes {pair.folder.relative_to(ROOT)} with {python}", flush=True)
    uv = shutil.which("uv", path=search_path())
    if uv is not None:
        call([uv, "venv", "--quiet", "--no-project", "--seed", "--python", python, str(pair.folder)], pair)
        install = [uv, "pip", "install", "--quiet", "--python", str(pair.interpreter)]
    else:
        call([python, "-m", "venv", str(pair.folder)], pair)
        install = [str(pair.interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    release = pair.torch if pair.torch.count(".") == 2 else f"{pair.torch}.*"
    call([*install, *(["--index-url", torch_index] if torch_index else []), f"torch=={release}"], pair)
    # The Triton that this PyTorch brings; a build for CPUs brings none.
    brought = version_of(pair, "triton")
    triton = [f"triton=={brought}"] if brought else [t for t in pinned() if t.startswith("triton==")]
    listed, limits = pair.folder / "requirements.txt", pair.folder / "constraints.txt"
    listed.write_text("\n".join(requirements) + "\n")
    limits.write_text("\n".join([*constraints, *triton, f"torch=={version_of(pair, 'torch')}"]) + "\n")
    folders = [part for line in requirements if line.startswith("-e ") for part in ("-e", line.removeprefix("-e "))]
    listed.write_text("\n".join([line for line in requirements if not line.startswith("-e ")]) + "\n")
    call([*install, "-c", str(limits), *folders, "-r", str(listed)], pair)
    stamp.write_text(state)


def pinned() -> list[str]:
    return (ROOT / "constraints.txt").read_text().splitlines()


def version_of(pair: Pair, name: str) -> str:
    """The installed version of a package; empty: it is not installed."""
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    told = subprocess.run([pair.interpreter, "-c", code], capture_output=True, text=True, env=environment(pair))
    return told.stdout.strip()


def call(command: list[str], pair: Pair) -> None:
    if subprocess.run(command, cwd=ROOT, env=environment(pair)).returncode:
        raise MatrixError(f"cannot make the environment {pair}: `{' '.join(command)}` failed; the lines above say why")


def run(entry: Entry, workers: int, more: list[str]) -> tuple[str, bool]:
    """Run the tests of an entry. Returns the counts as text, and whether nothing failed."""
    variables = environment(entry.client)
    if entry.executor is not None:
        variables["WOOLY_TEST_EXECUTOR"] = str(entry.executor.interpreter)
    report = FOLDER / f"{str(entry).replace(':', '-')}.xml"
    report.unlink(missing_ok=True)
    tests = more or (TESTS if entry.executor is None else (CLIENT, SAMPLE))
    command = [
        *(str(entry.client.interpreter), "-m", "pytest", "-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"),
        *("--max-worker-restart", "0", "-m", "not slow and not gpu and not docker", "--junit-xml", str(report), *tests),
    ]  # fmt: skip
    print(f"{entry}: PyTorch {' with executors of '.join([version_of(p, 'torch') for p in entry.pairs])}", flush=True)
    status = subprocess.run(command, cwd=ROOT, env=variables).returncode
    if not report.exists():
        return f"pytest ended with status {status} before its report", False
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    total, failed, errors, skipped = [
        sum(int(s.get(key, "0")) for s in suites) for key in ("tests", "failures", "errors", "skipped")
    ]
    passed = total - failed - errors - skipped
    return f"{passed} passed, {failed + errors} failed, {skipped} skipped", status == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("entries", nargs="+", type=Entry.parse, metavar="PYTHON:TORCH[@PYTHON:TORCH]")
    parser.add_argument("--workers", type=int, default=2, help="test processes at a time")
    parser.add_argument("--torch-index", default="", help="package index for PyTorch, for its small CPU builds")
    parser.add_argument("--tests", action="append", default=[], help="a test file or folder instead of all")
    parser.add_argument("--prepare", action="store_true", help="make the environments, and run nothing")
    given = parser.parse_args()
    lines, fine = [], True
    for entry in given.entries:
        try:
            for pair in entry.pairs:
                prepare(pair, given.torch_index)
            told, passed = ("ready", True) if given.prepare else run(entry, given.workers, given.tests)
        except MatrixError as e:
            told, passed = f"NOT RUN: {e}", False
            print(f"{entry}: {told}", flush=True)
        lines.append(f"  {entry!s:22} {told}")
        fine = fine and passed
    print("Python:PyTorch (client@executor)", *lines, sep="\n")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
