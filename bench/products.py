"""Measures float32 products with few rows: the executor's product in parts against the library's one call.

Both compute with all cores, in turns, on so many second factors that none of them stays in a cache. A product that the executor
leaves to the library (on this chip, or for this number of rows) is shown without a ratio.

Run: .venv/bin/python bench/products.py [--json] [--repeat N]
"""

import argparse
import itertools
import statistics
import time

import torch
from figures import row, show
from wooly_executor.runtime.calls import library_call
from wooly_executor.runtime.device import HOST
from wooly_testkit.tape import Tape
from wooly_wis.dtypes import DType

#: Columns and depth: projections of a model with hidden size 768, two vocabularies, and a projection of a larger model.
SHAPES = (2304, 768), (768, 2048), (32000, 768), (50257, 768), (4096, 4096)
ROWS = 1, 2, 4, 8, 16, 64, 128
#: Bytes of the second factors of a measurement.
FACTORS = 64 << 20


def form(rows, columns, depth):
    """The instruction of a linear layer."""
    tape = Tape()
    tape.op("linear", tape.input(DType.F32, rows, depth), tape.input(DType.F32, columns, depth))
    program, _ = tape.program()
    return next(f for f in program.forms if f.opcode == "linear")


def measured(rows, columns, depth, repeat):
    """Milliseconds of a product in parts (None: the executor takes the library's), and of the library's."""
    line = form(rows, columns, depth)
    call = HOST.library(library_call(line), line)
    x = torch.randn(rows, depth)
    factors = [torch.randn(columns, depth) for _ in range(max(1, FACTORS // (4 * columns * depth)))]
    sides = [f for f in (call.instead, call.op) if f is not None]
    found = [[] for _ in sides]
    for turn, (times, side) in itertools.product(range(repeat + 1), list(zip(found, sides, strict=True))):
        begun = time.perf_counter()
        for w in factors:
            side(x, w)
        if turn:  # the first one warms up
            times.append(1e3 * (time.perf_counter() - begun) / len(factors))
    *ours, library = [statistics.median(times) for times in found]
    return (ours[0] if ours else None), library


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeat", type=int, default=20)
    chosen = parser.parse_args()
    rows = []
    for (columns, depth), count in itertools.product(SHAPES, ROWS):
        ours, library = measured(count, columns, depth, chosen.repeat)
        name = f"{count} rows, {columns} x {depth}"
        rows.append(row(name, "ms", library if ours is None else ours, None if ours is None else library, 1.0))
    show(rows, chosen.json, title=f"products on {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
