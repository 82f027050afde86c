"""Measures servers of vLLM on one device, each `wooly run vllm serve` with a random Llama. Needs vLLM: make bench-serving.

`one`: a server's tokens per second and time to the first token, against Transformers' `generate` on this machine's CPU (vLLM's
wheel has no CPU platform). `weights`: memory of the weights of two servers, against one. `two`: two equal servers against one.
`priority`: the time per token of a P0 server beside a P4 server and a P4 training, against alone. `wake`: the first token after
hibernation.

Run: make bench-serving BENCH_SERVING="[--json] [--only NAME[,NAME]] [--size tiny|small] [--seconds N]"
"""

import argparse
import contextlib
import itertools
import json
import statistics
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
from integrations.vllm.tests.servers import Server, Stack

MIB = 1 << 20
CLIENTS = 4
PROMPT = 64
NEW_TOKENS = 32
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


def prompt(k):
    return [(7 * k + 3 * i) % 250 for i in range(PROMPT)]


def token_times(server, k):
    """The times at which the tokens of one streamed request arrive, in seconds since the request."""
    asked = {
        "model": "llama",
        "prompt": prompt(k),
        "max_tokens": NEW_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
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
    return times


def load(servers, seconds, clients=CLIENTS):
    """Ask servers for some seconds, with some clients each. Returns tokens per second, times to the first token, and gaps."""
    until = time.perf_counter() + seconds
    first, gaps, counted = [], [], []

    def ask(server, k):
        while time.perf_counter() < until:
            times = token_times(server, k)
            first.append(times[0])
            gaps.extend([b - a for a, b in itertools.pairwise(times)])
            counted.append(NEW_TOKENS)

    begun = time.perf_counter()
    threads = [threading.Thread(target=ask, args=(s, k)) for s in servers for k in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counted) / (time.perf_counter() - begun), first, gaps


def locally(folder):
    """Tokens per second of Transformers on this machine, for the same prompts together, and its time to the first token."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    asked, found, first = torch.tensor([prompt(k) for k in range(CLIENTS)]), [], []
    for _ in range(4):
        begun = time.perf_counter()
        model.generate(asked, max_new_tokens=1, do_sample=False, eos_token_id=None, pad_token_id=0)
        first.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        model.generate(asked, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
        found.append(CLIENTS * NEW_TOKENS / (time.perf_counter() - begun))
    return statistics.median(found[1:]), statistics.median(first[1:])


def percentile(values, part):
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


class Bench:
    """The stack, the model, and the servers that the measurements start."""

    def __init__(self, folder, size, seconds, cleanup):
        self.model, self.seconds, self._folder, self._cleanup = folder / "model", seconds, folder, cleanup
        random_llama.save(self.model, size)
        self.stack = Stack(folder / "stack")
        cleanup.callback(self.stack.wooly, "down")
        self.stack.wooly("up")
        self._servers = {}

    def server(self, name, **env):
        """The server of this name, warm."""
        if name not in self._servers:
            server = Server(self.stack, self.model, self._folder, **env)
            self._cleanup.callback(server.close)
            server.wait()
            load([server], 1)
            self._servers[name] = server
        return self._servers[name]

    def drop(self, name):
        self._servers.pop(name).close()

    def one(self):
        server = self.server("first")
        rate, first, _ = load([server], self.seconds)
        local_rate, local_first = locally(self.model)
        yield row("one server", "tokens/s", rate, local_rate, 0.8, higher_is_better=True)
        yield row("one server, first token (median)", "ms", 1e3 * statistics.median(first), 1e3 * local_first, None)

    def two(self):
        alone, _, _ = load([self.server("first")], self.seconds, 2 * CLIENTS)
        both, _, _ = load([self.server("first"), self.server("second")], self.seconds)
        yield row("two servers, sum", "tokens/s", both, alone, 0.95, higher_is_better=True)

    def weights(self):
        self.server("first")
        alone = self.shared_bytes()
        self.server("second")
        yield row("weights of two servers against one", "MiB", self.shared_bytes() / MIB, alone / MIB, 1.02)

    def shared_bytes(self):
        """Bytes of the contents that sessions may share. The weights are among them, caches are not."""
        return sum([g["memory"]["contents"] for g in json.loads(self.stack.wooly("top", "--once", "--json"))["gpus"]])

    def priority(self):
        if "second" in self._servers:
            self.drop("second")
        first = self.server("p0", WOOLYAI_PRIORITY="0")
        _, _, alone = load([first], self.seconds, 1)
        other, over = self.server("p4", WOOLYAI_PRIORITY="4"), threading.Event()

        def keep_busy():
            while not over.is_set():
                token_times(other, 1)

        command = [sys.executable, "-m", "wooly", "run", "-q", sys.executable, "-c", TRAINING]
        env = self.stack.env | {"WOOLYAI_PRIORITY": "4"}
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as training:
            try:
                training.stdout.readline()
                busy = threading.Thread(target=keep_busy)
                busy.start()
                _, _, beside = load([first], self.seconds, 1)
                over.set()
                busy.join()
            finally:
                training.terminate()
        for part, name in ((0.5, "p50"), (0.99, "p99")):
            ours, base = (1e3 * percentile(x, part) for x in (beside, alone))
            yield row(f"P0 beside P4, time per token, {name}", "ms", ours, base, 1.10 if part > 0.9 else None)

    def wake(self):
        for name in list(self._servers):
            if name != "first":
                self.drop(name)
        server, found = self.server("first"), []
        warm = statistics.median([token_times(server, 1)[0] for _ in range(5)])
        for _ in range(3):
            while len(self.stack.sessions()) > 1:  # those of programs that were killed end with their leases
                time.sleep(1)
            self.stack.wooly("tasks", "hibernate", self.stack.sessions()[0]["task_id"])
            while self.stack.sessions()[0]["state"] != "hibernated":
                time.sleep(0.1)
            found.append(token_times(server, 1)[0])
        yield row("first token after hibernation", "ms", 1e3 * statistics.median(found), 1e3 * warm, None)


PARTS = ("one", "weights", "two", "priority", "wake")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, of {', '.join(PARTS)}")
    parser.add_argument("--size", choices=random_llama.SIZES, default="tiny")
    parser.add_argument("--seconds", type=float, default=20)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wooly-serving-") as folder, contextlib.ExitStack() as cleanup:
        bench = Bench(Path(folder), chosen.size, chosen.seconds, cleanup)
        rows = []
        try:
            for part in PARTS:
                if part in chosen.only.split(","):
                    rows.extend(getattr(bench, part)())
        finally:  # a part that fails does not lose the others
            show(rows, chosen.json, title=f"vLLM's servers, Llama of size {chosen.size}")


if __name__ == "__main__":
    main()
