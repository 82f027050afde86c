"""Foreign kernels over the real channel: sources and their owners, bounds, time limits, other sessions in the meantime."""

import itertools
import math
import re
import struct
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from wooly_executor.errors import FullDiskError
from wooly_executor.runtime import opencl
from wooly_executor.runtime.builds import AT_ONCE, OWN_AT_ONCE, BuildRefusedError, Turns, WorkerBuilder
from wooly_executor.runtime.foreign import RETRY_AFTER_S
from wooly_executor.runtime.opencl import ALONE_NS, TRIAL, TRIED_EVERY, OpenClRuntime, _ByWork
from wooly_wis.codec import digest
from wooly_wis.dtypes import DType
from wooly_wis.foreign import Launch, Source, encode_source
from wooly_wis.frames import Kind
from wooly_wis.program import Form, Operand, ParamKind, ParamRef, Role, View

pytest.importorskip("pyopencl", reason="kernels run through OpenCL: pip install 'pyopencl[pocl]'")
pytest.importorskip("wooly_compiler", reason="kernels are compiled by the compiler's worker")

SCALE = """module {
  tt.func public @scale(%x: !tt.ptr<f32>, %y: !tt.ptr<f32>, %by: f32, %n: i32) attributes {noinline = false} {
    %b = arith.constant 64 : i32
    %p = tt.get_program_id x : i32
    %s = arith.muli %p, %b : i32
    %r = tt.make_range {end = 64 : i32, start = 0 : i32} : tensor<64xi32>
    %t = tt.splat %s : i32 -> tensor<64xi32>
    %i = arith.addi %t, %r : tensor<64xi32>
    %m = tt.splat %n : i32 -> tensor<64xi32>
    %c = arith.cmpi slt, %i, %m : tensor<64xi32>
    %xs = tt.splat %x : !tt.ptr<f32> -> tensor<64x!tt.ptr<f32>>
    %xp = tt.addptr %xs, %i : tensor<64x!tt.ptr<f32>>, tensor<64xi32>
    %v = tt.load %xp, %c : tensor<64x!tt.ptr<f32>>
    %f = tt.splat %by : f32 -> tensor<64xf32>
    %w = arith.mulf %v, %f : tensor<64xf32>
    %ys = tt.splat %y : !tt.ptr<f32> -> tensor<64x!tt.ptr<f32>>
    %yp = tt.addptr %ys, %i : tensor<64x!tt.ptr<f32>>, tensor<64xi32>
    tt.store %yp, %w, %c : tensor<64x!tt.ptr<f32>>
    tt.return
  }
}
"""
SPIN = """module {
  tt.func public @spin(%x: !tt.ptr<i32>) attributes {noinline = false} {
    %zero = arith.constant 0 : i32
    scf.while : () -> () {
      %v = tt.load %x : !tt.ptr<i32>
      %c = arith.cmpi eq, %v, %zero : i32
      scf.condition(%c)
    } do {
      scf.yield
    }
    tt.return
  }
}
"""


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    """The compiler of all runtimes in this file, because its process takes a second to start."""
    return WorkerBuilder(tmp_path_factory.mktemp("builder"))


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A folder for code, for tests that do not check where the code comes from."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def make_runtime(builder):
    """`make_runtime(folder)`: return a runtime that keeps its code in the folder."""

    def make(folder):
        made = OpenClRuntime(folder)
        made.foreign._builder = builder
        return made

    return make


@pytest.fixture
def runtime(make_runtime, kept):
    return make_runtime(kept)


def source(text):
    raw = encode_source(Source("ttir", text))
    return raw, digest(raw)


def scale_form(name, n=100, role=Role.IN, grid=(2, 1, 1)):
    view = View(DType.F32, (n,), (1,))
    launch = Launch("ttir", name, "scale", grid, (1, 1, 1), (0, 1, (DType.F32, ParamRef(0)), (DType.I32, ParamRef(1))))
    operands = (Operand(role, view), Operand(Role.INOUT, view))
    return Form("kernel.launch", operands, (ParamKind.F64, ParamKind.I64), launch.attrs())


def spin_form(name, blocks=1):
    launch = Launch("ttir", name, "spin", (blocks, 1, 1), (1, 1, 1), (0,))
    return Form("kernel.launch", (Operand(Role.INOUT, View(DType.I32, (1,), (1,))),), (), launch.attrs())


def test_foreign_kernel_uses_params_of_each_run(make_device, runtime, wis):
    client = make_device(runtime=runtime).open("a")
    raw, name = source(SCALE)
    client.channel.send(Kind.SOURCE, raw)
    client.make(1, *[float(k) for k in range(100)])
    client.make(2, *[-1.0] * 100)
    program = client.define(wis.body().add(scale_form(name), "x", "y"))
    for by, n in ((2.0, 100), (3.0, 70)):
        client.start(program, [1, 2], struct.pack("<dq", by, n))
    assert client.floats(2, 100) == [3.0 * k if k < 70 else 2.0 * k for k in range(100)]


def test_foreign_launch_of_one_block_gets_its_own_arguments(make_device, runtime, wis):
    """The device thread launches it, and sets the arguments only if they differ from those of the kernel's last launch."""
    client = make_device(runtime=runtime).open("a")
    raw, name = source(SCALE)
    client.channel.send(Kind.SOURCE, raw)
    client.make(1, *[1.0] * 64)
    for buffer in (2, 3):
        client.make(buffer, *[5.0] * 64)
    program = client.define(wis.body().add(scale_form(name, 64, grid=(1, 1, 1)), "x", "y"))

    def scaled(buffer, by, n=64):
        client.start(program, [1, buffer], struct.pack("<dq", by, n))
        return client.floats(buffer, 64)

    assert scaled(2, 2.0) == scaled(2, 2.0) == scaled(3, 2.0) == [2.0] * 64
    assert scaled(3, 3.0) == [3.0] * 64 and scaled(3, 4.0, 1) == [4.0] + [3.0] * 63
    assert [math.copysign(1.0, scaled(2, by)[0]) for by in (0.0, -0.0, 0.0)] == [1.0, -1.0, 1.0]


def test_foreign_launches_on_new_memory_leave_no_gaps_in_the_heap(make_device, runtime, wis):
    """What a launch keeps must not lie where the freed memory of its results is needed again."""
    client = make_device(runtime=runtime).open("a")
    raw, name = source(SCALE)
    client.channel.send(Kind.SOURCE, raw)
    client.make(1, *[1.0] * 100)
    program = client.define(wis.body().alloc("y", 1 << 20).add(scale_form(name), "x", "y"))

    def anonymous_memory():
        return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

    def launches(times):
        for k in range(times):
            client.start(program, [10 + k, 1], struct.pack("<dq", 2.0, 100), frees=[10 + k])
        client.sync()
        return anonymous_memory()

    before = launches(50)
    assert launches(300) - before < 100 << 20  # all tests of this process share the heap


def test_foreign_launch_takes_memory_that_its_program_has_freed(make_device, runtime, wis):
    client = make_device(runtime=runtime).open("a")
    raw, name = source(SCALE)
    client.channel.send(Kind.SOURCE, raw)
    client.make(1, *[1.0] * 64)
    body, launch = wis.body(), scale_form(name, 64)
    for slot in ("a", "b"):
        body.alloc(slot, 256).add(launch, "x", slot)
    body.free("b").free("a").alloc("c", 256).add(launch, "x", "c").alloc("d", 256).add(launch, "x", "d")
    program = client.define(body)

    def launches(first, *params):
        client.start(program, [first, 1, first + 1, first + 2, first + 3], struct.pack("<" + 4 * "dq", *params))
        return client.floats(first + 2, 64), client.floats(first + 3, 64)

    # c and d are written up to an element; behind it, they show a and b, which were freed in the other order
    assert launches(10, 2.0, 64, 3.0, 64, 4.0, 20, 5.0, 30) == ([4.0] * 20 + [2.0] * 44, [5.0] * 30 + [3.0] * 34)
    # a run gets no memory of the run before
    assert launches(20, 2.0, 0, 3.0, 64, 4.0, 20, 5.0, 0) == ([4.0] * 20 + [0.0] * 44, [3.0] * 64)


def test_foreign_source_is_sent_once_per_session(make_device, runtime, wis):
    device = make_device(runtime=runtime)
    a, b = device.open("a"), device.open("b")
    raw, name = source(SCALE)
    a.channel.send(Kind.SOURCE, raw)
    a.channel.send(Kind.SOURCE, raw)
    a.define(wis.body().add(scale_form(name), "x", "y"))
    a.sync()
    b.define(wis.body().add(scale_form(name), "x", "y"))
    with pytest.raises(wis.error, match=r"names the kernel source .* which this session has not sent") as caught:
        b.sync()
    assert caught.value.code == "executor.unknown_source"


def test_foreign_invalid_source_is_refused(device, wis):
    client = device.open("a")
    client.channel.send(Kind.SOURCE, b"WKS1garbage")
    with pytest.raises(wis.error, match="kernel's source"):
        client.sync()
    client.sync()


def test_foreign_runtime_without_opencl_names_the_setting(device, wis):
    client = device.open("a")
    raw, name = source(SCALE)
    client.channel.send(Kind.SOURCE, raw)
    client.make(1, *[1.0] * 100)
    client.make(2, *[1.0] * 100)
    client.run(wis.body().add(scale_form(name), "x", "y"), [1, 2], struct.pack("<dq", 2.0, 100))
    with pytest.raises(wis.error, match="kernel scale: this executor cannot run foreign kernels"):
        client.sync()


def test_foreign_violation_fails_launch_and_poisons_only_its_results(make_device, runtime, wis):
    client = make_device(runtime=runtime).open("a")
    raw, name = source(SCALE)
    client.channel.send(Kind.SOURCE, raw)
    client.make(1, *[1.0] * 100)
    client.make(2, *[2.0] * 100)
    client.run(wis.body().add(scale_form(name, grid=(3, 1, 1)), "x", "y"), [1, 2], struct.pack("<dq", 2.0, 1000))
    with pytest.raises(wis.error, match=r"kernel scale on a grid of 3, 1, 1: tt\.(load|store) in line \d+") as caught:
        client.sync()
    assert caught.value.instruction == 0
    assert client.floats(1, 100) == [1.0] * 100
    with pytest.raises(wis.error, match="beyond the buffer"):
        client.read(2, 400)


def test_foreign_write_to_read_only_operand_is_refused(make_device, runtime, wis):
    client = make_device(runtime=runtime).open("a")
    raw, name = source(SCALE)
    client.channel.send(Kind.SOURCE, raw)
    client.make(1, *[1.0] * 100)
    client.make(2, *[2.0] * 100)
    form = scale_form(name)
    form = Form(form.opcode, tuple(Operand(Role.IN, o.view) for o in form.operands), form.params, form.attrs)
    client.run(wis.body().add(form, "x", "y"), [1, 2], struct.pack("<dq", 2.0, 100))
    with pytest.raises(wis.error, match="kernel scale writes argument 1, but the launch declares it as read-only"):
        client.sync()
    assert client.floats(2, 100) == [2.0] * 100


@pytest.mark.parametrize("blocks", [1, 64], ids=["in the device thread", "on all cores"])
def test_foreign_endless_kernel_is_stopped_and_others_continue(make_device, runtime, wis, blocks):
    runtime.kernel_s = 0.3
    device = make_device(runtime=runtime)
    a, b = device.open("a"), device.open("b")
    raw, name = source(SPIN)
    a.channel.send(Kind.SOURCE, raw)
    a.make(1, 0.0)
    a.run(wis.body().add(spin_form(name, blocks), "x"), [1])
    with pytest.raises(
        wis.error, match=rf"kernel spin on a grid of {blocks}, 1, 1: stopped because it took more than 0\.3 s"
    ):
        a.sync()
    b.make(1, 5.0)
    assert b.floats(1, 1) == [5.0]


def test_foreign_launch_runs_on_all_cores_only_if_it_has_much_work():
    """One block is never worth more than one core. The first launch of more blocks is measured on all cores."""
    places, added, ns_per_block = [], [], 100

    def launcher(place, busy):
        def launch(values, grid):
            places.append(place)
            return (busy, grid[0] * ns_per_block)

        return launch

    launch = _ByWork(launcher("all", 10), launcher("here", 0), added.append)
    assert [launch.run([], (n, 1, 1)) for n in (1, 2, ALONE_NS // 100, ALONE_NS // 100 + 1)] == [0, 0, 0, 10]
    assert places == ["here", "here", "here", "all"] and added == [0, 0, 0, ALONE_NS + 90]
    ns_per_block = 100 * ALONE_NS
    assert [launch.run([], (2, 1, 1)) for _ in range(2)] == [0, 10]


def test_foreign_launch_of_unknown_work_runs_on_all_cores():
    launch = _ByWork(lambda *_: (10, 300), lambda *_: (0, 300), lambda _: None)
    assert [launch.run([], (3, 1, 1)) for _ in range(2)] == [10, 0]


def test_foreign_launch_that_looks_longer_on_all_cores_is_tried_in_the_device_thread():
    places, ticks = [], itertools.count(step=10).__next__

    def launcher(place, taken, core_ns):
        return lambda *_: (places.append(place), (taken, core_ns))[1]

    launch = _ByWork(launcher("all", 10, 3 * ALONE_NS), launcher("here", 0, ALONE_NS // 2), lambda _: None, ticks)
    for _ in range(4):
        launch.run([], (2, 1, 1))
    assert places == ["all", "here", "here", "here"]

    places.clear()
    launch = _ByWork(launcher("all", 10, 3 * ALONE_NS), launcher("here", 0, 2 * ALONE_NS), lambda _: None, ticks)
    for _ in range(2 * TRIED_EVERY):
        launch.run([], (2, 1, 1))
    again = 1 + TRIAL + TRIED_EVERY
    assert [i for i, place in enumerate(places) if place == "here"] == [
        *range(1, 1 + TRIAL),
        *range(again, again + TRIAL),
    ]

    places.clear()
    launch = _ByWork(launcher("all", 10, 9 * ALONE_NS), launcher("here", 0, 2 * ALONE_NS), lambda _: None, ticks)
    for _ in range(2 * TRIED_EVERY):
        launch.run([], (2, 1, 1))
    assert "here" not in places


def test_foreign_launch_runs_in_the_device_thread_while_launches_on_all_cores_wait_longer():
    """Other processes use the cores, so a launch on all cores waits for them."""
    places, now, waits_ns = [], 0, 2_000_000

    def on_all(values, grid):
        nonlocal now
        places.append("all")
        now += waits_ns
        return 10, 2 * ALONE_NS

    def here(values, grid):
        places.append("here")
        return 0, 2 * ALONE_NS

    launch = _ByWork(on_all, here, lambda _: None, lambda: now)
    for _ in range(2 + 2 * TRIAL + TRIED_EVERY):
        launch.run([], (2, 1, 1))
    # A trial is at the other place, on all cores.
    assert places == ["all", *["all"] * TRIAL, *["here"] * TRIED_EVERY, *["all"] * TRIAL, "here"]
    waits_ns = 0
    for _ in range(20 * TRIED_EVERY):
        launch.run([], (2, 1, 1))
    assert places[-TRIED_EVERY:].count("here") <= TRIAL


def test_foreign_launch_on_all_cores_does_not_count_as_long_because_its_threads_slept():
    """The first launch after launches in the device thread waits for threads that sleep."""
    places, now = [], 0

    def on_all(values, grid):
        nonlocal now
        now += ALONE_NS if places and places[-1] == "all" else 9 * ALONE_NS
        places.append("all")
        return 10, 2 * ALONE_NS

    def here(values, grid):
        places.append("here")
        return 0, 2 * ALONE_NS

    launch = _ByWork(on_all, here, lambda _: None, lambda: now)
    for _ in range(8 * TRIED_EVERY):
        launch.run([], (2, 1, 1))
    assert places[-TRIED_EVERY:].count("here") <= TRIAL


def test_foreign_kernel_on_several_cores_is_billed_for_all_cores(make_device, runtime, wis):
    device = make_device(runtime=runtime)
    raw, name = source(SCALE)

    def launch(client, groups, times):
        program = client.define(wis.body().add(scale_form(name, grid=(groups, 1, 1)), "x", "y"))
        for _ in range(times):
            client.start(program, [1, 2], struct.pack("<dq", 2.0, 100))
        client.sync()

    clients = [device.open(n) for n in "abc"]
    for client in clients:
        client.channel.send(Kind.SOURCE, raw)
        client.make(1, *[1.0] * 100)
        client.make(2, *[0.0] * 100)
        launch(client, 2, 1)  # warms up what happens only once
    device.call(device.loop.take_usage)
    before = device.call(lambda: device.loop.busy.total_ns)
    launch(clients[0], 1, 3)
    (one,) = device.call(device.loop.take_usage)
    busy = device.call(lambda: device.loop.busy.total_ns)
    assert one.gpu_ns == busy - before > 0
    # PoCL's other threads wake for each launch; on a loaded machine this takes milliseconds of their CPU time.
    assert one.gpu_ns * 0.99 <= one.core_ns <= one.gpu_ns * 1.01 + 20e6
    cores = runtime._open()[1].threads  # PoCL determines the number of cores when this process first uses it
    for client in clients[1:]:
        launch(client, 1 << 19, 10)
    # A session that has been idle for `IDLE_NS` has a record of its memory.
    found = [t for t in device.call(device.loop.take_usage) if t.gpu_ns]
    busy = device.call(lambda: device.loop.busy.total_ns) - busy
    assert sorted(t.session_id for t in found) == ["b", "c"] and sum(t.gpu_ns for t in found) == busy
    # one thread prepares a launch, and others wake late
    assert busy * cores * 0.9 <= sum(t.core_ns for t in found) <= busy * cores * 1.01 + 20e6


def test_foreign_waiting_for_compile_does_not_block_other_sessions(make_device, make_runtime, tmp_path, wis):
    class Slow:
        def __init__(self):
            self.asked = []

        def version(self):
            return ""

        def build(self, request, what):
            self.asked.append(what)
            go.wait(30)
            raise RuntimeError("no compiler today")

    go = threading.Event()
    runtime = make_runtime(tmp_path)
    slow = runtime.foreign._builder = Slow()
    device = make_device(runtime=runtime)
    a, b = device.open("a"), device.open("b")
    raw, name = source(SCALE)
    a.channel.send(Kind.SOURCE, raw)
    a.make(1, *[1.0] * 100)
    a.make(2, *[1.0] * 100)
    a.run(wis.body().add(scale_form(name), "x", "y"), [1, 2], struct.pack("<dq", 2.0, 100))
    b.make(1, 5.0)
    assert b.floats(1, 1) == [5.0]
    go.set()
    with pytest.raises(wis.error, match="kernel scale: RuntimeError: no compiler today"):
        a.sync()
    assert slow.asked == ["kernel scale"]


def test_foreign_kernel_that_failed_for_a_temporary_reason_is_compiled_again(make_device, make_runtime, tmp_path, wis):
    """The session runs the program that it has already defined. Runs that follow the failure at once do not compile again."""

    class Busy:
        def __init__(self, builder):
            self.asked, self.version, self.builder = 0, builder.version, builder

        def build(self, request, what):
            self.asked += 1
            if self.asked < 3:
                raise RuntimeError("too slow")
            return self.builder.build(request, what)

    runtime = make_runtime(tmp_path)
    busy = runtime.foreign._builder = Busy(runtime.foreign._builder)
    client = make_device(runtime=runtime).open("a")
    raw, name = source(SCALE)
    client.channel.send(Kind.SOURCE, raw)
    program = client.define(wis.body().add(scale_form(name), "x", "y"))

    buffers = itertools.count(1)

    def scaled():
        x, y = next(buffers), next(buffers)
        client.make(x, *[1.0] * 100)
        client.make(y, *[1.0] * 100)
        client.start(program, [x, y], struct.pack("<dq", 2.0, 100))
        return client.floats(y, 100)

    for _ in range(2):
        with pytest.raises(wis.error, match="too slow; a launch that comes 5 s later compiles it again"):
            scaled()
    assert busy.asked == 1
    (kernel,) = runtime.foreign._known.values()
    kernel._ended -= RETRY_AFTER_S
    with pytest.raises(wis.error, match="too slow"):
        scaled()
    assert busy.asked == 2
    kernel._ended -= RETRY_AFTER_S
    assert scaled() == [2.0] * 100 and scaled() == [2.0] * 100
    assert busy.asked == 3


# -- sources of code -----------------------------------------------------------------------------------------------------


def scaled(device, wis, name="a"):
    """Launch `scale` once, and return its result."""
    client = device.open(name)
    raw, source_name = source(SCALE)
    client.channel.send(Kind.SOURCE, raw)
    client.make(1, *[1.0] * 100)
    client.make(2, *[0.0] * 100)
    client.run(wis.body().add(scale_form(source_name), "x", "y"), [1, 2], struct.pack("<dq", 2.0, 100))
    return client.floats(2, 100)


def test_foreign_code_on_disk_is_reused_and_damaged_code_is_rebuilt(make_device, make_runtime, tmp_path, wis):
    first = make_runtime(tmp_path)
    assert scaled(make_device(runtime=first), wis) == [2.0] * 100
    second = make_runtime(tmp_path)
    assert scaled(make_device(runtime=second), wis) == [2.0] * 100
    assert (first.foreign.counts["here"], second.foreign.counts["here"], second.foreign.counts["disk"]) == (1, 0, 1)
    (kept,) = [p for p in Path(tmp_path / "foreign" / "code").iterdir() if p.name != "compiler"]
    raw = bytearray(kept.read_bytes())
    raw[len(raw) // 2] ^= 1
    kept.write_bytes(raw)
    third = make_runtime(tmp_path)
    assert scaled(make_device(runtime=third), wis) == [2.0] * 100
    assert third.foreign.counts == {"disk": 0, "elsewhere": 0, "here": 1}


def test_foreign_remote_code_of_another_kernel_is_rejected(make_device, make_runtime, tmp_path, wis):
    runtime = make_runtime(tmp_path)
    scaled(make_device(runtime=runtime), wis)
    folder = tmp_path / "foreign" / "code"
    (kept,) = [p for p in folder.iterdir() if p.name != "compiler"]

    class Elsewhere:
        def __init__(self):
            self.rejected = []

        def get(self, source, key, target, rejected):
            self.rejected.append(rejected)
            return "another", kept.read_bytes()

    fresh = make_runtime(tmp_path / "other")
    remote = fresh.foreign.remote = Elsewhere()
    assert scaled(make_device(runtime=fresh), wis) == [2.0] * 100
    assert remote.rejected == ["", "another"] and fresh.foreign.counts["here"] == 1


def test_foreign_kernel_refused_by_remote_compiler_is_not_built_here(make_device, make_runtime, tmp_path, wis):
    class Refuses:
        def get(self, source, key, target, rejected):
            raise BuildRefusedError("line 3: not like this", retryable=False)

    runtime = make_runtime(tmp_path)
    runtime.foreign.remote = Refuses()
    with pytest.raises(wis.error, match="kernel scale: line 3: not like this"):
        scaled(make_device(runtime=runtime), wis)
    assert runtime.foreign.counts == {"disk": 0, "elsewhere": 0, "here": 0}


def test_turns_owner_cannot_occupy_all_threads():
    go, lock, running, ended = threading.Event(), threading.Lock(), [], threading.Semaphore(0)

    def work(item):
        with lock:
            running.append(item)
        if item[0] == "a":
            assert go.wait(30)
        ended.release()

    turns = Turns(work)
    for k in range(5):
        turns.put("a", ("a", k))
    for k in range(5):
        turns.put("b", ("b", k))
    for _ in range(5):
        assert ended.acquire(timeout=30)  # all items of b end, although those of a are blocked
    with lock:
        assert sorted(i for i in running if i[0] == "a") == [("a", k) for k in range(OWN_AT_ONCE)]
    go.set()
    for _ in range(5):
        assert ended.acquire(timeout=30)
    assert len(running) == 10 and OWN_AT_ONCE < AT_ONCE


# -- texts that cannot be checked ----------------------------------------------------------------------------------------


def ptx_program(wis):
    raw = encode_source(Source("ptx", ".visible .entry k(.param .u64 p) { ret; }"))
    launch = Launch("ptx", digest(raw), "k", (1, 1, 1), (1, 1, 1), (0,))
    form = Form("kernel.launch", (Operand(Role.INOUT, View(DType.U8, (4,), (1,))),), (), launch.attrs())
    return raw, wis.body().add(form, "x")


def test_foreign_opaque_kernel_without_permission_is_refused(make_device, runtime, wis):
    device = make_device(runtime=runtime)
    may, may_not = device.open("a", opaque=True), device.open("b")
    raw, program = ptx_program(wis)
    for client in (may, may_not):
        client.channel.send(Kind.SOURCE, raw)
        client.make(1, 1.0)
        client.run(program, [1])
    with pytest.raises(
        wis.error, match="kernel k: ptx is code for NVIDIA's chips; this device, a CPU, runs kernels in"
    ):
        may.sync()
    with pytest.raises(
        wis.error, match=r"needs the permission opaque_kernels, which .* does not have; ask an administrator"
    ) as e:
        may_not.sync()
    assert e.value.code == "executor.opaque_kernel"


def test_code_is_not_loaded_while_the_disk_is_full(tmp_path, monkeypatch):
    """PoCL unpacks code into files. If one is missing at a launch, PoCL ends the process."""
    runtime = OpenClRuntime(tmp_path / "pocl", sure=True)
    monkeypatch.setattr(opencl.shutil, "disk_usage", lambda folder: SimpleNamespace(free=opencl.SPACE - 1))
    for load in (lambda: runtime.load(SimpleNamespace(plan=None), None, None), lambda: runtime._load_foreign(None, ())):
        with pytest.raises(FullDiskError, match="4095 KiB free, and 4096 KiB are needed to load kernels"):
            load()
