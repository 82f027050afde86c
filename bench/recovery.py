"""Measures sessions that go on in another executor: what this costs while nothing fails, and how long a loss lasts.

`train`, `decode`: a training step (three layers of 1024, Adam) and the decoding of 64 tokens (a small Llama), with
WOOLYAI_RECOVERY off and on in turn. `loss`: from the death of the executor to the first new result, for 64 MiB to 1 GiB of
buffers that a checkpoint has, compared with copying these bytes. `bytes`: what a second checkpoint stores, compared with what
was written since the first. `move`: the longest step of a training that `wooly tasks move` moves. `beside`: the p99 of small
steps of a P0 session, while a P4 session on the same device writes 256 MiB again and again, with and without checkpoints of it.
`ranks`: a step of DDP (the same layers) over two ranks on two executors with WOOLYAI_RECOVERY off and on, whose cuts all ranks
make together, and the longest step if the second rank's executor dies.

Run: .venv/bin/python bench/recovery.py [--json] [--only NAME[,NAME]] [--pairs N]
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from figures import row, show

MIB = 1 << 20
SIZES = (64, 256, 1024)
CHILD = "child"


# -- in the client's process ---------------------------------------------------------------------------------------------


def network():
    """Three layers of 1024 on the device, with the same weights each time."""
    import torch
    from torch import nn

    torch.manual_seed(1)
    layers = [nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1024)]
    return nn.Sequential(*layers).to("cuda")


def step_of(model):
    """A function that does one training step of a model, and returns its time in seconds."""
    import torch

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    x = torch.randn(32, 1024, device="cuda")

    def step():
        begun = time.perf_counter()
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()
        return time.perf_counter() - begun

    return step


def training(seconds, told=lambda step: None):
    """Train for some seconds. Returns the time of each step, in seconds."""
    step = step_of(network())
    times, until = [], time.monotonic() + seconds
    while time.monotonic() < until:
        times.append(step())
        told(len(times))
    return times[10:]


def child_train(seconds):
    return statistics.median(training(float(seconds)))


def child_move(seconds):
    times = training(float(seconds))
    return max(times), statistics.median(times)


def child_ranks(seconds, lost=""):
    """Train with DDP for some seconds, at least 60 steps. Returns the median of the steps and the longest one in seconds, in rank
    0. With `lost`, the executor of the last rank dies after half of the steps.
    """
    import torch
    import torch.distributed as dist
    from torch import nn
    from wooly import api

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    train = step_of(nn.parallel.DistributedDataParallel(network(), device_ids=[rank]))
    steps = max(60, int(float(seconds) / 0.1))  # the same in all ranks
    times = []
    for step in range(steps):
        if lost and rank and step == steps // 2:
            os.kill(int(Path(os.environ["PIDS"], api._attached.parts[0].executor_id).read_text()), signal.SIGKILL)
        times.append(train())
    dist.destroy_process_group()
    return None if rank else (statistics.median(times[10:]), max(times[10:]))


def child_decode(rounds):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=4, num_attention_heads=4)).to("cuda").eval()
    prompt, times = torch.randint(0, 1000, (1, 16)).to("cuda"), []
    for _ in range(int(rounds)):
        begun = time.perf_counter()
        model.generate(prompt, max_new_tokens=64, min_new_tokens=64, do_sample=False, pad_token_id=0)
        times.append(time.perf_counter() - begun)
    return statistics.median(times[2:])


def stored(link, number):
    """Make steps until a checkpoint after this one is stored."""
    import torch

    step = torch.zeros(1, device="cuda")
    while link.recovery.stored <= number:
        step += 1
        step.item()
        time.sleep(0.02)
    return link.recovery.stored


def child_loss(mebibytes):
    import torch
    from wooly import api

    buffers = [torch.randn(MIB, device="cuda") for _ in range(int(mebibytes) // 4)]
    total = sum(b.sum() for b in buffers[:4]).item()
    stored(api._attached.link, api._attached.link.recovery.number)
    pid = int(Path(os.environ["PIDS"], api._attached.parts[0].executor_id).read_text())
    begun = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    assert sum(b.sum() for b in buffers[:4]).item() == total
    took = time.perf_counter() - begun
    host = torch.ones(int(mebibytes) * MIB, dtype=torch.uint8)
    return took, min(clone(host) for _ in range(3))


def clone(host):
    """Copy real bytes to new memory. Returns the seconds."""
    begun = time.perf_counter()
    host.clone()
    return time.perf_counter() - begun


def child_small(seconds):
    """Small steps, each followed by a pause. Returns the p99 and the median."""
    import torch

    x, times, until = torch.rand(64, 64, device="cuda"), [], time.monotonic() + float(seconds)
    while time.monotonic() < until:
        begun = time.perf_counter()
        (x @ x).sum().item()
        times.append(time.perf_counter() - begun)
        time.sleep(0.003)
    times = sorted(times[20:])
    return times[len(times) * 99 // 100], statistics.median(times)


def child_dirty(seconds):
    """Write 256 MiB again and again. Returns the number of stored checkpoints."""
    import torch
    from wooly import api

    buffers = [torch.zeros(MIB, device="cuda") for _ in range(64)]
    until = time.monotonic() + float(seconds)
    while time.monotonic() < until:
        for b in buffers:
            b.add_(1.0)
        buffers[-1].sum().item()
    recovery = api._attached.link.recovery
    return 0 if recovery is None else recovery.stored


def child_bytes(mebibytes):
    import torch
    from wooly import api

    folder = Path(os.environ["CHECKPOINTS"])
    before = chunks(folder)
    buffers = [torch.randn(MIB, device="cuda") for _ in range(int(mebibytes) // 4)]
    buffers[0].sum().item()
    link = api._attached.link
    number = stored(link, link.recovery.number)
    first = chunks(folder)
    for b in buffers[::10]:
        b.normal_()
    stored(link, max(number, link.recovery.number) + 1)  # the next cut may be before the writes
    second = chunks(folder)
    stored_bytes = [
        sum(now[name] for name in now.keys() - old.keys()) for old, now in ((before, first), (first, second))
    ]
    return *stored_bytes, 4 * MIB * len(buffers[::10])


def chunks(folder):
    """Bytes of each chunk, by name."""
    return {p.name: p.stat().st_size for p in folder.glob("*/chunks/*")}


# -- the measuring process -----------------------------------------------------------------------------------------------


class Bench:
    """A cluster of two executors. One that has ended is started again after the script, so that its start, which would be on
    another machine, takes no cores from what is measured.
    """

    def __init__(self, folder, stack):
        from wooly_testkit.cluster import Cluster, Tenant

        self.folder, self.checkpoints = folder, folder / "checkpoints"
        executor = {
            "CHECKPOINTS": str(self.checkpoints),
            "HEARTBEAT_S": "0.5",
            "RUNTIME": "auto",
            "MEMORY": str(4 << 30),
        }
        self.cluster = Cluster(folder, stack, executors=("a", "b"), executor=executor)
        self.tenant = Tenant(self.cluster, "bench", class_ceiling=0)
        stack.callback(self.tenant.control.close)
        self.pids = folder / "pids"
        self.pids.mkdir()
        for name in "ab":
            self._note(name)

    def _note(self, name):
        (self.pids / name).write_text(str(self.cluster.processes[name].pid))

    def _start_again(self):
        for name in "ab":
            if self.cluster.processes[name].poll() is not None:
                starts = self._starts(name)
                self.cluster.start(name)
                self._note(name)
                self.cluster.wait(lambda name=name, starts=starts: self._starts(name) > starts)

    def _starts(self, name):
        return self.cluster.log(name).count(f"executor {name} serves ")

    def run(self, mode, *arguments, launcher=(), **settings):
        """Run a mode of this file as a script of the tenant. Returns what it, or one of its ranks, measured."""
        from wooly_testkit import forks

        env = self.tenant.env(**settings) | {"PIDS": str(self.pids), "CHECKPOINTS": str(self.checkpoints)}
        env |= {"PYTHONPATH": str(Path(__file__).parent)}
        done = forks.run("wooly", "run", *launcher, __file__, CHILD, mode, *map(str, arguments), env=env, timeout=600)
        assert done.returncode == 0, done.stderr
        self._start_again()
        found = [json.loads(line) for line in done.stdout.splitlines() if line[:1] in "[0123456789"]
        assert len(found) == 1, done.stdout
        return found[0]


def cost(bench, pairs, name, mode, argument, goal):
    measured = {"off": [], "on": []}
    for _ in range(pairs):
        for recovery in measured:
            measured[recovery].append(bench.run(mode, argument, RECOVERY=recovery))
    off, on = (statistics.median(measured[r]) * 1e3 for r in ("off", "on"))
    spread = f"{min(measured['on']) * 1e3:.2f}-{max(measured['on']) * 1e3:.2f}"
    return row(name, "ms", on, off, goal, spread=spread)


def of_ranks(bench, pairs):
    launcher = ("--gpus", "2", "torchrun", "--standalone", "--nproc-per-node", "2")
    measured = {"off": [], "on": []}
    for _ in range(pairs):
        for recovery in measured:
            measured[recovery].append(bench.run("ranks", 10, launcher=launcher, RECOVERY=recovery)[0] * 1e3)
    off, on = (statistics.median(measured[r]) for r in ("off", "on"))
    spread = f"{min(measured['on']):.2f}-{max(measured['on']):.2f}"
    yield row("ranks: step of DDP", "ms", on, off, 1.03, spread=spread)
    longest = [bench.run("ranks", 10, "lost", launcher=launcher, RECOVERY="on")[1] for _ in range(max(pairs // 2, 1))]
    yield row("ranks: longest step with a loss", "s", statistics.median(longest), None, 5)


def losses(bench, pairs):
    for size in SIZES:
        took = [bench.run("loss", size, RECOVERY="on", CHECKPOINT_S="0") for _ in range(max(pairs // 2, 1))]
        ours, copying = (statistics.median(x) for x in zip(*took, strict=True))
        yield row(f"loss: {size} MiB to the first result", "s", ours, copying, 3, against="value")


def second_checkpoint(bench):
    first, second, written = bench.run("bytes", 400, RECOVERY="on", CHECKPOINT_S="0")
    yield row("bytes: first checkpoint of 400 MiB", "MiB", first / MIB, None, None)
    yield row("bytes: second checkpoint", "MiB", second / MIB, written / MIB, 1.02)


def beside(bench, pairs):
    """A P0 session beside a P4 session on one executor."""
    found = {"off": [], "on": []}
    for _ in range(max(pairs // 2, 1)):
        for recovery in found:
            stored = []

            def dirty(recovery=recovery, stored=stored):
                settings = {"PRIORITY": "4", "RECOVERY": recovery, "CHECKPOINT_S": "0", "NODE": "a"}
                stored.append(bench.run("dirty", 30, **settings))

            thread = threading.Thread(target=dirty)
            thread.start()
            time.sleep(8)
            found[recovery].append(bench.run("small", 12, PRIORITY="0", RECOVERY="off", NODE="a"))
            thread.join()
            assert (stored[0] > 0) == (recovery == "on"), stored
    alone = bench.run("small", 12, PRIORITY="0", RECOVERY="off", NODE="a")
    cuts, without = ([statistics.median(x) * 1e3 for x in zip(*found[r], strict=True)] for r in ("on", "off"))
    yield row("beside: p99 of a P0 step, P4 with checkpoints", "ms", cuts[0], without[0], 1.5)
    yield row("beside: median of a P0 step, P4 with checkpoints", "ms", cuts[1], without[1], 1.5)
    yield row("beside: p99 of a P0 step alone", "ms", alone[0] * 1e3, None, None)


def moved(bench):
    """Move a session during a training."""
    found = []
    thread = threading.Thread(target=lambda: found.append(bench.run("move", 30, RECOVERY="on")))
    thread.start()

    def running():
        tasks = bench.cluster.rest("GET", "tasks?limit=50")["tasks"]
        return [t["task_id"] for t in tasks if t["state"] == "started"]

    while not running():
        time.sleep(0.1)
    time.sleep(20)
    bench.cluster.rest("POST", f"tasks/{running()[0]}/move", {})
    thread.join()
    longest, step = found[0]
    yield row("move: longest step", "s", longest, step, 1, against="value")


def measure(only, pairs):
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wooly-")))
        bench = Bench(folder, stack)
        if "train" in only:
            yield cost(bench, pairs, "train: step", "train", 20, 1.03)
        if "decode" in only:
            yield cost(bench, pairs, "decode: 64 tokens", "decode", 12, 1.01)
        if "loss" in only:
            yield from losses(bench, pairs)
        if "bytes" in only:
            yield from second_checkpoint(bench)
        if "beside" in only:
            yield from beside(bench, pairs)
        if "ranks" in only:
            yield from of_ranks(bench, pairs)
        if "move" in only:
            yield from moved(bench)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="train,decode,loss,bytes,beside,move,ranks")
    parser.add_argument("--pairs", type=int, default=4)
    args = parser.parse_args()
    show(list(measure(args.only.split(","), args.pairs)), args.json)


if __name__ == "__main__":
    if sys.argv[1:2] == [CHILD]:
        print(
            json.dumps(
                {name[6:]: f for name, f in globals().items() if name.startswith("child_")}[sys.argv[2]](*sys.argv[3:])
            )
        )
    else:
        main()
