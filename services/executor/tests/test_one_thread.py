"""Operators that a CPU computes on the device's thread alone: their bits, and which operators they are."""

import random
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from wooly_executor.billing.cores import WorkerClock
from wooly_executor.runtime.adoption import Layout
from wooly_executor.runtime.calls import LibraryCall
from wooly_executor.runtime.device import HOST
from wooly_executor.runtime.invocation import ONE_CORE, settings_of, with_flags
from wooly_executor.runtime.one_thread import (
    ALIGNED,
    ALONG,
    EXACT,
    GRAIN,
    MOST,
    MOST_PLAIN,
    ROWS,
    VECTOR_MATH,
    Threads,
    choice_of_copy,
    on_one_thread,
    threads_for,
)
from wooly_executor.runtime.segments import Invoke, Make, Segment, Write
from wooly_executor.runtime.torch_private import limit_products, limit_threads, threads_of_this_thread
from wooly_testkit.effort import sweep
from wooly_wis.dtypes import DType
from wooly_wis.program import Form, Operand, OperandRef, Role, View

pytestmark = [
    pytest.mark.skipif(limit_threads is None, reason="this build of torch has no OpenMP"),
    pytest.mark.usefixtures("two_threads"),
]
aten = torch.ops.aten
DTYPES = {
    torch.float32: DType.F32,
    torch.float64: DType.F64,
    torch.float16: DType.F16,
    torch.bfloat16: DType.BF16,
    torch.int32: DType.I32,
    torch.int64: DType.I64,
    torch.bool: DType.BOOL,
}
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
#: For each operator: an overload and its arguments. X, Y and Z stand for tensors of one shape, W for a row, C for a column, P for
#: the absolute values of X, M for a mask, N for integers, R for numbers of rows, "n" for the length of a row.
X, Y, Z, W, C, P, M, N, R = "XYZWCPMNR"
CASES = {
    "abs": [(aten.abs.default, X)],
    "add": [(aten.add.Tensor, X, Y), (aten.add.Tensor, X, W), (aten.add.Scalar, X, 1.3)],
    "addcdiv": [(aten.addcdiv.default, X, Y, P)],
    "addcmul": [(aten.addcmul.default, X, Y, Z)],
    "bitwise_and": [(aten.bitwise_and.Tensor, N, N)],
    "bitwise_not": [(aten.bitwise_not.default, N)],
    "bitwise_or": [(aten.bitwise_or.Tensor, N, N)],
    "bitwise_xor": [(aten.bitwise_xor.Tensor, N, N)],
    "cat": [(aten.cat.default, (X, Y), -1)],
    "ceil": [(aten.ceil.default, X)],
    "clamp": [(aten.clamp.default, X, -0.5, 0.5)],
    "clamp_max": [(aten.clamp_max.default, X, 0.3)],
    "clamp_min": [(aten.clamp_min.default, X, 0.3)],
    "clone": [(aten.clone.default, X)],
    "copy": [(aten.copy.default, X, Y)],
    "cos": [(aten.cos.default, X)],
    "div": [(aten.div.Tensor, X, Y), (aten.div.Tensor, X, C), (aten.div.Scalar, X, 1.3)],
    "embedding": [(aten.embedding.default, X, R)],
    "eq": [(aten.eq.Tensor, X, Y)],
    "erf": [(aten.erf.default, X)],
    "erfc": [(aten.erfc.default, X)],
    "exp": [(aten.exp.default, X)],
    "expm1": [(aten.expm1.default, X)],
    "fill": [(aten.fill.Scalar, X, 0.3)],
    "flip": [(aten.flip.default, X, (1,))],
    "floor": [(aten.floor.default, X)],
    "ge": [(aten.ge.Scalar, X, 0.1)],
    "gt": [(aten.gt.Tensor, X, Y)],
    "hardtanh": [(aten.hardtanh.default, X)],
    "index": [(aten.index.Tensor, X, (R,))],
    "index_select": [(aten.index_select.default, X, 0, R)],
    "le": [(aten.le.Tensor, X, Y)],
    "leaky_relu": [(aten.leaky_relu.default, X, 0.1)],
    "lerp": [(aten.lerp.Scalar, X, Y, 0.3), (aten.lerp.Scalar, X, Y, 0.7)],
    "log": [(aten.log.default, P)],
    "log10": [(aten.log10.default, P)],
    "log1p": [(aten.log1p.default, P)],
    "log2": [(aten.log2.default, P)],
    "logical_and": [(aten.logical_and.default, M, M)],
    "logical_not": [(aten.logical_not.default, M)],
    "logical_or": [(aten.logical_or.default, M, M)],
    "lt": [(aten.lt.Tensor, X, Y)],
    "masked_fill": [(aten.masked_fill.Scalar, X, M, 0.3)],
    "maximum": [(aten.maximum.default, X, Y)],
    "minimum": [(aten.minimum.default, X, Y)],
    "mse_loss_backward": [(aten.mse_loss_backward.default, X, Y, Z, 0)],
    "mul": [(aten.mul.Tensor, X, Y), (aten.mul.Tensor, X, C), (aten.mul.Scalar, X, 1.3)],
    "native_dropout_backward": [(aten.native_dropout_backward.default, X, M, 1.25)],
    "ne": [(aten.ne.Tensor, X, Y)],
    "neg": [(aten.neg.default, X)],
    "reciprocal": [(aten.reciprocal.default, P)],
    "relu": [(aten.relu.default, X)],
    "roll": [(aten.roll.default, X, (3,), (1,))],
    "round": [(aten.round.default, X)],
    "rsub": [(aten.rsub.Tensor, X, Y), (aten.rsub.Scalar, X, 1.3)],
    "sigmoid_backward": [(aten.sigmoid_backward.default, X, Y)],
    "sign": [(aten.sign.default, X)],
    "sin": [(aten.sin.default, X)],
    "sqrt": [(aten.sqrt.default, P)],
    "sub": [(aten.sub.Tensor, X, Y), (aten.sub.Tensor, X, C)],
    "tan": [(aten.tan.default, X)],
    "tanh": [(aten.tanh.default, X)],
    "tanh_backward": [(aten.tanh_backward.default, X, Y)],
    "threshold": [(aten.threshold.default, X, 0.1, 0.2)],
    "threshold_backward": [(aten.threshold_backward.default, X, Y, 0.0)],
    "tril": [(aten.tril.default, X)],
    "triu": [(aten.triu.default, X)],
    "trunc": [(aten.trunc.default, X)],
    "where": [(aten.where.self, M, X, Y)],
    "zero": [(aten.zero.default, X)],
    "amax": [(aten.amax.default, X, (1,)), (aten.amax.default, X, (0,))],
    "amin": [(aten.amin.default, X, (1,))],
    "argmax": [(aten.argmax.default, X, 1)],
    "argmin": [(aten.argmin.default, X, 0)],
    "max": [(aten.max.dim, X, 1)],
    "mean": [(aten.mean.dim, X, (1,)), (aten.mean.dim, X, (0,))],
    "min": [(aten.min.dim, X, 0)],
    "sum": [(aten.sum.dim_IntList, X, (1,)), (aten.sum.dim_IntList, X, (0,))],
    "elu": [(aten.elu.default, X)],
    "gelu": [(aten.gelu.default, X), (aten.gelu.default, X, {"approximate": "tanh"})],
    "gelu_backward": [(aten.gelu_backward.default, X, Y), (aten.gelu_backward.default, X, Y, {"approximate": "tanh"})],
    "mish": [(aten.mish.default, X)],
    "pow": [(aten.pow.Tensor_Scalar, P, 1.7), (aten.pow.Tensor_Scalar, X, 3), (aten.pow.Tensor_Tensor, P, Y)],
    "rsqrt": [(aten.rsqrt.default, P)],
    "sigmoid": [(aten.sigmoid.default, X)],
    "silu": [(aten.silu.default, X)],
    "silu_backward": [(aten.silu_backward.default, X, Y)],
    "softplus": [(aten.softplus.default, X)],
    "native_layer_norm": [(aten.native_layer_norm.default, X, ("n",), W, W, 1e-5)],
    "_softmax": [(aten._softmax.default, X, -1, False)],
    "_log_softmax": [(aten._log_softmax.default, X, 1, False)],
    "_softmax_backward_data": [(aten._softmax_backward_data.default, X, Y, -1, "dtype")],
    "_log_softmax_backward_data": [(aten._log_softmax_backward_data.default, X, Y, -1, "dtype")],
}


def view(sizes, dtype=DType.F32, strides=None):
    if strides is None:
        strides, step = [], 1
        for size in reversed(sizes):
            strides.insert(0, step)
            step *= size
    return View(dtype, tuple(sizes), tuple(strides))


class Case:
    """An operator with tensors, and the form that describes the call."""

    def __init__(self, case, rows, columns, dtype, layout, seed):
        generator = torch.Generator().manual_seed(seed)
        self.op, self.tensors = case[0], []

        def made(sizes):
            t = torch.randn(sizes, generator=generator, dtype=torch.float64)
            return (t if layout == "rows" or t.ndim < 2 else t.mT.contiguous().mT).to(dtype)

        def value(a):
            if isinstance(a, tuple):
                return tuple([value(v) for v in a])
            if a == "n":
                return columns
            if a == "dtype":
                return dtype
            if not isinstance(a, str):
                return a
            t = {
                "W": lambda: made((columns,) if case[0] is aten.native_layer_norm.default else (1, columns)),
                "C": lambda: made((rows, 1)),
                "P": lambda: made((rows, columns)).abs() + 0.1,
                "M": lambda: made((rows, columns)) > 0,
                "N": lambda: (made((rows, columns)) * 100).int(),
                "R": lambda: torch.randint(rows, (rows,), generator=generator),
            }.get(a, lambda: made((rows, columns)))()
            self.tensors.append(t)
            return OperandRef(len(self.tensors) - 1)

        *args, last = case[1:]
        named = last if isinstance(last, dict) else {}
        args = tuple([value(a) for a in (args if named else (*args, last))])
        self.call = LibraryCall(self.op, args, tuple(named.items()))

    def run(self):
        def filled(a):
            if isinstance(a, tuple):
                return [filled(v) for v in a]
            return self.tensors[a.index] if isinstance(a, OperandRef) else a

        found = self.op(*[filled(a) for a in self.call.args], **dict(self.call.kwargs))
        return list(found) if isinstance(found, (list, tuple)) else [found]

    def form(self, results):
        views = [(Role.IN, t) for t in self.tensors] + [(Role.OUT, t) for t in results]
        return Form("extern", tuple([Operand(r, view(t.shape, DTYPES[t.dtype], t.stride())) for r, t in views]))


def bits(t):
    return t.contiguous().reshape(-1).view(torch.uint8)


def compare(case, rows, columns, dtype, layout, threads, seed=0):
    """Compute with all threads and with one, and compare the bits. Returns whether the operator is for one thread."""
    torch.set_num_threads(threads)
    made = Case(case, rows, columns, dtype, layout, seed)
    expected = made.run()
    form = made.form(expected)
    if threads_for(made.call, form, threads) is not Threads.ONE:
        return False
    call = on_one_thread(lambda _: made.run())
    flags = settings_of(form, made.call, HOST)
    found = (with_flags(call, flags) if flags else call)(None)
    for a, b in zip(expected, found, strict=True):
        assert a.stride() == b.stride() and torch.equal(bits(a), bits(b)), (case, rows, columns, dtype, layout, threads)
    return True


def test_each_operator_of_the_tables_has_a_case():
    assert {*CASES} == EXACT | ALONG | ALIGNED | ROWS.keys()


def kinds_of(name):
    """The tables that an operator is in, and whether it has several cases."""
    tables = {"exact": EXACT, "along": ALONG, "aligned": ALIGNED, "rows": ROWS, "vector": VECTOR_MATH}
    return len(CASES[name]) > 1, *[what for what, table in tables.items() if name in table]


@pytest.mark.parametrize("name", sweep(CASES, 5, kinds_of))
def test_one_thread_computes_the_bits_of_several(name):
    ones = 0
    for seed, case in enumerate(CASES[name]):
        for dtype in FLOATS:
            for rows, columns, layout in ((96, 512, "rows"), (97, 521, "rows"), (97, 521, "columns"), (3, 700, "rows")):
                for threads in (3, 16):
                    try:
                        ones += compare(case, rows, columns, dtype, layout, threads, seed)
                    except (RuntimeError, NotImplementedError) as e:
                        assert "not implemented for" in str(e)
    assert ones


@pytest.mark.slow
def test_one_thread_computes_the_bits_of_several_for_random_sizes():
    draw, ones = random.Random(0), dict.fromkeys(CASES, 0)
    for seed in range(6000):
        name = draw.choice(list(CASES))
        rows = draw.choice([1, 2, 3, 7, 33, 64, 100, 127, 255, 300, 1000])
        columns = max(draw.choice([100, 3000, GRAIN, MOST, MOST_PLAIN]) // rows + draw.randint(-70, 0), 1)
        if draw.random() < 0.5:
            columns = -(-columns // 64) * 64
        layout = draw.choice(["rows", "columns"])
        try:
            ones[name] += compare(
                draw.choice(CASES[name]),
                rows,
                columns,
                draw.choice(FLOATS),
                layout,
                draw.choice([2, 3, 4, 7, 16]),
                seed,
            )
        except (RuntimeError, NotImplementedError) as e:
            assert "not implemented for" in str(e)
    assert all(ones.values()), ones


def choice(op, *views, args=None, kwargs=(), threads=2, out=None):
    operands = [Operand(Role.IN, v) for v in views]
    operands.append(Operand(Role.OUT, out or views[0]))
    args = args or tuple([OperandRef(k) for k in range(len(views))])
    return threads_for(LibraryCall(op, args, kwargs), Form("extern", tuple(operands)), threads)


def test_number_of_elements_decides():
    one, two, all_of = view((GRAIN - 1,)), view((GRAIN,)), view((MOST_PLAIN + 1,))
    assert choice(aten.mul.Tensor, one, one) is Threads.ANY
    assert choice(aten.mul.Tensor, two, two) is Threads.ONE
    assert choice(aten.mul.Tensor, all_of, all_of) is Threads.ALL
    assert choice(aten.mul.Tensor, two, two, threads=1) is Threads.ANY
    assert choice(aten._foreach_mul_.Scalar, one, two, args=((OperandRef(0), OperandRef(1)), 2.0)) is Threads.ONE
    assert choice(aten.exp.default, view((2047,))) is Threads.ANY
    assert choice(aten.exp.default, view((2048,))) is Threads.ONE
    assert choice(aten.exp.default, view((MOST + 1,))) is Threads.ALL
    assert choice(aten.gelu.default, view((128,))) is Threads.ONE
    assert choice(aten.sum.dim_IntList, one, args=(OperandRef(0), (0,)), out=view(())) is Threads.ANY
    assert choice(aten.convolution.default, view((4,)), view((4,))) is Threads.ALL


def test_operators_whose_bits_depend_on_threads_use_all():
    many, half = view((300, 300)), view((300, 300), DType.BF16)
    row = view((64, 1024))
    assert choice(aten.native_layer_norm_backward.default, row, row) is Threads.ALL
    assert choice(aten.sum.dim_IntList, many, args=(OperandRef(0), (0, 1)), out=view(())) is Threads.ALL
    assert choice(aten.sum.dim_IntList, many, args=(OperandRef(0), (1,)), out=view((300,))) is Threads.ONE
    assert choice(aten.add.Tensor, half, half) is Threads.ONE
    assert choice(aten.add.Tensor, half, half, kwargs=(("alpha", 0.3),)) is Threads.ALL
    assert choice(aten.add.Tensor, many, many, kwargs=(("alpha", 0.3),)) is Threads.ONE
    assert choice(aten._softmax.default, many, args=(OperandRef(0), 0, False)) is Threads.ALL
    assert (
        choice(aten._softmax_backward_data.default, many, many, args=(OperandRef(0), OperandRef(1), -1, 6))
        is Threads.ALL
    )
    assert choice(aten.silu.default, view((255, 255))) is Threads.ALL  # the second thread's part begins within a vector
    assert choice(aten.silu.default, view((256, 256))) is Threads.ONE
    assert choice(aten.silu.default, view((256, 256), strides=(1, 256))) is Threads.ALL


def test_work_of_a_selection_is_that_of_its_result():
    table, places = view((50_000, 64)), view((1000,), DType.I64)
    assert choice(aten.embedding.default, table, places, out=view((1000, 64))) is Threads.ONE
    assert choice(aten.embedding.default, table, places, out=view((10, 64))) is Threads.ANY
    assert choice(aten.embedding.default, table, places, out=view((10_000, 64))) is Threads.ALL


def test_product_of_mkl_and_single_row_fit_to_any_number():
    factor, row = view((256, 256)), view((1, 1024))
    assert choice(aten.mm.default, factor, factor) is Threads.ANY
    half = view((256, 256), DType.BF16)
    assert choice(aten.mm.default, half, half) is Threads.ALL
    arguments = (OperandRef(0), (1024,), None, None, 1e-5)
    assert choice(aten.native_layer_norm.default, row, args=arguments) is Threads.ANY
    assert choice(aten.native_layer_norm.default, view((2, 1024)), args=arguments) is Threads.ONE
    assert choice(aten._softmax.default, row, args=(OperandRef(0), -1, False)) is Threads.ANY
    assert choice(aten._softmax.default, view((2, 64)), args=(OperandRef(0), -1, False)) is Threads.ONE


def test_substitute_of_the_executor_uses_all_threads():
    call = LibraryCall(aten.mul.Tensor, (OperandRef(0), OperandRef(0)), (), instead=lambda *a: a)
    operand = view((300, 300))
    assert threads_for(call, Form("extern", (Operand(Role.IN, operand), Operand(Role.OUT, operand))), 2) is Threads.ALL


@pytest.mark.parametrize("fails", [False, True])
def test_limit_holds_during_the_call_only(fails):
    seen = []

    def call(frame):
        seen.append(threads_of_this_thread())
        if fails:
            raise ValueError
        return 5

    if fails:
        with pytest.raises(ValueError):
            on_one_thread(call)(None)
    else:
        assert on_one_thread(call)(None) == 5
    assert seen == [1] and threads_of_this_thread() == 2


@pytest.mark.skipif(limit_products is None, reason="this build of torch has no MKL")
def test_product_on_one_thread_has_all_cores_of_mkl_also_after_a_small_product():
    with_flags(lambda _: None, (ONE_CORE,))(None)
    seen = []

    def call(_):
        seen.append(limit_products(2))

    on_one_thread(call)(None)
    assert seen == [2]


def test_segment_is_divided_between_one_thread_and_all():
    def step(threads):
        call = LibraryCall(aten.relu.default, (OperandRef(0),), ())
        return Invoke(call, {0: 0}, 0, (), {}, trusted=[Layout.SAME], results=(1,), threads=threads)

    segment = Segment()
    segment.add(step(Threads.ANY), 0)
    assert not segment.clashes(step(Threads.ONE)) and not segment.clashes(step(Threads.ALL))
    segment.add(step(Threads.ONE), 1)
    assert segment.clashes(step(Threads.ALL)) and not segment.clashes(step(Threads.ANY))
    copy = Write(aten.copy_.default, (0, 1))
    assert not segment.clashes(copy) and not segment.clashes(copy._replace(threads=Threads.ONE))
    assert segment.clashes(copy._replace(threads=Threads.ALL))
    memory = Make(0, 4, torch.float32)
    assert not segment.clashes(memory) and segment.clashes(memory._replace(threads=Threads.ALL))


@pytest.mark.parametrize("makes", [False, True])
def test_segment_with_a_copy_or_new_memory_on_one_thread_is_on_one_thread(makes):
    segment, seen = Segment(), []
    segment.add(Write(aten.copy_.default, (0, 1), threads=Threads.ANY if makes else Threads.ONE), 0)
    if makes:
        segment.add(Make(0, 4, torch.float32, threads=Threads.ONE), 1)
    part, _ = segment.compile(lambda name: True)

    class Registers(list):
        def __getitem__(self, k):
            seen.append(threads_of_this_thread())
            return super().__getitem__(k)

    x, y = torch.zeros(4), torch.ones(4)
    part.step({})(SimpleNamespace(registers=Registers([x, y]), bases=[None], params=[]))
    assert {*seen} == {1} and x.sum() == 4 and threads_of_this_thread() == 2


def test_copy_and_fill_of_some_size_are_on_one_thread():
    assert choice_of_copy(GRAIN - 1) is Threads.ANY
    assert choice_of_copy(GRAIN) is Threads.ONE
    assert choice_of_copy(MOST_PLAIN + 1) is Threads.ALL
    torch.set_num_threads(1)
    assert choice_of_copy(GRAIN) is Threads.ANY


def in_thread_with_team(work):
    """Run `work(clock)` in a thread with a team of its own, whose members sleep. Returns its result."""
    found = []

    def run():
        torch.set_num_threads(2)
        clock = WorkerClock()
        clock.attach()
        time.sleep(0.1)
        found.append(work(clock))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.skipif(limit_products is None, reason="this build of torch has no MKL")
def test_team_sleeps_while_one_thread_computes():
    x, call = torch.randn(64, 1024), LibraryCall(aten.exp.default, (OperandRef(0),), ())
    operand = view((64, 1024))
    form = Form("extern", (Operand(Role.IN, operand), Operand(Role.OUT, operand)))
    assert settings_of(form, call, HOST) == (ONE_CORE,)
    small = view((8, 8))
    assert settings_of(Form("extern", (Operand(Role.IN, small), Operand(Role.OUT, small))), call, HOST) is None

    def work(clock):
        if not clock.any:
            pytest.skip("worker threads cannot be measured here")
        times = [clock.read()]
        for run in (on_one_thread(with_flags(lambda _: x.exp(), (ONE_CORE,))), on_one_thread(lambda _: x.softmax(-1))):
            for _ in range(20):
                run(None)
            times.append(clock.read())
        on_one_thread(lambda _: x.exp())(None)  # MKL wakes them
        x.softmax(-1)
        return [*times, clock.read()]

    idle, after_exp, after_softmax, woken = in_thread_with_team(work)
    assert idle == after_exp == after_softmax < woken


@pytest.mark.skipif(limit_products is None, reason="this build of torch has no MKL")
@pytest.mark.parametrize("name", sorted(VECTOR_MATH))
def test_function_of_mkl_has_the_same_bits_on_one_core(name):
    function, limited = getattr(torch, name), None
    for numbers in (101, 1000, 20_001):
        for dtype in (torch.float32, torch.float64):
            x = torch.rand(numbers, generator=torch.Generator().manual_seed(0), dtype=dtype) * 0.98
            limited = with_flags(lambda _, x=x: function(x), (ONE_CORE,))
            assert torch.equal(bits(function(x)), bits(limited(None)))
