"""A sample of PyTorch's databases of operators, modules and optimizers on the device, compared with the CPU, and of what clients
announce, compared with CUDA's kernels.

The slow tests of `test_opinfo`, `test_modules`, `test_optimizers` and `test_announced` cover the complete databases.
"""

import json
import os
from pathlib import Path

import pytest
from wooly_testkit import forks
from wooly_testkit.executor import executor_process

pytestmark = pytest.mark.connected


@pytest.fixture(scope="module")
def sampled():
    """Rows by database. A crash of the program or the executor fails the tests."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with executor_process(start=forks.Forked) as running:
        argv = [running.endpoints[0], running.token]
        done = forks.run("sample", *argv, like="wooly", cwd=Path(__file__).parent, env=env, timeout=280)
        assert done.returncode == 0 and running.process.poll() is None, done.stderr
    found = {}
    for line in map(json.loads, done.stdout.splitlines()):
        if "database" in line:
            rows = found[line["database"]] = []
        elif "counts" in line:
            rows.append(line)
    return found


@pytest.mark.parametrize(
    ("database", "things", "kinds"), [("opinfo", 30, 15), ("modules", 15, 5), ("optimizers", 5, 8)]
)
def test_database_sample_equals_cpu(conformance, sampled, database, things, kinds):
    rows = sampled[database]
    assert len({row["op"] for row in rows}) > things
    assert len({(row["variant"], row["dtype"]) for row in rows}) > kinds
    conformance(database).assert_none_is_new(rows)


def test_announced_sample_equals_cuda(conformance, sampled):
    rows = sampled["announced"]
    assert len({row["op"] for row in rows}) > 10 and sum([row["counts"].get("pass", 0) for row in rows]) > 15
    conformance("announced").assert_none_is_new(rows)
