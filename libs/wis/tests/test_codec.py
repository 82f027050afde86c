"""The codec: each program has one encoding; other bytes are refused."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wooly_testkit import strategies
from wooly_testkit.effort import examples
from wooly_wis.codec import decode_form, decode_program, digest, encode_form, encode_program, join_program
from wooly_wis.dtypes import DType
from wooly_wis.errors import DecodeError, EncodeError
from wooly_wis.frames import pack_run, unpack_run
from wooly_wis.program import Form, Instruction, Operand, OperandRef, ParamKind, ParamRef, Program, Role, View

F32 = View(DType.F32, (2, 3), (3, 1), 8)
ADD = Form(
    "extern",
    (Operand(Role.IN, F32), Operand(Role.IN, F32), Operand(Role.OUT, F32)),
    (ParamKind.F64,),
    (("args", (OperandRef(0), OperandRef(1))), ("kwargs", (("alpha", ParamRef(0)),)), ("name", "aten.add.Tensor")),
)


@given(strategies.programs())
@settings(max_examples=examples(40, 150), deadline=None)
def test_program_encodes_and_decodes_to_itself(program):
    raw = encode_program(program)
    assert decode_program(raw) == program
    assert encode_program(decode_program(raw)) == raw
    assert digest(raw) == digest(encode_program(decode_program(raw)))


@given(strategies.externs())
@settings(max_examples=examples(40, 150), deadline=None)
def test_form_encodes_and_decodes_to_itself(form):
    assert decode_form(encode_form(form)) == form


def test_digest_is_stable_across_versions():
    program = Program((ADD,), (Instruction(0, (0, 1, 2)),))
    assert digest(encode_program(program)).hex() == "d08b7060affe946c977e6dcc879c13e87e24a01340e997a8b407288dce26a9c7"


def test_join_program_equals_encode_program():
    program = Program((ADD,), (Instruction(0, (0, 0, 1)), Instruction(0, (1, 0, 2))))
    assert join_program([encode_form(ADD)], array("I", [0, 0, 0, 1, 0, 1, 0, 2])) == encode_program(program)


@given(strategies.programs(), st.data())
@settings(max_examples=examples(30, 100), deadline=None)
def test_decode_truncated_program_raises_decode_error(program, data):
    raw = encode_program(program)
    cut = data.draw(st.integers(0, len(raw) - 1))
    with pytest.raises(DecodeError):
        decode_program(raw[:cut])
    with pytest.raises(DecodeError):
        decode_program(raw + b"\0")


@pytest.mark.parametrize(
    "form",
    [
        Form("x" * 300),
        Form("é"),
        Form("extern", attrs=(("args", 2**70),)),
        Form("extern", attrs=(("args", object()),)),
        Form("extern", (Operand(Role.IN, View(DType.F32, (2**70,), (1,))),)),
        Form("extern", (Operand(Role.IN, View(DType.F32, (1,) * 65, (1,) * 65)),)),
    ],
)
def test_encode_form_too_large_raises_encode_error(form):
    with pytest.raises(EncodeError):
        encode_form(form)


def test_deeply_nested_attribute_is_refused_by_encoder_and_decoder():
    value = ()
    for _ in range(40):
        value = (value,)
    with pytest.raises(EncodeError):
        encode_form(Form("extern", attrs=(("args", value),)))
    raw = encode_form(Form("extern", attrs=(("args", ()),)))
    nested = raw[:-5] + b"\x0b\x01\0\0\0" * 40 + b"\x0b\0\0\0\0"
    with pytest.raises(DecodeError, match="nested deeper"):
        decode_form(nested)


def test_decode_huge_counts_are_refused_before_allocation():
    with pytest.raises(DecodeError):
        decode_program(b"WIS1" + b"\xff\xff\xff\xff" + b"\xff\xff\xff\xff")
    with pytest.raises(DecodeError):
        decode_form(b"\x01x\0\0\0\0\x01\x01a\x0b\xff\xff\xff\xff")


@given(
    st.binary(min_size=32, max_size=32),
    st.lists(st.integers(0, 2**64 - 1), max_size=9),
    st.integers(0, 5),
    st.lists(st.integers(0, 2**64 - 1), max_size=9),
    st.booleans(),
)
def test_run_frame_round_trips(name, bindings, n_params, frees, reply):
    run = unpack_run(pack_run(name, bindings, b"p" * 8 * n_params, frees, reply=reply))
    assert (run.digest, run.bindings, run.params, run.frees, run.reply) == (
        name,
        bindings,
        b"p" * 8 * n_params,
        frees,
        reply,
    )


@given(st.binary(max_size=200))
def test_run_frame_garbage_raises_decode_error(garbage):
    with pytest.raises(DecodeError):
        unpack_run(garbage)
