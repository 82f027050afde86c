"""Measures the cost of metering, and whether bills are fair.

ledger: events per second from the stream into PostgreSQL, and the memory meanwhile.
models: ten language models with random weights, with their real shapes times a scale (by default, the largest one that the CPU's
cache holds). Each model runs many times alone, and a few times while another tenant works: on its own CPU (apart), or through the
same executor (beside). The table shows credits with their spread, and the spread of a bill by time. The executor has its own
core, and clients share the other cores. So clients are equally slow apart and beside, and only the executor differs.
budget: how long a tenant continues after its hard limit.

Run: .venv/bin/python bench/credits.py [--json] [--only NAME] [--events N] [--scale X] [--runs N] [--generations N] [--models A,B]
     [--page FILE [--theirs FILE]]
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from dataclasses import replace
from pathlib import Path

import psutil
from figures import row, show
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from wooly_bus import contracts
from wooly_bus.rpc import ControlClient
from wooly_testkit.nats import nats_server
from wooly_testkit.postgres import postgres_server
from wooly_wis.credits import CreditsRequest, UsageRecord, UsageRecorded

#: Number of sessions that report usage, and of records per message.
SESSIONS, PER_MESSAGE = 1000, 100


# -- the ledger ------------------------------------------------------------------------------------------------------


def fill(url, count):
    """Publish usage of `count` records to the stream before it has a reader."""
    import asyncio

    import nats
    from wooly_bus.contract_types import Log
    from wooly_bus.streams import ensure_stream

    now = int(time.time() * 1e6)

    async def publish():
        client = await nats.connect(url)
        js = client.jetstream()
        event = contracts.EXECUTOR_USAGE_RECORDED
        await ensure_stream(
            js,
            replace(event, stream=Log(event.stream_name, max_age_s=3600, max_bytes=4 << 30)),
        )
        waiting = []
        for batch in range(1, count // PER_MESSAGE + 1):
            records = tuple(
                UsageRecord(
                    session_id=f"s{(batch * PER_MESSAGE + n) % SESSIONS}", tenant=f"tenant-{n % 20}", model=f"model-{n % 10}",
                    at_us=now, span_us=500_000, runs=20, gpu_ns=4_000_000, core_ns=4_000_000, moved_bytes=1 << 24,
                    flops=1 << 28, resident_mib_us=400_000, idle_mib_us=40_000_000,
                )
                for n in range(PER_MESSAGE)
            )  # fmt: skip
            message = UsageRecorded(
                source="bench/1", batch=batch, executor_id="bench", device_kind="cpu", cores=2, memory=1 << 34, records=records
            )  # fmt: skip
            waiting.append(js.publish(event.at("bench").subject, event.encoded(message)))
            if len(waiting) == 64:
                await asyncio.gather(*waiting)
                waiting = []
        await asyncio.gather(*waiting)
        await client.close()

    asyncio.run(publish())


def cpu_of_children():
    """Return the CPU seconds of all descendants of this process."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # the process has ended
            total += sum(process.cpu_times()[:2])
    return total


def bench_ledger(count):
    """Events per second from a full stream into PostgreSQL with one process, and its memory after a third and at the end."""
    count -= count % PER_MESSAGE
    with nats_server() as nats, postgres_server() as postgres, tempfile.TemporaryDirectory() as directory:
        fill(nats, count)
        env = os.environ | {
            "WOOLY_METERING_NATS_URL": nats,
            "WOOLY_METERING_DATABASE_URL": postgres.database(),
            "WOOLY_METERING_STATE_DIR": directory,
            "WOOLY_METERING_HTTP_PORT": "",
        }
        with (Path(directory) / "log").open("wb") as log:
            process = subprocess.Popen([sys.executable, "-m", "wooly_metering"], env=env, stdout=log, stderr=log)
        client = ControlClient(nats)
        try:
            watched, amount = psutil.Process(process.pid), 4_000_000
            begun = third = first = before = None
            while True:
                try:
                    reply = client.request(contracts.METERING_CREDITS_SHOW, CreditsRequest(limit=1))
                except Exception:
                    if process.poll() is not None:
                        raise RuntimeError((Path(directory) / "log").read_text()) from None
                    time.sleep(0.05)
                    continue
                done, now = reply.core_ucr // amount, time.perf_counter()
                if done and begun is None:
                    begun, first, before = now, done, cpu_of_children()
                if third is None and done >= count / 3:
                    third = watched.memory_info().rss
                if done == count:
                    break
                time.sleep(0.02)
            took, end, worked = now - begun, watched.memory_info().rss, cpu_of_children() - before
            assert reply.quarantined == 0
        finally:
            client.close()
            process.kill()
            process.wait()
    rate = (count - first) / took
    share = worked / took
    print(f"{share:.2f} cores of metering, PostgreSQL and NATS together", file=sys.stderr)
    return [
        row(
            "ledger, events per second with two cores",
            "events/s",
            2 * rate / share,
            None,
            20_000,
            higher_is_better=True,
            against="value",
        ),
        row(
            "ledger, events per second on this machine",
            "events/s",
            rate,
            None,
            20_000,
            higher_is_better=True,
            against="value",
        ),
        row("ledger, memory at the end against a third", "MiB", end / 2**20, third / 2**20, 1.1),
    ]


# -- ten models ------------------------------------------------------------------------------------------------------

PROMPT = "What is the capital of United States of America"
MAX_LENGTH = 100
#: Warm-up runs that do not count. A program is prepared at its first run, then compiled and combined, and its cost falls until
#: then.
WARM = 16
#: Number of runs alone per run beside another tenant.
ALONE = 4
#: Time in seconds for measuring the pace of the machine's cores, which gives a constant reference for prices.
LOOKS_S = 3.0
#: The shape of a model: family, layers, heads, heads of keys and values, width of a head, width of the MLP, vocabulary, and
#: whether the embedding is also the last layer. Source: the configurations that the models' owners publish. These are the ten
#: models of THEIR_PAGE, in its order. A tuned model has its base model's shape, and here its weights are random, too, so both
#: must cost the same.
MODELS = {
    "llama-3.2-1b": ("llama", 16, 32, 8, 64, 8192, 128256, True),
    "llama-3.2-1b-instruct": ("llama", 16, 32, 8, 64, 8192, 128256, True),
    "llama-3.2-3b": ("llama", 28, 24, 8, 128, 8192, 128256, True),
    "llama-3.2-3b-instruct": ("llama", 28, 24, 8, 128, 8192, 128256, True),
    "mistral-7b-instruct": ("mistral", 32, 32, 8, 128, 14336, 32000, False),
    "falcon3-7b-instruct": ("llama", 28, 12, 4, 256, 23040, 131072, False),
    "llama-3.1-8b-instruct": ("llama", 32, 32, 8, 128, 14336, 128256, False),
    "llama-3.1-8b": ("llama", 32, 32, 8, 128, 14336, 128256, False),
    "dolly-v2-12b": ("neox", 36, 40, 40, 128, 20480, 50688, False),
    "llama-2-13b-chat": ("llama", 40, 40, 40, 128, 13824, 32000, False),
}
#: Another product's table of the same ten models.
THEIR_PAGE = "https://woolyai.com/gpu-consumption-model-based-on-core-and-memory-usage-not-time-used"


def build(name, scale):
    """Return a model with random weights on the CPU. The scale shrinks all sizes except the width of a head."""
    import torch
    import transformers as t

    family, layers, heads, kv_heads, head, mlp, vocabulary, tied = MODELS[name]
    layers, heads = max(1, round(layers * scale)), max(1, round(heads * scale))
    kv_heads = next(n for n in range(max(1, round(kv_heads * scale)), 0, -1) if heads % n == 0)
    common = {
        "num_hidden_layers": layers, "hidden_size": heads * head, "num_attention_heads": heads,
        "intermediate_size": max(16, round(mlp * scale)), "vocab_size": max(64, round(vocabulary * scale)),
        "tie_word_embeddings": tied, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    if family == "neox":
        config = t.GPTNeoXConfig(**common)
    else:
        kind = t.LlamaConfig if family == "llama" else t.MistralConfig
        config = kind(head_dim=head, num_key_value_heads=kv_heads, **common)
    torch.manual_seed(0)
    return t.AutoModelForCausalLM.from_config(config).eval()


#: Candidates for the scale, the largest first, and the share of the CPU's last-level cache for the weights of one model, so that
#: those of two tenants fit. Weights that do not fit use the shared memory bus, on which tenants slow each other's CPU time.
SCALES, CACHE_PART = (1, 1 / 2, 1 / 4, 1 / 8, 1 / 12, 1 / 16, 1 / 24, 1 / 32), 1 / 2
CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")


def fitting(name):
    """Return the largest scale at which the cache of this machine's CPU holds a model's weights."""
    import torch

    cache = int(CACHE.read_text().strip().removesuffix("K")) << 10 if CACHE.exists() else 16 << 20
    with torch.device("meta"):
        sizes = {s: sum(p.nbytes for p in build(name, s).parameters()) for s in SCALES}
    return next((s for s in SCALES if sizes[s] <= CACHE_PART * cache), SCALES[-1])


def generate(model, generations, length):
    """Run the script of the published table. Token ids replace words, because random weights have no tokenizer."""
    import torch

    size = model.config.vocab_size
    words = [1] + [3 + zlib.crc32(word.encode()) % (size - 3) for word in PROMPT.split()]
    ids = torch.tensor([words], device=next(model.parameters()).device)
    for _ in range(generations):
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_length=length, min_length=length, do_sample=False
        )
        assert out.cpu().shape[1] == length


def work(order):
    """Run in a tenant's process: build the models that standard input names, and run each in its own session."""
    import warnings

    import torch
    from wooly import api
    from wooly.settings import Settings

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        model = build(job["model"], job["scale"])
        begun, session = time.perf_counter(), None
        if job["device"] == "cuda":
            api.enable(Settings(tenant=job["tenant"], model=job["model"]))
            session = api.opened_session().session_id
        with torch.no_grad():
            there = model.to(job["device"])
            generate(there, job["generations"], job["length"])
            while job.get("while") and Path(job["while"]).exists():
                generate(there, 1, job["length"])
        del there, model
        if session is not None:
            api.disable()
        print(json.dumps({"session": session, "seconds": time.perf_counter() - begun}), flush=True)


class Tenant:
    """A process of a tenant."""

    def __init__(self, reach):
        argv = [sys.executable, __file__, "--work", "{}"]
        env = os.environ | reach | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline() == "ready\n"

    def begin(self, **job):
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def end(self):
        return json.loads(self.process.stdout.readline())

    @contextlib.contextmanager
    def working(self, path, **job):
        """Let the tenant work during the block."""
        path.touch()
        self.begin(**{**job, "while": str(path)})
        time.sleep(1.5)
        try:
            yield
        finally:
            path.unlink()
            self.end()

    def close(self):
        self.process.kill()
        self.process.communicate()


def bill(client, session):
    while True:
        request = CreditsRequest(session_id=session, settled=True)
        reply = client.request(contracts.METERING_CREDITS_SHOW, request, timeout=10)
        if reply.rows and reply.rows[0].ended:
            return reply.rows[0]


@contextlib.contextmanager
def local_stack():
    from wooly_local.stack import start_stack

    given = {"OMP_NUM_THREADS": "1"}
    if "WOOLY_EXECUTOR_PACE" not in os.environ:
        given["WOOLY_EXECUTOR_PACE"] = str(reference_pace())
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    stack = start_stack(ephemeral=True)
    part_cores(stack)
    client = ControlClient(stack.access())
    try:
        yield stack, client
    finally:
        client.close()
        stack.stop()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def part_cores(stack):
    """Give the executor its own core, as on its own machine. All other processes share the other cores."""
    first, *others = sorted(os.sched_getaffinity(0))
    if not others:
        return
    executor = stack.services["executor-0"]
    mine = psutil.Process()
    for process in (mine, *mine.children(recursive=True)):
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {first} if process.pid == executor else set(others))


def worst(values):
    """Return the largest distance from the mean, in percent of the mean."""
    mean = statistics.fmean(values)
    return 100 * max(abs(v - mean) for v in values) / mean


def deviation(values):
    """Return the standard deviation, in percent of the mean."""
    return 100 * statistics.stdev(values) / statistics.fmean(values) if len(values) > 1 else 0.0


def spread(values):
    return f"{deviation(values):.1f} %" if len(values) > 1 else "-"


def reference_pace():
    """The pace of cores that an installation would be given: what the piece of work takes in the best moment, in ns."""
    from wooly_executor.billing.core_speed import CoreSpeed

    pace, begun = CoreSpeed(), time.monotonic()
    pace.begin()
    best = pace.mean_ns
    while time.monotonic() - begun < LOOKS_S:
        pace.look()
        best = min(best, pace.mean_ns)
    return max(1000, round(best))


#: Columns that are shown while the models run.
COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())


def bench_models(args):
    table = Table(
        "model", "scale", "core", "sd", "CPU s, sd", "VRAM", "sd",
        "apart", "beside", "VRAM", "beside", "s", "apart", "beside", box=None,
    )  # fmt: skip
    rows, lines, console = [], [], Console(stderr=True, width=None if sys.stderr.isatty() else 130)
    names = args.models.split(",") if args.models else list(MODELS)
    job = {"generations": args.generations, "length": args.length, "device": "cuda"}
    with local_stack() as (stack, client), Progress(*COLUMNS, console=console) as progress:
        tenant, neighbour = Tenant(stack.client_env), Tenant(stack.client_env)
        flag = stack.state_dir / "work"
        try:
            for name in names:
                other = "mistral-7b-instruct" if name != "mistral-7b-instruct" else "falcon3-7b-instruct"
                scale = args.scale or fitting(name)
                busy = {"model": other, "scale": args.scale or fitting(other), "tenant": "neighbour", "generations": 1}

                shown = progress.add_task(name, total=WARM + args.runs + 2 * -(-args.runs // ALONE))

                def run(name=name, scale=scale, shown=shown):
                    tenant.begin(model=name, scale=scale, tenant="bench", **job)
                    found = tenant.end()
                    progress.advance(shown)
                    return bill(client, found["session"]), found["seconds"]

                for _ in range(WARM):
                    run()
                alone, apart, beside = [], [], []
                for n in range(args.runs):  # in turns, so that other work of the machine affects all of them
                    alone.append(run())
                    if n % ALONE == 0:
                        for found, where in ((apart, {"device": "cpu"}), (beside, {})):
                            with neighbour.working(flag, **job | busy | where):
                                found.append(run())
                figures = {
                    key: [[getattr(b, f"{key}_ucr") / 1e6 for b, _ in found] for found in (alone, apart, beside)]
                    for key in ("core", "vram")
                }
                seconds = [statistics.fmean([s for _, s in found]) for found in (alone, apart, beside)]
                core, vram = figures["core"], figures["vram"]
                mean = {key: [statistics.fmean(v) for v in found] for key, found in figures.items()}
                cpu = [b.core_ns for b, _ in alone]
                table.add_row(
                    name, f"1/{1 / scale:g}",
                    f"{mean['core'][0]:.1f}", spread(core[0]), spread(cpu), f"{mean['vram'][0]:.2f}", spread(vram[0]),
                    f"{mean['core'][1]:.1f}", f"{mean['core'][2]:.1f}", f"{mean['vram'][1]:.2f}", f"{mean['vram'][2]:.2f}",
                    *[f"{s:.2f}" for s in seconds],
                )  # fmt: skip
                lines.append(
                    (name, scale, *(v for key in ("core", "vram") for v in (mean[key][0], deviation(figures[key][0]))))
                    + tuple(mean[key][2] / mean[key][1] for key in ("core", "vram"))
                )
                progress.remove_task(shown)
                done = ", ".join(
                    f"{key} {a:.2f} (sd {spread(figures[key][0])}), apart {b:.2f}, beside {c:.2f}"
                    for key, (a, b, c) in mean.items()
                )
                progress.console.print(f"{name}: {done}; CPU time's sd {spread(cpu)}", highlight=False)
                found = row(
                    f"{name}, core credits: standard deviation", "%", deviation(core[0]), None, 3, against="value"
                )
                rows.append(found | {"scale": scale, "runs": core[0], "apart": core[1], "beside": core[2]})
                for what, values in (("core credits", core[0]), ("CPU time", cpu)):
                    found = row(
                        f"{name}, {what}: largest deviation of a run from the mean",
                        "%",
                        worst(values),
                        None,
                        COMPARED,
                        against="value",
                    )
                    rows.append(found | {"goal": None})
                for key in ("core", "vram"):
                    _, aside, shared = mean[key]
                    found = row(f"{name}, {key} credits beside another tenant", "credits", shared, aside, 1.05)
                    rows.append(found | {"ok": abs(shared / aside - 1) <= 0.05})
                    found = row(
                        f"{name}, {key} credits beside another tenant against alone",
                        "credits",
                        shared,
                        mean[key][0],
                        COMPARED,
                    )
                    rows.append(found | {"goal": None})
                found = row(f"{name}, time beside another tenant", "s", seconds[2], seconds[1], COMPARED)
                rows.append(found | {"goal": None})
                assert all(len(v) for v in (*core, *vram))
        finally:
            tenant.close()
            neighbour.close()
        rows.append(both_ways(stack, client))
    console.print(table)
    if args.page:
        args.page.write_text(page(args, lines))
    return rows


def page(args, lines):
    """Return the page of the documentation that shows the table, in Markdown."""
    theirs = json.loads(args.theirs.read_text()) if args.theirs else {}
    about = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in about if line.startswith("model name")), "unknown")
    columns = ["model", "scale", "core credits", "sd", "VRAM credits", "sd", "core, beside", "VRAM, beside"]
    align = ["---"] + ["---:"] * 7
    if theirs:
        columns += ["Wooly Credits, core", "Wooly Credits, VRAM"]
        align += ["---:", "---:"]
    table = []
    for name, scale, core, core_sd, vram, vram_sd, core_beside, vram_beside in lines:
        cells = [name, f"1/{1 / scale:g}", f"{core:.1f}", f"{core_sd:.1f} %", f"{vram:.2f}", f"{vram_sd:.1f} %"]
        cells += [f"{core_beside:.3f}", f"{vram_beside:.3f}"]
        table.append(cells + [str(v) for v in (theirs.get(name, ["", ""]) if theirs else [])])
    grid = "\n".join("| " + " | ".join(cells) + " |" for cells in (columns, align, *table))
    return PAGE.format(
        runs=args.runs, generations=args.generations, length=args.length, warm=WARM, grid=grid, model=model,
        threads=os.cpu_count(), date=time.strftime("%Y-%m-%d"), page=THEIR_PAGE,
        their_column=THEIR_COLUMN if theirs else NO_THEIR_COLUMN,
    )  # fmt: skip


THEIR_COLUMN = """\
The last two columns are that product's own figures for the same models, in its unit. Its unit is
not ours, so compare the order of the models and the spread, not the numbers."""

NO_THEIR_COLUMN = """\
That page's figures are not repeated here, because no copy of them was at hand when the table was
made. `--theirs FILE` adds them as two columns, in their unit. The file is JSON:
`{"llama-3.2-1b": [core credits, VRAM credits], ...}`."""

#: The page of the documentation, by `--page`.
PAGE = """\
# Credits of ten models

Command: `make credits-table`, which runs `bench/credits.py --only models` and writes this page.
Machine: {model}, {threads} hardware threads, no GPU. Date: {date}.

{grid}

- A row is the mean of {runs} runs, each a session of its own, after {warm} runs that do not count. A
  run generates {generations} times, to {length} tokens each, from one prompt.
- sd: the standard deviation of the {runs} bills, in percent of their mean.
- beside: the price of a run while another tenant generates on the same executor, divided by its
  price while that tenant generates on its own CPU. The client is equally slow in both cases. 1 means
  that the neighbour does not change the bill.
- Core credits pay for the time that cores of the device worked. VRAM credits pay for memory over
  time, so they fall when a run is faster. See the guide about [credits](../guides/credits.md).

## Compared with another product's table

WoolyAI publishes [a table]({page}) of the same ten models, 20 runs each.

{their_column}

What differs:

- Weights are random and token ids stand for words, because this table needs no download. A bill
  depends on shapes, not on the values of weights. A tuned model has its base model's shape, so both
  cost the same here.
- The shapes are scaled down (column "scale") to what the cache of this CPU holds, because this
  machine cannot hold the models. A bill at scale 1 is not this bill times the inverse of the scale.
- The device is a CPU. Theirs is a GPU.
- All tokens are generated: generation does not stop at an end-of-text token, which random weights
  would choose by chance.
"""


#: Shown for comparison, without a goal.
COMPARED = 1e9


def both_ways(stack, client):
    """Compare core time in the ledger with that of the dispatch journal, which the scheduler adds up.

    Both contain the same launches. The ledger also contains the decoding of programs, so it is larger.
    """
    import urllib.request

    time.sleep(2)
    port = (stack.state_dir / "scheduler.port").read_text()
    owner = {"Authorization": f"Bearer {stack.token}"}
    with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=owner)) as answer:
        lines = answer.read().decode().splitlines()
    journal = sum(float(line.split()[-1]) for line in lines if line.startswith("wooly_tenant_core_seconds_total{"))
    reply = client.request(contracts.METERING_CREDITS_SHOW, CreditsRequest(by="model", limit=1000))
    ledger = sum(r.core_ns for r in reply.rows) / 1e9
    name = "core time of all tenants: ledger (launches, decoding) against journal (launches)"
    return row(name, "s", ledger, journal, None) | {"ok": ledger >= 0.99 * journal}


# -- budgets ---------------------------------------------------------------------------------------------------------

SPEND = """
import time, torch
x = torch.ones(300, 300, device="cuda")
begun = time.time()
try:
    while True:
        (x @ x).sum().item()
except RuntimeError as e:
    print("held" if "used up" in str(e) else e, flush=True)
"""


def bench_budget(args):
    """Measure how much a tenant spends beyond its limit, in seconds at its rate of spending."""
    from wooly_wis.credits import SetBudgetRequest

    with local_stack() as (stack, client), tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "spend.py"
        script.write_text(SPEND)
        limit = 1_000 * 1_000_000
        budget = SetBudgetRequest(tenant="spender", hard_ucr=limit)
        while True:
            with contextlib.suppress(Exception):
                client.request(contracts.METERING_BUDGET_SET, budget, timeout=10)
                break
        env = os.environ | stack.client_env | {"WOOLYAI_TENANT": "spender"}
        argv = [sys.executable, "-m", "wooly", "run", "--quiet", str(script)]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300)
        assert done.stdout.strip() == "held", done.stdout + done.stderr
        time.sleep(1)
        reply = client.request(contracts.METERING_CREDITS_SHOW, CreditsRequest(tenant="spender"), timeout=10)
    spent, used = reply.core_ucr + reply.vram_ucr, reply.rows[0]
    # The device did little else while the tenant spent, so its rate is at least its spending divided by its lifetime.
    pace = spent / ((used.until_us - used.began_us) / 1e6)
    return [
        row("hard limit, seconds until the tenant is held", "s", (spent - limit) / pace, None, 2.0, against="value")
    ]


# -- main --------------------------------------------------------------------------------------------------------------

BENCHES = {"ledger": lambda args: bench_ledger(args.events), "models": bench_models, "budget": bench_budget}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=BENCHES, action="append")
    parser.add_argument("--events", type=int, default=300_000)
    parser.add_argument(
        "--scale",
        type=float,
        help="scale of the models' shapes; 1: real shapes; default: the largest that the cache holds",
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--generations", type=int, default=9)
    parser.add_argument("--length", type=int, default=MAX_LENGTH, help="tokens per generation, including the prompt")
    parser.add_argument("--models", default="", help=f"models, separated by commas: {', '.join(MODELS)}")
    parser.add_argument(
        "--page", type=Path, help="write the models' table to this file, as a page of the documentation"
    )
    parser.add_argument(
        "--theirs", type=Path, help="JSON file with that product's credits, for two columns of the page"
    )
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(json.loads(args.work))
        return 0
    rows = []
    for name in args.only or BENCHES:
        with contextlib.redirect_stdout(sys.stderr):
            rows += BENCHES[name](args)
    show(rows, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
