"""The executor's CUDA runtime in this process: each section by itself, then a benchmark. `run.sh` starts this script.

Exit status: 0, every section is right; 1, a section is wrong (its traceback is printed, the others run); 2, no CUDA runtime.
"""

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from pathlib import Path

import captured
import foreign
import substitutes as instead
import torch
from wooly_compiler.build.toolchains import BUILDERS
from wooly_compiler.pipeline import compile_program
from wooly_compiler.render.dialects import CUDA
from wooly_compiler.render.printer import render
from wooly_compiler.render.source import Form
from wooly_executor.errors import MissingDriverError
from wooly_executor.programs import ProgramStore
from wooly_executor.runtime.buffers import TORCH_DTYPE, Buffer
from wooly_executor.runtime.cuda import CudaRuntime
from wooly_executor.runtime.packing import Arguments
from wooly_testkit.tape import Tape
from wooly_wis.artifact import Artifact, Code, key_of
from wooly_wis.codec import encode_program
from wooly_wis.dtypes import DType

F32, I64 = DType.F32, DType.I64
#: Warm-up runs, after which a program's steps are fixed and its graphs are captured.
SETTLE, TIMED = 40, 30


class Gpu:
    """The runtime, and programs on it."""

    def __init__(self):
        self.runtime = CudaRuntime()
        self.driver = self.runtime.driver
        self.device = self.driver.device
        self.runtime.device.attach()
        self.store = ProgramStore(self.runtime)

    def tier0(self, program):
        return self.store.define(encode_program(program)).prepared

    def plan(self, program, params):
        """The program as generated kernels, built by NVRTC for this GPU."""
        ready, target = self.store.define(encode_program(program)), self.runtime.target()
        plan = compile_program(program, params=list(params), checks=True, biases=True)
        codes = []
        for kernel in plan.kernels:
            source = render(kernel, CUDA, Form.SIMT)
            code = BUILDERS["cuda"](source.text, target.partition(":")[2])
            codes.append(Code(source.name, source.groups, source.threads, 0, code))
        artifact = Artifact(key_of(program, target, "full", list(params)), "tests/gpu", plan, tuple(codes))
        return self.runtime.load(artifact, program, ready.facts)

    def buffers(self, contents, slots):
        """Buffers for `contents` (by the tape's slots); `slots` maps them to the program's slots."""
        return {slots[s]: Buffer(t.nbytes, t.to(self.device, copy=True)) for s, t in contents.items()}

    def run(self, prepared, buffers, params=()):
        """Run a program. Returns the device time in ns; raises the failure of a step."""
        n = prepared.program.n_slots
        for slot in [s for s in buffers if prepared.facts.slot_alloc[s] is not None]:
            del buffers[slot]
        execution = self.runtime.begin(prepared, buffers, list(range(n)), list(params))
        times = execution.advance((len(prepared.program.body),))
        outcome = execution.outcome
        assert outcome.failed_at is None, f"instruction {outcome.failed_at}: {outcome.error}"
        return sum(times)

    def tier0_single(self, program, slots, content, params):
        """Return what runs without segments and graphs leave in the input, for each list of params."""
        left = []
        for own in params:
            prepared = self.tier0(program)
            buffers = self.buffers({0: content}, slots)
            execution = self.runtime.begin(prepared, buffers, list(range(program.n_slots)), own, single=True)
            execution.advance((len(program.body),))
            assert execution.outcome.failed_at is None, execution.outcome.error
            left.append(buffers[slots[0]].base.clone())
        return left


def result(buffers, slots, tensor):
    base, view = buffers[slots[tensor.slot]].base, tensor.view
    flat = torch.empty(0, dtype=TORCH_DTYPE[view.dtype], device=base.device)
    return flat.set_(base.untyped_storage(), view.offset // view.dtype.itemsize, view.sizes, view.strides)


# -- programs ----------------------------------------------------------------------------------------------------------


def gelu(rows=4096, columns=4096):
    t = Tape()
    x, w, b = t.input(F32, rows, columns), t.input(F32, columns), t.input(F32, columns)
    m = t.op("mul", x, w)
    s = t.op("add", m, b)
    y = t.op("gelu", s)
    t.free(m, s)
    given = {0: torch.randn(rows, columns), 1: torch.randn(columns), 2: torch.randn(columns)}
    return t, y, given, lambda x, w, b: torch.nn.functional.gelu(x * w + b), 8 * rows * columns


def softmax(rows=4096, columns=4096):
    t = Tape()
    y = t.op("softmax", t.input(F32, rows, columns), -1)
    return t, y, {0: torch.randn(rows, columns)}, lambda x: torch.softmax(x, -1), 8 * rows * columns


def layer_norm(rows=8192, columns=1024):
    t = Tape()
    x, w, b = t.input(F32, rows, columns), t.input(F32, columns), t.input(F32, columns)
    n, mean, rstd = t.ops("layer_norm", x, (columns,), w, b, 1e-5)
    g = t.op("gelu", n)
    y = t.op("add", g, x)
    t.free(n, mean, rstd, g)
    given = {0: torch.randn(rows, columns), 1: torch.randn(columns), 2: torch.randn(columns)}

    def eager(x, w, b):
        return torch.nn.functional.gelu(torch.nn.functional.layer_norm(x, (x.shape[-1],), w, b)) + x

    return t, y, given, eager, 8 * rows * columns


def adamw(n=10_000_000):
    """One step on a flat parameter, by PyTorch's formula (the bias corrections are params)."""
    t = Tape()
    p, g, m, v = (t.input(F32, n) for _ in range(4))
    t.op("mul", p, 1 - 1e-3 * 1e-2, into=p)
    t.op("mul", m, 0.9, into=m)
    t.op("add", m, g, 0.1, into=m)
    t.op("mul", v, 0.999, into=v)
    gg = t.op("mul", g, g)
    t.op("add", v, gg, 0.001, into=v)
    root = t.op("sqrt", v)
    low = t.op("add", root, 1e-8)
    step = t.op("div", m, low)
    t.op("add", p, step, -1e-3, into=p)
    t.free(gg, root, low, step)

    def eager(p, g, m, v):
        p.mul_(1 - 1e-3 * 1e-2)
        m.mul_(0.9).add_(g, alpha=0.1)
        v.mul_(0.999).addcmul_(g, g, value=0.001)
        return p.addcdiv_(m, v.sqrt().add_(1e-8), value=-1e-3)

    given = {k: torch.rand(n) for k in range(4)}
    return t, p, given, eager, 7 * 4 * n


PROGRAMS = {
    "GELU(x*w+b), 16M": gelu,
    "softmax 4096x4096": softmax,
    "norm, GELU, residual": layer_norm,
    "AdamW, 10M": adamw,
}
SMALL = {
    "gelu": lambda: gelu(64, 96),
    "softmax": lambda: softmax(33, 200),
    "layer norm": lambda: layer_norm(17, 96),
    "adamw": lambda: adamw(5000),
}


# -- sections ----------------------------------------------------------------------------------------------------------


def facts(gpu):
    found = gpu.runtime.facts()
    assert found["vendor"] == "nvidia" and found["cores"] >= 1
    rates = gpu.runtime.rates()
    print(
        f"  {found['name']} {found['arch']}, {gpu.runtime.capacity() >> 20} MiB for sessions, kernels for {gpu.runtime.target()}"
    )
    print(
        f"  {rates.bytes_per_us / 1e3:.0f} GB/s, {rates.flops_per_us / 1e6:.1f} TFLOP/s, {rates.launch_ns} ns a launch"
    )


def bytes_to_and_fro(gpu):
    data = torch.randint(0, 256, (3 << 20,), dtype=torch.uint8)
    memory = gpu.runtime.allocate(len(data)).base
    into, land = gpu.runtime.device.upload_target(memory)
    into[:] = memoryview(data.numpy())
    land()
    assert bytes(gpu.runtime.device.read(memory)) == data.numpy().tobytes()
    assert torch.equal(memory.cpu(), data)


def library(gpu):
    """Tier 0 compared with torch.cuda: the same operators, so the same bits."""
    for name, make in SMALL.items():
        t, y, given, eager, _ = make()
        program, slots = t.program()
        buffers = gpu.buffers(given, slots)
        wanted = [x.to(gpu.device, copy=True) for x in given.values()]
        gpu.run(gpu.tier0(program), buffers, t.params)
        if name == "adamw":  # torch contracts operations here, the program has single operators
            torch.testing.assert_close(result(buffers, slots, y), eager(*wanted))
        else:
            assert torch.equal(result(buffers, slots, y), eager(*wanted)), name


def kernels(gpu):
    """Generated kernels on the library's memory and stream give tier 0's results."""
    for make in SMALL.values():
        t, y, given, eager, _ = make()
        program, slots = t.program()
        prepared, buffers = gpu.plan(program, t.params), gpu.buffers(given, slots)
        gpu.run(prepared, buffers, t.params)
        assert prepared.by_kernel > 0
        wanted = eager(*[x.to(gpu.device, copy=True) for x in given.values()])
        torch.testing.assert_close(result(buffers, slots, y), wanted, atol=2e-6, rtol=2e-5)


def interop(gpu):
    """A library product between our kernels, in one run and on one stream."""
    t = Tape()
    x, w = t.input(F32, 64, 48), t.input(F32, 48, 32)
    y = t.op("relu", t.op("mm", t.op("exp", x), w))
    program, slots = t.program()
    prepared = gpu.plan(program, t.params)
    assert prepared.by_kernel and prepared.by_library
    given = {0: torch.randn(64, 48), 1: torch.randn(48, 32)}
    buffers = gpu.buffers(given, slots)
    gpu.run(prepared, buffers, t.params)
    a, b = (v.to(gpu.device) for v in given.values())
    torch.testing.assert_close(result(buffers, slots, y), torch.relu(a.exp() @ b), atol=1e-3, rtol=1e-4)


def complaints(gpu):
    """An index out of range fails its instruction but not the device, in our kernels and in the library."""
    t = Tape()
    w, i = t.input(F32, 5, 3), t.input(I64, 4)
    y = t.op("embedding", w, i)
    program, slots = t.program()
    for prepared in (gpu.plan(program, t.params), gpu.tier0(program)):
        try:
            gpu.run(prepared, gpu.buffers({0: torch.randn(5, 3), 1: torch.tensor([0, 5, 1, 2])}, slots))
        except AssertionError as e:
            assert "index out of range in self" in str(e)
        else:
            raise AssertionError("nothing was said")
        buffers = gpu.buffers({0: torch.randn(5, 3), 1: torch.tensor([0, 4, 1, 2])}, slots)
        gpu.run(prepared, buffers)
        assert torch.equal(result(buffers, slots, y), buffers[slots[0]].base[buffers[slots[1]].base])


def graphs(gpu):
    """Steady programs are replayed as graphs, with the same results as before."""
    t = Tape()
    x = t.input(F32, 128, 128)
    held = x
    for _ in range(20):
        made = t.op("relu", t.op("add", held, x))
        held = made
    t.op("add", x, held, 1e-9, into=x)
    program, slots = t.program()
    for prepared in (gpu.tier0(program), gpu.plan(program, t.params)):
        contents = {0: torch.randn(128, 128)}
        buffers, before = gpu.buffers(contents, slots), gpu.runtime.graphs.replayed
        seen, times = [], []
        for _ in range(SETTLE):
            buffers[slots[0]].base.copy_(contents[0])
            times.append(gpu.run(prepared, buffers, t.params))
            seen.append(buffers[slots[0]].base.clone())
        replayed = gpu.runtime.graphs.replayed - before
        print(f"  {replayed} replays; {times[10] / 1e3:.0f} us before, {times[-1] / 1e3:.0f} us after")
        assert replayed, "no graph was replayed: addresses probably changed from run to run"
        assert all(torch.equal(s, seen[0]) for s in seen)


def failed_captures(gpu):
    """After an invalidated capture, older graphs, new captures and random numbers work."""
    gc.collect()
    earlier = gpu.driver.graph_bytes()  # the graphs of earlier sections
    x = torch.zeros(64, device=gpu.device)
    mask = torch.zeros(64, dtype=torch.bool, device=gpu.device)
    older = gpu.driver.capture(lambda: x.add_(1))
    for wrong in (lambda: x[mask], lambda: x.cpu(), lambda: x.sum().item(), lambda: gpu.driver.seed(5)):
        try:
            gpu.driver.capture(wrong)
        except RuntimeError as e:
            print(f"  {type(e).__name__}: {str(e).splitlines()[0]}; cause: {type(e.__cause__).__name__}")
        else:
            raise AssertionError("the capture succeeded")
        gpu.driver.check()
        gpu.driver.seed(3)
        first = torch.randn(64, device=gpu.device)
        gpu.driver.seed(3)
        assert torch.equal(first, torch.randn(64, device=gpu.device))
        newer = gpu.driver.capture(lambda: x.mul_(2))
        before = x.clone()
        older.replay()
        newer.replay()
        assert torch.equal(x, (before + 1) * 2)
    print(f"  the pools of 2 graphs have {gpu.driver.graph_bytes() - earlier} bytes")
    del older, newer
    assert gpu.driver.graph_bytes() == earlier
    gpu.driver.capture(lambda: x.mul_(2)).replay()


def drawn_graphs(gpu):
    """Random calls have the same numbers in graphs as outside of them, for each seed that a replay gets."""
    assert gpu.driver.draws_in_graphs() is True
    aten, n = torch.ops.aten, 100_000
    halves = torch.full((n,), 0.5, device=gpu.device)
    calls = {
        "native_dropout": lambda t: t.copy_(aten.native_dropout(halves, 0.3, True)[0]),
        "bernoulli": lambda t: t.copy_(aten.bernoulli(halves)),
        "rand_like": lambda t: t.copy_(aten.rand_like(t)),
        "randn_like": lambda t: t.copy_(aten.randn_like(t)),
        "randint_like": lambda t: t.copy_(aten.randint_like(t, 1000)),
        **{
            name: lambda t, name=name: getattr(t, name)()
            for name in ("uniform_", "normal_", "exponential_", "cauchy_", "log_normal_")
        },
        "geometric_": lambda t: t.geometric_(0.3),
        "random_": lambda t: t.random_(1000),
        "bernoulli_": lambda t: t.bernoulli_(0.3),
    }
    seeds = (3, 1 << 60)
    for name, call in calls.items():
        drawn = [torch.zeros(n, device=gpu.device) for _ in seeds]

        def draw(call=call, drawn=drawn):
            for t, seed in zip(drawn, seeds, strict=True):
                gpu.driver.seed(seed)
                call(t)

        draw()
        wanted = [t.clone() for t in drawn]
        graph = gpu.driver.capture(draw, draws=len(seeds))
        for k in (1, -1, 1):
            graph.replay(seeds[::k])
            for t, w in zip(drawn, wanted[::k], strict=True):
                assert torch.equal(t, w), f"{name} draws other numbers in a graph"
        assert not torch.equal(*wanted), name
    print(f"  {len(calls)} operators draw the same numbers in graphs")


def split_graphs(gpu):
    """A step that waits, a changing param and a second set of buffers leave the other steps in graphs."""
    t = Tape()
    x = t.input(F32, 128, 128)

    def more(held):
        for _ in range(10):
            wider = t.op("add", held, x, 0.25)
            made = t.op("tanh", wider)
            t.free(wider)
            if held is not x:
                t.free(held)
            held = made
        return held

    held = more(x)
    t.extern("aten.histc.default", held, 4, -1.0, 1.0, results=[(F32, (4,))])
    held = more(held)
    t.op("add", x, held, 0.125, into=x)
    t.free(held)
    program, slots = t.program()
    prepared, content = gpu.tier0(program), torch.randn(128, 128)
    both = [gpu.buffers({0: content}, slots) for _ in range(2)]
    before, times, seen = gpu.runtime.graphs.replayed, [], []
    for k in range(4 * SETTLE):
        buffers = both[k % 2]
        buffers[slots[0]].base.copy_(content)
        params = [*t.params[:-1], 0.125 / (1 + k // 2)]
        times.append(gpu.run(prepared, buffers, params))
        seen.append((params[-1], buffers[slots[0]].base.clone()))
    for k in range(0, len(seen), 2):
        assert torch.equal(seen[k][1], seen[k + 1][1])
    fresh = gpu.tier0_single(program, slots, content, [[*t.params[:-1], p] for p, _ in seen])
    assert all(torch.equal(a, b) for (_, a), b in zip(seen, fresh, strict=True))
    replayed = gpu.runtime.graphs.replayed - before
    print(
        f"  {replayed} replays, {gpu.runtime.graphs.count} graphs; {times[10] / 1e3:.0f} us, {times[-1] / 1e3:.0f} us"
    )
    assert replayed > 2 * SETTLE


def moving_and_lent(gpu):
    """Small inputs at new addresses are replayed. Large results stay where they are while they are used."""
    for rows, keep in ((8, 0), (8, 400), (2048, 0), (2048, 1), (2048, 4)):
        t = Tape()
        x, w = t.input(F32, rows, 256), t.input(F32, 256, 256)
        held = x
        for _ in range(10):
            wider = t.op("mm", held, w)
            made = t.op("tanh", wider)
            t.free(wider)
            if held is not x:
                t.free(held)
            held = made
        program, slots = t.program()
        prepared, weights = gpu.tier0(program), Buffer(4 << 16, torch.randn(256, 256, device=gpu.device) / 16)
        fixed = Buffer(rows << 10, torch.empty(rows, 256, device=gpu.device))
        before, times, kept, places = gpu.runtime.graphs.replayed, [], [], set()
        for _ in range(4 * SETTLE):
            content = torch.randn(rows, 256, device=gpu.device)
            fixed.base.copy_(content)
            given = Buffer(rows << 10, content.clone()) if rows == 8 else fixed
            buffers = {slots[x.slot]: given, slots[w.slot]: weights}
            times.append(gpu.run(prepared, buffers, t.params))
            mine, expected = result(buffers, slots, held), content
            for _ in range(10):
                expected = torch.tanh(expected @ weights.base)
            places.add(mine.data_ptr())
            kept.append((mine, expected, given))
            assert all(torch.equal(a, b) for a, b, _ in kept[-8:])
            del mine, buffers, kept[: len(kept) - keep]
        assert all(torch.equal(a, b) for a, b, _ in kept)
        replayed = gpu.runtime.graphs.replayed - before
        print(
            f"  {rows} rows, {keep} results kept: {replayed} replays, {len(places)} addresses; {times[10] / 1e3:.0f} us before, "
            f"{statistics.median(times[-SETTLE:]) / 1e3:.0f} us after, pools of {gpu.driver.graph_bytes() >> 20} MiB"
        )
        assert replayed > 2 * SETTLE


def events(gpu):
    """The runtime's clock is the device's clock: its value for a known delay, and the cost of a mark."""
    x = torch.randn(4096, 4096, device=gpu.device)
    for _ in range(3):
        x @ x
    begin = gpu.driver.record()
    for _ in range(10):
        x @ x
    end = gpu.driver.record()
    started = time.perf_counter_ns()
    (taken,) = gpu.driver.elapsed_ns([begin, end])
    assert taken > 0
    marks = [gpu.driver.record() for _ in range(1000)]
    cost = time.perf_counter_ns()
    gpu.driver.elapsed_ns(marks)
    marks = [gpu.driver.record() for _ in range(1000)]
    again = time.perf_counter_ns()
    gpu.driver.elapsed_ns(marks)
    print(
        f"  ten products: {taken / 1e6:.2f} ms on the device; a mark: {(again - cost) / 1000:.0f} ns with its reading"
    )
    assert started


def arguments(gpu):
    """`load` compares the driver's list of a kernel's parameters with the packed arguments."""
    from wooly_executor.errors import OperationError

    t, *_ = gelu(8, 8)
    program, _ = t.program()
    (kernel,) = compile_program(program, params=t.params).kernels
    source = render(kernel, CUDA, Form.SIMT)
    code = BUILDERS["cuda"](source.text, gpu.runtime.target().partition(":")[2])
    kinds = [None] * len(kernel.arrays) + [s.dtype for s in kernel.scalars]
    gpu.driver.load(code, source.name, kinds)
    assert Arguments(kinds).address
    try:
        gpu.driver.load(code, source.name, [*kinds[:-1], DType.F32])
    except OperationError as e:
        print(f"  {e}")
    else:
        print("  (this driver does not list parameters: it is older than CUDA 12.4)")


def foreign_kernels(gpu):
    """The kernels of `services/compiler/tests/kernels`, compared with torch."""
    failed = foreign.check(gpu)
    assert not failed, ", ".join(failed)


def foreign_walls(gpu):
    """Foreign kernels access only their own arguments, and end in time."""
    foreign.walls(gpu)
    foreign.time_limit(gpu)


def substitutes(gpu):
    """Operators that the GPU's library lacks or does otherwise give the CPU's results."""
    failed = instead.check(gpu)
    assert not failed, "; ".join(failed)


def captures(gpu):
    """Captures that might end the process, each in a process of its own."""
    failed = captured.check()
    assert not failed, ", ".join(failed)


SECTIONS = {
    f.__name__: f
    for f in (
        facts,
        bytes_to_and_fro,
        library,
        substitutes,
        kernels,
        interop,
        complaints,
        arguments,
        events,
        graphs,
        failed_captures,
        drawn_graphs,
        split_graphs,
        moving_and_lent,
        captures,
        foreign_kernels,
        foreign_walls,
    )
}


# -- the table ---------------------------------------------------------------------------------------------------------


def device_ns(call):
    """Median device time of `TIMED` calls, after some warm-up calls."""
    found = []
    for k in range(TIMED + 10):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        if k >= 10:
            found.append(1e6 * begin.elapsed_time(end))
    return statistics.median(found)


def speed(gpu):
    """Rows: program, ours, eager, inductor in us; ratios; share of the bandwidth of a copy."""
    large = torch.empty(256 << 20, dtype=torch.uint8, device=gpu.device)
    other = torch.empty_like(large)
    copied = 2 * large.nbytes / device_ns(lambda: other.copy_(large))  # bytes per ns
    print(f"  a copy reaches {copied:.0f} GB/s: 100 % below")
    print(f"  {'':24} {'ours us':>9} {'eager us':>9} {'ind. us':>9} {'x eager':>8} {'x ind.':>7} {'of a copy':>9}")
    rows = []
    for name, make in PROGRAMS.items():
        try:
            t, _, given, eager, nbytes = make()
            program, slots = t.program()
            prepared, buffers = gpu.plan(program, t.params), gpu.buffers(given, slots)
            ours = statistics.median([gpu.run(prepared, buffers, t.params) for _ in range(SETTLE + TIMED)][SETTLE:])
            args = [x.to(gpu.device, copy=True) for x in given.values()]
            plain = device_ns(lambda args=args, eager=eager: eager(*args))
            try:
                made = torch.compile(eager)
                inductor = device_ns(lambda args=args, made=made: made(*args))
            except Exception as e:
                print(f"  inductor does not compile {name}: {type(e).__name__}: {str(e).splitlines()[0][:100]}")
                inductor = float("nan")
        except Exception:
            print(f"  {name}: failed")
            traceback.print_exc()
            rows.append({"name": name, "error": traceback.format_exc(limit=3)})
            continue
        share = nbytes / ours / copied
        rows.append(
            {
                "name": name,
                "ours_us": ours / 1e3,
                "eager_us": plain / 1e3,
                "inductor_us": inductor / 1e3,
                "of_copy": share,
            }
        )
        print(
            f"  {name:24} {ours / 1e3:9.1f} {plain / 1e3:9.1f} {inductor / 1e3:9.1f} {plain / ours:8.2f} "
            f"{inductor / ours:7.2f} {share:9.0%}"
        )
    return rows + foreign.speed(gpu, device_ns, SETTLE, TIMED)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "sections", nargs="*", metavar="section", help=f"one of {', '.join(SECTIONS)}, speed; default: all"
    )
    parser.add_argument("--json", type=Path, help="write verdicts and rows to this file")
    options = parser.parse_args()
    unknown = set(options.sections) - {*SECTIONS, "speed"}
    if unknown:
        parser.error(f"unknown section {', '.join(sorted(unknown))}; choose from {', '.join(SECTIONS)}, speed")
    try:
        gpu = Gpu()
    except MissingDriverError as e:
        print(e, file=sys.stderr)
        return 2
    verdicts, rows = {}, []
    with torch.inference_mode():
        for name in options.sections or [*SECTIONS, "speed"]:
            print(f"runtime:{name}", flush=True)
            try:
                if name == "speed":
                    rows = speed(gpu)
                else:
                    SECTIONS[name](gpu)
                verdicts[name] = "ok"
            except Exception as e:
                traceback.print_exc()
                verdicts[name] = f"{type(e).__name__}: {e}"
                print(f"runtime:{name} FAILED: {verdicts[name]}", flush=True)
    bad = [name for name, said in verdicts.items() if said != "ok"] + [r["name"] for r in rows if "error" in r]
    right = sum(said == "ok" for said in verdicts.values())
    print(f"CUDA runtime: {right} sections right" + (f", wrong: {', '.join(bad)}" if bad else ""))
    if options.json:
        options.json.write_text(json.dumps({"sections": verdicts, "rows": rows}, indent=1))
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
