"""The verifier: valid programs pass, and each law has a program that breaks only this law."""

import pytest
from hypothesis import given, settings
from wooly_testkit import strategies
from wooly_testkit.effort import examples
from wooly_wis.dtypes import DType
from wooly_wis.errors import VerifyError
from wooly_wis.laws import FORM_LAWS
from wooly_wis.program import Form, Instruction, Operand, OperandRef, ParamKind, ParamRef, Program, Role, View
from wooly_wis.verifier import Limits, verify_program

V = View(DType.F32, (4,), (1,))
ALLOC = Form("alloc", (Operand(Role.OUT, View(DType.U8, (16,), (1,))),))
FREE = Form("free", (Operand(Role.IN, None),))


def extern(*operands, params=(), **attrs):
    attrs = {"name": "aten.neg.default", "args": (OperandRef(0),), "kwargs": ()} | attrs
    return Form("extern", operands, params, tuple(sorted(attrs.items())))


NEG = extern(Operand(Role.IN, V), Operand(Role.OUT, V))


def program(*steps):
    forms, body = [], []
    for form, *slots in steps:
        if form not in forms:
            forms.append(form)
        body.append(Instruction(forms.index(form), tuple(slots)))
    return Program(tuple(forms), tuple(body))


@given(strategies.programs())
@settings(max_examples=examples(50, 150), deadline=None)
def test_verify_valid_program_reports_slot_sizes(candidate):
    facts = verify_program(candidate)
    assert len(facts.slot_bytes) == candidate.n_slots
    for size, need in zip(facts.slot_alloc, facts.slot_bytes, strict=True):
        assert size is None or need <= size


def test_facts_of_a_small_program():
    facts = verify_program(program((ALLOC, 0), (NEG, 1, 0), (FREE, 1)))
    assert facts.slot_bytes == (16, 16) and facts.slot_alloc == (16, None)
    assert facts.slot_freed == (False, True) and facts.alloc_bytes == facts.kept_bytes == 16


WIDE = View(DType.F32, (5,), (1,))
SELF = View(DType.F32, (4,), (0,))

BROKEN = {
    "launch": program((Form("kernel.launch"),)),
    "sleep": program((Form("sleep", (), (), (("ns", 10_000_001),)),)),
    "opcode": program((Form("jump"),)),
    "operands": program((Form("copy", (Operand(Role.IN, V),)), 0)),
    "views": program((Form("copy", (Operand(Role.IN, None), Operand(Role.OUT, V))), 0, 1)),
    "extent": program((extern(Operand(Role.IN, View(DType.F32, (4,), (-1,))), Operand(Role.OUT, V)), 0, 1)),
    "no-overlap": program((extern(Operand(Role.IN, V), Operand(Role.OUT, SELF)), 0, 1)),
    "alloc": program((Form("alloc", (Operand(Role.OUT, V),)), 0)),
    "copy": program((Form("copy", (Operand(Role.IN, V), Operand(Role.OUT, WIDE))), 0, 1)),
    "attrs": program((extern(Operand(Role.IN, V), Operand(Role.OUT, V), colour=1), 0, 1)),
    "refs": program((extern(Operand(Role.IN, V), Operand(Role.OUT, V), args=(OperandRef(7),)), 0, 1)),
    "rule": program(
        (Form("add", (Operand(Role.IN, V), Operand(Role.OUT, V)), (), (("args", (OperandRef(0),)),)), 0, 1)
    ),
    "extern": program((extern(Operand(Role.IN, V), Operand(Role.OUT, V), name="aten.from_file.default"), 0, 1)),
    "flags": program((extern(Operand(Role.IN, V), Operand(Role.OUT, V), flags=("matmul_tf32",)), 0, 1)),
    "form-order": Program((NEG, ALLOC), (Instruction(1, (0,)), Instruction(0, (0, 1)))),
    "form-used": Program((NEG, ALLOC), (Instruction(0, (0, 1)),)),
    "form-unique": Program((NEG, extern(Operand(Role.IN, V), Operand(Role.OUT, V))), (Instruction(0, (0, 1)),)),
    "arity": Program((NEG,), (Instruction(0, (0,)),)),
    "slot-order": program((NEG, 0, 2)),
    "alloc-first": program((NEG, 0, 1), (ALLOC, 1)),
    "use-after-free": program((NEG, 0, 1), (FREE, 1), (NEG, 1, 0)),
    "bounds": program((ALLOC, 0), (extern(Operand(Role.IN, V), Operand(Role.OUT, WIDE)), 1, 0)),
}


@pytest.mark.parametrize("law", BROKEN)
def test_verify_broken_law_is_named(law):
    with pytest.raises(VerifyError) as caught:
        verify_program(BROKEN[law])
    assert caught.value.law == law and law in str(caught.value)


def test_every_form_law_has_a_program_that_breaks_it():
    assert {law.name for law in FORM_LAWS} <= set(BROKEN)


def test_limits_are_enforced():
    with pytest.raises(VerifyError, match="instructions"):
        verify_program(program((NEG, 0, 1), (NEG, 1, 0)), Limits(instructions=1))
    with pytest.raises(VerifyError, match="slots"):
        verify_program(program((NEG, 0, 1)), Limits(slots=1))


def test_misaligned_offset_and_wrong_rng_are_refused():
    odd = View(DType.F32, (1,), (1,), 2)
    with pytest.raises(VerifyError, match="not a multiple"):
        verify_program(program((extern(Operand(Role.IN, odd), Operand(Role.OUT, V)), 0, 1)))
    params = (ParamKind.F64, ParamKind.I64)
    rng = (ParamRef(0), ParamRef(1))
    with pytest.raises(VerifyError, match="rng"):
        verify_program(program((extern(Operand(Role.IN, V), Operand(Role.OUT, V), params=params, rng=rng), 0, 1)))


GRADIENT = {"wanted": (OperandRef(0),), "vjp": (OperandRef(1),)}


def test_gradient_of_an_operator_is_valid():
    verify_program(
        program((extern(Operand(Role.IN, V), Operand(Role.IN, V), Operand(Role.OUT, V), **GRADIENT), 0, 1, 2))
    )
    for attrs in ({}, {"no_grad": True}):
        form = extern(Operand(Role.IN, V), Operand(Role.OUT, V), wanted=(OperandRef(0),), **attrs)
        verify_program(program((form, 0, 1)))


@pytest.mark.parametrize("attrs", [{"no_grad": True}, {"no_grad": False, "wanted": (OperandRef(0),)}])
def test_invalid_no_grad_is_refused(attrs):
    with pytest.raises(VerifyError, match="no_grad must be true"):
        verify_program(program((extern(Operand(Role.IN, V), Operand(Role.OUT, V), **attrs), 0, 1)))
    with pytest.raises(VerifyError, match="no_grad must be true"):
        form = extern(Operand(Role.IN, V), Operand(Role.IN, V), Operand(Role.OUT, V), no_grad=True, **GRADIENT)
        verify_program(program((form, 0, 1, 2)))


@pytest.mark.parametrize(
    ("wanted", "vjp"),
    [
        (None, (OperandRef(1),)),
        ((), (OperandRef(1),)),
        (3, (OperandRef(1),)),
        ((0,), (OperandRef(1),)),
        ((OperandRef(2),), (OperandRef(1),)),
        ((OperandRef(9),), (OperandRef(1),)),
        ((OperandRef(0), OperandRef(1)), (OperandRef(1),)),
        ((OperandRef(0),), ()),
        ((OperandRef(0),), 3),
        ((OperandRef(0),), (None,)),
        ((OperandRef(0),), (1,)),
        ((OperandRef(0),), (OperandRef(2),)),
    ],
)
def test_invalid_gradient_is_refused(wanted, vjp):
    attrs = {"vjp": vjp} | ({} if wanted is None else {"wanted": wanted})
    form = extern(Operand(Role.IN, V), Operand(Role.IN, V), Operand(Role.OUT, V), **attrs)
    with pytest.raises(VerifyError, match=r"vjp|wanted|refers to"):
        verify_program(program((form, 0, 1, 2)))


@pytest.mark.parametrize("name", ["conj", "neg"])
def test_operand_may_be_read_conjugated_or_negated(name):
    z = View(DType.C64, (4,), (1,), 0)
    form = extern(Operand(Role.IN, z), Operand(Role.OUT, z), **{name: (OperandRef(0),)})
    verify_program(program((form, 0, 1)))


@pytest.mark.parametrize(
    ("dtype", "role", "attrs"),
    [
        (DType.F32, Role.IN, {"conj": (OperandRef(0),)}),
        (DType.I64, Role.IN, {"neg": (OperandRef(0),)}),
        (DType.C64, Role.IN, {"conj": ()}),
        (DType.C64, Role.IN, {"conj": 3}),
        (DType.C64, Role.IN, {"conj": (0,)}),
        (DType.C64, Role.IN, {"neg": (OperandRef(1),)}),
        (DType.C64, Role.INOUT, {"conj": (OperandRef(0),)}),
        (DType.C64, Role.IN, {"conj": (OperandRef(0),), "wanted": (OperandRef(0),)}),
    ],
)
def test_invalid_conj_or_neg_is_refused(dtype, role, attrs):
    v = View(dtype, (4,), (1,), 0)
    with pytest.raises(VerifyError, match=r"conj|neg"):
        verify_program(program((extern(Operand(role, v), Operand(Role.OUT, v), **attrs), 0, 1)))


@pytest.mark.parametrize(
    ("name", "value", "good"),
    [
        ("aten.index_copy_.default", True, True),
        ("aten.index_copy_.default", False, False),
        ("aten.index_copy_.default", 1, False),
        ("aten.neg.default", True, False),
    ],
)
def test_deterministic_belongs_to_operators_with_several_algorithms(name, value, good):
    form = extern(Operand(Role.IN, V), Operand(Role.OUT, V), name=name, deterministic=value)
    if good:
        verify_program(program((form, 0, 1)))
        return
    with pytest.raises(VerifyError, match="deterministic"):
        verify_program(program((form, 0, 1)))


@pytest.mark.parametrize(
    ("name", "flags", "wrong"),
    [
        ("aten.bmm.default", ("matmul_tf32", "no_fp16_split_k"), None),
        ("aten.convolution.default", ("cudnn_deterministic", "no_conv_tf32"), None),
        ("aten.gru.input", ("matmul_tf32", "no_rnn_tf32"), None),
        ("aten.mm.default", ("tf64",), "flag 'tf64' is unknown; known are cudnn_deterministic"),
        ("aten.mm.default", ("no_conv_tf32",), "does not concern aten.mm.default"),
        ("aten.neg.default", ("matmul_tf32",), "does not concern aten.neg.default"),
        ("other.mm.default", ("matmul_tf32",), "does not concern other.mm.default"),
        ("aten.mm.default", ("no_fp16_split_k", "matmul_tf32"), "not sorted"),
        ("aten.mm.default", ("matmul_tf32", "matmul_tf32"), "occurs twice"),
        ("aten.mm.default", (), "non-empty tuple of names"),
        ("aten.mm.default", "matmul_tf32", "non-empty tuple of names"),
        ("aten.mm.default", (1,), "non-empty tuple of names"),
        ("aten.mm.default", True, "non-empty tuple of names"),
    ],
)
def test_flags_are_those_that_the_operator_follows(name, flags, wrong):
    form = extern(Operand(Role.IN, V), Operand(Role.OUT, V), name=name, flags=flags)
    if wrong is None:
        verify_program(program((form, 0, 1)))
        return
    with pytest.raises(VerifyError, match=wrong):
        verify_program(program((form, 0, 1)))


@pytest.mark.parametrize(("opcode", "law"), [("mm", None), ("mul", "attrs")])
def test_native_form_has_flags_only_if_it_is_a_product(opcode, law):
    square = View(DType.F32, (4, 4), (4, 1))
    attrs = ("args", (OperandRef(0), OperandRef(1))), ("flags", ("matmul_tf32",))
    form = Form(opcode, (Operand(Role.IN, square), Operand(Role.IN, square), Operand(Role.OUT, square)), (), attrs)
    if law is None:
        verify_program(program((form, 0, 1, 2)))
        return
    with pytest.raises(VerifyError) as caught:
        verify_program(program((form, 0, 1, 2)))
    assert caught.value.law == law


@pytest.mark.parametrize("result", [WIDE, View(DType.F64, (4,), (1,)), None])
def test_gradient_has_the_shape_and_dtype_of_its_operand(result):
    form = extern(Operand(Role.IN, V), Operand(Role.IN, V), Operand(Role.OUT, result), **GRADIENT)
    with pytest.raises(VerifyError, match="operand's shape and dtype"):
        verify_program(program((form, 0, 1, 2)))


@pytest.mark.parametrize(("sizes", "strides"), [((1 << 21, 1 << 20), (0, 0)), ((1 << 30,) * 64, (1,) * 64)])
def test_view_with_too_many_elements_is_refused(sizes, strides):
    endless = program((extern(Operand(Role.IN, View(DType.F32, sizes, strides)), Operand(Role.OUT, V)), 0, 1))
    with pytest.raises(VerifyError, match="elements") as caught:
        verify_program(endless)
    assert caught.value.law == "extent"
    most = View(DType.F32, (1 << 20, 1 << 20), (0, 0))
    verify_program(program((extern(Operand(Role.IN, most), Operand(Role.OUT, V)), 0, 1)))
