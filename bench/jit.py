"""Measures the gain of generated kernels: on PoCL, on torch's own memory, against torch on the same cores, both in this run.

Results and temporaries of the kernels are in memory that was used before, as in the executor's pool. torch uses its own
allocator, which gets large tensors from the system each time, page by page. Two more rows make this visible: `fresh` puts the
kernels' results in new memory, too, and `bytes` compares with a copy of as many bytes in used memory, which no kernel can beat by
much. The baseline of the optimizer is torch's own `AdamW(foreach=True)`.

A time is the best of several, with all sides in turn, because other work on the machine can only increase it. `spread` has the
minimum, median and maximum of the ratios of all turns. With `--clock cpu`, the times are CPU times of all threads, which is
better on a busy machine. `--compiled` also compares with `torch.compile`, whose compiler takes long.

`first` and `shares` are measured with whole stacks and a running compiler: see `bench/tiers.py`.

Run: .venv/bin/python bench/jit.py [--json] [--only NAME] [--repeat N] [--quick] [--clock wall|cpu] [--compiled]
"""

import argparse
import functools
import os
import sys
import tempfile
import time
import warnings

import figures
import tiers

# a cold cache, so that a build costs as much as that of a new kernel
os.environ["POCL_CACHE_DIR"] = _cache = tempfile.mkdtemp(prefix="wooly-jit-bench-")

import numpy as np
import torch
import torch.nn.functional as F
from wooly_compiler.build import opencl
from wooly_compiler.pipeline import compile_program
from wooly_executor.runtime.products import onednn_product
from wooly_testkit import optimizers
from wooly_testkit.tape import Tape
from wooly_wis.dtypes import DType
from wooly_wis.plan import AllocStep, FreeStep, KernelStep, LibraryStep

row = functools.partial(figures.row, higher_is_better=True, speedup=True)


class Pool:
    """Memory that is reused, with an OpenCL buffer around each piece."""

    def __init__(self):
        self._free = {}

    def take(self, nbytes):
        kept = self._free.get(nbytes)
        return kept.pop() if kept else Memory(torch.empty(max(nbytes, 1), dtype=torch.uint8))

    def give(self, memory):
        if memory.kept:
            self._free.setdefault(memory.raw.numel(), []).append(memory)


class Memory:
    """Bytes that torch and OpenCL share. `kept`: they go back to the pool; otherwise the library allocated them."""

    def __init__(self, raw, *, kept=True):
        self.raw, self.kept = raw, kept
        self.buffer = opencl.wrap(opencl.default_device(), raw.numpy())

    def seen(self, view):
        """Return a tensor on this memory."""
        dtype = {DType.F32: torch.float32, DType.I64: torch.int64}[view.dtype]
        return torch.empty(0, dtype=dtype).set_(
            self.raw.untyped_storage(), view.offset // dtype.itemsize, view.sizes, view.strides
        )


def library(line, memory):
    """Run an instruction with the executor's library, into the memory of its result, or with a result in its own memory."""
    tensors = [memory[slot].seen(o.view) for slot, o in zip(line.slots, line.form.operands, strict=True)]
    if line.form.opcode == "linear":
        x, w, *bias, out = tensors
        quick = onednn_product(line.form)
        if quick is not None:
            return quick(x, w, *bias)
        rows, result = x.reshape(-1, x.shape[-1]), out.view(-1, w.shape[0])
        torch.addmm(*bias, rows, w.t(), out=result) if bias else torch.mm(rows, w.t(), out=result)
        return None
    assert line.form.attr("name") == ATTENTION
    q, k, v, out, lse = tensors
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    out.copy_(found[0])
    lse.copy_(found[1])
    return None


ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"


class Compiled:
    """A tape, bound to torch tensors once, as an executor binds a session's buffers."""

    def __init__(self, tape, bound):
        program, self.slots = tape.program()
        started = time.perf_counter()
        self.plan = compile_program(program, params=tape.params, biases=True)
        self.compile_s = time.perf_counter() - started
        self._bound = {self.slots[t.slot]: Memory(v.view(-1).view(torch.uint8)) for t, v in bound}
        self._params, self._pool, self.left = tape.params, Pool(), {}
        steps = [s for s in self.plan.steps if isinstance(s, KernelStep)]
        found = []
        for _ in range(2):
            started = time.perf_counter()
            self._built = {id(s): opencl.build(s.kernel) for s in steps}
            self()  # PoCL finishes a kernel at its first run
            found.append(time.perf_counter() - started)
        self.build_s, self.cached_s = found
        self.kernels = len(steps)

    def result(self, tensor):
        """Return the result of the last run."""
        return self.left[self.slots[tensor.slot]].seen(tensor.view)

    def traffic(self):
        """Return the bytes that a run reads and writes for its operands, without temporaries."""
        sizes = {}
        for step in self.plan.steps:
            for a, slot in zip(step.kernel.arrays, step.slots, strict=True) if isinstance(step, KernelStep) else ():
                sizes[slot] = a.numel * a.dtype.itemsize * (2 if a.role.name == "INOUT" else 1)
        return sum(sizes.values())

    def __call__(self, *, fresh=False):
        for kept in self.left.values():
            self._pool.give(kept)
        pool = Pool() if fresh else self._pool
        memory, queue = dict(self._bound), opencl.default_device().queue
        for step in self.plan.steps:
            match step:
                case AllocStep():
                    memory[step.slot] = pool.take(step.nbytes)
                case FreeStep():
                    pool.give(memory.pop(step.slot))
                case KernelStep():
                    arrays = [memory[slot].buffer for slot in step.slots]
                    self._built[id(step)].launch(arrays, [self._params[p] for p in step.params])
                case LibraryStep():
                    queue.finish()
                    result = library(step.line, memory)
                    if result is not None:
                        slot = step.line.slots[-1]
                        pool.give(memory[slot])
                        memory[slot] = Memory(result.view(-1).view(torch.uint8), kept=False)
        queue.finish()
        self.left = {} if fresh else {slot: m for slot, m in memory.items() if slot not in self._bound}


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def turns(functions, repeat, clock):
    """Return the times of all functions in ms, run in turn."""
    found = [[] for _ in functions]
    for f in functions:
        f()
    for _ in range(repeat):
        for function, times in zip(functions, found, strict=True):
            started = clock()
            function()
            times.append((clock() - started) * 1e3)
    return found


def result(name, compiled, baseline, goal, args, *, fresh=True, compiled_goal=None):
    sides = {"eager": baseline}
    if fresh:
        n = compiled.traffic() // 8
        source, target = torch.zeros(n), torch.zeros(n)
        sides |= {"fresh": lambda: compiled(fresh=True), "bytes": lambda: target.copy_(source)}
    if args.compiled:
        sides["torch.compile"] = torch.compile(baseline)
    ours, *others = turns([compiled, *sides.values()], args.repeat, CLOCKS[args.clock])
    found = dict(zip(sides, others, strict=True))

    def against(label, mine, theirs, goal):
        ratios = sorted(b / a for a, b in zip(mine, theirs, strict=True))
        spread = [round(r, 2) for r in (ratios[0], ratios[len(ratios) // 2], ratios[-1])]
        return row(label, "ms", min(mine), min(theirs), goal, spread=spread)

    yield against(name, ours, found["eager"], goal)
    if "torch.compile" in found:
        yield against(f"{name}: against torch.compile", ours, found["torch.compile"], compiled_goal)
    if fresh:
        yield against(f"{name}: fresh memory", found["fresh"], found["eager"], None)
        yield against(f"{name}: against a copy of as many bytes", ours, found["bytes"], None)
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
        compiled = Compiled(t, [(x, a)])

        def eager(kind=kind):
            return F.gelu(a * 1.1 + 0.1, approximate=kind)

        torch.testing.assert_close(compiled.result(y), eager(), rtol=1e-5, atol=1e-5)
        yield from result(f"GELU(x*w+b), {kind}, 16M floats", compiled, eager, 5, args, compiled_goal=1)


def bench_softmax(args, scale):
    """Softmax over rows of 4096."""
    rows = 4096 // scale
    t = Tape()
    x = t.input(DType.F32, rows, 4096)
    y = t.op("softmax", x, -1)
    a = torch.randn(rows, 4096)
    compiled = Compiled(t, [(x, a)])

    def eager():
        return torch.softmax(a, -1)

    torch.testing.assert_close(compiled.result(y), eager(), rtol=1e-5, atol=1e-7)
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
    compiled = Compiled(t, list(zip((x, w, b, z), tensors, strict=True)))

    def eager():
        return F.gelu(F.layer_norm(tensors[0], [n], tensors[1], tensors[2])) + tensors[3]

    torch.testing.assert_close(compiled.result(y), eager(), rtol=1e-4, atol=1e-4)
    yield from result("layer norm + GELU + residual", compiled, eager, 3, args)


def bench_columns(args, scale):
    """Gradients of biases: sums over the rows of a batch."""
    rows = 4096 // scale
    for width in (384, 512, 1000, 4096):
        t = Tape()
        x = t.input(DType.F32, rows, width)
        y = t.op("sum", x, (0,), False)
        a = torch.randn(rows, width)
        compiled = Compiled(t, [(x, a)])

        def eager(a=a):
            return a.sum(0)

        torch.testing.assert_close(compiled.result(y), eager(), rtol=1e-4, atol=1e-3)
        yield from result(f"sums of columns, {rows}x{width}", compiled, eager, None, args, fresh=False)


def bench_embedding(args, scale):
    """Gradients of embeddings: sums by index. Small ones are left to the library."""
    tokens = 4096 // scale
    for words, width in ((32000, 512), (50000, 768)):
        t = Tape()
        grad, index = t.input(DType.F32, tokens, width), t.input(DType.I64, tokens)
        (y,) = t.extern(
            "aten.embedding_dense_backward.default",
            grad,
            index,
            words,
            -1,
            False,
            results=[(DType.F32, (words, width))],
        )
        g, where = torch.randn(tokens, width), torch.randint(words, (tokens,))
        compiled = Compiled(t, [(grad, g), (index, where)])

        def eager(g=g, where=where, words=words):
            return torch.ops.aten.embedding_dense_backward(g, where, words, -1, False)

        assert torch.equal(compiled.result(y), eager())
        yield from result(f"gradient of an embedding, {words}x{width}", compiled, eager, 1, args)


def adamw(args, sizes, name, goal):
    """One step of AdamW over tensors of these sizes."""
    t = Tape()
    tensors = optimizers.adamw(t, sizes)
    mine = [torch.nn.Parameter(torch.randn(n)) for n in sizes]
    for p in mine:
        p.grad = torch.randn(len(p))
    optimizer = torch.optim.AdamW(
        mine,
        lr=optimizers.LR,
        betas=(optimizers.BETA1, optimizers.BETA2),
        eps=optimizers.EPS,
        weight_decay=optimizers.DECAY,
        foreach=True,
    )
    optimizer.step()
    theirs = [[p.detach(), p.grad, optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]] for p in mine]
    own = [[x.clone() for x in group] for group in theirs]
    bound = [(x, v) for group, values in zip(tensors, own, strict=True) for x, v in zip(group, values, strict=True)]
    compiled = Compiled(t, bound)
    for kept, now in zip(own, theirs, strict=True):
        for x, y in zip(kept, now, strict=True):
            x.copy_(y)  # the build has changed x already
    compiled()
    optimizer.step()
    torch.testing.assert_close(own[0][0], mine[0].detach(), rtol=1e-5, atol=1e-6)
    yield from result(name, compiled, optimizer.step, goal, argparse.Namespace(**vars(args) | {"compiled": False}))


def bench_adamw(args, scale):
    """One step of AdamW on ten million parameters, in one tensor and in many."""
    yield from adamw(args, [10_000_000 // scale], "AdamW step, 10M parameters", 2)
    sizes = [n // scale for _ in range(8) for n in (1_000_000, 247_000, 2_500, 500)]
    yield from adamw(args, sizes, "AdamW step, 10M parameters in 32 tensors", 2)


def bench_block(args, scale):
    """The forward pass of a transformer block as in GPT-2.

    Nine tenths of its time are matrix products, which the library computes on both sides.
    """
    batch, length, width, heads = 8, 256 // scale, 512, 8
    t = Tape()
    shapes = {"n1": (width,), "c1": (width,), "wqkv": (3 * width, width), "bqkv": (3 * width,), "wo": (width, width),
              "bo": (width,), "n2": (width,), "c2": (width,), "w1": (4 * width, width), "b1": (4 * width,),
              "w2": (width, 4 * width), "b2": (width,)}  # fmt: skip
    x = t.input(DType.F32, batch, length, width)
    w = {name: t.input(DType.F32, *sizes) for name, sizes in shapes.items()}
    values = {name: torch.randn(sizes) * 0.05 for name, sizes in shapes.items()}
    a = torch.randn(batch, length, width)
    h, mean, rstd = t.ops("layer_norm", x, (width,), w["n1"], w["c1"], 1e-5)
    t.free(mean, rstd)
    qkv = t.op("linear", h, w["wqkv"], w["bqkv"])
    t.free(h)
    each = (batch, heads, length, width // heads)
    strides = (3 * width * length, width // heads, 3 * width, 1)
    parts = [qkv.seen(each, strides, n * width) for n in range(3)]
    o, lse = t.extern(ATTENTION, *parts, results=[(DType.F32, each), (DType.F32, each[:3])])
    t.free(lse, qkv)
    turned = t.copy(
        o.seen((batch, length, heads, width // heads), (width * length, width // heads, length * width // heads, 1))
    )
    t.free(o)
    p = t.op("linear", turned.seen((batch, length, width), (length * width, width, 1)), w["wo"], w["bo"])
    t.free(turned)
    x1 = t.op("add", x, p)
    t.free(p)
    h, mean, rstd = t.ops("layer_norm", x1, (width,), w["n2"], w["c2"], 1e-5)
    t.free(mean, rstd)
    u = t.op("linear", h, w["w1"], w["b1"])
    t.free(h)
    g = t.op("gelu", u)
    t.free(u)
    d = t.op("linear", g, w["w2"], w["b2"])
    t.free(g)
    y = t.op("add", x1, d)
    t.free(d, x1)

    def eager():
        v = values
        with torch.no_grad():
            h = F.layer_norm(a, [width], v["n1"], v["c1"])
            q, k, s = F.linear(h, v["wqkv"], v["bqkv"]).view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
            o = F.scaled_dot_product_attention(q, k, s).transpose(1, 2).reshape(batch, length, width)
            z = a + F.linear(o, v["wo"], v["bo"])
            h = F.layer_norm(z, [width], v["n2"], v["c2"])
            return z + F.linear(F.gelu(F.linear(h, v["w1"], v["b1"])), v["w2"], v["b2"])

    compiled = Compiled(t, [(x, a), *[(w[name], values[name]) for name in shapes]])
    torch.testing.assert_close(compiled.result(y), eager(), rtol=1e-3, atol=1e-3)
    yield from result("transformer block, forward", compiled, eager, 1.1, args, fresh=False)


def bench_llama(args, scale):
    """The forward pass of a Llama block: RMS norms, rotated queries and keys, attention, a gated MLP."""
    batch, length, width, heads, inner = 8, 256 // scale, 512, 8, 1376
    head, half = width // heads, width // heads // 2
    t = Tape()
    shapes = {"n1": (width,), "wqkv": (3 * width, width), "wo": (width, width), "n2": (width,),
              "wg": (inner, width), "wu": (inner, width), "wd": (width, inner)}  # fmt: skip
    x = t.input(DType.F32, batch, length, width)
    w = {name: t.input(DType.F32, *sizes) for name, sizes in shapes.items()}
    turns = [t.input(DType.F32, length, head) for _ in range(2)]
    values = {name: torch.randn(sizes) * 0.05 for name, sizes in shapes.items()}
    angles = torch.outer(torch.arange(length), 10000 ** (-torch.arange(0, head, 2) / head)).repeat(1, 2)
    cos, sin, a = angles.cos(), angles.sin(), torch.randn(batch, length, width)

    def chain(*steps):
        """Run the steps in order. Each step gets the result of the previous step, which is then freed."""
        found = None
        for opcode, *rest in steps:
            made = t.op(opcode, *([found] if found is not None else []), *rest)
            if found is not None:
                t.free(found)
            found = made
        return found

    def norm(h, weight):
        scale = chain(("pow", h, 2), ("mean", (-1,), True), ("add", 1e-5), ("rsqrt",))
        found = chain(("mul", h, scale), ("mul", weight))
        t.free(scale)
        return found

    def rotated(h):
        views = [h.seen((*h.view.sizes[:-1], half), h.view.strides, h.view.offset // 4 + at) for at in (half, 0)]
        minus = t.op("neg", views[0])
        other = t.op("concat", (minus, views[1]), -1)
        t.free(minus)
        one, two = t.op("mul", h, turns[0]), chain(("mul", other, turns[1]))
        t.free(other)
        found = t.op("add", one, two)
        t.free(one, two)
        return found

    h = norm(x, w["n1"])
    qkv = t.op("linear", h, w["wqkv"], None)
    t.free(h)
    each, strides = (batch, heads, length, head), (3 * width * length, head, 3 * width, 1)
    q, k, v = [qkv.seen(each, strides, n * width) for n in range(3)]
    q, k = rotated(q), rotated(k)
    o, lse = t.extern(ATTENTION, q, k, v, results=[(DType.F32, each), (DType.F32, each[:3])])
    t.free(lse, q, k, qkv)
    turned = t.copy(o.seen((batch, length, heads, head), (width * length, head, length * head, 1)))
    t.free(o)
    p = t.op("linear", turned.seen((batch, length, width), (length * width, width, 1)), w["wo"], None)
    t.free(turned)
    x1 = t.op("add", x, p)
    t.free(p)
    h = norm(x1, w["n2"])
    gate, up = (t.op("linear", h, w[name], None) for name in ("wg", "wu"))
    t.free(h)
    gated = chain(("silu", gate), ("mul", up))
    t.free(gate, up)
    d = t.op("linear", gated, w["wd"], None)
    t.free(gated)
    y = t.op("add", x1, d)
    t.free(d, x1)

    def eager():
        v = values

        def norm(h, weight):
            return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5) * weight

        def rotated(h):
            return h * cos + torch.cat((-h[..., half:], h[..., :half]), -1) * sin

        with torch.no_grad():
            parts = F.linear(norm(a, v["n1"]), v["wqkv"]).view(batch, length, 3, heads, head).permute(2, 0, 3, 1, 4)
            o = F.scaled_dot_product_attention(rotated(parts[0]), rotated(parts[1]), parts[2])
            z = a + F.linear(o.transpose(1, 2).reshape(batch, length, width), v["wo"])
            h = norm(z, v["n2"])
            return z + F.linear(F.silu(F.linear(h, v["wg"])) * F.linear(h, v["wu"]), v["wd"])

    bound = [(x, a), *[(w[name], values[name]) for name in shapes], *zip(turns, (cos, sin), strict=True)]
    compiled = Compiled(t, bound)
    torch.testing.assert_close(compiled.result(y), eager(), rtol=1e-3, atol=1e-3)
    yield from result("Llama block, forward", compiled, eager, 1.1, args, fresh=False)


def bench_first(args, scale):
    """The first runs of a new program with a running compiler, against tier 0 alone."""
    with tiers.stack() as reach:
        yield from tiers.bench_first(args.repeat, reach)


def bench_shares(args, scale):
    """The shares of library, kernels and tier 0 in the inference of whole models, by instructions and by time."""
    with tiers.stack() as reach:
        for name in tiers.MODELS:
            yield from tiers.bench(name, args.repeat, reach)


BENCHES = {
    "gelu": bench_gelu, "softmax": bench_softmax, "norm": bench_norm, "columns": bench_columns, "embedding": bench_embedding,
    "adamw": bench_adamw, "block": bench_block, "llama": bench_llama, "first": bench_first, "shares": bench_shares,
}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--only", choices=BENCHES)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument(
        "--quick", action="store_true", help="use a sixteenth of the sizes, to test the benchmark itself"
    )
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--compiled", action="store_true", help="compare with torch.compile, too")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    torch.manual_seed(0)
    device = opencl.default_device()
    rows = []
    for name, bench in BENCHES.items():
        if args.only in (None, name):
            for found in bench(args, 16 if args.quick else 1):
                rows.append(found)
                print(f"{found['name']}: {found['ours']} {found['unit']}", file=sys.stderr, flush=True)
    figures.show(
        rows, args.json, title=f"{device.platform}, {device.name}, {torch.get_num_threads()} threads", baseline="torch"
    )
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
