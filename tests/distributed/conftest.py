"""One executor, and programs of several ranks on it: processes with the variables that torchrun sets."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import TCPStore
from wooly_testkit import forks
from wooly_testkit.executor import executor_process

SCRIPTS = Path(__file__).parent / "scripts"
#: Seconds that ranks may take on a busy machine.
TIMEOUT_S = 300


class Program:
    """The ranks of one script, which is in SCRIPTS unless its path is absolute.

    Args:
        url: URL of the ranks' executor, or a list with one for each rank; None: the controller of the environment places them.

    Attributes:
        ranks: their processes.
    """

    def __init__(self, url, script, *arguments, ranks=2, **env):
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common = {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            **env,
        }
        urls = url if isinstance(url, list) else [url] * ranks
        self.ranks = [
            forks.Forked(
                "rank",
                *(str(SCRIPTS / script), *map(str, arguments)),
                like="wooly",
                cwd=SCRIPTS,
                env=os.environ
                | common
                | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                | ({"WOOLYAI_EXECUTOR_URL": urls[rank]} if url else {}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]

    def results(self):
        """Wait for all ranks: exit status, standard output and standard error of each.

        All pipes are read together: a rank whose pipe is full would keep the other ranks waiting.
        """
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            found = [pool.submit(rank.communicate, timeout=TIMEOUT_S) for rank in self.ranks]
        return [(rank.returncode, *each.result()) for rank, each in zip(self.ranks, found, strict=True)]

    def output(self):
        """Wait for all ranks, which must succeed, and return what each has printed."""
        found = self.results()
        assert all(status == 0 for status, _, _ in found), "\n".join([errors for _, _, errors in found])
        return [out for _, out, _ in found]

    def close(self):
        for rank in self.ranks:
            rank.kill()
            rank.wait()
            for pipe in (rank.stdout, rank.stderr):
                pipe.close()


def standalone_url(running):
    return running.endpoints[0].replace("unix://", f"unix://{running.token}@")


@pytest.fixture(scope="session")
def url():
    with executor_process(start=forks.Forked) as running:
        yield standalone_url(running)


@pytest.fixture(scope="session")
def other_url():
    with executor_process(start=forks.Forked) as running:
        yield standalone_url(running)


@pytest.fixture
def program(url):
    """Starts a script in several ranks."""
    programs = []

    def start(script, *arguments, at=url, **how):
        programs.append(Program(at, script, *arguments, **how))
        return programs[-1]

    yield start
    for each in programs:
        each.close()
