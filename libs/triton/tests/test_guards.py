"""Guards in texts for GPUs: each access has a guard, claims of the text are removed, and unsupported texts are rejected.

The compiler's tests (`kernels/test_offline.py`) run guarded kernels on the CPU: guards do not change results, and keep kernels
from foreign memory.
"""

import re

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
from wooly_compiler.build.worker import Limits, WorkerProcess
from wooly_compiler.errors import BuildError
from wooly_triton.guard import claims_of, guard
from wooly_wis.foreign import UNCHECKED, decode_code
from wooly_wis.languages import ForeignError

from libs.triton.tests.texts import guarded, request


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    found = WorkerProcess(Limits(seconds=200), "wooly_compiler.worker", (str(tmp_path_factory.mktemp("worker")),))
    yield found
    found.close()


@pytest.fixture(scope="module")
def build(worker):
    """Builds as the compiler service does for an executor."""
    return lambda asked: decode_code(worker.ask(asked, asked["target"], "kernel"), "n")


KERNEL = """module {
  tt.func public @k(%x: !tt.ptr<f32> {tt.divisibility = 16 : i32}, %n: i32) attributes {noinline = false} {
BODY
    tt.return
  }
}
"""
ASSEMBLY = '"%s" {constraints = "=r,r", packed_element = 1 : i32, pure = false}'
WIDE = "    %r = tt.make_range {end = 64 : i32, start = 0 : i32} : tensor<64xi32>\n"


def build_body(build, body, **options):
    return build(request(KERNEL.replace("BODY", body), "cuda:sm_90", **options))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            f"    %a = tt.elementwise_inline_asm {ASSEMBLY % 'trap;'} %n : i32 -> i32",
            "tt.elementwise_inline_asm .* cannot be checked on a GPU .*assembly",
        ),
        (
            '    %a = tt.extern_elementwise %n {libname = "", libpath = "/lib/x.bc", pure = false, symbol = "vprintf"} : '
            "(i32) -> i32\n"
            "    %c = arith.sitofp %a : i32 to f32\n    tt.store %x, %c : !tt.ptr<f32>",
            "extern_elementwise in another form than Triton prints",
        ),
        ("    %a = tt.nothing %n : i32", "cannot read the text"),
        ("    llvm.intr.assume %n : i32", "cannot read the text"),
    ],
)
def test_build_of_text_that_cannot_be_checked_is_refused(build, body, says):
    with pytest.raises(BuildError, match=says):
        build_body(build, body)


def test_build_with_unchecked_option_adds_no_guards(build):
    body = f"    %a = tt.elementwise_inline_asm {ASSEMBLY % 'mov.u32 $0, $1;'} %n : i32 -> i32\n"
    body += "    %c = arith.sitofp %a : i32 to f32\n    tt.store %x, %c : !tt.ptr<f32>"
    (image,) = build_body(build, body, **{UNCHECKED: True}).images
    assert image.passed[:2] == ("address 0", "value 1") and "status" not in image.passed
    assert image.claims == (16, 1)


@pytest.mark.parametrize("elem", ["f32", "f64"])
@pytest.mark.parametrize("target", ["cuda:sm_90", "hip:gfx942"])
def test_rounded_operations_have_the_names_of_the_vendors_library(build, target, elem):
    lines = [f"    %v = tt.load %x : !tt.ptr<{elem}>"]
    for name in ("add", "sub", "mul", "div"):
        lines += [
            f'    %{name} = tt.extern_elementwise %v, %v {{libname = "", libpath = "", pure = true, symbol = "{name}_rn"}} : '
            f"({elem}, {elem}) -> {elem}",
            f"    tt.store %x, %{name} : !tt.ptr<{elem}>",
        ]
    text = KERNEL.replace("f32", elem).replace("BODY", "\n".join(lines))
    for image in build(request(text, target)).images:
        assert b"__ocml" not in image.code  # a wrong name would stay, as an undefined symbol; ptxas refuses one


def test_guard_adds_a_check_per_access_and_removes_claims():
    body = WIDE + (
        "    %m = arith.muli %n, %n {tt.divisibility = dense<16> : tensor<1xi32>} : i32\n"
        "    %s = tt.splat %m : i32 -> tensor<64xi32>\n    %i = arith.addi %s, %r overflow<nsw> : tensor<64xi32>\n"
        "    %q = arith.divsi %i, %s : tensor<64xi32>\n"
        "    %p = tt.splat %x : !tt.ptr<f32> -> tensor<64x!tt.ptr<f32>>\n"
        "    %a = tt.addptr %p, %q : tensor<64x!tt.ptr<f32>>, tensor<64xi32>\n"
        "    %v = tt.load %a : tensor<64x!tt.ptr<f32>>\n    tt.store %a, %v : tensor<64x!tt.ptr<f32>>"
    )
    made = guarded(KERNEL.replace("BODY", body))
    assert "nsw" not in made.text and "divisibility = 16" in made.text.splitlines()[1]  # the claim of the status words
    assert made.text.count("divisibility") == 1
    assert made.text.count("arith.cmpi ult") == 2 and made.extra == ((0, 4),) and made.writes == (True, False)
    assert re.search(r"arith\.select %w\d+, %w\d+, %\w+ : tensor<64xi1>, tensor<64xi32>\n[^\n]*arith\.divsi", made.text)
    assert [p.split(" ")[0] for p in made.places] == ["tt.load", "tt.store"]


def test_claims_of_arguments_returns_powers_of_two():
    head = (
        "tt.func public @k(%x: !tt.ptr<f32> {tt.divisibility = 48 : i32}, %n: i32, "
        "%m: i32 {tt.divisibility = 0 : i32}) attributes"
    )
    assert claims_of(head, 3) == (16, 1, 1)
    assert claims_of(head, 2) == (1, 1)


def test_guard_of_pointer_from_a_number_compares_addresses():
    body = (
        "    %a = tt.ptr_to_int %x : !tt.ptr<f32> -> i64\n    %w = arith.extsi %n : i32 to i64\n"
        "    %b = arith.addi %a, %w : i64\n    %p = tt.int_to_ptr %b : i64 -> !tt.ptr<f32>\n"
        "    %v = tt.load %p : !tt.ptr<f32>\n    tt.store %x, %v : !tt.ptr<f32>"
    )
    made = guarded(KERNEL.replace("BODY", body))
    assert made.extra == ((0, 1), (0, 4))
    assert "arith.cmpi eq" in made.text  # the address must also be a multiple of the element size


def test_guard_of_loops_checks_whether_the_launch_must_end():
    body = """    %zero = arith.constant 0.0 : f32
    scf.while : () -> () {
      %v = tt.load %x {isVolatile = true} : !tt.ptr<f32>
      %c = arith.cmpf oeq, %v, %zero : f32
      scf.condition(%c)
    } do {
      %c0 = arith.constant 0 : i32
      %c1 = arith.constant 1 : i32
      scf.for %i = %c0 to %n step %c1  : i32 {
        tt.store %x, %zero : !tt.ptr<f32>
      }
      scf.yield
    }"""
    made = guarded(KERNEL.replace("BODY", body))
    assert made.text.count("tt.atomic_rmw or, relaxed, gpu, %ws") == 2
    condition = re.search(r"(%w\d+) = arith\.andi %\w+, %w\d+ : i1\n\s*scf\.condition\(\1\)", made.text)
    assert condition and re.search(r"scf\.for %\w+ = %\w+ to %w\d+ step", made.text)


JUMPS = """    %c0 = arith.constant 0 : i32
    %c = arith.cmpi sge, %n, %c0 : i32
    cf.cond_br %c, ^bb1, ^bb2
  ^bb1:
    FIRST
  ^bb2:
    %d = arith.cmpi sgt, %n, %c0 : i32
    cf.cond_br %d, ^bb1, ^bb3
  ^bb3:
    %v = tt.load %x : !tt.ptr<f32>
    tt.store %x, %v : !tt.ptr<f32>"""


def test_guard_of_jumps_to_an_earlier_return():
    made = guarded(KERNEL.replace("BODY", JUMPS.replace("FIRST", "tt.return")))
    assert made.text.count("tt.return") == 2 and made.writes == (True, False)


def test_guard_of_jumps_in_a_cycle_is_refused():
    with pytest.raises(ForeignError, match="a jump back cannot be stopped on a GPU"):
        guarded(KERNEL.replace("BODY", JUMPS.replace("FIRST", "cf.br ^bb2")))


def test_guard_keeps_cache_hints():
    hint = "{cachePolicy = #tt.cache_policy<cache_modifier = cg, eviction_policy = evict_last>}"
    body = f"    %v = tt.load %x {hint} : !tt.ptr<f32>\n    tt.store %x, %v {hint} : !tt.ptr<f32>"
    made = guarded(KERNEL.replace("BODY", body))
    assert made.text.count(hint) == 2


def test_guard_of_several_functions_is_refused():
    two = KERNEL.replace("BODY", "").replace("module {\n", "module {\n  tt.func private @f() {\n    tt.return\n  }\n")
    with pytest.raises(ForeignError, match="must have only the function k"):
        guard(two, "k", ("*f32", "i32"), (1, 1), 128)
