"""The prepared runtime against the reference, bit for bit: generated programs, and results that are difficult to adopt."""

import copy
import gc
import platform
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from wooly_executor.programs import ProgramStore
from wooly_executor.runtime import adoption, combining, lowering, preparation, segments
from wooly_executor.runtime import prepared as prepared_programs
from wooly_executor.runtime.bindings import BindingCheck
from wooly_executor.runtime.buffers import TORCH_DTYPE, WIS_DTYPE, Buffer, as_view, bytes_of
from wooly_executor.runtime.invocation import deterministic
from wooly_executor.runtime.torch_cpu import TorchCpuRuntime
from wooly_testkit.effort import examples
from wooly_testkit.reference import ReferenceRuntime
from wooly_wis.dtypes import DType
from wooly_wis.messages import DeviceFacts
from wooly_wis.program import OperandRef, ParamKind, ParamRef, View

REFS = tuple(OperandRef(i) for i in range(4))
RUNTIMES = (TorchCpuRuntime, ReferenceRuntime)
DTYPES = [DType.F32, DType.F64, DType.BF16, DType.F16, DType.I64, DType.U8, DType.BOOL, DType.C64]
#: Operator, number of operands before it, arguments after them.
UNARY = [
    ("aten.relu.default", ()),
    ("aten.neg.default", ()),
    ("aten.exp.default", ()),
    ("aten.clone.default", ()),
    ("aten.sgn.default", ()),
    ("aten.isnan.default", ()),
    ("aten.sum.dim_IntList", ((-1,), True)),
    ("aten.mean.dim", ((0,), False)),
    ("aten.cumsum.default", (0,)),
    ("aten._softmax.default", (-1, False)),
    ("aten.amax.default", ((0,),)),
    ("aten.argmax.default", ()),
    ("aten.topk.default", (1, -1)),
    ("aten.max.dim", (0,)),
    ("aten.roll.default", ((1,), (0,))),
    ("aten.flip.default", ((0,),)),
    ("aten._foobar.default", ()),
]
BINARY = [f"aten.{n}" for n in ("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "eq.Tensor", "mm.default")]
IN_PLACE = [f"aten.{n}" for n in ("add_.Tensor", "mul_.Tensor", "sub_.Tensor")]
SHAPES = [(), (1,), (4,), (2, 3), (3, 3), (0, 3), (2, 1, 3)]


@pytest.fixture(autouse=True, scope="module")
def every_call_is_worth_it():
    """Combine steps even if this saves nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(combining, "WORTH", 1)
        yield


@dataclass
class Value:
    """A buffer of a program under construction, with its whole view."""

    name: str
    view: object


def overload(name):
    _, packet, kind = name.split(".")
    return getattr(getattr(torch.ops.aten, packet), kind)


def sample(view):
    return as_view(torch.zeros(max(view.end, 1) + 64, dtype=torch.uint8), view)


def accepts(operator, operands):
    """Whether the library accepts such operands."""
    try:
        with torch.inference_mode():
            overload(operator)(*[sample(v) for _, _, v in operands])
    except RuntimeError:
        return False
    return True


def announced(wis, t):
    return wis.at(WIS_DTYPE[t.dtype], *t.shape, strides=t.stride())


def window(wis, view, how):
    """Return another view of the same buffer."""
    sizes, strides = view.sizes, view.strides
    if how == "transposed" and len(sizes) >= 2:
        return wis.at(view.dtype, *reversed(sizes), strides=tuple(reversed(strides)))
    if how == "tail" and sizes and sizes[0] > 1:
        return wis.at(
            view.dtype, sizes[0] - 1, *sizes[1:], strides=strides, offset=view.offset + strides[0] * view.dtype.itemsize
        )
    if how == "expanded":
        return wis.at(view.dtype, 3, *sizes, strides=(0, *strides))
    return view


@st.composite
def bodies(draw, wis):
    """Draw a program over buffers that it allocates itself, and the number of i64 params that it takes."""
    body, values, params = wis.body(), [], []

    def name():
        return f"v{len(body.names)}"

    def result(operator, operands, tail):
        """Append a call with the outputs that the library would return. A call that the library refuses is left out."""
        try:
            with torch.inference_mode():
                made = overload(operator)(*[sample(v) for _, _, v in operands], *tail)
        except (RuntimeError, IndexError):
            return
        outs = []
        for t in made if isinstance(made, tuple) else (made,):
            outs.append(
                Value(
                    f"v{len(body.names)}",
                    announced(wis, t.contiguous() if t.storage_offset() or 0 in t.stride() else t),
                )
            )
            body.alloc(outs[-1].name, outs[-1].view.end)
        args = (*REFS[: len(operands)], *tail)
        body.call(operator, *operands, *[("out", o.name, o.view) for o in outs], args=args)
        values.extend(outs)

    def operand(role="in", hows=("whole", "whole", "transposed", "tail", "expanded")):
        value = draw(st.sampled_from(values))
        return role, value.name, window(wis, value.view, draw(st.sampled_from(hows)))

    for _ in range(draw(st.integers(1, 3))):
        dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(SHAPES))
        value = Value(name(), wis.at(dtype, *shape))
        body.alloc(value.name, value.view.end).fill(value.name, value.view, draw(st.integers(0, 3)))
        values.append(value)
    for _ in range(draw(st.integers(1, 8))):
        match draw(
            st.sampled_from(["unary", "binary", "binary", "in-place", "cast", "cat", "norm", "random", "fails"])
        ):
            case "unary":
                operator, tail = draw(st.sampled_from(UNARY))
                result(operator, [operand()], tail)
            case "binary":
                result(draw(st.sampled_from(BINARY)), [operand(), operand()], ())
            case "in-place":
                operands = [operand("inout", ("whole", "transposed", "tail")), operand()]
                operator = draw(st.sampled_from(IN_PLACE))
                if accepts(operator, operands):
                    body.call(operator, *operands)
            case "cast":
                _, source, seen = operand()
                value = Value(name(), wis.at(draw(st.sampled_from(DTYPES)), *seen.sizes))
                body.alloc(value.name, value.view.end).copy(source, seen, value.name, value.view)
                values.append(value)
            case "cat":
                _, n, seen = operand()
                value = Value(name(), wis.at(seen.dtype, 2 * seen.sizes[0], *seen.sizes[1:])) if seen.sizes else None
                if value:
                    both = ("in", n, seen), ("in", n, seen), ("out", value.name, value.view)
                    body.alloc(value.name, value.view.end).call("aten.cat.default", *both, args=(REFS[:2], 0))
                    values.append(value)
            case "norm":
                _, n, seen = operand()
                if seen.sizes:
                    result("aten.native_layer_norm.default", [("in", n, seen)], ((seen.sizes[-1],), None, None, 1e-5))
            case "random":
                target = operand("inout", ("whole", "tail"))
                pair = (ParamRef(0), ParamRef(1))
                body.call("aten.uniform_.default", target, params=(ParamKind.I64,) * 2, rng=pair)
                params.extend(draw(st.lists(st.integers(-3, 3), min_size=2, max_size=2)))
            case "fails":
                value = Value(name(), wis.at(DType.F32, 2))
                body.alloc(value.name, 8)
                operands = operand(), ("out", value.name, value.view)
                body.call("aten._softmax.default", *operands, args=(REFS[0], 99, False))
                values.append(value)
    for value in draw(st.lists(st.sampled_from(values), max_size=2, unique_by=lambda v: v.name)):
        body.free(value.name)
    return body, params


def longer(body):
    """Return the definition of another program with the same forms: it makes and frees one more buffer."""
    more = copy.deepcopy(body)
    return more.alloc("another", 8).free("another").raw


def execute(runtime, body, params=(), contents=None, times=2, pieces=1, every=0, known=False):
    """Return the state after each run: the outcome, and size, bytes and poison of each buffer.

    With `pieces` above 1, a run stops at as many places, some of which have no steps between them. With `every`, edges are that
    far apart. With `known`, the forms are known from another program.
    """
    contents = contents or {}
    ids = {name: i for i, name in enumerate(body.names)}
    seen = []
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store = ProgramStore(runtime)
        if known:
            store.define(longer(body))
        ready = store.define(body.raw)
        inner = range(every, len(body.body), every) if every else ()
        if every:
            ready.prepared.edges = inner
        for _ in range(times):
            buffers = {}
            for name, t in contents.items():
                data = t.contiguous().flatten().view(torch.uint8).numpy().tobytes()
                buffers[ids[name]] = runtime.allocate(len(data))
                memoryview(bytes_of(buffers[ids[name]].base, 0, len(data)).numpy())[:] = data
            execution = runtime.begin(ready.prepared, buffers, list(ids.values()), list(params))
            for piece in range(1, pieces + 1):
                ends = [(piece - 1) * len(body.body) // pieces, piece * len(body.body) // pieces]
                edges = [e for e in inner if ends[0] < e < ends[1]] + ends[1:] * (2 if piece < pieces else 1)
                assert len(execution.advance(edges)) == len(edges)
            outcome = execution.outcome
            left = {
                i: (b.nbytes, b.poison, None if b.base is None else bytes(bytes_of(b.base, 0, b.nbytes).numpy()))
                for i, b in sorted(buffers.items())
            }
            described = [o and (o["dtype"], o["sizes"]) for o in outcome.outputs]
            seen.append((outcome.failed_at, outcome.error, described, outcome.values, left))
    return seen


def agree(body, params=(), contents=None):
    """Check that both runtimes leave the same state, also with combined steps. Returns this state."""
    prepared, reference = (execute(kind(), body, params, contents) for kind in RUNTIMES)
    assert prepared == reference and prepared[0] == prepared[1]
    assert all(execute(kind(), body, params, contents, pieces=3) == prepared for kind in RUNTIMES)
    assert execute(TorchCpuRuntime(), body, params, contents, known=True) == prepared
    for pieces in (1, 3):
        for hot in execute(TorchCpuRuntime(hot=2), body, params, contents, times=3, pieces=pieces):
            same_but_for_what_a_failure_loses(hot, prepared[0])
        with patch.object(prepared_programs, "STRETCH_OFTEN", 1):
            for hot in execute(TorchCpuRuntime(hot=2), body, params, contents, times=3, pieces=pieces, every=3):
                same_but_for_what_a_failure_loses(hot, prepared[0])
    return prepared[0]


def same_but_for_what_a_failure_loses(hot, expected):
    """A failure in combined steps names the same instruction. Everything that the combined steps should have written is lost."""
    assert (hot[0], hot[2], hot[3]) == (expected[0], expected[2], expected[3])
    if hot[0] is None:
        assert hot == expected
        return
    assert hot[1] in expected[1]
    assert hot[4].keys() == expected[4].keys()
    for i, (nbytes, poison, content) in hot[4].items():
        assert nbytes == expected[4][i][0]
        if poison:
            assert content is None
        else:
            assert content == expected[4][i][2]


@given(data=st.data())
@settings(max_examples=examples(60, 400), deadline=None, derandomize=True)
def test_generated_programs_match_reference(wis, data):
    body, params = data.draw(bodies(wis))
    agree(body, params)


def test_known_forms_are_lowered_once(wis, monkeypatch):
    v, looked_up = wis.at(DType.F32, 4), []
    library_call = lowering.library_call
    monkeypatch.setattr(
        lowering, "library_call", lambda form: looked_up.append(form.attr("name")) or library_call(form)
    )
    body = wis.body().alloc("y", 16).call("aten.exp.default", ("in", "x", v), ("out", "y", v))
    body.alloc("z", 16).call("aten.exp.default", ("in", "y", v), ("out", "z", v))
    store = ProgramStore(TorchCpuRuntime())
    ready = store.define(body.raw)
    assert looked_up == ["aten.exp.default"]
    assert store.define(longer(body)) is not ready
    assert looked_up == ["aten.exp.default"]
    body.alloc("last", 16).call("aten.sin.default", ("in", "z", v), ("out", "last", v))
    store.define(body.raw)
    assert looked_up == ["aten.exp.default", "aten.sin.default"]


def test_hot_program_steps_are_combined(wis):
    v = wis.at(DType.F32, 4)
    body = wis.body()
    for k in range(8):
        body.alloc(f"y{k}", 16).call(
            "aten.mul.Tensor", ("in", f"y{k - 1}" if k else "x", v), ("in", "w", v), ("out", f"y{k}", v)
        )
        if k:
            body.free(f"y{k - 1}")
    runtime = TorchCpuRuntime(hot=3)
    with torch.inference_mode():
        ready = ProgramStore(runtime).define(body.raw)
        ids = {name: i for i, name in enumerate(body.names)}
        for run in range(5):
            buffers = {ids["x"]: runtime.allocate(16), ids["w"]: runtime.allocate(16)}
            for b, value in ((ids["x"], 3.0), (ids["w"], 2.0)):
                as_view(buffers[b].base, v).fill_(value)
            assert runtime.run(ready.prepared, buffers, list(ids.values()), []).failed_at is None
            assert as_view(buffers[ids["y7"]].base, v).tolist() == [3.0 * 2**8] * 4
            assert len(buffers) == 3
            assert len(ready.prepared.hot) == (1 if run >= 2 else 0)


def test_hot_program_with_deferral_is_combined_by_another_thread(wis):
    v = wis.at(DType.F32, 4)
    body = wis.body()
    for k in range(8):
        body.alloc(f"y{k}", 16).call(
            "aten.mul.Tensor", ("in", f"y{k - 1}" if k else "x", v), ("in", "x", v), ("out", f"y{k}", v)
        )
    runtime = TorchCpuRuntime(hot=3)
    runtime.defers = True
    with torch.inference_mode():
        prepared, ids = ProgramStore(runtime).define(body.raw).prepared, {name: i for i, name in enumerate(body.names)}

        def run():
            buffers = {ids["x"]: runtime.allocate(16)}
            as_view(buffers[ids["x"]].base, v).fill_(2.0)
            assert runtime.run(prepared, buffers, list(ids.values()), []).failed_at is None
            return as_view(buffers[ids["y7"]].base, v).tolist()

        assert [run() for _ in range(4)] == [[2.0**9] * 4] * 4
        assert not prepared.hot
        (combination,) = prepared.later
        with ThreadPoolExecutor(1) as pool:
            made = pool.submit(combination.make).result()
        assert not prepared.hot and run() == [2.0**9] * 4
        combination.take(made)
        assert len(prepared.hot) == 1 and run() == [2.0**9] * 4


def test_long_program_has_several_segments(wis, monkeypatch):
    monkeypatch.setattr(combining, "MOST_CALLS", 4)
    v = wis.at(DType.F32, 4)
    body = wis.body()
    for k in range(12):
        body.alloc(f"y{k}", 16).call("aten.neg.default", ("in", f"y{k - 1}" if k else "x", v), ("out", f"y{k}", v))
    runtime = TorchCpuRuntime(hot=2)
    with torch.inference_mode():
        prepared, ids = ProgramStore(runtime).define(body.raw).prepared, {name: i for i, name in enumerate(body.names)}
        for _ in range(3):
            buffers = {ids["x"]: runtime.allocate(16)}
            as_view(buffers[ids["x"]].base, v).fill_(2.0)
            assert runtime.run(prepared, buffers, list(ids.values()), []).failed_at is None
            assert as_view(buffers[ids["y11"]].base, v).tolist() == [2.0] * 4
        assert len(prepared.hot) == 3


@pytest.mark.parametrize(
    ("most", "segments", "lost"),
    [(48, 1, {"stale", "from_stale", "filled", "computed", "of_partly"}), (12, 2, {"of_partly"})],
    ids=["one segment", "two segments"],
)
def test_failed_segment_keeps_what_earlier_instructions_have_computed(wis, monkeypatch, most, segments, lost):
    """Values that cannot be computed again are lost: an operand was changed later."""
    monkeypatch.setattr(combining, "MOST_CALLS", most)
    v, i, half = wis.at(DType.F32, 4), wis.at(DType.I64, 4), View(DType.F32, (2,), (1,), 8)
    body = wis.body()

    def call(name, operator, *operands, **more):
        body.alloc(name, 16).call(operator, *[("in", of, v) for of in operands], ("out", name, v), **more)

    call("before", "aten.exp.default", "x")
    call("stale", "aten.mul.Tensor", "w", "x")
    body.call("aten.add_.Tensor", ("inout", "w", v), ("in", "before", v))
    body.call("aten.mul_.Tensor", ("inout", "w", half), ("in", "x", half))
    call("after", "aten.mul.Tensor", "w", "x")
    # the lower bound may be missing
    call("from_stale", "aten.clamp.Tensor", "x", "stale", "w", args=REFS[:3])
    body.alloc("filled", 16).fill("filled", v, 3.0)
    call("computed", "aten.neg.default", "x")
    for name in ("filled", "computed"):
        body.call("aten.add_.Tensor", ("inout", name, v), ("in", "stale", v))
    call("freed", "aten.sin.default", "x")
    call("from_freed", "aten.neg.default", "freed")
    body.free("freed").copy("x", v, "given", v).alloc("written", 16).fill("written", v, 3.0)
    body.call("aten.add_.Tensor", ("inout", "given", v), ("in", "x", v))
    body.copy("after", half, "written", half).call("aten.exp_.default", ("inout", "written", v))
    body.alloc("of_half", 8).call("aten.neg.default", ("in", "written", half), ("out", "of_half", wis.at(DType.F32, 2)))
    body.call("aten.exp_.default", ("inout", "after", v))
    call("of_partly", "aten.neg.default", "partly")
    body.call(
        "aten.index_add_.default", ("inout", "partly", v), ("in", "i", i), ("in", "x", v), args=(REFS[0], 0, *REFS[1:3])
    )
    call("behind", "aten.neg.default", "x")
    ids = {name: k for k, name in enumerate(body.names)}

    def run(runtime, prepared, index):
        buffers = {ids["i"]: runtime.allocate(32)}
        as_view(buffers[ids["i"]].base, i).copy_(torch.tensor(index))
        for k, n in enumerate(("x", "w", "partly", "given")):
            buffers[ids[n]] = runtime.allocate(16)
            as_view(buffers[ids[n]].base, v).copy_(torch.arange(4.0) / 4 + k)
        outcome = runtime.run(prepared, buffers, list(ids.values()), [])
        found = {n: buffers[k] for n, k in ids.items() if k in buffers}
        return outcome, {n: b.poison or b.base.view(torch.uint8).tolist() for n, b in found.items()}

    good, bad = [0, 1, 2, 3], [0, 1, 2, 4]
    with torch.inference_mode():
        runtimes = TorchCpuRuntime(hot=1000), TorchCpuRuntime(hot=2)
        single, hot = [(runtime, ProgramStore(runtime).define(body.raw).prepared) for runtime in runtimes]
        right = run(*single, good)[1]
        assert [run(*hot, good)[1] for _ in range(3)] == [right] * 3 and len(hot[1].hot) == segments
        (failed, expected), (outcome, found) = run(*single, bad), run(*hot, bad)
        later = [run(*hot, bad)[1] for _ in range(2)]
        assert run(*hot, good)[1] == right and len(hot[1].hot) > segments
    assert (outcome.failed_at, outcome.error) == (failed.failed_at, failed.error)
    assert {n for n in found if found[n] == outcome.error} == lost | {"partly", "behind"}
    assert {n for n in expected if expected[n] == failed.error} == {"partly", "behind"}
    assert all(found[n] == expected[n] for n in found.keys() - lost - {"partly", "behind"})
    assert later == [expected] * 2  # the failing step has begun a segment since


def test_only_a_few_failed_steps_of_a_program_are_remembered(wis):
    v, i = wis.at(DType.F32, 4), wis.at(DType.I64, 1)
    body = wis.body()
    for k in range(8):
        body.alloc(f"y{k}", 4).call(
            "aten.index_select.default",
            *(("in", "x", v), ("in", f"i{k}", i), ("out", f"y{k}", wis.at(DType.F32, 1))),
            args=(REFS[0], 0, REFS[1]),
        )
    runtime = TorchCpuRuntime(hot=2)
    ids = {name: k for k, name in enumerate(body.names)}
    with torch.inference_mode():
        prepared = ProgramStore(runtime).define(body.raw).prepared
        for bad in [None, None, *range(8), None]:
            buffers = {ids[f"i{k}"]: runtime.allocate(8) for k in range(8)} | {ids["x"]: runtime.allocate(16)}
            as_view(buffers[ids["x"]].base, v).fill_(2.0)
            for k in range(8):
                as_view(buffers[ids[f"i{k}"]].base, i).fill_(9 if k == bad else 0)
            outcome = runtime.run(prepared, buffers, list(ids.values()), [])
            good = [buffers[ids[f"y{k}"]].poison == "" for k in range(8)]
            assert (outcome.failed_at is None, all(good[:bad])) == (bad is None, True)
        most = prepared_programs.MOST_FAILED
        assert len(prepared.failed) == most and 1 < len(prepared.hot) <= most + 1


def test_conversions_between_dtypes_are_in_the_segment_of_their_neighbours(wis):
    """As in the norms of a model in bfloat16: a copy to another dtype, some operators, and a copy back."""
    half, wide = wis.at(DType.BF16, 4), wis.at(DType.F32, 4)
    body = wis.body()
    body.alloc("a", 16).copy("x", half, "a", wide)
    for k, name in enumerate("bcd"):
        body.alloc(name, 16).call("aten.exp.default", ("in", "abc"[k], wide), ("out", name, wide)).free("abc"[k])
    body.alloc("y", 8).copy("d", wide, "y", half).free("d")
    runtime = TorchCpuRuntime(hot=3)
    with torch.inference_mode():
        prepared, ids = ProgramStore(runtime).define(body.raw).prepared, {name: i for i, name in enumerate(body.names)}
        for _ in range(4):
            buffers = {ids["x"]: runtime.allocate(8)}
            x = as_view(buffers[ids["x"]].base, half).copy_(torch.linspace(-1, 0.5, 4))
            assert runtime.run(prepared, buffers, list(ids.values()), []).failed_at is None
            assert torch.equal(as_view(buffers[ids["y"]].base, half), x.float().exp().exp().exp().to(torch.bfloat16))
        assert len(prepared.hot) == 1


@pytest.mark.parametrize(
    ("dtype", "kind", "values"),
    [
        (DType.F32, ParamKind.F64, (0.5, float("-inf"), -0.0)),
        (DType.I64, ParamKind.I64, (3, -7, 1 << 62)),
        (DType.BOOL, ParamKind.BOOL, (True, False, True)),
        (DType.F32, ParamKind.BOOL, (True, False, True)),
    ],
    ids=str,
)
def test_fill_with_a_number_of_the_run_is_part_of_a_segment(wis, dtype, kind, values):
    v = wis.at(dtype, 4)
    body = wis.body().alloc("y", v.end).fill("y", v, ParamRef(0), [kind])
    for k in range(3):
        body.alloc(f"z{k}", v.end).call("aten.clone.default", ("in", "y", v), ("out", f"z{k}", v))
    runtime = TorchCpuRuntime(hot=2)
    with torch.inference_mode():
        prepared, ids = ProgramStore(runtime).define(body.raw).prepared, {name: i for i, name in enumerate(body.names)}
        for value in values:
            buffers = {}
            assert runtime.run(prepared, buffers, list(ids.values()), [value]).failed_at is None
            found = as_view(buffers[ids["z2"]].base.view(TORCH_DTYPE[dtype]), v)
            expected = torch.full((4,), value, dtype=TORCH_DTYPE[dtype])
            assert torch.equal(found, expected) and torch.equal(found.signbit(), expected.signbit())
        assert len(prepared.hot) == 1


@pytest.mark.parametrize("dtype", [DType.F32, DType.F64, DType.BF16], ids=str)
def test_number_that_is_an_operand_is_read_within_a_segment(wis, dtype):
    """`x.add_(y, alpha=t)`: each run reads `t`, which the step before it writes."""
    v, number = wis.at(DType.F32, 4), wis.at(dtype)
    body = wis.body()
    for name in ("x", "y"):
        body.call("aten.tanh_.default", ("inout", name, v))
    body.call("aten.neg_.default", ("inout", "t", number))
    operands = ("inout", "x", v), ("in", "y", v), ("in", "t", number)
    body.call("aten.add_.Tensor", *operands, args=tuple(REFS[:2]), kwargs=(("alpha", REFS[2]),))
    runtime = TorchCpuRuntime(hot=3)
    with torch.inference_mode():
        prepared, ids = ProgramStore(runtime).define(body.raw).prepared, {name: i for i, name in enumerate(body.names)}
        for k in range(5):
            buffers = {ids[n]: runtime.allocate(16) for n in "xyt"}
            x, y = [as_view(buffers[ids[n]].base, v).copy_(torch.arange(4.0) / 3 + at) for at, n in enumerate("xy")]
            t = as_view(buffers[ids["t"]].base.view(TORCH_DTYPE[dtype]), number).fill_(0.3 + k)
            expected = x.tanh().add(y.tanh(), alpha=-t)
            assert runtime.run(prepared, buffers, list(ids.values()), []).failed_at is None
            assert torch.equal(x, expected)
        assert len(prepared.hot) == 1


def test_operand_that_is_no_number_fails_its_instruction(wis):
    v = wis.at(DType.F32, 4)
    operands = ("inout", "x", v), ("in", "y", v), ("in", "t", v)
    body = wis.body().call("aten.add_.Tensor", *operands, args=tuple(REFS[:2]), kwargs=(("alpha", REFS[2]),))
    runtime = TorchCpuRuntime(hot=2)
    with torch.inference_mode():
        prepared, ids = ProgramStore(runtime).define(body.raw).prepared, {name: i for i, name in enumerate(body.names)}
        for _ in range(4):
            buffers = {ids[n]: runtime.allocate(16) for n in "xyt"}
            outcome = runtime.run(prepared, buffers, list(ids.values()), [])
            assert outcome.failed_at == 0 and "alpha" in outcome.error


@pytest.mark.parametrize(("most", "parts"), [(255, 3), (511, 2), (512, 1)])
def test_segment_ends_when_it_holds_too_much_memory_that_its_steps_would_free(wis, monkeypatch, most, parts):
    """Only values from outside count: the interpreter drops its own ones after their last use."""
    monkeypatch.setattr(combining, "BYTES", most)
    large, v = wis.at(DType.F32, 64), wis.at(DType.F32)
    body = wis.body()
    for name in "ab":  # random numbers are never in a segment
        body.alloc(name, 256).call(
            "aten.bernoulli_.float", ("inout", name, large), args=(REFS[0], 0.0), params=[ParamKind.I64] * 2,
            rng=(ParamRef(0), ParamRef(1)),
        )  # fmt: skip

    def total(of, into):
        body.alloc(into, 4).call(
            "aten.sum.dim_IntList", ("in", of, large), ("out", into, v), args=(REFS[0], (-1,), False)
        ).free(of)

    total("a", "y0")
    for k in range(1, 12):
        body.alloc(f"y{k}", 4).call("aten.neg.default", ("in", f"y{k - 1}", v), ("out", f"y{k}", v)).free(f"y{k - 1}")
        if k == 3:
            total("b", "s")
            body.call("aten.add_.Tensor", ("inout", "y3", v), ("in", "s", v)).free("s")
    runtime = TorchCpuRuntime(hot=2)
    with torch.inference_mode():
        prepared, ids = ProgramStore(runtime).define(body.raw).prepared, {name: i for i, name in enumerate(body.names)}
        for _ in range(3):
            buffers = {}
            assert runtime.run(prepared, buffers, list(ids.values()), [1, 2, 3, 4]).failed_at is None
            assert as_view(buffers[ids["y11"]].base, v).item() == 0
        assert len(prepared.hot) == 2 * 2 + parts  # each large tensor: its memory with a view of it, random numbers


def test_segment_frees_what_it_does_not_read_before_it_allocates(wis, monkeypatch):
    """So the allocator can use the memory again, which is still in the caches of the processor."""
    interpret, held = segments.interpret, []
    nbytes = 4 * 12_347

    def interpreted(text):
        function, schemas = interpret(text)

        def run(*args):
            held.append(sum([type(x) is torch.Tensor and x.numel() * x.itemsize == nbytes for x in gc.get_objects()]))
            return function(*args)

        return run, schemas

    monkeypatch.setattr(segments, "interpret", interpreted)
    large, v, body = wis.at(DType.F32, 12_347), wis.at(DType.F32), wis.body()
    body.alloc("a", nbytes).call(
        "aten.bernoulli_.float", ("inout", "a", large), args=(REFS[0], 0.0), params=[ParamKind.I64] * 2,
        rng=(ParamRef(0), ParamRef(1)),
    )  # fmt: skip
    body.free("a").alloc("b", 4).fill("b", v, 2.0).alloc("c", 4).call(
        "aten.neg.default", ("in", "b", v), ("out", "c", v)
    )
    runtime = TorchCpuRuntime(hot=2)
    with torch.inference_mode():
        prepared, ids = ProgramStore(runtime).define(body.raw).prepared, {name: i for i, name in enumerate(body.names)}
        for _ in range(3):
            buffers = {}
            assert runtime.run(prepared, buffers, list(ids.values()), [1, 2]).failed_at is None
            assert as_view(buffers[ids["c"]].base, v).item() == -2
    assert held and not any(held)


def test_result_whose_strides_differ_only_in_dimensions_of_size_1_is_not_copied(wis, monkeypatch):
    """As in a decode step: half of each head of one token, whose rows lie apart, and their number is 1."""
    copied = []
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *args: copied.append(args))
    half = View(DType.F32, (3, 4, 1, 8), (64, 16, 64, 1), 32)
    v = wis.at(DType.F32, 3, 4, 1, 8)
    body = wis.body()
    for name in "abcd":
        body.alloc(name, 4 * 96)
    body.call("aten.neg.default", ("in", "x", half), ("out", "a", v))
    for of, to in ("ab", "bc", "cd"):
        body.call("aten.exp.default", ("in", of, v), ("out", to, v))
    for name in "bc":
        body.free(name)
    runtime = TorchCpuRuntime(hot=3)
    with torch.inference_mode():
        prepared, ids = ProgramStore(runtime).define(body.raw).prepared, {name: i for i, name in enumerate(body.names)}
        x = torch.linspace(-1, 0, 192)
        assert x.as_strided((3, 4, 1, 8), half.strides, 8).neg().stride() != v.strides
        for _ in range(5):
            buffers = {ids["x"]: Buffer(4 * 192, x)}
            assert runtime.run(prepared, buffers, list(ids.values()), []).failed_at is None
            for name, want in (
                ("a", -x.as_strided(v.sizes, half.strides, 8)),
                ("d", (-x.as_strided(v.sizes, half.strides, 8)).exp().exp().exp()),
            ):
                base = buffers[ids[name]].base
                assert base.stride() == v.strides and base.storage_offset() == 0 and torch.equal(base, want)
        assert not copied and len(prepared.hot) == 1


@pytest.mark.parametrize("used", [False, True])
def test_result_that_is_freed_without_a_use_is_not_adopted(wis, monkeypatch, used):
    seen = []
    monkeypatch.setattr(
        preparation, "adopted", lambda t, *rest: seen.append(tuple(t.shape)) or adoption.adopted(t, *rest)
    )
    x, v, i = wis.at(DType.F32, 4, 3), wis.at(DType.F32, 3), wis.at(DType.I64, 3)
    body = wis.body().alloc("v", 12).alloc("i", 24)
    body.call("aten.max.dim", ("in", "x", x), ("out", "v", v), ("out", "i", i), args=(REFS[0], 0))
    if used:
        body.alloc("y", 24).call("aten.neg.default", ("in", "i", i), ("out", "y", i))
    body.free("i")
    runtime = TorchCpuRuntime(hot=1000)
    with torch.inference_mode():
        prepared, ids = ProgramStore(runtime).define(body.raw).prepared, {name: i for i, name in enumerate(body.names)}
        for _ in range(3):
            buffers = {ids["x"]: runtime.allocate(48)}
            as_view(buffers[ids["x"]].base, x).copy_(torch.arange(12.0).view(4, 3))
            assert runtime.run(prepared, buffers, list(ids.values()), []).failed_at is None
            assert as_view(buffers[ids["v"]].base, v).tolist() == [9, 10, 11]
            assert not used or as_view(buffers[ids["y"]].base, i).tolist() == [-3] * 3
    assert seen == [(3,)] * (3 if used else 1)  # each result once: its layout is trusted afterwards


@pytest.mark.parametrize(
    ("bindings", "fits"),
    [
        ((1, 2, 7), True),
        ((2, 1, 7), False),  # buffer 1 is too small for the slot
        ((1, 9, 7), False),  # buffer 9 does not exist
        ((1, 2, 2), False),  # one buffer is bound to two slots
        ((1, 2, 3), False),  # buffer 3 exists already
        ((1, 2), False),
        ((1, 2, 7, 8), False),
    ],
)
def test_binding_check_accepts_existing_buffers_of_enough_bytes_and_new_ones(bindings, fits):
    facts = SimpleNamespace(slot_alloc=(None, None, 8), slot_bytes=(4, 16, 8))
    buffers = {1: Buffer(4, None), 2: Buffer(16, None), 3: Buffer(8, None)}
    assert BindingCheck(facts, ()).satisfied(buffers, bindings) is fits


@pytest.mark.parametrize("hot", [1, 1000])
def test_deterministic_index_copy_keeps_the_last_of_equal_indices(wis, hot):
    n, threads = 1 << 18, torch.get_num_threads()
    x, i, v = wis.at(DType.F32, 1), wis.at(DType.I64, n), wis.at(DType.F32, n)
    body = wis.body()
    operands = ("inout", "x", x), ("in", "i", i), ("in", "v", v)
    body.call("aten.index_copy_.default", *operands, args=(REFS[0], 0, *REFS[1:3]), deterministic=True)
    runtime = TorchCpuRuntime(hot=hot)
    torch.set_num_threads(4)
    try:
        with torch.inference_mode():
            ready = ProgramStore(runtime).define(body.raw)
            ids = {name: k for k, name in enumerate(body.names)}
            buffers = {
                ids["x"]: runtime.allocate(4),
                ids["i"]: runtime.allocate(8 * n),
                ids["v"]: runtime.allocate(4 * n),
            }
            as_view(buffers[ids["v"]].base, v).copy_(torch.arange(n, dtype=torch.float32))
            for _ in range(20):
                assert runtime.run(ready.prepared, buffers, list(ids.values()), []).failed_at is None
                assert as_view(buffers[ids["x"]].base, x).item() == n - 1
    finally:
        torch.set_num_threads(threads)
    assert not torch.are_deterministic_algorithms_enabled()


def test_deterministic_call_restores_the_switches():
    def fail(frame):
        assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        raise ValueError

    with pytest.raises(ValueError):
        deterministic(fail)(None)
    assert not torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory


def test_hot_program_failure_names_instruction(wis):
    v, i = wis.at(DType.F32, 4), wis.at(DType.I64, 4)
    body = wis.body()
    for name in "abcd":
        body.alloc(name, 16)
    body.call("aten.neg.default", ("in", "x", v), ("out", "a", v)).call(
        "aten.exp.default", ("in", "a", v), ("out", "b", v)
    )
    operands = ("in", "b", v), ("in", "i", i), ("out", "c", v)
    body.call("aten.index_select.default", *operands, args=(REFS[0], 0, REFS[1]))
    body.call("aten.neg.default", ("in", "c", v), ("out", "d", v))
    runtime = TorchCpuRuntime(hot=2)
    with torch.inference_mode():
        ready = ProgramStore(runtime).define(body.raw)
        ids = {name: k for k, name in enumerate(body.names)}
        for index in (0, 1, 2, 9, 3):
            buffers = {ids["x"]: runtime.allocate(16), ids["i"]: runtime.allocate(32)}
            as_view(buffers[ids["i"]].base, i).fill_(index)
            outcome = runtime.run(ready.prepared, buffers, list(ids.values()), [])
            assert outcome.failed_at == (6 if index == 9 else None)
            assert buffers[ids["d"]].poison == ("index out of range in self" if index == 9 else "")


def test_hot_stretch_across_edges_is_combined(wis):
    v, i = wis.at(DType.F32, 4), wis.at(DType.I64, 4)
    body = wis.body()
    for k in range(12):
        body.alloc(f"y{k}", 16)
        if k == 9:
            operands = ("in", "y8", v), ("in", "i", i), ("out", "y9", v)
            body.call("aten.index_select.default", *operands, args=(REFS[0], 0, REFS[1]))
        else:
            body.call("aten.neg.default", ("in", f"y{k - 1}" if k else "x", v), ("out", f"y{k}", v))
    runtime = TorchCpuRuntime(hot=2)
    n, half = len(body.body), 12
    with torch.inference_mode():
        ready = ProgramStore(runtime).define(body.raw)
        prepared, ids = ready.prepared, {name: k for k, name in enumerate(body.names)}
        prepared.edges = edges = (6, half, 18)

        def run(index, *pieces):
            buffers = {ids["x"]: runtime.allocate(16), ids["i"]: runtime.allocate(32)}
            as_view(buffers[ids["x"]].base, v).copy_(torch.arange(4.0))
            as_view(buffers[ids["i"]].base, i).fill_(index)
            execution = runtime.begin(prepared, buffers, list(ids.values()), [])
            for piece in pieces:
                times = execution.advance(piece)
                assert len(times) == len(piece) and min(times) >= 0
            assert execution.ended
            left = buffers[ids["y11"]]
            return execution.outcome.failed_at, left.poison or as_view(left.base, v).tolist()

        for _ in range(2 + prepared_programs.STRETCH_OFTEN):
            assert run(2, (*edges, n)) == (None, [-2.0] * 4)
        assert len(prepared.hot) == 4 and [len(s.steps) for s in prepared.whole.values()] == [1]
        (known,) = prepared.whole.values()
        assert len(known.took) == 4 and all(known.took)
        for _ in range(
            prepared_programs.STRETCH_OFTEN
        ):  # stretches for these edges do not fit runs that stop at other edges
            assert run(3, edges[:2], (18, n)) == (None, [-3.0] * 4)
        assert {k: len(s.steps) for k, s in prepared.whole.items()} == {(0, 4): 1, (0, 2): 1, (2, 4): 1}
        for _ in range(2):  # the first failure divides the stretches
            assert run(9, (*edges, n)) == (19, "index out of range in self")
            assert run(9, (6,), (half,), (18,), (n,)) == (19, "index out of range in self")
            assert run(9, edges[:2], (18, n)) == (19, "index out of range in self")
            for _ in range(prepared_programs.STRETCH_OFTEN):
                assert run(2, (*edges, n)) == (None, [-2.0] * 4)
        assert [len(s.steps) for s in prepared.whole.values() if not isinstance(s, int)] == [2]
        for other in range(1, 100):
            run(1, (other % 3 * 6 + 1,), (n - other % 4, n))
        assert len(prepared.whole) <= prepared_programs.STRETCHES_SEEN


def test_combining_steps_is_not_device_time(wis, monkeypatch):
    """Otherwise the session that happens to start the eighth run pays for the later runs of others."""
    slowly, put_together = 0.3, []

    def combine_slowly(traces, needed, stops, within, alone, **kwargs):
        put_together.append(within)
        until = time.thread_time() + slowly
        while time.thread_time() < until:
            pass
        return combine(traces, needed, stops, within, alone, **kwargs)

    v, body = wis.at(DType.F32, 4), wis.body()
    for k in range(12):
        body.alloc(f"y{k}", 16)
        body.call("aten.neg.default", ("in", f"y{k - 1}" if k else "x", v), ("out", f"y{k}", v))
    runtime = TorchCpuRuntime(hot=2)
    with torch.inference_mode():
        ready = ProgramStore(runtime).define(body.raw)
        prepared, ids = ready.prepared, {name: k for k, name in enumerate(body.names)}
        prepared.edges = (6, 12, 18)
        combine = prepared_programs.combine
        monkeypatch.setattr(prepared_programs, "combine", combine_slowly)
        took = []
        for _ in range(4 + prepared_programs.STRETCH_OFTEN):
            execution = runtime.begin(prepared, {ids["x"]: runtime.allocate(16)}, list(ids.values()), [])
            took.append(sum(execution.advance((6, 12, 18, len(body.body)))))
    assert len(put_together) == 2 and put_together[-1] is not None
    assert max(took) < slowly / 2 * 1e9


def test_stretch_time_is_divided_by_measured_parts():
    stretch = prepared_programs.Stretch([], [], (10, 0, 25, 5))
    assert stretch.parts(80, 4) == [20, 0, 50, 10] and sum(stretch.parts(79, 4)) == 79
    assert stretch.parts(9, 3) == [3, 3, 3]  # the number of edges differs now
    assert prepared_programs.Stretch([], []).parts(5, 2) == [2, 3]


@pytest.mark.parametrize("dtype", DTYPES + [DType.I8, DType.I16, DType.I32, DType.C128, DType.F8E4M3FN], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_copy_every_dtype_and_shape_matches_reference(wis, dtype, shape):
    v = wis.at(dtype, *shape)
    t = torch.ones(shape, dtype=TORCH_DTYPE[dtype])
    body = wis.body().alloc("y", v.end).call("aten.clone.default", ("in", "x", v), ("out", "y", v))
    failed, _, _, _, left = agree(body, contents={"x": t})
    ids = {n: i for i, n in enumerate(body.names)}
    assert failed is None and left[ids["x"]][2] == left[ids["y"]][2]


def test_result_aliasing_argument_becomes_separate_buffer(wis):
    v = wis.at(DType.F32, 3)
    body = wis.body().alloc("y", 12).call("aten._foobar.default", ("in", "x", v), ("out", "y", v)).fill("y", v, 9.0)
    left = agree(body, contents={"x": torch.ones(3)})[-1]
    assert left[0][2] != left[1][2]


def test_result_with_other_strides_gets_announced_layout(wis):
    rows, columns = wis.at(DType.F32, 2, 3), wis.at(DType.F32, 2, 3, strides=(1, 2))
    body = wis.body().alloc("y", 24).call("aten.neg.default", ("in", "x", rows), ("out", "y", columns))
    left = agree(body, contents={"x": torch.arange(6.0).reshape(2, 3)})[-1]
    assert left[0][2] == (-torch.arange(6.0).reshape(2, 3).T.contiguous()).numpy().tobytes()


@pytest.mark.parametrize(
    ("sizes", "dtype", "fails"),
    [((3, 2), DType.F32, True), ((7,), DType.F32, True), ((2, 3), DType.F64, False)],
    ids=str,
)
def test_result_of_other_shape_fails_and_other_dtype_is_converted(wis, sizes, dtype, fails):
    """The reference would broadcast, or refuse with another message, so only the prepared runtime is tested."""
    out = wis.at(dtype, *sizes)
    body = wis.body().alloc("y", out.end)
    body.call("aten.neg.default", ("in", "x", wis.at(DType.F32, 2, 3)), ("out", "y", out))
    for failed, error, *_, left in execute(TorchCpuRuntime(), body, contents={"x": torch.ones(2, 3)}):
        assert (
            (failed == 1 and "but the program announced" in error and left[0][1] == error) if fails else failed is None
        )


@pytest.mark.parametrize("alias", [False, True])
def test_out_variant_writes_its_operand(wis, alias):
    v = wis.at(DType.F32, 4)
    target = "x" if alias else "y"
    body = wis.body().alloc("y", 16)
    operands = ("in", "x", v), ("in", "x", v), ("inout", target, v)
    body.call("aten.add.out", *operands, args=REFS[:2], kwargs=(("out", REFS[2]),))
    left = agree(body, contents={"x": torch.arange(4.0)})[-1]
    ids = {n: i for i, n in enumerate(body.names)}
    assert left[ids[target]][2] == (2 * torch.arange(4.0)).numpy().tobytes()


@pytest.mark.parametrize("dtype", [DType.I64, DType.F32, DType.BF16], ids=str)
@pytest.mark.parametrize("whole", [True, False])
def test_out_of_unused_buffer_becomes_new_result(wis, dtype, whole):
    v = wis.at(dtype, 4)
    body = wis.body().alloc("y", v.end if whole else v.end + 8)
    body.call("aten.arange.start_out", ("inout", "y", v), args=(1, 9, 2), kwargs=(("out", REFS[0]),))
    body.call("aten.add_.Tensor", ("inout", "y", v), ("in", "y", v))
    body.alloc("z", v.end).call(
        "aten.logical_not.out",
        ("in", "x", wis.at(DType.BOOL, 4)),
        ("inout", "z", v),
        args=REFS[:1],
        kwargs=(("out", REFS[1]),),
    )
    failed, error, _, _, left = agree(body, contents={"x": torch.tensor([True, False, True, False])})
    assert failed is None, error
    ids = {n: i for i, n in enumerate(body.names)}
    ours = [torch.frombuffer(bytearray(left[ids[n]][2][: v.end]), dtype=TORCH_DTYPE[dtype]).tolist() for n in "yz"]
    assert ours == [[2, 6, 10, 14], [0, 1, 0, 1]]


def test_in_place_on_view_is_visible_in_other_views(wis):
    whole, turned = wis.at(DType.F32, 2, 2), wis.at(DType.F32, 2, 2, strides=(1, 2))
    corner = wis.at(DType.F32, 1, offset=4)
    body = wis.body().alloc("y", 16).call("aten.clone.default", ("in", "x", whole), ("out", "y", whole))
    body.call("aten.mul_.Tensor", ("inout", "y", turned), ("in", "x", whole))
    body.fill("y", corner, 7.0).alloc("z", 16).copy("y", turned, "z", whole)
    left = agree(body, contents={"x": torch.tensor([[1.0, 2.0], [3.0, 4.0]])})[-1]
    ids = {n: i for i, n in enumerate(body.names)}
    assert left[ids["z"]][2] == torch.tensor([1.0, 6.0, 7.0, 16.0]).numpy().tobytes()


def test_view_reads_bytes_as_other_dtype(wis):
    pairs = wis.at(DType.C64, 2)
    body = wis.body().alloc("y", 16).copy("x", wis.at(DType.F32, 4), "y", wis.at(DType.F32, 4))
    body.call("aten.mul_.Tensor", ("inout", "y", pairs), ("in", "x", pairs))
    assert agree(body, contents={"x": torch.tensor([1.0, 2.0, 3.0, 4.0])})[0] is None


def test_complex_result_has_no_lazy_conjugation(wis):
    v = wis.at(DType.C64, 2, 2)
    t = torch.tensor([[1 + 2j, 3], [4j, 5 - 1j]])
    body = wis.body().alloc("y", 32).call("aten.mm.default", ("in", "x", v), ("in", "x", v), ("out", "y", v))
    body.alloc("z", 32).call("aten._fft_c2c.default", ("in", "y", v), ("out", "z", v), args=(REFS[0], (0, 1), 0, False))
    assert agree(body, contents={"x": t})[0] is None


@pytest.mark.parametrize("operator", ["aten.topk.default", "aten.max.dim"])
def test_several_results_with_one_freed_match_reference(wis, operator):
    v, i = wis.at(DType.F32, 4), wis.at(DType.I64, 1) if "topk" in operator else wis.at(DType.I64)
    top = wis.at(DType.F32, *i.sizes)
    body = wis.body().alloc("a", 4).alloc("b", 8)
    args = (REFS[0], 1, 0) if "topk" in operator else (REFS[0], 0)
    body.call(operator, ("in", "x", v), ("out", "a", top), ("out", "b", i), args=args).free("b").free("x")
    left = agree(body, contents={"x": torch.tensor([1.0, 4.0, 2.0, 3.0])})[-1]
    assert left == {0: (4, "", torch.tensor([4.0]).numpy().tobytes())}


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_dropout_same_seed_gives_same_bytes(wis, rate):
    v, mask = wis.at(DType.F32, 64), wis.at(DType.BOOL, 64)
    body = wis.body().alloc("y", 256).alloc("m", 64)
    body.call(
        "aten.native_dropout.default",
        ("in", "x", v),
        ("out", "y", v),
        ("out", "m", mask),
        args=(REFS[0], rate, True),
        params=(ParamKind.I64,) * 2,
        rng=(ParamRef(0), ParamRef(1)),
    )
    drawn = [agree(body, (seed, offset), {"x": torch.ones(64)})[-1] for seed, offset in [(1, 0), (1, 1), (1, 0)]]
    assert drawn[0] == drawn[2] and (drawn[0] != drawn[1]) is (rate == 0.5)


@pytest.mark.parametrize(
    ("kind", "value"),
    [(ParamKind.F64, 2.5), (ParamKind.I64, -3), (ParamKind.BOOL, True), (ParamKind.C128, 1 + 2j)],
    ids=lambda x: str(x),
)
@pytest.mark.parametrize("dtype", [DType.F32, DType.I64, DType.BF16, DType.C64], ids=str)
def test_param_for_tensor_argument_matches_reference(wis, kind, value, dtype):
    v = wis.at(dtype, 3)
    if torch.result_type(torch.ones(3, dtype=TORCH_DTYPE[dtype]), value) not in TORCH_DTYPE.values():
        pytest.skip("torch 2.14 has complex numbers of two bfloat16, which WIS has not")
    made = torch.ones(3, dtype=TORCH_DTYPE[dtype]) * value
    out = announced(wis, made)
    body = wis.body().alloc("y", out.end)
    operands = ("in", "x", v), ("out", "y", out)
    body.call("aten.mul.Tensor", *operands, args=(REFS[0], ParamRef(0)), params=(kind,))
    failed, _, _, _, left = agree(body, (value,), {"x": torch.ones(3, dtype=TORCH_DTYPE[dtype])})
    assert failed is None and left[0][2] == made.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("values", [(0.0, 0.0), (1.0, 0.0), (1.0, 2.0)], ids=str)
def test_result_of_dynamic_size_is_described(wis, values):
    body = wis.body().call("aten.nonzero.default", ("in", "x", wis.at(DType.F32, 2)), ("out", "i", None))
    failed, _, described, _, _ = agree(body, contents={"x": torch.tensor(values)})
    assert failed is None and described == [("i64", [sum(map(bool, values)), 1])]


def gradients(wis, operator, operands, n_results, wanted, args=None, grad=None, **options):
    """Return the body of a `vjp`: operands "a", "b", …, gradient "g" of the first result, results "ga", "gb", …."""
    body = wis.body()
    names = "abc"[: len(operands)]
    for k in wanted:
        body.alloc(f"g{k}", announced(wis, operands[k]).end)
    given = [("in", n, announced(wis, t)) for n, t in zip(names, operands, strict=True)]
    given.append(("in", "g", announced(wis, grad)))
    outs = [("out", f"g{k}", announced(wis, operands[k])) for k in wanted]
    refs = (REFS[len(operands)], *[None] * (n_results - 1))
    args = args or tuple(REFS[: len(operands)])
    return body.call(operator, *given, *outs, args=args, wanted=tuple(REFS[k] for k in wanted), vjp=refs, **options)


def left_of(body, contents, params=()):
    """Return the bytes of each gradient that the program left."""
    failed, error, _, _, left = agree(body, params, contents)
    assert failed is None, error
    return [left[i][2] for i, n in enumerate(body.names) if len(n) == 2]


def test_vjp_matches_autograd(wis):
    torch.manual_seed(0)
    x, w, g = torch.randn(3, 4), torch.randn(4), torch.randn(3, 4)
    body = gradients(wis, "aten.rms_norm.default", [x, w], 1, [0, 1], (REFS[0], (4,), REFS[1], 1e-5), g)
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    found = torch.autograd.grad(torch.rms_norm(leaves[0], [4], leaves[1], 1e-5), leaves, g)
    assert left_of(body, {"a": x, "b": w, "g": g}) == [t.numpy().tobytes() for t in found]


def test_vjp_forward_returns_plain_result(wis):
    torch.manual_seed(0)
    x = torch.randn(2, 3)
    v = announced(wis, x)
    body = wis.body().alloc("y", 24)
    body.call("aten.rms_norm.default", ("in", "x", v), ("out", "y", v), args=(REFS[0], (3,)), wanted=REFS[:1])
    failed, error, _, _, left = agree(body, contents={"x": x})
    assert failed is None, error
    assert left[body.names.index("y")][2] == torch.rms_norm(x, [3]).numpy().tobytes()


def test_vjp_same_tensor_twice_has_separate_gradients(wis):
    x, g = torch.tensor([2.0, 3.0]), torch.tensor([1.0, 10.0])
    body = wis.body().alloc("ga", 8).alloc("gb", 8)
    v = announced(wis, x)
    operands = [("in", "a", v), ("in", "a", v), ("in", "g", v), ("out", "ga", v), ("out", "gb", v)]
    body.call("aten.sub.Tensor", *operands, args=(REFS[0], REFS[1]), wanted=REFS[:2], vjp=REFS[2:3])
    assert left_of(body, {"a": x, "g": g}) == [g.numpy().tobytes(), (-g).numpy().tobytes()]


def test_vjp_unused_operand_has_zero_gradient(wis):
    x, grad = torch.tensor([2.0, 3.0]), torch.tensor([1.0, 10.0])
    v = announced(wis, x)
    body = wis.body().alloc("ga", 8).alloc("gb", 8)
    operands = [("in", "a", v), ("in", "b", v), ("in", "g", v), ("out", "ga", v), ("out", "gb", v)]
    body.call("aten.neg.default", *operands, args=(REFS[0],), wanted=REFS[:2], vjp=REFS[2:3])
    zero = torch.zeros(2).numpy().tobytes()
    assert left_of(body, {"a": x, "b": x, "g": grad}) == [(-grad).numpy().tobytes(), zero]


def test_vjp_reuses_random_numbers_of_forward(wis):
    x = torch.ones(64)
    v = announced(wis, x)
    options = {"params": (ParamKind.I64,) * 2, "rng": (ParamRef(0), ParamRef(1))}
    forward = wis.body().alloc("y", 256).alloc("m", 64)
    outs = ("out", "y", v), ("out", "m", wis.at(DType.BOOL, 64))
    forward.call("aten.native_dropout.default", ("in", "x", v), *outs, args=(REFS[0], 0.5, True), **options)
    dropped = agree(forward, (7, 3), {"x": x})[-1][forward.names.index("y")][2]
    body = gradients(wis, "aten.native_dropout.default", [x], 2, [0], (REFS[0], 0.5, True), x, **options)
    assert left_of(body, {"a": x, "g": x}, (7, 3)) == [dropped]


def test_conjugated_reading_leaves_operand_unchanged(wis):
    torch.manual_seed(0)
    a, b = torch.randn(2, 3, 3, dtype=torch.complex64)
    v = announced(wis, a)
    body = wis.body().alloc("y", v.end)
    body.call("aten.mm.default", ("in", "a", v), ("in", "b", v), ("out", "y", v), conj=REFS[:1], neg=REFS[1:2])
    body.call(
        "aten.mm.out",
        ("in", "a", v),
        ("in", "b", v),
        ("inout", "z", v),
        args=REFS[:2],
        kwargs=(("out", REFS[2]),),
        conj=REFS[:1],
    )
    failed, error, _, _, left = agree(body, contents={"a": a, "b": b, "z": b})
    assert failed is None, error
    kept = {n: left[i][2] for i, n in enumerate(body.names)}
    assert kept["y"] == (a.conj() @ -b).numpy().tobytes() and kept["z"] == (a.conj() @ b).numpy().tobytes()
    assert kept["a"] == a.numpy().tobytes()


def test_packed_sequence_lengths_are_constants(wis):
    torch.manual_seed(0)
    x, h, w = torch.randn(5, 2), torch.zeros(1, 3, 2), torch.randn(2, 2)
    views = {n: announced(wis, t) for n, t in {"x": x, "h": h, "w": w}.items()}
    body = wis.body().alloc("y", views["x"].end).alloc("n", views["h"].end)
    operands = [*[("in", n, v) for n, v in views.items()], ("out", "y", views["x"]), ("out", "n", views["h"])]
    args = (REFS[0], (3, 2), REFS[1], (REFS[2], REFS[2]), False, 1, 0.0, False, False)
    body.call("aten.rnn_tanh.data", *operands, args=args)
    failed, error, _, _, left = agree(body, contents={"x": x, "h": h, "w": w})
    assert failed is None, error
    expected = torch.rnn_tanh(x, torch.tensor([3, 2]), h, [w, w], False, 1, 0.0, False, False)[0]
    assert left[body.names.index("y")][2] == expected.numpy().tobytes()


def test_facts_contain_architecture():
    for runtime in (TorchCpuRuntime(), ReferenceRuntime()):
        facts = DeviceFacts(**runtime.facts())
        assert (facts.vendor, facts.arch) == ("cpu", platform.machine()) != ("cpu", "")
