"""Runs the conformance programs and compares their results with the lists of exceptions."""

import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import pytest
from wooly_testkit.forks import OTHER_PYTHON

HERE = Path(__file__).parent
FINE = ("pass", "skip", "varies")
#: Operators that a later release of PyTorch has, and that executors do not offer yet.
NOT_OFFERED = "the executor does not offer this operator"
#: The executor's PyTorch is another one than the client's, with which results are compared: last bits may differ.
MIXED = OTHER_PYTHON in os.environ
OTHER_RELEASE = version("torch").partition("+")[0] != "2.13.0"


class Conformance:
    """One program and its list of exceptions.

    The list has a line ``name variant dtype outcome: reason`` for everything that does not pass; `comparison` defines the
    outcomes. The list may only shrink: a failure that is not listed is an error, and so is a listed line that passes.

    Args:
        name: name of the program, without ``.py``.
    """

    def __init__(self, name):
        self._program = HERE / f"{name}.py"
        self._list = HERE / f"{name}_exceptions.txt"

    def listed(self):
        """(name, variant, dtype, outcome) of every line."""
        lines = self._list.read_text().splitlines()
        assert lines == sorted(set(lines)), f"{self._list.name} must be sorted, without repetitions"
        found = set()
        for line in lines:
            unit, _, reason = line.partition(": ")
            fields = unit.split(" ")
            assert len(fields) == 4 and reason.strip(), (
                f"{self._list.name}: {line!r} is not `name variant dtype outcome: reason`"
            )
            found.add(tuple(fields))
        assert len(found) == len(lines)
        return found

    def sweep(self, workers):
        """The rows that the program prints. `workers` processes share the work.

        If a process dies, its current unit counts as `crash`, and another process continues after it.
        """
        with ThreadPoolExecutor(workers) as pool:
            found = pool.map(lambda n: self._rows(n, workers), range(workers))
            return [row for rows in found for row in rows]

    def _rows(self, part, parts):
        rows, first = [], 0
        while True:
            argv = [str(self._program), "--part", str(part), "--parts", str(parts), "--first", str(first)]
            process = subprocess.run(
                [sys.executable, *argv],
                capture_output=True,
                text=True,
                # Some samples of PyTorch's databases come from sets of words: the hash seed sets their order.
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
            )
            found = [json.loads(line) for line in process.stdout.splitlines()]
            rows += [row for row in found if "counts" in row]
            if process.returncode == 0:
                return rows
            started = [row for row in found if "counts" not in row]
            assert started, process.stderr
            last = started[-1]
            rows.append(last | {"counts": {"crash": 1}, "details": {"crash": process.stderr[-500:]}})
            first = last["unit"] + 1

    def assert_none_is_new(self, rows):
        known = self.listed()
        found = {
            unit: why
            for unit, why in failures(rows).items()
            if not (OTHER_RELEASE and NOT_OFFERED in why) and not (MIXED and unit[3] == "close")
        }
        new = sorted(f"{' '.join(unit)}: {why}" for unit, why in found.items() if unit not in known)
        assert not new, f"fails and is not in {self._list.name}:\n" + "\n".join(new)

    def assert_all_listed_fail(self, rows):
        found = failures(rows)
        passing = sorted(" ".join(unit) for unit in self.listed() if unit not in found)
        assert not passing, f"passes: remove this line from {self._list.name}:\n" + "\n".join(passing)


def failures(rows):
    """(name, variant, dtype, outcome) of everything that does not pass, each with the detail of one sample."""
    return {
        (row["op"].replace(" ", "_"), row["variant"], row["dtype"], outcome): row["details"].get(outcome, "")
        for row in rows
        for outcome in row["counts"]
        if outcome not in FINE
    }


def counts(rows, *keys):
    """Numbers of samples by outcome, for each combination of some keys of the rows."""
    found = {}
    for row in rows:
        found.setdefault(tuple(row[k] for k in keys), Counter()).update(row["counts"])
    return found


def table(rows, *keys):
    """`counts` as printable lines."""
    return "\n".join(f"  {' '.join(k):24} {dict(v)}" for k, v in sorted(counts(rows, *keys).items()))


@pytest.fixture
def conformance():
    """Makes a `Conformance` for a program name."""
    return Conformance


@pytest.fixture
def report(capsys):
    """Prints counts in spite of pytest's capture, and returns the total by outcome."""

    def show(title, rows):
        total = counts(rows).get((), Counter())
        with capsys.disabled():
            print(f"\n{title}: {total.total()} samples of {len({row['op'] for row in rows})}, {dict(total)}")
            print(table(rows, "dtype"))
            print(table(rows, "variant"))
        return total

    return show
