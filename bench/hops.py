"""Where the time of a sine and its `.item()` goes: when each step of client and executor begins, and how long it takes.

Both processes read the same monotonic clock. Reading it adds about half a microsecond to each step, and a step contains the steps
that are indented below it.

Run: .venv/bin/python bench/client.py --profile
"""

import functools
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TURNS, WARM_UP = 2000, 300
#: Steps by module, class and method: which process, and what it does. Indented steps are parts of the one above.
CLIENT = {
    ("wooly.recorder", "Recorder", "flush"): "close the program, send RUN",
    ("wooly.link", "Link", "read"): "read",
    ("wooly.link", "Link", "_begin_read"): "  send READ",
    ("wooly.link", "Link", "wait"): "  wait for the answer",
}
EXECUTOR = {
    ("wooly_bus.channel.server", "ChannelServer", "_readable"): "receive and parse",
    ("wooly_executor.intake", "Intake", "_handle"): "take a frame in",
    ("wooly_executor.launching", "Launcher", "launch"): "launch",
    ("wooly_executor.launching", "Launcher", "_run_piece"): "  run, and process what follows",
    ("wooly_executor.runs", "Runs", "begin"): "    begin the run",
    ("wooly_executor.launching", "Launcher", "_advance"): "    compute",
    ("wooly_executor.processing", "Processing", "process"): "    process a frame",
    ("wooly_bus.channel.server", "ChannelServer", "_writable"): "  send the answer",
    ("wooly_executor.launching", "Launcher", "_pace_of"): "  price the launch",
}


def stamped(steps, found):
    """Wrap methods so that they note (step, begin, end) in `found`, in ns."""
    clock = time.perf_counter_ns
    for (module, owner, name), step in steps.items():
        cls = getattr(__import__(module, fromlist=[owner]), owner)
        method = getattr(cls, name)

        @functools.wraps(method)
        def noting(*args, _method=method, _step=step, **kwargs):
            begun = clock()
            try:
                return _method(*args, **kwargs)
            finally:
                found.append((_step, begun, clock()))

        setattr(cls, name, noting)


def executor():
    """Run an executor that writes its stamps to the first argument when it ends."""
    path, found = Path(sys.argv[1]), []
    stamped(EXECUTOR, found)
    sys.argv[:2] = ["wooly_executor"]
    try:
        runpy.run_module("wooly_executor", run_name="__main__")
    finally:
        path.write_text(json.dumps(found))


def profile():
    """Yield (process, step, begin after the start of a turn, time), in us: medians of the first occurrence per turn."""
    import torch
    from wooly import api
    from wooly_testkit.executor import executor_process

    ours, turns = [], []
    with tempfile.TemporaryDirectory(prefix="wooly-hops-") as folder:
        path = Path(folder) / "stamps"

        def start(module, *arguments, **options):
            return subprocess.Popen([sys.executable, __file__, str(path), *arguments], **options)

        with executor_process(start=start) as running:
            api.attach(running.endpoints, running.session_id, running.token)
            api.install_facade()
            stamped(CLIENT, ours)
            x = torch.ones(4, device="cuda")
            for turn in range(WARM_UP + TURNS):
                if turn == WARM_UP:
                    ours.clear()
                begun = time.perf_counter_ns()
                x.sin_()
                last = x[0]
                recorded = time.perf_counter_ns()
                last.item()
                if turn >= WARM_UP:
                    turns.append((begun, recorded, time.perf_counter_ns()))
            api.disable()
            running.process.terminate()
            running.process.wait(30)
        theirs = json.loads(path.read_text())
    yield "client", "record the sine and the view", 0.0, statistics.median([b - a for a, b, _ in turns]) / 1e3
    for process, stamps, steps in (("client", ours, CLIENT), ("executor", theirs, EXECUTOR)):
        for step in steps.values():
            begins, times, at = [], [], 0
            of_step = sorted([(begun, ended) for name, begun, ended in stamps if name == step])
            for begun, _, ended in turns:
                while at < len(of_step) and of_step[at][0] < begun:
                    at += 1
                if at < len(of_step) and of_step[at][0] < ended:
                    begins.append(of_step[at][0] - begun)
                    times.append(of_step[at][1] - of_step[at][0])
            if begins:
                yield process, step, statistics.median(begins) / 1e3, statistics.median(times) / 1e3
    yield "client", "the whole turn", 0.0, statistics.median([c - a for a, _, c in turns]) / 1e3


def show_profile(as_json):
    """Print the steps."""
    found = list(profile())
    if as_json:
        names = ("process", "step", "begins_us", "takes_us")
        print(json.dumps([dict(zip(names, line, strict=True)) for line in found]))
        return
    print(f"{'process':10}{'step':36}{'begins, us':>12}{'takes, us':>12}")
    for process, step, begins, takes in found:
        print(f"{process:10}{step:36}{begins:12.1f}{takes:12.1f}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    executor()
