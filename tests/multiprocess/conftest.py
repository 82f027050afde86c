"""Executors, and scripts that run on them in processes of their own."""

import os
import subprocess
from pathlib import Path

import pytest
from wooly_testkit import forks
from wooly_testkit.executor import executor_process

SCRIPTS = Path(__file__).parent / "scripts"
#: Seconds that a script may take on a busy machine.
TIMEOUT_S = 300


class Script:
    """A script in a process that was forked when PyTorch was loaded."""

    def __init__(self, url, script, *arguments, **env):
        self.process = forks.Forked(
            "script",
            *(str(SCRIPTS / script), *map(str, arguments)),
            like="wooly",
            cwd=SCRIPTS,
            env=os.environ | {"WOOLYAI_EXECUTOR_URL": url, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def output(self):
        """Wait for the script, which must succeed, and return what it has printed."""
        out, errors = self.process.communicate(timeout=TIMEOUT_S)
        assert self.process.returncode == 0, out + errors
        return out

    def close(self):
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            pipe.close()


@pytest.fixture(scope="session")
def url():
    with executor_process(start=forks.Forked) as running:
        yield running.endpoints[0].replace("unix://", f"unix://{running.token}@")


@pytest.fixture(scope="session")
def other_url():
    with executor_process(start=forks.Forked) as running:
        yield running.endpoints[0].replace("unix://", f"unix://{running.token}@")


@pytest.fixture
def script(url):
    """Starts a script."""
    scripts = []

    def start(name, *arguments, at=url, **env):
        scripts.append(Script(at, name, *arguments, **env))
        return scripts[-1]

    yield start
    for each in scripts:
        each.close()
