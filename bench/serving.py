"""Measures servers of vLLM on one device, each `wooly run vllm serve` with a random Llama. Needs vLLM: make bench-serving.

`engine`: tokens per second of vLLM's engine in one process, against Transformers' `generate` on this machine's CPU (vLLM's
wheel has no CPU platform). `far`: the same over links of 20 and 80 ms, against a link on this machine. `one`: the same of a
server, against `transformers serve` on this machine's CPU, with equal requests by HTTP (it answers one request after the other:
its continuous batching gives no answer on a CPU); and the time of a request for one token. `two`: two equal servers against
one, and against two that have an executor each: the second row is what sharing a device costs, the first row also contains what
this machine's cores cost. `weights`: memory of the weights of several servers, against one. `wake`: the first token after
hibernation. `beside_server` and `beside_training`: the time per token of a P0 server beside P4 work, against alone, and against
a P0 server beside the same work on another executor.

Run: make bench-serving BENCH_SERVING="--only one --json" (--help lists the options)
"""

import argparse
import contextlib
import functools
import itertools
import json
import os
import random
import signal
import socket
import statistics
import string
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from figures import row, show

sys.path.insert(0, str(Path(__file__).parents[1]))
from integrations.vllm.tests import random_llama
from integrations.vllm.tests.servers import Server, Stack, distant_stack

MIB = 1 << 20
CLIENTS = 4
#: The processes of P4 work leave this machine's threads to the P0 server, as if they were on another machine. What is measured is
#: the device.
NICE = ("nice", "-n", "19")
#: Duration, in seconds, of the load before a measurement. The executor compiles plans meanwhile.
WARM_S = 6
#: Number of short measurements of each case, in turns.
TURNS = 4
#: Memory of a server's keys and values. The small Llama needs 7 MiB per request of the bench; with less memory than its requests
#: need, vLLM computes prompts twice.
CACHE = ("--kv-cache-memory-bytes", "256M")
PROMPT = 64
NEW_TOKENS = 32
#: The engine in one process, for prompts of the same length together; prints tokens per second.
ENGINE = """
import os, random, statistics, sys, time
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from vllm import LLM, SamplingParams
folder, clients, prompt, n = sys.argv[1], *map(int, sys.argv[2:])
llm = LLM(folder, dtype="float32", seed=0, max_model_len=256, kv_cache_memory_bytes=256 << 20, max_num_seqs=16)
params, found = SamplingParams(max_tokens=n, ignore_eos=True, temperature=0, detokenize=False), []
for _ in range(40):
    prompts = [{"prompt_token_ids": random.choices(range(250), k=prompt)} for _ in range(clients)]  # none is cached
    begun = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    found.append(clients * n / (time.perf_counter() - begun))
print(statistics.median(found[20:]))
"""
TRAINING = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1024)).to("cuda")
optimizer = torch.optim.Adam(model.parameters())
x = torch.randn(64, 1024, device="cuda")
print("training", flush=True)
while True:
    optimizer.zero_grad()
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    loss.item()
"""


def text():
    """A new prompt, which no server has cached. The tokenizer makes a token of each letter."""
    return "".join(random.choices(string.ascii_lowercase, k=PROMPT))


class Local:
    """`transformers serve` on this machine's CPU, without Wooly."""

    def __init__(self, model, folder, env):
        self.ends = {"generation_config": json.dumps({"eos_token_id": -1, "pad_token_id": 0, "do_sample": False})}
        self.name = str(model)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.log = folder / "transformers.log"
        command = [
            sys.executable,
            Path(sys.executable).with_name("transformers"),
            "serve",
            self.name,
            "--device",
            "cpu",
        ]
        command += ["--dtype", "float32", "--host", "127.0.0.1", "--port", str(self.port)]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)

    wait = Server.wait
    close = Server.close


def token_times(server, n=NEW_TOKENS):
    """The times at which the parts of one streamed answer arrive, in seconds since the request. vLLM sends a part per token."""
    asked = {"model": "llama", "prompt": text(), "max_tokens": n, "temperature": 0, "stream": True}
    asked |= {"model": server.name} | server.ends if isinstance(server, Local) else {"ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/completions",
        json.dumps(asked).encode(),
        {"content-type": "application/json"},
    )
    begun, times = time.perf_counter(), []
    with urllib.request.urlopen(request, timeout=600) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter() - begun)
                end = line
    assert b'"finish_reason":"length"' in end, end  # all tokens
    return times


def load(servers, seconds, clients=CLIENTS):
    """Ask servers for some seconds, with some clients each. Returns tokens per second, times to the first token, and gaps."""
    until = time.perf_counter() + seconds
    first, gaps, counted = [], [], []

    def ask(server):
        while time.perf_counter() < until:
            times = token_times(server)
            first.append(times[0])
            gaps.extend([b - a for a, b in itertools.pairwise(times)])
            counted.append(NEW_TOKENS)

    begun = time.perf_counter()
    threads = [threading.Thread(target=ask, args=(s,)) for s in servers for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counted) / (time.perf_counter() - begun), first, gaps


def locally(folder):
    """Tokens per second of Transformers on this machine, for the same prompts together."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for _ in range(4):
        asked = torch.randint(250, (CLIENTS, PROMPT))
        begun = time.perf_counter()
        model.generate(asked, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
        found.append(CLIENTS * NEW_TOKENS / (time.perf_counter() - begun))
    return statistics.median(found[1:])


def one_token_ms(server):
    """Milliseconds of a request for one token, of a server without other requests (median)."""
    return 1e3 * statistics.median([token_times(server, 1)[-1] for _ in range(20)])


def percentile(values, part):
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def gaps_of(name, alone, beside, elsewhere):
    """Rows of the times per token beside other work, against alone, and against the same work on another executor."""
    for part, goal in ((0.5, None), (0.9, None), (0.99, 1.10)):
        ours, base, machine = (1e3 * percentile(x, part) for x in (beside, alone, elsewhere))
        yield row(f"{name}, time per token, p{100 * part:.0f}", "ms", ours, base, goal)
        yield row(f"{name}, against the same work on another executor, p{100 * part:.0f}", "ms", ours, machine, goal)


class Bench:
    """The stack, the model, and the servers that the measurements start."""

    def __init__(self, folder, chosen, cleanup):
        self.model, self._folder, self._cleanup = folder / "model", folder, cleanup
        self.seconds, self.count = chosen.seconds, chosen.servers
        random_llama.save(self.model, chosen.size)
        state = chosen.state or folder / "stack"
        self.stack = self._started(Stack(state))
        self._apart_state = state.with_name(f"{state.name}-apart")
        self._earlier = {t["task_id"] for t in self.stack.sessions()}  # of a run that was killed
        self._servers = {}

    def _started(self, stack):
        stack.env["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # starts sooner
        self._cleanup.callback(stack.wooly, "down")
        stack.wooly("up")
        return stack

    @functools.cached_property
    def apart(self):
        """A second stack, whose executor is another process."""
        return self._started(Stack(self._apart_state))

    def servers(self, *names):
        """The servers of these names, warm. Those that do not run are started together.

        The names p0 and p4 are classes. Names that end with "apart" have another executor.
        """
        new = [name for name in names if name not in self._servers]
        stacks = [
            self.apart if name.endswith("apart") else self.stack for name in new
        ]  # a stack takes ports when it starts
        for name, stack in zip(new, stacks, strict=True):
            env = {"WOOLYAI_PRIORITY": name[1]} if name.startswith("p") else {}
            self._servers[name] = Server(stack, self.model, self._folder, *CACHE, **env)
            self._cleanup.callback(self._servers[name].close)
        for name in new:
            self._servers[name].wait()
        if new:
            load([self._servers[name] for name in new], WARM_S)
        return [self._servers[name] for name in names]

    def drop_all_but(self, *kept):
        """Stop the other servers, and wait for the end of their sessions."""
        for name in [name for name in self._servers if name not in kept]:
            self._servers.pop(name).close()
        here = [name for name in self._servers if not name.endswith("apart")]
        while len(self.sessions()) > len(here):
            time.sleep(0.2)

    def sessions(self):
        """The sessions of this run that are not over."""
        return [t for t in self.stack.sessions() if t["task_id"] not in self._earlier]

    def engine(self):
        rate, local_rate = self.engine_rate(self.stack), locally(self.model)
        yield row("one engine without server", "tokens/s", rate, local_rate, 0.8, higher_is_better=True)

    def far(self):
        near = self.engine_rate(self.stack)
        for trip_ms, goal in ((20, 0.67), (80, 0.4)):
            with distant_stack(self._folder / f"distant-{trip_ms}", trip_ms) as stack:
                rate = self.engine_rate(stack)
            yield row(f"one engine, round trip of {trip_ms} ms", "tokens/s", rate, near, goal, higher_is_better=True)

    def engine_rate(self, stack):
        """Tokens per second of an engine in one process."""
        printed = stack.wooly("run", "-q", sys.executable, "-c", ENGINE, self.model, CLIENTS, PROMPT, NEW_TOKENS)
        return float(printed.split()[-1])

    def one(self):
        servers = self.servers("first")
        rate, first, gaps = load(servers, self.seconds)
        asked = one_token_ms(*servers)
        local = Local(self.model, self._folder, self.stack.env)
        with contextlib.closing(local):
            load([local.wait()], WARM_S)
            local_rate, _, _ = load([local], self.seconds)
            local_asked = one_token_ms(local)
        name = f"one server, {CLIENTS} clients"
        yield row(name, "tokens/s", rate, local_rate, 0.8, higher_is_better=True)
        yield row(f"{name}, first token (median)", "ms", 1e3 * statistics.median(first), None, None)
        yield row(f"{name}, time per token (median)", "ms", 1e3 * statistics.median(gaps), None, None)
        yield row("one server, a request for one token (median)", "ms", asked, local_asked, None)

    def two(self):
        first, second, apart = self.servers("first", "second", "apart")
        cases = ([first, second], CLIENTS), ([first, apart], CLIENTS), ([first], CLIENTS), ([first], 2 * CLIENTS)
        rates = self.in_turns(*[functools.partial(self.rate, servers, clients) for servers, clients in cases])
        both, *others = [statistics.mean(found) for found in rates]
        names = "two executors", f"one server with {CLIENTS}", f"one server with {2 * CLIENTS}"
        for name, other, goal in zip(names, others, (0.95, 0.95, None), strict=True):
            name = f"two servers on one executor, {CLIENTS} clients each, against {name}"
            yield row(name, "tokens/s", both, other, goal, higher_is_better=True)

    @staticmethod
    def rate(servers, clients, seconds):
        """Tokens per second of servers together, with some clients each."""
        return load(servers, seconds, clients)[0]

    def in_turns(self, *cases):
        """What each of the cases finds in `TURNS` short measurements, in turns: the speed of a machine changes."""
        found = [[] for _ in cases]
        for _ in range(TURNS):
            for results, case in zip(found, cases, strict=True):
                results.append(case(seconds=self.seconds / TURNS))
        return found

    def gaps_beside(self, server, *loads):
        """The times per token of a server without other load, and under each of the loads (context managers)."""

        def case(other, seconds):
            with other():
                return load([server], seconds, 1)[2]

        cases = [functools.partial(case, other) for other in (contextlib.nullcontext, *loads)]
        return [[gap for gaps in found for gap in gaps] for found in self.in_turns(*cases)]

    def weights(self):
        self.servers("first")
        alone = self.shared_bytes()
        self.servers("first", *[f"server {k}" for k in range(2, self.count + 1)])
        name = f"weights of {self.count} servers against one"
        yield row(name, "MiB", self.shared_bytes() / MIB, alone / MIB, 1.02)

    def shared_bytes(self):
        """Bytes of the contents that sessions may share. The weights are among them, caches are not."""
        return sum([g["memory"]["contents"] for g in json.loads(self.stack.wooly("top", "--once", "--json"))["gpus"]])

    def beside_server(self):
        self.drop_all_but()
        first, *others = self.servers("p0", "p4", "p4 apart")

        @contextlib.contextmanager
        def asked(server):
            server.yield_cores()
            over = threading.Event()

            def keep_busy():
                while not over.is_set():
                    token_times(server)

            busy = [threading.Thread(target=keep_busy) for _ in range(CLIENTS)]
            for thread in busy:
                thread.start()
            try:
                yield
            finally:
                over.set()
                for thread in busy:
                    thread.join()

        loads = [functools.partial(asked, server) for server in others]
        yield from gaps_of("P0 beside a P4 server", *self.gaps_beside(first, *loads))

    def beside_training(self):
        self.drop_all_but("p0")
        (first,) = self.servers("p0")

        @contextlib.contextmanager
        def training(stack):
            """A training that computes within the block. It is stopped before, so that its start does not count."""
            process = started[stack]
            assert process.poll() is None, "the training ended"
            os.killpg(process.pid, signal.SIGCONT)
            try:
                yield
            finally:
                os.killpg(process.pid, signal.SIGSTOP)

        started, stacks = {}, (self.stack, self.apart)
        with contextlib.ExitStack() as ends:
            for stack in stacks:
                command = [*NICE, sys.executable, "-m", "wooly", "run", "-q", sys.executable, "-c", TRAINING]
                process = started[stack] = subprocess.Popen(
                    command,
                    env=stack.env | {"WOOLYAI_PRIORITY": "4"},
                    stdout=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
                ends.enter_context(process)
                ends.callback(os.killpg, process.pid, signal.SIGKILL)
                assert process.stdout.readline() == "training\n"
            time.sleep(WARM_S)  # plans are compiled
            for process in started.values():
                os.killpg(process.pid, signal.SIGSTOP)
            loads = [functools.partial(training, stack) for stack in stacks]
            yield from gaps_of("P0 beside a P4 training", *self.gaps_beside(first, *loads))

    def wake(self):
        self.drop_all_but("first")
        (server,) = self.servers("first")
        found = []
        warm = statistics.median([token_times(server)[0] for _ in range(5)])
        for _ in range(3):
            (session,) = self.sessions()
            self.stack.wooly("tasks", "hibernate", session["task_id"])
            while self.sessions()[0]["state"] != "hibernated":
                time.sleep(0.1)
            found.append(token_times(server)[0])
        yield row("first token after hibernation", "ms", 1e3 * statistics.median(found), 1e3 * warm, None)


PARTS = ("engine", "far", "one", "two", "weights", "wake", "beside_server", "beside_training")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, of {', '.join(PARTS)}")
    parser.add_argument("--size", choices=random_llama.SIZES, default="tiny")
    parser.add_argument("--seconds", type=float, default=12, help="duration of each measurement")
    parser.add_argument("--state", type=Path, help="folder of the stack, which keeps compiled kernels for the next run")
    parser.add_argument("--servers", type=int, default=3, help="number of servers of the part weights")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the stack and the servers end, too
    with tempfile.TemporaryDirectory(prefix="wooly-serving-") as folder, contextlib.ExitStack() as cleanup:
        bench = Bench(Path(folder), chosen, cleanup)
        rows = []
        try:
            for part in PARTS:
                if part in chosen.only.split(","):
                    rows.extend(getattr(bench, part)())
        finally:  # a part that fails does not lose the others
            show(rows, chosen.json, title=f"vLLM's servers, Llama of size {chosen.size}")


if __name__ == "__main__":
    main()
