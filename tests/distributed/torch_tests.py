"""Runs PyTorch's own distributed tests on "cuda" and counts them: what `tests/torch_suite` does for device tests.

PyTorch starts the ranks of each test anew. Here, the ranks of a file are started once and run all of its tests, so an executor
carries many groups one after the other. A test passes if it passes in each of its ranks. Tests of PyTorch 2.6 run with the
installed PyTorch, so some fail because of the release.

Run: .venv/bin/python tests/distributed/torch_tests.py SUITE FILE... [--ranks 4] [--executors 2] [--json]
SUITE is the folder of `tests/torch_suite/fetch.sh`; a FILE is a path below its `test/distributed`.
"""

import argparse
import contextlib
import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
#: Seconds for which a test may run in all ranks, and in which the ranks must have imported the file.
TEST_S, START_S = 60, 200
#: Reason of a skip in a process that is no rank of the test, because the test has fewer ranks.
SPARE = "this process is no rank of the test"
ORDER = ("hang", "fail", "pass", "skip")


# -- in a rank -----------------------------------------------------------------------------------------------------------


class Loader(importlib.machinery.SourceFileLoader):
    """Loads a test file in the form that the installed PyTorch expects."""

    def get_data(self, path):
        import shims

        source = super().get_data(path)
        return shims.current(source.decode()).encode() if str(path).endswith(".py") else source

    def path_stats(self, path):
        raise OSError("no cached bytecode")


def adapt(rank, size, folder):
    """Let PyTorch's test classes run in the ranks that exist, instead of starting processes."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal import common_distributed, common_fsdp

    def enter(test):
        if rank >= int(test.world_size):
            raise unittest.SkipTest(SPARE)
        if int(test.world_size) > size:
            raise unittest.SkipTest(f"the test needs {test.world_size} ranks")

    def init(test):
        torch.cuda.set_device(rank)
        where = f"file://{folder}/{test.id()}"
        dist.init_process_group("nccl", init_method=where, rank=rank, world_size=int(test.world_size))

    processes = common_distributed.MultiProcessTestCase

    def set_up(self):
        super(processes, self).setUp()
        self.special_return_code_checks, self.skip_return_code_checks = {}, []
        self.processes, self.pid_to_pipe = [], {}
        self.rank, self.file_name = rank, f"{folder}/{self.id()}"
        enter(self)

    processes.setUp, processes._spawn_processes = set_up, lambda self: None
    fsdp = common_fsdp.FSDPTest
    fsdp.setUp = lambda self: (processes.setUp(self), init(self))

    class Continuous(common_distributed.TestCase):
        """Stands for the class whose tests share one process group."""

        world_size, MAIN_PROCESS_RANK = size, -1

        def setUp(self):
            super().setUp()
            type(self).rank = rank
            enter(self)
            init(self)
            self.pg = dist.distributed_c10d._get_default_group()

    common_distributed.MultiProcContinousTest = common_distributed.MultiProcContinuousTest = Continuous

    def leave(code=0):
        raise unittest.SkipTest(f"exit status {code}")

    sys.exit = leave


class Lines(unittest.TestResult):
    """Writes a line per test."""

    def __init__(self, out):
        super().__init__()
        self._out = out

    def write(self, **line):
        print(json.dumps(line), file=self._out, flush=True)

    def startTest(self, test):
        super().startTest(test)
        self.outcome, self.detail = "pass", ""
        self.write(test=test.id(), start=True)

    def stopTest(self, test):
        super().stopTest(test)
        self.write(test=test.id(), outcome=self.outcome, detail=self.detail)

    def addSkip(self, test, reason):
        self.outcome, self.detail = "skip", reason[:200]

    def addError(self, test, err):
        self.outcome, self.detail = "fail", f"{err[0].__name__}: {err[1]}"[:400]

    addFailure = addError


def flat(suite):
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from flat(test)
        else:
            yield test


def rank_main(file, out, done):
    from datetime import timedelta

    import torch.distributed as dist

    sys.path[:0] = [str(HERE.parent / "torch_suite"), str(file.parent), str(file.parents[1])]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    adapt(rank, size, os.environ["TESTS_FOLDER"])
    import shims

    shims.rename(file.read_text())
    spec = importlib.util.spec_from_file_location(file.stem, file, loader=Loader(file.stem, str(file)))
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    with out.open("a") as lines:
        result = Lines(lines)
        try:
            spec.loader.exec_module(module)
        except BaseException as e:
            result.write(test=file.stem, outcome="fail", detail=f"{type(e).__name__}: {e}"[:400])
            result.write(end=True)
            os._exit(0)
        tests = [t for t in flat(unittest.defaultTestLoader.loadTestsFromModule(module)) if t.id() not in done]
        for number, test in enumerate(tests):
            store.add(f"at {number}", 1)
            while store.add(f"at {number}", 0) < size:
                time.sleep(0.002)
            test.run(result)
            if dist.is_initialized():
                with contextlib.suppress(Exception):
                    dist.destroy_process_group()
        result.write(end=True)
        store.set_timeout(timedelta(seconds=1))
    os._exit(0)


# -- the counting process ------------------------------------------------------------------------------------------------


def run_file(file, urls, ranks, folder):
    """The outcome and the detail of each test of a file."""
    from torch.distributed import TCPStore

    found = {}
    while True:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with tempfile.TemporaryDirectory(dir=folder) as here:
            outs = [Path(here) / f"rank{rank}" for rank in range(ranks)]
            skipped = Path(here) / "done"
            skipped.write_text(json.dumps(list(found)))
            common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
            common |= {"MASTER_PORT": str(store.port), "OMP_NUM_THREADS": "1", "TESTS_FOLDER": here}
            processes = [
                subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "wooly",
                        "run",
                        "-q",
                        str(HERE / "torch_tests.py"),
                        "--rank-of",
                        str(out),
                        "--done",
                        str(skipped),
                        str(file),
                    ],
                    env=os.environ
                    | common
                    | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WOOLYAI_EXECUTOR_URL": urls[rank % len(urls)]},
                    stdout=subprocess.DEVNULL,
                    stderr=None if os.environ.get("TESTS_SHOWN") else subprocess.DEVNULL,
                )
                for rank, out in enumerate(outs)
            ]
            ended = watch(processes, outs)
            for process in processes:
                process.kill()
                process.wait()
            new = merged(outs, ended)
            if not new and not ended:
                new = {file.stem: ("fail", "the ranks ended before their first test")}
        found |= new
        if ended or not any(outcome == "hang" for outcome, _ in new.values()):
            return found


def watch(processes, outs):
    """Wait until all ranks have ended their tests. Returns False if they stay where they are, or one of them dies."""
    size, since = -1, time.monotonic()
    while any(process.poll() is None for process in processes):
        now = sum([out.stat().st_size for out in outs if out.exists()])
        if now != size:
            size, since = now, time.monotonic()
        if time.monotonic() - since > (TEST_S if size else START_S):
            return False
        time.sleep(0.1)
    return all(out.exists() and '"end"' in out.read_text() for out in outs)


def merged(outs, ended):
    """The outcomes of all ranks together, by test."""
    by_test = {}
    for out in outs:
        for text in out.read_text().splitlines() if out.exists() else []:
            line = json.loads(text)
            if "test" in line:
                by_test.setdefault(line["test"], {})[out.name] = None if line.get("start") else line
    found = {}
    for test, lines in by_test.items():
        known = [line for line in lines.values() if line is not None]
        if len(known) < len(lines) or (not ended and len(lines) < len(outs)):
            found[test] = "hang", "; ".join([line["detail"] for line in known if line["detail"]])
            continue
        known = [line for line in known if line["detail"] != SPARE] or known
        worst = min(known, key=lambda line: ORDER.index(line["outcome"]))
        found[test] = worst["outcome"], worst["detail"]
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--executors", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--done", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of is not None:
        rank_main(args.paths[0], args.rank_of, set(json.loads(args.done.read_text())))
        return
    from wooly_testkit.executor import executor_process

    suite, *files = args.paths
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        running = [stack.enter_context(executor_process()) for _ in range(args.executors)]
        urls = [e.endpoints[0].replace("unix://", f"unix://{e.token}@") for e in running]
        for file in files:
            found = run_file((suite / "test/distributed" / file).resolve(), urls, args.ranks, folder)
            counts = Counter([outcome for outcome, _ in found.values()])
            if args.json:
                print(json.dumps({"file": str(file), "counts": counts, "tests": found}), flush=True)
                continue
            print(f"{file}: {', '.join([f'{counts[name]} {name}' for name in ORDER if counts[name]])}", flush=True)
            for test, (outcome, detail) in found.items():
                if outcome in ("fail", "hang"):
                    print(f"  {outcome} {test}: {detail.splitlines()[0][:160] if detail else ''}", flush=True)


if __name__ == "__main__":
    main()
