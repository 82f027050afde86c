"""Artifacts: each has one encoding. The reader refuses bytes that break a law or access memory out of bounds."""

import json
import os
import random
import struct
from dataclasses import replace

import pytest
from wooly_testkit.effort import examples
from wooly_testkit.tape import Tape
from wooly_wis.artifact import (
    MAGIC,
    MAX_ARTIFACT,
    Artifact,
    Code,
    Key,
    decide,
    deciding_params,
    decode_artifact,
    encode_artifact,
    family,
    key_of,
)
from wooly_wis.codec import digest
from wooly_wis.dtypes import DType
from wooly_wis.errors import ArtifactError, PlanError, WisError
from wooly_wis.kernel.builder import KernelBuilder
from wooly_wis.plan import AllocStep, FreeStep, KernelStep, LibraryStep, Line, Plan, verify
from wooly_wis.pocl import pocl_target
from wooly_wis.program import Form, Operand, OperandRef, Role, View
from wooly_wis.verifier import verify_program

F32 = DType.F32
N = 64
TARGET = pocl_target(2, "a platform", ["basic-x", "pthread-x"], "a cpu")


def source():
    """A tape of y = (x * w) * p, z = exp(y), with its program and its slots by name. No other instruction uses x * w."""
    t = Tape()
    x, w = t.input(F32, N), t.input(F32, N)
    m = t.op("mul", x, w)
    y = t.op("mul", m, 3.0)
    t.free(m)
    z = t.op("exp", y)
    program, slots = t.program()
    return t, program, {k: slots[v.slot] for k, v in {"x": x, "w": w, "m": m, "y": y, "z": z}.items()}


def kernel(numel=N, roles=(Role.IN, Role.IN, Role.OUT), scalar=DType.F64, name="k_mul_mul"):
    k = KernelBuilder(name, [N])
    a, b, c = (k.array(n, F32, numel, role) for n, role in zip(("a", "b", "c"), roles, strict=True))
    p = k.scalar("p", scalar)
    (i,) = k.points
    product = k.apply("mul", k.load(a, i), k.load(b, i))
    k.store(c, i, k.apply("mul", product, k.apply("convert", k.param(p), dtype=F32)))
    return k.finish()


def lines(program):
    found, first = [], 0
    for k, i in enumerate(program.body):
        form = program.forms[i.form]
        if form.opcode not in ("alloc", "free"):
            found.append(Line(form, i.slots, first, k))
        first += len(form.params)
    return found


def planned():
    """A plan of `source`, with one kernel for the products; the program and its slots."""
    tape, program, s = source()
    mul, times, exp = lines(program)
    steps = (
        AllocStep(s["y"], 4 * N, False),
        KernelStep(kernel(), (s["x"], s["w"], s["y"]), (0,), (mul, times)),
        AllocStep(s["z"], 4 * N, True),
        LibraryStep(exp, "the library's"),
    )
    return Plan(program, verify_program(program), steps, {}, frozenset({s["m"]})), s, tape


def whole(plan=None):
    if plan is None:
        plan = planned()[0]
    key = key_of(plan.program, TARGET, "exact", (3.0,))
    codes = tuple([Code(k.name, 1, 1, 0, b"code of " + k.name.encode()) for k in plan.kernels])
    return Artifact(key, "c1", plan, codes)


def read(data, **other):
    plan, _, _ = planned()
    given = {"key": key_of(plan.program, TARGET, "exact", (3.0,)), "compiler": "c1"} | other
    return decode_artifact(data, given["key"], given["compiler"], plan.program, plan.facts)


# -- encoding ------------------------------------------------------------------------------------------------------------


def test_artifact_encoded_decodes_to_itself():
    artifact = whole()
    data = encode_artifact(artifact)
    again = read(data)
    assert again == artifact and encode_artifact(again) == data


def test_key_name_depends_on_every_field_and_the_compiler():
    _, program, _ = source()
    key = key_of(program, TARGET, "exact", (3.0,))
    others = [
        replace(key, program=bytes(32)),
        replace(key, target="x"),
        replace(key, mode="full"),
        replace(key, decided=((1, bytes(8)),)),
    ]
    assert len({k.name("c1") for k in (key, *others)} | {key.name("c2")}) == 6


def test_deciding_params_are_exponents_only():
    t = Tape()
    x = t.input(F32, N)
    t.op("pow", t.op("mul", x, 0.5), 2)
    t.op("pow", x, 3.0)
    program, _ = t.program()
    assert deciding_params(program) == (1, 2)
    assert decide(program, t.params) == ((1, struct.pack("<q", 2)), (2, struct.pack("<d", 3.0)))


def test_pocl_target_names_the_driver_and_family_is_a_token():
    other = pocl_target(2, "another platform", ["basic-x", "pthread-x"], "a cpu")
    assert other != TARGET and pocl_target(1, "a platform", ["basic-x", "pthread-x"], "a cpu") != TARGET
    assert family(TARGET) == family(pocl_target(1, "a platform", ["basic-x", "pthread-x"], "a cpu")) != family(other)
    assert not set(".*> ") & set(family(TARGET) + family("cuda:sm_90"))


# -- refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"compiler": "c2"},
        {"key": Key(bytes(32), TARGET, "exact")},
        {"key": replace(key_of(source()[1], TARGET, "exact", ()), target="opencl:000000000000-x1")},
        {"key": replace(key_of(source()[1], TARGET, "exact", ()), mode="full")},
        {"key": replace(key_of(source()[1], TARGET, "exact", ()), decided=((0, bytes(8)),))},
    ],
)
def test_decode_artifact_other_than_requested_is_refused(wrong):
    with pytest.raises(ArtifactError):
        read(encode_artifact(whole()), **wrong)


@pytest.mark.parametrize(
    "data", [b"", MAGIC, bytes(100), MAGIC + bytes(100), os.urandom(1000), b"x" * (MAX_ARTIFACT + 1)]
)
def test_decode_artifact_arbitrary_bytes_are_refused(data):
    with pytest.raises(ArtifactError):
        read(data)


def sealed(body):
    """The body with a valid digest."""
    return body + digest(body)


def with_header(change):
    """An artifact with a changed header and a valid digest."""
    data = encode_artifact(whole())
    _, version, size = struct.unpack_from("<8sII", data)
    header = json.loads(data[16 : 16 + size])
    header = change(header) or header
    raw = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    return sealed(struct.pack("<8sII", MAGIC, version, len(raw)) + raw + data[16 + size : -32])


def test_decode_artifact_unchanged_header_is_accepted():
    assert read(with_header(lambda h: None)) == whole()


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.update(more=1),
        lambda h: h.pop("steps"),
        lambda h: h.update(steps=h["steps"] * 2),
        lambda h: h.update(steps=[]),
        lambda h: h["steps"][1].update(kernel=7),
        lambda h: h["steps"][1].update(slots=[0, 1]),
        lambda h: h["steps"][1].update(slots=[0, 1, 99]),
        lambda h: h["steps"][1].update(slots=[0, 1, -1]),
        lambda h: h["steps"][1].update(slots=[0, 1, 1 << 80]),
        lambda h: h["steps"][1].update(params=[]),
        lambda h: h["steps"][1].update(params=[5]),
        lambda h: h["steps"][1].update(lines=[]),
        lambda h: h["steps"][1]["lines"][0].__setitem__(0, 99),
        lambda h: h["steps"][1]["lines"][0].__setitem__(3, 99),
        lambda h: h["steps"][0].update(nbytes=1 << 40),
        lambda h: h["steps"][0].update(nbytes=True),
        lambda h: h["steps"][2].update(zero="yes"),
        lambda h: h.update(temporaries=[10**30]),
        lambda h: h.update(assumed=[0]),
        lambda h: h.update(forms=[1 << 30]),
        lambda h: h["kernels"][0].update(code=1 << 30),
        lambda h: h["kernels"][0].update(groups=0),
        lambda h: h["kernels"][0].update(entry="k; system('x')"),
        lambda h: h["kernels"][0].update(unit=2),
        lambda h: h.update(kernels=[]),
        lambda h: h.update(removed=[[0, "x" * 5000]]),
        lambda h: [h],
        lambda h: json.loads("[" * 900 + "]" * 900),
    ],
)
def test_decode_artifact_changed_header_is_refused(change):
    with pytest.raises((ArtifactError, PlanError)):
        read(with_header(change))


def test_decode_artifact_deeply_nested_header_is_refused():
    raw = b"[" * 200_000
    with pytest.raises(ArtifactError):
        read(sealed(struct.pack("<8sII", MAGIC, 1, len(raw)) + raw))


def test_decode_artifact_mutants_are_refused_or_valid():
    rng, data = random.Random(1), encode_artifact(whole())
    for _ in range(examples(500, 1500)):
        mutant = bytearray(data[:-32])
        for _ in range(rng.randint(1, 3)):
            match rng.randrange(3):
                case 0:
                    mutant[rng.randrange(len(mutant))] = rng.choice(
                        [0, 1, 0x7F, 0xFF, rng.randrange(256), ord("9"), ord("-")]
                    )
                case 1:
                    at = rng.randrange(len(mutant))
                    del mutant[at : at + rng.randint(1, 8)]
                case 2:
                    at = rng.randrange(len(mutant))
                    mutant[at:at] = mutant[at : at + rng.randint(1, 8)]
        try:
            found = read(sealed(bytes(mutant)))
        except WisError:
            continue
        verify(found.plan)


def hostile():
    """(law, plan): plans that break the law."""
    plan, s, _ = planned()
    mul, times, exp = lines(plan.program)
    alloc_y, run, alloc_z, call = plan.steps
    wide = Form(
        "exp", (Operand(Role.IN, View(F32, (N + 1,), (1,))), Operand(Role.OUT, View(F32, (N + 1,), (1,)))), (),
        (("args", (OperandRef(0),)),),
    )  # fmt: skip
    system = Form(
        "extern", exp.form.operands, (), (("args", (OperandRef(0),)), ("kwargs", ()), ("name", "aten.exp.default"))
    )

    def steps(*found, removed=None):
        return replace(plan, steps=tuple(found), removed=removed or {})

    yield "covers", steps(alloc_y, run, alloc_z)
    yield "covers", steps(alloc_y, run, alloc_z, call, call)
    yield "covers", steps(alloc_y, run, alloc_z, call, call, removed={exp.origin: "for fun"})
    yield "covers", steps(alloc_y, replace(run, lines=(mul, replace(times, part=1))), alloc_z, call)
    yield "lines", steps(alloc_y, run, alloc_z, LibraryStep(replace(exp, form=wide), ""))
    yield "lines", steps(alloc_y, run, alloc_z, LibraryStep(replace(exp, form=system), ""))
    yield (
        "lines",
        steps(alloc_y, run, alloc_z, LibraryStep(replace(exp, slots=(s["y"], s["x"])), "")),
    )  # writes an operand that it may only read
    yield "lines", steps(alloc_y, replace(run, lines=(mul, replace(times, first_param=7))), alloc_z, call)
    yield "order", steps(alloc_y, alloc_z, call, run)
    yield "bounds", steps(alloc_y, replace(run, kernel=kernel(numel=N + 1)), alloc_z, call)
    yield "bounds", steps(alloc_y, replace(run, slots=(s["x"], s["w"])), alloc_z, call)
    yield "bounds", steps(alloc_y, replace(run, params=()), alloc_z, call)
    yield "bounds", steps(alloc_y, replace(run, kernel=kernel(scalar=DType.I64)), alloc_z, call)
    yield "bounds", steps(alloc_y, replace(run, kernel=kernel(roles=(Role.IN, Role.INOUT, Role.OUT))), alloc_z, call)
    yield "bounds", steps(alloc_y, replace(run, lines=()), alloc_z, call, removed={mul.origin: "", times.origin: ""})
    yield "memory", steps(run, alloc_y, alloc_z, call)
    yield "memory", steps(alloc_y, run, alloc_z, call, FreeStep(s["x"]))
    yield "memory", steps(alloc_y, run, alloc_z, call, FreeStep(s["z"]))
    yield "memory", steps(alloc_y, alloc_y, run, alloc_z, call)
    yield "memory", steps(replace(alloc_y, nbytes=8 * N), run, alloc_z, call)
    yield "memory", steps(alloc_y, AllocStep(s["m"], 4 * N, True), run, alloc_z, call)  # no step frees slot m
    yield "overlap", steps(alloc_y, replace(run, slots=(s["x"], s["y"], s["y"])), alloc_z, call)
    broken = replace(kernel(), body=kernel().body[1:])
    yield "kernels", steps(alloc_y, replace(run, kernel=broken), alloc_z, call)


@pytest.mark.parametrize(
    ("law", "plan"), [pytest.param(*case, id=f"{k}-{case[0]}") for k, case in enumerate(hostile())]
)
def test_verify_hostile_plan_names_the_broken_law(law, plan):
    with pytest.raises(PlanError, match=rf"\[law: {law}\]"):
        verify(plan)
    with pytest.raises(WisError):
        read(encode_artifact(whole(plan)))


def test_verify_unzeroed_slot_must_be_filled_by_its_first_user():
    plan, _, _ = planned()
    _, _, exp = lines(plan.program)
    half = View(F32, (N // 2,), (1,))
    alloc_y, run, alloc_z, call = plan.steps
    some = replace(exp, form=Form("exp", (Operand(Role.IN, half), Operand(Role.OUT, half)), (), exp.form.attrs))
    dirty = replace(plan, steps=(alloc_y, run, replace(alloc_z, zero=False), LibraryStep(some, "")))
    with pytest.raises(PlanError, match="not zeroed"):
        verify(dirty)
    verify(replace(dirty, steps=(alloc_y, run, alloc_z, LibraryStep(some, ""))))
    verify(replace(plan, steps=(alloc_y, run, replace(alloc_z, zero=False), call)))


def test_verify_plan_with_higher_peak_than_its_program_is_refused():
    t = Tape()
    x = t.input(F32, N)
    for _ in range(2):
        y = t.op("exp", x)
        t.op("add", x, y, into=x)
        t.free(y)
    program, _ = t.program()
    facts = verify_program(program)
    first, add, second, again = lines(program)
    a, b = first.slots[1], second.slots[1]
    run = [LibraryStep(x, "") for x in (first, add, second, again)]
    apart = (AllocStep(a, 4 * N, True), *run[:2], FreeStep(a), AllocStep(b, 4 * N, True), *run[2:], FreeStep(b))
    verify(Plan(program, facts, apart, {}, frozenset()))
    at_once = (AllocStep(a, 4 * N, True), AllocStep(b, 4 * N, True), *run, FreeStep(a), FreeStep(b))
    with pytest.raises(PlanError, match="512 bytes at the same time, but its program needs only 256"):
        verify(Plan(program, facts, at_once, {}, frozenset()))


@pytest.mark.parametrize("exponent", [2, 2.0])
def test_key_of_contains_the_exponents_of_the_run(exponent):
    t = Tape()
    x = t.input(DType.F32, 16, 8209)
    t.op("mul", t.op("pow", x, exponent), x)
    program, _ = t.program()
    square, cube = (key_of(program, TARGET, "exact", [v, *t.params[1:]]) for v in (*t.params[:1], 3))
    assert square.decided != cube.decided and square.name("c") != cube.name("c")
