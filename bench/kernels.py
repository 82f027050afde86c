"""Measures foreign kernels in Triton and CUDA C: the cost of capturing a launch, and their time on PoCL against torch and
Triton's interpreter.

Run: .venv/bin/python bench/kernels.py [--json] [--repeat N] [--cuda-c | --first]. Needs pyopencl, and Triton except with --cuda-c
and --first. All sides use two threads, except for the interpreter, which has one. --first: how long a first launch waits for its
code, by the source of the code.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
THREADS = 2
#: Works that take the interpreter longer than all others together.
NOT_INTERPRETED = {"layer norm, 1024 x 1000"}
#: Number of launches between two waits for the device.
TOGETHER = 10


def row(name, unit, ours, baseline, goal):
    """Return one result. `goal` limits the ratio, or the figure itself if there is no baseline."""
    ratio = ours / baseline if baseline else None
    value = ours if ratio is None else ratio
    return {
        "name": name,
        "unit": unit,
        "ours": round(ours, 3),
        "baseline": round(baseline, 3) if baseline else None,
        "ratio": round(ratio, 3) if ratio else None,
        "goal": goal,
        "ok": value <= goal,
    }


def works(place):
    """Return, for each work: name, goal against torch, our function, torch's function, and whether the interpreter finishes
    within minutes.
    """
    from services.compiler.tests.kernels import triton_kernels as kernels

    torch.manual_seed(0)

    def make(*shape):
        return torch.randn(*shape).to(place)

    x, y = make(1 << 20), make(1 << 20)
    rows, w, b = make(1024, 1000), make(1000), make(1000)
    few = rows[:64].contiguous()
    a, c = make(256, 256), make(256, 256)
    q, k, v = [make(1, 4, 256, 64) for _ in range(3)]
    functional = torch.nn.functional
    sums, soft, product = torch.empty_like(x), torch.empty_like(rows), torch.empty_like(a)

    def matmul():  # without autotune, which Triton's interpreter does not support
        kernels.matmul_kernel.fn[(16,)](
            a, c, product, 256, 256, 256, *a.stride(), *c.stride(), *product.stride(), BM=64, BN=64, BK=32
        )

    return [
        (
            "vector add, 1M",
            3.0,
            lambda: kernels.add_kernel[(1024,)](x, y, sums, 1 << 20, BLOCK=1024),
            lambda: torch.add(x, y, out=sums),
        ),
        (
            "softmax, 1024 x 1000",
            3.0,
            lambda: kernels.softmax_kernel[(1024,)](soft, rows, 1000, 1000, BLOCK=1024),
            lambda: torch.softmax(rows, -1, out=soft),
        ),
        (
            "layer norm, 1024 x 1000",
            6.0,
            lambda: kernels.LayerNorm.apply(rows, w, b, 1e-5),
            lambda: functional.layer_norm(rows, (1000,), w, b),
        ),
        (
            "layer norm, 64 x 1000",
            6.0,
            lambda: kernels.LayerNorm.apply(few, w, b, 1e-5),
            lambda: functional.layer_norm(few, (1000,), w, b),
        ),
        ("matmul, 256", 10.0, matmul, lambda: torch.mm(a, c, out=product)),
        (
            "flash attention, 4 heads, 256 x 64",
            10.0,
            lambda: kernels.attention(q, k, v, False),
            lambda: functional.scaled_dot_product_attention(q, k, v),
        ),
    ]


def timed(work, repeat, after=lambda: None):
    """Return the median of `repeat` measurements of `TOGETHER` runs each, in ms per run, after two warm-up measurements."""
    found = []
    for k in range(repeat + 2):
        begun = time.perf_counter()
        for _ in range(TOGETHER):
            work()
        after()
        if k >= 2:
            found.append((time.perf_counter() - begun) * 1e3 / TOGETHER)
    return statistics.median(found)


def cuda_works(place):
    """Return, for each kernel in CUDA C: name, goal against torch, our function (None on the CPU), torch's function."""
    import wooly

    from services.compiler.tests.kernels import cuda_kernels as kernels

    torch.manual_seed(0)
    x, y, rows, a, b = [
        torch.randn(*s).to(place) for s in ((1 << 20,), (1 << 20,), (1024, 1024), (256, 256), (256, 256))
    ]
    values = torch.randint(0, 64, (1 << 20,), dtype=torch.int32).to(place)
    out, product, sums = torch.empty_like(x), torch.empty_like(a), torch.zeros(1024).to(place)
    bins, n = torch.zeros(64, dtype=torch.int32).to(place), 1 << 20

    def launch(source, name, grid, block, args, **more):
        kernel = wooly.cuda_kernel(source, name)
        return lambda: kernel(grid, block, args, **more)

    one, many = (256, 1, 1), (n // 256, 1, 1)
    add, count = kernels.ADD, kernels.HISTOGRAM
    reduce, warps = kernels.REDUCE, kernels.WARPS
    tiles, product_args = (16, 16, 1), [a, b, product, 256, 256, 256]
    return [
        ("vector add, 1M", 6.0, launch(add, "add", many, one, [x, y, out, n]), lambda: x + y),
        ("histogram, 1M", 10.0, launch(count, "histogram", (16, 1, 1), one, [values, bins, n]),
         lambda: values.bincount(minlength=64)),
        ("sum, 1M", 20.0, launch(reduce, "reduce", (64, 1, 1), one, [x, sums, n], shared_mem=1024), lambda: x.sum()),
        ("sums of rows by warps, 1024 x 1024", 200.0, launch(warps, "row_sums", (1024, 1, 1), one, [rows, sums, 1024]),
         lambda: rows.sum(1)),
        ("matmul with tiles, 256", 30.0, launch(kernels.MATMUL, "matmul", tiles, tiles, product_args), lambda: a @ b),
    ]  # fmt: skip


def capture(launch, repeat, n=2000):
    """Client CPU time of a cached launch, in us."""
    costs = []
    for _ in range(repeat + 1):  # the first one captures
        begun = time.process_time()
        for _ in range(n):
            launch()
        costs.append((time.process_time() - begun) / n * 1e6)
        torch.cuda.synchronize()
    return statistics.median(costs[1:])


def cuda_rows(repeat):
    """The cost of launches in CUDA C on an attached device."""
    import wooly

    from services.compiler.tests.kernels.cuda_kernels import ADD

    local = {name: timed(theirs, repeat) for name, _, _, theirs in cuda_works("cpu")}
    x = torch.randn(1024, device="cuda")
    add, args = wooly.cuda_kernel(ADD, "add"), [x, x, torch.empty_like(x), 1024]

    cost = capture(lambda: add((4, 1, 1), (256, 1, 1), args), repeat)
    yield row("CUDA C: capture of a launch, cached (client's CPU)", "us", cost, None, 50.0)
    for name, goal, work, _ in cuda_works("cuda"):
        ours = timed(work, repeat, torch.cuda.synchronize)
        yield row(f"CUDA C: {name}, against torch", "ms", ours, local[name], goal)


def interpreted():
    """Run each work once in a separate process with TRITON_INTERPRET=1. Returns the times in ms."""
    found = {}
    for name, _, work, _ in works("cpu"):
        if name in NOT_INTERPRETED:
            continue
        begun = time.perf_counter()
        work()
        found[name] = (time.perf_counter() - begun) * 1e3
    print(json.dumps(found))


def rows_of(repeat):
    from wooly import api
    from wooly_testkit.executor import executor_process

    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    asked = subprocess.run(
        [sys.executable, __file__, "--interpreted"], env=environment, capture_output=True, text=True, check=False
    )
    if asked.returncode:
        print(f"Triton's interpreter failed, its rows are missing: {asked.stderr[-500:]}", file=sys.stderr)
    slow = json.loads(asked.stdout.splitlines()[-1]) if asked.returncode == 0 else {}
    torch.set_num_threads(THREADS)
    local = {name: timed(theirs, repeat) for name, _, _, theirs in works("cpu")}
    with executor_process(runtime="opencl", threads=THREADS) as running:
        api.attach(running.endpoints, running.session_id, running.token)
        api.install_facade()
        from services.compiler.tests.kernels import triton_kernels as kernels

        x, y = torch.randn(1024, device="cuda"), torch.randn(1024, device="cuda")
        out = torch.empty_like(x)
        launch = kernels.add_kernel[(1,)]

        cost = capture(lambda: launch(x, y, out, 1024, BLOCK=1024), repeat)
        yield row("capture of a launch, cached (client's CPU)", "us", cost, None, 50.0)
        for name, goal, work, _ in works("cuda"):
            ours = timed(work, repeat, torch.cuda.synchronize)
            yield row(f"{name}, against torch", "ms", ours, local[name], goal)
            if name in slow:
                yield row(f"{name}, against Triton's interpreter", "ms", ours, slow[name], 0.1)
        yield from cuda_rows(repeat)
        api.disable()


def cuda_rows_alone(repeat):
    """Run the rows that do not need Triton."""
    from wooly import api
    from wooly_testkit.executor import executor_process

    torch.set_num_threads(THREADS)
    with executor_process(runtime="opencl", threads=THREADS) as running:
        api.attach(running.endpoints, running.session_id, running.token)
        api.install_facade()
        yield from cuda_rows(repeat)
        api.disable()


def first_launch(endpoints, session_id, token):
    """Return the time of a kernel's first launch in a new session, in ms."""
    import wooly
    from wooly import api

    from services.compiler.tests.kernels.cuda_kernels import REDUCE

    api.attach(endpoints, session_id, token)
    api.install_facade()
    x, out = torch.ones(4096, device="cuda"), torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    kernel = wooly.cuda_kernel(REDUCE, "reduce")
    begun = time.perf_counter()
    kernel((4, 1, 1), (128, 1, 1), [x, out, 4096], shared_mem=512)
    torch.cuda.synchronize()
    taken = (time.perf_counter() - begun) * 1e3
    assert out.sum().item() == 4096
    api.disable()
    return taken


def first_rows():
    """First launches: without any cache, with code on disk, with code from a compiler, with code that a compiler built for
    another executor.
    """
    from wooly_bus import contracts
    from wooly_bus.errors import NoResponderError
    from wooly_bus.rpc import ControlClient
    from wooly_testkit.executor import executor_process
    from wooly_testkit.nats import nats_server
    from wooly_wis.messages import HostSessionRequest

    with tempfile.TemporaryDirectory(prefix="wooly-bench-") as folder, nats_server() as url:
        for what, goal in (("nothing is kept", 5000.0), ("its code is on disk", 500.0)):
            os.environ["WOOLY_EXECUTOR_STATE_DIR"] = f"{folder}/alone"
            with executor_process(runtime="opencl", threads=THREADS) as running:
                taken = first_launch(running.endpoints, running.session_id, running.token)
            yield row(f"first launch, {what}", "ms", taken, None, goal)
        processes = []

        def start(module, **environment):
            environment = os.environ | {"OMP_NUM_THREADS": str(THREADS)} | environment
            processes.append(
                subprocess.Popen([sys.executable, "-m", module], env=environment, stderr=subprocess.DEVNULL)
            )

        start("wooly_compiler", WOOLY_COMPILER_NATS_URL=url, WOOLY_COMPILER_STATE_DIR=f"{folder}/compiler")
        time.sleep(8)  # the compiler listens once its worker has reported its targets
        control = ControlClient(url)
        for name, what, goal in (
            ("a", "made by a compiler service", 5000.0),
            ("b", "made for another executor before", 1000.0),
        ):
            start(
                "wooly_executor",
                WOOLY_EXECUTOR_NATS_URL=url,
                WOOLY_EXECUTOR_ID=name,
                WOOLY_EXECUTOR_STATE_DIR=f"{folder}/{name}",
            )
            request = HostSessionRequest(session_id=f"s{name}", token="t", tenant="t", priority=2, lease_s=600)
            opened = None
            while opened is None:
                try:
                    opened = control.request(contracts.EXECUTOR_SESSION_OPEN.at(name), request)
                except NoResponderError:
                    time.sleep(0.1)
            taken = first_launch(list(opened.endpoints), f"s{name}", "t")
            yield row(f"first launch, {what}", "ms", taken, None, goal)
        control.close()
        for process in processes:
            process.kill()
            process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument(
        "--cuda-c", action="store_true", help="run only the kernels in CUDA C, which do not need Triton"
    )
    parser.add_argument("--first", action="store_true", help="measure only first launches")
    parser.add_argument("--interpreted", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.interpreted:
        interpreted()
        return
    rows = list(first_rows() if args.first else (cuda_rows_alone if args.cuda_c else rows_of)(args.repeat))
    if args.json:
        print(json.dumps(rows))
    else:
        for r in rows:
            cells = [str(r[k] if r[k] is not None else "") for k in ("ours", "baseline", "unit", "ratio", "goal", "ok")]
            print(f"{r['name']:62}" + "".join([f"{c:>10}" for c in cells]))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
