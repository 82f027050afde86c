"""Runs the tests of `several_devices.py`, whose session has two devices, in a separate process."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.connected
@pytest.mark.timeout(300)
def test_suite_on_two_devices_passes():
    options = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--import-mode=prepend", "--tb=short"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(FOLDER / "several_devices.py")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
