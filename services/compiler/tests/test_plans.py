"""Plans: what is fused, which temporaries need no memory, and equal bits in all ways to run a plan."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from wooly_compiler.passes import weigh
from wooly_compiler.pipeline import Trace, compile_program
from wooly_testkit.effort import examples
from wooly_testkit.plan_run import LocalRun
from wooly_testkit.tape import Tape
from wooly_wis import plan as plans
from wooly_wis.dtypes import DType
from wooly_wis.errors import PlanError
from wooly_wis.kernel.text import read, write
from wooly_wis.plan import AllocStep, KernelStep, LibraryStep

F32, F64, F16, BF16, I32, I64, BOOL = (
    DType.F32, DType.F64, DType.F16, DType.BF16, DType.I32, DType.I64, DType.BOOL,
)  # fmt: skip
RNG = np.random.default_rng(0)


def normal(*sizes):
    return RNG.standard_normal(sizes, dtype=np.float32)


def kernels(plan):
    return [s for s in plan.steps if isinstance(s, KernelStep)]


# -- what is fused -------------------------------------------------------------------------------------------------------


def test_fuse_pointwise_chain_gives_one_kernel_without_temporaries(agree):
    t = Tape()
    x, w, b = t.input(F32, 6, 40), t.input(F32, 40), t.input(F32, 40)
    m = t.op("mul", x, w)
    s = t.op("add", m, b)
    t.free(m)
    y = t.op("gelu", s)
    t.free(s)
    ways, _ = agree(t, [(x, normal(6, 40)), (w, normal(40)), (b, normal(40))])
    assert len(kernels(ways.fused)) == 1 and len(kernels(ways.single)) == 3
    assert len(ways.fused.temporaries) == 2
    assert [s.slot for s in ways.fused.steps if isinstance(s, AllocStep)] == [ways.slots[y.slot]]
    assert ways.fused.share() == 1.0


def test_fuse_softmax_with_neighbours_gives_one_kernel(agree):
    t = Tape()
    x, mask = t.input(F32, 3, 70), t.input(F32, 3, 70)
    scaled = t.op("mul", x, 0.125)
    masked = t.op("add", scaled, mask)
    t.free(scaled)
    p = t.op("softmax", masked, -1)
    t.free(masked)
    y = t.op("mul", p, 2.0)
    t.free(p)
    xs, ms = normal(3, 70), normal(3, 70)
    ways, memory = agree(t, [(x, xs), (mask, ms)])
    assert len(kernels(ways.fused)) == 1
    e = np.exp(xs.astype(np.float64) / 8 + ms)
    np.testing.assert_allclose(ways.value(memory, y), 2 * e / e.sum(1, keepdims=True), rtol=2e-6)


def test_fuse_layer_norm_gelu_and_residual_stores_only_the_result(agree):
    t = Tape()
    x, w, b, z = t.input(F32, 5, 96), t.input(F32, 96), t.input(F32, 96), t.input(F32, 5, 96)
    n, mean, rstd = t.ops("layer_norm", x, (96,), w, b, 1e-5)
    t.free(mean, rstd)
    g = t.op("gelu", n)
    t.free(n)
    y = t.op("add", g, z)
    t.free(g)
    inputs = [(x, normal(5, 96)), (w, normal(96)), (b, normal(96)), (z, normal(5, 96))]
    ways, _ = agree(t, inputs)
    (step,) = kernels(ways.fused)
    assert [a.name for a in step.kernel.arrays if a.role.name != "IN"] == ["out4"]
    assert ways.slots[y.slot] in step.slots


def test_fuse_rms_norm_of_single_instructions_gives_one_kernel(agree):
    t = Tape()
    x, w = t.input(F32, 4, 64), t.input(F32, 64)
    sq = t.op("mul", x, x)
    mean = t.op("mean", sq, (-1,), True)
    t.free(sq)
    shifted = t.op("add", mean, 1e-6)
    t.free(mean)
    r = t.op("rsqrt", shifted)
    t.free(shifted)
    n = t.op("mul", x, r)
    t.free(r)
    y = t.op("mul", w, n)
    t.free(n)
    xs, ws = normal(4, 64), normal(64)
    ways, memory = agree(t, [(x, xs), (w, ws)])
    assert len(kernels(ways.fused)) == 1
    expected = xs * ws / np.sqrt((xs.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(ways.value(memory, y), expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(
    "sizes",
    [((33,), (7,)), pytest.param(((4096 * 2 + 5,), (64, 9), (), (3,), (2, 70, 8)), marks=pytest.mark.slow)],
    ids=str,
)
def test_batch_of_optimizer_steps_of_several_sizes_gives_one_kernel(agree, sizes):
    t = Tape()
    tensors = [[t.input(F32, *n) for _ in range(4)] for n in sizes]
    for _, g, m, _ in tensors:
        t.op("lerp", m, g, 0.1, into=m)
    for _, g, _, v in tensors:
        t.op("mul", v, 0.999, into=v)
        t.op("addcmul", v, g, g, 0.001, into=v)
    for p, _, m, v in tensors:
        d = t.op("sqrt", v)
        t.op("add", d, 1e-8, into=d)
        t.op("addcdiv", p, m, d, -0.01, into=p)
        t.free(d)
    inputs = [(x, np.abs(normal(*x.view.sizes))) for group in tensors for x in group]
    ways, _ = agree(t, inputs)
    assert len(kernels(ways.fused)) == 1


def test_batch_of_dependent_kernels_does_not_merge(agree):
    t = Tape()
    x, y = t.input(F32, 40), t.input(F32, 8, 5)
    flat = t.op("exp", y).seen((40,), (1,))
    other = t.op("neg", x)
    turned = t.op("mul", flat, 2.0)
    t.op("mul", x, 3.0, into=x)
    ways, memory = agree(t, [(x, np.ones(40, np.float32)), (y, normal(8, 5))])
    assert len(kernels(ways.fused)) == 2
    assert ways.value(memory, other)[0] == -1.0 and turned.view.sizes == (40,)


def test_concat_of_parts_gives_one_kernel_that_fills_the_result(agree):
    t = Tape()
    x = t.input(F32, 6, 16)
    half = t.op("neg", x.seen((6, 8), (16, 1), 8))
    y = t.op("concat", (half, x.seen((6, 8), (16, 1))), -1)
    t.free(half)
    ways, _ = agree(t, [(x, normal(6, 16))])
    assert len(kernels(ways.fused)) == 1
    assert [(s.slot, s.zero) for s in ways.fused.steps if isinstance(s, AllocStep)] == [(ways.slots[y.slot], False)]


def test_plan_with_matrix_product_calls_the_library_between_kernels():
    t = Tape()
    a, b = t.input(F32, 4, 8), t.input(F32, 8, 4)
    c = t.op("relu", a)
    d = t.op("mm", c, b)
    t.free(c)
    t.op("sigmoid", d)
    t.free(d)
    program, _ = t.program()
    plan = compile_program(program)
    kinds = [type(s).__name__ for s in plan.steps if not isinstance(s, (AllocStep, plans.FreeStep))]
    assert kinds == ["KernelStep", "LibraryStep", "KernelStep"]
    assert plan.share() == pytest.approx(2 / 3)


@pytest.mark.parametrize("opcode", ["linear", "addmm"])
def test_split_bias_before_a_kernel_adds_the_bias_in_that_kernel(opcode):
    t = Tape()
    a, w, b, z = t.input(F32, 6, 8), t.input(F32, 16, 8), t.input(F32, 16), t.input(F32, 2, 3, 16)
    c = t.op("linear", a, w, b) if opcode == "linear" else t.op("addmm", b, a, w.seen((8, 16), (1, 8)))
    y = t.op("add", t.op("gelu", c.seen((2, 3, 16), (48, 16, 1))), z)
    t.free(c)
    program, slots = t.program()
    plan = compile_program(program, biases=True)
    product, kernel = (s for s in plan.steps if isinstance(s, (KernelStep, LibraryStep)))
    assert product.line.form.opcode == ("linear" if opcode == "linear" else "mm") and len(product.line.slots) == 3
    assert [line.form.opcode for line in kernel.lines] == ["add", "gelu", "add"]
    # the kernel reads the product, and does not store it
    assert {a.role.name for a, s in zip(kernel.kernel.arrays, kernel.slots, strict=True) if s == slots[c.slot]} == {
        "IN"
    }
    values = {x: np.ascontiguousarray(normal(*x.view.sizes)) for x in (a, w, b, z)}

    def library(line, memory, params):
        c_there = memory[line.slots[-1]].view(np.float32).reshape(6, 16)
        c_there[:] = values[a] @ values[w].T

    memory = {slots[x.slot]: v.reshape(-1).view(np.uint8).copy() for x, v in values.items()}
    LocalRun(plan, library).run(memory)
    c = torch.from_numpy((values[a] @ values[w].T + values[b]).reshape(2, 3, 16))
    want = torch.nn.functional.gelu(c).numpy() + values[z]
    got = memory[slots[y.slot]].view(np.float32).reshape(2, 3, 16)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("opcode", ["linear", "addmm"])
def test_split_bias_keeps_the_flags_of_the_product(opcode):
    t = Tape()
    a, w, b = t.input(F32, 6, 8), t.input(F32, 16, 8), t.input(F32, 16)
    c = t.op("linear", a, w, b) if opcode == "linear" else t.op("addmm", b, a, w.seen((8, 16), (1, 8)))
    t.op("gelu", c)
    t.free(c)
    program, _ = t.program()
    flags = ("flags", ("matmul_tf32",))
    forms = [replace(f, attrs=(*f.attrs, flags)) if f.opcode == opcode else f for f in program.forms]
    plan = compile_program(replace(program, forms=tuple(forms)), biases=True)
    product, kernel = (s for s in plan.steps if isinstance(s, (KernelStep, LibraryStep)))
    assert len(product.line.slots) == 3 and product.line.form.attrs[-1] == flags
    assert [line.form.opcode for line in kernel.lines] == ["add", "gelu"]
    plans.verify(plan)
    lost = replace(product.line, form=replace(product.line.form, attrs=product.line.form.attrs[:-1]))
    steps = [replace(s, line=lost) if s is product else s for s in plan.steps]
    with pytest.raises(PlanError, match="differs from the instruction in the attribute flags"):
        plans.verify(replace(plan, steps=tuple(steps)))


def test_split_bias_without_a_kernel_after_it_still_splits():
    """Otherwise results would depend on where a program ends. A sum that is too small for a kernel stays in the library call."""
    t = Tape()
    a, w, b = t.input(F32, 6, 8), t.input(F32, 8, 8), t.input(F32, 8)
    c = t.op("linear", a, w, b)
    t.op("mm", c, w)
    program, _ = t.program()

    def done(refuse):
        plan = compile_program(program, biases=True, refuse=refuse)
        return [
            line.form.opcode
            for s in plan.steps
            if isinstance(s, (KernelStep, LibraryStep))
            for line in (s.lines if isinstance(s, KernelStep) else [s.line])
        ]

    assert done(lambda line: "") == ["linear", "add", "mm"]
    assert done(weigh.why_not) == ["linear", "mm"]


def test_fuse_in_place_update_after_read_with_other_layout_is_refused(agree):
    t = Tape()
    x = t.input(F32, 8, 8)
    turned = x.seen((8, 8), (1, 8))
    s = t.op("add", x, turned)
    t.op("mul", x, 2.0, into=x)
    ways, memory = agree(t, [(x, np.arange(64, dtype=np.float32).reshape(8, 8))])
    assert len(kernels(ways.fused)) == 2
    before = np.arange(64, dtype=np.float32).reshape(8, 8)
    np.testing.assert_array_equal(ways.value(memory, s), before + before.T)


def test_fuse_read_after_write_keeps_the_order(agree):
    t = Tape()
    x, y = t.input(F32, 8), t.input(F32, 8)
    a = t.op("add", x, y)
    t.op("mul", x, 3.0, into=x)
    b = t.op("add", x, y)
    ones = np.ones(8, np.float32)
    ways, memory = agree(t, [(x, ones), (y, ones)])
    assert ways.value(memory, a)[0] == 2.0 and ways.value(memory, b)[0] == 4.0


def test_alloc_of_partly_written_memory_is_zeroed(agree):
    t = Tape()
    x = t.input(F32, 4)
    y = t.op("add", x, 1.0)
    half = y.seen((2,), (1,))
    z = t.op("mul", half, half)
    ways, memory = agree(t, [(x, np.zeros(4, np.float32))])
    assert ways.value(memory, z).tolist() == [1.0, 1.0]


def test_fuse_broadcasts_transposes_and_casts_gives_one_kernel(agree):
    t = Tape()
    x, y = t.input(BF16, 3, 5, 4), t.input(I32, 4)
    turned = x.seen((5, 3, 4), (4, 20, 1))
    s = t.op("add", turned, y)
    wide = t.copy(s, F32)
    t.free(s)
    r = t.op("exp", wide)
    t.free(wide)
    t.op("sum", r, (-1,))
    t.free(r)
    xs = (np.abs(normal(3, 5, 4)).view(np.uint32) >> 16).astype(np.uint16)
    ways, _ = agree(t, [(x, xs), (y, np.arange(4, dtype=np.int32))])
    assert len(kernels(ways.fused)) == 1


# -- removed -------------------------------------------------------------------------------------------------------------


def test_passes_remove_dead_and_repeated_instructions_with_reasons(agree):
    t = Tape()
    x = t.input(F32, 8)
    dead = t.op("exp", x)
    t.free(dead)
    a, b = t.op("relu", x), t.op("relu", x)
    y = t.op("add", a, b)
    t.free(a, b)
    ways, memory = agree(t, [(x, np.ones(8, np.float32))])
    assert sorted(ways.fused.removed.values()) == [
        "an earlier instruction computes the same",
        "its result is never read",
    ]
    assert ways.value(memory, y)[0] == 2.0


@pytest.mark.parametrize(
    "dead",
    [
        lambda t: t.op("embedding", t.input(F32, 8, 4), t.input(I64, 3)),
        lambda t: t.op("relu", t.input(DType.C64, 4)),
        lambda t: t.op("gelu", t.input(DType.BOOL, 4)),
        lambda t: t.op("amax", t.input(F32, 4, 0), (1,)),
    ],
)
def test_remove_dead_keeps_an_instruction_that_may_raise(dead):
    t = Tape()
    t.free(dead(t))
    program, _ = t.program()
    assert not compile_program(program).removed


# -- laws and text -------------------------------------------------------------------------------------------------------


def test_trace_of_all_passes_shows_every_stage():
    t = Tape()
    t.op("relu", t.input(F32, 8))
    program, _ = t.program()
    trace = Trace()
    compile_program(program, trace=trace)
    assert [name for name, _ in trace.stages] == [
        "resolve-views",
        "expand",
        "remove-redundant",
        "remove-dead",
        "fuse",
        "lower",
    ]
    assert "k_relu" in str(trace)


def test_kernel_text_reads_back_as_the_same_kernel():
    t = Tape()
    t.op("log_softmax", t.input(F32, 4, 8), 1)
    program, _ = t.program()
    (kernel,) = compile_program(program).kernels
    assert read(write(kernel)) == kernel


@pytest.mark.parametrize(
    ("law", "change"),
    [
        ("covers", lambda steps: steps[:-1]),
        ("covers", lambda steps: [*steps, steps[-1]]),
        ("order", lambda steps: [steps[0], steps[2], steps[3], steps[1]]),
        ("memory", lambda steps: steps[1:]),
    ],
)
def test_verify_plan_with_changed_steps_raises(law, change):
    from dataclasses import replace

    t = Tape()
    x = t.input(F32, 8)
    t.op("exp", t.op("relu", x))
    program, _ = t.program()
    plan = compile_program(program, fusing=False)
    with pytest.raises(PlanError, match=law):
        plans.verify(replace(plan, steps=tuple(change(list(plan.steps)))))


# -- random programs -----------------------------------------------------------------------------------------------------

UNARY = ("neg", "abs", "exp", "tanh", "erf", "sigmoid", "relu", "silu", "gelu", "sqrt", "log", "sin", "cos", "floor", "round",
         "isnan", "logical_not", "sign", "reciprocal", "rsqrt", "expm1", "log1p")  # fmt: skip
BINARY = ("add", "sub", "mul", "div", "maximum", "minimum", "lt", "eq", "ge", "logical_and")
FOLDS = ("sum", "mean", "amax", "amin", "any", "all")
KINDS = ("unary", "binary", "number", "fold", "extreme", "where", "cast", "place", "softmax", "concat", "triangle", "pick",
         "quotient", "free")  # fmt: skip


@st.composite
def tapes(draw):
    """Draw a tape of random instructions over tensors that broadcast, with frees at random positions."""
    t = Tape()
    rows, cols = draw(st.sampled_from([(1, 3), (3, 5), (4, 130), (2, 257), (140, 12)]))
    shapes = [(rows, cols), (cols,), (rows, 1), (1,)]
    dtypes = draw(st.sampled_from([[F32], [F32, F64], [F32, BF16, F16], [F32, I32, BOOL], [I64, I32, BOOL], [F16]]))
    live, inputs = [], []
    for _ in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from(dtypes))
        x = t.input(dtype, *draw(st.sampled_from(shapes)))
        n = x.view.numel
        values = RNG.standard_normal(n, dtype=np.float32) * 3
        made = {
            F32: values, F64: values.astype(np.float64), F16: values.astype(np.float16), BOOL: values > 0,
            BF16: (values.view(np.uint32) >> 16).astype(np.uint16), I32: values.astype(np.int32), I64: values.astype(np.int64),
        }[dtype]  # fmt: skip
        inputs.append((x, made))
        live.append(x)
    given_slots = {x.slot for x in live}
    for _ in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(KINDS))
        a = draw(st.sampled_from(live))
        b = draw(st.sampled_from(live))
        is_bool = a.view.dtype is BOOL
        try:
            if kind == "unary":
                live.append(t.op(draw(st.sampled_from(UNARY)), a))
            elif kind == "binary":
                live.append(t.op(draw(st.sampled_from(BINARY)), a, b))
            elif kind == "number" and not is_bool:
                live.append(t.op(draw(st.sampled_from(["add", "mul", "lt"])), a, draw(st.sampled_from([2, 0.5, -3]))))
            elif kind == "fold":
                dims = draw(st.sampled_from([(-1,), (0,), tuple(range(len(a.view.sizes)))]))
                live.append(t.op(draw(st.sampled_from(FOLDS)), a, dims, draw(st.booleans())))
            elif kind == "extreme":
                live.append(t.op(draw(st.sampled_from(["argmax", "argmin"])), a, draw(st.sampled_from([None, 0, -1]))))
            elif kind == "concat" and a.view.dtype is b.view.dtype:
                live.append(t.op("concat", (a, b, a), draw(st.sampled_from([0, -1]))))
            elif kind == "triangle":
                live.append(t.op(draw(st.sampled_from(["tril", "triu"])), a, draw(st.integers(-2, 2))))
            elif kind == "pick" and len(a.view.sizes) == 2:
                largest = t.op("argmax", b, -1)
                t.op("clamp_max", largest, a.view.sizes[0] - 1, into=largest)
                row = draw(st.sampled_from(["embedding", "index_select"]))
                flat = largest.seen((largest.view.numel,), (1,))
                live.append(t.op("embedding", a, largest) if row == "embedding" else t.op(row, a, 0, flat))
            elif kind == "quotient" and not is_bool:
                live.append(
                    t.op(draw(st.sampled_from(["remainder", "div_floor", "fmod"])), a, draw(st.sampled_from([3, -2])))
                )
            elif kind == "where" and is_bool:
                live.append(t.op("where", a, b, b))
            elif kind == "cast":
                live.append(t.copy(a, draw(st.sampled_from(dtypes))))
            elif kind == "place" and not is_bool:
                t.op(draw(st.sampled_from(["mul", "add"])), a, 2, into=a)
            elif kind == "softmax" and a.view.dtype in (F32, F64, F16, BF16):
                live.append(t.op(draw(st.sampled_from(["softmax", "log_softmax"])), a, draw(st.sampled_from([0, -1]))))
            elif kind == "free" and len(live) > 1 and a.slot not in given_slots:
                t.free(a)
                live = [x for x in live if x.slot != a.slot]
        except Exception as e:  # the op table rejects this instruction, so skip it
            if type(e).__name__ != "RuleError":
                raise
    x = t.input(F32, 3)
    t.op("neg", x)
    return t, [*inputs, (x, np.ones(3, np.float32))]


@given(tapes())
# Each example builds several kernels, so examples are not shrunk: the failing program is short enough to read.
@settings(
    max_examples=int(os.environ.get("WOOLY_EXAMPLES", examples(4, 24))),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
def test_random_program_run_in_all_ways_has_the_same_bits(agree, made):
    tape, inputs = made
    program, slots = tape.program()
    inputs = [(x, v) for x, v in inputs if x.slot in slots]
    plan = compile_program(program, checks=True)
    single = compile_program(program, fusing=False, checks=True)
    if any(isinstance(s, LibraryStep) for s in (*plan.steps, *single.steps)):
        return
    agree(tape, inputs)
