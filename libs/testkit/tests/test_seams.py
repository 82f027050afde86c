"""Without the `type: ignore` comments, mypy rejects exactly the wrong calls of `wooly_testkit.seams`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import wooly_testkit.seams

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.timeout(1200)  # seconds: without a cache, mypy first reads pydantic, NATS and FastStream
def test_mypy_rejects_exactly_the_wrong_calls(tmp_path):
    """This test is slow without mypy's cache. `make lint` checks the same file."""
    source = Path(wooly_testkit.seams.__file__).read_text()
    wrong = [n for n, line in enumerate(source.splitlines(), 1) if "# type: ignore" in line]
    assert len(wrong) > 15
    bare = tmp_path / "bare.py"
    bare.write_text(re.sub(r"  # type: ignore\[.*", "", source))
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(bare)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    found = {int(n) for n in re.findall(r"bare\.py:(\d+): error:", ran.stdout)}
    assert found == set(wrong), ran.stdout + ran.stderr
