"""Measures the cost of a client: the device against local CPU PyTorch, both in this run, with one thread each.

The executor has no compiler; `--stack` measures with all services, as `wooly run` has them: frequent programs become plans.
`--profile` shows instead where the time of a sine and its `.item()` goes (`hops.py`).

Run: .venv/bin/python bench/client.py [--json] [--only NAME] [--repeat N] [--stack] [--profile]
"""

import argparse
import contextlib
import copy
import multiprocessing
import os
import statistics
import sys
import time
import warnings
from pathlib import Path

from figures import row, show
from hops import show_profile

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from wooly import api, native
from wooly_local.stack import start_stack
from wooly_testkit.delay_proxy import delay_proxy
from wooly_testkit.executor import executor_process


def timed(function, repeat, clock=time.perf_counter):
    """Return median and (min, max) of `repeat` runs, after one warm-up run."""
    function()
    found = []
    for _ in range(repeat):
        started = clock()
        function()
        found.append(clock() - started)
    return statistics.median(found), (min(found), max(found))


def chain(device, n=1000):
    x, y = torch.ones(64, 64, device=device), torch.ones(64, 64, device=device)

    def run():
        t = x
        for _ in range(n):
            t = t + y
        return t

    return run


def bench_chain(repeat):
    """Client CPU time of this thread per eager operation. The baseline is local PyTorch, which executes the operation."""
    ours, local = chain("cuda"), chain("cpu")

    def settle():
        ours()
        torch.cuda.synchronize()

    settle()
    found = []
    for _ in range(repeat):
        started = time.thread_time()
        result = ours()
        found.append((time.thread_time() - started) / 1000 * 1e6)
        del result
        torch.cuda.synchronize()
    base, _ = timed(local, repeat)
    spread = [round(min(found), 2), round(max(found), 2)]
    yield row("client CPU per eager op", "us", statistics.median(found), base * 1e3, 20, spread=spread, against="value")
    wall, _ = timed(settle, repeat)
    yield row("chain of 1,000 adds, wall", "ms", wall * 1e3, base * 1e3, 20)


def quartiles(found):
    """Median, and (lower quartile, upper quartile)."""
    low, middle, high = statistics.quantiles(found, n=4)
    return middle, [round(low, 2), round(high, 2)]


def prompts_of_deep_llama():
    """A prompt of a Llama in bfloat16 on the device and here: 16 layers that are so small that computing costs little."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    local = LlamaForCausalLM(config).to(torch.bfloat16).eval()

    def runner(device):
        model, ids = copy.deepcopy(local).to(device), torch.arange(4).unsqueeze(0).to(device)

        def run():
            with torch.no_grad():
                return model(ids, use_cache=False, logits_to_keep=1).logits

        return run

    ours, theirs = runner("cuda"), runner("cpu")
    assert torch.equal(ours().cpu(), theirs()), "the logits differ from the CPU's"
    return ours, theirs


def bench_native(repeat):
    """Client CPU time per operation with native kernels and in Python, in turn: eager adds; forward and backward of an MLP; the
    prompt of a Llama.

    An operation of the MLP or the Llama is one that the dispatcher gives to the device, views included. The baseline is local
    PyTorch, which also computes. The spread is the quartiles.
    """

    def perceptron(device):
        torch.manual_seed(0)
        layers = [m for _ in range(4) for m in (nn.Linear(64, 64), nn.ReLU())]
        model, x = nn.Sequential(*layers, nn.Linear(64, 10)).to(device), torch.randn(32, 64).to(device)
        parameters = list(model.parameters())

        def run(steps=10):
            for _ in range(steps):
                model(x).sum().backward()
                for p in parameters:
                    p.grad = None

        return run

    class Count(TorchDispatchMode):
        n = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.n += 1
            return func(*args, **(kwargs or {}))

    work = {
        "chain": (chain("cuda"), chain("cpu")),
        "MLP": (perceptron("cuda"), perceptron("cpu")),
        "Llama": prompts_of_deep_llama(),
    }
    operations = {"chain": 1000}
    for name in ("MLP", "Llama"):
        work[name][0]()
        with Count() as counted:
            work[name][0]()
        operations[name] = counted.n
    ways = ("native", "Python") if native.module is not None else ("Python",)
    for name, (ours, local) in work.items():
        found = {way: [] for way in (*ways, "local")}
        for _ in range(4 * repeat):
            for way in found:
                function = local if way == "local" else ours
                if way != "local":
                    native.switch("off" if way == "Python" else "auto")
                    function()
                    torch.cuda.synchronize()
                started = time.thread_time()
                result = function()
                found[way].append((time.thread_time() - started) / operations[name] * 1e6)
                del result
                torch.cuda.synchronize()
        native.switch("auto")
        base, _ = quartiles(found["local"])
        for way in ways:
            goal = {"chain": (3.5, 9), "MLP": (4, 12), "Llama": (7, 15)}[name][way == "Python"]
            value, spread = quartiles(found[way])
            label = {
                "chain": "client CPU per eager op",
                "MLP": "client CPU per op, forward and backward of an MLP",
                "Llama": "client CPU per op, prompt of a Llama of 16 layers",
            }[name]
            yield row(f"{label}, {way}", "us", value, base, goal, spread=spread, against="value")


def add_one(x):
    """Add 1 in place."""
    x.add_(1)


def bench_item(repeat):
    """An operation, and reading its value. The client computes the sum itself; the sine waits for the device."""
    x = torch.ones(4, device="cuda")
    one = torch.ones(4)
    for name, change in (("add + .item(), computed here", add_one), ("sine + .item(), a wait", torch.sin_)):

        def ours(change=change):
            for _ in range(100):
                change(x)
                x[0].item()

        def local(change=change):
            for _ in range(100):
                change(one)
                one[0].item()

        a, spread = timed(ours, repeat)
        b, _ = timed(local, repeat)
        spread = [round(s * 1e4, 1) for s in spread]
        yield row(name, "us", a * 1e4, b * 1e4, 110, spread=spread, against="value")
    y = x.sum()
    y.item()
    a, _ = timed(lambda: [y.item() for _ in range(1000)], repeat)
    yield row(".item() again, unchanged", "us", a * 1e3, None, 10, against="value")


def decisions(device):
    """Scripts that decide by small values: uploaded ones, and one that was computed and is compared ten times."""
    limits, x = torch.linspace(0, 100, 64).to(device), torch.ones(64, 64).to(device)

    def uploaded():
        for k in range(100):
            bool(limits[k % 64] > 50)

    def computed():
        for _ in range(10):
            total = x.exp().sum()
            for limit in range(10):
                bool(total > limit)

    return uploaded, computed


def bench_decisions(repeat):
    """Decisions by a value that the client knows."""
    for name, ours, local in zip(
        ("an uploaded value", "a value read once"), decisions("cuda"), decisions("cpu"), strict=True
    ):
        a, spread = timed(ours, repeat)
        b, _ = timed(local, repeat)
        spread = [round(s * 1e4, 1) for s in spread]
        yield row(f"decision by {name}", "us", a * 1e4, b * 1e4, None, spread=spread)


#: Calls after which a loop is in its steady state: its programs have become longer, and their steps are combined.
WARM = 40


def pair(ours, local, repeat, warm=1):
    """Run both sides in turn. Returns the medians and the spread of the ratio.

    The first `warm` runs do not count.
    """
    for _ in range(warm):
        ours(), local()
    a, b = [], []
    for _ in range(repeat):
        for function, found in ((ours, a), (local, b)):
            started = time.perf_counter()
            function()
            found.append(time.perf_counter() - started)
    ratios = sorted(x / y for x, y in zip(a, b, strict=True))
    return statistics.median(a), statistics.median(b), [round(ratios[0], 2), round(ratios[-1], 2)]


def bench_mlp(repeat):
    """One training step of an MLP 784-512-10 with batch size 64, Adam and SGD, in the steady state of a loop."""
    for name, make, goal in (
        ("Adam", lambda p: torch.optim.Adam(p), 0.8),
        ("SGD", lambda p: torch.optim.SGD(p, lr=0.1), 1.0),
    ):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))
        x, y = torch.randn(64, 784), torch.randint(0, 10, (64,))

        def trainer(device, model=model, make=make, x=x, y=y):
            mine = copy.deepcopy(model).to(device)
            opt, a, b = make(mine.parameters()), x.to(device), y.to(device)

            def run(n=20):
                for _ in range(n):
                    loss = nn.functional.cross_entropy(mine(a), b)
                    opt.zero_grad()
                    loss.backward()
                    opt.step()
                return loss.item()

            return run

        a, b, spread = pair(trainer("cuda"), trainer("cpu"), repeat, warm=WARM)
        yield row(f"MLP step, {name}", "ms", a / 20 * 1e3, b / 20 * 1e3, goal, spread=spread)


def bench_loss(repeat):
    """A training loop that reads its loss at every step, and the same loop without this, in turn.

    The baseline of each ratio is the loop without it. `Adam` is the step of `bench_mlp`.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))
    x, y = torch.randn(64, 784), torch.randint(0, 10, (64,))

    def trainer(device, read):
        mine = copy.deepcopy(model).to(device)
        opt, a, b = torch.optim.Adam(mine.parameters()), x.to(device), y.to(device)

        def run(n=20):
            losses = []
            for _ in range(n):
                loss = nn.functional.cross_entropy(mine(a), b)
                opt.zero_grad()
                loss.backward()
                opt.step()
                losses.append(loss.item() if read else loss)
            return losses[-1] if read else losses[-1].item()

        return run

    reads, without = trainer("cuda", True), trainer("cuda", False)
    for _ in range(3):
        assert reads() == without(), "the losses differ"
    a, b, spread = pair(reads, without, repeat)
    yield row("MLP step with loss.item(), against without", "ms", a / 20 * 1e3, b / 20 * 1e3, 1.3, spread=spread)


def bench_graph(repeat):
    """One training step of the same MLP with SGD, captured as a CUDA graph.

    The baseline is the same step on the device, eager.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))
    x, y = torch.randn(64, 784).to("cuda"), torch.randint(0, 10, (64,)).to("cuda")

    def trainer():
        mine = copy.deepcopy(model).to("cuda")
        opt = torch.optim.SGD(mine.parameters(), lr=0.1)

        def step():
            opt.zero_grad()
            loss = nn.functional.cross_entropy(mine(x), y)
            loss.backward()
            opt.step()
            return loss

        return step

    eager, captured = trainer(), trainer()
    captured(), eager()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graphed_loss = captured()
    cpu = ([], [])

    def runner(step, loss_of, found):
        def run(n=20):
            started = time.thread_time()
            for _ in range(n):
                loss = step()
            found.append((time.thread_time() - started) / n)
            return loss_of(loss).item()

        return run

    ours = runner(graph.replay, lambda _: graphed_loss, cpu[0])
    theirs = runner(eager, lambda loss: loss, cpu[1])
    assert ours() == theirs(), "the losses differ from the eager step's"
    a, b, spread = pair(ours, theirs, repeat)
    yield row("MLP step, CUDA graph against eager", "ms", a / 20 * 1e3, b / 20 * 1e3, 1.0, spread=spread)
    graphed, step = [statistics.median(found) * 1e3 for found in cpu]
    yield row("client CPU per step, CUDA graph against eager", "ms", graphed, step, 0.1)


def llama(positions=256):
    """Return a Llama (4 layers, hidden 256, vocabulary 1,000, random weights) here and on the device, a prompt, and a function
    that generates.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        max_position_embeddings=positions,
    )
    local = LlamaForCausalLM(config).eval()
    ours = copy.deepcopy(local).to("cuda")

    def generate(model, ids, **options):
        return model.generate(ids, max_new_tokens=64, min_new_tokens=64, do_sample=False, pad_token_id=0, **options)

    return local, ours, torch.arange(5, 13).unsqueeze(0), generate


def bench_llama(repeat):
    """64 tokens, greedy, operation by operation."""
    local, ours, prompt, generate = llama()
    there = prompt.to("cuda")
    assert torch.equal(generate(ours, there).cpu(), generate(local, prompt)), "the tokens differ from the CPU's"
    before = time.thread_time()
    generate(ours, there).cpu()
    cpu = (time.thread_time() - before) / 64 * 1e3
    a, b, spread = pair(lambda: generate(ours, there).cpu(), lambda: generate(local, prompt), repeat)
    yield row("Llama, 64 tokens", "ms/token", a / 64 * 1e3, b / 64 * 1e3, 1.1, spread=spread)
    yield row("Llama, client CPU", "ms/token", cpu, b / 64 * 1e3, None)


def bench_lengths(repeat):
    """64 tokens, greedy, at lengths that neither the session nor the executor has seen: the programs of each token are new."""
    local, ours, _, generate = llama(positions=4096)
    prompts = [torch.randint(1000, (1, 80 * k)) for k in range(1, repeat + 2)]
    there, here = [[prompt.to(where) for prompt in prompts] for where in ("cuda", "cpu")]
    tokens, expected = [], []
    a, b, spread = pair(
        lambda: tokens.append(generate(ours, there[len(tokens)]).cpu()),
        lambda: expected.append(generate(local, here[len(expected)])),
        repeat,
    )
    assert all(map(torch.equal, tokens, expected)), "the tokens differ from the CPU's"
    yield row("Llama, 64 tokens at new lengths", "ms/token", a / 64 * 1e3, b / 64 * 1e3, None, spread=spread)


def bench_compiled(repeat):
    """64 tokens, greedy, with a static cache: Transformers compiles the decode step, and checks one step late whether to stop
    (ADR 30).

    The baseline is local eager PyTorch. Client and executor compute at the same time, so this measurement needs two free cores.
    """
    local, ours, prompt, generate = llama()
    there = prompt.to("cuda")
    static = {"cache_implementation": "static"}
    assert torch.equal(generate(ours, there, **static).cpu(), generate(local, prompt)), (
        "the tokens differ from the CPU's"
    )
    a, b, spread = pair(lambda: generate(ours, there, **static).cpu(), lambda: generate(local, prompt), repeat)
    yield row("Llama compiled, 64 tokens", "ms/token", a / 64 * 1e3, b / 64 * 1e3, 0.8, spread=spread)

    from transformers import StaticCache

    step = torch.compile(ours.forward)
    cache = StaticCache(ours.config, max_cache_len=256)
    token = torch.tensor([[5]], device="cuda")
    found = []
    with torch.no_grad():
        for _ in range(8):
            step(token, past_key_values=cache)
        for _ in range(100):
            torch.cuda.synchronize()
            started = time.thread_time()
            step(token, past_key_values=cache)
            found.append((time.thread_time() - started) * 1e3)
        torch.cuda.synchronize()
    found.sort()
    yield row(
        "compiled decode step, client CPU", "ms", statistics.median(found), b / 64 * 1e3, 1.5, against="value",
        spread=[round(found[0], 2), round(found[-1], 2)],
    )  # fmt: skip


def bench_transfer(repeat):
    """256 MB over the unix socket. The baseline is a copy in memory."""
    host = torch.randn(64 << 20)
    there = torch.empty(64 << 20, device="cuda")
    back = torch.empty(64 << 20)
    gigabytes = host.nbytes / 1e9

    def up():
        there.copy_(host)
        torch.cuda.synchronize()

    def down():
        there.add_(0)
        torch.cuda.synchronize()
        started = time.perf_counter()
        back.copy_(there)
        return time.perf_counter() - started

    copied, _ = timed(lambda: back.copy_(host), repeat)
    a, spread = timed(up, repeat)
    yield row(
        "upload 256 MB", "GB/s", gigabytes / a, gigabytes / copied, 1.0, higher_is_better=True, against="value",
        spread=[round(gigabytes / s, 2) for s in reversed(spread)],
    )  # fmt: skip
    down()
    found = [down() for _ in range(repeat)]
    assert torch.equal(back, host)
    yield row(
        "download 256 MB", "GB/s", gigabytes / statistics.median(found), gigabytes / copied, 1.0, higher_is_better=True,
        against="value", spread=[round(gigabytes / max(found), 2), round(gigabytes / min(found), 2)],
    )  # fmt: skip


def distant(target, one_way_s, pipe):
    """Start a process that delays all bytes to and from `target`."""
    with delay_proxy(target, one_way_s) as endpoint:
        pipe.send(endpoint)
        pipe.recv()


def bench_link(repeat):
    """1,000 adds and their result over a link with a round trip of 20 ms.

    The baseline is the same over the loopback interface.
    """
    context = multiprocessing.get_context("spawn")
    found = {}
    for one_way_s in (0.0, 0.010):
        api.disable()
        with executor_process() as running:
            pipe, theirs = context.Pipe()
            proxy = context.Process(target=distant, args=(running.endpoints[0], one_way_s, theirs), daemon=True)
            proxy.start()
            api.attach([pipe.recv()], running.session_id, running.token)
            api.install_facade()
            work = chain("cuda")
            found[one_way_s] = timed(lambda work=work: work()[0, 0].item(), repeat)
            api.disable()
            pipe.send(None)
            proxy.join()
    (near, _), (far, (least, most)) = found[0.0], found[0.010]
    trip = 20.0
    yield row(
        "chain of 1,000 adds over 20 ms, less one trip", "ms", far * 1e3 - trip, near * 1e3, 1.1,
        spread=[round(least * 1e3 - trip, 1), round(most * 1e3 - trip, 1)],
    )  # fmt: skip


def bench_far_item(repeat):
    """A sine and its value over a network with a round trip of 10 ms, less 1.15 round trips."""
    context = multiprocessing.get_context("spawn")
    trip_s = 0.010
    api.disable()
    with executor_process() as running:
        pipe, theirs = context.Pipe()
        proxy = context.Process(target=distant, args=(running.endpoints[0], trip_s / 2, theirs), daemon=True)
        proxy.start()
        api.attach([pipe.recv()], running.session_id, running.token)
        api.install_facade()
        x = torch.ones(4, device="cuda")

        def ours():
            x.sin_()  # the client would compute a sum itself
            x[0].item()

        for _ in range(20):
            ours()
        a, spread = timed(ours, 8 * repeat)
        api.disable()
        pipe.send(None)
        proxy.join()
    less = 1.15 * trip_s
    spread = [round((s - less) * 1e6, 1) for s in spread]
    yield row(
        "sine + .item() over 10 ms, less 1.15 trips", "us", (a - less) * 1e6, None, 60, spread=spread, against="value"
    )


def cpu_ns(pid):
    """Return the CPU time of all threads of a process."""
    return sum([int(p.read_text().split()[0]) for p in Path(f"/proc/{pid}/task").glob("*/schedstat")])


def bench_loop(repeat):
    """What the executor's device thread does beside the device's work in a busy session, as a share of the device time: frames,
    decisions, bills, answers.

    Both are CPU times of that thread, so other processes matter little. The client is ahead of the device and reads nothing; a
    thread that looks for frames would count, too.
    """
    api.disable()
    with executor_process() as running:
        api.attach(running.endpoints, running.session_id, running.token)
        api.install_facade()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10)).to("cuda")
        opt = torch.optim.Adam(model.parameters())
        x, y = torch.randn(64, 784).to("cuda"), torch.randint(0, 10, (64,)).to("cuda")
        small, one = torch.ones(4, device="cuda"), torch.ones(4, device="cuda")
        _, far, _, _ = llama()
        ids = torch.randint(1000, (4, 128)).to("cuda")

        def training():
            for _ in range(60):
                loss = nn.functional.cross_entropy(model(x), y)
                opt.zero_grad()
                loss.backward()
                opt.step()

        def forward():
            with torch.no_grad():
                for _ in range(4):
                    far(ids)

        def tiny():
            for _ in range(2000):
                small.add_(one)

        recorder = api._attached.device.devices.recorders[0]

        def clocks():
            """CPU time of each thread of the executor, and device time, in ns, when all work is done."""
            torch.cuda.synchronize()
            with recorder.lock:
                work = api._attached.link.stats()["work"]
            device = sum([work[name] for name in ("kernel_ns", "library_ns", "tier0_ns")])
            tasks = Path(f"/proc/{running.process.pid}/task")
            return {p.name: int((p / "schedstat").read_text().split()[0]) for p in tasks.iterdir()}, device

        for name, work, goal in (
            ("training of an MLP", training, 0.05),
            ("forward passes of a Llama", forward, 0.05),
            ("additions of 4 numbers", tiny, None),
        ):
            for _ in range(WARM):
                work()
            found = []
            for _ in range(repeat + 1):
                threads, device = clocks()
                work()
                after, device_after = clocks()
                spent = max(ns - threads.get(thread, 0) for thread, ns in after.items())
                device = device_after - device
                found.append((spent - device) / device)
            del found[0]
            yield row(
                f"device thread beside the device's work, {name}", "share", statistics.median(found), None, goal,
                spread=[round(min(found), 3), round(max(found), 3)],
            )  # fmt: skip
        api.disable()


def bench_traces(repeat):
    """The cost of a traced session. The baseline is an unsampled session on the same executor, in turn.

    The measure is CPU time, because the machine has other work. A launch counts the time of this thread and of the executor's
    process. The result is the lower quartile of many short measurements in turn, which other processes disturb least.
    """
    from wooly.settings import Settings
    from wooly_local.stack import start_stack

    api.disable()
    stack = start_stack(None, ephemeral=True)
    executor = next(pid for name, pid in stack.services.items() if name.startswith("executor"))
    settings = Settings(controller_url=stack.nats_url, nats_creds=stack.creds)
    found = {"always_on": ([], []), "always_off": ([], [])}
    for i in range(6 * repeat):
        for sampler in ("always_on", "always_off")[:: 1 if i % 2 else -1]:
            os.environ["OTEL_TRACES_SAMPLER"] = sampler
            api.enable(settings)
            work, x = chain("cuda"), torch.ones(4, device="cuda")
            work(), x.add_(1)
            torch.cuda.synchronize()
            for _ in range(6):
                started = time.thread_time_ns()
                work()
                found[sampler][0].append(time.thread_time_ns() - started)
                torch.cuda.synchronize()
            for _ in range(6):
                started, theirs = time.thread_time_ns(), cpu_ns(executor)
                for _ in range(125):
                    x.add_(1)
                    torch.cuda.synchronize()
                found[sampler][1].append((time.thread_time_ns() - started + cpu_ns(executor) - theirs) * 8)
            api.disable()
    del os.environ["OTEL_TRACES_SAMPLER"]
    stack.stop()
    for at, name in enumerate(("client CPU per eager op, traced", "CPU per launch, traced")):
        ours, base = [statistics.quantiles(found[s][at], n=4)[0] / 1e6 for s in found]
        yield row(name, "us", ours, base, 1.02)


BENCHES = {
    "chain": bench_chain,
    "native": bench_native,
    "item": bench_item,
    "decisions": bench_decisions,
    "mlp": bench_mlp,
    "loss": bench_loss,
    "graph": bench_graph,
    "llama": bench_llama,
    "lengths": bench_lengths,
    "compiled": bench_compiled,
    "transfer": bench_transfer,
    "link": bench_link,  # this one and the next three attach to their own executors
    "far_item": bench_far_item,
    "loop": bench_loop,
    "traces": bench_traces,
}


@contextlib.contextmanager
def executor_alone():
    """A session with an executor that has no compiler."""
    with executor_process() as running:
        api.attach(running.endpoints, running.session_id, running.token)
        api.install_facade()
        yield


@contextlib.contextmanager
def whole_stack():
    """A session of a local stack, as `wooly run` opens it."""
    stack = start_stack(ephemeral=True)
    try:
        os.environ.update(stack.client_env)
        api.enable()
        yield
    finally:
        api.disable()
        stack.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--only", choices=BENCHES)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--stack", action="store_true", help="with all services: frequent programs become plans")
    parser.add_argument("--profile", action="store_true", help="show where the time of a sine and its .item() goes")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.profile:
        show_profile(args.json)
        sys.stdout.flush()
        os._exit(0)
    torch.set_num_threads(1)
    with whole_stack() if args.stack else executor_alone():
        rows = []
        for name, bench in BENCHES.items():
            if args.only in (None, name):
                rows += bench(args.repeat)
        api.disable()
    show(rows, args.json, baseline="local")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
