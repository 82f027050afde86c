"""Prints what each operation costs, in bytecode instructions, and accepts the figures for `test_costs`.

Run: .venv/bin/python -m tests.costs.record [--accept] [--functions]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: The accepted figures of this release of Python.
ACCEPTED = Path(__file__).parent / "accepted" / f"python-{sys.version_info[0]}.{sys.version_info[1]}.json"
#: By way of recording in the client: the operations.
OPERATIONS = {
    "off": (
        "client: one addition",
        "client: forward and backward of two layers",
        "client: addition in place and read",
        "client: 16 layers of a Llama",
        "executor: program of 1 operation",
        "executor: program of 1 operation and read",
        "executor: program of 33 operations",
        "executor: 16 layers of a Llama",
        "executor on a GPU: 16 layers of a Llama",
        "executor on a GPU with graphs: 16 layers of a Llama",
        "dispatch: 16 launches",
        "placement: 16 tasks",
    ),
    "auto": (
        "native client: one addition",
        "native client: forward and backward of two layers",
        "native client: addition in place and read",
        "native client: 16 layers of a Llama",
    ),
}
Costs = dict[str, dict[str, int]]
#: By pass of a Llama on a GPU with graphs: the replays per program.
Replays = dict[str, float]


def measured(native: str) -> tuple[Costs, Replays]:
    """Measure the operations in a process of its own: by operation, the instructions of each function. Empty: no native kernels.

    Args:
        native: WOOLYAI_NATIVE of the process.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("WOOLYAI_", "WOOLY_", "COV_", "PYTEST_"))}
    environment |= {"WOOLYAI_NATIVE": native, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.costs.record", "--measure", native],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert not done.returncode, done.stderr
    costs, replays = json.loads(done.stdout.splitlines()[-1])
    return costs, replays


def measure(native: str) -> tuple[Costs, Replays]:
    """Measure the operations in this process; see `measured`."""
    replays: Replays = {}
    return {
        name: dict(counted) for name, counted in zip(OPERATIONS[native], _all(native, replays), strict=True)
    }, replays


def _all(native: str, replays: Replays) -> Iterator[Counter[str]]:
    from wooly_executor.runtime.torch_cpu import TorchCpuRuntime

    from tests.costs import llama, operations
    from tests.costs.counting import count

    with tempfile.TemporaryDirectory(prefix="wooly-costs-") as name:
        folder = Path(name)
        with operations.client():
            programs = {str(n): operations.recorded(n, folder) for n in (1, 33)}  # first: each is written once
            layer = llama.recorded_layer(folder)
            for work in (operations.eager_add, operations.perceptron, operations.add_and_read, llama.layers_of_client):
                yield count(work())
            if native != "off":
                return
            step = llama.recorded_layer(folder, decoding=True)
        device = operations.Device(folder, programs)
        yield count(operations.running(device, "1"))
        yield count(operations.running_and_reading(device, "1"))
        yield count(operations.running(device, "33"))
        device.close()
        graphed = llama.fake_gpu(graphs=True)
        for runtime in (TorchCpuRuntime(), llama.fake_gpu(graphs=False), graphed):
            passes = llama.forward(folder, layer, runtime)
            yield llama.counted(passes)
            if runtime is graphed:
                replays["prefill"] = llama.replays_per_program(passes, graphed)
            passes.device.close()
        graphed = llama.fake_gpu(graphs=True)
        passes = llama.forward(folder, step, graphed)
        replays["decode"] = llama.replays_per_program(passes, graphed)
        passes.device.close()
    yield count(operations.dispatch_decisions())
    yield count(operations.placement_decisions())


def total(functions: dict[str, int]) -> int:
    """The instructions of an operation."""
    return sum(functions.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--accept", action="store_true", help="write the figures to the file that test_costs compares with"
    )
    parser.add_argument("--functions", action="store_true", help="print the functions, too")
    parser.add_argument("--measure", choices=OPERATIONS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        from wooly import native

        available = args.measure == "off" or native.module is not None
        print(json.dumps(measure(args.measure) if available else ({}, {})))
        return
    known = json.loads(ACCEPTED.read_text()) if ACCEPTED.exists() else {}
    found = {name: functions for native in OPERATIONS for name, functions in measured(native)[0].items()}
    for name, functions in found.items():
        before = total(known.get(name, {}))
        change = f"{100 * (total(functions) - before) / before:+.1f} %" if before else "new"
        print(f"{name:55}{total(functions):8,}  {change}")
        for function, instructions in sorted(functions.items(), key=lambda item: -item[1]) if args.functions else ():
            print(f"    {instructions:6,}  {function}")
    if args.accept:
        ACCEPTED.parent.mkdir(exist_ok=True)
        ACCEPTED.write_text(json.dumps(known | found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
