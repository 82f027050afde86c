"""A hundred kills at random times, and losses of other kinds: each script ends with the bits of an undisturbed run."""

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
from wooly_testkit import forks
from wooly_testkit.cluster import Tenant

pytestmark = [pytest.mark.connected, pytest.mark.slow]
SCRIPTS = Path(__file__).parent / "scripts"
#: A case lasts for about ten seconds, and each step takes 0.2 s more.
CASES = {
    "train": ("train.py", 50, 5),
    "generate": ("generate.py", 25),
    "lora": ("lora.py", 50),
    "triton": ("triton_loop.py", 50),
}
TIMEOUT_S = 300
#: Seconds between two losses.
PAUSE_S = (1.0, 5.0)


class Runs:
    """Runs scripts of one tenant, and disturbs them."""

    def __init__(self, cluster, tenant):
        self.cluster, self.tenant = cluster, tenant
        self._undisturbed = {}

    def _run(self, case, **env):
        script, *arguments = CASES[case]
        argv = ["run", str(SCRIPTS / script), *map(str, arguments)]
        env = self.tenant.env() | {"OMP_NUM_THREADS": "1", **env}
        return forks.run("wooly", *argv, env=env, timeout=TIMEOUT_S)

    def _here(self):
        """The executor of the only session; None if it has none now."""
        try:
            found = self.cluster.rest("GET", "tasks?state=started")["tasks"]
        except OSError:  # the router is dead, too
            return None
        return found[0]["executors"][0] if found else None

    def disturb(self, case, count, lose, seed, **env):
        """Run a case again and again, until `count` losses have happened. Returns the number of runs."""
        if case not in self._undisturbed:
            self._undisturbed[case] = self._run(case, WOOLYAI_RECOVERY="off").stdout
        chance, lost, runs = random.Random(seed), 0, 0
        while lost < count:
            runs += 1
            found, over = [], threading.Event()

            def work(found=found, over=over):
                try:
                    found.append(self._run(case, SLOW="1", WOOLYAI_CHECKPOINT_S="0.5", **env))
                finally:
                    over.set()

            thread = threading.Thread(target=work)
            thread.start()
            while not over.wait(chance.uniform(*PAUSE_S)):
                name = self._here()
                if name is not None and lost < count:
                    lose(name)
                    lost += 1
            thread.join()
            assert found[0].stdout == self._undisturbed[case], found[0].stderr
        return runs


@pytest.fixture(scope="module")
def runs(cluster, alice):
    return Runs(cluster, alice)


@pytest.fixture(scope="module")
def linked_runs(linked):
    carol = Tenant(linked.cluster, "carol")
    yield Runs(linked.cluster, carol)
    carol.control.close()


def kill(cluster, name):
    os.kill(int((cluster.keeper.pids / name).read_text()), signal.SIGKILL)


@pytest.mark.parametrize("case", CASES)
def test_twenty_five_kills_of_the_executor(runs, cluster, case):
    runs.disturb(case, 25, lambda name: kill(cluster, name), seed=25)


@pytest.mark.parametrize("case", CASES)
def test_five_kills_of_the_executor_through_a_tunnel(runs, cluster, case):
    runs.disturb(case, 5, lambda name: kill(cluster, name), seed=5, WOOLYAI_CHANNEL="tunnel")


@pytest.mark.parametrize("case", CASES)
def test_five_kills_of_the_executor_and_the_router(runs, cluster, case):
    def lose(name):
        kill(cluster, name)
        kill(cluster, "router")

    runs.disturb(case, 5, lose, seed=6)


@pytest.mark.parametrize("case", CASES)
def test_five_times_the_link_is_cut_for_ten_seconds(linked_runs, linked, case):
    def lose(name):
        linked.data[name].cut()
        time.sleep(10)
        linked.data[name].mend()

    linked_runs.disturb(case, 5, lose, seed=7)
