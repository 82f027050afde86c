"""Programs that differ in sizes only share their combined steps and their estimate. The reference runs each one literally."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from wooly_executor.estimates import DEFAULT_RATES, SETTLED, Estimates
from wooly_executor.programs import ProgramStore
from wooly_executor.runtime import combining, families, preparation, similar
from wooly_executor.runtime import prepared as prepared_programs
from wooly_executor.runtime.buffers import Buffer, bytes_of
from wooly_executor.runtime.device import TorchDevice
from wooly_executor.runtime.torch_cpu import TorchCpuRuntime
from wooly_testkit.effort import examples
from wooly_testkit.reference import ReferenceRuntime
from wooly_wis.dtypes import DType
from wooly_wis.pauses import pausing
from wooly_wis.program import Form, OperandRef, ParamKind, ParamRef, View

F = DType.F32
REFS = [OperandRef(i) for i in range(4)]


@pytest.fixture(autouse=True)
def every_call_is_worth_it():
    """Combine steps even if this saves nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(combining, "WORTH", 1)
        yield


class Growing:
    """A program under construction on tensors of [rows, n] elements.

    Attributes:
        body: the program.
        last: name of the newest tensor.
        inputs: numbers of elements of the inputs.
        params: values of the params.
    """

    def __init__(self, wis, rows, n):
        self.wis, self.body, self.rows, self.n = wis, wis.body(), rows, n
        self.last, self.inputs, self.params = "x", {"x": rows * n}, []
        self.v = View(F, (rows, n), (n, 1))
        self._names = 0

    def new(self, v=None):
        self._names += 1
        name, v = f"t{self._names}", v or self.v
        self.body.alloc(name, v.end)
        return name, v

    def call(self, operator, *operands, out=None, **more):
        name, v = self.new(out)
        self.body.call(operator, *operands, ("out", name, v), **more)
        return name

    # what a program may do next; `c` is a constant

    def exp(self, c):
        self.last = self.call("aten.exp.default", ("in", self.last, self.v))

    def add_constant(self, c):
        self.last = self.call("aten.add.Tensor", ("in", self.last, self.v), args=(REFS[0], c))

    def add_param(self, c):
        self.params.append(float(c))
        self.last = self.call(
            "aten.add.Tensor", ("in", self.last, self.v), args=(REFS[0], ParamRef(0)), params=[ParamKind.F64]
        )

    def add_transposed(self, c):
        """Reads a copy of the transposed tensor through a view, at an offset."""
        rows, n = self.rows, self.n
        name, _ = self.new(View(F, (rows + 1, n), (n, 1)))
        self.body.fill(name, View(F, (n,), (1,)), 2.0)
        self.body.copy(self.last, View(F, (n, rows), (1, n)), name, View(F, (n, rows), (1, n), 4 * n))
        lower = View(F, (rows, n), (n, 1), 4 * n)
        self.last = self.call("aten.add.Tensor", ("in", self.last, self.v), ("in", name, lower))
        self.body.free(name)

    def expand_sum(self, c):
        """A result that a later call reads through another view."""
        row = View(F, (1, self.n), (self.n, 1))
        total = self.call("aten.sum.dim_IntList", ("in", self.last, self.v), args=(REFS[0], (0,), True), out=row)
        wide = View(F, (self.rows, self.n), (0, 1))
        self.last = self.call("aten.mul.Tensor", ("in", self.last, self.v), ("in", total, wide))

    def pad(self, c):
        """Sizes as an argument of a call."""
        wide = View(F, (self.rows, 2 * self.n - 1), (2 * self.n - 1, 1))
        both = self.call(
            "aten.reflection_pad1d.default", ("in", self.last, self.v), args=(REFS[0], (0, self.n - 1)), out=wide
        )
        self.last = self.call("aten.neg.default", ("in", both, View(F, (self.rows, self.n), (self.n, 1))))
        self.body.free(both)

    def in_place(self, c):
        half = View(F, (self.rows, max(self.n - 1, 1)), (self.n, 1))
        name, _ = self.new()
        self.body.copy(self.last, self.v, name, self.v)
        self.body.call("aten.mul_.Tensor", ("inout", name, half), args=(REFS[0], c))
        self.last = name

    def cat(self, c):
        wide = View(F, (self.rows, 2 * self.n), (2 * self.n, 1))
        both = self.call(
            "aten.cat.default", ("in", self.last, self.v), ("in", "x", self.v), args=((REFS[0], REFS[1]), 1), out=wide
        )
        self.last = self.call(
            "aten.sin.default", ("in", both, View(F, (self.rows, self.n), (2 * self.n, 1), 4 * self.n))
        )

    def fixed(self, c):
        """Operators on tensors whose sizes never change."""
        v = View(F, (2, 3), (3, 1))
        first = self.call("aten.exp.default", ("in", "y", v), out=v)
        self.call("aten.add.Tensor", ("in", first, v), args=(REFS[0], c), out=v)
        self.body.free(first)
        self.inputs["y"] = 6

    def reduced(self, c):
        """A result of a size that never changes, from operands whose sizes do."""
        v = View(F, (1, 1), (1, 1))
        total = self.call("aten.sum.dim_IntList", ("in", self.last, self.v), args=(REFS[0], (0, 1), True), out=v)
        self.body.call("aten.mul_.Tensor", ("inout", total, v), args=(REFS[0], c))
        self.last = self.call(
            "aten.add.Tensor", ("in", self.last, self.v), ("in", total, View(F, (self.rows, self.n), (0, 0)))
        )

    def corner(self, c):
        """Two views of one tensor, which are the same view if it is small."""
        k = max(self.n - 1, 1)
        part, first = View(F, (1, k), (k, 1)), View(F, (1, 1), (1, 1))
        name = self.call("aten.mul.Tensor", ("in", self.last, part), ("in", self.last, first), out=part)
        self.last = self.call(
            "aten.add.Tensor", ("in", self.last, self.v), ("in", name, View(F, (self.rows, self.n), (0, 0)))
        )

    def transposed_result(self, c):
        """The library returns this result with the strides of its operand."""
        across = View(F, (self.n, self.rows), (1, self.n))
        self.last = self.call("aten.cos.default", ("in", self.last, across), out=across)


STEPS = [name for name, of in vars(Growing).items() if callable(of) and name[0] != "_" and name not in ("new", "call")]
CONSTANTS = [0.0, -0.0, 1, 1.0, True, 2, 0.5]


def build(wis, rows, n, steps):
    growing = Growing(wis, rows, n)
    growing.exp(0.0)
    for name, c in steps:
        getattr(growing, name)(c)
    return growing


def left_by(runtime, store, growing, times):
    """The outcome and the bytes of all buffers after the last of some runs, and the program."""
    body, ids = growing.body, {name: i for i, name in enumerate(growing.body.names)}
    ready = store.define(body.raw)
    for _ in range(times):
        buffers = {}
        for name, n in growing.inputs.items():
            buffers[ids[name]] = Buffer(4 * n, torch.linspace(-1, 1, n).view(torch.uint8).clone())
        outcome = runtime.run(ready.prepared, buffers, list(ids.values()), growing.params)
    found = {i: bytes(bytes_of(b.base, 0, b.nbytes).numpy()) for i, b in buffers.items()}
    return (outcome.failed_at, outcome.error, found), ready.prepared


@given(
    variants=st.lists(
        st.lists(st.tuples(st.sampled_from(STEPS), st.sampled_from(CONSTANTS)), max_size=7), min_size=1, max_size=2
    ),
    shapes=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5)), min_size=2, max_size=5),
)
@settings(max_examples=examples(60, 600), deadline=None, derandomize=True)
def test_programs_of_a_family_have_the_results_of_the_reference(wis, variants, shapes):
    """Programs with different constants or steps run on the same runtime, so that their families could be confused. Steps are
    taken from earlier programs, however many forms differ.
    """
    runtime, reference = TorchCpuRuntime(hot=2), ReferenceRuntime()
    store, other = ProgramStore(runtime), ProgramStore(reference)
    with torch.inference_mode(), patch.object(similar, "OTHERS_PERCENT", 100):
        for rows, n in shapes:
            for steps in variants:
                growing = build(wis, rows, n, steps)
                found, _ = left_by(runtime, store, growing, times=3)
                assert found == left_by(reference, other, growing, times=1)[0]


def test_steps_of_instructions_that_do_not_differ_are_taken_from_a_similar_program(wis, monkeypatch):
    built = []
    compute = preparation._Preparation._compute
    monkeypatch.setattr(
        preparation._Preparation, "_compute", lambda self, act, anew: built.append(act.form) or compute(self, act, anew)
    )
    runtime, reference = TorchCpuRuntime(hot=3), ReferenceRuntime()
    store, other = ProgramStore(runtime), ProgramStore(reference)
    steps = [("fixed", 0.5), ("fixed", 2), ("exp", 0.0), ("fixed", 0.25), ("reduced", 0.5), ("fixed", 1)]
    counts = []
    with torch.inference_mode():
        for n in (4, 5, 6):
            growing = build(wis, 2, n, steps)
            built.clear()
            found, _ = left_by(runtime, store, growing, times=4)
            assert found == left_by(reference, other, growing, times=1)[0]
            counts.append(len(built))
        fixed = 2 * sum(name == "fixed" for name, _ in steps)
        assert counts[1] == counts[2] == counts[0] - fixed


def test_instruction_without_operands_is_not_taken_from_a_similar_program_that_has_another_one(wis, monkeypatch):
    """A `sleep` has no operands, so no slot shows that it differs."""
    slept = []
    monkeypatch.setattr(TorchDevice, "sleep", lambda self, ns: slept.append(ns) or 0)
    runtime, v = TorchCpuRuntime(), wis.at(F, 4)
    store = ProgramStore(runtime)
    for ns in (1, 2, 3):
        body = wis.body().add(Form("sleep", (), (), (("ns", ns),)))
        for operator in ("exp_", "sin_", "cos_"):
            body.call(f"aten.{operator}.default", ("inout", "x", v))
        prepared = store.define(body.raw).prepared
        with torch.inference_mode():
            assert runtime.run(prepared, {0: Buffer(16, torch.zeros(4))}, [0], []).error == ""
    assert slept == [1, 2, 3]


@pytest.mark.parametrize("widths", [(4, 1, 5), (1, 4, 1)])
def test_steps_are_built_anew_where_registers_have_other_numbers(wis, widths):
    """Two views of a tensor are one register if they are equal: here, if the tensor has one column."""
    runtime, reference = TorchCpuRuntime(hot=2), ReferenceRuntime()
    store, other = ProgramStore(runtime), ProgramStore(reference)
    programs = []
    with torch.inference_mode():
        for k in widths:
            growing = Growing(wis, 2, 3)
            part, first = View(F, (1, k), (k, 1)), View(F, (1, 1), (1, 1))
            growing.fixed(0.5)
            growing.call("aten.mul.Tensor", ("in", "x", part), ("in", "x", first), out=part)
            growing.fixed(2.0)
            growing.fixed(3.0)
            found, prepared = left_by(runtime, store, growing, times=3)
            assert found == left_by(reference, other, growing, times=1)[0]
            assert prepared.n_registers == len(prepared.slot_of)
            programs.append(prepared.program)
    assert programs[0].body is programs[1].body is programs[2].body


def test_programs_with_other_params_or_opcodes_are_not_similar(wis):
    store, kinds = ProgramStore(TorchCpuRuntime()), (ParamKind.F64, ParamKind.I64)
    v, found = wis.at(F, 4), []
    for kind in kinds:
        body = wis.body()
        for k in range(4):
            body.alloc(f"y{k}", 16).call("aten.exp.default", ("in", f"y{k - 1}" if k else "x", v), ("out", f"y{k}", v))
        body.alloc("z", 16).call(
            "aten.add.Tensor", ("in", "y3", v), ("out", "z", v), args=(REFS[0], ParamRef(0)), params=[kind]
        )
        found.append(store.define(body.raw).prepared.program)
    first, second = found
    assert first.body is second.body
    kept = similar.Similar()
    kept.keep(first, similar.Steps(first.forms, (), (), (), (), (), (), {}, Counter(), {}))
    assert kept.to(first) is not None and kept.to(second) is None


def test_similar_programs_are_bounded(wis, monkeypatch):
    monkeypatch.setattr(similar, "STEPS", 20)
    kept, programs = similar.Similar(), [build(wis, 1, n, [("exp", 0)] * n).body.program for n in (1, 2, 3)]
    for program in (*programs, programs[2]):
        kept.keep(program, similar.Steps(program.forms, (), [None] * 9, (), (), (), (), {}, Counter(), {}))
    assert [kept.to(program) is not None for program in programs] == [False, True, True]


def attention(wis, n):
    return build(wis, 2, n, [(name, 0.5) for name in ("exp", "cat", "expand_sum", "add_transposed", "in_place", "pad")])


def test_the_third_program_of_a_family_is_combined_without_a_compilation(wis, monkeypatch):
    combined, opened = [], []
    combine = prepared_programs.combine

    def counted(*args, **kwargs):
        opened.append(kwargs["opened"])
        combined.append(combine(*args, **kwargs))
        return combined[-1]

    monkeypatch.setattr(prepared_programs, "combine", counted)
    runtime = TorchCpuRuntime(hot=2)
    store = ProgramStore(runtime)
    with torch.inference_mode():
        found = [left_by(runtime, store, attention(wis, n), times=3)[1] for n in (3, 5, 9, 12)]
    assert len({id(prepared.family) for prepared in found}) == 1
    assert len(combined) == 2 and not opened[0] and opened[1]
    assert all(len(prepared.hot) == 1 for prepared in found)
    assert found[0].sizes != found[1].sizes


@pytest.mark.parametrize("other", [[("add_constant", -0.0)], [("add_constant", 0)], [("add_constant", False)], []])
def test_programs_that_differ_in_more_than_sizes_have_other_families(wis, other):
    store = ProgramStore(TorchCpuRuntime())
    one, another = (store.define(build(wis, 2, 3, steps).body.raw) for steps in ([("add_constant", 0.0)], other))
    assert one.prepared.family is not another.prepared.family
    assert store.define(build(wis, 2, 4, [("add_constant", 0.0)]).body.raw).prepared.family is one.prepared.family


def test_program_of_a_family_with_settled_edges_is_combined_from_its_second_run_on(wis):
    runtime = TorchCpuRuntime()
    store = ProgramStore(runtime)

    def run(n, times):
        growing = attention(wis, n)
        ready = store.define(growing.body.raw)
        for _ in range(times):
            left_by(runtime, store, growing, times=1)
            cut = ready.estimate.cut
            ready.observe(cut, 0, [1_000] * len(cut.kernels))
        return ready

    with torch.inference_mode():
        first = run(3, SETTLED)
        assert first.estimate.settled and not first.prepared.hot
        for n in (4, 5, 6):
            ready = run(n, 1)
            assert ready.estimate is first.estimate and ready.prepared.settled and not ready.prepared.hot
            run(n, 1)
            assert ready.prepared.hot
        assert first.prepared.family.learned == 2  # the third one knew how


@pytest.mark.parametrize(
    ("form_ns", "shared"),
    [
        ([10_000, 100_000, 1_000], True),
        ([11_000, 105_000, 5_900], True),
        ([10_000, 121_000, 1_000], False),
        ([10_000, 100_000, 12_000], False),  # a twelfth of the whole, but twelve times as long as expected
    ],
)
def test_programs_of_a_family_share_an_estimate_if_they_should_take_about_the_same_time(wis, form_ns, shared):
    v, body = wis.at(F, 4), wis.body()
    for operator in ("exp", "sin", "neg"):
        body.call(
            f"aten.{operator}.out", ("in", "x", v), ("inout", "y", v), args=(REFS[0],), kwargs=(("out", REFS[1]),)
        )
    program, family, known = body.program, families.Family(), Estimates()
    first = known.of(family, program, [10_000, 100_000, 1_000], DEFAULT_RATES)
    assert (known.of(family, program, form_ns, DEFAULT_RATES) is first) is shared
    assert known.of(families.Family(), program, [10_000, 100_000, 1_000], DEFAULT_RATES) is not first


def test_program_that_has_only_failed_is_not_combined_early(wis):
    """Nothing is known of the layouts of its results yet."""
    v, at, out = View(F, (3,), (1,)), View(DType.I64, (1,), (1,)), View(F, (1,), (1,))
    body = wis.body().alloc("y", 4)
    body.call(
        "aten.index_select.default", ("in", "x", v), ("in", "at", at), ("out", "y", out), args=(REFS[0], 0, REFS[1])
    )
    runtime = TorchCpuRuntime()
    prepared, names = ProgramStore(runtime).define(body.raw).prepared, body.names
    prepared.settled = True
    with torch.inference_mode():
        for index in (3, 3, 3, 0, 0):
            buffers = {
                names.index("x"): Buffer(12, torch.zeros(3)),
                names.index("at"): Buffer(8, torch.tensor([index])),
            }
            outcome = runtime.run(prepared, buffers, range(len(names)), [])
            assert (outcome.failed_at is None) is (index == 0) and not (prepared.asked and index)
    assert prepared.asked


def test_estimate_pauses_without_a_lock(wis):
    """Decoders take turns: one that pauses may wait for another one that makes an estimate of the same family."""
    v, body = wis.at(F, 4), wis.body()
    body.call("aten.exp.out", ("in", "x", v), ("inout", "y", v), args=(REFS[0],), kwargs=(("out", REFS[1]),))
    family, known, others = families.Family(), Estimates(), []

    def pause():
        if not others:
            others.append(pool.submit(known.of, family, body.program, [1], DEFAULT_RATES))
            others.append(others[0].result(timeout=10))

    with ThreadPoolExecutor(1) as pool, pausing(pause):
        found = known.of(family, body.program, [1_000_000], DEFAULT_RATES)
    assert found is not others[1]


def test_program_waits_while_another_one_of_the_family_learns_how_to_combine_the_steps(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(families.time, "monotonic", lambda: now[0])
    family = families.Family()
    assert family.learns("way", early=True) and not family.learns("way", early=True)
    assert family.learns("another way", early=True) and family.learns("way", early=False)
    family.keep("way", {}, None)
    family.gave_up("another way")
    assert family.learned == 2 and family.known("way", {})[0] and not family.known("another way", {})[0]
    assert family.learns("another way", early=True)
    now[0] += families.LOST_S  # it will never answer
    assert family.learns("another way", early=True)
    for _ in range(families.EARLY):
        now[0] += families.LOST_S
        last = family.learns("another way", early=True)
    assert not last and family.learns("another way", early=False)


def test_families_and_their_ways_are_bounded(monkeypatch):
    monkeypatch.setattr(families, "STEPS", 20)
    known = families.Families()
    first, second = known.of("a", 8), known.of("b", 8)
    assert second is not first and known.of("a", 8) is first
    known.of("c", 8)  # in place of the one that was asked for the longest time ago
    assert known.of("a", 8) is first and known.of("b", 8) is not second
    family = families.Family()
    for way in range(families.WAYS + 1):
        family.keep(way, {}, None)
    assert family.known(0, {})[0] is False and family.known(1, {})[0] is True
