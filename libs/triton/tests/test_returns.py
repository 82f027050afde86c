"""Functions that return early become functions of one block, which Triton can read, and which both kinds of devices inline."""

import pytest
from wooly_triton.language import for_cpu
from wooly_triton.returns import MAX_BRANCHES, without_early_returns
from wooly_triton.text import read
from wooly_wis.languages import ForeignError, Request

KERNEL = """module {
  tt.func public @k(%x: !tt.ptr<f32>, %n: i32) attributes {noinline = false} {
    %zero = arith.constant 0 : i32
    %one = arith.constant 1 : i32
    scf.for %i = %zero to %n step %one  : i32 {
      %v:2 = tt.call @f(%x, %i) : (!tt.ptr<f32>, i32) -> (f32, i32)
      %p = tt.addptr %x, %v#1 : !tt.ptr<f32>, i32
      tt.store %p, %v#0 : !tt.ptr<f32>
    }
    tt.return
  }
  tt.func private @f(%x: !tt.ptr<f32>, %n: i32) -> (f32, i32) attributes {noinline = false} {
BODY
  }
}
"""
EARLY = """    %c = arith.constant 3 : i32
    %0 = arith.cmpi slt, %n, %c : i32
    cf.cond_br %0, ^bb1, ^bb4(%n : i32)
  ^bb1:  // pred: ^bb0
    %1 = arith.cmpi eq, %n, %c : i32
    cf.cond_br %1, ^bb2, ^bb3
  ^bb2:  // pred: ^bb1
    %2 = tt.load %x : !tt.ptr<f32>
    tt.return %2, %n : f32, i32
  ^bb3:  // pred: ^bb1
    tt.assert %1, "%5 is not a value" : i1
    cf.br ^bb4(%c : i32)
  ^bb4(%5: i32):  // 2 preds: ^bb0, ^bb3
    %6 = scf.if %0 -> (f32) {
      %8 = tt.load %x : !tt.ptr<f32>
      scf.yield %8 : f32
    } else {
      %8 = arith.sitofp %5 : i32 to f32
      scf.yield %8 : f32
    }
    tt.return %6, %5 : f32, i32"""


def text(body):
    return KERNEL.replace("BODY", body)


def test_function_that_returns_early_gets_one_block_and_conditions():
    entry, found = read(without_early_returns(text(EARLY), "k"))
    (block,) = found.blocks
    assert [op.name for op in block.ops] == ["arith.constant", "arith.cmpi", "scf.if", "tt.return"]
    then, other = [region[0].ops for region in block.ops[2].regions]
    assert [op.name for op in then] == ["arith.cmpi", "scf.if", "scf.yield"]
    assert [op.name for op in other] == ["scf.if", "scf.yield"]
    # What follows both branches is in both, with the values that their jumps pass.
    inner = then[1].regions[1][0].ops
    assert inner[0].name == "tt.assert" and '"%5 is not a value"' in inner[0].words
    assert [op.operands for op in (inner[1].regions[1][0].ops[0], other[0].regions[1][0].ops[0])] == [["%c"], ["%n"]]
    assert other[1].operands[1:] == ["%n"] and inner[-1].operands[1:] == ["%c"]
    assert entry.name == "k" and [op.name for op in entry.blocks[0].ops][-2:] == ["scf.for", "tt.return"]


def test_text_without_calls_or_early_returns_stays():
    plain = text(EARLY).replace("tt.call", "tt.load")
    assert without_early_returns(plain, "k") == plain
    once = text("    %0 = tt.load %x : !tt.ptr<f32>\n    tt.return %0, %n : f32, i32")
    assert without_early_returns(once, "k") == once


def test_call_of_function_that_returns_early_is_lowered_for_cpus():
    lowered = for_cpu(Request(text(EARLY), "k", ("*f32", "i32"), (1, 1, 1), {}))
    assert "goto" not in lowered.text and any("tt.assert" in p or "is not a value" in p for p in lowered.places)


def test_call_of_function_that_returns_early_builds_for_gpus():
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    from libs.triton.tests.texts import guarded

    made = guarded(without_early_returns(text(EARLY), "k"))
    assert "tt.call" not in made.text and "cond_br" not in made.text and made.text.count("scf.if") >= 2


WRONG = {
    "a jump back": (
        "    %c = arith.constant true\n    cf.br ^bb1\n  ^bb1:\n    cf.cond_br %c, ^bb1, ^bb2\n  ^bb2:\n"
        "    %0 = tt.load %x : !tt.ptr<f32>\n    tt.return %0, %n : f32, i32",
        "must not jump back; write it as a loop",
    ),
    "a jump to nowhere": ("    cf.br ^bb7\n  ^bb1:\n    tt.return", "the text has no block .bb7"),
    "a block without an end": (
        "    %c = arith.constant true\n  ^bb1:\n    tt.return",
        "does not end with a jump or a return",
    ),
    "values of two types": (
        "    %c = arith.constant true\n    cf.cond_br %c, ^bb1, ^bb2\n  ^bb1:\n    tt.return %n, %n : i32, i32\n"
        "  ^bb2:\n    %0 = tt.load %x : !tt.ptr<f32>\n    tt.return %0, %n : f32, i32",
        "return values of different types",
    ),
    "branches that double too often": (
        "    %c0 = arith.constant true\n"
        + "".join(
            [
                f"    cf.cond_br %c0, ^a{k}, ^b{k}\n  ^a{k}:\n    cf.cond_br %c0, ^r, ^b{k}\n  ^b{k}:\n"
                for k in range(20)
            ]
        )
        + "    cf.br ^r\n  ^r:\n    %0 = tt.load %x : !tt.ptr<f32>\n    tt.return %0, %n : f32, i32",
        "returns early in too many places",
    ),
    "branches that nest too deep": (
        "    %c0 = arith.constant true\n"
        + "".join([f"    cf.cond_br %c0, ^r, ^b{k}\n  ^b{k}:\n" for k in range(MAX_BRANCHES + 2)])
        + "    cf.br ^r\n  ^r:\n    %0 = tt.load %x : !tt.ptr<f32>\n    tt.return %0, %n : f32, i32",
        "returns early in too many places",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_function_that_cannot_be_rewritten_is_refused(what):
    body, why = WRONG[what]
    with pytest.raises(ForeignError, match=why):
        without_early_returns(text(body), "k")
