"""Measures which share of the instructions of real models runs as generated kernels, as library calls by choice, and at tier 0.

Models run on a device in another process. The programs that the client sends are compiled as the executor would compile them.
Each program counts as often as it runs after a warm-up, in the steady state. Products, convolutions, attention and random numbers
are left to the library by choice. All other instructions without a kernel are listed by opcode, with the reason.

Run: .venv/bin/python bench/coverage.py [--json] [--only NAME] [--list N]
"""

import argparse
import json
import sys
from collections import Counter

import torch
from rich.console import Console
from rich.table import Table
from wooly import api
from wooly.link import Link
from wooly_compiler.artifacts import compiled
from wooly_testkit.executor import executor_process
from wooly_wis.codec import decode_program, digest
from wooly_wis.frames import Kind, unpack_run
from wooly_wis.optable import TABLE, Family
from wooly_wis.plan import KernelStep, LibraryStep, Line, Plan

#: Parts of the names of library operators that generated kernels do not replace by choice.
CHOSEN = (
    "mm.", "linear.", "convolution", "conv", "attention", "pool", "einsum", "dropout", "rand", "normal", "bernoulli",
    "multinomial", "exponential", "uniform", "linalg", "fft", "sort", "topk", "nonzero", "unique",
)  # fmt: skip


def name_of(line: Line) -> str:
    """Return the name of an instruction in the list."""
    return str(line.form.attr("name") or line.form.opcode)


def by_choice(line: Line) -> bool:
    """Whether the instruction is left to the library by choice."""
    row = TABLE.get(line.form.opcode)
    if row is not None:
        return row.family is Family.CONTRACTION
    return any(word in name_of(line) for word in CHOSEN)


class Capture:
    """Programs and the number of their runs, taken from the client's frames."""

    def __init__(self):
        self.programs = {}
        self.runs = Counter()
        self.params = {}  # of the last run of each program

    def frame(self, kind, data):
        """Record one frame that the client sends."""
        if kind == Kind.DEFINE:
            self.programs[digest(data)] = decode_program(data)
        elif kind == Kind.RUN:
            run = unpack_run(data)
            self.runs[run.digest] += 1
            self.params[run.digest] = run.params


def llama_config(layers=2):
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=688, num_hidden_layers=layers, num_attention_heads=8
    )


def llama_generate(measure):
    """Greedy decoding."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(llama_config()).eval().to("cuda")
    prompt = torch.arange(5, 13).unsqueeze(0).to("cuda")

    def run():
        model.generate(prompt, max_new_tokens=24, min_new_tokens=24, do_sample=False, pad_token_id=0).cpu()

    run()
    measure(run)


def llama_prefill(measure):
    """A forward pass over a batch of prompts."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(llama_config()).eval().to("cuda")
    ids = torch.randint(0, 1000, (4, 64)).to("cuda")

    def run():
        with torch.no_grad():
            model(ids).logits.argmax(-1).cpu()

    run()
    measure(run)


def bert(measure):
    """A forward pass with a padding mask."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8
    )
    model = BertForSequenceClassification(config).eval().to("cuda")
    ids, mask = torch.randint(0, 1000, (4, 64)).to("cuda"), torch.ones(4, 64, dtype=torch.long).to("cuda")
    mask[2:, 40:] = 0

    def run():
        with torch.no_grad():
            model(input_ids=ids, attention_mask=mask).logits.argmax(-1).cpu()

    run()
    measure(run)


def llama_train(measure):
    """AdamW steps."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(llama_config()).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 1000, (2, 32)).to("cuda")

    def run():
        for _ in range(3):
            loss = model(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()

    run()
    measure(run)


def transformer_train(measure):
    """An encoder block with dropout, cross entropy, SGD with momentum."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, activation="gelu")
    model = torch.nn.Sequential(torch.nn.Embedding(500, 128), layer, torch.nn.Linear(128, 500)).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ids = torch.randint(0, 500, (4, 33)).to("cuda")

    def run():
        for _ in range(3):
            logits = model(ids[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 500), ids[:, 1:].reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()

    run()
    measure(run)


def perceptron_train(measure):
    """Adam, batch norm, the loss read now and then."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(784, 512), torch.nn.BatchNorm1d(512), torch.nn.ReLU(), torch.nn.Linear(512, 10)
    ).to("cuda")
    optimizer = torch.optim.Adam(model.parameters())
    x, y = torch.randn(64, 784).to("cuda"), torch.randint(0, 10, (64,)).to("cuda")

    def run():
        for _ in range(3):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        loss.item()

    run()
    measure(run)


MODELS = {
    "llama-generate": (llama_generate, 0.02),
    "llama-prefill": (llama_prefill, 0.02),
    "bert": (bert, 0.02),
    "llama-train": (llama_train, None),
    "transformer-train": (transformer_train, None),
    "perceptron-train": (perceptron_train, None),
}


class Share:
    """Numbers of instructions by the part that runs them."""

    def __init__(self):
        self.kernels = self.removed = self.library = self.tier0 = self.launches = 0
        self.left = Counter()

    def add(self, plan: Plan, times: int) -> None:
        """Add a program that ran `times` times."""
        self.removed += len(plan.removed) * times
        for step in plan.steps:
            if isinstance(step, KernelStep):
                self.kernels += len(step.lines) * times
                self.launches += times
            elif isinstance(step, LibraryStep) and by_choice(step.line):
                self.library += times
            elif isinstance(step, LibraryStep):
                self.tier0 += times
                self.left[name_of(step.line), step.why] += times

    @property
    def total(self) -> int:
        """The number of all computing instructions."""
        return self.kernels + self.removed + self.library + self.tier0


def captured(name: str, capture: Capture) -> None:
    """Run a model, and record what it sends. A program that an earlier model defined is not sent again."""
    capture.runs.clear()

    def measure(run):
        torch.cuda.synchronize()
        capture.runs.clear()
        run()
        torch.cuda.synchronize()

    send = Link.send

    def recording(self, kind, *buffers, **options):
        if kind in (Kind.DEFINE, Kind.RUN):
            capture.frame(kind, b"".join(bytes(b) for b in buffers))
        return send(self, kind, *buffers, **options)

    Link.send = recording
    try:
        MODELS[name][0](measure)
    finally:
        Link.send = send


def share_of(name: str, capture: Capture) -> Share:
    """Run a model, and compile the programs that it sent."""
    found = Share()
    captured(name, capture)
    for key, times in capture.runs.items():
        found.add(compiled(capture.programs[key], trace=None, checks=True), times)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--only", choices=MODELS)
    parser.add_argument("--list", type=int, default=12, help="opcodes without a kernel that are listed per model")
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = [args.only] if args.only else list(MODELS)
    with executor_process() as running:
        api.attach(running.endpoints, running.session_id, running.token)
        api.install_facade()
        capture = Capture()
        found = {name: share_of(name, capture) for name in names}
        api.disable()
    rows = []
    for name, share in found.items():
        goal = MODELS[name][1]
        part = share.tier0 / share.total
        rows.append({"name": f"{name}: tier 0's share of instructions", "unit": "", "ours": round(part, 4), "baseline": None,
                     "ratio": None, "goal": goal, "ok": None if goal is None else part <= goal,
                     "instructions": share.total, "kernels": share.kernels + share.removed, "launches": share.launches,
                     "library": share.library, "tier0": share.tier0})  # fmt: skip
    if args.json:
        print(json.dumps(rows))
        return
    console = Console(width=160)
    table = Table("model", "instructions", "by kernels", "launches", "library", "tier 0", "share", "goal")
    for name, row in zip(names, rows, strict=True):
        table.add_row(
            name, *[str(row[k]) for k in ("instructions", "kernels", "launches", "library", "tier0", "ours", "goal")]
        )
    console.print(table)
    for name, share in found.items():
        console.print(f"[bold]{name}")
        for (opcode, why), times in share.left.most_common(args.list):
            console.print(f"  {times:5}  {opcode}: {why}", highlight=False)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
