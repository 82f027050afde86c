"""Measures collectives of torch.distributed on one and two executors, compared with gloo between local processes on CPU tensors.

`all_reduce`: one all_reduce of 4 KiB, 1 MiB and 64 MiB of float32, with a wait after each, over 2 and 4 ranks. `ddp`: one step of
DistributedDataParallel with SGD: of three layers of 1024, and of a GPT with 4 layers of 256 on 2 x 64 tokens. All processes and
executors share this machine. With two executors, neighbouring ranks are on different ones. Each rank of gloo computes with one
thread; the executors have as many threads together as the machine has cores for these ranks.

`bytes`: what a rank's client sends and gets in a step of DistributedDataParallel, of layers of 512 and of 1536.

`network`: one all_reduce of 16 MiB over 2 and 4 executors with one rank each, behind links of 1 Gbit/s, divided among them,
compared with the first one carrying it alone.

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
GOALS = {"all_reduce: 4 KiB": 1.2, "all_reduce: 1 MiB": 1.0, "all_reduce: 64 MiB": 0.8}
GOALS |= {"ddp: a step of an MLP": 1.2, "ddp: a step of a GPT": 1.2}
#: The layers' widths of the models whose traffic is compared. Their gradients are in equally many buckets.
WIDTHS = (512, 1536)
#: Throughput, in bytes per second, of an executor's link in each direction.
LINK = 125e6


# -- in a rank -----------------------------------------------------------------------------------------------------------


def rank_main(device, only):
    """Measure in one rank, and print the medians as JSON."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.manual_seed(0)
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
        for name, model, x in (("an MLP", mlp(1024), torch.randn(32, 1024)), ("a GPT", *gpt())):
            found[f"ddp: a step of {name}"] = median(8, stepper(model.to(device), x.to(device)))
    if "bytes" in only:
        from wooly import api

        for width in WIDTHS:
            step = stepper(mlp(width).to(device), torch.randn(32, width, device=device))
            median(3, step)
            before = api.session_stats()
            median(8, step)  # two more steps, and a barrier before each
            after = api.session_stats()
            found[f"bytes: {width}"] = sum([after[k] - before[k] for k in ("bytes_sent", "bytes_received")]) / 10
    if "network" in only:
        x = torch.zeros(16 * MIB // 4, device=device)
        found["all_reduce: 16 MiB"] = median(3, lambda: dist.all_reduce(x))
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def mlp(width):
    """Three layers of this width."""
    from torch.nn import Linear, ReLU, Sequential

    return Sequential(Linear(width, width), ReLU(), Linear(width, width), Linear(width, width))


def gpt(width=256, heads=4, layers=4, vocabulary=1024, tokens=64):
    """A decoder that embeds, attends and predicts as GPT-2 does, and a batch of tokens."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
            self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x):
            parts = self.mix(self.norms[0](x)).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(*parts.unbind(), is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(-2))
            return x + self.feed(self.norms[1](x))

    blocks = [Block() for _ in range(layers)]
    model = nn.Sequential(nn.Embedding(vocabulary, width), *blocks, nn.LayerNorm(width), nn.Linear(width, vocabulary))
    return model, torch.randint(vocabulary, (2, tokens))


def stepper(model, x):
    """A function that does one step of DistributedDataParallel."""
    import torch

    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


# -- the measuring process -----------------------------------------------------------------------------------------------


def measure(device, ranks, only, urls, *more):
    """Medians of the slowest rank of one run, in seconds by name. The ranks are at these executors in turn. `more`: arguments of
    the ranks.
    """
    from torch.distributed import TCPStore
    from wooly_testkit import forks

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    common |= {"PYTHONPATH": str(Path(__file__).parent)}
    processes = [
        forks.Forked(
            "distributed",
            *("--rank-of", device, "--only", ",".join(only), *more),
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
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    return {name: max([f[name] for f in found]) for name in found[0]}


def compared(where, ours, gloo):
    """The rows of one side. `ours`, `gloo`: medians of each run, in seconds by name."""
    for name in ours[0]:
        our, theirs = [[run[name] * 1e3 for run in runs] for runs in (ours, gloo)]
        spread = f"{min(our):.2f}-{max(our):.2f}"
        yield row(
            f"{name}, {where}", "ms", statistics.median(our), statistics.median(theirs), GOALS[name], spread=spread
        )


def side_by_side(ranks, only, repeat):
    """The rows that are compared with gloo, and those of the clients' traffic."""
    from wooly_testkit import forks
    from wooly_testkit.executor import executor_process

    threads = min(ranks, len(os.sched_getaffinity(0)))
    with contextlib.ExitStack() as stack:
        urls = [
            _url(stack.enter_context(executor_process(threads=n, start=forks.Forked)))
            for n in (threads, *[max(threads // 2, 1)] * 2)
        ]
        timed = [name for name in only if name in ("all_reduce", "ddp")]
        sides = {"gloo": ("cpu", urls), "one executor": ("cuda", urls[:1]), "two executors": ("cuda", urls[1:])}
        found = {side: [] for side in sides}
        for _ in range(repeat if timed else 0):
            for side, (device, at) in sides.items():
                found[side].append(measure(device, ranks, timed, at))
        for side in ("one executor", "two executors") if timed else ():
            yield from compared(f"{ranks} ranks, {side}", found[side], found["gloo"])
        if "bytes" in only:
            sent = measure("cuda", ranks, ["bytes"], urls[:1])
            small, large = [sent[f"bytes: {width}"] / KIB for width in WIDTHS]
            name = f"bytes: a step with {WIDTHS[1]} in place of {WIDTHS[0]} features, {ranks} ranks"
            yield row(name, "KiB", large, small, 1.05)


def behind_links(ranks, repeat):
    """The row of executors behind slow links."""
    from wooly_testkit import forks
    from wooly_testkit.delay_proxy import delay_proxy
    from wooly_testkit.executor import executor_process

    with contextlib.ExitStack() as stack:
        urls = []
        for _ in range(ranks):
            executor = stack.enter_context(executor_process(start=forks.Forked))
            endpoint = stack.enter_context(delay_proxy(executor.endpoints[0], 0.0, LINK))
            urls.append(endpoint.replace("tcp://", f"tcp://{executor.token}@"))
        runs = [
            [measure("cuda", ranks, ["network"], urls, *how) for how in ((), ("--undivided",))] for _ in range(repeat)
        ]
        ours, alone = [[run["all_reduce: 16 MiB"] * 1e3 for run in side] for side in zip(*runs, strict=True)]
        spread = f"{min(ours):.1f}-{max(ours):.1f}"
        name = f"network: all_reduce of 16 MiB, {ranks} executors, against one that carries all"
        yield row(name, "ms", statistics.median(ours), statistics.median(alone), 1.3 / ranks, spread=spread)


def _url(executor):
    return executor.endpoints[0].replace("unix://", f"unix://{executor.token}@")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="all_reduce,ddp,bytes,network")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rank-of", default="", help=argparse.SUPPRESS)
    parser.add_argument("--undivided", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    only = args.only.split(",")
    if args.rank_of:
        if args.rank_of == "cuda":
            from wooly import api
            from wooly.distributed import peers

            if args.undivided:
                peers.LEAST_SHARE = 1 << 39
            api.enable_on_use()
        rank_main(args.rank_of, only)
        return
    rows = []
    for ranks in map(int, args.ranks.split(",")):
        rows += side_by_side(ranks, only, args.repeat)
        if "network" in only:
            rows += behind_links(ranks, args.repeat)
    show(rows, args.json, title="torch.distributed", baseline="gloo")


if __name__ == "__main__":
    main()
