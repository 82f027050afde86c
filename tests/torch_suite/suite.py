"""PyTorch's own device tests on "cuda" under Wooly and on the CPU: `make torch-suite`.

A test that does not pass on "cuda" runs on the CPU, too; if it passes there, or has no twin there, it fails on the device alone.
Each of these needs a line ``file class.test outcome: reason`` in `exceptions.txt`, which may only shrink: the status is 0 only if
all that fails alone is listed and nothing listed passes. Outcomes: `wrong` (numbers differ), `fail`, `crash` (the process, the
executor or the session ended) and `hang` (no end within the time limit).
"""

import argparse
import contextlib
import json
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

HERE = Path(__file__).parent
LISTED = HERE / "exceptions.txt"
OUTCOMES = ("wrong", "fail", "crash", "hang")
#: Seconds in which a process must import its file and start its executor. OpInfo's database takes a minute on a busy machine.
START_LIMIT = 600
#: Processes of one file that may end before their first test starts.
BARREN_LIMIT = 1
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
    """The CPU's name of a test: `TestXCUDA.test_y_cuda_float32` is `TestXCPU.test_y_cpu_float32` there."""
    group, _, name = test.partition(".")
    return f"{re.sub('CUDA$', 'CPU', group)}.{re.sub('_cuda(?=_|$)', '_cpu', name)}"


class Outcomes:
    """A file that keeps the outcome of every test at once, one JSON line each. A later run takes them over.

    Args:
        path: the file; None: nothing is kept.
    """

    def __init__(self, path=None):
        self._path, self._lock = path, threading.Lock()
        self._known = {}
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        for line in lines:
            with contextlib.suppress(json.JSONDecodeError):  # the last line of a run that was killed
                found = json.loads(line)
                side = self._known.setdefault((found["file"], found["side"]), {})
                side[found["test"]] = (found["outcome"], found["detail"])

    def of(self, name, side):
        """The known outcomes of a file on one side: test → (outcome, detail)."""
        return dict(self._known.get((name, side), {}))

    def keep(self, name, side, test, outcome, detail):
        """Keep one outcome. Any thread may call this."""
        if self._path is None:
            return
        line = {"file": name, "side": side, "test": test, "outcome": outcome, "detail": detail}
        with self._lock, self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def rows_of(path, side, *, keyword="", only=None, every=1, limit=60.0, progress=lambda *outcome: None, known=None):
    """Run the tests of one file on one side, in as many processes as crashes and hangs require.

    Args:
        path: the test file.
        side: "cuda" or "cpu".
        keyword: part of the names of the tests to run.
        only: names of the tests to run; None: all.
        every: run only each Nth of these tests.
        limit: seconds per test.
        progress: called with each test's name, outcome and detail.
        known: test → (outcome, detail) of tests that are not run again.

    Returns:
        test → (outcome, detail). The key "" stands for the file itself, if it did not load.
    """
    done = dict(known or {})
    done.pop("", None)
    barren = 0
    while True:
        before = len(done)
        finished = _process(path, side, keyword, only, every, limit, done, progress)
        if finished:
            return done
        if len(done) == before:
            barren += 1
        if barren > BARREN_LIMIT:
            return done


def _process(path, side, keyword, only, every, limit, done, progress):
    """One process. Adds to `done`; returns whether all chosen tests are in it, or none can be run."""
    with tempfile.TemporaryDirectory(prefix="wooly-torch-suite-") as folder:
        without = Path(folder, "without")
        without.write_text("\n".join(done))
        reader, writer = os.pipe()
        argv = [sys.executable, str(HERE / "one_file.py"), str(path), "--side", side, "--out", str(writer)]
        argv += ["--keyword", keyword, "--without", str(without), "--every", str(every)]
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
    running, rest, ended = None, b"", False
    deadline = time.monotonic() + START_LIMIT

    def note(test, outcome, detail):
        done[test] = (outcome, detail)
        progress(test, outcome, detail)

    while True:
        if not selector.select(max(0.0, deadline - time.monotonic())):
            note(running or "", "hang", f"no end within {limit if running else START_LIMIT:.0f} s")
            return running is None
        piece = os.read(reader, 1 << 16)
        if not piece:
            break
        *lines, rest = (rest + piece).split(b"\n")
        for line in map(json.loads, lines):
            ended = ended or "end" in line
            if "start" in line:
                running, deadline = line["test"], time.monotonic() + limit
            elif "outcome" in line:
                note(line["test"], line["outcome"], line["detail"])
                running, deadline = None, time.monotonic() + START_LIMIT
            elif "group" in line:
                note(line["group"].replace(" ", "_"), "fail", line["detail"])
    status = process.wait()
    if ended:
        return True
    tail = " ".join(log.read_text(errors="replace")[-400:].split())
    note(running or "", "crash", f"status {status}: {tail}")
    return running is None


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
    new = {test: found for test, found in failing.items() if (name, test, found[0]) not in known}
    ran = {unit for unit in known if unit[0] == name and unit[1] in device}
    return new, {unit for unit in ran if failing.get(unit[1], ("pass", ""))[0] != unit[2]}


def check(path, known, keyword, every, limit, root, outcomes):
    """Both sides of a file."""
    name = str(path.relative_to(root))

    def on(side):
        def progress(test, outcome, detail):
            outcomes.keep(name, side, test, outcome, detail)
            if side == "cuda" and outcome not in ("pass", "skip"):
                print(f"  {name} {test} {outcome}", file=sys.stderr, flush=True)

        return {"limit": limit, "progress": progress, "known": outcomes.of(name, side)}

    device = rows_of(path, "cuda", keyword=keyword, every=every, **on("cuda"))
    twins = sorted({twin(test) for test, (outcome, _) in device.items() if outcome in OUTCOMES and test})
    host = rows_of(path, "cpu", only=twins, **on("cpu")) if twins else {}
    failing = alone(device, host)
    new, passing = judge(name, device, failing, known)
    counts = Counter(outcome for outcome, _ in device.values())
    both = sum(counts[outcome] for outcome in OUTCOMES) - len(failing)
    found = Counter(outcome for outcome, _ in failing.values())
    return {
        "file": name,
        "pass": counts["pass"],
        "skip": counts["skip"],
        "both": both,
        **{outcome: found[outcome] for outcome in OUTCOMES},
        "alone": {test: list(why) for test, why in sorted(failing.items())},
        "new": sorted(new),
        "passing": sorted(f"{test} {outcome}" for _, test, outcome in passing),
    }


def files_of(root):
    """The test files below `root` that make device tests."""
    tests = sorted({*root.glob("test_*.py"), *root.glob("nn/test_*.py"), *root.glob("autograd/test_*.py")})
    return [p for p in tests if "instantiate_device_type_tests" in p.read_text() or p.name == "test_cuda.py"]


def main(argv=None):
    parser = argparse.ArgumentParser(
        description="PyTorch's own device tests on both sides", prog="make torch-suite SUITE=…"
    )
    parser.add_argument("files", nargs="*", help="names of test files; without: all")
    parser.add_argument(
        "-k", dest="keyword", default="", help="only tests with this in their name; * and ? are wildcards"
    )
    parser.add_argument("--every", type=int, default=1, help="run only each Nth of these tests, for a sample")
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
    good = True
    with ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(
            lambda p: check(p, known, options.keyword, options.every, options.limit, root, outcomes), paths
        ):
            good = good and not row["new"] and not row["passing"]
            if options.json:
                print(json.dumps(row), flush=True)
                continue
            print(f"{row['file']:36}" + "".join(f"{row[c]:8}" for c in columns), flush=True)
            for test in row["new"]:
                outcome, detail = row["alone"][test]
                print(f"    not listed: {row['file']} {test} {outcome}: {detail}")
            for unit in row["passing"]:
                print(f"    no longer so, remove the line: {row['file']} {unit}")
    return 0 if good else 1


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _interrupted)
    signal.signal(signal.SIGTERM, _interrupted)
    sys.exit(main())
