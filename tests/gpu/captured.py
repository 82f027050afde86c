"""Captures that might end the process on a real GPU. Each case runs in a process of its own, so a crash ends only its case.

A case of our driver or runtime must end well. A case whose name begins with `torch_` uses torch alone, as the driver never does:
it tells whether this release of torch ends the process there, and never fails the check.

Run one case: captured.py CASE
"""

import faulthandler
import functools
import gc
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from wooly_executor.runtime import gpu_attention, substitutes
from wooly_executor.runtime.buffers import Buffer
from wooly_testkit.tape import Tape
from wooly_wis.dtypes import DType

aten = torch.ops.aten
#: Maximum time of a case, in seconds, and of all cases.
CASE_S, ALL_S = 30, 38
#: Number of captures after the suspected event.
AFTER = 50
#: Shape of a decoder's attention: heads, columns, width.
HEADS, COLUMNS, WIDTH = 32, 81, 64
ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"


# -- what the cases share ------------------------------------------------------------------------------------------------


def capture_more(gpu, times=AFTER):
    """Capture, replay and drop graphs. Results must be right."""
    x = torch.zeros(1 << 16, device=gpu.device)
    held, found = [], []
    for k in range(times):
        graph = gpu.driver.capture(lambda: found.append((x + 1) * 2), apart=k % 2 == 0)
        x.fill_(k)
        graph.replay()
        assert found[-1][0].item() == 2 * (k + 1)
        held.append((graph, found.pop()))
        gpu.driver.graph_bytes()
        del held[: len(held) - 8]
    return f"{times} more captures, pools of {gpu.driver.graph_bytes() >> 10} KiB"


def refused(gpu, body, *, apart=True):
    """Capture something that fails. Returns the exception with its trace, which keeps the tensors of its frames."""
    try:
        gpu.driver.capture(body, apart=apart)
    except Exception as e:
        gpu.driver.check()
        return e
    raise AssertionError("the capture succeeded")


def by_cudnn(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None, heads=True):
    """cuDNN's attention, as the executor called it with masks. `heads`: expand the mask to all heads, which torch does not do."""
    q, k, v = [gpu_attention._aligned(t) for t in (query, key, value)]
    bias = gpu_attention._bias(attn_mask, q, k)
    if bias is not None and not heads:
        bias = bias[:, :1]
    out, logs, *_ = aten._scaled_dot_product_cudnn_attention.default(
        q, k, v, bias, True, 0.0, is_causal, False, scale=scale
    )
    return out, logs.view(query.shape[:3])


by_cudnn.writes_all = True


def attention_in_graphs(gpu, *, mask, heads=True, warm=3, columns=(COLUMNS,)):
    """Capture and replay attention with one row."""
    half, worst = torch.bfloat16, 0.0
    for n in columns:
        q = torch.randn(1, HEADS, 1, WIDTH, device=gpu.device, dtype=half)
        k, v = [torch.randn(1, HEADS, n, WIDTH, device=gpu.device, dtype=half) for _ in range(2)]
        bias = None
        if mask:
            seen = (torch.arange(n, device=gpu.device) <= n // 2).view(1, 1, 1, n)
            bias = torch.zeros(1, 1, 1, n, device=gpu.device, dtype=half).masked_fill_(~seen, float("-inf"))
        call = functools.partial(by_cudnn, q, k, v, attn_mask=bias, heads=heads)
        for _ in range(warm):
            call()
        wide = [t.float() if t is not None else None for t in (q, k, v, bias)]
        wanted = torch.nn.functional.scaled_dot_product_attention(*wide)
        made = []
        for times in range(AFTER // len(columns)):
            graph = gpu.driver.capture(lambda: made.append(call()), apart=times % 2 == 0)  # noqa: B023 - called at once
            graph.replay()
            worst = max(worst, (made[-1][0].float() - wanted).abs().max().item())
    assert worst < 0.05, worst
    return f"largest difference {worst:.4f}"


def decoder(layers=4):
    """A step of a decoder: positions from numbers, a mask, attention with one row, products of matrices."""
    t, wide, half = Tape(), HEADS * WIDTH, DType.BF16
    x, at = t.input(half, 1, wide), t.input(DType.I64, 1)
    keys, values, w = (
        t.input(half, HEADS, COLUMNS, WIDTH),
        t.input(half, HEADS, COLUMNS, WIDTH),
        t.input(half, wide, wide),
    )
    (places,) = t.extern("aten.arange.start_out", 0, COLUMNS, 1, out=(DType.I64, (COLUMNS,)))
    seen = t.op("le", places, at)
    ones = t.copy(seen, half)
    less = t.op("add", ones, -1.0)
    bias = t.op("mul", less, 1e9)
    mask = bias.seen((1, 1, 1, COLUMNS), (COLUMNS, COLUMNS, COLUMNS, 1))
    heads = (1, HEADS, 1, WIDTH), (wide, WIDTH, WIDTH, 1)
    cache = (1, HEADS, COLUMNS, WIDTH), (wide * COLUMNS, COLUMNS * WIDTH, WIDTH, 1)
    held = x
    for _ in range(layers):
        a, logs = t.extern(
            *(ATTENTION, held.seen(*heads), keys.seen(*cache), values.seen(*cache)),
            named=[("attn_mask", mask), ("scale", 0.125)],
            results=[(half, (1, HEADS, 1, WIDTH)), (DType.F32, (1, HEADS, 1))],
        )
        b = t.op("mm", a.seen((1, wide), (wide, 1)), w)
        t.free(a, logs)
        if held is not x:
            t.free(held)
        held = t.op("tanh", b)
        t.free(b)
    large = t.op("mul", keys, held.seen((HEADS, 1, WIDTH), (WIDTH, WIDTH, 1)))
    t.free(places, seen, ones, less, bias)
    program, slots = t.program()
    return program, t.params, [slots[k.slot] for k in (x, at, keys, values, w, held, large)]


def decoding(gpu, steps=400):
    """A loop of tokens: token and place move, and large results are kept for a while."""
    program, params, (x, at, keys, values, w, token, large) = decoder()
    prepared, half = gpu.tier0(program), torch.bfloat16
    torch.manual_seed(0)
    fixed = {
        s: Buffer(t.nbytes, t.to(gpu.device))
        for s, t in {
            **{s: torch.randn(HEADS, COLUMNS, WIDTH).to(half) for s in (keys, values)},
            w: (torch.randn(HEADS * WIDTH, HEADS * WIDTH) / 45).to(half),
        }.items()
    }
    now, kept, times, failed = torch.randn(1, HEADS * WIDTH).to(half).to(gpu.device), [], [], []
    for k in range(steps):
        place = torch.tensor([16 + k % 64], device=gpu.device)
        buffers = {x: Buffer(now.nbytes, now), at: Buffer(8, place), **fixed}
        times.append(gpu.run(prepared, buffers, params))
        now = buffers[token].base.view(torch.bfloat16).view(1, -1)
        kept.append(buffers[large].base)
        del kept[:-4], buffers
        failed = gpu.runtime.graphs._failures
    graphs = gpu.runtime.graphs
    assert torch.isfinite(now).all() and graphs.replayed > steps // 2, f"{graphs.replayed} replays"
    assert not failed and not graphs._refused, f"{failed} failed captures; refused: {graphs._refused}"
    return (
        f"{graphs.replayed} replays, {graphs.count} graphs; {times[10] / 1e3:.0f} us before, "
        f"{statistics.median(times[-40:]) / 1e3:.0f} us after"
    )


def without_memory(gpu, call):
    """Call with no device memory left that torch may take."""
    gpu.driver.release_cached()
    torch.cuda.set_per_process_memory_fraction(0.0)
    held = []
    try:
        while True:
            held.append(torch.empty(512, dtype=torch.uint8, device=gpu.device))
    except torch.OutOfMemoryError:
        return call()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


# -- cases of our driver and runtime -------------------------------------------------------------------------------------


def decode(gpu):
    """The runtime's own choice of attention."""
    return decoding(gpu)


def decode_by_cudnn(gpu):
    """Masked attention of cuDNN in graphs with moving inputs and lent results: the crash that was seen."""
    substitutes._DONE_BY[ATTENTION] = by_cudnn
    return decoding(gpu)


def cudnn_with_mask(gpu):
    return attention_in_graphs(gpu, mask=True)


def cudnn_with_mask_of_one_head(gpu):
    """The mask has the shape in which torch itself passes it to cuDNN."""
    return attention_in_graphs(gpu, mask=True, heads=False)


def cudnn_with_mask_planned_in_capture(gpu):
    """cuDNN plans and loads a kernel during the capture. If this fails, the same call follows outside a capture."""
    try:
        return attention_in_graphs(gpu, mask=True, warm=0, columns=(40, 81, 200, 333, 1025))
    except Exception as e:
        print(f"not planned in a capture: {str(e).splitlines()[0]}", flush=True)
        return attention_in_graphs(gpu, mask=True, columns=(40, 81, 200, 333, 1025))


def cudnn_without_mask(gpu):
    return attention_in_graphs(gpu, mask=False)


def first_step_fails(gpu):
    """The capture stays valid, and its graph is empty."""

    def fails():
        raise RuntimeError("not possible during a capture")

    for k in range(10):
        refused(gpu, fails, apart=k % 2 == 0)
        capture_more(gpu, 2)
    return capture_more(gpu)


def host_copy(gpu):
    """Torch refuses a copy from the host, after memory of the pool was taken."""

    def copies():
        torch.empty(COLUMNS, dtype=torch.int64, device=gpu.device).copy_(torch.arange(COLUMNS))

    said = [str(refused(gpu, copies, apart=k % 2 == 0)) for k in range(10)]
    return f"{said[0][:60]}...; {capture_more(gpu)}"


def invalidated(gpu):
    """After an invalidated capture, torch's allocator of page-locked memory still counts the capture."""
    x = torch.ones(64, device=gpu.device)
    for k in range(10):
        refused(gpu, lambda: x.sum().item(), apart=k % 2 == 0)
        host = gpu.driver.pinned(1 << 12)
        host.copy_(x.view(torch.uint8).repeat(16), non_blocking=True)
        capture_more(gpu, 2)
    return capture_more(gpu)


def trace_keeps_memory(gpu):
    """The trace of an error keeps tensors of the pool after the graph is gone."""
    kept = []
    for k in range(10):

        def fails():
            held = torch.ones(1 << 18, device=gpu.device)
            raise RuntimeError(f"not possible during a capture of {held.numel()} elements")

        kept.append(refused(gpu, fails, apart=k % 2 == 0))
        gpu.driver.release_cached()
        capture_more(gpu, 2)
    del kept[::2]
    gc.collect()
    capture_more(gpu, 4)
    kept.clear()
    gpu.driver.release_cached()
    return capture_more(gpu)


def other_thread_drops_graphs(gpu):
    given, done = [], threading.Event()

    def drop():
        while not done.is_set():
            if given:
                given.pop()
            time.sleep(0)

    thread = threading.Thread(target=drop)
    thread.start()
    x = torch.zeros(1 << 10, device=gpu.device)
    try:
        for k in range(400):
            given.append(gpu.driver.capture(lambda: x.add_(1), apart=k % 2 == 0))
    finally:
        done.set()
        thread.join()
    return capture_more(gpu)


def other_thread_prepares(gpu):
    """As a decoder's thread does while the device's thread captures: each program gets status words on the device."""
    done, prepared = threading.Event(), []

    def prepare():
        with torch.inference_mode():
            while not done.is_set():
                t = Tape()
                t.op("embedding", t.input(DType.F32, 7, 5 + len(prepared)), t.input(DType.I64, 4))
                program, _ = t.program()
                prepared.append(gpu.tier0(program))
                time.sleep(0.0005)

    thread = threading.Thread(target=prepare)
    thread.start()
    x, captured = torch.zeros(1 << 10, device=gpu.device), 0
    try:
        for k in range(4000):
            graph = gpu.driver.capture(lambda: x.add_(1), apart=k % 2 == 0)
            captured += graph is not None
            time.sleep(0)
    finally:
        done.set()
        thread.join()
    assert captured, "no capture found its turn"
    return f"{captured} captures, {len(prepared)} programs; {capture_more(gpu)}"


def empty(gpu):
    for k in range(20):
        graph = gpu.driver.capture(lambda: None, apart=k % 2 == 0)
        graph.replay()
        del graph
    return capture_more(gpu)


def zeroed_pool(gpu):
    """Operators that take zeroed memory from a separate pool run between captures."""
    x = torch.randn(256, device=gpu.device)
    sort = gpu.driver.on_zeros(lambda _: torch.sort(x)[0])
    for _ in range(10):
        assert torch.equal(sort(None).cpu(), x.cpu().sort()[0])
        capture_more(gpu, 4)
    return capture_more(gpu)


def no_memory_to_begin(gpu):
    """The capture cannot begin because the generator's state gets no memory."""
    x = torch.zeros(64, device=gpu.device)
    said = without_memory(gpu, lambda: str(refused(gpu, lambda: x.add_(1))))
    gc.collect()
    return f"{said.splitlines()[0][:50]}...; {capture_more(gpu)}"


def _without_plan(gpu):
    """Return a call of cuDNN's attention that cuDNN cannot plan, and its tensors."""
    q, k, v = [torch.zeros(1, 2, n, 1024, device=gpu.device, dtype=torch.bfloat16) for n in (3, 5, 5)]
    return (q, k, v), lambda: by_cudnn(q, k, v)


def cudnn_without_plan(gpu):
    """A call that cuDNN cannot plan is not repeated."""
    tensors, call = _without_plan(gpu)
    said = [gpu_attention.planned("forward", tensors, False, call) is None for _ in range(3)]
    return f"cuDNN failed: {said[0]}; {capture_more(gpu)}"


# -- cases of torch alone ------------------------------------------------------------------------------------------------


def torch_no_memory_to_begin(gpu):
    def begin():
        graph = torch.cuda.CUDAGraph()
        try:
            graph.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
        except torch.OutOfMemoryError:
            del graph
            gc.collect()
            return "the graph was destroyed"
        graph.capture_end()
        return "the capture began"

    return without_memory(gpu, begin)


def torch_cudnn_without_plan(gpu):
    """A call that cuDNN cannot plan, twice."""
    _, call = _without_plan(gpu)
    said = []
    for _ in range(2):
        try:
            call()
            said.append("no error")
        except RuntimeError as e:
            said.append(str(e).splitlines()[0][:60])
            print(said[-1], flush=True)
    return " then ".join(said)


def _plain(body, pool=None):
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool or torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
    try:
        body()
    finally:
        graph.capture_end()
    return graph


def torch_other_thread_destroys(gpu):
    given, done = [], threading.Event()

    def drop():
        while not done.is_set():
            if given:
                given.pop()

    thread = threading.Thread(target=drop)
    thread.start()
    x = torch.zeros(1 << 10, device=gpu.device)
    try:
        for _ in range(400):
            given.append(_plain(lambda: x.add_(1)))
    finally:
        done.set()
        thread.join()
    return "400 captures"


def torch_other_thread_allocates(gpu):
    """What `Turns` excludes: memory of the device and page-locked memory from another thread, during captures."""
    done, count = threading.Event(), [0]

    def allocate():
        aside = torch.cuda.Stream()
        with torch.inference_mode(), torch.cuda.stream(aside):
            while not done.is_set():
                words = torch.zeros(64, dtype=torch.int32, device=gpu.device)
                host = torch.empty(256 + count[0] % 4096, dtype=torch.uint8, pin_memory=True)
                host[:256].view(torch.int32).copy_(words, non_blocking=True)
                aside.synchronize()
                count[0] += 1

    thread = threading.Thread(target=allocate)
    thread.start()
    x, graphs = torch.zeros(1 << 16, device=gpu.device), []
    try:
        for _ in range(2000):
            graphs.append(_plain(lambda: (x + 1) * 2))
            torch.cuda.memory_snapshot()
            del graphs[: len(graphs) - 8]
    finally:
        done.set()
        thread.join()
    return f"2000 captures, {count[0]} allocations"


def torch_destroyed_in_capture(gpu):
    x = torch.zeros(1 << 10, device=gpu.device)
    held = [_plain(lambda: x.add_(1))]

    def body():
        x.add_(1)
        held.clear()

    try:
        _plain(body)
    except Exception as e:
        return f"the capture is invalid: {str(e).splitlines()[0][:60]}"
    return "the capture is valid"


def torch_pool_of_dead_graph(gpu):
    pool = torch.cuda.graph_pool_handle()
    x = torch.zeros(1 << 10, device=gpu.device)
    graph = _plain(lambda: x + 1, pool)
    del graph
    said = []
    for _ in range(2):
        try:
            said.append(f"{len(torch.cuda.memory_snapshot(pool))} segments")
        except Exception as e:
            said.append(type(e).__name__)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return f"sizes: {', '.join(said)}"


CASES = {
    f.__name__: f
    for f in (
        decode_by_cudnn,
        cudnn_with_mask,
        cudnn_with_mask_of_one_head,
        cudnn_with_mask_planned_in_capture,
        decode,
        cudnn_without_mask,
        first_step_fails,
        host_copy,
        invalidated,
        trace_keeps_memory,
        other_thread_drops_graphs,
        other_thread_prepares,
        empty,
        zeroed_pool,
        no_memory_to_begin,
        cudnn_without_plan,
        torch_cudnn_without_plan,
        torch_no_memory_to_begin,
        torch_other_thread_destroys,
        torch_other_thread_allocates,
        torch_destroyed_in_capture,
        torch_pool_of_dead_graph,
    )
}
#: Cases that show what the runtime avoids. They fail no check.
KNOWN = (decode_by_cudnn, cudnn_with_mask, cudnn_with_mask_of_one_head, cudnn_with_mask_planned_in_capture)


def check():
    """Run all cases, some at a time. Prints a line per case, and returns those that did not end well."""
    begun = time.monotonic()
    with ThreadPoolExecutor(max(2, min(9, (os.cpu_count() or 2) // 2))) as workers:
        said = list(workers.map(lambda name: _child(name, begun), CASES))
    wrong = []
    for name, (well, text) in zip(CASES, said, strict=True):
        print(f"  {name}: {text}", flush=True)
        if not well and CASES[name] not in KNOWN and not name.startswith("torch_"):
            wrong.append(name)
    return wrong


def _child(name, begun):
    """Run a case in a process. Returns whether it ended well, and a line about it."""
    left = min(CASE_S, ALL_S - (time.monotonic() - begun))
    if left < 2:
        return False, "not run: no time left"
    with tempfile.TemporaryFile("w+") as out:
        try:
            done = subprocess.run(
                [sys.executable, __file__, name], stdout=out, stderr=subprocess.STDOUT, timeout=left, check=False
            )
        except subprocess.TimeoutExpired:
            return False, f"not done after {left:.0f} s"
        out.seek(0)
        lines = out.read().splitlines()
    if done.returncode == 0:
        return True, lines[-1] if lines else ""
    how = f"exit status {done.returncode}" if done.returncode > 0 else signal.Signals(-done.returncode).name
    return False, f"ENDED BY {how}: {' | '.join(_cause(lines))}"


def _cause(lines):
    """Return the lines of a child that tell why it ended: what C++ says, the fatal error, and the innermost frames."""
    said = [line.strip() for line in lines if line.startswith(("terminate called", "  what():", "Fatal Python error"))]
    at = next((k for k, line in enumerate(lines) if "most recent call first" in line and "Current" in line), None)
    if at is not None:
        return said + [line.strip().replace(f"{Path.cwd()}/", "") for line in lines[at + 1 : at + 7]]
    return (said + [line.strip() for line in lines[-3:]]) or ["no output"]


def main():
    from runtime import Gpu

    faulthandler.enable()
    with torch.inference_mode():
        print("ok;", CASES[sys.argv[1]](Gpu()) or "")
    sys.stdout.flush()
    os._exit(0)  # the end of a process is no part of a case


if __name__ == "__main__":
    main()
