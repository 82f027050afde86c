"""Mutated programs: a reader may refuse them, but must not crash, hang, or use more memory than their size allows.

5,000 mutants here, 20,000 in the slow run; `make fuzz` runs a million (WOOLY_FUZZ_COUNT).
"""

import os
import random
import tracemalloc

from wooly_testkit.effort import examples
from wooly_wis.codec import decode_program, encode_program
from wooly_wis.dtypes import DType
from wooly_wis.errors import WisError
from wooly_wis.program import Form, Instruction, Operand, OperandRef, ParamKind, ParamRef, Program, Role, Symbol, View
from wooly_wis.verifier import verify_program

COUNT = int(os.environ.get("WOOLY_FUZZ_COUNT", examples(5_000, 20_000)))
INTERESTING = [0, 1, 0x7F, 0x80, 0xFF]


def dense(dtype, *sizes):
    strides, n = [], 1
    for size in reversed(sizes):
        strides.append(n)
        n *= size
    return View(dtype, sizes, tuple(reversed(strides)))


def natives():
    """Native forms whose rules together check every kind of argument."""
    f = DType.F32

    def form(opcode, args, ins, outs, params=()):
        operands = [Operand(Role.IN, v) for v in ins] + [Operand(Role.OUT, v) for v in outs]
        return Form(opcode, tuple(operands), params, (("args", args),))

    a, b, c, p = OperandRef(0), OperandRef(1), OperandRef(2), ParamRef(0)
    yield form("add", (a, b, p), [dense(f, 3, 4), dense(f, 4)], [dense(f, 3, 4)], (ParamKind.F64,))
    yield form("sum", (a, (0, -1), True, DType.F64), [dense(f, 3, 4, 5)], [dense(DType.F64, 1, 4, 1)])
    yield form("concat", ((a, b), 1), [dense(f, 2, 3), dense(f, 2, 1)], [dense(f, 2, 4)])
    yield form("baddbmm", (a, b, c, 0.5, p), [dense(f, 1, 5), dense(f, 2, 3, 4), dense(f, 2, 4, 5)], [dense(f, 2, 3, 5)],
               (ParamKind.F64,))  # fmt: skip
    yield form("where", (a, b, 1.5), [dense(DType.BOOL, 3), dense(f, 3)], [dense(f, 3)])
    yield form("gather", (a, -1, b), [dense(f, 3, 4), dense(DType.I64, 3, 2)], [dense(f, 3, 2)])
    yield form("layer_norm", (a, (4,), b, None, 1e-5), [dense(f, 3, 4), dense(f, 4)],
               [dense(f, 3, 4), dense(f, 3, 1), dense(f, 3, 1)])  # fmt: skip


def seeds():
    v = View(DType.F32, (2, 3), (3, 1), 8)
    wide = View(DType.BF16, (4, 0, 2), (2, 2, 1), 0)
    rich = Form(
        "extern",
        (Operand(Role.IN, v), Operand(Role.INOUT, wide), Operand(Role.OUT, v)),
        (ParamKind.F64, ParamKind.C128, ParamKind.I64, ParamKind.I64),
        (
            ("args", (OperandRef(0), (1, 2.5, None, (True, "dim")), DType.F16, 3 + 4j)),
            ("kwargs", (("alpha", ParamRef(0)), ("layout", Symbol("layout", "strided")))),
            ("name", "aten.add.Tensor"),
            ("rng", (ParamRef(2), ParamRef(3))),
        ),
    )
    for form in natives():
        yield encode_program(Program((form,), (Instruction(0, tuple(range(len(form.operands)))),)))
    alloc = Form("alloc", (Operand(Role.OUT, View(DType.U8, (64,), (1,))),))
    free = Form("free", (Operand(Role.IN, None),))
    yield encode_program(Program((rich,), (Instruction(0, (0, 1, 2)),)))
    yield encode_program(
        Program((alloc, rich, free), (Instruction(0, (0,)), Instruction(1, (1, 2, 0)), Instruction(2, (2,))))
    )


def mutate(rng, raw):
    data = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data))
        kind = rng.randrange(6)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at] = rng.choice(INTERESTING)
        elif kind == 2:
            del data[at : at + rng.randint(1, 8)]
            data = data or bytearray(b"\0")
        elif kind == 3:
            data[at:at] = bytes(rng.choice(INTERESTING) for _ in range(rng.randint(1, 8)))
        elif kind == 4:
            data[at : at + 4] = rng.choice([b"\xff\xff\xff\xff", b"\0\0\0\x80", b"\xff\xff\xff\x7f"])
        else:
            other = rng.randrange(len(data))
            data[at : at + 8] = data[other : other + 8]
    return bytes(data)


def test_decode_mutated_program_is_refused_or_accepted_without_a_crash():
    rng = random.Random(20261121)
    corpus = list(seeds())
    outcomes = {"read": 0, "verified": 0}
    tracemalloc.start()
    try:
        for _ in range(COUNT):
            raw = mutate(rng, rng.choice(corpus))
            try:
                program = decode_program(raw)
                outcomes["read"] += 1
                verify_program(program)
                outcomes["verified"] += 1
            except WisError:
                continue
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert outcomes["read"] > COUNT // 100, "the mutations are too coarse to reach the verifier"
    assert peak < 16 << 20
