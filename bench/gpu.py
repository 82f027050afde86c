"""One GPU, used by eager PyTorch and by Wooly: prefill, decode and training of a Llama-shaped model.

Scripts run as they are, with `torch.compile` (`compiled`), and with a CUDA graph of their own (`replay`). Each figure is measured
twice on the same card: by processes that use PyTorch's own CUDA, and by clients of one executor that computes on that card,
through a nats-server. First one process works alone, then two at the same time, then a request of priority P0 beside training of
priority P4. The weights are given by a formula, so both sides compute the same numbers, and their logits and losses are compared.

Needs an NVIDIA GPU; `--fake` runs the same code on the CPU with a tiny model, for the shape of the table only. The section
`thread` needs no GPU: what the executor's device thread costs per library call, with the GPU runtime on the tests' fake GPU.

Run: .venv/bin/python bench/gpu.py [--json] [--fake] [--seconds N] [--size NAME] [--only SECTION,...]
"""

import argparse
import contextlib
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from figures import row, show

SECTIONS = (
    "thread",
    "ceilings",
    "prefill",
    "compiled",
    "decode",
    "replay",
    "train",
    "train_compiled",
    "two",
    "priority",
    "swap",
)
TOKEN, EXECUTOR = "bench", "bench"
#: Number of warm-up runs of each kind of work. Afterwards, programs have their final form and their graphs.
WARM = {"prefill": 12, "compiled": 40, "decode": 3, "replay": 3, "train": 16, "train_compiled": 40, "resident": 1}
#: Tensors of each of two sessions that take turns on a device that has room for one, and their bytes; with `--fake`, a 64th.
BLOCKS, BLOCK = 24, 1 << 28
#: Shapes: hidden size, layers, heads, key-value heads, size of the MLP, vocabulary; then tokens of a prompt and of an answer,
#: then rows and tokens of a training batch.
SIZES = {
    "tiny": ((64, 2, 4, 2, 128, 256), (64, 8), (2, 32)),
    "small": ((768, 12, 12, 12, 2048, 32000), (1024, 64), (8, 1024)),
    "1b": ((2048, 16, 32, 8, 8192, 32000), (2048, 64), (2, 1024)),
    "7b": ((4096, 32, 32, 8, 14336, 32000), (2048, 64), (1, 512)),
}


# -- a process that works ----------------------------------------------------------------------------------------------


def model_of(size, device, dtype):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers, heads, kv, mlp, vocabulary = SIZES[size][0]
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        intermediate_size=mlp,
        vocab_size=vocabulary,
        max_position_embeddings=4096,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(dtype).to_empty(device=device)
    with torch.no_grad():
        for k, (name, p) in enumerate(model.named_parameters()):
            if "norm" in name:
                p.fill_(1.0)
                continue
            steps = torch.arange(p.numel(), device=device, dtype=torch.float32)
            # a hash of the position: values without a pattern, the same on every device
            p.copy_((torch.sin(steps * 12.9898 + k) * 43758.547).frac().mul_(0.06).view_as(p))
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)
    return model, config


def prompt(size, device, rows=1):
    import torch

    length = SIZES[size][1][0]
    ids = (torch.arange(rows * length) * 7919 % SIZES[size][0][5]).view(rows, length)
    return ids.to(device)


def prefill(size, device, compile_it=False):
    """The logits of a prompt, and reading the best token."""
    import torch

    model, _ = model_of(size, device, torch.bfloat16)
    model.eval()
    ids, forward = prompt(size, device), torch.compile(model, dynamic=False) if compile_it else model

    def run():
        with torch.no_grad():
            logits = forward(ids, use_cache=False, logits_to_keep=1).logits
            return logits[0, -1].argmax().item(), logits

    return run, ids.shape[1]


def compiled(size, device):
    """The same with a model that the script compiles with `torch.compile`."""
    return prefill(size, device, compile_it=True)


def decode(size, device):
    """An answer after a short prompt, token by token, with a cache of fixed size. The tokens are read at the end."""
    import torch
    from transformers import StaticCache

    model, config = model_of(size, device, torch.bfloat16)
    model.eval()
    ids, tokens = prompt(size, device)[:, :16], SIZES[size][1][1]
    cache = StaticCache(config=config, max_cache_len=16 + tokens + 1)

    def run():
        with torch.no_grad():
            cache.reset()
            logits = model(ids, past_key_values=cache, cache_position=torch.arange(16, device=device)).logits
            found = [logits[:, -1:].argmax(-1)]
            at = torch.full((1,), 16, device=device)
            for _ in range(tokens - 1):
                logits = model(found[-1], past_key_values=cache, cache_position=at).logits
                found.append(logits[:, -1:].argmax(-1))
                at = at + 1
            return torch.cat(found, 1).cpu(), logits

    return run, tokens


def replay(size, device):
    """The same answers, but a step is captured once as a CUDA graph by the script, and replayed for each token."""
    import torch
    from transformers import StaticCache

    model, config = model_of(size, device, torch.bfloat16)
    model.eval()
    ids, tokens = prompt(size, device)[:, :16], SIZES[size][1][1]
    cache = StaticCache(config=config, max_cache_len=16 + tokens + 1)
    token, at = torch.zeros((1, 1), dtype=torch.long, device=device), torch.zeros((1,), dtype=torch.long, device=device)
    answer = torch.zeros((1, tokens), dtype=torch.long, device=device)

    def step():
        logits = model(token, past_key_values=cache, cache_position=at).logits
        token.copy_(logits[:, -1:].argmax(-1))
        at.add_(1)
        answer.index_copy_(1, at - 16, token)
        return logits

    def begin():
        cache.reset()
        logits = model(ids, past_key_values=cache, cache_position=torch.arange(16, device=device)).logits
        token.copy_(logits[:, -1:].argmax(-1))
        at.fill_(16)
        answer.index_copy_(1, at - 16, token)

    with torch.no_grad():
        begin()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = step()

    def run():
        with torch.no_grad():
            begin()
            for _ in range(tokens - 1):
                graph.replay()
            return answer.cpu(), logits

    return run, tokens


def train(size, device, compile_it=False):
    """A step of AdamW under autocast to bfloat16. The loss is read every tenth step, as training loops do."""
    import torch

    model, config = model_of(size, device, torch.float32)
    forward = torch.compile(model, dynamic=False) if compile_it else model
    rows, length = SIZES[size][2]
    ids = (torch.arange(rows * length) * 104729 % config.vocab_size).view(rows, length).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    kind, steps = torch.device(device).type, [0]

    def run():
        with torch.autocast(kind, dtype=torch.bfloat16):
            loss = forward(ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps[0] += 1
        return (loss.item() if steps[0] % 10 == 0 else None), loss

    return run, rows * length


def train_compiled(size, device):
    """The same step with a model that the script compiles with `torch.compile`."""
    return train(size, device, compile_it=True)


def resident(size, device):
    """Memory that a session has, and one read from it: after a pause, the session must come back for it."""
    import torch

    block = BLOCK >> 6 if size == "tiny" else BLOCK
    held = [torch.full((block // 4,), float(k), device=device) for k in range(BLOCKS)]

    def run():
        total = sum(one[-1] for one in held)
        return total.item(), total

    return run, BLOCKS * block


WORK = {
    "resident": resident,
    "prefill": prefill,
    "compiled": compiled,
    "decode": decode,
    "replay": replay,
    "train": train,
    "train_compiled": train_compiled,
}


def worker(side, size, device, endpoint, session):
    """For each line ``work seconds`` on standard input, work for that time and answer with a line of JSON.

    The first time, the work is prepared and warmed up, too. With 0 seconds, nothing else is done.
    """
    import torch

    if side == "ours":
        from wooly import api

        api.attach([endpoint], session, TOKEN)
        api.install_facade()
    settle = torch.cuda.synchronize if device == "cuda" else lambda: None
    known = {}
    for line in sys.stdin:
        work, seconds = line.split()
        if work not in known:
            run, tokens = WORK[work](size, device)
            _, first = run()
            first = first.detach().float().cpu()
            known[work] = (
                run,
                tokens,
                hashlib.sha256(first.numpy().tobytes()).hexdigest()[:16],
                float(first.abs().mean()),
            )
            for _ in range(WARM[work] - 1):
                run()
            settle()
        run, tokens, digest, number = known[work]
        asked, cpu = time.perf_counter(), time.process_time()
        until, times = asked + float(seconds), []
        while float(seconds) and (time.perf_counter() < until or len(times) < 3):
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
        settle()
        took = time.perf_counter() - asked
        found = {"times": times, "rate": len(times) * tokens / took, "busy": (time.process_time() - cpu) / took}
        print(json.dumps(found | {"digest": digest, "number": number}), flush=True)
    os._exit(0)


def ceilings(device):
    """Bytes per second of a copy on the device, and operations per second of a product."""
    import torch

    def least(call):
        found = []
        for k in range(15):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            end.synchronize()
            if k >= 5:
                found.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(found)

    source = torch.randn(1 << 28, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / least(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    computed = 2 * 8192**3 / least(lambda: a @ b)
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    memory = target.view(torch.uint8)[: 1 << 28]
    up = host.nbytes / least(lambda: memory.copy_(host, non_blocking=True))
    print(json.dumps({"copy GB/s": copied / 1e9, "bf16 TFLOP/s": computed / 1e12, "host to device GB/s": up / 1e9}))


# -- both sides --------------------------------------------------------------------------------------------------------


class Worker:
    """A process that works, native or as a client."""

    def __init__(self, argv, environment):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        argv = [sys.executable, __file__, "--worker", *argv]
        self.process = subprocess.Popen(argv, text=True, env=environment, **pipes)

    def begin(self, work, seconds):
        self.process.stdin.write(f"{work} {seconds}\n")
        self.process.stdin.flush()

    def end(self):
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process ended with status {self.process.wait()}: {self.process.args[3:]}")
        return json.loads(line)

    def close(self):
        self.process.kill()
        self.process.wait()


class Native:
    """Processes that use PyTorch's own device."""

    def __init__(self, options):
        self._device, self._size = "cpu" if options.fake else "cuda", options.size

    def thread_times(self):
        """There is no executor."""
        return {}

    def profile(self, work, run):
        """There is no executor."""

    @contextlib.contextmanager
    def workers(self, *wanted):
        """Start a process for each priority."""
        found = []
        try:
            for _ in wanted:
                found.append(Worker(["native", self._size, self._device, "-", "-"], dict(os.environ)))
            yield found
        finally:
            for one in found:
                one.close()


class Ours:
    """A nats-server, an executor on the device, and its clients, which see no GPU."""

    def __init__(self, options, url, directory, **settings):
        from wooly_bus.rpc import ControlClient

        environment = {k: v for k, v in os.environ.items() if not k.startswith("WOOLY_EXECUTOR_")} | {
            "WOOLY_EXECUTOR_NATS_URL": url,
            "WOOLY_EXECUTOR_ID": EXECUTOR,
            "WOOLY_EXECUTOR_STATE_DIR": str(directory),
            "WOOLY_EXECUTOR_RUNTIME": "torch_cpu" if options.fake else "cuda",
            "WOOLY_EXECUTOR_GRAPHS": str(options.graphs),
            **{f"WOOLY_EXECUTOR_{name}": str(value) for name, value in settings.items()},
        }
        self.log = Path(directory) / "executor.log"
        with self.log.open("wb") as log:
            self._executor = subprocess.Popen(
                [sys.executable, "-m", "wooly_executor"], env=environment, stdout=log, stderr=log
            )
        self._control, self._count, self._size = ControlClient(url), 0, options.size
        self._profiles = options.profiles

    def _ask(self, rpc, message):
        from wooly_bus.errors import BusError

        deadline = time.monotonic() + 90
        while True:
            try:
                return self._control.request(rpc.at(EXECUTOR), message)
            except BusError:
                if time.monotonic() > deadline or self._executor.poll() is not None:
                    raise RuntimeError(f"the executor does not answer:\n{self.log.read_text()[-3000:]}") from None
                time.sleep(0.1)

    @contextlib.contextmanager
    def workers(self, *wanted):
        """Start a client for each priority."""
        from wooly_bus import contracts
        from wooly_wis.messages import CloseSessionRequest, HostSessionRequest, SessionPolicy

        found, names = [], []
        try:
            for priority in wanted:
                self._count += 1
                name = f"tenant-{self._count}"
                request = HostSessionRequest(
                    session_id=name,
                    token=TOKEN,
                    tenant=name,
                    priority=priority,
                    # P0 may use the whole device: the measurement is about its latency, not about policing
                    policy=SessionPolicy(
                        priority=priority, **({} if priority else {"rate_permille": 1000, "burst_ns": 10**9})
                    ),
                    lease_s=3600,
                )
                reply = self._ask(contracts.EXECUTOR_SESSION_OPEN, request)
                names.append(name)
                environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
                found.append(Worker(["ours", self._size, "cuda", reply.endpoints[0], name], environment))
            yield found
        finally:
            for one in found:
                one.close()
            for name in names:
                with contextlib.suppress(RuntimeError):
                    self._ask(contracts.EXECUTOR_SESSION_CLOSE, CloseSessionRequest(session_id=name))

    def thread_times(self):
        """CPU time of each of the executor's threads so far, in seconds."""
        tasks = Path(f"/proc/{self._executor.pid}/task").iterdir()
        return {task.name: int((task / "schedstat").read_text().split()[0]) / 1e9 for task in tasks}

    def profile(self, work, run):
        """Record the executor's stacks with py-spy while `run` works, if a folder was given for them."""
        if self._profiles is None:
            return
        self._profiles.mkdir(parents=True, exist_ok=True)
        target = self._profiles / f"{self._size}_{work}.txt"
        argv = ["record", "--pid", str(self._executor.pid), "--rate", "400", "--threads", "--gil", "--format", "raw"]
        recorder = subprocess.Popen(["py-spy", *argv, "--output", str(target)], stdout=subprocess.DEVNULL)
        try:
            run()
        finally:
            recorder.send_signal(signal.SIGINT)
            recorder.wait()

    def close(self):
        self._executor.terminate()
        self._executor.wait()
        self._control.close()


def together(works, seconds):
    """Let processes work at the same time: pairs of a process and its work. Returns their reports."""
    for one, work in works:
        one.begin(work, seconds)
    return [one.end() for one, _ in works]


def percentile(times, share):
    times = sorted(times)
    return 1e3 * times[min(int(share * len(times)), len(times) - 1)]


def measure(side, options):
    """Return the figures of one side by name."""
    found, seconds = {}, options.seconds
    works = [work for work in WORK if work in options.sections]
    if options.fake and isinstance(side, Native):
        works = [work for work in works if work != "replay"]  # the CPU has no graphs
    if works:
        with side.workers(2) as (one,):
            for work in works:
                with attempt(found, work):
                    found[work] = alone(side, one, work, seconds)
    if "two" in options.sections:
        with side.workers(2, 2) as both:
            for work in options.two:
                with attempt(found, f"two {work}"):
                    together([(one, work) for one in both], 0)
                    reports = together([(one, work) for one in both], seconds)
                    found[f"two {work}"] = {"rate": sum(r["rate"] for r in reports)}
    if "priority" in options.sections:
        with attempt(found, "priority"), side.workers(0, 4) as (urgent, background):
            request, training = (urgent, "replay" if not options.fake else "decode"), (background, options.background)
            together([request, training], 0)
            (before,), (train_alone,) = together([request], seconds / 2), together([training], seconds / 2)
            beside, trained = together([request, training], seconds)
            found["priority"] = {
                "alone": percentile(before["times"], 0.5),
                "beside": percentile(beside["times"], 0.5),
                "p99": percentile(beside["times"], 0.99),
                "train alone": train_alone["rate"],
                "train beside": trained["rate"],
            }
    return found


def swapped(options, url, directory):
    """Two sessions on a device with room for one and a half of them, in turn: each read first swaps the other one out.

    Returns the bytes that move per second, out and in together, and the seconds of a read.
    """
    each = BLOCKS * (BLOCK >> 6 if options.fake else BLOCK)
    ours = Ours(options, url, directory, MEMORY=each * 3 // 2, RESERVE=0, SWAP_IDLE_S=0)
    try:
        with ours.workers(2, 2) as both:
            # the first of a turn's reads swaps; the first turns find no used host memory
            reads = [together([(both[turn % 2], "resident")], 1e-6)[0]["times"][0] for turn in range(10)]
        took = statistics.median(reads[4:])
        return {"swap": {"read s": took, "GB/s": 2 * each / took / 1e9, "all s": reads}}
    finally:
        print(ours.log.read_text()[-2000:], file=sys.stderr, flush=True)
        ours.close()


def alone(side, one, work, seconds):
    """The figures of one process that works alone."""
    together([(one, work)], 0)
    side.profile(work, lambda: together([(one, work)], seconds / 3))
    before, began = side.thread_times(), time.perf_counter()
    reports = [together([(one, work)], seconds / 3)[0] for _ in range(3)]
    rates = sorted(r["rate"] for r in reports)
    used = [s - before.get(thread, 0) for thread, s in side.thread_times().items()]
    return {
        "rate": rates[1],
        "spread": f"{rates[0]:.0f}-{rates[2]:.0f}",
        "digest": reports[0]["digest"],
        "number": reports[0]["number"],
        "client busy": statistics.median([r["busy"] for r in reports]),
        "executor busy": max(used, default=0) / (time.perf_counter() - began),
        "ms": statistics.median([1e3 * t for r in reports for t in r["times"]]),
    }


@contextlib.contextmanager
def attempt(found, name):
    """Keep the failure of one figure, and go on with the next. Each figure is printed at once."""
    try:
        yield
        print(json.dumps({name: found[name]}), file=sys.stderr, flush=True)
    except Exception as e:
        found[name] = {"error": f"{type(e).__name__}: {e}"[:1500]}
        print(f"{name} failed: {found[name]['error']}", file=sys.stderr, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--fake", action="store_true", help="on the CPU, with a tiny model")
    parser.add_argument("--seconds", type=float, default=6.0, help="length of a measurement")
    parser.add_argument("--size", choices=SIZES, default=None, help="shape of the model (1b)")
    parser.add_argument("--only", default="", help=f"comma-separated: {', '.join(SECTIONS)}")
    parser.add_argument("--sides", default="native,ours")
    parser.add_argument("--graphs", type=int, choices=(0, 1), default=1, help="0: the executor replays no graphs")
    parser.add_argument("--log", type=Path, help="keep the executor's log in this file")
    parser.add_argument(
        "--profiles", type=Path, help="record the executor's Python stacks in this folder (needs py-spy)"
    )
    parser.add_argument("--two", default="prefill,replay", help="what two processes do at the same time")
    parser.add_argument("--background", default="train", help="what P4 does beside P0")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        if options.worker[0] == "ceilings":
            ceilings("cuda")
        else:
            worker(*options.worker)
        return
    options.size = options.size or ("tiny" if options.fake else "1b")
    options.two = ["prefill", "decode"] if options.fake else options.two.split(",")
    options.sections = options.only.split(",") if options.only else SECTIONS
    sides = {}
    if "thread" in options.sections:
        argv, root = [sys.executable, "-m", "tests.costs.llama"], Path(__file__).parents[1]
        done = subprocess.run(argv, cwd=root, capture_output=True, text=True)
        print(done.stdout or done.stderr[-3000:], file=sys.stderr, flush=True)
    if set(options.sections) == {"thread"}:
        return
    limits = {}
    if "ceilings" in options.sections and not options.fake:
        done = subprocess.run([sys.executable, __file__, "--worker", "ceilings"], capture_output=True, text=True)
        print(done.stdout or done.stderr[-500:], file=sys.stderr, flush=True)
        limits = json.loads(done.stdout or "{}")
    if "native" in options.sides:
        sides["native"] = measure(Native(options), options)
        print(json.dumps(sides["native"]), file=sys.stderr, flush=True)
    if "ours" in options.sides:
        from wooly_testkit.nats import nats_server

        with tempfile.TemporaryDirectory(prefix="wooly-bench-") as directory, nats_server() as url:
            ours = Ours(options, url, directory)
            try:
                sides["ours"] = measure(ours, options)
            finally:
                log = ours.log.read_text()
                print(log[max(log.find("Fatal Python error"), 0) :][:4000], file=sys.stderr, flush=True)
                if options.log:
                    options.log.write_text(log)
                ours.close()
            if "swap" in options.sections:
                with attempt(sides["ours"], "swap"):
                    sides["ours"] |= swapped(options, url, directory)
        print(json.dumps(sides["ours"]), file=sys.stderr, flush=True)
    if len(sides) == 2:
        show(
            rows_of(sides, limits, options), options.json, title=f"Llama of size {options.size}", baseline="eager CUDA"
        )


def rows_of(sides, limits, options):
    """The table."""
    native, ours, rows = sides["native"], sides["ours"], []
    compared = (
        ("prefill", "prefill", 0.95),
        ("compiled", "prefill", 0.95),
        ("decode", "decode", None),
        ("replay", "decode", 1.5),
        ("replay", "replay", None),
        ("train", "train", None),
        ("train_compiled", "train", 0.97),
        *[(f"two {work}", f"two {work}", 1.4 if work == "prefill" else 1.2) for work in options.two],
    )
    for name, against, goal in compared:
        one, other = ours.get(name, {}), native.get(against, {})
        if "rate" in one and "rate" in other:
            label = name if name == against else f"{name} against {against}"
            if "digest" in one and "digest" in other:
                label += ", same bits" if one["digest"] == other["digest"] else ", other bits"
            how = {"higher_is_better": True, "spread": one.get("spread"), "digits": 2}
            rows.append(row(label, "tokens/s", one["rate"], other["rate"], goal, **how))
    one, other = ours.get("priority", {}), native.get("priority", {})
    if "beside" in one and "beside" in other:
        rows.append(row("P0 answer beside P4, p50", "ms", one["beside"], other["beside"], None))
        rows.append(row("P0 answer beside P4, p99", "ms", one["p99"], other["p99"], None))
        rows.append(row("P0 beside, of alone", "", one["alone"] / one["beside"], None, 0.95, higher_is_better=True))
        rows.append(row("P4 tokens beside P0", "tokens/s", one["train beside"], other["train beside"], None))
    if "GB/s" in ours.get("swap", {}):
        copied = limits.get("host to device GB/s")
        how = {"higher_is_better": True, "digits": 2}
        rows.append(
            row("one session out, another in, against a copy", "GB/s", ours["swap"]["GB/s"], copied, 0.8, **how)
        )
    return rows


if __name__ == "__main__":
    main()
