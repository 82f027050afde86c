"""The router's wheel contains the pages, so an installation needs nothing else."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from wooly_router.ui import STATIC

ROUTER = Path(__file__).parents[2] / "services/router"


def test_wheel_contains_all_pages_and_no_external_address(tmp_path):
    pytest.importorskip("hatchling", reason="hatchling, which builds the wheel, is not installed")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROUTER, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        served = {p.relative_to(STATIC).as_posix(): p.read_bytes() for p in STATIC.rglob("*") if p.is_file()}
        inside = "wooly_router/ui/static/"
        found = {n.removeprefix(inside): packed.read(n) for n in packed.namelist() if n.startswith(inside)}
    assert found == served and {"index.html", "app.css", "main.js", "pages/tasks.js"} <= set(found)
    for name, content in found.items():
        text = content.decode()
        # XML namespaces look like addresses, but are not
        assert not re.findall(r"https?://(?!www\.w3\.org/(?:2000/svg|1999/xhtml))\S+", text), name
        for module in re.findall(r'(?:^import .* from |import\()"([^"\n]+)"', text, re.M):
            there = (STATIC / name).parent / module
            assert there.resolve().relative_to(STATIC.resolve()).as_posix() in found, (name, module)
