"""Random programs on the device and on the CPU: what a script can see must be the same.

A single operator can be right while the sequence of calls is wrong: an operand that is freed before it is read, a value that is
kept on the host while a view changes it. `program_steps` makes programs, `program_names` has the names that they use, and
`program_runs` runs them. Compared are the values and errors that a program sees, the descriptions of its tensors after each step,
and all values at the end, bit by bit. A program that differs is made shorter as long as it differs, and is printed as a script.

Run: python programs.py --seeds 0:500 [--minutes 10] [--python] [--json] [--tcp] [--plans] [--sessions 2]
Without a controller or an executor in the environment, it starts an executor.
"""

import argparse
import contextlib
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time

import torch
from program_runs import check, kind_of, make, script, shorter

#: Seconds that may be used to make one program shorter.
SHRINK_S = 25
#: The part of a script behind the names that all programs have.
HEAD = "# the program\n"


def work(options):
    """Run the programs of some seeds in this process, in a session of the environment's executor or controller.

    Prints one JSON line before each program, one for each that differs, and one with their number at the end.
    """
    from wooly import api, native

    torch.set_num_threads(1)
    api.enable()
    if native.describe().startswith("on") == options.python:
        sys.exit(f"the native kernels are not as asked for: {native.describe()}")
    first, last = map(int, options.seeds.split(":"))
    until = time.monotonic() + options.minutes * 60
    make(first)
    gc.collect()
    gc.freeze()  # programs collect garbage, and need not look at the modules each time
    done = 0
    for seed in range(first, last, options.step * options.threads):
        if time.monotonic() > until:
            break
        print(json.dumps({"start": seed}), flush=True)
        seeds = [seed + n * options.step for n in range(options.threads)]
        made = [make(n) for n in seeds]
        for n, one, said in zip(seeds, made, together(made), strict=True):
            done += 1
            if said:
                print(json.dumps(failed(n, *one[:2], said, options.whole)), flush=True)
        gc.collect()
    print(json.dumps({"done": done}), flush=True)
    api.disable()


def together(made):
    """The differences of programs that run at the same time, each in a thread and twice: the second run has known calls.

    An error that a device reports late comes to the thread that waits next, so programs with such errors run alone.
    """
    said = [""] * len(made)
    if any("late(" in str(steps) for steps, _, _ in made):
        return [check(*one) or check(*one) for one in made]

    def run(n):
        said[n] = check(*made[n]) or check(*made[n])

    if len(made) == 1:
        run(0)
        return said
    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(made))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


def failed(seed, steps, looks, said, whole):
    """The row of a program that differs. With `whole`, the program is not made shorter."""
    kind = kind_of(said)
    if not whole:
        if kind_of(check(steps, looks)) != kind:
            said = f"not again, alone: {said}"
        else:
            until = time.monotonic() + SHRINK_S
            steps = shorter(steps, lambda rest: kind_of(check(rest, looks)) == kind, until)
            said = check(steps, looks) or said
    return {"seed": seed, "said": said, "looks": looks, "script": script(steps, said)}


@contextlib.contextmanager
def executor(options):
    """Run an executor, if the environment names none. Yields the variables that name it."""
    from wooly_testkit.executor import executor_process

    if {"WOOLYAI_EXECUTOR_URL", "WOOLYAI_CONTROLLER_URL"} & set(os.environ):
        yield {}
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1] if options.tcp else 0
    plans = {"WOOLY_EXECUTOR_PLANS": "1"} if options.plans else {}
    with executor_process(runtime=options.runtime, port=port, environment=plans) as running:
        scheme, _, where = running.endpoints[-1].partition("://")
        yield {"WOOLYAI_EXECUTOR_URL": f"{scheme}://{running.token}@{where}"}


def sweep(options):
    """Run the programs in processes, each with a session of its own.

    Returns the rows of those that differ, and how many have run. If a process dies, its last program counts as one that differs,
    and another process continues after it.
    """
    first, last = map(int, options.seeds.split(":"))
    rows, numbers, lock = [], [], threading.Lock()
    until = time.monotonic() + options.minutes * 60

    def note(row):
        with lock:
            rows.append(row)
            show(row, options.json)

    def follow(seed, env):
        while seed is not None and seed < last and time.monotonic() < until:
            left = f"{(until - time.monotonic()) / 60:.3f}"
            argv = ["--worker", "--seeds", f"{seed}:{last}", "--step", str(options.sessions), "--minutes", left]
            argv += ["--python"] * options.python + ["--whole"] * options.whole + ["--threads", str(options.threads)]
            seed = run(argv, env)

    def run(argv, env):
        """Run a worker. Returns the seed at which another one must go on, or None."""
        command = [sys.executable, __file__, *argv]
        with tempfile.TemporaryFile("w+") as errors:
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env) as process:
                seed, ended = None, False
                for row in map(json.loads, process.stdout):
                    if "start" in row:
                        seed = row["start"]
                    elif "done" in row:
                        numbers.append(row["done"])
                        ended = True
                    else:
                        note(row)
            if ended and process.returncode == 0:
                return None
            errors.seek(0)
            note({"seed": seed, "said": f"the process ended with {process.returncode}: {errors.read()[-5000:]}"})
            return seed if seed is None else seed + options.sessions * options.threads

    with executor(options) as named:
        env = os.environ | {"OMP_NUM_THREADS": "1", "WOOLYAI_NATIVE": "off" if options.python else "on"} | named
        threads = [threading.Thread(target=follow, args=(first + n, env)) for n in range(options.sessions)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return rows, sum(numbers)


def show(row, as_json):
    if as_json:
        print(json.dumps(row), flush=True)
        return
    print(f"seed {row['seed']}: {row['said']}\n{row.get('script', '').partition(HEAD)[2]}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", default="0:100", help="A:B, the programs from A to B - 1")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--native", action="store_true", help="with the client's native kernels, as usual")
    parser.add_argument("--python", action="store_true", help="without the client's native kernels")
    parser.add_argument("--json", action="store_true", help="print one line of JSON per program that differs")
    parser.add_argument("--tcp", action="store_true", help="connect by TCP, so without shared memory")
    parser.add_argument("--plans", action="store_true", help="the executor may use plans")
    parser.add_argument("--runtime", default="torch_cpu", help="runtime of the executor")
    parser.add_argument("--sessions", type=int, default=1, help="sessions at the same time, each in its own process")
    parser.add_argument(
        "--threads", type=int, default=1, help="programs at the same time in a session, each in a thread"
    )
    parser.add_argument("--whole", action="store_true", help="do not make programs shorter")
    parser.add_argument(
        "--script", action="store_true", help="print the program of the first seed as a script, and end"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--step", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.native and options.python:
        parser.error("either --native or --python")
    if options.script:
        print(script(make(int(options.seeds.split(":")[0]))[0], "a program"), end="")
        return 0
    if options.worker:
        work(options)
        return 0
    rows, done = sweep(options)
    print(json.dumps({"programs": done, "differ": len(rows)}))
    return int(bool(rows))


if __name__ == "__main__":
    sys.exit(main())
