"""Runs the sections on both sides, compares them, and prints the table. `run.sh` prepares the machine and starts this script.

Exit status: 0, every case is as on CUDA or listed in `differences.txt`; 1, a case is not, or a listed difference no longer
happens; 2, the check could not run. The modules of `tests/conformance` must be on the path.
"""

import argparse
import contextlib
import fnmatch
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from cases import SECTIONS, VISIBLE
from records import read
from verdicts import COLUMNS, judge
from worker import AGAIN

HERE = Path(__file__).parent
LIST = HERE / "differences.txt"
SAMPLES = 3
#: Seconds without a finished case after which a process counts as hung.
PATIENCE_S = 180
_COUNTED = ("same", "close", "different", "unsupported")
_SHOWN = 200


@dataclass(frozen=True)
class Listed:
    """A line ``truth section:pattern outcome: reason`` of the list: a known difference and its reason.

    `truth` is cuda, cpu or any; `pattern` matches case names like a shell pattern. The list may only shrink.
    """

    truth: str
    section: str
    pattern: str
    outcome: str
    reason: str

    @classmethod
    def parse(cls, line):
        fields, _, reason = line.partition(": ")
        truth, _, rest = fields.partition(" ")
        where, _, outcome = rest.rpartition(" ")
        section, _, pattern = where.partition(":")
        if truth not in ("cuda", "cpu", "any") or section not in SECTIONS or not pattern or not reason.strip():
            raise ValueError(line)
        return cls(truth, section, pattern, outcome, reason.strip())

    def matches(self, truth, section, name, outcome):
        return (
            self.truth in (truth, "any")
            and (self.section, self.outcome) == (section, outcome)
            and fnmatch.fnmatchcase(name, self.pattern)
        )


def listed():
    """The lines of the list."""
    lines = [line for line in LIST.read_text().splitlines() if line and not line.startswith("#")]
    return [Listed.parse(line) for line in lines]


class Task:
    """One side of a section, or of a part of a section, until all its cases are finished."""

    def __init__(self, options, folder, section, side, part, parts):
        self._out = folder / f"{section}-{side}-{part}"
        self.section, self.side = section, side
        self.over = threading.Event()  # set: end the process, and start none
        self.log = self._out.with_suffix(".log")
        self._argv = [sys.executable, str(HERE / "worker.py"), side, section, "--truth", options.truth]
        self._argv += ["--out", str(self._out), "--samples", str(options.samples)]
        self._argv += ["--runtime", options.runtime]
        self._argv += ["--part", str(part), "--parts", str(parts)]
        self._argv += [word for pattern in options.only for word in ("--only", pattern)]
        self._environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        if side == "ours" or options.truth == "cpu":
            # A machine of Wooly's users has no GPU, so our side sees none.
            self._environment[VISIBLE] = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            self._environment["CUDA_VISIBLE_DEVICES"] = ""

    def results(self):
        return read(self._out.with_suffix(".records"))

    def run(self):
        """Start the process, and restart it after every crash, until all cases are finished.

        Raises:
            RuntimeError: the process ends without finishing a case.
        """
        died = ""
        while not self.over.is_set():
            before = len(self.results())
            status = self._once(died)
            if status == 0 or self.over.is_set():
                return
            died = "" if status == AGAIN else _ending(status)
            in_a_case = self._out.with_suffix(".current").exists()
            if status != AGAIN and (len(self.results()) == before and not in_a_case):
                raise RuntimeError(
                    f"{self.section} ({self.side}) ended before its first case, {died}:\n{self.log.read_text()[-4000:]}"
                )

    def _once(self, died):
        argv = [*self._argv, "--died", died] if died else self._argv
        with self.log.open("ab") as log:
            process = subprocess.Popen(argv, stdout=log, stderr=log, env=self._environment, process_group=0)
            try:
                return self._wait(process)
            finally:
                # A process that crashed leaves its executor, which keeps memory of the device.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _wait(self, process):
        """The exit status, or -1000 if one case takes too long or the check is over."""
        watched = self._out.with_suffix(".current")
        seen, since = None, time.monotonic()
        while process.poll() is None:
            time.sleep(0.1)
            now = watched.stat().st_mtime_ns if watched.exists() else None
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > PATIENCE_S:
                return -1000
            if self.over.is_set():
                return -1000
        return process.returncode


def _ending(status):
    if status == -1000:
        return f"no answer within {PATIENCE_S} s"
    return f"ended by signal {-status}" if status < 0 else f"ended with status {status}"


def run_sections(options, folder):
    """Run the tasks of every section."""
    tasks = []
    for section in options.sections:
        parts = max(1, options.jobs // 2) if SECTIONS[section] else 1
        tasks += [
            Task(options, folder, section, side, part, parts) for side in ("ours", "truth") for part in range(parts)
        ]
    with ThreadPoolExecutor(options.jobs) as pool:
        try:
            for done in [pool.submit(task.run) for task in tasks]:
                done.result()
        finally:  # after an error or Ctrl-C, the other tasks end, too
            for task in tasks:
                task.over.set()
    return tasks


def compare_section(section, tasks, options, lines):
    """The table's row and the differences of one section, from the results of its tasks."""
    sides = {"truth": {}, "ours": {}}
    for task in tasks:
        if task.section == section:
            sides[task.side] |= task.results()
    counts, worst, differences, excluded = Counter(), (0.0, ""), [], []
    names = sorted(sides["truth"].keys() | sides["ours"].keys())
    for name in names:
        verdict = judge(sides["truth"].get(name), sides["ours"].get(name))
        if verdict is None:
            excluded.append(name)
            continue
        counts[COLUMNS.get(verdict.outcome, "different")] += 1
        if verdict.outcome in ("same", "close"):
            worst = max(worst, (verdict.deviation, name))
            continue
        line = next((known for known in lines if known.matches(options.truth, section, name, verdict.outcome)), None)
        differences.append(
            {
                "section": section,
                "case": name,
                "outcome": verdict.outcome,
                "detail": verdict.detail,
                "reason": line.reason if line else None,
                "line": lines.index(line) if line else None,
            }
        )
    row = {"section": section, "cases": counts.total()} | {column: counts[column] for column in _COUNTED}
    row |= {"listed": sum(d["reason"] is not None for d in differences), "worst": worst[0], "worst_case": worst[1]}
    return row | {"excluded": excluded}, differences


def table(rows):
    """The table as text."""
    head = ("section", "cases", *_COUNTED, "listed", "worst deviation (1 = the tolerance)")
    body = [
        (r["section"], *(str(r[c]) for c in ("cases", *_COUNTED, "listed")), f"{r['worst']:.2g} {r['worst_case']}")
        for r in rows
    ]
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head) - 1)]
    lines = []
    for line in [head, *body]:
        first, *numbers = line[:-1]
        cells = [first.ljust(widths[0])] + [n.rjust(w) for n, w in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([*cells, line[-1]]).rstrip())
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", metavar="section", help=f"one of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--truth", choices=("cuda", "cpu"), default="cuda", help="cpu: try the check without a GPU")
    parser.add_argument(
        "--runtime", choices=("cpu", "cuda"), default="cpu", help="device on which our side computes; cuda: the GPU"
    )
    parser.add_argument("--json", type=Path, help="write rows and differences to this file")
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"per operator and dtype ({SAMPLES})")
    parser.add_argument(
        "--only", action="append", default=[], metavar="PATTERN", help="groups of cases, as `mm` or `nn.*`"
    )
    parser.add_argument("--jobs", type=int, default=max(2, (os.cpu_count() or 2) - 1), help="processes at a time")
    options = parser.parse_args()
    options.sections = options.sections or list(SECTIONS)
    unknown = set(options.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"unknown section {', '.join(sorted(unknown))}; choose from {', '.join(SECTIONS)}")
    lines = listed()
    if options.truth == "cuda" and not torch.cuda.is_available():
        print("torch sees no GPU; --truth cpu tries the check without one", file=sys.stderr)
        return 2
    truth = torch.cuda.get_device_name() if options.truth == "cuda" else "the CPU, and CUDA's known answers"
    print(f"torch {torch.__version__}, Python {platform.python_version()}; truth: {truth}", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="wooly-gpu-") as folder:
        try:
            tasks = run_sections(options, Path(folder))
        except RuntimeError as e:
            print(e, file=sys.stderr)
            return 2
        compared = [compare_section(section, tasks, options, lines) for section in options.sections]
    rows = [row for row, _ in compared]
    differences = [d for _, found in compared for d in found]
    status = report(options, rows, differences, lines)
    print(f"{time.monotonic() - started:.0f} s")
    if options.json:
        facts = {"torch": torch.__version__, "truth": truth, "rows": rows, "differences": differences}
        options.json.write_text(json.dumps(facts, indent=1))
    return status


def report(options, rows, differences, lines):
    """Print rows and differences. Returns the exit status."""
    print("\n" + table(rows))
    new = [d for d in differences if d["reason"] is None]
    for d in new[:_SHOWN]:
        print(f"{d['section']}:{d['case']} {d['outcome']}: {d['detail']}")
    if len(new) > _SHOWN:
        print(f"… and {len(new) - _SHOWN} more (--json has them all)")
    seen = Counter(d["line"] for d in differences if d["line"] is not None)
    for line, count in sorted(seen.items()):
        print(
            f"listed: {count} × {lines[line].section}:{lines[line].pattern} {lines[line].outcome}: {lines[line].reason}"
        )
    excluded = sum(len(r["excluded"]) for r in rows)
    if excluded:
        print(f"left out: {excluded} cases that end the program on CUDA with a device-side assert")
    gone = []
    # the list is for an executor that computes on the CPU: on a GPU, fewer cases may differ
    if not options.only and options.samples >= SAMPLES and options.runtime == "cpu":
        gone = [
            line
            for n, line in enumerate(lines)
            if line.truth in (options.truth, "any") and line.section in options.sections and not seen[n]
        ]
    for line in gone:
        print(
            f"listed, but no longer happens: {line.truth} {line.section}:{line.pattern} {line.outcome}: remove it from the list"
        )
    empty = [r["section"] for r in rows if not r["cases"]]
    if empty:
        print(f"no case ran in {', '.join(empty)}")
    wrong = bool(new or gone or empty)
    print("DIFFERENT" if wrong else "as CUDA")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
