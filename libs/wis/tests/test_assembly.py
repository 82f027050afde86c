"""Assembly: the text of every program reads back into the same bytes; invalid text is refused, with its line."""

import contextlib
import math
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wooly_testkit import strategies
from wooly_testkit.assembler import AssemblyError, assemble
from wooly_testkit.effort import examples
from wooly_wis.assembly import disassemble
from wooly_wis.codec import encode_program
from wooly_wis.dtypes import DType
from wooly_wis.errors import EncodeError
from wooly_wis.program import Form, Instruction, Operand, OperandRef, ParamKind, ParamRef, Program, Role, Symbol, View

V = View(DType.F32, (2, 3), (3, 1))
T = View(DType.F32, (3, 2), (1, 3), 8)

TEXT = """\
wis 1
%0 u8[24] = alloc
%0 f32[2,3] = add<f64> %1 f32[2,3], %2 f32[2,3](1,2)+8 {alpha=$0}
%3 f32[2,3] = aten.mul.Tensor<c128>(%0 f32[2,3], $0)
aten.add_.Tensor(&%1 f32[2,3], %0 f32[2,3], alpha=2.0)
%4 f32[2,3] = aten.cat.default([%0 f32[2,3], %1 f32[2,3]], 1, out=none)
%5, %6 = aten.unique_dim.default(%4 f32[2,3], 0)
%1 f32[2,3] = aten.bernoulli.default<i64,i64>(%0 f32[2,3]) {rng=[$0, $1]}
%1 f32[2,3] = aten.add.Tensor(%0 f32[2,3], #0)
%1 f32[2,3] = fill {value=-inf}
free %1
"""


def one(form, *slots):
    return Program((form,), (Instruction(0, slots),))


def test_assembly_text_round_trips():
    assert disassemble(assemble(TEXT)) == TEXT


def test_assembly_ignores_blanks_and_comments():
    dense = "; made by hand\n\n  wis   1 ; version\n%0 f32[2,3]=fill{value=1};x\n\n"
    assert assemble(dense) == one(Form("fill", (Operand(Role.OUT, V),), (), (("value", 1),)), 0)


@given(strategies.programs())
@settings(max_examples=examples(60, 200), deadline=None)
def test_assembly_program_round_trips_to_the_same_bytes(program):
    assert encode_program(assemble(disassemble(program))) == encode_program(program)


EVERY_ATTR = [
    None,
    True,
    False,
    0,
    -(2**63),
    2**63 - 1,
    0.0,
    -0.0,
    0.1,
    5e-324,
    1.7976931348623157e308,
    1e16,
    -1e-7,
    math.inf,
    -math.inf,
    math.nan,
    -math.nan,
    struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_0000_0123))[0],
    complex(1.5, -0.0),
    complex(-0.0, math.inf),
    complex(math.nan, 1),
    "",
    'quote " backslash \\ newline \n tab \t nul \0 ; comment',
    "π and 🐑",
    *DType,
    OperandRef(0),
    ParamRef(0),
    Symbol("layout", "strided"),
    Symbol("f32", "none"),
    Symbol("two words", "9"),
    (),
    (1,),
    ((), ((1.5, None),), "x"),
]


@pytest.mark.parametrize("value", EVERY_ATTR, ids=repr)
def test_assembly_every_attribute_kind_round_trips(value):
    for form in (
        Form("fill", (Operand(Role.OUT, V),), (ParamKind.I64,), (("value", value),)),
        Form("fill", (Operand(Role.OUT, V),), (ParamKind.I64,), (("odd name", value), ("out", value))),
        extern(args=(OperandRef(0), value), kwargs=(("dim", value), ("out", (value,)))),
    ):
        program = one(form, *range(len(form.operands)))
        raw = encode_program(program)
        assert encode_program(assemble(disassemble(program))) == raw


def extern(*operands, **attrs):
    operands = operands or (Operand(Role.IN, V), Operand(Role.OUT, V))
    attrs = {"args": (OperandRef(0),), "kwargs": (), "name": "aten.neg.default"} | attrs
    return Form("extern", operands, (ParamKind.BOOL, ParamKind.C128), tuple(sorted(attrs.items())))


ODD = [
    extern(name=7),
    extern(name="no dots"),
    extern(args=()),
    extern(args=(OperandRef(1), OperandRef(0))),
    extern(args=(OperandRef(9),)),
    extern(args=4),
    extern(kwargs=(("a", 1, 2),)),
    extern(kwargs=((3, 4),)),
    extern(kwargs=(("two words", OperandRef(0)), ("two words", 1))),
    extern(Operand(Role.OUT, V), Operand(Role.IN, T), Operand(Role.OUT, None)),
    extern(Operand(Role.IN, None), Operand(Role.INOUT, None), Operand(Role.INOUT, T)),
    extern(Operand(Role.IN, View(DType.I8, (0, 4), (4, 1))), Operand(Role.IN, View(DType.I8, (), (), 3))),
    extern(Operand(Role.IN, View(DType.BOOL, (4, -2), (-1, 1)))),
    Form("an opcode. of words"),
    Form("aten.neg.default"),
    Form("out"),
    Form("wis"),
    Form(""),
]


@pytest.mark.parametrize("form", ODD, ids=range(len(ODD)))
def test_assembly_unlawful_forms_round_trip(form):
    program = one(form, *range(len(form.operands)))
    raw = encode_program(program)
    assert encode_program(assemble(disassemble(program))) == raw


@pytest.mark.parametrize(
    ("text", "line", "column", "says"),
    [
        ("", 1, 1, "starts with"),
        ("wis 2\n", 1, 5, "starts with"),
        ("wis 1 free %0\n", 1, 7, "end of the line"),
        ("wis 1\n%0 f33[1] = alloc", 2, 4, "not a dtype"),
        ("wis 1\n%0 f32[1,2](1) = alloc", 2, 14, "2 sizes and 1 strides"),
        ("wis 1\n\n  free %x", 3, 9, "integer"),
        ("wis 1\nfree %-1", 2, 7, "negative"),
        ("wis 1\nfree %99999999999", 2, 7, "32 bits"),
        ("wis 1\nfree %0 }", 2, 9, "end of the line"),
        ("wis 1\nneg(%0 f32[1])", 2, 4, "parentheses"),
        ("wis 1\nadd<f16> %0", 2, 5, "kind of param"),
        ("wis 1\nfill {value=1, value=2}", 2, 23, "twice"),
        ("wis 1\nfill {value=red}", 2, 13, "not a value"),
        ("wis 1\nfill {value=}", 2, 13, "expected a value"),
        ("wis 1\nfill {value=nan(0x1)}", 2, 13, "bits of a NaN"),
        ("wis 1\nfill {value=complex(1, 2.0)}", 2, 21, "fraction"),
        ("wis 1\nfill {value=99999999999999999999}", 2, 1, "64 bits"),
        ("wis 1\nfill {value=999999999999999999999}", 2, 13, "integer"),
        ('wis 1\nfill {value="\\q"}', 2, 13, "bad string"),
        ('wis 1\nfill {value="open}', 2, 13, "unexpected character"),
        ("wis 1\naten.add.Tensor(a=1, 2)", 2, 22, "without a name"),
        ("wis 1\naten.add.Tensor(1 2)", 2, 19, "expected ','"),
        ("wis 1\nfill {value=" + "[" * 40, 2, 30, "nested deeper"),
        ("wis 1\né", 2, 1, "unexpected character"),
        ("wis 1\nfree %0[", 2, 8, "end of the line"),
        ("wis 1\n%0", 2, 3, "expected '='"),
    ],
)
def test_assembly_invalid_text_is_refused_with_its_place(text, line, column, says):
    with pytest.raises(AssemblyError, match=says) as caught:
        assemble(text)
    assert (caught.value.line, caught.value.column) == (line, column)


@given(st.text(alphabet='wis 1\n%0f32[],()=+{}<>#$&":e.-\\;ñ', max_size=60))
@settings(max_examples=examples(60, 300), deadline=None)
def test_assembly_any_text_is_read_or_refused(text):
    with contextlib.suppress(AssemblyError):
        assemble("wis 1\n" + text)


def test_disassemble_program_without_canonical_text_is_refused():
    neg, free = extern(), Form("free", (Operand(Role.IN, None),))
    for broken in (
        Program((neg, free), (Instruction(1, (0,)), Instruction(0, (0, 1)))),
        Program((neg, free), (Instruction(0, (0, 1)),)),
        Program((neg, extern()), (Instruction(0, (0, 1)), Instruction(1, (0, 1)))),
        Program((neg,), (Instruction(0, (0,)),)),
    ):
        with pytest.raises(EncodeError):
            disassemble(broken)
