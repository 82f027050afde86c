"""Measures collectives of torch.distributed on one and two executors, compared with gloo between local processes on CPU tensors.

`all_reduce`: one all_reduce of 4 KiB, 1 MiB and 64 MiB of float32, with a wait after each, over 2 and 4 ranks. `ddp`: one step of
DistributedDataParallel of three layers of 1024, with SGD. All processes and executors share this machine. With two executors,
neighbouring ranks are on different ones. Each rank of gloo computes with one thread; the executors have as many threads together
as the machine has cores for these ranks.

The sides are measured in turn, as often as `--repeat` says; the figures are medians of these runs.

Run: .venv/bin/python bench/distributed.py [--json] [--only NAME[,NAME]] [--ranks N[,N]] [--repeat N]
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import time
from pathlib import Path

from figures import row, show

KIB, MIB = 1 << 10, 1 << 20
SIZES = (("4 KiB", 4 * KIB, 30), ("1 MiB", MIB, 15), ("64 MiB", 64 * MIB, 4))
#: Largest ratio to gloo.
GOALS = {"all_reduce: 4 KiB": 1.2, "all_reduce: 1 MiB": 1.0, "all_reduce: 64 MiB": 0.8, "ddp: a step": 1.2}


# -- in a rank -----------------------------------------------------------------------------------------------------------


def rank_main(device, only):
    """Measure in one rank, and print the medians as JSON in rank 0."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    found = {}

    def wait():
        if device == "cuda":
            torch.cuda.synchronize()

    def median(rounds, work):
        times = []
        for number in range(rounds + 2):
            dist.barrier()
            begun = time.perf_counter()
            work()
            wait()
            if number > 1:
                times.append(time.perf_counter() - begun)
        return statistics.median(times)

    if "all_reduce" in only:
        for name, nbytes, rounds in SIZES:
            x = torch.zeros(nbytes // 4, device=device)
            found[f"all_reduce: {name}"] = median(rounds, lambda x=x: dist.all_reduce(x))
    if "ddp" in only:
        torch.manual_seed(0)
        layers = [
            torch.nn.Linear(1024, 1024),
            torch.nn.ReLU(),
            torch.nn.Linear(1024, 1024),
            torch.nn.Linear(1024, 1024),
        ]
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers).to(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        x = torch.randn(32, 1024, device=device)

        def step():
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        found["ddp: a step"] = median(8, step)
    if not dist.get_rank():
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


# -- the measuring process -----------------------------------------------------------------------------------------------


def measure(device, ranks, only, urls):
    """Medians of one run, in seconds by name. The ranks are at these executors in turn."""
    from torch.distributed import TCPStore
    from wooly_testkit import forks

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    common |= {"PYTHONPATH": str(Path(__file__).parent)}
    processes = [
        forks.Forked(
            "distributed",
            *("--rank-of", device, "--only", ",".join(only)),
            like="wooly",
            env=os.environ
            | common
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WOOLYAI_EXECUTOR_URL": urls[rank % len(urls)]},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=580)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    return json.loads(outputs[0].splitlines()[-1])


def compared(where, ours, gloo):
    """The rows of one side. `ours`, `gloo`: medians of each run, in seconds by name."""
    for name in ours[0]:
        our, theirs = [[run[name] * 1e3 for run in runs] for runs in (ours, gloo)]
        spread = f"{min(our):.2f}-{max(our):.2f}"
        yield row(
            f"{name}, {where}", "ms", statistics.median(our), statistics.median(theirs), GOALS[name], spread=spread
        )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="all_reduce,ddp")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rank-of", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    only = args.only.split(",")
    if args.rank_of:
        if args.rank_of == "cuda":
            from wooly import api

            api.enable_on_use()
        rank_main(args.rank_of, only)
        return
    from wooly_testkit import forks
    from wooly_testkit.executor import executor_process

    rows = []
    cores = len(os.sched_getaffinity(0))
    for ranks in map(int, args.ranks.split(",")):
        threads = min(ranks, cores)
        with contextlib.ExitStack() as stack:
            urls = [
                e.endpoints[0].replace("unix://", f"unix://{e.token}@")
                for e in [
                    stack.enter_context(executor_process(threads=n, start=forks.Forked))
                    for n in (threads, *[max(threads // 2, 1)] * 2)
                ]
            ]
            sides = {"gloo": ("cpu", urls), "one executor": ("cuda", urls[:1]), "two executors": ("cuda", urls[1:])}
            found = {side: [] for side in sides}
            for _ in range(args.repeat):
                for side, (device, at) in sides.items():
                    found[side].append(measure(device, ranks, only, at))
            for side in ("one executor", "two executors"):
                rows += compared(f"{ranks} ranks, {side}", found[side], found["gloo"])
    show(rows, args.json, title="torch.distributed", baseline="gloo")


if __name__ == "__main__":
    main()
