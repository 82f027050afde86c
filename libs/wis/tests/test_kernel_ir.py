"""Kernel IR: its text round-trips, its laws hold, and its interpreter computes the documented results."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wooly_testkit import kernel_scalars
from wooly_testkit.effort import examples
from wooly_testkit.kernel_interpreter import run
from wooly_wis.dtypes import DType
from wooly_wis.kernel import ir, ranges
from wooly_wis.kernel.builder import KernelBuilder
from wooly_wis.kernel.laws import HEAD_LAWS, STATEMENT_LAWS, KernelError, verify
from wooly_wis.kernel.ops import OPS, rounded
from wooly_wis.kernel.text import KernelTextError, digest, read, write
from wooly_wis.program import Role
from wooly_wis.scalar_expr import PRIMITIVES

F32, I64, BOOL = DType.F32, DType.I64, DType.BOOL


def scale(n=5):
    k = KernelBuilder("scale", (n,))
    x, y = k.array("x", F32, n), k.array("y", F32, n, Role.OUT)
    w = k.scalar("w", F32)
    (i,) = k.points
    k.store(y, i, k.apply("mul", k.load(x, i), k.param(w)))
    return k.finish()


def row_sums(rows=2, n=5, lanes=2):
    k = KernelBuilder("row_sums", (rows,))
    x, y = k.array("x", F32, rows * n), k.array("y", F32, rows, Role.OUT)
    (r,) = k.points
    with k.reduce(n, lanes, [k.const(F32, 0.0)], k.each("add")) as fold:
        at = k.apply("add", k.apply("mul", r, k.const(I64, n)), fold.index)
        fold.yields = (k.load(x, at),)
    k.store(y, r, fold.results[0])
    return k.finish()


def everything():
    """A kernel with every kind of statement."""
    k = KernelBuilder("everything", (3,))
    x = k.array("x", DType.I64, 12)
    y = k.array("y", DType.I64, 12, Role.INOUT)
    s = k.scratch("s", DType.I64, 4)
    n = k.scalar("n", DType.I64)
    (p,) = k.points
    four, zero, one = k.const(I64, 4), k.const(I64, 0), k.const(I64, 1)
    with k.lanes(4) as j:
        at = k.apply("add", k.apply("mul", p, four), j)
        k.store(s, j, k.load(x, at))
    with k.loop(zero, four, 1, [zero, one]) as loop:
        v = k.load(s, loop.index)
        loop.yields = (k.apply("add", loop.args[0], v), k.apply("mul", loop.args[1], v))
    with k.when(k.apply("lt", loop.results[0], k.param(n)), [I64]) as choice:
        choice.yields.append((loop.results[0],))
        k.otherwise()
        choice.yields.append((k.apply("neg", loop.results[1]),))
    old = k.atomic("add", y, zero, choice.results[0], checked=True)
    with k.reduce(4, 4, [zero, k.const(I64, -(1 << 63))], k.each("add", "max")) as fold:
        v = k.load(s, fold.index)
        fold.yields = (v, v)
    k.store(y, k.apply("add", p, one), k.apply("add", fold.results[0], fold.results[1]))
    k.store(y, k.apply("add", old, four), p, k.apply("gt", p, one), checked=True)
    return k.finish()


@pytest.mark.parametrize("make", [scale, row_sums, everything])
def test_kernel_text_round_trips(make):
    kernel = make()
    verify(kernel)
    assert read(write(kernel)) == kernel
    assert digest(read(write(kernel))) == digest(kernel)


def test_kernel_text_of_everything_matches_the_expected_text():
    assert write(scale()) == (
        "wooly.kernel 1\nkernel scale\nin x f32[5]\nout y f32[5]\nscalar w f32\nspace %0 < 5 {\n  %1 = load x[%0]\n"
        "  %2 = scalar w\n  %3 = mul f32 %1, %2\n  store y[%0] = %3\n}\n"
    )


def test_interpreter_runs_every_kind_of_statement():
    x, y = list(range(12)), [0] * 12
    run(everything(), {"x": x, "y": y}, {"n": 10})
    # rows 0..3, 4..7, 8..11: sums 6, 22, 38; products 0, 840, 7920; only the first sum is below 10
    assert y[0] == 6 - 840 - 7920
    assert y[1:4] == [6 + 3, 22 + 7, 38 + 11]


def test_reduce_folds_lanes_in_order_then_pairs():
    x = [1e8, 1.0, -1e8, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    y = [0.0, 0.0]
    run(row_sums(), {"x": x, "y": y})
    # Lane 0: 1e8, -1e8, 1.0; lane 1: 1.0, 1.0. In sequential order, the first 1.0 would be lost in 1e8.
    assert y[0] == 3.0


def test_interpreter_checked_access_out_of_range_reads_nothing():
    k = KernelBuilder("shift", (4,))
    x, y = k.array("x", F32, 4), k.array("y", F32, 4, Role.OUT)
    (i,) = k.points
    k.store(y, i, k.load(x, k.apply("add", i, k.const(I64, 2)), checked=True))
    out = [9.0] * 4
    run(k.finish(), {"x": [1.0, 2.0, 3.0, 4.0], "y": out})
    assert out == [3.0, 4.0, 0.0, 0.0]


# -- laws ----------------------------------------------------------------------------------------------------------------


def broken(text, law):
    with pytest.raises(KernelError) as e:
        verify(read(text))
    assert e.value.law == law


HEAD = "wooly.kernel 1\nkernel k\nin x f32[8]\nout y f32[8]\nscratch s f32[8]\nspace %0 < 8 {\n"


@pytest.mark.parametrize(
    ("law", "body"),
    [
        ("scope", "  store y[%0] = %7\n"),
        ("scope", "  lanes %1 < 4 {\n    %2 = load x[%1]\n  }\n  store y[%0] = %2\n"),
        ("numbers", "  %2 = load x[%0]\n"),
        ("constant", "  %1 = const i8 200\n"),
        ("scalar", "  %1 = scalar w\n"),
        ("operation", "  %1 = load x[%0]\n  %2 = add f64 %1, %1\n"),
        ("operation", "  %1 = load x[%0]\n  %2 = nonsense f32 %1\n"),
        ("operation", "  %1 = load x[%0]\n  %2 = shl f32 %1, %1\n"),
        ("access", "  %1 = load y[%0]\n"),
        ("access", "  %1 = load x[%0]\n  store x[%0] = %1\n"),
        ("access", "  store y[%0] = %0\n"),
        ("bounds", "  %1 = const i64 1\n  %2 = add i64 %0, %1\n  %3 = load x[%2]\n"),
        ("bounds", "  %1 = neg i64 %0\n  %2 = load x[%1]\n"),
        ("bounds", "  %1 = const i64 4611686018427387904\n  %2 = const i64 4\n  %3 = mul i64 %1, %2\n  %4 = load x[%3]\n"),
        ("loops", "  for %1 = %0 to %0 step 0 {\n  }\n"),
        ("loops", "  %1 = const f32 0.0\n  %2 = reduce %3 < 8 lanes 3 from %1 {\n    yield %1\n  } combine %4 with %5 {\n"
         "    yield %4\n  }\n"),
        ("lanes", "  lanes %1 < 4 {\n    lanes %2 < 4 {\n    }\n  }\n"),
        ("lanes", "  %1 = const i64 0\n  lanes %2 < 4 {\n    %3 = load s[%1]\n    store s[%2] = %3\n  }\n"),
        ("lanes", "  %1 = const f32 0.0\n  %2 = reduce %3 < 8 lanes 2 from %1 {\n    yield %1\n  } combine %4 with %5 {\n"
         "    %6 = const i64 0\n    %7 = load x[%6]\n    yield %4\n  }\n"),
        ("yields", "  %1 = const f32 0.0\n  %2 = reduce %3 < 8 lanes 2 from %1 {\n    yield %3\n  } combine %4 with %5 {\n"
         "    yield %4\n  }\n"),
        ("work", "  %1 = const i64 0\n  %2 = const i64 9223372036854775807\n  for %3 = %1 to %2 step 1 {\n"
         "    %4 = const f32 0.0\n  }\n"),
    ],
)  # fmt: skip
def test_verifier_names_the_broken_law(law, body):
    broken(HEAD + body + "}\n", law)


@pytest.mark.parametrize(
    ("law", "head"),
    [
        ("names", "in x f32[8]\nin x f32[8]\nspace {\n"),
        ("memory", "in x c64[8]\nspace {\n"),
        ("memory", "in x f32[0]\nspace {\n"),
        ("memory", "scratch x f64[100000]\nspace {\n"),
        ("space", "space %0 < 0 {\n"),
        ("space", "space %1 < 4 {\n"),
    ],
)
def test_verifier_checks_the_head(law, head):
    broken(f"wooly.kernel 1\nkernel k\n{head}}}\n", law)


def test_every_law_is_broken_by_some_test():
    named = {law.name for law in (*HEAD_LAWS, *STATEMENT_LAWS)}
    marks = [
        m.args[1] for t in (test_verifier_names_the_broken_law, test_verifier_checks_the_head) for m in t.pytestmark
    ]
    assert named <= {case[0] for cases in marks for case in cases}


def test_carried_values_prove_nothing_about_an_index():
    k = KernelBuilder("walk", ())
    x, y = k.array("x", F32, 8), k.array("y", F32, 8, Role.OUT)
    zero, eight = k.const(I64, 0), k.const(I64, 8)
    with k.loop(zero, eight, 1, [zero]) as loop:
        k.store(y, loop.index, k.load(x, loop.args[0]))
        loop.yields = (k.apply("add", loop.args[0], k.const(I64, 1)),)
    with pytest.raises(KernelError, match="bounds"):
        verify(k.finish())


# -- text from strangers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "wooly.kernel 2\n", write(scale()) + "x", write(scale()).replace("  %1", " %1"),
                                  HEAD + "  if %0 {\n" * 100, HEAD + "  %1 = const f32 nope\n}\n"])  # fmt: skip
def test_reader_invalid_text_is_refused(text):
    with pytest.raises(KernelTextError):
        read(text)


@given(st.data())
@settings(max_examples=examples(60, 200), deadline=None)
def test_reader_and_verifier_survive_mutations(data):
    text = write(everything())
    lines = text.split("\n")
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(lines) - 1))
        kind = data.draw(st.sampled_from(["drop", "double", "swap", "digit"]))
        if kind == "drop":
            lines = lines[:at] + lines[at + 1 :] or [""]
        elif kind == "double":
            lines.insert(at, lines[at])
        elif kind == "swap":
            to = data.draw(st.integers(0, len(lines) - 1))
            lines[at], lines[to] = lines[to], lines[at]
        else:
            lines[at] = lines[at].replace(str(data.draw(st.integers(0, 9))), str(data.draw(st.integers(0, 99))), 1)
    try:
        kernel = read("\n".join(lines))
        verify(kernel)
    except (KernelTextError, KernelError):
        return
    # a mutant that the verifier accepts must run without an access out of bounds
    run(kernel, {a.name: [1] * a.numel for a in kernel.arrays}, {s.name: 3 for s in kernel.scalars})


# -- arithmetic ----------------------------------------------------------------------------------------------------------


def test_operations_match_the_primitives():
    missing = set(PRIMITIVES) - set(OPS)
    assert missing == {"conj"}  # kernels have no complex elements
    for name in set(PRIMITIVES) & set(OPS):
        assert OPS[name].arity == PRIMITIVES[name][0]


@given(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(-(1 << 63), (1 << 63) - 1))
@settings(deadline=None)
def test_intervals_contain_the_results_of_operations(a, b):
    for op in ("add", "sub", "mul", "max", "min", "div_floor", "div_trunc", "fmod", "and", "neg", "abs"):
        args = [a, b][: OPS[op].arity]
        got = kernel_scalars.apply(op, I64, args, [I64] * len(args))
        low, high = ranges.apply(op, I64, [(min(v, v // 2), max(v, v // 2)) for v in args])
        assert low <= got <= high, op


@pytest.mark.parametrize(
    ("value", "source", "target", "expected"),
    [
        (300, I64, DType.U8, 44),
        (-1, DType.I32, DType.U64, (1 << 64) - 1),
        (3e9, F32, DType.I32, 2147483647),
        (-math.inf, F32, I64, -(1 << 63)),
        (math.nan, F32, DType.I32, 0),
        (-2.9, F32, DType.I32, -2),
        (1.0 + 2**-9, F32, DType.BF16, 1.0),
        (1.0 + 3 * 2**-9, F32, DType.BF16, 1.0 + 2**-7),
        (65520.0, F32, DType.F16, math.inf),
        ((1 << 53) + (1 << 29) + 1, I64, F32, float((1 << 53) + (1 << 30))),
        (0.5, F32, BOOL, True),
    ],
)
def test_convert_rounds_to_nearest_and_saturates(value, source, target, expected):
    assert kernel_scalars.convert(value, source, target) == expected


def test_integers_wrap_and_quotients_by_zero_are_zero():
    i8 = DType.I8
    assert kernel_scalars.apply("add", i8, [127, 1], [i8, i8]) == -128
    assert kernel_scalars.apply("div_trunc", i8, [-128, -1], [i8, i8]) == -128
    assert kernel_scalars.apply("div_floor", i8, [5, 0], [i8, i8]) == 0
    assert kernel_scalars.apply("fmod", i8, [5, 0], [i8, i8]) == 0
    assert kernel_scalars.apply("shr", DType.U8, [200, 9], [DType.U8] * 2) == 100


def test_max_and_min_with_not_a_number_give_not_a_number():
    for op in ("max", "min"):
        for pair in ([math.nan, 1.0], [1.0, math.nan]):
            assert math.isnan(kernel_scalars.apply(op, F32, pair, [F32, F32]))


def test_walk_yields_outer_statements_first():
    kinds = [type(s).__name__ for s in ir.walk(row_sums().body)]
    assert kinds == ["Const", "Reduce", "Const", "Apply", "Apply", "Load", "Apply", "Store"]


def test_fma_of_f32_is_rounded_once_where_f64_would_round_twice():
    """The product is half way between two f32 numbers. The addend is too small for an f64, and decides the rounding."""
    a = 1 + 2.0**-12
    assert kernel_scalars.apply("fma", F32, [a, a, 2.0**-80], [F32] * 3) == 1 + 2.0**-11 + 2.0**-23
    assert kernel_scalars.apply("fma", F32, [a, a, -(2.0**-80)], [F32] * 3) == 1 + 2.0**-11
    assert kernel_scalars.apply("fma", F32, [a, a, 0.0], [F32] * 3) == 1 + 2.0**-11
    assert kernel_scalars.apply("fma", F32, [3e38, 2.0, -3e38], [F32] * 3) == rounded(3e38, F32)
    assert math.isnan(kernel_scalars.apply("fma", F32, [math.inf, 0.0, 1.0], [F32] * 3))
