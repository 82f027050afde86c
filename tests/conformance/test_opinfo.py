"""PyTorch's operator database on the device, against the CPU; what does not pass is listed in `opinfo_failures.txt`.

The list may only shrink. It has one line per operator and outcome: `close` (within PyTorch's tolerance, not bit for bit),
`wrong`, `unsupported`, `error`, or `crash`. An operator whose results on the CPU differ from run to run is none of these: it
`varies`.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LIST = HERE / "opinfo_failures.txt"
FINE = ("pass", "skip", "varies")
WORKERS = 2
#: The part of the database that `make test` sees: the first samples of every sixth operator.
EVERY, FIRST_SAMPLES = 6, 4

pytestmark = pytest.mark.connected


def listed():
    """(operator, outcome) of every line of the list."""
    lines = LIST.read_text().splitlines()
    assert lines == sorted(set(lines)), f"{LIST.name} must be sorted, without repetitions"
    return {tuple(line.split(" ")) for line in lines}


def sweep(*options, start=0, step=1):
    """The rows that the program prints for every `step`-th operator; a process that dies is a `crash` of its operator."""
    rows = []
    while True:
        argv = [str(HERE / "opinfo.py"), "--start", str(start), "--step", str(step), *map(str, options)]
        process = subprocess.run(
            [sys.executable, *argv], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        found = [json.loads(line) for line in process.stdout.splitlines()]
        rows += [row for row in found if row["outcome"] != "start"]
        if process.returncode == 0:
            return rows
        started = [row for row in found if row["outcome"] == "start"]
        assert started, process.stderr
        rows.append({"op": started[-1]["op"], "outcome": "crash", "detail": process.stderr[-500:]})
        start = started[-1]["index"] + step


def failures(rows):
    """(operator, outcome) of everything that does not pass, with one sample's detail."""
    return {(row["op"], row["outcome"]): row["detail"] for row in rows if row["outcome"] not in FINE}


def assert_none_is_new(rows):
    known = listed()
    new = sorted(
        f"{op} {outcome}: {why}" for (op, outcome), why in failures(rows).items() if (op, outcome) not in known
    )
    assert new == [], "fails and is not listed"


def assert_all_listed_fail(rows):
    found = failures(rows)
    passing = sorted(" ".join(line) for line in listed() if line not in found)
    assert passing == [], f"passes: remove this line from {LIST.name}"


def test_every_sixth_operator_equals_the_cpu():
    rows = sweep("--samples", FIRST_SAMPLES, start=1, step=EVERY)
    assert len({row["op"] for row in rows}) > 80
    assert_none_is_new(rows)


def test_listed_operators_still_fail():
    known = listed()
    rows = sweep("--samples", 1000, *[part for op in sorted({op for op, _ in known}) for part in ("--only", op)])
    assert {row["op"] for row in rows} == {op for op, _ in known}
    assert_all_listed_fail(rows)
    assert_none_is_new(rows)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_whole_database_equals_the_cpu(capsys):
    with ThreadPoolExecutor(WORKERS) as pool:
        parts = pool.map(lambda start: sweep("--samples", 100_000, start=start, step=WORKERS), range(WORKERS))
        rows = [row for part in parts for row in part]
    counts = Counter(row["outcome"] for row in rows)
    with capsys.disabled():
        print(
            f"\noperator database: {len(rows)} samples of {len({row['op'] for row in rows})} operators, {dict(counts)}"
        )
    assert len(rows) > 10_000
    assert counts["crash"] == 0
    assert counts["pass"] >= 0.98 * (len(rows) - counts["skip"])
    assert_none_is_new(rows)
    assert_all_listed_fail(rows)
