"""A program at tier 0 and as a plan has the same bits where this is promised, for every switch point and every split."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from wooly_executor.runtime.buffers import Buffer
from wooly_testkit.effort import examples
from wooly_testkit.tape import Tape
from wooly_wis.dtypes import DType
from wooly_wis.errors import RuleError
from wooly_wis.plan import KernelStep
from wooly_wis.program import Instruction, Program

F32, BF16, I64, I32, BOOL = DType.F32, DType.BF16, DType.I64, DType.I32, DType.BOOL
#: Large enough that a kernel is faster than two library calls.
ROWS, COLUMNS = 16, 8209
EXACT = ("neg", "abs", "reciprocal", "rsqrt", "relu", "sign", "floor", "isnan", "logical_not")
SMOOTH = ("exp", "tanh", "erf", "sigmoid", "silu", "gelu", "sin", "cos", "sqrt")
BINARY = ("add", "sub", "mul", "div", "maximum", "minimum", "lt", "ge", "logical_or")
FOLDS = ("sum", "mean", "amax", "any")
PER_EXAMPLE = settings(
    max_examples=examples(2, 8),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],  # each example builds several kernels
)


@st.composite
def tapes(draw, operations=EXACT + SMOOTH, dtypes=(F32, F32, BF16, I64, I32, BOOL)):
    """A tape, and the kinds of its input tensors."""
    t = Tape()
    shapes = [(ROWS, COLUMNS), (ROWS, COLUMNS), (COLUMNS,), (ROWS, 1)]
    live = [t.input(draw(st.sampled_from(dtypes)), *shapes[0])]
    live += [
        t.input(draw(st.sampled_from(dtypes)), *draw(st.sampled_from(shapes))) for _ in range(draw(st.integers(0, 3)))
    ]
    inputs = list(live)
    for _ in range(draw(st.integers(3, 14))):
        kind = draw(
            st.sampled_from(
                ["unary", "unary", "binary", "binary", "number", "fold", "cast", "place", "softmax", "free"]
            )
        )
        a, b = draw(st.sampled_from(live)), draw(st.sampled_from(live))
        try:
            if kind == "unary":
                live.append(t.op(draw(st.sampled_from(operations)), a))
            elif kind == "binary":
                live.append(t.op(draw(st.sampled_from(BINARY)), a, b))
            elif kind == "number" and a.view.dtype is not BOOL:
                live.append(
                    t.op(draw(st.sampled_from(["add", "mul", "pow", "lt"])), a, draw(st.sampled_from([2, 0.5, 3.0])))
                )
            elif kind == "fold":
                live.append(t.op(draw(st.sampled_from(FOLDS)), a, (-1,), True))
            elif kind == "cast":
                live.append(t.copy(a, draw(st.sampled_from(dtypes))))
            elif kind == "place" and a.view.dtype is not BOOL:
                t.op(draw(st.sampled_from(["mul", "add"])), a, 2, into=a)
            elif kind == "softmax" and a.view.dtype in (F32, BF16):
                live.append(t.op("softmax", a, -1))
            elif kind == "free" and a not in inputs:
                t.free(a)
                live.remove(a)
        except RuleError:
            continue
    return t, inputs


def inputs_of(tape, inputs, sample):
    program, slots = tape.program()
    contents = {slots[x.slot]: sample(x.view.dtype, x.view.numel, x.slot) for x in inputs if x.slot in slots}
    return program, contents


@given(made=tapes())
@PER_EXAMPLE
def test_exact_plan_of_random_program_equals_library_bitwise(compiled, sample, made):
    tape, inputs = made
    program, contents = inputs_of(tape, inputs, sample)
    if not program.body:
        return
    before = compiled.run(compiled.ready(program).prepared, contents, tape.params)
    if before[1] is not None:  # the library does not support this, and the plan reports it
        return
    prepared, _ = compiled.plan(program, tape.params, "exact")
    assert compiled.run(prepared, contents, tape.params) == before
    for _ in range(3):  # repeated until the library steps are combined
        assert compiled.run(prepared, contents, tape.params) == before
    edges = range(1, len(program.body), 2)
    assert compiled.run(prepared, contents, tape.params, edges) == before


@given(made=tapes(operations=SMOOTH[:7], dtypes=(F32,)))
@PER_EXAMPLE
def test_full_plan_equals_library_within_tolerance(compiled, made):
    tape, inputs = made
    generator = torch.Generator().manual_seed(1)
    program, contents = inputs_of(tape, inputs, lambda dtype, n, seed: torch.rand(n, generator=generator) + 0.5)
    if not program.body:
        return
    prepared, _ = compiled.plan(program, tape.params, "full")
    runs = []
    for way in (compiled.ready(program).prepared, prepared):
        buffers = {slot: Buffer(t.nbytes, t.clone()) for slot, t in contents.items()}
        with torch.inference_mode():
            compiled.runtime.run(way, buffers, list(range(program.n_slots)), tape.params)
        runs.append(buffers)
    assert runs[0].keys() == runs[1].keys()
    for slot, b in runs[0].items():
        ours, theirs = runs[1][slot].base.reshape(-1), b.base.reshape(-1)
        if theirs.dtype is torch.float32:
            whole = theirs.isfinite()
            scale = float(theirs[whole].abs().max()) if whole.any() else 1.0
            torch.testing.assert_close(ours.view(torch.float32), theirs, rtol=1e-3, atol=1e-4 * scale, equal_nan=True)


def cut(program, params, at):
    """Split a program in two. Returns the parts with their params, and the slot of the whole for each slot of a part."""
    found, used = [], 0
    for body in (program.body[:at], program.body[at:]):
        forms, slots, mine = {}, {}, []
        for i in body:
            form = program.forms[i.form]
            index = forms.setdefault(form, len(forms))
            mine.append(Instruction(index, tuple([slots.setdefault(s, len(slots)) for s in i.slots])))
        piece = Program(tuple(forms), tuple(mine))
        n = len(piece.param_kinds)
        found.append((piece, params[used : used + n], list(slots)))
        used += n
    return found


@given(made=tapes(), where=st.floats(0.1, 0.9))
@PER_EXAMPLE
def test_full_plan_of_program_split_anywhere_has_same_bits(compiled, sample, bits, made, where):
    tape, inputs = made
    program, contents = inputs_of(tape, inputs, sample)
    if len(program.body) < 2:
        return
    whole, _ = compiled.plan(program, tape.params, "full")
    expected = compiled.run(whole, contents, tape.params)
    if expected[1] is not None:
        return
    buffers = {slot: Buffer(t.nbytes, t.clone()) for slot, t in contents.items()}
    for piece, params, slots in cut(program, tape.params, max(1, int(len(program.body) * where))):
        prepared, _ = compiled.plan(piece, params, "full")
        with torch.inference_mode():
            outcome = compiled.runtime.run(prepared, buffers, slots, params)
        assert outcome.failed_at is None
    assert {slot: bits(b) for slot, b in buffers.items()} == expected[0]


def perceptron(rows):
    """Two products with operations in between, with a bias each, as `linear` and as `addmm`."""
    t = Tape()
    x, w, b, v, c = (t.input(F32, *s) for s in [(rows, 256), (384, 256), (384,), (384, 256), (256,)])
    h = t.op("linear", x, w, b)
    g = t.op("gelu", h)
    t.free(h)
    y = t.op("addmm", c, g, v)
    t.free(g)
    t.op("add", x, y)
    program, slots = t.program()
    generator = torch.Generator().manual_seed(rows)
    contents = {slots[i.slot]: torch.randn(i.view.numel, generator=generator) for i in (x, w, b, v, c)}
    return t, program, contents


@pytest.mark.parametrize("rows", [8, *[pytest.param(n, marks=pytest.mark.slow) for n in (40, 300)]])
def test_products_of_program_split_anywhere_have_same_bits(compiled, bits, rows):
    """In mode `full`: few and many rows (the library uses different routines), with biases inside and outside of kernels."""
    tape, program, contents = perceptron(rows)
    whole, _ = compiled.plan(program, tape.params, "full")
    expected = compiled.run(whole, contents, tape.params)
    assert expected[1] is None and compiled.run(whole, contents, tape.params) == expected
    for at in range(1, len(program.body)):
        buffers = {slot: Buffer(t.nbytes, t.clone()) for slot, t in contents.items()}
        for piece, params, slots in cut(program, tape.params, at):
            prepared, _ = compiled.plan(piece, params, "full")
            with torch.inference_mode():
                assert compiled.runtime.run(prepared, buffers, slots, params).failed_at is None
        assert {slot: bits(b) for slot, b in buffers.items()} == expected[0]


@pytest.mark.parametrize("rows", [pytest.param(40, marks=pytest.mark.slow), 300])
def test_products_of_exact_plans_use_library(compiled, rows):
    tape, program, contents = perceptron(rows)
    exact, _ = compiled.plan(program, tape.params, "exact")
    tier0 = compiled.run(compiled.ready(program).prepared, contents, tape.params)
    assert tier0[1] is None and compiled.run(exact, contents, tape.params) == tier0
    full = compiled.run(compiled.plan(program, tape.params, "full")[0], contents, tape.params)
    for slot, left in full[0].items():
        ours, theirs = (torch.frombuffer(bytearray(b), dtype=torch.float32) for b in (left, tier0[0][slot]))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-2)  # sums of hundreds of numbers


# -- the switch ----------------------------------------------------------------------------------------------------------


def training():
    """An optimizer step with state from step to step."""
    t = Tape()
    p, g, m = (t.input(F32, ROWS, COLUMNS) for _ in range(3))
    t.op("mul", m, 0.9, into=m)
    scaled = t.op("mul", g, 0.1)
    t.op("add", m, scaled, into=m)
    t.free(scaled)
    size = t.op("sum", m, (-1,), True)
    d = t.op("abs", m)
    shifted = t.op("add", d, 1e-3)
    t.free(d)
    step = t.op("div", m, shifted)
    t.free(shifted)
    t.op("sub", p, step, into=p)
    t.free(step)
    small = t.op("mul", size, 1e-5)
    t.free(size)
    e = t.op("exp", small)
    t.free(small)
    t.op("mul", p, e, into=p)
    t.free(e)
    t.op("relu", p, into=None)
    return t, (p, g, m)


def test_switch_to_plan_at_any_step_gives_same_bits(compiled, bits):
    tape, inputs = training()
    program, slots = tape.program()
    contents = {
        slots[x.slot]: torch.randn(x.view.numel, generator=torch.Generator().manual_seed(x.slot)) for x in inputs
    }
    steps, n = 8, program.n_slots
    kept = [s for s in range(n) if s not in contents]

    def script(switch):
        buffers = {slot: Buffer(t.nbytes, t.clone()) for slot, t in contents.items()}
        seen = []
        prepared, plan = compiled.plan(program, tape.params, "exact")
        assert any(isinstance(s, KernelStep) for s in plan.steps)
        for k in range(steps):
            for slot in kept:
                buffers.pop(slot, None)
            way = prepared if k >= switch else compiled.ready(program).prepared
            with torch.inference_mode():
                outcome = compiled.runtime.run(way, buffers, list(range(n)), tape.params)
            assert outcome.failed_at is None
            assert all(b.base.isfinite().all() for b in buffers.values())
            seen.append({slot: bits(b) for slot, b in buffers.items()})
        return seen

    never = script(steps)
    for switch in range(steps):
        for a, b in zip(never, script(switch), strict=True):
            assert a == b


# -- failures ------------------------------------------------------------------------------------------------------------


def test_plan_with_failing_step_poisons_later_results(compiled):
    t = Tape()
    x, index = t.input(F32, ROWS, COLUMNS), t.input(I64, 4)
    y = t.op("add", t.op("mul", x, 2.0), 1.0)
    z = t.op("embedding", x, index)
    w = t.op("mul", t.op("abs", z), y.seen((4, COLUMNS), (COLUMNS, 1)))
    program, slots = t.program()
    prepared, plan = compiled.plan(program, t.params, "exact")
    assert sum(isinstance(s, KernelStep) for s in plan.steps) >= 1
    contents = {slots[x.slot]: torch.ones(ROWS * COLUMNS), slots[index.slot]: torch.full((4,), 99)}
    left, failed_at, error = compiled.run(prepared, contents, t.params)
    tier0 = compiled.run(compiled.ready(program).prepared, contents, t.params)
    assert failed_at == tier0[1] and error == tier0[2] and "index out of range" in error
    assert left[slots[w.slot]] == error and left[slots[z.slot]] == error
    assert left[slots[y.slot]] == tier0[0][slots[y.slot]] and left[slots[x.slot]] == tier0[0][slots[x.slot]]


def test_plan_on_poisoned_memory_reports_original_error(compiled):
    tape, inputs = training()
    program, slots = tape.program()
    prepared, _ = compiled.plan(program, tape.params, "exact")
    for _ in range(4):
        buffers = {slots[x.slot]: Buffer(4 * x.view.numel, torch.zeros(x.view.numel)) for x in inputs}
        buffers[slots[inputs[1].slot]] = Buffer(4 * ROWS * COLUMNS, None, None, "lost to an earlier failure")
        with torch.inference_mode():
            outcome = compiled.runtime.run(prepared, buffers, list(range(program.n_slots)), tape.params)
        assert outcome.failed_at is not None and outcome.error == "lost to an earlier failure"
        assert buffers[slots[inputs[0].slot]].poison == "lost to an earlier failure"


def test_results_are_counted_by_source(compiled):
    tape, _ = training()
    program, _ = tape.program()
    prepared, plan = compiled.plan(program, tape.params, "exact")
    by_kernels = sum(len(s.lines) for s in plan.steps if isinstance(s, KernelStep))
    assert (prepared.by_kernel, prepared.by_library) == (by_kernels, 12 - by_kernels) and by_kernels >= 8


def test_plan_with_index_out_of_range_fails_as_library(compiled):
    """The kernel stays inside its arrays and reports the wrong index, and the run fails as at tier 0."""
    t = Tape()
    w, i = t.input(DType.F32, 300, 512), t.input(DType.I64, 200)
    y = t.op("embedding", w, i)
    z = t.op("relu", y)
    t.free(y)
    t.op("exp", z)
    program, slots = t.program()
    prepared, plan = compiled.plan(program, t.params, "full")
    assert any("embedding" in s.kernel.name for s in plan.steps if isinstance(s, KernelStep))
    weight = torch.randn(300, 512)
    for index in (torch.arange(200), torch.full((200,), 300), torch.full((200,), -(1 << 63))):
        contents = {slots[w.slot]: weight, slots[i.slot]: index}
        before = compiled.run(compiled.ready(program).prepared, contents, t.params)
        after = compiled.run(prepared, contents, t.params)
        assert (before[1] is None) == (after[1] is None) and before[2] == after[2]
        if before[1] is None:
            torch.testing.assert_close(*[
                torch.frombuffer(bytearray(left[slots[z.slot]]), dtype=torch.float32) for left, *_ in (before, after)
            ])  # fmt: skip
