"""What generated kernels gain: on PoCL, over torch's own memory, against eager torch on the same cores, both in this run.

Both sides write their results to fresh memory, as programs do; eager torch pays for its temporaries too, which our kernels do not
have. The optimizer's baseline is torch's own `AdamW(foreach=True)`. A time is the best of several, both sides in turn, for what
else runs on the machine only adds to it. With `--clock cpu` it is the processor time of all threads: what to look at where others
keep the cores busy.

Run: .venv/bin/python bench/jit.py [--json] [--only NAME] [--repeat N] [--quick] [--clock wall|cpu]
"""

import argparse
import json
import os
import sys
import tempfile
import time
import warnings

# a cold cache, so that the cost of a build is that of a new kernel
os.environ["POCL_CACHE_DIR"] = _cache = tempfile.mkdtemp(prefix="wooly-jit-bench-")

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from wooly_compiler.build import opencl
from wooly_compiler.pipeline import compile_program
from wooly_compiler.plan import KernelStep
from wooly_testkit.tape import Tape
from wooly_wis.dtypes import DType


def row(name, unit, ours, baseline, goal, *, higher_is_better=True, spread=None):
    """One result; the ratio says how many times faster we are (or, for costs, is left out)."""
    ratio = baseline / ours if baseline else None
    value = ratio if baseline else ours
    ok = None if goal is None else (value >= goal if higher_is_better else value <= goal)
    return {
        "name": name,
        "unit": unit,
        "ours": round(ours, 3),
        "baseline": round(baseline, 3) if baseline else None,
        "ratio": round(ratio, 3) if ratio else None,
        "goal": goal,
        "ok": ok,
        "spread": spread,
    }


class Compiled:
    """A tape of kernels alone, bound to torch tensors once, as an executor binds a session's buffers."""

    def __init__(self, tape, bound, fresh=()):
        program, slots = tape.program()
        started = time.perf_counter()
        self.plan = compile_program(program, params=tape.params)
        self.compile_s = time.perf_counter() - started
        device = opencl.default_device()
        memory = {slots[t.slot]: opencl.wrap(device, v.view(-1).view(torch.uint8).numpy()) for t, v in bound}
        steps = [s for s in self.plan.steps if isinstance(s, KernelStep)]
        started = time.perf_counter()
        built = [opencl.build(s.kernel) for s in steps]
        self._memory, self._steps, self._params = memory, steps, tape.params
        self._built = built
        self._fresh = [(slots[t.slot], t.view.numel) for t in fresh]
        self.results = []
        self()  # PoCL finishes a kernel when it is first run
        self.build_s = time.perf_counter() - started
        started = time.perf_counter()
        again = [opencl.build(s.kernel) for s in steps]
        self._built = again
        self()
        self.cached_s = time.perf_counter() - started
        self.kernels = len(steps)

    def __call__(self):
        device = opencl.default_device()
        self.results = [torch.empty(n) for _, n in self._fresh]
        made = {slot: opencl.wrap(device, t.numpy()) for (slot, _), t in zip(self._fresh, self.results, strict=True)}
        for built, step in zip(self._built, self._steps, strict=True):
            arrays = [made[slot] if slot in made else self._memory[slot] for slot in step.slots]
            built.launch(arrays, [self._params[p] for p in step.params])
        device.queue.finish()


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def pair(ours, baseline, repeat, clock):
    """The best of both sides, run in turn, and the spread of the ratio."""
    ours(), baseline()
    a, b = [], []
    for _ in range(repeat):
        for function, found in ((ours, a), (baseline, b)):
            started = clock()
            function()
            found.append(clock() - started)
    ratios = sorted(y / x for x, y in zip(a, b, strict=True))
    return min(a) * 1e3, min(b) * 1e3, [round(ratios[0], 2), round(ratios[-1], 2)]


def result(name, compiled, baseline, goal, args):
    ours, theirs, spread = pair(compiled, baseline, args.repeat, CLOCKS[args.clock])
    yield row(name, "ms", ours, theirs, goal, spread=spread)
    yield row(f"{name}: {compiled.kernels} kernels, plan", "ms", compiled.compile_s * 1e3, None, None)
    yield row(f"{name}: build and first run, cold", "ms", compiled.build_s * 1e3, None, None)
    yield row(f"{name}: build and run again, cached", "ms", compiled.cached_s * 1e3, None, None)


def bench_gelu(args, scale):
    """GELU(x * w + b) on 16 million floats."""
    n = (1 << 24) // scale
    a = torch.randn(n)
    for kind, opcode in (("none", "gelu"), ("tanh", "gelu_tanh")):
        t = Tape()
        x = t.input(DType.F32, n)
        m = t.op("mul", x, 1.1)
        s = t.op("add", m, 0.1)
        t.free(m)
        y = t.op(opcode, s)
        t.free(s)
        compiled = Compiled(t, [(x, a)], [y])

        def eager(kind=kind):
            return F.gelu(a * 1.1 + 0.1, approximate=kind)

        torch.testing.assert_close(compiled.results[0], eager(), rtol=1e-5, atol=1e-5)
        yield from result(f"GELU(x*w+b), {kind}, 16M floats", compiled, eager, 5, args)


def bench_softmax(args, scale):
    """Softmax over rows of 4096."""
    rows = 4096 // scale
    t = Tape()
    x = t.input(DType.F32, rows, 4096)
    y = t.op("softmax", x, -1)
    a = torch.randn(rows, 4096)
    compiled = Compiled(t, [(x, a)], [y])

    def eager():
        return torch.softmax(a, -1)

    torch.testing.assert_close(compiled.results[0].view(rows, 4096), eager(), rtol=1e-5, atol=1e-7)
    yield from result("softmax 4096x4096", compiled, eager, 0.7, args)


def bench_norm(args, scale):
    """Layer norm, GELU, residual."""
    rows, n = 4096 // scale, 4096
    t = Tape()
    x, w, b, z = t.input(DType.F32, rows, n), t.input(DType.F32, n), t.input(DType.F32, n), t.input(DType.F32, rows, n)
    normal, mean, rstd = t.ops("layer_norm", x, (n,), w, b, 1e-5)
    t.free(mean, rstd)
    g = t.op("gelu", normal)
    t.free(normal)
    y = t.op("add", g, z)
    t.free(g)
    tensors = [torch.randn(rows, n), torch.randn(n), torch.randn(n), torch.randn(rows, n)]
    compiled = Compiled(t, list(zip((x, w, b, z), tensors, strict=True)), [y])

    def eager():
        return F.gelu(F.layer_norm(tensors[0], [n], tensors[1], tensors[2])) + tensors[3]

    torch.testing.assert_close(compiled.results[0].view(rows, n), eager(), rtol=1e-4, atol=1e-4)
    yield from result("layer norm + GELU + residual", compiled, eager, 3, args)


def bench_adamw(args, scale):
    """One step of AdamW over ten million parameters."""
    n, lr, decay, b1, b2, eps = 10_000_000 // scale, 1e-3, 0.01, 0.9, 0.999, 1e-8
    t = Tape()
    p, g, m, v = (t.input(DType.F32, n) for _ in range(4))
    t.op("mul", p, 1 - lr * decay, into=p)
    t.op("lerp", m, g, 1 - b1, into=m)
    t.op("mul", v, b2, into=v)
    t.op("addcmul", v, g, g, 1 - b2, into=v)
    d = t.op("sqrt", v)
    t.op("div", d, (1 - b2**2) ** 0.5, into=d)
    t.op("add", d, eps, into=d)
    t.op("addcdiv", p, m, d, -lr / (1 - b1**2), into=p)
    t.free(d)
    start, grad = torch.randn(n), torch.randn(n)
    mine = torch.nn.Parameter(start.clone())
    mine.grad = grad
    optimizer = torch.optim.AdamW([mine], lr=lr, betas=(b1, b2), eps=eps, weight_decay=decay, foreach=True)
    optimizer.step()
    state = optimizer.state[mine]
    own = [mine.detach().clone(), grad, state["exp_avg"].clone(), state["exp_avg_sq"].clone()]
    compiled = Compiled(t, list(zip((p, g, m, v), own, strict=True)))
    assert compiled.kernels == 1
    for kept, now in zip(own, (mine.detach(), grad, state["exp_avg"], state["exp_avg_sq"]), strict=True):
        kept.copy_(now)  # the build has run it already
    compiled()
    optimizer.step()
    torch.testing.assert_close(own[0], mine.detach(), rtol=1e-5, atol=1e-6)
    yield from result("AdamW step, 10M parameters", compiled, optimizer.step, 2, args)


BENCHES = {"gelu": bench_gelu, "softmax": bench_softmax, "norm": bench_norm, "adamw": bench_adamw}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--only", choices=BENCHES)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument(
        "--quick", action="store_true", help="a sixteenth of the sizes: shows that it runs, not how fast"
    )
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    torch.manual_seed(0)
    device = opencl.default_device()
    rows = []
    for name, bench in BENCHES.items():
        if args.only in (None, name):
            rows += bench(args, 16 if args.quick else 1)
    if args.json:
        print(json.dumps(rows))
    else:
        table = Table("name", "unit", "ours", "torch", "ratio", "spread", "goal", "ok",
                      title=f"{device.platform}, {device.name}, {torch.get_num_threads()} threads")  # fmt: skip
        for r in rows:
            table.add_row(*["" if r[k] is None else str(r[k]) for k in
                            ("name", "unit", "ours", "baseline", "ratio", "spread", "goal", "ok")])  # fmt: skip
        Console(width=130).print(table)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
