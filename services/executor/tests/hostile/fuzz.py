"""Calls every operator of the allow-list with arguments that do not fit, on memory between protected pages.

    python fuzz.py --out FOLDER [--workers 2] [--calls 400] [--seed 0] [--quick] [--threads 1] [--runs 1] [NAME ...]
    python fuzz.py --out FOLDER --programs 5000 [--mode full] [--workers 2] [--seed 0] [--threads 1]

FOLDER keeps the lawful calls and the findings, a JSON object per operator. A second run continues an interrupted one. NAMEs are
parts of operators' names. With `--programs`, tries so many programs of native instructions: as they get hot, in pieces, divided,
and with `--mode` as plans. Ends with status 1 if a call crashed, accessed memory outside of its own, hung, or had other results
when it ran again.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

import guarded
from corpus import collected

HERE = Path(__file__).parent
#: Number of programs in a job of `--programs`.
PROGRAMS = 25
#: Findings that do no harm to others. They are counted separately.
MILD = ("memory", "untidy")


class Worker:
    """A process that tries calls. `options`: its other arguments, beginning with the number of threads."""

    def __init__(self, library, corpus, options):
        environment = os.environ | {
            "LD_PRELOAD": str(library),
            "OMP_NUM_THREADS": options[0],
            "PYTHONWARNINGS": "ignore",
        }
        command = [sys.executable, str(HERE / "worker.py"), str(corpus), *options]
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


def run(jobs, library, corpus, options, workers, told):
    """Run the jobs in `workers` processes; call `told` with each answer."""
    waiting = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    lock = threading.Lock()

    def work():
        worker = Worker(library, corpus, options)
        while True:
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                return worker.close()
            try:
                answer = worker.ask(job)
            except RuntimeError as e:
                answer = {"name": job["name"], "seed": job.get("seed"), "tried": 0, "fine": 0,
                          "found": [{"kind": "the worker ended", "wrong": str(e), "times": 1, "calls": []}]}  # fmt: skip
                worker = Worker(library, corpus, options)
            with lock:
                told(answer)

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()


def is_harm(found):
    return not found["kind"].startswith(MILD)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=lambda folder: Path(folder).absolute(), required=True)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--calls", type=int, default=400)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--threads", type=int, default=1, help="number of threads of the library")
    parser.add_argument("--runs", type=int, default=1, help="number of runs of each call")
    parser.add_argument("--programs", type=int, default=0, help="try programs, not calls of operators: their number")
    parser.add_argument("--mode", choices=("exact", "full"), help="run the programs' plans of this mode, too")
    parser.add_argument("--quick", action="store_true", help="do not use the samples of PyTorch's own tests")
    args = parser.parse_args()
    if args.mode and not args.programs:
        parser.error("--mode needs --programs")
    options = [str(args.threads), str(args.runs), *([args.mode] if args.mode else [])]
    kept = args.out / "found.jsonl"
    done, harmful, tried, begun = {}, 0, 0, time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    library = guarded.build(args.out)
    if args.programs:
        corpus, what, each = "", "jobs of programs", PROGRAMS
        firsts = range(0, args.programs, PROGRAMS)
        jobs = {f"programs {k}": {"first": k, "count": min(PROGRAMS, args.programs - k)} for k in firsts}
    else:
        corpus, operators = collected(args.out, args.quick)
        what, each = "operators", args.calls
        jobs = {n: {"count": args.calls} for n in operators if not args.names or any(part in n for part in args.names)}
    wanted = list(jobs)
    trial = [args.seed, each, *options]
    if kept.exists():
        for line in kept.read_text().splitlines():
            answer = json.loads(line)
            if answer.get("trial") == trial:
                done[answer["name"]] = answer
    jobs = [{"name": n, "seed": args.seed, **job} for n, job in jobs.items() if n not in done]
    print(f"{len(wanted)} {what}, {each} calls each; {len(wanted) - len(jobs)} were done before", flush=True)

    with kept.open("a") as out:

        def told(answer):
            nonlocal tried
            done[answer["name"]] = answer
            tried += answer["tried"]
            print(json.dumps(answer | {"trial": trial}), file=out, flush=True)
            n = sum(name in done for name in wanted)
            for found in answer["found"]:
                if is_harm(found):
                    print(f"{answer['name']}: {found['wrong']} ({found['times']} times)", flush=True)
                    for call in found["calls"]:
                        print(f"    {call}", flush=True)
            if n % 25 == 0 or n == len(wanted):
                rate = tried / (time.monotonic() - begun)
                print(f"{n} of {len(wanted)} {what}, {tried} calls, {rate:.0f} a second", flush=True)

        run(jobs, library, corpus, options, args.workers, told)
    for name in wanted:
        harmful += any(is_harm(found) for found in done[name]["found"])
    fine = sum(1 for name in wanted if done[name]["fine"])
    print(f"{harmful} {what} did harm; {fine} {what} had a call that succeeded")
    return 1 if harmful else 0


if __name__ == "__main__":
    sys.exit(main())
