"""Virtual environments with this repository's wheels and only the distributions that the wheels require.

Nothing is downloaded. Distributions from elsewhere are links to the environment that runs the tests: exactly those that the
wheels require, directly or indirectly. pip resolves without an index, so an unsatisfied requirement is an error. An import of a
package that no requirement names fails, too. So these environments prove that the requirements are complete. The versions are
those of the environment that runs the tests.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import zipfile
from collections import Counter
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.distributions.distributions import ALL


def build_wheels(folder: Path) -> dict[str, Path]:
    """Build a wheel of each distribution, as `make dist` does. Returns the wheels by name."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(folder),
    ]
    subprocess.run([*command, *[str(d.folder) for d in ALL.values()]], check=True)
    return {canonicalize_name(w.name.partition("-")[0]): w for w in folder.glob("*.whl")}


def make_environment(folder: Path, wheels: dict[str, Path], *wanted: str) -> Path:
    """Create a virtual environment with these distributions, installed by pip from the wheels.

    Args:
        folder: folder of the environment.
        wheels: wheels by name.
        wanted: requirements, such as ``wooly[triton]``.

    Returns:
        The interpreter of the environment.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    install(python, wheels, *wanted)
    return python


def install(python: Path, wheels: dict[str, Path], *wanted: str) -> None:
    """Install these distributions into an environment, with pip and from the wheels."""
    _link(_of_others(wheels, wanted), python.parents[1])
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--quiet", "--disable-pip-version-check"]
    places = ["--no-index", "--find-links", str(next(iter(wheels.values())).parent)]
    subprocess.run([*pip, "install", *places, *wanted], check=True)


def clean_variables(folder: Path) -> dict[str, str]:
    """Environment variables of a process in such an environment: none of the checkout's, and a separate home folder."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "WOOLY", "POCL", "VIRTUAL_ENV"))
    }
    return kept | {
        "HOME": str(folder),
        "XDG_CONFIG_HOME": str(folder),
        "XDG_CACHE_HOME": str(folder),
        "XDG_STATE_HOME": str(folder),
    }


def _of_others(wheels: dict[str, Path], wanted: tuple[str, ...]) -> set[str]:
    """Names of all distributions from elsewhere that these require, directly or indirectly."""
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    waiting = [Requirement(w) for w in wanted]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            if name not in wheels:
                found.add(name)
            for required in map(Requirement, _requirements(wheels, name)):
                if required.marker is None or required.marker.evaluate({"extra": extra}):
                    waiting.append(required)
    return found


def _requirements(wheels: dict[str, Path], name: str) -> list[str]:
    if name not in wheels:
        return importlib.metadata.requires(name) or []
    with zipfile.ZipFile(wheels[name]) as packed:
        (path,) = [n for n in packed.namelist() if n.endswith(".dist-info/METADATA")]
        return Parser().parsestr(packed.read(path).decode()).get_all("Requires-Dist") or []


def _link(names: set[str], environment: Path) -> None:
    """Link the files of distributions into an environment. A folder that belongs to one distribution is linked as a whole."""
    (packages,) = environment.glob("lib/python*/site-packages")
    installed = {canonicalize_name(d.name): d for d in importlib.metadata.distributions()}
    files = {n: [f for f in d.files or () if f.parts[0] != "__pycache__"] for n, d in installed.items()}
    owners = Counter(top for found in files.values() for top in {f.parts[0] for f in found})
    for name in names:
        for file in files[name]:
            if file.parts[0] == "..":
                _link_program(Path(file.locate()), environment)
                continue
            linked = file if owners[file.parts[0]] > 1 else file.parts[0]
            there = packages / linked
            if not there.is_symlink():
                there.parent.mkdir(parents=True, exist_ok=True)
                there.symlink_to(installed[name].locate_file(linked))


def _link_program(program: Path, environment: Path) -> None:
    """Link a binary program. Scripts are not linked, because they would run in their original environment."""
    if program.parent.name == "bin" and program.read_bytes()[:2] != b"#!":
        (environment / "bin" / program.name).symlink_to(program)
