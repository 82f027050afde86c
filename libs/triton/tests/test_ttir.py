"""TTIR is read with limits and lowered with checks. Errors name the operation, and broken texts raise only `ForeignError`."""

import contextlib
import random
import re

import pytest
from wooly_triton.language import for_cpu
from wooly_triton.lower import Lowering
from wooly_triton.ops import ELEMENTWISE, REFUSED, STRUCTURAL
from wooly_triton.page import page
from wooly_triton.text import MAX_DEPTH, MAX_TEXT, read
from wooly_wis.languages import ForeignError, Request

HEAD = "module {\n  tt.func public @k(%x: !tt.ptr<f32>, %n: i32) attributes {noinline = false} {\n"
TAIL = "\n    tt.return\n  }\n}\n"
WHOLE = (
    HEAD
    + """    %zero = arith.constant 0 : i32
    %one = arith.constant 1 : i32
    %acc = arith.constant dense<0.000000e+00> : tensor<16x16xf32>
    %r = tt.make_range {end = 16 : i32, start = 0 : i32} : tensor<16xi32>
    %e = tt.expand_dims %r {axis = 1 : i32} : tensor<16xi32> -> tensor<16x1xi32>
    %f = tt.expand_dims %r {axis = 0 : i32} : tensor<16xi32> -> tensor<1x16xi32>
    %g = tt.broadcast %e : tensor<16x1xi32> -> tensor<16x16xi32>
    %h = tt.broadcast %f : tensor<1x16xi32> -> tensor<16x16xi32>
    %i = arith.addi %g, %h : tensor<16x16xi32>
    %p = tt.splat %x : !tt.ptr<f32> -> tensor<16x16x!tt.ptr<f32>>
    %q = tt.addptr %p, %i : tensor<16x16x!tt.ptr<f32>>, tensor<16x16xi32>
    %s:2 = scf.for %k = %zero to %n step %one iter_args(%a = %acc, %b = %q) -> (TWO)  : i32 {
      %v = tt.load %b : tensor<16x16x!tt.ptr<f32>>
      %d = tt.dot %v, %v, %a, inputPrecision = tf32 : tensor<16x16xf32> * tensor<16x16xf32> -> tensor<16x16xf32>
      %c = tt.splat %one : i32 -> tensor<16x16xi32>
      %w = tt.addptr %b, %c : tensor<16x16x!tt.ptr<f32>>, tensor<16x16xi32>
      scf.yield %d, %w : tensor<16x16xf32>, tensor<16x16x!tt.ptr<f32>>
    }
    %t = "tt.reduce"(%s#0) <{axis = 0 : i32}> ({
    ^bb0(%y: f32, %z: f32):
      %u = arith.addf %y, %z : f32
      tt.reduce.return %u : f32
    }) : (tensor<16x16xf32>) -> tensor<16xf32>
    %o = tt.splat %x : !tt.ptr<f32> -> tensor<16x!tt.ptr<f32>>
    %j = tt.addptr %o, %r : tensor<16x!tt.ptr<f32>>, tensor<16xi32>
    tt.store %j, %t : tensor<16x!tt.ptr<f32>>""".replace("TWO", "tensor<16x16xf32>, tensor<16x16x!tt.ptr<f32>>")
    + TAIL
)


def lowered(text, args=("*f32", "i32"), entry="k"):
    return for_cpu(Request(text, entry, args, (1, 1, 1), {}))


def body(*lines):
    return HEAD + "\n".join(f"    {line}" for line in lines) + TAIL


def test_attribute_of_several_dimensions_is_read():
    """`tl.max_contiguous` and `tl.multiple_of` write them."""
    hints = "{tt.contiguity = dense<[64, -1]> : tensor<2xi32>, tt.divisibility = dense<16> : tensor<1xi32>}"
    (kernel,) = read(f"{HEAD}    %m = arith.remsi %n, %n {hints} : i32{TAIL}")
    assert kernel.blocks[0].ops[0].attrs == {"tt.contiguity": (64, -1), "tt.divisibility": (16,)}
    with pytest.raises(ForeignError, match="expected a number"):
        read(f"{HEAD}    %m = arith.remsi %n, %n {{a = dense<true> : tensor<1xi1>}} : i32{TAIL}")


def test_lowering_of_a_kernel_reports_written_parameters():
    found = lowered(WHOLE)
    assert [(p.buffer, p.writes) for p in found.parameters] == [(True, True), (False, False)]
    assert found.entry == "w_k" and any(p.startswith("tt.load in line") for p in found.places)


def test_lowering_checks_every_access_against_its_buffer():
    text = lowered(WHOLE).text
    body_ = text[text.index("kernel __attribute__") :]
    for access in re.findall(r"\(\(global \w+ \*\)a0\)\[o\]", body_):
        assert access
    assert body_.count("(ulong)o < n0_f32") == body_.count("a0)[o]") >= 2
    assert body_.count("&& (ulong)o1 < n0_f32") == body_.count("+ o0;") == 2


def test_cache_hints_do_not_change_the_lowering():
    hint = "{cachePolicy = #tt.cache_policy<cache_modifier = ca, eviction_policy = evict_last>} "
    plain, hinted = (
        lowered(body(f"%a = tt.load %x {attrs}: !tt.ptr<f32>", f"tt.store %x, %a {attrs}: !tt.ptr<f32>"))
        for attrs in ("", hint)
    )
    assert plain.text == hinted.text


def test_lowering_of_loops_checks_whether_the_launch_must_end():
    text = lowered(WHOLE).text
    loops = re.findall(r"for \(v\d+ = .*\) \{ if \(W_END\) return;", text)
    assert len(loops) == 1


def test_operation_tables_do_not_overlap():
    tables = [set(ELEMENTWISE), set(STRUCTURAL), set(REFUSED)]
    assert not (tables[0] & tables[1] or tables[1] & tables[2] or tables[0] & tables[2])
    for name in STRUCTURAL:
        assert hasattr(Lowering, "_" + name.replace(".", "_")), name


def test_reference_page_equals_the_generated_one(request):
    root = request.config.rootpath
    assert (root / "docs/reference/ttir.md").read_text() == page()


@pytest.mark.parametrize("name", REFUSED)
def test_lowering_of_refused_operation_names_it(name):
    with pytest.raises(ForeignError, match=re.escape(name)):
        lowered(body(f"%a = {name} %n : i32 -> i32"))


WRONG = {
    "no function other": (WHOLE.replace("@k", "@other2"), "the text has no function k"),
    "unknown operation": (body("%a = tt.fly %n : i32"), r"tt\.fly in line 3 of its text is not supported"),
    "undefined value": (body("%a = arith.addi %n, %m : i32"), "%m is not defined"),
    "an unknown type": (body("%a = arith.constant 1 : i13"), r"arith.constant|type"),
    "float8": (body("%a = tt.splat %n : i32 -> tensor<4xf8E4M3FNUZ>"), "the type f8E4M3FNUZ is not supported"),
    "too many elements": (body("%a = tt.splat %n : i32 -> tensor<2097152xi32>"), "at most 1048576"),
    "mixed types": (body("%f = arith.constant 1.0 : f32", "%a = arith.addi %n, %f : i32"), "arith.addi"),
    "integers as floats": (body("%a = arith.addf %n, %n : i32"), "arith.addf"),
    "a pointer of two buffers": (
        body("%c = arith.constant true", "%a = arith.select %c, %x, %n : !tt.ptr<f32>"),
        "cannot choose between",
    ),
    "a pointer that grows by a float": (
        body("%f = arith.constant 1.0 : f32", "%a = tt.addptr %x, %f : !tt.ptr<f32>, f32"),
        "tt.addptr",
    ),
    "a load of a number": (body("%a = tt.load %n : i32"), "is not a pointer into a buffer"),
    "a store of another type": (body("tt.store %x, %n : !tt.ptr<f32>"), "tt.store"),
    "a pointer to smaller elements": (body("%a = tt.bitcast %x : !tt.ptr<f32> -> !tt.ptr<i8>"), "tt.bitcast"),
    "too many operands": (body("%a = math.exp %n, %n : f32"), "math.exp"),
    "a broadcast to another size": (
        body(
            "%r = tt.make_range {end = 4 : i32, start = 0 : i32} : tensor<4xi32>",
            "%a = tt.broadcast %r : tensor<4xi32> -> tensor<8xi32>",
        ),
        "tt.broadcast",
    ),
    "a range of another length": (
        body("%r = tt.make_range {end = 9 : i32, start = 0 : i32} : tensor<4xi32>"),
        "tt.make_range",
    ),
    "tensors beyond the stack": (
        body(
            "%r = tt.make_range {end = 1048576 : i32, start = 0 : i32} : tensor<1048576xi32>",
            "%s = arith.divsi %r, %r : tensor<1048576xi32>",
            "%t = arith.remsi %r, %r : tensor<1048576xi32>",
        ),
        "more than 4 MiB",
    ),
    "an attribute of another dialect": (
        body("%a = tt.load %x {cachePolicy = #gpu.address_space<global>} : !tt.ptr<f32>"),
        "the attribute #gpu.address_space is not supported",
    ),
    "an attribute without end": (
        body("%a = tt.load %x {cachePolicy = #tt.cache_policy<cache_modifier = ca} : !tt.ptr<f32>"),
        "expected the end of an attribute",
    ),
    "a jump to nowhere": (HEAD + "    cf.br ^bb7\n  }\n}\n", "has no block"),
}


@pytest.mark.parametrize("what", WRONG)
def test_lowering_of_wrong_text_names_the_error(what):
    text, why = WRONG[what]
    with pytest.raises(ForeignError, match=why):
        lowered(text)


def test_lowering_of_pointers_selected_per_element_from_two_buffers_is_refused():
    text = body(
        "%p = tt.splat %x : !tt.ptr<f32> -> tensor<4x!tt.ptr<f32>>",
        "%q = tt.splat %y : !tt.ptr<f32> -> tensor<4x!tt.ptr<f32>>",
        "%r = tt.make_range {end = 4 : i32, start = 0 : i32} : tensor<4xi32>",
        "%m = tt.splat %n : i32 -> tensor<4xi32>",
        "%c = arith.cmpi slt, %r, %m : tensor<4xi32>",
        "%a = arith.select %c, %p, %q : tensor<4xi1>, tensor<4x!tt.ptr<f32>>",
    )
    with pytest.raises(ForeignError, match="load from both, and choose between the values"):
        lowered(text.replace("%n: i32", "%n: i32, %y: !tt.ptr<f32>"), ("*f32", "i32", "*f32"))


def test_lowering_with_wrong_arguments_is_refused():
    with pytest.raises(ForeignError, match="argument 1 is i32, but the launch passes i64"):
        lowered(WHOLE, ("*f32", "i64"))
    with pytest.raises(ForeignError, match="takes 2 arguments, but the launch passes 1"):
        lowered(WHOLE, ("*f32",))


def test_read_beyond_limits_is_refused():
    with pytest.raises(ForeignError, match="at most"):
        read("x" * (MAX_TEXT + 1))
    deep = "    scf.if %n {\n" * (MAX_DEPTH + 2)
    with pytest.raises(ForeignError, match="nested deeper"):
        read(HEAD + deep)
    with pytest.raises(ForeignError):
        read("module {")


def test_lowering_of_random_changes_raises_only_foreign_error():
    chance = random.Random(7)
    lines, words = WHOLE.split("\n"), re.findall(r"%\w+|\d+|[\w.]+|[<>{}(),:=]", WHOLE)
    for _ in range(300):
        changed = list(lines)
        for _ in range(chance.randint(1, 3)):
            k = chance.randrange(len(changed))
            kind = chance.randrange(4)
            if kind == 0:
                changed[k] = changed[chance.randrange(len(changed))]
            elif kind == 1:
                del changed[k]
            else:
                parts = re.split(r"(%\w+|\d+|[\w.]+|[<>{}(),:=])", changed[k])
                parts[chance.randrange(len(parts))] = chance.choice(words)
                changed[k] = "".join(parts)
        with contextlib.suppress(ForeignError):
            lowered("\n".join(changed))
