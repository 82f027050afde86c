"""Measures what a distant executor costs: round trips of 20 and 80 ms at 100 Mbit/s, against the same executor here.

Run: .venv/bin/python bench/far.py [--json] [--repeat N] [--trips MS ...] [--lines]
"""

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import secrets
import statistics
import sys
import tempfile
import time
import warnings

from figures import row, show

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn
from wooly import api
from wooly_testkit.delay_proxy import delay_proxy
from wooly_testkit.executor import executor_process
from wooly_wis.messages import DirectSession

#: Throughput of the distant links, in bytes per second.
RATE = 100e6 / 8
#: Phases: the largest permitted ratio to the time here, by round trip in ms; None: only reported.
GOALS = {
    "load": {},
    "generate": {20: 1.5, 80: 2.5},
    "generate compiled": {},
    "train": {20: 1.1, 80: 1.1},
    "train, short steps": {},
    "ten losses per step": {},
    "steps of an actor": {},
    "copies of a model's state": {},
    "k-means": {},
    "generate, experts": {},
}
#: Hidden layers and number of steps of the trainings. A step of the first one takes about as long as a distant round trip.
TRAININGS = {"train": ((1024, 1024), 20), "train, short steps": ((256,), 50)}


def distant(target, trips, pipe):
    """Start a process that delays all bytes to and from `target`: one endpoint per round trip."""
    with contextlib.ExitStack() as stack:
        pipe.send([stack.enter_context(delay_proxy(target, ms / 2e3, RATE)) for ms in trips])
        pipe.recv()


def save_model(folder):
    """Save a Llama with 4 layers, hidden 256, vocabulary 1,000 and random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 8}
    LlamaForCausalLM(LlamaConfig(vocab_size=1000, max_position_embeddings=256, **sizes)).save_pretrained(folder)


def trainer(hidden, steps):
    """A training of an MLP with Adam and batch size 128. It uploads each batch, and reads its loss every 10 steps."""
    torch.manual_seed(0)
    sizes = (256, *hidden, 10)
    layers = [m for n, k in itertools.pairwise(sizes) for m in (nn.Linear(n, k), nn.ReLU())]
    model = nn.Sequential(*layers[:-1]).to("cuda")
    optimizer = torch.optim.Adam(model.parameters())
    batches = [(torch.randn(128, 256), torch.randint(0, 10, (128,))) for _ in range(10)]

    def train(steps=steps):
        losses = []
        for step in range(steps):
            x, y = [t.to("cuda") for t in batches[step % 10]]
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 9:
                losses.append(loss.item())
        return losses

    return train


def losses_of_parts():
    """Ten steps of a training that reads ten losses at the end of each."""
    torch.manual_seed(0)
    model = nn.Linear(64, 10).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(32, 64).to("cuda")

    def train(steps=10):
        read = []
        for _ in range(steps):
            losses = {f"part {k}": part.sin().mean() for k, part in enumerate(model(batch).unbind(1))}
            optimizer.zero_grad()
            sum(losses.values()).backward()
            optimizer.step()
            read.append({name: loss.item() for name, loss in losses.items()})
        return read

    return train


def actor():
    """Twenty steps of an actor, as libraries for reinforcement learning take them: action, value and logarithm are read."""
    torch.manual_seed(0)
    policy, critic = nn.Linear(4, 2).to("cuda"), nn.Linear(4, 1).to("cuda")
    observations = torch.randn(20, 1, 4)

    def act(steps=20):
        read = []
        for observation in observations[:steps]:
            with torch.no_grad():
                x = observation.to("cuda")
                value, chances = critic(x), torch.distributions.Categorical(logits=policy(x))
                action = chances.probs.argmax(1)
                logarithm = chances.log_prob(action)
                read.append([t.tolist() for t in (action.cpu(), value.clone().cpu(), logarithm.clone().cpu())])
        return read

    return act


def copies():
    """Three training steps of a model with 40 layers. After each, its state is copied to the host, as scripts keep the best."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(48, 48) for _ in range(40)]).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(8, 48).to("cuda")

    def train(steps=3):
        for _ in range(steps):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            best = {name: t.cpu() for name, t in model.state_dict().items()}
        return sum([t.double().sum().item() for t in best.values()])

    return train


def clusters():
    """Ten iterations of k-means: each of five means is that of the rows that a mask selects."""
    torch.manual_seed(0)
    points = torch.randn(500, 4).to("cuda")

    def fit(iterations=10):
        means = points[:5].clone()
        for _ in range(iterations):
            nearest = torch.cdist(points, means).argmin(1)
            for k in range(5):
                means[k] = points[nearest == k].mean(0)
        return means.tolist()

    return fit


def experts():
    """Sixteen tokens of a mixture of experts: Qwen3-MoE with 4 layers, random weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 8}
    config = Qwen3MoeConfig(vocab_size=1000, max_position_embeddings=256, num_experts_per_tok=2, **sizes, **heads)
    model = Qwen3MoeForCausalLM(config).to("cuda").eval()
    prompt = torch.arange(5, 13).unsqueeze(0).to("cuda")

    def generate():
        return model.generate(prompt, max_new_tokens=16, min_new_tokens=16, do_sample=False, pad_token_id=0).tolist()

    return generate


#: Scripts of which each phase runs once before.
SCRIPTS = {
    "ten losses per step": losses_of_parts,
    "steps of an actor": actor,
    "copies of a model's state": copies,
    "k-means": clusters,
    "generate, experts": experts,
}


def session(endpoint, running, folder, compiled):
    """Run all phases in one session. Returns per phase: seconds, trips, bytes up, result; and the lines that waited longest."""
    from transformers import LlamaForCausalLM

    opens = DirectSession(dedup="tenant")
    api.attach([endpoint], secrets.token_hex(8), running.token, dedup=opens.dedup, opens=opens)
    api.install_facade()
    link = api.attached_links()[0]
    found = {}

    def phase(name, work):
        torch.cuda.synchronize()
        before, started = (link.syncs, link.bytes_sent), time.perf_counter()
        result = work()
        seconds = time.perf_counter() - started
        found[name] = seconds, link.syncs - before[0], link.bytes_sent - before[1], result

    def load():
        model = LlamaForCausalLM.from_pretrained(folder, device_map="cuda").eval()
        torch.cuda.synchronize()
        loaded.append(model)

    loaded = []
    phase("load", load)
    prompt = torch.arange(5, 13).unsqueeze(0).to("cuda")
    options = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False, "pad_token_id": 0}

    def generate(**more):
        return loaded[0].generate(prompt, **options, **more).tolist()

    generate()
    phase("generate", generate)
    if compiled:
        generate(cache_implementation="static")
        phase("generate compiled", lambda: generate(cache_implementation="static"))
    for name, (hidden, steps) in TRAININGS.items():
        train = trainer(hidden, steps)
        train(5)
        phase(name, train)
    for name, make in SCRIPTS.items():
        made = make()
        made()
        phase(name, made)
    lines = api.session_stats()["lines"]
    loaded.clear()
    api.disable()
    return found, lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--repeat", type=int, default=3, help="rounds; the first one warms up, if there are more")
    parser.add_argument("--trips", type=int, nargs="+", default=[20, 80], help="round trips in ms")
    parser.add_argument("--compiled", action="store_true", help="also generate with a compiled step")
    parser.add_argument("--lines", action="store_true", help="also print the lines that waited longest, to stderr")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = {ms: [] for ms in (0, *args.trips)}
    lines = {}
    with tempfile.TemporaryDirectory() as folder, executor_process() as running:
        save_model(folder)
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        proxy = context.Process(target=distant, args=(running.endpoints[0], args.trips, theirs), daemon=True)
        proxy.start()
        endpoints = {0: running.endpoints[0]} | dict(zip(args.trips, pipe.recv(), strict=True))
        for _ in range(args.repeat):
            for ms, endpoint in endpoints.items():
                phases, lines[ms] = session(endpoint, running, folder, args.compiled)
                found[ms].append(phases)
                told = ", ".join([f"{name} {p[0]:.2f} s in {p[1]} trips" for name, p in phases.items()])
                print(f"{ms} ms: {told}", file=sys.stderr, flush=True)
        pipe.send(None)
        proxy.join()
    rows = []
    for name, goals in GOALS.items():
        if name not in found[0][0]:
            continue
        here = [phases[name] for phases in found[0]]
        base = statistics.median([seconds for seconds, *_ in (here[1:] or here)])  # the first session warms up
        rows.append(row(f"{name}, here", "s", base, None, None) | {"trips": here[-1][1]})
        for ms in args.trips:
            there = [phases[name] for phases in found[ms]]
            there = there[1:] or there
            assert all(result == here[0][3] for *_, result in there), f"{name}: the result differs at {ms} ms"
            seconds = [s for s, *_ in there]
            spread = [round(s, 3) for s in (min(seconds), max(seconds))]
            figure = row(f"{name}, {ms} ms", "s", statistics.median(seconds), base, goals.get(ms), spread=spread)
            rows.append(figure | {"trips": there[-1][1], "bytes": there[-1][2]})
    for ms, top in lines.items() if args.lines else ():
        print(f"{ms} ms:", json.dumps(top, indent=1), file=sys.stderr)
    if not args.json:
        rows = [r | {"name": f"{r['name']} ({r.pop('trips')} trips)"} for r in rows]
    show(rows, args.json, baseline="here")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
