"""Memory that a session can read contains only the session's own data or zeros, in every way of running a program."""

import contextlib
import struct
import sys
from pathlib import Path

import pytest
import torch
from wooly_executor.bounds import Bounds
from wooly_executor.bounds.limits import Limits
from wooly_executor.errors import OperationError
from wooly_executor.memory.book import Scope
from wooly_executor.programs import ProgramStore
from wooly_executor.runtime.buffers import Buffer, bytes_of
from wooly_executor.runtime.device import ALONE_UP_TO, SPLIT_FROM, TorchDevice
from wooly_executor.runtime.fresh_memory import fills_results, on_zeros, writes_all
from wooly_executor.runtime.gpu_fresh_memory import on_zeros as on_zeroed_pool
from wooly_executor.runtime.opencl import OpenClRuntime
from wooly_executor.runtime.torch_cpu import TorchCpuRuntime
from wooly_executor.runtime.torch_private import interpret, zero_fill
from wooly_testkit.reference import ReferenceRuntime
from wooly_wis.dtypes import DType
from wooly_wis.program import Form, Operand, OperandRef, Role, View

from services.executor.tests.fake_gpu import FakeDriver, gpu_runtime

HERE = Path(__file__).parent / "hostile"
sys.path.insert(0, str(HERE))
import patterns  # noqa: E402

sys.path.remove(str(HERE))
#: The value that `junk_fill` leaves in unwritten memory. It stands for another session's bytes.
JUNK = struct.pack("<I", 0x7FEDBEEF)
T, B, S, C = 24, 4, 6, 5


@pytest.fixture
def junk():
    """Fill the library's new memory with junk, unless the executor zeroes it."""
    with patterns.junk():
        assert bytes(torch.empty(4, dtype=torch.uint8).numpy()) == JUNK
        yield


def ctc_loss(wis, **more):
    """Labels of several lengths: the operator writes only the part of `log_alpha` within these lengths."""
    operands = [("in", "x", wis.at(DType.F32, T, B, C)), ("in", "y", wis.at(DType.I64, B, S))]
    views = [wis.at(DType.F32, B), wis.at(DType.F32, B, T, 2 * S + 1)]
    body = wis.body().alloc("p", views[0].end).alloc("q", views[1].end)
    lengths = ((T, 7, 3, T), (S, 2, 1, 0))
    return body.call(
        "aten._ctc_loss.default",
        *operands,
        ("out", "p", views[0]),
        ("out", "q", views[1]),
        args=(wis.ref(0), wis.ref(1), *lengths, 0, True),
        **more,
    )


def ctc_operands():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(T, B, C, generator=generator).log_softmax(2)
    return {"x": x, "y": torch.randint(1, C, (B, S), generator=generator)}


def rnn_layer(wis):
    """The fourth result is the workspace of oneDNN, whose size only the device knows."""
    f32 = lambda *sizes: wis.at(DType.F32, *sizes)  # noqa: E731
    operands = [f32(5, 2, 3), f32(16, 3), f32(16, 4), f32(16), f32(16), f32(2, 4), f32(2, 4)]
    names = [f"i{k}" for k in range(len(operands))]
    tail = (False, (), 2, 4, 1, True, False, False, True)
    return wis.body().call(
        "aten.mkldnn_rnn_layer.default",
        *[("in", name, v) for name, v in zip(names, operands, strict=True)],
        *[("out", name, None) for name in ("y", "h", "c", "w")],
        args=(*[wis.ref(k) for k in range(7)], *tail),
    )


def rnn_operands():
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 2, 3), (16, 3), (16, 4), (16,), (16,), (2, 4), (2, 4)]
    return {f"i{k}": torch.randn(s, generator=generator) for k, s in enumerate(shapes)}


def batch(wis):
    """A batch of products without a share of its operands: oneDNN writes nothing."""
    views = [wis.at(DType.BF16, 1, 512), wis.at(DType.BF16, 2, 4, 16), wis.at(DType.BF16, 2, 16, 512)]
    out = wis.at(DType.BF16, 2, 4, 512)
    operands = [("in", name, v) for name, v in zip("abc", views, strict=True)]
    args = tuple([wis.ref(k) for k in range(3)])
    more = (("alpha", 0), ("beta", 0))
    return (
        wis.body()
        .alloc("y", out.end)
        .call("aten.baddbmm.default", *operands, ("out", "y", out), args=args, kwargs=more)
    )


def batch_operands():
    shapes = {"a": (1, 512), "b": (2, 4, 16), "c": (2, 16, 512)}
    return {name: torch.ones(s, dtype=torch.bfloat16) for name, s in shapes.items()}


CALLS = {
    "ctc_loss": (ctc_loss, ctc_operands),
    "rnn_layer": (rnn_layer, rnn_operands),
    "batch": (batch, batch_operands),
}


def left(runtime, body, operands, runs=1, params=()):
    """Return all bytes that a program leaves, by name."""
    ready = ProgramStore(runtime).define(body.raw)
    with torch.inference_mode():
        for _ in range(runs):
            found = {
                body.names.index(n): Buffer(t.nbytes, t.clone().view(-1).view(torch.uint8)) for n, t in operands.items()
            }
            outcome = runtime.run(ready.prepared, found, range(len(body.names)), params)
            assert outcome.error == ""
        return {
            body.names[k]: bytes(bytes_of(b.base, 0, b.nbytes).numpy()) for k, b in found.items() if b.base is not None
        }


@pytest.mark.parametrize("kind", [TorchCpuRuntime, ReferenceRuntime, OpenClRuntime])
@pytest.mark.parametrize("name", CALLS)
def test_fresh_memory_unwritten_results_are_zero(wis, junk, kind, name):
    body, operands = CALLS[name]
    found = left(kind(), body(wis), operands())
    assert all(JUNK not in raw for raw in found.values())
    assert any(bytes(64) in raw for raw in found.values())  # the operator does leave a part unwritten


#: Nine elements with nine addresses, but some of them share one, and four addresses are left out.
GAPS = View(DType.F32, (3, 3), (2, 2))


def copied_into_gaps(wis):
    return wis.body().alloc("y", GAPS.end).copy("x", wis.at(DType.F32, 3, 3), "y", GAPS)


def filled_into_gaps(wis):
    return wis.body().alloc("y", GAPS.end).fill("y", GAPS, 1.0)


def computed_into_gaps(wis):
    body = wis.body().alloc("y", GAPS.end)
    return body.call("aten.neg.default", ("in", "x", wis.at(DType.F32, 3, 3)), ("out", "y", GAPS))


@pytest.mark.parametrize("kind", [TorchCpuRuntime, OpenClRuntime, lambda: gpu_runtime(FakeDriver())])
@pytest.mark.parametrize("body", [copied_into_gaps, filled_into_gaps, computed_into_gaps])
def test_fresh_memory_addresses_between_written_elements_are_zero(wis, junk, kind, body):
    runtime = kind()
    for runs in (1, 6):  # single steps, and combined ones
        made = body(wis)
        raw = left(runtime, made, {"x": torch.ones(3, 3)} if "x" in made.names else {}, runs)["y"]
        assert JUNK not in raw and raw[4:8] == bytes(4) and raw[:4] != bytes(4)


def test_fresh_memory_addresses_between_results_of_pieces_are_zero(wis, junk):
    n = 301
    gaps = View(DType.F32, (n, n), ((n + 1) // 2,) * 2)
    assert gaps.end == 4 * n * n and not gaps.dense
    dense = wis.at(DType.F32, n, n)
    operands = (Operand(Role.OUT, gaps), Operand(Role.IN, dense), Operand(Role.IN, dense))
    form = Form("mul", operands, (), (("args", (OperandRef(1), OperandRef(2))),))
    body = wis.body().alloc("y", gaps.end).add(form, "y", "x", "z")
    runtime = TorchCpuRuntime()
    runtime.bounds = Bounds(Limits(1 << 62, 1 << 62, 5_000, 1 << 62))
    assert ProgramStore(runtime).define(body.raw).prepared.pieces
    raw = left(runtime, body, {"x": torch.ones(n, n), "z": torch.ones(n, n)})["y"]
    assert JUNK not in raw and raw[4:8] == bytes(4) and raw[:4] != bytes(4)


@pytest.mark.parametrize(("operator", "zeroed"), [("median", True), ("trace", False)])
def test_fresh_memory_segment_zeroes_if_one_step_needs_it(wis, monkeypatch, operator, zeroed):
    seen = []
    monkeypatch.setattr("wooly_executor.runtime.segments.on_zeros", lambda call: seen.append(call) or on_zeros(call))
    v, one = wis.at(DType.F32, 2, 2), wis.at(DType.F32)
    body = wis.body().alloc("s", 4).call(f"aten.{operator}.default", ("in", "x", v), ("out", "s", one))
    for k in range(3):
        body.alloc(f"y{k}", 16).call("aten.mul.Tensor", ("in", "x", v), ("in", "s", one), ("out", f"y{k}", v))
    runtime = TorchCpuRuntime(hot=3)
    ready = ProgramStore(runtime).define(body.raw)
    with torch.inference_mode():
        for _ in range(5):
            buffers = {body.names.index("x"): Buffer(16, torch.tensor([1.0, 2.0, 3.0, 4.0]))}
            assert runtime.run(ready.prepared, buffers, range(len(body.names)), ()).error == ""
    assert len(ready.prepared.hot) == 1  # the interpreter runs all steps as one
    assert len(seen) == zeroed


def test_fresh_memory_interpreter_results_are_zeroed(junk):
    """The interpreter uses the same allocator."""
    function, _ = interpret(
        "graph(%x : Tensor):\n  %n : NoneType = prim::Constant()\n"
        "  %y : Tensor = aten::empty_like(%x, %n, %n, %n, %n, %n)\n  return (%y)\n"
    )
    assert torch.equal(on_zeros(function)(torch.ones(4)), torch.zeros(4))
    assert not torch.equal(function(torch.ones(4)), torch.zeros(4))


def test_fresh_memory_unwritten_result_with_gradient_is_zero(wis, junk):
    found = left(TorchCpuRuntime(), ctc_loss(wis, wanted=(wis.ref(0),)), ctc_operands())
    assert JUNK not in found["q"] and bytes(64) in found["q"]


def test_on_zeros_switch_is_off_after_failed_call():
    seen = []

    def call(f):
        seen.append(zero_fill.value)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        on_zeros(call)(None)
    assert seen == [True] and not zero_fill.value


def test_writes_all_is_true_only_for_known_operators():
    ops = torch.ops.aten
    quick = (
        ops.add.Tensor,
        ops.mm.default,
        ops._foreach_add_.List,
        ops.native_layer_norm.default,
        ops.max.dim,
        ops.cat.out,
    )
    assert all(map(writes_all, quick))
    slow = (ops._ctc_loss.default, ops._ctc_loss.Tensor, ops.mkldnn_rnn_layer.default, ops.lstm.input)
    assert not any(map(writes_all, slow))


def test_negative_log_likelihood_needs_zeroed_memory_on_a_cpu_only():
    form = Form("extern", ())
    assert fills_results(torch.ops.aten.nll_loss_forward.default, form, host=False)
    assert not fills_results(torch.ops.aten.nll_loss_forward.default, form, host=True)


# -- two sessions of one executor --------------------------------------------------------------------------------------------

SECRET = bytes(range(1, 17)) * 4


def spread(wis, client, nbytes, times=48):
    """Fill memory with the secret, and free it."""
    for k in range(times):
        client.run(wis.body().alloc("x", nbytes), {"x": k})
        client.write(k, SECRET * (nbytes // len(SECRET)))
    client.run(wis.body().alloc("x", 4).free("x"), {"x": times}, frees=range(times))
    client.sync()


@pytest.mark.parametrize("kind", [TorchCpuRuntime, OpenClRuntime])
def test_session_cannot_read_freed_memory_of_another(make_device, wis, kind):
    device = make_device(runtime=kind())
    alice, bob = device.open("alice"), device.open("bob")
    body = ctc_loss(wis)
    given = ctc_operands()
    for k, t in enumerate(given.values()):
        bob.run(wis.body().alloc("x", t.nbytes), {"x": k})
        bob.write(k, t.numpy().tobytes())
    bob.sync()
    log_alpha = B * T * (2 * S + 1) * 4
    for times in range(1, 25):  # enough runs to combine the program's steps
        spread(wis, alice, log_alpha - log_alpha % len(SECRET), times)
        bob.run(body, {"x": 0, "y": 1, "p": 2, "q": 3})
        assert SECRET[:16] not in bob.read(3, log_alpha)
        bob.run(wis.body().free("p").free("q"), {"p": 2, "q": 3})


def test_shared_content_copy_before_overwrite_is_zero(device, wis, junk):
    alice, bob = (device.open(name, scope=Scope.SHARED) for name in ("alice", "bob"))
    data = SECRET * 64
    alice.load(1, data)
    alice.sealed()
    assert bob.load(1, data)
    found = device.call(lambda: _unshared(device, "bob", len(data)))
    assert found == bytes(len(data))


def _unshared(device, name, nbytes):
    session = next(s for s in device.loop.sessions.all() if s.id == name)
    return bytes(device.loop.runs.memory(session, 1, 0, nbytes, writing=True).numpy())


# -- GPUs, on the fake driver -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ctc_loss"])
def test_fresh_memory_gpu_unwritten_results_are_zero(wis, junk, name):
    body, operands = CALLS[name]
    runtime = gpu_runtime(FakeDriver(), hot=2)
    for runs in (1, 4):  # the second time as hot steps with graphs
        assert all(JUNK not in raw for raw in left(runtime, body(wis), operands(), runs).values())


class FakePool:
    """A pool that grows by one segment in each call, up to `calls` times. Free memory that was not zeroed contains junk."""

    def __init__(self, calls):
        self.calls, self.content, self.used = calls, {}, False

    @contextlib.contextmanager
    def use(self):
        if len(self.content) < self.calls:
            self.content[len(self.content) << 20] = "junk"
        self.used = True
        yield
        self.used = False

    def segments(self):
        return {address: [(address, 1 << 20)] for address in self.content}

    def zero(self, blocks):
        self.content |= dict.fromkeys([address for address, _ in blocks], "zero")

    def take(self, _):
        """An operator that takes all memory and leaves its content unchanged."""
        assert self.used
        return set(self.content.values())


@pytest.mark.parametrize("grows", [0, 1, 3])
def test_gpu_on_zeros_grown_pool_repeats_call(grows):
    pool = FakePool(grows)
    call = on_zeroed_pool(pool.take, pool)
    for _ in range(2):
        assert call(None) <= {"zero"}
        pool.content = dict.fromkeys(pool.content, "junk")  # other operators have left junk in the pool


def test_gpu_on_zeros_endless_growth_raises():
    pool = FakePool(100)
    with pytest.raises(OperationError, match="cannot run on zeroed memory"):
        on_zeroed_pool(pool.take, pool)(None)


@pytest.mark.parametrize("nbytes", [1, SPLIT_FROM - 1, SPLIT_FROM, ALONE_UP_TO - 3, ALONE_UP_TO, ALONE_UP_TO + 1])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_new_memory_of_each_size_is_zero(junk, nbytes, dtype):
    made = TorchDevice(torch.device("cpu")).zeroed(nbytes, dtype)
    assert made.nbytes == -(-nbytes // dtype.itemsize) * dtype.itemsize and not made.any()
