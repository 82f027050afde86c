"""PyTorch's own device tests on "cuda" under Wooly and on the CPU: `make torch-suite`.

A test that does not pass on "cuda" runs on the CPU, too; if it passes there, or has no twin there, it fails on the device alone.
Each of these needs a line ``file class.test outcome: reason`` in `exceptions.txt`, which may only shrink: the status is 0 only if
all that fails alone is listed and nothing listed passes. A line whose test has a `*` lists a family, of which some may pass.
Outcomes: `wrong` (numbers differ), `fail`, `crash` (the process, the executor or the session ended) and `hang` (no end within the
time limit).

``--sample PART --seed N`` runs a random sample: every test of every file is drawn with the same probability, by a hash of seed,
file and test. So a larger sample contains the smaller one, and with ``--outcomes`` only the added tests run. The last line has
the rate of tests that pass, of those that pass on the CPU or have no twin there, and its confidence interval.
"""

import argparse
import contextlib
import fnmatch
import json
import math
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from one_file import Choice, add_choice, choice_of

HERE = Path(__file__).parent
LISTED = HERE / "exceptions.txt"
OUTCOMES = ("wrong", "fail", "crash", "hang")
#: Seconds in which a process must import its file and start its executor. OpInfo's database takes a minute on a busy machine.
START_LIMIT = 600
#: Processes of one file that may end before their first test starts.
BARREN_LIMIT = 1
#: Half the width of the 95 % confidence interval of a normal distribution, in standard deviations.
DEVIATIONS = 1.96
ALL = Choice()
#: Leaders of the process groups that run now, so that an interrupt ends them.
_running: set[int] = set()


def listed(path):
    """The (file, test, outcome) of every line.

    Raises:
        ValueError: a line has another form, or the lines are not sorted.
    """
    lines = path.read_text().splitlines()
    if lines != sorted(set(lines)):
        raise ValueError(f"{path.name} must be sorted, without repetitions")
    found = set()
    for line in lines:
        unit, _, reason = line.partition(": ")
        fields = unit.split(" ")
        if len(fields) != 3 or fields[2] not in OUTCOMES or not reason.strip():
            raise ValueError(f"{path.name}: {line!r} is not `file class.test outcome: reason`")
        found.add(tuple(fields))
    return found


def twin(test):
    """The CPU's name of a test: `TestXCUDA.test_y_cuda_float32` is `TestXCPU.test_y_cpu_float32` there; "" is the file itself."""
    if not test:
        return test
    group, _, name = test.partition(".")
    return f"{re.sub('CUDA$', 'CPU', group)}.{re.sub('_cuda(?=_|$)', '_cpu', name)}"


class Outcomes:
    """A file that keeps the outcome of every test at once, one JSON line each. A later run takes them over.

    Args:
        path: the file; None: nothing is kept.
    """

    def __init__(self, path=None):
        self._path, self._lock = path, threading.Lock()
        self._known, self._found = {}, {}
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        for line in lines:
            with contextlib.suppress(json.JSONDecodeError):  # the last line of a run that was killed
                found = json.loads(line)
                if "choice" in found:
                    self._found[found["file"], found["side"], found["choice"]] = found["found"]
                    continue
                side = self._known.setdefault((found["file"], found["side"]), {})
                side[found["test"]] = (found["outcome"], found["detail"])

    def of(self, name, side):
        """The known outcomes of a file on one side: test → (outcome, detail)."""
        return dict(self._known.get((name, side), {}))

    def keep(self, name, side, test, outcome, detail):
        """Keep one outcome. Any thread may call this."""
        if self._path is None:
            return
        self._write({"file": name, "side": side, "test": test, "outcome": outcome, "detail": detail})

    def found(self, name, side, choice):
        """The number of tests from which a choice was drawn, if all tests of this choice have an outcome. Else None."""
        return self._found.get((name, side, choice))

    def complete(self, name, side, choice, found):
        """Keep that all tests of a choice have an outcome. Any thread may call this."""
        self._found[name, side, choice] = found
        if self._path is not None:
            self._write({"file": name, "side": side, "choice": choice, "found": found})

    def _write(self, line):
        with self._lock, self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def rows_of(path, side, choice=ALL, *, only=None, limit=60.0, progress=lambda *outcome: None, known=None):
    """Run the tests of one file on one side, in as many processes as crashes and hangs require.

    Args:
        path: the test file.
        side: "cuda" or "cpu".
        choice: which tests of the file run.
        only: names of the tests to run; None: all.
        limit: seconds per test.
        progress: called with each test's name, outcome and detail.
        known: test → (outcome, detail) of tests that are not run again.

    Returns:
        test → (outcome, detail), and the number of tests from which the sample was drawn; None if some tests did not run. The
        key "" stands for the file itself, if it did not load.
    """
    done = dict(known or {})
    done.pop("", None)
    barren = 0
    while True:
        before = len(done)
        finished, found = _process(path, side, choice, only, limit, done, progress)
        if finished:
            return done, found
        if len(done) == before:
            barren += 1
        if barren > BARREN_LIMIT:
            return done, None


def _process(path, side, choice, only, limit, done, progress):
    """One process. Adds to `done`; returns whether nothing is left to run, and the number of tests found."""
    with tempfile.TemporaryDirectory(prefix="wooly-torch-suite-") as folder:
        without = Path(folder, "without")
        without.write_text("\n".join(done))
        reader, writer = os.pipe()
        argv = [sys.executable, str(HERE / "one_file.py"), str(path), "--side", side, "--out", str(writer)]
        argv += [*choice.arguments, "--without", str(without)]
        if only is not None:
            chosen = Path(folder, "only")
            chosen.write_text("\n".join(only))
            argv += ["--only", str(chosen)]
        log = Path(folder, "log")
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": folder}
        with log.open("wb") as said:
            process = subprocess.Popen(
                argv, stdout=said, stderr=said, pass_fds=[writer], start_new_session=True, cwd=folder, env=environment
            )
        os.close(writer)
        _running.add(process.pid)
        try:
            return _follow(reader, process, log, limit, done, progress)
        finally:
            os.close(reader)
            _end(process.pid)
            _running.discard(process.pid)
            process.wait()


def _end(leader):
    """Kill a process and its executor."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _interrupted(number, frame):
    """Leave no process behind."""
    for leader in list(_running):
        _end(leader)
    os._exit(128 + number)


def _follow(reader, process, log, limit, done, progress):
    selector = selectors.DefaultSelector()
    selector.register(reader, selectors.EVENT_READ)
    running, rest, ended, found = None, b"", False, None
    deadline = time.monotonic() + START_LIMIT

    def note(test, outcome, detail):
        done[test] = (outcome, detail)
        progress(test, outcome, detail)

    while True:
        if not selector.select(max(0.0, deadline - time.monotonic())):
            note(running or "", "hang", f"no end within {limit if running else START_LIMIT:.0f} s")
            return running is None, None
        piece = os.read(reader, 1 << 16)
        if not piece:
            break
        *lines, rest = (rest + piece).split(b"\n")
        for line in map(json.loads, lines):
            if "end" in line:
                ended, found = True, line["found"]
            elif "start" in line:
                running, deadline = line["test"], time.monotonic() + limit
            elif "outcome" in line:
                note(line["test"], line["outcome"], line["detail"])
                running, deadline = None, time.monotonic() + START_LIMIT
            elif "group" in line:
                note(line["group"].replace(" ", "_"), "fail", line["detail"])
    status = process.wait()
    if ended:
        return True, found
    tail = " ".join(log.read_text(errors="replace")[-400:].split())
    note(running or "", "crash", f"status {status}: {tail}")
    return running is None, None


def alone(device, host):
    """The tests that fail on the device alone, with outcome and detail.

    Args:
        device, host: test → (outcome, detail) of both sides. `host` has the twins of the device's failures.
    """
    failing = {}
    for test, (outcome, detail) in device.items():
        if outcome in OUTCOMES and host.get(twin(test), ("skip", ""))[0] in ("pass", "skip"):
            failing[test] = (outcome, detail)
    return failing


def judge(name, device, failing, known):
    """The tests that fail alone and are not listed, and the lines of the list whose test now ends otherwise."""
    units = {unit for unit in known if unit[0] == name}
    families = [(family, outcome) for _, family, outcome in units if "*" in family]

    def is_listed(test, outcome):
        return (name, test, outcome) in units or any(o == outcome and fnmatch.fnmatchcase(test, f) for f, o in families)

    new = {test: found for test, found in failing.items() if not is_listed(test, found[0])}
    ran = {unit for unit in units if unit[1] in device}
    return new, {unit for unit in ran if failing.get(unit[1], ("pass", ""))[0] != unit[2]}


def check(path, known, choice, limit, root, outcomes):
    """Both sides of a file."""
    name = str(path.relative_to(root))

    def rows(side, choice, only=None):
        def progress(test, outcome, detail):
            outcomes.keep(name, side, test, outcome, detail)
            if side == "cuda" and outcome not in ("pass", "skip"):
                print(f"  {name} {test} {outcome}", file=sys.stderr, flush=True)

        before = outcomes.of(name, side)
        if only is not None:
            before = {test: found for test, found in before.items() if test in only}
            if len(before) == len(only):
                return before, len(only)
        found = outcomes.found(name, side, str(choice)) if only is None else None
        if found is not None:
            before.pop("", None)  # the file loaded in a later run
        else:
            before, found = rows_of(path, side, choice, only=only, limit=limit, progress=progress, known=before)
            if found is not None and only is None:
                outcomes.complete(name, side, str(choice), found)
        return before, found

    device, total = rows("cuda", choice)
    device = {
        test: found
        for test, found in device.items()
        if not test or (choice.is_meant(test) and choice.is_drawn(path.name, test))
    }
    host, _ = rows("cpu", ALL, {twin(test) for test, (outcome, _) in device.items() if outcome in OUTCOMES})
    failing = alone(device, host)
    new, passing = judge(name, device, failing, known)
    counts = Counter(outcome for outcome, _ in device.values())
    both = sum([counts[outcome] for outcome in OUTCOMES]) - len(failing)
    found = Counter(outcome for outcome, _ in failing.values())
    return {
        "file": name,
        "tests": total,
        "pass": counts["pass"],
        "skip": counts["skip"],
        "both": both,
        **{outcome: found[outcome] for outcome in OUTCOMES},
        "alone": {test: list(why) for test, why in sorted(failing.items())},
        "new": sorted(new),
        "passing": sorted([f"{test} {outcome}" for _, test, outcome in passing]),
    }


def rate(passed, ran):
    """The part of tests that pass, and the ends of its 95 % confidence interval by Wilson's formula.

    Raises:
        ZeroDivisionError: no test ran.
    """
    part, spread = passed / ran, DEVIATIONS**2 / ran
    middle = (part + spread / 2) / (1 + spread)
    half = DEVIATIONS / (1 + spread) * math.sqrt(part * (1 - part) / ran + spread / (4 * ran))
    return part, max(0.0, middle - half), min(1.0, middle + half)


def summary(rows):
    """All files together: the counts of their tests, and the rate of those that pass on the device."""
    sums = {column: sum([row[column] for row in rows]) for column in ("pass", "skip", "both", *OUTCOMES)}
    sums["listed"] = sum([len(row["alone"]) - len(row["new"]) for row in rows])
    sums["tests"] = sum([row["tests"] for row in rows]) if all(row["tests"] is not None for row in rows) else None
    ran = sums["pass"] + sum([sums[outcome] for outcome in OUTCOMES])
    return {"files": len(rows), **sums, "rate": rate(sums["pass"], ran) if ran else None}


def described(total):
    """The summary in words."""
    if total["rate"] is None:
        return "No test ran that passes on the CPU or has no twin there."
    part, low, high = total["rate"]
    ran = total["pass"] + sum([total[outcome] for outcome in OUTCOMES])
    drawn = f", drawn of {total['tests']}" if total["tests"] is not None else ""
    return (
        f"{total['pass']} of {ran} tests pass on the device: {part:.2%} "
        f"(95 % confidence interval {low:.2%} to {high:.2%}){drawn}. {total['listed']} of those that fail are listed. "
        f"Not counted: {total['skip']} skipped, {total['both']} fail on both sides."
    )


def files_of(root):
    """The test files below `root` that make device tests."""
    tests = sorted({*root.glob("test_*.py"), *root.glob("nn/test_*.py"), *root.glob("autograd/test_*.py")})
    return [p for p in tests if "instantiate_device_type_tests" in p.read_text() or p.name == "test_cuda.py"]


def main(argv=None):
    parser = argparse.ArgumentParser(
        description="PyTorch's own device tests on both sides", prog="make torch-suite SUITE=…"
    )
    parser.add_argument("files", nargs="*", help="names of test files; without: all")
    add_choice(parser)
    parser.add_argument(
        "--root", type=Path, default=HERE.parents[1] / ".torch-suite" / "test", help="folder of the tests"
    )
    parser.add_argument("--list", type=Path, default=LISTED, help="the list of exceptions")
    parser.add_argument("--jobs", type=int, default=1, help="files at a time")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds per test")
    parser.add_argument(
        "--outcomes",
        type=Path,
        help="a file that keeps each outcome at once; tests whose outcome it has are not run again",
    )
    parser.add_argument("--json", action="store_true", help="a JSON line per file instead of the table")
    options = parser.parse_args(argv)
    root = options.root.resolve()
    paths = [root / name for name in options.files] or files_of(root)
    missing = [str(p) for p in paths if not p.is_file()]
    if missing:
        parser.error(f"no such test file: {', '.join(missing)}")
    known, outcomes = listed(options.list), Outcomes(options.outcomes)
    columns = ("pass", "skip", "both", *OUTCOMES)
    if not options.json:
        print(f"{'file':36}" + "".join(f"{c:>8}" for c in columns), flush=True)
    choice, rows = choice_of(options), []
    with ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(lambda p: check(p, known, choice, options.limit, root, outcomes), paths):
            rows.append(row)
            if options.json:
                print(json.dumps(row), flush=True)
                continue
            print(f"{row['file']:36}" + "".join([f"{row[c]:8}" for c in columns]), flush=True)
            for test in row["new"]:
                outcome, detail = row["alone"][test]
                print(f"    not listed: {row['file']} {test} {outcome}: {detail}")
            for unit in row["passing"]:
                print(f"    no longer so, remove the line: {row['file']} {unit}")
    total = summary(rows)
    print(json.dumps(total) if options.json else described(total))
    good = not any(row["new"] or row["passing"] for row in rows)
    return 0 if good else 1


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _interrupted)
    signal.signal(signal.SIGTERM, _interrupted)
    sys.exit(main())
