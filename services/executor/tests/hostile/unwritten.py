"""Runs every operator of the allow-list with several patterns in new memory, and reports each result that depends on the pattern.

    python unwritten.py --out FOLDER [--calls 40] [--seed 0] [--quick] [--slice 1/4] [NAME ...]

A result that depends on the previous content of its memory shows one session what another has freed. FOLDER keeps the lawful
calls, as for `fuzz.py`. Each operator is tried with all of them, and with `--calls` mutants. NAMEs are parts of operators' names.
Ends with status 1 if a result depends on the pattern. There are no exceptions.
"""

import argparse
import contextlib
import hashlib
import json
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from call import literal
from corpus import collected
from mutants import Corpus, mutant
from patterns import PATTERNS, junk
from trial import Trials
from wooly_executor.runtime import lowering
from wooly_executor.runtime.torch_cpu import TorchCpuRuntime

HERE = Path(__file__).parent
#: Maximum time of a call on a busy machine, in seconds, and maximum memory of a process, in bytes above its initial size.
LIMIT_S, LIMIT_BYTES = 10, 1 << 30
#: Answer for a call that ended its process. The other pass of `make hostile` examines these calls.
ENDED = "ended"
#: Maximum number of printed findings per operator, and of characters per call.
SHOWN, LONGEST = 2, 400


def calls_of(corpus, job):
    """Return the lawful calls of an operator, and mutants of them."""
    lawful = corpus.lawful[job["name"]]
    return [*lawful, *[mutant(corpus, job["name"], job["seed"], k) for k in range(job["count"])]]


# -- in a worker, whose environment sets the pattern --------------------------------------------------------------------


class Child:
    """Runs the calls of operators in a child process, and reports what each call left. If a child ends, a new one continues."""

    def __init__(self, corpus):
        self._corpus = corpus
        self._runtime = TorchCpuRuntime()
        self._runtime.rates()
        self._process = 0

    def go(self, job):
        """Return, for each call of the job, its error and a digest of all bytes that it left."""
        n, found = len(calls_of(self._corpus, job)), []
        while len(found) < n:
            if not self._process:
                self._begin()
            print(json.dumps(job | {"first": len(found)}), file=self._asks, flush=True)
            while len(found) < n:
                line = self._line()
                if not line:
                    self._end()
                    found.append([ENDED, ""])
                    break
                found.append(json.loads(line))
        return found

    def _begin(self):
        (asked, asks), (tells, told) = os.pipe(), os.pipe()
        self._process = os.fork()
        if not self._process:
            os.close(asks)
            os.close(tells)
            with os.fdopen(asked) as jobs, os.fdopen(told, "w") as answers:
                self._serve(jobs, answers)
            os._exit(0)
        os.close(asked)
        os.close(told)
        self._asks, self._tells, self._rest = os.fdopen(asks, "w"), tells, b""

    def _line(self):
        """Return the child's next line; empty if the child has ended or takes too long."""
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._tells], [], [], LIMIT_S)
            data = os.read(self._tells, 1 << 16) if ready else b""
            if not data:
                return b""
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        return line

    def _end(self):
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        with contextlib.suppress(BrokenPipeError):
            self._asks.close()
        os.close(self._tells)
        self._process = 0

    def _serve(self, jobs, answers):
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + LIMIT_BYTES,) * 2)
        left = []
        trials = Trials(self._runtime, left=left.append)
        for line in jobs:
            job = json.loads(line)
            for call in calls_of(self._corpus, job)[job["first"] :]:
                torch.manual_seed(0)
                left.clear()
                try:
                    said = trials.said(call)
                except Exception as e:
                    said = f"{type(e).__name__}: {e}"
                digest = hashlib.blake2b(b"".join(left), digest_size=8).hexdigest()
                print(json.dumps([said[:200], digest]), file=answers, flush=True)


def work(path, pattern, trusting):
    """Answer the jobs on standard input, one JSON object per line."""
    if trusting:
        lowering.fills_results = lambda *_, **__: True
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    with open(path, "rb") as f:
        corpus = Corpus(pickle.load(f))  # noqa: S301  # written by this tool
    child = Child(corpus)
    with junk() if pattern.junk else contextlib.nullcontext():
        for line in sys.stdin:
            print(json.dumps(child.go(json.loads(line))), file=answers, flush=True)


# -- in the parent -----------------------------------------------------------------------------------------------------------


class Worker:
    """A process whose new memory is filled with a pattern."""

    def __init__(self, path, pattern, trusting):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        if pattern.perturb:
            environment["MALLOC_PERTURB_"] = str(pattern.perturb)
        command = [sys.executable, str(HERE / "unwritten.py"), "--worker", pattern.name, "--out", str(path)]
        command += ["--trusting"] if trusting else []
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, job):
        print(json.dumps(job), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the worker ended with {self._process.wait()} at {job}")
        return json.loads(answer)

    def close(self):
        self._process.stdin.close()
        self._process.wait()


def compared(found):
    """Return how many calls succeeded, and the indices of those whose bytes differ. `found` has a list of results per pattern."""
    fine, differing = 0, []
    for k, each in enumerate(zip(*found, strict=True)):
        if any(said == ENDED for said, _ in each):
            continue
        fine += not each[0][0]
        if any(result != each[0] for result in each[1:]):
            differing.append(k)
    return fine, differing


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=lambda folder: Path(folder).absolute(), required=True)
    parser.add_argument("--calls", type=int, default=40, help="number of mutants per operator")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--quick", action="store_true", help="without the samples of PyTorch's own tests")
    parser.add_argument("--slice", default="1/1", help="part of the operators; 2/4: the second quarter")
    parser.add_argument(
        "--trusting", action="store_true", help="do not zero memory, as if every operator wrote all of its results"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args.out, next(p for p in PATTERNS if p.name == args.worker), args.trusting)
    path, operators = collected(args.out, args.quick)
    with path.open("rb") as f:
        corpus = Corpus(pickle.load(f))  # noqa: S301  # written by this tool
    at, of = map(int, args.slice.split("/"))
    wanted = [n for n in operators if not args.names or any(part in n for part in args.names)][at - 1 :: of]
    workers = [Worker(path, pattern, args.trusting) for pattern in PATTERNS]
    tried, succeeded, with_success, dependent, begun = 0, 0, 0, [], time.monotonic()
    for n, name in enumerate(wanted, 1):
        job = {"name": name, "seed": args.seed, "count": args.calls}
        found = [worker.ask(job) for worker in workers]
        fine, differing = compared(found)
        tried, succeeded, with_success = tried + len(found[0]), succeeded + fine, with_success + (fine > 0)
        if differing:
            dependent.append(name)
            print(
                f"{name}: {len(differing)} of {len(found[0])} calls depend on the previous content of memory",
                flush=True,
            )
            for k in differing[:SHOWN]:
                call = calls_of(corpus, job)[k]
                print(f"    {literal(call.tidy())[:LONGEST]}", flush=True)
        if n % 100 == 0 or n == len(wanted):
            rate = tried / (time.monotonic() - begun)
            print(f"{n} of {len(wanted)} operators, {tried} calls, {rate:.0f} a second", flush=True)
    for worker in workers:
        worker.close()
    print(
        f"{succeeded} calls succeeded, of {with_success} operators; results of {len(dependent)} operators depend on new memory"
    )
    return 1 if dependent else 0


if __name__ == "__main__":
    sys.exit(main())
