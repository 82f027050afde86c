"""Foreign kernels: sources and codes round-trip, and each law of a launch has a form that breaks it."""

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wooly_testkit.assembler import assemble
from wooly_wis.assembly import disassemble
from wooly_wis.codec import decode_program, digest, encode_program
from wooly_wis.dtypes import DType
from wooly_wis.errors import DecodeError, EncodeError, RuleError, VerifyError
from wooly_wis.foreign import (
    MAX_SOURCE_BYTES,
    ForeignCode,
    Launch,
    Parameter,
    Source,
    decode_code,
    decode_source,
    encode_code,
    encode_source,
    hidden_state,
    key_of,
    launch_of,
)
from wooly_wis.pauses import PIECE_BYTES, pausing
from wooly_wis.program import Form, Instruction, Operand, ParamKind, ParamRef, Program, Role, View
from wooly_wis.verifier import verify_program

V = View(DType.F32, (4,), (1,))
NAME = digest(encode_source(Source("ttir", "module {}")))
GRID = (ParamRef(0), 1, 1)
LAUNCH = Launch(
    "ttir", NAME, "add", GRID, (1, 1, 1), (0, 1, (DType.I32, ParamRef(1)), (DType.F32, 1.5)), (("num_warps", 4),)
)


def form(launch=LAUNCH, roles=(Role.IN, Role.INOUT), views=(V, V), params=(ParamKind.I64, ParamKind.I64), **attrs):
    operands = tuple(Operand(r, v) for r, v in zip(roles, views, strict=True))
    return Form("kernel.launch", operands, params, tuple(sorted((dict(launch.attrs()) | attrs).items())))


def program(*forms):
    return Program(forms, tuple(Instruction(k, (0, 1)) for k in range(len(forms))))


@given(st.sampled_from(["ttir", "cuda-c"]), st.text())
def test_source_round_trips(language, text):
    raw = encode_source(Source(language, text.encode("utf-8", "ignore").decode()))
    assert encode_source(decode_source(raw)) == raw


@given(st.binary(max_size=64))
def test_decode_source_any_bytes_decode_or_raise_decode_error(raw):
    for data in (raw, b"WKS1" + raw):
        try:
            source = decode_source(data)
        except DecodeError:
            continue
        assert encode_source(source) == data


def test_decode_source_of_1_mib_pauses_after_every_piece():
    text = "a" + "é→𝄞" * (MAX_SOURCE_BYTES // 9 - 10)  # multi-byte characters lie across the ends of pieces
    raw, paused = encode_source(Source("ttir", text)), []
    with pausing(lambda: paused.append(None)):
        assert decode_source(raw).text == text
        assert len(paused) >= len(raw) // PIECE_BYTES
        paused.clear()
        assert digest(raw) == hashlib.blake2b(raw, digest_size=32).digest()
        assert len(paused) >= len(raw) // PIECE_BYTES


def test_decode_source_ending_inside_a_character_is_refused():
    raw = bytearray(encode_source(Source("ttir", "a" * PIECE_BYTES + "é")))
    raw[-1:] = b"a"
    with pytest.raises(DecodeError, match="not UTF-8"):
        decode_source(bytes(raw))
    with pytest.raises(DecodeError, match="not UTF-8"):
        decode_source(bytes(raw[:5]) + b"ttir" + (1).to_bytes(4, "little") + b"\xc3")


def test_source_with_unknown_language_or_wrong_length_is_refused():
    with pytest.raises(EncodeError, match="language 'wgsl' is unknown"):
        encode_source(Source("wgsl", ""))
    with pytest.raises(EncodeError, match="the limit is"):
        encode_source(Source("ttir", "x" * MAX_SOURCE_BYTES))
    with pytest.raises(DecodeError, match="shorter or longer than its header says"):
        decode_source(encode_source(Source("ttir", "abc"))[:-1])


def test_code_round_trips_and_a_changed_byte_is_refused():
    code = ForeignCode("add", (Parameter(DType.F32, True, True), Parameter(DType.I32, False)), ("tt.load 1",), b"\1\2")
    raw = encode_code(code, "a name")
    assert decode_code(raw, "a name") == code
    with pytest.raises(DecodeError, match="is stored as a name, not as another"):
        decode_code(raw, "another")
    for k in range(len(raw)):
        with pytest.raises(DecodeError):
            decode_code(raw[:k] + bytes((raw[k] ^ 1,)) + raw[k + 1 :], "a name")


@pytest.mark.parametrize("image", [[], ["add", [], 1]])
def test_decode_code_image_with_missing_fields_is_refused(image):
    magic = encode_code(ForeignCode("add", (), (), b"\1\2"), "a name")[:4]
    head = json.dumps({"name": "a name", "entry": "add", "parameters": [], "places": [], "images": [image]}).encode()
    body = magic + len(head).to_bytes(4, "little") + head + b"\1\2"
    with pytest.raises(DecodeError, match="invalid header"):
        decode_code(body + digest(body), "a name")


def test_launch_round_trips_through_its_form():
    assert launch_of(form()) == LAUNCH
    whole = program(form())
    assert decode_program(encode_program(whole)) == whole
    assert assemble(disassemble(whole)) == whole
    assert (
        disassemble(whole)
        .split("\n")[1]
        .startswith("kernel.launch<i64,i64> %0 f32[4], &%1 f32[4] {args=[#0, #1, [i32, $1], ")
    )
    assert verify_program(whole).slot_bytes == (16, 16)


def test_kernel_key_differs_for_every_input_of_the_compiler():
    f16 = View(DType.F16, (4,), (1,))
    same = form(views=(View(DType.F32, (9,), (1,), 8), V), grid=(1, 1, 1))
    others = [form(views=(f16, V)), form(entry="sub"), form(options=()), form(source="0" * 64)]
    key = key_of(LAUNCH, form())
    assert key_of(launch_of(same), same) == key
    assert all(key_of(launch_of(f), f) != key for f in others)
    keys = [key, *[key_of(launch_of(f), f) for f in others]]
    assert len({k.name(t, c) for k in keys for t in ("cpu", "gpu") for c in ("1", "2")}) == 4 * len(keys)


WRONG = {
    "language 'wgsl' is unknown": form(language="wgsl"),
    "64 hex digits": form(source="xyz"),
    "entry must be a name": form(entry="a b"),
    "the attribute 'entry' must be a string": form(entry=1),
    "three integers": form(block=(1, 1)),
    "must be 1, 1, 1": form(block=(32, 1, 1)),
    "at most 1024": form(language="cuda-c", block=(1024, 2, 1)),
    "three extents": form(grid=(1, 1)),
    "negative extent": form(grid=(-1, 1, 1)),
    "groups, the limit is": form(grid=(1 << 16, 1 << 16, 1)),
    "integer params": form(params=(ParamKind.F64, ParamKind.I64)),
    "every operand must be an argument": form(args=((DType.I32, 1),)),
    "argument 0 must be an operand, or": form(args=(1.5,)),
    "argument 2 must be an operand, or": form(args=(*LAUNCH.attrs()[0][1][:2], (DType.I32, 1.5))),
    "must be IN or INOUT": form(roles=(Role.IN, Role.OUT)),
    "contiguous one-dimensional view": form(views=(V, View(DType.F32, (2, 2), (2, 1)))),
    "gets a floating point param": form(params=(ParamKind.I64, ParamKind.F64)),
    "options must be sorted by name": form(options=(("b", 1), ("a", 1))),
    "an option must be a name": form(options=(("a", 1.5),)),
}


@pytest.mark.parametrize("complaint", WRONG)
def test_launch_breaking_a_law_is_refused(complaint):
    with pytest.raises(RuleError, match=complaint):
        launch_of(WRONG[complaint])
    with pytest.raises(VerifyError, match=complaint) as caught:
        verify_program(program(WRONG[complaint]))
    assert caught.value.law == "launch"


def test_launch_with_unknown_attribute_is_refused():
    with pytest.raises(VerifyError, match="unknown attribute 'stream'"):
        verify_program(program(form(stream=1)))


ENTRY = ".visible .entry count(.param .u64 out) { ld.global.u32 %r1, [%rd1]; st.global.u32 [%rd1], %r1; ret; }\n"


@pytest.mark.parametrize(
    ("before", "variable"),
    [
        (".visible .global .align 4 .u32 counter;\n", "counter"),
        (".global .u32 counter = 1;\n", "counter"),
        (".version 8.0\n.target sm_80\n  .weak .global .align 8 .b8 state_2[64] = {0, 1};\n", "state_2"),
        (".extern .global .f32 other[];", "other"),
        (".const .align 4 .u32 table[4] = {1, 2, 3, 4};\n", ""),
        ("// .global .u32 counter;\n/*\n.global .u32 other;\n*/\n", ""),
        ("", ""),
    ],
)
def test_ptx_with_a_variable_on_the_device_has_hidden_state(before, variable):
    found = hidden_state(Source("ptx", before + ENTRY))
    if variable:
        assert f"kernel count has the variable {variable} on" in found
    else:
        assert found == ""


def test_other_languages_have_no_hidden_state():
    assert hidden_state(Source("cuda-c", ".global .u32 counter;")) == ""
