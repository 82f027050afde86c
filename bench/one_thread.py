"""Measures operators that the executor computes on one thread, against the library's team of threads.

Both sides run in turns in one thread, as in an executor: other threads have teams, too, so the members of a team sleep between
two operators. The ratio says what one thread takes of the team's time, also for more numbers than the executor leaves to it.

Run: .venv/bin/python bench/one_thread.py [--json] [--repeat N]
"""

import argparse
import statistics
import threading
import time

import torch
from figures import row, show
from wooly_executor.runtime.invocation import ONE_CORE, with_flags
from wooly_executor.runtime.one_thread import on_one_thread

ROWS = 2, 32, 64, 128, 256, 512
COLUMNS = 1024
WORK = {
    "add": lambda x: x + x,
    "sum of columns": lambda x: x.sum(0),
    "GELU": torch.nn.functional.gelu,
    "softmax": lambda x: x.softmax(-1),
    "layer norm": lambda x: torch.nn.functional.layer_norm(x, (COLUMNS,)),
    "square root": torch.sqrt,
}


def measured(work, x, repeat):
    """Microseconds on one thread, and with the team."""
    sides = on_one_thread(with_flags(lambda _: work(x), (ONE_CORE,))), lambda _: work(x)
    found = [], []
    for turn in range(repeat + 2):
        for times, side in zip(found, sides, strict=True):
            time.sleep(0.001)  # the team falls asleep
            begun = time.perf_counter()
            side(None)
            if turn > 1:
                times.append(1e6 * (time.perf_counter() - begun))
    return [statistics.median(times) for times in found]


def all_rows(repeat):
    rows = []
    for name, work in WORK.items():
        for count in ROWS:
            x = torch.rand(count, COLUMNS) + 0.1
            ours, team = measured(work, x, repeat)
            rows.append(row(f"{name}, {count} x {COLUMNS}", "us", ours, team, None))
    return rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeat", type=int, default=50)
    chosen = parser.parse_args()
    torch.rand(1 << 20).add_(1)  # this thread's team
    rows = []
    device = threading.Thread(target=lambda: rows.extend(all_rows(chosen.repeat)))
    device.start()
    device.join()
    show(rows, chosen.json, title=f"one thread against {torch.get_num_threads()}", baseline="team")


if __name__ == "__main__":
    main()
