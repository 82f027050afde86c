"""Measures the inference of a Llama and a BERT at tier 0, with exact plans and with full plans: time, shares, and equality of
bits.

Each way runs in its own process, on a local stack with its own compiler and a cold cache. The baseline of a time is local eager
PyTorch, both with one thread. "First" is the first call. "Steady" begins when no program is left at tier 0, or after 90 s. Shares
are from the executor's counters in the steady state.

`first`: a training whose programs are new, with a running compiler and without (`WOOLYAI_JIT=0`), in turn. Its first step is
before any request for a plan. The device never idles, so plans are requested when the training has taken some seconds. A third
row therefore has all runs until the plans are in use, including the requests, the compiling on the same cores and the loading. A
second session without the compiler shows how much two equal sessions differ; its upper quartile is the goal of our session.

Run: .venv/bin/python bench/tiers.py [--json] [--only llama|bert|mlp|first] [--repeat N]
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

from figures import row, show

JITS = ("0", "exact", "full")
SETTLING_S = 90.0
SHOWN = {"instructions": "instructions", "ns": "time"}
#: The sessions of `first`: one with the compiler, and two without it.
SIDES = {"exact": "exact", "tier 0": "0", "tier 0 again": "0"}
STEPS = 100
#: Number of runs between two checks for the plans, and number of checks without a compiler.
STRETCH, STRETCHES = 50, 4
WIDTH = 512


# -- in a separate process --------------------------------------------------------------------------------------------------


def llama(torch):
    """8 tokens of a Llama of 4 layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=256,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(1000, (1, 16))
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    return model, ids, lambda model, ids: model.generate(ids, **options), 8


def bert(torch):
    """A batch of 8 times 128 tokens through a BERT of 4 layers."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=1000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
    )
    model = BertModel(config).eval()
    return model, torch.randint(1000, (8, 128)), lambda model, ids: model(ids).last_hidden_state, 1


def mlp(torch):
    """A wide layer with its activation and residual instead of a whole model: work that benefits from kernels."""

    class Wide(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.scale = torch.nn.LayerNorm(1024), torch.nn.Parameter(torch.rand(1024))

        def forward(self, x):
            y = self.norm(x * self.scale + 0.5) * 2 - x
            return torch.nn.functional.gelu(y) + torch.relu(x) * self.scale

    return Wide().eval(), torch.randn(2048, 1024), lambda model, x: model(x), 1


MODELS = {"llama": llama, "bert": bert, "mlp": mlp}


def best(function, repeat):
    found = []
    for _ in range(repeat):
        started = time.perf_counter()
        function()
        found.append(time.perf_counter() - started)
    return min(found) * 1e3


def child(name, repeat):
    """Run one model in one way. Prints a line of JSON."""
    import torch
    from wooly import api

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, given, call, per = MODELS[name](torch)
    with torch.inference_mode():
        expected = call(model, given)
        local = best(lambda: call(model, given), repeat)
        api.enable()
        ours, x = model.to("cuda"), given.to("cuda")

        def once():
            return call(ours, x).cpu()

        first = best(once, 1)
        answer = once()
        deadline = time.monotonic() + SETTLING_S
        while os.environ["WOOLYAI_JIT"] != "0" and tier0_per_call(once) and time.monotonic() < deadline:
            once()
        begun = work()
        steady = best(once, repeat)
        done = {k: v - begun[k] for k, v in work().items()}
        same = torch.equal(once(), expected) and torch.equal(answer, expected)
    print(json.dumps({"local": local / per, "first": first, "steady": steady / per, "work": done, "same": same}))
    sys.stdout.flush()
    os._exit(0)


def work():
    from wooly import api

    return api._attached.links[0].stats()["work"]


def tier0_per_call(call):
    begun = work()
    call()
    return work()["tier0_instructions"] - begun["tier0_instructions"]


def scripts():
    """Run a training for each line of the input, which gives its width. Prints its times in ms and its shares."""
    import torch
    from wooly import api

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    api.enable()
    train(torch, WIDTH - 8)  # work that happens only once in a process: connecting, the first autograd
    print("ready", flush=True)
    for line in sys.stdin:
        step = train(torch, int(line))
        begun, started = work(), time.perf_counter()
        step()
        first = time.perf_counter()
        for _ in range(STEPS - 1):
            step()
        ended = time.perf_counter()
        done = {k: v - begun[k] for k, v in work().items()}
        times = {"first": (first - started) * 1e3, "all": (ended - started) * 1e3}
        runs, taken = STEPS, ended - started
        plans, deadline = os.environ["WOOLYAI_JIT"] != "0", time.monotonic() + SETTLING_S
        while tier0_per_call(step) and (plans or runs < STEPS + STRETCH * STRETCHES) and time.monotonic() < deadline:
            started = time.perf_counter()
            for _ in range(STRETCH):
                step()
            runs, taken = runs + STRETCH, taken + time.perf_counter() - started
        times |= {"until": taken * 1e3 / runs, "runs": runs}
        print(json.dumps(times | {"work": done, "settled": tier0_per_call(step) == 0}), flush=True)


def train(torch, width):
    """A training step whose shapes occur only with this width."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Linear(2 * width, width)
    model = torch.nn.Sequential(torch.nn.LayerNorm(width), *layers).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(32, width).to("cuda")

    def step():
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


# -- in this process --------------------------------------------------------------------------------------------------------


def measured(name, jit, repeat, reach):
    env = os.environ | reach | {"WOOLYAI_JIT": jit}
    argv = [sys.executable, __file__, "--child", name, "--repeat", str(repeat)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def bench(name, repeat, reach):
    unit = "ms/token" if name == "llama" else "ms"
    for jit in JITS:
        found = measured(name, jit, repeat, reach)
        yield row(f"{name}, {jit}: steady", unit, found["steady"], found["local"], None)
        yield row(f"{name}, {jit}: first", "ms", found["first"], None, None)
        goal = None if jit == "full" else 1.0
        yield row(f"{name}, {jit}: has the library's bits", "", float(found["same"]), None, goal, higher_is_better=True)
        for what in ("instructions", "ns"):
            total = sum(found["work"][f"{who}_{what}"] for who in ("kernel", "library", "tier0")) or 1
            for who in ("kernel", "library", "tier0"):
                goal = 2.0 if (who, what) == ("tier0", "instructions") and jit != "0" and name != "mlp" else None
                share = 100 * found["work"][f"{who}_{what}"] / total
                yield row(f"{name}, {jit}: {who}, share of {SHOWN[what]}", "%", share, None, goal)


def quartiles(values):
    """Return minimum, quartiles and maximum of some numbers."""
    values = sorted(values)
    return [values[round(q * (len(values) - 1) / 4)] for q in range(5)]


def bench_first(repeat, reach):
    """Compare times of the same turn, because the state of the machine differs between turns."""
    children = {
        side: subprocess.Popen(
            [sys.executable, __file__, "--child", "first"], env=os.environ | reach | {"WOOLYAI_JIT": jit},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) for side, jit in SIDES.items()
    }  # fmt: skip
    try:
        for child in children.values():
            assert child.stdout.readline() == "ready\n"
        found = {side: [] for side in SIDES}
        for turn in range(1 + repeat):
            order = [*SIDES][turn % 3 :] + [*SIDES][: turn % 3]
            for k, side in enumerate(order):  # each turn has new widths; the order of the sides rotates
                children[side].stdin.write(f"{WIDTH + 3 * turn + k}\n")
                children[side].stdin.flush()
                answer = json.loads(children[side].stdout.readline())
                if turn:  # the first turn does not count: it includes what an executor loads once
                    found[side].append(answer)
    finally:
        for child in children.values():
            child.stdin.close()
            child.wait(30)
    measured = {
        "first run of a new program": "first", f"first {STEPS} runs of a new program": "all",
        "a run, until a new program has its plans": "until",
    }  # fmt: skip
    for name, what in measured.items():
        ours, theirs, again = ([f[what] for f in found[side]] for side in SIDES)
        noise = quartiles([a / b for a, b in zip(again, theirs, strict=True)])
        ratios = quartiles([a / b for a, b in zip(ours, theirs, strict=True)])
        spread = [round(r, 2) for r in ratios]
        shown = row(
            f"{name}: exact against tier 0", "ms", quartiles(ours)[2], quartiles(theirs)[2], None, spread=spread
        )
        yield shown | {"ratio": round(ratios[2], 3), "goal": round(noise[3], 3), "ok": ratios[2] <= max(noise[3], 1)}
        yield row(f"{name}: tier 0 against itself", "ms", quartiles(again)[2], quartiles(theirs)[2], None,
                  spread=[round(r, 2) for r in noise])  # fmt: skip
    done = [f["work"] for f in found["exact"]]
    kernels = sum(w["kernel_instructions"] + w["library_instructions"] for w in done)
    share = 100 * kernels / (kernels + sum(w["tier0_instructions"] for w in done))
    yield row(f"first {STEPS} runs of a new program: by a plan, share of instructions", "%", share, None, None)
    runs = quartiles([f["runs"] for f in found["exact"]])
    yield row("runs until a new program has its plans", "", runs[2], None, None, spread=runs)
    settled = sum(f["settled"] for f in found["exact"])
    yield row("new programs that had their plans in the end", "", settled, None, repeat, higher_is_better=True)


@contextlib.contextmanager
def stack():
    """A local stack with an empty cache of the compiler. Yields the environment variables by which clients find it."""
    from wooly_local.stack import start_stack

    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="wooly-bench-") as folder:
        os.environ["WOOLY_COMPILER_STATE_DIR"] = str(Path(folder) / "compiler")
        started = start_stack(Path(folder) / "stack")
        try:
            yield started.client_env
        finally:
            started.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--only", choices=[*MODELS, "first"])
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--child", choices=[*MODELS, "first"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child == "first":
        scripts()
        return
    if args.child:
        child(args.child, args.repeat)
    rows = []
    with stack() as reach:
        for name in MODELS:
            if args.only in (None, name):
                rows += bench(name, args.repeat, reach)
        if args.only in (None, "first"):
            rows += bench_first(args.repeat, reach)
    show(rows, args.json, baseline="local")


if __name__ == "__main__":
    main()
