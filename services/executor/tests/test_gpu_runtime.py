"""The GPU runtime on a fake driver: the same code as on CUDA and HIP, with host memory."""

import gc
import struct
import threading

import pytest
import torch
from wooly_compiler.pipeline import compile_program
from wooly_compiler.render.dialects import CUDA
from wooly_compiler.render.printer import render
from wooly_compiler.render.source import Form
from wooly_executor.errors import ContextLostError, OperationError
from wooly_executor.memory.swap import Policy
from wooly_executor.programs import ProgramStore
from wooly_executor.runtime.buffers import TORCH_DTYPE, Buffer, Buffers
from wooly_executor.runtime.calls import library_call
from wooly_executor.runtime.captures import InvalidCaptureError
from wooly_executor.runtime.graphs import IDLE, PATIENCE, RECENT_ALL, STEADY, History
from wooly_executor.runtime.protocol import PlanRuntime
from wooly_executor.runtime.synchronising import waits
from wooly_executor.runtime.torch_cpu import TorchCpuRuntime
from wooly_executor.vram import SwapSettings
from wooly_testkit.tape import Tape
from wooly_wis.artifact import Artifact, Code, key_of
from wooly_wis.codec import encode_program
from wooly_wis.dtypes import DType
from wooly_wis.frames import Kind
from wooly_wis.kernel import text as kernel_text
from wooly_wis.program import Form as Instruction
from wooly_wis.program import Operand, OperandRef, ParamKind, ParamRef, Role, View

from services.executor.tests.fake_gpu import LAUNCH_NS, FakeDriver, gpu_runtime

F32, I64 = DType.F32, DType.I64


class Side:
    """A runtime, and programs prepared for it."""

    def __init__(self, runtime):
        self.runtime = runtime
        self.store = ProgramStore(runtime)

    def ready(self, program):
        return self.store.define(encode_program(program))

    def plan(self, program, params=()):
        ready = self.ready(program)
        plan = compile_program(program, params=list(params), checks=True)
        codes = []
        for kernel in plan.kernels:
            source = render(kernel, CUDA, Form.SIMT)
            codes.append(Code(source.name, source.groups, source.threads, 0, kernel_text.write(kernel).encode()))
        key = key_of(program, "fake:fk_1", "full", list(params))
        return self.runtime.load(Artifact(key, "a test's", plan, tuple(codes)), program, ready.facts)

    def run(self, prepared, contents, params=(), edges=()):
        """Run on copies of `contents`, or on buffers. Returns buffers, outcome and times."""
        buffers = {k: v if isinstance(v, Buffer) else Buffer(v.nbytes, v.clone()) for k, v in contents.items()}
        with torch.inference_mode():
            execution = self.runtime.begin(prepared, buffers, list(range(prepared.program.n_slots)), list(params))
            times = execution.advance((*edges, len(prepared.program.body)))
        return buffers, execution.outcome, times, execution


@pytest.fixture
def gpu(driver):
    return Side(gpu_runtime(driver))


@pytest.fixture
def cpu():
    return Side(TorchCpuRuntime())


def same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for slot, b in theirs.items():
        mine = ours[slot]
        assert (mine.nbytes, mine.poison, mine.base is None) == (b.nbytes, b.poison, b.base is None)
        if b.base is not None:
            flat = [
                torch.empty(0, dtype=torch.uint8).set_(x.base.untyped_storage(), 0, (b.nbytes,), (1,))
                for x in (mine, b)
            ]
            assert flat[0].tolist() == flat[1].tolist()


def chain(n=8):
    """A program as in a training step: element-wise, in place, a reduction, and a view in another dtype."""
    t = Tape()
    x, y = t.input(F32, n, 4), t.input(F32, n, 4)
    a = t.op("mul", x, y)
    b = t.op("add", a, x)
    t.free(a)
    c = t.op("relu", b)
    t.op("add", y, c, 0.5, into=y)
    s = t.op("sum", c, (1,), False)
    t.free(b)
    program, slots = t.program()
    return program, t.params, {slots[x.slot]: torch.randn(n, 4), slots[y.slot]: torch.randn(n, 4)}, slots[s.slot]


def layers(n=6):
    """A program of several layers, each with a product, which no generated kernel contains. Long enough for graphs."""
    torch.manual_seed(0)
    t = Tape()
    x, w = t.input(F32, 8, 4), t.input(F32, 4, 4)
    held, left = x, None
    for _ in range(n):
        a = t.op("mm", held, w)
        b = t.op("add", a, x, 0.25)
        held = t.op("tanh", b)
        left = t.op("sum", held, (1,), False)
    t.op("add", x, held, 0.125, into=x)
    program, slots = t.program()
    return program, t.params, {slots[x.slot]: torch.randn(8, 4), slots[w.slot]: torch.randn(4, 4)}, slots[left.slot]


def test_gpu_runtime_is_a_plan_runtime(gpu):
    assert isinstance(gpu.runtime, PlanRuntime) and not gpu.runtime.exact


@pytest.mark.parametrize("edges", [(), (2,), (1, 3, 4, 5)])
def test_gpu_tier_0_results_match_library_at_any_edges(gpu, cpu, edges):
    program, params, contents, _ = chain()
    ours, outcome, times, _ = gpu.run(gpu.ready(program).prepared, contents, params, edges)
    theirs, *_ = cpu.run(cpu.ready(program).prepared, contents, params, edges)
    same(ours, theirs)
    assert outcome.failed_at is None and len(times) == len(edges) + 1 and all(t > 0 for t in times)


def test_gpu_plan_kernels_use_memory_of_library_tensors(gpu, cpu, driver):
    program, params, contents, _ = chain()
    prepared = gpu.plan(program, params)
    ours, outcome, times, _ = gpu.run(prepared, contents, params)
    theirs, *_ = cpu.run(cpu.ready(program).prepared, contents, params)
    assert outcome.failed_at is None
    for slot, b in theirs.items():
        torch.testing.assert_close(ours[slot].base.view(-1), b.base.view(-1))
    assert driver.launches and sum(times) >= LAUNCH_NS * len(driver.launches)


def test_gpu_times_come_from_events_and_are_zero_after_end(gpu, driver):
    program, params, contents, _ = chain()
    prepared = gpu.plan(program, params)
    _, _, times, execution = gpu.run(prepared, contents, params)
    assert times == [driver.launches.__len__() * LAUNCH_NS + times[0] % LAUNCH_NS]
    assert execution.advance((99, 100)) == [0, 0]


def test_gpu_kernel_time_uses_sampled_share(gpu):
    program, params, contents, _ = chain()
    prepared = gpu.plan(program, params)
    for _ in range(17):
        *_, times, execution = gpu.run(prepared, contents, params)
    assert 900 < prepared.kernel_permille <= 1000
    assert execution.kernel_ns == sum(times) * prepared.kernel_permille // 1000


def gathering():
    t = Tape()
    w, i = t.input(F32, 5, 3), t.input(I64, 4)
    t.op("embedding", w, i)
    t.op("neg", w)
    program, slots = t.program()
    return program, {slots[w.slot]: torch.randn(5, 3), slots[i.slot]: torch.tensor([0, 4, 2, 1])}


def test_gpu_plan_index_out_of_range_fails_its_instruction(gpu, cpu):
    program, contents = gathering()
    prepared = gpu.plan(program)
    good, outcome, *_ = gpu.run(prepared, contents)
    assert outcome.failed_at is None
    bad = contents | {s: torch.tensor([0, 5, 2, 1]) for s, t in contents.items() if t.dtype == torch.int64}
    ours, outcome, *_ = gpu.run(prepared, bad)
    _, theirs, *_ = cpu.run(cpu.ready(program).prepared, bad)
    assert (outcome.failed_at, outcome.error) == (theirs.failed_at, theirs.error)
    assert all(ours[s].poison for s in good if s not in contents)
    again, outcome, *_ = gpu.run(prepared, contents)
    assert outcome.failed_at is None
    same(again, good)


def test_gpu_param_of_run_reaches_kernel(gpu):
    t = Tape()
    x = t.input(F32, 6)
    t.op("add", x, 2.5, into=x)
    program, _ = t.program()
    prepared = gpu.plan(program, t.params)
    for by in (2.5, -1.0, 1e300):
        ours, outcome, *_ = gpu.run(prepared, {0: torch.ones(6)}, [by, *t.params[1:]])
        assert outcome.failed_at is None
        assert ours[0].base.tolist() == (torch.ones(6) + by).tolist()


# -- failures ----------------------------------------------------------------------------------------------------------


def test_gpu_refused_launch_fails_only_its_instruction(gpu, driver):
    program, params, contents, _ = chain()
    prepared = gpu.plan(program, params)
    driver.fail_next = OperationError("the launch is refused: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")
    ours, outcome, *_ = gpu.run(prepared, contents, params)
    assert outcome.failed_at == 1 and outcome.code == "executor.operation"
    x, y = contents
    assert ours[y].poison == outcome.error and not ours[x].poison
    assert gpu.run(prepared, contents, params)[1].failed_at is None


def test_gpu_out_of_memory_has_its_own_code(gpu, driver):
    program, params, contents, _ = chain()
    prepared = gpu.plan(program, params)
    driver.fail_next = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
    _, outcome, *_ = gpu.run(prepared, contents, params)
    assert outcome.code == "executor.out_of_memory" and outcome.error.startswith("CUDA out of memory")


@pytest.mark.parametrize(
    "cause",
    [
        NotImplementedError("ceil is not supported for complex inputs"),
        RuntimeError(
            "The following operation failed in the TorchScript interpreter.\n\"dot\" not implemented for 'Bool'"
        ),
    ],
    ids=["type", "text"],
)
def test_gpu_missing_kernel_has_its_own_code(gpu, driver, cause):
    program, params, contents, _ = chain()
    prepared = gpu.plan(program, params)
    driver.fail_next = cause
    _, outcome, *_ = gpu.run(prepared, contents, params)
    assert outcome.code == "executor.missing_kernel" and outcome.error == str(cause)


@pytest.mark.parametrize("when", ["launch", "end"])
def test_gpu_lost_context_raises_context_lost(gpu, driver, when, monkeypatch):
    program, params, contents, _ = chain()
    if when == "launch":

        def launch(*_):
            driver.lost = "CUDA_ERROR_ILLEGAL_ADDRESS"
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(driver, "launch", launch)
    else:
        monkeypatch.setattr(
            driver, "elapsed_ns", lambda marks: setattr(driver, "lost", "CUDA_ERROR_ASSERT") or driver.check()
        )
    prepared = gpu.plan(program, params)
    with pytest.raises(ContextLostError, match="the context of fake GPU is lost: CUDA_ERROR"):
        gpu.run(prepared, contents, params)


def test_gpu_code_refused_by_driver_raises_operation_error(gpu, driver):
    driver.refuse = True
    program, params, *_ = chain()
    with pytest.raises(OperationError, match=r"the driver refuses the code of kernel .*: CUDA_ERROR_INVALID_IMAGE"):
        gpu.plan(program, params)


def test_gpu_lost_device_ends_sessions_with_reason(make_device, driver, wis):
    device = make_device(runtime=gpu_runtime(driver))
    a, b = device.open("a"), device.open("b")
    a.make(1, 1.0, 2.0)
    b.make(1, 3.0)
    assert a.floats(1, 2) == [1.0, 2.0] and b.floats(1, 1) == [3.0]
    driver.lost = "CUDA_ERROR_ECC_UNCORRECTABLE"
    asked = threading.Event()
    device.loop.call(asked.wait)  # the loop gets the run and the waiting request at the same time
    a.run(wis.body().fill("x", wis.at(F32, 2), 0.0), {"x": 1})
    a.channel.send(Kind.SYNC)
    asked.set()
    with pytest.raises(wis.error, match="the context of fake GPU is lost: CUDA_ERROR_ECC_UNCORRECTABLE") as caught:
        a.answer()
    assert caught.value.code == "executor.context_lost"
    device.wait_closed("a")
    device.wait_closed("b")
    device.thread.join(30)
    assert device.told[1:] == [f"ended: {device.loop.lost}"]
    device.may_end = True


# -- bytes -------------------------------------------------------------------------------------------------------------


def test_gpu_uploads_and_reads_use_host_memory(make_device, driver):
    device = make_device(runtime=gpu_runtime(driver))
    client = device.open("a")
    data = bytes(range(256)) * 4096
    client.load(1, data)
    client.write(1, b"wooly", 100)
    assert client.read(1, len(data)) == data[:100] + b"wooly" + data[105:]
    assert driver.attached


def test_gpu_equal_contents_are_shared(make_device, driver):
    from wooly_executor.memory.book import Scope

    device = make_device(runtime=gpu_runtime(driver))
    data = struct.pack("<1024f", *range(1024)) * 8
    a, b = (device.open(name, scope=Scope.SHARED) for name in ("a", "b"))
    assert not a.load(1, data)
    a.sealed()
    assert b.load(1, data)
    b.write(1, b"\0" * 4)
    assert a.read(1, len(data)) == data and b.read(1, len(data)) == b"\0" * 4 + data[4:]
    assert driver.asides


def two_by_turns(make_device, driver, swap, wis, rounds=3):
    """Two sessions of 6 MiB each on a device of 10 MiB: they swap each other out, and keep their bytes."""
    device = make_device(runtime=gpu_runtime(driver), memory=10 << 20, swap=swap)
    data = {name: bytes([k, 255 - k]) * (3 << 20) for k, name in enumerate("ab")}
    clients = {name: device.open(name) for name in data}
    for name, client in clients.items():
        client.run(wis.body().alloc("x", len(data[name])), {"x": 1})
        client.write(1, data[name])
        client.sync()
    for _ in range(rounds):
        for name, client in clients.items():
            assert client.read(1, len(data[name])) == data[name]
    device.check()
    return device


def swap_settings(folder, host, disk):
    return SwapSettings(Policy(0, 1 << 20, 0), host, disk, folder, 30_000_000_000)


def test_gpu_swap_to_host_uses_locked_pages(make_device, driver, wis, tmp_path):
    device = two_by_turns(make_device, driver, swap_settings(tmp_path, 64 << 20, 0), wis)
    assert device.residence() == {"a": "away", "b": "here"}

    def copies(vram):
        return [c._host for s in vram._sessions.values() for c in s.holdings.copies.values()]

    (copy,) = device.call(lambda: copies(device.loop.vram))
    assert driver.locked[copy.untyped_storage().data_ptr()] == 6 << 20
    assert len(driver.locks) <= 2  # the locked memory is reused
    del copy


def test_gpu_swap_to_disk_uses_locked_pages(make_device, driver, wis, tmp_path):
    two_by_turns(make_device, driver, swap_settings(tmp_path, 0, 64 << 20), wis)
    assert set(driver.locks) == {6 << 20} and len(driver.locks) <= 2


def test_gpu_swap_without_locked_pages_works_and_warns(make_device, driver, wis, tmp_path, caplog):
    driver.refuse_locks = True
    two_by_turns(make_device, driver, swap_settings(tmp_path, 64 << 20, 0), wis)
    assert not driver.locks and "of host memory (CUDA_ERROR_OUT_OF_MEMORY)" in caplog.text


def test_page_locked_last_view_gone_unlocks_pages(driver):
    memory = gpu_runtime(driver).device.host_memory(3 << 20)
    view, address = memory[1 << 20 :].view(torch.float32), memory.data_ptr()
    assert driver.locked == {address: 3 << 20} and len(memory) == 3 << 20
    memory.fill_(1)
    del memory
    gc.collect()
    assert driver.locked and view[0].item() == torch.full((4,), 1, dtype=torch.uint8).view(torch.float32).item()
    del view
    gc.collect()
    assert not driver.locked


def test_gpu_small_host_memory_comes_from_torch(driver):
    assert len(gpu_runtime(driver).device.host_memory(4096)) == 4096 and not driver.locks


# -- graphs ------------------------------------------------------------------------------------------------------------


def loop(side, prepared, contents, params, n, edges=()):
    """Run `n` times on the same buffers, whose memory does not move. Returns the sums that each run left."""
    buffers = {k: Buffer(v.nbytes, v.clone()) for k, v in contents.items()}
    left = []
    kept = None
    for _ in range(n):
        for slot in [s for s in buffers if s not in contents]:
            del buffers[slot]
        buffers, outcome, _, _ = side.run(prepared, buffers, params, edges)
        assert outcome.failed_at is None
        kept = {s: b.base.clone() for s, b in buffers.items()}
        left.append(kept)
    return left


def equal(ours, theirs):
    """Check that two loops left the same."""
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for slot in other:
            assert mine[slot].view(-1).tolist() == other[slot].view(-1).tolist()


@pytest.mark.parametrize("edges", [(), (27,), (24, 39)])
@pytest.mark.parametrize("planned", [False, True])
def test_graphs_repeated_runs_replay_with_same_results(gpu, cpu, driver, edges, planned):
    program, params, contents, _ = layers()
    theirs = loop(cpu, cpu.ready(program).prepared, contents, params, 40)
    prepared = gpu.plan(program, params) if planned else gpu.ready(program).prepared
    prepared.edges = edges
    ours = loop(gpu, prepared, contents, params, 40, edges)
    assert driver.replays > 0
    near = 1e-3 if planned else 0.0  # generated kernels round differently, and each run uses the result of the last one
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for slot in other:
            torch.testing.assert_close(mine[slot].view(-1), other[slot].view(-1), rtol=near, atol=near)


def test_graphs_never_cross_an_edge(gpu):
    program, params, contents, _ = layers()
    prepared = gpu.ready(program).prepared
    prepared.edges = edges = (24, 39)
    loop(gpu, prepared, contents, params, 40, edges)
    ends = [len(prepared.program.body), *edges]
    assert len(prepared.stretches) >= 2
    for begin, end in prepared.stretches:
        inside = prepared.places[begin:end]
        assert not [e for e in ends if inside[0] < e <= inside[-1]]


def test_graphs_results_survive_next_replay(gpu, driver):
    program, params, contents, made = layers()
    prepared = gpu.ready(program).prepared
    buffers = {k: Buffer(v.nbytes, v.clone()) for k, v in contents.items()}
    held = []
    for _ in range(40):
        buffers.pop(made, None)
        buffers, *_ = gpu.run(prepared, buffers, params)
        for slot in [s for s in buffers if s not in contents and s != made]:
            del buffers[slot]
        held.append((buffers[made].base, buffers[made].base.clone()))
        buffers.pop(made)
    assert driver.replays
    assert all(torch.equal(a, b) for a, b in held)


def test_graphs_other_addresses_or_params_are_not_replayed(gpu, cpu, driver):
    program, params, contents, _ = layers()
    prepared, other = gpu.ready(program).prepared, cpu.ready(program).prepared
    loop(gpu, prepared, contents, params, 30)
    before = driver.replays
    held = []
    for k in range(5):
        fresh = {s: torch.randn_like(t) for s, t in contents.items()}
        numbers = [p + k if isinstance(p, float) else p for p in params]
        ours, outcome, *_ = gpu.run(prepared, fresh, numbers)
        theirs, *_ = cpu.run(other, fresh, numbers)
        held.append(ours)
        assert outcome.failed_at is None
        for slot, b in theirs.items():
            torch.testing.assert_close(ours[slot].base.view(-1), b.base.view(-1))
    assert before and driver.replays == before


def noisy(wis, *args, second="aten.bernoulli_.float"):
    """A program with two random calls, each with a seed and an offset, between other calls. `args`: those of the second one."""
    v, pair = wis.at(F32, 16), {"params": (ParamKind.I64, ParamKind.I64), "rng": (ParamRef(0), ParamRef(1))}
    body = wis.body().alloc("x", 64).alloc("y", 64)
    body.call("aten.normal_.default", ("inout", "x", v), args=(OperandRef(0), 0.0, 1.0), **pair)
    body.call("aten.sin_.default", ("inout", "x", v))
    body.call(second, ("inout", "y", v), args=(OperandRef(0), *args), **pair)
    body.call("aten.mul_.Tensor", ("inout", "x", v), ("in", "y", v))
    return body.program


def test_graphs_random_numbers_differ_per_run(gpu, cpu, driver, wis):
    program = noisy(wis, 0.5)
    prepared, other = gpu.ready(program).prepared, cpu.ready(program).prepared
    seen = set()
    for k in range(30):
        params = [1, 2 * k, 1, 2 * k + 1]
        ours, outcome, *_ = gpu.run(prepared, {}, params)
        theirs, *_ = cpu.run(other, {}, params)
        assert outcome.failed_at is None
        same(ours, theirs)
        seen.add(tuple(ours[0].base.view(torch.float32).view(-1).tolist()))
    assert len(seen) == 30 and driver.replays > 10 and not prepared.uncapturable
    driver.seed(5)  # the default generator has its own state again
    assert torch.equal(torch.rand(4), torch.rand(4, generator=torch.Generator().manual_seed(5)))


def test_graphs_repeated_seed_and_offset_give_the_same_numbers(gpu, driver, wis):
    prepared = gpu.ready(noisy(wis, 0.5)).prepared
    found = [gpu.run(prepared, {}, [1, k % 3, 1, k % 2])[0][0].base.tolist() for k in range(60)]
    assert driver.replays > 40 and all(found[k] == found[k % 6] for k in range(60)) and len({*map(tuple, found)}) == 6


@pytest.mark.parametrize("how", ["differ", "fail"])
def test_graphs_random_numbers_that_a_device_cannot_repeat_stay_outside(
    gpu, cpu, driver, wis, monkeypatch, caplog, how
):
    driver.draws_differ = how == "differ"
    if how == "fail":
        monkeypatch.setattr(driver.library, "new_draw", no_such_function)
    program = noisy(wis, 0.5)
    prepared, other = gpu.ready(program).prepared, cpu.ready(program).prepared
    for k in range(30):
        ours, outcome, *_ = gpu.run(prepared, {}, [1, k, 2, k])
        assert outcome.failed_at is None
        same(ours, cpu.run(other, {}, [1, k, 2, k])[0])
    assert len(prepared.uncapturable) == 2
    assert caplog.text.count("random numbers differ in graphs of this device") == 1


def no_such_function(*_):
    raise RuntimeError("the library cannot do it")


@pytest.mark.parametrize(
    ("made", "said"), [(1, "1 random calls of a graph were announced and not made"), (3, "not announced")]
)
def test_capture_with_other_number_of_random_calls_fails(driver, made, said):
    t = torch.zeros(4)

    def draw():
        for seed in range(made):
            driver.seed(seed)
            t.normal_()

    with pytest.raises(RuntimeError, match=said):
        driver.capture(draw, draws=2)
    driver.seed(5)  # the default generator has its own state again
    assert torch.equal(torch.rand(4), torch.rand(4, generator=torch.Generator().manual_seed(5)))
    driver.capture(lambda: t.add_(1)).replay()


def test_graphs_random_operator_that_looks_at_values_stays_outside(gpu, driver, wis):
    v = wis.at(F32, 16)
    body = wis.body().alloc("p", 64).alloc("x", 64)
    body.call(
        "aten.normal.Tensor_float",
        ("in", "p", v),
        ("out", "x", v),
        args=(OperandRef(0), 1.0),
        params=(ParamKind.I64, ParamKind.I64),
        rng=(ParamRef(0), ParamRef(1)),
    )
    prepared = gpu.ready(body.program).prepared
    assert len(prepared.uncapturable) == 1


def test_graphs_failed_capture_is_never_retried(gpu, cpu, driver, monkeypatch):
    program, params, contents, _ = layers()

    def capture(body, *, apart, draws):
        driver.captures += 1
        body_was = driver.captures
        raise RuntimeError(f"operation not permitted when stream is capturing ({body_was})")

    monkeypatch.setattr(driver, "capture", capture)
    theirs = loop(cpu, cpu.ready(program).prepared, contents, params, 40)
    ours = loop(gpu, gpu.ready(program).prepared, contents, params, 40)
    assert driver.captures == 1
    for mine, other in zip(ours, theirs, strict=True):
        for slot in other:
            assert torch.equal(mine[slot], other[slot])


@pytest.mark.parametrize("failing", [1, 2])
def test_graphs_capture_without_memory_is_retried_once(gpu, driver, monkeypatch, failing):
    plain = driver.capture

    def capture(body, *, apart, draws):
        if driver.captures < failing:
            driver.captures += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return plain(body, apart=apart, draws=draws)

    monkeypatch.setattr(driver, "capture", capture)
    program, params, contents, _ = layers()
    loop(gpu, gpu.ready(program).prepared, contents, params, 40)
    assert driver.captures == 2 and driver.released == 1 and bool(driver.replays) == (failing == 1)


def with_step_between(*call):
    """A program of two stretches with another step between them. Returns it, its params and its contents."""
    t = Tape()
    x = t.input(F32, 8, 4)

    def more(held, times):
        for _ in range(times):
            wider = t.op("add", held, x, 0.25)
            made = t.op("tanh", wider)
            t.free(wider)
            if held is not x:
                t.free(held)
            held = made
        return held

    held = more(x, 5)
    name, *args = call
    t.extern(name, held, *args, results=[(F32, (4,))])
    held = more(held, 5)
    t.op("add", x, held, 0.125, into=x)
    t.free(held)
    program, slots = t.program()
    return program, t.params, {slots[x.slot]: torch.randn(8, 4)}


HISTOGRAM = "aten.histc.default", 4, -1.0, 1.0


def test_graphs_do_not_contain_a_call_that_reads_its_number(gpu, cpu, driver):
    t = Tape()
    x, number = t.input(F32, 8, 4), t.input(F32)
    for _ in range(2):
        for _ in range(5):
            t.op("tanh", x, into=x)
        t.extern("aten.add_.Tensor", x, x, written=[x], named=[("alpha", number)])
        t.op("add", number, number, 0.125, into=number)
    program, slots = t.program()
    contents = {slots[x.slot]: torch.randn(8, 4), slots[number.slot]: torch.tensor(0.5)}
    prepared = gpu.ready(program).prepared
    theirs = loop(cpu, cpu.ready(program).prepared, contents, t.params, 40)
    ours = loop(gpu, prepared, contents, t.params, 40)
    equal(ours, theirs)
    assert driver.replays > 20 and not driver.recording
    assert driver.captures == sum(map(len, prepared.stretches.values()))


def test_graphs_step_that_waits_splits_stretch(gpu, cpu, driver):
    program, params, contents = with_step_between(*HISTOGRAM)
    prepared = gpu.ready(program).prepared
    theirs = loop(cpu, cpu.ready(program).prepared, contents, params, 40)
    ours = loop(gpu, prepared, contents, params, 40)
    ((found),) = prepared.stretches.values()
    assert len(found) == 2 and driver.captures == 2 and driver.replays > 20
    equal(ours, theirs)


def test_product_of_groups_waits_except_in_bfloat16():
    for dtype, waiting in ((DType.BF16, False), (DType.F16, True), (DType.F32, True)):
        operands = [View(dtype, (6, 8), (8, 1)), View(dtype, (2, 8, 16), (128, 16, 1)), View(DType.I32, (2,), (1,))]
        call = ("args", tuple([OperandRef(k) for k in range(3)])), ("name", "aten._grouped_mm.default")
        form = Instruction("extern", tuple([Operand(Role.IN, view) for view in operands]), (), call)
        assert waits(library_call(form), form) is waiting


def test_graphs_unknown_step_that_waits_is_found_by_failed_capture(gpu, cpu, driver, monkeypatch):
    monkeypatch.setattr("wooly_executor.runtime.lowering.waits", lambda call, form: False)
    monkeypatch.setattr("wooly_executor.runtime.lowering.fills_results", lambda *_, **__: True)
    program, params, contents = with_step_between(*HISTOGRAM)
    prepared = gpu.ready(program).prepared
    theirs = loop(cpu, cpu.ready(program).prepared, contents, params, 60)
    equal(loop(gpu, prepared, contents, params, 60), theirs)
    failed = driver.captures - gpu.runtime.graphs.count
    assert failed == 1 and driver.replays and not driver.recording and driver.generator_works
    driver.seed(1)
    other, params, contents = with_step_between("aten.histc.default", 4, -2.0, 2.0)
    loop(gpu, gpu.ready(other).prepared, contents, params, 40)
    assert driver.captures - gpu.runtime.graphs.count == failed
    assert gpu.runtime.graphs.count >= 3


def test_graphs_sessions_that_share_a_program_each_get_a_graph(gpu, driver):
    program, params, contents, _ = layers()
    prepared = gpu.ready(program).prepared
    both = [{k: Buffer(v.nbytes, v.clone()) for k, v in contents.items()} for _ in range(2)]
    for k in range(60):
        gpu.run(prepared, both[k % 2], params)
    assert driver.captures == 2 and driver.replays > 20


@pytest.mark.parametrize("freed", [False, True])
def test_graphs_changing_param_leaves_other_steps_in_graphs(gpu, cpu, driver, freed):
    program, params, contents = with_step_between(*HISTOGRAM) if freed else layers()[:3]
    ours, theirs = gpu.ready(program).prepared, cpu.ready(program).prepared
    buffers = [{k: Buffer(v.nbytes, v.clone()) for k, v in contents.items()} for _ in range(2)]
    for k in range(60):
        for side, prepared, own in ((gpu, ours, buffers[0]), (cpu, theirs, buffers[1])):
            _, outcome, *_ = side.run(prepared, own, [*params[:-1], params[-1] / (k // 2 + 1)])
            assert outcome.failed_at is None
        assert all(torch.equal(own.base, buffers[1][slot].base) for slot, own in buffers[0].items())
    assert driver.captures <= 3 and driver.replays > 20


def test_graphs_run_that_stopped_keeps_its_inner_values(gpu, driver):
    t = Tape()
    x = t.input(F32, 8, 4)
    held = x
    for _ in range(8):
        made = t.op("tanh", t.op("add", held, x, 0.25))
        if held is not x:
            t.free(held)
        held = made
    last = t.op("add", held, x, 0.5)
    t.free(held)
    program, slots = t.program()
    prepared = gpu.ready(program).prepared
    edge, end = 14, len(program.body)  # behind a layer, whose result the next layer uses
    prepared.edges = (edge,)
    held = Buffer(128, torch.randn(8, 4))

    def begin():
        buffers = {slots[x.slot]: held}
        return buffers, gpu.runtime.begin(prepared, buffers, list(range(program.n_slots)), t.params)

    with torch.inference_mode():
        for _ in range(40):
            _, run = begin()
            run.advance((edge,))
            run.advance((end,))
        before = gpu.runtime.graphs.replayed
        first, stopped = begin()
        stopped.advance((edge,))
        expected = [t.clone() for t in stopped._frame.registers if t is not None]
        assert gpu.runtime.graphs.replayed == before + 1
        held.base.add_(1.0)
        begin()[1].advance((edge,))
        assert gpu.runtime.graphs.replayed == before + 1
        now = [t for t in stopped._frame.registers if t is not None]
        changed = [not torch.equal(a, b) for a, b in zip(now, expected, strict=True)]
        assert sum(changed) == 1  # the input
        stopped.advance((end,))
    assert stopped.outcome.failed_at is None and slots[last.slot] in first


@pytest.mark.parametrize("alternating", [False, True])
def test_history_changing_params_are_found(alternating):
    history = History()
    found = [history.note([0.5, k % 3 if alternating else k], [0, 1]) for k in range(40)]
    assert found[-1] == ([] if alternating else [1])


def test_graphs_dropped_program_gives_graphs_back(gpu, driver):
    for k in range(3):
        program, params, contents, _ = layers(5 + k)
        loop(gpu, gpu.ready(program).prepared, contents, params, 30)
        gpu.store = ProgramStore(gpu.runtime)
        gc.collect()
    assert driver.captures == 3
    program, params, contents, _ = layers(9)
    prepared = gpu.ready(program).prepared
    loop(gpu, prepared, contents, params, 30)
    assert gpu.runtime.graphs.count == 1 and driver.graph_bytes() == driver.bytes_per_graph


def test_graphs_full_pool_captures_no_more(gpu, driver):
    driver.bytes_per_graph = 1 << 30
    for n in (5, 6, 7):
        program, params, contents, _ = layers(n)
        prepared = gpu.ready(program).prepared
        loop(gpu, prepared, contents, params, 30)
        gpu.kept = [*getattr(gpu, "kept", []), prepared]
    assert driver.captures == 1


def test_graphs_unused_graph_makes_room(gpu, driver, monkeypatch):
    monkeypatch.setattr("wooly_executor.runtime.graphs.VARIANTS_ALL", 1)
    program, params, contents, _ = layers()
    prepared = gpu.ready(program).prepared
    first, second = ({k: Buffer(v.nbytes, v.clone()) for k, v in contents.items()} for _ in range(2))
    for _ in range(30):
        gpu.run(prepared, first, params)
    assert driver.captures == 1
    for k in range(IDLE + 8 + PATIENCE):
        gpu.run(prepared, second, params)
        assert driver.captures == (1 if k < IDLE else driver.captures)
    assert driver.captures == 2


def test_graphs_of_other_programs_make_room_if_they_were_not_used_for_long(gpu, driver, monkeypatch):
    monkeypatch.setattr("wooly_executor.runtime.graphs.GRAPHS", 1)
    monkeypatch.setattr("wooly_executor.runtime.graphs.RECENT_ALL", 8)
    first, second = (layers(n) for n in (5, 6))
    prepared = {n: gpu.ready(program).prepared for n, (program, *_) in ((5, first), (6, second))}
    for n, (_, params, contents, _) in ((5, first), (6, second)):
        loop(gpu, prepared[n], contents, params, 30)
    assert driver.captures == 1  # the graph of the first program was in use shortly before
    gpu.runtime.graphs.replayed += 8  # other programs of the device replay
    loop(gpu, prepared[6], second[2], second[1], 10)
    assert driver.captures == 2 and gpu.runtime.graphs.count == 1


def rows(n=6, wide=4, layers=5):
    """A program that reads `x` and `w`, and leaves one result of the size of `x`. Returns it, its params and slots."""
    t = Tape()
    x, w = t.input(F32, n, wide), t.input(F32, wide, wide)
    held = x
    for _ in range(layers):
        a = t.op("mm", held, w)
        b = t.op("add", a, x, 0.25)
        t.free(a)
        if held is not x:
            t.free(held)
        held = t.op("tanh", b)
        t.free(b)
    program, slots = t.program()
    return program, t.params, slots[x.slot], slots[w.slot], slots[held.slot]


LARGE = 128, 160  # 80 KiB: lent, not copied


def step(gpu, prepared, params, buffers):
    """Run on some buffers, and return all buffers afterwards."""
    after, outcome, *_ = gpu.run(prepared, buffers, params)
    assert outcome.failed_at is None
    return after


def test_graphs_small_inputs_at_new_addresses_are_replayed(gpu, cpu, driver):
    program, params, x, w, made = rows()
    prepared, other = gpu.ready(program).prepared, cpu.ready(program).prepared
    weights, kept = Buffer(64, torch.randn(4, 4)), []
    for _ in range(50):
        token = torch.randn(6, 4)
        ours = step(gpu, prepared, params, {x: Buffer(96, token), w: weights})
        theirs = step(cpu, other, params, {x: Buffer(96, token.clone()), w: weights})
        kept.append((token, ours[made].base, theirs[made].base))
    assert driver.captures == 1 and driver.replays > 20
    assert all(torch.equal(mine.view(-1), good.view(-1)) for _, mine, good in kept)


@pytest.mark.parametrize(
    "view", [View(F32, (4, 6), (1, 4)), View(F32, (4, 5), (1, 4), 16), View(I64, (4, 3), (3, 1))], ids=str
)
def test_graphs_small_inputs_in_other_views_are_copied_whole(gpu, cpu, driver, view):
    t = Tape()
    x = t.input(F32, 6, 4)
    seen = held = t.op("neg", type(x)(x.slot, view))
    for _ in range(5):
        held = t.op("add", held, seen)
    program, slots = t.program()
    prepared, other = gpu.ready(program).prepared, cpu.ready(program).prepared
    kept = []
    for _ in range(50):
        token = torch.randn(6, 4)
        mine, good = [
            step(side, own, t.params, {slots[x.slot]: Buffer(96, token.clone())})
            for side, own in ((gpu, prepared), (cpu, other))
        ]
        kept.append((mine, good))
        assert torch.equal(mine[slots[held.slot]].base.reshape(-1), good[slots[held.slot]].base.reshape(-1))
    assert driver.captures == 1 and driver.replays > 20


def test_graphs_rare_runs_at_other_addresses_move_no_input(gpu, driver):
    program, params, x, w, _ = rows()
    prepared = gpu.ready(program).prepared
    inputs, others = {x: Buffer(96, torch.randn(6, 4)), w: Buffer(64, torch.randn(4, 4))}, []
    for k in range(200):
        if k % 16 == 15:
            others.append(torch.randn(6, 4))
            step(gpu, prepared, params, inputs | {x: Buffer(96, others[-1])})
        else:
            step(gpu, prepared, params, dict(inputs))
    (stretch,) = [s for found in prepared.stretches.values() for s in found]
    assert driver.captures == 1 and driver.replays > 150 and not stretch.moving


def test_graphs_layers_of_a_model_each_get_a_graph_and_no_weight_is_copied(gpu, cpu, driver):
    """Each layer is a run of the same program on its own weights, large and small ones, and on the result of the layer before."""
    count, n, wide = 20, 64, 288
    t = Tape()
    x, w, scale = t.input(F32, n, wide), t.input(F32, wide, wide), t.input(F32, wide)
    a = t.op("mm", x, w)
    b = t.op("mul", a, scale)
    c = t.op("tanh", b)
    out = t.op("add", c, x, 0.5)
    for inner in (a, b, c):
        t.free(inner)
    program, slots = t.program()
    weights = [(torch.randn(wide, wide) / 16, torch.randn(wide)) for _ in range(count)]
    first = torch.randn(n, wide)

    def forward(side, prepared, inputs):
        held = first if side is cpu else inputs[0]
        for own in inputs[1]:
            made = step(
                side, prepared, t.params, {slots[x.slot]: held, slots[w.slot]: own[0], slots[scale.slot]: own[1]}
            )
            held = made[slots[out.slot]]
        return held.base.clone()

    def buffers():
        return Buffer(first.nbytes, first.clone()), [tuple(Buffer(v.nbytes, v.clone()) for v in own) for own in weights]

    there, here = buffers(), buffers()
    prepared = gpu.ready(program).prepared
    want = forward(cpu, cpu.ready(program).prepared, (None, here[1]))
    for _ in range(16):
        before = driver.replays
        assert torch.equal(forward(gpu, prepared, there), want)
    # the fake's addresses are malloc's, so a layer may get another graph before they come again
    assert count <= driver.captures < 2 * count and driver.replays - before == count
    (stretch,) = [s for found in prepared.stretches.values() for s in found]
    assert {slot for slot, _ in stretch.moving} <= {slots[x.slot]}


def test_graphs_written_or_large_inputs_at_new_addresses_are_not_replayed(gpu, driver):
    program, params, contents, _ = layers()  # writes its first input
    prepared = gpu.ready(program).prepared
    held = [[Buffer(v.nbytes, v.clone()) for v in contents.values()] for _ in range(40)]
    for own in held:
        step(gpu, prepared, params, dict(zip(contents, own, strict=True)))
    program, params, x, w, _ = rows(1024, 160)
    prepared = gpu.ready(program).prepared
    inputs = [torch.randn(1024, 160) for _ in range(30)]
    weights = Buffer(160 * 160 * 4, torch.randn(160, 160))
    for t in inputs:
        step(gpu, prepared, params, {x: Buffer(t.nbytes, t), w: weights})
    assert not driver.captures


def test_graphs_input_with_other_alignment_is_not_replayed(gpu, driver):
    program, params, x, w, _ = rows()
    prepared = gpu.ready(program).prepared
    weights, kept = Buffer(64, torch.randn(4, 4)), []
    for _ in range(50):
        token = torch.randn(6, 4)
        kept.append((token, step(gpu, prepared, params, {x: Buffer(96, token), w: weights})))
    before = driver.replays
    memory = bytearray(256)
    view = torch.frombuffer(memory, dtype=torch.uint8)
    offset = 4 - view.data_ptr() % 4 + (4 if (view.data_ptr() + 4 - view.data_ptr() % 4) % 64 == 0 else 0)
    odd = torch.frombuffer(memoryview(memory)[offset : offset + 96], dtype=torch.float32).view(6, 4)
    assert odd.data_ptr() % 64 and odd.storage_offset() == 0 and before > 20
    step(gpu, prepared, params, {x: Buffer(96, odd.copy_(kept[0][0])), w: weights})
    assert driver.replays == before


def test_graphs_equal_floats_with_other_bits_are_not_replayed(gpu, driver):
    program, params, contents, _ = layers()
    prepared = gpu.ready(program).prepared
    buffers = {k: Buffer(v.nbytes, v.clone()) for k, v in contents.items()}
    for _ in range(30):
        step(gpu, prepared, [0.0] * len(params), buffers)
    before = driver.replays
    step(gpu, prepared, [-0.0] * len(params), buffers)
    step(gpu, prepared, [0] * len(params), buffers)
    assert before > 5 and driver.replays == before + 1


@pytest.mark.parametrize("keep", [0, 1, 2, 40])
def test_graphs_lent_result_is_not_overwritten_while_it_is_used(gpu, cpu, driver, keep):
    program, params, x, w, made = rows(*LARGE)
    prepared, other = gpu.ready(program).prepared, cpu.ready(program).prepared
    inputs = {x: Buffer(4 * 128 * 160, torch.randn(*LARGE)), w: Buffer(4 * 160 * 160, torch.randn(160, 160) / 12)}
    kept, places = [], []
    for k in range(40):
        with torch.inference_mode():
            inputs[x].base.mul_(0.5 + k % 3)
        good = step(cpu, other, params, dict(inputs))[made].base
        mine = step(gpu, prepared, params, dict(inputs))[made].base
        kept.append((mine, good))
        places.append(mine.data_ptr())
        assert all(torch.equal(a, b) for a, b in kept)
        del kept[: len(kept) - keep], mine
    assert driver.replays > 15 and driver.captures == min(keep + 1, 3)
    assert len(set(places[-10:])) == keep + 1 if keep < 2 else len(set(places[-10:])) > 2


def test_graphs_that_lend_results_share_a_pool(gpu, cpu, driver):
    """Their own values share memory, so many layers of a large model fit."""
    weights, last = Buffer(4 * 160 * 160, torch.randn(160, 160) / 12), {}
    programs = [rows(*LARGE, layers) for layers in (5, 6, 7)]
    sides = {side: [side.ready(program).prepared for program, *_ in programs] for side in (gpu, cpu)}
    x = torch.randn(*LARGE)
    for _ in range(60):
        for side, prepared in sides.items():
            held = Buffer(4 * 128 * 160, x.clone())
            for own, (_, params, taken, w, made) in zip(prepared, programs, strict=True):
                held = step(side, own, params, {taken: held, w: weights})[made]
            last[side] = held.base
        assert torch.equal(last[gpu], last[cpu])
        last.clear()
        del held
    assert driver.replays > 90 and driver.captures >= 3
    assert sum(map(bool, driver.graphs_of.values())) == 1


def test_graphs_lent_result_of_other_session_is_not_overwritten(gpu, cpu, driver):
    program, params, x, w, made = rows(*LARGE)
    prepared, other = gpu.ready(program).prepared, cpu.ready(program).prepared
    shared = {x: Buffer(4 * 128 * 160, torch.randn(*LARGE)), w: Buffer(4 * 160 * 160, torch.randn(160, 160) / 12)}
    held = {}
    for k in range(60):
        session = k % 2
        held.pop(session, None)
        with torch.inference_mode():
            shared[x].base.mul_(0.5 + k % 3)
        good = step(cpu, other, params, dict(shared))[made].base
        held[session] = step(gpu, prepared, params, dict(shared))[made].base, good
        assert all(torch.equal(a, b) for a, b in held.values())
    assert driver.captures == 2 and driver.replays > 30
    held.clear()
    before = driver.replays  # a session that ended left its memory to the other one
    step(gpu, prepared, params, dict(shared))
    assert driver.replays == before + 1


def test_graphs_next_program_uses_lent_result_at_same_address(gpu, cpu, driver):
    program, params, x, w, made = rows(*LARGE)
    sides = {side: (side.ready(program).prepared, side.ready(rows(*LARGE, 6)[0]).prepared) for side in (gpu, cpu)}
    _, more, x2, w2, made2 = rows(*LARGE, 6)
    inputs = {x: Buffer(4 * 128 * 160, torch.randn(*LARGE)), w: Buffer(4 * 160 * 160, torch.randn(160, 160) / 12)}
    captured, last = [], {}
    for _ in range(40):
        for side, (first, second) in sides.items():
            between = step(side, first, params, dict(inputs))[made]
            last[side] = step(side, second, more, {x2: between, w2: inputs[w]})[made2].base
        assert torch.equal(last[gpu], last[cpu])
        captured.append(driver.captures)
        last.clear()
        del between
    # The second program is captured in the same round, or up to `STEADY` rounds later if an earlier result had the lent address.
    assert captured[-1] == 2 and captured.count(1) <= STEADY
    assert driver.replays > 30


def test_graphs_runs_on_lent_results_each_get_a_graph(gpu, cpu, driver):
    """As in a backward pass: for each layer, the second program gets what the first one kept, and the weights are the same."""
    layers, size = 4, (512, 160)  # inputs of this size are not copied
    sides = {side: [side.ready(rows(*size, n)[0]).prepared for n in (5, 6)] for side in (gpu, cpu)}
    (_, params, x, w, made), (_, more, x2, w2, made2) = rows(*size), rows(*size, 6)
    weights = Buffer(4 * 160 * 160, torch.randn(160, 160) / 12)
    inputs = [Buffer(4 * 512 * 160, torch.randn(*size)) for _ in range(layers)]
    for _ in range(30):
        before, results = driver.replays, {}
        for side, (first, second) in sides.items():
            kept = [step(side, first, params, {x: own, w: weights})[made] for own in inputs]
            results[side] = [step(side, second, more, {x2: own, w2: weights})[made2].base for own in kept]
            del kept
        assert all(map(torch.equal, results[gpu], results[cpu]))
    assert driver.replays - before == 2 * layers
    assert 2 * layers <= driver.captures <= 2 * layers + STEADY  # an earlier result may have had a lent address


@pytest.mark.parametrize("ids", ["new ids", "ids of freed buffers"])
def test_graphs_small_inputs_in_new_buffers_are_copied_although_large_ones_move(gpu, driver, ids):
    """As in the first steps of training: each run has new buffers. The large ones have the same memory later."""
    program, params, x, w, _ = rows(4, 320)
    prepared = gpu.ready(program).prepared
    buffers, newest, memory = Buffers(), 1, []
    buffers[1] = Buffer(4 * 320 * 320, torch.randn(320, 320))
    for k in range(60):
        if k < 30:
            memory.append(torch.randn(320, 320))
            buffers[1] = Buffer(4 * 320 * 320, memory[-1])
        memory.append(torch.randn(4, 320))
        bindings = [newest + 1 + n for n in range(program.n_slots)]
        newest, bindings[w] = bindings[-1] if ids == "new ids" else newest, 1
        buffers[bindings[x]] = Buffer(4 * 4 * 320, memory[-1])
        with torch.inference_mode():
            execution = gpu.runtime.begin(prepared, buffers, bindings, params)
            execution.advance((len(program.body),))
        assert execution.outcome.failed_at is None
        assert driver.captures == (k >= 29 + STEADY)
        kept = {k: b for k, b in buffers.items() if k == 1}
        buffers.clear()  # the session's buffers are the same object
        buffers.update(kept)
    assert driver.replays >= 30 - STEADY


def test_graphs_state_that_each_run_makes_anew_is_replayed(gpu, cpu, driver):
    program, params, x, w, made = rows(*LARGE)
    prepared, other = gpu.ready(program).prepared, cpu.ready(program).prepared
    weights = Buffer(4 * 160 * 160, torch.randn(160, 160) / 12)
    states = {gpu: Buffer(4 * 128 * 160, torch.randn(*LARGE))}
    states[cpu] = Buffer(states[gpu].nbytes, states[gpu].base.clone())
    replayed = []
    for _ in range(120):
        before = driver.replays
        for side, own in ((gpu, prepared), (cpu, other)):
            states[side] = step(side, own, params, {x: states[side], w: weights})[made]
        assert torch.equal(states[gpu].base, states[cpu].base)
        replayed.append(driver.replays > before)
    assert driver.captures <= 8 and sum(replayed[-40:]) > 20


class Session:
    """A session whose buffers have the same ids in each run, as those of a client that uses ids again."""

    def __init__(self, side):
        self.side, self.buffers = side, Buffers()

    def run(self, prepared, params, contents, keep=()):
        """Run on buffers by slot; all but those in `keep` are freed at the end. Returns all of them."""
        self.buffers.update(contents)
        with torch.inference_mode():
            execution = self.side.runtime.begin(
                prepared, self.buffers, list(range(prepared.program.n_slots)), list(params)
            )
            execution.advance((len(prepared.program.body),))
        assert execution.outcome.failed_at is None
        after = dict(self.buffers)
        for slot in after.keys() - set(keep):
            del self.buffers[slot]
        return after


def at_new_address(values, held):
    """A buffer with these values at an address that no buffer has had whose memory is in `held`. Nobody else has its storage."""
    held.append(bytearray(values.nbytes))
    return Buffer(values.nbytes, torch.frombuffer(held[-1], dtype=values.dtype).view(values.shape).copy_(values))


BIG = 512, 160  # 320 KiB: never copied as a small input


def test_graphs_large_input_that_strays_is_copied_to_a_home(gpu, cpu, driver):
    """As behind a dropout: no graph makes the input, and each run has it at another address."""
    program, params, x, w, made = rows(*BIG)
    prepared, other = gpu.ready(program).prepared, cpu.ready(program).prepared
    session, held, inputs = Session(gpu), [], []
    weights = Buffer(4 * 160 * 160, torch.randn(160, 160) / 12)
    for _ in range(30):
        values = torch.randn(*BIG)
        mine = session.run(prepared, params, {x: at_new_address(values, held), w: weights}, keep=[w])
        good = step(cpu, other, params, {x: Buffer(values.nbytes, values), w: weights})[made].base
        assert torch.equal(mine[made].base, good)
        assert torch.equal(mine[x].base, values)
        inputs.append(mine[x].base.data_ptr())
        del mine
    assert driver.captures == 1 and driver.replays > 10
    assert len(set(inputs[-10:])) == 1  # the buffer is at home for later programs, too
    assert weights.base.data_ptr() not in inputs


def test_graphs_home_is_not_overwritten_while_its_buffer_lives(gpu, driver):
    program, params, x, w, _ = rows(*BIG)
    prepared, session, held, alive = gpu.ready(program).prepared, Session(gpu), [], []
    weights = Buffer(4 * 160 * 160, torch.randn(160, 160) / 12)
    for k in range(40):
        values = torch.randn(*BIG)
        mine = session.run(prepared, params, {x: at_new_address(values, held), w: weights}, keep=[w])
        alive.append((mine[x], values))
        del mine
        assert all(torch.equal(buffer.base, right) for buffer, right in alive)
        del alive[: len(alive) - k // 10]  # 0 to 3 runs keep their input
    assert driver.replays > 10


@pytest.mark.parametrize("shared", ["tensor", "buffer"])
def test_graphs_input_that_somebody_else_uses_stays_where_it_is(gpu, driver, shared):
    """A peer may write to memory that it shares, and a read that waits must see the old values."""
    program, params, x, w, _ = rows(*BIG)
    prepared, session, held, others = gpu.ready(program).prepared, Session(gpu), [], []
    weights = Buffer(4 * 160 * 160, torch.randn(160, 160) / 12)
    for _ in range(12):
        held.append(torch.randn(*BIG))
        memory = held[-1]
        others.append(memory.view(-1) if shared == "tensor" else Buffer(memory.nbytes, memory.view(-1)))
        after = session.run(prepared, params, {x: Buffer(memory.nbytes, memory.detach()), w: weights}, keep=[w])
        assert after[x].base.data_ptr() == memory.data_ptr()
    assert not driver.captures


def test_graphs_weights_of_layers_get_no_home(gpu, driver):
    """They are older than the first run, so they do not stray, although each run of the program has others."""
    t = Tape()
    x, w = t.input(F32, 64, 288), t.input(F32, 288, 288)
    held = t.op("mm", x, w)
    for _ in range(5):
        made = t.op("tanh", held)
        t.free(held)
        held = made
    program, slots = t.program()
    prepared, session, addresses = gpu.ready(program).prepared, Session(gpu), set()
    first = Buffer(4 * 64 * 288, torch.randn(64, 288))
    weights = [Buffer(4 * 288 * 288, torch.randn(288, 288)) for _ in range(30)]
    at = {b.base.data_ptr() for b in weights}
    for own in weights:
        contents = {slots[x.slot]: first, slots[w.slot]: own}
        after = session.run(prepared, t.params, contents, keep=contents)
        addresses.add(after[slots[w.slot]].base.data_ptr())
    assert addresses == at and not driver.captures


def test_graphs_stop_to_seek_homes_where_there_are_none(gpu, monkeypatch):
    """As in a loop whose inputs all move: each comparison costs time."""
    monkeypatch.setattr("wooly_executor.runtime.homes.SOUGHT", 5)
    monkeypatch.setattr("wooly_executor.runtime.homes.STRAYS", 0)
    program, params, x, w, _ = rows(*BIG)
    prepared, session, held = gpu.ready(program).prepared, Session(gpu), []
    weights = Buffer(4 * 160 * 160, torch.randn(160, 160) / 12)
    for _ in range(40):
        session.run(prepared, params, {x: at_new_address(torch.randn(*BIG), held), w: weights}, keep=[w])
    (stretch,) = [s for found in prepared.stretches.values() for s in found]
    assert stretch.homes.given_up and stretch.homes._sought == 5


def test_homes_are_given_back_with_their_program(gpu, driver):
    program, params, x, w, _ = rows(*BIG)
    prepared, session, held = gpu.ready(program).prepared, Session(gpu), []
    weights = Buffer(4 * 160 * 160, torch.randn(160, 160) / 12)
    for _ in range(20):
        session.run(prepared, params, {x: at_new_address(torch.randn(*BIG), held), w: weights}, keep=[w])
    graphs = gpu.runtime.graphs
    assert driver.captures == 1 and graphs._input_bytes >= 4 * 512 * 160
    session.buffers.clear()
    gpu.store, prepared = ProgramStore(gpu.runtime), None
    gc.collect()
    graphs._count_destroyed()
    assert (graphs._input_bytes, graphs.count, graphs._lent) == (0, 0, set())


def test_homes_that_were_not_used_for_long_make_room(gpu):
    program, params, x, w, _ = rows(*BIG)
    prepared, session, held = gpu.ready(program).prepared, Session(gpu), []
    weights = Buffer(4 * 160 * 160, torch.randn(160, 160) / 12)

    def runs():
        for _ in range(20):
            session.run(prepared, params, {x: at_new_address(torch.randn(*BIG), held), w: weights}, keep=[w])

    runs()
    graphs, left = gpu.runtime.graphs, []
    for others in (0, RECENT_ALL):  # replays of other programs
        graphs.replayed += others
        graphs._forget_unused()
        graphs._count_destroyed()
        left.append((graphs.count, graphs._input_bytes > 0))
    assert left == [(1, True), (0, False)]
    runs()
    assert graphs.count == 1


@pytest.mark.parametrize("limit", ["bytes", "room"])
def test_graphs_input_without_room_for_a_home_stays_where_it_is(gpu, driver, monkeypatch, limit):
    if limit == "bytes":
        monkeypatch.setattr("wooly_executor.runtime.graphs.BYTES_PER_CALL", 1 << 10)
    else:
        gpu.runtime.graphs._room = 4 * 512 * 160 - 1
    program, params, x, w, _ = rows(*BIG)
    prepared, session, held = gpu.ready(program).prepared, Session(gpu), []
    weights = Buffer(4 * 160 * 160, torch.randn(160, 160) / 12)
    for _ in range(20):
        values = torch.randn(*BIG)
        buffer = at_new_address(values, held)
        place = buffer.base.data_ptr()
        assert session.run(prepared, params, {x: buffer, w: weights}, keep=[w])[x].base.data_ptr() == place
    assert not driver.captures


def test_graphs_lent_results_of_sessions_are_swapped_out_and_back(make_device, driver, wis, tmp_path):
    device = make_device(runtime=gpu_runtime(driver), memory=3 << 20, swap=swap_settings(tmp_path, 64 << 20, 0))
    v, n = wis.at(F32, 1 << 18), 1 << 20
    body = wis.body().alloc("y", n)
    body.call("aten.add.Tensor", ("in", "x", v), ("in", "x", v), ("out", "y", v), args=(OperandRef(0), OperandRef(1)))
    for _ in range(5):
        body.call("aten.mul_.Tensor", ("in", "x", v), ("inout", "y", v), args=(OperandRef(1), OperandRef(0)))
    clients = {name: device.open(name) for name in "ab"}
    for k, client in enumerate(clients.values()):
        client.run(wis.body().alloc("x", n).fill("x", v, 1.0 + k), {"x": 1})
    for k in range(40):
        for name, client in clients.items():
            client.run(body, {"x": 1, "y": 2 + k}, frees=[1 + k] if k else [])
            if k % 10 == 9:
                assert set(client.floats(2 + k, 1 << 18)) == {2.0 if name == "a" else 128.0}
    assert driver.replays
    device.check()


def test_captures_failed_capture_raises_first_error_and_leaves_library_usable(driver):
    fine = driver.capture(lambda: torch.ones(2).add_(1))

    def waits():
        torch.ones(2).nonzero()

    with pytest.raises(InvalidCaptureError, match="not permitted") as e:
        driver.capture(waits)
    assert "not permitted" in str(e.value.__cause__) and not driver.recording
    driver.seed(0)
    again = driver.capture(lambda: torch.ones(2).add_(1))
    assert again.pool != fine.pool
    fine.replay()
    again.replay()
    pool = again.pool
    del again
    gc.collect()
    assert driver.capture(lambda: torch.ones(2)).pool != pool


def _masked(t):
    return t.index_put_([t > 0], torch.zeros((), device="cpu"))


@pytest.mark.parametrize(
    "waiting",
    [
        lambda driver, t: t.nonzero(),
        lambda driver, t: t.sum().item(),
        lambda driver, t: _masked(t),
        lambda driver, t: torch.unique(t),
        lambda driver, t: torch.linalg.eigh(t.outer(t)),
        lambda driver, t: driver.elapsed_ns([driver.record(), driver.record()]),
        lambda driver, t: driver.wait(driver.record(), 1.0),
        lambda driver, t: driver.stream.synchronize(),
    ],
    ids=["nonzero", "item", "mask", "unique", "eigh", "event", "wait", "stream"],
)
def test_captures_host_that_waits_breaks_capture_and_everything_after_it(driver, waiting):
    t = torch.arange(4.0, device="cpu")
    before, seen = t.clone(), []

    def body():
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            waiting(driver, t)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="due to a previous error during capture"):
                t.add_(1)
            seen.append(1)

    with pytest.raises(InvalidCaptureError, match="due to a previous error during capture"):
        driver.capture(body)
    assert len(seen) == 2 and torch.equal(t, before) and not driver.recording and driver.generator_works
    driver.capture(lambda: t.add_(1)).replay()
    assert torch.equal(t, before + 1)


def test_captures_left_unrepaired_refuse_the_pool_and_draws():
    """What `Captures` repairs: without it, torch counts the capture as one in progress."""
    driver = FakeDriver()  # nobody asks whether it survives
    graph, pool = driver.library.new_graph(), driver.library.new_pool()
    driver.library.begin(graph, pool)
    with pytest.raises(RuntimeError, match="not permitted"):
        driver.stream.synchronize()
    with pytest.raises(RuntimeError, match="previous error"):
        graph.capture_end()
    with pytest.raises(RuntimeError, match="already recording to mempool_id"):
        driver.library.begin(driver.library.new_graph(), pool)
    with pytest.raises(AssertionError, match="Offset increment outside graph capture"):
        driver.seed(0)
    driver.library.end_recording(pool)
    driver.library.renew_generator()
    driver.seed(0)


def test_captures_failed_first_step_leaves_its_pool_unused(driver):
    shared = driver.capture(lambda: torch.ones(2, device="cpu"))

    def fails():
        raise RuntimeError("not possible during a capture")

    with pytest.raises(RuntimeError, match="not possible") as kept:
        driver.capture(fails)
    others = [driver.capture(lambda: torch.ones(2, device="cpu").add_(1), apart=k % 2 == 0) for k in range(8)]
    assert shared.pool not in {other.pool for other in others} and kept
    assert driver.graph_bytes() == 9 * driver.bytes_per_graph and not driver.recording
    for other in others:
        other.replay()


@pytest.mark.parametrize("apart", [False, True])
def test_captures_that_cannot_begin_keep_their_graph(driver, apart):
    driver.capture(lambda: torch.ones(2, device="cpu"), apart=apart)
    driver.library.fail_begin = torch.OutOfMemoryError("CUDA out of memory.")
    with pytest.raises(InvalidCaptureError, match="out of memory"):
        driver.capture(lambda: None, apart=apart)
    gc.collect()
    driver.capture(lambda: torch.ones(2, device="cpu"), apart=apart).replay()


def test_captures_graphs_dropped_elsewhere_are_destroyed_between_captures(driver):
    held = [driver.capture(lambda: torch.ones(2, device="cpu"), apart=True) for _ in range(3)]
    thread = threading.Thread(target=held.pop)
    thread.start()
    thread.join()
    driver.survives()

    def body():
        held.pop()  # the last use of an older graph ends during the capture
        gc.collect()
        torch.ones(2, device="cpu")

    last = driver.capture(body)
    driver.survives()
    assert driver.graph_bytes() == 2 * driver.bytes_per_graph and last.pool != held[0].pool


def decoder(width=160, layers=4):
    """A step of a decoder. It makes places from numbers and a mask from the place of the token, and leaves a large result.

    Returns the program, its params, and the slots of the token, its place, the weights, the cache and both results.
    """
    t = Tape()
    x, at = t.input(F32, 1, width), t.input(I64, 1)
    w, cache = t.input(F32, width, width), t.input(F32, width, width)
    (places,) = t.extern("aten.arange.start_out", 0, width, 1, out=(I64, (width,)))
    seen = t.op("le", places, at)
    held = x
    for _ in range(layers):
        a = t.op("mm", held, w)
        b = t.op("mul", a, seen)
        t.free(a)
        if held is not x:
            t.free(held)
        held = t.op("tanh", b)
        t.free(b)
    large = t.op("mul", cache, held)
    t.free(places, seen)
    program, slots = t.program()
    return program, t.params, [slots[k.slot] for k in (x, at, w, cache, held, large)]


def test_graphs_of_decoding_loop_replay_without_failed_capture(gpu, cpu, driver):
    program, params, (x, at, w, cache, token, large) = decoder()
    prepared, other = gpu.ready(program).prepared, cpu.ready(program).prepared
    fixed, kept = {w: Buffer(4 * 160**2, torch.randn(160, 160)), cache: Buffer(4 * 160**2, torch.randn(160, 160))}, []
    now = torch.randn(1, 160)
    for k in range(3 * IDLE):
        place = torch.tensor([16 + k % 64])
        mine, good = [
            step(side, own, params, {x: Buffer(640, now.clone()), at: Buffer(8, place.clone()), **fixed})
            for side, own in ((gpu, prepared), (cpu, other))
        ]
        kept.append((mine[large].base, good[large].base, mine[token].base))
        assert all(torch.equal(a.view(-1), b.view(-1)) for a, b, _ in kept[-3:])
        now = mine[token].base.view(1, 160)
        if k % 40 == 39:
            kept.clear()
    assert driver.replays > IDLE and driver.captures == gpu.runtime.graphs.count
    assert not gpu.runtime.graphs._refused and not prepared.uncapturable


def test_graphs_nothing_is_captured_while_another_thread_uses_the_device(gpu, driver):
    program, params, contents = with_step_between(*HISTOGRAM)
    prepared = gpu.ready(program).prepared
    inside, over = threading.Event(), threading.Event()

    def copy():
        with driver.copy_context():
            inside.set()
            over.wait(60)

    other = threading.Thread(target=copy)
    other.start()
    inside.wait(60)
    loop(gpu, prepared, contents, params, 30)
    assert not gpu.runtime.graphs.count and not gpu.runtime.graphs.replayed
    over.set()
    other.join()
    loop(gpu, prepared, contents, params, 30)
    assert gpu.runtime.graphs.count == 2 and gpu.runtime.graphs.replayed


def test_captures_other_threads_wait_for_the_end_of_a_capture(driver):
    entered, seen = [], []

    def copy():
        with driver.copy_context():
            entered.append(1)

    def body():
        other.start()
        other.join(0.05)
        seen.extend(entered)
        with pytest.raises(RuntimeError, match="beside the run"), driver.copy_context():
            pass

    other = threading.Thread(target=copy)
    driver.capture(body)
    other.join(60)
    assert not seen and entered


def test_graphs_off_nothing_is_captured_and_sessions_get_the_room(gpu, cpu, driver):
    program, params, contents = with_step_between(*HISTOGRAM)
    gpu.runtime.leave_out_graphs()
    theirs = loop(cpu, cpu.ready(program).prepared, contents, params, 40)
    equal(loop(gpu, gpu.ready(program).prepared, contents, params, 40), theirs)
    assert not driver.captures and not gpu.runtime.graphs.replayed and not driver.keeps_room


# -- operators that a GPU's library lacks ----------------------------------------------------------------------------------


def test_packing_table_covers_kernel_dtypes():
    from wooly_executor.runtime.packing import layout as of

    assert of([None, DType.BOOL, DType.F64, DType.I16, DType.F32]) == ((0, 8), (8, 1), (16, 8), (24, 2), (28, 4))
    assert set(TORCH_DTYPE) >= {DType.F32}
