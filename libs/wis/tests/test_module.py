"""Modules: canonical encoding, reading of untrusted bytes, and the check whether a module can run."""

import dataclasses
import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wooly_testkit.effort import examples
from wooly_wis.codec import encode_program
from wooly_wis.dtypes import DType
from wooly_wis.errors import DecodeError, EncodeError, WisError
from wooly_wis.foreign import Launch, Source, encode_source
from wooly_wis.module import (
    Constant,
    Load,
    Module,
    ModuleError,
    ModuleFacts,
    Output,
    Run,
    Tensor,
    check_module,
    decode_module,
    encode_module,
    module_digest,
    read_head,
    write_file,
)
from wooly_wis.program import Form, Instruction, Operand, OperandRef, ParamKind, ParamRef, Program, Role, View

V = View(DType.F32, (4,), (1,))
ALLOC = Form("alloc", (Operand(Role.OUT, View(DType.U8, (16,), (1,))),))
FREE = Form("free", (Operand(Role.IN, None),))
ADD = Form(
    "add",
    (Operand(Role.IN, V), Operand(Role.IN, V), Operand(Role.OUT, V)),
    (ParamKind.F64,),
    (("args", (OperandRef(0), OperandRef(1), ParamRef(0))),),
)
MAKE = encode_program(Program((ALLOC,), (Instruction(0, (0,)), Instruction(0, (1,)))))
WORK = encode_program(
    Program((ALLOC, ADD, FREE), (Instruction(0, (0,)), Instruction(1, (1, 2, 0)), Instruction(2, (2,))))
)
ONE = (1).to_bytes(8, "little")


def module(**changes):
    """Buffers 1 and 2 are allocated and loaded with a constant and an input. Their sum is the output, in buffer 3."""
    whole = Module(
        programs=(MAKE, WORK),
        constants=(Constant(b"c" * 32, 16),),
        inputs=(Tensor("x", DType.F32, (2, 2)),),
        outputs=(Output(Tensor("y", DType.F32, (4,)), 3),),
        steps=(Run(0, (1, 2)), Load(0, 1), Load(1, 2), Run(1, (3, 1, 2), ONE, (1,))),
    )
    return dataclasses.replace(whole, **changes)


def test_module_round_trips_and_passes_check_module():
    raw = encode_module(module())
    assert decode_module(raw) == module() and encode_module(decode_module(raw)) == raw
    assert check_module(module()) == ModuleFacts(48, frozenset({1, 2})) and len(module_digest(raw)) == 32


names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
numbers = st.integers(0, 2**64 - 1)
tensors = st.builds(Tensor, names, st.sampled_from(DType), st.lists(numbers, max_size=4).map(tuple))
small = st.integers(0, 2**32 - 1)
steps = st.one_of(
    st.builds(Load, small, numbers, numbers),
    st.builds(
        Run,
        small,
        st.lists(numbers, max_size=4).map(tuple),
        st.lists(st.binary(min_size=8, max_size=8), max_size=3).map(b"".join),
        st.lists(numbers, max_size=3).map(tuple),
    ),
)
modules = st.builds(
    Module,
    st.lists(st.binary(max_size=30), max_size=3).map(tuple),
    st.lists(st.builds(Constant, st.binary(min_size=32, max_size=32), numbers), max_size=3).map(tuple),
    st.lists(tensors, max_size=3).map(tuple),
    st.lists(st.builds(Output, tensors, numbers, numbers), max_size=3).map(tuple),
    st.lists(steps, max_size=5).map(tuple),
)


@given(modules)
def test_any_module_round_trips(found):
    assert decode_module(encode_module(found)) == found


@given(modules, st.data())
def test_decode_module_truncated_or_extended_bytes_are_refused(found, data):
    raw = encode_module(found)
    with pytest.raises(DecodeError):
        decode_module(raw[: data.draw(st.integers(0, len(raw) - 1))])
    with pytest.raises(DecodeError, match="extra bytes follow the module"):
        decode_module(raw + b"\0")


def test_decode_mutated_module_is_refused_or_accepted_without_a_crash():
    rng, raw, read, ran = random.Random(7), encode_module(module()), 0, 0
    tracemalloc.start()
    try:
        for _ in range(examples(1500, 5000)):
            data = bytearray(raw)
            for _ in range(rng.randint(1, 3)):
                at = rng.randrange(len(data))
                match rng.randrange(4):
                    case 0:
                        data[at] ^= 1 << rng.randrange(8)
                    case 1:
                        data[at : at + 4] = rng.choice([b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\0\0\0\0"])
                    case 2:
                        del data[at : at + rng.randint(1, 8)]
                        data = data or bytearray(b"\0")
                    case _:
                        data[at:at] = bytes(rng.choice([0, 1, 255]) for _ in range(rng.randint(1, 8)))
            try:
                found = decode_module(bytes(data))
                read += 1
                assert encode_module(found) == bytes(data)
                check_module(found)
                ran += 1
            except WisError:
                continue
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert read > 100 and ran > 10 and peak < 16 << 20


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"steps": (Load(0, 1),)}, "step 0 uses buffer 1, which does not exist"),
        ({"steps": (Run(0, (1, 2)), Load(2, 1))}, "step 1 loads source 2, but the module has 2 constants and inputs"),
        ({"steps": (Run(0, (1, 2)), Load(0, 1, 1))}, "step 1 accesses byte 17 of buffer 1, which has 16 bytes"),
        ({"steps": (Run(2, ()),)}, "step 0 runs program 2, but the module has 2 programs"),
        ({"steps": (Run(0, (1,)),)}, "step 0 binds another number of buffers or params than program 0 has"),
        ({"steps": (Run(0, (1, 1)),)}, "step 0 binds one buffer to two slots"),
        ({"steps": (Run(0, (1, 2)), Run(1, (3, 1, 2)))}, "step 1 binds another number"),
        ({"steps": (Run(0, (1, 2)), Run(0, (2, 3)))}, "step 1 allocates buffer 2, which exists already"),
        ({"steps": (Run(0, (1, 2)), Run(1, (3, 1, 2), ONE), Load(0, 2))}, "step 2 uses buffer 2, which does not exist"),
        ({"steps": (Run(0, (3, 2), frees=(3,)),)}, "step 1 uses buffer 3, which does not exist"),
        (
            {"outputs": (Output(Tensor("y", DType.F32, (5,)), 3),)},
            "step 4 accesses byte 20 of buffer 3, which has 16 bytes",
        ),
        ({"outputs": (module().outputs[0],) * 2}, "two outputs of the module have the same name"),
        ({"inputs": module().inputs * 2}, "two inputs of the module have the same name"),
        ({"programs": (b"WIS1", WORK)}, "bytes expected"),
    ],
)
def test_check_module_invalid_module_is_refused_with_the_reason(changes, complaint):
    with pytest.raises(WisError, match=complaint):
        check_module(module(**changes))
    assert issubclass(ModuleError, WisError)


def test_encode_module_too_large_value_is_refused():
    for changes in (
        {"inputs": (Tensor("", DType.F32, ()),)},
        {"inputs": (Tensor("ü" * 200, DType.F32, ()),)},
        {"steps": (Load(1 << 32, 0),)},
        {"steps": (Run(0, (-1,)),)},
    ):
        with pytest.raises(EncodeError):
            encode_module(module(**changes))


def test_module_file_contains_the_module_and_its_constants():
    raw = encode_module(module())
    data = b"".join(write_file(raw, [b"x" * 16]))
    assert read_head(data[:8]) == len(raw) and data[8:] == raw + b"x" * 16
    for bad in (b"", b"WSMF", b"WIS1\0\0\0\0", b"WSMF\xff\xff\xff\xff"):
        with pytest.raises(DecodeError):
            read_head(bad)


SOURCE = encode_source(Source("ttir", "module {}"))
LAUNCHED = Form(
    "kernel.launch",
    (Operand(Role.INOUT, V),),
    (),
    Launch("ttir", module_digest(SOURCE), "k", (1, 1, 1), (1, 1, 1), (0,)).attrs(),
)
WITH_KERNEL = encode_program(Program((LAUNCHED,), (Instruction(0, (0,)),)))


def with_kernel(*sources):
    steps = (Run(0, (1, 2)), Load(0, 1), Load(1, 2), Run(1, (2,)))
    outputs = (Output(Tensor("y", DType.F32, (4,)), 2),)
    return module(programs=(MAKE, WITH_KERNEL), steps=steps, outputs=outputs, sources=sources)


def test_module_with_sources_round_trips():
    whole = with_kernel(SOURCE)
    raw = encode_module(whole)
    assert raw[:4] == b"WSM2" and decode_module(raw) == whole and encode_module(decode_module(raw)) == raw
    assert encode_module(module())[:4] == b"WSM1"  # the digest of modules without sources stays the same
    check_module(whole)
    for k in range(len(raw)):
        with pytest.raises(DecodeError):
            decode_module(raw[:k])


@pytest.mark.parametrize(
    "sources",
    [(), (SOURCE, SOURCE), (SOURCE, encode_source(Source("ttir", "another"))), (b"WKS1 no source",)],
    ids=["missing", "twice", "not launched", "garbage"],
)
def test_check_module_with_wrong_sources_is_refused(sources):
    with pytest.raises(WisError):
        check_module(with_kernel(*sources))


def test_decode_module_version_two_without_sources_is_refused():
    raw = encode_module(module())
    with pytest.raises(DecodeError, match="version 2 but no sources"):
        decode_module(b"WSM2" + raw[4:24] + bytes(4) + raw[24:])
